"""One number per sample, stored in the metadata record, so that a whole column is read without touching data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.base import Encoded, Field, Out, batch_array, corrupt, parse_json
from mm_assets.fields.ndarray import REAL_CODES
from mm_assets.media.content_types import Buffer
from mm_assets.summaries import describe

__all__ = ["ScalarField"]

# docs/spec/fields.md, type 5: the value at full width whatever the dtype, so that every record is 8 bytes
_RECORDS = {kind: np.dtype([("value", kind)]) for kind in ("<i8", "<u8", "<f8")}
_WIDE = {"i": "<i8", "u": "<u8", "b": "<u8", "f": "<f8"}
_DTYPES = tuple(np.dtype(code).name for code in REAL_CODES)


@dataclass(frozen=True)
class ScalarField(Field):
    """A label, score, count or flag.

    Value: int, float or bool, as Python's or NumPy's number. Decodes to Python's; a batch decodes to one array of
    `dtype`. A float is rounded to `dtype`; an integer out of its range is refused, never wrapped. NaN and infinities
    are values.

    Attributes:
        dtype: NumPy name of the number's type: bool, int8 to int64, uint8 to uint64, float16 to float64.
    """

    TYPE_ID: ClassVar[int] = 5

    dtype: str = "float64"

    def __post_init__(self) -> None:
        self._expect_choice("dtype", _DTYPES)

    @property
    def _numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def metadata_type(self) -> np.dtype[np.void]:
        """The metadata record, 8 bytes: the value as int64, uint64 (also for bool) or float64."""
        return _RECORDS[_WIDE[self._numpy_dtype.kind]]

    @property
    def value_layout(self) -> ArraySpec:
        """A single number of `dtype`."""
        return ArraySpec((), self._numpy_dtype)

    def from_text(self, text: Buffer) -> int | float:
        """The number that a text row's content is."""
        plain = str(text, "utf-8").strip()
        value = parse_json(plain, "a number")
        if not isinstance(value, int | float):
            raise EncodeError(f"found the text {plain[:40]!r}, expected a number")
        return value

    def from_csv_cell(self, cell: str) -> Any:
        """The number in the cell; true and false also in capitals, as spreadsheets write them."""
        plain = cell.strip().lower()
        return parse_json(plain if plain in ("true", "false") else cell, "a number")

    def encode(self, value: float | np.number[Any] | np.bool_) -> Encoded:
        """Encode a number."""
        if self.dtype == "bool":
            if not isinstance(value, bool | np.bool_):
                raise self._wrong_value(value, "a bool")
            return Encoded(self._pack_record(int(value)), b"")
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
            raise self._wrong_value(value, f"a number for {self.dtype}")
        if self._numpy_dtype.kind == "f":
            return Encoded(self._pack_record(self._round(value)), b"")
        if not isinstance(value, int | np.integer):
            raise self._wrong_value(value, f"an integer for {self.dtype}")
        limits = np.iinfo(self.dtype)
        if not limits.min <= int(value) <= limits.max:
            raise self._wrong_value(value, f"an integer from {limits.min} to {limits.max}")
        return Encoded(self._pack_record(int(value)), b"")

    def _round(self, value: float | np.number[Any]) -> float:
        try:
            wide = float(value)
        except OverflowError as error:
            raise self._wrong_content(describe(value), f"a number in the range of {self.dtype}") from error
        with np.errstate(over="ignore"):
            rounded = float(np.float64(wide).astype(self.dtype))
        if math.isinf(rounded) and not math.isinf(wide):
            raise self._wrong_value(value, f"a number in the range of {self.dtype}")
        return rounded

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> int | float | bool:
        """Return Python's number."""
        (value,) = self._unpack_record(metadata)
        if len(as_bytes_view(data)):
            raise corrupt("a number has no data", found=f"{len(as_bytes_view(data))} bytes", expected="none")
        number: int | float | bool = self._narrow(np.array([value], dtype=_WIDE[self._numpy_dtype.kind]))[0].item()
        return number

    def _narrow(self, wide: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """To `dtype`; what does not fit was not written by `encode`."""
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = wide.astype(self._numpy_dtype)
            if self._numpy_dtype.kind == "f":
                wrong = (narrow.astype(np.float64) != wide) & ~np.isnan(wide)
            else:
                wrong = narrow.astype(wide.dtype) != wide
        if wrong.any():
            raise corrupt("number does not fit its type", found=wide[wrong][0], expected=self.dtype)
        return narrow

    def decode_batch(
        self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer | None], out: Out | None = None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Decode a column in one expression: (n,) of `dtype`, absent rows zero."""
        present = self._check_batch(records, datas)
        if any(datas):  # a buffer with bytes in it is true, None and empty buffers are not
            raise corrupt("a number has no data", found="bytes", expected="none")
        wide = np.ascontiguousarray(records).view(_WIDE[self._numpy_dtype.kind]).reshape(-1)
        target = batch_array(len(datas), self.value_layout, out, "out")
        target[...] = self._narrow(np.where(present, wide, np.zeros((), dtype=wide.dtype)))
        return target, present
