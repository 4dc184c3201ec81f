"""Video files, read by PyAV: facts about them, and the presentation times of their frames.

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

from mm_assets.errors import MediaError, optional_import
from mm_assets.media.container_damage import find_damage, without_tail
from mm_assets.media.content_types import Buffer, sniff_content_type
from mm_assets.media.header import size_of_id3
from mm_assets.media.mp4 import check_sample_tables
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.timing import FrameIndex, nominal_rate

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "FIRST_TRACK",
    "MAX_STREAMS",
    "MAX_TICKS",
    "VIDEO_TYPES",
    "VideoInfo",
    "audio_stream_of",
    "damage_of",
    "decodable_frames",
    "decoded_frames",
    "index_frames",
    "is_blank",
    "is_sought",
    "open_media",
    "probe_video",
    "seconds_of",
    "time_base_of",
    "video_stream_of",
    "words_of",
]

DEFAULT_MAX_PIXELS = 8192 * 8192  # of one frame: twice as many as 8K
_MAX_CLAIMED_PIXELS = 2**28  # that a decoder makes tables for, to say that a limit is exceeded
MAX_TICKS = 2**53  # a later presentation time is hostile: sums and products of times stay within 64 bits
FIRST_TRACK = -1  # of audio: the first that has a decoder
MAX_STREAMS = 64

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
    "audio/basic": "au",
    "audio/x-caf": "caf",
    "audio/x-w64": "w64",
    "audio/x-wavpack": "wv",
    "audio/ac3": "ac3",
    "audio/eac3": "eac3",
    "audio/amr": "amr",
}
VIDEO_TYPES = frozenset(name for name in _DEMUXERS if name.startswith("video/"))
"""MIME types of the containers that are read."""

_RANGED = ("matroska", "ogg", "wav", "flac", "mp3", "aac")  # beside MP4: those that are sought without reading all
_MAX_SAMPLES = str(2**20)  # per channel, that one packet decodes to
_ASF_INDEX = bytes.fromhex("90080033b1e5cf1189f400a0c90349cb")  # identifier of an ASF index
_ASF_COUNT_AT = 52  # bytes into the index
_BOOL_CODED = frozenset(("vp8", "vp9", "av1"))  # codecs whose decoders take zeros for pictures
_ZEROS = bytes(512)  # a sector of them is damage in these codecs: entropy coding does not write so many
_TITLES = {"mov": "MP4", "matroska": "Matroska", "mpeg": "MPEG-PS", "mpegts": "MPEG-TS", "ogg": "Ogg"}


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
    content_type = sniff_content_type(_without_tags(view)) or sniff_content_type(view)
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
def open_media(
    data: Buffer | RangedFile, *, max_pixels: int = DEFAULT_MAX_PIXELS, decodes: bool = True
) -> Iterator[tuple[InputContainer, str]]:
    """Open bytes with the demuxer of their type; errors of FFmpeg in the block become `MediaError`.

    Args:
        data: the whole file, or one that is read as the demuxer asks: its own limits are for it.
        max_pixels: of a frame.
        decodes: whether frames may be decoded, as FFmpeg does to find out about a file.

    Yields:
        The container and its MIME type.

    Raises:
        MediaError: the bytes are not a video or audio file, or are damaged.
    """
    with optional_import("av", "reading video files"):
        import av
    ranged = data if isinstance(data, RangedFile) else None
    view = memoryview(data).cast("B") if not isinstance(data, RangedFile) else data.head()
    content_type, demuxer = _sniff(view)
    if demuxer == "mov":
        check_sample_tables(view if ranged is None else ranged.boxes())
    elif ranged is not None and demuxer not in _RANGED:
        raise MediaError("<video>", f"{_title(demuxer)} file is not read in parts")
    elif demuxer == "asf":
        _check_index(view)
    # The decoders' options are needed here too: FFmpeg decodes while it opens a file.
    options = {"max_pixels": str(max_pixels), "max_samples": _MAX_SAMPLES, "threads": "1"}
    if not decodes:
        options["skip_frame"] = "all"
    limits = {"max_streams": str(MAX_STREAMS), "protocol_whitelist": "none"}
    if demuxer == "avi":
        limits["use_odml"] = "0"  # its indices can refer to each other, and so have entries without end
    rest = _without_tags(view)
    if ranged is None:
        rest = without_tail(rest, demuxer)
    file: _Reader | RangedFile = _Reader(rest)
    if ranged is not None:
        ranged.start = len(view) - len(rest)
        if len(rest) == 0:
            raise MediaError("<video>", f"begins with more than {len(view):,} bytes of tags")
        ranged.seek(0)
        file = ranged
    try:
        with av.open(
            file, "r", format=demuxer, options=options, container_options=limits, io_open=_refuse
        ) as container:
            yield container, content_type
    except MediaError:
        raise
    except (
        av.FFmpegError,
        ArithmeticError,
        AssertionError,
        EOFError,
        LookupError,
        RuntimeError,
        ValueError,
    ) as error:
        # PyAV's own errors, and those that its bindings raise for numbers out of range. FFmpeg's ENOMEM and EIO are
        # among them, for damage causes both; Python's `MemoryError` and `OSError` are the host's, and pass.
        raise MediaError("<video>", f"{_title(demuxer)} file cannot be read ({words_of(error)})") from error


def is_sought(data: RangedFile) -> bool:
    """Whether windows of a file are found without reading it to its end: MP4 and QuickTime, WebM and Matroska."""
    try:
        return _sniff(data.head())[1] in ("mov", "matroska")
    except MediaError:
        return False


def _title(demuxer: str) -> str:
    return _TITLES.get(demuxer, demuxer.upper())


def words_of(error: Exception) -> str:
    """An error of FFmpeg, without its number and its name of the file."""
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"


def video_stream_of(container: InputContainer, max_pixels: int = DEFAULT_MAX_PIXELS) -> VideoStream | None:
    """The first video stream that is not a cover picture, with limits for its decoder."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic and stream.codec_context is not None:
            # `open_media` limits FFmpeg's own probe of the file, and this the decoder that PyAV opens.
            # Unaligned: frames have the size in the header also if they are cropped at the left by a few columns.
            options = {"max_pixels": str(max_pixels), "flags": "+unaligned"}
            if stream.codec_context.name == "mjpeg":
                options["err_detect"] = "explode"  # else what a damaged picture lacks is left from another one
            stream.codec_context.options = options
            stream.codec_context.thread_count = 1
            return stream
    return None


def audio_stream_of(container: InputContainer, track: int | str | None = None) -> AudioStream | None:
    """An audio stream that has a decoder, with limits for it; None where there is none.

    Args:
        container: an open file.
        track: number among the audio streams, from 0; a language, as the file names it; `FIRST_TRACK` for the first
            with a decoder; None for the one that FFmpeg's command line chooses: the default one, then the one with most
            channels, then the first.

    Raises:
        MediaError: the file has audio, but not the wanted track.
    """
    from av.stream import Disposition

    streams = [stream for stream in container.streams.audio if stream.codec_context is not None]
    for stream in streams:
        # PyAV frees a layout of named channels twice, that of MOV's 7.1 for one; nothing here needs their names.
        layout = stream.codec_context.layout
        if layout.nb_channels and not stream.codec_context.is_open:
            stream.codec_context.layout = f"{layout.nb_channels} channels"
    if track is None:
        chosen = max(streams, key=lambda one: (bool(one.disposition & Disposition.default), one.channels), default=None)
    elif track == FIRST_TRACK or not streams:
        chosen = streams[0] if streams else None
    else:
        named = [(number, one) for number, one in enumerate(container.streams.audio) if one in streams]
        chosen = next((one for number, one in named if track in (number, one.language)), None)
        if chosen is None:
            found = ", ".join(f"{number} ({one.language or 'no language'})" for number, one in named)
            raise MediaError("<video>", f"found the audio tracks {found}, expected {track!r}")
    if chosen is not None:
        chosen.codec_context.options = {"max_samples": _MAX_SAMPLES}
    return chosen


def probe_video(data: Buffer | RangedFile) -> VideoInfo:
    """Read the header of a video or audio file.

    Args:
        data: the whole file, or one that is read by ranges: some containers have their header at the end.

    Raises:
        MediaError: the bytes are not a video or audio file, or its header is damaged.
    """
    with open_media(data) as (container, content_type):
        video, sound = video_stream_of(container), audio_stream_of(container)
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
    AVI). Damage that the container shows is found here, and named with the number of frames that are left.

    Raises:
        MediaError: the file is damaged, or its frames have more than `max_pixels`.
    """
    damage = damage_of(data)
    try:
        return _index(data, damage, max_pixels)
    except MediaError as error:
        if damage is None or damage in error.reason:
            raise
        raise MediaError("<video>", f"{error.reason}; {damage}") from error


def _index(data: Buffer, damage: str | None, max_pixels: int) -> tuple[FrameIndex, int, int] | None:
    with open_media(data, max_pixels=max_pixels) as (container, content_type):
        stream = video_stream_of(container, max_pixels)
        if stream is None:
            return None
        height, width = stream.codec_context.height, stream.codec_context.width
        if min(height, width) < 1:
            height, width = _size_beyond_limit(data)
        if height * width > max_pixels:
            reason = f"found frames of {height} x {width}, expected at most {max_pixels} pixels (max_pixels)"
            raise MediaError("<video>", reason, setting="max_pixels")
        time_base = time_base_of(stream.time_base)
        hints = [rate for rate in (stream.guessed_rate, stream.average_rate, stream.base_rate) if rate]
        repeats = stream.codec_context.name == "theora"  # an empty packet shows the frame before again
        pts, keys = array("q"), array("q")  # a file may have as many frames as bytes
        num_packets = num_whole = num_damaged_at_end = 0
        is_transport, starts_late = content_type == "video/mp2t", False
        end = None
        # MPEG program streams give times to some packets only, and FFmpeg guesses the others wrongly.
        is_timed = content_type != "video/mpeg"
        for packet in container.demux(stream):
            is_repeat = repeats and packet.pts is not None
            if packet.is_discard or (packet.size == 0 and not is_repeat):
                continue
            num_packets += 1
            starts_late = starts_late or (num_packets == 1 and not packet.is_keyframe)
            num_damaged_at_end = num_damaged_at_end + 1 if packet.is_corrupt else 0
            # The demuxer of transport streams marks a whole packet too, where another stream was joined to it.
            if (packet.is_corrupt and not is_transport) or is_blank(packet, stream):
                damage = damage or f"packet {num_packets - 1} is damaged"
            else:
                num_whole += 1
            if packet.pts is None or not is_timed:
                is_timed = False
                continue
            if packet.is_keyframe and packet.size:
                keys.append(packet.pts)
            pts.append(packet.pts)
            end = max(end or packet.pts, packet.pts + (packet.duration or 0))
        if num_damaged_at_end and is_transport:
            damage, num_whole = damage or "the last packet is damaged", num_whole - num_damaged_at_end
        if damage is not None:
            of = f" of {stream.frames}" if stream.frames else _frames_of_duration(container, stream, num_whole)
            found = f"{_title(_DEMUXERS[content_type])}: found {num_whole}{of} frames ({damage})"
            raise MediaError("<video>", f"{found}, expected a whole file")
    # What comes before the first keyframe does not decode, as in a recording that begins anywhere.
    if not is_timed or starts_late or len(set(pts)) < len(pts):
        pts, keys, end = _decoded_times(data, max_pixels), array("q"), None
        if is_transport and len(set(pts)) < len(pts):
            found = f"found {len(pts)} frames with {len(set(pts))} times"
            raise MediaError("<video>", f"{found}, expected one for each: streams were joined without new times")
    return _frame_index(pts, keys, end, time_base, hints), height, width


def is_blank(packet: Packet[Any], stream: VideoStream) -> bool:
    """Whether a packet has a sector of zeros, which some decoders take for pictures."""
    return stream.codec_context.name in _BOOL_CODED and _ZEROS in bytes(packet)


def _size_beyond_limit(data: Buffer) -> tuple[int, int]:
    """Height and width of frames that FFmpeg's decoder refuses for their size, without decoding any."""
    with open_media(data, max_pixels=_MAX_CLAIMED_PIXELS, decodes=False) as (container, _):
        stream = video_stream_of(container)
        height, width = (0, 0) if stream is None else (stream.codec_context.height, stream.codec_context.width)
    if min(height, width) < 1:
        raise MediaError("<video>", f"found frames of {height} x {width}, expected 1 pixel or more")
    return height, width


def damage_of(data: Buffer) -> str | None:
    """What `mm_assets.media.container_damage` finds in a file, without tags before it; None for a whole one.

    Raises:
        MediaError: the bytes are not a video or audio file.
    """
    view = memoryview(data).cast("B")
    return find_damage(_without_tags(view), _sniff(view)[1])


def _frames_of_duration(container: InputContainer, stream: VideoStream, found: int) -> str:
    """How many frames the header's duration and rate promise, in words; "" where it is not more than `found`."""
    rate = stream.guessed_rate or stream.average_rate
    seconds = stream.duration * stream.time_base if stream.duration and stream.time_base else None
    if seconds is None and container.duration:
        seconds = Fraction(container.duration, 1_000_000)  # AV_TIME_BASE
    promised = round(seconds * rate) if seconds and rate and 0 < seconds * rate < MAX_TICKS else 0
    return f" of about {promised}" if promised > found else ""


def seconds_of(ticks: int, time_base: Fraction) -> Fraction:
    """Ticks in seconds; `MediaError` for hostile ones."""
    if abs(ticks) > MAX_TICKS:
        raise MediaError("<video>", f"found presentation time {ticks}, expected at most {MAX_TICKS} ticks")
    return ticks * time_base


def time_base_of(time_base: Fraction | None) -> Fraction:
    """Seconds per tick; `MediaError` for hostile ones."""
    if not time_base or not 0 < time_base <= 3600 or max(time_base.as_integer_ratio()) >= 2**31:
        raise MediaError("<video>", f"found time base {time_base}, expected a positive fraction of a second")
    return time_base


def _decoded_times(data: Buffer, max_pixels: int) -> array[int]:
    times = array("q")
    with open_media(data, max_pixels=max_pixels) as (container, _):
        stream = video_stream_of(container, max_pixels)
        for frame in () if stream is None else decoded_frames(container, stream):
            if frame.pts is None:
                raise MediaError("<video>", "found frames without a presentation time, expected one for each")
            times.append(frame.pts)
    return times


def decoded_frames(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """The frames of a stream from the container's position on; empty packets, which stand for no frame, are skipped."""
    for packet in container.demux(stream):
        if packet.size or not packet.buffer_ptr:  # the last packet, which has no buffer, flushes the decoder
            yield from packet.decode()


def decodable_frames(container: InputContainer, stream: AudioStream) -> Iterator[Any]:
    """The frames from here on that decode: after a jump the first packet may be a part of one."""
    import av

    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.FFmpegError:
            continue


def _frame_index(
    pts: array[int], keys: array[int], end: int | None, time_base: Fraction, hints: Sequence[Fraction]
) -> FrameIndex:
    if not pts:
        raise MediaError("<video>", "found a video stream without frames, expected at least one")
    if max(abs(min(pts)), abs(max(pts)), abs(end or 0)) > MAX_TICKS:
        raise MediaError("<video>", f"found presentation times beyond {MAX_TICKS} ticks")
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
