"""Writes a golden dataset of Energon with its `prepare`: ``python make_energon.py FOLDER``."""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
from pathlib import Path

from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator


def main(folder: Path) -> None:
    """Writes three shards with three samples each, in two splits."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "sub").mkdir(parents=True)
    names = ["shard_0.tar", "shard_1.tar", "sub/shard_2.tar"]
    for number, name in enumerate(names):
        with tarfile.open(folder / name, "w") as tar:
            for key in range(3):
                for extension, content in (("txt", f"text {key}"), ("json", f'{{"n": {key}}}')):
                    member = tarfile.TarInfo(f"{number}{key}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content.encode()))
    WebdatasetPreparator.prepare_dataset(
        folder, names, split_parts_patterns=[("train", "shard_.*"), ("val", "sub/.*")], workers=1
    )
    for path in (folder / ".nv-meta").glob("index.*"):  # a database with an identity of its own, which is not read
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
