"""`retain`: tables without media are those with media otherwise, and what reads them gets the media from the shard."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from mm_assets.errors import SchemaMismatchError
from mm_assets.formats import crc32c
from mm_assets.pipeline.chain import FILTERED_ROWS, MATERIALIZED_ROWS, Table
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.state import manifests, sql_views
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions, stale_partitions
from mm_assets.rows.schema import DatasetSchema, UserColumn

from ..chain import declare, run_chain, run_once, stages_of
from ..shards import CAPTIONS, DOCUMENTS, Members, make_shard, png, table

SETTINGS: dict[str, Any] = {"filters": [{"type": "text_length", "min_chars": 4}]}
WithMedia = Callable[[str, Members, str], tuple[Path, DatasetStore]]
IO = Path("/proc/self/io")
REFERENCES = ("binary_content_size", "binary_content_crc32c")


def loaded(root: Path, shard: Path, **settings: Any) -> tuple[DatasetStore, PartitionReport]:
    """A dataset of one partition, run as a load runs it."""
    dataset = DatasetStore(declare(root, shard, **{**SETTINGS, **settings}))
    register(dataset, new_schema=True)
    return dataset, run_once(dataset.spec, dataset.partition("s"), dataset.schema())


def files(dataset: DatasetStore, *folders: str) -> dict[str, bytes]:
    root = Path(dataset.store.path_of(""))
    return {str(p.relative_to(root)): p.read_bytes() for name in folders for p in sorted(root.glob(f"{name}/*"))}


def bytes_written() -> int:
    """What this process has written so far to files of any kind, also to those that it has removed."""
    return int(dict(line.split(": ") for line in IO.read_text().splitlines())["wchar"])


def referenced(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What rows with media are with references in their place."""
    found = []
    for row in rows:
        media = row["binary_content"]
        numbers = (None, None) if media is None else (len(media), crc32c(media))
        found.append({**row, "binary_content": None, **dict(zip(REFERENCES, numbers, strict=True))})
    return found


@pytest.fixture(scope="module")
def with_media(tmp_path_factory: pytest.TempPathFactory) -> WithMedia:
    """A shard, and its dataset with all media, once for all that are compared with it."""
    datasets: dict[tuple[str, int, str], tuple[Path, DatasetStore]] = {}

    def load(name: str, members: Members, materialize: str) -> tuple[Path, DatasetStore]:
        key = (name, id(members), materialize)
        if key not in datasets:
            folder = tmp_path_factory.mktemp("whole")
            shard = make_shard(folder / "in" / name, members)
            whole, report = loaded(folder / "root", shard, materialize=materialize)
            assert report.ok, report.failure
            datasets[key] = shard, whole
        return datasets[key]

    return load


@pytest.mark.parametrize("materialize", ["read", "write"])
@pytest.mark.parametrize("retain", ["filtered", "none"])
@pytest.mark.parametrize(("name", "members"), [("s.tar", DOCUMENTS), ("s.tar", CAPTIONS), ("s.tar.gz", DOCUMENTS)])
def test_only_the_media_are_missing(
    tmp_path: Path, with_media: WithMedia, name: str, members: Members, retain: str, materialize: str
) -> None:
    """Packed files are the same bytes, and tables the same rows, as with all media; stage by stage or in one load."""
    shard, whole = with_media(name, members, materialize)
    dataset, report = loaded(tmp_path / "lean", shard, materialize=materialize, retain=retain)
    assert report.ok, report.failure
    assert files(dataset, "packed", "dropped", "rows") == files(whole, "packed", "dropped", "rows")
    for stage in (MATERIALIZED_ROWS, FILTERED_ROWS):
        (main, *_), rows = stage.tables, table(whole, stage.tables[0].name)
        lean = main.has_references(dataset.spec)
        assert table(dataset, main.name) == (referenced(rows) if lean else rows)
        assert any("`retain`" in note for note in stages_of(dataset, "s")[stage].notes) == lean
    assert pending_partitions(dataset) == []
    stages, _ = run_chain(dataset.spec.replace(root=str(tmp_path / "stages")))
    for folder in ("materialized_rows", "filtered_rows", "undecodable", "packed", "records"):
        assert files(stages, folder) == files(dataset, folder)


@pytest.mark.parametrize(
    ("settings", "first"),
    [({"filters": []}, "filtered_rows"), ({"pack": {"columns": "all"}}, "packed_mult"), ({"formats": ["mult"]}, "")],
)
def test_a_change_reads_media_from_the_shard(tmp_path: Path, settings: dict[str, Any], first: str) -> None:
    """A changed filter or packing starts where it does with media, says that it reads the shard, and gives the same."""
    shard = make_shard(tmp_path / "in" / "s.tar", DOCUMENTS)
    loaded(tmp_path / "lean", shard, retain="none")
    dataset = DatasetStore(declare(tmp_path / "lean", shard, **{**SETTINGS, "retain": "none", **settings}))
    register(dataset, new_schema=True)
    (stale,) = stale_partitions(DatasetState(dataset), pending_partitions(dataset)).values()
    assert stale.first.name == (first or "published")
    assert stale.message.endswith("changed, and media are read again (`retain`)") == bool(first)
    report = run_once(dataset.spec, dataset.partition("s"), dataset.schema())
    assert report.ok, report.failure
    assert next(iter(report.results), "") == first
    fresh, _ = loaded(tmp_path / "fresh", shard, **{"retain": "none", **settings})
    assert manifests.build_manifest(dataset).digest == manifests.build_manifest(fresh).digest
    assert files(dataset, "filtered_rows").items() >= files(fresh, "filtered_rows").items()


def test_media_that_changed_are_not_packed(tmp_path: Path) -> None:
    """Bytes that changed in a shard whose size and times are the same fail the stage that reads them, by the sample."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    loaded(tmp_path / "lean", shard, retain="none")
    dataset = DatasetStore(declare(tmp_path / "lean", shard, **SETTINGS, retain="none", pack={"columns": "all"}))
    register(dataset, new_schema=True)
    content, times = bytearray(shard.read_bytes()), shard.stat()
    content[content.index(b"IDAT") + 20] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = run_once(dataset.spec, dataset.partition("s"), dataset.schema())
    assert report.failure is not None
    assert report.failure.stage == "packed_mult"
    place = f"the media of sample '0', position 0, in 0.png of {shard} are not what they were: found "
    assert report.failure.detail.startswith(place)


@pytest.mark.parametrize("retain", ["filtered", "none"])
@pytest.mark.parametrize("change", ["gone", "other"])
def test_media_beside_a_list_that_changed_are_read_anew(tmp_path: Path, retain: str, change: str) -> None:
    """The failure names file and command, and the next run starts by itself where the references are written again."""
    (tmp_path / "in").mkdir()
    files = [tmp_path / "in" / f"{name}.png" for name in "ab"]
    for file in files:
        file.write_bytes(png(1))
    lines = [json.dumps({"sample_id": file.stem, "path": file.name}) for file in files]
    (listed := tmp_path / "in" / "s.jsonl").write_text("\n".join(lines))
    settings: dict[str, Any] = {"filters": [], "retain": retain, "pack": "generic", "formats": ["mstr"]}
    assert loaded(tmp_path / "root", listed, **settings)[1].ok
    settings |= {"filters": SETTINGS["filters"]} if retain == "filtered" else {"formats": ["mult", "mstr"]}
    files[1].unlink()
    if change == "other":
        files[1].write_bytes(png(2))
    dataset, report = loaded(tmp_path / "root", listed, **settings)
    assert report.failure is not None
    assert f"the media of sample 'b', position 0, in {files[1]} " in report.failure.said
    assert "run `mm-assets run --dataset data --partition s --from materialized_rows`" in report.failure.said
    stale = stale_partitions(DatasetState(dataset), ["s"])["s"]
    assert stale.first is MATERIALIZED_ROWS
    assert stale.reason == "a table of materialized_rows, or media that it refers to, is not what it was"
    again = run_once(dataset.spec, dataset.partition("s"), dataset.schema())
    assert again.ok, again.failure
    errors = [row["materialize_error"] for row in table(dataset, "materialized_rows") if row["modality"] == "image"]
    assert [error is None for error in errors] == [True, change == "other"]
    assert pending_partitions(dataset) == []


@pytest.mark.skipif(not IO.exists(), reason="only Linux counts what a process writes")
def test_few_bytes_are_written(tmp_path: Path) -> None:
    """With one format and no media in tables, a load writes little more than the bytes of the shard."""
    noise = {f"{n}.bin": os.urandom(1 << 18) for n in range(8)}
    shard = make_shard(tmp_path / "in" / "s.tar", noise)
    before = bytes_written()
    _, report = loaded(tmp_path / "lean", shard, retain="none", formats=["mstr"], pack="generic", filters=[])
    assert report.ok, report.failure
    assert bytes_written() - before < 1.1 * shard.stat().st_size


def test_tables_without_media_are_queried(tmp_path: Path) -> None:
    """The catalog's views show null media with their size and checksum."""
    dataset, _ = loaded(tmp_path / "lean", make_shard(tmp_path / "in" / "s.tar", CAPTIONS), retain="none")
    manifests.build_manifest(dataset)
    sql = "select count(binary_content), count(binary_content_size), count(binary_content_crc32c) from filtered_rows"
    with sql_views.sql_connection(DatasetState(dataset)) as connection:
        assert connection.execute(sql).fetchall() == [(0, 4, 4)]


def test_what_is_queried_has_one_shape(tmp_path: Path) -> None:
    """After `retain` changed, the next manifest lists the partitions with the new columns, and queries see these."""
    for name in "ab":
        make_shard(tmp_path / "in" / f"{name}.tar", CAPTIONS)
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in", **SETTINGS))
    lean = DatasetStore(dataset.spec.replace(retain="none"))
    root = Path(lean.store.path_of(""))
    sql = "select distinct partition from filtered_rows where {} is not null order by all"
    for keys in ("a", "b"), ("b",):
        state = DatasetState(lean)
        column = "binary_content" if state.listed.keys() == {"a", "b"} else "binary_content_size"
        expected = [(key,) for key in state.listed]
        with sql_views.sql_connection(state) as connection:
            assert connection.execute(sql.format(column)).fetchall() == expected
        with duckdb.connect() as connection:
            connection.execute("set variable root = ?", [str(root)])
            connection.execute((root / "catalog.sql").read_text())
            assert connection.execute(sql.format(column)).fetchall() == expected
        assert run_once(lean.spec, lean.partition(keys[0]), lean.schema()).ok
        report = manifests.build_manifest(lean)
        assert list(report.left_out) == list(keys[1:])


def test_a_column_of_that_name_is_refused(tmp_path: Path) -> None:
    """A user column that is called as a reference is an error that says what to do."""
    schema = DatasetSchema(user_columns=(UserColumn(name=REFERENCES[0], source="n", type="int64"),))
    made: Table = MATERIALIZED_ROWS.tables[0]
    with pytest.raises(SchemaMismatchError, match=r"binary_content_size.*samples.user_columns"):
        made.columns(declare(tmp_path, "in", retain="none"), schema)
