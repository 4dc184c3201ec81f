"""The explicit list of checks: every rule that a partition must obey, and the SQL that finds what violates it.

A check is a name in `_CHECKS`, below its group, and a file in ``sql/`` with one statement, whose first line is the rule
in words. It selects the violations from relations that `runner` provides by name, so it also runs in a DuckDB shell if
they exist. A further line of comment says when it selects nothing, and need not be executed:

- ``-- Holds without rows in: a, b.``: if none of these relations has a row;
- ``-- Holds if equal: a, b.``: if both relations have the same rows in the same order, as they have if all is well.
  Arrow compares them in a hundredth of the time that DuckDB takes.

The relations are:

- each table of the partition by its name, without the columns of content; row tables have an `ordinal`;
- a row table with what `relations.TableRelations` measures of its rows as further columns, such as
  `filtered_rows_with_content`;
- `own_rows`, the main table of the asset whose checks are run, and `own_losses`, the one of what it lost;
- the methods without arguments of `relations.TableRelations`, `origins.OriginRelations` and `packed.PackedRelations`,
  and `FACT_RELATIONS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

__all__ = ["CATALOG", "GROUPS", "Check", "checks_of"]

_COMMENT = re.compile(r"--.*")
_NEEDS = re.compile(r"^-- Holds without rows in: (.*)\.$", re.MULTILINE)
_EQUAL = re.compile(r"^-- Holds if equal: (.*), (.*)\.$", re.MULTILINE)
_SOURCE = re.compile(r"(?<!distinct )\b(?:from|join) ([a-z_]+)")
_SUBQUERY = re.compile(r"^([a-z_]+) as \($", re.MULTILINE)  # of a `with` clause


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule for one asset.

    Attributes:
        asset: the asset whose files it judges.
        name: unique within the asset.
        group: the group that it belongs to, a key of `GROUPS`.
    """

    asset: str
    name: str
    group: str

    @property
    def sql_file(self) -> str:
        """Name of the statement's file in ``sql/``: without an asset where those of tables share it."""
        if self.asset.startswith("packed_"):
            return f"packed__{self.name}.sql"
        return f"{self.name}.sql" if self.name in _SHARED else f"{self.asset}__{self.name}.sql"

    @property
    def about_content(self) -> bool:
        """Whether it compares the parts of a sample with each other, rather than with their source.

        The dataset's `on_misaligned` decides what a violation does.
        """
        return self.name in ("durations", "spans")

    @cached_property
    def sql(self) -> str:
        """The statement."""
        return (files("mm_assets.checks") / "sql" / self.sql_file).read_text(encoding="utf-8")

    @cached_property
    def description(self) -> str:
        """The rule as a sentence."""
        return self.sql.splitlines()[0].removeprefix("--").strip()

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Relations of which one has to have a row for a violation; none where the statement does not say so."""
        said = _NEEDS.search(self.sql)
        return tuple(said[1].split(", ")) if said else ()

    @cached_property
    def equal(self) -> tuple[str, ...]:
        """Two relations that have to differ for a violation; empty if the statement does not say so."""
        pair = _EQUAL.search(self.sql)
        return pair.groups() if pair else ()

    @cached_property
    def relations(self) -> tuple[str, ...]:
        """Names of the relations that the statement reads, sorted."""
        statement = _COMMENT.sub("", self.sql)
        return tuple(sorted(set(_SOURCE.findall(statement)) - set(_SUBQUERY.findall(statement))))


GROUPS = {
    "schema": "The files are whole and declare exactly the columns, or packed modalities, of the dataset.",
    "reserved_columns": "The columns that every dataset has hold what they are for: identities, order, origins, texts.",
    "alignment": "What was made agrees with what it was made from, row by row and item by item.",
    "accounting": "Everything that was read is kept, rejected or dropped, and no more is lost than the settings allow.",
    "content": "Media have the bytes that their origin has.",
}
"""What a check is about: the name of each group, and what its rules say together."""

_PACKED_CHECKS = (
    ("schema", "schema intact"),
    ("alignment", "samples item_counts presence items decoded listing formats_agree"),
    ("alignment", "boxes timestamps durations spans"),
)
_CHECKS = {
    "raw_shards": (("schema", "schema"), ("alignment", "members ranges")),
    "rows": (
        ("schema", "schema"),
        ("reserved_columns", "identity metadata_rows unique contiguous text no_content source_refs sources"),
        ("accounting", "members"),
        ("alignment", "order samples member_rows pdf_pages member_texts entries user_columns"),
        ("accounting", "rejects listed losses"),
    ),
    "materialized_rows": (
        ("schema", "schema"),
        ("alignment", "same_rows"),
        ("content", "content shard_bytes readable sources"),
    ),
    "filtered_rows": (
        ("schema", "schema"),
        ("reserved_columns", "metadata_rows unique"),
        ("content", "content"),
        ("accounting", "accounting dropped losses decodable repeated"),
        ("alignment", "same_rows"),
        ("content", "shard_bytes readable sources"),
    ),
    "packed_mult": _PACKED_CHECKS,
    "packed_mstr": _PACKED_CHECKS,
}
# One statement each, over the asset's own tables.
_SHARED = {"schema", "metadata_rows", "unique", "losses", "shard_bytes", "readable", "sources"}

CATALOG = tuple(
    Check(asset=asset, name=name, group=group)
    for asset, groups in _CHECKS.items()
    for group, names in groups
    for name in names.split()
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
