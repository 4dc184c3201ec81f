"""Reads the frames of cameras for exports to LeRobot, and computes the statistics of features."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.media.content_types import Buffer
from mm_assets.media.images import PILLOW_ERRORS, probe_image
from mm_assets.media.video import DEFAULT_MAX_PIXELS, open_media, video_stream_of

__all__ = [
    "Camera",
    "Statistics",
    "add_statistics",
    "compute_statistics",
    "read_images",
    "read_video",
    "start_of_clock",
    "statistics_json",
]

TOLERANCE_SECONDS = 1e-4  # LeRobot's default for the difference between a frame's time and `timestamp`
MAX_STATISTICS_FRAMES = 16  # of each camera in an episode; the others are not decoded
STATISTICS_PIXELS = 150  # approximate length of the longer side
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}

Statistics = dict[str, npt.NDArray[Any]]
"""`min`, `max`, `mean`, `std`, `count` and quantiles of a feature."""


class Camera(NamedTuple):
    """A camera in one episode.

    Attributes:
        size: (height, width, channels).
        times: time of each frame of a video in seconds; of images, their indices.
        statistics: statistics of the decoded frames.
        info: properties of a video in the notation of ``info.json``.
    """

    size: tuple[int, int, int]
    times: npt.NDArray[np.float64]
    statistics: Statistics
    info: Mapping[str, Any]


def start_of_clock(name: str, times: npt.NDArray[np.float64], clock: npt.NDArray[Any]) -> float:
    """Returns the time in a video at which `timestamp` is 0.

    Raises:
        EncodeError: LeRobot, which adds the two as float32, would not find the frame of some `timestamp`.
    """
    clock = clock.reshape(-1)
    if clock[0] < 0:
        raise EncodeError(f"'timestamp' starts at {clock[0]} s, expected 0 s or later: leave 'timestamp' out")
    start = float(times[0]) - float(clock[0])
    queries = (start + clock.astype(np.float32).astype(np.float64)).astype(np.float32)
    distances = np.abs(queries - times.astype(np.float32))
    is_off = ~(distances < TOLERANCE_SECONDS)
    if is_off.any():
        frame = int(np.argmax(is_off))
        detail = f"frame {frame} of {name!r} is {times[frame] - times[0]:.6f} s after the first frame, but"
        detail += f" {float(clock[frame]) - float(clock[0]):.6f} s by 'timestamp' as float32"
        raise EncodeError(f"{detail}: leave 'timestamp' or the video out")
    return start


def read_video(content: Buffer) -> Camera:
    """Reads the times of a video's frames, and decodes some keyframes.

    Raises:
        EncodeError: it is not MP4, or has no frames.
        MediaError: it is damaged.
    """
    with open_media(content) as (container, content_type):
        stream = video_stream_of(container)
        if content_type != "video/mp4" or stream is None or stream.time_base is None:
            raise EncodeError(f"a video is {content_type}, but LeRobot requires MP4: leave the modality out")
        base = float(stream.time_base)
        packets = [(p.pts, p.is_keyframe) for p in container.demux(stream) if p.pts is not None]
        if not packets or len(packets) != stream.frames:  # the source compares them to detect a truncated file
            detail = f"the header of a video says {stream.frames} frames, but it has {len(packets)}"
            raise EncodeError(f"{detail}: remux fragmented MP4 (ffmpeg -c copy), or leave the modality out")
        pixels = []
        for pts in _spread([pts for pts, is_keyframe in packets if is_keyframe]):
            container.seek(pts, stream=stream)
            frame = next(container.decode(stream), None)
            pixels += [] if frame is None else [_thinned(frame.to_ndarray(format="rgb24"))]
        context = stream.codec_context
        info = {
            "video.height": context.height,
            "video.width": context.width,
            "video.codec": context.name,
            "video.pix_fmt": context.pix_fmt,
            "video.is_depth_map": False,
            "video.fps": float(stream.average_rate or 0),
            "video.channels": 3,
            "has_audio": bool(container.streams.audio),
        }
        times = np.array(sorted(pts for pts, _ in packets)) * base
        return Camera((context.height, context.width, 3), times, _picture_statistics(pixels), info)


def read_images(images: Sequence[bytes]) -> Camera:
    """Reads the sizes of images, and decodes some.

    Raises:
        EncodeError: they differ in size, or are too large.
        MediaError: one is damaged.
    """
    from PIL import Image

    sizes = {(info.height, info.width, info.channels) for info in map(probe_image, images)}
    size = min(sizes, default=(0, 0, 0))
    if len(sizes) != 1 or size[0] * size[1] > DEFAULT_MAX_PIXELS:
        detail = f"images have the sizes {sorted(sizes)}, expected one of at most {DEFAULT_MAX_PIXELS:,} pixels"
        raise EncodeError(f"{detail}: leave the sample or the modality out")
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[size[2]]
    try:
        pixels = [_thinned(np.asarray(Image.open(io.BytesIO(image)).convert(mode))) for image in _spread(images)]
    except PILLOW_ERRORS as error:
        raise EncodeError(f"an image cannot be decoded: {error}") from error
    return Camera(size, np.arange(len(images), dtype=np.float64), _picture_statistics(pixels), {})


def _spread(items: Sequence[Any]) -> Sequence[Any]:
    """Returns at most `MAX_STATISTICS_FRAMES` items at equal distances."""
    return items[:: max(-(-len(items) // MAX_STATISTICS_FRAMES), 1)]


def _thinned(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    step = max(max(pixels.shape[:2]) // STATISTICS_PIXELS, 1)
    return np.atleast_3d(pixels)[::step, ::step].copy()


# -- statistics


def compute_statistics(array: npt.NDArray[Any]) -> Statistics:
    """Computes the statistics of the values of frames in the same way as LeRobot."""
    values = array.astype(np.float64)
    values = values[:, None] if values.ndim == 1 else values
    with np.errstate(invalid="ignore", over="ignore"):
        quantiles = np.quantile(values, list(_QUANTILES.values()), axis=0)
        return {
            "min": values.min(axis=0),
            "max": values.max(axis=0),
            "mean": values.mean(axis=0),
            "std": values.std(axis=0),
            "count": np.array([len(values)]),
            **dict(zip(_QUANTILES, quantiles, strict=True)),
        }


def _picture_statistics(pictures: Sequence[npt.NDArray[Any]]) -> Statistics:
    """Computes the statistics of the channels of pictures, scaled to 0 to 1; `count` is the number of pictures."""
    if not pictures:
        raise EncodeError("a video has no frame that can be decoded: leave the sample or the modality out")
    values = compute_statistics(np.concatenate([picture.reshape(-1, picture.shape[2]) for picture in pictures]) / 255)
    shaped = {key: value.reshape(-1, 1, 1) for key, value in values.items() if key != "count"}
    return {**shaped, "count": np.array([len(pictures)])}


def add_statistics(all_statistics: dict[str, Statistics], name: str, other: Statistics) -> None:
    """Adds the statistics of more frames to a feature; the quantiles are averaged, as in LeRobot."""
    one = all_statistics.get(name)
    if one is None:
        all_statistics[name] = other
        return
    with np.errstate(invalid="ignore", over="ignore"):
        count = one["count"] + other["count"]
        share = float(other["count"][0] / count[0])
        mean = one["mean"] * (1 - share) + other["mean"] * share
        variance = one["std"] ** 2 * (1 - share) + other["std"] ** 2 * share
        variance += share * (1 - share) * (one["mean"] - other["mean"]) ** 2
        all_statistics[name] = {
            "min": np.minimum(one["min"], other["min"]),
            "max": np.maximum(one["max"], other["max"]),
            "mean": mean,
            "std": np.sqrt(variance),
            "count": count,
            **{key: one[key] * (1 - share) + other[key] * share for key in _QUANTILES},
        }


def statistics_json(statistics: Mapping[str, Statistics]) -> dict[str, dict[str, Any]]:
    """Returns the statistics of features as JSON."""
    return {name: {key: value.tolist() for key, value in values.items()} for name, values in statistics.items()}
