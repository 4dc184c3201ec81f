"""Windows of samples: all modalities from the same seconds, in samples and batches, with checksums."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.dataset import at_time
from mm_assets.errors import CorruptError, SourceError
from mm_assets.fields import (
    Audio,
    AudioField,
    Clip,
    Field,
    MIDIField,
    SyncedVideoAudioField,
    TextField,
    TimedTextField,
    TimeSeries,
    TimeSeriesField,
    VideoAudio,
)
from mm_assets.formats import reader
from mm_assets.formats.stored import StoredPayload
from mm_assets.media import ranged_file

from ..fields.clips import clip_file, ramp

RATE = 8000
TRACK = bytes.fromhex("00ff5103 07a120 00903c40 8360803c00 00904040 8360804000 00ff2f00")  # two notes of half a second
MUSIC = b"MThd" + bytes.fromhex("00000006 0000 0001 01e0") + b"MTrk" + len(TRACK).to_bytes(4, "big") + TRACK
FIELDS = {
    "clip": SyncedVideoAudioField(encoding="frames"),
    "audio": AudioField(),
    "state": TimeSeriesField(num_steps=31, num_columns=1, dtype="float64"),
    "words": TimedTextField(),
    "music": MIDIField(),
    "title": TextField(),
}
NUM_SAMPLES = 3


def sample(i: int) -> dict[str, Any]:
    """A sample of 3 s in which everything holds its own time; the second has no clip, the third no media."""
    frames = np.repeat(np.arange(30, dtype=np.uint8) * 8, 16 * 16 * 3).reshape(30, 16, 16, 3)
    sound = np.arange(3 * RATE, dtype=np.float32)[:, None] / (3 * RATE)
    times = np.arange(31) / 10
    return {
        "clip": None if i else VideoAudio(frames=frames, frame_rate=10, audio=Audio(sound, RATE)),
        "audio": Audio(sound[: 2 * RATE] if i else sound, RATE) if i < 2 else None,
        "state": TimeSeries(times, times[:, None]),
        "words": [(k / 2, k / 2 + 0.4, f"word {k}") for k in range(6)],
        "music": MUSIC,
        "title": f"sample {i}",
    }


@pytest.fixture(scope="module", params=["mult", "mstr"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows") / f"x.{request.param}"
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        for i in range(NUM_SAMPLES):
            writer.write(str(i), sample(i))
    return path


@settings(max_examples=15, derandomize=True, database=None, deadline=None)
@given(start=st.floats(0, 3.5), seconds=st.floats(0.01, 3))
def test_all_modalities_are_read_from_the_same_seconds(path: Path, start: float, seconds: float) -> None:
    """Audio, frames, steps, words and notes of a window are those of its seconds, and their times count from it."""
    with mm_assets.open(path) as data:
        whole, part = data[0], data.read_sample(0, window=(start, seconds))
    stop = start + seconds
    assert part["title"] == whole["title"]
    samples = whole["audio"].samples
    first = round(start * RATE)
    assert abs(len(part["audio"].samples) - len(samples[first : first + round(seconds * RATE)])) <= 1
    np.testing.assert_array_equal(part["audio"].samples, samples[first : first + len(part["audio"].samples)])
    np.testing.assert_allclose(part["clip"].audio.samples, part["audio"].samples, atol=1 / 32768)
    times = part["clip"].frame_times + start
    assert all(start - 0.1001 < time < stop for time in times)
    np.testing.assert_allclose(part["clip"].frame_indices, times * 10, atol=1e-6)
    steps = whole["state"].timestamps
    assert part["state"].values[:, 0].tolist() == steps[(steps >= start) & (steps < stop)].tolist()
    np.testing.assert_allclose(part["state"].timestamps + start, part["state"].values[:, 0], atol=1e-12)
    expected = [word.text for word in whole["words"] if word.start_seconds < stop and word.end_seconds > start]
    assert [word.text for word in part["words"]] == expected
    assert all(word.end_seconds > 0 and word.start_seconds < seconds for word in part["words"])
    for word in part["words"]:
        number = int(word.text.split()[1])
        assert word.start_seconds + start == pytest.approx(number / 2)
    notes = whole["music"].notes
    sounding = (notes.onset_seconds < stop) & (notes.end_seconds > start)
    assert part["music"].notes.pitch.tolist() == notes.pitch[sounding].tolist()
    np.testing.assert_allclose(part["music"].notes.onset_seconds + start, notes.onset_seconds[sounding])


def test_the_clock_of_a_window_is_one_clock(path: Path) -> None:
    """`at_time` of a window gives what the whole sample has at the same moment."""
    with mm_assets.open(path) as data:
        whole, part = data[0], data.read_sample(0, window=(1.0, 1.0))
    for seconds in (0.05, 0.5, 0.95):
        now, then = at_time(part, seconds), at_time(whole, 1.0 + seconds)
        assert now["clip"].number == then["clip"].number
        assert now["state"].tolist() == then["state"].tolist()
        assert [word.text for word in now["words"]] == [word.text for word in then["words"]]
    with pytest.raises(ValueError, match=r"expected 0\.0 to 1\.0 s"):
        at_time(part, 2.5)


def test_batches_are_the_windows_of_the_samples(path: Path) -> None:
    """Rows of a batch are what `read_sample` gives; with one duration audio is an array, with several a list."""
    windows = np.array([[0.5, 1.0], [1.5, 1.0], [0.0, 1.0]])
    with mm_assets.open(path) as opened:
        data = opened.with_settings({"audio": {"decode_rate": 4000, "decode_channels": 1}})
        for threads in (0, 2):
            batch = data.read_batch(range(3), windows=windows, threads=threads)
            samples = [data.read_sample(i, window=tuple(windows[i])) for i in range(3)]
            assert batch["audio"].values["samples"].shape == (3, 4000)
            assert batch["audio"].values["mask"].sum(axis=1).tolist() == [4000, 2000, 0]
            assert batch["audio"].present.tolist() == [True, True, False]
            np.testing.assert_array_equal(batch["audio"].values["samples"][0], samples[0]["audio"].samples[:, 0])
            assert batch["state"].values == [one["state"] for one in samples]
            assert batch["words"].values == [one["words"] for one in samples]
        windows[0, 1] = 0.5
        lists = data.read_batch(range(3), windows=windows)["audio"].values
        assert [None if one is None else len(one.samples) for one in lists] == [2000, 2000, None]
        same = data.read_batch([0, 1], ["audio"], windows=(0.25, 0.5))["audio"].values["samples"]
        np.testing.assert_array_equal(same[0], same[1])


@pytest.mark.parametrize(
    "windows", [(-0.5, 1.0), (0.0, 0.0), (0.0, float("inf")), (float("nan"), 1.0), [[0.0, 1.0]], (1.0, 2.0, 3.0)]
)
def test_wrong_windows_are_refused(path: Path, windows: Any) -> None:
    """A negative start, no duration, numbers that are not finite, and other shapes are a `ValueError`."""
    with mm_assets.open(path) as data, pytest.raises(ValueError, match="window"):
        data.read_batch([0, 1], windows=windows)


def test_durations_come_from_records(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest of clip and audio, else the end of the longest series, music or text; nothing is decoded."""

    def fail(*_: Any) -> None:
        raise AssertionError("decoded")

    for field in FIELDS.values():
        monkeypatch.setattr(type(field), "decode", fail)
    with mm_assets.open(path) as data:
        assert data.durations([0, 1, -1, 0]).tolist() == [3.0, 2.0, 3.0, 3.0]
        assert data.durations([1], ["words", "music"]).tolist() == [2.9]
        assert np.isnan(data.durations([0], ["title"])).all()
        assert data.select([1]).durations([0], ["audio", "state"]).tolist() == [2.0]
        with pytest.raises(KeyError):
            data.durations([0], ["other"])


def test_frames_and_their_audio(path: Path) -> None:
    """Frames by number, and the audio that belongs to them, of a clip; None of a sample without one."""
    with mm_assets.open(path) as data:
        clip = data[0]["clip"]
        np.testing.assert_array_equal(data.frames("clip", 0, [5, 0]), clip.frames[[5, 0]])
        found = data.audio("clip", 0, frames=[0, 5])
        assert [one.samples.tolist() for one in found] == [clip.audio_of_frame(k).tolist() for k in (0, 5)]
        until_next = data.audio("clip", 0, frames=[0, 5], audio_until="next_frame")
        assert [len(one.samples) for one in until_next] == [RATE // 2, 5 * RATE // 2]
        assert data.audio("clip", 0) == clip.audio
        assert data.audio("audio", 1) == data[1]["audio"]
        assert data.frames("clip", 1, [0]) is None
        with pytest.raises(TypeError, match="no frames"):
            data.frames("title", 0, [0])
        with pytest.raises(IndexError):
            data.frames("clip", 0, [30])


READS: dict[str, Callable[[mm_assets.Dataset], Any]] = {
    "sample": lambda data: data.read_sample(0, ["audio"], window=(0.0, 0.1)),
    "batch": lambda data: data.read_batch([0], ["audio"], windows=(0.0, 0.1)),
    "audio": lambda data: data.audio("audio", 0),
}


@pytest.mark.parametrize("read", READS)
def test_a_payload_is_verified_before_its_first_window(path: Path, tmp_path: Path, read: str) -> None:
    """Damage outside of the window too is found by the checksum; without verification the window is read."""
    with mm_assets.open(path) as data:
        place = data.stored([0], ["audio"])["audio"][0]
        assert place is not None
    changed = bytearray(path.read_bytes())
    changed[place.offset + place.size - 1] ^= 0x01
    other = tmp_path / path.name
    other.write_bytes(changed)
    with mm_assets.open(other) as data:
        for _ in range(2):
            with pytest.raises(CorruptError, match=r"checksum.*modality 'audio'|'audio'.*checksum"):
                READS[read](data)
        assert data.read_sample(1, window=(0.0, 0.1))["title"] == "sample 1"
    with mm_assets.open(other, verify=False) as data:
        READS[read](data)


def test_damage_without_a_checksum_names_its_place(path: Path, tmp_path: Path) -> None:
    """A payload that contradicts its record is an error with file, sample and modality, from samples and batches."""
    with mm_assets.open(path) as data:
        place = data.stored([1], ["words"])["words"][0]
        assert place is not None
    changed = bytearray(path.read_bytes())
    changed[place.offset : place.offset + 8] = np.float64(np.nan).tobytes()
    other = tmp_path / path.name
    other.write_bytes(changed)
    with mm_assets.open(other, verify=False) as data:
        for read in (
            lambda: data.read_sample(1, window=(0.0, 1.0)),
            lambda: data.read_batch([0, 1], windows=(0.0, 1.0), threads=2),
        ):
            with pytest.raises(CorruptError) as caught:
                read()
            assert (caught.value.path, caught.value.sample, caught.value.modality) == (str(other), 1, "words")


# --- object storage ---------------------------------------------------------------------------------------------------

NOISE = np.random.default_rng(0).standard_normal((20 * RATE, 1)).astype(np.float32) / 8


def _sound(container: str, subtype: str | None = None) -> bytes:
    target = io.BytesIO()
    soundfile.write(target, NOISE, RATE, format=container, subtype=subtype)
    return target.getvalue()


LARGE: dict[str, tuple[Field, Any]] = {
    "pcm": (AudioField(encoding="pcm16"), Audio(NOISE, RATE)),
    "wav": (AudioField(), _sound("WAV")),
    "flac": (AudioField(), _sound("FLAC")),
    "ogg": (AudioField(), _sound("OGG")),
    "mp3": (AudioField(), _sound("MP3")),
    "mp4": (SyncedVideoAudioField(target_frames=4), clip_file(num_frames=500, gop=10, samples=ramp(320_000))),
    "mkv": (
        SyncedVideoAudioField(target_frames=4),
        clip_file(container="matroska", num_frames=500, gop=10, samples=ramp(320_000)),
    ),
    "avi": (SyncedVideoAudioField(target_frames=4), clip_file(container="avi", codec="mpeg4", num_frames=50)),
    "jpegs": (
        SyncedVideoAudioField(encoding="frames", target_frames=4),
        VideoAudio(
            frames=np.random.default_rng(0).integers(0, 255, (200, 32, 32, 3), np.uint8),
            frame_rate=10,
            audio=Audio(NOISE, RATE),
        ),
    ),
}
IN_PARTS = ("pcm", "wav", "flac", "mp4", "jpegs")  # others read blocks of a size that is near that of these files


@pytest.fixture(scope="module", params=["mult", "mstr"])
def far(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A local file and its copy in a memory file system."""
    path = tmp_path_factory.mktemp("far") / f"x.{request.param}"
    with mm_assets.create(path, {name: field for name, (field, _) in LARGE.items()}, fsync=False) as writer:
        writer.write("0", {name: value for name, (_, value) in LARGE.items()})
        writer.write("1", {})
    url = f"memory://windows/x.{request.param}"
    with fsspec.open(url, "wb") as file:
        file.write(path.read_bytes())
    return path, url


@pytest.mark.parametrize("name", LARGE)
def test_large_remote_payloads_are_read_in_parts(far: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is that of the local file, and costs less than the payload where the format can be sought."""
    monkeypatch.setattr(reader, "WHOLE_LIMIT", 1000)
    monkeypatch.setattr(ranged_file, "WINDOW_BLOCK", 4096)
    sizes: list[int] = []
    read = StoredPayload.read

    def count(self: StoredPayload, offset: int, size: int) -> bytes:
        sizes.append(size)
        return read(self, offset, size)

    monkeypatch.setattr(StoredPayload, "read", count)
    path, url = far
    with mm_assets.open(path) as local, mm_assets.open(url) as data:
        stored = local.stored([0], [name])[name][0]
        assert stored is not None
        for window in ((12.0, 0.5), (0.0, 0.5), (30.0, 1.0)):
            sizes.clear()
            found = data.read_sample(0, [name], window=window)[name]
            if window[0] == 12.0:
                assert sizes
                assert sum(sizes) < 0.7 * stored.size or name not in IN_PARTS
            assert_same(found, local.read_sample(0, [name], window=window)[name])
        assert data.read_sample(1, [name], window=(0.0, 1.0)) == {name: None}
        batch = data.read_batch([1, 0], [name], windows=(12.0, 0.5))[name]
        assert batch.present.tolist() == [False, True]
        assert_same(batch.values[1], local.read_sample(0, [name], window=(12.0, 0.5))[name])
        if LARGE[name][0].CONTENT_KIND == "video":
            np.testing.assert_array_equal(data.frames(name, 0, [40, 3]), local.frames(name, 0, [40, 3]))
        assert_same(data.audio(name, 0), local.audio(name, 0))


def assert_same(found: Any, expected: Any) -> None:
    """Compares clips and audio; MP3 to the last bit of its decoder."""
    if isinstance(expected, Clip):
        np.testing.assert_array_equal(found.frames, expected.frames)
        np.testing.assert_array_equal(found.frame_times, expected.frame_times)
        found, expected = found.audio, expected.audio
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_allclose(found.samples, expected.samples, rtol=0, atol=1e-6, strict=True)


def test_small_remote_payloads_are_verified(far: Any) -> None:
    """Payloads up to 8 MiB are fetched whole, and their checksums verified, also without the window."""
    path, _ = far
    with mm_assets.open(path) as data:
        place = data.stored([0], ["flac"])["flac"][0]
        assert place is not None
    changed = bytearray(path.read_bytes())
    changed[place.offset + place.size - 1] ^= 0x01
    url = f"memory://windows/damaged{path.suffix}"
    with fsspec.open(url, "wb") as file:
        file.write(bytes(changed))
    with mm_assets.open(url) as data, pytest.raises(CorruptError, match="checksum"):
        data.read_sample(0, ["flac"], window=(0.0, 0.1))


@pytest.mark.parametrize("name", ["pcm", "flac", "mp4", "mkv", "jpegs"])
def test_a_failure_of_the_storage_is_no_damage(far: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while a decoder reads is that of the storage, not of the file that seems to end there."""
    monkeypatch.setattr(reader, "WHOLE_LIMIT", 1000)
    monkeypatch.setattr(ranged_file, "WINDOW_BLOCK", 4096)
    read, calls = StoredPayload.read, iter(range(1000))

    def fail(self: StoredPayload, offset: int, size: int) -> bytes:
        if next(calls) >= (0 if name == "pcm" else 2):
            raise SourceError("unreachable", "memory://windows")
        return read(self, offset, size)

    monkeypatch.setattr(StoredPayload, "read", fail)
    with mm_assets.open(far[1]) as data, pytest.raises(SourceError):
        data.read_sample(0, [name], window=(12.0, 0.5))
