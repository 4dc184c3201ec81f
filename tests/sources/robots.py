"""Robot episodes, and LeRobot datasets that hold them, written by the format's documentation."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CAMERA = "observation.images.top"
FPS = 10


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An episode to write.

    Attributes:
        arrays: features of numbers, (frames, ...).
        videos: an MP4 of each camera.
        images: encoded images of each camera, one per frame.
        tasks: the task of each frame, or one for all.
    """

    arrays: Mapping[str, np.ndarray]
    videos: Mapping[str, bytes] = field(default_factory=dict)
    images: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    tasks: Sequence[str] = ("reach the cube",)

    @property
    def length(self) -> int:
        """Number of frames."""
        return len(next(iter(self.arrays.values())))


def real_episodes(folder: Path) -> list[Episode]:
    """The episodes of a real robot in the sample data, the fixture `shared_data`."""
    with tarfile.open(folder / "robotics/robotics-episodes-00000.tar") as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}
    roles = {"state": "observation.state", "action": "action", "timestamp": "timestamp", "reward": "next.reward"}
    return [
        Episode(
            arrays={name: np.load(io.BytesIO(files[f"{key}.{role}.npy"])) for role, name in roles.items()},
            videos={CAMERA: files[f"{key}.ego_view.mp4"]},
            tasks=(json.loads(files[f"{key}.json"])["task"],),
        )
        for key in sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))
    ]


def clip(num_frames: int, color: int = 0, codec: str = "libx264", *, fps: int = FPS, b_frames: int = 2) -> bytes:
    """A small MP4 that gets brighter."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        stream.max_b_frames = b_frames
        for number in range(num_frames):
            level = (color + 5 * number) % 256
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return target.getvalue()


def joined(clips: Sequence[bytes]) -> tuple[bytes, list[float]]:
    """One MP4 with the packets of several, as LeRobot joins episodes, and the seconds at which each starts."""
    import av

    target, starts, start = io.BytesIO(), [], Fraction(0)
    with av.open(target, "w", format="mp4") as output:
        copied = None
        for content in clips:
            with av.open(io.BytesIO(content)) as source:
                stream = source.streams.video[0]
                copied = copied or output.add_stream_from_template(stream, opaque=True)
                starts.append(float(start))
                shift = int(start / stream.time_base)
                for packet in source.demux(stream):
                    if packet.dts is not None:
                        packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, copied
                        output.mux(packet)
                start += stream.duration * stream.time_base
    return target.getvalue(), [*starts, float(start)]


def _features(episode: Episode) -> dict[str, Any]:
    features: dict[str, Any] = {}
    for name, array in episode.arrays.items():
        shape = list(array.shape[1:]) or [1]
        names = [f"{name}_{n}" for n in range(shape[0])] if len(shape) == 1 else None
        features[name] = {"dtype": str(array.dtype), "shape": shape, "names": names}
    for kind, cameras in (("video", episode.videos), ("image", episode.images)):
        for name in cameras:
            features[name] = {"dtype": kind, "shape": [32, 32, 3], "names": ["height", "width", "channel"]}
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    return features


def _table(episodes: Mapping[int, Episode], tasks: Sequence[str], first: int) -> pa.Table:
    columns: dict[str, list[pa.Array]] = {}
    for number, episode in episodes.items():
        length = episode.length
        of_frames = episode.tasks if len(episode.tasks) > 1 else episode.tasks * length
        parts: dict[str, Any] = {name: _column(array) for name, array in episode.arrays.items()}
        for name, images in episode.images.items():
            parts[name] = pa.array([{"bytes": image, "path": None} for image in images])
        parts["frame_index"] = pa.array(range(length), pa.int64())
        parts["episode_index"] = pa.array([number] * length, pa.int64())
        parts["index"] = pa.array(range(first, first + length), pa.int64())
        parts["task_index"] = pa.array([tasks.index(task) for task in of_frames], pa.int64())
        first += length
        for name, part in parts.items():
            columns.setdefault(name, []).append(part)
    return pa.table({name: pa.chunked_array(parts) for name, parts in columns.items()})


def _column(array: np.ndarray) -> pa.Array:
    values = pa.array(array.ravel())
    for extent in reversed(array.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, extent)
    return values


def _info(version: str, episodes: Sequence[Episode], **values: str) -> dict[str, Any]:
    return {
        "codebase_version": version,
        "robot_type": "arm",
        "total_episodes": len(episodes),
        "chunks_size": 1000,
        "fps": FPS,
        "features": _features(episodes[0]),
        **values,
    }


def _write(path: Path, content: bytes | str | pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _tasks(episodes: Sequence[Episode]) -> list[str]:
    return list(dict.fromkeys(task for episode in episodes for task in episode.tasks))


def write_v2(root: Path, episodes: Sequence[Episode]) -> list[Path]:
    """Writes a dataset of version 2.1, a file for each episode; returns the files of data."""
    tasks = _tasks(episodes)
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    _write(root / "meta/info.json", json.dumps(_info("v2.1", episodes, data_path=data, video_path=video)))
    lines = [json.dumps({"task_index": number, "task": task}) for number, task in enumerate(tasks)]
    _write(root / "meta/tasks.jsonl", "\n".join(lines) + "\n")
    lines, paths, first = [], [], 0
    for number, episode in enumerate(episodes):
        lines.append(json.dumps({"episode_index": number, "tasks": list(episode.tasks), "length": episode.length}))
        paths.append(root / f"data/chunk-000/episode_{number:06d}.parquet")
        _write(paths[-1], _table({number: episode}, tasks, first))
        first += episode.length
        for camera, content in episode.videos.items():
            _write(root / f"videos/chunk-000/{camera}/episode_{number:06d}.mp4", content)
    _write(root / "meta/episodes.jsonl", "\n".join(lines) + "\n")
    return paths


def write_v3(root: Path, episodes: Sequence[Episode], *, per_file: int = 2) -> list[Path]:
    """Writes a dataset of version 3.0, `per_file` episodes in a file of data and of video; returns the former."""
    tasks = _tasks(episodes)
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    _write(root / "meta/info.json", json.dumps(_info("v3.0", episodes, data_path=data, video_path=video)))
    named = pa.table({"task_index": list(range(len(tasks))), "__index_level_0__": tasks})
    _write(root / "meta/tasks.parquet", named)
    rows: list[dict[str, Any]] = []
    paths, first = [], 0
    for file, at in enumerate(range(0, len(episodes), per_file)):
        group = dict(list(enumerate(episodes))[at : at + per_file])
        paths.append(root / f"data/chunk-000/file-{file:03d}.parquet")
        _write(paths[-1], _table(group, tasks, first))
        starts: dict[str, list[float]] = {}
        for camera in episodes[0].videos:
            content, starts[camera] = joined([episode.videos[camera] for episode in group.values()])
            _write(root / f"videos/{camera}/chunk-000/file-{file:03d}.mp4", content)
        for place, (number, episode) in enumerate(group.items()):
            row = {
                "episode_index": number,
                "tasks": list(episode.tasks),
                "length": episode.length,
                "data/chunk_index": 0,
                "data/file_index": file,
                "dataset_from_index": first,
                "dataset_to_index": first + episode.length,
                "stats/action/mean": [0.0, 1.0],
            }
            for camera, seconds in starts.items():
                row |= {
                    f"videos/{camera}/chunk_index": 0,
                    f"videos/{camera}/file_index": file,
                    f"videos/{camera}/from_timestamp": seconds[place],
                    f"videos/{camera}/to_timestamp": seconds[place + 1],
                }
            rows.append(row)
            first += episode.length
    _write(root / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(rows))
    return paths
