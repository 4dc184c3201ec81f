"""Timed text files: SubRip (SRT), WebVTT and LRC lyrics become lists of segments, in the file's order.

Times are read as whole milliseconds and divided once, so a file's time and its float in seconds are equivalent.
Deviations of real files are accepted: byte order marks, any line ends, missing indices, positions after the times. An
unreadable line is a `MediaError` with its number; nothing is guessed or left out.
"""

from __future__ import annotations

import html
import re
from typing import NamedTuple

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer

__all__ = ["TimedSegment", "parse_lrc", "parse_srt", "parse_subtitles", "parse_vtt"]

_NAME = "<subtitles>"

# Only these end a line: str.splitlines would also break at U+2028 and form feeds, which may be in a text.
_LINE_END = re.compile(r"\r\n|\n|\r")
_ARROW = "-->"
_INDEX = re.compile(r"\s*\d{1,9}\s*", re.ASCII)
_SRT_TIMES = re.compile(
    r"\s*(?:(\d{1,6}):)?([0-5]?\d):([0-5]?\d)[,.](\d{3})\s*-->\s*(?:(\d{1,6}):)?([0-5]?\d):([0-5]?\d)[,.](\d{3})(?:\s.*)?",
    re.ASCII,
)
_VTT_TIMES = re.compile(
    r"\s*(?:(\d{2,6}):)?([0-5]\d):([0-5]\d)\.(\d{3})\s+-->\s+(?:(\d{2,6}):)?([0-5]\d):([0-5]\d)\.(\d{3})(?:\s.*)?",
    re.ASCII,
)
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
        end_seconds: the moment after it, at least the start; equal to it for a text without duration.
        text: as it is in the source.
    """

    start_seconds: float
    end_seconds: float
    text: str


def parse_subtitles(content: str | Buffer, *, strip_tags: bool = False, name: str = _NAME) -> list[TimedSegment]:
    """Read SRT, WebVTT or LRC, detected from the content; a file of nothing but white space has no segments.

    Args:
        content: the file's text, or its bytes in UTF-8 or in UTF-16 with a byte order mark.
        strip_tags: take markup such as ``<i>`` out of the texts, and WebVTT's escapes such as ``&amp;``.
        name: what messages call the file.

    Raises:
        MediaError: none of the three, or a damaged one; the line is named.
    """
    text = _text_of(content, name)
    if not text.strip():
        return []
    if text.startswith("WEBVTT"):
        return parse_vtt(text, strip_tags=strip_tags, name=name)
    if text.lstrip().startswith("["):
        return parse_lrc(text, strip_tags=strip_tags, name=name)
    if _ARROW in text:
        return parse_srt(text, strip_tags=strip_tags, name=name)
    first = text.split(maxsplit=1)[0][:20]
    raise MediaError(name, f"found a text that begins with {first!r}, expected SRT, WebVTT or LRC")


def parse_srt(content: str | Buffer, *, strip_tags: bool = False, name: str = _NAME) -> list[TimedSegment]:
    r"""Read SubRip.

    A line of digits right above a time line is its index; it may be missing or wrong, and is ignored. Empty lines
    within a text stay in it; those around it do not.

    Args:
        content: as for `parse_subtitles`.
        strip_tags: take ``<i>``-like tags and ``{\an8}``-like ones out.
        name: what messages call the file.

    Raises:
        MediaError: a time line that is damaged or ends before it starts, or text before the first one.
    """
    lines = _lines_of(content, name)
    found = [number for number, line in enumerate(lines) if _ARROW in line]
    heads = [number - 1 if number and _INDEX.fullmatch(lines[number - 1]) else number for number in found]
    stray = next((number for number, line in enumerate(lines[: heads[0] if heads else None]) if line.strip()), None)
    if stray is not None:
        raise _at(name, stray, lines[stray], "an index or a time line")
    segments = []
    for number, end in zip(found, [*heads[1:], len(lines)], strict=True):
        start_ms, end_ms = _times_of(_SRT_TIMES, lines[number], number, name, "00:00:01,000 --> 00:00:02,500")
        text = _join_lines(lines[number + 1 : end])
        segments.append(_segment(start_ms, end_ms, _SRT_MARKUP.sub("", text) if strip_tags else text))
    return segments


def parse_vtt(content: str | Buffer, *, strip_tags: bool = False, name: str = _NAME) -> list[TimedSegment]:
    """Read WebVTT. Identifiers, positions, notes, styles and regions are ignored.

    Args:
        content: as for `parse_subtitles`.
        strip_tags: take tags and time stamps out of the texts, and turn escapes into their characters.
        name: what messages call the file.

    Raises:
        MediaError: no ``WEBVTT`` at the start, a block without times, or times that are damaged or end before they
            start.
    """
    lines = _lines_of(content, name)
    if not re.match(r"WEBVTT(?=\s|$)", lines[0]):
        raise _at(name, 0, lines[0], "WEBVTT")
    segments = []
    (_, head), *blocks = _blocks(lines)
    early = next((number for number, line in enumerate(head) if _ARROW in line), None)
    if early is not None:
        raise _at(name, early, head[early], "an empty line between the header and the first cue")
    for first, block in blocks:
        at = next((number for number, line in enumerate(block[:2]) if _ARROW in line), None)
        if at is None:
            if block[0].split(maxsplit=1)[0] in _VTT_BLOCKS:
                continue
            raise _at(name, first, block[0], "a cue with a time line")
        start_ms, end_ms = _times_of(_VTT_TIMES, block[at], first + at, name, "00:01.000 --> 00:02.500")
        inner = next((number for number, line in enumerate(block[at + 1 :], at + 1) if _ARROW in line), None)
        if inner is not None:  # two cues without an empty line between them
            raise _at(name, first + inner, block[inner], f"no {_ARROW} within a text")
        text = "\n".join(block[at + 1 :])
        segments.append(_segment(start_ms, end_ms, html.unescape(_VTT_MARKUP.sub("", text)) if strip_tags else text))
    return segments


def parse_lrc(content: str | Buffer, *, strip_tags: bool = False, name: str = _NAME) -> list[TimedSegment]:
    """Read LRC lyrics, in order of time.

    A line with several stamps is sung several times. LRC knows only starts: a line ends where the next begins that
    starts later, the last at the ``[length:]`` tag, or, without one, where it starts. A stamp without text ends the
    line before it, and is not a segment. A positive ``[offset:]`` (milliseconds) lets every line come earlier.

    Args:
        content: as for `parse_subtitles`.
        strip_tags: take the word stamps of enhanced LRC out of the texts.
        name: what messages call the file.

    Raises:
        MediaError: a line without a stamp, a damaged tag, a line that the offset moves before 0, or a length before
            the last line.
    """
    entries: list[tuple[int, int, str]] = []  # start in ms, line number, text
    offset_ms, length_ms = 0, None
    for number, line in enumerate(_lines_of(content, name)):
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
            raise _at(name, number, line, "a line that begins with [mm:ss.xx]")
        if tag[1].lower() == "offset":
            value = _LRC_OFFSET.fullmatch(tag[2])
            if value is None:
                raise _at(name, number, line, "[offset: milliseconds]")
            offset_ms = int(value[1])
        elif tag[1].lower() == "length":
            value = _LRC_LENGTH.fullmatch(tag[2])
            if value is None:
                raise _at(name, number, line, "[length: mm:ss]")
            length_ms = _lrc_ms(value)
    return _ended(sorted(entries, key=lambda entry: entry[0]), offset_ms, length_ms, name)


def _ended(entries: list[tuple[int, int, str]], offset_ms: int, length_ms: int | None, name: str) -> list[TimedSegment]:
    """Segments of starts in order: each ends where the next later one starts."""
    segments: list[TimedSegment] = []
    next_start, end_ms = None, length_ms
    for start, number, text in reversed(entries):
        start_ms = start - offset_ms
        if start_ms < 0:
            found = f"a start of {start} ms with an offset of {offset_ms} ms"
            raise MediaError(name, f"line {number + 1}: found {found}, expected one at 0 or later")
        if next_start is not None and next_start > start_ms:
            end_ms = next_start
        if end_ms is not None and end_ms < start_ms:
            raise MediaError(name, f"line {number + 1}: found a start of {start_ms} ms, expected at most the length")
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


def _at(name: str, number: int, line: str, expected: str) -> MediaError:
    return MediaError(name, f"line {number + 1}: found {line.strip()[:60]!r}, expected {expected}")


def _times_of(pattern: re.Pattern[str], line: str, number: int, name: str, example: str) -> tuple[int, int]:
    match = pattern.fullmatch(line)
    if match is None:
        raise _at(name, number, line, f"times such as {example}")
    first, second = (
        ((int(hours or 0) * 60 + int(minutes)) * 60 + int(seconds)) * 1000 + int(ms)
        for hours, minutes, seconds, ms in (match.groups()[:4], match.groups()[4:])
    )
    if second < first:
        raise _at(name, number, line, "an end at or after the start")
    return first, second


def _blocks(lines: list[str]) -> list[tuple[int, list[str]]]:
    """Runs of lines that are not empty, each with its first line's number."""
    blocks: list[tuple[int, list[str]]] = []
    is_open = False
    for number, line in enumerate(lines):
        if not line.strip():
            is_open = False
        elif is_open:
            blocks[-1][1].append(line)
        else:
            blocks.append((number, [line]))
            is_open = True
    return blocks


def _join_lines(lines: list[str]) -> str:
    """A cue's lines without the empty ones around them."""
    start, end = 0, len(lines)
    while start < end and not lines[start].strip():
        start += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return "\n".join(lines[start:end])


def _lines_of(content: str | Buffer, name: str) -> list[str]:
    return _LINE_END.split(_text_of(content, name))


def _text_of(content: str | Buffer, name: str) -> str:
    """The text without its byte order mark."""
    if isinstance(content, str):
        return content.removeprefix("\ufeff")
    data = bytes(content)
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        found = f"found {error.reason} at byte {error.start}"
        raise MediaError(name, f"{found}, expected text in UTF-8, or in UTF-16 with a byte order mark") from error
