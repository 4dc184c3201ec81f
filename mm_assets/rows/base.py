"""The row sources of a partition: the members of its containers, or tables that hold rows themselves.

A file is read by the `Source` or `TableSource` whose format it has. Containers become rows by their members, all those
of a partition together; a table becomes rows by itself. A new format is one module and one line, in `SOURCES` for a
container and in `TABLE_SOURCES` for a table.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mm_assets.errors import ConfigError
from mm_assets.fields.registry import load_class
from mm_assets.rows.columns import MemberIndex, RowStream
from mm_assets.rows.from_listing import ListingRows
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.schema import DatasetSchema, MemberRules
from mm_assets.sources.base import SOURCES, Source, detect
from mm_assets.sources.samples import id_prefixes
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardKind

__all__ = [
    "TABLE_SOURCES",
    "RowSource",
    "TableSource",
    "row_sources",
    "shard_kinds",
    "source_formats",
]


class RowSource(Protocol):
    """Makes rows of some files of a partition."""

    @property
    def sources(self) -> Sequence[Source]:
        """The containers whose members are indexed and become rows; none of a table."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders, each with a final slash, of files that the rows may name beside those of the partition."""

    def rows(
        self, index: MemberIndex, *, layout: MemberRules, schema: DatasetSchema, grouped: bool, batch_bytes: int
    ) -> RowStream:
        """The rows; entries that do not become one are named in the rejects.

        Args:
            index: the member index of `sources`, in their order.
            layout: how members become rows, limits, and the places that rows may name.
            schema: the columns to fill.
            grouped: the partition may have several shards, whose sample ids must not meet.
            batch_bytes: content of one batch.

        Raises:
            SourceError: while reading: a file could not be read or is not the one that was indexed.
        """


class TableSource(RowSource, Protocol):
    """One file that holds rows itself. It may have `MARKS` and `shards_in`, as a `Source` may.

    Args:
        file: the file, which stays open and belongs to the caller.

    Attributes:
        SUFFIXES: ends of the names of such files, in lower case.
    """

    SUFFIXES: ClassVar[tuple[str, ...]]

    def __init__(self, file: SourceFile) -> None: ...

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether a file that starts with `head` is such a table; asked before any name."""

    def objects(self, *, layout: MemberRules) -> Iterator[Mapping[str, Any]]:
        """Keys and values of each row, read as they are requested: user columns are decided from them.

        Args:
            layout: which columns are requested.

        Raises:
            SourceError: while iterating: the file could not be read.
        """


TABLE_SOURCES: Mapping[str, type[TableSource]] = {"listing": ListingRows}
"""Every built-in format of table by its name in a declaration."""

_FORMATS: Mapping[str, Any] = {**SOURCES, **TABLE_SOURCES}


def source_formats(declared: str | None, *, where: object) -> Mapping[str, Any]:
    """The formats that a declaration's files may have, by name: classes of `Source` and of `TableSource`.

    Args:
        declared: the setting `source`: a name of `SOURCES` or `TABLE_SOURCES`, or ``package.module:Class``; None for
            all those built in, by detection.
        where: the file of the declaration, for messages.

    Raises:
        ConfigError: `declared` is not a source.
    """
    if declared is None:
        return _FORMATS
    if declared in _FORMATS:
        return {declared: _FORMATS[declared]}
    if ":" not in declared:
        allowed = f"{', '.join(_FORMATS)}; or your own as module:Class"
        raise ConfigError(where, "source", f"is {declared!r}, allowed: {allowed}")
    try:
        found = load_class(declared, object)
    except ConfigError as error:
        raise ConfigError(where, "source", error.detail) from error
    shape = ("members", "payloads") if hasattr(found, "members") else ("objects", "rows")
    missing = [name for name in ("SUFFIXES", "accepts", *shape) if not hasattr(found, name)]
    if missing:
        raise ConfigError(where, "source", f"is {declared!r}, which lacks {', '.join(missing)}: a source needs them")
    return {declared: found}


def shard_kinds(declared: str | None, *, where: object) -> Sequence[ShardKind]:
    """The formats that shards in a folder may have; arguments and errors as `source_formats`."""
    of_tables = {suffix for table in TABLE_SOURCES.values() for suffix in table.SUFFIXES}
    return [
        ShardKind(
            name=name,
            suffixes=found.SUFFIXES,
            is_table=not of_tables.isdisjoint(found.SUFFIXES),
            dataset=found if hasattr(found, "MARKS") else None,
            files=getattr(found, "FILES", ()),
        )
        for name, found in source_formats(declared, where=where).items()
    ]


def row_sources(
    files: Sequence[SourceFile], declared: str | None = None, *, shards: str = "", where: object = "arguments"
) -> Sequence[MemberRows | TableSource]:
    """The row sources of a partition's files: one for all of its containers, then one for each table.

    Args:
        files: the partition's shards.
        declared: the setting `source`.
        shards: the setting of that name, which the ids of samples in groups of shards depend on.
        where: the file of the declaration, for messages.

    Raises:
        ShardError: the format of a file is not known.
        ConfigError: `declared` is not a source.
        SourceError: the storage failed.
    """
    formats = source_formats(declared, where=where)
    containers: list[Source] = []
    tables: list[MemberRows | TableSource] = []
    for file in files:
        opened = (detect(file, formats) if declared is None else formats[declared])(file)
        if isinstance(opened, ListingRows):
            opened.prefix = posixpath.dirname(id_prefixes({file.url: opened.SUFFIXES}, shards)[file.url])
        (containers if hasattr(opened, "members") else tables).append(opened)
    return [MemberRows(containers, shards=shards), *tables] if containers else tables
