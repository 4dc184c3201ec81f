"""Stores events of a run in Dagster's event log.

Only this module uses private names of Dagster. They store the events of many partitions in one transaction; without
them each event is stored by the public call.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any, Self

import dagster as dg
import sqlalchemy
import sqlalchemy.exc
from dagster import DagsterEventType

from mm_assets.errors import masked_urls
from mm_assets.orchestration.checks import UNIQUE_IDS
from mm_assets.orchestration.events import Checked, Event, Line, Made, Planned
from mm_assets.orchestration.partitions import asset_key, shards_key
from mm_assets.orchestration.rollup import failed_before
from mm_assets.orchestration.runs import FailedRun, failed_runs
from mm_assets.pipeline.chain import MANIFEST, RAW_SHARDS, Stage
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["RunEvents", "forget_planned_checks", "is_known_manifest"]

_TAG = "dagster/"
_VERSION, _CODE = f"{_TAG}data_version", f"{_TAG}code_version"
_log = logging.getLogger(__name__)
_Entry: Any = dg.EventLogEntry  # its constructor has no annotations


def is_known_manifest(instance: dg.DagsterInstance, spec: DatasetSpec, digest: str) -> bool:
    """Whether the manifest with this digest is Dagster's latest one."""
    latest = _latest(instance, asset_key(spec, MANIFEST))
    return latest is not None and _tags(latest).get(_VERSION) == digest


def _latest(instance: dg.DagsterInstance, asset: dg.AssetKey, partition: str | None = None) -> Any:
    """Returns the record of the latest materialization of an asset, or of a partition of it; None if there is none."""
    wanted = dg.AssetRecordsFilter(asset, asset_partitions=None if partition is None else [partition])
    return next(iter(instance.fetch_materializations(wanted, limit=1).records), None)


def _tags(record: dg.EventLogRecord) -> Mapping[str, str]:
    made = record.asset_materialization
    return {} if made is None else made.tags or {}


class RunEvents:
    """Stores events of one step of a run in Dagster's event log.

    Args:
        instance: of the run.
        spec: the declaration.
        run_id: the run's; empty for events without a run.
        job_name: the run's job.
        step_key: the step, if there is one.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        spec: DatasetSpec,
        *,
        run_id: str,
        job_name: str,
        step_key: str | None,
    ) -> None:
        self._instance = instance
        self.spec = spec
        self._run_id = run_id
        self._job_name = job_name
        self._step_key = step_key
        self._has_warned = False
        self._failures: Mapping[str, FailedRun] | None = None
        self._observed: Mapping[str, int] | None = None
        self._made: dict[tuple[dg.AssetKey, str | None], Any] = {}  # latest materializations of the events at hand

    @classmethod
    def of(cls, context: dg.OpExecutionContext, spec: DatasetSpec) -> Self:
        """Returns those of the run of an op, for a declaration whose `checks` are settled."""
        step = context.op_def.name
        return cls(context.instance, spec, run_id=context.run_id, job_name=context.job_name, step_key=step)

    def versions(self, stage: Stage, keys: Collection[str] | None) -> Mapping[str, str]:
        """Returns the data version of the latest materialization of each partition; None asks for all partitions."""
        found = self._instance.event_log_storage.get_latest_tags_by_partition(
            asset_key(self.spec, stage),
            DagsterEventType.ASSET_MATERIALIZATION,
            [_VERSION],
            asset_partitions=None if keys is None else list(keys),
        )
        return {key: tags[_VERSION] for key, tags in found.items() if _VERSION in tags}

    def code_version(self, stage: Stage, key: str) -> str | None:
        """Returns the code version of the latest materialization of a partition."""
        latest = _latest(self._instance, asset_key(self.spec, stage), key)
        return None if latest is None else _tags(latest).get(_CODE)

    def failures(self) -> Mapping[str, FailedRun]:
        """Returns the latest failure of each partition before this run; the events of earlier runs are read once."""
        if self._failures is None:
            self._failures = failed_runs(self._instance, self.spec)
        return self._failures

    def failed_checks(self, result: dg.AssetCheckResult) -> Mapping[str, str]:
        """Returns the partitions that the latest result of an asset's check names, with what its rules found."""
        return failed_before(self._instance, result)

    def knows_manifest(self, digest: str) -> bool:
        """Whether the manifest with this digest is Dagster's latest one."""
        return is_known_manifest(self._instance, self.spec, digest)

    def store(self, events: Sequence[Event]) -> None:
        """Stores events in one transaction, or one by one by the public call if Dagster's storage has another form."""
        self._made = {}
        self._read_latest(events)
        try:
            self._store_at_once(events)
        except (ImportError, AttributeError, TypeError) as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("this version of Dagster stores events in another way, so recording is slower: %r", error)
            self._store_one_by_one(events)

    def _read_latest(self, events: Sequence[Event]) -> None:
        """Reads the materializations that events refer to and that are not among them: before, a transaction locks."""
        made: set[tuple[dg.AssetKey, str | None]] = set()
        for event in events:
            if isinstance(event, Made):
                needed = [(asset, event.partition) for asset in event.inputs]
                if event.asset_key == asset_key(self.spec, RAW_SHARDS) and self._observed is None:
                    storage = self._instance.event_log_storage
                    kind = DagsterEventType.ASSET_OBSERVATION
                    self._observed = storage.get_latest_storage_id_by_partition(shards_key(self.spec), kind)
            elif isinstance(event, Checked):
                needed = [(event.asset_key, event.partition)]
            else:
                continue
            for at in needed:
                if at not in made and at not in self._made:
                    latest = _latest(self._instance, *at)
                    self._made[at] = latest and (latest.storage_id, latest.run_id, latest.timestamp)
            if isinstance(event, Made):
                made |= {(event.asset_key, event.partition), (event.asset_key, None)}

    def _materialization(self, event: Made) -> dg.AssetMaterialization:
        """Returns the event that Dagster stores, with what it was made from: else Dagster takes it for outdated."""
        version = "" if event.result.data_version is None else event.result.data_version.value
        tags = {_VERSION: version, f"{_TAG}data_version_is_user_provided": "true"}
        if event.code_version is not None:
            tags[_CODE] = event.code_version
        above = {asset: self._made.get((asset, event.partition)) for asset in event.inputs}
        inputs = [(asset, version, above[asset]) for asset, version in event.inputs.items()]
        if event.asset_key == asset_key(self.spec, RAW_SHARDS):
            number = (self._observed or {}).get(event.partition or "")
            inputs.append((shards_key(self.spec), "", None if number is None else (number,)))
        for asset, version, latest in inputs:
            # Of an input with partitions Dagster stores the SHA-256 of the versions of those that were read.
            name = asset.to_user_string()
            tags[f"{_TAG}input_data_version/{name}"] = hashlib.sha256(version.encode()).hexdigest()
            tags[f"{_TAG}input_event_pointer/{name}"] = "NULL" if latest is None else str(latest[0])
        return dg.AssetMaterialization(
            event.asset_key, partition=event.partition, metadata=event.result.metadata, tags=tags
        )

    def _evaluation(self, event: Checked, target: Any) -> dg.AssetCheckEvaluation:
        """Returns a check result as the event that Dagster stores, with the materialization that it is about."""
        found = event.result
        return dg.AssetCheckEvaluation(
            asset_key=event.asset_key,
            check_name=found.check_name or "",
            passed=found.passed,
            metadata=found.metadata,
            target_materialization_data=target,
            severity=found.severity,
            description=found.description,
            blocking=found.check_name != UNIQUE_IDS,
            partition=event.partition,
        )

    def _store_one_by_one(self, events: Sequence[Event]) -> None:
        """Stores events by the public call, which takes no `Planned`: pages then show no partitions as failed."""
        for event in events:
            if isinstance(event, Made):
                self._instance.report_runless_asset_event(self._materialization(event))
            elif isinstance(event, Checked):
                self._instance.report_runless_asset_event(self._evaluation(event, None))
            elif isinstance(event, dg.AssetObservation):
                self._instance.report_runless_asset_event(event)
            elif isinstance(event, Line):
                _log.log(event.level, "%s", event.text)

    # -- private names of Dagster

    def _store_at_once(self, events: Sequence[Event]) -> None:
        """Stores events in one transaction; with SQLite in one for the run's database and one for the common one."""
        from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

        storage: Any = self._instance.event_log_storage
        tagged: list[tuple[Any, int]] = []
        last: dict[tuple[str, str], tuple[Any, int]] = {}  # by asset and type of event
        with ExitStack() as opened:
            index = opened.enter_context(storage.index_connection())
            if not index.in_transaction():  # a server's; SQLite's has begun one
                index = index.execution_options(isolation_level="READ COMMITTED")
                opened.enter_context(index.begin())
            log = index
            if hasattr(storage, "conn_string_for_shard"):  # committed first: what a kill keeps out of the index is
                engine = sqlalchemy.create_engine(storage.conn_string_for_shard(self._run_id))  # not recorded
                opened.callback(engine.dispose)
                log = opened.enter_context(engine.begin())
            for event in events:
                entry = self._entry(event)
                statement = storage.prepare_insert_event(entry)
                is_logged = log is not index
                if is_logged:
                    log.execute(statement)
                if is_logged and isinstance(event, Line):
                    continue
                number = index.execute(statement).inserted_primary_key[0]
                if isinstance(event, Made):
                    where = self._run_id, entry.timestamp
                    self._made[event.asset_key, event.partition] = self._made[event.asset_key, None] = (number, *where)
                if isinstance(event, Checked):
                    self._store_check(index, AssetCheckExecutionsTable, event, entry, number)
                elif not isinstance(event, Line):
                    tagged.append((entry, number))
                    kind = entry.get_dagster_event().event_type_value
                    last[event.asset_key.to_string(), kind] = entry, number
            if tagged:
                storage._store_asset_event_tags(index, *zip(*tagged, strict=True))
            for _, (entry, number) in sorted(last.items(), key=lambda one: one[0]):  # no two loads wait for each other
                storage._store_asset_event(index, entry, number)

    def _store_check(self, connection: Any, table: Any, event: Checked, entry: Any, number: int) -> None:
        target = self._made.get((event.asset_key, event.partition))
        values = {
            "asset_key": event.asset_key.to_string(),
            "check_name": event.result.check_name,
            "partition": event.partition,
            "run_id": self._run_id,
        }
        if event.partition is None:  # one result of a run, which Dagster replaces
            same = [table.c[name] == value for name, value in values.items()]
            connection.execute(table.delete().where(sqlalchemy.and_(*same)))
        connection.execute(
            table.insert().values(
                **values,
                execution_status="SUCCEEDED" if event.result.passed else "FAILED",
                evaluation_event=dg.serialize_value(entry),
                evaluation_event_timestamp=datetime.fromtimestamp(entry.timestamp, UTC).replace(tzinfo=None),
                evaluation_event_storage_id=number,
                materialization_event_storage_id=None if target is None else target[0],
            )
        )

    def _entry(self, event: Event) -> Any:
        """Returns the entry of the log. Dagster's own hold the step's handles too, which no page shows."""
        line = isinstance(event, Line)
        fields = {
            "error_info": None,
            "level": event.level if isinstance(event, Line) else logging.INFO,
            "user_message": masked_urls(event.text) if isinstance(event, Line) else "",
            "run_id": self._run_id,
            "timestamp": time.time(),
            "step_key": self._step_key,
            "job_name": self._job_name,
        }
        return _Entry(**fields, dagster_event=None if line else self._dagster_event(event))

    def _dagster_event(self, event: Event) -> dg.DagsterEvent:
        from dagster._core.definitions.asset_checks.asset_check_evaluation import (
            AssetCheckEvaluationTargetMaterializationData as Target,
        )
        from dagster._core.events import (
            AssetMaterializationPlannedData,
            AssetObservationData,
            StepMaterializationData,
        )

        data: Any
        message: str | None = None
        tags: Mapping[str, str] | None = None
        if isinstance(event, Made):
            kind, message = DagsterEventType.ASSET_MATERIALIZATION, f"Materialized {event.asset_key.to_user_string()}."
            data = StepMaterializationData(self._materialization(event), [])
        elif isinstance(event, Checked):
            kind, target = DagsterEventType.ASSET_CHECK_EVALUATION, self._made.get((event.asset_key, event.partition))
            about = None if target is None else Target(storage_id=target[0], run_id=target[1], timestamp=target[2])
            data = self._evaluation(event, about)
        elif isinstance(event, Planned):
            kind, tags = DagsterEventType.ASSET_MATERIALIZATION_PLANNED, event.tags
            data = AssetMaterializationPlannedData(event.asset_key, partition=event.partition)
        else:
            assert isinstance(event, dg.AssetObservation)
            kind, message, data = DagsterEventType.ASSET_OBSERVATION, "", AssetObservationData(event)
        return dg.DagsterEvent(
            event_type_value=kind.value,
            job_name=self._job_name,
            step_key=self._step_key,
            event_specific_data=data,
            message=message,
            logging_tags=tags,
        )


def forget_planned_checks(instance: dg.DagsterInstance, run_id: str) -> None:
    """Removes what a run that fails had planned to check: Dagster would show checks that never ran as failed."""
    storage: Any = instance.event_log_storage
    with suppress(ImportError, AttributeError):
        from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable as Executions

        with storage.index_connection() as connection:
            is_planned = Executions.c.execution_status == "PLANNED"
            connection.execute(Executions.delete().where(sqlalchemy.and_(Executions.c.run_id == run_id, is_planned)))
