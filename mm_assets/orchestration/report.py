"""What a stage did, as Dagster metadata: numbers, columns, samples with pictures, charts, check results."""

import json
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa

from mm_assets.checks.catalog import Check
from mm_assets.checks.outcome import Outcome
from mm_assets.dataset.manifest import manifest_partitions
from mm_assets.dataset.vector_index import IndexSummary
from mm_assets.errors import MmAssetsError, best_effort, masked_urls
from mm_assets.orchestration.checks import ALL_VECTORS, READ_AGAIN, RECALL, UNIQUE_IDS, rules_of
from mm_assets.orchestration.lineage import modality_columns
from mm_assets.orchestration.partitions import asset_key
from mm_assets.orchestration.shown import (
    chart_value,
    counts_table,
    escaped,
    escaped_in_line,
    is_inline,
    markdown_table,
    rows_table,
    sample_value,
    text_table,
)
from mm_assets.orchestration.viewer import viewer_link
from mm_assets.pipeline.chain import (
    CHAIN,
    MANIFEST,
    PUBLISHED,
    RECORDED_STAGES,
    STAGE_OF_FILE,
    Stage,
    export_stage,
    index_stage,
)
from mm_assets.pipeline.partition.preview import shortened
from mm_assets.pipeline.partition.stages import StageResult
from mm_assets.pipeline.spec import DatasetSpec, ExportOptions, IndexOptions
from mm_assets.pipeline.state.duplicate_ids import format_duplicates
from mm_assets.pipeline.state.exports import PartitionExport, records_folder
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import FAILED, KINDS, Loss, LossTotal, kind_counts, listed_totals, loss_totals
from mm_assets.pipeline.state.manifests import ManifestReport
from mm_assets.pipeline.state.records import Record, StageFailure, StageRecord
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.columns import Kept
from mm_assets.rows.schema import DatasetSchema
from mm_assets.summaries import bytes_said, counted

__all__ = [
    "MaterializeResult",
    "check_results",
    "export_result",
    "failed_observation",
    "failed_said",
    "index_result",
    "loss_tables",
    "losses_of_failed",
    "manifest_result",
    "published_result",
    "stage_metadata",
    "stage_result",
    "stage_version",
]

if TYPE_CHECKING:
    MaterializeResult = dg.MaterializeResult[None]
else:
    MaterializeResult = dg.MaterializeResult  # Dagster takes no other annotation

_MAX_KEPT = 20  # faults in a table: the event log keeps it forever
_MAX_SAID = 1000  # characters of why a partition failed
_MANIFEST_LINE = 30  # characters of a line of a manifest's values: the asset's page has a narrow column for them
_LINE = 68  # characters of a line of it: a page cuts off what is wider than the window
_CELL = 28  # characters of a value in the first rows
_MAX_SHARDS = 40  # in the table of a manifest
_MAX_COLUMNS = 40  # of a dataset's own, by name
_STAGES = {stage.name: stage for stage in RECORDED_STAGES}


def stage_metadata(spec: DatasetSpec, result: StageResult) -> dict[str, Any]:
    """Metadata of one materialization, small because the event log keeps it forever, and shown without a click.

    What all partitions have in common is in the definition of the asset, such as its columns. Numbers that the summary
    of a run shows are entries of their own, of which Dagster draws curves; the others are in a table.
    """
    return _joined(
        partial(linked, spec, result.record.partition),
        partial(_samples, result),
        partial(_notes, result),
        partial(_modalities, result),
        partial(_counts, result),
        partial(_files, result),
        partial(_charts, result),
        partial(_speed, result),
        partial(_first_rows, result),
    )


def _joined(*parts: partial[dict[str, Any]]) -> dict[str, Any]:
    """Returns the entries of all parts: one that raises is left out, since an event describes what has been made."""
    metadata: dict[str, Any] = {}
    for part in parts:
        with best_effort(f"the metadata of {part.func.__name__.strip('_')}"):
            metadata |= part()
    return metadata


def _samples(result: StageResult) -> dict[str, Any]:
    return {f"sample/{number}": sample_value(view) for number, view in enumerate(result.preview.samples, 1)}


def _notes(result: StageResult) -> dict[str, Any]:
    notes = "\n".join(f"- {escaped_in_line(note)}" for note in result.record.notes)
    return {"notes": dg.MetadataValue.md(notes)} if notes else {}


def _modalities(result: StageResult) -> dict[str, Any]:
    metadata = {"modalities": _streams_table(result)} if result.streams else {}
    if result.preview.modalities:
        metadata["rows_by_modality"] = counts_table(result.preview.modalities, "modality", "rows")
    return metadata


def _counts(result: StageResult) -> dict[str, Any]:
    record, metadata = result.record, {}
    reasons = {name: count for name, count in record.counts.items() if "." in name}
    if reasons:
        metadata["by_reason"] = counts_table(reasons, "reason", "rows", has_bars=True)
    if record.kept:
        metadata["kept"] = _kept_table(record.kept)
    stage = _STAGES[record.stage]
    curves = [name for _, name in stage.numbers]
    metadata |= {f"count/{name}": record.counts[name] for name in curves if name in record.counts and name != "bytes"}
    if len(stage.tables) > 1:  # the others list what the main one lacks
        kinds = kind_counts({stage: record})
        metadata |= {f"count/{kind}": kinds[kind] for kind in ("dropped", "lost")}
    streams = {f"present_{stream.name}" for stream in result.streams}
    others = {
        name: n for name, n in record.counts.items() if n and name not in {*reasons, *curves, *streams, "dropped"}
    }
    if others:
        metadata["counts"] = counts_table(others, "what", "number")
    if result.schema is not None:
        metadata["dagster/partition_row_count"] = result.preview.num_rows
    return metadata


def _charts(result: StageResult) -> dict[str, Any]:
    return {f"chart/{chart.name}": chart_value(chart) for chart in result.preview.charts}


def _speed(result: StageResult) -> dict[str, Any]:
    counts = result.record.counts
    metadata = {"seconds": round(result.seconds, 3), "check_seconds": round(result.check_seconds, 3)}
    num_bytes = counts.get("content_bytes") or counts.get("bytes") or counts.get("shard_bytes") or 0
    if num_bytes and result.seconds > 0:
        metadata["throughput_mb_per_s"] = round(num_bytes / 1e6 / result.seconds, 1)
    return metadata


def linked(spec: DatasetSpec, partition: str) -> dict[str, Any]:
    """The link to the viewer's page of a partition, if there is a viewer."""
    link = viewer_link(spec.name, partition)
    return {} if link is None else {"viewer": dg.MetadataValue.url(link)}


def _first_rows(result: StageResult) -> dict[str, Any]:
    """The first rows, a line per column since these are more than a page is wide, as many as are shown in place."""
    rows = result.preview.rows
    if not rows:
        return {}
    own = "" if result.schema is None else _own_columns(_STAGES[result.record.stage], result.schema)
    for number, width in ((len(rows), _CELL), (2, _CELL), (1, _CELL), (1, _CELL // 2)):
        lines = [(shortened(name, width), *(shortened(row[name], width) for row in rows[:number])) for name in rows[0]]
        text = markdown_table(("column", *(f"row {n + 1}" for n in range(number))), lines)
        if is_inline(text):
            break
    while not is_inline(text):
        text = text[: text.rindex("\n")]  # a dataset of very many columns
    return {**({"own_columns": own} if own else {}), "first_rows": dg.MetadataValue.md(text)}


def _streams_table(result: StageResult) -> Any:
    total = sum(stream.num_bytes for stream in result.streams) or 1
    rows = [
        (s.name, s.field, f"{s.num_samples:,}", bytes_said(s.num_bytes), f"{s.num_bytes / total:.0%}")
        for s in result.streams
    ]
    return text_table(("modality", "field", "samples", "size", "share"), rows, numbers={2, 3, 4})


def _files(result: StageResult) -> dict[str, Any]:
    """Where the main file is and how large, for people and for a curve, and the same of the others in a table."""
    (name, main), *others = result.record.files.items()
    metadata = {
        "size": bytes_said(main.size),
        f"uri/{name}": dg.MetadataValue.path(masked_urls(result.urls[name])),
        f"bytes/{name}": main.size,
    }
    if others:
        rows = [(result.urls[other], bytes_said(file.size)) for other, file in others]
        metadata["other_files"] = text_table(("file", "size"), rows, numbers={1})
    return metadata


def stage_result(spec: DatasetSpec, result: StageResult, checks: Sequence[dg.AssetCheckResult]) -> MaterializeResult:
    """What Dagster stores of a stage of one partition, with the results of its checks."""
    key = asset_key(spec, STAGE_OF_FILE[next(iter(result.record.files))])
    return dg.MaterializeResult(
        asset_key=key,
        metadata=stage_metadata(spec, result),
        check_results=checks,
        data_version=dg.DataVersion(stage_version(result.record)),
    )


def stage_version(record: StageRecord) -> str:
    """The data version of a stage of a partition: the digest of its main table, or of its packed file."""
    stage = STAGE_OF_FILE[next(iter(record.files))]
    return record.files[stage.files[0]].sha256


def published_result(spec: DatasetSpec, record: Record) -> MaterializeResult:
    """What Dagster stores of the publication of a partition, whose data version is the recipe, as in its name."""
    return dg.MaterializeResult(
        asset_key=asset_key(spec, PUBLISHED),
        metadata=_joined(partial(linked, spec, record.partition), partial(_published, record)),
        data_version=dg.DataVersion(record.recipe),
    )


def _published(record: Record) -> dict[str, Any]:
    totals = listed_totals([record.losses])
    return {
        "count/samples": record.num_samples,
        **{f"count/{kind}": sum(t.count for t in totals if t.example.kind == kind) for kind in KINDS},
        **loss_tables(totals),
    }


def export_result(
    spec: DatasetSpec, options: ExportOptions, partition: str, made: PartitionExport
) -> MaterializeResult:
    """What Dagster stores of the export of a partition, with what was compared at its end."""
    key = asset_key(spec, export_stage(options))
    numbers = {"count/samples": made.num_samples, "count/shards": made.num_shards, "count/bytes": made.num_bytes}
    compared = dg.AssetCheckResult(
        check_name=READ_AGAIN,
        asset_key=key,
        passed=True,  # else there is no export
        metadata={**numbers, "digest": made.digest, "repeated_ids": made.num_repeated},
    )
    place = options.out or f"{spec.root.rstrip('/')}/{spec.name}/{records_folder(options)}"
    return dg.MaterializeResult(
        asset_key=key,
        check_results=[] if spec.checks == "rollup" else [compared],
        metadata={
            **_joined(partial(linked, spec, partition)),
            **numbers,
            "size": bytes_said(made.num_bytes),
            "uri/export": dg.MetadataValue.path(masked_urls(f"{place}/{made.folder}")),
        },
        data_version=dg.DataVersion(made.folder),
    )


def index_result(
    spec: DatasetSpec, options: IndexOptions, made: IndexSummary, *, num_present: int
) -> MaterializeResult:
    """What Dagster stores of an index, with its checks.

    Args:
        spec: the declaration.
        options: of the index.
        made: the index.
        num_present: samples that have the modality.
    """
    key = asset_key(spec, index_stage(options))
    numbers = {"count/vectors": made.num_vectors, "count/excluded": made.num_excluded, "recall": made.recall}
    checks = {
        ALL_VECTORS: made.num_vectors + made.num_excluded == num_present,
        RECALL: made.recall >= options.min_recall,
    }
    return dg.MaterializeResult(
        asset_key=key,
        check_results=[
            dg.AssetCheckResult(
                check_name=name,
                asset_key=key,
                passed=passed,
                metadata={**numbers, "count/samples": num_present, "min_recall": options.min_recall},
            )
            for name, passed in checks.items()
        ],
        metadata={
            **numbers,
            "count/written": made.num_written,
            "count/files": made.num_files,
            "count/bytes": made.num_bytes,
            "size": bytes_said(made.num_bytes),
            "uri/index": dg.MetadataValue.path(masked_urls(made.url)),
        },
        data_version=dg.DataVersion(made.url.rpartition("/")[2]),
    )


def manifest_result(spec: DatasetSpec, report: ManifestReport) -> MaterializeResult:
    """What Dagster stores of a manifest."""
    duplicates = report.manifest.get("duplicate_ids") or {"count": 0, "examples": []}  # a load counts them at its end
    key = asset_key(spec, MANIFEST)
    unique_ids = dg.AssetCheckResult(
        check_name=UNIQUE_IDS,
        asset_key=key,
        passed=not duplicates["count"],
        severity=dg.AssetCheckSeverity.WARN,
        description=format_duplicates(duplicates) or None,
        metadata={"num_duplicate_ids": duplicates["count"], "examples": duplicates["examples"]},
    )
    return dg.MaterializeResult(
        asset_key=key,
        check_results=[unique_ids],
        metadata=_joined(partial(_manifest_metadata, spec, report)),
        data_version=dg.DataVersion(report.digest),
    )


def _manifest_metadata(spec: DatasetSpec, report: ManifestReport) -> dict[str, Any]:
    """What a person wants of a version: how to open it, how much it is, what it has, and what it lacks."""
    shards = list(manifest_partitions(report.manifest, name=report.url).values())
    sizes = {form: [s.packed[form][0] for s in shards if form in s.packed] for form in spec.formats}
    columns = modality_columns(spec, report.manifest["schema"].get("pack") or {})
    samples = counted(report.manifest["num_samples"], "sample")
    packed = [f"{form.upper()} {bytes_said(sum(found))}" for form, found in sizes.items() if found] or [
        "nothing packed"
    ]
    pieces = textwrap.wrap(masked_urls(report.url), _MANIFEST_LINE, drop_whitespace=False)
    code = "\n".join(f"    {json.dumps(piece, ensure_ascii=False)}" for piece in pieces)
    rows = [
        (s.key, f"{s.num_samples:,}", *(bytes_said(s.packed[form][0]) if form in s.packed else "" for form in sizes))
        for s in shards[:_MAX_SHARDS]
    ]
    if len(shards) > _MAX_SHARDS:
        rows.append((f"and {len(shards) - _MAX_SHARDS:,} more", *[""] * (1 + len(sizes))))
    head = ("partition", "samples", *sizes)
    left_out = "\n".join(f"- `{key}`: {escaped_in_line(reason)}" for key, reason in report.left_out.items())
    missing = "\n".join(f"- `{name}`: {', '.join(keys)}" for name, keys in report.missing_streams.items())
    return {
        "open": dg.MetadataValue.md(f"```python\nimport mm_assets\ndataset = mm_assets.open(\n{code}\n)\n```"),
        "totals": dg.MetadataValue.md("  \n".join((f"{samples} in {counted(len(shards), 'partition')}", *packed))),
        **({"dagster/column_schema": columns} if columns is not None else {}),
        "dagster/row_count": report.manifest["num_samples"],
        "dagster/size_bytes": sum(sum(found) for found in sizes.values()),
        "shards": text_table(head, rows, numbers=set(range(1, len(head)))) if rows else dg.MetadataValue.md("none"),
        "losses": _losses_of(report, ("lost", "kept", "harmless")),
        "dropped": _losses_of(report, ("dropped",)),
        "uri/manifest": dg.MetadataValue.md("  \n".join(f"`{piece}`" for piece in pieces)),
        "count/shards": len(shards),
        "count/samples": report.manifest["num_samples"],
        "count/left_out": len(report.left_out),
        "left_out": dg.MetadataValue.md(left_out or "nothing"),
        "missing_streams": dg.MetadataValue.md(missing or "nothing"),
    }


def _losses_of(report: ManifestReport, kinds: Collection[str]) -> Any:
    """The losses of some kinds by stage and reason."""
    found: dict[str, int] = {}
    for total in listed_totals([report.manifest["losses"]]):
        if total.example.kind in kinds:
            found[f"{total.example.stage}: {total.example.reason}"] = total.count
    if not found:
        return dg.MetadataValue.md("nothing")
    return counts_table(found, "stage and reason", "number")  # the page of a manifest has no room for bars


def failed_said(spec: DatasetSpec, failure: StageFailure) -> str:
    """That a partition failed, where and why, and what to do: the message of its run, in two lines."""
    said = masked_urls(f"{failure.partition} failed at {failure.stage}: {failure.said}")
    said = shortened(said, _MAX_SAID)
    return f"{said}\nWhat to do: {_advice(failure)}: {_run_command(spec, failure)}"


def _advice(failure: StageFailure) -> str:
    return Loss(partition=failure.partition, stage=failure.stage, reason=FAILED, detail=failure.detail).advice


def _run_command(spec: DatasetSpec, failure: StageFailure) -> str:
    return f"mm-assets run --dataset {spec.name} --partition {failure.partition}"


def failed_observation(spec: DatasetSpec, failure: StageFailure) -> dg.AssetObservation:
    """That a partition failed, for the page of its asset: the first entry is what failed and what to do.

    Dagster shows it above what was made before, until the partition is made again; of a partition that was never made,
    among the events of the asset.
    """
    stages = (*CHAIN, *map(export_stage, spec.exports))
    stage = next(stage for stage in stages if stage.name == failure.stage)
    return dg.AssetObservation(
        asset_key=asset_key(spec, stage),
        partition=failure.partition,
        metadata=_joined(partial(_failed, spec, failure), partial(linked, spec, failure.partition)),
    )


def _failed(spec: DatasetSpec, failure: StageFailure) -> dict[str, Any]:
    """What failed, what to do, and the command by itself, in lines that a page shows whole."""
    command = f"```\n{_run_command(spec, failure)}\n```"
    width = _MAX_SAID
    while True:
        said = shortened(masked_urls(f"failed at {failure.stage}: {failure.said}"), width)
        text = "\n\n".join([*map(_broken, (said, f"What to do: {_advice(failure)}:")), command])
        if is_inline(text) or width <= _LINE:
            return {"failed": dg.MetadataValue.md(text)}
        width -= _LINE


def _broken(text: str) -> str:
    lines = textwrap.wrap(text, _LINE, break_long_words=False, break_on_hyphens=False)
    return "  \n".join(map(escaped, lines))


def loss_tables(totals: Sequence[LossTotal]) -> dict[str, Any]:
    """Returns what was lost or kept with a fault, and apart from it what filters dropped, by stage and reason.

    Each reason has an example and what to do.
    """
    rows: dict[str, list[tuple[str, ...]]] = {"losses": [], "dropped": []}
    for total in totals:
        loss = total.example
        sample = "" if loss.sample_id is None else f"sample {loss.sample_id}"
        first = ": ".join(filter(None, (loss.place or sample, loss.detail)))
        row = (loss.kind, loss.stage, loss.reason, f"{total.count:,}", first, loss.advice)
        rows["dropped" if loss.kind == "dropped" else "losses"].append(row)
    head = ("kind", "stage", "reason", "count", "first of them", "what to do")
    return {
        name: text_table(head, some, numbers={3}) if some else dg.MetadataValue.md("nothing")
        for name, some in rows.items()
    }


def losses_of_failed(dataset: DatasetStore, keys: Iterable[str]) -> dict[str, Any]:
    """Returns `loss_tables` of partitions that failed; nothing if the storage, which may be what failed them, fails."""
    with suppress(MmAssetsError, OSError):
        return loss_tables(loss_totals(DatasetState(dataset), keys))
    return {}


def _kept_table(faults: Sequence[Kept]) -> Any:
    """Faults that keep nothing from being published, each with the first item that has it."""
    rows = [(f.reason, f"{f.count:,}", f.detail, f.origin.sample_id or "") for f in faults[:_MAX_KEPT]]
    if len(faults) > _MAX_KEPT:
        rows.append((f"and {len(faults) - _MAX_KEPT} more: `mm-assets losses` lists them", "", "", ""))
    return text_table(("fault", "count", "what", "first sample"), rows, numbers={1})


def _own_columns(stage: Stage, schema: pa.Schema) -> str:
    """The user's and annotators' columns with their types."""
    reserved = set(stage.tables[0].schema(DatasetSchema()).names)
    own = [f"{field.name} ({field.type})" for field in schema if field.name not in reserved]
    more = [f"and {len(own) - _MAX_COLUMNS:,} more"] if len(own) > _MAX_COLUMNS else []
    return ", ".join(own[:_MAX_COLUMNS] + more)


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
        _check_result(
            spec,
            asset,
            name,
            result.record.partition,
            {rule: outcomes[rule.name] for rule in rules if rule.name in outcomes},
        )
        for name, rules in rules_of(spec, asset).items()
        if names is None or name in names
    ]


def _named_sample(spec: DatasetSpec, partition: str, failed: Iterable[Outcome]) -> dict[str, Any]:
    """The first sample that violates a rule, with the link to its page in the viewer, if there is one."""
    for row in (row for outcome in failed for row in outcome.violations):
        found = row.get("sample_id")
        if isinstance(found, str) and found:
            link = viewer_link(spec.name, partition, found)
            named = {"sample": shortened(found, _MAX_SAID)}
            return named if link is None else {**named, "viewer": dg.MetadataValue.url(link)}
    return {}


def _check_result(
    spec: DatasetSpec, asset: str, name: str, partition: str, outcomes: Mapping[Check, Outcome]
) -> dg.AssetCheckResult:
    failed = [outcome for outcome in outcomes.values() if not outcome.passed]
    stops = not failed or any(outcome.stops for outcome in failed)
    said = [f"{outcome.name}: " * (spec.checks != "per_rule") + outcome.said for outcome in failed]
    metadata = _joined(partial(_rules, spec, outcomes), partial(_named_sample, spec, partition, failed))
    return dg.AssetCheckResult(
        check_name=name,
        asset_key=dg.AssetKey([spec.name, asset]),
        passed=not failed,
        severity=dg.AssetCheckSeverity.ERROR if stops else dg.AssetCheckSeverity.WARN,
        description="; ".join(said) or None,  # the rules themselves are in the description of the check
        metadata=metadata,
    )


def _rules(spec: DatasetSpec, outcomes: Mapping[Check, Outcome]) -> dict[str, Any]:
    """The outcome of each rule, and rows that violate it; what the rules say is in the description of the check."""
    failed = [outcome for outcome in outcomes.values() if not outcome.passed]
    violations = {outcome.name: _violations(outcome) for outcome in failed if outcome.violations}
    if spec.checks == "per_rule":
        number = sum(outcome.num_violations for outcome in failed)
        return {
            **({"num_violations": number} if number else {}),
            **dict(zip(["violations"], violations.values(), strict=False)),
        }
    lines = ["|rule|passed|violations|", "|-|-|-:|"]
    for rule, outcome in outcomes.items():
        passed = "yes" if outcome.passed else "no" if outcome.blocking else "no, a warning"
        lines.append(f"|{rule.name}|{passed}|{outcome.num_violations:,}|")
    tables = {f"violations/{name}": table for name, table in violations.items()}
    return {"rules": dg.MetadataValue.md("\n".join(lines)), **tables}


def _violations(outcome: Outcome) -> dg.TableMetadataValue:
    return rows_table(outcome.violations, list(outcome.violations[0]))
