"""LeRobot datasets of version 3.0: a sample is an episode, a shard is a file of frames and the videos of its episodes.

Features are the arrays with a value for each frame, and the cameras: videos, whose files are copied, and lists of
images. The key and the JSON of a sample are in the table of episodes, in columns that LeRobot ignores. What else a
sample has is left out.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mm_assets.dataset.dataset import Dataset
from mm_assets.errors import EncodeError, MediaError
from mm_assets.exports.base import ExportColumn, ExportFile, ExportSample, ShardFacts
from mm_assets.exports.column_types import media_item
from mm_assets.exports.samples import SampleFiles
from mm_assets.json_text import dump_json, parse_json
from mm_assets.media.content_types import Buffer, extension_of_content_type, sniff_content_type
from mm_assets.media.images import PILLOW_ERRORS, probe_image
from mm_assets.media.video import DEFAULT_MAX_PIXELS, open_media, video_stream_of
from mm_assets.sources import Source
from mm_assets.sources.lerobot import MAX_EPISODE_BYTES, LeRobotSource
from mm_assets.sources.row_members import KEY_COLUMN
from mm_assets.storage.store import Store

__all__ = ["LeRobotExport"]

CHUNK_FILES = 1000  # of a folder
TOLERANCE_SECONDS = 1e-4  # between a frame's time and `timestamp`, by default in LeRobot
MAX_STATISTICS_FRAMES = 16  # of a camera that are decoded in an episode
STATISTICS_PIXELS = 150  # along the longer side, about
EPISODE_ROWS = 256  # that are written together
SIZES_BLOCK = 4096  # samples whose sizes are read together
MAX_DIMENSIONS = 5  # of a frame's value
_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_TASK_KEYS = ("task", "language_instruction", "instruction")
_FRAME_ARRAYS = ("timestamp", "action", "observation.state", "state")  # that say how many frames there are
_NAMES = {"state": "observation.state", "reward": "next.reward", "done": "next.done"}
_COUNTERS = ("frame_index", "episode_index", "index", "task_index")
_RESERVED = frozenset((*_COUNTERS, "task"))  # names that LeRobot gives to other values
_DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}

Statistics = dict[str, npt.NDArray[Any]]
"""`min`, `max`, `mean`, `std`, `count` and quantiles of a feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature(ExportColumn):
    """A column of frames.

    Attributes:
        feature: its name in LeRobot.
        dtype: "video", "image", or a type of NumPy.
        shape: of the value of a frame; () for a camera, whose size its files have.
        names: of the values, or None.
    """

    feature: str
    dtype: str
    shape: tuple[int, ...] = ()
    names: Any = None

    @property
    def arrow(self) -> pa.DataType:
        """The type in a file of frames, as `datasets` has it."""
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
    """What the samples of all shards are as episodes; its name is that of the column `index`.

    Attributes:
        starts: frames before each episode, and all frames.
        tasks: every task.
        task_numbers: the task of each episode.
        fps: frames per second.
        robot_type: name of the robot, or None.
    """

    starts: tuple[int, ...]
    tasks: tuple[str, ...]
    task_numbers: tuple[int, ...]
    fps: float
    robot_type: str | None


class _Camera(NamedTuple):
    """A camera in one episode.

    Attributes:
        size: (height, width, channels).
        times: seconds of each frame of a video.
        statistics: of the frames that were decoded.
        info: properties of a video, as in ``info.json``.
    """

    size: tuple[int, int, int]
    times: npt.NDArray[np.float64]
    statistics: Statistics
    info: Mapping[str, Any]


class LeRobotExport:
    """See `mm_assets.exports.base.Export`."""

    SUFFIX: ClassVar[str] = ".parquet"
    VERSION: ClassVar[int] = 1
    KEEPS_KEYS: ClassVar[bool] = False
    source: ClassVar[type[Source]] = LeRobotSource

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``data/chunk-000/file-012.parquet``."""
        return _DATA_PATH.format(**_place(number))

    @staticmethod
    def typed_columns(dataset: Dataset, columns: Sequence[ExportColumn]) -> list[ExportColumn]:
        """Returns the features, and what the samples are as episodes.

        Reads the JSON and the arrays of all samples, and the first video.

        Raises:
            EncodeError: the samples are not episodes with the same features.
        """
        return _Survey(dataset, columns).columns()

    @staticmethod
    def comparable(sample: ExportSample, columns: Sequence[ExportColumn]) -> ExportSample:
        """Returns the key, the JSON and the features of a sample, with the names of features.

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
                raise EncodeError(f"sample {sample.key!a} {detail}: leave the sample or the modality out")
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
            EncodeError: a camera has pictures of several sizes.
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
                _add_statistics(statistics, name, {key: np.asarray(value) for key, value in values.items()})
        store.write_bytes("meta/stats.json", _json(_statistics_json(statistics)))
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
            EncodeError: its cameras do not show its frames, or are not what LeRobot reads.
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
                    statistics[name] = self._add_camera(feature, _images(images), num_frames)
                    columns[name] = pa.array([{"bytes": image, "path": None} for image in images], feature.arrow)
            clock = values["timestamp"]
            for feature in self._videos:
                part = sample.parts[feature.feature]
                assert isinstance(part, ExportFile)
                camera = _video(part.data)
                statistics[feature.feature] = self._add_camera(feature, camera, num_frames)
                row |= self._write_video(feature, number, part.data, camera, clock)
        except (EncodeError, MediaError) as error:
            raise EncodeError(f"sample {sample.key!a}: {error}") from error
        self._frames.write_table(pa.table([columns[name] for name in self._schema.names], schema=self._schema))
        statistics |= {name: _statistics(value) for name, value in values.items()}
        for name in sorted(statistics):
            row |= {f"stats/{name}/{key}": value.tolist() for key, value in statistics[name].items()}
            _add_statistics(self._statistics, name, statistics[name])
        row |= {f"meta/episodes/{key}": value for key, value in self._place.items()}
        self._rows.append({**row, KEY_COLUMN: sample.key, "json": sample.json})
        if len(self._rows) == EPISODE_ROWS:
            self._flush()

    def _add_camera(self, feature: Feature, camera: _Camera, num_frames: int) -> Statistics:
        """Checks a camera's pictures of an episode, and returns their statistics."""
        name = feature.feature
        if len(camera.times) != num_frames:
            detail = f"{feature.name!r} has {len(camera.times)} frames, the arrays {num_frames}"
            raise EncodeError(f"{detail}: leave the sample or the modality out")
        _check_size(name, self._cameras.setdefault(name, (camera.size, camera.info))[0], camera.size)
        return camera.statistics

    def _write_video(
        self, feature: Feature, number: int, content: Buffer, camera: _Camera, clock: npt.NDArray[Any]
    ) -> Mapping[str, Any]:
        """Writes a video as a file, and returns where it is."""
        start = _start_of_clock(feature, camera.times, clock)
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
        self._frames.close()
        if self._table is not None:
            self._table.close()
        return {"statistics": _statistics_json(self._statistics), "cameras": self._cameras}


def _place(number: int) -> dict[str, int]:
    """The numbers in the name of a file."""
    return {"chunk_index": number // CHUNK_FILES, "file_index": number % CHUNK_FILES}


def _parts_of(columns: Sequence[ExportColumn]) -> tuple[Episodes, list[Feature]]:
    (episodes,) = (column for column in columns if isinstance(column, Episodes))
    return episodes, [column for column in columns if isinstance(column, Feature)]


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
    """The table of tasks; the texts are the index of the data frame that pandas reads it as."""
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
    """An array (frames, ...) as a column."""
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    if feature.shape == (1,):
        return values
    if len(feature.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(values, feature.shape[0])
    for extent in reversed(feature.shape):
        values = pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, extent, dtype=np.int32)), values)
    return values


# -- which features there are


class _Survey:
    """Reads the arrays and the JSON of all samples, to find features that all have.

    Args:
        dataset: what is exported.
        columns: the parts of samples.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[ExportColumn]) -> None:
        self._dataset = dataset
        self._columns = columns
        self._starts = [0]
        self._tasks: dict[str, int] = {}
        self._task_numbers: list[int] = []
        self._arrays: dict[str, tuple[str, tuple[int, ...]]] = {}  # dtype and shape of a frame
        self._others: dict[str, str] = {}  # arrays that are not of frames, and a sample with such a one
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
            raise EncodeError(f"sample {sample.key!a} has no arrays with values for frames: leave the sample out")
        for name, array in arrays.items():
            shape = array.shape[1:] or (1,)
            is_feature = len(array) == num_frames and math.prod(shape) > 0 and len(shape) <= MAX_DIMENSIONS
            if not is_feature or array.dtype.name not in _DTYPES or name in _RESERVED:
                self._others.setdefault(name, sample.key)
                continue
            kind = (array.dtype.name, shape)
            if self._arrays.setdefault(name, kind) != kind:
                detail = f"has frames of {kind} in {name!r}, other samples of {self._arrays[name]}"
                raise EncodeError(f"sample {sample.key!a} {detail}: leave the samples or the modality out")
        self._starts.append(self._starts[-1] + num_frames)
        self._add_json(sample, arrays.get("timestamp"))

    def _add_json(self, sample: ExportSample, clock: npt.NDArray[Any] | None) -> None:
        value = {} if sample.json is None else parse_json(sample.json)
        value = value if isinstance(value, dict) else {}
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
            detail = f"has {fps} frames per second, other samples {self._fps}"
            raise EncodeError(f"sample {sample.key!a} {detail}: export them to a folder of their own")
        self._fps = fps

    def columns(self) -> list[ExportColumn]:
        """Returns the features, and what the samples are as episodes."""
        features = list(self._features())
        names = [feature.feature for feature in features]
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise EncodeError(f"two modalities would be the feature {name!r}: leave one of them out")
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
            detail = f"sample {self._others[both]!a} has no value of {both!r} for each frame, other samples have"
            raise EncodeError(f"{detail}: leave the samples or the modality out")
        if self._arrays.get("timestamp", ("float64", (1,)))[1] != (1,) or "timestamp" in self._others:
            raise EncodeError("'timestamp' is not a number for each frame: leave the modality out")
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
        """Whether any sample has a modality."""
        total = len(self._dataset)
        blocks = (range(first, min(first + SIZES_BLOCK, total)) for first in range(0, total, SIZES_BLOCK))
        return any(p is not None for block in blocks for p in self._dataset.stored(block, [modality])[modality])

    def _fps_of_video(self, features: Sequence[Feature]) -> float:
        """The frames per second of the first video."""
        name = next((feature.name for feature in features if feature.dtype == "video"), None)
        if name is not None:
            (sample,) = SampleFiles(self._dataset, only={name}).samples(0, 1)
            part = sample.parts[name]
            fps = _rounded(_video(part.data).info["video.fps"]) if isinstance(part, ExportFile) else 0
            if fps > 0:
                return fps
        detail = "neither the JSON (fps) nor an array 'timestamp' of the first sample"
        raise EncodeError(f"{detail} says how many frames there are per second: add one of them")


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
    """The values of a key of the JSON, and of the `info.json` in it."""
    inner = value.get("info")
    return [one[key] for one in (value, inner) if isinstance(one, dict) and one.get(key) is not None]


def _rounded(fps: float) -> float:
    """Frames per second without the errors of a clock."""
    fps = round(fps, 3)
    return int(fps) if fps == int(fps) else fps


def _names(value: Mapping[str, Any], features: Sequence[str], length: int) -> Any:
    """The names of a feature's values in the JSON, if there are as many."""
    for descriptions in _values_of(value, "features"):
        for feature in features:
            description = descriptions.get(feature) if isinstance(descriptions, dict) else None
            names = description.get("names") if isinstance(description, dict) else None
            if isinstance(names, list) and len(names) == length and all(isinstance(name, str) for name in names):
                return names
    return None


# -- cameras


def _check_size(name: str, expected: Sequence[int], size: Sequence[int]) -> None:
    if list(expected) != list(size):
        sizes = " and ".join(f"{width} x {height} x {depth}" for height, width, depth in (expected, size))
        raise EncodeError(f"{name!r} has pictures of {sizes}: leave the samples or the modality out")


def _start_of_clock(feature: Feature, times: npt.NDArray[np.float64], clock: npt.NDArray[Any]) -> float:
    """Returns the time in a video at which `timestamp` would be 0.

    Raises:
        EncodeError: LeRobot, which adds the two as float32, would not find the frame of each time.
    """
    clock = clock.reshape(-1)
    if clock[0] < 0:
        raise EncodeError(f"'timestamp' starts at {clock[0]} s, expected 0 or later: leave it out")
    start = float(times[0]) - float(clock[0])
    queries = (start + clock.astype(np.float32).astype(np.float64)).astype(np.float32)
    distances = np.abs(queries - times.astype(np.float32))
    is_off = ~(distances < TOLERANCE_SECONDS)
    if is_off.any():
        frame = int(np.argmax(is_off))
        detail = f"frame {frame} of {feature.name!r} is shown {times[frame] - times[0]:.6f} s after the first one"
        expected = f"'timestamp' says {float(clock[frame]) - float(clock[0]):.6f} s as float32"
        raise EncodeError(f"{detail}, and {expected}: leave 'timestamp' or the video out")
    return start


def _video(content: Buffer) -> _Camera:
    """Reads the times of a video's frames, and decodes some keyframes.

    Raises:
        EncodeError: it is not MP4, or has no frames.
        MediaError: it is damaged.
    """
    with open_media(content) as (container, content_type):
        stream = video_stream_of(container)
        if content_type != "video/mp4" or stream is None or stream.time_base is None:
            raise EncodeError(f"a video is {content_type}, and LeRobot has MP4: leave the modality out")
        base = float(stream.time_base)
        packets = [(p.pts, p.is_keyframe) for p in container.demux(stream) if p.pts is not None]
        if not packets or len(packets) != stream.frames:  # by which the source knows that it is the whole file
            counts = f"states {stream.frames} frames and has {len(packets)}"
            raise EncodeError(f"a video {counts}: remux fragmented MP4 (ffmpeg -c copy), or leave the modality out")
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
        return _Camera((context.height, context.width, 3), times, _picture_statistics(pixels), info)


def _images(images: Sequence[bytes]) -> _Camera:
    """Reads the sizes of images, and decodes some.

    Raises:
        EncodeError: they have several sizes, or one is too large.
        MediaError: one is damaged.
    """
    from PIL import Image

    sizes = {(info.height, info.width, info.channels) for info in map(probe_image, images)}
    size = min(sizes, default=(0, 0, 0))
    if len(sizes) != 1 or size[0] * size[1] > DEFAULT_MAX_PIXELS:
        raise EncodeError(f"images have the sizes {sorted(sizes)}, expected one: leave the sample or the modality out")
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[size[2]]
    try:
        pixels = [_thinned(np.asarray(Image.open(io.BytesIO(image)).convert(mode))) for image in _spread(images)]
    except PILLOW_ERRORS as error:
        raise EncodeError(f"an image cannot be decoded: {error}") from error
    return _Camera(size, np.arange(len(images), dtype=np.float64), _picture_statistics(pixels), {})


def _spread(items: Sequence[Any]) -> Sequence[Any]:
    """At most `MAX_STATISTICS_FRAMES` items, from the first to the last part."""
    return items[:: max(-(-len(items) // MAX_STATISTICS_FRAMES), 1)]


def _thinned(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    step = max(max(pixels.shape[:2]) // STATISTICS_PIXELS, 1)
    return np.atleast_3d(pixels)[::step, ::step].copy()


# -- statistics


def _statistics(array: npt.NDArray[Any]) -> Statistics:
    """The statistics of the values of frames, as LeRobot computes them for an episode."""
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
    """The statistics of the channels of pictures, from 0 to 1; `count` is the number of pictures."""
    if not pictures:
        raise EncodeError("no frame of a video can be decoded: leave the sample or the modality out")
    values = _statistics(np.concatenate([picture.reshape(-1, picture.shape[2]) for picture in pictures]) / 255)
    shaped = {key: value.reshape(-1, 1, 1) for key, value in values.items() if key != "count"}
    return {**shaped, "count": np.array([len(pictures)])}


def _add_statistics(all_statistics: dict[str, Statistics], name: str, other: Statistics) -> None:
    """Adds the statistics of more frames to those of a feature: quantiles as their mean, as LeRobot does."""
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


def _statistics_json(statistics: Mapping[str, Statistics]) -> dict[str, dict[str, Any]]:
    return {name: {key: value.tolist() for key, value in values.items()} for name, values in statistics.items()}
