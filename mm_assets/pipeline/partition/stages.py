"""The stages of the pipeline, one function per asset: read inputs, stream, publish, check, record.

Each function takes the partition's `PartitionWork` and returns a `StageResult`. Files appear whole, the record
comes last, and the same input and configuration give the same bytes. No stage holds a shard in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.checks.packed import ExpectedRows, PackedFiles
from mm_assets.dataset.manifest import file_path
from mm_assets.errors import SchemaMismatchError, ShardError, best_effort_notes
from mm_assets.packing.judge import Judge
from mm_assets.packing.pack import PackSummary, pack_rows
from mm_assets.packing.placement import Placer
from mm_assets.packing.presets import chooses_preset
from mm_assets.pipeline.chain import (
    DROPPED,
    FILTERED_ROWS,
    MATERIALIZED_ROWS,
    MISSING_END,
    PACKED_FOLDER,
    PACKED_STAGES,
    RAW_SHARDS,
    REJECTS,
    ROWS,
    UNDECODABLE,
    Stage,
    packed_stages,
)
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.packed_streams import packed_streams
from mm_assets.pipeline.partition.stage_run import Run, StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.registration import content_digest
from mm_assets.rows.columns import Kept, Origin, row_tuples
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.parquet import read_batches, sample_groups
from mm_assets.rows.schema import KEPT, ROW_IDENTITY
from mm_assets.rows.user_columns import is_rare
from mm_assets.sources.base import index_members, missing_end
from mm_assets.sources.member import ShardDamage
from mm_assets.storage.store import Draft, PublishedFile
from mm_assets.summaries import counted

__all__ = [
    "TABLE_STAGES",
    "StageResult",
    "filtered_rows",
    "materialized_rows",
    "packed",
    "raw_shards",
    "recheck",
    "rows",
    "streamed_rows",
]

MAX_SAID = 5  # kinds of content that a message names


def raw_shards(work: PartitionWork) -> StageResult:
    """Indexes the members of a partition's shards; payloads are not read.

    Raises:
        ShardError: a shard cannot be read through and the declaration does not say to salvage; or it is not a shard.
        SourceError: a shard is gone, or is not the one that was registered.
    """
    on_damaged = work.spec.on_damaged_shard
    damaged = 0
    unended: list[Kept] = []
    with Run(work, RAW_SHARDS) as run:
        run.inputs.update(run.work.partition.fingerprints)
        with run.write() as sink:
            for source in run.work.containers:
                damage: list[ShardDamage] = []
                num_usable = 0
                for batch in index_members(
                    source, on_damaged_shard=on_damaged, damage=damage, roles=work.spec.samples.roles
                ):
                    num_usable += batch.column("skip_reason").null_count
                    sink.write(run.preview.observe(batch))
                if damage and not num_usable:
                    detail = f"no member of it can be salvaged: {damage[0].detail}"
                    raise ShardError(source.file.url, detail, byte_offset=damage[0].byte_offset)
                damaged += len(damage)
                lacks = missing_end(source)
                if lacks is not None and work.spec.on_missing_end == "fail":
                    raise ShardError(source.file.url, f"{lacks} (on_missing_end: fail)", byte_offset=source.file.size)
                if lacks is not None:
                    origin = Origin(source.file.url, byte_offset=source.file.size)
                    unended.append(Kept(reason=MISSING_END, count=1, detail=lacks, origin=origin))
        counts = {
            "members": run.preview.num_rows,
            "shards": len(run.files),
            "shard_bytes": sum(file.size for file in run.files),
            "damaged_places": damaged,
            **({MISSING_END: len(unended)} if unended else {}),
        }
        return run.finish(counts=counts, kept=unended)


def rows(work: PartitionWork) -> StageResult:
    """Turns members into rows; text and JSON are read, media is not.

    Raises:
        SourceError: a shard changed since it was indexed, or a required column is missing in every sample.
    """
    spec = work.spec
    with Run(work, ROWS) as run:
        index = run.read(RAW_SHARDS)
        streams = [
            source.rows(
                lambda: read_batches(index, batch_bytes=spec.batch_bytes),
                layout=spec.samples,
                schema=run.schema,
                grouped=spec.partition_pattern is not None,
                batch_bytes=spec.batch_bytes,
            )
            for source in run.row_sources
        ]
        with run.write() as sink:
            for stream in streams:
                for batch in stream:
                    sink.write(run.preview.observe(batch))
        with run.write(REJECTS) as sink:
            counts: Counter[str] = Counter()
            for stream in streams:
                rejects = stream.rejects()
                counts.update(stream.counts)
                counts.update(f"rejects.{reason}" for reason in rejects["reason"].to_pylist())
                for batch in rejects.to_batches():
                    sink.write(batch)
        notes = [note for stream in streams for note in stream.notes]
        kept = [fault for stream in streams for fault in stream.kept]
        if counts["misfit_columns"]:
            notes.append(f"the dataset's columns are not those of this partition: {_advice(spec)}")
        return run.finish(counts=counts, notes=notes, kept=kept)


def materialized_rows(work: PartitionWork) -> StageResult:
    """Fills `binary_content`, or sets `materialize_error`; with ``materialize: write`` copies the rows as they are.

    Raises:
        SourceError: a shard changed since it was indexed, or the policy is "fail" and an item could not be read.
    """
    spec = work.spec
    with Run(work, MATERIALIZED_ROWS) as run:
        batches = run.batches(ROWS)
        stream = _materialize(run, batches) if spec.materialize == "read" else None
        with run.write() as sink:
            for batch in batches if stream is None else stream:
                sink.write(run.preview.observe(batch))
        return _finish_materialized(run, stream)


def _materialize(run: Run, batches: Iterable[pa.RecordBatch]) -> MaterializeStream:
    return run.materialized(batches, fail_on_error=run.spec.on_materialize_error == "fail")


def _finish_materialized(run: Run, stream: MaterializeStream | None, seconds: float | None = None) -> StageResult:
    if stream is not None:  # what has just been read is in the page cache
        run.inputs.update((file.url, content_digest(file)) for file in run.files if file.is_local)
    counts = {"rows": run.preview.num_rows, "content_bytes": run.preview.content_bytes}
    return run.finish(counts=counts if stream is None else {**counts, **stream.counts}, seconds=seconds)


def filtered_rows(work: PartitionWork) -> StageResult:
    """Annotates and filters; with ``materialize: write`` fetches the content of rows that pass the other filters.

    Raises:
        SourceError: a shard changed since it was indexed, or the policy is "fail" and an item could not be read.
        SchemaMismatchError: nothing of the partition has a place in the dataset's schema.
    """
    with Run(work, FILTERED_ROWS) as run:
        return _finish_filtered(run, _filter(run, run.samples(MATERIALIZED_ROWS)))


def streamed_rows(
    work: PartitionWork, at: Callable[[Stage], object] = lambda _: None
) -> Iterator[tuple[Stage, StageResult]]:
    """Both of `materialized_rows` and `filtered_rows` in one pass, which reads media once and no table again.

    The files and records are those of the two stages one after the other; that of the second is missing if a check of
    the first failed. Errors likewise: what the second one raises is raised when the first one is complete.

    Args:
        work: the partition.
        at: called with the stage that is at work.

    Yields:
        Each stage when it has been checked, with its result.
    """
    failure: Exception | None = None
    with Run(work, MATERIALIZED_ROWS) as above, Run(work, FILTERED_ROWS) as run:
        stream = _materialize(above, above.batches(ROWS))
        batches = iter(stream)
        is_filtering = False
        with above.write() as sink:

            def passing() -> Iterator[pa.RecordBatch]:
                nonlocal is_filtering
                for batch in batches:
                    sink.write(above.preview.observe(batch))
                    at(FILTERED_ROWS)
                    is_filtering = True
                    yield batch
                    is_filtering = False
                    at(MATERIALIZED_ROWS)
                is_filtering = True

            try:
                filtered = _filter(run, sample_groups(passing(), batch_bytes=work.spec.batch_bytes))
            except Exception as error:  # a filter may raise anything: its error waits until the rows are written
                if not is_filtering:
                    raise
                failure = error
                at(MATERIALIZED_ROWS)
                for batch in batches:
                    sink.write(above.preview.observe(batch))
        seconds = run.seconds()
        at(MATERIALIZED_ROWS)
        result = _finish_materialized(above, stream, seconds)
        yield MATERIALIZED_ROWS, result
        if result.passed:
            at(FILTERED_ROWS)
            if failure is not None:
                raise failure
            yield FILTERED_ROWS, _finish_filtered(run, filtered, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filtered:
    """What filtering found.

    Attributes:
        counts: of the record.
        notes: likewise.
        selected: numbers of the rows that are kept, if the table of them has not been written yet.
    """

    counts: Mapping[str, int]
    notes: Sequence[str]
    selected: npt.NDArray[np.int64] | None


def _filter(run: Run, samples: Iterable[pa.Table]) -> _Filtered:
    """Filters the rows and writes the tables of `filtered_rows`, except the main one if it may be another's."""
    spec = run.spec
    with Judge(run.plan, policy=spec.on_undecodable, mode=spec.decodable) as judge, ExitStack() as tables:
        stream = run.filter_stream(
            samples,
            spec.build_annotators(),
            spec.build_filters(),
            judge,
            fetch=(lambda batches: _materialize(run, batches)) if spec.materialize == "write" else None,
        )
        faulty: dict[str, dict[tuple[Any, ...], set[str]]] = {}  # by reason and row, the fields at fault
        dropped, undecodable = (tables.enter_context(run.write(table)) for table in (DROPPED, UNDECODABLE))
        is_selection = stream.only_selects and run.shares_rows(MATERIALIZED_ROWS)
        kept = None if is_selection else tables.enter_context(run.write())
        selected: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]

        def write_losses() -> None:
            for found in (*judge.take_undecodable(), *judge.take_faulty()):
                undecodable.write(found)
                for *row, field, reason, action in row_tuples(found, *ROW_IDENTITY, "field", "reason", "action"):
                    if action == "keep":
                        faulty.setdefault(f"{KEPT}.{reason}", {}).setdefault(tuple(row), set()).add(field)
            for drop in stream.take_dropped():  # what is dropped after it was judged
                dropped.write(drop)
                run.preview.observe_dropped(drop)
                for dropped_row in row_tuples(drop, *ROW_IDENTITY) if faulty else ():
                    for rows in faulty.values():
                        rows.pop(dropped_row, None)

        for batch in stream:
            run.preview.observe(batch)
            if kept is None:
                selected.append(stream.selected)
            else:
                kept.write(batch)
            write_losses()
        write_losses()
        _refuse_misfit(judge, stream.counts, run)
        tables.close()
        counts = {
            **stream.counts,
            "judged": judge.num_judged,
            "undecodable": judge.num_undecodable,
            "content_bytes": run.preview.content_bytes,
            **{reason: sum(map(len, rows.values())) for reason, rows in sorted(faulty.items()) if rows},
        }
        notes = (*stream.notes, *_media_notes(judge, spec), *_unplaced_notes(judge, stream.counts, run))
        return _Filtered(counts=counts, notes=notes, selected=np.concatenate(selected) if is_selection else None)


def _finish_filtered(run: Run, filtered: _Filtered, seconds: float | None = None) -> StageResult:
    if filtered.selected is not None:
        run.write_selection(MATERIALIZED_ROWS, filtered.selected)
    materialized = run.work.record(MATERIALIZED_ROWS).files[MATERIALIZED_ROWS.tables[0].name]
    run.inputs[MATERIALIZED_ROWS.tables[0].name] = materialized.sha256
    return run.finish(counts=filtered.counts, notes=filtered.notes, limits=_limits(run.spec), seconds=seconds)


def _limits(spec: DatasetSpec) -> dict[str, Any]:
    """The limits that the filters apply, and the measures that the annotators' columns hold; as in the record."""
    thresholds = [
        {"filter": judge.name, "scope": judge.scope, **threshold._asdict()}
        for judge in spec.build_filters()
        for threshold in judge.thresholds()
    ]
    measures = [
        {"column": column, "measure": measure}
        for annotator in spec.build_annotators()
        for column, measure in annotator.measures.items()
    ]
    found = {"thresholds": thresholds, "measures": measures}
    return {name: value for name, value in found.items() if value}


TABLE_STAGES: Mapping[Stage, Callable[[PartitionWork], StageResult]] = {
    RAW_SHARDS: raw_shards,
    ROWS: rows,
    MATERIALIZED_ROWS: materialized_rows,
    FILTERED_ROWS: filtered_rows,
}
"""The stages that make tables, in order, with their functions."""


def packed(work: PartitionWork, *, formats: Sequence[str] = ()) -> dict[str, StageResult]:
    """Packs the filtered rows, one pass for all `formats`, by default the dataset's.

    Raises:
        EncodeError: a value does not fit its field.
    """
    dataset, key = work.dataset, work.key
    formats = formats or work.spec.formats
    with ExitStack() as stack:
        runs = {form: stack.enter_context(Run(work, PACKED_STAGES[form])) for form in formats}
        run = runs[formats[0]]
        drafts: dict[str, Draft] = {}
        expected = ExpectedRows(Placer(run.plan))

        def samples() -> Iterator[pa.Table]:
            for block in run.samples(FILTERED_ROWS):
                for batch in block.to_batches():
                    run.preview.look_at(batch)
                yield block

        with ExitStack() as building:
            for form in formats:
                drafts[form] = building.enter_context(
                    dataset.store.draft(f"{PACKED_FOLDER}/{key}.{form}", durable=False)
                )
            summary = pack_rows(
                samples(),
                run.plan,
                mult=drafts["mult"].path if "mult" in drafts else None,
                mstr=drafts["mstr"].path if "mstr" in drafts else None,
                provenance={"dataset": work.spec.name, "partition": key},
                num_samples=work.record(FILTERED_ROWS).counts["kept_samples"],
                fsync=False,  # publishing the drafts does
                packed=expected.add,
            )
            for form, draft in drafts.items():
                draft.take_digest(summary.sha256[form])
                draft.name = file_path(form, key, summary.sha256[form])
            streams = {form: packed_streams(draft.path, run.plan) for form, draft in drafts.items()}
        files = {form: draft.result() for form, draft in drafts.items()}
        seconds = run.seconds()  # of the one pass that made all of them
        names = _packed_names(work, files, run.inputs)
        checked = stack.enter_context(PackedFiles(run.check_context(names), formats, expected))
        results = {}
        for form, file in files.items():
            runs[form].inputs, runs[form].published, runs[form].preview = run.inputs, {form: file}, run.preview
            results[form] = runs[form].finish(
                counts={"samples": summary.num_samples, "bytes": file.size, **_counts(summary)},
                notes=(*summary.notes, *_plan_notes(summary, run)),
                packed=names,
                checked=checked,
                seconds=seconds,
                streams=streams[form][0],
                charts=[chart for chart in streams[form][1:] if chart is not None],
            )
        return results


def recheck(work: PartitionWork, stage: Stage) -> StageResult:
    """Runs the checks of a stage again, on the files that are there.

    Raises:
        SourceError: the stage has not run, or with other settings.
    """
    work.use_recorded()
    with Run(work, stage) as run:
        record = work.record(stage)
        packed = _packed_names(work, record.files, record.inputs) if stage.packed_format is not None else None
        return run.recheck(packed)


def _counts(summary: PackSummary) -> dict[str, int]:
    present = {f"present_{name}": count for name, count in summary.num_present.items()}
    refused = {f"refused_{name}": count for name, count in sorted(summary.num_refused.items())}
    return present | refused | ({"rest_rows": summary.num_rest} if summary.num_rest else {})


@best_effort_notes
def _media_notes(judge: Judge, spec: DatasetSpec) -> Iterator[str]:
    if spec.decodable == "headers":
        yield "media were not decoded before packing (decodable: headers)"
    if judge.num_high_range:
        number = counted(judge.num_high_range, "media item")
        yield (
            f"high dynamic range (PQ or HLG): {number}, decoded without tone mapping, which looks pale; "
            f"the first is of {judge.first_high_range}"
        )
    for (extension, modality), count in judge.unnamed_media.most_common(MAX_SAID):
        setting = f"samples.extensions: {{{extension or '...'}: {modality}}}"
        yield (
            f"{counted(count, 'member')} with the extension {extension!a} hold {modality}, but are packed as bytes "
            f"since that extension is not known: set `{setting}`, and register with --new-schema"
        )


def _advice(spec: DatasetSpec) -> str:
    """What to do where the dataset's schema is wrong for a partition."""
    name = spec.name
    return f"see `mm-assets plan --dataset {name}`; `mm-assets register --dataset {name} --new-schema` decides it again"


def _pack_advice(run: Run) -> str:
    """The same, where it is the plan that may be wrong."""
    if chooses_preset(run.spec.pack):
        return f"{_advice(run.spec)}, and `pack: generic` keeps every kind of content"
    return f"change `pack`; {_advice(run.spec)}"


def _cannot_pack(judge: Judge, run: Run) -> str:
    what = f"preset {run.plan.preset!r}" if run.plan.preset else "the declared fields"
    kinds = [f"{kind} {count:,}" for kind, count in judge.unplaced.most_common(MAX_SAID)]
    more = [f"{len(judge.unplaced) - MAX_SAID:,} more kinds"] if len(judge.unplaced) > MAX_SAID else []
    return f"cannot be packed by {what}: {', '.join(kinds + more)}"


def _refuse_misfit(judge: Judge, counts: Mapping[str, int], run: Run) -> None:
    """Fails a partition of which nothing fits the plan: it would be published, and empty.

    Raises:
        SchemaMismatchError: no sample is left, and the plan or missing content is the reason.
    """
    num_samples = counts["samples"]
    if counts["kept_samples"] or not num_samples:
        return
    said = f"partition {run.key!r}: none of its {counted(num_samples, 'sample')}"
    if counts["rows"] == num_samples:
        advice = "leave its shards out, or set on_empty_sample to keep if metadata alone is wanted"
        raise SchemaMismatchError(f"{said} has content, only metadata: {advice}")
    if not is_rare(judge.num_unplaced, num_samples):
        raise SchemaMismatchError(f"{said} fits: their content {_cannot_pack(judge, run)}; {_pack_advice(run)}")


@best_effort_notes
def _unplaced_notes(judge: Judge, counts: Mapping[str, int], run: Run) -> Iterator[str]:
    """A note if more than odd samples have content without a place in the plan, which may be wrong for them."""
    if judge.num_unplaced and not is_rare(judge.num_unplaced, counts["samples"]):
        said = f"{judge.num_unplaced:,} of {counted(counts['samples'], 'sample')} have content that"
        yield f"{said} {_cannot_pack(judge, run)}; {_pack_advice(run)}"


@best_effort_notes
def _plan_notes(summary: PackSummary, run: Run) -> Iterator[str]:
    """Notes if little was packed, or lacks what most samples have: it may be the wrong plan for these rows."""
    if summary.num_samples == 0:
        yield "no sample was packed: `mm-assets losses` says why"
        return
    if 2 * summary.num_rest > summary.num_items:
        rest = (
            f"{summary.num_rest:,} of {summary.num_items:,} content rows, of {counted(summary.num_samples, 'sample')},"
        )
        yield f"{rest} are in the rest of preset {run.plan.preset!r}; {_pack_advice(run)}"
    yield from _missing_notes(summary, run)


def _missing_notes(summary: PackSummary, run: Run) -> Iterator[str]:
    """A note on each modality that no sample has, although most of those had it that decided the schema.

    None where a kind of sample without it decided the schema too: that was known.
    """
    evidence = run.schema.evidence
    total = sum(shard["num_samples"] for shard in evidence.get("shards", ()))
    for modality in run.plan.modalities:
        parts = {f"{modality.name}.{part}" if part else modality.name for part in modality.selectors}
        kinds = [kind for kind in evidence.get("row_kinds", ()) if parts.intersection(kind["packed_as"])]
        usual = max((kind["num_samples"] for kind in kinds), default=0)
        if summary.num_present[modality.name] or 2 * usual <= total:
            continue
        rows = {(kind["modality"], kind["role"]) for kind in kinds}
        deciding = [kind["kind"] for kind in evidence.get("sample_kinds", ()) if kind["fits"]]
        if all(any((row["modality"], row["role"]) in rows for row in kind) for kind in deciding):
            lacking = f"none of {counted(summary.num_samples, 'packed sample')} has {modality.name!r}"
            yield f"{lacking}, which {usual:,} of {total:,} had when the schema was decided; {_advice(run.spec)}"


def _packed_names(work: PartitionWork, files: Mapping[str, PublishedFile], inputs: Mapping[str, str]) -> dict[str, str]:
    """The packed files made from the same rows: those just made, and the other format's if it was."""
    names = {form: file.path for form, file in files.items()}
    for form, stage in packed_stages(work.spec).items():
        if form in names:
            continue
        record = work.stages.get(stage)
        if record is not None and dict(record.inputs) == dict(inputs):
            names[form] = record.files[form].path
    return names
