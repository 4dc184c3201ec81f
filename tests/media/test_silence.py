import contextlib
import io
import tracemalloc

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import MediaError
from mm_assets.media import silence as silence_module
from mm_assets.media.silence import Silence, measure_silence

RATE = 8000


def _sound(samples: np.ndarray, form: str = "WAV", subtype: str | None = None, rate: int = RATE) -> memoryview:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, subtype=subtype)
    return memoryview(buffer.getvalue())


def _tone(seconds: float, amplitude: float, rate: int = RATE) -> np.ndarray:
    return (amplitude * np.sin(np.arange(round(seconds * rate)) * 2 * np.pi * 400 / rate)).astype(np.float32)


def _measure(data: memoryview, threshold: float = -60.0, level: str = "rms", window: float = 0.025) -> Silence:
    return measure_silence(data, threshold_dbfs=threshold, level=level, window_seconds=window)


def _by_definition(samples: np.ndarray, threshold: float, level: str, window: int) -> Silence:
    """The measure from whole samples, window by window, with levels in decibels."""
    quiet = []
    for start in range(0, len(samples), window):
        part = samples[start : start + window].astype(np.float64)
        levels = np.sqrt((part**2).mean(axis=0)) if level == "rms" else np.abs(part).max(axis=0)
        is_quiet = all(20 * np.log10(x) < threshold if x else True for x in levels)
        quiet += [is_quiet] * len(part)
    loud = [n for n, is_quiet in enumerate(quiet) if not is_quiet]
    return Silence(
        share=sum(quiet) / len(quiet),
        leading_seconds=(loud[0] if loud else len(quiet)) / RATE,
        trailing_seconds=(len(quiet) - 1 - loud[-1] if loud else len(quiet)) / RATE,
    )


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_the_measure_is_the_definition(data):
    """Whatever the parts, channels, windows and blocks, the measure is that of the definition over whole samples."""
    channels = data.draw(st.integers(1, 3))
    window = data.draw(st.integers(8, 400))
    level = data.draw(st.sampled_from(["rms", "peak"]))
    parts = data.draw(
        st.lists(
            st.tuples(st.integers(1, 700), st.lists(st.sampled_from([0, 3, 40, 9000]), min_size=3, max_size=3)),
            min_size=1,
            max_size=6,
        )
    )
    noise = np.random.default_rng(data.draw(st.integers(0, 5)))
    pieces = [noise.integers(-1, 2, (n, channels)) * np.array(loud[:channels]) for n, loud in parts]
    samples = np.concatenate(pieces).astype(np.int16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silence_module, "_BLOCK_SAMPLES", data.draw(st.sampled_from([1, 300, 1024, 1 << 17])))
        found = _measure(_sound(samples), -55.3, level, window / RATE)
    assert found == _by_definition(samples / np.float64(32768), -55.3, level, window)


@pytest.mark.parametrize(
    ("form", "subtype"),
    [("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "FLOAT"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("MP3", None)],
)
def test_every_format_is_measured(form, subtype):
    """The silence around a second of tone is measured in every format: a second before it, half a second after."""
    samples = np.concatenate([np.zeros(RATE, np.float32), _tone(1, 0.5), np.zeros(RATE // 2, np.float32)])
    found = _measure(_sound(samples, form, subtype), -40)
    lossy = 0.05 if form in ("OGG", "MP3") else 0.0  # codecs smear the edges, and pad to whole blocks
    assert found.share == pytest.approx(0.6, abs=lossy)
    assert found.leading_seconds == pytest.approx(1.0, abs=lossy)
    assert found.trailing_seconds == pytest.approx(0.5, abs=2 * lossy)


def test_levels_are_relative_to_full_scale():
    """A sine of amplitude 0.1 has a level of -23.01 dBFS by RMS and -20 by peak."""
    tone = _sound(_tone(1, 0.1), "WAV", "FLOAT")
    assert [_measure(tone, threshold).share for threshold in (-23.0, -23.02)] == [1, 0]
    assert [_measure(tone, threshold, "peak").share for threshold in (-19.99, -20.01)] == [1, 0]


def test_one_loud_channel_is_not_silence():
    """A window is silent only if every channel is."""
    both = np.stack([np.zeros(RATE, np.float32), _tone(1, 0.3)], axis=1)
    assert _measure(_sound(both)).share == 0
    assert _measure(_sound(both * 0)).share == 1


def test_a_click_is_heard_by_peak():
    """One loud sample in a long window is silence by RMS and none by peak."""
    samples = np.zeros(RATE, np.float32)
    samples[RATE // 2] = 0.01
    data = _sound(samples, "WAV", "FLOAT")
    assert _measure(data, -50, "rms", 0.1).share == 1
    assert _measure(data, -50, "peak", 0.1).share == pytest.approx(0.9)


def test_ends_of_a_sound_that_is_all_silence():
    """A sound of silence alone has its whole length of it at both ends; one without samples is all silence."""
    assert _measure(_sound(np.zeros(RATE))) == Silence(share=1.0, leading_seconds=1.0, trailing_seconds=1.0)
    assert _measure(_sound(np.zeros(0))) == Silence(share=1.0, leading_seconds=0.0, trailing_seconds=0.0)


def test_nan_and_infinity_are_not_silence():
    """Windows with NaN or infinity count as sound, by either level."""
    samples = np.zeros(RATE, np.float32)
    samples[10], samples[RATE - 10] = np.nan, np.inf
    data = _sound(samples, "WAV", "FLOAT")
    for level in ("rms", "peak"):
        assert _measure(data, level=level) == Silence(share=0.95, leading_seconds=0.0, trailing_seconds=0.0)


def test_a_flac_without_a_length_is_measured():
    """A FLAC whose header does not tell its length, as pipes make it, has the measure of one whose header does."""
    whole = _sound(np.concatenate([np.zeros(RATE), _tone(3, 0.5)]), "FLAC")
    unknown = bytearray(whole)
    unknown[21] &= 0xF0  # the 36 bits of STREAMINFO's length
    unknown[22:26] = bytes(4)
    assert bytes(unknown) != bytes(whole)
    assert _measure(memoryview(bytes(unknown))) == _measure(whole)


def test_a_sound_is_never_held_whole():
    """Ten minutes of FLAC, 58 MB decoded, are measured in a few MB beside the file's bytes."""
    samples = np.zeros((600 * 48_000, 1), np.int16)
    data = _sound(samples, "FLAC", rate=48_000)
    del samples
    tracemalloc.start()
    assert _measure(data).share == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(data) * 2 + (4 << 20)


def test_a_long_window_is_not_held_whole():
    """A window that spans many blocks has the level of all its samples."""
    samples = np.concatenate([np.zeros(40_000, np.float32), _tone(5, 0.5)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silence_module, "_BLOCK_SAMPLES", 1000)
        for window in (10, 20, 1e300):  # the whole sound: its level is -12.04 dBFS
            assert _measure(_sound(samples), -12.1, "rms", window).share == 0
            assert _measure(_sound(samples), -12.0, "rms", window).share == 1


def test_too_many_samples_are_not_decoded(monkeypatch):
    """A header that promises more samples than the limit, over all channels, is refused before anything is decoded."""
    monkeypatch.setattr(silence_module, "MAX_SAMPLES", 199)
    with pytest.raises(MediaError, match="100 samples in each of 2 channels, expected at most 199"):
        _measure(_sound(np.zeros((100, 2))))
    assert _measure(_sound(np.zeros((99, 2)))).share == 1


@pytest.mark.parametrize("form", ["FLAC", "MP3"])
def test_a_truncated_sound_is_unreadable(form):
    """A compressed sound that cannot be decoded to the length in its header has no measure."""
    samples = np.random.default_rng(0).normal(0, 0.1, RATE * 3).astype(np.float32)
    data = _sound(samples, form)
    cut = data[: len(data) // 2]
    with pytest.raises(MediaError):
        _measure(cut)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), form=st.sampled_from(["WAV", "FLAC", "OGG", "MP3"]))
def test_damaged_sounds_are_measured_or_refused(data, form):
    """Truncated or with any bytes changed, a sound has a measure within bounds or raises MediaError."""
    good = bytearray(_sound(_tone(0.3, 0.2), form))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    with contextlib.suppress(MediaError):
        found = _measure(memoryview(bytes(good)))
        assert 0 <= found.share <= 1
        assert found.leading_seconds >= 0
        assert found.trailing_seconds >= 0
