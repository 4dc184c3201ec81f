"""Tests of exports to LeRobot: episodes, the files that describe them, and samples that are refused."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import EncodeError, MmAssetsError
from mm_assets.exports import ExportProgress, export
from mm_assets.fields import (
    BytesField,
    Field,
    ImageField,
    JSONField,
    NDArrayField,
    SequenceField,
    SyncedVideoAudioField,
    TextField,
)
from mm_assets.sources.lerobot import LeRobotSource
from mm_assets.storage.files import SourceFile

from ..pipeline.chain import declare, run_chain
from ..sources.robots import FPS, clip
from .export_suite import UNCHECKED, InterruptionError, contents, interrupt, open_files, payloads, unsynced_folder
from .export_suite import packed as pack

CAMERA = "observation.images.top"
FIELDS: Mapping[str, Field] = {
    "state": NDArrayField(),
    "force": NDArrayField(),
    "embedding": NDArrayField(),
    "timestamp": NDArrayField(),
    "top": SyncedVideoAudioField(),
    "left": SequenceField(ImageField(encoding="keep")),
    "note": TextField(),
    "model": BytesField(),
    "metadata": JSONField(),
}


def picture(level: int, size: int = 4) -> bytes:
    target = io.BytesIO()
    Image.new("L", (size, size), level).save(target, "PNG")
    return target.getvalue()


def episode(length: int, number: int = 0, **changes: Any) -> dict[str, Any]:
    """Returns a sample with all modalities; `changes` replace values, and None removes them."""
    sample = {
        "state": np.full((length, 2), number, np.float32),
        "force": np.arange(length * 6, dtype=np.int16).reshape(length, 2, 3),
        "embedding": np.zeros(length + 7),
        "timestamp": np.arange(length) / FPS + 0.5,
        "top": clip(length, 40 * number),
        "left": [(n, picture(n + number)) for n in range(length)],
        "note": "left out",
        "model": b"left out",
        "metadata": {
            "task": f"task {number % 2}",
            "info": {"fps": float(FPS), "robot_type": "arm", "features": {"state": {"names": ["x", "y"]}}},
        },
    }
    return {name: value for name, value in {**sample, **changes}.items() if value is not None}


def fragmented(content: bytes) -> bytes:
    """Returns an MP4 whose header does not list its frames."""
    import av

    target = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"}
    with av.open(io.BytesIO(content)) as source, av.open(target, "w", format="mp4", options=options) as output:
        copied = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = copied
                output.mux(packet)
    return target.getvalue()


def packed(path: Path, samples: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Field] = FIELDS) -> Path:
    return pack(path, samples, fields)


def members(out: Path) -> dict[str, bytes]:
    """Returns the members that this project's source reads from an export."""
    result: dict[str, bytes] = {}
    for path in sorted(out.glob("data/*/*.parquet")):
        with SourceFile(str(path)) as file:
            for member, content in LeRobotSource(file).payloads(wanted=lambda _: True, max_bytes=1 << 30):
                result[member.member] = content
    return result


def episodes(out: Path) -> Sequence[Mapping[str, Any]]:
    """Returns the table of episodes."""
    rows: list[dict[str, Any]] = []
    for path in sorted(out.glob("meta/episodes/*/*.parquet")):
        rows += pq.read_table(path).to_pylist()
    return rows


class TestLeRobot:
    def test_an_episode_has_its_features_again(self, tmp_path: Path) -> None:
        """Keys, JSON, arrays, videos and images are read as they were packed, with the names of features."""
        samples = {"run/a": episode(3), "run/b": episode(5, 1), "c.d": episode(2, 2)}
        export(packed(tmp_path / "a.mult", samples), "lerobot", tmp_path / "out", shard_samples=2)
        files = members(tmp_path / "out")
        for key, sample in (("run/a", samples["run/a"]), ("run/b", samples["run/b"]), ("c%2Ed", samples["c.d"])):
            for name, role in (("state", "observation.state"), ("force", "force"), ("timestamp", "timestamp")):
                array = np.load(io.BytesIO(files.pop(f"{key}.{role}.npy")))
                assert array.dtype == sample[name].dtype
                np.testing.assert_array_equal(array, sample[name])
            assert files.pop(f"{key}.{CAMERA}.mp4") == sample["top"]
            for frame, image in sample["left"]:
                assert files.pop(f"{key}.observation.images.left.{frame}.png") == image
            assert json.loads(files.pop(f"{key}.json")) == sample["metadata"]
        assert not files

    def test_the_folder_is_described(self, tmp_path: Path) -> None:
        """Episodes and frames are numbered through all shards; tasks, features and statistics describe all of them."""
        samples = {"a": episode(3), "b": episode(5, 1), "c": episode(2, 2)}
        export(packed(tmp_path / "a.mult", samples), "lerobot", tmp_path / "out", shard_samples=2)
        info = json.loads((tmp_path / "out/meta/info.json").read_bytes())
        assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 10, 2)
        assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", FPS, "arm")
        features = info["features"]
        assert features["observation.state"] == {"dtype": "float32", "shape": [2], "names": ["x", "y"]}
        assert features["force"] == {"dtype": "int16", "shape": [2, 3], "names": None}
        assert (features[CAMERA]["dtype"], features[CAMERA]["shape"]) == ("video", [32, 32, 3])
        assert features["observation.images.left"]["shape"] == [4, 4, 1]
        frames = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("data/*/*.parquet"))]
        assert [n for table in frames for n in table["index"].to_pylist()] == list(range(10))
        assert [n for table in frames for n in table["task_index"].to_pylist()] == [0] * 3 + [1] * 5 + [0] * 2
        rows = episodes(tmp_path / "out")
        assert [row["episode_index"] for row in rows] == [0, 1, 2]
        assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == [(0, 3), (3, 8), (8, 10)]
        assert [row[f"videos/{CAMERA}/file_index"] for row in rows] == [0, 1, 2]
        assert [row[f"videos/{CAMERA}/from_timestamp"] for row in rows] == [-0.5] * 3  # as the clock starts at 0.5
        statistics = json.loads((tmp_path / "out/meta/stats.json").read_bytes())
        states = np.concatenate([sample["state"] for sample in samples.values()])
        state = statistics["observation.state"]
        assert (state["count"], state["min"], state["max"]) == ([10], [0, 0], [2, 2])
        np.testing.assert_allclose(state["mean"], states.mean(axis=0))
        np.testing.assert_allclose(state["std"], states.std(axis=0), rtol=1e-6)
        assert np.shape(statistics[CAMERA]["mean"]) == (3, 1, 1)

    @pytest.mark.parametrize("with_video", [True, False])
    def test_a_clock_follows_from_the_frames_per_second(self, tmp_path: Path, with_video: bool) -> None:
        """Without `timestamp` frames are at their number divided by `fps`, of the video or of the JSON."""
        metadata = None if with_video else {"fps": FPS}
        sample = episode(4, timestamp=None, metadata=metadata, top=clip(4) if with_video else None)
        export(packed(tmp_path / "a.mult", {"a": sample}), "lerobot", tmp_path / "out")
        clock = np.load(io.BytesIO(members(tmp_path / "out")["a.timestamp.npy"]))
        assert clock.dtype == np.float32
        np.testing.assert_array_equal(clock, np.float32([0, 0.1, 0.2, 0.3]))

    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            ([], "no samples"),
            ([episode(2, state=None, force=None, embedding=None, timestamp=None)], "no array with"),
            ([episode(2), episode(2, top=None)], "sample 's1': lacks 'top'"),
            ([episode(2), episode(2, force=None)], "lacks 'force'"),
            ([episode(2), episode(2, state=np.zeros((2, 3), np.float32))], "has frames of"),
            ([episode(2), episode(2, state=np.zeros((3, 2), np.float32))], "no value of 'state' for each frame"),
            ([episode(2, timestamp=np.zeros((2, 2)))], "does not have one number for each frame"),
            ([episode(2, top=clip(3))], "sample 's0': 'top' has 3 frames, but the arrays have 2"),
            ([episode(3, timestamp=np.array([0, 0.1, 0.3]))], "leave 'timestamp' or the video out"),
            ([episode(2, timestamp=1.7e9 + np.arange(2) / FPS)], "as float32"),
            ([episode(2, timestamp=np.arange(2) / FPS - 1)], "starts at -1.0 s"),
            ([episode(2, top=fragmented(clip(2)))], "says 0 frames, but it has 2"),
            ([episode(2, left=[(0, picture(0)), (1, picture(0, 5))])], "images have the sizes"),
            ([episode(2, left=[(0, picture(0))])], "'left' has 1 frame, but the arrays have 2"),
            (
                [episode(2), episode(2, left=[(n, picture(0, 5)) for n in range(2)])],
                "pictures of 4 x 4 x 1 and 5 x 5 x 1",
            ),
            ([episode(2), episode(2, metadata={"fps": 5})], "5 frames per second, but other samples 10"),
            ([episode(2, timestamp=None, metadata=None, top=None)], "frames per second is unknown"),
        ],
    )
    def test_what_cannot_be_an_episode_is_refused(
        self, tmp_path: Path, samples: Sequence[Mapping[str, Any]], message: str
    ) -> None:
        """Samples that LeRobot could not read, or that differ in their features, are refused with the reason."""
        path = packed(tmp_path / "a.mult", {f"s{n}": sample for n, sample in enumerate(samples)})
        with pytest.raises(EncodeError, match=message) as caught:
            export(path, "lerobot", tmp_path / "out")
        assert not (tmp_path / "out/export.json").exists()
        assert not open_files(tmp_path / "out"), caught

    def test_sizes_of_shards_are_compared(self, tmp_path: Path) -> None:
        """A camera whose pictures have another size in another shard is refused."""
        samples = {"a": episode(2), "b": episode(2, left=[(n, picture(0, 5)) for n in range(2)])}
        with pytest.raises(EncodeError, match="pictures of 4 x 4 x 1 and 5 x 5 x 1"):
            export(packed(tmp_path / "a.mult", samples), "lerobot", tmp_path / "out", shard_samples=1)

    def test_an_interrupted_export_goes_on(self, tmp_path: Path) -> None:
        """A second run writes the missing shards, and gives the same files as a single run."""
        path = packed(tmp_path / "a.mult", {f"s{n}": episode(2, n) for n in range(3)})
        with pytest.raises(InterruptionError):
            export(path, "lerobot", tmp_path / "out", shard_samples=1, progress=interrupt)
        summary = export(path, "lerobot", tmp_path / "out", shard_samples=1)
        assert (summary.num_reused, len(summary.shards)) == (1, 3)
        export(path, "lerobot", tmp_path / "whole", shard_samples=1)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    @pytest.mark.parametrize("pattern", ["videos/*/*/*.mp4", "data/*/*.parquet"])
    def test_damage_is_found_at_the_end(self, tmp_path: Path, pattern: str) -> None:
        """A file whose bytes are not those that were written fails the export."""

        def damage(progress: ExportProgress) -> None:
            if not progress.is_check:
                (path,) = (tmp_path / "out").glob(pattern)
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)

        noise = np.random.default_rng(0).random((3, 500))  # most of the file
        path = packed(tmp_path / "a.mult", {"a": episode(3, state=noise)})
        with pytest.raises(MmAssetsError):
            export(path, "lerobot", tmp_path / "out", progress=damage)
        assert not (tmp_path / "out/export.json").exists()

    def test_real_episodes_are_packed_to_the_same_payloads(self, tmp_path: Path, shared_data: Path) -> None:
        """Episodes of a real robot, packed, exported and packed again: ids, JSON, records and data are the same."""
        run_chain(declare(tmp_path / "a", shared_data / "robotics/robotics-episodes-00000.tar"))
        export(tmp_path / "a/data/manifest.json", "lerobot", tmp_path / "out", shard_samples=1)
        run_chain(declare(tmp_path / "b", tmp_path / "out"))
        before, after = payloads(tmp_path / "a/data/manifest.json"), payloads(tmp_path / "b/data/manifest.json")
        del before["rows"], after["rows"]  # the names of members
        names = {"state": "observation.state", "reward": "next.reward", "done": "next.done"}
        names["ego_view"] = "observation.images.ego_view"
        assert after == {names.get(name, name): digest for name, digest in before.items()}

    @settings(max_examples=15, deadline=None, suppress_health_check=UNCHECKED)
    @pytest.mark.nightly_examples(10_000)
    @given(
        keys=st.lists(
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=4, unique=True
        ),
        lengths=st.lists(st.integers(1, 4), min_size=4, max_size=4),
        shape=st.lists(st.integers(1, 3), max_size=5).map(tuple),
        dtype=st.sampled_from(("bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64", ">i4")),
        task=st.none() | st.text(max_size=4),
    )
    def test_any_arrays_come_back(
        self,
        keys: Sequence[str],
        lengths: Sequence[int],
        shape: tuple[int, ...],
        dtype: str,
        task: str | None,
    ) -> None:
        """Arrays of any type and shape are read back as they were written; the export itself checks that."""
        fields = {"action": NDArrayField(), "metadata": JSONField()}
        samples = {
            key: {"action": np.full((length, *shape), n, dtype), "metadata": {"task": task, "fps": 29.97}}
            for n, (key, length) in enumerate(zip(keys, lengths, strict=False))
        }
        with unsynced_folder() as folder:
            export(packed(folder / "a.mult", samples, fields), "lerobot", folder / "out", shard_samples=2)
            assert sum(row["length"] for row in episodes(folder / "out")) == sum(lengths[: len(keys)])
