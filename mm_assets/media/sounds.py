"""Facts about audio files, read from their headers: codec, rate, channels, length."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mm_assets.errors import MediaError
from mm_assets.media import flac
from mm_assets.media.content_types import Buffer, sniff_content_type
from mm_assets.media.extents import wav_chunks
from mm_assets.media.header import HeaderReader, size_of_id3
from mm_assets.media.sound_files import CODEC_OF_TYPE, open_audio

__all__ = ["AudioInfo", "probe_audio"]

DEFAULT_MAX_COUNTED = 4 * 3600 * 192_000  # samples per channel: four hours at 192 kHz


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioInfo:
    """An audio file as its header describes it.

    Attributes:
        codec: ``wav``, ``flac``, ``ogg``, ``mp3``, ``aiff``, ``au``, ``caf``, ``w64``, ``mp4``, ``aac`` (ADTS),
            ``ac3``, ``matroska``, ``wavpack``, ``asf`` or ``amr``.
        sample_rate: Hz, at least 1.
        channels: at least 1.
        num_frames: samples per channel.
        subtype: how samples are stored, in libsndfile's names: ``PCM_16``, ``FLOAT``, ``VORBIS``, and so on; of a file
            that PyAV reads FFmpeg's name of the codec, in upper case.
    """

    codec: str
    sample_rate: int
    channels: int
    num_frames: int
    subtype: str

    @property
    def duration_seconds(self) -> float:
        """Length in seconds."""
        return self.num_frames / self.sample_rate


_WAV_SUBTYPES = {  # (format, bits) -> (libsndfile's name)
    (1, 8): "PCM_U8",
    (1, 16): "PCM_16",
    (1, 24): "PCM_24",
    (1, 32): "PCM_32",
    (3, 32): "FLOAT",
    (3, 64): "DOUBLE",
    (6, 8): "ALAW",
    (7, 8): "ULAW",
}


def probe_audio(
    data: Buffer, *, size: int | None = None, max_frames: int = DEFAULT_MAX_COUNTED, exact: bool = False
) -> AudioInfo:
    """Read an audio file's header.

    Args:
        data: the file's bytes. Its head is enough for WAV and for a FLAC that has its length. Ogg and MP3 have their
            length at the end or nowhere, so the whole file is read. The formats that PyAV reads are decoded: their
            headers give no exact length.
        size: bytes of the whole file, if `data` is only its head. A WAV that is shorter than its header says has the
            existing frames.
        max_frames: samples per channel that are counted at most by decoding; more are not, and the count is larger.
        exact: count the samples of an Ogg by decoding it: the times of its pages may have holes.

    Raises:
        MediaError: bytes that are not an audio file, or a header that is damaged or truncated.
        MissingExtraError: the format needs a package that is not installed.
    """
    head = HeaderReader(data, "<audio>")
    content_type = sniff_content_type(head.view)
    file_size = head.size if size is None else size
    start = size_of_id3(head.view)
    if start:  # what follows a tag is MP3, if its first bytes do not say that it is something else
        content_type = sniff_content_type(head.view[start:]) or content_type
    if content_type == "audio/wav":
        info = _probe_wav(head, file_size, max_frames)
    elif content_type == "audio/flac":
        info = _probe_flac(head, start, file_size)
    elif content_type in CODEC_OF_TYPE:
        info = _probe_opened(head, CODEC_OF_TYPE[content_type], max_frames, exact=exact)
    else:
        found = content_type or f"unknown bytes {bytes(head.view[:8])!r}"
        raise head.fail(f"is not readable audio: found {found}, expected an audio file such as WAV, FLAC, Ogg or MP3")
    if info.sample_rate < 1 or info.channels < 1:
        raise head.fail(f"{info.codec} header has {info.sample_rate} Hz and {info.channels} channels")
    return info


def _probe_wav(head: HeaderReader, file_size: int, max_frames: int) -> AudioInfo:
    wav = wav_chunks(head.view)
    if wav is None:
        raise head.fail(f"WAV header is truncated: it has no data chunk in {head.size} bytes")
    if not wav.format_at:
        raise head.fail("WAV has no fmt chunk before its data")
    code, channels, rate, _, block, bits = head.take(struct.Struct("<HHIIHH"), wav.format_at, "WAV fmt chunk")
    if code == 0xFFFE and wav.format_size >= 26:  # extensible: the real format opens the sub-format GUID
        (code,) = head.take(struct.Struct("<H"), wav.format_at + 24, "WAV fmt chunk")
    subtype = _WAV_SUBTYPES.get((code, bits))
    if subtype is None:
        return _probe_opened(head, "wav", max_frames)
    if block == 0 or block != channels * bits // 8:
        raise head.fail(f"WAV has blocks of {block} bytes for {channels} channels of {bits} bits")
    there = max(0, file_size - wav.samples_at)
    return AudioInfo(
        codec="wav",
        sample_rate=rate,
        channels=channels,
        num_frames=(there if wav.samples_size is None else min(there, wav.samples_size)) // block,
        subtype=subtype,
    )


def _probe_flac(head: HeaderReader, start: int, file_size: int) -> AudioInfo:
    info = flac.read_stream_info(head.view, start)
    num_frames: int | None = info.num_frames
    if num_frames == 0:  # the encoder did not know
        num_frames = flac.count_frames(head.view, info) if head.size == file_size else None
    if num_frames is None:
        raise head.fail("FLAC has no length in its header, and does not end with a complete frame, which would give it")
    return AudioInfo(
        codec="flac",
        sample_rate=info.sample_rate,
        channels=info.channels,
        num_frames=num_frames,
        subtype="PCM_S8" if info.bits == 8 else f"PCM_{info.bits}",
    )


def _probe_opened(head: HeaderReader, codec: str, max_frames: int, *, exact: bool = True) -> AudioInfo:
    """The facts of an opened file; where decoding alone determines its length, its samples are counted."""
    try:
        return _counted(head.view, codec, max_frames, exact)
    except MediaError:
        with open_audio(head.view, codec):  # the structure of a damaged file says more than its decoder
            raise


def _counted(view: memoryview, codec: str, max_frames: int, exact: bool) -> AudioInfo:
    with open_audio(view, codec, whole=False) as sound:
        count = sound.num_frames
        if codec == "ogg" and not exact and sound.claimed_seconds:
            count = round(sound.claimed_seconds * sound.sample_rate)
        if count is None:
            count = 0
            for block in sound.blocks("float32"):
                count += len(block)
                if count > max_frames:
                    break
        return AudioInfo(
            codec=codec,
            sample_rate=sound.sample_rate,
            channels=sound.channels,
            num_frames=count,
            subtype=sound.subtype,
        )
