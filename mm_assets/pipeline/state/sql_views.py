"""SQL over the tables of a dataset: a view over all partitions of each, in DuckDB or as the file ``catalog.sql``."""

from __future__ import annotations

from typing import Any

from mm_assets.dataset.manifest import file_path
from mm_assets.errors import SourceError, first_line
from mm_assets.pipeline.chain import TABLES
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import size_fault
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.schema import FILE_COLUMN, DatasetSchema
from mm_assets.rows.sql import literal_path, parquet_relation, partition_of, sql_text

__all__ = [
    "catalog_statements",
    "catalog_text",
    "catalog_variables",
    "sql_connection",
    "table_fault",
    "table_views",
]

_ROOT = "getvariable('root')"
_OF_TABLES = ", ".join(f"{table} struct(sha256 varchar[])" for table in TABLES)
_MANIFEST = f"""create or replace view mm_assets_manifest as select partitions from read_json(
    {literal_path(_ROOT)} || '/manifest.json', maximum_object_size = 1073741824, hive_partitioning = false,
    columns = {{partitions: 'struct(key varchar[], num_samples bigint[], tables struct({_OF_TABLES}))'}});
"""
_PUBLISHED = """create or replace view published as
    select unnest(partitions.key) as partition, unnest(partitions.num_samples) as num_samples from mm_assets_manifest;
"""
_LISTED = """create or replace view published as
    select unnest(getvariable('keys')) as partition, unnest(getvariable('counts')) as num_samples;
"""

# Earlier releases take a condition on the files' own column `filename` for one on their paths (duckdb#24204).
_NEW_DUCKDB = """set variable duckdb_release = case when version() < 'v2'
    then error('a table of this dataset has a column "filename", by which DuckDB filters wrongly before release 2.0')
    else version() end;
"""


def table_views() -> dict[str, str]:
    """Returns the statement that makes each view over all partitions of a dataset, by the view's name.

    The views read the files in the variables ``<table>_files``, lists of paths. All partitions of a manifest have the
    same columns, so those of the first file are the view's.
    """
    file = sql_text(FILE_COLUMN)
    return {
        # The partition comes first: of two columns with one name, DuckDB renames the second.
        table: f"create or replace view {table} as select {partition_of(FILE_COLUMN)} as partition, * from "
        + parquet_relation(f"getvariable('{table}_files')", is_list=True, filename=file)
        + ";\n"
        for table in TABLES
    }


def catalog_text(dataset: DatasetStore, schema: DatasetSchema) -> str:
    """Returns the content of ``catalog.sql``: SQL that makes the views in any DuckDB, from any folder."""
    columns = {column.name.casefold() for column in (*schema.user_columns, *schema.annotator_columns)}
    lists = "".join(
        f"set variable {table}_files = (select list({_ROOT} || '/{table}/' || key || '.' || digest || '.parquet') from "
        f"(select unnest(partitions.key) as key, unnest(partitions.tables.{table}.sha256) as digest "
        f"from mm_assets_manifest));\n"
        for table in TABLES
    )
    return (
        "-- Views over every partition that the newest manifest lists. Set first the folder of this file, without a\n"
        "-- final slash, and read this file again after the manifest has changed:\n"
        f"-- set variable root = '{dataset.spec.name}';\n"
        f"{_NEW_DUCKDB if 'filename' in columns else ''}"
        f"{_MANIFEST}{lists}{_PUBLISHED}"
        f"{''.join(table_views().values())}"
    )


def sql_connection(state: DatasetState) -> Any:
    """Returns a DuckDB connection with the catalog's views over what the newest manifest lists.

    Raises:
        SourceError: there is no manifest, or a table cannot be read; names a missing file and what rebuilds it.
    """
    import duckdb

    if state.manifest is None:
        name = state.dataset.spec.name
        detail = f"there is none yet, and SQL reads the tables that it lists: run `mm-assets run --dataset {name}`"
        raise SourceError(state.dataset.store.url_of("manifest.json"), detail)
    connection = state.dataset.duckdb()
    try:
        for name, value in catalog_variables(state).items():
            connection.execute(f"set variable {name} = ?", [value])
        for statement in catalog_statements(state).values():
            connection.execute(statement)
    except duckdb.Error as error:
        connection.close()
        if (fault := table_fault(state)) is not None:
            raise fault from error
        raise SourceError(state.dataset.store.url, f"the tables cannot be read: {first_line(error)}") from error
    return connection


def catalog_variables(state: DatasetState) -> dict[str, list[Any]]:
    """Returns the variables that `catalog_statements` read: the files of each table, and the published partitions."""
    entries = state.listed.values()
    files = {
        f"{table}_files": [
            state.dataset.duckdb_path(file_path(table, entry.key, entry.tables[table][1])) for entry in entries
        ]
        for table in TABLES
    }
    return {**files, "keys": [entry.key for entry in entries], "counts": [entry.num_samples for entry in entries]}


def catalog_statements(state: DatasetState) -> dict[str, str]:
    """Returns the statements that make the catalog's views, by the view's name."""
    return {"published": _LISTED, **(table_views() if state.listed else {})}


def table_fault(state: DatasetState) -> SourceError | None:
    """Returns what is wrong with a table's file if one that the newest manifest lists is missing or truncated.

    It lists the folders of all tables: queries are made without, and explained by it if they fail.

    Raises:
        SourceError: the storage cannot be read.
    """
    store, name = state.dataset.store, state.dataset.spec.name
    for table in TABLES:
        sizes = store.sizes(table)
        for key, entry in state.listed.items():
            size, sha256 = entry.tables[table]
            path = file_path(table, key, sha256)
            if fault := size_fault(size, sizes.get(path)):
                advice = f"`mm-assets run --dataset {name} --partition {key}` rebuilds the partition"
                return SourceError(store.url_of(path), f"{fault} as in the manifest: {advice}")
    return None
