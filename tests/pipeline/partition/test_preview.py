"""A look at a table while it streams past."""

import io
import logging
import math
import tarfile
from pathlib import Path

import numpy as np
import pillow_heif
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.pipeline.partition.preview import BAR_WIDTH, BARS, MAX_BYTES, Numbers, Preview, SampleView, thumbnail
from mm_assets.rows.schema import DROPPED_SCHEMA, MULTIMODAL_SCHEMA


def image(mode: str = "RGB", size: tuple[int, int] = (40, 20)) -> bytes:
    target = io.BytesIO()
    Image.new(mode, size).save(target, "PNG")
    return target.getvalue()


def batch(contents: list[bytes | None], text: str | None = None, sample_id: str = "a") -> pa.RecordBatch:
    rows = [
        {
            "sample_id": sample_id,
            "position": position,
            "modality": "text" if content is None else "image",
            "content_type": "text/plain" if content is None else "image/png",
            "text_content": text if content is None else None,
            "binary_content": content,
        }
        for position, content in enumerate(contents)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=MULTIMODAL_SCHEMA)


def picture_of(view: SampleView) -> Image.Image:
    assert view.picture is not None
    assert len(view.picture) <= MAX_BYTES
    with Image.open(io.BytesIO(view.picture)) as drawn:
        drawn.load()
    return drawn


def test_a_preview_is_small_whatever_the_table() -> None:
    """Rows and pictures are kept up to a number; counts and sizes cover everything."""
    preview = Preview(num_rows=3, num_samples=2)
    for _ in range(5):
        given = batch([image(), None, b"x" * 1000])
        assert preview.observe(given) is given
    assert preview.num_rows == 15
    assert preview.content_bytes == 5 * (len(image()) + 1000)
    drawn = preview.drawn()
    assert dict(drawn.modalities) == {"image": 10, "text": 5}
    assert [row["position"] for row in drawn.rows] == ["0", "1", "2"]
    assert len(drawn.samples) <= 2
    (sizes, positions) = drawn.charts
    assert (sizes.name, sizes.said.split(",")[0]) == ("content_size", "10 items")
    assert (positions.name, positions.said) == ("position", "15 values, 0 to 2, median 1")
    assert all(len(chart.picture) < 400 for chart in drawn.charts)


def test_samples_are_named_and_described() -> None:
    """Each of the first samples has its name, its media by type and size, and its text; more images fill the rest."""
    preview = Preview(num_samples=3)
    preview.observe(batch([image(), None, image("L")], text="A red house.", sample_id="first"))
    preview.observe(batch([None], text="Only words", sample_id="second"))
    first, second, more = preview.drawn().samples
    assert (first.name, second.name, more.name) == ("first", "second", "first")
    assert first.said == (f"2 x image/png {len(image()) + len(image('L'))} bytes", "“A red house.”")
    assert (second.picture, second.said) == (None, ("“Only words”",))
    assert more.said == (f"another image, {len(image('L'))} bytes",)
    assert picture_of(more).size == picture_of(first).size


def test_later_samples_are_not_looked_at() -> None:
    """Only as many samples as are shown are looked at, in the order of the rows."""
    preview = Preview(num_samples=2)
    for name in "abc":
        preview.observe(batch([image()], sample_id=name))
    assert [view.name for view in preview.drawn().samples] == ["a", "b"]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "I;16", "CMYK"])
def test_images_of_every_mode_are_drawn(mode: str) -> None:
    """A picture is made of grey, palette, transparent and 16-bit images."""
    preview = Preview()
    if mode == "CMYK":
        target = io.BytesIO()
        Image.new("CMYK", (30, 30)).save(target, "JPEG")
        content = target.getvalue()
    else:
        content = image(mode)
    preview.observe(batch([content]))
    (view,) = preview.drawn().samples
    assert max(picture_of(view).size) >= 24


def test_a_picture_of_noise_fits_too() -> None:
    """What does not compress is drawn smaller, within the same bytes."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 200, 3)).astype(np.uint8)
    target = io.BytesIO()
    Image.fromarray(noise).save(target, "PNG")
    found = thumbnail(target.getvalue())
    assert found is not None
    assert len(found) <= MAX_BYTES


@pytest.mark.parametrize("form", ["JPEG", "HEIF"])
def test_images_are_drawn_upright(form: str) -> None:
    """The picture shows an image turned by its EXIF orientation, also one of a plug-in."""
    pillow_heif.register_heif_opener()
    picture = Image.new("RGB", (80, 40), "red")
    picture.paste("blue", (0, 0, 40, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter clockwise: blue comes to the top
    target = io.BytesIO()
    picture.save(target, form, exif=exif.tobytes())
    preview = Preview()
    preview.observe(batch([target.getvalue()]))
    (view,) = preview.drawn().samples
    drawn = picture_of(view)
    edge = drawn.width
    assert drawn.height == edge
    red, _, blue = np.asarray(drawn).astype(int).transpose(2, 0, 1)
    assert (blue - red)[edge * 2 // 7, edge // 2] > 100
    assert (red - blue)[edge * 5 // 7, edge // 2] > 100
    assert abs(red - blue)[edge // 2, edge // 9] < 20


def test_audio_is_drawn_as_its_waveform() -> None:
    """The picture of a sound is as loud as the sound, from left to right."""
    import soundfile

    samples = np.concatenate([np.zeros(8000), np.sin(np.arange(8000) / 5)])
    target = io.BytesIO()
    soundfile.write(target, samples, 16_000, format="WAV")
    found = thumbnail(target.getvalue(), "audio")
    assert found is not None
    assert len(found) <= MAX_BYTES
    with Image.open(io.BytesIO(found)) as drawn:
        heights = (np.asarray(drawn) > 0).sum(axis=0)
    half = len(heights) // 2
    assert heights[: half - 4].max() == 0
    assert heights[half + 4 :].max() > 30


def test_a_frame_of_a_video_is_drawn(demo_shards: Path) -> None:
    """The picture of a clip is one of its frames."""
    pytest.importorskip("av", reason="the video extra is not installed")
    with tarfile.open(demo_shards / "video-00000.tar") as shard:
        names = [name for name in shard.getnames() if name.endswith(".mp4")]
        clip = shard.extractfile(names[0])
        assert clip is not None
        found = thumbnail(clip.read(), "video")
    assert found is not None
    with Image.open(io.BytesIO(found)) as drawn:
        assert drawn.width > drawn.height
        assert np.asarray(drawn).std() > 10


@pytest.mark.parametrize("modality", ["image", "audio", "video", "midi"])
def test_what_is_damaged_is_not_drawn(modality: str) -> None:
    """Damaged bytes, and what nothing draws, give no picture and no error."""
    assert thumbnail(b"not a medium", modality) is None
    preview = Preview()
    preview.observe(batch([b"no image", image()[:50], None]))
    assert [view.picture for view in preview.drawn().samples] == [None]


def test_numbers_have_charts() -> None:
    """Columns of numbers and the values that filters decided by are drawn, unless all are alike."""
    preview = Preview()
    given = batch([image()] * 4)
    for name, values in (("image_width", [1, 2, 3, 4]), ("score", [0.5, None, 0.5, 0.5])):
        given = given.append_column(name, pa.array(values))
    preview.observe(given)
    drops = [
        {"sample_id": "a", "position": n, "modality": "image", "filter": "blur", "reason": "low", "value": n / 4}
        for n in range(5)
    ]
    preview.observe_dropped(pa.RecordBatch.from_pylist(drops, schema=DROPPED_SCHEMA))
    charts = {chart.name: chart.said for chart in preview.drawn().charts}
    assert charts.keys() == {"content_size", "position", "image_width", "dropped/blur"}
    assert charts["image_width"] == "4 values, 1 to 4, median 2.5"
    assert charts["dropped/blur"] == "5 values, 0 to 1, median 0.5"


def test_hostile_text_stays_text() -> None:
    """Control characters are replaced and long texts shortened, in rows, names and descriptions."""
    preview = Preview()
    preview.observe(batch([None], text="a\n\x00" + "x" * 500, sample_id="<b>\n" + "y" * 90))
    drawn = preview.drawn()
    (row,) = drawn.rows
    (view,) = drawn.samples
    for text in (*row.values(), view.name, *view.said):
        assert len(text) <= 62
        assert text.isprintable()


NUMBER_TYPES = {
    **{f"int{bits}": (pa.int8, pa.int16, pa.int32, pa.int64)[n]() for n, bits in enumerate((8, 16, 32, 64))},
    **{f"uint{bits}": (pa.uint8, pa.uint16, pa.uint32, pa.uint64)[n]() for n, bits in enumerate((8, 16, 32, 64))},
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
}


def values_of(name: str) -> st.SearchStrategy[list[float | None]]:
    """Draws a column of a type: its extremes, neighbors of 2**53, one value repeated, NaN, infinities, nulls."""
    if "int" in name:
        bits, low = int(name.split("int")[1]), 0 if name[0] == "u" else -(2 ** (int(name[3:]) - 1))
        high = low + 2**bits - 1
        exact = [x for x in (low, high, high - 1, 0, 1, 2**53, 2**53 + 1, 2**60 + 1, 2**63) if low <= x <= high]
        numbers: st.SearchStrategy[float] = st.sampled_from(exact) | st.integers(low, high)
    else:
        width = int(name[5:])
        numbers = st.floats(width=width) | st.sampled_from([0.5, 0.25, 0.0, -0.0])  # type: ignore[arg-type]
        if width == 64:
            numbers |= st.sampled_from([0.3, 0.1 + 0.2, 1.7976931348623157e308, -1.7976931348623157e308, 5e-324])
    return st.lists(st.none() | numbers, max_size=12)


@pytest.mark.parametrize("name", NUMBER_TYPES)
@pytest.mark.nightly_examples(10_000)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_column_of_numbers_has_its_chart(name: str, data: st.DataObject) -> None:
    """A column of any numeric type and any values has a chart with its exact ends, or none if its values are equal."""
    batches = data.draw(st.lists(values_of(name), min_size=1, max_size=3))
    numbers = Numbers()
    for values in batches:
        numbers.add(
            pa.array(
                [np.float16(v) for v in values if v is not None] if name == "float16" else values, NUMBER_TYPES[name]
            )
        )
    finite = [v for values in batches for v in values if v is not None and math.isfinite(v)]
    chart = numbers.chart(name)
    assert (chart is None) == (len(set(finite)) < 2)
    if chart is None:
        return
    assert chart.said.startswith(f"{len(finite)} values, ")
    if "int" in name:
        assert f" {min(finite):,} to {max(finite):,}, " in chart.said
    with Image.open(io.BytesIO(chart.picture)) as picture:
        bars = (np.asarray(picture) > 0).any(axis=0)[::BAR_WIDTH]
    assert len(bars) == BARS
    assert bars[0]
    assert bars[-1]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0.3, 0.1 + 0.2]),
        pa.array([2**53 + 1, None, -(2**63)]),
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([[1], None, []]),
        pa.array([{"a": 1.0}]),
        pa.array([], pa.float64()),
        pa.nulls(3),
        pa.array([math.nan, math.inf]),
        pa.array([2**62], pa.timestamp("s")),
        pa.array([10**37], pa.decimal128(38)),
        pa.array(["\x00"]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_a_preview_takes_any_column(column: pa.Array, caplog: pytest.LogCaptureFixture) -> None:
    """A table with a column of any type passes through unchanged, with exact counts, and only its picture is lost."""
    batch_of = pa.RecordBatch.from_arrays([column, column], names=["position", "value"])
    preview = Preview()
    with caplog.at_level(logging.WARNING):
        assert preview.observe(batch_of) is batch_of
        assert preview.drawn().num_rows == len(column)
    assert len(caplog.records) <= 1


PARTS = (
    "mm_assets.pipeline.partition.preview.thumbnail",
    "mm_assets.pipeline.partition.preview.size_chart",
    "mm_assets.pipeline.partition.preview.shortened",
    "mm_assets.pipeline.partition.preview.bytes_said",
    "mm_assets.pipeline.partition.preview._cell",
    "mm_assets.pipeline.partition.preview._Sample",
    "mm_assets.pipeline.partition.preview.pc.value_counts",
    "mm_assets.pipeline.partition.preview.Numbers.add",
    "mm_assets.pipeline.partition.preview.Numbers.chart",
    "mm_assets.pipeline.partition.preview.drawn_bars",
    "mm_assets.pipeline.partition.preview.ImageField.decode",
    "mm_assets.pipeline.partition.preview._small",
)


def broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError("first line\nsecond line")


@pytest.mark.parametrize("part", PARTS)
def test_an_exception_costs_only_the_drawing(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever raises while a preview is drawn, rows pass, counts are exact, and single lines of the log say so."""
    monkeypatch.setattr(part, broken)
    preview = Preview()
    with caplog.at_level(logging.WARNING, "mm_assets"):
        for _ in range(3):
            rows = batch([image(), None], text="words")
            assert preview.observe(rows) is rows
        drawn = preview.drawn()
    assert (drawn.num_rows, preview.content_bytes) == (6, 3 * len(image()))
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert all("is left out" in line and "ZeroDivisionError: first line" in line for line in lines)
    assert not any("\n" in line for line in lines)
    assert len(lines) <= 4  # one for each picture or chart, none for each batch
