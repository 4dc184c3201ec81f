"""Tests of the features of `datasets` in Parquet files: names of classes, arrays, splits and configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mm_assets.errors import SourceError
from mm_assets.rows.base import row_sources, shard_kinds
from mm_assets.rows.from_members import MemberRows
from mm_assets.sources.features import read_features
from mm_assets.sources.member import Member
from mm_assets.sources.parquet import ParquetSource
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import describe_file, expand_shards

from . import members

INT = {"_type": "Value", "dtype": "int64"}
CLASSES = {"_type": "ClassLabel", "names": ["cat", "dog"]}


def listed(feature: Any, length: int = -1) -> dict[str, Any]:
    return {"_type": "List", "feature": feature, "length": length}


def table_of(columns: dict[str, Any], features: Any) -> pa.Table:
    """A table with the metadata that `datasets` writes."""
    described = json.dumps({"info": {"features": features}})
    return pa.table(columns).replace_schema_metadata({"huggingface": described})


def source_of(folder: Path, table: pa.Table) -> ParquetSource:
    path = folder / "t.parquet"
    pq.write_table(table, path)
    return ParquetSource(SourceFile(str(path)))


def contents(source: ParquetSource) -> dict[str, bytes]:
    return {name.removeprefix("t/0000000"): content for name, content in members.contents(source).items()}


def skipped(source: ParquetSource) -> list[Member]:
    return [member for member in source.members() if member.skip_reason is not None]


class TestClassLabels:
    def test_the_number_keeps_its_key_and_the_name_is_beside_it(self, tmp_path: Path) -> None:
        """Numbers stay as they are at any depth; names are added, null for a number that has none."""
        features = {
            "label": CLASSES,
            "tags": listed(CLASSES),
            "objects": [{"kind": CLASSES, "box": listed(INT, 2)}],
            "spans": {"kind": {"_type": "Sequence", "feature": CLASSES, "length": -1}},
        }
        columns = {
            "label": [1, -1, None],
            "tags": [[0, 2], None, []],
            "objects": [[{"kind": 0, "box": [1, 2]}], [], None],
            "spans": [{"kind": [1, 1]}, {"kind": None}, None],
        }
        found = contents(source_of(tmp_path, table_of(columns, features)))
        assert [json.loads(found[f"{row}.json"]) for row in range(3)] == [
            {
                "label": 1,
                "label_name": "dog",
                "tags": [0, 2],
                "tags_name": ["cat", None],
                "objects": [{"kind": 0, "box": [1, 2], "kind_name": "cat"}],
                "spans": {"kind": [1, 1], "kind_name": ["dog", "dog"]},
            },
            {
                "label": -1,
                "label_name": None,
                "tags": None,
                "tags_name": None,
                "objects": [],
                "spans": {"kind": None, "kind_name": None},
            },
            {"label": None, "label_name": None, "tags": [], "tags_name": [], "objects": None, "spans": None},
        ]

    def test_a_column_of_the_names_key_stays(self, tmp_path: Path) -> None:
        """A column that is called as the names would be keeps its values."""
        table = table_of({"label": [1], "label_name": ["mine"]}, {"label": CLASSES})
        assert json.loads(contents(source_of(tmp_path, table))["0.json"]) == {"label": 1, "label_name": "mine"}


class TestArrays:
    def test_arrays_are_npy_members_with_their_type_and_shape(self, tmp_path: Path) -> None:
        """`Array2D`, lists of a fixed length and tensors of Arrow become `.npy` members; other lists stay JSON."""
        tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
        columns = {
            "depth": pa.array([[[0.5, 1.5]], None], pa.list_(pa.list_(pa.float32()))),
            "state.npy": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),
            "flags": pa.array([[True], [False]], pa.list_(pa.bool_())),
            "tensor": tensor,
            "free": [[1], []],
        }
        features = {
            "depth": {"_type": "Array2D", "shape": [None, 2], "dtype": "float32"},
            "state.npy": listed({"_type": "Value", "dtype": "int16"}, 2),
            "flags": listed({"_type": "Value", "dtype": "bool"}, 1),
            "free": listed(INT),
        }
        found = contents(source_of(tmp_path, table_of(columns, features)))
        assert list(found) == [
            *("0.json", "0.depth.npy", "0.state.npy", "0.flags.npy", "0.tensor.npy"),
            *("1.json", "1.state.npy", "1.flags.npy", "1.tensor.npy"),
        ]
        assert json.loads(found["0.json"]) == {"free": [1]}
        expected = {
            "0.depth.npy": np.array([[0.5, 1.5]], np.float32),
            "1.state.npy": np.array([3, 4], np.int16),
            "0.flags.npy": np.array([True]),
            "1.tensor.npy": np.arange(6, 12, dtype=np.uint8).reshape(2, 3),
        }
        for name, array in expected.items():
            assert members.array(found[name]).dtype == array.dtype
            np.testing.assert_array_equal(members.array(found[name]), array)

    @given(
        array=st.one_of(
            npst.integer_dtypes(endianness="="), npst.floating_dtypes(endianness="="), st.just("?")
        ).flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(max_dims=4, max_side=3)))
    )
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_array_comes_back(self, tmp_path: Path, array: Any) -> None:
        """Lists of lists of any numbers are the array that they were, for rows that state it as a member."""
        kind = pa.from_numpy_dtype(array.dtype)
        for _ in array.shape:
            kind = pa.list_(kind)
        as_lists = array.astype(np.float64).tolist() if array.dtype == np.float16 else array.tolist()
        columns = {"__key__": ["k"], "a": pa.array([as_lists], kind), "__members__": ['[["a", "x.npy"]]']}
        source = source_of(tmp_path, pa.table(columns))
        ((member, content),) = source.payloads(wanted=lambda _: True, max_bytes=1 << 20)
        assert (member.member, member.byte_size) == ("k.x.npy", len(content))
        assert members.array(content).dtype == array.dtype
        np.testing.assert_array_equal(members.array(content), array)

    def test_lists_that_are_no_array_are_rejected_alone(self, tmp_path: Path) -> None:
        """Lists of different lengths and null numbers are skipped with the reason, and the row's others are read."""
        feature = {"_type": "Array2D", "shape": [2, 2], "dtype": "int64"}
        columns = {"a": [[[1, 2], [3]], [[1, 2], None], [[1, None]], [[1, 2]]], "n": [0, 1, 2, 3]}
        source = source_of(tmp_path, table_of(columns, {"a": feature}))
        assert list(contents(source)) == ["0.json", "1.json", "2.json", "3.json", "3.a.npy"]
        assert [(m.member, (m.skip_reason or "").partition(":")[0]) for m in skipped(source)] == [
            ("t/00000000.a.npy", "no array"),
            ("t/00000001.a.npy", "no array"),
            ("t/00000002.a.npy", "no array"),
        ]


def deep(depth: int) -> Any:
    """A feature of lists in lists."""
    feature: Any = CLASSES
    for _ in range(depth):
        feature = listed(feature)
    return feature


JSON = st.recursive(
    st.none() | st.integers(-2, 5) | st.sampled_from(["ClassLabel", "Array2D", "List", "Value", "cat"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["_type", "names", "feature", "length", "shape", "a", "kind"]), inner)
    ),
    max_leaves=12,
)


class TestHostileMetadata:
    @given(features=st.dictionaries(st.sampled_from(["a", "b", "c", "d", "jpg", "x"]), JSON))
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_what_does_not_fit_a_column_is_not_used(self, tmp_path: Path, features: Any) -> None:
        """Whatever the metadata say, the cells and the JSON of every row are read."""
        columns = {
            "a": [1, None],
            "b": [[1, 2], [3]],
            "c": ["text", None],
            "d": [[{"kind": 1, "names": [0]}], None],
            "jpg": [b"\xff\xd8\xff", b""],
        }
        found = contents(source_of(tmp_path, table_of(columns, features)))
        assert [found["0.jpg"], found["1.jpg"]] == [b"\xff\xd8\xff", b""]
        values = [json.loads(found["0.json"]), json.loads(found["1.json"])]
        assert [(row["a"], row["c"]) for row in values] == [(1, "text"), (None, None)]

    @pytest.mark.parametrize(
        "metadata",
        [b"", b"\xff", b"null", b"[]", b'{"info": 1}', b'{"info": {"features": []}}', b"[" * 10_000, b'{"a": NaN}'],
    )
    def test_metadata_that_cannot_be_read_say_nothing(self, metadata: bytes) -> None:
        """Bytes that are not what `datasets` writes are as no metadata."""
        assert read_features(pa.schema([("a", pa.int64())], {"huggingface": metadata})) is None

    def test_features_deeper_than_any_data_are_passed_over(self) -> None:
        """Lists in hundreds of lists have no labels, and no recursion reaches their end."""
        described = json.dumps({"info": {"features": {"a": deep(200), "b": deep(3)}}})
        schema = pa.schema([("a", pa.int64()), ("b", pa.int64())], {"huggingface": described})
        found = read_features(schema)
        assert found is not None
        assert list(found.labels) == ["b"]

    def test_extension_types_are_read_by_their_storage(self, tmp_path: Path) -> None:
        """JSON, UUIDs and the types of others, known here or not, are values as their storage is."""
        unknown = {"ARROW:extension:name": "a.b.Pickled", "ARROW:extension:metadata": "cos\nsystem\n(S'true'\ntR."}
        schema = pa.schema(
            [pa.field("j", pa.json_()), pa.field("u", pa.uuid()), pa.field("x", pa.binary(), metadata=unknown)]
        )
        json_column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}']))
        uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16)))
        found = contents(source_of(tmp_path, pa.table([json_column, uuids, pa.array([b"bytes"])], schema=schema)))
        assert found["0.x.bin" if "0.x.bin" in found else "0.bin"] == b"bytes"
        assert json.loads(found["0.json"]) == {"j": '{"a": 1}', "u": "00000000-0000-0000-0000-000000000000"}


class TestFolders:
    def shards(self, folder: Path, *names: str) -> list[str]:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"PAR1")
        listing = expand_shards(str(folder), kinds=shard_kinds(None, where="x"))
        return [shard.url.removeprefix(f"{folder}/") for shard in listing.shards if shard.url in listing.in_datasets]

    @pytest.mark.parametrize(
        "names",
        [
            ["data/test-00000-of-00001.parquet", "data/train-00000-of-00002-0f3a.parquet"],
            ["default/test/0000.parquet", "default/train/0000.parquet"],
            ["test/0000.parquet", "train/0000.parquet"],
            ["en/test-00000-of-00001.parquet", "en/train-00000-of-00001.parquet"],
            ["test/test-00000-of-00001.parquet", "train/train-00000-of-00001.parquet"],
        ],
    )
    def test_a_snapshot_is_its_splits(self, tmp_path: Path, names: list[str]) -> None:
        """The Parquet files of all splits are shards whose keys have the split, whatever lies beside them."""
        extra = ["README.md", ".gitattributes", ".cache/huggingface/x.parquet", "dataset_infos.json"]
        assert self.shards(tmp_path, *names, *extra) == names

    @pytest.mark.parametrize(
        "names",
        [
            ["en/train-00000-of-00001.parquet", "fr/train-00000-of-00001.parquet"],
            ["en/train/0000.parquet", "fr/train/0000.parquet"],
            ["data/train-00000-of-00001.parquet", "data/small/train-00000-of-00001.parquet"],
        ],
    )
    def test_configurations_are_not_mixed(self, tmp_path: Path, names: list[str]) -> None:
        """A folder with several configurations is refused with their folders, each of which is taken by itself."""
        with pytest.raises(SourceError, match=r"2 configurations .* name the folder of one"):
            self.shards(tmp_path, *names, "README.md")
        assert self.shards(tmp_path / names[1].partition("/train")[0]) != []

    def test_files_beside_archives_are_no_dataset_of_their_own(self, tmp_path: Path) -> None:
        """Where a folder has archives too, or a table of another name, the listing decides as for any folder."""
        assert self.shards(tmp_path / "a", "train-00000-of-00001.parquet", "images.tar") == []
        assert self.shards(tmp_path / "b", "train-00000-of-00001.parquet", "index.parquet") == []

    def test_a_table_of_texts_is_a_dataset_by_its_metadata(self, tmp_path: Path) -> None:
        """A Parquet file without media whose metadata are those of `datasets` is read as samples, not as a list."""
        pq.write_table(
            table_of({"text": ["a"]}, {"text": {"_type": "Value", "dtype": "string"}}), tmp_path / "t.parquet"
        )
        (source,) = row_sources([SourceFile(str(tmp_path / "t.parquet"))])
        assert isinstance(source, MemberRows)


class TestImg2dataset:
    def test_parquet_output_is_read_as_its_tars_are(self, tmp_path: Path) -> None:
        """Rows of `output_format=parquet` have the picture, its caption, and the other columns as JSON."""
        columns = {
            "key": ["000000000", "000000001"],
            "caption": ["a cat", None],
            "url": ["https://a.org/1.jpg", "https://a.org/2.jpg"],
            "status": ["success", "failed_to_download"],
            "error_message": [None, "HTTP 404"],
            "width": pa.array([640, None], pa.int32()),
            "exif": ['{"Make": "x"}', None],
            "jpg": pa.array([b"\xff\xd8\xff picture", None], pa.binary()),
        }
        found = contents(source_of(tmp_path, pa.table(columns)))
        assert list(found) == ["0.json", "0.caption", "0.jpg", "1.json"]
        assert (found["0.jpg"], found["0.caption"]) == (b"\xff\xd8\xff picture", b"a cat")
        assert json.loads(found["1.json"])["error_message"] == "HTTP 404"


class HubFileSystem(MemoryFileSystem):
    """Describes files as the file system of the Hugging Face Hub does: by blobs, without times."""

    protocol = "fakehub"
    blob = "1"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("fakehub://").strip("/")

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        return {"name": found["name"], "size": found["size"], "type": found["type"], "blob_id": self.blob}


def test_a_blob_is_the_fingerprint_of_a_file_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose storage reports its blob is another file once that is another one."""
    fsspec.register_implementation("fakehub", HubFileSystem, clobber=True)
    HubFileSystem().pipe("/a.parquet", b"x")
    try:
        before = describe_file("fakehub://a.parquet")
        assert describe_file("fakehub://a.parquet").fingerprint == before.fingerprint == "1-1"
        monkeypatch.setattr(HubFileSystem, "blob", "2")
        assert describe_file("fakehub://a.parquet").fingerprint == "1-2"
    finally:
        HubFileSystem().rm("/a.parquet")
