import io
import struct
import tarfile
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import MediaError
from mm_assets.media import images
from mm_assets.media.content_types import content_type_of_name, sniff_content_type
from mm_assets.media.images import ImageInfo, probe_image, share_probe

PIXELS = (np.add.outer(np.arange(11) * 20, np.arange(13) * 3)[:, :, None] + np.arange(4)).astype(np.uint8)


PICTURE = Image.fromarray(PIXELS)


def image_file(image, codec, **options):
    target = io.BytesIO()
    image.save(target, format=codec, **options)
    return target.getvalue()


def orientation(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


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


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "tiff motorola"])  # that one is a bare header
def test_image_headers_agree_with_pillow(name):
    """A header read without decoding says what Pillow says, for every codec and kind."""
    info = probe_image(IMAGES[name])
    assert info.codec == name.split()[0].replace("apng", "png")
    assert f"image/{info.codec}" == sniff_content_type(IMAGES[name])
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


@pytest.mark.parametrize(
    "data", [b"", b"text", b"RIFF\x24\0\0\0WAVEfmt " + bytes(28), b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\x00"]
)
def test_what_is_not_an_image(data):
    """Bytes that are not an image are a MediaError."""
    with pytest.raises(MediaError, match=r"^<image>: "):
        probe_image(data)


def test_an_image_without_pixels():
    """A header with a zero side is refused."""
    data = bytearray(IMAGES["png"])
    data[16:20] = bytes(4)
    with pytest.raises(MediaError, match="no pixels"):
        probe_image(data)


def answers(data):
    """Probes bytes; a MediaError is as good an answer as any."""
    try:
        info = probe_image(data)
    except MediaError:
        return
    assert info.width > 0 < info.height
    assert info.channels in (1, 3, 4)
    assert 1 <= info.orientation <= 8
    assert info.num_frames >= 1


@pytest.mark.parametrize("name", IMAGES)
def test_damaged_images(name):
    """Truncated anywhere, or with any byte of the header changed, an image is probed or refused."""
    data = IMAGES[name]
    for at in range(min(len(data), 300)):
        for value in (0, 0x7F, 0xFF, data[at] ^ 1):
            answers(data[:at] + bytes([value]) + data[at + 1 :])
        answers(data[:at])


HEADS = [*(data[:40] for data in IMAGES.values()), b"\xff\xd8\xff", b"GIF89a", b"MM\x00*", b"II+\x00"]


@given(st.sampled_from(HEADS), st.binary(max_size=300))
@settings(deadline=None, max_examples=300)
def test_hostile_images(head, tail):
    """Whatever bytes follow an image's magic number, it is probed or refused."""
    answers(head + tail)
    answers(tail)


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
    start = time.process_time()  # other processes may have the processor meanwhile
    answers(data)
    assert time.process_time() - start < 3


def test_real_images(shared_data):
    """Every image of the sample corpora is probed as Pillow opens it."""
    num_images = 0
    for path in sorted(shared_data.glob("*/*.tar")):
        with tarfile.open(path) as shard:
            for member in shard:
                if content_type_of_name(member.name) in images._IMAGE_PARSERS:
                    num_images += 1
                    data = shard.extractfile(member).read()
                    assert in_short(probe_image(data)) == by_pillow(data), member.name
    assert num_images > 500


def bmp(width: int) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (width, 4)).save(target, "bmp")
    return target.getvalue()


def test_only_shared_views_are_probed_once() -> None:
    """A read-only view of a user's own is read at each probe, since the memory below it may have changed."""
    memory = bytearray(bmp(8))
    own, shared = memoryview(memory).toreadonly(), share_probe(memoryview(memory).toreadonly())
    assert (probe_image(own).width, probe_image(shared).width) == (8, 8)
    like = share_probe(memoryview(bmp(8)), like=shared)
    memory[:] = bmp(12)[: len(memory)]
    assert (probe_image(own).width, probe_image(shared).width, probe_image(like).width) == (12, 8, 8)
