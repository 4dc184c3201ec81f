"""What a check gets: a partition's files with what they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import pyarrow as pa

from mm_assets.filters.apply import FilterStream
from mm_assets.filters.base import Annotator, Filter
from mm_assets.packing.judge import Judge, Mode, Policy
from mm_assets.packing.plan import PackPlan
from mm_assets.rows.base import RowSource
from mm_assets.rows.schema import DatasetSchema, MemberRules
from mm_assets.sources.base import Source
from mm_assets.storage.store import Store

__all__ = ["CheckContext", "Filtering", "LossLimit", "TableFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """A table of the partition.

    Attributes:
        path: its file below the dataset's folder.
        schema: its columns as declared.
    """

    path: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLimit:
    """What an asset may lose of a partition.

    Attributes:
        setting: name of the setting that limits it.
        allowed: a number of rows, or a percentage such as ``0.5%`` with up to 6 decimals.
        command: the command that lists what was lost.
        harmless: reasons that do not count.
    """

    setting: str
    allowed: int | str
    command: str
    harmless: frozenset[str] = frozenset()

    @property
    def most(self) -> int | None:
        """The largest number of lost rows; None where a share limits them."""
        return self.allowed if isinstance(self.allowed, int) else None

    @property
    def share(self) -> int | None:
        """The largest share of the rows in units of 1e-8, 0..1e8; None where a number limits them."""
        return None if isinstance(self.allowed, int) else int(Decimal(self.allowed.removesuffix("%")) * 10**6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtering:
    """How rows are filtered.

    Attributes:
        annotators: makes fresh annotators.
        filters: makes fresh filters.
        stream: filters samples that have their media by such annotators and filters; a judge, if it is given, decides
            what can be decoded and packed.
        plan: the pack plan.
        on_undecodable: what becomes of undecodable media.
        decodable: how media are judged.
    """

    annotators: Callable[[], Sequence[Annotator]]
    filters: Callable[[], Sequence[Filter]]
    stream: Callable[[Iterable[pa.Table], Sequence[Annotator], Sequence[Filter], Judge | None], FilterStream]
    plan: PackPlan
    on_undecodable: Policy
    decodable: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """One asset's files of one partition, as its checks see them.

    Attributes:
        asset: the asset whose files are judged.
        store: the dataset's folder.
        tables: by name, every table that the asset's checks read: its own and those of the assets before it.
        with_media: by name, for the tables with references in place of media, what adds these to rows with the columns
            `rows.references.FETCHED_BY`, and removes the references.
        own_tables: names of the tables that the asset itself makes.
        shards: the partition's containers, open.
        packed: "mult" and "mstr" to the packed file below `store`, for those made from the present rows.
        packed_format: the one of them that the asset makes, if it makes one.
        packed_from: name of the table that packed files are made from.
        plan: the pack plan; needed for packed files only.
        listings: the partition's files that hold rows themselves, such as lists of files.
        layout: how members became rows.
        schema: the dataset's schema.
        grouped: the partition may have several shards, whose labels are part of default sample ids.
        declared_shards: the setting `shards`, which the labels depend on.
        known_modalities: row modalities beside the built-in ones.
        on_misaligned: "warn" where contradictions between a sample's parts do not stop a partition; else they do.
        on_undecodable: what becomes of undecodable media: "drop_row", "drop_sample", "keep" or "fail".
        judged: whether no media were packed that do not decode.
        loss_limit: what the asset may lose; None where nothing limits it.
        materialize_mode: "read" where the materialized rows hold bytes, "write" where the filtered rows do.
        memory_limit: bytes that DuckDB may use before it spills to a scratch folder; 768 for each row of a table where
            that is more. A statement that does not fit all the same may use up to 16 times as many. More than the
            limit is at most the memory of the machine or control group, divided by the processes at work.
        batch_bytes: content that is held at a time while files are read.
        max_content_bytes: a larger item is an error.
        filtering: how rows are filtered; None where that is not known, and not repeated.
    """

    asset: str
    store: Store
    tables: Mapping[str, TableFile]
    own_tables: tuple[str, ...]
    shards: Sequence[Source]
    with_media: Mapping[str, Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]] = field(
        default_factory=dict
    )
    packed: Mapping[str, str] = field(default_factory=dict)
    packed_format: str | None = None
    packed_from: str = ""
    plan: PackPlan | None = None
    listings: Sequence[RowSource] = ()
    layout: MemberRules = field(default_factory=MemberRules)
    schema: DatasetSchema = field(default_factory=DatasetSchema)
    grouped: bool = False
    declared_shards: str = ""
    known_modalities: frozenset[str] = frozenset()
    materialize_mode: str = "read"
    on_misaligned: str = "warn"
    on_undecodable: str = "drop_row"
    judged: bool = False
    loss_limit: LossLimit | None = None
    memory_limit: int = 128 << 20
    batch_bytes: int = 4 << 20
    max_content_bytes: int = 1 << 30
    filtering: Filtering | None = None

    @property
    def source_table(self) -> str:
        """Name of the table that the asset's main table is made of."""
        names = list(self.tables)
        return names[names.index(self.own_tables[0]) - 1]

    def known_as(self, relation: str) -> str:
        """A relation's name with that of the asset's own table, where it is `own_rows`, `own_losses` or made of one."""
        for alias, table in zip(("own_rows", "own_losses"), self.own_tables, strict=False):
            relation = relation.replace(alias, table)
        return relation
