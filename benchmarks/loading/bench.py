"""Rounds of measurements: which files, in which state of the page cache, in which process, in which order.

Every measurement is a fresh process. Before it the candidate's files are put out of the page cache, and, unless the
row wants them cold, read again from the first byte to the last. Candidates take turns within a row, in an order that
moves on by one each round, so that a ratio compares what was measured within minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.loading.adapters import CANDIDATES, LIMIT_PREFIX, make_adapter
from benchmarks.loading.child import RESULT, Outcome
from benchmarks.loading.corpus import Corpus
from benchmarks.loading.pages import evict, files_of, read_again, share_cached
from benchmarks.loading.rows import ROWS, Row, Task

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_SECONDS = 900  # of one process; packing 20,000 samples takes the slowest project a minute
EXTRA = ("stored", "large")  # files that a candidate may do without, and does not share
MOSTLY = 0.05  # of the pages: more in the page cache than this is not cold, fewer than the rest is not warm


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of the results.

    Attributes:
        row: its name.
        candidate: its name.
        round: from 0.
        outcome: what the process said.
        share_cached: of the files' pages, in the page cache when the process started, 0 to 1.
    """

    row: str
    candidate: str
    round: int
    outcome: Outcome
    share_cached: float

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Measurement:
        """From one line."""
        found = json.loads(line)
        return cls(**{**found, "outcome": Outcome(**found["outcome"])})


class Bench:
    """Measures; see the module.

    Args:
        folder: for the samples and every candidate's files; 30 GB for 20,000 samples and all candidates.
        corpus: the samples.
        candidates: names.
        seconds: how long a rate is measured.
        num_large: samples of the files that are only opened.
        log: a file for what the processes print besides.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        candidates: Sequence[str],
        *,
        seconds: float,
        num_large: int,
        log: Path,
    ) -> None:
        self._folder = folder
        self._corpus = corpus
        self._candidates = list(candidates)
        self._seconds = seconds
        self._num_large = num_large
        self._log = log
        self._gone: set[tuple[str, str]] = set()  # what was unsupported once need not be asked again

    # --- processes ----------------------------------------------------------------------------------------------------

    def _child(self, action: str, what: str, task: Task) -> Outcome:
        command = [sys.executable, "-m", "benchmarks.loading.child", action, what]
        command.append(json.dumps(dataclasses.asdict(task)))
        # A file and not a pipe: workers that outlive the process would hold a pipe open.
        with self._log.open("a") as log, tempfile.TemporaryFile() as printed:
            log.write(f"--- {action} {what} {task.candidate}\n")
            log.flush()
            with subprocess.Popen(
                command, cwd=REPOSITORY, stdout=printed, stderr=log, start_new_session=True
            ) as process:
                try:
                    process.wait(timeout=TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    return Outcome(failed=f"took more than {TIMEOUT_SECONDS} s")
                finally:
                    _end_group(process.pid)
            printed.seek(0)
            output = printed.read().decode(errors="replace")
            log.write(output)
        for line in output.splitlines():
            if line.startswith(RESULT):
                return Outcome(**json.loads(line.removeprefix(RESULT)))
        return Outcome(failed=f"ended with code {process.returncode} and without a result")

    def _task(self, candidate: str, files: str, seed: int) -> Task:
        return Task(
            candidate=candidate,
            folder=str(self._files(candidate, files)),
            tiny=str(self._files(candidate, "tiny")),
            scratch=str(self._folder / "scratch"),
            corpus=str(self._corpus.folder),
            seed=seed,
            num_large=self._num_large,
            seconds=self._seconds,
        )

    def _owner(self, candidate: str) -> str:
        return make_adapter(candidate, self._folder).shares or candidate

    def _files(self, candidate: str, files: str) -> Path:
        name = f"large-{self._num_large}" if files == "large" else files
        return self._folder / (candidate if files in EXTRA else self._owner(candidate)) / name

    # --- files --------------------------------------------------------------------------------------------------------

    def prepare(self, files: str) -> Iterator[tuple[str, Outcome]]:
        """Write every candidate's files, those that are not there yet.

        Args:
            files: ``full``, ``tiny``, ``stored`` or ``large``.

        Yields:
            Candidate and outcome, of those that wrote or could not.
        """
        for candidate in list(self._candidates):
            try:
                folder = self._files(candidate, files)
            except ModuleNotFoundError as error:
                self._candidates.remove(candidate)
                yield candidate, Outcome(unsupported=f"is not installed here ({error})")
                continue
            done = folder.with_suffix(".done")
            if done.exists():
                continue
            shutil.rmtree(folder, ignore_errors=True)
            task = self._task(candidate if files in EXTRA else self._owner(candidate), files, 0)
            outcome = self._child("pack", files, task)
            yield candidate, outcome
            if outcome.value is not None:
                done.touch()
            elif files not in EXTRA:
                self._candidates.remove(candidate)

    # --- measuring ----------------------------------------------------------------------------------------------------

    def round(self, number: int, rows: Sequence[str]) -> Iterator[Measurement]:
        """Measure every row for every candidate once.

        Args:
            number: of the round, from 0.
            rows: their names.
        """
        for name in rows:
            turn = number % max(len(self._candidates), 1)
            for candidate in self._candidates[turn:] + self._candidates[:turn]:
                limit = candidate.startswith(LIMIT_PREFIX) and candidate not in ROWS[name].limits
                if not limit and (name, candidate) not in self._gone:
                    measurement = self._measure(name, ROWS[name], candidate, number)
                    if measurement.outcome.unsupported is not None:
                        self._gone.add((name, candidate))
                    yield measurement

    def _measure(self, name: str, row: Row, candidate: str, number: int) -> Measurement:
        folder = self._files(candidate, row.files)
        files = files_of(folder)
        if not folder.with_suffix(".done").exists():
            outcome = Outcome(unsupported="has no such files")
            return Measurement(row=name, candidate=candidate, round=number, outcome=outcome, share_cached=0)
        if row.measure is None:
            share = 100 * (sum(path.stat().st_size for path in files) / self._corpus.num_bytes - 1)
            outcome = Outcome(value=share)
            if make_adapter(candidate, folder).shares is not None:
                outcome = Outcome(unsupported="has no files of its own")
            return Measurement(row=name, candidate=candidate, round=number, outcome=outcome, share_cached=0)
        task = self._task(candidate, row.files, number)
        os.sync()  # what the last one left to be written is not this one's to wait for
        if row.cache != "any":
            evict(files)
            if row.cache == "warm":
                read_again(files)
        shutil.rmtree(task.scratch, ignore_errors=True)
        Path(task.scratch).mkdir(parents=True)
        cached = share_cached(files)
        outcome = self._child("measure", name, task)
        if outcome.value is not None and row.cache == "cold" and cached > MOSTLY:
            outcome = Outcome(failed=f"{cached:.0%} of the files stayed in the page cache")
        if outcome.value is not None and row.cache == "warm" and cached < 1 - MOSTLY:
            outcome = Outcome(failed=f"only {cached:.0%} of the files are in the page cache")
        return Measurement(row=name, candidate=candidate, round=number, outcome=outcome, share_cached=cached)


def _end_group(leader: int) -> None:
    """End what is left of a process and the workers it started: they would run into the next measurement."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def all_candidates() -> list[str]:
    """Names, in the order of the tables."""
    return list(CANDIDATES)
