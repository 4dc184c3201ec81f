"""Video for people: a player over the stored bytes, and a strip of frames for browsers that lack the codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mm_assets.display.item import (
    MAX_WHOLE,
    Content,
    Item,
    Media,
    clean_text,
    human_bytes,
    human_seconds,
    human_size,
    made,
    stored,
    unreadable_item,
)
from mm_assets.display.pictures import picture_of as encoded
from mm_assets.display.pictures import shrunk_pixels
from mm_assets.display.sounds import audio_item, samples_item
from mm_assets.display.words import vtt_of
from mm_assets.errors import MediaError
from mm_assets.fields.image_decode import orient
from mm_assets.fields.shown import ShownClip, ShownFile, ShownSamples
from mm_assets.media.content_types import Buffer, sniff_content_type
from mm_assets.media.embedded_subtitles import SubtitleTrack, embedded_subtitles, subtitle_tracks
from mm_assets.media.frames import read_frames
from mm_assets.media.picture import orientation_of, picture_of
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.video import VideoInfo, decoded_frames, index_frames, open_media, probe_video, video_stream_of

__all__ = ["clip_item", "video_item"]

NUM_STRIP = 10  # frames of a strip
_STRIP_SIDE = 320  # pixels of a frame of a strip
_POSTER_SIDE = 1280
_MAX_TRACKS = 16  # of subtitles
_MAX_FRAME = 40_000_000  # pixels of a frame that is decoded

_CODECS = ("h264", "vp8", "vp9", "av1")  # that browsers play; FFmpeg's decoders have longer names
_TYPES = {
    "video/mp4": "video/mp4",
    "video/quicktime": "video/mp4",  # browsers that play MP4 play these, but not by their own type
    "video/3gpp": "video/mp4",
    "video/webm": "video/webm",
    "video/x-matroska": "video/webm",
}


def video_item(name: str, content: Content, content_type: str) -> Item:
    """A video file, or a file of a video container with audio alone."""
    if content.size > MAX_WHOLE:
        return _large_item(name, content, content_type)
    played = _TYPES.get(content_type)
    data = content.whole()
    info = probe_video(data)
    if not info.has_video:
        return audio_item(name, content, content_type)
    codec = _codec_name(info.video_codec)
    duration = info.duration_seconds or 0.0
    fields: dict[str, Any] = {"width": info.width, "height": info.height, "duration": duration}
    facts = _facts(info, codec, content.size)
    media: list[Media] = []
    notes = []
    if played is not None and codec in _CODECS:
        media.append(stored("video", content, played))
        fields |= {"video": "video", "playable": True}
    else:
        fields["playable"] = False
        notes.append(f"Browsers do not play {codec} in {info.content_type.partition('/')[2]}: here are frames of it.")
    count = NUM_STRIP if duration > 0.2 else 1
    places = [(number + 0.5) / count for number in range(count)]
    media.append(made("poster", "image/jpeg", partial(_poster, content)))
    media += [
        made(f"strip-{number}", "image/jpeg", partial(_frame, content, place, _STRIP_SIDE))
        for number, place in enumerate(places)
    ]
    fields["poster"] = "poster"
    fields["strip"] = [{"media": f"strip-{n}", "seconds": round(at * duration, 3)} for n, at in enumerate(places)]
    tracks = subtitle_tracks(data)[:_MAX_TRACKS] if fields["playable"] else []
    if tracks:
        fields["tracks"] = [{"media": f"subtitles-{one.number}", **_track(one)} for one in tracks]
        media += [
            made(f"subtitles-{one.number}", "text/vtt", partial(_subtitles, content, one.number)) for one in tracks
        ]
        facts["subtitles"] = ", ".join(_track(one)["label"] for one in tracks)
    if info.has_audio and not fields["playable"]:
        sound = audio_item(name, content, content_type)
        if sound.kind == "audio":
            fields["sound"] = sound.data
            media += sound.media
    elif info.has_audio:
        fields["has_audio"] = True
    return Item(name=name, kind="video", facts=facts, data=fields, media=tuple(media), note=" ".join(notes))


def _large_item(name: str, content: Content, content_type: str) -> Item:
    """A file that is read in parts: its header, and a keyframe for each moment of its strip."""
    played = _TYPES.get(content_type)
    facts = {"type": content_type.removeprefix("video/"), "bytes": human_bytes(content.size)}
    try:
        info = probe_video(_ranged(content))
    except MediaError as error:
        if played is None:
            reason = f"No browser plays {content_type}, and {human_bytes(content.size)} are too many to be decoded."
            return Item(name=name, kind="unreadable", facts=facts, note=reason)
        note = f"It has no frame strip: it {error.reason}."
        only = {"video": "video", "playable": True, "strip": []}
        return Item(
            name=name, kind="video", facts=facts, data=only, media=(stored("video", content, played),), note=note
        )
    if not info.has_video:
        return audio_item(name, content, content_type)
    codec, duration = _codec_name(info.video_codec), info.duration_seconds or 0.0
    fields: dict[str, Any] = {"width": info.width, "height": info.height, "duration": duration, "poster": "poster"}
    fields["playable"] = played is not None and codec in _CODECS
    notes = [f"Of {human_bytes(content.size)} the strip has the keyframes before its moments."]
    media: list[Media] = []
    if played is not None and fields["playable"]:
        media.append(stored("video", content, played))
        fields |= {"video": "video", "has_audio": info.has_audio}
    else:
        notes.insert(0, f"Browsers do not play {codec} in {info.content_type.partition('/')[2]}.")
    places = [(number + 0.5) / NUM_STRIP for number in range(NUM_STRIP if duration else 0)]
    media.append(made("poster", "image/jpeg", lambda: _keyframe(_ranged(content), 0.1, _POSTER_SIDE)))
    media += [
        made(f"strip-{number}", "image/jpeg", partial(_keyframe_of, content, place))
        for number, place in enumerate(places)
    ]
    fields["strip"] = [{"media": f"strip-{n}", "seconds": round(at * duration, 3)} for n, at in enumerate(places)]
    facts = _facts(info, codec, content.size)
    return Item(name=name, kind="video", facts=facts, data=fields, media=tuple(media), note=" ".join(notes))


def _ranged(content: Content) -> RangedFile:
    return RangedFile(content.size, content.read)


def _keyframe_of(content: Content, place: float) -> bytes:
    return _keyframe(_ranged(content), place, _STRIP_SIDE)


def _track(track: SubtitleTrack) -> dict[str, str]:
    """How a player names a track."""
    label = " · ".join(filter(None, (track.title, track.language))) or f"track {track.number}"
    return {"label": clean_text(label)[:80], "language": clean_text(track.language)[:20]}


def _subtitles(content: Content, number: int) -> bytes:
    """A track of the file as WebVTT."""
    return vtt_of([(start, end, clean_text(text)) for start, end, text in embedded_subtitles(content.whole(), number)])


def _facts(info: VideoInfo, codec: str, size: int) -> dict[str, str]:
    facts = {"size": human_size(info.width, info.height)}
    if info.duration_seconds:
        facts["duration"] = human_seconds(info.duration_seconds)
    if info.frame_rate:
        facts["rate"] = f"{float(info.frame_rate):.4g} frames/s"
    facts["video"] = codec
    facts["audio"] = (
        f"{(info.audio_codec or '').removesuffix('_native')}, {info.sample_rate:,} Hz, {info.channels} ch"
        if info.has_audio
        else "none"
    )
    return {**facts, "bytes": human_bytes(size)}


def _codec_name(decoder: str | None) -> str:
    """The codec of one of FFmpeg's decoders: ``av1`` of ``libdav1d``."""
    name = decoder or "unknown"
    return {"libdav1d": "av1", "libaom-av1": "av1", "libvpx-vp9": "vp9", "libvpx": "vp8"}.get(name, name)


def _poster(content: Content) -> bytes:
    return _keyframe(content.whole(), 0.1, _POSTER_SIDE)


def _keyframe(data: Buffer | RangedFile, place: float, side: int) -> bytes:
    """The keyframe before a part of the duration, upright, as a JPEG: one open, one decoded frame."""
    with open_media(data, max_pixels=_MAX_FRAME) as (container, _):
        stream = video_stream_of(container, _MAX_FRAME)
        if stream is None:
            raise MediaError("<video>", "has no video")
        if stream.duration:
            container.seek((stream.start_time or 0) + int(place * stream.duration), stream=stream)
        elif container.duration:
            container.seek((container.start_time or 0) + int(place * container.duration))
        frame = next(decoded_frames(container, stream), None)
        if frame is None:
            raise MediaError("<video>", "has no frame that can be decoded")
        part = min(1.0, side / max(frame.width, frame.height))
        size = {"width": max(1, round(frame.width * part)), "height": max(1, round(frame.height * part))}
        pixels = np.asarray(frame.reformat(format="rgb24", **size).to_ndarray(), np.uint8)
        return encoded(np.ascontiguousarray(orient(pixels, orientation_of(frame))))


def _frame(content: Content, place: float, side: int) -> bytes:
    """The frame at a part of a file's duration, upright, as a JPEG."""
    data = content.whole()
    indexed = index_frames(data, max_pixels=_MAX_FRAME)
    if indexed is None:
        raise MediaError("<video>", "has no video")
    index = indexed[0]
    ticks = int(index.pts[0]) + int(place * float(index.duration / index.time_base))
    position = max(0, int(np.searchsorted(index.pts, ticks, side="right")) - 1)
    pixels = next(read_frames(data, index, [position], max_pixels=_MAX_FRAME))
    picture = picture_of(data, max_pixels=_MAX_FRAME)
    turned = orient(pixels, 1 if picture is None else picture.orientation)
    return encoded(shrunk_pixels(np.ascontiguousarray(turned), side))


# --- clips of a field -------------------------------------------------------------------------------------------------


def clip_item(name: str, shown: ShownClip, payload: Content) -> Item:
    """A clip as its field stores it: its files on the clip's own clock."""
    sound = None if shown.audio is None else _sound(name, shown.audio, payload)
    if shown.video is not None:
        part = payload.part(shown.video.offset, shown.video.size)
        item = video_item(name, part, sniff_content_type(part.head(512)) or "video/mp4")
    elif shown.frames:
        item = _jpegs(name, shown, payload)
    elif sound is not None:
        return replace(sound, data={**sound.data, "duration": shown.duration_seconds or sound.data.get("duration")})
    else:
        return unreadable_item(name, "The clip has neither video nor audio.", size=payload.size)
    facts = {**item.facts, "duration": human_seconds(shown.duration_seconds)}
    if shown.num_frames:
        facts["frames"] = f"{shown.num_frames:,} at {shown.frame_rate:.4g}/s"
    clock = {"start": shown.start_seconds, "duration": shown.duration_seconds}
    data: Mapping[str, Any] = {**item.data, "clip": clock}
    media, note = item.media, item.note
    if sound is not None and sound.kind == "audio":
        data = {**data, "sound": {**sound.data, "offset": shown.audio_offset_seconds}}
        media = (*[one for one in media if one.name not in ("audio", "wav", "peaks")], *sound.media)
        facts["audio"] = sound.facts.get("type", "")
    elif sound is not None:
        note = f"{note} {sound.note}".strip()
    return replace(item, facts=facts, data=data, media=media, note=note)


def _sound(name: str, audio: ShownFile | ShownSamples, payload: Content) -> Item:
    try:
        if isinstance(audio, ShownSamples):
            return samples_item(name, audio, payload)
        part = payload.part(audio.offset, audio.size)
        return audio_item(name, part, sniff_content_type(part.head(512)) or "audio/wav")
    except MediaError as error:
        return unreadable_item(name, f"The clip's audio cannot be shown: {error.reason}.", size=audio.size)


def _jpegs(name: str, shown: ShownClip, payload: Content) -> Item:
    height, width = shown.size
    media = [
        stored(f"frame-{number}", payload.part(file.offset, file.size), "image/jpeg")
        for number, (_, file) in enumerate(shown.frames)
    ]
    strip = [{"media": f"frame-{n}", "seconds": round(at, 4)} for n, (at, _) in enumerate(shown.frames)]
    data = {"width": width, "height": height, "duration": shown.duration_seconds, "playable": False, "strip": strip}
    facts = {"size": human_size(width, height), "video": "JPEG frames", "bytes": human_bytes(payload.size)}
    count = len(strip)
    note = f"Shown are {count} of {shown.num_frames:,} frames." if count < shown.num_frames else ""
    return Item(name=name, kind="video", facts=facts, data={**data, "poster": "frame-0"}, media=tuple(media), note=note)
