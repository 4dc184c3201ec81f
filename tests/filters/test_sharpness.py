import contextlib
import io
import math

import numpy as np
import pillow_heif
import pillow_jxl  # noqa: F401  # the import lets Pillow read JPEG XL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from mm_assets.errors import MediaError
from mm_assets.fields import ImageField
from mm_assets.filters import sharpness as sharpness_module
from mm_assets.filters.sharpness import decode_luma, reduction, sharpness


def encode(pixels: np.ndarray, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def flat(width: int, height: int, form: str = "PNG") -> bytes:
    return encode(np.full((height, width), 128, np.uint8), form)


def noise(width: int, height: int, form: str = "PNG") -> bytes:
    return encode(np.random.default_rng(3).integers(0, 256, (height, width), np.uint8), form)


def _variance_by_definition(pixels: np.ndarray) -> float:
    """Variance of the response to [0 1 0; 1 -4 1; 0 1 0], borders mirrored about the edge pixel, in plain NumPy."""
    p = np.pad(pixels.astype(np.int64), 1, mode="reflect")
    response = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * p[1:-1, 1:-1]
    return float(response.var())


@settings(deadline=None, max_examples=40)
@given(height=st.integers(2, 40), width=st.integers(2, 40), seed=st.integers(0, 9))
def test_the_score_is_the_variance_of_the_laplacian(height, width, seed):
    """For a small grey PNG the score is the formula's, computed independently from its pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
    score = sharpness(memoryview(encode(pixels)), min_side=256)
    assert score == pytest.approx(_variance_by_definition(pixels), rel=1e-12, abs=1e-9)


def test_flat_images_and_single_pixels_score_zero():
    """Where nothing varies the score is zero, also for an image of one pixel."""
    assert sharpness(memoryview(flat(50, 40)), min_side=None) == 0
    assert sharpness(memoryview(noise(1, 1)), min_side=None) == 0


@pytest.mark.parametrize(
    ("width", "height", "factor"),
    [(511, 900, 1), (512, 512, 2), (1023, 9000, 2), (1024, 1024, 4), (2047, 2048, 4), (2048, 2048, 8), (9999, 9999, 8)],
)
def test_reduction_leaves_the_shorter_side_its_minimum(width, height, factor):
    """The factor is the largest of 8, 4, 2, 1 that leaves the shorter side 256 pixels; None asks for full size."""
    assert reduction(width, height, min_side=256) == factor
    assert reduction(height, width, min_side=256) == factor
    assert reduction(width, height, min_side=None) == 1


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_images_are_decoded_at_the_reduced_scale(form, factor):
    """Sides are divided and rounded up; the pixels are the means of the squares that they stand for."""
    height, width = 64 * factor + factor - 1, 90 * factor + 1
    y, x = np.mgrid[0:height, 0:width]
    pixels = (127 + 90 * np.sin(x / 23) * np.cos(y / 31)).astype(np.uint8)
    options = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}.get(form, {})
    luma = decode_luma(memoryview(encode(pixels, form, **options)), min_side=64)
    assert luma.shape == (math.ceil(height / factor), math.ceil(width / factor))
    inner = pixels[: 64 * factor, : 90 * factor].reshape(64, factor, 90, factor).mean((1, 3))
    assert np.abs(luma[:64, :90] - inner).max() < 4


def test_luma_of_colour_is_that_of_bt601():
    """Colour turns into 0.299 R + 0.587 G + 0.114 B, whether a JPEG's own luma or computed from its pixels."""
    colour = np.full((16, 16, 3), (200, 100, 50), dtype=np.uint8)
    expected = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    for form in ("PNG", "JPEG", "BMP"):
        luma = decode_luma(memoryview(encode(colour, form)), min_side=None)
        assert np.abs(luma - expected).max() <= 1.5


def test_unusual_pixels_have_a_luma():
    """16-bit, 1-bit, palette and CMYK images are scored, of 16 bits the upper 8; floating-point ones are refused."""
    deep = np.arange(256, dtype=np.uint16).reshape(16, 16) * 256 + 77
    assert np.array_equal(decode_luma(memoryview(encode(deep)), min_side=None), deep >> 8)
    real = np.array([[0.4, 99.6], [-5, np.nan], [300, np.inf]], dtype=np.float32)
    with pytest.raises(MediaError, match="tiff of 32 bits, expected one with an 8-bit form"):
        decode_luma(memoryview(encode(real, "TIFF")), min_side=None)
    bilevel = np.eye(9, dtype=bool)
    assert np.array_equal(decode_luma(memoryview(encode(bilevel)), min_side=None), bilevel * np.uint8(255))
    for form in ("JPEG", "TIFF"):
        buffer = io.BytesIO()
        Image.new("CMYK", (8, 8), (0, 0, 0, 255)).save(buffer, form)
        assert decode_luma(memoryview(buffer.getvalue()), min_side=None).max() <= 3
    buffer = io.BytesIO()
    Image.new("P", (8, 8), 0).save(buffer, "PNG", transparency=0)
    assert decode_luma(memoryview(buffer.getvalue()), min_side=None).min() == 255


def test_transparency_shows_white():
    """A drawing whose shape is in the alpha channel alone is not flat: transparent pixels count as white."""
    drawing = np.zeros((20, 20, 4), dtype=np.uint8)
    drawing[5:15, 5:15, 3] = 255
    luma = decode_luma(memoryview(encode(drawing)), min_side=None)
    assert (luma[0, 0], luma[10, 10]) == (255, 0)
    assert sharpness(memoryview(encode(drawing)), min_side=None) > 1000


def test_too_many_pixels_are_not_decoded(monkeypatch):
    """A header that promises more pixels than the limit is refused before anything is decoded."""
    monkeypatch.setattr(sharpness_module, "MAX_PIXELS", 99)
    for form in ("PNG", "JPEG"):
        with pytest.raises(MediaError, match="10 x 10 pixels, expected at most 99"):
            sharpness(memoryview(flat(10, 10, form)), min_side=None)
        assert sharpness(memoryview(flat(9, 11, form)), min_side=None) == 0


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF", "JXL"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_luma_is_that_of_the_decoded_image(form, orientation):
    """Whatever the format, luma is that of the upright pixels in sRGB that the reader decodes, also of plug-ins."""
    pillow_heif.register_heif_opener()
    y, x = np.mgrid[0:48, 0:64]
    picture = np.stack([x * 4, y * 5, 255 - x - y], axis=-1).astype(np.uint8)
    exif = Image.Exif()
    exif[274] = orientation
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = srgb.replace(b"rXYZ", b"????", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"????", b"gXYZ", 1)
    data = encode(picture, form, exif=exif.tobytes(), icc_profile=swapped)
    pixels = ImageField().decode(*ImageField().encode(data))
    expected = np.asarray(Image.fromarray(pixels).convert("L")).astype(int)
    assert np.abs(decode_luma(memoryview(data), min_side=None) - expected).max() <= 2


@settings(deadline=None, max_examples=120)
@given(data=st.data(), form=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
@pytest.mark.filterwarnings("ignore")  # decoders warn about damage, and that is what is made here
def test_damaged_images_score_or_are_refused(data, form):
    """Truncated or with any bytes changed, an image has a score, each time the same, or raises MediaError."""
    good = bytearray(noise(24, 18, form))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    with contextlib.suppress(MediaError):
        score = sharpness(memoryview(bytes(good)), min_side=8)
        assert score >= 0
        assert score == sharpness(memoryview(bytes(good)), min_side=8)
