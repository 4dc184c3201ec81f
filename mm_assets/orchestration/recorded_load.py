"""Loads that Dagster records. They begin without Dagster, which takes a second to import: the recorder's thread does.

A bad partition never stops the others; its errors are returned as text. Nothing here prints.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.recorder import Recorder, unrecorded_message
from mm_assets.pipeline.chain import Stage
from mm_assets.pipeline.load.engine import Engine
from mm_assets.pipeline.load.tasks import LoadEnd, PartitionRun, load_partitions
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Claims, Slice
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import manifest_warnings
from mm_assets.pipeline.state.registration import Registration
from mm_assets.pipeline.state.staleness import DatasetState

if TYPE_CHECKING:
    import dagster as dg

    from mm_assets.orchestration.load_runs import LoadRuns

__all__ = ["LoadResult", "RecordedLoad", "run_load"]


class RecordedLoad:
    """A load, and the recorder of what it does.

    Args:
        state: the dataset as it was listed.
        load: id of the load, and of its first run.
        found: what registration found, for Dagster to know too.
        context: of the run that executes the load, if Dagster has started it.
        keys: the partitions that the load runs.
        attempts: as of a `Recorder`.
        report: called with each line on what the load waits for; None writes these into the log of its run.
        config: the rest of the configuration of runs, as of `load_config`.

    Attributes:
        recorder: what stores events in runs of Dagster.
    """

    def __init__(
        self,
        state: DatasetState,
        load: str,
        found: Registration | None,
        *,
        context: dg.OpExecutionContext | None = None,
        keys: Sequence[str] = (),
        attempts: bool = False,
        report: Callable[[str], object] | None = None,
        **config: Any,
    ) -> None:
        self._state = state
        self._load = load
        self._found = found
        self._context = context
        self._keys = keys
        self._config = config
        self.recorder = Recorder(
            state.dataset,
            lambda body: self.runs.execute(body),
            prepare=lambda: self.runs,
            state=state,
            load=load,
            running=keys,
            attempts=attempts,
            report=report or (lambda _: None),
        )
        self._report = report or self.recorder.warn

    @cached_property
    def runs(self) -> LoadRuns:
        """The runs of Dagster that record it."""
        from mm_assets.orchestration.load_runs import LoadRuns

        return LoadRuns(
            self._state,
            self._load,
            self._found,
            recorder=self.recorder,
            context=self._context,
            keys=self._keys,
            report=self._report,
            **self._config,
        )

    def run(
        self, *, ended: Callable[[PartitionReport], object] = lambda _: None, engine: Engine, **options: Any
    ) -> LoadEnd:
        """Runs the partitions as `load_partitions`, with its `options`, and records that; errors likewise.

        Args:
            ended: called with the report of each partition as it ends.
            engine: where they run.
            options: of `load_partitions`.
        """

        def end_partition(report: PartitionReport) -> None:
            self.recorder.add(report)
            ended(report)

        with self.recorder as recorder:
            if self._context is None and (pool := self._state.dataset.spec.pool) is not None:
                recorder.wait_until_begun(pool)
            end = load_partitions(
                self._state,
                self._keys,
                engine=engine,
                ended=end_partition,
                built=recorder.add_manifest,
                report=self._report,
                warned=recorder.warn,
                **options,
            )
            recorder.error = end.refusal
        return end


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """How a load ended, its partitions aside.

    Attributes:
        run_id: id of its first run in Dagster.
        failures: what went wrong, one line each; empty on success.
        warnings: violations that its manifest's check found, one line each.
        rebuilt: as of a `LoadEnd`.
        state: the dataset as the manifest lists it; None if none was built.
    """

    run_id: str
    failures: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    rebuilt: Mapping[str, str] = field(default_factory=dict)
    state: DatasetState | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not self.failures


def run_load(
    spec: DatasetSpec,
    keys: Sequence[str],
    *,
    engine: Engine,
    first: Stage | None = None,
    part: Slice | None = None,
    waits: bool = True,
    observed: Callable[[PartitionRun], object] = lambda _: None,
    report: Callable[[str], object] = lambda _: None,
    present: DatasetState | None = None,
    found: Registration | None = None,
) -> LoadResult:
    """Runs registered partitions and builds the manifest; a thread records that in runs of the job `<dataset>_load`.

    Args:
        spec: the declaration.
        keys: the partitions; none builds the manifest only.
        engine: where they run.
        first: as of `load_partitions`.
        part: likewise.
        waits: likewise.
        observed: called with each partition as it ends.
        report: called with each line on what the load waits for, also in another thread.
        present: the dataset as it is, if that is known.
        found: what registration found, if Dagster does not know that yet.
    """
    dataset = DatasetStore(spec) if present is None else present.dataset
    state, load, failures = present or DatasetState(dataset), str(uuid.uuid4()), list[str]()
    stage = "" if first is None else first.name
    recorded = RecordedLoad(state, load, found, keys=keys, report=report, first_stage=stage, waits=waits)

    def ended(one: PartitionReport) -> None:
        observed(PartitionRun.of(spec.name, one))

    end = LoadEnd()
    try:
        with Claims(dataset, load) as claims:
            end = recorded.run(claims=claims, engine=engine, first=first, part=part, waits=waits, ended=ended)
    except MmAssetsError as error:
        failures.append(str(error))
    if end.refusal:
        failures.append(end.refusal)
    if recorded.recorder.unrecorded:
        failures.append(unrecorded_message(spec, recorded.recorder.unrecorded))
    return LoadResult(
        run_id=load,
        failures=tuple(failures),
        warnings=manifest_warnings(end.manifest),
        rebuilt=end.rebuilt,
        state=None if end.manifest is None else end.manifest.state,
    )
