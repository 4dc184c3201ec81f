"""Leases: who works on a partition, on whichever host, as a file beside the data.

``leases/<partition>.json`` has a run, its process and the time until which it is valid. It is created and taken over by
conditional writes, of which one wins, and renewed while its owner works. A lease saves double work only: two hosts that
work on one partition nevertheless make the same bytes, and the marker is written by a conditional write of its own. So
clocks that differ by seconds, or a lease that is lost, cost work and nothing else.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from mm_assets.errors import ChangedError, MmAssetsError, SourceError
from mm_assets.pipeline.liveness import process_is_gone, process_tag
from mm_assets.pipeline.store import DatasetStore, canonical_json
from mm_assets.storage.store import Snapshot

__all__ = ["LEASE_SECONDS", "Lease", "LeasedError", "Leases"]

LEASE_SECONDS = 45.0  # a partition of a host that is lost runs again within a minute
_FOLDER, _RUNS = "leases", "runs"
_RENEWALS = 3  # in that time
_MARGIN = 5.0  # seconds before its end from which on a lease counts as lost: another host's clock may be ahead


class LeasedError(SourceError):
    """Another process works on the partition.

    Args:
        path: the file of the lease.
        owner: as the lease names it.
        seconds: until the lease ends if it is not renewed; None where its owner is known to be alive.
    """

    def __init__(self, path: object, *, name: str, owner: str, seconds: float | None) -> None:
        self.owner = owner
        self.seconds = seconds
        place = owner.partition("/")[0] or "another host"
        super().__init__(
            path,
            f"another run is working on partition {name!r}, on host {place}: runs of one partition must not "
            "overlap; run it again when the other has ended",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lease as stored.

    Attributes:
        run: the id of the run that holds it.
        owner: ``host/namespace boot process start`` of its process, as far as the system tells.
        until: seconds since 1970.
    """

    run: str
    owner: str
    until: float

    def to_bytes(self) -> bytes:
        """The content of its file."""
        return canonical_json({"run": self.run, "owner": self.owner, "until": self.until})

    @classmethod
    def from_bytes(cls, content: bytes) -> Lease | None:
        """The lease that a file has, or None where it is damaged, which is as good as none."""
        with suppress(ValueError, KeyError, TypeError):
            found = json.loads(content)
            return cls(run=str(found["run"]), owner=str(found["owner"]), until=float(found["until"]))
        return None

    @property
    def is_gone(self) -> bool | None:
        """Whether its process has ended; None where that is not known, on another host for instance."""
        return process_is_gone(self.run, f"{self.run} {self.owner}")


class Leases:
    """The leases that this process holds in one dataset; a thread renews them.

    Args:
        dataset: the dataset's folder.
        run: id of the run that works.
        clock: seconds since 1970.
    """

    def __init__(self, dataset: DatasetStore, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store = dataset.store
        self._run = run
        self._owner = (process_tag(run) or f"{run} {socket.gethostname()}/").removeprefix(f"{run} ")
        self._clock = clock
        self._held: dict[str, float] = {}  # until when, by name
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread; leases that are held end by themselves."""
        with self._lock:
            self._held.clear()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    @staticmethod
    def file_name(name: str) -> str:
        """Where a lease is, relative to the dataset's folder."""
        return f"{_FOLDER}/{name}.json"

    @staticmethod
    def run_name(run: str) -> str:
        """The name of the lease of a run itself."""
        return f"{_RUNS}/{run}"

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """Holds a lease of the run itself, which shows other hosts that it is alive; those of dead runs are removed.

        Raises:
            SourceError: the storage could not be read or written.
        """
        for file in self._store.sizes(f"{_FOLDER}/{_RUNS}"):
            if self.live(file.removeprefix(f"{_FOLDER}/").removesuffix(".json")) is None:
                self._store.delete(file)
        with self.held(self.run_name(self._run)):
            yield

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Holds the lease of a partition, by its key, in a `with` block.

        Raises:
            LeasedError: another process has it.
            SourceError: the storage could not be read or written.
        """
        self._take(name)
        try:
            yield
        finally:
            with self._lock:
                until = self._held.pop(name, 0.0)
                if until > self._clock() + _MARGIN:  # else it may be another's by now
                    with suppress(MmAssetsError, OSError):  # it ends by itself
                        self._store.delete(self.file_name(name))

    def live(self, name: str) -> Lease | None:
        """The lease of a name while it is valid, of any run.

        Raises:
            SourceError: the storage could not be read.
        """
        content = self._store.found_bytes(self.file_name(name))
        lease = None if content is None else Lease.from_bytes(content)
        return None if lease is None or lease.until <= self._clock() or lease.is_gone else lease

    def _take(self, name: str) -> None:
        file = self.file_name(name)
        before = Snapshot(name=file, content=None)  # as a rule there is none
        until = self._clock() + LEASE_SECONDS
        while True:
            try:
                self._store.replace(before, self._mine(until))
            except ChangedError:
                before = self._store.snapshot(file)
                self._expect_free(name, before)
                continue
            break
        with self._lock:
            self._held[name] = until
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew_all, name="leases", daemon=True)
                self._thread.start()

    def _expect_free(self, name: str, found: Snapshot) -> None:
        lease = None if found.content is None else Lease.from_bytes(found.content)
        if lease is None or lease.until <= self._clock():
            return
        is_gone = lease.is_gone
        if not is_gone:
            seconds = lease.until - self._clock() if is_gone is None else None
            where = self._store.url_of(self.file_name(name))
            raise LeasedError(where, name=name, owner=lease.owner, seconds=seconds)

    def _mine(self, until: float) -> bytes:
        return Lease(run=self._run, owner=self._owner, until=until).to_bytes()

    def _renew_all(self) -> None:
        while not self._wake.wait(LEASE_SECONDS / _RENEWALS):
            self.renew()

    def renew(self) -> None:
        """Writes the leases that are held again, but for those that were taken or renewed just now."""
        with self._lock:
            held = list(self._held)
        for name in held:
            with self._lock:  # not while it is released
                self._renew(name)

    def _renew(self, name: str) -> None:
        now, until = self._clock(), self._held.get(name, 0.0)
        is_new = until - now > LEASE_SECONDS * (1 - 0.5 / _RENEWALS)
        if is_new or until <= now + _MARGIN:  # or it was released, or this process was suspended
            return
        with suppress(MmAssetsError, OSError):  # tried again the next time
            # No other process writes a lease that is valid, so that no condition is needed.
            self._store.write_bytes(self.file_name(name), self._mine(now + LEASE_SECONDS))
            self._held[name] = now + LEASE_SECONDS
