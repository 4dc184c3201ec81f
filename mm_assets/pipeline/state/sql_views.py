"""SQL over the tables of a dataset: a view over all partitions of each, in DuckDB or as the file ``catalog.sql``."""

from __future__ import annotations

from typing import Any

from mm_assets.errors import SourceError, first_line
from mm_assets.pipeline.chain import PUBLISHED, TABLES
from mm_assets.pipeline.state.folder import WITHDRAWN, DatasetStore
from mm_assets.rows.schema import FILE_COLUMN, DatasetSchema
from mm_assets.rows.sql import literal_path, parquet_relation, sql_text

__all__ = ["catalog_statements", "catalog_text", "sql_connection", "table_views"]

# A view's statement is bound when the view is made, which would read the columns of every file.
_ONE_SHAPE = "set variable union_by_name = false;\n"
_ANY_SHAPE = "set variable union_by_name = true;\n"
# Earlier releases take a condition on the files' own column `filename` for one on their paths (duckdb#24204).
_NEW_DUCKDB = """set variable duckdb_release = case when version() < 'v2'
    then error('a table of this dataset has a column "filename", by which DuckDB filters wrongly before release 2.0')
    else version() end;
"""


def table_views() -> dict[str, str]:
    """Returns the statement that makes each view over all partitions of a dataset, by the view's name."""
    root, file = "getvariable('root')", sql_text(FILE_COLUMN)
    union = "coalesce(getvariable('union_by_name'), true)"
    selected = {
        # The partition comes first: of two columns with one name, DuckDB renames the second.
        table: f"select parse_filename({FILE_COLUMN}, true) as partition, * "
        f"from {parquet_relation(root, below=f'{table}/*.parquet', filename=file, union_by_name=union)}"
        for table in TABLES
    }
    selected[PUBLISHED.name] = (
        f"select distinct on (partition) partition, num_samples from read_json({literal_path(root)} || "
        f"'/{PUBLISHED.name}/*.json', columns = {{partition: 'varchar', num_samples: 'bigint'}}, "
        f"filename = {file}, hive_partitioning = false) where not ends_with({FILE_COLUMN}, '{WITHDRAWN}')"
    )
    return {view: f"create or replace view {view} as {select};\n" for view, select in selected.items()}


def catalog_text(dataset: DatasetStore, schema: DatasetSchema) -> str:
    """Returns the content of ``catalog.sql``: SQL that makes the views in any DuckDB, from any folder."""
    columns = {column.name.casefold() for column in (*schema.user_columns, *schema.annotator_columns)}
    return (
        "-- Views over every partition of this dataset. Set first the folder of this file, without a final slash:\n"
        f"-- set variable root = '{dataset.spec.name}';\n"
        f"{_NEW_DUCKDB if 'filename' in columns else ''}"
        f"{_ONE_SHAPE}"
        f"{''.join(table_views().values())}"
        "-- Partitions made before and after a change of columns are queried together, for which DuckDB reads the\n"
        "-- columns of every file. Where all have the same, `false` makes queries over few of many partitions faster.\n"
        f"{_ANY_SHAPE}"
    )


def catalog_statements(dataset: DatasetStore) -> dict[str, str]:
    """The statements that make the catalog's views, in order, by the view's name, and two others by what they set.

    Views of tables that no run has made yet are left out. The variable `root` has to be `DatasetStore.duckdb_path("")`.

    Raises:
        SourceError: a folder could not be listed.
    """
    views = {view: statement for view, statement in table_views().items() if dataset.store.sizes(view)}
    return {"one shape": _ONE_SHAPE, **views, "any shape": _ANY_SHAPE}


def sql_connection(dataset: DatasetStore) -> Any:
    """Returns a DuckDB connection with the catalog's views, without those of tables that no run has made yet.

    Raises:
        SourceError: a folder cannot be listed, or a table cannot be read.
    """
    import duckdb

    statements, connection = catalog_statements(dataset), dataset.duckdb()
    try:
        connection.execute("set variable root = ?", [dataset.duckdb_path("")])
        for statement in statements.values():
            connection.execute(statement)
    except duckdb.Error as error:
        connection.close()
        raise SourceError(dataset.store.url, f"the tables cannot be read: {first_line(error)}") from error
    return connection
