"""MCAP recordings of robots: a file is a sample, whose topics are streams on one clock.

The topic ``/arm/joint_states`` of ``run.mcap`` has the members ``run.arm.joint_states.npy``, a row per message, and
``run.arm.joint_states.timestamp.npy``, the seconds at which each was logged, from the first message of the file on. Its
messages are in the order of these times. What they become follows from their encoding and schema:

- JSON whose messages all have the same numbers: float64 columns, named in the sample's JSON;
- images of ROS and Foxglove: numbered members, encoded ones as they are, raw ones as PNG without compression;
- other JSON: the messages as lines, ``.jsonl``;
- video of Foxglove: the frames one after the other, ``.h264``, and ``.offset.npy``, where each begins;
- anything else: the messages one after the other, ``.bin``, and ``.offset.npy``.

Nothing in the file is trusted: lengths are compared with the bytes that follow, and chunks are unpacked to the size
that they state, up to `MAX_CHUNK_BYTES`. The file's own index is not needed: one pass finds what each chunk has, and
later passes read the chunks that have what is wanted.
"""

from __future__ import annotations

import base64
import io
import os
import posixpath
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ShardError, SourceError, first_line, optional_import
from mm_assets.json_text import parse_json
from mm_assets.sources.arrays import npy_bytes, npy_size
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.member import Member, OnDamage, ShardDamage, named_member, skipped_bytes
from mm_assets.sources.message_images import IMAGE_DECODERS, VIDEO_DECODERS, VIDEO_FORMATS
from mm_assets.sources.row_members import dump_values
from mm_assets.storage.files import SourceFile

__all__ = ["McapSource"]

MAGIC = b"\x89MCAP0\r\n"
MAX_CHUNK_BYTES = 256 << 20  # of a chunk, packed and unpacked, and of any other record but an attachment
MAX_MESSAGES = 1 << 26  # of a file
MAX_COLUMNS = 1 << 14  # numbers of a message of JSON
MAX_JSON_BYTES = 64 << 20  # of what describes the file: metadata, schemas
HELD_BYTES = 256 << 20  # of arrays that are filled in one pass; a larger one has a pass of its own
BUFFER_BYTES = 256 << 10
REMOTE_BUFFER_BYTES = 8 << 20

_HEAD = struct.Struct("<BQ")  # opcode and length of a record
_MESSAGE = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_FOOTER, _SCHEMA, _CHANNEL, _MESSAGE_CODE, _CHUNK, _ATTACHMENT, _METADATA, _DATA_END = 2, 3, 4, 5, 6, 9, 12, 15
_HEADER = 1
_ERRORS = (ValueError, EOFError, struct.error, LookupError, TypeError, ArithmeticError, RecursionError)
"""What `mcap` and the decoders raise for bytes that are not what they should be."""


class _Block(NamedTuple):
    """A chunk, or messages between chunks, with the numbers of the channels that have messages in it."""

    offset: int
    size: int
    is_chunk: bool
    channels: frozenset[int]


class _Attachment(NamedTuple):
    """A file in the file, and its place."""

    name: str
    media_type: str
    offset: int
    size: int


@dataclass(slots=True)
class _Topic:
    """The messages of a channel.

    Attributes:
        channel: its number.
        role: the topic as a part of names.
        encoding: of messages.
        schema: name of the schema.
        description: what the sample's JSON says.
        times: log time of each message, in the order of the file.
        sizes: bytes of each message, or of its image.
        images: extension, and byte in the file or -1, of each image, or why a message has none.
        video: extension of the frames that its messages hold; None if they hold none.
        faults: why some messages, by number, have no frame.
        columns: names of the numbers of each message of JSON; None where they differ.
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
        """Counts a message, whose first byte is at `place` of the file, if it is in the file as it is."""
        decode = IMAGE_DECODERS.get((self.encoding, self.schema))
        if not self.times and decode is not None:
            try:
                decode(data)
            except _ERRORS as error:
                self.description["not_decoded"] = first_line(error)
            else:
                self.images = []
        self.times.append(log_time)
        if self.images is not None and decode is not None:
            try:
                image = decode(data)
            except _ERRORS as error:
                self.images.append(f"its image cannot be read: {first_line(error)}")
                self.sizes.append(0)
            else:
                known = place is not None and image.start is not None
                self.images.append((image.extension, (place or 0) + (image.start or 0) if known else -1))
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
        except _ERRORS as error:
            self.faults[len(self.times) - 1] = f"its frame cannot be read: {first_line(error)}"
            return
        if len(self.times) == 1 and form in VIDEO_FORMATS:
            self.video = form

    def bytes_of(self, data: memoryview) -> bytes | memoryview:
        """What a message adds to the bytes of its topic: its frame of video, else the message."""
        if self.video is None:
            return data
        try:
            return VIDEO_DECODERS[self.encoding, self.schema](data)[1]
        except _ERRORS:  # its fault was noted
            return b""

    def _add_json(self, data: memoryview) -> None:
        try:
            numbers, texts = _leaves(data)
        except _ERRORS:
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


class McapSource:
    """An MCAP file as a container; see `mm_assets.sources.base.Source`.

    Args:
        file: the file, which stays open and belongs to the caller.

    Attributes:
        missing_end: what lacks at the end of a file that was not finished, once its members were listed.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".mcap",)
    seekable = False
    text_encoding = "utf-8"

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._listing: _Listing | None = None

    @property
    def file(self) -> SourceFile:
        """The file."""
        return self._file

    @property
    def missing_end(self) -> str | None:
        """What lacks at the end of the file, if it has been listed."""
        return None if self._listing is None else self._listing.missing_end

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether a file that starts with `head` is an MCAP file."""
        return head.startswith(MAGIC)

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Every member of the topics, and attachments; arguments and errors as `Source.members`.

        "salvage" continues at the next record.
        """
        yield from self._listed(on_damaged_shard, damage).members()

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """The content of chosen members; arguments and errors as `Source.payloads`.

        Images come first, as the file has them. Then come arrays, as many in a pass as fit in `HELD_BYTES`.
        """
        listing = self._listed(on_damaged_shard, damage)
        images: dict[int, dict[int, Member]] = {}  # by channel, by number in the file
        arrays: list[tuple[Member, _Topic, str]] = []
        for member, what in listing.entries():
            if not wanted(member) or what is None:
                continue
            if member.byte_size > max_bytes:
                detail = f"holds {member.byte_size} bytes, allowed are {max_bytes}"
                error = SourceError(self.file.url, detail, member=member.member)
                if on_error is None:
                    raise error
                on_error(member, error)
            elif isinstance(what, bytes):
                yield member, what
            elif isinstance(what, int):
                yield member, self.file.read(what, member.byte_size)
            elif isinstance(what[1], int):
                images.setdefault(what[0].channel, {})[what[1]] = member
            else:
                arrays.append((member, what[0], what[1]))
        yield from listing.images(images)
        while arrays:
            held, size = [arrays.pop(0)], 0
            size = held[0][0].byte_size
            while arrays and size + arrays[0][0].byte_size <= HELD_BYTES:
                held.append(arrays.pop(0))
                size += held[-1][0].byte_size
            yield from listing.arrays(held)

    def _listed(self, on_damaged: OnDamage, damage: list[ShardDamage] | None) -> _Listing:
        if self._listing is None:
            self._listing = _Listing(self.file)
        if self._listing.damage:
            if on_damaged == "fail":
                first = self._listing.damage[0]
                raise ShardError(self.file.url, first.detail, byte_offset=first.byte_offset)
            if damage is not None:
                damage += self._listing.damage
        return self._listing


_What = bytes | int | tuple[_Topic, int | str] | None
"""What gives a member's content: itself, its place in the file, a topic and the number or the kind of its part."""


class _Listing:
    """What a file has, by one pass over it.

    Args:
        file: the file.

    Raises:
        ShardError: it is not an MCAP file.
        SourceError: the storage failed.
    """

    def __init__(self, file: SourceFile) -> None:
        with optional_import("mcap", "reading MCAP files"):
            import_module("mcap.records")  # which `_record` uses: a missing extra is reported before anything is read
        self._file = file
        self._blocks: list[_Block] = []
        self._topics: dict[int, _Topic] = {}
        self._schemas: dict[int, Any] = {}
        self._unknown: dict[int, int] = {}  # messages of channels that the file does not describe
        self._attachments: list[_Attachment] = []
        self._shown: dict[str, Any] = {}
        self._metadata: list[dict[str, Any]] = []
        self._num_messages = self._described = 0
        self.damage: list[ShardDamage] = []
        self.missing_end: str | None = "the file has no footer: its recording was not finished"
        head = file.read(0, min(HEAD_BYTES, file.size))
        if not McapSource.accepts(head):
            foreign = foreign_file(head)
            detail = "is not an MCAP file" if foreign is None else foreign.as_not("an MCAP file")
            raise ShardError(file.url, detail, byte_offset=0)
        self._stream = io.BufferedReader(file.open(), BUFFER_BYTES if file.is_local else REMOTE_BUFFER_BYTES)
        self._walk()
        self._start = min((min(topic.times) for topic in self._topics.values() if topic.times), default=0)

    # -- the pass

    def _walk(self) -> None:
        at = run_start = len(MAGIC)  # a run: messages between other records
        run = set[int]()
        while at < self._file.size and self.missing_end is not None:
            is_message = False
            try:
                code, length, content = self._record(at)
            except _ERRORS as error:
                self._lose(at, self._file.size - at, f"is not readable at byte {at}: {first_line(error)}")
                break
            end = at + _HEAD.size + length
            try:
                if code == _CHUNK:
                    channels = self._messages(*self._unpacked(content, at))
                    self._blocks.append(_Block(at, end - at, True, channels))
                elif code == _MESSAGE_CODE:
                    run |= self._messages(_HEAD.pack(code, length) + content, at)
                    is_message = True
                elif code in (_FOOTER, _DATA_END):
                    self.missing_end = None
                elif code == _ATTACHMENT:
                    self._attach(content, at + _HEAD.size, length)
                else:
                    self._describe(code, content)
            except _ERRORS as error:
                self._lose(at, end - at, f"record {code} at byte {at} cannot be read: {first_line(error)}")
            if not is_message or end - run_start > BUFFER_BYTES:
                run_end = end if is_message else at
                self._blocks += [_Block(run_start, run_end - run_start, False, frozenset(run))] if run else []
                run_start, run = end, set()
            at = end
        self._blocks += [_Block(run_start, at - run_start, False, frozenset(run))] if run else []

    def _record(self, at: int) -> tuple[int, int, bytes]:
        """Opcode, length and content of a record, of an attachment only its start.

        Raises:
            ValueError: the file ends in it, or it is larger than allowed.
        """
        self._stream.seek(at)
        code, length = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > self._file.size - at - _HEAD.size:
            raise ValueError(f"record {code} has {length:,} bytes, and the file ends before: it is truncated")
        if code == _ATTACHMENT:
            return code, length, self._exactly(min(length, 64 << 10))
        if length > MAX_CHUNK_BYTES:
            raise ValueError(f"record {code} has {length:,} bytes, at most {MAX_CHUNK_BYTES:,} are read")
        return code, length, self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        found = self._stream.read(size)
        if len(found) < size:
            raise ValueError("the file ends inside of a record: it is truncated")
        return found

    def _lose(self, at: int, size: int, detail: str) -> None:
        self.damage.append(ShardDamage(byte_offset=at, byte_size=size, detail=detail))

    def _unpacked(self, content: bytes, at: int) -> tuple[bytes, int | None]:
        """The records of the chunk at byte `at`, and where they begin in the file, if they are not compressed."""
        chunk = _parsed("Chunk", content)
        size = chunk.uncompressed_size
        if size > MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk unpacks to {size:,} bytes, at most {MAX_CHUNK_BYTES:,} are read")
        found = _decompressed(chunk.compression, chunk.data, size)
        if len(found) != size:
            raise ValueError(f"a chunk unpacks to {len(found):,} bytes or more, its record says {size:,}")
        if chunk.uncompressed_crc and zlib.crc32(found) != chunk.uncompressed_crc:
            raise ValueError("the checksum of a chunk is wrong")
        return found, None if chunk.compression else at + _HEAD.size + len(content) - size

    def _messages(self, records: bytes, place: int | None) -> frozenset[int]:
        """Counts the messages of a chunk, or of records at a place of the file; returns their channels."""
        channels = set()
        for code, start, end in _records(records):  # all of them first: a chunk counts as a whole or not at all
            if code in (_SCHEMA, _CHANNEL):
                self._describe(code, records[start:end])
        for code, start, end in _records(records):
            if code != _MESSAGE_CODE:
                continue
            channel, _, log_time, _ = _MESSAGE.unpack_from(records, start)
            self._num_messages += 1
            if self._num_messages > MAX_MESSAGES:
                raise ShardError(self._file.url, f"has more than {MAX_MESSAGES:,} messages", byte_offset=0)
            topic = self._topics.get(channel)
            if topic is None:
                self._unknown[channel] = self._unknown.get(channel, 0) + 1
                continue
            start += _MESSAGE.size
            topic.add(log_time, memoryview(records)[start:end], None if place is None else place + start)
            channels.add(channel)
        return frozenset(channels)

    def _describe(self, code: int, content: bytes) -> None:
        """Takes a record that describes the file, a schema or a channel."""
        if code in (_HEADER, _SCHEMA, _CHANNEL, _METADATA):
            self._described += len(content)
            if self._described > MAX_JSON_BYTES:
                raise ValueError(f"descriptions take more than {MAX_JSON_BYTES:,} bytes")
        if code == _HEADER:
            header = _parsed("Header", content)
            self._shown = {"profile": header.profile, "library": header.library}
        elif code == _SCHEMA:
            schema = _parsed("Schema", content)
            self._schemas.setdefault(schema.id, schema)
        elif code == _METADATA:
            metadata = _parsed("Metadata", content)
            self._metadata.append({"name": metadata.name, **metadata.metadata})
        elif code == _CHANNEL:
            channel = _parsed("Channel", content)
            if channel.id not in self._topics:
                schema = self._schemas.get(channel.schema_id)
                self._topics[channel.id] = _topic_of(channel, schema, {topic.role for topic in self._topics.values()})

    def _attach(self, content: bytes, at: int, length: int) -> None:
        """Takes an attachment, whose record has its content from byte `at` on; its data is not read."""
        place = 2 * 8  # after two times
        texts = []
        for _ in ("name", "media type"):
            (size,) = struct.unpack_from("<I", content, place)
            texts.append(content[place + 4 : place + 4 + size].decode())
            place += 4 + size
        (size,) = struct.unpack_from("<Q", content, place)
        if place + 8 + size + 4 != length:
            raise ValueError(f"an attachment of {size:,} bytes is not of the size of its record")
        self._attachments.append(_Attachment(texts[0], texts[1], at + place + 8, size))

    # -- members

    def members(self) -> Iterator[Member]:
        """Every entry."""
        for member, _ in self.entries():
            yield member

    def entries(self) -> Iterator[tuple[Member, _What]]:
        """Every entry, and what gives its content."""
        for ordinal, (member, what) in enumerate(self._entries()):
            yield member._replace(ordinal=ordinal), what

    def _entries(self) -> Iterator[tuple[Member, _What]]:
        base = posixpath.basename(self._file.url)
        key = _part(base[: -len(".mcap")] if base.lower().endswith(".mcap") else base)
        content = self._json()
        yield self._member(f"{key}.json", len(content)), content
        for topic in sorted(self._topics.values(), key=lambda topic: topic.role):
            count, name = len(topic.times), f"{key}.{topic.role}"
            if not count:
                continue
            if topic.images is not None:
                yield from self._image_entries(topic, name)
            else:
                for kind, size in _parts(topic):
                    yield self._member(f"{name}.{kind}", size), (topic, kind)
                for number, reason in topic.faults.items() if topic.video else ():
                    yield self._member(f"{name}.message {number}", 0, reason=reason), None
            yield (
                self._member(f"{name}.timestamp.npy", npy_size(np.dtype("<f8"), (count,))),
                npy_bytes(self._seconds(topic)),
            )
        for name, _, place, size in self._attachments:
            stem, dot, extension = name.rpartition(".")
            role = f"{_part(stem)}.{_part(extension)}" if dot else _part(name)
            yield self._member(f"{key}.attachments.{role}", size, place), place
        for channel, count in self._unknown.items():
            reason = f"{count:,} messages of a channel that the file does not describe"
            yield self._member(f"{key}.channel {channel}", 0, reason=reason), None
        for lost in self.damage:
            end = lost.byte_offset + lost.byte_size
            reason = f"damaged: {lost.detail}"
            yield skipped_bytes(self._file.url, lost.byte_offset, end, ordinal=0, reason=reason), None

    def _image_entries(self, topic: _Topic, name: str) -> Iterator[tuple[Member, _What]]:
        images = topic.images or []
        for frame, number in enumerate(topic.order.tolist()):
            image = images[number]
            if isinstance(image, str):
                yield self._member(f"{name}.{frame}", 0, reason=image), None
                continue
            extension, place = image
            what: _What = (topic, number) if place < 0 else place
            yield self._member(f"{name}.{frame}.{extension}", topic.sizes[number], None if place < 0 else place), what

    def _member(self, name: str, size: int, place: int | None = None, *, reason: str | None = None) -> Member:
        return named_member(
            self._file.url, os.fsencode(name), ordinal=0, byte_size=size, byte_offset=place, skip_reason=reason
        )

    def _seconds(self, topic: _Topic) -> npt.NDArray[np.float64]:
        times = np.sort(np.frombuffer(topic.times, np.uint64), kind="stable")
        return (times - np.uint64(self._start)).astype(np.float64) / 1e9

    def _json(self) -> bytes:
        ends = [max(topic.times) for topic in self._topics.values() if topic.times]
        topics = {}
        for topic in sorted(self._topics.values(), key=lambda topic: topic.role):
            described = {**topic.description, "messages": len(topic.times)}
            if topic.encoding == "json" and topic.images is None and topic.video is None and topic.columns:
                described |= {"columns": list(topic.columns), "constants": dict(topic.constants)}
            topics[topic.role] = described
        values = {
            **self._shown,
            "start_time_ns": self._start,
            "duration_seconds": (max(ends, default=self._start) - self._start) / 1e9,
            "topics": topics,
        }
        values |= {"metadata": self._metadata} if self._metadata else {}
        return dump_values(values).encode()

    # -- contents

    def images(self, wanted: Mapping[int, Mapping[int, Member]]) -> Iterator[tuple[Member, bytes]]:
        """The images of some messages, by channel and number in the file."""
        for topic, number, data in self._wanted_messages(wanted.keys()):
            member = wanted[topic.channel].get(number)
            decode = IMAGE_DECODERS.get((topic.encoding, topic.schema))
            if member is not None and decode is not None:
                yield member, decode(data).content()

    def arrays(self, wanted: Sequence[tuple[Member, _Topic, str]]) -> Iterator[tuple[Member, bytes]]:
        """Members with all messages of a topic; they are filled in one pass."""
        targets = [(member, topic, _Filled(topic, kind)) for member, topic, kind in wanted]
        by_channel: dict[int, list[_Filled]] = {}
        for _, topic, filled in targets:
            by_channel.setdefault(topic.channel, []).append(filled)
        for topic, number, data in self._wanted_messages(by_channel.keys()):
            for filled in by_channel[topic.channel]:
                filled.put(number, data)
        for member, _, filled in targets:
            yield member, filled.content()

    def _wanted_messages(self, channels: Any) -> Iterator[tuple[_Topic, int, memoryview]]:
        """The messages of some channels, with their numbers, of the blocks that have them."""
        numbers = dict.fromkeys(channels, 0)
        for block in self._blocks:
            if not block.channels & numbers.keys():
                continue
            try:
                self._stream.seek(block.offset)
                records = self._exactly(block.size)
                if block.is_chunk:
                    records, _ = self._unpacked(records[_HEAD.size :], block.offset)
                for code, start, end in _records(records):
                    if code != _MESSAGE_CODE:
                        continue
                    channel = _MESSAGE.unpack_from(records, start)[0]
                    if channel in numbers and channel in block.channels:
                        yield self._topics[channel], numbers[channel], memoryview(records)[start + _MESSAGE.size : end]
                        numbers[channel] += 1
            except _ERRORS as error:
                detail = f"changed since it was listed: {first_line(error)}"
                raise ShardError(self._file.url, detail, byte_offset=block.offset) from error


class _Filled:
    """A member with all messages of a topic, in the order of their times."""

    def __init__(self, topic: _Topic, kind: str) -> None:
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
        """Takes a message, by its number in the file."""
        rank = int(self._rank[number])
        if self._kind == "npy":
            self._rows[rank] = list(_leaves(data)[0].values())
        elif self._kind != "offset.npy":
            start = int(self._starts[rank])
            line = bytes(data).replace(b"\n", b" ") if self._kind == "jsonl" else self._topic.bytes_of(data)
            self._bytes[start : start + len(line)] = line

    def content(self) -> bytes:
        """The whole member."""
        if self._kind == "npy":
            return npy_bytes(self._rows)
        return npy_bytes(self._starts[:-1]) if self._kind == "offset.npy" else bytes(self._bytes)


def _parts(topic: _Topic) -> list[tuple[str, int]]:
    """Kind and size of the members that hold the messages of a topic."""
    count, size = len(topic.times), sum(topic.sizes)
    if topic.video is not None:
        return [(topic.video, size), ("offset.npy", npy_size(np.dtype("<i8"), (count,)))]
    if topic.encoding == "json" and topic.columns:
        return [("npy", npy_size(np.dtype("<f8"), (count, len(topic.columns))))]
    if topic.encoding == "json":
        return [("jsonl", size + count)]
    return [("bin", size), ("offset.npy", npy_size(np.dtype("<i8"), (count,)))]


def _records(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Opcode, first byte and end of the content of each record.

    Raises:
        ValueError: the bytes end in a record.
    """
    at = 0
    while at < len(content):
        if at + _HEAD.size > len(content):
            raise ValueError("records end inside of one")
        code, length = _HEAD.unpack_from(content, at)
        start = at + _HEAD.size
        at = start + length
        if at > len(content) or (code == _MESSAGE_CODE and length < _MESSAGE.size):
            raise ValueError(f"a record states {length:,} bytes, which it does not have")
        yield code, start, at


def _parsed(record: str, content: bytes) -> Any:
    """A record as `mcap` reads it; `ValueError` for bytes that are none."""
    from mcap import data_stream, exceptions, records

    try:
        return getattr(records, record).read(data_stream.ReadDataStream(io.BytesIO(content)))
    except exceptions.McapError as error:
        raise ValueError(f"a record {record} is truncated") from error


def _topic_of(channel: Any, schema: Any, roles: Set[str]) -> _Topic:
    """A channel without messages, whose role none of the others has or makes."""
    name, encoding = "" if schema is None else schema.name, channel.message_encoding
    description: dict[str, Any] = {"topic": channel.topic, "encoding": encoding, "schema": name}
    description |= {"metadata": dict(channel.metadata)} if channel.metadata else {}
    if schema is not None and encoding != "json":
        text = _text(schema.data)
        description["schema_data"] = base64.b64encode(schema.data).decode() if text is None else text
    role = _part(channel.topic)
    made = {f"{other}.{kind}" for other in roles for kind in ("timestamp", "offset")}
    if role in roles | made or not roles.isdisjoint((f"{role}.timestamp", f"{role}.offset")):
        role = f"{role}%23{channel.id}"
    return _Topic(channel.id, role, encoding, name, description)


def _decompressed(compression: str, data: bytes, size: int) -> bytes:
    """What a chunk unpacks to, of which at most one byte more than `size` is made."""
    if compression == "":
        return data
    if compression == "zstd":
        import zstandard

        try:
            limited = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data)
            return limited.read(size + 1)
        except zstandard.ZstdError as error:
            raise ValueError(f"a chunk does not unpack: {error}") from error
    if compression == "lz4":
        with optional_import("lz4", "reading MCAP files"):
            import lz4.frame

        try:
            unpacked: bytes = lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=size + 1)
        except RuntimeError as error:
            raise ValueError(f"a chunk does not unpack: {error}") from error
        return unpacked
    raise ValueError(f"a chunk is compressed by {compression!a}, expected zstd, lz4 or none")


# -- JSON


def _leaves(data: memoryview) -> tuple[dict[str, float], dict[str, str]]:
    """The numbers and the texts in a message of JSON by their paths.

    Raises:
        ValueError: it is not an object, has nulls or numbers that float64 does not have, or very many.
    """
    found = parse_json(str(data, "utf-8"))
    if not isinstance(found, dict):
        raise ValueError("is not an object")
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    pending: list[tuple[str, Any]] = [("", found)]
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


def _part(name: str) -> str:
    """A topic or a name as a part of a member's name: slashes become dots, other dots are escaped."""
    name = name.strip("/").replace("%", "%25").replace(".", "%2E").replace("/", ".")
    return name or "%"
