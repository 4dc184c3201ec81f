"""Audio: files stored as they are, or samples as PCM, float or FLAC. Decoding gives samples and their rate.

NumPy reads PCM and float payloads, libsndfile or PyAV reads files. Nothing is resampled while it is encoded, or mixed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, LimitError, MediaError, optional_import
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.base import (
    Encoded,
    Field,
    are_equal,
    corrupt,
    join_arrays,
    over_limit,
    split_rows,
    stored_array,
    truncated,
)
from mm_assets.fields.facts import Fact, MediaLength
from mm_assets.fields.shown import ShownFile, ShownSamples, StoredBytes
from mm_assets.media.content_types import Buffer
from mm_assets.media.sound import resample
from mm_assets.media.sound_files import SHORT_SUBTYPES, OpenAudio, open_audio
from mm_assets.media.sounds import AudioInfo, probe_audio
from mm_assets.summaries import ArrayValue, describe

__all__ = ["Audio", "AudioField", "samples_of"]

_PCM16, _FLOAT32 = 1, 2
_CODECS = {"pcm16": _PCM16, "float32": _FLOAT32, "wav": 3, "flac": 4, "ogg": 5, "mp3": 6}
# From 32 on: a clip's record uses 16 and 17 for where its audio is.
_CODECS |= {"aiff": 32, "au": 33, "caf": 34, "w64": 35, "mp4": 36, "aac": 37, "ac3": 38, "matroska": 39}
_CODECS |= {"wavpack": 40, "asf": 41, "amr": 42}
_CODEC_NAMES = {number: name for name, number in _CODECS.items()}
_RAW_DTYPES: dict[int, np.dtype[Any]] = {_PCM16: np.dtype("<i2"), _FLOAT32: np.dtype("<f4")}
_RAW_ENCODINGS = ("pcm16", "float32")
_NUM_FRAMES = slice(8, 16)  # bytes of the record
_LOSSY = ("ogg", "mp3", "mp4", "aac", "ac3", "matroska", "asf", "amr")  # as most of their files are
_ENCODINGS = ("keep", *_RAW_ENCODINGS, "flac")

MAX_CHANNELS = 1024  # libsndfile's own limit
MAX_FLAC_CHANNELS = 8
MAX_FLAC_RATE = 655_350  # Hz, the width of STREAMINFO's field
MAX_RATE = 2**31 - 1  # Hz, libsndfile's int
_FIRST_SAMPLES = 1 << 22  # of all channels, that a file is decoded to at first

DEFAULT_MAX_FRAMES = 4 * 3600 * 48_000  # four hours at 48 kHz


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Audio(ArrayValue):
    """Decoded audio.

    Attributes:
        samples: (num_frames, num_channels), float32 in [-1, 1] or int16.
        sample_rate: Hz.
    """

    samples: npt.NDArray[Any]
    sample_rate: int

    @property
    def duration_seconds(self) -> float:
        """Length in seconds."""
        return float(self.samples.shape[0] / self.sample_rate)


@dataclass(frozen=True, kw_only=True)
class AudioField(Field):
    """Audio.

    Value: `Audio`; a tuple (samples, sample_rate); bare samples where the field's `sample_rate` is set; or an audio
    file, as bytes or a `Path`: of libsndfile's formats, or with the extra ``video`` of PyAV's (docs/fields.md). Samples
    are (num_frames,) or (num_frames, num_channels), int16 or float32; float64, tensors and lists of floats become
    float32.
    Decodes to `Audio`, always with two dimensions. An int16 sample x and the float x / 32768 are equivalent, so
    int16 comes back exactly from either.

    Attributes:
        encoding: ``keep`` stores files as they are, int16 samples as PCM and float32 samples as floats. ``pcm16``,
            ``float32`` and ``flac`` (16 bits, lossless) store samples so, and files decoded and encoded so. Floats
            beyond [-1, 1] do not fit 16 bits and are refused, not clipped.
        sample_rate: Hz that every value must have: another is refused while it is encoded. Where a payload has another,
            as in a dataset that is read with this setting, decoding resamples it (soxr, HQ; clipped to [-1, 1]). None
            for any.
        decoded: dtype of decoded samples, ``float32`` or ``int16``.
        max_frames: samples per channel that are encoded or decoded at most.
    """

    TYPE_ID: ClassVar[int] = 40
    VALUE_TYPE: ClassVar[type] = Audio
    CONTENT_KIND: ClassVar[str] = "audio"
    TAKES_JSON: ClassVar[bool] = False
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [("sample_rate", "<u4"), ("num_channels", "<u2"), ("codec", "u1"), ("_pad", "u1"), ("num_frames", "<u8")]
    )
    FACTS: ClassVar[tuple[type[Fact], ...]] = (MediaLength,)
    LIMITS: ClassVar[tuple[str, ...]] = ("max_frames",)

    encoding: str = "keep"
    sample_rate: int | None = None
    decoded: str = "float32"
    max_frames: int = DEFAULT_MAX_FRAMES

    def __post_init__(self) -> None:
        self._expect_choice("encoding", _ENCODINGS)
        self._expect_choice("decoded", ("float32", "int16"))
        self._expect_int("sample_rate", 1, MAX_RATE, optional=True)
        self._expect_int("max_frames", 1, 2**40)

    @property
    def keeps_bytes(self) -> bool:
        """With the encoding ``keep``."""
        return self.encoding == "keep"

    @property
    def empty_value(self) -> Mapping[str, Any]:
        """``samples`` alone: (0, 0) of `decoded`."""
        return {"samples": np.empty((0, 0), self.decoded)}

    @property
    def decodes_in_parallel(self) -> bool:
        """Unless samples are stored as they are: libsndfile is called without the interpreter lock."""
        return self.encoding not in _RAW_ENCODINGS

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: Audio | tuple[npt.NDArray[Any], int] | npt.NDArray[Any] | Buffer | Path) -> Encoded:
        """Encode samples, or an audio file's bytes or path."""
        if isinstance(value, Path):
            value = self._read(value)
        if isinstance(value, Buffer):
            data = bytes(value)
            info = self._probe(data)
            if self.encoding == "keep":
                return Encoded(self._record(info.sample_rate, info.channels, info.codec, info.num_frames), data)
            rate = info.sample_rate
            # 16 bits stay 16 bits; a lossy codec may overshoot, which every decoder to 16 bits clips.
            is_16bit = info.subtype in SHORT_SUBTYPES or info.codec in _LOSSY
            dtype = np.dtype(np.int16 if is_16bit and self.encoding != "float32" else np.float32)
            try:
                shape = (info.num_frames, info.channels)
                samples = _decode_file(data, info.codec, shape, rate, dtype, max_frames=self.max_frames)
            except ValueError as error:  # a FormatError is one: the bytes are the caller's here
                found = f"{info.codec} bytes that cannot be decoded ({error})"
                raise self._wrong_content(found, "an audio file") from error
        else:
            samples, rate = self._check_samples(value)
        codec = self._codec_of(samples)
        if codec == "float32":
            data = _to_float(samples).tobytes()
        elif codec == "pcm16":
            data = self._to_int16(samples).tobytes()
        else:
            data = self._encode_flac(self._to_int16(samples), rate)
        return Encoded(self._record(rate, samples.shape[1], codec, samples.shape[0]), data)

    def _codec_of(self, samples: npt.NDArray[Any]) -> str:
        if self.encoding == "keep":
            return "pcm16" if samples.dtype == np.int16 else "float32"
        # FLAC cannot hold audio without samples: its header would say "unknown length".
        return "pcm16" if self.encoding == "flac" and samples.shape[0] == 0 else self.encoding

    def _read(self, path: Path) -> bytes:
        try:
            size = path.stat().st_size
            self._expect_data_size(size)
            return path.read_bytes()
        except OSError as error:
            raise self._wrong_content(f"the path {str(path)!r} ({error.strerror})", "an audio file") from error

    def check(self, value: Audio | tuple[npt.NDArray[Any], int] | npt.NDArray[Any] | Buffer | Path) -> None:
        """Read the header of a file that is kept; encode everything else."""
        if isinstance(value, Path):
            value = self._read(value)
        if self.encoding != "keep":
            self.encode(value)
        elif isinstance(value, Buffer):
            self._probe(value)
        else:
            self._check_samples(value)

    def _record(self, sample_rate: int, num_channels: int, codec: str, num_frames: int) -> bytes:
        return self._pack_record(sample_rate, num_channels, _CODECS[codec], num_frames)

    def _probe(self, data: Buffer) -> AudioInfo:
        try:
            info = probe_audio(data, max_frames=self.max_frames, exact=True)
        except MediaError as error:
            raise self._wrong_content(f"bytes that cannot be read ({error.reason})", "an audio file") from error
        self._check_extent(info.num_frames, info.channels, info.sample_rate)
        return info

    def _check_extent(self, num_frames: int, num_channels: int, sample_rate: int) -> None:
        if num_frames > self.max_frames:
            raise self._too_large(f"{num_frames} samples per channel", f"at most {self.max_frames}", "max_frames")
        if not 1 <= num_channels <= MAX_CHANNELS:
            raise self._wrong_content(f"{num_channels} channels", f"1 to {MAX_CHANNELS}")
        if self.sample_rate is not None and sample_rate != self.sample_rate:
            expected = f"{self.sample_rate} Hz: nothing is resampled while it is encoded"
            detail = "audio has another sample rate"
            raise LimitError(
                type(self).__name__, detail, setting="sample_rate", found=f"{sample_rate} Hz", expected=expected
            )
        if not 1 <= sample_rate <= MAX_RATE:
            raise self._wrong_content(f"audio of {sample_rate} Hz", f"1 to {MAX_RATE} Hz")

    def _check_samples(self, value: object) -> tuple[npt.NDArray[Any], int]:
        is_bare = isinstance(value, np.ndarray | list) or hasattr(value, "__array__")
        if is_bare and self.sample_rate is not None:
            value = (value, self.sample_rate)
        expected = (
            "Audio, (samples, sample_rate) or an audio file's bytes or Path; bare samples where sample_rate is set"
        )
        samples, rate = self._within("", samples_of, value, expected)
        self._check_extent(samples.shape[0], samples.shape[1], rate)
        return samples, rate

    def _to_int16(self, samples: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
        if samples.dtype.kind == "f" and samples.size and float(np.abs(samples).max()) > 1.0:
            raise self._wrong_content(
                f"samples up to {float(np.abs(samples).max()):g}", "floats in [-1, 1] for 16 bits"
            )
        return _to_int16(samples)

    def _encode_flac(self, samples: npt.NDArray[np.int16], rate: int) -> bytes:
        with optional_import("soundfile", "AudioField"):
            import soundfile

        if samples.shape[1] > MAX_FLAC_CHANNELS or rate > MAX_FLAC_RATE:
            found = f"{samples.shape[1]} channels at {rate} Hz"
            raise self._wrong_content(found, f"up to {MAX_FLAC_CHANNELS} channels and {MAX_FLAC_RATE} Hz for FLAC")
        target = io.BytesIO()
        try:
            soundfile.write(target, samples, rate, format="FLAC", subtype="PCM_16")
        except (soundfile.SoundFileError, ValueError) as error:
            raise self._wrong_content(f"{describe(samples)} at {rate} Hz ({error})", "what FLAC can hold") from error
        return target.getvalue()

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> Audio:
        """Return `Audio`; samples may be a read-only view of the payload."""
        rate, codec, shape = self._opened_record(metadata)
        view, dtype = as_bytes_view(data), np.dtype(self.decoded)
        raw = _RAW_DTYPES.get(codec)
        if raw is None:
            samples = _decode_file(view, _CODEC_NAMES[codec], shape, rate, dtype, max_frames=self.max_frames)
        else:
            samples = self._raw_samples(view, raw, shape)
        if self.sample_rate not in (None, rate):
            samples, rate = resample(_to_float(samples), rate, self.sample_rate), self.sample_rate
        return Audio(_to_float(samples) if self.decoded == "float32" else _to_int16(samples), rate)

    def _decode_together(self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer]) -> list[Audio] | None:
        """Samples that are stored as one dtype, of one rate and number of channels, and decode to these."""
        if not are_equal(records, but=_NUM_FRAMES) or self.value_layout is not None:
            return None
        rate, codec, (_, num_channels) = self._opened_record(memoryview(records[0]))
        raw = _RAW_DTYPES.get(codec)
        if raw is None:
            return None
        first = self.decode(memoryview(records[0]), datas[0])
        if (first.sample_rate, first.samples.shape[1]) != (rate, num_channels):
            return None  # resampled or mixed, each for itself
        counts = np.ascontiguousarray(records).view(self.metadata_type)["num_frames"].ravel().tolist()
        samples = join_arrays(datas, raw, [count * num_channels * raw.itemsize for count in counts])
        if samples is None or max(counts) > self.max_frames:
            return None
        if raw.kind == "f" and self.decoded == "int16" and not np.isfinite(samples).all():
            return None
        samples = _to_float(samples) if self.decoded == "float32" else _to_int16(samples)
        return [Audio(one, rate) for one in split_rows(samples.reshape(-1, num_channels), counts)]

    def check_decodable(self, metadata: Buffer | np.void, data: Buffer) -> None:
        """Decode a file block by block; of samples, and of a WAV with PCM, only the sizes are compared."""
        rate, codec, shape = self._opened_record(metadata)
        view = as_bytes_view(data)
        raw = _RAW_DTYPES.get(codec)
        if raw is None:
            _check_file(view, _CODEC_NAMES[codec], shape, rate, np.dtype(self.decoded), max_frames=self.max_frames)
        else:
            self._raw_samples(view, raw, shape)

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownFile | ShownSamples:
        """The file, or the samples as they are stored."""
        rate, codec, shape = self._opened_record(metadata)
        raw = _RAW_DTYPES.get(codec)
        if raw is None:
            return ShownFile(offset=0, size=stored.size)
        return ShownSamples(offset=0, size=stored.size, sample_rate=rate, channels=shape[1], dtype=raw)

    def _opened_record(self, metadata: Buffer | np.void) -> tuple[int, int, tuple[int, int]]:
        """Rate, codec and shape of a payload."""
        rate, num_channels, codec, num_frames = self._unpack_record(metadata)
        if codec not in _CODEC_NAMES:
            raise corrupt("audio is of an unknown codec", found=codec, expected=f"one of {_CODEC_NAMES}")
        if not 1 <= num_channels <= MAX_CHANNELS:
            raise corrupt(
                "audio has an impossible number of channels", found=num_channels, expected=f"1 to {MAX_CHANNELS}"
            )
        if not 1 <= rate <= MAX_RATE:
            raise corrupt("audio has an impossible rate", found=rate, expected=f"1 to {MAX_RATE} Hz")
        return rate, codec, (num_frames, num_channels)

    def _raw_samples(self, view: memoryview, raw: np.dtype[Any], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """Stored samples, which can be converted to the field's `decoded`."""
        expected = shape[0] * shape[1] * raw.itemsize
        if len(view) != expected:
            raise truncated("audio is not as long as its record says", found=len(view), expected=expected)
        _expect_frames(shape[0], self.max_frames)
        samples = stored_array(view, raw, shape)
        if self.decoded == "int16" and raw.kind == "f" and not np.isfinite(samples).all():
            raise corrupt("audio has samples that are infinite or NaN", found="NaN", expected="finite samples")
        return samples

    def facts(self, metadata: Buffer, data: Buffer) -> Iterator[MediaLength]:
        """The duration."""
        rate, _, _, num_frames = self._unpack_record(metadata)
        if rate:
            yield MediaLength(num_frames / rate)


def samples_of(value: object, expected: str = "Audio or (samples, sample_rate)") -> tuple[npt.NDArray[Any], int]:
    """(num_frames, num_channels), int16 or float32, and the rate in Hz, of `Audio` or (samples, sample_rate).

    Raises:
        EncodeError: another value, of which `expected` was; samples of another dtype or shape, infinite or NaN; or a
            rate that is not an integer. Samples of float64, in a list or in a tensor are converted.
    """
    if isinstance(value, Audio):
        value = (value.samples, value.sample_rate)
    if not isinstance(value, tuple) or len(value) != 2:
        raise EncodeError(f"found {describe(value)}, expected {expected}")
    samples, rate = value
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer):
        raise EncodeError(f"found sample rate {describe(rate)}, expected Hz, an integer")
    array = _array_of(samples)
    if array is None:
        raise EncodeError(f"found {describe(samples)}, expected samples of int16, float32 or float64")
    samples = array
    if samples.ndim not in (1, 2):
        raise EncodeError(f"found {describe(samples)}, expected shape (num_frames,) or (num_frames, num_channels)")
    if samples.dtype.kind == "f" and not np.isfinite(samples).all():
        raise EncodeError("found samples that are infinite or NaN, expected finite samples")
    samples = samples[:, np.newaxis] if samples.ndim == 1 else samples
    return samples.astype(samples.dtype.newbyteorder("<"), copy=False), int(rate)


def _to_float(samples: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if samples.dtype.kind == "f":
        return np.ascontiguousarray(samples, dtype="<f4")
    scaled: npt.NDArray[np.float32] = np.multiply(samples, np.float32(1 / 32768), dtype=np.float32)
    return scaled


def _to_int16(samples: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """Floats are rounded to the nearest step; 1.0, which has no step, becomes the largest."""
    if samples.dtype.kind == "i":
        return np.ascontiguousarray(samples, dtype="<i2")
    return np.rint(samples * np.float32(32768)).clip(-32768, 32767).astype("<i2")


def _expect_frames(num_frames: int, max_frames: int) -> None:
    """Refuse audio that is longer than a limit; after its bytes are compared with its record, which may lie."""
    if num_frames > max_frames:
        expected = f"at most {max_frames} samples per channel"
        raise over_limit("audio is too long", "max_frames", found=num_frames, expected=expected)


@contextmanager
def _opened(data: Buffer, codec: str, shape: tuple[int, int], rate: int, max_frames: int) -> Iterator[OpenAudio]:
    """An audio file, which is whole and as its record says, as far as that is known before it is decoded."""
    with open_audio(data, codec, length=shape[0]) as sound:
        found = (shape[0] if sound.num_frames is None else sound.num_frames, sound.channels, sound.sample_rate)
        if found != (*shape, rate):
            raise corrupt("audio is not as its record says", found=found, expected=(*shape, rate))
        if shape[0] > max_frames and sound.claimed_seconds and shape[0] > 2 * sound.claimed_seconds * rate:
            expected = f"about {sound.claimed_seconds:g} s, as the file says"
            raise corrupt("audio is not as its record says", found=shape[0], expected=expected)
        _expect_frames(shape[0], max_frames)
        yield sound


def _file_blocks(sound: OpenAudio, num_frames: int, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """The (n, num_channels) blocks of `dtype`, int16 or float32, of a file; together they have `num_frames`."""
    # Short PCM is read unchanged: libsndfile would not scale floats to it, and it rounds 24 bits down.
    is_short = dtype.kind == "i" and sound.subtype in SHORT_SUBTYPES
    left = num_frames
    for block in sound.blocks("int16" if is_short else "float32"):
        if len(block) > left:
            raise corrupt("audio is longer than its record says", expected=f"{num_frames} samples per channel")
        left -= len(block)
        if dtype.kind == "i" and not is_short:
            if not np.isfinite(block).all():
                raise corrupt("audio has samples that are infinite or NaN", found="NaN", expected="finite samples")
            block = _to_int16(block)
        yield block
    if left:
        found, expected = (f"{count} samples per channel" for count in (num_frames - left, num_frames))
        raise truncated("audio ends early", found=found, expected=expected)


def _decode_file(
    data: Buffer, codec: str, shape: tuple[int, int], rate: int, dtype: np.dtype[Any], *, max_frames: int
) -> npt.NDArray[Any]:
    """(num_frames, num_channels) of `dtype`, int16 or float32; `FormatError` for other audio or damaged bytes."""
    # The array grows with what decodes: a few damaged bytes can claim hours.
    count, num_channels = shape
    samples = np.empty((min(count, max(1, _FIRST_SAMPLES // num_channels)), num_channels), dtype)
    done = 0
    try:
        with _opened(data, codec, shape, rate, max_frames) as sound:
            for block in _file_blocks(sound, count, dtype):
                stop = done + len(block)
                if stop > len(samples):
                    samples.resize((min(count, max(stop, 2 * len(samples))), num_channels), refcheck=False)
                samples[done:stop] = block
                done = stop
    except MediaError as error:
        raise corrupt(f"audio cannot be decoded: {error.reason}") from error
    except MemoryError as error:
        needed = count * num_channels * dtype.itemsize
        raise MemoryError(f"audio of shape {shape} needs {needed} bytes: set a lower max_frames") from error
    return samples


def _check_file(
    data: Buffer, codec: str, shape: tuple[int, int], rate: int, dtype: np.dtype[Any], *, max_frames: int
) -> None:
    """Raise what `_decode_file` would, in bounded memory. PCM whose bytes are all there is not read."""
    try:
        with _opened(data, codec, shape, rate, max_frames) as sound:
            if not sound.is_plain:
                for _ in _file_blocks(sound, shape[0], dtype):
                    pass
    except MediaError as error:
        raise corrupt(f"audio cannot be decoded: {error.reason}") from error


def _array_of(samples: object) -> npt.NDArray[Any] | None:
    """Samples as an array that the field takes, if what they mean is clear; else None.

    Lists and float64 become float32. Integers in a list may be samples of 16 bits or floats: they are not clear.
    """
    if not isinstance(samples, np.ndarray):
        if not isinstance(samples, list) and not hasattr(samples, "__array__"):
            return None
        try:
            samples = np.asarray(samples)
        except (TypeError, ValueError, RuntimeError):  # a ragged list; a tensor on a device, or with a gradient
            return None
    if samples.dtype.newbyteorder("<") == np.dtype("<f8"):
        with np.errstate(over="ignore"):
            samples = samples.astype(np.float32)
    return samples if samples.dtype.newbyteorder("<") in _RAW_DTYPES.values() else None
