"""Texts of strangers: which of them are queries that may be run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from mm_assets.cli.main import main
from mm_assets.pipeline.chain import TABLES
from mm_assets.pipeline.explore.sql import QueryError, columns_of_relations, dataset_sandbox
from mm_assets.pipeline.explore.sql_worker import RefusedError, check_statement
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.sql_views import catalog_variables
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.schema import FILE_COLUMN

from ..chain import declare, run_chain
from ..shards import CAPTIONS, make_shard

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


@pytest.mark.parametrize("text", FILES)
def test_no_spelling_of_a_file_is_run(parser: Any, text: str) -> None:
    """No statement, subquery or function that names a file is run: beside the dataset, in its folder, or by URL."""
    for path in ("/etc/secret", "root/data/secret", "https://127.0.0.1:9/secret", "secret"):
        with pytest.raises(RefusedError):
            check_statement(parser, text.format(path=path), frozenset({"rows"}))


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
        "with pg_class as (select 1) select * from pg_catalog.pg_class",
        "with pg_class as (select 1) select * from system.pg_catalog.pg_class",
        "with pg_class as (select 1) select * from system.pg_class",
        "select * from sqlite_master",
        "select * from duckdb_views",
        "select write_log('x')",
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
    with pytest.raises(RefusedError):
        check_statement(parser, sql, frozenset({"rows"}))


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetStore:
    """A dataset of two partitions, below a folder that looks like a pattern and a Hive partition."""
    for key in "ab":
        make_shard(tmp_path / "in" / f"{key}.tar", {f"{key}{name}": value for name, value in CAPTIONS.items()})
    return run_chain(declare(tmp_path / "k=[v]*", tmp_path / "in"))[0]


def test_relations_have_the_columns_of_their_tables(dataset: DatasetStore) -> None:
    """Each relation has a column for the partition, those in the files of its table, and the file."""
    found = columns_of_relations(state := DatasetState(dataset))
    assert list(found) == ["published", *TABLES]
    for table in TABLES:
        first, *_ = catalog_variables(state)[f"{table}_files"]
        assert [name for name, _ in found[table]] == ["partition", *pq.read_schema(first).names, FILE_COLUMN]


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_table_is_named_with_its_repair(dataset: DatasetStore, damage: str, tmp_path: Path) -> None:
    """In the command and in the viewer a query says which file is missing or truncated, and the command repairs it."""
    (path,) = Path(dataset.store.path_of("filtered_rows")).glob("b.*")
    content, query = path.read_bytes(), "select count(*) from filtered_rows"
    if damage == "missing":
        path.unlink()
        found = "is missing"
    else:
        path.unlink()  # it may be a second name of another table's file
        path.write_bytes(content[:-100])
        found = f"has {len(content) - 100} bytes"
    options = ["--root", dataset.spec.root, "--dataset", "data"]

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, *options], env={"DAGSTER_HOME": str(tmp_path)})

    message = f"{path}: {found}, expected {len(content)} bytes as in the manifest: `mm-assets run"
    done = run("sql", query)
    assert done.exit_code == 1
    assert message in done.stderr
    repair = "--dataset data --partition b` rebuilds the partition"
    assert repair in done.stderr
    with pytest.raises(QueryError) as error:
        dataset_sandbox(DatasetState(dataset)).run(query)
    assert error.value.message == message + " " + repair
    done = run("run", "--partition", "b", "--shards", dataset.spec.shards, "--set", "settle_seconds=0")
    assert done.exit_code == 0, done.output
    assert path.read_bytes() == content
    assert run("sql", query).stdout.splitlines() == ["count_star()", "24"]
    assert dataset_sandbox(DatasetState(dataset)).run(query).rows == ((24,),)
