"""Containers whose bytes do not keep what they promise, and unusual ones that do."""

import io
import struct

import av
import numpy as np
import pytest

from mm_assets.media import container_damage
from mm_assets.media.container_damage import find_damage


def ts_packets(*numbers: int, pid: int = 256) -> bytes:
    """Transport stream packets with these counters."""
    heads = (bytes([0x47, pid >> 8, pid & 255, 0x10 | number]) for number in numbers)
    return b"".join(head + b"\xff" * 184 for head in heads)


def ogg(layout: str, **options: str) -> bytes:
    """An Ogg file of a second of FLAC, in pages of 100 ms, where a packet does not take more."""
    target = io.BytesIO()
    with av.open(target, "w", format="ogg", options={"page_duration": "100000"}) as output:
        stream = output.add_stream("flac", rate=8000, layout=layout, options=options)
        noise = np.random.default_rng(1).integers(-9000, 9000, (1, 8000 * stream.channels)).astype(np.int16)
        for at in range(0, 8000, 400):
            part = noise[:, at * stream.channels : (at + 400) * stream.channels]
            frame = av.AudioFrame.from_ndarray(part, format="s16", layout=layout)
            frame.sample_rate, frame.pts = 8000, at
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return target.getvalue()


OGG, WIDE_OGG = ogg("mono"), ogg("7.1", frame_size="8000")
SECOND = OGG.index(b"OggS", OGG.index(b"OggS", 1) + 1)


SEGMENT = b"\x1aE\xdf\xa3\x80\x18\x53\x80\x67\x01" + b"\xff" * 7


@pytest.mark.parametrize(
    ("demuxer", "data", "found"),
    [
        ("mpegts", ts_packets(0, 1, 1, 2, 3), None),
        ("mpegts", ts_packets(14, 15, 0) + bytes(1000), None),
        ("mpegts", ts_packets(0, 1, 3), "packets of stream 256 are missing before byte 376"),
        ("mpegts", ts_packets(0, 9, pid=0x1FFF), None),
        ("mpegts", ts_packets(0, 1)[:-1], "packet at byte 188 is truncated"),
        ("mpegts", ts_packets(0, 1) + bytes(5000), None),
        ("mpegts", ts_packets(0, 1) + b"ID3 or any other bytes" * 40, None),
        ("mpegts", ts_packets(0, 1) + b"short", None),
        ("mpegts", ts_packets(0, 1) + bytes(1) + ts_packets(2)[1:], "no packet at byte 376"),
        ("mpegts", ts_packets(0, 1) + bytes(190) + ts_packets(*range(2, 8)), "no packet at byte 376"),
        ("mpegts", ts_packets(0, 1) + bytes(188) + ts_packets(3), "no packet at byte 376"),
        ("mpegts", ts_packets(0) + b"\x47\x81\x00\x11" + bytes(184), "packet at byte 188 is marked as damaged"),
        ("ogg", OGG, None),
        ("ogg", OGG[:SECOND] + OGG[OGG.index(b"OggS", SECOND + 1) :], "pages of stream"),
        ("ogg", OGG[: OGG.rindex(b"OggS")], None),
        ("ogg", OGG + b"TAG" + bytes(125), None),
        ("ogg", OGG + b"any other bytes" * 4000, None),
        ("ogg", OGG[:SECOND] + b"other bytes" + OGG[SECOND:], "no page at byte"),
        ("ogg", OGG[: OGG.rindex(b"OggS")] + b"other bytes", "no page at byte"),
        ("ogg", WIDE_OGG, None),
        ("ogg", WIDE_OGG[: WIDE_OGG.rindex(b"OggS")], "1 of 1 streams end within a packet"),
        ("ogg", OGG[:-1], "ends 1 bytes after the file"),
        ("ogg", OGG[:-1] + bytes([OGG[-1] ^ 1]), "has a wrong checksum"),
        ("mov", struct.pack(">I4s", 8, b"ftyp"), "no box moov"),
        ("mov", struct.pack(">I4sI4s", 8, b"moov", 0, b"mdat"), None),
        ("mov", struct.pack(">I4sI4s", 8, b"moov", 9, b"mdat"), "box mdat at byte 8 ends 1 bytes after the file"),
        ("mov", struct.pack(">I4s", 8, b"moov") + b"anything after it", None),
        ("mov", struct.pack(">I4sI4sI4s", 8, b"ftyp", 8, b"pdin", 8, b"moov"), None),
        ("mov", struct.pack(">I4sI4sI4s", 8, b"ftyp", 99, b"pdin", 8, b"moov"), "no box moov before byte 8"),
        ("mpeg", b"\0\0\1\xbe\0\2ab" + bytes(20) + b"\0\0\1\xb9", None),
        ("mpeg", b"\0\0\1\xbe\0\2ab" + bytes(5000) + b"\0\0\1\xb9", "no packet at byte 8"),
        ("matroska", SEGMENT + b"\x1f\x43\xb6\x75\x85\xe7\x81\0\xec\x80", None),
        ("matroska", SEGMENT + b"\x1f\x43\xb6\x75\x85\xe7\x81\0\xec\x81", "ends after its cluster"),
        ("avi", b"RIFF" + struct.pack("<I4s", 4, b"AVI ") + b"anything after it", None),
        ("avi", b"RIFF" + struct.pack("<I4s", 0x7FFFFFFF, b"AVI ") + b"JUNK" + struct.pack("<I", 0), None),
        ("avi", b"RIFF" + struct.pack("<I4s", 99, b"AVI "), "chunk RIFF AVI  at byte 0 ends 95 bytes after the file"),
        ("flv", b"FLV\x01\x01" + struct.pack(">II", 9, 0), None),
        ("flv", b"FLV\x01\x01" + struct.pack(">II", 9, 0) + b"\x07" + bytes(5000), "no tag at byte 13"),
        ("asf", b"\x30\x26\xb2\x75", "no header"),
        ("wav", b"RIFF", None),
    ],
)
def test_containers_are_held_to_their_promises(demuxer, data, found):
    """A container that is shorter than it says, or has bytes that belong to nothing, is damaged, and no other is."""
    damage = find_damage(memoryview(data), demuxer)
    assert (damage is None) if found is None else (damage is not None and found in damage), damage


def test_the_steps_of_a_walk_are_limited(monkeypatch):
    """Elements in clusters and beside them count together, so that a hostile file takes no more time than another."""
    monkeypatch.setattr(container_damage, "_MAX_STEPS", 100)
    cluster = b"\x1f\x43\xb6\x75\x88" + b"\xec\x80" * 4
    assert find_damage(memoryview(SEGMENT + cluster * 10), "matroska") is None
    for hostile in (cluster * 20, b"\xec\x80" * 101, b"\x1f\x43\xb6\x75\x40\xca" + b"\xec\x80" * 101):
        assert find_damage(memoryview(SEGMENT + hostile), "matroska") == "more than 100 elements"


@pytest.mark.parametrize("demuxer", ["mov", "matroska", "avi", "flv", "mpeg", "mpegts", "ogg", "asf"])
def test_any_bytes_have_an_answer(demuxer):
    """Short and random bytes after each container's first ones never raise."""
    heads = {
        "matroska": b"\x1aE\xdf\xa3\x80\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff",
        "avi": b"RIFF\xff\xff\0\0AVI ",
    }
    heads |= {"ogg": OGG[:60], "mpeg": b"\0\0\1\xba\x44", "flv": b"FLV\x01\x05\0\0\0\x09\0\0\0\0", "mpegts": b"G" * 400}
    heads["asf"] = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c") + struct.pack("<Q", 30)
    rng = np.random.default_rng(7)
    for size in (*range(40), 400, 4000):
        for head in (b"", heads.get(demuxer, b"")):
            answer = find_damage(memoryview(head + rng.bytes(size)), demuxer)
            assert answer is None or isinstance(answer, str)
