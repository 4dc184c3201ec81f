"""Rows get their bytes: `binary_content` filled, or `materialize_error` set, for every row of media.

Each byte range is fetched once for all rows of a batch that share it, a multi-frame TIFF or a PDF once for all its
frames or pages. A `source_ref` is followed only where the caller allows it. About `batch_bytes` of content and one item
are held in memory. An error of one item is on its row, and only the policy "fail" raises it. A storage that fails while
a member of an archive is read is not an error of the item: that raises under every policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from mm_assets.errors import ConfigError, LazyModule, MediaError, ShardReadError, SourceError
from mm_assets.media.content_types import Buffer
from mm_assets.media.pdf import DEFAULT_DPI, Frames, frames_of
from mm_assets.rows.content_column import REMOTE_REQUESTS, ContentColumn
from mm_assets.rows.file_columns import with_checksums
from mm_assets.rows.source_ref import SourceRef, of_own_file, parse_source_ref, with_parsed_source_ref_columns
from mm_assets.sources.base import Source, open_container
from mm_assets.sources.compressed import decompress, is_compressed
from mm_assets.sources.extract import MemberExtract, Shelf
from mm_assets.storage.files import SourceFile
from mm_assets.storage.urls import is_local

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = ["MaterializeStream"]

MAX_ERROR = 1000  # characters of an error on a row
_FRAME_OVERHEAD = 2048  # tags and tables that a frame of a TIFF repeats; a page of a PDF may be any size
_COUNTS = ("rows", "media_rows", "materialized", "errors", "frames", "content_bytes", "bytes_read")
_WITHOUT_CONTENT = ("metadata", "text")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR else line[:MAX_ERROR] + "..."


def _tell(ref: SourceRef | None, error: Exception | str) -> str:
    """An error as its row carries it: the file, the member, and the problem."""
    if isinstance(error, SourceError):
        detail = error.detail if error.byte_offset is None else f"at byte {error.byte_offset}: {error.detail}"
    elif isinstance(error, MediaError):
        detail = error.reason
    else:
        detail = str(error)
    if ref is None or ref.path is None:
        return _one_line(f"source_ref: {detail}")
    where = ref.path if ref.member is None else f"{ref.path}, member {ref.member!r}"
    if ref.frame_index is not None:
        where += f", frame {ref.frame_index}"
    return _one_line(f"{where}: {detail}")


class _Work(NamedTuple):
    """A row that has content, or gets it."""

    row: int
    source: SourceRef | SourceError | memoryview  # where its content is, what is wrong with its locator, or its content


@dataclass(slots=True, kw_only=True)
class _Batch:
    """A batch whose rows are getting their content."""

    work: Sequence[_Work]
    out: ContentColumn
    pool: ThreadPoolExecutor
    uses: Counter[Hashable]  # rows that are still to come, by item
    shared: Set[Hashable]  # items of several rows
    files: dict[str, SourceFile | SourceError] = field(default_factory=dict)  # opened for its rows, or why not


@dataclass(slots=True)
class _SharedItem:
    """The bytes that rows share, or that frames are taken out of; they outlive a batch."""

    key: Hashable = None
    content: Buffer | SourceError = b""
    frames: Frames | None = None  # if a frame of it was requested, and it has frames


class MaterializeStream:
    """The rows of one partition with the content of every media row that has none and no error yet; iterate once.

    Media rows are those of any modality but metadata and text. A row's locator is read by range (offset and size), by
    one pass over its shard (a member without range), or whole (a path alone); with `frame_index` a TIFF gives that
    frame as a TIFF of its own and a PDF that page as PNG, anything else is given unchanged. A compressed member
    (``x.jpg.gz``) is decompressed. `content_type` is then determined by the bytes, where they determine it, and
    `source`, where there is such a column, gets it with the checksum. Batches are split where their content fills one.

    Args:
        batches: rows with the reserved columns, in order.
        open_file: opens a file, which it owns; it may return the same one again, and may close local ones when another
            is requested: they are then opened again.
        allowed: whether a `source_ref` may point to this path or URL; others are never opened.
        open_container: opens a file as the container of the requested members.
        fail_on_error: raise the first error of a row instead of leaving it on the row; errors that rows came with
            count too.
        batch_bytes: content of one yielded batch; a larger item is a batch of its own.
        threads: parallel reads of local files.
        max_content_bytes: a larger item is an error.
        pdf_dpi: pixels per inch of the pages of PDFs.

    Attributes:
        counts: ``rows`` yielded, ``media_rows`` among those that came in, ``materialized`` and ``errors`` of these,
            ``frames`` taken out of TIFFs and PDFs, ``content_bytes`` yielded, ``bytes_read`` by range or whole.
            Complete once iterated.

    Raises:
        ConfigError: a number is not positive.
        MissingExtraError: while iterating, a page of a PDF is requested, and the extra is not installed.
        ShardReadError: while iterating, the storage of an archive failed.
        SourceError: while iterating with `fail_on_error`, the content of a row could not be read.
    """

    def __init__(
        self,
        batches: Iterable[pa.RecordBatch],
        *,
        open_file: Callable[[str], SourceFile],
        allowed: Callable[[str], bool],
        open_container: Callable[[SourceFile], Source] = open_container,
        fail_on_error: bool = False,
        batch_bytes: int = 16 << 20,
        threads: int = 2,
        max_content_bytes: int = 1 << 30,
        pdf_dpi: int = DEFAULT_DPI,
    ) -> None:
        numbers = {"batch_bytes": batch_bytes, "threads": threads, "max_content_bytes": max_content_bytes}
        for name, number in numbers.items():
            if number < 1:
                raise ConfigError("arguments", name, f"is {number}, expected at least 1")
        self._batches = batches
        self._open_file = open_file
        self._allowed = allowed
        self._open_container = open_container
        self._fail_on_error = fail_on_error
        self._batch_bytes = batch_bytes
        self._threads = threads
        self._max_content_bytes = max_content_bytes
        self._pdf_dpi = pdf_dpi
        self._started = False
        self.counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._extracts: dict[str, MemberExtract | SourceError] = {}
        self._shelf = Shelf(batch_bytes // 4)
        self._item = _SharedItem()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._started:
            raise RuntimeError("a stream of materialized rows can be iterated once")
        self._started = True
        threads = max(self._threads, REMOTE_REQUESTS)
        with closing(self._shelf), ThreadPoolExecutor(threads, thread_name_prefix="materialize") as pool:
            try:
                for batch, following in pairwise(chain(self._batches, [None])):
                    if batch is not None and batch.num_rows:
                        for filled in self._batch(batch, pool, following is None):
                            self._check(filled)
                            yield with_checksums(filled)
            finally:
                self._extracts.clear()  # which ends their passes over shards

    def _check(self, batch: pa.RecordBatch) -> None:
        """Counts the rows of a batch, and raises its first error where that is the policy."""
        failed = pc.indices_nonzero(batch.column("materialize_error").is_valid())
        if self._fail_on_error and len(failed):
            first = batch.slice(failed[0].as_py(), 1).to_pylist()[0]
            raise SourceError(
                f"sample {first['sample_id']!r}, position {first['position']}", first["materialize_error"]
            )
        self.counts["rows"] += batch.num_rows
        self.counts["content_bytes"] += pc.sum(pc.binary_length(batch.column("binary_content"))).as_py() or 0

    def _batch(self, rows: pa.RecordBatch, pool: ThreadPoolExecutor, last: bool) -> Iterator[pa.RecordBatch]:
        work = self._find_work(rows)
        refs = {row: source for row, source in work if isinstance(source, SourceRef)}
        if all(isinstance(source, memoryview) for _, source in work):
            yield rows
            return
        ahead = self._bytes_ahead(work)
        out = ContentColumn(
            rows,
            pool,
            threads=self._threads,
            limit=self._batch_bytes,
            ahead=ahead[0],
            tell=lambda row, error: _tell(refs.get(row), error),
        )
        uses = Counter(_key(ref) for ref in refs.values())
        shared = {key for key, count in uses.items() if count > 1}
        batch = _Batch(work=work, out=out, pool=pool, uses=uses, shared=shared)
        self._begin_extracts(batch, refs.values(), last)
        for number, (row, source) in enumerate(work):
            if isinstance(source, memoryview):
                if not out.fits(len(source)):
                    yield out.take(row, ahead[number])
                out.keep(row, source)
                continue
            try:
                if isinstance(source, SourceError):
                    raise source
                place = self._place(source, batch, number)
                content = self._content(source, batch) if place is None else b""
            except ShardReadError:
                raise
            except (SourceError, MediaError) as error:
                out.fail(row, error)
                continue
            if not out.fits(len(content) if place is None else place[2]):
                yield out.take(row, ahead[number])
            if place is None:
                out.put(row, content)
            else:
                out.reserve(row, *place, member=source.member)
                if source.byte_offset is None and source.strategy == "direct_read" and place[0].is_local:
                    out.fill()
            if source.byte_offset is None and source.strategy == "direct_read" and is_local(source.path or ""):
                batch.files.pop(source.path or "", None)  # in a folder of many files no two rows share one
        yield out.take(rows.num_rows)
        self.counts["materialized"] += out.num_filled
        self.counts["errors"] += out.num_failed
        self.counts["bytes_read"] += out.bytes_read

    # -- what is to be fetched

    def _find_work(self, batch: pa.RecordBatch) -> list[_Work]:
        """The rows that get content or have some, in order."""
        media = pc.invert(pc.is_in(batch.column("modality"), value_set=pa.array(_WITHOUT_CONTENT)))
        content = batch.column("binary_content")
        present, failed = content.is_valid(), batch.column("materialize_error").is_valid()
        self.counts["media_rows"] += media.true_count
        self.counts["errors"] += pc.and_(media, failed).true_count
        self.counts["materialized"] += pc.and_(media, present).true_count
        todo = pc.and_not(pc.and_not(media, failed), present)
        locators = _locators(batch.column("source_ref").filter(todo))
        work = list(map(_Work, pc.indices_nonzero(todo).to_pylist(), locators))
        for row in pc.indices_nonzero(present).to_pylist():
            work.append(_Work(row, memoryview(content[row].as_buffer()).cast("B")))
        return sorted(work, key=lambda item: item.row)

    def _begin_extracts(self, batch: _Batch, refs: Iterable[SourceRef], last: bool) -> None:
        """Announces to each shard without ranges the members that this batch needs."""
        needed: dict[str, set[str]] = {}
        for ref in refs:
            if ref.byte_offset is None and ref.member is not None and ref.path is not None:
                needed.setdefault(ref.path, set()).add(ref.member)
        for path, names in needed.items():
            try:
                if path not in self._extracts:
                    self._extracts[path] = MemberExtract(
                        self._file(path, batch),
                        self._shelf,
                        max_bytes=self._max_content_bytes,
                        open_container=self._open_container,
                    )
                extract = self._extracts[path]
                if isinstance(extract, MemberExtract):
                    extract.begin(names, last=last)
            except ShardReadError:
                raise
            except SourceError as error:
                self._extracts[path] = error

    def _bytes_ahead(self, work: Sequence[_Work]) -> list[int]:
        """About how much content there is from each row on; an item of unknown size counts as a whole batch."""
        planned = np.zeros(len(work), np.int64)
        before: Hashable = None
        for number, (_, source) in enumerate(work):
            if isinstance(source, memoryview):
                planned[number] = len(source)
            elif isinstance(source, SourceRef):
                size = self._batch_bytes if source.byte_size is None else min(source.byte_size, self._batch_bytes)
                key = _key(source)
                if source.frame_index is not None:
                    size = _FRAME_OVERHEAD + (0 if key == before else size)
                planned[number] = size
                before = key
        ahead: list[int] = np.minimum(planned[::-1].cumsum()[::-1], self._batch_bytes).tolist()
        return ahead

    # -- fetching

    def _file(self, path: str, batch: _Batch) -> SourceFile:
        """Opens an allowed file, and caches it or its `SourceError` for the batch's other rows."""
        found = batch.files.get(path)
        if found is None or (isinstance(found, SourceFile) and found.closed):
            if is_local(path):
                # Opening a file may close others, since a process can hold only so many open: the ranges that wait
                # for these are read first.
                batch.out.fill()
            found = batch.files[path] = self._open(path)
        if isinstance(found, SourceError):
            raise found
        return found

    def _open(self, path: str) -> SourceFile | SourceError:
        if not self._allowed(path):
            return SourceError(path, "is outside the places that the configuration allows, and was not opened")
        try:
            return self._open_file(path)
        except SourceError as error:
            return error

    def _open_ahead(self, batch: _Batch, number: int) -> None:
        """Opens the next remote files of rows that are whole files, concurrently: each is a request."""
        paths: list[str] = []
        for _, ref in batch.work[number : number + REMOTE_REQUESTS]:
            path = ref.path if isinstance(ref, SourceRef) and ref.strategy == "direct_read" else None
            if path is not None and path not in batch.files and path not in paths and not is_local(path):
                paths.append(path)
        batch.files.update(zip(paths, batch.pool.map(self._open, paths), strict=True))

    def _place(self, ref: SourceRef, batch: _Batch, number: int) -> tuple[SourceFile, int, int] | None:
        """The range that is read straight to its place; None where the bytes are shared or have to be processed.

        Raises:
            SourceError: the range is empty, too large, or leaves the file; or the file cannot be read.
        """
        whole = ref.byte_offset is None
        if ref.path is None or (whole and ref.strategy == "tar_extract"):
            return None
        compressed = is_compressed(_name(ref))
        if whole and ref.path not in batch.files and not is_local(ref.path):
            self._open_ahead(batch, number)
        source = self._file(ref.path, batch)
        size = source.size if whole or ref.byte_size is None else ref.byte_size
        offset = ref.byte_offset or 0
        if whole and ref.byte_size is not None and ref.byte_size != size:
            raise SourceError(source.url, f"holds {size} bytes, the source_ref says {ref.byte_size}")
        if offset + size > source.size:
            detail = f"a range of {size} bytes does not lie inside the file's {source.size} bytes"
            raise SourceError(source.url, detail, byte_offset=offset)
        self._check_size(source.url, size)
        if compressed or ref.frame_index is not None or _key(ref) in batch.shared:
            return None
        return source, offset, size

    def _check_size(self, path: str, size: int) -> None:
        if size == 0:
            raise SourceError(path, "is empty: found 0 bytes, expected at least 1")
        if size > self._max_content_bytes:
            raise SourceError(path, f"holds {size} bytes, allowed are {self._max_content_bytes}")

    def _content(self, ref: SourceRef, batch: _Batch) -> Buffer:
        """The bytes of an item that several rows share, or of a frame; `SourceError` or `MediaError` if unreadable."""
        if self._item.key != _key(ref):
            self._change_item(ref, batch)
        item = self._item
        batch.uses[item.key] -= 1
        if isinstance(item.content, SourceError):
            raise item.content
        if ref.frame_index is None:
            return item.content
        if item.frames is None:
            item.frames = frames_of(item.content, pdf_dpi=self._pdf_dpi)
        if item.frames is None:
            return item.content
        frame = item.frames.extract(ref.frame_index)
        self.counts["frames"] += 1
        return frame

    def _change_item(self, ref: SourceRef, batch: _Batch) -> None:
        before = self._item
        if batch.uses[before.key] > 0 and not isinstance(before.content, SourceError):
            self._shelf.put(before.key, before.content)
        self._item = before = _SharedItem()  # released before the next one is read
        key = _key(ref)
        content: Buffer | SourceError | None = self._shelf.get(key)
        if content is None:
            try:
                content = self._extract(ref) if ref.strategy == "tar_extract" else self._read(ref, batch)
                if is_compressed(_name(ref)):
                    content = decompress(content, _name(ref), self._max_content_bytes)
                    self._check_size(ref.path or "", len(content))
            except ShardReadError:
                raise
            except SourceError as error:
                content = error
        elif batch.uses[key] <= 1:
            self._shelf.drop(key)
        self._item = _SharedItem(key, content)

    def _extract(self, ref: SourceRef) -> bytes:
        extract = self._extracts.get(ref.path or "")
        if isinstance(extract, SourceError):
            raise extract
        if extract is None or ref.member is None:
            raise SourceError(ref.path, "no member of it was requested")
        content = extract.get(ref.member)
        self._check_size(extract.url, len(content))
        if ref.byte_size is not None and len(content) != ref.byte_size:
            raise SourceError(extract.url, f"holds {len(content)} bytes, the source_ref says {ref.byte_size}")
        return content

    def _read(self, ref: SourceRef, batch: _Batch) -> memoryview:
        """The whole bytes of one item."""
        source = self._file(ref.path or "", batch)
        size = source.size if ref.byte_size is None else ref.byte_size
        view = memoryview(bytearray(size))
        try:
            source.read_into([(ref.byte_offset or 0, size)], view, [0])
        except SourceError as error:
            if ref.member is None:
                raise
            raise ShardReadError(error.path, error.detail, member=ref.member, byte_offset=error.byte_offset) from error
        self.counts["bytes_read"] += size
        return view


def _name(ref: SourceRef) -> str:
    """The name whose extensions decide whether the content is decompressed."""
    return ref.member or ref.path or ""


def _key(ref: SourceRef) -> Hashable:
    """The key that rows share whose content comes from the same bytes."""
    return ref.path, ref.member if ref.byte_offset is None else None, ref.byte_offset, ref.byte_size


def _locators(texts: Any) -> Iterator[SourceRef | SourceError]:
    """The locator of each row, or what is wrong with it."""
    try:
        parsed = with_parsed_source_ref_columns(pa.table({"source_ref": texts}), prefix="")
    except SourceError:  # one of them is invalid: find out which
        found: Iterable[SourceRef | SourceError] = map(_parse, texts.to_pylist())
    else:
        names = ("path", "member", "byte_offset", "byte_size", "frame_index")
        found = map(SourceRef, *(parsed.column(name).to_pylist() for name in names))
    for ref in found:
        missing = isinstance(ref, SourceRef) and ref.path is None
        if isinstance(ref, SourceRef):
            ref = of_own_file(ref)
        yield SourceError("source_ref", "is missing or has no path, a media row needs one") if missing else ref


def _parse(text: str | None) -> SourceRef | SourceError:
    try:
        return parse_source_ref(text)
    except SourceError as error:
        return error
