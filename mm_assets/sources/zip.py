"""Zip archives: where each member is, and what it is, from the directory at the end and each member's own header.

Nothing is extracted to a disk. A stored member is a range of the file; a deflated one is decompressed by `payloads`, up
to the size that the directory says. The directory is read twice, in blocks: first for the places of all members,
which may not overlap, then for the members. The header in front of a member must agree with the directory.
"""

from __future__ import annotations

import stat
import struct
import zlib
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ShardError, SourceError
from mm_assets.sources.entries import Entry, EntrySource, Scan
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.member import Member, named_member, skipped_bytes

__all__ = ["ZipSource"]

_LOCAL, _RECORD, _END, _END64, _LOCATOR = (b"PK" + two for two in (b"\3\4", b"\1\2", b"\5\6", b"\6\6", b"\6\7"))
_LOCAL_HEADER = struct.Struct("<4sHHHHHLLLHH")  # signature, version, flags, method, time, date, CRC, sizes, lengths
_HEADER_BYTES = _LOCAL_HEADER.size
_RECORD_HEADER = struct.Struct("<4sBBHHHHHLLLHHHHHLL")
_END_HEADER = struct.Struct("<4sHHHHLLH")
_END64_HEADER = struct.Struct("<4sQHHLLQQQQ")
_LOCATOR_HEADER = struct.Struct("<4sLQL")
_MAX_COMMENT = 65535
_UNKNOWN16, _UNKNOWN32 = 0xFFFF, 0xFFFFFFFF  # the number is in the record of 64 bits
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 0x2041, 0x8, 0x800  # flags
_UNIX = 3
_BLOCK_BYTES = 1 << 20  # of the directory, or of compressed content, that are read at a time
_HEADERS = 256  # of members that are read together


class _Record(NamedTuple):
    """A member as the directory describes it; `start` is the first byte of its own header."""

    name: bytes
    start: int
    stored_size: int
    size: int
    crc: int
    flags: int
    method: int
    is_link: bool


class _Directory(NamedTuple):
    """Where the directory is.

    Attributes:
        start: its first byte.
        end: the byte after it.
        num_records: by the end of the archive; -1 if it does not say.
        shift: bytes before the archive, which its positions do not count.
        archive_end: the byte after the archive.
    """

    start: int
    end: int
    num_records: int
    shift: int
    archive_end: int


class ZipSource(EntrySource):
    """A zip archive, also one of 64 bits; see `mm_assets.sources.base.Source`.

    Encrypted members, and those compressed with another method than deflate, are entries that are skipped.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".zip",)
    seekable = True

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether the bytes start a member's header, or the end of an archive without members."""
        return head.startswith((_LOCAL, _END))

    def _content(self, member: Member, record: _Record, offset: int) -> bytes:
        def fault(detail: str) -> SourceError:
            return SourceError(self.file.url, detail, member=member.member, byte_offset=offset)

        if record.method == _STORED:
            content = self.file.read(offset, record.size)
        else:
            inflater, parts, left = zlib.decompressobj(-zlib.MAX_WBITS), list[bytes](), record.size
            at, end = offset, offset + record.stored_size
            try:
                while not inflater.eof and left >= 0:
                    data = inflater.unconsumed_tail
                    if not data:
                        data = self.file.read(at, min(_BLOCK_BYTES, end - at))
                        at += len(data)
                    if not data:
                        raise fault("has compressed content that ends early")
                    parts.append(inflater.decompress(data, left + 1))
                    left -= len(parts[-1])
            except zlib.error as error:
                raise fault(f"cannot be decompressed: {error}") from error
            content = b"".join(parts)
            if left:
                size = f"more than {record.size}" if left < 0 else len(content)
                raise fault(f"holds {size} bytes, the directory says {record.size}")
        if (crc := zlib.crc32(content)) != record.crc:
            raise fault(f"has the CRC-32 {crc:08x}, the directory says {record.crc:08x}")
        return content

    # -- entries

    def _entries(self, scan: Scan) -> Iterator[Entry]:
        ordinal = 0

        def salvage(error: ShardError, end: int) -> Entry:
            """Returns the entry of the bytes that an error is about, which end at `end`."""
            start = error.byte_offset or 0
            scan.salvage(self.file.url, error.detail, byte_offset=start, byte_size=end - start)
            reason = f"damaged: {error.detail}"
            return Entry(skipped_bytes(self.file.url, start, end, ordinal=ordinal, reason=reason), None)

        try:
            directory = self._directory()
        except ShardError as error:
            foreign = foreign_file(self.file.read(0, min(HEAD_BYTES, self.file.size)))
            if foreign is not None and foreign.kind != "zip":
                raise ShardError(self.file.url, foreign.as_not("a zip archive"), byte_offset=0) from error
            if scan.on_damaged_shard == "fail":
                raise
            salvaged_end = 0
            for entry, entry_end in self._without_directory():
                yield entry
                ordinal, salvaged_end = ordinal + 1, entry_end
            yield salvage(ShardError(self.file.url, error.detail, byte_offset=salvaged_end), self.file.size)
            return
        places, fault = self._places(directory)
        records = iter(self._records(directory, len(places.ends)))
        while batch := list(islice(records, _HEADERS)):
            inside = [record for record in batch if record.start < directory.start]
            ranges = [(one.start, min(_HEADER_BYTES + len(one.name), self.file.size - one.start)) for one in inside]
            headers = dict(zip(map(id, inside), self.file.read_ranges(ranges), strict=True))
            for record in batch:
                header = bytes(headers.get(id(record), b""))
                try:
                    offset = self._data_offset(record, header, int(places.ends[ordinal]), bool(places.overlap[ordinal]))
                except ShardError as error:
                    last = record.start + _HEADER_BYTES + len(record.name) + record.stored_size
                    yield salvage(error, max(min(last, directory.start), record.start))
                else:
                    yield self._entry(record, offset, ordinal)
                ordinal += 1
        if fault is not None:
            yield salvage(fault, directory.end)
            ordinal += 1
        if directory.archive_end < self.file.size:
            bounds = directory.archive_end, self.file.size
            yield Entry(skipped_bytes(self.file.url, *bounds, ordinal=ordinal, reason="trailing bytes"), None)

    def _entry(self, record: _Record, offset: int, ordinal: int) -> Entry:
        name, reason = record.name, None
        if record.flags & _ENCRYPTED:
            reason = "encrypted"
        elif record.method not in (_STORED, _DEFLATED):
            reason = f"compression method: {record.method} is not read, expected stored or deflated"
        kind = "symlink" if record.is_link else "directory" if name.endswith(b"/") else "file"
        member = named_member(
            self.file.url,
            name,
            ordinal=ordinal,
            byte_size=record.size,
            byte_offset=offset if record.method == _STORED and reason is None else None,
            member_type=kind,
            skip_reason=reason,
        )
        has_content = reason is None and kind == "file"
        return Entry(member, partial(self._content, member, record, offset) if has_content else None)

    def _data_offset(self, record: _Record, header: bytes, end: int, overlaps: bool) -> int:
        """Returns the first byte of a member's content; `ShardError` if its own header contradicts the directory.

        Args:
            record: the member.
            header: its own header, with the name.
            end: where the next member or the directory starts.
            overlaps: another member has some of its bytes.
        """

        def fault(detail: str) -> ShardError:
            name = record.name.decode(errors="backslashreplace")
            return ShardError(self.file.url, f"{name!a} {detail}", byte_offset=record.start)

        if overlaps:
            raise fault("shares bytes with another member")
        if len(header) < _HEADER_BYTES or not header.startswith(_LOCAL):
            raise fault("has no header where the directory says")
        _, _, flags, method, _, _, crc, stored_size, size, name_size, extra_size = _LOCAL_HEADER.unpack_from(header)
        name = header[_HEADER_BYTES:]
        is_known = not flags & _SIZES_FOLLOW
        numbers = ((crc, record.crc), (stored_size, record.stored_size), (size, record.size))
        if (
            _text_name(name[:name_size], flags) != record.name
            or method != record.method
            or (flags ^ record.flags) & _ENCRYPTED
            or (is_known and any(here not in (there, _UNKNOWN32) for here, there in numbers))
        ):
            raise fault("has a header that contradicts the directory")
        offset: int = record.start + _HEADER_BYTES + name_size + extra_size
        if offset + record.stored_size > end:
            raise fault(f"has {record.stored_size} bytes from byte {offset}, where others start at byte {end}")
        if record.method == _STORED and record.size != record.stored_size and not record.flags & _ENCRYPTED:
            raise fault(f"is stored in {record.stored_size} bytes, but holds {record.size}")
        return offset

    # -- the directory

    def _directory(self) -> _Directory:
        """Finds the directory from the end of the file; `ShardError` if there is none."""
        url, size = self.file.url, self.file.size
        tail_start = max(size - _END_HEADER.size - _MAX_COMMENT - _LOCATOR_HEADER.size - HEAD_BYTES, 0)
        tail = self.file.read(tail_start, size - tail_start)
        at = len(tail)
        while (at := tail.rfind(_END, 0, at)) >= 0:
            if at + _END_HEADER.size <= len(tail):
                _, disk, first_disk, here, num_records, length, offset, comment = _END_HEADER.unpack_from(tail, at)
                after = len(tail) - (at + _END_HEADER.size + comment)
                fits = offset + length <= tail_start + at or _UNKNOWN32 in (offset, length)
                if after == 0 or (after > 0 and here == num_records and fits):  # else it is text of the comment
                    break
        if at < 0:
            raise ShardError(url, "has no directory at its end: the zip archive is truncated", byte_offset=0)
        end = tail_start + at
        archive_end = end + _END_HEADER.size + comment
        locator_start = end - _LOCATOR_HEADER.size
        is_large = locator_start >= 0 and self.file.read(locator_start, len(_LOCATOR)) == _LOCATOR
        if is_large:
            _, _, declared, _ = _LOCATOR_HEADER.unpack(self.file.read(locator_start, _LOCATOR_HEADER.size))
            for end in (locator_start - _END64_HEADER.size, declared):
                header = b""
                if 0 <= end <= locator_start - _END64_HEADER.size:
                    header = self.file.read(end, _END64_HEADER.size)
                if header.startswith(_END64):
                    break
            else:
                raise ShardError(url, "has no end record of 64 bits before its locator", byte_offset=locator_start)
            _, _, _, _, disk, first_disk, _, num_records, length, offset = _END64_HEADER.unpack(header)
        if disk or first_disk:
            detail = "is one part of a zip archive that is split into several files: join them, as by `zip -s 0`"
            raise ShardError(url, detail, byte_offset=end)
        start = end - length
        if start < 0 or start < offset:
            detail = f"has a directory of {length} bytes at byte {offset}, but it ends at byte {end}"
            raise ShardError(url, detail, byte_offset=end)
        if not is_large and num_records == _UNKNOWN16:
            num_records = -1
        return _Directory(start, end, num_records, start - offset, archive_end)

    def _records(self, directory: _Directory, limit: int | None = None) -> Iterator[_Record]:
        """Yields the records of the directory, at most `limit`; `ShardError` at one that is damaged."""
        url = self.file.url
        buffer, at, number = b"", directory.start, 0  # bytes of the directory from `at` on
        read_end = directory.start
        while (at < directory.end) if limit is None else (number < limit):
            need = _RECORD_HEADER.size
            for _ in range(2):  # the header, then the whole record
                if len(buffer) < need and read_end < directory.end:
                    more = min(_BLOCK_BYTES, directory.end - read_end)
                    buffer += self.file.read(read_end, more)
                    read_end += more
                if len(buffer) < need or not buffer.startswith(_RECORD):
                    raise ShardError(url, f"has no record {number} in its directory", byte_offset=at)
                fields = _RECORD_HEADER.unpack_from(buffer)
                name_size, extra_size, comment_size = fields[11:14]
                need = _RECORD_HEADER.size + name_size + extra_size + comment_size
            _, _, system, _, flags, method, _, _, crc, stored_size, size, *_, attributes, start = fields
            name_end = _RECORD_HEADER.size + name_size
            extra = buffer[name_end : name_end + extra_size]
            try:
                size, stored_size, start = _large(extra, size, stored_size, start)
            except struct.error as error:
                detail = f"has record {number} without the sizes of 64 bits that it needs"
                raise ShardError(url, detail, byte_offset=at) from error
            name = _text_name(buffer[_RECORD_HEADER.size : name_end], flags)
            is_link = system == _UNIX and stat.S_ISLNK(attributes >> 16)
            yield _Record(name, start + directory.shift, stored_size, size, crc, flags, method, is_link)
            buffer, at, number = buffer[need:], at + need, number + 1
        if limit is None and directory.num_records not in (-1, number):
            detail = f"has {number} records in its directory, its end says {directory.num_records}"
            raise ShardError(url, detail, byte_offset=directory.end)

    def _places(self, directory: _Directory) -> tuple[_Places, ShardError | None]:
        """Returns where all members are, and the error that ends the directory early, or None."""
        starts, sizes = array("q"), array("q")
        fault = None
        try:
            for record in self._records(directory):
                starts.append(min(record.start, directory.start))
                least = _HEADER_BYTES + len(record.name) + record.stored_size
                sizes.append(min(least, directory.start + 1))
        except ShardError as error:
            fault = error
        first, size = np.array(starts, np.int64), np.array(sizes, np.int64)
        order = np.argsort(first, kind="stable")
        last = np.maximum.accumulate((first + size)[order]) if len(order) else size
        overlap = np.zeros(len(first), np.bool_)
        overlap[order[1:]] = first[order[1:]] < last[:-1]
        ends = np.full(len(first), directory.start, np.int64)
        apart = order[~overlap[order]]
        ends[apart[:-1]] = first[apart[1:]]
        return _Places(ends, overlap), fault

    def _without_directory(self) -> Iterator[tuple[Entry, int]]:
        """Yields the members of an archive without a directory, by their own headers, each with the byte after it.

        Ends before the first member that is not whole.
        """
        at = ordinal = 0
        while at + _HEADER_BYTES <= self.file.size:
            fields = _LOCAL_HEADER.unpack(self.file.read(at, _HEADER_BYTES))
            signature, _, flags, method, _, _, crc, stored_size, size, name_size, extra_size = fields
            offset = at + _HEADER_BYTES + name_size + extra_size
            if signature != _LOCAL or flags & _SIZES_FOLLOW or offset > self.file.size:
                return
            name = self.file.read(at + _HEADER_BYTES, name_size + extra_size)
            try:
                size, stored_size, _ = _large(name[name_size:], size, stored_size, 0)
            except struct.error:
                return
            if offset + stored_size > self.file.size or (method == _STORED and size != stored_size):
                return
            text = _text_name(name[:name_size], flags)
            record = _Record(text, at, stored_size, size, crc, flags, method, is_link=False)
            at = offset + stored_size
            yield self._entry(record, offset, ordinal), at
            ordinal += 1


class _Places(NamedTuple):
    """The places of all members, in order.

    Attributes:
        ends: the byte at which the next member or the directory starts.
        overlap: whether another member has some of its bytes.
    """

    ends: npt.NDArray[np.int64]
    overlap: npt.NDArray[np.bool_]


def _text_name(name: bytes, flags: int) -> bytes:
    """Returns a name in UTF-8; without the flag of UTF-8 it is in code page 437, unless it is valid UTF-8."""
    if not flags & _UTF8:
        try:
            name.decode()
        except UnicodeDecodeError:
            return name.decode("cp437").encode()
    return name


def _large(extra: bytes, size: int, stored_size: int, start: int) -> tuple[int, int, int]:
    """Returns size, stored size and start of a record, by its field of 64 bits if needed; `struct.error` without it."""
    if _UNKNOWN32 not in (size, stored_size, start):
        return size, stored_size, start
    at = 0
    values = b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = extra[at + 4 : at + 4 + length]
            break
        at += 4 + length
    numbers = []
    for value in (size, stored_size, start):
        if value == _UNKNOWN32:
            (value,) = struct.unpack_from("<q", values)
            if value < 0:
                raise struct.error
            values = values[8:]
        numbers.append(value)
    return numbers[0], numbers[1], numbers[2]
