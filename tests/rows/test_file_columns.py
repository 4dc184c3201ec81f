"""The structs `source` and `source_member`: they repeat each locator, and content adds its type and checksum."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import SourceError
from mm_assets.rows.file_columns import with_checksums, with_source_columns
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.schema import MULTIMODAL_SCHEMA, SOURCE_SCHEMA, DatasetSchema
from mm_assets.rows.source_ref import SourceRef, from_pandas, to_pandas
from mm_assets.storage.files import SourceFile

from .materialize import JPEG

NAMES = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1, max_size=12)
OFFSETS = st.integers(0, 1 << 40)


@st.composite
def locators(draw: st.DrawFn) -> SourceRef | None:
    """Any valid locator, or none."""
    if draw(st.integers(0, 9)) == 0:
        return None
    offset = draw(st.none() | OFFSETS)
    size = draw(OFFSETS if offset is not None else st.none() | OFFSETS)
    return SourceRef(draw(NAMES), draw(st.none() | NAMES), offset, size, draw(st.none() | st.integers(0, 1000)))


def rows(refs: list[SourceRef | None], modality: str = "image", **columns: Any) -> pa.RecordBatch:
    """Rows with these locators, without the two structs."""
    made = [
        {"sample_id": "a", "position": n, "modality": modality, "source_ref": ref and ref.to_json(), **columns}
        for n, ref in enumerate(refs)
    ]
    return pa.RecordBatch.from_pylist(made, schema=MULTIMODAL_SCHEMA)


def structs(ref: SourceRef | None, modality: str = "image", **columns: Any) -> tuple[Any, Any]:
    """Both structs of a row."""
    (row,) = with_source_columns(rows([ref], modality, **columns)).to_pylist()
    return row["source"], row["source_member"]


def located(source: Mapping[str, Any] | None, place: Mapping[str, Any] | None) -> SourceRef | None:
    """The locator that both structs are made of, as far as they say it."""
    if source is None and place is None:
        return None
    file, inner = source or {}, place or {}
    path = file.get("uri") or inner.get("container")
    return SourceRef(path, inner.get("member"), file.get("offset"), file.get("size"), inner.get("frame_index"))


@settings(deadline=None)
@given(st.lists(locators(), max_size=8))
def test_the_structs_say_what_the_locator_says(refs: list[SourceRef | None]) -> None:
    """Each locator can be read back from its row's structs, but for the size of a member without a range."""
    made = with_source_columns(rows(refs))
    assert made.schema.equals(DatasetSchema().row_schema())
    for ref, row in zip(refs, made.to_pylist(), strict=True):
        if ref is not None and ref.member is not None and ref.byte_offset is None:
            ref = ref._replace(byte_size=None)
        assert located(row["source"], row["source_member"]) == ref


@settings(deadline=None)
@given(st.lists(locators(), max_size=8))
def test_a_file_reference_is_valid(refs: list[SourceRef | None]) -> None:
    """A `source` names a file and no bytes in it without their number, as the specification of FILE demands."""
    for row in with_source_columns(rows(refs)).to_pylist():
        source = row["source"]
        if source is not None:
            assert source["uri"]
            assert source["offset"] is None or source["size"] is not None
            assert source["inline"] is None


def test_a_member_without_a_range_is_no_file_reference() -> None:
    """Of a member of a compressed shard `source` is null: it would stand for the whole shard."""
    source, place = structs(SourceRef("/s.tar.gz", "a.jpg"))
    assert source is None
    assert place == {"container": "/s.tar.gz", "member": "a.jpg", "frame_index": None}


def test_a_plain_file_has_no_member() -> None:
    """A file that is the media itself has a uri alone."""
    source, place = structs(SourceRef("/a.jpg"), content_type="image/jpeg")
    empty = dict.fromkeys(("offset", "size", "checksum", "inline"))
    assert source == {"uri": "/a.jpg", "content_type": "image/jpeg", **empty}
    assert place is None


@pytest.mark.parametrize(
    ("ref", "modality"),
    [
        (SourceRef("/s.tar", "a.txt", 512, 4), "text"),
        (SourceRef("/s.tar", "a.tiff", 512, 4, 1), "image"),
        (SourceRef("/s.tar", "a.jpg.gz", 512, 4), "image"),
        (SourceRef("/a.jpg.GZ"), "image"),
    ],
)
def test_other_bytes_than_the_content_have_no_type_and_checksum(ref: SourceRef, modality: str) -> None:
    """Texts, frames and compressed members are not the stored bytes, whose type and checksum stay unknown."""
    source, _ = structs(ref, modality, content_type="image/jpeg", binary_content=b"1234")
    assert (source["content_type"], source["checksum"]) == (None, None)


def test_a_member_that_is_not_opened_has_a_checksum() -> None:
    """A compressed member that keeps its bytes (``x.nii.gz``) is its own content."""
    source, _ = structs(SourceRef("/s.tar", "x.nii.gz", 512, 4), "binary", binary_content=b"1234")
    assert source["checksum"] == f"CRC32C:{crc32c(b'1234'):08x}"


def test_the_checksum_has_eight_lower_case_digits() -> None:
    """The check value of CRC-32C is written as the specification of FILE writes it."""
    source, _ = structs(SourceRef("/a.bin"), "binary", binary_content=b"123456789")
    assert source["checksum"] == "CRC32C:e3069283"
    source, _ = structs(SourceRef("/a.bin"), "binary", binary_content=b"")
    assert source["checksum"] == "CRC32C:00000000"


def test_structs_of_before_are_replaced() -> None:
    """Rows that have the columns already get them again, at their place, with further columns after them."""
    made = with_source_columns(rows([SourceRef("/a.jpg"), None]))
    wrong = made.set_column(9, SOURCE_SCHEMA.field("source"), pa.nulls(2, SOURCE_SCHEMA.field("source").type))
    wrong = pa.RecordBatch.from_arrays([*wrong.columns, pa.array([1, 2])], [*wrong.schema.names, "score"])
    found = with_source_columns(wrong)
    assert found.schema.names == [*DatasetSchema().row_schema().names, "score"]
    assert found.select(made.schema.names).to_pylist() == made.to_pylist()


def test_a_locator_that_is_not_valid_is_an_error() -> None:
    """Rows of a faulty table source are refused, with the number of the row."""
    row = {"sample_id": "a", "position": 0, "modality": "image", "source_ref": "{"}
    with pytest.raises(SourceError, match="row 0"):
        with_source_columns(pa.RecordBatch.from_pylist([row], schema=MULTIMODAL_SCHEMA))


def test_rows_without_the_columns_stay_without() -> None:
    """Rows of other programs and earlier releases are not changed; a column `source` of theirs is not touched."""
    batch = rows([SourceRef("/a.jpg")])
    assert with_checksums(batch) is batch


@pytest.mark.parametrize("has_structs", [True, False])
def test_materializing_fills_the_checksum(tmp_path: Path, has_structs: bool) -> None:
    """Where rows have the columns, type and checksum come with the content; where they do not, rows are read alike."""
    path = tmp_path / "s.bin"
    path.write_bytes(b"before" + JPEG + b"content" + b"after")
    batch = rows([SourceRef(str(path), "a.bin", 6, len(JPEG) + 7)], content_type="image/png")
    batch = with_source_columns(batch) if has_structs else batch
    (row,) = (r for made in MaterializeStream([batch], open_file=SourceFile, allowed=bool) for r in made.to_pylist())
    assert row["binary_content"] == JPEG + b"content"
    if has_structs:
        assert row["source"]["content_type"] == row["content_type"] == "image/jpeg"
        assert row["source"]["checksum"] == f"CRC32C:{crc32c(JPEG + b'content'):08x}"
    else:
        assert "source" not in row


def test_pandas_keeps_the_structs() -> None:
    """`from_pandas` restores the structs, also from plain objects; a text `source` stays as it is."""
    pandas = pytest.importorskip("pandas", reason="the pandas extra is not installed")
    table = pa.Table.from_batches([with_source_columns(rows([SourceRef("/s.tar", "a.jpg", 512, 4), None]))])
    assert from_pandas(to_pandas(table)).equals(table)
    plain = pandas.DataFrame({name: table[name].to_pylist() for name in table.column_names})
    assert from_pandas(plain).equals(table)
    other = pandas.DataFrame({"sample_id": ["a"], "source": ["web"]})
    assert from_pandas(other)["source"].to_pylist() == ["web"]
