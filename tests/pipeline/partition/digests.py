"""What a run leaves on disk, as digests that depend neither on where it ran nor on the version of a Parquet writer.

Packed files by their bytes. Tables by their values, with the folders of paths left out. Checks by name and result.
`python tests/pipeline/partition/digests.py ROOT` prints those of the datasets below a storage root.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def table_digest(path: Path) -> str:
    """SHA-256 of a table's column names, types and values."""
    table = pq.read_table(path)
    digest = hashlib.sha256(repr([(field.name, str(field.type), field.nullable) for field in table.schema]).encode())
    for row in table.to_pylist():
        digest.update(repr([_without_folders(name, value) for name, value in row.items()]).encode())
    return digest.hexdigest()


def _without_folders(column: str, value: Any) -> Any:
    if column == "shard" and value is not None:
        return Path(value).name
    if column == "source_ref" and value is not None:
        locator = json.loads(value)
        return {**locator, "path": Path(locator["path"]).name}
    file = {"source": "uri", "source_member": "container"}.get(column)
    if file is not None and isinstance(value, dict) and value[file] is not None:
        return {**value, file: Path(value[file]).name}
    return value


def _key(path: Path) -> str:
    """The partition of a file: the rest of its name is a digest."""
    return path.stem.rpartition(".")[0]


def run_digests(root: Path) -> dict[str, Any]:
    """By dataset: its packed files, its tables, and the results of its checks."""
    found: dict[str, Any] = {}
    for folder in sorted(path for path in root.iterdir() if (path / "schema.json").exists()):
        tables = [p for p in folder.rglob("*.parquet") if p.parent.name != "cache"]
        records = {_key(path): json.loads(path.read_text())["stages"] for path in (folder / "records").glob("*.json")}
        packed = {_key(path) + path.suffix: path for path in (folder / "packed").iterdir()}
        found[folder.name] = {
            "packed": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(packed.items())},
            "tables": {f"{p.parent.name}/{_key(p)}": table_digest(p) for p in sorted(tables)},
            "checks": {
                f"{stage}/{key}": {o["name"]: o["num_violations"] for o in record["outcomes"]}
                for key, stages in sorted(records.items())
                for stage, record in stages.items()
            },
        }
    return found


if __name__ == "__main__":
    json.dump(run_digests(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
