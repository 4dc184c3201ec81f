"""Texts of strangers: which of them are queries that may be run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pytest

from mm_assets.pipeline.explore.sql_worker import Refused, check_statement

FILES = (
    "select * from '{path}.csv'",
    'select * from "{path}.parquet"',
    "from '{path}.json'",
    "select * from read_csv('{path}.csv')",
    "select * from read_csv_auto('{path}.csv')",
    "select * from read_parquet('{path}.parquet')",
    "select * from parquet_scan('{path}.parquet')",
    "select * from read_text('{path}.csv')",
    "select * from read_blob('{path}.csv')",
    "select * from read_json('{path}.json')",
    "select * from READ_JSON_AUTO('{path}.json')",
    "select * from read_json_objects('{path}.json')",
    "select * from read_ndjson('{path}.json')",
    "select * from sniff_csv('{path}.csv')",
    "select * from glob('{path}*')",
    "select * from parquet_metadata('{path}.parquet')",
    "select * from parquet_schema('{path}.parquet')",
    "select * from parquet_kv_metadata('{path}.parquet')",
    "select * from parquet_file_metadata('{path}.parquet')",
    "select (select secret from '{path}.csv')",
    "select * from rows where sample_id in (select secret from '{path}.csv')",
    "select * from rows, lateral (select * from '{path}.csv')",
    "select * from rows join '{path}.csv' on true",
    "with t as (select * from '{path}.csv') select * from t",
    "with t as materialized (from read_text('{path}.csv')) select * from t",
    "with recursive t as (select secret from '{path}.csv' union all select * from t) select * from t",
    "select 1 union all select secret from '{path}.csv'",
    "select * from (values (1)) union all by name from '{path}.csv'",
    "select exists (from '{path}.csv')",
    "select array(select secret from '{path}.csv')",
    "select case when true then (select secret from '{path}.csv') end",
    "select count(*) filter (where exists (from '{path}.csv')) from rows",
    "select * from rows qualify row_number() over (order by (select secret from '{path}.csv')) = 1",
    "select * from rows order by (select secret from '{path}.csv')",
    "select * from rows limit (select count(*) from '{path}.csv')",
    "select * from rows group by (select secret from '{path}.csv')",
    "select list_transform([1], lambda x: (select secret from '{path}.csv'))",
    "select columns(c -> (select true from '{path}.csv')) from rows",
    "describe '{path}.csv'",
    "summarize '{path}.csv'",
    "describe select * from '{path}.csv'",
    "summarize select * from read_csv('{path}.csv')",
    "show '{path}.csv'",
    'with "{path}.csv" as (select 1) select * from (select 1), "{path}.csv"',
    "select * from query('select * from ''{path}.csv''')",
    "select * from query_table(['{path}.csv'])",
    "select * from json_execute_serialized_sql(json_serialize_sql('select * from ''{path}.csv'''))",
    "pivot '{path}.csv' on secret using count(*)",
    "select * from (pivot '{path}.csv' on secret using count(*))",
    "unpivot '{path}.csv' on secret",
    "table '{path}.csv'",
    "attach '{path}.db' as other",
    "copy (select 1) to '{path}.out'",
    "copy rows from '{path}.csv'",
    "export database '{path}'",
    "import database '{path}'",
    "load '{path}.duckdb_extension'",
    "install httpfs",
    "explain analyze select * from '{path}.csv'",
    "create table t as select * from '{path}.csv'",
    "create view rows as select * from '{path}.csv'",
    "insert into rows select * from '{path}.csv'",
    "prepare p as select * from '{path}.csv'",
    "call pragma_version()",
    "select 1; select * from '{path}.csv'",
    "/* select */ select * from /* x */ '{path}.csv' -- rows",
)


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    with closing(duckdb.connect()) as connection:
        yield connection


@pytest.mark.parametrize("sql", FILES)
def test_no_spelling_of_a_file_is_run(parser: Any, sql: str) -> None:
    """No statement, subquery or function that names a file is run: beside the dataset, in its folder, or by URL."""
    for path in ("/etc/secret", "root/data/secret", "https://127.0.0.1:9/secret", "secret"):
        with pytest.raises(Refused):
            check_statement(parser, sql.format(path=path), frozenset({"rows"}))


@pytest.mark.parametrize(
    "sql",
    [
        "set memory_limit = '100GB'",
        "set enable_external_access = true",
        "reset lock_configuration",
        "pragma threads = 64",
        "set variable root = '/'",
        "select getvariable('root')",
        "select current_setting('home_directory')",
        "select getenv('HOME')",
        "select * from duckdb_settings()",
        "select * from duckdb_secrets()",
        "select * from information_schema.tables",
        "select * from pg_catalog.pg_class",
        "select * from sqlite_master",
        "select * from duckdb_views",
        "select write_log('x')",
        "select nextval('x')",
        "drop view rows",
        "detach memory",
        "checkpoint",
        "use memory",
        "begin transaction",
        "execute p",
        "show databases",
        "show all tables",
        "",
        "-- nothing",
        ";",
        "select 1; select 2",
    ],
)
def test_other_statements_and_functions_are_refused(parser: Any, sql: str) -> None:
    """Settings, secrets, the catalog of DuckDB, and everything that does not select are refused."""
    with pytest.raises(Refused):
        check_statement(parser, sql, frozenset({"rows"}))


def test_columns_of_very_many_files_are_those_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of few files are united; of more than the limit one file is read, and queries still unite them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mm_assets.pipeline.explore import sql_worker as worker
    from mm_assets.pipeline.state.sql_views import table_views

    (tmp_path / "rows").mkdir()
    for name, columns in (("a", {"x": [1]}), ("b", {"x": [2], "y": [3]})):
        pq.write_table(pa.table(columns), tmp_path / "rows" / f"{name}.parquet")
    with duckdb.connect() as connection:
        connection.execute("set variable root = ?", [str(tmp_path)])
        connection.execute(table_views()["rows"])
        assert [name for name, _ in worker._columns(connection, "rows")] == ["partition", "x", "y", "mm_assets_file"]
        monkeypatch.setattr(worker, "MAX_UNITED", 1)
        assert "y" not in [name for name, _ in worker._columns(connection, "rows")]
