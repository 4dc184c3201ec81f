"""Events of Dagster that records, attempts and manifests of a dataset's folder become, and where they are stored."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import dagster as dg

from mm_assets.errors import MmAssetsError, SchemaMismatchError
from mm_assets.orchestration.partitions import asset_key, code_version
from mm_assets.orchestration.report import (
    MaterializeResult,
    check_results,
    export_result,
    failed_observation,
    manifest_result,
    published_result,
    stage_result,
    stage_version,
)
from mm_assets.orchestration.rollup import rolled_up
from mm_assets.orchestration.runs import FailedRun, attempt_tags
from mm_assets.pipeline.chain import CHAIN, PUBLISHED, RAW_SHARDS, STAGE_OF_FILE, Stage, export_stage
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.added_streams import carried_over
from mm_assets.pipeline.state.exports import export_folders, read_export
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import ManifestReport
from mm_assets.pipeline.state.records import Record, StageFailure
from mm_assets.pipeline.state.staleness import DatasetState

__all__ = ["Checked", "Event", "EventSink", "Line", "Made", "PartitionEvents", "Planned", "manifest_events"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A materialization.

    Attributes:
        result: what was made.
        partition: partition key, if it is of a partition.
        inputs: data version of each asset that it was made from.
        code_version: what it was made with.
    """

    result: MaterializeResult
    partition: str | None = None
    inputs: Mapping[dg.AssetKey, str] = field(default_factory=dict)
    code_version: str | None = None

    @property
    def asset_key(self) -> dg.AssetKey:
        """The asset."""
        assert self.result.asset_key is not None
        return dg.AssetKey.from_coercible(self.result.asset_key)


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check, of a partition or, with None, of all."""

    result: dg.AssetCheckResult
    partition: str | None

    @property
    def asset_key(self) -> dg.AssetKey:
        """The asset that was checked."""
        assert self.result.asset_key is not None
        return dg.AssetKey.from_coercible(self.result.asset_key)


@dataclass(frozen=True, slots=True)
class Planned:
    """That a run was to make an asset of a partition: if it never does, and fails, Dagster shows it as failed."""

    asset_key: dg.AssetKey
    partition: str
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a run's log, of a level as in `logging`."""

    level: int
    text: str


Event = Made | Checked | Planned | Line | dg.AssetObservation


class EventSink(Protocol):
    """Where a recorder stores the events of one run, and asks what is stored already.

    Attributes:
        spec: the declaration, with `checks` as it applies.
    """

    spec: DatasetSpec

    def versions(self, stage: Stage, keys: Collection[str] | None) -> Mapping[str, str]:
        """Returns the data version of the latest materialization of each partition; None asks for all partitions."""
        ...

    def code_version(self, stage: Stage, key: str) -> str | None:
        """Returns the code version of the latest materialization of a partition."""
        ...

    def failures(self) -> Mapping[str, FailedRun]:
        """Returns the latest failure of each partition before this run."""
        ...

    def failed_checks(self, result: dg.AssetCheckResult) -> Mapping[str, str]:
        """Returns the partitions that the latest result of an asset's check names, with what its rules found."""
        ...

    def knows_manifest(self, digest: str) -> bool:
        """Whether the manifest with this digest is the latest one."""
        ...

    def store(self, events: Sequence[Event]) -> None:
        """Stores events, all or none; raises what the database does."""
        ...


class PartitionEvents:
    """The events of some partitions.

    Args:
        sink: where they are stored.
        state: the dataset, for the recipes of partitions that failed.
        reports: of the partitions, and whether what one says that it did is certainly not stored.
    """

    def __init__(self, sink: EventSink, state: DatasetState, reports: Sequence[tuple[PartitionReport, bool]]) -> None:
        self._sink = sink
        self._spec = sink.spec
        self._state = state
        self._reports = reports
        self._known: dict[Stage, Mapping[str, str]] = {}
        self._exports = [(options, export_stage(options)) for options in self._spec.exports]
        self._rolled_up: dict[str, list[tuple[dg.AssetCheckResult, str]]] = {}

    def events(self) -> Iterator[Event]:
        """Yields them, those of each partition in the order of the stages."""
        for report, is_new in self._reports:
            yield from self._of(report, is_new)
        for results in self._rolled_up.values():
            yield Checked(rolled_up(self._sink.failed_checks(results[0][0]), results, is_gate=False), None)

    def _of(self, report: PartitionReport, is_new: bool) -> Iterator[Event]:
        key, record = report.partition, report.record
        records = {} if record is None else dict(record.stages)
        results = {STAGE_OF_FILE[next(iter(r.record.files))]: r for r in report.results.values()}
        made_with = {stage: result.record.made_with for stage, result in results.items()}
        made_with |= {stage: one.made_with for stage, one in records.items()}
        # A report of a run that failed has the stages that ran: then those before it were up to date.
        given = made_with if RAW_SHARDS in made_with else None
        for stage in CHAIN:
            result = results.get(stage)
            is_missing = result is None or not is_new
            if result is None and stage in records:
                result = StageResult.of_record(records[stage], self._state.dataset.store)
            if result is None:
                continue
            code = code_version(self._spec, stage, given)
            if not (is_missing and self._is_known(stage, key, stage_version(result.record), code)):
                yield from self._stage(stage, result, key, code)
        if record is not None:
            made_with[PUBLISHED] = PUBLISHED.made_with(self._spec)
            if (is_new and report.results) or not self._is_known(PUBLISHED, key, record.recipe):
                code = code_version(self._spec, PUBLISHED, made_with)
                inputs = {asset_key(self._spec, STAGE_OF_FILE[form]): f.sha256 for form, f in record.packed.items()}
                yield Made(result=published_result(self._spec, record), partition=key, inputs=inputs, code_version=code)
            yield from self._exported(report, record, made_with)
            return
        if not report.is_refused and report.end is not None:
            yield from self._failure(report, report.end)
        if report.failure is not None:
            level = logging.WARNING if report.is_refused else logging.ERROR
            yield Line(level, f"{key}: {report.failure.stage}: {report.failure.said}")

    def _exported(
        self, report: PartitionReport, record: Record, made_with: Mapping[Stage, Mapping[str, str]]
    ) -> Iterator[Event]:
        """Yields the exports of a published partition, and the one that failed."""
        key, dataset = report.partition, self._state.dataset
        for options, stage in self._exports:
            folder = export_folders(dataset, options, [record.listed])[key]
            if self._is_known(stage, key, folder):
                continue
            made = report.exports.get(options.asset)
            with suppress(SchemaMismatchError):  # the next export of the partition reports it
                made = made or read_export(dataset, options, folder)
            if made is not None:
                result = export_result(self._spec, options, key, made)
                code = code_version(self._spec, stage, {**made_with, stage: stage.made_with(self._spec)})
                inputs = {asset_key(self._spec, PUBLISHED): record.recipe}
                yield Made(result=result, partition=key, inputs=inputs, code_version=code)
                yield from (Checked(check, key) for check in result.check_results or ())
            elif report.failure is not None and report.failure.stage == stage.name:
                yield Planned(asset_key(self._spec, stage), key, {})
                yield failed_observation(self._spec, report.failure)
                yield Line(logging.ERROR, f"{key}: {report.failure.stage}: {report.failure.said}")

    def _is_known(self, stage: Stage, key: str, version: str, code: str | None = None) -> bool:
        if stage not in self._known:
            self._known[stage] = self._sink.versions(stage, [report.partition for report, _ in self._reports])
        is_equal = self._known[stage].get(key) == version
        return is_equal and (code is None or self._sink.code_version(stage, key) == code)

    def _stage(self, stage: Stage, result: StageResult, key: str, code: str | None) -> Iterator[Event]:
        checks = check_results(self._spec, result)
        if self._spec.checks == "rollup":
            for check in checks:
                self._rolled_up.setdefault(result.record.stage, []).append((check, key))
            checks = []
        inputs = {
            asset_key(self._spec, STAGE_OF_FILE[name]): version
            for name, version in result.record.inputs.items()
            if name in STAGE_OF_FILE
        }
        yield Made(result=stage_result(self._spec, result, ()), partition=key, inputs=inputs, code_version=code)
        for check in checks:
            yield Checked(check, key)

    def _failure(self, report: PartitionReport, failure: StageFailure) -> Iterator[Event]:
        """Yields that the rest of a partition was to be made, and why it failed."""
        key = report.partition
        tags = attempt_tags(self._state.recipes.get(key, ""), self._sink.failures().get(key))
        names = [stage.name for stage in CHAIN]
        for stage in CHAIN[names.index(failure.stage) : CHAIN.index(PUBLISHED) + 1]:
            if stage.is_made(self._spec) and stage.name not in report.results:
                yield Planned(asset_key(self._spec, stage), key, tags)
        yield failed_observation(self._spec, failure)


def manifest_events(sink: EventSink, dataset: DatasetStore, report: object) -> list[Event]:
    """Returns the events of a manifest, of the newest one without a report; none if Dagster knows it."""
    if not isinstance(report, ManifestReport):
        content = dataset.store.found_bytes("manifest.json")
        if content is None:
            return []
        try:
            state = DatasetState(dataset)
            report = ManifestReport(
                digest=hashlib.sha256(content).hexdigest(),
                manifest=json.loads(content),
                url=dataset.store.url_of("manifest.json"),
                state=state,
                left_out={
                    key: state.fault(key) or "published since"
                    for key in sorted(state.partitions.keys() - state.listed.keys())
                },
                missing_streams=carried_over(state, state.listed).missing,
            )
        except (MmAssetsError, ValueError, KeyError, TypeError) as error:
            return [Line(logging.WARNING, f"the manifest is not recorded: {error!r}: `mm-assets run` builds it again")]
    if sink.knows_manifest(report.digest):
        return []
    result = manifest_result(sink.spec, report)
    return [Made(result=result), *(Checked(check, None) for check in result.check_results or ())]
