"""How much of an audio file's samples is there: the size in its header is compared with the file.

A truncated file decodes, up to where it ends, without an error of the decoder. Layouts: RIFF and RF64, AIFF, Sun AU,
CAF, Sony Wave64. Those of video files are in `mm_assets.media.container_damage`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from mm_assets.media.content_types import Buffer
from mm_assets.media.header import MAX_SEGMENTS

__all__ = ["Extent", "WavChunks", "extent_of", "wav_chunks", "wav_with_size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of a file's media is there.

    Attributes:
        there: bytes of samples.
        claimed: bytes that the header promises.
    """

    there: int
    claimed: int

    @property
    def is_whole(self) -> bool:
        """Whether everything is there."""
        return self.there >= self.claimed


class _Layout(NamedTuple):
    """How the chunks of a format follow each other."""

    start: int  # of the first chunk
    header: struct.Struct  # kind and size
    counts_header: bool  # whether the size includes them
    align: int  # of chunks
    samples: bytes  # kind of the chunk with the samples
    skipped: int  # bytes in that chunk before the samples


_LAYOUTS: Final = {
    "wav": _Layout(12, struct.Struct("<4sI"), False, 2, b"data", 0),
    "aiff": _Layout(12, struct.Struct(">4sI"), False, 2, b"SSND", 8),  # an offset and a block size
    "caf": _Layout(8, struct.Struct(">4sq"), False, 1, b"data", 0),
    "w64": _Layout(40, struct.Struct("<16sQ"), True, 8, b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a", 0),
}


def _chunks(view: memoryview, layout: _Layout) -> Iterator[tuple[bytes, int, int]]:
    """Kind, position of the body, and size of each chunk whose header is there; a size below 0 is the last."""
    at = layout.start
    for _ in range(MAX_SEGMENTS):
        body = at + layout.header.size
        if body > len(view):
            return
        kind, size = layout.header.unpack_from(view, at)
        size -= layout.header.size if layout.counts_header else 0
        yield kind, body, size
        if size < 0:
            return
        at = body + size + -size % layout.align


def _is_streamed_size(size: int) -> bool:
    """Whether a 32-bit size of a RIFF or AIFF is that of a writer that could not seek back: about 2 or 4 GiB."""
    return size >= 0xFFFFFF00 or 0x7F000000 <= size <= 0x80000000


def extent_of(data: Buffer, codec: str) -> Extent | None:
    """The extent of a file by its headers; None where they have no size, as in streams that were recorded live.

    Args:
        data: the file's bytes.
        codec: ``wav``, ``aiff``, ``au``, ``caf`` or ``w64``.
    """
    view = memoryview(data).cast("B")
    at, size = _samples_of(view, codec)
    return None if size is None else Extent(there=max(0, min(len(view) - at, size)), claimed=size)


def _samples_of(view: memoryview, codec: str) -> tuple[int, int | None]:
    """Position of the samples and their bytes by the header; None where it has no size."""
    if codec == "wav":
        wav = wav_chunks(view)
        return (0, None) if wav is None else (wav.samples_at, wav.samples_size)
    if codec == "au":
        if len(view) < 24:
            return 0, None
        at, size = struct.unpack_from("<II" if view[0] == ord("d") else ">II", view, 4)
        return at, None if size == 0xFFFFFFFF else size
    layout = _LAYOUTS[codec]
    for kind, body, size in _chunks(view, layout):
        if kind == layout.samples:
            is_known = size >= layout.skipped and not (codec == "aiff" and _is_streamed_size(size))
            return body + layout.skipped, size - layout.skipped if is_known else None
    return 0, None


class WavChunks(NamedTuple):
    """The chunks of a WAV that matter.

    Attributes:
        format_at: position of the body of the chunk ``fmt ``; 0 without one before the samples.
        format_size: its bytes.
        samples_at: position of the samples.
        samples_size: their bytes by the header, which may be more than there are; None where the writer could not seek
            back to fill in a size: then they go on to the end of the file.
        size_at: position of the 64-bit size of the samples, of an RF64; else 0.
        block_size: bytes of a block; 0 without a chunk ``fmt ``.
        samples_per_block: per channel, of an encoding in blocks; else 0.
        num_samples: per channel, by the chunk ``fact``; 0 without one.
    """

    format_at: int
    format_size: int
    samples_at: int
    samples_size: int | None
    size_at: int
    block_size: int = 0
    samples_per_block: int = 0
    num_samples: int = 0


def wav_chunks(view: memoryview) -> WavChunks | None:
    """The chunks of a WAV; None for one that ends before its samples. Its head is enough."""
    format_at = format_size = size_at = block_size = per_block = num_samples = 0
    for kind, body, size in _chunks(view, _LAYOUTS["wav"]):
        if kind == b"fmt ":
            format_at, format_size = body, size
            if size >= 14 and body + 14 <= len(view):
                block_size = struct.unpack_from("<H", view, body + 12)[0]
            if size >= 20 and body + 20 <= len(view):
                per_block = struct.unpack_from("<H", view, body + 18)[0]
        elif kind == b"fact" and body + 4 <= len(view):
            num_samples = struct.unpack_from("<I", view, body)[0]
        elif kind == b"ds64" and body + 16 <= len(view):
            size_at = body + 8
        elif kind == b"data":
            known: int | None = size
            if size == 0xFFFFFFFF and size_at:
                known = struct.unpack_from("<Q", view, size_at)[0] or None
            elif size == 0 or _is_streamed_size(size):
                known = None
            return WavChunks(format_at, format_size, body, known, size_at, block_size, per_block, num_samples)
    return None


def wav_with_size(view: memoryview) -> Buffer:
    """The WAV itself, or, if its samples have a size of 0, as a stopped recorder leaves it, a copy with their size."""
    wav = wav_chunks(view)
    if wav is None or wav.samples_size is not None or wav.samples_at == len(view):
        return view
    copy, size = bytearray(view), len(view) - wav.samples_at
    if wav.size_at:
        struct.pack_into("<Q", copy, wav.size_at, size)
    elif not any(view[wav.samples_at - 4 : wav.samples_at]):
        struct.pack_into("<I", copy, wav.samples_at - 4, min(size, 0xFFFFFFFF))
    else:  # libsndfile takes other sizes for that of the rest of the file
        return view
    return copy
