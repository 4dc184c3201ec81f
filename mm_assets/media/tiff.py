"""One frame of a multi-frame TIFF as a TIFF of its own, without decoding.

The frame's compressed strips or tiles are copied unchanged, with every tag that their decoding needs, so its pixels are
the original's under any compression. Every count and position in the file is checked before use, and any input gives an
answer or a `MediaError`, in time and memory proportional to its size.

Frames are the directories of the main chain, including those of reduced resolution, as Pillow counts them. The copy
omits tags that point elsewhere in the file (sub-images, EXIF and GPS directories, free lists) and descriptions of the
whole stack (ImageJ, OME, tifffile). Old-style JPEG (compression 6), whose tables are scattered over the file, is
refused, unless the file has only one frame: such a file is returned unchanged.

The sizes of types and the names of tags come from tifffile. The walk and the copy do not: its `TiffWriter` refuses
compressed bilevel frames, and its `TiffFile` skips damaged tags and only logs a cyclic chain, where a frame must be
refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import optional_import
from mm_assets.media.content_types import Buffer
from mm_assets.media.header import HeaderReader, read_tiff_layout

__all__ = ["TiffFrames"]

_Ints = npt.NDArray[np.int64]
_Parts = list[tuple[int, int]]  # of the file: start and end

MAX_FRAMES = 1 << 20  # bounds a hostile chain of overlapping directories; real stacks have thousands

_LONG, _IFD, _LONG8, _IFD8 = 4, 13, 16, 18  # types
_NUMBERS = {1: "u1", 3: "u2", _LONG: "u4", _LONG8: "u8"}  # unsigned types, as NumPy spells them

_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_DESCRIPTION, _STRIP_OFFSETS, _SAMPLES, _ROWS_PER_STRIP, _STRIP_SIZES, _PLANAR = 270, 273, 277, 278, 279, 284
_TILE_WIDTH, _TILE_LENGTH, _TILE_OFFSETS, _TILE_SIZES = 322, 323, 324, 325
_UNCOMPRESSED, _OLD_JPEG, _YCBCR, _SEPARATE = 1, 6, 6, 2

# Positions in the old file, and vendors' tables of whole stacks: wrong in a file of one frame.
_LEFT_OUT = frozenset(
    {
        *(288, 289),  # FreeOffsets, FreeByteCounts
        *(330, 400, 34665, 34853, 40965),  # SubIFDs, GlobalParametersIFD, EXIF, GPS, Interoperability
        *(513, 514, 519, 520, 521),  # of old-style JPEG, left behind by some writers in frames of other compressions
        *(34412, 50838, 50839),  # LSM, ImageJ
    }
)
_STACK_DESCRIPTIONS = (b"ImageJ=", b'{"shape":', b"shape=", b"<OME")
# A damaged value of one of these would change pixels; any other damaged tag is omitted, as TIFF readers do.
_ESSENTIAL = frozenset(
    {
        *(254, 255, 256, 257, 258, 259, 262, 263, 264, 265, 266, 273, 274, 277, 278, 279, 284, 290, 291, 292, 293),
        *(301, 317, 318, 319, 320, 322, 323, 324, 325, 332, 334, 336, 338, 339, 340, 341, 347, 529, 530, 531, 532),
        *(33421, 33422, 34016, 34675, 50674, 50712, 50714, 50717),
    }
)


class _Entry(NamedTuple):
    tag: int
    type: int
    num_values: int
    value: memoryview  # the bytes of the values


class TiffFrames:
    """The frames of a TIFF in memory.

    Args:
        data: the whole file; it must stay alive and unchanged.

    Raises:
        MediaError: the bytes do not begin with a TIFF header, or end within it.
    """

    def __init__(self, data: Buffer) -> None:
        with optional_import("tifffile", "frames of a TIFF"):
            from tifffile import TIFF

        self._tags = TIFF.TAGS
        self._type_sizes = {kind: struct.calcsize(f"={code}") for kind, code in TIFF.DATA_FORMATS.items()}
        self._head = head = HeaderReader(data, "<tiff>")
        self._data = head.view
        # `_next` is the position of the first directory that is not in `_directories`; 0 at the end of the chain.
        self._order, self._is_big, self._num_entries, self._entry, self._pointer, self._next = read_tiff_layout(head)
        self._inline = self._pointer.size  # bytes of values that fit into their entry
        if self._is_big:
            sizes = head.take(struct.Struct(self._order + "HH"), 4, "BigTIFF header")
            if sizes != (8, 0):
                raise head.fail(f"is a BigTIFF with positions of {sizes[0]} bytes, expected 8")
        self._header_size = 2 * self._inline
        self._directories: list[int] = []
        self._known: set[int] = set()

    @property
    def num_frames(self) -> int:
        """Directories of the main chain.

        Raises:
            MediaError: the chain leaves the file, is cyclic, or is too long.
        """
        while self._walk():
            pass
        return len(self._directories)

    def extract(self, frame_index: int) -> bytes:
        """One frame as a TIFF file.

        Only the chain up to the frame has to be valid. Equal input gives equal bytes.

        Args:
            frame_index: from 0.

        Raises:
            MediaError: there is no such frame, or its directory or its data is damaged.
        """
        if frame_index < 0:
            raise self._head.fail(f"frame {frame_index} was asked for, expected 0 or more")
        while len(self._directories) <= frame_index:
            if not self._walk():
                raise self._head.fail(f"frame {frame_index} was asked for, the file has {len(self._directories)}")
        if frame_index == 0 and len(self._directories) == 1 and self._next == 0:
            return bytes(self._data)  # it is a file of one frame already
        return self._copy(frame_index, self._read_entries(frame_index))

    def _walk(self) -> bool:
        """Add the next directory of the chain; False at its end."""
        at = self._next
        if at == 0:
            return False
        number = len(self._directories)
        what = f"the directory of frame {number}"
        if at < self._header_size:
            raise self._head.fail(f"{what} should be at byte {at}, within the header")
        if at in self._known:
            raise self._head.fail(f"{what} is at byte {at}, where an earlier one is: the chain of frames is a loop")
        if number >= MAX_FRAMES:
            raise self._head.fail(f"has more than {MAX_FRAMES} frames")
        (entries,) = self._head.take(self._num_entries, at, what)
        link_at = at + self._num_entries.size + entries * self._entry.size
        self._directories.append(at)
        self._known.add(at)
        if link_at + self._pointer.size <= len(self._data):
            (self._next,) = self._pointer.unpack_from(self._data, link_at)
        else:
            self._next = len(self._data)  # truncated: this frame may still be complete, a later one is not
        return True

    def _read_entries(self, number: int) -> dict[int, _Entry]:
        """The entries of a frame that go into a file of one frame, by tag, with their values checked."""
        what = f"frame {number}"
        at = self._directories[number]
        (count,) = self._head.take(self._num_entries, at, what)
        start = at + self._num_entries.size
        table = self._head.piece(start, count * self._entry.size, f"{what}: its directory")
        entries: dict[int, _Entry] = {}
        value_at = start + self._entry.size - self._inline
        total = 0
        for tag, kind, values, raw in self._entry.iter_unpack(table):
            start, value_at = value_at, value_at + self._entry.size
            if tag in _LEFT_OUT or kind in (_IFD, _IFD8):
                continue
            size = self._type_sizes.get(kind, 0) * values
            if size > self._inline:
                (start,) = self._pointer.unpack(raw)
            if kind not in self._type_sizes or start + size > len(self._data) or tag in entries:
                if tag not in _ESSENTIAL:
                    continue
                if tag in entries:
                    raise self._head.fail(f"{what} has {self._named(tag)} twice")
                found = f"{values} values of type {kind} at byte {start}"
                raise self._head.fail(
                    f"{what}: {self._named(tag)} has {found}, beyond the TIFF's {len(self._data)} bytes"
                )
            total += size
            if total > len(self._data):
                raise self._head.fail(f"{what}: its tags hold more than the TIFF's {len(self._data)} bytes")
            entries[tag] = _Entry(tag, kind, values, self._data[start : start + size])
        return entries

    def _named(self, tag: int) -> str:
        """A tag for a message."""
        return f"tag {tag} ({self._tags.get(tag, 'not a tag of TIFF')})"

    def _numbers(self, entries: dict[int, _Entry], tag: int, what: str) -> _Ints | None:
        """The values of a tag of unsigned numbers; None where it is missing or empty."""
        entry = entries.get(tag)
        if entry is None or entry.num_values == 0:
            return None
        if entry.type not in _NUMBERS:
            raise self._head.fail(f"{what}: {self._named(tag)} is of type {entry.type}, expected unsigned numbers")
        values = np.frombuffer(entry.value, self._order + _NUMBERS[entry.type])
        if values.dtype.itemsize == 8 and int(values.max()) > np.iinfo(np.int64).max:
            raise self._head.fail(f"{what}: {self._named(tag)} holds {values.max()}, more than 63 bits")
        return values.astype(np.int64)

    def _number(self, entries: dict[int, _Entry], tag: int, default: int, what: str) -> int:
        values = self._numbers(entries, tag, what)
        return default if values is None else int(values[0])

    def _copy(self, number: int, entries: dict[int, _Entry]) -> bytes:
        what = f"frame {number}"
        compression = self._number(entries, _COMPRESSION, _UNCOMPRESSED, what)
        if compression == _OLD_JPEG:
            raise self._head.fail(f"{what} is compressed as old-style JPEG (6), which cannot be taken out of its file")
        tiled = _STRIP_OFFSETS not in entries
        offsets_tag, sizes_tag = (_TILE_OFFSETS, _TILE_SIZES) if tiled else (_STRIP_OFFSETS, _STRIP_SIZES)
        offsets = self._numbers(entries, offsets_tag, what)
        if offsets is None:
            raise self._head.fail(f"{what} has no data: neither strips nor tiles")
        needed = self._raw_sizes(entries, len(offsets), what) if compression == _UNCOMPRESSED else None
        sizes = self._numbers(entries, sizes_tag, what)
        if sizes is None:
            if needed is None:
                detail = f"{self._named(sizes_tag)} is missing: the sizes of its {len(offsets)} strips or tiles"
                raise self._head.fail(f"{what}: {detail}")
            sizes = needed
            entries[sizes_tag] = self._positions(sizes_tag, sizes)
        if len(sizes) != len(offsets):
            raise self._head.fail(f"{what} has {len(offsets)} positions and {len(sizes)} sizes of strips or tiles")
        blocks, places = self._blocks(offsets, sizes, needed, what)
        if _STRIP_OFFSETS in entries:
            entries.pop(_TILE_OFFSETS, None)
        description = entries.get(_DESCRIPTION)
        if description is not None and any(mark in bytes(description.value[:4096]) for mark in _STACK_DESCRIPTIONS):
            del entries[_DESCRIPTION]
        return self._assemble(entries, offsets_tag, blocks, places)

    def _raw_sizes(self, entries: dict[int, _Entry], count: int, what: str) -> _Ints | None:
        """Bytes that each strip or tile takes uncompressed; None where that is not plain arithmetic."""
        if self._number(entries, _PHOTOMETRIC, 0, what) == _YCBCR:
            return None  # may be subsampled
        width, length = self._number(entries, _WIDTH, 0, what), self._number(entries, _LENGTH, 0, what)
        samples = self._number(entries, _SAMPLES, 1, what)
        bits = self._numbers(entries, _BITS, what)
        bits_per_pixel = samples * (1 if bits is None else int(bits[0]))
        planes = 1
        if self._number(entries, _PLANAR, 1, what) == _SEPARATE:
            planes, bits_per_pixel = samples, bits_per_pixel // max(samples, 1)
        if _TILE_WIDTH in entries:
            tile = self._number(entries, _TILE_WIDTH, 0, what) * bits_per_pixel + 7 >> 3
            return self._bounded([tile * self._number(entries, _TILE_LENGTH, 0, what)] * count)
        rows = min(max(self._number(entries, _ROWS_PER_STRIP, length, what), 1), length)
        per_plane = -(-length // rows) if rows else 0
        if per_plane * planes != count:
            return None
        row = width * bits_per_pixel + 7 >> 3
        heights = [rows] * (per_plane - 1) + [length - rows * (per_plane - 1)]
        return self._bounded([row * height for height in heights] * planes)

    def _bounded(self, sizes: Iterable[int]) -> _Ints:
        limit = len(self._data) + 1  # more than any file position, and still an int64
        return np.array([min(size, limit) for size in sizes], np.int64)

    def _blocks(self, offsets: _Ints, sizes: _Ints, needed: _Ints | None, what: str) -> tuple[_Parts, _Ints]:
        """The parts of the file to copy, none twice, and the place of each strip or tile in their concatenation.

        A strip or tile of no bytes at position 0 was omitted by its writer; its place is -1.
        """
        total = len(self._data)
        bad = (offsets > total) | (sizes > total) | (offsets + np.minimum(sizes, total) > total)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            found = f"has {int(sizes[k])} bytes at {int(offsets[k])}, the TIFF has {total}"
            raise self._head.fail(f"{what}: strip or tile {k} {found}")
        ends = offsets + sizes
        if needed is None and offsets[0] > 0 and (offsets[1:] == ends[:-1]).all():
            return [(int(offsets[0]), int(ends[-1]))], offsets - offsets[0]  # contiguous, as most are written
        here = ~((offsets == 0) & (sizes == 0))
        if needed is not None:
            # Some writers state sizes that are too small, and readers that know the shape read on: copy that too.
            ends = np.where(here, np.minimum(np.maximum(ends, offsets + needed), total), ends)
        starts, ends = offsets[here], ends[here]
        if not len(starts):
            return [], np.full(len(offsets), -1, np.int64)
        order = np.argsort(starts, kind="stable")
        sorted_starts = starts[order]
        reach = np.maximum.accumulate(ends[order])
        first = np.flatnonzero(np.concatenate(([True], sorted_starts[1:] > reach[:-1])))
        block_starts = sorted_starts[first]
        block_ends = reach[np.concatenate((first[1:] - 1, [len(reach) - 1]))]
        # An odd size is padded: the format requires values at even positions.
        placed = np.concatenate(([0], np.cumsum((block_ends - block_starts + 1) // 2 * 2)[:-1]))
        block_of = np.searchsorted(block_starts, starts, side="right") - 1
        places = np.full(len(offsets), -1, np.int64)
        places[here] = placed[block_of] + starts - block_starts[block_of]
        return list(zip(block_starts.tolist(), block_ends.tolist(), strict=True)), places

    def _positions(self, tag: int, numbers: _Ints) -> _Entry:
        kind = _LONG8 if self._is_big else _LONG
        value = numbers.astype(self._order + _NUMBERS[kind]).tobytes()
        return _Entry(tag, kind, len(numbers), memoryview(value))

    def _assemble(self, entries: dict[int, _Entry], offsets_tag: int, blocks: _Parts, places: _Ints) -> bytes:
        """Header, directory, values, data."""
        inline = self._inline
        entries[offsets_tag] = self._positions(offsets_tag, places)  # of the right size; its values follow below
        tags = sorted(entries)
        values_at = self._header_size + self._num_entries.size + len(tags) * self._entry.size + self._pointer.size
        sizes = [len(entries[tag].value) for tag in tags]
        data_at = values_at + sum(size + size % 2 for size in sizes if size > inline)
        data_at = -(-data_at // 16) * 16
        if not self._is_big and data_at + sum(e - s + 1 for s, e in blocks) > 0xFFFFFFFF:
            raise self._head.fail("a frame of more than 4 GiB does not fit a classic TIFF")
        entries[offsets_tag] = self._positions(offsets_tag, np.where(places < 0, 0, places + data_at))
        head = [bytes(self._data[:4])]
        if self._is_big:
            head.append(struct.pack(self._order + "HH", 8, 0))
        head += [self._pointer.pack(self._header_size), self._num_entries.pack(len(tags))]
        values: list[Any] = []
        for tag in tags:
            _, kind, count, value = entries[tag]
            if len(value) <= inline:
                raw = bytes(value)
            else:
                raw = self._pointer.pack(values_at)
                values += [value, bytes(len(value) % 2)]
                values_at += len(value) + len(value) % 2
            head.append(self._entry.pack(tag, kind, count, raw))
        head.append(self._pointer.pack(0))
        parts = [*head, *values, bytes(data_at - values_at)]
        for start, end in blocks:
            parts += [self._data[start:end], bytes((end - start) % 2)]
        return b"".join(parts)
