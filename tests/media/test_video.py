import io
import struct
import tarfile
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import MediaError, MissingExtraError
from mm_assets.media.frames import read_frames
from mm_assets.media.sound import index_sound, mix, read_sound, resample, resampled_length
from mm_assets.media.video import index_frames, open_media, probe_video

from ..fields.clips import SIZE, clip_file, number_of, ramp, sound_at
from ..fields.conftest import wav_file

SAMPLES = ramp(3200, 2)
FILE = clip_file(samples=SAMPLES)


def test_a_header_is_read():
    """Size, rate, counts, codecs and length of both streams are what was encoded."""
    info = probe_video(FILE)
    assert info.content_type == "video/mp4"
    assert (info.has_video, info.height, info.width, info.video_codec) == (True, *SIZE, "h264")
    assert (info.frame_rate, info.num_frames) == (Fraction(25), 10)
    assert (info.has_audio, info.sample_rate, info.channels, info.audio_codec) == (True, 16_000, 2, "pcm_s16le")
    assert info.duration_seconds == pytest.approx(0.4)


def test_a_header_without_a_stream():
    """A sound file has no video, a silent clip no sound."""
    sound = probe_video(wav_file(SAMPLES, 8000))
    assert (sound.has_video, sound.width, sound.frame_rate, sound.num_frames) == (False, 0, None, None)
    assert sound.duration_seconds == 0.4
    silent = probe_video(clip_file(container="matroska"))
    assert (silent.has_audio, silent.sample_rate, silent.audio_codec) == (False, 0, None)
    assert silent.duration_seconds == pytest.approx(0.4)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"#EXTM3U\n", b"ffconcat version 1.0\n", FILE[:100], b"%PDF-1.4"])
@pytest.mark.parametrize("function", [probe_video, index_frames, index_sound])
def test_other_bytes_are_refused(function, data):
    """What is not a video file is a MediaError."""
    with pytest.raises(MediaError, match="<video>"):
        function(data)


def test_a_missing_package_is_named(monkeypatch):
    """Without PyAV or soxr the error names the extra."""
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(MissingExtraError, match="video"):
        probe_video(FILE)
    with pytest.raises(MissingExtraError, match="video"):
        resample(np.zeros((10, 1), np.float32), 8000, 16_000)


def boxed(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"stsz", struct.pack(">III", 0, 0, 2**31)),
        (b"stsz", struct.pack(">III", 0, 1, 2**31)),
        (b"stts", struct.pack(">II", 0, 2**30)),
        (b"co64", struct.pack(">II", 0, 2**30)),
        (b"stz2", struct.pack(">III", 0, 4, 2**30)),
        (b"elst", struct.pack(">II", 0, 2**30)),
        (b"elst", struct.pack(">II", 1 << 24, 2**30)),
        (b"keys", struct.pack(">II", 0, 2**27)),
        (b"iinf", struct.pack(">II", 1 << 24, 2**27)),
        (b"iloc", struct.pack(">IHI", 2 << 24, 0, 2**27)),
        (b"tfra", struct.pack(">IIII", 0, 1, 0, 2**30)),
        (b"trun", struct.pack(">II", 0, 80_000_000)),
        (b"trun", struct.pack(">IIII", 0x200, 3, 1, 1)),
        (b"stsd", struct.pack(">II", 0, 1) + struct.pack(">I4s16xI4s", 60, b"twos", 20, b"stsz")),
    ],
)
def test_a_table_without_its_entries_is_refused(kind, body):
    """An MP4 whose sample table counts more than the file holds is refused before a demuxer makes room for it."""
    table = boxed(kind, body)
    for parent in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        table = boxed(parent, table)
    with pytest.raises(MediaError, match=kind.decode()):
        probe_video(boxed(b"ftyp", b"isom\0\0\0\0") + table)


def track(*tables: bytes) -> bytes:
    """An MP4 of one track that has tables, and nothing else."""
    body = b"".join(tables)
    for parent in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        body = boxed(parent, body)
    return boxed(b"ftyp", b"isom\0\0\0\0") + body


SIZES = boxed(b"stsz", struct.pack(">III", 0, 0, 500) + bytes(2000))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (
            track(SIZES, boxed(b"elst", struct.pack(">II", 0, 30) + struct.pack(">III", 9, 0, 65536) * 30)),
            "15000 sample",
        ),
        (
            track(
                boxed(b"stco", bytes(4) + struct.pack(">II", 1, 0)),
                boxed(b"stsc", struct.pack(">5I", 0, 1, 1, 2**31, 1)),
            ),
            "samples in chunks",
        ),
        (
            track(
                boxed(b"stco", struct.pack(">II", 0, 9) + bytes(36)),
                boxed(b"stsc", struct.pack(">8I", 0, 2, 5, 2**20, 1, 1, 1, 1)),
            ),
            "samples in chunks",
        ),
        (track(*[boxed(b"stsz", struct.pack(">III", 0, 1, 100))] * 3), "300 samples"),
        (
            boxed(b"ftyp", b"isom\0\0\0\0") + boxed(b"moov", boxed(b"trak", b"") * 60 + boxed(b"moof", b"") * 40),
            "2400 frag",
        ),
        (track(boxed(b"senc", bytes(8))), "encrypted"),
        (track(boxed(b"cmov", bytes(8))), "compressed header"),
        (track(boxed(b"free", struct.pack(">I4s", 8, b"mvhd") + boxed(b"trun", struct.pack(">II", 0, 9999)))), "trun"),
        (track(boxed(b"meta", bytes(4) + boxed(b"hdlr", b"") + boxed(b"trun", struct.pack(">II", 0, 9999)))), "trun"),
    ],
    ids=["edits", "chunks", "runs out of order", "sizes", "fragments", "encrypted", "compressed", "in free", "in meta"],
)
def test_tables_that_multiply_are_refused(data, found):
    """Tables that are small, and claim much together, are refused before a demuxer sees them."""
    with pytest.raises(MediaError, match=found):
        index_frames(data)


def fragmented() -> bytes:
    return clip_file(samples=SAMPLES, options={"movflags": "frag_keyframe+empty_moov+default_base_moof"})


def test_fragments_are_read():
    """A file of fragments has its frames and samples."""
    index = index_frames(fragmented())[0]
    assert [number_of(pixels) for pixels in read_frames(fragmented(), index, range(10))] == list(range(10))
    assert index_sound(fragmented()).num_samples == len(SAMPLES)


def test_fragments_cannot_claim_samples_that_are_not_there():
    """Track runs without fields for each sample are bounded by the bytes of the file, all of them together."""
    data = bytearray(fragmented())
    runs = [at for at in range(len(data)) if data[at : at + 4] == b"trun"]
    assert len(runs) > 2
    for claimed, found in ((2**27, f"trun of {2**27}"), (len(data) // 2, "samples, expected at most")):
        for at in runs:
            data[at + 4 : at + 12] = struct.pack(">II", 0, claimed)
        for function in (index_frames, index_sound, probe_video):
            with pytest.raises(MediaError, match=found):
                function(data)


def test_an_asf_index_without_its_entries_is_refused():
    """FFmpeg reads an ASF index of billions of entries to the last, past the end of the file."""
    head = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c") + bytes(14)
    index = bytes.fromhex("90080033b1e5cf1189f400a0c90349cb") + bytes(36) + struct.pack("<I", 2**32 - 1)
    with pytest.raises(MediaError, match="index of 4294967295"):
        index_frames(head + index)


def test_tags_are_not_read():
    """An ID3 tag before sound, whose texts may be compressed, is passed over, and the sound is the same."""
    plain = clip_file(
        codec="", container="mp3", samples=ramp(8000), audio_codec="libmp3lame", options={"id3v2_version": "0"}
    )
    text = b"TIT2" + struct.pack(">I", 6) + b"\0\0\0title"
    tagged = b"ID3\3\0\0\0\0\0" + bytes([len(text)]) + text + plain
    with open_media(tagged) as (container, _):
        assert container.metadata.get("title") is None
    np.testing.assert_array_equal(read_sound(tagged, index_sound(tagged)), read_sound(plain, index_sound(plain)))


def test_silence_without_end_is_refused():
    """Between a few packets there may be silence, a thousand times their length, and no more."""
    assert index_sound(sound_at(0, 1_900_000)).num_samples == 1_901_000
    with pytest.raises(MediaError, match="1000 times"):
        index_sound(sound_at(0, 40_000_000))


def test_boxes_without_end_are_refused():
    """A file of countless empty boxes is refused, and a box larger than the file is harmless."""
    with pytest.raises(MediaError, match="boxes"):
        probe_video(boxed(b"ftyp", b"isom\0\0\0\0") + boxed(b"free", b"") * 500_001)
    with pytest.raises(MediaError):
        probe_video(boxed(b"ftyp", b"isom\0\0\0\0") + struct.pack(">I4s", 2**32 - 1, b"moov") + bytes(50))
    with pytest.raises(MediaError):
        probe_video(boxed(b"ftyp", b"isom\0\0\0\0") + struct.pack(">I4sQ", 1, b"moov", 2**63))


def test_a_frame_over_the_limit_is_refused():
    """The limit is on the header's size, and is passed to the decoder too."""
    assert index_frames(FILE, max_pixels=SIZE[0] * SIZE[1])[1:] == SIZE
    with pytest.raises(MediaError):
        index_frames(FILE, max_pixels=SIZE[0] * SIZE[1] - 1)
    index = index_frames(FILE)[0]
    with pytest.raises(MediaError):
        list(read_frames(FILE, index, [0], max_pixels=100))


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "libx264"), ("mp4", "mpeg4"), ("matroska", "ffv1"), ("mpegts", "mpeg2video"), ("avi", "mjpeg")],
)
def test_the_error_of_a_large_frame_names_the_setting(container, codec):
    """A decoder that refuses frames for their size leaves none; the error is of the limit all the same."""
    data = clip_file(container=container, codec=codec)
    with pytest.raises(MediaError, match=r"16 x 32, expected at most 100 pixels \(max_pixels\)") as raised:
        index_frames(data, max_pixels=100)
    assert raised.value.setting == "max_pixels"


@pytest.mark.parametrize("gop", [1, 2, 30])
@pytest.mark.parametrize("b_frames", [0, 3])
def test_any_jump_lands_on_its_frame(gop, b_frames):
    """Frames after jumps over groups of pictures, long and tiny ones, are those asked for."""
    data = clip_file(num_frames=90, gop=gop, b_frames=b_frames, container="mp4")
    index = index_frames(data)[0]
    for positions in ([89], [0, 50, 51, 88], [0, 0, 12, 44, 44, 89], list(range(0, 90, 11))):
        found = [number_of(pixels) for pixels in read_frames(data, index, positions)]
        assert found == [position % 31 for position in positions]


def test_sound_is_placed_by_its_times():
    """A hole in the sound of a file is silence of its length, and what follows keeps its time."""
    data = sound_at(0, 1000, 4000)
    index = index_sound(data)
    assert (index.num_samples, index.start) == (5000, 0)
    piece = ramp(1000) / np.float32(32768)
    expected = np.concatenate([piece, piece, np.zeros((2000, 1)), piece])
    np.testing.assert_array_equal(read_sound(data, index), expected)
    np.testing.assert_array_equal(read_sound(data, index, stop=4500), expected[:4500])


def by_async(data: bytes) -> np.ndarray:
    """The samples that FFmpeg's own filter for audio with jittering times makes of a file."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        graph = av.filter.Graph()
        source = graph.add_abuffer(template=stream)
        moved, sink = graph.add("aresample", "async=1"), graph.add("abuffersink")
        source.link_to(moved)
        moved.link_to(sink)
        graph.configure()
        pieces = []
        for frame in (*container.decode(stream), None):
            graph.push(frame)
            try:
                while True:
                    pieces.append(graph.pull().to_ndarray().reshape(-1, 1))
            except (av.BlockingIOError, EOFError):
                pass
    return np.concatenate(pieces) / np.float32(32768)


@given(st.lists(st.integers(-900, 3000) | st.integers(-700, 700), min_size=1, max_size=8))
@settings(max_examples=500, deadline=None)  # 10,000 at night
def test_sound_is_moved_as_ffmpeg_moves_it(shifts):
    """Whatever the times of packets, samples are those of `aresample=async=1`."""
    starts = np.cumsum([0, *(1000 + shift for shift in shifts)]).tolist()
    data = sound_at(*starts)
    found, expected = read_sound(data, index_sound(data)), by_async(data)
    np.testing.assert_array_equal(found, expected)


def test_jitter_moves_no_sample():
    """Packets whose times are off by less than a tenth of a second follow each other without a hole or an overlap."""
    data = sound_at(0, 1790, 2210, 3795)
    np.testing.assert_array_equal(read_sound(data, index_sound(data)), np.tile(ramp(1000), (4, 1)) / np.float32(32768))


@pytest.mark.parametrize("codec", ["pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le", "flac"])
def test_samples_of_every_layout_are_floats(codec):
    """Integer samples are scaled by their width, floats are taken as they are."""
    data = clip_file(codec="", container="matroska", samples=SAMPLES, audio_codec=codec)
    found = read_sound(data, index_sound(data))
    tolerance = 1 / 128 if codec == "pcm_u8" else 0
    assert np.abs(found - SAMPLES / np.float32(32768)).max() <= tolerance


def test_sound_is_mixed():
    """To one channel the mean, from one copies, from 5.1 to stereo by the stated weights; other changes are refused."""
    sound = np.eye(6, dtype=np.float32)
    assert mix(sound, 1)[:, 0].tolist() == [np.float32(1 / 6)] * 6
    assert mix(sound[:, :1], 3).tolist() == [[1, 1, 1]] + [[0, 0, 0]] * 5
    part = 0.5**0.5
    expected = np.array([[1, 0], [0, 1], [part, part], [0, 0], [part, 0], [0, part]]) / (1 + 2 * part)
    np.testing.assert_allclose(mix(sound, 2), expected, rtol=1e-6)
    assert np.abs(mix(np.ones((1, 6), np.float32), 2)).max() <= 1
    with pytest.raises(ValueError, match="channels"):
        mix(sound, 3)


@pytest.mark.parametrize(("rate", "target"), [(48_000, 16_000), (44_100, 48_000), (8000, 44_100)])
@pytest.mark.parametrize("count", [0, 1, 999])
def test_resampled_sound_has_its_length(rate, target, count):
    """The length is that of the time, to the nearest sample, whatever the resampler makes of it."""
    found = resample(np.zeros((count, 2), np.float32), rate, target)
    assert found.shape == (resampled_length(count, rate, target), 2)
    assert abs(len(found) - count * target / rate) <= 0.5


def clips_in(shard):
    """(name, bytes) of a tar's video files."""
    with tarfile.open(shard) as archive:
        for member in archive:
            if member.name.endswith((".mp4", ".mov", ".webm")):
                yield member.name, archive.extractfile(member).read()


def test_real_headers_are_read(shared_data):
    """Clips of the corpora are probed, with the size, count and length that the packets have."""
    members = [
        one
        for shard in ("video/video-00000", "robotics/robotics-episodes-00000")
        for one in clips_in(shared_data / f"{shard}.tar")
    ]
    assert len(members) == 7
    for name, data in members:
        info = probe_video(data)
        index, height, width = index_frames(data)
        assert (info.height, info.width) == (height, width), name
        assert info.num_frames in (None, len(index.pts)), name
        sound = index_sound(data)
        ends = [index.start + index.duration]
        if sound is not None:
            ends.append(sound.start + Fraction(sound.num_samples, sound.sample_rate))
        assert float(max(ends)) == pytest.approx(info.duration_seconds, abs=1.1), name  # one header tells a second more
