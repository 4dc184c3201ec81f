"""How much of an audio file is silence: its share, and the silence at both ends.

Audio is divided into windows of equal length, except for the last. A window is silent if the level of every channel is
below a threshold (docs/spec/filters.md). Audio is decoded in blocks, so that memory does not grow with its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.media.sound_files import open_audio
from mm_assets.media.sounds import AudioInfo, probe_audio

__all__ = ["LEVELS", "MAX_SAMPLES", "Silence", "measure_silence"]

LEVELS = ("rms", "peak")
MAX_SAMPLES = 4 * 3600 * 48_000 * 2  # of all channels: four hours of stereo, as a small file may claim any length
_BLOCK_SAMPLES = 1 << 17  # of all channels, decoded at a time: half a megabyte, and one as squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """The silence in one audio file.

    Attributes:
        share: of the audio that is in silent windows, 0 to 1; 1 for audio without samples.
        leading_seconds: length of the silent windows before the first that is not.
        trailing_seconds: length of the silent windows after the last that is not. If all audio is silent, both are
            its whole length.
    """

    share: float
    leading_seconds: float
    trailing_seconds: float


def measure_silence(data: memoryview, *, threshold_dbfs: float, level: str, window_seconds: float) -> Silence:
    """The silence in one encoded audio file.

    Args:
        data: an audio file that `probe_audio` reads.
        threshold_dbfs: level below which a channel is silent, in decibels relative to a level of 1.0.
        level: ``rms``, the root of the mean square over the window, or ``peak``, the largest magnitude in it.
        window_seconds: length of a window, rounded to a whole number of samples, at least one.

    Raises:
        MediaError: it cannot be decoded, ends before its length, or has more than `MAX_SAMPLES` samples.
    """
    info = probe_audio(data)
    if info.num_frames * info.channels > MAX_SAMPLES:
        found = f"{info.num_frames} samples in each of {info.channels} channels"
        raise MediaError("<audio>", f"has {found}, expected at most {MAX_SAMPLES} in all of them")
    if info.num_frames == 0:
        return Silence(share=1.0, leading_seconds=0.0, trailing_seconds=0.0)
    # Squares are compared: no roots, and no logarithm of zero.
    limit = 10.0 ** (threshold_dbfs / 10)
    window = max(1, round(min(info.sample_rate * window_seconds, float(info.num_frames))))
    silent = leading = trailing = 0  # samples per channel
    heard = False
    for squares, length in _windows(_blocks(data, info), window, mean=level == "rms"):
        loud = np.flatnonzero(~(squares < limit))  # NaN is not silence
        silent += (len(squares) - len(loud)) * length
        if not len(loud):
            trailing += len(squares) * length
            continue
        if not heard:
            leading = trailing + int(loud[0]) * length
            heard = True
        trailing = (len(squares) - 1 - int(loud[-1])) * length
    return Silence(
        share=silent / info.num_frames,
        leading_seconds=(leading if heard else trailing) / info.sample_rate,
        trailing_seconds=trailing / info.sample_rate,
    )


def _blocks(data: memoryview, info: AudioInfo) -> Iterator[npt.NDArray[np.float32]]:
    """The samples in blocks of (up to `_BLOCK_SAMPLES` // channels, channels)."""
    size = max(1, _BLOCK_SAMPLES // info.channels)
    left = info.num_frames
    with open_audio(data, info.codec, length=info.num_frames, whole=False) as sound:
        found = (sound.channels, sound.sample_rate)
        if found != (info.channels, info.sample_rate):
            raise MediaError("<audio>", f"decodes to {found} channels and Hz, its header says otherwise")
        for block in sound.blocks("float32"):
            for start in range(0, len(block), size):
                piece = block[start : start + min(size, left)]
                if len(piece):
                    left -= len(piece)
                    yield piece
    if left:
        raise MediaError("<audio>", f"ends {left} samples before its length of {info.num_frames}")


def _windows(
    blocks: Iterator[npt.NDArray[np.float32]], window: int, *, mean: bool
) -> Iterator[tuple[npt.NDArray[np.float64], int]]:
    """Squared levels of consecutive windows, of the loudest channel: (num_windows,), and the windows' length.

    A window may be longer than a block: its partial result is carried over.
    """
    combine: np.ufunc = np.add if mean else np.maximum
    carried: npt.NDArray[np.float64] | None = None  # (channels,)
    held = 0  # samples of the window that are in `carried`
    for block in blocks:
        squares = np.square(block, dtype=np.float64)
        edges = np.arange(window - held, len(squares), window) if held else np.arange(0, len(squares), window)
        starts = np.concatenate([[0], edges]) if held else edges
        levels = combine.reduceat(squares, starts, axis=0)
        if carried is not None:
            levels[0] = combine(levels[0], carried)
        held = (held + len(squares)) % window
        carried = levels[-1].copy() if held else None
        whole = levels[:-1] if held else levels
        if len(whole):
            yield whole.max(axis=1) / (window if mean else 1), window
    if carried is not None:
        yield carried.max(keepdims=True) / (held if mean else 1), held
