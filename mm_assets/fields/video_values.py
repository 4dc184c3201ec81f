"""The values of `SyncedVideoAudioField`: clips as arrays, as files, and decoded."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.fields.audio import Audio
from mm_assets.media.content_types import Buffer
from mm_assets.media.picture import Picture
from mm_assets.media.timing import Timing, offset_in_samples
from mm_assets.summaries import ArrayValue, summary_repr

__all__ = ["Clip", "VideoAudio", "VideoFile"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class VideoAudio(ArrayValue):
    """A clip as arrays, to be encoded.

    Attributes:
        frames: (T, H, W, 3) uint8 RGB, T at least 1; None without video.
        frame_rate: frames per second: a ratio, an integer, a float such as 29.97 (then 30000/1001, as
            `mm_assets.media.timing.as_frame_rate` says), or (numerator, denominator). None where the field sets it.
        audio: `Audio`, or (samples, sample_rate) with samples (n,) or (n, channels), int16 or float32; None without.
        audio_offset_seconds: how much later than frame 0 the first sample is heard, as a container's start time says
            it; negative if it is heard earlier.
    """

    frames: npt.NDArray[np.uint8] | None = None
    frame_rate: Fraction | float | tuple[int, int] | None = None
    audio: Audio | tuple[npt.NDArray[Any], int] | None = None
    audio_offset_seconds: Fraction | float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFile:
    """A clip as a file, with its audio in it or in a file of its own.

    Attributes:
        video: the file's bytes or path; it may hold audio only. None where there is only `audio`.
        audio: bytes or path of an audio file, taken in place of the audio in `video`; its first sample belongs to the
            first frame of the video, whatever its own presentation times say.
        start_seconds: of the clip, from the first frame of the video; rounded to microseconds.
        duration_seconds: of the clip at most; None for all there is.
        audio_offset_seconds: how much later than frame 0 the first sample is heard, beside what the video file itself
            says: 0 for its own audio, the start time of audio in a file of its own. Negative if it is heard earlier.
    """

    video: Buffer | str | Path | None = None
    audio: Buffer | str | Path | None = None
    start_seconds: Fraction | float = 0
    duration_seconds: Fraction | float | None = None
    audio_offset_seconds: Fraction | float = 0

    __repr__ = summary_repr


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Clip(ArrayValue):
    """Decoded frames and audio. T is the number of frames given, which may be chosen ones.

    In a window of the clip, times count from the window's start, and `audio` is that of the window.

    Attributes:
        frames: (T, H, W, 3) uint8 RGB; zeros where `frame_mask` is False. None where the clip has no video.
        frame_indices: (T,) int64, frame numbers within the clip; -1 where `frame_mask` is False.
        frame_mask: (T,) bool, which rows are frames; all of them unless the field has `target_frames`.
        frame_times: (T,) float64, seconds from frame 0; 0 where `frame_mask` is False. The frame that is shown when a
            window starts may have begun before it.
        audio: (num_samples, channels) float32 in [-1, 1] and its rate; None where the clip has no audio.
        audio_segments: (T, 2) int64, start and stop of each frame's samples in `audio`.
        timing: of the whole clip: rates, counts, offset, whether it was truncated.
        picture: how the file's frames are meant to be shown: orientation, pixel aspect, fields, colours. None where the
            clip is not stored as a file, and without video.
        window: start and duration in seconds of the part of the clip that this is; None for the whole clip.
    """

    frames: npt.NDArray[np.uint8] | None
    frame_indices: npt.NDArray[np.int64]
    frame_mask: npt.NDArray[np.bool_]
    frame_times: npt.NDArray[np.float64]
    audio: Audio | None
    audio_segments: npt.NDArray[np.int64]
    timing: Timing
    picture: Picture | None = None
    window: tuple[float, float] | None = None

    @property
    def audio_start(self) -> int:
        """The sample of the clip's audio at which `audio` begins: 0 unless this is a window.

        Negative if the window begins before the audio; then `audio` begins with zeros.
        """
        if self.window is None:
            return 0
        return offset_in_samples(self.window[0], self.timing.sample_rate) - self.timing.audio_offset_samples

    @property
    def frame_rate(self) -> Fraction | None:
        """Frames per second; None where the clip has no video."""
        return self.timing.frame_rate

    @property
    def duration_seconds(self) -> float:
        """The duration of the frames or the audio, whichever is longer."""
        return self.timing.duration_seconds

    def audio_of_frame(self, index: int) -> npt.NDArray[np.float32]:
        """(n, channels) float32, a view: the samples of a frame by its number in the clip, decoded or not.

        In a window, those that `audio` has.

        Raises:
            IndexError: the clip has no such frame.
            ValueError: the clip has no audio.
        """
        if self.audio is None:
            raise ValueError("found a clip without audio, expected one with audio")
        start, stop = np.maximum(self.timing.audio_segments([index])[0] - self.audio_start, 0)
        samples: npt.NDArray[np.float32] = self.audio.samples[start:stop]
        return samples
