"""SyncedVideoAudioField: damage, and records and files that promise more than they hold."""

import numpy as np
import pytest

from mm_assets.errors import CorruptError, EncodeError, FormatError, LimitError
from mm_assets.fields import SyncedVideoAudioField, VideoAudio

from .clips import SIZE, clip_file, ramp, sound_at
from .video_audio import FILE, KEEP, LONG, RATE, SOUND, STORE


def test_decoding_is_bounded():
    """More decoded bytes than the field allows are refused by their number, before they are made."""
    payload = KEEP.encode(LONG)
    frame = SIZE[0] * SIZE[1] * 3
    assert SyncedVideoAudioField(max_decoded_bytes=31 * frame).decode(*payload).frames.nbytes == 31 * frame
    field = SyncedVideoAudioField(max_decoded_bytes=31 * frame - 1)
    with pytest.raises(LimitError, match="max_decoded_bytes"):
        field.decode(*payload)
    assert len(field.decode_frames(*payload, [30])) == 1
    with pytest.raises(EncodeError, match="max_decoded_bytes"):
        SyncedVideoAudioField(max_decoded_bytes=100).encode(VideoAudio(audio=SOUND))
    with pytest.raises(LimitError, match="max_pixels"):
        SyncedVideoAudioField(max_pixels=511).check(LONG)


@pytest.mark.parametrize("encoding", ["keep", "frames"])
def test_a_record_that_promises_much_is_refused(encoding):
    """A record of billions of frames or samples is an error before anything is allocated."""
    field = SyncedVideoAudioField(encoding=encoding)
    metadata, data = field.encode(FILE)
    for name, value in (("num_frames", 2**32 - 1), ("num_audio_samples", 2**50), ("height", 2**31), ("width", 0)):
        record = np.frombuffer(bytearray(metadata), dtype=field.metadata_type)
        record[name] = value
        with pytest.raises((FormatError, LimitError)):
            field.decode(record.tobytes(), data)


def peak_of(function, *args):
    """Bytes that a call which is refused takes of Python's and NumPy's memory."""
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises((FormatError, LimitError)):
            function(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def record_with(metadata, **values):
    record = np.frombuffer(bytearray(metadata), dtype=KEEP.metadata_type)
    for name, value in values.items():
        record[name] = value
    return record.tobytes()


@pytest.mark.parametrize("sizes", [{}, {"height": 1, "width": 1}])
def test_a_kept_file_bounds_the_frames_of_its_record(sizes):
    """A record that counts more frames than the file has is refused before a list of as many is made."""
    metadata, data = KEEP.encode(FILE)
    hostile = record_with(metadata, num_frames=2_000_000, **sizes)
    with pytest.raises(CorruptError, match=r"more frames than its file .found 4, expected at most 3"):
        KEEP.decode(record_with(metadata, num_frames=4), data)
    small = SyncedVideoAudioField(target_frames=4, size=(2, 2))
    for function in (KEEP.decode, lambda *args: KEEP.decode_frames(*args, [99]), small.decode, KEEP.check_decodable):
        assert peak_of(function, hostile, data) < 2_000_000
    fast = record_with(metadata, num_frames=90, frame_rate_num=750)
    assert len(KEEP.decode_frames(fast, data, [89])) == 1
    timing = KEEP.timing(record_with(metadata, num_frames=2**32 - 1))
    assert timing.audio_segments([2**32 - 2]).shape == (1, 2)
    assert timing.frame_times([2**32 - 2]).tolist() == [(2**32 - 2) / 25]


def test_frames_without_pixels_count_too():
    """With tiny frames, what a clip records per frame counts against the limit."""
    payload = KEEP.encode(clip_file(num_frames=10, size=(2, 2), codec="mpeg4"))
    assert len(SyncedVideoAudioField(max_decoded_bytes=640).decode(*payload).frames) == 10
    with pytest.raises(LimitError, match="max_decoded_bytes"):
        SyncedVideoAudioField(max_decoded_bytes=639).decode(*payload)


def test_a_kept_file_bounds_the_sound_of_its_record():
    """A record of more sound than its file has, or that resamples it to far more, takes no memory for it."""
    metadata, data = KEEP.encode(clip_file(codec="", container="mov", samples=ramp(60_000), sample_rate=RATE))
    for values in ({"audio_start_samples": 10_000_000}, {"sample_rate": 768_000, "audio_start_samples": 6_750_000}):
        assert peak_of(KEEP.decode_audio, record_with(metadata, **values), data) < 20_000_000
    field = SyncedVideoAudioField(max_decoded_bytes=1_000_000)
    late = record_with(metadata, sample_rate=768_000, audio_start_samples=5_000_000, num_audio_samples=10)
    assert peak_of(field.decode_audio, late, data) < 100_000


def test_silence_is_bounded():
    """A few packets of sound, hours apart, are refused by check and encode, and so is a payload that has them."""
    metadata, _ = KEEP.encode(sound_at(0))
    hostile = sound_at(0, 5000 * RATE)
    for function in (KEEP.check, KEEP.encode, STORE.encode):
        with pytest.raises(EncodeError, match="1000 times"):
            function(hostile)
    payload = record_with(metadata, video_size=len(hostile), num_audio_samples=5000 * RATE)
    with pytest.raises(CorruptError, match="1000 times"):
        KEEP.decode_audio(payload, hostile)


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:10,\n/etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>http://localhost/</BaseURL></MPD>',
        b"[playlist]\nFile1=http://localhost/a.mp4\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 49170 RTP/AVP 98\n",
    ],
    ids=["hls", "concat", "dash", "pls", "sdp"],
)
def test_playlists_are_refused(data):
    """Bytes that name other files or addresses are not a video, whatever FFmpeg would make of them."""
    for function in (KEEP.check, KEEP.encode, STORE.encode):
        with pytest.raises(EncodeError, match="no known container"):
            function(data)


@pytest.mark.parametrize(
    ("container", "codec", "audio_codec", "sample_rate"),
    [
        ("mp4", "libx264", "aac", 16_000),
        ("matroska", "libx264", "pcm_s16le", 16_000),
        ("webm", "libvpx", "libopus", 48_000),
        ("avi", "mpeg4", "pcm_s16le", 16_000),
        ("mpegts", "libx264", "mp2", 16_000),
        ("flv", "flv1", "aac", 44_100),
    ],
)
def test_damaged_files_are_refused_or_decoded(container, codec, audio_codec, sample_rate):
    """Whatever bytes of a file are changed, encode and check agree, and decoding works or is a FormatError."""
    data = clip_file(
        container=container,
        codec=codec,
        audio_codec=audio_codec,
        sample_rate=sample_rate,
        samples=ramp(1000),
        num_frames=4,
    )
    rng = np.random.default_rng(len(data))
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(int(rng.integers(1, 6))):
            broken[int(rng.integers(0, min(len(broken), 1500)))] = int(rng.integers(0, 256))
        try:
            metadata, kept = KEEP.encode(bytes(broken))
        except EncodeError:
            with pytest.raises(EncodeError):
                KEEP.check(bytes(broken))
            continue
        KEEP.check(bytes(broken))
        try:
            KEEP.decode(metadata, kept)
        except FormatError as error:
            assert error.path == "<payload>"  # noqa: PT017  # the bytes may also be valid
