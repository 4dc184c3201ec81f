"""Samples as rows: one metadata row each, then a row per text and per media member, whose bytes are not read.

The pages of a PDF are rows too, for which its words are read. Every member of the index is referenced by a row's
`source_ref` or named in the rejects. A bad sample never affects its neighbours. JSON, text members and PDFs are read in
windows of bounded size; of a shard only the index is held in memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pyarrow as pa

from mm_assets.errors import MissingColumnError
from mm_assets.media.content_types import content_type_of_name
from mm_assets.media.pdf import MAX_BYTES as MAX_PDF_BYTES
from mm_assets.rows.columns import MemberIndex, Origin, RowBuilder, RowStream, sample_id_of
from mm_assets.rows.interleaved import interleaved_items, is_interleaved
from mm_assets.rows.schema import METADATA_POSITION, DatasetSchema, MemberRules, UserColumn
from mm_assets.rows.source_ref import SourceRefWriter, build_source_ref
from mm_assets.rows.user_columns import Converter, structural_keys
from mm_assets.sources.base import Source, text_encoding
from mm_assets.sources.compressed import content_name
from mm_assets.sources.encodings import Decoded
from mm_assets.sources.member import Member
from mm_assets.sources.samples import (
    Sample,
    ShardMembers,
    id_prefixes,
    is_pdf_member,
    is_text,
    metadata_member,
    modality_of,
    split_by_shard,
)
from mm_assets.sources.text_members import (
    BadTextError,
    ParsedObject,
    Read,
    TextMembers,
    decode_pdf,
    decode_text,
    parse_object,
    with_charset,
)
from mm_assets.summaries import counted

__all__ = ["MemberRows", "decode_member", "max_text_bytes"]

MAX_ITEMS = 1 << 20  # entries of one sample's list: its rows are held together
Texts = Mapping[int, Read]


class MemberRows:
    """The rows of a partition's containers; see `mm_assets.rows.base.RowSource`.

    Args:
        sources: the containers.
        shards: the `shards` of the declaration, by which the containers of a group are labeled (see `id_prefixes`).
        opens_pdfs: read PDFs; else each has the rows of one with two pages and some words.
    """

    def __init__(self, sources: Sequence[Source], *, shards: str = "", opens_pdfs: bool = True) -> None:
        self.sources = sources
        self.shards = shards
        self.opens_pdfs = opens_pdfs
        self.folders = tuple(source.file.url for source in sources if source.file.url.endswith("/"))

    def rows(
        self,
        index: MemberIndex,
        *,
        layout: MemberRules,
        schema: DatasetSchema,
        grouped: bool = False,
        batch_bytes: int = 16 << 20,
    ) -> RowStream:
        """The members as rows, which are made while they are read; arguments and errors as `RowSource.rows`.

        Samples come in the order of their first member, their rows together: the metadata row, then by position. A
        batch ends between samples, unless one sample fills many. A required column that is missing in every sample of
        a shard raises `MissingColumnError` while reading.
        """
        labeled = (one for one in self.sources if grouped or one.file.url in self.folders)
        labels = id_prefixes({source.file.url: source.SUFFIXES for source in labeled}, self.shards)
        builder = _Builder(
            self.sources,
            layout=layout,
            schema=schema,
            labels=labels,
            batch_bytes=batch_bytes,
            opens_pdfs=self.opens_pdfs,
        )
        return RowStream(builder.batches(index), builder.rejects, builder.counts, builder.notes, builder.kept)


@dataclass(slots=True)
class _Shard:
    """A shard whose members are becoming rows."""

    members: ShardMembers
    ref: SourceRefWriter
    present: set[str] = field(default_factory=set)  # required keys that some sample has
    encodings: Counter[str] = field(default_factory=Counter)  # of texts that are not UTF-8
    claimed: set[int] = field(default_factory=set)  # ordinals of members that interleaved samples use
    unreferenced: list[tuple[str | None, Member]] = field(default_factory=list)  # with the sample that has them


class _Builder(RowBuilder):
    """Builds the rows of one partition."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        layout: MemberRules,
        schema: DatasetSchema,
        labels: Mapping[str, str],
        batch_bytes: int,
        opens_pdfs: bool,
    ) -> None:
        super().__init__(layout, schema, batch_bytes)
        self.sources = {source.file.url: source for source in sources}
        self.labels = labels
        self.first_of: dict[str, str] = {}  # key of the first sample of each id
        self.user_of = {rows: [u for u in self.user if u[0].rows == rows] for rows in ("metadata", "image", "text")}
        self.pdf = schema.pdf
        self.opens_pdfs = opens_pdfs
        self.known_keys = structural_keys(layout).union(c.source for c, _ in self.user)
        self._modality = lru_cache(maxsize=1024)(partial(modality_of, extensions=layout.extensions))
        self.required = {c.source for c, _ in self.user if c.required}

    # -- a shard

    def batches(self, index: MemberIndex) -> Iterator[pa.RecordBatch]:
        for members in split_by_shard(index(), list(self.sources)):
            yield from self._shard(self.sources[members.shard], members)
        yield from self.take()
        self.note_columns()
        if missing := self.counts["missing_sample_ids"]:
            key = self.layout.sample_id_field
            self.notes.append(
                f"{counted(missing, 'sample')} without a text or whole number {key!r} took the member key as id"
            )

    def _shard(self, source: Source, members: ShardMembers) -> Iterator[pa.RecordBatch]:
        shard = _Shard(members, SourceRefWriter(members.shard))
        samples_before = self.counts["samples"]
        self.counts["members"] += sum(len(s.members) for s in members.samples)
        self.counts["members"] += len(members.skipped) + len(members.repeated)
        if not (members.samples or members.skipped or members.repeated):
            detail = "the shard has no members: it is an archive without files"
            self.rejects.add(members.shard, reason="empty_shard", detail=detail, stage="index")
        for member in members.skipped:
            self.counts["skipped"] += 1
            reason, detail = _skipped(member)
            self._reject_member(member, reason, detail, stage="index")
        for member in members.repeated:
            first = members.find(member.member, "")
            where = "" if first is None or first.byte_offset is None else f" at byte {first.byte_offset}"
            self._reject_member(member, "repeated_member", f"an earlier member has this name{where}")
        encoding = text_encoding(source, self.layout.encoding)
        with closing(
            TextMembers(
                source,
                members,
                is_text=partial(is_text, extensions=self.layout.extensions, pdf=self._reads_pdfs),
                max_bytes=partial(max_text_bytes, layout=self.layout),
                decode=partial(decode_member, layout=self.layout, encoding=encoding),
            )
        ) as texts:
            samples, set_aside = self._without_claimed(members, texts)
            for window in texts.windows(samples):
                for sample, found in window:
                    self._sample(shard, sample, found)
                    if self.full:
                        yield from self.take()
            self._note_encodings(shard)
        for sample_id, member in (*shard.unreferenced, *((None, member) for member in set_aside)):
            if member.ordinal not in shard.claimed:
                detail = "an interleaved sample's lists do not name it"
                self._reject_member(member, "unreferenced_member", detail, sample_id=sample_id)
        missing = sorted(self.required - shard.present)
        num_samples = self.counts["samples"] - samples_before
        if missing and num_samples:
            detail = f"none of {num_samples} samples has the key {missing[0]!r}, which is a required column"
            raise MissingColumnError(members.shard, detail)

    @property
    def _reads_pdfs(self) -> bool:
        return self.pdf != "binary" and self.opens_pdfs

    def _note_encodings(self, shard: _Shard) -> None:
        """Notes the texts that were not read as UTF-8."""
        for encoding, count in sorted(shard.encodings.items()):
            self.counts[f"encoding.{encoding}"] += count
            self.notes.append(f"{shard.members.shard}: {counted(count, 'text')} read as {encoding}")

    def _without_claimed(self, shard: ShardMembers, texts: TextMembers) -> tuple[list[Sample], list[Member]]:
        """Sets aside the members that have no JSON of their own and that another sample's tokens name.

        Returns the samples without them, and these members. Only a shard that has both kinds of keys needs this second
        pass over its JSON.
        """
        every = shard.samples
        orphans = {sample.key for sample in every if metadata_member(sample.members) is None}
        if not orphans or len(orphans) == len(every):
            return every, []
        claimed: set[int] = set()
        for window in texts.windows([s for s in every if s.key not in orphans]):
            for sample, found in window:
                json_member = metadata_member(sample.members)
                if json_member is None:
                    continue
                try:
                    value = _parse(found[json_member.ordinal]).value
                except BadTextError:
                    continue  # named in the rejects later, with its sample
                if not is_interleaved(value, self.layout):
                    continue
                for item in interleaved_items(value, sample, json_member, shard, self.layout).items:
                    if item.member is not None and item.member.sample_key in orphans:
                        claimed.add(item.member.ordinal)
        if not claimed:
            return every, []
        set_aside = [m for sample in every for m in sample.members if m.ordinal in claimed]
        left = []
        for sample in every:
            own = tuple(m for m in sample.members if m.ordinal not in claimed)
            if own:
                left.append(sample if len(own) == len(sample.members) else Sample(sample.key, sample.shard, own))
        return left, set_aside

    # -- a sample

    def _sample(self, shard: _Shard, sample: Sample, texts: Texts) -> None:
        json_member = metadata_member(sample.members)
        parsed: ParsedObject | None = None
        problem: BadTextError | None = None
        if json_member is not None:
            try:
                parsed = _parse(texts[json_member.ordinal])
                _check_lists(parsed.value, self.layout)
            except BadTextError as error:
                parsed, problem = None, error
        sample_id = self._sample_id(sample, parsed)
        if sample_id in self.first_of:
            detail = f"sample id {sample_id!r} was taken by the sample of key {self.first_of[sample_id]!r} before it"
            for member in sample.members:
                self._reject_member(member, "duplicate_sample_id", detail, sample_id=sample_id)
            return
        self.first_of[sample_id] = sample.key
        self.origin = Origin(
            sample.shard,
            sample_id,
            *((json_member.member, json_member.byte_offset, json_member.byte_size) if json_member else ()),
        )
        if json_member is not None and problem is not None:
            self._reject_member(json_member, problem.reason, problem.detail, sample_id=sample_id)
        if json_member is None or parsed is None:
            self._paired(shard, sample_id, sample, texts, None, None)
            return
        self.note_repairs(parsed)
        if not parsed.value.keys() <= self.known_keys:
            self.note_unknown(parsed.value.keys() - self.known_keys)
        shard.present.update(self.required & parsed.value.keys())
        if is_interleaved(parsed.value, self.layout):
            self._interleaved(shard, sample_id, sample, json_member, parsed, _encoding(texts[json_member.ordinal]))
        else:
            self._paired(shard, sample_id, sample, texts, json_member, parsed)

    def _sample_id(self, sample: Sample, parsed: ParsedObject | None) -> str:
        field = self.layout.sample_id_field
        if field is not None:
            sample_id = sample_id_of(parsed.value.get(field)) if parsed is not None else None
            if sample_id is not None:
                return sample_id
            self.counts["missing_sample_ids"] += 1
        label = self.labels.get(sample.shard)
        return f"{label}/{sample.key}" if label else sample.key

    def _metadata_row(
        self,
        shard: _Shard,
        sample_id: str,
        json_member: Member | None,
        parsed: ParsedObject | None,
        encoding: str | None,
    ) -> str | None:
        ref = None if json_member is None else _ref(shard, json_member)
        content_type = None if json_member is None else with_charset("application/json", encoding)
        if encoding is not None:
            shard.encodings[encoding] += 1
        value = {} if parsed is None else parsed.value
        self.counts["samples"] += 1
        self.counts["missing_values"] += len(self.required - value.keys())
        self.append(
            sample_id,
            METADATA_POSITION,
            "metadata",
            content_type=content_type,
            source_ref=ref,
            metadata_json=None if parsed is None else parsed.text,
        )
        self.fill_all(self.user_of["metadata"], value)
        return ref

    def _reject_member(
        self, member: Member, reason: str, detail: str, *, sample_id: str | None = None, stage: str = "rows"
    ) -> None:
        self.rejects.add(
            member.shard, reason=reason, detail=detail, sample_id=sample_id, member=member.member, stage=stage
        )

    # -- the two kinds of samples

    def _interleaved(
        self,
        shard: _Shard,
        sample_id: str,
        sample: Sample,
        json_member: Member,
        parsed: ParsedObject,
        encoding: str | None,
    ) -> None:
        ref = self._metadata_row(shard, sample_id, json_member, parsed, encoding)
        value = parsed.value
        found = interleaved_items(value, sample, json_member, shard.members, self.layout)
        for reason, detail in found.problems:
            # The member itself is referenced: it is the entry that is not, so `member` stays null.
            detail = f"{json_member.member}: {detail}"
            self.rejects.add(sample.shard, reason=reason, detail=detail, sample_id=sample_id)
        self.counts["unequal_lists"] += found.unequal
        per_item = {
            "image": self._per_item("image", value, found.num_images, self.layout.images_field),
            "text": self._per_item("text", value, found.num_texts, self.layout.texts_field),
        }
        used = {json_member.ordinal}
        for item in found.items:
            if item.modality == "text":
                self.append(sample_id, item.position, "text", content_type="text/plain", text=item.text, source_ref=ref)
            else:
                if item.member is not None:
                    used.add(item.member.ordinal)
                    content_type = _content_type(item.member.extension)
                    source_ref: str | None = _ref(shard, item.member, item.frame)
                elif item.url is not None:
                    content_type = content_type_of_name(content_name(item.url.split("?", 1)[0].split("#", 1)[0]))
                    source_ref = build_source_ref(path=item.url)
                else:
                    content_type = source_ref = None
                    self.counts["unresolved_tokens"] += 1
                self.append(
                    sample_id,
                    item.position,
                    "image",
                    content_type=content_type,
                    source_ref=source_ref,
                    error=item.error,
                )
            for column, fit, values, by_position in per_item[item.modality]:
                at = item.position if by_position else item.number
                if at < len(values):
                    self.fill(column, fit, values[at])
        shard.claimed |= used
        shard.unreferenced += [(sample_id, m) for m in sample.members if m.ordinal not in used]

    def _per_item(
        self, rows: str, value: Mapping[str, Any], num_items: int, list_field: str
    ) -> list[tuple[UserColumn, Converter, list[Any], bool]]:
        """Columns whose lists go item by item: one value for each entry that is not null, or for each position."""
        columns: list[tuple[UserColumn, Converter, list[Any], bool]] = []
        for column, fit in self.user_of[rows]:
            values = value.get(column.source)
            if values is None:
                continue
            if not isinstance(values, list):
                self.note_unfit(column, values)
                continue
            entries = value.get(list_field)
            by_position = len(values) != num_items and isinstance(entries, list) and len(values) == len(entries)
            self.counts["unequal_fields"] += len(values) != num_items and not by_position
            columns.append((column, fit, values, by_position))
        return columns

    def _paired(
        self,
        shard: _Shard,
        sample_id: str,
        sample: Sample,
        texts: Texts,
        json_member: Member | None,
        parsed: ParsedObject | None,
    ) -> None:
        content: list[tuple[Member, Sequence[_Content]]] = []
        metadata = metadata_member(sample.members)
        for member in sample.members:
            if member is metadata:
                continue  # the metadata, or rejected already
            modality = self._modality(member.extension)
            content_type = _content_type(member.extension)
            found = texts.get(member.ordinal)
            if self.pdf != "binary" and not self.opens_pdfs and is_pdf_member(member, self.layout.extensions):
                content.append((member, _pdf_content(_TWO_PAGES, self.pdf)))
            elif found is None:
                content.append((member, (_Content(modality, content_type),)))
            elif isinstance(found, BadTextError):
                self._reject_member(member, found.reason, found.detail, sample_id=sample_id)
            elif modality != "text":
                content.append((member, _pdf_content(found.text, self.pdf)))
            else:
                if found.encoding is not None:
                    shard.encodings[found.encoding] += 1
                content_type = with_charset(content_type, found.encoding)
                content.append((member, (_Content(modality, content_type, found.text),)))
        if not content and json_member is None:
            return  # every member is in the rejects
        json_encoding = None if parsed is None or json_member is None else _encoding(texts[json_member.ordinal])
        self._metadata_row(shard, sample_id, json_member, parsed, json_encoding)
        start = 0
        for member, rows in content:
            for row in rows:
                self.append(
                    sample_id,
                    start + (row.frame or 0),
                    row.modality,
                    content_type=row.content_type,
                    text=row.text,
                    source_ref=_ref(shard, member, row.frame),
                )
            start += (rows[-1].frame or 0) + 1


_TWO_PAGES = '{"pages":[{"words":["a"],"lines":[0]},{"words":["b"],"lines":[0]}]}'


class _Content(NamedTuple):
    """A row of a member; `frame` is its page in a PDF."""

    modality: str
    content_type: str | None
    text: str | None = None
    frame: int | None = None


def _pdf_content(layout: str, form: str) -> list[_Content]:
    """The rows of a PDF with this layout: an image for each page, and its words; pages without words have no text."""
    pages = json.loads(layout)["pages"]
    rows: list[_Content] = []
    if form == "document" and any(page["words"] for page in pages):
        rows.append(_Content("text", "application/json", layout))
    for number, page in enumerate(pages):
        if form == "interleaved" and page["words"]:
            ends = [*page["lines"][1:], len(page["words"])]
            lines = (" ".join(page["words"][start:end]) for start, end in zip(page["lines"], ends, strict=True))
            rows.append(_Content("text", "text/plain", "\n".join(lines), number))
        rows.append(_Content("image", "image/png", None, number))
    return rows


def max_text_bytes(member: Member, layout: MemberRules) -> int:
    """The largest text that a member may be, or the largest PDF."""
    return MAX_PDF_BYTES if is_pdf_member(member, layout.extensions) else layout.max_text_bytes


def decode_member(member: Member, payload: bytes, *, layout: MemberRules, encoding: str) -> Decoded:
    """The text of a member, or the layout of a PDF; errors as of `decode_text` and `decode_pdf`."""
    if is_pdf_member(member, layout.extensions):
        return decode_pdf(payload, dpi=layout.pdf_dpi, max_bytes=layout.max_text_bytes)
    return decode_text(payload, encoding)


@lru_cache(maxsize=1024)
def _content_type(extension: str) -> str | None:
    """The content type that the name of a member of this extension gives, without that of a compression."""
    return content_type_of_name(f"x.{extension}") if extension else None


def _ref(shard: _Shard, member: Member, frame: int | None = None) -> str:
    return shard.ref(member.member, member.byte_offset, member.byte_size, frame)


def _encoding(read: Read) -> str | None:
    return None if isinstance(read, BadTextError) else read.encoding


def _check_lists(value: Mapping[str, Any], layout: MemberRules) -> None:
    for key in (layout.texts_field, layout.images_field):
        found = value.get(key)
        if isinstance(found, list) and len(found) > MAX_ITEMS:
            raise BadTextError("too_many_items", f"{key!r} has {len(found)} entries, allowed are {MAX_ITEMS}")


def _skipped(member: Member) -> tuple[str, str]:
    """Why an entry of the index is not part of a sample: a short name to count by, and a clause."""
    reason, _, found = (member.skip_reason or "").partition(": ")
    if reason == "link outside":
        return reason, "a hard link is followed only to an earlier member of the shard"
    if reason == "trailing bytes":
        return reason, f"{member.byte_size} bytes after the end of the archive are not a member"
    lost = f": {member.byte_size} bytes are lost" if member.byte_size else ""
    return reason, f"{found}{lost}" if found else f"is not part of a sample: {reason}"


def _parse(read: Read) -> ParsedObject:
    """The JSON of a sample; raises `BadTextError` if it could not be read or parsed."""
    if isinstance(read, BadTextError):
        raise read
    return parse_object(read.text)
