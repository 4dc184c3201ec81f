"""The `mm-assets` command: register, run, inspect, verify, convert, add-stream, sql, clean.

Results go to standard output, everything else to standard error. Exit code 0: all went well; 1: something that was
asked for failed or a file is damaged; 2: the command was used wrongly.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mm_assets import __version__
from mm_assets.cli.add_stream import add_stream_options, run_add_stream, say_missing_streams
from mm_assets.errors import ConfigError, MmAssetsError

if TYPE_CHECKING:
    from mm_assets.dataset.dataset import Dataset
    from mm_assets.fields import Field
    from mm_assets.orchestration.launch import PartitionRun
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.store import DatasetStore

__all__ = ["main"]


def _reports_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Shows the library's own errors as one line; a bug keeps its traceback."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except MmAssetsError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2 if isinstance(error, ConfigError) else 1)
        except OSError as error:  # a path that is not there or may not be read; others are shown whole
            if error.filename is None:
                raise
            click.echo(f"error: {error.filename}: {error.strerror}", err=True)
            sys.exit(1)

    return wrapper


def _dataset_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--dataset", "-d", "names", multiple=True, metavar="D", help="Dataset name; may be given again."),
        click.option("--module", "-m", default="mm_assets.definitions", show_default=True, help="Definitions module."),
        click.option("--root", metavar="URL", help="Storage root, instead of the declaration's."),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), options, function)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mm-assets")
def main() -> None:
    """Multimodal tar shards to checked, packed training data."""


def _specs(names: Sequence[str], module: str, root: str | None) -> list[DatasetSpec]:
    """The declared datasets of these names, or all."""
    from mm_assets.orchestration.launch import declared_datasets

    declared = declared_datasets(module)
    unknown = [name for name in names if name not in declared]
    if unknown:
        detail = f"{unknown[0]!r} is not declared in {module}; declared: {', '.join(sorted(declared)) or 'none'}"
        raise ConfigError("arguments", "--dataset", detail)
    chosen = [declared[name] for name in dict.fromkeys(names)] if names else list(declared.values())
    return [spec.replace(root=root) if root else spec for spec in chosen]


def _adhoc_spec(names: Sequence[str], module: str, shards: str, root: str | None, pack: str | None) -> DatasetSpec:
    """A dataset that no YAML declares."""
    from mm_assets.orchestration.component import default_root
    from mm_assets.orchestration.launch import declared_datasets
    from mm_assets.pipeline.spec import DatasetSpec

    if len(names) > 1:
        raise ConfigError("arguments", "--dataset", "is given more than once; with --shards there is one dataset")
    if names and names[0] in declared_datasets(module):
        detail = f"{names[0]!r} is declared in {module} with shards of its own; give --shards another dataset's name"
        raise ConfigError("arguments", "--dataset", detail)
    config = {"name": names[0] if names else "default", "shards": _absolute(shards), "settle_seconds": 0, "pack": pack}
    return DatasetSpec.from_config(config, where="arguments", default_root=_absolute(root) if root else default_root())


def _absolute(url: str) -> str:
    from mm_assets.storage.urls import is_local, local_path

    return str(local_path(url)) if is_local(url) else url


def _store_of(names: Sequence[str], module: str, root: str | None) -> list[DatasetStore]:
    """Dataset folders for commands that need no shards: of declared datasets, or of any below `root`."""
    from mm_assets.orchestration.launch import ensure_dagster_home
    from mm_assets.pipeline.store import DatasetStore

    ensure_dagster_home()
    if root and names:
        from mm_assets.pipeline.spec import DatasetSpec

        place = _absolute(root)  # the shards of these datasets are not asked for, so their place stands for them
        configs = [{"name": name, "shards": place, "root": place} for name in names]
        return [DatasetStore(DatasetSpec.from_config(config, where="arguments")) for config in configs]
    return [DatasetStore(spec) for spec in _specs(names, module, _absolute(root) if root else None)]


def _waiting(spec: DatasetSpec) -> Callable[[float], None]:
    """Waits for young shards, and says so."""

    def wait(seconds: float) -> None:
        click.echo(f"{spec.name}: waiting {seconds:g} s for young shards to settle (settle_seconds)", err=True)
        time.sleep(seconds)

    return wait


@main.command()
@_dataset_options
@click.option("--new-schema", is_flag=True, help="Decide the dataset's schema anew; every partition becomes pending.")
@_reports_errors
def register(names: tuple[str, ...], module: str, root: str | None, new_schema: bool) -> None:
    """List the shards and make them partitions of the Dagster instance."""
    from mm_assets.orchestration.launch import open_instance, register_dataset
    from mm_assets.pipeline.store import DatasetStore

    with open_instance() as instance:
        for spec in _specs(names, module, root):
            found = register_dataset(instance, DatasetStore(spec), new_schema=new_schema, sleep=_waiting(spec))
            line = f"{spec.name}: {len(found.partitions)} partitions"
            for what, keys in (("new", found.added), ("changed", found.changed), ("gone", found.removed)):
                line += f", {len(keys)} {what}" if keys else ""
            click.echo(line)
            for key in found.removed:
                click.echo(f"  gone: {key}: its shards are no longer there; it leaves the next manifest", err=True)
            for url in found.unsettled:
                click.echo(f"  not taken: {url}: still changing or too young", err=True)
            for partition in found.partitions:
                click.echo(f"  {partition.key}")


@main.command()
@_dataset_options
@click.option("--shards", metavar="GLOB", help="Shards of a dataset that is not declared: folder, glob or URL.")
@click.option("--pack", metavar="PRESET", help="With --shards: pack preset; chosen by the first shard otherwise.")
@click.option("--partition", "-p", "keys", multiple=True, metavar="K", help="Run these partitions, pending or not.")
@click.option("--jobs", "-j", "num_processes", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@_reports_errors
def run(
    names: tuple[str, ...],
    module: str,
    root: str | None,
    shards: str | None,
    pack: str | None,
    keys: tuple[str, ...],
    num_processes: int,
) -> None:
    """Register the shards, run every pending partition, make the manifests."""
    from mm_assets.orchestration.launch import make_manifest, open_instance, register_dataset
    from mm_assets.pipeline.publish import missing_streams
    from mm_assets.pipeline.store import DatasetStore

    if pack and not shards:
        raise ConfigError("arguments", "--pack", "goes with --shards; a declared dataset names its preset itself")
    work: list[tuple[DatasetSpec, str]] = []
    failed: list[str] = []
    usable: list[DatasetSpec] = []
    with open_instance() as instance:
        specs = [_adhoc_spec(names, module, shards, root, pack)] if shards else _specs(names, module, root)
        for spec in specs:
            try:
                found = register_dataset(instance, DatasetStore(spec), sleep=_waiting(spec))
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
        raise ConfigError("arguments", "--partition", f"{missing[0]!r} is no registered partition of {_names(specs)}")
    began = time.perf_counter()
    ended = _run_all(work, num_processes)
    failed += [f"{r.dataset}/{r.partition}: {line}" for r in ended for line in r.failures]
    for spec in usable:
        made = make_manifest(spec)
        failed += [f"{spec.name}: manifest: {line}" for line in made.failures]
    _print_summary(usable, ended, time.perf_counter() - began)
    for spec in usable:
        say_missing_streams(spec.name, missing_streams(DatasetStore(spec)))
    for result in ended:
        for line in dict.fromkeys((*_notes(usable, result), *result.warnings)):
            click.echo(f"warning: {result.dataset}/{result.partition}: {line}", err=True)
    for line in failed:
        click.echo(f"failed: {line}", err=True)
    if failed:
        sys.exit(1)


def _notes(specs: Sequence[DatasetSpec], result: PartitionRun) -> list[str]:
    """What the stages of a run noted."""
    from mm_assets.errors import SourceError
    from mm_assets.pipeline.chain import RECORDED_STAGES
    from mm_assets.pipeline.store import DatasetStore

    dataset = DatasetStore(next(spec for spec in specs if spec.name == result.dataset))
    notes: list[str] = []
    for stage in RECORDED_STAGES:
        try:
            notes += dataset.record(stage, result.partition).notes
        except SourceError:  # the run did not come so far, which is told as its failure
            break
    return notes


def _names(specs: Sequence[DatasetSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


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
            # What the tables of a failed run hold is not what the shard holds.
            numbers = ["-"] * len(headings) if status == "FAILED" else _partition_numbers(dataset, key)
            table.add_row(spec.name, key, status, *numbers)
    console = Console(width=max(Console().width, 110))
    console.print(table)
    has_samples = False
    for spec in specs:
        dataset = DatasetStore(spec)
        preset = dataset.schema().pack.get("preset") if dataset.partitions() else None
        click.echo(f"{spec.name}: {dataset.store.url_of('manifest.json')}" + (f" (preset {preset})" if preset else ""))
        has_samples = has_samples or any(marker["num_samples"] for marker in dataset.markers().values())
    if has_samples:
        click.echo("next: mm-assets inspect MANIFEST --sample 0, or mm_assets.open(MANIFEST) in Python")


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


@main.command()
@click.argument("file")
@click.option("--sample", "-s", type=int, metavar="N", help="Also show sample N, counted from 0.")
@click.option(
    "--format", "form", type=click.Choice(["mult", "mstr"]), help="Which files of a manifest; MULT by default."
)
@_reports_errors
def inspect(file: str, sample: int | None, form: str | None) -> None:
    """Show what a packed file or manifest holds."""
    import mm_assets

    with mm_assets.open(file, format=form) as dataset:
        click.echo(f"{file}: {len(dataset):,} samples")
        pack = dataset.schema.get("pack")
        if pack and pack.get("preset"):
            click.echo(f"preset: {pack['preset']}")
        for key, value in dataset.schema.items():
            if key.endswith("_columns"):
                columns = ", ".join(f"{column['name']} {column['type']}" for column in value)
                click.echo(f"{key.replace('_', ' ')}: {columns or 'none'}")
            elif key not in ("modalities", "pack", "version"):
                click.echo(f"{key}: {json.dumps(value, ensure_ascii=False)}")
        for name, field in dataset.fields.items():
            click.echo(f"  {name}: {_settings(field)}, {int(dataset.presence(name).sum()):,} present")
        if sample is not None:
            if not -len(dataset) <= sample < len(dataset):
                raise ConfigError("arguments", "--sample", f"is {sample}, the file has {len(dataset)} samples")
            click.echo(f"sample {sample}: {dataset.sample_ids[sample]}")
            for name in dataset.names:
                click.echo(f"  {name}: {_shown(dataset, sample, name)}")


def _shown(dataset: Dataset, sample: int, name: str) -> str:
    """One value in a line; one that cannot be decoded does not hide the others."""
    from mm_assets.summaries import summarize

    try:
        value = dataset.read_sample(sample, [name])[name]
    except MmAssetsError as error:
        return f"NOT DECODED: {error}"
    return "absent" if value is None else summarize(value)


def _settings(field: Field) -> str:
    """A field with the settings that are not its defaults."""
    from mm_assets.fields import Field

    changed = []
    for one in dataclasses.fields(field):
        value = getattr(field, one.name)
        if one.default is dataclasses.MISSING or value != one.default:
            changed.append(f"{one.name}={_settings(value) if isinstance(value, Field) else repr(value)}")
    return f"{type(field).__name__}({', '.join(changed)})"


@main.command()
@click.argument("files", nargs=-1, required=True)
def verify(files: tuple[str, ...]) -> None:
    """Check every checksum and structure; exit 1 and name the damaged samples."""
    import mm_assets

    bad = False
    for file in files:
        try:
            with mm_assets.open(file) as dataset:
                report = dataset.verify()
        except MmAssetsError as error:
            bad = True
            click.echo(f"{file}: DAMAGED: {error}")
            continue
        except OSError as error:
            bad = True
            click.echo(f"{file}: cannot be read: {error.strerror or error}")
            continue
        bad = bad or not report.ok
        state = "ok" if report.ok else "DAMAGED"
        click.echo(f"{file}: {state}, {report.num_payloads:,} payloads checked, {len(report.damage)} faults")
        for damage in report.damage:
            place = f"sample {damage.sample} ({damage.sample_id})" if damage.sample is not None else "file"
            modality = f", {damage.modality}" if damage.modality else ""
            click.echo(f"  {place}{modality}: {damage.message}")
    if bad:
        sys.exit(1)


@main.command()
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@_reports_errors
def convert(source: str, target: str) -> None:
    """Turn MULT into MSTR or back, by OUT's extension; payloads are copied, never decoded."""
    from mm_assets.formats import convert as convert_file

    if Path(target).suffix not in (".mult", ".mstr"):
        raise ConfigError("arguments", "OUT", f"ends in {Path(target).suffix!r}, allowed: .mult, .mstr")
    summary = convert_file(source, target)
    click.echo(f"{target}: {summary.num_samples:,} samples, {summary.num_bytes:,} bytes")


@main.command("add-stream")
@add_stream_options
@_dataset_options
@_reports_errors
def add_stream(names: tuple[str, ...], module: str, root: str | None, **given: Any) -> None:
    """Add a modality to the MSTR file FILE in place, or to all published partitions of --dataset, and its manifest."""
    run_add_stream(_store_of(names, module, root) if names else None, **given)


@main.command()
@_dataset_options
@click.argument("query")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values; the default where no terminal reads them.")
@_reports_errors
def sql(names: tuple[str, ...], module: str, root: str | None, query: str, as_csv: bool) -> None:
    """Run QUERY over a dataset's tables in DuckDB.

    Views: raw_shards, rows, rejects, materialized_rows, filtered_rows, dropped, published. Each has a column
    `partition`; a table that no run has made yet has no view.
    """
    import duckdb

    from mm_assets.pipeline.publish import sql_connection

    stores = _store_of(names, module, root)
    if len(stores) != 1:
        known = ", ".join(s.spec.name for s in stores)
        raise ConfigError("arguments", "--dataset", f"name one dataset; declared: {known}")
    connection = sql_connection(stores[0])
    try:
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or ()]
        if as_csv or not sys.stdout.isatty():
            _print_csv(columns, cursor)
        else:
            _print_rows(columns, cursor.fetchmany(_SHOWN_ROWS + 1))
    except duckdb.Error as error:
        raise ConfigError("arguments", "QUERY", str(error)) from error
    finally:
        connection.close()


_WIDE = 6  # columns that a terminal shows side by side
_SHOWN_ROWS = 100  # of a query's result in a terminal; --csv gives all


def _print_csv(columns: Sequence[str], cursor: Any) -> None:
    import csv

    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    while batch := cursor.fetchmany(1000):
        writer.writerows(batch)


def _print_rows(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from mm_assets.summaries import summarize

    console = Console()
    if len(columns) > _WIDE:  # side by side no column would be readable
        for number, row in enumerate(rows[:_SHOWN_ROWS]):
            console.rule(f"row {number}", align="left")
            for column, cell in zip(columns, row, strict=True):
                if cell is not None:
                    console.print(f"{escape(column)}: {escape(summarize(cell))}", soft_wrap=True)
    else:
        table = Table()
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows[:_SHOWN_ROWS]:
            table.add_row(*("" if cell is None else escape(summarize(cell)) for cell in row))
        console.print(table)
    if len(rows) > _SHOWN_ROWS:
        click.echo(f"only the first {_SHOWN_ROWS} rows are shown; --csv gives all", err=True)


@main.command()
@_dataset_options
@click.option("--keep", type=click.IntRange(1), help="Manifests to keep; the declaration's number otherwise.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_reports_errors
def clean(names: tuple[str, ...], module: str, root: str | None, keep: int | None, dry_run: bool) -> None:
    """Remove packed files and manifests that no kept manifest needs."""
    from mm_assets.pipeline.publish import clean as clean_dataset

    for dataset in _store_of(names, module, root):
        report = clean_dataset(dataset, keep=keep, dry_run=dry_run)
        verb = "would remove" if dry_run else "removed"
        click.echo(f"{dataset.spec.name}: {verb} {len(report.files)} files, {report.num_bytes:,} bytes")
        for name in report.files:
            click.echo(f"  {name}")
