"""Adding a modality of values to packed samples: in place to an MSTR file, or as a file of its own beside theirs.

Values come in the file's order, or from a table by sample id (Parquet, JSON Lines, CSV). A table is held in memory;
payloads are encoded and written one at a time. After an error the file is as it was.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_assets.dataset.writer import spec_of
from mm_assets.errors import (
    ConfigError,
    EncodeError,
    SchemaMismatchError,
    SourceError,
    full_disk_named,
    optional_import,
)
from mm_assets.fields import Field
from mm_assets.formats import MstrReader, MstrWriter, Payload, WriteSummary
from mm_assets.formats import add_stream as add_payloads
from mm_assets.summaries import counted

__all__ = ["Values", "add_stream", "add_values", "encoded", "read_values", "write_stream"]

ID_COLUMN, VALUE_COLUMN = "sample_id", "value"
_MAX_CELL = 1 << 30  # characters of one cell of a CSV file: Python's own limit would refuse a long text


def add_stream(
    path: str | os.PathLike[str], name: str, field: Field, values: Iterable[Any], *, fsync: bool = True
) -> WriteSummary:
    """Add a modality to a local MSTR file, in place. Readers that have the file open are not disturbed.

    Args:
        path: the file.
        name: the new modality; no modality of the file has it.
        field: how its values are encoded.
        values: one per sample in the file's order, None where absent; taken one at a time.
        fsync: wait for the disk between the steps. Without it a crash of the machine may damage the file.

    Raises:
        EncodeError: a value that the field does not take, another number of values than samples, a name that is taken,
            or a 33rd modality. The file is as before.
        FormatError: the file is not a whole MSTR file.
        SourceError: the disk is full, or cannot be written to. The file is as before.
        BlockingIOError: another process is adding to the file.
    """
    with full_disk_named(path):
        return add_payloads(path, spec_of(name, field), encoded(str(path), name, field, values), fsync=fsync)


def encoded(path: str, name: str, field: Field, values: Iterable[Any]) -> Iterator[Payload | None]:
    """The payloads of values, one by one; an `EncodeError` names `path`, `name` and the sample."""
    for i, value in enumerate(values):
        if value is None:
            yield None
            continue
        try:
            yield Payload(*field.encode(value))
        except EncodeError as error:
            raise EncodeError(f"{path}, sample {i}, modality {name!r}: {error}") from error


def write_stream(
    path: str | os.PathLike[str],
    name: str,
    field: Field,
    values: Iterable[Any],
    sample_ids: Sequence[str],
    *,
    fsync: bool = True,
) -> WriteSummary:
    """Writes an MSTR file with one modality of given samples, which a dataset reads beside their packed file.

    Equal values and ids give equal bytes.

    Args:
        path: where the file will be; an older one is replaced when everything is written.
        name: the modality.
        field: how its values are encoded.
        values: one per sample, None if absent; taken one at a time.
        sample_ids: the ids of the packed file, in its order.
        fsync: wait for the disk before the file takes its place.

    Raises:
        EncodeError: a value that the field does not take, or another number of values than samples. Nothing is
            written.
        SourceError: the disk is full, or cannot be written to. Nothing is written.
    """
    with (
        full_disk_named(path),
        MstrWriter(path, [spec_of(name, field)], num_samples=len(sample_ids), fsync=fsync) as writer,
    ):
        payloads = encoded(str(path), name, field, values)
        for sample_id, payload in zip(sample_ids, payloads, strict=False):
            writer.write(sample_id, {name: payload})
        if writer.num_samples < len(sample_ids):
            raise EncodeError(f"{path}: {writer.num_samples} values for {len(sample_ids)} samples")
        if any(True for _ in payloads):
            raise EncodeError(f"{path}: more than {len(sample_ids)} values for {len(sample_ids)} samples")
        return writer.close()


class Values:
    """A value per sample id.

    Args:
        name: source of the values, for messages.
        rows: sample id to row.
        column: the item of each row, by number.
        convert: makes a value of the field from a row's item.
    """

    def __init__(self, name: str, rows: Mapping[str, int], column: Any, convert: Any) -> None:
        self.name = name
        self._rows = rows
        self._column = column
        self._convert = convert

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    def get(self, sample_id: str) -> Any:
        """The value of a sample, None where there is none; `EncodeError` where the field does not take it."""
        row = self._rows.get(sample_id)
        if row is None:
            return None
        item = self._column[row]
        item = item.as_py() if hasattr(item, "as_py") else item
        try:
            return None if item is None else self._convert(item)
        except EncodeError as error:
            raise EncodeError(f"{self.name}: value of {sample_id!r}: {error}") from error

    def of(self, sample_ids: Iterable[str]) -> Iterator[Any]:
        """The values of samples in their order."""
        return (self.get(sample_id) for sample_id in sample_ids)

    def check_ids(self, files: Iterable[Sequence[str]]) -> None:
        """Refuses, with `EncodeError`, ids that no sample of any file has."""
        unknown = set(self._rows)
        for sample_ids in files:
            unknown.difference_update(sample_ids)
        if unknown:
            shown = ", ".join(map(repr, sorted(unknown)[:3]))
            more = ", …" if len(unknown) > 3 else ""
            raise EncodeError(f"{self.name}: {counted(len(unknown), 'unknown sample id')}: {shown}{more}")


def add_values(
    path: str | os.PathLike[str],
    name: str,
    field: Field,
    values: Values,
    *,
    ignore_unknown: bool = False,
    fsync: bool = True,
) -> WriteSummary:
    """Add a modality of values by sample id to a local MSTR file, in place; see `add_stream`.

    Args:
        path: the file.
        name: the new modality.
        field: how its values are encoded.
        values: as `read_values` makes them; a sample that is not among them does not have the modality.
        ignore_unknown: pass over ids that no sample has.
        fsync: as for `add_stream`.

    Raises:
        EncodeError: as for `add_stream`, or an id that no sample has.
        FormatError: the file is not a whole MSTR file.
        BlockingIOError: another process is adding to the file.
    """
    with MstrReader(path) as reader:
        if not ignore_unknown:
            values.check_ids([reader.sample_ids])
        return add_stream(path, name, field, values.of(reader.sample_ids), fsync=fsync)


def read_values(path: str | os.PathLike[str], field: Field) -> Values:
    """Read a table of values: Parquet, JSON Lines or CSV by its extension, with columns `sample_id` and `value`.

    Null, a missing row and an empty cell of a CSV file mean that a sample does not have the modality. A cell becomes a
    value by `Field.from_json_value`, that of a CSV file by `Field.from_csv_cell`: an array is a list, the value of a
    composite field an object of its parts, a file a binary cell (Parquet only). In a CSV file the value of a
    `TextField` is the cell's text, and of any other field JSON.

    Args:
        path: a local file ending in ``.parquet``, ``.jsonl`` or ``.csv``.
        field: what the values are for.

    Raises:
        ConfigError: another extension.
        SchemaMismatchError: the columns are others, an id is not text or occurs twice, or a line is not JSON.
        SourceError: the file cannot be read.
    """
    place = Path(path)
    reader = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".csv": _read_csv}.get(place.suffix.lower())
    if reader is None:
        raise ConfigError("arguments", "values", f"found {place.name!r}, expected a .parquet, .jsonl or .csv file")
    try:
        ids, column = reader(place)
    except OSError as error:
        raise SourceError(place, f"cannot be read: {error.strerror or error}") from error
    rows: dict[str, int] = {}
    for row, sample_id in enumerate(ids):
        if not isinstance(sample_id, str):
            shown = f"{type(sample_id).__name__} {sample_id!r}"[:60]
            raise SchemaMismatchError(f"{place}, row {row + 1}: {ID_COLUMN} is {shown}, expected a text")
        if rows.setdefault(sample_id, row) != row:
            raise SchemaMismatchError(f"{place}: rows {rows[sample_id] + 1} and {row + 1} are both of {sample_id!r}")

    convert = field.from_csv_cell if place.suffix.lower() == ".csv" else field.from_json_value
    return Values(str(place), rows, column, convert)


def _read_parquet(path: Path) -> tuple[list[Any], Any]:
    with optional_import("pyarrow", "reading values from a Parquet file"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            table = file.read([ID_COLUMN, VALUE_COLUMN])
    except pa.ArrowException as error:
        raise SchemaMismatchError(f"{path}: not a Parquet file that can be read: {error}") from error
    return table.column(ID_COLUMN).to_pylist(), table.column(VALUE_COLUMN)


def _check_columns(path: Path, names: Sequence[str]) -> None:
    for name in (ID_COLUMN, VALUE_COLUMN):
        if list(names).count(name) != 1:
            found = ", ".join(names) or "none"
            raise SchemaMismatchError(f"{path}: columns {found}; expected {ID_COLUMN} and {VALUE_COLUMN}, once each")


def _read_jsonl(path: Path) -> tuple[list[Any], list[Any]]:
    ids, column = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SchemaMismatchError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict) or ID_COLUMN not in row:
                expected = f"an object with {ID_COLUMN} and {VALUE_COLUMN}"
                raise SchemaMismatchError(f"{path}, line {number}: found {line[:40]!r}, expected {expected}")
            ids.append(row[ID_COLUMN])
            column.append(row.get(VALUE_COLUMN))
    return ids, column


def _read_csv(path: Path) -> tuple[list[str], list[str | None]]:
    ids: list[str] = []
    column: list[str | None] = []
    before = csv.field_size_limit(_MAX_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            names = next(rows, [])
            _check_columns(path, names)
            at, value_at = names.index(ID_COLUMN), names.index(VALUE_COLUMN)
            for row in rows:
                if not row:
                    continue  # an empty line
                if len(row) != len(names):
                    detail = f"{len(row)} cells, expected {len(names)}"
                    raise SchemaMismatchError(f"{path}, line {rows.line_num}: {detail}")
                ids.append(row[at])
                column.append(row[value_at] or None)
    except (csv.Error, UnicodeDecodeError) as error:
        raise SchemaMismatchError(f"{path}: not a CSV file in UTF-8: {error}") from error
    finally:
        csv.field_size_limit(before)
    return ids, column
