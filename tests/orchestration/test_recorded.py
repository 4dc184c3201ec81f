"""Whether Dagster knows all that was published, asked of its databases without Dagster."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from mm_assets.cli.main import main
from mm_assets.orchestration.partitions import asset_key, shard_partitions
from mm_assets.orchestration.recorded import is_recorded
from mm_assets.pipeline.chain import MANIFEST, PUBLISHED
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..pipeline.shards import CAPTIONS, make_shard

ARGUMENTS = ["--shards", "in", "--root", "root", "-d", "data", "--set", "formats=[mult]"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of two partitions that a load has packed and recorded, and its instance."""
    folder = tmp_path_factory.mktemp("recorded")
    for key in "ab":
        make_shard(folder / "in" / f"{key}.tar", {f"{key}{name}": value for name, value in CAPTIONS.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(folder / "home"))
        patch.chdir(folder)
        run()
    return folder


@pytest.fixture
def dataset(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetStore:
    """That dataset, with a copy of its instance."""
    shutil.copytree(packed / "home", tmp_path / "home")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(packed)
    return store(packed)


def store(folder: Path) -> DatasetStore:
    config = {"name": "data", "shards": "in", "root": str(folder / "root"), "formats": ["mult"], "settle_seconds": 0}
    return DatasetStore(DatasetSpec.from_config(config, where="arguments", base=folder))


def run(*arguments: str) -> None:
    done = CliRunner().invoke(main, ["run", *ARGUMENTS, *arguments])
    assert done.exit_code == 0, done.output


def asks(dataset: DatasetStore) -> bool:
    """Whether Dagster is said to know everything."""
    found = register(DatasetStore(dataset.spec))
    return is_recorded(Path(os.environ["DAGSTER_HOME"]), DatasetState(DatasetStore(dataset.spec)), found)


def num_runs() -> int:
    with dg.DagsterInstance.get() as instance:
        return len(instance.get_runs())


def test_a_load_with_nothing_to_do_records_nothing(dataset: DatasetStore) -> None:
    """After a load everything is known, and the next one begins no run in Dagster."""
    assert asks(dataset)
    assert num_runs() == 1
    run()
    assert num_runs() == 1


def _delete_partition(instance: dg.DagsterInstance, spec: DatasetSpec) -> None:
    instance.delete_dynamic_partition(shard_partitions(spec).name or "", "b")


def _wipe(instance: dg.DagsterInstance, spec: DatasetSpec) -> None:
    instance.wipe_assets([asset_key(spec, PUBLISHED)])


def _wipe_manifest(instance: dg.DagsterInstance, spec: DatasetSpec) -> None:
    instance.wipe_assets([asset_key(spec, MANIFEST)])


def _leave_run(instance: dg.DagsterInstance, spec: DatasetSpec) -> None:
    instance.add_run(dg.DagsterRun(job_name="data_load", status=dg.DagsterRunStatus.STARTED))


def _report_version(instance: dg.DagsterInstance, spec: DatasetSpec) -> None:
    tags = {"dagster/data_version": "other"}
    instance.report_runless_asset_event(dg.AssetMaterialization(asset_key(spec, PUBLISHED), partition="a", tags=tags))


@pytest.mark.parametrize("change", [_delete_partition, _wipe, _wipe_manifest, _leave_run, _report_version])
def test_what_dagster_lacks_is_recorded_by_the_next_load(
    dataset: DatasetStore, change: Callable[[dg.DagsterInstance, DatasetSpec], None]
) -> None:
    """A partition, a version or a manifest that Dagster lacks, and a run whose process is gone, are seen."""
    with dg.DagsterInstance.get() as instance:
        change(instance, dataset.spec)
    assert not asks(dataset)
    run()
    with dg.DagsterInstance.get() as instance:
        versions = instance.event_log_storage.get_latest_tags_by_partition(
            asset_key(dataset.spec, PUBLISHED), dg.DagsterEventType.ASSET_MATERIALIZATION, ["dagster/data_version"]
        )
        recipes = DatasetState(DatasetStore(dataset.spec)).recipes
        assert {key: tags["dagster/data_version"] for key, tags in versions.items()} == recipes
        assert set(instance.get_dynamic_partitions("data_shards")) == {"a", "b"}
        assert instance.get_latest_materialization_event(asset_key(dataset.spec, MANIFEST)) is not None


def test_what_a_load_without_dagster_did_is_not_recorded(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that `--no-record` published is recorded by the next load, which has no partition to run."""
    monkeypatch.chdir(tmp_path)
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    run("--no-record")
    assert not asks(store(tmp_path))
    run()
    assert asks(store(tmp_path))


@pytest.mark.parametrize("file", ["history/runs.db", "history/runs/index.db", "dagster.yaml"])
def test_an_instance_that_cannot_be_read_counts_as_without_records(dataset: DatasetStore, file: str) -> None:
    """A file that is missing, or is not a database, is left to Dagster."""
    home = Path(os.environ["DAGSTER_HOME"])
    (home / file).rename(home / "moved")
    assert not asks(dataset)
    if file.endswith(".db"):
        (home / file).write_bytes(b"not a database" * 100)
        assert not asks(dataset)


def test_databases_elsewhere_are_left_to_dagster(dataset: DatasetStore) -> None:
    """An instance whose settings name a storage is not asked by its old files."""
    settings = Path(os.environ["DAGSTER_HOME"], "dagster.yaml")
    settings.write_text(settings.read_text() + "storage:\n  sqlite:\n    base_dir: elsewhere\n")
    assert not asks(dataset)


def test_another_instance_knows_nothing(dataset: DatasetStore, tmp_path: Path) -> None:
    """What is recorded is a fact of the database: one that lost its events records the dataset again."""
    with sqlite3.connect(tmp_path / "home" / "history" / "runs" / "index.db") as connection:
        connection.execute("DELETE FROM event_logs")
    assert not asks(dataset)
