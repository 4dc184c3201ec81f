"""Shards that begin with a table of where their samples are: what MDS and LitData have in common.

Such a file has the number of samples, then the start of each and the end of the last, all of 4 bytes; a sample has the
sizes of its values, then the values. A table and values that contradict the file are damage, of the samples that they
concern alone where that is possible. A compressed shard is decompressed to an unnamed local file, once.
"""

from __future__ import annotations

import math
import posixpath
import struct
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ShardError, first_line, temporary_disk_named
from mm_assets.sources.arrays import npy_bytes, npy_size, png_bytes, png_size
from mm_assets.sources.entries import Entry, EntrySource, Scan
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.member import skipped_bytes
from mm_assets.sources.row_members import MAX_LIST_CELLS, Cell, ColumnKind, RowMembers
from mm_assets.sources.stream import RangeCursor, decompressed
from mm_assets.sources.tar_header import BLOCK
from mm_assets.storage.files import SourceFile

__all__ = [
    "PICKLE_REASON",
    "Column",
    "OffsetTableSource",
    "Value",
    "array_cell",
    "cells_of",
    "file_cell",
    "is_table",
    "number_of",
    "parts_of",
    "picture_cell",
    "sizes_of",
    "skipped_cell",
]

MAX_SAMPLES = 1 << 24  # of a shard, whose table takes 64 MiB then
MAX_VALUE_BYTES = 64 << 20  # of a value that becomes a part of a row's JSON, or its key
MAX_CONFIG_BYTES = 16 << 20  # what a shard says about its columns
MAX_SMALL_VALUE = 64 << 10  # bytes of a value whose bytes the cursor over the samples is likely to have
MAX_DIMENSIONS = 32  # of an array: NumPy 1 has no more
MAX_DECOMPRESSED = (1 << 32) - 1 + (64 << 20)  # offsets are uint32, and an index of Arrow may follow the samples
COPY_CHUNK = 1 << 20

PICKLE_REASON = "a pickle, which could run code: it is never loaded; write the column with another encoding"

_PICTURE_MODES = {"L": ("u1", ()), "LA": ("u1", (2,)), "RGB": ("u1", (3,)), "RGBA": ("u1", (4,)), "I;16": ("<u2", ())}
_ARRAY_MODES = {"I": "<i4", "F": "<f4"}


class Value(NamedTuple):
    """The bytes of one value.

    Attributes:
        source: the shard, decompressed.
        cursor: reads it near to where the last sample was read.
        start: first byte in it.
        size: bytes.
        is_ranged: whether its place is one of the shard itself.
        needs_head: whether the name of its member depends on its first bytes.
    """

    source: SourceFile
    cursor: RangeCursor
    start: int
    size: int
    is_ranged: bool
    needs_head: bool

    def read(self) -> bytes:
        """Returns all bytes; a small value rarely takes another read of the shard."""
        reader = self.cursor if self.size <= MAX_SMALL_VALUE else self.source
        return reader.read(self.start, self.size)

    def head(self, size: int) -> bytes:
        """Returns up to `size` of its first bytes."""
        return self.cursor.read(self.start, min(self.size, size))

    def part(self, start: int, size: int) -> Value:
        """Returns some of its bytes; `ValueError` if it does not have them."""
        if start + size > self.size:
            raise ValueError(f"has {self.size:,} bytes, expected {start + size:,}")
        return self._replace(start=self.start + start, size=size)

    def whole(self) -> bytes:
        """Returns the bytes of a value of a row's JSON; `ValueError` for too many."""
        if self.size > MAX_VALUE_BYTES:
            raise ValueError(f"has {self.size:,} bytes, at most {MAX_VALUE_BYTES:,} are read")
        return self.head(self.size)


class Column(NamedTuple):
    """A column of the samples.

    Attributes:
        name: of the column.
        kind: as `RowMembers` has it.
        decode: makes the value of a row; `ValueError` if the bytes are not one.
        size: bytes of each value; None if each sample has the size of its own.
    """

    name: str
    kind: ColumnKind
    decode: Callable[[Value], Any]
    size: int | None = None


def is_table(head: bytes, *, has_config: bool) -> bool:
    """Returns whether a file that starts with `head` has a table of samples, with or without a description after it."""
    number = int.from_bytes(head[:4], "little")
    offsets = np.frombuffer(head[4 : 4 + 4 * min(number + 1, HEAD_BYTES)][: len(head) // 4 * 4 - 4], "<u4")
    if number > MAX_SAMPLES or not len(offsets):
        return False
    start = 4 + 4 * (number + 1)
    config = int(offsets[0]) - start
    fits = 2 <= config <= MAX_CONFIG_BYTES and head[start : start + 1] in (b"", b"{") if has_config else config == 0
    return bool(fits and np.all(offsets[1:] >= offsets[:-1]))


def file_cell(value: Value) -> Cell:
    """Returns the cell whose content is the bytes of the value."""
    head = value.head(HEAD_BYTES) if value.needs_head else b""
    return Cell(value.size, head, value.read, byte_offset=value.start if value.is_ranged else None)


def skipped_cell(value: Value, reason: str) -> Cell:
    """Returns a cell that is listed, and not read."""
    return Cell(value.size, b"", None, fault=reason)


def array_cell(
    value: Value,
    dtype: np.dtype[np.generic],
    shape: Sequence[int],
    *,
    stored_as: tuple[np.dtype[np.generic], Callable[[bytes], bytes]] | None = None,
) -> Cell:
    """Returns the cell of an array, as NPY.

    Args:
        value: its numbers.
        dtype: of the file.
        shape: sides.
        stored_as: the type of the numbers in the value if it is another, and what converts their bytes.

    Raises:
        ValueError: the value does not have the bytes of such an array.
    """
    _check_array(value, dtype if stored_as is None else stored_as[0], shape)

    def content() -> bytes:
        stored = value.read() if stored_as is None else stored_as[1](value.read())
        return npy_bytes(np.frombuffer(stored, dtype).reshape(shape))

    return Cell(npy_size(dtype, tuple(shape)), b"\x93NUMPY", content)


def picture_cell(value: Value) -> Cell:
    """Returns the cell of a picture as `PIL.Image.Image.tobytes` has it: PNG without compression, or NPY.

    Raises:
        ValueError: it does not have the bytes that its width, height and mode require.
    """
    head = value.head(12 + 16)
    if len(head) < 12:
        raise ValueError(f"has {value.size} bytes, expected width, height and mode of a picture")
    width, height, mode_size = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4, 8))
    if mode_size > 16:
        raise ValueError(f"has a mode of {mode_size} bytes, expected the name of a mode of Pillow")
    mode = head[12 : 12 + mode_size].decode()
    pixels = value.part(12 + mode_size, max(value.size - 12 - mode_size, 0))
    if mode in _ARRAY_MODES:
        return array_cell(pixels, np.dtype(_ARRAY_MODES[mode]), (height, width))
    if not 0 < width <= 1 << 16 or not 0 < height <= 1 << 16:
        raise ValueError(f"is a picture of {width} x {height}, expected 1 to {1 << 16:,} columns and rows")
    if mode == "1":
        stride = -(-width // 8)
        _check_array(pixels, np.dtype("u1"), (height, stride))

        def content() -> bytes:
            bits = np.frombuffer(pixels.read(), np.uint8).reshape(height, stride)
            return png_bytes(np.unpackbits(bits, axis=1, count=width) * np.uint8(255))

        return Cell(png_size(np.dtype("u1"), (height, width)), b"\x89PNG\r\n\x1a\n", content)
    if mode not in _PICTURE_MODES:
        return skipped_cell(value, f"a raw picture of mode {mode!a}: write it as {', '.join(_PICTURE_MODES)}, or PNG")
    code, channels = _PICTURE_MODES[mode]
    dtype, shape = np.dtype(code), (height, width, *channels)
    _check_array(pixels, dtype, shape)
    return Cell(
        png_size(dtype, shape),
        b"\x89PNG\r\n\x1a\n",
        lambda: png_bytes(np.frombuffer(pixels.read(), dtype).reshape(shape)),
    )


def _check_array(value: Value, dtype: np.dtype[np.generic], shape: Sequence[int]) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are read")
    expected = dtype.itemsize * math.prod(shape)
    if dtype.itemsize * math.prod(max(side, 1) for side in shape) >= 1 << 63:
        raise ValueError(f"has the shape {tuple(shape)}, which no array has")
    if value.size != expected:
        raise ValueError(f"has {value.size:,} bytes, expected {expected:,} of shape {tuple(shape)} of {dtype}")


def number_of(value: Value, *, dtype: np.dtype[np.generic]) -> Any:
    """Returns a number as Python has it; `ValueError` if the value has another size."""
    if value.size != dtype.itemsize:
        raise ValueError(f"has {value.size} bytes, expected {dtype.itemsize} of {dtype}")
    return np.frombuffer(value.whole(), dtype)[0].item()


def cells_of(value: Value, *, at: int, cell: Callable[[Value], Cell]) -> list[Cell]:
    """Returns the cells of a list; arguments and errors as `parts_of`."""
    return [cell(part) for part in parts_of(value, at)]


def sizes_of(value: Value, at: int, number: int) -> list[int]:
    """Returns `number` sizes of 4 bytes from byte `at` on; `ValueError` if the value does not have them."""
    stored = value.part(at, 4 * number).whole()
    return list(struct.unpack(f"<{number}I", stored))


def parts_of(value: Value, at: int) -> list[Value]:
    """Returns the items of a list: from byte `at` on are their number, their sizes, and their bytes.

    Raises:
        ValueError: they are too many, or do not end where the value does.
    """
    (number,) = sizes_of(value, at, 1)
    if number > MAX_LIST_CELLS:
        raise ValueError(f"has {number:,} items, at most {MAX_LIST_CELLS:,} are read")
    parts = []
    start = at + 4 + 4 * number
    for size in sizes_of(value, at + 4, number):
        parts.append(value.part(start, size))
        start += size
    if start != value.size:
        raise ValueError(f"has {value.size:,} bytes, expected {start:,} by the sizes of its {number:,} items")
    return parts


class OffsetTableSource(EntrySource):
    """A shard that begins with a table of its samples; see `mm_assets.sources.base.Source`."""

    SUFFIXES: ClassVar[tuple[str, ...]]
    FORMAT: ClassVar[str]  # its name, with an article
    text_encoding = "utf-8"

    @property
    def seekable(self) -> bool:
        """Whether members that are not wanted are skipped: in every shard that is not compressed."""
        return self._compression is None

    @property
    @abstractmethod
    def _compression(self) -> str | None:
        """How the shard is compressed, as `_decompress` takes it."""

    @property
    def _folder(self) -> str:
        """What starts the keys of samples without keys of their own."""
        name = posixpath.basename(self.file.url)
        return next((name[: -len(end)] for end in self.SUFFIXES if name.lower().endswith(end)), name) or "samples"

    @classmethod
    @abstractmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether a file that starts with `head` is such a shard, or may be one in a compression."""

    @abstractmethod
    def _columns(self, config: bytes) -> Sequence[Column]:
        """Returns the columns of the samples.

        Args:
            config: what is between the table and the first sample.

        Raises:
            ValueError: no shard of this format has such columns.
            ShardError: they cannot be read, whatever the shard has.
        """

    @abstractmethod
    def _check_index(self, num_samples: int) -> None:
        """Compares the shard with an index beside it; `ValueError` if they contradict each other."""

    def _reason_after(self, raw: SourceFile, end: int) -> str | None:
        """Returns why bytes after the last sample are skipped; None if they are a part of the format."""
        return "trailing bytes"

    # -- members

    def _entries(self, scan: Scan) -> Iterator[Entry]:
        url = self.file.url
        raw, failure = self._raw
        self._refuse_foreign(raw, failure)
        rows = RowMembers(url, self._folder, {})

        def salvage(name: str, start: int, end: int, detail: str) -> Entry:
            scan.salvage(url, f"{name}: {detail}", byte_offset=start, byte_size=end - start)
            return rows.damage_entry(name, end - start, detail)

        if failure is not None:
            yield salvage("the end", raw.size, raw.size, failure)
        try:
            offsets, columns = self._table(raw)
        except ValueError as error:
            yield salvage("the table of samples", 0, raw.size, first_line(error))
            return
        try:
            self._check_index(len(offsets) - 1)
        except ValueError as error:
            yield salvage("index.json", 0, 0, first_line(error))
        ordinal = rows.ordinal
        rows = RowMembers(url, self._folder, {column.name: column.kind for column in columns})
        rows.ordinal = ordinal
        cursor = RangeCursor(raw)
        damage: tuple[int, int, str] | None = None  # first of the samples that cannot be read, its byte, the reason
        end = int(offsets[0])
        for number in range(len(offsets) - 1):
            start, stop = int(offsets[number]), int(offsets[number + 1])
            rows.number = number
            try:
                if not end <= start <= stop <= raw.size:
                    raise ValueError(f"is at bytes {start:,} to {stop:,}, expected a place in {end:,} to {raw.size:,}")
                cursor.note_stride(stop - start, BLOCK)
                row = self._row(rows, columns, Value(raw, cursor, start, stop - start, self.seekable, False))
                entries = list(rows.entries(row))
            except ValueError as error:
                damage = damage or (number, end, first_line(error))
                if scan.on_damaged_shard == "fail":
                    yield salvage(f"sample {number}", end, raw.size, damage[2])
                continue
            if damage is not None:
                rows.ordinal -= len(entries)
                yield salvage(f"samples {damage[0]} to {number - 1}", damage[1], start, damage[2])
                rows.number, damage = number, None
                entries = list(rows.entries(row))
            end = stop
            yield from entries
        if damage is not None:
            yield salvage(f"samples {damage[0]} to {len(offsets) - 2}", damage[1], raw.size, damage[2])
        elif end < raw.size and (reason := self._reason_after(raw, end)) is not None:
            member = skipped_bytes(url, end, raw.size, ordinal=rows.ordinal, reason=reason, ranged=self.seekable)
            yield Entry(member, None)

    def _row(self, rows: RowMembers, columns: Sequence[Column], sample: Value) -> Mapping[str, Any]:
        """Returns the values of a sample; `ValueError` if its bytes do not fit the columns."""
        number = sum(column.size is None for column in columns)
        sizes = iter(sizes_of(sample, 0, number))
        at = 4 * number
        source, cursor, start, sample_size, is_ranged, _ = sample
        row: dict[str, Any] = {}
        for column in columns:
            name, size = column.name, next(sizes) if column.size is None else column.size
            try:
                if at + size > sample_size:
                    raise ValueError(f"ends after {at + size:,} bytes of its sample, which has {sample_size:,}")
                value = Value(source, cursor, start + at, size, is_ranged, rows.needs_head(name))
                if column.kind != "text":
                    row[name] = column.decode(value)
                elif rows.is_text_member(name):
                    row[name] = file_cell(value)
                else:  # the format has no null, and no JSON is empty
                    row[name] = value.whole().decode() or None
            except ValueError as error:
                raise ValueError(f"column {name!a} {first_line(error)}") from error
            at += size
        if at != sample_size:
            raise ValueError(f"has {sample_size:,} bytes, expected {at:,} by the sizes of its values")
        return row

    def _table(self, raw: SourceFile) -> tuple[npt.NDArray[np.uint32], Sequence[Column]]:
        """Returns the start of each sample, the end of the last, and the columns; `ValueError` if they are damaged."""
        number = int.from_bytes(raw.read(0, min(raw.size, 4)), "little")
        start = 4 + 4 * (number + 1)
        if start > raw.size:
            raise ValueError(f"{number:,} samples take {start:,} bytes, expected at most {raw.size:,}")
        if number > MAX_SAMPLES:
            raise ValueError(f"has {number:,} samples, at most {MAX_SAMPLES:,} are read: write smaller shards")
        offsets = np.frombuffer(raw.read(4, start - 4), "<u4")
        config = int(offsets[0]) - start
        if not 0 <= config <= min(MAX_CONFIG_BYTES, raw.size - start):
            raise ValueError(f"the first sample is at byte {offsets[0]:,}, expected one from {start:,} to {raw.size:,}")
        columns = self._columns(raw.read(start, config))
        counts = Counter(column.name for column in columns)
        if len(counts) < len(columns):
            repeated = counts.most_common(1)[0][0]
            raise ValueError(f"several columns are called {repeated!a}, and columns are identified by their names")
        return offsets, columns

    def _refuse_foreign(self, raw: SourceFile, failure: str | None) -> None:
        """Raises `ShardError` for a file that is something else by its first bytes: there is nothing to salvage."""
        head = raw.read(0, min(HEAD_BYTES, raw.size))
        foreign = None if failure is not None or self.accepts(head) else foreign_file(head)
        if foreign is not None:
            raise ShardError(self.file.url, foreign.as_not(self.FORMAT), byte_offset=0)

    @cached_property
    def _raw(self) -> tuple[SourceFile, str | None]:
        """The shard, decompressed, and the reason why it ends early, or None.

        Raises:
            ShardError: it is larger than a shard can be.
            SourceError: the storage failed.
        """
        if self._compression is None:
            return self.file, None
        failure = None
        size = 0
        # The copy is deleted once it is closed; a `SourceFile` closes itself once nothing refers to it.
        with temporary_disk_named(), tempfile.NamedTemporaryFile(prefix="shard-") as copy:
            try:
                for part in self._decompress(self._compression):
                    size += len(part)
                    if size > MAX_DECOMPRESSED:
                        detail = f"holds more than {MAX_DECOMPRESSED:,} bytes once decompressed, which no shard has"
                        raise ShardError(self.file.url, detail, byte_offset=0)
                    copy.write(part)
            except ValueError as error:
                failure = f"decompression failed: {first_line(error)}"
            copy.flush()
            return SourceFile(copy.name), failure

    def _decompress(self, compression: str) -> Iterator[bytes]:
        """Yields the shard as it is without compression; `ValueError` if it is damaged."""
        with self.file.stream() as packed:
            stream, errors = decompressed(packed, compression)
            with closing(stream):
                try:
                    while part := stream.read(COPY_CHUNK):
                        yield part
                except errors as error:
                    raise ValueError(str(error)) from error
