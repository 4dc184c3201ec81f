"""A summary of a table while it streams past: its first rows, a few samples with their picture, and small charts.

A preview holds a few rows, images and numbers of a table of any size. It only describes: what it cannot draw is not an
error of the data, so an exception while it observes or draws a part costs that part and a line in the log. Its counts
of rows and bytes are exact.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.errors import MmAssetsError, best_effort
from mm_assets.fields import AudioField, ImageField
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from PIL.Image import Image
from mm_assets.summaries import bytes_said

__all__ = [
    "MAX_BYTES",
    "MAX_CONTENT",
    "Chart",
    "DrawnPreview",
    "Numbers",
    "Preview",
    "SampleView",
    "drawn_bars",
    "shortened",
    "size_chart",
    "thumbnail",
]

MAX_CELL = 40  # characters of a value that a preview shows
MAX_TEXT = 60  # of a sample's text
MAX_HELD_BYTES = 8 << 20  # of the media that are held until they are drawn
MAX_ROWS = 512  # that are looked at for samples
PICTURES_PER_SAMPLE = 3
NUM_CHARTS = 3  # of columns

MAX_VALUES = 4096  # that a chart is drawn from; of more, it is every second, fourth, … one
BARS, BAR_WIDTH, HEIGHT = 32, 5, 40  # pixels
COLOUR = (79, 67, 221)

MAX_BYTES = 480  # base64 takes a third more; Dagster shows Markdown of less than 1,000 characters in place
MAX_CONTENT: Mapping[str, int] = {"image": 4 << 20, "audio": 2 << 20, "video": 8 << 20}  # bytes; larger is not drawn
GROUND = 245  # grey level
_STEPS = ((104, 30), (88, 25), (72, 20), (56, 15), (40, 10), (24, 5))  # edge in pixels and quality, until it fits
_EDGE = _STEPS[0][0]
_MAX_PIXELS = 32 << 20
_MAX_FRAMES = 1 << 23  # of audio: three minutes at 44.1 kHz
_WAVE = 48  # bars of a waveform
_IMAGE = ImageField(
    max_pixels=_MAX_PIXELS,
    decode_size=(_EDGE, _EDGE),
    decode_resize="pad",
    decode_fill=GROUND,
    decode_mode="fast",
)
_AUDIO = AudioField(max_frames=_MAX_FRAMES)

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


# -- charts: pictures of some hundred bytes, since an event log holds one of each partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A histogram.

    Attributes:
        name: what is counted: a column for instance.
        said: number and range of the values, in words.
        picture: PNG with transparent ground.
    """

    name: str
    said: str
    picture: bytes


class Numbers:
    """The numbers of a column: their count, their range, and a sample of at most `MAX_VALUES` for a chart."""

    def __init__(self) -> None:
        self.count = 0
        self._lowest: int | float = math.inf
        self._highest: int | float = -math.inf
        self._values: list[npt.NDArray[Any]] = []
        self._num_values = 0
        self._step = 1

    def add(self, column: pa.Array) -> None:
        """Adds the values of an integer or floating-point column except nulls, NaN and infinities."""
        values = column.drop_null().to_numpy(zero_copy_only=False)
        if values.dtype.kind == "f":
            values = values[np.isfinite(values)].astype(np.float64)
        if not len(values):
            return
        # As Python's numbers: integers above 2**53 are not doubles, and the difference of two int64 is not an int64.
        self._lowest = min(self._lowest, values.min().item())
        self._highest = max(self._highest, values.max().item())
        first = -self.count % self._step
        self.count += len(values)
        self._values.append(values[first :: self._step])
        self._num_values += len(self._values[-1])
        while self._num_values > MAX_VALUES:
            self._values = [np.concatenate(self._values)[::2]]
            self._num_values = len(self._values[0])
            self._step *= 2

    def chart(self, name: str) -> Chart | None:
        """Returns the histogram, or None if all values are equal."""
        if not self.count or self._lowest == self._highest:
            return None
        values = np.concatenate(self._values)
        counts = np.bincount(_bars_of(values, self._lowest, self._highest), minlength=BARS)
        with np.errstate(over="ignore"):  # the mean of the two middle ones of the largest doubles
            median = float(np.median(values))
        middle = f"median {'' if self._step == 1 else 'about '}{_format_number(median)}"
        ends = f"{_format_number(self._lowest)} to {_format_number(self._highest)}"
        said = f"{counted(self.count, 'value')}, {ends}, {middle}"
        return Chart(name=name, said=said, picture=drawn_bars(counts.tolist()))


def _bars_of(values: npt.NDArray[Any], lowest: float, highest: float) -> npt.NDArray[np.intp]:
    """Returns the number of the bar of each value, all bars being of equal width between two different numbers."""
    if isinstance(lowest, int):
        # Modulo 2**64 the distance from the lowest value is exact for signed and unsigned integers.
        distance = (values.astype(np.uint64) - np.array([lowest % 2**64], np.uint64)).astype(np.float64)
        ratios = distance / (highest - lowest)
    else:
        scale = 1.0 if math.isfinite(highest - lowest) else 0.5
        ratios = (values * scale - lowest * scale) / (highest * scale - lowest * scale)
    return np.minimum((ratios * BARS).astype(np.intp), BARS - 1)


def size_chart(sizes: Mapping[int, int]) -> Chart:
    """The histogram of sizes of media, a bar per power of two.

    Args:
        sizes: number of bits of a size to the number of items with it.
    """
    low, high = min(sizes), max(sizes)
    ends = f"{bytes_said(2 ** (low - 1) if low else 0)} to {bytes_said(2**high)}"
    said = f"{counted(sum(sizes.values()), 'item')}, {ends}, a bar per power of two"
    return Chart(name="content_size", said=said, picture=drawn_bars([sizes.get(n, 0) for n in range(low, high + 1)]))


def drawn_bars(counts: Sequence[float], *, is_centred: bool = False) -> bytes:
    """A PNG with a bar per number; that of a number above 0 is at least one pixel high.

    Args:
        counts: the numbers, none below 0.
        is_centred: bars extend to both sides of the middle, as those of a waveform.
    """
    from PIL import Image

    width = max(BARS * BAR_WIDTH // max(len(counts), 1), 2)
    most = max(counts, default=0) or 1
    pixels = np.zeros((HEIGHT, width * len(counts)), np.uint8)
    for number, count in enumerate(counts):
        high = max(round(HEIGHT * count / most), 1) if count else 0
        top = (HEIGHT - high) // 2 if is_centred else HEIGHT - high
        pixels[top : top + high, number * width : (number + 1) * width - 1] = 1
    image = Image.fromarray(pixels, "P")
    image.putpalette([*(255, 255, 255), *COLOUR])
    target = io.BytesIO()
    image.save(target, "PNG", bits=1, transparency=0, optimize=True)
    return target.getvalue()


def _format_number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e15:
        return f"{value:.6g}"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


# -- pictures of media, small enough for an event log: a page of Dagster shows them without a click


def thumbnail(content: bytes, modality: str = "image") -> bytes | None:
    """A picture of a media item of at most `MAX_BYTES`: a WebP, of audio the waveform as a PNG.

    An image is decoded as the reader of a packed file does it; of a video the keyframe in the middle is. Returns None
    for what cannot be decoded or drawn, or is too large to be worth it: checks and filters validate it.
    """
    draw = _DRAWN.get(modality)
    if draw is None or len(content) > MAX_CONTENT[modality]:
        return None
    with best_effort(f"the picture of an item ({modality})"), suppress(MmAssetsError):
        return draw(content)
    return None


def _image(content: bytes) -> bytes | None:
    return _small(_IMAGE.decode(*_IMAGE.encode(content)).squeeze())


def _video(content: bytes) -> bytes | None:
    from mm_assets.media.frames import read_frames
    from mm_assets.media.video import index_frames

    found = index_frames(content, max_pixels=_MAX_PIXELS)
    if found is None:
        return None
    index = found[0]
    keyframe = index.keyframe_pts[len(index.keyframe_pts) // 2]
    position = min(int(np.searchsorted(index.pts, keyframe)), len(index.pts) - 1)
    return _small(next(read_frames(content, index, [position], max_pixels=_MAX_PIXELS)))


def _audio(content: bytes) -> bytes | None:
    samples = np.abs(_AUDIO.decode(*_AUDIO.encode(content)).samples).max(axis=1)
    if not len(samples):
        return None
    loudest = [float(part.max()) for part in np.array_split(samples, min(_WAVE, len(samples)))]
    return drawn_bars(loudest, is_centred=True)


_DRAWN: Mapping[str, Callable[[bytes], bytes | None]] = {"image": _image, "audio": _audio, "video": _video}


def _small(pixels: npt.NDArray[np.uint8]) -> bytes | None:
    """Pixels before a light ground, as large as fits."""
    from PIL import Image

    image = Image.fromarray(pixels)
    ground = Image.new("RGBA", image.size, (GROUND, GROUND, GROUND, 255))
    image = Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    return next(filter(None, (_webp(image, edge, quality) for edge, quality in _STEPS)), None)


def _webp(image: Image, edge: int, quality: int) -> bytes | None:
    small, target = image.copy(), io.BytesIO()
    small.thumbnail((edge, edge))
    small.save(target, "WEBP", quality=quality, method=6)
    return target.getvalue() if target.tell() <= MAX_BYTES else None
