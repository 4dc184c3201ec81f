"""Outputs of stages that a wrong producer could have made: each is consistent in itself, and only its content lies.

Each row of `WRONG` changes one table, or packed file, of a partition that the real stages made, as a stage with a fault
would, and names the check that has to stop the partition. The stage is then checked again as `recheck` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_assets.checks import catalog
from mm_assets.checks import packed as packed_checks
from mm_assets.checks.catalog import CATALOG
from mm_assets.formats import MultWriter, Payload
from mm_assets.packing import pack
from mm_assets.packing.pack import pack_rows
from mm_assets.pipeline.chain import CHAIN, PACKED_STAGES, TABLES
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.rows.parquet import sample_groups

from ..pdf_files import Page, Text, encrypted, pdf
from ..pipeline.chain import at_work, declare, record_name, record_of, run_chain, stages_of, table_name
from ..pipeline.shards import make_shard, png, tiff
from .changes import Change, Rows, find, repeated, setting, without
from .conftest import sound, write_tar

NUM_SAMPLES = 70  # more than twice `MAX_COMPARED`
STAGES = {stage.name: stage for stage in CHAIN}
FIELDS = [
    {"name": "picture", "field": "ImageField", "modality": "image"},
    {"name": "label", "field": "ScalarField", "config": {"dtype": "int64"}, "modality": "text", "extension": "cls"},
    {"name": "caption", "field": "TextField", "modality": "text"},
]


def captions() -> Iterator[tuple[str, bytes]]:
    """Images with a caption and a label, and a sample for each reason to reject or drop one."""
    for n in range(NUM_SAMPLES):
        yield f"{n:03}.png", png(n)
        yield f"{n:03}.cls", str(1000 + n).encode()
        yield f"{n:03}.txt", f"caption {n}".encode()
    yield "000.png", png(999)
    yield "._000.png", b"resource fork"
    yield "array.json", b"[]"
    yield "array.txt", b"of JSON that is no object"
    yield "latin.txt", b"caption \x80\x81\x82\xff \x01"
    yield "latin.png", png(200)
    for key in ("one", "two"):
        yield f"{key}.json", b'{"id": "same"}'
        yield f"{key}.txt", f"of {key}".encode()
    yield "short.txt", b"x"
    yield "short.png", png(201)
    yield "short2.txt", b"yz"
    yield "short2.png", png(202)
    yield "truncated.png", png(203)[:-30]
    yield "truncated.txt", b"half a picture"
    yield "empty.png", b""
    yield "empty.txt", b"no picture"
    yield "again.png", png(3)
    yield "again.txt", b"the picture of another"


def documents() -> dict[str, object]:
    """Documents whose pictures are frames of one TIFF, and one that names more than there are."""
    made: dict[str, object] = {}
    for n in range(4):
        made[f"{n}.tiff"] = tiff(3 * n, 3 * n + 1, 3 * n + 2)
        texts, images = ["first", None, "second", None, None], [None, "a", None, "b", "c"]
        made[f"{n}.json"] = {"texts": texts, "images": images}
    made["many.tiff"] = tiff(90, 91)
    made["many.json"] = {"texts": ["x y", 5, None, None, None], "images": [None, None, "a", "b", "c"]}
    made["many.extra.png"] = png(300)
    return made


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "captions": {
        "samples": {"sample_id_field": "id"},
        "annotators": [{"type": "image_size"}, {"type": "text_length"}, {"type": "perceptual_hash"}],
        "filters": [
            {"type": "text_length", "min_chars": 3, "name": "long_enough"},
            {"type": "exact_duplicates", "scope": "row", "modalities": ["image"]},
        ],
        "pack": {"fields": FIELDS},
    },
    "documents": {"annotators": [{"type": "image_to_text_ratio"}], "pack": "generic"},
    "speech": {"annotators": [{"type": "audio_duration"}, {"type": "silence"}], "pack": "speech"},
    "listing": {"annotators": [{"type": "image_size"}], "pack": "generic"},
    "group": {"partition_pattern": r"(?P<key>\w+)-\d\.tar", "pack": "generic"},
}
SETTINGS |= {"pdfs": {"samples": {"pdf_dpi": 72}}, "pdf texts": {"samples": {"pdf_dpi": 72}, "pack": "interleaved"}}
SETTINGS |= {"written": {**SETTINGS["captions"], "materialize": "write"}}
SETTINGS |= {"references": {**SETTINGS["captions"], "retain": "none"}}


def papers() -> dict[str, object]:
    """PDFs of two pages, one of them beside other members, and those that are rejected."""
    made: dict[str, object] = {}
    for n in range(4):
        pages = [Page([Text(f"paper {n}, page {page}", 20, 100 + n)]) for page in range(2)]
        made |= {f"{n}.txt": f"note {n}", f"{n}.pdf": pdf(*pages), f"{n}.cls": "7"}
    return made | {"scan.pdf": pdf(Page()), "locked.pdf": encrypted(), "locked.txt": "kept", "cut.pdf": b"%PDF-1.7"}


def make(folder: Path, kind: str) -> DatasetStore:
    """Runs the chain over one kind of partition; every check passes."""
    folder.mkdir()
    match kind:
        case "documents":
            shards: Path | str = make_shard(folder / "s.tar", documents())
        case "pdfs" | "pdf texts":
            shards = make_shard(folder / "s.tar", papers())
        case "speech":
            members = ((f"{n}.{name}", content) for n in range(8) for name, content in speech(n).items())
            shards = write_tar(folder / "s.tar", members)
        case "group":
            for part in range(2):
                write_tar(folder / f"s-{part}.tar", ((f"{n}.txt", b"of %d, %d" % (part, n)) for n in range(3)))
            shards = folder / "s-*.tar"
        case "listing":
            for n in range(3):
                (folder / f"{n}.png").write_bytes(png(n))
            lines = ({"sample_id": str(n), "path": f"{n}.png", "position": 0} for n in range(3))
            shards = folder / "s.jsonl"
            shards.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        case _:
            shards = write_tar(folder / "s.tar", captions())
    return run_chain(declare(folder / "root", shards, **SETTINGS[kind]))[0]


def speech(n: int) -> dict[str, bytes]:
    """The members of a recording."""
    return {"wav": sound(800 + 80 * n), "txt": f"words {n}".encode()}


@dataclass(frozen=True)
class Made:
    """A partition, of which one file at a time is wrong."""

    dataset: DatasetStore

    @property
    def key(self) -> str:
        return next(iter(self.dataset.partitions()))

    def path(self, name: str) -> Path:
        """A table or a packed file."""
        if name in TABLES:
            return self.dataset.store.local_path(table_name(self.dataset, name, self.key))
        return self.dataset.store.local_path(stages_of(self.dataset, self.key)[PACKED_STAGES[name]].files[name].path)

    def rows(self, table: str) -> Rows:
        return pq.read_table(self.path(table), partitioning=None).to_pylist()

    def failed(self, stage: str) -> set[str]:
        """The checks of a stage that stop the partition."""
        result = at_work(stages.recheck, self.dataset, self.key, STAGES[stage])
        return {outcome.name for outcome in result.outcomes if outcome.stops}

    def failed_with(self, stage: str, table: str, change: Change) -> set[str]:
        """The checks of a stage that stop the partition with a change of one table."""
        path = self.path(table)
        whole = path.read_bytes()
        try:
            before = pq.read_table(path, partitioning=None)
            rows = before.to_pylist()
            after = change(rows)
            changed = pa.Table.from_pylist(rows if after is None else after, before.schema)
            assert not changed.equals(before), "the change changes nothing"
            pq.write_table(changed, path)
            return self.failed(stage)
        finally:
            path.write_bytes(whole)

    def failed_packed(self, form: str, change: Change) -> set[str]:
        """The checks that stop the partition with a file that is packed of changed rows."""
        path = self.path(form)
        whole = path.read_bytes()
        plan = at_work(lambda work: work.plan, self.dataset, self.key)
        table = pq.read_table(self.path("filtered_rows"), partitioning=None)
        rows = table.to_pylist()
        change(rows)
        blocks = sample_groups(pa.Table.from_pylist(rows, table.schema).to_batches(), batch_bytes=1 << 20)
        names = {"mult": None, "mstr": None, form: path}
        try:
            pack_rows(blocks, plan, **names, provenance={})
            assert path.read_bytes() != whole
            return self.failed(f"packed_{form}")
        finally:
            path.write_bytes(whole)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The partitions, each made when it is first asked for."""
    known: dict[str, Made] = {}

    def get(kind: str) -> Made:
        if kind not in known:
            known[kind] = Made(make(tmp_path_factory.mktemp("wrong") / kind, kind))
        return known[kind]

    return get


# --- what a wrong producer makes --------------------------------------------------------------------------------------


def exchanged(column: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Change:
    """The values of two rows in one column exchanged."""

    def change(rows: Rows) -> None:
        a, b = find(rows, **one), find(rows, **other)
        a[column], b[column] = b[column], a[column]

    return change


def columns_exchanged(one: str, other: str) -> Change:
    """Two columns exchanged in every row."""

    def change(rows: Rows) -> None:
        for row in rows:
            row[one], row[other] = row[other], row[one]

    return change


def zeroed(column: str) -> Change:
    """A column with zeros in place of its values."""

    def change(rows: Rows) -> None:
        for row in rows:
            if row[column] is not None:
                row[column] = type(row[column])() if isinstance(row[column], float | int) else "0" * len(row[column])

    return change


def frames_moved(by: int) -> Change:
    """Each frame of a document in the place of another."""

    def change(rows: Rows) -> None:
        frames = [row for row in rows if row["sample_id"] == "1" and row["modality"] == "image"]
        contents = [row["binary_content"] for row in frames]
        for n, row in enumerate(frames):
            row["binary_content"] = contents[(n + by) % len(contents)]

    return change


def frame_of_another(rows: Rows) -> None:
    """The first frame in the place of the last."""
    frames = [row for row in rows if row["sample_id"] == "2" and row["modality"] == "image"]
    frames[-1]["binary_content"] = frames[0]["binary_content"]


def invented_error(**wanted: Any) -> Change:
    """An item that is lost with an error."""

    def change(rows: Rows) -> None:
        row = find(rows, **wanted)
        row["binary_content"], row["materialize_error"] = None, "the storage failed"

    return change


def reversed_samples(rows: Rows) -> Rows:
    """The samples in the opposite order, the rows of each in theirs."""
    ids = list(dict.fromkeys(row["sample_id"] for row in rows))
    return [row for sample_id in reversed(ids) for row in rows if row["sample_id"] == sample_id]


def two_samples_exchanged(rows: Rows) -> Rows:
    """The samples 003 and 004 in each other's place."""
    order = {sample_id: n for n, sample_id in enumerate(dict.fromkeys(row["sample_id"] for row in rows))}
    order["003"], order["004"] = order["004"], order["003"]
    return sorted(rows, key=lambda row: order[row["sample_id"]])


def shards_exchanged(rows: Rows) -> Rows:
    """The rows of the second shard before those of the first."""
    return sorted(rows, key=lambda row: "s-0" in str(row.get("shard") or row.get("source_ref")))


def positions_exchanged(rows: Rows) -> Rows:
    """The first two items of a sample exchanged, in order of position."""
    some = [row for row in rows if row["sample_id"] == "005" and row["position"] >= 0]
    some[0]["position"], some[1]["position"] = 1, 0
    places = {id(row): n for n, row in enumerate(rows)}
    places[id(some[0])], places[id(some[1])] = places[id(some[1])], places[id(some[0])]
    return sorted(rows, key=lambda row: places[id(row)])


def reject_of(member: str, reason: str, sample_id: str | None, stage: str = "rows") -> Change:
    """A reject of a member that has a row."""

    def change(rows: Rows) -> None:
        rows.append(
            {
                "shard": rows[0]["shard"],
                "sample_id": sample_id,
                "member": member,
                "stage": stage,
                "reason": reason,
                "detail": "invented",
            }
        )

    return change


def image_of(sample_id: str) -> dict[str, Any]:
    return {"sample_id": sample_id, "modality": "image"}


def text_of(sample_id: str) -> dict[str, Any]:
    return {"sample_id": sample_id, "modality": "text"}


class Wrong(NamedTuple):
    """A wrong output.

    Attributes:
        kind: of partition.
        stage: whose output it is.
        table: the one that is changed.
        check: the check of the stage that has to find it.
        change: what is wrong.
    """

    kind: str
    stage: str
    table: str
    check: str
    change: Change


M, F = "materialized_rows", "filtered_rows"


def page_of(sample_id: str, page: int) -> dict[str, Any]:
    """The row of a page, after that of a text."""
    return {"sample_id": sample_id, "modality": "image", "position": 1 + page}


def layout_of(sample_id: str) -> dict[str, Any]:
    """The row of a layout."""
    return {"sample_id": sample_id, "content_type": "application/json", "position": 1}


def text_at(sample_id: str, position: int) -> dict[str, Any]:
    """The row of a text."""
    return {"sample_id": sample_id, "modality": "text", "position": position}


def other_word(rows: Rows) -> None:
    """Another word, in the box of the first."""
    row = find(rows, **layout_of("1"))
    row["text_content"] = row["text_content"].replace("paper", "taper", 1)


def layout_of_scan(rows: Rows) -> None:
    """Words of a PDF that has none."""
    row = find(rows, sample_id="scan", modality="image")
    ref = json.dumps({**json.loads(row["source_ref"]), "frame_index": None})
    layout = {**find(rows, **layout_of("1")), "sample_id": "scan", "position": 0, "source_ref": ref}
    rows.insert(rows.index(row), layout)


def pdf_as_a_whole(rows: Rows) -> None:
    """The bytes of a PDF in the place of its page."""
    row = find(rows, sample_id="scan", modality="image")
    ref = json.dumps({**json.loads(row["source_ref"]), "frame_index": None})
    row.update(modality="binary", content_type="application/pdf", source_ref=ref)


WRONG: Mapping[str, Wrong] = {
    # frames
    "frames moved": Wrong("documents", M, M, "shard_bytes", frames_moved(1)),
    "frames moved back": Wrong("documents", M, M, "shard_bytes", frames_moved(-1)),
    "another frame": Wrong("documents", M, M, "shard_bytes", frame_of_another),
    "frames of two documents": Wrong(
        "documents", M, M, "shard_bytes", exchanged("binary_content", image_of("0"), image_of("3"))
    ),
    "another frame index": Wrong(
        "documents",
        "rows",
        "rows",
        "entries",
        exchanged("source_ref", *({"sample_id": "0", "position": n} for n in (1, 3))),
    ),
    # content
    "content of another sample": Wrong(
        "captions", M, M, "shard_bytes", exchanged("binary_content", image_of("040"), image_of("041"))
    ),
    # losses
    "a lost image": Wrong("captions", M, M, "readable", invented_error(**image_of("050"))),
    "a lost frame": Wrong("documents", M, M, "readable", invented_error(sample_id="3", position=4)),
    "a lost recording": Wrong("speech", M, M, "readable", invented_error(sample_id="6", modality="audio")),
    "a lost file": Wrong("listing", M, M, "readable", invented_error(**image_of("1"))),
    "zeros of a file": Wrong("listing", F, F, "repeated", zeroed("image_width")),
    "an image that was not fetched": Wrong(
        "written",
        F,
        "dropped",
        "readable",
        lambda rows: rows.append(
            {**find(rows, reason="not_materialized"), "sample_id": "020", "position": 0, "modality": "image"}
        ),
    ),
    # annotators
    "zeros": Wrong("captions", F, F, "repeated", zeroed("image_width")),
    "zeros in a text's column": Wrong("captions", F, F, "repeated", zeroed("text_words")),
    "zeros of audio": Wrong("speech", F, F, "repeated", zeroed("audio_duration_seconds")),
    "zeros of a sample": Wrong("documents", F, F, "repeated", zeroed("image_to_text_ratio")),
    "no hashes": Wrong("captions", F, F, "repeated", zeroed("image_perceptual_hash")),
    "columns exchanged": Wrong("captions", F, F, "repeated", columns_exchanged("image_width", "image_height")),
    "columns of texts exchanged": Wrong("captions", F, F, "repeated", columns_exchanged("text_chars", "text_words")),
    "an annotated row dropped": Wrong("speech", F, F, "accounting", without(sample_id="2", modality="audio")),
    # drops
    "another filter": Wrong("captions", F, "dropped", "dropped", setting("filter", "blur", filter="long_enough")),
    "the filter of another": Wrong(
        "captions", F, "dropped", "dropped", setting("filter", "exact_duplicates", filter="long_enough")
    ),
    "another step": Wrong("captions", F, "dropped", "dropped", setting("filter", "packable", filter="long_enough")),
    "an unknown reason": Wrong("captions", F, "dropped", "dropped", setting("reason", "ugly", filter="long_enough")),
    "the reason of the other limit": Wrong(
        "captions", F, "dropped", "dropped", setting("reason", "chars_above_max", filter="long_enough")
    ),
    "a value that passes": Wrong("captions", F, "dropped", "dropped", setting("value", 3.0, filter="long_enough")),
    "no value": Wrong("captions", F, "dropped", "dropped", setting("value", None, filter="long_enough")),
    "another value": Wrong("captions", F, "dropped", "repeated", setting("value", 0.5, filter="long_enough")),
    "values exchanged": Wrong(
        "captions", F, "dropped", "repeated", exchanged("value", text_of("short"), text_of("short2"))
    ),
    "a reason of packing": Wrong(
        "captions", F, "dropped", "repeated", setting("reason", "not_selected", reason="not_materialized")
    ),
    "a reason of decoding": Wrong("captions", F, "dropped", "dropped", setting("reason", "dull", filter="decodable")),
    "a drop for an error that there is not": Wrong(
        "captions",
        F,
        "dropped",
        "dropped",
        lambda rows: find(rows, filter="long_enough").update(filter="packable", reason="not_materialized", value=None),
    ),
    "another drop of a reference": Wrong(
        "references", F, "dropped", "repeated", setting("value", 0.5, filter="long_enough")
    ),
    "another drop of what was written": Wrong(
        "written", F, "dropped", "repeated", setting("value", 0.5, filter="long_enough")
    ),
    "another field of undecodable": Wrong("captions", F, "undecodable", "repeated", setting("field", "caption")),
    # rejects
    "a reject next to a row": Wrong("captions", "rows", "rejects", "members", reject_of("007.txt", "not_utf8", "007")),
    "a taken id next to a row": Wrong(
        "captions", "rows", "rejects", "rejects", reject_of("007.txt", "duplicate_sample_id", "007")
    ),
    "a reject of the index next to a row": Wrong(
        "captions", "rows", "rejects", "rejects", reject_of("007.txt", "resource fork", None, "index")
    ),
    "a reject of a frame's document": Wrong(
        "documents", "rows", "rejects", "rejects", reject_of("0.tiff", "unreferenced_member", "1")
    ),
    "a reject twice": Wrong("captions", "rows", "rejects", "members", repeated(reason="not_utf8")),
    "a reject of the index twice": Wrong("captions", "rows", "rejects", "members", repeated(reason="resource fork")),
    "a reject fewer": Wrong("captions", "rows", "rejects", "members", without(reason="not_utf8")),
    "a repeated member fewer": Wrong("captions", "rows", "rejects", "members", without(reason="repeated_member")),
    **{
        f"{reason} as {other}": Wrong(kind, "rows", "rejects", check, setting("reason", other, reason=reason))
        for kind, check, reason, other in (
            ("captions", "rejects", "not_utf8", "too_large"),
            ("captions", "rejects", "not_utf8", "bad_compression"),
            ("captions", "rejects", "not_utf8", "bad_json"),
            ("captions", "rejects", "not_utf8", "repeated_member"),
            ("captions", "rejects", "not_utf8", "unreferenced_member"),
            ("captions", "rejects", "not_utf8", "duplicate_sample_id"),
            ("captions", "rejects", "not_utf8", "whatever"),
            ("captions", "rejects", "json_not_an_object", "bad_json"),
            ("captions", "rejects", "json_not_an_object", "not_utf8"),
            ("captions", "rejects", "repeated_member", "not_utf8"),
            ("captions", "rejects", "duplicate_sample_id", "repeated_member"),
            ("captions", "rejects", "resource fork", "system file"),
            ("documents", "rejects", "unreferenced_member", "repeated_member"),
            ("documents", "rejects", "unreferenced_member", "not_utf8"),
            ("documents", "entries", "text_not_a_string", "not_a_list"),
            ("documents", "rejects", "text_not_a_string", "bad_json"),
        )
    },
    # pages of PDFs
    "pages exchanged": Wrong(
        "pdfs", M, M, "shard_bytes", exchanged("binary_content", page_of("0", 0), page_of("0", 1))
    ),
    "pages of two PDFs exchanged": Wrong(
        "pdfs", M, M, "shard_bytes", exchanged("binary_content", page_of("0", 0), page_of("1", 0))
    ),
    "page numbers exchanged": Wrong(
        "pdfs", "rows", "rows", "member_rows", exchanged("source_ref", page_of("0", 0), page_of("0", 1))
    ),
    "layouts of two PDFs exchanged": Wrong(
        "pdfs", "rows", "rows", "pdf_pages", exchanged("text_content", layout_of("0"), layout_of("1"))
    ),
    "a word of a layout": Wrong("pdfs", "rows", "rows", "pdf_pages", other_word),
    "a layout of a scan": Wrong("pdfs", "rows", "rows", "pdf_pages", layout_of_scan),
    "a page that is missing": Wrong("pdfs", "rows", "rows", "pdf_pages", without(**page_of("2", 1))),
    "a layout that is missing": Wrong("pdfs", "rows", "rows", "pdf_pages", without(**layout_of("2"))),
    "a PDF as a whole": Wrong("pdfs", "rows", "rows", "pdf_pages", pdf_as_a_whole),
    "a type of a page": Wrong(
        "pdfs", "rows", "rows", "pdf_pages", setting("content_type", "image/jpeg", **page_of("2", 1))
    ),
    "texts of two pages exchanged": Wrong(
        "pdf texts", "rows", "rows", "pdf_pages", exchanged("text_content", text_at("1", 1), text_at("1", 2))
    ),
    "a page without its text": Wrong("pdf texts", "rows", "rows", "pdf_pages", without(**text_at("1", 2))),
    **{
        f"{reason} for {wrong}": Wrong("pdfs", "rows", "rejects", "rejects", setting("reason", wrong, reason=reason))
        for reason, wrong in (
            ("encrypted_pdf", "bad_pdf"),
            ("bad_pdf", "encrypted_pdf"),
            ("bad_pdf", "too_large"),
            ("bad_pdf", "pdf_too_large"),
            ("bad_pdf", "not_utf8"),
        )
    },
    # order
    "samples reversed": Wrong("captions", "rows", "rows", "order", reversed_samples),
    "two samples exchanged": Wrong("captions", "rows", "rows", "order", two_samples_exchanged),
    "documents reversed": Wrong("documents", "rows", "rows", "order", reversed_samples),
    "shards exchanged": Wrong("group", "rows", "rows", "order", shards_exchanged),
    "shards of the index exchanged": Wrong("group", "raw_shards", "raw_shards", "ranges", shards_exchanged),
    "positions exchanged": Wrong("captions", "rows", "rows", "member_rows", positions_exchanged),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_output_stops_the_partition(made: Callable[[str], Made], name: str) -> None:
    """A table that is consistent in itself, and not what its sources give, fails the check that guards it."""
    kind, stage, table, check, change = WRONG[name]
    assert check in made(kind).failed_with(stage, table, change)


@pytest.mark.parametrize("kind", SETTINGS)
def test_what_the_stages_make_passes(made: Callable[[str], Made], kind: str) -> None:
    """Without a change no check of any stage stops the partition, and the tables have something to be wrong in."""
    partition = made(kind)
    assert {stage.name: partition.failed(stage.name) for stage in CHAIN if stage.files} == {
        stage.name: set() for stage in CHAIN if stage.files
    }
    if kind in ("captions", "written"):
        reasons = {row["reason"] for row in partition.rows("rejects")}
        assert reasons >= {"not_utf8", "json_not_an_object", "repeated_member", "duplicate_sample_id", "resource fork"}
        causes = {(row["filter"], row["reason"]) for row in partition.rows("dropped")}
        assert causes >= {("long_enough", "chars_below_min"), ("exact_duplicates", "duplicate")}
        assert causes >= {("decodable", "undecodable"), ("packable", "not_materialized")}


# --- packed files -----------------------------------------------------------------------------------------------------


def labels_of(rows: Rows) -> Rows:
    return [row for row in rows if row["modality"] == "text" and row["text_content"].isdigit()]


def one_label(number: int) -> Change:
    """Another label of one sample."""

    def change(rows: Rows) -> None:
        labels_of(rows)[number]["text_content"] = "12345"

    return change


def labels_exchanged(rows: Rows) -> None:
    """The labels of two samples exchanged."""
    some = labels_of(rows)
    some[33]["text_content"], some[35]["text_content"] = some[35]["text_content"], some[33]["text_content"]


@pytest.mark.parametrize("form", ["mult", "mstr"])
@pytest.mark.parametrize(
    "change",
    [*map(one_label, (0, 33, 64, NUM_SAMPLES - 1)), labels_exchanged],
    ids=["first", "34th", "65th", "last", "exchanged"],
)
def test_any_reencoded_value_that_is_another_stops_the_partition(
    made: Callable[[str], Made], form: str, change: Change
) -> None:
    """A re-encoded value of any sample that is not that of its row is found, also beyond the first 32 samples."""
    assert "decoded" in made("captions").failed_packed(form, change)


def of_sample(number: int, change: Callable[[Payload], Payload]) -> Callable[..., Any]:
    """`encode_placed` with a fault in the label of one sample."""

    def encode(placer: Any, rows: Any, placement: Any, taker: int) -> Payload:
        payload = pack_encode(placer, rows, placement, taker)
        is_it = rows.sample_id[placement.start] == f"{number:03}" and placer.names[taker] == "label"
        return change(payload) if is_it else payload

    return encode


pack_encode = pack.encode_placed


@pytest.fixture
def unpacked(tmp_path: Path) -> DatasetStore:
    """A partition of captions up to its filtered rows."""
    dataset = DatasetStore(
        declare(tmp_path / "root", write_tar(tmp_path / "s.tar", captions()), **SETTINGS["captions"])
    )
    register(dataset)
    for make_stage in stages.TABLE_STAGES.values():
        at_work(make_stage, dataset, "s")
    return dataset


def failed_when_packed(dataset: DatasetStore) -> dict[str, set[str]]:
    """The checks that stop the partition when it is packed, by format."""
    results = at_work(stages.packed, dataset, "s")
    return {name: {outcome.name for outcome in result.outcomes if outcome.stops} for name, result in results.items()}


def test_a_fault_of_encoding_stops_the_run(unpacked: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that packing encodes wrongly is found in the same run, as the value is encoded again."""
    fault = of_sample(45, lambda payload: Payload(bytes(len(payload.metadata)), bytes(len(payload.data))))
    monkeypatch.setattr(pack, "encode_placed", fault)
    assert all("decoded" in failed for failed in failed_when_packed(unpacked).values())


def test_a_fault_of_writing_stops_the_run(unpacked: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a modality that is too large to be encoded again, what was written is compared with what was encoded."""
    write, before = MultWriter.write, {}

    def exchanging(self: MultWriter, sample_id: str, payloads: Mapping[str, Payload]) -> None:
        if sample_id in ("033", "035"):
            payloads = {**payloads, "label": before.setdefault("033", payloads["label"])}
        write(self, sample_id, payloads)

    monkeypatch.setattr(packed_checks, "MAX_ENCODED_BYTES", 0)
    monkeypatch.setattr(MultWriter, "write", exchanging)
    assert all("decoded" in failed for failed in failed_when_packed(unpacked).values())


# --- filters and annotators of the user's own -------------------------------------------------------------------------

OWN = """
import random

import pyarrow as pa
from mm_assets.filters import Annotator, Drop, Filter
from mm_assets.rows import UserColumn


class Chance(Annotator):
    columns = (UserColumn(name="chance", source="", type="double", rows=""),)

    def annotate(self, block):
        return {"chance": pa.array([random.random() for _ in range(block.num_rows)], pa.float64())}


class EveryThird(Filter):
    needs_content = True

    def __init__(self):
        self.calls = 0

    def judge(self, block):
        for row in block.rows_of("image").tolist():
            self.calls += 1
            if self.calls % 3 == 0:
                yield Drop(row, f"unlucky_{self.calls}", random.random(), None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"materialize": "write"}, {"renumber": True}, {"on_empty_sample": "keep"}])
def test_filters_that_depend_on_chance_never_fail_a_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any]
) -> None:
    """Columns and drops of the user's own code are not computed again; those of built-in ones beside them are."""
    (tmp_path / "of_chance.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    shard = write_tar(tmp_path / "s.tar", captions())
    config = {
        **SETTINGS["captions"],
        **settings,
        "annotators": [{"type": "of_chance:Chance"}, {"type": "image_size"}],
        "filters": [{"type": "of_chance:EveryThird"}, {"type": "text_length", "min_chars": 3}],
    }
    dataset, _ = run_chain(declare(tmp_path / "root", shard, **config))
    partition = Made(dataset)
    assert "repeated" in partition.failed_with(F, F, columns_exchanged("image_width", "image_height"))
    assert "dropped" in partition.failed_with(F, "dropped", setting("value", 3.0, filter="text_length"))


# --- settings that matter ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"on_materialize_error": "drop_row"},
        {"on_materialize_error": "drop_sample"},
        {"on_materialize_error": "drop_sample", "materialize": "write"},
        {"on_materialize_error": "drop_row", "materialize": "write", "retain": "none"},
        {"on_undecodable": "drop_sample", "renumber": True},
        {"on_undecodable": "keep", "on_empty_sample": "keep"},
        {"decodable": "headers", "on_misaligned": "drop_sample"},
        {"samples": {"max_text_bytes": 8}},
    ],
    ids=str,
)
def test_honest_output_passes_with_every_policy(tmp_path: Path, settings: Mapping[str, Any]) -> None:
    """What is lost by the settings does not violate a check, now or when the partition is checked again."""
    shard = write_tar(tmp_path / "s.tar", captions())
    dataset, _ = run_chain(declare(tmp_path / "root", shard, **{**SETTINGS["captions"], **settings}))
    for stage in CHAIN:
        if stage.files:
            assert Made(dataset).failed(stage.name) == set()


@pytest.mark.parametrize("damage", ["truncated", "compressed"])
def test_honest_output_of_a_damaged_or_compressed_shard_passes(tmp_path: Path, damage: str) -> None:
    """What is salvaged of a truncated shard, and the rows of a compressed one, do not violate a check."""
    shard = write_tar(tmp_path / "whole.tar", captions())
    if damage == "truncated":
        (tmp_path / "s.tar").write_bytes(shard.read_bytes()[:-20000])
        shard, more = tmp_path / "s.tar", {"on_damaged_shard": "salvage"}
    else:
        shard, more = make_shard(tmp_path / "s.tgz", dict(captions())), {}
    run_chain(declare(tmp_path / "root", shard, **{**SETTINGS["captions"], **more}))


def test_a_partition_of_an_earlier_release_stays_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New checks leave a partition published if they pass, and delete its record if they fail."""
    with monkeypatch.context() as earlier:
        earlier.setattr(
            catalog, "CATALOG", tuple(c for c in CATALOG if c.name not in ("order", "readable", "repeated"))
        )
        partition = Made(make(tmp_path / "speech", "speech"))
    name = record_name(partition.dataset, partition.key)
    stored = partition.dataset.store.read_bytes(name)
    assert b'"repeated"' not in stored
    assert {partition.failed(stage.name) == set() for stage in CHAIN if stage.files} == {True}
    assert partition.dataset.store.read_bytes(name) == stored
    assert "repeated" in partition.failed_with(F, F, zeroed("audio_duration_seconds"))
    assert record_of(partition.dataset, partition.key) is None
