"""Tables in Parquet: sizes in bytes, required columns, equal files, whole samples."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import EncodeError, SchemaMismatchError, SourceError
from mm_assets.rows.parquet import MAX_VALUE, ParquetSink, open_table, read_batches, row_bytes, sample_groups
from mm_assets.rows.schema import DROPPED_SCHEMA, MULTIMODAL_SCHEMA, DatasetSchema, UserColumn
from mm_assets.storage.store import Store

SCHEMA = DatasetSchema(
    user_columns=(
        UserColumn(name="tags", source="tags", type="list<string>"),
        UserColumn(name="a.score", source="a.score", type="double"),
    )
).row_schema()


def make_rows(sizes: list[int], *, per_sample: int = 3) -> pa.RecordBatch:
    """One image row per size, `per_sample` of them in a sample."""
    rng = np.random.default_rng(len(sizes))
    rows = [
        {
            "sample_id": f"s{number // per_sample:04d}",
            "position": number % per_sample,
            "modality": "image",
            "binary_content": rng.bytes(size),
            "source_ref": "{}",
            "tags": ["x", "yy"],
            "a.score": 1.5,
        }
        for number, size in enumerate(sizes)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def write(path: Path, batches: list[pa.RecordBatch], **options: object) -> pq.ParquetFile:
    with ParquetSink(path, SCHEMA, **options) as sink:  # type: ignore[arg-type]  # options vary by test
        for batch in batches:
            sink.write(batch)
    return pq.ParquetFile(path)


def ids_of(table: pa.Table | pa.RecordBatch) -> list[tuple[str, int]]:
    return list(zip(table.column("sample_id").to_pylist(), table.column("position").to_pylist(), strict=True))


def test_round_trip(tmp_path: Path) -> None:
    """What is written is read back, value for value and column for column."""
    batch = make_rows([10, 0, 5000, 3])
    file = write(tmp_path / "t.parquet", [batch])
    back = pa.Table.from_batches(list(read_batches(file, batch_bytes=1 << 20)))
    assert back.equals(pa.Table.from_batches([batch]))
    assert back.schema.equals(SCHEMA)


def test_required_columns_are_required_in_the_file(tmp_path: Path) -> None:
    """Not-null columns are `required` in Parquet's own schema, and all others optional."""
    file = write(tmp_path / "t.parquet", [make_rows([1])])
    levels = {
        file.schema.column(i).path.split(".list")[0]: file.schema.column(i).max_definition_level for i in range(9)
    }
    required = {field.name for field in MULTIMODAL_SCHEMA if not field.nullable}
    assert {name for name, level in levels.items() if level == 0} == required


def test_media_is_stored_as_it_is_and_text_compressed(tmp_path: Path) -> None:
    """Media has no codec, dictionary or statistics; every other column, nested and dotted ones too, has the codec."""
    file = write(tmp_path / "t.parquet", [make_rows([1000, 1000])])
    columns = [file.metadata.row_group(0).column(i) for i in range(file.metadata.num_columns)]
    for column in columns:
        if column.path_in_schema == "binary_content":
            assert column.compression == "UNCOMPRESSED"
            assert not column.has_dictionary_page
            assert not column.is_stats_set
        else:
            assert column.compression == "ZSTD", column.path_in_schema
    assert {c.path_in_schema for c in columns} >= {"tags.list.element", "a.score"}
    assert not next(c for c in columns if c.path_in_schema == "source_ref").has_dictionary_page
    assert next(c for c in columns if c.path_in_schema == "modality").has_dictionary_page


@pytest.mark.parametrize("compression", ["zstd", "snappy", "lz4", "gzip", "none"])
def test_every_codec_can_be_read(tmp_path: Path, compression: str) -> None:
    """Each codec of the declaration writes a file that DuckDB and Arrow read."""
    file = write(tmp_path / "t.parquet", [make_rows([10, 20])], compression=compression)
    assert file.read().num_rows == 2
    with duckdb.connect() as connection:
        query = "select sum(octet_length(binary_content)) from read_parquet(?)"
        assert connection.execute(query, [str(tmp_path / "t.parquet")]).fetchall() == [(30,)]


def test_row_groups_count_bytes_not_rows(tmp_path: Path) -> None:
    """A row group ends with the row that reaches the limit, however large single rows are."""
    file = write(tmp_path / "t.parquet", [make_rows([1000] * 10 + [50_000] + [1000] * 3)], row_group_bytes=4_100)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 4, 3, 3]


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    limit=st.integers(1, 9000),
)
def test_row_groups_do_not_depend_on_batches(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cuts: list[int], limit: int
) -> None:
    """With any batches of rows, the row groups are the same, and none of many rows is over the limit."""
    whole = make_rows(sizes)
    edges = sorted({0, len(sizes), *(min(c, len(sizes)) for c in cuts)})
    parts = [whole.slice(a, b - a) for a, b in itertools.pairwise(edges)]
    folder = tmp_path_factory.mktemp("groups")
    one = write(folder / "one.parquet", [whole], row_group_bytes=limit).metadata
    many = write(folder / "many.parquet", parts, row_group_bytes=limit).metadata
    rows = [one.row_group(i).num_rows for i in range(one.num_row_groups)]
    assert rows == [many.row_group(i).num_rows for i in range(many.num_row_groups)]
    totals, start = row_bytes(whole), 0
    for count in rows:
        assert totals[start : start + count - 1].sum() < limit
        start += count
    assert start == len(sizes)


@pytest.mark.parametrize("sizes", [[0] * 40, [100] * 300, [300_000 + n for n in range(12)], [2 << 20, 0, 5 << 20, 9]])
def test_pages_do_not_depend_on_batches(tmp_path: Path, sizes: list[int]) -> None:
    """With any batches of rows the file has the same bytes, whether a page has many values or one."""
    rows = make_rows(sizes)
    files = [[rows], [rows.slice(n, 1) for n in range(len(sizes))], [rows.slice(0, 3), rows.slice(3)]]
    for number, batches in enumerate(files):
        write(tmp_path / str(number), batches)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_structs_count_by_their_fields() -> None:
    """A struct has the bytes of its fields, so that row groups do not depend on the rows around."""
    fields = [pa.array(["ab", None, "c"]), pa.array([1, 2, 3], pa.int64())]
    column = pa.StructArray.from_arrays(fields, ["text", "number"])
    assert row_bytes(pa.record_batch({"x": column})).tolist() == [10, 8, 9]
    assert row_bytes(pa.record_batch({"x": column}).slice(1)).tolist() == [8, 9]


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    """Writing twice gives byte-identical files."""
    for name in ("a", "b"):
        write(tmp_path / name, [make_rows([100] * 50)], row_group_bytes=1000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_empty_table_has_its_schema(tmp_path: Path) -> None:
    """A table without rows is a file with all columns, which gives no batch."""
    with ParquetSink(tmp_path / "t.parquet", DROPPED_SCHEMA) as sink:
        sink.write(pa.RecordBatch.from_pylist([], schema=DROPPED_SCHEMA))
    file = pq.ParquetFile(tmp_path / "t.parquet")
    assert file.schema_arrow.equals(DROPPED_SCHEMA)
    assert list(read_batches(file, batch_bytes=10)) == []


def test_a_null_in_a_required_column_is_refused(tmp_path: Path) -> None:
    """The message names the column and the row of the table."""
    good, rows = make_rows([1, 1]), make_rows([1, 1]).to_pylist()
    rows[1]["modality"] = None
    bad = pa.RecordBatch.from_pylist(rows, schema=pa.schema([f.with_nullable(True) for f in SCHEMA]))
    bad = pa.RecordBatch.from_arrays(bad.columns, schema=SCHEMA)
    with ParquetSink(tmp_path / "t.parquet", SCHEMA) as sink:
        sink.write(good)
        with pytest.raises(SchemaMismatchError, match="'modality' is null in row 3"):
            sink.write(bad)


def test_other_columns_are_refused(tmp_path: Path) -> None:
    """A batch with other columns, or the same in another order, does not get in."""
    with ParquetSink(tmp_path / "t.parquet", SCHEMA) as sink, pytest.raises(SchemaMismatchError, match="expected"):
        sink.write(make_rows([1]).select(list(reversed(SCHEMA.names))))


def test_a_value_that_no_page_holds_is_refused(tmp_path: Path) -> None:
    """A value near 2 GiB is refused with its column's name, not by a crash of the writer."""
    untouched = mmap.mmap(-1, MAX_VALUE + 1)  # address space only: it is never read
    buffers = [None, pa.py_buffer(np.array([0, MAX_VALUE + 1], np.int64)), pa.py_buffer(untouched)]
    schema = pa.schema([("binary_content", pa.large_binary())])
    large = pa.Array.from_buffers(pa.large_binary(), 1, buffers)
    with (
        ParquetSink(tmp_path / "t.parquet", schema) as sink,
        pytest.raises(EncodeError, match="'binary_content' has 2147418113 bytes"),
    ):
        sink.write(pa.RecordBatch.from_arrays([large], schema=schema))


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    """A table that was not finished cannot be taken for one that was."""

    def fail_midway() -> None:
        with ParquetSink(tmp_path / "t.parquet", SCHEMA, row_group_bytes=1) as sink:
            sink.write(make_rows([1, 2, 3]))
            raise KeyError

    with pytest.raises(KeyError):
        fail_midway()
    assert not (tmp_path / "t.parquet").exists()


def test_row_group_bytes_must_be_positive(tmp_path: Path) -> None:
    """Zero bytes for a row group would never end."""
    with pytest.raises(EncodeError, match="row_group_bytes is 0"):
        ParquetSink(tmp_path / "t.parquet", SCHEMA, row_group_bytes=0)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    group=st.integers(1, 20_000),
    batch_bytes=st.integers(1, 9000),
)
def test_batches_are_bounded_by_bytes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], group: int, batch_bytes: int
) -> None:
    """All rows come in order, and a batch is within its bytes unless it is one row."""
    rows = make_rows(sizes)
    file = write(tmp_path_factory.mktemp("read") / "t.parquet", [rows], row_group_bytes=group)
    batches = list(read_batches(file, batch_bytes=batch_bytes))
    assert pa.Table.from_batches(batches).equals(pa.Table.from_batches([rows]))
    for batch in batches:
        assert batch.num_rows == 1 or row_bytes(batch).sum() <= batch_bytes


def test_batches_of_chosen_columns(tmp_path: Path) -> None:
    """Only the columns asked for are read; one that is not there is named."""
    file = write(tmp_path / "t.parquet", [make_rows([5, 6])])
    (batch,) = read_batches(file, batch_bytes=1 << 20, columns=["position", "sample_id"])
    assert set(batch.schema.names) == {"position", "sample_id"}
    with pytest.raises(SchemaMismatchError, match=r"rows\.parquet: no column 'nope'"):
        list(read_batches(file, batch_bytes=1 << 20, columns=["nope"], name="rows.parquet"))
    with pytest.raises(EncodeError, match="batch_bytes is 0"):
        list(read_batches(file, batch_bytes=0))


def test_batches_of_small_columns_are_not_bounded_by_media(tmp_path: Path) -> None:
    """The bytes of columns that are not read do not make batches smaller."""
    file = write(tmp_path / "t.parquet", [make_rows([10_000] * 50)])
    (batch,) = read_batches(file, batch_bytes=50_000, columns=["sample_id", "position"])
    assert batch.num_rows == 50
    assert len(list(read_batches(file, batch_bytes=50_000))) >= 10


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    """Damaged pages raise `SourceError` with the file's name and the row group, never a crash or wrong rows."""
    path = tmp_path / "t.parquet"
    file = write(path, [make_rows([100] * 20)], row_group_bytes=1000)
    column = file.metadata.row_group(1).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"rows\.parquet: row group 1 cannot be read"):
        list(read_batches(pq.ParquetFile(path), batch_bytes=1 << 20, name="rows.parquet"))


def test_a_local_table_is_read_in_pieces(tmp_path: Path) -> None:
    """Reading small batches of a table holds less than a row group at a time, and nothing afterwards."""
    size = 48 << 20
    write(tmp_path / "t.parquet", [make_rows([size // 96] * 96)], row_group_bytes=size)
    table = open_table(Store(str(tmp_path)), "t.parquet")
    before = most = pa.total_allocated_bytes()
    rows = 0
    for batch in read_batches(table, batch_bytes=1 << 20):
        rows += batch.num_rows
        most = max(most, pa.total_allocated_bytes())
    del batch
    assert rows == 96
    assert most - before < size * 3 // 4
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("root", ["folder", "memory://open-table"])
def test_what_is_not_a_table_is_not_opened(tmp_path: Path, root: str) -> None:
    """A missing file and one that is not Parquet raise `SourceError` with its place, wherever the store is."""
    store = Store(str(tmp_path) if root == "folder" else root)
    store.write_bytes("t.parquet", b"PAR1 and no more of it")
    with pytest.raises(SourceError, match=r"t\.parquet: is not a Parquet file"):
        open_table(store, "t.parquet")
    with pytest.raises(SourceError, match=r"gone\.parquet: cannot be opened"):
        open_table(store, "gone.parquet")


def test_row_bytes_counts_what_is_there() -> None:
    """Text, binary, lists and numbers count by their bytes, null by none, also in a slice."""
    batch = pa.RecordBatch.from_pydict(
        {
            "t": pa.array(["ab", None, "c", ""]),
            "b": pa.array([b"", b"12345", None, b"1"], pa.large_binary()),
            "l": pa.array([["a", "bcd"], [], None, ["", "e"]]),
            "n": pa.array([1, 2, 3, 4], pa.int32()),
            "z": pa.nulls(4),
        }
    )
    assert row_bytes(batch).tolist() == [2 + 0 + 4 + 4, 5 + 4, 1 + 4, 1 + 1 + 4]
    assert row_bytes(batch.slice(1, 2)).tolist() == [9, 5]
    assert row_bytes(pa.Table.from_batches([batch.slice(3, 1), batch.slice(0, 1)])).tolist() == [6, 10]


@settings(deadline=None, max_examples=60)
@given(
    samples=st.lists(st.lists(st.integers(0, 900), min_size=1, max_size=6), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 72), max_size=8),
    batch_bytes=st.integers(1, 5000),
)
def test_sample_groups_split_no_sample(samples: list[list[int]], cuts: list[int], batch_bytes: int) -> None:
    """Whatever the batches, a sample is whole in one table, tables are full but within their bytes, order is kept."""
    rows = [
        {"sample_id": f"s{i}", "position": p, "modality": "image", "binary_content": bytes(size)}
        for i, sizes in enumerate(samples)
        for p, size in enumerate(sizes)
    ]
    whole = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    edges = sorted({0, len(rows), *(min(c, len(rows)) for c in cuts)})
    parts = [whole.slice(a, b - a) for a, b in itertools.pairwise(edges)]
    tables = list(sample_groups(iter(parts), batch_bytes=batch_bytes))
    assert [pair for table in tables for pair in ids_of(table)] == ids_of(whole)
    seen: set[str] = set()
    sizes = []
    for table in tables:
        ids = set(table.column("sample_id").to_pylist())
        assert not ids & seen
        seen |= ids
        sizes.append(int(row_bytes(table).sum()))
        assert sizes[-1] <= batch_bytes or len(ids) == 1
    assert all(a + b > batch_bytes for a, b in itertools.pairwise(sizes))


def test_sample_groups_keep_few_chunks() -> None:
    """Many samples of one batch stay one chunk: grouping slices, it does not scatter."""
    (table,) = sample_groups([make_rows([10] * 300)], batch_bytes=1 << 20)
    assert table.column("sample_id").num_chunks == 1


def test_sample_groups_need_ids() -> None:
    """Rows without `sample_id` cannot be grouped."""
    with pytest.raises(SchemaMismatchError, match="no column 'sample_id'"):
        list(sample_groups([pa.RecordBatch.from_pydict({"a": [1]})], batch_bytes=1))
    assert list(sample_groups([], batch_bytes=1)) == []
    assert list(sample_groups([make_rows([]).slice(0, 0)], batch_bytes=1)) == []
