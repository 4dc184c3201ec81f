"""Frames of a clip: JPEGs after an index (docs/spec/fields.md, type 50), or those of a stored file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.fields.base import MAX_DATA, corrupt, unreadable
from mm_assets.fields.image_decode import SCALES, orient, scaled
from mm_assets.fields.image_resize import Box, resample, resize
from mm_assets.fields.video_record import FILE, Record
from mm_assets.fields.video_source import Plan, Source, most_frames, shown_size
from mm_assets.media.frames import check_frames, read_frames, seek_frames
from mm_assets.media.picture import picture_of
from mm_assets.media.ranged_file import RangedFile, whole_of
from mm_assets.media.timing import FrameIndex
from mm_assets.media.video import index_frames

__all__ = ["check_decodable", "encode_frames", "fill_frames", "fill_near_frames", "index_of"]

_MAX_SPAN = 8 << 20  # bytes of JPEGs that are read at once
_NEAR_SECONDS = 30  # between frames that are found by seeking; an index of all packets is better for others


def encode_frames(source: Source, plan: Plan, *, size: tuple[int, int] | None, quality: int) -> bytes:
    """The frame index and the JPEGs after it.

    Raises:
        MediaError: the source is damaged.
        ValueError: the frames take more than a payload can hold.
    """
    import simplejpeg

    offsets = [8 * (plan.num_frames + 1)]
    if offsets[0] > MAX_DATA:
        raise ValueError(f"found {plan.num_frames} frames, whose index alone exceeds {MAX_DATA} bytes")
    files: list[bytes] = []
    last: npt.NDArray[np.uint8] | None = None
    for pixels in source.frames(plan.positions()):
        if pixels is not last:
            if pixels.shape[:2] != plan.size:
                raise MediaError("<video>", f"found a frame of {pixels.shape[:2]}, expected {plan.size}")
            sized = pixels if size is None else resize(pixels, size)
            jpeg = simplejpeg.encode_jpeg(
                np.ascontiguousarray(sized), quality=quality, colorspace="RGB", colorsubsampling="444"
            )
            last = pixels
        files.append(jpeg)
        offsets.append(offsets[-1] + len(jpeg))
        if offsets[-1] > MAX_DATA:
            raise ValueError(f"found frames of {offsets[-1]} bytes as JPEG, expected at most {MAX_DATA}")
    return np.array(offsets, dtype="<u8").tobytes() + b"".join(files)


@dataclass(frozen=True, slots=True)
class Indexed:
    """The frames of a file.

    Attributes:
        index: when they are shown.
        size: (height, width) as they are stored.
    """

    index: FrameIndex
    size: tuple[int, int]


def index_of(record: Record, video: memoryview, *, max_pixels: int, first: int = 0) -> Indexed | None:
    """Index the file of a clip, and compare it with its record; None where frames are in no file.

    Of frames that are JPEGs the one with the number `first` is compared.

    Called before anything is allocated that is as large as the record's number of frames.

    Raises:
        CorruptError: the file is damaged, or the record is of another file.
    """
    if not record.num_frames:
        return None
    if record.video_codec != FILE:
        for jpeg in _jpegs(record, video, [first]):
            _check_size(jpeg, (record.height, record.width))
        return None
    try:
        indexed = index_frames(video, max_pixels=max_pixels)
        picture = picture_of(video, max_pixels=max_pixels) if record.is_square else None
    except MediaError as error:
        raise unreadable(error) from error
    found = None if indexed is None else shown_size(picture, indexed[1:], record.turn, is_square=record.is_square)
    if indexed is None or found != (record.height, record.width):
        raise corrupt("video is not as its record says", found=found, expected=(record.height, record.width))
    index = indexed[0]
    start = Fraction(record.start_us, 1_000_000)
    rate = Fraction(record.frame_rate_num, record.frame_rate_den)
    most = min(max(index.num_frames(rate, start), 0 if start else 1), most_frames(index))
    if record.num_frames > most:
        raise corrupt("clip has more frames than its file", found=record.num_frames, expected=f"at most {most}")
    return Indexed(index, indexed[1:])


def check_decodable(record: Record, video: memoryview, *, max_pixels: int) -> None:
    """Decode every frame once, without keeping it; a JPEG at an eighth of its size, which reads all of its data too.

    Raises:
        CorruptError: `fill_frames` would raise it for some frame.
    """
    indexed = index_of(record, video, max_pixels=max_pixels)
    if indexed is not None:
        rate = Fraction(record.frame_rate_num, record.frame_rate_den)
        final = np.array([record.num_frames - 1], dtype=np.int64)
        try:
            last = int(indexed.index.shown_at(final, rate, Fraction(record.start_us, 1_000_000))[0])
            check_frames(video, indexed.index, indexed.size, last, max_pixels=max_pixels)
        except MediaError as error:
            raise unreadable(error) from error
    elif record.num_frames:
        for jpeg in _jpegs(record, video, range(record.num_frames)):
            _decode_jpeg(jpeg, (record.height, record.width), None)


def fill_frames(
    record: Record,
    video: memoryview,
    indexed: Indexed | None,
    indices: npt.NDArray[np.int64],
    target: npt.NDArray[np.uint8],
    *,
    max_pixels: int,
) -> None:
    """Decode chosen frames, in any order, into the first rows of `target`, stretched to its size; the others are zero.

    `video` is the file that `indexed` is of, or without it the frame index and its JPEGs. `indices` are (K,) frames of
    the clip, `target` (K or more, H, W, 3).

    Raises:
        CorruptError: the payload is damaged.
    """
    target[len(indices) :] = 0
    if not len(indices):
        return
    if indexed is None:
        for row, jpeg in enumerate(_jpegs(record, video, indices.tolist())):
            _decode_jpeg(jpeg, (record.height, record.width), target[row])
        return
    order = np.argsort(indices, kind="stable")
    try:
        rate = Fraction(record.frame_rate_num, record.frame_rate_den)
        index = indexed.index
        positions = index.shown_at(indices[order], rate, Fraction(record.start_us, 1_000_000))
        frames = read_frames(video, index, positions, max_pixels=max_pixels)
        _fill_sorted(record, indexed.size, frames, order, target)
    except MediaError as error:
        raise unreadable(error) from error


def fill_near_frames(
    record: Record,
    video: memoryview | RangedFile,
    indices: npt.NDArray[np.int64],
    target: npt.NDArray[np.uint8],
    *,
    max_pixels: int,
) -> None:
    """Decode chosen frames as `fill_frames`, by seeking to them if they are near each other, without an index.

    Raises:
        CorruptError: the payload is damaged there.
    """
    order = np.argsort(indices, kind="stable")
    numbers = indices[order].tolist()
    rate = Fraction(record.frame_rate_num, record.frame_rate_den) if record.num_frames else Fraction(1)
    if record.video_codec == FILE and numbers and numbers[-1] - numbers[0] <= _NEAR_SECONDS * rate:
        start = Fraction(record.start_us, 1_000_000)
        try:
            frames = seek_frames(video, numbers, rate, start, max_pixels=max_pixels)
            if frames is not None:
                picture = picture_of(video, max_pixels=max_pixels) if record.is_square else None
                size = frames[0].shape[:2]
                found = shown_size(picture, size, record.turn, is_square=record.is_square)
                if found != (record.height, record.width):
                    raise corrupt(
                        "video is not as its record says", found=found, expected=(record.height, record.width)
                    )
                target[len(indices) :] = 0
                _fill_sorted(record, size, frames, order, target)
                return
        except MediaError as error:
            raise unreadable(error) from error
    if record.video_codec == FILE:
        video = whole_of(video)
    elif record.num_frames:
        target[len(indices) :] = 0
        for row, jpeg in enumerate(_jpegs(record, video, indices.tolist())):
            _decode_jpeg(jpeg, (record.height, record.width), target[row])
        return
    index = index_of(record, whole_of(video), max_pixels=max_pixels)
    fill_frames(record, whole_of(video), index, indices, target, max_pixels=max_pixels)


def _fill_sorted(
    record: Record,
    size: tuple[int, ...],
    frames: Iterable[npt.NDArray[np.uint8]],
    order: npt.NDArray[np.int64],
    target: npt.NDArray[np.uint8],
) -> None:
    """Write frames of a file, upright, into the rows of `target` that `order` says."""
    last, first_row = None, 0
    for row, pixels in zip(order.tolist(), frames, strict=True):
        if pixels is last:
            target[row] = target[first_row]
            continue
        if pixels.shape[:2] != size:
            raise corrupt("frame is not of the size in the record", found=pixels.shape[:2], expected=size)
        turned = np.ascontiguousarray(orient(pixels, record.turn))
        resample(turned, Box(0, 0, *turned.shape[:2]), target[row])
        last, first_row = pixels, row


def _jpegs(record: Record, video: memoryview | RangedFile, numbers: Iterable[int]) -> Iterator[memoryview]:
    """The stored frames of these numbers; `CorruptError` where the index is damaged."""
    tables, size = 8 * (record.num_frames + 1), record.video_size
    if isinstance(video, RangedFile):
        offsets = np.frombuffer(video.bytes_at(0, tables), dtype="<u8")
        numbers = list(numbers)
        if numbers:  # one read for neighbors
            first, last = int(offsets[min(numbers)]), int(offsets[max(numbers) + 1])
            if first < last <= min(size, first + _MAX_SPAN):
                video.bytes_at(first, last - first)
    else:
        offsets = np.frombuffer(video, dtype="<u8", count=record.num_frames + 1)
    for number in numbers:
        start, end = int(offsets[number]), int(offsets[number + 1])
        if not tables <= start <= end <= size:
            raise corrupt("frame lies outside the data", found=(start, end), expected=(tables, size))
        yield memoryview(video.bytes_at(start, end - start)) if isinstance(video, RangedFile) else video[start:end]


def _decode_jpeg(data: memoryview, size: tuple[int, int], target: npt.NDArray[np.uint8] | None) -> None:
    """Decode into (H, W, 3), resized if of another size; `CorruptError` if damaged or not of the recorded size.

    Without a target the pixels are only checked, at an eighth of the size.
    """
    import simplejpeg

    _check_size(data, size)
    try:
        if target is None:
            least_height, least_width = scaled(size, SCALES[0])
            simplejpeg.decode_jpeg(data, colorspace="RGB", min_height=least_height, min_width=least_width, strict=True)
            return
        fits = target.shape[:2] == size and target.flags.c_contiguous
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=target if fits else None, strict=True)
        if not fits:
            resample(pixels, Box(0, 0, *size), target)
    except ValueError as error:
        raise corrupt(f"frame is not a JPEG that can be decoded: {error}") from error


def _check_size(data: memoryview, size: tuple[int, int]) -> None:
    """`CorruptError` where the header of a JPEG has another size than the record."""
    import simplejpeg

    try:
        found = simplejpeg.decode_jpeg_header(data)[:2]
    except ValueError as error:
        raise corrupt(f"frame is not a JPEG that can be decoded: {error}") from error
    if found != size:
        raise corrupt("frame is not of the size in the record", found=found, expected=size)
