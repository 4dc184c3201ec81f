import io
from unittest import mock

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from mm_assets.errors import ConfigError, EncodeError, FormatError, LimitError
from mm_assets.fields import ImageField
from mm_assets.testing import FieldSuite, damaged

from .conftest import image_file, picture

COLOUR = picture()
GREY = picture(channels=1)
ALPHA = picture(channels=4)
PNG = image_file(Image.fromarray(COLOUR[:6, :5]), "PNG")


class TestImageField(FieldSuite):
    fields = [
        ImageField(),
        ImageField(encoding="jpeg", quality=80),
        ImageField(encoding="png", size=(8, 9), channels=3),
        ImageField(channels=1, orientation="apply"),
        ImageField(max_pixels=5),
        ImageField(decode_size=(6, 7), decode_resize="pad", decode_fill=9, decode_mode="fast", channels=3),
    ]
    cases = [
        (PNG, COLOUR[:6, :5]),
        (COLOUR, COLOUR),
        (GREY[:, :, 0], GREY),
        (GREY, GREY),
        (ALPHA, ALPHA),
        (COLOUR[::-1, ::2], np.ascontiguousarray(COLOUR[::-1, ::2])),
        (bytearray(image_file(Image.fromarray(COLOUR), "BMP")), COLOUR),
    ]
    empty = (np.zeros((1, 1), np.uint8), np.zeros((1, 1, 1), np.uint8))
    maximum = (ImageField(max_pixels=30), PNG)
    past_maximum = (ImageField(max_pixels=29), PNG)
    wrong_types = ["path.jpg", [1, 2], COLOUR.astype(np.float32), 5]
    wrong_shapes = [
        np.zeros((2, 2, 2), np.uint8),
        np.zeros((0, 5, 3), np.uint8),
        np.zeros(4, np.uint8),
        b"",
        b"no image",
        PNG[:20],
    ]
    bad_configs = [
        {"encoding": "gif"},
        {"quality": 0},
        {"quality": 95.0},
        {"encoding": "jpeg", "subsampling": "422"},
        {"encoding": "jpeg", "subsampling": 420},
        {"channels": 2},
        {"channels": True},
        {"size": [4, 4]},
        {"size": [4], "encoding": "png"},
        {"size": 4, "encoding": "png"},
        {"size": [0, 4], "encoding": "png"},
        {"encoding": "jpeg", "channels": 4},
        {"apply_orientation": 1},
        {"orientation": "turn"},
        {"icc": "srgb"},
        {"frames": 3},
        {"frames": "all", "encoding": "png"},
        {"max_pixels": 0},
        {"size": [40, 40], "encoding": "png", "max_pixels": 1599},
        {"decode_size": 5},
        {"decode_size": [5, 0]},
        {"decode_size": [5, 5, 3]},
        {"decode_size": [40, 40], "max_pixels": 1599},
        {"decode_size": [5, 5], "decode_resize": "fit"},
        {"decode_size": [5, 5], "decode_fill": 256},
        {"decode_size": [5, 5], "decode_mode": "quick"},
        {"decode_resize": "crop"},
        {"decode_fill": 1},
        {"decode_mode": "fast"},
    ]


def decoded(field, value):
    return field.decode(*field.encode(value))


MODES = {  # what each codec holds
    "JPEG": "L RGB CMYK",
    "PNG": "1 L LA P RGB RGBA",
    "WEBP": "L LA P RGB RGBA",
    "TIFF": "1 L LA P RGB RGBA CMYK",
    "GIF": "1 L LA P RGB RGBA",
    "BMP": "1 L P RGB RGBA",
}


@pytest.mark.parametrize(("codec", "mode"), [(codec, mode) for codec in MODES for mode in MODES[codec].split()])
def test_every_codec_is_kept_and_decodes_as_pillow_does(codec, mode):
    """A file of any codec and mode is stored byte for byte, and decodes to what Pillow makes of it."""
    image = Image.fromarray(ALPHA).convert("RGB" if mode in ("P", "CMYK") else "RGBA").convert(mode)
    data = image_file(image, codec)
    field = ImageField()
    encoded = field.encode(data)
    assert encoded.data == data
    pixels = field.decode(*encoded)
    reference = Image.open(io.BytesIO(data))
    expected = np.asarray(reference.convert({1: "L", 3: "RGB", 4: "RGBA"}[pixels.shape[2]]))
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.squeeze().astype(int) - expected.squeeze().astype(int)).max() <= (3 if codec == "JPEG" else 0)
    for broken in damaged(*map(bytes, encoded)):
        try:
            field.decode(*broken)
        except FormatError as error:
            assert error.path == "<payload>"  # noqa: PT017  # the bytes may also be valid


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("codec", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_orientation_is_recorded_and_applied_unless_it_is_kept(codec, orientation):
    """Pixels come upright, or as stored where the field says so, for each EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if codec == "WEBP" else {"quality": 100, "subsampling": 0} if codec == "JPEG" else {}
    data = image_file(Image.fromarray(COLOUR), codec, exif=exif, **options)
    stored, upright = decoded(ImageField(orientation="keep"), data), decoded(ImageField(), data)
    tolerance = 6 if codec == "JPEG" else 0
    assert stored.shape == COLOUR.shape
    assert np.abs(stored.astype(int) - COLOUR).max() <= tolerance
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert upright.shape == expected.shape
    assert np.abs(upright.astype(int) - expected).max() <= tolerance
    anew = ImageField(encoding="png")
    np.testing.assert_array_equal(decoded(anew, data), upright)
    later = ImageField(encoding="png", orientation="keep").encode(
        data
    )  # pixels as stored, the orientation still recorded
    np.testing.assert_array_equal(anew.decode(*later), upright)


def test_deep_samples_become_their_high_byte():
    """A 16-bit grey PNG decodes to its high byte, and 1-bit samples to 0 and 255."""
    deep = (np.arange(24, dtype=np.uint16) * 2731).reshape(4, 6)
    np.testing.assert_array_equal(decoded(ImageField(), image_file(Image.fromarray(deep), "PNG"))[:, :, 0], deep >> 8)
    bits = np.eye(4, 6, dtype=bool)
    for codec in ("PNG", "TIFF"):
        np.testing.assert_array_equal(
            decoded(ImageField(), image_file(Image.fromarray(bits), codec))[:, :, 0], bits * np.uint8(255)
        )


def test_images_without_an_8_bit_form_are_refused():
    """Floating-point and 32-bit TIFFs are refused when they are encoded, not in training."""
    for array in (np.ones((3, 3), np.float32), np.ones((3, 3), np.int32)):
        with pytest.raises(EncodeError, match=r"8-bit form \(DepthField takes"):
            ImageField().check(image_file(Image.fromarray(array), "TIFF"))


@pytest.mark.parametrize("encoding", ["jpeg", "webp", "png"])
@pytest.mark.parametrize("channels", [1, 3])
def test_store_at_training_size(encoding, channels):
    """With size and channels set, whatever comes is stored at that size, and a batch is one array."""
    field = ImageField(encoding=encoding, size=(10, 14), channels=channels, quality=97)
    values = [COLOUR, GREY, ALPHA, image_file(Image.fromarray(COLOUR), "JPEG"), picture(40, 60), picture(3, 4)]
    encoded = [field.encode(value) for value in values]
    records = np.stack([np.frombuffer(one.metadata, np.uint8) for one in encoded])
    out = np.full((len(values) + 1, 10, 14, channels), 9, np.uint8)
    records = np.concatenate([records, np.zeros_like(records[:1])])
    batch, present = field.decode_batch(records, [*(one.data for one in encoded), None], out)
    assert batch is out
    assert present.tolist() == [True] * len(values) + [False]
    assert not batch[-1].any()
    for row, one in zip(batch, encoded, strict=False):
        np.testing.assert_array_equal(row, field.decode(*one))
    assert abs(batch[0].mean() - decoded(ImageField(channels=channels), COLOUR).mean()) < 4


@pytest.mark.parametrize(("settings", "expected"), [({}, "444"), ({"subsampling": "420"}, "420")])
def test_subsampling(settings, expected):
    """JPEGs keep the colour of every pixel, or, if set so, of one in four; grey has none, and both decode alike."""
    field = ImageField(encoding="jpeg", **settings)
    for pixels, found in ((COLOUR, expected), (GREY, "Gray")):
        encoded = field.encode(pixels)
        assert simplejpeg.decode_jpeg_header(encoded.data)[3] == found
        assert field.decode(*encoded).shape[:2] == pixels.shape[:2]
    assert ImageField.from_config(field.config) == field


def test_alpha_needs_a_decision():
    """JPEG has no alpha: pixels with alpha are refused unless the field says how many channels to keep."""
    for value in (ALPHA, image_file(Image.fromarray(ALPHA), "PNG")):
        for method in (ImageField(encoding="jpeg").encode, ImageField(encoding="jpeg").check):
            with pytest.raises(EncodeError, match="alpha"):
                method(value)
        assert decoded(ImageField(encoding="jpeg", channels=3), value).shape == COLOUR.shape


def test_checking_what_is_kept_decodes_nothing():
    """The check of kept bytes reads the header only."""
    with mock.patch("mm_assets.fields.image.decode_pixels", side_effect=AssertionError("decoded")):
        ImageField().check(PNG)
        ImageField().encode(PNG)


def test_a_bomb_is_refused_by_its_header():
    """An image larger than the limit is refused before decoding, when encoded and when found in a file."""
    bomb = image_file(Image.new("1", (4000, 3000)), "PNG")
    small = ImageField(max_pixels=1_000_000)
    with pytest.raises(EncodeError, match="max_pixels"):
        small.encode(bomb)
    undecoded = mock.patch("mm_assets.fields.image.decode_pixels", side_effect=AssertionError("decoded"))
    with undecoded, pytest.raises(LimitError, match=r"too large .* \(max_pixels\)"):
        small.decode(*ImageField().encode(bomb))
    # A record that lies about the size does not get the bomb decoded either.
    lie = ImageField().encode(image_file(Image.new("1", (40, 30)), "PNG")).metadata
    unloaded = mock.patch("PIL.ImageFile.ImageFile.load", side_effect=AssertionError("decoded"))
    with unloaded, pytest.raises(FormatError, match="size in its record"):
        small.decode(lie, bomb)


def test_a_truncated_jpeg_is_damage_not_grey():
    """A JPEG whose end is missing raises, where libjpeg would fill the rest with grey."""
    metadata, data = ImageField().encode(image_file(Image.fromarray(picture(200, 300)), "JPEG"))
    with pytest.raises(FormatError):
        ImageField().decode(metadata, data[: len(data) // 2])


def test_size_with_kept_bytes_is_a_contradiction():
    """A size together with the encoding keep is refused, with a message that says what to do."""
    with pytest.raises(ConfigError, match="choose an encoding"):
        ImageField(size=(4, 4))


def test_real_images(shared_data, members_of):
    """Every image of the sample corpora is kept byte for byte and decodes to the pixels that Pillow gives."""
    field, count = ImageField(orientation="keep", icc="keep"), 0  # as Pillow
    for name, data in members_of(shared_data, (".jpg", ".png", ".tiff")):
        count += 1
        if count % 7:  # a seventh of them is enough for the time that it takes
            continue
        metadata, stored = field.encode(data)
        assert stored == data
        pixels = field.decode(metadata, stored)
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith("I"):
                expected = (np.asarray(image) >> 8).astype(np.uint8)
            else:
                expected = np.asarray(image.convert({1: "L", 3: "RGB", 4: "RGBA"}[pixels.shape[2]]))
        assert pixels.shape[:2] == expected.shape[:2], name
        assert np.abs(pixels.reshape(expected.shape).astype(int) - expected).mean() < 1, name
    assert count > 500
