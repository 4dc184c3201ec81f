"""Shards that are not packed: tar, also compressed, and every other container of `mm_assets.sources.SOURCES`.

Members are read as they are asked for, so that the first page of a shard of any size is there at once. Of a container
that can be read by ranges only headers are read; contents of any other, which come in one pass, wait in a scratch file.
A thread of its own reads: one member of a compressed shard may take hours to pass, and no request waits for it. It
rests in the middle of a member, too, when no request waits any more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mm_assets.display import Content, Item, content_item, linked
from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.media.content_types import content_type_of_name
from mm_assets.sources.base import Source, open_container
from mm_assets.sources.compressed import content_name, decompress, is_compressed
from mm_assets.sources.member import Member, ShardDamage, split_member_name
from mm_assets.sources.samples import modality_of, shard_labels
from mm_assets.storage.files import SourceFile
from mm_assets.summaries import counted
from mm_assets.view.backends.base import (
    NO_PICTURE,
    PAGE_SECONDS,
    Backend,
    Entry,
    NoSampleError,
    Picture,
    distinct,
    fingerprint,
    made_in_time,
    shortened,
)
from mm_assets.view.backends.cards import MAX_CANDIDATES, PICTURED_MODALITIES, text_of
from mm_assets.view.backends.member_list import MemberList, MemberPlace
from mm_assets.view.backends.scratch import HeldContents, Scratch

__all__ = ["ContainerBackend"]

MAX_WHOLE = 64 << 20  # bytes of a member that is held in memory to be stored or decompressed
MAX_MEMBERS = 5_000_000  # some hundred megabytes of what is held of them
MAX_DAMAGE = 20  # damaged places that are named
MAX_SHOWN = 400  # members of one sample
MAX_LISTED = 40  # of a card
_SLICE_SECONDS = 0.005  # of reading on, after which waiting requests are notified
_REST_SECONDS = 0.002  # between slices that nothing waits for, in which requests have their turn
_CARD_BYTES = 16 << 10  # of a text that a card may show


class ContainerBackend(Backend):
    """The samples of shards, one after the other.

    Args:
        files: the shards; the backend closes them.
        title: what the page calls them.
    """

    def __init__(self, files: Sequence[SourceFile], title: str) -> None:
        super().__init__(title, "shard" if len(files) == 1 else counted(len(files), "shard"))
        self._files = tuple(files)
        self._sources: dict[int, Source] = {}  # by the number of the file, those that were opened
        self._reading = -1  # number of the file that was opened last
        self._labels = shard_labels([file.url for file in files])
        self._members = MemberList()
        self._scratch: Scratch | None = None
        self._held = HeldContents()
        self._more = threading.Condition()  # of reading on; what is known is read without it
        self._wanted, self._until = 0, 0.0  # samples that requests wait for, and until when
        self._waiting = 0  # requests
        self._failure: Exception | None = None  # a bug of a source
        self._damage: list[str] = []
        self._skipped: Counter[str] = Counter()
        self._complete = False
        self._left = False  # no further request will ask, but those that do now
        self._closed = False
        self._steps = self._walk()
        self._lock = threading.Lock()  # of what follows
        self._shards: dict[str, Backend] = {}  # those that were looked at alone
        self._reader: threading.Thread | None = None

    # --- reading on ---------------------------------------------------------------------------------------------------

    def _walk(self) -> Iterator[None]:
        """Adds the members of all shards, one at each step."""
        for number, file in enumerate(self._files):
            self._members.begin(number)
            file.before_reads = self._rest
            damage: list[ShardDamage] = []
            try:
                source = self._sources[number] = open_container(file)
                self._reading = number
                yield from self._of_ranges(source, damage) if source.seekable else self._of_stream(source, damage)
            except MmAssetsError as error:  # the shards after it may be whole
                self._note_damage(str(error))
            for one in damage:
                where = f"{file.url}, at byte {one.byte_offset:,}"
                self._note_damage(f"{where}: damaged, {one.byte_size:,} bytes are skipped: {one.detail}")
            if self._members.num_members >= MAX_MEMBERS:
                self._note_damage(f"Only the first {MAX_MEMBERS:,} members are shown.")
                break
        self._complete = True

    def _note_damage(self, said: str) -> None:
        if len(self._damage) < MAX_DAMAGE:
            self._damage.append(said)

    def _of_ranges(self, source: Source, damage: list[ShardDamage]) -> Iterator[None]:
        for member in source.members(on_damaged_shard="salvage", damage=damage):
            self._take(member, member.byte_offset)
            yield
            if self._members.num_members >= MAX_MEMBERS:
                return

    def _of_stream(self, source: Source, damage: list[ShardDamage]) -> Iterator[None]:
        """Every content is stored as it passes: it cannot be reached again without another pass."""
        numbers: dict[int, int] = {}
        scratch = self._scratch = self._scratch or Scratch()

        def wanted(member: Member) -> bool:
            number = self._take(member, None)
            if number is not None:
                numbers[member.ordinal] = number
            return number is not None

        payloads = source.payloads(
            wanted=wanted,
            max_bytes=MAX_WHOLE,
            on_error=lambda _member, _error: None,  # the item says that it has no content
            on_damaged_shard="salvage",
            damage=damage,
        )
        for member, content in payloads:
            offset = scratch.put(content)
            if offset is None:
                self._note_damage("The scratch file of the viewer is full: what follows is not shown.")
                return
            self._members.set_offset(numbers.pop(member.ordinal), offset)
            yield
            if self._members.num_members >= MAX_MEMBERS:
                return

    def _take(self, member: Member, offset: int | None) -> int | None:
        if member.skip_reason is not None:
            self._skipped[member.skip_reason.partition(":")[0]] += 1
            return None
        return self._members.add(member, offset)

    def reach(self, count: int, seconds: float) -> None:
        """Reads on until so many samples are known and the next one has begun, the shards end, or the time is over."""
        with self._more:
            if self._reader is None and not self._closed:
                self._reader = threading.Thread(target=self._read_on, name="members", daemon=True)
                self._reader.start()
            if not self._is_known(count):
                self._wanted = max(self._wanted, count)
                self._until = max(self._until, time.monotonic() + seconds)
                self._waiting += 1
                self._more.notify_all()
                self._more.wait_for(lambda: self._is_known(count), max(seconds, 0))
                self._waiting -= 1
        if self._failure is not None:
            raise self._failure

    def _is_known(self, count: int) -> bool:
        return self._complete or self._closed or self._failure is not None or len(self._members) > count

    def _is_wanted(self) -> bool:
        """Whether to read on: for requests, and in a local shard that is read by ranges whatever they ask for.

        The number of samples, and members far from their sample, become known while people look.
        """
        if self._complete or self._closed:
            return False
        at = self._reading
        if at >= 0 and self._sources[at].seekable and self._files[at].is_local and not self._left:
            return True
        return time.monotonic() < self._until and len(self._members) <= self._wanted

    def _is_resumed(self) -> bool:
        """Has the thread wait until a request wants more; False where none will any more."""
        with self._more:
            self._more.notify_all()
            self._more.wait_for(lambda: self._closed or self._left or self._is_wanted())
            if self._left and not self._is_wanted():
                return self._more.wait_for(lambda: self._closed or self._is_wanted(), PAGE_SECONDS) and not self._closed
            return not self._closed

    def _rest(self) -> None:
        is_reader = threading.current_thread() is self._reader
        if is_reader and not self._is_wanted() and not self._is_resumed():
            raise SourceError(self.title, "is no longer shown")  # else it is read to the end of a member without one

    def _read_on(self) -> None:
        try:
            while not (self._complete or self._closed) and self._is_resumed():
                ends = time.monotonic() + _SLICE_SECONDS
                while self._is_wanted() and time.monotonic() < ends:
                    next(self._steps, None)
                if self._waiting == 0:
                    time.sleep(_REST_SECONDS)
        except Exception as error:  # noqa: BLE001  # a bug of a source, which the requests that wait raise
            self._failure = error
        finally:
            with self._more:
                self._closed = self._closed or not self._complete
                self._more.notify_all()
            self._steps = iter(())  # it refers to this backend, as the next do: a file is closed with its last reader
            for file in self._files:
                file.before_reads = None

    @property
    def is_complete(self) -> bool:
        """Whether the end of the last shard was reached."""
        return self._complete

    def known(self) -> int:
        """Samples that have been read; not the last one, of which members may follow."""
        is_complete = self._complete  # before the number, which another thread may raise
        return max(len(self._members) - (0 if is_complete else 1), 0)

    # --- what it holds ------------------------------------------------------------------------------------------------

    def about(self) -> Mapping[str, Any]:
        """Shards and members."""
        return {"files": len(self._files), "members": self._members.num_members}

    def note(self) -> str:
        """Damaged places, and entries that are not part of a sample."""
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in self._skipped.items() if reason != "damaged")
        lines = [*self._damage, f"Entries that are not part of a sample: {skipped}." if skipped else ""]
        return "\n".join(filter(None, lines))

    def ids(self, start: int, stop: int) -> Sequence[str]:
        """The keys of samples; of several shards with the shard's name before them."""
        keys = self._members.keys(start, stop)
        if len(self._files) == 1:
            return keys
        labels = [self._labels[self._files[self._first(sample).file].url] for sample in range(start, stop)]
        return [f"{label}/{key}" for label, key in zip(labels, keys, strict=True)]

    def _first(self, sample: int) -> MemberPlace:
        return self._members.members(sample, 1)[0]

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """The cards of chosen samples."""
        found = []
        for index in indices:
            self.check(index)
            members = self._members.members(index, MAX_LISTED)
            found.append(
                Entry(
                    index=index,
                    id=self.ids(index, index + 1)[0],
                    text=self._first_text(members),
                    names=tuple(_label(member, self._key_of(index)) for member in members),
                    picture=self._picture_of(members).identity,
                )
            )
        return found

    def _key_of(self, index: int) -> str:
        return self._members.keys(index, index + 1)[0]

    def _first_text(self, members: Sequence[MemberPlace]) -> str:
        texts = [member for member in members if _modality(member.name) == "text"]
        for member in sorted(texts, key=lambda one: _text_rank(one.name)):
            if 0 < member.size <= _CARD_BYTES and not is_compressed(member.name) and member.offset is not None:
                try:
                    text = text_of(content_item(member.name, self._content(member)))
                except SourceError:
                    continue  # the sample's page says why
                if text:
                    return shortened(text)
        return ""

    def picture(self, index: int) -> Picture:
        """The first image, clip, array or sound."""
        self.check(index)
        return self._picture_of(self._members.members(index, MAX_LISTED))

    def _picture_of(self, members: Sequence[MemberPlace]) -> Picture:
        chosen = [one for modality in PICTURED_MODALITIES for one in members if _modality(one.name) == modality][
            :MAX_CANDIDATES
        ]
        if not chosen:
            return NO_PICTURE
        items = tuple(partial(self._read_item, member, member.name) for member in chosen)
        return Picture(identity=fingerprint(*map(self._identity, chosen)), items=items)

    def identity(self, index: int) -> str:
        """Follows from the shard as it was opened and where the members are."""
        self.check(index)
        return fingerprint(*(self._identity(member) for member in self._members.members(index, MAX_SHOWN)))

    def _identity(self, member: MemberPlace) -> str:
        file = self._files[member.file]
        return fingerprint(file.identity, file.fingerprint, member.ordinal, member.offset, member.size)

    def items(self, index: int) -> tuple[Item, ...]:
        """Every member of a sample."""
        self.check(index)
        key, members = self._key_of(index), self._members.members(index, MAX_SHOWN)
        names = [_label(member, key) for member in members]
        makers = [partial(self._item, member, name) for member, name in zip(members, names, strict=True)]
        items = linked(distinct(made_in_time(names, makers)))
        left = self._members.count(index) - len(members)
        return items if not left else (*items, Item(name="…", kind="unreadable", note=f"{left:,} more members."))

    def _item(self, member: MemberPlace, name: str) -> Item:
        try:
            return self._read_item(member, name)
        except SourceError as error:
            return Item(name=name, kind="unreadable", note=str(error))

    def _read_item(self, member: MemberPlace, name: str) -> Item:
        return content_item(name, self._content(member), content_type_of_name(content_name(member.name)))

    def _content(self, member: MemberPlace) -> Content:
        """The content of a member, in parts where it is stored as one range."""
        file = self._files[member.file]
        if member.offset is None and not self._sources[member.file].seekable:
            self.reach(MAX_MEMBERS, PAGE_SECONDS)  # links come after all others
            member = self._members.member(member.number)
            if member.offset is None and not self._complete:
                detail = "is a link in a compressed shard, whose end has not been read yet: reload the page"
                raise SourceError(file.url, detail, member=member.name)
        start = member.offset
        if start is not None and not is_compressed(member.name):
            read = self._reader_of(member)
            return Content(member.size, lambda offset, size: read(start + offset, size))
        if member.size > MAX_WHOLE:
            limit = f"{MAX_WHOLE >> 20} MiB"
            detail = f"holds {member.size:,} bytes, and what is not one range of a plain tar is shown up to {limit}"
            raise SourceError(file.url, detail, member=member.name)
        return self._held.content(member.number, partial(self._whole, member))

    def _whole(self, member: MemberPlace) -> bytes:
        start = member.offset
        stored = self._by_pass(member) if start is None else self._reader_of(member)(start, member.size)
        return decompress(stored, member.name, MAX_WHOLE) if is_compressed(member.name) else stored

    def _reader_of(self, member: MemberPlace) -> Callable[[int, int], bytes]:
        """Reads ranges of what the offset of a member counts in."""
        if self._sources[member.file].seekable or self._scratch is None:
            return self._files[member.file].read
        return self._scratch.read

    def _by_pass(self, member: MemberPlace) -> bytes:
        """The content of a sparse member."""
        for _, content in self._sources[member.file].payloads(
            wanted=lambda one: one.ordinal == member.ordinal, max_bytes=MAX_WHOLE, on_damaged_shard="salvage"
        ):
            return content
        raise SourceError(self._files[member.file].url, "its content could not be read", member=member.name)

    # --- shards as partitions -----------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Mapping[str, Any]]:
        """The shards, where there are several."""
        if len(self._files) == 1:
            return ()
        return [{"key": self._labels[file.url], "bytes": file.size, "shard": file.url} for file in self._files]

    def partition(self, key: str) -> Backend:
        """One shard."""
        with self._lock:
            for file in self._files:
                if self._labels[file.url] == key and len(self._files) > 1 and key not in self._shards:
                    self._shards[key] = ContainerBackend([file], file.url)
            if key in self._shards:
                return self._shards[key]
        raise NoSampleError(f"{self.title} has no shard {key!r}")

    def end_reading(self) -> None:
        """Ends the thread that reads on, once no request has waited for it for some seconds."""
        with self._more:
            self._left = True
            self._more.notify_all()
        for shard in self._shards.values():
            shard.end_reading()

    def close(self) -> None:
        """Closes the shards."""
        with self._more:
            self._closed = True
            self._more.notify_all()
        for shard in self._shards.values():
            shard.close()
        for file in self._files:
            file.close()
        if self._scratch is not None:
            self._scratch.close()


def _label(member: MemberPlace, key: str) -> str:
    """What a member is called within its sample: the part of its name after the key, else its name."""
    name = member.name
    while name.startswith("./"):
        name = name[2:]
    rest = name.removeprefix(key).removeprefix(".")
    return rest or name


def _modality(name: str) -> str:
    return modality_of(split_member_name(name)[2], {})


def _text_rank(name: str) -> int:
    """Captions before tables, and metadata last."""
    extension = split_member_name(name)[2]
    return 2 if extension == "json" else 1 if extension in ("csv", "yaml", "yml") else 0
