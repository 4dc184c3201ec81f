"""A clip to be encoded: the source of its frames and samples, and the choice of them.

`source_of` indexes the streams, `plan_of` chooses frames, samples and offset without decoding anything, and
`clip_sound` and `Source.frames` decode. A `ValueError` says what does not fit; `MediaError` is one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.fields.audio import samples_of
from mm_assets.fields.base import MAX_DATA
from mm_assets.fields.image_decode import orient
from mm_assets.fields.image_resize import resize
from mm_assets.fields.video_record import AUDIO_PART, VIDEO_PART
from mm_assets.fields.video_values import VideoAudio, VideoFile
from mm_assets.media.content_types import Buffer
from mm_assets.media.frames import read_frames
from mm_assets.media.picture import Picture, picture_of
from mm_assets.media.sound import (
    MAX_SOUND_CHANNELS,
    MAX_SOUND_RATE,
    SoundIndex,
    index_sound,
    mix,
    mixes,
    read_sound,
    resample,
    resampled_length,
)
from mm_assets.media.timing import FrameIndex, as_frame_rate, offset_in_samples
from mm_assets.media.video import DEFAULT_MAX_PIXELS, index_frames
from mm_assets.summaries import describe

__all__ = [
    "EARLIER_SURPLUS_SECONDS",
    "Plan",
    "Source",
    "check_length",
    "clip_sound",
    "last_sample",
    "most_frames",
    "plan_of",
    "shown_size",
    "source_of",
    "upright",
]

_MAX_SECONDS = 1_000_000
_MAX_SIDE = 65_500  # libjpeg's limit
_MAX_REPEATS = 1000  # of a file's frames on average: beyond it a few bytes would become gigabytes
EARLIER_SURPLUS_SECONDS = Fraction(1, 2)  # that earlier releases may have counted too much
_MARGIN_SECONDS = 1  # decoded past the end of a truncated clip, so that the resampler's window does not see the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The streams of a clip.

    Attributes:
        video: a file's bytes, or arrays' frames; None without.
        audio: bytes of an audio file, or arrays' samples (n, channels); None where the audio is in `video`.
        index: when the frames are shown; None without video.
        size: (height, width) of the frames, upright and stretched.
        sound: extent of the audio; None without.
        sound_delay: seconds by which the first sample comes after the first frame.
        start: seconds into the video at which the clip begins.
        duration: seconds of the clip at most, None for all.
        audio_offset: seconds by which the audio starts later than the frames, beside `sound_delay`.
        max_pixels: of a frame.
        turn: EXIF number by which frames are turned.
        is_square: whether frames are stretched to square pixels.
    """

    video: Any = None
    audio: Any = None
    index: FrameIndex | None = None
    size: tuple[int, int] = (0, 0)
    sound: SoundIndex | None = None
    sound_delay: Fraction = Fraction(0)
    start: Fraction = Fraction(0)
    duration: Fraction | None = None
    audio_offset: Fraction = Fraction(0)
    max_pixels: int = DEFAULT_MAX_PIXELS
    turn: int = 1
    is_square: bool = False

    @property
    def parts(self) -> int:
        """Which contents there are, as in the record."""
        return (VIDEO_PART if self.video is not None else 0) | (AUDIO_PART if self.audio is not None else 0)

    @property
    def is_arrays(self) -> bool:
        """Whether it is not a file."""
        return isinstance(self.video, np.ndarray) or isinstance(self.audio, np.ndarray)

    def frames(self, positions: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.uint8]]:
        """(H, W, 3) uint8 of each position in `index`; the same array again for the same position."""
        if isinstance(self.video, np.ndarray):
            last, pixels = -1, self.video[0]
            for position in positions.tolist():
                if position != last:
                    last, pixels = position, self.video[position]
                yield pixels
        elif self.index is not None:
            held: npt.NDArray[np.uint8] | None = None
            for pixels in read_frames(self.video, self.index, positions, max_pixels=self.max_pixels):
                if pixels is not held:
                    held, turned = pixels, upright(pixels, self.turn, self.size if self.is_square else None)
                yield turned


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The content of a clip; counts of samples are at `sample_rate`.

    Attributes:
        num_frames: 0 without video.
        frame_rate: frames per second; None without video.
        index: of the source.
        size: (height, width) of the source's frames.
        start_us: microseconds into the video at which frame 0 is shown.
        sound: of the source.
        sample_rate: Hz; 0 without audio.
        channels: 0 without audio.
        audio_start: first sample of the clip within the source's audio.
        num_audio_samples: of the clip.
        frame_0_sample: the sample of the clip at which frame 0 begins; negative if the audio starts later.
        truncated: whether a limit truncated the clip.
    """

    num_frames: int = 0
    frame_rate: Fraction | None = None
    index: FrameIndex | None = None
    size: tuple[int, int] = (0, 0)
    start_us: int = 0
    sound: SoundIndex | None = None
    sample_rate: int = 0
    channels: int = 0
    audio_start: int = 0
    num_audio_samples: int = 0
    frame_0_sample: int = 0
    truncated: bool = False

    def positions(self) -> npt.NDArray[np.int64]:
        """Position in `index` of what each frame of the clip shows."""
        frames = np.arange(self.num_frames, dtype=np.int64)
        if self.index is None or self.frame_rate is None:
            return frames[:0]
        return self.index.shown_at(frames, self.frame_rate, Fraction(self.start_us, 1_000_000))


def upright(pixels: npt.NDArray[np.uint8], turn: int, size: tuple[int, int] | None) -> npt.NDArray[np.uint8]:
    """A frame turned by an EXIF number, then stretched to (height, width) unless None."""
    turned = orient(pixels, turn)
    return turned if size is None else resize(np.ascontiguousarray(turned), size)


def shown_size(picture: Picture | None, size: tuple[int, int], turn: int, *, is_square: bool) -> tuple[int, int]:
    """(height, width) of frames once they are upright and, where asked, stretched; `size` is that of stored ones."""
    height, width = picture.square(size) if is_square and picture is not None else size
    return (width, height) if turn >= 5 else (height, width)


def source_of(
    value: VideoAudio | VideoFile,
    *,
    frame_rate: Fraction | None = None,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    turns: bool = True,
    stretches: bool = False,
    audio_track: int | str | None = None,
    max_audio_bytes: int | None = None,
) -> Source:
    """Check arrays, or list the frames of files and count their samples.

    Args:
        value: arrays or files.
        frame_rate: for arrays without one of their own.
        max_pixels: of a frame.
        turns: whether frames of a file are turned upright.
        stretches: whether they are stretched to square pixels.
        audio_track: as `mm_assets.media.video.audio_stream_of` takes it.
        max_audio_bytes: of a file's audio as float32; None for any number.

    Raises:
        ValueError: the value is wrong; a `MediaError` where a file is.
        MissingExtraError: the packages that read files are not installed.
    """
    offset = _seconds(value.audio_offset_seconds, "audio_offset_seconds", low=-_MAX_SECONDS)
    if isinstance(value, VideoAudio):
        return _arrays(value, frame_rate, offset, max_pixels)
    video = None if value.video is None else _read(value.video, "video")
    audio = None if value.audio is None else _read(value.audio, "audio")
    if video is None and audio is None:
        raise ValueError("found neither video nor audio, expected one of them")
    found = None if video is None else index_frames(video, max_pixels=max_pixels)
    index, height, width = found or (None, 0, 0)
    picture = None if index is None or video is None else picture_of(video, max_pixels=max_pixels)
    turn = picture.orientation if picture is not None and turns else 1
    is_square = stretches and picture is not None and picture.pixel_aspect != 1
    size = shown_size(picture, (height, width), turn, is_square=is_square)
    if size[0] * size[1] > max_pixels:
        reason = f"found frames of {size[0]} x {size[1]} with square pixels, expected at most {max_pixels} (max_pixels)"
        raise MediaError("<video>", reason, setting="max_pixels")
    sound = index_sound(audio if audio is not None else video or b"", audio_track, max_bytes=max_audio_bytes)
    if audio is not None and sound is None:
        raise ValueError("found an audio file without audio, expected some")
    if index is None and sound is None:
        raise ValueError("found neither a video nor an audio stream, expected one of them")
    is_inside = index is not None and sound is not None and audio is None
    start = _seconds(value.start_seconds, "start_seconds", low=0)
    duration = None
    if value.duration_seconds is not None:
        duration = _seconds(value.duration_seconds, "duration_seconds", low=Fraction(1, 1_000_000))
    return Source(
        video=video,
        audio=audio,
        index=index,
        size=size,
        sound=sound,
        sound_delay=sound.start - index.start if is_inside and sound and index else Fraction(0),
        start=Fraction(round(start * 1_000_000), 1_000_000),
        duration=duration,
        audio_offset=offset,
        max_pixels=max_pixels,
        turn=turn,
        is_square=is_square,
    )


def _seconds(value: object, name: str, *, low: Fraction | int) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, Fraction | int | float | np.floating | np.integer):
        raise ValueError(f"found {name} {value!r}, expected seconds")
    if not math.isfinite(value) or not low <= value <= _MAX_SECONDS:
        raise ValueError(f"found {name} {value!r}, expected {low} to {_MAX_SECONDS} seconds")
    return Fraction(value) if isinstance(value, Fraction) else Fraction(float(value))


def _read(content: object, name: str) -> Buffer:
    if isinstance(content, str | Path):
        path = Path(content)
        try:
            if path.stat().st_size > MAX_DATA:
                raise ValueError(f"found a {name} file of {path.stat().st_size} bytes, expected at most {MAX_DATA}")
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"found {name} path {str(content)!r} ({error.strerror}), expected a file") from error
    if not isinstance(content, Buffer):
        raise ValueError(f"found {describe(content)} as {name}, expected bytes or a path")
    return content


def _arrays(value: VideoAudio, rate: Fraction | None, offset: Fraction, max_pixels: int) -> Source:
    frames, index, size = value.frames, None, (0, 0)
    if frames is not None:
        is_rgb = isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.ndim == 4
        if not is_rgb or frames.shape[3] != 3 or 0 in frames.shape:
            raise ValueError(f"found frames {describe(frames)}, expected uint8 of shape (T, H, W, 3) without a zero")
        if max(frames.shape[1:3]) > _MAX_SIDE:
            raise ValueError(f"found frames {describe(frames)}, expected sides of at most {_MAX_SIDE}")
        if frames.shape[1] * frames.shape[2] > max_pixels:
            reason = f"found frames {describe(frames)}, expected at most {max_pixels} pixels (max_pixels)"
            raise MediaError("<video>", reason, setting="max_pixels")
        if value.frame_rate is not None:
            rate = as_frame_rate(value.frame_rate)
        if rate is None:
            raise ValueError("found frames without a frame_rate, expected one with them or in the field")
        size = frames.shape[1:3]
        index = FrameIndex(
            pts=np.arange(len(frames), dtype=np.int64),
            keyframe_pts=np.arange(len(frames), dtype=np.int64),
            time_base=1 / rate,
            rate=rate,
            is_constant=True,
            duration=len(frames) / rate,
        )
    samples, sound = None, None
    if value.audio is not None:
        samples, sample_rate = samples_of(value.audio)
        num_samples, channels = samples.shape
        if not 1 <= sample_rate <= MAX_SOUND_RATE or not 1 <= channels <= MAX_SOUND_CHANNELS:
            limits = f"1 to {MAX_SOUND_CHANNELS} channels at 1 to {MAX_SOUND_RATE} Hz"
            raise ValueError(f"found {channels} channels at {sample_rate} Hz, expected {limits}")
        sound = SoundIndex(start=Fraction(0), num_samples=num_samples, sample_rate=sample_rate, channels=channels)
    if index is None and sound is None:
        raise ValueError("found neither frames nor audio, expected one of them")
    return Source(
        video=frames,
        audio=samples,
        index=index,
        size=(int(size[0]), int(size[1])),
        sound=sound,
        audio_offset=offset,
        max_pixels=max_pixels,
    )


def most_frames(index: FrameIndex) -> int:
    """Frames that a clip of a file may have at most."""
    return min(_MAX_REPEATS * len(index.pts), 2**32 - 1)


def plan_of(
    source: Source,
    *,
    frame_rate: Fraction | None,
    sample_rate: int | None,
    channels: int | None,
    max_frames: int | None,
    max_duration: float | None,
) -> Plan:
    """Choose frames, samples and offset.

    Raises:
        ValueError: the clip begins after the end, is too long, or its channels cannot be mixed so.
    """
    limit = None if max_duration is None else Fraction(max_duration)
    lengths = [length for length in (source.duration, limit) if length is not None]
    rate, num_frames, is_cut, truncated = None, 0, False, False
    if source.index is not None:
        rate = frame_rate or source.index.rate
        available = max(source.index.num_frames(rate, source.start), 1 if source.start == 0 else 0)
        if available == 0:
            raise ValueError(f"found a start at {float(source.start)} s of {float(source.index.duration):.3f} s")
        wanted = available
        if source.duration is not None:
            wanted = min(wanted, max(1, math.floor(source.duration * rate + Fraction(1, 2))))
        num_frames = min(wanted, max_frames or wanted)
        if limit is not None:
            num_frames = min(num_frames, max(1, math.floor(limit * rate)))
        truncated, is_cut = num_frames < wanted, num_frames < available
        most = most_frames(source.index)
        if num_frames > most:
            raise ValueError(f"found {num_frames} frames at {rate} per second, expected at most {most} for such a file")
    plan = Plan(
        num_frames=num_frames,
        frame_rate=rate,
        index=source.index,
        size=source.size,
        start_us=int(source.start * 1_000_000),
        truncated=truncated,
    )
    if source.sound is None:
        return plan
    hz = sample_rate or source.sound.sample_rate
    count = channels or source.sound.channels
    if not mixes(source.sound.channels, count):
        raise ValueError(f"found audio of {source.sound.channels} channels, expected ones that mix to {count}")
    total = resampled_length(source.sound.num_samples, source.sound.sample_rate, hz)
    delay = source.audio_offset + source.sound_delay
    if rate is not None:
        at_frame_0 = offset_in_samples(source.start - delay, hz)
        first = min(max(at_frame_0, 0), total) if source.start else 0
        end = at_frame_0 + math.floor(num_frames * hz / rate) if is_cut else total
        frame_0_sample = at_frame_0 - first
    else:
        first, frame_0_sample = min(offset_in_samples(source.start, hz), total), offset_in_samples(-delay, hz)
        if source.start and first == total:
            raise ValueError(f"found a start at {float(source.start)} s of {total / hz:.3f} s")
        end = total if not lengths else first + math.floor(min(lengths) * hz)
        truncated = limit is not None and (limit < (source.duration or limit + 1)) and end < total
    last = min(max(end, first), total)
    return dataclasses.replace(
        plan,
        sound=source.sound,
        sample_rate=hz,
        channels=count,
        audio_start=first,
        num_audio_samples=last - first,
        frame_0_sample=frame_0_sample,
        truncated=truncated,
    )


def last_sample(plan: Plan, sound: SoundIndex) -> int:
    """The sample of the source, at its rate, before which decoding a clip's audio may stop."""
    end = plan.audio_start + plan.num_audio_samples
    if (sound.sample_rate, sound.channels) == (plan.sample_rate, plan.channels):
        return end
    return end * sound.sample_rate // plan.sample_rate + 1 + _MARGIN_SECONDS * sound.sample_rate


def clip_sound(source: Source, plan: Plan) -> npt.NDArray[Any]:
    """(num_audio_samples, channels) float32; int16 where arrays of int16 are taken as they are.

    Raises:
        MediaError: the file is damaged, or has less audio than the plan expects.
    """
    sound = plan.sound
    if sound is None:
        return np.zeros((0, plan.channels), dtype=np.float32)
    end = plan.audio_start + plan.num_audio_samples
    is_as_it_is = (sound.sample_rate, sound.channels) == (plan.sample_rate, plan.channels)
    if isinstance(source.audio, np.ndarray):
        samples = source.audio
        if not is_as_it_is and samples.dtype == np.int16:
            samples = samples.astype(np.float32) / np.float32(32768)
    else:
        samples = read_sound(
            source.audio if source.audio is not None else source.video, sound, stop=last_sample(plan, sound)
        )
        check_length(plan, len(samples))
    if not is_as_it_is:
        samples = resample(mix(samples, plan.channels), sound.sample_rate, plan.sample_rate)
    if len(samples) < end:
        samples = np.concatenate([samples, np.zeros((end - len(samples), plan.channels), dtype=samples.dtype)])
    return samples[plan.audio_start : end]


def check_length(plan: Plan, num_samples: int) -> None:
    """Refuse the audio of a file, of which `num_samples` decode at its own rate, if the clip needs more.

    Earlier releases counted by presentation times, which exceed what decodes by up to the last packet and its padding.

    Raises:
        MediaError: the audio ends too early.
    """
    if plan.sound is None:
        return
    end = plan.audio_start + plan.num_audio_samples
    decoded = resampled_length(num_samples, plan.sound.sample_rate, plan.sample_rate)
    if end > decoded + EARLIER_SURPLUS_SECONDS * plan.sample_rate:
        raise MediaError("<sound>", f"audio is shorter than its record says (found {decoded} samples, expected {end})")
