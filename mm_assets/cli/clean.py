"""`mm-assets clean`: removes packed files and manifests that are not needed."""

from __future__ import annotations

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo
from mm_assets.summaries import counted


@click.command()
@dataset_options()
@click.option("--keep", type=click.IntRange(1), help="Manifests to keep; the declaration's number otherwise.")
@click.option("--dry-run", is_flag=True, help="Dry run: list what would be removed, and remove nothing.")
@json_option
def command(chosen: DatasetChoice, keep: int | None, dry_run: bool) -> None:
    """Remove packed files and manifests that no kept manifest needs."""
    from mm_assets.pipeline.state.clean import clean

    document = {}
    for dataset in chosen.stores():
        report = clean(dataset, keep=keep, dry_run=dry_run)
        document[dataset.spec.name] = {
            "removed": not dry_run,
            "files": list(report.files),
            "num_bytes": report.num_bytes,
        }
        if not report.files:
            echo(f"{dataset.spec.name}: nothing to remove")
            continue
        verb = "would remove" if dry_run else "removed"
        echo(f"{dataset.spec.name}: {verb} {counted(len(report.files), 'file')}, {report.num_bytes:,} bytes")
        for name in report.files:
            echo(f"  {name}")
    write_document({"datasets": document})
