"""A load without Dagster: the partitions to run, how each ended, and slices of them for hosts that do not talk."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain

from mm_assets.errors import ConfigError
from mm_assets.pipeline.chain import RAW_SHARDS, STAGE_OF_FILE, Stage
from mm_assets.pipeline.load.driver import run_tasks
from mm_assets.pipeline.load.engine import Engine, Task
from mm_assets.pipeline.partition.run import PartitionReport, failed_report, rare_collections
from mm_assets.pipeline.state.leases import Holder, Leases
from mm_assets.pipeline.state.records import StageFailure, StageRecord
from mm_assets.pipeline.state.staleness import Present, given_start

__all__ = ["PartitionRun", "Slice", "partition_tasks", "run_unrecorded"]


@dataclass(frozen=True, slots=True)
class Slice:
    """One of several parts of the partitions of a dataset: those whose key hashes to it, whatever others there are.

    Attributes:
        number: which, from 1.
        total: how many there are.
    """

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """The slice that a text such as ``3/20`` names; `ConfigError` if it names none."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError("arguments", "--slice", f"is {text!r}, expected K/N such as 3/20, with K from 1 to N")
        return cls(int(found[1]), int(found[2]))

    def __contains__(self, key: str) -> bool:
        digest = hashlib.sha256(key.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.total == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRun:
    """How the run of one partition ended, or that of a manifest.

    Attributes:
        dataset: dataset name.
        partition: partition key; empty for a manifest.
        run_id: Dagster's run id; empty where no run was created.
        failures: what went wrong, one line each; empty on success.
        warnings: violations of checks that do not stop a partition, and remarks of its stages, one line each.
        records: what the stages recorded that ran, by name.
        present: the dataset as the manifest lists it; None for a partition, or where no manifest was made.
    """

    dataset: str
    partition: str
    run_id: str
    failures: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    records: Mapping[Stage, StageRecord] = field(default_factory=dict)
    present: Present | None = None

    @property
    def ok(self) -> bool:
        """Whether the run succeeded and every check that stops a partition passed."""
        return not self.failures

    @classmethod
    def of(cls, dataset: str, run_id: str, report: PartitionReport) -> PartitionRun:
        """The end of a partition, by its report."""
        failures: list[str] = []
        warnings: dict[str, str] = {note: note for result in report.results.values() for note in result.record.notes}
        for name, result in report.results.items():
            for outcome in result.outcomes:
                if outcome.stops:
                    failures.append(f"{name}: check {outcome.name}: {outcome.said}")
                elif not outcome.passed:  # MULT and MSTR hold the same samples: one line for both
                    line = f"check {outcome.name}: {outcome.said}"
                    warnings.setdefault(line, f"{name}: {line}")
        if report.failure is not None:
            failures.append(f"{report.failure.stage}: {report.failure.said}")
        return cls(
            dataset=dataset,
            partition=report.partition,
            run_id=run_id,
            failures=tuple(failures),
            warnings=tuple(warnings.values()),
            records={STAGE_OF_FILE[next(iter(r.record.files))]: r.record for r in report.results.values()},
        )


def partition_tasks(
    present: Present,
    keys: Iterable[str],
    first: Stage | None,
    holder: Holder,
    *,
    busy: Mapping[str, str] | None = None,
) -> tuple[list[Task], list[PartitionReport]]:
    """What a load does: the tasks of partitions, and the reports of those that cannot be run.

    Args:
        present: the dataset as it is.
        keys: the partitions.
        first: as `Load.first`.
        holder: of the leases.
        busy: key to the id of the run that is working on a partition.
    """
    spec, schema = present.dataset.spec, present.schema if present.partitions else present.dataset.schema()
    pending, tasks, refused = set(present.pending()), list[Task](), list[PartitionReport]()

    def refuse(key: str, detail: str) -> None:
        failure = StageFailure(partition=key, stage=RAW_SHARDS.name, detail=detail)
        refused.append(failed_report(failure, is_refused=True))

    for key in keys:
        if key not in present.partitions:
            refuse(key, "it is not registered any more")
        elif busy and key in busy:
            refuse(key, f"run {busy[key]} is working on this partition: run it again when that has ended")
        else:
            task = Task(
                spec=spec,
                schema=schema,
                partition=present.partitions[key],
                first=given_start(first, is_pending=key in pending),
                markers=present.names.get(key, ()),
                holder=holder,
            )
            tasks.append(task)
    return tasks, refused


def run_unrecorded(
    present: Present,
    keys: Iterable[str],
    *,
    engine: Engine,
    first: Stage | None,
    observed: Callable[[PartitionRun], object],
) -> None:
    """Runs partitions and tells Dagster nothing: `catch_up` of the orchestration records them later.

    Args:
        present: the dataset as it is.
        keys: the partitions.
        engine: where they run.
        first: the stage to start at, or an earlier one that is stale; None for the first stale one of what is pending.
        observed: called with each partition as it ends.

    Raises:
        MmAssetsError: the dataset is not registered, or its schema is damaged.
        CredentialsError: after the others, partitions were not run because the storage refused the credentials.
    """
    spec = present.dataset.spec
    keys, of_run = list(keys), str(uuid.uuid4())
    with rare_collections(), Leases(present.dataset, of_run) as leases, leases.of_run(writes=bool(keys)):
        tasks, refused = partition_tasks(present, keys, first, leases.holder)
        with closing(run_tasks(engine, tasks, timeout=spec.engine.timeout_seconds)) as reports:
            for report in chain(refused, reports):
                observed(PartitionRun.of(spec.name, "", report))
