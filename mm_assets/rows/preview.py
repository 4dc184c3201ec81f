"""A summary of a table while it streams past: its first rows, a contact sheet, and sizes by power of two.

A preview holds a few rows and images of a table of any size. It only describes: content that it cannot draw is not an
error of the data.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.errors import EncodeError, FormatError, MissingExtraError
from mm_assets.fields import ImageField

__all__ = ["DrawnPreview", "Preview"]

MAX_CELL = 40  # characters of a value that a preview shows
MAX_IMAGE_BYTES = 4 << 20  # larger images are left out of the contact sheet
MAX_HELD_BYTES = 8 << 20  # of the images that are held until it is drawn
THUMBNAIL = 72  # pixels; the sheet stays in Dagster's event log, so it has to be tiny
COLUMNS = 6
GROUND = 245  # grey level
_FIELD = ImageField(
    max_pixels=32 << 20,
    decode_size=(THUMBNAIL - 4, THUMBNAIL - 4),
    decode_resize="pad",
    decode_fill=GROUND,
    decode_mode="fast",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPreview:
    """What a preview shows, without the content that it was drawn from.

    Attributes:
        num_rows: rows of the table.
        modalities: rows by modality; empty of a table without that column.
        table: `Preview.table`.
        histogram: `Preview.histogram`.
        contact_sheet: `Preview.contact_sheet`.
    """

    num_rows: int
    modalities: Mapping[str, int]
    table: str
    histogram: str
    contact_sheet: bytes | None


class Preview:
    """Watches the batches of one table, and holds a number of rows and images."""

    def __init__(self, *, num_rows: int = 3, num_images: int = 6) -> None:
        self._num_rows = num_rows
        self._num_images = num_images
        self.rows: list[dict[str, str]] = []
        self.modalities: Counter[str] = Counter()
        self._sizes: Counter[int] = Counter()
        self._images: list[bytes] = []
        self.num_rows = 0
        self.content_bytes = 0

    def observe(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Observes a batch and returns it."""
        self.num_rows += batch.num_rows
        if len(self.rows) < self._num_rows:
            for row in batch.slice(0, self._num_rows - len(self.rows)).to_pylist():
                self.rows.append({name: _cell(value) for name, value in row.items()})
        names = batch.schema.names
        if "modality" in names:
            for item in pc.value_counts(batch.column("modality")):
                self.modalities[item["values"].as_py()] += item["counts"].as_py()
        if "binary_content" in names:
            self._observe_content(batch)
        return batch

    def _observe_content(self, batch: pa.RecordBatch) -> None:
        content = batch.column("binary_content")
        sizes = pc.binary_length(content).drop_null()
        self.content_bytes += pc.sum(sizes).as_py() or 0
        # The exponent of a whole number as a float is its number of bits.
        bits, counts = np.unique(np.frexp(sizes.to_numpy(zero_copy_only=False))[1], return_counts=True)
        self._sizes.update(dict(zip(bits.tolist(), counts.tolist(), strict=True)))
        if len(self._images) < self._num_images:
            wanted = pc.and_(pc.equal(batch.column("modality"), "image"), pc.is_valid(content))
            held = sum(map(len, self._images))
            for row in pc.indices_nonzero(wanted).to_pylist():
                size = content[row].as_buffer().size
                if size <= min(MAX_IMAGE_BYTES, MAX_HELD_BYTES - held):
                    self._images.append(content[row].as_py())
                    held += size
                if len(self._images) >= self._num_images:
                    break

    def drawn(self) -> DrawnPreview:
        """The preview of what was observed so far; one without rows has the number of rows of the table only."""
        if not self._num_rows:
            return DrawnPreview(num_rows=self.num_rows, modalities={}, table="", histogram="", contact_sheet=None)
        return DrawnPreview(
            num_rows=self.num_rows,
            modalities=dict(self.modalities),
            table=self.table(),
            histogram=self.histogram(),
            contact_sheet=self.contact_sheet(),
        )

    def table(self) -> str:
        """The first rows as a Markdown table; empty text where there are none."""
        if not self.rows:
            return ""
        names = [name for name in self.rows[0] if any(row[name] for row in self.rows)]
        lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
        lines += ["| " + " | ".join(_escape(row[name]) for name in names) + " |" for row in self.rows]
        return "\n".join(lines)

    def histogram(self) -> str:
        """Content sizes by power of two as a Markdown table with bars; empty text without content."""
        if not self._sizes:
            return ""
        most = max(self._sizes.values())
        lines = ["| bytes | items | |", "| ---: | ---: | --- |"]
        for bits in range(min(self._sizes), max(self._sizes) + 1):
            count = self._sizes[bits]
            bar = "█" * max(round(24 * count / most), 1 if count else 0)
            lines.append(f"| < {_human(1 << bits)} | {count} | {bar} |")
        return "\n".join(lines)

    def contact_sheet(self) -> bytes | None:
        """The first images side by side as a WebP of at most 432 x 72 pixels, or None where none could be drawn."""
        from PIL import Image

        drawn = [thumbnail for thumbnail in map(_thumbnail, self._images) if thumbnail is not None]
        if not drawn:
            return None
        height = -(-len(drawn) // COLUMNS) * THUMBNAIL
        sheet = Image.new("RGB", (min(len(drawn), COLUMNS) * THUMBNAIL, height), (GROUND, GROUND, GROUND))
        for number, thumbnail in enumerate(drawn):
            left = number % COLUMNS * THUMBNAIL + (THUMBNAIL - thumbnail.width) // 2
            top = number // COLUMNS * THUMBNAIL + (THUMBNAIL - thumbnail.height) // 2
            sheet.paste(thumbnail, (left, top))
        target = io.BytesIO()
        sheet.save(target, "WEBP", quality=40)
        return target.getvalue()


def _thumbnail(content: bytes) -> Any:
    """What the reader of a packed file decodes, small, before the ground of the sheet; None for what it refuses."""
    from PIL import Image

    try:
        image = Image.fromarray(_FIELD.decode(*_FIELD.encode(content)).squeeze())
    except (EncodeError, FormatError, MissingExtraError):
        return None  # the checks and filters judge that, not a preview
    ground = Image.new("RGBA", image.size, (GROUND, GROUND, GROUND, 255))
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = str(value)
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"


def _escape(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown.replace("\\", "\\\\").replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def _human(size: int) -> str:
    for unit in ("", "Ki", "Mi"):
        if size < 1024:
            return f"{size} {unit}".strip()
        size //= 1024
    return f"{size} Gi"
