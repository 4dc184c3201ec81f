"""Damage of a video or audio file that its container shows: lengths that its bytes do not keep, and lost structure.

FFmpeg passes over both and gives what is left, so that a truncated clip decodes without an error, only shorter. Each
function walks one container's structure without reading its content. It judges what a file promises, not what is
usual: a live recording of unknown length, or zeros after the end, are whole.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.media.mpeg_audio import walk_mp3

__all__ = ["find_damage", "ogg_links", "without_tail"]

_MAX_STEPS = 4_000_000  # elements, chunks, tags, pages or packs of one file: hours of any
_MAX_FILL = 4096  # zeros after the end that a writer may add: more than a sector
_MAX_OGG_PAGE = 65_307  # bytes
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U32_LE = struct.Struct("<I")
_U64 = struct.Struct(">Q")
_U64_LE = struct.Struct("<Q")


def find_damage(view: memoryview, demuxer: str) -> str | None:
    """The first damage that the container shows, in words; None where there is none.

    Args:
        view: the whole file.
        demuxer: FFmpeg's name of the container.
    """
    walk = _WALKS.get(demuxer)
    return None if walk is None else walk(view)


def without_tail(view: memoryview, demuxer: str) -> memoryview:
    """An Ogg, MPEG transport stream or MP3 without the bytes after its last page, packet or frame.

    FFmpeg fails where more of them follow than it looks through for the next one, and takes those after an MP3, such
    as an APE tag, for a frame. Other files are returned whole, and so are those in which something follows that is
    damage.
    """
    if demuxer == "ogg" and b"OggS" not in bytes(view[-_MAX_OGG_PAGE:]):
        at = bytes(view).rfind(b"OggS")
        body = at + 27 + view[at + 26]
        return view[: body + sum(view[at + 27 : body])]
    if demuxer == "mpegts" and (packets := _packets_of(view)) is not None:
        at = len(packets) * packets.strides[0]
        return view if at + packets.strides[0] <= len(view) and _goes_on(view, at, packets) else view[:at]
    if demuxer == "mp3":
        try:
            run = walk_mp3(view)
        except MediaError:
            return view  # of the free format, whose frames have no size
        return view if run.problem else view[: run.end]
    return view


def _is_fill(view: memoryview, at: int) -> bool:
    """Whether only a few zeros follow."""
    return len(view) - at <= _MAX_FILL and not any(view[at:])


def _beyond(what: str, at: int, end: int, view: memoryview) -> str:
    return f"{what} at byte {at} ends {end - len(view)} bytes after the file"


# --- ISO base media ---------------------------------------------------------------------------------------------------

_KNOWN_BOXES = frozenset(
    b"ftyp moov mdat moof mfra sidx styp free hoov skip wide pnot udta uuid emsg prft meta".split()
)


def _mov(view: memoryview) -> str | None:
    """Boxes that end after the file, a header that is missing, and bytes between fragments that are not boxes."""
    at, fragments, has_header = 0, 0, False
    for _ in range(_MAX_STEPS):
        if at + 8 > len(view):
            return None if has_header else "no box moov"
        size, kind = _U32.unpack_from(view, at)[0], bytes(view[at + 4 : at + 8])
        if size == 1 and at + 16 <= len(view):
            size = _U64.unpack_from(view, at + 8)[0]
        if kind not in _KNOWN_BOXES and not (kind.isalnum() and 8 <= size <= len(view) - at):  # a box of another kind
            lost = fragments and not _is_fill(view, at) and b"moof" in bytes(view[at:])
            if not has_header:
                return f"no box moov before byte {at}, where there is no box"
            return f"no box at byte {at}, before more fragments" if lost else None
        fragments += kind == b"moof"
        has_header = has_header or kind == b"moov" or _is_other_header(view, at, kind)
        if size == 0:
            return None if has_header else "no box moov"
        if at + size > len(view) and kind in (b"mdat", b"moov", b"moof"):
            return _beyond(f"box {kind.decode()}", at, at + size, view)
        at += max(size, 8)
    return f"more than {_MAX_STEPS} boxes"


def _is_other_header(view: memoryview, at: int, kind: bytes) -> bool:
    """Whether FFmpeg reads a box as the header though it is not named so."""
    return kind in (b"free", b"hoov") and bytes(view[at + 12 : at + 16]) in (b"mvhd", b"cmov")


# --- Matroska ---------------------------------------------------------------------------------------------------------

_SEGMENT, _CLUSTER, _BLOCK_GROUP = 0x18538067, 0x1F43B675, 0xA0
_LEVEL_1 = frozenset(
    (0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367, _CLUSTER, 0xEC, 0xBF)
)
_IN_CLUSTER = frozenset((0xE7, 0xA7, 0xAB, 0xA3, _BLOCK_GROUP, 0xAF, 0x5854, 0xEC, 0xBF))
_UNKNOWN = -1  # size of an element that ends where the next of its level begins


def _element(view: memoryview, at: int) -> tuple[int, int, int] | None:
    """Identifier, position of the body, and size of an element; None for other bytes."""
    first = view[at]
    width = 9 - first.bit_length()
    if width > 4 or at + width >= len(view):
        return None
    name = int.from_bytes(view[at : at + width])
    at += width
    size_width = 9 - view[at].bit_length()
    if size_width > 8 or at + size_width > len(view):
        return None
    size = int.from_bytes(view[at : at + size_width]) - (1 << 7 * size_width)
    return name, at + size_width, _UNKNOWN if size == (1 << 7 * size_width) - 1 else size


def _matroska(view: memoryview) -> str | None:
    """A segment, cluster or element that ends after what holds it, and bytes that are not elements."""
    head = _element(view, 0) if len(view) else None
    if head is None or head[2] == _UNKNOWN:
        return "no EBML header"
    at = head[1] + head[2]
    segment = _element(view, at) if at < len(view) else None
    while segment is not None and segment[0] == 0xEC and segment[2] != _UNKNOWN and segment[1] + segment[2] < len(view):
        at = segment[1] + segment[2]
        segment = _element(view, at)
    if segment is None or segment[0] != _SEGMENT:
        return f"no segment at byte {at}"
    end = len(view) if segment[2] == _UNKNOWN else segment[1] + segment[2]
    if end > len(view):
        return _beyond("segment", at, end, view)
    at, inside = segment[1], False  # inside: within a cluster of unknown size
    steps = iter(range(_MAX_STEPS))
    for _ in steps:
        if at >= end:
            return None
        found = _element(view, at)
        if found is None or not (found[0] in _LEVEL_1 or (inside and found[0] in _IN_CLUSTER)):
            return None if segment[2] == _UNKNOWN and _is_fill(view, at) else f"no element at byte {at}"
        name, body, size = found
        if name in _LEVEL_1 and name not in (0xEC, 0xBF):
            inside = name == _CLUSTER and size == _UNKNOWN
        if size == _UNKNOWN:
            if not inside:
                return f"element {name:X} of unknown size at byte {at}"
            at = body
            continue
        if body + size > end:
            what = "cluster" if name == _CLUSTER else f"element {name:X}"
            return _beyond(what, at, body + size, view) if end == len(view) else f"{what} at byte {at} is too long"
        if name == _CLUSTER:
            lost = _cluster(view, body, body + size, steps)
            if lost is not None:
                return lost
        at = body + size
    return f"more than {_MAX_STEPS} elements"


def _cluster(view: memoryview, at: int, end: int, steps: Iterator[int]) -> str | None:
    for _ in steps:
        if at >= end:
            return None
        found = _element(view, at)
        if found is None or found[0] not in _IN_CLUSTER or found[2] == _UNKNOWN:
            return f"no element at byte {at}, within a cluster"
        if found[1] + found[2] > end:
            return f"element at byte {at} ends after its cluster"
        at = found[1] + found[2]
    return f"more than {_MAX_STEPS} elements"


# --- RIFF -------------------------------------------------------------------------------------------------------------


def _avi(view: memoryview) -> str | None:
    """Lists and chunks that end after the file, and bytes between chunks that are none."""
    at = 0
    lists: list[int] = []  # ends of the lists around a position
    for _ in range(_MAX_STEPS):
        while lists and at >= lists[-1] - 1:
            at = max(at, lists.pop())
        if at + 8 > len(view):
            return None
        kind, size = bytes(view[at : at + 4]), _U32_LE.unpack_from(view, at + 4)[0]
        if not lists and kind != b"RIFF":
            return None  # what follows the last RIFF is not part of the video
        if not all(0x20 <= byte < 0x7F for byte in kind):
            return f"no chunk at byte {at}"
        stop = at + 8 + size
        is_list = kind in (b"RIFF", b"LIST")
        if stop > len(view):
            # A recorder that was stopped leaves sizes of 0 or the largest there is: its chunks are judged alone.
            if not is_list or size < 0x7FFFFFFF:
                name = kind.decode() if not is_list else f"{kind.decode()} {_printable(view[at + 8 : at + 12])}"
                return _beyond(f"chunk {name}", at, stop, view)
            stop = len(view)
        if lists and stop > lists[-1] + 1:
            return f"chunk {kind.decode()} at byte {at} ends after its list"
        if is_list and bytes(view[at + 8 : at + 12]) in (b"AVI ", b"AVIX", b"movi", b"rec "):
            lists.append(stop)
            at += 12
        else:
            at = stop + (size & 1)
    return f"more than {_MAX_STEPS} chunks"


def _printable(piece: memoryview) -> str:
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else "?" for byte in piece)


# --- Flash ------------------------------------------------------------------------------------------------------------


def _flv(view: memoryview) -> str | None:
    """A last tag without its end, and bytes between tags that are none."""
    if len(view) < 13:
        return "no first tag"
    at = _U32.unpack_from(view, 5)[0] + 4
    for _ in range(_MAX_STEPS):
        if at == len(view) or (at < len(view) and _is_fill(view, at)):
            return None
        if at + 11 > len(view):
            return f"tag at byte {at} is truncated"
        kind, size = view[at] & 0x1F, int.from_bytes(view[at + 1 : at + 4])
        if kind not in (8, 9, 18) or view[at] & 0xC0 or any(view[at + 8 : at + 11]):
            return f"no tag at byte {at}"
        if at + 11 + size > len(view):
            return _beyond("tag", at, at + 11 + size, view)
        at += 11 + size
        if at + 4 > len(view):
            return None if at == len(view) else f"tag that ends at byte {at} has no size after it"
        at += 4
    return f"more than {_MAX_STEPS} tags"


# --- MPEG -------------------------------------------------------------------------------------------------------------


_STUFFING = re.compile(rb"\x00{1,64}?(?=\x00\x00\x01)")  # zeros that fill a sector, as those with audio of a Video CD


def _mpeg(view: memoryview) -> str | None:
    """Packets that end after the file, and bytes between packets that are none."""
    at = 0
    for _ in range(_MAX_STEPS):
        if stuffing := _STUFFING.match(view, at):
            at = stuffing.end()
        if at + 4 > len(view):
            return None if at == len(view) or not any(view[at:]) else f"packet at byte {at} is truncated"
        code = view[at + 3]
        if bytes(view[at : at + 3]) != b"\0\0\1" or code < 0xB9:
            return None if _is_fill(view, at) else f"no packet at byte {at}"
        if code == 0xB9:
            at += 4
            continue
        if code == 0xBA:
            if at + 14 > len(view):
                return f"pack at byte {at} is truncated"
            at += 14 + (view[at + 13] & 7) if view[at + 4] & 0xC0 == 0x40 else 12
            continue
        if at + 6 > len(view):
            return f"packet at byte {at} is truncated"
        end = at + 6 + _U16.unpack_from(view, at + 4)[0]
        if end > len(view):
            return _beyond("packet", at, end, view)
        at = end
    return f"more than {_MAX_STEPS} packets"


_SYNC, _TS_PACKET = 0x47, 188
_SYNC_RUN = 5  # packets in a row, which chance does not make
_FIRST_PID, _NO_PID = 0x20, 0x1FFF  # of media and tables of a program; of padding


def _mpegts(view: memoryview) -> str | None:
    """A truncated packet, lost synchronization, errors that a receiver marked, and packets that counters miss."""
    packets = _packets_of(view)
    if packets is None:
        return "no packet at byte 0"
    size = packets.strides[0]
    lead, at = size - _TS_PACKET, len(packets) * size
    if at + lead < len(view) and view[at + lead] == _SYNC:
        return f"packet at byte {at} is truncated"
    if at + size <= len(view) and not _is_fill(view, at) and _goes_on(view, at, packets):
        return f"no packet at byte {at}"
    flags, counter = packets[:, 1], packets[:, 3]
    if (flags & 0x80).any():
        return f"packet at byte {int(np.flatnonzero(flags & 0x80)[0]) * size} is marked as damaged"
    pids = (flags.astype(np.int32) & 0x1F) << 8 | packets[:, 2]
    # A packet with a discontinuity flag, in its adaptation field, begins a new count.
    starts_anew = (counter & 0x20 != 0) & (packets[:, 4] > 0) & (packets[:, 5] & 0x80 != 0)
    begins = flags & 0x40 != 0  # the content of a packet begins something
    tables = np.cumsum((pids == 0) & begins)
    # The packets with content of each stream, in their order, found in one pass: a hostile file has thousands.
    counted = np.flatnonzero((counter & 0x10 != 0) & (pids >= _FIRST_PID) & (pids < _NO_PID))
    counted = counted[np.argsort(pids[counted], kind="stable")]
    for rows in np.split(counted, np.flatnonzero(np.diff(pids[counted])) + 1) if len(counted) else ():
        steps = np.diff(counter[rows] & 15) & 15
        # A packet may be sent twice, and then has one number. Where another stream was joined, after a table of its
        # programs, a number may follow any other.
        joined = begins[rows[1:]] & (np.diff(tables[rows]) > 0)
        missing = np.flatnonzero((steps > 1) & ~starts_anew[rows[1:]] & ~joined)
        if len(missing):
            return f"packets of stream {pids[rows[0]]} are missing before byte {int(rows[missing[0] + 1]) * size}"
    return None


def _packets_of(view: memoryview) -> npt.NDArray[np.uint8] | None:
    """(n, 188) uint8, the packets before the first place without one; None if there is none at the start."""
    data = np.frombuffer(view, dtype=np.uint8)
    lead = next((lead for lead in (0, 4) if len(data) > lead + _TS_PACKET and data[lead] == _SYNC), None)
    if lead is None:
        return None
    size = _TS_PACKET + lead  # with a time before each packet on Blu-ray discs
    count = len(data) // size
    packets = data[: count * size].reshape(count, size)[:, lead:]
    lost = np.flatnonzero(packets[:, 0] != _SYNC)
    return packets[: lost[0]] if len(lost) else packets


def _goes_on(view: memoryview, at: int, packets: npt.NDArray[np.uint8]) -> bool:
    """Whether packets follow a place without one: in step, of a stream that was there before, or out of step."""
    size = packets.strides[0]
    rest, lead = np.frombuffer(view, dtype=np.uint8)[at:], size - _TS_PACKET
    high, low, flags = rest[lead + 1 : lead + 4].tolist()  # of a packet that has lost its first byte alone
    has_content = flags & 0x30 != 0  # zeros have none
    is_known = has_content and bool(((packets[:, 1] & 0x1F == high & 0x1F) & (packets[:, 2] == low)).any())
    starts = np.flatnonzero(rest[: max(len(rest) - (_SYNC_RUN - 1) * size, 0)] == _SYNC)
    runs = [rest[starts + step * size] == _SYNC for step in range(1, _SYNC_RUN)]
    in_step = rest[size + lead : _SYNC_RUN * size : size] == _SYNC
    return is_known or bool(in_step.any()) or bool(np.logical_and.reduce(runs).any())


# --- Ogg --------------------------------------------------------------------------------------------------------------

_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_FIRST_PAGE, _LAST_PAGE = 2, 4  # flags


def _ogg(view: memoryview) -> str | None:
    """Bytes between pages that are none, pages with a wrong checksum or after a gap, and packets without their end.

    A stream needs no last page: recorders of live streams write none. Its last packet is whole then.
    """
    at = 0
    numbers: dict[int, int] = {}
    open_streams: set[int] = set()
    open_packets: set[int] = set()  # streams whose latest packet continues on their next page
    for _ in range(_MAX_STEPS):
        if at == len(view) or _is_fill(view, at):
            left = len(open_packets)
            return f"{left} of {len(numbers)} streams end within a packet" if left else None
        if bytes(view[at : at + 4]) != b"OggS":
            # After the last page of every stream, other bytes are not part of the file.
            return f"no page at byte {at}" if open_streams or not numbers or b"OggS" in bytes(view[at:]) else None
        if at + 27 > len(view) or at + 27 + view[at + 26] > len(view):
            return f"page at byte {at} is truncated"
        body = at + 27 + view[at + 26]
        end = body + sum(view[at + 27 : body])
        if end > len(view):
            return _beyond("page", at, end, view)
        if _ogg_checksum(view[at:end]) != _U32_LE.unpack_from(view, at + 22)[0]:
            return f"page at byte {at} has a wrong checksum"
        serial, number = _U32_LE.unpack_from(view, at + 14)[0], _U32_LE.unpack_from(view, at + 18)[0]
        if serial in numbers and number > numbers[serial] + 1 and serial in open_streams:
            return f"pages of stream {serial} are missing before byte {at}"
        numbers[serial] = number
        if view[at + 5] & _LAST_PAGE:
            open_streams.discard(serial)
        else:
            open_streams.add(serial)
        if body > at + 27:
            continues = view[body - 1] == 255  # bytes of the last segment: a packet ends with a shorter one
            (open_packets.add if continues else open_packets.discard)(serial)
        at = end
    return f"more than {_MAX_STEPS} pages"


def ogg_links(view: memoryview) -> list[memoryview]:
    """The recordings that follow each other in an Ogg, which is a chain then (RFC 3533); of most files the whole."""
    starts, at, is_begun = [0], 0, True
    while at + 27 <= len(view) and bytes(view[at : at + 4]) == b"OggS":
        begins = bool(view[at + 5] & _FIRST_PAGE)
        if begins and not is_begun:
            starts.append(at)
        is_begun = begins
        body = at + 27 + view[at + 26]
        at = body + sum(view[at + 27 : body])
    return [view[start:stop] for start, stop in zip(starts, [*starts[1:], len(view)], strict=True)]


def _ogg_checksum(page: memoryview) -> int:
    """CRC-32 with the bits of every byte in the other order than zlib's, and without its inversions."""
    body = (bytes(page[:22]) + bytes(4) + bytes(page[26:])).translate(_REVERSED)
    return int(f"{zlib.crc32(body, 0xFFFFFFFF) ^ 0xFFFFFFFF:032b}"[::-1], 2)


# --- ASF --------------------------------------------------------------------------------------------------------------

_ASF_HEADER = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
_ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
_ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")


def _asf(view: memoryview) -> str | None:
    """Fewer packets than the header counts, and packets that do not begin like one."""
    if len(view) < 30 or bytes(view[:16]) != _ASF_HEADER:
        return "no header"
    at = _U64_LE.unpack_from(view, 16)[0]
    properties = bytes(view[: min(at, len(view))]).find(_ASF_FILE)
    if at + 50 > len(view) or bytes(view[at : at + 16]) != _ASF_DATA:
        return f"no packets at byte {min(at, len(view))}"
    if properties < 0 or properties + 104 > len(view):
        return "no properties of the file"
    is_live = view[properties + 88] & 1
    size = _U32_LE.unpack_from(view, properties + 92)[0]
    count = _U64_LE.unpack_from(view, at + 40)[0]
    first = at + 50
    if size < 16:
        return f"packets of {size} bytes"
    there = (len(view) - first) // size
    if not is_live and count > there:
        return f"{there} of {count} packets"
    packets = min(count, there) if not is_live or count else there
    heads = np.frombuffer(view[first : first + packets * size], dtype=np.uint8).reshape(packets, size)[:, :3]
    if packets and (heads[0] == (0x82, 0, 0)).all():  # error correction data without content, as all writers have it
        lost = np.flatnonzero((heads != (0x82, 0, 0)).any(axis=1))
        if len(lost):
            return f"no packet at byte {first + int(lost[0]) * size}"
    return None


_WALKS: dict[str, Callable[[memoryview], str | None]] = {
    "mov": _mov,
    "matroska": _matroska,
    "avi": _avi,
    "flv": _flv,
    "mpeg": _mpeg,
    "mpegts": _mpegts,
    "ogg": _ogg,
    "asf": _asf,
}
