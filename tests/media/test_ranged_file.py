"""Large files that are read by ranges: blocks, limits, and the boxes of an MP4 without its media."""

import struct

import pytest

from mm_assets.errors import MediaError
from mm_assets.media import ranged_file
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.video import probe_video

from ..fields.clips import clip_file


def over(data: bytes, reads: list[int], **limits: float) -> RangedFile:
    def read(offset: int, size: int) -> bytes:
        reads.append(size)
        return data[offset : offset + size]

    return RangedFile(len(data), read, **limits)


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def test_near_ranges_are_one_read() -> None:
    """What follows in a block is not read again, and a range beyond the end is shorter."""
    reads: list[int] = []
    file = over(bytes(range(256)) * 1000, reads)
    assert (file.bytes_at(0, 4), file.bytes_at(4, 2)) == (b"\0\1\2\3", b"\4\5")
    assert reads == [1 << 16]
    assert file.bytes_at(255_998, 10) == b"\xfe\xff"


def test_beyond_its_limits_a_file_ends() -> None:
    """A range is refused, and a demuxer finds the end of the file."""
    for limits in ({"max_bytes": 1 << 16}, {"seconds": -1.0}):
        file = over(bytes(1 << 20), [], **limits)
        if "max_bytes" in limits:
            assert file.read(10) == bytes(10)
            file.seek(1 << 19)
        assert file.read(10) == b""
        assert file.is_over
        with pytest.raises(MediaError, match="too many bytes or too long"):
            file.bytes_at(1 << 18, 1)


def test_the_boxes_of_a_film_are_there_without_its_media() -> None:
    """Boxes keep their place, what is in `mdat` is zero, and of it only the head is read."""
    media = bytes([7]) * (1 << 20)
    before, after = box(b"ftyp", b"isom"), box(b"moov", b"the header")
    data = before + box(b"mdat", media) + after
    reads: list[int] = []
    view = over(data, reads).boxes()
    start = len(before) + 16
    assert bytes(view[:start]) == data[:start]
    assert bytes(view[start : -len(after)]) == bytes(len(media) - 8)
    assert bytes(view[-len(after) :]) == after
    assert sum(reads) < 1 << 18


def test_a_film_with_too_large_a_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes beside the media have a limit, their number has one, and so has the file."""
    monkeypatch.setattr(ranged_file, "MAX_HEADER", 100)
    with pytest.raises(MediaError, match="bytes beside its media"):
        over(box(b"moov", bytes(200)), []).boxes()
    monkeypatch.setattr(ranged_file, "_MAX_BOXES", 10)
    with pytest.raises(MediaError, match="more than 10 boxes"):
        over(box(b"mdat", b"") * 20, []).boxes()
    with pytest.raises(MediaError, match="at most"):
        RangedFile(1 << 40, lambda at, size: bytes(size)).boxes()


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx")])
def test_a_film_is_probed_alike(container: str, codec: str) -> None:
    """The header by ranges says what the header of the whole file does."""
    film = clip_file(container=container, codec=codec, num_frames=30)
    assert probe_video(over(film, [])) == probe_video(film)


def test_a_container_without_a_way_to_seek_is_refused() -> None:
    """Of a type that would be read whole nothing is."""
    film = clip_file(container="mpegts", codec="mpeg4", num_frames=10)
    with pytest.raises(MediaError, match="not read in parts"):
        probe_video(over(film, []))
