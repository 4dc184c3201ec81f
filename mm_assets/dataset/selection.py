"""Selecting samples of a dataset: by a rule over their ids, or by an SQL condition over their metadata.

Everything here returns indices, ascending, and reads no payload's data: only the requested ids, presence, sizes and
metadata records, file by file, in blocks.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.files import Reader
from mm_assets.dataset.id_index import hash_texts, mix_bits
from mm_assets.dataset.open_files import OpenFiles
from mm_assets.errors import ConfigError, optional_import
from mm_assets.fields import Field
from mm_assets.fields.records import record_entries, take_entry

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

__all__ = ["matching_rows", "number_column", "plain_columns", "scan_columns", "split_rows"]

Indices = npt.NDArray[np.int64]

# --- splitting --------------------------------------------------------------------------------------------------------

_ROUNDING = Fraction(1, 10**9)  # how far from 1 a sum of fractions may be that should be 1


def split_rows(
    sample_ids: Iterable[str], count: int, fractions: Mapping[str, float], *, seed: int
) -> dict[str, Indices]:
    """Share samples out by a hash of their ids; the rule is in ``docs/spec/reading.md``.

    Returns the indices of each part, ascending, (n,) int64; arguments and errors as `Dataset.split`.
    """
    bounds = _bounds(fractions)
    number = operator.index(seed)
    if not 0 <= number < 2**64:
        raise ConfigError("arguments", "seed", f"found {number}, expected an integer from 0 to 2**64 - 1")
    points = mix_bits(hash_texts(sample_ids, count) ^ mix_bits(np.array([number], np.uint64) + np.uint64(_STEP)))
    # A bound of 2**64 has no uint64, and no point reaches it.
    parts = np.searchsorted(np.array([bound for bound in bounds if bound < 2**64], np.uint64), points, side="right")
    return {name: np.flatnonzero(parts == part) for part, name in enumerate(fractions)}


def _bounds(fractions: Mapping[str, float]) -> list[int]:
    """Where each part ends among the points, of which there are 2**64."""
    if not isinstance(fractions, Mapping) or not fractions:
        raise ConfigError("arguments", "fractions", f"found {fractions!r}, expected the share of each part by name")
    ends: list[Fraction] = []
    total = Fraction(0)
    for name, share in fractions.items():
        if not 0 < float(share) <= 1:
            raise ConfigError(
                "arguments", f"fractions.{name}", f"found {share!r}, expected a share above 0 and up to 1"
            )
        total += Fraction(repr(float(share)))  # as it is written: 0.9 and 0.1 are 1 exactly
        ends.append(total)
    if total > 1 + _ROUNDING:
        raise ConfigError("arguments", "fractions", f"found {float(total)} together, expected up to 1")
    if abs(total - 1) <= _ROUNDING:
        ends[-1] = Fraction(1)  # thirds leave no sample out
    return [min(int(end * 2**64), 2**64) for end in ends]


_STEP = 0x9E3779B97F4A7C15


# --- SQL --------------------------------------------------------------------------------------------------------------

_BLOCK_ROWS = 1 << 17  # rows of the table that are made and filtered at once
_INDEX, _SAMPLE_ID, _TABLE = "index", "sample_id", "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SqlColumn:
    """A column of the table `samples`; `modality` is "" for those of the sample itself.

    `record` is the modality's metadata record in a column of records.
    """

    name: str
    kind: Literal["index", "sample_id", "present", "size", "record"]
    modality: str = ""
    record: np.dtype[np.void] | None = None


def matching_rows(files: OpenFiles, names: Sequence[str], fields: Mapping[str, Field], sql: str) -> Indices:
    """The indices of the samples that fulfil a condition, ascending; see `Dataset.filter`.

    `fields` are those of the modalities whose metadata records are known.
    """
    with _Query(sql) as query:
        columns = query.choose(_columns(names, fields))
        tables = _tables(files, columns)
        if query.has_subquery and len(files):
            import pyarrow as pa

            tables = iter([pa.concat_tables(tables)])  # a subquery sees all samples, not a block of them
        found = [query.run(table) for table in tables]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *found]))


def plain_columns(names: Sequence[str], fields: Mapping[str, Field]) -> dict[str, tuple[tuple[str, ...], str]]:
    """What the table `samples` has of plain values, an entry of a metadata record as ``image.width``.

    Returns:
        by that name the column that it is in with the keys that lead to it there, and its type: bool, string or
        NumPy's name of a number's.
    """
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    types = {"index": "int64", "sample_id": "string", "present": "bool", "size": "int64"}
    for column in _columns(names, fields):
        if column.record is None:
            found[column.name] = (column.name,), types[column.kind]
            continue
        for keys, entry in record_entries(column.record):
            if not entry.shape and entry.kind != "V":
                path = (column.name, *keys)
                found[".".join(path)] = path, "string" if entry.kind == "S" else entry.name
    return found


def number_column(files: OpenFiles, names: Sequence[str], fields: Mapping[str, Field], chosen: str) -> npt.NDArray[Any]:
    """One number of every sample; see `Dataset.column`."""
    known = {
        name: (path, np.dtype(kind))
        for name, (path, kind) in plain_columns(names, fields).items()
        if kind != "string" and name != _INDEX
    }
    if chosen not in known:
        raise KeyError(f"no column of numbers {chosen!r}, there are {', '.join(known)}")
    (column_name, *keys), dtype = known[chosen]
    column = next(column for column in _columns(names, fields) if column.name == column_name)
    found = np.zeros(files.num_samples, dtype)
    for reader, rows, local in files.pieces():
        if column.kind == "present":
            found[rows] = reader.presence(column.modality)[local]
        elif column.record is not None:
            records = np.ascontiguousarray(reader.records(column.modality)[local]).view(column.record).reshape(-1)
            found[rows] = take_entry(records, keys)
        else:
            sizes = reader.sizes(column.modality)[local].astype(np.int64)
            # An absent sample has no record either.
            found[rows] = np.maximum(sizes - _record_size(reader, column.modality), 0)
    return found


def scan_columns(
    files: OpenFiles, names: Sequence[str], fields: Mapping[str, Field], chosen: Sequence[str]
) -> Iterator[pa.Table]:
    """Some columns of the table `samples`: metadata of all samples, without their data. One file's are held at a time.

    See `Dataset.scan_columns`; `fields` are those of the modalities whose metadata records are known.
    """
    known = {column.name: column for column in _columns(names, fields)}
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise KeyError(f"no column {unknown[0]!r}, there are {', '.join(known)}")
    yield from _tables(files, [known[name] for name in dict.fromkeys(chosen)])


def _columns(names: Sequence[str], fields: Mapping[str, Field]) -> list[_SqlColumn]:
    columns = [_SqlColumn(name=_INDEX, kind="index"), _SqlColumn(name=_SAMPLE_ID, kind="sample_id")]
    for name in names:
        columns.append(_SqlColumn(name=f"present_{name}", kind="present", modality=name))
        columns.append(_SqlColumn(name=f"size_{name}", kind="size", modality=name))
        record = fields[name].metadata_type if name in fields else None
        if record is not None and _record_names(record):
            columns.append(_SqlColumn(name=name, kind="record", modality=name, record=record))
    return columns


class _Query:
    """The user's condition, parsed, on a connection that reaches no file."""

    def __init__(self, sql: str) -> None:
        with optional_import("duckdb", "Dataset.filter"):
            import duckdb

        if not sql.strip():
            raise _wrong("found nothing, expected a condition")
        self._error: type[Exception] = duckdb.Error
        # The line break ends a comment that the condition may end with.
        self._sql = f'select "{_INDEX}" from {_TABLE} where (\n{sql}\n)'
        self._connection: duckdb.DuckDBPyConnection = duckdb.connect(
            config={
                "enable_external_access": False,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                # Before its release 2.0 DuckDB passes conditions on a struct's entries to Arrow with the names as the
                # user wrote them, and Arrow is case-sensitive.
                "disabled_optimizers": "filter_pushdown",
                "lock_configuration": True,
            }
        )
        self._names: set[str] = set()
        self._all = False
        self.has_subquery = False
        try:
            ((found,),) = self._connection.execute("select json_serialize_sql(?)", [self._sql]).fetchall()
            parsed = json.loads(found)
            if parsed.get("error") or len(parsed.get("statements", ())) != 1:
                raise _wrong(parsed.get("error_message") or "more than one statement")
        except BaseException:
            self._connection.close()
            raise
        self._walk(parsed["statements"][0]["node"]["where_clause"])

    def _walk(self, tree: Any) -> None:
        stack = [tree]
        while stack:
            node = stack.pop()
            if isinstance(node, list):
                stack.extend(node)
            elif isinstance(node, dict):
                kind = node.get("class")
                if kind == "COLUMN_REF":
                    self._names.update(name.casefold() for name in node["column_names"])
                self._all |= kind == "STAR"
                self.has_subquery |= kind == "SUBQUERY"
                stack.extend(node.values())

    def choose(self, columns: Sequence[_SqlColumn]) -> list[_SqlColumn]:
        """The index and the columns that the condition names.

        Raises:
            ConfigError: one that it names is several, which differ at most in case: SQL does not see that.
        """
        by_name: dict[str, list[_SqlColumn]] = {}
        for column in columns:
            by_name.setdefault(column.name.casefold(), []).append(column)
        chosen = [same for name, same in by_name.items() if self._all or name in self._names]
        for same in chosen:
            if len(same) > 1:
                raise _wrong(f"{same[0].name!r} means several columns, those of {[one.modality for one in same]}")
        return list(dict.fromkeys([columns[0], *(same[0] for same in chosen)]))

    def run(self, table: pa.Table) -> Indices:
        """The `index` of the rows that fulfil the condition."""
        try:
            self._connection.register(_TABLE, table)
            found = self._connection.execute(self._sql).fetchnumpy()[_INDEX]
            self._connection.unregister(_TABLE)
        except self._error as error:
            raise _wrong(str(error)) from error
        return np.asarray(found, np.int64)

    def __enter__(self) -> _Query:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _wrong(message: str) -> ConfigError:
    lines = message.splitlines()
    return ConfigError("arguments", "sql", lines[0] if lines else "is not a condition")


def _tables(files: OpenFiles, columns: Sequence[_SqlColumn]) -> Iterator[pa.Table]:
    """The table `samples` in blocks; one of no rows where there is no sample, so that its columns are known."""
    none = np.zeros(0, np.int64)
    pieces = files.pieces() if files.num_samples else ((reader, none, none) for reader in islice(files, 1))
    for reader, rows, local in pieces:
        piece = _Piece(reader)
        for start in range(0, max(len(rows), 1), _BLOCK_ROWS):
            yield piece.table(columns, rows[start : start + _BLOCK_ROWS], local[start : start + _BLOCK_ROWS])


class _Piece:
    """One file's columns."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._whole: dict[tuple[str, str], npt.NDArray[Any]] = {}  # columns of all its samples, for the next block

    def table(self, columns: Sequence[_SqlColumn], rows: Indices, local: Indices) -> pa.Table:
        """A block of some columns, by the indices of its samples in the dataset and in the file."""
        with optional_import("pyarrow", "The table of a dataset's samples"):
            import pyarrow as pa

        return pa.table({column.name: self._values(column, rows, local) for column in columns})

    def _values(self, column: _SqlColumn, rows: Indices, local: Indices) -> pa.Array:
        import pyarrow as pa

        if column.kind == "index":
            return pa.array(rows)
        if column.kind == "sample_id":
            sample_ids = self._reader.sample_ids
            return pa.array([sample_ids[i] for i in local.tolist()], type=pa.string())
        present = self._column("presence", column.modality)[local]
        if column.kind == "present":
            return pa.array(present)
        if column.record is not None:
            records = np.ascontiguousarray(self._column("records", column.modality)[local])
            return _records_column(records.view(column.record).reshape(-1), present)
        sizes = self._column("sizes", column.modality)[local].astype(np.int64)
        return pa.array(sizes - _record_size(self._reader, column.modality), mask=~present)

    def _column(self, what: Literal["presence", "sizes", "records"], modality: str) -> npt.NDArray[Any]:
        key = what, modality
        if key not in self._whole:
            self._whole[key] = getattr(self._reader, what)(modality)
        return self._whole[key]


def _record_size(reader: Reader, modality: str) -> int:
    return next(spec.metadata_size for spec in reader.modalities if spec.name == modality)


def _record_names(record: np.dtype[np.void]) -> list[str]:
    """The entries of a metadata record that are numbers, names or records, but not padding or opaque bytes."""
    names = record.names or ()
    return [
        name for name in names if not name.startswith("_pad") and (record[name].names or record[name].base.kind != "V")
    ]


def _records_column(records: npt.NDArray[np.void], present: npt.NDArray[np.bool_]) -> pa.Array:
    """Metadata records as a struct, null where absent; records within them are structs too."""
    import pyarrow as pa

    parts: dict[str, pa.Array] = {}
    for name in _record_names(records.dtype):
        values = np.ascontiguousarray(records[name])
        if values.dtype.names:
            parts[name] = _records_column(values, present)
        elif values.dtype.kind == "S":
            parts[name] = pa.array([text.decode("ascii", "backslashreplace") for text in values.tolist()], pa.string())
        elif values.ndim > 1:
            parts[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        else:
            parts[name] = pa.array(values)
    return pa.StructArray.from_arrays(list(parts.values()), names=list(parts), mask=pa.array(~present))
