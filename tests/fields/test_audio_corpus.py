"""Audio files of many formats, whole and damaged: each decodes as its reference decoder does, or says why not."""

import functools
import io
import re
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from mm_assets.errors import EncodeError, FormatError, LimitError
from mm_assets.fields import Audio, AudioField, SyncedVideoAudioField
from mm_assets.media import stderr
from mm_assets.media.sound import index_sound

from .clips import clip_file, ramp, with_ogg_checksums
from .conftest import sound_file

BY_SNDFILE = {  # (container, subtype, rate)
    "wav pcm 8": ("WAV", "PCM_U8", 16_000),
    "wav pcm 16": ("WAV", "PCM_16", 16_000),
    "wav pcm 24": ("WAV", "PCM_24", 16_000),
    "wav pcm 32": ("WAV", "PCM_32", 16_000),
    "wav float": ("WAV", "FLOAT", 16_000),
    "wav double": ("WAV", "DOUBLE", 16_000),
    "wav mu-law": ("WAV", "ULAW", 8000),
    "wav a-law": ("WAV", "ALAW", 8000),
    "wav ima adpcm": ("WAV", "IMA_ADPCM", 16_000),
    "wav ms adpcm": ("WAV", "MS_ADPCM", 16_000),
    "wav gsm": ("WAV", "GSM610", 8000),
    "rf64": ("RF64", "PCM_16", 16_000),
    "w64": ("W64", "PCM_16", 16_000),
    "aiff": ("AIFF", "PCM_16", 16_000),
    "aifc": ("AIFF", "ULAW", 8000),
    "au": ("AU", "PCM_16", 16_000),
    "caf": ("CAF", "PCM_24", 16_000),
    "caf alac": ("CAF", "ALAC_16", 16_000),
    "flac 16": ("FLAC", "PCM_16", 16_000),
    "flac 24": ("FLAC", "PCM_24", 16_000),
    "ogg vorbis": ("OGG", "VORBIS", 16_000),
    "ogg opus": ("OGG", "OPUS", 48_000),
    "mp3": ("MP3", "MPEG_LAYER_III", 16_000),
}
BY_AV = {  # (muxer, encoder, rate, options of the muxer, options of the encoder)
    "mp3 cbr, no xing": ("mp3", "libmp3lame", 44_100, {"write_xing": "0"}, {"b": "64000"}),
    "mp3 vbr, no xing": ("mp3", "libmp3lame", 44_100, {"write_xing": "0", "id3v2_version": "0"}, {"q": "5"}),
    "mp3 of mpeg 2": ("mp3", "libmp3lame", 22_050, {"write_xing": "0"}, {}),
    "mp3 of mpeg 2.5": ("mp3", "libmp3lame", 11_025, {"write_xing": "0"}, {}),
    "mp3 in wav": ("wav", "libmp3lame", 44_100, {}, {}),
    "mp2": ("mp2", "mp2", 44_100, {}, {"b": "64000"}),
    "m4a aac": ("ipod", "aac", 44_100, {}, {}),
    "m4a aac, moov first": ("ipod", "aac", 44_100, {"movflags": "faststart"}, {}),
    "m4a alac": ("ipod", "alac", 44_100, {}, {}),
    "caf alac, a file of ffmpeg": ("caf", "alac", 44_100, {}, {}),
    "adts": ("adts", "aac", 44_100, {}, {}),
    "ac-3": ("ac3", "ac3", 48_000, {}, {}),
    "e-ac-3": ("eac3", "eac3", 48_000, {}, {}),
    "wavpack": ("wv", "wavpack", 44_100, {}, {}),
    "webm opus": ("webm", "libopus", 48_000, {}, {}),
    "mka flac": ("matroska", "flac", 44_100, {}, {}),
    "ogg flac": ("ogg", "flac", 44_100, {}, {}),
    "wma": ("asf", "wmav2", 44_100, {}, {"b": "64000"}),
}
BY_HAND = {"speex": 8000, "amr": 8000, "amr wide band": 16_000}  # rates: PyAV decodes them, and encodes none
AMR = {
    "amr": (b"#!AMR\n", (13, 14, 16, 18, 20, 21, 27, 32)),
    "amr wide band": (b"#!AMR-WB\n", (18, 24, 33, 37, 41, 47)),
}
NO_XING = ("mp3 cbr, no xing", "mp3 vbr, no xing", "mp3 of mpeg 2", "mp3 of mpeg 2.5", "mp2")
MP3_BY_WALK = (*NO_XING, "mp3 in wav")  # decoded by libsndfile, measured by us
NO_TOTAL = (*NO_XING, "adts", "ac-3", "e-ac-3", *AMR)  # no length is in the file
REFUSED = re.compile(
    "cannot be decoded|is damaged|is truncated|ends early|not as its record|cannot be read|not readable audio|header|"
    "has no samples|has no audio stream|has no frame|has no length|longer than its record|has video|channels at|"
    r"samples per channel|does not|begins with|at most \d+ \(max_frames\)|audio of 0 Hz|found (a table|\d+ )|expected"
)
UNDETECTED = (*AMR, "wav", "rf64", "w64", "ai", "au", "caf", "mp", "adts", "m4a", "e-ac-3", "wma", "webm")


IN_BLOCKS = ("wav ms adpcm", "wav gsm")


def tone(rate, seconds=0.3):
    count = round(rate * seconds)
    noise = np.random.default_rng(0).standard_normal(count) * 0.05
    return (np.sin(np.arange(count) / 9) * 0.5 + noise).astype(np.float32)


@functools.cache
def made(name, seconds=0.3, **options):
    """The bytes of a format's file: mono; of those that are encoded here of any length, with options of PyAV's."""
    if name in BY_SNDFILE:
        container, subtype, rate = BY_SNDFILE[name]
        return sound_file(tone(rate, seconds), rate, container, subtype)
    if name == "speex":  # `tone` as speexenc stores it, with its lowest quality
        return Path(__file__).with_name("tone.spx").read_bytes()
    if name in AMR:  # a header byte and any bits are a frame
        magic, sizes = AMR[name]
        bits = np.random.default_rng(0)
        return magic + b"".join(
            bytes([k % len(sizes) << 3 | 4]) + bits.bytes(sizes[k % len(sizes)] - 1) for k in range(15)
        )
    muxer, encoder, rate, muxing, encoding = BY_AV[name]
    with tempfile.NamedTemporaryFile() as file:  # by its name: to move its header to the front, a file is read again
        _write(file.name, muxer, encoder, rate, muxing, {**encoding, **options}, seconds)
        return file.read()


def _write(path, muxer, encoder, rate, muxing, encoding, seconds=0.3):
    with av.open(path, "w", format=muxer, options=muxing) as out:
        stream = out.add_stream(encoder, rate=rate, layout="mono", options=encoding)
        kind = stream.codec_context.format.name
        samples = tone(rate, seconds)
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(format=kind, layout="mono", rate=rate, frame_size=size)
        frame = av.AudioFrame.from_ndarray(samples[np.newaxis], format="fltp", layout="mono")
        frame.sample_rate = rate
        done = 0
        for source in (frame, None):
            for piece in resampler.resample(source):
                piece.pts, piece.time_base = done, Fraction(1, rate)
                done += piece.samples
                out.mux(stream.encode(piece))
        out.mux(stream.encode(None))


def by_reference(name, data):
    """(n, 1) float32 that soundfile, or PyAV with every packet in turn, decodes; None where it refuses."""
    scales = {"s16": 2.0**15, "s32": 2.0**31, "flt": 1.0}
    try:
        if name in BY_SNDFILE:
            with soundfile.SoundFile(io.BytesIO(data)) as sound:
                return sound.read(frames=min(sound.frames, 10**6), dtype="float32", always_2d=True)
        with av.open(io.BytesIO(data)) as container:
            parts = [
                (frame.to_ndarray() / scales[frame.format.packed.name]).reshape(-1, 1)
                for frame in container.decode(container.streams.audio[0])
            ]
        return np.concatenate(parts).astype(np.float32)
    except (soundfile.SoundFileError, av.FFmpegError, ValueError, IndexError):
        return None


def damages(data):
    """Damaged copies, by name."""
    size = len(data)
    flipped = bytearray(data)
    for at in np.random.default_rng(size).integers(size // 8, size, 4):
        flipped[at] ^= 0x55
    middle = size * 5 // 8
    return {
        **{f"truncated to {part} of 10": data[: size * part // 10] for part in (1, 5, 9)},
        "zeroed": data[:middle] + bytes(min(300, size - middle)) + data[middle + 300 :],
        "flipped": bytes(flipped),
        "trailing": data + b"trailing bytes\0\0",
        "empty": b"",
    }


def answer(judge):
    """What a call returns, or the words of the error that it may raise."""
    try:
        return judge()
    except (EncodeError, FormatError) as error:
        reason = str(error)
    assert REFUSED.search(reason), reason
    assert " object at 0x" not in reason
    return reason


def samples_or_reason(field, data, payload=None):
    """What a file encodes and decodes to, after the cheaper check gave the same verdict."""
    encoded = payload or answer(lambda: field.encode(data))
    if isinstance(encoded, str):
        return encoded
    found = answer(lambda: field.decode(*encoded))
    checked = answer(lambda: field.check_decodable(*encoded))
    assert checked == (found if isinstance(found, str) else None)
    return found


def assert_as_reference(name, found, expected):
    assert expected is not None
    if name in IN_BLOCKS:  # libsndfile fills up the last block, whose end is in the chunk `fact`
        expected = expected[: round(BY_SNDFILE[name][2] * 0.3)]
    if name in MP3_BY_WALK:  # another decoder than the reference's: libmpg123
        assert len(found.samples) == len(expected)
        np.testing.assert_allclose(found.samples, expected, atol=1 / 8000)
    else:
        np.testing.assert_array_equal(found.samples, expected)


@pytest.mark.parametrize("name", [*BY_SNDFILE, *BY_AV, *BY_HAND])
def test_a_whole_file_is_kept_and_decodes_as_its_reference(name):
    """A file of each format is stored byte for byte, and decodes to every sample of the reference decoder."""
    data = made(name)
    field = AudioField()
    encoded = field.encode(data)
    assert encoded.data == data
    found = samples_or_reason(field, data, encoded)
    assert_as_reference(name, found, by_reference(name, data))
    assert found.sample_rate == (BY_HAND.get(name) or (BY_SNDFILE.get(name) or BY_AV[name])[2])
    assert 0.27 < found.duration_seconds < 0.42
    shorts = AudioField(decoded="int16").decode(*encoded).samples
    np.testing.assert_allclose(shorts / 32768, found.samples.clip(-1, 1), atol=1.01 / 32768)
    packed = AudioField(encoding="flac", decoded="int16")
    np.testing.assert_array_equal(packed.decode(*packed.encode(data)).samples, shorts)


@pytest.mark.parametrize("name", [*BY_SNDFILE, *BY_AV, *BY_HAND])
def test_a_damaged_file_decodes_as_its_reference_or_says_why_not(name):
    """Truncated, zeroed, flipped, lengthened and empty files decode as the reference does, or are refused by name."""
    field, whole = AudioField(), made(name)
    record = field.encode(whole).metadata
    for damage, data in damages(whole).items():
        found = samples_or_reason(field, data)
        if isinstance(found, Audio) and name not in MP3_BY_WALK:
            # libsndfile takes what follows the samples of a W64 for more of them.
            assert_as_reference(name, found, by_reference(name, whole if damage == "trailing" else data))
        if damage.startswith("truncated"):
            assert isinstance(found, str) or (name in NO_TOTAL and len(data) < len(whole)), damage
        if damage in ("zeroed", "flipped") and not name.startswith(UNDETECTED):
            assert isinstance(found, str), damage
        if damage == "trailing" and name not in IN_BLOCKS:
            assert isinstance(found, str) or len(found.samples) == len(by_reference(name, whole)), damage
        answered = samples_or_reason(field, data, (record, data))  # damaged after it was packed
        assert isinstance(answered, str | Audio)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wav pcm 16", r"wav is truncated: 0\.14\d\d of 0\.3000 s are there"),
        ("aiff", r"aiff is truncated: 0\.14\d\d of 0\.3000 s"),
        ("flac 16", r"flac is damaged: 0\.\d+ of 0\.3000 s decode"),
        ("mp3", r"mp3 is damaged: 0\.1\d+ of 0\.\d+ s are there"),
        ("ogg vorbis", r"ogg is damaged: .* decode.*, page at byte \d+ ends \d+ bytes after the file"),
        ("m4a aac, moov first", r"mp4 is damaged: 0\.\d+ of 0\.3\d+ s decode, box mdat at byte"),
        ("mka flac", r"matroska is damaged: 0\.1\d+ of 0\.3\d+ s decode"),
        ("wavpack", r"wavpack is truncated: frame \d has \d+ of \d+ bytes"),
        ("adts", r"aac is (truncated|damaged): .* 0\.\d+ s decode"),
    ],
)
def test_a_truncated_file_says_how_much_is_there(name, said):
    """Half of a file is refused with the share that is there, in seconds where the file has its length."""
    data = made(name)
    found = samples_or_reason(AudioField(), data[: len(data) // 2])
    assert re.search(said, found), found


def streamed(name, chunk, size):
    """A file whose chunk of samples has a size that a writer into a pipe leaves."""
    data = made(name)
    at = data.index(chunk) + 4
    return data[:at] + size + data[at + 4 :]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("wav pcm 16", lambda: streamed("wav pcm 16", b"data", bytes(4))),
        ("wav pcm 16", lambda: streamed("wav pcm 16", b"data", b"\xff" * 4)),
        ("wav float", lambda: streamed("wav float", b"data", bytes(4))),
        ("mp3 in wav", lambda: streamed("mp3 in wav", b"data", bytes(4))),
        ("mp3 in wav", lambda: streamed("mp3 in wav", b"data", b"\xff" * 4)),
        ("rf64", lambda: made("rf64").replace(struct.pack("<Q", 2 * 4800), bytes(8), 1)),
        ("aiff", lambda: streamed("aiff", b"SSND", b"\x7f\0\0\x80")),
        ("adts", lambda: b"ID3\x04\0\0\0\0\0\x05extra" + made("adts")),
        ("flac 16", lambda: b"ID3\x04\0\0\0\0\0\x05extra" + made("flac 16")),
        ("mp3", lambda: made("mp3") + bytes(4096)),
    ],
)
def test_files_of_pipes_and_with_tags_are_whole(name, data):
    """A size that was never filled in, a tag before the frames and zeros after them are not damage."""
    expected = AudioField().decode(*AudioField().encode(made(name))).samples
    record, payload = AudioField().encode(data())
    AudioField().check_decodable(record, payload)
    np.testing.assert_array_equal(AudioField().decode(record, payload).samples, expected)


def test_an_ogg_that_was_recorded_has_the_samples_of_its_pages():
    """An Ogg without a last page, as a recorder of a live stream leaves it, decodes to all samples that are there."""
    whole = sound_file(tone(16_000, seconds=4), 16_000, "OGG", "VORBIS")
    recorded = whole[: whole.rindex(b"OggS")]
    found = samples_or_reason(AudioField(), recorded)
    assert_as_reference("ogg vorbis", found, by_reference("ogg vorbis", recorded))
    assert 1 < found.duration_seconds < 4


def test_the_gapless_data_of_itunes_is_applied():
    """An m4a without an edit list begins where its iTunSMPB says, and ends with its last frame, as in FFmpeg."""
    with tempfile.NamedTemporaryFile() as file:
        _write(file.name, "ipod", "aac", 44_100, {"use_editlist": "0"}, {})
        data = file.read()
    text = f" 00000000 {2112:08X} {100:08X} {13_230:016X}" + " 00000000" * 8
    names = box(b"mean", b"com.apple.iTunes") + box(b"name", b"iTunSMPB")
    entry = box(b"----", names + box(b"data", bytes(4) + text.encode(), flags=b"\0\0\0\1"), flags=b"")
    handler = box(b"hdlr", bytes(4) + b"mdirappl" + bytes(9))
    meta = box(b"meta", handler + box(b"ilst", entry, flags=b""))
    at = data.rindex(b"moov") - 4
    moov = box(b"moov", data[at + 8 :] + box(b"udta", meta, flags=b""), flags=b"")  # the last box
    plain, found = (AudioField().decode(*AudioField().encode(file)).samples for file in (data, data[:at] + moov))
    np.testing.assert_array_equal(found, plain[2112:])


def box(kind, body, flags=bytes(4)):
    """A box of an MP4; without `flags` it has neither version nor flags."""
    return struct.pack(">I4s", 8 + len(flags) + len(body), kind) + flags + body


def test_a_clip_ends_where_the_padding_of_its_opus_begins():
    """Opus in WebM has the samples that decode, without the padding of its last packet."""
    data = made("webm opus")
    assert index_sound(data).num_samples == len(by_reference("webm opus", data))


def test_memory_follows_what_decodes_and_not_what_a_record_claims():
    """A record that claims hours of an m4a takes no memory for them, and a long file decodes to its last sample."""
    metadata, data = AudioField().encode(made("m4a aac"))
    claimed = metadata[:8] + struct.pack("<Q", 600_000_000)
    tracemalloc.start()
    with pytest.raises(FormatError, match="ends early"):
        AudioField().decode(claimed, data)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000  # of 2,400,000,000
    tracemalloc.stop()
    ramp = (np.arange(4_500_000) % 251 - 125).astype(np.int16) << 8
    long = sound_file(ramp, 48_000, "WAV", "PCM_U8")
    np.testing.assert_array_equal(AudioField(decoded="int16").decode(*AudioField().encode(long)).samples[:, 0], ramp)


def test_a_file_beyond_max_frames_is_not_called_damaged():
    """A healthy file that is longer than the field allows is refused with the limit and its setting."""
    for name in ("wav pcm 16", "m4a aac", "mp3"):
        field, payload = AudioField(max_frames=100), AudioField().encode(made(name))
        with pytest.raises(LimitError, match=r"expected at most 100 \(max_frames\)"):
            field.encode(made(name))
        for read in (field.decode, field.check_decodable):
            with pytest.raises(LimitError, match=r"at most 100 samples per channel \(max_frames\)"):
                read(*payload)


def test_messages_of_libmpg123_are_withheld_and_others_are_not():
    """Decoding damaged MP3s writes nothing to standard error; what others write meanwhile arrives."""
    data = bytearray(made("mp3"))
    for at in range(len(data) // 3, len(data) - 200, 40):
        data[at] ^= 0xFF if data[at] != 0xFF and data[at - 1] != 0xFF else 0
    script = (
        "import os, sys\n"
        "from mm_assets.fields import AudioField\n"
        "from mm_assets.media.stderr import without_mpg123_messages\n"
        "data = sys.stdin.buffer.read()\n"
        "for piece in (data, data[:700]):\n"
        "    try:\n"
        "        AudioField().decode(*AudioField().encode(piece))\n"
        "    except ValueError:\n"
        "        pass\n"
        "with without_mpg123_messages():\n"
        "    os.write(2, b'[src/libmpg123/layer3.c:1] error: of its own\\nfrom another thread\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=bytes(data), capture_output=True, timeout=200, check=True
    )
    assert done.stderr == b"from another thread\n"


def test_an_mp3_needs_no_room_for_messages(monkeypatch):
    """Where no file can take libmpg123's messages, an MP3 decodes all the same and is not called damaged."""

    def no_room():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stderr, "_file_in_memory", no_room)
    assert len(AudioField().decode(*AudioField().encode(made("mp3"))).samples)


def test_a_file_that_needs_pyav_names_the_command_where_it_is_missing(monkeypatch):
    """Without PyAV an m4a is neither damaged nor refused: the error has the command that installs it."""
    encoded = AudioField().encode(made("m4a aac"))
    monkeypatch.setitem(sys.modules, "av", None)
    for judge in (AudioField().decode, AudioField().check_decodable):
        with pytest.raises(ImportError, match=r"pip install .*video"):
            judge(*encoded)
    with pytest.raises(ImportError, match=r"pip install .*video"):
        AudioField().encode(made("m4a aac"))


@pytest.mark.parametrize("name", [*BY_SNDFILE, *BY_AV, "speex"])
def test_a_clip_and_a_sound_have_the_same_samples(name):
    """A file decodes to the same samples, to the last of them, as audio and as a clip."""
    sound = AudioField().decode(*AudioField().encode(made(name)))
    clip = SyncedVideoAudioField().decode(*SyncedVideoAudioField().encode(made(name)))
    assert clip.audio.sample_rate == sound.sample_rate
    # FFmpeg reads no chunk `fact`, and does not end a Vorbis of a single page where that says so.
    surplus = 320 if name in IN_BLOCKS else 64 if name == "ogg vorbis" else 0
    assert 0 <= len(clip.audio.samples) - len(sound.samples) <= surplus
    tolerance = 1 / 100 if name == "wav ms adpcm" else 1 / 1000 if name == "wav ima adpcm" else 1 / 8000  # of rounding
    np.testing.assert_allclose(clip.audio.samples[: len(sound.samples)], sound.samples.clip(-1, 1), atol=tolerance)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
@pytest.mark.parametrize("channels", range(1, 9))
def test_channels_of_ogg_are_in_the_order_of_every_format(channels, subtype):
    """An Ogg of up to eight channels decodes alike as audio and as a clip: left, right, center, low and so on."""
    shares = np.linspace(0.1, 0.9, channels).astype(np.float32)
    data = sound_file(tone(48_000, seconds=1)[:, np.newaxis] * shares, 48_000, "OGG", subtype)
    sound = AudioField().decode(*AudioField().encode(data)).samples
    clip = SyncedVideoAudioField().decode(*SyncedVideoAudioField().encode(data)).audio.samples
    np.testing.assert_allclose(clip, sound.clip(-1, 1), atol=1 / 8000)


def with_hole(data, seconds):
    """An Ogg whose pages are later by some seconds from its middle on."""
    found, at, times = bytearray(data), 0, []
    while (at := data.find(b"OggS", at)) >= 0:
        times.append(at + 6)
        at += 1
    for place in times[len(times) // 2 :]:
        (time,) = struct.unpack_from("<q", data, place)
        struct.pack_into("<q", found, place, time + round(seconds * 48_000))
    return with_ogg_checksums(bytes(found))


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
@pytest.mark.parametrize("seconds", [0.004, 0.06, 1.5])
def test_holes_in_the_times_of_an_ogg_cost_no_sample(subtype, seconds):
    """Audio has the samples of all packets, whatever its pages say; a clip has silence in a hole of over 0.1 s."""
    whole = sound_file(tone(48_000, seconds=4), 48_000, "OGG", subtype)
    data = with_hole(whole, seconds)
    expected = AudioField().decode(*AudioField().encode(whole)).samples
    payload = AudioField().encode(data)
    AudioField().check_decodable(*payload)
    found = AudioField().decode(*payload).samples
    np.testing.assert_allclose(found, expected[: len(found)], atol=1 / 8000)
    assert len(expected) - len(found) in range(1)
    clip = SyncedVideoAudioField().decode(*SyncedVideoAudioField().encode(data)).audio.samples
    silence = round(seconds * 48_000) if seconds > 0.1 else 0
    assert len(clip) == len(found) + silence
    assert np.flatnonzero(clip.any(axis=1)).size == np.flatnonzero(found.any(axis=1)).size


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_chain_of_oggs_has_the_samples_of_all(subtype):
    """Recordings that follow each other in an Ogg decode one after the other; a record of the first gives that one."""
    parts = [sound_file(ramp(count), 48_000, codec="OGG", subtype=subtype) for count in (9000, 12_000)]
    field = AudioField()
    expected = [field.decode(*field.encode(part)).samples for part in parts]
    chain = b"".join(parts)
    encoded = field.encode(chain)
    field.check_decodable(*encoded)
    np.testing.assert_array_equal(field.decode(*encoded).samples, np.concatenate(expected))
    np.testing.assert_array_equal(field.decode(field.encode(parts[0]).metadata, chain).samples, expected[0])
    with pytest.raises(EncodeError, match="a chain of 2 Ogg files"):
        SyncedVideoAudioField().encode(chain)
    other = sound_file(ramp(900), 24_000, codec="OGG", subtype=subtype)
    with pytest.raises(EncodeError, match="ogg changes to 1 channels at 24000 Hz"):
        field.encode(parts[0] + other)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_records_of_earlier_releases_decode(name):
    """A record that counts the samples that fill up the last block, as libsndfile does, decodes to all of them."""
    metadata, data = AudioField().encode(made(name))
    expected = by_reference(name, data)
    record = bytes(metadata[:8]) + struct.pack("<Q", len(expected))
    AudioField().check_decodable(record, data)
    np.testing.assert_array_equal(AudioField().decode(record, data).samples, expected)


@pytest.mark.parametrize("codec", ["adpcm_yamaha", "g722", "ac3", "wmav2"])
def test_other_encodings_in_a_wav_are_read(codec):
    """A WAV whose encoding libsndfile does not know decodes to the samples that FFmpeg decodes."""
    rate = {"g722": 16_000}.get(codec, 44_100)
    data = clip_file(codec="", container="wav", samples=ramp(20_000), sample_rate=rate, audio_codec=codec)
    sound = AudioField().decode(*AudioField().encode(data))
    AudioField().check_decodable(*AudioField().encode(data))
    clip = SyncedVideoAudioField().decode(*SyncedVideoAudioField().encode(data)).audio
    assert len(sound.samples) > 18_000
    np.testing.assert_array_equal(sound.samples.clip(-1, 1), clip.samples)


@pytest.mark.parametrize(
    ("container", "codec", "num_frames", "rate"),
    [
        ("mp4", "mjpeg", 1, 25),
        ("mp4", "libx264", 1, 25),
        ("matroska", "mjpeg", 1, 25),
        ("mp4", "mjpeg", 3, Fraction(1, 2)),
        ("asf", "mjpeg", 1, 25),
    ],
)
def test_a_cover_that_is_a_track_is_no_video(container, codec, num_frames, rate):
    """A picture track of one frame, or of images that change slowly, as chapters have them, changes no sample."""
    audio = {"samples": ramp(60_000), "sample_rate": 8000, "audio_codec": {"asf": "wmav2"}.get(container, "aac")}
    bare = clip_file(container=container, codec="", **audio)
    data = clip_file(container=container, codec=codec, num_frames=num_frames, rate=rate, **audio)
    found, expected = (AudioField().decode(*AudioField().encode(file)) for file in (data, bare))
    np.testing.assert_array_equal(found.samples, expected.samples)
    moving = clip_file(container=container, codec=codec, num_frames=10, **audio)
    with pytest.raises(EncodeError, match="has video, expected audio alone"):
        AudioField().encode(moving)
