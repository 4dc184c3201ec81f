"""One partition from its shards to its record, as Dagster runs it."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

import mm_assets
from mm_assets.checks.catalog import CATALOG
from mm_assets.errors import SourceError
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.pipeline.chain import FILTERED_ROWS, PACKED_STAGES, TABLES
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions
from mm_assets.rows.parquet import ParquetSink
from mm_assets.summaries import bytes_said

from ..pipeline.chain import at_work, stages_of, table_name
from .files import files_of
from .loads import make_manifest, pack, run_partitions

SpecOf = Callable[..., DatasetSpec]
write = ParquetSink.write


def run_all(instance: dg.DagsterInstance, spec: DatasetSpec) -> DatasetStore:
    """Registers and runs every partition; fails where one does."""
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    for run in run_partitions([(spec, key) for key in pending_partitions(dataset)]):
        assert run.failures == ()
    return dataset


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in files_of(folder)}


def made_files(dataset: DatasetStore) -> list[str]:
    """The files that the partitions' stages made."""
    made = ("packed", "records", *TABLES)
    return [name for folder in made for name in sorted(dataset.store.sizes(folder))]


@pytest.mark.parametrize(
    ("name", "partitions", "modalities"),
    [
        ("docs", 2, {"text", "image", "metadata"}),
        ("captions", 1, {"image", "text", "metadata"}),
        ("speech", 1, {"audio", "words", "text", "metadata"}),
        ("video", 1, {"clip", "subtitles", "text", "metadata", "rest", "rows"}),
    ],
)
def test_a_demo_dataset_becomes_packed_files(
    instance: dg.DagsterInstance, demo_spec: SpecOf, name: str, partitions: int, modalities: set[str]
) -> None:
    """Each demo dataset runs from shard to manifest, and the manifest opens as one dataset with every sample."""
    spec = demo_spec(name)
    dataset = run_all(instance, spec)
    assert make_manifest(spec).ok
    assert pending_partitions(dataset) == []
    for form in ("mult", "mstr"):
        with mm_assets.open(dataset.store.url_of("manifest.json"), format=form) as opened:
            assert set(opened.fields) == modalities
            kept = sum(stages_of(dataset, key)[PACKED_STAGES["mult"]].counts["samples"] for key in dataset.partitions())
            assert len(opened) == kept > 0
            assert opened[0]["metadata"] is not None
            assert opened.find(opened.sample_ids[len(opened) - 1]) == len(opened) - 1
    assert len(DatasetState(dataset).published()) == partitions


def test_a_second_run_gives_identical_bytes(instance: dg.DagsterInstance, demo_spec: SpecOf, root: Path) -> None:
    """Running a partition again with the same input and configuration changes no byte of any file."""
    spec = demo_spec("docs")
    run_all(instance, spec)
    before = contents(root)
    for run in run_partitions([(spec, "docs-00000"), (spec, "docs-00001")]):
        assert run.ok
    assert contents(root) == before


@pytest.mark.parametrize(
    ("retain", "materialize"),
    [
        ("filtered", "read"),
        ("none", "write"),
        pytest.param("filtered", "write", marks=pytest.mark.slow),
        pytest.param("none", "read", marks=pytest.mark.slow),
    ],
)
def test_the_job_leaves_media_in_the_shard_as_a_load_does(
    instance: dg.DagsterInstance, demo_spec: SpecOf, root: Path, tmp_path: Path, retain: str, materialize: str
) -> None:
    """With `retain` the job of one partition gives the files of a load, and again where they are there already."""
    spec = demo_spec("captions", retain=retain, materialize=materialize)
    dataset = run_all(instance, spec)
    loaded = {name: dataset.store.read_bytes(name) for name in made_files(dataset)}
    shutil.rmtree(root / spec.name)
    register_dataset(instance, dataset)
    (key,) = dataset.partitions()
    for _ in range(2):
        assert pack(instance, spec, key).success
        assert {name: dataset.store.read_bytes(name) for name in made_files(dataset)} == loaded
    assert pending_partitions(dataset) == []


def test_write_mode_keeps_the_same_rows_as_read_mode(
    instance: dg.DagsterInstance, demo_spec: SpecOf, tmp_path: Path
) -> None:
    """Materializing on write leaves bytes out of materialized_rows and gives the same filtered and packed data."""
    read = run_all(instance, demo_spec("docs"))
    write = run_all(instance, demo_spec("docs", materialize="write", name="docs_w"))
    for key in ("docs-00000", "docs-00001"):
        bare = pq.read_table(write.store.path_of(table_name(write, "materialized_rows", key)))
        assert bare["binary_content"].null_count == bare.num_rows
        tables = [pq.read_table(d.store.path_of(table_name(d, "filtered_rows", key))) for d in (read, write)]
        assert tables[0].equals(tables[1])


def in_place(value: dg.MetadataValue) -> bool:
    """Whether Dagster's pages show a value without a click."""
    return not isinstance(value, dg.MarkdownMetadataValue) or len(value.md_str) < 1000


def metadata_of(instance: dg.DagsterInstance, *key: str) -> Mapping[str, Any]:
    """The metadata of the latest materialization of an asset, all of it shown in place."""
    event = instance.get_latest_materialization_event(dg.AssetKey(key))
    assert event is not None
    assert event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    assert all(map(in_place, metadata.values()))
    return metadata


def test_materializations_carry_metadata_worth_looking_at(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Callable[..., Path]
) -> None:
    """The event log shows counts, columns, first rows, samples with pictures, sizes and charts, and stays small."""
    dataset = run_all(instance, demo_spec("docs", shards=str(inbox("docs-00000.tar"))))
    metadata = metadata_of(instance, "docs", "filtered_rows")
    assert {"own_columns", "dagster/partition_row_count", "first_rows", "size", "bytes/filtered_rows"} <= set(metadata)
    assert {"count/kept", "count/dropped", "counts", "uri/filtered_rows", "other_files"} <= set(metadata)
    assert {"chart/content_size", "chart/position", "chart/image_aspect_ratio"} <= set(metadata)
    assert [name for name in metadata if name.startswith("sample/")] == [f"sample/{n}" for n in range(1, 5)]
    assert "![](data:image/webp;base64," in metadata["sample/1"].value
    size = metadata["bytes/filtered_rows"].value
    assert metadata["size"].value == bytes_said(size)
    event = instance.get_latest_materialization_event(dg.AssetKey(["docs", "filtered_rows"]))
    assert event is not None
    assert event.asset_materialization is not None
    tags = event.asset_materialization.tags or {}
    assert tags["dagster/data_version"] == stages_of(dataset, "docs-00000")[FILTERED_ROWS].files["filtered_rows"].sha256
    kinds = {dg.DagsterEventType.ASSET_MATERIALIZATION, dg.DagsterEventType.ASSET_CHECK_EVALUATION}
    stored = (entry.to_json() for entry in instance.all_logs(event.run_id, of_type=kinds))
    sizes = [len(entry) for entry in stored if '"partition": "docs-00000"' in entry]
    assert len(sizes) == 25
    assert sum(sizes) < 60_000


@pytest.mark.parametrize(
    ("name", "modality", "picture"),
    [
        ("captions", "| image | ImageField | 40 |", "webp"),
        ("speech", "| audio | AudioField | 5 |", "png"),
        ("video", "| clip | SyncedVideoAudioField | 1 |", "webp"),
    ],
)
def test_a_packed_asset_shows_its_product(
    instance: dg.DagsterInstance, demo_spec: SpecOf, name: str, modality: str, picture: str
) -> None:
    """Of both formats the page has a sample with its picture, and the modalities with their samples and sizes."""
    run_all(instance, demo_spec(name))
    for form in ("mult", "mstr"):
        metadata = metadata_of(instance, name, f"packed_{form}")
        assert modality in metadata["modalities"].value
        assert f"data:image/{picture};base64," in metadata["sample/1"].value


def test_the_manifest_says_how_to_open_it(instance: dg.DagsterInstance, demo_spec: SpecOf) -> None:
    """The two lines of Python on the manifest's page open the dataset; totals, shards and schema are beside them."""
    spec = demo_spec("captions")
    run_all(instance, spec)
    metadata = metadata_of(instance, "captions", "manifest")
    code = re.fullmatch(r"```python\n(.*)\n```", metadata["open"].value, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    with names["dataset"] as opened:
        assert len(opened) == metadata["dagster/row_count"].value == 40
        columns = {column.name for column in metadata["dagster/column_schema"].value.columns}
        assert columns == set(opened.fields)
    assert metadata["totals"].value.startswith("40 samples in 1 partition  \nMULT 1.")
    assert max(map(len, metadata["open"].value.splitlines())) <= 36, "the page cuts off longer lines"
    assert "| captions-00000 | 40 |" in metadata["shards"].value
    assert metadata["losses"].value == metadata["left_out"].value == "nothing"


@pytest.mark.parametrize(("setting", "number"), [("grouped", 18), ("per_rule", len(CATALOG)), ("rollup", 6)])
def test_every_check_reports_a_result(
    instance: dg.DagsterInstance, demo_spec: SpecOf, setting: str, number: int
) -> None:
    """Each group, rule or asset has passed on the partition, with a result of its own, and that of the manifest."""
    spec = demo_spec("captions", checks=setting)
    run_all(instance, spec)
    keys = list(build_definitions(spec).resolve_asset_graph().asset_check_keys)
    records = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    statuses = [record.status.value for record in records.values()]
    assert statuses == ["SUCCEEDED"] * (number + 1)


@pytest.mark.parametrize("setting", ["grouped", "per_rule", "rollup"])
def test_a_failed_check_blocks_and_is_named(
    instance: dg.DagsterInstance, demo_spec: SpecOf, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Rows that go astray make a check fail; nothing downstream runs, and nothing is published."""
    import pyarrow as pa

    def lossy(self: object, batch: pa.RecordBatch) -> None:
        real(self, batch.slice(0, batch.num_rows - 1))

    real = ParquetSink.write
    spec = demo_spec("captions", checks=setting)
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    with monkeypatch.context() as patched:
        patched.setattr(ParquetSink, "write", lossy)
        (run,) = run_partitions([(spec, "captions-00000")])
    assert not run.ok
    assert any("check" in line and " violation" in line for line in run.failures)
    assert DatasetState(dataset).published() == {}
    with pytest.raises(SourceError, match=r"failed its check|has not been made"):
        at_work(publish.publish, dataset, "captions-00000")
    (again,) = run_partitions([(spec, "captions-00000")])
    assert again.ok


def test_a_damaged_shard_does_not_stop_the_others(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Callable[..., Path]
) -> None:
    """A truncated shard fails its own partition, with file, byte offset and losses; the others are published."""
    folder = inbox("docs-00000.tar", "docs-00001.tar")
    whole = (folder / "docs-00001.tar").read_bytes()
    (folder / "docs-00001.tar").write_bytes(whole[: len(whole) // 2])
    spec = demo_spec("docs", shards=str(folder))
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    runs = {run.partition: run for run in run_partitions([(spec, key) for key in dataset.partitions()])}
    assert runs["docs-00000"].ok
    (failure,) = runs["docs-00001"].failures
    assert "docs-00001.tar" in failure
    assert "at byte" in failure
    (load,) = instance.get_runs()
    events = (entry.dagster_event for entry in instance.all_logs(load.run_id))
    (step,) = (event.step_failure_data for event in events if event is not None and event.is_step_failure)
    assert "| lost | raw_shards | failed | 1 |" in step.user_failure_data.metadata["losses"].md_str
    assert make_manifest(spec).ok
    manifest = json.loads(dataset.store.read_bytes("manifest.json"))
    assert manifest["partitions"]["key"] == ["docs-00000"]


def test_a_changed_shard_is_not_mixed_with_an_old_index(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Callable[..., Path]
) -> None:
    """A stage that finds another shard than the one indexed refuses and says what to do."""
    folder = inbox("captions-00000.tar")
    spec = demo_spec("captions", shards=str(folder))
    dataset = DatasetStore(spec)
    register(dataset)
    at_work(stages.raw_shards, dataset, "captions-00000")
    shutil.copyfile(folder / "captions-00000.tar", folder / "copy")
    (folder / "copy").replace(folder / "captions-00000.tar")
    with pytest.raises(SourceError, match="changed since it was indexed"):
        at_work(stages.rows, dataset, "captions-00000")


def test_a_rollup_remembers_the_partitions_that_failed(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One result per asset speaks of all partitions: it is an error until those pass that failed, and stops no other.

    In the job of one partition an error would stop it, so it warns. A load takes back at once what passed.
    """
    spec = demo_spec("docs", checks="rollup", shards=str(inbox("docs-00000.tar", "docs-00001.tar")))
    dataset, key = DatasetStore(spec), dg.AssetCheckKey(dg.AssetKey(["docs", "raw_shards"]), "all_rules")
    register_dataset(instance, dataset)

    def latest() -> tuple[bool, str, str | None]:
        record = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
        assert record.event is not None
        assert record.partition is None
        found = record.event.get_dagster_event().asset_check_evaluation_data
        return found.passed, found.severity.value, found.description

    with monkeypatch.context() as patched:
        patched.setattr(ParquetSink, "write", lambda self, batch: write(self, batch.slice(0, batch.num_rows - 1)))
        (failed,) = run_partitions([(spec, "docs-00000")])
    assert not failed.ok
    passed, severity, said = latest()
    assert (passed, severity) == (False, "ERROR")
    assert said is not None
    assert said.startswith("docs-00000: members: 1 violation of: ")
    assert pack(instance, spec, "docs-00001").success
    assert latest() == (False, "WARN", "1 partition failed before: docs-00000")
    (other,) = run_partitions([(spec, "docs-00001")])
    assert other.ok
    assert latest() == (False, "ERROR", "1 partition failed before: docs-00000")
    assert set(DatasetState(dataset).published()) == {"docs-00001"}
    assert run_partitions([(spec, "docs-00000")])[0].ok
    assert latest() == (True, "ERROR", None)


def test_packed_formats_can_be_materialized_alone(instance: dg.DagsterInstance, demo_spec: SpecOf) -> None:
    """The two packed assets are one computation that can be subset; the bytes are the same either way."""
    spec = demo_spec("captions")
    dataset = run_all(instance, spec)
    before = stages_of(dataset, "captions-00000")[PACKED_STAGES["mstr"]].files["mstr"]
    job = build_definitions(spec).resolve_job_def("captions_pack")
    result = job.execute_in_process(
        instance=instance,
        partition_key="captions-00000",
        asset_selection=[dg.AssetKey(["captions", "packed_mstr"])],
    )
    assert result.success
    assert [e.asset_key.path[-1] for e in result.get_asset_materialization_events() if e.asset_key] == ["packed_mstr"]
    assert stages_of(dataset, "captions-00000")[PACKED_STAGES["mstr"]].files["mstr"] == before


@pytest.mark.parametrize(("setting", "check"), [("grouped", "schema"), ("rollup", "all_rules")])
def test_checks_of_packed_files_can_be_executed_alone(
    instance: dg.DagsterInstance, demo_spec: SpecOf, setting: str, check: str
) -> None:
    """Executing one check judges the file that is there; after the file was damaged it fails."""
    spec = demo_spec("captions", checks=setting)
    dataset = run_all(instance, spec)
    selected = {dg.AssetCheckKey(dg.AssetKey(["captions", "packed_mult"]), check)}
    definitions = build_definitions(spec)

    def execute(partition: str | None = "captions-00000") -> dg.ExecuteInProcessResult:
        job = definitions.resolve_job_def("captions_pack")
        only = job.get_subset(asset_selection=set(), asset_check_selection=selected)
        tags = {} if partition is None else {"dagster/partition": partition}
        return only.execute_in_process(instance=instance, tags=tags, raise_on_error=False)

    result = execute()
    assert [(e.check_name, e.passed) for e in result.get_asset_check_evaluations()] == [(check, True)]
    assert result.get_asset_materialization_events() == []
    path = Path(dataset.store.path_of(stages_of(dataset, "captions-00000")[PACKED_STAGES["mult"]].files["mult"].path))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert [(e.check_name, e.passed) for e in execute().get_asset_check_evaluations()] == [(check, False)]
    if setting == "rollup":  # without a partition it is what the records of all partitions say
        (found,) = execute(None).get_asset_check_evaluations()
        assert (found.passed, found.description) == (False, "1 of 1 partition failed")


@pytest.mark.parametrize("job", ["captions_pack", "captions_check"])
@pytest.mark.parametrize(
    ("tags", "fault"),
    [
        ({}, "no partition: "),
        (
            {"dagster/partition": "captions-0000"},
            "'captions-0000', which is not registered; did you mean captions-00000?: ",
        ),
    ],
)
def test_a_run_without_a_partition_says_what_is_missing(
    instance: dg.DagsterInstance, demo_spec: SpecOf, job: str, tags: dict[str, str], fault: str
) -> None:
    """It fails before its first step, with the option to give, a key that there is, and the command that needs none."""
    spec = demo_spec("captions")
    register_dataset(instance, DatasetStore(spec))
    definition = build_definitions(spec).resolve_job_def(job)
    run = instance.create_run_for_job(definition, tags=tags)
    execute_run(InMemoryJob(definition), run, instance)
    (failed,) = [e.get_dagster_event() for e in instance.all_logs(run.run_id) if "FAILURE" in str(e.dagster_event_type)]
    said = failed.event_specific_data.error.message.partition(": ")[2]
    assert said.startswith(f"the run names {fault}")
    assert '--tags \'{"dagster/partition": "captions-00000"}\'' in said
    assert "`mm-assets run --dataset captions`" in said


def test_checks_that_never_ran_are_not_failed(
    instance: dg.DagsterInstance, demo_spec: SpecOf, demo_shards: Path, inbox: Callable[..., Path]
) -> None:
    """A run that ends at a truncated shard leaves no check planned: Dagster would show those of all stages failed."""
    folder = inbox("captions-00000.tar")
    (folder / "cut.tar").write_bytes((demo_shards / "captions-00000.tar").read_bytes()[:30_000])
    spec = demo_spec("captions", shards=str(folder))
    register_dataset(instance, DatasetStore(spec))
    definitions = build_definitions(spec)
    keys = [
        key for asset in definitions.assets or () if isinstance(asset, dg.AssetsDefinition) for key in asset.check_keys
    ]
    before: dict[dg.AssetCheckKey, set[str]] = {}
    for partition, is_ok in (("captions-00000", True), ("cut", False)):
        assert pack(instance, spec, partition).success is is_ok
        history = {key: instance.event_log_storage.get_asset_check_execution_history(key, limit=9) for key in keys}
        found = {key: {record.status.value for record in records} for key, records in history.items()}
        before = before or found
    assert found == before
    assert set().union(*found.values()) == {"SUCCEEDED"}
