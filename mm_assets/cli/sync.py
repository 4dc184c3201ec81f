"""`mm-assets sync`: record in Dagster what was done and not recorded, and make the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo
from mm_assets.errors import ConfigError
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.state.folder import DatasetStore


@click.command()
@dataset_options(undeclared=True)
@json_option
def command(chosen: DatasetChoice) -> None:
    """Record in Dagster what slices did, or what a load that was killed had published, and make the manifest."""
    from mm_assets.orchestration.launch import open_instance, sync

    open_instance().dispose()  # an unavailable database is named before definitions that need it are loaded
    datasets = list(_datasets(chosen))
    document = {}
    for dataset, is_declared in datasets:
        recorded = sync(dataset, makes_manifest=is_declared)
        name = dataset.spec.name
        document[name] = {
            "recorded": recorded.num_partitions,
            "failed": list(recorded.failed),
            "manifest_made": is_declared,
            "manifest_recorded": recorded.manifest,
        }
        partitions = [counted(recorded.num_partitions, "partition")] if recorded.num_partitions else []
        what = " and ".join([*partitions, *(["the manifest"] if recorded.manifest else [])])
        echo(f"{name}: recorded {what}" if what else f"{name}: nothing to record")
        if recorded.failed:
            losses = chosen.complete(f"`mm-assets losses --dataset {name}`")
            echo(f"{name}: {counted(len(recorded.failed), 'partition')} recorded as failed: {losses}")
        if not is_declared:
            why = "its declaration is not known here: give --shards or --module"
            echo(f"{name}: no manifest was made, because {why}", err=True)
    write_document({"datasets": document})


def _datasets(chosen: DatasetChoice) -> Iterator[tuple[DatasetStore, bool]]:
    """The datasets, and whether the declaration of each is that of its shards."""
    from mm_assets.pipeline.state.folder import DatasetStore

    try:
        found = [DatasetStore(spec) for spec in chosen.specs()]
    except ConfigError as error:
        if chosen.shards is not None or error.key not in ("--dataset", "--module"):
            raise
        found = []
    declared = {dataset.spec.name: dataset for dataset in found if _is_registered_with(dataset)}
    for dataset in found if found and len(declared) == len(found) else chosen.stores():
        of_spec = declared.get(dataset.spec.name)
        yield (dataset, False) if of_spec is None else (of_spec, True)


def _is_registered_with(dataset: DatasetStore) -> bool:
    return dataset.spec.is_made_from(dataset.registered().source)
