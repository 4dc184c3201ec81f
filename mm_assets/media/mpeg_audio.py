"""Files that are a run of audio frames: MP3 (MPEG audio), AAC (ADTS), AC-3 and E-AC-3, AMR, WavPack.

Nothing is decoded: each frame's header gives its size, so a walk over the headers gives the number of samples and finds
truncated files and stretches that are not frames. Layouts: ISO 11172-3 and 13818-3 (MPEG audio), ISO 13818-7 (ADTS),
ETSI TS 102 366 (AC-3), RFC 4867 (AMR), the WavPack 4 and 5 format description; the Xing header is LAME's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer
from mm_assets.media.header import size_of_id3

__all__ = ["FrameRun", "check_frames", "frame_offsets", "mp3_with_length", "walk_mp3"]

_U32 = struct.Struct(">I")
_SEARCHED: Final = 1 << 20  # bytes that are searched for frames where none are, in all: more are hostile
_LONGEST = 2881  # bytes of an MPEG frame
_MAX_FILL = 4096  # zeros after the last frame
_MAX_END_TAGS = 8
_LONGEST_LYRICS = 5120  # bytes of a Lyrics3 tag of version 1
_SAME = 0xFFFE0C00  # sync, version, layer and rate: the same in all frames of a file

_KBPS = {  # (lowest version, layer): kilobits per second by index
    (1, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_KBPS[2, 3] = _KBPS[2, 2]
_RATES = (44_100, 48_000, 32_000)
_AC3_KBPS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640)
_AMR_SIZES = {  # of a frame by its type, with the header byte; 0 is not a type
    b"#!AMR\n": (13, 14, 16, 18, 20, 21, 27, 32, 6, 0, 0, 0, 0, 0, 0, 1),
    b"#!AMR-WB\n": (18, 24, 33, 37, 41, 47, 51, 59, 61, 6, 0, 0, 0, 0, 1, 1),
}


class _Header(NamedTuple):
    """An MPEG audio frame header."""

    size: int  # bytes of the frame; 0 for the free format
    num_samples: int  # per channel
    rate: int
    channels: int
    version: int  # 1, or 2 for MPEG 2 and 2.5
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRun:
    """The frames of an MP3.

    Attributes:
        sample_rate: Hz.
        channels: 1 or 2.
        layer: 1 to 3.
        num_frames: MPEG frames with audio: without the one that holds a Xing, Info or VBRI header.
        num_samples: per channel, of these frames.
        claimed_frames: by the Xing, Info or VBRI header; None without one, or where it has no count.
        has_xing: whether a Xing or Info header with a count is there.
        start: of the first frame with audio, in bytes.
        end: of the last frame.
        problem: what is wrong; "" where nothing is.
    """

    sample_rate: int
    channels: int
    layer: int
    num_frames: int
    num_samples: int
    claimed_frames: int | None
    has_xing: bool
    start: int
    end: int
    problem: str


@lru_cache(maxsize=4096)
def _header(word: int) -> _Header | None:
    """The header of an MPEG audio frame from its 4 bytes; None for other bytes."""
    version_code, layer_code, kbps_code, rate_code = word >> 19 & 3, word >> 17 & 3, word >> 12 & 15, word >> 10 & 3
    if word >> 21 != 0x7FF or version_code == 1 or layer_code == 0 or kbps_code == 15 or rate_code == 3:
        return None
    version, layer = 1 if version_code == 3 else 2, 4 - layer_code
    rate = _RATES[rate_code] >> {3: 0, 2: 1, 0: 2}[version_code]
    bits, padding = _KBPS[version, layer][kbps_code] * 1000, word >> 9 & 1
    if layer == 1:
        num_samples, size = 384, (12 * bits // rate + padding) * 4
    else:
        num_samples = 576 if (version, layer) == (2, 3) else 1152
        size = num_samples // 8 * bits // rate + padding
    return _Header(size if bits else 0, num_samples, rate, 1 if word >> 6 & 3 == 3 else 2, version, layer)


def walk_mp3(data: Buffer, *, max_frames: int | None = None) -> FrameRun:
    """Walk the frames of an MP3: MPEG 1, 2 and 2.5, layers I to III. Tags before, between and after them are skipped.

    With `max_frames`, the walk ends after as many frames, the counts are of these, and `end` is that of the file
    without the tags after it.

    Raises:
        MediaError: no frame is there, or they are of the free format, whose headers have no size.
    """
    view = memoryview(data).cast("B")
    end = _without_end_tags(view)
    at = _first_frame(view, end)
    (word,) = _U32.unpack_from(view, at)
    first, same = _header(word), word & _SAME
    assert first is not None  # `_first_frame` returns positions of headers only
    if first.size == 0:
        raise MediaError("<audio>", "MP3 is of the free format, expected a bit rate in each frame's header")
    claimed, is_xing, is_info = _claimed_frames(view, at, first)
    start = at = at + first.size if is_info else at
    count, problem, budget = 0, "", _SEARCHED
    last_end = min(at, end)
    while at + 4 <= end:
        if count == max_frames:
            last_end = end
            break
        (word,) = _U32.unpack_from(view, at)
        header = _header(word) if word & _SAME == same else None
        if header is not None and header.size:
            if at + header.size > end:
                if count < (claimed or count + 1):
                    problem = problem or f"its last frame has {end - at} of {header.size} bytes"
                break
            at = last_end = at + header.size
            count += 1
        elif tag := _tag_size(view, at):
            at += tag
        elif claimed is not None and count >= claimed:
            break  # what follows the frames that are counted is not audio of this file
        else:
            found = _next_frame(view, at + 1, min(end, at + budget), same)
            if found is None:
                if end - at > _LONGEST and not _is_fill(view, at, end):
                    problem = problem or f"the {end - at} bytes from {at} on are not frames"
                break
            problem = problem or f"the {found - at} bytes from {at} on are not frames"
            budget -= found - at
            at = found
    return FrameRun(
        sample_rate=first.rate,
        channels=first.channels,
        layer=first.layer,
        num_frames=count,
        num_samples=count * first.num_samples,
        claimed_frames=claimed,
        has_xing=is_xing and claimed is not None,
        start=start,
        end=last_end,
        problem=problem,
    )


def mp3_with_length(data: Buffer, run: FrameRun) -> tuple[Buffer, int]:
    """An MP3 for libmpg123, and how many samples to drop from the start of what it decodes.

    Without a count in a Xing header, libmpg123 estimates the length from the size of the first frame, and decodes no
    more than that. So the frames get a silent one of the lowest bit rate before them: the estimate is then too large.
    (With a Xing header of our own libmpg123 would drop 529 samples, the delay of a decoder.)
    """
    if run.has_xing:
        return data, 0
    view = memoryview(data).cast("B")
    (word,) = _U32.unpack_from(view, run.start) if run.num_frames else (0,)
    word = word & ~0xF200 | 0x11000  # the lowest bit rate, without padding and checksum
    header = _header(word)
    if header is None:
        return b"", 0
    silence = _U32.pack(word).ljust(header.size, b"\0")
    return silence + bytes(view[run.start : run.end]), header.num_samples


def _side_size(header: _Header) -> int:
    """Bytes of a layer III frame's side information."""
    return {(1, 2): 32, (1, 1): 17, (2, 2): 17, (2, 1): 9}[header.version, header.channels]


def _claimed_frames(view: memoryview, at: int, header: _Header) -> tuple[int | None, bool, bool]:
    """The frames that a Xing, Info or VBRI header claims, whether it is one of the first two, and whether it is any."""
    if header.layer != 3:
        return None, False, False
    place = at + 4 + _side_size(header)
    if bytes(view[place : place + 4]) in (b"Xing", b"Info") and place + 12 <= len(view):
        flags, count = struct.unpack_from(">II", view, place + 4)
        return (count if flags & 1 and count else None), True, True
    place = at + 4 + 32
    if bytes(view[place : place + 4]) == b"VBRI" and place + 18 <= len(view):
        return _U32.unpack_from(view, place + 14)[0] or None, False, True
    return None, False, False


def _first_frame(view: memoryview, end: int) -> int:
    at = 0
    while size := size_of_id3(view[at:]):
        at += size + (10 if view[at + 5] & 0x10 else 0)
    if at + 4 <= end and _header(_U32.unpack_from(view, at)[0]) is not None:
        return at
    found = _next_frame(view, at, min(end, at + _SEARCHED), None)
    if found is None or bytes(view[at:found]).strip(b"\0"):  # a tag may be filled up with zeros past its size
        where = f"at byte {at}" if at else "at its start"
        raise MediaError("<audio>", f"MP3 has no frame {where}: found {bytes(view[at : at + 8])!r}")
    return found


def _next_frame(view: memoryview, at: int, end: int, same: int | None) -> int | None:
    """Position of the next frame that another one, or the end, follows; None if there is none."""
    window = bytes(view[at:end])
    place = -1
    while (place := window.find(b"\xff", place + 1)) >= 0 and at + place + 4 <= len(view):
        (word,) = _U32.unpack_from(view, at + place)
        header = _header(word)
        if header is None or not header.size or (same is not None and word & _SAME != same):
            continue
        after = at + place + header.size
        if after == len(view) or (after + 4 <= len(view) and _U32.unpack_from(view, after)[0] & _SAME == word & _SAME):
            return at + place
    return None


def _is_fill(view: memoryview, at: int, end: int) -> bool:
    """Whether only a few zeros are left, as a tag editor or a block device leaves them."""
    return end - at <= _MAX_FILL and not any(view[at:end])


def _tag_size(view: memoryview, at: int) -> int:
    """Bytes of the tag at a position between frames; 0 where there is none."""
    head = bytes(view[at : at + 32])
    if head.startswith(b"ID3"):
        return size_of_id3(memoryview(head)) and size_of_id3(memoryview(head)) + (10 if head[5] & 0x10 else 0)
    if head.startswith(b"TAG"):
        return 128
    if head.startswith(b"APETAGEX") and len(head) == 32:
        return int.from_bytes(head[12:16], "little") + 32
    return 0


def _without_end_tags(view: memoryview) -> int:
    """Position of the tags that end a file: ID3v1, Lyrics3 and APE, in any order."""
    end = len(view)
    for _ in range(_MAX_END_TAGS):
        end -= _end_tag_size(view[:end])
    return end


def _end_tag_size(view: memoryview) -> int:
    """Bytes of the last tag; 0 where there is none."""
    end = len(view)
    tail = bytes(view[-128:])
    size = 0
    if len(tail) == 128 and tail.startswith(b"TAG"):
        size = 128
    elif tail.endswith(b"LYRICS200") and tail[-15:-9].isdigit():
        size = int(tail[-15:-9]) + 15
    elif tail.endswith(b"LYRICSEND"):  # version 1 has no size, but at most 5100 bytes
        start = bytes(view[-_LONGEST_LYRICS:]).rfind(b"LYRICSBEGIN")
        size = min(end, _LONGEST_LYRICS) - start if start >= 0 else 0
    elif len(tail) >= 32 and tail[-32:].startswith(b"APETAGEX"):
        size, flags = struct.unpack_from("<I4xI", tail, len(tail) - 20)
        size += 32 if flags >> 31 else 0  # the tag has a header too
        size = size if size >= 32 else 0
    return size if size <= end else 0


# --- files of other frames --------------------------------------------------------------------------------------------


def check_frames(data: Buffer, codec: str) -> None:
    """Check that a file is a run of whole frames, but for tags before and after them.

    Args:
        data: the file's bytes.
        codec: ``aac``, ``ac3``, ``amr`` or ``wavpack``.

    Raises:
        MediaError: a frame is truncated, or bytes between frames are not one.
    """
    view = memoryview(data).cast("B")
    at, end = 0, _without_end_tags(view)
    while size := size_of_id3(view[at:]):
        at += size + (10 if view[at + 5] & 0x10 else 0)
    size_of = _SIZES.get(codec) or _amr_size(view)
    at += size_of.skipped if isinstance(size_of, _AmrSize) else 0
    count = 0
    while at < end:
        size = size_of(bytes(view[at : at + 8]))
        if size < 1:
            if codec == "wavpack" and count:  # its last block is known to be the last by the decoder alone
                return
            raise MediaError("<audio>", f"{codec} is damaged: the bytes from {at} on are not a frame, after {count}")
        if at + size > end:
            found = f"frame {count} has {end - at} of {size} bytes"
            raise MediaError("<audio>", f"{codec} is truncated: {found}")
        at += size
        count += 1
    if not count:
        raise MediaError("<audio>", f"{codec} has no frames, expected at least one")


def frame_offsets(data: Buffer, stop: int) -> list[int] | None:
    """Where the first `stop` frames of an AAC begin, and the last of them ends; None if there is anything between."""
    view = memoryview(data).cast("B")
    at = 0
    while size := size_of_id3(view[at:]):
        at += size + (10 if view[at + 5] & 0x10 else 0)
    offsets = [at]
    for _ in range(stop):
        size = _adts_size(bytes(view[at : at + 8]))
        at += size
        if size < 1 or at > len(view):
            return None
        offsets.append(at)
    return offsets


def _adts_size(head: bytes) -> int:
    if len(head) < 7 or head[0] != 0xFF or head[1] & 0xF6 != 0xF0:
        return 0
    return max(0, (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5)


def _ac3_size(head: bytes) -> int:
    if len(head) < 6 or head[:2] != b"\x0bw":
        return 0
    if head[5] >> 3 > 10:  # E-AC-3
        return ((head[2] & 7) << 8 | head[3]) * 2 + 2
    rate_code, size_code = head[4] >> 6, head[4] & 63
    if rate_code == 3 or size_code >= 2 * len(_AC3_KBPS):
        return 0
    kbps = _AC3_KBPS[size_code // 2]
    words = {0: 2 * kbps, 1: 320 * kbps // 147 + size_code % 2, 2: 3 * kbps}[rate_code]
    return 2 * words


def _wavpack_size(head: bytes) -> int:
    return int.from_bytes(head[4:8], "little") + 8 if len(head) == 8 and head[:4] == b"wvpk" else 0


class _AmrSize:
    """The size of an AMR frame by its first byte, and of the file's magic number."""

    def __init__(self, magic: bytes) -> None:
        self.skipped = len(magic)
        self._sizes = _AMR_SIZES[magic]

    def __call__(self, head: bytes) -> int:
        return self._sizes[head[0] >> 3 & 15]


def _amr_size(view: memoryview) -> _AmrSize:
    for magic in _AMR_SIZES:
        if bytes(view[: len(magic)]) == magic:
            return _AmrSize(magic)
    raise MediaError("<audio>", f"AMR begins with {bytes(view[:12])!r}, expected {' or '.join(map(repr, _AMR_SIZES))}")


_SIZES: dict[str, Callable[[bytes], int]] = {"aac": _adts_size, "ac3": _ac3_size, "wavpack": _wavpack_size}
