"""What JSON and texts of any kind become: producer and checks agree on each, and nothing else of its sample is lost."""

import codecs
import json
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_assets.checks.context import CheckContext, TableFile
from mm_assets.checks.runner import run_checks
from mm_assets.pipeline.chain import ROWS
from mm_assets.rows.base import RowSource
from mm_assets.rows.from_listing import ListingRows
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.schema import REJECTS_SCHEMA, DatasetSchema, MemberRules
from mm_assets.rows.user_columns import columns_of
from mm_assets.sources.base import index_members, open_container
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA
from mm_assets.sources.text_members import parse_object
from mm_assets.storage.files import SourceFile
from mm_assets.storage.store import Store

from ..json_documents import documents, exact_value, rejection
from .conftest import publish_table, write_tar

MANY = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))  # of some dozen values each
pytestmark = pytest.mark.nightly_examples(10_000)


class Made(NamedTuple):
    """What the producer made of a file, and the checks that did not hold."""

    rows: list[dict[str, Any]]
    rejects: list[dict[str, Any]]
    failed: dict[str, Any]


def made_of(folder: Path, source: SourceFile, layout: MemberRules, *, is_list: bool = False) -> Made:
    """The rows of a shard or list with columns as registration decides them, judged by every check of `rows`."""
    store = Store(str(folder / "store"))
    containers = [] if is_list else [open_container(source)]
    index = [batch for container in containers for batch in index_members(container)]
    rows_of: RowSource = MemberRows(containers) if containers else ListingRows(source)

    def stream(schema: DatasetSchema) -> Any:
        return rows_of.rows(lambda: iter(index), layout=layout, schema=schema)

    if isinstance(rows_of, ListingRows):
        columns = columns_of(rows_of.objects(layout=layout), layout, shown="list")
    else:
        texts = [text for batch in stream(DatasetSchema()) for text in batch.column("metadata_json").to_pylist()]
        columns = columns_of((parse_object(text).value for text in texts if text is not None), layout, shown="tar")
    schema = DatasetSchema(user_columns=columns)
    found = stream(schema)
    batches = list(found)
    publish_table(store, "raw_shards", MEMBER_INDEX_SCHEMA, index)
    publish_table(store, "rows", schema.row_schema(), batches)
    publish_table(store, "rejects", REJECTS_SCHEMA, found.rejects().to_batches())
    tables = [table for stage in ROWS.lineage for table in stage.tables]
    context = CheckContext(
        asset=ROWS.name,
        store=store,
        tables={table.name: TableFile(path=f"{table.name}/p.parquet", schema=table.schema(schema)) for table in tables},
        own_tables=tuple(table.name for table in ROWS.tables),
        shards=containers,
        listings=[] if containers else [rows_of],
        layout=layout,
        schema=schema,
    )
    rows = pa.Table.from_batches(batches, schema.row_schema()).to_pylist()
    failed = {outcome.name: outcome.violations for outcome in run_checks(context) if not outcome.passed}
    return Made(rows, found.rejects().to_pylist(), failed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all examples use one after the other."""
    return tmp_path_factory.mktemp("texts")


def from_tar(folder: Path, members: Sequence[tuple[str, bytes]], layout: MemberRules) -> Made:
    with SourceFile(str(write_tar(folder / "s.tar", members))) as source:
        return made_of(folder, source, layout)


def check_json(texts: Sequence[tuple[str | None, str]]) -> None:
    """Stored JSON is its source but for what is documented, and DuckDB reads all of it."""
    for stored, source in texts:
        assert stored is not None
        assert exact_value(stored) == exact_value(source)
    table = pa.table({"j": pa.array([stored for stored, _ in texts], pa.string())})
    query = (
        "select j->>'a', json_extract(j, '$.texts[0]'), json_keys(j), json_type(j, '$.b') from t where json_valid(j)"
    )
    with duckdb.connect() as connection:
        connection.register("t", table)
        assert len(connection.execute(query).fetchall()) == len(texts)


KEYS = ("a", "b", "c", "texts", "images", "f", "g", "id")


@MANY
@given(texts=st.lists(documents(*KEYS), min_size=1, max_size=25))
def test_json_of_samples(folder: Path, texts: list[str]) -> None:
    """Any JSON of a sample is stored or rejected with a reason, its caption stays, and no check finds fault."""
    members = [(f"{n}.json", text.encode()) for n, text in enumerate(texts)]
    members += [(f"{n}.txt", b"a caption") for n in range(len(texts))]
    layout = MemberRules(per_text_fields=("f",), per_image_fields=("g",), sample_id_field="id")
    made = from_tar(folder, members, layout)
    assert made.failed == {}
    stored = {row["source_ref"]: row["metadata_json"] for row in made.rows if row["metadata_json"] is not None}
    by_member = {json.loads(ref)["member"]: text for ref, text in stored.items()}
    rejected = {row["member"]: row for row in made.rejects}
    kept = []
    for n, text in enumerate(texts):
        name = f"{n}.json"
        assert (name in by_member) != (name in rejected)
        reason = rejection(text)
        if name in by_member:
            assert reason is None
            kept.append((by_member[name], text))
            if not any(word in text for word in ("NaN", "Infinity", "\\ud", "\\uD")):
                assert by_member[name] == text
        elif rejected[name]["reason"] != "duplicate_sample_id":
            is_object = reason is None and isinstance(json.loads(text), dict)
            assert not is_object
            assert rejected[name]["reason"] == ("json_not_an_object" if reason is None else "bad_json")
            assert (reason or "expected an object") in rejected[name]["detail"]
            assert [r["text_content"] for r in made.rows if r["sample_id"] == str(n) and r["position"] >= 0] == [
                "a caption"
            ]
    check_json(kept)


@MANY
@given(texts=st.lists(st.tuples(documents(*KEYS), st.booleans()), min_size=1, max_size=25))
def test_json_in_lists(folder: Path, texts: list[tuple[str, bool]]) -> None:
    """The JSON that a line of a list has for its sample, as an object or as text, is stored or the line is rejected."""
    path = folder / "l.jsonl"
    lines, sources = [], {}
    for n, (text, is_text) in enumerate(texts):
        source = json.dumps(text) if is_text else text.replace("\n", " ").replace("\r", " ")
        head = f'{{"sample_id": "{n}", "text_content": "caption", "score": [NaN, {n}], "metadata_json": '
        lines.append(f"{head}{source}}}\n")
        sources[str(n)] = text if is_text else source, lines[-1], is_text
    path.write_text("".join(lines), encoding="utf-8")
    with SourceFile(str(path)) as file:
        made = made_of(folder, file, MemberRules(), is_list=True)
    assert made.failed == {}
    kept = [
        (row["metadata_json"], sources[row["sample_id"]][0])
        for row in made.rows
        if row["modality"] == "metadata" and row["metadata_json"] is not None
    ]
    check_json(kept)
    ids = {row["sample_id"] for row in made.rows}
    rejected = [int(row["detail"].split()[1]) for row in made.rejects]
    assert sorted([*map(int, ids), *rejected]) == list(range(len(texts)))
    for number in rejected:
        source, line, is_text = sources[str(number)]
        value = None if rejection(source) else json.loads(source)
        assert rejection(line) or rejection(source) or (is_text and not isinstance(value, dict)) or value is not None


ENCODINGS = (
    *("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"),
    *(
        "cp1252",
        "cp1251",
        "cp932",
        "gb18030",
        "euc_kr",
        "iso2022_jp",
        "utf-7",
        "hz",
        "cp037",
        "latin-1",
        "shift_jisx0213",
    ),
)
DECLARED = ("auto", "auto", "utf-8", "utf-16", "utf-32", "utf-16-le", "cp1252", "same", "same", "same")
BOMS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
WRITTEN = st.one_of(
    st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=12),
    st.sampled_from(
        ["a black cat", "a\0b", "nul \0 inside", "\0", "先生と犬", "Чёрная кошка", "café “noir”", "一", "x"]
    ),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
)


class Drawn(NamedTuple):
    """A text as some program wrote it."""

    text: str
    encoding: str
    has_bom: bool

    @property
    def payload(self) -> bytes | None:
        """Its bytes; None where the encoding does not have its characters."""
        try:
            content = self.text.encode(self.encoding)
            is_exact = content.decode(self.encoding) == self.text
        except UnicodeError:
            return None
        return (BOMS.get(self.encoding, b"") if self.has_bom else b"") + content if is_exact else None


def other_readings(drawn: Drawn) -> Iterator[str]:
    """The texts that the same bytes are in UTF-8 and in the Unicode encodings, where nothing shows which is meant."""
    for encoding in BOMS:
        for payload in (drawn.payload, drawn.payload.removeprefix(BOMS[encoding])):
            try:
                yield payload.decode(encoding)
            except UnicodeError:
                continue


def is_certain(drawn: Drawn, declared: str) -> bool:
    """Whether the documentation promises this text as it was written."""
    content, own = drawn.payload, BOMS.get(drawn.encoding)
    if not content or drawn.text.startswith("\ufeff"):
        return content == b""
    if own is not None and content.startswith(own) and drawn.has_bom:
        return not (drawn.encoding == "utf-16-le" and drawn.text.startswith("\0"))  # else the mark of UTF-32
    if content.startswith(tuple(BOMS.values())):
        return False
    if drawn.encoding == "utf-8":
        if declared == "auto":
            return 3 * content.count(0) < len(content) or len(content) % 2 == 1
        return declared in ("utf-8", "cp1252", "cp1251", "cp932", "gb18030") and 0 not in content
    if declared == drawn.encoding:
        if declared in ("iso2022_jp", "utf-7", "hz", "cp037") or own is not None:
            return True
        return not any(True for _ in other_readings(drawn))
    if declared == "auto" and own is not None:
        return drawn.text.isascii() and drawn.text.isprintable()
    return declared == drawn.encoding[:6] and drawn.text.isascii() and drawn.text.isprintable()


@MANY
@given(
    drawn=st.lists(
        st.builds(Drawn, WRITTEN, st.sampled_from(ENCODINGS), st.booleans()).filter(lambda d: d.payload is not None),
        min_size=1,
        max_size=40,
    ),
    declared=st.sampled_from(DECLARED),
)
def test_texts_in_any_encoding(folder: Path, drawn: list[Drawn], declared: str) -> None:
    """Any text is read as it was written, or as its bytes are in a Unicode encoding, or rejected with what to do."""
    if declared == "same":
        declared = drawn[0].encoding
    members = [(f"{n}.txt", one.payload) for n, one in enumerate(drawn)]
    members += [(f"{n}.jpg", b"a picture") for n in range(len(drawn))]
    made = from_tar(folder, members, MemberRules(encoding=declared))
    assert made.failed == {}
    texts = {row["sample_id"]: row for row in made.rows if row["modality"] == "text"}
    rejects = {row["member"]: row for row in made.rejects}
    assert sum(row["modality"] == "image" for row in made.rows) == len(drawn)
    for n, one in enumerate(drawn):
        reject, row = rejects.get(f"{n}.txt"), texts.get(str(n))
        assert (reject is None) != (row is None)
        if reject is not None:
            assert reject["reason"] == "not_utf8"
            assert "name its encoding as samples.encoding" in reject["detail"]
            assert not is_certain(one, declared)
        elif is_certain(one, declared):
            assert row["text_content"] == one.text
        else:
            _, _, charset = row["content_type"].partition("; charset=")
            known = {one.text, one.text.removeprefix("\ufeff"), *other_readings(one)}
            as_declared = one.payload.decode(declared, "replace") if declared != "auto" else None
            assert row["text_content"] in known or (charset == declared and row["text_content"] == as_declared)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("declared", ["auto", "same", "without order"])
def test_ascii_in_utf16_without_a_mark(tmp_path: Path, encoding: str, declared: str) -> None:
    """ASCII in UTF-16 and UTF-32 without a byte order mark is read as such, as a caption and as JSON, and passes."""
    members = [("0.txt", "a black cat".encode(encoding)), ("0.json", '{"title": "cat"}'.encode(encoding))]
    given = {"auto": "auto", "same": encoding, "without order": encoding[:6]}[declared]
    made = from_tar(tmp_path, members, MemberRules(encoding=given))
    assert made.failed == {}
    assert made.rejects == []
    head, row = made.rows
    assert (head["title"], head["content_type"]) == ("cat", f"application/json; charset={encoding}")
    assert (row["text_content"], row["content_type"]) == ("a black cat", f"text/plain; charset={encoding}")


def test_values_of_parquet_become_json(tmp_path: Path) -> None:
    """NaN, infinities, dates and texts with NULs of a Parquet file are JSON and text of its samples, as documented."""
    columns = {
        "jpg": [b"\xff\xd8\xff", b"\xff\xd8\xff"],
        "text": ["a\0", "nul \0\0"],
        "score": [float("nan"), 0.5],
        "more": [{"on": date(2024, 5, 1), "x": [float("-inf"), 1.5]}, None],
    }
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path)
    with SourceFile(str(path)) as file:
        made = made_of(tmp_path, file, MemberRules())
    assert made.failed == {}
    assert made.rejects == []
    heads = [row for row in made.rows if row["modality"] == "metadata"]
    assert heads[0]["metadata_json"] == '{"score":null,"more":{"on":"2024-05-01","x":[null,1.5]}}'
    assert [head["score"] for head in heads] == [None, 0.5]
    assert [row["text_content"] for row in made.rows if row["modality"] == "text"] == columns["text"]


def test_a_struct_of_a_parquet_list_becomes_json(tmp_path: Path) -> None:
    """The `metadata_json` of a Parquet list may be a struct with values that JSON does not have."""
    value = {"on": date(2024, 5, 1), "price": Decimal("1.50"), "x": float("nan"), "raw": b"ab"}
    columns = {"sample_id": ["a"], "text_content": ["t"], "metadata_json": [value], "score": [float("nan")]}
    path = tmp_path / "list.parquet"
    pq.write_table(pa.table(columns), path)
    with SourceFile(str(path)) as file:
        made = made_of(tmp_path, file, MemberRules(), is_list=True)
    assert made.failed == {}
    assert made.rows[0]["metadata_json"] == '{"on":"2024-05-01","price":1.5,"x":null,"raw":"YWI="}'
