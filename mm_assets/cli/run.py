"""`mm-assets run`: every pending partition, from shards to a manifest."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import report_missing_streams, wait_for_shards
from mm_assets.errors import ConfigError, MmAssetsError

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
    from mm_assets.pipeline.publish import missing_streams
    from mm_assets.pipeline.store import DatasetStore

    work: list[tuple[DatasetSpec, str]] = []
    failed: list[str] = []
    usable: list[DatasetSpec] = []
    specs = chosen.specs()
    with open_instance() as instance:
        for spec in specs:
            try:
                found = register_dataset(instance, DatasetStore(spec), sleep=wait_for_shards(spec))
            except MmAssetsError as error:
                if len(specs) == 1:
                    raise
                failed.append(f"{spec.name}: {error}")  # one dataset's trouble is not the others'
                continue
            usable.append(spec)
            for key in found.removed:
                click.echo(f"{spec.name}/{key}: its shards are gone; it leaves the manifest", err=True)
            for url in found.unsettled:
                click.echo(f"{spec.name}: not taken, still changing: {url}", err=True)
            work += [(spec, key) for key in _wanted(DatasetStore(spec), keys)]
    missing = [key for key in keys if key not in {key for _, key in work}]
    if missing:
        names = ", ".join(spec.name for spec in specs)
        raise ConfigError("arguments", "--partition", f"{missing[0]!r} is not a registered partition of {names}")
    began = time.perf_counter()
    ended = _run_all(work, num_processes)
    failed += [f"{r.dataset}/{r.partition}: {line}" for r in ended for line in r.failures]
    for spec in usable:
        made = make_manifest(spec)
        failed += [f"{spec.name}: manifest: {line}" for line in made.failures]
    _print_summary(usable, ended, time.perf_counter() - began)
    for spec in usable:
        report_missing_streams(chosen, spec.name, missing_streams(DatasetStore(spec)))
    for result in ended:
        for line in dict.fromkeys((*_notes(usable, result), *result.warnings)):
            click.echo(f"warning: {result.dataset}/{result.partition}: {line}", err=True)
    for line in failed:
        click.echo(f"failed: {chosen.complete(line)}", err=True)
    if failed:
        sys.exit(1)


def _notes(specs: Sequence[DatasetSpec], result: PartitionRun) -> list[str]:
    """The notes of the stages of a run."""
    from mm_assets.errors import SourceError
    from mm_assets.pipeline.chain import RECORDED_STAGES
    from mm_assets.pipeline.store import DatasetStore

    dataset = DatasetStore(next(spec for spec in specs if spec.name == result.dataset))
    notes: list[str] = []
    for stage in RECORDED_STAGES:
        try:
            notes += dataset.record(stage, result.partition).notes
        except SourceError:  # the run did not get there, which is reported as its failure
            break
    return notes


def _wanted(dataset: DatasetStore, keys: Sequence[str]) -> list[str]:
    from mm_assets.pipeline.publish import pending_partitions

    if not keys:
        return pending_partitions(dataset)
    registered = dataset.partitions()
    return [key for key in keys if key in registered]


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


def _print_summary(specs: Sequence[DatasetSpec], ended: Sequence[PartitionRun], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from mm_assets.pipeline.chain import RECORDED_STAGES
    from mm_assets.pipeline.store import DatasetStore

    noun = "partition" if len(ended) == 1 else "partitions"
    table = Table(title=f"{len(ended)} {noun} run in {seconds:.1f} s")
    for name in ("dataset", "partition", "status"):
        table.add_column(name)
    headings = [heading for stage in RECORDED_STAGES for heading, _ in stage.numbers]
    for name in headings:
        table.add_column(name, justify="right")
    results = {(r.dataset, r.partition): r for r in ended}
    for spec in specs:
        dataset = DatasetStore(spec)
        for key in dataset.partitions():
            result = results.get((spec.name, key))
            status = "unchanged" if result is None else "done" if result.ok else "FAILED"
            if result is None and dataset.marker(key) is None:
                status = "pending"
            # The tables of a failed run do not hold all of the shard.
            numbers = ["-"] * len(headings) if status == "FAILED" else _partition_numbers(dataset, key)
            table.add_row(spec.name, key, status, *numbers)
    console = Console(width=max(Console().width, 110))
    console.print(table)
    manifests = []
    for spec in specs:
        dataset = DatasetStore(spec)
        preset = dataset.schema().pack.get("preset") if dataset.partitions() else None
        url = dataset.store.url_of("manifest.json")
        click.echo(f"{spec.name}: {url}" + (f" (preset {preset})" if preset else ""))
        if any(marker["num_samples"] for marker in dataset.markers().values()):
            manifests.append(url)
    if manifests:
        inspect = shlex.join(["mm-assets", "inspect", manifests[0], "--sample", "0"])
        click.echo(f"next: {inspect}, or mm_assets.open({manifests[0]!r}) in Python")


def _partition_numbers(dataset: DatasetStore, key: str) -> list[str]:
    from mm_assets.pipeline.chain import RECORDED_STAGES

    shown = []
    for stage in RECORDED_STAGES:
        if not stage.numbers:
            continue
        made = dataset.store.exists(dataset.record_name(stage, key))
        counts = dataset.record(stage, key).counts if made else {}
        shown += [f"{counts.get(count, 0):,}" if made else "-" for _, count in stage.numbers]
    return shown
