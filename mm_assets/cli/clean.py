"""`mm-assets clean`: removes packed files and manifests that are not needed."""

from __future__ import annotations

import click

from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo
from mm_assets.summaries import counted


@click.command()
@dataset_options()
@click.option("--keep", type=click.IntRange(1), help="Manifests to keep; the declaration's number otherwise.")
@click.option("--dry-run", is_flag=True, help="Dry run: list what would be removed, and remove nothing.")
def command(chosen: DatasetChoice, keep: int | None, dry_run: bool) -> None:
    """Remove packed files and manifests that no kept manifest needs."""
    from mm_assets.pipeline.publish import clean

    for dataset in chosen.stores():
        report = clean(dataset, keep=keep, dry_run=dry_run)
        if not report.files:
            echo(f"{dataset.spec.name}: nothing to remove")
            continue
        verb = "would remove" if dry_run else "removed"
        echo(f"{dataset.spec.name}: {verb} {counted(len(report.files), 'file')}, {report.num_bytes:,} bytes")
        for name in report.files:
            echo(f"  {name}")
