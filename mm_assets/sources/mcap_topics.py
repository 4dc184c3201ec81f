"""Topics of MCAP recordings: what the messages of a channel become, and the members that hold them."""

from __future__ import annotations

import base64
import struct
from array import array
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import first_line
from mm_assets.json_text import parse_json
from mm_assets.sources.arrays import npy_bytes, npy_size
from mm_assets.sources.message_images import IMAGE_DECODERS, VIDEO_DECODERS, VIDEO_FORMATS

__all__ = ["MESSAGE_ERRORS", "Topic", "TopicMember", "escape_topic", "topic_of"]

MESSAGE_ERRORS = (ValueError, EOFError, struct.error, LookupError, TypeError, ArithmeticError, RecursionError)
"""What `mcap` and the decoders raise for bytes that are not what they should be."""

MAX_COLUMNS = 1 << 14  # numbers of a message of JSON

_ARRAY_ROLES = ("timestamp", "offset")  # that follow the role of a topic in the names of its arrays


@dataclass(slots=True)
class Topic:
    """A channel, and what its messages have in common; the messages themselves stay in the file.

    Attributes:
        channel: its number.
        role: the topic as a part of the names of members.
        encoding: of the messages.
        schema: name of the schema of the messages.
        description: the topic in the JSON of the sample.
        times: log time of each message, in the order of the file.
        sizes: bytes of each message, or of its image.
        images: extension and byte in the file, or -1, of each image, or why a message has none; None if the topic has
            no images.
        video: extension of the frames that its messages hold; None if they hold none.
        faults: why some messages, by number, have no frame.
        columns: names of the numbers of each message of JSON; None if messages differ.
        constants: texts that all messages of JSON have.
    """

    channel: int
    role: str
    encoding: str
    schema: str
    description: dict[str, Any]
    times: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    images: list[tuple[str, int] | str] | None = None
    video: str | None = None
    faults: dict[int, str] = field(default_factory=dict)
    columns: tuple[str, ...] | None = ()
    constants: Mapping[str, str] = field(default_factory=dict)

    def add(self, log_time: int, data: memoryview, place: int | None) -> None:
        """Counts a message.

        Args:
            log_time: when it was logged.
            data: its bytes.
            place: byte at which they are in the file; None if they are compressed.
        """
        decode = IMAGE_DECODERS.get((self.encoding, self.schema))
        if not self.times and decode is not None:
            try:
                decode(data)
            except MESSAGE_ERRORS as error:
                self.description["not_decoded"] = first_line(error)
            else:
                self.images = []
        self.times.append(log_time)
        if self.images is not None and decode is not None:
            try:
                image = decode(data)
            except MESSAGE_ERRORS as error:
                self.images.append(f"its image cannot be read: {first_line(error)}")
                self.sizes.append(0)
            else:
                at = -1 if place is None or image.start is None else place + image.start
                self.images.append((image.extension, at))
                self.sizes.append(image.size)
            return
        self._start_video(data)
        self.sizes.append(len(self.bytes_of(data)))
        if self.video is None and self.encoding == "json" and self.columns is not None:
            self._add_json(data)

    def _start_video(self, data: memoryview) -> None:
        if (self.encoding, self.schema) not in VIDEO_DECODERS:
            return
        try:
            form = VIDEO_DECODERS[self.encoding, self.schema](data)[0]
        except MESSAGE_ERRORS as error:
            self.faults[len(self.times) - 1] = f"its frame cannot be read: {first_line(error)}"
            return
        if len(self.times) == 1 and form in VIDEO_FORMATS:
            self.video = form

    def bytes_of(self, data: memoryview) -> bytes | memoryview:
        """Returns what a message adds to the bytes of its topic: its frame of video, else the message."""
        if self.video is None:
            return data
        try:
            return VIDEO_DECODERS[self.encoding, self.schema](data)[1]
        except MESSAGE_ERRORS:  # recorded in `faults` when it was counted
            return b""

    def _add_json(self, data: memoryview) -> None:
        try:
            numbers, texts = _leaves(data)
        except MESSAGE_ERRORS:
            self.columns = None
            return
        names = tuple(numbers)
        if len(self.times) == 1:
            self.columns, self.constants = names or None, texts
        elif (names, texts) != (self.columns, self.constants):
            self.columns = None

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """The numbers of the messages in the order of their times."""
        return np.argsort(np.frombuffer(self.times, np.uint64), kind="stable").astype(np.int64)

    def parts(self) -> list[tuple[str, int]]:
        """Returns the kind and the size of each member that holds all messages."""
        count, size = len(self.times), sum(self.sizes)
        if self.encoding == "json" and self.video is None:
            if self.columns:
                return [("npy", npy_size(np.dtype("<f8"), (count, len(self.columns))))]
            return [("jsonl", size + count)]
        return [(self.video or "bin", size), ("offset.npy", npy_size(np.dtype("<i8"), (count,)))]


class TopicMember:
    """The content of a member with all messages of a topic, in the order of their times.

    Args:
        topic: the topic, after all its messages were counted.
        kind: of `Topic.parts`.
    """

    def __init__(self, topic: Topic, kind: str) -> None:
        self._topic = topic
        self._kind = kind
        order = topic.order
        self._rank = np.empty_like(order)
        self._rank[order] = np.arange(len(order))
        if kind == "npy":
            self._rows = np.zeros((len(order), len(topic.columns or ())))
            return
        gap = int(kind == "jsonl")
        sizes = np.frombuffer(topic.sizes, np.uint64)[order].astype(np.int64) + gap
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._bytes = bytearray(b"\n" * int(self._starts[-1])) if kind != "offset.npy" else bytearray()

    def put(self, number: int, data: memoryview) -> None:
        """Puts a message in its place.

        Args:
            number: position of the message among the messages of the topic, in the order of the file.
            data: its bytes.
        """
        rank = int(self._rank[number])
        if self._kind == "npy":
            self._rows[rank] = list(_leaves(data)[0].values())
        elif self._kind != "offset.npy":
            start = int(self._starts[rank])
            line = bytes(data).replace(b"\n", b" ") if self._kind == "jsonl" else self._topic.bytes_of(data)
            self._bytes[start : start + len(line)] = line

    def content(self) -> bytes:
        """Returns the content, once every message is in its place."""
        if self._kind == "npy":
            return npy_bytes(self._rows)
        return npy_bytes(self._starts[:-1]) if self._kind == "offset.npy" else bytes(self._bytes)


def topic_of(channel: Any, schema: Any, roles: Set[str]) -> Topic:
    """Returns the topic of a channel.

    Args:
        channel: a record of `mcap`.
        schema: the record of its schema, or None.
        roles: of the other topics; neither the role nor the names of the members are one of theirs.
    """
    name, encoding = "" if schema is None else schema.name, channel.message_encoding
    description: dict[str, Any] = {"topic": channel.topic, "encoding": encoding, "schema": name}
    description |= {"metadata": dict(channel.metadata)} if channel.metadata else {}
    if schema is not None and encoding != "json":
        text = _text(schema.data)
        description["schema_data"] = base64.b64encode(schema.data).decode() if text is None else text
    role = escape_topic(channel.topic)
    stem, _, kind = role.rpartition(".")
    if role in roles or (kind in _ARRAY_ROLES and stem in roles) or any(f"{role}.{k}" in roles for k in _ARRAY_ROLES):
        role = f"{role}%23{channel.id}"
    return Topic(channel.id, role, encoding, name, description)


def _leaves(data: memoryview) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the numbers and the texts in a message of JSON by their paths.

    Raises:
        ValueError: it is not an object, has nulls or numbers that float64 does not have, or very many.
    """
    message = parse_json(str(data, "utf-8"))
    if not isinstance(message, dict):
        raise ValueError("is not an object")
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    pending: list[tuple[str, Any]] = [("", message)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += reversed([(f"{path}.{name}" if path else str(name), item) for name, item in items])
            if not value:
                texts[path] = "{}" if isinstance(value, dict) else "[]"
        elif isinstance(value, str):
            texts[path] = value
        elif value is None or (isinstance(value, int) and abs(value) > 1 << 53) or path in numbers:
            raise ValueError("has values that are not numbers of float64")
        else:
            numbers[path] = float(value)
        if len(numbers) + len(texts) > MAX_COLUMNS:
            raise ValueError(f"has more than {MAX_COLUMNS:,} values")
    return numbers, texts


def _text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def escape_topic(name: str) -> str:
    """Returns a topic as a part of a member's name: slashes become dots, and dots are escaped."""
    name = name.strip("/").replace("%", "%25").replace(".", "%2E").replace("/", ".")
    return name or "%"
