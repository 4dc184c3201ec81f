"""Members without a byte range, in compressed shards or sparse: read in one pass, in any order of requests.

Members that the pass reaches before they are requested wait on a `Shelf`: in memory up to a budget, then in a scratch
file up to another. A member that the shelf evicted costs another pass, never a wrong answer.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Set
from typing import IO

from mm_assets.errors import ShardError, ShardReadError, SourceError
from mm_assets.media.content_types import Buffer
from mm_assets.sources.base import Source, open_container
from mm_assets.sources.member import Member, ShardDamage
from mm_assets.storage.files import SourceFile

__all__ = ["MemberExtract", "Shelf"]

MAX_SCRATCH = 4 << 30  # bytes of the scratch file; a partition is one shard, so this is several of them


class Shelf:
    """Contents that will be requested again: in memory, beyond that in a scratch file, beyond that forgotten.

    Args:
        memory_bytes: bytes held in memory.
        scratch_bytes: bytes held in the scratch file, which has no name and goes with the process.
    """

    def __init__(self, memory_bytes: int, scratch_bytes: int = MAX_SCRATCH) -> None:
        self._memory_bytes = memory_bytes
        self._scratch_bytes = scratch_bytes
        self._held: OrderedDict[Hashable, bytes] = OrderedDict()
        self._held_bytes = 0
        self._spilled: dict[Hashable, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None
        self._file_end = 0

    def put(self, key: Hashable, content: Buffer) -> None:
        """Stores a copy of `content`, unless both budgets are spent."""
        if key in self._held or key in self._spilled:
            return
        if len(content) > self._memory_bytes:
            self._spill(key, content)
            return
        self._held[key] = bytes(content)
        self._held_bytes += len(content)
        while self._held_bytes > self._memory_bytes:
            oldest, spilled = self._held.popitem(last=False)
            self._held_bytes -= len(spilled)
            self._spill(oldest, spilled)

    def _spill(self, key: Hashable, content: Buffer) -> None:
        if self._file_end + len(content) > self._scratch_bytes:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="mm-assets-", buffering=0)  # noqa: SIM115 (close() does)
            self._file.seek(self._file_end)
            is_whole = self._file.write(content) == len(content)
        except OSError:  # the disk of temporary files is full: the content costs another pass
            is_whole = False
        if not is_whole:
            self._scratch_bytes = self._file_end
            return
        self._spilled[key] = (self._file_end, len(content))
        self._file_end += len(content)

    def get(self, key: Hashable) -> bytes | None:
        """The content, or None where it was never stored, dropped or forgotten."""
        if key in self._held:
            return self._held[key]
        if key not in self._spilled or self._file is None:
            return None
        at, size = self._spilled[key]
        self._file.seek(at)
        return self._file.read(size)

    def drop(self, key: Hashable) -> None:
        """Releases a content that is not needed again."""
        self._held_bytes -= len(self._held.pop(key, b""))
        self._spilled.pop(key, None)
        if not self._spilled and self._file is not None and self._file_end:
            self._file.truncate(0)
            self._file_end = 0

    def close(self) -> None:
        """Releases memory and scratch file."""
        self._held.clear()
        self._held_bytes = 0
        self._spilled.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


class MemberExtract:
    """Members of one shard by name; of several of one name the first.

    Args:
        file: the shard.
        shelf: where members wait that the pass reaches too early.
        max_bytes: a larger member is an error.
        open_container: gives the shard as a container.

    Raises:
        ShardError: the shard is not a container of its format.
        ShardReadError: the storage failed.
    """

    def __init__(
        self,
        file: SourceFile,
        shelf: Shelf,
        *,
        max_bytes: int,
        open_container: Callable[[SourceFile], Source] = open_container,
    ) -> None:
        self.url = file.url
        self._shelf = shelf
        self._max_bytes = max_bytes
        try:
            self._source = open_container(file)
            self._seekable = self._source.seekable
        except SourceError as error:
            raise _fault_of(error) from error
        self._needed: Set[str] = frozenset()
        self._keep_all = False
        self._shelved: set[str] = set()
        self._errors: dict[str, SourceError] = {}
        self._start()

    def begin(self, needed: Set[str], *, last: bool) -> None:
        """Sets the names that will be requested next, so that the pass stores them; with `last` none follow them."""
        self._needed = needed
        if last:
            for name in self._shelved - needed:
                self._shelf.drop((self.url, name))
        # A stream cannot go back, so what later rows may need is shelved. The pass over a seekable source goes on, and
        # starts again for a name that it has passed.
        self._keep_all = not last and not self._seekable

    def _start(self) -> None:
        """Begins a pass, whose first read opens the shard."""
        self._seen: set[str] = set()
        self._damage: list[ShardDamage] = []
        self._pass = self._payloads(self._damage)

    def _payloads(self, damage: list[ShardDamage]) -> Iterator[tuple[Member, bytes]]:
        yield from self._source.payloads(
            wanted=self._wanted,
            max_bytes=self._max_bytes,
            on_error=self._note_error,
            on_damaged_shard="salvage",
            damage=damage,
        )

    def _wanted(self, member: Member) -> bool:
        name = member.member
        if member.skip_reason is not None or name in self._seen:
            return False
        self._seen.add(name)
        return name in self._needed or self._keep_all

    def _note_error(self, member: Member, error: SourceError) -> None:
        self._errors[member.member] = error

    def get(self, name: str) -> bytes:
        """The content of a member.

        Raises:
            SourceError: the shard has no such member, it is too large, or it is lost in damage.
            ShardReadError: the storage failed.
        """
        if name in self._errors:
            raise self._errors[name]
        key = (self.url, name)
        shelved = self._shelf.get(key)
        if shelved is not None:
            self._shelf.drop(key)
            return shelved
        content = None if name in self._seen else self._advance(name)
        if content is None and name in self._seen and name not in self._errors:
            self._start()  # the pass is past it: once more, for what is still needed
            content = self._advance(name)
        if name in self._errors:
            raise self._errors[name]
        if content is None:
            detail = "the shard has no such member"
            if self._damage:
                detail += f" that can be read: at byte {self._damage[0].byte_offset} it is damaged"
                detail += f" ({self._damage[0].detail})"
            self._errors[name] = SourceError(self.url, detail, member=name)
            raise self._errors[name]
        return content

    def _advance(self, name: str) -> bytes | None:
        """Continues until the member comes; the members before it go to the shelf."""
        try:
            for member, content in self._pass:
                if member.member == name:
                    return content
                self._shelf.put((self.url, member.member), content)
                self._shelved.add(member.member)
        except SourceError as error:
            raise _fault_of(error, name) from error
        return None


def _fault_of(error: SourceError, member: str | None = None) -> SourceError:
    """The error of a pass: unchanged if it is about the archive or a member, else a `ShardReadError`."""
    if isinstance(error, ShardError) or error.member is not None:
        return error
    return ShardReadError(error.path, error.detail, member=member, byte_offset=error.byte_offset)
