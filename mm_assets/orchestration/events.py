"""The event log of a run, to which a load adds the events of partitions in one transaction.

Dagster's storages open connections for each event, with SQLite an engine too, and commit an event in several
transactions. Here a copy of the instance's storage does all with one connection to each database, so that the events of
a partition are stored together or not at all, also when the process is killed. What it stores beside the events, their
tags and the latest event of each asset, it stores once per transaction. Storages other than Dagster's for SQLite and
Postgres store events one by one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import sqlalchemy
from dagster import DagsterEventType
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData as Target,
)
from dagster._core.events import AssetMaterializationPlannedData, AssetObservationData, StepMaterializationData
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster._core.storage.event_log import EventLogStorage, SqlEventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME
from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS

from mm_assets.errors import masked_urls
from mm_assets.orchestration.patience import Patient, impatient

__all__ = ["Batch", "RunEvents", "Target", "forget_planned_checks"]

_Entry: Any = dg.EventLogEntry  # its constructor has no annotations
_POSTGRES = "PostgresEventLogStorage"  # of dagster-postgres, which is not a requirement of ours


@dataclass(kw_only=True)
class Batch:
    """Events that are stored together.

    Attributes:
        name: what they are about, for people: a partition key for instance; empty for what may be lost.
        reads: what reads that which `calls` need to know, before each attempt: a transaction keeps others waiting, and
            what was stored before in the same one cannot be read.
        calls: what stores them, by methods of `RunEvents`.
        first: asset and partition of a materialization among them, which the run stores in no other batch, if any.
        was_tried: whether they may have been stored.
    """

    name: str = ""
    reads: list[Callable[[], object]] = field(default_factory=list)
    calls: deque[Callable[[], object]] = field(default_factory=deque)
    first: tuple[dg.AssetKey, str] | None = None
    was_tried: bool = False


class RunEvents:
    """Events of one step of a run.

    Args:
        instance: of the run.
        run_id: the run's.
        job_name: the run's job.
        step_key: the step; None of events without a run.
    """

    def __init__(self, instance: dg.DagsterInstance, *, run_id: str, job_name: str, step_key: str | None) -> None:
        self._instance = instance
        self._run_id = run_id
        self._job_name = job_name
        self._step_key = step_key
        self._at_once = _Transactions.of(instance.event_log_storage, run_id)
        self._made: dict[tuple[dg.AssetKey, str | None], Target | None] = {}  # of the batches at hand

    def store(self, batches: Sequence[Batch]) -> None:
        """Stores events: all or none where the storage has transactions, else one by one; `calls` are those left.

        Whatever the storage raises is raised, at the first attempt also where the instance has patience.
        """
        self._made.clear()
        with impatient():
            batches = [batch for batch in batches if not (batch.was_tried and self._has(batch))]
            for batch in batches:
                for read in batch.reads:
                    read()
            if self._at_once is None:
                for batch in batches:
                    batch.was_tried = True
                for batch in batches:
                    while batch.calls:
                        batch.calls[0]()
                        batch.calls.popleft()
            elif batches:
                with self._at_once.transaction():
                    for batch in batches:
                        batch.was_tried = True  # what could not begin was not stored
                    for batch in batches:
                        for call in batch.calls:
                            call()

    def _has(self, batch: Batch) -> bool:
        """Whether a batch was stored, and only the answer of the database did not arrive."""
        if self._at_once is None or batch.first is None:
            return False
        latest = _latest(self._instance, *batch.first)
        return latest is not None and latest.run_id == self._run_id

    def release(self) -> None:
        """Closes idle connections: SQLite moves its log into the database file when the last one is closed."""
        if self._at_once is not None:
            self._at_once.release()

    def made(self, materialization: dg.AssetMaterialization) -> None:
        """Stores that an asset was materialized."""
        name = materialization.asset_key.to_user_string()
        entry = self._entry(
            DagsterEventType.ASSET_MATERIALIZATION,
            StepMaterializationData(materialization, []),
            message=f"Materialized value {name}.",
        )
        storage_id = self._store(entry)
        for partition in (materialization.partition, None):  # it is the asset's latest one too
            at = (materialization.asset_key, partition)
            self._made.pop(at, None)
            if storage_id is not None:
                self._made[at] = Target(storage_id=storage_id, run_id=self._run_id, timestamp=entry.timestamp)

    def checked(self, evaluation: dg.AssetCheckEvaluation) -> None:
        """Stores the result of a check."""
        self._store(self._entry(DagsterEventType.ASSET_CHECK_EVALUATION, evaluation))

    def observed(self, observation: dg.AssetObservation) -> None:
        """Stores an observation of an asset."""
        data = AssetObservationData(observation)
        self._store(self._entry(DagsterEventType.ASSET_OBSERVATION, data, message=""))

    def planned(self, asset: dg.AssetKey, partition: str, tags: Mapping[str, str]) -> None:
        """Stores that the run was to materialize a partition: if it never does, and fails, the partition has failed.

        Args:
            asset: the asset.
            partition: partition key.
            tags: facts of the attempt, which the event carries.
        """
        data = AssetMaterializationPlannedData(asset, partition=partition)
        self._store(self._entry(DagsterEventType.ASSET_MATERIALIZATION_PLANNED, data, tags=tags))

    def said(self, level: int, message: str) -> None:
        """Stores a line of the run's log.

        Args:
            level: as in `logging`.
            message: the line.
        """
        self._store(
            _Entry(
                error_info=None,
                level=level,
                user_message=masked_urls(message),
                run_id=self._run_id,
                timestamp=time.time(),
                step_key=self._step_key,
                job_name=self._job_name,
            )
        )

    def latest(self, asset: dg.AssetKey, partition: str | None) -> Target | None:
        """The latest materialization of an asset, or of a partition of it."""
        at = (asset, partition)
        if at not in self._made:
            self._made[at] = _latest(self._instance, asset, partition)
        return self._made[at]

    def _entry(
        self, kind: DagsterEventType, data: Any, *, message: str | None = None, tags: Mapping[str, str] | None = None
    ) -> dg.EventLogEntry:
        # Dagster's own events hold the step's handles too, half of their size, and nothing that its pages show.
        event = dg.DagsterEvent(
            event_type_value=kind.value,
            job_name=self._job_name,
            step_key=self._step_key,
            event_specific_data=data,
            message=message,
            logging_tags=tags,
        )
        entry: dg.EventLogEntry = _Entry(
            error_info=None,
            level=20,
            user_message="",
            run_id=self._run_id,
            timestamp=time.time(),
            step_key=self._step_key,
            job_name=self._job_name,
            dagster_event=event,
        )
        return entry

    def _store(self, entry: dg.EventLogEntry) -> int | None:
        """Stores an event: its id, if it is a materialization and the storage tells."""
        if self._at_once is not None:
            return self._at_once.stored(entry)
        self._instance.event_log_storage.store_event(entry)
        return None


class _Transactions(SqlEventLogStorage):
    """Mixed into a class of Dagster's: all statements are executed in one transaction for each database.

    The tags of all events are inserted, and the row of each asset is updated, at its end. The rows are then updated in
    the order of their assets, so that loads at work at the same time wait for one another, and none for itself.

    It is left to the instance's own storage to create tables, and to be used by other threads.
    """

    _databases: Mapping[tuple[str, ...], sqlalchemy.Engine]
    _connections: dict[tuple[str, ...], sqlalchemy.Connection]
    _has_table: dict[str, bool]
    _has_column: dict[str, bool]
    _stored: int | None
    _tagged: list[tuple[dg.EventLogEntry, int]]
    _last: dict[tuple[str, str], tuple[dg.EventLogEntry, int]]  # by asset and type of event

    @classmethod
    def of(cls, storage: EventLogStorage, run_id: str) -> "_Transactions | None":
        """One for the events of a run, over the databases of a storage; None if it is of another kind."""
        given = {"timeout": SQLITE_BUSY_TIMEOUT_SECONDS}
        databases: dict[tuple[str, ...], sqlalchemy.Engine] = {}
        if type(storage) is SqliteEventLogStorage:
            # Committed in reverse: what a kill keeps out of the index is not recorded, and no asset's page shows it.
            for name in (INDEX_SHARD_NAME, run_id):
                url = storage.conn_string_for_shard(name)
                databases[name,] = sqlalchemy.create_engine(url, connect_args=given)
        elif type(storage).__name__ == _POSTGRES:
            engine: sqlalchemy.Engine = vars(storage)["_engine"]
            databases[()] = engine.execution_options(isolation_level="READ COMMITTED")
        else:
            return None
        kind = type(cls.__name__, (cls, type(storage)), {})
        made: _Transactions = object.__new__(kind)
        own = {name: value for name, value in vars(storage).items() if not isinstance(value, Patient)}
        vars(made).update(own, _databases=databases, _connections={}, _has_table={}, _has_column={}, _stored=None)
        vars(made).update(_tagged=[], _last={})
        return made

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits at the end what is stored meanwhile, or nothing if something is raised."""
        with ExitStack() as held:
            for name, engine in self._databases.items():
                self._connections[name] = held.enter_context(engine.begin())
            try:
                yield
                self._store_last()
            finally:
                self._connections.clear()
                self._tagged.clear()
                self._last.clear()

    def _store_last(self) -> None:
        """Stores the tags of all events, and the latest event of each asset."""
        with self.index_transaction() as connection:
            if self._tagged:
                super()._store_asset_event_tags(connection, *zip(*self._tagged, strict=True))
            for _, (event, number) in sorted(self._last.items()):
                super()._store_asset_event(connection, event, number)

    def release(self) -> None:
        """Closes the connections of engines that were made here; each is opened again when it is needed."""
        for name, engine in self._databases.items():
            if name:  # the other one is the instance's own
                engine.dispose()

    def stored(self, event: dg.EventLogEntry) -> int | None:
        """Stores an event: its id if it is one of an asset, else None."""
        self._stored = None
        self.store_event(event)
        return self._stored

    @contextmanager
    def _connect(self, *name: str) -> Iterator[sqlalchemy.Connection]:
        yield self._connections[name]

    def has_table(self, table_name: str) -> bool:
        if table_name not in self._has_table:
            dagsters: Any = super()  # abstract to mypy
            self._has_table[table_name] = dagsters.has_table(table_name)
        return self._has_table[table_name]

    def _has_asset_key_col_on_connection(self, conn: sqlalchemy.Connection, column_name: str) -> bool:
        if column_name not in self._has_column:  # Dagster looks at the table's columns for each event
            dagsters: Any = super()
            self._has_column[column_name] = dagsters._has_asset_key_col_on_connection(conn, column_name)
        return self._has_column[column_name]

    def _store_asset_event(self, conn: sqlalchemy.Connection, event: dg.EventLogEntry, event_id: int) -> None:
        self._stored = event_id
        found = event.get_dagster_event()
        assert found.asset_key is not None
        self._last[found.asset_key.to_string(), found.event_type_value] = event, event_id

    def _store_asset_event_tags(
        self, conn: sqlalchemy.Connection, events: Sequence[dg.EventLogEntry], event_ids: Sequence[int]
    ) -> None:
        self._tagged += zip(events, event_ids, strict=True)

    def _update_asset_check_evaluation(self, event: dg.EventLogEntry, event_id: int | None) -> None:
        # A run of ours has no planned check, whose row Dagster looks for, and one result of each partition.
        if event.get_dagster_event().asset_check_evaluation_data.partition is None:
            super()._update_asset_check_evaluation(event, event_id)
        else:
            self._store_runless_asset_check_evaluation(event, event_id)


def forget_planned_checks(instance: dg.DagsterInstance, run_id: str) -> None:
    """Removes what a run that fails had planned to check: Dagster would show checks that never ran as failed."""
    storage = instance.event_log_storage
    if isinstance(storage, SqlEventLogStorage):
        planned = AssetCheckExecutionRecordStatus.PLANNED.value
        rows = AssetCheckExecutionsTable.c
        with storage.index_connection() as connection:
            connection.execute(
                AssetCheckExecutionsTable.delete().where(
                    sqlalchemy.and_(rows.run_id == run_id, rows.execution_status == planned)
                )
            )


def _latest(instance: dg.DagsterInstance, asset: dg.AssetKey, partition: str | None) -> Target | None:
    partitions = None if partition is None else [partition]
    found = instance.fetch_materializations(dg.AssetRecordsFilter(asset, asset_partitions=partitions), limit=1)
    for record in found.records:
        return Target(storage_id=record.storage_id, run_id=record.run_id, timestamp=record.timestamp)
    return None
