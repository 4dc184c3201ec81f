"""Built-in annotators: the measures of the built-in filters, as columns.

Each takes ``prefix``, put before the names of its columns, for datasets whose own columns have the same names. A
measure that a filter takes too is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from mm_assets.filters.audio import DEFAULT_THRESHOLD, DEFAULT_WINDOW, SilenceMeter, duration_seconds
from mm_assets.filters.base import Annotator, Block, Rows
from mm_assets.filters.duplicates import content_digests
from mm_assets.filters.image import DEFAULT_MIN_SIDE, image_infos, sharpness_measure, sharpness_scores
from mm_assets.filters.near_duplicates import image_hashes
from mm_assets.filters.parameters import check_names, check_whole, wrong
from mm_assets.filters.text import count_characters, count_words, images_and_words
from mm_assets.filters.video import frames_a_second, video_infos
from mm_assets.rows.schema import UserColumn

__all__ = [
    "AudioDurationAnnotator",
    "BlurAnnotator",
    "ContentHashAnnotator",
    "ImageSizeAnnotator",
    "ImageToTextRatioAnnotator",
    "PerceptualHashAnnotator",
    "SilenceAnnotator",
    "TextLengthAnnotator",
    "VideoInfoAnnotator",
]


def _columns(prefix: str, rows: str, **types: str) -> tuple[UserColumn, ...]:
    if not isinstance(prefix, str):
        raise wrong("prefix", f"is {prefix!r}, expected text")
    return tuple(UserColumn(name=prefix + name, source="", type=kind, rows=rows) for name, kind in types.items())


def _measures(prefix: str, columns: Sequence[UserColumn]) -> Mapping[str, str]:
    """The measure of each column by its name: the name without the prefix."""
    return {column.name: column.name.removeprefix(prefix) for column in columns}


def _spread(
    block: Block, rows: Rows, columns: Sequence[UserColumn], values: Iterable[tuple[object, ...] | None]
) -> Mapping[str, pa.Array]:
    """The columns filled at `rows`, with a tuple for each row; None where the row cannot be measured."""
    empty = (None,) * len(columns)
    filled = [empty if row is None else row for row in values]
    return {
        column.name: block.spread(rows, (row[number] for row in filled), column.arrow_type)
        for number, column in enumerate(columns)
    }


class ImageSizeAnnotator(Annotator):
    """Adds ``image_width`` and ``image_height`` in pixels and ``image_aspect_ratio`` to image rows."""

    needs_content = True

    def __init__(self, *, prefix: str = "") -> None:
        self.columns = _columns(prefix, "image", image_width="int64", image_height="int64", image_aspect_ratio="double")
        self.measures = _measures(prefix, self.columns)

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Reads headers; null where that fails."""
        rows = block.rows_of("image")
        upright = (None if info is None else info.upright_size for info in image_infos(block, rows))
        sizes = (None if size is None else (*size, size[0] / size[1]) for size in upright)
        return _spread(block, rows, self.columns, sizes)


class BlurAnnotator(Annotator):
    """Adds ``image_sharpness``, the variance of the Laplacian, to image rows.

    Args:
        min_side: as of the filter ``blur``.
        prefix: put before the column's name.
    """

    needs_content = True

    def __init__(self, *, min_side: int | None = DEFAULT_MIN_SIDE, prefix: str = "") -> None:
        self.min_side = None if min_side is None else check_whole("min_side", min_side, least=1)
        self.columns = _columns(prefix, "image", image_sharpness="double")
        self.measures = {self.columns[0].name: sharpness_measure(self.min_side)}

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Decodes at a reduced scale; null where that fails."""
        rows = block.rows_of("image")
        scores = sharpness_scores(block, rows, min_side=self.min_side)
        return {self.columns[0].name: block.spread(rows, scores, pa.float64())}


class AudioDurationAnnotator(Annotator):
    """Adds ``audio_duration_seconds`` to audio rows."""

    needs_content = True

    def __init__(self, *, prefix: str = "") -> None:
        self.columns = _columns(prefix, "audio", audio_duration_seconds="double")
        self.measures = _measures(prefix, self.columns)

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Reads headers; null where that fails."""
        rows = block.rows_of("audio")
        return {self.columns[0].name: block.spread(rows, duration_seconds(block, rows), pa.float64())}


class SilenceAnnotator(Annotator):
    """Adds ``audio_silence``, a share, and the seconds of silence at both ends to audio rows.

    All parameters but `prefix` are those of the filter ``audio_silence``.
    """

    needs_content = True

    def __init__(
        self,
        *,
        threshold_dbfs: float = DEFAULT_THRESHOLD,
        level: str = "rms",
        window_seconds: float = DEFAULT_WINDOW,
        prefix: str = "",
    ) -> None:
        self.meter = SilenceMeter(threshold_dbfs=threshold_dbfs, level=level, window_seconds=window_seconds)
        self.columns = _columns(
            prefix,
            "audio",
            audio_silence="double",
            audio_leading_silence_seconds="double",
            audio_trailing_silence_seconds="double",
        )
        self.measures = {name: self.meter.measure(of) for name, of in _measures(prefix, self.columns).items()}

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Decodes; null where that fails."""
        rows = block.rows_of("audio")
        values = (
            None if found is None else (found.share, found.leading_seconds, found.trailing_seconds)
            for found in self.meter(block, rows)
        )
        return _spread(block, rows, self.columns, values)


class VideoInfoAnnotator(Annotator):
    """Adds duration, width, height, frame rate and whether there is audio to video rows."""

    needs_content = True

    def __init__(self, *, prefix: str = "") -> None:
        self.columns = _columns(
            prefix,
            "video",
            video_duration_seconds="double",
            video_width="int64",
            video_height="int64",
            video_frame_rate="double",
            video_has_audio="bool",
        )
        self.measures = _measures(prefix, self.columns)

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Reads headers; null where that fails, without a video stream, or without the value in the header."""
        rows = block.rows_of("video")
        values = (
            info
            if info is None
            else (info.duration_seconds, info.width or None, info.height or None, frames_a_second(info), info.has_audio)
            for info in video_infos(block, rows)
        )
        return _spread(block, rows, self.columns, values)


class PerceptualHashAnnotator(Annotator):
    """Adds ``image_perceptual_hash``, 16 hexadecimal digits, to image rows."""

    needs_content = True

    def __init__(self, *, prefix: str = "") -> None:
        self.columns = _columns(prefix, "image", image_perceptual_hash="string")

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Decodes at a reduced scale; null where that fails, and on images too plain to have a hash."""
        rows = block.rows_of("image")
        hashes = [None if found is None else f"{found:016x}" for found in image_hashes(block, rows)]
        return {self.columns[0].name: block.spread(rows, hashes, pa.string())}


class ContentHashAnnotator(Annotator):
    """Adds ``content_sha256``, in hexadecimal, to content rows.

    Args:
        modalities: row modalities to hash; None hashes all content.
        prefix: put before the column's name.
    """

    def __init__(self, *, modalities: Sequence[str] | None = None, prefix: str = "") -> None:
        self.modalities = None if modalities is None else check_names("modalities", modalities)
        self.needs_content = self.modalities != ("text",)
        self.columns = _columns(prefix, "", content_sha256="string")

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Hashes bytes, or texts as UTF-8; null where a row has neither."""
        rows = np.flatnonzero(~block.is_metadata) if self.modalities is None else block.rows_of(*self.modalities)
        digests = [None if digest is None else digest.hex() for digest in content_digests(block, rows)]
        return {self.columns[0].name: block.spread(rows, digests, pa.string())}


class TextLengthAnnotator(Annotator):
    """Adds ``text_chars`` and ``text_words`` to text rows."""

    def __init__(self, *, prefix: str = "") -> None:
        self.columns = _columns(prefix, "text", text_chars="int64", text_words="int64")
        self.measures = _measures(prefix, self.columns)

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Counts code points and words; null on rows without text."""
        texts = block.column("text_content")
        return {self.columns[0].name: count_characters(texts), self.columns[1].name: count_words(texts)}


class ImageToTextRatioAnnotator(Annotator):
    """Adds ``num_images``, ``num_words`` and ``image_to_text_ratio`` of the sample to metadata rows."""

    def __init__(self, *, prefix: str = "") -> None:
        self.columns = _columns(prefix, "metadata", num_images="int64", num_words="int64", image_to_text_ratio="double")

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Counts over the samples as they are before any filter."""
        rows = np.flatnonzero(block.is_metadata)
        images, words = (counts[block.sample_index[rows]] for counts in images_and_words(block))
        ratios = images / np.maximum(words, 1)
        values = zip(images.tolist(), words.tolist(), ratios.tolist(), strict=True)
        return _spread(block, rows, self.columns, values)
