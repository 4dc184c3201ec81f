"""One stage at work on one partition: its inputs and outputs, its checks, its record.

A `Run` opens what the stage reads and notes its digests, publishes each table whole, then runs the checks and writes
the record last. Which stage it is, and which tables that means, comes from `pipeline.chain`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mm_assets.checks.alignment import misaligned
from mm_assets.checks.context import CheckContext, Filtering, LossLimit, TableFile
from mm_assets.checks.outcome import Outcome
from mm_assets.checks.packed import PackedFiles
from mm_assets.checks.runner import run_checks
from mm_assets.dataset.manifest import file_path
from mm_assets.errors import SourceError, best_effort_notes, temporary_disk_named
from mm_assets.filters.apply import FilterStream
from mm_assets.filters.base import Annotator, Filter
from mm_assets.packing.judge import Judge
from mm_assets.pipeline.chain import CHAIN, FILTERED_ROWS, MATERIALIZED_ROWS, RAW_SHARDS, Stage, Table
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.packed_streams import PackedStream
from mm_assets.pipeline.partition.preview import Chart, DrawnPreview, Preview
from mm_assets.pipeline.state.losses import losses_command
from mm_assets.pipeline.state.records import StageRecord, digest_fault, size_fault
from mm_assets.rows.base import RowSource
from mm_assets.rows.columns import Kept
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.parquet import ParquetSink, open_table, read_batches, sample_groups
from mm_assets.rows.references import ReferenceSink, with_media
from mm_assets.storage.store import PublishedFile, Store

__all__ = ["Run", "StageResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage did, for its report.

    Attributes:
        record: as stored, with the first violations of each check.
        seconds: wall clock of the stage without its checks.
        check_seconds: wall clock of the checks.
        preview: sizes and first rows of the main table, drawn.
        schema: columns of the main table, or None for packed files.
        urls: where each file is, by name.
        streams: the modalities of a packed file.
    """

    record: StageRecord
    seconds: float
    check_seconds: float
    preview: DrawnPreview
    schema: pa.Schema | None
    urls: Mapping[str, str]
    streams: Sequence[PackedStream] = ()

    @classmethod
    def of_record(cls, record: StageRecord, store: Store) -> StageResult:
        """What is known of a stage that ran earlier."""
        urls = {name: store.url_of(file.path) for name, file in record.files.items()}
        return cls(record=record, seconds=0.0, check_seconds=0.0, preview=DrawnPreview(), schema=None, urls=urls)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes of its checks."""
        return self.record.outcomes

    @property
    def passed(self) -> bool:
        """Whether every check passed that stops a partition."""
        return self.record.failure is None


def _preview(stage: Stage) -> Preview:
    """What is collected of a stage's rows: Dagster keeps it forever, so of equal rows and images the last are shown."""
    if stage is FILTERED_ROWS:
        return Preview()
    if stage is MATERIALIZED_ROWS:
        return Preview(num_rows=0, num_samples=0)
    if stage.packed_format is not None:
        return Preview(num_rows=0, num_samples=1)
    return Preview(num_samples=0, charted=("byte_size",))


class Run:
    """One stage at work on one partition: its inputs and files, its clock.

    Args:
        work: the partition.
        stage: the stage.

    Attributes:
        inputs: digest of each input by name; for shards their fingerprints.
        published: the files that the stage has made, by name.
        preview: collects what passes through the main table.
        files: the shards, open, as they were when they were indexed, or registered if this stage indexes them.

    Raises:
        SourceError: a shard is gone, or has changed.
    """

    def __init__(self, work: PartitionWork, stage: Stage) -> None:
        self.work = work
        self.dataset = work.dataset
        self.spec = work.spec
        self.stage = stage
        self.key = work.key
        self.schema = work.schema
        self.plan = work.plan
        self._started = time.perf_counter()
        self.inputs: dict[str, str] = {}
        self.published: dict[str, PublishedFile] = {}
        self.preview = _preview(stage)
        self._opened = ExitStack()
        # Before the stage's work: a changed shard is refused before any table replaces a recorded one.
        self.files = work.shards(indexed=stage is not RAW_SHARDS) if stage.reads_shards(work.spec) else ()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def seconds(self) -> float:
        """Wall clock since the stage began."""
        return time.perf_counter() - self._started

    @property
    def row_sources(self) -> Sequence[RowSource]:
        """What makes rows of the open shards."""
        return self.work.row_sources

    def read(self, stage: Stage) -> pq.ParquetFile:
        """Opens the main table of an earlier stage and notes its digest as an input.

        The whole file is hashed first: what is packed gets checksums of its own, which would hide earlier damage. Not
        a file that this run of the partition has hashed already, when it wrote or read it, and that is as it was then.

        Raises:
            SourceError: the stage has not run, or the file is not the one that it recorded.
        """
        table = stage.tables[0].name
        recorded = self.work.record(stage).files[table]
        store, fault = self.dataset.store, size_fault(recorded.size, self.dataset.store.size(recorded.path))
        if fault is None and not self.work.is_verified(recorded.path):
            if not store.is_local:  # its bytes are fetched once, to be hashed and to be read
                with temporary_disk_named():
                    scratch = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="mm-assets-table-"))
                    store = self.dataset.store.copy(recorded.path, Path(scratch))
            fault = digest_fault(recorded.sha256, store.digest(recorded.path))
            if fault is None:
                self.work.verified(recorded.path)
        if fault is not None:  # interrupted between its file and its record, or damaged since
            again = f"mm-assets run --dataset {self.spec.name} --partition {self.key}"
            detail = f"{fault} as recorded: materialize {stage.name} again, or run `{again}`"
            raise SourceError(self.dataset.store.url_of(recorded.path), detail)
        self.inputs[table] = recorded.sha256
        opened = open_table(store, recorded.path)
        self._opened.callback(opened.close, force=True)
        return opened

    def batches(self, stage: Stage) -> Iterator[pa.RecordBatch]:
        """The rows of the main table of an earlier stage, in bounded batches; errors as `read`.

        Media that are not in the table are read from the shards, which raises `SourceError` where they are not as they
        were.
        """
        batches = read_batches(self.read(stage), batch_bytes=self.spec.batch_bytes)
        return self._with_media(batches) if stage.tables[0].has_references(self.spec) else batches

    def _with_media(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Of these stages the first has the references of all.
        made_by = next(s for s in CHAIN if any(table.has_references(self.spec) for table in s.tables))
        table = self.dataset.store.url_of(self._path(made_by, made_by.tables[0]))
        again = f"mm-assets run --dataset {self.spec.name} --partition {self.key} --from {made_by.name}"
        fetch = partial(self.materialized, fail_on_error=False)
        return with_media(batches, fetch, table=table, advice=f"run `{again}`")

    def materialized(self, batches: Iterable[pa.RecordBatch], *, fail_on_error: bool) -> MaterializeStream:
        """Rows with their media out of the open shards, and files beside them that the declaration allows."""
        shards, is_allowed = {file.url for file in self.files}, self.work.is_allowed
        return MaterializeStream(
            batches,
            open_file=self.work.open_file,
            open_container=self.work.open_container,
            allowed=lambda url: url in shards or is_allowed(url),
            fail_on_error=fail_on_error,
            batch_bytes=self.spec.batch_bytes,
            max_content_bytes=self.spec.max_content_bytes,
            pdf_dpi=self.spec.samples.pdf_dpi,
        )

    def samples(self, stage: Stage) -> Iterator[pa.Table]:
        """The same rows in blocks of whole samples."""
        return sample_groups(self.batches(stage), batch_bytes=self.spec.batch_bytes)

    def filter_stream(
        self,
        samples: Iterable[pa.Table],
        annotators: Sequence[Annotator],
        filters: Sequence[Filter],
        judge: Judge | None,
        *,
        fetch: Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]] | None = None,
    ) -> FilterStream:
        """Filters blocks of samples as the declaration says.

        Args:
            samples: the blocks, with their media if there is no `fetch`.
            annotators: fresh instances.
            filters: likewise.
            judge: decides what can be decoded and packed; without one all can.
            fetch: as of a `FilterStream`.
        """
        spec = self.spec
        drops_misaligned = judge is not None and spec.on_misaligned == "drop_sample"
        return FilterStream(
            samples,
            annotators=annotators,
            filters=filters,
            schema=self.schema,
            decodable=None if judge is None else judge.undecodable,
            packable=None if judge is None else lambda rows, _: judge.packable(rows),
            misaligned=misaligned(self.plan) if drops_misaligned else None,
            fetch=fetch,
            on_materialize_error="keep" if spec.on_materialize_error == "fail" else spec.on_materialize_error,
            on_empty_sample=spec.on_empty_sample,
            renumber=spec.renumber,
            batch_bytes=spec.batch_bytes,
        )

    @contextmanager
    def write(self, table: Table | None = None) -> Iterator[ParquetSink]:
        """Writes one table of this stage, the main one by default; it is published when the block succeeds."""
        table = table or self.stage.tables[0]
        with self.dataset.store.draft(f"{table.name}/{self.key}.parquet", durable=False) as draft:
            with (
                draft.hashed() as file,
                (ReferenceSink if table.has_references(self.spec) else ParquetSink)(
                    draft.path,
                    table.columns(self.spec, self.schema),
                    file=file,
                    compression=self.spec.parquet.compression,
                    row_group_bytes=self.spec.parquet.row_group_bytes,
                ) as sink,
            ):
                yield sink
            draft.name = file_path(table.name, self.key, draft.digest())
        self.published[table.name] = draft.result()
        self.work.verified(draft.name)

    def shares_rows(self, source: Stage) -> bool:
        """Whether the main table may be the table of another stage, if it has the same rows."""
        main, other = self.stage.tables[0], source.tables[0]
        has_references = main.has_references(self.spec) or other.has_references(self.spec)
        columns = (table.columns(self.spec, self.schema) for table in (main, other))
        return self.dataset.store.is_local and not has_references and next(columns).equals(next(columns))

    def write_selection(self, source: Stage, selected: npt.NDArray[np.int64]) -> None:
        """Writes rows of the table of an earlier stage as the main table; of all rows it is the same file.

        The same rows give the same file, so one more name for the existing file is all that is needed.

        Args:
            source: a stage for which `shares_rows` holds.
            selected: numbers of the rows, ascending.

        Raises:
            SourceError: the table is not what was recorded.
        """
        main, existing = self.stage.tables[0], self.work.record(source).files[source.tables[0].name]
        file = self.read(source)
        if len(selected) == file.metadata.num_rows:
            name = file_path(main.name, self.key, existing.sha256)
            self.published[main.name] = self.dataset.store.link(existing, name, durable=False)
            self.work.verified(name)
            return
        keep = np.zeros(file.metadata.num_rows, np.bool_)
        keep[selected] = True
        start = 0
        with self.write() as sink:
            for batch in read_batches(file, batch_bytes=self.spec.batch_bytes):
                mask = keep[start : start + batch.num_rows]
                sink.write(batch if mask.all() else batch.filter(pa.array(mask)))
                start += batch.num_rows

    def _path(self, stage: Stage, table: Table) -> str:
        """Path of a table of this stage, or of one before it, below the dataset's folder."""
        files = self.published if stage is self.stage and self.published else self.work.record(stage).files
        return files[table.name].path

    def check_context(self, packed: Mapping[str, str]) -> CheckContext:
        """What the stage's checks judge.

        Args:
            packed: format to the packed file made from the present rows.
        """
        tables = {table: self._path(stage, table) for stage in self.stage.lineage for table in stage.tables}
        return CheckContext(
            asset=self.stage.name,
            store=self.dataset.store,
            tables={
                table.name: TableFile(path=path, schema=table.columns(self.spec, self.schema))
                for table, path in tables.items()
            },
            with_media={table.name: self._with_media for table in tables if table.has_references(self.spec)},
            own_tables=tuple(table.name for table in self.stage.tables),
            shards=tuple(self.work.containers),
            listings=tuple(source for source in self.row_sources if not source.sources),
            layout=self.spec.samples,
            schema=self.schema,
            grouped=self.spec.partition_pattern is not None,
            declared_shards=self.spec.shards,
            packed=dict(packed),
            packed_format=self.stage.packed_format,
            packed_from=self.stage.upstream[0].tables[0].name if self.stage.packed_format else "",
            plan=self.plan,
            known_modalities=frozenset(self.spec.samples.extensions.values()),
            materialize_mode=self.spec.materialize,
            on_misaligned=self.spec.on_misaligned,
            on_undecodable=self.spec.on_undecodable,
            judged=self.spec.decodable == "full" and self.spec.on_undecodable != "keep",
            loss_limit=self._loss_limit(),
            max_content_bytes=self.spec.max_content_bytes,
            filtering=Filtering(
                annotators=self.spec.build_annotators,
                filters=self.spec.build_filters,
                stream=self.filter_stream,
                plan=self.plan,
                on_undecodable=self.spec.on_undecodable,
                decodable=self.spec.decodable,
            ),
        )

    @best_effort_notes
    def _own_notes(self) -> Iterator[str]:
        if any(table.has_references(self.spec) for table in self.stage.tables):
            yield "the media stay in the shards: in their place the table has the size and CRC-32C of each (`retain`)"

    def _loss_limit(self) -> LossLimit | None:
        setting = self.stage.loss_limit
        allowed = None if setting is None else getattr(self.spec, setting)
        if setting is None or allowed is None:
            return None
        command = losses_command(self.spec.name, self.key)
        return LossLimit(setting=setting, allowed=allowed, command=command, harmless=self.stage.harmless)

    def recheck(self, packed: Mapping[str, str] | None = None) -> StageResult:
        """Runs the checks of the stage again, on the files that its record names.

        Args:
            packed: as for `finish`.

        Raises:
            SourceError: the stage has not run, or with other settings.
        """
        record = self.work.record(self.stage)
        if changed := self.stage.changed(record.made_with, self.stage.made_with(self.spec, self.schema)):
            where = self.dataset.store.url_of(self.dataset.record_name(self.key, self.work.recipe))
            again = f"mm-assets run --dataset {self.spec.name} --partition {self.key}"
            raise SourceError(where, f"{self.stage.name} is of other settings ({changed}): run `{again}`")
        self.inputs, self.published = dict(record.inputs), dict(record.files)
        own = set(self._own_notes())
        notes = [note for note in record.notes if note not in own]
        return self.finish(
            counts=record.counts, notes=notes, kept=record.kept, limits=record.limits, packed=packed, is_again=True
        )

    def finish(
        self,
        *,
        counts: Mapping[str, int],
        notes: Iterable[str] = (),
        kept: Iterable[Kept] = (),
        limits: Mapping[str, Any] | None = None,
        packed: Mapping[str, str] | None = None,
        checked: PackedFiles | None = None,
        seconds: float | None = None,
        streams: Sequence[PackedStream] = (),
        charts: Sequence[Chart] = (),
        is_again: bool = False,
    ) -> StageResult:
        """Runs the stage's checks, stores its record and sums up.

        Args:
            counts: rows, bytes, rejects and the like.
            notes: what a person should know about the stage's work.
            kept: faults that keep nothing from being published.
            limits: as of a `StageRecord`.
            packed: format to the packed file made from the present rows.
            checked: those files, where the checks of several formats share them.
            seconds: wall clock of the work; by default that since the stage began.
            streams: the modalities of a packed file.
            charts: in addition to those of the preview.
            is_again: whether the checks run again on files that have a record, which stays as it is if they pass.
        """
        seconds = self.seconds() if seconds is None else seconds
        began = time.perf_counter()
        outcomes = tuple(run_checks(self.check_context(packed or {}), checked, self.work.measured))
        record = StageRecord(
            stage=self.stage.name,
            partition=self.key,
            made_with=self.stage.made_with(self.spec, self.schema),
            inputs=self.inputs,
            files=self.published,
            counts=counts,
            outcomes=outcomes,
            notes=(*notes, *self._own_notes()),
            kept=tuple(kept),
            limits=limits or {},
        )
        if not is_again or record.failure is not None:
            self.work.add_record(self.stage, record)
        if is_again and record.failure is not None:  # damaged after its publication: the next manifest must not list it
            self.dataset.store.delete(self.dataset.record_name(self.key, self.work.recipe))
        return StageResult(
            record=record,
            seconds=seconds,
            check_seconds=time.perf_counter() - began,
            preview=self.preview.drawn(charts),
            schema=self.stage.tables[0].columns(self.spec, self.schema) if self.stage.tables else None,
            urls={name: self.dataset.store.url_of(file.path) for name, file in self.published.items()},
            streams=streams,
        )
