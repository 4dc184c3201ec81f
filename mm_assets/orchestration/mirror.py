"""Recording: what a load did to partitions becomes events of its run, which Dagster shows as those of any other run.

Markers are the truth, and Dagster mirrors them: what is published and not recorded, because a load was killed or the
database was away, is recorded by the next. Nothing here stops the work of a load.
"""

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, Self

import dagster as dg
from dagster import DagsterEventType

from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.events import Batch, RunEvents
from mm_assets.orchestration.observed_shards import observation_ids
from mm_assets.orchestration.partitions import asset_key, code_version, load_op_name, shards_key
from mm_assets.orchestration.patience import PAUSES, Patient, first_line, may_pass
from mm_assets.orchestration.report import (
    MaterializeResult,
    check_results,
    end_of,
    evaluation_of,
    failed_observation,
    manifest_result,
    marker_version,
    published_result,
    stage_result,
    stage_version,
)
from mm_assets.orchestration.rollup import failed_before, failed_in, rolled_up
from mm_assets.orchestration.runs import Attempt, attempt_tags, failed_attempts
from mm_assets.pipeline.chain import (
    CHAIN,
    MANIFEST,
    PUBLISHED,
    RAW_SHARDS,
    STAGE_OF_FILE,
    Stage,
    packed_files,
    recorded_stages,
)
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import RECORDS
from mm_assets.pipeline.state.manifests import ManifestReport, missing_streams, partitions_in_manifest
from mm_assets.pipeline.state.records import StageRecord
from mm_assets.pipeline.state.staleness import Present

__all__ = ["Mirror", "is_known_manifest", "lost_said"]

_TAG = "dagster/"
_VERSION, _CODE = f"{_TAG}data_version", f"{_TAG}code_version"
MadeWith = Mapping[Stage, Mapping[str, str]]  # of stages, as recorded
_NAMED = 10  # of what was lost, in a message
_AT_ONCE = 32  # partitions that are stored in one transaction, at most


class Mirror:
    """Records what was published in Dagster, as events of the load's run; what the database refuses it tries again.

    What is recorded waits for `store`, or for so many that they are worth a transaction.

    Used in a `with` statement, whose end records what is left, in several attempts. Where the block is interrupted, the
    next load does.

    Args:
        context: of the step that works.
        present: the dataset, as it was when the load began.

    Attributes:
        lost: what could not be recorded, with the reason: partition keys for instance.
    """

    def __init__(self, context: dg.OpExecutionContext, present: Present) -> None:
        self._instance = context.instance
        self._present = present
        self._dataset = present.dataset
        self._spec = present.dataset.spec
        self._events = RunEvents(
            context.instance, run_id=context.run_id, job_name=context.job_name, step_key=load_op_name(self._spec)
        )
        self.lost: dict[str, str] = {}
        self._batch = Batch()  # of events that are prepared
        self._waiting: deque[Batch] = deque()
        self._refusal = ""  # why the last attempt failed
        self._passed: dict[str, tuple[dg.AssetCheckResult, list[str]]] = {}  # by asset, with `checks: rollup`
        self._failed: dict[dg.AssetKey, Mapping[str, str]] = {}  # by asset, those that its latest result names
        self._rolled_up: set[dg.AssetKey] = set()  # whose latest result is of the batches at hand
        self._codes: dict[Stage, str | None] = {}
        self._attempts: Mapping[str, Attempt] | None = None  # by partition, its last failure before this load

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: object) -> None:
        try:
            if kind is None or issubclass(kind, Exception):  # else there is no time left
                self._add_passed()
                self._record_waiting()
        finally:
            self._events.release()

    def record(self, report: PartitionReport) -> None:
        """Records the stages of a partition that ran, and its marker, or that and why it failed.

        What became of one that was refused is not known here: only the log says so.
        """
        marker = report.marker
        if marker is not None and len(report.results) < len(recorded_stages(self._spec)):
            # A file is read: with a store that answers in 20 ms no load records more than 50 partitions a second.
            try:
                self._add_missing(report.partition, self._dataset.records(report.partition), report.results)
            except MmAssetsError as error:  # the next load records it
                self._lose(report.partition, error)
                marker = None
        for result in report.results.values():
            self._add_stage(result, report.partition)
        if marker is not None:
            self._add(published_result(self._spec, marker), report.partition, _marker_inputs(marker))
        elif report.marker is None and not report.is_refused:
            self._batch.reads.append(self._read_attempts)
            self._batch.calls.append(partial(self._log_failed, report))
        if report.failure is not None:
            level = logging.WARNING if report.is_refused else logging.ERROR
            self._say(level, f"{report.partition}: {report.failure.stage}: {report.failure.said}")
        self._end(report.partition)

    def catch_up(self, running: Collection[str] = ()) -> int:
        """Records what is published and Dagster does not know, without the partitions that run now anyway.

        Returns:
            How many partitions that were.
        """
        num_partitions, present = 0, self._present
        known = self._instance.event_log_storage.get_latest_tags_by_partition(
            asset_key(self._spec, PUBLISHED), DagsterEventType.ASSET_MATERIALIZATION, [_VERSION]
        )
        names = {key: name for key in present.names if key not in running and (name := present.name(key)) is not None}
        cached = present.cache.read(names.values())
        for key, name in names.items():
            is_of = known.get(key, {}).get(_VERSION)
            if name in cached and is_of == marker_version({"record": {"sha256": cached[name].record[1]}}).value:
                continue
            try:
                marker = present.markers([key])[key]
                records, file = self._dataset.recorded(key)
                published = published_result(self._spec, marker)
            except MmAssetsError as error:  # of one partition, which others do not wait for
                self.warn(f"{key} is not recorded: {error}")
                continue
            self._add_missing(key, records)
            is_of_marker = file is not None and marker.get("record", {}).get("sha256") == file.sha256
            made_with = self._published_with(marker, records if is_of_marker else {})
            self._add(published, key, _marker_inputs(marker), made_with)
            self._end(key)
            num_partitions += 1
        return num_partitions

    def catch_up_failures(self) -> list[str]:
        """Records the partitions that failed in runs that recorded nothing: their keys."""
        dataset, found = self._dataset, list[str]()
        ran = {name.rpartition("/")[2] for folder in ("failures", RECORDS) for name in dataset.store.sizes(folder)}
        pending = [key for key in self._present.pending() if f"{key}.json" in ran]
        if pending:
            self._read_attempts()
        for key in pending:
            fingerprint = self._present.partitions[key].fingerprint(self._made_with)
            if key in (known := self._attempts or {}) and known[key].fingerprint == fingerprint:
                continue
            try:
                failure, records = dataset.failure(key), dataset.records(key)
            except MmAssetsError as error:  # of one partition, which others do not wait for
                self.warn(f"{key} is not recorded: {error}")
                continue
            if failure is not None:  # records of later stages are of an earlier run
                names = [stage.name for stage in CHAIN]
                before = set(names[: names.index(failure.stage)])
                records = {stage: record for stage, record in records.items() if stage.name in before}
            done = {stage.name: StageResult.of_record(record, {}) for stage, record in records.items()}
            if failure is None and all(result.passed for result in done.values()):
                continue  # a run that was killed: it has not failed
            report = PartitionReport(
                partition=key, results=done, marker=None, failure=failure, seconds=0.0, peak_memory=0
            )
            self._add_missing(key, records)
            self._batch.calls.append(partial(self._log_failed, report))
            if failure is not None:
                self._say(logging.ERROR, f"{key}: {failure.stage}: {failure.said}")
            self._end(key)
            found.append(key)
        return found

    def knows_manifest(self, digest: str) -> bool:
        """Whether the manifest with this digest is Dagster's latest one."""
        return is_known_manifest(self._instance, self._spec, digest)

    def catch_up_manifest(self) -> bool:
        """Records the newest manifest if it is not what Dagster knows as the latest one: whether it did."""
        content = self._dataset.store.found_bytes("manifest.json")
        if content is None:
            return False
        digest = hashlib.sha256(content).hexdigest()
        if self.knows_manifest(digest):
            return False
        try:
            listed = partitions_in_manifest(self._dataset)
            report = ManifestReport(
                digest=digest,
                manifest=json.loads(content),
                url=self._dataset.store.url_of("manifest.json"),
                present=self._present,
                left_out={
                    key: self._present.fault(key) or "it was published since"
                    for key in sorted(self._present.partitions.keys() - listed)
                },
                missing_streams=missing_streams(self._present),
            )
            made = manifest_result(self._spec, report)
        except (MmAssetsError, ValueError, KeyError, TypeError) as error:
            self.warn(f"the manifest is not recorded: {error!r}: `mm-assets run` makes it again")
            return False
        self.add(made, "the manifest")
        return True

    def _published_with(self, marker: Mapping[str, Any], records: Mapping[Stage, StageRecord]) -> MadeWith:
        """What the stages of a marker were made with, by its records; of those without one it is not known."""
        unknown: dict[Stage, Mapping[str, str]] = {STAGE_OF_FILE[form]: {} for form in packed_files(marker)}
        return {**unknown, **_made_with(records), PUBLISHED: PUBLISHED.made_with(self._spec)}

    def warn(self, line: str) -> None:
        """Writes a warning into the run's log."""
        self._say(logging.WARNING, line)
        self._end()

    def _say(self, level: int, line: str) -> None:
        self._batch.calls.append(partial(self._events.said, level, line))

    def _end(self, name: str = "") -> None:
        """Ends what is stored together; `name` as that of a `Batch`."""
        if self._batch.calls:
            self._batch.name = name
            self._waiting.append(self._batch)
        self._batch = Batch()
        if len(self._waiting) >= _AT_ONCE:
            self.store()

    def add(self, made: MaterializeResult, name: str) -> None:
        """Records one materialization without a partition, with its check results; `name` is for people."""
        self._add(made)
        self._end(name)

    def _add(
        self,
        made: MaterializeResult,
        key: str | None = None,
        inputs: Mapping[Stage, str] | None = None,
        made_with: MadeWith | None = None,
    ) -> None:
        """Adds a materialization with its check results; `made_with` as for `code_version`."""
        assert made.asset_key is not None
        if key is not None and self._batch.first is None:
            self._batch.first = dg.AssetKey.from_coercible(made.asset_key), key
        self._batch.calls.append(partial(self._log_made, made, key, inputs or {}, made_with))
        partition = None if self._spec.checks == "rollup" else key
        self._batch.calls.extend(partial(self._log_check, found, partition) for found in made.check_results or ())

    def _add_stage(self, result: StageResult, key: str, made_with: MadeWith | None = None) -> None:
        checks = check_results(self._spec, result)
        if result.record.stage == RAW_SHARDS.name:
            self._batch.reads.append(lambda: self._observed)
        if self._spec.checks == "rollup":
            for found in checks:
                self._batch.reads.append(partial(self._read_failed, found))
                if found.passed:
                    self._passed.setdefault(result.record.stage, (found, []))[1].append(key)
                    self._batch.calls.append(partial(self._take_back, found, key))
                else:
                    self._batch.calls.append(partial(self._roll_up, found, key, ()))
            checks = []
        self._add(stage_result(self._spec, result, checks), key, _inputs(result.record), made_with)

    def _add_missing(
        self, key: str, records: Mapping[Stage, StageRecord], made: Mapping[str, StageResult] | None = None
    ) -> None:
        """Records stages that earlier runs made, but for those `made` now: a run that was killed recorded none."""
        if earlier := [record for record in records.values() if record.stage not in (made or {})]:
            missing: list[Callable[[], object]] = []
            self._batch.reads.append(partial(self._read_missing, earlier, key, _made_with(records), missing))
            self._batch.calls.append(lambda: [call() for call in missing])

    def _read_missing(
        self, records: Iterable[StageRecord], key: str, made_with: MadeWith, missing: list[Callable[[], object]]
    ) -> None:
        """Prepares the events of those stages of a partition of which Dagster does not have this version."""
        unknown = [record for record in records if not self._is_known(record, key, made_with)]
        outer, self._batch = self._batch, Batch()
        for record in unknown:
            urls = {name: self._dataset.store.url_of(file.path) for name, file in record.files.items()}
            self._add_stage(StageResult.of_record(record, urls), key, made_with)
        prepared, self._batch = self._batch, outer
        for read in prepared.reads:
            read()
        missing[:] = prepared.calls

    def _is_known(self, record: StageRecord, key: str, made_with: MadeWith) -> bool:
        stage = STAGE_OF_FILE[next(iter(record.files))]
        wanted = dg.AssetRecordsFilter(asset_key(self._spec, stage), asset_partitions=[key])
        found = self._instance.fetch_materializations(wanted, limit=1).records
        made = found[0].asset_materialization if found else None
        version, code = stage_version(record), code_version(self._spec, stage, made_with)
        return made is not None and (made.tags or {}).items() >= {_VERSION: version, _CODE: code}.items()

    def _roll_up(self, found: dg.AssetCheckResult, key: str, passed: Sequence[str]) -> None:
        assert found.asset_key is not None
        result = rolled_up(self._failed[found.asset_key], found, key, passed=passed, is_gate=False)
        self._failed[found.asset_key] = failed_in(result.metadata)
        self._rolled_up.add(found.asset_key)
        self._log_check(result, None)

    def _read_failed(self, found: dg.AssetCheckResult) -> None:
        assert found.asset_key is not None
        if found.asset_key not in self._failed:
            self._failed[found.asset_key] = failed_before(self._instance, found)

    def _take_back(self, found: dg.AssetCheckResult, key: str) -> None:
        """Rolls up a result at once that takes a partition from those that failed: the load may not reach its end."""
        assert found.asset_key is not None
        if key in self._failed[found.asset_key]:
            self._roll_up(found, key, ())

    def _add_passed(self) -> None:
        """With ``checks: rollup``, records one result per asset for all partitions that passed."""
        for found, (key, *passed) in self._passed.values():
            self._batch.reads.append(partial(self._read_failed, found))
            self._batch.calls.append(partial(self._roll_up, found, key, passed))
        self._passed.clear()
        self._end("check results")

    def _log_made(
        self, made: MaterializeResult, key: str | None, inputs: Mapping[Stage, str], made_with: MadeWith | None
    ) -> None:
        """Stores a materialization with those that it was made from: without them Dagster takes it for outdated."""
        above = {stage: self._events.latest(asset_key(self._spec, stage), key) for stage in inputs}
        pointers = {stage: "NULL" if found is None else str(found.storage_id) for stage, found in above.items()}
        assert made.asset_key is not None
        stage = next(stage for stage in CHAIN if stage.name == dg.AssetKey.from_coercible(made.asset_key).path[-1])
        code = self._code_version(stage) if made_with is None else code_version(self._spec, stage, made_with)
        tags = self._shards_tags(key) if stage is RAW_SHARDS and key is not None else {}
        self._events.made(_materialization(self._spec, made, key, inputs, pointers, code, tags))

    def _shards_tags(self, key: str) -> dict[str, str]:
        """The tags of a first stage: which observation of its shards it was made after."""
        name, seen = shards_key(self._spec).to_user_string(), self._observed.get(key)
        digest = hashlib.sha256().hexdigest()  # as Dagster's own steps: of what has partitions and no materialization
        pointer = "NULL" if seen is None else str(seen)
        return {f"{_TAG}input_data_version/{name}": digest, f"{_TAG}input_event_pointer/{name}": pointer}

    def _code_version(self, stage: Stage) -> str | None:
        """What the stage would be made with now; the same for every partition."""
        if stage not in self._codes:
            self._codes[stage] = code_version(self._spec, stage)
        return self._codes[stage]

    def _log_check(self, found: dg.AssetCheckResult, partition: str | None) -> None:
        """Stores a check result with the materialization that it is about: without it Dagster takes it for outdated."""
        self._events.checked(evaluation_of(found, partition, self._events.latest))

    def _read_attempts(self) -> None:
        if self._attempts is None:  # once: it reads the events of earlier loads that failed
            self._attempts = failed_attempts(self._instance, self._spec)

    @cached_property
    def _observed(self) -> Mapping[str, int]:
        """The latest observation of each partition's shards: they are registered before a load."""
        return observation_ids(self._instance, self._spec)

    @cached_property
    def _made_with(self) -> str:
        return PUBLISHED.digest(self._spec, self._present.schema)

    def _log_failed(self, report: PartitionReport) -> None:
        """Stores that the rest of a partition was to be made: of a run that failed, Dagster shows that as failed."""
        key = report.partition
        fingerprint = self._present.partitions[key].fingerprint(self._made_with)
        tags = attempt_tags(fingerprint, (self._attempts or {}).get(key))
        failure = end_of(report)
        reached = failure.stage
        names = [stage.name for stage in CHAIN]
        for stage in CHAIN[names.index(reached) : CHAIN.index(PUBLISHED) + 1]:
            if stage.is_made(self._spec) and stage.name not in report.results:
                self._events.planned(asset_key(self._spec, stage), key, tags)
        self._events.observed(failed_observation(self._spec, failure))

    def _record_waiting(self) -> None:
        self.store()
        for pause in PAUSES:
            if not self._waiting:
                return
            time.sleep(pause)
            self.store()
        while self._waiting:
            self._lose(self._waiting.popleft().name, self._refusal)
            before = len(self._waiting)
            self.store()
            if before and len(self._waiting) == before:  # not this partition alone: the database is away
                Patient.has_ended = True
                while self._waiting:
                    self._lose(self._waiting.popleft().name, self._refusal)

    def store(self) -> None:
        """Stores what waits, in order, until the database is away; what it refuses for other reasons is lost."""
        while self._waiting:
            # Of those that were refused together, one may be at fault.
            batches = [*islice(self._waiting, 1 if self._waiting[0].was_tried else _AT_ONCE)]
            for asset in self._rolled_up:  # another load may roll up results of it too
                del self._failed[asset]
            self._rolled_up.clear()
            try:
                self._events.store(batches)
            except Exception as error:  # noqa: BLE001 - SQLAlchemy's, and whatever a storage raises
                self._refusal = first_line(error)
                if may_pass(error):
                    return
                if len(batches) > 1:
                    continue
                self._lose(batches[0].name, self._refusal)
            for _ in batches:
                self._waiting.popleft()

    def _lose(self, name: str, why: object) -> None:
        if name:
            self.lost[name] = str(why)


def is_known_manifest(instance: dg.DagsterInstance, spec: DatasetSpec, digest: str) -> bool:
    """Whether the manifest with this digest is Dagster's latest one."""
    found = instance.fetch_materializations(asset_key(spec, MANIFEST), limit=1).records
    known = found[0].asset_materialization if found else None
    return known is not None and (known.tags or {}).get(_VERSION) == digest


def lost_said(spec: DatasetSpec, lost: Mapping[str, str]) -> str:
    """What a load could not record, and what to do."""
    named = ", ".join([*lost][:_NAMED]) + (", …" if len(lost) > _NAMED else "")
    reasons = "; ".join(dict.fromkeys(lost.values()))
    again = f"`mm-assets sync --dataset {spec.name}` records what is published"
    return f"not recorded in Dagster: {named} ({len(lost):,} in all): {reasons}: {again}"


def _inputs(record: StageRecord) -> Mapping[Stage, str]:
    """The data version of each stage that a stage read."""
    return {STAGE_OF_FILE[name]: version for name, version in record.inputs.items() if name in STAGE_OF_FILE}


def _marker_inputs(marker: Mapping[str, Any]) -> Mapping[Stage, str]:
    return {STAGE_OF_FILE[form]: file["sha256"] for form, file in packed_files(marker).items()}


def _made_with(records: Mapping[Stage, StageRecord]) -> MadeWith:
    return {stage: record.made_with for stage, record in records.items()}


def _materialization(
    spec: DatasetSpec,
    made: MaterializeResult,
    key: str | None,
    inputs: Mapping[Stage, str],
    pointers: Mapping[Stage, str],
    code: str | None,
    further: Mapping[str, str],
) -> dg.AssetMaterialization:
    """A result of an asset as the event that Dagster stores of one, with the tags that tell whether it is stale."""
    assert made.asset_key is not None
    asset = dg.AssetKey.from_coercible(made.asset_key)
    version = "" if made.data_version is None else made.data_version.value
    tags = {_VERSION: version, f"{_TAG}data_version_is_user_provided": "true", **further}
    if code is not None:
        tags[_CODE] = code
    for above, of_above in inputs.items():
        # Of an input with partitions Dagster stores the SHA-256 of the versions of those that were read.
        digest = hashlib.sha256(of_above.encode()).hexdigest()
        name = asset_key(spec, above).to_user_string()
        tags |= {f"{_TAG}input_data_version/{name}": digest, f"{_TAG}input_event_pointer/{name}": pointers[above]}
    return dg.AssetMaterialization(asset, partition=key, metadata=made.metadata, tags=tags)
