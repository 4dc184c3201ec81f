import io
import tarfile

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mm_assets.filters.apply import FilterStream
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.filters.sharpness import sharpness
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


def test_images_are_judged_upright(make_table, encode):
    """Width and height are those of the image turned by its EXIF orientation, as the reader decodes it."""
    exif = Image.Exif()
    exif[274] = 6  # show rotated by a quarter
    table = make_table({"a": [("image", encode(np.zeros((10, 20), np.uint8), "JPEG", exif=exif))]})
    assert _judge(table, {"type": "aspect_ratio"}) == [(0, "aspect_ratio", "below_min", 0.5)]
    assert _judge(table, {"type": "image_size", "min_height": 20, "max_width": 10}) == []


# Sharpness


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


@pytest.mark.parametrize("shard", ["image-text/image-text-00000.tar", "mint1t-html/mint1t-html-00000.tar"])
def test_real_images_are_judged_by_the_sizes_that_a_decoder_sees(make_table, shared_data, shard):
    """Over the images of a real shard the filter keeps exactly those whose ratio, as Pillow opens them, is in range."""
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
