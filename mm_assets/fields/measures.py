"""What metadata records say about the extent of their values: sizes, durations, lengths; no data is read for it.

The entries of a record have the same names in every field (docs/spec/fields.md), so that a field of the user's own is
measured too where its record has such entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.fields.image import ImageField

__all__ = ["UNITS", "clock_ends", "measures"]

_Records = npt.NDArray[np.void]
_Numbers = npt.NDArray[Any]

UNITS = {
    "width": "pixels",
    "height": "pixels",
    "duration": "seconds",
    "length": "characters",
    "tokens": "tokens",
    "items": "items",
    "pages": "pages",
    "words": "words",
    "segments": "segments",
    "notes": "notes",
    "steps": "steps",
    "frames": "frames",
}
"""Every measure, with its unit."""

_IMAGE = ImageField.metadata_type
_COUNTS = {
    "width": "width",
    "height": "height",
    "num_code_points": "length",
    "num_tokens": "tokens",
    "num_items": "items",
    "num_pages": "pages",
    "num_words": "words",
    "num_segments": "segments",
    "num_notes": "notes",
    "num_steps": "steps",
}


def measures(records: _Records) -> dict[str, _Numbers]:
    """The measures of values by name, each an array of (n,) numbers; none where the records say nothing.

    Args:
        records: (n,) metadata records of present values, with the entries of `Field.metadata_type`.
    """
    names = set(records.dtype.names or ())
    if "image" in names and records.dtype["image"].itemsize == _IMAGE.itemsize:  # of an image with its text
        return measures(np.ascontiguousarray(records["image"]).view(_IMAGE))
    found: dict[str, _Numbers] = {measure: records[name] for name, measure in _COUNTS.items() if name in names}
    if names >= {"num_frames", "frame_rate_num", "frame_rate_den"}:
        found["frames"] = records["num_frames"]
        rate = _ratio(records["frame_rate_num"], records["frame_rate_den"])
        duration: _Numbers | None = _ratio(records["num_frames"], rate)
    elif names >= {"num_frames", "sample_rate"}:
        duration = _ratio(records["num_frames"], records["sample_rate"])
    elif "duration_us" in names:
        duration = records["duration_us"] / 1e6
    elif names >= {"start_seconds", "end_seconds"}:
        duration = records["end_seconds"] - records["start_seconds"]
    else:
        duration = None
        if "num_frames" in names:
            found["frames"] = records["num_frames"]
    if duration is not None:
        found["duration"] = duration
    return found


def clock_ends(records: _Records) -> tuple[npt.NDArray[np.float64], bool]:
    """Where values end on the clock of their samples, in seconds, and whether they are media, which fill their time.

    Args:
        records: as for `measures`.

    Returns:
        (n,) float64, NaN where a value has no time axis. The end of a clip is that of its frames, or without frames
        that of its audio.
    """
    names = set(records.dtype.names or ())
    ends: _Numbers = np.full(len(records), np.nan)
    is_media = True
    if names >= {"num_frames", "frame_rate_num", "frame_rate_den"}:
        ends = _ratio(records["num_frames"], _ratio(records["frame_rate_num"], records["frame_rate_den"]))
        if names >= {"num_audio_samples", "sample_rate"}:
            audio = _ratio(records["num_audio_samples"] - records["frame_0_sample"], records["sample_rate"])
            ends = np.where(records["num_frames"] > 0, ends, np.maximum(audio, 0))
    elif names >= {"num_frames", "sample_rate"}:
        ends = _ratio(records["num_frames"], records["sample_rate"])
    else:
        is_media = False
        if "duration_us" in names:
            ends = records["duration_us"] / 1e6
        elif names >= {"start_seconds", "end_seconds"}:
            ends = records["end_seconds"].astype(np.float64)
    return ends, is_media


def _ratio(numerator: _Numbers, denominator: _Numbers) -> _Numbers:
    """A quotient; NaN where the denominator is 0, as in a record of a clip without video."""
    empty = np.full(len(numerator), np.nan)
    quotients: _Numbers = np.divide(numerator, denominator, out=empty, where=denominator != 0)
    return quotients
