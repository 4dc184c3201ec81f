"""Tables of rows: a stage's table, a list of files, or any Parquet or JSONL file. The rows of an id are a sample."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mm_assets.display import Content, Item, column_item, content_item, linked
from mm_assets.errors import SourceError
from mm_assets.rows.schema import METADATA_POSITION, RESERVED_COLUMNS
from mm_assets.rows.source_ref import SourceRef, parse_source_ref, source_ref_of
from mm_assets.view.backends.base import (
    NO_PICTURE,
    PAGE_SECONDS,
    SAMPLE_SECONDS,
    Backend,
    Entry,
    Picture,
    distinct,
    fingerprint,
    shortened,
)
from mm_assets.view.backends.cards import PICTURED_MODALITIES
from mm_assets.view.backends.references import References
from mm_assets.view.backends.row_files import ID_ROWS, RowFile

__all__ = ["RowsBackend"]

MAX_ROWS = 400  # of one sample that are shown
MAX_SHOWN = 400  # items of one sample
MAX_COLUMNS = 400  # in the head of the page
MAX_NAME = 200  # characters of their names
_SKIPPED = RESERVED_COLUMNS | {"path", "binary_content_size", "binary_content_crc32c"}


class RowsBackend(Backend):
    """The samples of a table: its rows with one `sample_id` after the other, or each row.

    Args:
        table: open; the backend closes its file.
        title: what the page calls it.
        references: opens what rows name.
        kind: what it is, in words.
    """

    def __init__(self, table: RowFile, title: str, references: References, kind: str = "table") -> None:
        super().__init__(title, kind)
        self._table = table
        self._references = references
        self._starts = array("q")  # the first row of each sample
        self._scanned = 0  # rows that have been assigned to samples
        self._last: object = None  # the id of the row before
        self._lock = threading.Lock()

    # --- which rows are a sample --------------------------------------------------------------------------------------

    def reach(self, count: int, seconds: float) -> None:
        """Assigns rows to samples until so many are known."""
        ends = time.monotonic() + seconds
        while len(self._starts) <= count and not self.is_complete and time.monotonic() < ends:
            with self._lock:
                self._scan()

    def _scan(self) -> None:
        if self._scanned >= self._table.num_rows:
            if not self._table.is_complete:
                self._table.reach()
            return
        stop = min(self._scanned + ID_ROWS, self._table.num_rows)
        for row, sample_id in enumerate(self._table.ids(self._scanned, stop), self._scanned):
            if sample_id is None or sample_id != self._last:
                self._starts.append(row)
            self._last = sample_id
        self._scanned = stop

    @property
    def is_complete(self) -> bool:
        """Whether every row belongs to a sample."""
        return self._table.is_complete and self._scanned >= self._table.num_rows

    def known(self) -> int:
        """Samples that are known to be whole, which the last one is only at the end."""
        return max(len(self._starts) - (0 if self.is_complete else 1), 0)

    def _rows(self, index: int) -> Sequence[Mapping[str, Any]]:
        start = self._starts[index]
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else self._scanned
        return self._table.rows(start, min(stop, start + MAX_ROWS))

    def ids(self, start: int, stop: int) -> Sequence[str]:
        """The ids of samples; the number of its row where it has none."""
        if start >= stop:
            return []
        first = self._starts[start]
        found = self._table.ids(first, self._starts[stop - 1] + 1)
        return [_id_text(found[self._starts[n] - first], self._starts[n]) for n in range(start, stop)]

    # --- what is in it ------------------------------------------------------------------------------------------------

    def about(self) -> Mapping[str, Any]:
        """Rows and columns."""
        return {
            "rows": self._table.num_rows,
            "columns": [name[:MAX_NAME] for name in self._table.columns[:MAX_COLUMNS]],
        }

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """The cards of chosen samples."""
        found = []
        ends = time.monotonic() + PAGE_SECONDS
        for index in indices:
            self.check(index)
            if time.monotonic() > ends:
                note = f"It was not read: the rows before it took {PAGE_SECONDS:g} s."
                found.append(Entry(index=index, id=f"sample {index}", note=note))
                continue
            try:
                found.append(self._entry(index))
            except SourceError as error:  # one damaged row group must not hide the others
                found.append(Entry(index=index, id=f"sample {index}", note=str(error)))
        return found

    def _entry(self, index: int) -> Entry:
        rows = self._rows(index)
        pictured = _pictured(rows)
        text = next((shortened(text) for row in rows if (text := _text(row))), "")
        names = tuple(dict.fromkeys(str(row["modality"]) for row in rows if row.get("modality")))
        errors = [row["materialize_error"] for row in rows if row.get("materialize_error")]
        return Entry(
            index=index,
            id=_id_text(rows[0].get("sample_id"), self._starts[index]),
            text=text,
            names=names or tuple(name for name, value in rows[0].items() if value is not None),
            picture="" if pictured is None else self._identity(index, pictured),
            note=str(errors[0]) if errors else "",
        )

    def picture(self, index: int) -> Picture:
        """The first media of a kind that has one."""
        self.check(index)
        rows = self._rows(index)
        place = _pictured(rows)
        if place is None:
            return NO_PICTURE
        item = partial(self._read_media, rows[place], "picture")
        return Picture(identity=self._identity(index, place), items=(item,))

    def identity(self, index: int) -> str:
        """Follows from the file as it was opened."""
        self.check(index)
        return self._identity(index, -1)

    def _identity(self, index: int, row: int) -> str:
        file = self._table.file
        return fingerprint(file.identity, file.fingerprint, self._starts[index], row)

    def items(self, index: int) -> tuple[Item, ...]:
        """The rows of a sample in order, each as its text or its media, and its further columns."""
        self.check(index)
        items: list[Item] = []
        rows = self._rows(index)
        ends, note = time.monotonic() + SAMPLE_SECONDS, ""
        for place, row in enumerate(rows):
            if time.monotonic() > ends:
                note = f"{len(rows) - place:,} more rows are not shown: those before them took {SAMPLE_SECONDS:g} s."
                break
            prefix = (
                "" if len(rows) == 1 or row.get("position") == METADATA_POSITION else f"{row.get('position', place)} "
            )
            items += self._row_items(row, prefix)
        left = len(items) - MAX_SHOWN
        note = f"{left:,} more values. {note}".strip() if left > 0 else note
        shown = linked(distinct(items[:MAX_SHOWN]))
        return (*shown, Item(name="…", kind="unreadable", note=note)) if note else shown

    def _row_items(self, row: Mapping[str, Any], prefix: str) -> list[Item]:
        modality = str(row.get("modality") or "content")
        items = []
        if row.get("position") == METADATA_POSITION and row.get("metadata_json") is not None:
            items.append(column_item("metadata", _parsed(row["metadata_json"])))
        elif row.get("text_content") is not None:
            items.append(column_item(f"{prefix}{modality}", row["text_content"]))
        elif _has_media(row):
            items.append(self._media_item(row, f"{prefix}{modality}"))
        if row.get("materialize_error"):
            items.append(Item(name=f"{prefix}error", kind="unreadable", note=str(row["materialize_error"])))
        own = {name: value for name, value in row.items() if name not in _SKIPPED and value is not None}
        if not _is_of_schema(row):
            own = {
                name: value for name, value in row.items() if value is not None and name not in ("path", "source_ref")
            }
            own.pop("sample_id", None)
        items += [column_item(f"{prefix}{name}", _listed(value)) for name, value in own.items()]
        return items

    def _media_item(self, row: Mapping[str, Any], name: str) -> Item:
        try:
            return self._read_media(row, name)
        except SourceError as error:
            return Item(name=name, kind="unreadable", note=str(error))

    def _read_media(self, row: Mapping[str, Any], name: str) -> Item:
        content_type = row.get("content_type")
        claimed = content_type if isinstance(content_type, str) else None
        content = row.get("binary_content")
        if isinstance(content, bytes):
            return content_item(name, Content.of(content), claimed)
        return content_item(name, self._references.content(_reference(row, self._table.file.url)), claimed)

    def close(self) -> None:
        """Closes the table and what its rows name."""
        self._table.file.close()
        self._references.close()


def _id_text(sample_id: object, row: int) -> str:
    return f"row {row}" if sample_id is None else str(sample_id)


def _is_of_schema(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a stage's table, and not of any other."""
    return "modality" in row and "position" in row


def _text(row: Mapping[str, Any]) -> str:
    if _is_of_schema(row):
        return str(row["text_content"]) if row.get("text_content") else ""
    values = [row[name] for name in ("text", "caption", "text_content", "title") if isinstance(row.get(name), str)]
    values += [value for name, value in row.items() if isinstance(value, str) and name != "sample_id"]
    return str(values[0]) if values else ""


def _pictured(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The row whose media are a sample's picture."""
    for modality in PICTURED_MODALITIES:
        for place, row in enumerate(rows):
            if row.get("modality") == modality and _has_media(row):
                return place
    return next((place for place, row in enumerate(rows) if "modality" not in row and _has_media(row)), None)


def _has_media(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("binary_content"), bytes):
        return True
    if _is_of_schema(row):
        return row.get("source_ref") is not None and row.get("text_content") is None
    return isinstance(row.get("path"), str) or row.get("source_ref") is not None


def _reference(row: Mapping[str, Any], table: str) -> SourceRef:
    """The locator of a row; a relative path is one from the table's folder."""
    found = row.get("source_ref")
    if found is not None:
        return source_ref_of(found) if isinstance(found, Mapping) else parse_source_ref(found)
    path = str(row["path"])
    if "://" in path or path.startswith("/"):
        return SourceRef(path)
    return SourceRef(f"{table.rpartition('/')[0]}/{path}")


def _parsed(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _listed(value: object) -> object:
    """A value whose JSON is shown as a tree, where a column holds JSON as text."""
    is_json = isinstance(value, str) and value[:1] in ("{", "[") and len(value) < 1 << 20
    return _parsed(value) if is_json else value
