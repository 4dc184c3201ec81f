"""Batches of a variable number of samples, whose padded size stays within a budget.

Lengths are metadata: they are read once, without decoding anything. Samples of similar length go into a batch, so that
little of it is padding.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError
from mm_assets.loading.plan import Step, split_at
from mm_assets.loading.rules import check_integer

__all__ = ["Budget", "BudgetGrouping", "read_column"]

MAX_LENGTH = 2**40  # so that sums of lengths stay within int64, whatever a damaged record says


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on the padded size of a batch: the number of its samples times the greatest length.

    It is the `batch_size` of a `MultimodalLoader`: ``Budget("audio.num_frames", 960_000)`` for a minute of audio at
    16 kHz. The epoch's order is divided into buckets of consecutive samples. Those of a bucket are sorted by length and
    cut into as few batches as the budget allows, which are then permuted.

    A sample that exceeds the budget is a batch of its own, and a loader warns of it once.

    Attributes:
        column: of the samples' metadata: the name of a modality, a dot, and an entry of its metadata record that counts
            something, as listed in ``docs/spec/fields.md``, also one of a record within it, such as
            ``pair.tokens.num_tokens``; or ``size_`` and the name of a modality, the bytes of its data. The length of a
            sample without the modality is 0.
        total: the most that a batch may have of it, padding included, in the column's unit; from 1.
        bucket: samples that are sorted together, and the most in a batch; from 1. More of them make less padding, and
            batches whose samples are more alike.

    Raises:
        ConfigError: a value is of the wrong kind. A loader raises it too, if the dataset has no such column, or not one
            of integers.
    """

    column: str
    total: int
    bucket: int = 4096

    def __post_init__(self) -> None:
        if not isinstance(self.column, str):
            raise ConfigError("arguments", "batch_size.column", f"found {self.column!r}, expected a column's name")
        check_integer("batch_size.total", self.total, 1)
        check_integer("batch_size.bucket", self.bucket, 1)


class BudgetGrouping:
    """The batches of a budget; see `Grouping`.

    Args:
        budget: the budget.
        lengths: of the samples, (n,) int64.
    """

    def __init__(self, budget: Budget, lengths: npt.NDArray[np.int64]) -> None:
        self.bucket = budget.bucket
        self.settings: Any = {"budget": asdict(budget)}
        self._total = budget.total
        self._lengths = lengths
        longer = np.flatnonzero(lengths > budget.total)
        if len(longer):
            first = int(longer[0])
            message = (
                f"{len(longer):,} of {len(lengths):,} samples exceed the budget of {budget.total:,}, such as sample "
                f"{first} with {budget.column} {lengths[first]:,}: each is a batch of its own"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def __len__(self) -> int:
        """Samples."""
        return len(self._lengths)

    def cut(self, entries: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """The batches of a bucket, shortest samples first."""
        lengths = self._lengths[entries]
        order = np.argsort(lengths, kind="stable")
        return split_at(entries[order], _bounds(lengths[order].tolist(), self._total))

    def count(self, entries: npt.NDArray[np.int64]) -> int:
        """How many batches a bucket has."""
        return len(_bounds(np.sort(self._lengths[entries]).tolist(), self._total)) - 1

    def rows(self, groups: Sequence[npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64], None]:
        """The samples of some batches."""
        return np.concatenate(groups), None

    def may_replace(self, entries: npt.NDArray[np.int64], step: Step) -> npt.NDArray[np.bool_]:
        """Samples that are not longer than those of the batch, so that it stays within the budget."""
        shorter: npt.NDArray[np.bool_] = self._lengths[entries] <= self._lengths[step.indices].max()
        return shorter


def _bounds(lengths: list[int], total: int) -> list[int]:
    """Where to cut ascending lengths into as few runs as possible whose number times their last is within a total.

    Only the last run is not as long as it can be. It has the longest samples, so that few of them are not little work.
    """
    bounds, start, count = [0], 0, len(lengths)
    while start < count:
        fitting = bisect_right(range(start, count), total, key=lambda last: (last - start + 1) * lengths[last])
        start += max(1, fitting)
        bounds.append(start)
    return bounds


def read_column(reader: Any, column: str, argument: str) -> npt.NDArray[np.int64]:
    """Reads a number of every sample from the metadata of a dataset: (n,) int64.

    Raises:
        ConfigError: it has no such column of integers; the error names `argument`.
    """
    read = getattr(reader, "column", None)
    if read is None:
        found = type(reader).__name__
        raise ConfigError("arguments", argument, f"needs a Dataset, whose metadata can be read, found {found}")
    try:
        values = read(column)
    except KeyError as error:
        raise ConfigError("arguments", argument, str(error.args[0])) from error
    if values.dtype.kind not in "iu":
        raise ConfigError("arguments", argument, f"found {column} of type {values.dtype}, expected integers")
    lengths: npt.NDArray[np.int64] = np.minimum(values.astype(np.uint64), MAX_LENGTH).astype(np.int64)
    return lengths
