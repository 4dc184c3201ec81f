"""PDFs through all stages: pages, words and their boxes, and what becomes of those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_assets.errors import MissingExtraError
from mm_assets.media import pdf as media_pdf
from mm_assets.pipeline.chain import ROWS
from mm_assets.pipeline.partition.stages import raw_shards, rows
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.schema_inference import decide_layout
from mm_assets.rows.schema import DatasetSchema

from ...pdf_files import Page, Text, encrypted, pdf
from ..chain import at_work, declare, run_chain
from ..shards import make_shard, packed, png, table

TWO_PAGES = pdf(
    Page([Text("Hello wide world", 20, 150), Text("second line", 20, 90)]),
    Page([Text("turned page", 40, 60)], entries="/Rotate 90 /CropBox [10 10 290 190]"),
)
SCAN = pdf(Page(content="0.2 g 20 20 100 100 re f"))
MEMBERS: dict[str, object] = {
    "a.pdf": TWO_PAGES,
    "a.json": {"title": "two pages"},
    "b.txt": "a note",
    "b.pdf": TWO_PAGES,
    "c.pdf": SCAN,
    "c.json": {"title": "a scan"},
    "d.pdf": TWO_PAGES,
}
BAD: dict[str, object] = {
    "e.pdf": encrypted(),
    "f.pdf": TWO_PAGES[:500],
    "g.pdf": pdf(Page(size=(14_400 * 72, 14_400 * 72))),
    "h.pdf": b"not a PDF",
    "h.json": {"title": "of a PDF that is rejected"},
    "i.pdf": pdf(*[Page([Text("many " * 40, 0, 100, 1)])] * 20),
}


def run(folder: Path, members: dict[str, object] = MEMBERS, shard: str = "s.tar", **settings: Any) -> DatasetStore:
    return run_chain(declare(folder / "root", make_shard(folder / shard, members), **settings))[0]


def decided(spec: DatasetSpec) -> DatasetSchema:
    return decide_layout(spec, [spec.shards]).schema


def rest_of(sample: dict[str, Any]) -> list[bytes]:
    return [bytes(content) for _, content in sample["rest"]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """PDFs in a tar, some of which cannot be read; nothing about them is declared."""
    return run(tmp_path_factory.mktemp("pdf"), MEMBERS | BAD, samples={"max_text_bytes": 10_000})


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """PDFs in a compressed tar, whose pages are drawn again for each stage."""
    return run(tmp_path_factory.mktemp("pdf"), shard="s.tar.gz", retain="none")


@pytest.mark.parametrize("made", ["dataset", "compressed"])
def test_pdfs_become_documents_whose_words_are_in_their_boxes(made: str, request: pytest.FixtureRequest) -> None:
    """A shard of PDFs is packed as documents: every word has ink in its box on its page, and there is no other ink."""
    dataset = request.getfixturevalue(made)
    schema = dataset.schema()
    assert (schema.pack["preset"], schema.pdf) == ("document", "document")
    for form in ("mult", "mstr"):
        with packed(dataset, form=form) as opened:
            found = {sample_id: opened[number] for number, sample_id in enumerate(opened.sample_ids)}
        assert list(found) == list("abcd")
        assert found["a"]["metadata"] == {"title": "two pages"}
        assert found["c"]["document"].layout is None
        assert len(found["c"]["document"].pages) == 1
        assert rest_of(found["b"]) == [b"a note"]
        for sample_id in "abd":
            document = found[sample_id]["document"]
            words = document.layout.words
            assert words.texts == ("Hello", "wide", "world", "second", "line", "turned", "page")
            assert words.pages.tolist() == [0, 0, 0, 0, 0, 1, 1]
            assert [page.shape[:2] for page in document.pages] == [(417, 625), (583, 375)]
            for number, page in enumerate(document.pages):
                ink = page[..., 0] < 128
                for left, top, right, bottom in words.boxes[words.pages == number]:
                    assert ink[top:bottom, left:right].any()
                    ink[top:bottom, left:right] = False
                assert not ink.any()


def test_rows_of_a_document(dataset: DatasetStore) -> None:
    """A PDF has its layout and an image per page, all of the same bytes of the shard; other members come after."""
    rows = [row for row in table(dataset, "rows") if row["sample_id"] in "ab" and row["position"] >= 0]
    places = [(row["sample_id"], row["position"], row["modality"], row["content_type"]) for row in rows]
    pages = [(0, "image", "image/png"), (1, "image", "image/png")]
    layout = (0, "text", "application/json")
    assert places == [
        *(("a", *row) for row in (layout, *pages)),
        ("b", 0, "text", "text/plain"),
        *(("b", position + 1, *row) for position, *row in (layout, *pages)),
    ]
    refs = [json.loads(row["source_ref"]) for row in rows[:3]]
    assert [ref["frame_index"] for ref in refs] == [None, 0, 1]
    assert {(ref["member"], ref["byte_size"]) for ref in refs} == {("a.pdf", len(TWO_PAGES))}
    assert json.loads(rows[0]["text_content"])["pages"][1]["words"] == ["turned", "page"]


def test_what_cannot_be_read_is_rejected_by_name(dataset: DatasetStore) -> None:
    """A PDF that is encrypted, damaged or too large is in the rejects with reason and advice; the others are packed."""
    rejects = {row["member"]: (row["reason"], row["detail"]) for row in table(dataset, "rejects")}
    assert {name: reason for name, (reason, _) in rejects.items()} == {
        "e.pdf": "encrypted_pdf",
        "f.pdf": "bad_pdf",
        "g.pdf": "pdf_too_large",
        "h.pdf": "bad_pdf",
        "i.pdf": "pdf_too_large",
    }
    assert "lower samples.pdf_dpi" in rejects["g.pdf"][1]
    assert "raise samples.max_text_bytes" in rejects["i.pdf"][1]


def test_pdfs_become_interleaved_texts_and_pages(tmp_path: Path) -> None:
    """Where the preset asks for it, each page is a text and an image at its position."""
    dataset = run(tmp_path, pack="interleaved")
    assert dataset.schema().pdf == "interleaved"
    with packed(dataset) as opened:
        sample = opened[list(opened.sample_ids).index("a")]
        scan = opened[list(opened.sample_ids).index("c")]
    assert [text for _, text in sample["text"]] == ["Hello wide world\nsecond line", "turned page"]
    assert [image.shape[:2] for _, image in sample["image"]] == [(417, 625), (583, 375)]
    assert not scan["text"]


def test_what_pdfs_become_is_decided_by_the_samples_and_what_is_declared(tmp_path: Path) -> None:
    """PDFs stay bytes if that is declared, if the preset keeps what is there, or if samples consist of other media."""
    shard = make_shard(tmp_path / "s.tar", MEMBERS)
    beside = make_shard(tmp_path / "beside.tar", {"0.pdf": SCAN, "0.png": png(0), "1.pdf": SCAN, "1.png": png(1)})
    for expected, shards, settings in (
        ("binary", shard, {"samples": {"pdf": "binary"}}),
        ("binary", shard, {"samples": {"extensions": {"pdf": "binary"}}}),
        ("binary", shard, {"pack": "generic"}),
        ("binary", shard, {"pack": {"fields": [{"name": "file", "field": "BytesField", "extension": "pdf"}]}}),
        ("binary", beside, {}),
        ("document", beside, {"samples": {"pdf": "document"}}),
        ("document", shard, {"pack": {"columns": "all"}}),
        ("interleaved", shard, {"samples": {"pdf": "interleaved"}}),
    ):
        schema = decided(declare(tmp_path / "root", shards, **settings))
        assert schema.pdf == expected, settings
        assert DatasetSchema.from_json(schema.to_json(), where="schema.json") == schema
        if expected == "interleaved":
            assert schema.pack["preset"] == "interleaved"


def test_a_field_of_the_declaration_keeps_the_layout(tmp_path: Path) -> None:
    """A field with other settings takes pages and words of PDFs as that of the preset does, and no other image."""
    members: dict[str, object] = {f"{k}.{e}": c for k in range(2) for e, c in (("pdf", TWO_PAGES), ("png", png(k)))}
    config = {"image": {"encoding": "jpeg"}, "normalize": True}
    pack = {"preset": "document", "fields": [{"name": "document", "field": "DocumentField", "config": config}]}
    dataset = run(tmp_path, members, pack=pack, samples={"pdf": "document", "pdf_dpi": 72})
    with packed(dataset) as opened:
        sample = opened[0]
    assert [page.shape[:2] for page in sample["document"].pages] == [(200, 300), (280, 180)]
    assert len(sample["document"].layout.words) == 7
    assert sample["document"].layout.page_sizes.tolist() == [[1000, 1000]] * 2
    assert rest_of(sample) == [members["0.png"]]


def test_the_resolution_is_part_of_the_recipe_of_pages_alone(tmp_path: Path) -> None:
    """Another resolution makes partitions with pages pending and needs no new schema; those of bytes stay."""
    coarse, fine = (declare(tmp_path / "root", "s.tar", samples={"pdf_dpi": dpi}) for dpi in (100, 200))
    assert coarse.declared == fine.declared
    pages, plain = DatasetSchema(pdf="document"), DatasetSchema()
    assert ROWS.made_with(coarse, pages) != ROWS.made_with(fine, pages)
    assert ROWS.made_with(coarse, plain) == ROWS.made_with(fine, plain) != ROWS.made_with(coarse, pages)


def test_without_the_extra_pdfs_stay_bytes_and_one_note_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PDFs become is decided once, by the host that registers; a host without the extra says so."""
    monkeypatch.setattr("mm_assets.pipeline.state.schema_inference.can_read_pdf", lambda: False)
    spec = declare(tmp_path / "root", make_shard(tmp_path / "s.tar", MEMBERS))
    decision = decide_layout(spec, [spec.shards])
    assert decision.schema.pdf == "binary"
    (note,) = [note for note in decision.notes if "PDF" in note]
    assert "pip install" in note
    assert "--new-schema" in note


def test_a_host_without_the_extra_fails_where_pages_were_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition never means something else on another host: without the extra it fails, with the command."""
    dataset = DatasetStore(declare(tmp_path / "root", make_shard(tmp_path / "s.tar", MEMBERS)))
    register(dataset)
    monkeypatch.setattr(media_pdf, "can_read_pdf", lambda: False)
    at_work(raw_shards, dataset, "s")
    with pytest.raises(MissingExtraError, match="pypdfium2"):
        at_work(rows, dataset, "s")


def test_a_list_may_name_a_page(tmp_path: Path) -> None:
    """The locator of a row of a list names a page of a PDF as it names a frame of a TIFF."""
    (tmp_path / "x.pdf").write_bytes(TWO_PAGES)
    image = {"sample_id": "x", "modality": "image", "content_type": "image/png"}
    path = str(tmp_path / "x.pdf")
    lines = [{**image, "source_ref": {"path": path, "frame_index": page}} for page in (1, 0, 7)]
    shard = tmp_path / "list.jsonl"
    shard.write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset, _ = run_chain(declare(tmp_path / "root", shard, pack="generic", samples={"pdf_dpi": 72}))
    materialized = table(dataset, "materialized_rows", "list")
    found = [row for row in materialized if row["position"] >= 0]
    assert [row["content_type"] for row in found[:2]] == ["image/png"] * 2
    assert "the PDF has 2" in found[2]["materialize_error"]
    with packed(dataset, "list") as opened:
        assert [image.shape[:2] for _, image in opened[0]["image"]] == [(280, 180), (200, 300)]
