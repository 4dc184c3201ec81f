"""The metadata record of `SyncedVideoAudioField`: its layout, its values, and which of them are possible."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mm_assets.fields.base import corrupt, over_limit
from mm_assets.media.sound import MAX_SOUND_CHANNELS, MAX_SOUND_RATE
from mm_assets.media.timing import MAX_FRAME_RATE, MAX_RATE_TERM, Timing
from mm_assets.media.video import MAX_STREAMS

__all__ = [
    "AUDIO_PART",
    "FILE",
    "IN_VIDEO",
    "JPEG",
    "MAX_COUNT",
    "NONE",
    "OWN_FILE",
    "RECORD",
    "SAMPLES",
    "SQUARE",
    "VIDEO_PART",
    "Record",
]

# docs/spec/fields.md, type 50
RECORD = np.dtype(
    [
        ("num_frames", "<u4"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("frame_rate_num", "<u4"),
        ("frame_rate_den", "<u4"),
        ("sample_rate", "<u4"),
        ("num_audio_samples", "<u8"),
        ("frame_0_sample", "<i8"),
        ("audio_start_samples", "<u8"),
        ("start_us", "<u8"),
        ("video_size", "<u8"),
        ("audio_size", "<u8"),
        ("num_channels", "<u2"),
        ("video_codec", "u1"),
        ("audio_codec", "u1"),
        ("truncated", "u1"),
        ("parts", "u1"),
        ("orientation", "u1"),
        ("audio_track", "u1"),
    ]
)
NONE, JPEG, FILE = 0, 1, 2  # video_codec
SAMPLES = {1: "pcm16", 2: "float32", 4: "flac"}  # audio_codec, AudioField's numbers
IN_VIDEO, OWN_FILE = 16, 17  # audio_codec
VIDEO_PART, AUDIO_PART = 1, 2  # parts, bits: the contents that the clip was made of
SQUARE = 128  # added to the orientation where pixels are made square
MAX_COUNT = 2**53  # samples and microseconds: sums of them stay within 64 bits


class Record(NamedTuple):
    """The metadata record's values, in its order."""

    num_frames: int
    height: int
    width: int
    frame_rate_num: int
    frame_rate_den: int
    sample_rate: int
    num_audio_samples: int
    frame_0_sample: int
    audio_start_samples: int
    start_us: int
    video_size: int
    audio_size: int
    num_channels: int
    video_codec: int
    audio_codec: int
    truncated: int
    parts: int
    orientation: int
    audio_track: int

    @property
    def turn(self) -> int:
        """EXIF number by which frames of a file are turned while they are decoded; 1 for as they are stored."""
        return (self.orientation & ~SQUARE) or 1

    @property
    def is_square(self) -> bool:
        """Whether frames of a file are stretched to square pixels while they are decoded."""
        return bool(self.orientation & SQUARE)

    @property
    def timing(self) -> Timing:
        """Of the clip."""
        has_video, has_audio = self.num_frames > 0, self.audio_codec != NONE
        return Timing(
            num_frames=self.num_frames,
            frame_rate=Fraction(self.frame_rate_num, self.frame_rate_den) if has_video else None,
            sample_rate=self.sample_rate if has_audio else 0,
            num_audio_samples=self.num_audio_samples if has_audio else 0,
            audio_offset_samples=-self.frame_0_sample,
            truncated=bool(self.truncated),
        )

    def check(self, *, max_pixels: int) -> None:
        """Raise `CorruptError` if a value is impossible, `LimitError` if frames are over the limit."""
        if self.video_codec not in (NONE, JPEG, FILE):
            raise corrupt("video is of an unknown codec", found=self.video_codec, expected="0, 1 or 2")
        if self.audio_codec not in (NONE, *SAMPLES, IN_VIDEO, OWN_FILE):
            raise corrupt("audio is of an unknown codec", found=self.audio_codec, expected="0, 1, 2, 4, 16 or 17")
        if not 1 <= self.parts <= VIDEO_PART | AUDIO_PART:
            raise corrupt("clip is made of unknown parts", found=self.parts, expected="1, 2 or 3")
        if not self.turn <= 8 or (self.orientation and self.video_codec != FILE):
            raise corrupt("frames are turned in an unknown way", found=self.orientation, expected="0 to 8, or 128 more")
        is_of_file = self.audio_codec in (IN_VIDEO, OWN_FILE)
        if self.audio_track > (MAX_STREAMS if is_of_file else 0):
            expected = f"0 to {MAX_STREAMS} of a file, else 0"
            raise corrupt("audio is of an impossible track", found=self.audio_track, expected=expected)
        is_of_audio = self.parts == AUDIO_PART
        if (is_of_audio and self.video_codec != NONE) or (self.parts == VIDEO_PART and self.audio_codec == OWN_FILE):
            codecs = (self.video_codec, self.audio_codec)
            raise corrupt("clip has the bytes of a part that was not given", found=codecs, expected=self.parts)
        if self.num_frames:
            num, den = self.frame_rate_num, self.frame_rate_den
            is_rate = 1 <= num <= MAX_RATE_TERM and 1 <= den <= MAX_RATE_TERM
            if not is_rate or num > MAX_FRAME_RATE * den or den > MAX_FRAME_RATE * num:
                raise corrupt("video has an impossible frame rate", found=f"{num}/{den}", expected="1/1000 to 1000")
            if not self.height * self.width:
                raise corrupt("frames are empty", found=f"{self.height} x {self.width}", expected="1 pixel or more")
            if self.height * self.width > max_pixels:
                found, expected = f"{self.height} x {self.width}", f"at most {max_pixels} pixels"
                raise over_limit("frames are too large", "max_pixels", found=found, expected=expected)
            if self.video_codec == NONE:
                raise corrupt("frames are of no codec", found=NONE, expected="1 or 2")
        if self.audio_codec != NONE and not (
            1 <= self.sample_rate <= MAX_SOUND_RATE and 1 <= self.num_channels <= MAX_SOUND_CHANNELS
        ):
            found = f"{self.num_channels} channels at {self.sample_rate} Hz"
            expected = f"1 to {MAX_SOUND_CHANNELS} at 1 to {MAX_SOUND_RATE} Hz"
            raise corrupt("audio has an impossible format", found=found, expected=expected)
        counts = (self.num_audio_samples, self.audio_start_samples, self.start_us)
        if max(*counts, abs(self.frame_0_sample)) > MAX_COUNT:
            raise corrupt("a time or count is too large", found=max(counts), expected=f"at most {MAX_COUNT}")
