"""SQL for DuckDB over Parquet tables: the relation of their files; names, texts and paths as SQL has them."""

from __future__ import annotations

import re

__all__ = ["literal", "literal_path", "parquet_relation", "partition_of", "sql_name", "sql_text"]

_WILDCARD = r"([*?\[])"
_DIGITS = 16  # hexadecimal, of the digest in the name of a table's file


def sql_text(value: str) -> str:
    """Returns a text as a literal."""
    return "'" + value.replace("'", "''") + "'"


def sql_name(name: str) -> str:
    """Returns the name of a column or a relation as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(path: str) -> str:
    """Returns a path as a pattern that matches it alone.

    A backslash cannot be escaped: DuckDB opens a file below such a folder by its name, but lists none there.
    """
    return re.sub(_WILDCARD, r"[\1]", path)


def literal_path(path: str) -> str:
    """Returns SQL for what `literal` returns; `path` is SQL for the path."""
    return f"regexp_replace({path}, {sql_text(_WILDCARD)}, '[\\1]', 'g')"


def partition_of(file: str) -> str:
    """Returns SQL for the key of the partition that a table's file belongs to; `file` is SQL for its path."""
    return f"regexp_replace(parse_filename({file}, true), '\\.[0-9a-f]{{{_DIGITS}}}$', '')"


def parquet_relation(path: str, *, below: str = "", is_list: bool = False, **options: str) -> str:
    """Returns the relation of Parquet files; every query over tables reads them through it.

    Its columns are those in the files: otherwise DuckDB adds one for each ``key=value`` in a path, in place of the
    file's own column of that name. What `options` add is in `mm_assets.rows.schema.QUERY_COLUMNS`.

    Args:
        path: SQL for the path, such as ``$rows``, which is taken literally.
        below: pattern of files below that path, such as ``rows/*.parquet``; empty: `path` is a file.
        is_list: whether `path` is SQL for a list of paths.
        options: further options of ``read_parquet``, as SQL.
    """
    files = literal_path(path)
    if is_list:
        files = f"list_transform({path}, lambda p: {literal_path('p')})"
    if below:
        files = f"{files} || {sql_text('/' + below)}"
    named = "".join(f", {name} = {value}" for name, value in options.items())
    return f"read_parquet({files}, hive_partitioning = false{named})"
