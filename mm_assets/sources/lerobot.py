"""LeRobot datasets of versions 2 and 3, folders of Parquet, MP4 and JSON files: an episode is a sample.

A shard is one Parquet file of ``data/``. Its episode 12 has the members

- ``episode_000012.json``: the task, the number of the episode, its length, and the features of ``meta/info.json``;
- ``episode_000012.<feature>.npy`` of each feature of numbers, (frames, ...), named as LeRobot names it:
  ``episode_000012.observation.state.npy``;
- ``episode_000012.<feature>.mp4`` of each video; ``episode_000012.<feature>.<frame>.png`` (or ``jpg``) of images.

Version 3 has the videos of many episodes in one file. The packets of an episode are copied out of it, and nothing is
encoded again; a file with one episode is copied as it is. Of a dataset that `mm_assets.exports` wrote, an episode has
the key and the JSON of the sample. Nothing in the files is trusted: an episode whose rows contradict themselves or
``meta/`` is an entry with the reason, and a video that cannot be copied is an error of its member.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mm_assets.errors import MediaError, ShardError, SourceError, first_line, optional_import
from mm_assets.json_text import parse_json
from mm_assets.media.content_types import extension_of_content_type, sniff_content_type
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.video import open_media, video_stream_of, words_of
from mm_assets.sources.arrays import npy_bytes, npy_size
from mm_assets.sources.arrow_rows import json_rows
from mm_assets.sources.head import HEAD_BYTES
from mm_assets.sources.member import Member, OnDamage, ShardDamage, named_member
from mm_assets.sources.parquet import PARQUET_ERRORS, PARQUET_MAGIC
from mm_assets.sources.row_members import KEY_COLUMN, dump_values
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile
from mm_assets.storage.urls import without_query

__all__ = ["LeRobotSource"]

MAX_META_BYTES = 64 << 20  # of info.json and of the tasks
MAX_LINE_BYTES = 1 << 20  # of a line of a list in `meta/`
MAX_EPISODE_BYTES = 2 << 30  # of an episode's rows, which are held together
MAX_META_FILES = 1_000_000  # of Parquet that describe episodes
BATCH_BYTES = 16 << 20  # of rows that are decoded at a time, by the mean size of a row group's rows
MAX_BATCH_ROWS = 4096
REMOTE_BLOCK_BYTES = 4 << 20  # of a remote video that are read at a time

_DATA = re.compile(
    r"(?P<root>.*/|)data/chunk-\d{1,9}/(?:file-\d{1,9}|(?P<episode>episode_\d{1,9}))\.parquet", re.DOTALL
)
_V3_PLACE = re.compile(r"chunk-(\d+)/file-(\d+)\.parquet$")
_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")  # of a pattern of paths
_COUNTERS = frozenset({"episode_index", "frame_index", "index", "task_index"})  # columns that number rows
_OF_FILES = ("data/", "videos/", "meta/", "stats/", "dataset_")  # columns of an episode that say where its rows are
_JSON_COLUMN = "json"  # of a sample that was exported, as it was
_NOT_SHOWN = ("tasks", "length", KEY_COLUMN, _JSON_COLUMN)
_TO_ROOT = "../../"  # from a file of data


class _Entry(NamedTuple):
    """A member, and what gives its content; None of an entry without any."""

    member: Member
    content: Callable[[], bytes] | None


class _Info(NamedTuple):
    """What ``meta/info.json`` says.

    Attributes:
        version: 2 or 3.
        features: by name, with `dtype`, `shape` and `names`.
        video_path: pattern of the paths of videos.
        chunk_size: episodes of a folder, in version 2.
        shown: what the JSON of each episode repeats.
    """

    version: int
    features: Mapping[str, Mapping[str, Any]]
    video_path: str
    chunk_size: int
    shown: Mapping[str, Any]


class _Episode:
    """Rows of one episode, in order; `fault` says why they are not used."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.batches: list[pa.RecordBatch] = []
        self.num_frames = 0
        self.fault: str | None = None
        self._size = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Takes the next rows."""
        if "frame_index" in batch.schema.names and self.fault is None:
            expected = pa.array(range(self.num_frames, self.num_frames + batch.num_rows), pa.int64())
            if not batch.column("frame_index").cast(pa.int64()).equals(expected):
                self.fault = f"its frames are not numbered in order from {self.num_frames} on (frame_index)"
        self.num_frames += batch.num_rows
        self._size += batch.nbytes
        if self._size > MAX_EPISODE_BYTES:
            self.fault = f"its rows take more than {MAX_EPISODE_BYTES:,} bytes"
        self.batches = [] if self.fault is not None else [*self.batches, batch]

    def columns(self, name: str) -> list[pa.Array]:
        """The values of a column, in parts."""
        return [batch.column(name) for batch in self.batches]


class LeRobotSource:
    """One Parquet file of a LeRobot dataset's ``data/`` as a container; see `mm_assets.sources.base.Source`.

    Args:
        file: the file, which stays open and belongs to the caller; the other files are found by its place.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet",)
    MARKS: ClassVar[tuple[str, ...]] = ("meta/info.json",)
    seekable = False
    text_encoding = "utf-8"

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._sizes: dict[str, int | SourceError] = {}  # of videos that have been copied once, by their members

    @property
    def file(self) -> SourceFile:
        """The file."""
        return self._file

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether a file that starts with `head` is a Parquet file."""
        return head.startswith(PARQUET_MAGIC)

    @classmethod
    def confirms(cls, file: SourceFile) -> bool:
        """Whether a Parquet file is one of ``data/`` of a folder that has ``meta/info.json``."""
        if _DATA.fullmatch(without_query(file.url)) is None:
            return False
        try:
            file.beside(f"{_TO_ROOT}meta/info.json").close()
        except SourceError as error:
            if _is_missing(error):
                return False
            raise
        return True

    @classmethod
    def shards_in(cls, files: Sequence[ShardFile]) -> Sequence[ShardFile] | None:
        """Returns the files of ``data/``, each described by ``meta/`` and its videos; None if there are none."""
        places = {file.url: without_query(file.url) for file in files}
        data = [(file, match) for file in files if (match := _DATA.fullmatch(places[file.url]))]
        if not data:
            return None
        root = len(min((match["root"] for _, match in data), key=len))
        meta = [file for file in files if places[file.url].startswith("meta/", root)]
        meta = [file for file in meta if "stats" not in places[file.url].rpartition("/")[2]]
        videos: dict[str, list[ShardFile]] = {}  # by the name that an episode's files share; of version 3 all of them
        for file in files:
            if places[file.url].startswith("videos/", root):
                stem = places[file.url].rpartition("/")[2].partition(".")[0]
                videos.setdefault(stem if stem.startswith("episode_") else "", []).append(file)
        return [file.described_by([*meta, *videos.get(match["episode"] or "", ())]) for file, match in data]

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Every member of the episodes, in order; arguments and errors as `Source.members`.

        Videos of version 3 are copied once, to know their sizes. "salvage" continues at the next row group.
        """
        for entry in self._entries(on_damaged_shard, damage):
            yield entry.member

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """The content of chosen members, in one pass over the file; arguments and errors as `Source.payloads`."""
        for member, content in self._entries(on_damaged_shard, damage):
            if not wanted(member) or content is None:
                continue
            try:
                if member.byte_size > max_bytes:
                    detail = f"holds {member.byte_size} bytes, allowed are {max_bytes}"
                    raise SourceError(self.file.url, detail, member=member.member)
                payload = content()
            except SourceError as error:
                if error.member is None or on_error is None:
                    raise
                on_error(member, error)
            else:
                yield member, payload

    # -- what describes the episodes

    @cached_property
    def _info(self) -> _Info:
        with self._beside("meta/info.json") as file:
            if file.size > MAX_META_BYTES:
                raise ShardError(
                    file.url, f"has {file.size:,} bytes, at most {MAX_META_BYTES:,} are read", byte_offset=0
                )
            content = _object(file.url, file.read(0, file.size))
        version, features = content.get("codebase_version"), content.get("features")
        major = re.fullmatch(r"v?([23])\.\d+(\.\d+)?", version) if isinstance(version, str) else None
        chunk_size = content.get("chunks_size", 1000)
        video_path = content.get("video_path") or ""
        problem = None
        if major is None:
            problem = f"codebase_version {version!r}, expected v2.0, v2.1 or v3.0: convert the dataset with LeRobot"
        elif not isinstance(features, dict) or not all(map(_is_feature, features.values())):
            problem = "features that are not objects with dtype and shape"
        elif isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            problem = f"chunks_size {chunk_size!r}, expected a whole number from 1 on"
        elif not isinstance(video_path, str):
            problem = f"video_path {video_path!r}, expected text"
        if problem is not None or major is None or not isinstance(features, dict):
            raise ShardError(file.url, f"has {problem}", byte_offset=0)
        keys = ("fps", "robot_type", "codebase_version", "features")
        shown: dict[str, Any] = {key: content[key] for key in keys if key in content}
        return _Info(int(major[1]), features, video_path, chunk_size, shown)

    @cached_property
    def _tasks(self) -> Mapping[int, str]:
        """The text of each task by its number."""
        if self._info.version == 3:
            with self._beside("meta/tasks.parquet") as file:
                rows = list(_parquet_rows(file, lambda name: name in ("task", "task_index", "__index_level_0__")))
            found = [(row.get("task_index"), row.get("task", row.get("__index_level_0__"))) for row in rows]
        else:
            with self._beside("meta/tasks.jsonl") as file:
                if file.size > MAX_META_BYTES:
                    detail = f"has {file.size:,} bytes, at most {MAX_META_BYTES:,} are read"
                    raise ShardError(file.url, detail, byte_offset=0)
                found = [(row.get("task_index"), row.get("task")) for row in _lines(file, b"task_index")]
        return {number: text for number, text in found if isinstance(number, int) and isinstance(text, str)}

    @cached_property
    def _described(self) -> Mapping[int, Mapping[str, Any]]:
        """The rows of ``meta/`` for each episode of the file, by its number."""
        place = without_query(self.file.url)
        if self._info.version == 2:
            match = re.search(r"episode_(\d+)\.parquet$", place)
            return {} if match is None else self._described_in_lines(int(match[1]))
        match = _V3_PLACE.search(place)
        if match is None:
            raise ShardError(self.file.url, "is not named data/chunk-000/file-000.parquet or alike", byte_offset=0)
        chunk, number = int(match[1]), int(match[2])
        described: dict[int, Mapping[str, Any]] = {}
        for file in self._meta_files():
            with file:
                for row in _parquet_rows(file, lambda name: not name.startswith("stats/")):
                    if (row.get("data/chunk_index"), row.get("data/file_index")) == (chunk, number):
                        described[row.get("episode_index", -1)] = row
        return described

    def _described_in_lines(self, episode: int) -> Mapping[int, Mapping[str, Any]]:
        with self._beside("meta/episodes.jsonl") as file:
            marker = re.compile(rb'"episode_index"\s*:\s*%d\b' % episode)
            found = (row for row in _lines(file, marker) if row.get("episode_index") == episode)
            row = next(found, None)
        return {} if row is None else {episode: row}

    def _meta_files(self) -> Iterator[SourceFile]:
        """The files that describe episodes, which are numbered without gaps."""
        chunk = number = 0
        for _ in range(MAX_META_FILES):
            try:
                yield self._beside(f"meta/episodes/chunk-{chunk:03d}/file-{number:03d}.parquet")
                number += 1
            except ShardError:
                if number == 0:
                    return
                chunk, number = chunk + 1, 0

    def _beside(self, name: str) -> SourceFile:
        """A file of the dataset.

        Raises:
            ShardError: it is missing.
            SourceError: the storage failed.
        """
        try:
            return self.file.beside(_TO_ROOT + name)
        except SourceError as error:
            if not _is_missing(error):
                raise
            detail = f"the dataset has no file {name}: copy the whole folder"
            raise ShardError(self.file.url, detail, byte_offset=0) from error

    # -- rows

    @cached_property
    def _table(self) -> pq.ParquetFile:
        if not self.accepts(self.file.read(0, min(HEAD_BYTES, self.file.size))):
            raise ShardError(self.file.url, "is not a Parquet file", byte_offset=0)
        table = _opened(self.file)
        names = table.schema_arrow.names
        stored = [n for n, feature in self._info.features.items() if feature["dtype"] != "video"]
        missing = [name for name in ("episode_index", *stored) if name not in names]
        if missing or len(set(names)) < len(names):
            what = f"has no column {missing[0]!r}, which meta/info.json names" if missing else "repeats a column"
            raise ShardError(self.file.url, what, byte_offset=max(self.file.size - 8, 0))
        return table

    def _episodes(self, on_damaged: OnDamage, damage: list[ShardDamage] | None) -> Iterator[_Episode | str]:
        """Yields the episodes, and what is wrong with each row group that cannot be read."""
        current: _Episode | None = None
        for group in range(self._table.num_row_groups):
            try:
                for batch in _batches(self._table, group):
                    start = 0
                    runs = pc.run_end_encode(batch.column("episode_index").cast(pa.int64()))
                    for end, number in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
                        if number is None or number < 0:
                            raise ValueError("a row has no episode_index")
                        if current is None or current.number != number:
                            yield from () if current is None else (current,)
                            current = _Episode(number)
                        current.add(batch.slice(start, end - start))
                        start = end
            except SourceError:
                raise
            except PARQUET_ERRORS as error:
                detail = f"row group {group} cannot be read: {first_line(error)}"
                if on_damaged == "fail":
                    raise ShardError(self.file.url, detail, byte_offset=len(PARQUET_MAGIC)) from error
                size = max(self._table.metadata.row_group(group).total_byte_size, 0)
                if damage is not None:
                    damage.append(ShardDamage(byte_offset=len(PARQUET_MAGIC), byte_size=size, detail=detail))
                if current is not None:
                    current.fault = f"its rows are lost: {detail}"
                    yield current
                    current = None
                yield detail
        yield from () if current is None else (current,)

    # -- members

    def _entries(self, on_damaged: OnDamage, damage: list[ShardDamage] | None) -> Iterator[_Entry]:
        ordinal = 0
        seen: set[int] = set()
        with _Videos(self.file) as videos:
            for episode in self._episodes(on_damaged, damage):
                if isinstance(episode, str):
                    entries = iter([self._skipped(f"row group of entry {ordinal}", f"damaged: {episode}")])
                else:
                    if episode.number in seen:
                        episode.fault = "the file has its rows in several places"
                    seen.add(episode.number)
                    entries = self._entries_of(episode, videos)
                for entry in entries:
                    yield entry._replace(member=entry.member._replace(ordinal=ordinal))
                    ordinal += 1

    def _skipped(self, name: str, reason: str) -> _Entry:
        return _Entry(named_member(self.file.url, os.fsencode(name), ordinal=0, byte_size=0, skip_reason=reason), None)

    def _entries_of(self, episode: _Episode, videos: _Videos) -> Iterator[_Entry]:
        described = self._described.get(episode.number, {})
        key, text = described.get(KEY_COLUMN), described.get(_JSON_COLUMN)
        if not isinstance(key, str) or not key.strip("/"):
            key = f"episode_{episode.number:06d}"
        fault = episode.fault
        length = described.get("length", episode.num_frames)
        if fault is None and length != episode.num_frames:
            fault = f"the file has {episode.num_frames} frames of it, meta/ says {length}"
        values: dict[str, Any] = {}
        arrays: dict[str, _Series] = {}
        try:
            if fault is None:
                values, arrays = self._read(episode, described)
        except PARQUET_ERRORS as error:
            fault = first_line(error)
        if fault is not None:
            yield self._skipped(key, f"episode {episode.number}: {fault}")
            return
        content = (text if isinstance(text, str) else dump_values(values)).encode()
        yield self._entry(f"{key}.json", len(content), lambda: content)
        for name, feature in self._info.features.items():
            role = f"{key}.{_role(name)}"
            if name in arrays:
                yield self._entry(f"{role}.npy", arrays[name].size, arrays[name].content)
            elif feature["dtype"] == "video":
                yield self._video(f"{role}.mp4", name, episode, described, videos)
            elif feature["dtype"] == "image":
                yield from self._images(role, [cell for part in episode.columns(name) for cell in part])

    def _read(self, episode: _Episode, described: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, _Series]]:
        """The JSON of an episode, and its arrays.

        Raises:
            ValueError: the values of a feature do not fit its shape.
        """
        values = {k: v for k, v in described.items() if not k.startswith(_OF_FILES) and k not in _NOT_SHOWN}
        values |= {"episode_index": episode.number, "length": episode.num_frames}
        arrays: dict[str, _Series] = {}
        names = self._table.schema_arrow.names
        if "task_index" in names:
            numbers = pa.chunked_array(episode.columns("task_index")).unique().to_pylist()
            unknown = [number for number in numbers if number not in self._tasks]
            if unknown:
                raise ValueError(f"task_index {unknown[0]} is not in the tasks of meta/")
            values["task"] = self._tasks[numbers[0]]
            if len(numbers) > 1:
                values["tasks"] = [self._tasks[number] for number in numbers]
                arrays["task_index"] = _Series("task_index", episode.columns("task_index"), ())
        for name, feature in self._info.features.items():
            if name in _COUNTERS or feature["dtype"] in ("video", "image"):
                continue
            parts = episode.columns(name)
            if _is_numeric(parts[0].type):
                arrays[name] = _Series(name, parts, tuple(feature["shape"]))
            else:
                batches = (pa.record_batch([part], names=[name]) for part in parts)
                values[name] = [row[name] for batch in batches for row in json_rows(batch)]
        return {**values, **self._info.shown}, arrays

    def _entry(self, name: str, size: int, content: Callable[[], bytes]) -> _Entry:
        return _Entry(named_member(self.file.url, os.fsencode(name), ordinal=0, byte_size=size), content)

    def _images(self, role: str, cells: Sequence[pa.Scalar]) -> Iterator[_Entry]:
        for frame, cell in enumerate(cells):
            value = cell["bytes"] if isinstance(cell, pa.StructScalar) and cell.is_valid else cell
            buffer = value.as_buffer() if isinstance(value, pa.BinaryScalar | pa.LargeBinaryScalar) else None
            if buffer is None:
                yield self._skipped(f"{role}.{frame}", "no bytes: the image of this frame is not in the file")
                continue
            head = buffer.slice(0, min(buffer.size, HEAD_BYTES)).to_pybytes()
            content_type = sniff_content_type(head)
            extension = None if content_type is None else extension_of_content_type(content_type)
            yield self._entry(f"{role}.{frame}.{extension or 'bin'}", buffer.size, buffer.to_pybytes)

    # -- videos

    def _video(
        self, name: str, feature: str, episode: _Episode, described: Mapping[str, Any], videos: _Videos
    ) -> _Entry:
        """The video of an episode; what is wrong with it is raised by its content."""

        def write(target: _Counter | io.BytesIO) -> int:
            info = self._info
            try:
                if info.version == 2:
                    values = {"episode_chunk": episode.number // info.chunk_size, "episode_index": episode.number}
                    return videos.copy(_path(info.video_path, {**values, "video_key": feature}), target)
                place = {key: described.get(f"videos/{feature}/{key}") for key in ("chunk_index", "file_index")}
                start, end = (described.get(f"videos/{feature}/{key}_timestamp") for key in ("from", "to"))
                if not (isinstance(start, float) and isinstance(end, float) and -math.inf < start < end < math.inf):
                    raise ValueError(f"meta/episodes has the times {start} to {end} of it, expected seconds")
                path = _path(info.video_path, {**place, "video_key": feature})
                return videos.cut(path, start, end, episode.num_frames, target)
            except MediaError as error:
                raise SourceError(self.file.url, error.reason, member=name) from error
            except ValueError as error:
                raise SourceError(self.file.url, str(error), member=name) from error
            except SourceError as error:
                if not _is_missing(error):
                    raise
                raise SourceError(self.file.url, f"the dataset lacks its video: {error}", member=name) from error

        if name not in self._sizes:
            try:
                self._sizes[name] = write(_Counter())
            except SourceError as error:
                if error.member is None:
                    raise
                self._sizes[name] = error
        size = self._sizes[name]

        def content() -> bytes:
            if isinstance(size, SourceError):
                raise size
            target = io.BytesIO()
            write(target)
            return target.getvalue()

        return self._entry(name, 0 if isinstance(size, SourceError) else size, content)


class _Series:
    """The values of a feature in each frame of an episode, in parts, as one array.

    Raises:
        ValueError: frames have values of different shapes or none, or not those of the declared shape.
    """

    def __init__(self, name: str, parts: Sequence[pa.Array], declared: tuple[int, ...]) -> None:
        self._parts = [_numbers(name, part) for part in parts]
        shapes = {part.shape[1:] for part in self._parts}
        if len(shapes) > 1:
            raise ValueError(f"feature {name!r} has frames of the shapes {sorted(shapes)}, expected one")
        (shape,) = shapes
        if declared and math.prod(declared) != math.prod(shape):
            raise ValueError(f"feature {name!r} has frames of the shape {shape}, meta/info.json says {declared}")
        self._shape = (sum(map(len, self._parts)), *(declared if len(declared) > 1 else shape))

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return npy_size(self._parts[0].dtype, self._shape)

    def content(self) -> bytes:
        """The array as a NPY file."""
        return npy_bytes(np.concatenate(self._parts).reshape(self._shape))


def _is_numeric(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _numbers(name: str, values: pa.Array) -> npt.NDArray[np.generic]:
    """The values of a column of numbers, or of lists of them within each other, as an array."""
    shape = [len(values)]
    while not (pa.types.is_primitive(values.type)):
        if values.null_count:
            raise ValueError(f"feature {name!r} lacks the values of some frames")
        lengths = pc.list_value_length(values).unique().to_pylist()
        if len(lengths) > 1:
            raise ValueError(
                f"feature {name!r} has lists of {min(lengths)} to {max(lengths)} values, expected one length"
            )
        shape.append(lengths[0] if lengths else 0)
        values = values.flatten()
    if values.null_count:
        raise ValueError(f"feature {name!r} lacks {values.null_count} values")
    found: npt.NDArray[np.generic] = values.to_numpy(zero_copy_only=False).reshape(shape)
    return found


class _Counter(io.RawIOBase):
    """A file that is written and not stored."""

    def __init__(self) -> None:
        self.size = self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._at += len(data)
        self.size = max(self.size, self._at)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class _Videos:
    """The videos beside a data file; of those that hold several episodes the last of each path's folder stays open.

    Args:
        file: the data file.
    """

    def __init__(self, file: SourceFile) -> None:
        self._beside = file
        # By folder: path, what closes it, container, what reads the file.
        self._open: dict[str, tuple[str, ExitStack, Any, _Reads]] = {}

    def __enter__(self) -> _Videos:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._open.values():
            opened[1].close()

    def copy(self, path: str, target: _Counter | io.BytesIO) -> int:
        """Writes a whole file, of which a counter takes only the size; errors as `SourceFile.beside`."""
        with self._beside.beside(_TO_ROOT + path) as file:
            if not isinstance(target, _Counter):
                target.write(file.read(0, file.size))
            return file.size

    def cut(self, path: str, start: float, end: float, num_frames: int, target: _Counter | io.BytesIO) -> int:
        """Writes the packets of a part of a file as an MP4 of their own, or the file if it has no others.

        The same file and part give the same bytes.

        Args:
            path: of the file, in the dataset.
            start: seconds at which the first frame is shown.
            end: seconds at which the last frame ends.
            num_frames: that the part has.
            target: takes the MP4, whose size is returned.

        Raises:
            MediaError: the file is not a video that FFmpeg reads.
            SourceError: the storage failed.
            ValueError: the part does not start at a keyframe, has another number of frames, or refers to frames after
                it.
        """
        with optional_import("av", "copying an episode out of a video"):
            import av
        container, reads = self._opened(path)
        stream = video_stream_of(container)
        if stream is None or not stream.time_base:
            raise ValueError(f"{path} has no video stream")
        half = (end - start) / num_frames / 2  # of a frame
        base = stream.time_base
        if stream.frames == num_frames and start <= float((stream.start_time or 0) * base) + half:
            return self.copy(path, target)  # the file has no other frames
        first: int | None = None
        written = 0
        try:
            container.seek(max(int(start / base), 0), stream=stream)
            with av.open(target, "w", format="mp4", options={"fflags": "+bitexact"}) as output:
                copied = output.add_stream_from_template(stream, opaque=True)
                for packet in container.demux(stream):
                    if packet.pts is None or packet.dts is None:
                        continue
                    seconds = float(packet.pts * base)
                    if first is None:
                        if seconds < start - half:
                            continue  # of the episode before, from its keyframe on
                        if not packet.is_keyframe or abs(seconds - start) > half:
                            detail = f"does not start at a keyframe (its first frame is at {start:.3f} s)"
                            raise ValueError(f"the part of {path} that is this episode {detail}")
                        first = packet.pts
                    if seconds < start - half or seconds >= end - half:
                        break
                    packet.pts, packet.dts, packet.stream = packet.pts - first, packet.dts - first, copied
                    output.mux(packet)
                    written += 1
        except (av.FFmpegError, ArithmeticError, AssertionError, EOFError, LookupError, RuntimeError) as error:
            reads.check()
            raise ValueError(f"{path} cannot be copied: {words_of(error)}") from error
        reads.check()
        if written != num_frames:
            place = f"{path} has {written} frames from {start:.3f} to {end:.3f} s"
            raise ValueError(f"{place}, the episode has {num_frames}")
        return target.seek(0, io.SEEK_END)

    def _opened(self, path: str) -> tuple[Any, _Reads]:
        """An open video, and what reads its file."""
        folder = path.rpartition("/")[0]
        if folder in self._open and self._open[folder][0] == path:
            return self._open[folder][2:]
        if folder in self._open:
            self._open.pop(folder)[1].close()
        closing = ExitStack()
        try:
            file = closing.enter_context(self._beside.beside(_TO_ROOT + path))
            reads = _Reads(file)
            ranged = RangedFile(file.size, reads, max_bytes=1 << 62, seconds=math.inf)
            container, _ = closing.enter_context(open_media(ranged, decodes=False))
        except BaseException:
            closing.close()
            raise
        self._open[folder] = path, closing, container, reads
        return container, reads


class _Reads:
    """Reads ranges of a file, of a remote one large blocks; `check` raises what PyAV drops."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._start, self._block = 0, b""
        self._failure: SourceError | None = None

    def __call__(self, offset: int, size: int) -> bytes:
        """The bytes of a range; none of one after the end, where a damaged video leads."""
        if size <= 0:
            return b""
        if not self._start <= offset <= offset + size <= self._start + len(self._block):
            length = size if self._file.is_local else max(size, REMOTE_BLOCK_BYTES)
            try:
                self._block = self._file.read(offset, min(length, self._file.size - offset))
            except SourceError as error:
                self._failure = error
                raise
            self._start = offset
        return self._block[offset - self._start : offset - self._start + size]

    def check(self) -> None:
        """Raises the error of the storage, if there was one."""
        if self._failure is not None:
            raise self._failure


def _path(pattern: str, values: Mapping[str, Any]) -> str:
    """A path of `info.json` with its values; a pattern is not a format of Python's, which could name attributes."""

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1])
        if isinstance(found, bool) or not isinstance(found, int if match[2] else str | int):
            raise ValueError(f"video_path {pattern!r} needs {match[1]}, which meta/ does not have")
        return f"{found:0{int(match[2])}d}" if match[2] else str(found)

    path = _FIELD.sub(value, pattern)
    if not path or path.startswith("/") or ".." in path.split("/") or "{" in path:
        raise ValueError(f"video_path {pattern!r} of meta/info.json does not give a path in the dataset")
    return path


def _role(feature: str) -> str:
    """A feature's name as a part of a member's name, in which a slash would end the folder."""
    return feature.replace("%", "%25").replace("/", "%2F") or "%"


def _is_feature(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        return False
    shape = value.get("shape")
    return isinstance(shape, list) and all(type(extent) is int and extent >= 0 for extent in shape)


def _is_missing(error: SourceError) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def _object(url: str, content: bytes) -> dict[str, Any]:
    try:
        found = parse_json(content.decode())
    except (ValueError, RecursionError) as error:
        raise ShardError(url, f"is not JSON: {first_line(error)}", byte_offset=0) from error
    if not isinstance(found, dict):
        raise ShardError(url, f"holds a JSON {type(found).__name__}, expected an object", byte_offset=0)
    return found


def _lines(file: SourceFile, marker: bytes | re.Pattern[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file in whose line a marker is."""
    with file.stream() as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ShardError(file.url, f"has a line of more than {MAX_LINE_BYTES:,} bytes", byte_offset=0)
            if marker in line if isinstance(marker, bytes) else marker.search(line):
                yield _object(file.url, line)


def _opened(file: SourceFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.open(), buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
    except SourceError:
        raise
    except PARQUET_ERRORS as error:
        detail = f"its footer cannot be read: {first_line(error)}; download the file again"
        raise ShardError(file.url, detail, byte_offset=max(file.size - 8, 0)) from error


def _batches(table: pq.ParquetFile, group: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a row group, as many at a time as their mean size allows."""
    metadata = table.metadata.row_group(group)  # not its columns: asked for a damaged one, Arrow ends the process
    mean = max(metadata.total_byte_size, 1) / max(metadata.num_rows, 1)
    rows = min(max(int(BATCH_BYTES / mean), 1), MAX_BATCH_ROWS)
    yield from table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)


def _parquet_rows(file: SourceFile, wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """The rows of a table of ``meta/``, of which some columns are read."""
    table = _opened(file)
    try:
        columns = [name for name in table.schema_arrow.names if wanted(name)]
        for group in range(table.num_row_groups):
            for batch in _batches(table, group, columns):
                yield from json_rows(batch)
    except SourceError:
        raise
    except PARQUET_ERRORS as error:
        raise ShardError(file.url, f"cannot be read: {first_line(error)}", byte_offset=len(PARQUET_MAGIC)) from error
