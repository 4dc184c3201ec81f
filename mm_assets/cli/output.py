"""Output that commands share: escaped text, errors in one line, losses, waiting, streams that a manifest lacks."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import click

from mm_assets.cli.document import wants_json
from mm_assets.cli.secrets import masked
from mm_assets.errors import ConfigError, MmAssetsError

if TYPE_CHECKING:
    from rich.console import Console

    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.state.losses import LossTotal
    from mm_assets.pipeline.state.registration import Registration
    from mm_assets.pipeline.state.staleness import Stale

__all__ = [
    "CommandCompleter",
    "echo",
    "error_text",
    "look_command",
    "named_in_part",
    "print_next",
    "print_table",
    "printable",
    "report_error",
    "report_faults",
    "report_losses",
    "report_missing_streams",
    "report_planned",
    "report_registration",
    "report_skipped",
    "size_text",
    "table_console",
    "wait_for_shards",
]

_SHOWN = 5  # partitions named in one line
_LISTED = 50  # partitions or shards that have a line each
_UNBROKEN = 1 << 12  # columns, where no terminal shows a table
_READABLE = 24  # characters of a line of a long text, at least


class CommandCompleter(Protocol):
    """The datasets that a command was given: its options go into the commands that messages suggest."""

    def complete(self, text: str) -> str:
        """Returns a message whose suggested commands have the options that this one was given."""


def printable(text: str) -> str:
    """Text for a terminal, without secrets: names come from shards, and their control characters are shown escaped."""
    text = masked(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def echo(text: str, *, err: bool = False) -> None:
    """Writes a line that may hold names from shards; to standard output only where that is not for a document."""
    if err or not wants_json():
        click.echo(printable(text), err=err)


def look_command(command: str, url: str, own_fields: Iterable[str], *options: str) -> str:
    """A command that shows a packed file or manifest, with the import paths of the user's own fields in it."""
    fields = [word for path in sorted(own_fields) for word in ("--field", path)]
    return shlex.join(["mm-assets", command, url, *options, *fields])


def table_console() -> Console:
    """What prints tables: as wide as the terminal; unbroken where none shows them."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_UNBROKEN)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    wrapped: Collection[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Writes a table as `echo` a line; in a narrow terminal without lines, in a narrower one its rows as paragraphs.

    Lines are left out rather than cells wrapped. If even a table without lines is too wide, columns of `optional` are
    left out first.

    Args:
        headings: of the columns.
        rows: the cells of each row.
        numbers: headings of columns of numbers.
        wrapped: headings of columns of long texts, which may have several lines in a row.
        optional: headings of columns that a narrow terminal need not show, those to leave out first first; `--json`
            has all.
    """
    from rich.cells import cell_len
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    if wants_json():
        return
    console = table_console()
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = {heading: max(map(cell_len, (heading, *cells))) for heading, *cells in zip(headings, *shown, strict=True)}
    long = {heading for heading in wrapped if widths[heading] > _READABLE}

    def least_width(headings: Sequence[str], *, has_lines: bool) -> int:
        between = 3 * len(headings) + 1 if has_lines else 2 * (len(headings) - 1)
        return between + sum(_READABLE if heading in long else widths[heading] for heading in headings)

    for heading in optional:
        if heading in headings and least_width(headings, has_lines=False) > console.width:
            place = headings.index(heading)
            headings = [*headings[:place], *headings[place + 1 :]]
            shown = [[*row[:place], *row[place + 1 :]] for row in shown]
    full_width = 2 * (len(headings) - 1) + sum(widths[heading] for heading in headings)
    is_wide = least_width(headings, has_lines=True) <= console.width
    is_wide &= not full_width <= console.width < full_width + len(headings) + 3
    table = Table() if is_wide else Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in numbers else "left",
            overflow="fold",
            no_wrap=heading not in long,
        )
    if least_width(headings, has_lines=is_wide) <= console.width:
        for row in shown:
            table.add_row(*map(escape, row))
        console.print(table)
        return
    for row in shown:
        named = dict(zip(headings, row, strict=True))
        short = ", ".join(f"{heading} {cell}" for heading, cell in named.items() if heading not in long)
        console.print(escape(short), highlight=False)
        for heading, cell in named.items():
            if heading in long:
                console.print(Padding(f"{heading}: {escape(cell)}", (0, 0, 0, 2), expand=False), highlight=False)


def print_next(steps: Iterable[str]) -> None:
    """Writes what a user may do next, on a terminal only: a command that is too long has its lines for itself."""
    console = table_console()
    if not console.is_terminal:
        return
    for number, step in enumerate(steps):
        command, mark, effect = step.rpartition("` ")
        is_long = len(step) + 6 > console.width and mark
        lines = (command + mark.strip(), f"  {effect}") if is_long else (step,)
        for place, line in enumerate(lines):
            echo(f"{'      ' if number or place else 'next: '}{line}")


def report_losses(chosen: CommandCompleter, dataset: str, totals: Sequence[LossTotal]) -> None:
    """Writes how much was dropped, lost or has a fault, as a table by reason, then the first of each and what to do."""
    from mm_assets.pipeline.state.losses import totals_said

    echo(f"{dataset}: {totals_said(totals)}")
    if not totals:
        return
    cells = [(t.example.kind, t.example.stage, t.example.reason, f"{t.count:,}") for t in totals]
    print_table(("kind", "stage", "reason", "count"), cells, numbers=("count",), wrapped=("reason",))
    for total in totals:
        loss = total.example
        sample = "" if loss.sample_id is None else f"sample {loss.sample_id}"
        first = ": ".join(filter(None, (loss.partition, loss.place or sample, loss.detail)))
        echo(f"{loss.reason}: the first is {first}")
        echo(f"  what to do: {chosen.complete(loss.advice)}")


def report_error(error: MmAssetsError | OSError, chosen: CommandCompleter | None) -> int:
    """Writes an error in one line to standard error and returns the exit code.

    Raises:
        OSError: it concerns no path, so its traceback is needed.
    """
    for line in f"error: {error_text(error, chosen)}".splitlines():  # DuckDB's have several
        echo(line, err=True)
    return 2 if isinstance(error, ConfigError) else 1


def error_text(error: MmAssetsError | OSError, chosen: CommandCompleter | None) -> str:
    """The message of an error, with the given options in the commands that it suggests; errors as `report_error`."""
    if isinstance(error, OSError) and not isinstance(error, MmAssetsError):
        if error.filename is None:
            raise error
        return f"{error.filename}: {error.strerror}"
    return chosen.complete(str(error)) if chosen else str(error)


def wait_for_shards(spec: DatasetSpec) -> Callable[[float], None]:
    """A function that waits until young shards have settled, and says so."""

    def wait(seconds: float) -> None:
        echo(f"{spec.name}: waiting {seconds:g} s for young shards to settle (settle_seconds)", err=True)
        time.sleep(seconds)

    return wait


def report_registration(
    chosen: CommandCompleter, spec: DatasetSpec, found: Registration, rollup: str | None = None
) -> None:
    """Writes to standard error which shards are missing or too young, what is odd, and what makes Dagster slow.

    Args:
        chosen: completes commands.
        spec: the declaration.
        found: the registration.
        rollup: the message of `start_rollup`.
    """
    from mm_assets.pipeline.state.registration import slow_pages

    dataset = spec.name
    for key in found.removed[:_LISTED]:
        echo(f"{dataset}/{key}: its shards are missing; the next manifest leaves it out", err=True)
    if (more := len(found.removed) - _LISTED) > 0:
        echo(f"{dataset}: {more:,} more partitions whose shards are missing; --json lists them", err=True)
    report_skipped(dataset, found.skipped)
    for url in found.unsettled[:_LISTED]:
        echo(f"{dataset}: not taken, still changing or too young: {url}", err=True)
    if (more := len(found.unsettled) - _LISTED) > 0:
        echo(f"{dataset}: {more:,} more shards not taken; --json of `mm-assets register` lists them", err=True)
    if found.decision is not None and found.decision.notes:
        for note in found.decision.notes:
            echo(f"{dataset}: {note}", err=True)
        command = chosen.complete(f"`mm-assets plan --dataset {dataset}`")
        echo(f"{dataset}: {command} shows how the layout was decided", err=True)
    slow = rollup or slow_pages(spec, len(found.partitions))
    if slow is not None:
        echo(f"{dataset}: {slow}", err=True)


def report_skipped(dataset: str, skipped: Sequence[str]) -> None:
    """Writes to standard error which files are in no partition, and what to do."""
    for line in skipped[:_LISTED]:
        echo(f"{dataset}: {line}", err=True)
    if (more := len(skipped) - _LISTED) > 0:
        echo(f"{dataset}: {more:,} more are skipped", err=True)


def size_text(num_bytes: int) -> str:
    """A number of bytes for people, with a unit of powers of 1,000."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


def named_in_part(keys: Sequence[str]) -> str:
    """The first few of several partitions, and how many more there are."""
    return ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")


def report_missing_streams(chosen: CommandCompleter, dataset: str, missing: Mapping[str, tuple[str, ...]]) -> None:
    """Writes to standard error which added streams readers do not see, and the command that completes them."""
    for name, keys in missing.items():
        advice = chosen.complete(f"`mm-assets add-stream --dataset {dataset} --name {name}`")
        line = f"readers do not see the stream {name!r}: it is missing in {named_in_part(keys)}"
        echo(f"{dataset}: {line}; add it with {advice} and its --field and --values", err=True)


def report_planned(dataset: str, planned: Mapping[str, Stale]) -> None:
    """Writes where a run starts each partition, and why; on a terminal those of many partitions as `report_faults`."""
    if len(planned) > _LISTED and table_console().is_terminal:
        report_faults(planned)
        return
    for key, stale in planned.items():
        echo(f"{dataset}/{key}: from {stale.first.name}: {stale.message}")


def report_faults(stale: Mapping[str, Stale]) -> None:
    """Writes a table of the partitions that have to run, by the stage to start at and the reason."""
    from mm_assets.pipeline.state.staleness import by_reason

    print_table(
        ("starts at", "why", "partitions", "first of them"),
        [
            (first.name, reason, f"{len(keys):,}", named_in_part(keys))
            for (first, reason), keys in by_reason(stale).items()
        ],
        numbers=("partitions",),
        wrapped=("why", "first of them"),
    )
