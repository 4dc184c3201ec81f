"""What a field promises: a value becomes a fixed metadata record and data bytes, and comes back.

A payload holds offsets relative to its own data only, so the same bytes stand in any container. A wrong value raises
`EncodeError`, a wrong payload `FormatError`; limits are read from the header and checked before anything is decoded.
Fields are frozen dataclasses: their attributes are their configuration, and two fields with one configuration are
equal. Nothing here knows files.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError, CorruptError, EncodeError, TruncatedError
from mm_assets.media.content_types import Buffer

__all__ = [
    "JSON",
    "PAYLOAD",
    "ArraySpec",
    "Buffer",
    "Encoded",
    "Field",
    "Item",
    "Out",
    "Part",
    "as_bytes_view",
    "batch_array",
    "config_error",
    "corrupt",
    "describe",
    "is_int",
    "truncated",
    "wrong_content",
    "wrong_value",
]

Out: TypeAlias = npt.NDArray[Any] | Mapping[str, npt.NDArray[Any]]
"""What a batch is decoded into: one array, or several by name."""

JSON = Any  # a JSON value; Python's type system has no finite name for it that is worth its cost in casts

PAYLOAD = "<payload>"
"""Stands for the file in a field's `FormatError`: a field does not know it, and the dataset puts it in."""


class Encoded(NamedTuple):
    """One value, ready for a container.

    Attributes:
        metadata: exactly `metadata_type.itemsize` bytes.
        data: any number of bytes, also none.
    """

    metadata: bytes
    data: bytes | memoryview


class ArraySpec(NamedTuple):
    """Shape and dtype that every decoded value of a field has, so that a batch is one array.

    Attributes:
        shape: of one value; () for a number.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Part(NamedTuple):
    """One of the contents that a composite field's value is made of.

    Attributes:
        many: whether there may be several, each with its position.
        needed: whether there is no value without it.
    """

    many: bool = False
    needed: bool = False


class Item(NamedTuple):
    """What a payload holds of one content.

    Attributes:
        part: name in the field's `PARTS`; "" in a field that is no composite.
        position: the item's position among those of a sequence or a part; else 0.
        data: the bytes that stand for the content: the content itself where the field keeps it.
    """

    part: str
    position: int
    data: Buffer


def describe(value: object) -> str:
    """A value in a few words for a message: its type and extent, never its content."""
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} with shape {value.shape}"
    if isinstance(value, bytes | bytearray):
        return f"{type(value).__name__} of {len(value)} bytes"
    if isinstance(value, str | list | tuple | dict):
        return f"{type(value).__name__} of length {len(value)}"
    if isinstance(value, bool | int | float | np.generic | None):
        return f"{type(value).__name__} {value!r}"[:80]
    return type(value).__name__


def wrong_value(field: object, value: object, expected: str) -> EncodeError:
    """An `EncodeError` that names the field, describes the value, and says what was expected."""
    return wrong_content(field, describe(value), expected)


def wrong_content(field: object, found: str, expected: str) -> EncodeError:
    """An `EncodeError` that names the field, with words for what was found and what was expected."""
    return EncodeError(f"{type(field).__name__}: found {found}, expected {expected}")


def corrupt(detail: str, *, found: object = None, expected: object = None) -> CorruptError:
    """A `CorruptError` of a payload."""
    return CorruptError(PAYLOAD, detail, found=found, expected=expected)


def truncated(detail: str, *, found: object = None, expected: object = None) -> TruncatedError:
    """A `TruncatedError` of a payload."""
    return TruncatedError(PAYLOAD, detail, found=found, expected=expected)


def config_error(key: str, found: object, expected: str) -> ConfigError:
    """A `ConfigError` of a field's argument."""
    return ConfigError("arguments", key, f"found {found!r}, expected {expected}")


def is_int(value: object, low: int, high: int) -> bool:
    """Whether a setting is an integer from `low` to `high`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def as_bytes_view(value: Buffer) -> memoryview:
    """The bytes of a buffer, uncopied."""
    view = memoryview(value)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


@dataclasses.dataclass(frozen=True)
class Field(ABC):
    """How one packed modality is encoded.

    A subclass is a frozen dataclass with a `TYPE_ID`, a `metadata_type`, `encode` and `decode`. Its attributes hold
    JSON values (tuples stand for lists) or are turned into such by an own `config`.
    """

    TYPE_ID: ClassVar[int]

    PARTS: ClassVar[Mapping[str, Part]] = MappingProxyType({})
    """What a composite's value is assembled of, by name; empty where one content is the value."""

    TAKES_CONTENT: ClassVar[bool] = True
    """Whether the bytes of one file, or a text, are a value."""

    LIMITS: ClassVar[tuple[str, ...]] = ()
    """Settings that bound what decoding may cost. A packed file may lower them, not raise them above their defaults."""

    @property
    @abstractmethod
    def metadata_type(self) -> np.dtype[np.void]:
        """The metadata record: packed little-endian, a multiple of 8 bytes, pads spelled out as ``_pad``."""

    @property
    def keeps_bytes(self) -> bool:
        """Whether a bytes value is stored as it is: the payload's data is the value."""
        return False

    def keeps_part(self, part: str) -> bool:
        """Whether the content given for a part is stored as it is: the data of its `Item`."""
        return False

    def assemble(self, contents: Mapping[str, Any]) -> Any:
        """Make the value of a composite of its parts' contents.

        Args:
            contents: by the names of `PARTS`, those that there are. Each is the content's bytes, a JSON value, or for
                a part of many a list of (position, bytes) in order of position.

        Raises:
            EncodeError: the contents make no value of this field.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parts")

    def items(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[Item]:
        """What a payload holds of each content it was made of, without decoding it.

        Raises:
            FormatError: the payload contradicts itself.
        """
        yield Item("", 0, data)

    @property
    def value_layout(self) -> ArraySpec | Mapping[str, ArraySpec] | None:
        """Shape and dtype of every decoded value, or None where they vary.

        A mapping is that of a field whose batch is several arrays by name, such as token ids and their mask.
        """
        return None

    @property
    def decodes_in_parallel(self) -> bool:
        """Whether decoding spends its time in a codec that lets go of the interpreter lock, so that threads help."""
        return False

    @abstractmethod
    def encode(self, value: Any) -> Encoded:
        """Turn a value into a payload.

        Raises:
            EncodeError: the value is wrong for this field.
        """

    def check(self, value: Any) -> None:
        """Raise `EncodeError` exactly when `encode` would.

        Bytes that are kept as they are cost a look at their header; other values cost what `encode` does.
        """
        self.encode(value)

    @abstractmethod
    def decode(self, metadata: Buffer | np.void, data: Buffer) -> Any:
        """Turn a payload back into a value.

        Raises:
            FormatError: the payload contradicts itself or a limit of this field; its path is ``<payload>``.
        """

    def decode_batch(
        self,
        records: npt.NDArray[np.uint8],
        datas: Sequence[Buffer | None],
        out: Out | None = None,
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Decode many payloads, rows in order.

        Args:
            records: (n, metadata_type.itemsize) uint8, the metadata records.
            datas: n data buffers; None for an absent value.
            out: what to decode into; only for a field with a `value_layout`: its (n, *shape) array, or a mapping of
                all of them.

        Returns:
            The values, an array or a dict of arrays where the field has a `value_layout` (absent rows are zero) and
            otherwise a list (absent values are None); and (n,) bool, which values are present.

        Raises:
            FormatError: a payload is damaged.
            ValueError: `records`, `datas` and `out` do not fit one another.
        """
        present = self._check_batch(records, datas)
        target = self._batch_target(len(datas), out)
        if target is None:
            values = [
                None if data is None else self.decode(memoryview(record), data)
                for record, data in zip(records, datas, strict=True)
            ]
            return values, present
        if isinstance(target, dict):
            for index, data in enumerate(datas):
                rows = {name: array[index, ...] for name, array in target.items()}
                if data is not None:
                    self._decode_into_several(memoryview(records[index]), data, rows)
                    continue
                for row in rows.values():
                    row[...] = 0
            return target, present
        for index, data in enumerate(datas):
            if data is None:
                target[index] = 0
            else:
                self._decode_into(memoryview(records[index]), data, target[index, ...])
        return target, present

    def _check_batch(self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer | None]) -> npt.NDArray[np.bool_]:
        expected = (len(datas), self.metadata_type.itemsize)
        if records.shape != expected or records.dtype != np.uint8:
            raise ValueError(f"records are {describe(records)}, expected uint8 with shape {expected}")
        return np.fromiter((data is not None for data in datas), dtype=np.bool_, count=len(datas))

    def _batch_target(self, count: int, out: Out | None) -> npt.NDArray[Any] | dict[str, npt.NDArray[Any]] | None:
        """The arrays of a batch, `out` where it is given and fits; None where the values vary."""
        layout = self.value_layout
        if layout is None:
            if out is not None:
                raise ValueError(f"{type(self).__name__} values vary in shape or type: they cannot go into one array")
            return None
        if isinstance(layout, ArraySpec):
            return batch_array(count, layout, out, "out")
        if out is None:
            return {name: batch_array(count, one, None, name) for name, one in layout.items()}
        if not isinstance(out, Mapping) or set(out) != set(layout):
            found = sorted(out) if isinstance(out, Mapping) else "one array"
            raise ValueError(f"out has {found}, expected arrays {sorted(layout)}")
        return {name: batch_array(count, one, out[name], f"out[{name!r}]") for name, one in layout.items()}

    def _decode_into(self, metadata: Buffer, data: Buffer, target: npt.NDArray[Any]) -> None:
        """Decode one value into its row; fields whose codec can write in place do better than this."""
        target[...] = self.decode(metadata, data)

    def _decode_into_several(self, metadata: Buffer, data: Buffer, targets: Mapping[str, npt.NDArray[Any]]) -> None:
        """Decode one value into its rows by name, writing every element: for a field whose batch is several arrays."""
        raise NotImplementedError(f"{type(self).__name__} has several arrays a batch and must say how they are filled")

    def _pack_record(self, *values: Any) -> bytes:
        layout = _record_struct(self.metadata_type)
        return layout.pack(*values) if layout else np.array(values, dtype=self.metadata_type).tobytes()

    def _unpack_record(self, metadata: Buffer | np.void) -> tuple[Any, ...]:
        """The record's values as Python's own, in the order of `metadata_type`."""
        if isinstance(metadata, np.void):
            metadata = metadata.tobytes()
        view = as_bytes_view(metadata)
        kind = self.metadata_type
        if len(view) != kind.itemsize:
            raise truncated("metadata record is of the wrong size", found=len(view), expected=kind.itemsize)
        layout = _record_struct(kind)
        values: tuple[Any, ...] = layout.unpack(view) if layout else np.frombuffer(view, dtype=kind)[0].item()
        return values

    @property
    def config(self) -> dict[str, JSON]:
        """All settings as JSON, defaults too, so that a later release with other defaults reads old files alike."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    @classmethod
    def from_config(cls, config: Mapping[str, JSON]) -> Self:
        """Restore a field from its configuration; settings that are not given have their defaults.

        Raises:
            ConfigError: an unknown key, a missing one, or a wrong value.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in config:
            if key not in known:
                allowed = ", ".join(known) or "none, it has no settings"
                raise config_error(str(key), key, f"a setting of {cls.__name__}: {allowed}")
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in config:
                raise ConfigError("arguments", name, f"is missing, and {cls.__name__} needs it")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in config.items()})


_STRUCT_CODES = {"|u1": "B", "|i1": "b", "<u2": "H", "<i2": "h", "<u4": "I", "<i4": "i", "<u8": "Q", "<i8": "q"}
_STRUCT_CODES |= {"<f4": "f", "<f8": "d"}


@functools.lru_cache(maxsize=256)
def _record_struct(kind: np.dtype[np.void]) -> struct.Struct | None:
    """What packs a record and unpacks it to the same values as NumPy, several times as quick; None if it has others."""
    parts = [kind[name].str for name in kind.names or ()]
    if not parts or any(part not in _STRUCT_CODES for part in parts):
        return None
    layout = struct.Struct("<" + "".join(_STRUCT_CODES[part] for part in parts))
    return layout if layout.size == kind.itemsize else None


def batch_array(count: int, layout: ArraySpec, out: Out | None, name: str) -> npt.NDArray[Any]:
    """The (count, *shape) array of a layout: `out`, or a new one where that is None.

    Raises:
        ValueError: `out` is of another kind; `name` stands for it.
    """
    shape = (count, *layout.shape)
    if out is None:
        return np.empty(shape, dtype=layout.dtype)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != layout.dtype:
        raise ValueError(f"{name} is {describe(out)}, expected {layout.dtype} with shape {shape}")
    return out
