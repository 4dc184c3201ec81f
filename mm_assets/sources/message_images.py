"""Images and frames of video in messages of ROS 1, ROS 2 and Foxglove, read without the libraries of these formats.

Lengths in a message are compared with its bytes. A message that contradicts its schema raises `ValueError`,
`LookupError` or `struct.error`.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mm_assets.media.content_types import extension_of_content_type, sniff_content_type
from mm_assets.sources.arrays import is_picture, png_bytes, png_size
from mm_assets.sources.head import HEAD_BYTES
from mm_assets.sources.protobuf import read_fields

__all__ = ["IMAGE_DECODERS", "VIDEO_DECODERS", "VIDEO_FORMATS", "MessageImage"]


class MessageImage(NamedTuple):
    """An image in a message.

    Attributes:
        extension: of its member.
        size: bytes of the member.
        start: first byte of the image in the message; None if the message does not hold the image as it is.
        content: returns the image.
    """

    extension: str
    size: int
    start: int | None
    content: Callable[[], bytes]


def _encoded_image(data: memoryview, start: int | None) -> MessageImage:
    """Returns an encoded image, whose format its bytes determine."""
    content_type = sniff_content_type(bytes(data[:HEAD_BYTES]))
    if content_type is None or not content_type.startswith("image/"):
        raise ValueError("its bytes are not an image")
    extension = extension_of_content_type(content_type)
    if extension is None:
        raise ValueError(f"it is {content_type}, which has no extension")
    return MessageImage(extension, len(data), start, data.tobytes)


_PIXELS: Mapping[str, tuple[str, int, tuple[int, ...] | None]] = {  # type, channels, order of channels
    "rgb8": ("u1", 3, None),
    "bgr8": ("u1", 3, (2, 1, 0)),
    "8UC3": ("u1", 3, (2, 1, 0)),
    "rgba8": ("u1", 4, None),
    "bgra8": ("u1", 4, (2, 1, 0, 3)),
    "mono8": ("u1", 1, None),
    "8UC1": ("u1", 1, None),
    "mono16": ("u2", 1, None),
    "16UC1": ("u2", 1, None),
}


def _raw_image(
    data: memoryview, height: int, width: int, step: int, encoding: str, *, big_endian: bool
) -> MessageImage:
    """Returns an image of pixels."""
    if encoding not in _PIXELS:
        raise ValueError(f"its pixels are {encoding!a}, expected one of {', '.join(_PIXELS)}")
    kind, channels, order = _PIXELS[encoding]
    dtype = np.dtype(f"{'>' if big_endian else '<'}{kind}")
    shape = (height, width) if channels == 1 else (height, width, channels)
    row_bytes = width * channels * dtype.itemsize
    if not is_picture(dtype, shape) or step < row_bytes or step * (height - 1) + row_bytes > len(data):
        raise ValueError(f"{height} rows of {step} bytes for {width} pixels {encoding} do not fit {len(data):,} bytes")

    def content() -> bytes:
        strides = (step, channels * dtype.itemsize, dtype.itemsize)[: len(shape)]
        pixels = np.ndarray(shape, dtype, data, strides=strides)
        return png_bytes(pixels if order is None else pixels[..., list(order)])

    return MessageImage("png", png_size(dtype, shape), None, content)


class _Fields:
    """Reads the fields of a message of ROS, one after the other.

    Args:
        data: the message.
        aligned: whether it is CDR, as of ROS 2, in which numbers are at multiples of their size.
    """

    def __init__(self, data: memoryview, *, aligned: bool) -> None:
        self._data = data
        self._aligned = aligned
        self._order = "<"
        self.at = self._start = 0
        if aligned:
            if len(data) < 4 or data[1] not in (0, 1):
                raise ValueError("is not CDR of a known kind")
            self._order = "<" if data[1] else ">"
            self.at = self._start = 4

    def number(self, kind: str) -> int:
        """Returns an unsigned integer, by its code of `struct`."""
        size = struct.calcsize(f"={kind}")
        if self._aligned:
            self.at += -(self.at - self._start) % size
        (value,) = struct.unpack_from(self._order + kind, self._data, self.at)
        self.at += size
        return int(value)

    def content(self) -> memoryview:
        """Returns bytes, whose count is before them."""
        size = self.number("I")
        if size > len(self._data) - self.at:
            raise ValueError(f"states {size:,} bytes where {len(self._data) - self.at:,} follow")
        self.at += size
        return self._data[self.at - size : self.at]

    def text(self) -> str:
        """Returns a text."""
        return str(self.content(), "utf-8").rstrip("\0")

    def header(self) -> None:
        """Passes over the header of a message."""
        for _ in range(2 if self._aligned else 3):  # ROS 2 has no sequence number
            self.number("I")
        self.content()


def _ros_compressed_image(data: memoryview, *, aligned: bool) -> MessageImage:
    fields = _Fields(data, aligned=aligned)
    fields.header()
    fields.content()  # the format, in many spellings
    content = fields.content()
    return _encoded_image(content, fields.at - len(content))


def _ros_image(data: memoryview, *, aligned: bool) -> MessageImage:
    fields = _Fields(data, aligned=aligned)
    fields.header()
    height, width = fields.number("I"), fields.number("I")
    encoding = fields.text()
    big_endian, step = fields.number("B"), fields.number("I")
    return _raw_image(fields.content(), height, width, step, encoding, big_endian=bool(big_endian))


def _json_compressed_image(data: memoryview) -> MessageImage:
    return _encoded_image(memoryview(_base64(_json_object(data).get("data"))), None)


def _json_image(data: memoryview) -> MessageImage:
    message = _json_object(data)
    height, width, step, encoding = (message.get(name) for name in ("height", "width", "step", "encoding"))
    if not (type(height) is type(width) is type(step) is int and isinstance(encoding, str)):
        raise ValueError("lacks height, width, step or encoding")
    return _raw_image(memoryview(_base64(message.get("data"))), height, width, step, encoding, big_endian=False)


def _json_object(data: memoryview) -> dict[str, Any]:
    message = json.loads(str(data, "utf-8"))
    if not isinstance(message, dict):
        raise ValueError("is not an object")
    return message


def _base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, binascii.Error) as error:
        raise ValueError("its data is not base64") from error


def _protobuf_bytes(message: Mapping[int, int | memoryview], number: int) -> memoryview:
    value = message.get(number)
    if not isinstance(value, memoryview):
        raise ValueError(f"lacks field {number}")
    return value


def _protobuf_compressed_image(data: memoryview) -> MessageImage:
    content = _protobuf_bytes(dict(read_fields(data)), 2)
    return _encoded_image(content, _offset_in(content, data))


def _offset_in(part: memoryview, whole: memoryview) -> int:
    """Returns the first byte of a part of a buffer."""
    start = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
    return int(start - np.frombuffer(whole, np.uint8).__array_interface__["data"][0])


def _protobuf_image(data: memoryview) -> MessageImage:
    message = dict(read_fields(data))
    width, height, step = (message.get(number) for number in (2, 3, 5))
    if not (isinstance(width, int) and isinstance(height, int) and isinstance(step, int)):
        raise ValueError("lacks width, height or step")
    encoding = str(_protobuf_bytes(message, 4), "utf-8")
    return _raw_image(_protobuf_bytes(message, 6), height, width, step, encoding, big_endian=False)


def _json_video(data: memoryview) -> tuple[str, bytes]:
    message = _json_object(data)
    return str(message.get("format")), _base64(message.get("data"))


def _protobuf_video(data: memoryview) -> tuple[str, memoryview]:
    message = dict(read_fields(data))
    return str(_protobuf_bytes(message, 4), "utf-8"), _protobuf_bytes(message, 3)


VIDEO_FORMATS = ("h264", "h265", "vp9", "av1")
VIDEO_DECODERS: Mapping[tuple[str, str], Callable[[memoryview], tuple[str, bytes | memoryview]]] = {
    # By encoding and schema: what returns the format of a frame, and its bytes.
    ("json", "foxglove.CompressedVideo"): _json_video,
    ("protobuf", "foxglove.CompressedVideo"): _protobuf_video,
}
IMAGE_DECODERS: Mapping[tuple[str, str], Callable[[memoryview], MessageImage]] = {  # by encoding and schema
    ("ros1", "sensor_msgs/CompressedImage"): partial(_ros_compressed_image, aligned=False),
    ("ros1", "sensor_msgs/Image"): partial(_ros_image, aligned=False),
    ("cdr", "sensor_msgs/msg/CompressedImage"): partial(_ros_compressed_image, aligned=True),
    ("cdr", "sensor_msgs/msg/Image"): partial(_ros_image, aligned=True),
    ("json", "foxglove.CompressedImage"): _json_compressed_image,
    ("json", "foxglove.RawImage"): _json_image,
    ("protobuf", "foxglove.CompressedImage"): _protobuf_compressed_image,
    ("protobuf", "foxglove.RawImage"): _protobuf_image,
}
