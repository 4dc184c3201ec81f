"""Queries of strangers, each in its process: what they select, and that nothing else is read, changed, or taken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_assets.pipeline.explore.sql import QueryError, Sandbox, columns_of_relations, dataset_sandbox
from mm_assets.pipeline.explore.sql_worker import connect
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import DatasetState

from ..pipeline.chain import declare, run_chain
from ..pipeline.explore.test_sql import FILES
from ..pipeline.shards import CAPTIONS, make_shard

SECRET = "the secret of another file"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset's folder, and files beside it and in it that no relation reads."""
    folder = tmp_path_factory.mktemp("sandbox")
    make_shard(folder / "in" / "s.tar", CAPTIONS)
    run_chain(declare(folder / "root", folder / "in", filters=[{"type": "text_length", "min_chars": 1}]))
    for place in (folder, folder / "root" / "data"):
        pq.write_table(pa.table({"secret": [SECRET]}), place / "secret.parquet")
        (place / "secret.csv").write_text(f"secret\n{SECRET}\n")
        (place / "secret.json").write_text(f'{{"secret": "{SECRET}"}}')
    return folder


@pytest.fixture(scope="module")
def state(folder: Path) -> DatasetState:
    return DatasetState(DatasetStore(declare(folder / "root", folder / "in")))


@pytest.fixture(scope="module")
def sandbox(state: DatasetState) -> Sandbox:
    return dataset_sandbox(state, seconds=20)


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("select count(*) from rows where modality = 'image'", ((4,),)),
        ("from rows select distinct partition", (("s",),)),
        ("with images as (select * from rows where modality = 'image') select count(*) from images", ((4,),)),
        ("values (1, 'a')", ((1, "a"),)),
        ("select sample_id from filtered_rows where modality = 'text' order by sample_id desc limit 1;", (("3",),)),
        ("select * from main.published", (("s", 4),)),
        ("select n from unnest([1, 2]) as t(n)", ((1,), (2,))),
        ("select (select max(position) from rows), exists (from dropped)", ((1, False),)),
        ("with recursive t(n) as (select 1 union all select n + 1 from t where n < 3) select sum(n) from t", (("6",),)),
    ],
)
def test_what_may_be_selected(sandbox: Sandbox, sql: str, rows: tuple[object, ...]) -> None:
    """Statements that only read relations give their rows."""
    found = [tuple(str(v) if isinstance(v, int) and "sum" in sql else v for v in row) for row in sandbox.run(sql).rows]
    assert tuple(found) == rows


@pytest.mark.parametrize(
    "sql", ["describe rows", "summarize rows", "show tables", "describe select 1 as a", "show rows"]
)
def test_relations_can_be_described(sandbox: Sandbox, sql: str) -> None:
    """The statements by which people find their way give rows too."""
    assert sandbox.run(sql).rows


def test_relations_are_listed_with_their_columns(state: DatasetState) -> None:
    """Each relation of the catalog has its columns and types."""
    found = columns_of_relations(state)
    relations = {name: dict(columns) for name, columns in found.items()}
    assert {"rows", "filtered_rows", "dropped", "published"} <= set(relations)
    assert relations["rows"]["sample_id"] == "VARCHAR"
    assert relations["dropped"]["value"] == "DOUBLE"


@pytest.mark.parametrize("sql", FILES[::6])
@pytest.mark.parametrize("place", ["secret", "root/data/secret"])
def test_a_query_reads_and_writes_no_file(sandbox: Sandbox, folder: Path, place: str, sql: str) -> None:
    """A query that names a file fails, tells nothing of it, and leaves all files as they are."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(QueryError) as refused:
        sandbox.run(sql.format(path=folder / place))
    assert SECRET not in str(refused.value)
    assert sorted(folder.rglob("*")) == before


@pytest.fixture
def connection(sandbox: Sandbox) -> Iterator[Any]:
    """The DuckDB of a query's process."""
    with closing(connect(sandbox.request)) as found:
        yield found


@pytest.mark.parametrize("sql", FILES)
@pytest.mark.parametrize("place", ["secret", "root/data/secret"])
def test_duckdb_itself_opens_only_the_tables(connection: Any, folder: Path, place: str, sql: str) -> None:
    """A statement that got past the parser could read no file but the tables, and write none."""
    before = sorted(folder.rglob("*"))
    (table,) = (folder / "root" / "data" / "rows").iterdir()
    assert connection.execute(f"select count(*) from '{table}'").fetchone()[0] > 0
    with suppress(duckdb.Error):
        assert SECRET not in str(connection.execute(sql.format(path=folder / place)).fetchall())
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('/etc/passwd')",
        "select * from read_text('/dev/fd/0')",
        "select * from read_text('{folder}/root/data/rows/../../../secret.csv')",
        "select * from glob('/*')",
        "set enable_external_access = true",
        "set allowed_directories = ['/']",
        "set memory_limit = '100GB'",
        "attach '{folder}/x.db'",
        "copy (select 1) to '{folder}/x.csv'",
        "install httpfs",
        "from enable_logging(storage='file', storage_path='{folder}/log')",
        "from enable_profiling(save_location='{folder}/profile')",
    ],
)
def test_duckdb_itself_is_locked(connection: Any, folder: Path, sql: str) -> None:
    """A statement that got past the parser could change no setting, and open no file by another way."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(duckdb.Error):
        connection.execute(sql.format(folder=folder)).fetchall()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("sql", "line", "column", "says"),
    [
        ("select nothing from rows", 1, 8, "nothing"),
        ("select 1,\n  nothing\nfrom rows", 2, 3, "nothing"),
        ("select *\nfrm rows", 2, 5, "syntax error"),
        ("select *\nfrom 'x.csv'", 2, 6, "there is no relation 'x.csv'"),
        ("select 1 +", 1, 10, "syntax error"),
        ("select no_such_function(1)", 1, 8, "no_such_function"),
        ("select 'äö' as \"日本\", nothing from rows", 1, 22, "nothing"),
        ("select 'äö' as \"日本\"\nfrom 'x.csv'", 2, 6, "there is no relation 'x.csv'"),
    ],
)
def test_an_error_says_where(sandbox: Sandbox, sql: str, line: int, column: int, says: str) -> None:
    """An error has the line and the column that it is about, and a sentence without DuckDB's own advice."""
    with pytest.raises(QueryError, match=says) as failed:
        sandbox.run(sql)
    assert (failed.value.line, failed.value.column) == (line, column)
    assert "SET " not in failed.value.message


def test_rows_and_bytes_of_a_result_are_limited(state: DatasetState) -> None:
    """A result ends at its limits and says so, whatever its rows are."""
    small = dataset_sandbox(state, max_rows=10, max_bytes=20_000, seconds=60)
    many = small.run("select range from range(100000000)")
    assert (len(many.rows), many.truncated) == (10, True)
    wide = small.run("select repeat('x', 3000) from range(100)")
    assert (len(wide.rows), wide.truncated) == (6, True)
    exact = small.run("select range from range(10)")
    assert (len(exact.rows), exact.truncated) == (10, False)
    one = small.run("select repeat('x', 10000000)")
    assert len(one.rows[0][0]) < 5000
    assert len(small.run("select 1", max_rows=99).rows) == 1


def test_values_of_all_types_become_json(sandbox: Sandbox) -> None:
    """Numbers that a browser cannot hold, bytes, dates and nested values are text."""
    (row,) = sandbox.run(
        "select null, true, 1, 9007199254740993, 0.5::double, 'nan'::double, 'x'::blob, date '2020-01-02', [1, 2], "
        "{'a': 'b'}, 1.5::decimal(4, 1)"
    ).rows
    assert row[:5] == (None, True, 1, "9007199254740993", 0.5)
    assert row[5:] == ("nan", "<1 bytes>", "2020-01-02", "[1, 2]", '{"a": "b"}', "1.5")


DOUBLINGS = ", ".join(f"t{n} as not materialized (select a.a from t{n - 1} a, t{n - 1} b)" for n in range(1, 31))
GREEDY = (
    "select lpad('x', 2000000000, 'y')",
    "select length(lpad('x', 2000000000, 'y'))",
    "select repeat('x', 4000000000)",
    "select list_transform(range(1000000000), lambda x: x + 1)",
    "select len(range(10000000000))",
    "select string_agg(repeat('x', 1000000), '') from range(100000)",
    "select array_agg(range) from range(1000000000)",
    "select count(distinct range) from range(10000000000)",
    "select * from range(10000000000) order by random()",
    "select count(*) from range(10000000000) a, range(10000000000) b",
    "select max(a.position + b.range) from rows a, range(100000000000) b",
    "with recursive t(n) as (select 1 union all select n + 1 from t) select max(n) from t",
    "select printf('%2000000000d', 1)",
    "select array_to_string(list_resize(['x'], 2000000000, 'yy'), '')",
    # An interrupt does not end these, whose steps are in one call, or before any row.
    "select levenshtein(repeat('x', 2000000), repeat('y', 2000000))",
    f"with t0 as (select 1 as a), {DOUBLINGS} select count(*) from t30",
    # These overflow the stack of their process.
    "select json_contains(repeat('[', 3000000) || repeat(']', 3000000), repeat('[', 3000000) || repeat(']', 3000000))",
    "select (repeat('[', 5000000) || repeat(']', 5000000))::json::variant",
)


GREEDY_ALL = """
import json, resource, sys, time
from mm_assets.pipeline.explore.sql import QueryError, dataset_sandbox
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.view.backends.folder import open_dataset_store
sandbox = dataset_sandbox(DatasetState(open_dataset_store(sys.argv[1])), seconds=2)
found = {}
for sql in sys.argv[2:]:
    before, began, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), None
    try:
        sandbox.run(sql)
    except QueryError as error:
        said = str(error)
    found[sql] = said, time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([found, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


@pytest.fixture(scope="module")
def greedy(folder: Path) -> tuple[dict[str, tuple[str | None, float, int]], int]:
    """By query its error, its seconds, and the KiB by which its asker grew; and the KiB of the largest process."""
    command = [sys.executable, "-c", GREEDY_ALL, str(folder / "root" / "data"), *GREEDY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found, largest = json.loads(done.stdout)
    return found, largest


@pytest.mark.parametrize("sql", GREEDY)
def test_a_greedy_query_ends(greedy: tuple[dict[str, tuple[str | None, float, int]], int], sql: str) -> None:
    """Gigabytes, endless loops and full stacks end by an error within seconds, and the asking process stays small."""
    said, seconds, growth = greedy[0][sql]
    assert said is not None
    assert re.search(r"memory|ended after|Invalid|too|exceed|maximum|not supported", said)
    assert seconds < 30
    assert growth < 100_000  # KiB


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not limit the memory of a process")
def test_no_query_takes_more_memory_than_it_may(greedy: tuple[dict[str, tuple[str | None, float, int]], int]) -> None:
    """The largest process of all greedy queries is below two gigabytes."""
    assert 20_000 < greedy[1] < 2_000_000  # KiB


def test_a_running_query_can_be_cancelled(sandbox: Sandbox) -> None:
    """Cancelling ends the process of a query at once, and its name is free again."""
    failed: list[QueryError] = []

    def run() -> None:
        try:
            sandbox.run("select count(*) from range(100000000000) a, range(1000) b", key="q")
        except QueryError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not sandbox.cancel("q"):
        time.sleep(0.01)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert failed[0].message == "cancelled"
    assert not sandbox.cancel("q")
    assert sandbox.run("select 1", key="q").rows == ((1,),)


RUNS = """
import sys
from mm_assets.pipeline.explore.sql import dataset_sandbox
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.view.backends.folder import open_dataset_store
sandbox = dataset_sandbox(DatasetState(open_dataset_store(sys.argv[1])), seconds=600)
sandbox.run("select max(a.position + b.range) from rows a, range(100000000000) b")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels cannot end a process with its parent")
def test_a_query_ends_with_the_process_that_asked(folder: Path) -> None:
    """No query is left running where the viewer is killed."""
    psutil = pytest.importorskip("psutil")
    with subprocess.Popen([sys.executable, "-c", RUNS, str(folder / "root" / "data")]) as asker:
        deadline = time.monotonic() + 120
        children = []
        while not any(child.cpu_times().user > 0.5 for child in children):  # it has begun
            assert time.monotonic() < deadline
            assert asker.poll() is None
            children = psutil.Process(asker.pid).children()
            time.sleep(0.05)
        asker.kill()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert (len(gone), alive) == (1, [])
