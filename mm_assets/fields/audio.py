"""Audio: files stored as they are, or samples as PCM, float or FLAC. Decoding gives samples and their rate.

NumPy reads PCM and float payloads, libsndfile or PyAV reads files. Nothing is resampled while it is encoded, or mixed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, LimitError, MediaError, optional_import
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.base import (
    JSON,
    Encoded,
    Field,
    PayloadParts,
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
from mm_assets.media.ranged_file import RangedFile, whole_of
from mm_assets.media.sound import mix, mixes, resample, resample_range, resampled_length
from mm_assets.media.sound_files import SHORT_SUBTYPES, OpenAudio, open_audio, read_audio_range
from mm_assets.media.sounds import AudioInfo, probe_audio
from mm_assets.media.timing import offset_in_samples
from mm_assets.summaries import ArrayValue, describe

__all__ = ["Audio", "AudioField", "fill_samples", "samples_of", "window_samples"]

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
    file, as bytes or a `Path`: of libsndfile's formats, or with the extra ``video`` of PyAV's (docs/spec/fields.md).
    Samples are (num_frames,) or (num_frames, num_channels), int16 or float32; float64, tensors and lists of floats
    become float32.
    Decodes to `Audio`, always with two dimensions. An int16 sample x and the float x / 32768 are equivalent, so
    int16 comes back exactly from either.

    Attributes:
        encoding: ``keep`` stores files as they are, int16 samples as PCM and float32 samples as floats. ``pcm16``,
            ``float32`` and ``flac`` (16 bits, lossless) store samples so, and files decoded and encoded so. Floats
            beyond [-1, 1] do not fit 16 bits and are refused, not clipped.
        sample_rate: Hz that every value must have: another is refused, while encoding and decoding. None for any.
        decoded: dtype of decoded samples, ``float32`` or ``int16``.
        decode_rate: Hz that decoding resamples to (soxr, HQ; clipped to [-1, 1]); None for the stored rate.
        decode_channels: channels that decoding mixes to: from several to one, from one to several, or from 5.1 to
            stereo; None for the stored ones.
        decode_length: samples per channel of an array of a batch, truncated or padded with zeros; None: a batch is a
            list.
        max_frames: samples per channel that are encoded or decoded at most.
    """

    TYPE_ID: ClassVar[int] = 40
    VALUE_TYPE: ClassVar[type] = Audio
    READS_PARTS: ClassVar[bool] = True
    ADDED: ClassVar[tuple[str, ...]] = ("decode_rate", "decode_channels", "decode_length")
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
    decode_rate: int | None = None
    decode_channels: int | None = None
    decode_length: int | None = None
    max_frames: int = DEFAULT_MAX_FRAMES

    def __post_init__(self) -> None:
        self._expect_choice("encoding", _ENCODINGS)
        self._expect_choice("decoded", ("float32", "int16"))
        self._expect_int("sample_rate", 1, MAX_RATE, optional=True)
        self._expect_int("decode_rate", 1, MAX_RATE, optional=True)
        self._expect_int("decode_channels", 1, MAX_CHANNELS, optional=True)
        self._expect_int("decode_length", 1, 2**32, optional=True)
        self._expect_int("max_frames", 1, 2**40)
        if self.decode_length is not None and None in (self.decode_channels, self.decode_rate or self.sample_rate):
            raise self._wrong_setting("decode_length", "it with decode_rate and decode_channels")

    @property
    def keeps_bytes(self) -> bool:
        """With the encoding ``keep``."""
        return self.encoding == "keep"

    @property
    def value_layout(self) -> Mapping[str, ArraySpec] | None:
        """With `decode_length` the arrays ``samples``, without an axis for one channel, and ``mask``."""
        if self.decode_length is None or self.decode_channels is None:
            return None
        length, channels = self.decode_length, self.decode_channels
        shape = (length,) if channels == 1 else (length, channels)
        return {
            "samples": ArraySpec(shape, np.dtype(self.decoded)),
            "mask": ArraySpec((length,), np.dtype(np.bool_)),
        }

    @property
    def empty_value(self) -> Mapping[str, Any]:
        """``samples`` alone: (0, channels) of `decoded`."""
        return {"samples": np.empty((0, self.decode_channels or 0), self.decoded)}

    @property
    def decodes_in_parallel(self) -> bool:
        """Unless samples are stored as they are: libsndfile and soxr are called without the interpreter lock."""
        return self.encoding not in _RAW_ENCODINGS or self.decode_rate is not None

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
        target = self.decode_rate or rate
        if (rate, shape[1]) != (target, self.decode_channels or shape[1]):
            samples = resample(self._mix(_to_float(samples)), rate, target)
        return Audio(_to_float(samples) if self.decoded == "float32" else _to_int16(samples), target)

    def decode_window(
        self, metadata: Buffer | np.void, data: Buffer | PayloadParts, start_seconds: float, seconds: float
    ) -> Audio:
        """Return `Audio` of round(seconds · rate) samples, less if the audio ends before.

        They are those of `decode` from sample round(start_seconds · rate) on: the same bits, unless they are resampled
        (to 2e-6). A file's structure and its own checksums are not read beyond the window.
        """
        rate, codec, shape = self._opened_record(metadata)
        start, stop = window_samples(start_seconds, seconds, self.decode_rate or rate)
        if isinstance(data, Buffer):
            return self._decode_range(as_bytes_view(data), rate, codec, shape, start, stop)
        with RangedFile.to_decode(data.size, data.read) as file:
            return self._decode_range(file, rate, codec, shape, start, stop)

    def decode_audio(
        self,
        metadata: Buffer | np.void,
        data: Buffer | PayloadParts,
        frames: npt.ArrayLike | None = None,
        audio_until: str = "frame_end",
    ) -> Audio:
        """Return `decode`; `TypeError` for that of frames."""
        if frames is not None:
            raise TypeError(f"{type(self).__name__} has no frames, expected a field of clips")
        return self.decode(metadata, data if isinstance(data, Buffer) else data.read(0, data.size))

    def _decode_range(
        self, view: memoryview | RangedFile, rate: int, codec: int, shape: tuple[int, int], start: int, stop: int
    ) -> Audio:
        """The samples [start, stop) of what `decode` returns."""
        target, channels = self.decode_rate or rate, self.decode_channels or shape[1]
        total = resampled_length(shape[0], rate, target)
        start, stop = min(start, total), min(stop, total)
        _expect_frames(stop - start, self.max_frames)
        if (rate, shape[1]) == (target, channels):
            samples = self._stored_range(view, rate, codec, shape, start, stop)
        else:

            def read(first: int, last: int) -> npt.NDArray[np.float32]:
                return self._mix(_to_float(self._stored_range(view, rate, codec, shape, first, last)))

            samples = resample_range(read, shape[0], rate, target, start, stop)
        return Audio(_to_float(samples) if self.decoded == "float32" else _to_int16(samples), target)

    def _stored_range(
        self, view: memoryview | RangedFile, rate: int, codec: int, shape: tuple[int, int], start: int, stop: int
    ) -> npt.NDArray[Any]:
        """The stored samples [start, stop), of which there are that many by the record."""
        raw = _RAW_DTYPES.get(codec)
        if raw is not None and isinstance(view, RangedFile):
            each = shape[1] * raw.itemsize
            if view.size != shape[0] * each:
                raise truncated("audio is not as long as its record says", found=view.size, expected=shape[0] * each)
            some = memoryview(view.bytes_at(start * each, (stop - start) * each))
            return self._raw_samples(some, raw, (stop - start, shape[1]), 0, stop - start)
        if raw is not None:
            return self._raw_samples(whole_of(view), raw, shape, start, stop)
        return _decode_file_range(view, _CODEC_NAMES[codec], shape, rate, np.dtype(self.decoded), start, stop)

    def _mix(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return mix(samples, self.decode_channels or samples.shape[1])

    def window_settings(self, seconds: float | None, frames: int | None) -> dict[str, JSON]:
        """The length of a window, if rate and channels are set and `decode_length` is not."""
        rate = self.decode_rate or self.sample_rate
        if seconds is None or rate is None or self.decode_channels is None or self.decode_length is not None:
            return {}
        return {"decode_length": max(1, offset_in_samples(seconds, rate))}

    def _decode_into(self, metadata: Buffer, data: Buffer, target: Mapping[str, npt.NDArray[Any]]) -> None:
        rate, codec, shape = self._opened_record(metadata)
        view, length = as_bytes_view(data), len(target["mask"])
        if resampled_length(shape[0], rate, self.decode_rate or rate) <= length:
            fill_samples(self.decode(metadata, data).samples, target["samples"], target["mask"])
        else:
            found = self._decode_range(view, rate, codec, shape, 0, length)
            fill_samples(found.samples, target["samples"], target["mask"])

    def _decode_window_into(
        self,
        metadata: Buffer,
        data: Buffer | PayloadParts,
        target: Mapping[str, npt.NDArray[Any]],
        start_seconds: float,
        seconds: float,
    ) -> None:
        samples = self.decode_window(metadata, data, start_seconds, seconds).samples
        fill_samples(samples, target["samples"], target["mask"])

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
        rows = split_rows(samples.reshape(-1, num_channels), counts)
        return Audio.of_checked(samples=rows, sample_rate=repeat(rate))

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
        if self.sample_rate not in (None, rate):
            expected = f"{self.sample_rate} Hz; decode_rate resamples audio"
            raise over_limit("audio has another sample rate", "sample_rate", found=f"{rate} Hz", expected=expected)
        if not mixes(num_channels, self.decode_channels or num_channels):
            detail, expected = (
                "audio cannot be mixed to so many channels",
                f"1, 6 for stereo, or {self.decode_channels}",
            )
            raise over_limit(detail, "decode_channels", found=num_channels, expected=expected)
        return rate, codec, (num_frames, num_channels)

    def _raw_samples(
        self, view: memoryview, raw: np.dtype[Any], shape: tuple[int, int], start: int = 0, stop: int | None = None
    ) -> npt.NDArray[Any]:
        """Stored samples [start, stop), which can be converted to the field's `decoded`."""
        expected = shape[0] * shape[1] * raw.itemsize
        if len(view) != expected:
            raise truncated("audio is not as long as its record says", found=len(view), expected=expected)
        if stop is None:
            _expect_frames(shape[0], self.max_frames)
        samples = stored_array(view, raw, shape)[start:stop]
        if self.decoded == "int16" and raw.kind == "f" and not np.isfinite(samples).all():
            raise corrupt("audio has samples that are infinite or NaN", found="NaN", expected="finite samples")
        return samples

    def facts(self, metadata: Buffer, data: Buffer) -> Iterator[MediaLength]:
        """The duration."""
        rate, _, _, num_frames = self._unpack_record(metadata)
        if rate:
            yield MediaLength(num_frames / rate)


def window_samples(start_seconds: float, seconds: float, rate: int) -> tuple[int, int]:
    """The samples of a window: the first, and the one after the last; both counts are rounded, a half to even."""
    start = offset_in_samples(start_seconds, rate)
    return start, start + offset_in_samples(seconds, rate)


def fill_samples(samples: npt.NDArray[Any], target: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> None:
    """Write (n, channels) samples into a row of a batch, (length,) or (length, channels), and what is beyond as zeros.

    `mask`, (length,) bool, is set where there are samples.
    """
    count = min(len(samples), len(target))
    target[:count] = samples[:count].reshape(count, *target.shape[1:])
    target[count:] = 0
    mask[:count], mask[count:] = True, False


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


def _decode_file_range(
    data: Buffer | RangedFile,
    codec: str,
    shape: tuple[int, int],
    rate: int,
    dtype: np.dtype[Any],
    start: int,
    stop: int,
) -> npt.NDArray[Any]:
    """Samples [start, stop) of what `_decode_file` decodes; by seeking, where the file allows it."""
    try:
        found = read_audio_range(data, codec, shape[0], start, stop, dtype.name) if start < stop else None
        samples, facts = (None, (shape[1], rate)) if found is None else (found[0], (found[0].shape[1], found[1]))
        if start < stop and found is None:
            with open_audio(whole_of(data), codec, length=shape[0], whole=False) as sound:
                facts = (sound.channels, sound.sample_rate)
                samples = _blocks_between(sound, start, stop, dtype)
    except MediaError as error:
        raise corrupt(f"audio cannot be decoded: {error.reason}") from error
    if facts != (shape[1], rate):
        raise corrupt("audio is not as its record says", found=facts, expected=(shape[1], rate))
    if samples is None:
        return np.zeros((0, shape[1]), dtype)
    if len(samples) < stop - start:
        raise truncated("audio ends early", found=start + len(samples), expected=f"{shape[0]} samples per channel")
    if dtype.kind == "i" and samples.dtype.kind == "f":
        if not np.isfinite(samples).all():
            raise corrupt("audio has samples that are infinite or NaN", found="NaN", expected="finite samples")
        return _to_int16(samples)
    return samples


def _blocks_between(sound: OpenAudio, start: int, stop: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Samples [start, stop) of a file that is decoded from its start; less if it ends before."""
    kind = "int16" if dtype.kind == "i" and sound.subtype in SHORT_SUBTYPES else "float32"
    pieces = [np.zeros((0, sound.channels), kind)]
    at = 0
    for block in sound.blocks(kind):
        pieces.append(block[max(start - at, 0) : max(stop - at, 0)])
        at += len(block)
        if at >= stop:
            break
    return np.concatenate(pieces)


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
