"""Tests of exports to Energon: the suite, and the files that `prepare` writes."""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path

import pytest
import yaml

from mm_assets.errors import EncodeError
from mm_assets.exports import export
from mm_assets.fields import TextField

from .export_suite import ExportSuite, packed

OWNER = Path(__file__).parents[1] / "sources" / "owners" / "energon"


def index_of(tar_path: Path) -> tuple[int, ...]:
    """Returns the numbers in the index of a tar."""
    content = tar_path.with_name(f"{tar_path.name}.idx").read_bytes()
    return struct.unpack(f"<{len(content) // 8}Q", content)


def starts_of(tar_path: Path) -> tuple[int, ...]:
    """Returns the offset of each sample of a tar, and the end of the last."""
    starts: dict[str, int] = {}
    with tarfile.open(tar_path) as tar:
        for member in tar:
            starts.setdefault(member.name.partition(".")[0], member.offset)
            end = member.offset_data + -(-member.size // 512) * 512
    return (*starts.values(), end)


class TestEnergon(ExportSuite):
    format = "energon"

    def test_the_folder_has_what_prepare_writes(self, tmp_path: Path, numbers: Path) -> None:
        """Shards are listed with their samples, in one split, and indexed as the shards of the owner are."""
        export(numbers, "energon", tmp_path / "out", shard_samples=20)
        meta = tmp_path / "out" / ".nv-meta"
        counts = {"shard-000000.tar": 20, "shard-000001.tar": 10}
        assert json.loads((meta / ".info.json").read_bytes()) == {"shard_counts": counts}
        assert yaml.safe_load((meta / "split.yaml").read_bytes()) == {
            "split_parts": {"train": list(counts)},
            "exclude": [],
        }
        assert yaml.safe_load((meta / "dataset.yaml").read_bytes())["__class__"] == "CrudeWebdataset"
        for path in (*(tmp_path / "out" / name for name in counts), *OWNER.rglob("*.tar")):
            assert index_of(path) == starts_of(path)

    def test_a_key_that_energon_skips_is_refused(self, tmp_path: Path) -> None:
        """The error names a sample that Energon would not read."""
        path = packed(tmp_path / "a.mult", {"__x__/a": {"text": "t"}}, {"text": TextField()})
        with pytest.raises(EncodeError, match="sample '__x__/a': Energon skips"):
            export(path, "energon", tmp_path / "out")
