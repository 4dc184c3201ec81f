"""Sensor and schedule ticks: shards become partitions and runs, once, and never two runs of one partition."""

import shutil
import time
from pathlib import Path

import dagster as dg
import pytest

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.orchestration.recorded_load import run_load
from mm_assets.orchestration.runs import ATTEMPT_TAG, load_config, loaded_partitions
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import build_manifest
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.store import Store

from ..pipeline.chain import record_of, run_partition
from .loads import run_partitions
from .ticks import Inbox, SpecOf, Ticker, keys_of, schedule_keys, schedule_requests, schedule_tick


def test_new_shards_become_partitions_and_runs_in_one_tick(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """A tick adds the keys and requests the runs; the next one has nothing to do; a further shard comes alone."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar")))
    ticker = Ticker(instance, spec, "docs_shards")
    assert keys_of(ticker.tick()) == ["docs-00000"]
    assert instance.get_dynamic_partitions("docs_shards") == ["docs-00000"]
    assert keys_of(ticker.tick()) == []
    inbox("docs-00001.tar")
    assert keys_of(ticker.tick()) == ["docs-00001"]


def test_an_empty_place_is_waited_for(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """Before the first shard arrives a tick skips and does not fail."""
    ticker = Ticker(instance, demo_spec("docs", shards=str(inbox())), "docs_shards")
    result = ticker.tick()
    assert keys_of(result) == []
    assert "0 partitions" in (result.skip_message or "")


def test_a_changed_shard_is_a_new_run(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """A replaced shard is requested again, with another run key, because Dagster uses a key up."""
    folder = inbox("docs-00000.tar")
    ticker = Ticker(instance, demo_spec("docs", shards=str(folder)), "docs_shards")
    first = (ticker.tick().run_requests or [])[0].run_key
    shutil.copyfile(folder / "docs-00000.tar", folder / ".copy")
    (folder / ".copy").replace(folder / "docs-00000.tar")
    second = (ticker.tick().run_requests or [])[0].run_key
    assert first != second


def test_a_young_shard_waits_for_its_settle_time(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is taken only after its fingerprint has not changed for the settle time, whatever its own clock says."""
    import os

    folder = inbox("docs-00000.tar")
    future = time.time() + 10_000
    os.utime(folder / "docs-00000.tar", (future, future))

    spec = demo_spec("docs", shards=str(folder)).replace(settle_seconds=60.0)
    ticker = Ticker(instance, spec, "docs_shards")
    now = time.time()
    monkeypatch.setattr("mm_assets.pipeline.state.registration.time.time", lambda: now)
    assert keys_of(ticker.tick()) == []
    monkeypatch.setattr("mm_assets.pipeline.state.registration.time.time", lambda: now + 59)
    assert keys_of(ticker.tick()) == []
    monkeypatch.setattr("mm_assets.pipeline.state.registration.time.time", lambda: now + 61)
    assert keys_of(ticker.tick()) == ["docs-00000"]


def test_runs_of_a_tick_are_capped(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """A tick requests no more runs than the declaration allows; the rest comes with the next tick."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar")), runs_per_tick=1)
    ticker = Ticker(instance, spec, "docs_shards")
    assert keys_of(ticker.tick()) == ["docs-00000"]
    assert keys_of(ticker.tick()) == ["docs-00001"]
    assert keys_of(ticker.tick()) == []


def test_published_partitions_are_not_run_again(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """A sensor that starts after `mm-assets run` finds nothing to do."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    run_partition(DatasetStore(spec), "captions-00000")
    assert keys_of(Ticker(instance, spec, "captions_shards").tick()) == []


def test_a_partition_that_is_running_is_not_requested(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """Runs of one partition do not overlap: a run at work keeps sensor and schedule from asking for another."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar")))
    register_dataset(instance, DatasetStore(spec))
    job = build_definitions(spec).resolve_job_def("docs_pack")
    instance.create_run_for_job(
        job_def=job, tags={"dagster/partition": "docs-00000"}, status=dg.DagsterRunStatus.STARTED
    )
    assert keys_of(Ticker(instance, spec, "docs_shards").tick()) == ["docs-00001"]
    assert schedule_keys(instance, spec) == ["docs-00001"]


def test_the_schedule_runs_what_is_pending(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """The schedule requests registered partitions without a record, capped, and skips when there are none."""
    spec = demo_spec("docs", shards=str(inbox()), runs_per_tick=1)
    assert schedule_keys(instance, spec) == []
    inbox("docs-00000.tar", "docs-00001.tar")
    register_dataset(instance, DatasetStore(spec))
    assert schedule_keys(instance, spec) == ["docs-00000"]
    run_partition(DatasetStore(spec), "docs-00000")
    assert schedule_keys(instance, spec) == ["docs-00001"]


def test_the_schedule_alone_registers_and_runs(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """With `run_schedule: true` and nothing else, a tick adds new shards as partitions and requests their runs."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar")), run_schedule=True)
    assert schedule_keys(instance, spec) == ["docs-00000"]
    assert instance.get_dynamic_partitions("docs_shards") == ["docs-00000"]
    inbox("docs-00001.tar")
    assert schedule_keys(instance, spec) == ["docs-00000", "docs-00001"]


def test_a_tick_of_the_schedule_says_which_shards_it_leaves(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """A shard that may still be written is not registered, and the skipped tick says so and what registers it."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar"))).replace(settle_seconds=3600.0)
    tick = schedule_tick(instance, spec)
    assert not tick.run_requests
    assert "1 shards are younger than settle_seconds (3600)" in (tick.skip_message or "")
    assert "docs_shards" in (tick.skip_message or "")
    assert instance.get_dynamic_partitions("docs_shards") == []


def test_new_records_request_a_manifest(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """The sensor of records requests one manifest per set of records, and none without records."""
    folder = inbox("docs-00000.tar", "docs-00001.tar")
    spec = demo_spec("docs", shards=str(folder))
    ticker = Ticker(instance, spec, "docs_records")
    assert not ticker.tick().run_requests
    register_dataset(instance, DatasetStore(spec))
    job = build_definitions(spec).resolve_job_def("docs_manifest")
    for key in ("docs-00000", "docs-00001"):
        run_partition(DatasetStore(spec), key)
        assert len(ticker.tick().run_requests or []) == 1
        assert not ticker.tick().run_requests
        assert job.execute_in_process(instance=instance).success
        assert not ticker.tick().run_requests, "the manifest itself does not ask for another"


def test_a_manifest_that_failed_is_requested_again(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published stays out of the dataset until a manifest lists it: the next attempt is after a pause."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    run_partition(DatasetStore(spec), "captions-00000")
    ticker = Ticker(instance, spec, "captions_records")
    job = build_definitions(spec).resolve_job_def("captions_manifest")
    manifest = Path(DatasetStore(spec).store.path_of("manifest.json"))
    manifest.mkdir()  # it cannot be written
    (first,) = ticker.tick().run_requests or []
    assert not job.execute_in_process(instance=instance, raise_on_error=False, tags=first.tags).success
    manifest.rmdir()
    waiting = ticker.tick()
    assert not waiting.run_requests
    assert "the next attempt is in 10 minutes" in (waiting.skip_message or "")
    now = time.time()
    monkeypatch.setattr("mm_assets.orchestration.sensors.time.time", lambda: now + 601)
    (second,) = ticker.tick().run_requests or []
    assert second.run_key != first.run_key
    assert second.tags[ATTEMPT_TAG] == "2"
    assert job.execute_in_process(instance=instance, tags=second.tags).success
    assert "is up to date" in (ticker.tick().skip_message or "")


def test_a_manifest_of_a_load_is_not_made_again(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, tmp_path: Path
) -> None:
    """A sensor that starts after a load asks for no manifest, unless its instance does not know the newest one."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    (run,) = run_partitions([(spec, "captions-00000")])
    assert run.ok
    first = Ticker(instance, spec, "captions_records").tick()
    assert not first.run_requests
    assert "is up to date" in (first.skip_message or "")
    with dg.DagsterInstance.local_temp(str(tmp_path)) as other:
        assert len(Ticker(other, spec, "captions_records").tick().run_requests or []) == 1


def test_a_load_at_work_makes_the_manifest(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """While a load publishes partitions the sensor asks for no manifest, and afterwards its own is the newest."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar")))
    register_dataset(instance, DatasetStore(spec))
    ticker = Ticker(instance, spec, "docs_records")
    ticks: list[dg.SensorResult] = []
    with Processes(1) as processes:
        keys = ["docs-00000", "docs-00001"]
        assert run_load(spec, keys, engine=processes, observed=lambda _: ticks.append(ticker.tick())).ok
    assert [len(tick.run_requests or []) for tick in ticks] == [0, 0]
    assert all("is active" in (tick.skip_message or "") for tick in ticks)
    assert "is up to date" in (ticker.tick().skip_message or "")


def test_a_changed_declaration_fails_the_tick_with_what_to_do(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """When settings that decide the schema change, the sensor says so instead of mixing schemas."""
    from mm_assets.errors import ConfigError

    folder = str(inbox("captions-00000.tar"))
    Ticker(instance, demo_spec("captions", shards=folder), "captions_shards").tick()
    changed = demo_spec("captions", shards=folder, pack="generic")
    with pytest.raises((ConfigError, dg.DagsterError), match=r"captions_shards|--new-schema"):
        Ticker(instance, changed, "captions_shards").tick()


def _failed_run(instance: dg.DagsterInstance, spec: DatasetSpec, key: str, tags: dict[str, str]) -> None:
    """A run of the partition that has just failed."""
    job = build_definitions(spec).resolve_job_def(f"{spec.name}_pack")
    run = instance.create_run_for_job(
        job_def=job, tags={"dagster/partition": key, **tags}, status=dg.DagsterRunStatus.STARTED
    )
    instance.report_run_failed(run, "made to fail")


def test_a_state_that_recurs_is_a_new_run(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """A configuration that goes from A to B and back to A gives three run keys, because Dagster uses each up."""
    folder = str(inbox("docs-00000.tar"))
    first = demo_spec("docs", shards=folder)
    second = demo_spec("docs", shards=folder, renumber=not first.renumber)
    cursor, keys = None, []
    for spec in (first, second, first):
        ticker = Ticker(instance, spec, "docs_shards")
        ticker.cursor = cursor
        (request,) = ticker.tick().run_requests or []
        keys.append(request.run_key)
        assert not ticker.tick().run_requests
        cursor = ticker.cursor
    assert len(set(keys)) == 3


def test_a_new_schema_is_a_new_run(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """A schema that is decided again makes a requested partition due again, with another fingerprint."""
    folder = str(inbox("captions-00000.tar"))
    ticker = Ticker(instance, demo_spec("captions", shards=folder), "captions_shards")
    (first,) = ticker.tick().run_requests
    dataset = DatasetStore(ticker.spec)
    changed = dataset.schema().__class__.from_json({**dataset.schema().to_json(), "user_columns": []}, where="test")
    assert changed.digest != dataset.schema().digest
    dataset.write_schema(changed, dataset.registered(), decided_by="test")
    (second,) = ticker.tick().run_requests
    assert first.run_key != second.run_key
    assert first.tags[".dagster/mm_assets.fingerprint"] != second.tags[".dagster/mm_assets.fingerprint"]


def cursor_files(spec: DatasetSpec) -> list[str]:
    """The contents of the files that have the state of the sensor."""
    store = DatasetStore(spec).store
    return [store.read_bytes(name).decode() for name in store.sizes("cache/sensor")]


def test_the_cursor_forgets_what_is_published(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """The state names a partition from its request to its publication only, so it does not grow with the dataset."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    ticker = Ticker(instance, spec, "captions_shards")
    assert keys_of(ticker.tick()) == ["captions-00000"]
    (state,) = cursor_files(spec)
    assert "captions-00000" in state
    run_partition(DatasetStore(spec), "captions-00000")
    assert keys_of(ticker.tick()) == []
    assert '"file": ""' in (ticker.cursor or "")


def test_the_cursor_is_small(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has less than 1 kB with a thousand partitions that are requested or young, and at most two files remain."""
    folder = inbox("docs-00000.tar")
    for number in range(1000):
        (folder / f"x{number}.tar").symlink_to(folder / "docs-00000.tar")
    old, young = demo_spec("docs", shards=str(folder)), demo_spec("docs", shards=str(folder))
    monkeypatch.setattr("mm_assets.pipeline.state.registration.time.time", lambda: 1.0)  # before any modification
    young = young.replace(settle_seconds=3600.0)
    cursor = None
    for spec in (young, old, young, old):
        ticker = Ticker(instance, spec, "docs_shards")
        ticker.cursor = cursor
        ticker.tick()
        (folder / f"y{len(cursor or '')}{spec.settle_seconds}.tar").symlink_to(folder / "docs-00000.tar")
        cursor = ticker.cursor
        assert len(cursor or "") < 200
        assert max(map(len, cursor_files(spec))) > 30_000
        assert len(cursor_files(spec)) <= 2


def test_a_repeated_tick_requests_the_same(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """A tick whose requests were not stored is evaluated again with the old cursor, and gives the same run keys."""
    folder = inbox("docs-00000.tar")
    spec = demo_spec("docs", shards=str(folder))
    ticker = Ticker(instance, spec, "docs_shards")
    ticker.tick()
    inbox("docs-00001.tar")
    before, keys = ticker.cursor, []
    for _ in range(3):
        ticker.cursor = before
        (request,) = ticker.tick().run_requests or []
        keys.append((request.partition_key, request.run_key))
    assert len(set(keys)) == 1
    assert keys[0][0] == "docs-00001"
    assert keys_of(ticker.tick()) == []


def test_a_lost_state_requests_nothing_that_dagster_knows(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """Without the cache, what is running and what has failed as it is now is not requested again."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar")))
    ticker = Ticker(instance, spec, "docs_shards")
    first, second = ticker.tick().run_requests or []
    job = ticker.definitions.resolve_job_def("docs_pack")
    for request, status in ((first, dg.DagsterRunStatus.STARTED), (second, dg.DagsterRunStatus.STARTED)):
        tags = {**request.tags, "dagster/partition": request.partition_key or ""}
        run = instance.create_run_for_job(job_def=job, tags=tags, status=status)
        if request is second:
            instance.report_run_failed(run, "made to fail")
    for file in (Path(spec.root) / "docs" / "cache" / "sensor").iterdir():
        file.write_bytes(b"{")
    assert keys_of(ticker.tick()) == []
    shutil.rmtree(Path(spec.root) / "docs" / "cache")
    ticker.cursor = None
    assert keys_of(ticker.tick()) == []


def test_a_tick_that_finds_many_partitions_rolls_up_their_checks(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more partitions than `grouped` checks serve, the sensor has the next definitions roll them up."""
    monkeypatch.setattr("mm_assets.orchestration.checks.MOST_PARTITIONS", 1)
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar")))
    ticker = Ticker(instance, spec, "docs_shards")
    assert ticker.definitions.resolve_job_def("docs_check").partitions_def is not None
    assert len(keys_of(ticker.tick())) == 2
    assert build_definitions(spec).resolve_job_def("docs_check").partitions_def is None


def test_a_tick_with_nothing_new_reads_no_record(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sensor reads a record while nothing has changed: there may be very many."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    tickers = [Ticker(instance, spec, f"captions_{name}") for name in ("shards", "records")]
    register_dataset(instance, DatasetStore(spec))
    run_partition(DatasetStore(spec), "captions-00000")
    for ticker in tickers:
        ticker.tick()
    read: list[str] = []
    real = Store._get
    monkeypatch.setattr(Store, "_get", lambda self, name: (read.append(name), real(self, name))[1])
    for ticker in tickers:
        assert not ticker.tick().run_requests
    assert "shards.json" in read
    assert not [name for name in read if name.startswith("records/")]


def test_a_tick_lists_records_only_if_something_else_changed(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed shards are requested without a listing of records; what a manifest deletes is requested as well."""
    folder = inbox("docs-00000.tar", "docs-00001.tar")
    spec = demo_spec("docs", shards=str(folder))
    dataset, ticker = DatasetStore(spec), Ticker(instance, spec, "docs_shards")
    register_dataset(instance, dataset)
    assert all(run.ok for run in run_partitions([(spec, "docs-00000"), (spec, "docs-00001")]))
    listed: list[str] = []
    real = Store.listing
    monkeypatch.setattr(Store, "listing", lambda self, name: (listed.append(name), real(self, name))[1])

    def tick() -> tuple[list[str], bool]:
        """The keys that a tick requests, and whether it listed records."""
        listed.clear()
        return keys_of(ticker.tick()), "records" in listed

    assert tick() == ([], True)
    assert tick() == ([], False)
    (folder / "docs-00001.tar").write_bytes((folder / "docs-00001.tar").read_bytes() + bytes(10240))
    assert tick() == (["docs-00001"], False)
    assert tick() == ([], True)
    assert tick() == ([], False)
    record = record_of(dataset, "docs-00000")
    assert record is not None
    Path(dataset.store.path_of(record.packed["mult"].path)).unlink()
    assert list(build_manifest(dataset).withdrawn) == ["docs-00000"]
    assert tick() == (["docs-00000"], True)


def test_failing_partitions_do_not_starve_the_others(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed waits, longer each time; a partition that was never tried is run, and so is one that changed."""
    inbox("docs-00000.tar", "docs-00001.tar")
    spec = demo_spec("docs", shards=str(inbox()), runs_per_tick=1)
    register_dataset(instance, DatasetStore(spec))
    tags = _schedule_tags(instance, spec, "docs-00000")
    assert tags[".dagster/mm_assets.attempt"] == "1"
    _failed_run(instance, spec, "docs-00000", tags)
    assert schedule_keys(instance, spec) == ["docs-00001"]
    _failed_run(instance, spec, "docs-00001", {".dagster/mm_assets.fingerprint": "of another state"})
    assert schedule_keys(instance, spec) == ["docs-00001"]
    _failed_run(instance, spec, "docs-00001", _schedule_tags(instance, spec, "docs-00001"))
    assert schedule_keys(instance, spec) == []
    now = time.time()
    monkeypatch.setattr("mm_assets.orchestration.schedules.time.time", lambda: now + 700)
    tags = _schedule_tags(instance, spec, "docs-00000")
    assert tags[".dagster/mm_assets.attempt"] == "2"
    _failed_run(instance, spec, "docs-00000", tags)
    assert schedule_keys(instance, spec) == ["docs-00001"]
    both = demo_spec("docs", shards=str(inbox()), runs_per_tick=2)
    monkeypatch.setattr("mm_assets.orchestration.schedules.time.time", lambda: now + 1800)
    assert schedule_keys(instance, both) == ["docs-00001"], "the second pause is twice the first"
    monkeypatch.setattr("mm_assets.orchestration.schedules.time.time", lambda: now + 2000)
    assert schedule_keys(instance, both) == ["docs-00001", "docs-00000"]


def _schedule_tags(instance: dg.DagsterInstance, spec: DatasetSpec, key: str) -> dict[str, str]:
    """Tags of the run that the schedule asks for first, which must be this partition's."""
    (request,) = schedule_requests(instance, spec)
    assert request.partition_key == key
    return {
        name: value for name, value in request.tags.items() if name.startswith(("mm_assets/", ".dagster/mm_assets."))
    }


def test_whatever_changes_a_manifest_makes_one(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """Records, registered shards, the configuration and the schema each ask for a manifest when they change."""
    folder = inbox("docs-00000.tar", "docs-00001.tar")
    spec = demo_spec("docs", shards=str(folder))
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    run_partition(dataset, "docs-00000")
    ticker = Ticker(instance, spec, "docs_records")

    def requests() -> list[int]:
        return [len(ticker.tick().run_requests or []) for _ in range(2)]

    assert requests() == [1, 0]
    run_partition(dataset, "docs-00001")
    assert requests() == [1, 0], "a partition was published"
    (folder / "docs-00001.tar").unlink()
    register_dataset(instance, dataset)
    assert requests() == [1, 0], "a shard is gone"
    changed = Ticker(instance, demo_spec("docs", shards=str(folder), renumber=not spec.renumber), "docs_records")
    changed.cursor, ticker = ticker.cursor, changed
    assert requests() == [1, 0], "the configuration changed"
    schema = dataset.schema()
    other = schema.__class__.from_json({**schema.to_json(), "user_columns": []}, where="test")
    dataset.write_schema(other, dataset.registered(), decided_by="test")
    assert requests() == [int(other.digest != schema.digest), 0]
    for name in dataset.store.sizes("records"):
        dataset.store.delete(name)
    assert requests() == [1, 0], "the last record is gone"


def test_many_pending_partitions_are_one_run(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """Above the threshold the sensor requests one load of all that is pending; then it requests nothing."""
    folder = inbox("docs-00000.tar", "docs-00001.tar")
    spec = demo_spec("docs", shards=str(folder), bulk_threshold=1, runs_per_tick=1)
    shards = Ticker(instance, spec, "docs_shards")
    (request,) = shards.tick().run_requests
    assert request.job_name == "docs_load"
    assert loaded_partitions(dg.DagsterRun("docs_load", run_config=request.run_config), spec) == [
        "docs-00000",
        "docs-00001",
    ]
    assert not shards.tick().run_requests


def test_a_load_at_work_is_left_alone(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """The schedule requests nothing that a live load is working on, or may be working on."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar")))
    job = build_definitions(spec).resolve_job_def("docs_load")
    for partitions, expected in ((["docs-00000"], ["docs-00001"]), ([], [])):
        config = load_config(spec, partitions)
        run = instance.create_run_for_job(job_def=job, run_config=config, status=dg.DagsterRunStatus.NOT_STARTED)
        assert schedule_keys(instance, spec) == expected
        instance.report_run_failed(run, "made to fail")


def test_one_load_runs_at_a_time(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """While a load is live the sensor requests no other; after its end it requests what is pending then."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar")), bulk_threshold=1)
    shards = Ticker(instance, spec, "docs_shards")
    job = shards.definitions.resolve_job_def("docs_load")
    config = load_config(spec, ["another"])
    live = instance.create_run_for_job(job_def=job, run_config=config, status=dg.DagsterRunStatus.NOT_STARTED)
    assert not shards.tick().run_requests
    instance.report_run_failed(live, "made to fail")
    (request,) = shards.tick().run_requests
    assert run_partitions([(spec, "docs-00000")])[0].ok
    job.execute_in_process(instance=instance, run_config=request.run_config, raise_on_error=False)
    key = dg.AssetKey(["docs", "raw_shards"])
    found = instance.fetch_materializations(dg.AssetRecordsFilter(key, asset_partitions=["docs-00000"]), limit=9)
    assert len(found.records) == 1, "what was published meanwhile is not run again"
    assert sorted(DatasetState(DatasetStore(spec)).records) == ["docs-00000", "docs-00001"]


@pytest.mark.parametrize(
    ("by", "formats"),
    [
        ("sensor", ["mult"]),
        ("schedule", ["mult", "mstr"]),
        pytest.param("sensor", ["mstr"], marks=pytest.mark.slow),
        pytest.param("sensor", ["mult", "mstr"], marks=pytest.mark.slow),
        pytest.param("schedule", ["mult"], marks=pytest.mark.slow),
        pytest.param("schedule", ["mstr"], marks=pytest.mark.slow),
    ],
)
def test_a_requested_run_starts_at_the_first_stale_stage(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, by: str, formats: list[str]
) -> None:
    """Sensor and schedule request the assets from there on, with their checks and the reason; the run publishes."""
    shards = str(inbox("captions-00000.tar"))
    stages = [
        "raw_shards",
        "rows",
        "materialized_rows",
        "filtered_rows",
        *(f"packed_{f}" for f in formats),
        "published",
    ]

    def requested(spec: DatasetSpec) -> list[dg.RunRequest]:
        if by == "schedule":
            return schedule_requests(instance, spec)
        return list(Ticker(instance, spec, "captions_shards").tick().run_requests or [])

    def check(spec: DatasetSpec, *, first: str, reason: str) -> None:
        (request,) = requested(spec)
        expected = stages[stages.index(first) :]
        assert [key.path[-1] for key in request.asset_selection or ()] == expected
        assert request.tags["mm_assets/reason"] == reason
        result = (
            build_definitions(spec)
            .resolve_job_def("captions_pack")
            .execute_in_process(
                instance=instance,
                partition_key=request.partition_key,
                asset_selection=list(request.asset_selection or ()),
                tags=dict(request.tags),
            )
        )
        made = {event.asset_key.path[-1] for event in result.get_asset_materialization_events() if event.asset_key}
        assert made == set(expected)
        assert {found.asset_key.path[-1] for found in result.get_asset_check_evaluations()} == made - {"published"}
        assert requested(spec) == []

    check(demo_spec("captions", shards=shards, formats=formats), first="raw_shards", reason="it has never run")
    filters = [{"type": "text_length", "min_chars": 2}]
    spec = demo_spec("captions", shards=shards, formats=formats, filters=filters)
    check(spec, first="filtered_rows", reason="`filters` changed")


def test_what_a_load_has_just_failed_is_not_requested(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """The sensor leaves a partition that `mm-assets run` failed as it is now, and requests it with another shard."""
    folder = inbox("captions-00000.tar")
    whole = (folder / "captions-00000.tar").read_bytes()
    (folder / "cut.tar").write_bytes(whole[:30_000])
    spec = demo_spec("captions", shards=str(folder))
    register_dataset(instance, DatasetStore(spec))
    ended = run_partitions([(spec, key) for key in ("captions-00000", "cut")])
    assert [run.ok for run in ended] == [True, False]
    ticker = Ticker(instance, spec, "captions_shards")
    assert [keys_of(ticker.tick()) for _ in range(2)] == [[], []]
    (folder / "cut.tar").write_bytes(whole)
    assert keys_of(ticker.tick()) == ["cut"]
