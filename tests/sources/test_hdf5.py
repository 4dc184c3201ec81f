"""Tests of HDF5 files as containers: episodes as robot projects write them, hostile files, packed files."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_assets.errors import ShardError, SourceError
from mm_assets.rows.base import row_sources, shard_kinds
from mm_assets.sources.hdf5 import HDF5Source
from mm_assets.sources.member import ShardDamage
from mm_assets.storage.files import SourceFile

from ..pipeline.shards import make_shard
from . import members
from .members import array, image, pack, payloads_of, pixels
from .robots import real_episodes

MAX_BYTES = 1 << 20


def source_of(path: Path | str) -> HDF5Source:
    return HDF5Source(SourceFile(str(path)))


def contents(path: Path | str, **options: Any) -> dict[str, bytes]:
    return members.contents(source_of(path), **options)


def skipped(path: Path) -> dict[str, str]:
    return members.skip_reasons(source_of(path))


def write_robomimic(path: Path, lengths: Mapping[str, int]) -> Path:
    """A file as robomimic and LIBERO write it."""
    noise = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.attrs["date"] = "2024"
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift"})
        data.attrs["total"] = sum(lengths.values())
        for name, length in lengths.items():
            demo = data.create_group(name)
            demo.attrs["num_samples"] = length
            demo["actions"] = noise.normal(size=(length, 7))
            demo.create_dataset("dones", data=np.arange(length) == length - 1, compression="gzip")
            demo["obs/joint_pos"] = noise.normal(size=(length, 7)).astype(np.float32)
            stack = noise.integers(0, 255, (length, 12, 10, 3)).astype(np.uint8)
            demo.create_dataset(
                "obs/agentview_image", data=stack, chunks=(min(length, 3), 12, 10, 3), compression="lzf"
            )
        file["mask/train"] = np.array(["demo_0", "demo_10"], "S8")
        file["mask/valid"] = ["demo_2"]
    return path


class TestMembers:
    def test_groups_of_data_are_samples(self, tmp_path: Path) -> None:
        """Each group of data/ is a sample, by its number: arrays, frames as PNG, and its attributes in the JSON."""
        path = write_robomimic(tmp_path / "lift.v1.hdf5", {"demo_0": 5, "demo_10": 2, "demo_2": 4})
        found = contents(path)
        keys = list(dict.fromkeys(name.partition(".")[0] for name in found))
        assert keys == ["lift%2Ev1/demo_0", "lift%2Ev1/demo_2", "lift%2Ev1/demo_10"]
        with h5py.File(path) as file:
            for key in keys:
                demo = file["data"][key.partition("/")[2]]
                for name in ("actions", "dones", "obs/joint_pos"):
                    loaded = array(found[f"{key}.{name.replace('/', '.')}.npy"])
                    assert loaded.dtype == demo[name].dtype
                    np.testing.assert_array_equal(loaded, demo[name])
                for number, frame in enumerate(demo["obs/agentview_image"]):
                    np.testing.assert_array_equal(pixels(found[f"{key}.obs.agentview_image.{number}.png"]), frame)
        assert json.loads(found["lift%2Ev1/demo_10.json"]) == {
            "date": "2024",
            "env_args": '{"env_name": "Lift"}',
            "total": 11,
            "num_samples": 2,
            "episode": "demo_10",
            "mask": ["train"],
        }

    def test_a_file_without_such_groups_is_one_sample(self, tmp_path: Path) -> None:
        """A file as ALOHA writes it is one sample; its encoded pictures are as they were, without padding."""
        frames = [image(40 * n, "JPEG") for n in range(4)]
        widest = max(map(len, frames))
        with h5py.File(tmp_path / "episode_3.hdf5", "w") as file:
            file.attrs["sim"] = False
            file["action"] = np.zeros((4, 14), ">f4")
            file["observations/qpos"] = np.ones((4, 14))
            padded = np.stack([np.frombuffer(f.ljust(widest + 9, b"\0"), np.uint8) for f in frames])
            file["observations/images/cam_high"] = padded
            file["compress_len"] = np.array([[len(f) for f in frames]])
        found = contents(tmp_path / "episode_3.hdf5")
        assert sorted(found)[:3] == ["episode_3.action.npy", "episode_3.compress_len.npy", "episode_3.json"]
        assert [found[f"episode_3.observations.images.cam_high.{n}.jpg"] for n in range(4)] == frames
        assert (array(found["episode_3.action.npy"]).dtype, json.loads(found["episode_3.json"])) == (
            "<f4",
            {"sim": False},
        )

    def test_numbered_groups_of_the_root_are_samples(self, tmp_path: Path) -> None:
        """Groups such as traj_0 at the root are samples; what is beside them is an entry that says so."""
        with h5py.File(tmp_path / "m.h5", "w") as file:
            for n in range(2):
                file[f"traj_{n}/actions"] = np.full((3, 2), n)
            file["note"] = "text"
        assert sorted(contents(tmp_path / "m.h5")) == [
            *("m/traj_0.actions.npy", "m/traj_0.json", "m/traj_1.actions.npy", "m/traj_1.json")
        ]
        assert skipped(tmp_path / "m.h5") == {"m/note": "is beside the episodes, and part of none"}

    @pytest.mark.parametrize("kind", ["vlen", "opaque", "text"])
    def test_encoded_pictures_of_every_kind_are_members(self, tmp_path: Path, kind: str) -> None:
        """Lists of bytes that are pictures are members with their own bytes, whatever type holds them."""
        frames = [image(90 * n) for n in range(3)]
        with h5py.File(tmp_path / "a.h5", "w") as file:
            if kind == "vlen":
                data = file.create_dataset("rgb", (3,), h5py.vlen_dtype(np.uint8))
                for n, frame in enumerate(frames):
                    data[n] = np.frombuffer(frame, np.uint8)
            else:
                file["rgb"] = np.array(frames, f"{'V' if kind == 'opaque' else 'S'}{max(map(len, frames))}")
        found = contents(tmp_path / "a.h5")
        assert [found[f"a.rgb.{n}.png"] for n in range(3)] == frames

    def test_depth_is_png_of_16_bits_and_texts_are_json(self, tmp_path: Path) -> None:
        """Stacks of 16 bits that are called depth are PNG; texts, single numbers and attributes are in the JSON."""
        depth = np.random.default_rng(1).integers(0, 65535, (2, 5, 4)).astype(np.uint16)
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["obs/depth"] = depth
            file["obs/labels"] = depth.astype(np.uint8)
            file["language"] = ["pick", "plåce"]
            file["fps"] = 30
            file["obs"].attrs["unit"] = "mm"
            file["obs/depth"].attrs["scale"] = np.float32(0.5)
        found = contents(tmp_path / "a.h5")
        for number in range(2):
            np.testing.assert_array_equal(pixels(found[f"a.obs.depth.{number}.png"]), depth[number])
        np.testing.assert_array_equal(array(found["a.obs.labels.npy"]), depth.astype(np.uint8))
        assert json.loads(found["a.json"]) == {
            "language": ["pick", "plåce"],
            "fps": 30,
            "attributes": {"obs": {"unit": "mm"}, "obs.depth": {"scale": 0.5}},
        }

    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_arrays_come_back(self, tmp_path: Path, data: st.DataObject) -> None:
        """Datasets of any type, shape, byte order, layout and filter are the arrays that were written."""
        kinds = st.sampled_from(["?", "i1", ">i4", "u8", "<f2", ">f8", "c8"])
        shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
        arrays = data.draw(st.dictionaries(st.sampled_from(["a", "b.c", "x/y"]), st.tuples(kinds, shapes), min_size=1))
        path = tmp_path / "a.h5"
        noise = np.random.default_rng(0)
        with h5py.File(path, "w") as file:
            for name, (kind, shape) in arrays.items():
                options = {}
                if shape and 0 not in shape:
                    options["compression"] = data.draw(st.sampled_from([None, "gzip", "lzf"]))
                    options["shuffle"] = data.draw(st.booleans()) or None
                file.create_dataset(name, data=noise.integers(0, 2, shape).astype(kind), **options)
        found = contents(path)
        with h5py.File(path) as file:
            for name, (kind, shape) in arrays.items():
                role = name.replace(".", "%2E").replace("/", ".")
                if shape == () and kind != "c8":
                    assert json.loads(found["a.json"])[role] == file[name][()]
                    continue
                loaded = array(found[f"a.{role}.npy"])
                assert loaded.dtype.newbyteorder("=") == np.dtype(kind).newbyteorder("=")
                np.testing.assert_array_equal(loaded, file[name][()])

    def test_a_remote_file_gives_the_same_members(self, tmp_path: Path) -> None:
        """A file in an object store is read by ranges, with the same members and bytes."""
        path = write_robomimic(tmp_path / "lift.hdf5", {"demo_0": 3})
        memory = fsspec.filesystem("memory")
        memory.pipe("/robots/lift.hdf5", path.read_bytes())
        try:
            assert contents("memory://robots/lift.hdf5") == contents(path)
        finally:
            memory.rm("/robots", recursive=True)

    def test_it_is_detected(self, tmp_path: Path) -> None:
        """HDF5 is known by its first bytes, and a folder is searched for its names."""
        path = write_robomimic(tmp_path / "renamed.bin", {"demo_0": 1})
        assert isinstance(row_sources([SourceFile(str(path))])[0].sources[0], HDF5Source)
        assert (".hdf5", ".h5") in [kind.suffixes for kind in shard_kinds(None, where="test")]


class TestFaults:
    def test_what_leads_out_of_the_file_is_refused_by_name(self, tmp_path: Path) -> None:
        """Links, virtual and external data, references, plugin filters and other types are entries with the reason."""
        secret = tmp_path / "secret.bin"
        secret.write_bytes(b"secret!!")
        with h5py.File(tmp_path / "other.h5", "w") as file:
            file["x"] = np.arange(3)
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["fine"] = np.arange(3)
            file["external_link"] = h5py.ExternalLink("other.h5", "/x")
            file["soft_link"] = h5py.SoftLink("/fine")
            layout = h5py.VirtualLayout((3,), "i8")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (3,))
            file.create_virtual_dataset("virtual", layout)
            file.create_dataset("external_data", (8,), "u1", external=[(str(secret), 0, 8)])
            file["references"] = np.array([file["fine"].ref], h5py.ref_dtype)
            file["compound"] = np.zeros(2, [("a", "i4"), ("b", "f4")])
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((3,))
            plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)
            space = h5py.h5s.create_simple((3,))
            h5py.h5d.create(file.id, b"plugin", h5py.h5t.NATIVE_INT64, space, plist)
        reasons = skipped(tmp_path / "a.h5")
        assert list(contents(tmp_path / "a.h5")) == ["a.json", "a.fine.npy"]
        assert {name.removeprefix("a."): reason.split(":")[0] for name, reason in reasons.items()} == {
            "external_link": "is a link (ExternalLink) and not followed",
            "soft_link": "is a link (SoftLink) and not followed",
            "virtual": "is a virtual dataset, whose data is in other files",
            "external_data": "has its data in another file",
            "references": "holds references to other objects, which are not followed",
            "compound": "has the type [('a', '<i4'), ('b', '<f4')], expected numbers, texts or encoded pictures",
            "plugin": "is compressed by the plugin filter 32015 (''), expected one of gzip, shuffle, fletcher32, nbit, "
            "scaleoffset, lzf",
        }

    def test_groups_in_a_circle_end(self, tmp_path: Path) -> None:
        """A group that is linked in itself, or into several episodes, is listed once."""
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["data/demo_0/x"] = np.arange(2)
            file["data/demo_0/again"] = file["data"]
            file["data/demo_0/root"] = file["/"]
            file["data/demo_1/other"] = file["data/demo_0"]
        assert [name for name in contents(tmp_path / "a.h5") if name.endswith("npy")] == ["a/demo_0.x.npy"]
        assert len(skipped(tmp_path / "a.h5")) == 3

    def test_a_bomb_is_an_error_of_its_member(self, tmp_path: Path) -> None:
        """Data, and chunks, that unpack to more than allowed are errors of their members, which read nothing."""
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("unwritten", (1 << 40,), "f8", chunks=(1024,))
            zeros = np.zeros((2, 1 << 10, 1 << 10, 3), np.uint8)
            file.create_dataset("frames", data=zeros, chunks=(2, 1 << 10, 1 << 10, 3), compression="gzip")
            file.create_dataset("chunk", (4,), "f8", chunks=(1 << 22,), maxshape=(None,), compression="gzip")[:] = 1
            file.create_dataset("many", (1 << 30, 8, 8, 3), "u1", chunks=(1, 8, 8, 3))
            file.create_dataset("large", data=np.zeros(1 << 18), compression="gzip")
            file["fine"] = np.arange(3)
        assert (tmp_path / "a.h5").stat().st_size < 100_000
        errors: dict[str, str] = {}
        found = contents(tmp_path / "a.h5", on_error=lambda member, error: errors.update({member.member: error.detail}))
        assert list(found) == ["a.json", "a.fine.npy"]
        assert skipped(tmp_path / "a.h5") == {
            "a.unwritten": f"has {1 << 40:,} values, but the file holds at most 0: write it again",
            "a.many": f"has {(1 << 30) * 192:,} values, but the file holds at most 0: write it again",
        }
        assert errors["a.large.npy"] == f"holds {(1 << 21) + 128} bytes, allowed are {MAX_BYTES}"
        assert errors["a.chunk.npy"] == f"cannot be read: has chunks of {1 << 25:,} bytes, allowed are {MAX_BYTES:,}"
        assert "holds 3147060 bytes" in errors["a.frames.0.png"]
        with pytest.raises(SourceError, match="allowed are"):
            contents(tmp_path / "a.h5")

    def test_a_heap_whose_entries_have_no_size_is_damage(self, tmp_path: Path) -> None:
        """A heap of texts in which HDF5's own library would not come to an end is refused with its byte."""
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.attrs["text"] = "a text"
        content = bytearray((tmp_path / "a.h5").read_bytes())
        at = content.index(b"GCOL")
        content[at + 16 : at + 32] = bytes(16)
        (tmp_path / "a.h5").write_bytes(content)
        with pytest.raises(ShardError, match=f"a heap at byte {at} has an entry of 0 bytes"):
            contents(tmp_path / "a.h5")

    @pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(500), b"PK\x03\x04"])
    def test_other_files_are_refused(self, tmp_path: Path, content: bytes) -> None:
        """An empty, truncated or other file is a `ShardError` at byte 0."""
        (tmp_path / "a.h5").write_bytes(content)
        with pytest.raises(ShardError) as caught:
            contents(tmp_path / "a.h5")
        assert caught.value.byte_offset == 0

    @pytest.mark.parametrize("kind", ["truncated", "flipped"])
    def test_damage_is_an_error_or_an_entry(self, tmp_path: Path, kind: str) -> None:
        """Damaged files give members, entries with a reason or `ShardError`, and salvaging ends."""
        path = write_robomimic(tmp_path / "a.h5", {"demo_0": 3, "demo_1": 2})
        whole, noise = path.read_bytes(), random.Random(7)
        num_read = 0
        for _ in range(40):
            at = noise.randrange(len(whole))
            flipped = whole[:at] + bytes([whole[at] ^ noise.randrange(1, 256)]) + whole[at + 1 :]
            path.write_bytes(whole[:at] if kind == "truncated" else flipped)
            damage: list[ShardDamage] = []
            source = source_of(path)
            try:
                members = list(source.members(on_damaged_shard="salvage", damage=damage))
            except ShardError:
                continue
            num_read += 1
            assert [member.ordinal for member in members] == list(range(len(members)))
            assert len(damage) == sum((member.skip_reason or "").startswith("damaged") for member in members)
            found = source.payloads(
                wanted=lambda _: True, max_bytes=MAX_BYTES, on_error=lambda *_: None, on_damaged_shard="salvage"
            )
            assert all(len(content) == member.byte_size for member, content in found)
        assert num_read or kind == "truncated"


class TestPipeline:
    def test_real_episodes_come_back(self, tmp_path: Path, shared_data: Path) -> None:
        """Real episodes in the layout of robomimic have equal arrays, and their task."""
        episodes = real_episodes(shared_data)
        with h5py.File(tmp_path / "real.hdf5", "w") as file:
            for number, episode in enumerate(episodes):
                for name, values in episode.arrays.items():
                    file.create_dataset(f"data/demo_{number}/{name.replace('.', '/')}", data=values, compression="gzip")
                file[f"data/demo_{number}"].attrs["task"] = episode.tasks[0]
        found = contents(tmp_path / "real.hdf5")
        for number, episode in enumerate(episodes):
            for name, values in episode.arrays.items():
                np.testing.assert_array_equal(array(found[f"real/demo_{number}.{name}.npy"]), values)
            assert json.loads(found[f"real/demo_{number}.json"])["task"] == episode.tasks[0]

    def test_episodes_are_packed_as_their_tar(self, tmp_path: Path) -> None:
        """A file of episodes is packed to the same payloads as a tar of the same members, frames as a sequence."""
        (tmp_path / "hdf5").mkdir()
        path = write_robomimic(tmp_path / "hdf5/lift.hdf5", {"demo_0": 3, "demo_1": 2})
        make_shard(tmp_path / "tar/a.tar", contents(path))
        packed = {kind: pack(tmp_path / f"out-{kind}", tmp_path / kind) for kind in ("hdf5", "tar")}
        assert packed["hdf5"].fields == packed["tar"].fields
        names = ["actions", "dones", "obs.joint_pos", "obs.agentview_image", "metadata"]
        assert set(names) <= set(packed["hdf5"].fields)
        assert payloads_of(packed["hdf5"], names) == payloads_of(packed["tar"], names)
        sample = packed["hdf5"][list(packed["hdf5"].sample_ids).index("lift/demo_0")]
        with h5py.File(path) as file:
            stack = file["data/demo_0/obs/agentview_image"][()]
        np.testing.assert_array_equal(np.stack([frame for _, frame in sample["obs.agentview_image"]]), stack)
