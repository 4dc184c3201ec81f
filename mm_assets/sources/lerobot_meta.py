"""The files of ``meta/`` in a LeRobot dataset of version 2 or 3: features, tasks, and a row for each episode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.json_text import parse_json
from mm_assets.sources.arrow_rows import json_rows
from mm_assets.sources.parquet import PARQUET_ERRORS, PARQUET_MAGIC, open_parquet, read_group
from mm_assets.storage.files import SourceFile
from mm_assets.storage.urls import without_query

__all__ = ["TO_ROOT", "Info", "Meta", "is_missing"]

TO_ROOT = "../../"  # from a file of data

MAX_META_BYTES = 64 << 20  # of info.json and of the tasks
MAX_LINE_BYTES = 1 << 20  # of a line of a list in `meta/`
MAX_META_FILES = 1_000_000  # of Parquet that describe episodes

_V2_PLACE = re.compile(r"episode_(\d+)\.parquet$")
_V3_PLACE = re.compile(r"chunk-(\d+)/file-(\d+)\.parquet$")
_INFO_KEYS = ("fps", "robot_type", "codebase_version", "features")  # that the JSON of each episode repeats


class Info(NamedTuple):
    """The content of ``meta/info.json``.

    Attributes:
        version: 2 or 3.
        features: by name, with `dtype`, `shape` and `names`.
        video_path: pattern of the paths of videos.
        chunk_size: episodes of a folder, in version 2.
        values: what the JSON of each episode repeats.
    """

    version: int
    features: Mapping[str, Mapping[str, Any]]
    video_path: str
    chunk_size: int
    values: Mapping[str, Any]


class Meta:
    """Reads what ``meta/`` has about the episodes of one file of ``data/``.

    Every attribute raises `ShardError` if a file is missing or damaged, and `SourceError` if the storage fails.

    Args:
        file: the file of ``data/``.
    """

    def __init__(self, file: SourceFile) -> None:
        self._file = file

    @cached_property
    def info(self) -> Info:
        """The features of the dataset, and where its files are."""
        with self._open("meta/info.json") as file:
            _check_size(file)
            content = _parse_object(file.url, file.read(0, file.size))
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
        values = {key: content[key] for key in _INFO_KEYS if key in content}
        return Info(int(major[1]), features, video_path, chunk_size, values)

    @cached_property
    def tasks(self) -> Mapping[int, str]:
        """The text of each task by its number."""
        if self.info.version == 3:
            with self._open("meta/tasks.parquet") as file:
                rows = list(_parquet_rows(file, lambda name: name in ("task", "task_index", "__index_level_0__")))
        else:
            with self._open("meta/tasks.jsonl") as file:
                _check_size(file)
                rows = list(_lines(file, re.compile(b"task_index")))
        pairs = ((row.get("task_index"), row.get("task", row.get("__index_level_0__"))) for row in rows)
        return {number: text for number, text in pairs if isinstance(number, int) and isinstance(text, str)}

    @cached_property
    def episodes(self) -> Mapping[int, Mapping[str, Any]]:
        """The row of each episode of the file, by its number."""
        place = without_query(self._file.url)
        if self.info.version == 2:
            match = _V2_PLACE.search(place)
            return {} if match is None else self._episode_in_lines(int(match[1]))
        match = _V3_PLACE.search(place)
        if match is None:
            raise ShardError(self._file.url, "is not named data/chunk-000/file-000.parquet or alike", byte_offset=0)
        indices = int(match[1]), int(match[2])
        episodes: dict[int, Mapping[str, Any]] = {}
        for file in self._episode_files():
            with file:
                for row in _parquet_rows(file, lambda name: not name.startswith("stats/")):
                    if (row.get("data/chunk_index"), row.get("data/file_index")) == indices:
                        episodes[row.get("episode_index", -1)] = row
        return episodes

    def _episode_in_lines(self, episode: int) -> Mapping[int, Mapping[str, Any]]:
        with self._open("meta/episodes.jsonl") as file:
            rows = _lines(file, re.compile(rb'"episode_index"\s*:\s*%d\b' % episode))
            row = next((row for row in rows if row.get("episode_index") == episode), None)
        return {} if row is None else {episode: row}

    def _episode_files(self) -> Iterator[SourceFile]:
        """Yields the files that describe episodes, which are numbered without gaps."""
        chunk = number = 0
        for _ in range(MAX_META_FILES):
            try:
                yield self._open(f"meta/episodes/chunk-{chunk:03d}/file-{number:03d}.parquet")
                number += 1
            except ShardError:
                if number == 0:
                    return
                chunk, number = chunk + 1, 0

    def _open(self, name: str) -> SourceFile:
        try:
            return self._file.beside(TO_ROOT + name)
        except SourceError as error:
            if not is_missing(error):
                raise
            detail = f"the dataset has no file {name}: copy the whole folder"
            raise ShardError(self._file.url, detail, byte_offset=0) from error


def is_missing(error: SourceError) -> bool:
    """Returns whether the storage does not have the file."""
    return isinstance(error.__cause__, FileNotFoundError)


def _is_feature(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        return False
    shape = value.get("shape")
    return isinstance(shape, list) and all(type(extent) is int and extent >= 0 for extent in shape)


def _check_size(file: SourceFile) -> None:
    if file.size > MAX_META_BYTES:
        raise ShardError(file.url, f"has {file.size:,} bytes, at most {MAX_META_BYTES:,} are read", byte_offset=0)


def _parse_object(url: str, content: bytes) -> dict[str, Any]:
    try:
        value = parse_json(content.decode())
    except (ValueError, RecursionError) as error:
        raise ShardError(url, f"is not JSON: {first_line(error)}", byte_offset=0) from error
    if not isinstance(value, dict):
        raise ShardError(url, f"holds a JSON {type(value).__name__}, expected an object", byte_offset=0)
    return value


def _lines(file: SourceFile, marker: re.Pattern[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSONL file whose lines match a marker."""
    with file.stream() as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ShardError(file.url, f"has a line of more than {MAX_LINE_BYTES:,} bytes", byte_offset=0)
            if marker.search(line):
                yield _parse_object(file.url, line)


def _parquet_rows(file: SourceFile, is_read: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table of ``meta/`` with some of its columns."""
    table = open_parquet(file)
    try:
        columns: Sequence[str] = [name for name in table.schema_arrow.names if is_read(name)]
        for group in range(table.num_row_groups):
            for batch in read_group(table, group, columns):
                yield from json_rows(batch)
    except SourceError:
        raise
    except PARQUET_ERRORS as error:
        raise ShardError(file.url, f"cannot be read: {first_line(error)}", byte_offset=len(PARQUET_MAGIC)) from error
