"""`mm-assets sql`: a query over a dataset's tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from mm_assets.cli.document import json_option, json_value, wants_json, write_document
from mm_assets.cli.main import leave_modules
from mm_assets.cli.options import DatasetChoice, dataset_options
from mm_assets.cli.output import echo, printable
from mm_assets.errors import ConfigError

__all__ = ["check_format", "command", "json_result", "print_result"]


@click.command()
@dataset_options(single=True)
@click.argument("query", required=False)
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values; the default where no terminal reads them.")
@json_option
def command(chosen: DatasetChoice, query: str | None, as_csv: bool) -> None:
    """Run QUERY over a dataset's tables in DuckDB; without QUERY, list the tables and their columns.

    The tables are raw_shards, rows, rejects, materialized_rows, filtered_rows, dropped and undecodable, over all
    partitions of the newest manifest, and published; each has a column `partition`. Before the first manifest there are
    no tables.
    """
    from mm_assets.pipeline.state.sql_views import sql_connection, table_fault
    from mm_assets.pipeline.state.staleness import DatasetState

    check_format(as_csv=as_csv)
    stores = chosen.stores()
    leave_modules()
    import duckdb

    if len(stores) != 1:
        known = ", ".join(s.spec.name for s in stores)
        raise ConfigError("arguments", "--dataset", f"name one dataset; declared: {known}")
    connection = sql_connection(state := DatasetState(stores[0]))
    try:
        cursor = connection.execute(_RELATIONS if query is None else query)
        if cursor is None:  # so answers DuckDB to a text without a statement
            raise ConfigError(
                "arguments", "QUERY", f"found {query!r}, expected SQL such as 'select count(*) from rows'"
            )
        if wants_json():
            write_document({"datasets": {stores[0].spec.name: json_result(cursor)}})
        elif query is None and sys.stdout.isatty() and not as_csv:  # a table would shorten the columns
            for name, of_table in cursor.fetchall():
                echo(f"{printable(name)}: {printable(of_table)}")
        else:
            print_result(cursor, as_csv=as_csv)
    except duckdb.CatalogException as error:
        detail = str(error)
        if _UNKNOWN.search(detail):
            names = ", ".join(name for name, _ in connection.execute(_RELATIONS).fetchall())
            detail = f"{detail}\n\nThe tables are: {names or 'none before the first run'}"
        raise ConfigError("arguments", "QUERY", detail) from error
    except duckdb.Error as error:
        if (
            isinstance(error, duckdb.IOException | duckdb.InvalidInputException)
            and (fault := table_fault(state)) is not None
        ):
            raise fault from error
        raise ConfigError("arguments", "QUERY", str(error)) from error
    finally:
        connection.close()


_RELATIONS = """
select table_name as relation, string_agg(column_name, ', ' order by ordinal_position) as columns
from information_schema.columns where table_schema = 'main' group by all order by relation
"""
_UNKNOWN = re.compile(r"Table with name .* does not exist", re.DOTALL)
_READABLE = 24  # characters of a line of a long cell, at least
_WIDE = 6  # columns that a terminal shows side by side
_SHOWN_ROWS = 100  # of a query's result in a terminal; --csv gives all


def check_format(*, as_csv: bool) -> None:
    """Raises `ConfigError` if two formats are asked for."""
    if as_csv and wants_json():
        raise ConfigError("arguments", "--csv", "and --json are given: give one of them")


def json_result(cursor: Any) -> dict[str, Any]:
    """Returns the result of a query for a document, whose rows are read as it is written."""
    columns = [{"name": name, "type": str(kind)} for name, kind, *_ in cursor.description or ()]
    return {"columns": columns, "rows": _json_rows(cursor)}


def print_result(cursor: Any, *, as_csv: bool) -> None:
    """Writes the result of a query: its first rows to a terminal, else all of them as comma-separated values."""
    columns = [column[0] for column in cursor.description or ()]
    if as_csv or not sys.stdout.isatty():
        _print_csv(columns, cursor)
    else:
        _print_rows(columns, cursor.fetchmany(_SHOWN_ROWS + 1))


def _json_rows(cursor: Any) -> Iterator[list[Any]]:
    while batch := cursor.fetchmany(1000):
        for row in batch:
            yield list(map(json_value, row))


def _print_csv(columns: Sequence[str], cursor: Any) -> None:
    import csv

    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    while batch := cursor.fetchmany(1000):
        writer.writerows(batch)


def _least_width(names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Columns of a terminal that a table needs whose names are whole, with long cells over a few lines."""
    from rich.cells import cell_len

    widest = [max(map(cell_len, column)) for column in zip(*rows, strict=True)] if rows else [0] * len(names)
    return 1 + sum(3 + max(cell_len(name), min(wide, _READABLE)) for name, wide in zip(names, widest, strict=True))


def _print_rows(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from mm_assets.summaries import summarize

    console = Console()
    names = list(map(printable, columns))
    shown = [["" if cell is None else printable(summarize(cell)) for cell in row] for row in rows[:_SHOWN_ROWS]]
    if len(columns) > _WIDE or _least_width(names, shown) > console.width:  # side by side no column would be readable
        for number, cells in enumerate(shown):
            console.rule(f"row {number}", align="left")
            for name, cell in zip(names, cells, strict=True):
                if cell:
                    console.print(f"{escape(name)}: {escape(cell)}", soft_wrap=True)
    else:
        table = Table()
        for name in names:
            table.add_column(escape(name), overflow="fold")
        for cells in shown:
            table.add_row(*map(escape, cells))
        console.print(table)
    if len(rows) > _SHOWN_ROWS:
        echo(f"only the first {_SHOWN_ROWS} rows are shown; --csv gives all", err=True)
