"""Rows of Arrow tables as members: what files of Parquet and Lance have in common.

A cell is a value of bytes, or a struct of `bytes` and `path`; a column may also hold lists of cells. `row_members` says
which members a row has, `features` what the metadata of `datasets` say. A list of numbers is an array, a member
``.npy``, if the features say so or the row's `__members__` lists it; else it is a value of the JSON.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
import pyarrow as pa

from mm_assets.errors import LazyModule, SourceError, first_line
from mm_assets.json_text import parse_json
from mm_assets.sources.compressed import content_name
from mm_assets.sources.entries import Entry
from mm_assets.sources.features import (
    Features,
    add_label_names,
    is_numbers,
    item_type_of_lists,
    read_features,
)
from mm_assets.sources.head import HEAD_BYTES
from mm_assets.sources.member import Member, split_member_name
from mm_assets.sources.row_members import KEY_COLUMN, MEMBERS_COLUMN, Cell, ColumnKind, Row, RowMembers

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = [
    "VALUE_ERRORS",
    "ArrowRows",
    "array_of_lists",
    "batch_payloads",
    "cell_columns",
    "cell_of",
    "is_cell",
    "is_list_of_cells",
    "json_rows",
]

VALUE_ERRORS = (pa.ArrowException, ValueError, OverflowError, KeyError)
"""What Arrow raises for values that Python does not have."""

_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # per second
MAX_NUMBER_DIGITS = 15  # of a decimal type whose values are numbers: a double has them all, and not all of 16
MAX_ARROW_DAYS = 10_000_000  # after and before 1970: of later years than 32767 Arrow writes no date, or a wrong one
_ISO_8601 = (  # what Arrow writes, and what the standard has
    (r"^([+-]?\d+-\d\d-\d\d) ", r"\1T"),
    (r"([+-]\d\d)(\d\d)$", r"\1:\2"),
    (r"^(\d{5,}-)", r"+\1"),  # a year of more digits has a sign
)


def cell_columns(schema: pa.Schema) -> list[str]:
    """Returns the columns that hold files: bytes, Hugging Face's struct of bytes and path, or lists of either."""
    types = [(field.name, _plain_type(field.type)) for field in schema]
    return [name for name, kind in types if is_cell(kind) or is_list_of_cells(kind)]


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of a column's values: the value type of a dictionary, the storage type of an extension."""
    while pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
    return kind


def is_cell(kind: pa.DataType) -> bool:
    """Returns whether the values of a type are files."""
    if pa.types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _is_bytes(kind.field(at).type)
    return _is_bytes(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or kind == pa.binary_view())


def is_list_of_cells(kind: pa.DataType) -> bool:
    """Returns whether the values of a type are lists of files."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and is_cell(kind.value_type))


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
    """Converts a column of times, durations or decimals to a type that JSON has; returns any other as it is."""
    kind = column.type
    if pa.types.is_duration(kind):
        ticks = column.cast(pa.int64()).to_pylist()
        return pa.array([None if tick is None else tick / _TICKS[kind.unit] for tick in ticks], pa.float64())
    if pa.types.is_temporal(kind):
        return _as_text(column)
    if pa.types.is_decimal(kind):
        as_number = kind.precision <= MAX_NUMBER_DIGITS  # Arrow's own cast is off by a rounding step for many
        values = [None if v is None else float(v) if as_number else f"{v:f}" for v in column.to_pylist()]
        return pa.array(values, pa.float64() if as_number else pa.string())
    return column


@lru_cache(maxsize=1024)
def _has_no_json(kind: pa.DataType) -> bool:
    """Returns whether a type, or one inside of it, is of times, durations or decimals."""
    if pa.types.is_struct(kind):
        return any(_has_no_json(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _has_no_json(kind.key_type) or _has_no_json(kind.item_type)
    if (pa.types.is_nested(kind) and not pa.types.is_union(kind)) or pa.types.is_dictionary(kind):
        return _has_no_json(kind.value_type)
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def _json_value(scalar: pa.Scalar) -> Any:
    """Returns a value as Python has it; times, durations and decimals at any depth as `as_json_types` has them."""
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
    """Converts times to ISO 8601 with the digits of their unit; to UTC if their time zone is unknown."""
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
    """Returns how many units of a type of dates, or of dates with times, a day has."""
    return 1 if pa.types.is_date32(kind) else 86_400 * _TICKS["ms" if pa.types.is_date64(kind) else kind.unit]


def _far_text(scalar: pa.Scalar) -> str:
    """Converts a date or time of any year to text, in UTC: the calendar repeats every 400 years."""
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


def batch_payloads(
    name: str, schema: pa.Schema | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[tuple[Member, bytes]]:
    """Yields the members of rows that are in memory, with their content.

    Args:
        name: of the table; the keys of rows without a key of their own start with it.
        schema: its metadata have the features; None to use the schema of the first batch.
        batches: the rows.

    Raises:
        SourceError: a cell has no bytes, or a value cannot be read.
    """
    rows: ArrowRows | None = None
    for batch in batches:
        if rows is None:
            rows = ArrowRows(name, name, batch.schema, read_features(batch.schema if schema is None else schema))
        try:
            for member, content in rows.of_batch(batch):
                if content is None:
                    raise SourceError(name, str(member.skip_reason), member=member.member)
                yield member, content()
        except VALUE_ERRORS as error:
            raise SourceError(name, f"row {rows.number} cannot be read: {first_line(error)}") from error


class ArrowRows(RowMembers):
    """Makes the members of the rows of a table.

    Args:
        url: the container.
        folder: as for `RowMembers`.
        schema: of the rows.
        features: what its metadata say about the columns.

    Attributes:
        media: the columns that hold cells.
        values: all other columns, except arrays by the features.
    """

    def __init__(self, url: str, folder: str, schema: pa.Schema, features: Features | None = None) -> None:
        numbers = [field.name for field in schema if is_numbers(item_type_of_lists(_plain_type(field.type)))]
        tensors = {field.name for field in schema if isinstance(field.type, pa.FixedShapeTensorType)}
        self._arrays = [n for n in numbers if n in tensors or (features is not None and n in features.arrays)]
        self._may_be_arrays = [n for n in numbers if n not in self._arrays and MEMBERS_COLUMN in schema.names]
        columns: dict[str, ColumnKind] = {}
        self._named_labels: dict[str, Any] = {}
        for field in schema:
            kind = columns[field.name] = "array" if field.name in self._arrays else _column_kind(field.type)
            labels = None if features is None or kind != "value" else features.labels.get(field.name)
            if labels is not None:
                self._named_labels[field.name] = labels
            if isinstance(labels, tuple):
                columns.setdefault(f"{field.name}_name", "value")
        self._names_origins = schema.names.count("source_ref") == 1 and columns["source_ref"] == "text"
        self._names_origins &= columns.get("binary_content") == "file" and KEY_COLUMN not in columns
        if self._names_origins:
            columns[KEY_COLUMN] = "text"
        self._origins: set[str] = set()
        super().__init__(url, folder, columns)
        self.media = cell_columns(schema)
        self.values = [name for name in schema.names if name not in self.media and name not in self._arrays]

    def of_batch(self, batch: pa.RecordBatch) -> Iterator[Entry]:
        """Yields the members of each row."""
        for row in self._rows(batch):
            yield from self.entries(row)

    def list_rows(self, batch: pa.RecordBatch, media: Sequence[str]) -> Iterator[tuple[Row, Sequence[Member]]]:
        """Yields the values and the cells of each row."""
        for row in self._rows(batch):
            yield {name: row[name] for name in self.values}, [entry.member for entry in self.cells(row, media)]

    def _rows(self, batch: pa.RecordBatch) -> Iterator[Row]:
        columns, values = _plain_columns(batch), as_json_types(batch.select(self.values))
        media = [name for name in self.media if name in columns]
        arrays = [name for name in self._arrays if name in columns]
        value_lists = {
            name: None if name in self._may_be_arrays else _values(values.column(name)) for name in self.values
        }
        for number in range(batch.num_rows):
            row: dict[str, Any] = {
                name: _value(values, name, number) if column is None else column[number]
                for name, column in value_lists.items()
                if name not in self._may_be_arrays
            }
            member_columns = self.member_columns(row) if self._may_be_arrays else None
            for name in self._may_be_arrays:
                if member_columns is None or name not in member_columns:
                    row[name] = _value(values, name, number)
                    continue
                row[name] = cell = _array_cell(columns[name][number])
                if cell is not None and cell.fault is not None:
                    raise ValueError(f"column {name!a} is {cell.fault}")
            add_label_names(row, self._named_labels)
            for name in media:
                row[name] = self._cells(name, columns[name], number)
            for name in arrays:
                row[name] = _array_cell(columns[name][number])
            if self._names_origins:
                self._name_by_origin(row)
            yield row

    def _name_by_origin(self, row: dict[str, Any]) -> None:
        """Gives the bytes of a materialized row the name, and so the role, of the member that they were.

        A frame of a member, and bytes whose name an earlier row has, keep the number of their row in the name.
        """
        cell, origin = row["binary_content"], _origin_of(row["source_ref"])
        row[KEY_COLUMN] = None
        if cell is None or cell.content is None or origin is None:
            return
        name = content_name(origin.member)
        _, role, extension = split_member_name(name)
        suffix = f"{role}.{extension}".strip(".")
        if origin.is_whole and name not in self._origins and name.endswith(f".{suffix}"):
            self._origins.add(name)
            row[KEY_COLUMN] = name.removesuffix(f".{suffix}")
        key = posixpath.basename(row[KEY_COLUMN] or f"{self.number:08d}")
        row["binary_content"] = cell._replace(path=f"{key}.{suffix}")

    def _cells(self, name: str, column: pa.Array, number: int) -> Cell | Sequence[Cell | None] | None:
        """Returns the cell of a value, or the cells of a list, which are read on demand."""
        value = column[number]
        if is_list_of_cells(value.type):
            return None if value.values is None else _ListOfCells(value.values)
        return cell_of(value)


class _Origin(NamedTuple):
    """The member that a row's content came from, and whether the content is all of it, and not a frame."""

    member: str
    is_whole: bool


def _origin_of(locator: str | None) -> _Origin | None:
    """Returns the member that the `source_ref` of a row names, also in its older form; None if it names none."""
    try:
        value = parse_json(locator or "null")
    except ValueError:
        return None
    member = (value.get("member") or value.get("content_key")) if isinstance(value, dict) else None
    return _Origin(member, value.get("frame_index") is None) if isinstance(member, str) else None


def _column_kind(kind: pa.DataType) -> ColumnKind:
    kind = _plain_type(kind)
    if is_cell(kind):
        return "file"
    return "files" if is_list_of_cells(kind) else "text" if _is_text(kind) else "value"


def _array_cell(value: pa.Scalar) -> Cell | None:
    """Returns the cell of lists of numbers, or of lists in lists; None for null."""
    if not value.is_valid:
        return None
    shape = list(value.type.shape) if isinstance(value.type, pa.FixedShapeTensorType) else []
    if shape:
        value = value.value
    try:
        array = array_of_lists(value.values)
    except ValueError as error:
        return Cell(0, b"", None, fault=f"no array: it {error}")
    return Cell.of_array(array.reshape(shape or array.shape))


def array_of_lists(values: pa.Array) -> npt.NDArray[Any]:
    """Returns a column of numbers, or of lists of numbers in each other, as an array.

    Raises:
        ValueError: it has nulls, or lists of different lengths.
    """
    if isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    shape = [len(values)]
    while pa.types.is_nested(values.type):
        lengths = pc.list_value_length(values)
        bounds = pc.min_max(lengths).as_py() if len(values) else {"min": 0, "max": 0}
        if lengths.null_count:
            raise ValueError("has nulls, expected lists of numbers")
        if bounds["min"] != bounds["max"]:
            raise ValueError(f"has lists of {bounds['min']} to {bounds['max']} values, expected one length")
        shape.append(bounds["max"])
        values = values.flatten()
    if values.null_count:
        raise ValueError("has nulls, expected numbers")
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array.reshape(shape)


class _ListOfCells(Sequence[Cell | None]):
    """Reads the cells of a list on demand: a list may be very many nulls."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return cell_of(self._values[index])


def cell_of(value: pa.Scalar) -> Cell | None:
    """Returns the cell of a value; None for null."""
    path = None
    if isinstance(value, pa.StructScalar):
        if not value.is_valid:
            return None
        path = value["path"].as_py() if "path" in value else None
        value = value["bytes"]
    path = path if isinstance(path, str) else None
    content = value.as_buffer()
    if content is None:
        return None if path is None else Cell(0, b"", None, path)
    head = content.slice(0, min(content.size, HEAD_BYTES)).to_pybytes()
    return Cell(content.size, head, content.to_pybytes, path)


def _plain_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Returns the columns by name: values instead of dictionaries, and storage instead of extensions but arrays."""
    return dict(zip(batch.schema.names, map(_plain_column, batch.columns), strict=True))


def _plain_column(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _plain_column(column.dictionary_decode())
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.FixedShapeTensorType):
        return _plain_column(column.storage)
    return column


def _values(column: pa.Array) -> list[Any] | None:
    """Returns the values of a column; None if they have to be read one by one, for JSON or for the errors of some."""
    if _has_no_json(column.type):
        return None
    try:
        values: list[Any] = column.to_pylist()
    except VALUE_ERRORS:
        return None
    return values


def _value(batch: pa.RecordBatch, name: str, row: int) -> Any:
    """Returns a value as Python has it.

    Raises:
        ValueError: Python does not have it, such as a text that is not UTF-8.
    """
    try:
        return _json_value(batch.column(name)[row])
    except VALUE_ERRORS as error:
        raise ValueError(f"column {name!a}: {first_line(error)}") from error


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())
