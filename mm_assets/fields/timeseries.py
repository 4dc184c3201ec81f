"""Numbers over time: proprioception, actions, pitch curves. Timestamps in seconds beside a row of values each.

Both arrays are stored as in memory, so decoding copies nothing. `TimeSeries.nearest`, `interpolate` and `between` look
up by time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.base import (
    JSON,
    Encoded,
    Field,
    Item,
    Part,
    are_equal,
    config_error,
    corrupt,
    is_int,
    join_arrays,
    split_rows,
    stored_array,
    truncated,
)
from mm_assets.fields.facts import Fact, Spans, Steps
from mm_assets.fields.ndarray import REAL_CODES, dtype_name
from mm_assets.fields.series_text import array_of_content, columns_of_csv
from mm_assets.fields.series_value import Columns, TimeSeries
from mm_assets.media.content_types import Buffer
from mm_assets.summaries import describe

__all__ = ["TimeSeries", "TimeSeriesField"]

_DTYPES = {code.encode("ascii"): np.dtype(code) for code in REAL_CODES}
_KINDS = "bool, integer or float (16 to 64 bits)"
_TIMES = np.dtype("<f8")
_MAX_EXTENT = 2**32 - 1  # the record's words are uint32
_NUM_STEPS, _BOUNDS_START = slice(0, 4), 16  # bytes of the record
_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}  # in a second
_EXACT = 2**53  # integers up to this are float64 numbers


@dataclass(frozen=True, kw_only=True)
class TimeSeriesField(Field):
    """A series of rows of numbers, each with its time.

    Value: `TimeSeries`; a tuple (timestamps, values), timestamps (T,) or (T, 1) numbers in `timestamp_unit`, values
    (T,), (T, D) or (T, ...), further extents laid out in C order as columns; or the UTF-8 bytes of a CSV with the time
    in its first column. Decodes to `TimeSeries`, whose arrays are read-only views of the payload: copy them before
    closing the file.

    Timestamps become float64 seconds: floats of 16 or 32 bits widened exactly, then one division by the unit.

    Attributes:
        num_steps: T that every series must have; None for any.
        num_columns: D that every series must have; None for any.
        dtype: of the values, NumPy's name; None for the one that is given. Values of another dtype are converted where
            each fits exactly and refused otherwise; those of a text (JSON, CSV) are rounded to it.
        timestamp_unit: of numbers that are given as timestamps: ``s``, ``ms``, ``us`` or ``ns``.
        allow_equal: take equal timestamps in a row, not only increasing ones.
        columns: names for columns or groups of them: a list of D names, or name to (start, end), half open, or to
            {"start": …, "end": …} as in LeRobot's modality file. Kept as (name, start, end).
    """

    TYPE_ID: ClassVar[int] = 42
    VALUE_TYPE: ClassVar[type] = TimeSeries
    CONTENT_KIND: ClassVar[str] = "series"
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [
            ("num_steps", "<u4"),
            ("num_columns", "<u4"),
            ("dtype", "S4"),
            ("_pad", "<u4"),
            ("start_seconds", "<f8"),
            ("end_seconds", "<f8"),
        ]
    )
    FACTS: ClassVar[tuple[type[Fact], ...]] = (Spans, Steps)
    PARTS: ClassVar[Mapping[str, Part]] = {"timestamps": Part(needed=True), "values": Part(needed=True)}

    num_steps: int | None = None
    num_columns: int | None = None
    dtype: str | None = None
    timestamp_unit: str = "s"
    allow_equal: bool = False
    columns: Columns = ()

    def __post_init__(self) -> None:
        self._expect_int("num_steps", 0, _MAX_EXTENT, optional=True)
        self._expect_int("num_columns", 0, _MAX_EXTENT, optional=True)
        object.__setattr__(self, "dtype", dtype_name(self.dtype, _DTYPES, f"a NumPy dtype of kind {_KINDS}, or None"))
        self._expect_choice("timestamp_unit", _UNITS)
        self._expect_bool("allow_equal")
        columns = _columns_of_config(self.columns)
        if self.num_columns is not None and any(end > self.num_columns for _, _, end in columns):
            raise self._wrong_setting("columns", f"columns of {self.num_columns}")
        object.__setattr__(self, "columns", columns)

    @property
    def value_layout(self) -> Mapping[str, ArraySpec] | None:
        """Timestamps and values, where the number of steps, of columns and the dtype are fixed."""
        if self.num_steps is None or self.num_columns is None or self.dtype is None:
            return None
        return {
            "timestamps": ArraySpec((self.num_steps,), np.dtype(np.float64)),
            "values": ArraySpec((self.num_steps, self.num_columns), np.dtype(self.dtype)),
        }

    @property
    def empty_value(self) -> Mapping[str, Any]:
        """``timestamps``, (0,) float64, and ``values``, (0, D)."""
        times = np.empty(self.num_steps or 0, np.float64)
        return {"timestamps": times, "values": np.empty((len(times), self.num_columns or 0), self.dtype or np.float32)}

    @property
    def config(self) -> dict[str, JSON]:
        """All settings as JSON; columns by name."""
        return {**super().config, "columns": {name: [start, end] for name, start, end in self.columns}}

    # --- encode -------------------------------------------------------------------------------------------------------

    def assemble(self, contents: Mapping[str, Any]) -> TimeSeries:
        """Make a series of timestamps and values, each the bytes of an ``.npy`` file, JSON text or a JSON list."""
        self._expect_parts(contents)
        arrays = {}
        is_text = False
        for part in self.PARTS:  # the values are the last
            arrays[part], is_text = self._within(f"part {part}", array_of_content, contents[part])
        return self._series(arrays["timestamps"], arrays["values"], is_text=is_text)

    def encode(self, value: TimeSeries | tuple[npt.NDArray[Any], npt.NDArray[Any]] | Buffer) -> Encoded:
        """Encode a series, (timestamps, values), or a CSV's bytes."""
        series = self._series_of(value)
        timestamps, values = series.timestamps, series.values
        self._check_extent(values.shape)
        is_equal = timestamps[1:] == timestamps[:-1]
        if not self.allow_equal and is_equal.any():
            step = int(np.argmax(is_equal)) + 1
            found = f"timestamp {float(timestamps[step])} a second time at step {step}"
            raise self._wrong_content(found, "timestamps that increase (allow_equal takes equal ones)")
        code = values.dtype.newbyteorder("<").str.encode("ascii")
        bounds = (float(timestamps[0]), float(timestamps[-1])) if len(timestamps) else (0.0, 0.0)
        record = self._pack_record(*values.shape, code, *bounds)
        return Encoded(record, timestamps.astype(_TIMES).tobytes() + values.astype(_DTYPES[code]).tobytes())

    def _series_of(self, value: object) -> TimeSeries:
        if isinstance(value, Buffer):
            expected = [name for name, _, _ in self.columns] if self._names_each_column else None
            times, table = self._within("", columns_of_csv, as_bytes_view(value), expected, self.num_columns)
            return self._series(times, table, is_text=True)
        if isinstance(value, tuple | list) and len(value) == 2:
            timestamps, values = value
            if not isinstance(timestamps, np.ndarray) or not isinstance(values, np.ndarray):
                found = f"({describe(timestamps)}, {describe(values)})"
                raise self._wrong_content(found, "(timestamps, values), two arrays")
            return self._series(timestamps, values, is_text=False)
        if not isinstance(value, TimeSeries):
            raise self._wrong_value(value, "TimeSeries, (timestamps, values), or a CSV's bytes")
        if value.columns not in ((), self.columns):
            raise self._wrong_content(f"columns {value.columns}", f"the field's columns {self.columns}")
        return self._made(value.timestamps, self._cast(value.values, is_text=False))

    @property
    def _names_each_column(self) -> bool:
        return bool(self.columns) and all((start, end) == (k, k + 1) for k, (_, start, end) in enumerate(self.columns))

    def _series(self, timestamps: npt.NDArray[Any], values: npt.NDArray[Any], *, is_text: bool) -> TimeSeries:
        if timestamps.ndim == 2 and timestamps.shape[1] == 1:
            timestamps = timestamps[:, 0]
        if timestamps.ndim != 1 or timestamps.dtype.kind not in "iuf" or timestamps.dtype.itemsize > _TIMES.itemsize:
            raise self._wrong_value(timestamps, "timestamps (T,) or (T, 1), integers or floats up to 64 bits")
        if values.ndim == 0 or len(values) != len(timestamps):
            found = f"{len(timestamps)} timestamps with values of shape {values.shape}"
            raise self._wrong_content(found, "a row of values for each timestamp")
        num_columns = int(np.prod(values.shape[1:], dtype=np.int64))
        values = values.reshape(len(values), num_columns)
        return self._made(_seconds(timestamps, _UNITS[self.timestamp_unit]), self._cast(values, is_text=is_text))

    def _made(self, timestamps: npt.NDArray[np.float64], values: npt.NDArray[Any]) -> TimeSeries:
        """A series, with the value's own errors as this field's."""
        try:
            return TimeSeries(timestamps, values, self.columns)
        except ValueError as error:
            raise EncodeError(f"{type(self).__name__}: {error}") from error

    def _cast(self, values: npt.NDArray[Any], *, is_text: bool) -> npt.NDArray[Any]:
        """Values of the field's dtype; of arrays, only where nothing is lost."""
        if values.dtype.newbyteorder("<").str.encode("ascii") not in _DTYPES:
            raise self._wrong_value(values, f"values of kind {_KINDS}")
        if self.dtype is None or values.dtype.newbyteorder("<") == np.dtype(self.dtype):
            return values
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is found afterwards
            cast = values.astype(self.dtype)
        if is_text and cast.dtype.kind == "f":
            fits = np.array_equal(np.isfinite(cast), np.isfinite(values))
        else:
            fits = _is_exact(values, cast)
        if not fits:
            raise self._wrong_value(values, f"values that are {self.dtype} exactly; convert them before")
        return cast

    def _check_extent(self, shape: tuple[int, ...]) -> None:
        for name, want, have in zip(
            ("num_steps", "num_columns"), (self.num_steps, self.num_columns), shape, strict=True
        ):
            if have > _MAX_EXTENT or want not in (None, have):
                limit = want if want is not None else f"at most {_MAX_EXTENT}"
                raise self._wrong_content(f"a series of shape {shape}", f"{limit} ({name})")

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> TimeSeries:
        """Return `TimeSeries`, read-only views of the payload."""
        timestamps, values, start, end = self._stored(metadata, data)
        bounds = (timestamps[0], timestamps[-1]) if len(timestamps) else (0.0, 0.0)
        if bounds != (start, end):
            raise corrupt("timestamps are not as the record says", found=bounds, expected=(start, end))
        if not self.allow_equal and not (timestamps[1:] > timestamps[:-1]).all():
            raise corrupt("timestamps do not increase", found="an equal or lower one", expected="increasing ones")
        try:
            return TimeSeries(timestamps, values, self.columns)
        except ValueError as error:
            raise corrupt(f"series is damaged: {error}") from error

    def _decode_together(self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer]) -> Any:
        """Series that differ in their number of steps alone, of which none is out of order."""
        if not are_equal(records[:, :_BOUNDS_START], but=_NUM_STEPS if self.num_steps is None else None):
            return None
        num_steps, num_columns, dtype, *_ = self._head(memoryview(records[0]))
        heads = np.ascontiguousarray(records).view(self.metadata_type).ravel()
        counts = heads["num_steps"].astype(np.int64)
        if not counts.all() or any(end > num_columns for _, _, end in self.columns):
            return None
        if self.value_layout is not None:
            both = _both_arrays(num_steps, num_columns, dtype)
            joined = join_arrays(datas, both, [both.itemsize] * len(datas))
            if joined is None or not self._are_ordered(joined["timestamps"].ravel(), counts, heads):
                return None
            return joined
        splits, sizes = (counts * _TIMES.itemsize).tolist(), (counts * (num_columns * dtype.itemsize)).tolist()
        pairs = list(zip(datas, splits, strict=True))
        times = join_arrays([data[:split] for data, split in pairs], _TIMES, splits)
        table = join_arrays([data[split:] for data, split in pairs], dtype, sizes)
        if times is None or table is None or not self._are_ordered(times, counts, heads):
            return None
        steps = counts.tolist()
        rows = split_rows(table.reshape(len(times), num_columns), steps)
        return TimeSeries.of_checked(timestamps=split_rows(times, steps), values=rows, columns=repeat(self.columns))

    def _are_ordered(
        self, times: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], heads: npt.NDArray[np.void]
    ) -> bool:
        """Whether the timestamps of joined series are finite, increase, and begin and end as their records say."""
        ends = np.cumsum(counts)
        increases = times[1:] >= times[:-1] if self.allow_equal else times[1:] > times[:-1]
        increases[ends[:-1] - 1] = True  # from one series to the next
        bounds = (times[ends - counts] == heads["start_seconds"]) & (times[ends - 1] == heads["end_seconds"])
        return bool(increases.all() and bounds.all() and np.isfinite(times).all())

    def decode_window(
        self, metadata: Buffer | np.void, data: Buffer, start_seconds: float, seconds: float
    ) -> TimeSeries:
        """Return the steps of [start, start + seconds), with times from the window's start."""
        steps = self.decode(metadata, data).between(start_seconds, start_seconds + seconds)
        return TimeSeries(steps.timestamps - start_seconds, steps.values, steps.columns)

    def window_settings(self, seconds: float | None, frames: int | None) -> dict[str, JSON]:
        """Any number of steps: windows of one duration have different numbers of them."""
        return {"num_steps": None}

    def items(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[Item]:
        """Return the two arrays' bytes."""
        view, split = as_bytes_view(data), self._stored(metadata, data)[0].nbytes
        yield Item("timestamps", 0, view[:split])
        yield Item("values", 0, view[split:])

    def facts(self, metadata: Buffer, data: Buffer) -> Iterator[Spans | Steps]:
        """The span of the series and its timestamps, also where `decode` refuses their order."""
        times = self._stored(metadata, data)[0].copy()  # which outlives the file
        if len(times):
            yield Spans("series", times.min(keepdims=True), times.max(keepdims=True))
        yield Steps(times, self.allow_equal)

    def _decode_into(self, metadata: Buffer, data: Buffer, target: Mapping[str, npt.NDArray[Any]]) -> None:
        series = self.decode(metadata, data)
        target["timestamps"][...] = series.timestamps
        target["values"][...] = series.values

    def _stored(
        self, metadata: Buffer | np.void, data: Buffer
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[Any], float, float]:
        """Timestamps and values, read-only views of the payload, and the first and last second of the record."""
        num_steps, num_columns, dtype, start, end = self._head(metadata)
        view, split = as_bytes_view(data), num_steps * _TIMES.itemsize
        size = split + num_steps * num_columns * dtype.itemsize
        if len(view) != size:
            raise truncated("series is not as long as its record says", found=len(view), expected=size)
        values = stored_array(view, dtype, (num_steps, num_columns), offset=split)
        return stored_array(view, _TIMES, (num_steps,)), values, start, end

    def _head(self, metadata: Buffer | np.void) -> tuple[int, int, np.dtype[Any], float, float]:
        """Number of steps and of columns, dtype, first and last second of a payload, as its record says."""
        num_steps, num_columns, code, start, end = self._unpack_record(metadata)
        dtype = _DTYPES.get(code.rstrip(b"\0"))
        if dtype is None or (self.dtype is not None and dtype != np.dtype(self.dtype)):
            raise corrupt("series is of an unexpected dtype", found=code, expected=self.dtype or f"kind {_KINDS}")
        found, expected = (num_steps, num_columns), (self.num_steps, self.num_columns)
        if any(want not in (None, have) for want, have in zip(expected, found, strict=True)):
            raise corrupt("series is not of the field's extent", found=found, expected=expected)
        return num_steps, num_columns, dtype, start, end


@functools.lru_cache(maxsize=64)
def _both_arrays(num_steps: int, num_columns: int, dtype: np.dtype[Any]) -> np.dtype[np.void]:
    """The data of a payload as one element."""
    return np.dtype([("timestamps", _TIMES, (num_steps,)), ("values", dtype, (num_steps, num_columns))])


def _seconds(timestamps: npt.NDArray[Any], per_second: int) -> npt.NDArray[np.float64]:
    """Float64 seconds, each rounded once: an integer clock past 2**53 is divided as Python's integers are."""
    is_whole = timestamps.dtype.kind in "iu" and timestamps.size > 0
    if is_whole and max(-int(timestamps.min()), int(timestamps.max())) > _EXACT:
        return np.array([tick / per_second for tick in timestamps.tolist()], dtype=np.float64)
    seconds: npt.NDArray[np.float64] = timestamps.astype(np.float64)
    return seconds if per_second == 1 else seconds / per_second


def _is_exact(values: npt.NDArray[Any], cast: npt.NDArray[Any]) -> bool:
    """Whether a conversion changed no value."""
    if (values.dtype.kind == "f") != (cast.dtype.kind == "f"):
        floats, whole = (values, cast) if values.dtype.kind == "f" else (cast, values)
        limit = 2.0 ** (whole.dtype.itemsize * 8 - (whole.dtype.kind == "i"))
        wide = floats.astype(np.float64)
        # Beyond the integer's range, what a conversion gives depends on the machine.
        if not ((wide >= -limit) & (wide < limit)).all():
            return False
    is_float = values.dtype.kind == "f"
    # Both ways: -1 as an unsigned number comes back as -1, and a float may equal the integer it was rounded from.
    with np.errstate(over="ignore"):  # 2**64 - 1 is infinite as a float16, which differs from any value that fits
        back = cast.astype(values.dtype)
    return np.array_equal(back, values, equal_nan=is_float) and np.array_equal(cast, values, equal_nan=is_float)


def _columns_of_config(columns: Any) -> Columns:
    """(name, start, end) from any form of the setting, in order of columns."""
    expected = "a list of names, or name to (start, end), half open, from 0"
    if isinstance(columns, Mapping):
        entries = [(name, *_bounds(bounds)) for name, bounds in columns.items()]
    elif isinstance(columns, tuple | list):
        entries = [(entry, k, k + 1) if isinstance(entry, str) else entry for k, entry in enumerate(columns)]
    else:
        raise config_error("columns", columns, expected)
    for entry in entries:
        is_named = isinstance(entry, tuple | list) and len(entry) == 3 and isinstance(entry[0], str)
        if not is_named or not all(is_int(k, 0, _MAX_EXTENT) for k in entry[1:]) or not entry[1] < entry[2]:
            raise config_error("columns", columns, expected)
    if len({entry[0] for entry in entries}) != len(entries):
        raise config_error("columns", columns, "names that differ")
    return tuple(sorted(map(tuple, entries), key=lambda entry: (entry[1], entry[2], entry[0])))


def _bounds(bounds: Any) -> tuple[Any, ...]:
    if isinstance(bounds, Mapping):
        return (bounds["start"], bounds["end"]) if set(bounds) == {"start", "end"} else ()
    return tuple(bounds) if isinstance(bounds, tuple | list) else ()
