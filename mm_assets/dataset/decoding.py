"""Decoding many payloads at once: into given arrays, and in threads where the codec lets them run.

The result does not depend on the number of threads, nor does the error when payloads are damaged: it is that of the
first damaged row. No thread writes into an array after the call that was given it has returned or raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.workers import WorkerPool, end
from mm_assets.errors import FormatError, LimitError, SchemaMismatchError
from mm_assets.fields import ArraySpec, Field
from mm_assets.fields.base import PAYLOAD, Out
from mm_assets.formats import Column
from mm_assets.summaries import describe

__all__ = [
    "Allocate",
    "Arrays",
    "Batch",
    "Place",
    "batch_layout",
    "batch_target",
    "decode_batches",
    "decode_values",
    "locate",
]

# No payload is larger, and no sensible value: a layout comes from the file, and rows of it are allocated for absent
# values too, which have no bytes.
MAX_ROW_BYTES = 1 << 32

Arrays: TypeAlias = npt.NDArray[Any] | dict[str, npt.NDArray[Any]]
"""What the rows of a modality are decoded into: one array, or several by name."""

Allocate: TypeAlias = Callable[[tuple[int, ...], "np.dtype[Any]"], npt.NDArray[Any]]
"""Makes an uninitialized array of a shape and dtype."""

Place: TypeAlias = Callable[[int, str], tuple[str, int]]
"""The file that a row of the batch is in, and its sample's index there."""


class Batch(NamedTuple):
    """One modality of many samples.

    Attributes:
        values: an array (n, …) where the field's values have one shape and dtype, or a dict of such arrays where a
            value is several, absent rows zero; else a list of n values, None where absent.
        present: (n,) bool.
    """

    values: Any
    present: npt.NDArray[np.bool_]


# --- arrays -----------------------------------------------------------------------------------------------------------


def batch_layout(
    layout: ArraySpec | Mapping[str, ArraySpec] | None, name: str, path: str, count: int
) -> ArraySpec | dict[str, ArraySpec] | None:
    """Shape, the number of rows first, and dtype of the arrays of a batch of a `value_layout`; None for a list.

    Raises:
        SchemaMismatchError: the file's field says that one value takes more than `MAX_ROW_BYTES`.
    """
    if layout is None:
        return None
    whole = {"": layout} if isinstance(layout, ArraySpec) else layout
    for one in whole.values():
        size = math.prod(one.shape) * one.dtype.itemsize
        if size > MAX_ROW_BYTES:
            detail = f"values of shape {one.shape} take {size} bytes each, at most {MAX_ROW_BYTES} are read into arrays"
            raise SchemaMismatchError(f"{path}: modality {name!r}: {detail}")
    found = {key: ArraySpec((count, *one.shape), one.dtype) for key, one in whole.items()}
    return found[""] if isinstance(layout, ArraySpec) else found


def batch_target(layout: ArraySpec | Mapping[str, ArraySpec] | None, out: Out | None, name: str) -> Arrays | None:
    """The arrays to decode into: the first rows of `out` if it is given, else new ones; None for a list.

    Raises:
        ValueError: `out` does not fit.
    """
    where = f"out[{name!r}]"
    if layout is None:
        if out is not None:
            raise ValueError(
                f"{where}: values of {name!r} vary in shape or type, they come as a list and go in no array"
            )
        return None
    if isinstance(layout, ArraySpec):
        return _first_rows(layout, out, where)
    parts = dict.fromkeys(layout) if out is None else out
    if not isinstance(parts, Mapping) or set(parts) != set(layout):
        found = sorted(parts) if isinstance(parts, Mapping) else describe(parts)
        raise ValueError(f"{where} is {found}, expected arrays by name: {', '.join(layout)}")
    return {key: _first_rows(one, parts[key], f"{where}[{key!r}]") for key, one in layout.items()}


def _first_rows(layout: ArraySpec, out: object, where: str) -> npt.NDArray[Any]:
    if out is None:
        return np.empty(layout.shape, dtype=layout.dtype)
    count, *shape = layout.shape
    fits = isinstance(out, np.ndarray) and out.dtype == layout.dtype and out.ndim == len(layout.shape)
    if not isinstance(out, np.ndarray) or not fits or out.shape[1:] != tuple(shape) or len(out) < count:
        extents = ", ".join(map(str, [f"{count} or more", *shape]))
        raise ValueError(f"{where} is {describe(out)}, expected {layout.dtype} with shape ({extents})")
    if not out.flags.writeable:
        raise ValueError(f"{where} is read-only")
    return out[:count]


def _slice(target: Arrays | None, start: int, stop: int) -> Arrays | None:
    if isinstance(target, dict):
        return {key: array[start:stop] for key, array in target.items()}
    return None if target is None else target[start:stop]


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode_batches(
    fields: Mapping[str, Field],
    rows: Mapping[str, Column],
    targets: Mapping[str, Arrays | None],
    *,
    pool: WorkerPool,
    threads: int,
    place: Place,
    windows: npt.NDArray[np.float64] | None = None,
    keys: npt.NDArray[np.uint64] | Mapping[str, npt.NDArray[np.uint64]] | None = None,
) -> dict[str, Batch]:
    """Decode several modalities.

    Args:
        fields: by modality, in the order of the result.
        rows: their payloads.
        targets: what to decode into, as `batch_target` gives it.
        pool: for fields that decode in parallel, if `threads` is 2 or more.
        threads: how many.
        place: for messages.
        windows: (n, 2), the window of each sample that is decoded; None for all of it.
        keys: (n,) uint64, of all modalities or by modality, from which random settings of fields are drawn; without
            keys nothing is random.

    Raises:
        FormatError: a payload is damaged; it says where.
        LimitError: a payload exceeds a limit of its field.
    """
    started: dict[str, list[Future[tuple[Any, npt.NDArray[np.bool_]]]]] = {}
    found: dict[str, Batch] = {}
    try:
        keys_of = keys if isinstance(keys, Mapping) else {} if keys is None else dict.fromkeys(fields, keys)
        for name, field in fields.items():
            count = len(rows[name].datas)
            if threads > 1 and field.decodes_in_parallel and count > 1:
                run = partial(_decode_run, field, rows[name], targets[name], windows, keys_of.get(name))
                started[name] = pool.start_runs(threads, count, run)
        # Fields that threads do not help are decoded here while they work; in this order without threads too, so that
        # of several damaged modalities the same one is reported.
        for name in sorted(fields, key=lambda name: fields[name].decodes_in_parallel):
            field, target = fields[name], targets[name]
            try:
                if name not in started:
                    own_keys, count = keys_of.get(name), len(rows[name].datas)
                    found[name] = Batch(*_decode_run(field, rows[name], target, windows, own_keys, 0, count))
                    continue
                parts = [future.result() for future in started[name]]
            except (FormatError, LimitError) as error:
                raise _first_damaged(field, name, rows[name], error, place, windows) from error
            present = np.concatenate([part[1] for part in parts])
            values = [value for part in parts for value in part[0]] if target is None else target
            found[name] = Batch(values, present)
    finally:
        if started:
            end([future for futures in started.values() for future in futures])
    return {name: found[name] for name in fields}


def _decode_run(
    field: Field,
    rows: Column,
    target: Arrays | None,
    windows: npt.NDArray[np.float64] | None,
    keys: npt.NDArray[np.uint64] | None,
    start: int,
    stop: int,
) -> tuple[Any, npt.NDArray[np.bool_]]:
    own: dict[str, Any] = {"keys": keys[start:stop]} if keys is not None and field.draws else {}
    out = _slice(target, start, stop)
    if windows is None:
        return field.decode_batch(*rows.run(start, stop), out, **own)
    return field.decode_windows(*rows.run(start, stop), windows[start:stop], out, **own)


def _first_damaged(
    field: Field,
    name: str,
    rows: Column,
    error: FormatError | LimitError,
    place: Place,
    windows: npt.NDArray[np.float64] | None,
) -> FormatError | LimitError:
    """The error of the first row that is damaged or too large, with its place: found by decoding each row alone."""
    for row, data in enumerate(rows.datas):
        if data is not None:
            try:
                _decode_run(field, rows, None, windows, None, row, row + 1)
            except (FormatError, LimitError) as alone:
                return locate(alone, name, place(row, name))
    # No row fails alone: then none can be named.
    return locate(error, name, (PAYLOAD, None))


def decode_values(field: Field, name: str, rows: Column, *, pool: WorkerPool, threads: int, place: Place) -> list[Any]:
    """Decode each payload separately, even if the field has batches; None where absent.

    Raises:
        FormatError: a payload is damaged; the message says where.
        LimitError: a payload exceeds a limit of its field.
    """

    def decode(start: int, stop: int) -> list[Any]:
        values: list[Any] = []
        for row in range(start, stop):
            data = rows.datas[row]
            try:
                values.append(None if data is None else field.decode(memoryview(rows.records[row]), data))
            except (FormatError, LimitError) as error:
                raise locate(error, name, place(row, name)) from error
        return values

    return pool.map_runs(threads if field.decodes_in_parallel else 0, len(rows.datas), decode)


def locate(error: FormatError | LimitError, name: str, place: tuple[str, int | None]) -> FormatError | LimitError:
    """A field's error with the file, sample and modality that the field does not know."""
    if error.path != PAYLOAD:
        return error
    path, sample = place
    return error.moved(path, sample=sample, modality=name)
