"""Leases: who works on a partition, on whichever host, as a file beside the data.

``leases/<partition>.json`` has a run, its process and the time until which it is valid. It is created and taken over by
conditional writes, of which one wins. While its owner works, ``leases/runs/<run>.json`` is renewed, which prolongs all
leases of the run: a driver with a thousand partitions in flight writes one file. A lease saves double work only: two
hosts that work on one partition nevertheless make the same bytes, and the marker is written by a conditional write of
its own. So clocks that differ by seconds, or a lease that is lost, cost work and nothing else.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from mm_assets.errors import ChangedError, CredentialsError, MmAssetsError, SourceError
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.liveness import process_is_gone, process_tag
from mm_assets.pipeline.state.records import canonical_json
from mm_assets.storage.store import Snapshot

__all__ = ["LEASE_SECONDS", "Holder", "Lease", "LeasedError", "Leases"]

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


@dataclass(frozen=True, slots=True)
class Holder:
    """In whose name the workers of a load hold leases: its driver renews that of the run while they work.

    Attributes:
        run: id of the run.
        owner: as that of a `Lease`, the driver's process.
    """

    run: str
    owner: str

    @contextmanager
    def held(self, dataset: DatasetStore, name: str) -> Iterator[None]:
        """As `Leases.held`, in a worker; another worker of the same load takes the lease over."""
        with Leases(dataset, self.run, holder=self) as leases, leases.held(name):
            yield

    def release(self, dataset: DatasetStore, name: str) -> None:
        """Ends a lease that a worker left, which was killed, if it is still this holder's."""
        with Leases(dataset, self.run, holder=self) as leases:
            leases.release_left(name)


class Leases:
    """The leases that this process holds in one dataset; a thread renews them.

    Args:
        dataset: the dataset's folder.
        run: id of the run that works.
        holder: in whose name they are held, which renews them; None holds them in the name of this process.
        clock: seconds since 1970.

    Attributes:
        holder: for the workers of this process.
    """

    def __init__(
        self,
        dataset: DatasetStore,
        run: str,
        *,
        holder: Holder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = dataset.store
        self._run = run
        self._renews = holder is None
        self.holder = holder or Holder(run, _owner(run))
        self._owner = self.holder.owner
        self._clock = clock
        self._held: dict[str, float] = {}  # until when without the lease of the run, by name
        self._lapsed: set[str] = set()  # of these, which had ended for some time: another process may have taken them
        self._renewed = 0.0  # until when with it
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread; leases that are held end by themselves."""
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._held.clear()
            self._lapsed.clear()
            if self._renewed:
                self._renewed = 0.0
                self._delete(self.run_name(self._run))

    @staticmethod
    def file_name(name: str) -> str:
        """Where a lease is, relative to the dataset's folder."""
        return f"{_FOLDER}/{name}.json"

    @staticmethod
    def run_name(run: str) -> str:
        """The name of the lease of a run itself."""
        return f"{_RUNS}/{run}"

    @contextmanager
    def of_run(self, *, writes: bool = True) -> Iterator[None]:
        """Holds a lease of the run itself, which shows other hosts that it is alive; those of dead runs are removed.

        Args:
            writes: whether the run needs to write below the root; without that, a root that may only be read is enough.

        Raises:
            SourceError: the storage could not be read or written.
        """
        with ExitStack() as held:
            try:
                for file in self._store.sizes(f"{_FOLDER}/{_RUNS}"):
                    if self.live(file.removeprefix(f"{_FOLDER}/").removesuffix(".json")) is None:
                        self._store.delete(file)
                held.enter_context(self.held(self.run_name(self._run)))
            except (SourceError, OSError) as error:
                if writes or not _is_read_only(error):
                    raise
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
                # What a driver renews, or what had ended, may be another's by now: the file says so.
                is_known = self._renews and name not in self._lapsed
                is_held = self._is_held(name) if is_known else self._is_mine(name)
                self._held.pop(name, None)
                self._lapsed.discard(name)
                if is_held:
                    self._delete(name)

    def release_left(self, name: str) -> None:
        """Ends a lease that another process took in the name of the same holder."""
        if self._is_mine(name):
            self._delete(name)

    def live(self, name: str) -> Lease | None:
        """The lease of a name while it is valid, of any run.

        Raises:
            SourceError: the storage could not be read.
        """
        content = self._store.found_bytes(self.file_name(name))
        lease = None if content is None else Lease.from_bytes(content)
        return None if lease is None else self._valid(name, lease)

    def _valid(self, name: str, lease: Lease) -> Lease | None:
        """A lease with the time until which it is valid, by itself or by that of its run; None where it is not."""
        if lease.is_gone:
            return None
        if name != (of_run := self.run_name(lease.run)):
            content = self._store.found_bytes(self.file_name(of_run))
            renewed = None if content is None else Lease.from_bytes(content)
            if renewed is not None and renewed.owner == lease.owner:
                lease = replace(lease, until=max(lease.until, renewed.until))
        return lease if lease.until > self._clock() else None

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
            self._lapsed.discard(name)
            if self._thread is None and self._renews:
                self._thread = threading.Thread(target=self._renew_all, name="leases", daemon=True)
                self._thread.start()

    def _expect_free(self, name: str, found: Snapshot) -> None:
        lease = None if found.content is None else Lease.from_bytes(found.content)
        if lease is None or (lease.run == self._run and lease.owner == self._owner and name not in self._held):
            return  # the last is one that could not be deleted
        valid = self._valid(name, lease)
        if valid is not None:
            # The caller that tries again may have a clock that is behind this one.
            seconds = valid.until - self._clock() + _MARGIN if valid.is_gone is None else None
            where = self._store.url_of(self.file_name(name))
            raise LeasedError(where, name=name, owner=valid.owner, seconds=seconds)

    def _mine(self, until: float) -> bytes:
        return Lease(run=self._run, owner=self._owner, until=until).to_bytes()

    def _is_held(self, name: str) -> bool:
        """Whether a lease is valid and stays so for a moment; else it may be another's by now."""
        return name in self._held and max(self._held[name], self._renewed) > self._clock() + _MARGIN

    def _is_mine(self, name: str) -> bool:
        with suppress(MmAssetsError, OSError):  # it ends by itself
            lease = Lease.from_bytes(self._store.read_bytes(self.file_name(name)))
            return lease is not None and (lease.run, lease.owner) == (self._run, self._owner)
        return False

    def _delete(self, name: str) -> None:
        with suppress(MmAssetsError, OSError):  # it ends by itself
            self._store.delete(self.file_name(name))

    def _renew_all(self) -> None:
        while not self._wake.wait(LEASE_SECONDS / _RENEWALS):
            self.renew()

    def renew(self) -> None:
        """Prolongs the leases that are held.

        Those that ended, because this process was suspended or the storage did not answer, are valid again where no
        other process has taken them meanwhile: the work on their partitions goes on.
        """
        with self._lock:
            self._lapsed |= {name for name in self._held if not self._is_held(name)}
            if not self._held:
                return
            until = self._clock() + LEASE_SECONDS
            with suppress(MmAssetsError, OSError):  # tried again the next time
                self._store.write_bytes(self.file_name(self.run_name(self._run)), self._mine(until))
                self._renewed = until


def _is_read_only(error: SourceError | OSError) -> bool:
    """Whether the root may be read and not written."""
    cause = error.__cause__ if isinstance(error, SourceError) else error
    is_refused = isinstance(cause, PermissionError) or (isinstance(cause, OSError) and cause.errno == errno.EROFS)
    return is_refused and not isinstance(error, CredentialsError)


def _owner(run: str) -> str:
    """This process, as the owner of leases of a run."""
    return (process_tag(run) or f"{run} {socket.gethostname()}/").removeprefix(f"{run} ")
