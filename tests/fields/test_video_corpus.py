"""Clips of many containers and codecs, whole and damaged: what decodes is FFmpeg's own output, all else is refused."""

import functools
import io
import re
from fractions import Fraction

import av
import numpy as np
import pytest

from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields import SyncedVideoAudioField

from .clip_variants import NUM_FRAMES, SIZE, VARIANTS, damages, make_clip

TICK = Fraction(1, 1000)
KEEP = SyncedVideoAudioField()
REASONS = re.compile(
    r"found \d+( of (about )?\d+)? frames|found a damaged file|found bytes of no known container|file cannot be read"
    r"|found a video stream without frames|found a table|found \d+ samples|found frames of|found time"
    r"|found neither a video nor an audio stream|found audio of|video is not as its record says"
)


@functools.cache
def clip(name: str) -> bytes:
    return make_clip(VARIANTS[name])


def reference(data: bytes) -> np.ndarray:
    """(T, H, W, 3) uint8, all frames as FFmpeg's filters convert them, in the order of their times."""
    with av.open(io.BytesIO(data)) as container:
        frames = sorted((f for f in container.decode(video=0) if f.pts is not None), key=lambda frame: frame.pts)
    graph = av.filter.Graph()
    source = graph.add_buffer(width=SIZE[1], height=SIZE[0], format=frames[0].format, time_base=TICK)
    graph.link_nodes(source, graph.add("format", pix_fmts="rgb24"), graph.add("buffersink")).configure()
    converted = []
    for frame in frames:
        graph.push(frame)
        converted.append(graph.vpull().to_ndarray())
    return np.stack(converted)


def verdict(data: bytes) -> np.ndarray | str:
    """The frames that a clip decodes to, or why it is refused; the check of decodability agrees with decoding."""
    try:
        payload = KEEP.encode(data)
    except EncodeError as error:
        return str(error)
    try:
        KEEP.check_decodable(*payload)
    except FormatError as error:
        with pytest.raises(FormatError):
            KEEP.decode(*payload)
        return str(error)
    return KEEP.decode(*payload).frames


@pytest.mark.parametrize("name", VARIANTS)
def test_whole_clips_decode_as_the_library_decodes_them(name):
    """Every container and codec gives all its frames, bit for bit."""
    frames = verdict(clip(name))
    assert isinstance(frames, np.ndarray), frames
    assert len(frames) == NUM_FRAMES
    expected = reference(clip(name))
    assert np.array_equal(frames, expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_damaged_clips_are_refused_or_decode_alike(name):
    """Truncated and zeroed clips are refused with a reason; what decodes is what the library makes of the bytes."""
    for damage, data in damages(clip(name)).items():
        found = verdict(data)
        if isinstance(found, str):
            assert REASONS.search(found), (damage, found)
            continue
        assert damage in ("flipped", "trailing"), damage
        assert np.array_equal(found, reference(data)), damage


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mp4-moov-first", "MP4: found 6 of 10 frames (box mdat at byte "),
        ("mkv", "Matroska: found 6 of about 10 frames (segment at byte "),
        ("avi-mjpeg", "AVI: found 5 of 10 frames (chunk RIFF AVI "),
        ("flv", "FLV: found 1 of about 10 frames (tag at byte "),
        ("ts-mpeg2", "MPEG-TS: found 5 frames (packet at byte "),
    ],
)
def test_damage_says_how_much_is_there(name, found):
    """A truncated clip is refused with the number of frames that are left, and of those that were promised."""
    message = verdict(damages(clip(name))["truncated at 65 %"])
    assert found in message


def test_a_clip_over_the_limit_is_not_damaged():
    """A clip that decodes to more than the limit decodes by chosen frames, and is decodable; a frame over it is not."""
    payload = KEEP.encode(clip("3gp"))
    field = SyncedVideoAudioField(max_decoded_bytes=5 * SIZE[0] * SIZE[1] * 3)
    field.check_decodable(*payload)
    assert len(field.decode_frames(*payload, [0, 9])) == 2
    with pytest.raises(FormatError, match=r"max_decoded_bytes\); decode_frames gives fewer"):
        field.decode(*payload)
    with pytest.raises(FormatError, match="max_decoded_bytes"):
        SyncedVideoAudioField(max_decoded_bytes=SIZE[0] * SIZE[1] * 3 - 1).check_decodable(*payload)
