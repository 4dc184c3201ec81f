"""Audio of video and audio files, decoded by PyAV; resampling by soxr, and mixing.

`sound_frames` is the one decoder: sound files are its samples in their order, as FFmpeg's command line gives them, and
a clip's audio moves only where its times leave a hole (`read_sound`), to stay with the picture.

Any input gives an answer or a `MediaError`; without the packages of the extra ``video`` functions raise
`MissingExtraError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError, optional_import
from mm_assets.media.container_damage import ogg_links
from mm_assets.media.content_types import Buffer
from mm_assets.media.ranged_file import RangedFile
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
    from av.audio.stream import AudioStream
    from av.container import InputContainer

__all__ = [
    "MAX_SOUND_CHANNELS",
    "MAX_SOUND_RATE",
    "SoundIndex",
    "check_sound",
    "index_sound",
    "mix",
    "mixes",
    "read_sound",
    "read_sound_range",
    "resample",
    "resample_range",
    "resampled_length",
    "samples_of_frame",
    "sound_frames",
]

MAX_SOUND_CHANNELS = 64
MAX_SOUND_RATE = 768_000  # Hz
_MAX_DRIFT_SECONDS = Fraction(1, 10)  # that times may be off before audio is moved: FFmpeg's `min_hard_comp`
_MAX_SILENCE = 1000  # times the audio before it: else a few bytes become gigabytes of zeros
_FREE_SILENCE_SECONDS = 600  # beside that, for a recording that begins with a few packets
_FIRST_SAMPLES = 1 << 22  # of all channels, that room is made for before any are decoded
_SAMPLES: dict[str, tuple[str, float]] = {  # by FFmpeg's name of the format: dtype, and the value of full scale
    "u8": ("u1", 2.0**7),
    "s16": ("i2", 2.0**15),
    "s32": ("i4", 2.0**31),
    "flt": ("f4", 1.0),
    "dbl": ("f8", 1.0),
}
_MOV_TYPES = frozenset(("video/mp4", "video/quicktime", "video/3gpp", "audio/mp4"))
_MATROSKA_TYPES = frozenset(("video/webm", "video/x-matroska"))
_LEAD_SECONDS = Fraction(1, 2)  # decoded before a range and dropped: what codecs carry from one packet to the next
_RESAMPLED_LEAD = 512  # samples on each side of a range, of the lower rate, that soxr's filter may weigh
_GSM_BLOCK = 65  # bytes of GSM in a WAV
_HAS_CHECKSUM = ("flac", "ac3", "eac3", "wavpack")  # codecs of FFmpeg that compare one where they are asked to
# Demuxers that mark the last packet of a stream of unknown length too, or one where another stream was joined to it.
_MARKS_WHOLE_PACKETS = frozenset(("audio/wav", "audio/aiff", "audio/basic", "audio/x-caf", "audio/x-w64", "video/mp2t"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundIndex:
    """The extent of a file's audio.

    Attributes:
        start: presentation time of the first sample in seconds.
        num_samples: per channel, as many as `read_sound` decodes.
        sample_rate: Hz.
        channels: at least 1.
        track: 0 for the first audio stream that has a decoder; else the stream's number among audio streams, from 1.
    """

    start: Fraction
    num_samples: int
    sample_rate: int
    channels: int
    track: int = 0


def index_sound(
    data: Buffer,
    track: int | str | None = None,
    *,
    num_samples: int | None = None,
    max_bytes: int | None = None,
) -> SoundIndex | None:
    """The extent of a file's audio, which is decoded to count its samples; None where there is none.

    Args:
        data: the file's bytes.
        track: which of several streams, as `mm_assets.media.video.audio_stream_of` takes it.
        num_samples: the number of samples, where it need not be counted; then only the first packets are decoded.
        max_bytes: of the audio as float32; None for any number.

    Raises:
        MediaError: the file is damaged, its packets are so far apart that more than 99.9 % of it is silence, or there
            is more audio than `max_bytes`; then the error names the setting ``max_decoded_bytes``.
    """
    damage = damage_of(data)
    with open_media(data) as (container, content_type):
        stream = audio_stream_of(container, track)
        if stream is None:
            return None
        number = 0 if stream is audio_stream_of(container, FIRST_TRACK) else container.streams.audio.index(stream) + 1
        if damage is not None:
            raise MediaError("<video>", f"found a damaged file ({damage}), expected a whole one")
        is_new_ogg = num_samples is None and content_type.endswith("/ogg")
        if is_new_ogg and stream.codec_context.name != "flac" and len(links := ogg_links(memoryview(data))) > 1:
            reason = f"found a chain of {len(links)} Ogg files, of which FFmpeg loses samples, expected one"
            raise MediaError("<video>", reason)
        start: Fraction | None = None
        rate = channels = end = 0
        line: _Line | None = None
        for frame in sound_frames(container, stream, content_type):
            if line is None:
                rate, channels = frame.sample_rate, frame.layout.nb_channels
                if not 1 <= rate <= MAX_SOUND_RATE or not 1 <= channels <= MAX_SOUND_CHANNELS:
                    raise MediaError("<video>", f"found audio of {channels} channels at {rate} Hz")
                line = _Line(rate)
            first, skipped = line.place(_time_of(frame, stream), frame.samples)
            start = line.start
            if num_samples is not None and start is not None:
                break
            end = max(end, first + frame.samples - skipped)
            if max_bytes is not None and 4 * end * channels > max_bytes:
                reason = f"found more than {max_bytes} bytes of decoded audio, expected at most as many"
                raise MediaError("<video>", f"{reason} (max_decoded_bytes)", setting="max_decoded_bytes")
        if line is None:
            raise MediaError("<video>", "found an audio stream without samples, expected at least one")
        return SoundIndex(
            start=start or Fraction(0),
            num_samples=end if num_samples is None else num_samples,
            sample_rate=rate,
            channels=channels,
            track=number,
        )


class _Line:
    """Where the samples of frames go: one after the other, and moved where their times are off by more than jitter.

    The rule is that of FFmpeg's ``aresample=async=1``: up to a tenth of a second, times are rounded or jitter, and
    samples follow each other. Where they are later than that, silence fills the hole; where they are earlier, samples
    are dropped until they are due.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.start: Fraction | None = None  # time of the first sample
        self._decoded = 0
        self._at = 0  # the next sample
        self._surplus = 0  # samples to drop

    def place(self, time: Fraction | None, count: int) -> tuple[int, int]:
        """The first sample of a frame of `count` samples, and how many to drop of its start.

        Raises:
            MediaError: there would be far more silence than audio.
        """
        if time is not None:
            if self.start is None:
                self.start = time - Fraction(self._at, self.rate)
            due = (time - self.start) * self.rate
            if abs(due - (self._at - self._surplus)) > _MAX_DRIFT_SECONDS * self.rate:
                ahead = round(due) - self._at
                self._at, self._surplus = self._at + max(ahead, 0), max(-ahead, 0)
        self._decoded += count
        if self._at > _MAX_SILENCE * self._decoded + _FREE_SILENCE_SECONDS * self.rate:
            expected = f"at most {_MAX_SILENCE} times the {self._decoded} that its packets hold"
            raise MediaError("<video>", f"found audio of {self._at} samples, expected {expected}")
        first, dropped = self._at, min(self._surplus, count)
        self._surplus -= dropped
        self._at += count - dropped
        return first, dropped


def _time_of(frame: AudioFrame, stream: AudioStream) -> Fraction | None:
    """Presentation time of a frame in seconds; None without one."""
    if frame.pts is None:
        return None
    return seconds_of(frame.pts, time_base_of(frame.time_base or stream.time_base))


def sound_frames(container: InputContainer, stream: AudioStream, content_type: str) -> Iterator[AudioFrame]:
    """The decoded frames of a stream that have samples, in their order, as FFmpeg's command line decodes them.

    Args:
        container: an open file.
        stream: one of its streams.
        content_type: MIME type of the container.

    Raises:
        MediaError: a packet is truncated or fails its checksum; FFmpeg's own errors pass, for `open_media` to convert.
    """
    from av.audio.frame import AudioFrame

    if stream.codec_context.name in _HAS_CHECKSUM:
        stream.codec_context.options = {**stream.codec_context.options, "err_detect": "crccheck+explode"}
    for packet in container.demux(stream):
        if stream.codec_context.name == "gsm_ms" and packet.size in range(1, _GSM_BLOCK):
            continue  # the byte that makes the size of a WAV's samples even
        if packet.is_corrupt and content_type not in _MARKS_WHOLE_PACKETS:
            raise MediaError("<video>", "found a packet that is truncated or fails its checksum, expected a whole one")
        for frame in packet.decode():
            if isinstance(frame, AudioFrame) and frame.samples:
                yield frame


def read_sound(data: Buffer, index: SoundIndex, *, stop: int | None = None) -> npt.NDArray[np.float32]:
    """Decode the audio: its samples one after the other, but silence in a hole of more than a tenth of a second.

    Args:
        data: the file's bytes.
        index: of the same bytes.
        stop: sample to stop before, at the file's rate; None for all.

    Returns:
        (n, channels) float32 in [-1, 1], n up to the least of `stop` and `num_samples`; a lossy codec's overshoots are
        clipped.

    Raises:
        MediaError: the file is damaged, or changes its rate or channels.
    """
    count = index.num_samples if stop is None else min(stop, index.num_samples)
    sound = np.zeros((min(count, _FIRST_SAMPLES // index.channels), index.channels), dtype=np.float32)
    end = 0
    for at, samples in _placed(data, index, count):
        end = at + len(samples)
        if end > len(sound):  # the array grows with what decodes: a few bytes can claim hours
            sound.resize((min(count, max(end, 2 * len(sound))), index.channels), refcheck=False)
        np.clip(samples, -1.0, 1.0, out=sound[at:end])
    return sound[:end]


def check_sound(data: Buffer, index: SoundIndex, *, stop: int | None = None) -> int:
    """Raise what `read_sound` would, without keeping what decodes; returns its number of samples."""
    end = 0
    for at, samples in _placed(data, index, index.num_samples if stop is None else min(stop, index.num_samples)):
        end = at + len(samples)
    return end


def _placed(data: Buffer, index: SoundIndex, count: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """The first sample and the (n, channels) samples of each frame that has some before `count`."""
    with open_media(data) as (container, content_type):
        stream = audio_stream_of(container, index.track - 1 if index.track else FIRST_TRACK)
        if stream is None:
            raise MediaError("<video>", "found no audio stream, expected the one that was indexed")
        line = _Line(index.sample_rate)
        for frame in sound_frames(container, stream, content_type):
            if (frame.sample_rate, frame.layout.nb_channels) != (index.sample_rate, index.channels):
                found = f"{frame.layout.nb_channels} channels at {frame.sample_rate} Hz"
                raise MediaError(
                    "<video>", f"found {found} midway, expected {index.channels} at {index.sample_rate} Hz"
                )
            at, dropped = line.place(_time_of(frame, stream), frame.samples)
            if at >= count:
                break
            if dropped < frame.samples:
                yield at, samples_of_frame(frame)[dropped : dropped + count - at]


def read_sound_range(
    data: Buffer | RangedFile, start: int, stop: int, length: int | None, *, track: int | None = None
) -> tuple[npt.NDArray[np.float32], int] | None:
    """Decode some samples of a file's audio by seeking to a packet before them.

    The samples are those that decoding from the file's start gives one after the other: a packet's place follows from
    its time, which tells the number of packets before it, because all of them hold as many samples.

    Args:
        data: the file.
        start: first sample, at least 0.
        stop: the sample to end before.
        length: samples that decoding the whole file gives; None if that is unknown.
        track: the audio stream, as `mm_assets.media.video.audio_stream_of` takes it.

    Returns:
        (n, channels) float32 and the rate in Hz, n less than stop - start only if the audio ends before; None if the
        places of packets do not follow from their times, so that the file must be decoded from its start.

    Raises:
        MediaError: the file is damaged there.
    """
    with open_media(data) as (container, content_type):
        stream = audio_stream_of(container, track)
        if stream is None or content_type not in _MOV_TYPES | _MATROSKA_TYPES:
            return None
        packets = _Packets.of(container, stream, content_type)
        if packets is None or not packets.are_consecutive(container, stream, content_type, length):
            return None
        first = start - int(_LEAD_SECONDS * packets.rate) - packets.size
        if first > 0:
            container.seek(packets.tick_of(first), stream=stream, backward=True)
            return packets.read(sound_frames(container, stream, content_type), first, start, stop)
    with open_media(data) as (container, content_type):  # a seek would leave out the packets before the first sample
        stream = audio_stream_of(container, track)
        if stream is None:
            return None
        return packets.read(sound_frames(container, stream, content_type), 0, start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packets:
    """Packets of as many samples each, as their first two show.

    Attributes:
        rate: Hz.
        channels: of each frame.
        size: samples of a packet.
        head: samples of the first packet, of which the encoder's delay is dropped.
        start: tick of the first sample.
        per_tick: samples of a tick, as numerator and denominator.
    """

    rate: int
    channels: int
    size: int
    head: int
    start: int
    per_tick: tuple[int, int]

    @classmethod
    def of(cls, container: InputContainer, stream: AudioStream, content_type: str) -> Self | None:
        """The packets of a stream; None if it has less than two, or they differ in what a window would not see."""
        frames = list(islice(sound_frames(container, stream, content_type), 2))
        if len(frames) < 2 or frames[0].pts is None or abs(frames[0].pts) > MAX_TICKS:
            return None
        first, second = frames
        packets = cls(
            rate=first.sample_rate,
            channels=first.layout.nb_channels,
            size=second.samples,
            head=first.samples,
            start=frames[0].pts,
            per_tick=(time_base_of(stream.time_base) * first.sample_rate).as_integer_ratio(),
        )
        is_like_it = first.samples <= second.samples and first.time_base in (None, stream.time_base)
        return packets if is_like_it and packets.place_of(second) == first.samples else None

    def place_of(self, frame: AudioFrame) -> int | None:
        """The number of a frame's first sample; None if it does not follow from its time."""
        if frame.pts is None or (frame.sample_rate, frame.layout.nb_channels) != (self.rate, self.channels):
            return None
        num, den = self.per_tick
        ticks, count = frame.pts - self.start, frame.samples
        if ticks == 0 and count == self.head:
            return 0
        step = self.size * den
        number = (2 * (ticks * num - self.head * den) + step) // (2 * step)  # to nearest
        place = self.head + number * self.size
        # Two ticks: those of the first packet and of this one are rounded.
        is_exact = abs(ticks * num - place * den) <= 2 * num < step // 2
        return place if is_exact and count <= self.size and number >= 0 else None

    def tick_of(self, sample: int) -> int:
        """A tick at or before a sample."""
        num, den = self.per_tick
        return self.start + sample * den // num

    def read(
        self, frames: Iterable[AudioFrame], first: int, start: int, stop: int
    ) -> tuple[npt.NDArray[np.float32], int] | None:
        """The samples [start, stop) of frames that begin at sample `first` or before; None if they do not."""
        pieces = [np.zeros((0, self.channels), np.float32)]
        at = None
        for frame in frames:
            place = self.place_of(frame)
            if place is None or (at is None and place > first) or (at is not None and place != at):
                return None
            at = place + frame.samples
            if at > start:
                pieces.append(samples_of_frame(frame)[max(start - place, 0) : max(stop - place, 0)])
            if at >= stop:
                break
        return np.concatenate(pieces), self.rate

    def are_consecutive(
        self, container: InputContainer, stream: AudioStream, content_type: str, length: int | None
    ) -> bool:
        """Whether there is no gap between the packets: there are as many as the last one's time says."""
        num, den = self.per_tick
        if content_type in _MOV_TYPES:
            entries = stream.index_entries
            span = entries[len(entries) - 1].timestamp - entries[0].timestamp
            return bool(span * num == (len(entries) - 1) * self.size * den)
        if length is None:
            return False
        container.seek(2**62, stream=stream, backward=True)
        last = max((packet.pts for packet in container.demux(stream) if packet.pts is not None), default=0)
        at = (last - self.start) * num
        # The length without the last packet, whose padding is dropped.
        return bool((length - self.size - self.head) * den <= at <= (length + self.head) * den)


def samples_of_frame(frame: AudioFrame) -> npt.NDArray[np.float32]:
    """(samples, channels) float32 of a frame of any layout; `MediaError` if one is infinite or NaN."""
    kind, channels = frame.format.packed.name, frame.layout.nb_channels
    if kind not in _SAMPLES:
        raise MediaError("<video>", f"found samples of format {kind}, expected one of {', '.join(_SAMPLES)}")
    dtype, scale = _SAMPLES[kind]
    # Not by `to_ndarray`: of eight planes it reads a ninth, which there is not.
    planes = frame.planes[: channels if frame.format.is_planar else 1]
    count = frame.samples * channels // len(planes)
    raw = [np.frombuffer(memoryview(plane), dtype, count) for plane in planes]
    packed: npt.NDArray[Any] = np.stack(raw, axis=1) if frame.format.is_planar else raw[0].reshape(-1, channels)
    values: npt.NDArray[Any] = packed.astype(np.float64 if kind in ("s32", "dbl") else np.float32)
    if kind != "flt":
        values = ((values - (128 if kind == "u8" else 0)) / scale).astype(np.float32)
    samples: npt.NDArray[np.float32] = values
    if not np.isfinite(samples).all():
        raise MediaError("<video>", "found samples that are infinite or NaN, expected finite ones")
    return samples


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


def resample_range(
    read: Callable[[int, int], npt.NDArray[np.float32]], length: int, rate: int, target: int, start: int, stop: int
) -> npt.NDArray[np.float32]:
    """Resample only what some samples of the result need.

    They differ from the same samples of `resample` over all of the input by less than 2e-6: soxr computes in blocks,
    in float32, which begin elsewhere.

    Args:
        read: takes start and stop; returns the (stop - start, channels) samples of the input.
        length: samples of the input.
        rate: of the input, Hz.
        target: of the result, Hz.
        start: first sample of the result, at least 0.
        stop: the sample of the result to end before, at most `resampled_length`.
    """
    if rate == target:
        return read(start, stop)
    step = rate // math.gcd(rate, target)  # samples of the input after which both rates meet again
    lead = _RESAMPLED_LEAD * max(rate, target) // target + 1
    first = max(0, (start * rate // target - lead) // step * step)
    last = min(length, -(-stop * rate // target) + lead)
    samples = resample(read(first, last), rate, target)
    skipped = first * target // rate
    if last < length or len(samples) >= stop - skipped:
        return samples[start - skipped : stop - skipped]
    return samples[start - skipped :]


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
