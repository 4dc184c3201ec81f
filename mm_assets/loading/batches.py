"""One batch of a loader: read, damaged samples replaced, transformed, collated.

Everything here may run in any thread, several batches at a time, and depends on the step only, not on threads or their
number. Every error says which batch it was.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.decoding import Allocate, Batch
from mm_assets.dataset.prefetch import BufferPool, arrays_of
from mm_assets.dataset.workers import WorkerPool
from mm_assets.errors import ConfigError, FormatError, LoaderError
from mm_assets.fields import ArraySpec, Field
from mm_assets.loading.collate import MultimodalCollator, as_tensors, map_batch, pinned, pinned_memory, rows_of
from mm_assets.loading.order import derive_key
from mm_assets.loading.plan import Plan, Step
from mm_assets.loading.windows import Window
from mm_assets.summaries import describe

__all__ = ["BatchMaker", "BatchSource", "Collate", "DamagedSample", "Made", "Transform"]

Collate = Callable[..., Any]
Transform = Callable[..., Any]
Parts = npt.NDArray[np.void] | None  # as in `Step`

# Samples, spread over the epoch, that are tried in place of a batch whose samples are all damaged, before giving up.
MAX_STAND_INS = 16

_DECODING = -2  # a place in the derivation of keys, which no name of a modality has


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
        windows: npt.NDArray[np.float64] | None = None,
        on_read: Callable[[], object] | None = None,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> Mapping[str, Batch]:
        """As `Dataset.read_batch`; `windows` is only given with a `Window`, and `keys` if a field `draws`."""

    def durations(self, indices: npt.NDArray[np.int64], modalities: Sequence[str]) -> npt.NDArray[np.float64]:
        """As `Dataset.durations`; called only with a `Window`."""

    def batch_layout(self, n: int, modalities: Sequence[str]) -> Mapping[str, ArraySpec | dict[str, ArraySpec]]:
        """As `Dataset.batch_layout`."""


_Columns = tuple[dict[str, Batch], "npt.NDArray[np.float64] | None"]


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
        times: seconds of `time.perf_counter` at which it was begun, read, decoded, transformed and collated.
    """

    batch: Any
    damaged: tuple[DamagedSample, ...]
    stop: int
    times: tuple[float, ...]


class BatchMaker:
    """Makes the batches of one epoch.

    Args:
        source: to read from.
        names: modalities to read.
        plan: of the epoch.
        collator: makes a batch of columns if it is a `MultimodalCollator`, else of a list of samples.
        transforms: by modality, applied to each value that is present.
        transform: applied to each sample after `transforms`, if it is given.
        threads: that decode and transform a batch; 0 or 1 does both in the calling thread.
        first_threads: the same of batch 0, for which the caller waits.
        keep: batches whose arrays are cached to be used again.
        skip_damaged: whether damaged samples are replaced; else they raise.
        window: of each sample that is read; None for all of it.
    """

    def __init__(
        self,
        source: BatchSource,
        names: Sequence[str],
        plan: Plan,
        *,
        collator: Collate,
        transforms: Mapping[str, Transform],
        transform: Transform | None,
        threads: int,
        first_threads: int,
        keep: int,
        skip_damaged: bool,
        window: Window | None = None,
    ) -> None:
        self._source = source
        self._names = tuple(names)
        self._plan = plan
        self._order = plan.order
        self._collator = collator
        self._transforms = dict(transforms)
        self._transform = transform
        self._seeded = {name for name, function in self._transforms.items() if _takes_rng(function)}
        self._is_seeded = transform is not None and _takes_rng(transform)
        self._collates_with_rng = not isinstance(collator, MultimodalCollator) and _takes_rng(collator)
        self._threads = threads if threads > 1 else 0
        self._first_threads = first_threads if first_threads > 1 else 0
        self._pool = WorkerPool()
        self._skip_damaged = skip_damaged
        self._window = window
        self._find_part: Callable[[str], Any] | None = getattr(source, "part", None)
        fields: Mapping[str, Field] = getattr(source, "fields", {})
        read = [self._find_part(name).field if self._find_part else fields.get(name) for name in self._names]
        self._draws = any(field is not None and field.draws for field in read)
        self._layouts: dict[int, Mapping[str, ArraySpec | dict[str, ArraySpec]]] = {}  # by the samples of a batch
        # Torch's own allocator knows which pinned blocks a device still reads from; ours would not.
        self._allocate: Allocate = pinned_memory
        if not (isinstance(collator, MultimodalCollator) and collator.pin_memory):
            num_arrays = sum(1 if isinstance(one, ArraySpec) else len(one) for one in self._layout(1).values())
            outputs = collator.outputs if isinstance(collator, MultimodalCollator) else ()
            self._allocate = BufferPool(keep=keep * max(1, num_arrays, len(outputs))).take

    def of(self, plan: Plan) -> BatchMaker:
        """Returns what makes the batches of another epoch, with the same threads and memory."""
        maker = copy.copy(self)
        maker._plan, maker._order = plan, plan.order
        return maker

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
        times = [time.perf_counter()] * 2
        indices, parts, damaged, (columns, windows) = self._read(step, threads, times)
        times.append(time.perf_counter())
        valid = step.valid
        if damaged:
            lost = {one.index for one in damaged}
            valid = valid & np.fromiter((index not in lost for index in step.indices.tolist()), np.bool_, len(valid))
        for name, transform in self._transforms.items():
            columns[name] = self._transform_values(name, transform, columns[name], indices, threads)
        if self._transform is not None:
            columns = self._transform_samples(self._transform, columns, indices, threads)
        times.append(time.perf_counter())
        extra: dict[str, Any] = {"valid": valid, **self._located(indices)}
        if windows is not None:
            extra["window"] = windows
        batch = self._collate(columns, indices, parts, extra)
        times.append(time.perf_counter())
        return Made(batch=batch, damaged=damaged, stop=step.stop, times=tuple(times))

    def close(self) -> None:
        """End the threads that transform; those that decode are the source's."""
        self._pool.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _layout(self, n: int) -> Mapping[str, ArraySpec | dict[str, ArraySpec]]:
        if n not in self._layouts:
            self._layouts[n] = self._source.batch_layout(n, self._names)
        return self._layouts[n]

    def _read(
        self, step: Step, threads: int, times: list[float]
    ) -> tuple[npt.NDArray[np.int64], Parts, tuple[DamagedSample, ...], _Columns]:
        """The samples in the batch, and their parts, those that should have been, and the values; when it was read."""

        def read(indices: npt.NDArray[np.int64]) -> _Columns:
            out = arrays_of(self._layout(len(indices)), self._allocate)
            keys = {"keys": self._keys(indices)} if self._draws else {}
            return self._read_columns(indices, out=out, threads=threads, on_read=note, **keys)

        def note() -> None:
            times[1] = time.perf_counter()

        try:
            return step.indices, step.parts, (), read(step.indices)
        except FormatError as error:
            if not self._skip_damaged:
                raise
            damaged = self._find_damaged(step.indices)
            if not damaged:  # no sample alone is damaged
                raise
            indices, parts = self._stand_in(step, {one.index for one in damaged}, error)
        return indices, parts, damaged, read(indices)

    def _keys(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """A key of each sample in this epoch, the same wherever and whenever it is read."""
        seed, epoch = self._order.seed, self._order.epoch
        return np.array([derive_key(seed, epoch, index, _DECODING) for index in indices.tolist()], np.uint64)

    def _read_columns(self, indices: npt.NDArray[np.int64], **options: Any) -> _Columns:
        """The values of samples and, if only a window of each is read, those windows."""
        if self._window is None:
            return dict(self._source.read_batch(indices, self._names, **options)), None
        durations = self._source.durations(indices, self._names)
        windows = self._window.draw(durations, indices, seed=self._order.seed, epoch=self._order.epoch)
        return dict(self._source.read_batch(indices, self._names, windows=windows, **options)), windows

    def _find_damaged(self, indices: npt.NDArray[np.int64]) -> tuple[DamagedSample, ...]:
        epoch = self._order.epoch
        found = ((index, self._damage(index)) for index in dict.fromkeys(indices.tolist()))
        return tuple(DamagedSample(index=index, epoch=epoch, error=error) for index, error in found if error)

    def _damage(self, index: int) -> FormatError | None:
        """The damage of a sample, or None."""
        try:
            self._read_columns(np.array([index], np.int64))
        except FormatError as error:
            return error
        return None

    def _stand_in(self, step: Step, lost: set[int], error: FormatError) -> tuple[npt.NDArray[np.int64], Parts]:
        """The samples of a step, and their parts, with others in the rows of the damaged ones."""
        candidates, parts = step.indices, step.parts
        good = [row for row, index in enumerate(candidates.tolist()) if index not in lost]
        if not good:
            # A shard that cannot be opened, say, and an order that takes its samples together.
            candidates, parts = self._plan.stand_ins(step, MAX_STAND_INS)
            indices = candidates.tolist()
            good = [row for row, index in enumerate(indices) if index not in lost and self._damage(index) is None][:1]
            if not good:
                detail = f"all {len(step.indices)} samples of a batch are damaged, and so are {len(indices)} others"
                raise LoaderError(f"{detail}; the first: {error}") from error
        rows = [row for row, index in enumerate(step.indices.tolist()) if index in lost]
        sources = np.resize(good, len(rows))
        replaced = step.indices.copy()
        replaced[rows] = candidates[sources]
        if step.parts is None or parts is None:
            return replaced, None
        in_place = step.parts.copy()
        for name in ("start", "stop", "num_tokens"):
            in_place[name][rows] = parts[name][sources]
        sizes = step.parts["stop"] - step.parts["start"]
        np.minimum(in_place["stop"], in_place["start"] + sizes, out=in_place["stop"])
        return replaced, in_place

    # --- transforming -------------------------------------------------------------------------------------------------

    def _transform_values(
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
                rng = self._rng(index, int.from_bytes(name.encode(), "little")) if name in self._seeded else {}
                with _noted(f"transform of {name!r}, {self._described(index)}"):
                    found.append(transform(values[row], **rng))
            return found

        return _column(self._pool.map_runs(threads, len(values), run))

    def _transform_samples(
        self, transform: Transform, columns: Mapping[str, Batch], indices: npt.NDArray[np.int64], threads: int
    ) -> dict[str, Batch]:
        """Each sample transformed; a name that only some results have is absent in the others."""
        samples = _samples(columns, len(indices))

        def run(start: int, stop: int) -> list[Mapping[str, Any]]:
            found = []
            for row in range(start, stop):
                index = int(indices[row])
                with _noted(f"transform, {self._described(index)}"):
                    result = transform(samples[row], **(self._rng(index) if self._is_seeded else {}))
                    if not isinstance(result, Mapping):
                        raise ConfigError(
                            "arguments", "transform", f"gave {describe(result)}, expected a dict of values by name"
                        )
                found.append(result)
            return found

        results = self._pool.map_runs(threads, len(samples), run)
        names = dict.fromkeys(name for result in results for name in result)
        return {name: _column([result.get(name) for result in results]) for name in names}

    def _rng(self, *place: int) -> dict[str, Any]:
        """A random generator as an argument, the same wherever and whenever that place is read in this epoch."""
        key = derive_key(self._order.seed, self._order.epoch, *place)
        return {"rng": np.random.Generator(np.random.Philox(key=key))}

    # --- collating ----------------------------------------------------------------------------------------------------

    def _collate(
        self, columns: dict[str, Batch], indices: npt.NDArray[np.int64], parts: Parts, extra: dict[str, Any]
    ) -> Any:
        if parts is not None:
            return self._collator(_samples(columns, len(indices)), parts=parts, index=indices, valid=extra["valid"])
        if isinstance(self._collator, MultimodalCollator):
            batch = self._collator(
                {name: self._like_its_field(name, column) for name, column in columns.items()}, allocate=self._allocate
            )
            if self._collator.return_tensors == "pt":
                extra = as_tensors(extra)
            if self._collator.pin_memory:
                extra = map_batch(extra, pinned)
        else:
            rng = self._rng(-1, *indices.tolist()) if self._collates_with_rng else {}
            batch = self._collator(_samples(columns, len(indices)), **rng)
            if not isinstance(batch, dict):
                return batch
        for name, value in extra.items():
            batch.setdefault(name, value)
        return batch

    def _located(self, samples: npt.NDArray[np.int64]) -> dict[str, Any]:
        """The entries of a batch that say which samples it has: of a `MixedSource` also the names of the sources."""
        locate: Callable[..., Any] | None = getattr(self._source, "locate", None)
        return {"index": samples} if locate is None else dict(zip(("source", "index"), locate(samples), strict=True))

    def _described(self, sample: int) -> str:
        found = self._located(np.array([sample], np.int64))
        return f"sample {found['index'][0]}" + (f" of {found['source'][0]!r}" if "source" in found else "")

    def _like_its_field(self, name: str, column: Batch) -> Batch | _NoValues:
        """A column, with dtype and rank of its field if no sample has a value to tell them."""
        is_changed = self._transform is not None or name in self._transforms
        if column.present.any() or is_changed or self._find_part is None:
            return column
        return _NoValues(*column, self._find_part(name).empty_value)


def _column(values: list[Any]) -> Batch:
    return Batch(values, np.fromiter((value is not None for value in values), np.bool_, len(values)))


def _samples(columns: Mapping[str, Batch], count: int) -> list[dict[str, Any]]:
    """Returns the rows of columns as samples; arrays are views."""
    rows = {name: rows_of(column.values, column.present) for name, column in columns.items()}
    return [{name: values[row] for name, values in rows.items()} for row in range(count)]


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
