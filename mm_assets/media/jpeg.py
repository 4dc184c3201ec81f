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
_MAX_RESTARTS = 1 << 22  # in a scan

_MARKER = re.compile(rb"\xff([^\x00\xff])")
_AFTER_SCAN = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
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
        skipped = match.start() - pos and len(bytes(view[pos : match.start()]).rstrip(b"\xff"))  # without fill bytes
        junk += match.start() - pos
        marker, pos = match[1][0], match.end()
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


def num_scans(view: memoryview, head: JpegHead) -> int:
    """Scans of the image, at most `MAX_SCANS` + 1."""
    count = 0
    for _ in _SCAN.finditer(view):  # fast, but counts those of thumbnails and of what follows the image too
        count += 1
        if count > MAX_SCANS:
            return 0 if head.scan is None else _walk(view, head.scan).num_scans
    return count


class _Walk(NamedTuple):
    """The scans of an image.

    Attributes:
        end: position of the end-of-image marker; None where it is missing.
        num_scans: scans, at most `MAX_SCANS` + 1.
        wrong: what is wrong with the restart markers.
    """

    end: int | None
    num_scans: int
    wrong: str | None = None


def _walk(view: memoryview, scan: int) -> _Walk:
    pos, count = scan, 0
    while pos + 4 <= len(view):
        count += 1
        if count > MAX_SCANS:
            break
        (length,) = _LENGTH.unpack_from(view, pos + 2)
        pos += 2 + max(2, length)
        match = _AFTER_SCAN.search(view, pos)
        if match is None:
            break
        wrong = _restarts(view, pos, match.start())
        if wrong:
            return _Walk(match.start(), count, wrong)
        # Tables may follow a scan, then the next one, or the end.
        while match is not None and match[1][0] not in (_EOI, _SOS):
            start = match.end()
            if match[1][0] not in _BARE:
                if start + 2 > len(view):
                    return _Walk(None, count)
                start += max(2, _LENGTH.unpack_from(view, start)[0])
            match = _AFTER_SCAN.search(view, start)
        if match is None:
            break
        if match[1][0] == _EOI:
            return _Walk(match.start(), count)
        pos = match.start()
    return _Walk(None, count)


def _restarts(view: memoryview, start: int, end: int) -> str | None:
    for count, match in enumerate(_MARKER.finditer(view, start, end)):
        if count >= _MAX_RESTARTS:
            return f"more than {_MAX_RESTARTS:,} restart markers"
        if match[1][0] != 0xD0 + count % 8:
            return f"restart marker {match[1][0] & 7} at byte {match.start():,}, expected {count % 8}"
    return None


def find_jpeg_damage(view: memoryview) -> str | None:
    """What is structurally wrong with a JPEG: its header, its scans, its end; None where nothing is."""
    head = read_jpeg_head(view)
    if head.scan is None:
        return f"is truncated or damaged: its header has no end in {len(view):,} bytes"
    walk = _walk(view, head.scan)
    if walk.num_scans > MAX_SCANS:
        return f"has more than {MAX_SCANS} scans, expected fewer: each costs as much as a whole image"
    if walk.wrong:
        return f"is damaged: found {walk.wrong}"
    return None if walk.end is not None else f"is truncated: it has no end marker in {len(view):,} bytes"


def without_padding(view: memoryview, *, keep: int = 0) -> bytes | None:
    """The JPEG without the zeros before its end marker, but for `keep` of them; None if there are no more."""
    head = read_jpeg_head(view)
    end = None if head.scan is None else _walk(view, head.scan).end
    if end is None:
        return None
    data = bytes(view[:end]).rstrip(b"\xff")  # fill bytes of the marker
    stop = len(data.rstrip(b"\0"))
    stop += data[stop - 1 : stop] == b"\xff"  # its zero is a part of it
    stop += keep
    return None if stop >= len(data) else data[:stop] + bytes(view[end:])
