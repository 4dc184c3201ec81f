"""Frames of video files, decoded and converted as FFmpeg's command line does; damage among them is an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.timing import FrameIndex, rounding_tolerance
from mm_assets.media.video import (
    DEFAULT_MAX_PIXELS,
    MAX_TICKS,
    decoded_frames,
    is_blank,
    open_media,
    time_base_of,
    video_stream_of,
    words_of,
)

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.filter import Graph
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

__all__ = ["check_frames", "read_frames", "seek_frames"]

_FAR_SECONDS = 2  # of video: a seek is faster than decoding as much
_REORDERED = 40  # packets: more than any codec has between decoding and presentation order
_SOUGHT = frozenset(("video/mp4", "video/quicktime", "video/3gpp", "video/webm", "video/x-matroska"))
_NEAR = 8  # frames: decoding up to a keyframe this near is faster than a seek


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
        stream = video_stream_of(container, max_pixels)
        if stream is None:
            raise MediaError("<video>", "found no video stream, expected the one that was indexed")
        cursor, convert = _Cursor(container, stream, index), _Converter()
        last, pixels = -1, None
        for position in positions:
            if position != last or pixels is None:
                pixels = convert(cursor.frame_at(int(position)))
                last = position
            yield pixels


def seek_frames(
    data: Buffer | RangedFile,
    numbers: Sequence[int],
    rate: Fraction,
    start: Fraction,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> list[npt.NDArray[np.uint8]] | None:
    """Decode some frames of a constant rate by seeking to them, without listing the packets of the file.

    They are those that `read_frames` decodes at the positions of `FrameIndex.shown_at`.

    Args:
        data: the file.
        numbers: of the frames, never decreasing.
        rate: frames per second.
        start: seconds from the first frame of the file to frame 0.
        max_pixels: of a frame; FFmpeg refuses more.

    Returns:
        (H, W, 3) uint8 RGB of each, the same array again for a repeated one; None if only an index of all packets shows
        which frames they are.

    Raises:
        MediaError: the file is damaged there.
    """
    with open_media(data, max_pixels=max_pixels) as (container, content_type):
        stream = video_stream_of(container, max_pixels)
        if stream is None or content_type not in _SOUGHT or stream.codec_context.name == "theora":
            return None
        seeker = _Seeker.at_start(container, stream)
        if seeker is None:
            return None
        convert = _Converter()
        found: list[npt.NDArray[np.uint8]] = []
        last: VideoFrame | None = None
        begin, period = start / seeker.time_base, 1 / (rate * seeker.time_base)
        tolerance = rounding_tolerance(seeker.time_base) / seeker.time_base
        for number in numbers:
            exact = seeker.first + begin + number * period
            frame = seeker.frame_at(math.floor(exact + tolerance), math.floor(exact + 1))
            if frame is None:
                return None
            found.append(found[-1] if frame is last else convert(frame))
            last = frame
        return found


class _Seeker:
    """Moves through a stream's frames by their times alone."""

    def __init__(self, container: InputContainer, stream: VideoStream, first: int, time_base: Fraction) -> None:
        self.container, self.stream = container, stream
        self.first = first  # tick of the first frame
        self.time_base = time_base
        self.frames: Iterator[tuple[int, VideoFrame]] = iter(())  # with their times
        self.held: tuple[int, VideoFrame] | None = None
        self.ahead: tuple[int, VideoFrame] | None = None

    @classmethod
    def at_start(cls, container: InputContainer, stream: VideoStream) -> Self | None:
        """A seeker of a stream that begins with a keyframe and whose packets have times; None for any other."""
        packets = (packet for packet in container.demux(stream) if packet.size and not packet.is_discard)
        head = list(islice(packets, _REORDERED))
        times = [packet.pts for packet in head if packet.pts is not None]
        if not head or len(set(times)) < len(head) or not head[0].is_keyframe:
            return None
        return cls(container, stream, min(times), time_base_of(stream.time_base))

    def frame_at(self, tick: int, close: int) -> VideoFrame | None:
        """The last frame whose time is at most `tick`; None if one follows up to `close`, or times do not tell."""
        far = math.ceil(_FAR_SECONDS / self.time_base)
        tick = max(tick, self.first)
        if (self.held is None or not self.held[0] <= tick <= self.held[0] + far) and not self._seek(tick):
            return None
        while self.held is None or self.held[0] < tick:
            self.ahead = self.ahead or next(self.frames, None)
            if self.ahead is None:
                return None  # the last frame: how many there are, only all packets show
            if self.held is not None and self.ahead[0] > tick:
                break
            if self.held is not None and self.ahead[0] <= self.held[0]:
                return None
            self.held, self.ahead = self.ahead, None
        if self.held is None or (self.ahead is not None and self.ahead[0] <= close):
            return None
        return self.held[1]

    def _seek(self, tick: int) -> bool:
        """Goes to a keyframe at or before a time, as near as the container leads to one."""
        back = 0
        step = max(1, math.floor(1 / self.time_base))
        while True:
            target = max(tick - back, self.first)
            self.container.seek(target, stream=self.stream, backward=True)
            packets = self.container.demux(self.stream)
            key = next((packet for packet in packets if packet.size and not packet.is_discard), None)
            if key is not None and key.is_keyframe and key.pts is not None and key.pts <= tick:
                self.frames = self._decoded(chain([key], packets), key.pts)
                self.held, self.ahead = None, None
                return True
            if target == self.first:
                return False
            back += step
            step *= 2

    def _decoded(self, packets: Iterable[Packet[Any]], first: int) -> Iterator[tuple[int, VideoFrame]]:
        """The frames of packets, without those before the keyframe, which refer to frames that were not decoded."""
        for packet in packets:
            if packet.size == 0 and packet.buffer_ptr:
                continue
            if packet.size and (packet.is_corrupt or is_blank(packet, self.stream)):
                raise MediaError("<video>", "found a damaged packet, expected a whole one")
            for frame in packet.decode():
                if frame.pts is None or frame.pts < first:
                    continue
                if frame.is_corrupt:
                    raise MediaError("<video>", "found a frame that the decoder filled in, expected a whole one")
                yield frame.pts, frame


def check_frames(
    data: Buffer, index: FrameIndex, size: tuple[int, int], last: int, *, max_pixels: int = DEFAULT_MAX_PIXELS
) -> None:
    """Decode frames once, in order, without filtering, keeping or converting them.

    Args:
        data: the file's bytes.
        index: of the same bytes.
        size: (height, width) that every frame must have.
        last: position in `index.pts` of the last frame that matters.
        max_pixels: of a frame; FFmpeg refuses more.

    Raises:
        MediaError: `read_frames` would raise it for some position up to `last`.
    """
    with open_media(data, max_pixels=max_pixels) as (container, _):
        stream = video_stream_of(container, max_pixels)
        if stream is None:
            raise MediaError("<video>", "found no video stream, expected the one that was indexed")
        # The loop filter smooths pixels that are not used here; every bit of the data is read all the same.
        stream.codec_context.options = {**stream.codec_context.options, "skip_loop_filter": "all"}
        cursor = _Cursor(container, stream, index)
        wanted = int(index.pts[last])
        found = cursor.advance()
        if found is None:
            raise MediaError("<video>", "found no frame that decodes, expected one")
        while found is not None:
            frame = found[1]
            if (frame.height, frame.width) != size:
                raise MediaError("<video>", f"found a frame of {(frame.height, frame.width)}, expected {size}")
            if found[0] >= wanted:
                return
            found = cursor.advance()


class _Converter:
    """Frames as RGB, bit for bit as FFmpeg's command line converts them."""

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._kind: tuple[object, ...] = ()  # of the frames that the graph takes

    def __call__(self, frame: VideoFrame) -> npt.NDArray[np.uint8]:
        """(H, W, 3) uint8."""
        # The direct way is faster, but converts each field alone, and more than 8 bits with another filter.
        if frame.interlaced_frame or max(part.bits for part in frame.format.components) > 8:
            frame = self._filtered(frame)
        return np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)

    def _filtered(self, frame: VideoFrame) -> VideoFrame:
        from av.filter import Graph

        kind = (frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range)
        if self._graph is None or kind != self._kind:
            self._graph, self._kind = Graph(), kind
            source = {
                "video_size": f"{frame.width}x{frame.height}",
                "pix_fmt": frame.format.name,
                "time_base": "1/1000",
                "colorspace": str(int(frame.colorspace)),
                "range": str(int(frame.color_range)),
            }
            nodes = [self._graph.add("buffer", **source), self._graph.add("scale")]
            nodes += [self._graph.add("format", pix_fmts="rgb24"), self._graph.add("buffersink")]
            self._graph.link_nodes(*nodes).configure()
        self._graph.push(frame)
        pulled: VideoFrame = self._graph.vpull()
        return pulled


class _Cursor:
    """Moves forward through a stream's frames, and skips groups of pictures by seeking."""

    def __init__(self, container: InputContainer, stream: VideoStream, index: FrameIndex) -> None:
        self.container, self.stream, self.index = container, stream, index
        self.frames = decoded_frames(container, stream)
        self.held: tuple[int, VideoFrame] | None = None  # the latest frame, with its presentation time
        self.ahead: tuple[int, VideoFrame] | None = None  # the one after it, if it had to be decoded
        self.latest = -MAX_TICKS
        self.first = -MAX_TICKS  # earlier frames than a keyframe that was sought may lack those that they refer to

    def frame_at(self, position: int) -> VideoFrame:
        """The last frame shown at or before the time of `position`: a packet's frame may never be shown."""
        wanted = int(self.index.pts[position])
        self._jump(position)
        while self.held is None or self.held[0] < wanted:
            if self.ahead is None:
                self.ahead = self.advance()
            if self.ahead is None or (self.ahead[0] > wanted and self.held is not None):
                break
            self.held, self.ahead = self.ahead, None
        if self.held is None:
            raise MediaError("<video>", f"found no frame for tick {wanted}, expected one")
        return self.held[1]

    def advance(self) -> tuple[int, VideoFrame] | None:
        """Decode the next frame that has a presentation time; None after the last.

        Raises:
            MediaError: it is damaged.
        """
        from av import FFmpegError

        while True:
            try:
                frame = next(self.frames, None)
            except FFmpegError as error:
                raise self._damaged(words_of(error), self.latest) from error
            if frame is None:
                return None
            if frame.pts is None:
                continue
            if frame.is_corrupt and frame.pts >= self.first:
                raise self._damaged("the decoder filled in what is missing", frame.pts - 1)
            self.latest = frame.pts
            return frame.pts, frame

    def _damaged(self, reason: str, pts: int) -> MediaError:
        total = len(self.index.pts)
        near = min(int(np.searchsorted(self.index.pts, pts, side="right")), total)
        return MediaError("<video>", f"found {near} of {total} frames before damage ({reason}), expected all")

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
            self.ahead = self.advance()
            if self.ahead is not None and self.ahead[0] <= wanted:
                return
            k -= step  # too far: the container seeks by decoding times
            step *= 2
        self._seek(int(self.index.pts[0]))

    def _seek(self, pts: int) -> None:
        self.container.seek(pts, stream=self.stream, backward=True)
        self.frames = decoded_frames(self.container, self.stream)
        self.held, self.ahead = None, None
        self.first = pts
