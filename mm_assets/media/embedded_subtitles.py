"""Subtitles inside MP4 and Matroska files: which tracks there are, and their texts with times.

Tracks of text only: pictures of text, as discs have them, are not read. A packet is a cue, so that nothing is decoded.
Errors are those of `mm_assets.media.video`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_assets.media.content_types import Buffer
from mm_assets.media.subtitles import TimedSegment, without_markup
from mm_assets.media.video import open_media

if TYPE_CHECKING:
    from av.container import InputContainer

__all__ = ["SubtitleTrack", "embedded_subtitles", "subtitle_tracks"]

MAX_CUES = 20_000  # of one track
_FORMS = {"mov_text": "", "text": "", "subrip": "srt", "srt": "srt", "webvtt": "vtt"}  # codec to markup
_LAST_SECONDS = 4.0  # that a cue without an end is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtitleTrack:
    """A track of subtitles.

    Attributes:
        number: of its stream in the file.
        codec: FFmpeg's name: ``mov_text`` (MP4's, also known as tx3g), ``subrip``, ``webvtt`` or ``text``.
        language: as the file has it, such as ``eng``; "" where it has none.
        title: likewise.
    """

    number: int
    codec: str
    language: str
    title: str


def subtitle_tracks(data: Buffer) -> list[SubtitleTrack]:
    """The tracks of text of a video file, by its header.

    Args:
        data: the whole file.

    Raises:
        MediaError: the bytes are not a video file, or its header is damaged.
    """
    with open_media(data) as (container, _):
        return _tracks(container)


def _tracks(container: InputContainer) -> list[SubtitleTrack]:
    found = []
    for stream in container.streams.subtitles:
        codec = stream.codec_context.name if stream.codec_context is not None else ""
        if codec in _FORMS:
            language = stream.metadata.get("language", "")
            track = SubtitleTrack(
                number=stream.index,
                codec="subrip" if codec == "srt" else codec,
                language="" if language == "und" else language,
                title=stream.metadata.get("title", ""),
            )
            found.append(track)
    return found


def embedded_subtitles(data: Buffer, number: int) -> list[TimedSegment]:
    """The texts of a track, in the file's order, without markup; the first `MAX_CUES`.

    Args:
        data: the whole file.
        number: of the track's stream.

    Raises:
        MediaError: the file is damaged. `LookupError` where it has no such track.
    """
    with open_media(data) as (container, _):
        codecs = {track.number: track.codec for track in _tracks(container)}
        codec = codecs.get(number)
        if codec is not None:
            return _cues(container, number, codec)
    raise LookupError(f"there is no track of subtitles {number}, there are {sorted(codecs)}")


def _cues(container: InputContainer, number: int, codec: str) -> list[TimedSegment]:
    stream = container.streams[number]
    starts: list[float] = []
    ends: list[float | None] = []
    texts: list[str] = []
    for packet in container.demux(stream):
        if packet.pts is None or packet.time_base is None:
            continue
        start = max(float(packet.pts * packet.time_base), 0.0)
        if ends and ends[-1] is None:
            ends[-1] = max(start, starts[-1])
        text = _text(bytes(packet), codec)
        if not text:
            continue  # MP4 fills the time between two cues with an empty one
        starts.append(start)
        ends.append(start + float(packet.duration * packet.time_base) if packet.duration else None)
        texts.append(text)
        if len(texts) == MAX_CUES:
            break
    return [
        TimedSegment(start, start + _LAST_SECONDS if end is None else end, text)
        for start, end, text in zip(starts, ends, texts, strict=True)
    ]


def _text(data: bytes, codec: str) -> str:
    if codec == "mov_text":  # a length, the text, then boxes of styles
        data = data[2 : 2 + int.from_bytes(data[:2], "big")]
        if data[:2] in (b"\xfe\xff", b"\xff\xfe"):
            return data.decode("utf-16", "replace").strip()
    return without_markup(data.decode("utf-8", "replace").strip("\0"), form=_FORMS[codec]).strip()
