"""Which samples each batch of each rank holds: the positions of an epoch, divided into steps.

All ranks advance together. A step takes the next ``world_size · batch_size`` positions of the epoch's one order, and
rank r the r-th run of `batch_size` of them: the batches of a step, concatenated by rank, are one batch of a single
rank. So the progress of an epoch is one number, the positions that all ranks have received together, and the rest can
be divided again over any number of ranks in batches of any size. Nothing here reads data.

An `EpochPlan` divides samples. A `GroupPlan` divides groups of samples, which are made of one bucket of the order after
the other; all else is the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError
from mm_assets.loading.order import EpochOrder, derive_key, permute

__all__ = ["LAST", "EpochPlan", "GroupPlan", "Grouping", "Plan", "Step", "find_rank", "split_at", "torch_worker"]

LAST = ("even", "drop", "short")
"""The remainder of an epoch is shared equally, and a few samples are repeated where it does not divide; or left out; or
shared without repeats, so that some ranks have a smaller last batch than others, or none."""

# Positions whose samples are computed together: an order costs some 100 us a call and 50 ns a position. Blocks that
# fit the processor's cache are the fastest, by a factor of four.
CHUNK = 8192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One batch of one rank.

    Attributes:
        start: positions of the epoch that all ranks have received before it.
        stop: the same after it.
        indices: (n,) int64, the samples.
        valid: (n,) bool; False for a sample that is only repeated, so that all ranks have a batch of one size.
        parts: (n,) records, which part of the sample is in the batch, and where; None if the batch has whole samples.
    """

    start: int
    stop: int
    indices: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]
    parts: npt.NDArray[np.void] | None = None


class Plan(Protocol):
    """How an epoch is divided into batches: an `EpochPlan` or a `GroupPlan`."""

    @property
    def order(self) -> EpochOrder:
        """The order of what is divided: samples, or parts of them."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def is_even(self) -> bool:
        """Whether every rank has the same number of batches."""

    @property
    def settings(self) -> Any:
        """What the meaning of a position follows from, in addition to the order: plain values for a state."""

    def count(self) -> int:
        """Batches of this rank in a whole epoch."""

    def steps(self, start: int = 0) -> Iterator[Step]:
        """The batches of this rank, after a position of the epoch: 0, or the `stop` of a step of any rank."""

    def stand_ins(self, step: Step, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void] | None]:
        """Samples from all over the epoch, and their `parts`, that may replace a sample of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """How an epoch is divided.

    Attributes:
        order: of the samples.
        batch_size: samples of a batch, on each rank.
        rank: of this process, from 0.
        world_size: how many ranks there are.
        last: what becomes of the remainder at the end, too small for a whole batch on each rank: one of `LAST`.
    """

    order: EpochOrder
    batch_size: int
    rank: int = 0
    world_size: int = 1
    last: str = "even"

    @property
    def is_even(self) -> bool:
        """Whether every rank has the same number of batches."""
        return self.last != "short" or self.world_size == 1

    @property
    def settings(self) -> None:
        """Nothing: a state may be loaded with another batch size."""

    def count(self) -> int:
        """Batches of this rank in a whole epoch."""
        whole, rest = divmod(self.order.num_samples, self.batch_size * self.world_size)
        return whole + (len(self._last_rows(0, rest)[0]) > 0)

    def stand_ins(self, step: Step, count: int) -> tuple[npt.NDArray[np.int64], None]:
        """As `Plan.stand_ins`."""
        return self.order.at(_spread(step.start, count, self.order.num_samples)), None

    def steps(self, start: int = 0) -> Iterator[Step]:
        """The batches of this rank, after the first `start` positions of the epoch."""
        count = self.order.num_samples
        together = self.batch_size * self.world_size
        whole_stop = start + (count - start) // together * together
        mine = self.rank * self.batch_size + np.arange(self.batch_size)
        while start < whole_stop:
            num_steps = min(max(1, CHUNK // self.batch_size), (whole_stop - start) // together)
            starts = start + together * np.arange(num_steps)
            indices = self.order.at((starts[:, None] + mine).ravel()).reshape(num_steps, self.batch_size)
            for row in indices:
                # A copy: the caller may hold it, and must not hold the whole chunk with it.
                yield Step(start=start, stop=start + together, indices=row.copy(), valid=np.ones(len(row), np.bool_))
                start += together
        rows, valid = self._last_rows(start, count - start)
        if len(rows):
            yield Step(start=start, stop=count, indices=self.order.at(rows), valid=valid)

    def _last_rows(self, start: int, rest: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Positions of this rank's last batch, out of `rest` from `start` on, and which of them are not repeats."""
        rows = _share(rest, self.rank, self.world_size, self.last)
        valid = rows < rest
        rows += start
        # The first samples of the epoch are repeated; several times if there are fewer samples than ranks.
        rows[~valid] = (rows[~valid] - start - rest) % max(1, start + rest)
        return rows, valid


class Grouping(Protocol):
    """What an epoch's order is of, and how consecutive entries of it, a bucket, become groups.

    An entry is a sample or a part of one, by its number. A group is what a `GroupPlan` divides, a packed sequence say.
    """

    @property
    def bucket(self) -> int:
        """Entries whose groups are made together."""

    @property
    def settings(self) -> Any:
        """What the groups follow from, in addition to the dataset: plain values."""

    def cut(self, entries: npt.NDArray[np.int64]) -> Sequence[npt.NDArray[np.int64]]:
        """The groups of the entries of a bucket: each entry is in one of them."""

    def count(self, entries: npt.NDArray[np.int64]) -> int:
        """How many groups `cut` makes."""

    def rows(
        self, groups: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void] | None]:
        """The rows of a batch of some groups: samples and, unless they are whole, `parts`, as in `Step`."""

    def may_replace(self, entries: npt.NDArray[np.int64], step: Step) -> npt.NDArray[np.bool_]:
        """Which entries may replace a damaged sample of a step, (n,)."""


_GROUPS = 5  # place in the derivation of keys, which no other use shares: see `order`


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """How an epoch of groups is divided.

    The groups of a bucket are permuted if the order is shuffled, so that their sizes are in no order. They follow from
    grouping and order alone, not from the ranks. A position is the number of entries in the buckets before, plus the
    number of groups of its bucket that all ranks have received: so one bucket is made again to resume, and nothing is
    counted.

    Attributes:
        order: of the entries.
        grouping: makes groups of them.
        batch_size: groups of a batch, on each rank.
        rank: as for `EpochPlan`, and so on.
    """

    order: EpochOrder
    grouping: Grouping
    batch_size: int = 1
    rank: int = 0
    world_size: int = 1
    last: str = "even"

    @property
    def is_even(self) -> bool:
        """Whether every rank has the same number of batches."""
        return self.last != "short" or self.world_size == 1

    @property
    def settings(self) -> Any:
        """What the groups follow from."""
        return self.grouping.settings

    def count(self) -> int:
        """Batches of this rank in a whole epoch; the first call makes the groups of all of it."""
        whole, rest = divmod(self._num_groups, self.batch_size * self.world_size)
        return whole + (len(_share(rest, self.rank, self.world_size, self.last)) > 0)

    @cached_property
    def _num_groups(self) -> int:
        return sum(self.grouping.count(entries) for _, entries in self._buckets(0))

    def steps(self, start: int = 0) -> Iterator[Step]:
        """The batches of this rank, after a position of the epoch."""
        together = self.batch_size * self.world_size
        mine = range(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        groups = self._groups(start)
        while taken := list(islice(groups, together)):
            stop = taken[-1][0]
            numbers: Sequence[int] = mine
            if len(taken) < together:
                numbers = _share(len(taken), self.rank, self.world_size, self.last).tolist()
                if not numbers:
                    return
            # The remainder's own groups are repeated.
            chosen = [taken[number % len(taken)][1] for number in numbers]
            indices, parts = self.grouping.rows(chosen)
            valid = np.repeat([number < len(taken) for number in numbers], [len(group) for group in chosen])
            yield Step(start=start, stop=stop, indices=indices, valid=valid, parts=parts)
            start = stop

    def stand_ins(self, step: Step, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void] | None]:
        """As `Plan.stand_ins`."""
        entries = self.order.at(_spread(step.start, count, self.order.num_samples))
        return self.grouping.rows([entries[self.grouping.may_replace(entries, step)]])

    def _groups(self, position: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The groups after a position, each with the position after it."""
        for first, entries in self._buckets(position):
            groups = self.grouping.cut(entries)
            if self.order.shuffle:
                key = derive_key(self.order.seed, self.order.epoch, _GROUPS, first)
                groups = [groups[number] for number in permute(np.arange(len(groups)), len(groups), key).tolist()]
            for number in range(position - first if position > first else 0, len(groups)):
                is_last = number + 1 == len(groups)
                yield first + (len(entries) if is_last else number + 1), groups[number]

    def _buckets(self, position: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The buckets from that of a position on: the position of the first entry, and the entries."""
        size, count = self.grouping.bucket, self.order.num_samples
        chunk = size * max(1, CHUNK // size)
        for start in range(position - position % size, count, chunk):
            entries = self.order.at(np.arange(start, min(start + chunk, count)))
            for first in range(0, len(entries), size):
                yield start + first, entries[first : first + size]


def _share(rest: int, rank: int, world_size: int, last: str) -> npt.NDArray[np.int64]:
    """Which of the `rest` at the end of an epoch a rank has, by their numbers; those from `rest` on are repeats."""
    if last == "drop" or rest == 0:
        low = high = 0
    elif last == "even":
        size = -(-rest // world_size)
        low, high = rank * size, (rank + 1) * size
    else:
        low, high = (rest * number // world_size for number in (rank, rank + 1))
    return np.arange(low, high, dtype=np.int64)


def _spread(start: int, count: int, size: int) -> npt.NDArray[np.int64]:
    """Positions all over an epoch of some size, counted from `start`."""
    return (start + np.arange(1, count + 1) * max(1, size // count)) % size


def split_at(entries: npt.NDArray[np.int64], bounds: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    """Runs of an array between bounds: as `numpy.split`, but several times as fast."""
    return [entries[low:high] for low, high in pairwise(bounds)]


def torch_worker() -> tuple[int, int]:
    """This process's number among the workers of torch's DataLoader, and how many there are; 0 of 1 in no worker."""
    data = sys.modules.get("torch.utils.data")  # a worker has imported it
    info = None if data is None else data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class _Launcher(NamedTuple):
    """What tells processes their rank in the environment; of several variables for the size the first that is set."""

    name: str
    rank: str
    sizes: tuple[str, ...]


_TORCH = _Launcher("torch", "RANK", ("WORLD_SIZE",))
_OPEN_MPI = _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",))
_MPICH = _Launcher("MPICH", "PMI_RANK", ("PMI_SIZE",))
_JAX = _Launcher("JAX", "JAX_PROCESS_ID", ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"))
_SLURM = _Launcher("SLURM", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))  # of the step, or of the job

_Ranks = dict[str, tuple[int, int]]  # rank and number of ranks, by who says so


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's rank and the number of ranks.

    As given by the caller, else of the process group of torch.distributed or jax.distributed that has been initialized,
    else of the launcher in the environment: torch, SLURM, Open MPI, MPICH or JAX; else 0 of 1. torchrun's ranks count
    wherever it runs, and a launcher that was started in the tasks of SLURM may have more ranks than SLURM has tasks.

    Args:
        rank: from 0; with `world_size`.
        world_size: number of ranks.

    Raises:
        ConfigError: only one of the two is there; they are not a rank and a number of ranks; two sources disagree; or
            this is the script of a SLURM job with several tasks, which only srun starts.
    """
    if rank is not None or world_size is not None:
        return _checked("arguments", "rank, world_size", rank, world_size)
    groups = _process_groups()
    launchers = _launchers()
    found = groups or launchers
    if set(groups.values()) == {(0, 1)} and any(size > 1 for _, size in launchers.values()):
        found = groups | launchers  # each of many processes would take itself for the only one
    if len(set(found.values())) > 1:
        said = ", ".join(f"rank {number} of {size} ({name})" for name, (number, size) in found.items())
        raise ConfigError("environment", "rank, world_size", f"found {said}; give the loader rank and world_size")
    return next(iter(found.values()), (0, 1))


def _process_groups() -> _Ranks:
    """The ranks in process groups; a library that is not imported has none, and is not imported to find out."""
    found: _Ranks = {}
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        found["torch.distributed"] = _checked("environment", "torch", torch.get_rank(), torch.get_world_size())
    jax = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if jax is not None and is_initialized is not None and is_initialized():
        found["jax.distributed"] = _checked("environment", "jax", jax.process_index(), jax.process_count())
    return found


def _launchers() -> _Ranks:
    """The ranks in the environment."""
    found: _Ranks = {}
    for launcher in (_TORCH, _OPEN_MPI, _MPICH, _JAX):
        size_name = next((name for name in launcher.sizes if name in os.environ), launcher.sizes[0])
        pair = os.environ.get(launcher.rank), os.environ.get(size_name)
        if pair != (None, None):
            found[launcher.name] = _checked("environment", f"{launcher.rank}, {size_name}", *pair)
    if _TORCH.name in found and "TORCHELASTIC_RUN_ID" in os.environ:
        return {_TORCH.name: found[_TORCH.name]}  # torchrun, whose agents any other launcher may have started
    task = _slurm_task(is_alone=not found)
    if task is None or any(_is_within(task, pair, name) for name, pair in found.items()):
        return found
    return found | {_SLURM.name: task}


def _slurm_task(*, is_alone: bool) -> tuple[int, int] | None:
    """This process's number among the tasks of a SLURM step; None in no step.

    Raises:
        ConfigError: the numbers are wrong, or nothing but SLURM says which rank this script of a job is.
    """
    if _SLURM.rank not in os.environ:
        return None  # the shell of an allocation
    sizes = [(name, os.environ[name]) for name in _SLURM.sizes if name in os.environ]
    is_script = "SLURM_JOB_ID" in os.environ and not {"SLURM_STEP_ID", "SLURM_STEPID"} & os.environ.keys()
    if is_script and (not sizes or not is_alone):
        return None
    name, size = sizes[0] if sizes else (_SLURM.sizes[-1], None)
    task = _checked("environment", f"{_SLURM.rank}, {name}", os.environ[_SLURM.rank], size)
    if is_script and task[1] > 1:
        detail = f"this is the script of a job with {task[1]} tasks: start it with srun, or give rank and world_size"
        raise ConfigError("environment", f"{_SLURM.rank}, {name}", detail)
    return task


def _is_within(task: tuple[int, int], pair: tuple[int, int], launcher: str) -> bool:
    """Whether a launcher may have started this rank in a task of SLURM, as one of several in it."""
    (rank, size), (number, count) = pair, task
    if size <= count:
        return False
    # The daemons of mpirun are tasks of a step of their own, with other numbers than the nodes.
    return launcher == _OPEN_MPI.name or (size % count == 0 and rank // (size // count) == number)


def _checked(where: str, names: str, rank: object, world_size: object) -> tuple[int, int]:
    """A rank and a number of ranks; `ConfigError` if they are not."""
    numbers = [_whole_number(value) for value in (rank, world_size)]
    if numbers[0] is None or numbers[1] is None or not numbers[0] < numbers[1]:
        detail = f"found {rank!r} and {world_size!r}, expected both, 0 <= rank < world size"
        raise ConfigError(where, names, detail)
    return numbers[0], numbers[1]


def _whole_number(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
