"""`mm-assets index`: builds an index of embeddings, which `Dataset.search` uses."""

from __future__ import annotations

from dataclasses import asdict

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import field_option, parsed_options, storage_option
from mm_assets.cli.output import echo, size_text
from mm_assets.dataset.vectors import METRICS, Metric
from mm_assets.summaries import counted


@click.command()
@click.argument("source", metavar="SOURCE")
@click.option("--stream", "streams", multiple=True, required=True, metavar="NAME", help="Modality; repeatable.")
@click.option("--metric", type=click.Choice(METRICS), default="cosine", show_default=True, help="How it is searched.")
@field_option
@storage_option
@json_option
def command(source: str, streams: tuple[str, ...], metric: Metric, storage_options: tuple[str, ...]) -> None:
    """Build an index of the vectors of SOURCE, a manifest or folder, for `Dataset.search` (docs/embeddings.md).

    The index is in the dataset's folder, and is of the version that is open: run this again after new partitions were
    published. Only their vectors are written then. If nothing has changed, the index is verified.
    """
    from mm_assets.dataset.dataset import open as open_dataset

    summaries = {}
    with open_dataset(source, storage_options=parsed_options(storage_options) or None) as dataset:
        for name in streams:
            summary = dataset.build_index(name, metric=metric)
            summaries[name] = asdict(summary)
            verb = f"{summary.num_written:,} written" if summary.num_written else "up to date"
            size = f"{counted(summary.num_files, 'file')}, {size_text(summary.num_bytes)}"
            echo(f"{name}: {counted(summary.num_vectors, 'vector')} of {summary.dimensions}, {verb}, {size}")
            echo(f"  recall of the ten nearest: {summary.recall:.3f}")
            if summary.num_excluded:
                what = "with numbers that are not finite" + (", or zero" if metric == "cosine" else "")
                echo(f"  {counted(summary.num_excluded, 'vector')} left out: {what}")
            echo(f"  {summary.url}")
    write_document({"streams": summaries})
