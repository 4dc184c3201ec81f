"""The assets of one dataset, from shard to manifest: a body reads configuration, calls one function, reports."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg

from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.checks import UNIQUE_IDS, check_specs
from mm_assets.orchestration.partitions import shard_partitions
from mm_assets.orchestration.report import check_results, losses_table, stage_metadata
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.rollup import rolled_up, rollup_of_records
from mm_assets.orchestration.runs import exclusive_step, tag_process
from mm_assets.pipeline import publish, stages
from mm_assets.pipeline.chain import MANIFEST, PACKED_STAGES, PUBLISHED, Stage
from mm_assets.pipeline.duplicate_ids import duplicates_said
from mm_assets.pipeline.losses import KINDS, loss_totals
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore, StageFailure
from mm_assets.pipeline.work import PartitionWork

__all__ = ["build_assets"]

if TYPE_CHECKING:
    _Result = dg.MaterializeResult[None]
else:
    _Result = dg.MaterializeResult  # Dagster takes no other annotation
_Make = Callable[[PartitionWork, dg.AssetExecutionContext], _Result]


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
    tables = [_asset(spec, stage, partial(_make_table, function)) for stage, function in stages.TABLE_STAGES.items()]
    return [*tables, _packed_assets(spec), _asset(spec, PUBLISHED, _publish), _manifest_asset(spec)]


def _key(spec: DatasetSpec, stage: Stage) -> dg.AssetKey:
    return dg.AssetKey([spec.name, stage.name])


def _described(spec: DatasetSpec, stage: Stage) -> dict[str, Any]:
    """What the UI and Dagster's lineage need to know of a stage's asset."""
    return {
        "key": _key(spec, stage),
        "deps": [_key(spec, above) for above in stage.upstream],
        "group_name": spec.name,
        "owners": list(spec.owners),
        "description": "\n\n".join(filter(None, (stage.description, spec.description))),
        "kinds": set(stage.kinds),
        "code_version": None if stage is MANIFEST else stage.digest(spec)[:16],
    }


@contextmanager
def _working(context: dg.AssetExecutionContext, spec: DatasetSpec, stage: Stage) -> Iterator[PartitionWork]:
    """The run's partition for a stage, for this process alone; errors as `_reported` reports them."""
    dataset, key = open_dataset(context, spec), context.partition_key
    with exclusive_step(context, spec), _reported(dataset, stage, key), PartitionWork.registered(dataset, key) as work:
        yield work


def _asset(spec: DatasetSpec, stage: Stage, make: _Make) -> dg.AssetsDefinition:
    """The asset of one stage of each partition."""

    def body(context: dg.AssetExecutionContext) -> _Result:
        with _working(context, spec, stage) as work:
            return make(work, context)

    return _decorated(spec, stage, body, partitions_def=shard_partitions(spec))


def _manifest_asset(spec: DatasetSpec) -> dg.AssetsDefinition:
    def body(context: dg.AssetExecutionContext) -> _Result:
        dataset = open_dataset(context, spec)
        tag_process(context)
        with _reported(dataset, MANIFEST):
            return _make_manifest(dataset, context)

    return _decorated(spec, MANIFEST, body, partitions_def=None)


def _decorated(
    spec: DatasetSpec,
    stage: Stage,
    body: Callable[[dg.AssetExecutionContext], _Result],
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


def _make_table(
    function: Callable[[PartitionWork], stages.StageResult], work: PartitionWork, context: dg.AssetExecutionContext
) -> _Result:
    return _materialized(context, work.spec, function(work))


def _materialized(context: dg.AssetExecutionContext, spec: DatasetSpec, result: stages.StageResult) -> _Result:
    return dg.MaterializeResult(
        asset_key=dg.AssetKey([spec.name, result.record.stage]),
        metadata=stage_metadata(result),
        check_results=_checked(context, spec, result),
        data_version=dg.DataVersion(next(iter(result.record.files.values())).sha256),
    )


def _checked(
    context: dg.AssetExecutionContext,
    spec: DatasetSpec,
    result: stages.StageResult,
    wanted: Iterable[str] | None = None,
) -> list[dg.AssetCheckResult]:
    results = check_results(spec, result, wanted=wanted)
    if spec.checks == "rollup":
        return [rolled_up(context.instance, found, context.partition_key) for found in results]
    return results


def _packed_assets(spec: DatasetSpec) -> dg.AssetsDefinition:
    keys = {form: _key(spec, stage) for form, stage in PACKED_STAGES.items()}

    @dg.multi_asset(
        name=f"{spec.name}__packed",
        specs=[dg.AssetSpec(**_described(spec, stage), skippable=True) for stage in PACKED_STAGES.values()],
        check_specs=[check for stage in PACKED_STAGES.values() for check in check_specs(spec, stage)],
        partitions_def=shard_partitions(spec),
        can_subset=True,
        required_resource_keys={resource_key(spec)},
    )
    def body(
        context: dg.AssetExecutionContext,
    ) -> Iterator[_Result | dg.AssetCheckResult]:
        wanted = [form for form, asset in keys.items() if asset in context.selected_asset_keys]
        if wanted:
            with _working(context, spec, PACKED_STAGES[wanted[0]]) as work:
                results = stages.packed(work, formats=wanted)
            for result in results.values():
                yield _materialized(context, spec, result)
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


def _publish(work: PartitionWork, _: dg.AssetExecutionContext) -> _Result:
    dataset, marker = work.dataset, publish.publish(work)
    packed = {form: marker["files"][form] for form in PACKED_STAGES}
    totals = loss_totals(dataset, [work.key])
    return dg.MaterializeResult(
        metadata={
            "count/samples": marker["num_samples"],
            **{f"count/{kind}": sum(t.count for t in totals if t.example.kind == kind) for kind in KINDS},
            "losses": losses_table(totals),
            **{f"uri/{form}": dg.MetadataValue.path(dataset.store.url_of(f["path"])) for form, f in packed.items()},
            **{f"bytes/{form}": file["size"] for form, file in packed.items()},
        },
        data_version=dg.DataVersion("+".join(file["sha256"] for file in packed.values())),
    )


def _make_manifest(dataset: DatasetStore, context: dg.AssetExecutionContext) -> _Result:
    report = publish.build_manifest(dataset)
    left_out = "\n".join(f"- `{key}`: {reason}" for key, reason in report.left_out.items())
    missing = "\n".join(f"- `{name}`: {', '.join(keys)}" for name, keys in report.missing_streams.items())
    duplicates = report.manifest["duplicate_ids"]
    unique_ids = dg.AssetCheckResult(
        check_name=UNIQUE_IDS,
        asset_key=context.asset_key,
        passed=not duplicates["count"],
        severity=dg.AssetCheckSeverity.WARN,
        description=duplicates_said(duplicates) or None,
        metadata={"num_duplicate_ids": duplicates["count"], "examples": duplicates["examples"]},
    )
    return dg.MaterializeResult(
        check_results=[unique_ids],
        metadata={
            "uri/manifest": dg.MetadataValue.path(report.url),
            "count/shards": len(report.manifest["shards"]),
            "count/samples": report.manifest["num_samples"],
            "count/left_out": len(report.left_out),
            "left_out": dg.MetadataValue.md(left_out or "nothing"),
            "missing_streams": dg.MetadataValue.md(missing or "nothing"),
        },
        data_version=dg.DataVersion(report.digest),
    )
