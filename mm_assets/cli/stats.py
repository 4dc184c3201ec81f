"""`mm-assets stats`: a published dataset in numbers: samples, bytes, lengths, sizes, durations, drops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, wants_json, write_document
from mm_assets.cli.losses import totals_document
from mm_assets.cli.main import leave_modules
from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo, print_table, size_text, table_console
from mm_assets.cli.plots import histogram_lines, number_text
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.explore.statistics import Distribution, Statistics


@click.command()
@dataset_options()
@click.option("--no-plots", is_flag=True, help="Tables without the histograms.")
@json_option
def command(chosen: DatasetChoice, no_plots: bool) -> None:
    """Show a published dataset in numbers: samples, bytes, text lengths, image sizes, durations, drops by filter.

    It reads the manifest, the row tables and the metadata records of packed files, and no media.
    """
    from mm_assets.pipeline.explore.statistics import statistics
    from mm_assets.pipeline.state.staleness import DatasetState

    document = {}
    leave_modules()
    for dataset in chosen.stores():
        found = statistics(DatasetState(dataset))
        document[found.dataset] = _as_json(found)
        if not wants_json():
            _print(found, plots=not no_plots)
    write_document({"datasets": document})


def _print(found: Statistics, *, plots: bool) -> None:
    sizes = ", ".join(f"{size_text(size)} {form.upper()}" for form, size in found.num_bytes.items())
    samples = f"{counted(found.num_samples, 'sample')} in {counted(found.num_partitions, 'partition')}"
    echo(f"{found.dataset}: {samples}, {sizes}, version {found.digest[:8]}")
    print_table(
        ("modality", "field", "samples", "of all", "bytes"),
        [
            (
                name,
                of.field or "unknown here",
                f"{of.present:,}",
                f"{of.present / found.num_samples:.0%}" if found.num_samples else "-",
                size_text(of.num_bytes),
            )
            for name, of in found.modalities.items()
        ],
        numbers=("samples", "of all", "bytes"),
    )
    if found.rows:
        lines = [(kind, f"{number:,}") for kind, number in found.rows.items()]
        print_table(("kind of row", "rows"), lines, numbers=("rows",))
    numbers = _distributions(found)
    if numbers:
        print_table(
            ("what", "number", "min", "median", "mean", "max"),
            [(_named(what, of), f"{of.count:,}", *_summary(of)) for what, of in numbers.items()],
            numbers=("number", "min", "median", "mean", "max"),
        )
    if found.losses:
        from mm_assets.pipeline.state.losses import totals_said

        lost = [(t.example.kind, t.example.stage, t.example.reason, f"{t.count:,}") for t in found.losses]
        echo(totals_said(found.losses))
        print_table(("kind", "stage", "reason", "count"), lost, numbers=("count",))
    else:
        echo("nothing was lost or dropped")
    if plots:
        for what, of in numbers.items():
            if len(of.bins) > 1:
                _plot(what, of)


def _distributions(found: Statistics) -> dict[str, Distribution]:
    numbers = {f"{kind} rows, length": of for kind, of in found.texts.items()}
    for name, modality in found.modalities.items():
        numbers |= {f"{name}, {what.replace('_', ' ')}": of for what, of in modality.distributions.items()}
    return numbers


def _named(what: str, of: Distribution) -> str:
    return what if what.endswith(of.unit) else f"{what} ({of.unit})"


def _summary(of: Distribution) -> list[str]:
    numbers = (of.low, of.median, of.mean, of.high)
    return [size_text(round(number)) if of.unit == "bytes" else number_text(number) for number in numbers]


def _plot(what: str, of: Distribution) -> None:
    console = table_console()
    echo(f"{_named(what, of)}:")
    for line in histogram_lines(of.edges, of.bins, width=console.width if console.is_terminal else None):
        echo(line)


def _as_json(found: Statistics) -> Mapping[str, Any]:
    facts = asdict(found)
    facts["losses"] = totals_document(found.losses)
    del facts["dataset"]
    return facts
