"""The stages of the pipeline, one function per asset: read inputs, stream, publish, check, record.

Each function takes a `DatasetStore` and a partition key and answers with a `StageResult`. Files appear whole, the
record comes last, and the same input and configuration give the same bytes. No stage holds a shard in memory.
Orchestration adds nothing but reporting.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from mm_assets.checks.alignment import misaligned
from mm_assets.checks.context import CheckContext
from mm_assets.checks.context import Outcome as CheckOutcome
from mm_assets.checks.runner import run_checks
from mm_assets.errors import SourceError
from mm_assets.filters.apply import apply_filters
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.packing.pack import PackSummary, pack_rows, packable
from mm_assets.packing.plan import PackPlan
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore, Outcome, StageRecord
from mm_assets.rows.from_listing import is_listing, rows_from_listing
from mm_assets.rows.from_members import RowStream, build_rows
from mm_assets.rows.materialize import MaterializeStream, materialize
from mm_assets.rows.parquet import ParquetSink, open_table, read_batches, sample_groups
from mm_assets.rows.preview import Preview
from mm_assets.rows.schema import DROPPED_SCHEMA, REJECTS_SCHEMA
from mm_assets.rows.source_ref import is_allowed_reference
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, ShardDamage
from mm_assets.sources.tar import index_shard
from mm_assets.storage.files import SourceFile
from mm_assets.storage.store import Draft, PublishedFile
from mm_assets.storage.urls import is_local

__all__ = [
    "PACKED_FORMATS",
    "StageResult",
    "filtered_rows",
    "materialized_rows",
    "packed",
    "raw_shards",
    "recheck_packed",
    "rows",
]

PACKED_FORMATS = ("mult", "mstr")
MAX_OPEN = 64  # descriptors of files that a list names; a process may have no more than 256
MAX_REMOTE = 1024  # files of an object store, which cost a request when they are opened and some memory as long as kept


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage did, for whoever reports it.

    Attributes:
        record: as stored.
        outcomes: its checks, with the first violations of each.
        seconds: wall clock of the stage without its checks.
        check_seconds: wall clock of the checks.
        preview: a look at the main table.
        schema: columns of the main table, or None for packed files.
        urls: where each file stands.
    """

    record: StageRecord
    outcomes: tuple[CheckOutcome, ...]
    seconds: float
    check_seconds: float
    preview: Preview
    schema: pa.Schema | None
    urls: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every check held that stops a partition."""
        return not any(outcome.stops for outcome in self.outcomes)


class _OtherFiles:
    """Files beside the shards that locators name; of the local ones the last few stay open.

    Args:
        spec: whose `storage_options` are used for files of the shards' own file system, and for no other.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._options = spec.storage_options
        self._scheme = _scheme(spec.shards)
        self._local: OrderedDict[str, SourceFile] = OrderedDict()
        self._remote: OrderedDict[str, SourceFile] = OrderedDict()  # filled from several threads

    def open(self, url: str) -> SourceFile:
        """The file, opened anew if it was let go.

        Raises:
            SourceError: the file is not there or may not be read.
        """
        kept = self._local if is_local(url) else self._remote
        found = kept.get(url)
        if found is None:
            found = kept[url] = SourceFile(url, self._options if _scheme(url) == self._scheme else None)
        while len(self._local) > MAX_OPEN:
            self._local.popitem(last=False)[1].close()
        while len(self._remote) > MAX_REMOTE:
            self._remote.popitem(last=False)
        return found

    def close(self) -> None:
        """Closes every file."""
        for source in (*self._local.values(), *self._remote.values()):
            source.close()


def _scheme(url: str) -> str:
    return "file" if is_local(url) else url.split("://", 1)[0]


class _Run:
    """One stage at work on one partition: its open shards, its files, its clock."""

    def __init__(self, dataset: DatasetStore, stage: str, key: str) -> None:
        self.dataset = dataset
        self.spec = dataset.spec
        self.stage = stage
        self.key = key
        self.partition = dataset.partition(key)
        self.schema = dataset.schema()
        self.inputs: dict[str, str] = {}
        self.files: dict[str, PublishedFile] = {}
        self.counts: dict[str, int] = {}
        self.notes: tuple[str, ...] = ()
        self.preview = Preview()
        self.sources: list[SourceFile] = []
        self.others = _OtherFiles(self.spec)
        self._tables: list[pq.ParquetFile] = []
        self._started = time.perf_counter()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self.sources:
            source.close()
        self.others.close()
        for table in self._tables:
            table.close(force=True)

    def seconds(self) -> float:
        """Wall clock since the stage began."""
        return time.perf_counter() - self._started

    def open_shards(self) -> None:
        """Opens the shards, as they were when they were indexed."""
        prints = None
        if self.stage != "raw_shards":
            record = self.dataset.record("raw_shards", self.key)
            prints = {url: mark for url, mark in record.inputs.items() if url != "raw_shards"}
        self.sources = self.dataset.open_shards(self.partition, fingerprints=prints)

    def archives(self) -> list[SourceFile]:
        """The partition's tar shards, without lists of files and what was opened besides."""
        urls = {shard.url for shard in self.partition.shards}
        return [source for source in self.sources if source.url in urls and not is_listing(source.url)]

    def read(self, stage: str, table: str) -> pq.ParquetFile:
        """Opens a table of an earlier stage and notes its digest as an input.

        Raises:
            SourceError: the stage has not run, or the file is not the one that it recorded.
        """
        recorded = self.dataset.record(stage, self.key).files[table]
        found = self.dataset.store.size(recorded.path)
        if found != recorded.size:  # the stage was interrupted between its file and its record
            shown = "no file" if found is None else f"{found} bytes"
            detail = f"found {shown}, expected {recorded.size} bytes as recorded: materialize {stage} again"
            raise SourceError(self.dataset.store.url_of(recorded.path), detail)
        self.inputs[table] = recorded.sha256
        opened = open_table(self.dataset.store, self.dataset.table(table, self.key))
        self._tables.append(opened)
        return opened

    @contextmanager
    def write(self, table: str, schema: pa.Schema) -> Iterator[ParquetSink]:
        """Writes one table of this stage; it is published when the block ends well."""
        with self.dataset.store.draft(self.dataset.table(table, self.key)) as draft:
            sink = ParquetSink(
                draft.path,
                schema,
                compression=self.spec.parquet.compression,
                row_group_bytes=self.spec.parquet.row_group_bytes,
            )
            with sink:
                yield sink
        self.files[table] = draft.result()

    def finish(
        self,
        *,
        schema: pa.Schema | None,
        config_stage: str | None = None,
        packed: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> StageResult:
        """Runs the stage's checks, stores its record and sums up; `seconds` of work where they are not those so far."""
        seconds = self.seconds() if seconds is None else seconds
        began = time.perf_counter()
        if not self.sources:
            self.open_shards()
        context = CheckContext(
            store=self.dataset.store,
            files={t: self.dataset.table(t, self.key) for t in _tables_before(self.stage)},
            shards=tuple(self.archives()),
            schema=self.schema,
            packed=dict(packed or {}),
            plan=PackPlan.from_json(self.schema.pack, where=self.dataset.store.url_of("schema.json")),
            known_modalities=frozenset(self.spec.layout.extensions.values()),
            materialize_mode=self.spec.materialize,
            on_misaligned=self.spec.on_misaligned,
        )
        outcomes = tuple(run_checks(self.stage, context))
        record = StageRecord(
            stage=self.stage,
            partition=self.key,
            config_digest=self.spec.digest(config_stage or self.stage),
            schema_digest=self.schema.digest,
            inputs=self.inputs,
            files=self.files,
            counts=self.counts,
            outcomes=tuple(
                Outcome(name=o.name, passed=o.passed, num_violations=o.num_violations, blocking=o.blocking)
                for o in outcomes
            ),
            notes=self.notes,
        )
        self.dataset.write_record(record)
        if any(outcome.stops for outcome in outcomes):
            # A file that was found damaged after its publication is not to be listed again.
            self.dataset.store.delete(self.dataset.marker_name(self.key))
        return StageResult(
            record=record,
            outcomes=outcomes,
            seconds=seconds,
            check_seconds=time.perf_counter() - began,
            preview=self.preview,
            schema=schema,
            urls={name: self.dataset.store.url_of(file.path) for name, file in self.files.items()},
        )


_TABLES_OF = {
    "raw_shards": ("raw_shards",),
    "rows": ("rows", "rejects"),
    "materialized_rows": ("materialized_rows",),
    "filtered_rows": ("filtered_rows", "dropped"),
}


def _tables_before(stage: str) -> list[str]:
    """The tables that exist once `stage` has run."""
    tables: list[str] = []
    for name, made in _TABLES_OF.items():
        tables += made
        if name == stage:
            break
    return tables


def raw_shards(dataset: DatasetStore, key: str) -> StageResult:
    """Indexes the members of a partition's shards; payloads are not read.

    Raises:
        ShardError: a shard cannot be read through and the declaration does not say to salvage.
        SourceError: a shard is gone, or is not the one that was registered.
    """
    on_damaged = dataset.spec.on_damaged_shard
    damaged = 0
    with _Run(dataset, "raw_shards", key) as run:
        run.open_shards()
        run.inputs = {source.url: source.fingerprint for source in run.sources}
        with run.write("raw_shards", MEMBER_INDEX_SCHEMA) as sink:
            for source in run.archives():
                damage: list[ShardDamage] = []
                for batch in index_shard(source, on_damaged_shard=on_damaged, damage=damage):
                    sink.write(run.preview.observe(batch))
                damaged += len(damage)
        run.counts = {
            "members": run.preview.num_rows,
            "shards": len(run.sources),
            "shard_bytes": sum(source.size for source in run.sources),
            "damaged_places": damaged,
        }
        return run.finish(schema=MEMBER_INDEX_SCHEMA)


def rows(dataset: DatasetStore, key: str) -> StageResult:
    """Turns members into rows; text and JSON are read, media is not.

    Raises:
        SourceError: a shard changed since it was indexed, or a required column is missing in every sample.
    """
    spec = dataset.spec
    with _Run(dataset, "rows", key) as run:
        run.open_shards()
        index = run.read("raw_shards", "raw_shards")
        streams = [_archive_rows(run, index)]
        for source in run.sources:
            if is_listing(source.url):
                streams.append(
                    rows_from_listing(
                        source,
                        layout=spec.layout,
                        schema=run.schema,
                        allowed_prefixes=spec.layout.prefixes,
                        batch_bytes=spec.batch_bytes,
                    )
                )
        with run.write("rows", run.schema.row_schema()) as sink:
            for stream in streams:
                for batch in stream:
                    sink.write(run.preview.observe(batch))
        with run.write("rejects", REJECTS_SCHEMA) as sink:
            counts: Counter[str] = Counter()
            for stream in streams:
                rejects = stream.rejects()
                counts.update(stream.counts)
                counts.update(f"rejects.{reason}" for reason in rejects["reason"].to_pylist())
                for batch in rejects.to_batches():
                    sink.write(batch)
        run.counts = dict(counts)
        return run.finish(schema=run.schema.row_schema())


def _archive_rows(run: _Run, index: pq.ParquetFile) -> RowStream:
    spec = run.spec
    return build_rows(
        run.archives(),
        lambda: read_batches(index, batch_bytes=spec.batch_bytes),
        layout=spec.layout,
        schema=run.schema,
        grouped=spec.partition_pattern is not None,
        batch_bytes=spec.batch_bytes,
    )


def materialized_rows(dataset: DatasetStore, key: str) -> StageResult:
    """Fills `binary_content`, or sets `materialize_error`; with ``materialize: write`` hands the rows on as they are.

    Raises:
        SourceError: a shard changed since it was indexed, or the policy is "fail" and an item could not be had.
    """
    spec = dataset.spec
    with _Run(dataset, "materialized_rows", key) as run:
        run.open_shards()
        batches = read_batches(run.read("rows", "rows"), batch_bytes=spec.batch_bytes)
        stream = _materialize(run, batches) if spec.materialize == "read" else None
        with run.write("materialized_rows", run.schema.row_schema()) as sink:
            for batch in batches if stream is None else stream:
                sink.write(run.preview.observe(batch))
        run.counts = {"rows": run.preview.num_rows, "content_bytes": run.preview.content_bytes}
        if stream is not None:
            run.counts.update(stream.counts)
        return run.finish(schema=run.schema.row_schema())


def _materialize(run: _Run, batches: Iterator[pa.RecordBatch]) -> MaterializeStream:
    spec = run.spec
    by_url = {source.url: source for source in run.sources}
    allowed = spec.layout.prefixes
    return materialize(
        batches,
        open_source=lambda url: by_url.get(url) or run.others.open(url),
        allowed=lambda url: url in by_url or is_allowed_reference(url, allowed) or _beside_listing(run, url),
        on_error="fail" if spec.on_materialize_error == "fail" else "keep",
        batch_bytes=spec.batch_bytes,
        max_content_bytes=spec.max_content_bytes,
    )


def _beside_listing(run: _Run, url: str) -> bool:
    """Whether `url` lies in the folder of a list of files, which may name its neighbours."""
    folders = [s.url.rsplit("/", 1)[0] + "/" for s in run.partition.shards if is_listing(s.url)]
    return is_allowed_reference(url, folders)


def filtered_rows(dataset: DatasetStore, key: str) -> StageResult:
    """Annotates and filters; with ``materialize: write`` fetches what the filters that need no content let through.

    Raises:
        SourceError: a shard changed since it was indexed, or the policy is "fail" and an item could not be had.
    """
    spec = dataset.spec
    with _Run(dataset, "filtered_rows", key) as run:
        run.open_shards()
        source = run.read("materialized_rows", "materialized_rows")
        blocks = sample_groups(read_batches(source, batch_bytes=spec.batch_bytes), batch_bytes=spec.batch_bytes)
        plan = PackPlan.from_json(run.schema.pack, where=dataset.store.url_of("schema.json"))
        stream = apply_filters(
            blocks,
            annotators=[
                build_annotator(c, where=spec.where, key=f"annotators[{n}]") for n, c in enumerate(spec.annotators)
            ],
            filters=[build_filter(c, where=spec.where, key=f"filters[{n}]") for n, c in enumerate(spec.filters)],
            schema=run.schema,
            packable=packable(plan),
            misaligned=misaligned(plan) if spec.on_misaligned == "drop_sample" else None,
            fetch=(lambda batches: _materialize(run, batches)) if spec.materialize == "write" else None,
            on_materialize_error="keep" if spec.on_materialize_error == "fail" else spec.on_materialize_error,
            on_empty_sample=spec.on_empty_sample,
            renumber=spec.renumber,
            batch_bytes=spec.batch_bytes,
        )
        with (
            run.write("dropped", DROPPED_SCHEMA) as dropped,
            run.write("filtered_rows", run.schema.filtered_schema()) as kept,
        ):
            for batch in stream:
                kept.write(run.preview.observe(batch))
                for drop in stream.take_dropped():
                    dropped.write(drop)
            for drop in stream.take_dropped():
                dropped.write(drop)
        run.counts = {**stream.counts, "content_bytes": run.preview.content_bytes}
        run.notes = (*stream.notes, *_homelessness(stream.counts, plan))
        return run.finish(schema=run.schema.filtered_schema())


def packed(dataset: DatasetStore, key: str, *, formats: Sequence[str] = PACKED_FORMATS) -> dict[str, StageResult]:
    """Packs the filtered rows, one pass for all `formats`; files carry eight digits of their digest.

    Args:
        dataset: the dataset's folder.
        key: the partition.
        formats: "mult", "mstr" or both.

    Returns:
        A result per format.

    Raises:
        EncodeError: a value does not fit its field.
    """
    spec = dataset.spec
    with _Run(dataset, "packed_mult", key) as run, ExitStack() as stack:
        table = run.read("filtered_rows", "filtered_rows")
        plan = PackPlan.from_json(run.schema.pack, where=dataset.store.url_of("schema.json"))
        blocks = sample_groups(read_batches(table, batch_bytes=spec.batch_bytes), batch_bytes=spec.batch_bytes)
        drafts: dict[str, Draft] = {}
        with ExitStack() as building:
            for form in formats:
                drafts[form] = building.enter_context(dataset.store.draft(f"packed/{key}.{form}"))
            summary = pack_rows(
                blocks,
                plan,
                mult=drafts["mult"].path if "mult" in drafts else None,
                mstr=drafts["mstr"].path if "mstr" in drafts else None,
                provenance={"dataset": spec.name, "partition": key},
                num_samples=dataset.record("filtered_rows", key).counts["kept_samples"],
            )
            with ThreadPoolExecutor(len(drafts)) as pool:
                digests = pool.map(Draft.digest, drafts.values())
                for (form, draft), digest in zip(drafts.items(), digests, strict=True):
                    draft.name = f"packed/{key}.{digest[:8]}.{form}"
        files = {form: draft.result() for form, draft in drafts.items()}
        seconds = run.seconds()  # of the one pass that made all of them
        results = {}
        for form, file in files.items():
            part = stack.enter_context(_Run(dataset, f"packed_{form}", key))
            part.inputs = dict(run.inputs)
            part.files = {form: file}
            part.counts = {"samples": summary.num_samples, "bytes": file.size, **_counts(summary)}
            part.notes = (*summary.notes, *_emptiness(summary, plan))
            part.preview = run.preview
            names = _packed_names(dataset, key, files, run.inputs)
            results[form] = part.finish(schema=None, config_stage="packed", packed=names, seconds=seconds)
        return results


def recheck_packed(dataset: DatasetStore, key: str, form: str) -> StageResult:
    """Runs the checks of a packed file again, without packing.

    Args:
        dataset: the dataset's folder.
        key: the partition.
        form: "mult" or "mstr".

    Raises:
        SourceError: the file has not been made.
    """
    record = dataset.record(f"packed_{form}", key)
    with _Run(dataset, f"packed_{form}", key) as run:
        run.inputs, run.files, run.counts = dict(record.inputs), dict(record.files), dict(record.counts)
        return run.finish(schema=None, config_stage="packed", packed=_packed_names(dataset, key, run.files, run.inputs))


def _counts(summary: PackSummary) -> dict[str, int]:
    present = {f"present_{name}": count for name, count in summary.num_present.items()}
    refused = {f"refused_{name}": count for name, count in sorted(summary.num_refused.items())}
    return present | refused | ({"rest_rows": summary.num_rest} if summary.num_rest else {})


def _homelessness(counts: Mapping[str, int], plan: PackPlan) -> Iterator[str]:
    """Says so where most rows have no place in the plan, which may not be meant for them."""
    refused = {name.rsplit(".", 1)[-1]: n for name, n in counts.items() if name.startswith("dropped.packable.")}
    if 2 * sum(refused.values()) > counts["rows"] - counts["samples"]:  # of content rows: each sample has one other
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in refused.items())
        what = f"preset {plan.preset!r}" if plan.preset else "the declared fields"
        yield f"{sum(refused.values()):,} of {counts['rows']:,} rows cannot be packed by {what}: {reasons}"


def _emptiness(summary: PackSummary, plan: PackPlan) -> Iterator[str]:
    """What hints that the plan is not meant for these rows."""
    if summary.num_samples == 0:
        yield "no sample was packed: `dropped` says where its rows went"
    elif 2 * summary.num_rest > summary.num_items:
        yield f"{summary.num_rest:,} of {summary.num_items:,} content rows are in the rest of preset {plan.preset!r}"


def _packed_names(
    dataset: DatasetStore, key: str, files: Mapping[str, PublishedFile], inputs: Mapping[str, str]
) -> dict[str, str]:
    """The packed files made from the same rows: those just made, and the other format's if it was."""
    names = {form: file.path for form, file in files.items()}
    for form in PACKED_FORMATS:
        if form in names:
            continue
        try:
            record = dataset.record(f"packed_{form}", key)
        except SourceError:
            continue
        if dict(record.inputs) == dict(inputs):
            names[form] = record.files[form].path
    return names
