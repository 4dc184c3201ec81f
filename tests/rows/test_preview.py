"""A look at a table while it streams past."""

import io

import numpy as np
import pillow_heif
import pyarrow as pa
import pytest
from PIL import Image

from mm_assets.rows.preview import Preview
from mm_assets.rows.schema import MULTIMODAL_SCHEMA


def image(mode: str = "RGB", size: tuple[int, int] = (40, 20)) -> bytes:
    target = io.BytesIO()
    Image.new(mode, size).save(target, "PNG")
    return target.getvalue()


def batch(contents: list[bytes | None], text: str | None = None) -> pa.RecordBatch:
    rows = [
        {
            "sample_id": "a",
            "position": position,
            "modality": "text" if content is None else "image",
            "text_content": text if content is None else None,
            "binary_content": content,
        }
        for position, content in enumerate(contents)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=MULTIMODAL_SCHEMA)


def test_a_preview_is_small_whatever_the_table() -> None:
    """Rows and images are kept up to a number; counts and sizes cover everything."""
    preview = Preview(num_rows=3, num_images=2)
    for _ in range(5):
        given = batch([image(), None, b"x" * 1000])
        assert preview.observe(given) is given
    assert preview.num_rows == 15
    assert dict(preview.modalities) == {"image": 10, "text": 5}
    assert preview.content_bytes == 5 * (len(image()) + 1000)
    assert preview.table().count("\n") == 4
    assert "| < 1 Ki | 5 |" in preview.histogram()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "I;16", "CMYK"])
def test_images_of_every_mode_are_drawn(mode: str) -> None:
    """A contact sheet takes grey, palette, transparent and 16-bit images, in a bounded size."""
    preview = Preview()
    if mode == "CMYK":
        target = io.BytesIO()
        Image.new("CMYK", (30, 30)).save(target, "JPEG")
        content = target.getvalue()
    else:
        content = image(mode)
    preview.observe(batch([content] * 7))
    sheet = preview.contact_sheet()
    assert sheet is not None
    with Image.open(io.BytesIO(sheet)) as drawn:
        assert drawn.size == (432, 72)


@pytest.mark.parametrize("form", ["JPEG", "HEIF"])
def test_images_are_drawn_upright(form: str) -> None:
    """The sheet shows an image turned by its EXIF orientation, also one of a plug-in."""
    pillow_heif.register_heif_opener()
    picture = Image.new("RGB", (80, 40), "red")
    picture.paste("blue", (0, 0, 40, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter clockwise: blue comes to the top
    target = io.BytesIO()
    picture.save(target, form, exif=exif.tobytes())
    preview = Preview()
    preview.observe(batch([target.getvalue()]))
    sheet = preview.contact_sheet()
    assert sheet is not None
    with Image.open(io.BytesIO(sheet)) as drawn:
        red, _, blue = np.asarray(drawn).astype(int).transpose(2, 0, 1)
        assert drawn.size == (72, 72)
        assert (blue - red)[20, 36] > 100
        assert (red - blue)[52, 36] > 100
        assert abs(red - blue)[36, 8] < 20


def test_what_is_not_an_image_is_not_drawn() -> None:
    """Damaged bytes leave no place in the sheet and no error; without any image there is no sheet."""
    preview = Preview()
    preview.observe(batch([b"no image", image()[:50], None]))
    assert preview.contact_sheet() is None


def test_hostile_text_does_not_break_the_tables() -> None:
    """Pipes, backticks, tags and control characters stay inside their cells."""
    preview = Preview()
    preview.observe(batch([None], text="a|b `c` <script>\n\x00" + "x" * 500))
    (_, _, row) = preview.table().splitlines()
    assert "<script>" not in row
    assert row.replace("\\|", "").count("|") == preview.table().splitlines()[0].count("|")
    assert len(row) < 400
