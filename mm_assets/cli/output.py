"""Output that commands share: escaped text, errors in one line, losses, waiting, streams that a manifest lacks."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from mm_assets.errors import ConfigError, MmAssetsError

if TYPE_CHECKING:
    from rich.console import Console

    from mm_assets.cli.options import DatasetChoice
    from mm_assets.pipeline.losses import LossTotal
    from mm_assets.pipeline.pending import Stale
    from mm_assets.pipeline.register import Registration
    from mm_assets.pipeline.spec import DatasetSpec

__all__ = [
    "echo",
    "inspect_command",
    "named_in_part",
    "printable",
    "report_error",
    "report_faults",
    "report_losses",
    "report_missing_streams",
    "report_planned",
    "report_registration",
    "table_console",
    "wait_for_shards",
]

_SHOWN = 5  # partitions named in one line
_LISTED = 50  # partitions that have a line each on a terminal
_UNBROKEN = 1 << 12  # columns, where no terminal shows a table


def printable(text: str) -> str:
    """Text for a terminal: names and ids come from shards, and their control characters are shown escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def echo(text: str, *, err: bool = False) -> None:
    """Writes a line that may hold names from shards, to standard output or standard error."""
    click.echo(printable(text), err=err)


def inspect_command(url: str, own_fields: Iterable[str], *options: str) -> str:
    """The command that shows a packed file or manifest, with the import paths of the user's own fields in it."""
    fields = [word for path in sorted(own_fields) for word in ("--field", path)]
    return shlex.join(["mm-assets", "inspect", url, *options, *fields])


def table_console(columns: int = 0) -> Console:
    """What prints tables: as wide as the terminal, but at least so many columns; unbroken where none shows them."""
    from rich.console import Console

    console = Console()
    return Console(width=max(console.width, columns) if console.is_terminal else _UNBROKEN)


def report_losses(chosen: DatasetChoice, dataset: str, totals: Sequence[LossTotal]) -> None:
    """Writes how much was lost or has a fault, and a table by stage and reason, with the first and what to do."""
    from mm_assets.pipeline.losses import totals_said

    echo(f"{dataset}: {totals_said(totals)}")
    if not totals:
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for heading in ("kind", "stage", "reason", "count", "first of them", "what to do"):
        table.add_column(heading, justify="right" if heading == "count" else "left", overflow="fold")
    for total in totals:
        loss = total.example
        sample = "" if loss.sample_id is None else f"sample {loss.sample_id}"
        first = ": ".join(filter(None, (loss.partition, loss.place or sample, loss.detail)))
        cells = (loss.kind, loss.stage, loss.reason, f"{total.count:,}", first, loss.advice)
        table.add_row(*(escape(printable(chosen.complete(cell))) for cell in cells))
    table_console().print(table)


def report_error(error: MmAssetsError | OSError, chosen: DatasetChoice | None) -> int:
    """Writes an error in one line to standard error and returns the exit code.

    Raises:
        OSError: it concerns no path, so its traceback is needed.
    """
    if isinstance(error, OSError) and not isinstance(error, MmAssetsError):
        if error.filename is None:
            raise error
        echo(f"error: {error.filename}: {error.strerror}", err=True)
        return 1
    for line in f"error: {chosen.complete(str(error)) if chosen else error}".splitlines():  # DuckDB's have several
        echo(line, err=True)
    return 2 if isinstance(error, ConfigError) else 1


def wait_for_shards(spec: DatasetSpec) -> Callable[[float], None]:
    """A function that waits until young shards have settled, and says so."""

    def wait(seconds: float) -> None:
        echo(f"{spec.name}: waiting {seconds:g} s for young shards to settle (settle_seconds)", err=True)
        time.sleep(seconds)

    return wait


def report_registration(chosen: DatasetChoice, spec: DatasetSpec, found: Registration) -> None:
    """Writes to standard error which shards are gone or too young, what is odd, and what makes Dagster slow."""
    from mm_assets.orchestration.checks import slow_pages

    dataset = spec.name
    for key in found.removed:
        echo(f"{dataset}/{key}: its shards are gone; it leaves the next manifest", err=True)
    for url in found.unsettled:
        echo(f"{dataset}: not taken, still changing or too young: {url}", err=True)
    if found.decision is not None and found.decision.notes:
        for note in found.decision.notes:
            echo(f"{dataset}: {note}", err=True)
        command = chosen.complete(f"`mm-assets plan --dataset {dataset}`")
        echo(f"{dataset}: {command} shows how the layout was decided", err=True)
    slow = slow_pages(spec, len(found.partitions))
    if slow is not None:
        echo(f"{dataset}: {slow}", err=True)


def named_in_part(keys: Sequence[str]) -> str:
    """The first few of several partitions, and how many more there are."""
    return ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")


def report_missing_streams(chosen: DatasetChoice, dataset: str, missing: Mapping[str, tuple[str, ...]]) -> None:
    """Writes to standard error which added streams the manifest lacks, why, and the command that adds them."""
    for name, keys in missing.items():
        advice = chosen.complete(f"`mm-assets add-stream --dataset {dataset} --name {name}`")
        line = f"stream {name!r} is not in the manifest: it is missing in {named_in_part(keys)}"
        echo(f"{dataset}: {line}; add it with {advice} and its --field and --values", err=True)


def report_planned(dataset: str, planned: Mapping[str, Stale]) -> None:
    """Writes where a run starts each partition, and why; on a terminal those of many partitions as `report_faults`."""
    if len(planned) > _LISTED and table_console().is_terminal:
        report_faults(planned)
        return
    for key, stale in planned.items():
        echo(f"{dataset}/{key}: from {stale.first.name}: {stale.said}")


def report_faults(stale: Mapping[str, Stale]) -> None:
    """Writes a table of the partitions that have to run, by the stage to start at and the reason."""
    from rich.markup import escape
    from rich.table import Table

    from mm_assets.pipeline.pending import by_fault

    table = Table()
    for heading in ("starts at", "why", "partitions", "first of them"):
        table.add_column(heading, justify="right" if heading == "partitions" else "left", overflow="fold")
    for (first, reason), keys in by_fault(stale).items():
        cells = (first.name, reason, f"{len(keys):,}", named_in_part(keys))
        table.add_row(*(escape(printable(cell)) for cell in cells))
    table_console().print(table)
