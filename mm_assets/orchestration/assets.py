"""The assets of one dataset, from shard to manifest: a body reads configuration, calls one function, reports."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg

from mm_assets import __version__
from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.checks import check_specs
from mm_assets.orchestration.partitions import shard_partitions
from mm_assets.orchestration.report import check_results, stage_metadata
from mm_assets.orchestration.resources import StorageRoot, resource_key
from mm_assets.orchestration.runs import exclusive_step
from mm_assets.pipeline import publish, stages
from mm_assets.pipeline.chain import MANIFEST, PACKED_STAGES, PUBLISHED, Stage
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore

__all__ = ["build_assets"]


@contextmanager
def _reported() -> Iterator[None]:
    """Reports the library's own errors as a failure with their message; a bug keeps its traceback."""
    try:
        yield
    except MmAssetsError as error:
        raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error


def build_assets(spec: DatasetSpec) -> list[dg.AssetsDefinition]:
    """Every asset of the dataset, with its checks."""
    staged = [_table_asset(spec, stage, function) for stage, function in stages.TABLE_STAGES.items()]
    assets = [*staged, _packed_assets(spec), _published_asset(spec), _manifest_asset(spec)]
    return [asset.map_asset_specs(lambda asset_spec: _labelled(asset_spec, spec)) for asset in assets]


def _labelled(asset: dg.AssetSpec, spec: DatasetSpec) -> dg.AssetSpec:
    """An asset with its dataset's group, owners and description."""
    description = "\n\n".join(filter(None, (asset.description, spec.description)))
    return asset.replace_attributes(group_name=spec.name, owners=list(spec.owners), description=description)


def _key(spec: DatasetSpec, stage: Stage) -> dg.AssetKey:
    return dg.AssetKey([spec.name, stage.name])


def _upstream(spec: DatasetSpec, stage: Stage) -> list[dg.AssetKey]:
    return [_key(spec, above) for above in stage.upstream]


def _code_version(spec: DatasetSpec, stage: Stage) -> str:
    return f"{__version__}-{stage.digest(spec)[:12]}"


def _table_asset(
    spec: DatasetSpec, stage: Stage, function: Callable[[DatasetStore, str], stages.StageResult]
) -> dg.AssetsDefinition:
    key = _key(spec, stage)

    @dg.asset(
        key=key,
        deps=_upstream(spec, stage),
        partitions_def=shard_partitions(spec),
        check_specs=check_specs(spec, stage),
        description=stage.description,
        kinds=set(stage.kinds),
        code_version=_code_version(spec, stage),
        required_resource_keys={resource_key(spec)},
    )
    def body(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]  # no value is handed on
        dataset = _open(context, spec)
        with exclusive_step(context, spec), _reported():
            result = function(dataset, context.partition_key)
        return _materialized(result, key)

    return body


def _open(context: dg.AssetExecutionContext, spec: DatasetSpec) -> DatasetStore:
    storage: StorageRoot = getattr(context.resources, resource_key(spec))
    return storage.open(spec)


def _materialized(result: stages.StageResult, key: dg.AssetKey) -> dg.MaterializeResult:  # type: ignore[type-arg]  # no value is handed on
    return dg.MaterializeResult(
        asset_key=key,
        metadata=stage_metadata(result),
        check_results=check_results(result, key),
        data_version=dg.DataVersion(next(iter(result.record.files.values())).sha256),
    )


def _packed_assets(spec: DatasetSpec) -> dg.AssetsDefinition:
    keys = {form: _key(spec, stage) for form, stage in PACKED_STAGES.items()}

    @dg.multi_asset(
        name=f"{spec.name}__packed",
        specs=[
            dg.AssetSpec(
                _key(spec, stage),
                deps=_upstream(spec, stage),
                description=stage.description,
                kinds=set(stage.kinds),
                code_version=_code_version(spec, stage),
                skippable=True,
            )
            for stage in PACKED_STAGES.values()
        ],
        check_specs=[check for stage in PACKED_STAGES.values() for check in check_specs(spec, stage)],
        partitions_def=shard_partitions(spec),
        can_subset=True,
        required_resource_keys={resource_key(spec)},
    )
    def body(
        context: dg.AssetExecutionContext,
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:  # type: ignore[type-arg]  # no value is handed on
        wanted = [form for form, key in keys.items() if key in context.selected_asset_keys]
        dataset = _open(context, spec)
        if wanted:
            with exclusive_step(context, spec), _reported():
                results = stages.packed(dataset, context.partition_key, formats=wanted)
            for form, result in results.items():
                yield _materialized(result, keys[form])
        for form, key in keys.items():
            # Checks that were asked for without their asset ("Execute" in the UI) judge the file that is there.
            alone = {check.name for check in context.selected_asset_check_keys if check.asset_key == key}
            if alone and form not in wanted:
                with exclusive_step(context, spec), _reported():
                    result = stages.recheck_packed(dataset, context.partition_key, form)
                yield from check_results(result, key, wanted=alone)

    return body


def _published_asset(spec: DatasetSpec) -> dg.AssetsDefinition:
    @dg.asset(
        key=_key(spec, PUBLISHED),
        deps=_upstream(spec, PUBLISHED),
        partitions_def=shard_partitions(spec),
        description=PUBLISHED.description,
        kinds=set(PUBLISHED.kinds),
        code_version=_code_version(spec, PUBLISHED),
        required_resource_keys={resource_key(spec)},
    )
    def body(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]  # no value is handed on
        dataset = _open(context, spec)
        with exclusive_step(context, spec), _reported():
            marker = publish.publish(dataset, context.partition_key)
        packed = {form: marker["files"][form] for form in PACKED_STAGES}
        return dg.MaterializeResult(
            metadata={
                "count/samples": marker["num_samples"],
                **{f"uri/{form}": dg.MetadataValue.path(dataset.store.url_of(f["path"])) for form, f in packed.items()},
                **{f"bytes/{form}": file["size"] for form, file in packed.items()},
            },
            data_version=dg.DataVersion("+".join(file["sha256"] for file in packed.values())),
        )

    return body


def _manifest_asset(spec: DatasetSpec) -> dg.AssetsDefinition:
    @dg.asset(
        key=_key(spec, MANIFEST),
        deps=_upstream(spec, MANIFEST),
        description=MANIFEST.description,
        kinds=set(MANIFEST.kinds),
        required_resource_keys={resource_key(spec)},
    )
    def body(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]  # no value is handed on
        dataset = _open(context, spec)
        with _reported():
            report = publish.build_manifest(dataset)
        left_out = "\n".join(f"- `{key}`: {reason}" for key, reason in report.left_out.items())
        missing = "\n".join(f"- `{name}`: {', '.join(keys)}" for name, keys in report.missing_streams.items())
        return dg.MaterializeResult(
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

    return body
