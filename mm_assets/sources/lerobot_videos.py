"""The videos of a LeRobot dataset: copies the packets of an episode out of a file of several, without encoding them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from mm_assets.errors import SourceError, optional_import
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.video import open_media, video_stream_of, words_of
from mm_assets.sources.lerobot_meta import TO_ROOT
from mm_assets.storage.files import SourceFile

__all__ = ["Videos", "video_path"]

REMOTE_BLOCK_BYTES = 4 << 20  # of a remote video that are read at a time

_PATH_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")  # of a pattern of paths


def video_path(pattern: str, values: Mapping[str, Any]) -> str:
    """Returns a path of a pattern of ``info.json``, which is not a format of Python's: that could name attributes.

    Raises:
        ValueError: a value is missing, or the path leads out of the dataset.
    """

    def text_of(match: re.Match[str]) -> str:
        value = values.get(match[1])
        if isinstance(value, bool) or not isinstance(value, int if match[2] else str | int):
            raise ValueError(f"video_path {pattern!r} needs {match[1]}, which meta/ does not have")
        return f"{value:0{int(match[2])}d}" if match[2] else str(value)

    path = _PATH_FIELD.sub(text_of, pattern)
    if not path or path.startswith("/") or ".." in path.split("/") or "{" in path:
        raise ValueError(f"video_path {pattern!r} of meta/info.json does not give a path in the dataset")
    return path


class Videos:
    """Copies the videos beside a data file; the last file of each folder that holds several episodes stays open.

    Args:
        file: the data file.
    """

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._containers: dict[str, _Container] = {}  # by folder

    def __enter__(self) -> Videos:
        return self

    def __exit__(self, *_: object) -> None:
        for container in self._containers.values():
            container.stack.close()

    def copy(self, path: str, target: io.BytesIO | None) -> int:
        """Writes a whole file, or counts its bytes without a target; returns their number.

        Raises:
            SourceError: the file is missing, or the storage failed.
        """
        with self._file.beside(TO_ROOT + path) as file:
            if target is not None:
                target.write(file.read(0, file.size))
            return file.size

    def copy_part(self, path: str, start: float, end: float, num_frames: int, target: io.BytesIO | None) -> int:
        """Writes the packets of a part of a file as an MP4 of their own, or the file if it has no others.

        The same file and part give the same bytes.

        Args:
            path: of the file, in the dataset.
            start: seconds at which the first frame is shown.
            end: seconds at which the last frame ends.
            num_frames: of the part.
            target: the file that the MP4 is written to; None to count its bytes.

        Returns:
            Bytes of the MP4.

        Raises:
            MediaError: the file is not a video that FFmpeg reads.
            SourceError: the storage failed.
            ValueError: the part does not start at a keyframe, has another number of frames, or refers to frames after
                it.
        """
        with optional_import("av", "copying an episode out of a video"):
            import av
        _, _, container, reads = self._open(path)
        stream = video_stream_of(container)
        if stream is None or not stream.time_base:
            raise ValueError(f"{path} has no video stream")
        half = (end - start) / num_frames / 2  # of a frame
        base = stream.time_base
        if stream.frames == num_frames and start <= float((stream.start_time or 0) * base) + half:
            return self.copy(path, target)  # the file has no other frames
        file = _SizeCounter() if target is None else target
        first: int | None = None
        written = 0
        try:
            container.seek(max(int(start / base), 0), stream=stream)
            with av.open(file, "w", format="mp4", options={"fflags": "+bitexact"}) as output:
                copied = output.add_stream_from_template(stream, opaque=True)
                for packet in container.demux(stream):
                    if packet.pts is None or packet.dts is None:
                        continue
                    seconds = float(packet.pts * base)
                    if first is None:
                        if seconds < start - half:
                            continue  # of the episode before, from its keyframe on
                        if not packet.is_keyframe or abs(seconds - start) > half:
                            detail = f"does not start at a keyframe (its first frame is at {start:.3f} s)"
                            raise ValueError(f"the part of {path} that is this episode {detail}")
                        first = packet.pts
                    if seconds < start - half or seconds >= end - half:
                        break
                    packet.pts, packet.dts, packet.stream = packet.pts - first, packet.dts - first, copied
                    output.mux(packet)
                    written += 1
        except (av.FFmpegError, ArithmeticError, AssertionError, EOFError, LookupError, RuntimeError) as error:
            reads.check()
            raise ValueError(f"{path} cannot be copied: {words_of(error)}") from error
        reads.check()
        if written != num_frames:
            place = f"{path} has {written} frames from {start:.3f} to {end:.3f} s"
            raise ValueError(f"{place}, the episode has {num_frames}")
        return file.seek(0, io.SEEK_END)

    def _open(self, path: str) -> _Container:
        folder = path.rpartition("/")[0]
        container = self._containers.get(folder)
        if container is not None:
            if container.path == path:
                return container
            self._containers.pop(folder).stack.close()
        with ExitStack() as stack:
            file = stack.enter_context(self._file.beside(TO_ROOT + path))
            reads = _Reads(file)
            ranged = RangedFile(file.size, reads, max_bytes=1 << 62, seconds=math.inf)
            media, _ = stack.enter_context(open_media(ranged, decodes=False))
            self._containers[folder] = container = _Container(path, stack.pop_all(), media, reads)
        return container


class _SizeCounter(io.RawIOBase):
    """A file that is written and not stored."""

    def __init__(self) -> None:
        self.size = self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._at += len(data)
        self.size = max(self.size, self._at)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class _Container(NamedTuple):
    """An open video: `stack` closes it, and `reads` reads its file."""

    path: str
    stack: ExitStack
    media: Any
    reads: _Reads


class _Reads:
    """Reads ranges of a file, in large blocks if it is remote; `check` raises what PyAV drops."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._start, self._block = 0, b""
        self._failure: SourceError | None = None

    def __call__(self, offset: int, size: int) -> bytes:
        """Returns the bytes of a range; a damaged video may ask for bytes after the end, which are none."""
        if size <= 0:
            return b""
        if not self._start <= offset <= offset + size <= self._start + len(self._block):
            length = size if self._file.is_local else max(size, REMOTE_BLOCK_BYTES)
            try:
                self._block = self._file.read(offset, min(length, self._file.size - offset))
            except SourceError as error:
                self._failure = error
                raise
            self._start = offset
        return self._block[offset - self._start : offset - self._start + size]

    def check(self) -> None:
        """Raises the error of the storage, if there was one."""
        if self._failure is not None:
            raise self._failure
