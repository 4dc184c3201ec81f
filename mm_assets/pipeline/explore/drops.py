"""The rows that filters and policies dropped, page by page, each with what was measured and where its content is.

`losses` lists everything that is lost in words; this module gives the drops as values, so that each can be shown beside
its filter's limit. A page reads the tables of as many partitions as it needs, for about a second; no media are read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from mm_assets.errors import ConfigError, SourceError, first_line
from mm_assets.pipeline.chain import DROPPED, FILTERED_ROWS, MATERIALIZED_ROWS
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import Loss, LossTotal, loss_totals, losses
from mm_assets.pipeline.state.records import StageRecord
from mm_assets.pipeline.state.staleness import Present
from mm_assets.rows.sql import parquet_relation

__all__ = ["Drop", "LossPage", "drops", "other_losses", "totals"]

_PAGE_SECONDS = 1.0  # for which one page looks into further partitions, where few have what it lists
_AFTER = re.compile(r"(\d{1,15}):(.+)", re.DOTALL)

# The locator is that of the row with its bytes; `position` is that of before any renumbering in both tables.
# Of the row's own columns, which may have any name, those that are needed are named.
_DROPS = f"""
select lost.file_row_number as number, sample_id, position, modality, filter, reason, value, detail,
    content_type, source_ref ->> 'path' as shard, source_ref ->> 'member' as member,
    (source_ref ->> 'byte_offset')::bigint as byte_offset, (source_ref ->> 'byte_size')::bigint as byte_size
from (
    select * from {parquet_relation("$table", file_row_number="true")}
    where file_row_number >= $first and ($filter is null or (filter = $filter and reason = $reason))
    order by file_row_number limit $limit
) as lost
left join (select sample_id, position, modality, content_type, source_ref from {parquet_relation("$source")})
    using (sample_id, position, modality)
order by number
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A dropped row.

    Attributes:
        partition: the partition.
        sample_id: its sample.
        position: its position in the sample.
        modality: its row modality.
        filter: the filter, or the step of the pipeline, that dropped it.
        reason: short name.
        value: the measure that decided; None where there is none.
        detail: why, in words; may be empty.
        setting: the parameter of the filter that decided, where it is known.
        limit: its value.
        content_type: of its content.
        shard: path or URL of its shard.
        member: the member.
        byte_offset: first byte of its content in the shard, where that is one range.
        byte_size: bytes of it.
    """

    partition: str
    sample_id: str
    position: int
    modality: str
    filter: str
    reason: str
    value: float | None
    detail: str
    setting: str | None
    limit: float | None
    content_type: str | None
    shard: str | None
    member: str | None
    byte_offset: int | None
    byte_size: int | None

    def to_json(self) -> dict[str, Any]:
        """The drop for a browser."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPage:
    """Some drops or other losses.

    Attributes:
        items: they, in the order of partitions and tables.
        after: where the next page starts; None at the end.
    """

    items: Sequence[Drop] | Sequence[Loss]
    after: str | None


def totals(dataset: DatasetStore) -> list[LossTotal]:
    """What was lost or has a fault, by stage and reason; of published partitions as their markers count it.

    A marker counts also where it is not up to date, if its tables are still there and no later run failed: a dataset
    that is opened without its declaration has no other, and reading the tables of 10,000 partitions takes minutes.

    Raises:
        SourceError: a table could not be read.
    """
    present = Present(dataset)
    failed = dataset.store.sizes("failures")
    named = {key: present.name(key) for key in present.partitions if dataset.failure_name(key) not in failed}
    read = present.cache.read(name for name in named.values() if name is not None)
    markers = {key: read[name] for key, name in named.items() if name in read}
    published = {key: marker for key, marker in markers.items() if not present.lost_files(marker)}
    others = [key for key in sorted(present.partitions) if key not in published]
    return loss_totals(dataset, others, (marker.losses for marker in published.values()))


def drops(
    dataset: DatasetStore, *, reason: str | None = None, partition: str | None = None, after: str = "", limit: int = 50
) -> LossPage:
    """A page of dropped rows.

    Args:
        dataset: the dataset's folder.
        reason: those of one ``<filter>.<reason>``; None: all.
        partition: those of one partition; None: all.
        after: `LossPage.after` of the page before; empty: the first page.
        limit: rows of the page.

    Raises:
        ConfigError: `after` or `reason` has another form, or there is no such partition.
        SourceError: a table could not be read.
    """
    named = _reason(reason)
    found: list[Drop] = []
    ends = time.monotonic() + _PAGE_SECONDS
    with closing(dataset.duckdb()) as connection:
        for looked, (key, first) in enumerate(_from(dataset, partition, after)):
            if looked and time.monotonic() > ends:
                return LossPage(items=found, after=f"{first}:{key}")
            record = dataset.records(key).get(FILTERED_ROWS)
            if record is None or not _has(record, reason):
                continue
            rows = _rows(connection, dataset, key, first, named, limit + 1 - len(found))
            for row in rows:
                if len(found) == limit:
                    return LossPage(items=found, after=f"{row[0]}:{key}")
                found.append(_drop(key, row, record))
    return LossPage(items=found, after=None)


def other_losses(
    dataset: DatasetStore, *, stage: str, reason: str, partition: str | None = None, after: str = "", limit: int = 50
) -> LossPage:
    """A page of losses of another stage or kind, such as rejects and undecodable media; arguments as those of `drops`.

    Raises:
        ConfigError: `after` has another form, or there is no such partition.
        SourceError: a table could not be read.
    """
    found: list[Loss] = []
    ends = time.monotonic() + _PAGE_SECONDS
    for looked, (key, first) in enumerate(_from(dataset, partition, after)):
        if looked and time.monotonic() > ends:
            return LossPage(items=found, after=f"{first}:{key}")
        for number, loss in enumerate(losses(dataset, [key])):
            if number < first or (loss.stage, loss.reason) != (stage, reason):
                continue
            if len(found) == limit:
                return LossPage(items=found, after=f"{number}:{key}")
            found.append(loss)
    return LossPage(items=found, after=None)


def _reason(text: str | None) -> tuple[str | None, str | None]:
    if text is None:
        return None, None
    judge, dot, reason = text.rpartition(".")
    if not dot:
        raise ConfigError("arguments", "reason", f"found {text!r}, expected <filter>.<reason>")
    return judge, reason


def _from(dataset: DatasetStore, partition: str | None, after: str) -> Iterator[tuple[str, int]]:
    """The partitions from where the last page ended, and the first row of each."""
    registered = dataset.partitions()
    if partition is not None and partition not in registered:
        raise ConfigError("arguments", "partition", f"{partition!r} is not a registered partition")
    begin, first = "", 0
    if after:
        place = _AFTER.fullmatch(after)
        if place is None:
            raise ConfigError("arguments", "after", f"found {after[:80]!r}, expected what the page before gave")
        first, begin = int(place[1]), place[2]
    for key in sorted(registered) if partition is None else [partition]:
        if key >= begin:
            yield key, first if key == begin else 0


def _has(record: StageRecord, reason: str | None) -> bool:
    """Whether a partition has such drops, as its record counts."""
    if reason is not None:
        return bool(record.counts.get(f"{DROPPED.name}.{reason}"))
    return any(name.startswith(f"{DROPPED.name}.") for name in record.counts)


def _rows(
    connection: Any, dataset: DatasetStore, key: str, first: int, named: tuple[str | None, str | None], limit: int
) -> list[tuple[Any, ...]]:
    import duckdb

    names = {"table": DROPPED.name, "source": MATERIALIZED_ROWS.tables[0].name}
    files = {name: dataset.duckdb_path(dataset.table(table, key)) for name, table in names.items()}
    given = {"first": first, "filter": named[0], "reason": named[1], "limit": limit}
    try:
        found: list[tuple[Any, ...]] = connection.execute(_DROPS, {**files, **given}).fetchall()
    except duckdb.Error as error:
        raise SourceError(", ".join(files.values()), f"drops cannot be read: {first_line(error)}") from error
    return found


def _drop(key: str, row: Sequence[Any], record: StageRecord) -> Drop:
    _, sample_id, position, modality, judge, reason, value, detail, content_type, shard, member, offset, size = row
    threshold: Mapping[str, Any] = next(
        (t for t in record.limits.get("thresholds", ()) if (t["filter"], t["reason"]) == (judge, reason)), {}
    )
    return Drop(
        partition=key,
        sample_id=sample_id,
        position=position,
        modality=modality,
        filter=judge,
        reason=reason,
        value=value,
        detail=detail or "",
        setting=threshold.get("setting"),
        limit=threshold.get("value"),
        content_type=content_type,
        shard=shard,
        member=member,
        byte_offset=offset,
        byte_size=size,
    )
