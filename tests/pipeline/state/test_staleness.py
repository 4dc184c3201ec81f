"""What is pending, why, and from which stage on; and that a run does that, with the files of a run from the start."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from mm_assets.errors import SchemaMismatchError
from mm_assets.pipeline.chain import FILTERED_ROWS, RECORDED_STAGES, ROWS
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests, sql_views
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Attempt
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions, pending_reasons, stale_partitions
from mm_assets.storage.files import SourceFile
from mm_assets.storage.store import Store

from ...e2e.files import files_of
from ..chain import declare, record_name, record_of, run_chain, run_once, stages_of, table_name
from ..shards import CAPTIONS, make_shard

STAGES = [stage.name for stage in RECORDED_STAGES]
SETTINGS: dict[str, Any] = {
    "filters": [{"type": "text_length", "min_chars": 1}],
    "annotators": [{"type": "image_size"}],
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """A dataset of one partition in a manifest."""
    folder = tmp_path_factory.mktemp("pending")
    dataset, _ = run_chain(declare(folder / "root", make_shard(folder / "in" / "s.tar", CAPTIONS), **SETTINGS))
    return dataset


def changed(published: DatasetStore, tmp_path: Path, **settings: Any) -> DatasetStore:
    """A copy of it, declared with other settings."""
    shutil.copytree(published.spec.root, tmp_path / "root")
    dataset = DatasetStore(published.spec.replace(root=str(tmp_path / "root"), **settings))
    register(dataset, new_schema=True)
    return dataset


def run(dataset: DatasetStore, **options: Any) -> PartitionReport:
    report = run_once(dataset.spec, dataset.partition("s"), dataset.schema(), **options)
    assert report.ok, report.failure
    return report


def digests(dataset: DatasetStore) -> dict[str, str]:
    return {name: f.sha256 for record in stages_of(dataset, "s").values() for name, f in record.files.items()}


def fresh(spec: DatasetSpec, tmp_path: Path) -> dict[str, str]:
    """The files of a run from the start with the same settings."""
    dataset, _ = run_chain(spec.replace(root=str(tmp_path / "fresh")))
    return digests(dataset)


class Opened:
    """Counts the shards that are opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.urls: list[str] = []

        def opened(url: str, *rest: Any) -> SourceFile:
            self.urls.append(url)
            return SourceFile(url, *rest)

        monkeypatch.setattr("mm_assets.pipeline.state.folder.SourceFile", opened)


@pytest.mark.parametrize(
    ("settings", "first", "reason", "num_opened"),
    [
        ({"samples": {"texts_field": "t"}}, "rows", "`samples.texts_field` changed", 1),
        ({"filters": [{"type": "text_length", "min_chars": 9}]}, "filtered_rows", "`filters` changed", 0),
        ({"pack": {"columns": ["n"]}}, "packed_mult", "`pack` changed", 0),
        ({"on_misaligned": "fail"}, "packed_mult", "`on_misaligned` changed", 0),
    ],
    ids=["rows", "filter", "columns", "checks of packing"],
)
def test_a_changed_setting_runs_what_it_changes(
    published: DatasetStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    first: str,
    reason: str,
    num_opened: int,
) -> None:
    """The stages from the announced one on run, with as few opened shards, and give what a run from the start gives."""
    dataset = changed(published, tmp_path, **settings)
    (stale,) = stale_partitions(present := DatasetState(dataset), present.pending).values()
    assert (stale.first.name, stale.reason) == (first, reason)
    opened = Opened(monkeypatch)
    assert list(run(dataset).results) == STAGES[STAGES.index(first) :]
    assert len(opened.urls) == num_opened
    assert pending_partitions(dataset) == []
    assert DatasetState(dataset).is_published("s")
    assert digests(dataset) == fresh(dataset.spec, tmp_path)
    assert manifests.build_manifest(dataset).left_out == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_bytes": 1 << 16},
        {"on_misaligned": "warn"},
        {"storage_options": {"auto_mkdir": False}, "keep_manifests": 9},
    ],
    ids=["memory", "default", "place"],
)
def test_a_setting_that_changes_no_byte_runs_nothing(
    published: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Nothing is pending, and to find that out no record is read."""
    dataset = changed(published, tmp_path, **settings)
    dataset = DatasetStore(dataset.spec)
    read: list[str] = []
    for method in ("read_bytes", "found_bytes"):
        real = getattr(Store, method)
        monkeypatch.setattr(Store, method, lambda self, name, real=real: (read.append(name), real(self, name))[1])
    assert pending_partitions(dataset) == []
    assert sorted(read) == ["schema.json", "shards.json"]


def test_a_raised_version_runs_its_stage_and_the_later_ones(
    published: DatasetStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A release that changes what filtering writes makes the partitions start there."""
    dataset = changed(published, tmp_path)
    assert pending_partitions(dataset) == []
    before = FILTERED_ROWS.version
    request.addfinalizer(lambda: object.__setattr__(FILTERED_ROWS, "version", before))
    object.__setattr__(FILTERED_ROWS, "version", before + 1)
    assert pending_reasons(DatasetState(dataset)) == {"s": "the version of filtered_rows changed"}
    assert list(run(dataset).results) == STAGES[STAGES.index("filtered_rows") :]


def test_changed_code_of_a_users_filter_runs_the_filters(
    published: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another threshold in the source of a filter is announced by the filter's name, and applied."""
    source = (
        "from mm_assets.filters import Drop, Filter\n\n\n"
        "class Wide(Filter):\n    needs_content = True\n\n    def judge(self, block):\n"
        "        return [Drop(int(row), 'any', None) for row in block.rows_of('image')[:LIMIT]]\n\n\nLIMIT = {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "users_pending.py").write_text(source.format(0))
    dataset = changed(published, tmp_path, filters=[{"type": "users_pending:Wide"}])
    run(dataset)
    before = digests(dataset)
    assert pending_partitions(dataset) == []
    (tmp_path / "users_pending.py").write_text(source.format(10))
    monkeypatch.delitem(sys.modules, "users_pending")
    importlib.invalidate_caches()
    assert pending_reasons(DatasetState(dataset)) == {"s": "the code of users_pending:Wide changed"}
    assert list(run(dataset).results) == STAGES[STAGES.index("filtered_rows") :]
    assert digests(dataset)["dropped"] != before["dropped"]
    assert digests(dataset)["materialized_rows"] == before["materialized_rows"]


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_lost_packed_file_is_packed_again(
    published: DatasetStore, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest leaves out a partition whose packed file is gone or truncated, and only that is packed again."""
    dataset = changed(published, tmp_path)
    before = digests(dataset)
    (packed,) = Path(dataset.store.path_of("packed")).glob("*.mstr")
    if damage == "gone":
        packed.unlink()
    else:
        packed.write_bytes(packed.read_bytes()[:-1])
    ((key, reason),) = manifests.build_manifest(dataset).left_out.items()
    assert key == "s"
    assert reason.startswith(f"packed/{packed.name} {'is missing' if damage == 'gone' else 'has '}")
    assert pending_partitions(dataset) == ["s"]
    assert run(dataset).ok
    assert manifests.build_manifest(dataset).left_out == {}
    assert digests(dataset) == before


def test_a_damaged_table_is_made_again_by_the_second_run(published: DatasetStore, tmp_path: Path) -> None:
    """A bit that changed in a table fails the run that reads it; the next one starts at the stage of that table."""
    dataset = changed(published, tmp_path, filters=[])
    (table,) = Path(dataset.store.path_of("materialized_rows")).iterdir()
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    report = run_once(dataset.spec, dataset.partition("s"), dataset.schema())
    assert report.failure is not None
    assert list(report.results) == []
    (stale,) = stale_partitions(present := DatasetState(dataset), present.pending).values()
    assert stale.first.name == "materialized_rows"
    assert "its last run failed at filtered_rows" in stale.message
    assert list(run(dataset).results) == STAGES[STAGES.index("materialized_rows") :]
    assert digests(dataset) == fresh(dataset.spec, tmp_path)


def test_a_wanted_stage_runs_although_nothing_changed(published: DatasetStore, tmp_path: Path) -> None:
    """A run can start at any stage, but not after one that is stale."""
    dataset = changed(published, tmp_path)
    assert list(run(dataset, first=ROWS).results) == STAGES[1:]
    other = DatasetStore(dataset.spec.replace(samples={"texts_field": "t"}))
    assert list(run(other, first=FILTERED_ROWS).results) == STAGES[1:]


def test_records_of_other_settings_do_not_count(published: DatasetStore, tmp_path: Path) -> None:
    """A partition that was published with other settings too counts once, with those that it has now."""
    dataset = changed(published, tmp_path)
    other = DatasetStore(dataset.spec.replace(filters=[]))
    register(other, new_schema=True)
    run(other)
    register(dataset, new_schema=True)
    state = DatasetState(dataset)
    assert len(state.records["s"]) == 2
    assert state.pending == []
    assert list(state.published()) == ["s"]
    report = manifests.build_manifest(dataset)
    assert report.manifest["partitions"]["recipe"] == [state.recipes["s"]]
    with sql_views.sql_connection(DatasetState(dataset)) as connection:
        assert connection.execute("select partition, num_samples from published").fetchall() == [("s", 4)]


def test_records_that_the_last_manifest_names_are_not_read(
    published: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is the index: the next one reads the records of partitions that were published since."""
    dataset = changed(published, tmp_path)
    before = manifests.build_manifest(dataset)
    read: list[str] = []
    real = Store.found_bytes
    monkeypatch.setattr(Store, "found_bytes", lambda self, name: (read.append(name), real(self, name))[1])
    assert manifests.build_manifest(dataset).digest == before.digest
    assert record_name(dataset, "s") not in read
    dataset.store.delete("manifest.json")
    assert manifests.build_manifest(dataset).digest == before.digest
    assert record_name(dataset, "s") in read


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": 1}'])
def test_a_damaged_record_makes_its_partition_pending(published: DatasetStore, tmp_path: Path, content: bytes) -> None:
    """It is left out of the manifest and deleted, and a run publishes it again."""
    dataset = changed(published, tmp_path)
    dataset.store.delete("manifest.json")  # it would name the record, which is then not read
    dataset.store.write_bytes(record_name(dataset, "s"), content)
    assert manifests.build_manifest(dataset).left_out == {"s": "its record is damaged"}
    assert pending_reasons(DatasetState(dataset)) == {"s": "it has never run"}
    run(dataset)
    assert manifests.build_manifest(dataset).left_out == {}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("num_samples",), "3"),
        (("num_samples",), -1),
        (("decodable",), {}),
        (("losses",), {"rows": {"no_text": 1}}),
        (("shards",), {"/in/s.tar": 1}),
        (("stages", "rows", "counts"), {"rows": 1.5}),
        (("stages", "rows", "files"), {}),
        (("stages", "rows", "files", "rows", "size"), "9"),
        (("stages", "rows", "files", "rows", "sha256"), "../" * 20),
    ],
)
def test_a_record_of_wrong_values_is_damaged(
    published: DatasetStore, tmp_path: Path, path: tuple[str, ...], value: object
) -> None:
    """What no reader would accept in a manifest gets into none, and names no file outside of the folder."""
    dataset = changed(published, tmp_path)
    dataset.store.delete("manifest.json")
    record = json.loads(dataset.store.read_bytes(record_name(dataset, "s")))
    *above, last = path
    reduce(getitem, above, record)[last] = value
    dataset.store.write_bytes(record_name(dataset, "s"), json.dumps(record).encode())
    assert manifests.build_manifest(dataset).left_out == {"s": "its record is damaged"}


def test_an_attempt_of_another_partition_is_none(published: DatasetStore, tmp_path: Path) -> None:
    """An attempt that says that it is of another partition than its name does is damaged."""
    dataset = changed(published, tmp_path)
    dataset.store.write_bytes("attempts/s.json", Attempt(partition="../s", stages={}).to_bytes())
    assert dataset.attempt("s") is None


@pytest.mark.parametrize(
    ("key", "facts"),
    [("../s", {}), ("s", {"size": "1"}), ("s", {"modified": "1"}), ("s", {"url": None}), ("s", {"x": 1})],
)
def test_a_damaged_list_of_partitions_is_reported(
    published: DatasetStore, tmp_path: Path, key: str, facts: dict[str, Any]
) -> None:
    """A key that is not a file name, or a fact of another type, is an error with advice."""
    dataset = changed(published, tmp_path)
    content = json.loads(dataset.store.read_bytes("shards.json"))
    ((shard,),) = content["partitions"].values()
    content["partitions"] = {key: [shard | facts]}
    dataset.store.write_bytes("shards.json", json.dumps(content).encode())
    with pytest.raises(SchemaMismatchError, match="mm-assets register"):
        DatasetStore(dataset.spec).partitions()


def test_a_failed_run_with_other_settings_changes_nothing(published: DatasetStore, tmp_path: Path) -> None:
    """A run that a check stops replaces no file: with the former settings the partition is published as before."""
    failing = changed(published, tmp_path, filters=[{"type": "text_length", "min_chars": 10_000}], max_dropped=0)
    report = run_once(failing.spec, failing.partition("s"), failing.schema())
    assert not report.ok
    former = DatasetStore(published.spec.replace(root=failing.spec.root))
    register(former, new_schema=True)
    assert pending_partitions(former) == []
    assert manifests.build_manifest(former).left_out == {}
    record, before = record_of(former, "s"), record_of(published, "s")
    assert record is not None
    assert before is not None
    assert {name: f.sha256 for name, f in record.tables.items()} == {n: f.sha256 for n, f in before.tables.items()}


class Killed(BaseException):
    """Ends a run as a kill does: nothing handles it."""


def test_a_killed_run_with_other_settings_changes_nothing(
    published: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After whichever file a run is killed, the published files are those of before, and the next run ends it."""
    real, left = Store._publish, 0

    def publish_some(self: Store, path: Path, name: str, *, durable: bool) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        real(self, path, name, durable=durable)

    def contents(root: str) -> dict[str, bytes]:
        files = (path for path in files_of(Path(root) / "data") if not path.name.startswith("."))
        return {str(path.relative_to(root)): path.read_bytes() for path in files}

    names = ("data/attempts/", "data/schema.json")
    expected = {name: c for name, c in contents(published.spec.root).items() if not name.startswith(names)}
    num_kills = 0
    for num_files in range(100):
        other = changed(published, tmp_path / str(num_files), filters=[])
        with monkeypatch.context() as patched:
            patched.setattr(Store, "_publish", publish_some)
            left = num_files
            try:
                run(other)
            except Killed:
                num_kills += 1
            left = -1
        assert contents(other.spec.root).items() >= expected.items(), num_files
        for _ in pending_partitions(other):
            run(other)
        assert manifests.build_manifest(other).left_out == {}
        if num_kills <= num_files:
            break
    assert num_kills > 3


def test_a_published_table_that_is_gone_is_made_again(published: DatasetStore, tmp_path: Path) -> None:
    """A manifest leaves out a partition that lacks a table, and the next run makes it again."""
    dataset = changed(published, tmp_path)
    dataset.store.delete(table_name(dataset, "filtered_rows", "s"))
    assert list(manifests.build_manifest(dataset).left_out) == ["s"]
    assert pending_partitions(dataset) == ["s"]
    assert next(iter(run(dataset).results)) == "filtered_rows"
    assert manifests.build_manifest(dataset).left_out == {}
    assert digests(dataset) == digests(published)


@pytest.mark.parametrize("left", ["mult", "mstr"])
def test_a_format_less_is_the_reason(published: DatasetStore, tmp_path: Path, left: str) -> None:
    """With one of two formats declared, only the record is written again, and the reason names the setting."""
    dataset = changed(published, tmp_path, formats=[left])
    assert pending_reasons(DatasetState(dataset)) == {"s": "`formats` changed"}
    run(dataset)
    assert pending_reasons(DatasetState(dataset)) == {}
