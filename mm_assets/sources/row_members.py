"""Members of rows with named columns: what a row of Parquet, MDS, LitData or Lance would be in a tar.

The members of row 12 of ``train-0.parquet`` have the key ``train-0/00000012``, or the text in its column `__key__`:

- ``<key>.json``: the text column `json` as it is, with the columns that are neither other members nor keys of it;
- ``<key>.jpg`` of a column of files that is called `jpg`, ``<key>.depth.png`` of `depth.png`: names that are suffixes;
- ``<key>.jpg`` of the only other column of files, ``<key>.<column>.jpg`` of one of several, ``<key>.0.jpg`` or
  ``<key>.<column>.0.jpg`` of a list; the extension follows from the cell's path, else from its first bytes, else from
  the column's name;
- ``<key>.txt`` of a text column `text`, or of one whose name is a suffix of text, such as `caption` or `words.srt`;
- ``<key>.<column>.npy`` of a column of arrays, or ``<key>.state.npy`` of one that is called `state.npy`.

A cell whose path is ``<key>.<suffix>`` is the member of that name. A text column `__members__` lists the members of its
row without the JSON, in order, as JSON: ``[["image", "jpg"], ["state", "state.npy"]]`` has the column and the suffix of
each; the items of a list are entries of their own, and ``["pages", "0.png", 1000]`` is the next 1,000 bytes of a single
cell. With it a row that has neither `json` nor values has no JSON. Without it the members are in the order of the
columns, after the JSON. Nothing in a row is trusted.
"""

from __future__ import annotations

import base64
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from mm_assets.json_text import dump_json, parse_json, repair_json
from mm_assets.media.content_types import content_type_of_name, extension_of_content_type, sniff_content_type
from mm_assets.sources.arrays import npy_bytes
from mm_assets.sources.entries import Entry
from mm_assets.sources.head import HEAD_BYTES
from mm_assets.sources.member import MODALITY_OF_EXTENSION, escape_part, named_member

__all__ = [
    "HEAD_BYTES",
    "KEY_COLUMN",
    "MAX_LIST_CELLS",
    "MEMBERS_COLUMN",
    "Cell",
    "ColumnKind",
    "Row",
    "RowMembers",
    "dump_values",
]

KEY_COLUMN, URL_COLUMN = "__key__", "__url__"  # as WebDataset, and the tools that convert its shards, call them
MEMBERS_COLUMN = "__members__"
MAX_LIST_CELLS = 1 << 16  # of one row: nulls take no bytes in a file

ColumnKind = Literal["file", "files", "array", "text", "value"]
"""A column's values: files (`Cell`), lists of files, arrays (`Cell.of_array`), texts, or JSON values."""


class Cell(NamedTuple):
    """A value that is a file.

    Attributes:
        size: bytes.
        head: its first bytes, up to `HEAD_BYTES`.
        content: reads all of them; None for a cell that has none.
        path: the file's name, if the row has one.
        byte_offset: first byte in the container, if the content is one range of it.
        fault: why a cell has no content: a short name, a colon and a clause; None if it has only a path.
    """

    size: int
    head: bytes
    content: Callable[[], bytes] | None
    path: str | None = None
    byte_offset: int | None = None
    fault: str | None = None

    @classmethod
    def of_array(cls, array: npt.NDArray[Any]) -> Cell:
        """Returns the cell of an array of numbers, as an NPY file that is little-endian and in C order."""
        return cls.of_bytes(npy_bytes(array))

    @classmethod
    def of_bytes(cls, content: bytes, *, path: str | None = None, byte_offset: int | None = None) -> Cell:
        """Returns the cell of bytes that are in memory."""
        return cls(len(content), content[:HEAD_BYTES], lambda: content, path, byte_offset)

    def part(self, start: int, size: int) -> Cell:
        """Returns the cell of some of its bytes."""
        whole = self.content
        assert whole is not None
        head = self.head[start : start + size] if start + min(size, HEAD_BYTES) <= len(self.head) else b""
        offset = None if self.byte_offset is None else self.byte_offset + start
        return Cell(size, head, lambda: whole()[start : start + size], byte_offset=offset)


Row = Mapping[str, Any]
"""The values of a row by column: `Cell` or None, a list of them or None, a text or None, or a JSON value.

A value that `__members__` lists, and a text that is a member by itself (see `RowMembers.is_text_member`), may be a
`Cell`, too."""


class RowMembers:
    """Makes the members of rows, in the order of the rows.

    Args:
        url: the container.
        folder: what starts the keys of rows without a key of their own, such as the file's name without its suffix.
        columns: the kind of each column, in order.

    Attributes:
        number: the next row, from 0; a caller that passes over rows adds to it.
        ordinal: the next entry.
    """

    def __init__(self, url: str, folder: str, columns: Mapping[str, ColumnKind]) -> None:
        self.number = 0
        self.ordinal = 0
        self._url = url
        self._folder = folder
        self._columns = columns
        self._has_key = columns.get(KEY_COLUMN) == "text"
        self._has_members = columns.get(MEMBERS_COLUMN) == "text"
        self._has_json_text = columns.get("json") == "text"
        files = [name for name, kind in columns.items() if kind in ("file", "files")]
        unnamed = [name for name in files if columns[name] == "files" or not _is_suffix(name)]
        self._labels = {name: f"{escape_part(name)}." if len(unnamed) > 1 else "" for name in unnamed}
        self._texts = {name: suffix for name in columns if (suffix := self._text_suffix(name)) is not None}
        self._values = [
            name
            for name, kind in columns.items()
            if name not in self._texts and kind in ("text", "value") and not self._is_reserved(name)
        ]
        if self._has_members:
            self._values = [name for name in self._values if columns[name] == "value"]
        self._reserved = frozenset({"json", *(() if self._has_members else self._texts.values())})  # no cell has them
        self._has_json = bool(self._values) or ("files" in columns.values() and not self._has_members)

    def _text_suffix(self, name: str) -> str | None:
        """Returns the suffix of the member that a text column becomes, or None if it is a value of the JSON."""
        if self._columns[name] != "text" or name == "json":
            return None
        if name == "text":
            return None if "txt" in self._columns else "txt"
        return name if _is_suffix(name) and MODALITY_OF_EXTENSION[_extension_of(name)] == "text" else None

    def is_text_member(self, name: str) -> bool:
        """Returns whether a column of texts becomes members, and neither keys nor JSON."""
        return name in self._texts or (self._has_members and not self._is_reserved(name))

    def needs_head(self, name: str) -> bool:
        """Returns whether the extension of a column's cells depends on their first bytes."""
        return name in self._labels

    def _is_reserved(self, name: str) -> bool:
        if self._columns[name] != "text":
            return name == URL_COLUMN
        return name in (KEY_COLUMN, URL_COLUMN, MEMBERS_COLUMN, "json")

    def entries(self, row: Row) -> Iterator[Entry]:
        """Yields the members of the next row.

        Raises:
            ValueError: a list has more items than `MAX_LIST_CELLS`.
        """
        key = self._key(row)
        ordinal = self.ordinal
        json_text = row["json"] if self._has_json_text else None
        values = {name: row[name] for name in self._values if not isinstance(row[name], Cell)}
        has_json = json_text is not None or self._has_json
        if self._has_members and row[MEMBERS_COLUMN] is not None:  # then no column alone makes a JSON
            values = {name: value for name, value in values.items() if value is not None}
            has_json = json_text is not None or bool(values)
        contents, names = self._contents(row, key, self._columns, ordinal + has_json)
        if has_json:
            values |= names
            yield self._entry(f"{key}.json", key, Cell.of_bytes(_json_of(json_text, values)), ordinal)
        self.ordinal = ordinal + has_json + len(contents)
        self.number += 1
        yield from contents

    def cells(self, row: Row, columns: Sequence[str]) -> list[Entry]:
        """Returns the members of chosen columns of the next row alone, numbered from 0; raises as `entries`."""
        contents, _ = self._contents(row, self._key(row), columns, 0)
        self.number += 1
        return contents

    def member_columns(self, row: Row) -> Set[str] | None:
        """Returns the columns that `__members__` of a row names, or None if it has nothing.

        Raises:
            ValueError: it is not such a list.
        """
        text = row.get(MEMBERS_COLUMN) if self._has_members else None
        return None if text is None else _member_list(text).keys()

    def damage_entry(self, name: str, size: int, detail: str) -> Entry:
        """Returns the entry of rows that cannot be read, or not to their end."""
        raw = os.fsencode(f"{self._folder}/{name}")
        member = named_member(self._url, raw, ordinal=self.ordinal, byte_size=size, skip_reason=f"damaged: {detail}")
        self.ordinal += 1
        return Entry(member, None)

    def _key(self, row: Row) -> str:
        key = row.get(KEY_COLUMN) if self._has_key else None
        return key if isinstance(key, str) and key.strip("/") else f"{self._folder}/{self.number:08d}"

    def _contents(
        self, row: Row, key: str, columns: Sequence[str] | Mapping[str, ColumnKind], ordinal: int
    ) -> tuple[list[Entry], dict[str, list[str | None] | None]]:
        """Returns the members of a row without its JSON, from `ordinal` on, and for columns of lists their names."""
        entries: list[Entry] = []
        names: dict[str, list[str | None] | None] = {}
        suffixes: set[str] = set()

        def add(cell: Cell | None, column: str, suffix: str | None) -> str | None:
            if cell is None or suffix is None:
                return None
            if suffix in self._reserved or suffix in suffixes:
                suffix = f"{escape_part(column)}.{suffix}"
            suffixes.add(suffix)
            entries.append(self._entry(f"{key}.{suffix}", key, cell, ordinal + len(entries)))
            return posixpath.basename(f"{key}.{suffix}")

        if self._has_members and row[MEMBERS_COLUMN] is not None:
            for column, suffix, cell in _member_cells(row):
                add(cell, column, suffix)
            return entries, names
        for column in columns:
            value, kind = row[column], self._columns[column]
            if kind == "file":
                add(value, column, value and self._suffix(value, key, column, self._labels.get(column, "")))
            elif kind == "files":
                if value is not None and len(value) > MAX_LIST_CELLS:
                    detail = f"a list of {len(value):,} items, at most {MAX_LIST_CELLS:,} are read"
                    raise ValueError(f"column {column!r} has {detail}")
                items: list[str | None] = []
                names[column] = None if value is None else items
                for n, cell in enumerate(value or ()):
                    suffix = cell and self._suffix(cell, key, column, f"{self._labels[column]}{n}.")
                    items.append(add(cell, column, suffix))
            elif kind == "array":
                add(value, column, column if column.endswith(".npy") else f"{escape_part(column)}.npy")
            elif column in self._texts and value is not None:
                cell = value if isinstance(value, Cell) else Cell.of_bytes(value.encode())
                entries.append(self._entry(f"{key}.{self._texts[column]}", key, cell, ordinal + len(entries)))
        return entries, names

    def _suffix(self, cell: Cell, key: str, column: str, label: str) -> str:
        """Returns what follows the key in the name of a cell's member."""
        path = "" if cell.path is None else posixpath.basename(cell.path)
        start = posixpath.basename(key) + "."
        if self._has_key and path.startswith(start) and len(path) > len(start):
            return path[len(start) :]
        if column not in self._labels and not path:
            return column
        extension = _extension(path, cell.head, column)
        if column not in self._labels:
            return f"{column.rpartition('.')[0]}.{extension}".lstrip(".")
        return label + extension

    def _entry(self, name: str, key: str, cell: Cell, ordinal: int) -> Entry:
        reason = cell.fault
        if reason is None and cell.content is None:
            reason = f"no bytes: the cell has only the path {cell.path!a}"
        member = named_member(
            self._url,
            os.fsencode(name),
            ordinal=ordinal,
            byte_size=cell.size,
            byte_offset=cell.byte_offset,
            skip_reason=reason,
            link_target=None if cell.content is not None or cell.path is None else os.fsencode(cell.path),
        )
        return Entry(member, cell.content)


def _member_cells(row: Row) -> list[tuple[str, str, Cell]]:
    """Returns column, suffix and cell of each member that `__members__` lists, in order.

    Raises:
        ValueError: it is not such a list, or it does not list all of a column that it names.
    """
    members: dict[int, tuple[str, str, Cell]] = {}
    for column, entries in _member_list(row[MEMBERS_COLUMN]).items():
        cells = _cells_of(row.get(column), [size for _, _, size in entries])
        if cells is None:
            raise ValueError(
                f"column {MEMBERS_COLUMN!r} lists {len(entries):,} members of {column!a} that it does not hold"
            )
        for (number, suffix, _), cell in zip(entries, cells, strict=True):
            members[number] = column, suffix, cell
    return [members[number] for number in sorted(members)]


def _member_list(text: str) -> dict[str, list[tuple[int, str, int | None]]]:
    """Returns the place, suffix and size of each member that `__members__` lists, by column; `ValueError` as above."""
    entries = parse_json(text)
    columns: dict[str, list[tuple[int, str, int | None]]] = {}
    for number, entry in enumerate(entries[:MAX_LIST_CELLS] if isinstance(entries, list) else [entries]):
        match entry:
            case [str(column), str(suffix)]:
                columns.setdefault(column, []).append((number, suffix, None))
            case [str(column), str(suffix), int(size)] if size >= 0:
                columns.setdefault(column, []).append((number, suffix, size))
            case _:
                raise ValueError(f"column {MEMBERS_COLUMN!r} lists {entry!a}, expected a column, a suffix and a size")
    return columns


def _cells_of(value: Any, sizes: Sequence[int | None]) -> list[Cell] | None:
    """Returns the items of a value, or its bytes divided by sizes; None if the value is something else."""
    if isinstance(value, str):
        value = Cell.of_bytes(value.encode())
    if not isinstance(value, Cell):
        cells = list(value) if isinstance(value, Sequence) and len(value) == len(sizes) else []
        cells = [Cell.of_bytes(cell.encode()) if isinstance(cell, str) else cell for cell in cells]
        return cells if len(cells) == sizes.count(None) and all(isinstance(cell, Cell) for cell in cells) else None
    if value.content is None:
        return None
    if list(sizes) == [None]:
        return [value]
    part_sizes = [size for size in sizes if size is not None]
    starts = list(accumulate(part_sizes, initial=0))
    if len(part_sizes) < len(sizes) or starts[-1] != value.size:
        return None
    return [value.part(start, size) for start, size in zip(starts, part_sizes, strict=False)]


def _json_of(text: str | None, values: Mapping[str, Any]) -> bytes:
    """Returns the JSON of a row: its column `json`, with the keys that only the other columns have."""
    base = values.get("json")
    if text is None:
        if not isinstance(base, dict):
            return dump_values(values).encode()
        others = {name: value for name, value in values.items() if name not in base and name != "json"}
        return dump_values({**base, **{name: value for name, value in others.items() if value is not None}}).encode()
    values = {name: value for name, value in values.items() if value is not None}
    if values:
        try:
            base = parse_json(repair_json(text).text)
        except ValueError:  # the builder of rows rejects it
            return text.encode()
        others = {name: value for name, value in values.items() if isinstance(base, dict) and name not in base}
        if others:  # they follow the text, which stays as it is
            text = text.rstrip()[:-1] + ("," if base else "") + dump_values(others)[1:]
    return text.encode()


def dump_values(value: Mapping[str, Any]) -> str:
    """Returns the values of a row as JSON; null for NaN and infinities, text for what JSON does not have."""
    return dump_json(value, default=_plain)


def _plain(value: object) -> object:
    """Converts a value inside a list or struct to one that JSON has."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def _extension_of(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _is_suffix(name: str) -> bool:
    """Returns whether a column's name is what follows the key in a member's name: it ends in a known extension."""
    parts = name.split(".")
    return "/" not in name and all(parts) and _extension_of(name) in MODALITY_OF_EXTENSION


def _extension(path: str, head: bytes, column: str) -> str:
    """Returns the extension of a cell by its path, else by its first bytes, else by its column's name, else "bin"."""
    if content_type_of_name(path) is not None:
        return _extension_of(path)
    content_type = sniff_content_type(head)
    extension = None if content_type is None else extension_of_content_type(content_type)
    last = _extension_of(column)
    return extension or (last if last in MODALITY_OF_EXTENSION and last != "json" else "bin")
