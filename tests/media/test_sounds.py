import io
import struct
import tarfile
import time

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import MediaError
from mm_assets.media import flac
from mm_assets.media.content_types import content_type_of_name, sniff_content_type
from mm_assets.media.mpeg_audio import walk_mp3
from mm_assets.media.sounds import AudioInfo, probe_audio


def sound_file(samples, rate, codec, subtype=None):
    target = io.BytesIO()
    soundfile.write(target, samples, rate, format=codec, subtype=subtype)
    return target.getvalue()


SOUND = (np.sin(np.arange(800) / 9) * 0.5).astype(np.float32)


SOUNDS = {
    "wav": sound_file(SOUND, 8000, "WAV", "PCM_16"),
    "wav stereo": sound_file(np.stack([SOUND, -SOUND], 1), 44_100, "WAV", "PCM_24"),
    "wav float": sound_file(SOUND, 16_000, "WAV", "FLOAT"),
    "wav extensible": sound_file(SOUND, 16_000, "WAVEX", "PCM_32"),
    "wav mulaw": sound_file(SOUND, 8000, "WAV", "ULAW"),
    "wav rf64": sound_file(SOUND, 8000, "RF64", "PCM_16"),
    "flac": sound_file(SOUND, 48_000, "FLAC", "PCM_24"),
    "ogg": sound_file(SOUND, 16_000, "OGG", "VORBIS"),
    "opus": sound_file(SOUND, 48_000, "OGG", "OPUS"),
    "mp3": sound_file(SOUND, 44_100, "MP3", "MPEG_LAYER_III"),
}


def by_sndfile(data: bytes) -> tuple[object, ...]:
    info = soundfile.info(io.BytesIO(data))
    return info.samplerate, info.channels, info.frames, info.subtype


def in_short(info: AudioInfo) -> tuple[object, ...]:
    return info.sample_rate, info.channels, info.num_frames, info.subtype


@pytest.mark.parametrize("name", SOUNDS)
def test_sound_headers_agree_with_libsndfile(name):
    """A header read without decoding says what libsndfile says, for every codec and subtype."""
    info = probe_audio(SOUNDS[name])
    assert info.codec == {"opus": "ogg"}.get(name, name.split()[0])
    assert in_short(info) == by_sndfile(SOUNDS[name])
    assert f"audio/{info.codec}" == sniff_content_type(SOUNDS[name]).replace("mpeg", "mp3")
    assert info.duration_seconds == info.num_frames / info.sample_rate


@pytest.mark.parametrize("subtype", ["MS_ADPCM", "IMA_ADPCM", "GSM610"])
def test_a_wav_in_blocks_has_the_samples_of_its_fact_chunk(subtype):
    """The last block is filled up: the chunk `fact` has the number of samples, unless that is not of these blocks."""
    data = sound_file(np.tile(SOUND, 4)[:2500], 8000, "WAV", subtype)
    at = data.index(b"fact") + 8
    exact = data[:at] + (2500).to_bytes(4, "little") + data[at + 4 :]
    assert in_short(probe_audio(exact)) == (8000, 1, 2500, subtype)
    filled = {
        probe_audio(data[:at] + lie.to_bytes(4, "little") + data[at + 4 :]).num_frames for lie in (0, 9, 2**32 - 1)
    }
    block = {"MS_ADPCM": 500, "IMA_ADPCM": 505, "GSM610": 320}[subtype]
    assert filled == {-(-2500 // block) * block}


def test_the_head_of_a_sound_is_enough():
    """WAV and FLAC tell their length in their first bytes, with the size of the file known."""
    for name in ("wav", "wav stereo", "wav float", "flac"):
        data = SOUNDS[name]
        assert probe_audio(data[:200], size=len(data)) == probe_audio(data)


def test_wav_lengths_that_do_not_hold():
    """A WAV that was streamed or truncated has the frames that are there; an empty one has none."""
    data = SOUNDS["wav"]
    at = data.index(b"data") + 4
    for claim in (0xFFFFFFFF, 0x7FFFFFFF, 0, 10_000_000):
        claimed = data[:at] + struct.pack("<I", claim) + data[at + 4 :]
        assert probe_audio(claimed).num_frames == 800, claim
    assert probe_audio(data[:-101]).num_frames == 800 - 51
    assert probe_audio(data[:at] + bytes(4)).num_frames == 0
    assert probe_audio(data[:at] + struct.pack("<I", 20) + data[at + 4 :]).num_frames == 10


def test_a_flac_of_unknown_length():
    """A FLAC without a length in its header is measured by its last frame; its head alone is refused."""
    piped = flac.with_length(SOUNDS["flac"], 0, 0)
    assert probe_audio(piped) == probe_audio(SOUNDS["flac"])
    assert probe_audio(b"ID3\x04\x00\x00\x00\x00\x00\x02ab" + piped) == probe_audio(SOUNDS["flac"])
    with pytest.raises(MediaError, match="has no length"):
        probe_audio(piped[:300], size=len(piped))
    with pytest.raises(MediaError, match="has no length"):
        probe_audio(piped + b"junk")


def test_the_frames_of_an_mp3_are_its_length():
    """Tags around and between the frames of an MP3 do not count; Xing and VBRI headers are compared with the frames."""
    whole = SOUNDS["mp3"]
    run = walk_mp3(whole)
    assert (run.num_frames, run.claimed_frames, run.problem) == (2, 2, "")
    frames = whole[run.start :]
    id3, ape = b"ID3\x04\0\0\0\0\0\x05extra", b"APETAGEX" + struct.pack("<IIII", 2000, 40, 1, 1 << 31) + bytes(8)
    lyrics = b"LYRICSBEGIN" + b"la " * 1600
    last = len(frames) - walk_mp3(frames[: run.end - run.start - 1]).end
    for tagged in (
        id3 + frames,
        id3 + bytes(30) + frames,
        frames[:-last] + id3 + frames[-last:],
        frames + b"TAG" + bytes(125),
        frames + bytes(4096),
        frames + ape + bytes(8) + ape.replace(struct.pack("<I", 1 << 31), struct.pack("<I", 1 << 31)),
        frames + lyrics + b"%06dLYRICS200" % len(lyrics) + ape + bytes(8) + ape + b"TAG" + bytes(125),
        frames + lyrics + b"LYRICSEND" + b"TAG" + bytes(125),
    ):
        found = walk_mp3(tagged)
        assert (found.num_frames, found.num_samples, found.problem) == (2, 2 * 1152, "")
        assert probe_audio(tagged).num_frames == 2 * 1152
    vbri = bytearray(whole[: run.start])
    vbri[4:] = bytes(len(vbri) - 4)
    vbri[36:54] = b"VBRI" + bytes(10) + struct.pack(">I", 2)
    assert walk_mp3(bytes(vbri) + frames).claimed_frames == 2
    assert probe_audio(bytes(vbri) + frames).num_frames == 2 * 1152


@pytest.mark.parametrize("trailer", [b"junk" * 3000, bytes(9000), SOUNDS["mp3"][:1500]])
def test_what_follows_the_frames_that_are_counted_is_not_audio(trailer):
    """An MP3 with all frames that its Xing header counts is whole, whatever bytes an editor or a disk left after it."""
    whole = SOUNDS["mp3"]
    found, expected = walk_mp3(whole + trailer), walk_mp3(whole)
    assert (found.problem, found.claimed_frames) == ("", expected.num_frames)
    assert probe_audio(whole + trailer) == probe_audio(whole)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda frames: frames[:-3], "its last frame has"),
        (lambda frames: frames[:100] + bytes(1500) + frames[1600:], "are not frames"),
        (lambda frames: frames + b"junk" * 800, "are not frames"),
        (lambda frames: frames + bytes(5000), "are not frames"),
        (lambda frames: frames[:2] + bytes([frames[2] & 0x0F]) + frames[3:], "free format"),
        (lambda frames: b"ID3\x04\0\0\0\0\0\x05extra" + bytes(99), "has no frame at byte 15"),
    ],
)
def test_damage_between_the_frames_of_an_mp3(damage, said):
    """What is not a frame, or only a part of one, is found by the headers alone; the free format is refused by name."""
    whole = sound_file(np.tile(SOUND, 10), 44_100, "MP3", "MPEG_LAYER_III")
    frames = whole[walk_mp3(whole).start :]
    assert walk_mp3(frames).problem == ""
    try:
        found = walk_mp3(damage(frames)).problem
    except MediaError as error:
        found = str(error)
    assert said in found


@pytest.mark.parametrize(
    "data", [b"", b"text", b"\x89PNG\r\n\x1a\n" + bytes(28), b"fLaC", b"RIFF\0\0\0\0WAVE", b"OggS", b"ID3\x03"]
)
def test_what_is_not_a_sound(data):
    """Bytes that are not a sound are a MediaError."""
    with pytest.raises(MediaError, match=r"^<audio>: "):
        probe_audio(data)


def answers(data):
    """Probes bytes; a MediaError is as good an answer as any."""
    try:
        info = probe_audio(data)
    except MediaError:
        return
    assert info.sample_rate > 0 < info.channels
    assert info.num_frames >= 0


@pytest.mark.parametrize("name", SOUNDS)
def test_damaged_sounds(name):
    """Truncated anywhere, or with any byte of the header changed, a sound is probed or refused."""
    data = SOUNDS[name]
    for at in range(min(len(data), 120)):
        for value in (0, 0xFF, data[at] ^ 1):
            answers(data[:at] + bytes([value]) + data[at + 1 :])
        answers(data[:at])


@given(st.sampled_from([data[:44] for data in SOUNDS.values()]), st.binary(max_size=300))
@settings(deadline=None, max_examples=150)
def test_hostile_sounds(head, tail):
    """Whatever bytes follow a sound's magic number, it is probed or refused."""
    answers(head + tail)
    answers(tail)


@pytest.mark.parametrize(
    "data",
    [
        b"RIFF\xff\xff\xff\xffWAVE" + b"junk\0\0\0\0" * 400_000,
        flac.with_length(SOUNDS["flac"], 0, 0) + b"\xff\xf8" * 150_000,
    ],
)
def test_hostile_sounds_take_no_time(data):
    """Megabytes of chunks that lead nowhere, or of what looks like frames, are refused in a moment."""
    start = time.process_time()  # other processes may have the processor meanwhile
    answers(data)
    assert time.process_time() - start < 3


def test_real_sounds(shared_data):
    """Every sound of the sample corpora is probed as libsndfile opens it."""
    num_sounds = 0
    for path in sorted(shared_data.glob("*/*.tar")):
        with tarfile.open(path) as shard:
            for member in shard:
                if content_type_of_name(member.name) in ("audio/wav", "audio/flac"):
                    num_sounds += 1
                    data = shard.extractfile(member).read()
                    info = probe_audio(data)
                    expected = by_sndfile(data)
                    if expected[2] > 2**40:  # a FLAC of unknown length, which libsndfile does not measure
                        assert info.duration_seconds > 1
                    else:
                        assert in_short(info) == expected, member.name
    assert num_sounds > 70
