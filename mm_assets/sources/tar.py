"""Tar shards, plain or in gzip, zstd, bzip2 or xz: where each member is, and what it is, from the headers alone.

Walking reads headers and skips payloads; only a compressed shard is read whole, once. Offsets count in the archive, so
in a compressed shard they are positions after decompression (in messages only: its members have no `byte_offset`).
Blocks of zeros end an archive, but a header after them continues it, as in tars that were concatenated with ``cat``;
other bytes after the end are listed as an entry "trailing bytes".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
from typing import ClassVar

from mm_assets.errors import ShardError, SourceError
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.member import Member, OnDamage, ShardDamage
from mm_assets.sources.stream import SMALL_STRIDE, Cursor, compression_of_head, open_cursor
from mm_assets.sources.tar_header import BLOCK, HeaderError, parse_header
from mm_assets.sources.tar_walk import Entry, Place, TarWalk
from mm_assets.storage.files import SourceFile

__all__ = ["TarSource"]

MAX_PAYLOAD = 1 << 30  # bytes of a member that `TarSource.payloads` yields by default


class TarSource:
    """A tar shard; see `mm_assets.sources.base.Source`.

    Attributes:
        missing_end: what lacks at the end of the archive, once `members` has been read to it; None where nothing does.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (
        *(".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst"),
        *(".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz"),
    )

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self.missing_end: str | None = None

    @property
    def file(self) -> SourceFile:
        """The shard."""
        return self._file

    @cached_property
    def _compression(self) -> str | None:
        return compression_of_head(self.file.read(0, min(HEAD_BYTES, self.file.size)))

    def _open(self) -> Cursor:
        """A cursor at the start of the archive.

        Raises:
            ShardError: the file is empty, or something else by its first bytes. There is nothing to salvage in it.
        """
        cursor = open_cursor(self.file, self._compression)
        head = cursor.read(0, HEAD_BYTES)
        if not self.accepts(head) or compression_of_head(head) is not None:
            found = foreign_file(head) if cursor.failure is None else None
            if found is not None and (self._compression is None or found.kind != "text"):  # which damage may look like
                cursor.close()
                inside = "" if self._compression is None else f"compressed with {self._compression}, and inside "
                raise ShardError(self.file.url, inside + found.as_not("a tar"), byte_offset=0)
        return cursor

    @property
    def seekable(self) -> bool:
        """Whether members that are not wanted are skipped: in every shard that is not compressed."""
        return self._compression is None

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether the bytes are those of a compressed file or of a tar header."""
        if compression_of_head(head) is not None:
            return True
        try:
            return len(head) >= BLOCK and parse_header(head[:BLOCK]) is not None
        except HeaderError:
            return False

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Every entry of the shard, in order; arguments and errors as `Source.members`.

        "salvage" continues at the next header that can be trusted.
        """
        self.missing_end = None
        with closing(self._open()) as cursor:
            walk = TarWalk(self.file.url, cursor, on_damaged_shard, damage)
            for entry, _ in walk.entries(None):
                yield entry.member
            self.missing_end = walk.missing_end

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int = MAX_PAYLOAD,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """The content of chosen members, in one pass over the shard; arguments and errors as `Source.payloads`.

        Sparse members come with their holes as zeros, hard links with their target's bytes. Only in a compressed
        shard does a wanted hard link cost a second pass, and comes after all others.
        """
        late: dict[int, list[Member]] = {}
        cursor = self._open()

        def take(entry: Entry) -> object:
            member, place = entry
            if not wanted(member) or place is None:
                return None
            if place.size > max_bytes:
                detail = f"holds {place.size} bytes, allowed are {max_bytes}"
                return SourceError(self.file.url, detail, member=member.member)
            if cursor.ranged and place.stored > SMALL_STRIDE:
                return _expand(place, self.file.read(place.at, place.stored))
            if member.member_type == "hardlink" and not cursor.ranged:
                late.setdefault(place.ordinal, []).append(member)
                return None
            stored = cursor.read(place.at, place.stored)
            return _expand(place, stored) if len(stored) == place.stored else None

        with closing(cursor):
            for entry, taken in TarWalk(self.file.url, cursor, on_damaged_shard, damage).entries(take):
                if isinstance(taken, SourceError):
                    if on_error is None:
                        raise taken
                    on_error(entry.member, taken)
                elif isinstance(taken, bytes):
                    yield entry.member, taken
        if late:
            targets = self.payloads(
                wanted=lambda m: m.ordinal in late, max_bytes=max_bytes, on_damaged_shard=on_damaged_shard
            )
            for target, payload in targets:
                for link in late[target.ordinal]:
                    yield link, payload


def _expand(place: Place, stored: bytes) -> bytes:
    if place.runs is None:
        return stored
    content = bytearray(place.size)
    at = 0
    for position, size in place.runs:
        content[position : position + size] = stored[at : at + size]
        at += size
    return bytes(content)
