"""Tests of Lance datasets as containers: fragments, deletions, blobs, arrays, damage, and the way to packed files."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import ShardError, SourceError
from mm_assets.rows.base import shard_kinds
from mm_assets.sources.arrow_rows import ArrowRows
from mm_assets.sources.lance import LanceSource
from mm_assets.sources.lance_manifest import read_fragments, version_of
from mm_assets.sources.member import ShardDamage
from mm_assets.sources.parquet import ParquetSource
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile, description_of, expand_shards

from ..pipeline.chain import declare, run_chain
from .lance_files import change, write, write_references
from .members import JPEG, PNG, contents, image
from .tables import entries, tables

pytest.importorskip("lance", reason="the lance extra is not installed")


def shards_of(place: object, **options: Any) -> list[ShardFile]:
    return list(expand_shards(str(place), kinds=shard_kinds(None, where="test"), **options).shards)


def source_of(path: Path) -> LanceSource:
    """The only fragment of a dataset."""
    (shard,) = shards_of(path)
    return LanceSource(SourceFile(shard.url))


class TestMembers:
    def test_a_row_is_a_sample_with_its_cells_texts_arrays_and_json(self, tmp_path: Path) -> None:
        """Bytes, texts, JSON and the arrays that `__members__` names are members; other arrays are in the JSON."""
        state = pa.array([[[1.5, 2], [3, 4]], None], pa.list_(pa.list_(pa.float32(), 2), 2))
        table = pa.table(
            {
                "__key__": ["a/b", "c"],
                "json": ['{"n": 1.50}', None],
                "image": pa.array([JPEG, PNG], pa.large_binary()),
                "text": ["é", "x"],
                "state": state,
                "__members__": [
                    '[["image", "left.jpeg"], ["text", "words.txt"], ["state", "state.npy"]]',
                    '[["image", "png"]]',
                ],
            }
        )
        write(tmp_path / "x.lance", table)
        source = source_of(tmp_path / "x.lance")
        found = contents(source)
        array = np.load(io.BytesIO(found.pop("a/b.state.npy")), allow_pickle=False)
        assert (array.dtype, array.tolist()) == (np.float32, [[1.5, 2], [3, 4]])
        assert found == {
            "a/b.json": b'{"n": 1.50}',
            "a/b.left.jpeg": JPEG,
            "a/b.words.txt": "é".encode(),
            "c.png": PNG,
        }
        assert [member.ordinal for member in source.members()] == list(range(5))

    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=20, deadline=None)
    @given(table=tables())
    def test_any_table_has_the_members_of_parquet(
        self, tmp_path_factory: pytest.TempPathFactory, table: pa.Table
    ) -> None:
        """Whatever columns and values there are, entries and contents are those of a Parquet file of the rows."""
        folder = tmp_path_factory.mktemp("any")
        pq.write_table(table, folder / "t.parquet")
        write(folder / "x.lance", table)
        with SourceFile(str(folder / "t.parquet")) as file:
            expected = entries(ParquetSource(file))
        source = source_of(folder / "x.lance")
        assert entries(source) == expected
        source.file.close()
        shutil.rmtree(folder)

    @pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
    def test_blobs_are_ranges_of_the_file(self, tmp_path: Path, version: str) -> None:
        """Blobs of every version of the format are read as ranges, of the shard itself or of a file beside it."""
        values = [JPEG, None, b"", PNG * 9000]
        table = pa.table({"__key__": list("abcd"), "image": pa.array(values, pa.large_binary())})
        write(tmp_path / "x.lance", table, ["image"], data_storage_version=version)
        source = source_of(tmp_path / "x.lance")
        members = {member.member: member for member in source.members()}
        assert contents(source) == {"a.jpg": JPEG, "c.bin": b"", "d.png": PNG * 9000}
        assert members.keys() == {"a.jpg", "c.bin", "d.png"}
        for name, content in (("a.jpg", JPEG), ("d.png", PNG * 9000)):
            offset = members[name].byte_offset
            if name == "a.jpg" or version != "2.2":  # in which large blobs have a file of their own
                assert offset is not None
                assert source.file.read(offset, len(content)) == content

    def test_a_blob_elsewhere_is_not_read(self, tmp_path: Path) -> None:
        """A blob that names a file outside of the dataset is a member without bytes, with that name."""
        secret = tmp_path / "secret.jpg"
        secret.write_bytes(JPEG)
        write_references(tmp_path / "x.lance", ["a", "b"], [secret.as_uri(), PNG])
        source = source_of(tmp_path / "x.lance")
        first, second = source.members()
        assert (first.skip_reason, first.link_target) == (
            f"no bytes: the cell has only the path {secret.as_uri()!r}",
            secret.as_uri(),
        )
        assert contents(source) == {second.member: PNG}

    def test_an_array_with_nulls_is_refused(self) -> None:
        """An array that a NPY file cannot hold is an error of its row, at any depth."""
        for value in ([[1.0, None], [1.0, 2.0]], [None, [1.0, 2.0]]):
            state = pa.array([value], pa.list_(pa.list_(pa.float32(), 2), 2))
            batch = pa.record_batch({"state": state, "__members__": ['[["state", "npy"]]']})
            with pytest.raises(ValueError, match="has nulls"):
                list(ArrowRows("x", "x", batch.schema).of_batch(batch))


class TestFragments:
    def test_a_fragment_of_the_newest_version_is_a_shard(self, tmp_path: Path) -> None:
        """Neither files of earlier versions nor deleted rows count; the other rows keep their numbers."""
        path = tmp_path / "x.lance"
        write(path, pa.table({"n": list(range(6)), "jpg": [JPEG] * 6}), max_rows_per_file=3)
        first = shards_of(path)
        change(path, delete="n = 1")
        second = shards_of(path)
        assert [shard.url for shard in first] == [shard.url for shard in second]
        changed = [
            description_of(a.fingerprint) != description_of(b.fingerprint) for a, b in zip(first, second, strict=True)
        ]
        assert sorted(changed) == [False, True]
        source = LanceSource(SourceFile(second[changed.index(True)].url))
        assert [json.loads(v) for k, v in contents(source).items() if k.endswith("json")] == [{"n": 0}, {"n": 2}]
        assert [m.sample_key[-8:] for m in source.members() if m.extension == "jpg"] == ["00000000", "00000002"]
        change(path, add="n * 10")
        third = shards_of(path)
        assert not {shard.fingerprint for shard in third} & {shard.fingerprint for shard in second}
        texts = [
            json.loads(v)
            for shard in third
            for k, v in contents(LanceSource(SourceFile(shard.url))).items()
            if "json" in k
        ]
        assert sorted(text["more"] for text in texts) == [0, 20, 30, 40, 50]
        write(path, pa.table({"n": [7], "jpg": [PNG]}), mode="overwrite")
        (fourth,) = shards_of(path)
        assert fourth.url not in {shard.url for shard in third}
        with pytest.raises(ShardError, match="not the first file of a fragment of version 4"):
            list(LanceSource(SourceFile(third[0].url)).members())

    def test_a_clone_without_copies_is_refused(self, tmp_path: Path) -> None:
        """A dataset whose files are in another folder is named, with what to do."""
        write(tmp_path / "x.lance", pa.table({"jpg": [JPEG]}))
        change(tmp_path / "x.lance", clone=tmp_path / "y.lance")
        with pytest.raises(ShardError, match="deep_clone"):
            shards_of(tmp_path / "y.lance")

    def test_names_of_manifests_are_versions(self) -> None:
        """Both ways of naming a manifest give its version, and other files have none."""
        assert version_of("/x/_versions/18446744073709551613.manifest") == 2
        assert version_of("_versions/12.manifest") == 12
        assert [version_of(name) for name in ("_versions/d1.manifest", "x.manifest", "_versions/1.txt")] == [None] * 3

    @given(st.data())
    def test_any_manifest_is_read_or_refused(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Whatever bytes a manifest has, it gives fragments with files of the folder, or `ShardError` is raised."""
        content = bytearray(MANIFEST)
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        size = data.draw(st.integers(0, len(content)) | st.just(len(content)))
        try:
            fragments = read_fragments("m", bytes(content[:size]))
        except ShardError:
            return
        names = [name for one in fragments for name in (one.shard, *one.others)]
        assert all(name.count("/") == 1 and "/." not in name for name in names)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A message of Protocol Buffers."""
    return b"".join(
        varint(number << 3) + varint(value)
        if isinstance(value, int)
        else varint(number << 3 | 2) + varint(len(value)) + value
        for number, value in fields
    )


def manifest(*fragments: bytes) -> bytes:
    body = message((1, message((2, b"jpg"))), *((2, fragment) for fragment in fragments), (3, 1))
    return b"????" + len(body).to_bytes(4, "little") + body + (4).to_bytes(8, "little") + b"\0\0\2\0LANC"


DELETIONS = message((2, 7), (3, 9))
MANIFEST = manifest(
    message((2, message((1, b"a.lance"), (2, b"\0"), (6, 100))), (4, 3)),
    message((1, 1), (2, message((1, b"b.lance"))), (2, message((1, b"c.lance"))), (3, DELETIONS)),
)


class TestManifest:
    def test_a_fragment_has_its_files(self) -> None:
        """A fragment is its data files and its deletion file, and its digest changes with the schema."""
        first, second = read_fragments("m", MANIFEST)
        assert (first.shard, first.others) == ("data/a.lance", [])
        assert (second.shard, second.others) == ("data/b.lance", ["data/c.lance", "_deletions/1-7-9.arrow"])
        (other,) = read_fragments("m", manifest(message((2, message((1, b"a.lance"), (2, b"\0"), (6, 100))), (4, 3))))
        assert other.digest == first.digest
        assert read_fragments("m", MANIFEST.replace(b"jpg", b"png"))[0].digest != first.digest

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", "ends with b''"),
            (b"<html>" * 9, "expected the manifest"),
            (manifest(message((4, 1))), "no data file"),
            (manifest(message((2, message((1, b"../x.lance"))))), "expected a name in the folder data"),
            (manifest(message((2, message((1, b"x.lance"), (7, 1))))), "deep_clone"),
            (manifest(message((2, message((1, b"x.lance"))), (3, message((1, 7))))), "of type 7"),
            (MANIFEST[:20] + MANIFEST[60:], "from byte 8 on"),
        ],
    )
    def test_what_is_wrong_is_named(self, content: bytes, expected: str) -> None:
        """Other files, truncated messages, and files in other folders are refused with what was found."""
        with pytest.raises(ShardError, match=expected):
            read_fragments("m", content)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        """A file that the manifest names and the folder lacks is an error with its name."""
        (tmp_path / "_versions").mkdir()
        (tmp_path / "_versions/1.manifest").write_bytes(MANIFEST)
        with pytest.raises(ShardError, match=r"data/a\.lance, which is missing"):
            shards_of(tmp_path)


class TestDamage:
    def test_what_is_not_in_a_dataset_is_refused(self, tmp_path: Path) -> None:
        """A file outside of a dataset, and another file under the name of a data file, are named."""
        (tmp_path / "x.lance").write_bytes(b"x")
        with pytest.raises(ShardError, match="use the dataset's folder"):
            list(LanceSource(SourceFile(str(tmp_path / "x.lance"))).members())

    def test_a_damaged_file_is_refused_and_ends_no_process(self, tmp_path: Path) -> None:
        """Truncated and flipped data files, pointers of Git LFS and counts beyond any memory raise `ShardError`."""
        path = tmp_path / "x.lance"
        write(path, pa.table({"n": list(range(40)), "jpg": [JPEG] * 40}), max_rows_per_file=40)
        change(path, delete="n = 3")
        source = source_of(path)
        data, (deletions,) = Path(source.file.url), (path / "_deletions").iterdir()
        whole = data.read_bytes(), deletions.read_bytes()
        # A buffer then has half of the address space, which ends a process of Lance.
        bomb = whole[1].replace(b"\xff" * 8, b"\xff" * 7 + b"\x7f")
        cases = [
            (data, whole[0][: len(whole[0]) // 2], "Lance cannot read it"),
            (data, b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            (deletions, bomb, "Lance cannot read it"),
        ]
        for file, content, expected in cases:
            file.write_bytes(content)
            with pytest.raises(ShardError, match=expected) as caught:
                list(source_of(path).members())
            assert caught.value.byte_offset == 0
            data.write_bytes(whole[0])
            deletions.write_bytes(whole[1])
        deletions.write_bytes(bomb)
        damage: list[ShardDamage] = []
        (lost,) = source_of(path).members(on_damaged_shard="salvage", damage=damage)
        assert lost.skip_reason == f"damaged: {damage[0].detail}"

    def test_a_row_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        """A row whose `__members__` do not fit it is damage; salvaged, the rows before it are whole."""
        table = pa.table({"__key__": ["a", "b"], "x": [JPEG, PNG], "__members__": ['[["x", "jpg"]]', '[["y", "jpg"]]']})
        write(tmp_path / "x.lance", table)
        source = source_of(tmp_path / "x.lance")
        with pytest.raises(ShardError, match="row 1 or after cannot be read: column '__members__'"):
            list(source.members())
        damage: list[ShardDamage] = []
        assert contents(source, on_damaged_shard="salvage", damage=damage) == {"a.jpg": JPEG}
        assert len(damage) == 1


class TestPipeline:
    def test_a_dataset_is_packed_with_its_bytes(self, tmp_path: Path) -> None:
        """A fragment is a partition whose samples have the rows' keys, pictures and texts."""
        pictures = pa.array([image(n) for n in range(5)], pa.large_binary())
        table = pa.table(
            {"__key__": [f"k{n}" for n in range(5)], "image": pictures, "text": [f"text {n}" for n in range(5)]}
        )
        write(tmp_path / "x.lance", table, ["image"], data_storage_version="2.0")
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "x.lance"))
        data = mm_assets.open(dataset.store.url_of("manifest.json"))
        assert sorted(data.sample_ids) == [f"k{n}" for n in range(5)]
        for index, sample_id in enumerate(data.sample_ids):
            n = int(sample_id[1])
            assert bytes(data.read_raw([index], ["image"])["image"][0]).endswith(image(n))
            assert data[index]["text"] == f"text {n}"


class TestStorage:
    def test_a_storage_that_lance_does_not_read_is_refused(self, tmp_path: Path) -> None:
        """A dataset in another storage than a folder or S3 is listed, and refused with advice when it is read."""
        write(tmp_path / "x.lance", pa.table({"jpg": [JPEG]}))
        memory = fsspec.filesystem("memory")
        memory.put(str(tmp_path / "x.lance"), "/lance/x.lance", recursive=True)
        try:
            (shard,) = shards_of("memory://lance/x.lance")
            with pytest.raises(SourceError, match="copy the dataset to a local folder or to an S3 bucket"):
                list(LanceSource(SourceFile(shard.url)).members())
        finally:
            memory.rm("/lance", recursive=True)
