"""Runs that died: they do not block their partitions, and those that may be alive are left alone."""

import threading
import time
from pathlib import Path

import dagster as dg
import pytest

from mm_assets.orchestration import runs
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset, sync
from mm_assets.orchestration.runs import PROCESS_TAG, full_pool_said
from mm_assets.pipeline.state.claims import Claim, process_tag
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.chain import run_partition
from .loads import run_partitions
from .ticks import Inbox, SpecOf, Ticker, keys_of, schedule_keys

NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="only /proc of Linux distinguishes a process from a later one of its number",
)


def test_a_load_takes_a_slot_of_its_pool(
    instance: dg.DagsterInstance, demo_spec: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load waits for a slot, which a live run has, and says so; that of a run whose process is gone is freed."""
    spec = demo_spec("captions", pool="disks")
    dataset, storage = DatasetStore(spec), instance.event_log_storage
    register_dataset(instance, dataset)
    storage.set_concurrency_slots("disks", 1)
    assert full_pool_said(instance, dataset) is None
    storage.claim_concurrency_slot("disks", "12345678-a", "step")
    said = "waiting for a slot of the pool 'disks': its limit is 1, in use by 12345678"
    assert full_pool_said(instance, dataset) == said
    blocked = threading.Event()

    def free_when_blocked() -> None:
        ends = time.monotonic() + 60
        while not blocked.is_set() and time.monotonic() < ends:
            messages = [entry.message for run in instance.get_runs() for entry in instance.all_logs(run.run_id)]
            if "Step blocked by limit for pool disks" in messages:
                blocked.set()
            time.sleep(0.1)
        storage.free_concurrency_slots_for_run("12345678-a")

    freeing = threading.Thread(target=free_when_blocked)
    freeing.start()
    (run,) = run_partitions([(spec, "captions-00000")])
    freeing.join()
    assert run.ok
    assert blocked.is_set()
    assert storage.get_concurrency_info("disks").active_slot_count == 0
    job = build_definitions(spec).resolve_job_def("captions_load")
    dead = instance.create_run_for_job(
        job_def=job, tags={PROCESS_TAG: "of a process"}, status=dg.DagsterRunStatus.STARTED
    )
    storage.claim_concurrency_slot("disks", dead.run_id, "step")
    assert full_pool_said(instance, dataset) is not None, "it may be alive on another host"
    monkeypatch.setattr(runs, "process_is_gone", lambda run_id, _: run_id == dead.run_id)
    assert full_pool_said(instance, dataset) is None
    assert storage.get_concurrency_info("disks").active_slot_count == 0


@NEEDS_PROC
@pytest.mark.parametrize("killed", [True, False])
def test_a_killed_run_does_not_block_its_partition(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, killed: bool
) -> None:
    """A started run whose process is gone is failed, and its partition requested; one whose process lives is not."""
    import subprocess
    import sys

    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    job = build_definitions(spec).resolve_job_def("docs_pack")
    run = instance.create_run_for_job(
        job_def=job, tags={"dagster/partition": "docs-00000"}, status=dg.DagsterRunStatus.STARTED
    )
    code = f"from mm_assets.pipeline.state.claims import process_tag; print(process_tag({run.run_id!r}), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        tag = child.stdout.readline().strip()
        instance.add_run_tags(run.run_id, {PROCESS_TAG: tag})
        if killed:
            child.kill()
            child.wait()
        expected = ["docs-00000"] if killed else []
        assert schedule_keys(instance, spec) == expected
        assert keys_of(Ticker(instance, spec, "docs_shards").tick()) == expected
        child.kill()
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.is_finished == killed


@pytest.mark.parametrize(("sensor", "job"), [("docs_shards", "docs_pack"), ("docs_records", "docs_manifest")])
def test_a_sensor_without_work_ends_a_dead_run(
    instance: dg.DagsterInstance,
    demo_spec: SpecOf,
    inbox: Inbox,
    monkeypatch: pytest.MonkeyPatch,
    sensor: str,
    job: str,
) -> None:
    """A run that a sensor requested and whose process is gone is failed by a later tick, to be repeated by Dagster."""
    from mm_assets.orchestration import runs

    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    if sensor == "docs_records":
        run_partition(DatasetStore(spec), "docs-00000")
    ticker = Ticker(instance, spec, sensor)
    assert len(ticker.tick().run_requests or []) == 1
    run = instance.create_run_for_job(
        job_def=build_definitions(spec).resolve_job_def(job),
        tags={"dagster/partition": "docs-00000", PROCESS_TAG: "of a process"},
        status=dg.DagsterRunStatus.STARTED,
    )
    monkeypatch.setattr(runs, "process_is_gone", lambda run_id, tag: tag == "of a process")
    assert not ticker.tick().run_requests
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.FAILURE


@NEEDS_PROC
@pytest.mark.parametrize(
    ("status", "limit_seconds"), [(dg.DagsterRunStatus.STARTED, 300.0), (dg.DagsterRunStatus.STARTING, 3600.0)]
)
def test_a_silent_run_is_given_up(
    instance: dg.DagsterInstance,
    demo_spec: SpecOf,
    inbox: Inbox,
    monkeypatch: pytest.MonkeyPatch,
    status: dg.DagsterRunStatus,
    limit_seconds: float,
) -> None:
    """A run on another host without a claim blocks its partition for 5 minutes, one that has not begun for an hour."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    job = build_definitions(spec).resolve_job_def("docs_pack")
    run = instance.create_run_for_job(job_def=job, tags={"dagster/partition": "docs-00000"}, status=status)
    instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id} other/x boot 1 2"})
    assert schedule_keys(instance, spec) == []
    now = time.monotonic()
    monkeypatch.setattr("mm_assets.orchestration.runs.time.monotonic", lambda: now + 0.9 * limit_seconds)
    assert schedule_keys(instance, spec) == []
    monkeypatch.setattr("mm_assets.orchestration.runs.time.monotonic", lambda: now + 1.1 * limit_seconds)
    assert schedule_keys(instance, spec) == ["docs-00000"]


@NEEDS_PROC
def test_a_run_on_another_host_is_alive_while_it_renews_its_claim(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another host that has said nothing for hours, and renews its claim, keeps its partition."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar")))
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    job = build_definitions(spec).resolve_job_def("docs_pack")
    run = instance.create_run_for_job(
        job_def=job, tags={"dagster/partition": "docs-00000"}, status=dg.DagsterRunStatus.STARTED
    )
    instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id} other/x boot 1 2"})
    assert schedule_keys(instance, spec) == []
    now = time.monotonic()
    monkeypatch.setattr("mm_assets.orchestration.runs.time.monotonic", lambda: now + 7200)
    claim = Claim(load=run.run_id, process="other/x boot 1 2", keys=frozenset({"docs-00000"}))
    name = f"claims/{run.run_id}.json"
    dataset.store.write_bytes(name, claim.to_bytes(1))
    assert schedule_keys(instance, spec) == []
    dataset.store.delete(name)
    assert schedule_keys(instance, spec) == [], "between two steps a run has no claim"
    monkeypatch.setattr("mm_assets.orchestration.runs.time.monotonic", lambda: now + 7600)
    assert schedule_keys(instance, spec) == ["docs-00000"]


def test_a_dead_manifest_run_does_not_block_the_next(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensor of manifests waits for a manifest run that may live, and not for one that cannot."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    run_partition(dataset, "captions-00000")
    job = build_definitions(spec).resolve_job_def("captions_manifest")
    instance.create_run_for_job(job_def=job, status=dg.DagsterRunStatus.STARTED)
    ticker = Ticker(instance, spec, "captions_records")
    assert not ticker.tick().run_requests
    now = time.monotonic()
    monkeypatch.setattr("mm_assets.orchestration.runs.time.monotonic", lambda: now + 90_000)
    assert len(ticker.tick().run_requests or []) == 1


def test_a_load_that_could_not_report_its_end_is_ended(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """`sync` ends a load whose process has exited and that Dagster shows as running, and no other."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    job, loads = build_definitions(spec).resolve_job_def("captions_load"), list[str]()
    for has_exited in (True, False):
        run = instance.create_run_for_job(job_def=job, status=dg.DagsterRunStatus.STARTED)
        tag = process_tag(run.run_id)
        if tag is None:
            pytest.skip("loads are tagged with their process on Linux only: other systems have no /proc")
        start = "0" if has_exited else tag.split(" ")[-1]  # else the process id was reused
        instance.add_run_tags(run.run_id, {PROCESS_TAG: " ".join([*tag.split(" ")[:-1], start])})
        loads.append(run.run_id)
    sync(DatasetStore(spec))
    ended, live = (instance.get_run_by_id(run_id) for run_id in loads)
    assert ended is not None
    assert live is not None
    assert [ended.status, live.status] == [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED]
