"""The structure of a JPEG: its ICC profile, its scans, and where it ends. Nothing here decodes a pixel.

Time is linear in the bytes, whatever they are.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

__all__ = ["MAX_JUNK", "MAX_SCANS", "JpegHead", "find_jpeg_damage", "num_scans", "read_jpeg_head", "without_padding"]

MAX_JUNK = 65_536  # bytes in all that may be between the segments of a header, as libjpeg tolerates them
# Each scan of a progressive JPEG costs a pass over all coefficients, however few bytes it has. Encoders make up to 20;
# one per coefficient and component would be 192.
MAX_SCANS = 256

_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_AFTER_SCAN = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
_SCAN_OR_RESTART = re.compile(rb"\xff([^\x00\xff])")
_SCAN = re.compile(rb"\xff\xda")
_ICC = b"ICC_PROFILE\0"
_LENGTH = struct.Struct(">H")
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a segment
_EOI, _SOS = 0xD9, 0xDA


class JpegHead(NamedTuple):
    """What precedes the first scan.

    Attributes:
        icc: the ICC profile, b"" without a complete one.
        is_progressive: whether coefficients come in several scans.
        junk: bytes that the last junk between two segments has, and the marker after it; (0, 0) without any.
        scan: position of the first scan's marker; None where the header has no end.
    """

    icc: bytes
    is_progressive: bool
    junk: tuple[int, int]
    scan: int | None


def read_jpeg_head(view: memoryview) -> JpegHead:
    """Read the segments up to the first scan; those of a damaged header as far as they go."""
    pos, junk, last, is_progressive = 2, 0, (0, 0), False
    pieces: dict[int, bytes] = {}
    expected = 0
    while (match := _MARKER.search(view, pos, pos + MAX_JUNK)) is not None:
        marker, skipped, pos = match[1][0], match.start() - pos, match.end()
        junk += skipped
        last = (skipped, marker) if skipped else last
        if junk > MAX_JUNK or marker == _EOI:
            break
        if marker in _BARE:
            continue
        if marker == _SOS:
            icc = b"".join(pieces[k] for k in sorted(pieces)) if pieces and len(pieces) == expected else b""
            return JpegHead(icc, is_progressive, last, match.start())
        if pos + 2 > len(view):
            break
        (length,) = _LENGTH.unpack_from(view, pos)
        if marker in (0xC2, 0xC6, 0xCA, 0xCE):
            is_progressive = True
        elif marker == 0xE2 and length > 16 and view[pos + 2 : pos + 14] == _ICC:
            expected = view[pos + 15] if pos + 15 < len(view) else 0
            pieces[view[pos + 14]] = bytes(view[pos + 16 : pos + length])
        pos += max(2, length)
    return JpegHead(b"", is_progressive, last, None)


def num_scans(view: memoryview, at_most: int) -> int:
    """Scans that there may be, counted up to a limit."""
    count = 0
    for _ in _SCAN.finditer(view):
        count += 1
        if count > at_most:
            break
    return count


def _end_of(view: memoryview, scan: int) -> tuple[int | None, str | None]:
    """Position of the end-of-image marker, None where it is missing; and what is wrong with the restart markers."""
    pos: int | None = scan
    while pos is not None and pos + 4 <= len(view):
        (length,) = _LENGTH.unpack_from(view, pos + 2)
        pos += 2 + max(2, length)
        match = _AFTER_SCAN.search(view, pos)
        if match is None:
            return None, None
        wrong = _restarts(view, pos, match.start())
        if wrong:
            return match.start(), wrong
        # Tables may follow a scan, then the next one, or the end.
        while match is not None and match[1][0] not in (_EOI, _SOS):
            start = match.end()
            if match[1][0] not in _BARE:
                if start + 2 > len(view):
                    return None, None
                start += max(2, _LENGTH.unpack_from(view, start)[0])
            match = _AFTER_SCAN.search(view, start)
        if match is None:
            return None, None
        if match[1][0] == _EOI:
            return match.start(), None
        pos = match.start()
    return None, None


def _restarts(view: memoryview, start: int, end: int) -> str | None:
    for count, match in enumerate(_SCAN_OR_RESTART.finditer(view, start, end)):
        if match[1][0] != 0xD0 + count % 8:
            return f"restart marker {match[1][0] & 7} at byte {match.start():,}, expected {count % 8}"
    return None


def find_jpeg_damage(view: memoryview) -> str | None:
    """What is structurally wrong with a JPEG: its header, its scans, its end; None where nothing is."""
    head = read_jpeg_head(view)
    if head.scan is None:
        return f"is truncated or damaged: its header has no end in {len(view):,} bytes"
    if head.is_progressive and num_scans(view, MAX_SCANS) > MAX_SCANS:
        return f"has more than {MAX_SCANS} scans, expected fewer: each costs as much as a whole image"
    end, wrong = _end_of(view, head.scan)
    if wrong:
        return f"is damaged: found {wrong}"
    return None if end is not None else f"is truncated: it has no end marker in {len(view):,} bytes"


def without_padding(view: memoryview, num_bytes: int) -> bytes | None:
    """The JPEG without so many bytes before its end marker, if all are zero; else None: they are data."""
    head = read_jpeg_head(view)
    end = None if head.scan is None else _end_of(view, head.scan)[0]
    if end is None or num_bytes > end:
        return None
    stop = end
    while stop > 0 and view[stop - 1] == 0xFF:  # fill bytes of the marker, which do not count
        stop -= 1
    if any(view[stop - num_bytes : stop]):
        return None
    return bytes(view[: stop - num_bytes]) + bytes(view[stop:])
