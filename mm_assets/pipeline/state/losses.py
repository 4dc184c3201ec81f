"""What a dataset lost on the way to its packed files: by reason with counts and an example, and item by item.

An item is of one of four kinds. *Lost* are the partitions that failed, what became no row (`rejects`, salvaged damage
among it) and the rows that the pipeline could not keep, such as undecodable media. *Dropped* are the rows that declared
filters removed. *Kept* is what is published in spite of a fault: undecodable media under ``on_undecodable: keep``,
contents that their field refuses or takes in part, JSON keys without a column, values that do not fit their column,
tars without an end. *Harmless* are rejects that cannot have been data. Of a partition that failed, the tables of the
stages after the failure do not hold what the shard has, and are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mm_assets.errors import SourceError, first_line
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
    UNDECODABLE,
    Stage,
)
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import StageRecord
from mm_assets.rows.columns import NO_COLUMN, NULL_CAST, REPAIRED_JSON
from mm_assets.rows.schema import ALL_FILTERED, EMPTY_SAMPLE, KEPT, PIPELINE_FILTERS
from mm_assets.rows.sql import parquet_relation
from mm_assets.summaries import counted

__all__ = [
    "FAILED",
    "KINDS",
    "Loss",
    "LossTotal",
    "kind_counts",
    "listed_totals",
    "loss_counts",
    "loss_totals",
    "losses",
    "losses_command",
    "published_losses",
    "sum_losses",
    "totals_said",
]

KINDS = ("lost", "dropped", "kept", "harmless")

FAILED = "failed"  # the reason of a partition that failed
_FETCH = 4096  # items held at a time
_MAX_DETAIL = 500  # characters, of an example in a marker
_NAMED_BY_PLACE = ("stage", "reason", "count")  # of an example in a marker

# Each selects the columns of `_COLUMNS` from the files $table, $index (the members) and $source (the rows with bytes).
# A name that is in the index several times belongs to its last members: the first ones became rows.
_REJECTS = f"""
with names as (
    select shard, member, byte_offset, byte_size,
        row_number() over (partition by shard, member order by file_row_number desc) as nth
    from {parquet_relation("$index", file_row_number="true")}
    where (shard, member) in (select (shard, member) from {parquet_relation("$table")})
),
rejected as (
    select *, row_number() over (partition by shard, member order by file_row_number desc) as nth
    from {parquet_relation("$table", file_row_number="true")}
)
select file_row_number as number, reason, sample_id, null as position, null as modality, shard, member,
    byte_offset, byte_size, detail
from rejected left join names using (shard, member, nth)
"""
_PLACED = """
with located as (
    select sample_id, position, modality, {reason} as reason, {detail} as detail, lost.file_row_number as number,
        {source_ref} as place
    from {lost} as lost
    {join}
)
select number, reason, sample_id, position, modality, place ->> 'path' as shard, place ->> 'member' as member,
    (place ->> 'byte_offset')::bigint as byte_offset, (place ->> 'byte_size')::bigint as byte_size, detail
from located
"""
_LISTED = parquet_relation("$table", file_row_number="true")
_DROPPED = _PLACED.format(
    lost=_LISTED,
    reason="filter || '.' || reason",
    detail="coalesce(detail, materialize_error, 'measured ' || value, '')",
    source_ref="source_ref",
    # Of the row's own columns, which may have any name, those that are needed are named.
    join="left join (select sample_id, position, modality, source_ref, materialize_error from "
    f"{parquet_relation('$source')}) using (sample_id, position, modality)",
)
_UNDECODABLE = _PLACED.format(  # of those that were dropped, `dropped` tells
    lost=_LISTED,
    reason=f"'{KEPT}.' || lost.reason",
    detail="field || ': ' || detail",
    source_ref="source_ref",
    join=f"anti join {parquet_relation('$dropped')} using (sample_id, position, modality)",
)
_COLUMNS = ("reason", "sample_id", "position", "modality", "shard", "member", "byte_offset", "byte_size", "detail")

_DECIDE_AGAIN = "`register --new-schema` decides the columns again"
_LIST_ROW = "correct the row of the list"
_REJECTED = {  # what to do about each reason of a reject; of a user's own source there may be others
    "": "correct the member in the shard and run again",
    "directory": "nothing: a directory has no content",
    "device": "nothing: a device or a pipe has no content",
    "resource fork": "nothing: macOS made it beside the file",
    "system file": "nothing: the operating system made it",
    "hidden file": "rename it if it belongs to a sample: names with a leading dot are skipped",
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
    "too_large": "raise samples.max_text_bytes",
    "bad_compression": "compress the member again, from its original",
    "not_utf8": "name the encoding of the texts as samples.encoding, or convert them to UTF-8",
    "not_a_list": "make it a list, or name the lists as samples.texts_field and samples.images_field",
    "text_not_a_string": "write the entry as a string, or as null",
    "no_sample_id": "give each row of the list a sample_id",
    "second_metadata": "join the metadata rows of the sample to one",
    "position_taken": "give each item of a modality a position of its own",
    "bad_position": _LIST_ROW,
    "bad_modality": f"{_LIST_ROW}, or name the modality in samples.extensions",
    "bad_text": _LIST_ROW,
    "no_text": "write the text into text_content",
    "bad_source": _LIST_ROW,
    "no_source": "name the file as path or source_ref",
    "outside": "move the file below the list's folder, or set samples.allow_references and allowed_references",
}
_AGAIN = "do as the message says, then run the partition again"
_ADVICE = {  # by stage and the start of reason and detail, the longest that fits
    "": "see the message, then run the partition again",
    **{f"{stage.name}/{FAILED}": _AGAIN for stage in CHAIN},
    **{
        f"{stage.name}/{FAILED}: check ": "correct the sample in the shard; files that were damaged since are remade"
        for stage in CHAIN
    },
    f"{RAW_SHARDS.name}/{FAILED}": "do as the message says; if the shard is damaged, copy it again, "
    "or set on_damaged_shard: salvage, which takes the rest",
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
class Loss:
    """One item that is lost, or that has a fault; or several of one kind, or a whole partition.

    Attributes:
        partition: the partition key.
        stage: name of the stage that lost it.
        reason: short name, counted by; of a dropped row ``<filter>.<reason>``, of a failed partition `FAILED`, of what
            is published in spite of a fault ``kept.<fault>``.
        detail: why, in words; may be empty.
        count: how many items; of more than one the others are like the first, which the further attributes name.
        sample_id: its sample, if it is in one.
        position: its row's position in the sample, if it had become a row.
        modality: that row's modality.
        shard: path or URL of its shard, if it is known.
        member: the member.
        byte_offset: first byte of its content in the shard, where that is one range.
        byte_size: bytes of it.
    """

    partition: str
    stage: str
    reason: str
    detail: str = ""
    count: int = 1
    sample_id: str | None = None
    position: int | None = None
    modality: str | None = None
    shard: str | None = None
    member: str | None = None
    byte_offset: int | None = None
    byte_size: int | None = None

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

    @property
    def place(self) -> str:
        """Shard, member and byte range, as far as they are known."""
        parts = [self.shard or "", self.member or ""]
        if self.byte_offset is not None and not (self.member or "").endswith(" of the archive"):  # which names them
            end = "" if self.byte_size is None else f" to {self.byte_offset + self.byte_size}"
            parts.append(f"bytes {self.byte_offset}{end}" if end else f"byte {self.byte_offset}")
        return ", ".join(filter(None, parts))

    def to_json(self) -> dict[str, Any]:
        """The item with its kind and what to do about it."""
        return {"kind": self.kind, **asdict(self), "advice": self.advice}


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


def loss_counts(records: Mapping[Stage, StageRecord]) -> dict[str, dict[str, int]]:
    """How many items each stage of a partition lost or kept with a fault, by stage and reason, as its records count."""
    found: dict[str, dict[str, int]] = {}
    for stage, record in records.items():
        for name, count in sorted(record.counts.items()):
            table, _, reason = name.partition(".")
            if reason and count and table in (REJECTS.name, DROPPED.name, KEPT):
                found.setdefault(stage.name, {})[name if table == KEPT else reason] = count
    return found


def kind_counts(records: Mapping[Stage, StageRecord]) -> Counter[str]:
    """Counts the items of a partition by kind, as its records count them."""
    found: Counter[str] = Counter()
    for stage, reasons in loss_counts(records).items():
        for reason, count in reasons.items():
            found[Loss(partition="", stage=stage, reason=reason).kind] += count
    return found


def losses(dataset: DatasetStore, keys: Iterable[str]) -> Iterator[Loss]:
    """Every item of some partitions, in the order of the partitions, stages and tables.

    Raises:
        SourceError: a table could not be read.
    """
    with dataset.duckdb() as connection:
        for key in keys:
            for part in _of_partition(dataset, key):
                yield from part.named
                for query, files in part.queries:
                    for row in _rows(connection, f"select * from ({query}) order by number", files):
                        yield _loss(key, part.stage, row)


def loss_totals(dataset: DatasetStore, keys: Iterable[str], listed: Iterable[Losses] = ()) -> list[LossTotal]:
    """The items of some partitions by reason: by kind, in the order of the chain, the most frequent first.

    Args:
        dataset: the dataset's folder.
        keys: partitions whose tables are read.
        listed: what the markers of others list.

    Raises:
        SourceError: a table could not be read.
    """
    read = _totals(dataset, (part for key in keys for part in _of_partition(dataset, key)))
    return _joined([*read, *listed_totals(listed)])


Losses = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By stage and reason the ``count`` of the items and the first as ``example``, as markers and manifests list them."""


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
    """`loss_totals` of published partitions by what their markers list, without reading their tables."""
    return _joined(
        LossTotal(count=item["count"], example=Loss(stage=stage, reason=reason, **item["example"]))
        for stage, reasons in sum_losses(listed).items()
        for reason, item in reasons.items()
    )


def _published(loss: Loss) -> dict[str, Any]:
    """An example without what its place in a marker says, what is unknown, and the folder of its shard."""
    shard, detail = loss.shard, loss.detail
    if shard is not None:
        folder, _, shard = shard.rpartition("/")
        detail = detail.replace(f"{folder}/", "") if folder else detail
    if len(detail) > _MAX_DETAIL:
        detail = detail[: _MAX_DETAIL - 1] + "…"
    values = {**asdict(loss), "shard": shard, "detail": detail or None}
    return {name: value for name, value in values.items() if name not in _NAMED_BY_PLACE and value is not None}


def _totals(dataset: DatasetStore, parts: Iterable[_Part]) -> list[LossTotal]:
    """The items of some stages by reason, sorted; DuckDB is opened only for tables that have some."""
    found: list[LossTotal] = []
    with ExitStack() as opened:
        connection = None
        for part in parts:
            for loss in part.named:
                found.append(LossTotal(count=loss.count, example=loss))
            for query, files in part.queries:
                connection = connection or opened.enter_context(dataset.duckdb())
                first = (
                    f"select *, count(*) over (partition by reason) as total from ({query}) "
                    "qualify row_number() over (partition by reason order by number) = 1 order by number"
                )
                for row in _rows(connection, first, files):
                    found.append(LossTotal(count=row[-1], example=_loss(part.partition, part.stage, row[:-1])))
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


def _rows(connection: Any, query: str, files: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """The rows of a query, few of which are held; `SourceError` if a file cannot be read."""
    import duckdb

    try:
        cursor = connection.execute(query, files)
        while rows := cursor.fetchmany(_FETCH):
            yield from rows
    except duckdb.Error as error:
        raise SourceError(", ".join(files.values()), f"losses cannot be read: {first_line(error)}") from error


def _loss(key: str, stage: Stage, row: tuple[Any, ...]) -> Loss:
    _, *values = row
    return Loss(partition=key, stage=stage.name, **dict(zip(_COLUMNS, values, strict=True)))


_Query = tuple[str, dict[str, str]]


class _Part(NamedTuple):
    """The items of one stage of a partition: those that are named, and the queries over tables that list the others."""

    partition: str
    stage: Stage
    named: list[Loss]
    queries: list[_Query]


def _of_partition(dataset: DatasetStore, key: str) -> Iterator[_Part]:
    """Why the partition failed, and what each stage before the failure lost."""
    records = dataset.records(key)
    failures = [*_failures(dataset, key), *_failed_checks(dataset, key, records)]
    order = list(CHAIN)
    reached = min((order.index(stage) for stage, _ in failures), default=len(order))
    for stage, loss in failures:
        if order.index(stage) == reached:
            yield _Part(key, stage, [loss], [])
            break
    by_check = {stage for stage, loss in failures if loss.detail.startswith("check ")}
    # A stage that failed by a check has made its tables; after another failure they are of an earlier run.
    made = {s: record for s, record in records.items() if order.index(s) < reached or s in by_check}
    yield from _of_records(dataset, key, made)


def _of_records(dataset: DatasetStore, key: str, records: Mapping[Stage, StageRecord]) -> Iterator[_Part]:
    """What each of these stages lost, or kept with a fault."""
    for stage, record in records.items():
        named = [
            Loss(
                partition=key,
                stage=stage.name,
                reason=fault.reason,
                detail=fault.detail,
                count=fault.count,
                **{**fault.origin._asdict(), "shard": fault.origin.shard or None},
            )
            for fault in record.kept
        ]
        yield _Part(key, stage, named, list(_queries(dataset, key, record)))


def _queries(dataset: DatasetStore, key: str, record: StageRecord) -> Iterator[_Query]:
    def path(table: str) -> str:
        return dataset.duckdb_path(dataset.table(table, key))

    if any(name.startswith(f"{REJECTS.name}.") for name in record.counts):
        yield _REJECTS, {"table": path(REJECTS.name), "index": path(RAW_SHARDS.tables[0].name)}
    if any(record.counts.get(reason) for reason in (KEPT_UNDECODABLE, KEPT_REFUSED, KEPT_OMITTED)):
        yield _UNDECODABLE, {"table": path(UNDECODABLE.name), "dropped": path(DROPPED.name)}
    if any(name.startswith(f"{DROPPED.name}.") for name in record.counts):
        yield _DROPPED, {"table": path(DROPPED.name), "source": path(MATERIALIZED_ROWS.tables[0].name)}


def _failures(dataset: DatasetStore, key: str) -> Iterator[tuple[Stage, Loss]]:
    """The error that the last run of a partition ended with."""
    found = dataset.failure(key)
    if found is not None:
        stage = next((s for s in CHAIN if s.name == found.stage), RAW_SHARDS)
        yield (
            stage,
            Loss(
                partition=key,
                stage=stage.name,
                reason=FAILED,
                detail=found.detail,
                shard=found.path,
                member=found.member,
                byte_offset=found.byte_offset,
            ),
        )


def _failed_checks(
    dataset: DatasetStore, key: str, records: Mapping[Stage, StageRecord]
) -> Iterator[tuple[Stage, Loss]]:
    for stage, record in records.items():
        failed = [outcome for outcome in record.outcomes if outcome.stops]
        if failed:
            said = "; ".join(f"{outcome.name}: {outcome.said}" for outcome in failed)
            yield stage, Loss(partition=key, stage=stage.name, reason=FAILED, detail=f"check {said}")
