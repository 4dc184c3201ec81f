"""Tests of LeRobot datasets as containers: members of episodes, parts of videos, hostile folders, packed files."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import ShardError, SourceError
from mm_assets.rows.base import row_sources, shard_kinds
from mm_assets.sources import lerobot
from mm_assets.sources.base import open_container
from mm_assets.sources.lerobot import LeRobotSource
from mm_assets.sources.member import ShardDamage
from mm_assets.sources.parquet import ParquetSource
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import expand_shards

from ..pipeline.shards import make_shard
from . import members
from .members import pack, payloads_of
from .robots import CAMERA, FPS, Episode, clip, real_episodes, write_v2, write_v3

WRITERS = pytest.mark.parametrize("write", [write_v2, write_v3], ids=["v2", "v3"])


def episode(length: int, number: int = 0, **content: Any) -> Episode:
    """An episode of a robot whose numbers say which it is."""
    seconds = np.arange(length, dtype=np.float32) / FPS
    arrays = {
        "observation.state": np.stack([seconds, seconds + number], axis=1),
        "action": np.full((length, 2, 3), number, np.float64),
        "timestamp": seconds,
        "next.done": np.arange(length) == length - 1,
    }
    return Episode(arrays=arrays, **content)


def source_of(path: Path | str) -> LeRobotSource:
    return LeRobotSource(SourceFile(str(path)))


def contents(paths: Sequence[Path | str], **options: Any) -> dict[str, bytes]:
    """Returns the contents of the members of several files by their names."""
    parts = [members.contents(source_of(path), **options) for path in paths]
    return {name: content for part in parts for name, content in part.items()}


def frames(content: bytes) -> list[tuple[float, int]]:
    """Seconds and brightness of each frame of a video."""
    import av

    with av.open(io.BytesIO(content)) as container:
        decoded = container.decode(video=0)
        return [(round(float(f.time or 0), 3), int(f.to_ndarray(format="gray").mean())) for f in decoded]


def rejected(source: LeRobotSource) -> list[str]:
    """The reasons of entries that are not members."""
    return [member.skip_reason for member in source.members() if member.skip_reason is not None]


def change_info(root: Path, **values: Any) -> None:
    path = root / "meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class TestMembers:
    @WRITERS
    def test_an_episode_is_a_sample(self, tmp_path: Path, write: Any) -> None:
        """Arrays, video and JSON of an episode are members of one key, named as LeRobot's features."""
        clips = [clip(5, 10), clip(3, 90)]
        found = contents(
            write(tmp_path, [episode(5, 0, videos={CAMERA: clips[0]}), episode(3, 7, videos={CAMERA: clips[1]})])
        )
        assert sorted(found)[:6] == [
            "episode_000000.action.npy",
            "episode_000000.json",
            "episode_000000.next.done.npy",
            f"episode_000000.{CAMERA}.mp4",
            "episode_000000.observation.state.npy",
            "episode_000000.timestamp.npy",
        ]
        assert len(found) == 12
        for number, length in ((0, 5), (1, 3)):
            expected = episode(length, 7 * number)
            for name, array in expected.arrays.items():
                loaded = np.load(io.BytesIO(found[f"episode_{number:06d}.{name}.npy"]))
                assert loaded.dtype == array.dtype
                np.testing.assert_array_equal(loaded, array)
            assert frames(found[f"episode_{number:06d}.{CAMERA}.mp4"]) == frames(clips[number])
        values = json.loads(found["episode_000001.json"])
        shown = {key: values[key] for key in ("episode_index", "length", "task", "fps", "robot_type")}
        assert shown == {"episode_index": 1, "length": 3, "task": "reach the cube", "fps": 10, "robot_type": "arm"}
        assert values["features"]["observation.state"]["names"] == ["observation.state_0", "observation.state_1"]

    @WRITERS
    def test_images_are_numbered_members(self, tmp_path: Path, write: Any) -> None:
        """The images of a camera that is not a video are members with the frame's number, their bytes unchanged."""
        images = []
        for level in range(12):
            target = io.BytesIO()
            Image.new("L", (4, 4), level).save(target, "PNG")
            images.append(target.getvalue())
        found = contents(write(tmp_path, [episode(12, images={"observation.images.left": images})]))
        assert [found[f"episode_000000.observation.images.left.{n}.png"] for n in range(12)] == images

    @WRITERS
    def test_several_tasks_are_numbered_by_frame(self, tmp_path: Path, write: Any) -> None:
        """An episode whose frames have several tasks has the first as its task, all in a list, and their numbers."""
        found = contents(write(tmp_path, [episode(3, tasks=("b", "a", "b"))]))
        values = json.loads(found["episode_000000.json"])
        assert (values["task"], values["tasks"]) == ("b", ["b", "a"])
        assert np.load(io.BytesIO(found["episode_000000.task_index.npy"])).tolist() == [0, 1, 0]

    def test_a_video_of_version_2_is_its_file(self, tmp_path: Path) -> None:
        """The MP4 of an episode of version 2 has exactly the bytes of its file."""
        video = clip(4)
        found = contents(write_v2(tmp_path, [episode(4, videos={CAMERA: video})]))
        assert found[f"episode_000000.{CAMERA}.mp4"] == video

    def test_a_file_with_one_episode_is_copied(self, tmp_path: Path) -> None:
        """The MP4 of the only episode of a file has exactly the bytes of the file."""
        found = contents(write_v3(tmp_path, [episode(4, videos={CAMERA: clip(4)})]))
        (path,) = tmp_path.rglob("*.mp4")
        assert found[f"episode_000000.{CAMERA}.mp4"] == path.read_bytes()

    def test_an_exported_episode_has_its_key_and_json(self, tmp_path: Path) -> None:
        """The columns of keys and JSON in `meta/episodes` are used as they are, values of other types are not."""
        paths = write_v3(tmp_path, [episode(2), episode(2, 1), episode(2, 2)], per_file=3)
        path = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
        table = pq.read_table(path).append_column("json", pa.array(["[ 1]", None, "{}"]))
        pq.write_table(table.append_column("__key__", pa.array(["run/a", None, "/"])), path)
        found = contents(paths)
        assert (found["run/a.json"], found["episode_000002.json"]) == (b"[ 1]", b"{}")
        assert json.loads(found["episode_000001.json"])["task"] == "reach the cube"
        assert "run/a.timestamp.npy" in found
        numbers = pa.array([1, 2, 3])
        pq.write_table(table.drop(["json"]).append_column("json", numbers).append_column("__key__", numbers), path)
        assert json.loads(contents(paths)["episode_000000.json"])["task"] == "reach the cube"

    @pytest.mark.parametrize("b_frames", [0, 2])
    def test_each_part_of_a_joined_video_is_copied(self, tmp_path: Path, b_frames: int) -> None:
        """Episodes of one MP4 give the frames that were joined, from second 0 on, with the same bytes each time."""
        clips = [clip(n, 40 * k, b_frames=b_frames) for k, n in enumerate((9, 5, 30, 4))]
        paths = write_v3(tmp_path, [episode(len(frames(c)), videos={CAMERA: c}) for c in clips], per_file=4)
        found = contents(paths)
        assert [frames(found[f"episode_{n:06d}.{CAMERA}.mp4"]) for n in range(4)] == [frames(c) for c in clips]
        assert contents(paths) == found

    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_arrays_come_back(self, tmp_path: Path, data: st.DataObject) -> None:
        """Features of any type and shape, in episodes of any length, are the arrays that were written."""
        kinds = st.sampled_from(["bool", "int8", "int64", "uint16", "float16", "float32", "float64"])
        shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
        features = data.draw(
            st.dictionaries(st.sampled_from(["a", "b.c", "x/y"]), st.tuples(kinds, shapes), min_size=1)
        )
        noise = np.random.default_rng(0)
        episodes = [
            Episode(arrays={k: noise.integers(0, 2, (n, *shape)).astype(kind) for k, (kind, shape) in features.items()})
            for n in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        ]
        root = tmp_path / str(random.random())
        found = contents(data.draw(st.sampled_from([write_v2, write_v3]))(root, episodes))
        for number, written in enumerate(episodes):
            for name, array in written.arrays.items():
                loaded = np.load(io.BytesIO(found[f"episode_{number:06d}.{name.replace('/', '%2F')}.npy"]))
                assert loaded.dtype == array.dtype
                np.testing.assert_array_equal(loaded, array)

    @WRITERS
    def test_a_remote_dataset_gives_the_same_members(self, tmp_path: Path, write: Any) -> None:
        """A dataset in an object store is read by ranges, with the same members and bytes."""
        paths = write(tmp_path / "lr", [episode(5, n, videos={CAMERA: clip(5)}) for n in range(2)])
        memory = fsspec.filesystem("memory")
        memory.put(str(tmp_path / "lr"), "/robots", recursive=True)
        try:
            remote = [f"memory://robots/{path.relative_to(tmp_path / 'lr')}" for path in paths]
            assert contents(remote) == contents(paths)
        finally:
            memory.rm("/robots", recursive=True)


class TestDetection:
    @WRITERS
    def test_a_folder_is_listed_as_its_files_of_data(self, tmp_path: Path, write: Any) -> None:
        """The shards of a dataset are its files of data, and each changes with meta/ and with its videos."""
        episodes = [episode(2, n, videos={CAMERA: clip(2)}) for n in range(2)]
        paths = write(tmp_path, episodes, **({"per_file": 1} if write is write_v3 else {}))

        def fingerprints() -> dict[str, str]:
            listing = expand_shards(str(tmp_path), kinds=shard_kinds(None, where="test"))
            return {shard.url: shard.fingerprint for shard in listing.shards}

        before = fingerprints()
        assert list(before) == [str(path) for path in paths]
        video = sorted(tmp_path.glob("videos/**/*.mp4"))[0]
        video.write_bytes(video.read_bytes() + b"x")
        changed = [url for url, fingerprint in fingerprints().items() if fingerprint != before[url]]
        assert changed == ([str(paths[0])] if write is write_v2 else [str(path) for path in paths])
        change_info(tmp_path, robot_type="other")
        assert not set(fingerprints().values()) & set(before.values())

    def test_other_folders_are_not_taken(self, tmp_path: Path) -> None:
        """A folder with meta/info.json that has no data of episodes is not a LeRobot dataset."""
        (tmp_path / "meta").mkdir()
        (tmp_path / "meta/info.json").write_text("{}")
        (tmp_path / "x.tar").write_bytes(bytes(1024))
        listing = expand_shards(str(tmp_path), kinds=shard_kinds(None, where="test"))
        assert [Path(shard.url).name for shard in listing.shards] == ["x.tar"]

    def test_a_parquet_file_elsewhere_is_none(self, tmp_path: Path) -> None:
        """A Parquet file holds episodes only in data/ of a folder with meta/info.json, also if it is opened alone."""
        (path,) = write_v2(tmp_path / "lr", [episode(2)])
        assert isinstance(row_sources([SourceFile(str(path))])[0].sources[0], LeRobotSource)
        assert isinstance(open_container(SourceFile(str(path))), LeRobotSource)
        (tmp_path / "lr/meta/info.json").unlink()
        cells = tmp_path / "cells.parquet"
        pq.write_table(pa.table({"jpg": [b"\xff\xd8\xff\xe0"]}), cells)
        for other in (path, cells):
            assert not LeRobotSource.confirms(SourceFile(str(other)))
            assert isinstance(open_container(SourceFile(str(other))), ParquetSource)


class TestFaults:
    def test_a_part_that_starts_between_keyframes_is_an_error_of_its_video(self, tmp_path: Path) -> None:
        """A part without a keyframe at its start is not copied; the error says so, and the other members stay."""
        whole = clip(12)
        paths = write_v3(tmp_path, [episode(6, n, videos={CAMERA: clip(6)}) for n in range(2)])
        (video,) = tmp_path.glob("videos/**/*.mp4")
        video.write_bytes(whole)
        errors: dict[str, str] = {}
        found = contents(paths, on_error=lambda member, error: errors.update({member.member: str(error)}))
        assert list(errors) == [f"episode_000001.{CAMERA}.mp4"]
        assert "does not start at a keyframe (its first frame is at 0.600 s)" in errors[f"episode_000001.{CAMERA}.mp4"]
        assert len(found) == 11

    @pytest.mark.parametrize(("missing", "detail"), [(1, "has 5 frames"), (-1, "has 6 frames")])
    def test_a_video_of_another_length_is_an_error(self, tmp_path: Path, missing: int, detail: str) -> None:
        """A part with fewer or more frames than its episode is refused with both numbers."""
        paths = write_v3(tmp_path, [episode(6, videos={CAMERA: clip(6 - missing)})])
        (meta,) = tmp_path.glob("meta/episodes/**/*.parquet")
        (row,) = pq.read_table(meta).to_pylist()
        row[f"videos/{CAMERA}/to_timestamp"] = 0.6
        (row["length"],) = (6 if missing > 0 else 5,)
        pq.write_table(pa.Table.from_pylist([row]), meta)
        if missing < 0:  # the file of data agrees with meta/, the video has a frame more
            pq.write_table(pq.read_table(paths[0]).slice(0, 5), paths[0])
        with pytest.raises(SourceError, match=detail) as caught:
            contents(paths)
        assert caught.value.member == f"episode_000000.{CAMERA}.mp4"

    @WRITERS
    def test_a_missing_video_is_an_error_of_its_member(self, tmp_path: Path, write: Any) -> None:
        """A video that is not in the folder is an error that names it; the other members are read."""
        paths = write(tmp_path, [episode(2, videos={CAMERA: clip(2)})])
        next(tmp_path.glob("videos/**/*.mp4")).unlink()
        errors: list[str] = []
        assert len(contents(paths, on_error=lambda _, error: errors.append(str(error)))) == 5
        assert "the dataset lacks its video" in errors[0]

    @WRITERS
    @pytest.mark.parametrize(
        "path", ["../../../etc/passwd", "/etc/passwd", "{video_key.__class__}", "{chunk_index:0999999999d}", "{0}", ""]
    )
    def test_a_hostile_path_of_videos_is_refused(self, tmp_path: Path, write: Any, path: str) -> None:
        """A pattern that leads out of the dataset, or is not one of numbers and the camera, opens nothing."""
        paths = write(tmp_path, [episode(2, videos={CAMERA: clip(2)})])
        change_info(tmp_path, video_path=path)
        with pytest.raises(SourceError, match="video_path") as caught:
            contents(paths)
        assert caught.value.member is not None

    @WRITERS
    @pytest.mark.parametrize(
        ("values", "detail"),
        [
            ({"codebase_version": "v1.6"}, "expected v2.0, v2.1 or v3.0"),
            ({"codebase_version": 3}, "expected v2.0, v2.1 or v3.0"),
            ({"features": [1]}, "features that are not objects"),
            ({"features": {"action": {"dtype": "float32", "shape": [-1]}}}, "features that are not objects"),
            ({"features": {"other": {"dtype": "float32", "shape": [1]}}}, "has no column 'other'"),
            ({"chunks_size": 0}, "chunks_size"),
        ],
    )
    def test_a_wrong_info_is_refused(self, tmp_path: Path, write: Any, values: dict[str, Any], detail: str) -> None:
        """A version that is not read, and features that contradict the file, fail the shard."""
        paths = write(tmp_path, [episode(2)])
        change_info(tmp_path, **values)
        with pytest.raises(ShardError, match=detail):
            contents(paths)

    @WRITERS
    def test_rows_that_contradict_meta_are_rejected_episodes(self, tmp_path: Path, write: Any) -> None:
        """An episode with lost, repeated or unordered frames, or an unknown task, is an entry with the reason."""
        (path, *_) = write(tmp_path, [episode(4)])
        table = pq.read_table(path)
        unknown = table.set_column(table.schema.names.index("task_index"), "task_index", pa.array([9] * 4))
        for rows, reason in (
            (table.slice(1), "not numbered in order"),
            (table.slice(0, 3), "meta/ says 4"),
            (table.take([0, 2, 1, 3]), "not numbered in order"),
            (unknown, "task_index 9 is not in the tasks"),
        ):
            pq.write_table(rows, path)
            (found,) = rejected(source_of(path))
            assert reason in found

    def test_an_episode_of_another_shape_is_rejected(self, tmp_path: Path) -> None:
        """Frames of different shapes, or not of the declared one, reject their episode and no other."""
        (path,) = write_v3(tmp_path, [episode(2), episode(2)])
        table = pq.read_table(path)
        ragged = pa.array([[1.0, 2.0], [1.0], [3.0, 4.0], [3.0, 4.0]], pa.list_(pa.float32()))
        pq.write_table(
            table.set_column(table.schema.names.index("observation.state"), "observation.state", ragged), path
        )
        source = source_of(path)
        (reason,) = rejected(source)
        assert "episode 0: feature 'observation.state' has lists of 1 to 2 values" in reason
        assert sum(member.sample_key == "episode_000001" for member in source.members()) == 5

    def test_an_episode_beyond_the_limit_is_rejected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An episode whose rows take more memory than allowed is an entry with the limit."""
        monkeypatch.setattr(lerobot, "MAX_EPISODE_BYTES", 5000)
        (path,) = write_v3(tmp_path, [episode(200), episode(2)])
        (reason,) = rejected(source_of(path))
        assert "take more than 5,000 bytes" in reason

    @WRITERS
    @pytest.mark.parametrize("name", ["meta/info.json", "meta/tasks.*", "data/*/*", "meta/episodes*"])
    def test_damage_is_an_error_or_an_entry(self, tmp_path: Path, write: Any, name: str) -> None:
        """Flipped and missing bytes of any file give members, entries with a reason or `ShardError`; salvaging ends."""
        first, *_ = write(tmp_path, [episode(3), episode(2)])
        (path, *_) = [p for p in sorted(tmp_path.glob(f"{name}")) if p.is_file()] or sorted(
            tmp_path.rglob("episodes/*/*")
        )
        whole, noise = path.read_bytes(), random.Random(1)
        for _ in range(40):
            at = noise.randrange(len(whole))
            flipped = whole[:at] + bytes([whole[at] ^ noise.randrange(1, 256)]) + whole[at + 1 :]
            path.write_bytes(noise.choice([whole[:at], flipped]))
            damage: list[ShardDamage] = []
            source = source_of(first)
            try:
                members = list(source.members(on_damaged_shard="salvage", damage=damage))
            except ShardError:
                continue
            assert [member.ordinal for member in members] == list(range(len(members)))
            assert len(damage) == sum((member.skip_reason or "").startswith("damaged") for member in members)
            found = source.payloads(wanted=lambda _: True, max_bytes=1 << 20, on_damaged_shard="salvage")
            assert all(len(content) == member.byte_size for member, content in found)

    def test_a_damaged_video_is_an_error_of_its_members(self, tmp_path: Path) -> None:
        """Flipped and missing bytes of a joined video give parts of it, or errors of these members alone."""
        paths = write_v3(tmp_path, [episode(4, n, videos={CAMERA: clip(4)}) for n in range(2)])
        (video,) = tmp_path.glob("videos/**/*.mp4")
        whole, noise = video.read_bytes(), random.Random(2)
        num_errors = 0
        for number in range(60):
            damaged = bytearray(whole)
            for _ in range(3):
                damaged[noise.randrange(len(whole))] = noise.randrange(256)
            video.write_bytes(damaged[: noise.randrange(len(whole))] if number % 10 == 0 else damaged)
            errors: list[str] = []
            found = contents(paths, on_error=lambda member, _, errors=errors: errors.append(member.extension))
            assert set(errors) <= {"mp4"}
            assert len(found) + len(errors) == 12
            num_errors += len(errors)
        assert num_errors


class TestPipeline:
    def test_a_dataset_is_packed_as_its_tar(self, tmp_path: Path) -> None:
        """The folder of a dataset is packed by itself: both versions as a tar of the same members, video as frames."""
        clips = [clip(n, 40 * k, b_frames=0) for k, n in enumerate((9, 5, 12))]
        episodes = [episode(len(frames(c)), k, videos={CAMERA: c}) for k, c in enumerate(clips)]
        paths = {write: write(tmp_path / write.__name__, episodes) for write in (write_v2, write_v3)}
        make_shard(tmp_path / "tar/a.tar", contents(paths[write_v2]))
        tar = pack(tmp_path / "out-tar", tmp_path / "tar")
        names = ["observation.state", "action", "timestamp", "next.done", "task"]
        assert {*names, CAMERA} <= set(tar.fields)
        for write in paths:
            packed = pack(tmp_path / f"out-{write.__name__}", tmp_path / write.__name__)
            assert packed.fields == tar.fields
            assert payloads_of(packed, names) == payloads_of(tar, names)
            of_videos = [payloads_of(data, [CAMERA]) for data in (packed, tar)]
            assert (of_videos[0] == of_videos[1]) == (write is write_v2)
            for index, sample_id in enumerate(packed.sample_ids):
                expected = tar[list(tar.sample_ids).index(sample_id)]
                np.testing.assert_array_equal(packed[index][CAMERA].frames, expected[CAMERA].frames)
                series = packed[index]["observation.state"]
                np.testing.assert_array_equal(series.timestamps, series.values[:, 0])

    def test_real_episodes_are_those_of_their_tar(self, tmp_path: Path, shared_data: Path) -> None:
        """Real episodes have equal arrays and task in both versions, and their videos the packets of the tar's."""
        episodes = real_episodes(shared_data)
        for write in (write_v2, write_v3):
            found = contents(write(tmp_path / write.__name__, episodes), max_bytes=1 << 30)
            for number, real in enumerate(episodes):
                name = f"episode_{number:06d}"
                for feature, array in real.arrays.items():
                    np.testing.assert_array_equal(np.load(io.BytesIO(found[f"{name}.{feature}.npy"])), array)
                assert json.loads(found[f"{name}.json"])["task"] == real.tasks[0]
                assert packets(found[f"{name}.{CAMERA}.mp4"]) == packets(real.videos[CAMERA])


def packets(content: bytes) -> list[tuple[float, bytes]]:
    """Seconds and bytes of each packet of a video."""
    import av

    with av.open(io.BytesIO(content)) as container:
        return [(round(float(p.pts * p.time_base), 4), bytes(p)) for p in container.demux(video=0) if p.pts is not None]
