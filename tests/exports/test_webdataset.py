"""Tests of exports to WebDataset: the suite, and the members of the tars."""

from __future__ import annotations

import tarfile
from pathlib import Path

from mm_assets.exports import export

from .export_suite import ExportSuite


class TestWebDataset(ExportSuite):
    format = "webdataset"

    def test_names_and_contents(self, tmp_path: Path, numbers: Path) -> None:
        """Members are files of Python's `tarfile`, without times and users, named by key, role and content."""
        export(numbers, "webdataset", tmp_path / "out", shard_samples=10)
        with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
            members = {member.name: member for member in tar}
            suffixes = [name.removeprefix("folder/03.") for name in members if name.startswith("folder/03.")]
            pages = [f"pages.{n}.bin" for n in range(3)]
            assert suffixes == ["json", "bin", "txt", "state.npy", "label.txt", *pages]
            facts = {(member.mtime, member.uid, member.uname, member.mode) for member in members.values()}
            assert facts == {(0, 0, "", 0o644)}
            extracted = tar.extractfile("folder/03.bin")
            assert extracted is not None
            assert extracted.read() == bytes(range(3))
