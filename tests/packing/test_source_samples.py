"""Tests of samples that become values for `create`: modalities, fields, ids, and what is refused."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mm_assets
from mm_assets.errors import ConfigError, ShardError, SourceError
from mm_assets.fields import BytesField, ImageField, JSONField, NDArrayField, SequenceField, TextField
from mm_assets.packing.source_samples import SourceSamples

from ..pipeline.shards import make_shard, png


def npy(values: Any) -> bytes:
    target = io.BytesIO()
    np.save(target, np.asarray(values))
    return target.getvalue()


def written(samples: SourceSamples, path: Path) -> dict[str, dict[str, Any]]:
    """The raw payloads of the samples, packed, by id."""
    with mm_assets.create(path, samples.fields, fsync=False) as writer:
        for sample in samples:
            writer.write(*sample)
    with mm_assets.open(path) as dataset:
        raw = dataset.read_raw(range(len(dataset)), list(dataset.fields))
        return {
            sample_id: {name: bytes(raw[name][n]) for name in raw if raw[name][n] is not None}
            for n, sample_id in enumerate(dataset.sample_ids)
        }


class TestTars:
    def test_members_are_values_of_modalities(self, tmp_path: Path) -> None:
        """Kinds and roles are modalities, numbers are positions, and the JSON is the metadata, as it is written."""
        members = {
            "a.jpg": png(1),
            "a.json": '{"n": 1.50}',
            "a.txt": "one",
            "a.cls": "7",
            "a.state.npy": npy([1, 2]),
            "a.page.1.png": png(2),
            "a.page.0.png": png(3),
            "._a.jpg": "hidden",
            "dir/b.png": png(4),
        }
        samples = mm_assets.from_webdataset(make_shard(tmp_path / "s.tar.gz", members))
        assert samples.fields == {
            "image": ImageField(),
            "metadata": JSONField(),
            "text": TextField(),
            "cls": TextField(),
            "state": NDArrayField(),
            "page": SequenceField(ImageField()),
        }
        found = written(samples, tmp_path / "x.mult")
        assert list(found) == ["a", "dir/b"]
        assert (found["a"]["image"], found["a"]["metadata"]) == (png(1), b'{"n": 1.50}')
        with mm_assets.open(tmp_path / "x.mult") as dataset:
            assert [position for position, _ in dataset[0]["page"]] == [0, 1]
            assert dataset[0]["state"].tolist() == [1, 2]
            assert set(found["dir/b"]) == {"image"}

    def test_ids_of_several_shards_have_their_names(self, tmp_path: Path) -> None:
        """The same key in two tars is two samples; a pattern names both."""
        for n in range(2):
            make_shard(tmp_path / f"s{n}.tar", {"0.txt": f"{n}"})
        found = written(mm_assets.from_webdataset(str(tmp_path / "s{0..1}.tar")), tmp_path / "x.mult")
        assert found == {"s0/0": {"text": b"0"}, "s1/0": {"text": b"1"}}

    def test_fields_choose_modalities(self, tmp_path: Path) -> None:
        """With `fields` only these are values, each as its field takes it."""
        shard = make_shard(tmp_path / "s.tar", {"a.txt": "x", "a.png": png(1), "a.0.bin": b"0", "a.bin": b"1"})
        samples = mm_assets.from_webdataset(shard, fields={"image": BytesField()})
        assert list(samples) == [("a", {"image": png(1)})]
        assert list(mm_assets.from_webdataset(shard, fields={"binary": SequenceField(BytesField())})) == [
            ("a", {"binary": [(0, b"0"), (1, b"1")]})
        ]
        with pytest.raises(SourceError, match=r"a\.bin.*second member .* SequenceField\(BytesField\(\)\)"):
            list(mm_assets.from_webdataset(shard, fields={"binary": BytesField()}))

    def test_what_cannot_be_read_raises(self, tmp_path: Path) -> None:
        """Missing and damaged shards, and samples without members, are errors that name the place."""
        with pytest.raises(SourceError, match="missing"):
            mm_assets.from_webdataset(tmp_path / "missing")
        (tmp_path / "bad.tar").write_bytes(b"not a tar" * 100)
        with pytest.raises(ShardError):
            mm_assets.from_webdataset(tmp_path / "bad.tar")
        with pytest.raises(ConfigError, match="0 modalities"):
            mm_assets.from_webdataset(make_shard(tmp_path / "empty.tar", {}))


TABLE = pa.table(
    {
        "image": pa.array(
            [{"bytes": png(1), "path": "a.png"}, {"bytes": png(2), "path": None}],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        ),
        "text": ["one", None],
        "label": [0, 1],
        "pose": pa.array([[[1.0, 2.0]], [[3.0, 4.0]]], pa.list_(pa.list_(pa.float32()))),
    },
).replace_schema_metadata(
    {
        "huggingface": json.dumps(
            {
                "info": {
                    "features": {
                        "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
                        "pose": {"_type": "Array2D", "shape": [1, 2], "dtype": "float32"},
                    }
                }
            }
        )
    }
)


class HubDataset(NamedTuple):
    """What is used of `datasets.Dataset`."""

    table: pa.Table
    split: str | None = "train"

    @property
    def features(self) -> Any:
        return type("Features", (), {"arrow_schema": self.table.schema})

    def with_format(self, kind: str) -> HubDataset:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Any:
        return (self.table.slice(n, 1) for n in range(self.table.num_rows))


class TestTables:
    def test_parquet_files_and_datasets_give_the_same_samples(self, tmp_path: Path) -> None:
        """Rows of a Parquet file and of a dataset are samples with the members that the features say."""
        pq.write_table(TABLE, tmp_path / "train.parquet")
        found = written(mm_assets.from_parquet([tmp_path / "train.parquet"]), tmp_path / "a.mult")
        assert list(found) == ["train/00000000", "train/00000001"]
        assert found["train/00000000"]["image"] == png(1)
        assert json.loads(found["train/00000001"]["metadata"]) == {"label": 1, "label_name": "dog"}
        assert written(mm_assets.from_hf(HubDataset(TABLE)), tmp_path / "b.mult") == found
        with mm_assets.open(tmp_path / "b.mult") as dataset:
            assert dataset[1]["pose"].tolist() == [[3, 4]]
            assert dataset[1]["text"] is None

    def test_a_cell_without_bytes_raises(self, tmp_path: Path) -> None:
        """A cell that only has a path, and lists that are not an array, are errors that name the member."""
        cells = pa.array([{"bytes": None, "path": "x.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        table = pa.table({"image": cells})
        pq.write_table(table, tmp_path / "t.parquet")
        for read in (
            lambda: mm_assets.from_parquet(tmp_path / "t.parquet"),
            lambda: mm_assets.from_hf(HubDataset(table)),
        ):
            with pytest.raises(SourceError, match="no bytes"):
                read()


def test_a_folder_continues_where_its_writer_stopped(tmp_path: Path) -> None:
    """Samples of a source go to a folder of shards, and those that are in it already are read over."""
    rows = {"__key__": [f"k{n}" for n in range(9)], "text": [f"text {n}" for n in range(9)]}
    pq.write_table(pa.table(rows), tmp_path / "texts.parquet")
    samples = mm_assets.from_parquet(tmp_path / "texts.parquet")
    for end in (5, 9):
        writer = mm_assets.create(tmp_path / "texts", samples.fields, shard_samples=2, resume=True)
        for sample in islice(samples, len(writer), end):
            writer.write(*sample)
        writer.close() if end == 9 else writer.abort()
    with mm_assets.open(tmp_path / "texts") as dataset:
        assert [*dataset.sample_ids] == rows["__key__"]
        assert dataset.read_modality("text", range(9)) == rows["text"]
