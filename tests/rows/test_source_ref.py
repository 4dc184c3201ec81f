"""Tests of the locator: round trips, hostile values, bulk parsing, pandas."""

import contextlib
import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import EncodeError, SchemaMismatchError, SourceError
from mm_assets.rows.schema import MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import (
    SourceRef,
    SourceRefWriter,
    build_source_ref,
    from_pandas,
    is_allowed_reference,
    parse_source_ref,
    to_pandas,
    with_parsed_source_ref_columns,
)

names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=20)
offsets = st.integers(0, 2**62 - 1)


@st.composite
def refs(draw: st.DrawFn) -> SourceRef:
    offset = draw(st.none() | offsets)
    return SourceRef(
        draw(names),
        draw(st.none() | names),
        offset,
        draw(offsets) if offset is not None else draw(st.none() | offsets),
        draw(st.none() | st.integers(0, 2**31 - 1)),
    )


@settings(deadline=None, max_examples=200)
@given(ref=refs())
def test_every_locator_survives_the_round_trip(ref: SourceRef) -> None:
    """What was built is parsed back, key order and compactness included."""
    text = ref.to_json()
    assert parse_source_ref(text) == ref
    assert list(json.loads(text)) == ["path", "member", "byte_offset", "byte_size", "frame_index"]
    assert "\n" not in text


@settings(deadline=None, max_examples=100)
@given(path=names, member=names, offset=st.none() | offsets, size=offsets, frame=st.none() | st.integers(0, 9))
def test_the_bulk_writer_writes_what_the_function_does(
    path: str, member: str, offset: int | None, size: int, frame: int | None
) -> None:
    """`SourceRefWriter` and `build_source_ref` agree byte for byte."""
    expected = build_source_ref(
        path=path,
        member=member,
        byte_offset=offset,
        byte_size=None if offset is None else size,
        frame_index=frame,
    )
    assert SourceRefWriter(path)(member, offset, size, frame) == expected


def test_strategies() -> None:
    """Each form of locator names the strategy that the design gives it."""
    assert SourceRef("a.tar", "m", 0, 5).strategy == "range_read"
    assert SourceRef("a.tar", "m").strategy == "tar_extract"
    assert SourceRef("a.jpg").strategy == "direct_read"
    assert SourceRef(None).strategy is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, SourceRef(None)),
        ("", SourceRef(None)),
        ('{"content_path": "a.tar", "content_key": "x.jpg"}', SourceRef("a.tar", "x.jpg")),
        ('{"path": null, "content_path": "a.tar"}', SourceRef("a.tar")),
        ('{"path": "a", "member": null, "byte_offset": 3, "byte_size": 4}', SourceRef("a", None, 3, 4)),
        ('{"path": "a", "frame_index": null, "later_key": [1]}', SourceRef("a")),
    ],
)
def test_older_forms_are_read(text: str | None, expected: SourceRef) -> None:
    """Older key names, absent keys and nulls give the locator they mean."""
    assert parse_source_ref(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        "7",
        '"text"',
        "null",
        '{"path": 3}',
        '{"path": ""}',
        '{"path": "a\\u0000b"}',
        '{"path": "\\ud800"}',
        '{"path": "a", "member": ["x"]}',
        '{"path": "a", "byte_offset": -1, "byte_size": 1}',
        '{"path": "a", "byte_offset": true, "byte_size": 1}',
        '{"path": "a", "byte_offset": 1.0, "byte_size": 1}',
        '{"path": "a", "byte_offset": "1", "byte_size": 1}',
        '{"path": "a", "byte_offset": 1}',
        '{"path":"a","member":null,"byte_offset":1,"byte_size":null,"frame_index":null}',
        '{"path":null,"member":"x","byte_offset":null,"byte_size":null,"frame_index":null}',
        '{"path":"","member":null,"byte_offset":null,"byte_size":null,"frame_index":null}',
        '{"path": "a", "byte_offset": 9223372036854775807, "byte_size": 1}',
        '{"path": "a", "byte_size": 99999999999999999999}',
        '{"path": "a", "frame_index": 2147483648}',
        '{"path": "a", "frame_index": NaN}',
        '{"path": "a", "byte_size": ' + "9" * 5000 + "}",
        '{"member": "x.jpg"}',
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
)
def test_hostile_locators_are_source_errors(text: str) -> None:
    """Wrong JSON, types, signs, sizes and depths raise `SourceError`, with a short message, in both parsers."""
    with pytest.raises(SourceError) as caught:
        parse_source_ref(text)
    assert len(str(caught.value)) < 400
    with pytest.raises(SourceError, match="row 1"):
        with_parsed_source_ref_columns(pa.table({"source_ref": [None, text]}))


@settings(deadline=None, max_examples=150)
@given(text=st.text(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_a_locator_or_a_source_error(text: str) -> None:
    """No text makes the parser fail in another way."""
    with contextlib.suppress(SourceError):
        assert isinstance(parse_source_ref(text), SourceRef)


@pytest.mark.parametrize(
    "values",
    [
        {"path": 3},
        {"path": "a", "byte_offset": -1, "byte_size": 2},
        {"path": "a", "byte_offset": 1},
        {"path": "a", "frame_index": True},
        {"path": "a\0"},
        {"path": None, "member": "x"},
    ],
)
def test_what_could_not_be_parsed_is_not_built(values: dict) -> None:
    """The builder refuses what the parser would."""
    with pytest.raises(EncodeError):
        build_source_ref(**values)


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.none() | refs(), max_size=12), chunked=st.booleans())
def test_bulk_parsing_agrees_with_single_parsing(values: list[SourceRef | None], chunked: bool) -> None:
    """The columns that bulk parsing adds hold what parsing each locator gives."""
    texts = pa.array([None if v is None else v.to_json() for v in values], pa.string())
    column = pa.chunked_array([texts[: len(texts) // 2], texts[len(texts) // 2 :]]) if chunked else texts
    found = with_parsed_source_ref_columns(pa.table({"source_ref": column}), "p_").to_pylist()
    for row, value in zip(found, values, strict=True):
        ref = value or SourceRef(None)
        assert (row["p_path"], row["p_member"], row["p_frame_index"]) == (ref.path, ref.member, ref.frame_index)
        assert (row["p_byte_offset"], row["p_byte_size"]) == (ref.byte_offset, ref.byte_size)


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()),
     pa.dictionary(pa.int8(), pa.large_string()), pa.null()],
    ids=str,
)  # fmt: skip
def test_every_type_of_text_is_parsed(kind: pa.DataType) -> None:
    """Locators in any Arrow type of text give the same columns, in several chunks, none, and as a batch."""
    texts = [build_source_ref(path="/a.tar", member="b.jpg", byte_offset=1, byte_size=2), None, None]
    texts = [None, None, None] if pa.types.is_null(kind) else texts
    array = pa.array(texts, pa.string()).cast(kind) if not pa.types.is_null(kind) else pa.nulls(3)
    expected = with_parsed_source_ref_columns(pa.table({"source_ref": pa.array(texts, pa.string())}))
    for column in (array, pa.chunked_array([array[:1], array[1:]]), pa.chunked_array([], kind)):
        found = with_parsed_source_ref_columns(pa.table({"source_ref": column}))
        assert found.column_names == expected.column_names
        assert found.drop_columns("source_ref").equals(expected.drop_columns("source_ref")[: len(column)])
    batch = with_parsed_source_ref_columns(pa.record_batch({"source_ref": array}))
    assert batch.drop_columns("source_ref").equals(expected.drop_columns("source_ref"))


def test_a_column_is_never_overwritten() -> None:
    """A second call with the same prefix is refused and names the columns; another kind of table stays what it is."""
    pandas = pytest.importorskip("pandas")
    table = pa.table({"source_ref": [build_source_ref(path="/a/b.tar", member="é.jpg", byte_offset=1, byte_size=2)]})
    once = with_parsed_source_ref_columns(table)
    with pytest.raises(SchemaMismatchError, match=r"'_src_path', .* already: drop or rename it"):
        with_parsed_source_ref_columns(once)
    assert with_parsed_source_ref_columns(once, "again_")["again_path"].to_pylist() == ["/a/b.tar"]
    with pytest.raises(SchemaMismatchError, match="'source_ref' is int64, expected text"):
        with_parsed_source_ref_columns(pa.table({"source_ref": [1]}))
    frame = with_parsed_source_ref_columns(to_pandas(table))
    assert isinstance(frame, pandas.DataFrame)
    assert frame["_src_byte_offset"].tolist() == [1]
    with pytest.raises(SchemaMismatchError, match="source_ref"):
        with_parsed_source_ref_columns(pa.table({"x": [1]}))


def test_tables_survive_pandas() -> None:
    """Binary, null integers, lists and required columns come back from pandas as they were."""
    pytest.importorskip("pandas")
    schema = pa.schema([*MULTIMODAL_SCHEMA, ("score", pa.int64()), ("tags", pa.list_(pa.string())), ("ok", pa.bool_())])
    rows = [
        {"sample_id": "a", "position": -1, "modality": "metadata", "score": 2**60 + 1, "tags": ["x", None], "ok": None},
        {"sample_id": "a", "position": 0, "modality": "image", "binary_content": b"\0\xff", "score": None, "ok": True},
    ]
    table = pa.Table.from_pylist(rows, schema=schema)
    back = from_pandas(to_pandas(table))
    assert back.equals(table)
    assert back.schema.equals(schema)
    assert from_pandas(to_pandas(table.slice(0, 0))).schema.equals(schema)


def test_plain_frames_get_the_reserved_types() -> None:
    """A DataFrame of Python objects gets the reserved types, and what does not fit them is refused by name."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"sample_id": ["a"], "position": [0], "modality": ["text"], "binary_content": [None]})
    assert from_pandas(frame).schema.field("position") == MULTIMODAL_SCHEMA.field("position")
    with pytest.raises(SchemaMismatchError, match="position"):
        from_pandas(pandas.DataFrame({"position": [2**40]}))
    with pytest.raises(SchemaMismatchError, match="sample_id"):
        from_pandas(pandas.DataFrame({"sample_id": ["a", None]}))


@pytest.mark.parametrize(
    ("token", "allowed"),
    [
        ("https://a.org/x.jpg", True),
        ("https://a.org/deep/x.jpg?y=1", True),
        ("https://a.org.evil.net/x.jpg", False),
        ("https://a.org@evil.net/x.jpg", False),
        ("https://a.org/../x.jpg", False),
        ("https://a.org/%2e%2E/x.jpg", False),
        ("https://a.org/..%2fx.jpg", False),
        ("https://a.org/x::file:///etc/passwd", False),
        ("/data/ok/x.jpg", True),
        ("/data/ok/../../etc/passwd", False),
        ("/data/ok/..", False),
        ("/data/okay/x.jpg", False),
        ("/data/ok/a..b.jpg", True),
        ("/data/ok/x\n.jpg", False),
        ("data/ok/x.jpg", False),
        ("", False),
    ],
)
def test_references(token: str, allowed: bool) -> None:
    """Only what is below an allowed prefix, in a plain spelling, may be followed."""
    assert is_allowed_reference(token, ("https://a.org", "/data/ok/", "")) is allowed
