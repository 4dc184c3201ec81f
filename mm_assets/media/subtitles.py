"""Timed text files: SubRip (SRT), WebVTT and LRC lyrics become lists of segments, in the file's order.

Times are read as whole milliseconds and divided once, so that each float in seconds stands for exactly one time of a
file. Byte order marks, any line ends, missing indices and positions after the times are accepted. WebVTT is read by its
specification's parser, SRT as players read it: a cue whose times cannot be read costs that cue, which is reported with
its line. A file without a readable cue is a `MediaError`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import NamedTuple

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer

__all__ = ["Report", "TimedSegment", "parse_subtitles", "without_markup"]

# str.splitlines would also split at U+2028 and form feeds, which may be in a text.
_LINE_END = re.compile(r"\r\n|\n|\r")
_ARROW = "-->"
_INDEX = re.compile(r"\s*\d{1,9}\s*", re.ASCII)
_SRT_TIME = (
    r"(?:(\d{1,6}):)?([0-5]?\d):([0-5]?\d)[,.](\d{3})"  # players differ on fewer digits: milliseconds, or tenths
)
_SRT_TIMES = re.compile(rf"\s*{_SRT_TIME}\s*-->\s*{_SRT_TIME}(?:\s.*)?", re.ASCII)
_SRT_LIKE_TIMES = re.compile(r"\s*-?\d+:\d.*-->|.*-->\s*-?\d+:\d", re.ASCII)  # which dialogue with an arrow is not
# https://www.w3.org/TR/webvtt1/#collect-a-webvtt-timestamp: hours have any number of digits, settings follow at once.
_VTT_TIME = r"(?:(\d{1,6}):)?([0-5]\d):([0-5]\d)\.(\d{3})(?!\d)"
_VTT_TIMES = re.compile(rf"\s*{_VTT_TIME}\s*-->\s*{_VTT_TIME}.*", re.ASCII)
_VTT_BLOCKS = re.compile(r"(?:NOTE|STYLE|REGION)(?=\s|$)")
_LRC_STAMP = re.compile(r"\s*\[(\d{1,6}):([0-5]?\d)(?:[.:](\d{1,3}))?\]", re.ASCII)
_LRC_TAG = re.compile(r"\s*\[([A-Za-z#_][\w#-]{0,31}):([^\]]*)\]\s*")
_LRC_LENGTH = re.compile(r"\s*(\d{1,6}):([0-5]?\d)(?:[.:](\d{1,3}))?\s*", re.ASCII)
_LRC_OFFSET = re.compile(r"\s*([+-]?\d{1,9})\s*", re.ASCII)

_SRT_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|\{\\[^{}]*\}")  # <i>, </font>, {\an8}
_VTT_MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|</?\d[\d:.]*>|</>")  # <v Name>, <c.loud>, <00:00:01.500>
_LRC_MARKUP = re.compile(r"<\d{1,6}:[0-5]?\d(?:[.:]\d{1,3})?>\s?", re.ASCII)  # the word stamps of enhanced LRC


class TimedSegment(NamedTuple):
    """A text and the time that it covers.

    Attributes:
        start_seconds: first moment, at least 0.
        end_seconds: the moment after its last, at least the start; equal to it for a text without duration.
        text: as it is in the source.
    """

    start_seconds: float
    end_seconds: float
    text: str


Report = Callable[[str], object]
"""Called with each part of a file that is left out, as text."""


def parse_subtitles(
    content: str | Buffer, *, strip_tags: bool = False, report: Report = lambda _: None
) -> list[TimedSegment]:
    r"""Read SRT, WebVTT or LRC, detected from the content; white space alone has no segments.

    SRT and WebVTT: indices, identifiers, positions, notes, styles, regions and blank lines around a text are ignored.
    Segments are in order of their starts, as players show them. A cue whose times cannot be read, or that ends before
    its start, is left out, and so is text without times: each is reported. In SRT, a line with an arrow that does not
    look like times is text. In WebVTT, a line with an arrow ends the cue before it.

    LRC: a line with several stamps is sung several times, and segments are in order of time. There are only starts: a
    line ends where the next later line starts, the last one at the ``[length:]`` tag or, without one, at its start. A
    stamp without text ends the line before it, and is not a segment. A positive ``[offset:]`` (milliseconds) moves all
    lines to earlier times.

    Args:
        content: the file's text, or its bytes in UTF-8 or in UTF-16 with a byte order mark.
        strip_tags: remove markup from the texts, such as ``<i>``, ``{\an8}`` and the word stamps of enhanced LRC, and
            resolve WebVTT's escapes such as ``&amp;``.
        report: called with each cue and text of SRT or WebVTT that is left out.

    Raises:
        MediaError: none of the three, SRT or WebVTT without one readable cue, SRT with text before its first cue, or
            LRC with a damaged line; the message has the line. In LRC, a time before 0, an end before its start and a
            text without times are damage too.
    """
    text = _text_of(content)
    if not text.strip():
        return []
    lines = _LINE_END.split(text)
    if text.startswith("WEBVTT"):
        return _parse_vtt(lines, strip_tags, report)
    if text.lstrip().startswith("["):
        return _parse_lrc(lines, strip_tags)
    if _ARROW in text:
        return _parse_srt(lines, strip_tags, report)
    first = text.split(maxsplit=1)[0][:20]
    raise MediaError("<subtitles>", f"found a text that begins with {first!r}, expected SRT, WebVTT or LRC")


def without_markup(text: str, *, form: str) -> str:
    """The text of a cue without its markup: of SubRip (``srt``), of WebVTT (``vtt``), or as it is ("")."""
    if form == "srt":
        return _SRT_MARKUP.sub("", text)
    return html.unescape(_VTT_MARKUP.sub("", text)) if form == "vtt" else text


def _parse_srt(lines: list[str], strip_tags: bool, report: Report) -> list[TimedSegment]:
    """A line of digits above a time line is its index. Empty lines within a text are part of it."""
    time_lines = [
        number
        for number, line in enumerate(lines)
        if _ARROW in line and (_SRT_TIMES.fullmatch(line) or _SRT_LIKE_TIMES.match(line))
    ]
    heads = [_first_line_of(number, lines) for number in time_lines]
    cues = _Cues("00:00:01,000 --> 00:00:02,500", _SRT_TIMES, report)
    stray = next((n for n, line in enumerate(lines[: heads[0] if heads else None]) if line.strip()), None)
    if stray is not None:
        raise _at(stray, lines[stray], "an index or a time line")  # players do not take it for SRT either
    for number, end in zip(time_lines, [*heads, len(lines)][1:], strict=True):
        text = _join_lines(lines[number + 1 : end])
        cues.add(number, lines[number], _SRT_MARKUP.sub("", text) if strip_tags else text)
    return cues.sorted()


def _first_line_of(number: int, lines: list[str]) -> int:
    """The line of a cue's index, else its time line, which has this number; some files have empty lines between."""
    above = number - 1
    while above >= 0 and not lines[above].strip():
        above -= 1
    if above < 0 or not _INDEX.fullmatch(lines[above]):
        return number
    is_apart = above == 0 or not lines[above - 1].strip()
    return above if above == number - 1 or is_apart else number


def _parse_vtt(lines: list[str], strip_tags: bool, report: Report) -> list[TimedSegment]:
    """Reads blocks by the specification, https://www.w3.org/TR/webvtt1/#collect-a-webvtt-block.

    A block ends at an empty line, which has no white space either, and before a line with an arrow other than its first
    or second. The header is a block that ends before any arrow.
    """
    if not re.match(r"WEBVTT(?=\s|$)", lines[0]):
        raise _at(0, lines[0], "WEBVTT")
    cues = _Cues("00:01.000 --> 00:02.500", _VTT_TIMES, report)
    number = 1
    while number < len(lines) and lines[number] and _ARROW not in lines[number]:
        number += 1
    while number < len(lines):
        if not lines[number]:
            number += 1
            continue
        first = number
        is_cue = _ARROW in lines[first]
        number += 1
        if not is_cue and number < len(lines) and _ARROW in lines[number]:
            is_cue = True
            number += 1
        times = number - 1
        while number < len(lines) and lines[number] and _ARROW not in lines[number]:
            number += 1
        if is_cue:
            text = _join_lines(lines[times + 1 : number])
            cues.add(times, lines[times], html.unescape(_VTT_MARKUP.sub("", text)) if strip_tags else text)
        elif lines[first].strip() and not _VTT_BLOCKS.match(lines[first]):
            cues.omit(first, lines[first], "a cue with a time line")
    return cues.sorted()


class _Cues:
    """The cues of a file that could be read, and what was left out.

    Args:
        example: a time line, for messages.
        times: matches a time line.
        report: called with what is left out.
    """

    def __init__(self, example: str, times: re.Pattern[str], report: Report) -> None:
        self._expected = f"times such as {example}"
        self._times = times
        self._report = report
        self._segments: list[TimedSegment] = []
        self._first_error: MediaError | None = None

    def add(self, number: int, line: str, text: str) -> None:
        """Adds the cue of a time line, unless its times cannot be read."""
        match = self._times.fullmatch(line)
        if match is None:
            self.omit(number, line, self._expected)
            return
        start_ms, end_ms = (
            ((int(hours or 0) * 60 + int(minutes)) * 60 + int(seconds)) * 1000 + int(ms)
            for hours, minutes, seconds, ms in (match.groups()[:4], match.groups()[4:])
        )
        if end_ms < start_ms:
            self.omit(number, line, "an end at or after the start")
        else:
            self._segments.append(_segment(start_ms, end_ms, text))

    def omit(self, number: int, line: str, expected: str) -> None:
        """Reports a line that is left out, with what depends on it."""
        error = _at(number, line, expected)
        self._first_error = self._first_error or error
        self._report(error.reason)

    def sorted(self) -> list[TimedSegment]:
        """The cues in order of their starts; the first error if there is no cue."""
        if self._first_error is not None and not self._segments:
            raise self._first_error
        return sorted(self._segments, key=lambda segment: segment.start_seconds)


def _parse_lrc(lines: list[str], strip_tags: bool) -> list[TimedSegment]:
    entries: list[tuple[int, int, str]] = []  # start in ms, line number, text
    offset_ms, length_ms = 0, None
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        starts, pos = [], 0
        while (stamp := _LRC_STAMP.match(line, pos)) is not None:
            starts.append(_lrc_ms(stamp))
            pos = stamp.end()
        if starts:
            text = line[pos:].strip()
            text = _LRC_MARKUP.sub("", text).strip() if strip_tags else text
            entries.extend((start, number, text) for start in starts)
            continue
        tag = _LRC_TAG.fullmatch(line)
        if tag is None:
            raise _at(number, line, "a line that begins with [mm:ss.xx]")
        if tag[1].lower() == "offset":
            value = _LRC_OFFSET.fullmatch(tag[2])
            if value is None:
                raise _at(number, line, "[offset: milliseconds]")
            offset_ms = int(value[1])
        elif tag[1].lower() == "length":
            value = _LRC_LENGTH.fullmatch(tag[2])
            if value is None:
                raise _at(number, line, "[length: mm:ss]")
            length_ms = _lrc_ms(value)
    return _ended(sorted(entries, key=lambda entry: entry[0]), offset_ms, length_ms)


def _ended(entries: list[tuple[int, int, str]], offset_ms: int, length_ms: int | None) -> list[TimedSegment]:
    """Segments of starts in order: each ends where the next later one starts."""
    segments: list[TimedSegment] = []
    next_start, end_ms = None, length_ms
    for start, number, text in reversed(entries):
        start_ms = start - offset_ms
        if start_ms < 0:
            found = f"a start of {start} ms with an offset of {offset_ms} ms"
            raise MediaError("<subtitles>", f"line {number + 1}: found {found}, expected one at 0 or later")
        if next_start is not None and next_start > start_ms:
            end_ms = next_start
        if end_ms is not None and end_ms < start_ms:
            raise MediaError(
                "<subtitles>", f"line {number + 1}: found a start of {start_ms} ms, expected at most the length"
            )
        next_start = start_ms
        if text:
            segments.append(_segment(start_ms, start_ms if end_ms is None else end_ms, text))
    segments.reverse()
    return segments


def _lrc_ms(stamp: re.Match[str]) -> int:
    """Minutes, seconds and a decimal fraction, which may have one to three digits."""
    return (int(stamp[1]) * 60 + int(stamp[2])) * 1000 + int((stamp[3] or "").ljust(3, "0"))


def _segment(start_ms: int, end_ms: int, text: str) -> TimedSegment:
    return TimedSegment(start_ms / 1000, end_ms / 1000, text)


def _at(number: int, line: str, expected: str) -> MediaError:
    return MediaError("<subtitles>", f"line {number + 1}: found {line.strip()[:60]!r}, expected {expected}")


def _join_lines(lines: list[str]) -> str:
    """A cue's lines without the empty ones around them."""
    filled = [number for number, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[filled[0] : filled[-1] + 1]) if filled else ""


def _text_of(content: str | Buffer) -> str:
    """The text without its byte order mark."""
    if isinstance(content, str):
        return content.removeprefix("\ufeff")
    data = bytes(content)
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        found = f"found {error.reason} at byte {error.start}"
        raise MediaError(
            "<subtitles>", f"{found}, expected text in UTF-8, or in UTF-16 with a byte order mark"
        ) from error
