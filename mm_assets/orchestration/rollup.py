"""`checks: rollup`: a result per asset for all partitions, which names those that failed."""

from collections.abc import Iterable, Mapping

import dagster as dg

from mm_assets.orchestration.checks import ROLLUP
from mm_assets.orchestration.partitions import asset_key
from mm_assets.pipeline.chain import Stage
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.summaries import counted

__all__ = ["failed_before", "failed_in", "rolled_up", "rollup_of_records"]

_FAILED = "failed"  # metadata: the partitions that failed, each with what was found
_MAX_FAILED = 100  # of them: the event log keeps it forever
_MAX_TEXT = 200  # characters of what the rules of one said
_NAMED = 5  # in a description


def rolled_up(
    before: Mapping[str, str],
    result: dg.AssetCheckResult,
    partition: str,
    *,
    passed: Iterable[str] = (),
    is_gate: bool = True,
) -> dg.AssetCheckResult:
    """What a check found in one partition, with the others that failed `before` and have not `passed` since.

    Those make it an error, but a warning where it is a gate: an error would stop this partition, which has passed.
    """
    stops = not result.passed and result.severity == dg.AssetCheckSeverity.ERROR
    passed = {partition, *passed}
    failed = {key: said for key, said in before.items() if key not in passed}
    said = [] if result.passed else [f"{partition}: {result.description}"]
    if failed:
        named = ", ".join(list(failed)[:_NAMED]) + (", …" if len(failed) > _NAMED else "")
        said.append(f"{counted(len(failed), 'partition')} failed before: {named}")
    is_error = stops or not said or (failed and not is_gate)
    severity = dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN
    if stops:
        failed[partition] = result.description or ""
    return dg.AssetCheckResult(
        check_name=ROLLUP,
        asset_key=result.asset_key,
        passed=not said,
        severity=severity,
        description="; ".join(said) or None,
        metadata={"partition": partition, **result.metadata, **_table(failed)},
    )


def rollup_of_records(dataset: DatasetStore, stage: Stage) -> dg.AssetCheckResult:
    """What the records of all partitions say: passed where no rule failed that stops a partition."""
    failed: dict[str, str] = {}
    checked = 0
    for partition in dataset.partitions():
        record = dataset.records(partition).get(stage)
        if record is None:
            continue
        checked += 1
        stopped = [f"{outcome.name}: {outcome.said}" for outcome in record.outcomes if outcome.stops]
        if stopped:
            failed[partition] = "; ".join(stopped)
    return dg.AssetCheckResult(
        check_name=ROLLUP,
        asset_key=asset_key(dataset.spec, stage),
        passed=not failed,
        description=f"{len(failed):,} of {counted(checked, 'partition')} failed" if failed else None,
        metadata={"num_partitions": checked, **_table(failed)},
    )


def failed_before(instance: dg.DagsterInstance, result: dg.AssetCheckResult) -> dict[str, str]:
    """The partitions that the latest result of an asset names before this one, each with what its rules said."""
    assert result.asset_key is not None
    key = dg.AssetCheckKey(dg.AssetKey.from_coercible(result.asset_key), ROLLUP)
    summary = instance.event_log_storage.get_asset_check_summary_records([key])[key]
    record = summary.last_completed_check_execution_record
    event = None if record is None or record.event is None else record.event.dagster_event
    return {} if event is None else failed_in(event.asset_check_evaluation_data.metadata)


def failed_in(metadata: Mapping[str, object]) -> dict[str, str]:
    """The partitions that the metadata of a result names, each with what its rules said."""
    table = metadata.get(_FAILED)
    if not isinstance(table, dg.TableMetadataValue):
        return {}
    return {str(row.data["partition"]): str(row.data["rules"]) for row in table.records}


def _table(failed: Mapping[str, str]) -> dict[str, dg.TableMetadataValue]:
    rows = [
        dg.TableRecord({"partition": partition, "rules": said[:_MAX_TEXT]})
        for partition, said in list(failed.items())[-_MAX_FAILED:]
    ]
    schema = dg.TableSchema(columns=[dg.TableColumn(name="partition"), dg.TableColumn(name="rules")])
    return {_FAILED: dg.MetadataValue.table(rows, schema=schema)} if rows else {}
