"""Video and audio on one timeline: files stored as they are, or frames as JPEGs after an index, and their audio.

A clip's frames have one constant rate and are taken from the file by presentation time. `mm_assets.media.timing` says
which samples belong to a frame, `video_source` what a file is made of; this module has the settings, the payload and
its decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, MediaError
from mm_assets.fields import video_frames, video_sound
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.audio import Audio, AudioField
from mm_assets.fields.base import Encoded, Field, Item, Part, is_int, over_limit, truncated, unreadable
from mm_assets.fields.facts import ClipLengths, Fact, MediaLength
from mm_assets.fields.shown import ShownClip, StoredBytes
from mm_assets.fields.video_frames import encode_frames, fill_frames, index_of
from mm_assets.fields.video_record import FILE, IN_VIDEO, JPEG, NONE, OWN_FILE, RECORD, SQUARE, VIDEO_PART, Record
from mm_assets.fields.video_shown import shown_clip
from mm_assets.fields.video_sound import brought_to, decoded_size, stored_sound, timing_at
from mm_assets.fields.video_source import Plan, Source, clip_sound, plan_of, source_of
from mm_assets.fields.video_values import Clip, VideoAudio, VideoFile
from mm_assets.media.content_types import Buffer
from mm_assets.media.picture import Picture, picture_of
from mm_assets.media.sound import MAX_SOUND_CHANNELS, MAX_SOUND_RATE
from mm_assets.media.timing import Timing, as_frame_rate, uniform_indices
from mm_assets.media.video import DEFAULT_MAX_PIXELS, MAX_STREAMS

__all__ = ["Clip", "SyncedVideoAudioField", "VideoAudio", "VideoFile"]

DEFAULT_MAX_DECODED = 2**32  # bytes: a minute of 30 frames per second at 720p is 5 GB
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
        target_audio_len: samples of decoded audio in a batch, truncated or padded; None: batches have no audio.
        max_pixels: of a frame, both ways.
        max_decoded_bytes: of the frames, and of the audio, that one decoding gives.
    """

    TYPE_ID: ClassVar[int] = 50
    CONTENT_KIND: ClassVar[str] = "video"
    metadata_type: ClassVar[np.dtype[np.void]] = RECORD
    decodes_in_parallel: ClassVar[bool] = True  # the decoders release the interpreter lock
    FACTS: ClassVar[tuple[type[Fact], ...]] = (MediaLength, ClipLengths)
    LIMITS: ClassVar[tuple[str, ...]] = ("max_pixels", "max_decoded_bytes")
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
    target_audio_len: int | None = None
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
        self._expect_int("target_audio_len", 1, 2**32, optional=True)
        self._expect_int("max_pixels", 1, 2**31 - 1)
        self._expect_int("max_decoded_bytes", 1, 2**48)
        duration = self.max_duration
        is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
        if duration is not None and not (is_number and 0 < duration < 1e6):
            raise self._wrong_setting("max_duration", "seconds, above 0 and below a million, or None")
        if self.target_audio_len is not None and None in (self.audio_sample_rate, self.audio_channels):
            raise self._wrong_setting("target_audio_len", "it with audio_sample_rate and audio_channels")

    @property
    def keeps_bytes(self) -> bool:
        """With the encoding ``keep``."""
        return self.encoding == "keep"

    def keeps_part(self, part: str) -> bool:
        """With the encoding ``keep``, both."""
        return self.encoding == "keep" and part in self.PARTS

    @property
    def value_layout(self) -> Mapping[str, ArraySpec] | None:
        """Arrays of frames and, with `target_audio_len`, of audio, where `size` and `target_frames` are set."""
        if self.size is None or self.target_frames is None:
            return None
        count = self.target_frames
        layout = {
            "video": ArraySpec((count, *self.size, 3), np.dtype(np.uint8)),
            "video_mask": ArraySpec((count,), np.dtype(np.bool_)),
            "frame_times": ArraySpec((count,), np.dtype(np.float64)),
        }
        if self.target_audio_len is not None and self.audio_channels is not None:
            length = self.target_audio_len
            shape = (length,) if self.audio_channels == 1 else (length, self.audio_channels)
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
            "audio": {"samples": np.empty((0, self.audio_channels or 0), np.float32)},
            "audio_segments": np.empty((0, 2), np.int64),
        }

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
            rate=self.audio_sample_rate,
            channels=self.audio_channels,
            max_decoded_bytes=self.max_decoded_bytes,
        )

    def decode_frames(
        self, metadata: Buffer | np.void, data: Buffer, indices: Sequence[int] | npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        """Return (K, H, W, 3) uint8, chosen frames in any order, without decoding more than they need.

        Raises:
            IndexError: a frame that the clip does not have.
            FormatError: the payload is damaged.
        """
        record, video, _ = self._open(metadata, data)
        chosen = record.timing.check_frames(indices)
        first = int(chosen[0]) if len(chosen) else 0
        index = index_of(record, video, max_pixels=self.max_pixels, first=first)
        frames = self._new_frames(record, len(chosen))
        fill_frames(record, video, index, chosen, frames, max_pixels=self.max_pixels)
        return frames

    def decode_audio(self, metadata: Buffer | np.void, data: Buffer) -> Audio | None:
        """Return the audio without decoding a frame; None where the clip has none; errors as `decode`."""
        return self._sound(*self._open(metadata, data))

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
        length = 0
        if sound is not None:
            length = min(len(sound.samples), len(target["audio"]))
            target["audio"][:length] = sound.samples[:length].reshape(length, *target["audio"].shape[1:])
        target["audio"][length:] = 0
        target["audio_mask"][...] = np.arange(len(target["audio_mask"])) < length
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
        rate, channels = self.audio_sample_rate or sound.sample_rate, self.audio_channels or sound.samples.shape[1]
        return brought_to(sound, rate, channels, max_decoded_bytes=self.max_decoded_bytes)

    def _picture(self, record: Record, video: memoryview) -> Picture | None:
        if record.video_codec != FILE or not record.num_frames:
            return None
        try:
            return picture_of(video, max_pixels=self.max_pixels)
        except MediaError as error:
            raise unreadable(error) from error

    def _timing(self, record: Record) -> Timing:
        return timing_at(record.timing, self.audio_sample_rate or record.sample_rate)

    def _record_of(self, metadata: Buffer | np.void) -> Record:
        record = Record(*self._unpack_record(metadata))
        record.check(max_pixels=self.max_pixels)
        return record

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownClip:
        """The clip's files; of frames that are JPEGs the range of each."""
        return shown_clip(self._record_of(metadata), stored)

    def _open(self, metadata: Buffer | np.void, data: Buffer) -> tuple[Record, memoryview, memoryview]:
        record = self._record_of(metadata)
        view = as_bytes_view(data)
        audio_at = record.video_size + (-record.video_size % 8 if record.audio_size else 0)
        if audio_at + record.audio_size != len(view):
            raise truncated(
                "clip is not as long as its record says", found=len(view), expected=audio_at + record.audio_size
            )
        if record.video_codec == JPEG and 8 * (record.num_frames + 1) > record.video_size:
            found, expected = record.video_size, 8 * (record.num_frames + 1)
            raise truncated("frames are shorter than their index", found=found, expected=expected)
        return record, view[: record.video_size], view[audio_at:]
