"""The assets of one dataset, from shard to manifest: a body reads configuration, calls one function, reports."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import dagster as dg

from mm_assets.dataset import dataset as packed_data
from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.orchestration.automation import automation_condition, freshness_policy
from mm_assets.orchestration.checks import check_specs
from mm_assets.orchestration.event_log import RunEvents, forget_planned_checks
from mm_assets.orchestration.lineage import described_data
from mm_assets.orchestration.partitions import (
    asset_key,
    check_job_name,
    code_version,
    load_job_name,
    shard_partitions,
    shards_key,
)
from mm_assets.orchestration.report import (
    MaterializeResult,
    check_results,
    export_result,
    failed_observation,
    failed_said,
    index_result,
    losses_of_failed,
    manifest_result,
    published_result,
    stage_result,
)
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.rollup import failed_before, rolled_up, rollup_of_records
from mm_assets.orchestration.runs import claimed_run, exclusive_step
from mm_assets.orchestration.shown import failure_of, shown_cause
from mm_assets.pipeline.chain import MANIFEST, PACKED_STAGES, PUBLISHED, Stage, export_stage, index_stage, packed_stages
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.spec import DatasetSpec, ExportOptions, IndexOptions
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.exports import export_partition, write_indexes
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.pipeline.state.staleness import DatasetState

__all__ = ["build_assets"]

_MakeStage = Callable[[PartitionWork], stages.StageResult]


@contextmanager
def _reported() -> Iterator[None]:
    """Reports the library's own errors as a failure with their message; a bug keeps its traceback."""
    try:
        yield
    except MmAssetsError as error:
        raise failure_of(error) from shown_cause(error)


def build_assets(spec: DatasetSpec) -> list[dg.AssetsDefinition]:
    """Every asset of the dataset, with its checks."""
    tables = [_table_asset(spec, stage, make) for stage, make in stages.TABLE_STAGES.items()]
    exports = [_export_asset(spec, options) for options in spec.exports]
    indexes = [_index_asset(spec, options) for options in spec.indexes]
    return [*tables, _packed_assets(spec), _published_asset(spec), *exports, _manifest_asset(spec), *indexes]


def _described(spec: DatasetSpec, stage: Stage) -> dict[str, Any]:
    """What the UI and Dagster's lineage need to know of a stage's asset."""
    metadata, tags = described_data(spec, stage)
    many = (
        f"For many partitions launch the job `{load_job_name(spec)}`, one run that takes all that are pending: "
        "*Materialize all* starts a run for each partition."
    )
    above = [asset_key(spec, one) for one in stage.upstream if one.is_made(spec)]
    return {
        "key": asset_key(spec, stage),
        "metadata": metadata,
        "tags": {**spec.tags, **tags},
        "automation_condition": automation_condition(spec, stage),
        "freshness_policy": freshness_policy(spec, stage),
        "deps": above or [shards_key(spec)],
        "group_name": spec.name,
        "owners": list(spec.owners),
        "description": "\n\n".join(
            filter(None, (stage.description, many if stage.is_partitioned else "", spec.description))
        ),
        "kinds": set(stage.kinds),
        "code_version": code_version(spec, stage),
    }


@contextmanager
def _working(context: dg.AssetExecutionContext, spec: DatasetSpec, stage: Stage) -> Iterator[PartitionWork]:
    """The run's partition for a stage, for this process alone.

    What ends it is stored as the failure of the partition. The library's own errors are raised as a failure that says
    what to do; a bug keeps its traceback.
    """
    dataset = open_dataset(context, spec)
    with exclusive_step(context, dataset) as key:
        work: PartitionWork | None = None
        try:
            with PartitionWork.registered(dataset, key) as work:
                yield work
        except Exception as error:  # whatever ends the step is shown on the partition's page, then raised again
            failure = StageFailure.of(error, stage=stage.name, partition=key)
            completed = None
            with suppress(MmAssetsError, OSError):  # the storage may be what failed
                completed = None if work is None else work.stages
            dataset.write_failure(failure, completed)
            _observe_failure(context, spec, failure)
            forget_planned_checks(context.instance, context.run.run_id)
            if not isinstance(error, MmAssetsError):
                raise
            said = failed_said(spec, failure)
            metadata = losses_of_failed(dataset, [key])
            raise dg.Failure(description=said, metadata=metadata, allow_retries=False) from shown_cause(error)


def _stop_at_checks(
    context: dg.AssetExecutionContext, spec: DatasetSpec, results: Iterable[stages.StageResult]
) -> None:
    """Ends a step whose checks stop the partition; Dagster would too, without a word of what they found.

    It is called once the results are yielded: only what is observed after a materialization is shown with it.

    Raises:
        dg.Failure: a check stops the partition.
    """
    failures = [result.record.failure for result in results if result.record.failure is not None]
    for failure in failures:
        _observe_failure(context, spec, failure)
    if failures:
        forget_planned_checks(context.instance, context.run.run_id)
        said = "\n".join(failed_said(spec, failure) for failure in failures)
        raise dg.Failure(description=said, allow_retries=False)


def _observe_failure(context: dg.AssetExecutionContext, spec: DatasetSpec, failure: StageFailure) -> None:
    """Stores for the page of a partition that and why it failed, and what to do."""
    step = context.get_step_execution_context().step.key
    run = {"run_id": context.run.run_id, "job_name": context.job_name, "step_key": step}
    RunEvents(context.instance, spec, **run).store([failed_observation(spec, failure)])


def _table_asset(spec: DatasetSpec, stage: Stage, make: _MakeStage) -> dg.AssetsDefinition:
    """The asset of a stage that makes tables of each partition, whose checks can be executed without it."""

    @dg.multi_asset(
        name=f"{spec.name}__{stage.name}",
        specs=[dg.AssetSpec(**_described(spec, stage))],
        check_specs=check_specs(spec, stage),
        partitions_def=shard_partitions(spec),
        can_subset=True,
        pool=spec.pool,
        required_resource_keys={resource_key(spec)},
    )
    def body(context: dg.AssetExecutionContext) -> Iterator[MaterializeResult | dg.AssetCheckResult]:
        if asset_key(spec, stage) in context.selected_asset_keys:
            with _working(context, spec, stage) as work:
                result = make(work)
            yield stage_result(spec, result, _checked(context, spec, result))
            _stop_at_checks(context, spec, [result])
        else:
            yield from _rechecked(context, spec, stage)

    return body


def _rechecked(context: dg.AssetExecutionContext, spec: DatasetSpec, stage: Stage) -> Iterator[dg.AssetCheckResult]:
    """The checks that were asked for without their asset ("Execute all" in the UI), of the files that are there."""
    key = asset_key(spec, stage)
    alone = {check.name for check in context.selected_asset_check_keys if check.asset_key == key}
    if not alone:
        return
    if spec.checks == "rollup" and not context.has_partition_key:  # a check of all partitions may have none
        dataset = open_dataset(context, spec)
        with _reported():
            found = rollup_of_records(dataset, [stage])
        yield from found
        return
    if not context.has_partition_key:  # as those of the UI's "Execute all" are
        how = f"launch the job `{check_job_name(spec)}` for one, which runs its checks and makes nothing"
        raise dg.Failure(
            description=f"these checks are of a partition, and the run has none: {how}", allow_retries=False
        )
    with _working(context, spec, stage) as work:
        result = stages.recheck(work, stage)
    yield from _checked(context, spec, result, alone)
    _stop_at_checks(context, spec, [result])


def _published_asset(spec: DatasetSpec) -> dg.AssetsDefinition:
    """The asset of the publication of a partition."""

    def body(context: dg.AssetExecutionContext) -> MaterializeResult:
        with _working(context, spec, PUBLISHED) as work:
            return published_result(work.spec, publish.publish(work)[0])

    return _decorated(spec, PUBLISHED, body, partitions_def=shard_partitions(spec))


def _export_asset(spec: DatasetSpec, options: ExportOptions) -> dg.AssetsDefinition:
    """The asset of an export of each published partition."""

    def body(context: dg.AssetExecutionContext) -> MaterializeResult:
        dataset = open_dataset(context, spec)
        with exclusive_step(context, dataset) as key, _reported():
            state = DatasetState(dataset)
            published = state.published()
            if key not in published:
                detail = f"{key} cannot be exported: {state.fault(key)}: materialize {PUBLISHED.name} first"
                raise SourceError(dataset.store.url, detail)
            made = export_partition(dataset, options, published[key])
            write_indexes(dataset, published)
        return export_result(spec, options, key, made)

    return _decorated(spec, export_stage(options), body, partitions_def=shard_partitions(spec))


def _manifest_asset(spec: DatasetSpec) -> dg.AssetsDefinition:
    def body(context: dg.AssetExecutionContext) -> MaterializeResult:
        dataset = open_dataset(context, spec)
        with _reported(), claimed_run(context, dataset):
            report = manifests.build_manifest(dataset)
            if spec.exports:
                write_indexes(dataset, report.state.published())
            return manifest_result(spec, report)

    return _decorated(spec, MANIFEST, body, partitions_def=None)


def _index_asset(spec: DatasetSpec, options: IndexOptions) -> dg.AssetsDefinition:
    """The asset of an index of the newest dataset version."""

    def body(context: dg.AssetExecutionContext) -> MaterializeResult:
        dataset = open_dataset(context, spec)
        with _reported():
            where = dataset.store.url_of("manifest.json")
            with packed_data.open(where, storage_options=spec.root_options) as data:
                made = data.build_index(options.modality, metric=options.metric)
                return index_result(spec, options, made, num_present=int(data.presence(options.modality).sum()))

    return _decorated(spec, index_stage(options), body, partitions_def=None)


def _decorated(
    spec: DatasetSpec,
    stage: Stage,
    body: Callable[[dg.AssetExecutionContext], MaterializeResult],
    *,
    partitions_def: dg.PartitionsDefinition[str] | None,
) -> dg.AssetsDefinition:
    decorate: Callable[..., dg.AssetsDefinition] = dg.asset(
        **_described(spec, stage),
        partitions_def=partitions_def,
        check_specs=check_specs(spec, stage),
        pool=spec.pool,
        required_resource_keys={resource_key(spec)},
    )
    return decorate(body)


def _checked(
    context: dg.AssetExecutionContext,
    spec: DatasetSpec,
    result: stages.StageResult,
    wanted: Iterable[str] | None = None,
) -> list[dg.AssetCheckResult]:
    results = check_results(spec, result, wanted=wanted)
    if spec.checks == "rollup":
        key, instance = context.partition_key, context.instance
        return [rolled_up(failed_before(instance, found), [(found, key)]) for found in results]
    return results


def _packed_assets(spec: DatasetSpec) -> dg.AssetsDefinition:
    made = packed_stages(spec)
    keys = {form: asset_key(spec, stage) for form, stage in made.items()}

    @dg.multi_asset(
        name=f"{spec.name}__packed",
        specs=[dg.AssetSpec(**_described(spec, stage), skippable=True) for stage in made.values()],
        check_specs=[check for stage in made.values() for check in check_specs(spec, stage)],
        partitions_def=shard_partitions(spec),
        can_subset=True,
        pool=spec.pool,
        required_resource_keys={resource_key(spec)},
    )
    def body(
        context: dg.AssetExecutionContext,
    ) -> Iterator[MaterializeResult | dg.AssetCheckResult]:
        wanted = [form for form, asset in keys.items() if asset in context.selected_asset_keys]
        if wanted:
            with _working(context, spec, PACKED_STAGES[wanted[0]]) as work:
                results = stages.packed(work, formats=wanted)
            for result in results.values():
                yield stage_result(spec, result, _checked(context, spec, result))
            _stop_at_checks(context, spec, results.values())
        for form in (form for form in keys if form not in wanted):
            yield from _rechecked(context, spec, PACKED_STAGES[form])

    return body
