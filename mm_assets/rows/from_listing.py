"""A list of files as a source: a Parquet, JSONL or CSV table with a row per item, beside the media that it names.

Columns: `sample_id`; `source_ref` or `path` (relative to the list's folder); and, if needed, `modality`, `position`,
`text_content`, `metadata_json`; all other columns are user columns. A table without `sample_id` has a row per sample,
with files, text and id in columns that are named as other tools name them (see `_sample_columns`). A Parquet list may
hold media itself, in cells that are items of their rows (see `mm_assets.sources.arrow_rows`). The rows of a sample are
consecutive. The list is not trusted: its references must be in its folder or below an allowed prefix, and each of its
rows becomes a row or a reject.
"""

from __future__ import annotations

import codecs
import csv
import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NamedTuple

import pyarrow as pa

from mm_assets.errors import LazyModule, MissingColumnError, ShardError, SourceError, first_line
from mm_assets.json_text import compact_member
from mm_assets.media.content_types import content_type_of_name
from mm_assets.rows.columns import MemberIndex, Origin, RowBuilder, RowStream, sample_id_of
from mm_assets.rows.schema import (
    METADATA_POSITION,
    MODALITIES,
    MULTIMODAL_SCHEMA,
    SOURCE_SCHEMA,
    DatasetSchema,
    MemberRules,
)
from mm_assets.rows.source_ref import SourceRef, is_allowed_reference, is_reference, parse_source_ref, source_ref_of
from mm_assets.sources.arrow_rows import cell_columns, json_rows
from mm_assets.sources.base import Source
from mm_assets.sources.compressed import content_name
from mm_assets.sources.encodings import Decoded
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.member import MODALITY_OF_EXTENSION, Member, split_member_name
from mm_assets.sources.parquet import PARQUET_ERRORS, PARQUET_MAGIC, ParquetSource
from mm_assets.sources.row_members import dump_values
from mm_assets.sources.samples import modality_of
from mm_assets.sources.text_members import BadTextError, ParsedObject, decode_text, parse_object, stored_text
from mm_assets.storage.files import SourceFile
from mm_assets.summaries import counted

if TYPE_CHECKING:
    import pyarrow.parquet as pq
else:
    pq = LazyModule("pyarrow.parquet")

__all__ = ["ListingRows", "delimiter_of"]

_LIST_COLUMNS = frozenset({"path", *MULTIMODAL_SCHEMA.names})
_MEDIA_COLUMNS = frozenset({"bytes", "binary_content"}).union(
    *((extension, modality) for extension, modality in MODALITY_OF_EXTENSION.items() if modality != "text")
)
"""Columns of plain bytes that are media: a column of any other name may be a digest."""
_JSON = "metadata_json"  # the column of a sample's JSON
_DELIMITERS = {".csv": ",", ".tsv": "\t"}  # the first row of such a table has the names of its columns
_FILE_NAMES = ("file_name", "file_names")  # in Hugging Face's folders, also after a name and an underscore
_FILES = (  # a column that names a file if the table has none of the others
    *("path", "file", "file_path", "filepath", "filename", "image", "image_path", "audio", "audio_path"),
    *("video", "video_path"),
)
_TEXTS = ("text_content", "text", "caption")
_IDS = ("id", "key", "__key__")
_ITEM_COLUMNS = frozenset({"source_ref", "modality", "position"})  # a table with one of them has a row per item
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
BATCH_ROWS = 1024
MAX_POSITION = 2**31 - 1  # positions are int32

Line = Mapping[str, Any] | BadTextError


def _lines(
    source: SourceFile, layout: MemberRules, encodings: Counter[str], note_repairs: Callable[[ParsedObject], None]
) -> Iterator[Line]:
    """Yields each row of the list as keys and values, or why it cannot be parsed; `ShardError` if it is not a list.

    `encodings` counts the lines that are not UTF-8; `note_repairs` is called with each line of JSON.
    """
    if _is_parquet(source):
        yield from _values(source)
        return
    head = source.read(0, min(HEAD_BYTES, source.size))
    wide = _wide_encoding(head, is_csv=delimiter_of(source) is not None)
    foreign = None if wide else foreign_file(head)
    if foreign is not None and foreign.kind not in ("json", "text", "empty"):
        raise ShardError(source.url, foreign.as_not("a list of files"), byte_offset=0)
    limit = layout.max_text_bytes
    if (delimiter := delimiter_of(source)) is not None:
        yield from _records(source, delimiter, wide, layout, encodings)
        return
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


def delimiter_of(source: SourceFile) -> str | None:
    """Returns the character between the values of a CSV table, by the name of the file; None for any other list."""
    return _DELIMITERS.get(posixpath.splitext(source.url.lower())[1])


def _is_parquet(source: SourceFile) -> bool:
    return ListingRows.accepts(source.read(0, min(len(PARQUET_MAGIC), source.size)))


class _TextLines:
    """The lines of a list as text, for `csv.reader`; a record may have several lines.

    If a record cannot be read, its other lines are skipped: it ends with the line after which its quotes are paired.

    Args:
        lines: the lines, each with its line end; None for a line that is too long.
        decode: returns a line as text.
        limit: bytes of the lines of one record.

    Raises:
        BadTextError: while iterating: the record is too long, or its encoding is unknown; the next one can be read.
    """

    def __init__(self, lines: Iterator[bytes | None], decode: Callable[[bytes], str], limit: int) -> None:
        self._lines = lines
        self._decode = decode
        self._limit = limit
        self.begin_record()

    def begin_record(self) -> None:
        """Starts to count the lines of the next record."""
        self._num_bytes = self._num_quotes = 0

    def __iter__(self) -> _TextLines:
        return self

    def __next__(self) -> str:
        line = self._count(next(self._lines))
        try:
            if self._num_bytes > self._limit:
                raise BadTextError("too_large", f"the row holds more than {self._limit} bytes")
            return self._decode(line)
        except BadTextError:
            while self._num_quotes % 2 and (more := next(self._lines, b"")) != b"":
                self._count(more)
            raise

    def _count(self, line: bytes | None) -> bytes:
        self._num_bytes += self._limit + 1 if line is None else len(line)
        self._num_quotes += 0 if line is None else line.count(b'"')
        return line or b""


def _records(
    source: SourceFile, delimiter: str, wide: str | None, layout: MemberRules, encodings: Counter[str]
) -> Iterator[Line]:
    """Yields the rows of a CSV table, without empty values; `ShardError` if its first row does not name the columns."""

    def decode(line: bytes) -> str:
        text, encoding = _decoded_line(line, wide, layout.encoding)
        encodings.update(filter(None, [encoding]))
        return text

    limit = layout.max_text_bytes
    csv.field_size_limit(max(csv.field_size_limit(), limit))  # a setting of the process
    with source.stream() as stream:
        lines = _TextLines(_split(stream, "\n".encode(wide or "utf-8"), limit), decode, limit)
        reader = csv.reader(lines, delimiter=delimiter)
        names: list[str] | None = None
        while True:
            lines.begin_record()
            try:
                fields = next(reader)
                if names is not None and len(fields) > len(names):
                    raise BadTextError("bad_csv", f"it has {len(fields)} values, the table has {len(names)} columns")
            except StopIteration:
                return
            except (BadTextError, csv.Error) as error:
                if names is None:
                    raise ShardError(source.url, f"has no names of columns: {error}", byte_offset=0) from error
                yield error if isinstance(error, BadTextError) else BadTextError("bad_csv", str(error))
                continue
            if names is None:
                names = [name.strip() for name in fields]
                if repeated := [name for name, number in Counter(filter(None, names)).items() if number > 1]:
                    detail = f"has several columns {repeated[0]!r}, expected the names of the columns in its first row"
                    raise ShardError(source.url, detail, byte_offset=0)
            elif fields:
                yield {name: value for name, value in zip(names, fields, strict=False) if name and value}


def _with_numbers(row: Mapping[str, Any], columns: Collection[str]) -> Mapping[str, Any]:
    """Returns a row of CSV in which the texts of some columns are replaced by the numbers that they stand for."""
    numbers = {name: json.loads(text) for name, text in row.items() if name in columns and _is_number(text)}
    return {**row, **numbers} if numbers else row


def _is_number(text: object) -> bool:
    return isinstance(text, str) and _NUMBER.fullmatch(text) is not None


class _SampleColumns(NamedTuple):
    """The columns of a table with a row per sample."""

    sample_id: str | None
    text: str | None
    files: tuple[str, ...]


@lru_cache(256)
def _sample_columns(names: tuple[str, ...]) -> _SampleColumns | None:
    """Returns what the columns of a table with a row per sample are; None if the table has a row per item."""
    by_name: dict[str, str] = {}
    for name in names:
        by_name.setdefault(name.lower(), name)  # LAION has URL and TEXT
    files = [name for name in names if name in _FILE_NAMES or name.endswith(tuple(f"_{end}" for end in _FILE_NAMES))]
    if not files:
        candidates = [by_name[name] for name in _FILES if name in by_name] or [*filter(None, [by_name.get("url")])]
        files = candidates if len(candidates) == 1 else [*filter(None, [by_name.get("path")])]
    has_id = "sample_id" in names
    if not _ITEM_COLUMNS.isdisjoint(names) or (has_id and (not files or "path" in names or "text_content" in names)):
        return None
    if has_id:
        return _SampleColumns("sample_id", None, tuple(files))
    return _SampleColumns(
        sample_id=next((by_name[name] for name in _IDS if name in by_name), None),
        text=next((by_name[name] for name in _TEXTS if name in by_name), None),
        files=tuple(files),
    )


def _item_rows(
    row: Mapping[str, Any], user_columns: Collection[str], *, default_id: str = "", prefix: str = ""
) -> Sequence[Mapping[str, Any]]:
    """Returns a row per item if a row is a whole sample; any other row as it is.

    Args:
        row: keys and values.
        user_columns: columns that stay in each row, although they are its id, text or files.
        default_id: id of a sample that has a text, but neither an id nor a file.
        prefix: what ids that follow from paths start with.
    """
    columns = _sample_columns(tuple(row))
    if columns is None:
        return [row]
    files: list[Any] = []
    for name in columns.files:
        value = row[name]
        files += value if isinstance(value, list) else [] if value is None else [value]
    text = None if columns.text is None else row[columns.text]
    if columns.sample_id is not None:
        sample_id = row[columns.sample_id]
    elif (path := next((file for file in files if isinstance(file, str)), None)) is not None:
        sample_id = _id_of_path(path, prefix)
    else:
        sample_id = None if text is None else default_id
    used = {columns.sample_id, columns.text, *columns.files}
    rest = {name: value for name, value in row.items() if name not in used or name in user_columns}
    rest["sample_id"] = sample_id
    texts = [] if text is None else [{**rest, "text_content": text}]
    return [*texts, *({**rest, "path": file} for file in files)] or [rest]


def _id_of_path(path: str, prefix: str) -> str:
    if is_reference(path):
        return posixpath.splitext(path.partition("?")[0])[0]
    return posixpath.join(prefix, posixpath.splitext(path)[0])


def _media_columns(table: ParquetSource) -> tuple[list[str], list[str]]:
    """Returns the columns of a Parquet list that hold media, and the columns of bytes that are not read."""
    media = [name for name, is_named in table.columns.items() if is_named or name in _MEDIA_COLUMNS]
    return media, [name for name in table.columns if name not in media]


def _values(source: SourceFile) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a Parquet list, without the columns that hold media."""
    try:
        file = pq.ParquetFile(source.open(), page_checksum_verification=True)
        cells = cell_columns(file.schema_arrow)
        columns = [name for name in file.schema_arrow.names if name not in cells]
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            yield from json_rows(batch)  # also detects texts that are not UTF-8
    except SourceError:
        raise
    except PARQUET_ERRORS as error:
        raise SourceError(source.url, f"is not a readable Parquet list: {first_line(error)}") from error


def _wide_encoding(head: bytes, *, is_csv: bool) -> str | None:
    """Returns the UTF-16 or UTF-32 of a list, by its byte order mark or, for JSON, by its first characters."""
    encoding: str = json.detect_encoding(head)
    if encoding.startswith("utf-8"):
        return None
    if encoding in ("utf-16", "utf-32"):  # with a mark, which only the first line has
        encoding += "-le" if head.startswith(codecs.BOM_UTF16_LE) else "-be"
        if is_csv:
            return encoding
    text = str(head, encoding, "replace").lstrip("\ufeff \t\r\n")
    return encoding if text.startswith(("{", "[")) else None  # files of any kind may contain NULs


def _split(stream: BinaryIO, newline: bytes, limit: int) -> Iterator[bytes | None]:
    """Yields the lines of a list, each with its line end; None for a line of more than `limit` bytes.

    Args:
        stream: the list, at its start.
        newline: a line end in the list's encoding; a character begins at multiples of its length.
        limit: bytes of a line.
    """
    unit = len(newline)
    start = bytearray()  # of a line whose characters contain the byte of an ASCII line end
    skipping = False
    while part := stream.readline(limit + 1):
        if unit > 1:
            part += stream.read(-len(part) % unit)
        ends = part.endswith(newline)
        if ends and not start and not skipping and len(part) <= limit:
            yield part
            continue
        skipping = skipping or len(start) + len(part) > limit
        if skipping:
            start.clear()
        else:
            start += part
        if ends:
            yield None if skipping else bytes(start)
            start.clear()
            skipping = False
    if skipping or start:
        yield None if skipping else bytes(start)


def _decoded_line(line: bytes, wide: str | None, declared: str) -> Decoded:
    """Returns the text of a line in the list's UTF-16 or UTF-32, else in UTF-8 or as declared."""
    if wide is not None:
        return Decoded(stored_text(line, wide), wide)
    return decode_text(line, "utf-8" if declared == "auto" else declared)


def _row_of(text: str, note_repairs: Callable[[ParsedObject], None]) -> Mapping[str, Any]:
    parsed = parse_object(text)
    note_repairs(parsed)
    if isinstance(parsed.value.get(_JSON), dict):  # numbers as they are written
        return {**parsed.value, _JSON: compact_member(parsed.text, _JSON)}
    return parsed.value


def _is_struct(key: str, value: object) -> bool:
    """Whether a value is null or repeats `source_ref` as a struct: a row table of a dataset may serve as a list."""
    if key not in SOURCE_SCHEMA.names:
        return False
    parts = {part.name for part in SOURCE_SCHEMA.field(key).type}
    return value is None or (isinstance(value, Mapping) and value.keys() == parts)


class ListingRows:
    """The rows of a list of files; see `mm_assets.rows.base.TableSource`.

    Attributes:
        prefix: what ids that follow from paths start with: the path of the list's folder below that of all shards.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet", ".jsonl", ".ndjson", *_DELIMITERS)
    sources: Sequence[Source] = ()

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self.folders = (file.url.rsplit("/", 1)[0] + "/",)
        self.prefix = ""

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether the bytes are those of a Parquet file; JSON lines and CSV are determined by their name."""
        return head.startswith(PARQUET_MAGIC)

    def objects(self, *, layout: MemberRules) -> Iterator[Mapping[str, Any]]:
        """Yields each row of the list without the columns of its items; see `TableSource`."""
        user_columns = layout.user_columns or ()
        item_columns = _LIST_COLUMNS.difference(user_columns)
        is_parquet = _is_parquet(self.file)
        holds_media = is_parquet and bool(_media_columns(ParquetSource(self.file))[0])
        lines = _lines(self.file, layout, Counter(), lambda _: None)
        rows: Iterator[Mapping[str, Any]] = (line for line in lines if not isinstance(line, BadTextError))
        numeric: Collection[str] = ()
        if not is_parquet and delimiter_of(self.file) is not None:
            first = list(islice(rows, BATCH_ROWS))
            texts = {name for row in first for name, value in row.items() if not _is_number(value)}
            numeric = {name for row in first for name in row} - texts
            rows = chain(first, rows)
        for row in rows:
            item = row if holds_media else _item_rows(row, user_columns)[0]
            yield {
                key: value
                for key, value in _with_numbers(item, numeric).items()
                if key not in item_columns and not _is_struct(key, value)
            }

    def rows(
        self,
        index: MemberIndex,
        *,
        layout: MemberRules,
        schema: DatasetSchema,
        grouped: bool = False,
        batch_bytes: int = 16 << 20,
    ) -> RowStream:
        """Returns the rows, which are made while they are read; arguments and errors as `RowSource.rows`.

        A sample's metadata row carries the `metadata_json` of its list rows, the first that has one. A user column is
        filled on the row that has the value. `index` is not read, since a list has no members, and `grouped` has no
        effect, since the list names its samples. A required column that is in no row raises `SourceError`.
        """
        builder = _ListingBuilder(self.file, self.folders[0], self.prefix, layout, schema, batch_bytes)
        return RowStream(builder.batches(), builder.rejects, builder.counts, builder.notes, builder.kept)


class _Item(NamedTuple):
    """An item of a sample, before the order of the items is known.

    Attributes:
        position: from 0.
        modality: row modality.
        ref: where its content is.
        text: the text of a text row.
        error: why a row of media has no content, if the list says so.
        name: a file name from which the content type is guessed.
        row: the row of the list.
    """

    position: int
    modality: str
    ref: SourceRef
    text: str | None
    error: str | None
    name: str
    row: Mapping[str, Any]


_Cells = Sequence[Member]  # of a list row


class _ListingBuilder(RowBuilder):
    def __init__(
        self,
        source: SourceFile,
        folder: str,
        prefix: str,
        layout: MemberRules,
        schema: DatasetSchema,
        batch_bytes: int,
    ) -> None:
        super().__init__(layout, schema, batch_bytes)
        self.source = source
        self.folder = folder
        self.prefix = prefix
        self.allowed = (folder, *layout.prefixes)
        self.modalities = MODALITIES.union(layout.extensions.values())
        self.known = _LIST_COLUMNS.union(c.source for c, _ in self.user)
        self.missing = {c.source for c, _ in self.user if c.required}
        self.seen: set[str] = set()
        self.encodings: Counter[str] = Counter()  # of lines that are not UTF-8
        self.columns_not_read: list[str] = []  # columns of bytes that may not be media

    def batches(self) -> Iterator[pa.RecordBatch]:
        for sample_id, group in groupby(self._checked(), key=lambda entry: entry[0]):
            self._sample(sample_id, [entry[1:] for entry in group])
            if self.full:
                yield from self.take()
        yield from self.take()
        self.note_columns()
        if self.columns_not_read:
            columns = ", ".join(map(repr, self.columns_not_read))
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
        """Yields the rows of the list, each with its cells of media."""
        if _is_parquet(self.source):
            table = ParquetSource(self.source)
            media, self.columns_not_read = _media_columns(table)
            if media:
                yield from table.list_rows(media)
                return
        for line in _lines(self.source, self.layout, self.encodings, self._note_line):
            yield line, ()

    def _checked(self) -> Iterator[tuple[str, int, Mapping[str, Any], _Cells]]:
        """Yields the id of a sample, the number of a row from 0, a row of one of its items, and the row's cells."""
        stem = posixpath.splitext(self.source.url.rpartition("/")[2])[0]
        user_columns = self.layout.user_columns or ()
        is_csv = delimiter_of(self.source) is not None
        numeric = {c.source for c, _ in self.user if c.type in ("int64", "double")} if is_csv else ()
        for number, (line, cells) in enumerate(self._lines()):
            self.counts["members"] += 1
            if isinstance(line, BadTextError):
                self._reject(number, line.reason, line.detail)
                continue
            self.missing -= line.keys()
            default_id = posixpath.join(self.prefix, stem, f"{number:08d}")
            rows = _item_rows(line, user_columns, default_id=default_id, prefix=self.prefix)
            for row in [line] if cells else rows:
                sample_id = sample_id_of(row.get("sample_id"))
                if sample_id is None:
                    detail = (
                        "its sample_id is not text or a whole number, and it has no id, key, text or path of a file"
                    )
                    self._reject(number, "no_sample_id", detail, row)
                else:
                    yield sample_id, number, _with_numbers(row, numeric), cells

    def _sample(self, sample_id: str, entries: Sequence[tuple[int, Mapping[str, Any], _Cells]]) -> None:
        if sample_id in self.seen:
            for number, row, _ in entries:
                detail = "its sample has earlier rows; the rows of a sample must be consecutive"
                self._reject(number, "duplicate_sample_id", detail, row)
            return
        self.seen.add(sample_id)
        items: list[_Item] = []
        metadata: tuple[str | None, SourceRef, Mapping[str, Any]] | None = None
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
                        has_origin = part.get("source_ref") is not None
                        metadata = metadata_json, self._origin(part) if has_origin else SourceRef(None), part
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
                    metadata = metadata_json, SourceRef(None), {}
        if not items and metadata is None:
            return
        self.counts["samples"] += 1
        self.origin = Origin(self.source.url, sample_id)
        text, ref, row = metadata if metadata is not None else (None, SourceRef(None), {})
        content_type = None if text is None else "application/json"
        self.append(
            sample_id,
            METADATA_POSITION,
            "metadata",
            content_type=content_type,
            source_ref=_locator_json(ref),
            metadata_json=text,
        )
        self._fill(row)
        for item in sorted(items, key=lambda item: item.position):
            content_type = item.row.get("content_type")
            if not isinstance(content_type, str) and item.name:
                content_type = content_type_of_name(content_name(item.name))
            elif not isinstance(content_type, str):
                content_type = "text/plain" if item.modality == "text" else None
            self.append(
                sample_id,
                item.position,
                item.modality,
                content_type=content_type,
                text=item.text,
                source_ref=_locator_json(item.ref),
                error=item.error,
            )
            self._fill(item.row)

    def _fill(self, row: Mapping[str, Any]) -> None:
        self.note_unknown(key for key in row.keys() - self.known if not _is_struct(key, row[key]))
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
        """Yields a row for each item of a list row, with its cell: for the text, and for every cell.

        If the row has bytes, the file that it names is not read, and the path is the name of the only cell.
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

    def _item(self, row: Mapping[str, Any], cell: Member | None, next_position: int) -> _Item:
        text = row.get("text_content")
        if text is not None and not isinstance(text, str):
            raise BadTextError("bad_text", f"text_content is {type(text).__name__}, expected text")
        error = row.get("materialize_error") if cell is None and text is None else None
        if not isinstance(error, str) or not error:
            error = None
        if cell is None:
            ref = self._ref(row) if text is None and error is None else self._origin(row)
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
        if modality != "text" and ref.path is None and error is None:
            raise BadTextError("no_source", "it names neither path nor source_ref, and holds no bytes")
        position = row.get("position")
        if position is None:
            position = next_position
        if isinstance(position, float) and position.is_integer():
            position = int(position)  # pandas writes a column of integers as floats if some are missing
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= MAX_POSITION:
            raise BadTextError("bad_position", f"position is {position!r}, expected 0 to {MAX_POSITION}")
        return _Item(position, modality, ref, text, error, name, row)

    def _modality(self, name: str) -> str:
        extension = split_member_name(name)[2]
        modality = modality_of(extension, self.layout.extensions)
        return "binary" if modality == "text" else modality  # its text is not in the list, and nothing reads it

    def _origin(self, row: Mapping[str, Any]) -> SourceRef:
        """Returns the locator of a row whose content is not read from there; only its member if it is not allowed."""
        try:
            return self._ref(row)
        except BadTextError as error:
            if error.reason != "outside":
                raise
        member = _locator_of(row).member
        return SourceRef(None if member is None else self.source.url, member)

    def _ref(self, row: Mapping[str, Any]) -> SourceRef:
        path = row.get("path")
        if path is not None and not isinstance(path, str):
            raise BadTextError("bad_source", f"path is {type(path).__name__}, expected text")
        try:
            ref = _locator_of(row)
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


def _locator_of(row: Mapping[str, Any]) -> SourceRef:
    value = row.get("source_ref")
    return source_ref_of(value) if isinstance(value, dict) else parse_source_ref(value)


def _locator_json(ref: SourceRef) -> str | None:
    return None if ref.path is None else ref.to_json()
