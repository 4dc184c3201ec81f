"""Timed text files: SubRip (SRT), WebVTT and LRC lyrics become lists of segments, in the file's order.

Times are read as whole milliseconds and divided once, so that each float in seconds stands for exactly one time of a
file. Byte order marks, any line ends, missing indices and positions after the times are accepted. An unreadable line is
a `MediaError` with its number; nothing is guessed or omitted.
"""

from __future__ import annotations

import html
import re
from itertools import groupby
from typing import NamedTuple

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer

__all__ = ["TimedSegment", "parse_subtitles", "without_markup"]

# str.splitlines would also split at U+2028 and form feeds, which may be in a text.
_LINE_END = re.compile(r"\r\n|\n|\r")
_ARROW = "-->"
_INDEX = re.compile(r"\s*\d{1,9}\s*", re.ASCII)
_SRT_TIME = r"(?:(\d{1,6}):)?([0-5]?\d):([0-5]?\d)[,.](\d{3})"
_SRT_TIMES = re.compile(rf"\s*{_SRT_TIME}\s*-->\s*{_SRT_TIME}(?:\s.*)?", re.ASCII)
_VTT_TIME = r"(?:(\d{2,6}):)?([0-5]\d):([0-5]\d)\.(\d{3})"
_VTT_TIMES = re.compile(rf"\s*{_VTT_TIME}\s+-->\s+{_VTT_TIME}(?:\s.*)?", re.ASCII)
_VTT_BLOCKS = ("NOTE", "STYLE", "REGION")
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


def parse_subtitles(content: str | Buffer, *, strip_tags: bool = False) -> list[TimedSegment]:
    r"""Read SRT, WebVTT or LRC, detected from the content; white space alone has no segments.

    SRT and WebVTT: indices, identifiers, positions, notes, styles and regions are ignored. LRC: a line with several
    stamps is sung several times, and segments are in order of time. There are only starts: a line ends where the next
    later line starts, the last one at the ``[length:]`` tag or, without one, at its start. A stamp without text ends
    the line before it, and is not a segment. A positive ``[offset:]`` (milliseconds) moves all lines to earlier times.

    Args:
        content: the file's text, or its bytes in UTF-8 or in UTF-16 with a byte order mark.
        strip_tags: remove markup from the texts, such as ``<i>``, ``{\an8}`` and the word stamps of enhanced LRC, and
            resolve WebVTT's escapes such as ``&amp;``.

    Raises:
        MediaError: none of the three, or a damaged file; the message has the line. A time before 0, an end before its
            start and a text without times are damage too.
    """
    text = _text_of(content)
    if not text.strip():
        return []
    lines = _LINE_END.split(text)
    if text.startswith("WEBVTT"):
        return _parse_vtt(lines, strip_tags)
    if text.lstrip().startswith("["):
        return _parse_lrc(lines, strip_tags)
    if _ARROW in text:
        return _parse_srt(lines, strip_tags)
    first = text.split(maxsplit=1)[0][:20]
    raise MediaError("<subtitles>", f"found a text that begins with {first!r}, expected SRT, WebVTT or LRC")


def without_markup(text: str, *, form: str) -> str:
    """The text of a cue without its markup: of SubRip (``srt``), of WebVTT (``vtt``), or as it is ("")."""
    if form == "srt":
        return _SRT_MARKUP.sub("", text)
    return html.unescape(_VTT_MARKUP.sub("", text)) if form == "vtt" else text


def _parse_srt(lines: list[str], strip_tags: bool) -> list[TimedSegment]:
    """A line of digits right above a time line is its index. Empty lines within a text are part of it."""
    found = [number for number, line in enumerate(lines) if _ARROW in line]
    heads = [number - 1 if number and _INDEX.fullmatch(lines[number - 1]) else number for number in found]
    stray = next((number for number, line in enumerate(lines[: heads[0] if heads else None]) if line.strip()), None)
    if stray is not None:
        raise _at(stray, lines[stray], "an index or a time line")
    segments = []
    for number, end in zip(found, [*heads[1:], len(lines)], strict=True):
        start_ms, end_ms = _times_of(_SRT_TIMES, lines[number], number, "00:00:01,000 --> 00:00:02,500")
        text = _join_lines(lines[number + 1 : end])
        segments.append(_segment(start_ms, end_ms, _SRT_MARKUP.sub("", text) if strip_tags else text))
    return segments


def _parse_vtt(lines: list[str], strip_tags: bool) -> list[TimedSegment]:
    if not re.match(r"WEBVTT(?=\s|$)", lines[0]):
        raise _at(0, lines[0], "WEBVTT")
    segments = []
    (_, head), *blocks = _blocks(lines)
    early = next((number for number, line in enumerate(head) if _ARROW in line), None)
    if early is not None:
        raise _at(early, head[early], "an empty line between the header and the first cue")
    for first, block in blocks:
        at = next((number for number, line in enumerate(block[:2]) if _ARROW in line), None)
        if at is None:
            if block[0].split(maxsplit=1)[0] in _VTT_BLOCKS:
                continue
            raise _at(first, block[0], "a cue with a time line")
        start_ms, end_ms = _times_of(_VTT_TIMES, block[at], first + at, "00:01.000 --> 00:02.500")
        inner = next((number for number, line in enumerate(block[at + 1 :], at + 1) if _ARROW in line), None)
        if inner is not None:  # two cues without an empty line between them
            raise _at(first + inner, block[inner], f"no {_ARROW} within a text")
        text = "\n".join(block[at + 1 :])
        segments.append(_segment(start_ms, end_ms, html.unescape(_VTT_MARKUP.sub("", text)) if strip_tags else text))
    return segments


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


def _times_of(pattern: re.Pattern[str], line: str, number: int, example: str) -> tuple[int, int]:
    match = pattern.fullmatch(line)
    if match is None:
        raise _at(number, line, f"times such as {example}")
    first, second = (
        ((int(hours or 0) * 60 + int(minutes)) * 60 + int(seconds)) * 1000 + int(ms)
        for hours, minutes, seconds, ms in (match.groups()[:4], match.groups()[4:])
    )
    if second < first:
        raise _at(number, line, "an end at or after the start")
    return first, second


def _blocks(lines: list[str]) -> list[tuple[int, list[str]]]:
    """Runs of lines that are not empty, each with its first line's number."""
    runs = groupby(enumerate(lines), key=lambda numbered: bool(numbered[1].strip()))
    blocks = [list(run) for is_filled, run in runs if is_filled]
    return [(block[0][0], [line for _, line in block]) for block in blocks]


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
