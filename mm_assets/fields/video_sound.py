"""The audio of a stored clip: samples, or that of a stored file. Its size is known before any of it is decoded."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.fields.audio import Audio, AudioField
from mm_assets.fields.base import corrupt, over_limit, unreadable
from mm_assets.fields.video_record import MAX_COUNT, NONE, OWN_FILE, SAMPLES, Record
from mm_assets.fields.video_source import EARLIER_SURPLUS_SECONDS, Plan, Source, check_length, clip_sound, last_sample
from mm_assets.media.content_types import sniff_content_type
from mm_assets.media.ranged_file import RangedFile, whole_of
from mm_assets.media.sound import (
    check_sound,
    index_sound,
    mix,
    mixes,
    read_sound_range,
    resample,
    resample_range,
    resampled_length,
)
from mm_assets.media.sound_files import read_audio_range
from mm_assets.media.timing import Timing
from mm_assets.media.video import FIRST_TRACK, is_sought

__all__ = ["brought_to", "check_decodable", "decoded_size", "sound_range", "stored_sound", "timing_at"]


def decoded_size(plan: Plan) -> int:
    """Bytes of float32 that decoding the plan's audio takes: that of the file, or at the plan's rate and channels."""
    if plan.sound is None:
        return 0
    end = plan.audio_start + plan.num_audio_samples  # what comes before the clip is decoded too
    in_file = resampled_length(end, plan.sample_rate, plan.sound.sample_rate)
    return 4 * max(in_file * plan.sound.channels, end * plan.channels)


def stored_sound(record: Record, video: memoryview, audio: memoryview, *, max_decoded_bytes: int) -> Audio | None:
    """Decode the audio of a clip; None where it has none. `video` and `audio` are the payload's bytes of each.

    Raises:
        CorruptError: the payload is damaged.
        LimitError: its audio is larger than `max_decoded_bytes`.
    """
    if record.audio_codec == NONE:
        return None
    _check_size(4 * record.num_audio_samples * record.num_channels, max_decoded_bytes)
    if record.audio_codec in SAMPLES:
        decoder, metadata = _samples_of(record)
        return decoder.decode(metadata, audio)
    try:
        content = audio if record.audio_codec == OWN_FILE else video
        plan = _plan_of(record, content, max_decoded_bytes)
        return Audio(clip_sound(Source(audio=content), plan), record.sample_rate)
    except MediaError as error:
        raise unreadable(error) from error


def sound_range(
    record: Record,
    video: memoryview | RangedFile,
    audio: memoryview | RangedFile,
    start: int,
    stop: int,
    *,
    rate: int,
    channels: int,
    max_decoded_bytes: int,
) -> npt.NDArray[np.float32]:
    """Decode samples [start, stop) of a clip's audio at a rate and number of channels, without the rest if possible.

    Args:
        record: of a clip with audio.
        video: the payload's bytes of video.
        audio: the payload's bytes of audio.
        start: first sample of the clip at `rate`, at least 0.
        stop: the sample to end before; at most as many as the clip has.
        rate: Hz.
        channels: that the audio is mixed to.
        max_decoded_bytes: of the range.

    Raises:
        CorruptError: the payload is damaged there.
        LimitError: the range is larger than the limit, or nothing makes so many channels of the audio.
    """
    stored = (stop - start, record.num_channels)
    _check_size(4 * max(stored[1], channels) * stored[0], max_decoded_bytes)
    _check_conversion(stored, record.sample_rate, rate, channels, max_decoded_bytes=max_decoded_bytes)

    def read(first: int, last: int) -> npt.NDArray[np.float32]:
        samples = _stored_range(record, video, audio, first, last)
        if samples is None:
            decoded = stored_sound(record, whole_of(video), whole_of(audio), max_decoded_bytes=max_decoded_bytes)
            samples = np.zeros((0, record.num_channels), np.float32) if decoded is None else decoded.samples[first:last]
        return mix(samples, channels)

    return resample_range(read, record.num_audio_samples, record.sample_rate, rate, start, stop)


def _stored_range(
    record: Record, video: memoryview | RangedFile, audio: memoryview | RangedFile, start: int, stop: int
) -> npt.NDArray[np.float32] | None:
    """Samples [start, stop) of a clip as they are stored; None if all before them must be decoded too."""
    if start >= stop:
        return np.zeros((0, record.num_channels), np.float32)
    if record.audio_codec in SAMPLES:
        decoder, metadata = _samples_of(record)
        rate, codec, shape = decoder._opened_record(metadata)
        return decoder._decode_range(audio, rate, codec, shape, start, stop).samples
    content = audio if record.audio_codec == OWN_FILE else video
    if record.audio_codec == OWN_FILE and (plain := _plain_range(content, start, stop, record)) is not None:
        return plain
    if isinstance(content, RangedFile) and not is_sought(content):
        return None
    track = record.audio_track - 1 if record.audio_track else FIRST_TRACK
    first, last = record.audio_start_samples + start, record.audio_start_samples + stop
    try:
        # The length of a clip that ends before its file does is not that of the file, and then it does not help.
        length = record.audio_start_samples + record.num_audio_samples
        found = read_sound_range(content, first, last, length, track=track)
    except MediaError as error:
        raise unreadable(error) from error
    if found is None or (found[0].shape[1], found[1]) != (record.num_channels, record.sample_rate):
        return None
    samples = np.clip(found[0], -1.0, 1.0)
    missing = stop - start - len(samples)
    if missing > EARLIER_SURPLUS_SECONDS * record.sample_rate:
        raise corrupt("audio ends early", found=f"{first + len(samples)} samples", expected=length)
    return np.concatenate([samples, np.zeros((missing, samples.shape[1]), np.float32)]) if missing else samples


def _plain_range(
    content: memoryview | RangedFile, start: int, stop: int, record: Record
) -> npt.NDArray[np.float32] | None:
    """Samples of a WAV or FLAC, whose place is known and which PyAV and libsndfile decode alike; None of others."""
    head = content.head() if isinstance(content, RangedFile) else content
    codec = {"audio/wav": "wav", "audio/flac": "flac"}.get(sniff_content_type(head) or "")
    if codec is None:
        return None
    first, last = record.audio_start_samples + start, record.audio_start_samples + stop
    try:
        found = read_audio_range(content, codec, last, first, last, "float32")
    except MediaError:
        return None  # the other decoder says what is wrong
    if found is None or not found[2].startswith(("PCM_", "FLOAT")):
        return None
    samples, rate, _ = found
    fits = (samples.shape[1], rate) == (record.num_channels, record.sample_rate) and np.isfinite(samples).all()
    return np.clip(samples, -1.0, 1.0).astype(np.float32) if fits else None


def check_decodable(
    record: Record,
    video: memoryview,
    audio: memoryview,
    *,
    rate: int | None,
    channels: int | None,
    max_decoded_bytes: int,
) -> None:
    """Raise what `stored_sound`, and `brought_to` with a rate and channels, would, in bounded memory."""
    if record.audio_codec == NONE:
        return
    _check_size(4 * record.num_audio_samples * record.num_channels, max_decoded_bytes)
    if record.audio_codec in SAMPLES:
        decoder, metadata = _samples_of(record)
        decoder.check_decodable(metadata, audio)
    else:
        try:
            content = audio if record.audio_codec == OWN_FILE else video
            plan = _plan_of(record, content, max_decoded_bytes)
            if plan.sound is not None:
                check_length(plan, check_sound(content, plan.sound, stop=last_sample(plan, plan.sound)))
        except MediaError as error:
            raise unreadable(error) from error
    stored = (record.num_audio_samples, record.num_channels)
    target = (rate or record.sample_rate, channels or record.num_channels)
    _check_conversion(stored, record.sample_rate, *target, max_decoded_bytes=max_decoded_bytes)


def _samples_of(record: Record) -> tuple[AudioField, bytes]:
    """The field that decodes a clip's stored samples, and their record."""
    decoder = AudioField(max_frames=2**40)  # the clip's own limit is checked
    values = (record.sample_rate, record.num_channels, record.audio_codec, record.num_audio_samples)
    return decoder, decoder._pack_record(*values)


def _plan_of(record: Record, content: memoryview, max_decoded_bytes: int) -> Plan:
    """What to decode of the file that has a clip's audio; the result is compared with the record by `check_length`."""
    track = record.audio_track - 1 if record.audio_track else FIRST_TRACK
    sound = index_sound(content, track, num_samples=MAX_COUNT)
    if sound is None:
        raise corrupt("clip has no audio where its record says so", found="a file without audio")
    plan = Plan(
        sound=sound,
        sample_rate=record.sample_rate,
        channels=record.num_channels,
        audio_start=record.audio_start_samples,
        num_audio_samples=record.num_audio_samples,
    )
    _check_size(decoded_size(plan), max_decoded_bytes)
    return plan


def brought_to(sound: Audio, rate: int, channels: int, *, max_decoded_bytes: int) -> Audio:
    """Audio at another rate and number of channels than it is stored with; itself where it has them.

    Raises:
        LimitError: nothing makes so many channels of it, or it would be larger than the limit.
    """
    count, stored = sound.samples.shape
    if (stored, sound.sample_rate) == (channels, rate):
        return sound
    _check_conversion((count, stored), sound.sample_rate, rate, channels, max_decoded_bytes=max_decoded_bytes)
    return Audio(resample(mix(sound.samples, channels), sound.sample_rate, rate), rate)


def _check_conversion(shape: tuple[int, int], given: int, rate: int, channels: int, *, max_decoded_bytes: int) -> None:
    """Whether audio of a shape can be converted from the `given` rate to a rate and number of channels."""
    count, stored = shape
    if (stored, given) == (channels, rate):
        return
    if not mixes(stored, channels):
        detail = "audio cannot be mixed to the field's channels"
        raise over_limit(detail, "audio_channels", found=stored, expected=f"1, 6 for stereo, or {channels}")
    _check_size(4 * resampled_length(count, given, rate) * max(channels, stored), max_decoded_bytes)


def timing_at(timing: Timing, rate: int) -> Timing:
    """A clip's timing with its audio at another rate; the offset is rounded to nearest, a half to even."""
    if timing.sample_rate in (0, rate):
        return timing
    return dataclasses.replace(
        timing,
        sample_rate=rate,
        num_audio_samples=resampled_length(timing.num_audio_samples, timing.sample_rate, rate),
        audio_offset_samples=round(Fraction(timing.audio_offset_samples * rate, timing.sample_rate)),
    )


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        expected = f"at most {limit}"
        raise over_limit("audio is too large", "max_decoded_bytes", found=f"{size} bytes", expected=expected)
