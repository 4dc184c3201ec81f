"""Every query of the project under folders, and with JSON keys, that DuckDB or the tables have a meaning for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import mm_assets
from mm_assets.checks import relations
from mm_assets.cli.main import main
from mm_assets.pipeline.chain import FILTERED_ROWS, TABLES
from mm_assets.pipeline.explore.diff import diff, find_version
from mm_assets.pipeline.explore.histograms import histogram, kept_by, scores
from mm_assets.pipeline.explore.provenance import member_content, origins, row_content, samples_at
from mm_assets.pipeline.explore.sql import dataset_sandbox
from mm_assets.pipeline.explore.sql_worker import connect
from mm_assets.pipeline.explore.statistics import statistics
from mm_assets.pipeline.state import manifests, sql_views
from mm_assets.pipeline.state.duplicate_ids import duplicate_ids
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import Selection, loss_page, losses, recorded_totals
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.schema import QUERY_COLUMNS, RESERVED_COLUMNS
from mm_assets.rows.sql import sql_name
from mm_assets.rows.user_columns import MAX_NAME, column_name

from ..chain import declare, record_of, run_chain, run_partition
from ..shards import make_shard, png

ROOTS = (
    ("key=value", "year=2024", "month=01", "partition=9", "filename=x", "sample_id=1"),
    ("a b", " ", "it's", 'say "x"', "100%", "p%20q", "#h", "a,b", "a;b--"),
    ("br[1]", "x[a-z]", "[", "]", "[!a]"),
    ("star*", "**", "q?x", "{a,b}"),
    ("back\\slash",),
    ("-dash", "--help", "~", "$x", "dot.", "..x", "new\nline\t", "a:b", "a&b|<c>", "ünï", "日本😀"),
)
SQL_WORDS = ("select", "from", "where", "group", "order", "table", "null", "true", "user", "default", "all", "union")
OWN_WORDS = (
    *("filter", "reason", "value", "detail", "number", "place", "lost", "r", "shard", "member", "byte_offset", "count"),
    *(
        "content_bytes",
        "text_chars",
        "image_width",
        "rowid",
        "file_index",
        "is_kept",
        "rows",
        "dropped",
        "filtered_rows",
    ),
)
ADDED = sorted({*RESERVED_COLUMNS, *QUERY_COLUMNS})
ODD = (
    *(
        "",
        " ",
        "a.b",
        'q"q',
        "it's",
        "a,b",
        "a;b",
        "%",
        "$x",
        "?",
        "*",
        "[1]",
        "{x}",
        "\\",
        "-",
        "#",
        "/",
        "é",
        "e\u0301",
    ),
    *(
        "日本",
        "😀",
        "\u200b",
        "1",
        "0x",
        "nul\0nul",
        "line\nline",
        "n" * MAX_NAME,
        "n" * (MAX_NAME + 1),
        "a",
        "A",
        "user_A",
    ),
    *("filename", "FileName", "Partition", "FILE_ROW_NUMBER", "Sample_ID", "POSITION", "Image_Width"),
)
KEYS = [*SQL_WORDS, *OWN_WORDS, *ADDED, *ODD]


def write_shards(folder: Path) -> Path:
    """Two shards of two samples with every key; of each shard an image and an odd file are refused."""
    for shard in ("a", "b"):
        members: dict[str, object] = {f"{shard}2.txt": "a text alone", ".hidden": b"no sample"}
        for number, width in enumerate((6, 20)):
            values = {key: 1000 * number + place for place, key in enumerate(KEYS)}
            members |= {f"{shard}{number}.json": values, f"{shard}{number}.png": png(width, (8, width))}
            members[f"{shard}{number}.txt"] = f"caption {number}"
        make_shard(folder / f"{shard}.tar", members)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetStore]:
    """Two versions of a dataset with every key, the second with a stricter filter; checks query Parquet files."""
    folder = tmp_path_factory.mktemp("names")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relations, "_MAX_HELD", 0)
        # A page of a busy machine would be shorter.
        patch.setattr("mm_assets.pipeline.state.losses._PAGE_SECONDS", 600.0)
        settings = {"annotators": [{"type": "image_size"}], "pack": {"columns": "all"}}
        spec = declare(folder / "root", write_shards(folder / "in"), **settings)
        run_chain(spec)
        stricter = DatasetStore(spec.replace(filters=({"type": "image_size", "min_width": 10},)))
        register(stricter)
        for key in stricter.partitions():
            run_partition(stricter, key)
        assert not manifests.build_manifest(stricter).left_out
        yield stricter


def columns_of(dataset: DatasetStore) -> dict[str, str]:
    """The column of each key that became one."""
    return {column.source: column.name for column in dataset.schema().user_columns}


def user_values(connection: Any, dataset: DatasetStore, table: str) -> list[tuple[Any, ...]]:
    """The partition, the id and the user's columns of each sample, and a count by a condition on each column."""
    names = list(columns_of(dataset).values())
    listed = ", ".join(map(sql_name, names))
    found = connection.execute(
        f"select partition, sample_id, {listed} from {table} where position = -1 order by sample_id"
    ).fetchall()
    counts = ", ".join(f"count(*) filter ({sql_name(name)} = {found[0][n + 2]})" for n, name in enumerate(names))
    return [*found, connection.execute(f"select {counts} from {table}").fetchone()]


def in_catalog(dataset: DatasetStore) -> Any:
    """A plain DuckDB with the catalog."""
    connection = duckdb.connect()
    connection.execute("set variable root = ?", [dataset.store.path_of("")])
    connection.execute(dataset.store.read_bytes("catalog.sql").decode())
    return connection


def in_sandbox(dataset: DatasetStore) -> Any:
    """The connection of a sandbox, which may read the dataset's tables and nothing else."""
    return connect(dataset_sandbox(DatasetState(dataset)).request)


def answers(dataset: DatasetStore) -> dict[str, Any]:
    """What each query of the project answers."""
    found: dict[str, Any] = {}
    state = DatasetState(dataset)
    with closing(sql_views.sql_connection(state)) as connection:
        for view in (*TABLES, "published"):
            found[view] = connection.execute(f"select partition, count(*) from {view} group by 1 order by 1").fetchall()
        found["filtered"] = user_values(connection, dataset, "filtered_rows")
    for name, opened in (("sandbox", in_sandbox), ("catalog", in_catalog)):
        if name == "catalog" and "\\" in dataset.store.path_of(""):  # below which DuckDB lists no files
            continue
        with closing(opened(dataset)) as connection:
            assert user_values(connection, dataset, "filtered_rows") == found["filtered"]
    drops = Selection(stage="filtered_rows", reason="image_size.width_below_min")
    found["drops"] = [item.to_json() for item in loss_page(state, drops).items]
    found["totals"], found["losses"] = recorded_totals(state), list(losses(state))
    found["origins"] = origins(state, "a", "a0")
    found["places"] = samples_at(state, "a", member="a0.png")
    content = row_content(state, "a", "a0", 0, "image"), row_content(state, "a", "a0", -1, "metadata")
    member = member_content(state, "a", shard="a.tar", member=".hidden")
    found["content"] = [one.read(0, one.size) for one in (*content, member) if one is not None]
    found["scores"] = scores(state)
    for name in ("image_width", "content_bytes", *(c for c in columns_of(dataset).values() if c.casefold() == "a")):
        found[name] = histogram(state, name, bins=2), kept_by(state, name, at_most=8)
    changed = diff(dataset, find_version(dataset, "previous"), find_version(dataset, "newest"))
    found["diff"] = {key: list(changed.samples(key)) for key in changed.keys}
    tables = {key: entry.tables[FILTERED_ROWS.tables[0].name] for key, entry in state.listed.items()}
    for cached in ("cache/sample_ids.parquet", "cache/new_sample_ids.parquet"):
        dataset.store.delete(cached)
    found["duplicates"] = [duplicate_ids(dataset, tables) for _ in ("of the tables", "of the cache")]
    made = statistics(state)
    found["statistics"] = made.num_samples, made.rows, made.texts
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        found["selected"] = list(opened.filter("image.width >= 10").sample_ids)
    return found


@pytest.fixture(scope="module")
def expected(dataset: DatasetStore) -> dict[str, Any]:
    """The answers under a plain root, which other tests compare with the files."""
    return answers(dataset)


def test_every_key_has_a_column_with_its_values(dataset: DatasetStore, expected: Mapping[str, Any]) -> None:
    """SQL gives each key's own value; only names that no column can have are left in the JSON."""
    columns = columns_of(dataset)
    no_column = {"", "nul\0nul", "line\nline", "n" * (MAX_NAME + 1)}
    assert columns.keys() == set(KEYS) - no_column
    for number, row in enumerate(expected["filtered"][:2]):
        assert row[:2] == ("a", f"a{number}")
        assert row[2:] == tuple(1000 * number + KEYS.index(key) for key in columns)
    assert set(expected["filtered"][-1]) == {2}  # of four samples, by a condition on each column
    assert len({name.casefold() for name in columns.values()}) == len(columns)


def test_the_answers_are_those_of_the_files(dataset: DatasetStore, expected: Mapping[str, Any]) -> None:
    """Counts, drops, origins, scores and differences are those of the tables as Arrow reads them."""
    for table in TABLES:
        paths = {key: record_of(dataset, key).tables[table].path for key in dataset.partitions()}
        files = {key: pq.ParquetFile(dataset.store.path_of(path)) for key, path in paths.items()}
        assert dict(expected[table]) == {k: f.metadata.num_rows for k, f in files.items() if f.metadata.num_rows}
    assert expected["published"] == [("a", 1), ("b", 1)]
    assert [(d["sample_id"], d["value"], d["member"]) for d in expected["drops"]] == [
        ("a0", 6, "a0.png"),
        ("b0", 6, "b0.png"),
    ]
    assert [row.dropped for row in expected["origins"] if row.modality == "image"] == ["image_size.width_below_min"]
    assert [row.sample_id for row in expected["places"]] == ["a0"]
    assert expected["content"][0] == png(6, (8, 6))
    assert json.loads(expected["content"][1])["partition"] == KEYS.index("partition")
    assert expected["content"][2] == b"no sample"
    assert expected["selected"] == ["a1", "b1"]


@pytest.mark.parametrize(
    "root",
    [
        *("/".join(names) for names in ROOTS[:3]),
        *(pytest.param("/".join(names), marks=pytest.mark.slow) for names in ROOTS[3:]),
        *(pytest.param(name, marks=pytest.mark.slow) for names in ROOTS for name in names),
    ],
)
def test_a_root_changes_no_answer(dataset: DatasetStore, expected: Any, root: str, tmp_path: Path) -> None:
    """Under each root all answers are equal, beside folders that its wildcards match, and a partition can be rerun."""
    for name in ("br1", "xb", "starX", "qQx", "X", "b", "{a"):
        (tmp_path / name / "data" / "filtered_rows").mkdir(parents=True)
        (tmp_path / name / "data" / "filtered_rows" / "a.parquet").write_bytes(b"another file")
    folder = tmp_path / root
    shutil.copytree(dataset.store.path_of(""), folder / "data")
    moved = DatasetStore(dataset.spec.replace(root=str(folder)))
    assert answers(moved) == expected
    run_partition(moved, "b")


def test_a_name_that_queries_add_is_no_users() -> None:
    """No key, in any case of letters, becomes a column that is reserved or that another differs from by case only."""
    taken: list[str] = []
    for key in (*KEYS, *(key.upper() for key in ADDED), *(key.title() for key in ADDED)):
        name = column_name(key, taken)
        if name is not None:
            assert name.casefold() not in {one.casefold() for one in (*ADDED, *taken)}
            taken.append(name)
    assert "filename" in taken


def test_sql_names_the_tables(dataset: DatasetStore) -> None:
    """`sql` lists the tables and their columns without a query, by an unknown table, and in its help."""
    run = CliRunner()
    chosen = ["sql", "-d", "data", "--root", dataset.spec.root]
    listed = run.invoke(main, chosen)
    assert listed.exit_code == 0, listed.output
    wrong = run.invoke(main, [*chosen, "select * from nowhere"])
    assert wrong.exit_code == 2
    text = run.invoke(main, ["sql", "--help"]).output
    for table in (*TABLES, "published"):
        assert all(table in output for output in (listed.output, wrong.output, text))
    assert "partition, sample_id" in listed.output
