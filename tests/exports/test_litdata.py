"""Tests of exports to LitData: the suite, and the fields of the index."""

from __future__ import annotations

import json
from pathlib import Path

from mm_assets.exports import export

from .export_suite import ExportSuite

OWNER = Path(__file__).parents[1] / "sources" / "owners" / "litdata" / "serializers" / "index.json"


class TestLitData(ExportSuite):
    format = "litdata"

    def test_the_index_has_the_fields_of_the_owner(self, tmp_path: Path, numbers: Path) -> None:
        """Each chunk has its name, size and samples, and values have formats of `litdata` in a tree that it knows."""
        export(numbers, "litdata", tmp_path / "out", shard_samples=20)
        index, owner = json.loads((tmp_path / "out" / "index.json").read_bytes()), json.loads(OWNER.read_bytes())
        assert index.keys() == owner.keys()
        assert index["config"].keys() <= owner["config"].keys()
        for number, chunk in enumerate(index["chunks"]):
            size = (tmp_path / "out" / f"chunk-0-{number:06d}.bin").stat().st_size
            samples = (20, 10)[number]
            assert chunk == {
                "chunk_bytes": size,
                "chunk_size": samples,
                "dim": None,
                "filename": f"chunk-0-{number:06d}.bin",
            }
        _, tree = json.loads(index["config"]["data_spec"])
        _, owners_tree = json.loads(owner["config"]["data_spec"])
        assert (tree["type"], tree["children_spec"][0]) == (owners_tree["type"], owners_tree["children_spec"][0])
        formats = dict(zip(json.loads(tree["context"]), index["config"]["data_format"], strict=True))
        assert formats == {
            **dict.fromkeys(("__key__", "__members__", "json", "text"), "str"),
            **dict.fromkeys(("image", "label", "pages", "cues"), "bytes"),
            "state": "numpy",
        }
