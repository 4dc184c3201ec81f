"""Audio of video and audio files, read by PyAV and placed by presentation time; resampling by soxr, and mixing.

Any input gives an answer or a `MediaError`; without the packages of the extra ``video`` functions raise
`MissingExtraError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError, optional_import
from mm_assets.media.content_types import Buffer
from mm_assets.media.video import (
    FIRST_TRACK,
    MAX_TICKS,
    audio_stream_of,
    damage_of,
    open_media,
    seconds_of,
    time_base_of,
)

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.packet import Packet

__all__ = [
    "MAX_SOUND_CHANNELS",
    "MAX_SOUND_RATE",
    "SoundIndex",
    "check_sound",
    "index_sound",
    "mix",
    "mixes",
    "read_sound",
    "resample",
    "resampled_length",
    "samples_of_frame",
]

MAX_SOUND_CHANNELS = 64
MAX_SOUND_RATE = 768_000  # Hz
_MAX_SILENCE = 1000  # times the actual audio: else a few bytes become gigabytes of zeros
_LONG_PACKET = 8192  # samples that a packet of few bytes may claim
_SAMPLES_PER_BYTE = 8  # that a longer packet may claim: more than uncompressed audio has


_OPUS = ("opus", "libopus")
_OPUS_RATE = 48_000  # Hz, whatever rate was encoded
_LONGEST_OPUS = 5760  # samples of a packet: 120 ms
_OPUS_FRAMES = (*(480, 960, 1920, 2880) * 3, *(480, 960) * 2, *(120, 240, 480, 960) * 4)  # samples by configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundIndex:
    """The extent of a file's audio, from its packets.

    Attributes:
        start: presentation time of the first sample in seconds.
        num_samples: per channel, from the first sample to the end of the last packet, without the padding that the
            container says to discard.
        num_padded: as earlier releases counted: with the padding, and from times that the container rounds.
        sample_rate: Hz.
        channels: at least 1.
        track: 0 for the first audio stream that has a decoder; else the stream's number among audio streams, from 1.
    """

    start: Fraction
    num_samples: int
    num_padded: int = 0
    sample_rate: int
    channels: int
    track: int = 0


def index_sound(data: Buffer, track: int | str | None = None) -> SoundIndex | None:
    """The extent of a file's audio; None where there is none. Only its first packets are decoded, but for WMA.

    `track` chooses among several streams, as in `mm_assets.media.video.audio_stream_of`.

    Raises:
        MediaError: the file is damaged, or its packets are so far apart that more than 99.9 % of it is silence.
    """
    damage = damage_of(data)
    with open_media(data) as (container, _):
        stream = audio_stream_of(container, track)
        if stream is None:
            return None
        number = 0 if stream is audio_stream_of(container, FIRST_TRACK) else container.streams.audio.index(stream) + 1
        if damage is not None:
            raise MediaError("<video>", f"found a damaged file ({damage}), expected a whole one")
        time_base = time_base_of(stream.time_base)
        start: Fraction | None = None
        end: int | None = None
        rate, channels, usual, claimed_total = stream.codec_context.sample_rate, 0, 1024, 0
        is_opus, frame_size = stream.codec_context.name in _OPUS, stream.codec_context.frame_size
        counted: int | None = 0 if is_opus or frame_size else None
        kept: Fraction | int = -MAX_TICKS  # the end in ticks, without padding
        is_wma, decoded = stream.codec_context.name.startswith("wma"), 0
        for packet in container.demux(stream):
            for frame in packet.decode() if start is None or is_wma else ():
                if start is None and frame.pts is not None and frame.samples:
                    start = seconds_of(frame.pts, frame.time_base or time_base)
                    rate, channels, usual = frame.sample_rate, frame.layout.nb_channels, frame.samples
                decoded += frame.samples if start is not None else 0
            first, last = _skipped(packet) if packet.size else (0, 0)
            if counted is not None and packet.size:
                length = _opus_length(packet) if is_opus else frame_size
                counted = counted + max(0, length - first - last) if packet.pts is not None else None
            if packet.size and packet.pts is not None:
                stop = packet.pts + (packet.duration or 0)
                end = max(end or packet.pts, stop)
                kept = max(kept, stop - Fraction(last, max(rate, 1)) / time_base if last else stop)
                # A duration is only a claim: the limit is more than real packets have.
                claimed = int(packet.duration * time_base * max(rate, 1)) + 1 if packet.duration else usual
                claimed_total += min(claimed, max(_LONG_PACKET, 4 * usual, _SAMPLES_PER_BYTE * packet.size))
        if start is None or end is None:
            raise MediaError("<video>", "found an audio stream without samples, expected at least one")
        if not 1 <= rate <= MAX_SOUND_RATE or not 1 <= channels <= MAX_SOUND_CHANNELS:
            raise MediaError("<video>", f"found audio of {channels} channels at {rate} Hz")
        num_padded = round(max(seconds_of(end, time_base) - start, Fraction(0)) * rate)
        num_samples = round(max(kept * time_base - start, Fraction(0)) * rate)
        # Where a sample is not a whole number of ticks, as in Matroska, times are rounded: packets are counted.
        tolerance = Fraction(_LONGEST_OPUS if is_opus and rate == _OPUS_RATE else 0)
        if not is_opus and (time_base * rate).numerator != 1:
            tolerance = _tolerance(time_base) * rate
        if counted is not None and abs(counted - num_samples) <= tolerance:
            num_samples = counted
        if is_wma and abs(decoded - num_samples) <= 2 * usual:  # its decoder is a packet late
            num_samples = decoded
        if num_samples > _MAX_SILENCE * claimed_total:
            expected = f"at most {_MAX_SILENCE} times the {claimed_total} that its packets can hold"
            raise MediaError("<video>", f"found audio of {num_samples} samples, expected {expected}")
        return SoundIndex(
            start=start,
            num_samples=num_samples,
            num_padded=num_padded,
            sample_rate=rate,
            channels=channels,
            track=number,
        )


def _skipped(packet: Packet[Any]) -> tuple[int, int]:
    """Samples at the start and at the end of a packet that the container says to discard."""
    if not packet.has_sidedata("skip_samples"):
        return 0, 0
    first, last = struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples")))
    return first, last


def _opus_length(packet: Packet[Any]) -> int:
    """Samples of an Opus packet (RFC 6716, section 3.1)."""
    data = bytes(memoryview(packet)[:2])
    code = data[0] & 3
    count = {0: 1, 1: 2, 2: 2}.get(code, data[1] & 63 if len(data) > 1 else 0)
    return min(count * _OPUS_FRAMES[data[0] >> 3], _LONGEST_OPUS)


def _tolerance(tick: Fraction) -> Fraction:
    """Seconds by which times that are rounded to ticks may be off."""
    return max(2 * tick, Fraction(1, 200))


def read_sound(data: Buffer, index: SoundIndex, *, stop: int | None = None) -> npt.NDArray[np.float32]:
    """Decode the audio, each packet at its presentation time, with silence in gaps.

    Args:
        data: the file's bytes.
        index: of the same bytes.
        stop: sample to stop before, at the file's rate; None for all.

    Returns:
        (min(stop, num_samples), channels) float32 in [-1, 1]; a lossy codec's overshoots are clipped.

    Raises:
        MediaError: the file is damaged, or changes its rate or channels.
    """
    count = index.num_samples if stop is None else min(stop, index.num_samples)
    sound = np.zeros((count, index.channels), dtype=np.float32)
    for at, samples in _placed(data, index, count):
        np.clip(samples, -1.0, 1.0, out=sound[at : at + len(samples)])
    return sound


def check_sound(data: Buffer, index: SoundIndex, *, stop: int | None = None) -> None:
    """Raise what `read_sound` would, without keeping what decodes."""
    for _ in _placed(data, index, index.num_samples if stop is None else min(stop, index.num_samples)):
        pass


def _placed(data: Buffer, index: SoundIndex, count: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """The first sample and the (n, channels) samples of each frame that has some before `count`."""
    with open_media(data) as (container, _):
        stream = audio_stream_of(container, index.track - 1 if index.track else FIRST_TRACK)
        if stream is None:
            raise MediaError("<video>", "found no audio stream, expected the one that was indexed")
        tick = time_base_of(stream.time_base)
        # Times are rounded to ticks: audio continues without a gap until it is off by more than rounding.
        tolerance = _tolerance(tick) * index.sample_rate
        at = 0
        for frame in container.decode(stream):
            if (frame.sample_rate, frame.layout.nb_channels) != (index.sample_rate, index.channels):
                found = f"{frame.layout.nb_channels} channels at {frame.sample_rate} Hz"
                raise MediaError(
                    "<video>", f"found {found} midway, expected {index.channels} at {index.sample_rate} Hz"
                )
            if frame.pts is not None:
                due = (seconds_of(frame.pts, frame.time_base or tick) - index.start) * index.sample_rate
                if abs(due - at) > tolerance:
                    at = round(due)
            if at >= count:
                break
            samples = samples_of_frame(frame)
            first, last = max(at, 0), min(at + len(samples), count)
            if first < last:
                piece = samples[first - at : last - at]
                if not np.isfinite(piece).all():
                    raise MediaError("<video>", "found samples that are infinite or NaN, expected finite ones")
                yield first, piece
            at += len(samples)


def samples_of_frame(frame: AudioFrame) -> npt.NDArray[np.float32]:
    """(samples, channels) float32 of a frame of any layout."""
    raw: npt.NDArray[Any] = frame.to_ndarray()
    packed = raw.T if frame.format.is_planar else raw.reshape(-1, frame.layout.nb_channels)
    kind = frame.format.packed.name
    scales = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "flt": 1.0, "dbl": 1.0}
    if kind not in scales:
        raise MediaError("<video>", f"found samples of format {kind}, expected one of {', '.join(scales)}")
    values: npt.NDArray[Any] = packed.astype(np.float64 if kind in ("s32", "dbl") else np.float32)
    return ((values - (128 if kind == "u8" else 0)) / scales[kind]).astype(np.float32)


def resample(samples: npt.NDArray[np.float32], rate: int, target: int) -> npt.NDArray[np.float32]:
    """Resample (n, channels) samples by soxr: (n * target / rate, a half rounded up, channels)."""
    if rate == target:
        return samples
    count = resampled_length(len(samples), rate, target)
    if count == 0:
        return np.zeros((0, samples.shape[1]), dtype=np.float32)
    with optional_import("soxr", "resampling audio"):
        import soxr
    found = soxr.resample(samples, rate, target, quality="HQ")[:count]
    result = np.zeros((count, samples.shape[1]), dtype=np.float32)
    result[: len(found)] = found
    np.clip(result, -1.0, 1.0, out=result)
    return result


def resampled_length(count: int, rate: int, target: int) -> int:
    """The number of samples to which `resample` converts `count`."""
    return (2 * count * target + rate) // (2 * rate)


def mixes(channels: int, target: int) -> bool:
    """Whether `mix` converts audio of so many channels to `target`."""
    return channels == target or 1 in (channels, target) or (channels, target) == (6, 2)


def mix(samples: npt.NDArray[np.float32], target: int) -> npt.NDArray[np.float32]:
    """Convert (n, channels) samples to another number of channels.

    To one: the mean of all. From one: copies. From 5.1 (left, right, centre, low, back left, back right) to stereo:
    each side with its back and the centre at -3 dB, scaled so that nothing overshoots.

    Raises:
        ValueError: any other change.
    """
    channels = samples.shape[1]
    if channels == target:
        return samples
    if target == 1:
        return np.asarray(samples.mean(axis=1, keepdims=True, dtype=np.float64), dtype=np.float32)
    if channels == 1:
        return np.repeat(samples, target, axis=1)
    if not mixes(channels, target):
        raise ValueError(f"found {channels} channels, expected 1, 6 for stereo, or {target}")
    part = 0.5**0.5
    weights = np.array([[1, 0], [0, 1], [part, part], [0, 0], [part, 0], [0, part]]) / (1 + 2 * part)
    return np.asarray(samples @ weights, dtype=np.float32)
