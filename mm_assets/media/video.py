"""Video files, read by PyAV: facts about them, the presentation times of their frames, and the frames themselves.

The first bytes determine the demuxer. No playlist format is among them, so that bytes never make this module open a
file or an address. Decoders get their limits before they read a byte. Any input gives an answer or a `MediaError`;
without the packages of the extra ``video`` every function raises `MissingExtraError`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError, optional_import
from mm_assets.media.content_types import Buffer, sniff_content_type
from mm_assets.media.header import size_of_id3
from mm_assets.media.mp4 import check_sample_tables
from mm_assets.media.timing import FrameIndex, nominal_rate

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "VideoInfo",
    "audio_stream_of",
    "index_frames",
    "open_media",
    "probe_video",
    "read_frames",
    "seconds_of",
    "time_base_of",
]

DEFAULT_MAX_PIXELS = 8192 * 8192  # of one frame: twice as many as 8K
_MAX_TICKS = 2**53  # a later presentation time is hostile: sums and products of times stay within 64 bits
_MAX_STREAMS = 64
_NEAR = 8  # frames: decoding up to a keyframe this near is faster than a seek

_DEMUXERS = {  # MIME type to FFmpeg's name; no playlists, manifests or image sequences
    "video/mp4": "mov",
    "video/quicktime": "mov",
    "video/3gpp": "mov",
    "audio/mp4": "mov",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
    "video/x-msvideo": "avi",
    "video/ogg": "ogg",
    "audio/ogg": "ogg",
    "video/mpeg": "mpeg",
    "video/mp2t": "mpegts",
    "video/x-flv": "flv",
    "video/x-ms-asf": "asf",
    "audio/wav": "wav",
    "audio/flac": "flac",
    "audio/mpeg": "mp3",
    "audio/aac": "aac",
    "audio/aiff": "aiff",
}
_MAX_SAMPLES = str(2**20)  # per channel, that one packet decodes to
_ASF_INDEX = bytes.fromhex("90080033b1e5cf1189f400a0c90349cb")  # identifier of an ASF index
_ASF_COUNT_AT = 52  # bytes into the index
_TS_PACKET = 188  # bytes; each packet starts with 0x47


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoInfo:
    """A video or audio file as its header describes it.

    Attributes:
        content_type: MIME type.
        duration_seconds: of the longest stream; None if the header has no duration.
        has_video: whether there is a video stream; a cover picture is not one.
        width: columns of a frame as stored; 0 without video, or if only the frames have it.
        height: rows, likewise.
        frame_rate: nominal frames per second; None without video, or if the header has no rate.
        num_frames: None if the header has no count.
        video_codec: FFmpeg's name, such as ``h264``; None without video.
        has_audio: whether there is an audio stream.
        sample_rate: Hz; 0 without audio.
        channels: 0 without audio.
        audio_codec: FFmpeg's name, such as ``aac``; None without audio.
    """

    content_type: str
    duration_seconds: float | None
    has_video: bool
    width: int
    height: int
    frame_rate: Fraction | None
    num_frames: int | None
    video_codec: str | None
    has_audio: bool
    sample_rate: int
    channels: int
    audio_codec: str | None


class _Reader:
    """A buffer as a file for PyAV; unlike `io.BytesIO` it does not copy the buffer."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def read(self, size: int) -> bytes:
        piece = bytes(self._view[self._at : self._at + size])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._view))[whence])
        return self._at

    def tell(self) -> int:
        return self._at


def _refuse(url: str, flags: int, options: dict[str, Any]) -> Any:
    raise ValueError(f"the file refers to another one, {url[:80]!r}")


def _sniff(view: memoryview) -> tuple[str, str]:
    """MIME type and demuxer of the bytes."""
    content_type = sniff_content_type(view)
    if content_type is None and len(view) > 2 * _TS_PACKET:
        starts = (view[0], view[_TS_PACKET], view[2 * _TS_PACKET])
        content_type = "video/mp2t" if starts == (0x47, 0x47, 0x47) else None
    if content_type not in _DEMUXERS:
        found = content_type or "bytes of no known container"
        raise MediaError("<video>", f"found {found}, expected a video or audio file of one container")
    return content_type, _DEMUXERS[content_type]


def _without_tags(view: memoryview) -> memoryview:
    """The bytes after ID3 tags: FFmpeg expands their compressed texts without a limit."""
    while size := size_of_id3(view):
        view = view[size + (10 if view[5] & 0x10 else 0) :]  # the flag: a footer follows
    return view


def _check_index(view: memoryview) -> None:
    """Compare the count of an ASF index with the existing bytes: FFmpeg reads past the end."""
    for match in re.finditer(re.escape(_ASF_INDEX), view):
        at = match.start() + _ASF_COUNT_AT
        if at + 4 <= len(view):
            count, room = int.from_bytes(view[at : at + 4], "little"), (len(view) - at - 4) // 6
            if count > room:
                raise MediaError("<video>", f"found an index of {count} entries, expected at most {room}")


@contextmanager
def open_media(data: Buffer, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Iterator[tuple[InputContainer, str]]:
    """Open bytes with the demuxer of their type; errors of FFmpeg in the block become `MediaError`.

    Yields:
        The container and its MIME type.

    Raises:
        MediaError: the bytes are not a video or audio file, or are damaged.
    """
    with optional_import("av", "reading video files"):
        import av
    view = memoryview(data).cast("B")
    content_type, demuxer = _sniff(view)
    if demuxer == "mov":
        check_sample_tables(view)
    elif demuxer == "asf":
        _check_index(view)
    # The decoders' options are needed here too: FFmpeg decodes while it opens a file.
    options = {"max_pixels": str(max_pixels), "max_samples": _MAX_SAMPLES, "threads": "1"}
    limits = {"max_streams": str(_MAX_STREAMS), "protocol_whitelist": "none"}
    if demuxer == "avi":
        limits["use_odml"] = "0"  # its indices can refer to each other, and so have entries without end
    file = _Reader(_without_tags(view))
    try:
        with av.open(
            file, "r", format=demuxer, options=options, container_options=limits, io_open=_refuse
        ) as container:
            yield container, content_type
    except MediaError:
        raise
    except (av.FFmpegError, ValueError, OverflowError, IndexError, MemoryError, EOFError, OSError) as error:
        # PyAV's own errors, and those that its bindings raise for numbers out of range
        raise MediaError("<video>", f"{demuxer} file cannot be read ({type(error).__name__}: {error})") from error


def _video_stream(container: InputContainer, max_pixels: int = DEFAULT_MAX_PIXELS) -> VideoStream | None:
    """The first video stream that is not a cover picture, with limits for its decoder."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic and stream.codec_context is not None:
            # `open_media` limits FFmpeg's own probe of the file, and this the decoder that PyAV opens.
            stream.codec_context.options = {"max_pixels": str(max_pixels)}
            stream.codec_context.thread_count = 1
            return stream
    return None


def audio_stream_of(container: InputContainer) -> AudioStream | None:
    """The first audio stream that has a decoder, with limits for it."""
    for stream in container.streams.audio:
        if stream.codec_context is not None:
            stream.codec_context.options = {"max_samples": _MAX_SAMPLES}
            return stream
    return None


def probe_video(data: Buffer) -> VideoInfo:
    """Read the header of a video or audio file.

    Args:
        data: the whole file: some containers have their header at the end.

    Raises:
        MediaError: the bytes are not a video or audio file, or its header is damaged.
    """
    with open_media(data) as (container, content_type):
        video, sound = _video_stream(container), audio_stream_of(container)
        if video is None and sound is None:
            raise MediaError("<video>", "found neither a video nor an audio stream, expected one of them")
        durations = [
            float(stream.duration * stream.time_base)
            for stream in (video, sound)
            if stream is not None and stream.duration and stream.time_base
        ]
        if not durations and container.duration:
            durations = [container.duration / 1_000_000]  # AV_TIME_BASE
        rate = (video.guessed_rate or video.average_rate) if video is not None else None
        return VideoInfo(
            content_type=content_type,
            duration_seconds=max(durations) if durations and max(durations) > 0 else None,
            has_video=video is not None,
            width=video.codec_context.width if video is not None else 0,
            height=video.codec_context.height if video is not None else 0,
            frame_rate=rate or None,
            num_frames=(video.frames or None) if video is not None else None,
            video_codec=video.codec_context.name if video is not None else None,
            has_audio=sound is not None,
            sample_rate=sound.codec_context.sample_rate if sound is not None else 0,
            channels=sound.codec_context.channels if sound is not None else 0,
            audio_codec=sound.codec_context.name if sound is not None else None,
        )


def index_frames(data: Buffer, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> tuple[FrameIndex, int, int] | None:
    """The presentation times of all frames, and the frames' height and width; None for a file without video.

    Packets are listed, not decoded, unless the container gives them no presentation times (MPEG program streams, some
    AVI).

    Raises:
        MediaError: the file is damaged, or its frames have more than `max_pixels`.
    """
    with open_media(data, max_pixels=max_pixels) as (container, content_type):
        stream = _video_stream(container, max_pixels)
        if stream is None:
            return None
        height, width = stream.codec_context.height, stream.codec_context.width
        if min(height, width) < 1 or height * width > max_pixels:
            raise MediaError("<video>", f"found frames of {height} x {width}, expected 1 to {max_pixels} pixels")
        time_base = time_base_of(stream.time_base)
        hints = [rate for rate in (stream.guessed_rate, stream.average_rate, stream.base_rate) if rate]
        pts, keys = array("q"), array("q")  # a file may have as many frames as bytes
        end = None
        # MPEG program streams give times to some packets only, and FFmpeg guesses the others wrongly.
        is_timed = content_type != "video/mpeg"
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_discard:
                continue
            if packet.pts is None or not is_timed:
                is_timed = False
                break
            if packet.is_keyframe:
                keys.append(packet.pts)
            pts.append(packet.pts)
            end = max(end or packet.pts, packet.pts + (packet.duration or 0))
    if not is_timed or len(set(pts)) < len(pts):
        pts, keys, end = _decoded_times(data, max_pixels), array("q"), None
    return _frame_index(pts, keys, end, time_base, hints), height, width


def seconds_of(ticks: int, time_base: Fraction) -> Fraction:
    """Ticks in seconds; `MediaError` for hostile ones."""
    if abs(ticks) > _MAX_TICKS:
        raise MediaError("<video>", f"found presentation time {ticks}, expected at most {_MAX_TICKS} ticks")
    return ticks * time_base


def time_base_of(time_base: Fraction | None) -> Fraction:
    """Seconds per tick; `MediaError` for hostile ones."""
    if not time_base or not 0 < time_base <= 3600 or max(time_base.as_integer_ratio()) >= 2**31:
        raise MediaError("<video>", f"found time base {time_base}, expected a positive fraction of a second")
    return time_base


def _decoded_times(data: Buffer, max_pixels: int) -> array[int]:
    times = array("q")
    with open_media(data, max_pixels=max_pixels) as (container, _):
        for frame in container.decode(_video_stream(container, max_pixels)):
            if frame.pts is None:
                raise MediaError("<video>", "found frames without a presentation time, expected one for each")
            times.append(frame.pts)
    return times


def _frame_index(
    pts: array[int], keys: array[int], end: int | None, time_base: Fraction, hints: Sequence[Fraction]
) -> FrameIndex:
    if not pts:
        raise MediaError("<video>", "found a video stream without frames, expected at least one")
    if max(abs(min(pts)), abs(max(pts)), abs(end or 0)) > _MAX_TICKS:
        raise MediaError("<video>", f"found presentation times beyond {_MAX_TICKS} ticks")
    times = np.unique(np.array(pts, dtype=np.int64))
    rate, is_constant = nominal_rate(times, time_base, hints)
    last = int(times[-1])
    # A last packet without a duration, or with that of a tick, is shown for one nominal frame.
    length = max((end or last) - last, 0) * time_base
    if is_constant or length * rate < Fraction(1, 2):
        length = 1 / rate
    return FrameIndex(
        pts=times,
        keyframe_pts=np.unique(np.array(keys, dtype=np.int64)),
        time_base=time_base,
        rate=rate,
        is_constant=is_constant,
        duration=(last - int(times[0])) * time_base + length,
    )


def read_frames(
    data: Buffer,
    index: FrameIndex,
    positions: Sequence[int] | npt.NDArray[np.int64],
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> Iterator[npt.NDArray[np.uint8]]:
    """Decode the frames at some positions; groups of pictures without any of them are skipped.

    Args:
        data: the file's bytes.
        index: of the same bytes.
        positions: in `index.pts`, never decreasing.
        max_pixels: of a frame; FFmpeg refuses more.

    Yields:
        (H, W, 3) uint8 RGB per position; the same array again for a repeated position.

    Raises:
        MediaError: the file is damaged, or ends before a frame that is in its index.
    """
    with open_media(data, max_pixels=max_pixels) as (container, _):
        stream = _video_stream(container, max_pixels)
        if stream is None:
            raise MediaError("<video>", "found no video stream, expected the one that was indexed")
        cursor = _Cursor(container, stream, index)
        last, pixels = -1, None
        for position in positions:
            if position != last or pixels is None:
                pixels = np.asarray(cursor.frame_at(int(position)).to_ndarray(format="rgb24"), dtype=np.uint8)
                last = position
            yield pixels


class _Cursor:
    """Moves forward through a stream's frames, and skips groups of pictures by seeking."""

    def __init__(self, container: InputContainer, stream: VideoStream, index: FrameIndex) -> None:
        self.container, self.stream, self.index = container, stream, index
        self.frames: Iterator[VideoFrame] = container.decode(stream)
        self.held: tuple[int, VideoFrame] | None = None  # the latest frame, with its presentation time
        self.ahead: tuple[int, VideoFrame] | None = None  # the one after it, if it had to be decoded

    def frame_at(self, position: int) -> VideoFrame:
        """The last frame shown at or before the time of `position`: a packet's frame may never be shown."""
        wanted = int(self.index.pts[position])
        self._jump(position)
        while self.held is None or self.held[0] < wanted:
            if self.ahead is None:
                self.ahead = self._next()
            if self.ahead is None or (self.ahead[0] > wanted and self.held is not None):
                break
            self.held, self.ahead = self.ahead, None
        if self.held is None:
            raise MediaError("<video>", f"found no frame for tick {wanted}, expected one")
        return self.held[1]

    def _next(self) -> tuple[int, VideoFrame] | None:
        return next(((frame.pts, frame) for frame in self.frames if frame.pts is not None), None)

    def _jump(self, position: int) -> None:
        """Seek to the last keyframe at or before the wanted frame, unless decoding up to it is faster."""
        wanted, keys = self.index.pts[position], self.index.keyframe_pts
        k = int(np.searchsorted(keys, wanted, side="right")) - 1
        here = -1 if self.held is None else int(np.searchsorted(self.index.pts, self.held[0]))
        if k <= 0 or int(np.searchsorted(self.index.pts, keys[k])) <= here + _NEAR:
            return
        step = 1
        while k > 0:
            self._seek(int(keys[k]))
            self.ahead = self._next()
            if self.ahead is not None and self.ahead[0] <= wanted:
                return
            k -= step  # too far: the container seeks by decoding times
            step *= 2
        self._seek(int(self.index.pts[0]))

    def _seek(self, pts: int) -> None:
        self.container.seek(pts, stream=self.stream, backward=True)
        self.frames = self.container.decode(self.stream)
        self.held, self.ahead = None, None
