"""`mm-assets diff`: what differs between two versions of a dataset, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.document import json_option, wants_json, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo, look_command, print_next, print_table
from mm_assets.errors import ConfigError
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.explore.diff import PartitionDiff, SampleChange, VersionDiff


@click.command()
@dataset_options(single=True)
@click.argument("old", metavar="V1")
@click.argument("new", metavar="V2", default="newest")
@click.option(
    "--samples", "shown", default=20, show_default=True, metavar="N", help="Samples listed of each partition; -1: all."
)
@json_option
def command(chosen: DatasetChoice, old: str, new: str, shown: int) -> None:
    """Show which samples were added, removed or changed from version V1 to V2, and why.

    A version is `newest`, `previous`, the first 6 or more digits of a manifest's digest (the name of its file in
    `manifests/`), or the path or URL of a manifest. Partitions with the same files are not read.
    """
    from mm_assets.packing.plan import declared_imports
    from mm_assets.pipeline.explore.diff import diff, find_version

    stores = chosen.stores()
    if len(stores) != 1:
        known = ", ".join(s.spec.name for s in stores)
        raise ConfigError("arguments", "--dataset", f"name one dataset; declared: {known}")
    (dataset,) = stores
    found = diff(dataset, find_version(dataset, old), find_version(dataset, new))
    limit = None if shown < 0 else shown
    if wants_json():
        _write_json(dataset.spec.name, found, limit)
    else:
        _print(dataset.spec.name, found, limit)
        view = look_command("view", dataset.store.url, declared_imports(dataset.spec.pack))
        print_next([f"{view} (page Versions: both side by side)"])


def _print(dataset: str, found: VersionDiff, limit: int | None) -> None:
    echo(f"{dataset}: {found.old.digest[:12]} ({found.old.num_samples:,} samples) to "
         f"{found.new.digest[:12]} ({found.new.num_samples:,} samples)")  # fmt: skip
    for said in found.settings:
        echo(f"  {said}")
    totals: Counter[str] = Counter()
    rows, items = [], []
    unknown = 0
    for partition in found:
        totals.update(partition.counts or {})
        unknown += partition.counts is None
        rows.append(_row(partition, found.settings))
        samples = found.samples(partition.partition, limit=limit)
        items += [_line(dataset, sample, found.settings) for sample in samples]
        left = sum((partition.counts or {}).values()) - (limit if limit is not None else 0)
        if limit is not None and left > 0:
            items.append(f"{dataset}/{partition.partition}: and {left:,} more; --samples -1 lists all")
    if rows:
        headings = ("partition", "state", "samples", "added", "removed", "changed", "why")
        print_table(headings, rows, numbers=headings[2:6], wrapped=("why",))
    for item in items:
        echo(item)
    echo(f"{dataset}: {_totals(totals)}; {counted(found.unchanged, 'partition')} the same")
    if unknown:
        echo(
            f"{dataset}: {counted(unknown, 'partition')} with known counts only: their old files were cleaned", err=True
        )


def _totals(totals: Counter[str]) -> str:
    return ", ".join(f"{totals[change]:,} {change}" for change in ("added", "removed", "changed"))


def _without(reasons: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Returns reasons without the clauses on settings that are printed above, for which one word stands."""
    own = [reason for reason in reasons if reason not in settings]
    return own if len(own) == len(reasons) else ["settings", *own]


def _row(partition: PartitionDiff, settings: Sequence[str]) -> tuple[str, ...]:
    counts = ("?", "?", "?") if partition.counts is None else [f"{n:,}" for n in partition.counts.values()]
    samples = f"{partition.num_old:,} to {partition.num_new:,}"
    why = "; ".join(filter(None, (*_without(partition.reasons, settings), partition.note)))
    return (partition.partition, partition.state, samples, *counts, why)


def _line(dataset: str, sample: SampleChange, settings: Sequence[str]) -> str:
    what = f"{sample.change} ({', '.join(sample.modalities)})" if sample.modalities else sample.change
    is_above = sample.reason == "settings" and sample.detail == "; ".join(settings)
    why = ": ".join(filter(None, (sample.reason, "" if is_above else sample.detail)))
    return f"{dataset}/{sample.partition}: {what}: {sample.sample_id}: {why}"


def _write_json(dataset: str, found: VersionDiff, limit: int | None) -> None:
    """Writes partition by partition: there may be very many."""
    totals: Counter[str] = Counter({"added": 0, "removed": 0, "changed": 0})

    def partitions() -> Iterator[dict[str, Any]]:
        for partition in found:
            totals.update(partition.counts or {})
            samples = islice(found.samples(partition.partition), limit)
            yield {**asdict(partition), "samples": [asdict(sample) for sample in samples]}

    document = {
        "old": {"digest": found.old.digest, "num_samples": found.old.num_samples},
        "new": {"digest": found.new.digest, "num_samples": found.new.num_samples},
        "settings": list(found.settings),
        "unchanged_partitions": found.unchanged,
        "partitions": partitions(),
        "totals": totals,  # which are known when the partitions are written
    }
    write_document({"datasets": {dataset: document}})
