"""SyncedVideoAudioField: values, containers, batches, audio, and a real corpus."""

import io
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mm_assets.errors import CorruptError, EncodeError, FormatError, MissingExtraError
from mm_assets.fields import Audio, Clip, SyncedVideoAudioField, VideoAudio, VideoFile
from mm_assets.media.picture import Picture
from mm_assets.media.timing import Timing
from mm_assets.testing import FieldSuite

from .clips import SIZE, clip_file, number_of, picture, ramp
from .conftest import sound_file, wav_file
from .video_audio import FILE, FRAMES, KEEP, RATE, SHORTS, SOUND, STORE, coded, floats, through_jpeg

PICTURE = Picture(
    orientation=1, pixel_aspect=Fraction(1), is_interlaced=False, bits=8, transfer="unknown", primaries="unknown"
)


def decoded(frames, rate, samples=None, sample_rate=0, offset=0, picture=None):
    """The clip of all these frames and samples; frames are what decoding gives."""
    timing = Timing(
        num_frames=0 if frames is None else len(frames),
        frame_rate=None if frames is None else Fraction(rate),
        sample_rate=sample_rate,
        num_audio_samples=0 if samples is None else len(samples),
        audio_offset_samples=offset,
    )
    indices = np.arange(timing.num_frames)
    return Clip(
        frames=frames,
        frame_indices=indices,
        frame_mask=np.ones(len(indices), bool),
        frame_times=indices / float(rate or 1),
        audio=None if samples is None else Audio(floats(samples), sample_rate),
        audio_segments=timing.audio_segments(indices),
        timing=timing,
        picture=picture,
    )


def frames_of_file(data):
    """What PyAV decodes, first frame to last, in another way than the field does."""
    import av

    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


class TestSyncedVideoAudioField(FieldSuite):
    fields = [
        KEEP,
        STORE,
        SyncedVideoAudioField(frame_rate=29.97, size=(6, 8), audio_sample_rate=RATE),
        SyncedVideoAudioField(target_frames=4),
        SyncedVideoAudioField(max_duration=2.5, max_frames=7),
    ]
    cases = [
        (VideoAudio(frames=FRAMES, frame_rate=25, audio=SOUND), decoded(through_jpeg(FRAMES), 25, SHORTS, RATE)),
        (FILE, decoded(frames_of_file(FILE), 25, SHORTS[:200], RATE, picture=PICTURE)),
        (VideoFile(video=FILE), decoded(frames_of_file(FILE), 25, SHORTS[:200], RATE, picture=PICTURE)),
        (
            VideoAudio(frames=FRAMES[:1], frame_rate=(30000, 1001)),
            decoded(through_jpeg(FRAMES[:1]), Fraction(30000, 1001)),
        ),
        (VideoAudio(audio=(SHORTS[:, 0], RATE)), decoded(None, None, SHORTS, RATE)),
        (wav_file(SHORTS, RATE), decoded(None, None, SHORTS, RATE)),
    ]
    empty = (VideoAudio(audio=(SHORTS[:0], RATE)), decoded(None, None, SHORTS[:0], RATE))
    maximum = (SyncedVideoAudioField(max_pixels=96), VideoAudio(frames=FRAMES, frame_rate=25))
    past_maximum = (SyncedVideoAudioField(max_pixels=95), VideoAudio(frames=FRAMES, frame_rate=25))
    wrong_types = ["clip.mp4", 1, FRAMES, (FRAMES, 25), SOUND]
    wrong_shapes = [
        b"",
        b"no video",
        FILE[:200],
        VideoAudio(),
        VideoAudio(frames=FRAMES),
        VideoAudio(frames=FRAMES[:0], frame_rate=25),
        VideoAudio(frames=FRAMES[..., :1], frame_rate=25),
        VideoAudio(frames=FRAMES.astype(float), frame_rate=25),
        VideoAudio(frames=FRAMES, frame_rate=0),
        VideoAudio(frames=FRAMES, frame_rate=float("nan")),
        VideoAudio(audio=(SHORTS, 0)),
        VideoAudio(audio=SHORTS),
        VideoAudio(audio=(SHORTS.astype(np.int32), RATE)),
        VideoAudio(audio=(np.full(3, np.nan, np.float32), RATE)),
        VideoAudio(audio=(np.full(3, 1.5, np.float32), RATE)),
        VideoAudio(audio=SOUND, audio_offset_seconds=float("inf")),
        VideoAudio(audio=SOUND, audio_offset_seconds="1"),
        VideoFile(),
        VideoFile(video="no/such/file.mp4"),
        VideoFile(video=FILE, audio=b"no sound"),
        VideoFile(video=FILE, start_seconds=-1),
        VideoFile(video=FILE, start_seconds=10),
        VideoFile(video=FILE, duration_seconds=0),
    ]
    bad_configs = [
        {"encoding": "h264"},
        {"audio_encoding": "mp3"},
        {"frame_rate": 0},
        {"frame_rate": "25"},
        {"frame_rate": [25]},
        {"size": [0, 3]},
        {"size": [3]},
        {"quality": 101},
        {"max_duration": 0},
        {"max_frames": 0},
        {"target_frames": True},
        {"decode_length": 100},
        {"max_pixels": None},
        {"max_decoded_bytes": 0},
    ]

    @pytest.mark.fuzz
    def test_damage_anywhere_is_noticed_or_harmless(self) -> None:
        """As for any field; each of the many payloads is opened by FFmpeg."""
        super().test_damage_anywhere_is_noticed_or_harmless()


def test_both_parts_are_kept_byte_for_byte():
    """A video file and its separate sound are in the payload as they were, and come out as items."""
    wav = wav_file(SHORTS, RATE)
    value = KEEP.assemble({"video": memoryview(FILE), "audio": wav})
    KEEP.check(value)
    items = {item.part: bytes(item.data) for item in KEEP.items(*KEEP.encode(value))}
    assert items == {"video": FILE, "audio": wav}
    assert KEEP.keeps_part("video")
    assert KEEP.keeps_part("audio")
    assert not STORE.keeps_part("video")


def test_separate_sound_takes_the_place_of_the_files_own():
    """The samples are those of the sound file, at its rate, with the offset that was given."""
    clip = coded(KEEP, VideoFile(video=FILE, audio=wav_file(SHORTS, 1000), audio_offset_seconds=Fraction(-3, 1000)))
    assert clip.audio == Audio(floats(SHORTS), 1000)
    assert clip.timing.audio_offset_samples == -3
    assert clip.audio_segments.tolist() == [[3, 43], [43, 83], [83, 123]]


@pytest.mark.parametrize("field", [KEEP, STORE])
def test_missing_sound_or_video_is_one_absent_part(field):
    """A file without sound has frames and no audio; one without video has audio and no frames; neither is refused."""
    silent = coded(field, clip_file(num_frames=3))
    assert silent.frames.shape == (3, *SIZE, 3)
    assert silent.audio is None
    assert silent.audio_segments.tolist() == [[0, 0]] * 3
    with pytest.raises(ValueError, match="without audio"):
        silent.audio_of_frame(0)
    for value in (VideoFile(audio=wav_file(SHORTS, RATE)), clip_file(codec="", container="mov", samples=SHORTS)):
        blind = coded(field, value)
        assert blind.frames is None
        assert blind.frame_rate is None
        np.testing.assert_array_equal(blind.audio.samples, floats(SHORTS))
    with pytest.raises(EncodeError, match="video, audio or both"):
        field.assemble({})


@pytest.mark.parametrize("encoding", ["keep", "frames"])
def test_items_are_the_contents_that_were_given(encoding):
    """A sound file given as the video is the item video, and the sound of a video file is not an item."""
    field = SyncedVideoAudioField(encoding=encoding)
    sound = clip_file(codec="", container="mp4", samples=SHORTS, audio_codec="aac")
    silent = clip_file(num_frames=3)
    for contents in (
        {"video": sound},
        {"audio": sound},
        {"video": FILE},
        {"video": silent},
        {"video": silent, "audio": sound},
        {"video": sound, "audio": sound},
        {"video": FILE, "audio": wav_file(SHORTS, RATE)},
    ):
        items = {item.part: bytes(item.data) for item in field.items(*field.encode(field.assemble(contents)))}
        assert set(items) == set(contents)
        if encoding == "keep":
            assert items == contents


@pytest.mark.parametrize(
    "values",
    [{"parts": 0}, {"parts": 4}, {"parts": 2}, {"parts": 1, "audio_codec": 17}],
    ids=lambda values: str(values),
)
def test_a_record_of_other_parts_is_refused(values):
    """A record with unknown parts, or with parts of another size than it records, is an error."""
    metadata, data = KEEP.encode(FILE)
    record = np.frombuffer(bytearray(metadata), dtype=KEEP.metadata_type)
    for name, value in values.items():
        record[name] = value
    with pytest.raises(CorruptError, match="part"):
        list(KEEP.items(record.tobytes(), data))


@pytest.mark.parametrize("parts", [{"video": {"a": 1}}, {"text": b""}])
def test_parts_of_another_kind_are_refused(parts):
    """Parts are bytes, by the names that the field has."""
    with pytest.raises(EncodeError):
        KEEP.assemble(parts)


def test_a_cover_picture_is_not_a_video():
    """A sound file with a picture in it is sound."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as output:
        sound = output.add_stream("aac", rate=RATE, layout="mono")
        cover = output.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 16, 16, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        picture_frame = av.VideoFrame.from_ndarray(picture(1, (16, 16)))
        samples = av.AudioFrame.from_ndarray(floats(ramp(2048)).T.copy(), format="fltp", layout="mono")
        samples.sample_rate = RATE
        for packet in [*cover.encode(picture_frame), *cover.encode(None), *sound.encode(samples), *sound.encode(None)]:
            output.mux(packet)
    assert KEEP.timing(KEEP.encode(target.getvalue()).metadata).num_frames == 0


@pytest.mark.parametrize(
    ("container", "codec", "b_frames"),
    [
        ("avi", "mpeg4", 0),
        ("avi", "mpeg4", 2),
        ("mpegts", "libx264", 0),
        ("mpegts", "libx264", 2),
        ("mpeg", "mpeg1video", 2),
        ("flv", "libx264", 2),
        ("webm", "libvpx", 0),
    ],
)
def test_other_containers_are_read(container, codec, b_frames):
    """Also where packets tell no presentation times of their own, all frames are had, and the same ones one by one."""
    data = clip_file(container=container, codec=codec, num_frames=60, b_frames=b_frames, gop=10)
    payload = KEEP.encode(data)
    frames = KEEP.decode(*payload).frames
    steps = np.array([number_of(one) for one in frames]) - np.arange(60)
    assert np.abs((steps + 1) % 31).max() <= 2  # the older codecs are a step of grey off here and there
    indices = [55, 3, 30, 29, 0]
    np.testing.assert_array_equal(KEEP.decode_frames(*payload, indices), frames[indices])


def test_sound_is_resampled_and_mixed():
    """A tone keeps its pitch and level at another rate and in one channel, in kept and stored clips alike."""
    time = np.arange(48_000) / 48_000
    tone = (np.sin(2 * np.pi * 440 * time) * 12_000).astype(np.int16)
    stereo = np.stack([tone, np.zeros_like(tone)], axis=1)
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) * 6000 / 32768
    data = clip_file(container="mov", num_frames=25, samples=stereo, sample_rate=48_000)
    for value in (data, VideoAudio(audio=(stereo, 48_000))):
        for encoding in ("keep", "frames"):
            clip = coded(SyncedVideoAudioField(encoding=encoding, audio_sample_rate=16_000, audio_channels=1), value)
            assert clip.audio.samples.shape == (16_000, 1)
            np.testing.assert_allclose(clip.audio.samples[500:-500, 0], expected[500:-500], atol=2e-4)


def test_channels_that_do_not_mix_are_refused():
    """Three channels have no stereo form; the refusal comes from check as from encode."""
    for function in (STORE.encode, STORE.check):
        with pytest.raises(EncodeError):
            function(VideoAudio(audio=(np.zeros((5, 65), np.int16), RATE)))
    field = SyncedVideoAudioField(audio_channels=2)
    with pytest.raises(EncodeError, match="mix to 2"):
        field.check(sound_file(np.zeros((50, 3), np.int16), RATE, "WAV"))


@pytest.mark.parametrize("audio_encoding", ["flac", "pcm16", "float32"])
def test_stored_samples_are_exact(audio_encoding):
    """16-bit samples come back exactly in every encoding of the sound."""
    field = SyncedVideoAudioField(encoding="frames", audio_encoding=audio_encoding)
    assert coded(field, VideoAudio(audio=SOUND)).audio == Audio(floats(SHORTS), RATE)


def test_sound_is_read_without_frames_and_timing_without_data():
    """decode_audio does not decode a frame, and timing needs the record alone."""
    metadata, data = KEEP.encode(VideoFile(video=FILE, audio=wav_file(SHORTS, RATE)))
    broken = bytearray(data)
    broken[: len(FILE)] = bytes(len(FILE))
    assert KEEP.decode_audio(metadata, broken) == Audio(floats(SHORTS), RATE)
    assert KEEP.timing(metadata).audio_seconds == 300 / RATE
    assert KEEP.audio_segments(metadata, [1, 0]).tolist() == [[300, 300], [0, 300]]
    with pytest.raises(FormatError):
        KEEP.decode(metadata, broken)


BATCHES = SyncedVideoAudioField(
    size=(6, 8), target_frames=4, audio_sample_rate=RATE, audio_channels=1, decode_length=250
)


def test_a_batch_is_arrays():
    """Rows of a batch are the clips, padded and masked; what is absent is zero, also in targets that were not."""
    values = [
        VideoAudio(frames=FRAMES, frame_rate=50, audio=(SHORTS[:200], RATE)),
        VideoAudio(frames=np.concatenate([FRAMES] * 3), frame_rate=50),
        VideoAudio(audio=SOUND),
        FILE,
    ]
    payloads = [BATCHES.encode(value) for value in values]
    rows = [*payloads, None]
    records = np.stack([np.frombuffer(row.metadata if row else bytes(80), np.uint8) for row in rows])
    out = {name: np.full((5, *layout.shape), 1, layout.dtype) for name, layout in BATCHES.value_layout.items()}
    found, present = BATCHES.decode_batch(records, [row.data if row else None for row in rows], out)
    assert found is not None
    assert present.tolist() == [True] * 4 + [False]
    assert found["video_mask"].tolist() == [
        [True] * 3 + [False],
        [True] * 4,
        [False] * 4,
        [True] * 3 + [False],
        [False] * 4,
    ]
    for row, payload in enumerate(payloads):
        clip = BATCHES.decode(*payload)
        expected = np.zeros((4, 6, 8, 3), np.uint8) if clip.frames is None else clip.frames
        np.testing.assert_array_equal(found["video"][row], expected)
        np.testing.assert_array_equal(found["frame_times"][row], clip.frame_times)
        length = 0 if clip.audio is None else min(250, len(clip.audio.samples))
        assert found["audio_mask"][row].tolist() == [True] * length + [False] * (250 - length)
        samples = np.zeros(250, np.float32)
        if length:
            samples[:length] = clip.audio.samples[:length, 0]
        np.testing.assert_array_equal(found["audio"][row], samples)
        np.testing.assert_array_equal(found["audio_segments"][row], np.minimum(clip.audio_segments, length))
    assert not any(array[4].any() for array in found.values())


def test_layouts_follow_the_settings():
    """Without size or target_frames there is no layout; channels make a dimension; no decode_length, no sound."""
    assert KEEP.value_layout is None
    assert SyncedVideoAudioField(size=(2, 2)).value_layout is None
    assert set(SyncedVideoAudioField(size=(2, 2), target_frames=1).value_layout) == {
        "video",
        "video_mask",
        "frame_times",
    }
    stereo = SyncedVideoAudioField(
        size=(2, 2), target_frames=1, audio_channels=2, audio_sample_rate=8000, decode_length=5
    )
    assert stereo.value_layout["audio"].shape == (5, 2)


def test_a_missing_package_is_named(monkeypatch):
    """Without PyAV a file is refused by the name of the extra; arrays need it not."""
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match="mm-assets\\[video\\]"):
        KEEP.encode(FILE)
    STORE.decode(*STORE.encode(VideoAudio(frames=FRAMES, frame_rate=25, audio=SOUND)))


def test_a_path_is_its_bytes(tmp_path: Path):
    """A path as video or audio is read."""
    (tmp_path / "clip.mp4").write_bytes(FILE)
    assert KEEP.encode(VideoFile(video=tmp_path / "clip.mp4")) == KEEP.encode(FILE)
    assert KEEP.encode(VideoFile(video=str(tmp_path / "clip.mp4"))) == KEEP.encode(FILE)


@pytest.mark.parametrize(
    ("codec", "subtype"), [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", None)]
)
def test_separate_sound_files_decode_as_libsndfile_does(codec, subtype):
    """Each sound format has the samples, and starts with the one, that another decoder gives."""
    import soundfile

    tone = (np.sin(np.arange(20_000) / 9) * 9000).astype(np.int16)
    data = sound_file(tone, 44_100, codec, subtype)
    expected = soundfile.read(io.BytesIO(data), dtype="float32")[0]
    found = coded(KEEP, VideoFile(video=FILE, audio=data)).audio.samples[:, 0]
    count = min(len(found), len(expected))
    assert count > 19_000
    np.testing.assert_allclose(found[:count], expected[:count], atol=0 if subtype == "PCM_16" else 2e-4)


def test_real_clips_are_kept_and_decoded(shared_data, members_of):
    """Every clip of the corpora is kept as it is; frames decoded alone, with all others, and stored are one."""
    found = set()
    for name, data in members_of(shared_data, (".mp4", ".mov", ".webm")):
        metadata, kept = KEEP.encode(data)
        assert bytes(kept) == data, name
        timing = KEEP.timing(metadata)
        few = SyncedVideoAudioField(max_frames=40, size=(60, 80))
        clip = coded(few, data)
        assert clip.timing.truncated == (timing.num_frames > 40), name
        indices = [39, 7, 21]
        np.testing.assert_array_equal(few.decode_frames(*few.encode(data), indices), clip.frames[indices])
        stored = coded(SyncedVideoAudioField(encoding="frames", max_frames=40, size=(60, 80)), data)
        assert stored.timing == clip.timing, name
        assert np.abs(stored.frames.astype(int) - clip.frames).mean() < 4, name
        if clip.audio is not None:
            assert np.abs(stored.audio.samples - clip.audio.samples).max() <= 1 / 32768, name
            assert abs(timing.audio_seconds - timing.video_seconds) < 1.1, name
        found.add((name.rpartition(".")[2], clip.audio is not None))
    assert found == {("mp4", True), ("mp4", False), ("mov", True), ("webm", True)}


@pytest.mark.parametrize("encoding", ["keep", "frames"])
def test_sound_is_brought_to_another_rate_while_decoding(encoding):
    """A reader may ask for another rate and fewer channels: sound, segments, timing and batches follow."""
    data = clip_file(samples=ramp(8000, 2), sample_rate=16_000, num_frames=12)
    stored = SyncedVideoAudioField(encoding=encoding, audio_encoding="float32").encode(data)
    settings = {"audio_sample_rate": 8000, "audio_channels": 1}
    reader = SyncedVideoAudioField(encoding=encoding, **settings)
    expected = SyncedVideoAudioField(encoding="keep", **settings)
    expected = expected.decode(*expected.encode(data)).audio
    clip = reader.decode(*stored)
    assert (clip.audio.sample_rate, clip.audio.samples.shape) == (8000, (4000, 1))
    np.testing.assert_allclose(clip.audio.samples, expected.samples, atol=1e-6)
    timing = reader.timing(stored.metadata)
    assert (timing.sample_rate, timing.num_audio_samples) == (8000, 4000)
    assert clip.timing == timing
    np.testing.assert_array_equal(clip.audio_segments, reader.audio_segments(stored.metadata, np.arange(12)))
    assert clip.audio_segments[0].tolist() == [0, 320]
    batch = SyncedVideoAudioField(
        encoding=encoding, size=SIZE, target_frames=3, decode_length=4096, audio_encoding="float32", **settings
    )
    records = np.frombuffer(stored.metadata, np.uint8)[np.newaxis]
    values, _ = batch.decode_batch(records, [stored.data])
    np.testing.assert_allclose(values["audio"][0, :4000], expected.samples[:, 0], atol=1e-6)
    assert values["audio_mask"][0].sum() == 4000
