"""Timed text: word timings, subtitles and timed lyrics, as columns of starts, ends and texts.

Times are float64 seconds: those of JSON sources come back to the bit, and the milliseconds of a subtitle file come
back by rounding. The columns of times are read without the texts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.base import Encoded, Field, corrupt, decode_utf8, over_limit, stored_array, truncated
from mm_assets.fields.facts import Fact, Spans
from mm_assets.json_text import parse_json, repair_json
from mm_assets.media.content_types import Buffer
from mm_assets.media.subtitles import Report, TimedSegment, parse_subtitles
from mm_assets.summaries import describe

__all__ = ["TimedSegment", "TimedTextField", "segments_at", "segments_between"]

_HEAD = 4096  # bytes or characters that distinguish JSON from lyrics; JSON begins after less white space than that
DEFAULT_MAX_SEGMENTS = 1_000_000  # the words of a hundred hours of speech

_LISTS = ("words", "chunks", "segments")  # of Gentle and NeMo, of Hugging Face pipelines, of Whisper
_STARTS = ("start", "start_seconds", "start_time")
_ENDS = ("end", "end_seconds", "end_time")
_TEXTS = ("text", "word")
_PAIR = "timestamp"
_EXPECTED = "(start, end, text) triples, dicts with start, end and text or word, or SRT, WebVTT, LRC or JSON text"


@dataclass(frozen=True, kw_only=True)
class TimedTextField(Field):
    """Texts with the times that they cover.

    Value: a list of (start, end, text) in seconds; or of dicts with ``start``, ``end`` (also ``start_seconds``,
    ``start_time`` and so on, or a ``timestamp`` of two) and ``text`` or ``word``; or a dict that has such a list as
    ``words``, ``chunks`` or ``segments``; or any of these as JSON text; or the text of an SRT, WebVTT or LRC file, str
    or bytes, detected from its content. Decodes to a list of `TimedSegment`. An empty list is a value.

    Times are finite, start at 0 or later, and end where they start or later. Segments may overlap, but start in order.

    Attributes:
        sort: put segments in order of their starts; otherwise others are refused. Equal starts stay as they are.
        strip_tags: remove the markup of subtitle files.
        untimed: what to do with an item that has no start and no end, such as a word that an aligner did not find:
            ``error`` refuses the value, ``drop`` leaves it out.
        max_segments: that are encoded or decoded at most.
    """

    TYPE_ID: ClassVar[int] = 21
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [("num_segments", "<u4"), ("_pad", "<u4"), ("start_seconds", "<f8"), ("end_seconds", "<f8")]
    )
    FACTS: ClassVar[tuple[type[Fact], ...]] = (Spans,)
    LIMITS: ClassVar[tuple[str, ...]] = ("max_segments",)

    sort: bool = False
    strip_tags: bool = False
    untimed: str = "error"
    max_segments: int = DEFAULT_MAX_SEGMENTS

    def __post_init__(self) -> None:
        self._expect_bool("sort")
        self._expect_bool("strip_tags")
        self._expect_choice("untimed", ("error", "drop"))
        self._expect_int("max_segments", 1, 2**32 - 1)

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: Sequence[Any] | Mapping[str, Any] | str | Buffer) -> Encoded:
        """Encode segments, or the content of a file of them."""
        segments = self._segments_of(value)
        texts = [self._utf8_of(segment.text, index) for index, segment in enumerate(segments)]
        offsets = np.cumsum([0, *map(len, texts)], dtype="<u8")
        times = np.array([[one.start_seconds for one in segments], [one.end_seconds for one in segments]], dtype="<f8")
        self._expect_data_size(times.nbytes + 4 * len(offsets) + int(offsets[-1]))
        extent = (float(times[0, 0]), float(times[1].max())) if segments else (0.0, 0.0)
        return Encoded(
            self._pack_record(len(segments), *extent),
            b"".join([times.tobytes(), offsets.astype("<u4").tobytes(), *texts]),
        )

    def omissions(self, value: Sequence[Any] | Mapping[str, Any] | str | Buffer) -> Sequence[str]:
        """Describes each cue and text of a subtitle file that is left out, with its line."""
        omitted: list[str] = []
        if isinstance(value, str | Buffer):
            self._parse(value, omitted.append)
        return omitted

    def _utf8_of(self, text: str, index: int) -> bytes:
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self._wrong_content(f"segment {index} with {error.reason}", "text that has a UTF-8 form") from error

    def _segments_of(self, value: object) -> list[TimedSegment]:
        if isinstance(value, str | Buffer):
            value = self._parse(value)
        if isinstance(value, Mapping):
            lists = [value[name] for name in _LISTS if isinstance(value.get(name), list | tuple)]
            if not lists:
                raise self._wrong_content(
                    f"a dict with {sorted(map(str, value))[:8]}", f"a list as {' or '.join(_LISTS)}"
                )
            value = lists[0]
        if not isinstance(value, list | tuple) or isinstance(value, TimedSegment):
            raise self._wrong_value(value, _EXPECTED)
        if len(value) > self.max_segments:
            raise self._too_large(f"{len(value)} segments", f"at most {self.max_segments}", "max_segments")
        found = (self._segment_of(item, index) for index, item in enumerate(value))
        segments = [segment for segment in found if segment is not None]
        if self.sort:
            return sorted(segments, key=attrgetter("start_seconds"))
        for index in range(1, len(segments)):
            last, start = segments[index - 1].start_seconds, segments[index].start_seconds
            if start < last:
                raise self._wrong_content(f"a start of {start} s after {last} s at segment {index}", "order, or sort")
        return segments

    def _parse(self, content: str | Buffer, report: Report = lambda _: None) -> object:
        """The value in a file's content."""
        if isinstance(content, str):
            head = content[:_HEAD]
        else:
            head = bytes(as_bytes_view(content)[:_HEAD]).decode("utf-8", "ignore")
        head = "".join(head.removeprefix("\ufeff").split())
        # A JSON list of items begins "[[" or "[{" or is empty, LRC "[" and a digit or a tag's name.
        if head.startswith(("{", "[[", "[{")) or head == "[]":
            try:
                text = content if isinstance(content, str) else str(content, "utf-8")
                return parse_json(repair_json(text.removeprefix("\ufeff")).text)
            except ValueError as error:
                raise self._wrong_content(f"{describe(content)}, which {error}", _EXPECTED) from error
        try:
            return parse_subtitles(content, strip_tags=self.strip_tags, report=report)
        except MediaError as error:
            raise self._wrong_content(error.reason.removeprefix("found "), "subtitles or lyrics") from error

    def _segment_of(self, item: object, index: int) -> TimedSegment | None:
        """One segment, checked; None for one without times that is to be left out."""
        if isinstance(item, Mapping):
            start, end, text = self._read_item(item, index)
        elif isinstance(item, list | tuple) and len(item) == 3:
            start, end, text = item
        else:
            raise self._wrong_content(f"{describe(item)} as segment {index}", _EXPECTED)
        if start is None and end is None and self.untimed == "drop":
            return None
        if not isinstance(text, str):
            raise self._wrong_content(f"text {describe(text)} of segment {index}", "str")
        start_seconds, end_seconds = (self._seconds_of(time, index) for time in (start, end))
        if not 0 <= start_seconds <= end_seconds:
            found = f"{start_seconds} s to {end_seconds} s as segment {index}"
            raise self._wrong_content(found, "a start at 0 or later and an end that is not before it")
        return TimedSegment(start_seconds, end_seconds, text)

    def _read_item(self, item: Mapping[Any, Any], index: int) -> tuple[object, object, object]:
        pair = item.get(_PAIR)
        if isinstance(pair, list | tuple) and len(pair) == 2:
            return (*pair, _first(item, _TEXTS))
        text = _first(item, _TEXTS)
        if text is None:
            raise self._wrong_content(f"a dict with {sorted(map(str, item))[:8]} as segment {index}", _EXPECTED)
        return _first(item, _STARTS), _first(item, _ENDS), text

    def _seconds_of(self, time: object, index: int) -> float:
        is_number = isinstance(time, int | float | np.integer | np.floating) and not isinstance(time, bool)
        try:
            seconds = float(time) if is_number else math.nan  # type: ignore[arg-type]  # the line above has looked
        except OverflowError:
            seconds = math.inf
        if not math.isfinite(seconds):
            raise self._wrong_content(f"time {describe(time)} of segment {index}", "finite seconds")
        return seconds + 0.0  # -0.0 becomes 0.0: one moment, one form

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> list[TimedSegment]:
        """Return the segments in order of their starts."""
        times, offsets, texts = self._open(metadata, data)
        # Each by its own bytes: an offset within a character is damage.
        strings = [decode_utf8(texts[start:end]) for start, end in pairwise(offsets)]
        return [TimedSegment(start, end, text) for (start, end), text in zip(times.tolist(), strings, strict=True)]

    def decode_window(
        self, metadata: Buffer | np.void, data: Buffer, start_seconds: float, seconds: float
    ) -> list[TimedSegment]:
        """Return the segments that cover any moment of a window, whole, with times from the window's start.

        The start of a segment that began before is negative, and an end may be after the window. No other text is read.
        """
        times, offsets, texts = self._open(metadata, data)
        starts, ends = times[:, 0], times[:, 1]
        covers = (starts < start_seconds + seconds) & ((ends > start_seconds) | (starts >= start_seconds))
        return [
            TimedSegment(
                float(starts[k] - start_seconds),
                float(ends[k] - start_seconds),
                decode_utf8(texts[offsets[k] : offsets[k + 1]]),
            )
            for k in np.flatnonzero(covers).tolist()
        ]

    def writable(self, value: list[TimedSegment]) -> list[TimedSegment]:
        """The value itself, which has no arrays."""
        return value

    def times(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[np.float64]:
        """Return (num_segments, 2) float64, start and end in seconds: a read-only view that reads no text.

        Raises:
            FormatError: the payload is damaged.
        """
        return self._open(metadata, data)[0]

    def facts(self, metadata: Buffer, data: Buffer) -> Iterator[Spans]:
        """The segments."""
        times = self.times(metadata, data)
        yield Spans("text", times[:, 0], times[:, 1])

    def _open(self, metadata: Buffer | np.void, data: Buffer) -> tuple[npt.NDArray[np.float64], list[int], memoryview]:
        """Times, text offsets and texts, checked."""
        num_segments, first, last = self._unpack_record(metadata)
        view = as_bytes_view(data)
        texts_start = 16 * num_segments + 4 * (num_segments + 1)
        if len(view) < texts_start:
            raise truncated("segments are shorter than their tables", found=len(view), expected=texts_start)
        if num_segments > self.max_segments:
            expected = f"at most {self.max_segments}"
            raise over_limit("there are too many segments", "max_segments", found=num_segments, expected=expected)
        times = stored_array(view, "<f8", (2, num_segments)).T
        starts, ends = times[:, 0], times[:, 1]
        if not (np.isfinite(times).all() and (starts >= 0).all() and (ends >= starts).all()):
            raise corrupt("a time is impossible", found="a negative, infinite or inverted one", expected="start <= end")
        if (starts[1:] < starts[:-1]).any():
            raise corrupt("segments are out of order", found="a decreasing start", expected="increasing ones")
        extent = (float(starts[0]), float(ends.max())) if num_segments else (0.0, 0.0)
        if (first, last) != extent:
            raise corrupt("segments do not cover what their record says", found=extent, expected=(first, last))
        offsets = stored_array(view, "<u4", (num_segments + 1,), offset=times.nbytes)
        texts = view[texts_start:]
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(texts) or (offsets[1:] < offsets[:-1]).any():
            raise corrupt("texts do not fill the data", found=int(offsets[-1]), expected=len(texts))
        return times, offsets.tolist(), texts


def _first(item: Mapping[Any, Any], names: Sequence[str]) -> object:
    return next((item[name] for name in names if item.get(name) is not None), None)


def segments_at(segments: Sequence[TimedSegment], seconds: float) -> list[TimedSegment]:
    """Those of segments in order that cover a moment: start <= seconds < end, or start == seconds == end."""
    started = bisect_right(segments, seconds, key=attrgetter("start_seconds"))
    return [one for one in segments[:started] if seconds < one.end_seconds or seconds == one.start_seconds]


def segments_between(segments: Sequence[TimedSegment], start_seconds: float, end_seconds: float) -> list[TimedSegment]:
    """Those of segments in order that cover any moment of [start_seconds, end_seconds)."""
    started = bisect_left(segments, end_seconds, key=attrgetter("start_seconds"))
    return [one for one in segments[:started] if start_seconds < one.end_seconds or start_seconds <= one.start_seconds]
