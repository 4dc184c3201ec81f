"""Samples in groups, such as the steps of an episode or the pages of a document, and in order within each.

Group and order come from metadata records, ids, JSON or text, file by file; no media is read or decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.decoding import locate
from mm_assets.dataset.files import Reader
from mm_assets.dataset.open_files import DatasetIds, OpenFiles
from mm_assets.errors import ConfigError, FormatError, LimitError
from mm_assets.fields import Field
from mm_assets.fields.records import record_entries, take_entry
from mm_assets.formats.batch import spans
from mm_assets.summaries import describe

__all__ = ["Groups", "SampleColumn", "read_groups"]

SampleColumn: TypeAlias = str | Sequence[Any] | npt.NDArray[Any]
"""A value of each sample: the name of a column, or the values themselves."""

MAX_COLUMNS_IN_MESSAGE = 20
MAX_ORDER = 2**61  # so that sums and differences of a few are an int64

_BLOCK_ROWS = 1 << 12  # JSON and texts that are read together
_SAMPLE_ID = "sample_id"
_NUMBERED_ID = re.compile(r"(.*?)[-_./]?(\d{1,18})", re.DOTALL)

Rows = npt.NDArray[np.int64]
_Values: TypeAlias = npt.NDArray[Any] | list[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """The samples of a dataset, group by group, and in order within each group.

    Attributes:
        rows: (samples,) int64, indices in that order; None if the dataset is in that order.
        starts: (groups + 1,) int64, where each group begins in `rows`, and the end of the last.
        names: (groups,) the integer or text by which each group was recognized.
        order: (samples,) int64 or float64, the values that were sorted by, in the order of `rows`; None without any.
    """

    rows: Rows | None
    starts: Rows
    names: Sequence[int | str]
    order: npt.NDArray[Any] | None

    def __len__(self) -> int:
        """Groups."""
        return len(self.names)

    def take(self, places: Rows) -> Rows:
        """Returns the samples at some places."""
        return places if self.rows is None else self.rows[places]

    def find(self, places: Rows) -> Rows:
        """Returns the number of the group that each place is in."""
        return np.searchsorted(self.starts, places, side="right") - 1


def read_groups(
    files: OpenFiles,
    names: Sequence[str],
    fields: Mapping[str, Field],
    group: SampleColumn,
    order: SampleColumn | None,
    *,
    keep_order: bool,
) -> Groups:
    """Sorts the samples by group, and within a group by `order`; see `Dataset.windows` for the columns.

    Args:
        files: the files.
        names: the modalities.
        fields: the fields of those that can be decoded here.
        group: integers or text.
        order: numbers; None for the order of the dataset.
        keep_order: whether the result has the numbers.

    Raises:
        ConfigError: there is no such column; or it has other values, none for a sample, or twice the same order in a
            group.
        FormatError: a file is damaged.
    """
    arguments = {"group": group} if order is None else {"group": group, "order": order}
    columns = _Columns(files, names, fields).read(arguments)
    codes, group_names = _encode(columns["group"])
    values = None if order is None else _check_order(columns["order"])
    steps = np.diff(codes)
    is_sorted = bool((steps >= 0).all())
    if values is not None and is_sorted:
        is_sorted = bool((values[1:] > values[:-1])[steps == 0].all())
    rows: Rows | None = None
    if not is_sorted:
        rows = np.lexsort((codes,) if values is None else (values, codes)).astype(np.int64, copy=False)
        codes, values = codes[rows], None if values is None else values[rows]
        if values is not None:
            same = np.flatnonzero((np.diff(codes) == 0) & (values[1:] == values[:-1]))
            if len(same):
                first, second = rows[same[0] : same[0] + 2].tolist()
                detail = f"samples {first} and {second} of group {group_names[codes[same[0]]]!r} both have"
                raise ConfigError(
                    "arguments", "order", f"{detail} {values[same[0]].item()!r}, expected each value once"
                )
    starts = np.searchsorted(codes, np.arange(len(group_names) + 1)).astype(np.int64)
    return Groups(rows=rows, starts=starts, names=group_names, order=values if keep_order else None)


def _encode(values: _Values) -> tuple[Rows, Sequence[int | str]]:
    """Returns the number of each sample's group, (samples,), and the groups' names, in order of their first samples."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        found, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        by_first = np.argsort(first)
        ranks = np.empty(len(found), np.int64)
        ranks[by_first] = np.arange(len(found))
        return ranks[inverse.reshape(-1)], found[by_first].tolist()
    values = values.tolist() if isinstance(values, np.ndarray) else values
    numbers: dict[Any, int] = {}
    codes = np.fromiter((numbers.setdefault(value, len(numbers)) for value in values), np.int64, len(values))
    for name in numbers:
        if not isinstance(name, int | str) or isinstance(name, bool):
            sample = int(np.argmax(codes == numbers[name]))
            raise ConfigError(
                "arguments", "group", f"sample {sample} has {describe(name)}, expected an integer or text"
            )
    return codes, list(numbers)


def _check_order(values: _Values) -> npt.NDArray[Any]:
    """Returns the values as int64 or finite float64."""
    kinds = {type(value) for value in values} if isinstance(values, list) else set()
    if kinds - {int, float}:
        sample = next(row for row, value in enumerate(values) if type(value) not in (int, float))
        raise ConfigError("arguments", "order", f"sample {sample} has {describe(values[sample])}, expected a number")
    try:
        array = np.asarray(values, np.float64 if float in kinds else np.int64 if kinds else None)
    except OverflowError as error:
        raise ConfigError("arguments", "order", f"found integers beyond {MAX_ORDER}") from error
    if array.dtype.kind not in "iuf":
        raise ConfigError("arguments", "order", f"found {array.dtype}, expected numbers")
    wrong = ~np.isfinite(array) if array.dtype.kind == "f" else (array > MAX_ORDER) | (array < -MAX_ORDER)
    if wrong.any():
        sample = int(wrong.argmax())
        detail = f"sample {sample} has {array[sample].item()!r}, expected a finite number, of integers up to 2**61"
        raise ConfigError("arguments", "order", detail)
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=False)


class _Columns:
    """Reads columns by name: one value of each sample."""

    def __init__(self, files: OpenFiles, names: Sequence[str], fields: Mapping[str, Field]) -> None:
        self._files = files
        self._names = names
        self._fields = fields

    def read(self, arguments: Mapping[str, SampleColumn]) -> dict[str, _Values]:
        """Returns the values of columns, (samples,), by the name of the argument; JSON with several is read once."""
        found: dict[str, _Values] = {}
        parts: dict[str, dict[str, _Path]] = {}  # by modality and argument
        for key, column in arguments.items():
            values = self._find(key, column)
            if isinstance(values, _Path):
                parts.setdefault(values.name, {})[key] = values
            else:
                found[key] = values
        for name, paths in parts.items():
            found.update(self._decode_parts(name, paths))
        return found

    def _find(self, key: str, column: SampleColumn) -> _Values | _Path:
        """Returns the values of a column, or where they are in decoded values."""
        count = self._files.num_samples
        if not isinstance(column, str):
            values = column if isinstance(column, list | tuple) else np.asarray(column)
            if np.shape(values)[:1] != (count,) or (isinstance(values, np.ndarray) and values.ndim > 1):
                raise ConfigError("arguments", key, f"found {describe(values)}, expected one value of {count} samples")
            if isinstance(values, np.ndarray):
                return values if values.dtype.kind in "iuf" else values.tolist()
            return [value.item() if isinstance(value, np.generic) else value for value in values]
        if column == _SAMPLE_ID:
            return self._of_ids(key)
        # A modality's name may have dots; the longest that fits is meant.
        for name in sorted(self._fields, key=len, reverse=True):
            entry = column.removeprefix(name)
            if column.startswith(name) and entry[:1] in ("", "."):
                part = self._of_modality(key, name, entry[1:])
                if part is not None:
                    return part
        raise ConfigError("arguments", key, f"found {column!r}, expected one of {self._describe()}")

    def _of_modality(self, key: str, name: str, entry: str) -> _Values | _Path | None:
        """Returns the values of a part of a modality, or None if there is no such part."""
        field = self._fields[name]
        if field.CONTENT_KIND in ("text", "json"):
            return _Path(name, entry) if bool(entry) == field.HOLDS_JSON else None
        entry = entry or "value"  # of a number
        entries = _entries(field)
        if entry not in entries:
            return None
        keys, kind = entries[entry]
        found = np.zeros(self._files.num_samples, kind)
        for reader, rows, local in self._files.pieces():
            present = reader.presence(name)[local]
            if not present.all():
                raise _absent(key, name, int(rows[~present][0]))
            records = np.ascontiguousarray(reader.records(name)[local])
            found[rows] = take_entry(records.view(field.metadata_type).reshape(-1), keys)
        return (
            [text.decode("ascii", "backslashreplace") for text in found.tolist()] if found.dtype.kind == "S" else found
        )

    def _decode_parts(self, name: str, paths: Mapping[str, _Path]) -> dict[str, _Values]:
        """Returns parts of each sample's decoded text or JSON, by argument."""
        found: dict[str, list[Any]] = {key: [None] * self._files.num_samples for key in paths}
        for reader, rows, local in self._files.pieces():
            for start, stop in spans(len(rows), _BLOCK_ROWS):
                values = self._decode(reader, local[start:stop], name)
                for row, value in zip(rows[start:stop].tolist(), values, strict=True):
                    for key, path in paths.items():
                        if value is None:
                            raise _absent(key, name, row)
                        try:
                            found[key][row] = path.get(value)
                        except KeyError as error:
                            raise ConfigError("arguments", key, f"sample {row}: {error.args[0]}") from error
        return dict(found)

    def _decode(self, reader: Reader, local: Rows, name: str) -> Iterator[Any]:
        field = self._fields[name]
        column = reader.read_columns(local, (name,), verify=self._files.files.verify)[name]
        for i, payload in zip(local.tolist(), column.payloads(), strict=True):
            try:
                yield None if payload is None else field.decode(*payload)
            except (FormatError, LimitError) as error:
                raise locate(error, name, (reader.part_of(name).path, i)) from error

    def _of_ids(self, key: str) -> list[Any]:
        """Returns the number at the end of each id, or what is before it."""
        found: list[Any] = []
        for sample_id in DatasetIds(self._files):
            match = _NUMBERED_ID.fullmatch(sample_id)
            if match is None:
                detail = f"found the id {sample_id[:80]!r}, expected ids that end with a number, such as 'episode_7/12'"
                raise ConfigError("arguments", key, f"{detail}. Other columns are {self._describe()}")
            found.append(match[1] if key == "group" else int(match[2]))
        return found

    def _describe(self) -> str:
        """Returns the names of the columns, for a message."""
        found = [_SAMPLE_ID]
        for name, field in self._fields.items():
            if field.CONTENT_KIND == "text":
                found.append(name)
            elif field.CONTENT_KIND == "json":
                found += [f"{name}.{key}" for key in self._first_keys(name)] or [f"{name}.KEY"]
            else:
                entries = _entries(field)
                found += [name] if list(entries) == ["value"] else [f"{name}.{entry}" for entry in entries]
        more = ["..."] if len(found) > MAX_COLUMNS_IN_MESSAGE else []
        return f"{', '.join([*found[:MAX_COLUMNS_IN_MESSAGE], *more])}, or a value of each sample"

    def _first_keys(self, name: str) -> list[str]:
        """Returns the keys of the first sample's JSON whose values are numbers or texts."""
        if not self._files.num_samples:
            return []
        reader, local = self._files.place(0)
        value = next(self._decode(reader, np.array([local]), name))
        return (
            [key for key, part in value.items() if type(part) in (int, float, str)] if isinstance(value, dict) else []
        )


class _Path:
    """Where a number or text is in the decoded values of a modality: below some keys."""

    def __init__(self, name: str, entry: str) -> None:
        self.name = name
        self._entry = entry
        self._keys = entry.split(".") if entry else []

    def get(self, value: Any) -> int | float | str:
        """Returns the number or text; `KeyError` with a message if there is none."""
        part, path = value, []
        # A key may have dots, too.
        for key in [self._entry] if isinstance(value, dict) and self._entry in value else self._keys:
            path.append(key)
            if not isinstance(part, dict) or key not in part:
                found = f"it has {', '.join(map(str, part))[:200]}" if isinstance(part, dict) else describe(part)
                raise KeyError(f"no {'.'.join(path)!r} in {self.name!r}: {found}")
            part = part[key]
        if isinstance(part, bool) or not isinstance(part, int | float | str):
            raise KeyError(f"{self._entry!r} in {self.name!r} is {describe(part)}, expected a number or text")
        return part


def _entries(field: Field) -> dict[str, tuple[tuple[str, ...], np.dtype[Any]]]:
    """The entries of a field's metadata record that are single numbers or names."""
    entries = record_entries(field.metadata_type)
    return {".".join(keys): (keys, kind) for keys, kind in entries if not kind.shape and kind.kind in "iufbS"}


def _absent(key: str, name: str, row: int) -> ConfigError:
    detail = f"sample {row} has no {name!r}, expected one in each sample; leave out others by `filter`"
    return ConfigError("arguments", key, f"{detail}, such as data.filter('present_{name}')")
