"""The first samples of a file as rows: of a large shard only its start is read, and once.

How much that is follows from counts and positions alone, so that a shard gives the same samples wherever it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mm_assets.errors import LazyModule
from mm_assets.rows.base import RowSource
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.schema import DatasetSchema, MemberRules, PdfRows
from mm_assets.sources.base import Source, index_members, text_encoding
from mm_assets.sources.extract import Shelf
from mm_assets.sources.member import Member, OnDamage, with_roles
from mm_assets.sources.samples import is_metadata, is_text
from mm_assets.storage.files import SourceFile
from mm_assets.storage.read_ahead import read_ahead

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = ["first_samples"]

MAX_MEMBERS = 16 << 10  # of a shard whose samples are not one after the other, so that more than the first are needed
BATCH_BYTES = 1 << 20  # content of one batch: the last one may be read in vain
HELD_BYTES = 16 << 20  # texts of a compressed shard that wait in memory; more wait in a scratch file


class _Start:
    """Ends a member index after the first samples.

    Members of one sample usually follow each other. Where they do not, where none has a second member, as in a shard
    that is sorted by extension, or where some have a JSON and others do not, so that an interleaved sample may name
    members far from it, the index goes on to `MAX_MEMBERS`. It never goes further than `max_reads` reads of the blocks
    of `mm_assets.storage.read_ahead`; these are counted by positions, also where the shard is local.
    """

    def __init__(self, max_samples: int, max_bytes: int, max_reads: int) -> None:
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._reads_left = max_reads
        self._read_end = self._last_offset = 0
        self._keys: dict[str, bool] = {}  # of the samples so far, and whether each has a JSON
        self._num_json = 0  # of the keys that have one
        self._last = ""
        self._num_members = 0
        self._num_bytes = 0  # of members that can only be passed by reading them
        self._several = self._scattered = False

    def __call__(self, member: Member) -> bool:
        self._num_members += 1
        if member.byte_offset is None:
            self._num_bytes += member.byte_size
        else:
            if member.byte_offset > self._read_end:
                self._reads_left -= 1
                self._read_end = member.byte_offset + read_ahead(member.byte_offset - self._last_offset)
            self._last_offset = member.byte_offset
        if self._num_members > MAX_MEMBERS:
            return True
        if member.skip_reason is not None:
            return False
        key = member.sample_key
        if key != self._last and self._keys:
            self._scattered |= key in self._keys or 0 < self._num_json < len(self._keys)
            in_order = self._several and not self._scattered
            if in_order and len(self._keys) >= self._max_samples:
                return True
            if self._num_bytes > self._max_bytes or self._reads_left < 0:
                return True
        self._several |= key == self._last and bool(self._keys)
        self._last = key
        if not self._keys.setdefault(key, False) and is_metadata(member):
            self._keys[key] = True
            self._num_json += 1
        return False


class _EnoughError(Exception):
    """Ends a pass: the member is after the start."""


class _HeldStart:
    """The start of a container that is read from start to end, as a container of its own: texts and names are held.

    Args:
        source: the container.
        until: ends the start before the first member of which it is true.
        layout: which members are texts, and the largest of them.
        on_damaged_shard: as for `Source.payloads`.

    Raises:
        SourceError: the start cannot be read.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = ()
    seekable = False

    def __init__(
        self, source: Source, until: Callable[[Member], bool], layout: MemberRules, on_damaged_shard: OnDamage
    ) -> None:
        self._file = source.file
        self.text_encoding = text_encoding(source, "auto")
        self._texts = Shelf(HELD_BYTES)
        members: list[Member] = []
        lacking: set[int] = set()

        def wanted(member: Member) -> bool:
            member = with_roles(member, layout.roles)
            if until(member):
                raise _EnoughError
            members.append(member)
            loose = member.byte_offset is None and is_text(member, layout.extensions)
            if loose and 0 < member.byte_size <= layout.max_text_bytes:
                lacking.add(member.ordinal)
                return True
            return False

        payloads = source.payloads(
            wanted=wanted, max_bytes=layout.max_text_bytes, on_damaged_shard=on_damaged_shard, damage=[]
        )
        with suppress(_EnoughError):
            for member, payload in payloads:
                self._texts.put(member.ordinal, payload)
                lacking.discard(member.ordinal)
        # A hard link comes after all other members, which a pass that ends early does not reach.
        self._members = [member for member in members if member.ordinal not in lacking]

    @property
    def file(self) -> SourceFile:
        return self._file

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        return False

    def members(self, **_: Any) -> Iterator[Member]:
        return iter(self._members)

    def payloads(self, *, wanted: Callable[[Member], bool], **_: Any) -> Iterator[tuple[Member, bytes]]:
        for member in self._members:
            content = self._texts.get(member.ordinal) if wanted(member) else None
            if content is not None:
                yield member, content

    def close(self) -> None:
        self._texts.close()


def first_samples(
    rows_of: RowSource,
    *,
    layout: MemberRules,
    max_samples: int,
    max_bytes: int,
    max_reads: int,
    grouped: bool = False,
    on_damaged_shard: OnDamage = "fail",
    rejects: list[pa.Table] | None = None,
    pdf: PdfRows = "binary",
) -> Iterator[pa.RecordBatch]:
    """The rows of the first samples of a file, without user columns; no more of it is read than they need.

    PDFs are not opened: each has the rows of one with two pages and some words.

    Args:
        rows_of: the row source of the file.
        layout: how members become rows.
        max_samples: how many samples.
        max_bytes: of a compressed file, bytes that are decompressed for them; at least one sample is read.
        max_reads: of any other container, reads of a block of it; at least one sample is read.
        grouped: as for `RowSource.rows`.
        on_damaged_shard: as for `Source.members`.
        rejects: takes what did not become a row meanwhile, of `REJECTS_SCHEMA`, once the rows are read.
        pdf: what the rows of PDFs are.

    Raises:
        SourceError: while iterating: the start of the file cannot be read.
    """
    with ExitStack() as held:
        index: list[pa.RecordBatch] = []
        sources: list[Source] = []
        for source in rows_of.sources:
            start = _Start(max_samples, max_bytes, max_reads)
            if source.seekable:
                sources.append(source)
                index += index_members(
                    source, on_damaged_shard=on_damaged_shard, damage=[], until=start, roles=layout.roles
                )
            else:
                sources.append(held.enter_context(closing(_HeldStart(source, start, layout, on_damaged_shard))))
                index += index_members(sources[-1])
        if isinstance(rows_of, MemberRows):
            rows_of = MemberRows(sources, shards=rows_of.shards, opens_pdfs=False)
        stream = rows_of.rows(
            lambda: iter(index), layout=layout, schema=DatasetSchema(pdf=pdf), grouped=grouped, batch_bytes=BATCH_BYTES
        )
        if rejects is not None:
            held.callback(lambda: rejects.append(stream.rejects(so_far=True)))
        left, last = max_samples, ""
        for batch in stream:
            ids = batch.column("sample_id")
            changed = pc.not_equal(ids, pa.concat_arrays([pa.array([last], ids.type), ids.slice(0, len(ids) - 1)]))
            starts = pc.indices_nonzero(changed).to_pylist()
            if len(starts) > left:
                yield batch.slice(0, starts[left])
                return
            yield batch
            left -= len(starts)
            last = ids[len(ids) - 1].as_py()
