"""Tests of lists of files as a source: rows, hostile paths, and rejects."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_assets.errors import ShardError, SourceError
from mm_assets.rows.base import row_sources
from mm_assets.rows.columns import RowStream
from mm_assets.rows.from_listing import ListingRows
from mm_assets.rows.schema import DatasetSchema, MemberRules, UserColumn
from mm_assets.rows.source_ref import parse_source_ref
from mm_assets.rows.user_columns import columns_of
from mm_assets.sources.base import open_container
from mm_assets.storage.files import SourceFile


def _no_members() -> Iterator[pa.RecordBatch]:
    return iter(())


def read(path: Path, **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], RowStream]:
    listing = ListingRows(SourceFile(str(path)))
    layout = options.pop("layout", MemberRules())
    columns = options.pop("columns", None) or tuple(
        replace(column, rows="") for column in columns_of(listing.objects(layout=layout), layout, shown=str(path))
    )
    schema = DatasetSchema(user_columns=columns)
    stream = listing.rows(_no_members, layout=layout, schema=schema, **options)
    table = pa.Table.from_batches(list(stream), schema=schema.row_schema())
    table.validate(full=True)
    return table.to_pylist(), stream.rejects().to_pylist(), stream


def write_lines(path: Path, *lines: object) -> Path:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return path


ITEMS = [
    {"sample_id": "a", "path": "img/a.jpg", "score": 0.5, "metadata_json": '{"k": 1}'},
    {"sample_id": "a", "text_content": "hello", "score": 1.0},
    {"sample_id": "b", "position": 4, "source_ref": '{"path": "x.tar", "member": "b.png", "frame_index": 2}'},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_list_becomes_rows(tmp_path: Path, kind: str) -> None:
    """A JSONL and a Parquet list give the same rows: metadata first, paths in the list's folder, user columns."""
    path = tmp_path / f"list.{kind}"
    if kind == "jsonl":
        write_lines(path, *ITEMS)
    else:
        pq.write_table(
            pa.Table.from_pylist(
                ITEMS,
                schema=pa.schema(
                    [
                        ("sample_id", pa.string()),
                        ("path", pa.string()),
                        ("score", pa.float64()),
                        ("metadata_json", pa.string()),
                        ("text_content", pa.string()),
                        ("position", pa.int64()),
                        ("source_ref", pa.string()),
                    ]
                ),
            ),
            path,
        )
    rows, rejects, stream = read(path)
    assert rejects == []
    assert [(r["sample_id"], r["position"], r["modality"], r["score"]) for r in rows] == [
        ("a", -1, "metadata", None),
        ("a", 0, "image", 0.5),
        ("a", 1, "text", 1.0),
        ("b", -1, "metadata", None),
        ("b", 4, "image", None),
    ]
    assert rows[0]["metadata_json"] == '{"k": 1}'
    assert parse_source_ref(rows[1]["source_ref"]).path == f"{tmp_path}/img/a.jpg"
    assert parse_source_ref(rows[4]["source_ref"]).member == "b.png"
    assert parse_source_ref(rows[4]["source_ref"]).frame_index == 2
    assert (stream.counts["members"], stream.counts["samples"], stream.counts["rows"]) == (3, 2, 5)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_ids_and_positions_that_are_numbers(tmp_path: Path, kind: str) -> None:
    """An id may be a whole number of any size, and a position a whole number that pandas wrote as a float."""
    ids, positions = [2**64 - 1, 2**53 + 1, 2**53 + 1], [0.0, 2.0, None]
    path = tmp_path / f"list.{kind}"
    if kind == "jsonl":
        pairs = zip(ids, positions, strict=True)
        write_lines(path, *({"sample_id": i, "position": p, "text_content": "x"} for i, p in pairs))
    else:
        columns = {"sample_id": pa.array(ids, pa.uint64()), "position": positions, "text_content": ["x"] * 3}
        pq.write_table(pa.table(columns), path)
    rows, rejects, _ = read(path)
    assert rejects == []
    found = [(row["sample_id"], row["position"]) for row in rows if row["modality"] == "text"]
    assert found == [("18446744073709551615", 0), ("9007199254740993", 1), ("9007199254740993", 2)]


LISTED = [("sample_id", pa.string()), ("path", pa.string())]
CELLS = st.none() | st.fixed_dictionaries(
    {"bytes": st.none() | st.binary(max_size=4), "path": st.sampled_from([None, "x.png", "dir/x.wav"])}
)


def test_columns_that_json_does_not_know(tmp_path: Path) -> None:
    """Times, durations and decimals of a Parquet list come as text and numbers; bytes are neither, and noted."""
    when = datetime(2024, 1, 2, 3, 4, 5)
    item = {
        "sample_id": "a",
        "path": "a.jpg",
        "when": when,
        "zoned": when.replace(tzinfo=UTC),
        "day": when.date(),
        "clock": when.time(),
        "took": timedelta(seconds=1, microseconds=500),
        "price": Decimal("2.50"),
        "raw": b"x",
    }
    path = tmp_path / "l.parquet"
    pq.write_table(pa.Table.from_pylist([item, {"sample_id": "b", "path": "b.jpg"}]), path)
    rows, rejects, stream = read(path)
    assert rejects == []
    row = rows[1]
    assert (row["when"], row["day"], row["clock"]) == (
        "2024-01-02T03:04:05.000000",
        "2024-01-02",
        "03:04:05.000000",
    )
    assert row["zoned"] == "2024-01-02T03:04:05.000000Z"
    assert (row["took"], row["price"]) == (1.0005, 2.5)
    assert "raw" not in row
    assert "column 'raw'" in stream.notes[0]
    assert rows[3]["when"] is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"language": "en"}, "no_sample_id"),
        ({"path": "/etc/passwd"}, "outside"),
        ({"file_name": ["a.jpg", 7]}, "bad_source"),
        ({"sample_id": 3.0, "path": "a.jpg"}, "no_sample_id"),
        ({"sample_id": True, "path": "a.jpg"}, "no_sample_id"),
        ({"sample_id": "", "path": "a.jpg"}, "no_sample_id"),
        ({"sample_id": "x"}, "no_source"),
        ({"sample_id": "x", "path": "../a.jpg"}, "outside"),
        ({"sample_id": "x", "path": "/etc/passwd"}, "outside"),
        ({"sample_id": "x", "path": "https://b.org/a.jpg"}, "outside"),
        ({"sample_id": "x", "path": "a::file:///etc/passwd"}, "outside"),
        ({"sample_id": "x", "source_ref": '{"path": "/etc/passwd"}'}, "outside"),
        ({"sample_id": "x", "source_ref": '{"path": 3}'}, "bad_source"),
        ({"sample_id": "x", "source_ref": 7}, "bad_source"),
        ({"sample_id": "x", "path": 7}, "bad_source"),
        ({"sample_id": "x", "path": "a.jpg", "position": -1}, "bad_position"),
        ({"sample_id": "x", "path": "a.jpg", "position": True}, "bad_position"),
        ({"sample_id": "x", "path": "a.jpg", "position": 0.5}, "bad_position"),
        ({"sample_id": "x", "path": "a.jpg", "modality": 1}, "bad_modality"),
        ({"sample_id": "x", "path": "a.jpg", "modality": ["image"]}, "bad_modality"),
        ({"sample_id": "x", "path": "a.jpg", "modality": "picture"}, "bad_modality"),
        ({"sample_id": "x", "path": "a.jpg", "modality": "text"}, "no_text"),
        ({"sample_id": "x", "text_content": 4}, "bad_text"),
        ({"sample_id": "x", "path": "a.jpg", "metadata_json": "{"}, "bad_json"),
        ([1], "json_not_an_object"),
        (b"\xff", "not_utf8"),
        (b"{", "bad_json"),
        (b'{"sample_id": "x", "a": "' + b"y" * 2000 + b'"}', "too_large"),
    ],
)
def test_bad_lines_are_rejected(tmp_path: Path, line: object, reason: str) -> None:
    """A line that cannot be a row is named in the rejects with its number; its neighbours are rows."""
    good = {"sample_id": "good", "path": "g.jpg"}
    path = write_lines(tmp_path / "l.jsonl", good, line, {"sample_id": "last", "path": "l.jpg"})
    rows, rejects, stream = read(path, layout=MemberRules(max_text_bytes=1000), columns=())
    assert [r["sample_id"] for r in rows if r["position"] >= 0 and r["sample_id"] != "a"] == ["good", "last"]
    assert [r["reason"] for r in rejects] == [reason]
    assert "row 1 " in rejects[0]["detail"]
    assert stream.counts["members"] == 3


ENCODED = [
    {"sample_id": "Ċਊ", "text_content": "Ü and \u0a0a\u0a00\u000a\u010a"},  # characters with the bytes of a line end
    {"sample_id": "b", "text_content": "grün"},
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_list_in_another_unicode_encoding(tmp_path: Path, encoding: str) -> None:
    """A list in UTF-16 or UTF-32, with a byte order mark or without, gives the rows of UTF-8, and is noted."""
    lines = [json.dumps(row, ensure_ascii=False) for row in ENCODED]
    path = tmp_path / "l.jsonl"
    path.write_bytes(
        "\n".join([lines[0], " ", lines[1], "††", "y" * 300, "["]).encode(encoding)[: -1 if "16" in encoding else None]
    )
    rows, rejects, stream = read(path, layout=MemberRules(max_text_bytes=800 if "32" in encoding else 400), columns=())
    assert [(r["sample_id"], r["text_content"]) for r in rows if r["modality"] == "text"] == [
        tuple(row.values()) for row in ENCODED
    ]
    too_large = "bad_json" if encoding.startswith("utf-8") else "too_large"
    assert [r["reason"] for r in rejects] == ["bad_json", too_large, "not_utf8" if "16" in encoding else "bad_json"]
    assert "row 4 of the list" in rejects[2]["detail"]
    name = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}.get(encoding, encoding)
    expected = {} if name.startswith("utf-8") else {f"encoding.{name}": 3 if "16" in name else 4}
    assert {key: count for key, count in stream.counts.items() if key.startswith("encoding.")} == expected
    assert any(f"read as {name}" in note for note in stream.notes) == bool(expected)


def test_a_list_in_a_declared_encoding(tmp_path: Path) -> None:
    """Lines that are not UTF-8 are read as declared, else they are rejected by number with what to do."""
    lines = [json.dumps(row, ensure_ascii=False) for row in ({"sample_id": "表", "text_content": "能力"}, ENCODED[1])]
    path = write_lines(tmp_path / "l.jsonl", lines[0].encode("cp932"), lines[1].encode(), b"\x81")
    rows, rejects, stream = read(path, layout=MemberRules(encoding="cp932"), columns=())
    assert [r["text_content"] for r in rows if r["modality"] == "text"] == ["能力", "grün"]
    assert [(r["reason"], r["detail"][:32]) for r in rejects] == [("not_utf8", "row 2 of the list: is not cp932 ")]
    assert stream.counts["encoding.cp932"] == 1
    rows, rejects, _ = read(path, columns=())
    assert [r["text_content"] for r in rows if r["modality"] == "text"] == ["grün"]
    assert [r["reason"] for r in rejects] == ["not_utf8", "not_utf8"]
    assert rejects[0]["detail"].startswith("row 0 of the list: is not UTF-8 at byte")
    assert rejects[0]["detail"].endswith("name its encoding as samples.encoding, or convert it to UTF-8")


def test_allowed_prefixes(tmp_path: Path) -> None:
    """What the declaration allows besides the list's folder may be named."""
    path = write_lines(tmp_path / "l.jsonl", {"sample_id": "x", "path": "https://a.org/i.png"})
    rows, rejects, _ = read(path, layout=MemberRules(allow_references=True, allowed_references=("https://a.org/",)))
    assert rejects == []
    assert rows[1]["modality"] == "image"


def test_samples_and_places_are_unique(tmp_path: Path) -> None:
    """A sample that comes again, a second metadata row and a taken position are rejected."""
    path = write_lines(
        tmp_path / "l.jsonl",
        {"sample_id": "a", "modality": "metadata", "metadata_json": {"k": 1}},
        {"sample_id": "a", "modality": "metadata"},
        {"sample_id": "a", "path": "1.jpg", "position": 3},
        {"sample_id": "a", "path": "2.jpg", "position": 3},
        {"sample_id": "b", "path": "3.jpg"},
        {"sample_id": "a", "path": "4.jpg"},
    )
    rows, rejects, _ = read(path)
    assert [r["reason"] for r in rejects] == ["second_metadata", "position_taken", "duplicate_sample_id"]
    assert [(r["sample_id"], r["position"]) for r in rows] == [("a", -1), ("a", 3), ("b", -1), ("b", 0)]
    assert rows[0]["metadata_json"] == '{"k":1}'


def test_broken_lists(tmp_path: Path) -> None:
    """A damaged Parquet list and one without a required column are source errors."""
    path = tmp_path / "l.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(SourceError, match="Parquet"):
        read(path, columns=())
    good = write_lines(tmp_path / "l.jsonl", {"sample_id": "x", "path": "i.png"})
    with pytest.raises(SourceError, match="'p'"):
        read(good, columns=(UserColumn(name="p", source="p", type="string", rows="", required=True),))


def test_a_locator_as_an_object_is_a_locator(tmp_path: Path) -> None:
    """A Parquet list may have locators as a struct, also with values that JSON does not have."""
    refs = pa.array([{"path": "a.jpg", "seen": datetime(2026, 1, 1, tzinfo=UTC)}, {"path": "", "seen": None}])
    path = tmp_path / "list.parquet"
    pq.write_table(pa.table({"sample_id": ["a", "b"], "source_ref": refs}), path)
    rows, rejects, _ = read(path)
    found = [parse_source_ref(row["source_ref"]).path for row in rows if row["modality"] != "metadata"]
    assert found == [str(tmp_path / "a.jpg")]
    assert [(reject["sample_id"], reject["reason"]) for reject in rejects] == [("b", "bad_source")]


FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_table_is_a_list(tmp_path: Path, kind: str) -> None:
    """A row table of a dataset gives its rows again, and its structs become no columns."""
    rows, _, _ = read(write_lines(tmp_path / "list.jsonl", *ITEMS))
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows, DatasetSchema().row_schema()), path)
    else:
        write_lines(path, *rows)
    again, rejects, stream = read(path)
    assert not rejects
    assert not any(name.startswith("user_") for row in again for name in row)
    assert "kept.no_column" not in stream.counts
    names = DatasetSchema().row_schema().names
    assert [[row[name] for name in names] for row in again] == [[row[name] for name in names] for row in rows]


@pytest.mark.parametrize("value", ["web", {"uri": "https://a.org"}])
def test_a_column_source_of_a_list_is_a_user_column(tmp_path: Path, value: object) -> None:
    """A list's own column `source` is the user column `user_source`, and the row has its struct as well."""
    (_, row), _, _ = read(write_lines(tmp_path / "list.jsonl", {"sample_id": "a", "path": "a.jpg", "source": value}))
    assert row["user_source"] == (value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
    assert row["source"]["uri"] == f"{tmp_path}/a.jpg"


def test_bytes_inside_a_list_are_its_items(tmp_path: Path) -> None:
    """Bytes are the item of their row, before the file that it names; a cell with a path alone names that file."""
    cells = [{"bytes": b"x", "path": "x.png"}, {"bytes": None, "path": "b.png"}, {"bytes": b"", "path": None}, None]
    columns = {
        "sample_id": ["a", "b", "c", "d"],
        "path": ["a.webp", None, None, "d.png"],
        "text_content": [None, "a text", None, None],
        "image": pa.array(cells, FILE),
        "score": [1, 2, 3, 4],
    }
    path = tmp_path / "l.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=1)
    rows, rejects, stream = read(path)
    assert (rejects, stream.notes) == ([], [])
    items = [row for row in rows if row["position"] >= 0]
    refs = [parse_source_ref(row["source_ref"]) for row in items]
    assert [(row["sample_id"], row["position"], row["modality"], row["content_type"]) for row in items] == [
        ("a", 0, "image", "image/webp"),
        ("b", 0, "text", "text/plain"),
        ("b", 1, "image", "image/png"),
        ("c", 0, "binary", None),
        ("d", 0, "image", "image/png"),
    ]
    here = str(tmp_path)
    assert [(ref.path, ref.member) for ref in refs] == [
        (f"{here}/l.parquet", "l/00000000.png"),
        (None, None),
        (f"{here}/b.png", None),
        (f"{here}/l.parquet", "l/00000002.bin"),
        (f"{here}/d.png", None),
    ]
    assert [row["score"] for row in items] == [1, 2, 2, 3, 4]


def test_several_cells_of_a_row_are_several_items(tmp_path: Path) -> None:
    """Cells of several columns and of lists follow each other; one whose place or modality is taken is a reject."""
    lists = [[{"bytes": b"1", "path": "1.png"}, None, {"bytes": b"2", "path": "2.jpg"}], None, None]
    columns = {
        "sample_id": ["a", "b", "c"],
        "path": pa.nulls(3, pa.string()),
        "position": [None, 3, None],
        "modality": [None, None, "metadata"],
        "images": pa.array(lists, pa.list_(FILE)),
        "wav": [b"3", b"4", b"5"],
        "binary_content": [None, b"6", None],
    }
    path = tmp_path / "l.parquet"
    pq.write_table(pa.table(columns), path)
    rows, rejects, _ = read(path)
    items = [(row["sample_id"], row["position"], row["modality"]) for row in rows if row["position"] >= 0]
    assert items == [("a", 0, "image"), ("a", 1, "image"), ("a", 2, "audio"), ("b", 3, "audio"), ("b", 3, "binary")]
    assert [(r["reason"], r["sample_id"], r["member"]) for r in rejects] == [("bad_modality", "c", "l/00000002.wav")]


def test_columns_of_other_bytes_are_named(tmp_path: Path) -> None:
    """Plain bytes in a column that is not called as media are not an item, and a note names the column."""
    path = tmp_path / "l.parquet"
    table = {"sample_id": ["a", "b"], "path": ["a.png", None], "digest": [b"1", b"2"], "jpg": [None, None]}
    pq.write_table(pa.table(table, schema=pa.schema([*LISTED, ("digest", pa.binary()), ("jpg", pa.binary())])), path)
    rows, rejects, stream = read(path)
    assert [parse_source_ref(row["source_ref"]).path for row in rows if row["position"] >= 0] == [f"{tmp_path}/a.png"]
    assert [(reject["reason"], reject["sample_id"]) for reject in rejects] == [("no_source", "b")]
    assert "the bytes in column 'digest' are not read" in stream.notes[0]


@pytest.mark.nightly_examples(10_000)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_cell_is_read_from_its_locator(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever nulls, empty cells, lists and row groups: each cell is one item, whose locator gives its bytes."""
    rows = st.lists(st.tuples(CELLS, st.none() | st.lists(CELLS, max_size=3)), min_size=1, max_size=9)
    drawn = data.draw(rows)
    columns = {
        "sample_id": [f"{n // 2}" for n in range(len(drawn))],
        "path": pa.nulls(len(drawn), pa.string()),
        "image": pa.array([cell for cell, _ in drawn], FILE),
        "more": pa.array([cells for _, cells in drawn], pa.list_(FILE)),
    }
    path = tmp_path / "l.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=data.draw(st.integers(1, 4)))
    found, rejects, _ = read(path, columns=())
    source = open_container(SourceFile(str(path)))
    contents = {m.member: content for m, content in source.payloads(wanted=lambda _: True, max_bytes=9999)}
    cells = [cell for one, many in drawn for cell in (one, *(many or ())) if cell is not None]
    refs = [parse_source_ref(row["source_ref"]) for row in found if row["position"] >= 0]
    outside = [f"{tmp_path}/{cell['path']}" for cell in cells if cell["bytes"] is None and cell["path"]]
    assert [ref.path for ref in refs if ref.member is None] == outside
    inside = [cell["bytes"] for cell in cells if cell["bytes"] is not None]
    assert [contents[ref.member or ""] for ref in refs if ref.member is not None] == inside
    assert {reject["reason"] for reject in rejects} <= {"no_source"}


def test_values_that_python_cannot_hold_refuse_the_list(tmp_path: Path) -> None:
    """A text that is not UTF-8 is an error of this list, and of no other."""
    path = tmp_path / "l.parquet"
    column = pa.array([b"caf\xe9", b"x"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"sample_id": ["a", "b"], "path": ["a.png", "b.png"], "value": column}), path)
    with pytest.raises(SourceError, match="is not a readable Parquet list"):
        read(path)
    with SourceFile(str(path)) as file, pytest.raises(SourceError, match="is not a readable Parquet list"):
        list(ListingRows(file).objects(layout=MemberRules()))


# -- tables with a row per sample

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6) | st.sampled_from(["a.jpg", "in/b.wav", "k", "1"])


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes rows as CSV, JSONL or Parquet, by the suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        write_lines(path, *rows)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def items(rows: list[dict[str, Any]], folder: Path) -> list[tuple[str, str]]:
    """The id of each content row, and its text or the path of its file."""
    found = []
    for row in rows:
        if row["position"] >= 0:
            ref = row["source_ref"] and parse_source_ref(row["source_ref"]).path
            found.append((row["sample_id"], row["text_content"] or ref.removeprefix(f"{folder}/")))
    return found


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"file_name": "in/a.b.jpg", "text": 'x, "y"\nz'}, [("in/a.b", 'x, "y"\nz'), ("in/a.b", "in/a.b.jpg")]),
        ({"left_file_name": "a.jpg", "right_file_name": "b.jpg", "n": "1"}, [("a", "a.jpg"), ("a", "b.jpg")]),
        ({"id": "k", "image": "a.jpg", "caption": "c"}, [("k", "c"), ("k", "a.jpg")]),
        ({"key": "k", "filepath": "a.wav", "url": "https://a.org/x"}, [("k", "a.wav")]),
        ({"path": "a.jpg", "image": "no", "audio": "no"}, [("a", "a.jpg")]),
        ({"sample_id": "k", "file_name": "a.jpg", "text": "a column"}, [("k", "a.jpg")]),
        ({"text": "alone"}, [("t/00000000", "alone")]),
    ],
)
def test_a_row_may_be_a_sample(
    tmp_path: Path, suffix: str, row: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    """Files, text and id are in the columns that other tools call so, in every format of table."""
    rows, rejects, _ = read(table(tmp_path / f"t{suffix}", [row]))
    assert rejects == []
    assert items(rows, tmp_path) == expected


@pytest.mark.nightly_examples(10_000)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.fixed_dictionaries({"id": TEXTS, "file_name": TEXTS, "text": TEXTS}), min_size=1, max_size=4))
def test_any_table_has_the_same_rows_in_every_format(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """Whatever the texts of ids, paths and captions are, CSV, TSV, JSONL and Parquet give the same rows and rejects."""
    found = []
    for suffix in (".csv", ".tsv", ".jsonl", ".parquet"):
        read_rows, rejects, _ = read(table(tmp_path / f"t{suffix}", rows))
        reasons = [(reject["reason"], reject["sample_id"]) for reject in rejects]
        found.append((items(read_rows, tmp_path), reasons))
    assert found == [found[0]] * 4


def test_ids_of_tables_in_several_folders_differ(tmp_path: Path) -> None:
    """The tables of two splits name files alike: an id that follows from a path has that of the table's folder."""
    ids = []
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        path = table(tmp_path / split / "metadata.csv", [{"file_name": "in/a.jpg"}])
        (rows_of,) = row_sources([SourceFile(str(path))], shards=str(tmp_path))
        layout, schema = MemberRules(), DatasetSchema()
        stream = rows_of.rows(_no_members, layout=layout, schema=schema, grouped=False, batch_bytes=1 << 20)
        ids += [sample_id for batch in stream for sample_id in batch.column("sample_id").to_pylist()]
    assert ids == ["train/in/a"] * 2 + ["test/in/a"] * 2


def test_urls_are_followed_only_where_they_are_allowed(tmp_path: Path) -> None:
    """A table of LAION names URLs, which the setting has to allow."""
    path = table(tmp_path / "t.parquet", [{"URL": "https://a.org/x.jpg?w=1", "TEXT": "a cat"}])
    rows, rejects, _ = read(path)
    assert (items(rows, tmp_path), [r["reason"] for r in rejects]) == ([("https://a.org/x", "a cat")], ["outside"])
    layout = MemberRules(allow_references=True, allowed_references=("https://a.org",))
    rows, rejects, _ = read(path, layout=layout)
    assert rejects == []
    assert items(rows, tmp_path)[1] == ("https://a.org/x", "https://a.org/x.jpg?w=1")


def test_several_columns_that_may_name_the_file_name_none(tmp_path: Path) -> None:
    """Of two candidates none is taken: the row is in the rejects unless it has a text."""
    rows, rejects, _ = read(table(tmp_path / "t.csv", [{"image": "a.jpg", "audio": "a.wav"}]))
    assert (rows, [r["reason"] for r in rejects]) == ([], ["no_sample_id"])


def test_numbers_of_csv_are_columns_of_numbers(tmp_path: Path) -> None:
    """A column of CSV has numbers if all of its values are; ids and texts stay as they are written."""
    rows, _, _ = read(
        table(
            tmp_path / "t.csv",
            [
                {"id": "007", "file_name": "a.jpg", "score": "1", "zip": "01234", "text": "5"},
                {"id": "8", "file_name": "b.jpg", "score": "2.5e1", "zip": "99", "text": "6"},
                {"id": "9", "file_name": "c.jpg", "score": "", "zip": "1", "text": "7"},
            ],
        )
    )
    found = {row["sample_id"]: (row["score"], row["zip"]) for row in rows if row["position"] == 1}
    assert found == {"007": (1.0, "01234"), "8": (25.0, "99"), "9": (None, "1")}
    assert [row["text_content"] for row in rows if row["text_content"]] == ["5", "6", "7"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"x.jpg,1,2", "bad_csv"),
        (b"\xff.jpg,1", "not_utf8"),
        (b"y" * 2000 + b".jpg,1", "too_large"),
        (b'"' + b"y\n" * 1500 + b'",1', "too_large"),
    ],
)
def test_bad_rows_of_csv_are_rejected(tmp_path: Path, line: bytes, reason: str) -> None:
    """A row that cannot be read is named in the rejects, and those before and after it are rows."""
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbffile_name,score\r\na.jpg,1\r\n" + line + b"\r\n\r\nz.jpg,2\r\n")
    rows, rejects, _ = read(path, layout=MemberRules(max_text_bytes=1000))
    found = [sample_id for sample_id, _ in items(rows, tmp_path)]
    assert (found[0], found[-1]) == ("a", "z")
    assert rejects[0]["reason"] == reason


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_csv_of_a_spreadsheet_is_read(tmp_path: Path, encoding: str) -> None:
    """A byte order mark shows UTF-16, as spreadsheets write it, and belongs to no name of a column."""
    path = tmp_path / "t.csv"
    path.write_bytes('file_name,text\r\na.jpg,"é\n"\r\n'.encode(encoding))
    rows, rejects, _ = read(path)
    assert rejects == []
    assert items(rows, tmp_path) == [("a", "é\n"), ("a", "a.jpg")]


@pytest.mark.parametrize("head", [b"a,b,a\n1,2,3", b"\xff,b\n1,2"])
def test_a_csv_without_names_of_columns_is_refused(tmp_path: Path, head: bytes) -> None:
    """A first row that cannot name the columns fails the shard, which is named."""
    path = tmp_path / "t.csv"
    path.write_bytes(head)
    with pytest.raises(ShardError, match="columns"):
        read(path, columns=(UserColumn(name="b", source="b", type="string"),))
