"""Sensor and schedule ticks: shards become partitions and runs, once, and never two runs of one partition."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mm_assets.etl.dataset_store import DatasetStore
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import make_manifest, register_dataset, run_partitions
from mm_assets.orchestration.resources import StorageRoot
from mm_assets.spec import DatasetSpec

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]


class Ticker:
    """Evaluates one sensor of a dataset again and again, as the daemon does."""

    def __init__(self, instance: dg.DagsterInstance, spec: DatasetSpec, name: str) -> None:
        self.instance = instance
        self.spec = spec
        self.definitions = build_definitions(spec)
        self.sensor = self.definitions.resolve_sensor_def(name)
        self.cursor: str | None = None

    def tick(self) -> Any:
        """One evaluation; its cursor and partition requests are carried out."""
        with dg.build_sensor_context(
            instance=self.instance,
            instance_ref=self.instance.get_ref(),
            cursor=self.cursor,
            definitions=self.definitions,
            resources={f"{self.spec.name}_storage": StorageRoot(root=self.spec.root)},
        ) as context:
            result = self.sensor.evaluate_tick(context)
        self.cursor = result.cursor
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        return result


def keys_of(result: object) -> list[str]:
    return [request.partition_key for request in result.run_requests or []]  # type: ignore[attr-defined]


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
    """A shard is taken only after its fingerprint has stood still for the settle time, whatever its own clock says."""
    import os
    import time

    folder = inbox("docs-00000.tar")
    future = time.time() + 10_000
    os.utime(folder / "docs-00000.tar", (future, future))
    from dataclasses import replace

    spec = replace(demo_spec("docs", shards=str(folder)), settle_seconds=60.0)
    ticker = Ticker(instance, spec, "docs_shards")
    now = time.time()
    monkeypatch.setattr("mm_assets.etl.register.time.time", lambda: now)
    assert keys_of(ticker.tick()) == []
    monkeypatch.setattr("mm_assets.etl.register.time.time", lambda: now + 59)
    assert keys_of(ticker.tick()) == []
    monkeypatch.setattr("mm_assets.etl.register.time.time", lambda: now + 61)
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
    (run,) = run_partitions([(spec, "captions-00000")])
    assert run.ok
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
    assert _schedule_keys(instance, spec) == ["docs-00001"]


def _schedule_keys(instance: dg.DagsterInstance, spec: DatasetSpec) -> list[str]:
    definitions = build_definitions(spec)
    with dg.build_schedule_context(
        instance=instance,
        instance_ref=instance.get_ref(),
        scheduled_execution_time=datetime(2024, 1, 1, tzinfo=UTC),
        resources={f"{spec.name}_storage": StorageRoot(root=spec.root)},
        repository_def=definitions.get_repository_def(),
    ) as context:
        result = definitions.resolve_schedule_def(f"{spec.name}_pending").evaluate_tick(context)
    return [request.partition_key for request in result.run_requests or [] if request.partition_key]


def test_the_schedule_runs_what_is_pending(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """The schedule requests registered partitions without a marker, capped, and skips when there are none."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar")), runs_per_tick=1)
    assert _schedule_keys(instance, spec) == []
    register_dataset(instance, DatasetStore(spec))
    assert _schedule_keys(instance, spec) == ["docs-00000"]
    (run,) = run_partitions([(spec, "docs-00000")])
    assert run.ok
    assert _schedule_keys(instance, spec) == ["docs-00001"]


def test_new_markers_make_a_manifest(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """The marker sensor asks for one manifest per set of markers and for none without markers."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    ticker = Ticker(instance, spec, "captions_markers")
    assert not ticker.tick().run_requests
    register_dataset(instance, DatasetStore(spec))
    (run,) = run_partitions([(spec, "captions-00000")])
    assert run.ok
    assert len(ticker.tick().run_requests or []) == 1
    assert not ticker.tick().run_requests
    assert make_manifest(spec).ok


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
