"""Batches of decoded values: stacked, padded, ragged or listed, one rule for each output.

Every row of a batch stays: a value that a sample lacks is zero (or the pad value) in its row, and false in `present`.
So row i of every output belongs to sample i. Nothing here reads files; values come as samples (a list of dicts) or as
columns (from `Dataset.read_batch`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.decoding import Allocate
from mm_assets.errors import CollateError, ConfigError, optional_import
from mm_assets.fields.parts import Path, take
from mm_assets.loading.rules import Rule, parse_rules
from mm_assets.summaries import describe

__all__ = ["MultimodalCollator", "Ragged", "as_tensors", "map_batch", "pinned", "pinned_memory", "rows_of"]

Array = npt.NDArray[Any]
Lengths = dict[str, Array]


class Ragged:
    """Arrays of different lengths, one after the other.

    Attributes:
        values: (total, …): all rows' elements along the first axis.
        offsets: (n + 1,) int64: row i is ``values[offsets[i]:offsets[i + 1]]``; an absent row is empty.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Any, offsets: Any) -> None:
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        """Rows."""
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        """One row, a view; negative counts from the end."""
        rows = len(self)
        if not -rows <= row < rows:
            raise IndexError(f"row {row} of {rows}")
        row %= rows
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} elements)"


class MultimodalCollator:
    """Makes a batch, a dict of arrays, of decoded samples.

    In addition to an entry for each rule a batch has ``present``: output to (n,) bool; and, where a rule pads,
    ``lengths``: output to (n,) int64, the length of the first axis before padding and after truncation, 0 where absent.
    A rule with a ``max_length`` of several axes has (n, axes) lengths.

    Args:
        modality_configs: output name to its rule, a mapping with

            ``type``: ``stack`` (one shape for all), ``pad`` (to the longest, or to ``max_length``, in every axis),
            ``ragged`` (a `Ragged`), or ``list`` (default: values as they are, None where absent). ``{"stack": True}``
            and a mapping with a ``pad_value`` mean stack and pad too.

            ``pad_value`` (0), ``max_length`` (an integer for the first axis, or a list with one for each of several
            axes, None for a free one; longer values are truncated, shorter batches are padded up to it),
            ``pad_to_multiple_of`` (of the first axis): for ``pad``.

            ``dtype``: of the output, for all but ``list``; by default the values'. A batch in which no sample has a
            value has this dtype too, or else the dtype and rank of its field's values; samples and transformed values
            have no field, and give float32.

            ``source``: the modality, by default the output's name; and a part of its value, by attributes or keys
            after dots and numbers of items in brackets: ``clip.audio``, ``document.layout.words.boxes``, ``image[0]``.
            A loader reads only that part where it is stored so that it can.

            Without any rule every modality is unchanged: columns as they come, samples as lists.
        return_tensors: ``np``, or ``pt`` for torch tensors over the same memory. Lists are not converted. An array
            that is read-only, such as a view into a file, is copied, because torch has no read-only tensors.
        pin_memory: whether the tensors are in pinned memory, from which devices copy directly. A loader decodes into
            such memory.

    Raises:
        ConfigError: a rule is wrong; or `pin_memory` without ``pt``, or without a device to pin memory for.
        MissingExtraError: ``pt``, and torch is not installed.
    """

    def __init__(
        self,
        modality_configs: Mapping[str, Mapping[str, Any]] | None = None,
        return_tensors: str = "np",
        *,
        pin_memory: bool = False,
    ) -> None:
        if return_tensors not in ("np", "pt"):
            raise ConfigError("arguments", "return_tensors", f"found {return_tensors!r}, expected np or pt")
        self._rules = parse_rules(modality_configs or {})
        self.configs = {name: dict(config) for name, config in (modality_configs or {}).items()}
        self.return_tensors = return_tensors
        self.pin_memory = pin_memory
        if return_tensors == "pt":
            torch = _torch()
        if pin_memory and return_tensors != "pt":
            raise ConfigError("arguments", "pin_memory", "needs return_tensors='pt'")
        if pin_memory and not torch.accelerator.is_available():
            raise ConfigError("arguments", "pin_memory", "torch finds no accelerator to pin memory for")

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities that the rules read, as far as dots tell; () without rules, which means all that there are."""
        return tuple(
            dict.fromkeys(re.split(r"[.\[]", rule.source)[0] if rule.has_part else rule.source for rule in self._rules)
        )

    @property
    def rules(self) -> Sequence[Rule]:
        """One for each output; empty without rules."""
        return self._rules

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs; () without rules."""
        return tuple(rule.name for rule in self._rules)

    def __call__(
        self, samples: Sequence[Mapping[str, Any]] | Mapping[str, Any], *, allocate: Allocate = np.empty
    ) -> dict[str, Any]:
        """Make a batch.

        Args:
            samples: n samples, each value by modality name (None or missing: absent); or columns, each with ``values``
                (an array, a dict of arrays, or a list) and ``present``, (n,) bool, by modality name; and, where it is
                known, the `Field.empty_value` as ``empty``.
            allocate: makes uninitialized arrays to stack and pad in, such as in pinned memory, of a shape and dtype.

        Raises:
            CollateError: values do not fit their rule: the message names output and row.
        """
        rules = self._rules or [Rule(name=name, source=name) for name in _names(samples)]
        batch: dict[str, Any] = {}
        present: dict[str, Any] = {}
        lengths: Lengths = {}
        for rule in rules:
            column = _Column.of(samples, rule)
            present[rule.name] = column.present
            make = _MAKE[rule.type]
            # Without rules no lists were requested, and a column that is an array already is the better form.
            batch[rule.name] = (
                make(rule, column, lengths, allocate) if self._rules or column.whole is None else column.whole
            )
        batch["present"] = present
        if lengths:
            batch["lengths"] = lengths
        if self.return_tensors == "pt":
            batch = as_tensors(batch)
        return map_batch(batch, pinned) if self.pin_memory else batch


# --- taking values ----------------------------------------------------------------------------------------------------


def _names(samples: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> list[str]:
    names = list(samples) if isinstance(samples, Mapping) else [name for sample in samples for name in sample]
    for name in ("present", "lengths"):
        if name in names:
            detail = "is a name that every batch has; give the output another by a rule with a source"
            raise CollateError(name, detail)
    return list(dict.fromkeys(names))


class _Column:
    """The values of one output; `whole` has all rows in an array or a dict of arrays, where they are that already.

    `empty` is an array without elements of the values' dtype and rank, if there is one.
    """

    def __init__(
        self, rows: list[Any] | None, whole: Any, present: npt.NDArray[np.bool_], empty: Array | None = None
    ) -> None:
        self._rows = rows
        self.whole = whole
        self.present = present
        self.empty = empty

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, Any]] | Mapping[str, Any], rule: Rule) -> _Column:
        if not isinstance(samples, Mapping):
            names = {name for sample in samples for name in sample}
            name, path = rule.split(names) or (rule.source, ())
            return cls._of_rows([sample.get(name) for sample in samples], path, rule)
        split = rule.split(samples.keys())
        if split is None:
            raise CollateError(rule.name, f"no modality {rule.source!r}; there are {', '.join(samples) or 'none'}")
        name, path = split
        values, present = samples[name].values, samples[name].present
        if isinstance(values, Mapping) and path:
            values, path = _part(values, path[:1], rule, None), path[1:]
        if isinstance(values, np.ndarray | Mapping) and not path:
            return cls(None, values, present, values[0] if isinstance(values, np.ndarray) and len(values) else None)
        return cls._of_rows(rows_of(values, present), path, rule, getattr(samples[name], "empty", None))

    @classmethod
    def _of_rows(cls, rows: list[Any], path: Path, rule: Rule, empty: Any = None) -> _Column:
        if path:
            rows = [_part(value, path, rule, row) for row, value in enumerate(rows)]
            with suppress(LookupError):
                empty = take(empty, path)
        present = np.fromiter((value is not None for value in rows), np.bool_, len(rows))
        return cls(rows, None, present, empty if isinstance(empty, np.ndarray) else None)

    def __len__(self) -> int:
        return len(self.present)

    @property
    def rows(self) -> list[Any]:
        """The values one by one, None where absent."""
        if self._rows is None:
            self._rows = rows_of(self.whole, self.present)
        return self._rows


def rows_of(values: Any, present: npt.NDArray[np.bool_]) -> list[Any]:
    """The values of a column one by one, None where absent; rows of arrays are views."""
    if isinstance(values, Mapping):
        values = [{part: array[row] for part, array in values.items()} for row in range(len(present))]
    return [value if ok else None for value, ok in zip(values, present.tolist(), strict=True)]


def _part(value: Any, path: Path, rule: Rule, row: int | None) -> Any:
    """A part of a value; None if the value is absent or has no such item."""
    try:
        return take(value, path)
    except LookupError as error:
        raise CollateError(rule.name, f"{error.args[0]}: its source is {rule.source}", row=row) from error


# --- making outputs ---------------------------------------------------------------------------------------------------


def _arrays(rule: Rule, column: _Column) -> tuple[list[tuple[int, Array]], np.dtype[Any]]:
    """The rows that are present, as arrays of one number of axes, and the dtype of the output."""
    rows = [(row, value) for row, value in enumerate(column.rows) if value is not None]
    kinds = {(value.ndim, value.dtype) if type(value) is np.ndarray else None for _, value in rows}
    if len(kinds) == 1 and None not in kinds and rows[0][1].dtype.kind in "biufc":
        found: list[tuple[int, Array]] = rows  # arrays of one kind: a check of each would take longer than the rest
    else:
        found = _checked_arrays(rule, rows)
    if rule.dtype is not None:
        for row, array in found:
            if not np.can_cast(array.dtype, rule.dtype, "same_kind"):
                raise CollateError(rule.name, f"found {array.dtype}, expected {rule.dtype}", row=row)
        return found, rule.dtype
    if not found:
        return found, np.dtype(np.float32) if column.empty is None else column.empty.dtype
    return found, np.result_type(*{array.dtype for _, array in found})


def _checked_arrays(rule: Rule, rows: list[tuple[int, Any]]) -> list[tuple[int, Array]]:
    """Values as arrays of one number of axes."""
    found: list[tuple[int, Array]] = []
    for row, value in rows:
        if isinstance(value, Mapping):
            parts = ", ".join(f"{rule.source}.{key}" for key in value)
            raise CollateError(rule.name, f"its source is several values: give one of them, such as {parts}", row=row)
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise CollateError(rule.name, f"found {describe(value)}, expected numbers for {rule.type}", row=row)
        if found:
            _check_like(rule, row, array, found[0])
        found.append((row, array))
    return found


def _check_like(rule: Rule, row: int, array: Array, first: tuple[int, Array]) -> None:
    """Refuses a row of another kind than the first one; single numbers may differ, as 1 and 2.5 do in JSON."""
    like = first[1]
    same = array.ndim == like.ndim and (array.ndim == 0 or array.dtype == like.dtype or rule.dtype is not None)
    if not same:
        expected = f"{like.dtype} with {like.ndim} axes as in row {first[0]}"
        raise CollateError(rule.name, f"found {array.dtype} with {array.ndim} axes, expected {expected}", row=row)


def _stack(rule: Rule, column: _Column, lengths: Lengths, allocate: Allocate) -> Array:
    if isinstance(column.whole, np.ndarray) and rule.dtype in (None, column.whole.dtype):
        return column.whole
    arrays, dtype = _arrays(rule, column)
    shape = arrays[0][1].shape if arrays else (0,) if column.empty is None else column.empty.shape
    for row, array in arrays:
        if array.shape != shape:
            hint = "for different shapes use pad or ragged, or set the decode_size of an image field"
            expected = f"{shape} as in row {arrays[0][0]}; {hint}"
            raise CollateError(rule.name, f"found shape {array.shape}, expected {expected}", row=row)
    stacked = allocate((len(column), *shape), dtype)
    if len(arrays) < len(column):
        stacked[~column.present] = 0
    for row, array in arrays:
        stacked[row] = array
    return stacked


def _pad(rule: Rule, column: _Column, lengths: Lengths, allocate: Allocate) -> Array:
    arrays, dtype = _arrays(rule, column)
    like = arrays[0][1] if arrays else column.empty
    num_axes = max(1, len(rule.max_length)) if like is None else like.ndim
    if num_axes == 0:
        row = arrays[0][0] if arrays else None
        raise CollateError(rule.name, "found single numbers, which have no axis to pad: stack them", row=row)
    if len(rule.max_length) > num_axes:
        raise CollateError(rule.name, f"found {num_axes} axes, expected {len(rule.max_length)} as in max_length")
    extents = np.zeros((len(column), num_axes), np.int64)
    if arrays:
        extents[column.present] = [array.shape for _, array in arrays]
    for axis, limit in enumerate(rule.max_length):
        if limit is not None:
            np.minimum(extents[:, axis], limit, out=extents[:, axis])
    target = extents.max(axis=0, initial=0).tolist()
    for axis, limit in enumerate(rule.max_length):
        target[axis] = target[axis] if limit is None else limit
    target[0] = -(-target[0] // rule.multiple) * rule.multiple
    fill = np.array(rule.pad_value)
    if dtype.kind in "biu" and not np.array_equal(fill.astype(dtype), fill):
        raise CollateError(rule.name, f"pad_value {rule.pad_value!r} does not fit {dtype}, the type of the values")
    padded = allocate((len(column), *target), dtype)
    padded[...] = rule.pad_value
    for (row, array), inside in zip(arrays, extents[column.present].tolist(), strict=True):
        place = tuple(map(slice, inside))
        padded[row][place] = array[place]
    # By the rule alone, so that every batch has lengths of one shape.
    num_axes = max(1, len(rule.max_length))
    lengths[rule.name] = extents[:, :num_axes].copy() if num_axes > 1 else extents[:, 0].copy()
    return padded


def _ragged(rule: Rule, column: _Column, lengths: Lengths, allocate: Allocate) -> Ragged:
    arrays, dtype = _arrays(rule, column)
    offsets = np.zeros(len(column) + 1, np.int64)
    if not arrays:
        return Ragged(np.zeros((0,) if column.empty is None else (0, *column.empty.shape[1:]), dtype), offsets)
    inner = arrays[0][1].shape[1:]
    for row, array in arrays:
        if array.ndim == 0 or array.shape[1:] != inner:
            expected = f"one that differs from {arrays[0][1].shape} in its first axis alone"
            raise CollateError(rule.name, f"found shape {array.shape}, expected {expected}", row=row)
        offsets[row + 1] = len(array)
    np.cumsum(offsets, out=offsets)
    return Ragged(np.concatenate([array for _, array in arrays], dtype=dtype, casting="same_kind"), offsets)


def _list(rule: Rule, column: _Column, lengths: Lengths, allocate: Allocate) -> list[Any]:
    return list(column.rows)


_MAKE: Mapping[str, Callable[[Rule, _Column, Lengths, Allocate], Any]] = {
    "stack": _stack,
    "pad": _pad,
    "ragged": _ragged,
    "list": _list,
}


# --- torch ------------------------------------------------------------------------------------------------------------


def _torch() -> Any:
    with optional_import("torch", "return_tensors='pt'"):
        import torch
    return torch


def pinned_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """New memory that devices copy from directly, out of torch's allocator."""
    torch = _torch()
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    array: Array = torch.empty(shape, dtype=kind, pin_memory=True).numpy()
    return array


def pinned(value: Any) -> Any:
    """A tensor in pinned memory, copied if it is elsewhere; any other value unchanged."""
    if hasattr(value, "is_pinned"):
        return value if value.is_pinned() else value.pin_memory()
    return value


def map_batch(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A batch, or an entry of it, with every array or list in it converted."""
    if isinstance(value, dict):
        return {name: map_batch(item, convert) for name, item in value.items()}
    if isinstance(value, Ragged):
        return Ragged(convert(value.values), convert(value.offsets))
    return convert(value)


def as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """The arrays in a batch as torch tensors over the same memory; other values, lists too, unchanged."""
    tensors: dict[str, Any] = map_batch(batch, _as_tensor)
    return tensors


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        # torch does not support read-only memory (a tensor that writes through to a mapped file would end the process),
        # negative strides, or foreign byte order.
        plain = value.flags.writeable and value.dtype.isnative and all(stride >= 0 for stride in value.strides)
        return _torch().from_numpy(value if plain else value.astype(value.dtype.newbyteorder("=")))
    return value
