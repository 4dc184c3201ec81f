"""Many partitions, side by side on the hosts of a Ray cluster: a Ray task for each, or for a group of tiny ones.

A task asks for one processor, for memory, and for scratch space where the nodes of the cluster have the resource
``scratch``, in bytes (``ray start --resources '{"scratch": 100e9}'``). Ray never repeats a task: every loss is
reported. Workers read and write the dataset's storage, and know neither Dagster nor its database.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, Self

from mm_assets import __version__
from mm_assets.checks.database import share_memory
from mm_assets.errors import ConfigError, MmAssetsError, SourceError, first_line, optional_import
from mm_assets.pipeline.engines.base import Ended, Loss, Task
from mm_assets.pipeline.engines.processes import num_processors, scratch_bytes
from mm_assets.pipeline.partition_run import PartitionReport, failed_report
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore, StageFailure
from mm_assets.storage.files import SourceFile
from mm_assets.storage.urls import is_local

__all__ = ["RayTasks"]

_GROUP_BYTES = 32 << 20  # of shards: a task costs milliseconds, a partition of a few kilobytes a third of a second
_CONNECT_SECONDS = 10.0
_SIZE_SECONDS = 5.0  # between two looks at the size of the cluster
_SCRATCH = "scratch"
_LOST_HOSTS = {"NodeDiedError", "LocalRayletDiedError", "ObjectLostError", "OwnerDiedError", "RaySystemError"}

_Report = tuple[int, PartitionReport]  # of the task with this number in its group


class RayTasks:
    """Tasks on a Ray cluster that this process connects to as a driver.

    Args:
        address: ``HOST:PORT`` of the cluster's head, which this host is a node of; None takes that of $RAY_ADDRESS, as
            in a run that Ray's own run launcher started, or of a cluster on this host.
        num_tasks: how many are at work at a time; None takes as many as the cluster has processors and memory for. A
            cluster that starts nodes on demand needs a number.
        memory: bytes that a task asks for.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: there is no cluster at the address, or this host is not one of its nodes.
    """

    spans_hosts = True
    group_bytes = _GROUP_BYTES

    def __init__(self, address: str | None = None, *, num_tasks: int | None = None, memory: int = 1 << 30) -> None:
        with optional_import("ray", "--engine ray"):
            import ray
        self._ray = ray
        self._num_tasks = num_tasks
        self._memory = memory
        self._groups: dict[Any, _Group] = {}  # by the generator of its reports
        self._ended: list[Ended] = []
        self._probes: dict[str, _Probe] = {}  # by the root of each dataset in a local file system
        self._size = (float("-inf"), 0)  # when it was looked up, and tasks
        self._most_memory = 0
        self._has_scratch = False
        self._is_mine = not ray.is_initialized()
        if self._is_mine:
            # No runtime_env: inside a run that Ray's run launcher started, one fails and shows every variable.
            try:
                _expect_listening(address)
                ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, ValueError, RuntimeError) as error:
                raise _unreachable(address, error) from error
        self._remote = ray.remote(num_returns="streaming", num_cpus=1, max_retries=0)(run_group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """As many tasks as there are processors and memory for, or as given."""
        when, found = self._size
        if time.monotonic() - when > _SIZE_SECONDS:
            listed: list[dict[str, Any]] = self._ray.nodes()  # type: ignore[no-untyped-call]  # Ray's, without types
            nodes = [node["Resources"] for node in listed if node["Alive"]]
            self._most_memory = max((int(node.get("memory", 0)) for node in nodes), default=0)
            self._has_scratch = any(_SCRATCH in node for node in nodes)
            memory = max(min(self._memory, self._most_memory), 1)
            found = sum(min(int(node.get("CPU", 0)), int(node.get("memory", 0)) // memory) for node in nodes)
            self._size = time.monotonic(), found
        return found if self._num_tasks is None else self._num_tasks

    def fits(self, task: Task) -> bool:
        """True: Ray holds a task back until a node has what it asks for."""
        return True

    def submit(self, tasks: Sequence[Task]) -> None:
        """Submits a group of tasks as one task of Ray."""
        _ = self.slots  # what nodes have
        factor = max(task.memory_factor for task in tasks)
        options: dict[str, Any] = {"memory": min(self._memory * factor, self._most_memory or self._memory)}
        scratch = max(map(scratch_bytes, tasks))
        if scratch and self._has_scratch:
            options["resources"] = {_SCRATCH: scratch}
        probes = {task.spec.name: self._probe(task) for task in tasks}
        stream = self._remote.options(scheduling_strategy="SPREAD", **options).remote(
            __version__, socket.gethostname(), probes, pickle.dumps(tuple(tasks))
        )
        self._groups[stream] = _Group(tasks)

    def ended(self, timeout: float | None) -> Iterable[Ended]:
        """Those that ended, as `Engine.ended`."""
        found, self._ended = self._ended, []
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._groups and not found:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            first, others = self._ray.wait([*self._groups], num_returns=1, timeout=left)
            if not first:
                break
            ready = [*first, *(self._ray.wait(others, num_returns=len(others), timeout=0)[0] if others else ())]
            found = [ended for stream in ready for ended in self._received(stream)]
        return found

    def cancel(self, task: Task) -> None:
        """Ends a task, and its group with it."""
        for stream, group in list(self._groups.items()):
            if task in group.left:
                del self._groups[stream]
                self._end(stream)
                detail = f"another partition of its group was ended: {task.partition.key}"
                loss = Loss(kind="worker", stage=task.first_stage, detail=detail)
                self._ended += [Ended(task=other, loss=loss) for other in group.left if other is not task]

    def close(self) -> None:
        """Ends what is at work, and the connection if this made it; a cluster in use by a run stays connected."""
        for stream in self._groups:
            self._end(stream)
        self._groups.clear()
        for probe in self._probes.values():
            probe.remove()
        if self._is_mine:
            self._ray.shutdown()

    def _end(self, stream: Any) -> None:
        with suppress(self._ray.exceptions.RayError):  # it may have ended
            self._ray.cancel(stream, force=True)

    def _probe(self, task: Task) -> str | None:
        root = task.spec.root
        if not is_local(root):
            return None
        found = self._probes.get(task.spec.name)
        if found is None:
            found = self._probes[task.spec.name] = _Probe(task.spec)
        return found.name

    def _received(self, stream: Any) -> Iterator[Ended]:
        """The ends of tasks that a stream has next."""
        group = self._groups[stream]
        try:
            reference = next(stream)
        except StopIteration:
            del self._groups[stream]
            yield from group.lost(Loss(kind="worker", stage="", detail="its Ray task ended without a report"))
            return
        try:
            number, report = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # raised by Python there: the hosts are not set up alike
            del self._groups[stream]
            detail = f"the Ray task failed: {first_line(error.cause)}; install the same packages on every host"
            for task in group.left:
                failure = StageFailure(partition=task.partition.key, stage=task.first_stage, detail=detail)
                yield Ended(task=task, report=failed_report(failure, is_refused=True))
        except self._ray.exceptions.RayError as error:
            del self._groups[stream]
            yield from group.lost(_loss(error))
        else:
            yield group.reported(number, report)
            if not group.left:
                del self._groups[stream]


class _Group:
    """The tasks of one Ray task; `left` are those without a report."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        self.left = list(tasks)

    def reported(self, number: int, report: PartitionReport) -> Ended:
        task = self._tasks[number]
        self.left.remove(task)
        return Ended(task=task, report=report)

    def lost(self, loss: Loss) -> Iterator[Ended]:
        for task in self.left:
            found = Loss(kind=loss.kind, stage=task.first_stage, detail=loss.detail)
            yield Ended(task=task, loss=found)


class _Probe:
    """A file in a dataset's local folder: where a worker does not find it, its host has another folder there."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._store = DatasetStore(spec).store
        self.name = f"leases/.probe-{secrets.token_hex(8)}"  # hidden: not a lease
        self._store.write_bytes(self.name, b"")

    def remove(self) -> None:
        with suppress(MmAssetsError, OSError):
            self._store.delete(self.name)


def _loss(error: Exception) -> Loss:
    names = {cls.__name__ for cls in type(error).__mro__}
    kind = "memory" if "OutOfMemoryError" in names else "host" if names & _LOST_HOSTS else "worker"
    said = {
        "memory": "Ray ended the task for lack of memory",
        "host": "its Ray node was lost",
        "worker": "its Ray worker died",
    }[kind]
    return Loss(kind=kind, stage="", detail=f"{said} ({type(error).__name__})")  # type: ignore[arg-type]


def _expect_listening(address: str | None) -> None:
    """Raises `OSError` or `ValueError` where nothing listens at an address: Ray tries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and "://" not in host:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


def _unreachable(address: str | None, error: Exception) -> ConfigError:
    if address is None:
        advice = "give `--address HOST:PORT`, or set RAY_ADDRESS"
        return ConfigError("arguments", "--engine", f"there is no Ray cluster to be found: {advice}")
    said = first_line(error)
    advice = f"is it running, and is this host a node of it? `ray start --address={address} --num-cpus=0` makes it one"
    return ConfigError("arguments", "--address", f"{address} cannot be connected to: {said}: {advice}")


# -- on the workers


def run_group(version: str, host: str, probes: dict[str, str | None], pickled: bytes) -> Iterator[_Report]:
    """Runs tasks one after the other, on a worker.

    Args:
        version: that of the driver's mm_assets.
        host: the driver's.
        probes: the file that shows that the root of a dataset is the driver's, by dataset; None where it is a URL.
        pickled: the tasks, as classes that another version may not have.

    Yields:
        The number of each task and its report.

    Raises:
        ConfigError: this host has another version.
    """
    if version != __version__:
        here = f"host {socket.gethostname()} has {__version__}"
        raise ConfigError("mm-assets", "version", f"{here}, the driver {version}: files could differ")
    tasks: Sequence[Task] = pickle.loads(pickled)
    share_memory(num_processors())
    for number, task in enumerate(tasks):
        fault = _root_fault(task.spec, probes[task.spec.name]) or _shard_fault(task, host)
        if fault is not None:
            failure = StageFailure(partition=task.partition.key, stage=task.first_stage, detail=fault)
            yield number, failed_report(failure, is_refused=True)
        else:
            yield number, task.run()


@cache
def _has_probe(spec_name: str, root: str, probe: str) -> bool:
    store = DatasetStore(DatasetSpec.from_config({"name": spec_name, "shards": root, "root": root}, where="")).store
    for pause in (0.0, 1.0, 2.0):  # a network file system may show a new file late
        time.sleep(pause)
        if store.exists(probe):
            return True
    return False


def _root_fault(spec: DatasetSpec, probe: str | None) -> str | None:
    if probe is None or _has_probe(spec.name, spec.root, probe):
        return None
    return (
        f"the root {spec.root} of host {socket.gethostname()} is not that of the driver: set `root`, --root or "
        "MM_ASSETS_ROOT to a URL such as s3://bucket/packed, or to a folder that all hosts share"
    )


def _shard_fault(task: Task, host: str) -> str | None:
    """How local shards differ on this host from those that were registered, where that was on another host."""
    if socket.gethostname() == host:
        return None
    for shard in task.partition.shards:
        if not is_local(shard.url):
            continue
        here, advice = f"on host {socket.gethostname()}", "put shards where all hosts see the same files"
        try:
            with SourceFile(shard.url) as file:
                found = file.fingerprint
        except SourceError as error:
            return f"{error.detail} {here}: {shard.url}: {advice}"
        if found != shard.fingerprint and not shard.is_of(found):
            return (
                f"{shard.url} is another file {here} (found {found}, registered {shard.fingerprint}): size and time of "
                f"modification are its fingerprint; {advice}, or run `mm-assets register` if it changed"
            )
    return None
