"""The explicit list of checks: every rule that a partition must obey, and the SQL that finds what breaks it.

A check's SQL lies in ``sql/`` as one statement; its first line is the rule in words. It selects violations from views
that `runner` provides under the names in `needs`, so it runs in a DuckDB shell as it is once they exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

__all__ = ["CATALOG", "Check", "checks_of"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule for one asset.

    Attributes:
        asset: the asset whose files it judges.
        name: unique within the asset.
        sql_file: name of the statement's file in ``sql/``.
        needs: the views that the statement reads.
        about_content: whether it judges what the sources say of each other, rather than what was made of them. The
            dataset's `on_misaligned` tells what a violation does.
    """

    asset: str
    name: str
    sql_file: str
    needs: tuple[str, ...]
    about_content: bool = False

    @cached_property
    def sql(self) -> str:
        """The statement."""
        return (files("mm_assets.checks") / "sql" / self.sql_file).read_text(encoding="utf-8")

    @cached_property
    def description(self) -> str:
        """The rule as a sentence."""
        return self.sql.splitlines()[0].removeprefix("--").strip()


def _check(asset: str, name: str, *needs: str, of: str | None = None, about_content: bool = False) -> Check:
    return Check(
        asset=asset, name=name, sql_file=f"{of or asset}__{name}.sql", needs=needs, about_content=about_content
    )


def _packed(asset: str) -> tuple[Check, ...]:
    return (
        _check(asset, "schema", "expected_modalities", "packed_modalities", of="packed"),
        _check(asset, "intact", "packed_damage", of="packed"),
        _check(asset, "samples", "filtered_rows", "packed_samples", of="packed"),
        _check(
            asset, "item_counts", "filtered_rows", "filtered_texts", "packed_items", "expected_modalities", of="packed"
        ),
        _check(asset, "presence", "expected_presence", "packed_presence", of="packed"),
        _check(asset, "items", "expected_items", "packed_items", of="packed"),
        _check(asset, "decoded", "decoded_mismatches", of="packed"),
        _check(
            asset, "listing", "filtered_rows", "packed_listing", "packed_presence", "expected_modalities", of="packed"
        ),
        _check(asset, "formats_agree", "packed_payloads", "packed_formats", of="packed"),
        _check(asset, "boxes", "packed_boxes", of="packed"),
        _check(asset, "timestamps", "packed_steps", of="packed"),
        _check(asset, "durations", "packed_clips", of="packed", about_content=True),
        _check(asset, "spans", "packed_spans", "packed_media", of="packed", about_content=True),
    )


CATALOG: tuple[Check, ...] = (
    _check("raw_shards", "schema", "expected_columns", "actual_columns"),
    _check("raw_shards", "members", "raw_shards", "shard_members"),
    _check("raw_shards", "ranges", "raw_shards", "shards"),
    _check("rows", "schema", "expected_columns", "actual_columns"),
    _check("rows", "identity", "rows", "known_modalities"),
    _check("rows", "metadata_rows", "rows"),
    _check("rows", "unique", "rows"),
    _check("rows", "contiguous", "rows"),
    _check("rows", "text", "rows", "rows_texts"),
    _check("rows", "no_content", "rows_content"),
    _check("rows", "source_refs", "rows", "parsed_source_refs", "shards", "shard_members"),
    _check("rows", "members", "shard_members", "parsed_source_refs", "rejects", "shards"),
    _check("materialized_rows", "schema", "expected_columns", "actual_columns"),
    _check("materialized_rows", "same_rows", "rows", "rows_texts", "materialized_rows", "materialized_texts"),
    _check("materialized_rows", "content", "materialized_content", "materialized_rows", "materialize_mode"),
    _check("materialized_rows", "shard_bytes", "materialized_reread"),
    _check("filtered_rows", "schema", "expected_columns", "actual_columns"),
    _check("filtered_rows", "metadata_rows", "filtered_rows"),
    _check("filtered_rows", "unique", "filtered_rows"),
    _check("filtered_rows", "content", "filtered_content", "filtered_rows"),
    _check("filtered_rows", "accounting", "materialized_rows", "filtered_rows", "dropped"),
    _check("filtered_rows", "dropped", "dropped", "materialized_rows"),
    _check(
        "filtered_rows",
        "same_rows",
        "materialized_rows",
        "materialized_texts",
        "materialized_content",
        "filtered_rows",
        "filtered_texts",
        "filtered_content",
        "dropped",
        "materialize_mode",
    ),
    _check("filtered_rows", "shard_bytes", "filtered_reread"),
    *_packed("packed_mult"),
    *_packed("packed_mstr"),
)
"""Every check, in the order in which an asset's are run."""

ABOUT_CONTENT: tuple[Check, ...] = tuple(c for c in CATALOG if c.about_content and c.asset == "packed_mult")
"""The checks of what a sample's parts say of each other; the same for both formats."""


def checks_of(asset: str) -> tuple[Check, ...]:
    """The checks of one asset, its `schema` first.

    Raises:
        ValueError: there is no such asset.
    """
    found = tuple(check for check in CATALOG if check.asset == asset)
    if not found:
        raise ValueError(f"no asset {asset!r} has checks; those that have: {sorted({c.asset for c in CATALOG})}")
    return found
