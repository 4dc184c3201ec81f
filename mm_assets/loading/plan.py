"""Which samples each batch of each rank holds: the positions of an epoch, divided into steps.

All ranks advance together. A step takes the next ``world_size · batch_size`` positions of the epoch's one order, and
rank r the r-th run of `batch_size` of them: the batches of a step, concatenated by rank, are one batch of a single
rank. So the progress of an epoch is one number, the positions that all ranks have received together, and the rest can
be divided again over any number of ranks in batches of any size. Nothing here reads data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError
from mm_assets.loading.order import EpochOrder

__all__ = ["EpochPlan", "Step", "find_rank"]

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
    """

    start: int
    stop: int
    indices: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """How an epoch is divided.

    Attributes:
        order: of the samples.
        batch_size: samples of a batch, on each rank.
        rank: of this process, from 0.
        world_size: how many ranks there are.
        drop_last: whether the remainder at the end, too small for a whole batch on each rank, is left out.
        even_batches: whether the remainder is shared equally, with a few samples repeated where it does not divide;
            else some ranks may have a smaller last batch than others, or none.
    """

    order: EpochOrder
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    even_batches: bool = True

    def count(self) -> int:
        """Batches of this rank in a whole epoch."""
        whole, rest = divmod(self.order.num_samples, self.batch_size * self.world_size)
        return whole + (len(self._last_rows(0, rest)[0]) > 0)

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
        if self.drop_last or rest == 0:
            low = high = 0
        elif self.even_batches:
            size = -(-rest // self.world_size)
            low, high = self.rank * size, (self.rank + 1) * size
        else:
            low, high = (rest * rank // self.world_size for rank in (self.rank, self.rank + 1))
        rows = np.arange(low, high, dtype=np.int64)
        valid = rows < rest
        rows += start
        # The first samples of the epoch are repeated; several times if there are fewer samples than ranks.
        rows[~valid] = (rows[~valid] - start - rest) % max(1, start + rest)
        return rows, valid


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's rank and the number of ranks.

    Args:
        rank: as given by the caller, with `world_size`; else torch.distributed's where it has been initialised, else
            the environment's ``RANK`` and ``WORLD_SIZE``, else 0 of 1.
        world_size: likewise.

    Raises:
        ConfigError: only one of the two is there, or they are not a rank and a number of ranks.
    """
    where = "arguments"
    found: tuple[object, object] = (rank, world_size)
    if rank is None and world_size is None:
        # An initialised one is imported already: torch is not imported to find out.
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            found = distributed.get_rank(), distributed.get_world_size()
        else:
            where = "environment"
            found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
            if found == (None, None):
                return 0, 1
    numbers = [_whole_number(value) for value in found]
    if numbers[0] is None or numbers[1] is None or not numbers[0] < numbers[1]:
        names = "rank, world_size" if where == "arguments" else "RANK, WORLD_SIZE"
        detail = f"found {found[0]!r} and {found[1]!r}, expected both, 0 <= rank < world size"
        raise ConfigError(where, names, detail)
    return numbers[0], numbers[1]


def _whole_number(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
