"""Many partitions, side by side on the hosts of a Ray cluster: a Ray task for each, or for a group of tiny ones.

A task asks for one processor, for memory, and for scratch space where the nodes of the cluster have the resource
``scratch``, in bytes (``ray start --resources '{"scratch": 100e9}'``). Ray never repeats a task: every loss is
reported. Workers read and write the dataset's storage, and know neither Dagster nor its database.

A Ray task says on which node it begins, then which stage of which partition does, and how each partition ended. A
thread receives that as it arrives, so that the cost of a message, 0.15 ms, does not depend on how many tasks are in
flight.

Another thread lists the nodes every few seconds, which shows whether the head of the cluster answers. If it does not,
such a call blocks, and after a minute Ray would terminate this process.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import pickle
import queue
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Self

from mm_assets import __version__
from mm_assets.checks.database import share_memory
from mm_assets.errors import ConfigError, MmAssetsError, SourceError, first_line, optional_import
from mm_assets.pipeline.load.engine import Ended, EngineLostError, Loss, Running, Started, Task, unobserved
from mm_assets.pipeline.load.processes import num_processors, scratch_bytes
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Partition, StageFailure
from mm_assets.storage.files import SourceFile
from mm_assets.storage.retry import STORAGE
from mm_assets.storage.urls import is_local

__all__ = ["RayTasks", "end_process"]

_GROUP_BYTES = 32 << 20  # of shards: a task costs milliseconds, a partition of a few kilobytes a third of a second
_CONNECT_SECONDS = 10.0
_SIZE_SECONDS = 5.0  # between two looks at the size of the cluster
_HEAD_SECONDS = 25.0  # for the head of the cluster to answer
_TERMINATION = "RAY_gcs_rpc_server_reconnect_timeout_s"  # after which Ray ends a process whose head does not answer
_TERMINATION_SECONDS = 300  # in which the load is recorded and its manifest made; Ray's default is 60
_MISSING_SECONDS = 60.0  # for a node that a task fits on to come back
_GROWING_SECONDS = 1800.0  # for one to come, where the number of tasks is given: nodes may be started on demand
_END_SECONDS = 2.0  # for Ray to confirm that tasks were canceled
_DISCONNECT_SECONDS = 10.0  # it takes less than one
_SCRATCH = "scratch"
_log = logging.getLogger(__name__)
_MOST_ASKED = 1 << 49  # bytes: Ray counts ten-thousandths in 64 bits, and a larger number wraps around to a small one
_LOST_HOSTS = {"NodeDiedError", "LocalRayletDiedError", "ObjectLostError", "OwnerDiedError", "RaySystemError"}

_Step = tuple[int, str | PartitionReport]  # of the task with this number in its group: a stage begins, or its report
_Message = str | _Step | Exception | None  # where a group began, as `_work` yields it; how it ended without a report


class RayTasks:
    """Tasks on a Ray cluster that this process connects to as a driver.

    Args:
        address: ``HOST:PORT`` of the cluster's head, which this host is a node of; None takes that of $RAY_ADDRESS, as
            in a run that Ray's own run launcher started, or of a cluster on this host.
        num_tasks: how many are at work at a time; None takes as many as the cluster has processors and memory for. A
            cluster that starts nodes on demand needs a number.
        memory: bytes that a task asks for.
        started: as that of `open_engine`.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: there is no cluster at the address, or this host is not one of its nodes.
    """

    spans_hosts = True
    group_bytes = _GROUP_BYTES

    def __init__(
        self,
        address: str | None = None,
        *,
        num_tasks: int | None = None,
        memory: int = 1 << 30,
        started: Started = unobserved,
    ) -> None:
        os.environ.setdefault(_TERMINATION, str(_TERMINATION_SECONDS))  # read when Ray is imported
        with optional_import("ray", "--engine ray"):
            import ray
        self._ray = ray
        self._started = started
        self._num_tasks = num_tasks
        self._memory = memory
        self._groups: dict[Task, _Group] = {}  # of each task that has not ended
        self._canceled_on: dict[Partition, str] = {}  # the node of each that was canceled and may be submitted again
        self._ended: list[Ended] = []
        self._probes: dict[str, _Probe] = {}  # by the root of each dataset in a local file system
        self._nodes: list[_Node] = []
        self._looked = float("-inf")  # when the request began that listed the nodes
        self._same_since = time.monotonic()  # the nodes
        self._answered = 0.0  # when the head did last
        self._asked = 0.0  # when it was asked first since then
        self._is_lost = False
        self._had_workers = False  # nodes with a processor for tasks
        self._num_lost = 0  # looks at which nodes were gone
        self._is_mine = not ray.is_initialized()
        if self._is_mine:
            # No runtime_env: inside a run that Ray's run launcher started, one fails and shows every variable.
            try:
                _expect_listening(address)
                ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, ValueError, RuntimeError) as error:
                raise _unreachable(address, error) from error
        self._listed: tuple[float, list[_Node]] = self._list()  # by the thread, since when
        self._address: str = address or ray.get_runtime_context().gcs_address
        self._closed = threading.Event()
        self._lister = threading.Thread(target=self._list_regularly, name="ray-nodes", daemon=True)
        self._lister.start()
        self._remote = ray.remote(num_returns="streaming", num_cpus=1, max_retries=0)(_work)
        self._messages: queue.SimpleQueue[tuple[_Group, _Message]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ray-messages", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """As many tasks as there are processors and memory for, or as given."""
        self._look()
        return sum(node.slots(self._memory) for node in self._nodes) if self._num_tasks is None else self._num_tasks

    def fits(self, task: Task) -> bool:
        """True: Ray holds a task back until a node has what it asks for."""
        return True

    def submit(self, tasks: Sequence[Task]) -> None:
        """Submits a group of tasks as one task of Ray; what was canceled goes to another node, if one is free."""
        before = self._canceled_on.pop(tasks[0].partition, None)
        self._submit(tasks, (before and self._other_than(before)) or "SPREAD")

    def submit_copy(self, task: Task, of: Task) -> bool:
        """Submits a task for the node, other than that of another task, with the most slots that are free."""
        strategy = self._other_than(self._groups[of].node)
        if strategy is not None:
            self._submit([task], strategy)
        return strategy is not None

    def _other_than(self, node: str) -> object:
        """Returns the strategy for the other node with the most free slots. Returns None if all slots are taken."""
        self._look()
        busy = Counter(group.node for group in {id(group): group for group in self._groups.values()}.values())
        free = {other.id: other.slots(self._memory) - busy[other.id] for other in self._nodes}
        free.pop(node, None)
        if not free or max(free.values()) <= 0:
            return None
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(max(free, key=free.__getitem__), soft=True)

    def running(self, task: Task) -> Running | None:
        """Returns the worker of a task. Returns None while Ray or its group makes it wait."""
        group = self._groups.get(task)
        if group is None or group.began is None or group.left[0] is not task:
            return None
        return Running(began=group.began, stage=group.stage or task.first_stage, worker=group.worker)

    def ended(self, timeout: float | None) -> Iterable[Ended]:
        """Those that ended, as `Engine.ended`."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        found, self._ended = self._ended, []
        while self._groups and not found:
            found += self._received(0.0)
            self._look()
            if not found and self._head_is_lost():
                detail = (
                    f"the head of the Ray cluster has not answered for {_HEAD_SECONDS:.0f} seconds: partitions that "
                    "have not ended were not run; continue when the cluster is back"
                )
                raise EngineLostError(self._address, detail)
            found += (*self._on_lost_nodes(), *self._unplaceable())
            left = deadline - time.monotonic()
            if found or left <= 0:
                break
            found += self._received(min(left, _SIZE_SECONDS))
        return found

    def cancel(self, task: Task) -> None:
        """Ends a task, and its group with it."""
        group = self._groups.get(task)
        if group is not None:
            others = [other for other in group.left if other is not task]
            self._canceled_on[task.partition] = group.node
            self._end(group)
            detail = f"another partition of its group was ended: {task.partition.key}"
            self._ended += _Group(others).lost(Loss(kind="neighbor", stage="", detail=detail))

    def close(self) -> None:
        """Ends what is at work, and the connection if this made it; a cluster in use by a run stays connected."""
        for group in {id(group): group for group in self._groups.values()}.values():
            self._end(group)
        self._groups.clear()
        self._closed.set()
        seconds = 0.0 if self._is_lost else _END_SECONDS  # nothing is confirmed then
        self._lister.join(seconds)
        asyncio.run_coroutine_threadsafe(_end_others(seconds), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for probe in self._probes.values():
            probe.remove()
        if self._is_mine:
            _disconnect(self._ray)
        self._loop.close()

    def _list(self) -> tuple[float, list[_Node]]:
        began = time.monotonic()
        listed: list[dict[str, Any]] = self._ray.nodes()  # type: ignore[no-untyped-call]  # Ray's, without types
        self._answered = time.monotonic()
        return began, [_Node.of(node) for node in listed if node["Alive"]]

    def _list_regularly(self) -> None:
        while not self._closed.wait(_SIZE_SECONDS):
            if self._asked <= self._answered:
                self._asked = time.monotonic()
            with suppress(Exception):  # Ray's, or of gRPC: the head did not answer
                self._listed = self._list()

    def _look(self) -> None:
        """Takes up the latest list of nodes."""
        self._looked, nodes = self._listed
        if nodes != self._nodes:
            self._num_lost += bool({node.id for node in self._nodes} - {node.id for node in nodes})
            self._nodes, self._same_since = nodes, time.monotonic()

    def _head_is_lost(self) -> bool:
        """Returns whether the head of the cluster has not answered for long; then what is submitted never runs."""
        has_answered = self._asked <= self._answered
        self._is_lost |= not has_answered and time.monotonic() - self._asked > _HEAD_SECONDS
        return self._is_lost

    def _submit(self, tasks: Sequence[Task], strategy: object) -> None:
        self._look()
        if self._head_is_lost():
            self._groups |= dict.fromkeys(tasks, _Group(tasks))
            return
        memory = self._memory * max(task.memory_factor for task in tasks)
        if memory > self._memory:  # more than before: as much as there is
            memory = max(self._memory, min(memory, max((node.memory for node in self._nodes), default=memory)))
        # Ray asks for places of tasks that are alike together. What it asked of a host that does not answer stays
        # unanswered and holds them all up, so that after a loss no task is like one before.
        memory -= self._num_lost
        scratch = max(map(scratch_bytes, tasks)) if any(node.scratch is not None for node in self._nodes) else 0
        resources = {_SCRATCH: min(scratch, _MOST_ASKED)} if scratch else {}
        probes = {task.spec.name: self._probe(task) for task in tasks}
        stream = self._remote.options(
            scheduling_strategy=strategy, memory=min(memory, _MOST_ASKED), resources=resources
        ).remote(__version__, socket.gethostname(), probes, pickle.dumps(tuple(tasks)))
        group = _Group(tasks, stream, memory=memory, scratch=scratch, strategy=strategy, num_lost=self._num_lost)
        self._groups |= dict.fromkeys(tasks, group)
        asyncio.run_coroutine_threadsafe(self._listen(group), self._loop)

    def _end(self, group: _Group) -> None:
        for task in group.left:
            del self._groups[task]
        if not self._is_lost:
            with suppress(self._ray.exceptions.RayError):  # it may have ended
                self._ray.cancel(group.stream, force=True)

    # -- messages

    async def _listen(self, group: _Group) -> None:
        """Passes on what a group says, in the thread."""
        stream: AsyncIterator[Any] = group.stream
        try:
            async for reference in stream:
                self._messages.put((group, await reference))
            self._messages.put((group, None))
        except Exception as error:  # noqa: BLE001 - whatever ended it is passed on
            self._messages.put((group, error))

    def _received(self, timeout: float) -> list[Ended]:
        """The ends among the messages that there are, or that come first until a timeout."""
        found: list[Ended] = []
        with suppress(queue.Empty):
            found += self._read(*self._messages.get(timeout=timeout))
            while True:
                found += self._read(*self._messages.get_nowait())
        return found

    def _read(self, group: _Group, message: _Message) -> Iterator[Ended]:
        """The ends that a message tells."""
        if not group.left or self._groups.get(group.left[0]) is not group:
            return  # all have ended, or it was canceled, and its tasks may be submitted again
        if isinstance(message, str):
            group.node, _, group.worker = message.partition(" ")
            group.began = time.monotonic()
            self._started(group.left[0], "")
            return
        if isinstance(message, tuple):
            number, step = message
            if isinstance(step, str):
                group.stage = step
                self._started(group.left[0], step)
                return
            ended = group.reported(number, step)
            del self._groups[ended.task]
            if group.left:
                self._started(group.left[0], "")
            yield ended
            return
        for task in group.left:
            del self._groups[task]
        if isinstance(message, self._ray.exceptions.RayTaskError):  # by Python there: the hosts are not set up alike
            cause = first_line(message.cause)
            yield from group.refused(f"the Ray task failed: {cause}; install the same packages on every host")
        elif message is None:
            yield from group.lost(Loss(kind="worker", stage="", detail="its Ray task ended without a report"))
        elif isinstance(message, self._ray.exceptions.RayError):
            yield from group.lost(_loss(message))
        else:
            raise message

    def _on_lost_nodes(self) -> list[Ended]:
        """The losses of nodes that are dead to the cluster: where a host only stops to answer, Ray lets tasks hang."""
        alive, found = {node.id for node in self._nodes}, list[Ended]()
        for group in {id(group): group for group in self._groups.values()}.values():
            if group.began is None and group.num_lost != self._num_lost:
                self._end(group)
                self._submit(group.left, group.strategy)
            elif group.began is not None and group.began < self._looked and group.node not in alive:
                self._end(group)
                found += group.lost(Loss(kind="host", stage="", detail="its Ray node was lost: it does not answer"))
        return found

    def _unplaceable(self) -> list[Ended]:
        """The ends of tasks that no node has enough for, and none has had for long.

        Raises:
            ConfigError: there is no node for any task, and for long there has been none. Those that wait have not
                failed: the next load runs them.
        """
        has_workers = any(node.num_cpus >= 1 for node in self._nodes)
        self._had_workers |= has_workers
        # A cluster whose workers are all replaced takes minutes, and one that grows on demand has none at first.
        is_patient = self._num_tasks is not None or (self._had_workers and not has_workers)
        if time.monotonic() - self._same_since < (_GROWING_SECONDS if is_patient else _MISSING_SECONDS):
            return []
        if not has_workers and any(group.began is None for group in self._groups.values()):
            raise ConfigError("arguments", "engine", _offer(()))
        waiting = {id(g): g for g in self._groups.values() if g.began is None and not any(map(g.fits, self._nodes))}
        found: list[Ended] = []
        for group in waiting.values():
            self._end(group)
            found += group.refused(f"{_demand(group)}, and {_offer(self._nodes)}")
        return found

    def _probe(self, task: Task) -> str | None:
        root = task.spec.root
        if not is_local(root):
            return None
        found = self._probes.get(task.spec.name)
        if found is None:
            found = self._probes[task.spec.name] = _Probe(task.spec)
        return found.name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """What a node has; `scratch` is None where that is not declared."""

    id: str
    num_cpus: int
    memory: int
    scratch: int | None

    @classmethod
    def of(cls, listed: dict[str, Any]) -> _Node:
        has = listed["Resources"]
        return cls(
            id=listed["NodeID"],
            num_cpus=int(has.get("CPU", 0)),
            memory=int(has.get("memory", 0)),
            scratch=int(has[_SCRATCH]) if _SCRATCH in has else None,
        )

    def slots(self, memory: int) -> int:
        """Tasks that it has processors and memory for."""
        return min(self.num_cpus, self.memory // max(memory, 1))


class _Group:
    """The tasks of one Ray task, and what it asks for.

    Attributes:
        stream: the generator of its messages.
        memory: bytes.
        scratch: bytes.
        strategy: of Ray, to place it.
        num_lost: how often nodes had been lost when it was submitted.
        left: those without a report, of which the first is at work.
        node: that it is on; empty until it began.
        worker: its process and host, as text.
        began: when the first of those left did.
        stage: name of the one that the first of those left is at; empty until it is known.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        stream: Any = None,
        *,
        memory: int = 0,
        scratch: int = 0,
        strategy: object = None,
        num_lost: int = 0,
    ) -> None:
        self._tasks = tuple(tasks)
        self.stream = stream
        self.memory = memory
        self.scratch = scratch
        self.strategy = strategy
        self.num_lost = num_lost
        self.left = list(tasks)
        self.node = self.worker = ""
        self.began: float | None = None
        self.stage = ""

    def fits(self, node: _Node) -> bool:
        """Whether a node has enough for it, when nothing else is at work there."""
        return node.num_cpus >= 1 and node.memory >= self.memory and (node.scratch or 0) >= self.scratch

    def reported(self, number: int, report: PartitionReport) -> Ended:
        task = self._tasks[number]
        self.left.remove(task)
        self.began, self.stage = time.monotonic(), ""
        return Ended(task=task, report=report)

    def lost(self, loss: Loss) -> Iterator[Ended]:
        for task in self.left:
            at_work = self.stage if task is self.left[0] else ""
            found = Loss(kind=loss.kind, stage=at_work or task.first_stage, detail=loss.detail)
            yield Ended(task=task, loss=found)

    def refused(self, detail: str) -> Iterator[Ended]:
        for task in self.left:
            failure = StageFailure(partition=task.partition.key, stage=task.first_stage, detail=detail)
            yield Ended(task=task, report=_refused(failure))


def _refused(failure: StageFailure) -> PartitionReport:
    return PartitionReport(partition=failure.partition, failure=failure, is_refused=True)


async def _end_others(seconds: float) -> None:
    """Ends what else runs in the loop, within some seconds."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, left = await asyncio.wait(others, timeout=seconds)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _demand(group: _Group) -> str:
    wanted = f"it asks for 1 processor and {round(group.memory / 2**20):,} MiB of memory (`memory_bytes`)"
    return wanted + (f", and {group.scratch:,} bytes of scratch space on one node" if group.scratch else " on one node")


def _offer(nodes: Iterable[_Node]) -> str:
    nodes = [node for node in nodes if node.num_cpus >= 1]
    if not nodes:
        return "no node of the Ray cluster has a processor for tasks: start one, with `ray start --address=...`"
    memory = max(node.memory for node in nodes) >> 20
    scratch = max(node.scratch or 0 for node in nodes)
    has = f"{memory:,} MiB of memory" + (f" or {scratch:,} bytes of scratch space" if scratch else "")
    return f"no node of the Ray cluster has more than {has}: start a larger one, or lower what is asked for"


class _Probe:
    """A file in a dataset's local folder: where a worker does not find it, its host has another folder there."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._store = DatasetStore(spec).store
        self.name = f"claims/.probe-{secrets.token_hex(8)}"  # hidden: not a claim
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


def _work(version: str, host: str, probes: dict[str, str | None], pickled: bytes) -> Iterator[str | _Step]:
    """Yields the id of the node with process and host as text, then what `run_group` yields."""
    import ray

    yield f"{ray.get_runtime_context().get_node_id()} process {os.getpid()} on host {socket.gethostname()}"
    yield from run_group(version, host, probes, pickled)


def run_group(version: str, host: str, probes: dict[str, str | None], pickled: bytes) -> Iterator[_Step]:
    """Runs tasks one after the other, on a worker.

    Args:
        version: that of the driver's mm_assets.
        host: the driver's.
        probes: the file that shows that the root of a dataset is the driver's, by dataset; None where it is a URL.
        pickled: the tasks, as classes that another version may not have.

    Yields:
        The number of each task with the name of each stage that it begins, then with its report.

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
            yield number, _refused(failure)
        else:
            for step in task.steps():
                yield number, step


@cache
def _has_probe(spec_name: str, root: str, probe: str) -> bool:
    store = DatasetStore(DatasetSpec.from_config({"name": spec_name, "shards": root, "root": root}, where="")).store
    for pause in (0.0, STORAGE.waits()[0]):  # a network file system may show a new file late
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


def _disconnect(ray: Any) -> None:
    """Ends the connection to the cluster. While the head does not answer, Ray waits for it without a limit."""
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(_DISCONNECT_SECONDS)
    if thread.is_alive():
        _log.warning("the head of the Ray cluster does not answer: the connection is left open")
        # The interpreter would wait for Ray too, and crash without its handler.
        atexit.unregister(ray.shutdown)
        atexit.register(end_process, 1)


def end_process(code: int) -> None:
    """Ends this process without its exit handlers if Ray would not let it end; else does nothing."""
    if any(thread.name == "ray-shutdown" for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
