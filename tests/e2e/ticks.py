"""Evaluates sensors and schedules as the daemon does."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.resources import StorageRoot
from mm_assets.pipeline.spec import DatasetSpec

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


def keys_of(result: Any) -> list[str]:
    return [request.partition_key for request in result.run_requests or []]


def schedule_keys(instance: dg.DagsterInstance, spec: DatasetSpec) -> list[str]:
    """The partitions of the runs that one tick of the schedule asks for."""
    return [request.partition_key for request in schedule_requests(instance, spec) if request.partition_key]


def schedule_requests(instance: dg.DagsterInstance, spec: DatasetSpec) -> list[dg.RunRequest]:
    """These requests."""
    return list(schedule_tick(instance, spec).run_requests or [])


def schedule_tick(instance: dg.DagsterInstance, spec: DatasetSpec) -> Any:
    """What one tick gives; the type is not public."""
    definitions = build_definitions(spec)
    with dg.build_schedule_context(
        instance=instance,
        instance_ref=instance.get_ref(),
        scheduled_execution_time=datetime(2024, 1, 1, tzinfo=UTC),
        resources={f"{spec.name}_storage": StorageRoot(root=spec.root)},
        repository_def=definitions.get_repository_def(),
    ) as context:
        return definitions.resolve_schedule_def(f"{spec.name}_pending").evaluate_tick(context)
