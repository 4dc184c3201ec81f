"""LeRobot datasets of version 3.0: a sample is an episode, a shard is a file of frames and the videos of its episodes.

Features are the arrays with a value for each frame, and the cameras: videos, which are copied, and lists of images.
The key and the JSON of a sample are in the table of episodes, in columns that LeRobot ignores. Everything else in a
sample is left out.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mm_assets.dataset.dataset import Dataset
from mm_assets.errors import EncodeError, MediaError
from mm_assets.exports.base import ExportColumn, ExportFile, ExportSample, ShardFacts
from mm_assets.exports.column_types import MAX_DIMENSIONS, NUMBER_TYPES, media_item
from mm_assets.exports.lerobot_frames import (
    Camera,
    Statistics,
    add_statistics,
    compute_statistics,
    read_images,
    read_video,
    start_of_clock,
    statistics_json,
)
from mm_assets.exports.samples import SampleFiles
from mm_assets.json_text import dump_json
from mm_assets.media.content_types import Buffer, extension_of_content_type, sniff_content_type
from mm_assets.sources import Source
from mm_assets.sources.lerobot import MAX_EPISODE_BYTES, LeRobotSource
from mm_assets.sources.row_members import KEY_COLUMN
from mm_assets.storage.store import Store
from mm_assets.summaries import counted

__all__ = ["LeRobotExport"]

CHUNK_FILES = 1000
BATCH_EPISODES = 256
BATCH_SAMPLES = 4096
_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_TASK_KEYS = ("task", "language_instruction", "instruction")
_FRAME_ARRAYS = ("timestamp", "action", "observation.state", "state")  # their length is the number of frames
_NAMES = {"state": "observation.state", "reward": "next.reward", "done": "next.done"}
_COUNTERS = ("frame_index", "episode_index", "index", "task_index")
_RESERVED = frozenset((*_COUNTERS, "task"))  # LeRobot uses these names for other values


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature(ExportColumn):
    """A column of frames.

    Attributes:
        feature: its name in LeRobot.
        dtype: "video", "image", or the name of a NumPy dtype.
        shape: shape of the value of a frame; () for a camera, whose size is in its files.
        names: names of the values, or None.
    """

    feature: str
    dtype: str
    shape: tuple[int, ...] = ()
    names: Any = None

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type in a file of frames, the same as in `datasets`."""
        if self.dtype == "image":
            return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        kind = pa.type_for_alias(self.dtype)
        if self.shape == (1,):
            return kind
        if len(self.shape) == 1:
            return pa.list_(kind, self.shape[0])
        for _ in self.shape:
            kind = pa.list_(kind)
        return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes(ExportColumn):
    """The episodes of all shards, as the column `index` of frames.

    Attributes:
        starts: number of frames before each episode, and of all frames.
        tasks: all tasks.
        task_numbers: index of each episode's task.
        fps: frames per second.
        robot_type: name of the robot, or None.
    """

    starts: tuple[int, ...]
    tasks: tuple[str, ...]
    task_numbers: tuple[int, ...]
    fps: float
    robot_type: str | None


class LeRobotExport:
    """See `mm_assets.exports.base.Export`."""

    SUFFIX: ClassVar[str] = ".parquet"
    VERSION: ClassVar[int] = 1
    source: ClassVar[type[Source]] = LeRobotSource

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``data/chunk-000/file-012.parquet``."""
        return _DATA_PATH.format(**_place(number))

    @staticmethod
    def typed_columns(dataset: Dataset, columns: Sequence[ExportColumn]) -> list[ExportColumn]:
        """Returns the features, and the episodes.

        Reads the JSON and the arrays of all samples, and the first video.

        Raises:
            EncodeError: the samples are not episodes with the same features.
        """
        return _Survey(dataset, columns).columns()

    @staticmethod
    def comparable(sample: ExportSample, columns: Sequence[ExportColumn]) -> ExportSample:
        """Returns a sample with its key, its JSON and its features only, under the names of features.

        Raises:
            EncodeError: the sample lacks a feature.
        """
        episodes, features = _parts_of(columns)
        parts: dict[str, ExportFile | Sequence[ExportFile] | None] = {}
        for feature in features:
            name, part = feature.feature, sample.parts.get(feature.name)
            if not feature.name:
                num_frames = episodes.starts[sample.number + 1] - episodes.starts[sample.number]
                clock = (np.arange(num_frames) / episodes.fps).astype(np.float32)
                parts[name] = ExportFile(f"{name}.npy", clock)
            elif part is None:
                detail = f"lacks {feature.name!r}, which every episode needs"
                raise EncodeError(f"{detail}: leave the sample or the modality out")
            elif not isinstance(part, ExportFile):
                parts[name] = [
                    ExportFile(f"{name}.{frame}.{_extension(file.data)}", file.data) for frame, file in enumerate(part)
                ]
            elif feature.dtype == "video":
                parts[name] = ExportFile(f"{name}.mp4", part.content)
            else:
                array = np.asarray(part.content)
                array = array.reshape(-1) if feature.shape == (1,) else array
                parts[name] = ExportFile(f"{name}.npy", array.astype(array.dtype.newbyteorder("="), copy=False))
        text = sample.json
        if text is None:
            text = dump_json({"task": episodes.tasks[episodes.task_numbers[sample.number]]})
        return sample._replace(json=text, parts=parts)

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> LeRobotShardWriter:
        """Opens a file of frames."""
        return LeRobotShardWriter(folder, name, columns)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes the tasks, the statistics and ``info.json``.

        Raises:
            EncodeError: the pictures of a camera differ in size.
        """
        episodes, features = _parts_of(columns)
        target = io.BytesIO()
        pq.write_table(_tasks_table(episodes.tasks), target)
        store.write_bytes("meta/tasks.parquet", target.getvalue())
        statistics: dict[str, Statistics] = {}
        cameras: dict[str, tuple[Sequence[int], Mapping[str, Any]]] = {}
        for shard in shards:
            for name, (size, info) in shard.details["cameras"].items():
                _check_size(name, cameras.setdefault(name, (size, info))[0], size)
            for name, values in shard.details["statistics"].items():
                add_statistics(statistics, name, {key: np.asarray(value) for key, value in values.items()})
        store.write_bytes("meta/stats.json", _json(statistics_json(statistics)))
        descriptions: dict[str, Any] = {}
        for feature in features:
            description = {"dtype": feature.dtype, "shape": list(feature.shape), "names": feature.names}
            if feature.feature in cameras:
                size, info = cameras[feature.feature]
                description |= {"shape": list(size), "names": ["height", "width", "channels"]}
                description |= {"info": info} if info else {}
            descriptions[feature.feature] = description
        for name in _COUNTERS:
            descriptions[name] = {"dtype": "int64", "shape": [1], "names": None}
        has_videos = any(feature.dtype == "video" for feature in features)
        content = {
            "codebase_version": "v3.0",
            "robot_type": episodes.robot_type,
            "total_episodes": len(episodes.task_numbers),
            "total_frames": episodes.starts[-1],
            "total_tasks": len(episodes.tasks),
            "chunks_size": CHUNK_FILES,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": episodes.fps,
            "splits": {"train": f"0:{len(episodes.task_numbers)}"},
            "data_path": _DATA_PATH,
            "video_path": _VIDEO_PATH if has_videos else None,
            "features": descriptions,
        }
        store.write_bytes("meta/info.json", _json(content))


class LeRobotShardWriter:
    """Writes the episodes of a shard: their frames, their videos, and their rows in ``meta/episodes``."""

    def __init__(self, folder: Path, name: str, columns: Sequence[ExportColumn]) -> None:
        self._folder = folder
        chunk, file = map(int, re.findall(r"-(\d+)", name))
        self._place = {"chunk_index": chunk, "file_index": file}
        self._episodes, features = _parts_of(columns)
        self._features = [feature for feature in features if feature.dtype != "video"]
        self._videos = [feature for feature in features if feature.dtype == "video"]
        fields = [pa.field(feature.feature, feature.arrow) for feature in self._features]
        self._schema = pa.schema([*fields, *(pa.field(counter, pa.int64()) for counter in _COUNTERS)])
        self._frames = _parquet_writer(folder / name, self._schema)
        self._rows: list[Mapping[str, Any]] = []
        self._table: pq.ParquetWriter | None = None
        self._statistics: dict[str, Statistics] = {}
        self._cameras: dict[str, tuple[Sequence[int], Mapping[str, Any]]] = {}

    def write(self, sample: ExportSample) -> None:
        """Appends an episode.

        Raises:
            EncodeError: the frames of its cameras do not match its arrays, or LeRobot cannot read them.
        """
        start, end = self._episodes.starts[sample.number : sample.number + 2]
        number, num_frames, task = sample.number, end - start, self._episodes.task_numbers[sample.number]
        counters = (range(num_frames), [number] * num_frames, range(start, end), [task] * num_frames)
        values = {name: np.array(counter, np.int64) for name, counter in zip(_COUNTERS, counters, strict=True)}
        columns: dict[str, pa.Array] = {name: pa.array(value) for name, value in values.items()}
        statistics: dict[str, Statistics] = {}
        row: dict[str, Any] = {
            "episode_index": number,
            "tasks": [self._episodes.tasks[task]],
            "length": num_frames,
            **{f"data/{key}": value for key, value in self._place.items()},
            "dataset_from_index": start,
            "dataset_to_index": end,
        }
        try:
            if _num_bytes(sample.parts[feature.feature] for feature in self._features) >= MAX_EPISODE_BYTES:
                raise EncodeError(f"its frames take {MAX_EPISODE_BYTES:,} bytes or more: leave a modality out")
            for feature in self._features:
                name, part = feature.feature, sample.parts[feature.feature]
                if isinstance(part, ExportFile):
                    values[name] = np.asarray(part.content)
                    columns[name] = _frame_values(values[name], feature)
                else:
                    images = [bytes(file.data) for file in part or ()]
                    statistics[name] = self._add_camera(feature, read_images(images), num_frames)
                    columns[name] = pa.array([{"bytes": image, "path": None} for image in images], feature.arrow)
            clock = values["timestamp"]
            for feature in self._videos:
                part = sample.parts[feature.feature]
                assert isinstance(part, ExportFile)
                camera = read_video(part.data)
                statistics[feature.feature] = self._add_camera(feature, camera, num_frames)
                row |= self._write_video(feature, number, part.data, camera, clock)
        except MediaError as error:
            raise EncodeError(str(error)) from error
        self._frames.write_table(pa.table([columns[name] for name in self._schema.names], schema=self._schema))
        statistics |= {name: compute_statistics(value) for name, value in values.items()}
        for name in sorted(statistics):
            row |= {f"stats/{name}/{key}": value.tolist() for key, value in statistics[name].items()}
            add_statistics(self._statistics, name, statistics[name])
        row |= {f"meta/episodes/{key}": value for key, value in self._place.items()}
        self._rows.append({**row, KEY_COLUMN: sample.key, "json": sample.json})
        if len(self._rows) == BATCH_EPISODES:
            self._flush()

    def _add_camera(self, feature: Feature, camera: Camera, num_frames: int) -> Statistics:
        """Checks a camera's pictures of an episode, and returns their statistics."""
        name = feature.feature
        if len(camera.times) != num_frames:
            detail = f"{feature.name!r} has {counted(len(camera.times), 'frame')}, but the arrays have {num_frames}"
            raise EncodeError(f"{detail}: leave the sample or the modality out")
        _check_size(name, self._cameras.setdefault(name, (camera.size, camera.info))[0], camera.size)
        return camera.statistics

    def _write_video(
        self, feature: Feature, number: int, content: Buffer, camera: Camera, clock: npt.NDArray[Any]
    ) -> Mapping[str, Any]:
        """Writes a video file, and returns the episode's columns about it."""
        start = start_of_clock(feature.name, camera.times, clock)
        place = _place(number)
        path = self._folder / _VIDEO_PATH.format(video_key=feature.feature, **place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        duration = float(camera.times[-1] - camera.times[0]) + 1 / self._episodes.fps
        times = {"from_timestamp": start, "to_timestamp": start + duration}
        return {f"videos/{feature.feature}/{key}": value for key, value in {**place, **times}.items()}

    def _flush(self) -> None:
        if self._rows:
            table = pa.Table.from_pylist(self._rows, None if self._table is None else self._table.schema)
            if self._table is None:
                self._table = _parquet_writer(self._folder / _EPISODES_PATH.format(**self._place), table.schema)
            self._table.write_table(table)
        self._rows = []

    def close(self) -> Mapping[str, Any]:
        """Ends the files; returns the statistics of the features, and the size and properties of each camera."""
        self._flush()
        self.abort()
        return {"statistics": statistics_json(self._statistics), "cameras": self._cameras}

    def abort(self) -> None:
        """Closes the files."""
        self._frames.close()
        if self._table is not None:
            self._table.close()


def _place(number: int) -> dict[str, int]:
    """Returns the numbers in the name of a file."""
    return {"chunk_index": number // CHUNK_FILES, "file_index": number % CHUNK_FILES}


def _parts_of(columns: Sequence[ExportColumn]) -> tuple[Episodes, list[Feature]]:
    (episodes,) = (column for column in columns if isinstance(column, Episodes))
    return episodes, [column for column in columns if isinstance(column, Feature)]


def _check_size(name: str, expected: Sequence[int], size: Sequence[int]) -> None:
    if list(expected) != list(size):
        sizes = " and ".join(f"{width} x {height} x {depth}" for height, width, depth in (expected, size))
        raise EncodeError(f"{name!r} has pictures of {sizes}: leave the samples or the modality out")


def _num_bytes(parts: Iterable[ExportFile | Sequence[ExportFile] | None]) -> int:
    files = (file for part in parts for file in ([part] if isinstance(part, ExportFile) else part or ()))
    contents = (file.content for file in files)
    return sum(one.nbytes if isinstance(one, np.ndarray) else memoryview(one).nbytes for one in contents)


def _extension(content: Buffer) -> str:
    return extension_of_content_type(sniff_content_type(content) or "") or "bin"


def _json(value: object) -> bytes:
    return json.dumps(value, indent=4, ensure_ascii=False).encode()


def _parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(path, schema, write_page_checksum=True)


def _tasks_table(tasks: Sequence[str]) -> pa.Table:
    """Returns the table of tasks; pandas reads the texts as the index of a data frame."""
    index = "__index_level_0__"
    types = {"task_index": "int64", index: "unicode"}
    metadata = {
        "index_columns": [index],
        "column_indexes": [],
        "columns": [
            {
                "name": None if name == index else name,
                "field_name": name,
                "pandas_type": kind,
                "numpy_type": "object" if name == index else kind,
                "metadata": None,
            }
            for name, kind in types.items()
        ],
        "pandas_version": "2.0.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(metadata)})


def _frame_values(array: npt.NDArray[Any], feature: Feature) -> pa.Array:
    """Returns an array (frames, ...) as a column."""
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    if feature.shape == (1,):
        return values
    if len(feature.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(values, feature.shape[0])
    for extent in reversed(feature.shape):
        values = pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, extent, dtype=np.int32)), values)
    return values


# -- features


class _Survey:
    """Reads the arrays and the JSON of all samples, and finds the features that all samples have.

    Args:
        dataset: the dataset to export.
        columns: the parts of samples.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[ExportColumn]) -> None:
        self._dataset = dataset
        self._columns = columns
        self._starts = [0]
        self._tasks: dict[str, int] = {}
        self._task_numbers: list[int] = []
        self._arrays: dict[str, tuple[str, tuple[int, ...]]] = {}  # dtype and shape of a frame by name
        self._others: dict[str, str] = {}  # a sample that has no value for each frame, by name of the array
        self._fps: float | None = None
        self._first: Mapping[str, Any] = {}  # the JSON of the first sample
        arrays = [column.name for column in columns if column.kind == "array" and not column.is_list]
        texts = [column.name for column in columns if column.kind == "text" and column.name in _TASK_KEYS]
        for sample in SampleFiles(dataset, only={*arrays, *texts}).samples(0, len(dataset)):
            self._add(sample)
        if len(self._starts) == 1:
            raise EncodeError("there are no samples, and a LeRobot dataset has at least one episode")

    def _add(self, sample: ExportSample) -> None:
        arrays = {
            name: part.content
            for name, part in sample.parts.items()
            if isinstance(part, ExportFile) and isinstance(part.content, np.ndarray) and part.content.ndim
        }
        num_frames = next((len(arrays[name]) for name in (*_FRAME_ARRAYS, *arrays) if name in arrays), 0)
        if num_frames == 0:
            raise EncodeError(f"sample {sample.key!a} has no array with a value for each frame: leave the sample out")
        for name, array in arrays.items():
            shape = array.shape[1:] or (1,)
            is_feature = len(array) == num_frames and math.prod(shape) > 0 and len(shape) <= MAX_DIMENSIONS
            if not is_feature or array.dtype.name not in NUMBER_TYPES or name in _RESERVED:
                self._others.setdefault(name, sample.key)
                continue
            kind = (array.dtype.name, shape)
            if self._arrays.setdefault(name, kind) != kind:
                detail = f"has frames of {kind} in {name!r}, but other samples of {self._arrays[name]}"
                raise EncodeError(f"sample {sample.key!a} {detail}: leave the samples or the modality out")
        self._starts.append(self._starts[-1] + num_frames)
        self._add_json(sample, arrays.get("timestamp"))

    def _add_json(self, sample: ExportSample, clock: npt.NDArray[Any] | None) -> None:
        value = sample.value
        if len(self._starts) == 2:
            self._first = value
        texts = {
            n: str(p.data, "utf-8") for n, p in sample.parts.items() if isinstance(p, ExportFile) and n in _TASK_KEYS
        }
        tasks = (source[key] for source in (value, texts) for key in _TASK_KEYS if isinstance(source.get(key), str))
        self._task_numbers.append(self._tasks.setdefault(next(tasks, ""), len(self._tasks)))
        rates = (rate for rate in _values_of(value, "fps") if isinstance(rate, int | float) and 1e-3 <= rate < 1e6)
        rate = next(rates, None)
        fps = self._fps if rate is None else _rounded(rate)
        if fps is None and clock is not None and clock.size > 1:
            step = float(np.median(np.diff(clock.reshape(-1).astype(np.float64))))
            fps = _rounded(1 / step) if 1e-6 < step <= 1e3 else None
        if self._fps is not None and fps != self._fps:
            detail = f"has {fps} frames per second, but other samples {self._fps}"
            raise EncodeError(f"sample {sample.key!a} {detail}: export each rate to a folder of its own")
        self._fps = fps

    def columns(self) -> list[ExportColumn]:
        """Returns the episodes and the features."""
        features = list(self._features())
        names = [feature.feature for feature in features]
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise EncodeError(f"two modalities would become the feature {name!r}: leave one of them out")
        robots = (robot for robot in _values_of(self._first, "robot_type") if isinstance(robot, str))
        episodes = Episodes(
            name="index",
            field=None,
            is_list=False,
            kind="array",
            starts=tuple(self._starts),
            tasks=tuple(self._tasks),
            task_numbers=tuple(self._task_numbers),
            fps=self._fps or self._fps_of_video(features),
            robot_type=next(robots, None),
        )
        return [episodes, *features]

    def _features(self) -> Iterator[Feature]:
        both = next((name for name in self._arrays if name in self._others), None)
        if both is not None:
            detail = (
                f"sample {self._others[both]!a} has no value of {both!r} for each frame, but other samples have one"
            )
            raise EncodeError(f"{detail}: leave the samples or the modality out")
        if self._arrays.get("timestamp", ("float64", (1,)))[1] != (1,) or "timestamp" in self._others:
            raise EncodeError("'timestamp' does not have one number for each frame: leave the modality out")
        if "timestamp" not in self._arrays:
            clock = ExportColumn(name="", field=None, is_list=False, kind="array")
            yield _feature(clock, "timestamp", "float32", (1,))
        for column in self._columns:
            item = media_item(column.name, column.field) if column.kind == "file" else ""
            name = column.name.replace("/", "_")
            if column.name in self._arrays:
                dtype, shape = self._arrays[column.name]
                name = _NAMES.get(name, name)
                yield _feature(column, name, dtype, shape, _names(self._first, (column.name, name), shape[0]))
                continue
            is_camera = item == ("Image" if column.is_list else "Video")
            if is_camera and self._has_any(column.name):
                name = name if name.startswith("observation.") else f"observation.images.{name}"
                yield _feature(column, name, "image" if column.is_list else "video")

    def _has_any(self, modality: str) -> bool:
        """Returns whether any sample has a modality."""
        total = len(self._dataset)
        batches = (range(first, min(first + BATCH_SAMPLES, total)) for first in range(0, total, BATCH_SAMPLES))
        return any(p is not None for batch in batches for p in self._dataset.stored(batch, [modality])[modality])

    def _fps_of_video(self, features: Sequence[Feature]) -> float:
        """Returns the frames per second of the first video."""
        name = next((feature.name for feature in features if feature.dtype == "video"), None)
        if name is not None:
            (sample,) = SampleFiles(self._dataset, only={name}).samples(0, 1)
            part = sample.parts[name]
            fps = _rounded(read_video(part.data).info["video.fps"]) if isinstance(part, ExportFile) else 0
            if fps > 0:
                return fps
        detail = "the number of frames per second is unknown: the first sample has neither `fps` in its JSON nor an"
        raise EncodeError(f"{detail} array 'timestamp'; add one of them")


def _feature(column: ExportColumn, feature: str, dtype: str, shape: tuple[int, ...] = (), names: Any = None) -> Feature:
    return Feature(
        name=column.name,
        field=column.field,
        is_list=column.is_list,
        kind=column.kind,
        feature=feature,
        dtype=dtype,
        shape=shape,
        names=names,
    )


def _values_of(value: Mapping[str, Any], key: str) -> list[Any]:
    """Returns the values of a key in the JSON, and in its key `info`, a copy of ``info.json``."""
    inner = value.get("info")
    return [one[key] for one in (value, inner) if isinstance(one, dict) and one.get(key) is not None]


def _rounded(fps: float) -> float:
    """Rounds frames per second, to remove the imprecision of a clock."""
    fps = round(fps, 3)
    return int(fps) if fps == int(fps) else fps


def _names(value: Mapping[str, Any], features: Sequence[str], length: int) -> Any:
    """Returns the names of a feature's values from the JSON, if there is one for each value."""
    for descriptions in _values_of(value, "features"):
        for feature in features:
            description = descriptions.get(feature) if isinstance(descriptions, dict) else None
            names = description.get("names") if isinstance(description, dict) else None
            if isinstance(names, list) and len(names) == length and all(isinstance(name, str) for name in names):
                return names
    return None
