"""The text of JSON and text members, and of PDFs, read ahead in windows of bounded size.

Members with a range are read by merged ranges; those without (compressed shards, sparse members) are copied to a
scratch file in one pass over the shard, because the members of one sample may be far apart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import IO, Any, NamedTuple

from mm_assets.errors import SourceError, temporary_disk_named
from mm_assets.json_text import parse_json, repair_json
from mm_assets.media.pdf import PdfError, PdfPages
from mm_assets.sources import encodings
from mm_assets.sources.base import Source
from mm_assets.sources.compressed import TooLargeError, decompress, is_compressed
from mm_assets.sources.encodings import Decoded
from mm_assets.sources.member import Member
from mm_assets.sources.samples import Sample, ShardMembers

__all__ = [
    "CHARSET",
    "BadTextError",
    "ParsedObject",
    "Read",
    "TextMembers",
    "decode_pdf",
    "decode_text",
    "parse_object",
    "stored_text",
    "with_charset",
]

WINDOW_BYTES = 4 << 20  # payloads held at a time; their parsed values take several times as much
WINDOW_SAMPLES = 1024
MAX_GAP = 4 << 10  # media between two JSON members is not worth reading; requests of a window run side by side
MAX_TEXT = 1 << 30  # a text column of one batch has to stay below 2 GiB, whatever is configured


class BadTextError(ValueError):
    """A member is not the text it should be. Becomes an entry of the rejects.

    Args:
        reason: short name of the kind of error.
        detail: what was found and expected.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(detail)


def decode_text(payload: bytes, encoding: str = "auto") -> Decoded:
    """Returns a text and its encoding, as `mm_assets.sources.encodings.decode` finds it.

    Args:
        payload: the member's content, decompressed.
        encoding: `samples.encoding` of the declaration.

    Raises:
        BadTextError: it is in no encoding that counts.
    """
    try:
        return encodings.decode(payload, None if encoding == "auto" else encoding)
    except ValueError as error:
        detail = f"{error}: name its encoding as samples.encoding, or convert it to UTF-8"
        raise BadTextError("not_utf8", detail) from error


_Window = list[tuple[Sample, list[Member]]]  # samples with their text members

Read = Decoded | BadTextError
"""A text member as it was read, or why it cannot be read."""


CHARSET = "; charset="  # in a content type, before the encoding


def decode_pdf(payload: bytes, *, dpi: int, max_bytes: int) -> Decoded:
    """Returns the words and boxes of a PDF as JSON; see `mm_assets.media.pdf.PdfPages.layout`.

    Args:
        payload: the member's content.
        dpi: pixels per inch, in which boxes are counted.
        max_bytes: of the JSON.

    Raises:
        BadTextError: the PDF is encrypted, damaged or too large.
        MissingExtraError: the extra is not installed.
    """
    try:
        return Decoded(PdfPages(payload, dpi).layout(max_bytes=max_bytes), None)
    except PdfError as error:
        raise BadTextError(error.kind, error.reason) from error


def with_charset(content_type: str | None, encoding: str | None) -> str | None:
    """The content type of a text that was read in an encoding other than UTF-8: ``text/plain; charset=cp932``."""
    return content_type if encoding is None else f"{content_type or 'text/plain'}{CHARSET}{encoding}"


def stored_text(payload: bytes | memoryview, encoding: str | None) -> str:
    """Returns a member's text in the encoding that its row records; nothing is detected.

    Args:
        payload: the member's content, decompressed.
        encoding: the charset of its row's content type, None for UTF-8.

    Raises:
        BadTextError: the bytes are not text in that encoding.
    """
    try:
        return encodings.text_in(payload, encoding)
    except ValueError as error:
        raise BadTextError("not_utf8", str(error)) from error


class TextMembers:
    """Reads the text members of one shard's samples.

    Args:
        source: the shard.
        members: its grouped index.
        is_text: which members are read.
        max_bytes: the largest content of a member; one that is larger is refused.
        decode: makes the text of a member out of its content; `BadTextError` if it is none.
    """

    def __init__(
        self,
        source: Source,
        members: ShardMembers,
        *,
        is_text: Callable[[Member], bool],
        max_bytes: Callable[[Member], int],
        decode: Callable[[Member, bytes], Decoded],
    ) -> None:
        self._decode = decode
        self._source = source
        self._is_text = is_text
        self._limit = max_bytes
        self._spool: IO[bytes] | None = None
        self._spooled: dict[int, tuple[int, int]] = {}  # ordinal -> position and size in the scratch file
        loose = {
            m.ordinal: m.byte_size
            for sample in members.samples
            for m in sample.members
            if m.byte_offset is None and is_text(m) and m.byte_size <= self._max_bytes(m)
        }
        if loose:
            damaged = any((m.skip_reason or "").startswith("damaged") for m in members.skipped)
            try:
                self._fill_spool(loose, salvage=damaged)
            except BaseException:
                self.close()
                raise

    def _max_bytes(self, member: Member) -> int:
        return min(self._limit(member), MAX_TEXT)

    def _fill_spool(self, sizes: Mapping[int, int], *, salvage: bool) -> None:
        with temporary_disk_named():
            self._spool = tempfile.TemporaryFile(prefix="mm-assets-text-")  # noqa: SIM115 - closed by `close`
        at = 0
        payloads = self._source.payloads(
            wanted=lambda m: m.ordinal in sizes,
            max_bytes=max(sizes.values()),
            on_damaged_shard="salvage" if salvage else "fail",
        )
        for member, payload in payloads:
            with temporary_disk_named():
                self._spool.write(payload)
                self._spool.flush()
            self._spooled[member.ordinal] = at, len(payload)
            at += len(payload)
            if len(self._spooled) == len(sizes):
                break  # the index may hold the start of the shard only

    def windows(self, samples: Iterable[Sample]) -> Iterator[Iterator[tuple[Sample, dict[int, Read]]]]:
        """The samples in order, each with the text of its text members by ordinal, or why it cannot be read.

        Raises:
            SourceError: the shard could not be read.
        """
        return map(self._read, self._grouped(samples))

    def _grouped(self, samples: Iterable[Sample]) -> Iterator[_Window]:
        """The samples with their text members, in groups whose texts are held together."""
        window: _Window = []
        size = 0
        for sample in samples:
            texts = [member for member in sample.members if self._is_text(member)]
            more = sum(m.byte_size for m in texts if m.byte_size <= self._max_bytes(m)) if texts else 0
            if window and (size + more > WINDOW_BYTES or len(window) >= WINDOW_SAMPLES):
                yield window
                window, size = [], 0
            window.append((sample, texts))
            size += more
        if window:
            yield window

    def _read(self, samples: _Window) -> Iterator[tuple[Sample, dict[int, Read]]]:
        """The samples of a window; what they hold compressed is opened one sample at a time."""
        for sample, stored in self._stored(samples):
            found: dict[int, Read] = {}
            held = 0
            for member, payload in stored:
                try:
                    content = self._content(member, payload)
                    held += len(content)
                    if held > MAX_TEXT:
                        detail = f"the sample's text members hold more than {MAX_TEXT} bytes up to this one"
                        raise BadTextError("too_large", detail)
                    found[member.ordinal] = self._decode(member, content)
                except BadTextError as error:
                    found[member.ordinal] = error
            yield sample, found

    def _stored(self, window: _Window) -> list[tuple[Sample, list[tuple[Member, bytes | memoryview]]]]:
        """The text members of each sample with their stored bytes; none of one that is too large."""
        ranges: list[tuple[int, int]] = []
        wanted: dict[int, int] = {}  # ordinal -> number of its range
        for _, members in window:
            held = 0
            for member in members:
                limit = self._max_bytes(member)
                held += member.byte_size if member.byte_size <= limit else 0
                # An empty range is not a valid request to an object store.
                if member.byte_offset is not None and 0 < member.byte_size <= limit and held <= MAX_TEXT:
                    wanted[member.ordinal] = len(ranges)
                    ranges.append((member.byte_offset, member.byte_size))
        read = self._source.file.read_ranges(ranges, max_gap=MAX_GAP)

        def payload(member: Member) -> bytes | memoryview:
            if member.ordinal in wanted:
                return read[wanted[member.ordinal]]
            loose = member.byte_offset is None and 0 < member.byte_size <= self._max_bytes(member)
            return self._from_spool(member) if loose else b""

        return [(sample, [(member, payload(member)) for member in members]) for sample, members in window]

    def _content(self, member: Member, payload: bytes | memoryview) -> bytes:
        """The content of a member from its stored bytes.

        Raises:
            BadTextError: it is too large, or cannot be decompressed.
        """
        allowed = self._max_bytes(member)
        if member.byte_size > allowed or len(payload) < member.byte_size:
            raise BadTextError("too_large", f"holds {member.byte_size} bytes, allowed are {allowed}")
        if not is_compressed(member.member):
            return bytes(payload)
        try:
            return decompress(payload, member.member, allowed)
        except SourceError as error:
            if isinstance(error, TooLargeError):
                raise BadTextError("too_large", error.detail) from error
            raise BadTextError("bad_compression", error.detail) from error

    def _from_spool(self, member: Member) -> bytes:
        place = self._spooled.get(member.ordinal)
        if place is None or self._spool is None:
            raise SourceError(
                self._source.file.url, "is not where the member index says: the shard changed", member=member.member
            )
        self._spool.seek(place[0])
        return self._spool.read(place[1])

    def close(self) -> None:
        """Removes the scratch file."""
        if self._spool is not None:
            with suppress(OSError):  # a full disk, again
                self._spool.close()


class ParsedObject(NamedTuple):
    """A sample's JSON.

    Attributes:
        value: keys and values.
        text: the JSON as it was written, but for what `mm_assets.json_text.repair_json` replaces.
        num_nulls: NaN and infinities, which became null in both.
        num_surrogates: lone surrogates, which became U+FFFD in both.
    """

    value: dict[str, Any]
    text: str
    num_nulls: int
    num_surrogates: int


def parse_object(text: str) -> ParsedObject:
    """Parses the text of a JSON member. Parsing the `text` of the result again gives the same.

    Raises:
        BadTextError: it is not JSON, too deep, or not an object.
    """
    repaired = repair_json(text)
    try:
        value = parse_json(repaired.text)
    except ValueError as error:
        raise BadTextError("bad_json", str(error)) from error
    if not isinstance(value, dict):
        kind = "null" if value is None else type(value).__name__
        raise BadTextError("json_not_an_object", f"is a JSON {kind}, expected an object")
    return ParsedObject(value, *repaired)
