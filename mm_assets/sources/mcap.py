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
later passes read only the chunks that have what is asked for.
"""

from __future__ import annotations

import io
import os
import posixpath
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ShardError, SourceError, first_line, optional_import
from mm_assets.sources.arrays import npy_bytes, npy_size
from mm_assets.sources.entries import Scan
from mm_assets.sources.head import HEAD_BYTES, format_error
from mm_assets.sources.mcap_topics import MESSAGE_ERRORS, Topic, TopicMember, escape_topic, topic_of
from mm_assets.sources.member import Member, OnDamage, ShardDamage, named_member, skipped_bytes
from mm_assets.sources.message_images import IMAGE_DECODERS
from mm_assets.sources.row_members import dump_values
from mm_assets.storage.files import SourceFile

__all__ = ["McapSource"]

MAGIC = b"\x89MCAP0\r\n"
MAX_CHUNK_BYTES = 256 << 20  # of a chunk, packed and unpacked, and of any other record but an attachment
MAX_MESSAGES = 1 << 26  # of a file
MAX_JSON_BYTES = 64 << 20  # of what describes the file: metadata, schemas
PASS_BYTES = 256 << 20  # of arrays that are filled in one pass; a larger one has a pass of its own
BUFFER_BYTES = 256 << 10
REMOTE_BUFFER_BYTES = 8 << 20

_HEAD = struct.Struct("<BQ")  # opcode and length of a record
_MESSAGE = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_FOOTER, _SCHEMA, _CHANNEL, _MESSAGE_CODE, _CHUNK, _ATTACHMENT, _METADATA, _DATA_END = 2, 3, 4, 5, 6, 9, 12, 15
_HEADER = 1


class _Block(NamedTuple):
    """A chunk, or messages between chunks, with the numbers of the channels that have messages in it."""

    offset: int
    size: int
    is_chunk: bool
    channels: frozenset[int]


class _Attachment(NamedTuple):
    """A file in the recording, and its place."""

    name: str
    media_type: str
    offset: int
    size: int


class McapSource:
    """An MCAP file as a container; see `mm_assets.sources.base.Source`."""

    SUFFIXES: ClassVar[tuple[str, ...]] = (".mcap",)
    seekable = False
    text_encoding = "utf-8"

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._listing: _Listing | None = None

    @property
    def missing_end(self) -> str | None:
        """What is missing at the end of the file; None if nothing is, or if it has not been listed."""
        return None if self._listing is None else self._listing.missing_end

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether a file that starts with `head` is an MCAP file."""
        return head.startswith(MAGIC)

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Yields every member of the topics, and attachments; arguments and errors as `Source.members`.

        "salvage" continues at the next record.
        """
        for member, _ in self._list(Scan(on_damaged_shard, damage)).entries():
            yield member

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """Yields chosen members with their content; arguments and errors as `Source.payloads`.

        Images come first, as the file has them. Then come arrays, as many in a pass as fit in `PASS_BYTES`.
        """
        listing = self._list(Scan(on_damaged_shard, damage, max_bytes))
        images: dict[int, dict[int, Member]] = {}  # by channel, by number in the file
        arrays: list[tuple[Member, _Part]] = []
        for member, content in listing.entries():
            if not wanted(member) or content is None:
                continue
            if member.byte_size > max_bytes:
                detail = f"holds {member.byte_size} bytes, allowed are {max_bytes}"
                error = SourceError(self.file.url, detail, member=member.member)
                if on_error is None:
                    raise error
                on_error(member, error)
            elif isinstance(content, bytes):
                yield member, content
            elif isinstance(content, int):
                yield member, self.file.read(content, member.byte_size)
            elif isinstance(content, _Image):
                images.setdefault(content.channel, {})[content.number] = member
            else:
                arrays.append((member, content))
        yield from listing.images(images)
        batch: list[tuple[Member, _Part]] = []
        batch_bytes = 0
        for member, part in arrays:
            if batch and batch_bytes + member.byte_size > PASS_BYTES:
                yield from listing.arrays(batch)
                batch, batch_bytes = [], 0
            batch.append((member, part))
            batch_bytes += member.byte_size
        yield from listing.arrays(batch)

    def _list(self, scan: Scan) -> _Listing:
        if self._listing is None:
            self._listing = _Listing(self.file)
        for damage in self._listing.damage:
            scan.salvage(self.file.url, damage.detail, byte_offset=damage.byte_offset, byte_size=damage.byte_size)
        return self._listing


class _Image(NamedTuple):
    """The image of a message, by the number of its channel and its number in the channel."""

    channel: int
    number: int


class _Part(NamedTuple):
    """All messages of a topic as a member of a kind; see `Topic.parts`."""

    topic: Topic
    kind: str


_Content = bytes | int | _Image | _Part | None
"""A member's content: its bytes, its first byte in the file, or what it is made of; None for an entry without any."""


class _Listing:
    """Lists what a file has, by one pass over it.

    Args:
        file: the file.

    Raises:
        ShardError: it is not an MCAP file.
        SourceError: the storage failed.
    """

    def __init__(self, file: SourceFile) -> None:
        with optional_import("mcap", "reading MCAP files"):
            import_module("mcap.records")  # which `_parse` uses: a missing extra is reported before anything is read
        self._file = file
        self._blocks: list[_Block] = []
        self._topics: dict[int, Topic] = {}
        self._roles: set[str] = set()  # of the topics
        self._schemas: dict[int, Any] = {}
        self._num_orphans: dict[int, int] = {}  # messages, by channel, of channels that the file does not describe
        self._attachments: list[_Attachment] = []
        self._header: dict[str, Any] = {}
        self._metadata: list[dict[str, Any]] = []
        self._num_messages = self._description_bytes = 0
        self.damage: list[ShardDamage] = []
        self.missing_end: str | None = "the file has no footer: its recording was not finished"
        head = file.read(0, min(HEAD_BYTES, file.size))
        if not McapSource.accepts(head):
            raise format_error(file.url, head, "an MCAP file")
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
            except MESSAGE_ERRORS as error:
                self._add_damage(at, self._file.size - at, f"is not readable at byte {at}: {first_line(error)}")
                break
            end = at + _HEAD.size + length
            try:
                if code == _CHUNK:
                    channels = self._add_messages(*self._unpack(content, at))
                    self._blocks.append(_Block(at, end - at, True, channels))
                elif code == _MESSAGE_CODE:
                    run |= self._add_messages(_HEAD.pack(code, length) + content, at)
                    is_message = True
                elif code in (_FOOTER, _DATA_END):
                    self.missing_end = None
                elif code == _ATTACHMENT:
                    self._attach(content, at + _HEAD.size, length)
                else:
                    self._describe(code, content)
            except MESSAGE_ERRORS as error:
                self._add_damage(at, end - at, f"record {code} at byte {at} cannot be read: {first_line(error)}")
            if not is_message or end - run_start > BUFFER_BYTES:
                run_end = end if is_message else at
                self._blocks += [_Block(run_start, run_end - run_start, False, frozenset(run))] if run else []
                run_start, run = end, set()
            at = end
        self._blocks += [_Block(run_start, at - run_start, False, frozenset(run))] if run else []

    def _record(self, at: int) -> tuple[int, int, bytes]:
        """Returns opcode, length and content of a record; only the first bytes of an attachment.

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
        content = self._stream.read(size)
        if len(content) < size:
            raise ValueError("the file ends inside of a record: it is truncated")
        return content

    def _add_damage(self, at: int, size: int, detail: str) -> None:
        self.damage.append(ShardDamage(byte_offset=at, byte_size=size, detail=detail))

    def _unpack(self, content: bytes, at: int) -> tuple[bytes, int | None]:
        """Returns the records of the chunk at byte `at`, and their first byte in the file if it is not compressed."""
        chunk = _parse("Chunk", content)
        size = chunk.uncompressed_size
        if size > MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk unpacks to {size:,} bytes, at most {MAX_CHUNK_BYTES:,} are read")
        records = _decompress(chunk.compression, chunk.data, size)
        if len(records) != size:
            raise ValueError(f"a chunk unpacks to {len(records):,} bytes or more, its record says {size:,}")
        if chunk.uncompressed_crc and zlib.crc32(records) != chunk.uncompressed_crc:
            raise ValueError("the checksum of a chunk is wrong")
        return records, None if chunk.compression else at + _HEAD.size + len(content) - size

    def _add_messages(self, records: bytes, place: int | None) -> frozenset[int]:
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
                self._num_orphans[channel] = self._num_orphans.get(channel, 0) + 1
                continue
            start += _MESSAGE.size
            topic.add(log_time, memoryview(records)[start:end], None if place is None else place + start)
            channels.add(channel)
        return frozenset(channels)

    def _describe(self, code: int, content: bytes) -> None:
        """Adds a record that describes the file, a schema or a channel."""
        if code in (_HEADER, _SCHEMA, _CHANNEL, _METADATA):
            self._description_bytes += len(content)
            if self._description_bytes > MAX_JSON_BYTES:
                raise ValueError(f"descriptions take more than {MAX_JSON_BYTES:,} bytes")
        if code == _HEADER:
            header = _parse("Header", content)
            self._header = {"profile": header.profile, "library": header.library}
        elif code == _SCHEMA:
            schema = _parse("Schema", content)
            self._schemas.setdefault(schema.id, schema)
        elif code == _METADATA:
            metadata = _parse("Metadata", content)
            self._metadata.append({"name": metadata.name, **metadata.metadata})
        elif code == _CHANNEL:
            channel = _parse("Channel", content)
            if channel.id not in self._topics:
                schema = self._schemas.get(channel.schema_id)
                self._topics[channel.id] = topic = topic_of(channel, schema, self._roles)
                self._roles.add(topic.role)

    def _attach(self, content: bytes, at: int, length: int) -> None:
        """Adds an attachment, whose data is not read; its record has its content from byte `at` on."""
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

    def entries(self) -> Iterator[tuple[Member, _Content]]:
        """Yields every entry with its content."""
        for ordinal, (member, content) in enumerate(self._entries()):
            yield member._replace(ordinal=ordinal), content

    def _entries(self) -> Iterator[tuple[Member, _Content]]:
        base = posixpath.basename(self._file.url)
        key = escape_topic(base[: -len(".mcap")] if base.lower().endswith(".mcap") else base)
        content = self._json()
        yield self._member(f"{key}.json", len(content)), content
        for topic in sorted(self._topics.values(), key=lambda topic: topic.role):
            count, name = len(topic.times), f"{key}.{topic.role}"
            if not count:
                continue
            if topic.images is not None:
                yield from self._image_entries(topic, name)
            else:
                for kind, size in topic.parts():
                    yield self._member(f"{name}.{kind}", size), _Part(topic, kind)
                for number, reason in topic.faults.items() if topic.video else ():
                    yield self._member(f"{name}.message {number}", 0, reason=reason), None
            yield (
                self._member(f"{name}.timestamp.npy", npy_size(np.dtype("<f8"), (count,))),
                npy_bytes(self._seconds(topic)),
            )
        for name, _, place, size in self._attachments:
            stem, dot, extension = name.rpartition(".")
            role = f"{escape_topic(stem)}.{escape_topic(extension)}" if dot else escape_topic(name)
            yield self._member(f"{key}.attachments.{role}", size, place), place
        for channel, count in self._num_orphans.items():
            reason = f"{count:,} messages of a channel that the file does not describe"
            yield self._member(f"{key}.channel {channel}", 0, reason=reason), None
        for damage in self.damage:
            end = damage.byte_offset + damage.byte_size
            reason = f"damaged: {damage.detail}"
            yield skipped_bytes(self._file.url, damage.byte_offset, end, ordinal=0, reason=reason), None

    def _image_entries(self, topic: Topic, name: str) -> Iterator[tuple[Member, _Content]]:
        images = topic.images or []
        for frame, number in enumerate(topic.order.tolist()):
            image = images[number]
            if isinstance(image, str):
                yield self._member(f"{name}.{frame}", 0, reason=image), None
                continue
            extension, place = image
            content: _Content = _Image(topic.channel, number) if place < 0 else place
            offset = None if place < 0 else place
            yield self._member(f"{name}.{frame}.{extension}", topic.sizes[number], offset), content

    def _member(self, name: str, size: int, place: int | None = None, *, reason: str | None = None) -> Member:
        return named_member(
            self._file.url, os.fsencode(name), ordinal=0, byte_size=size, byte_offset=place, skip_reason=reason
        )

    def _seconds(self, topic: Topic) -> npt.NDArray[np.float64]:
        times = np.sort(np.frombuffer(topic.times, np.uint64), kind="stable")
        return (times - np.uint64(self._start)).astype(np.float64) / 1e9

    def _json(self) -> bytes:
        ends = [max(topic.times) for topic in self._topics.values() if topic.times]
        topics = {}
        for topic in sorted(self._topics.values(), key=lambda topic: topic.role):
            description = {**topic.description, "messages": len(topic.times)}
            if topic.encoding == "json" and topic.images is None and topic.video is None and topic.columns:
                description |= {"columns": list(topic.columns), "constants": dict(topic.constants)}
            topics[topic.role] = description
        values = {
            **self._header,
            "start_time_ns": self._start,
            "duration_seconds": (max(ends, default=self._start) - self._start) / 1e9,
            "topics": topics,
        }
        values |= {"metadata": self._metadata} if self._metadata else {}
        return dump_values(values).encode()

    # -- contents

    def images(self, members: Mapping[int, Mapping[int, Member]]) -> Iterator[tuple[Member, bytes]]:
        """Yields the images of some messages; their members are by channel and number in the file."""
        for topic, number, data in self._messages_of(members.keys()):
            member = members[topic.channel].get(number)
            decode = IMAGE_DECODERS.get((topic.encoding, topic.schema))
            if member is not None and decode is not None:
                yield member, decode(data).content()

    def arrays(self, members: Sequence[tuple[Member, _Part]]) -> Iterator[tuple[Member, bytes]]:
        """Yields members with all messages of a topic, which are filled in one pass."""
        targets = [(member, TopicMember(topic, kind)) for member, (topic, kind) in members]
        by_channel: dict[int, list[TopicMember]] = {}
        for (_, target), (_, part) in zip(targets, members, strict=True):
            by_channel.setdefault(part.topic.channel, []).append(target)
        for topic, number, data in self._messages_of(by_channel.keys()):
            for target in by_channel[topic.channel]:
                target.put(number, data)
        for member, target in targets:
            yield member, target.content()

    def _messages_of(self, channels: Set[int]) -> Iterator[tuple[Topic, int, memoryview]]:
        """Yields the messages of some channels, with their numbers, from the blocks that have them."""
        numbers = dict.fromkeys(channels, 0)
        for block in self._blocks:
            if not block.channels & numbers.keys():
                continue
            try:
                self._stream.seek(block.offset)
                records = self._exactly(block.size)
                if block.is_chunk:
                    records, _ = self._unpack(records[_HEAD.size :], block.offset)
                for code, start, end in _records(records):
                    if code != _MESSAGE_CODE:
                        continue
                    channel = _MESSAGE.unpack_from(records, start)[0]
                    if channel in numbers and channel in block.channels:
                        yield self._topics[channel], numbers[channel], memoryview(records)[start + _MESSAGE.size : end]
                        numbers[channel] += 1
            except MESSAGE_ERRORS as error:
                detail = f"changed since it was listed: {first_line(error)}"
                raise ShardError(self._file.url, detail, byte_offset=block.offset) from error


def _records(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields opcode, first byte and end of the content of each record.

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


def _parse(record: str, content: bytes) -> Any:
    """Returns a record as `mcap` reads it; raises `ValueError` for bytes that are none."""
    from mcap import data_stream, exceptions, records

    try:
        return getattr(records, record).read(data_stream.ReadDataStream(io.BytesIO(content)))
    except exceptions.McapError as error:
        raise ValueError(f"a record {record} is truncated") from error


def _decompress(compression: str, data: bytes, size: int) -> bytes:
    """Returns what a chunk unpacks to, up to one byte more than `size`."""
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
