"""The interface of fields: a value becomes a fixed metadata record and data bytes, and is restored from them.

A payload holds offsets relative to its own data only, so that it is the same in any container. A wrong value raises
`EncodeError`, a wrong payload `FormatError`; limits are read from the header and checked before anything is decoded.
Fields are frozen dataclasses: their attributes are their configuration, and two fields with one configuration are
equal. Fields know no files.

A field describes itself to other packages, so that a user's field is packed, checked and converted like any other: the
content that it accepts (`TAKES_CONTENT`, `TAKES_JSON`, `HOLDS_JSON`, `PARTS`), the conversion of text and JSON to its
values, its Arrow column, and the facts that checks judge.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, ParamSpec, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import (
    ConfigError,
    CorruptError,
    EncodeError,
    FormatError,
    LimitError,
    MediaError,
    TruncatedError,
    meant,
)
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.arrow import list_column, list_type
from mm_assets.fields.facts import Fact
from mm_assets.fields.parts import Path
from mm_assets.fields.records import record_struct
from mm_assets.fields.shown import RangedBytes, Shown, ShownFile, ShownValue, StoredBytes
from mm_assets.media.content_types import Buffer
from mm_assets.summaries import describe

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "JSON",
    "MAX_DATA",
    "MAX_JOINED",
    "PAYLOAD",
    "Buffer",
    "Encoded",
    "Field",
    "Item",
    "Locating",
    "Out",
    "Part",
    "PartPlace",
    "PayloadParts",
    "StoredPart",
    "are_equal",
    "batch_array",
    "config_error",
    "corrupt",
    "decode_utf8",
    "is_int",
    "join_arrays",
    "over_limit",
    "own_arrays",
    "parse_json",
    "split_rows",
    "stored_array",
    "truncated",
    "unreadable",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class PayloadParts(Protocol):
    """The data of a payload that is read by ranges: a `mm_assets.formats.StoredPayload`."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from `offset` on."""


Out: TypeAlias = npt.NDArray[Any] | Mapping[str, npt.NDArray[Any]]
"""What a batch is decoded into: one array, or several by name."""

JSON = Any  # a JSON value; Python's type system has no finite name for it that is worth its cost in casts

MAX_DATA = 2**32 - 1  # bytes: a container's payload size is uint32

MAX_JOINED = 1 << 16  # bytes of a value on average: larger ones gain nothing, and get memory of their own
_BLOCK_BYTES = (
    1 << 18
)  # of rows decoded together: they are in the processor's cache when they are copied to their array

PAYLOAD = "<payload>"
"""The path in a field's `FormatError`: a field does not know its file, and the dataset replaces it."""


class Encoded(NamedTuple):
    """One value, ready for a container.

    Attributes:
        metadata: exactly `metadata_type.itemsize` bytes.
        data: any number of bytes, also none.
    """

    metadata: bytes
    data: bytes | memoryview


class Part(NamedTuple):
    """One of the contents that a composite field's value is made of.

    Attributes:
        many: whether there may be several, each with its position.
        needed: whether a value needs it.
    """

    many: bool = False
    needed: bool = False


PartPlace: TypeAlias = tuple[Buffer, int, int]
"""Where a payload within another one is: its metadata record, and offset and size of its data in the other's data."""

Locating: TypeAlias = Generator[tuple[int, int], Buffer, PartPlace | None]
"""Finds a part: yields (offset, size) of data that it needs, gets their bytes, and returns the place, None for none."""


class StoredPart(NamedTuple):
    """A part of a composite's value that is a payload within the composite's own, so that it can be read alone.

    Attributes:
        payload: a name or number of that payload, the same for all parts that are read from it.
        field: decodes it.
        path: the keys that are left to take of what it decodes to.
        locate: takes the composite's metadata record and the size of its data. `FormatError` for a damaged payload.
    """

    payload: str | int
    field: Field
    path: Path
    locate: Callable[[Buffer, int], Locating]


class Item(NamedTuple):
    """The stored form of one content in a payload.

    Attributes:
        part: name in the field's `PARTS`; "" in a field without parts.
        position: the item's position among those of a sequence or a part; else 0.
        data: the bytes that are stored for the content: the content itself where the field keeps it.
    """

    part: str
    position: int
    data: Buffer


def corrupt(detail: str, *, found: object = None, expected: object = None) -> CorruptError:
    """A `CorruptError` of a payload."""
    return CorruptError(PAYLOAD, detail, found=found, expected=expected)


def over_limit(detail: str, setting: str, *, found: object, expected: object) -> LimitError:
    """A `LimitError` of a payload."""
    return LimitError(PAYLOAD, detail, setting=setting, found=found, expected=expected)


def unreadable(error: MediaError, what: str = "") -> CorruptError | LimitError:
    """The error of a payload whose media cannot be read: damage, unless a limit is exceeded."""
    detail = what + error.reason
    return corrupt(detail) if error.setting is None else LimitError(PAYLOAD, detail, setting=error.setting)


def truncated(detail: str, *, found: object = None, expected: object = None) -> TruncatedError:
    """A `TruncatedError` of a payload."""
    return TruncatedError(PAYLOAD, detail, found=found, expected=expected)


def config_error(key: str, found: object, expected: str) -> ConfigError:
    """A `ConfigError` of a field's argument."""
    return ConfigError("arguments", key, f"found {found!r}, expected {expected}")


def _advise(key: object, value: object, known: Collection[str], inner: Mapping[str, Field]) -> str:
    """The end of a message about an unknown setting: where it, or those below it, belong; empty if that is unknown.

    `inner` are the settings that are fields.
    """
    for name in value if isinstance(value, Mapping) else [key]:
        if name in known:
            return f"; give {name} beside these, not below {key}"
        if (place := _find_setting(name, inner)) is not None:
            return f"; give {name} below {place}"
    ends = [name for name in known if name.endswith(f"_{key}")]
    return f"; did you mean {' or '.join(ends)}?" if ends else meant(key, known)


def _find_setting(name: object, fields: Mapping[str, Field]) -> str | None:
    """The first of some fields, or of those within them, that has a setting: its name, such as ``inner.image``."""
    for key, field in fields.items():
        settings = {one.name: getattr(field, one.name) for one in dataclasses.fields(field)}
        if name in settings:
            return key
        within = {one: value for one, value in settings.items() if isinstance(value, Field)}
        if (place := _find_setting(name, within)) is not None:
            return f"{key}.{place}"
    return None


def is_int(value: object, low: int, high: int) -> bool:
    """Whether a setting is an integer from `low` to `high`; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def parse_json(text: str, expected: str) -> JSON:
    """The value of a JSON text; an `EncodeError` for other text says that `expected` was."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EncodeError(f"found the text {text[:40]!r}, expected {expected}") from error


def decode_utf8(data: Buffer) -> str:
    """The text of stored bytes; `CorruptError` for bytes that are not UTF-8."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise corrupt(f"text is not UTF-8: {error.reason} at byte {error.start}") from error


def join_arrays(datas: Sequence[Buffer], dtype: npt.DTypeLike, sizes: list[int]) -> npt.NDArray[Any] | None:
    """The elements of many buffers in one array of its own, (total,); None for buffers of other sizes, or large ones.

    Args:
        datas: n buffers of bytes.
        dtype: of the elements.
        sizes: bytes that each buffer must have.
    """
    if list(map(len, datas)) != sizes or sum(sizes) > MAX_JOINED * len(sizes):
        return None
    joined = bytearray().join(datas)
    return np.frombuffer(joined, dtype) if len(joined) == sum(sizes) else None


def split_rows(array: npt.NDArray[Any], counts: list[int]) -> list[npt.NDArray[Any]]:
    """Consecutive runs of an array, views of `counts` elements each along its first axis."""
    if counts.count(counts[0]) == len(counts):
        return list(array.reshape(len(counts), counts[0], *array.shape[1:]))
    return [array[start:stop] for start, stop in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def are_equal(records: npt.NDArray[np.uint8], *, but: slice | None = None) -> bool:
    """Whether all records (n, size) have the same bytes, except for some that may vary."""
    if but is not None:
        records = records.copy()
        records[:, but] = 0
    return bool(records.tobytes() == records[0].tobytes() * len(records))


def stored_array(data: Buffer, dtype: npt.DTypeLike, shape: tuple[int, ...], *, offset: int = 0) -> npt.NDArray[Any]:
    """A read-only view of stored elements; `ValueError` for a shape that NumPy cannot hold, or data that is shorter."""
    size = math.prod(shape)  # NumPy makes no view of no bytes
    array = np.frombuffer(data, dtype, size, offset).reshape(shape) if size else np.empty(shape, dtype)
    array.flags.writeable = False
    return array


@dataclasses.dataclass(frozen=True)
class Field(ABC):
    """How one packed modality is encoded.

    A subclass is a frozen dataclass with a `TYPE_ID`, a `metadata_type`, `encode` and `decode`. Its attributes hold
    JSON values (tuples are stored as lists), or the subclass overrides `config`. A property that does not depend on
    them may be overridden by a class variable.
    """

    TYPE_ID: ClassVar[int]

    PARTS: ClassVar[Mapping[str, Part]] = {}
    """The parts of a composite's value, by name; empty where one content is the value."""

    TAKES_CONTENT: ClassVar[bool] = True
    """Whether the bytes of one file, or a text, are a value."""

    TAKES_JSON: ClassVar[bool] = True
    """Whether a JSON value becomes a value, by `from_json_value`; not where values are files."""

    HOLDS_JSON: ClassVar[bool] = False
    """Whether every JSON text is a value and decodes to the JSON value: such a field can pack a sample's metadata."""

    TAKES_ANY_BYTES: ClassVar[bool] = False
    """Whether any bytes are a value. Media among them are judged by the field that reads their type."""

    SHOWN_TYPE: ClassVar[str | None] = None
    """MIME type of stored bytes that do not show it themselves, such as text, for people who look at them."""

    VALUE_TYPE: ClassVar[type | None] = None
    """The class of decoded values, if its attributes are the names of all parts that a value may have."""

    READS_PARTS: ClassVar[bool] = False
    """Whether `decode_window`, `decode_frames` and `decode_audio` read only what they need of a payload, which may be
    large: they also take `PayloadParts` as its data."""

    CONTENT_KIND: ClassVar[str] = "file"
    """What the files of values are to other formats: ``image``, ``audio``, ``video``, ``text``, ``json``, ``array``, a
    ``series`` of arrays with their times, or any ``file``."""

    FACTS: ClassVar[tuple[type[Fact], ...]] = ()
    """The kinds of fact that `facts` yields; empty where checks of time and place have nothing to judge."""

    LIMITS: ClassVar[tuple[str, ...]] = ()
    """Settings that bound what decoding may cost. A packed file may lower them, not raise them above their defaults."""

    EARLIER: ClassVar[Mapping[str, JSON]] = {}
    """What settings that earlier releases did not have must be for their files to decode as they did."""

    FORMER: ClassVar[tuple[str, ...]] = ()
    """Settings of earlier releases that `from_config` still understands."""

    ADDED: ClassVar[tuple[str, ...]] = ()
    """Settings that `config` leaves out unless they are set, so that files without them keep their bytes."""

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

    @property
    def item_field(self) -> Field | None:
        """The field of each item where a value is a list of (position, item); None where it is a single value."""
        return None

    # --- what becomes a value -----------------------------------------------------------------------------------------

    def from_text(self, text: Buffer) -> Any:
        """The value for `encode` from the content of a text row, UTF-8; passed on unchanged if `encode` takes bytes.

        Raises:
            EncodeError: the text is not a value of this field.
        """
        return text

    def from_json_value(self, value: JSON) -> Any:
        """The value for `encode` from a value of a sample's JSON or a table's cell, which may also be bytes.

        The value of a composite is an object of its parts, which is assembled.

        Raises:
            EncodeError: it is not a value of this field.
        """
        if not self.PARTS or not isinstance(value, dict):
            return value
        self._expect_parts(value)
        return self.assemble(
            {
                part: list(enumerate(content)) if self.PARTS[part].many and isinstance(content, list) else content
                for part, content in value.items()
                if content is not None
            }
        )

    def from_csv_cell(self, cell: str) -> Any:
        """The value for `encode` from a cell of a CSV file: the JSON value in it, by `from_json_value`.

        Raises:
            EncodeError: the cell is not JSON, or not a value of this field.
        """
        return self.from_json_value(parse_json(cell, "JSON"))

    def assemble(self, contents: Mapping[str, Any]) -> Any:
        """Make the value of a composite of its parts' contents.

        Args:
            contents: by the names of `PARTS`, those that there are. Each is the content's bytes, a JSON value, or for
                a part of many a list of (position, bytes) in order of position.

        Raises:
            EncodeError: the contents are not a value of this field.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parts")

    # --- what a payload holds -----------------------------------------------------------------------------------------

    def items(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[Item]:
        """The stored form of each content that a payload was made of, without decoding it.

        Raises:
            FormatError: the payload contradicts itself.
        """
        yield Item("", 0, data)

    def item_payloads(self, metadata: Buffer, data: Buffer) -> Iterator[tuple[int, Buffer, Buffer]]:
        """Position, metadata record and data of each item of an `item_field`; the payload itself in any other field.

        Raises:
            FormatError: the payload is damaged.
        """
        yield 0, metadata, data

    def stored_part(self, path: Path) -> StoredPart | None:
        """A part that can be read alone; None if the whole value must be decoded to take it.

        Args:
            path: the keys that lead to it, one or more; a field uses the first ones, and leaves the others.
        """
        return None

    def item_table(self, metadata: Buffer, stored: RangedBytes) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.void]]:
        """Positions, (n,), and metadata records, (n,), of the items of an `item_field`, not decoded.

        Raises:
            FormatError: the payload is damaged.
        """
        if self.item_field is None:
            raise TypeError(f"{type(self).__name__} values have no items")
        positions, records = [], []
        for position, record, _ in self.item_payloads(metadata, stored.read(0, stored.size)):
            positions.append(position)
            records.append(bytes(record))
        return np.array(positions, np.int32), np.frombuffer(b"".join(records), self.item_field.metadata_type)

    def facts(self, metadata: Buffer, data: Buffer) -> Iterator[Fact]:
        """The facts of time and place in a payload, of the kinds that `FACTS` names.

        Facts are read from the stored bytes, so that a check can show a payload that `decode` refuses.

        Raises:
            FormatError: the payload is damaged.
        """
        return iter(())

    def shown(self, metadata: Buffer, stored: StoredBytes) -> Shown:
        """How people see a payload: the file that is in it, or the value that it decodes to.

        Raises:
            FormatError: the payload is damaged.
            MediaError: it is too large to be decoded for a look at it.
        """
        if self.keeps_bytes:
            return ShownFile(offset=0, size=stored.size, content_type=self.SHOWN_TYPE)
        return ShownValue(value=self.decode(metadata, stored.whole()))

    @property
    def arrow_type(self) -> pa.DataType | None:
        """The Arrow type of a column of decoded values; `to_arrow` makes the column.

        None where the batch's arrays are the column, or without a `value_layout` the stored data.
        """
        return None if self._element is None else list_type(self._element)

    def to_arrow(self, values: Sequence[Any], datas: Sequence[Buffer | None]) -> pa.Array | pa.ChunkedArray:
        """A column of `arrow_type` from values, None where absent, or from their stored data."""
        import pyarrow as pa

        return pa.array(values, self.arrow_type) if self._element is None else list_column(values, self._element)

    @property
    def _element(self) -> ArraySpec | None:
        """Shape and dtype of each element where a value is an array of any length; None for other values."""
        return None

    @property
    def value_layout(self) -> ArraySpec | Mapping[str, ArraySpec] | None:
        """Shape and dtype of every decoded value, or None where they vary.

        It is a mapping for a field whose batch is several arrays by name, such as token ids and their mask.
        """
        return None

    @property
    def vector_size(self) -> int | None:
        """Numbers of a value if values are vectors of real numbers, 0 if the sizes vary; None for other values."""
        layout = self.value_layout
        is_vector = isinstance(layout, ArraySpec) and len(layout.shape) == 1 and layout.dtype.kind in "iuf"
        return (layout.shape[0] or None) if is_vector and isinstance(layout, ArraySpec) else None

    @property
    def empty_value(self) -> Any:
        """A value without elements, whose arrays have the dtype and rank of this field's values.

        A batch in which no sample has a value is like it. It may be a mapping of only the arrays in a value, by
        attribute or key. Free extents are 0; a dtype that the settings leave open is float32. None for values without
        arrays.
        """
        return None if self._element is None else np.empty((0, *self._element.shape), self._element.dtype)

    @property
    def draws(self) -> bool:
        """Whether decoding is random: `decode_batch` then takes ``keys``, (n,) uint64, from which each row is drawn."""
        return False

    @property
    def decodes_in_parallel(self) -> bool:
        """Whether decoding spends its time in a codec that releases the interpreter lock, so that threads help."""
        return False

    @abstractmethod
    def encode(self, value: Any) -> Encoded:
        """Turn a value into a payload.

        Raises:
            EncodeError: the value is wrong for this field; `LimitError` if only a setting's limit refuses it.
        """

    def encode_items(self, items: Iterable[tuple[int, Encoded]]) -> Encoded:
        """Turn items that `item_field` encoded, as (position, payload) in order of position, into one payload.

        Raises:
            EncodeError: the positions or the number of items are wrong for this field.
        """
        raise NotImplementedError(f"{type(self).__name__} has no items")

    def check(self, value: Any) -> None:
        """Raise `EncodeError` exactly when `encode` would.

        A field that stores bytes unchanged reads their header only. A subclass that overrides `encode` of such a field
        overrides this too.
        """
        self.encode(value)

    def omissions(self, value: Any) -> Sequence[str]:
        """Describes each part of a value that `encode` leaves out, such as a cue of a subtitle file without its times.

        Args:
            value: one that `encode` accepts.
        """
        return ()

    @abstractmethod
    def decode(self, metadata: Buffer | np.void, data: Buffer) -> Any:
        """Turn a payload back into a value; arrays that are stored as they are may be read-only views of `data`.

        Raises:
            FormatError: the payload contradicts itself; its path is ``<payload>``.
            LimitError: the payload exceeds a limit of this field, one of its `LIMITS`.
        """

    def writable(self, value: Any) -> Any:
        """Returns a decoded value with arrays of its own, which may be written to: read-only ones are copied.

        `decode` may return views of the payload. Everything that a `Dataset` reads has gone through this. Arrays are
        found in lists, tuples, dicts and dataclasses; a field with values of another class overrides it.

        Args:
            value: as `decode` returns it; None stays None.
        """
        return own_arrays(value)

    def check_decodable(self, metadata: Buffer | np.void, data: Buffer) -> None:
        """Raise `FormatError` and `LimitError` exactly when `decode` would.

        An override is cheaper than decoding, in time or memory, and has the same verdict for every payload, but for a
        limit on what one decoding holds: what can be read in parts is not refused for its length.
        """
        self.decode(metadata, data)

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
            otherwise a list (absent values are None) as `writable` returns them, of which small ones may be views of
            one array; and (n,) bool, which values are present.

        Raises:
            FormatError: a payload is damaged.
            ValueError: `records`, `datas` and `out` do not fit one another.
        """
        present, target = self._check_batch(records, datas), self._batch_target(len(datas), out)
        together = self._decode_small(records, datas, present, target)
        if together is not None:
            return together, present
        return self._decode_each(records, datas, target, self.decode, self._decode_into, repeat(()))

    # --- windows ------------------------------------------------------------------------------------------------------

    def decode_window(self, metadata: Buffer | np.void, data: Buffer, start_seconds: float, seconds: float) -> Any:
        """Decode what a value holds between two times of its sample, without decoding more than that needs.

        Times in the result count from the window's start. What is outside the value's own time is absent: nothing is
        moved. A value without a time axis is the whole value, which is the default.

        Args:
            metadata: the record.
            data: the payload's data.
            start_seconds: start of the window, at least 0.
            seconds: its duration, above 0.

        Raises:
            FormatError: the payload is damaged there.
            LimitError: the window exceeds a limit of this field.
        """
        return self.decode(metadata, data)

    def decode_windows(
        self,
        records: npt.NDArray[np.uint8],
        datas: Sequence[Buffer | None],
        windows: npt.NDArray[np.float64],
        out: Out | None = None,
        **own: Any,
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Decode a window of each of many payloads, as `decode_batch` decodes all of them.

        Args:
            records: as for `decode_batch`.
            datas: as for `decode_batch`.
            windows: (n, 2) float64, start and duration of each in seconds.
            out: as for `decode_batch`.
            own: arguments that the field's own `decode_batch` takes, if it has no windows: ``keys`` where it `draws`.
        """
        if type(self).decode_window is Field.decode_window:
            return self.decode_batch(records, datas, out, **own)
        rows = windows.tolist()
        return self._decode_each(records, datas, out, self.decode_window, self._decode_window_into, rows)

    def decode_frames(
        self, metadata: Buffer | np.void, data: Buffer, indices: Sequence[int] | npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        """Return (K, H, W, 3) uint8, chosen frames of a clip in any order, without decoding more than they need.

        Raises:
            TypeError: values of this field have no frames.
            IndexError: a frame that the clip does not have.
            FormatError: the payload is damaged.
        """
        raise TypeError(f"{type(self).__name__} has no frames, expected a field of clips")

    def decode_audio(
        self,
        metadata: Buffer | np.void,
        data: Buffer,
        frames: npt.ArrayLike | None = None,
        audio_until: str = "frame_end",
    ) -> Any:
        """Return the audio of a value, or a list with that of each of some frames, without decoding a frame.

        Args:
            metadata: the record.
            data: the payload's data.
            frames: (K,) numbers of frames in the clip; None for all audio.
            audio_until: where the audio of a frame ends: ``frame_end``, where the clip's next frame begins; or
                ``next_frame``, where the next one of `frames` begins, which then increase, and for the last one the
                clip's end.

        Returns:
            `Audio`, or a list of them; None if the value has no audio.

        Raises:
            TypeError: values of this field have no audio, or no frames.
            IndexError: a frame that the clip does not have.
            ValueError: an unknown `audio_until`, or frames that do not increase with ``next_frame``.
            FormatError: the payload is damaged there.
        """
        raise TypeError(f"{type(self).__name__} has no audio, expected a field of clips or audio")

    def window_settings(self, seconds: float | None, frames: int | None) -> dict[str, JSON]:
        """Returns the settings with which windows decode to arrays of one shape, as far as that is possible.

        Args:
            seconds: duration of every window; None if they differ.
            frames: frames of a clip to decode in each; None for those that the field says.
        """
        return {}

    def _decode_window_into(
        self, metadata: Buffer, data: Buffer, target: Any, start_seconds: float, seconds: float
    ) -> None:
        """Decode a window into its row of a batch, as `_decode_into` a value."""
        target[...] = self.decode_window(metadata, data, start_seconds, seconds)

    def _decode_each(
        self,
        records: npt.NDArray[np.uint8],
        datas: Sequence[Buffer | None],
        out: Out | None,
        decode: Callable[..., Any],
        decode_into: Callable[..., None],
        arguments: Iterable[Sequence[float]],
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Decode payloads one by one, each with arguments of its own."""
        present = self._check_batch(records, datas)
        target = self._batch_target(len(datas), out)
        rows = zip(records, datas, arguments, strict=False)  # the arguments may have no end
        if target is None:
            values = [
                None if data is None else self.writable(decode(memoryview(record), data, *more))
                for record, data, more in rows
            ]
            return values, present
        several = target if isinstance(target, dict) else {"": target}
        for array in several.values():
            array[~present] = 0
        for index, (record, data, more) in enumerate(rows):
            if data is not None:
                parts = {name: array[index, ...] for name, array in several.items()}
                decode_into(memoryview(record), data, parts if isinstance(target, dict) else parts[""], *more)
        return target, present

    def _decode_small(
        self,
        records: npt.NDArray[np.uint8],
        datas: Sequence[Any],
        present: npt.NDArray[np.bool_],
        target: npt.NDArray[Any] | dict[str, npt.NDArray[Any]] | None,
    ) -> Any:
        """The values of a batch, decoded together, in `target` unless that is None; None: decode them one by one."""
        if not _decodes_together(type(self)):
            return None
        rows = None if present.all() else np.flatnonzero(present)
        count = len(datas) if rows is None else len(rows)
        several = target if isinstance(target, dict) else {} if target is None else {"": target}
        row_size = sum(math.prod(array.shape[1:]) * array.itemsize for array in several.values())
        if not count or row_size > MAX_JOINED:
            return None
        found: list[Any] = [None] * len(datas)
        # Rows of arrays are in the processor's cache when they are copied to the target.
        step = count if target is None else max(1, _BLOCK_BYTES // max(1, row_size))
        for start in range(0, count, step):
            block: Any = slice(start, start + step) if rows is None else rows[start : start + step]
            some = datas[block] if rows is None else [datas[row] for row in block.tolist()]
            values = self._decode_together(records[block], some)
            if values is None:
                return None
            if rows is None and target is None:
                return values
            if target is None:
                for row, value in zip(block.tolist(), values, strict=True):
                    found[row] = value
            for name, array in several.items():
                array[block] = values[name] if isinstance(target, dict) else values
        if rows is not None:
            for array in several.values():
                array[~present] = 0
        return found if target is None else target

    def _decode_together(self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer]) -> Any:
        """Decodes payloads of which none is absent by a few expressions, which small values need to be fast.

        A field that overrides this returns what `decode_batch` does, with the same values bit for bit: arrays of its
        `value_layout`, or a list of values whose arrays may be written to. It returns None for payloads that differ in
        more than it handles, or of which one may be damaged: they are then decoded one by one, which raises the error
        of the first damaged one. A subclass that overrides `decode` alone is decoded one by one.

        Args:
            records: (n, metadata_type.itemsize) uint8, n from 1.
            datas: n data buffers.
        """
        return None

    def _check_batch(self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer | None]) -> npt.NDArray[np.bool_]:
        expected = (len(datas), self.metadata_type.itemsize)
        if records.shape != expected or records.dtype != np.uint8:
            raise ValueError(f"records are {describe(records)}, expected uint8 with shape {expected}")
        if all(map(operator.is_not, datas, itertools.repeat(None))):
            return np.ones(len(datas), np.bool_)
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
        given: Mapping[str, Out | None] | npt.NDArray[Any] = dict.fromkeys(layout) if out is None else out
        if not isinstance(given, Mapping) or set(given) != set(layout):
            found = sorted(given) if isinstance(given, Mapping) else "one array"
            raise ValueError(f"out has {found}, expected arrays {sorted(layout)}")
        return {name: batch_array(count, one, given[name], f"out[{name!r}]") for name, one in layout.items()}

    def _decode_into(self, metadata: Buffer, data: Buffer, target: Any) -> None:
        """Decode one value into its row of a batch, every element of it.

        The row is an array, or a mapping of arrays where `value_layout` is one. A field whose codec can write in place
        overrides this, and so does one with a mapping.
        """
        if isinstance(target, Mapping):
            # Only a field of the user's own comes here: it declares several arrays and leaves out the method for them.
            found = f"{type(self).__name__}.value_layout names {', '.join(target)}"
            raise NotImplementedError(f"{found}: a field with several arrays overrides _decode_into to fill them")
        target[...] = self.decode(metadata, data)

    def _pack_record(self, *values: Any) -> bytes:
        """The metadata record of values in the order of `metadata_type`: without pads, arrays as their elements."""
        return record_struct(self.metadata_type).pack(*values)

    def _unpack_record(self, metadata: Buffer | np.void) -> tuple[Any, ...]:
        """The record's values as Python objects, as `_pack_record` takes them; texts with their trailing zeros."""
        view = as_bytes_view(metadata.tobytes() if isinstance(metadata, np.void) else metadata)
        layout = record_struct(self.metadata_type)
        if len(view) != layout.size:
            raise truncated("metadata record is of the wrong size", found=len(view), expected=layout.size)
        return layout.unpack(view)

    @property
    def config(self) -> dict[str, JSON]:
        """All settings as JSON, defaults too, so that a later release with other defaults reads old files alike.

        Those in `ADDED` are left out unless they are set.
        """
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values
            if value is not None or name not in self.ADDED
        }

    def declared_config(self, given: Mapping[str, JSON]) -> dict[str, JSON]:
        """All settings as a pack plan stores them: `config`, with those of `given` that only a declaration can restore.

        One of these is the file of a tokenizer.
        """
        return self.config

    @classmethod
    def from_config(cls, config: Mapping[str, JSON]) -> Self:
        """Restore a field from its configuration; settings that are not given have their defaults.

        Raises:
            ConfigError: an unknown key, a missing one, or a wrong value.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        defaults = {name: field.default for name, field in known.items()}
        inner = {name: value for name, value in {**defaults, **config}.items() if isinstance(value, Field)}
        for key, value in config.items():
            if key not in known:
                allowed = ", ".join(known) or "none, it has no settings"
                advice = _advise(key, value, known, inner)
                raise config_error(str(key), key, f"a setting of {cls.__name__}: {allowed}{advice}")
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in config:
                raise ConfigError("arguments", name, f"is missing, and {cls.__name__} needs it")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in config.items()})

    # --- for the code of subclasses -----------------------------------------------------------------------------------

    def _wrong_value(self, value: object, expected: str) -> EncodeError:
        """An `EncodeError` that names the field, describes the value, and says what was expected."""
        return self._wrong_content(describe(value), expected)

    def _wrong_content(self, found: str, expected: str) -> EncodeError:
        """An `EncodeError` that names the field, with words for what was found and what was expected."""
        return EncodeError(f"{type(self).__name__}: found {found}, expected {expected}")

    def _too_large(self, found: object, expected: object, setting: str) -> LimitError:
        """A `LimitError` that names the field, what was found, and what the setting allows."""
        return LimitError(type(self).__name__, "value is too large", setting=setting, found=found, expected=expected)

    def _unreadable(self, error: ValueError, found: str, expected: str) -> EncodeError:
        """The error of media that cannot be read: `_wrong_content`, unless a limit is exceeded."""
        setting, reason = getattr(error, "setting", None), getattr(error, "reason", error)
        if setting is not None:
            return LimitError(type(self).__name__, str(reason), setting=setting)
        return self._wrong_content(f"{found} ({reason})", expected)

    def _wrong_setting(self, name: str, expected: str) -> ConfigError:
        """A `ConfigError` that shows a setting's value and says what was expected."""
        return config_error(name, getattr(self, name), expected)

    def _expect_choice(self, name: str, choices: Iterable[object]) -> None:
        """Refuse a setting that is none of `choices`."""
        value, allowed = getattr(self, name), tuple(choices)
        # With the type: a dtype is equal to its name, and 1 to True, but their configuration is not.
        if (type(value), value) not in [(type(choice), choice) for choice in allowed]:
            raise self._wrong_setting(name, f"one of {', '.join(map(str, allowed))}")

    def _expect_int(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        """Refuse a setting that is not an integer from `low` to `high`, or None if that is allowed."""
        value = getattr(self, name)
        if not (is_int(value, low, high) or (optional and value is None)):
            raise self._wrong_setting(name, f"an integer from {low} to {high}" + (", or None" if optional else ""))

    def _expect_bool(self, name: str) -> None:
        """Refuse a setting that is not true or false."""
        if not isinstance(getattr(self, name), bool):
            raise self._wrong_setting(name, "true or false")

    def _expect_size(self, name: str, max_side: int, *, max_pixels: int | None = None) -> None:
        """Refuse a setting that is not None or (height, width) within the limits, and make it a tuple."""
        value = getattr(self, name)
        if value is None:
            return
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        if not is_pair or not all(is_int(side, 1, max_side) for side in value):
            raise self._wrong_setting(name, f"(height, width), integers from 1 to {max_side}, or None")
        if max_pixels is not None and value[0] * value[1] > max_pixels:
            raise self._wrong_setting(name, f"at most max_pixels ({max_pixels}) pixels")
        object.__setattr__(self, name, tuple(value))

    def _expect_data_size(self, size: int) -> None:
        """Refuse a value whose data is larger than a container can hold."""
        if size > MAX_DATA:
            raise self._wrong_content(f"{size} bytes of data", f"at most {MAX_DATA}")

    def _expect_parts(self, contents: Mapping[str, Any]) -> None:
        """Refuse contents with a part that is unknown, or without one that is needed."""
        parts = f"parts of {type(self).__name__}: {', '.join(self.PARTS)}"
        for part in contents:
            if part not in self.PARTS:
                raise EncodeError(f"found the part {part!r}, expected {parts}")
        for part, facts in self.PARTS.items():
            if facts.needed and contents.get(part) is None:
                raise EncodeError(f"found no {part}, expected {parts}")

    def _within(self, place: str, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a method on a part of a value or payload: its errors then name this field, and the place of the part."""
        try:
            return method(*args, **kwargs)
        except (EncodeError, FormatError) as error:
            raise self._placed(error, place) from error

    def _placed(self, error: EncodeError | FormatError, place: str) -> EncodeError | FormatError:
        """The error of a part, as `_within` raises it: for loops, where a call more per part would cost."""
        if isinstance(error, FormatError | LimitError):
            path = PAYLOAD if error.path == PAYLOAD else type(self).__name__
            return error.moved(path, detail=f"{place}: {error.detail}" if place else error.detail)
        return EncodeError(f"{type(self).__name__}, {place}: {error}" if place else f"{type(self).__name__}: {error}")


@functools.cache
def _decodes_together(kind: type[Field]) -> bool:
    """Whether a class decodes payloads together: not if a subclass has changed what each decodes to."""
    owners = {
        name: next(one for one in kind.__mro__ if name in vars(one))
        for name in ("_decode_together", "decode", "_decode_into", "writable")
    }
    together = owners.pop("_decode_together")
    return together is not Field and all(issubclass(together, one) for one in owners.values())


def own_arrays(value: Any) -> Any:
    """A value in which arrays that are read-only are copied, in lists, tuples, dicts and dataclasses too."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, list | tuple):
        items = [own_arrays(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, dict):
        return {key: own_arrays(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, part in parts.items() if (new := own_arrays(part)) is not part}
        value = copy.copy(value) if changed else value
        for name, part in changed.items():
            object.__setattr__(value, name, part)  # not `replace`, which would check the value once more
    return value


def batch_array(count: int, layout: ArraySpec, out: Out | None, name: str) -> npt.NDArray[Any]:
    """The (count, *shape) array of a layout: `out`, or a new one; `ValueError` if `out` does not fit."""
    shape = (count, *layout.shape)
    if out is None:
        return np.empty(shape, dtype=layout.dtype)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != layout.dtype:
        raise ValueError(f"{name} is {describe(out)}, expected {layout.dtype} with shape {shape}")
    return out
