"""Containers that list each member together with what reads its content; a format only says what its entries are."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from mm_assets.errors import ShardError, SourceError
from mm_assets.sources.member import Member, OnDamage, ShardDamage, named_member
from mm_assets.storage.files import SourceFile

__all__ = ["Entry", "EntrySource", "Scan", "named_entry", "number_entries"]


class Entry(NamedTuple):
    """A member, and what reads its content; None for an entry without content."""

    member: Member
    content: Callable[[], bytes] | None


class Scan(NamedTuple):
    """One pass over a container.

    Attributes:
        on_damaged_shard: as for `mm_assets.sources.base.Source.members`.
        damage: takes what was damaged, when salvaging.
        max_bytes: the size of the largest content that is read; 0 if none is.
    """

    on_damaged_shard: OnDamage
    damage: list[ShardDamage] | None
    max_bytes: int = 0

    def salvage(self, url: str, detail: str, *, byte_offset: int, byte_size: int) -> None:
        """Records damage.

        Raises:
            ShardError: damaged shards are not salvaged; caused by the exception that is being handled, if any.
        """
        if self.on_damaged_shard == "fail":
            raise ShardError(url, detail, byte_offset=byte_offset) from sys.exception()
        if self.damage is not None:
            self.damage.append(ShardDamage(byte_offset=byte_offset, byte_size=byte_size, detail=detail))


class EntrySource(ABC):
    """A container that is read entry by entry; see `mm_assets.sources.base.Source`."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file

    @abstractmethod
    def _entries(self, scan: Scan) -> Iterator[Entry]:
        """Yields every entry in order; errors as `Source.members`."""

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Yields every entry in order; arguments and errors as `Source.members`."""
        for entry in self._entries(Scan(on_damaged_shard, damage)):
            yield entry.member

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """Yields chosen members with their content, in one pass; arguments and errors as `Source.payloads`."""
        for member, content in self._entries(Scan(on_damaged_shard, damage, max_bytes)):
            if not wanted(member) or content is None:
                continue
            try:
                if member.byte_size > max_bytes:
                    detail = f"holds {member.byte_size} bytes, allowed are {max_bytes}"
                    raise SourceError(self.file.url, detail, member=member.member, byte_offset=member.byte_offset)
                payload = content()
            except SourceError as error:
                if error.member is None or on_error is None:  # without a member, the storage failed
                    raise
                on_error(member, error)
            else:
                yield member, payload


def named_entry(
    url: str,
    name: str,
    size: int = 0,
    content: Callable[[], bytes] | None = None,
    *,
    byte_offset: int | None = None,
    skip_reason: str | None = None,
) -> Entry:
    """Returns the entry of a file, which `number_entries` gives its ordinal; arguments as `named_member`."""
    member = named_member(
        url, os.fsencode(name), ordinal=0, byte_size=size, byte_offset=byte_offset, skip_reason=skip_reason
    )
    return Entry(member, content)


def number_entries(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yields entries with ordinals from 0."""
    for ordinal, (member, content) in enumerate(entries):
        yield Entry(member._replace(ordinal=ordinal), content)
