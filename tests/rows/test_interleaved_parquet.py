"""Tests of rows that tables of other pipelines, and of this one, hold: content, errors, origins, and packing again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mm_assets
from mm_assets.rows.schema import MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import parse_source_ref

from ..pipeline.chain import declare, run_chain, table_name
from ..pipeline.shards import DOCUMENTS, drops, make_shard, png, table

# The tables of NeMo Curator's interleaved reader; its first release named the keys of a locator in another way.
NEW = {"path": "/gone/s.tar", "member": "{}", "byte_offset": 512, "byte_size": 9, "frame_index": None}
OLD = {"content_path": "/gone/s.tar", "content_key": "{}"}


def npy(values: Any) -> bytes:
    target = io.BytesIO()
    np.save(target, np.array(values, np.float32))
    return target.getvalue()


def curated(ref: dict[str, Any], *, with_bytes: bool) -> pa.Table:
    """Two samples as NeMo Curator writes them: metadata at -1, then texts and images in reading order."""

    def locator(member: str) -> str:
        return json.dumps({key: member if value == "{}" else value for key, value in ref.items()})

    def row(sample: str, position: int, modality: str, member: str, **values: Any) -> dict[str, Any]:
        base = dict.fromkeys(MULTIMODAL_SCHEMA.names)
        return {**base, "sample_id": sample, "position": position, "modality": modality} | {
            "source_ref": locator(member),
            "url": "https://example.org" if modality == "metadata" else None,
            **values,
        }

    def image(sample: str, position: int, member: str, **values: Any) -> dict[str, Any]:
        content = png(position) if with_bytes else None
        return row(sample, position, "image", member, content_type="image/png", binary_content=content, **values)

    rows = [
        row("a", -1, "metadata", "a.json", metadata_json='{"texts": ["one", null]}', content_type="application/json"),
        row("a", 0, "text", "a.json", text_content="one", content_type="text/plain"),
        image("a", 1, "a.left.png"),
        image("a", 2, "a.right.png", **({} if with_bytes else {"materialize_error": "server said 404"})),
        row("b", -1, "metadata", "b.json", metadata_json="{}"),
        image("b", 0, "a.left.png"),
    ]
    schema = pa.schema([*MULTIMODAL_SCHEMA, pa.field("url", pa.string())])
    return pa.Table.from_pylist(rows, schema=schema)


class TestCurated:
    @pytest.mark.parametrize("ref", [NEW, OLD], ids=["new", "old"])
    def test_bytes_in_the_table_are_packed(self, tmp_path: Path, ref: dict[str, Any]) -> None:
        """Bytes win over the place that a row names, which is not read; positions, texts and columns stay."""
        pq.write_table(curated(ref, with_bytes=True), tmp_path / "s.parquet")
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "s.parquet", on_materialize_error="fail"))
        rows = table(dataset, "materialized_rows")
        assert [(r["sample_id"], r["position"], r["modality"]) for r in rows] == [
            *(("a", -1, "metadata"), ("a", 0, "text"), ("a", 1, "image"), ("a", 2, "image")),
            *(("b", -1, "metadata"), ("b", 0, "image")),
        ]
        assert [r["binary_content"] for r in rows] == [None, None, png(1), png(2), None, png(0)]
        assert [parse_source_ref(r["source_ref"]).member for r in rows] == [
            *("a.json", "a.json", "a.left.png", "a.right.png", "b.json"),
            "s/00000005.left.png",  # a second member of this name
        ]
        assert {parse_source_ref(r["source_ref"]).path for r in rows} == {str(tmp_path / "s.parquet")}
        assert rows[0]["url"] == "https://example.org"
        assert rows[1]["text_content"] == "one"

    def test_without_bytes_the_places_are_read_if_they_are_allowed(self, tmp_path: Path) -> None:
        """An image without bytes is read from its shard, by range or by name; an error in the table stays one."""
        shard = make_shard(tmp_path / "s.tar", {"a.left.png": png(1), "a.right.png": png(2)})
        ref = {"content_path": str(shard), "content_key": "{}"}
        pq.write_table(curated(ref, with_bytes=False), tmp_path / "s.parquet")
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "s.parquet"))
        rows = table(dataset, "materialized_rows")
        assert [r["binary_content"] for r in rows] == [None, None, png(1), None, None, png(1)]
        assert [r["materialize_error"] for r in rows if r["materialize_error"]] == ["server said 404"]
        assert drops(dataset) == [("a", 2, "packable", "not_materialized")]

    def test_places_outside_are_rejected_with_their_rows(self, tmp_path: Path) -> None:
        """An image without bytes whose place is not allowed is a reject; its sample's texts and errors are rows."""
        pq.write_table(curated(NEW, with_bytes=False), tmp_path / "s.parquet")
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "s.parquet"))
        assert [(r["sample_id"], r["reason"]) for r in table(dataset, "rejects")] == [
            ("a", "outside"),
            ("b", "outside"),
        ]
        rows = table(dataset, "rows")
        assert [(r["position"], r["materialize_error"]) for r in rows if r["sample_id"] == "a"] == [
            *((-1, None), (0, None), (2, "server said 404")),
        ]

    @pytest.mark.parametrize("locator", ["{", "[]", '{"member": 1}', '{"member": "x\\u0000"}', "7", '{"member": "/"}'])
    def test_wrong_locators_do_not_hide_bytes(self, tmp_path: Path, locator: str) -> None:
        """Whatever a locator is, the bytes of its row are read; a row without bytes is rejected."""
        rows = curated(NEW, with_bytes=True).slice(2, 1)
        wrong = pa.array([locator], pa.string())
        rows = rows.set_column(rows.schema.get_field_index("source_ref"), "source_ref", wrong)
        pq.write_table(rows, tmp_path / "s.parquet")
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "s.parquet"))
        assert [r["binary_content"] for r in table(dataset, "materialized_rows")] == [None, png(1)]


STEPS = {
    name: value
    for n in range(3)
    for name, value in {
        f"dir/{n}.json": {"task": "pick", "reward": n / 2},
        f"dir/{n}.rgb.png": png(n),
        f"dir/{n}.wrist.png": png(n + 9),
        f"dir/{n}.state.npy": npy([n, 1]),
        f"dir/{n}.action.npy": npy([n, 2]),
        f"dir/{n}.note.txt": f"step {n}",
        f"dir/{n}.raw": bytes([n]),
    }.items()
}


class TestPackedAgain:
    @pytest.mark.parametrize("stage", ["filtered_rows", "materialized_rows"])
    @pytest.mark.parametrize("members", [DOCUMENTS, STEPS], ids=["documents", "steps"])
    def test_tables_of_this_pipeline_pack_without_their_shards(
        self, tmp_path: Path, members: dict[str, Any], stage: str
    ) -> None:
        """Rows that were kept or materialized pack to the payloads, ids and order that their shards pack to."""
        shard = make_shard(tmp_path / "in" / "s.tar", members)
        first, _ = run_chain(declare(tmp_path / "first", shard))
        (tmp_path / "again").mkdir()
        rows = Path(first.store.path_of(table_name(first, stage, "s"))).rename(tmp_path / "again" / "s.parquet")
        shard.unlink()
        second, _ = run_chain(declare(tmp_path / "second", rows))
        assert [r["binary_content"] for r in table(second, "materialized_rows")] == pq.read_table(rows)[
            "binary_content"
        ].to_pylist()
        with mm_assets.open(tmp_path / "first/data") as before, mm_assets.open(tmp_path / "second/data") as after:
            assert list(after.fields) == list(before.fields)
            assert list(after.sample_ids) == list(before.sample_ids)
            indices = list(range(len(before)))
            packed = [opened.read_raw(indices, list(opened.fields)) for opened in (before, after)]
            for name in before.fields:
                assert [bytes(x or b"") for x in packed[1][name]] == [bytes(x or b"") for x in packed[0][name]], name
