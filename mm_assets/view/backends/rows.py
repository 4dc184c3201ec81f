"""Shows rows as samples: of a file that is not packed, a stage's table, a list of files, or any table."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from mm_assets.display import Content, Item, column_item, content_item, linked
from mm_assets.errors import SourceError
from mm_assets.media.content_types import content_type_of_name
from mm_assets.rows.schema import METADATA_POSITION, MULTIMODAL_SCHEMA, SOURCE_SCHEMA
from mm_assets.rows.source_ref import SourceRef, parse_source_ref, source_ref_of
from mm_assets.sources.compressed import content_name
from mm_assets.sources.member import plain_name, split_member_name
from mm_assets.storage.files import SourceFile
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
from mm_assets.view.backends.cards import MAX_CANDIDATES, PICTURED_MODALITIES, text_of
from mm_assets.view.backends.references import References, below
from mm_assets.view.backends.row_files import ID_ROWS, RowFile
from mm_assets.view.backends.source_rows import SourceRows

__all__ = ["RowsBackend", "open_source"]

MAX_ROWS_PER_SAMPLE = 400
MAX_ITEMS_PER_SAMPLE = 400
MAX_COLUMNS = 400  # in the head of the page
MAX_NAME = 200  # characters of a column's name there
MAX_ROWS_PER_CARD = 40
MAX_REJECTS_PER_SAMPLE = 40
CARD_TEXT = 16 << 10  # characters of a JSON or table whose words a card may show
SCAN_SECONDS = 0.1  # for rows that no request waits for
_TEXT_COLUMNS = ("text", "caption", "text_content", "title")
_NOT_VALUES = frozenset({"path", "source_ref", "sample_id"})  # columns of a table of another program
_SKIPPED = {*MULTIMODAL_SCHEMA.names, "path", "binary_content_size", "binary_content_crc32c"}


class RowsBackend(Backend):
    """The samples of a table: its rows with one `sample_id`, or each row.

    Args:
        table: open; the backend closes its file.
        title: what the page calls it.
        is_allowed: whether a row may name a path or URL beside its own file.
        storage_options: arguments for the file system of what rows name.
        kind: what it is, as text.
    """

    def __init__(
        self,
        table: RowFile,
        title: str,
        is_allowed: Callable[[str], bool],
        storage_options: Mapping[str, Any] | None = None,
        kind: str = "table",
    ) -> None:
        super().__init__(title, kind)
        self._table = table
        self._references = References(table, is_allowed, storage_options)
        self._starts = array("q")  # the first row of each sample
        self._lengths = array("q")  # how many of its rows are there without a gap
        self._later: dict[int, list[int]] = {}  # its other rows, by the number of the sample
        self._numbers: dict[int, int] = {}  # of samples, by the hash of their id
        self._num_scanned = 0  # rows that have been assigned to samples
        self._last_id: object = None
        self._number = -1  # of the last sample
        self._lock = threading.Lock()

    # --- which rows are a sample --------------------------------------------------------------------------------------

    def reach(self, count: int, seconds: float) -> None:
        """Assigns rows to samples until so many samples are known, and rows that the table has read anyway."""
        start = time.monotonic()
        while not self.is_complete:
            is_known = len(self._starts) > count
            if is_known and not (self._table.is_source and self._num_scanned < self._table.num_rows):
                return
            if time.monotonic() - start > (min(seconds, SCAN_SECONDS) if is_known else seconds):
                return
            with self._lock:
                self._scan()

    def _scan(self) -> None:
        if self._num_scanned >= self._table.num_rows:
            if not self._table.is_complete:
                self._table.reach()
            return
        stop = min(self._num_scanned + ID_ROWS, self._table.num_rows)
        for row, sample_id in enumerate(self._table.ids(self._num_scanned, stop), self._num_scanned):
            if sample_id is None or sample_id != self._last_id:
                self._number = self._sample_of(sample_id)
            if self._number == len(self._starts):
                self._lengths.append(1)
                self._starts.append(row)  # last: its length is the number of samples for other threads
            elif self._starts[self._number] + self._lengths[self._number] == row:
                self._lengths[self._number] += 1
            else:
                self._later.setdefault(self._number, []).append(row)
            self._last_id = sample_id
        self._num_scanned = stop

    def _sample_of(self, sample_id: object) -> int:
        """Returns the number of the sample of a row whose id differs from the id of the row before."""
        new = len(self._starts)
        # The hash of a text depends on a secret of the process, so that a file cannot contain ids that collide.
        return new if sample_id is None or not self._table.is_source else self._numbers.setdefault(hash(sample_id), new)

    @property
    def is_complete(self) -> bool:
        """Whether every row belongs to a sample."""
        return self._table.is_complete and self._num_scanned >= self._table.num_rows

    def known(self) -> int:
        """Returns the number of samples that are known to be whole: the last one may have more rows."""
        return max(len(self._starts) - (0 if self.is_complete else 1), 0)

    def _num_rows(self, index: int) -> int:
        return self._lengths[index] + len(self._later.get(index, ()))

    def _rows(self, index: int, limit: int) -> list[Mapping[str, Any]]:
        """Returns rows of a sample, up to the limit, without a metadata row that is empty."""
        start = self._starts[index]
        rows = list(self._table.rows(start, start + min(self._lengths[index], limit)))
        for row in self._later.get(index, ())[: limit - len(rows)]:
            rows += self._table.rows(row, row + 1)
        return [row for row in rows if not _is_metadata(row) or row.get("metadata_json") is not None] or rows

    def ids(self, start: int, stop: int) -> Sequence[str]:
        """Returns the ids of samples; for a sample without an id, the number of its row."""
        if start >= stop:
            return []
        first = self._starts[start]
        ids = self._table.ids(first, self._starts[stop - 1] + 1)
        return [_id_text(ids[row - first], row) for row in self._starts[start:stop]]

    # --- what is in it ------------------------------------------------------------------------------------------------

    def about(self) -> Mapping[str, Any]:
        """Returns the number of rows, the columns and the size of the file."""
        return {
            "rows": self._table.num_rows,
            "columns": [name[:MAX_NAME] for name in self._table.columns[:MAX_COLUMNS]],
            "bytes": self._table.file.size,
        }

    def note(self) -> str:
        """Returns the note of the table."""
        return self._table.note()

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """Returns the cards of samples."""
        entries = []
        refs: list[SourceRef] = []
        end = time.monotonic() + PAGE_SECONDS
        for index in indices:
            self.check(index)
            if time.monotonic() > end:
                note = f"It was not read: the rows before it took {PAGE_SECONDS:g} s."
                entries.append(Entry(index=index, id=f"sample {index}", note=note))
                continue
            try:
                rows = self._rows(index, MAX_ROWS_PER_CARD)
                entries.append(self._entry(index, rows))
                refs += self._refs(_rows_with_picture(rows)[:1])
            except SourceError as error:  # one damaged row group must not hide the others
                entries.append(Entry(index=index, id=f"sample {index}", note=str(error)))
        self._references.expect(refs)
        return entries

    def _entry(self, index: int, rows: Sequence[Mapping[str, Any]]) -> Entry:
        names = tuple(dict.fromkeys(filter(None, _names(rows, numbered=False))))
        errors = [row["materialize_error"] for row in rows if row.get("materialize_error")]
        return Entry(
            index=index,
            id=_id_text(rows[0].get("sample_id"), self._starts[index]),
            text=shortened(_text(rows)),
            names=names or tuple(name for name, value in rows[0].items() if value is not None),
            picture=self._picture_of(index, rows).identity,
            note=str(errors[0]) if errors else "",
        )

    def picture(self, index: int) -> Picture:
        """Returns the picture of the first media that may have one."""
        self.check(index)
        return self._picture_of(index, self._rows(index, MAX_ROWS_PER_CARD))

    def _picture_of(self, index: int, rows: Sequence[Mapping[str, Any]]) -> Picture:
        candidates = _rows_with_picture(rows)
        if not candidates:
            return NO_PICTURE
        items = tuple(partial(self._read_media, row, "picture") for row in candidates)
        places = (row.get("source_ref") or row.get("position") for row in candidates)
        return Picture(identity=self._identity(index, *places), items=items)

    def identity(self, index: int) -> str:
        """Returns a digest of the file as it was opened and of the number of rows that are known."""
        self.check(index)
        return self._identity(index, self._num_rows(index))

    def _identity(self, index: int, *facts: object) -> str:
        file = self._table.file
        return fingerprint(file.identity, file.fingerprint, self._starts[index], *facts)

    def items(self, index: int) -> tuple[Item, ...]:
        """Returns the rows of a sample in order, each as its text or media and its other columns, then its rejects.

        A text of the sample's JSON is shown with the JSON alone, and the frames of an image are one item.
        """
        self.check(index)
        rows = self._rows(index, MAX_ROWS_PER_SAMPLE)
        self._references.expect(self._refs(rows))
        items: list[Item] = []
        refs_with_item: set[SourceRef] = set()
        document = _document(rows)
        end, note = time.monotonic() + SAMPLE_SECONDS, ""
        more = self._num_rows(index) - MAX_ROWS_PER_SAMPLE
        for place, (row, name) in enumerate(zip(rows, _names(rows), strict=True)):
            if time.monotonic() > end:
                more = len(rows) - place + max(more, 0)
                note = f"{more:,} more rows are not shown: the rows before them took {SAMPLE_SECONDS:g} s."
                break
            refs = self._refs([row])
            is_repeated = not refs_with_item.isdisjoint(refs)
            is_in_document = self._table.is_source and document is not None and row.get("source_ref") == document
            if is_repeated or (is_in_document and row.get("text_content") is not None):
                continue
            refs_with_item.update(refs)
            is_alone = len(rows) == 1 or _is_metadata(row)
            items += self._row_items(row, name, "" if is_alone else f"{row.get('position', place)} ")
        if not note and more > 0:
            note = f"{more:,} more rows."
        key = _key(rows)
        rejects = self._table.rejects(self.sample_id(index))[:MAX_REJECTS_PER_SAMPLE]
        items += [self._reject_item(ref, reason, key) for ref, reason in rejects]
        more = len(items) - MAX_ITEMS_PER_SAMPLE
        note = f"{more:,} more values. {note}".strip() if more > 0 else note
        end_item = [Item(name="…", kind="unreadable", note=note)] if note else []
        return (*linked(distinct(items[:MAX_ITEMS_PER_SAMPLE])), *end_item)

    def _refs(self, rows: Iterable[Mapping[str, Any]]) -> list[SourceRef]:
        """Returns what the media among some rows name, without the number of a frame."""
        refs = []
        for row in rows:
            if _has_media(row) and not isinstance(row.get("binary_content"), bytes):
                with suppress(SourceError):  # its item reports the error
                    refs.append(_reference(row, self._table.file.url)._replace(frame_index=None))
        return refs

    def _row_items(self, row: Mapping[str, Any], name: str, prefix: str) -> list[Item]:
        items = []
        text, content_type = row.get("text_content"), row.get("content_type")
        if _is_metadata(row) and isinstance(row.get("metadata_json"), str):
            items.append(content_item(name, _content_of(row["metadata_json"]), "application/json"))
        elif isinstance(text, str):
            claimed = content_type if isinstance(content_type, str) else "text/plain"
            items.append(content_item(name, _content_of(text), claimed))
        elif _has_media(row):
            items.append(self._media_item(row, name))
        if row.get("materialize_error"):
            items.append(Item(name=f"{prefix}error", kind="unreadable", note=str(row["materialize_error"])))
        is_of_schema = _is_of_schema(row)
        skipped = _SKIPPED if is_of_schema else _NOT_VALUES
        own = {
            key: value
            for key, value in row.items()
            if key not in skipped
            and value is not None
            and not (is_of_schema and key in SOURCE_SCHEMA.names and isinstance(value, Mapping))  # as source_ref
        }
        return [*items, *(column_item(f"{prefix}{key}", _parsed_json(value)) for key, value in own.items())]

    def _media_item(self, row: Mapping[str, Any], name: str) -> Item:
        try:
            return self._read_media(row, name)
        except SourceError as error:
            return Item(name=name, kind="unreadable", note=str(error))

    def _reject_item(self, ref: SourceRef, reason: str, key: str) -> Item:
        """Returns a member that became no row, with the reason."""
        member = ref.member or ""
        name = _label(member, key) or "content"
        try:
            item = content_item(name, self._references.content(ref), content_type_of_name(content_name(member)))
        except SourceError as error:
            item = Item(name=name, kind="unreadable", note=str(error))
        return replace(item, note=f"It becomes no row: {reason}. {item.note}".strip())

    def _read_media(self, row: Mapping[str, Any], name: str) -> Item:
        content_type = row.get("content_type")
        claimed = content_type if isinstance(content_type, str) else None
        content = row.get("binary_content")
        if isinstance(content, bytes):
            return content_item(name, Content.of(content), claimed)
        return content_item(name, self._references.content(_reference(row, self._table.file.url)), claimed)

    def end_reading(self) -> None:
        """Ends the thread that reads the table."""
        self._table.end_reading()

    def close(self) -> None:
        """Closes the table and what its rows name."""
        self._table.close()
        self._references.close()


def open_source(
    file: SourceFile,
    title: str,
    options: Mapping[str, Any] | None = None,
    allowed: Iterable[str] = (),
    *,
    kind: str = "shard",
) -> RowsBackend:
    """Opens a file in any format that the pipeline reads; arguments and errors as `RowsBackend`, `SourceRows`.

    Its rows may name files below the folders of its source and below the prefixes in `allowed`.
    """
    table = SourceRows(file)
    return RowsBackend(table, title, below((*table.folders, *allowed)), options, kind)


def _id_text(sample_id: object, row: int) -> str:
    return f"row {row}" if sample_id is None else str(sample_id)


def _is_of_schema(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a stage's table, and not of any other."""
    return "modality" in row and "position" in row


def _is_metadata(row: Mapping[str, Any]) -> bool:
    return row.get("position") == METADATA_POSITION


# --- names ------------------------------------------------------------------------------------------------------------


def _member(row: Mapping[str, Any]) -> str | None:
    """Returns the member of a shard from which a row of a stage's table was made."""
    if not _is_of_schema(row) or not isinstance(row.get("source_ref"), str):
        return None
    with suppress(SourceError):
        return parse_source_ref(row["source_ref"]).member
    return None


def _document(rows: Sequence[Mapping[str, Any]]) -> object:
    """Returns the locator of a sample's JSON, which its texts may have too."""
    return next((row.get("source_ref") for row in rows if _is_metadata(row)), None)


def _key(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the key that the names of the sample's members begin with."""
    return next((split_member_name(member)[0] for row in rows if (member := _member(row))), "")


def _names(rows: Sequence[Mapping[str, Any]], *, numbered: bool = True) -> list[str]:
    """Returns a name for each row: its member, or its modality with its position if there are several rows."""
    key, document = _key(rows), _document(rows)
    names = []
    for place, row in enumerate(rows):
        is_metadata = _is_metadata(row)
        member = _member(row) if is_metadata or row.get("source_ref") != document else None
        modality = row.get("modality")
        name = _label(member, key) if member else str(modality) if modality else "content" if numbered else ""
        is_numbered = numbered and not member and not is_metadata and len(rows) > 1
        names.append(f"{row.get('position', place)} {name}" if is_numbered else name)
    return names


def _label(member: str, key: str) -> str:
    """Returns the part of a member's name after the key, or its name if nothing follows the key."""
    name = plain_name(member)
    return name.removeprefix(key).removeprefix(".") or name


# --- cards ------------------------------------------------------------------------------------------------------------


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the words of a card: captions before tables, and JSON last."""
    pairs = ((row.get("text_content"), str(row.get("content_type")).partition(";")[0]) for row in rows)
    texts = [(text, kind) for text, kind in pairs if isinstance(text, str)] if _is_of_schema(rows[0]) else []
    texts.sort(key=lambda pair: 2 if pair[1] == "application/json" else pair[1] in ("text/csv", "application/yaml"))
    texts += [(row["metadata_json"], "application/json") for row in rows if isinstance(row.get("metadata_json"), str)]
    for text, kind in texts:
        if kind in ("text/plain", "None"):
            words = text
        else:
            words = text_of(content_item("text", _content_of(text), kind)) if len(text) <= CARD_TEXT else ""
        if words.strip():
            return words
    if _is_of_schema(rows[0]):
        return ""
    values = [row[name] for row in rows for name in _TEXT_COLUMNS if isinstance(row.get(name), str)]
    values += [value for row in rows for name, value in row.items() if isinstance(value, str) and name != "sample_id"]
    return next(filter(None, values), "")


def _rows_with_picture(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows whose media may be a sample's picture, the best one first."""
    with_media = [row for row in rows if _has_media(row)]
    candidates = [row for modality in PICTURED_MODALITIES for row in with_media if row.get("modality") == modality]
    return (candidates or [row for row in with_media if "modality" not in row])[:MAX_CANDIDATES]


def _has_media(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("binary_content"), bytes):
        return True
    if _is_of_schema(row):
        return row.get("source_ref") is not None and row.get("text_content") is None
    return isinstance(row.get("path"), str) or row.get("source_ref") is not None


def _reference(row: Mapping[str, Any], table: str) -> SourceRef:
    """Returns the locator of a row; a relative path starts at the table's folder."""
    ref = row.get("source_ref")
    if ref is not None:
        return source_ref_of(ref) if isinstance(ref, Mapping) else parse_source_ref(ref)
    path = str(row["path"])
    if "://" in path or path.startswith("/"):
        return SourceRef(path)
    return SourceRef(f"{table.rpartition('/')[0]}/{path}")


def _content_of(text: str) -> Content:
    return Content.of(text.encode("utf-8", "backslashreplace"))


def _parsed_json(value: object) -> object:
    """Returns the value of a column, parsed if it is JSON, so that it is shown as a tree."""
    if not (isinstance(value, str) and value[:1] in ("{", "[") and len(value) < 1 << 20):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
