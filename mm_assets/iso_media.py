"""MP4 and QuickTime sample tables, checked before a demuxer sees them.

A sample table states how many samples there are, and a demuxer makes room for that many. Here the number is compared
with the bytes that stand behind it, so that a small file cannot ask for a large memory.
"""

from __future__ import annotations

import struct

from mm_assets.content_types import Buffer
from mm_assets.errors import MediaError

__all__ = ["check_sample_tables"]

_BOX = struct.Struct(">I4s")
_U64 = struct.Struct(">Q")
_U32 = struct.Struct(">I")
_PAIR = struct.Struct(">II")
_PARENTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts")
_MAX_BOXES = 100_000
_ENTRY_SIZES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4}


def check_sample_tables(data: Buffer, name: str) -> None:
    """Compare the counts of each sample table with the bytes there are.

    Raises:
        MediaError: a table counts more entries than it holds, or more samples than the file has bytes.
    """
    view = memoryview(data).cast("B")
    pending = [(0, len(view))]
    seen = 0
    while pending:
        at, end = pending.pop()
        while at + _BOX.size <= end:
            seen += 1
            if seen > _MAX_BOXES:
                raise MediaError(name, f"found more than {_MAX_BOXES} boxes, expected an MP4 of fewer")
            size, kind = _BOX.unpack_from(view, at)
            body = at + _BOX.size
            if size == 1 and at + 16 <= end:
                size, body = _U64.unpack_from(view, body)[0], at + 16
            stop = end if size == 0 else min(at + size, end)
            if stop < body:
                break
            if kind in _PARENTS:
                pending.append((body, stop))
            else:
                _check_table(view, kind, body, stop, name)
            at = stop


def _check_table(view: memoryview, kind: bytes, body: int, stop: int, name: str) -> None:
    if kind == b"stsz" and stop - body >= 12:
        size, count = _PAIR.unpack_from(view, body + 4)
        room = len(view) // size if size else (stop - body - 12) // 4
    elif kind in _ENTRY_SIZES and stop - body >= 8:
        count = _U32.unpack_from(view, body + 4)[0]
        room = (stop - body - 8) // _ENTRY_SIZES[kind]
    else:
        return
    if count > room:
        raise MediaError(name, f"found a table {kind.decode()} of {count} entries, expected at most {room}")
