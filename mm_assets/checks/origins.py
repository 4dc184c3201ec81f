"""The relations that tie the row table to what it was made of: samples' JSON, text members, and lists of files.

Texts and JSON become digests, and values of user columns one digest per row, so that memory is bounded by the rows and
not by their content. Text members are read from their shard again; those of a remote shard are not, since each request
costs money.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.checks.context import CheckContext
from mm_assets.checks.refilter import drop_reasons, filter_mismatches, known_filters
from mm_assets.checks.relations import (
    TableBuilder,
    TableRelations,
    digest_of,
    row_digests,
    schema_of,
    table_of,
    values_digest,
)
from mm_assets.errors import SourceError
from mm_assets.json_text import repair_json
from mm_assets.media.content_types import content_type_of_name
from mm_assets.rows.columns import RowStream, row_tuples, sample_id_of
from mm_assets.rows.from_members import MAX_ITEMS, decode_member, max_text_bytes
from mm_assets.rows.interleaved import entries_of, is_interleaved
from mm_assets.rows.schema import REJECTS_SCHEMA
from mm_assets.rows.source_ref import is_allowed_reference, is_reference, parse_source_ref
from mm_assets.rows.user_columns import UNFIT, Converter, converter
from mm_assets.sources.base import Source, text_encoding
from mm_assets.sources.compressed import content_name
from mm_assets.sources.encodings import Decoded
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, Member, plain_name
from mm_assets.sources.samples import (
    ShardMembers,
    id_prefixes,
    is_pdf_member,
    is_text,
    metadata_member,
    modality_of,
)
from mm_assets.sources.text_members import (
    CHARSET,
    BadTextError,
    Read,
    TextMembers,
    parse_object,
    stored_text,
    with_charset,
)

__all__ = ["OriginRelations"]

_MEMBERS = schema_of(
    *("shard", "ordinal", "member", "name", "folder", "byte_offset", "byte_size", "sample_key", "role", "extension"),
    *("modality", "content_type", "is_metadata", "is_pdf", "is_read", "text_digest", "text_fault"),
)
_PAGES = schema_of("shard", "ordinal", "modality", "frame_index", "content_type", "text_digest")
_SAMPLES = schema_of(
    "ordinal", "is_interleaved", "json_id", "frame_name", "num_bad_texts", "num_bad_lists", "user_digest"
)
_ENTRIES = schema_of(
    *("ordinal", "modality", "position", "number", "text_digest", "token", "is_reference", "url", "url_type"),
    "user_digest",
)
_LISTED = schema_of("ordinal", "row_digest")


class OriginRelations:
    """What the rows of one partition were made of: each public method is a relation.

    Args:
        context: the partition.
        tables: its tables.
    """

    def __init__(self, context: CheckContext, tables: TableRelations) -> None:
        self._context = context
        self._tables = tables
        self._index = next(iter(context.tables), "")  # the chain's first table, and the one that its rows are in
        self._rows = context.own_tables[0] if context.own_tables else self._index
        self._layout = context.layout
        self._user = [(column, converter(column.type)) for column in context.schema.user_columns if column.source]
        self._names = [column.name for column in context.schema.user_columns]

    # -- members

    def shard_labels(self) -> pa.Table:
        """What the default ids of a shard's samples start with; null where a partition is one shard."""
        suffixes = {shard.file.url: shard.SUFFIXES for shard in self._context.shards}
        labeled = {url: ends for url, ends in suffixes.items() if self._context.grouped or url.endswith("/")}
        labels = id_prefixes(labeled, self._context.declared_shards)
        return table_of(((url, labels.get(url) or None) for url in suffixes), schema_of("shard", "label"))

    def index_members(self) -> pa.Table:
        """The members of the index that are part of a sample, with what their names mean.

        `text_digest` is of the text that a text member has in its shard now, null where that is not text; `is_read`
        says whether it was read: in the encoding that its row records, or as `rows` reads it if it is a reject. Of a
        sample's JSON it is the digest of what `metadata_json` should be. `text_fault` is why a reject cannot be its
        text or JSON: a reason, or "" if it can. A PDF has a fault alone; `is_pdf`: its pages are rows.
        """
        return self._members[0]

    def pdf_pages(self) -> pa.Table:
        """The rows that each PDF should have if it is read again, by `ordinal` of its member.

        A row without modality is of a PDF that should have none.
        """
        return self._members[1]

    @cached_property
    def _members(self) -> tuple[pa.Table, pa.Table]:
        shards = {shard.file.url: shard for shard in self._context.shards}
        found, pages = TableBuilder(_MEMBERS), TableBuilder(_PAGES)
        for url, members in groupby(self._indexed(), key=attrgetter("shard")):
            if url in shards:  # the checks of the index report others
                found.extend(self._of_shard(shards[url], ShardMembers(url, members), pages))
        return found.table(), pages.table()

    def _indexed(self) -> Iterator[Member]:
        names = MEMBER_INDEX_SCHEMA.names
        for batch in self._tables.parquet(self._index).iter_batches(columns=names):
            for values in row_tuples(batch, *names):
                yield Member(**dict(zip(names, values, strict=True)))

    def _of_shard(self, source: Source, members: ShardMembers, pages: TableBuilder) -> Iterator[tuple[Any, ...]]:
        local, extensions = source.file.is_local, self._layout.extensions
        pdf = self._context.schema.pdf

        def is_read_again(member: Member) -> bool:
            return local and is_text(member, extensions, pdf=pdf != "binary")

        limit, charsets = partial(max_text_bytes, layout=self._layout), self._charsets
        encoding = text_encoding(source, self._layout.encoding)

        def decode(member: Member, payload: bytes) -> Decoded:
            charset = charsets.get((member.shard, member.member))
            is_pdf = is_pdf_member(member, extensions)
            if is_pdf or (charset is None and (member.shard, member.member) in self._rejected):
                return decode_member(member, payload, layout=self._layout, encoding=encoding)
            return Decoded(stored_text(payload, charset), charset)

        with closing(TextMembers(source, members, is_text=is_read_again, max_bytes=limit, decode=decode)) as texts:
            for window in texts.windows(members.samples):
                for sample, found in window:
                    metadata = metadata_member(sample.members)
                    for m in sample.members:
                        name, is_json = plain_name(m.member), m is metadata
                        read = found.get(m.ordinal)
                        charset = charsets.get((m.shard, m.member))
                        content_type = with_charset(content_type_of_name(content_name(m.member)), charset)
                        is_pdf = pdf != "binary" and is_pdf_member(m, extensions)
                        if is_pdf and read is not None:
                            layout = read.text if isinstance(read, Decoded) else None
                            pages.extend((m.shard, m.ordinal, *row) for row in _page_rows(layout, pdf))
                        yield (
                            *(m.shard, m.ordinal, m.member, name, name[: name.rfind("/") + 1]),
                            *(m.byte_offset, m.byte_size, m.sample_key, m.role, m.extension),
                            *(modality_of(m.extension, extensions), content_type, is_json, is_pdf),
                            *(read is not None, None if is_pdf else _text_digest(read, is_json=is_json)),
                            self._fault(read, is_json=is_json) if (m.shard, m.member) in self._rejected else None,
                        )

    @cached_property
    def _rejected(self) -> Set[tuple[str, str | None]]:
        """Shard and member of every reject."""
        return set(row_tuples(self._tables.read(self._context.own_tables[1], ["shard", "member"])))

    def _fault(self, read: Read | None, *, is_json: bool) -> str | None:
        if isinstance(read, BadTextError):
            return read.reason
        if read is None:
            return None
        try:
            value = parse_object(read.text).value if is_json else {}
        except BadTextError as error:
            return error.reason
        lists = (value.get(key) for key in (self._layout.texts_field, self._layout.images_field))
        return "too_many_items" if any(isinstance(found, list) and len(found) > MAX_ITEMS for found in lists) else ""

    @cached_property
    def _charsets(self) -> Mapping[tuple[str | None, str | None], str]:
        """The encodings that rows say their members were read in, by shard and member; UTF-8 is not said."""
        found: dict[tuple[str | None, str | None], str] = {}
        for batch in self._tables.batches(self._rows, ["content_type", "source_ref"]):
            said = pc.fill_null(pc.match_substring(batch.column(0), CHARSET), False)
            for content_type, text in row_tuples(batch.filter(said)):
                try:
                    ref = parse_source_ref(text)
                except SourceError:
                    continue  # the check of locators reports it
                found[ref.path, ref.member] = content_type.partition(CHARSET)[2]
        return found

    # -- JSON

    def sample_json(self) -> pa.Table:
        """What the JSON of each metadata row gives its sample, by the row's `ordinal`.

        `num_bad_texts` counts the entries that are not texts, `num_bad_lists` the lists that are none.
        """
        return self._json[0]

    def interleaved_json(self) -> pa.Table:
        """Those of `sample_json` that have lists of texts or images."""
        return self._json[0].filter(self._json[0]["is_interleaved"])

    def json_entries(self) -> pa.Table:
        """Every entry of the lists of texts and images that is not null, by the metadata row's `ordinal`.

        `number` counts those of one list. A text that is not a string has no digest. `token` is the name in an image
        token, `url` an allowed reference. A text in the place of a list is its only entry.
        """
        return self._json[1]

    @cached_property
    def _json(self) -> tuple[pa.Table, pa.Table]:
        samples, entries = TableBuilder(_SAMPLES), TableBuilder(_ENTRIES)
        first = 0
        for batch in self._tables.batches(self._rows, ["metadata_json"]):
            for row, text in enumerate(batch.column(0).to_pylist()):
                if text is not None:
                    try:
                        value = parse_object(text).value
                    except BadTextError:
                        value = {}  # it differs from its shard, which is a violation by itself
                    samples.add((first + row, *self._sample(value)))
                    entries.extend((first + row, *entry) for entry in self._entries(value))
            first += batch.num_rows
        return samples.table(), entries.table()

    def _sample(self, value: Mapping[str, Any]) -> tuple[Any, ...]:
        layout = self._layout
        given = None if layout.sample_id_field is None else value.get(layout.sample_id_field)
        frames = None if layout.image_member_field is None else value.get(layout.image_member_field)
        texts, images = (value.get(key) for key in (layout.texts_field, layout.images_field))
        bad_lists = sum(found is not None and entries_of(found) is None for found in (texts, images))
        bad_texts = sum(text is not None and not isinstance(text, str) for text in entries_of(texts) or ())
        interleaved = is_interleaved(value, layout)
        return (
            interleaved,
            sample_id_of(given),
            plain_name(frames) if isinstance(frames, str) and frames else None,
            *((bad_texts, bad_lists) if interleaved else (0, 0)),
            self._digest_of(
                {c.name: _fitted(fit, value.get(c.source)) for c, fit in self._user if c.rows == "metadata"}
            ),
        )

    def _entries(self, value: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        layout = self._layout
        if not is_interleaved(value, layout):
            return
        for modality, key in (("text", layout.texts_field), ("image", layout.images_field)):
            found = entries_of(value.get(key))
            if found is None:
                continue
            places = [(position, entry) for position, entry in enumerate(found) if entry is not None]
            columns = [
                (column, fit, *_per_item(value.get(column.source), len(places), len(found)))
                for column, fit in self._user
                if column.rows == modality
            ]
            for number, (position, entry) in enumerate(places):
                fitting = {
                    column.name: _fitted(fit, values[place])
                    for column, fit, values, by_position in columns
                    if (place := position if by_position else number) < len(values)
                }
                user = self._digest_of(fitting) if fitting else None
                if modality == "text":
                    text = digest_of(entry.encode()) if isinstance(entry, str) else None
                    yield modality, position, number, text, None, False, None, None, user
                else:
                    yield modality, position, number, None, *self._token(entry), user

    def _token(self, token: object) -> tuple[Any, ...]:
        if isinstance(token, dict) and self._layout.image_member_field is not None:
            token = token.get(self._layout.image_member_field)
        if not isinstance(token, str):
            return None, False, None, None
        url = token if is_allowed_reference(token, self._layout.prefixes) else None
        name = None if url is None else url.split("?", 1)[0].split("#", 1)[0]
        return (
            plain_name(token) or None,
            is_reference(token),
            url,
            content_type_of_name(content_name(name)) if name else None,
        )

    # -- user columns

    def _digest_of(self, fitting: Mapping[str, object]) -> int | None:
        """The digest of the user columns of a row, by name those that JSON fills."""
        return values_digest(tuple(fitting.get(name) for name in self._names))

    # -- lists of files

    def first_listed(self) -> pa.Table:
        """The number of the first row that a list of files gives, in one row; all those before are of members."""
        return table_of([(self._first_listed,)], schema_of("ordinal"))

    def listed_rows(self) -> pa.Table:
        """The rows that the lists of files give when they are read again."""
        digests = self._listed[0]
        return table_of(zip(range(self._first_listed, 1 << 62), digests, strict=False), _LISTED)

    def listed_digests(self) -> pa.Table:
        """The digests of the rows that a list of files gave."""
        first, num_rows = self._first_listed, self._tables.parquet(self._rows).metadata.num_rows
        if first == num_rows:
            return _LISTED.empty_table()
        digests = self._tables.derived("digests", self._rows).slice(first)
        return pa.table([np.arange(first, num_rows), *digests.columns], _LISTED)

    def listed_rejects(self) -> pa.Table:
        """The rejects that they give."""
        return self._listed[1]

    @property
    def _first_listed(self) -> int:
        """Rows of members come first; without containers there are none."""
        num_rows = int(self._tables.parquet(self._rows).metadata.num_rows)
        if self._context.listings and not self._context.shards:
            return 0
        return max(num_rows - len(self._listed[0]), 0)

    @cached_property
    def _listed(self) -> tuple[Sequence[int | None], pa.Table]:
        digests: list[int | None] = []
        rejects: list[pa.Table] = []
        for source in self._context.listings:
            stream: RowStream = source.rows(
                lambda: iter(()),
                layout=self._layout,
                schema=self._context.schema,
                grouped=self._context.grouped,
                batch_bytes=self._context.batch_bytes,
            )
            for batch in stream:
                digests += row_digests(batch).to_pylist()
            rejects.append(stream.rejects())
        return digests, pa.concat_tables(rejects) if rejects else REJECTS_SCHEMA.empty_table()

    # -- filters

    def known_filters(self) -> pa.Table:
        """The filters that may drop rows; `is_open` where a filter of the user's own may do so for any reason."""
        return known_filters(self._context)

    def drop_reasons(self) -> pa.Table:
        """The reasons of the built-in ones; a value at `bound`, or at the side of it that is kept, is not one."""
        return drop_reasons(self._context)

    def filter_mismatches(self) -> pa.Table:
        """What differs between the filtered or dropped rows of a few samples and the result of filtering them again."""
        return filter_mismatches(self._context, self._tables)


def _page_rows(layout: str | None, form: str) -> Iterator[tuple[str | None, int | None, str | None, int | None]]:
    """The rows of a PDF: row modality, page, content type and the digest of their text; nulls for one without pages."""
    if layout is None:
        yield None, None, None, None
        return
    pages = json.loads(layout)["pages"]
    if form == "document" and any(page["words"] for page in pages):
        yield "text", None, "application/json", digest_of(layout.encode())
    for number, page in enumerate(pages):
        yield "image", number, "image/png", None
        if form == "interleaved" and page["words"]:
            begins = set(page["lines"])
            words = enumerate(page["words"])
            text = "".join(("\n" if index in begins else " ") + word for index, word in words)
            yield "text", number, "text/plain", digest_of(text[1:].encode())


def _fitted(fit: Converter, value: object) -> object:
    fitted = None if value is None else fit(value)
    return None if fitted is UNFIT else fitted


def _per_item(values: object, num_places: int, num_entries: int) -> tuple[Sequence[Any], bool]:
    """A list of one value per item, and whether it has one for each position, nulls included."""
    if not isinstance(values, list):
        return (), False
    return values, len(values) != num_places and len(values) == num_entries


def _text_digest(read: Read | None, *, is_json: bool) -> int | None:
    if not isinstance(read, Decoded):
        return None
    return digest_of((repair_json(read.text).text if is_json else read.text).encode())
