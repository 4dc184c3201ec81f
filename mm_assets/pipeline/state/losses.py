"""What a dataset lost on the way to its packed files: by reason with counts and an example, and item by item.

An item is of one of four kinds. *Lost* are the partitions that failed, what became no row (`rejects`, salvaged damage
among it) and the rows that the pipeline could not keep, such as undecodable media. *Dropped* are the rows that declared
filters removed. *Kept* is what is published in spite of a fault: undecodable media under ``on_undecodable: keep``,
contents that their field refuses or takes in part, JSON keys without a column, values that do not fit their column,
tars without an end. *Harmless* are rejects that cannot have been data. Of a partition that failed, the tables of the
stages after the failure do not hold what the shard has, and are not read.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

from mm_assets.errors import ConfigError, SourceError, first_line
from mm_assets.pipeline.chain import (
    CHAIN,
    DROPPED,
    FILTERED_ROWS,
    KEPT_OMITTED,
    KEPT_REFUSED,
    KEPT_UNDECODABLE,
    MATERIALIZED_ROWS,
    MISSING_END,
    RAW_SHARDS,
    REJECTS,
    ROWS,
    STAGE_OF_FILE,
    UNDECODABLE,
    Stage,
)
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Attempt, StageRecord
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.columns import NO_COLUMN, NULL_CAST, REPAIRED_JSON
from mm_assets.rows.schema import ALL_FILTERED, EMPTY_SAMPLE, KEPT, PIPELINE_FILTERS
from mm_assets.rows.sql import parquet_relation
from mm_assets.summaries import counted

__all__ = [
    "FAILED",
    "KINDS",
    "LOCATOR_COLUMNS",
    "Locator",
    "Loss",
    "LossPage",
    "LossTotal",
    "Selection",
    "kind_counts",
    "listed_totals",
    "loss_page",
    "loss_totals",
    "losses",
    "losses_command",
    "published_losses",
    "recorded_totals",
    "stage_losses",
    "sum_losses",
    "totals_said",
]

KINDS = ("lost", "dropped", "kept", "harmless")

FAILED = "failed"  # the reason of a partition that failed
_FETCH = 4096  # losses that are Python objects at a time
_MAX_DETAIL = 500  # characters, of an example in a record
_NAMED_BY_PLACE = ("stage", "reason", "count")  # of an example in a record
_PAGE_SECONDS = 1.0  # for which a page reads further partitions if few have what it lists
_POSITION = re.compile(r"(\d{1,15}):(.+)", re.DOTALL)
_MAX_ROWS = 1 << 40  # in one table: the number of a loss is that of its source times this, and its row

LOCATOR_COLUMNS = """source_ref ->> 'path' as shard, source_ref ->> 'member' as member,
    (source_ref ->> 'byte_offset')::bigint as byte_offset, (source_ref ->> 'byte_size')::bigint as byte_size,
    (source_ref ->> 'frame_index')::integer as frame_index"""
"""SQL for the columns of a `Locator`, from a column `source_ref`."""


class _Listing(NamedTuple):
    """SQL of the losses that the table $table lists.

    Attributes:
        listed: all of them, with their row of the table as `number`.
        located: the columns of `_COLUMNS` of the relation `lost`, which has some of those.
        files: the tables that it reads, by parameter.
    """

    listed: str
    located: str
    files: Mapping[str, str]


_COLUMNS = (
    *("number", "count", "reason", "value", "detail", "sample_id", "position", "modality", "content_type"),
    *("shard", "member", "byte_offset", "byte_size", "frame_index"),
)
_TABLE = parquet_relation("$table", file_row_number="true")
_IDENTITY = "sample_id, position, modality"
_NTH = "row_number() over (partition by shard, member order by file_row_number desc) as nth"
_LISTINGS = {  # by the start of the names of their counts in a record
    REJECTS.name: _Listing(
        # A name that is in the index several times belongs to its last members: the first ones became rows.
        listed=f"""
            select file_row_number as number, reason, null as value, detail, sample_id, null as position,
                null as modality, shard, member, {_NTH}
            from {_TABLE}""",
        located=f"""
            select number, count, reason, value, detail, {_IDENTITY}, null, shard, member, byte_offset, byte_size, null
            from lost left join (
                select shard, member, byte_offset, byte_size, {_NTH}
                from {parquet_relation("$index", file_row_number="true")}
                where (shard, member) in (select (shard, member) from lost)
            ) using (shard, member, nth)""",
        files={"table": REJECTS.name, "index": RAW_SHARDS.tables[0].name},
    ),
    DROPPED.name: _Listing(
        listed=f"""
            select file_row_number as number, filter || '.' || reason as reason, value, detail, {_IDENTITY}
            from {_TABLE}""",
        # Of the row's own columns, which may have any name, those that are needed are named.
        located=f"""
            select number, count, reason, value, coalesce(detail, materialize_error, 'measured ' || value, ''),
                {_IDENTITY}, content_type, {LOCATOR_COLUMNS}
            from lost left join (
                select {_IDENTITY}, content_type, source_ref, materialize_error from {parquet_relation("$source")}
            ) using ({_IDENTITY})""",
        files={"table": DROPPED.name, "source": MATERIALIZED_ROWS.tables[0].name},
    ),
    KEPT: _Listing(  # the dropped ones of them are in the table of those
        listed=f"""
            select own.file_row_number as number, '{KEPT}.' || own.reason as reason, null as value,
                field || ': ' || own.detail as detail, {_IDENTITY}, source_ref
            from {_TABLE} as own anti join {parquet_relation("$dropped")} using ({_IDENTITY})""",
        located=f"select number, count, reason, value, detail, {_IDENTITY}, null, {LOCATOR_COLUMNS} from lost",
        files={"table": UNDECODABLE.name, "dropped": DROPPED.name},
    ),
}
_SELECTED = """
    select *, 1 as count from ({listed})
    where number >= $first and ($reasons is null or reason in (select unnest($reasons::varchar[])))
        and ($sample_ids is null or sample_id in (select unnest($sample_ids::varchar[])))
    order by number limit $limit"""
_COUNTED = """
    select *, count(*) over (partition by reason) as count from ({listed})
    qualify row_number() over (partition by reason order by number) = 1"""

_DECIDE_AGAIN = "`register --new-schema` decides the columns again"
_LIST_ROW = "correct the row of the list"
_REJECTED = {  # what to do about each reason of a reject; of a user's own source there may be others
    "": "correct the member in the shard and run again",
    "directory": "nothing: a directory has no content",
    "device": "nothing: a device or a pipe has no content",
    "resource fork": "nothing: macOS made it beside the file",
    "system file": "nothing: the operating system made it",
    "hidden file": "rename it if it belongs to a sample: names with a leading dot are skipped",
    "documentation": "nothing: it describes the files beside it",
    "encrypted": "write the archive without a password",
    "compression method": "write the archive with stored or deflated members",
    "no name": "give the member a name",
    "no bytes": "write the Parquet file with the bytes in it, or list its files by path",
    "symbolic link": "pack the link's target instead of the link",
    "link outside": "pack the link's target as a member before the link",
    "unknown type": "pack it as a plain file",
    "damaged": "replace the shard: these bytes cannot be read as members",
    "trailing bytes": "nothing if they are padding; else the archive was joined or truncated wrongly",
    "empty_shard": "replace the shard, or remove it",
    "repeated_member": "give each member of a shard a name of its own",
    "duplicate_sample_id": "make ids unique, or set samples.sample_id_field to a key that is",
    "unreferenced_member": "name it in the sample's JSON, or move it out of the shard",
    "bad_json": "correct the JSON: the sample has no metadata now",
    "json_not_an_object": "write the sample's JSON as an object: the sample has no metadata now",
    "too_many_items": "divide the sample",
    "too_large": "raise samples.max_text_bytes; divide a PDF of more than 256 MiB",
    "bad_pdf": "fetch the PDF again, or repair it with another program, or leave it out",
    "encrypted_pdf": "remove the password of the PDF, or leave it out",
    "pdf_too_large": "divide the PDF, lower samples.pdf_dpi or raise samples.max_text_bytes, as the detail says",
    "bad_compression": "compress the member again, from its original",
    "not_utf8": "name the encoding of the texts as samples.encoding, or convert them to UTF-8",
    "not_a_list": "make it a list, or name the lists as samples.texts_field and samples.images_field",
    "text_not_a_string": "write the entry as a string, or as null",
    "no_sample_id": "give each row of the list a sample_id, or the names of its files in columns such as file_name",
    "second_metadata": "join the metadata rows of the sample to one",
    "position_taken": "give each item of a modality a position of its own",
    "bad_position": _LIST_ROW,
    "bad_modality": f"{_LIST_ROW}, or name the modality in samples.extensions",
    "bad_text": _LIST_ROW,
    "no_text": "write the text into text_content",
    "bad_source": _LIST_ROW,
    "bad_csv": _LIST_ROW,
    "no_source": "name the file as path or source_ref",
    "outside": "move the file below the list's folder, or set samples.allow_references and allowed_references",
}
_AGAIN = "correct what the message names, then run the partition again"
_ADVICE = {  # by stage and the start of reason and detail, the longest that fits
    "": "see the message, then run the partition again",
    **{f"{stage.name}/{FAILED}": _AGAIN for stage in CHAIN},
    **{
        f"{stage.name}/{FAILED}: check ": "correct the sample in the shard; files that were damaged since are remade"
        for stage in CHAIN
    },
    f"{RAW_SHARDS.name}/{FAILED}": "correct what the message names; if the shard is damaged, copy it "
    "again, or set on_damaged_shard: salvage, which takes what is intact",
    **{
        f"{RAW_SHARDS.name}/{FAILED}: cannot be {done}: ": _AGAIN for done in ("read", "opened", "written")
    },  # no damage
    f"{RAW_SHARDS.name}/{FAILED}: cannot be read: No such file": "put the shard back, or let `mm-assets register` "
    "leave the partition out, then run it again",
    f"{ROWS.name}/{FAILED}: none of ": "write the key into the JSON of the shard's samples, or take it out of "
    "samples.user_columns",
    f"{RAW_SHARDS.name}/{MISSING_END}": "replace it if its original is larger; on_missing_end: fail refuses such tars",
    **{
        f"{stage.name}/{FAILED}: check losses: ": f"correct the shard, or raise {stage.loss_limit}"
        for stage in CHAIN
        if stage.loss_limit is not None
    },
    **{f"{ROWS.name}/{reason}": advice for reason, advice in _REJECTED.items()},
    f"{ROWS.name}/{NO_COLUMN}": f"nothing if metadata_json is enough, which has it; {_DECIDE_AGAIN}",
    f"{ROWS.name}/{NULL_CAST}": f"correct the value, which metadata_json has; {_DECIDE_AGAIN}",
    f"{ROWS.name}/{REPAIRED_JSON}": "write null for a number that is missing, and Unicode without lone surrogates",
    f"{FILTERED_ROWS.name}/": "change or remove the filter if the row should stay",
    f"{FILTERED_ROWS.name}/materialize.": "make the source of the item readable, or on_materialize_error: keep",
    f"{FILTERED_ROWS.name}/packable.": "repair the item, raise the limit that the message names, or give it a field in "
    "`pack` (docs/packing.md)",
    f"{FILTERED_ROWS.name}/packable.not_materialized": "make what it names readable, or correct the name",
    f"{FILTERED_ROWS.name}/packable.not_selected": "give it a field in `pack` (docs/packing.md)",
    f"{FILTERED_ROWS.name}/packable.incomplete_": "add the part that is missing, or give it a field in `pack`",
    f"{FILTERED_ROWS.name}/packable.sample_too_large": "divide the sample",
    f"{FILTERED_ROWS.name}/misaligned.": "correct the sample, or on_misaligned: warn",
    f"{FILTERED_ROWS.name}/empty_sample.": "the losses of its other rows say why nothing is left; if it has metadata "
    "alone, on_empty_sample: keep packs it",
    f"{FILTERED_ROWS.name}/{EMPTY_SAMPLE}.{ALL_FILTERED}": "none of its rows passed the filters: they say which",
    f"{FILTERED_ROWS.name}/decodable.": "repair or replace the item, or set on_undecodable",
    f"{FILTERED_ROWS.name}/{KEPT_UNDECODABLE}": "repair it: it is published, but no reader decodes it; "
    "on_undecodable: drop_row leaves it out",
    f"{FILTERED_ROWS.name}/{KEPT_REFUSED}": "correct it, or give it a field in `pack` (docs/packing.md): it is "
    "published, in the rest or the metadata",
    f"{FILTERED_ROWS.name}/{KEPT_OMITTED}": "correct the file if that matters: the remainder of it is published",
}


_HARMLESS = {stage.name: stage.harmless for stage in CHAIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Locator:
    """Where content is, as far as that is known.

    Attributes:
        shard: path or URL of the shard, or of another file that holds it.
        member: the member.
        byte_offset: first byte in the shard, if the content is one range of it.
        byte_size: bytes of that range.
        frame_index: of an image with several frames.
    """

    shard: str | None = None
    member: str | None = None
    byte_offset: int | None = None
    byte_size: int | None = None
    frame_index: int | None = None

    @property
    def place(self) -> str:
        """Shard, member and byte range as text."""
        parts = [self.shard or "", self.member or ""]
        if self.byte_offset is not None and not (self.member or "").endswith(" of the archive"):  # which names them
            end = "" if self.byte_size is None else f" to {self.byte_offset + self.byte_size}"
            parts.append(f"bytes {self.byte_offset}{end}" if end else f"byte {self.byte_offset}")
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Locator):
    """One item that is lost, or that has a fault; or several of one kind, or a whole partition.

    Attributes:
        partition: the partition key.
        stage: name of the stage that lost it.
        reason: short name, counted by; of a dropped row ``<filter>.<reason>``, of a failed partition `FAILED`, of what
            is published in spite of a fault ``kept.<fault>``.
        detail: why, as text; may be empty.
        count: how many items; of more than one the others are like the first, which the further attributes name.
        value: the measure that decided, if there is one.
        setting: the parameter of the filter that decided, if it is known.
        limit: the value of that parameter.
        sample_id: its sample, if it is in one.
        position: its row's position in the sample, if it had become a row.
        modality: that row's modality.
        content_type: MIME type of its content, if it is known.
    """

    partition: str
    stage: str
    reason: str
    detail: str = ""
    count: int = 1
    value: float | None = None
    setting: str | None = None
    limit: float | None = None
    sample_id: str | None = None
    position: int | None = None
    modality: str | None = None
    content_type: str | None = None

    @property
    def advice(self) -> str:
        """What to do about it."""
        what = f"{self.stage}/{self.reason}: {self.detail}"
        return _ADVICE[max((start for start in _ADVICE if what.startswith(start)), key=len)]

    @property
    def kind(self) -> str:
        """One of `KINDS`: lost, dropped by a declared filter, published in spite of a fault, or not data at all."""
        if self.reason.startswith(f"{KEPT}."):
            return "kept"
        if self.stage == FILTERED_ROWS.name and self.reason != FAILED:
            by_filter = self.reason.partition(".")[0] not in PIPELINE_FILTERS
            return "dropped" if by_filter or self.reason == f"{EMPTY_SAMPLE}.{ALL_FILTERED}" else "lost"
        return "harmless" if self.reason in _HARMLESS.get(self.stage, ()) else "lost"

    def to_json(self) -> dict[str, Any]:
        """The item with its kind and what to do about it."""
        return {"kind": self.kind, **asdict(self), "advice": self.advice}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which losses are asked for; all by default.

    Attributes:
        kind: those of one of `KINDS`.
        stage: those of the stage with this name.
        reason: those with this reason.
        sample_ids: those of samples with these ids.
    """

    kind: str | None = None
    stage: str | None = None
    reason: str | None = None
    sample_ids: Collection[str] | None = None

    def has(self, loss: Loss) -> bool:
        """Whether a loss is selected."""
        return self.has_reason(loss.stage, loss.reason) and (
            self.sample_ids is None or loss.sample_id in self.sample_ids
        )

    def has_reason(self, stage: str, reason: str) -> bool:
        """Whether losses of a stage with a reason may be selected."""
        return (
            self.stage in (None, stage)
            and self.reason in (None, reason)
            and (self.kind is None or self.kind == Loss(partition="", stage=stage, reason=reason).kind)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPage:
    """Some losses.

    Attributes:
        items: they, in the order of partitions, stages and tables.
        after: where the next page starts; None at the end.
    """

    items: Sequence[Loss]
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotal:
    """The items of one reason.

    Attributes:
        count: how many.
        example: the first of them.
    """

    count: int
    example: Loss


def losses_command(dataset: str, partition: str | None = None) -> str:
    """The command that lists the losses of a dataset, or of one of its partitions."""
    return f"mm-assets losses --dataset {dataset}" + (f" --partition {partition}" if partition else "")


def totals_said(totals: Iterable[LossTotal]) -> str:
    """Returns how many partitions failed, and how many items are of which kind, as text."""
    counts = dict.fromkeys((FAILED, *KINDS), 0)
    for total in totals:
        counts[FAILED if total.example.reason == FAILED else total.example.kind] += total.count
    said = [f"{counted(counts[FAILED], 'partition')} failed"] if counts[FAILED] else []
    said += [f"{counts['dropped']:,} dropped by filters"] if counts["dropped"] else []
    if counts["lost"] or not counts[FAILED]:
        said.append(f"{counts['lost']:,} lost" if counts["dropped"] else f"{counted(counts['lost'], 'item')} lost")
    said += [f"{counts['kept']:,} published in spite of a fault"] if counts["kept"] else []
    said += [f"{counts['harmless']:,} harmless"] if counts["harmless"] else []
    return ", ".join(said)


def _counts(record: StageRecord) -> Iterator[tuple[str, str, int]]:
    """Yields the table, the reason and the number of what a record counts as lost or kept with a fault."""
    for name, count in sorted(record.counts.items()):
        table, _, reason = name.partition(".")
        if reason and count and table in _LISTINGS:
            yield table, name if table == KEPT else reason, count


def kind_counts(records: Mapping[Stage, StageRecord]) -> Counter[str]:
    """Counts the items of a partition by kind, as its records count them."""
    found: Counter[str] = Counter()
    for stage, record in records.items():
        for _, reason, count in _counts(record):
            found[Loss(partition="", stage=stage.name, reason=reason).kind] += count
    return found


def losses(
    state: DatasetState, keys: Iterable[str] | None = None, selection: Selection = Selection()
) -> Iterator[Loss]:
    """Yields the losses of some partitions, in the order of the partitions, stages and tables.

    Args:
        state: the dataset as it was listed.
        keys: partitions; None for all that are registered.
        selection: which losses.

    Raises:
        SourceError: a table could not be read.
    """
    with _Tables(state.dataset) as tables:
        for attempt in state.latest(sorted(state.partitions) if keys is None else keys):
            yield from (loss for _, loss in _select(tables, _of_attempt(state.dataset, attempt), selection))


def stage_losses(
    dataset: DatasetStore, key: str, stages: Mapping[Stage, StageRecord], selection: Selection
) -> Iterator[Loss]:
    """Yields the losses of stages of a partition by their records, of whichever version; errors as `losses`."""
    with _Tables(dataset) as tables:
        yield from (loss for _, loss in _select(tables, _of_records(dataset, key, stages), selection))


def loss_page(
    state: DatasetState,
    selection: Selection = Selection(),
    *,
    partition: str | None = None,
    after: str = "",
    limit: int = 50,
) -> LossPage:
    """Returns a page of `losses`; one that finds few ends after about a second, and may be empty before the last.

    Args:
        state: the dataset as it was listed.
        selection: which losses.
        partition: those of one partition; None for all that are registered.
        after: `LossPage.after` of the page before; empty for the first page.
        limit: losses of the page.

    Raises:
        ConfigError: `after` has another form, or there is no such partition.
        SourceError: a table could not be read.
    """
    if partition is not None and partition not in state.partitions:
        raise ConfigError("arguments", "partition", f"{partition!r} is not a registered partition")
    position = _POSITION.fullmatch(after or "0:-")
    if position is None:
        raise ConfigError("arguments", "after", f"found {after[:80]!r}, expected what the page before gave")
    first, begin = (int(position[1]), position[2]) if after else (0, "")
    found: list[Loss] = []
    ends = time.monotonic() + _PAGE_SECONDS
    with _Tables(state.dataset) as tables:
        keys = sorted(state.partitions) if partition is None else [partition]
        for count, attempt in enumerate(state.latest(key for key in keys if key >= begin)):
            key = attempt.partition
            start = first if key == begin else 0
            if count and time.monotonic() > ends:
                return LossPage(items=found, after=f"{start}:{key}")
            sources = _of_attempt(state.dataset, attempt)
            for number, loss in _select(tables, sources, selection, first=start, limit=limit + 1 - len(found)):
                if len(found) == limit:
                    return LossPage(items=found, after=f"{number}:{key}")
                found.append(loss)
    return LossPage(items=found, after=None)


def loss_totals(state: DatasetState, keys: Iterable[str], listed: Iterable[Losses] = ()) -> list[LossTotal]:
    """The items of some partitions by reason: by kind, in the order of the chain, the most frequent first.

    Args:
        state: the dataset as it was listed.
        keys: partitions whose tables are read.
        listed: what the records of others list.

    Raises:
        SourceError: a table could not be read.
    """
    sources = (source for attempt in state.latest(keys) for source in _of_attempt(state.dataset, attempt))
    read = _totals(state.dataset, sources)
    return _joined([*read, *listed_totals(listed)])


def recorded_totals(state: DatasetState) -> list[LossTotal]:
    """`loss_totals` of all registered partitions; of published ones, if by an earlier recipe, as their records count.

    To read the tables of 10,000 partitions takes minutes, and a dataset that is opened without its declaration has no
    other records.

    Raises:
        SourceError: a record or a table could not be read.
    """
    published = state.published(state.partitions.keys() - state.attempts, outdated=True)
    others = sorted(state.partitions.keys() - published.keys())
    return loss_totals(state, others, (entry.losses for _, entry in sorted(published.items())))


Losses = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By stage and reason the ``count`` of the items and the first as ``example``, as records and manifests list them."""


def published_losses(dataset: DatasetStore, key: str, records: Mapping[Stage, StageRecord]) -> Losses:
    """What the stages with these records lost or kept with a fault; a failure of an earlier run is not listed.

    The examples are those of `loss_totals`, without the folders of shards: manifests do not depend on these.

    Raises:
        SourceError: a table could not be read.
    """
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for total in _totals(dataset, _of_records(dataset, key, records)):
        item = {"count": total.count, "example": _published(total.example)}
        found.setdefault(total.example.stage, {})[total.example.reason] = item
    return found


def sum_losses(partitions: Iterable[Losses]) -> Losses:
    """The `published_losses` of several partitions together, each with the example of the first that has one."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for stages in partitions:
        for stage, reasons in stages.items():
            known = found.setdefault(stage, {})
            for reason, item in reasons.items():
                before = known.get(reason)
                known[reason] = item if before is None else {**before, "count": before["count"] + item["count"]}
    return found


def listed_totals(listed: Iterable[Losses]) -> list[LossTotal]:
    """`loss_totals` of published partitions by what their records list, without reading their tables."""
    return _joined(
        LossTotal(count=item["count"], example=Loss(stage=stage, reason=reason, **item["example"]))
        for stage, reasons in sum_losses(listed).items()
        for reason, item in reasons.items()
    )


def _published(loss: Loss) -> dict[str, Any]:
    """An example without what its place in a record says, what is unknown, and the folder of its shard."""
    shard, detail = loss.shard, loss.detail
    if shard is not None:
        folder, _, shard = shard.rpartition("/")
        detail = detail.replace(f"{folder}/", "") if folder else detail
    if len(detail) > _MAX_DETAIL:
        detail = detail[: _MAX_DETAIL - 1] + "…"
    values = {**asdict(loss), "shard": shard, "detail": detail or None}
    return {name: value for name, value in values.items() if name not in _NAMED_BY_PLACE and value is not None}


def _totals(dataset: DatasetStore, sources: Iterable[_Source]) -> list[LossTotal]:
    """The losses of some sources by reason, sorted; DuckDB is opened only for tables that have some."""
    found: list[LossTotal] = []
    with _Tables(dataset) as tables:
        for source in sources:
            found += [LossTotal(count=loss.count, example=loss) for loss in source.values]
            if source.listing is not None:
                for loss in (loss for _, loss in tables.read(source, _COUNTED, {})):
                    found.append(LossTotal(count=loss.count, example=replace(loss, count=1)))
    return _joined(found)


def _joined(totals: Iterable[LossTotal]) -> list[LossTotal]:
    """One total for each reason, with the first example; sorted by kind, stage, count and reason."""
    found: dict[tuple[str, str], LossTotal] = {}
    for total in totals:
        known = found.setdefault((total.example.stage, total.example.reason), total)
        if known is not total:
            sum_of_both = LossTotal(count=known.count + total.count, example=known.example)
            found[known.example.stage, known.example.reason] = sum_of_both
    order = {stage.name: number for number, stage in enumerate(CHAIN)}
    return sorted(
        found.values(), key=lambda t: (KINDS.index(t.example.kind), order[t.example.stage], -t.count, t.example.reason)
    )


class _Source(NamedTuple):
    """Losses of one stage of a partition.

    Attributes:
        partition: the partition key.
        stage: the stage.
        values: losses that its record lists.
        listing: SQL of the others, if a table lists them.
        reasons: theirs.
        files: the tables that the SQL reads, by parameter.
        thresholds: the limits of the stage, as its record has them.
    """

    partition: str
    stage: Stage
    values: Sequence[Loss] = ()
    listing: _Listing | None = None
    reasons: Sequence[str] = ()
    files: Mapping[str, str] = {}
    thresholds: Mapping[str, Mapping[str, Any]] = {}


class _Tables:
    """Reads losses from tables: the first that it reads opens DuckDB."""

    def __init__(self, dataset: DatasetStore) -> None:
        self._dataset = dataset
        self._connection: Any = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read(self, source: _Source, chosen: str, given: Mapping[str, Any]) -> Iterator[tuple[int, Loss]]:
        """Yields losses of a source with their numbers, in order; few are in memory.

        Args:
            source: has a `listing`.
            chosen: SQL that selects from those listed.
            given: its parameters.

        Raises:
            SourceError: a file cannot be read.
        """
        import duckdb

        assert source.listing is not None
        self._connection = self._connection or self._opened.enter_context(self._dataset.duckdb())
        lost = chosen.format(listed=source.listing.listed)
        try:
            cursor = self._connection.cursor()  # another one may be read at the same time
            cursor.execute(
                f"with lost as ({lost})\n{source.listing.located}\norder by number", {**source.files, **given}
            )
            while rows := cursor.fetchmany(_FETCH):
                for number, *values in rows:
                    facts = dict(zip(_COLUMNS[1:], values, strict=True))
                    threshold = source.thresholds.get(facts["reason"], {})
                    facts |= {"setting": threshold.get("setting"), "limit": threshold.get("value")}
                    yield number, Loss(partition=source.partition, stage=source.stage.name, **facts)
        except duckdb.Error as error:
            detail = f"losses cannot be read: {first_line(error)}"
            raise SourceError(", ".join(source.files.values()), detail) from error


def _select(
    tables: _Tables, sources: Iterable[_Source], selection: Selection, *, first: int = 0, limit: int | None = None
) -> Iterator[tuple[int, Loss]]:
    """Yields the losses of a partition that are selected, from a number on, each with its number in the partition."""
    for index, source in enumerate(sources):
        start = index * _MAX_ROWS
        for row, loss in enumerate(source.values):
            if start + row >= first and selection.has(loss):
                yield start + row, loss
        reasons = [reason for reason in source.reasons if selection.has_reason(source.stage.name, reason)]
        if source.listing is not None and reasons and first < start + _MAX_ROWS:
            given = {
                "first": max(first - start, 0),
                "reasons": None if len(reasons) == len(source.reasons) else reasons,
                "sample_ids": None if selection.sample_ids is None else list(selection.sample_ids),
                "limit": limit,
            }
            yield from ((start + row, loss) for row, loss in tables.read(source, _SELECTED, given))


def _of_attempt(dataset: DatasetStore, attempt: Attempt) -> Iterator[_Source]:
    """Why an attempt at a partition failed, and what each stage before lost."""
    key, stages = attempt.partition, attempt.stages
    failure = attempt.end
    if failure is not None:
        stage = next((stage for stage in CHAIN if stage.name == failure.stage), RAW_SHARDS)
        loss = Loss(
            partition=key,
            stage=stage.name,
            reason=FAILED,
            detail=failure.detail,
            shard=failure.path,
            member=failure.member,
            byte_offset=failure.byte_offset,
        )
        yield _Source(key, stage, [loss])
        # A stage that failed by a check has made its tables.
        before = CHAIN[: CHAIN.index(stage)]
        stages = {s: record for s, record in stages.items() if s in before or record.failure is not None}
    yield from _of_records(dataset, key, stages)


def _of_records(dataset: DatasetStore, key: str, stages: Mapping[Stage, StageRecord]) -> Iterator[_Source]:
    """What each of these stages lost, or kept with a fault."""
    for stage, record in stages.items():
        yield _Source(
            key,
            stage,
            [
                Loss(
                    partition=key,
                    stage=stage.name,
                    reason=fault.reason,
                    detail=fault.detail,
                    count=fault.count,
                    **{**fault.origin._asdict(), "shard": fault.origin.shard or None},
                )
                for fault in record.kept
            ],
        )
        limits = {f"{t['filter']}.{t['reason']}": t for t in record.limits.get("thresholds", ())}
        counts = [(table, reason) for table, reason, _ in _counts(record)]
        for name, listing in _LISTINGS.items():
            reasons = [reason for table, reason in counts if table == name]
            if reasons and listing.files["table"] in record.files:  # else the record has what is kept
                files = {
                    parameter: dataset.duckdb_path(stages[STAGE_OF_FILE[table]].files[table].path)
                    for parameter, table in listing.files.items()
                }
                yield _Source(key, stage, (), listing, reasons, files, limits)
