"""The rows of a file that is not packed, as the pipeline makes them, and no more of them than requests ask for.

A container is indexed part by part, and the rows of a part are made before the next one is indexed, so that the first
page of a shard of any size is there at once. Rows wait on a shelf of bounded size; so do the contents of a container
that can only be read from its start to its end. A thread of its own reads: one member of a compressed shard may take
hours to pass, and no request waits for it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa

from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.rows.base import RowSource, row_sources
from mm_assets.rows.columns import MemberIndex, RowStream, row_tuples
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.schema import DatasetSchema, MemberRules
from mm_assets.rows.source_ref import SourceRef
from mm_assets.sources.base import Source, index_members, missing_end, text_encoding
from mm_assets.sources.extract import Shelf
from mm_assets.sources.member import Member, ShardDamage, plain_name
from mm_assets.sources.samples import is_metadata
from mm_assets.storage.files import SourceFile
from mm_assets.view.backends.base import shortened
from mm_assets.view.backends.row_files import RowFile

__all__ = ["MAX_WHOLE", "SourceRows"]

MAX_WHOLE = 64 << 20  # bytes of a member that is not one range of its file: it is held in memory to be shown
SHELF_BYTES = 4 << 30  # of rows and contents that wait
SHELF_MEMORY = 8 << 20  # of them that wait in memory
BACKGROUND_BYTES = 64 << 20  # of rows that are made while no request asks for them
BATCH_BYTES = 1 << 20
FIRST_SAMPLES, MAX_SAMPLES = 64, 4096  # of a part; each has twice as many as the one before
MAX_MEMBERS = 64 << 10  # of a part; a sample with more has rows of several parts
PART_BYTES = 64 << 20  # of contents that have to be passed to come to the next part
LINK_BYTES = 256  # of memory that a hard link takes
MAX_NAMED = 20  # damaged places that are named
MAX_EXAMPLE = 200  # characters of an entry that became no row, and why
MAX_REJECTS = 10_000  # that are shown with their sample
ASKED_SECONDS = 0.1  # for which a call of `reach` counts as a request that waits
WAIT_SECONDS = 0.02  # that one call waits for the thread

_LAYOUT = MemberRules()
_SCHEMA = DatasetSchema()


class _Part:
    """Some members of a container, as a container of their own.

    Args:
        source: the container.
        members: the members.
        passed: gives the contents of a container that cannot be read again.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: Source, members: Sequence[Member], passed: Callable[[str], bytes | None] | None) -> None:
        self.file = source.file
        self.seekable = source.seekable
        self.text_encoding = text_encoding(source, "auto")
        self._source = source
        self._members = members
        self._passed = passed

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        return False

    def members(self, **_: Any) -> Iterator[Member]:
        return iter(self._members)

    def payloads(self, *, wanted: Callable[[Member], bool], max_bytes: int, **_: Any) -> Iterator[tuple[Member, bytes]]:
        if self._passed is None:
            yield from self._source.payloads(wanted=wanted, max_bytes=max_bytes, on_damaged_shard="salvage")
            return
        for member in self._members:
            content = self._passed(member.member) if wanted(member) else None
            if content is not None:
                yield member, content


class SourceRows(RowFile):
    """The rows of a file in any format that the pipeline reads.

    Args:
        file: the file.

    Raises:
        ShardError: its format is not known.
        SourceError: the storage failed.
    """

    unpacked = True

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        (self._rows_of,) = row_sources([file])
        self.folders = self._rows_of.folders
        self.is_stream = not all(source.seekable for source in self._rows_of.sources)
        self._complete = False
        self._batches = self._make()
        self._starts = [0]  # the first row of each batch, and the number of rows
        self._latest: tuple[int, pa.RecordBatch] | None = None  # the batch that was read last
        self._shelf = Shelf(SHELF_MEMORY, SHELF_BYTES)
        self._shelved = 0  # bytes
        self._targets: dict[str, str] = {}  # of hard links
        self._damage: list[ShardDamage] = []
        self._notes: list[str] = []
        self._reasons: Counter[str] = Counter()  # why entries are in no row
        self._examples: dict[str, str] = {}  # an entry of each reason, and what is wrong with it
        self._rejects: dict[str, list[tuple[SourceRef, str]]] = {}
        self._failure: Exception | None = None  # a bug of a source
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._until = 0.0  # when no request waits any more
        self._asked = threading.Event()
        self._ended = False
        file.before_reads = self._rest

    # --- making rows --------------------------------------------------------------------------------------------------

    def _make(self) -> Iterator[pa.RecordBatch]:
        if not self._rows_of.sources:
            yield from self._rows(self._rows_of, lambda: iter(()))
        for source in self._rows_of.sources:
            passed = self._passed if self.is_stream else None
            for members in self._parts(source):
                part = _Part(source, members, passed)
                yield from self._rows(MemberRows([part]), partial(index_members, part), members)

    def _rows(self, rows_of: RowSource, index: MemberIndex, members: Sequence[Member] = ()) -> Iterator[pa.RecordBatch]:
        stream = rows_of.rows(index, layout=_LAYOUT, schema=_SCHEMA, grouped=False, batch_bytes=BATCH_BYTES)
        noted = 0
        for batch in stream:
            yield batch
            noted = self._note_rejects(stream, noted, members)
        self._note_rejects(stream, noted, members)

    def _note_rejects(self, stream: RowStream, noted: int, members: Sequence[Member]) -> int:
        rejects = stream.rejects(so_far=True)
        places = {one.member: one.byte_offset for one in reversed(members)} if len(rejects) > noted else {}
        sizes = (
            {one.member: one.byte_size for one in reversed(members) if one.byte_offset is not None} if places else {}
        )
        columns = ("sample_id", "member", "reason", "detail")
        for sample_id, member, reason, detail in row_tuples(rejects.slice(noted), *columns):
            if reason == "damaged":  # which the note says with its place
                continue
            self._reasons[reason] += 1
            said = member if detail.endswith(reason) else ": ".join(filter(None, (member, detail)))
            self._examples.setdefault(reason, shortened(said or "", MAX_EXAMPLE))
            if sample_id is not None and self._reasons.total() <= MAX_REJECTS:
                ref = SourceRef(self.file.url, member, places.get(member), sizes.get(member))
                self._rejects.setdefault(sample_id, []).append((ref, f"{reason}: {detail}"))
        return len(rejects)

    def _parts(self, source: Source) -> Iterator[list[Member]]:
        """The members in parts that end between two keys; one part at least.

        Where some keys have a JSON and others do not, a JSON may name members of other keys: the part is a long one,
        unless each member takes a request.
        """
        part: list[Member] = []
        limit, num_keys, num_json, num_bytes, key = FIRST_SAMPLES, 0, 0, 0, ""
        for member in self._members(source) if self.is_stream else self._indexed(source):
            is_next = member.skip_reason is None and (member.sample_key != key or not num_keys)
            is_mixed = 0 < num_json < num_keys and num_keys < MAX_SAMPLES and self.file.is_local
            is_long = num_keys >= limit and not is_mixed
            if len(part) >= MAX_MEMBERS or (num_keys and is_next and (is_long or num_bytes >= PART_BYTES)):
                yield part
                part, num_keys, num_json, num_bytes = [], 0, 0, 0
                limit = min(2 * limit, MAX_SAMPLES)
            if is_next:
                num_keys, key = num_keys + 1, member.sample_key
            num_json += member.skip_reason is None and is_metadata(member)
            part.append(member)
            num_bytes += member.byte_size if self.is_stream else 0
        yield part

    def _indexed(self, source: Source) -> Iterator[Member]:
        yield from source.members(on_damaged_shard="salvage", damage=self._damage)
        self._notes += filter(None, [missing_end(source)])

    def _members(self, source: Source) -> Iterator[Member]:
        """The members of a container that is read once, from its start to its end; their contents are shelved."""
        waiting: list[Member] = []  # those without content of their own

        def wanted(member: Member) -> bool:
            if member.skip_reason is None and member.member_type != "hardlink":
                return True
            if member.skip_reason is None:
                target = plain_name(member.link_target or "")
                self._shelved += LINK_BYTES
                self._targets[plain_name(member.member)] = self._targets.get(target, target)
            waiting.append(member)
            if len(waiting) > MAX_MEMBERS:
                detail = f"has more than {MAX_MEMBERS:,} entries without content in a row: what follows is not shown"
                raise SourceError(self.file.url, detail)
            return False

        payloads = source.payloads(
            wanted=wanted,
            max_bytes=MAX_WHOLE,
            on_error=lambda member, _: waiting.append(member),  # its row says that it has no content here
            on_damaged_shard="salvage",
            damage=self._damage,
        )
        for member, content in payloads:
            if not self._put(("member", plain_name(member.member)), content):
                break
            yield from waiting
            waiting.clear()
            yield member
        yield from waiting

    def _put(self, key: tuple[str, str | int], content: bytes | memoryview) -> bool:
        """Shelves rows or a content; returns whether there was space, and notes if there was none."""
        self._shelved += len(content)
        if self._shelved > SHELF_BYTES:
            full = f"What follows is not shown: the rows and contents before it fill {SHELF_BYTES >> 30} GiB. "
            self._notes.append(f"{full}{self._advice}")
            return False
        with self._lock:
            self._shelf.put(key, content)
        return True

    @property
    def _advice(self) -> str:
        return f"Pack it to look at any sample at once: mm-assets run {self.file.url}"

    # --- the thread ---------------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """Has some rows made, and waits for them for a moment."""
        self._until = time.monotonic() + ASKED_SECONDS
        self._asked.set()
        with self._lock:
            if self._reader is None or not (self._reader.is_alive() or self._complete):
                self._reader = threading.Thread(target=self._read_on, name="rows", daemon=True)
                self._reader.start()
        self._reader.join(WAIT_SECONDS)
        if self._failure is not None:
            raise self._failure

    def _read_on(self) -> None:
        """Makes a batch of rows; further ones of a local file, whose number of samples becomes known that way."""
        try:
            begun = time.monotonic()
            while self._advance() and self.file.is_local and not self.is_stream:
                ended = time.monotonic()
                if self._ended or (ended > self._until and self._shelved > BACKGROUND_BYTES):
                    return
                if ended > self._until:
                    time.sleep(ended - begun)  # in which requests have their turn
                begun = time.monotonic()
        except Exception as error:  # noqa: BLE001  # whatever a source raises, `reach` raises it again in the request's thread
            self._failure = error

    def _advance(self) -> bool:
        """Makes the next batch; returns whether there was one."""
        try:
            batch = next(self._batches, None)
        except MmAssetsError as error:  # what is before it is shown
            self._notes.append(str(error))
            batch = None
        number = len(self._starts) - 1
        if batch is None or not self._put(("rows", number), memoryview(batch.serialize())):
            self._batches = iter(())  # which referred to this object
            self._complete = True
            return False
        self._starts.append(self._starts[-1] + batch.num_rows)
        return True

    def _rest(self) -> None:
        """Pauses the thread in the middle of a member while no request waits."""
        while time.monotonic() > self._until:
            if self._ended:
                raise SourceError(self.file.url, "is no longer shown")
            self._asked.clear()
            if time.monotonic() > self._until and not self._ended:
                self._asked.wait()

    def end_reading(self) -> None:
        """Ends the thread once it is no longer asked for."""
        self._ended = True
        self._asked.set()

    def close(self) -> None:
        """Closes the file and releases what waits."""
        self.end_reading()
        self._until = 0.0
        with self._lock:
            self._shelf.close()
        self.file.close()

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been made, or no more will be."""
        return self._complete

    # --- what was made ------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows that have been made."""
        return self._starts[-1]

    def ids(self, start: int, stop: int) -> Sequence[object]:
        """The values of `sample_id`."""
        return [one for batch in self._slices(start, stop) for one in batch.column("sample_id").to_pylist()]

    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Rows that have been made."""
        return [row for batch in self._slices(start, stop) for row in batch.to_pylist()]

    def _slices(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            first, end = self._starts[number], min(self._starts[number + 1], stop)
            yield self._batch(number).slice(start - first, end - start)
            start = end

    def _batch(self, number: int) -> pa.RecordBatch:
        latest = self._latest
        if latest is None or latest[0] != number:
            data = self._shelved_content(("rows", number))
            latest = self._latest = number, pa.ipc.read_record_batch(pa.py_buffer(data), _SCHEMA.row_schema())
        return latest[1]

    def _shelved_content(self, key: tuple[str, str | int]) -> bytes:
        with self._lock:
            found = self._shelf.get(key)
        if found is None:
            detail = "what was read of it is no longer there, since the disk of temporary files is full: free some"
            raise SourceError(self.file.url, detail)
        return found

    def _passed(self, member: str) -> bytes | None:
        with self._lock:
            name = plain_name(member)
            return self._shelf.get(("member", self._targets.get(name, name)))

    def passed(self, member: str) -> bytes:
        """The content of a member that was shelved when it was passed.

        Raises:
            SourceError: it was not, because it is too large.
        """
        found = self._passed(member)
        if found is None:
            detail = f"it is not one range of a file, and such members are shown up to {MAX_WHOLE >> 20} MiB. "
            raise SourceError(self.file.url, f"{detail}{self._advice}", member=member)
        return found

    def rejects(self, sample_id: str) -> Sequence[tuple[SourceRef, str]]:
        """Members of a sample that became no row, and why."""
        return self._rejects.get(sample_id, ())

    def note(self) -> str:
        """Where it is damaged, what became no row, and what a page of a stream waits for."""
        lines = [
            f"{self.file.url}, at byte {one.byte_offset:,}: damaged, {one.byte_size:,} bytes are skipped: {one.detail}"
            for one in self._damage[:MAX_NAMED]
        ]
        lines += self._notes
        if self._reasons:
            reasons = (
                f"{count:,} {reason.replace('_', ' ')} ({self._examples[reason]})"
                for reason, count in self._reasons.most_common(MAX_NAMED)
            )
            lines.append(f"Entries that became no row: {', '.join(reasons)}.")
        if self.is_stream and not self.is_complete:
            slow = "It can only be read from its start, so that a page far behind takes as long as all before it."
            lines.append(f"{slow} {self._advice}")
        return "\n".join(lines)
