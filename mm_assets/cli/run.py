"""`mm-assets run`: every pending partition, from shards to a manifest."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import report_missing_streams, report_registration, wait_for_shards
from mm_assets.errors import ConfigError, MmAssetsError
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.orchestration.launch import PartitionRun
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.store import DatasetStore


@click.command()
@dataset_options(undeclared=True)
@click.option("--partition", "-p", "keys", multiple=True, metavar="K", help="Run these partitions, pending or not.")
@click.option("--jobs", "-j", "num_processes", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
def command(chosen: DatasetChoice, keys: tuple[str, ...], num_processes: int) -> None:
    """Register the shards, run every pending partition, make the manifests."""
    from mm_assets.orchestration.launch import make_manifest, open_instance, register_dataset
    from mm_assets.pipeline.publish import missing_streams, pending_partitions
    from mm_assets.pipeline.store import DatasetStore

    work: list[tuple[DatasetSpec, str]] = []
    failed: list[str] = []
    datasets: dict[str, DatasetStore] = {}
    specs = chosen.specs()
    with open_instance() as instance:
        for spec in specs:
            try:
                dataset = DatasetStore(spec)
                found = register_dataset(instance, dataset, sleep=wait_for_shards(spec))
            except MmAssetsError as error:
                if len(specs) == 1:
                    raise
                failed.append(f"{spec.name}: {error}")  # one dataset's trouble is not the others'
                continue
            datasets[spec.name] = dataset
            report_registration(spec.name, found)
            registered = {partition.key for partition in found.partitions}
            wanted = [key for key in keys if key in registered] if keys else pending_partitions(dataset)
            work += [(spec, key) for key in wanted]
    missing = [key for key in keys if key not in {key for _, key in work}]
    if missing:
        names = ", ".join(spec.name for spec in specs)
        raise ConfigError("arguments", "--partition", f"{missing[0]!r} is not a registered partition of {names}")
    began = time.perf_counter()
    ended = _run_all(work, num_processes)
    failed += [f"{r.dataset}/{r.partition}: {line}" for r in ended for line in r.failures]
    for name, dataset in datasets.items():
        failed += [f"{name}: manifest: {line}" for line in make_manifest(dataset.spec).failures]
    _print_summary(datasets, ended, time.perf_counter() - began)
    for name, dataset in datasets.items():
        report_missing_streams(chosen, name, missing_streams(dataset))
    for result in ended:
        records = datasets[result.dataset].records(result.partition).values()
        for line in dict.fromkeys((*(note for record in records for note in record.notes), *result.warnings)):
            click.echo(f"warning: {result.dataset}/{result.partition}: {line}", err=True)
    for line in failed:
        click.echo(f"failed: {chosen.complete(line)}", err=True)
    if failed:
        sys.exit(1)


def _run_all(work: Sequence[tuple[DatasetSpec, str]], num_processes: int) -> list[PartitionRun]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mm_assets.orchestration.launch import run_partitions

    ended: list[PartitionRun] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("partitions", total=len(work))
        for result in run_partitions(work, num_processes=num_processes):
            ended.append(result)
            progress.update(task, advance=1, description=f"{result.dataset}/{result.partition}")
            if not console.is_terminal:
                click.echo(f"{result.dataset}/{result.partition}: {'done' if result.ok else 'FAILED'}", err=True)
    return ended


def _print_summary(datasets: Mapping[str, DatasetStore], ended: Sequence[PartitionRun], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from mm_assets.pipeline.chain import RECORDED_STAGES

    numbers = [(stage, heading, count) for stage in RECORDED_STAGES for heading, count in stage.numbers]
    table = Table("dataset", "partition", "status", title=f"{counted(len(ended), 'partition')} run in {seconds:.1f} s")
    for _, heading, _ in numbers:
        table.add_column(heading, justify="right")
    results = {(result.dataset, result.partition): result for result in ended}
    for name, dataset in datasets.items():
        for key in dataset.partitions():
            if result := results.get((name, key)):
                status = "done" if result.ok else "FAILED"
            else:
                status = "pending" if dataset.marker(key) is None else "unchanged"
            # The tables of a failed run do not hold all of the shard.
            records = {} if status == "FAILED" else dataset.records(key)
            shown = (f"{records[s].counts.get(count, 0):,}" if s in records else "-" for s, _, count in numbers)
            table.add_row(name, key, status, *shown)
    Console(width=max(Console().width, 110)).print(table)
    manifests = []
    for name, dataset in datasets.items():
        preset = dataset.schema().pack.get("preset") if dataset.partitions() else None
        url = dataset.store.url_of("manifest.json")
        click.echo(f"{name}: {url}" + (f" (preset {preset})" if preset else ""))
        if any(marker["num_samples"] for marker in dataset.markers().values()):
            manifests.append(url)
    if manifests:
        inspect = shlex.join(["mm-assets", "inspect", manifests[0], "--sample", "0"])
        click.echo(f"next: {inspect}, or mm_assets.open({manifests[0]!r}) in Python")
