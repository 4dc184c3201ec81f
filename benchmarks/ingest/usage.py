"""What a process and all that it starts use: processor time, bytes read and written, memory. Linux only."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SAMPLING_SECONDS = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a command used, with every process that it started.

    Attributes:
        seconds: wall clock, from its start to its end.
        processor_seconds: user and system time.
        bytes_read: by system calls, from the page cache too.
        bytes_written: by system calls.
        peak_bytes: most resident memory at one time, shared pages counted in proportion (PSS).
    """

    seconds: float
    processor_seconds: float
    bytes_read: int
    bytes_written: int
    peak_bytes: int


class _Tree(threading.Thread):
    """Samples a process and its descendants."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._known = {root}
        self._ended = threading.Event()
        self.read: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.processor: dict[int, float] = {}
        self.peak = 0

    def run(self) -> None:
        """Samples until `end`."""
        while not self._ended.wait(SAMPLING_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Looks at all processes once."""
        total = 0
        for process in self._processes():
            folder = Path("/proc") / str(process)
            with suppress(OSError, ValueError):  # it has just ended
                counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
                self.read[process], self.written[process] = int(counts["rchar"]), int(counts["wchar"])
            with suppress(OSError, ValueError):
                times = (folder / "stat").read_text().rpartition(")")[2].split()
                self.processor[process] = (int(times[11]) + int(times[12])) / _TICKS
                found = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                total += int(found[1]) * 1024 if found else 0
        self.peak = max(self.peak, total)

    def _processes(self) -> Iterator[int]:
        """The process and its descendants, also those whose parent has ended since."""
        parents: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError, ValueError):
                    parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        grew = True
        while grew:
            found = {process for process, parent in parents.items() if parent in self._known}
            grew = not found <= self._known
            self._known |= found
        yield from self._known & parents.keys()

    def transferred(self) -> tuple[int, int]:
        """Bytes read and written by the processes that are still there, one that was not waited for among them."""
        there = [process for process in self.read if Path(f"/proc/{process}").exists()]
        return sum(self.read[process] for process in there), sum(self.written[process] for process in there)

    def end(self) -> None:
        """Stops sampling."""
        self._ended.set()
        self.join()


def measure(command: Sequence[str], *, log: Path, environment: dict[str, str] | None = None) -> tuple[Usage, int, str]:
    """Runs a command to its end.

    Args:
        command: the program and its arguments.
        log: a file for what it writes to standard error.
        environment: variables in addition to those of this process.

    Returns:
        What it used, its exit code, and its standard output.
    """
    began = time.perf_counter()
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **(environment or {})}
        )
        tree = _Tree(process.pid)
        tree.start()
        assert process.stdout is not None
        output = process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        seconds = time.perf_counter() - began
        tree.end()
        # A process that has ended counts what the processes that it waited for have read and written; those that
        # outlive it do so themselves.
        tree.sample()
        read, written = tree.transferred()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
    usage = Usage(
        seconds=seconds,
        processor_seconds=max(used.ru_utime + used.ru_stime, sum(tree.processor.values())),
        bytes_read=read,
        bytes_written=written,
        # A process that ended between two samples: the kernel's own count, in which shared pages count in full.
        peak_bytes=tree.peak or used.ru_maxrss * 1024,
    )
    return usage, process.returncode, output
