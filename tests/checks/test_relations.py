"""The checks of tables: relations over Parquet files and shards, and the SQL that judges them."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mm_assets.checks import relations, runner
from mm_assets.checks.catalog import checks_of
from mm_assets.checks.database import available_memory, share_memory
from mm_assets.checks.runner import MAX_LISTED, MAX_TEXT
from mm_assets.errors import SchemaMismatchError, SourceError
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile
from mm_assets.storage.store import Store

from .changes import (
    Change,
    Rows,
    altered,
    find,
    more_rejects,
    moved_to_end,
    named_twice,
    relocated,
    repeated,
    resourced,
    setting,
    without,
    without_locator,
)

A_IMAGE = {"sample_id": "a", "modality": "image"}
A_TEXT = {"sample_id": "a", "modality": "text"}
A_METADATA = {"sample_id": "a", "modality": "metadata"}

SPOILED: list[tuple[str, str, str, Change]] = [
    ("raw_shards", "members", "raw_shards", setting("byte_size", 1, member="a.png")),
    ("raw_shards", "members", "raw_shards", setting("skip_reason", "hidden file", member="a.png")),
    ("raw_shards", "members", "raw_shards", without(member="f.png")),
    ("raw_shards", "ranges", "raw_shards", setting("byte_offset", 1 << 40, member="a.png")),
    ("raw_shards", "ranges", "raw_shards", setting("byte_offset", -512, member="a.png")),
    ("raw_shards", "ranges", "raw_shards", setting("shard", "elsewhere.tar", member="a.png")),
    ("raw_shards", "ranges", "raw_shards", without(member="a.png")),
    ("rows", "identity", "rows", setting("modality", "hologram", **A_IMAGE)),
    ("rows", "identity", "rows", setting("sample_id", "", **A_IMAGE)),
    ("rows", "identity", "rows", setting("position", -2, **A_IMAGE)),
    ("rows", "metadata_rows", "rows", without(**A_METADATA)),
    ("rows", "metadata_rows", "rows", repeated(**A_METADATA)),
    ("rows", "metadata_rows", "rows", setting("position", 0, **A_METADATA)),
    ("rows", "metadata_rows", "rows", setting("position", -1, **A_IMAGE)),
    ("rows", "unique", "rows", repeated(**A_IMAGE)),
    ("rows", "contiguous", "rows", moved_to_end(**A_IMAGE)),
    ("rows", "contiguous", "rows", setting("position", 9, **A_IMAGE)),
    ("rows", "contiguous", "rows", without(**A_METADATA)),
    ("rows", "text", "rows", setting("text_content", "of a picture", **A_IMAGE)),
    ("rows", "text", "rows", setting("metadata_json", "{}", **A_TEXT)),
    ("rows", "text", "rows", setting("text_content", None, **A_TEXT)),
    ("rows", "text", "rows", setting("materialize_error", "oops", **A_METADATA)),
    ("rows", "samples", "rows", setting("content_type", None, **A_METADATA)),
    ("rows", "member_rows", "rows", setting("content_type", "image/jpeg", **A_IMAGE)),
    ("rows", "member_rows", "rows", named_twice(1, **A_TEXT)),
    ("rows", "member_rows", "rows", named_twice(0, **A_TEXT)),
    ("rows", "member_texts", "rows", setting("text_content", "of the same size", **A_TEXT)),
    ("rows", "entries", "rows", setting("text_content", "won", sample_id="e", position=0)),
    ("rows", "order", "rows", lambda rows: rows[4:] + rows[:4]),
    ("rows", "user_columns", "rows", setting("score", 0.75, **A_METADATA)),
    ("rows", "rejects", "rejects", lambda rows: rows[0].update(stage="rows")),
    ("rows", "listed", "rejects", lambda rows: rows.append({**rows[0], "shard": "list.jsonl"})),
    ("rows", "no_content", "rows", setting("binary_content", b"early", **A_IMAGE)),
    ("rows", "source_refs", "rows", setting("source_ref", "[]", **A_IMAGE)),
    ("rows", "source_refs", "rows", setting("source_ref", "{", **A_IMAGE)),
    ("rows", "source_refs", "rows", relocated(byte_offset=-1)),
    ("rows", "source_refs", "rows", relocated(byte_offset=True)),
    ("rows", "source_refs", "rows", relocated(byte_offset=1 << 40)),
    ("rows", "source_refs", "rows", relocated(byte_offset=0)),
    ("rows", "source_refs", "rows", relocated(byte_size=3)),
    ("rows", "source_refs", "rows", relocated(member="a.gif")),
    ("rows", "source_refs", "rows", relocated(member=None)),
    ("rows", "source_refs", "rows", without_locator),
    ("rows", "members", "rows", without(**A_IMAGE)),
    ("rows", "members", "rejects", lambda rows: rows.clear()),
    ("rows", "members", "rejects", more_rejects),
    ("rows", "members", "raw_shards", repeated(member="a.png")),
    ("rows", "source_refs", "raw_shards", setting("byte_offset", 1024, member="a.png")),
    ("rows", "sources", "rows", setting("source", None, **A_IMAGE)),
    ("rows", "sources", "rows", resourced("source", uri="elsewhere.tar")),
    ("rows", "sources", "rows", resourced("source", uri=None)),
    ("rows", "sources", "rows", resourced("source", offset=0)),
    ("rows", "sources", "rows", resourced("source", size=None)),
    ("rows", "sources", "rows", resourced("source", content_type=None)),
    ("rows", "sources", "rows", resourced("source", modality="text", content_type="text/plain")),
    ("rows", "sources", "rows", resourced("source", checksum="CRC32C:00000000")),
    ("rows", "sources", "rows", resourced("source", inline=b"")),
    ("rows", "sources", "rows", setting("source_member", None, **A_IMAGE)),
    ("rows", "sources", "rows", resourced("source_member", container=None)),
    ("rows", "sources", "rows", resourced("source_member", member="a.gif")),
    ("rows", "sources", "rows", resourced("source_member", frame_index=0)),
    ("materialized_rows", "sources", "materialized_rows", resourced("source", checksum=None)),
    ("materialized_rows", "sources", "materialized_rows", resourced("source", checksum="CRC32C:00000000")),
    ("materialized_rows", "sources", "materialized_rows", resourced("source", size=1)),
    ("materialized_rows", "sources", "materialized_rows", altered(**A_IMAGE)),
    ("materialized_rows", "same_rows", "materialized_rows", setting("text_content", "another", **A_TEXT)),
    ("materialized_rows", "same_rows", "materialized_rows", setting("metadata_json", "{}", **A_METADATA)),
    ("materialized_rows", "same_rows", "materialized_rows", setting("source_ref", "{}", **A_IMAGE)),
    ("materialized_rows", "same_rows", "materialized_rows", setting("position", 7, **A_IMAGE)),
    ("materialized_rows", "same_rows", "materialized_rows", setting("modality", "audio", **A_IMAGE)),
    ("materialized_rows", "same_rows", "materialized_rows", without(**A_IMAGE)),
    ("materialized_rows", "same_rows", "materialized_rows", repeated(**A_IMAGE)),
    ("materialized_rows", "same_rows", "materialized_rows", moved_to_end(**A_IMAGE)),
    ("materialized_rows", "content", "materialized_rows", setting("binary_content", None, **A_IMAGE)),
    ("materialized_rows", "content", "materialized_rows", setting("materialize_error", "oops", **A_IMAGE)),
    ("materialized_rows", "content", "materialized_rows", setting("binary_content", b"x", **A_TEXT)),
    ("materialized_rows", "content", "materialized_rows", setting("binary_content", b"too short", **A_IMAGE)),
    ("materialized_rows", "shard_bytes", "materialized_rows", altered(**A_IMAGE)),
    ("filtered_rows", "metadata_rows", "filtered_rows", without(**A_METADATA)),
    ("filtered_rows", "metadata_rows", "filtered_rows", repeated(**A_METADATA)),
    ("filtered_rows", "unique", "filtered_rows", repeated(**A_IMAGE)),
    ("filtered_rows", "content", "filtered_rows", setting("binary_content", None, **A_IMAGE)),
    ("filtered_rows", "content", "filtered_rows", setting("materialize_error", "oops", **A_IMAGE)),
    ("filtered_rows", "content", "filtered_rows", setting("binary_content", b"x", **A_METADATA)),
    ("filtered_rows", "content", "filtered_rows", setting("binary_content", b"too short", **A_IMAGE)),
    ("filtered_rows", "accounting", "filtered_rows", without(**A_IMAGE)),
    ("filtered_rows", "accounting", "filtered_rows", repeated(**A_IMAGE)),
    ("filtered_rows", "same_rows", "filtered_rows", setting("text_content", "another", **A_TEXT)),
    ("filtered_rows", "same_rows", "filtered_rows", setting("metadata_json", "{}", **A_METADATA)),
    ("filtered_rows", "same_rows", "filtered_rows", setting("source_ref", None, **A_IMAGE)),
    ("filtered_rows", "same_rows", "filtered_rows", setting("position", 5, **A_IMAGE)),
    ("filtered_rows", "same_rows", "filtered_rows", moved_to_end(**A_IMAGE)),
    ("filtered_rows", "same_rows", "filtered_rows", altered(**A_IMAGE)),
    ("filtered_rows", "shard_bytes", "filtered_rows", altered(**A_IMAGE)),
    ("filtered_rows", "sources", "filtered_rows", resourced("source", checksum=None)),
    ("filtered_rows", "sources", "filtered_rows", altered(**A_IMAGE)),
]


@pytest.mark.parametrize("asset", ["raw_shards", "rows", "materialized_rows", "filtered_rows"])
def test_good_partition_passes_every_check(pristine, asset: str) -> None:
    """A partition as the stages make it violates nothing, and every check of the catalog is reported in its order."""
    outcomes = pristine.outcomes(asset)
    assert list(outcomes) == [check.name for check in checks_of(asset)]
    assert {name: outcome.violations for name, outcome in outcomes.items() if not outcome.passed} == {}


@pytest.mark.parametrize(("asset", "check", "table", "change"), SPOILED)
def test_spoiled_table_fails_its_check(partition, asset: str, check: str, table: str, change: Change) -> None:
    """One wrong value, row or order in a table makes the check that guards it fail."""
    partition.spoil(table, change)
    outcome = partition.outcomes(asset)[check]
    assert not outcome.passed
    assert outcome.num_violations == len(outcome.violations) > 0


def test_every_check_of_tables_is_spoiled_once() -> None:
    """No check of a table goes without a table that it refuses."""
    guarded = {(asset, check) for asset, check, _, _ in SPOILED} | {
        ("filtered_rows", "dropped"),
        ("filtered_rows", "decodable"),
        ("filtered_rows", "repeated"),  # test_wrong_producers.py
        ("rows", "pdf_pages"),  # test_pdf.py
        ("filtered_rows", "readable"),
        ("materialized_rows", "readable"),
        ("rows", "losses"),
        ("filtered_rows", "losses"),
    }
    assets = ("raw_shards", "rows", "materialized_rows", "filtered_rows")
    assert {(a, c.name) for a in assets for c in checks_of(a) if c.name != "schema"} <= guarded


WRONG_COLUMNS: list[tuple[str, str, Callable[[pa.Table], pa.Table]]] = [
    ("raw_shards", "raw_shards", lambda t: t.drop_columns(["role"])),
    ("raw_shards", "raw_shards", lambda t: t.append_column("more", pa.nulls(t.num_rows, pa.string()))),
    ("raw_shards", "raw_shards", lambda t: t.select([*t.schema.names[1:], t.schema.names[0]])),
    ("rows", "rows", lambda t: t.cast(t.schema.set(0, pa.field("sample_id", pa.string())))),
    ("rows", "rows", lambda t: t.cast(t.schema.set(1, pa.field("position", pa.int64(), nullable=False)))),
    ("rows", "rows", lambda t: t.rename_columns([*t.schema.names[:-1], "renamed"])),
    ("rows", "rejects", lambda t: t.cast(t.schema.set(3, pa.field("stage", pa.string())))),
    ("materialized_rows", "materialized_rows", lambda t: t.set_column(5, "binary_content", t.column(5).cast("binary"))),
    ("filtered_rows", "filtered_rows", lambda t: t.drop_columns(["score"])),
    ("filtered_rows", "dropped", lambda t: t.cast(t.schema.set(5, pa.field("value", pa.float32())))),
]


@pytest.mark.parametrize(("asset", "table", "change"), WRONG_COLUMNS)
def test_wrong_columns_fail_the_schema_check_and_leave_the_others_unjudged(
    partition, asset: str, table: str, change: Callable[[pa.Table], pa.Table]
) -> None:
    """A missing, further, misplaced, retyped or nullable column is a violation that names the table."""
    partition.write(table, change(partition.read(table)))
    outcomes = partition.outcomes(asset)
    assert {row["table_name"] for row in outcomes["schema"].violations} == {table}
    others = [outcome for name, outcome in outcomes.items() if name != "schema"]
    assert others
    assert all(not other.passed and "not judged" in other.violations[0]["problem"] for other in others)


def test_nullability_is_read_from_parquet_and_not_from_arrow(partition) -> None:
    """A file whose columns are optional in Parquet fails, although the Arrow schema beside them says not null."""
    table = partition.read("raw_shards")
    loose = table.cast(pa.schema([pa.field(f.name, f.type) for f in table.schema]))
    with pq.ParquetWriter(partition.path("raw_shards"), loose.schema, store_schema=False) as writer:
        writer.write_table(loose)
        writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(table.schema.serialize()).decode()})
    assert "schema" in partition.failed("raw_shards")


def test_list_columns_compare_by_their_items(make_partition, tmp_path: Path) -> None:
    """A user column of lists passes the schema check, whatever Parquet calls a list's items."""
    members = [("x.json", b'{"tags": ["p", "q"]}'), ("x.txt", b"text")]
    made = make_partition(tmp_path, members)
    assert [column.type for column in made.schema.user_columns] == ["list<string>"]
    assert made.failed("rows") == set()


def test_user_columns_may_have_any_name(make_partition, tmp_path: Path) -> None:
    """Columns called like DuckDB's own row number, or like the views' columns, do not disturb a check."""
    members = [("x.json", b'{"file_row_number": 5, "ordinal": 6, "place": 7}'), ("x.txt", b"text")]
    made = make_partition(tmp_path, members)
    for asset in ("rows", "materialized_rows", "filtered_rows", "packed_mult"):
        assert made.failed(asset) == set()


def test_write_mode_wants_bytes_in_the_filtered_rows_only(make_partition, tmp_path: Path) -> None:
    """With ``materialize: write`` rows without bytes pass until they are filtered, and bytes before that do not."""
    made = make_partition(tmp_path, mode="write")
    for asset in ("rows", "materialized_rows", "filtered_rows", "packed_mult", "packed_mstr"):
        assert made.failed(asset) == set()
    assert made.failed("materialized_rows", materialize_mode="read") == {"content"}
    made.spoil("materialized_rows", setting("binary_content", b"early", **A_IMAGE))
    assert made.failed("materialized_rows") == {"content", "sources"}


def test_further_modalities_are_known_when_declared(partition) -> None:
    """A row modality that the declaration adds is not a violation."""
    partition.spoil("rows", setting("modality", "hologram", **A_IMAGE))
    assert "identity" in partition.failed("rows")
    assert "identity" not in partition.failed("rows", known_modalities=frozenset({"hologram"}))


def test_bytes_of_another_sample_are_found(make_partition, tmp_path: Path) -> None:
    """Images that stand one sample further are found by the shard, and by the rows before where these are right."""
    made = make_partition(tmp_path, [(f"{n:02}.bin", bytes([n]) * 100) for n in range(50)])

    def rotate(rows: Rows) -> None:
        media = [row for row in rows if row["modality"] == "binary"]
        contents = [row["binary_content"] for row in media]
        for row, content in zip(media, [*contents[1:], contents[0]], strict=True):
            row["binary_content"] = content

    made.spoil("filtered_rows", rotate)
    outcomes = made.outcomes("filtered_rows")
    assert {name for name, outcome in outcomes.items() if not outcome.passed} == {"same_rows", "shard_bytes", "sources"}
    assert outcomes["same_rows"].num_violations == 50
    assert outcomes["shard_bytes"].num_violations == 50
    made.spoil("materialized_rows", rotate)
    assert made.failed("materialized_rows") == {"shard_bytes", "sources"}


def test_write_mode_ties_the_filtered_bytes_to_the_shard(make_partition, tmp_path: Path) -> None:
    """Where the filtered rows are the first to hold bytes, these are compared with the shard's."""
    made = make_partition(tmp_path, mode="write")
    made.spoil("filtered_rows", altered(**A_IMAGE))
    assert made.failed("filtered_rows") == {"shard_bytes", "sources"}
    made.spoil("filtered_rows", setting("binary_content", b"too short", **A_IMAGE))
    assert made.failed("filtered_rows") == {"content", "sources"}


def test_a_frame_has_a_size_of_its_own(make_partition, tmp_path: Path) -> None:
    """A frame of a TIFF is not as large as the file that its locator names, and passes."""
    first, second = (Image.new("RGB", (20, 10), (shade, 9, 9)) for shade in (1, 2))
    tiff = io.BytesIO()
    first.save(tiff, "TIFF", save_all=True, append_images=[second])
    document = json.dumps({"texts": [None, None], "images": ["p0", "p1"]}).encode()
    made = make_partition(tmp_path, [("e.json", document), ("e.tiff", tiff.getvalue())])
    frame = find(made.read("materialized_rows").to_pylist(), modality="image")
    ref = json.loads(frame["source_ref"])
    assert ref["frame_index"] == 0
    assert len(frame["binary_content"]) < ref["byte_size"]
    assert made.failed("materialized_rows") == made.failed("filtered_rows") == set()


def test_texts_larger_than_the_memory_of_the_database_pass(make_partition, tmp_path: Path) -> None:
    """A check does not fail on a sample's JSON, or a text, that DuckDB cannot hold, and still compares it."""
    large = "x" * (15 << 20)
    made = make_partition(tmp_path, [("a.json", json.dumps({"note": large}).encode()), ("a.txt", large.encode())])
    limit = {"memory_limit": 16 << 20}
    for asset in ("rows", "materialized_rows", "filtered_rows", "packed_mult"):
        assert made.failed(asset, **limit) == set()
    made.spoil("filtered_rows", setting("text_content", large[:-1] + "y", **A_TEXT))
    assert made.failed("filtered_rows", **limit) == {"same_rows"}


def test_as_many_samples_pass_as_the_tables_hold(make_partition, tmp_path: Path, monkeypatch) -> None:
    """A check that does not fit into the memory of the database gets more for itself, up to the process's share."""
    dot = io.BytesIO()
    Image.new("RGB", (1, 1)).save(dot, "PNG")
    document = json.dumps({"texts": ["a text of the document", None], "images": [None, "p0"]}).encode()
    members = [
        (f"{n:06d}{name}", content)
        for n in range(3000)
        for name, content in ((".json", document), (".png", dot.getvalue()))
    ]
    made = make_partition(tmp_path, members, is_whole=False)
    least = 6 << 20
    assert made.failed("rows", memory_limit=least) == set()
    made.spoil("rows", setting("text_content", "another text", sample_id="002999", modality="text"))
    limits: list[int] = []
    set_limit = runner.limit_memory
    monkeypatch.setattr(
        runner, "limit_memory", lambda opened, memory: (limits.append(memory), set_limit(opened, memory))
    )
    assert made.failed("rows", memory_limit=least) == {"entries"}
    most = max(limits)
    normal = limits[-1]
    assert most > normal >= least
    share_memory(available_memory() // normal)
    try:
        with pytest.raises(SourceError, match=r"the check \w+ of rows .* MiB: run fewer processes"):
            made.failed("rows", memory_limit=least)
    finally:
        share_memory(1)


def test_large_tables_are_read_from_their_files(partition, monkeypatch) -> None:
    """Tables that are not held give the same outcomes, row by row, as those that are."""
    assets = ("raw_shards", "rows", "materialized_rows", "filtered_rows", "packed_mult", "packed_mstr")
    partition.spoil("filtered_rows", setting("text_content", "of the same size", **A_TEXT))
    held = {asset: partition.outcomes(asset) for asset in assets}
    monkeypatch.setattr(relations, "_MAX_HELD", 0)
    assert {asset: partition.outcomes(asset) for asset in assets} == held
    assert not held["filtered_rows"]["same_rows"].passed


def test_memory_is_the_smallest_limit_of_the_machine_and_its_control_groups(tmp_path: Path) -> None:
    """Of both versions of control groups the limits of the process's own and of those above it count."""
    machine = available_memory(tmp_path)
    assert machine > 16 << 20
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/one\n3:cpu:/\n0::/two/three\n")
    for folder, name, limit in (
        ("memory/one", "memory.limit_in_bytes", 5 << 20),
        ("two/three", "memory.max", "max"),
        ("two", "memory.max", 3 << 20),
    ):
        assert available_memory(tmp_path) in (machine, 5 << 20)
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / folder / name).write_text(f"{limit}\n")
    assert available_memory(tmp_path) == 3 << 20


# --- shards -----------------------------------------------------------------------------------------------------------


def test_the_index_is_recomputed_from_the_shard(partition, make_partition, tmp_path: Path) -> None:
    """The shard itself is walked again: an index of another shard does not pass, nor do rows of another index."""
    (tmp_path / "other").mkdir()
    other = make_partition(tmp_path / "other", [("a.png", b"other"), ("zz.txt", b"text")])
    assert "members" in partition.failed("raw_shards", shards=[TarSource(SourceFile(str(other.shard)))])
    partition.write("raw_shards", other.read("raw_shards"))
    assert {"members", "source_refs"} <= partition.failed("rows")


def test_rejects_of_a_list_of_files_are_not_members(partition) -> None:
    """Rejects that name a file that is not an archive account for no member, and are none that the shards lack."""
    listed = {"shard": "list.jsonl", "member": "media/a.png", "stage": "rows", "reason": "x", "detail": "y"}
    partition.spoil("rejects", lambda rows: [*rows, listed])
    assert partition.failed("rows") == {"listed"}
    partition.spoil("rejects", lambda rows: [{**row, "shard": "list.jsonl"} for row in rows])
    assert partition.failed("rows") == {"members", "listed"}


# --- what an outcome shows --------------------------------------------------------------------------------------------


def test_violations_are_counted_in_full_and_listed_in_part(make_partition, tmp_path: Path) -> None:
    """An outcome counts every violation, keeps the first twenty, and cuts long values."""
    made = make_partition(tmp_path, [(f"{n:05}{'x' * 300}.txt", b"text") for n in range(4200)], is_whole=False)
    assert made.failed("rows") == set()
    made.spoil("rows", lambda rows: [row for row in rows if row["modality"] == "text"])
    outcome = made.outcomes("rows")["metadata_rows"]
    assert outcome.num_violations == 4200
    assert len(outcome.violations) == MAX_LISTED
    assert len(outcome.violations[0]["sample_id"]) == MAX_TEXT


def test_long_values_are_truncated(partition) -> None:
    """A violation shows no more of a long text than fits a table."""
    partition.spoil("rejects", lambda rows: [{**rows[0], "member": "y" * 5000}])
    outcome = partition.outcomes("rows")["members"]
    shown = [row["member"] for row in outcome.violations]
    assert max(map(len, shown)) == MAX_TEXT
    assert shown[-1].endswith("…")


# --- files that are not there -----------------------------------------------------------------------------------------


def test_missing_table_is_named(partition) -> None:
    """Checks whose input is not among the partition's files say which."""
    with pytest.raises(SourceError, match="need the table rows"):
        partition.outcomes("rows", tables={})
    partition.path("rows").unlink()
    with pytest.raises(SourceError, match=r"rows/p\.parquet"):
        partition.outcomes("rows")


def test_file_that_is_not_parquet_is_named(partition) -> None:
    """Bytes that are not a Parquet file give an error that names it."""
    partition.path("rows").write_bytes(b"no table")
    with pytest.raises(SourceError, match=r"rows/p\.parquet: is not a Parquet file"):
        partition.outcomes("rows")


@pytest.mark.parametrize(
    ("times", "said"),
    [(1, "cannot be read"), (5000, "the check members of raw_shards could not be executed")],
    ids=["held", "read by DuckDB"],
)
def test_damaged_table_is_named(partition, times: int, said: str) -> None:
    """Damage of a table is an error of ours that names the file, and the check where DuckDB meets it."""
    index = partition.read("raw_shards")
    partition.write("raw_shards", pa.concat_tables([index] * times))
    path = partition.path("raw_shards")
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 300 + content[304:])
    with pytest.raises(SourceError, match=rf"raw_shards/p\.parquet: {said}"):
        partition.outcomes("raw_shards")


def test_table_of_an_earlier_asset_without_a_column_is_named(partition) -> None:
    """A check of the filtered rows names the materialized rows that it cannot compare with."""
    partition.write("materialized_rows", partition.read("materialized_rows").drop_columns(["source_ref"]))
    with pytest.raises(SchemaMismatchError, match="no column source_ref: make materialized_rows again"):
        partition.outcomes("filtered_rows")


def test_file_names_are_not_patterns(partition, tmp_path: Path) -> None:
    """A folder whose name holds quotes, brackets and stars is read like any other."""
    root = tmp_path / "it's [a] *folder?"
    partition.root.rename(root)
    for asset in ("raw_shards", "rows", "materialized_rows", "filtered_rows", "packed_mstr"):
        assert partition.failed(asset, store=Store(str(root))) == set()
