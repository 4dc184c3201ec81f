"""The explicit list of checks: every rule that a partition must obey, and the SQL that finds what violates it.

A check is a line in `CATALOG` and a file in ``sql/`` with one statement, whose first line is the rule in words. It
selects the violations from relations that `runner` provides by name, so it also runs in a DuckDB shell if they exist.
The relations are:

- each table of the partition by its name, without the columns of content; row tables have an `ordinal`;
- what `relations.DERIVED` computes from a table, such as `filtered_rows_content`;
- what `relations.RELATIONS` and `packed.PACKED_RELATIONS` list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

__all__ = ["CATALOG", "Check", "checks_of"]

_COMMENT = re.compile(r"--.*")
_SOURCE = re.compile(r"(?<!distinct )\b(?:from|join) ([a-z_]+)")
_SUBQUERY = re.compile(r"^([a-z_]+) as \($", re.MULTILINE)  # of a `with` clause


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule for one asset.

    Attributes:
        asset: the asset whose files it judges.
        name: unique within the asset.
        sql_file: name of the statement's file in ``sql/``.
        about_content: whether it compares the parts of a sample with each other, rather than with their source. The
            dataset's `on_misaligned` decides what a violation does.
    """

    asset: str
    name: str
    sql_file: str
    about_content: bool = False

    @cached_property
    def sql(self) -> str:
        """The statement."""
        return (files("mm_assets.checks") / "sql" / self.sql_file).read_text(encoding="utf-8")

    @cached_property
    def description(self) -> str:
        """The rule as a sentence."""
        return self.sql.splitlines()[0].removeprefix("--").strip()

    @cached_property
    def relations(self) -> tuple[str, ...]:
        """Names of the relations that the statement reads, sorted."""
        statement = _COMMENT.sub("", self.sql)
        return tuple(sorted(set(_SOURCE.findall(statement)) - set(_SUBQUERY.findall(statement))))


def _check(asset: str, name: str, sql_file: str = "", *, about_content: bool = False) -> Check:
    return Check(asset=asset, name=name, sql_file=sql_file or f"{asset}__{name}.sql", about_content=about_content)


def _packed(name: str, *, about_content: bool = False) -> tuple[Check, ...]:
    return tuple(
        _check(asset, name, f"packed__{name}.sql", about_content=about_content)
        for asset in ("packed_mult", "packed_mstr")
    )


CATALOG: tuple[Check, ...] = (
    _check("raw_shards", "schema", "schema.sql"),
    _check("raw_shards", "members"),
    _check("raw_shards", "ranges"),
    _check("rows", "schema", "schema.sql"),
    _check("rows", "identity"),
    _check("rows", "metadata_rows"),
    _check("rows", "unique"),
    _check("rows", "contiguous"),
    _check("rows", "text"),
    _check("rows", "no_content"),
    _check("rows", "source_refs"),
    _check("rows", "members"),
    _check("materialized_rows", "schema", "schema.sql"),
    _check("materialized_rows", "same_rows"),
    _check("materialized_rows", "content"),
    _check("materialized_rows", "shard_bytes"),
    _check("filtered_rows", "schema", "schema.sql"),
    _check("filtered_rows", "metadata_rows"),
    _check("filtered_rows", "unique"),
    _check("filtered_rows", "content"),
    _check("filtered_rows", "accounting"),
    _check("filtered_rows", "dropped"),
    _check("filtered_rows", "same_rows"),
    _check("filtered_rows", "shard_bytes"),
    *_packed("schema"),
    *_packed("intact"),
    *_packed("samples"),
    *_packed("item_counts"),
    *_packed("presence"),
    *_packed("items"),
    *_packed("decoded"),
    *_packed("listing"),
    *_packed("formats_agree"),
    *_packed("boxes"),
    *_packed("timestamps"),
    *_packed("durations", about_content=True),
    *_packed("spans", about_content=True),
)
"""Every check, in the order in which an asset's are run."""

ABOUT_CONTENT: tuple[Check, ...] = tuple({c.name: c for c in CATALOG if c.about_content}.values())
"""The checks that compare the parts of a sample with each other, once for both formats."""


def checks_of(asset: str) -> tuple[Check, ...]:
    """The checks of one asset, its `schema` first.

    Raises:
        ValueError: there is no such asset.
    """
    found = tuple(check for check in CATALOG if check.asset == asset)
    if not found:
        raise ValueError(f"no asset {asset!r} has checks; those that have: {sorted({c.asset for c in CATALOG})}")
    return found
