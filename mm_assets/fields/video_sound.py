"""The audio of a stored clip: samples, or that of a stored file. Its size is known before any of it is decoded."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from mm_assets.errors import MediaError
from mm_assets.fields.audio import Audio, AudioField
from mm_assets.fields.base import corrupt, over_limit, unreadable
from mm_assets.fields.video_record import MAX_COUNT, NONE, OWN_FILE, SAMPLES, Record
from mm_assets.fields.video_source import Plan, Source, check_length, clip_sound, last_sample
from mm_assets.media.sound import check_sound, index_sound, mix, mixes, resample, resampled_length
from mm_assets.media.timing import Timing
from mm_assets.media.video import FIRST_TRACK

__all__ = ["brought_to", "check_decodable", "decoded_size", "stored_sound", "timing_at"]


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
