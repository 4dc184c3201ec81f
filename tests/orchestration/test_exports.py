"""Exports in Dagster: their assets and checks, the runs that make them, and what sensors request."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import dagster as dg
import pytest

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import prepare_home, register_dataset
from mm_assets.orchestration.recorded_load import LoadResult, run_load
from mm_assets.orchestration.report import export_result
from mm_assets.pipeline.load.tasks import PartitionRun
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.exports import PartitionExport, export_partition
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions

from ..e2e.loads import InProcess, pack
from ..e2e.ticks import Ticker, schedule_keys
from ..pipeline.chain import declare
from ..pipeline.shards import make_shard

ASSET = dg.AssetKey(["data", "export_webdataset"])


@pytest.fixture
def spec(tmp_path: Path, dagster_home: Path) -> DatasetSpec:
    """A dataset of two partitions with an export, and an empty Dagster instance."""
    for key in "ab":
        make_shard(tmp_path / "in" / f"{key}.tar", {f"{key}.txt": "text"})
    prepare_home()
    exports = [{"format": "webdataset", "out": str(tmp_path / "out")}]
    return declare(tmp_path / "root", tmp_path / "in", formats=["mult"], exports=exports)


def load(spec: DatasetSpec) -> tuple[LoadResult, list[PartitionRun]]:
    """Runs what is pending; returns the end of the load, and how each partition ended."""
    dataset, ended = DatasetStore(spec), list[PartitionRun]()
    found = register(dataset)
    keys = pending_partitions(dataset)
    return run_load(spec, keys, engine=InProcess(), found=found, observed=ended.append), ended


def made(instance: dg.DagsterInstance) -> Counter[str]:
    """How often each partition was exported, as Dagster knows."""
    records = instance.fetch_materializations(ASSET, limit=100).records
    return Counter(record.partition_key or "" for record in records)


def passed(instance: dg.DagsterInstance) -> Counter[str]:
    """How often the comparison of each partition's export is in the log as passed."""
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    events = [e.get_dagster_event() for run in instance.get_runs() for e in instance.all_logs(run.run_id, of_type=kind)]
    found = [event.asset_check_evaluation_data for event in events]
    return Counter(check.partition or "" for check in found if check.check_name == "read_again" and check.passed)


def test_a_load_records_exports_and_their_checks(spec: DatasetSpec) -> None:
    """Of two partitions the changed one alone is exported and recorded again, and nothing is outdated after it."""
    assert load(spec)[0].ok
    with dg.DagsterInstance.get() as instance:
        assert made(instance) == passed(instance) == {"a": 1, "b": 1}
        make_shard(Path(spec.shards) / "b.tar", {"b.txt": "another text"})
        ended = load(spec)[1]
        assert [(run.partition, run.status) for run in ended] == [("b", "done")]
        assert made(instance) == passed(instance) == {"a": 1, "b": 2}
        latest = instance.fetch_materializations(ASSET, limit=1).records[0].asset_materialization
        assert latest is not None
        assert (latest.tags or {})["dagster/input_event_pointer/data/published"].isdecimal()
        assert latest.metadata["count/samples"].value == 1


def test_exports_that_dagster_does_not_know_are_recorded_by_the_next_load(spec: DatasetSpec) -> None:
    """An export that is made without Dagster is recorded once, by a load that has nothing to do."""
    without = spec.replace(exports=[])
    assert load(without)[0].ok
    dataset = DatasetStore(spec)
    for key, entry in DatasetState(dataset).published().items():
        assert export_partition(dataset, spec.exports[0], entry).folder.startswith(f"{key}.")
    with dg.DagsterInstance.get() as instance:
        assert made(instance) == {}
        for _ in range(2):
            assert load(spec)[0].ok
            assert made(instance) == passed(instance) == {"a": 1, "b": 1}


def test_a_failed_export_fails_its_run_and_not_the_partition(spec: DatasetSpec) -> None:
    """The run's message names the export; the partition is published and in the manifest, and stays pending for it."""
    spec = spec.replace(exports=[{"format": "webdataset", "modalities": ["missing"]}])
    _, ended = load(spec)
    assert [run.status for run in ended] == ["FAILED", "FAILED"]
    message = "has no modality 'missing', which export_webdataset names; it has "
    assert all(line.startswith("export_webdataset: ") and message in line for run in ended for line in run.failures)
    state = DatasetState(DatasetStore(spec))
    assert ([*state.listed], state.pending, state.incomplete) == (["a", "b"], [], ["a", "b"])
    with dg.DagsterInstance.get() as instance:
        assert instance.get_runs(limit=1)[0].status is dg.DagsterRunStatus.FAILURE
        assert instance.get_latest_materialization_event(dg.AssetKey(["data", "published"])) is not None


def test_the_job_of_a_partition_exports_it(spec: DatasetSpec) -> None:
    """As *Materialize* in the UI, from the shard on, or the export alone; both write the index."""
    with dg.DagsterInstance.get() as instance:
        register_dataset(instance, DatasetStore(spec))
        assert pack(instance, spec, "a").success
        assert made(instance) == passed(instance) == {"a": 1}
        index = Path(spec.exports[0].out or "") / "exports.json"
        assert [*json.loads(index.read_bytes())["partitions"]] == ["a"]
        job = build_definitions(spec).resolve_job_def("data_pack")
        alone = job.execute_in_process(
            instance=instance, partition_key="b", asset_selection=[ASSET], raise_on_error=False
        )
        assert not alone.success
        (step,) = instance.all_logs(alone.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        failure = step.get_dagster_event().step_failure_data.user_failure_data
        assert "b cannot be exported: it is not published: materialize published first" in (failure.description or "")
        index.unlink()
        assert job.execute_in_process(instance=instance, partition_key="a", asset_selection=[ASSET]).success
        assert [*json.loads(index.read_bytes())["partitions"]] == ["a"]


def test_the_sensor_requests_pending_exports(spec: DatasetSpec) -> None:
    """A declared export makes the sensor request runs that begin after the publication, and none once they are made."""
    assert load(spec.replace(exports=[]))[0].ok
    with dg.DagsterInstance.get() as instance:
        ticker = Ticker(instance, spec, "data_shards")
        requests = ticker.tick().run_requests
        assert [request.partition_key for request in requests] == ["a", "b"]
        for request in requests:
            assert request.asset_selection == [dg.AssetKey(["data", "published"]), ASSET]
            assert request.tags["mm_assets/reason"] == "export_webdataset is pending"
        assert not ticker.tick().run_requests
        assert load(spec)[0].ok
        assert not Ticker(instance, spec, "data_shards").tick().run_requests
        assert schedule_keys(instance, spec) == []


def test_assets_of_exports(spec: DatasetSpec) -> None:
    """Each export is a partitioned asset after `published` with a check; with `checks: rollup` it has none."""
    node = build_definitions(spec).resolve_asset_graph().get(ASSET)
    assert [key.path[-1] for key in node.parent_keys] == ["published"]
    assert node.is_partitioned
    assert node.metadata["dagster/uri"] == spec.exports[0].out
    assert [key.name for key in node.check_keys] == ["read_again"]
    rollup = spec.replace(checks="rollup")
    assert not build_definitions(rollup).resolve_asset_graph().get(ASSET).check_keys
    export = PartitionExport(
        folder="a.0", num_samples=1, num_bytes=2, num_repeated=0, digest="d", num_shards=1, files=("a.0/x",)
    )
    assert not export_result(rollup, spec.exports[0], "a", export).check_results
