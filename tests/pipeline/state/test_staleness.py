"""What is pending, why, and from which stage on; and that a run does that, with the files of a run from the start."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mm_assets.pipeline.chain import FILTERED_ROWS, RECORDED_STAGES, ROWS
from mm_assets.pipeline.partition.run import PartitionReport, run_partition
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import clean, manifests, sql_views
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import Present, pending_partitions, pending_reasons, stale_partitions
from mm_assets.storage.files import SourceFile
from mm_assets.storage.store import Store

from ...e2e.files import files_of
from ..chain import declare, marker_name, run_chain
from ..shards import CAPTIONS, make_shard

STAGES = [stage.name for stage in RECORDED_STAGES]
SETTINGS: dict[str, Any] = {
    "filters": [{"type": "text_length", "min_chars": 1}],
    "annotators": [{"type": "image_size"}],
}


SCORE = """
from mm_assets.filters import Annotator
from mm_assets.rows.schema import UserColumn


class Score(Annotator):
    columns = (UserColumn(name="score", source="", type="int64", rows="text"),)

    def __init__(self, *, value):
        self.value = value

    def annotate(self, block):
        rows = block.rows_of("text")
        return {"score": block.spread(rows, [self.value] * len(rows), self.columns[0].arrow_type)}
"""


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
    report = run_partition(dataset.spec, dataset.partition("s"), dataset.schema(), **options)
    assert report.ok, report.failure
    return report


def digests(dataset: DatasetStore) -> dict[str, str]:
    return {name: f.sha256 for record in dataset.records("s").values() for name, f in record.files.items()}


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
    (stale,) = stale_partitions(present := Present(dataset), present.pending()).values()
    assert (stale.first.name, stale.fault.reason) == (first, reason)
    opened = Opened(monkeypatch)
    assert list(run(dataset).results) == STAGES[STAGES.index(first) :]
    assert len(opened.urls) == num_opened
    assert pending_partitions(dataset) == []
    assert list(Present(dataset).names["s"]) == [marker_name(dataset, "s")]
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
    """Nothing is pending, and to find that out no marker and no record is read."""
    dataset = changed(published, tmp_path, **settings)
    manifests.build_manifest(dataset)  # the copies of markers are other files
    dataset = DatasetStore(dataset.spec)
    read: list[str] = []
    for method in ("read_bytes", "found_bytes"):
        real = getattr(Store, method)
        monkeypatch.setattr(Store, method, lambda self, name, real=real: (read.append(name), real(self, name))[1])
    assert pending_partitions(dataset) == []
    assert sorted(read) == ["cache/markers.json", "schema.json", "shards.json"]


def test_a_raised_version_runs_its_stage_and_the_later_ones(
    published: DatasetStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A release that changes what filtering writes makes the partitions start there."""
    dataset = changed(published, tmp_path)
    assert pending_partitions(dataset) == []
    request.addfinalizer(lambda: object.__setattr__(FILTERED_ROWS, "version", 1))
    object.__setattr__(FILTERED_ROWS, "version", 2)
    assert pending_reasons(Present(dataset)) == {"s": "the version of filtered_rows changed"}
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
    assert pending_reasons(Present(dataset)) == {"s": "the code of users_pending:Wide changed"}
    assert list(run(dataset).results) == STAGES[STAGES.index("filtered_rows") :]
    assert digests(dataset)["dropped"] != before["dropped"]
    assert digests(dataset)["materialized_rows"] == before["materialized_rows"]


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_lost_packed_file_is_packed_again(
    published: DatasetStore, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed file that is gone or truncated makes its partition pending, and only it is packed again."""
    dataset = changed(published, tmp_path)
    before = digests(dataset)
    (packed,) = Path(dataset.store.path_of("packed")).glob("*.mstr")
    if damage == "gone":
        packed.unlink()
    else:
        packed.write_bytes(packed.read_bytes()[:-1])
    ((key, reason),) = pending_reasons(Present(dataset)).items()
    assert key == "s"
    assert reason.startswith(f"a file of packed_mstr is gone or of another size: packed/{packed.name} is ")
    assert list(run(dataset).results) == ["packed_mstr"]
    assert digests(dataset) == before


def test_a_damaged_table_is_made_again_by_the_second_run(published: DatasetStore, tmp_path: Path) -> None:
    """A bit that changed in a table fails the run that reads it; the next one starts at the stage of that table."""
    dataset = changed(published, tmp_path, filters=[])
    table = Path(dataset.store.path_of("materialized_rows/s.parquet"))
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    report = run_partition(dataset.spec, dataset.partition("s"), dataset.schema())
    assert report.failure is not None
    assert list(report.results) == []
    (stale,) = stale_partitions(present := Present(dataset), present.pending()).values()
    assert stale.first.name == "materialized_rows"
    assert "its last run failed at filtered_rows" in stale.said
    assert list(run(dataset).results) == STAGES[STAGES.index("materialized_rows") :]
    assert digests(dataset) == fresh(dataset.spec, tmp_path)


def test_a_wanted_stage_runs_although_nothing_changed(published: DatasetStore, tmp_path: Path) -> None:
    """A run can start at any stage, but not after one that is stale."""
    dataset = changed(published, tmp_path)
    assert list(run(dataset, first=ROWS).results) == STAGES[1:]
    other = DatasetStore(dataset.spec.replace(samples={"texts_field": "t"}))
    assert list(run(other, first=FILTERED_ROWS).results) == STAGES[1:]


def test_of_two_markers_the_one_with_the_present_fingerprint_counts(published: DatasetStore, tmp_path: Path) -> None:
    """A run that was killed between writing a marker and removing the last leaves two: the partition counts once."""
    dataset = changed(published, tmp_path)
    present = marker_name(dataset, "s")
    for other in ("published/s.0000000000000000.json", "published/s.ffffffffffffffff.json", "published/s.json"):
        dataset.store.write_bytes(
            other, dataset.store.read_bytes(present).replace(b'"num_samples": ', b'"num_samples": 9')
        )
    assert len(Present(dataset).names["s"]) == 4
    assert Present(dataset).name("s") == present
    assert pending_partitions(dataset) == []
    with sql_views.sql_connection(dataset) as connection:
        assert connection.execute("select partition from published").fetchall() == [("s",)]
    report = manifests.build_manifest(dataset)
    assert [shard["partition"] for shard in report.manifest["shards"]] == ["s"]
    assert report.manifest["num_samples"] == 4
    assert list(Present(dataset).names["s"]) == [present]


def test_nothing_is_read_of_markers_that_the_last_manifest_saw(
    published: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker is read where the index lacks it, or has it as it was before; what is pending is the same."""
    dataset = changed(published, tmp_path)
    manifests.build_manifest(dataset)
    read: list[str] = []
    real = Store.found_bytes
    monkeypatch.setattr(Store, "found_bytes", lambda self, name: (read.append(name), real(self, name))[1])
    name = marker_name(dataset, "s")
    content, index = dataset.store.read_bytes(name), dataset.store.read_bytes("cache/markers.json")
    for file, written, reads in (
        ("cache/markers.json", index, []),
        ("cache/markers.json", index.replace(b"4,[", b"5,["), [name]),
        ("cache/markers.json", index[:-9], [name]),
        ("cache/markers.json", b"{}", [name]),
        (name, content, [name]),
    ):
        dataset.store.write_bytes(file, written)
        read.clear()
        assert pending_partitions(dataset) == []
        assert read == ["cache/markers.json", *reads]
        manifests.build_manifest(dataset)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files": {}}'])
def test_a_damaged_marker_makes_its_partition_pending(published: DatasetStore, tmp_path: Path, content: bytes) -> None:
    """It is left out of the manifest, and a run writes it again."""
    dataset = changed(published, tmp_path)
    dataset.store.write_bytes(marker_name(dataset, "s"), content)
    assert pending_reasons(Present(dataset)) == {"s": "it is not published"}
    assert manifests.build_manifest(dataset).left_out == {"s": "its marker is damaged"}
    assert list(run(dataset).results) == []
    assert manifests.build_manifest(dataset).left_out == {}


def test_a_failed_run_with_other_settings_is_made_up(published: DatasetStore, tmp_path: Path) -> None:
    """A run that a check stops has replaced tables of the marker: with the former settings the partition is pending."""
    failing = changed(published, tmp_path, filters=[{"type": "text_length", "min_chars": 10_000}], max_dropped=0)
    report = run_partition(failing.spec, failing.partition("s"), failing.schema())
    assert not report.ok
    former = DatasetStore(published.spec.replace(root=failing.spec.root))
    register(former, new_schema=True)
    assert pending_partitions(former) == ["s"]
    run(former)
    assert manifests.build_manifest(former).left_out == {}
    assert digests(former) == digests(published)


class Killed(BaseException):
    """Ends a run as a kill does: nothing handles it."""


@pytest.mark.parametrize("settings", [{"filters": []}, pytest.param({"max_content_bytes": 60}, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_with_other_settings_is_made_up(
    published: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """After whichever file the run is killed, with the former settings all files become what they were."""
    real, left = Store._publish, 0

    def publish_some(self: Store, path: Path, name: str, *, durable: bool) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        real(self, path, name, durable=durable)

    def contents(root: str) -> dict[str, bytes]:
        files = (path for path in files_of(Path(root) / "data") if not path.name.startswith("."))
        named = {str(path.relative_to(root)): path.read_bytes() for path in files}
        return {name: content for name, content in named.items() if not name.startswith("data/manifests/")}

    expected = contents(published.spec.root)
    num_kills = 0
    for num_files in range(100):
        other = changed(published, tmp_path / str(num_files), **settings)
        with monkeypatch.context() as patched:
            patched.setattr(Store, "_publish", publish_some)
            left = num_files
            try:
                run(other)
            except Killed:
                num_kills += 1
            left = -1
        former = DatasetStore(published.spec.replace(root=other.spec.root))
        register(former, new_schema=True)
        for _ in pending_partitions(former):
            run(former)
        assert manifests.build_manifest(former).left_out == {}
        clean.clean(former, keep=1)
        assert contents(other.spec.root) == expected, num_files
        if num_kills <= num_files:
            break
    assert num_kills > 3


def test_a_killed_run_leaves_no_record_of_a_table_that_it_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of equal size and other bytes is not taken for the recorded one when the former settings are restored."""
    (tmp_path / "users_scores.py").write_text(SCORE)
    monkeypatch.syspath_prepend(str(tmp_path))
    one, two = ([{"type": "users_scores:Score", "value": value}] for value in (1, 2))
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    dataset, _ = run_chain(declare(tmp_path / "root", shard, annotators=one))
    table, before = Path(dataset.store.path_of("filtered_rows/s.parquet")), digests(dataset)
    content = table.read_bytes()
    other = DatasetStore(dataset.spec.replace(annotators=two))
    register(other, new_schema=True)
    real = Store._publish

    def publish_until_replaced(self: Store, path: Path, name: str, *, durable: bool) -> None:
        real(self, path, name, durable=durable)
        if table.read_bytes() != content:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Store, "_publish", publish_until_replaced)
        with pytest.raises(Killed):
            run(other)
    assert table.stat().st_size == len(content), "or its record does not fit anyway"
    register(dataset, new_schema=True)
    assert pending_partitions(dataset) == ["s"]
    assert next(iter(run(dataset).results)) == "filtered_rows"
    assert table.read_bytes() == content
    assert digests(dataset) == before


def test_a_published_table_that_is_gone_is_made_again(published: DatasetStore, tmp_path: Path) -> None:
    """A manifest leaves out a partition that lacks a table, and the next run makes it again."""
    dataset = changed(published, tmp_path)
    dataset.store.delete("filtered_rows/s.parquet")
    assert list(manifests.build_manifest(dataset).left_out) == ["s"]
    assert pending_partitions(dataset) == ["s"]
    assert next(iter(run(dataset).results)) == "filtered_rows"
    assert manifests.build_manifest(dataset).left_out == {}
    assert list(Present(dataset).names["s"]) == [marker_name(dataset, "s")]
    assert digests(dataset) == digests(published)


@pytest.mark.parametrize("left", ["mult", "mstr"])
def test_a_format_less_is_the_reason(published: DatasetStore, tmp_path: Path, left: str) -> None:
    """With one of two formats declared, only the marker is made again, and the reason names the setting."""
    dataset = changed(published, tmp_path, formats=[left])
    assert pending_reasons(Present(dataset)) == {"s": "`formats` changed"}
    run(dataset)
    assert pending_reasons(Present(dataset)) == {}
