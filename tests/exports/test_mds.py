"""Tests of exports to MDS: the suite, the fields of the index, and the limit of a shard's size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mm_assets.errors import EncodeError
from mm_assets.exports import export
from mm_assets.fields import BytesField, NDArrayField, SequenceField, TextField
from mm_assets.sources.mds import MdsSource
from mm_assets.storage.files import SourceFile

from .export_suite import ExportSuite, packed

OWNER = Path(__file__).parents[1] / "sources" / "owners" / "mds" / "encodings" / "index.json"


class TestMds(ExportSuite):
    format = "mds"

    def test_the_index_has_the_fields_of_the_owner(self, tmp_path: Path, numbers: Path) -> None:
        """Each shard has its name, size and samples, and exactly the fields that `MDSWriter` writes."""
        export(numbers, "mds", tmp_path / "out", shard_samples=20)
        index, owner = json.loads((tmp_path / "out" / "index.json").read_bytes()), json.loads(OWNER.read_bytes())
        assert (index.keys(), index["version"]) == (owner.keys(), 2)
        for number, shard in enumerate(index["shards"]):
            path = tmp_path / "out" / f"shard.{number:05d}.mds"
            assert shard.keys() == owner["shards"][0].keys()
            assert shard["raw_data"] == {"basename": path.name, "bytes": path.stat().st_size, "hashes": {}}
            assert shard["samples"] == (20, 10)[number]

    def test_columns_have_the_encodings_of_their_values(self, tmp_path: Path) -> None:
        """Texts, arrays of a declared type and files are columns; a reserved name gets an underscore."""
        fields = {
            "text": TextField(),
            "json": BytesField(),
            "state": NDArrayField("float32"),
            "small": NDArrayField("bfloat16"),
            "pages": SequenceField(BytesField()),
        }
        samples = {
            "a": {"text": "t", "json": b"x", "state": np.ones((2, 1), np.float32)},
            "b": {"small": np.ones(3, np.float32), "pages": [(0, b"p"), (1, b"qq")]},
        }
        export(packed(tmp_path / "a.mult", samples, fields), "mds", tmp_path / "out")
        (shard,) = json.loads((tmp_path / "out" / "index.json").read_bytes())["shards"]
        encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        assert encodings == {
            **dict.fromkeys(("__key__", "__members__", "json", "text"), "str"),
            **dict.fromkeys(("json_", "small", "pages"), "bytes"),
            "state": "ndarray",
        }
        source = MdsSource(SourceFile(str(tmp_path / "out" / "shard.00000.mds")))
        names = [member.member for member in source.members()]
        assert names == ["a.txt", "a.json.bin", "a.state.npy", "b.small.npy", "b.pages.0.bin", "b.pages.1.bin"]

    def test_a_shard_that_is_too_large_is_refused(
        self, tmp_path: Path, numbers: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error for a shard whose offsets exceed 32 bits names the sample and the setting."""
        monkeypatch.setattr("mm_assets.exports.offset_table.MAX_SHARD_BYTES", 1000)
        with pytest.raises(EncodeError, match=r"sample 'folder/.*MDS allows 1,000: set a smaller shard_bytes"):
            export(numbers, "mds", tmp_path / "out")
