"""Filters of video rows: duration, frame rate, size, and whether there is audio.

All of it is read from the container's header; no frame is decoded. It needs the packages of the extra ``video``:
without them the first block with video raises `MissingExtraError`, and no row is kept unjudged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mm_assets.filters.base import Block, MeasuredRowFilter, Rows, Threshold, outside, thresholds_of
from mm_assets.filters.parameters import Limits, check_flag, check_limits, check_whole, some_limit
from mm_assets.media.video import VideoInfo, probe_video

__all__ = ["VideoDurationFilter", "frames_a_second", "video_infos"]

_RATE_DECIMALS = 3  # so that 29.97 and 23.976, as people write them, are the rates 30000/1001 and 24000/1001


def video_infos(block: Block, rows: Rows) -> list[VideoInfo | None]:
    """The header of each row's video; None where there is none or it cannot be read."""
    return block.measure("video header", rows, probe_video, threaded=True)


def frames_a_second(info: VideoInfo) -> float | None:
    """The nominal frame rate to three decimals; None without video, or without a rate in the header."""
    return None if info.frame_rate is None else round(float(info.frame_rate), _RATE_DECIMALS)


class VideoDurationFilter(MeasuredRowFilter):
    """Keeps video whose duration lies in a closed interval, and its frame rate and size too; None sets no limit.

    A file without a video stream has the frame rate 0 and no pixels.

    Args:
        min_seconds: shortest duration kept.
        max_seconds: longest duration kept.
        min_frame_rate: lowest nominal frame rate kept, in frames per second.
        max_frame_rate: highest nominal frame rate kept.
        min_width: smallest width kept, in pixels.
        min_height: smallest height kept, in pixels.
        require_audio: drop files without an audio stream.
        drop_invalid_rows: drop video that is missing, whose header cannot be read, or whose header lacks a value that
            a limit needs.
    """

    modality = "video"
    reasons = MeasuredRowFilter.reasons | {"no_audio"}

    def __init__(
        self,
        *,
        min_seconds: float | None = None,
        max_seconds: float | None = None,
        min_frame_rate: float | None = None,
        max_frame_rate: float | None = None,
        min_width: int | None = None,
        min_height: int | None = None,
        require_audio: bool = False,
        drop_invalid_rows: bool = True,
    ) -> None:
        super().__init__(drop_invalid_rows=drop_invalid_rows)
        self.require_audio = check_flag("require_audio", require_audio)
        some_limit(
            min_seconds=min_seconds,
            max_seconds=max_seconds,
            min_frame_rate=min_frame_rate,
            max_frame_rate=max_frame_rate,
            min_width=min_width,
            min_height=min_height,
            require_audio=require_audio or None,
        )
        self.seconds = check_limits("_seconds", min_seconds, max_seconds)
        self.frame_rate = check_limits("_frame_rate", min_frame_rate, max_frame_rate)
        self.width = check_limits("_width", min_width, None, check=check_whole)
        self.height = check_limits("_height", min_height, None, check=check_whole)

    def measure(self, block: Block, rows: Rows) -> Sequence[VideoInfo | None]:
        """Headers; None also for those without what a limit needs."""
        return [info if info is not None and self._tells(info) else None for info in video_infos(block, rows)]

    def _tells(self, info: VideoInfo) -> bool:
        no_duration = info.duration_seconds is None and self.seconds != Limits()
        no_rate = info.frame_rate is None and self.frame_rate != Limits()
        no_size = 0 in (info.width, info.height) and (self.width, self.height) != (Limits(), Limits())
        return not (no_duration or (info.has_video and (no_rate or no_size)))

    def verdict(self, value: VideoInfo) -> tuple[str, float | None] | None:
        """``below_min`` and ``above_max`` with the seconds, then ``frame_rate_...``, ``width_...``, ``no_audio``."""
        found = outside(
            ("", value.duration_seconds, self.seconds),
            ("frame_rate_", frames_a_second(value) or 0.0, self.frame_rate),
            ("width_", value.width, self.width),
            ("height_", value.height, self.height),
        )
        return ("no_audio", None) if found is None and self.require_audio and not value.has_audio else found

    def thresholds(self) -> Iterator[Threshold]:
        """Of the columns of the annotator ``video_info``."""
        yield from thresholds_of("video_duration_seconds", self.seconds, setting="_seconds")
        for name, limits in (("frame_rate", self.frame_rate), ("width", self.width), ("height", self.height)):
            yield from thresholds_of(f"video_{name}", limits, setting=f"_{name}", reason=f"{name}_")
