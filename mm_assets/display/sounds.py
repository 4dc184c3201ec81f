"""Audio for people: a player over the stored bytes where browsers know the codec, else a made WAV; its waveform.

The waveform is computed block by block, when it is asked for; of a long recording only the first part is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.display.item import (
    MAX_WHOLE,
    Content,
    Item,
    Media,
    human_bytes,
    human_seconds,
    made,
    stored,
    unreadable_item,
)
from mm_assets.errors import MediaError
from mm_assets.fields.shown import ShownSamples
from mm_assets.media import flac
from mm_assets.media.content_types import sniff_content_type
from mm_assets.media.header import size_of_id3
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.sound import samples_of_frame
from mm_assets.media.sound_files import CODEC_OF_TYPE, OpenAudio, open_audio
from mm_assets.media.sounds import probe_audio
from mm_assets.media.video import FIRST_TRACK, audio_stream_of, decodable_frames, open_media, probe_video

__all__ = ["audio_item", "peaks_of", "samples_item"]

_NUM_PEAKS = 800  # of a waveform; at most twice as many are sent
_MAX_SAMPLES = 60_000_000  # of all channels, that a waveform is made of: ten minutes of stereo at 48 kHz
_MAX_WAV = 48 << 20  # bytes of a made WAV
_NUM_MOMENTS = 250  # of a large file's waveform
_PIECE_SECONDS = 0.25  # of each at least: an MP3 is silent before its decoder has what frames refer to
_MAX_READ = 96 << 20  # bytes of a large file that are read for it
_FLAC_HEAD = 8 + 34  # bytes of a marker and the STREAMINFO block
_HEAD = 1 << 16  # bytes of a large file that describe it
_BLOCK = 1 << 20  # bytes of stored samples that are read at a time

_NATIVE_WAV = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ALAW", "ULAW")
_NATIVE = {  # how browsers know the types whose codecs they play
    "audio/flac": ("audio/flac", None),
    "audio/mpeg": ("audio/mpeg", None),
    "audio/ogg": ("audio/ogg", ("VORBIS", "OPUS")),
    "audio/mp4": ("audio/mp4", ("AAC", "ALAC", "MP3", "OPUS", "FLAC")),
    "video/mp4": ("audio/mp4", ("AAC", "MP3", "OPUS", "FLAC")),
    "audio/aac": ("audio/aac", None),
    "video/webm": ("audio/webm", ("VORBIS", "OPUS")),
}


def audio_item(name: str, content: Content, content_type: str) -> Item:
    """An audio file."""
    content = _with_flac_length(content)
    if content.size > MAX_WHOLE:
        return _large_item(name, content, content_type)
    data = content.whole()
    found = content_type
    if data[:3] == b"ID3":
        start = size_of_id3(memoryview(data))
        found = sniff_content_type(data[start : start + 512]) or content_type
    sound = _described(data, found, content.size)
    if not sound.seconds:
        return unreadable_item(name, "The audio has no samples.", size=content.size, content_type=found)
    fields: dict[str, Any] = {"duration": sound.seconds, "audio": "audio", "peaks": "peaks"}
    notes = _damage(data, found, sound.length)
    native = _native_type(found, sound.codec)
    wav = made("wav", "audio/wav", partial(_made_wav, content, found, sound.length))
    if native is None:
        media = [Media(name="audio", content_type="audio/wav", make=wav.make)]
        longest = _MAX_WAV / 2 / max(sound.channels, 1) / max(sound.rate, 1)
        notes.append(f"Played is a WAV that is made of the {sound.codec.replace('_', ' ')}.")
        if sound.seconds > longest:
            notes.append(f"It has the first {human_seconds(longest)}.")
    elif native == "audio/wav":
        media = [stored("audio", content, native)]
    else:  # some builds of a browser leave the codec out, or fail to seek in it
        media = [stored("audio", content, native), wav]
        fields["fallback"] = "wav"
    media.append(made("peaks", "application/json", partial(_peaks_of_file, content, found, sound.length)))
    facts = sound.facts(content.size)
    return Item(name=name, kind="audio", facts=facts, data=fields, media=tuple(media), note=" ".join(notes))


def _with_flac_length(content: Content) -> Content:
    """Returns a FLAC whose header has no length with the length of its frames, without which browsers do not seek.

    Other content, also a FLAC that does not end with a frame, is returned as it is.
    """
    start = size_of_id3(memoryview(content.head(10)))
    head = content.part(start, _FLAC_HEAD).head(_FLAC_HEAD)
    try:
        info = flac.read_stream_info(memoryview(head), 0) if head.startswith(b"fLaC") else None
    except MediaError:
        return content
    if info is None or info.num_frames:
        return content
    size = min(content.size, flac.MAX_TAIL_BYTES)
    length = flac.count_frames(memoryview(content.read(content.size - size, size)), info)
    if length is None:
        return content
    front = content.head(start) + flac.with_length(head, 0, length)
    return _joined(front, content.part(len(front), content.size))


def _joined(head: bytes, rest: Content) -> Content:
    """Returns bytes in memory and the content after them as one."""

    def read(offset: int, size: int) -> bytes:
        front = head[offset : offset + size]
        left = size - len(front)
        return front + rest.read(max(0, offset - len(head)), left) if left > 0 else front

    return Content(len(head) + rest.size, read)


def _large_item(name: str, content: Content, content_type: str) -> Item:
    """A file that is read in parts: it plays where a browser knows the codec, with a waveform of some moments."""
    facts = {"type": content_type.removeprefix("audio/"), "bytes": human_bytes(content.size)}
    fields: dict[str, Any] = {"audio": "audio"}
    native = _NATIVE.get(content_type, (None, None))[0]
    note = ""
    try:
        if content_type in ("audio/wav", "audio/flac"):
            sound = _described(content.head(_HEAD), content_type, content.size)
        else:
            sound = _probed(RangedFile(content.size, content.read))
        facts, native = sound.facts(content.size), _native_type(content_type, sound.codec)
        fields["duration"] = sound.seconds
    except MediaError as error:
        if content_type in ("audio/wav", "audio/flac"):
            return unreadable_item(name, f"The audio cannot be shown: {error.reason}.", size=content.size)
        note = f"It has no waveform: it {error.reason}."
    if native is None:
        reason = f"No browser plays it, and {human_bytes(content.size)} are too many to be decoded."
        return Item(name=name, kind="unreadable", facts=facts, note=reason)
    media = [stored("audio", content, native)]
    if fields.get("duration"):
        fields["peaks"] = "peaks"
        media.append(made("peaks", "application/json", partial(_sampled_peaks, content, fields["duration"])))
        note = f"Of {human_bytes(content.size)} the waveform has {_NUM_MOMENTS} moments, not all samples."
    elif not note:
        note = "It has no waveform: its header has no duration."
    return Item(name=name, kind="audio", facts=facts, data=fields, media=tuple(media), note=note)


def _probed(file: RangedFile) -> _Sound:
    """A large file by its header."""
    info = probe_video(file)
    if not info.has_audio:
        raise MediaError("<audio>", "has no audio")
    codec = (info.audio_codec or "unknown").upper().removesuffix("_NATIVE").removesuffix("FLOAT")
    return _Sound(info.sample_rate, info.channels, info.duration_seconds or 0.0, codec, 0)


def _sampled_peaks(content: Content, seconds: float) -> bytes:
    """The lowest and highest sample of short pieces of a large file, one for each stretch, as far as time allows."""
    import av
    from av.audio.frame import AudioFrame

    file = RangedFile(content.size, content.read, max_bytes=_MAX_READ)
    peaks: list[list[float]] = []
    with open_media(file) as (container, _):
        stream = audio_stream_of(container, FIRST_TRACK)
        if stream is None or stream.time_base is None:
            raise MediaError("<audio>", "has no audio that can be decoded")
        first = stream.start_time or 0
        for number in range(_NUM_MOMENTS):
            at = (number + 0.5) / _NUM_MOMENTS * seconds
            with suppress(av.FFmpegError):  # FLAC's last frames may not be found: then it is what follows here
                container.seek(first + int(at / stream.time_base), stream=stream)
            low = high = 0.0
            found = 0
            for frame in decodable_frames(container, stream):
                if isinstance(frame, AudioFrame) and frame.samples:
                    piece = np.nan_to_num(samples_of_frame(frame), nan=0.0, posinf=1.0, neginf=-1.0)
                    low, high = min(low, float(piece.min())), max(high, float(piece.max()))
                    found += frame.samples
                if found >= _PIECE_SECONDS * stream.sample_rate:
                    break
            if file.is_over:
                break
            peaks.append([low, high])
    if not peaks:
        raise MediaError("<audio>", "takes too long to be decoded")
    return _as_json((np.asarray(peaks, np.float32), len(peaks)), _NUM_MOMENTS / seconds)


def samples_item(name: str, shown: ShownSamples, payload: Content) -> Item:
    """Samples that are stored as in memory: a WAV whose head is made and whose samples are the stored bytes."""
    block = shown.channels * shown.dtype.itemsize
    content = payload.part(shown.offset, shown.size - shown.size % block)
    head = _wav_head(content.size, shown.sample_rate, shown.channels, shown.dtype)
    duration = content.size / block / shown.sample_rate
    facts = {"duration": human_seconds(duration), "rate": f"{shown.sample_rate:,} Hz"}
    facts |= {"channels": str(shown.channels), "type": f"{shown.dtype.name} samples"}
    facts["bytes"] = human_bytes(content.size)
    if not content.size:
        return Item(name=name, kind="unreadable", facts=facts, note="The audio has no samples.")

    def blocks() -> Iterator[npt.NDArray[Any]]:
        step = max(1, _BLOCK // block) * block
        for at in range(0, content.size, step):
            raw = np.frombuffer(content.read(at, min(step, content.size - at)), shown.dtype)
            scaled = raw / np.float32(32768) if shown.dtype.kind == "i" else raw
            yield scaled.reshape(-1, shown.channels)

    media = (
        stored("audio", _joined(head, content), "audio/wav"),
        made("peaks", "application/json", lambda: _as_json(peaks_of(blocks()), shown.sample_rate)),
    )
    fields = {"duration": duration, "audio": "audio", "peaks": "peaks"}
    return Item(name=name, kind="audio", facts=facts, data=fields, media=media)


class _Sound(NamedTuple):
    """An audio file as its header describes it; `length` is its samples per channel, 0 where they are not counted."""

    rate: int
    channels: int
    seconds: float
    codec: str
    length: int

    def facts(self, size: int) -> dict[str, str]:
        """For people."""
        facts = {"duration": human_seconds(self.seconds), "rate": f"{self.rate:,} Hz", "channels": str(self.channels)}
        return {**facts, "type": self.codec.replace("_", " "), "bytes": human_bytes(size)}


def _described(data: bytes, content_type: str, size: int) -> _Sound:
    if CODEC_OF_TYPE.get(content_type) in ("mp4", "aac", "ac3", "matroska", "wavpack", "asf", "amr"):
        info = probe_video(data)  # headers: these have no exact length before they are decoded
        if not info.has_audio:
            raise MediaError("<audio>", "has no audio")
        codec = (info.audio_codec or "unknown").upper().removesuffix("_NATIVE")
        seconds = info.duration_seconds or _counted(data, content_type)
        return _Sound(info.sample_rate, info.channels, seconds, codec, 0)
    found = probe_audio(data, size=size)
    codec = "MP3" if found.codec == "mp3" else found.subtype
    return _Sound(found.sample_rate, found.channels, found.duration_seconds, codec, found.num_frames)


def _counted(data: bytes, content_type: str) -> float:
    """Seconds of a file whose header has no length, at most those that a waveform is made of."""
    with open_audio(data, CODEC_OF_TYPE[content_type], whole=False) as sound:
        count = 0
        for block in sound.blocks("float32"):
            count += len(block)
            if count * sound.channels > _MAX_SAMPLES:
                break
        return count / sound.sample_rate


def _damage(data: bytes, content_type: str, length: int) -> list[str]:
    """What the structure of a file says about its damage; nothing is decoded for it."""
    try:
        with open_audio(data, _codec_of(data, content_type), length=length):
            return []
    except MediaError as error:
        return [f"The file is damaged: {error.reason}."]


def _native_type(content_type: str, subtype: str) -> str | None:
    """The type that a browser plays the file by; None where none does."""
    if content_type == "audio/wav":
        return "audio/wav" if subtype in _NATIVE_WAV else None
    known = _NATIVE.get(content_type)
    if known is None or (known[1] is not None and subtype not in known[1]):
        return None
    return known[0]


# --- waveforms --------------------------------------------------------------------------------------------------------


def peaks_of(blocks: Iterable[npt.NDArray[Any]], *, count: int = _NUM_PEAKS) -> tuple[npt.NDArray[np.float32], int]:
    """The lowest and highest sample of all channels in each stretch, (n, 2) float32, n at most 2 * `count`.

    With them comes how many samples per channel they cover. Stretches are doubled as the audio goes on, so its length
    need not be known, and memory is bounded.
    """
    hop, total, used = 64, 0, 0
    found = np.empty((0, 2), np.float32)
    left = np.empty((0, 1), np.float32)
    for block in blocks:
        used += block.size
        total += len(block)
        clean = np.nan_to_num(np.asarray(block, np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
        left = np.concatenate([left, clean]) if left.size else clean
        whole = len(left) // hop
        if whole:
            runs = left[: whole * hop].reshape(whole, -1)
            found = np.concatenate([found, np.stack([runs.min(axis=1), runs.max(axis=1)], axis=1)])
            left = left[whole * hop :]
        while len(found) > 2 * count:
            if len(found) % 2:  # the odd one is begun again with what follows
                found = np.concatenate([found, found[-1:]])
            found = np.stack([found[:, 0].reshape(-1, 2).min(axis=1), found[:, 1].reshape(-1, 2).max(axis=1)], axis=1)
            hop *= 2
        if used > _MAX_SAMPLES:
            break
    if left.size:
        found = np.concatenate([found, [[left.min(), left.max()]]])
    return found.astype(np.float32), total


def _peaks_of_file(content: Content, content_type: str, length: int) -> bytes:
    data = content.whole()
    with open_audio(data, _codec_of(data, content_type), length=length, whole=False) as sound:
        return _as_json(peaks_of(_decodable(sound)), sound.sample_rate)


def _decodable(sound: OpenAudio) -> Iterator[npt.NDArray[Any]]:
    """The blocks of a file up to where it is damaged; `MediaError` where none decodes."""
    is_begun = False
    try:
        for block in sound.blocks("float32"):
            yield block
            is_begun = True
    except MediaError:
        if not is_begun:
            raise


def _codec_of(data: bytes, content_type: str) -> str:
    codec = CODEC_OF_TYPE.get(content_type)
    if codec is None:
        raise MediaError("<audio>", f"is of type {content_type}, which is not decoded here")
    return codec


def _as_json(found: tuple[npt.NDArray[np.float32], int], rate: float) -> bytes:
    peaks, count = found
    rounded = np.round(np.clip(peaks, -1, 1).astype(np.float64), 3).tolist()
    return json.dumps({"peaks": rounded, "seconds": count / rate}, separators=(",", ":")).encode("ascii")


# --- WAV --------------------------------------------------------------------------------------------------------------


def _wav_head(size: int, rate: int, channels: int, dtype: np.dtype[Any]) -> bytes:
    block = channels * dtype.itemsize
    code = 1 if dtype.kind == "i" else 3
    size = min(size, 2**32 - 64)
    form = struct.pack("<HHIIHH", code, channels, rate, min(rate * block, 2**32 - 1), block, 8 * dtype.itemsize)
    return (
        b"RIFF"
        + struct.pack("<I", 36 + size)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", size)
    )


def _made_wav(content: Content, content_type: str, length: int) -> bytes:
    """A WAV of 16 bits of what decodes, at most `_MAX_WAV`."""
    data = content.whole()
    pieces: list[bytes] = []
    size = 0
    with open_audio(data, _codec_of(data, content_type), length=length, whole=False) as sound:
        for block in _decodable(sound):
            clean = np.nan_to_num(block, nan=0.0, posinf=1.0, neginf=-1.0)
            pieces.append(np.rint(np.clip(clean, -1, 1) * 32767).astype("<i2").tobytes())
            size += len(pieces[-1])
            if size >= _MAX_WAV:
                break
        return _wav_head(size, sound.sample_rate, sound.channels, np.dtype("<i2")) + b"".join(pieces)
