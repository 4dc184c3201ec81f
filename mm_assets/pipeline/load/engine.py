"""What a load driver asks of an engine, and what an engine answers.

An engine runs partitions somewhere and reports how each ended. It decides nothing: what is repeated, which of two
copies counts, and which partitions there are is up to `pipeline.load.driver`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from mm_assets.errors import SourceError
from mm_assets.pipeline.chain import RAW_SHARDS, Stage
from mm_assets.pipeline.partition.run import PartitionReport, partition_steps
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.records import Earlier, Partition
from mm_assets.rows.schema import DatasetSchema

__all__ = ["Ended", "Engine", "EngineLostError", "Loss", "Running", "Started", "Task", "unobserved"]


class EngineLostError(SourceError):
    """The engine can run nothing any more; the partitions that have not ended have not failed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """One partition to run once, with all that its run needs; can be pickled.

    Attributes:
        spec: the declaration.
        schema: the dataset's, as registered.
        partition: as registered.
        first: the stage to start at; None for the first that is stale.
        earlier: what earlier runs of it left; None lists that.
        memory_factor: how many times the engine's memory per task it needs.
    """

    spec: DatasetSpec
    schema: DatasetSchema
    partition: Partition
    first: Stage | None = None
    earlier: Earlier | None = None
    memory_factor: int = 1

    @property
    def first_stage(self) -> str:
        """Name of the stage that it starts at, as far as that is known before it runs."""
        return (self.first or RAW_SHARDS).name

    @property
    def size(self) -> int:
        """Bytes of its shards."""
        return sum(shard.size for shard in self.partition.shards)

    def steps(self) -> Iterator[str | PartitionReport]:
        """Runs it in this process, as `partition_steps`."""
        return partition_steps(self.spec, self.partition, self.schema, first=self.first, earlier=self.earlier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a task ended without a report.

    Attributes:
        kind: `memory` where more of it may help, `host` where the place where it ran may be at fault, `neighbor` where
            another task of its group was canceled, else `worker`.
        stage: name of the stage that was at work, as far as it is known.
        detail: what ended it, as a clause.
    """

    kind: Literal["worker", "host", "memory", "timeout", "neighbor"]
    stage: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a task: a report, or else a loss."""

    task: Task
    report: PartitionReport | None = None
    loss: Loss | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A task that a worker has begun.

    Attributes:
        began: when, by `time.monotonic`.
        stage: name of the current stage, as far as it is known.
        worker: the process, and its host if the engine spans hosts, as text.
    """

    began: float
    stage: str
    worker: str


Started: TypeAlias = Callable[[Task, str], object]
"""Is called with a task that begins to work and an empty text, then with the name of each stage."""


def unobserved(task: Task, stage: str) -> None:
    """The `Started` that does nothing."""


class Engine(Protocol):
    """Runs tasks, each once.

    Attributes:
        slots: how many groups can be at work at a time; may change as hosts come and go.
        spans_hosts: whether a second copy of a task may run on another host.
        group_bytes: bytes of shards up to which tasks are submitted as one group; 0 submits each alone.
    """

    spans_hosts: bool
    group_bytes: int

    @property
    def slots(self) -> int: ...  # noqa: D102 - an attribute of the protocol

    def fits(self, task: Task) -> bool:
        """Whether there is scratch space for a task beside what is at work."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Starts a group of tasks in one place, one after the other; they may have to wait for that place."""

    def submit_copy(self, task: Task, of: Task) -> bool:
        """Starts a task on another host than that of another task, which is at work; False where there is no other."""

    def running(self, task: Task) -> Running | None:
        """Returns where a task that has not ended runs. Returns None while it waits, or runs in this process."""

    def ended(self, timeout: float | None) -> Iterable[Ended]:
        """Those that ended since the last call; waits for the first of them.

        Args:
            timeout: seconds to wait at most; None waits without a limit.

        Raises:
            EngineLostError: none of those that have not ended will be reported.
        """

    def cancel(self, task: Task) -> None:
        """Ends a task without a result, if it has not ended; those of its group that have not are lost with it.

        A worker that does not react is killed. One that cannot be killed is abandoned, and another takes its slot.
        """

    def close(self) -> None:
        """Ends what is at work, and the engine."""
