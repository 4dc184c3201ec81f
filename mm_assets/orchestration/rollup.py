"""`checks: rollup`: a result per asset for all partitions, which names those that failed."""

from collections.abc import Mapping, Sequence
from itertools import chain

import dagster as dg

from mm_assets.orchestration.checks import ROLLUP
from mm_assets.orchestration.partitions import asset_key
from mm_assets.pipeline.chain import Stage
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.summaries import counted

__all__ = ["failed_before", "rolled_up", "rollup_of_records"]

_FAILED = "failed"  # metadata: the partitions that failed, each with what was found
_MAX_FAILED = 100  # of them: the event log keeps it forever
_MAX_TEXT = 200  # characters of what the rules of one said
_MAX_KEYS_IN_DESCRIPTION = 5


def rolled_up(
    before: Mapping[str, str], results: Sequence[tuple[dg.AssetCheckResult, str]], *, is_gate: bool = True
) -> dg.AssetCheckResult:
    """Returns one result of an asset's check in some partitions, with the others that failed `before`.

    Those make it an error, but a warning where it is a gate: an error would stop this partition, which has passed.

    Args:
        before: the partitions that failed, each with what its rules found.
        results: of some partitions, each with its key; at least one.
        is_gate: whether the result stops the partition.
    """
    keys = {key for _, key in results}
    failed = {key: rules for key, rules in before.items() if key not in keys}
    violated = [(found, key) for found, key in results if not found.passed]
    lines = [f"{key}: {found.description}" for found, key in violated[:_MAX_KEYS_IN_DESCRIPTION]]
    if failed:
        names = ", ".join(list(failed)[:_MAX_KEYS_IN_DESCRIPTION])
        more = ", …" if len(failed) > _MAX_KEYS_IN_DESCRIPTION else ""
        lines.append(f"{counted(len(failed), 'partition')} failed before: {names}{more}")
    stopped = {key: found.description or "" for found, key in violated if found.severity == dg.AssetCheckSeverity.ERROR}
    is_error = stopped or not lines or (failed and not is_gate)
    shown, partition = (violated or results)[-1]
    return dg.AssetCheckResult(
        check_name=ROLLUP,
        asset_key=shown.asset_key,
        passed=not lines,
        severity=dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
        description="; ".join(lines) or None,
        metadata={"partition": partition, **shown.metadata, **_table(failed | stopped)},
    )


def rollup_of_records(dataset: DatasetStore, stages: Sequence[Stage]) -> list[dg.AssetCheckResult]:
    """Returns a result for each stage by the records of all partitions: passed if no rule failed that stops one.

    Each record is read once: there may be very many.
    """
    failed: dict[Stage, dict[str, str]] = {stage: {} for stage in stages}
    checked = dict.fromkeys(stages, 0)
    state = DatasetState(dataset)
    attempts = ((key, dataset.attempt(key)) for key in state.pending if key in state.attempts)
    published = dataset.read_records((key, state.recipes[key]) for key in state.partitions if state.is_published(key))
    for partition, latest in chain(attempts, published):
        records = {} if latest is None else latest.stages
        for stage in records.keys() & checked.keys():
            checked[stage] += 1
            stopped = [f"{outcome.name}: {outcome.said}" for outcome in records[stage].outcomes if outcome.stops]
            if stopped:
                failed[stage][partition] = "; ".join(stopped)
    return [
        dg.AssetCheckResult(
            check_name=ROLLUP,
            asset_key=asset_key(dataset.spec, stage),
            passed=not failed[stage],
            description=f"{len(failed[stage]):,} of {counted(num, 'partition')} failed" if failed[stage] else None,
            metadata={"num_partitions": num, **_table(failed[stage])},
        )
        for stage, num in checked.items()
    ]


def failed_before(instance: dg.DagsterInstance, result: dg.AssetCheckResult) -> dict[str, str]:
    """The partitions that the latest result of an asset names before this one, each with what its rules said."""
    assert result.asset_key is not None
    key = dg.AssetCheckKey(dg.AssetKey.from_coercible(result.asset_key), ROLLUP)
    summary = instance.event_log_storage.get_asset_check_summary_records([key])[key]
    record = summary.last_completed_check_execution_record
    event = None if record is None or record.event is None else record.event.dagster_event
    return {} if event is None else _failed_in(event.asset_check_evaluation_data.metadata)


def _failed_in(metadata: Mapping[str, object]) -> dict[str, str]:
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
