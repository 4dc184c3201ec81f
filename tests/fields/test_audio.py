import io
import struct

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mm_assets.errors import EncodeError, FormatError, LimitError
from mm_assets.fields import Audio, AudioField
from mm_assets.media import flac
from mm_assets.testing import FieldSuite, damaged

from .conftest import sound_file, wav_file

RATE = 16_000
SHORTS = (np.sin(np.arange(60) / 5) * 20_000).astype(np.int16)
STEREO = np.stack([SHORTS, -SHORTS], axis=1)
FLOATS = (SHORTS / np.float32(32768)).astype(np.float32)
WAV = wav_file(STEREO, RATE)


def as_audio(samples, rate=RATE):
    floats = samples.astype(np.float32) / np.float32(32768) if samples.dtype == np.int16 else samples
    return Audio(floats if floats.ndim == 2 else floats[:, np.newaxis], rate)


class TestAudioField(FieldSuite):
    fields = [
        AudioField(),
        AudioField(encoding="flac"),
        AudioField(encoding="pcm16", sample_rate=RATE),
        AudioField(decoded="int16"),
        AudioField(max_frames=7),
    ]
    cases = [
        (WAV, as_audio(STEREO)),
        ((SHORTS, RATE), as_audio(SHORTS)),
        ((FLOATS, 44_100), as_audio(FLOATS, 44_100)),
        (Audio(STEREO, np.int64(8000)), as_audio(STEREO, 8000)),
        ((STEREO.astype(">i2")[::2], RATE), as_audio(STEREO[::2])),
        (bytearray(sound_file(SHORTS, RATE, "FLAC")), as_audio(SHORTS)),
    ]
    empty = ((np.zeros((0, 2), np.int16), RATE), as_audio(np.zeros((0, 2), np.int16)))
    maximum = (AudioField(max_frames=60), WAV)
    past_maximum = (AudioField(max_frames=59), WAV)
    wrong_types = ["path.wav", [1, 2], SHORTS, (SHORTS,), (SHORTS.tolist(), RATE), (SHORTS, 16_000.0), (SHORTS, True)]
    wrong_shapes = [
        (SHORTS.astype(np.int32), RATE),
        (SHORTS.reshape(3, 4, 5), RATE),
        (np.int16(3) * np.ones((), np.int16), RATE),
        (SHORTS, 0),
        (SHORTS, -8000),
        (np.zeros((4, 0), np.int16), RATE),
        (np.array([np.nan], np.float32), RATE),
        b"",
        b"no sound",
        WAV[:30],
    ]
    bad_configs = [
        {"encoding": "mp3"},
        {"sample_rate": 0},
        {"sample_rate": 44.1},
        {"decode_rate": 0},
        {"decode_channels": 0},
        {"decode_length": 100},
        {"decode_length": 100, "decode_rate": 16_000},
        {"decode_length": 100, "decode_channels": 1},
        {"decoded": "int32"},
        {"max_frames": 0},
    ]

    def test_an_empty_sound_decodes(self):
        """A sound without samples has its channels and rate."""
        for encoding in ("keep", "pcm16", "float32", "flac"):
            field = AudioField(encoding=encoding)
            found = field.decode(*field.encode((np.zeros((0, 2), np.int16), RATE)))
            assert found.samples.shape == (0, 2)
            assert found.duration_seconds == 0.0


@given(
    hnp.arrays(np.int16, st.tuples(st.integers(1, 40), st.integers(1, 3))),
    st.sampled_from(["keep", "pcm16", "float32", "flac"]),
    st.integers(1, 65_535),  # past it, FLAC has only multiples of 10
)
@settings(deadline=None, max_examples=60)
def test_16_bit_samples_are_exact_in_every_encoding(samples, encoding, rate):
    """int16 samples come back exactly, as int16 and as floats of x / 32768, whatever they are stored as."""
    field = AudioField(encoding=encoding, decoded="int16")
    payload = field.encode((samples, rate))
    found = field.decode(*payload)
    assert found == Audio(samples, rate)
    assert found.samples.dtype == np.int16
    floats = AudioField(encoding=encoding).decode(*payload).samples
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, samples / np.float32(32768))


@pytest.mark.parametrize(
    ("codec", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("WAV", "PCM_U8"),
        ("WAV", "PCM_24"),
        ("WAV", "FLOAT"),
        ("WAV", "DOUBLE"),
        ("WAV", "ULAW"),
        ("WAV", "IMA_ADPCM"),
        ("FLAC", "PCM_16"),
        ("FLAC", "PCM_24"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
    ],
)
def test_files_are_kept_and_decode_as_libsndfile_does(codec, subtype):
    """A sound file is stored byte for byte and decodes to libsndfile's samples; damage is an error or a value."""
    samples = np.sin(np.arange(2400) / 9).astype(np.float32)[:, np.newaxis] * np.float32(0.7)
    data = sound_file(samples, 48_000, codec, subtype)
    field = AudioField()
    encoded = field.encode(data)
    assert encoded.data == data
    found = field.decode(*encoded)
    expected, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert found == Audio(expected, rate)
    shorts = AudioField(decoded="int16").decode(*encoded).samples
    np.testing.assert_allclose(shorts / 32768, expected, atol=1.01 / 32768)
    again = AudioField(encoding="flac", decoded="int16")
    np.testing.assert_array_equal(again.decode(*again.encode(data)).samples, shorts)
    for broken in list(damaged(*map(bytes, encoded)))[::5]:
        try:
            field.decode(*broken)
        except FormatError as error:
            assert error.path == "<payload>"  # noqa: PT017  # the bytes may also be valid


@pytest.mark.parametrize("codec", ["WAV", "FLAC", "OGG", "AIFF", "AU", "CAF", "W64"])
def test_a_file_of_another_codec_than_its_record_names_is_refused(codec):
    """A record with the codec of another format is refused by decoding and by the check, though libsndfile opens it."""
    field, short = AudioField(), (np.arange(60) * 100).astype(np.int16)
    encoded = field.encode(sound_file(short, RATE, codec))
    right = np.frombuffer(bytes(encoded.metadata), field.metadata_type).copy()
    others = {3, 4, 5, 32, 33, 34, 35} - {int(right["codec"][0])}  # docs/spec/fields.md has the numbers
    assert len(others) == 6
    for number in others:
        record = right.copy()
        record["codec"] = number
        for judge in (field.decode, field.check_decodable):
            with pytest.raises(FormatError):
                judge(record.tobytes(), encoded.data)


def test_bare_samples_take_the_fields_rate():
    """Where the field has a rate, samples may come without one, and other rates are refused while encoding."""
    field = AudioField(sample_rate=RATE)
    assert field.decode(*field.encode(SHORTS)) == as_audio(SHORTS)
    for wrong in ((SHORTS, 8000), wav_file(SHORTS, 8000)):
        with pytest.raises(LimitError, match=r"found 8000 Hz, .* nothing is resampled .* \(sample_rate\)"):
            field.encode(wrong)


@pytest.mark.parametrize("decoded", ["float32", "int16"])
@pytest.mark.parametrize("rate", [8000, 16_000, 44_100, 48_000])
def test_decode_rate_resamples(rate, decoded):
    """Payloads of any rate decode to the field's, with the same pitch and length."""
    tone = np.sin(2 * np.pi * 440 / rate * np.arange(rate // 2)).astype(np.float32) * np.float32(0.9)
    field = AudioField(decode_rate=16_000, decoded=decoded)
    for value in ((tone, rate), sound_file(tone, rate, "FLAC"), sound_file(tone, rate, "MP3")):
        payload = AudioField().encode(value)
        field.check_decodable(*payload)
        found = field.decode(*payload)
        assert (found.sample_rate, found.samples.dtype) == (16_000, decoded)
        assert found.duration_seconds == pytest.approx(AudioField().decode(*payload).duration_seconds, abs=1 / 16_000)
        spectrum = np.abs(np.fft.rfft(found.samples[:, 0] * np.hanning(len(found.samples))))
        assert spectrum.argmax() * 16_000 / len(found.samples) == pytest.approx(440, abs=3)


def test_floats_beyond_one_are_refused_not_clipped():
    """Floats outside [-1, 1] are kept as floats, and do not fit 16 bits."""
    loud = np.array([0.5, -1.5], np.float32)
    for encoding in ("pcm16", "flac"):
        with pytest.raises(EncodeError, match="floats in"):
            AudioField(encoding=encoding).encode((loud, RATE))
    field = AudioField()
    np.testing.assert_array_equal(field.decode(*field.encode((loud, RATE))).samples[:, 0], loud)


def test_a_huge_claim_allocates_nothing():
    """A header that claims more samples than the limit, or than are there, is refused before anything is decoded."""
    metadata, data = AudioField().encode(sound_file(SHORTS, RATE, "FLAC"))
    claim = bytearray(data)
    claim[21] |= 0x0F  # the high bits of STREAMINFO's sample count
    with pytest.raises(EncodeError, match="max_frames"):
        AudioField().encode(bytes(claim))
    with pytest.raises(FormatError):
        AudioField().decode(metadata, bytes(claim))
    record = metadata[:8] + struct.pack("<Q", 2**63)
    with pytest.raises(FormatError, match="not as its record says"):
        AudioField().decode(record, data)


def test_a_truncated_wav_says_how_much_is_there():
    """A WAV whose data chunk claims more than the file holds is refused when it is decoded, with both lengths."""
    payload = AudioField().encode(WAV[:-10])  # two and a half frames of 4 bytes
    for judge in (AudioField().decode, AudioField().check_decodable):
        with pytest.raises(FormatError, match=r"wav is truncated: 0\.0036 of 0\.0037 s are there"):
            judge(*payload)


def test_samples_of_other_kinds_whose_meaning_is_clear(tmp_path):
    """float64, lists of floats, tensors and the path of a file are stored as float32 samples and as the file."""
    field = AudioField(sample_rate=RATE)

    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return STEREO

    for value in (FLOATS.astype(np.float64), FLOATS.tolist(), (FLOATS.tolist(), RATE)):
        assert field.decode(*field.encode(value)) == as_audio(FLOATS)
    assert field.encode((Tensor(), RATE)) == field.encode(Tensor()) == field.encode(STEREO)
    (tmp_path / "x.wav").write_bytes(WAV)
    assert field.encode(tmp_path / "x.wav") == field.encode(WAV)
    field.check(tmp_path / "x.wav")
    for unclear in ([1, 2], [[0.5], [0.5, 0.5]], tmp_path / "absent.wav", tmp_path, [1e300, 0.0]):
        with pytest.raises(EncodeError):
            field.encode(unclear)


def test_a_file_that_cannot_be_decoded_says_so():
    """A file that ends early is refused, with its codec and the decoder's words, where samples are needed of it."""
    data = sound_file(np.arange(9000, dtype=np.int16), 8000, "FLAC")
    with pytest.raises(EncodeError, match=r"found flac bytes that cannot be decoded \(.*\), expected an audio file"):
        AudioField(encoding="pcm16").encode(data[: len(data) // 2])


@pytest.mark.parametrize("num_samples", [1, 4096, 10_000, 700_001])
@pytest.mark.parametrize("tag", [b"", b"ID3\x04\x00\x00\x00\x00\x00\x05extra"])
def test_a_flac_of_unknown_length_is_measured_by_its_last_frame(num_samples, tag):
    """A FLAC written to a pipe, which has no length in its header, is kept and decodes to all of its samples."""
    samples = (np.sin(np.arange(num_samples * 2) / 7) * 9000).astype(np.int16).reshape(-1, 2)
    data = sound_file(samples, 44_100, "FLAC")
    piped = tag + flac.with_length(data, 0, 0)
    field = AudioField(decoded="int16")
    encoded = field.encode(piped)
    assert encoded.data == piped
    assert field.decode(*encoded) == Audio(samples, 44_100)
    with pytest.raises(EncodeError, match="length"):
        field.encode(piped[:-1])


def test_real_sounds(shared_data, members_of):
    """Every recording of the sample corpora is kept byte for byte and decodes to libsndfile's samples."""
    count = 0
    for name, data in members_of(shared_data, (".wav", ".flac")):
        count += 1
        encoded = AudioField().encode(data)
        assert encoded.data == data
        if soundfile.info(io.BytesIO(data)).frames > 2**40:  # of unknown length, which libsndfile does not read
            assert AudioField().decode(*encoded).duration_seconds > 1
            continue
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
        assert AudioField().decode(*encoded) == Audio(samples, rate), name
    assert count > 70
