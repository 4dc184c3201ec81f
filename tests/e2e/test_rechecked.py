"""Checks that are executed without their assets, and the pages of partitions that failed."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from dagster._utils.error import serializable_error_info_from_exc_info

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.checks import check_specs
from mm_assets.orchestration.launch import register_dataset
from mm_assets.pipeline.chain import RECORDED_STAGES
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import pending_partitions
from mm_assets.rows.parquet import ParquetSink

from ..pipeline.chain import table_name
from .loads import pack, run_partitions
from .ticks import Ticker, schedule_requests

SpecOf = Callable[..., DatasetSpec]
KEY = "captions-00000"


def published(instance: dg.DagsterInstance, spec: DatasetSpec) -> DatasetStore:
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    (run,) = run_partitions([(spec, KEY)])
    assert run.ok
    return dataset


def check_job(instance: dg.DagsterInstance, spec: DatasetSpec, key: str | None = KEY) -> dg.ExecuteInProcessResult:
    job = build_definitions(spec).resolve_job_def(f"{spec.name}_check")
    return job.execute_in_process(instance=instance, partition_key=key, raise_on_error=False)


def evaluations(instance: dg.DagsterInstance, result: dg.ExecuteInProcessResult) -> list[dg.AssetCheckEvaluation]:
    """What a run found, as it is stored."""
    entries = instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    return [entry.get_dagster_event().asset_check_evaluation_data for entry in entries]


def observed(instance: dg.DagsterInstance, spec: DatasetSpec, stage: str, key: str = KEY) -> Mapping[str, Any]:
    """The metadata of the latest observation of a partition of a stage."""
    wanted = dg.AssetRecordsFilter(dg.AssetKey([spec.name, stage]), asset_partitions=[key])
    (record, *_) = instance.fetch_observations(wanted, limit=1).records
    assert record.asset_observation is not None
    return {name: value.value for name, value in record.asset_observation.metadata.items()}


def unescaped(text: str) -> str:
    """Markdown as it is read."""
    return re.sub(r"\\([^a-z])", r"\1", text).replace("\u200b", "")


def last_message(instance: dg.DagsterInstance) -> str:
    """The message of the failure of the latest run, which its page shows last."""
    (run, *_) = instance.get_runs(limit=1)
    (entry,) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    failure = entry.get_dagster_event().step_failure_data.user_failure_data
    assert failure is not None
    return failure.description or ""


def test_every_check_runs_alone(instance: dg.DagsterInstance, demo_spec: SpecOf) -> None:
    """The check job judges the files of a partition, makes none, and leaves the partition published."""
    spec = demo_spec("captions")
    dataset = published(instance, spec)
    before = {name: dataset.store.read_bytes(name) for name in dataset.store.sizes("records")}
    result = check_job(instance, spec)
    assert result.success
    found = evaluations(instance, result)
    names = {(one.asset_key, one.check_name) for one in found}
    assert names == {(one.asset_key, one.name) for stage in RECORDED_STAGES for one in check_specs(spec, stage)}
    assert {one.partition for one in found} == {KEY}
    assert all(one.target_materialization_data is not None for one in found)
    assert {name: dataset.store.read_bytes(name) for name in dataset.store.sizes("records")} == before
    assert pending_partitions(dataset) == []


def test_damage_is_found_and_the_page_says_what_to_do(
    instance: dg.DagsterInstance, demo_spec: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that lost rows fails its check; the result names the sample and links to it, the page says what to do."""
    monkeypatch.setenv("MM_ASSETS_VIEWER_URL", "http://127.0.0.1:9000")
    spec = demo_spec("captions")
    dataset = published(instance, spec)
    path = dataset.store.path_of(table_name(dataset, "filtered_rows", KEY))
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    result = check_job(instance, spec)
    assert not result.success
    failed = [one for one in evaluations(instance, result) if not one.passed]
    assert failed
    assert any(one.metadata.get("sample") for one in failed)
    links = [str(one.metadata["viewer"].value) for one in failed if "viewer" in one.metadata]
    assert links
    assert all(link.startswith(f"http://127.0.0.1:9000/?page=open&partition={KEY}&sample_id=") for link in links)
    metadata = observed(instance, spec, "filtered_rows")
    assert [*metadata] == ["failed", "viewer"]
    assert f"mm-assets run --dataset captions --partition {KEY}" in metadata["failed"]
    assert metadata["viewer"] == f"http://127.0.0.1:9000/?part={KEY}"
    assert pending_partitions(dataset) == [KEY]


def test_other_settings_are_not_rechecked(instance: dg.DagsterInstance, demo_spec: SpecOf) -> None:
    """Files of other settings are not judged by the present ones: the check says to run the partition."""
    published(instance, demo_spec("captions"))
    result = check_job(instance, demo_spec("captions", filters=[]))
    (failure, *_) = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    said = failure.user_failure_data.description or ""
    assert "`filters` changed" in said
    assert f"mm-assets run --dataset captions --partition {KEY}" in said


def test_rolled_up_checks_run_without_a_partition(instance: dg.DagsterInstance, demo_spec: SpecOf) -> None:
    """With `checks: rollup` the check job has no partitions: it sums the records."""
    spec = demo_spec("captions", checks="rollup")
    published(instance, spec)
    result = check_job(instance, spec, None)
    assert result.success
    assert len(evaluations(instance, result)) == len(RECORDED_STAGES)


def test_the_checks_of_one_table_run_alone(instance: dg.DagsterInstance, demo_spec: SpecOf) -> None:
    """The checks of an asset can be selected without it, on one partition; of no partition the run says what to do."""
    spec = demo_spec("captions")
    published(instance, spec)
    definitions = build_definitions(spec)
    selection = dg.AssetSelection.checks_for_assets(dg.AssetKey(["captions", "rows"]))
    job = dg.Definitions.merge(definitions, dg.Definitions(jobs=[dg.define_asset_job("alone", selection)]))
    result = job.resolve_job_def("alone").execute_in_process(
        instance=instance, tags={"dagster/partition": KEY}, raise_on_error=False
    )
    assert result.success
    found = result.get_asset_check_evaluations()
    assert {one.partition for one in found} == {KEY}
    assert {one.check_name for one in found} == {"schema", "reserved_columns", "accounting", "alignment"}
    assert not result.get_asset_materialization_events()
    alone = job.resolve_job_def("alone").execute_in_process(instance=instance, raise_on_error=False)
    assert not alone.success
    assert "launch the job `captions_check`" in last_message(instance)


@pytest.mark.parametrize("is_load", [True, False])
def test_the_page_of_a_failed_partition(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Callable[..., Path], is_load: bool
) -> None:
    """Of a damaged shard the asset's page says first what to do, whether a load or a run of the job failed."""
    folder = inbox("docs-00000.tar", "docs-00001.tar")
    shard = folder / "docs-00001.tar"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    spec = demo_spec("docs", shards=str(folder))
    register_dataset(instance, DatasetStore(spec))
    if is_load:
        (run,) = run_partitions([(spec, "docs-00001")])
        assert not run.ok
    else:
        pack(instance, spec, "docs-00001")
    metadata = observed(instance, spec, "raw_shards", "docs-00001")
    assert [*metadata] == ["failed"]
    first, advice, command = unescaped(metadata["failed"]).split("\n\n")
    assert first.replace("  \n", " ").startswith(f"failed at raw_shards: {shard}, at byte ")
    assert max(map(len, first.split("  \n"))) <= 68 + len(str(shard)), "a page cuts off what is wider than its window"
    assert "if the shard is damaged, copy it again" in advice.replace("  \n", " ")
    assert command == "```\nmm-assets run --dataset docs --partition docs-00001\n```"
    said = last_message(instance)
    assert f"docs-00001 failed at raw_shards: {shard}, at byte " in said
    assert "\nWhat to do: correct what the message names; if the shard is damaged, copy it again" in said
    assert said.endswith("mm-assets run --dataset docs --partition docs-00001")


@pytest.mark.parametrize("is_load", [True, False])
def test_the_page_of_a_partition_whose_check_failed(
    instance: dg.DagsterInstance, demo_spec: SpecOf, monkeypatch: pytest.MonkeyPatch, is_load: bool
) -> None:
    """Of a failed check the asset's page says which rule failed."""

    def lossy(self: ParquetSink, batch: pa.RecordBatch) -> None:
        write(self, batch.slice(0, batch.num_rows - 1))

    write = ParquetSink.write
    spec = demo_spec("captions")
    register_dataset(instance, DatasetStore(spec))
    monkeypatch.setattr(ParquetSink, "write", lossy)
    if is_load:
        run_partitions([(spec, KEY)])
    else:
        pack(instance, spec, KEY)
    found = observed(instance, spec, "raw_shards")
    assert unescaped(found["failed"]).startswith("failed at raw_shards: check ")
    assert f"{KEY} failed at raw_shards: check " in last_message(instance)
    (made,) = instance.fetch_materializations(dg.AssetKey(["captions", "raw_shards"]), limit=1).records
    (seen, *_) = instance.fetch_observations(dg.AssetKey(["captions", "raw_shards"]), limit=1).records
    assert seen.timestamp > made.timestamp, "else Dagster does not show it"


@pytest.mark.parametrize("job", ["docs_load", "docs_shards"])
def test_events_have_no_secret_of_a_url(instance: dg.DagsterInstance, demo_spec: SpecOf, job: str) -> None:
    """The log of a run whose shards cannot be listed has their URL without its password and signature."""
    spec = demo_spec("docs", shards="http://user:5ec2e7@127.0.0.1:9/x.tar?X-Amz-Signature=5ec2e7")
    definitions = build_definitions(spec)
    if job == "docs_shards":
        shards = dg.AssetKey(["docs", "shards"])
        run = definitions.resolve_implicit_global_asset_job_def().get_subset(asset_selection={shards})
        assert "5ec2e7" not in str(definitions.resolve_asset_graph().get(shards).metadata)
    else:
        run = definitions.resolve_job_def(job)
    result = run.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    log = "".join(dg.serialize_value(entry) for entry in instance.all_logs(result.run_id))
    assert "http://user:***@127.0.0.1:9/x.tar: cannot be " in log
    assert "5ec2e7" not in log


def test_ticks_have_no_secret_of_a_url(instance: dg.DagsterInstance, demo_spec: SpecOf) -> None:
    """What a tick raises, which Dagster stores, has the URL of the shards without its password."""
    spec = demo_spec("docs", shards="http://user:5ec2e7@127.0.0.1:9/x.tar")
    for tick in (Ticker(instance, spec, "docs_shards").tick, lambda: schedule_requests(instance, spec)):
        with pytest.raises(Exception, match=r"127\.0\.0\.1|docs") as raised:
            tick()
        said = dg.serialize_value(serializable_error_info_from_exc_info((raised.type, raised.value, raised.tb)))
        assert "http://user:***@127.0.0.1:9/x.tar" in said
        assert "5ec2e7" not in said
