"""Video and audio on one timeline: files stored as they are, or frames as JPEGs after an index, and their audio.

A clip's frames have one constant rate and are taken from the file by presentation time. `mm_assets.media.timing` says
which samples belong to a frame, `video_source` what a file is made of; this module has the settings, the payload and
its decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, MediaError
from mm_assets.fields import video_frames, video_sound
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.audio import Audio, AudioField, fill_samples, window_samples
from mm_assets.fields.base import (
    JSON,
    Encoded,
    Field,
    Item,
    Part,
    PayloadParts,
    is_int,
    over_limit,
    truncated,
    unreadable,
)
from mm_assets.fields.facts import ClipLengths, Fact, MediaLength
from mm_assets.fields.shown import ShownClip, StoredBytes
from mm_assets.fields.video_frames import encode_frames, fill_frames, fill_near_frames, index_of
from mm_assets.fields.video_record import FILE, IN_VIDEO, JPEG, NONE, OWN_FILE, RECORD, SQUARE, VIDEO_PART, Record
from mm_assets.fields.video_shown import shown_clip
from mm_assets.fields.video_sound import brought_to, decoded_size, sound_range, stored_sound, timing_at
from mm_assets.fields.video_source import Plan, Source, clip_sound, plan_of, source_of
from mm_assets.fields.video_values import Clip, VideoAudio, VideoFile
from mm_assets.media.content_types import Buffer
from mm_assets.media.picture import Picture, picture_of
from mm_assets.media.ranged_file import RangedFile, whole_of
from mm_assets.media.sound import MAX_SOUND_CHANNELS, MAX_SOUND_RATE
from mm_assets.media.timing import Timing, as_frame_rate, offset_in_samples, uniform_indices
from mm_assets.media.video import DEFAULT_MAX_PIXELS, MAX_STREAMS, is_sought

__all__ = ["Clip", "SyncedVideoAudioField", "VideoAudio", "VideoFile"]

DEFAULT_MAX_DECODED = 2**32  # bytes: a minute of 30 frames per second at 720p is 5 GB
_NEAR_SECONDS = 30  # between the audio of frames that is decoded at once
_ROUNDING = Fraction(1, 1_000_000)  # of a frame, by which a time in float64 may miss a frame's begin
_FRAME_COST = 64  # bytes at least: what a clip holds of a frame beside its pixels


@dataclass(frozen=True, kw_only=True)
class SyncedVideoAudioField(Field):
    """A clip of video and audio, of which either may be missing.

    Value: `VideoAudio`, `VideoFile`, or the bytes of a video or audio file. Decodes to `Clip`.

    Attributes:
        encoding: ``keep`` stores files as they are and decodes them when they are read; ``frames`` stores every frame
            as a JPEG after a frame index, so that any one is read without its neighbours, and the audio as samples.
            Arrays are stored as ``frames`` in any case.
        orientation: ``apply`` turns and mirrors the frames of files as their rotation tags say; ``keep`` does not.
        pixel_aspect: ``apply`` stretches the width of frames whose pixels are not square; ``keep`` does not, nor
            does FFmpeg's command line.
        audio_track: of a file with several: its number from 0, or a language such as ``fra``; None for the one that
            FFmpeg chooses: the default one, then the one with most channels, then the first.
        frame_rate: frames per second that every clip is brought to, by presentation time; None for each file's own.
        size: (height, width) of frames, stretched to it: while encoding frames, and else while decoding.
        quality: of JPEG, 1 to 100.
        audio_sample_rate: Hz that audio is resampled to, while encoding and, where it is stored with another, while
            decoding; None for each file's own.
        audio_channels: channels that audio is mixed to; None for each file's own.
        audio_encoding: of stored samples: ``flac`` or ``pcm16``, both 16 bits, or ``float32``.
        max_frames: longer clips are truncated to it, and flagged in the record; None for any length.
        max_duration: seconds; likewise.
        target_frames: frames that decoding gives: spread evenly, padded where there are fewer; None for all.
        decode_rate: Hz that decoding resamples audio to; None for `audio_sample_rate`, or the stored rate.
        decode_channels: channels that decoding mixes audio to; None for `audio_channels`, or the stored ones.
        decode_length: samples of decoded audio in a batch, truncated or padded; None: batches have no audio.
        max_pixels: of a frame, both ways.
        max_decoded_bytes: of the frames, and of the audio, that one decoding gives.
    """

    TYPE_ID: ClassVar[int] = 50
    READS_PARTS: ClassVar[bool] = True
    CONTENT_KIND: ClassVar[str] = "video"
    metadata_type: ClassVar[np.dtype[np.void]] = RECORD
    decodes_in_parallel: ClassVar[bool] = True  # the decoders release the interpreter lock
    FACTS: ClassVar[tuple[type[Fact], ...]] = (MediaLength, ClipLengths)
    LIMITS: ClassVar[tuple[str, ...]] = ("max_pixels", "max_decoded_bytes")
    FORMER: ClassVar[tuple[str, ...]] = ("target_audio_len",)
    ADDED: ClassVar[tuple[str, ...]] = ("decode_rate", "decode_channels", "decode_length")
    PARTS: ClassVar[Mapping[str, Part]] = {"video": Part(), "audio": Part()}

    encoding: str = "keep"
    orientation: str = "apply"
    pixel_aspect: str = "keep"
    audio_track: Any = None
    frame_rate: Any = None
    size: tuple[int, int] | None = None
    quality: int = 90
    audio_sample_rate: int | None = None
    audio_channels: int | None = None
    audio_encoding: str = "flac"
    max_frames: int | None = None
    max_duration: float | None = None
    target_frames: int | None = None
    decode_rate: int | None = None
    decode_channels: int | None = None
    decode_length: int | None = None
    max_pixels: int = DEFAULT_MAX_PIXELS
    max_decoded_bytes: int = DEFAULT_MAX_DECODED

    def __post_init__(self) -> None:
        self._expect_choice("encoding", ("keep", "frames"))
        self._expect_choice("orientation", ("apply", "keep"))
        self._expect_choice("pixel_aspect", ("apply", "keep"))
        track = self.audio_track
        if not (
            track is None or is_int(track, 0, MAX_STREAMS - 1) or (isinstance(track, str) and 2 <= len(track) <= 35)
        ):
            raise self._wrong_setting(
                "audio_track", f"a number from 0 to {MAX_STREAMS - 1}, a language such as fra, or None"
            )
        self._expect_choice("audio_encoding", ("flac", "pcm16", "float32"))
        if self.frame_rate is not None:
            try:
                ratio = as_frame_rate(self.frame_rate).as_integer_ratio()
            except ValueError as error:
                raise self._wrong_setting("frame_rate", f"frames per second ({error})") from error
            object.__setattr__(self, "frame_rate", ratio)  # one form, so that equal settings are equal fields
        self._expect_size("size", 65_500)  # libjpeg's limit
        self._expect_int("quality", 1, 100)
        self._expect_int("audio_sample_rate", 1, MAX_SOUND_RATE, optional=True)
        self._expect_int("audio_channels", 1, MAX_SOUND_CHANNELS, optional=True)
        self._expect_int("max_frames", 1, 2**32 - 1, optional=True)
        self._expect_int("target_frames", 1, 2**20, optional=True)
        self._expect_int("decode_rate", 1, MAX_SOUND_RATE, optional=True)
        self._expect_int("decode_channels", 1, MAX_SOUND_CHANNELS, optional=True)
        self._expect_int("decode_length", 1, 2**32, optional=True)
        self._expect_int("max_pixels", 1, 2**31 - 1)
        self._expect_int("max_decoded_bytes", 1, 2**48)
        duration = self.max_duration
        is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
        if duration is not None and not (is_number and 0 < duration < 1e6):
            raise self._wrong_setting("max_duration", "seconds, above 0 and below a million, or None")
        if self.decode_length is not None and None in (self._audio_rate, self._audio_channels):
            raise self._wrong_setting("decode_length", "it with decode_rate and decode_channels")

    @property
    def keeps_bytes(self) -> bool:
        """With the encoding ``keep``."""
        return self.encoding == "keep"

    def keeps_part(self, part: str) -> bool:
        """With the encoding ``keep``, both."""
        return self.encoding == "keep" and part in self.PARTS

    @property
    def value_layout(self) -> Mapping[str, ArraySpec] | None:
        """Arrays of frames and, with `decode_length`, of audio, where `size` and `target_frames` are set."""
        if self.size is None or self.target_frames is None:
            return None
        count = self.target_frames
        layout = {
            "video": ArraySpec((count, *self.size, 3), np.dtype(np.uint8)),
            "video_mask": ArraySpec((count,), np.dtype(np.bool_)),
            "frame_times": ArraySpec((count,), np.dtype(np.float64)),
        }
        if self.decode_length is not None and self._audio_channels is not None:
            length = self.decode_length
            shape = (length,) if self._audio_channels == 1 else (length, self._audio_channels)
            layout["audio"] = ArraySpec(shape, np.dtype(np.float32))
            layout["audio_mask"] = ArraySpec((length,), np.dtype(np.bool_))
            layout["audio_segments"] = ArraySpec((count, 2), np.dtype(np.int64))
        return layout

    @property
    def empty_value(self) -> Mapping[str, Any]:
        """The arrays of a clip without frames and samples."""
        return {
            "frames": np.empty((0, *(self.size or (0, 0)), 3), np.uint8),
            "frame_indices": np.empty(0, np.int64),
            "frame_mask": np.empty(0, np.bool_),
            "frame_times": np.empty(0, np.float64),
            "audio": {"samples": np.empty((0, self._audio_channels or 0), np.float32)},
            "audio_segments": np.empty((0, 2), np.int64),
        }

    @property
    def _audio_rate(self) -> int | None:
        """Hz of decoded audio; None for the stored rate."""
        return self.decode_rate or self.audio_sample_rate

    @property
    def _audio_channels(self) -> int | None:
        """Channels of decoded audio; None for the stored ones."""
        return self.decode_channels or self.audio_channels

    @classmethod
    def from_config(cls, config: Mapping[str, JSON]) -> Self:
        """Restore a field from its configuration; `target_audio_len` is an earlier name of `decode_length`."""
        former = {"decode_length": config["target_audio_len"]} if "target_audio_len" in config else {}
        return super().from_config({**former, **{k: v for k, v in config.items() if k not in cls.FORMER}})

    # --- encode -------------------------------------------------------------------------------------------------------

    def assemble(self, contents: Mapping[str, Any]) -> VideoFile:
        """A file of the bytes of ``video``, ``audio`` or both."""
        self._expect_parts(contents)
        for part, content in contents.items():
            if not isinstance(content, Buffer):
                raise self._wrong_value(content, f"bytes for the part {part}")
        if not contents:
            raise self._wrong_content("no parts", "video, audio or both")
        return VideoFile(**contents)

    def encode(self, value: VideoAudio | VideoFile | Buffer) -> Encoded:
        """Encode arrays, files, or a file's bytes."""
        source = self._source(value)
        plan = self._plan(source)
        if self._is_kept(source):
            video, audio = source.video or b"", source.audio or b""
            codecs = (
                FILE if source.video is not None else NONE,
                NONE if plan.sound is None else OWN_FILE if source.audio is not None else IN_VIDEO,
            )
        else:
            video, audio, audio_codec = self._encode_parts(source, plan)
            codecs = (JPEG if plan.num_frames else NONE, audio_codec)
        self._expect_data_size(len(video) + 7 + len(audio))
        data = bytes(video) + bytes(-len(video) % 8) + bytes(audio) if len(audio) else bytes(video)
        return Encoded(self._record(source, plan, len(video), len(audio), codecs), data)

    def check(self, value: VideoAudio | VideoFile | Buffer) -> None:
        """List the packets of files that are stored unchanged; encode other values."""
        source = self._source(value)
        if not self._is_kept(source):
            self.encode(value)
            return
        self._plan(source)
        self._expect_data_size(len(source.video or b"") + 7 + len(source.audio or b""))

    def _source(self, value: object) -> Source:
        if isinstance(value, Buffer):
            value = VideoFile(video=value)
        if not isinstance(value, VideoAudio | VideoFile):
            raise self._wrong_value(value, "VideoAudio, VideoFile or the bytes of a video file")
        try:
            return source_of(
                value,
                frame_rate=self._rate,
                max_pixels=self.max_pixels,
                turns=self.orientation == "apply",
                stretches=self.pixel_aspect == "apply",
                audio_track=self.audio_track,
                max_audio_bytes=self.max_decoded_bytes,
            )
        except ValueError as error:
            raise self._unreadable(error, "a clip that cannot be read", "video, audio or both") from error

    def _plan(self, source: Source) -> Plan:
        try:
            plan = plan_of(
                source,
                frame_rate=self._rate,
                sample_rate=self.audio_sample_rate,
                channels=self.audio_channels,
                max_frames=self.max_frames,
                max_duration=self.max_duration,
            )
        except ValueError as error:
            raise self._wrong_content(f"a clip that does not fit ({error})", "what the settings allow") from error
        if plan.sound is not None:
            size = decoded_size(plan)
            if size > self.max_decoded_bytes:
                found, expected = f"audio of {size} bytes decoded", f"at most {self.max_decoded_bytes}"
                raise self._too_large(found, expected, "max_decoded_bytes")
        return plan

    @property
    def _rate(self) -> Fraction | None:
        return None if self.frame_rate is None else Fraction(*self.frame_rate)

    def _is_kept(self, source: Source) -> bool:
        return self.encoding == "keep" and not source.is_arrays

    def _record(self, source: Source, plan: Plan, video_size: int, audio_size: int, codecs: tuple[int, int]) -> bytes:
        video_codec, audio_codec = codecs
        height, width = plan.size
        is_turned = video_codec == FILE and plan.num_frames > 0
        if video_codec == JPEG and self.size is not None:
            height, width = self.size
        return self._pack_record(
            plan.num_frames,
            height,
            width,
            *(plan.frame_rate.as_integer_ratio() if plan.frame_rate else (0, 0)),
            plan.sample_rate,
            plan.num_audio_samples,
            plan.frame_0_sample,
            plan.audio_start if audio_codec in (IN_VIDEO, OWN_FILE) else 0,
            plan.start_us if video_codec == FILE and plan.num_frames else 0,
            video_size,
            audio_size,
            plan.channels,
            video_codec,
            audio_codec,
            plan.truncated,
            source.parts,
            # Files are turned while they are decoded; JPEGs are upright. 0, not 1, where nothing is turned: so it was
            # before there was such a byte.
            (source.turn if source.turn > 1 else 0) + SQUARE * source.is_square if is_turned else 0,
            plan.sound.track if plan.sound is not None and audio_codec in (IN_VIDEO, OWN_FILE) else 0,
        )

    def _encode_parts(self, source: Source, plan: Plan) -> tuple[bytes, bytes | memoryview, int]:
        """The frames after their index, the audio, and the codec of the audio."""
        audio: bytes | memoryview = b""
        audio_codec = NONE
        try:
            video = encode_frames(source, plan, size=self.size, quality=self.quality) if plan.num_frames else b""
            if plan.sound is not None:
                samples = clip_sound(source, plan)
                encoder = AudioField(encoding=self.audio_encoding, max_frames=max(1, len(samples)))
                metadata, audio = encoder.encode((samples, plan.sample_rate))
                audio_codec = int(np.frombuffer(metadata, dtype=encoder.metadata_type)["codec"][0])
        except EncodeError as error:
            raise self._wrong_content(
                f"audio that does not fit ({error})", f"what {self.audio_encoding} holds"
            ) from error
        except ValueError as error:
            raise self._wrong_content(f"a clip that cannot be stored ({error})", "an undamaged one") from error
        return video, audio, audio_codec

    # --- decode -------------------------------------------------------------------------------------------------------

    def items(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[Item]:
        """Return the bytes stored for each content; audio from a video file belongs to ``video``."""
        record, video, audio = self._open(metadata, data)
        if record.parts == VIDEO_PART:
            yield Item("video", 0, data)
            return
        if record.parts & VIDEO_PART:
            yield Item("video", 0, video)
        yield Item("audio", 0, audio)

    def facts(self, metadata: Buffer, data: Buffer) -> Iterator[MediaLength | ClipLengths]:
        """The duration, and those of the video and the audio where the clip has both."""
        timing = self.timing(metadata)
        frame = float(1 / timing.frame_rate) if timing.frame_rate else 0.0
        if not timing.truncated:  # notes and texts are not expected to be truncated with the clip
            yield MediaLength(timing.duration_seconds, frame)
        if timing.num_frames and timing.sample_rate:
            yield ClipLengths(timing.video_seconds, timing.audio_seconds, frame)

    def timing(self, metadata: Buffer | np.void) -> Timing:
        """Return counts, rates and offset of the decoded clip, without reading the data; errors as `decode`."""
        return self._timing(self._record_of(metadata))

    def audio_segments(self, metadata: Buffer | np.void, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return (K, 2) int64, start and stop of each frame's samples, without looking at the data.

        Raises:
            IndexError: a frame that the clip does not have.
            FormatError: the record contradicts itself.
        """
        return self.timing(metadata).audio_segments(indices)

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> Clip:
        """Return a `Clip` of all frames, or of `target_frames`, and all audio."""
        record, video, audio = self._open(metadata, data)
        timing, index = self._timing(record), index_of(record, video, max_pixels=self.max_pixels)
        chosen = self._chosen(record)
        count = self.target_frames or len(chosen)
        frames = self._new_frames(record, count) if record.num_frames else None
        times, segments = np.zeros(count, dtype=np.float64), np.zeros((count, 2), dtype=np.int64)
        if frames is not None:
            fill_frames(record, video, index, chosen, frames, max_pixels=self.max_pixels)
        times[: len(chosen)] = timing.frame_times(chosen)
        segments[: len(chosen)] = timing.audio_segments(chosen)
        indices = np.full(count, -1, dtype=np.int64)
        indices[: len(chosen)] = chosen
        return Clip(
            frames=frames,
            frame_indices=indices,
            frame_mask=indices >= 0,
            frame_times=times,
            audio=self._sound(record, video, audio),
            audio_segments=segments,
            timing=timing,
            picture=self._picture(record, video),
        )

    def check_decodable(self, metadata: Buffer | np.void, data: Buffer) -> None:
        """Decode every frame and the audio once, without holding more than one frame and one packet's samples.

        A frame that is larger than `max_decoded_bytes` is refused, a clip is not: `decode_frames` and `target_frames`
        read it, and it is not damaged.
        """
        record, video, audio = self._open(metadata, data)
        if record.num_frames:
            self._check_decoded(record, 1)
        video_frames.check_decodable(record, video, max_pixels=self.max_pixels)
        video_sound.check_decodable(
            record,
            video,
            audio,
            rate=self._audio_rate,
            channels=self._audio_channels,
            max_decoded_bytes=self.max_decoded_bytes,
        )

    def decode_frames(
        self, metadata: Buffer | np.void, data: Buffer | PayloadParts, indices: Sequence[int] | npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        """Return (K, H, W, 3) uint8, chosen frames in any order, without decoding more than they need.

        Raises:
            IndexError: a frame that the clip does not have.
            FormatError: the payload is damaged.
        """
        with self._open_parts(metadata, data) as (record, video, _):
            chosen = record.timing.check_frames(indices)
            frames = self._new_frames(record, len(chosen))
            fill_near_frames(record, video, chosen, frames, max_pixels=self.max_pixels)
        return frames

    def decode_audio(
        self,
        metadata: Buffer | np.void,
        data: Buffer | PayloadParts,
        frames: npt.ArrayLike | None = None,
        audio_until: str = "frame_end",
    ) -> Any:
        """Return `Audio`, or a list of the audio of frames; None where the clip has none; errors as `decode`."""
        if frames is None:
            return self._sound(*self._open(metadata, data if isinstance(data, Buffer) else data.read(0, data.size)))
        with self._open_parts(metadata, data) as parts:
            return self._audio_of_frames(*parts, frames, audio_until)

    def decode_window(
        self, metadata: Buffer | np.void, data: Buffer | PayloadParts, start_seconds: float, seconds: float
    ) -> Clip:
        """Return a `Clip` of the frames and the audio of a window; times count from its start.

        The frames are all that are shown in the window, or `target_frames` of them: those shown at the times
        k · seconds / target_frames from its start, so that a frame may come twice. Rows for times after the last frame
        are zero, with False in the mask. The audio is that of [start, start + seconds), less if it ends before.
        """
        with self._open_parts(metadata, data) as (record, video, audio):
            return self._window(record, video, audio, start_seconds, seconds)

    def _window(
        self,
        record: Record,
        video: memoryview | RangedFile,
        audio: memoryview | RangedFile,
        start_seconds: float,
        seconds: float,
    ) -> Clip:
        chosen = self._shown_in(record, start_seconds, seconds)
        count = self.target_frames or len(chosen)
        frames = self._new_frames(record, count) if record.num_frames else None
        if frames is not None:
            fill_near_frames(record, video, chosen, frames, max_pixels=self.max_pixels)
        timing = self._timing(record)
        sound, audio_start = self._window_sound(record, video, audio, start_seconds, seconds)
        length = 0 if sound is None else len(sound.samples)
        indices = np.full(count, -1, dtype=np.int64)
        times, segments = np.zeros(count, dtype=np.float64), np.zeros((count, 2), dtype=np.int64)
        indices[: len(chosen)] = chosen
        times[: len(chosen)] = timing.frame_times(chosen) - start_seconds
        segments[: len(chosen)] = np.clip(timing.audio_segments(chosen) - audio_start, 0, length)
        return Clip(
            frames=frames,
            frame_indices=indices,
            frame_mask=indices >= 0,
            frame_times=times,
            audio=sound,
            audio_segments=segments,
            timing=timing,
            picture=self._picture(record, video),
            window=(start_seconds, seconds),
        )

    def _shown_in(self, record: Record, start_seconds: float, seconds: float) -> npt.NDArray[np.int64]:
        """The frames of a window, which ends before the times that have none."""
        timing = record.timing
        if timing.frame_rate is None:
            return np.zeros(0, dtype=np.int64)
        start, duration, rate = Fraction(start_seconds), Fraction(seconds), timing.frame_rate
        if self.target_frames is None:
            first = min(math.floor(start * rate + _ROUNDING), timing.num_frames)
            stop = min(math.ceil((start + duration) * rate - _ROUNDING), timing.num_frames)
            self._check_decoded(record, max(stop - first, 0))
            return np.arange(first, max(first, stop), dtype=np.int64)
        step = duration / self.target_frames
        numbers = (math.floor((start + k * step) * rate + _ROUNDING) for k in range(self.target_frames))
        return np.array([number for number in numbers if number < timing.num_frames], dtype=np.int64)

    def _window_sound(
        self,
        record: Record,
        video: memoryview | RangedFile,
        audio: memoryview | RangedFile,
        start_seconds: float,
        seconds: float,
    ) -> tuple[Audio | None, int]:
        """The audio of a window, and the sample of the clip at which it begins."""
        timing = self._timing(record)
        if not timing.sample_rate:
            return None, 0
        rate, channels = timing.sample_rate, self._audio_channels or record.num_channels
        start, stop = (at - timing.audio_offset_samples for at in window_samples(start_seconds, seconds, rate))
        first, last = (min(max(at, 0), timing.num_audio_samples) for at in (start, stop))
        limit = self.max_decoded_bytes
        samples = sound_range(record, video, audio, first, last, rate=rate, channels=channels, max_decoded_bytes=limit)
        silence = np.zeros((min(stop, 0) - min(start, 0), channels), np.float32)
        return Audio(np.concatenate([silence, samples]) if len(silence) else samples, rate), start

    def _audio_of_frames(
        self,
        record: Record,
        video: memoryview | RangedFile,
        audio: memoryview | RangedFile,
        indices: npt.ArrayLike,
        audio_until: str,
    ) -> list[Audio] | None:
        timing = self._timing(record)
        segments = timing.audio_segments(indices)
        if audio_until not in ("frame_end", "next_frame"):
            raise ValueError(f"audio_until is {audio_until!r}, expected frame_end or next_frame")
        if audio_until == "next_frame" and len(segments):
            if not (np.diff(np.asarray(indices)) > 0).all():
                raise ValueError("found frames that do not increase, expected increasing ones for next_frame")
            segments[:-1, 1], segments[-1, 1] = segments[1:, 0], timing.num_audio_samples
        rate, channels = timing.sample_rate, self._audio_channels or record.num_channels
        if not rate:
            return None

        def read(start: int, stop: int) -> npt.NDArray[np.float32]:
            limit = self.max_decoded_bytes
            return sound_range(record, video, audio, start, stop, rate=rate, channels=channels, max_decoded_bytes=limit)

        if not len(segments):
            return []
        first, last = int(segments.min()), int(segments.max())
        if last - first > _NEAR_SECONDS * rate:
            return [Audio(read(start, stop), rate) for start, stop in segments.tolist()]
        samples = read(first, last)
        return [Audio(samples[start - first : stop - first].copy(), rate) for start, stop in segments.tolist()]

    def window_settings(self, seconds: float | None, frames: int | None) -> dict[str, JSON]:
        """`target_frames`; and `decode_length` of a window's audio, if it is not set but rate and channels are."""
        settings: dict[str, JSON] = {} if frames is None else {"target_frames": frames}
        rate = self._audio_rate
        if seconds is not None and rate and self._audio_channels and self.decode_length is None:
            settings["decode_length"] = max(1, offset_in_samples(seconds, rate))
        return settings

    def _decode_window_into(
        self,
        metadata: Buffer,
        data: Buffer | PayloadParts,
        target: Mapping[str, npt.NDArray[Any]],
        start_seconds: float,
        seconds: float,
    ) -> None:
        with self._open_parts(metadata, data) as (record, video, audio):
            self._fill_window(record, video, audio, target, start_seconds, seconds)

    def _fill_window(
        self,
        record: Record,
        video: memoryview | RangedFile,
        audio: memoryview | RangedFile,
        target: Mapping[str, npt.NDArray[Any]],
        start_seconds: float,
        seconds: float,
    ) -> None:
        chosen = self._shown_in(record, start_seconds, seconds)
        count, timing = len(chosen), self._timing(record)
        if count:
            fill_near_frames(record, video, chosen, target["video"], max_pixels=self.max_pixels)
        target["video"][count:] = 0
        target["video_mask"][...] = np.arange(len(target["video_mask"])) < count
        target["frame_times"][:count] = timing.frame_times(chosen) - start_seconds
        target["frame_times"][count:] = 0
        if "audio" not in target:
            return
        sound, audio_start = self._window_sound(record, video, audio, start_seconds, seconds)
        samples = np.zeros((0, self._audio_channels or 1), np.float32) if sound is None else sound.samples
        fill_samples(samples, target["audio"], target["audio_mask"])
        target["audio_mask"][: max(0, min(-audio_start, len(samples)))] = False
        length = min(len(samples), len(target["audio"]))
        target["audio_segments"][:count] = np.clip(timing.audio_segments(chosen) - audio_start, 0, length)
        target["audio_segments"][count:] = 0

    def _decode_into(self, metadata: Buffer, data: Buffer, target: Mapping[str, npt.NDArray[Any]]) -> None:
        record, video, audio = self._open(metadata, data)
        index = index_of(record, video, max_pixels=self.max_pixels)
        chosen = self._chosen(record)
        count = len(chosen)
        fill_frames(record, video, index, chosen, target["video"], max_pixels=self.max_pixels)
        target["video_mask"][...] = np.arange(len(target["video_mask"])) < count
        target["frame_times"][:count] = record.timing.frame_times(chosen)
        target["frame_times"][count:] = 0
        if "audio" not in target:
            return
        sound = self._sound(record, video, audio)
        samples = np.zeros((0, self._audio_channels or 1), np.float32) if sound is None else sound.samples
        fill_samples(samples, target["audio"], target["audio_mask"])
        length = min(len(samples), len(target["audio"]))
        target["audio_segments"][:count] = np.minimum(self._timing(record).audio_segments(chosen), length)
        target["audio_segments"][count:] = 0

    def _chosen(self, record: Record) -> npt.NDArray[np.int64]:
        if self.target_frames is None:
            if record.num_frames:
                self._check_decoded(record, record.num_frames)  # before a list of as many numbers is made
            return np.arange(record.num_frames, dtype=np.int64)
        return uniform_indices(record.num_frames, self.target_frames)

    def _check_decoded(self, record: Record, count: int) -> None:
        height, width = self.size or (record.height, record.width)
        size = count * max(height * width * 3, _FRAME_COST)
        if size > self.max_decoded_bytes:
            expected = f"at most {self.max_decoded_bytes}; decode_frames and target_frames give fewer of them"
            raise over_limit("frames are too large", "max_decoded_bytes", found=f"{size} bytes", expected=expected)

    def _new_frames(self, record: Record, count: int) -> npt.NDArray[np.uint8]:
        self._check_decoded(record, count)
        shape = (count, *(self.size or (record.height, record.width)), 3)
        try:
            return np.empty(shape, dtype=np.uint8)
        except MemoryError as error:
            advice = "set a lower max_decoded_bytes, or use decode_frames"
            raise MemoryError(f"frames of shape {shape} need {math.prod(shape)} bytes: {advice}") from error

    def _sound(self, record: Record, video: memoryview, audio: memoryview) -> Audio | None:
        sound = stored_sound(record, video, audio, max_decoded_bytes=self.max_decoded_bytes)
        if sound is None:
            return None
        rate, channels = self._audio_rate or sound.sample_rate, self._audio_channels or sound.samples.shape[1]
        return brought_to(sound, rate, channels, max_decoded_bytes=self.max_decoded_bytes)

    def _picture(self, record: Record, video: memoryview | RangedFile) -> Picture | None:
        if record.video_codec != FILE or not record.num_frames:
            return None
        try:
            return picture_of(video, max_pixels=self.max_pixels)
        except MediaError as error:
            raise unreadable(error) from error

    def _timing(self, record: Record) -> Timing:
        return timing_at(record.timing, self._audio_rate or record.sample_rate)

    def _record_of(self, metadata: Buffer | np.void) -> Record:
        record = Record(*self._unpack_record(metadata))
        record.check(max_pixels=self.max_pixels)
        return record

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownClip:
        """The clip's files; of frames that are JPEGs the range of each."""
        return shown_clip(self._record_of(metadata), stored)

    def _open(self, metadata: Buffer | np.void, data: Buffer) -> tuple[Record, memoryview, memoryview]:
        view = as_bytes_view(data)
        record, audio_at = self._opened_record(metadata, len(view))
        return record, view[: record.video_size], view[audio_at:]

    @contextmanager
    def _open_parts(
        self, metadata: Buffer | np.void, data: Buffer | PayloadParts
    ) -> Iterator[tuple[Record, memoryview | RangedFile, memoryview | RangedFile]]:
        """As `_open`; data that is read by ranges gives such files."""
        if isinstance(data, Buffer):
            yield self._open(metadata, data)
            return
        record, audio_at = self._opened_record(metadata, data.size)
        file = RangedFile.to_decode(data.size, data.read)
        with file.part(0, record.video_size) as video, file.part(audio_at, record.audio_size) as audio:
            yield record, whole_of(video) if record.video_codec == FILE and not is_sought(video) else video, audio

    def _opened_record(self, metadata: Buffer | np.void, size: int) -> tuple[Record, int]:
        """The record of a payload with `size` bytes of data, and where its audio begins."""
        record = self._record_of(metadata)
        audio_at = record.video_size + (-record.video_size % 8 if record.audio_size else 0)
        if audio_at + record.audio_size != size:
            expected = audio_at + record.audio_size
            raise truncated("clip is not as long as its record says", found=size, expected=expected)
        if record.video_codec == JPEG and 8 * (record.num_frames + 1) > record.video_size:
            found, expected = record.video_size, 8 * (record.num_frames + 1)
            raise truncated("frames are shorter than their index", found=found, expected=expected)
        return record, audio_at
