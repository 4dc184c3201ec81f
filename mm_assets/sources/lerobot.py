"""LeRobot datasets of versions 2 and 3, folders of Parquet, MP4 and JSON files: an episode is a sample.

A shard is one Parquet file of ``data/``. Its episode 12 has the members

- ``episode_000012.json``: the task, the number of the episode, its length, and the features of ``meta/info.json``;
- ``episode_000012.<feature>.npy`` of each feature of numbers, (frames, ...), named as LeRobot names it:
  ``episode_000012.observation.state.npy``;
- ``episode_000012.<feature>.mp4`` of each video; ``episode_000012.<feature>.<frame>.png`` (or ``jpg``) of images.

Version 3 has the videos of many episodes in one file. The packets of an episode are copied out of it, and nothing is
encoded again; a file with one episode is copied as it is. In a dataset that `mm_assets.exports` wrote, an episode has
the key and the JSON of the sample. Nothing in the files is trusted: an episode whose rows contradict themselves or
``meta/`` is an entry with the reason, and a video that cannot be copied is an error of its member.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from mm_assets.errors import LazyModule, MediaError, ShardError, SourceError, first_line
from mm_assets.media.content_types import extension_of_content_type, sniff_content_type
from mm_assets.sources.arrays import npy_bytes, npy_size
from mm_assets.sources.arrow_rows import array_of_lists, cell_of, is_cell, json_rows
from mm_assets.sources.entries import Entry, EntrySource, Scan, named_entry, number_entries
from mm_assets.sources.features import is_numbers, item_type_of_lists
from mm_assets.sources.lerobot_meta import TO_ROOT, Meta, is_missing
from mm_assets.sources.lerobot_videos import Videos, video_path
from mm_assets.sources.parquet import PARQUET_ERRORS, PARQUET_MAGIC, open_parquet, read_group
from mm_assets.sources.row_members import KEY_COLUMN, dump_values
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile
from mm_assets.storage.urls import without_query

if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:
    pc = LazyModule("pyarrow.compute")
    pq = LazyModule("pyarrow.parquet")

__all__ = ["LeRobotSource"]

MAX_EPISODE_BYTES = 2 << 30  # of an episode's rows, which are in memory together
MAX_BATCH_ROWS = 4096  # that are decoded at a time

_DATA = re.compile(
    r"(?P<root>.*/|)data/chunk-\d{1,9}/(?:file-\d{1,9}|(?P<episode>episode_\d{1,9}))\.parquet", re.DOTALL
)
_COUNTERS = frozenset({"episode_index", "frame_index", "index", "task_index"})  # columns that number rows
_PLACE_PREFIXES = ("data/", "videos/", "meta/", "stats/", "dataset_")  # of columns that say where an episode's rows are
_JSON_COLUMN = "json"  # of a sample that was exported, as it was
_HIDDEN_COLUMNS = ("tasks", "length", KEY_COLUMN, _JSON_COLUMN)  # of an episode, which its JSON does not repeat


class _Episode:
    """Rows of one episode, in order; `fault` says why they are not used."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.batches: list[pa.RecordBatch] = []
        self.num_frames = 0
        self.fault: str | None = None
        self._size = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds the next rows."""
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
        """Returns the values of a column, in parts."""
        return [batch.column(name) for batch in self.batches]


class LeRobotSource(EntrySource):
    """One Parquet file of a LeRobot dataset's ``data/`` as a container; see `mm_assets.sources.base.Source`.

    The other files of the dataset are found by its place. The size of a part of a video follows from copying it,
    so listing the members of version 3 copies each video once. "salvage" continues at the next row group.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet",)
    MARKS: ClassVar[tuple[str, ...]] = ("meta/info.json",)
    seekable = False
    text_encoding = "utf-8"

    def __init__(self, file: SourceFile) -> None:
        super().__init__(file)
        self._meta = Meta(file)
        self._sizes: dict[str, int | SourceError] = {}  # of videos that have been copied once, by their members

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether a file that starts with `head` is a Parquet file."""
        return head.startswith(PARQUET_MAGIC)

    @classmethod
    def confirms(cls, file: SourceFile) -> bool:
        """Returns whether a Parquet file is one of ``data/`` of a folder that has ``meta/info.json``."""
        if _DATA.fullmatch(without_query(file.url)) is None:
            return False
        try:
            file.beside(f"{TO_ROOT}meta/info.json").close()
        except SourceError as error:
            if is_missing(error):
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
        videos: dict[str, list[ShardFile]] = {}  # by the name that an episode's files share; in version 3, all of them
        for file in files:
            if places[file.url].startswith("videos/", root):
                stem = places[file.url].rpartition("/")[2].partition(".")[0]
                videos.setdefault(stem if stem.startswith("episode_") else "", []).append(file)
        return [file.described_by([*meta, *videos.get(match["episode"] or "", ())]) for file, match in data]

    # -- rows

    @cached_property
    def _table(self) -> pq.ParquetFile:
        table = open_parquet(self.file)
        names = table.schema_arrow.names
        stored = [n for n, feature in self._meta.info.features.items() if feature["dtype"] != "video"]
        missing = [name for name in ("episode_index", *stored) if name not in names]
        if missing or len(set(names)) < len(names):
            what = f"has no column {missing[0]!r}, which meta/info.json names" if missing else "repeats a column"
            raise ShardError(self.file.url, what, byte_offset=max(self.file.size - 8, 0))
        return table

    def _episodes(self, scan: Scan) -> Iterator[_Episode | Entry]:
        """Yields the episodes, and an entry for each row group that cannot be read."""
        current: _Episode | None = None
        for group in range(self._table.num_row_groups):
            try:
                for batch in read_group(self._table, group, max_rows=MAX_BATCH_ROWS):
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
                size = max(self._table.metadata.row_group(group).total_byte_size, 0)
                scan.salvage(self.file.url, detail, byte_offset=len(PARQUET_MAGIC), byte_size=size)
                if current is not None:
                    current.fault = f"its rows are lost: {detail}"
                    yield current
                    current = None
                yield named_entry(self.file.url, f"row group {group}", skip_reason=f"damaged: {detail}")
        yield from () if current is None else (current,)

    # -- members

    def _entries(self, scan: Scan) -> Iterator[Entry]:
        with Videos(self.file) as videos:
            yield from number_entries(self._all_entries(scan, videos))

    def _all_entries(self, scan: Scan, videos: Videos) -> Iterator[Entry]:
        numbers: set[int] = set()
        for episode in self._episodes(scan):
            if isinstance(episode, Entry):
                yield episode
                continue
            if episode.number in numbers:
                episode.fault = "the file has its rows in several places"
            numbers.add(episode.number)
            yield from self._entries_of(episode, videos)

    def _skipped_entry(self, name: str, reason: str) -> Entry:
        return named_entry(self.file.url, name, skip_reason=reason)

    def _entries_of(self, episode: _Episode, videos: Videos) -> Iterator[Entry]:
        meta_row = self._meta.episodes.get(episode.number, {})
        key, text = meta_row.get(KEY_COLUMN), meta_row.get(_JSON_COLUMN)
        if not isinstance(key, str) or not key.strip("/"):
            key = f"episode_{episode.number:06d}"
        fault = episode.fault
        length = meta_row.get("length", episode.num_frames)
        if fault is None and length != episode.num_frames:
            fault = f"the file has {episode.num_frames} frames of it, meta/ says {length}"
        values: dict[str, Any] = {}
        arrays: dict[str, _Series] = {}
        try:
            if fault is None:
                values, arrays = self._read(episode, meta_row)
        except PARQUET_ERRORS as error:
            fault = first_line(error)
        if fault is not None:
            yield self._skipped_entry(key, f"episode {episode.number}: {fault}")
            return
        content = (text if isinstance(text, str) else dump_values(values)).encode()
        yield named_entry(self.file.url, f"{key}.json", len(content), lambda: content)
        for name, feature in self._meta.info.features.items():
            role = f"{key}.{_role(name)}"
            if name in arrays:
                yield named_entry(self.file.url, f"{role}.npy", arrays[name].size, arrays[name].content)
            elif feature["dtype"] == "video":
                yield self._video(f"{role}.mp4", name, episode, meta_row, videos)
            elif feature["dtype"] == "image":
                yield from self._images(role, [cell for part in episode.columns(name) for cell in part])

    def _read(self, episode: _Episode, meta_row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, _Series]]:
        """Returns the JSON of an episode, and its arrays.

        Raises:
            ValueError: the values of a feature do not fit its shape.
        """
        values = {k: v for k, v in meta_row.items() if not k.startswith(_PLACE_PREFIXES) and k not in _HIDDEN_COLUMNS}
        values |= {"episode_index": episode.number, "length": episode.num_frames}
        arrays: dict[str, _Series] = {}
        names = self._table.schema_arrow.names
        if "task_index" in names:
            numbers = pa.chunked_array(episode.columns("task_index")).unique().to_pylist()
            unknown = [number for number in numbers if number not in self._meta.tasks]
            if unknown:
                raise ValueError(f"task_index {unknown[0]} is not in the tasks of meta/")
            values["task"] = self._meta.tasks[numbers[0]]
            if len(numbers) > 1:
                values["tasks"] = [self._meta.tasks[number] for number in numbers]
                arrays["task_index"] = _Series("task_index", episode.columns("task_index"), ())
        for name, feature in self._meta.info.features.items():
            if name in _COUNTERS or feature["dtype"] in ("video", "image"):
                continue
            parts = episode.columns(name)
            if is_numbers(item_type_of_lists(parts[0].type) or parts[0].type):
                arrays[name] = _Series(name, parts, tuple(feature["shape"]))
            else:
                batches = (pa.record_batch([part], names=[name]) for part in parts)
                values[name] = [row[name] for batch in batches for row in json_rows(batch)]
        return {**values, **self._meta.info.values}, arrays

    def _images(self, role: str, images: Sequence[pa.Scalar]) -> Iterator[Entry]:
        for frame, image in enumerate(images):
            cell = cell_of(image) if is_cell(image.type) else None
            if cell is None or cell.content is None:
                yield self._skipped_entry(f"{role}.{frame}", "no bytes: the image of this frame is not in the file")
                continue
            content_type = sniff_content_type(cell.head)
            extension = None if content_type is None else extension_of_content_type(content_type)
            yield named_entry(self.file.url, f"{role}.{frame}.{extension or 'bin'}", cell.size, cell.content)

    # -- videos

    def _video(self, name: str, feature: str, episode: _Episode, meta_row: Mapping[str, Any], videos: Videos) -> Entry:
        """Returns the video of an episode; reading its content raises what is wrong with it."""

        def write(target: io.BytesIO | None) -> int:
            info = self._meta.info
            try:
                if info.version == 2:
                    values = {"episode_chunk": episode.number // info.chunk_size, "episode_index": episode.number}
                    return videos.copy(video_path(info.video_path, {**values, "video_key": feature}), target)
                place = {key: meta_row.get(f"videos/{feature}/{key}") for key in ("chunk_index", "file_index")}
                start, end = (meta_row.get(f"videos/{feature}/{key}_timestamp") for key in ("from", "to"))
                if not (isinstance(start, float) and isinstance(end, float) and -math.inf < start < end < math.inf):
                    raise ValueError(f"meta/episodes has the times {start} to {end} of it, expected seconds")
                path = video_path(info.video_path, {**place, "video_key": feature})
                return videos.copy_part(path, start, end, episode.num_frames, target)
            except MediaError as error:
                raise SourceError(self.file.url, error.reason, member=name) from error
            except ValueError as error:
                raise SourceError(self.file.url, str(error), member=name) from error
            except SourceError as error:
                if not is_missing(error):
                    raise
                raise SourceError(self.file.url, f"the dataset lacks its video: {error}", member=name) from error

        if name not in self._sizes:
            try:
                self._sizes[name] = write(None)
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

        return named_entry(self.file.url, name, 0 if isinstance(size, SourceError) else size, content)


class _Series:
    """The values of a feature in each frame of an episode, in parts, as one array.

    Raises:
        ValueError: frames have no values, values of different shapes, or another shape than the declared one.
    """

    def __init__(self, name: str, parts: Sequence[pa.Array], declared: tuple[int, ...]) -> None:
        try:
            self._parts = [array_of_lists(part) for part in parts]
        except ValueError as error:
            raise ValueError(f"feature {name!r} {error}") from error
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
        """Returns the array as a NPY file."""
        return npy_bytes(np.concatenate(self._parts).reshape(self._shape))


def _role(feature: str) -> str:
    """Returns a feature's name as a part of a member's name, in which a slash would end the folder."""
    return feature.replace("%", "%25").replace("/", "%2F") or "%"
