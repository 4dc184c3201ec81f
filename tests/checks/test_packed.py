import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from mm_assets.checks.catalog import checks_of
from mm_assets.checks.packed import PackedFiles, PackedRelations
from mm_assets.checks.runner import run_checks
from mm_assets.errors import SourceError
from mm_assets.fields import SequenceField
from mm_assets.formats import MultReader, MultWriter, Payload
from mm_assets.packing.plan import PackPlan
from mm_assets.storage.store import Store

from .conftest import sound

Rows = list[dict[str, Any]]
ASSETS = ("packed_mult", "packed_mstr")


def row_of(rows: Rows, sample_id: str, modality: str) -> dict[str, Any]:
    """The first row of a sample and modality."""
    return next(row for row in rows if (row["sample_id"], row["modality"]) == (sample_id, modality))


def npy(*values: float) -> bytes:
    """A .npy file."""
    target = io.BytesIO()
    np.save(target, np.array(values))
    return target.getvalue()


def change_bytes(rows: Rows) -> None:
    """Another last byte in an image that is kept as it is."""
    row = row_of(rows, "b", "image")
    row["binary_content"] = row["binary_content"][:-1] + b"\x00"


def change_text(rows: Rows) -> None:
    """Another text of the same size."""
    row_of(rows, "c", "text")["text_content"] = "violins"


def change_metadata(rows: Rows) -> None:
    """Another JSON of the same size."""
    row = row_of(rows, "a", "metadata")
    row["metadata_json"] = row["metadata_json"].replace("up", "by")


def change_array(rows: Rows) -> None:
    """Another number in an array, which its field re-encodes."""
    row_of(rows, "d", "array")["binary_content"] = npy(1.0, 2.5)


def break_array(rows: Rows) -> None:
    """An array that its field refuses."""
    row_of(rows, "d", "array")["binary_content"] = b"\x93NUMPY???"


def drop_row(rows: Rows) -> Rows:
    """One row less."""
    rows.remove(row_of(rows, "b", "image"))
    return rows


def swap_samples(rows: Rows) -> Rows:
    """The last sample first."""
    last = rows[-1]["sample_id"]
    return [r for r in rows if r["sample_id"] == last] + [r for r in rows if r["sample_id"] != last]


def rename_sample(rows: Rows) -> None:
    """Another id for a sample."""
    for row in rows:
        if row["sample_id"] == "c":
            row["sample_id"] = "C"


def change_type(rows: Rows) -> None:
    """Another content type."""
    row_of(rows, "b", "image")["content_type"] = "image/x-other"


def remove_metadata(rows: Rows) -> None:
    """A sample whose JSON is gone."""
    row_of(rows, "a", "metadata")["metadata_json"] = None


def lose_content(rows: Rows) -> None:
    """A row that has neither bytes nor an error, so that it cannot be packed."""
    row_of(rows, "b", "image")["binary_content"] = None


SPOILED: list[tuple[Callable[[Rows], Any], set[str]]] = [
    (change_bytes, {"items"}),
    (change_text, {"items"}),
    (change_metadata, {"items"}),
    (change_array, {"decoded"}),
    (break_array, {"presence", "items"}),
    (drop_row, {"item_counts", "items", "listing"}),
    (swap_samples, {"samples"}),
    (rename_sample, {"samples", "item_counts", "presence", "items", "listing"}),
    (change_type, {"items", "listing"}),
    (remove_metadata, {"item_counts", "presence", "items"}),
    (lose_content, {"items"}),
]


@pytest.mark.parametrize("asset", ASSETS)
def test_good_packed_files_pass_every_check(pristine, asset: str) -> None:
    """Packed files as the stage makes them violate nothing, and every check of the catalog is reported."""
    outcomes = pristine.outcomes(asset)
    assert list(outcomes) == [check.name for check in checks_of(asset)]
    assert {name: outcome.violations for name, outcome in outcomes.items() if not outcome.passed} == {}


@pytest.mark.parametrize("asset", ASSETS)
@pytest.mark.parametrize(("change", "expected"), SPOILED, ids=lambda value: getattr(value, "__name__", ""))
def test_packed_file_that_is_not_its_rows_fails(
    partition, asset: str, change: Callable[[Rows], Any], expected: set[str]
) -> None:
    """Filtered rows that differ from what was packed in one place make the checks that guard that place fail."""
    partition.spoil("filtered_rows", change)
    assert expected <= partition.failed(asset)


@pytest.mark.parametrize("asset", ASSETS)
def test_every_packed_check_fails_once(asset: str) -> None:
    """No check of the packed files goes without files that it refuses."""
    elsewhere = {"schema", "intact", "formats_agree"}  # the tests below
    elsewhere |= {"boxes", "timestamps", "durations", "spans"}  # test_alignment_checks.py
    assert {check.name for check in checks_of(asset)} <= elsewhere | set().union(*(names for _, names in SPOILED))


@pytest.mark.parametrize("asset", ASSETS)
def test_other_plan_fails_the_schema_check(partition, asset: str) -> None:
    """A file whose fields, names or settings are not the plan's is refused."""
    spoiled = partition.plan.to_json()
    spoiled["modalities"][0]["name"] = "renamed"
    other = PackPlan.from_json(spoiled, where="test")
    violations = partition.outcomes(asset, plan=other)["schema"].violations
    assert [(row["expected_modality"], row["found_modality"]) for row in violations] == [
        ("renamed", partition.plan.modalities[0].name)
    ]
    fewer = PackPlan(preset="", modalities=partition.plan.modalities[:-1])
    assert "schema" in partition.failed(asset, plan=fewer)


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_damaged_payload_fails_and_is_named(partition, form: str) -> None:
    """One flipped byte of a payload is found by its checksum, and the sample and modality are named."""
    path = partition.root / "packed" / f"p.{form}"
    content = bytearray(path.read_bytes())
    at = content.index(b"silence")
    content[at] ^= 1
    path.write_bytes(content)
    outcomes = partition.outcomes(f"packed_{form}")
    found = [(row["sample_id"], row["modality"]) for row in outcomes["intact"].violations]
    assert ("c", "text") in found
    assert not outcomes["items"].passed


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_truncated_file_fails_without_raising(partition, form: str) -> None:
    """A truncated packed file fails the check that it is intact, wherever it ends."""
    path = partition.root / "packed" / f"p.{form}"
    content = path.read_bytes()
    for size in (0, 3, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert {"intact", "samples", "items"} <= partition.failed(f"packed_{form}")


@pytest.mark.fuzz
@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_damage_anywhere_never_raises(partition, form: str) -> None:
    """Whatever byte of head, tables or tail is wrong, the checks judge; most of them find it."""
    path = partition.root / "packed" / f"p.{form}"
    content = path.read_bytes()
    places = [*range(0, 40, 5), *range(8192, 8192 + 200, 23), *range(len(content) - 400, len(content), 37)]
    caught = 0
    for at in places:
        if at >= len(content):
            continue
        spoiled = bytearray(content)
        spoiled[at] ^= 0xFF
        path.write_bytes(spoiled)
        caught += "intact" in partition.failed(f"packed_{form}")
    assert caught > len(places) // 3


def test_row_too_large_for_the_format_is_damage(partition) -> None:
    """An MSTR row that claims more bytes than a payload may have is reported by `intact`, and judged by the others."""
    path = partition.root / "packed" / "p.mstr"
    content = bytearray(path.read_bytes())
    table = int.from_bytes(content[9 + 8 : 9 + 16], "little")
    present = next(at for at in range(table, table + 4096, 8) if any(content[at : at + 8]))
    content[present + 8 : present + 12] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    assert {"intact", "formats_agree"} <= partition.failed("packed_mstr")


def test_files_in_each_others_place_fail(partition) -> None:
    """A MULT file under the name of the MSTR file is not taken for it."""
    folder = partition.root / "packed"
    shutil.copy(folder / "p.mult", folder / "p.mstr")
    outcomes = partition.outcomes("packed_mstr")
    assert "found MULT, expected MSTR" in outcomes["intact"].violations[0]["message"]


@pytest.mark.parametrize("asset", ASSETS)
def test_formats_must_agree_where_both_are_there(partition, asset: str) -> None:
    """MULT and MSTR of different rows fail, one of them alone does not."""
    assert "formats_agree" not in partition.failed(asset, packed={asset[-4:]: f"packed/p.{asset[-4:]}"})
    other = {"packed_mult": "mstr", "packed_mstr": "mult"}[asset]
    before = partition.read("filtered_rows")
    partition.spoil("filtered_rows", change_text)
    partition.pack(forms=[other])
    partition.write("filtered_rows", before)
    assert partition.failed(asset) == {"formats_agree"}


def test_samples_without_anything_present_agree_by_id(partition) -> None:
    """Two files whose samples differ by their ids alone do not agree."""
    before = partition.read("filtered_rows")
    partition.spoil("filtered_rows", rename_sample)
    partition.pack(forms=["mstr"])
    partition.write("filtered_rows", before)
    assert "formats_agree" in partition.failed("packed_mult")


def lengthen_sound(rows: Rows) -> None:
    """A longer sound."""
    row_of(rows, "c", "audio")["binary_content"] = sound(160)


@pytest.mark.parametrize("asset", ASSETS)
def test_each_format_is_judged_by_its_own_payloads(partition, asset: str) -> None:
    """Of two undamaged files with other payloads neither is taken for the other: items, listing and facts differ."""
    own = asset[-4:]
    (other,) = {"mult", "mstr"} - {own}
    before = partition.read("filtered_rows")
    for change in (change_text, change_type, lengthen_sound):
        partition.spoil("filtered_rows", change)
    partition.pack(forms=[other])
    partition.write("filtered_rows", before)

    def tables(form: str, files: PackedFiles) -> dict[str, pa.Table]:
        relations = PackedRelations(partition.context(f"packed_{form}"), files)
        facts = relations.facts.table("packed_media")
        return {"items": relations.packed_items(), "listing": relations.packed_listing(), "facts": facts}

    with PackedFiles(partition.context(asset), [own, other]) as shared:
        others, found = tables(other, shared), tables(own, shared)
        failed = {o.name for o in run_checks(partition.context(asset), shared) if not o.passed}
    with PackedFiles(partition.context(asset), [own]) as alone:
        assert found == tables(own, alone)
    assert [name for name in found if found[name] == others[name]] == []
    assert failed == {"formats_agree"}


# --- files of another writer ------------------------------------------------------------------------------------------


def rewrite(partition, change: Callable[[str, str, Payload], Payload | None]) -> None:
    """Rewrites the MULT file with changed payloads: intact, but not what its rows give."""
    path = partition.root / "packed" / "p.mult"
    with MultReader(path) as reader, MultWriter(path.with_suffix(".new"), reader.modalities) as writer:
        for i, sample_id in enumerate(reader.sample_ids):
            payloads = reader.read_sample(i)
            writer.write(sample_id, {n: None if p is None else change(sample_id, n, p) for n, p in payloads.items()})
    path.with_suffix(".new").rename(path)


def listing_of(text: object) -> Callable[[str, str, Payload], Payload]:
    """Replaces every sample's listing."""
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    kinds = {b"{": 1, b"[": 2}

    def change(_: str, name: str, payload: Payload) -> Payload:
        return Payload(bytes([kinds[data[:1]], *bytes(7)]), data) if name == "rows" else payload

    return change


@pytest.mark.parametrize(
    "listing",
    [
        [],
        {"position": 0},
        [3, None],
        [{"position": "0", "modality": 1, "content_type": [], "in": {}}],
        b"{broken",
    ],
    ids=str,
)
def test_listing_that_is_not_the_rows_fails(partition, listing: object) -> None:
    """A listing of another shape, or none that can be read, is a violation and no crash."""
    rewrite(partition, listing_of(listing))
    failed = partition.failed("packed_mult", packed={"mult": "packed/p.mult"})
    assert {"listing", "items"} <= failed
    assert "intact" not in failed


def test_listing_must_name_a_modality_that_is_present(partition) -> None:
    """A row that is said to be packed where nothing is packed is a violation."""
    before: dict[str, bytes] = {}

    def change(sample_id: str, name: str, payload: Payload) -> Payload:
        if name != "rows":
            return payload
        before[sample_id] = bytes(payload.data)
        entries = json.loads(before[sample_id])
        return Payload(payload.metadata, json.dumps([{**entry, "in": "rest"} for entry in entries]).encode())

    rewrite(partition, change)
    assert "listing" in partition.failed("packed_mult", packed={"mult": "packed/p.mult"})


def test_absent_modality_of_a_row_that_exists_fails(partition) -> None:
    """A packed file that leaves a modality out has another presence than its rows."""
    rewrite(partition, lambda _, name, payload: None if name == "text" else payload)
    failed = partition.failed("packed_mult", packed={"mult": "packed/p.mult"})
    assert {"presence", "items", "item_counts"} <= failed


@pytest.mark.parametrize("cut", ["record", "data"])
def test_payload_that_its_field_cannot_read_fails(partition, cut: str) -> None:
    """A sequence, or an array, whose own structure is broken under right checksums is a violation and no crash."""

    def change(_: str, name: str, payload: Payload) -> Payload:
        if name not in ("state", "image_2", "image"):
            return payload
        data = bytes(payload.data)
        if cut == "data":
            return Payload(bytes(payload.metadata), data[: len(data) // 2])
        return Payload(b"\xff" * len(payload.metadata), data)

    rewrite(partition, change)
    failed = partition.failed("packed_mult", packed={"mult": "packed/p.mult"})
    assert {"items", "decoded"} <= failed


def test_items_of_a_payload_are_read_in_one_go(make_partition: Callable[..., Any], tmp_path: Path) -> None:
    """However many items a sample has, its payloads are opened a few times and not once for each item."""
    document = {"texts": [str(n) for n in range(400)], "images": [None] * 400}
    made = make_partition(tmp_path, [("a.json", json.dumps(document).encode())])
    opened = SequenceField._open
    with mock.patch.object(SequenceField, "_open", autospec=True, side_effect=opened) as spy:
        assert made.failed("packed_mult") == set()
    assert 0 < spy.call_count < 10


def test_array_written_in_another_way_agrees_if_its_value_does(partition) -> None:
    """What a field re-encodes is compared by value: another encoding of the same array is not a violation."""
    rows = partition.read("filtered_rows").to_pylist()
    row = row_of(rows, "d", "array")
    values = np.load(io.BytesIO(row["binary_content"]))
    target = io.BytesIO()
    np.lib.format.write_array(target, np.asfortranarray(values), version=(2, 0))
    assert target.getvalue() != row["binary_content"]

    def change(some: Rows) -> None:
        row_of(some, "d", "array")["binary_content"] = target.getvalue()

    partition.spoil("filtered_rows", change)
    assert partition.failed("packed_mult") <= {"listing"}


# --- fields that re-encode --------------------------------------------------------------------------------------------


REENCODING = {
    "fields": [
        {
            "name": "picture",
            "field": "ImageField",
            "config": {"encoding": "png"},
            "modality": "image",
            "take": "sequence",
        },
        {"name": "label", "field": "ScalarField", "config": {"dtype": "int64"}, "modality": "text", "extension": "cls"},
        {"name": "caption", "field": "TextField", "modality": "text"},
    ]
}


@pytest.fixture
def reencoded(make_partition: Callable[..., Any], tmp_path: Path) -> Any:
    """A partition whose images are re-encoded and whose labels are numbers."""
    from PIL import Image

    members = []
    for n in range(40):
        target = io.BytesIO()
        Image.new("RGB", (8, 6), (n, 0, 0)).save(target, "JPEG")
        members += [(f"{n:03}.jpg", target.getvalue()), (f"{n:03}.cls", str(n).encode()), (f"{n:03}.txt", b"caption")]
    return make_partition(tmp_path, members, pack=REENCODING)


def test_reencoded_items_are_compared_by_value(reencoded: Any) -> None:
    """Re-encoded images and labels read from text pass, though their bytes are not those of their rows."""
    assert reencoded.failed("packed_mult") == set()
    assert reencoded.failed("packed_mstr") == set()


def test_reencoded_items_of_other_rows_fail(reencoded: Any) -> None:
    """Exchanged labels and images are found in the subset that is compared."""

    def shift(rows: Rows) -> None:
        texts = [row for row in rows if row["content_type"] and row["text_content"] and row["text_content"].isdigit()]
        for row in texts:
            row["text_content"] = str(int(row["text_content"]) + 1)

    reencoded.spoil("filtered_rows", shift)
    outcomes = reencoded.outcomes("packed_mult")
    assert {row["modality"] for row in outcomes["decoded"].violations} == {"label"}
    assert outcomes["decoded"].num_violations <= 32


@pytest.mark.parametrize(("column", "other"), [("score", 0.75), ("user_source", "unknown"), ("score", None)])
def test_packed_columns_of_other_rows_fail(
    make_partition: Callable[..., Any], tmp_path: Path, column: str, other: object
) -> None:
    """Packed columns pass; a value that changed is found as a mismatch, one that became null as absent."""
    made = make_partition(tmp_path, pack={"columns": "all"})
    assert made.failed("packed_mult") == set()
    assert made.failed("packed_mstr") == set()

    def change(rows: Rows) -> None:
        row_of(rows, "a", "metadata")[column] = other

    made.spoil("filtered_rows", change)
    expected = {"presence", "items"} if other is None else {"decoded"}
    assert expected <= made.failed("packed_mult")


def test_reencoded_item_at_another_position_fails(reencoded: Any) -> None:
    """An image whose row has another position than the packed item is reported missing at that position."""

    def change(rows: Rows) -> None:
        next(row for row in rows if row["modality"] == "image")["position"] = 9

    reencoded.spoil("filtered_rows", change)
    outcomes = reencoded.outcomes("packed_mult")
    assert [row["detail"] for row in outcomes["decoded"].violations] == ["there is no such item"]
    assert outcomes["items"].num_violations == 2


def test_label_that_is_no_longer_a_number_fails(reencoded: Any) -> None:
    """A row that its field refuses is not an item, so the packed item has no row."""

    def change(rows: Rows) -> None:
        next(row for row in rows if row["text_content"] == "0")["text_content"] = "none"

    reencoded.spoil("filtered_rows", change)
    assert "items" in reencoded.failed("packed_mult")


# --- what the checks need ---------------------------------------------------------------------------------------------


def test_packed_file_that_is_not_there_is_named(partition) -> None:
    """Checks of a packed file that was not made, or is gone, say so."""
    with pytest.raises(SourceError, match="no packed mult file"):
        partition.outcomes("packed_mult", packed={})
    (partition.root / "packed" / "p.mult").unlink()
    with pytest.raises(SourceError, match=r"packed/p\.mult"):
        partition.outcomes("packed_mult")


def test_plan_is_needed(partition) -> None:
    """Packed files cannot be judged without their plan."""
    with pytest.raises(ValueError, match="without the plan"):
        partition.outcomes("packed_mult", plan=None)


@pytest.fixture
def remote(partition) -> Iterator[Any]:
    """The partition's files on a storage that is not the local one."""
    memory = fsspec.filesystem("memory")
    memory.put(str(partition.root), "/checks-test/d", recursive=True)
    yield replace(partition, store=Store("memory://checks-test/d"))
    memory.rm("/checks-test", recursive=True)


@pytest.mark.parametrize("asset", ["raw_shards", "rows", "materialized_rows", "filtered_rows", *ASSETS])
def test_remote_files_are_checked_alike(remote: Any, asset: str) -> None:
    """Tables and packed files behind a URL pass the same checks."""
    assert remote.failed(asset) == set()


def test_empty_partition_passes(make_partition, tmp_path: Path) -> None:
    """A shard without samples gives tables and packed files without rows, which violate nothing."""
    made = make_partition(tmp_path, [("._only", b"a resource fork")])
    for asset in ("raw_shards", "rows", "materialized_rows", "filtered_rows", *ASSETS):
        assert made.failed(asset) == set()


def truncate_image(rows: Rows) -> None:
    """The first image without its last bytes, in the table that is packed."""
    row = row_of(rows, "a", "image")
    row["binary_content"] = row["binary_content"][:-20]


@pytest.mark.parametrize("asset", ASSETS)
def test_what_was_judged_decodes(partition, asset: str) -> None:
    """Where media were judged, a payload that does not decode is a violation, though its row has the same bytes."""
    assert partition.failed(asset, judged=True) == set()
    partition.spoil("filtered_rows", truncate_image)
    partition.pack()
    assert partition.failed(asset) == set()
    outcome = partition.outcomes(asset, judged=True)["decoded"]
    assert [row["sample_id"] for row in outcome.violations] == ["a"]
    assert "does not decode" in outcome.violations[0]["detail"]
