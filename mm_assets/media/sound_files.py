"""Audio files as samples: read by libsndfile, or by PyAV where libsndfile cannot, in blocks of bounded size.

Whether a file is whole is judged by its own structure (`extents`, `container_damage`, `mpeg_audio`), for
decoders read what is there, and by the checksums of its format. Any input gives samples or a `MediaError`; a format
that needs a package that is not installed raises `MissingExtraError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError, optional_import
from mm_assets.media import flac, opus
from mm_assets.media.container_damage import find_damage, ogg_links
from mm_assets.media.content_types import Buffer
from mm_assets.media.extents import Extent, extent_of, wav_chunks, wav_with_size
from mm_assets.media.header import size_of_id3
from mm_assets.media.mpeg_audio import FrameRun, check_frames, frame_offsets, mp3_with_length, walk_mp3
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.stderr import without_mpg123_messages

if TYPE_CHECKING:
    from av.container import InputContainer

__all__ = ["CODEC_OF_TYPE", "SHORT_SUBTYPES", "OpenAudio", "open_audio", "read_audio_range"]

CODEC_OF_TYPE = {
    "audio/wav": "wav",
    "audio/flac": "flac",
    "audio/ogg": "ogg",
    "audio/mpeg": "mp3",
    "audio/aiff": "aiff",
    "audio/basic": "au",
    "audio/x-caf": "caf",
    "audio/x-w64": "w64",
    "audio/mp4": "mp4",
    "video/mp4": "mp4",
    "video/quicktime": "mp4",
    "video/3gpp": "mp4",
    "audio/aac": "aac",
    "audio/ac3": "ac3",
    "audio/eac3": "ac3",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
    "audio/x-wavpack": "wavpack",
    "video/x-ms-asf": "asf",
    "audio/amr": "amr",
}
"""Codec, in the sense of `AudioInfo`, of each content type that may be an audio file."""

SHORT_SUBTYPES = ("PCM_16", "PCM_S8", "PCM_U8")
_PCM_BYTES = {"PCM_U8": 1, "PCM_S8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "ULAW": 1, "ALAW": 1}
_FLOAT_BYTES = {"FLOAT": 4, "DOUBLE": 8}
_BY_AV = ("mp4", "aac", "ac3", "matroska", "wavpack", "asf", "amr")
_OGG_BY_AV = (b"\x7fFLAC", b"Speex   ")
_HAS_EXTENT = ("wav", "aiff", "au", "caf", "w64")
_DEMUXERS = {"mp4": "mov", "matroska": "matroska", "asf": "asf", "ogg": "ogg"}  # FFmpeg's names
_SNDFILE = {"WAV": "wav", "WAVEX": "wav", "RF64": "wav", "AIFF": "aiff", "AU": "au", "CAF": "caf", "W64": "w64"}
_SNDFILE |= {"FLAC": "flac", "OGG": "ogg"}  # libsndfile's name of a format: its codec
_WAV_FORMATS = (b"\1\0", b"\2\0", b"\3\0", b"\6\0", b"\7\0", b"\x11\0", b"\x31\0")  # PCM, float, ADPCM, GSM
_OTHER_MAGIC = (b"fLaC", b"OggS", b"FORM", b".snd", b"dns.", b"caff", b"riff")
_BLOCK_SUBTYPES = ("GSM610", "MS_ADPCM", "IMA_ADPCM")
_GSM_BLOCK = 65  # bytes
_VORBIS_ORDER = {  # the channels of Vorbis and Opus, in the order of WAV: left, right, center, low, back, side
    3: (0, 2, 1),
    5: (0, 2, 1, 3, 4),
    6: (0, 2, 1, 5, 3, 4),
    7: (0, 2, 1, 6, 5, 3, 4),
    8: (0, 2, 1, 7, 5, 6, 3, 4),
}
_IMAGE_CODECS = ("mjpeg", "png", "bmp", "gif", "webp", "tiff")  # of covers and of chapters' images
_MAX_FRAMES = 1 << 48  # more than any file has
_BLOCK = 1 << 17  # samples of all channels, that libsndfile decodes at a time
_STATEFUL_SUBTYPES = ("GSM610", "NMS_ADPCM", "G721_32")  # whose samples follow from all before them
# Samples that are decoded before those of a range, and dropped: the frames of layer III take bits from up to 511 bytes
# before them, which at the lowest rates are 36 frames.
_MPEG_LEAD = 48 * 1152
_HEAD_FRAMES = 8  # of AAC, whose samples are counted: fewer are not known for such a file
_LEAD_FRAMES = 16  # of AAC before a range: what it carries from one to the next
_FINE = 4096  # samples per channel, where the end of what decodes is looked for
_UNSUPPORTED = 4  # libsndfile's code of a known container with an encoding that it does not read
_MD5_BITS = {8: "int16", 16: "int16", 24: "int32"}  # what libsndfile reads samples of so many bits as


@dataclass(frozen=True, kw_only=True)
class OpenAudio:
    """An open audio file.

    Attributes:
        sample_rate: Hz.
        channels: at least 1.
        num_frames: samples per channel; None where decoding alone determines it.
        subtype: how samples are stored: libsndfile's name, or FFmpeg's name of the codec in upper case.
        blocks: decodes to (n, channels) float32, or int16 for the argument "int16", which only `SHORT_SUBTYPES` take.
        claimed_seconds: the length that the header promises; None where it has none.
        is_plain: whether samples are stored as they are, so that every run of bytes decodes.
    """

    sample_rate: int
    channels: int
    num_frames: int | None
    subtype: str
    blocks: Callable[[str], Iterator[npt.NDArray[Any]]]
    claimed_seconds: float | None = None
    is_plain: bool = False


@contextmanager
def open_audio(data: Buffer, codec: str, *, length: int = 0, whole: bool = True) -> Iterator[OpenAudio]:
    """Open a file of a codec of `CODEC_OF_TYPE`.

    Args:
        data: the file's bytes.
        codec: of the file.
        length: samples per channel by the file's record, for a FLAC whose header has no length, for a WAV in blocks, of
            which earlier releases recorded more, and for a chain of Ogg files, of which they recorded the first.
        whole: refuse a file that is truncated or damaged by its own structure; else read what is there.

    Raises:
        MediaError: the file is damaged, or not audio of this codec; also from its blocks.
    """
    view = memoryview(data).cast("B")
    with ExitStack() as stack:
        try:
            sound = stack.enter_context(_opener(view, codec, length))
        except _UnsupportedError:
            sound = stack.enter_context(_open_av(view, codec))
        except MediaError:
            is_wav = codec == "wav" and bytes(view[:4]) in (b"RIFF", b"RF64")
            if not is_wav or bytes(view[20:22]) in _WAV_FORMATS:
                if whole:  # a file that is truncated early is not opened, and the decoder's words do not say why
                    _check_whole(view, codec, None)
                raise
            sound = stack.enter_context(_open_av(view, codec))  # an encoding that libsndfile does not know
        if whole:
            _check_whole(view, codec, sound)
        yield sound


def _opener(view: memoryview, codec: str, length: int) -> AbstractContextManager[OpenAudio]:
    packet = 27 + view[26] if codec == "ogg" and len(view) > 26 else 0  # the first one, which names Ogg's codec
    head = bytes(view[packet : packet + 8])
    if codec in _BY_AV or head.startswith(_OGG_BY_AV) or (head == b"OpusHead" and opus.has_holes(view)):
        return _open_av(view, codec)
    if codec == "ogg" and len(links := ogg_links(view)) > 1:
        return _open_chain(links, length)
    return _open_sndfile(view, codec, length)


@contextmanager
def _open_chain(links: list[memoryview], length: int) -> Iterator[OpenAudio]:
    """An Ogg of several recordings, of which decoders give the first alone; earlier releases recorded its `length`."""
    with _opener(links[0], "ogg", 0) as first:
        facts = (first.sample_rate, first.channels)

    def blocks(dtype: str) -> Iterator[npt.NDArray[Any]]:
        done = 0
        for link in links:
            if length and done == length:
                return
            with _opener(link, "ogg", 0) as sound:
                if (sound.sample_rate, sound.channels) != facts:
                    found = f"{sound.channels} channels at {sound.sample_rate} Hz"
                    raise MediaError("<audio>", f"ogg changes to {found}, expected {facts[1]} channels at {facts[0]}")
                for block in sound.blocks(dtype):
                    done += len(block)
                    yield block

    yield dataclasses.replace(first, num_frames=None, blocks=blocks, claimed_seconds=None)


class _UnsupportedError(MediaError):
    """libsndfile knows the container, but not what is in it."""


# --- whole or not -----------------------------------------------------------------------------------------------------


def _check_whole(view: memoryview, codec: str, sound: OpenAudio | None) -> None:
    """Refuse a file whose structure says that a part of it is missing or damaged; `sound` is None if it is not open."""
    if codec in _DEMUXERS:
        damage = find_damage(view, _DEMUXERS[codec])
        if damage is not None:
            raise MediaError("<audio>", f"{codec} is damaged: {_share(sound)}, {damage}")
    elif codec in ("aac", "ac3", "amr", "wavpack"):
        try:
            check_frames(view, codec)
        except MediaError as error:
            raise MediaError("<audio>", f"{error.reason}, {_share(sound)}") from error
    elif codec in _HAS_EXTENT:
        extent = extent_of(view, codec)
        if extent is not None and not extent.is_whole:
            raise MediaError("<audio>", f"{codec} is truncated: {_extent_share(extent, sound)}")


def _extent_share(extent: Extent, sound: OpenAudio | None) -> str:
    """How much of a file is there, in seconds where that is known."""
    if sound is not None:
        size = {**_PCM_BYTES, **_FLOAT_BYTES}.get(sound.subtype, 0) * sound.channels * sound.sample_rate
        if size:
            return f"{_of(extent.there / size, extent.claimed / size)} are there"
    return f"{extent.there} of {extent.claimed} bytes are there"


def _share(sound: OpenAudio | None) -> str:
    """How much of a file decodes, in seconds."""
    if sound is None:
        return "none of it decodes"
    return f"{_of(_seconds_there(sound), sound.claimed_seconds)} decode"


def _of(there: float, claimed: float | None) -> str:
    """Seconds, as "1.20 of 2.40 s"; of short audio more digits."""
    digits = 2 if (claimed or there) >= 1 else 4
    return f"{there:.{digits}f}" + (f" of {claimed:.{digits}f} s" if claimed else " s")


def _seconds_there(sound: OpenAudio) -> float:
    """Seconds that decode."""
    count = 0
    try:
        for block in sound.blocks("float32"):
            count += len(block)
    except MediaError:
        pass  # what decodes up to here is what is asked for
    return count / sound.sample_rate


# --- libsndfile -------------------------------------------------------------------------------------------------------


@contextmanager
def _errors(codec: str) -> Iterator[None]:
    """Every error of soundfile as a `MediaError`, without the address of the file object in its text.

    `MemoryError` and `OSError` pass: they are the host's, and say nothing about the file.
    """
    import soundfile

    try:
        yield
    except MediaError:
        raise
    except (soundfile.SoundFileError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        reason = error.error_string if isinstance(error, soundfile.LibsndfileError) else str(error)
        if isinstance(error, soundfile.LibsndfileError) and error.code == _UNSUPPORTED:
            raise _UnsupportedError("<audio>", f"{codec} cannot be decoded: {reason}") from error
        raise MediaError("<audio>", f"{codec} cannot be decoded: {reason.strip().rstrip('.')}") from error


@contextmanager
def _open_sndfile(view: memoryview, codec: str, length: int) -> Iterator[OpenAudio]:
    with optional_import("soundfile", "reading an audio file"):
        import soundfile
    del soundfile
    kind, file = codec, view
    if codec == "wav" and (body := _mpeg_in_wav(view)) is not None:
        kind, file = "mp3", body
    if kind == "mp3":
        yield from _open_mp3(file)
        return
    if codec == "flac":
        file = memoryview(flac.with_known_length(view, length))
    elif kind == "wav":
        file = memoryview(wav_with_size(view))
    with _opened(file, codec) as sound:
        if _SNDFILE.get(sound.format, codec) != codec:  # it opens whatever it knows
            raise MediaError("<audio>", f"found {sound.format}, expected {codec}")
        count = int(sound.frames)
        bytes_each = _PCM_BYTES.get(sound.subtype) if codec not in ("flac", "ogg") else None
        if bytes_each is not None and (extent := extent_of(view, codec)) is not None:
            # libsndfile takes what follows the samples of a W64 for more of them.
            count = min(count, extent.claimed // (bytes_each * int(sound.channels)))
        if codec == "wav" and str(sound.subtype) in _BLOCK_SUBTYPES:
            count = _coded_length(view, int(sound.frames), length)
        is_ogg = codec == "ogg"
        blocks = _blocks_of(sound, file, codec, _MAX_FRAMES if is_ogg else count)
        yield OpenAudio(
            sample_rate=int(sound.samplerate),
            channels=int(sound.channels),
            num_frames=None if is_ogg else max(0, count),  # the times of an Ogg's pages may have holes
            subtype=str(sound.subtype),
            blocks=_in_wav_order(blocks, int(sound.channels)) if is_ogg else blocks,
            claimed_seconds=count / int(sound.samplerate) if is_ogg else None,
            is_plain=bytes_each is not None,
        )


def _coded_length(view: memoryview, decoded: int, length: int) -> int:
    """Samples per channel of a WAV in blocks of many samples: the chunk ``fact`` says how many the last one has.

    Args:
        view: the file.
        decoded: samples that libsndfile makes of its blocks.
        length: of the file's record, or 0; earlier releases recorded what `decoded` was.
    """
    wav = wav_chunks(view)
    if wav is None or not wav.samples_per_block:
        return decoded
    there = len(view) - wav.samples_at
    size = there if wav.samples_size is None else min(there, wav.samples_size)
    if wav.block_size == _GSM_BLOCK:  # libsndfile counts a byte that makes the size even as one more block
        count = min(decoded, size // wav.block_size * wav.samples_per_block)
    else:
        count = decoded
    # A number that the last block does not hold is not that of this file.
    exact = wav.num_samples if count - wav.samples_per_block < wav.num_samples <= count else count
    return length if exact < length <= decoded else exact


def _in_wav_order(
    blocks: Callable[[str], Iterator[npt.NDArray[Any]]], channels: int
) -> Callable[[str], Iterator[npt.NDArray[Any]]]:
    """The blocks of an Ogg with its channels in the order of every other format."""
    order = _VORBIS_ORDER.get(channels)
    if order is None:
        return blocks
    return lambda dtype: (block[:, order] for block in blocks(dtype))


class _File:
    """A buffer as a file for soundfile, which writes to standard error if it seeks before the start of `io.BytesIO`."""

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data).cast("B")
        self._at = 0

    def readinto(self, target: Any) -> int:
        piece = self._view[self._at : self._at + len(target)]
        size = len(piece)
        target[:size] = piece
        self._at += size
        return size

    def read(self, size: int = -1) -> bytes:
        piece = self._view[self._at : len(self._view) if size < 0 else self._at + size]
        self._at += len(piece)
        return bytes(piece)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._view))[whence])
        return self._at

    def tell(self) -> int:
        return self._at


class _Copy(io.BytesIO):
    """A copy of a buffer as a file: libmpg123 reads the header of every frame to seek, and calls would cost more."""

    def seek(self, offset: int, whence: int = 0) -> int:
        return super().seek(max(0, offset + (0, self.tell(), len(self.getbuffer()))[whence]))


@contextmanager
def _opened(file: Buffer | RangedFile, codec: str) -> Iterator[Any]:
    import soundfile

    may_be_mpeg = False
    opened: object = file
    if not isinstance(file, RangedFile):
        may_be_mpeg = _may_be_mpeg(file)
        opened = _Copy(file) if may_be_mpeg else _File(file)
    with _errors(codec), _quiet(may_be_mpeg):
        sound = soundfile.SoundFile(opened)
    if _is_mpeg(sound):
        # Else soundfile seeks after each read to where it is, and libmpg123 loses what the next frames take from those
        # before them.
        sound.seekable = lambda: False
    try:
        yield sound
    finally:
        with _errors(codec), _quiet(_is_mpeg(sound)):
            sound.close()


def _quiet(is_mpeg: bool) -> AbstractContextManager[None]:
    return without_mpg123_messages() if is_mpeg else nullcontext()


def _may_be_mpeg(file: Buffer) -> bool:
    """Whether libsndfile may open a file by libmpg123: unless its first bytes say something else."""
    head = bytes(file[:22])
    if head[:4] in (b"RIFF", b"RF64"):
        return head[20:22] not in _WAV_FORMATS
    return head[:4] not in _OTHER_MAGIC


def _is_mpeg(sound: Any) -> bool:
    return str(sound.subtype).startswith("MPEG")


def _blocks_of(sound: Any, file: memoryview, codec: str, count: int) -> Callable[[str], Iterator[npt.NDArray[Any]]]:
    def blocks(dtype: str) -> Iterator[npt.NDArray[Any]]:
        with _errors(codec), _quiet(_is_mpeg(sound)):
            if sound.seekable() and sound.tell():
                sound.seek(0)
        if codec == "flac":
            return _checked_flac(file, sound, count, dtype)
        return _read_blocks(sound, codec, count, dtype)

    return blocks


def _read_blocks(sound: Any, codec: str, count: int, dtype: str, *, skipped: int = 0) -> Iterator[npt.NDArray[Any]]:
    size, left = max(1, _BLOCK // sound.channels), count + skipped
    is_mpeg = _is_mpeg(sound)
    while left > 0:
        # With a number of frames: soundfile refuses to read what it cannot seek in, such as GSM, to its end.
        with _errors(codec), _quiet(is_mpeg):
            block = sound.read(frames=min(size, left), dtype=dtype, always_2d=True)
        if not len(block):
            return
        left -= len(block)
        dropped = min(skipped, len(block))
        skipped -= dropped
        yield block[dropped:]


def _checked_flac(file: memoryview, sound: Any, count: int, dtype: str) -> Iterator[npt.NDArray[Any]]:
    """The blocks, then the comparison with the MD5 of the samples that the header has; zeros mean that it has none.

    libFLAC compares the checksums of frames, so that the MD5 finds frames that are missing or in another order.
    """
    start = size_of_id3(file)
    bits = flac.read_stream_info(file, start).bits
    expected = flac.md5_of(file, start)
    digest = hashlib.md5(usedforsecurity=False) if bits in _MD5_BITS and any(expected) else None
    stored = dtype if digest is None else _MD5_BITS[bits]
    done = 0
    try:
        for block in _read_blocks(sound, "flac", count, stored):
            done += len(block)
            if digest is not None:
                digest.update(_flac_bytes(block, bits))
            if stored != dtype:  # exact, and as libsndfile scales
                scale = np.float32(1 / (1 << 8 * block.itemsize - 1))
                block = np.multiply(block, scale, dtype=np.float32, casting="unsafe")
            yield block
    except MediaError as error:
        raise MediaError("<audio>", f"flac is damaged: {_flac_share(file, count)} ({error.reason})") from error
    if done < count:
        found = f"{_of(done / sound.samplerate, count / sound.samplerate)} are there"
        raise MediaError("<audio>", f"flac is truncated: {found}")
    if digest is not None and digest.digest() != expected:
        raise MediaError("<audio>", "flac is damaged: its samples do not have the MD5 in its header")


def _flac_bytes(block: npt.NDArray[Any], bits: int) -> bytes | memoryview:
    """Samples as FLAC's MD5 counts them: little-endian integers of whole bytes (RFC 9639, section 8.2)."""
    if bits == 16:
        return np.ascontiguousarray(block, dtype="<i2").data
    if bits == 8:
        return (block >> 8).astype(np.int8).data
    return np.ascontiguousarray(block, dtype="<i4").view(np.uint8).reshape(-1, 4)[:, 1:].tobytes()


def _flac_share(file: memoryview, count: int) -> str:
    """How much of a FLAC decodes up to its first damaged frame."""
    done = 0
    with _opened(file, "flac") as sound:
        rate = int(sound.samplerate)
        try:
            while len(block := _next_fine(sound)):
                done += len(block)
        except MediaError:
            pass  # the damage: what decodes before it is what is asked for
    return f"{_of(done / rate, count / rate)} decode"


def _next_fine(sound: Any) -> npt.NDArray[Any]:
    with _errors("flac"):
        block: npt.NDArray[Any] = sound.read(frames=_FINE, dtype="int16", always_2d=True)
    return block


# --- MP3 --------------------------------------------------------------------------------------------------------------


def _mpeg_in_wav(view: memoryview) -> memoryview | None:
    """The frames of an MP3 in a WAV; None for any other WAV."""
    wav = wav_chunks(view)
    if wav is None or wav.format_size < 16 or bytes(view[wav.format_at :][:2]) not in (b"\x50\0", b"\x55\0"):
        return None
    return view[wav.samples_at :][: wav.samples_size]


def _open_mp3(file: memoryview) -> Iterator[OpenAudio]:
    """An MP3 or the one in a WAV: its length is libmpg123's where a Xing header has it, else that of all frames."""
    run = walk_mp3(file)
    rate, claimed = run.sample_rate, run.claimed_frames
    length = run.num_samples / rate
    with ExitStack() as stack:
        sound, skipped = _opened_mp3(stack, file, run, run.num_samples)
        count = int(sound.frames) if run.has_xing else run.num_samples
        is_new = True

        def blocks(dtype: str) -> Iterator[npt.NDArray[Any]]:
            if run.problem or run.num_frames + 1 < (claimed or 0):
                why = run.problem or f"{run.num_frames} of {claimed} frames"
                share = _of(length, claimed and length / max(run.num_frames, 1) * claimed)
                raise MediaError("<audio>", f"mp3 is damaged: {share} are there, {why}")
            nonlocal is_new
            if not is_new:  # else no seek: it would change the last bit of some samples
                with _errors("mp3"), _quiet(True):
                    sound.seek(0)
            is_new = False
            yield from _read_blocks(sound, "mp3", count, dtype, skipped=skipped)

        yield OpenAudio(
            sample_rate=int(sound.samplerate),
            channels=int(sound.channels),
            num_frames=count,
            subtype=str(sound.subtype),
            blocks=blocks,
        )


def _opened_mp3(stack: ExitStack, file: memoryview, run: FrameRun, length: int) -> tuple[Any, int]:
    """An MP3 that libsndfile decodes to its end after `length` samples, and the samples to drop from its start."""
    if run.has_xing:
        return stack.enter_context(_opened(file, "mp3")), 0
    try:
        sound = stack.enter_context(_opened(file, "mp3"))
    except MediaError:  # so short that libmpg123 does not know it for an MP3
        sound = None
    if sound is not None and sound.frames >= length:
        return sound, 0
    longer, skipped = mp3_with_length(file, run)
    return stack.enter_context(_opened(longer, "mp3")), skipped


# --- a range of a file ------------------------------------------------------------------------------------------------


def read_audio_range(
    data: Buffer | RangedFile, codec: str, length: int, start: int, stop: int, dtype: str
) -> tuple[npt.NDArray[Any], int, str] | None:
    """Decode some samples of a file by seeking to them; they are those that decoding all of it gives.

    The structure of the whole file is not checked, nor a checksum over it.

    Args:
        data: the file's bytes, or a file that is read by ranges.
        codec: of the file.
        length: samples per channel of the whole file, by its record.
        start: first sample, at least 0.
        stop: the sample to end before, at most `length`.
        dtype: ``float32``, or ``int16`` for the subtypes in `SHORT_SUBTYPES`, which others ignore.

    Returns:
        (stop - start, channels) samples, the rate in Hz and the subtype; None if the file must be decoded from its
        start, which `open_audio` does.

    Raises:
        MediaError: the file is damaged there, or not audio of this codec.
    """
    view = data.head() if isinstance(data, RangedFile) else memoryview(data).cast("B")
    head = bytes(view[27 + view[26] :][:8]) if codec == "ogg" and len(view) > 26 else b""
    if codec in _BY_AV or head.startswith(_OGG_BY_AV):
        return _read_av_range(data, codec, length, start, stop)
    if isinstance(data, RangedFile) and not _is_read_in_parts(view, codec):
        return None
    with ExitStack() as stack:
        try:
            if codec == "mp3" or (codec == "wav" and _mpeg_in_wav(view) is not None):
                file = view if codec == "mp3" else _mpeg_in_wav(view)
                run = walk_mp3(file if file is not None else view, max_frames=1)
                sound, skipped = _opened_mp3(stack, file if file is not None else view, run, length)
            elif isinstance(data, RangedFile):
                sound, skipped = stack.enter_context(_opened(data, codec)), 0
            else:
                known = flac.with_known_length(view, length) if codec == "flac" else wav_with_size(view)
                sound, skipped = stack.enter_context(_opened(known, codec)), 0
        except MediaError:
            return None  # `open_audio` says what is wrong, or knows another decoder
        is_mpeg = _is_mpeg(sound)
        # An Ogg whose pages have other times than their packets has another length, and a chain of several files too.
        if sound.frames < length or (codec == "ogg" and sound.frames != length):
            return None
        if not (is_mpeg or sound.seekable()):
            return None
        if str(sound.subtype) in _STATEFUL_SUBTYPES:
            return None
        used = dtype if str(sound.subtype) in SHORT_SUBTYPES else "float32"
        lead = min(start, _MPEG_LEAD) if is_mpeg else 0
        with _errors(codec), _quiet(is_mpeg):
            if start - lead + skipped:
                sound.seek(start - lead + skipped)
            samples = sound.read(frames=stop - start + lead, dtype=used, always_2d=True)[lead:]
        if len(samples) < stop - start:
            raise MediaError("<audio>", f"{codec} is truncated: sample {start + len(samples)} of {length} is missing")
        order = _VORBIS_ORDER.get(int(sound.channels)) if codec == "ogg" else None
        return samples if order is None else samples[:, order], int(sound.samplerate), str(sound.subtype)


def _is_read_in_parts(head: memoryview, codec: str) -> bool:
    """Whether libsndfile finds samples in a file without reading it to its end, by the file's first bytes."""
    try:
        if codec == "flac":
            return flac.read_stream_info(head, size_of_id3(head)).num_frames > 0
        if codec == "wav":
            wav = wav_chunks(head)
            return wav is not None and wav.samples_size is not None and _mpeg_in_wav(head) is None
    except MediaError:
        return False
    return codec in ("ogg", "aiff", "au", "caf", "w64")


# --- PyAV -------------------------------------------------------------------------------------------------------------


@contextmanager
def _open_av(view: memoryview, codec: str) -> Iterator[OpenAudio]:
    from mm_assets.media.sound import MAX_SOUND_CHANNELS, MAX_SOUND_RATE
    from mm_assets.media.video import audio_stream_of, open_media

    with open_media(view) as (container, _):
        has_video = _has_moving_pictures(container)
    with open_media(view) as (container, content_type):
        if has_video:
            raise MediaError("<audio>", f"{codec} file has video, expected audio alone (a clip field takes it)")
        stream = audio_stream_of(container)
        if stream is None:
            raise MediaError("<audio>", f"{codec} file has no audio stream that can be decoded")
        name = stream.codec_context.name.upper()
        # The other demuxers guess the duration from the size of the file.
        seconds = _duration(container) if codec in ("mp4", "matroska", "wavpack") else None
        first = next(_av_blocks(container, codec, content_type), None)
        if first is None:
            raise MediaError("<audio>", f"{codec} file has no samples, expected at least one")
        facts = first[:2]
    if not 1 <= facts[0] <= MAX_SOUND_RATE or not 1 <= facts[1] <= MAX_SOUND_CHANNELS:
        raise MediaError("<audio>", f"{codec} has {facts[1]} channels at {facts[0]} Hz")

    def blocks(dtype: str) -> Iterator[npt.NDArray[Any]]:
        with open_media(view) as (container, content_type):
            for rate, channels, samples in _av_blocks(container, codec, content_type):
                if (rate, channels) != facts:
                    found = f"{channels} channels at {rate} Hz"
                    raise MediaError(
                        "<audio>", f"{codec} changes to {found}, expected {facts[1]} channels at {facts[0]}"
                    )
                yield samples

    yield OpenAudio(
        sample_rate=facts[0],
        channels=facts[1],
        num_frames=None,
        subtype=name,
        blocks=blocks,
        claimed_seconds=seconds,
    )


def _read_av_range(
    data: Buffer | RangedFile, codec: str, length: int, start: int, stop: int
) -> tuple[npt.NDArray[np.float32], int, str] | None:
    from mm_assets.media.sound import read_sound_range

    try:
        if codec == "aac":
            return None if isinstance(data, RangedFile) else _read_adts(memoryview(data), length, start, stop)
        found = read_sound_range(data, start, stop, length)
    except MediaError as error:
        raise MediaError("<audio>", f"{codec}: {error.reason}") from error
    return None if found is None else (*found, codec.upper())


def _read_adts(view: memoryview, length: int, start: int, stop: int) -> tuple[npt.NDArray[np.float32], int, str] | None:
    """Samples of an AAC file without a container, from their frames and some before them as a file of their own.

    FFmpeg itself would guess their place from the bit rate.
    """
    head = frame_offsets(view, _HEAD_FRAMES)
    first = None if head is None else _decoded_frames(view[head[0] : head[-1]])
    if first is None or length % first[1]:
        return None
    size = first[1]
    begin, end = max(0, start // size - _LEAD_FRAMES), -(-stop // size)
    offsets = frame_offsets(view, end)
    found = None if offsets is None else _decoded_frames(view[offsets[begin] : offsets[end]])
    if found is None or found[1:] != first[1:] or len(found[0]) != (end - begin) * size:
        return None
    return found[0][start - begin * size : stop - begin * size], found[2], "AAC"


def _decoded_frames(view: memoryview) -> tuple[npt.NDArray[np.float32], int, int] | None:
    """The samples of a run of frames, the number in each, and their rate; None if frames differ."""
    from mm_assets.media.video import open_media

    with open_media(view) as (container, content_type):
        blocks = list(_av_blocks(container, "aac", content_type))
    facts = {(rate, samples.shape) for rate, _, samples in blocks}
    if len(facts) != 1:
        return None
    ((rate, shape),) = facts
    return np.concatenate([samples for *_, samples in blocks]), shape[0], rate


def _has_moving_pictures(container: InputContainer) -> bool:
    """Whether a file has video: not cover pictures, also as a track of one frame, nor images of chapters.

    Images change less than once a second, as those of an audiobook's chapters do. Packets are read, not decoded.
    """
    from av.stream import Disposition

    tracks = [one for one in container.streams.video if not one.disposition & Disposition.attached_pic]
    if not tracks:
        return False
    seconds = _duration(container) or 0
    counts = dict.fromkeys((track.index for track in tracks), 0)
    for packet in container.demux(tracks):
        counts[packet.stream.index] += bool(packet.size)
    return any(
        counts[track.index] > (max(1, seconds) if track.codec_context.name in _IMAGE_CODECS else 1)
        for track in tracks
        if track.codec_context is not None
    )


def _av_blocks(
    container: InputContainer, codec: str, content_type: str
) -> Iterator[tuple[int, int, npt.NDArray[np.float32]]]:
    """Rate, channels and samples of each decoded frame, without gaps between them, as FFmpeg's command line does."""
    from mm_assets.media.sound import samples_of_frame, sound_frames
    from mm_assets.media.video import audio_stream_of

    stream = audio_stream_of(container)
    if stream is None:
        return
    try:
        for frame in sound_frames(container, stream, content_type):
            yield frame.sample_rate, frame.layout.nb_channels, samples_of_frame(frame)
    except MediaError as error:
        raise MediaError("<audio>", f"{codec}: {error.reason}") from error


def _duration(container: InputContainer) -> float | None:
    stream = next(iter(container.streams.audio), None)
    if stream is not None and stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / 1_000_000 if container.duration else None
