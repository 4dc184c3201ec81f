"""Arrays, maps and series for people: statistics, heat maps with their range, plots of a bounded number of points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.display.item import MAX_DATA, Item, finite, human_bytes, human_seconds, human_size, made
from mm_assets.display.pictures import png_of, shrunk_pixels
from mm_assets.fields.series_value import Columns, TimeSeries

__all__ = ["COLOURS", "array_item", "map_item", "plot", "series_item"]

MAX_POINTS = 2000  # of a channel's plot
MAX_CHANNELS = 64  # that are plotted
_NUMBER_BYTES = 10  # of a number of a plot, as JSON
_PLOT_BYTES = MAX_DATA - 32_768
_MAX_MAP_SIDE = 1024
_NUM_VALUES = 64  # of an array's first values, as text
_LOW, _HIGH = 0.5, 99.5  # percentiles between which colours are spread: a single outlier must not take all of them

# Anchors of the colour map viridis: equal steps look equal, also in grey and to the colour-blind.
_ANCHORS: tuple[tuple[int, int, int], ...] = ((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141))
_ANCHORS += ((39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37))
COLOURS = [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in _ANCHORS]


# --- maps -------------------------------------------------------------------------------------------------------------


def map_item(name: str, values: npt.NDArray[Any], *, unit: str = "", size: int | None = None) -> Item:
    """A depth map, or any map of one number per pixel, as colours with their range; what was not measured is clear."""
    height, width = values.shape
    measured = values[_is_measured(values)]
    facts = {"size": human_size(width, height), "dtype": values.dtype.name}
    suffix = f" {unit}" if unit else ""
    low = high = 0.0
    if measured.size:
        low, high = (float(one) for one in np.percentile(measured, [_LOW, _HIGH]))
        facts["range"] = f"{_short(measured.min().item())} to {_short(measured.max().item())}{suffix}"
        facts["median"] = f"{_short(float(np.median(measured)))}{suffix}"
    facts["measured"] = f"{100 * measured.size / max(1, values.size):.3g} %"
    if size is not None:
        facts["bytes"] = human_bytes(size)
    data = {
        "image": "map",
        "width": width,
        "height": height,
        "low": finite(low),
        "high": finite(high),
        "unit": unit,
        "colours": COLOURS,
    }
    media = (made("map", "image/png", partial(_heat_map, _thinned(values, max(values.shape)), low, high)),)
    note = "" if measured.size else "No pixel of it was measured."
    return Item(name=name, kind="depth", facts=facts, data=data, media=media, note=note)


def _is_measured(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.isfinite(values) & (values != 0) if values.dtype.kind == "f" else np.asarray(values != 0)


def _thinned(values: npt.NDArray[Any], *sides: int) -> npt.NDArray[Any]:
    """A copy of every n-th value, at most `_MAX_MAP_SIDE` of `sides`: an item must not hold the whole array.

    A map keeps its shape: the longer of its sides is given. Of a plane, which may be a thousand times as high as wide,
    both are.
    """
    steps = [max(1, -(-side // _MAX_MAP_SIDE)) for side in (sides if len(sides) == 2 else 2 * sides)]
    return np.array(values[:: steps[0], :: steps[1]])


def _heat_map(small: npt.NDArray[Any], low: float, high: float, *, holes: bool = True) -> bytes:
    """A PNG of colours; clear where nothing was measured."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = (small.astype(np.float64) - low) / ((high - low) or 1.0)
    index = np.nan_to_num(np.clip(scaled, 0, 1) * 255, nan=0.0).astype(np.uint8)
    pixels = np.empty((*small.shape, 4), np.uint8)
    pixels[..., :3] = _table()[index]
    pixels[..., 3] = np.where(_is_measured(small), 255, 0) if holes else np.where(_finite(small), 255, 0)
    return png_of(pixels)


def _finite(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.isfinite(values) if values.dtype.kind in "fc" else np.ones(values.shape, np.bool_)


def _table() -> npt.NDArray[np.uint8]:
    """(256, 3) uint8: the colour map."""
    anchors = np.array(_ANCHORS, np.float64)
    at = np.linspace(0, len(anchors) - 1, 256)
    channels = [np.interp(at, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


# --- arrays -----------------------------------------------------------------------------------------------------------


def array_item(name: str, array: npt.NDArray[Any], *, size: int | None = None) -> Item:
    """An array: shape, dtype, statistics, first values; a plot of columns, or a heat map of a plane."""
    shape = " x ".join(f"{extent:,}" for extent in array.shape) or "scalar"
    facts = {"shape": shape, "dtype": str(array.dtype)}
    facts |= _statistics(array)
    facts["bytes"] = human_bytes(array.nbytes if size is None else size)
    first = array.reshape(-1)[:_NUM_VALUES] if array.size else array.reshape(-1)
    data: dict[str, Any] = {"shape": list(array.shape), "dtype": str(array.dtype), "first": [_text(v) for v in first]}
    if array.size > _NUM_VALUES:
        data["more"] = array.size - _NUM_VALUES
    media = []
    numbers = np.abs(array) if array.dtype.kind == "c" else array
    if array.size and array.dtype.kind in "biufc":
        if array.ndim == 1 and array.size > 1:
            data["plot"] = plot(np.arange(len(array), dtype=np.float64), numbers[:, np.newaxis])
        elif array.ndim == 2 and 1 <= array.shape[1] <= MAX_CHANNELS and array.shape[0] > 2 * array.shape[1]:
            data["plot"] = plot(np.arange(len(array), dtype=np.float64), numbers)
        elif array.ndim >= 2 and min(array.shape[-2:]) > 0:
            media.append(made("map", "image/png", _plane(numbers)))
            data["image"] = "map"
            data["width"], data["height"] = _plane_size(array)
            data["colours"] = COLOURS
    return Item(name=name, kind="array", facts=facts, data=data, media=tuple(media))


def _statistics(array: npt.NDArray[Any]) -> dict[str, str]:
    if not array.size or array.dtype.kind not in "biuf":
        return {}
    if array.dtype.kind == "b":
        return {"true": f"{int(array.sum()):,} of {array.size:,}"}
    good = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    facts = {}
    if good.size:
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = float(good.mean(dtype=np.float64)), float(good.std(dtype=np.float64))
        facts = {"range": f"{_short(good.min().item())} to {_short(good.max().item())}"}
        facts |= {"mean": _short(mean), "deviation": _short(deviation)}
    if good.size < array.size:
        facts["not finite"] = f"{array.size - good.size:,}"
    return facts


def _is_picture(array: npt.NDArray[Any]) -> bool:
    return array.dtype == np.uint8 and array.ndim >= 3 and array.shape[-1] in (3, 4)


def _plane_size(array: npt.NDArray[Any]) -> tuple[int, int]:
    height, width = array.shape[-3:-1] if _is_picture(array) else array.shape[-2:]
    return width, height


def _plane(array: npt.NDArray[Any]) -> Callable[[], bytes]:
    """Makes a PNG of an array's first plane: its pixels where they look like such, else a heat map."""
    if _is_picture(array):
        pixels = array.reshape(-1, *array.shape[-3:])[0]
        return partial(png_of, shrunk_pixels(np.array(pixels), _MAX_MAP_SIDE))
    plane = array.reshape(-1, *array.shape[-2:])[0]
    good = plane[_finite(plane)]
    low, high = (float(good.min()), float(good.max())) if good.size else (0.0, 1.0)
    return partial(_heat_map, _thinned(plane, *plane.shape), low, high, holes=False)


def _text(value: Any) -> str:
    number = value.item() if isinstance(value, np.generic) else value
    return f"{number:.6g}" if isinstance(number, float) else str(number)[:40]


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


# --- series -----------------------------------------------------------------------------------------------------------


def series_item(name: str, series: TimeSeries) -> Item:
    """Numbers over time as plots, one for each column or group of columns."""
    facts = {"steps": f"{len(series):,}", "columns": f"{series.values.shape[1]:,}", "dtype": series.values.dtype.name}
    if len(series) > 1:
        facts["duration"] = human_seconds(series.duration_seconds)
        facts["rate"] = f"{(len(series) - 1) / series.duration_seconds:.4g}/s" if series.duration_seconds else "unknown"
    drawn = plot(series.timestamps, series.values, series.columns)
    note = ""
    if series.values.shape[1] > MAX_CHANNELS:
        note = f"Plotted are the first {MAX_CHANNELS} of {series.values.shape[1]:,} columns."
    return Item(name=name, kind="series", facts=facts, data={"plot": drawn, "unit": "s"}, note=note)


def plot(times: npt.NDArray[np.float64], values: npt.NDArray[Any], columns: Columns = ()) -> dict[str, Any]:
    """Points of each column over shared times: its values, or the lowest and highest of each of some stretches.

    NaN and infinities are gaps (null).
    """
    count, width = values.shape
    width = min(width, MAX_CHANNELS)
    most = max(16, min(MAX_POINTS, _PLOT_BYTES // (_NUMBER_BYTES * (width + 1))))
    is_reduced = count > most
    if is_reduced:
        most = max(8, most // 2)
        edges = np.linspace(0, count, most + 1).astype(np.int64)
        starts = edges[:-1]
        at = times[starts]
    else:
        at = times
    channels = []
    for column, name in zip(range(width), _channel_names(columns, width), strict=True):
        numbers = values[:, column].astype(np.float64)
        good = np.where(np.isfinite(numbers), numbers, np.nan)
        channel: dict[str, Any] = {"name": name}
        if is_reduced:
            low = np.minimum.reduceat(np.where(np.isnan(good), np.inf, good), starts)
            high = np.maximum.reduceat(np.where(np.isnan(good), -np.inf, good), starts)
            channel |= {"low": _points(low), "high": _points(high)}
        else:
            channel["values"] = _points(good)
        channels.append(channel)
    return {"times": _points(at, digits=7), "channels": channels, "count": count, "reduced": is_reduced}


def _points(values: npt.NDArray[np.float64], *, digits: int = 4) -> list[float | None]:
    return [finite(value, digits) for value in values.tolist()]


def _channel_names(columns: Columns, width: int) -> Sequence[str]:
    names = [str(number) for number in range(width)]
    for name, start, end in columns:
        for number in range(start, min(end, width)):
            names[number] = name[:60] if end == start + 1 else f"{name[:60]} {number - start}"
    return names
