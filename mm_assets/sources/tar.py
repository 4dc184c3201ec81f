"""The members of a shard: where each stands and what it is, from the tar headers alone.

Walking reads headers and skips payloads; only a compressed shard is read whole, once. Whatever bytes a shard holds, the
walk ends: it gives members or raises `ShardError` with the byte offset. Every entry of the archive is listed, also
directories, links and bytes that are no member; `skip_reason` says why an entry is no part of a sample. Names are text
and nothing else: they are never used as paths of a file system.

Offsets count in the archive, so in a compressed shard they are positions after decompression (in messages only: its
members have no `byte_offset`). Blocks of zeros end an archive, but a header behind them goes on with it, as in tars
that were put together with ``cat``; other bytes behind the end are listed as an entry "trailing bytes".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from mm_assets.errors import SourceError
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, Member, ShardDamage, split_member_name
from mm_assets.sources.stream import RangeSource, open_cursor
from mm_assets.sources.tar_walk import Entry, OnDamage, Place, TarWalk

__all__ = ["Member", "ShardDamage", "index_shard", "iter_members", "iter_payloads", "split_member_name"]

MAX_PAYLOAD = 1 << 30  # bytes of a member that `iter_payloads` hands out unless told otherwise
BATCH_MEMBERS = 16 << 10  # rows of one index batch: a few megabytes


def iter_members(
    source: RangeSource, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
) -> Iterator[Member]:
    """Every entry of a shard, in order.

    Args:
        source: the shard.
        on_damaged_shard: "fail" raises at damage; "salvage" goes on at the next header that can be trusted and lists
            the bytes in between as an entry of type "other".
        damage: takes what was damaged, when salvaging.

    Raises:
        ShardError: the archive is damaged, or compressed in a way that is not read; with the byte offset.
        SourceError: the storage failed.
    """
    cursor = open_cursor(source)
    try:
        for entry, _ in TarWalk(source, cursor, on_damaged_shard, damage).entries(lambda _: None):
            yield entry.member
    finally:
        cursor.close()


def iter_payloads(
    source: RangeSource,
    *,
    wanted: Callable[[Member], bool],
    max_bytes: int = MAX_PAYLOAD,
    on_error: Callable[[Member, SourceError], None] | None = None,
    on_damaged_shard: OnDamage = "fail",
    damage: list[ShardDamage] | None = None,
) -> Iterator[tuple[Member, bytes]]:
    """The content of chosen members, in one pass over the shard.

    Works for every kind of shard: sparse members come with their holes as zeros, hard links with their target's bytes.
    Only in a compressed shard does a wanted hard link cost a second pass, and comes after all others.

    Args:
        source: the shard.
        wanted: asked once for each entry; those without content are never handed out.
        max_bytes: a larger member is an error of that member.
        on_error: takes the error of a member and the walk goes on; None raises it.
        on_damaged_shard: as for `iter_members`.
        damage: takes what was damaged, when salvaging.

    Raises:
        ShardError: the archive is damaged.
        SourceError: a member is too large and `on_error` is None, or the storage failed.
    """
    late: dict[int, list[Member]] = {}
    cursor = open_cursor(source)

    def take(entry: Entry) -> object:
        member, place = entry
        if place is None or not wanted(member):
            return None
        if place.size > max_bytes:
            detail = f"holds {place.size} bytes, allowed are {max_bytes}"
            return SourceError(source.url, detail, member=member.member)
        if cursor.ranged:
            return _expand(place, source.read(place.at, place.stored))
        if member.member_type == "hardlink":
            late.setdefault(place.ordinal, []).append(member)
            return None
        stored = cursor.read(place.at, place.stored)
        return _expand(place, stored) if len(stored) == place.stored else None

    try:
        for entry, taken in TarWalk(source, cursor, on_damaged_shard, damage).entries(take):
            if isinstance(taken, SourceError):
                if on_error is None:
                    raise taken
                on_error(entry.member, taken)
            elif isinstance(taken, bytes):
                yield entry.member, taken
    finally:
        cursor.close()
    if late:
        targets = iter_payloads(
            source, wanted=lambda m: m.ordinal in late, max_bytes=max_bytes, on_damaged_shard=on_damaged_shard
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


def index_shard(
    source: RangeSource, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
) -> Iterator[pa.RecordBatch]:
    """The member index of a shard in batches of `MEMBER_INDEX_SCHEMA`; payloads are not read.

    Args:
        source: the shard.
        on_damaged_shard: as for `iter_members`.
        damage: takes what was damaged, when salvaging.

    Raises:
        ShardError: the archive is damaged, or compressed in a way that is not read; with the byte offset.
        SourceError: the storage failed.
    """
    names = MEMBER_INDEX_SCHEMA.names
    members: list[Member] = []
    for member in iter_members(source, on_damaged_shard=on_damaged_shard, damage=damage):
        members.append(member)
        if len(members) == BATCH_MEMBERS:
            yield _batch(members, names)
            members = []
    if members:
        yield _batch(members, names)


def _batch(members: list[Member], names: list[str]) -> pa.RecordBatch:
    columns = [[getattr(member, name) for member in members] for name in names]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, MEMBER_INDEX_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=MEMBER_INDEX_SCHEMA)
