"""One batch of a loader: read, damaged samples replaced, transformed, collated.

Everything here may run in any thread, several batches at a time, and depends on the step only, not on threads or their
number. Every error says which batch it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.decoding import Allocate, Batch
from mm_assets.dataset.prefetch import BufferPool, arrays_of
from mm_assets.dataset.workers import WorkerPool
from mm_assets.errors import ConfigError, FormatError, LoaderError, optional_import
from mm_assets.fields import ArraySpec, Field
from mm_assets.loading.collate import MultimodalCollator, as_tensors, map_batch, rows_of
from mm_assets.loading.order import derive_key
from mm_assets.loading.plan import EpochPlan, Step

__all__ = ["BatchMaker", "BatchSource", "Collate", "DamagedSample", "Made", "Transform", "check_pinning"]

Collate = Callable[[Any], Any]
Transform = Callable[..., Any]

# Samples, spread over the epoch, that are tried in place of a batch whose samples are all damaged, before giving up.
MAX_STAND_INS = 16


class BatchSource(Protocol):
    """The source of a loader: a `Dataset`, or an object with the same methods."""

    @property
    def names(self) -> Sequence[str]:
        """The modalities."""

    def __len__(self) -> int:
        """Samples."""

    def read_batch(
        self,
        indices: npt.NDArray[np.int64],
        modalities: Sequence[str],
        *,
        out: Mapping[str, Any] | None = None,
        threads: int | None = 0,
    ) -> Mapping[str, Batch]:
        """As `Dataset.read_batch`; where it has a parameter `verify`, it is given the loader's."""

    def batch_layout(self, n: int, modalities: Sequence[str]) -> Mapping[str, ArraySpec | dict[str, ArraySpec]]:
        """As `Dataset.batch_layout`."""


class _NoValues(NamedTuple):
    """A `Batch` in which no sample has a value, with its field's `empty_value`."""

    values: Any
    present: npt.NDArray[np.bool_]
    empty: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedSample:
    """A sample that was left out because its bytes are damaged; `index` is that in the dataset."""

    index: int
    epoch: int
    error: FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A batch, and what is reported about it.

    Attributes:
        batch: result of the collator; a dict has ``valid`` and ``index`` too.
        damaged: samples that were replaced.
        stop: positions of the epoch that all ranks have received with it.
    """

    batch: Any
    damaged: tuple[DamagedSample, ...]
    stop: int


class BatchMaker:
    """Makes the batches of one epoch.

    Args:
        source: to read from.
        names: modalities to read.
        plan: of the epoch.
        collator: makes a batch of columns if it is a `MultimodalCollator`, else of a list of samples.
        transforms: by modality, applied to each value that is present.
        threads: that decode and transform a batch; 0 or 1 does both in the calling thread.
        first_threads: the same of batch 0, for which the caller waits.
        keep: batches whose arrays are cached to be used again.
        skip_damaged: whether damaged samples are replaced; else they raise.
        verify: whether checksums are checked.
        pin_memory: whether tensors are in pinned memory.
    """

    def __init__(
        self,
        source: BatchSource,
        names: Sequence[str],
        plan: EpochPlan,
        *,
        collator: Collate,
        transforms: Mapping[str, Transform],
        threads: int,
        first_threads: int,
        keep: int,
        skip_damaged: bool,
        verify: bool,
        pin_memory: bool,
    ) -> None:
        self._source = source
        self._names = tuple(names)
        self._order = plan.order
        self._collator = collator
        self._transforms = dict(transforms)
        self._seeded = {name for name, transform in self._transforms.items() if _takes_rng(transform)}
        self._threads = threads if threads > 1 else 0
        self._first_threads = first_threads if first_threads > 1 else 0
        self._pool = WorkerPool()
        self._skip_damaged = skip_damaged
        self._pin_memory = pin_memory
        self._options: dict[str, Any] = {}
        if "verify" in inspect.signature(source.read_batch).parameters:
            self._options["verify"] = verify
        self._fields: Mapping[str, Field] = getattr(source, "fields", {})
        self._layouts = source.batch_layout(plan.batch_size, self._names)
        # Torch's own allocator knows which pinned blocks a device still reads from; ours would not.
        self._allocate: Allocate = _pinned_memory
        if not pin_memory:
            num_arrays = sum(1 if isinstance(one, ArraySpec) else len(one) for one in self._layouts.values())
            outputs = collator.outputs if isinstance(collator, MultimodalCollator) else ()
            self._allocate = BufferPool(keep=keep * max(1, num_arrays, len(outputs))).take

    def make(self, number: int, step: Step) -> Made:
        """Make a batch; `number` is for messages.

        Raises:
            FormatError: a sample is damaged, and those are not skipped.
            LoaderError: all samples are damaged, and all that could replace them.
            CollateError: values do not fit the collator's rules.
        """
        with _noted(f"batch {number} of this rank, epoch {self._order.epoch}, positions {step.start} to {step.stop}"):
            return self._make(step, self._threads if number else self._first_threads)

    def _make(self, step: Step, threads: int) -> Made:
        indices, damaged, columns = self._read(step, threads)
        valid = step.valid
        if damaged:
            lost = {one.index for one in damaged}
            valid = valid & np.fromiter((index not in lost for index in step.indices.tolist()), np.bool_, len(valid))
        for name, transform in self._transforms.items():
            columns[name] = self._transform(name, transform, columns[name], indices, threads)
        return Made(batch=self._collate(columns, indices, valid), damaged=damaged, stop=step.stop)

    def close(self) -> None:
        """End the threads that transform; those that decode are the source's."""
        self._pool.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(
        self, step: Step, threads: int
    ) -> tuple[npt.NDArray[np.int64], tuple[DamagedSample, ...], dict[str, Batch]]:
        """The samples that are in the batch, those that should have been, and the values."""
        options = {**self._options, "threads": threads, "out": arrays_of(self._layouts, self._allocate)}
        try:
            return step.indices, (), dict(self._source.read_batch(step.indices, self._names, **options))
        except FormatError as error:
            if not self._skip_damaged:
                raise
            damaged = self._find_damaged(step.indices)
            if not damaged:  # no sample alone is damaged
                raise
            indices = self._stand_in(step, {one.index for one in damaged}, error)
        return indices, damaged, dict(self._source.read_batch(indices, self._names, **options))

    def _find_damaged(self, indices: npt.NDArray[np.int64]) -> tuple[DamagedSample, ...]:
        epoch = self._order.epoch
        found = ((index, self._damage(index)) for index in dict.fromkeys(indices.tolist()))
        return tuple(DamagedSample(index=index, epoch=epoch, error=error) for index, error in found if error)

    def _damage(self, index: int) -> FormatError | None:
        """The damage of a sample, or None."""
        options = {**self._options, "threads": 0}
        try:
            self._source.read_batch(np.array([index], np.int64), self._names, **options)
        except FormatError as error:
            return error
        return None

    def _stand_in(self, step: Step, lost: set[int], error: FormatError) -> npt.NDArray[np.int64]:
        """The samples of a step, with others in the rows of the damaged ones."""
        good = [index for index in step.indices.tolist() if index not in lost]
        if not good:
            # A shard that cannot be opened, say, and an order that takes its samples together.
            count = self._order.num_samples
            far = (step.start + np.arange(1, MAX_STAND_INS + 1) * max(1, count // MAX_STAND_INS)) % count
            candidates = self._order.at(far).tolist()
            good = [next((index for index in candidates if index not in lost and self._damage(index) is None), -1)]
            if good[0] < 0:
                detail = f"all {len(step.indices)} samples of a batch are damaged, and so are {MAX_STAND_INS} others"
                raise LoaderError(f"{detail}; the first: {error}") from error
        indices = step.indices.copy()
        rows = [row for row, index in enumerate(indices.tolist()) if index in lost]
        indices[rows] = [good[number % len(good)] for number in range(len(rows))]
        return indices

    # --- transforming -------------------------------------------------------------------------------------------------

    def _transform(
        self, name: str, transform: Transform, column: Batch, indices: npt.NDArray[np.int64], threads: int
    ) -> Batch:
        """Each value that is present transformed; None makes it absent."""
        values, present = rows_of(column.values, column.present), column.present.tolist()

        def run(start: int, stop: int) -> list[Any]:
            found: list[Any] = []
            for row in range(start, stop):
                index = int(indices[row])
                if not present[row]:
                    found.append(None)
                    continue
                with _noted(f"transform of {name!r}, sample {index}"):
                    found.append(transform(values[row], **self._random(name, index)))
            return found

        made = self._pool.map_runs(threads, len(values), run)
        return Batch(made, np.fromiter((value is not None for value in made), np.bool_, len(made)))

    def _random(self, name: str, index: int) -> dict[str, Any]:
        """A transform's own random generator, the same wherever and whenever the sample is read in this epoch."""
        if name not in self._seeded:
            return {}
        key = derive_key(self._order.seed, self._order.epoch, index, int.from_bytes(name.encode(), "little"))
        return {"rng": np.random.Generator(np.random.Philox(key=key))}

    # --- collating ----------------------------------------------------------------------------------------------------

    def _collate(self, columns: dict[str, Batch], indices: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_]) -> Any:
        extra: dict[str, Any] = {"valid": valid, "index": indices}
        if isinstance(self._collator, MultimodalCollator):
            batch = self._collator(
                {name: self._like_its_field(name, column) for name, column in columns.items()}, allocate=self._allocate
            )
            if self._collator.return_tensors == "pt":
                extra = as_tensors(extra)
        else:
            rows = {name: rows_of(column.values, column.present) for name, column in columns.items()}
            batch = self._collator(
                [{name: values[row] for name, values in rows.items()} for row in range(len(indices))]
            )
            if not isinstance(batch, dict):
                return batch
        for name, value in extra.items():
            batch.setdefault(name, value)
        return map_batch(batch, _pinned) if self._pin_memory else batch

    def _like_its_field(self, name: str, column: Batch) -> Batch | _NoValues:
        """A column, with dtype and rank of its field if no sample has a value to tell them."""
        if column.present.any() or name in self._transforms or name not in self._fields:
            return column
        return _NoValues(*column, self._fields[name].empty_value)


def _takes_rng(transform: Transform) -> bool:
    """Whether a transform has a parameter `rng`."""
    try:
        return "rng" in inspect.signature(transform).parameters
    except ValueError:  # some callables of C have no signature
        return False


@contextmanager
def _noted(note: str) -> Iterator[None]:
    """Adds a note to every exception."""
    try:
        yield
    except BaseException as raised:
        raised.add_note(note)
        raise


# --- pinned memory ----------------------------------------------------------------------------------------------------


def check_pinning(collator: Collate) -> None:
    """Refuse to pin memory where it is not possible.

    Raises:
        ConfigError: the collator makes no tensors, or torch finds no device to pin memory for.
        MissingExtraError: torch is not installed.
    """
    with optional_import("torch", "pin_memory=True"):
        import torch
    if not isinstance(collator, MultimodalCollator) or collator.return_tensors != "pt":
        raise ConfigError("arguments", "pin_memory", "needs a MultimodalCollator with return_tensors='pt'")
    if not torch.accelerator.is_available():
        raise ConfigError("arguments", "pin_memory", "torch finds no accelerator to pin memory for")


def _pinned_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """New memory that devices copy from directly, out of torch's allocator."""
    import torch

    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    array: npt.NDArray[Any] = torch.empty(shape, dtype=kind, pin_memory=True).numpy()
    return array


def _pinned(value: Any) -> Any:
    """A tensor in pinned memory, copied if it is elsewhere; any other value unchanged."""
    if hasattr(value, "is_pinned"):
        return value if value.is_pinned() else value.pin_memory()
    return value
