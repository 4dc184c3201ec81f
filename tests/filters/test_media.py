import contextlib
import io
import math
import tarfile

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import MediaError
from mm_assets.filters.apply import FilterStream
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.media import sharpness as sharpness_module
from mm_assets.media.sharpness import decode_luma, reduction, sharpness
from mm_assets.rows.schema import DatasetSchema


def _judge(table: pa.Table, *configs: dict) -> list[tuple[int, str, str, float | None]]:
    """What filters drop: (position, filter, reason, value)."""
    filters = [build_filter(config, where="w", key="k") for config in configs]
    options = {"annotators": [], "schema": DatasetSchema(), "on_empty_sample": "keep"}
    stream = FilterStream([table], filters=filters, **options)
    list(stream)
    rows = [row for part in stream.take_dropped() for row in part.to_pylist()]
    return [(r["position"], r["filter"], r["reason"], r["value"]) for r in rows]


# Aspect ratio and size


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_aspect_ratio_bounds_are_inclusive(make_table, image, form):
    """By default width / height from 1.0 to 2.0 is kept, both ends included, in every image format."""
    sizes = [(10, 10), (20, 10), (21, 10), (9, 10), (15, 10)]
    table = make_table({"a": [("image", image(*size, form)) for size in sizes] + [("text", "t")]})
    assert _judge(table, {"type": "aspect_ratio"}) == [
        (2, "aspect_ratio", "above_max", 2.1), (3, "aspect_ratio", "below_min", 0.9)
    ]  # fmt: skip


def test_aspect_ratio_limits_can_be_set_and_left_out(make_table, image):
    """`min` and `max` move the limits; null takes one away."""
    table = make_table({"a": [("image", image(*size)) for size in [(10, 40), (40, 10)]]})
    assert [d[0] for d in _judge(table, {"type": "aspect_ratio", "min": 0.25, "max": None})] == []
    assert [d[0] for d in _judge(table, {"type": "aspect_ratio", "min": 0.26, "max": None})] == [0]
    assert [d[0] for d in _judge(table, {"type": "aspect_ratio", "min": None, "max": 3.9})] == [1]


def test_headers_are_enough_for_ratio_and_size(make_table, image):
    """An image with truncated pixels is judged all the same: its header is parsed and nothing is decoded."""
    cut = image(30, 10, "PNG", seed=1)[:60]
    table = make_table({"a": [("image", cut)]})
    assert _judge(table, {"type": "aspect_ratio"}) == [(0, "aspect_ratio", "above_max", 3.0)]
    assert _judge(table, {"type": "blur"}) == [(0, "blur", "unreadable", None)]


@pytest.mark.parametrize(
    "kind", [{"type": "aspect_ratio"}, {"type": "image_size", "min_width": 1}, {"type": "blur", "min": 0}]
)
def test_invalid_image_rows_are_dropped_by_default(make_table, image, kind):
    """Rows without content, with unreadable content or at a negative position are dropped only by drop_invalid_rows."""
    good = image(12, 10)
    table = make_table(
        {"a": [("image", None), ("image", b"no image"), ("image", (-3, good)), ("image", good), ("audio", None)]}
    )
    reasons = [(position, reason) for position, _, reason, _ in _judge(table, kind)]
    assert reasons == [(0, "no_content"), (1, "unreadable"), (-3, "invalid_position")]
    assert _judge(table, {**kind, "drop_invalid_rows": False}) == []


def test_image_size_limits_are_inclusive(make_table, image):
    """Each side is kept between its limits, both included; the reason names the side and the value is its length."""
    sizes = [(10, 10), (9, 10), (21, 10), (20, 7), (20, 31), (20, 30)]
    table = make_table({"a": [("image", image(*size)) for size in sizes]})
    limits = {"min_width": 10, "max_width": 20, "min_height": 8, "max_height": 30}
    assert _judge(table, {"type": "image_size", **limits}) == [
        (1, "image_size", "width_below_min", 9.0),
        (2, "image_size", "width_above_max", 21.0),
        (3, "image_size", "height_below_min", 7.0),
        (4, "image_size", "height_above_max", 31.0),
    ]


def test_orientation_is_not_applied(make_table, encode):
    """Width and height are those stored, as decoders return them, whatever the EXIF orientation says."""
    from PIL import Image

    exif = Image.Exif()
    exif[274] = 6  # show rotated by a quarter
    table = make_table({"a": [("image", encode(np.zeros((10, 20), np.uint8), "JPEG", exif=exif))]})
    assert _judge(table, {"type": "aspect_ratio"}) == []


# Sharpness


def _variance_by_definition(pixels: np.ndarray) -> float:
    """Variance of the response to [0 1 0; 1 -4 1; 0 1 0], borders mirrored about the edge pixel, in plain NumPy."""
    p = np.pad(pixels.astype(np.int64), 1, mode="reflect")
    response = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * p[1:-1, 1:-1]
    return float(response.var())


@settings(deadline=None, max_examples=40)
@given(height=st.integers(2, 40), width=st.integers(2, 40), seed=st.integers(0, 9))
def test_the_score_is_the_variance_of_the_laplacian(encode, height, width, seed):
    """For a small grey PNG the score is the formula's, computed independently from its pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
    score = sharpness(memoryview(encode(pixels)), min_side=256)
    assert score == pytest.approx(_variance_by_definition(pixels), rel=1e-12, abs=1e-9)


def test_flat_images_and_single_pixels_score_zero(image):
    """Where nothing varies the score is zero, also for an image of one pixel."""
    assert sharpness(memoryview(image(50, 40)), min_side=None) == 0
    assert sharpness(memoryview(image(1, 1, seed=1)), min_side=None) == 0


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
def test_images_are_decoded_at_the_reduced_scale(encode, form, factor):
    """Sides are divided and rounded up; the pixels are the means of the squares that they stand for."""
    height, width = 64 * factor + factor - 1, 90 * factor + 1
    y, x = np.mgrid[0:height, 0:width]
    pixels = (127 + 90 * np.sin(x / 23) * np.cos(y / 31)).astype(np.uint8)
    options = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}.get(form, {})
    luma = decode_luma(memoryview(encode(pixels, form, **options)), min_side=64)
    assert luma.shape == (math.ceil(height / factor), math.ceil(width / factor))
    inner = pixels[: 64 * factor, : 90 * factor].reshape(64, factor, 90, factor).mean((1, 3))
    assert np.abs(luma[:64, :90] - inner).max() < 4


def test_luma_of_colour_is_that_of_bt601(encode):
    """Colour turns into 0.299 R + 0.587 G + 0.114 B, whether a JPEG's own luma or computed from its pixels."""
    colour = np.full((16, 16, 3), (200, 100, 50), dtype=np.uint8)
    expected = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    for form in ("PNG", "JPEG", "BMP"):
        luma = decode_luma(memoryview(encode(colour, form)), min_side=None)
        assert np.abs(luma - expected).max() <= 1.5


def test_unusual_pixels_have_a_luma(encode):
    """16-bit, floating-point, 1-bit, palette and CMYK images are scored; of 16 bits the upper 8 count."""
    from PIL import Image

    deep = np.arange(256, dtype=np.uint16).reshape(16, 16) * 256 + 77
    assert np.array_equal(decode_luma(memoryview(encode(deep)), min_side=None), deep >> 8)
    real = np.array([[0.4, 99.6], [-5, np.nan], [300, np.inf]], dtype=np.float32)
    assert decode_luma(memoryview(encode(real, "TIFF")), min_side=None).tolist() == [[0, 99], [0, 0], [255, 255]]
    bilevel = np.eye(9, dtype=bool)
    assert np.array_equal(decode_luma(memoryview(encode(bilevel)), min_side=None), bilevel * np.uint8(255))
    for form in ("JPEG", "TIFF"):
        buffer = io.BytesIO()
        Image.new("CMYK", (8, 8), (0, 0, 0, 255)).save(buffer, form)
        assert decode_luma(memoryview(buffer.getvalue()), min_side=None).max() <= 3
    buffer = io.BytesIO()
    Image.new("P", (8, 8), 0).save(buffer, "PNG", transparency=0)
    assert decode_luma(memoryview(buffer.getvalue()), min_side=None).min() == 255


def test_transparency_shows_white(encode):
    """A drawing whose shape is in the alpha channel alone is not flat: transparent pixels count as white."""
    drawing = np.zeros((20, 20, 4), dtype=np.uint8)
    drawing[5:15, 5:15, 3] = 255
    luma = decode_luma(memoryview(encode(drawing)), min_side=None)
    assert (luma[0, 0], luma[10, 10]) == (255, 0)
    assert sharpness(memoryview(encode(drawing)), min_side=None) > 1000


def test_too_many_pixels_are_not_decoded(make_table, image, monkeypatch):
    """A header that promises more pixels than the limit is refused before anything is decoded."""
    from PIL import Image

    monkeypatch.setattr(sharpness_module, "MAX_PIXELS", 99)
    monkeypatch.setattr(sharpness_module, "MAX_JPEG_PIXELS", 199)
    with pytest.raises(MediaError, match="10 x 10 pixels, expected at most 99"):
        sharpness(memoryview(image(10, 10)), min_side=None)
    assert sharpness(memoryview(image(10, 10, "JPEG")), min_side=None) == 0
    with pytest.raises(MediaError, match="10 x 20 pixels"):
        sharpness(memoryview(image(10, 20, "JPEG")), min_side=None)
    inks = io.BytesIO()
    Image.new("CMYK", (10, 10)).save(inks, "JPEG")
    with pytest.raises(MediaError, match="more than 99 pixels in"):
        sharpness(memoryview(inks.getvalue()), min_side=None)


@settings(deadline=None, max_examples=120)
@given(data=st.data(), form=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]))
@pytest.mark.filterwarnings("ignore")  # decoders warn about damage, and that is what is made here
def test_damaged_images_score_or_are_refused(image, data, form):
    """Truncated or with any bytes changed, an image has a score, each time the same, or raises MediaError."""
    good = bytearray(image(24, 18, form, seed=3))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    with contextlib.suppress(MediaError):
        score = sharpness(memoryview(bytes(good)), min_side=8)
        assert score >= 0
        assert score == sharpness(memoryview(bytes(good)), min_side=8)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_blurred_images_are_dropped(make_table, encode, form):
    """An image blurred by averaging falls below the default limit while the original stays above it."""
    sharp = (np.random.default_rng(5).random((80, 80)) > 0.5).astype(np.uint8) * 255
    soft = sharp.astype(float)
    for _ in range(2):
        for axis in (0, 1):
            soft = np.apply_along_axis(np.convolve, axis, soft, np.ones(9) / 9, "valid")
    images = [encode(pixels.astype(np.uint8), form) for pixels in (sharp, soft)]
    table = make_table({"a": [("image", data) for data in images]})
    ((position, _, reason, value),) = _judge(table, {"type": "blur"})
    assert (position, reason) == (1, "below_min")
    assert value == sharpness(memoryview(images[1]), min_side=256) < 100


def test_a_measure_is_taken_once(make_table, image, monkeypatch):
    """Two filters and an annotator that want one score decode each image once, rows dropped in between or not."""
    from mm_assets.filters import image as image_filters

    calls = []
    monkeypatch.setattr(image_filters, "sharpness", lambda data, *, min_side: calls.append(len(data)) or 50.0)
    tables = [make_table({f"s{n}": [("image", image(20 + n, 10)), ("image", image(15, 10 + n))]}) for n in range(2)]
    annotator = build_annotator({"type": "blur"}, where="w", key="k")
    filters = [
        build_filter(c, where="w", key="k")
        for c in ({"type": "aspect_ratio"}, {"type": "blur", "min": 10}, {"type": "blur", "min": 60})
    ]
    schema = DatasetSchema(annotator_columns=annotator.columns)
    stream = FilterStream(tables, annotators=[annotator], filters=filters, schema=schema)
    assert list(stream) == []
    assert len(calls) == 4
    assert stream.counts["dropped.aspect_ratio.above_max"] == 1


# Audio


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_audio_duration_limits_are_inclusive(make_table, wav, form):
    """Audio from the shortest to the longest duration is kept, both included, from the headers of every format."""
    durations = [0.5, 1.0, 2.0, 2.5]
    table = make_table({"a": [("audio", wav(s, channels=2, form=form)) for s in durations]})
    lossy = 0.2 if form in ("OGG", "MP3") else 0.0  # lossy codecs pad to whole blocks
    limits = {"min_seconds": 1.0 - lossy, "max_seconds": 2.0 + lossy}
    found = _judge(table, {"type": "audio_duration", **limits})
    assert [(d[0], d[2]) for d in found] == [(0, "below_min"), (3, "above_max")]
    assert [d[3] for d in found] == pytest.approx([0.5, 2.5], abs=lossy)


def test_one_limit_is_enough_and_other_rows_pass(make_table, wav):
    """Only audio rows are judged; a limit that is not given is none."""
    table = make_table({"a": [("audio", wav(0.1)), ("text", "t"), ("image", b"?"), ("audio", wav(9))]})
    assert [d[0] for d in _judge(table, {"type": "audio_duration", "min_seconds": 1})] == [0]
    assert [d[0] for d in _judge(table, {"type": "audio_duration", "max_seconds": 1})] == [3]


def test_invalid_audio_rows_are_dropped_by_default(make_table):
    """Audio that is not there or cannot be read is dropped only by drop_invalid_rows."""
    table = make_table({"a": [("audio", None), ("audio", b"noise")]})
    config = {"type": "audio_duration", "min_seconds": 1}
    assert [d[2] for d in _judge(table, config)] == ["no_content", "unreadable"]
    assert _judge(table, {**config, "drop_invalid_rows": False}) == []


# Real shards


@pytest.mark.parametrize("shard", ["image-text/image-text-00000.tar", "mint1t-html/mint1t-html-00000.tar"])
def test_real_images_are_judged_by_the_sizes_that_a_decoder_sees(make_table, shared_data, shard):
    """Over the images of a real shard the filter keeps exactly those whose ratio, as Pillow opens them, is in range."""
    from PIL import Image

    samples, expected = {}, {}
    with tarfile.open(shared_data / shard) as archive:
        for member in archive:
            if member.name.endswith((".jpg", ".png")):
                data = archive.extractfile(member).read()
                samples[member.name] = [("image", data)]
                with Image.open(io.BytesIO(data)) as opened:
                    ratio = opened.width / opened.height
                if not 1.0 <= ratio <= 2.0:
                    expected[member.name] = ratio
    config = build_filter({"type": "aspect_ratio"}, where="w", key="k")
    stream = FilterStream([make_table(samples)], annotators=[], filters=[config], schema=DatasetSchema())
    kept = {row["sample_id"] for batch in stream for row in batch.select(["sample_id"]).to_pylist()}
    dropped = [row for part in stream.take_dropped() for row in part.to_pylist() if row["modality"] == "image"]
    assert {row["sample_id"]: row["value"] for row in dropped} == expected
    assert kept == samples.keys() - expected.keys()
    assert kept
    assert expected
