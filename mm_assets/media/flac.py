"""FLAC files without a length in their header, as an encoder writes them that cannot seek back to fill it in.

The header of the last frame has its position in the stream and its size, which give the length. libsndfile does not
read such a file, so it gets a copy with the length. Section numbers are those of RFC 9639.

Why not PyAV: it is ten times slower, returns a length for truncated files too, and would make an extra of 104 MB a
dependency of FLAC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer
from mm_assets.media.header import size_of_id3

__all__ = [
    "MAX_TAIL_BYTES",
    "StreamInfo",
    "count_frames",
    "md5_of",
    "read_stream_info",
    "with_known_length",
    "with_length",
]

_STREAMINFO_SIZE: Final = 34  # section 8.2
_PACKED_OFFSET: Final = 4 + 4 + 10  # marker, block header, block and frame sizes; then rate, channels, bits, length
_LENGTH_BITS: Final = 36
MAX_TAIL_BYTES: Final = 256 << 10  # bytes from the end in which the last frame must start; usual frames have 5 to 40 KB
_MAX_CANDIDATES = 16  # headers whose CRC-8 fits by chance: once in 2**23 positions, so more are hostile

_BLOCK_SIZES = {1: 192, **{code: 144 << code for code in range(2, 6)}, **{code: 1 << code for code in range(8, 16)}}
_RATES = dict(enumerate((88_200, 176_400, 192_000, 8000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000), 1))
_BITS = {1: 8, 2: 12, 4: 16, 5: 20, 6: 24, 7: 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """The STREAMINFO block, the first of every FLAC file.

    Attributes:
        sample_rate: Hz.
        channels: 1 to 8.
        bits: of one sample, 4 to 32.
        max_block_size: samples per channel of the largest frame; if frames do not vary, of all but the last.
        num_frames: samples per channel of the whole file; 0 if the encoder did not know.
    """

    sample_rate: int
    channels: int
    bits: int
    max_block_size: int
    num_frames: int


def read_stream_info(data: memoryview, start: int) -> StreamInfo:
    """Read the header of the FLAC stream that begins at `start`.

    Raises:
        MediaError: it is truncated or does not begin with a STREAMINFO block.
    """
    end = start + 8 + _STREAMINFO_SIZE
    block = bytes(data[start + 4 : end])
    if len(block) != 4 + _STREAMINFO_SIZE:
        raise MediaError("<audio>", f"FLAC STREAMINFO is truncated: needs {end} bytes, there are {len(data)}")
    if block[0] & 0x7F != 0 or int.from_bytes(block[1:4], "big") != _STREAMINFO_SIZE:
        raise MediaError("<audio>", "FLAC does not start with its STREAMINFO block")
    packed = int.from_bytes(block[14:22], "big")
    return StreamInfo(
        sample_rate=packed >> 44,
        channels=(packed >> 41 & 7) + 1,
        bits=(packed >> 36 & 31) + 1,
        max_block_size=int.from_bytes(block[6:8], "big"),
        num_frames=packed & (1 << _LENGTH_BITS) - 1,
    )


def md5_of(data: memoryview, start: int) -> bytes:
    """The MD5 of the samples, from the header of the FLAC stream at `start`; zeros if the encoder left it out."""
    end = start + 8 + _STREAMINFO_SIZE
    return bytes(data[end - 16 : end])


def with_known_length(data: memoryview, num_frames: int) -> Buffer:
    """The file itself, or, if its header has no length, a copy with this one; `MediaError` for a damaged header."""
    start = size_of_id3(data)
    return data if read_stream_info(data, start).num_frames else with_length(data, start, num_frames)


def with_length(data: Buffer, start: int, num_frames: int) -> bytes:
    """A copy of a file in which the FLAC header at `start` has this length."""
    copy = bytearray(data)
    at = start + _PACKED_OFFSET
    packed = int.from_bytes(copy[at : at + 8], "big")
    length = (1 << _LENGTH_BITS) - 1
    copy[at : at + 8] = (packed & ~length | num_frames & length).to_bytes(8, "big")
    return bytes(copy)


def count_frames(data: memoryview, info: StreamInfo) -> int | None:
    """Samples per channel by the last frame; None if the file does not end with a complete frame of this stream."""
    tail = bytes(data[-MAX_TAIL_BYTES:])
    at, candidates = len(tail), 0
    while candidates < _MAX_CANDIDATES and (at := tail.rfind(b"\xff", 0, at)) >= 0:
        end = _end_of_frame_header(tail, at, info)
        if end is None:
            continue
        candidates += 1
        if _crc(tail[at:-2], 16) == int.from_bytes(tail[-2:], "big"):  # section 9.3
            return end
    return None


def _end_of_frame_header(tail: bytes, at: int, info: StreamInfo) -> int | None:
    """Samples per channel up to the end of the frame at `at`; None if there is no frame (section 9.1)."""
    head = tail[at : at + 16]  # the longest frame header
    if len(head) < 6 or head[1] & 0xFE != 0xF8 or head[3] & 1:
        return None
    block_code, rate_code = head[2] >> 4, head[2] & 15
    channel_code, bits_code = head[3] >> 4, head[3] >> 1 & 7
    num_channels = channel_code + 1 if channel_code < 8 else 2
    if channel_code > 10 or num_channels != info.channels or (bits_code and _BITS.get(bits_code) != info.bits):
        return None
    number, pos = _coded_number(head, 4)
    if number is None:
        return None
    rate_at = pos + {6: 1, 7: 2}.get(block_code, 0)
    end = rate_at + {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    block_value, rate_value = int.from_bytes(head[pos:rate_at], "big"), int.from_bytes(head[rate_at:end], "big")
    block_size = block_value + 1 if block_code in (6, 7) else _BLOCK_SIZES.get(block_code)
    rate = {0: info.sample_rate, 12: rate_value * 1000, 13: rate_value, 14: rate_value * 10, **_RATES}.get(rate_code)
    if block_size is None or block_size > info.max_block_size or rate != info.sample_rate or end >= len(head):
        return None
    if _crc(head[:end], 8) != head[end]:
        return None
    first = number if head[1] & 1 else number * info.max_block_size
    return first + block_size


def _coded_number(head: bytes, at: int) -> tuple[int | None, int]:
    """The number at `at`, coded like UTF-8 but with up to 36 bits, and its end (section 9.1.5)."""
    lead = head[at]
    if lead < 0x80:
        return lead, at + 1
    if lead < 0xC0 or lead == 0xFF:
        return None, at
    num_following = 7 - (lead ^ 0xFF).bit_length()  # leading ones, less the first
    value = lead & (1 << (6 - num_following)) - 1 if num_following < 6 else 0
    following = head[at + 1 : at + 1 + num_following]
    if len(following) != num_following:
        return None, at
    for byte in following:
        if byte & 0xC0 != 0x80:
            return None, at
        value = value << 6 | byte & 0x3F
    return value, at + 1 + num_following


def _crc(data: bytes, width: int) -> int:
    """FLAC's cyclic redundancy checks, highest bit first, from zero; the standard library does not have them."""
    table = _CRC_TABLES[width]
    shift, mask, crc = width - 8, (1 << width) - 1, 0
    for byte in data:
        crc = (crc << 8 & mask) ^ table[crc >> shift ^ byte]
    return crc


def _table(polynomial: int, width: int) -> list[int]:
    top, mask = 1 << (width - 1), (1 << width) - 1
    table = []
    for byte in range(256):
        crc = byte << (width - 8)
        for _ in range(8):
            crc = (crc << 1 ^ polynomial if crc & top else crc << 1) & mask
        table.append(crc)
    return table


_CRC_TABLES = {8: _table(0x07, 8), 16: _table(0x8005, 16)}
