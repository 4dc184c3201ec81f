"""Headers of images in boxes: AVIF and HEIC (ISO/IEC 23008-12), JPEG 2000 (15444-1), JPEG XL (18181).

Only the boxes and fields that say what an image is are read. Every size and count is bounded by the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from mm_assets.media.header import CHUNK_BE, MAX_SEGMENTS, HeaderReader
from mm_assets.media.image_info import ImageInfo

__all__ = ["Box", "iter_boxes", "probe_heif", "probe_jp2", "probe_jxl"]

_U8, _U16, _U32, _U64 = (struct.Struct(">" + code) for code in "BHIQ")
_PAIR = struct.Struct(">II")
_SIZ = struct.Struct(">HIIIIIIIIH")  # capabilities, size, offset, tile size, tile offset, components
_COMPONENT = struct.Struct("BBB")  # bits, steps
_MAX_BITS_READ = 4096  # of a JPEG XL header without the names of its channels
_ITEM_CODECS = {b"av01": "avif", b"hvc1": "heic", b"hev1": "heic"}
# EXIF orientation by `irot` (quarter turns anticlockwise) and then `imir`: none, top and bottom, left and right.
_ORIENTATIONS = {0: (1, 4, 2), 1: (8, 5, 7), 2: (3, 2, 4), 3: (6, 7, 5)}
_RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}  # JPEG XL, Table 'ratio'
_SRGB, _GREY, _CMYK = 16, 17, 12  # EnumCS of a JP2 colour box


class Box(NamedTuple):
    """A box: its kind, where its body begins, and where it ends; `end` may be past the bytes of a truncated file."""

    kind: bytes
    body: int
    end: int


def iter_boxes(head: HeaderReader, start: int, end: int) -> Iterator[Box]:
    """The boxes of a range in order, until one has no room for its own header."""
    for _ in range(MAX_SEGMENTS):
        if start + 8 > min(end, head.size):
            return
        size, kind = head.take(CHUNK_BE, start, "box")
        body = start + 8
        if size == 1:
            (size,) = head.take(_U64, body, "box")
            body += 8
        elif size == 0:
            size = end - start
        if start + size < body:
            raise head.fail(f"box {kind!r} at byte {start} has {size} bytes, expected at least {body - start}")
        yield Box(kind, body, start + size)
        start += size


def _find(head: HeaderReader, start: int, end: int, kind: bytes) -> Box | None:
    return next((box for box in iter_boxes(head, start, end) if box.kind == kind), None)


class _Cursor:
    """Reads big-endian numbers one after another, not past the end of a box."""

    def __init__(self, head: HeaderReader, box: Box) -> None:
        self._head, self._end, self.pos = head, min(box.end, head.size), box.body
        self._kind = box.kind
        (start,) = self.take(_U32)
        self.version, self.flags = start >> 24, start & 0xFFFFFF

    def take(self, record: struct.Struct) -> tuple[int, ...]:
        if self.pos + record.size > self._end:
            raise self._head.fail(f"box {self._kind!r} is truncated at byte {self._end}")
        self.pos += record.size
        return self._head.take(record, self.pos - record.size, "box")

    def number(self, record: struct.Struct) -> int:
        return self.take(record)[0]


class _Items(NamedTuple):
    """What the meta box says: the primary item, types by item, and references as (kind, from, to)."""

    primary: int
    types: dict[int, bytes]
    references: list[tuple[bytes, int, list[int]]]
    properties: list[Box]
    of_item: dict[int, list[int]]  # indices of properties, in order


def probe_heif(head: HeaderReader) -> ImageInfo:
    """Read the header of an AVIF or HEIC file."""
    items = _read_items(head)
    codec, item = _codec_of(head, items), items.primary
    width = height = num_channels = turns = mirror = 0
    depth, colours = 8, None
    for box in _properties_of(items, item):
        cursor = _Cursor(head, box) if box.kind in (b"ispe", b"pixi") else None
        if box.kind == b"ispe" and cursor:
            width, height = cursor.take(_PAIR)
        elif box.kind == b"pixi" and cursor:
            num_channels = cursor.number(_U8)
            depth = cursor.number(_U8) if num_channels else 8
        elif box.kind == b"irot":
            turns = head.take(_U8, box.body, "HEIF rotation")[0] & 3
        elif box.kind == b"imir":
            mirror = 1 + (head.take(_U8, box.body, "HEIF mirror")[0] & 1)
        elif box.kind == b"colr" and head.starts(box.body, b"nclx"):
            colours = head.take(struct.Struct(">HH"), box.body + 4, "HEIF colour")
        elif box.kind == b"clap" and codec == "heic":  # its decoder crops, that of AVIF does not
            columns, per_column, rows, per_row = head.take(struct.Struct(">IIII"), box.body, "HEIF clean aperture")
            if columns and rows and per_column and per_row:
                width, height = columns // per_column, rows // per_row
    channels = 1 if num_channels == 1 else 3
    num_frames = _num_samples(head)
    return ImageInfo(
        codec=codec,
        width=width,
        height=height,
        channels=4 if _has_alpha(head, items) else channels,
        bit_depth=depth,
        num_frames=num_frames if codec == "avif" else 1,
        has_unread_frames=codec == "heic" and num_frames > 1,
        orientation=_ORIENTATIONS[turns][mirror],
        colours=colours,
    )


def _read_items(head: HeaderReader) -> _Items:
    meta = _find(head, 0, head.size, b"meta")
    if meta is None:
        raise head.fail("HEIF file has no meta box: it is truncated, or a film")
    start, end = meta.body + 4, min(meta.end, head.size)
    if meta.end > head.size:
        raise head.fail(f"HEIF meta box is truncated: it ends at {meta.end}, there are {head.size} bytes")
    found = {box.kind: box for box in iter_boxes(head, start, end)}
    if b"pitm" not in found or b"iinf" not in found or b"iprp" not in found:
        raise head.fail(f"HEIF meta box has {len(found)} boxes, expected a primary item, items and properties")
    cursor = _Cursor(head, found[b"pitm"])
    primary = cursor.number(_U32 if cursor.version else _U16)
    container = _find(head, found[b"iprp"].body, found[b"iprp"].end, b"ipco")
    properties = [] if container is None else list(iter_boxes(head, container.body, container.end))
    of_item: dict[int, list[int]] = {}
    for box in iter_boxes(head, found[b"iprp"].body, found[b"iprp"].end):
        if box.kind == b"ipma":
            _read_associations(_Cursor(head, box), of_item)
    references = _read_references(head, found[b"iref"]) if b"iref" in found else []
    return _Items(primary, _read_types(head, found[b"iinf"]), references, properties, of_item)


def _read_types(head: HeaderReader, box: Box) -> dict[int, bytes]:
    cursor = _Cursor(head, box)
    cursor.number(_U32 if cursor.version else _U16)
    types = {}
    for entry in iter_boxes(head, cursor.pos, box.end):
        item = _Cursor(head, entry)
        if item.version >= 2:
            number = item.number(_U16 if item.version == 2 else _U32)
            item.number(_U16)
            types[number] = struct.pack(">I", item.number(_U32))
    return types


def _read_associations(cursor: _Cursor, of_item: dict[int, list[int]]) -> None:
    index_of = _U16 if cursor.flags & 1 else _U8
    for _ in range(min(cursor.number(_U32), MAX_SEGMENTS)):
        item = cursor.number(_U32 if cursor.version else _U16)
        indices = [cursor.number(index_of) for _ in range(cursor.number(_U8))]
        of_item.setdefault(item, []).extend(index & (0x7FFF if cursor.flags & 1 else 0x7F) for index in indices)


def _read_references(head: HeaderReader, box: Box) -> list[tuple[bytes, int, list[int]]]:
    whole = _Cursor(head, box)
    record = _U32 if whole.version else _U16
    found = []
    for entry in iter_boxes(head, whole.pos, box.end):
        # A reference has no version: its cursor begins where that would be.
        cursor = _Cursor(head, Box(entry.kind, entry.body - 4, entry.end))
        source = cursor.number(record)
        found.append((entry.kind, source, [cursor.number(record) for _ in range(cursor.number(_U16))]))
    return found


def _properties_of(items: _Items, item: int) -> list[Box]:
    """The properties of an item; the index 0 means none."""
    indices = items.of_item.get(item, ())
    return [items.properties[index - 1] for index in indices if 1 <= index <= len(items.properties)]


def _codec_of(head: HeaderReader, items: _Items) -> str:
    """The codec of the primary item: of a grid that of its tiles."""
    kind = items.types.get(items.primary, b"")
    if kind in (b"grid", b"iden", b"iovl"):
        targets = [to for name, source, to in items.references if name == b"dimg" and source == items.primary]
        kind = items.types.get(targets[0][0], kind) if targets and targets[0] else kind
    if kind not in _ITEM_CODECS:
        raise head.fail(f"HEIF file holds an image of codec {kind!r}, expected AV1 (AVIF) or HEVC (HEIC)")
    return _ITEM_CODECS[kind]


def _has_alpha(head: HeaderReader, items: _Items) -> bool:
    for name, source, targets in items.references:
        if name == b"auxl" and items.primary in targets:
            for box in _properties_of(items, source):
                if box.kind == b"auxC":
                    kind = bytes(head.view[box.body : min(box.end, box.body + 80)])
                    if b"auxiliary:alpha" in kind or b"auxid:1\0" in kind:
                        return True
    return False


def _num_samples(head: HeaderReader) -> int:
    """Frames of an image sequence, by the first track's table of sizes; 1 for a single image."""
    start, end = 0, head.size
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsz"):
        box = _find(head, start, end, kind)
        if box is None:
            return 1
        start, end = box.body, min(box.end, head.size)
    _, _, count = head.take(struct.Struct(">III"), start, "AVIF sequence")
    return max(1, int(count))


def probe_jp2(head: HeaderReader) -> ImageInfo:
    """Read the header of a JPEG 2000 codestream, in its file format or bare."""
    codestream, channels = 0, 0
    if not head.starts(0, b"\xff\x4f\xff\x51"):
        found = {box.kind: box for box in iter_boxes(head, 0, head.size)}
        if b"jp2c" not in found:
            raise head.fail("JPEG 2000 file has no codestream: it is truncated or damaged")
        codestream = found[b"jp2c"].body
        if b"jp2h" in found:
            channels = _jp2_channels(head, found[b"jp2h"])
    if not head.starts(codestream, b"\xff\x4f\xff\x51"):
        raise head.fail(f"JPEG 2000 codestream at byte {codestream} does not begin with its markers")
    _, right, bottom, left, top, *_, components = head.take(_SIZ, codestream + 6, "JPEG 2000 size")
    (bits, *_) = head.take(_COMPONENT, codestream + 6 + _SIZ.size, "JPEG 2000 size")
    by_components = {1: 1, 2: 4, 3: 3, 4: 4}.get(components, 0)
    if not by_components or right <= left or bottom <= top:
        words = f"{components} components, columns {left} to {right}, rows {top} to {bottom}"
        raise head.fail(f"JPEG 2000 has {words}, expected 1 to 4 components and some pixels")
    depth = 1 + (bits & 0x7F)
    return ImageInfo(
        codec="jp2",
        width=right - left,
        height=bottom - top,
        channels=channels or by_components,
        bit_depth=depth,
        has_8bit_form=not bits & 0x80 and depth <= 16,
    )


def _jp2_channels(head: HeaderReader, header: Box) -> int:
    """Channels that the header box makes of a codestream of another number; 0 for as many as it has."""
    for box in iter_boxes(head, header.body, header.end):
        if box.kind == b"pclr":
            return 4 if head.take(struct.Struct(">HB"), box.body, "JPEG 2000 palette")[1] == 4 else 3
        if box.kind == b"colr":
            method, _, _, space = head.take(struct.Struct(">BBBI"), box.body, "JPEG 2000 colour")
            if method == 1 and space == _CMYK:
                return 3
    return 0


class _Bits:
    """Bits of a JPEG XL header, the lowest of each byte first."""

    def __init__(self, head: HeaderReader, start: int) -> None:
        self._head = head
        piece = bytes(head.view[start : start + _MAX_BITS_READ])
        self._value, self._left = int.from_bytes(piece, "little"), 8 * len(piece)

    def take(self, count: int) -> int:
        if count > self._left:
            raise self._head.fail("JPEG XL header is truncated")
        found = self._value & ((1 << count) - 1)
        self._value >>= count
        self._left -= count
        return found

    def choose(self, *choices: tuple[int, int]) -> int:
        """A number of one of four forms: an offset, and how many bits are added to it."""
        offset, count = choices[self.take(2)]
        return offset + self.take(count)

    def enum(self) -> int:
        return self.choose((0, 0), (1, 0), (2, 4), (18, 6))

    def depth(self) -> tuple[bool, int]:
        """Whether samples are floating-point, and their bits."""
        if self.take(1):
            bits = self.choose((32, 0), (16, 0), (24, 0), (1, 6))
            self.take(4)
            return True, bits
        return False, self.choose((8, 0), (10, 0), (12, 0), (1, 6))

    def size(self) -> tuple[int, int]:
        """Width and height."""
        small = self.take(1)

        def side() -> int:
            return 8 * (1 + self.take(5)) if small else 1 + self.choose((0, 9), (0, 13), (0, 18), (0, 30))

        height, ratio = side(), self.take(3)
        if ratio:
            over, under = _RATIOS[ratio]
            return height * over // under, height
        return side(), height


def probe_jxl(head: HeaderReader) -> ImageInfo:
    """Read the header of a JPEG XL codestream, in its container or bare."""
    start = 0
    if not head.starts(0, b"\xff\x0a"):
        box = next((box for box in iter_boxes(head, 0, head.size) if box.kind in (b"jxlc", b"jxlp")), None)
        if box is None:
            raise head.fail("JPEG XL file has no codestream: it is truncated or damaged")
        start = box.body + (4 if box.kind == b"jxlp" else 0)
        if not head.starts(start, b"\xff\x0a"):
            raise head.fail(f"JPEG XL codestream at byte {start} does not begin with its signature")
    bits = _Bits(head, start + 2)
    width, height = bits.size()
    orientation, is_float, depth, channels, is_animated = 1, False, 8, 3, False
    if not bits.take(1):
        if bits.take(1):
            orientation = 1 + bits.take(3)
            if bits.take(1):
                bits.size()
            if bits.take(1):
                _skip_preview(bits)
            is_animated = bool(bits.take(1))
            if is_animated:
                bits.choose((100, 0), (1000, 0), (1, 10), (1, 30))
                bits.choose((1, 0), (1001, 0), (1, 8), (1, 10))
                bits.choose((0, 0), (0, 3), (0, 16), (0, 32))
                bits.take(1)
        is_float, depth = bits.depth()
        bits.take(1)
        has_alpha = [_is_alpha(bits) for _ in range(bits.choose((0, 0), (1, 0), (2, 4), (1, 12)))]
        bits.take(1)
        is_grey = not bits.take(1) and bits.take(1) >= 0 and bits.enum() == 1
        channels = 4 if any(has_alpha) else 1 if is_grey else 3
    return ImageInfo(
        codec="jxl",
        width=width,
        height=height,
        channels=channels,
        bit_depth=depth,
        has_8bit_form=not is_float and depth <= 16,
        has_unread_frames=is_animated,
        orientation=orientation,
    )


def _skip_preview(bits: _Bits) -> None:
    forms = ((16, 0), (32, 0), (1, 5), (33, 9)) if bits.take(1) else ((1, 6), (65, 8), (321, 10), (1345, 12))
    bits.choose(*forms)
    if not bits.take(3):
        bits.choose(*forms)


def _is_alpha(bits: _Bits) -> bool:
    """Read one extra channel."""
    if bits.take(1):
        return True
    kind = bits.enum()
    bits.depth()
    bits.choose((0, 0), (3, 0), (4, 0), (1, 3))
    bits.take(8 * bits.choose((0, 0), (0, 4), (16, 5), (48, 10)))
    if kind == 0:
        bits.take(1)
    elif kind == 2:  # a spot colour
        bits.take(64)
    elif kind == 5:  # a colour filter array
        bits.choose((1, 0), (0, 2), (3, 4), (19, 8))
    return kind == 0
