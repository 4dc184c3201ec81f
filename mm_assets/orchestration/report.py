"""What a stage did, as Dagster metadata: numbers, columns, a preview, a contact sheet, check results."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa

from mm_assets.checks.catalog import Check
from mm_assets.checks.context import Outcome
from mm_assets.orchestration.checks import UNIQUE_IDS, rules_of
from mm_assets.orchestration.partitions import asset_key
from mm_assets.pipeline.added_streams import names_set_aside
from mm_assets.pipeline.chain import MANIFEST, PUBLISHED, RECORDED_STAGES, STAGE_OF_FILE, Stage, packed_files
from mm_assets.pipeline.duplicate_ids import duplicates_said
from mm_assets.pipeline.losses import KINDS, LossTotal, listed_totals
from mm_assets.pipeline.publish import ManifestReport
from mm_assets.pipeline.records import StageRecord
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.stages import StageResult
from mm_assets.rows.columns import Kept
from mm_assets.rows.schema import COLUMN_DESCRIPTIONS, DatasetSchema

__all__ = [
    "MaterializeResult",
    "check_results",
    "losses_table",
    "manifest_result",
    "marker_version",
    "published_result",
    "reserved_columns",
    "stage_metadata",
    "stage_result",
    "stage_version",
]

if TYPE_CHECKING:
    MaterializeResult = dg.MaterializeResult[None]
else:
    MaterializeResult = dg.MaterializeResult  # Dagster takes no other annotation

_MAX_KEPT = 20  # faults in a table: the event log keeps it forever
_MAX_COLUMNS = 40  # of a dataset's own, by name
_STAGES = {stage.name: stage for stage in RECORDED_STAGES}


def stage_metadata(result: StageResult) -> dict[str, Any]:
    """Metadata of one materialization, small because the event log keeps it forever.

    What all partitions have in common is in the definition of the asset, such as `reserved_columns`. Numbers that the
    summary of a run shows are entries of their own, of which Dagster draws curves; the others are in a table.
    """
    record, preview, stage = result.record, result.preview, _STAGES[result.record.stage]
    metadata: dict[str, Any] = {}
    if preview.contact_sheet is not None:
        encoded = base64.b64encode(preview.contact_sheet).decode()
        metadata["contact_sheet"] = dg.MetadataValue.md(f"![contact sheet](data:image/webp;base64,{encoded})")
    if preview.modalities:
        metadata["rows_by_modality"] = dg.MetadataValue.md(_counts_table(preview.modalities, "modality", "rows"))
    if record.notes:
        metadata["notes"] = dg.MetadataValue.md("\n".join(f"- {note}" for note in record.notes))
    reasons = {name: count for name, count in record.counts.items() if "." in name}
    if reasons:
        metadata["by_reason"] = dg.MetadataValue.md(_counts_table(reasons, "reason", "rows"))
    if record.kept:
        metadata["kept"] = _kept_table(record.kept)
    shown = [name for _, name in stage.numbers]
    metadata |= {f"count/{name}": record.counts[name] for name in shown if name in record.counts}
    others = {name: n for name, n in record.counts.items() if n and name not in reasons and name not in shown}
    if others:
        metadata["counts"] = dg.MetadataValue.md(_counts_table(others, "what", "number"))
    if result.schema is not None:
        metadata["dagster/row_count"] = preview.num_rows
    metadata |= _files(result)
    metadata["seconds"] = round(result.seconds, 3)
    metadata["check_seconds"] = round(result.check_seconds, 3)
    moved = record.counts.get("content_bytes") or record.counts.get("bytes") or record.counts.get("shard_bytes") or 0
    if moved and result.seconds > 0:
        metadata["throughput_mb_per_s"] = round(moved / 1e6 / result.seconds, 1)
    if preview.histogram:
        metadata["content_sizes"] = dg.MetadataValue.md(preview.histogram)
    if preview.table:
        own = "" if result.schema is None else _own_columns(stage, result.schema)
        metadata |= {"own_columns": own} if own else {}
        metadata["preview"] = dg.MetadataValue.md(preview.table)
    return metadata


def _files(result: StageResult) -> dict[str, Any]:
    """Where the main file is and how large, and the same of the others in a table."""
    (name, main), *others = result.record.files.items()
    metadata = {f"uri/{name}": dg.MetadataValue.path(result.urls[name]), f"bytes/{name}": main.size}
    if others:
        lines = ["| file | bytes |", "| --- | ---: |"]
        lines += [_row((result.urls[other], f"{file.size:,}")) for other, file in others]
        metadata["other_files"] = dg.MetadataValue.md("\n".join(lines))
    return metadata


def stage_result(spec: DatasetSpec, result: StageResult, checks: Sequence[dg.AssetCheckResult]) -> MaterializeResult:
    """What Dagster stores of a stage of one partition, with the results of its checks."""
    key = asset_key(spec, STAGE_OF_FILE[next(iter(result.record.files))])
    return dg.MaterializeResult(
        asset_key=key,
        metadata=stage_metadata(result),
        check_results=checks,
        data_version=dg.DataVersion(stage_version(result.record)),
    )


def stage_version(record: StageRecord) -> str:
    """The data version of a stage of a partition: the digest of its main table, or of its packed file."""
    stage = STAGE_OF_FILE[next(iter(record.files))]
    return record.files[stage.files[0]].sha256


def published_result(spec: DatasetSpec, marker: Mapping[str, Any]) -> MaterializeResult:
    """What Dagster stores of a partition's marker."""
    totals, aside = listed_totals([marker["losses"]]), names_set_aside(marker.get("added"))
    return dg.MaterializeResult(
        asset_key=asset_key(spec, PUBLISHED),
        metadata={
            "count/samples": marker["num_samples"],
            **{f"count/{kind}": sum(t.count for t in totals if t.example.kind == kind) for kind in KINDS},
            "losses": losses_table(totals),
            **({"streams_set_aside": ", ".join(aside)} if aside else {}),
        },
        data_version=marker_version(marker),
    )


def marker_version(marker: Mapping[str, Any]) -> dg.DataVersion:
    """The data version of a published partition: the digest of its records.

    They name its files by digest, and what made these: other settings may make the same bytes.
    """
    record = marker.get("record")  # that of an earlier release has none
    return dg.DataVersion("+".join(f["sha256"] for f in ([record] if record else packed_files(marker).values())))


def manifest_result(spec: DatasetSpec, report: ManifestReport) -> MaterializeResult:
    """What Dagster stores of a manifest."""
    left_out = "\n".join(f"- `{key}`: {reason}" for key, reason in report.left_out.items())
    missing = "\n".join(f"- `{name}`: {', '.join(keys)}" for name, keys in report.missing_streams.items())
    duplicates = report.manifest["duplicate_ids"]
    key = asset_key(spec, MANIFEST)
    unique_ids = dg.AssetCheckResult(
        check_name=UNIQUE_IDS,
        asset_key=key,
        passed=not duplicates["count"],
        severity=dg.AssetCheckSeverity.WARN,
        description=duplicates_said(duplicates) or None,
        metadata={"num_duplicate_ids": duplicates["count"], "examples": duplicates["examples"]},
    )
    return dg.MaterializeResult(
        asset_key=key,
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


def losses_table(totals: Sequence[LossTotal]) -> dg.MarkdownMetadataValue:
    """What a partition lost, or kept with a fault, by stage and reason, with an example and what to do."""
    lines = ["| kind | stage | reason | count | first of them | what to do |", "| --- | --- | --- | ---: | --- | --- |"]
    for total in totals:
        loss = total.example
        sample = "" if loss.sample_id is None else f"sample {loss.sample_id}"
        first = ": ".join(filter(None, (loss.place or sample, loss.detail)))
        cells = (loss.kind, loss.stage, loss.reason, f"{total.count:,}", first, loss.advice)
        lines.append(_row(cells))
    return dg.MetadataValue.md("\n".join(lines) if totals else "nothing")


def _kept_table(faults: Sequence[Kept]) -> dg.MarkdownMetadataValue:
    """Faults that keep nothing from being published, each with the first item that has it."""
    lines = ["| fault | count | what | first sample |", "| --- | ---: | --- | --- |"]
    for fault in faults[:_MAX_KEPT]:
        cells = (fault.reason, f"{fault.count:,}", fault.detail, fault.origin.sample_id or "")
        lines.append(_row(cells))
    lines += [f"and {len(faults) - _MAX_KEPT} more: `mm-assets losses` lists them"] if len(faults) > _MAX_KEPT else []
    return dg.MetadataValue.md("\n".join(lines))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def reserved_columns(stage: Stage) -> dg.TableSchema | None:
    """The columns that the main table of a stage has in every dataset; None of a stage without tables."""
    if not stage.tables:
        return None
    columns = [
        dg.TableColumn(
            name=field.name,
            type=str(field.type),
            description=COLUMN_DESCRIPTIONS.get(field.name),
            constraints=dg.TableColumnConstraints(nullable=field.nullable),
        )
        for field in stage.tables[0].schema(DatasetSchema())
    ]
    return dg.TableSchema(columns=columns)


def _own_columns(stage: Stage, schema: pa.Schema) -> str:
    """The user's and annotators' columns with their types."""
    reserved = set(stage.tables[0].schema(DatasetSchema()).names)
    own = [f"{field.name} ({field.type})" for field in schema if field.name not in reserved]
    more = [f"and {len(own) - _MAX_COLUMNS:,} more"] if len(own) > _MAX_COLUMNS else []
    return ", ".join(own[:_MAX_COLUMNS] + more)


def _counts_table(counts: Mapping[str, int], what: str, of: str) -> str:
    lines = [f"| {what} | {of} |", "| --- | ---: |"]
    return "\n".join(lines + [f"| {name} | {count:,} |" for name, count in sorted(counts.items())])


def check_results(
    spec: DatasetSpec, result: StageResult, *, wanted: Iterable[str] | None = None
) -> list[dg.AssetCheckResult]:
    """What the checks of an asset found in one partition, as the setting `checks` names and gathers them.

    Each has a table of its rules, and the first rows that violate those that failed. It is an error where a rule
    failed that stops a partition, else a warning.
    """
    asset, names = result.record.stage, None if wanted is None else set(wanted)
    outcomes = {outcome.name: outcome for outcome in result.outcomes}
    return [
        _check_result(spec, asset, name, {rule: outcomes[rule.name] for rule in rules if rule.name in outcomes})
        for name, rules in rules_of(spec, asset).items()
        if names is None or name in names
    ]


def _check_result(spec: DatasetSpec, asset: str, name: str, outcomes: Mapping[Check, Outcome]) -> dg.AssetCheckResult:
    failed = [outcome for outcome in outcomes.values() if not outcome.passed]
    stops = not failed or any(outcome.stops for outcome in failed)
    violations = {outcome.name: _violations(outcome) for outcome in failed if outcome.violations}
    metadata: dict[str, Any]
    if spec.checks == "per_rule":
        metadata = {"num_violations": sum(outcome.num_violations for outcome in failed)}
        metadata |= dict(zip(["violations"], violations.values(), strict=False))
        said = [outcome.said for outcome in failed]
    else:
        metadata = {"rules": _rules_table(outcomes)}
        metadata |= {f"violations/{name}": table for name, table in violations.items()}
        said = [f"{outcome.name}: {outcome.said}" for outcome in failed]
    return dg.AssetCheckResult(
        check_name=name,
        asset_key=dg.AssetKey([spec.name, asset]),
        passed=not failed,
        severity=dg.AssetCheckSeverity.ERROR if stops else dg.AssetCheckSeverity.WARN,
        description="; ".join(said) or None,  # the rules themselves are in the description of the check
        metadata=metadata,
    )


def _rules_table(outcomes: Mapping[Check, Outcome]) -> dg.MarkdownMetadataValue:
    """The outcome of each rule; what the rules say is in the description of the check."""
    lines = ["|rule|passed|violations|", "|-|-|-:|"]
    for rule, outcome in outcomes.items():
        passed = "yes" if outcome.passed else "no" if outcome.blocking else "no, a warning"
        lines.append(f"|{rule.name}|{passed}|{outcome.num_violations:,}|")
    return dg.MetadataValue.md("\n".join(lines))


def _violations(outcome: Outcome) -> dg.TableMetadataValue:
    columns = list(outcome.violations[0])
    records = [dg.TableRecord({name: _scalar(row.get(name)) for name in columns}) for row in outcome.violations]
    return dg.MetadataValue.table(records, schema=dg.TableSchema(columns=[dg.TableColumn(name=n) for n in columns]))


def _scalar(value: object) -> str | int | float | bool | None:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
