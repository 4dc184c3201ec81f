"""Claims: which partitions a load has taken, on whichever host, as files beside the data. They only save work.

``claims/<load>.json`` names the partitions that a load works on, and its process; the load renews it by rewriting it. A
claim has expired when its observer has seen it unchanged for `CLAIM_SECONDS` of the observer's own monotonic clock, or
when its process has exited, which only its own host can tell: no clocks are compared. Two loads that work on one
partition nevertheless write equal files, and one of them creates the record. So a claim that is lost or damaged costs
time, never data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from mm_assets.errors import ConfigError, MmAssetsError
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import canonical_json

__all__ = ["CLAIM_SECONDS", "Claim", "Claims", "Slice", "process_is_gone", "process_tag"]

CLAIM_SECONDS = 45.0  # a partition of a host that is lost runs elsewhere within a minute
CLAIMS = "claims"  # folder
_RENEWALS = 3  # in that time
_PROC = Path("/proc")
_DEAD_STATES = "ZX"  # killed, and not yet collected by its parent


@dataclass(frozen=True, slots=True)
class Slice:
    """One of several parts of the partitions of a dataset: those whose key hashes to it, whatever others there are.

    Attributes:
        number: which, from 1.
        total: how many there are.
    """

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Returns the slice that a text such as ``3/20`` names; raises `ConfigError` if it names none."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError("arguments", "--slice", f"is {text!r}, expected K/N such as 3/20, with K from 1 to N")
        return cls(int(found[1]), int(found[2]))

    def __contains__(self, key: str) -> bool:
        digest = hashlib.sha256(key.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.total == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one load has taken.

    Attributes:
        load: id of the load: of its first run in Dagster, if it has one.
        process: as `process_tag` names it; only the host on systems without one.
        keys: keys of partitions; None for every pending one.
        part: the slice of `keys` that it takes; None for all of them.
    """

    load: str
    process: str
    keys: frozenset[str] | None = None
    part: Slice | None = None

    def __contains__(self, key: str) -> bool:
        return (self.keys is None or key in self.keys) and (self.part is None or key in self.part)

    @property
    def place(self) -> str:
        """The host and process id of its load, as text."""
        parts = self.process.split(" ")
        host = parts[0].partition("/")[0]
        return f"{host} (PID {parts[2]})" if len(parts) == 4 else host

    @property
    def has_exited(self) -> bool | None:
        """Whether its process has exited; None if that is unknown, as on another host."""
        return process_is_gone(self.load, f"{self.load} {self.process}")

    def to_bytes(self, renewal: int) -> bytes:
        """Returns the content of its file; `renewal` makes it another version."""
        keys = None if self.keys is None else sorted(self.keys)
        part = None if self.part is None else str(self.part)
        return canonical_json(
            {"load": self.load, "process": self.process, "keys": keys, "slice": part, "renewal": renewal}
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> Claim | None:
        """Reads a claim; None for a damaged one, which claims nothing."""
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError):
            value = json.loads(content)
            return cls(
                load=str(value["load"]),
                process=str(value["process"]),
                keys=None if value["keys"] is None else frozenset(map(str, value["keys"])),
                part=None if value["slice"] is None else Slice.parse(value["slice"]),
            )
        return None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A version of another load's claim, and since when, by this process's clock, it has been that version."""

    version: str
    since: float
    claim: Claim | None


class Claims:
    """The claim of one load in a dataset, which a thread renews, and its view of the claims of others.

    Args:
        dataset: the dataset's folder.
        load: id of the load.
        clock: seconds that pass in this process.
    """

    def __init__(self, dataset: DatasetStore, load: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = dataset.store
        self._load = load
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._own: Claim | None = None
        self._renewal = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def take(self, keys: Collection[str] | None, part: Slice | None = None) -> list[Claim]:
        """Claims partitions, and returns the claims of others that go before it.

        Those are the claims that were there before. Of two that were written at the same time, that of the smaller id
        goes first.

        Args:
            keys: of partitions; None for every pending one.
            part: as of a `Claim`.

        Raises:
            SourceError: the storage cannot be read or written.
        """
        before = self.others()
        self._own = Claim(
            load=self._load,
            process=_process(self._load),
            keys=None if keys is None else frozenset(keys),
            part=part,
        )
        self.renew()
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._renew_all, name="claim", daemon=True)
            self._thread.start()
        # A load that was there before may have claimed others: two that take over what a third one left see each other.
        return [*before, *(claim for claim in self.others() if claim not in before and claim.load < self._load)]

    def keep(self, keys: Collection[str]) -> None:
        """Narrows the claim to some partitions; with none it only shows that the load is alive."""
        if self._own is not None:
            self._own = replace(self._own, keys=frozenset(keys), part=None)
            with suppress(MmAssetsError, OSError):  # the thread renews it soon
                self.renew()

    def others(self) -> list[Claim]:
        """Returns the claims of other loads that have not expired.

        Raises:
            SourceError: the storage cannot be read.
        """
        now, seen = self._clock(), dict[str, _Seen]()
        for name, file in self._store.listing(CLAIMS).items():
            if name == _file_name(self._load):
                continue
            last = self._seen.get(name)
            if last is None or last.version != file.version:
                content = self._store.found_bytes(name)
                last = _Seen(file.version, now, None if content is None else Claim.from_bytes(content))
            seen[name] = last
        self._seen = seen
        live = (one.claim for one in seen.values() if now - one.since < CLAIM_SECONDS)
        return [claim for claim in live if claim is not None and not claim.has_exited]

    def renew(self) -> None:
        """Rewrites the claim, if there is one; `SourceError` if that fails."""
        with self._lock:
            if self._own is not None:
                self._renewal += 1
                self._store.write_bytes(_file_name(self._load), self._own.to_bytes(self._renewal), durable=False)

    def _renew_all(self) -> None:
        while not self._ended.wait(CLAIM_SECONDS / _RENEWALS):
            with suppress(MmAssetsError, OSError):  # renewed the next time
                self.renew()

    def release(self) -> None:
        """Removes the claim: others may take what is left of it."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            if self._own is not None:
                self._own = None
                with suppress(MmAssetsError, OSError):  # it expires
                    self._store.delete(_file_name(self._load))


def _file_name(load: str) -> str:
    return f"{CLAIMS}/{load}.json"


def _process(load: str) -> str:
    return (process_tag(load) or f"{load} {socket.gethostname()}").removeprefix(f"{load} ")


# -- processes of this host, by the facts in Linux's /proc; on other systems a process has no such name


def process_tag(run_id: str) -> str | None:
    """Identifies this process as the worker of a run; None on systems without /proc.

    The tag contains the run's id because a run that is executed again inherits the tags of its predecessor.
    """
    place, start = _place(), _start(os.getpid())
    if place is None or start is None:
        return None
    return " ".join((run_id, place, _boot(), str(os.getpid()), start))


def process_is_gone(run_id: str, tag: str | None) -> bool | None:
    """Whether the process that a run's tag names has ended.

    None where that is not known: there is no tag, it is another run's, or the process is on another host or of another
    boot of this one.
    """
    parts = (tag or "").split(" ")
    if len(parts) != 5 or parts[0] != run_id or parts[1] != _place() or not parts[3].isdecimal():
        return None
    if parts[2] != _boot():  # the machine restarted, or it is another one with the same name
        return None
    # A process id is reused, but not with the same start time, which counts from the boot.
    return _start(int(parts[3])) != parts[4]


def _place() -> str | None:
    """Host and process namespace, in which a process id is unique."""
    try:
        return f"{socket.gethostname()}/{os.readlink(_PROC / 'self' / 'ns' / 'pid')}"
    except OSError:
        return None


def _boot() -> str:
    return _read("sys/kernel/random/boot_id").strip() or "-"


def _read(name: str) -> str:
    """A file below /proc; empty where there is none."""
    try:
        return (_PROC / name).read_text()
    except OSError:
        return ""


def _start(pid: int) -> str | None:
    """Start time of a live process in clock ticks since the boot; None if no process has that id."""
    # The second field is the command's name in parentheses and may hold anything; the third is the state.
    fields = _read(f"{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in _DEAD_STATES else None
