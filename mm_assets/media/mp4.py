"""MP4 and QuickTime tables, checked before a demuxer reads them.

A demuxer allocates memory for as many samples, edits or items as a table counts. Here the counts are compared with the
bytes that follow them, so that a small file cannot claim much memory. Like FFmpeg, the walk reads tables in any box
that holds boxes, whether or not they belong there.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np

from mm_assets.errors import MediaError

__all__ = ["check_sample_tables"]

_BOX = struct.Struct(">I4s")
_U64 = struct.Struct(">Q")
_U32 = struct.Struct(">I")
_PAIR = struct.Struct(">II")
_PARENTS = frozenset(
    b"moov trak mdia minf stbl edts dinf gmhd mvex moof traf mfra udta ilst tref sinf schi wave".split()
)
_MAX_BOXES = 500_000
_ENTRY_SIZES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4, b"stps": 4, b"keys": 8}
_COUNTED = {  # position of a table's count, bytes of its entries, and the first version with a count of four bytes
    **{kind: (4, size, 0) for kind, size in _ENTRY_SIZES.items()},
    b"tfra": (12, 11, 0),
    b"iinf": (4, 8, 1),
    b"iloc": (6, 4, 2),
}
_REFUSED = {b"cmov": "a compressed header", b"senc": "encrypted samples", b"saiz": "encrypted samples"}
_TABLE = re.compile(b"|".join((*_COUNTED, *_REFUSED, b"stsz", b"stz2", b"elst", b"trun", b"sidx")))
_SAMPLE_FIELDS = 0xF00  # flags of a track run, one for each field of four bytes that every sample has
_MAX_PER_BYTE = 16  # samples: no codec whose samples are in chunks of one size has more
_PER_INDEX = 256  # samples of one size, at least, per entry of FFmpeg's index
_TRACK_COST = 4  # bytes of a file per track of a fragment


@dataclass(slots=True)
class _Track:
    samples: int = 0  # as FFmpeg's index counts them
    edits: int = 0
    chunks: int = 0
    runs: list[memoryview] = field(default_factory=list)  # of chunks: first, samples in each, description


def check_sample_tables(view: memoryview) -> None:
    """Compare the counts of each table with the existing bytes.

    Raises:
        MediaError: a table counts more entries than it holds, or the file more samples than it has bytes; or the file
            is encrypted, or its header compressed.
    """
    tables = _Tables(view)
    pending = [(0, len(view))]
    seen = 0
    while pending:
        at, end = pending.pop()
        while at + _BOX.size <= end:
            seen += 1
            if seen > _MAX_BOXES:
                raise MediaError("<video>", f"found more than {_MAX_BOXES} boxes, expected an MP4 of fewer")
            size, kind = _BOX.unpack_from(view, at)
            body = at + _BOX.size
            if size == 1 and at + 16 <= end:
                size, body = _U64.unpack_from(view, body)[0], at + 16
            stop = end if size == 0 else min(at + size, end)
            if stop < body:
                break
            at = stop
            inside = _children(view, kind, body, stop)
            if inside is None:
                tables.add(kind, body, stop)
                continue
            tables.enter(kind)
            pending.append((at, end))  # in the order of the file: a table belongs to the track before it
            at, end = inside, stop
    tables.check()


def _children(view: memoryview, kind: bytes, body: int, stop: int) -> int | None:
    """Position of the first box in a box; None if FFmpeg does not read any."""
    if kind in _PARENTS:
        return body
    if kind in (b"free", b"hoov") and bytes(view[body + 4 : body + 8]) in (b"mvhd", b"cmov"):
        return body  # FFmpeg reads it as a moov
    if kind == b"meta":
        found = (match.start() for match in re.finditer(b"hdlr", view[body:stop]))
        first = next((at for at in found if at % 4 == 0 and at), None)
        return None if first is None else body + first - 4
    return None


class _Tables:
    """The claims of all tables of a file together."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.tracks = [_Track()]
        self.fragments = 0
        self.samples = 0  # without bytes in a table

    def enter(self, kind: bytes) -> None:
        """Note a box that holds boxes."""
        if kind == b"trak":
            self.tracks.append(_Track())
        self.fragments += kind == b"moof"

    def add(self, kind: bytes, body: int, stop: int) -> None:
        """Note a box that holds no boxes, and check it alone."""
        view, track, size = self.view, self.tracks[-1], stop - body
        if kind in _REFUSED:
            raise MediaError("<video>", f"found {_REFUSED[kind]}, expected a file without")
        if kind in (b"stsd", b"iprp"):
            # FFmpeg parses their content like a track's: a table in it is hostile.
            hidden = _TABLE.search(view[body:stop])
            if hidden is not None:
                raise MediaError("<video>", f"found a {hidden[0].decode()} within {kind.decode()}, expected none there")
        elif kind in (b"stsz", b"stz2") and size >= 12:
            each, count = _PAIR.unpack_from(view, body + 4)
            bits = max(each & 0xFF, 4) if kind == b"stz2" else 32
            is_constant = kind == b"stsz" and each > 0
            self._need(kind, count, len(view) // each if is_constant else (size - 12) * 8 // bits)
            track.samples += count // _PER_INDEX + 1 if is_constant else count
            self.samples += count if is_constant else 0
        elif kind in _COUNTED:
            at, each, version = _COUNTED[kind]
            if size < at + 4 or view[body] < version:
                return
            count = _U32.unpack_from(view, body + at)[0]
            self._need(kind, count, (size - at - 4) // each)
            if kind in (b"stco", b"co64"):
                track.chunks += count
            elif kind == b"stsc":
                track.runs.append(view[body + 8 : body + 8 + 12 * count])
            elif kind == b"tfra":
                self.fragments += count
        elif kind == b"elst" and size >= 8:
            count, each = _U32.unpack_from(view, body + 4)[0], 20 if view[body] == 1 else 12
            self._need(kind, count, (size - 8) // each)
            # An edit that begins at -1 shows nothing; any other one goes through the track's samples.
            first = body + (16 if each == 20 else 12)
            track.edits += sum(view[first + each * k] < 0x80 for k in range(count))
        elif kind == b"trun" and size >= 8:
            flags, count = _PAIR.unpack_from(view, body)
            each = 4 * (flags & _SAMPLE_FIELDS).bit_count()
            self._need(kind, count, (size - 8) // each if each else len(view))
            self.samples += count
        elif kind == b"sidx" and size and size >= (at := 32 if view[body] else 24):
            self.fragments += min(int.from_bytes(view[body + at - 2 : body + at]), (size - at) // 12)

    def check(self) -> None:
        """Compare the claims of all tables together with the bytes of the file."""
        room = len(self.view)
        claims = {
            "samples": (self.samples, room),
            "samples in chunks": (max(map(_in_chunks, self.tracks)), _MAX_PER_BYTE * room),
            "samples in edits": (sum(track.edits * track.samples for track in self.tracks), room),
            "fragments of tracks": (self.fragments * (len(self.tracks) - 1), 1000 + room // _TRACK_COST),
        }
        for what, (count, most) in claims.items():
            if count > most:
                raise MediaError("<video>", f"found {count} {what}, expected at most {most} in {room} bytes")

    def _need(self, kind: bytes, count: int, room: int) -> None:
        if count > room:
            raise MediaError("<video>", f"found a table {kind.decode()} of {count} entries, expected at most {room}")


def _in_chunks(track: _Track) -> int:
    """Samples in a track's chunks; more than that if the table of runs is out of order."""
    total = 0
    for run in track.runs:
        table = np.frombuffer(run, dtype=">u4").reshape(-1, 3).astype(np.int64)
        if len(table):
            lengths = np.diff(table[:, 0], append=track.chunks + 1)
            if lengths.min() < 0 or table[0, 0] < 1:
                total += track.chunks * int(table[:, 1].max())
            else:
                total += int((lengths.astype(np.float64) * table[:, 1]).sum())
    return total
