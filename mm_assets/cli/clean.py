"""`mm-assets clean`: removes files, records, manifests and partitions of Dagster that are not needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mm_assets.cli.document import json_option, write_document
from mm_assets.cli.options import DatasetChoice, dataset_options, expect_settings_of_runs
from mm_assets.cli.output import echo
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.state.folder import DatasetStore


@click.command()
@dataset_options()
@click.option("--keep", type=click.IntRange(1), help="Manifests to keep; the declaration's number otherwise.")
@click.option("--dry-run", is_flag=True, help="Dry run: list what would be removed, and remove nothing.")
@json_option
def command(chosen: DatasetChoice, keep: int | None, dry_run: bool) -> None:
    """Remove files, records and manifests that nothing needs, and Dagster's partitions without shards.

    A file is removed a day after the record or manifest that named it: other processes may still read it.
    """
    from mm_assets.pipeline.state.clean import clean

    document = {}
    verb = "would remove" if dry_run else "removed"
    datasets = chosen.stores()
    for dataset in datasets:
        expect_settings_of_runs(dataset)
    for dataset in datasets:
        name, report = dataset.spec.name, clean(dataset, keep=keep, dry_run=dry_run)
        partitions = _remove_partitions(chosen, dataset, dry_run=dry_run)
        document[name] = {
            "removed": not dry_run,
            "files": list(report.files),
            "num_bytes": report.num_bytes,
            "num_waiting": report.num_waiting,
            "partitions": partitions,
        }
        if not report.files and not partitions:
            echo(f"{name}: nothing to remove" + (" yet" if report.num_waiting else ""))
        if report.files:
            echo(f"{name}: {verb} {counted(len(report.files), 'file')}, {report.num_bytes:,} bytes")
        for file in report.files:
            echo(f"  {file}")
        if report.num_waiting:
            files = counted(report.num_waiting, "file")
            echo(f"{name}: {files} that no record names: a `clean` in a day or later removes what is not needed then")
        if partitions:
            echo(f"{name}: {verb} {counted(len(partitions), 'partition')} from Dagster, which keeps their history")
        for key in partitions:
            echo(f"  {key}")
    write_document({"datasets": document})


def _remove_partitions(chosen: DatasetChoice, dataset: DatasetStore, *, dry_run: bool) -> list[str]:
    """Removes partitions from the Dagster instance, if there is one, and returns their keys."""
    from mm_assets.cli.project import project_folder
    from mm_assets.pipeline.dagster_home import find_dagster_home, missing_databases

    home = find_dagster_home(project_folder(Path.cwd()))
    if not (home / "dagster.yaml").exists() or missing_databases(home):
        return []
    from mm_assets.orchestration.launch import remove_partitions

    os.environ["DAGSTER_HOME"] = str(home)
    keys = remove_partitions(dataset, dry_run=dry_run)
    if keys is None:
        sync = chosen.complete(f"`mm-assets sync --dataset {dataset.spec.name}`")
        detail = f"partitions of Dagster are left alone: it has not recorded the newest manifest: run {sync} first"
        echo(f"{dataset.spec.name}: {detail}", err=True)
    return keys or []
