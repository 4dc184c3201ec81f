"""Clips of many containers and codecs, whole and damaged: what decodes is FFmpeg's own output, all else is refused."""

import functools
import io
import re
import struct
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from mm_assets.errors import ConfigError, CorruptError, EncodeError, FormatError, LimitError
from mm_assets.fields import SyncedVideoAudioField
from mm_assets.fields.image_decode import orient
from mm_assets.media.video import probe_video

from .clip_variants import NUM_FRAMES, SIZE, VARIANTS, damages, make_clip
from .clips import clip_file, ramp, with_ogg_checksums

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
    angle = frames[0].rotation  # counterclockwise
    return np.stack([np.rot90(pixels, angle // 90) for pixels in converted])


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
    with pytest.raises(LimitError, match=r"decode_frames and target_frames give fewer of them \(max_decoded_bytes\)"):
        field.decode(*payload)
    with pytest.raises(LimitError, match="max_decoded_bytes"):
        SyncedVideoAudioField(max_decoded_bytes=SIZE[0] * SIZE[1] * 3 - 1).check_decodable(*payload)


THEORA = Path(__file__).with_name("empty_packets.ogv")  # made by FFmpeg: 36 x 26, 10 frames, most of them empty packets


def test_theora_with_empty_packets_decodes():
    """A size that is not a multiple of 16 and empty packets, which repeat the frame before, decode as by FFmpeg."""
    data = THEORA.read_bytes()
    with av.open(io.BytesIO(data)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        shown = [(frame.pts, frame.to_ndarray(format="rgb24")) for packet in packets for frame in packet.decode()]
    clip = KEEP.decode(*KEEP.encode(data))
    assert clip.frames.shape == (10, 26, 36, 3)
    assert [pts for pts, _ in shown] == [0, 4, 6]
    for number, frame in enumerate(clip.frames):
        assert np.array_equal(frame, [pixels for pts, pixels in shown if pts <= number][-1]), number
    KEEP.check_decodable(*KEEP.encode(data))


def moved_picture(data: bytes, left: int) -> bytes:
    """A Theora file whose header shows fewer columns, from `left` on."""
    found, at = bytearray(data), data.index(b"\x80theora")
    width = int.from_bytes(found[at + 14 : at + 17]) - left
    found[at + 14 : at + 17], found[at + 20] = width.to_bytes(3), left
    return with_ogg_checksums(bytes(found))


@pytest.mark.parametrize("left", [1, 2, 9, 10])
def test_theora_with_a_picture_offset_decodes(left):
    """The picture may begin at any column of the coded frame: what decodes are the columns from there on."""
    whole, data = THEORA.read_bytes(), moved_picture(THEORA.read_bytes(), left)
    clip = KEEP.decode(*KEEP.encode(data))
    KEEP.check_decodable(*KEEP.encode(data))
    assert clip.frames.shape == (10, 26, 36 - left, 3)
    expected = KEEP.decode(*KEEP.encode(whole)).frames[:, :, left:]
    assert left % 2 or np.array_equal(clip.frames[:, :, 2:-2], expected[:, :, 2:-2])  # else colors are between others
    stored = SyncedVideoAudioField(encoding="frames")
    assert stored.decode(*stored.encode(data)).frames.shape == clip.frames.shape


@pytest.mark.parametrize("name", ["ogv", "ts-mpeg2"])
@pytest.mark.parametrize("tail", [b"TAG" + bytes(125), b"\xa5" * 90_000])
def test_bytes_after_the_end_are_no_damage(name, tail):
    """A clip with other bytes after its last page or packet decodes to the frames and samples that it has without."""
    data = THEORA.read_bytes() if name == "ogv" else clip(name)
    KEEP.check_decodable(*KEEP.encode(data + tail))
    found, expected = (KEEP.decode(*KEEP.encode(file)) for file in (data + tail, data))
    assert np.array_equal(found.frames, expected.frames)
    assert found.audio == expected.audio


def test_a_recording_that_begins_anywhere_has_what_decodes():
    """A transport stream whose first packets lack their keyframe has the frames from the first keyframe on."""
    data = clip("ts-mpeg2")
    with av.open(io.BytesIO(data)) as container:
        second = [packet.pos for packet in container.demux(video=0) if packet.size][1]
    found = verdict(data[:376] + data[second // 188 * 188 :])
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, verdict(data)[NUM_FRAMES - len(found) :])
    assert len(found) == NUM_FRAMES // 2


def test_transport_streams_may_be_joined():
    """Streams one after the other, each with its own counters, are a clip where times go on, and refused where not."""
    with pytest.raises(EncodeError, match="found 20 frames with 10 times, expected one for each"):
        KEEP.encode(clip("ts-mpeg2") * 2)


def test_padded_sound_of_earlier_releases_decodes():
    """A record that counts the padding after the last packet too decodes to silence there; one of hours is refused."""
    metadata, data = KEEP.encode(clip("mkv"))
    count = KEEP.timing(metadata).num_audio_samples
    assert count == 19_200
    earlier = bytearray(metadata)
    padded = count + 1320
    earlier[24:32] = padded.to_bytes(8, "little")
    samples = KEEP.decode(bytes(earlier), data).audio.samples
    assert len(samples) == padded
    assert np.array_equal(samples[:count], KEEP.decode(metadata, data).audio.samples)
    assert not samples[count:].any()
    KEEP.check_decodable(bytes(earlier), data)
    earlier[24:32] = (48_000 * 3600).to_bytes(8, "little")
    for read in (KEEP.decode, KEEP.check_decodable):
        with pytest.raises(CorruptError, match="audio is shorter than its record says"):
            read(bytes(earlier), data)


@pytest.mark.parametrize(
    ("container", "codec", "audio_codec"),
    [
        ("mp3", "", "libmp3lame"),
        ("matroska", "mpeg4", "libmp3lame"),
        ("matroska", "mpeg4", "aac"),
        ("flv", "flv", "aac"),
        ("mpegts", "mpeg2video", "aac"),
        ("mp4", "mpeg4", "libmp3lame"),
        ("asf", "mpeg4", "wmav2"),
    ],
)
def test_the_audio_of_a_clip_ends_where_its_decoder_does(container, codec, audio_codec):
    """A clip has all samples that decode and no padding, also where the container rounds times to milliseconds."""
    data = clip_file(
        container=container, codec=codec, samples=ramp(30_000, 2), sample_rate=44_100, audio_codec=audio_codec
    )
    with av.open(io.BytesIO(data)) as file:
        decoded = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)
    samples = KEEP.decode(*KEEP.encode(data)).audio.samples
    np.testing.assert_array_equal(samples, decoded.T.clip(-1, 1))


@pytest.mark.parametrize("channels", [7, 8])
def test_named_channels_of_a_quicktime_file_are_read_once(channels):
    """A MOV that lists its channels, as its sound of 6.1 and 7.1 does, decodes exactly and harms no memory."""
    samples = ramp(3000, channels)
    data = clip_file(container="mov", codec="mpeg4", samples=samples, sample_rate=48_000)
    for _ in range(3):  # a second free of the list ends the process
        assert probe_video(data).channels == channels
        encoded = KEEP.encode(data)
        KEEP.check_decodable(*encoded)
        np.testing.assert_array_equal(KEEP.decode(*encoded).audio.samples * 32768, samples)


@pytest.mark.parametrize("tag", [b"", b"TAG" + bytes(125)])
@pytest.mark.parametrize("xing", ["0", "1"])
def test_tags_after_an_mp3_are_no_part_of_a_clip(tag, xing):
    """A clip of an MP3 with an APE tag, and a tag after that, has the samples that it has without them."""
    data = clip_file(
        container="mp3",
        codec="",
        samples=ramp(9000),
        sample_rate=44_100,
        audio_codec="libmp3lame",
        options={"write_xing": xing},
    )
    item = struct.pack("<II", 3, 0) + b"Title\0abc"
    ape = item + b"APETAGEX" + struct.pack("<IIII", 2000, len(item) + 32, 1, 0) + bytes(8)
    found, expected = (KEEP.decode(*KEEP.encode(file)).audio for file in (data + ape + tag, data))
    assert found == expected


@pytest.mark.parametrize("settings", [{}, {"encoding": "frames"}, {"audio_sample_rate": 8000, "audio_channels": 1}])
def test_the_check_of_a_clips_audio_holds_little_of_it(settings):
    """Audio is checked packet by packet: the memory does not grow with its duration, as that of decoding does."""
    data = clip_file(container="matroska", num_frames=2, samples=ramp(1_000_000, 2), sample_rate=48_000)
    payload = SyncedVideoAudioField(**{name: value for name, value in settings.items() if name == "encoding"}).encode(
        data
    )
    field = SyncedVideoAudioField(**settings)
    peaks = []
    for judge in (field.check_decodable, field.decode):
        tracemalloc.start()
        judge(*payload)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 2_500_000 < 8_000_000 < peaks[1]


def variant_with_matrix(*values: int) -> bytes:
    """The rotated clip with another display matrix in its header."""
    data = clip("mp4-rotated")
    known = struct.pack(">9i", 0, -65536, 0, 65536, 0, 0, 0, 0, 1 << 30)
    a, b, c, d = values
    assert data.count(known) == 1
    return data.replace(known, struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30))


@pytest.mark.parametrize(
    ("matrix", "orientation"),
    [
        ((1, 0, 0, 1), 1),
        ((-1, 0, 0, 1), 2),
        ((-1, 0, 0, -1), 3),
        ((1, 0, 0, -1), 4),
        ((0, 1, 1, 0), 5),
        ((0, 1, -1, 0), 6),
        ((0, -1, -1, 0), 7),
        ((0, -1, 1, 0), 8),
        ((0, 0, 0, 0), 1),
    ],
)
def test_rotation_tags_turn_frames(matrix, orientation):
    """Each display matrix turns the frames as EXIF numbers it; with `keep` they are as stored."""
    data = variant_with_matrix(*matrix)
    stored = SyncedVideoAudioField(orientation="keep")
    as_stored = stored.decode(*stored.encode(data))
    payload = KEEP.encode(data)
    turned = KEEP.decode(*payload)
    assert turned.picture.orientation == as_stored.picture.orientation == orientation
    assert payload[0][78] == (0 if orientation == 1 else orientation)
    expected = np.stack([np.asarray(orient(pixels, orientation)) for pixels in as_stored.frames])
    assert np.array_equal(turned.frames, expected)
    assert np.array_equal(stored.decode(*payload).frames, expected)
    assert np.array_equal(KEEP.decode_frames(*payload, [3, 1]), expected[[3, 1]])
    KEEP.check_decodable(*payload)


def test_frames_as_jpegs_are_upright():
    """A rotated clip that is stored as JPEGs has them upright, and its record says nothing of rotation."""
    field = SyncedVideoAudioField(encoding="frames")
    payload = field.encode(clip("mp4-rotated"))
    upright = KEEP.decode(*KEEP.encode(clip("mp4-rotated"))).frames
    assert payload[0][78] == 0
    assert np.abs(field.decode(*payload).frames.astype(int) - upright).mean() < 12
    assert upright.shape[1:3] == SIZE[::-1]


@pytest.mark.parametrize("encoding", ["keep", "frames"])
def test_pixels_become_square_where_asked(encoding):
    """With `pixel_aspect: apply` frames are stretched by their pixels' aspect; FFmpeg's command line and we do not."""
    square = SyncedVideoAudioField(encoding=encoding, pixel_aspect="apply")
    payload = square.encode(clip("mp4-aspect"))
    decoded = square.decode(*payload)
    assert decoded.frames.shape == (NUM_FRAMES, 48, 85, 3)
    plain = KEEP.decode(*KEEP.encode(clip("mp4-aspect")))
    assert plain.frames.shape == (NUM_FRAMES, *SIZE, 3)
    assert plain.picture.pixel_aspect == Fraction(4, 3)
    square.check_decodable(*payload)
    if encoding == "keep":
        assert payload[0][78] == 128
        damaged = bytearray(payload[0])
        damaged[8] = 86  # width
        with pytest.raises(FormatError, match="video is not as its record says"):
            square.decode(bytes(damaged), payload[1])


def test_a_clip_says_what_its_picture_is():
    """`Clip.picture` has interlaced frames, more than 8 bits and a high dynamic range."""
    interlaced = KEEP.decode(*KEEP.encode(clip("mp4-interlaced"))).picture
    assert (interlaced.is_interlaced, interlaced.bits, interlaced.is_hdr) == (True, 8, False)
    ten = KEEP.decode(*KEEP.encode(clip("mp4-10-bit"))).picture
    assert (ten.is_interlaced, ten.bits, ten.transfer) == (False, 10, "unknown")
    hdr = make_clip(replace(VARIANTS["mp4-10-bit"], transfer=16))
    assert KEEP.decode(*KEEP.encode(hdr)).picture.transfer == "pq"
    assert KEEP.decode(*KEEP.encode(hdr)).picture.is_hdr


def tracks() -> bytes:
    """A clip of three audio tracks: mono in English, stereo in French, and mono in German."""
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as output:
        streams = []
        for language, layout in (("eng", "mono"), ("fra", "stereo"), ("deu", "mono")):
            stream = output.add_stream("pcm_s16le", rate=8000, layout=layout)
            stream.metadata["language"] = language
            stream.disposition = 0
            streams.append(stream)
        for number, stream in enumerate(streams):
            samples = np.full((1, 400 * stream.channels), 1000 * (number + 1), dtype=np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=stream.layout.name)
            frame.sample_rate, frame.pts = 8000, 0
            output.mux([*stream.encode(frame), *stream.encode(None)])
    return target.getvalue()


@pytest.mark.parametrize(
    ("track", "level", "recorded"), [(None, 2, 2), (0, 1, 0), (1, 2, 2), (2, 3, 3), ("eng", 1, 0), ("deu", 3, 3)]
)
def test_an_audio_track_is_chosen(track, level, recorded):
    """A track is chosen by number or language, else as FFmpeg does; the record says which, whatever reads it."""
    metadata, data = SyncedVideoAudioField(audio_track=track).encode(tracks())
    assert metadata[79] == recorded
    assert round(float(KEEP.decode(metadata, data).audio.samples.max()) * 32768) == 1000 * level


@pytest.mark.parametrize("track", [3, "ita"])
def test_a_missing_track_is_refused(track):
    """A track that a file does not have is refused with those that it has."""
    with pytest.raises(EncodeError, match=re.escape("audio tracks 0 (eng), 1 (fra), 2 (deu), expected")):
        SyncedVideoAudioField(audio_track=track).encode(tracks())
    with pytest.raises(ConfigError, match="audio_track"):
        SyncedVideoAudioField(audio_track=-1)


def test_payloads_of_earlier_releases_open():
    """A record with zeros where the orientation and the track are now decodes as it did: as stored, the first track."""
    field = SyncedVideoAudioField(orientation="keep", audio_track=0)
    metadata, data = field.encode(clip("mp4-rotated"))
    assert metadata[78:] == bytes(2)
    assert KEEP.decode(metadata, data).frames.shape == (NUM_FRAMES, *SIZE, 3)
    for position, value in ((78, 9), (79, 64)):
        damaged = bytearray(metadata)
        damaged[position] = value
        with pytest.raises(FormatError):
            KEEP.check_decodable(bytes(damaged), data)
