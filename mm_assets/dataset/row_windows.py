"""A dataset whose values are windows over neighboring samples of a group, such as the steps of a robot's episode.

Item i is sample i; a modality with offsets has its values at these offsets within the sample's group. Where a window
lies is computed from an index of the groups, without reading data. Each payload is read and decoded once per batch,
however many windows share it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.decoding import Batch, batch_target
from mm_assets.dataset.groups import MAX_ORDER, Groups
from mm_assets.dataset.selection import split_rows
from mm_assets.errors import ConfigError
from mm_assets.fields import ArraySpec, Field
from mm_assets.fields.base import Out
from mm_assets.formats import SampleIds
from mm_assets.formats.batch import Indices, check_index, check_indices, spans

__all__ = ["EDGES", "IS_PAD", "RowWindows"]

EDGES = ("repeat", "zero", "drop")
"""What a window has in place of a step that does not exist: the nearest step, zeros, or there is no such window."""

IS_PAD = "_is_pad"  # after the name of a modality, as LeRobot calls the mask

_BLOCK_ROWS = 1 << 14  # windows that are inspected together

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class _Steps(NamedTuple):
    """The steps of n windows with T offsets.

    Attributes:
        places: (n, T) int64, in the order of the groups; of a step that does not exist the nearest one.
        is_pad: (n, T) bool, whether the step does not exist.
    """

    places: Rows
    is_pad: Mask


class RowWindows:
    """A view of a dataset, in which modalities are windows over steps; made by `Dataset.windows`.

    Item i has, for each modality with T offsets, an array (T, ...), and the mask ``<modality>_is_pad``, (T,) bool: True
    for a step that does not exist or that lacks the modality. All other modalities have the value of sample i. It is
    read as a dataset is: item by item, by `read_batch`, by a `MultimodalLoader`, or by torch's DataLoader.

    Args:
        data: the dataset, which this view closes.
        groups: its samples by group.
        at: by modality, the offsets.
        edge: one of `EDGES`.
        tolerance: None: offsets count steps. Else they are differences of the order's values.

    Attributes:
        data: the dataset.
        groups: its samples by group.
        at: by modality (T,) offsets, int64 or float64.
    """

    def __init__(
        self,
        data: Any,  # a `Dataset`, whose module imports this one
        groups: Groups,
        at: Mapping[str, Sequence[float] | npt.NDArray[Any]],
        *,
        edge: str = "repeat",
        tolerance: float | None = None,
    ) -> None:
        if edge not in EDGES:
            raise ConfigError("arguments", "edge", f"found {edge!r}, expected one of {', '.join(EDGES)}")
        if tolerance is not None and not 0 <= tolerance < np.inf:
            raise ConfigError("arguments", "tolerance", f"found {tolerance!r}, expected a number from 0")
        self.data = data
        self.groups = groups
        self.at = {
            name: _check_offsets(f"at.{name}", offsets, counts_steps=tolerance is None) for name, offsets in at.items()
        }
        self._edge = edge
        self._tolerance = tolerance
        for name in self.at:
            if name not in data.names:
                raise KeyError(f"no modality {name!r}; there are {', '.join(data.names) or 'none'}")
            if name + IS_PAD in data.names:
                raise ConfigError(
                    "arguments", f"at.{name}", f"there is a modality {name + IS_PAD!r}, as the mask is called"
                )
        self._only: tuple[str, ...] | None = None
        self._samples: Any = None
        # The places of the items in the order of the groups; None if item i is at place i.
        self._places: Rows | None = None
        if edge == "drop" or tolerance is not None:
            whole = self._find_whole()
        if edge == "drop":
            kept = groups.take(np.flatnonzero(whole))
            kept.sort()
            self._places = self._place_of(kept)
        elif groups.rows is not None:
            self._places = self._place_of(np.arange(len(data)))

    def _place_of(self, indices: Rows) -> Rows:
        """The places of samples of the dataset."""
        if self.groups.rows is None:
            return indices
        places = np.empty(len(self.groups.rows), np.int64)
        places[self.groups.rows] = np.arange(len(places))
        return places[indices]

    # --- where windows are --------------------------------------------------------------------------------------------

    def _find(self, places: Rows, offsets: npt.NDArray[Any]) -> _Steps:
        """Finds the steps of the windows at some places."""
        groups = self.groups
        numbers = groups.find(places)
        low, high = groups.starts[numbers][:, None], groups.starts[numbers + 1][:, None] - 1
        if self._tolerance is None or groups.order is None:
            wanted = places[:, None] + offsets
            found = np.clip(wanted, low, high)
            return _Steps(found, found != wanted)
        values = groups.order[places][:, None] + offsets
        # Bisection within each group: the first step whose value is not below, which may be past the last one.
        first, last = np.broadcast_arrays(low, values)[0].copy(), np.broadcast_arrays(high + 1, values)[0].copy()
        while (first < last).any():
            middle = (first + last) // 2
            is_below = groups.order[np.minimum(middle, high)] < values
            is_open = first < last
            first = np.where(is_open & is_below, middle + 1, first)
            last = np.where(is_open & ~is_below, middle, last)
        before, after = np.maximum(first - 1, low), np.minimum(first, high)
        gaps = [np.abs(groups.order[found] - values) for found in (before, after)]
        found = np.where(gaps[1] < gaps[0], after, before)
        return _Steps(found, np.minimum(*gaps) > self._tolerance)

    def _find_whole(self) -> Mask:
        """Returns which places have windows without padding, (samples,).

        Raises:
            ConfigError: an offset has no step in any group.
        """
        count = len(self.data)
        whole = np.ones(count, np.bool_)
        for name, offsets in self.at.items():
            present = self.data.presence(name) if self._edge == "drop" else None
            misses = np.ones(len(offsets), np.bool_)
            for start, stop in spans(count, _BLOCK_ROWS):
                if present is None and not misses.any():
                    break  # only a window that has no step anywhere is refused
                steps = self._find(np.arange(start, stop), offsets)
                misses &= steps.is_pad.all(axis=0)
                whole[start:stop] &= ~steps.is_pad.any(axis=1)
                if present is not None:
                    whole[start:stop] &= present[self.groups.take(steps.places)].all(axis=1)
            if self._tolerance is not None and count and misses.any():
                detail = f"no sample has a step at {offsets[misses][0].item()} from it"
                detail += f" with a tolerance of {self._tolerance}{self._describe_gaps()}"
                raise ConfigError("arguments", f"at.{name}", detail)
        return whole

    def _describe_gaps(self) -> str:
        """How far steps are from each other, for a message; nothing without a pair."""
        groups = self.groups
        if groups.order is None:
            return ""
        inside = np.diff(groups.find(np.arange(len(groups.order)))) == 0
        gaps = np.diff(groups.order)[inside]
        return f"; steps are {np.median(gaps).item():g} apart (median)" if len(gaps) else ""

    # --- views --------------------------------------------------------------------------------------------------------

    def _view(self, places: Rows | None, data: Any = None) -> RowWindows:
        """A view of some places, with windows over the same groups; None for the same items."""
        view = copy.copy(self)
        view.data = self.data.with_settings({}) if data is None else data
        view._places = self._places if places is None else places
        view._samples = None
        return view

    def select(self, indices: Indices | slice) -> RowWindows:
        """A view of some windows, in the order given; they still have all steps of their groups.

        Args:
            indices: repeats are fine, negative ones count from the end; or a slice, or a mask (len,) of bool.

        Raises:
            IndexError: no such window, or a mask of another length.
            TypeError: not integers or bools in one dimension.
        """
        return self._view(self._places_at(self._chosen(indices)))

    def select_modalities(self, names: Sequence[str]) -> RowWindows:
        """A view of all windows with some modalities or masks only; `KeyError` for an unknown one."""
        view = self._view(None)
        view._only = self._choose(names)
        return view

    def split(self, fractions: Mapping[str, float], *, seed: int = 0) -> dict[str, RowWindows]:
        """Views of parts of the groups, such as ``{"train": 0.9, "val": 0.1}``: no step is in two parts.

        A group's part follows from the seed and the group's name, as `Dataset.split` does it with ids.

        Args:
            fractions: share of each part, by name, above 0 and up to 1 together; the rest is in no part.
            seed: from 0 to 2**64 - 1; another one gives other parts.

        Raises:
            ConfigError: fractions or seed are out of range.
        """
        names = self.groups.names
        parts = split_rows(map(str, names), len(names), fractions, seed=seed)
        places = self._places_at(np.arange(len(self)))
        numbers = self.groups.find(places)
        return {name: self._view(places[np.isin(numbers, groups)]) for name, groups in parts.items()}

    def filter(self, sql: str) -> RowWindows:
        """A view of the windows whose own sample fulfils a condition; they still have all steps of their groups.

        Args:
            sql: as for `Dataset.filter`.

        Raises:
            ConfigError: it is not a condition, names no column, or cannot be computed.
            FormatError: a file is damaged.
        """
        return self.select(self.samples.matching(sql))

    def with_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> RowWindows:
        """The same windows, decoded with other settings; see `Dataset.with_settings`."""
        return self._view(None, self.data.with_settings(settings))

    @property
    def samples(self) -> Any:
        """The sample of each window, as a `Dataset` that is closed with this view: sample i is that of item i."""
        if self._samples is None:
            indices = None if self._places is None else self.groups.take(self._places)
            is_all = indices is None or (
                len(indices) == len(self.data) and bool((np.diff(indices, prepend=-1) == 1).all())
            )
            self._samples = self.data.with_settings({}) if indices is None or is_all else self.data.select(indices)
        return self._samples

    # --- what is in it ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Windows."""
        return len(self.data) if self._places is None else len(self._places)

    def __repr__(self) -> str:
        at = ", ".join(f"{name}: {len(offsets)}" for name, offsets in self.at.items())
        return f"RowWindows({self.data.path!r}, {len(self)} windows of {at}, {len(self.groups)} groups)"

    @property
    def names(self) -> tuple[str, ...]:
        """The modalities, then the masks."""
        return (*self.data.names, *(name + IS_PAD for name in self.at)) if self._only is None else self._only

    @property
    def fields(self) -> dict[str, Field]:
        """Modality name to field, which is that of each step in a window."""
        return {name: field for name, field in self.data.fields.items() if name in self.names}

    @property
    def sample_ids(self) -> SampleIds:
        """The id of each window's own sample."""
        ids: SampleIds = self.samples.sample_ids
        return ids

    # --- reading ------------------------------------------------------------------------------------------------------

    def __getitem__(self, i: SupportsIndex | Indices | slice) -> Any:
        """One item, as a row of a batch; or a list of them for indices, a slice or a mask, one request to each file.

        A modality without offsets that the sample lacks is None; a window is zeros, or a list, and masked.
        """
        which: Any = i
        if isinstance(which, slice | Sequence) or getattr(which, "ndim", 0) > 0:
            return self.__getitems__(self._chosen(which))
        return self.__getitems__([check_index(which, len(self), self.data.path)])[0]

    def __getitems__(self, indices: Indices) -> list[dict[str, Any]]:
        """Many items, as ``windows[indices]``: torch's DataLoader calls this for a batch."""
        batch = self.read_batch(indices)
        columns = {name: self._items(name, column) for name, column in batch.items()}
        return [{name: column[row] for name, column in columns.items()} for row in range(len(indices))]

    def _items(self, name: str, column: Batch) -> list[Any]:
        values = column.values
        if isinstance(values, Mapping):
            values = [{part: array[row] for part, array in values.items()} for row in range(len(column.present))]
        if name not in self.data.names or name in self.at:
            return list(values)
        return [value if is_present else None for value, is_present in zip(values, column.present, strict=True)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All items in order."""
        return (self[i] for i in range(len(self)))

    def read_batch(
        self,
        indices: Indices,
        modalities: Sequence[str] | None = None,
        *,
        out: Mapping[str, Out] | None = None,
        threads: int | None = 0,
        verify: bool | None = None,
        on_read: Callable[[], object] | None = None,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> dict[str, Batch]:
        """Windows of some modalities, rows aligned in all of them; one request to each file.

        Args:
            indices: repeats are fine, negative ones count from the end.
            modalities: names of modalities and masks; all by default.
            out: arrays to decode into, as for `Dataset.read_batch`.
            threads: as for `Dataset.read_batch`.
            verify: as for `Dataset.read_batch`.
            on_read: as for `Dataset.read_batch`.
            keys: as for `Dataset.read_batch`: all steps of a window have its key. Fields that draw are decoded once for
                each window.

        Returns:
            By modality with T offsets values (n, T, ...); if the field's values vary in shape or type, a list of n
            windows: arrays (T, ...) if the values of the window have one shape and type, else lists of T. `present` is
            False if no step has the modality. By mask (n, T) bool. Other modalities as `Dataset.read_batch` reads them.

        Raises:
            IndexError: no such window.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            LimitError: a value exceeds a limit of its field.
            ValueError: `out` does not fit, or no number of threads.
        """
        names = self._choose(modalities)
        places = self._places_at(indices)
        targets = self._targets(len(places), names, out or {})
        windows = {name: self._find(places, self.at[name]) for name in self.at if {name, name + IS_PAD} & {*names}}
        reads: dict[str, Rows] = {name: places for name in names if name in self.data.names and name not in windows}
        slots: dict[str, Rows] = {}  # of each step of each window, the row in what is read
        keys_by_name = {} if keys is None else dict.fromkeys(reads, keys)
        for name, steps in windows.items():
            needed = ~steps.is_pad if self._edge == "zero" else np.ones(steps.is_pad.shape, np.bool_)
            reads[name], rows = np.unique(steps.places[needed], return_inverse=True)
            if keys is not None and self.data.fields[name].draws:
                reads[name], rows = steps.places[needed], np.arange(np.count_nonzero(needed))
                keys_by_name[name] = np.broadcast_to(keys[:, None], needed.shape)[needed]
            slots[name] = np.full(steps.places.shape, -1, np.int64)
            slots[name][needed] = rows.reshape(-1)
        columns = self.data.read_batch_each(
            {name: self.groups.take(own) for name, own in reads.items()},
            out={name: own for name, own in (out or {}).items() if name in reads and name not in windows},
            threads=threads,
            verify=verify,
            on_read=on_read,
            keys=keys_by_name,
        )
        found: dict[str, Batch] = {}
        for name in names:
            if name in windows:
                has_value = _present(columns[name], slots[name]) & ~windows[name].is_pad
                present = np.asarray(has_value.any(axis=1), np.bool_)
                found[name] = Batch(_gather(columns[name].values, slots[name], targets[name]), present)
            elif name in reads:
                found[name] = columns[name]
            else:
                of = name.removesuffix(IS_PAD)
                mask = targets[name]
                np.logical_not(_present(columns[of], slots[of]), out=mask)
                mask |= windows[of].is_pad
                found[name] = Batch(mask, np.ones(len(places), np.bool_))
        return found

    def batch_layout(
        self, n: int, modalities: Sequence[str] | None = None
    ) -> dict[str, ArraySpec | dict[str, ArraySpec]]:
        """Shape (n, ...) and dtype of the arrays of a batch, by modality and mask; see `Dataset.batch_layout`."""
        names = self._choose(modalities)
        layouts = self.data.batch_layout(n, [name for name in names if name in self.data.names])
        found: dict[str, ArraySpec | dict[str, ArraySpec]] = {}
        for name in names:
            if name in layouts:
                found[name] = layouts[name]
                if name in self.at:
                    found[name] = _windowed(layouts[name], len(self.at[name]))
            elif name not in self.data.names:
                found[name] = ArraySpec((n, len(self.at[name.removesuffix(IS_PAD)])), np.dtype(np.bool_))
        return found

    def _targets(self, count: int, names: Sequence[str], out: Mapping[str, Out]) -> dict[str, Any]:
        """The arrays that windows and masks are written to, None for lists; checks `out`."""
        for name in out:
            if name not in names:
                raise ValueError(f"out has {name!r}, which is not read: {', '.join(names)}")
        own = [name for name in names if name in self.at or name not in self.data.names]
        layouts = self.batch_layout(count, own)
        return {name: batch_target(layouts.get(name), out.get(name), name) for name in own}

    def _choose(self, modalities: Sequence[str] | None) -> tuple[str, ...]:
        if isinstance(modalities, str):
            raise TypeError(f"modalities: found {modalities!r}, expected a list of names")
        names = self.names
        for name in modalities or ():
            if name not in names:
                raise KeyError(f"{self.data.path}: no modality {name!r}; it has {', '.join(names) or 'none'}")
        return names if modalities is None else tuple(dict.fromkeys(modalities))

    def _chosen(self, indices: Indices | slice) -> Indices:
        """Indices for a slice or a mask too."""
        if isinstance(indices, slice):
            return range(*indices.indices(len(self)))
        if isinstance(indices, np.ndarray) and indices.dtype == np.bool_ and indices.ndim == 1:
            if len(indices) != len(self):
                raise IndexError(f"{self.data.path}: a mask of {len(indices)} for {len(self)} windows")
            return np.flatnonzero(indices)
        return indices

    def _places_at(self, indices: Indices) -> Rows:
        """The places of items, an array of their own."""
        rows = check_indices(indices, len(self), self.data.path)
        return np.array(rows) if self._places is None else self._places[rows]

    # --- life time ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the files, unless the dataset or another view still reads them. Calling it twice is fine."""
        self.data.close()
        if self._samples is not None:
            self._samples.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_samples": None}


def _check_offsets(key: str, offsets: Sequence[float] | npt.NDArray[Any], *, counts_steps: bool) -> npt.NDArray[Any]:
    """Returns offsets as (T,) int64, or float64 if some are not integers."""
    array = np.asarray(offsets)
    is_integer = (
        array.dtype.kind in "iu" and array.ndim == 1 and bool((np.abs(array.astype(np.float64)) <= MAX_ORDER).all())
    )
    is_finite = array.dtype.kind == "f" and array.ndim == 1 and bool(np.isfinite(array).all())
    if not array.size or not (is_integer or (is_finite and not counts_steps)):
        expected = "a list of integers, which count steps; with `tolerance` they are differences of the order's values"
        if not counts_steps:
            expected = "a list of finite numbers, differences of the order's values"
        raise ConfigError("arguments", key, f"found {str(offsets)[:80]}, expected {expected}")
    return array.astype(np.int64 if is_integer else np.float64)


def _windowed(layout: ArraySpec | dict[str, ArraySpec], length: int) -> ArraySpec | dict[str, ArraySpec]:
    """The layout of windows of values."""
    if isinstance(layout, ArraySpec):
        return ArraySpec((layout.shape[0], length, *layout.shape[1:]), layout.dtype)
    return {name: ArraySpec((one.shape[0], length, *one.shape[1:]), one.dtype) for name, one in layout.items()}


def _present(column: Batch, slots: Rows) -> Mask:
    """Which steps of windows have a value, (n, T)."""
    return np.append(column.present, False)[slots]  # slot -1 is that of no step


def _gather(values: Any, slots: Rows, target: Any) -> Any:
    """The values of windows out of those of their steps; steps without one are zero, in lists None."""
    if isinstance(values, Mapping):
        return {name: _gather(array, slots, target[name]) for name, array in values.items()}
    if isinstance(values, np.ndarray):
        if len(values):
            np.take(values, slots, axis=0, out=target, mode="clip")  # which has no buffer
        target[slots < 0] = 0
        return target
    return [_window([None if slot < 0 else values[slot] for slot in row]) for row in slots.tolist()]


def _window(steps: list[Any]) -> Any:
    """A window as an array (T, ...) if its values are arrays of one shape and dtype, with zeros for None; else a list.

    Values are copied: other windows may have the same steps, and no two share memory.
    """
    values = [value for value in steps if value is not None]
    kinds = {(value.shape, value.dtype) if isinstance(value, np.ndarray) else None for value in values}
    if len(kinds) != 1 or None in kinds:
        return [copy.deepcopy(value) for value in steps]
    zeros = np.zeros_like(values[0])
    return np.stack([zeros if value is None else value for value in steps])
