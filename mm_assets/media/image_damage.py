"""Damage that the structure of an image file shows: what is missing from it, and checksums that do not fit.

Decoders read on where bytes are missing: many fill the rest with grey, skip checksums, or never look at the end. Each
check here takes linear time and bounded memory, and says how much of the file is there. It decodes nothing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer
from mm_assets.media.header import CHUNK_LE, HeaderReader, read_tiff_layout, read_tiff_numbers
from mm_assets.media.image_blocks import GIF_END, GIF_EXTENSION, GIF_FRAME, gif_blocks, png_chunks, webp_chunks
from mm_assets.media.iso_images import iter_boxes
from mm_assets.media.jpeg import find_jpeg_damage
from mm_assets.media.plain_images import pnm_size, read_icons, tga_size

__all__ = ["find_damage"]

_MAX_PARTS = 1 << 18  # tile-parts; the loop over them runs in Python
_MAX_TILE_PIXELS = 2**26  # a tile is decoded whole, however small the image is
_INFLATE, _DEFLATED = 1 << 20, 1 << 16  # bytes at a time, out of and into the decompressor
_MAX_INFLATED = 1 << 29  # bytes in all that are decompressed to count rows; the header may claim any size
_MAX_TIFF_SAMPLES = 6  # per pixel, in Pillow
_PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_DATA_BOXES = frozenset((b"mdat", b"meta", b"jxlc", b"jxlp"))  # that of a HEIF file may be in its meta box
_BOXES = _DATA_BOXES.union((b"ftyp", b"moov", b"free", b"skip", b"uuid", b"Exif", b"xml ", b"jumb", b"jbrd", b"brob"))
_STRIPS, _TILES = (273, 279), (324, 325)  # positions and sizes
_TIFF_TAGS = (*_STRIPS, *_TILES, 277, 322, 323)


def find_damage(data: Buffer, codec: str) -> str | None:
    """What is wrong with a file of a codec, as a clause that follows its name; None where nothing is."""
    head = HeaderReader(data, codec)
    check = _CHECKS[codec]
    try:
        return check(head)
    except MediaError as error:
        return error.reason if error.reason.startswith(("is ", "has ")) else f"is damaged: {error.reason}"


def _of(found: int, expected: int, what: str = "bytes") -> str:
    return f"is truncated: {found:,} of {expected:,} {what}"


def _needs(head: HeaderReader, size: int) -> str | None:
    return _of(head.size, size) if head.size < size else None


def _check_jpeg(head: HeaderReader) -> str | None:
    return find_jpeg_damage(head.view)


def _check_png(head: HeaderReader, start: int = 0) -> str | None:
    data: list[memoryview] = []
    for chunk in png_chunks(head, start):
        kind, body = chunk.kind, head.view[chunk.body : chunk.body + chunk.length]
        if not head.has(chunk.body, chunk.length + 4):
            rows = _png_rows(head, start, [*data, body] if kind == b"IDAT" else data)
            return f"is truncated: {rows}; chunk {kind!r} at byte {chunk.start:,} needs {chunk.length:,} bytes"
        if zlib.crc32(body, zlib.crc32(kind)) != int.from_bytes(head.view[chunk.end - 4 : chunk.end], "big"):
            rows = _png_rows(head, start, data)
            return f"is damaged after {rows}: chunk {kind!r} at byte {chunk.start:,} has a wrong checksum"
        if kind == b"IDAT":
            data.append(body)
        elif kind == b"IEND":
            return None
    return f"is truncated: {_png_rows(head, start, data)} in {head.size - start:,} bytes, its end is missing"


def _png_rows(head: HeaderReader, start: int, data: list[memoryview]) -> str:
    """How many rows the image data holds; of an interlaced image how many bytes."""
    if not head.has(start + 8, 21):
        return "its header is not complete"
    width, height, depth, colour, *_, interlaced = head.take(struct.Struct(">IIBBBBB"), start + 16, "header")
    row = 1 + (width * depth * _PNG_SAMPLES.get(colour, 1) + 7) // 8
    most, found = min(row * height, _MAX_INFLATED), 0
    inflater = zlib.decompressobj()
    try:
        for piece in data:
            # In small pieces: what is left of one is copied after each step.
            for at in range(0, len(piece), _DEFLATED):
                rest: Buffer = piece[at : at + _DEFLATED]
                while rest and found < most and not inflater.eof:
                    found += len(inflater.decompress(rest, _INFLATE))
                    rest = inflater.unconsumed_tail
                if found >= most or inflater.eof:
                    break
    except zlib.error:
        pass  # the rows before it count
    if interlaced:
        return f"{found:,} bytes of its passes"
    return f"{min(height, found // row):,} of {height:,} rows"


def _check_webp(head: HeaderReader) -> str | None:
    _, size = head.take(CHUNK_LE, 0, "RIFF header")
    if wrong := _needs(head, 8 + size):
        return wrong
    end = 8 + size
    for kind, body, length in webp_chunks(head):
        if body > end:
            break
        if body + length > end:
            return f"is damaged: chunk {kind!r} at byte {body - 8:,} has {length:,} bytes, {end - body:,} are there"
    return None


def _check_bmp(head: HeaderReader) -> str | None:
    start, size = head.take(struct.Struct("<II"), 10, "header")
    if size == 12:
        width, height, _, bits = head.take(struct.Struct("<HHHH"), 18, "header")
        compression = packed = 0
    else:
        width, height, _, bits, compression, packed = head.take(struct.Struct("<iiHHII"), 18, "header")
    if compression in (1, 2):  # runs: only their size is known
        return _needs(head, start + packed)
    return _needs(head, start + (width * bits + 31) // 32 * 4 * abs(height))


def _check_gif(head: HeaderReader) -> str | None:
    num_frames = 0
    for kind, start, end in gif_blocks(head):
        if kind == GIF_END:
            return None if num_frames else "is damaged: it has no frame"
        if kind not in (GIF_FRAME, GIF_EXTENSION):
            return f"is damaged: found byte {kind:#04x} at {start:,} after {num_frames:,} frames, expected a block"
        num_frames += kind == GIF_FRAME and end <= head.size
    return f"is truncated: {num_frames:,} whole frames in {head.size:,} bytes, its end is missing"


def _check_tiff(head: HeaderReader) -> str | None:
    numbers = read_tiff_numbers(head, read_tiff_layout(head), _TIFF_TAGS)
    samples = max(numbers.get(277) or [1])
    if samples > _MAX_TIFF_SAMPLES:
        return f"has {samples:,} samples per pixel, expected at most {_MAX_TIFF_SAMPLES}"
    tile = [max(numbers.get(tag) or [0]) for tag in (322, 323)]
    if tile[0] * tile[1] > _MAX_TILE_PIXELS:
        return f"has tiles of {tile[0]:,} x {tile[1]:,} pixels, expected at most {_MAX_TILE_PIXELS:,}"
    for what, (position, size) in (("strips", _STRIPS), ("tiles", _TILES)):
        starts, sizes = numbers.get(position, []), numbers.get(size, [])
        if len(sizes) != len(starts):
            continue  # sizes may be missing; the decoder knows them where pixels are not compressed
        there = sum(start + length <= head.size for start, length in zip(starts, sizes, strict=True))
        if there < len(starts):
            return _of(there, len(starts), what) + f", in {head.size:,} bytes"
    return None


def _check_boxes(head: HeaderReader) -> str | None:
    has_data = False
    for box in iter_boxes(head, 0, 2**62):
        if box.end > head.size and box.end < 2**62:  # one of size 0 reaches to the end
            is_junk = has_data and box.kind not in _BOXES  # bytes after the last box, which decoders ignore
            return None if is_junk else _of(head.size, box.end)
        has_data |= box.kind in _DATA_BOXES
    return None if has_data else f"is truncated: there is no data in {head.size:,} bytes"


def _check_jxl(head: HeaderReader) -> str | None:
    return None if head.starts(0, b"\xff\x0a") else _check_boxes(head)


def _check_jp2(head: HeaderReader) -> str | None:
    start, end = 0, head.size
    if not head.starts(0, b"\xff\x4f"):
        box = next((box for box in iter_boxes(head, 0, head.size) if box.kind == b"jp2c"), None)
        if box is None:
            return "is truncated: it has no codestream"
        if box.end > head.size:
            return _of(head.size, box.end)
        start, end = box.body, box.end
    pos, tiles = start + 2, 0
    for _ in range(_MAX_PARTS):
        if pos + 2 > end:
            break
        (marker,) = head.take(struct.Struct(">H"), pos, "codestream")
        if marker == 0xFFD9:
            return None if tiles else "is damaged: it has no tile"
        if marker == 0xFF90:  # a tile-part, with its size
            if pos + 12 > end:
                break
            (size,) = head.take(struct.Struct(">6xI"), pos, "tile")
            if size == 0:  # the last one reaches to the end marker
                return None if bytes(head.view[end - 2 : end]) == b"\xff\xd9" else "is truncated: it has no end marker"
            if size < 12:
                return f"is damaged: a tile-part at byte {pos:,} has {size} bytes"
            tiles, pos = tiles + (pos + size <= end), pos + size
        elif marker >= 0xFF01 and pos + 4 <= end:
            pos += 2 + head.take(struct.Struct(">2xH"), pos, "codestream")[0]
        else:
            return f"is damaged: found {marker:#06x} at byte {pos:,}, expected a marker"
    return f"is truncated: {tiles:,} whole tile-parts in {head.size:,} bytes, its end is missing"


def _check_ico(head: HeaderReader) -> str | None:
    icons = read_icons(head)
    *_, start, size = max(icons, key=lambda icon: (icon[0] * icon[1], -icon[2]))
    if wrong := _needs(head, start + size):
        return wrong
    return _check_png(head, start) if head.starts(start, b"\x89PNG\r\n\x1a\n") else None


_CHECKS: dict[str, Callable[[HeaderReader], str | None]] = {
    "jpeg": _check_jpeg,
    "png": _check_png,
    "webp": _check_webp,
    "tiff": _check_tiff,
    "gif": _check_gif,
    "bmp": _check_bmp,
    "avif": _check_boxes,
    "heic": _check_boxes,
    "jxl": _check_jxl,
    "jp2": _check_jp2,
    "pnm": lambda head: _needs(head, pnm_size(head)),
    "ico": _check_ico,
    "tga": lambda head: _needs(head, tga_size(head)),
}
