import io
import struct
import tarfile
import time

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import MediaError
from mm_assets.media import flac
from mm_assets.media import images as media
from mm_assets.media.content_types import content_type_of_name, sniff_content_type
from mm_assets.media.images import ImageInfo, probe_image
from mm_assets.media.sounds import AudioInfo, probe_audio

PIXELS = (np.add.outer(np.arange(11) * 20, np.arange(13) * 3)[:, :, None] + np.arange(4)).astype(np.uint8)
PICTURE = Image.fromarray(PIXELS)


def image_file(image, codec, **options):
    target = io.BytesIO()
    image.save(target, format=codec, **options)
    return target.getvalue()


def sound_file(samples, rate, codec, subtype=None):
    target = io.BytesIO()
    soundfile.write(target, samples, rate, format=codec, subtype=subtype)
    return target.getvalue()


def orientation(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


SOUND = (np.sin(np.arange(800) / 9) * 0.5).astype(np.float32)
IMAGES = {
    "jpeg": image_file(PICTURE.convert("RGB"), "JPEG", exif=orientation(6), comment=b"x" * 100),
    "jpeg grey": image_file(PICTURE.convert("L"), "JPEG", progressive=True),
    "jpeg cmyk": image_file(PICTURE.convert("RGB").convert("CMYK"), "JPEG"),
    "png": image_file(PICTURE, "PNG", exif=orientation(3)),
    "png grey": image_file(PICTURE.convert("L"), "PNG"),
    "png 16": image_file(Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 255), "PNG"),
    "png bits": image_file(PICTURE.convert("1"), "PNG"),
    "png palette": image_file(PICTURE.convert("RGB").convert("P"), "PNG"),
    "png transparent": image_file(PICTURE.convert("RGB").convert("P"), "PNG", transparency=3),
    "apng": image_file(PICTURE, "PNG", save_all=True, append_images=[PICTURE.rotate(180)]),
    "gif": image_file(PICTURE.convert("RGB"), "GIF"),
    "gif frames": image_file(
        PICTURE.convert("RGB"),
        "GIF",
        save_all=True,
        append_images=[Image.new("RGB", PICTURE.size, c) for c in ("red", "blue")],
    ),
    "webp lossy": image_file(PICTURE.convert("RGB"), "WEBP", exif=orientation(8)),
    "webp lossless": image_file(PICTURE, "WEBP", lossless=True),
    "webp simple": image_file(PICTURE.convert("RGB"), "WEBP"),
    "webp frames": image_file(PICTURE, "WEBP", save_all=True, append_images=[PICTURE.rotate(180)]),
    "bmp": image_file(PICTURE.convert("RGB"), "BMP"),
    "bmp palette": image_file(PICTURE.convert("P"), "BMP"),
    "tiff": image_file(PICTURE.convert("RGB"), "TIFF", exif=orientation(5)),
    "tiff bits": image_file(PICTURE.convert("1"), "TIFF", compression="group4"),
    "tiff alpha": image_file(PICTURE, "TIFF", compression="tiff_lzw"),
    "tiff pages": image_file(PICTURE, "TIFF", save_all=True, append_images=[PICTURE.convert("L"), PICTURE]),
    "tiff big": image_file(PICTURE, "TIFF", big_tiff=True),
    "tiff motorola": struct.pack(">2sHIH", b"MM", 42, 8, 3)
    + b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in ((256, 13), (257, 11), (262, 1)))
    + bytes(4),
}
SOUNDS = {
    "wav": sound_file(SOUND, 8000, "WAV", "PCM_16"),
    "wav stereo": sound_file(np.stack([SOUND, -SOUND], 1), 44_100, "WAV", "PCM_24"),
    "wav float": sound_file(SOUND, 16_000, "WAV", "FLOAT"),
    "wav extensible": sound_file(SOUND, 16_000, "WAVEX", "PCM_32"),
    "wav mulaw": sound_file(SOUND, 8000, "WAV", "ULAW"),
    "wav adpcm": sound_file(SOUND, 8000, "WAV", "MS_ADPCM"),
    "wav rf64": sound_file(SOUND, 8000, "RF64", "PCM_16"),
    "flac": sound_file(SOUND, 48_000, "FLAC", "PCM_24"),
    "ogg": sound_file(SOUND, 16_000, "OGG", "VORBIS"),
    "opus": sound_file(SOUND, 48_000, "OGG", "OPUS"),
    "mp3": sound_file(SOUND, 44_100, "MP3", "MPEG_LAYER_III"),
}


def by_pillow(data: bytes) -> tuple[object, ...]:
    """Width, height, channels, frames and orientation as Pillow has them."""
    image = Image.open(io.BytesIO(data))
    width, height = (image.tag_v2[256], image.tag_v2[257]) if image.format == "TIFF" else image.size
    has_alpha = "A" in image.mode or "transparency" in image.info
    channels = 4 if has_alpha else 1 if image.mode in ("1", "L", "I;16", "I") else 3
    if image.format == "BMP":
        channels = max(channels, 3)  # Pillow takes a palette of greys for grey
    num_frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    return width, height, channels, num_frames, image.getexif().get(0x0112, 1)


def in_short(info: ImageInfo) -> tuple[object, ...]:
    return info.width, info.height, info.channels, info.num_frames, info.orientation


def by_sndfile(data: bytes) -> tuple[object, ...]:
    info = soundfile.info(io.BytesIO(data))
    return info.samplerate, info.channels, info.frames, info.subtype


def sound_in_short(info: AudioInfo) -> tuple[object, ...]:
    return info.sample_rate, info.channels, info.num_frames, info.subtype


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "tiff motorola"])  # that one is a bare header
def test_image_headers_agree_with_pillow(name):
    """A header read without decoding says what Pillow says, for every codec and kind."""
    info = probe_image(IMAGES[name])
    assert info.codec == name.split()[0].replace("apng", "png")
    assert info.content_type == f"image/{info.codec}" == sniff_content_type(IMAGES[name])
    assert in_short(info) == by_pillow(IMAGES[name])
    assert info.has_8bit_form


def test_both_byte_orders_of_tiff():
    """A big-endian TIFF header reads as a little-endian one does."""
    assert in_short(probe_image(IMAGES["tiff motorola"])) == (13, 11, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "bit_depth"), [("png bits", 1), ("png 16", 16), ("tiff bits", 1), ("png", 8), ("gif", 8), ("jpeg", 8)]
)
def test_bit_depth(name, bit_depth):
    """The depth of the stored samples is reported."""
    assert probe_image(IMAGES[name]).bit_depth == bit_depth


def test_images_without_an_8_bit_form():
    """Floating-point and signed TIFFs and 12-bit JPEGs are reported as having no 8-bit form."""
    assert not probe_image(image_file(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF")).has_8bit_form
    assert not probe_image(image_file(Image.fromarray(np.ones((2, 2), np.int32)), "TIFF")).has_8bit_form
    at = IMAGES["jpeg"].index(b"\xff\xc0") + 4
    assert not probe_image(IMAGES["jpeg"][:at] + b"\x0c" + IMAGES["jpeg"][at + 1 :]).has_8bit_form


@pytest.mark.parametrize("name", [name for name in IMAGES if name.split()[0] in ("jpeg", "png", "bmp", "webp")])
def test_the_head_of_an_image_is_enough(name):
    """JPEG, PNG, BMP and WebP tell their size in their first bytes."""
    data = IMAGES[name] + bytes(100_000)
    whole, head = probe_image(data), probe_image(data[:1500])
    assert (head.width, head.height, head.channels) == (whole.width, whole.height, whole.channels)


@pytest.mark.parametrize("name", SOUNDS)
def test_sound_headers_agree_with_libsndfile(name):
    """A header read without decoding says what libsndfile says, for every codec and subtype."""
    info = probe_audio(SOUNDS[name])
    assert info.codec == {"opus": "ogg"}.get(name, name.split()[0])
    assert sound_in_short(info) == by_sndfile(SOUNDS[name])
    assert info.content_type == sniff_content_type(SOUNDS[name])
    assert info.duration_seconds == info.num_frames / info.sample_rate


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


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b"", None),
        (b"plain text", None),
        (b'{"a": 1}', None),
        (b"BM is how some texts begin", None),
        (b"\xff\xfe\x00\x00", None),
        (b"GIF89a", "image/gif"),
        (b"II*\x00", "image/tiff"),
        (b"MM\x00+", "image/tiff"),
        (b"RIFF\0\0\0\0AVI ", "video/x-msvideo"),
        (b"RIFF\0\0\0\0????", None),
        (b"\0\0\0\x18ftypisom", "video/mp4"),
        (b"\0\0\0\x18ftypM4A ", "audio/mp4"),
        (b"\0\0\0\x18ftypqt  ", "video/quicktime"),
        (b"\0\0\0\x18ftypavif", "image/avif"),
        (b"\0\0\0\x08wide", "video/quicktime"),
        (b"\x1aE\xdf\xa3\x93\x42\x82\x84webm", "video/webm"),
        (b"\x1aE\xdf\xa3\x93\x42\x82\x88matroska", "video/x-matroska"),
        (b"OggS" + bytes(24) + b"\x80theora", "video/ogg"),
        (b"OggS" + bytes(24) + b"OpusHead", "audio/ogg"),
        (b"ID3\x03", "audio/mpeg"),
        (b"\xff\xfb\x90\x44", "audio/mpeg"),
        (b"\xff\xf1\x50\x80", "audio/aac"),
        (b"MThd", "audio/midi"),
        (b"\x93NUMPY", "application/x-npy"),
        (b"%PDF-1.7", "application/pdf"),
        (b"\x1f\x8b\x08", "application/gzip"),
        (b"\x28\xb5\x2f\xfd", "application/zstd"),
        (bytes(257) + b"ustar\x0000", "application/x-tar"),
    ],
)
def test_magic_numbers(data, content_type):
    """The first bytes tell the type, and text tells none."""
    assert sniff_content_type(data) == content_type
    assert sniff_content_type(memoryview(bytearray(data))) == content_type


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("a/b.c/x.JPG", "image/jpeg"),
        ("x.state.npy", "application/x-npy"),
        ("x.srt", "application/x-subrip"),
        ("x.tar.gz", "application/gzip"),
        ("folder.png/readme", None),
        ("png", None),
        ("x.unknown", None),
        ("x.", None),
        ("", None),
        ("caption.txt", "text/plain"),
        ("c:\\files\\x.wav", "audio/wav"),
    ],
)
def test_types_by_name(name, content_type):
    """The last extension tells the type, in any case, and folders do not count."""
    assert content_type_of_name(name) == content_type


@pytest.mark.parametrize("data", [b"", b"text", SOUNDS["wav"], b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\x00"])
def test_what_is_not_an_image(data):
    """Bytes that are not an image are a MediaError that names them and says what was found."""
    with pytest.raises(MediaError, match=r"^here: ") as caught:
        probe_image(data, name="here")
    assert caught.value.name == "here"


@pytest.mark.parametrize("data", [b"", b"text", IMAGES["png"], b"fLaC", b"RIFF\0\0\0\0WAVE", b"OggS", b"ID3\x03"])
def test_what_is_not_a_sound(data):
    """Bytes that are not a sound are a MediaError that names them and says what was found."""
    with pytest.raises(MediaError, match=r"^here: "):
        probe_audio(data, name="here")


def test_an_image_without_pixels():
    """A header with a zero side is refused."""
    data = bytearray(IMAGES["png"])
    data[16:20] = bytes(4)
    with pytest.raises(MediaError, match="no pixels"):
        probe_image(data)


def answers(probe, data):
    """Probes bytes; a MediaError is as good an answer as any."""
    try:
        info = probe(data)
    except MediaError:
        return
    if isinstance(info, ImageInfo):
        assert info.width > 0 < info.height
        assert info.channels in (1, 3, 4)
        assert 1 <= info.orientation <= 8
        assert info.num_frames >= 1
    else:
        assert info.sample_rate > 0 < info.channels
        assert info.num_frames >= 0


@pytest.mark.parametrize("name", IMAGES)
def test_damaged_images(name):
    """Truncated anywhere, or with any byte of the header changed, an image is probed or refused."""
    data = IMAGES[name]
    for at in range(min(len(data), 300)):
        for value in (0, 0x7F, 0xFF, data[at] ^ 1):
            answers(probe_image, data[:at] + bytes([value]) + data[at + 1 :])
        answers(probe_image, data[:at])


@pytest.mark.parametrize("name", SOUNDS)
def test_damaged_sounds(name):
    """Truncated anywhere, or with any byte of the header changed, a sound is probed or refused."""
    data = SOUNDS[name]
    for at in range(min(len(data), 120)):
        for value in (0, 0xFF, data[at] ^ 1):
            answers(probe_audio, data[:at] + bytes([value]) + data[at + 1 :])
        answers(probe_audio, data[:at])


HEADS = [*(data[:40] for data in IMAGES.values()), b"\xff\xd8\xff", b"GIF89a", b"MM\x00*", b"II+\x00"]


@given(st.sampled_from(HEADS), st.binary(max_size=300))
@settings(deadline=None, max_examples=300)
def test_hostile_images(head, tail):
    """Whatever bytes follow an image's magic number, it is probed or refused."""
    answers(probe_image, head + tail)
    answers(probe_image, tail)


@given(st.sampled_from([data[:44] for data in SOUNDS.values()]), st.binary(max_size=300))
@settings(deadline=None, max_examples=150)
def test_hostile_sounds(head, tail):
    """Whatever bytes follow a sound's magic number, it is probed or refused."""
    answers(probe_audio, head + tail)
    answers(probe_audio, tail)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff" + b"\xff" * 3_000_000,
        b"\xff\xd8\xff\xe0" + b"\x00\x02\xff\xe0" * 500_000,
        b"\xff\xd8\xff\x01" + b"\xff\x01" * 1_000_000,
        b"\xff\xd8\xff\xe1\x00\x02" + b"\x00" * 3_000_000,
        IMAGES["png"][:33] + b"\0\0\0\0junkcrc!" * 200_000,
        IMAGES["gif"][:13] + b"\x21\xf9\x00" * 1_000_000,
        b"RIFF\xff\xff\xff\xffWEBP" + b"junk\0\0\0\0" * 400_000,
        b"II*\x00\x08\0\0\0"
        + b"\0\0\x0e\0\0\0"
        + b"".join(b"\0\0" + struct.pack("<I", 20 + 6 * i) for i in range(200_000)),
        b"II*\x00\x08\0\0\0\xff\xff" + b"\0\x01\x03\0\x01\0\0\0\x05\0\0\0" * 65_535,
    ],
)
def test_hostile_images_take_no_time(data):
    """Megabytes of segments, chunks or directories that lead nowhere are refused or read in a moment."""
    start = time.perf_counter()
    answers(probe_image, data)
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize(
    "data",
    [
        b"RIFF\xff\xff\xff\xffWAVE" + b"junk\0\0\0\0" * 400_000,
        flac.with_length(SOUNDS["flac"], 0, 0) + b"\xff\xf8" * 150_000,
    ],
)
def test_hostile_sounds_take_no_time(data):
    """Megabytes of chunks that lead nowhere, or of what looks like frames, are refused in a moment."""
    start = time.perf_counter()
    answers(probe_audio, data)
    assert time.perf_counter() - start < 3


def test_real_media(shared_data):
    """Every image and sound of the sample corpora is probed as Pillow and libsndfile do, and typed as its name says."""
    num_images = num_sounds = 0
    for path in sorted(shared_data.glob("*/*.tar")):
        with tarfile.open(path) as shard:
            for member in shard:
                if not member.isfile():
                    continue
                data = shard.extractfile(member).read()
                content_type = sniff_content_type(data)
                assert content_type in (None, content_type_of_name(member.name)), member.name
                if content_type in media._IMAGE_PARSERS:
                    num_images += 1
                    assert in_short(probe_image(data, name=member.name)) == by_pillow(data), member.name
                elif content_type in ("audio/wav", "audio/flac"):
                    num_sounds += 1
                    info = probe_audio(data, name=member.name)
                    expected = by_sndfile(data)
                    if expected[2] > 2**40:  # a FLAC of unknown length, which libsndfile does not measure
                        assert info.duration_seconds > 1
                    else:
                        assert sound_in_short(info) == expected, member.name
    assert num_images > 500
    assert num_sounds > 70
