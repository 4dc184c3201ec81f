"""Windows of audio: the same samples as the slice of the whole, for every codec, rate and number of channels."""

import io
from fractions import Fraction

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import FormatError, LimitError
from mm_assets.fields import AudioField
from mm_assets.media.sound_files import read_audio_range

from .conftest import sound_file
from .test_audio_corpus import BY_AV, BY_HAND, BY_SNDFILE, made, tone

SECONDS = 4.0
AAC = ("m4a aac", "m4a aac, moov first", "adts")
RESAMPLED = 2e-6  # how far soxr's results differ where its blocks begin elsewhere
# Files whose samples are found by their places or times; the others are decoded from their start.
SOUGHT = {name for name in (*BY_SNDFILE, *BY_AV) if name not in ("wav gsm", "caf alac, a file of ffmpeg", "wma")}
SOUGHT -= {"ac-3", "e-ac-3", "wavpack", "ogg flac"}


def whole(name):
    """The payload of a format's file, and its decoded samples and rate."""
    # FFmpeg's encoder of AAC leaves noise to the decoder (PNS), which draws other noise after a seek.
    payload = AudioField().encode(made(name, SECONDS, aac_pns="0") if name in AAC else made(name, SECONDS))
    audio = AudioField().decode(*payload)
    return payload, audio.samples, audio.sample_rate


windows = st.tuples(
    st.one_of(st.just(0.0), st.floats(0, SECONDS + 0.5)), st.one_of(st.floats(0.001, 1.0), st.just(2 * SECONDS))
)


@pytest.mark.parametrize("name", [*BY_SNDFILE, *BY_AV, *BY_HAND])
def test_a_window_is_the_slice_of_the_whole(name):
    """Wherever it begins and ends, its samples are those of the decoded file: the same bits, of MPEG and Opus to 1e-6.

    Their decoders add in another order, or carry a state, after a seek.
    """
    payload, samples, rate = whole(name)

    @settings(max_examples=6, derandomize=True, database=None)
    @given(windows)
    def check(window):
        found = AudioField().decode_window(*payload, *window)
        start, count = (round(Fraction(seconds) * rate) for seconds in window)
        assert found.sample_rate == rate
        tolerance = 1e-6 if "mp" in name or "opus" in name else 0
        np.testing.assert_allclose(found.samples, samples[start : start + count], rtol=0, atol=tolerance, strict=True)

    check()


@pytest.mark.parametrize("name", ["wav pcm 16", "mp3", "m4a aac", "webm opus"])
@pytest.mark.parametrize("rate", [8000, 22_050, 48_000])
def test_a_resampled_window_is_the_slice_of_the_resampled_whole(name, rate):
    """To 2e-6, also at both ends; twice the same window gives the same bits."""
    payload, _, _ = whole(name)
    field = AudioField(decode_rate=rate, decode_channels=2)
    expected = field.decode(*payload).samples
    for start, seconds in ((0.0, 0.25), (1.37, 0.5), (SECONDS - 0.3, 2.0)):
        found = field.decode_window(*payload, start, seconds).samples
        first = round(start * rate)
        np.testing.assert_allclose(
            found, expected[first : first + round(seconds * rate)], rtol=0, atol=RESAMPLED, strict=True
        )
        np.testing.assert_array_equal(field.decode_window(*payload, start, seconds).samples, found)


@pytest.mark.parametrize("name", sorted(SOUGHT))
def test_a_window_is_found_by_seeking(name):
    """Without decoding what is before it."""
    payload, samples, _ = whole(name)
    codec = {number: codec for codec, number in _codecs().items()}[payload.metadata[6]]
    assert read_audio_range(payload.data, codec, len(samples), 1000, 3000, "float32") is not None


def _codecs():
    from mm_assets.fields import audio

    return audio._CODECS


def test_noise_that_aac_leaves_to_the_decoder_is_in_the_same_place():
    """A window of AAC with noise substitution has other noise, as after any seek, but begins at the same sample."""
    data = made("m4a aac", SECONDS)
    payload = AudioField().encode(data)
    samples = AudioField().decode(*payload).samples[44_100:88_200, 0]
    found = AudioField().decode_window(*payload, 1.0, 1.0).samples[:, 0]
    lags = {lag: np.corrcoef(found[10:-10], np.roll(samples, lag)[10:-10])[0, 1] for lag in range(-5, 6)}
    assert max(lags, key=lags.get) == 0
    assert lags[0] > 0.99


def test_a_long_mp3_decodes_in_blocks_as_in_one():
    """Blocks of a file continue each other, though a frame may take bits from those before it."""
    data = sound_file(np.stack([tone(44_100, 5)] * 2, axis=1), 44_100, "MP3")
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_array_equal(AudioField().decode(*AudioField().encode(data)).samples, expected)


def test_batches_are_padded_and_masked():
    """With `decode_length` values are arrays: longer ones are truncated, shorter ones end with zeros."""
    field = AudioField(decode_rate=16_000, decode_channels=1, decode_length=16_000)
    long, short = (AudioField().encode((tone(8000, seconds), 8000)) for seconds in (3, 0.5))
    records = np.frombuffer(long.metadata + bytes(16) + short.metadata, np.uint8).reshape(3, -1)
    found, present = field.decode_batch(records, [long.data, None, short.data])
    assert present.tolist() == [True, False, True]
    assert found["mask"].sum(axis=1).tolist() == [16_000, 0, 8000]
    assert found["samples"].shape == (3, 16_000)
    assert not found["samples"][2, 8000:].any()
    np.testing.assert_allclose(found["samples"][0], field.decode(*long).samples[:16_000, 0], rtol=0, atol=RESAMPLED)
    np.testing.assert_array_equal(found["samples"][2, :8000], field.decode(*short).samples[:, 0])


def test_channels_are_mixed():
    """Stereo becomes its mean, mono two equal channels; other changes are a limit that names the setting."""
    stereo = AudioField().encode((np.array([[0.5, 0.25], [-0.5, 0.0]], np.float32), 8000))
    mono = AudioField(decode_channels=1).decode(*stereo)
    assert mono.samples.tolist() == [[0.375], [-0.25]]
    three = AudioField(decode_channels=3)
    for judge in (three.decode, three.check_decodable):
        with pytest.raises(LimitError, match="decode_channels"):
            judge(*stereo)
    assert AudioField(decode_channels=2).decode(*AudioField().encode((mono.samples, 8000))).samples.shape == (2, 2)


def test_another_rate_than_the_fields_is_refused():
    """A payload of another rate than `sample_rate` is not resampled silently."""
    payload = AudioField().encode((tone(8000), 8000))
    for judge in (AudioField(sample_rate=16_000).decode, AudioField(sample_rate=16_000).check_decodable):
        with pytest.raises(LimitError, match="decode_rate resamples"):
            judge(*payload)


@pytest.mark.parametrize("name", ["wav pcm 16", "flac 16", "ogg vorbis", "mp3", "m4a aac", "webm opus"])
def test_a_damaged_window_is_refused_or_decodes(name):
    """A truncated file, a record that claims more, and changed bytes give a `FormatError` or samples."""
    payload, samples, rate = whole(name)
    rng = np.random.default_rng(0)
    for _ in range(4):
        changed = bytearray(payload.data)
        for place in rng.integers(0, len(changed), 30).tolist():
            changed[place] ^= 0xFF
        for data in (bytes(changed), payload.data[: int(rng.integers(0, len(payload.data)))]):
            try:
                found = AudioField().decode_window(payload.metadata, data, 1.5, 0.5)
            except FormatError:
                continue
            assert found.samples.shape == (rate // 2, samples.shape[1])
    claims = payload.metadata[:8] + (2**50).to_bytes(8, "little")
    with pytest.raises(FormatError):
        AudioField().decode_window(claims, payload.data, 3600.0, 1.0)
