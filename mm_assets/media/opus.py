"""The pages and packets of Opus in Ogg (RFC 7845, RFC 6716), as far as they tell how long the audio is."""

from __future__ import annotations

import struct

__all__ = ["has_holes"]

_FRAMES = (*(480, 960, 1920, 2880) * 3, *(480, 960) * 2, *(120, 240, 480, 960) * 4)  # samples by configuration
_LAST_PAGE = 4  # flag of an Ogg page


def has_holes(view: memoryview) -> bool:
    """Returns whether a file has pages whose time is not that of their packets: libsndfile refuses such files."""
    at, last, length, is_whole = 0, 0, 0, True
    while at + 27 <= len(view) and bytes(view[at : at + 4]) == b"OggS":
        flags, time = struct.unpack_from("<Bq", view, at + 5)
        lacing = bytes(view[at + 27 : at + 27 + view[at + 26]])
        at, total = at + 27 + len(lacing), 0
        for size in lacing:
            if is_whole and at + 2 <= len(view):
                length = _length_of(bytes(view[at : at + 2]))
            at, is_whole = at + size, size < 255
            total += length if is_whole else 0
        is_cut = flags & _LAST_PAGE and time - last < total  # padding at the end
        if last and time > 0 and time - last != total and not is_cut:
            return True
        last = max(last, time)  # 0 on the pages before the first with audio, -1 where no packet ends
    return False


def _length_of(head: bytes) -> int:
    """Returns the samples at 48 kHz of a packet, by its first two bytes (RFC 6716, section 3.1)."""
    code = head[0] & 3
    return (1, 2, 2, head[1] & 63)[code] * _FRAMES[head[0] >> 3]
