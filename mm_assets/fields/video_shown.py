"""How a clip's payload is shown: where its files, frames and audio are in the data."""

from __future__ import annotations

import struct

import numpy as np

from mm_assets.fields.base import corrupt, truncated
from mm_assets.fields.shown import ShownClip, ShownFile, ShownSamples, StoredBytes
from mm_assets.fields.video_record import FILE, IN_VIDEO, JPEG, NONE, OWN_FILE, SAMPLES, Record

__all__ = ["shown_clip"]

_MAX_FRAMES = 120  # of a clip of JPEGs, spread evenly
_RANGE = struct.Struct("<QQ")


def shown_clip(record: Record, stored: StoredBytes) -> ShownClip:
    """The places of a clip's contents; of frames that are JPEGs only those that are shown are looked up.

    Raises:
        FormatError: the payload is damaged.
    """
    audio_at = record.video_size + (-record.video_size % 8 if record.audio_size else 0)
    if audio_at + record.audio_size != stored.size:
        expected = audio_at + record.audio_size
        raise truncated("clip is not as long as its record says", found=stored.size, expected=expected)
    timing = record.timing
    has_file = record.video_codec == FILE and record.video_size > 0
    return ShownClip(
        video=ShownFile(offset=0, size=record.video_size) if has_file else None,
        frames=_frames(record, stored) if record.video_codec == JPEG else [],
        audio=_audio(record, audio_at),
        frame_rate=float(timing.frame_rate or 0),
        num_frames=record.num_frames,
        size=(record.height, record.width),
        start_seconds=record.start_us / 1_000_000,
        duration_seconds=timing.duration_seconds,
        has_audio=record.audio_codec != NONE,
        audio_offset_seconds=timing.audio_offset_samples / timing.sample_rate if timing.sample_rate else 0.0,
    )


def _audio(record: Record, offset: int) -> ShownFile | ShownSamples | None:
    size = record.audio_size
    encoding = SAMPLES.get(record.audio_codec)
    if record.audio_codec in (NONE, IN_VIDEO):
        return None
    if record.audio_codec == OWN_FILE or encoding == "flac":
        return ShownFile(offset=offset, size=size)
    dtype = np.dtype("<i2" if encoding == "pcm16" else "<f4")
    return ShownSamples(
        offset=offset, size=size, sample_rate=record.sample_rate, channels=record.num_channels, dtype=dtype
    )


def _frames(record: Record, stored: StoredBytes) -> list[tuple[float, ShownFile]]:
    tables = 8 * (record.num_frames + 1)
    if tables > record.video_size:
        raise truncated("frames are shorter than their index", found=record.video_size, expected=tables)
    frames = []
    count = min(record.num_frames, _MAX_FRAMES)
    for number in range(count):
        index = number * record.num_frames // count
        start, end = _RANGE.unpack(stored.read(8 * index, _RANGE.size))
        if not tables <= start <= end <= record.video_size:
            raise corrupt("frame lies outside the data", found=(start, end), expected=(tables, record.video_size))
        seconds = index * record.frame_rate_den / record.frame_rate_num
        frames.append((seconds, ShownFile(offset=start, size=end - start)))
    return frames
