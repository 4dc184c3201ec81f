"""A list of files as a source: a Parquet or JSONL table with a row per item, beside the media that it names.

Columns: `sample_id`; `source_ref` or `path` (relative to the list's folder); and, if needed, `modality`, `position`,
`text_content`, `metadata_json`; all further columns are user columns. A Parquet list may hold media itself, in cells
that are items of their rows (see `mm_assets.sources.parquet`). The rows of a sample follow each other. The list is not
trusted: its references must be in its folder or below an allowed prefix, and every row of it becomes a row or is named
in the rejects.
"""

from __future__ import annotations

import codecs
import json
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, BinaryIO, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from mm_assets.errors import MissingColumnError, ShardError, SourceError, first_line
from mm_assets.json_text import compact_member
from mm_assets.media.content_types import content_type_of_name
from mm_assets.rows.columns import MemberIndex, Origin, RowBuilder, RowStream, sample_id_of
from mm_assets.rows.schema import (
    METADATA_POSITION,
    MODALITIES,
    RESERVED_COLUMNS,
    DatasetSchema,
    MemberRules,
)
from mm_assets.rows.source_ref import SourceRef, is_allowed_reference, is_reference, parse_source_ref, source_ref_of
from mm_assets.sources.base import Source
from mm_assets.sources.compressed import content_name
from mm_assets.sources.encodings import Decoded
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.member import MODALITY_OF_EXTENSION, Member, split_member_name
from mm_assets.sources.parquet import (
    PARQUET_ERRORS,
    PARQUET_MAGIC,
    ParquetSource,
    cell_columns,
    dump_values,
    json_rows,
)
from mm_assets.sources.samples import modality_of
from mm_assets.sources.text_members import BadTextError, ParsedObject, decode_text, parse_object, stored_text
from mm_assets.storage.files import SourceFile
from mm_assets.summaries import counted

__all__ = ["ListingRows"]

_OWN = frozenset({"path"}) | RESERVED_COLUMNS
_MEDIA_COLUMNS = frozenset({"bytes", "binary_content"}).union(
    *((extension, modality) for extension, modality in MODALITY_OF_EXTENSION.items() if modality != "text")
)
"""Columns of plain bytes that are media: one of any other name may be a digest."""
_JSON = "metadata_json"  # the column of a sample's JSON
BATCH_ROWS = 1024
MAX_POSITION = 2**31 - 1  # positions are int32

Line = Mapping[str, Any] | BadTextError


def _lines(
    source: SourceFile, layout: MemberRules, encodings: Counter[str], note_repairs: Callable[[ParsedObject], None]
) -> Iterator[Line]:
    """Each row of the list as keys and values, or why it cannot be parsed; `ShardError` if it is something else.

    `encodings` counts the lines that are not UTF-8, `note_repairs` takes each line in JSON.
    """
    head = source.read(0, min(HEAD_BYTES, source.size))
    if head.startswith(PARQUET_MAGIC):
        yield from _values(source)
        return
    wide = _wide_encoding(head)
    foreign = None if wide else foreign_file(head)
    if foreign is not None and foreign.kind not in ("json", "text", "empty"):
        raise ShardError(source.url, foreign.as_not("a list of files"), byte_offset=0)
    limit = layout.max_text_bytes
    with source.stream() as stream:
        for line in _split(stream, "\n".encode(wide or "utf-8"), limit):
            if line is None:
                yield BadTextError("too_large", f"the line holds more than {limit} bytes")
            elif line.strip():
                try:
                    text, encoding = _decoded_line(line, wide, layout.encoding)
                    if encoding is not None and not text.strip(" \t\r\n\v\f"):
                        continue  # blanks in UTF-16 or UTF-32
                    encodings.update(filter(None, [encoding]))
                    yield _row_of(text, note_repairs)
                except BadTextError as error:
                    yield error


def _values(source: SourceFile) -> Iterator[Mapping[str, Any]]:
    """The rows of a Parquet list, without the columns that hold media."""
    try:
        file = pq.ParquetFile(source.open(), page_checksum_verification=True)
        cells = cell_columns(file.schema_arrow)
        columns = [name for name in file.schema_arrow.names if name not in cells]
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            yield from json_rows(batch)  # which finds texts that are not UTF-8
    except SourceError:
        raise
    except PARQUET_ERRORS as error:
        raise SourceError(source.url, f"is not a readable Parquet list: {first_line(error)}") from error


def _wide_encoding(head: bytes) -> str | None:
    """The UTF-16 or UTF-32 that a list is in, by its byte order mark or by its first characters, which are ASCII."""
    found: str = json.detect_encoding(head)
    if found.startswith("utf-8"):
        return None
    if found in ("utf-16", "utf-32"):  # with a mark, which only the first line has
        found += "-le" if head.startswith(codecs.BOM_UTF16_LE) else "-be"
    text = str(head, found, "replace").lstrip("\ufeff \t\r\n")
    return found if text.startswith(("{", "[")) else None  # NULs are in files of any kind


def _split(stream: BinaryIO, newline: bytes, limit: int) -> Iterator[bytes | None]:
    """The lines of a list, each with its line end; None for one of more than `limit` bytes.

    Args:
        stream: the list, at its start.
        newline: a line end in the list's encoding; a character begins at multiples of its length.
        limit: bytes of a line.
    """
    unit = len(newline)
    held = bytearray()  # of a line whose characters have bytes that are a line end of ASCII
    skipping = False
    while part := stream.readline(limit + 1):
        if unit > 1:
            part += stream.read(-len(part) % unit)
        ends = part.endswith(newline)
        if ends and not held and not skipping and len(part) <= limit:
            yield part
            continue
        skipping = skipping or len(held) + len(part) > limit
        if skipping:
            held.clear()
        else:
            held += part
        if ends:
            yield None if skipping else bytes(held)
            held.clear()
            skipping = False
    if skipping or held:
        yield None if skipping else bytes(held)


def _decoded_line(line: bytes, wide: str | None, declared: str) -> Decoded:
    """The text of a line, in the UTF-16 or UTF-32 that the list is in, else in UTF-8 or as declared."""
    if wide is not None:
        return Decoded(stored_text(line, wide), wide)
    return decode_text(line, "utf-8" if declared == "auto" else declared)


def _row_of(text: str, note_repairs: Callable[[ParsedObject], None]) -> Mapping[str, Any]:
    parsed = parse_object(text)
    note_repairs(parsed)
    if isinstance(parsed.value.get(_JSON), dict):  # numbers as they are written
        return {**parsed.value, _JSON: compact_member(parsed.text, _JSON)}
    return parsed.value


class ListingRows:
    """The rows of a list of files; see `mm_assets.rows.base.TableSource`."""

    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet", ".jsonl", ".ndjson")
    sources: Sequence[Source] = ()

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self.folders = (file.url.rsplit("/", 1)[0] + "/",)

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether the bytes are those of a Parquet file; JSON lines are determined by their name."""
        return head.startswith(PARQUET_MAGIC)

    def objects(self, *, layout: MemberRules) -> Iterator[Mapping[str, Any]]:
        """Each row of the list without the columns that the pipeline knows; see `TableSource`."""
        known = _OWN.difference(layout.user_columns or ())
        for line in _lines(self.file, layout, Counter(), lambda _: None):
            if not isinstance(line, BadTextError):
                yield {key: value for key, value in line.items() if key not in known}

    def rows(
        self,
        index: MemberIndex,
        *,
        layout: MemberRules,
        schema: DatasetSchema,
        grouped: bool = False,
        batch_bytes: int = 16 << 20,
    ) -> RowStream:
        """The list as rows, which are made while they are read; arguments and errors as `RowSource.rows`.

        A sample's metadata row carries the `metadata_json` of its list rows, the first that has one. A user column is
        filled on the row that has the value. `index` is not read, since a list has no members, and `grouped` changes
        nothing, since the list names its samples. A required column that is in no row raises `SourceError`.
        """
        builder = _ListingBuilder(self.file, self.folders[0], layout, schema, batch_bytes)
        return RowStream(builder.batches(), builder.rejects, builder.counts, builder.notes, builder.kept)


_ListedItem = tuple[int, str, SourceRef, str | None, str, Mapping[str, Any]]
"""Position, modality, locator, text, the name that shows the content type, list row."""
_Cells = Sequence[Member]  # of a list row


class _ListingBuilder(RowBuilder):
    def __init__(
        self, source: SourceFile, folder: str, layout: MemberRules, schema: DatasetSchema, batch_bytes: int
    ) -> None:
        super().__init__(layout, schema, batch_bytes)
        self.source = source
        self.folder = folder
        self.allowed = (folder, *layout.prefixes)
        self.modalities = MODALITIES.union(layout.extensions.values())
        self.known = _OWN.union(c.source for c, _ in self.user)
        self.missing = {c.source for c, _ in self.user if c.required}
        self.seen: set[str] = set()
        self.encodings: Counter[str] = Counter()  # of lines that are not UTF-8
        self.unread: list[str] = []  # columns of bytes

    def batches(self) -> Iterator[pa.RecordBatch]:
        for sample_id, group in groupby(self._checked(), key=lambda entry: entry[0]):
            self._sample(sample_id, [entry[1:] for entry in group])
            if self.full:
                yield from self.take()
        yield from self.take()
        self.note_columns()
        if self.unread:
            columns = ", ".join(map(repr, self.unread))
            remedy = (
                "call the column of the media bytes, or set source: parquet, so that each row is a sample with them"
            )
            self.notes.append(f"{self.source.url}: the bytes in column {columns} are not read: {remedy}")
        for encoding, count in sorted(self.encodings.items()):
            self.counts[f"encoding.{encoding}"] += count
            self.notes.append(f"{self.source.url}: {counted(count, 'line')} read as {encoding}")
        if not self.counts["members"]:
            self.rejects.add(self.source.url, reason="empty_shard", detail="the list has no rows", stage="index")
        if self.missing and self.counts["rows"]:
            detail = f"no row has the column {min(self.missing)!r}, which is required"
            raise MissingColumnError(self.source.url, detail)

    def _note_line(self, parsed: ParsedObject) -> None:
        self.origin = Origin(self.source.url, sample_id_of(parsed.value.get("sample_id")))
        self.note_repairs(parsed)

    def _reject(
        self,
        number: int,
        reason: str,
        detail: str,
        row: Mapping[str, Any] | None = None,
        cell: Member | None = None,
    ) -> None:
        sample_id, path = (row.get("sample_id"), row.get("path")) if row is not None else (None, None)
        path = path if cell is None else cell.member
        self.rejects.add(
            self.source.url,
            reason=reason,
            detail=f"row {number} of the list: {detail}",
            sample_id=sample_id_of(sample_id),
            member=path if isinstance(path, str) else None,
        )

    def _lines(self) -> Iterator[tuple[Line, _Cells]]:
        """The list's rows, each with the media in it."""
        if ListingRows.accepts(self.source.read(0, min(len(PARQUET_MAGIC), self.source.size))):
            table = ParquetSource(self.source)
            media = [name for name, is_named in table.columns.items() if is_named or name in _MEDIA_COLUMNS]
            self.unread = [name for name in table.columns if name not in media]
            if media:
                yield from table.listed(media)
                return
        for line in _lines(self.source, self.layout, self.encodings, self._note_line):
            yield line, ()

    def _checked(self) -> Iterator[tuple[str, int, Mapping[str, Any], _Cells]]:
        """The list's rows that name a sample, each after its sample's id and its number, from 0."""
        for number, (line, cells) in enumerate(self._lines()):
            self.counts["members"] += 1
            if isinstance(line, BadTextError):
                self._reject(number, line.reason, line.detail)
            elif (sample_id := sample_id_of(line.get("sample_id"))) is None:
                self._reject(number, "no_sample_id", "its sample_id is neither text nor a whole number", line)
            else:
                self.missing -= line.keys()
                yield sample_id, number, line, cells

    def _sample(self, sample_id: str, entries: Sequence[tuple[int, Mapping[str, Any], _Cells]]) -> None:
        if sample_id in self.seen:
            for number, row, _ in entries:
                detail = "its sample has earlier rows; the rows of a sample must be consecutive"
                self._reject(number, "duplicate_sample_id", detail, row)
            return
        self.seen.add(sample_id)
        items: list[_ListedItem] = []
        metadata: tuple[str | None, Mapping[str, Any]] | None = None
        places: set[tuple[int, str]] = set()
        for number, row, cells in entries:
            for part, cell in self._parts(row, cells):
                try:
                    metadata_json = self._metadata(part)
                    if part.get("modality") == "metadata":
                        if cell is not None:
                            raise BadTextError("bad_modality", "a row of metadata holds bytes, which are an item")
                        if metadata is not None:
                            raise BadTextError("second_metadata", "the sample has a metadata row already")
                        metadata = metadata_json, part
                        continue
                    item = self._item(part, cell, len(items))
                    if item[:2] in places:
                        raise BadTextError("position_taken", f"position {item[0]} of {item[1]} is taken")
                except BadTextError as error:
                    self._reject(number, error.reason, error.detail, row, cell)
                    continue
                places.add(item[:2])
                items.append(item)
                if metadata is None and metadata_json is not None:
                    metadata = metadata_json, {}
        if not items and metadata is None:
            return
        self.counts["samples"] += 1
        self.origin = Origin(self.source.url, sample_id)
        text, row = metadata if metadata is not None else (None, {})
        content_type = None if text is None else "application/json"
        self.append(sample_id, METADATA_POSITION, "metadata", content_type=content_type, metadata_json=text)
        self._fill(row)
        for position, modality, ref, content, name, row in sorted(items, key=lambda item: item[0]):
            declared = row.get("content_type")
            guessed = (
                content_type_of_name(content_name(name)) if name else ("text/plain" if modality == "text" else None)
            )
            self.append(
                sample_id,
                position,
                modality,
                content_type=declared if isinstance(declared, str) else guessed,
                text=content,
                source_ref=None if ref.path is None else ref.to_json(),
            )
            self._fill(row)

    def _fill(self, row: Mapping[str, Any]) -> None:
        self.note_unknown(row.keys() - self.known)
        self.fill_all(self.user, row)

    def _metadata(self, row: Mapping[str, Any]) -> str | None:
        value = row.get(_JSON)
        if value is None:
            return None
        if isinstance(value, dict):
            value = dump_values(value)
        if not isinstance(value, str):
            raise BadTextError("bad_json", f"{_JSON} is {type(value).__name__}, expected JSON text")
        parsed = parse_object(value)
        self.note_repairs(parsed)
        return parsed.text

    def _parts(self, row: Mapping[str, Any], cells: _Cells) -> Iterator[tuple[Mapping[str, Any], Member | None]]:
        """The items of a list row, each as a row of its own, with its cell: the text, and every cell.

        Where the row has bytes, the place that it names is not read, and the path is the name of the only cell.
        """
        names_file = bool(row.get("path") or row.get("source_ref"))
        if not cells or (names_file and all(cell.link_target is not None for cell in cells)):
            yield row, None
            return
        bare = {**row, "path": None, "source_ref": None}
        is_metadata = row.get("modality") == "metadata"
        if is_metadata or row.get("text_content") is not None:
            yield {**bare, "content_type": None}, None
        for cell in cells:
            if cell.link_target is None:
                name = row.get("path") if len(cells) == 1 else None
                yield {**bare, "text_content": None, "path": name}, cell
            elif not is_metadata:
                yield {**bare, "text_content": None, "path": cell.link_target}, None

    def _item(self, row: Mapping[str, Any], cell: Member | None, next_position: int) -> _ListedItem:
        text = row.get("text_content")
        if text is not None and not isinstance(text, str):
            raise BadTextError("bad_text", f"text_content is {type(text).__name__}, expected text")
        if cell is None:
            ref = self._ref(row)
            name = ref.member or ref.path or ""
        else:
            ref, name = SourceRef(path=self.source.url, member=cell.member), cell.member
            if isinstance(row.get("path"), str) and content_type_of_name(content_name(row["path"])) is not None:
                name = row["path"]
        modality = row.get("modality")
        if modality is None:
            modality = "text" if text is not None else self._modality(name)
        if not isinstance(modality, str) or modality not in self.modalities:
            detail = f"modality is {modality!a}, expected one of {', '.join(sorted(self.modalities))}"
            raise BadTextError("bad_modality", detail)
        if (modality == "text") != (text is not None):
            detail = "a text row has its text in text_content, and only a text row"
            raise BadTextError("no_text" if modality == "text" else "bad_text", detail)
        if modality != "text" and ref.path is None:
            raise BadTextError("no_source", "it names neither path nor source_ref, and holds no bytes")
        position = row.get("position")
        if position is None:
            position = next_position
        if isinstance(position, float) and position.is_integer():
            position = int(position)  # pandas writes a column of integers as floats if some are missing
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= MAX_POSITION:
            raise BadTextError("bad_position", f"position is {position!r}, expected 0 to {MAX_POSITION}")
        return position, modality, ref, text, name, row

    def _modality(self, name: str) -> str:
        extension = split_member_name(name)[2]
        modality = modality_of(extension, self.layout.extensions)
        return "binary" if modality == "text" else modality  # its text is not in the list, and nothing reads it

    def _ref(self, row: Mapping[str, Any]) -> SourceRef:
        path = row.get("path")
        if path is not None and not isinstance(path, str):
            raise BadTextError("bad_source", f"path is {type(path).__name__}, expected text")
        try:
            given = row.get("source_ref")
            ref = source_ref_of(given) if isinstance(given, dict) else parse_source_ref(given)
            if ref.path is None and path:
                ref = source_ref_of({"path": path})
        except SourceError as error:
            raise BadTextError("bad_source", error.detail) from error
        if ref.path is None:
            return ref
        target = ref.path if is_reference(ref.path) else posixpath.join(self.folder, ref.path)
        if not is_allowed_reference(target, self.allowed):
            raise BadTextError("outside", f"{ref.path!a} is outside the list's folder and the allowed prefixes")
        return ref._replace(path=target)
