import re
from pathlib import Path

import numpy as np
import pytest

from mm_assets.fields import FIELD_TYPES, Field, ScalarField, SequenceField, TextField
from mm_assets.fields.image_decode import CODECS as IMAGE_CODECS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "spec" / "fields.md").read_text(encoding="utf-8")


def instance(cls: type[Field]) -> Field:
    """A field of that class."""
    return SequenceField(TextField()) if cls is SequenceField else cls()


def record_table(heading: str) -> list[tuple[int, int, str, str]]:
    """Offset, bytes, name and type of each row of the first table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \| (.+) \|$", section, flags=re.MULTILINE)
    return [(int(offset), int(size), name, kind) for offset, size, name, kind in rows]


@pytest.mark.parametrize("type_id", FIELD_TYPES)
def test_records_are_as_documented(type_id):
    """The table of each field's record in docs/spec/fields.md is its dtype."""
    cls = FIELD_TYPES[type_id]
    dtype = instance(cls).metadata_type
    documented = record_table(f"{type_id} {cls.__name__}")
    found = []
    for name in dtype.names:
        kind, offset = dtype.fields[name][:2]
        base = kind.base.str.replace("|", "")
        words = f"`{base}[{kind.shape[0]}]`" if kind.shape else f"`{base}`"
        found.append((offset, kind.itemsize, name, words))
    if cls is ScalarField:
        kinds = [ScalarField(name).metadata_type["value"].str for name in ("int8", "uint8", "float32")]
        assert documented == [(0, 8, "value", f"`{kinds[0]}`, `{kinds[1]}` or `{kinds[2]}`")]
        assert all(instance(cls).metadata_type.itemsize == 8 for _ in kinds)
    else:
        assert documented == found


def test_the_registry_is_as_documented():
    """The table of type ids lists exactly the fields there are, with their record sizes."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| .+ \| (\d+) \|$", PAGE, flags=re.MULTILINE)
    found = [
        (str(number), cls.__name__, str(instance(cls).metadata_type.itemsize)) for number, cls in FIELD_TYPES.items()
    ]
    assert rows == found


def test_every_setting_is_documented():
    """Each setting of each field is named in its section."""
    for type_id, cls in FIELD_TYPES.items():
        section = PAGE.split(f"\n## {type_id} {cls.__name__}\n")[1].split("\n## ")[0]
        for setting in instance(cls).config:
            assert f"`{setting}`" in section, (cls.__name__, setting)


def test_codec_numbers_are_as_documented():
    """The numbers of the image codecs are those of the page."""
    words = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "tiff": "TIFF", "gif": "GIF", "bmp": "BMP"}
    words |= {"avif": "AVIF", "heic": "HEIC", "jxl": "JPEG XL", "jp2": "JPEG 2000", "pnm": "PNM", "ico": "ICO"}
    words |= {"tga": "TGA"}
    listed = ", ".join(f"{number} {words[name]}" for name, number in IMAGE_CODECS.items())
    assert f"`codec` is {listed}." in PAGE


def test_a_sequence_is_laid_out_as_documented():
    """A sequence read by the page's table alone, without this package's code, gives its items."""
    field = SequenceField(TextField())
    pairs = [(0, "a"), (4, "bc"), (9, "")]
    metadata, data = field.encode(pairs)
    num_items, type_id, record_size = np.frombuffer(metadata, "<u4,<u2,<u2")[0].item()
    start = (4 * num_items + 7) // 8 * 8
    positions = np.frombuffer(data, "<i4", num_items)
    offsets = np.frombuffer(data, "<u8", num_items + 1, start)
    assert type_id == 2
    assert offsets[0] == start + 8 * (num_items + 1) + record_size * num_items
    assert [
        (int(position), data[offsets[k] : offsets[k + 1]].decode()) for k, position in enumerate(positions)
    ] == pairs
