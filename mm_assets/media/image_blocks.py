"""The parts of a PNG, a WebP (chunks) and a GIF (blocks), in order. Time is linear in the bytes, whatever they are."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from mm_assets.media.content_types import Buffer
from mm_assets.media.header import CHUNK_BE, CHUNK_LE, HeaderReader

__all__ = [
    "GIF_END",
    "GIF_EXTENSION",
    "GIF_FRAME",
    "Chunk",
    "GifBlock",
    "gif_blocks",
    "pixel_chunks",
    "png_chunks",
    "webp_chunks",
]

GIF_EXTENSION: Final = 0x21
GIF_FRAME: Final = 0x2C
GIF_END: Final = 0x3B

_MAX_CHUNKS = 1 << 18  # the loop over them runs in Python
_MAX_BLOCKS = 1 << 22  # of up to 255 bytes, so that a GIF may have 1 GB
_MAX_PROFILE = 1 << 20  # bytes of an ICC profile, beyond which Pillow refuses the image
_SIGNATURE_SIZE = 8
_NOT_ZERO = re.compile(rb"[^\0]")
_MAX_FRAMES = 1 << 18  # and extensions, whose data may be empty
# Chunks that decide which pixels Pillow gives. Of the others it would refuse an image for long texts.
_PIXEL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"acTL", b"fcTL", b"fdAT"))


class Chunk(NamedTuple):
    """A chunk of a PNG: its kind, the position of its length field, of its body, and after its checksum.

    Of a truncated file `end` may be after the bytes.
    """

    kind: bytes
    start: int
    body: int
    end: int

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return self.end - 4 - self.body


def png_chunks(head: HeaderReader, start: int = 0) -> Iterator[Chunk]:
    """The chunks of the PNG that begins at a position, up to the end of the bytes; `MediaError` for too many."""
    pos = start + _SIGNATURE_SIZE
    for _ in range(_MAX_CHUNKS):
        if not head.has(pos, CHUNK_BE.size):
            return
        length, kind = head.take(CHUNK_BE, pos, "chunk")
        chunk = Chunk(kind, pos, pos + 8, pos + 12 + length)
        yield chunk
        pos = chunk.end
    raise head.fail(f"has more than {_MAX_CHUNKS:,} chunks")


def pixel_chunks(data: Buffer) -> tuple[bytes, bool]:
    """A whole PNG without the chunks that do not change its pixels, and whether its ICC profile is too large to keep.

    What encoders add, such as the texts of image generators, has no limit that way.
    """
    head = HeaderReader(data, "png")
    parts = [head.view[:_SIGNATURE_SIZE]]
    is_too_large = False
    for chunk in png_chunks(head):
        keep = chunk.kind in _PIXEL_CHUNKS
        if chunk.kind == b"iCCP":
            is_too_large = _is_large_profile(bytes(head.view[chunk.body : chunk.end - 4]))
            keep = not is_too_large
        if keep:
            parts.append(head.view[chunk.start : chunk.end])
        if chunk.kind == b"IEND":
            break
    return b"".join(parts), is_too_large


def _is_large_profile(body: bytes) -> bool:
    inflater = zlib.decompressobj()
    try:
        inflater.decompress(body[body.find(b"\0") + 2 :], _MAX_PROFILE)
    except zlib.error:
        return False  # Pillow ignores it
    return bool(inflater.unconsumed_tail)


def webp_chunks(head: HeaderReader) -> Iterator[tuple[bytes, int, int]]:
    """Kind, position and length of each chunk of a WebP, up to the end of the bytes; `MediaError` for too many."""
    pos = 12
    for _ in range(_MAX_CHUNKS):
        if not head.has(pos, CHUNK_LE.size):
            return
        kind, length = head.take(CHUNK_LE, pos, "chunk")
        yield kind, pos + 8, length
        pos += 8 + length + (length & 1)
    raise head.fail(f"has more than {_MAX_CHUNKS:,} chunks")


class GifBlock(NamedTuple):
    """A block of a GIF: its introducer, its position, and where its data ends.

    Of a truncated file `end` is after the bytes.
    """

    kind: int
    start: int
    end: int


def gif_blocks(head: HeaderReader) -> Iterator[GifBlock]:
    """The blocks of a GIF, up to its trailer, the end of the bytes, or a byte that begins no block; these are yielded.

    Zeros between two blocks are skipped, as decoders do: some encoders write one terminator too many. `MediaError` for
    a truncated header and for too many blocks.
    """
    flags = head.piece(10, 1, "GIF header")[0]
    pos = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    view, size, blocks, found = head.view, head.size, 0, 0
    while pos < size:
        kind, start = view[pos], pos
        if kind == 0:
            after = _NOT_ZERO.search(view, pos)
            if after is None:
                return
            pos = after.start()
            continue
        found += 1
        if found > _MAX_FRAMES:
            raise head.fail(f"has more than {_MAX_FRAMES:,} frames and extensions")
        if kind == GIF_FRAME:
            local = view[pos + 9] if pos + 10 <= size else 0
            pos += 11 + (3 << ((local & 7) + 1) if local & 0x80 else 0)
        elif kind == GIF_EXTENSION:
            pos += 2
        else:
            yield GifBlock(kind, start, start + 1)
            return
        while pos < size and view[pos]:
            pos += 1 + view[pos]
            blocks += 1
            if blocks > _MAX_BLOCKS:
                raise head.fail(f"has more than {_MAX_BLOCKS:,} blocks")
        pos += 1
        yield GifBlock(kind, start, pos)
