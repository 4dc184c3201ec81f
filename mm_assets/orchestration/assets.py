"""The assets of one dataset, from shard to manifest: a body reads configuration, calls one function, reports."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import dagster as dg

from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.checks import check_specs
from mm_assets.orchestration.lineage import described_data
from mm_assets.orchestration.partitions import asset_key, code_version, shard_partitions, shards_key
from mm_assets.orchestration.report import (
    MaterializeResult,
    check_results,
    losses_table,
    manifest_result,
    published_result,
    stage_result,
)
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.rollup import failed_before, rolled_up, rollup_of_records
from mm_assets.orchestration.runs import exclusive_step, leased_run
from mm_assets.pipeline import publish, stages
from mm_assets.pipeline.chain import MANIFEST, PACKED_STAGES, PUBLISHED, Stage, packed_stages
from mm_assets.pipeline.losses import loss_totals
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore, StageFailure
from mm_assets.pipeline.work import PartitionWork

__all__ = ["build_assets"]

_Make = Callable[[PartitionWork, dg.AssetExecutionContext], MaterializeResult]


@contextmanager
def _reported(dataset: DatasetStore, stage: Stage, key: str = "") -> Iterator[None]:
    """Reports the library's own errors as a failure with their message; a bug keeps its traceback.

    Either is stored as the failure of the partition `key`.
    """
    try:
        yield
    except Exception as error:  # whatever fails the partition is recorded, then raised again
        if key:
            with suppress(MmAssetsError, OSError):  # the storage may be what failed
                dataset.write_failure(StageFailure.of(error, stage=stage.name, partition=key))
        if isinstance(error, MmAssetsError):
            description, metadata = f"{type(error).__name__}: {error}", _losses(dataset, key) if key else {}
            raise dg.Failure(description=description, metadata=metadata, allow_retries=False) from error
        raise


def _losses(dataset: DatasetStore, key: str) -> dict[str, Any]:
    """What a partition that failed lost before; nothing if that cannot be read."""
    with suppress(MmAssetsError, OSError):
        return {"losses": losses_table(loss_totals(dataset, [key]))}
    return {}


def build_assets(spec: DatasetSpec) -> list[dg.AssetsDefinition]:
    """Every asset of the dataset, with its checks."""

    def made(make: Callable[[PartitionWork], stages.StageResult]) -> _Make:
        def table(work: PartitionWork, context: dg.AssetExecutionContext) -> MaterializeResult:
            result = make(work)
            return stage_result(spec, result, _checked(context, spec, result))

        return table

    def published(work: PartitionWork, _: dg.AssetExecutionContext) -> MaterializeResult:
        return published_result(work.spec, publish.publish(work))

    tables = [_asset(spec, stage, made(make)) for stage, make in stages.TABLE_STAGES.items()]
    return [*tables, _packed_assets(spec), _asset(spec, PUBLISHED, published), _manifest_asset(spec)]


def _described(spec: DatasetSpec, stage: Stage) -> dict[str, Any]:
    """What the UI and Dagster's lineage need to know of a stage's asset."""
    metadata, tags = described_data(spec, stage)
    above = [asset_key(spec, one) for one in stage.upstream if one.is_made(spec)]
    return {
        "key": asset_key(spec, stage),
        "metadata": metadata,
        "tags": tags,
        "deps": above or [shards_key(spec)],
        "group_name": spec.name,
        "owners": list(spec.owners),
        "description": "\n\n".join(filter(None, (stage.description, spec.description))),
        "kinds": set(stage.kinds),
        "code_version": code_version(spec, stage),
    }


@contextmanager
def _working(context: dg.AssetExecutionContext, spec: DatasetSpec, stage: Stage) -> Iterator[PartitionWork]:
    """The run's partition for a stage, for this process alone; errors as `_reported` reports them."""
    dataset, key = open_dataset(context, spec), context.partition_key
    with (
        exclusive_step(context, dataset),
        _reported(dataset, stage, key),
        PartitionWork.registered(dataset, key) as work,
    ):
        yield work


def _asset(spec: DatasetSpec, stage: Stage, make: _Make) -> dg.AssetsDefinition:
    """The asset of one stage of each partition."""

    def body(context: dg.AssetExecutionContext) -> MaterializeResult:
        with _working(context, spec, stage) as work:
            return make(work, context)

    return _decorated(spec, stage, body, partitions_def=shard_partitions(spec))


def _manifest_asset(spec: DatasetSpec) -> dg.AssetsDefinition:
    def body(context: dg.AssetExecutionContext) -> MaterializeResult:
        dataset = open_dataset(context, spec)
        with _reported(dataset, MANIFEST), leased_run(context, dataset):
            return manifest_result(spec, publish.build_manifest(dataset))

    return _decorated(spec, MANIFEST, body, partitions_def=None)


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
        return [rolled_up(failed_before(instance, found), found, key) for found in results]
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
        for form, asset in keys.items():
            # Checks that were asked for without their asset ("Execute" in the UI) judge the file that is there.
            alone = {check.name for check in context.selected_asset_check_keys if check.asset_key == asset}
            if not alone or form in wanted:
                continue
            if spec.checks == "rollup" and not context.has_partition_key:  # a check of all partitions may have none
                dataset = open_dataset(context, spec)
                with _reported(dataset, PACKED_STAGES[form]):
                    found = rollup_of_records(dataset, PACKED_STAGES[form])
                yield found
                continue
            with _working(context, spec, PACKED_STAGES[form]) as work:
                result = stages.recheck_packed(work, form)
            yield from _checked(context, spec, result, alone)

    return body
