"""Shards of each kind on an HTTP server, by brace lists and by the pages of its folders."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ..pipeline.chain import declare, run_chain
from ..storage.web_server import serve
from .test_folder import png, put, tar_of, zip_of

IDS = ("a", "b c")
FILES = {
    name: content
    for number, key in enumerate(IDS)
    for name, content in (
        (f"{key}.json", json.dumps({"score": number / 2}).encode()),
        (f"{key}.png", png(number)),
        (f"{key}.txt", f"picture {key}".encode()),
    )
}
ROWS = [
    {"id": key, "file_name": f"media/{key}.png", "text": f"picture {key}", "score": number / 2}
    for number, key in enumerate(IDS)
]


def write_shards(folder: Path, kind: str) -> None:
    """Writes two shards, `0` and `1`, or a folder of plain files."""
    if kind == "folder":
        put(folder / "in", FILES)
        return
    put(folder / "media", {name: content for name, content in FILES.items() if name.endswith(".png")})
    for number in range(2):
        path = folder / f"{number}.{kind}"
        if kind in ("tar", "zip"):
            path.write_bytes((tar_of if kind == "tar" else zip_of)(FILES))
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        elif kind == "csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(ROWS[0]))
                writer.writeheader()
                writer.writerows(ROWS)
        else:
            cells = [{"bytes": FILES[f"{key}.png"], "path": f"{key}.png"} for key in IDS]
            kind_of_cell = pa.struct({"bytes": pa.binary(), "path": pa.string()})
            columns = {
                "image": pa.array(cells, kind_of_cell),
                "score": [0.0, 0.5],
                "text": ["picture a", "picture b c"],
            }
            pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize("kind", ["tar", "zip", "jsonl", "csv", "parquet", "folder"])
def test_shards_on_a_server_pass_every_check(tmp_path: Path, kind: str) -> None:
    """Two shards that braces name, or a folder of the server, become samples with their media, and nothing is lost."""
    write_shards(tmp_path / "served", kind)
    with serve(tmp_path / "served") as server:
        shards = f"{server.url}/in/" if kind == "folder" else f"{server.url}/{{0..1}}.{kind}"
        dataset, results = run_chain(declare(tmp_path / "root", shards, pack="image_text"))
        assert sorted(results) == (["in"] if kind == "folder" else ["0", "1"])
        for result in (result for stages in results.values() for result in stages.values()):
            assert all(outcome.passed for outcome in result.outcomes)
        for key in results:
            (rows,) = Path(dataset.store.path_of("materialized_rows")).glob(f"{key}.*")
            found = pq.read_table(rows, columns=["modality", "binary_content"]).to_pylist()
            images = [row["binary_content"] for row in found if row["modality"] == "image"]
            assert images == [FILES["a.png"], FILES["b c.png"]]


@pytest.mark.parametrize("kind", ["zip", "jsonl", "parquet"])
def test_a_page_of_a_server_needs_no_pattern(tmp_path: Path, kind: str) -> None:
    """The shards in a folder that a server lists are found whatever their kind is."""
    write_shards(tmp_path / "served", kind)
    with serve(tmp_path / "served") as server:
        _, results = run_chain(declare(tmp_path / "root", f"{server.url}/", pack="image_text"))
    assert sorted(results) == ["0", "1"]
