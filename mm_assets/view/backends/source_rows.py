"""The rows of a file that is not packed, as the pipeline makes them, read only as far as requests need.

A container is indexed in parts, and the rows of a part are made before the next part is indexed, so that the first page
of a shard of any size is shown at once. Rows are cached on a shelf of bounded size, as are the contents of a container
that can only be read from start to end. A separate thread reads: skipping one member of a compressed shard may take
hours, and no request waits for it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import pyarrow as pa

from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.rows.base import RowSource, row_sources
from mm_assets.rows.columns import MemberIndex, RowStream, row_tuples
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.schema import DatasetSchema, MemberRules
from mm_assets.rows.source_ref import SourceRef
from mm_assets.rows.user_columns import columns_of
from mm_assets.sources.base import Source, index_members, missing_end, text_encoding
from mm_assets.sources.extract import Shelf
from mm_assets.sources.member import Member, ShardDamage, plain_name
from mm_assets.sources.samples import is_metadata
from mm_assets.storage.files import SourceFile
from mm_assets.view.backends.base import shortened
from mm_assets.view.backends.row_files import MAX_WHOLE, RowFile

__all__ = ["SourceRows"]

SHELF_BYTES = 4 << 30  # for rows and contents
SHELF_MEMORY_BYTES = 8 << 20  # beyond it the shelf uses a temporary file
BACKGROUND_BYTES = 64 << 20  # for rows and contents that no request waits for
BATCH_BYTES = 1 << 20
FIRST_SAMPLES, MAX_SAMPLES = 64, 4096  # per part; each part has twice as many as the one before
MAX_MEMBERS = 64 << 10  # per part; the rows of a sample with more members are in several parts
PART_BYTES = 64 << 20  # of contents in a part of a stream
LINK_BYTES = 256  # of memory that a hard link takes
MAX_PLACES_IN_NOTE = 20
MAX_REASONS_IN_NOTE = 20
MAX_EXAMPLE_CHARACTERS = 200
MAX_OBJECTS_FOR_COLUMNS = 1024  # rows of a table that determine its columns
MAX_REJECTS = 10_000  # beyond it, rejects are counted and not shown with their sample
REQUEST_SECONDS = 0.1  # after a call of `reach`, the thread reads as if a request waited
WAIT_SECONDS = 0.02  # that a call of `reach` waits for the thread

_LAYOUT = MemberRules()


class _Part:
    """Some members of a container, as a separate container.

    Args:
        source: the container.
        members: the members.
        content_of: returns the content of a member by its name; None if the container itself can be read again.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, source: Source, members: Sequence[Member], content_of: Callable[[str], bytes | None] | None
    ) -> None:
        self.file = source.file
        self.seekable = source.seekable
        self.text_encoding = text_encoding(source, "auto")
        self._source = source
        self._members = members
        self._content_of = content_of

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        return False

    def members(self, **_: Any) -> Iterator[Member]:
        return iter(self._members)

    def payloads(self, *, wanted: Callable[[Member], bool], max_bytes: int, **_: Any) -> Iterator[tuple[Member, bytes]]:
        if self._content_of is None:
            yield from self._source.payloads(wanted=wanted, max_bytes=max_bytes, on_damaged_shard="salvage")
            return
        for member in self._members:
            content = self._content_of(member.member) if wanted(member) else None
            if content is not None:
                yield member, content


class SourceRows(RowFile):
    """The rows of a file in any format that the pipeline reads.

    Args:
        file: the file.

    Raises:
        ShardError: the format is unknown.
        SourceError: the storage failed.
    """

    is_source = True

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        (self._row_source,) = row_sources([file])
        self.folders = self._row_source.folders
        self.is_stream = not all(source.seekable for source in self._row_source.sources)
        self._schema = DatasetSchema()
        self._is_complete = False
        self._batches = self._read_batches()
        self._starts = [0]  # the first row of each batch, and the number of rows
        self._latest: tuple[int, pa.RecordBatch] | None = None  # the batch that was read last, and its number
        self._shelf = Shelf(SHELF_MEMORY_BYTES, SHELF_BYTES)
        self._shelf_size = 0  # bytes
        self._link_targets: dict[str, str] = {}  # by the name of a hard link
        self._damage: list[ShardDamage] = []
        self._notes: list[str] = []
        self._reasons: Counter[str] = Counter()  # why entries became no row
        self._examples: dict[str, str] = {}  # by reason, an entry and what is wrong with it
        self._rejects: dict[str, list[tuple[SourceRef, str]]] = {}
        self._bug: Exception | None = None  # that the thread ran into
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._request_end = 0.0  # the time after which no request waits
        self._request = threading.Event()
        self._is_closing = False
        file.before_reads = self._pause

    # --- reading rows -------------------------------------------------------------------------------------------------

    def _read_batches(self) -> Iterator[pa.RecordBatch]:
        if not isinstance(self._row_source, MemberRows):
            objects = islice(self._row_source.objects(layout=_LAYOUT), MAX_OBJECTS_FOR_COLUMNS)
            self._schema = DatasetSchema(user_columns=columns_of(objects, _LAYOUT, shown=self.file.url))
            yield from self._read_part(self._row_source, lambda: iter(()))
            return
        for source in self._row_source.sources:
            content_of = self._shelved_member if self.is_stream else None
            for members in self._parts(source):
                part = _Part(source, members, content_of)
                yield from self._read_part(MemberRows([part]), partial(index_members, part), members)

    def _read_part(
        self, rows_of: RowSource, index: MemberIndex, members: Sequence[Member] = ()
    ) -> Iterator[pa.RecordBatch]:
        stream = rows_of.rows(index, layout=_LAYOUT, schema=self._schema, grouped=False, batch_bytes=BATCH_BYTES)
        num_rejects = 0
        for batch in stream:
            yield batch
            num_rejects = self._add_rejects(stream, num_rejects, members)
        self._add_rejects(stream, num_rejects, members)

    def _add_rejects(self, stream: RowStream, start: int, members: Sequence[Member]) -> int:
        """Adds the rejects of a stream from a number on; returns how many it has."""
        rejects = stream.rejects(so_far=True)
        by_name = {member.member: member for member in reversed(members)} if len(rejects) > start else {}
        columns = ("sample_id", "member", "reason", "detail")
        for sample_id, name, reason, detail in row_tuples(rejects.slice(start), *columns):
            if reason == "damaged":  # the note has it with its place
                continue
            self._reasons[reason] += 1
            example = name if detail.endswith(reason) else ": ".join(filter(None, (name, detail)))
            self._examples.setdefault(reason, shortened(example or "", MAX_EXAMPLE_CHARACTERS))
            if sample_id is not None and self._reasons.total() <= MAX_REJECTS:
                ref = SourceRef(self.file.url, name)
                if (member := by_name.get(name)) is not None and member.byte_offset is not None:
                    ref = ref._replace(byte_offset=member.byte_offset, byte_size=member.byte_size)
                self._rejects.setdefault(sample_id, []).append((ref, f"{reason}: {detail}"))
        return len(rejects)

    def _parts(self, source: Source) -> Iterator[list[Member]]:
        """Yields the members in parts that end between two keys; one part at least.

        If some keys have a JSON and others do not, a JSON may name members of other keys: the part then is a long one,
        unless each member takes a request.
        """
        part: list[Member] = []
        limit, num_keys, num_json, num_bytes, key = FIRST_SAMPLES, 0, 0, 0, ""
        for member in self._stream_members(source) if self.is_stream else self._indexed_members(source):
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

    def _indexed_members(self, source: Source) -> Iterator[Member]:
        yield from source.members(on_damaged_shard="salvage", damage=self._damage)
        self._notes += filter(None, [missing_end(source)])

    def _stream_members(self, source: Source) -> Iterator[Member]:
        """Yields the members of a container that is read once, from start to end, and shelves their contents."""
        without_content: list[Member] = []  # since the last member with content

        def wanted(member: Member) -> bool:
            if member.skip_reason is None and member.member_type != "hardlink":
                return True
            if member.skip_reason is None:
                target = plain_name(member.link_target or "")
                self._shelf_size += LINK_BYTES
                self._link_targets[plain_name(member.member)] = self._link_targets.get(target, target)
            without_content.append(member)
            if len(without_content) > MAX_MEMBERS:
                detail = f"has more than {MAX_MEMBERS:,} entries without content in a row: what follows is not shown"
                raise SourceError(self.file.url, detail)
            return False

        payloads = source.payloads(
            wanted=wanted,
            max_bytes=MAX_WHOLE,
            on_error=lambda member, _: without_content.append(member),  # its row reports that there is no content
            on_damaged_shard="salvage",
            damage=self._damage,
        )
        for member, content in payloads:
            if not self._put(("member", plain_name(member.member)), content):
                break
            yield from without_content
            without_content.clear()
            yield member
        yield from without_content

    def _put(self, key: tuple[str, str | int], content: bytes | memoryview) -> bool:
        """Shelves rows or a content; returns whether there was space, and adds a note if there was none."""
        self._shelf_size += len(content)
        if self._shelf_size > SHELF_BYTES:
            full = f"What follows is not shown: the rows and contents before it fill {SHELF_BYTES >> 30} GiB. "
            self._notes.append(f"{full}{self._advice}")
            return False
        with self._lock:
            self._shelf.put(key, content)
        return True

    @property
    def _advice(self) -> str:
        return f"Pack it to open any sample at once: mm-assets run {self.file.url}"

    # --- the thread ---------------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """Makes the thread read more rows, and waits for them for a moment."""
        self._request_end = time.monotonic() + REQUEST_SECONDS
        self._request.set()
        with self._lock:
            if self._reader is None or not (self._reader.is_alive() or self._is_complete):
                self._reader = threading.Thread(target=self._read, name="rows", daemon=True)
                self._reader.start()
        self._reader.join(WAIT_SECONDS)
        if self._bug is not None:
            raise self._bug

    def _read(self) -> None:
        """Reads a batch of rows; of a local file also those after it, so that the number of samples becomes known."""
        try:
            start = time.monotonic()
            while self._advance() and self.file.is_local and not self.is_stream:
                now = time.monotonic()
                is_idle = now > self._request_end
                if self._is_closing or (is_idle and self._shelf_size > BACKGROUND_BYTES):
                    return
                if is_idle:
                    time.sleep(now - start)  # leaves half of the time to requests
                start = time.monotonic()
        except Exception as error:  # noqa: BLE001  # whatever a source raises, `reach` raises it in the request's thread
            self._bug = error

    def _advance(self) -> bool:
        """Reads the next batch; returns whether there was one."""
        try:
            batch = next(self._batches, None)
        except MmAssetsError as error:  # the rows before it are shown
            self._notes.append(str(error))
            batch = None
        number = len(self._starts) - 1
        if batch is None or not self._put(("rows", number), memoryview(batch.serialize())):
            self._batches = iter(())  # releases the generator, which refers to this object
            self._is_complete = True
            return False
        self._starts.append(self._starts[-1] + batch.num_rows)
        return True

    def _pause(self) -> None:
        """Pauses the thread, also within a member, while no request waits."""
        while time.monotonic() > self._request_end:
            if self._is_closing:
                raise SourceError(self.file.url, "is no longer shown")
            self._request.clear()
            if time.monotonic() > self._request_end and not self._is_closing:
                self._request.wait()

    def end_reading(self) -> None:
        """Ends the thread as soon as no request waits for it."""
        self._is_closing = True
        self._request.set()

    def close(self) -> None:
        """Ends the thread, closes the file and releases the shelf."""
        self.end_reading()
        self._request_end = 0.0
        with self._lock:
            self._shelf.close()
        self.file.close()

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been read, or no more will be."""
        return self._is_complete

    # --- rows that have been read -------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """The number of rows that have been read."""
        return self._starts[-1]

    def ids(self, start: int, stop: int) -> Sequence[object]:
        """Returns the values of `sample_id`."""
        return [value for batch in self._slices(start, stop) for value in batch.column("sample_id").to_pylist()]

    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Returns rows that have been read."""
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
            with self._lock:
                data = self._shelf.get(("rows", number))
            if data is None:
                detail = "its rows are no longer cached, since the disk of temporary files is full: free some space"
                raise SourceError(self.file.url, detail)
            latest = self._latest = number, pa.ipc.read_record_batch(pa.py_buffer(data), self._schema.row_schema())
        return latest[1]

    def _shelved_member(self, member: str) -> bytes | None:
        with self._lock:
            name = plain_name(member)
            return self._shelf.get(("member", self._link_targets.get(name, name)))

    def stream_content(self, member: str) -> bytes:
        """Returns the content of a member that was shelved when the stream was read.

        Raises:
            SourceError: it was not, because it is too large.
        """
        content = self._shelved_member(member)
        if content is None:
            detail = f"it is not one range of a file, and such members are shown up to {MAX_WHOLE >> 20} MiB. "
            raise SourceError(self.file.url, f"{detail}{self._advice}", member=member)
        return content

    def rejects(self, sample_id: str) -> Sequence[tuple[SourceRef, str]]:
        """Returns the members of a sample that became no row, each with the reason."""
        return self._rejects.get(sample_id, ())

    def note(self) -> str:
        """Returns where the file is damaged, what became no row, and why a page of a stream takes long."""
        lines = [
            f"{self.file.url}, at byte {place.byte_offset:,}: damaged, {place.byte_size:,} bytes are skipped: "
            f"{place.detail}"
            for place in self._damage[:MAX_PLACES_IN_NOTE]
        ]
        lines += self._notes
        if self._reasons:
            reasons = (
                f"{count:,} {reason.replace('_', ' ')} ({self._examples[reason]})"
                for reason, count in self._reasons.most_common(MAX_REASONS_IN_NOTE)
            )
            lines.append(f"Entries that became no row: {', '.join(reasons)}.")
        if self.is_stream and not self.is_complete:
            slow = "It can only be read from its start: a page takes as long as all pages before it together."
            lines.append(f"{slow} {self._advice}")
        return "\n".join(lines)
