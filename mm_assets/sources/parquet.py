"""Parquet files that hold files, as Hugging Face's `datasets` stores media: a row is a sample, a cell a member.

A cell is a value of bytes, or a struct of `bytes` and `path`; a column may also hold lists of cells. Row 12 of
``train-0.parquet`` has the members

- ``train-0/00000012.json``: the columns that are neither cells nor texts, and lists of cells by their members' names;
- ``train-0/00000012.jpg`` of the only column of cells, ``….<column>.jpg`` of one of several, and ``….0.jpg`` or
  ``….<column>.0.jpg`` of a list;
- ``train-0/00000012.txt`` of a text column `text`, or of one whose name is an extension of text, such as `caption`.

An extension is that of the cell's path, else what its first bytes show, else its column's name. Nothing in the file is
trusted; a row group that cannot be read is damage.
"""

from __future__ import annotations

import base64
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.json_text import dump_json
from mm_assets.media.content_types import content_type_of_name, extension_of_content_type, sniff_content_type
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.member import MODALITY_OF_EXTENSION, Member, OnDamage, ShardDamage, named_member
from mm_assets.storage.files import SourceFile

__all__ = ["PARQUET_ERRORS", "PARQUET_MAGIC", "ParquetSource", "cell_columns", "json_rows"]

PARQUET_MAGIC = b"PAR1"
PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError)
"""What Arrow raises for a damaged file, and for values that Python does not have."""

MAX_BATCH_ROWS = 64  # a value that repeats is in the file once, and in memory in each row of a batch
MAX_LIST_CELLS = 1 << 16  # of one row: nulls take no bytes in the file
BATCH_BYTES = 16 << 20  # of the rows that are decoded at a time, by the mean size of a row group's rows, beside a page
BUFFER_BYTES = 1 << 20  # of a column chunk that are read at a time from a local file
REMOTE_BUFFER_BYTES = 8 << 20  # from a remote one, where each read is a request
_DATA_START = (
    4  # byte after the magic number: Arrow ends the process where it is asked for the place of a damaged chunk
)
_LIST_KEYS = frozenset({"path", "source_ref"})  # of a list of files, beside sample_id
_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # per second
MAX_NUMBER_DIGITS = 15  # of a decimal type whose values are numbers: a double has them all, and not all of 16
MAX_ARROW_DAYS = 10_000_000  # after and before 1970: of later years than 32767 Arrow writes no date, or a wrong one
_ISO_8601 = (  # what Arrow writes, and what the standard has
    (r"^([+-]?\d+-\d\d-\d\d) ", r"\1T"),
    (r"([+-]\d\d)(\d\d)$", r"\1:\2"),
    (r"^(\d{5,}-)", r"+\1"),  # a year of more digits has a sign
)


class _Entry(NamedTuple):
    """A member, and what gives its content; None of an entry without any."""

    member: Member
    content: Callable[[], bytes] | None


class _Cells(NamedTuple):
    """A column of cells: the part of the member's name that says which, and whether its values are lists."""

    column: str
    label: str
    is_list: bool


def cell_columns(schema: pa.Schema) -> list[str]:
    """The columns that hold files: bytes, Hugging Face's struct of bytes and path, or lists of either."""
    types = [(field.name, _plain_type(field.type)) for field in schema]
    return [name for name, kind in types if _is_cell(kind) or _is_list_of_cells(kind)]


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a column, which a categorical column has a dictionary of."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_cell(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _is_bytes(kind.field(at).type)
    return _is_bytes(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or kind == pa.binary_view())


def _is_list_of_cells(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and _is_cell(kind.value_type))


def as_json_types(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Converts times to text, durations to seconds and decimals to numbers or text: user columns have JSON types.

    Values inside of lists, structs and maps stay as they are: `json_rows` converts them.
    """
    return pa.RecordBatch.from_arrays([_as_json_type(column) for column in batch.columns], names=batch.schema.names)


def json_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yields the rows of a batch, by column, as values that JSON has, or that `_plain` makes such.

    Raises:
        ValueError: Python does not have a value, such as a text that is not UTF-8.
    """
    columns = as_json_types(batch)
    values = [
        [_json_value(scalar) for scalar in column] if _has_no_json(column.type) else column.to_pylist()
        for column in columns.columns
    ]
    for row in zip(*values, strict=True):
        yield dict(zip(columns.schema.names, row, strict=True))


def _as_json_type(column: pa.Array) -> pa.Array:
    """A column of times, durations or decimals as JSON has them; any other as it is."""
    kind = column.type
    if pa.types.is_duration(kind):
        ticks = column.cast(pa.int64()).to_pylist()
        return pa.array([None if tick is None else tick / _TICKS[kind.unit] for tick in ticks], pa.float64())
    if pa.types.is_temporal(kind):
        return _as_text(column)
    if pa.types.is_decimal(kind):
        as_number = kind.precision <= MAX_NUMBER_DIGITS  # Arrow's own cast is off by a rounding step for many
        made = [None if v is None else float(v) if as_number else f"{v:f}" for v in column.to_pylist()]
        return pa.array(made, pa.float64() if as_number else pa.string())
    return column


@lru_cache(maxsize=1024)
def _has_no_json(kind: pa.DataType) -> bool:
    """Whether a type, or one inside of it, is of times, durations or decimals."""
    if pa.types.is_struct(kind):
        return any(_has_no_json(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _has_no_json(kind.key_type) or _has_no_json(kind.item_type)
    if (pa.types.is_nested(kind) and not pa.types.is_union(kind)) or pa.types.is_dictionary(kind):
        return _has_no_json(kind.value_type)
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def _json_value(scalar: pa.Scalar) -> Any:
    """A value as Python has it, with times, durations and decimals at any depth as `as_json_types` has them."""
    kind = scalar.type
    if not scalar.is_valid or not _has_no_json(kind):
        return scalar.as_py()
    if pa.types.is_dictionary(kind):
        return _json_value(scalar.value)
    if pa.types.is_struct(kind):
        return {field.name: _json_value(scalar[number]) for number, field in enumerate(kind)}
    if not pa.types.is_nested(kind):
        return _as_json_type(pa.repeat(scalar, 1))[0].as_py()
    items = [_json_value(item) for item in _as_json_type(scalar.values)]
    return [tuple(item.values()) for item in items] if pa.types.is_map(kind) else items


def _as_text(column: pa.Array) -> pa.Array:
    """Times as ISO 8601 has them, to the digits of their unit; those of an unknown time zone as UTC."""
    try:
        text = column.cast(pa.string())
    except pa.ArrowInvalid:
        utc = column.cast(pa.timestamp(column.type.unit)).cast(pa.string())
        text = pc.binary_join_element_wise(utc, "Z", "")
    if pa.types.is_time(column.type):
        return text
    for pattern, replacement in _ISO_8601:
        text = pc.replace_substring_regex(text, pattern, replacement)
    ticks = column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64()).cast(pa.int64())
    day = _ticks_per_day(column.type)
    limit = min(MAX_ARROW_DAYS * day, 2**63 - 1 - day)  # a day less: the local time of a zone has to be an int64, too
    far = pc.fill_null(pc.or_(pc.greater(ticks, limit), pc.less(ticks, -limit)), False)
    return pc.replace_with_mask(text, far, pa.array(map(_far_text, column.filter(far)), pa.string()))


def _ticks_per_day(kind: pa.DataType) -> int:
    """Units of a type of dates, or of dates with times, in a day."""
    return 1 if pa.types.is_date32(kind) else 86_400 * _TICKS["ms" if pa.types.is_date64(kind) else kind.unit]


def _far_text(scalar: pa.Scalar) -> str:
    """A date or time of any year, in UTC: the calendar repeats every 400 years."""
    kind = scalar.type
    days, tick = divmod(scalar.value, _ticks_per_day(kind))
    cycles, day = divmod(days, 146_097)
    of_cycle = date(1970, 1, 1) + timedelta(day)
    year = of_cycle.year + 400 * cycles
    text = f"{year:04}{of_cycle:-%m-%d}" if 0 <= year <= 9999 else f"{year:+05}{of_cycle:-%m-%d}"
    if not pa.types.is_timestamp(kind):
        return text
    digits = len(str(_TICKS[kind.unit])) - 1
    second, part = divmod(tick, _TICKS[kind.unit])
    clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}" + (f".{part:0{digits}}" if digits else "")
    return f"{text}T{clock}{'' if kind.tz is None else 'Z'}"


class ParquetSource:
    """A Parquet file whose cells are members; see `mm_assets.sources.base.Source`.

    Rows are decoded one after the other, so that no member has a byte range.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet",)
    seekable = False
    text_encoding = "utf-8"  # of columns of text, in which NULs are characters

    def __init__(self, file: SourceFile) -> None:
        self._file = file

    @property
    def file(self) -> SourceFile:
        """The file."""
        return self._file

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether the bytes are those of a Parquet file."""
        return head.startswith(PARQUET_MAGIC)

    @classmethod
    def confirms(cls, file: SourceFile) -> bool:
        """Whether a Parquet file has cells, and is not a list: `sample_id` with `path` or `source_ref` names files."""
        try:
            names = (schema := cls(file)._table.schema_arrow).names
        except ShardError:  # as a list it is refused by name
            return False
        return bool(cell_columns(schema)) and not ("sample_id" in names and _LIST_KEYS.intersection(names))

    @property
    def columns(self) -> dict[str, bool]:
        """The columns that hold cells, and whether those are structs with a path; errors as `members`."""
        schema = self._table.schema_arrow
        types = ((name, schema.field(name).type) for name in self._rows().columns)
        return {name: pa.types.is_struct(kind.value_type if _is_list_of_cells(kind) else kind) for name, kind in types}

    @cached_property
    def _table(self) -> pq.ParquetFile:
        """The open file.

        Raises:
            ShardError: it is not a Parquet file, or its footer is damaged.
            SourceError: the storage failed.
        """
        head = self.file.read(0, min(HEAD_BYTES, self.file.size))
        if not self.accepts(head):
            foreign = foreign_file(head)
            detail = "is not a Parquet file" if foreign is None else foreign.as_not("a Parquet file")
            raise ShardError(self.file.url, detail, byte_offset=0)
        buffer = BUFFER_BYTES if self.file.is_local else REMOTE_BUFFER_BYTES
        try:
            opened = self.file.open()
            return pq.ParquetFile(opened, buffer_size=buffer, pre_buffer=False, page_checksum_verification=True)
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            detail = f"its footer cannot be read: {first_line(error)}; write or download the file again"
            raise ShardError(self.file.url, detail, byte_offset=max(self.file.size - 8, 0)) from error

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Every cell, text and JSON of the rows, in order; arguments and errors as `Source.members`.

        "salvage" continues at the next row group.
        """
        for entry in self._entries(on_damaged_shard, damage):
            yield entry.member

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """The content of chosen members, in one pass over the file; arguments and errors as `Source.payloads`."""
        for member, content in self._entries(on_damaged_shard, damage):
            if not wanted(member) or content is None:
                continue
            if member.byte_size <= max_bytes:
                yield member, content()
                continue
            detail = f"holds {member.byte_size} bytes, allowed are {max_bytes}"
            error = SourceError(self.file.url, detail, member=member.member)
            if on_error is None:
                raise error
            on_error(member, error)

    def listed(self, media: Sequence[str]) -> Iterator[tuple[Mapping[str, Any], Sequence[Member]]]:
        """Each row as a list of files has it: the values of the other columns, and the cells that are not null.

        A cell without bytes has a `skip_reason`, and its path as `link_target`.

        Args:
            media: the columns whose cells are wanted.

        Raises:
            ShardError: a row group cannot be read.
            SourceError: the storage failed.
        """
        rows = self._rows()
        for group, batches in self._groups(rows, [*rows.values, *media]):
            try:
                for batch in batches:
                    yield from rows.listed(batch, media)
            except SourceError:
                raise
            except PARQUET_ERRORS as error:
                raise ShardError(self.file.url, rows.fault(group, error), byte_offset=_DATA_START) from error

    # -- rows

    def _rows(self) -> _Rows:
        names = self._table.schema_arrow.names
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            detail = f"has several columns {repeated!a}, and columns are known by their names: rename them"
            raise ShardError(self.file.url, detail, byte_offset=max(self.file.size - 8, 0))
        return _Rows(self.file.url, self._table.schema_arrow)

    def _groups(
        self, rows: _Rows, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """The number of each row group, and its rows; sets the number of their first."""
        first = 0
        for group in range(self._table.num_row_groups):
            described = self._table.metadata.row_group(group)
            rows.number = first
            mean = max(described.total_byte_size, 1) / max(described.num_rows, 1)
            size = min(max(int(BATCH_BYTES / mean), 1), MAX_BATCH_ROWS)
            yield group, self._table.iter_batches(size, row_groups=[group], columns=columns, use_threads=False)
            first += max(described.num_rows, 0)

    def _entries(self, on_damaged: OnDamage, damage: list[ShardDamage] | None) -> Iterator[_Entry]:
        rows = self._rows()
        for group, batches in self._groups(rows):
            try:
                for batch in batches:
                    yield from rows.entries(batch)
            except SourceError:
                raise
            except PARQUET_ERRORS as error:
                detail = rows.fault(group, error)
                if on_damaged == "fail":
                    raise ShardError(self.file.url, detail, byte_offset=_DATA_START) from error
                size = max(self._table.metadata.row_group(group).total_byte_size, 0)
                if damage is not None:
                    damage.append(ShardDamage(byte_offset=_DATA_START, byte_size=size, detail=detail))
                yield rows.lost(group, size, detail)


class _Rows:
    """Makes the entries of rows, in their order.

    Attributes:
        number: of the next row in the file, from 0.
        ordinal: of the next entry.
        columns: those that hold cells.
        values: all others.
    """

    def __init__(self, url: str, schema: pa.Schema) -> None:
        self.number = 0
        self.ordinal = 0
        self._url = url
        self._folder = posixpath.basename(url).removesuffix(".parquet") or "rows"
        types = {field.name: _plain_type(field.type) for field in schema}
        self.columns = cells = cell_columns(schema)
        self._cells = [
            _Cells(name, f"{_label(name)}." if len(cells) > 1 else "", _is_list_of_cells(types[name])) for name in cells
        ]
        self._texts = {
            name: extension
            for name, kind in types.items()
            if _is_text(kind) and (extension := _text_extension(name, list(types))) is not None
        }
        self.values = [name for name in types if name not in cells]
        self._others = [name for name in self.values if name not in self._texts]
        self._made = frozenset({"json", *self._texts.values()})  # extensions of the row's other members
        self._has_json = bool(self._others) or any(column.is_list for column in self._cells)

    def entries(self, batch: pa.RecordBatch) -> Iterator[_Entry]:
        """The members of each row."""
        columns = _plain_columns(batch)
        others = as_json_types(batch.select(self._others))
        texts = {name: columns[name].to_pylist() for name in self._texts}
        for row in range(batch.num_rows):
            key = self._key
            ordinal = self.ordinal + self._has_json  # the JSON comes first
            made, listed = self._cells_of(columns, row, self._cells, ordinal)
            for name, extension in self._texts.items():
                if texts[name][row] is not None:
                    content = texts[name][row].encode()
                    made.append(self._entry(f"{key}.{extension}", content, ordinal + len(made)))
            if self._has_json:
                values = {name: _value(others, name, row) for name in self._others}
                yield self._entry(f"{key}.json", dump_values({**values, **listed}).encode(), self.ordinal)
            self.ordinal = ordinal + len(made)
            self.number += 1
            yield from made

    def listed(
        self, batch: pa.RecordBatch, media: Sequence[str]
    ) -> Iterator[tuple[Mapping[str, Any], Sequence[Member]]]:
        """The values and the cells of each row."""
        columns, values = _plain_columns(batch), as_json_types(batch.select(self.values))
        wanted = [column for column in self._cells if column.column in media]
        for row in range(batch.num_rows):
            cells, _ = self._cells_of(columns, row, wanted, 0)
            yield {name: _value(values, name, row) for name in self.values}, [cell.member for cell in cells]
            self.number += 1

    @property
    def _key(self) -> str:
        return f"{self._folder}/{self.number:08d}"

    def _cells_of(
        self, columns: Mapping[str, pa.Array], row: int, wanted: Sequence[_Cells], ordinal: int
    ) -> tuple[list[_Entry], dict[str, list[str | None] | None]]:
        """The cells of a row, from `ordinal` on, and the names of those in lists by column."""
        made: list[_Entry] = []
        listed: dict[str, list[str | None] | None] = {}
        for column in wanted:
            value, name = columns[column.column][row], f"{self._key}.{column.label}"
            found: list[str | None] | None = None
            if column.is_list:
                items = value.values
                if items is not None:
                    if len(items) > MAX_LIST_CELLS:
                        detail = f"a list of {len(items):,} items, at most {MAX_LIST_CELLS:,} are read"
                        raise ValueError(f"column {column.column!r} has {detail}")
                    found = []
                    for n in range(len(items)):
                        entry = self._cell(items[n], f"{name}{n}", column.column, ordinal + len(made))
                        found.append(None if entry is None else posixpath.basename(entry.member.member))
                        made += [] if entry is None else [entry]
                listed[column.column] = found
            elif entry := self._cell(value, name[:-1], column.column, ordinal + len(made)):
                made.append(entry)
        return made, listed

    def fault(self, group: int, error: Exception) -> str:
        """What is wrong with a row group, in words."""
        return f"row group {group}, row {self.number} or after, cannot be read: {first_line(error)}"

    def lost(self, group: int, size: int, detail: str) -> _Entry:
        """The entry of a row group that cannot be read, or not to its end."""
        name = os.fsencode(f"{self._folder}/row group {group}")
        member = named_member(self._url, name, ordinal=self.ordinal, byte_size=size, skip_reason=f"damaged: {detail}")
        self.ordinal += 1
        return _Entry(member, None)

    def _entry(self, name: str, content: bytes, ordinal: int) -> _Entry:
        member = named_member(self._url, os.fsencode(name), ordinal=ordinal, byte_size=len(content))
        return _Entry(member, lambda: content)

    def _cell(self, value: pa.Scalar, name: str, column: str, ordinal: int) -> _Entry | None:
        """The entry of a cell; None of a cell that is null."""
        path = None
        if isinstance(value, pa.StructScalar):
            if not value.is_valid:
                return None
            path = value["path"].as_py() if "path" in value else None
            value = value["bytes"]
        content = value.as_buffer()
        if content is None and not isinstance(path, str):
            return None
        head = b"" if content is None else content.slice(0, min(content.size, HEAD_BYTES)).to_pybytes()
        extension = _extension(path if isinstance(path, str) else "", head, column)
        if name == self._key and extension in self._made:
            name = f"{name}.{_label(column)}"
        outside = None if content is not None else f"no bytes: the cell has only the path {path!a}"
        member = named_member(
            self._url,
            os.fsencode(f"{name}.{extension}"),
            ordinal=ordinal,
            byte_size=0 if content is None else content.size,
            skip_reason=outside,
            link_target=None if outside is None else os.fsencode(str(path)),
        )
        return _Entry(member, None if content is None else content.to_pybytes)


def _plain_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """The columns by name, categorical ones as their values."""
    return {
        name: column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def _value(batch: pa.RecordBatch, name: str, row: int) -> Any:
    """A value as Python has it.

    Raises:
        ValueError: Python does not have it, such as a text that is not UTF-8.
    """
    try:
        return _json_value(batch.column(name)[row])
    except PARQUET_ERRORS as error:
        raise ValueError(f"column {name!a}: {first_line(error)}") from error


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())


def _text_extension(name: str, names: list[str]) -> str | None:
    """The extension of the member that a text column becomes, or None where it is a value of the JSON."""
    if name == "text" and "txt" not in names:
        return "txt"
    return name if name != "json" and MODALITY_OF_EXTENSION.get(name) == "text" else None


def _label(column: str) -> str:
    """A column's name as a part of a member's name, which ends at dots and slashes."""
    return column.replace("%", "%25").replace(".", "%2E").replace("/", "%2F") or "%"


def _extension(path: str, head: bytes, column: str) -> str:
    """The extension of a cell: that of its path, else of what its bytes show, else its column's name, else "bin"."""
    _, _, named = path.rpartition(".")
    if content_type_of_name(path) is not None:
        return named.lower()
    shown = sniff_content_type(head)
    found = None if shown is None else extension_of_content_type(shown)
    return found or (column if column in MODALITY_OF_EXTENSION and column != "json" else "bin")


def dump_values(value: Mapping[str, Any]) -> str:
    """Returns the values of a row as JSON; null for NaN and infinities, text for what JSON does not have."""
    return dump_json(value, default=_plain)


def _plain(value: object) -> object:
    """A value inside a list or struct as JSON knows it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)
