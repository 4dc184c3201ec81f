"""Progress of a load: what is done, what is at work and at which stage, how fast, and how long it still takes.

A terminal shows it in place, a few times a second. Elsewhere it is a line every ten seconds while there is something
new, and a line for each partition that failed. All of it goes to standard error by a descriptor of its own: while a
step runs, Dagster redirects the usual one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Self, TextIO

from mm_assets.cli.output import printable
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mm_assets.pipeline.load.tasks import PartitionRun

__all__ = ["LoadProgress", "duration_text", "stderr_of_its_own"]

FRAMES = 4  # a second
LINE_SECONDS = 10.0
_SHOWN = 6  # running partitions that have a line of their own
_NAMED = 3  # of them in a line of text
_RECENT = 400  # ends that the rate is taken of: it follows a load that becomes slower


@dataclass(slots=True)
class _AtWork:
    stage: str
    began: float


class _Warnings(logging.Handler):
    """Prints the warnings of the driver and its engine between lines of progress."""

    def __init__(self, print_line: Callable[[str], object]) -> None:
        super().__init__()
        self._print_line = print_line

    def emit(self, record: logging.LogRecord) -> None:
        self._print_line(f"warning: {record.getMessage()}")


@dataclass(kw_only=True)
class LoadProgress:
    """Shows the progress of a load in a `with` block; its methods are called by one thread, and another one draws.

    Attributes:
        total: partitions to run.
        stream: where it is shown.
        verbose: a line for each stage that begins and each partition that ends.
        clock: seconds that pass.
        at_work: by dataset and partition, those at work, the first to begin first.
        done: how many have ended, and `failed` how many of them failed.
        phase: what follows the partitions, such as the manifest of a dataset; empty while they run.
    """

    total: int
    stream: TextIO
    verbose: bool = False
    clock: Callable[[], float] = time.monotonic
    at_work: dict[str, _AtWork] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    phase: str = ""

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._ends: deque[float] = deque([self._began], maxlen=_RECENT)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._opened = ExitStack()
        self._console: Console | None = None  # of a terminal
        self._said = ""  # the last line of text

    def __enter__(self) -> Self:
        handler = _Warnings(self._log)
        logger = logging.getLogger("mm_assets.pipeline.load")
        logger.addHandler(handler)
        self._opened.callback(logger.removeHandler, handler)
        if self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._console = Console(file=self.stream)
            if self._console.is_terminal:
                live = Live(
                    console=self._console,
                    get_renderable=self._frame,
                    refresh_per_second=FRAMES,
                    transient=True,
                    redirect_stdout=False,  # what others write, Dagster captures
                    redirect_stderr=False,
                )
                self._opened.enter_context(live)
                return self
            self._console = None
        thread = threading.Thread(target=self._say_regularly, name="progress", daemon=True)
        thread.start()
        self._opened.callback(thread.join)
        self._opened.callback(self._closed.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def started(self, dataset: str, partition: str, stage: str) -> None:
        """A partition begins, or begins a stage; the name of the stage is empty where it is not known."""
        name = f"{dataset}/{partition}"
        with self._lock:
            known = self.at_work.get(name)
            if known is None:
                self.at_work[name] = _AtWork(stage, self.clock())
            else:
                known.stage = stage
        if self.verbose:
            self._log(f"{name}: {stage or 'begins'}")

    def ended(self, result: PartitionRun) -> None:
        """A partition ended."""
        name, now = f"{result.dataset}/{result.partition}", self.clock()
        with self._lock:
            work = self.at_work.pop(name, None)
            self.done += 1
            self.failed += not result.ok
            self._ends.append(now)
        took = f" in {now - work.began:.1f} s" if work is not None else ""
        if not result.ok:
            self._log(f"{name}: FAILED{took}: {result.failures[0]}")
        elif self.verbose:
            self._log(f"{name}: done{took}")

    def begin(self, phase: str) -> None:
        """Something else than partitions begins, such as the manifest; empty for partitions again."""
        self.phase = phase
        if self.verbose and phase:
            self._log(phase)

    def remaining(self) -> float | None:
        """Seconds until all partitions have ended, at the rate of the last ones; None before that is known."""
        rate = self.rate()
        return None if not rate else (self.total - self.done) / rate

    def rate(self) -> float:
        """Partitions per second that ended lately; 0 before the first."""
        passed = self.clock() - self._ends[0]
        number = len(self._ends) - 1 if self.done < _RECENT else len(self._ends)
        return number / passed if number and passed > 0 else 0.0

    def line(self) -> str:
        """The state in a line of text."""
        parts = [f"{self.done:,} of {counted(self.total, 'partition')} done"]
        parts += [f"{self.failed:,} failed"] if self.failed else []
        parts += self._speed()
        with self._lock:
            named = [f"{name} ({work.stage})" if work.stage else name for name, work in self._first(_NAMED)]
            more = len(self.at_work) - len(named)
        if named:
            parts.append(f"running: {', '.join(named)}" + (f" and {more} more" if more else ""))
        elif self.phase:
            parts.append(self.phase)
        return "; ".join(parts)

    def _speed(self) -> list[str]:
        rate, left = self.rate(), self.remaining()
        if left is None or self.done == self.total:
            return []
        said = f"{rate:.1f} per second" if rate >= 1 else f"{rate * 60:.1f} per minute"
        return [f"{said}, {duration_text(left)} left"]

    def _first(self, number: int) -> Iterator[tuple[str, _AtWork]]:
        return islice(self.at_work.items(), number)

    def _log(self, text: str) -> None:
        line = f"{datetime.now():%H:%M:%S} {printable(text)}" if self.verbose else printable(text)
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        self.stream.write(f"{line}\n")
        self.stream.flush()

    def _say_regularly(self) -> None:
        while not self._closed.wait(LINE_SECONDS):
            line = self.line()
            if line != self._said:
                self._write(printable(line))
                self._said = line

    def _frame(self) -> RenderableType:
        """What a terminal shows; as cheap as a few short lines."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self.clock()
        head = Table.grid(padding=(0, 1))
        cells = [f"{self.done:,}/{self.total:,}", *self._speed(), f"after {duration_text(now - self._began)}"]
        if self.failed:
            cells.insert(1, f"{self.failed:,} failed")
        head.add_row(ProgressBar(total=max(self.total, 1), completed=self.done, width=24), Text(", ".join(cells)))
        with self._lock:
            at_work = [(name, work.stage, now - work.began) for name, work in self._first(_SHOWN)]
            more = len(self.at_work) - len(at_work)
        lines = [
            Text(
                printable(f"  {name}  {stage or 'starting'}  {duration_text(seconds)}"),
                no_wrap=True,
                overflow="ellipsis",
            )
            for name, stage, seconds in at_work
        ]
        if more:
            lines.append(Text(f"  and {more:,} more are running"))
        if self.phase and not at_work:
            lines.append(Text(printable(f"  {self.phase}"), no_wrap=True, overflow="ellipsis"))
        return Group(head, *lines)


def duration_text(seconds: float) -> str:
    """A duration for people: seconds, then minutes and seconds, then hours and minutes."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


@contextmanager
def stderr_of_its_own() -> Iterator[TextIO]:
    """Standard error by a descriptor that nothing redirects while the block runs."""
    try:
        number = os.dup(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # a test's, or a notebook's
        yield sys.stderr
        return
    with open(number, "w", encoding="utf-8", errors="backslashreplace") as stream:
        yield stream
