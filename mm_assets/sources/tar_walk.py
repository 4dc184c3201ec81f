"""One pass over the headers of a tar archive, past damage if the caller wants that.

The walk ends for any bytes. It yields every entry of the archive, also directories, links and bytes that are not a
member, and raises `ShardError` with the byte offset where it cannot continue. It reads headers; payloads only where
the caller's `take` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mm_assets.errors import ShardError
from mm_assets.sources.member import Member, OnDamage, ShardDamage, escape_name, name_parts, named_member, skipped_bytes
from mm_assets.sources.stream import Cursor
from mm_assets.sources.tar_header import (
    BLOCK,
    MAX_EXTENDED,
    MAX_SPARSE_RUNS,
    Header,
    HeaderError,
    PaxRecords,
    find_header,
    old_gnu_sparse_runs,
    parse_header,
    parse_pax,
    parse_plain,
    pax_number,
    pax_sparse_runs,
    sparse_runs,
    terminated,
    whole_blocks,
)

__all__ = ["Entry", "Place", "TarWalk"]

MAX_MEMBERS = 2**31 - 1  # ordinals are int32
SCAN_CHUNK = 1 << 20  # bytes of one search for the next header
_LOOK_BACK = 4 * BLOCK  # how far before a header its extended headers usually are

_TYPES = {
    b"0": "file",
    b"7": "file",  # contiguous: a plain file on every system of today
    b"1": "hardlink",
    b"2": "symlink",
    b"3": "device",
    b"4": "device",
    b"5": "directory",
    b"6": "device",  # a named pipe
    b"S": "sparse",
}
_EXTENDED = b"LKxXg"  # headers that say something about the next one
_WITHOUT_DATA = ("hardlink", "symlink", "device", "directory")  # whatever size their header states
_UNUSED_RECORDS = frozenset({b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname"})  # nearly all there are
_PAX_RECORD = re.compile(rb"[0-9]{1,7} [A-Za-z.]+[^=\n]*=")


class Place(NamedTuple):
    """Where the stored bytes of a member are, and how they become its content."""

    at: int
    stored: int
    size: int
    runs: list[tuple[int, int]] | None  # of sparse members: (position, size) of each run of data
    ordinal: int


class Entry(NamedTuple):
    """A member and its place, which is None where it has no content of its own."""

    member: Member
    place: Place | None


_AGAIN = Entry(skipped_bytes("", 0, 0, ordinal=-1, reason=""), None)  # a further archive starts where this one ended


class _DamagedError(ValueError):
    """The archive cannot be understood at `at`. Control flow inside this module."""

    def __init__(self, at: int, detail: str) -> None:
        self.at = at
        self.detail = detail
        super().__init__(detail)


class TarWalk:
    """One pass over the headers of an archive; "salvage" continues after damage, which `damage` then lists."""

    def __init__(self, shard: str, cursor: Cursor, on_damage: OnDamage, damage: list[ShardDamage] | None) -> None:
        if on_damage not in ("fail", "salvage"):
            raise ValueError(f"on_damaged_shard is {on_damage!r}, expected 'fail' or 'salvage'")
        self.shard = shard
        self.cursor = cursor
        self.salvage = on_damage == "salvage"
        self.damage = damage
        self.ordinal = 0
        self.globals: PaxRecords = {}
        # Of each name, the place, or without a tuple of its own class: payload and size of a file, and its ordinal.
        self.places: dict[bytes, Place | tuple[int, int, int]] = {}
        self.at = 0  # where the next header is expected
        self.payload_end = 0  # where the last member's stored bytes end
        self.scanned = 0  # there is no trustworthy header before this position
        self.extended = False  # the header being read belongs to extended headers before it
        self.ended = False  # damage reaches to the end of the archive
        self.missing_end: str | None = None  # what lacks at the end of the archive

    def entries(self, take: Callable[[Entry], object] | None) -> Iterator[tuple[Entry, object]]:
        """Each entry in order, with the result of `take`, which is called while the stream is at its payload.

        Without it, some entries lack their place.

        Raises:
            ShardError: the archive is damaged and the walk is not to salvage.
        """
        if not self.cursor.reach(1):
            detail = self.cursor.failure or "is empty, expected a tar archive"
            if not self.salvage:
                raise ShardError(self.shard, detail, byte_offset=0)
            if self.damage is not None:
                self.damage.append(ShardDamage(byte_offset=0, byte_size=0, detail=detail))
            yield self._no_member(0, 0, f"damaged: {detail}"), None
            return
        while not self.ended:
            if self.cursor.ranged and not self.globals:
                yield from self._files(take)
            start = self.at
            try:
                entry = self._next()
                if entry is None:
                    return
                if entry is _AGAIN:
                    continue
                taken = take and take(entry)
                if not self.cursor.ranged and not self.cursor.reach(self.payload_end):
                    self.ordinal -= 1
                    raise _DamagedError(start, self.cursor.failure or _truncated(entry.member.member, self.payload_end))
            except _DamagedError as problem:
                if not self.salvage:
                    at = min(problem.at, self.cursor.end)
                    raise ShardError(self.shard, problem.detail, byte_offset=at) from problem
                yield self._skip_damage(start, problem.detail), None
                continue
            yield entry, taken

    def _files(self, take: Callable[[Entry], object] | None) -> Iterator[tuple[Entry, object]]:
        """The entries of plain files up to the first of something else; `_next` finds the same in more steps."""
        read, reach = self.cursor.read, self.cursor.reach
        while self.ordinal < MAX_MEMBERS:
            at = self.at
            block = read(at, BLOCK)
            plain = parse_plain(block) if len(block) == BLOCK else None
            if plain is None or plain[0][-1:] == b"/" or not reach(at + BLOCK + plain[1]):
                return
            member = self._file(*plain, at, at)
            entry = Entry(member, None if take is None else Place(at + BLOCK, plain[1], plain[1], None, member.ordinal))
            yield entry, take and take(entry)

    # -- damage

    def _skip_damage(self, start: int, detail: str) -> Entry:
        """Skips to the next header that can be trusted, and lists the bytes before it."""
        scan = max(self.scanned, start + BLOCK, whole_blocks(self.cursor.earliest))
        lost = self.extended
        before = b""
        while True:
            chunk = self.cursor.read(scan, SCAN_CHUNK)
            whole = chunk[: len(chunk) // BLOCK * BLOCK]
            found = find_header(whole)
            if found is None:
                if len(chunk) < SCAN_CHUNK:
                    self.at = max(self.cursor.end, start)
                    self.ended = True
                    break
                before = whole[-_LOOK_BACK:]
                scan += len(whole)
                continue
            header = parse_header(whole[found : found + BLOCK])
            before = (before + whole[:found])[-_LOOK_BACK:]
            self.at = scan + found
            if header is None or header.type in _EXTENDED or not (lost or _lost_extension(header, before)):
                break
            # Its name, or its size, was in a header that is lost: it would pass for another member.
            lost, before = False, b""
            scan = self.at + BLOCK
            if self.cursor.reach(scan + whole_blocks(header.size)):
                scan += whole_blocks(header.size)
        self.extended = False
        if self.damage is not None:
            self.damage.append(ShardDamage(byte_offset=start, byte_size=self.at - start, detail=detail))
        return self._no_member(start, self.at, f"damaged: {detail}")

    def _no_member(self, start: int, end: int, reason: str) -> Entry:
        ordinal = self._count()
        member = skipped_bytes(self.shard, start, end, ordinal=ordinal, reason=reason, ranged=self.cursor.ranged)
        return Entry(member, None)

    def _count(self) -> int:
        if self.ordinal >= MAX_MEMBERS:
            raise ShardError(self.shard, f"holds more than {MAX_MEMBERS} members", byte_offset=self.at)
        self.ordinal += 1
        return self.ordinal - 1

    # -- headers

    def _next(self) -> Entry | None:
        """The entry at the current position, which moves past it; None at the end of the archive."""
        start = at = self.at
        self.scanned = at + BLOCK
        self.extended = False
        records: PaxRecords = {}
        while True:
            block = self.cursor.read(at, BLOCK)
            if len(block) < BLOCK:
                if self.cursor.failure is not None:
                    raise _DamagedError(at, self.cursor.failure)
                if block.strip(b"\0") or at > start:
                    raise _DamagedError(at, f"the shard ends inside a header: {len(block)} of {BLOCK} bytes are there")
                self._note_end(len(block))
                return None
            if not self.globals and records.keys() <= _UNUSED_RECORDS:
                plain = parse_plain(block)
                if plain is not None and plain[0][-1:] != b"/":
                    name, size = plain
                    if not self.cursor.ranged or self.cursor.reach(at + BLOCK + size):
                        member = self._file(name, size, at, start)
                        return Entry(member, Place(at + BLOCK, size, size, None, member.ordinal))
            header = self._parse(block, at)
            if header is None:
                if at > start:
                    raise _DamagedError(at, "zeros where an extended header's member should be")
                return self._end_of_archive(at)
            if header.type not in _EXTENDED:
                break
            self.extended = header.type != b"g" or self.extended
            data = self._extended(header, at)
            try:
                if header.type == b"L":
                    records[b"path"] = terminated(data)
                elif header.type == b"K":
                    records[b"linkpath"] = terminated(data)
                elif header.type == b"g":
                    self.globals.update(parse_pax(data))
                else:
                    records.update(parse_pax(data))
            except HeaderError as error:
                raise _DamagedError(at, str(error)) from error
            at += BLOCK + whole_blocks(header.size)
            if header.type == b"g" and not records:
                start = at  # a global header is whole by itself
        merged = {**self.globals, **records}
        for key in (b"path", b"linkpath", b"size"):
            if not merged.get(key, b"x"):
                del merged[key]  # an empty record takes back a global one
        try:
            return self._entry(header, block, at, merged, start)
        except HeaderError as error:
            raise _DamagedError(at, str(error)) from error

    def _parse(self, block: bytes, at: int) -> Header | None:
        try:
            return parse_header(block)
        except HeaderError as error:
            detail = str(error) if at else f"does not begin with a tar header: {error}"
            raise _DamagedError(at, detail) from error

    def _extended(self, header: Header, at: int) -> bytes:
        if header.size > MAX_EXTENDED:
            raise _DamagedError(at, f"an extended header states {header.size} bytes, expected at most {MAX_EXTENDED}")
        data = self.cursor.read(at + BLOCK, header.size)
        if len(data) < header.size:
            raise _DamagedError(at, self.cursor.failure or f"an extended header of {header.size} bytes is truncated")
        return data

    def _end_of_archive(self, at: int) -> Entry | None:
        """What follows a block of zeros: nothing, another archive, or other bytes."""
        position = at
        while True:
            chunk = self.cursor.read(position, SCAN_CHUNK if position > at else 2 * BLOCK)
            used = chunk.lstrip(b"\0")
            if used:
                position += (len(chunk) - len(used)) // BLOCK * BLOCK
                break
            if not chunk:
                if self.cursor.failure is not None:
                    raise _DamagedError(position, self.cursor.failure)
                self._note_end(position - at)
                return None
            position += len(chunk)
        try:
            header = parse_header(block) if len(block := self.cursor.read(position, BLOCK)) == BLOCK else None
        except HeaderError:
            header = None
        if header is not None:
            self.at = position
            return _AGAIN
        end, has_header = self._scan(position)
        if has_header or position - at < 2 * BLOCK:
            # One block of zeros does not end an archive, and a later header means that members were in between.
            self.scanned = position
            raise _DamagedError(position, "no tar header after zeros (found other bytes)")
        self.at = end
        return self._no_member(position, end, "trailing bytes")

    def _note_end(self, num_zeros: int) -> None:
        """Notes an archive that ends with fewer than the two blocks of zeros that POSIX asks for."""
        if num_zeros < 2 * BLOCK:
            found = f"{num_zeros} bytes of zeros" if num_zeros else "none"
            self.missing_end = (
                f"the archive ends at byte {self.cursor.end} without the two blocks of zeros that end a tar (found "
                f"{found}): it may be truncated, compare its size with the original's"
            )

    def _scan(self, position: int) -> tuple[int, bool]:
        """The end of the archive, and whether there may be a header at or after `position`."""
        while True:
            chunk = self.cursor.read(position, SCAN_CHUNK)
            if find_header(chunk) is not None:
                return position, True
            position += len(chunk)
            if len(chunk) < SCAN_CHUNK:
                return position, False
            if not self.cursor.ranged:
                return position, True  # a stream cannot come back: what follows is searched as after damage

    # -- members

    def _entry(self, header: Header, block: bytes, at: int, records: PaxRecords, start: int) -> Entry:
        kind = _TYPES.get(header.type, "other")
        name = records.get(b"GNU.sparse.name") or records.get(b"path") or header.name
        size = pax_number(records[b"size"], "size") if b"size" in records else header.size
        payload = at + BLOCK
        stored, runs = size, None
        if kind == "file" and name.endswith(b"/") and not size:
            kind = "directory"
        if kind == "sparse":
            payload, size, runs = self._old_gnu_sparse(block, at, size)
        elif kind == "file" and any(key.startswith(b"GNU.sparse.") for key in records):
            kind = "sparse"
            payload, stored, size, runs = self._pax_sparse(payload, size, records)
        elif kind == "hardlink" and header.pax and size and self._carries_data(payload, size):
            kind = "file"
        elif kind in _WITHOUT_DATA:
            stored = size = 0
        self.payload_end = payload + stored
        if self.cursor.ranged and not self.cursor.reach(self.payload_end):
            self.scanned = payload
            raise _DamagedError(at, _truncated(escape_name(name), self.payload_end))
        place: Place | None = None
        target = records.get(b"linkpath", header.link) if kind in ("hardlink", "symlink") else None
        skip: str | None = None
        ordinal = self._count()
        if kind in ("file", "sparse"):
            place = Place(payload, stored, size, runs, ordinal)
        elif kind == "hardlink":
            found = self.places.get(_plain(target or b""))
            if found is None or isinstance(found, Place):
                place = found
            else:
                place = Place(found[0], found[1], found[1], None, found[2])
            if place is None:
                skip = "link outside"
            else:
                size = place.size
        if place is not None:
            self.places[_plain(name)] = place
        member = named_member(
            self.shard,
            name,
            ordinal=ordinal,
            byte_size=size,
            byte_offset=place.at if place is not None and place.runs is None and self.cursor.ranged else None,
            member_type=kind,
            skip_reason=skip,
            link_target=target,
        )
        self.at = payload + whole_blocks(stored)
        self.cursor.note_stride(self.at - start, payload - start)
        return Entry(member, place)

    def _file(self, name: bytes, size: int, at: int, start: int) -> Member:
        """The member of a file whose one header at `at` says all of it, as `_entry` makes it."""
        payload = at + BLOCK
        self.payload_end = payload + size
        ordinal = self._count()
        self.places[_plain(name)] = payload, size, ordinal
        text, key, role, extension, skip = name_parts(name)
        offset = payload if self.cursor.ranged else None
        self.at = payload + whole_blocks(size)
        self.cursor.note_stride(self.at - start, payload - start)
        return Member(self.shard, text, offset, size, "file", key, role, extension, ordinal, skip)

    def _carries_data(self, payload: int, size: int) -> bool:
        """Whether a hard link's data is in the archive, which POSIX allows and nothing in the header shows."""
        block = self.cursor.read(payload, BLOCK)
        if len(block) < BLOCK:
            return bool(block.strip(b"\0"))
        try:
            parse_header(block)
        except HeaderError:
            return True
        return False

    def _old_gnu_sparse(self, block: bytes, at: int, stored: int) -> tuple[int, int, list[tuple[int, int]]]:
        payload = at + BLOCK
        extensions: list[bytes] = []
        more = block[482]
        while more:
            if len(extensions) * 21 > MAX_SPARSE_RUNS:
                raise HeaderError(f"its sparse map holds more than {MAX_SPARSE_RUNS} runs")
            extension = self.cursor.read(payload, BLOCK)
            if len(extension) < BLOCK:
                raise HeaderError("its sparse map is truncated")
            extensions.append(extension)
            more = extension[504]
            payload += BLOCK
        size, runs = old_gnu_sparse_runs(block, extensions, stored)
        return payload, size, runs

    def _pax_sparse(
        self, payload: int, stored: int, records: PaxRecords
    ) -> tuple[int, int, int, list[tuple[int, int]]]:
        known = pax_sparse_runs(records, stored)
        if known is not None:
            return payload, stored, *known
        size = pax_number(records.get(b"GNU.sparse.realsize", b""), "real size")
        length = 0
        lines: list[bytes] = []
        wanted: int | None = None  # lines of the map, its count included
        while wanted is None or len(lines) <= wanted:
            block = self.cursor.read(payload + length, BLOCK)
            if len(block) < BLOCK or length >= stored:
                raise HeaderError("its sparse map is truncated")
            length += BLOCK
            rest = lines.pop() if lines else b""
            lines += (rest + block).split(b"\n")
            if len(lines[-1]) > BLOCK:
                raise HeaderError("its sparse map holds something that is not a number")
            if wanted is None and len(lines) > 1:
                wanted = 2 * pax_number(lines[0], "sparse map") + 1
                if wanted > 2 * MAX_SPARSE_RUNS + 1:
                    raise HeaderError(f"its sparse map states {lines[0]!r} runs, expected at most {MAX_SPARSE_RUNS}")
        runs = sparse_runs([pax_number(line, "sparse map") for line in lines[1:wanted]], size, stored - length)
        return payload + length, stored - length, size, runs


def _truncated(member: str, end: int) -> str:
    return f"member {member!r} is truncated: its data should end at byte {end}"


def _plain(name: bytes) -> bytes:
    while name.startswith(b"./"):
        name = name[2:]
    return name


def _lost_extension(header: Header, before: bytes) -> bool:
    """Whether a header found after damage seems to have had an extended header there."""
    if header.long_name_field:
        return True
    blocks = (before[i : i + BLOCK] for i in range(len(before) % BLOCK, len(before), BLOCK))
    return any(_PAX_RECORD.match(block) or block.startswith(b"././@LongLink") for block in blocks)
