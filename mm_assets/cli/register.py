"""`mm-assets register`: the shards become partitions."""

from __future__ import annotations

import click

from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo, report_registration, wait_for_shards
from mm_assets.summaries import counted


@click.command()
@dataset_options(undeclared=True)
@click.option("--new-schema", is_flag=True, help="Decide the dataset's schema again; every partition becomes pending.")
def command(chosen: DatasetChoice, new_schema: bool) -> None:
    """List the shards and make them partitions of the Dagster instance."""
    from mm_assets.orchestration.launch import open_instance, register_dataset
    from mm_assets.pipeline.store import DatasetStore

    specs = chosen.specs()
    with open_instance() as instance:
        for spec in specs:
            found = register_dataset(instance, DatasetStore(spec), new_schema=new_schema, sleep=wait_for_shards(spec))
            line = f"{spec.name}: {counted(len(found.partitions), 'partition')}"
            for what, keys in (("new", found.added), ("changed", found.changed), ("gone", found.removed)):
                line += f", {len(keys)} {what}" if keys else ""
            echo(line)
            report_registration(chosen, spec, found)
            for partition in found.partitions:
                echo(f"  {partition.key}")
