"""What a dataset lost on the way to its packed files: by reason with counts and an example, and item by item.

Lost are the partitions that failed, what became no row (`rejects`, salvaged damage among it), the rows that a filter or
a policy dropped (`dropped`), and media that cannot be decoded (`undecodable`). Of a partition that failed, the tables
of the stages after the failure do not hold what the shard has, and are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mm_assets.pipeline.chain import (
    CHAIN,
    DROPPED,
    FILTERED_ROWS,
    MATERIALIZED_ROWS,
    RAW_SHARDS,
    REJECTS,
    ROWS,
    UNDECODABLE,
    Stage,
)
from mm_assets.pipeline.store import DatasetStore, StageRecord

__all__ = ["FAILED", "Loss", "LossTotal", "loss_counts", "loss_totals", "losses", "losses_command", "sum_counts"]

FAILED = "failed"  # the reason of a partition that failed
_FETCH = 4096  # items held at a time

# Each selects the columns of `_COLUMNS` from the files $table, $index (the members) and $source (the rows with bytes).
# A name that is in the index several times belongs to its last members: the first ones became rows.
_REJECTS = """
with names as (
    select shard, member, byte_offset, byte_size,
        row_number() over (partition by shard, member order by file_row_number desc) as nth
    from read_parquet($index, file_row_number = true)
    where (shard, member) in (select (shard, member) from read_parquet($table))
),
rejected as (
    select *, row_number() over (partition by shard, member order by file_row_number desc) as nth
    from read_parquet($table, file_row_number = true)
)
select file_row_number as number, reason, sample_id, null as position, null as modality, shard, member,
    byte_offset, byte_size, detail
from rejected left join names using (shard, member, nth)
"""
_PLACED = """
with located as (
    select sample_id, position, modality, {reason} as reason, {detail} as detail, lost.file_row_number as number,
        {source_ref} as place
    from read_parquet($table, file_row_number = true) as lost
    {join}
)
select number, reason, sample_id, position, modality, place ->> 'path' as shard, place ->> 'member' as member,
    (place ->> 'byte_offset')::bigint as byte_offset, (place ->> 'byte_size')::bigint as byte_size, detail
from located
"""
_DROPPED = _PLACED.format(
    reason="filter || '.' || reason",
    detail="coalesce(detail, materialize_error, 'measured ' || value, '')",
    source_ref="source_ref",
    join="left join read_parquet($source) using (sample_id, position, modality)",
)
_UNDECODABLE = _PLACED.format(  # of those that were dropped, `dropped` tells
    reason="'kept.' || reason", detail="field || ': ' || detail", source_ref="source_ref", join="where action = 'keep'"
)
_COLUMNS = ("reason", "sample_id", "position", "modality", "shard", "member", "byte_offset", "byte_size", "detail")

_ADVICE = {  # by stage and the start of a reason, the longest that fits
    f"{RAW_SHARDS.name}/": "do as the message says; on_damaged_shard: salvage takes what a damaged tar still has",
    f"{ROWS.name}/": "correct the member in the shard and run again",
    f"{ROWS.name}/damaged": "replace the shard: these bytes cannot be read as members",
    f"{ROWS.name}/directory": "nothing: a directory has no content",
    f"{ROWS.name}/resource fork": "nothing: macOS made it beside the file",
    f"{ROWS.name}/system file": "nothing: the operating system made it",
    f"{ROWS.name}/hidden file": "rename it if it belongs to a sample: names with a leading dot are skipped",
    f"{ROWS.name}/symbolic link": "pack the link's target instead of the link",
    f"{ROWS.name}/link outside": "pack the link's target as a member before the link",
    f"{ROWS.name}/trailing bytes": "nothing if they are padding; else the archive was joined or truncated wrongly",
    f"{ROWS.name}/repeated_member": "give each member of a shard a name of its own",
    f"{ROWS.name}/duplicate_sample_id": "make ids unique, or set samples.sample_id_field to a key that is",
    f"{ROWS.name}/unreferenced_member": "name it in the sample's JSON, or move it out of the shard",
    f"{ROWS.name}/too_large": "raise samples.max_text_bytes",
    f"{ROWS.name}/not_utf8": "name the encoding of the texts as samples.encoding, or convert them to UTF-8",
    f"{FILTERED_ROWS.name}/": "change or remove the filter if the row should stay",
    f"{FILTERED_ROWS.name}/materialize.": "make the source of the item readable, or on_materialize_error: keep",
    f"{FILTERED_ROWS.name}/packable.": "repair the item, or give it a field in `pack` (docs/packing.md)",
    f"{FILTERED_ROWS.name}/packable.not_materialized": "make what it names readable, or correct the name",
    f"{FILTERED_ROWS.name}/misaligned.": "correct the sample, or on_misaligned: warn",
    f"{FILTERED_ROWS.name}/empty_sample.": "nothing of the sample was left: its other rows say why",
    f"{FILTERED_ROWS.name}/decodable.": "repair or replace the item, or set on_undecodable",
    f"{FILTERED_ROWS.name}/kept.": "it is packed, but no reader decodes it: on_undecodable: drop_row leaves it out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One item that is not in the packed files, or a whole partition.

    Attributes:
        partition: the partition key.
        stage: name of the stage that lost it.
        reason: short name, counted by; of a dropped row ``<filter>.<reason>``, of a failed partition `FAILED`.
        detail: why, in words; may be empty.
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
        what = f"{self.stage}/{self.reason}"
        fitting = [start for start in _ADVICE if what.startswith(start)]
        return _ADVICE[max(fitting, key=len)] if fitting else "see the message, then run the partition again"

    @property
    def place(self) -> str:
        """Shard, member and byte range, as far as they are known."""
        parts = [self.shard or "", self.member or ""]
        if self.byte_offset is not None:
            end = "" if self.byte_size is None else f" to {self.byte_offset + self.byte_size}"
            parts.append(f"bytes {self.byte_offset}{end}" if end else f"byte {self.byte_offset}")
        return ", ".join(filter(None, parts))

    def to_json(self) -> dict[str, Any]:
        """The item with what to do about it."""
        return {**asdict(self), "advice": self.advice}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotal:
    """The items that were lost for one reason.

    Attributes:
        count: how many.
        example: the first of them.
    """

    count: int
    example: Loss


def losses_command(dataset: str, partition: str | None = None) -> str:
    """The command that lists the losses of a dataset, or of one of its partitions."""
    return f"mm-assets losses --dataset {dataset}" + (f" --partition {partition}" if partition else "")


def loss_counts(records: Mapping[Stage, StageRecord]) -> dict[str, dict[str, int]]:
    """How many items each stage of a partition lost, by stage and reason, as its records count them."""
    found: dict[str, dict[str, int]] = {}
    for stage, record in records.items():
        for name, count in sorted(record.counts.items()):
            table, _, reason = name.partition(".")
            if reason and count and table in (REJECTS.name, DROPPED.name):
                found.setdefault(stage.name, {})[reason] = count
    return found


def sum_counts(partitions: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """The counts of several partitions, each as of `loss_counts`, together."""
    found: dict[str, dict[str, int]] = {}
    for counts in partitions:
        for stage, reasons in counts.items():
            total = found.setdefault(stage, {})
            for reason, count in reasons.items():
                total[reason] = total.get(reason, 0) + count
    return found


def losses(dataset: DatasetStore, keys: Iterable[str]) -> Iterator[Loss]:
    """Every lost item of some partitions, in the order of the partitions, stages and tables.

    Raises:
        SourceError: a table could not be read.
    """
    with dataset.duckdb() as connection:
        for key in keys:
            failed, queries = _of_partition(dataset, key)
            yield from failed
            for stage, query, files in queries:
                cursor = connection.execute(f"select * from ({query}) order by number", files)
                while rows := cursor.fetchmany(_FETCH):
                    for row in rows:
                        yield _loss(key, stage, row)


def loss_totals(dataset: DatasetStore, keys: Iterable[str]) -> list[LossTotal]:
    """The losses of some partitions by stage and reason, in the order of the chain, the most frequent first.

    Raises:
        SourceError: a table could not be read.
    """
    totals: dict[tuple[str, str], LossTotal] = {}

    def add(count: int, example: Loss) -> None:
        what = example.stage, example.reason
        known = totals.get(what)
        totals[what] = (
            LossTotal(count=count, example=example)
            if known is None
            else LossTotal(count=known.count + count, example=known.example)
        )

    with dataset.duckdb() as connection:
        for key in keys:
            failed, queries = _of_partition(dataset, key)
            for loss in failed:
                add(1, loss)
            for stage, query, files in queries:
                first = (
                    f"select *, count(*) over (partition by reason) as total from ({query}) "
                    "qualify row_number() over (partition by reason order by number) = 1 order by number"
                )
                for row in connection.execute(first, files).fetchall():
                    add(row[-1], _loss(key, stage, row[:-1]))
    order = {stage.name: number for number, stage in enumerate(CHAIN)}
    return sorted(totals.values(), key=lambda t: (order[t.example.stage], -t.count, t.example.reason))


def _loss(key: str, stage: Stage, row: tuple[Any, ...]) -> Loss:
    _, *values = row
    return Loss(partition=key, stage=stage.name, **dict(zip(_COLUMNS, values, strict=True)))


_Query = tuple[Stage, str, dict[str, str]]


def _of_partition(dataset: DatasetStore, key: str) -> tuple[list[Loss], list[_Query]]:
    """Why the partition failed, if it did, and the queries over the tables that hold losses."""
    records = dataset.records(key)
    failures = [*_failures(dataset, key), *_failed_checks(dataset, key, records)]
    order = list(CHAIN)
    reached = min((order.index(stage) for stage, _ in failures), default=len(order))
    stopped = [loss for stage, loss in failures if order.index(stage) == reached][:1]
    by_check = {stage for stage, loss in failures if loss.detail.startswith("check ")}
    queries: list[_Query] = []
    for stage, record in records.items():
        # A stage that failed by a check has made its tables; after another failure they are of an earlier run.
        if order.index(stage) < reached or stage in by_check:
            queries += _queries(dataset, key, stage, record)
    return stopped, queries


def _queries(dataset: DatasetStore, key: str, stage: Stage, record: StageRecord) -> Iterator[_Query]:
    def path(table: str) -> str:
        return dataset.duckdb_path(dataset.table(table, key))

    if any(name.startswith(f"{REJECTS.name}.") for name in record.counts):
        yield stage, _REJECTS, {"table": path(REJECTS.name), "index": path(RAW_SHARDS.tables[0].name)}
    if record.counts.get(UNDECODABLE.name):
        yield stage, _UNDECODABLE, {"table": path(UNDECODABLE.name)}
    if any(name.startswith(f"{DROPPED.name}.") for name in record.counts):
        yield stage, _DROPPED, {"table": path(DROPPED.name), "source": path(MATERIALIZED_ROWS.tables[0].name)}


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
            said = ", ".join(f"{outcome.name} ({outcome.num_violations} violations)" for outcome in failed)
            yield stage, Loss(partition=key, stage=stage.name, reason=FAILED, detail=f"check {said}")
