"""`mm-assets sync`: record in Dagster what is published and was not recorded."""

from __future__ import annotations

import click

from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo
from mm_assets.summaries import counted


@click.command()
@dataset_options()
def command(chosen: DatasetChoice) -> None:
    """Record in Dagster what is published and was not recorded: a load was killed, or the database was away."""
    from mm_assets.orchestration.launch import open_instance, sync

    datasets = chosen.stores()
    open_instance().dispose()
    for dataset in datasets:
        recorded = sync(dataset)
        manifest = " and the manifest" if recorded.manifest else ""
        echo(f"{dataset.spec.name}: {counted(recorded.num_partitions, 'partition')}{manifest} recorded")
