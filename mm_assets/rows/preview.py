"""A summary of a table while it streams past: its first rows, a few samples with their picture, and small charts.

A preview holds a few rows, images and numbers of a table of any size. It only describes: what it cannot draw is not an
error of the data, so an exception while it observes or draws a part costs that part and a line in the log. Its counts
of rows and bytes are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.errors import best_effort
from mm_assets.rows.charts import Chart, Numbers, size_chart
from mm_assets.rows.thumbnails import MAX_CONTENT, thumbnail
from mm_assets.summaries import bytes_said

__all__ = ["DrawnPreview", "Preview", "SampleView", "shortened"]

MAX_CELL = 40  # characters of a value that a preview shows
MAX_TEXT = 60  # of a sample's text
MAX_HELD_BYTES = 8 << 20  # of the media that are held until they are drawn
MAX_ROWS = 512  # that are looked at for samples
PICTURES_PER_SAMPLE = 3
NUM_CHARTS = 3  # of columns

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample, or one more media item of it, as a person sees it.

    Attributes:
        name: its id, which may have any characters.
        said: its content, a few lines.
        picture: as `thumbnail` draws one of its media, or None.
    """

    name: str
    said: tuple[str, ...]
    picture: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPreview:
    """What a preview shows, without the content that it was drawn from.

    Attributes:
        num_rows: rows of the table.
        modalities: rows by modality; empty of a table without that column.
        rows: the first ones, a text by column; columns that are empty in all of them are left out.
        samples: the first ones.
        charts: sizes of media, and numbers of the table.
    """

    num_rows: int = 0
    modalities: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[Mapping[str, str]] = ()
    samples: Sequence[SampleView] = ()
    charts: Sequence[Chart] = ()


@dataclass(slots=True)
class _Sample:
    """What is known of a sample so far."""

    text: str = ""
    content: Counter[str] = field(default_factory=Counter)  # bytes by content type
    numbers: Counter[str] = field(default_factory=Counter)  # rows by content type
    media: list[tuple[str, bytes]] = field(default_factory=list)  # modality and content of what can be drawn

    def said(self) -> tuple[str, ...]:
        parts = []
        for kind, number in self.numbers.items():
            times = "" if number == 1 else f"{number:,} x "
            parts.append(f"{times}{kind} {bytes_said(self.content[kind])}")
        text = f"“{shortened(self.text, MAX_TEXT)}”" if self.text else ""
        return tuple(filter(None, ("; ".join(parts), text)))


class Preview:
    """Watches the batches of one table, and holds a number of rows and images.

    Args:
        num_rows: rows that it shows; without any it only counts.
        num_samples: samples that it shows.
        charted: columns of numbers that it draws in any case.
    """

    def __init__(self, *, num_rows: int = 3, num_samples: int = 4, charted: Sequence[str] = ()) -> None:
        self._num_rows = num_rows
        self._num_samples = num_samples
        self._charted = charted
        self._rows: list[dict[str, str]] = []
        self._samples: dict[str, _Sample] = {}
        self._failed_parts: set[str] = set()
        self._looked_at = 0
        self._held = 0
        self.modalities: Counter[str] = Counter()
        self._sizes: Counter[int] = Counter()
        self._numbers: dict[str, Numbers] = {}
        self.num_rows = 0
        self.content_bytes = 0

    def observe(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Observes a batch and returns it."""
        self.num_rows += batch.num_rows
        names = batch.schema.names
        if "binary_content" in names:
            sizes = pc.binary_length(batch.column("binary_content")).drop_null()
            self.content_bytes += pc.sum(sizes).as_py() or 0
            self._draw("content_size", self._observe_sizes, sizes)
            self.look_at(batch)
        if "modality" in names:
            self._draw("modalities", self._observe_modalities, batch)
        if len(self._rows) < self._num_rows:
            self._draw("first rows", self._observe_rows, batch)
        if self._num_rows:
            for name in self._charts_of(batch.schema):
                self._draw(name, self._observe_numbers, name, batch.column(name))
        return batch

    def observe_dropped(self, batch: pa.RecordBatch) -> None:
        """Observes rows that filters dropped, with the values that decided."""
        if self._num_rows:
            self._draw("dropped values", self._observe_dropped, batch)

    def look_at(self, batch: pa.RecordBatch) -> None:
        """Looks for samples to show in a batch, and counts nothing."""
        if self._num_samples and self._looked_at < MAX_ROWS:
            self._draw("samples", self._observe_samples, batch)

    def _draw(self, part: str, draw: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """Calls what observes or draws a part of the preview; from its first exception on the part is left out."""
        if part not in self._failed_parts:
            self._failed_parts.add(part)
            with best_effort(f"{part!r} of a preview"):
                result = draw(*args, **kwargs)
                self._failed_parts.remove(part)
                return result
        return None

    def _observe_rows(self, batch: pa.RecordBatch) -> None:
        for row in batch.slice(0, self._num_rows - len(self._rows)).to_pylist():
            self._rows.append({name: _cell(value) for name, value in row.items()})

    def _observe_modalities(self, batch: pa.RecordBatch) -> None:
        for item in pc.value_counts(batch.column("modality")):
            self.modalities[item["values"].as_py()] += item["counts"].as_py()

    def _observe_numbers(self, name: str, values: pa.Array) -> None:
        self._numbers.setdefault(name, Numbers()).add(values)

    def _observe_dropped(self, batch: pa.RecordBatch) -> None:
        for name in pc.unique(batch.column("filter")).to_pylist():
            values = batch.column("value").filter(pc.equal(batch.column("filter"), name))
            key = f"dropped/{name}"
            if values.null_count < len(values) and (key in self._numbers or len(self._numbers) < 2 * NUM_CHARTS):
                self._observe_numbers(key, values)

    def _charts_of(self, schema: pa.Schema) -> list[str]:
        """Columns of numbers: those that were asked for, else positions and the last few, which annotators add."""
        found = [one.name for one in schema if pa.types.is_integer(one.type) or pa.types.is_floating(one.type)]
        if self._charted or "position" not in found:
            return [name for name in found if name in self._charted]
        return ["position", *[name for name in found if name != "position"][-NUM_CHARTS:]]

    def _observe_sizes(self, sizes: pa.Array) -> None:
        # The exponent of a whole number as a float is its number of bits.
        bits, counts = np.unique(np.frexp(sizes.to_numpy(zero_copy_only=False))[1], return_counts=True)
        self._sizes.update(dict(zip(bits.tolist(), counts.tolist(), strict=True)))

    def _observe_samples(self, batch: pa.RecordBatch) -> None:
        columns = [batch.column(name) for name in ("sample_id", "modality", "content_type", "text_content")]
        content = batch.column("binary_content")
        for row in range(min(batch.num_rows, MAX_ROWS - self._looked_at)):
            self._looked_at += 1
            name, modality, kind, text = (column[row].as_py() for column in columns)
            if name not in self._samples and len(self._samples) == self._num_samples:
                self._looked_at = MAX_ROWS
                return
            sample = self._samples.setdefault(name, _Sample())
            sample.text = sample.text or (text or "")[:1000]
            if not content[row].is_valid:
                continue
            size = content[row].as_buffer().size
            kind = kind or modality
            sample.numbers[kind] += 1
            sample.content[kind] += size
            may_hold = size <= min(MAX_CONTENT.get(modality, 0), MAX_HELD_BYTES - self._held)
            if may_hold and len(sample.media) < PICTURES_PER_SAMPLE:
                sample.media.append((modality, content[row].as_py()))
                self._held += size

    def drawn(self, further: Sequence[Chart] = ()) -> DrawnPreview:
        """The preview of what was observed so far; one that shows nothing has the number of rows of the table only."""
        if not self._num_rows and not self._num_samples:
            return DrawnPreview(num_rows=self.num_rows)
        names = [name for name in (self._rows or [{}])[0] if any(row[name] for row in self._rows)]
        charts = [self._draw(name, numbers.chart, name) for name, numbers in self._numbers.items()]
        if self._sizes:
            charts.insert(0, self._draw("content_size", size_chart, self._sizes))
        return DrawnPreview(
            num_rows=self.num_rows,
            modalities=dict(self.modalities),
            rows=[{name: row[name] for name in names} for row in self._rows],
            samples=self._draw("samples", self._sample_views) or (),
            charts=[*filter(None, charts), *further],
        )

    def _sample_views(self) -> list[SampleView]:
        """A view of each sample, then of further media while there are fewer than samples that could be shown."""
        views: list[SampleView] = []
        for number in range(PICTURES_PER_SAMPLE):
            for name, sample in self._samples.items():
                if len(views) >= self._num_samples:
                    return views
                picture = next(filter(None, (thumbnail(c, m) for m, c in sample.media[number : number + 1])), None)
                shown = shortened(name, MAX_CELL)
                if number == 0:
                    views.append(SampleView(name=shown, said=sample.said(), picture=picture))
                elif picture is not None:
                    modality, content = sample.media[number]
                    said = f"another {modality}, {bytes_said(len(content))}"
                    views.append(SampleView(name=shown, said=(said,), picture=picture))
        return views


def shortened(text: str, most: int) -> str:
    """A text in printable characters, and no more than `most`."""
    shown = "".join(c if c.isprintable() else " " for c in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return bytes_said(len(value)) if isinstance(value, bytes) else shortened(str(value), MAX_CELL)
