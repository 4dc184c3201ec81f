import hashlib
import io
import itertools
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mm_assets
from mm_assets.errors import EncodeError, SchemaMismatchError
from mm_assets.formats import MstrReader, MultReader, crc32c
from mm_assets.media.content_types import content_type_of_name
from mm_assets.packing import judge as judge_module
from mm_assets.packing.judge import packable
from mm_assets.packing.pack import pack_rows
from mm_assets.packing.plan import PackPlan
from mm_assets.packing.presets import choose_plan
from mm_assets.rows.schema import COLUMN_TYPES, MULTIMODAL_SCHEMA, UserColumn
from mm_assets.rows.source_ref import build_source_ref

EXTENSIONS = {"text": "txt", "image": "png", "audio": "wav", "array": "npy", "binary": "bin"}


def picture(shade: int = 5) -> bytes:
    """A small PNG."""
    target = io.BytesIO()
    Image.new("L", (6, 4), shade).save(target, "PNG")
    return target.getvalue()


def sound() -> bytes:
    """A short WAV."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(16))
    return target.getvalue()


def npy(*values: float) -> bytes:
    """A .npy file."""
    target = io.BytesIO()
    np.save(target, np.array(values))
    return target.getvalue()


def table(*samples: tuple[str, Any, list[tuple[str, Any]]]) -> pa.Table:
    """Rows of samples: id, JSON (None: no metadata row, "": one without JSON), and (member suffix, content) in order.

    A suffix is modality, or modality:role.extension; content is str, bytes, None, or an Exception for an error.
    """
    made: list[dict[str, Any]] = []
    for sample_id, metadata, items in samples:
        if metadata is not None:
            row = {"sample_id": sample_id, "position": -1, "modality": "metadata"}
            ref = build_source_ref(path="s.tar", member=f"{sample_id}.json")
            made.append({**row, "source_ref": ref, "metadata_json": metadata or None})
        for position, (what, content) in enumerate(items):
            modality, _, suffix = what.partition(":")
            member = f"{sample_id}.{suffix or EXTENSIONS.get(modality, 'bin')}"
            content_type = content_type_of_name(member)
            made.append(
                {
                    "sample_id": sample_id,
                    "position": position,
                    "modality": modality,
                    "content_type": content_type,
                    "text_content": content if isinstance(content, str) else None,
                    "binary_content": content if isinstance(content, bytes) else None,
                    "source_ref": build_source_ref(path="s.tar", member=member),
                    "materialize_error": str(content) if isinstance(content, Exception) else None,
                }
            )
    return pa.Table.from_pylist(made, MULTIMODAL_SCHEMA)


def plan_of(pack: Any, rows: pa.Table | None = None) -> PackPlan:
    return choose_plan([] if rows is None else rows.to_batches(), pack=pack, where="test")


def drops(rows: pa.Table, pack: Any) -> dict[int, str]:
    """Row to reason."""
    return {drop.row: drop.reason for drop in packable(plan_of(pack, rows))(rows)}


def pack(rows: pa.Table, plan: PackPlan, folder: Path, *, blocks: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    """Packs a table and opens both files; answers with the summary and the readers."""
    starts = np.linspace(0, rows.num_rows, blocks + 1).astype(int)
    parts = [rows.slice(a, b - a) for a, b in itertools.pairwise(starts)]
    summary = pack_rows(
        parts, plan, mult=folder / "x.mult", mstr=folder / "x.mstr", provenance={"dataset": "d"}, **options
    )
    return summary, MultReader(folder / "x.mult"), MstrReader(folder / "x.mstr")


def value(reader: Any, plan: PackPlan, sample: int, name: str) -> Any:
    """A decoded value."""
    payload = reader.read_payload(sample, name)
    return None if payload is None else plan.fields()[name].decode(payload.metadata, payload.data)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_packable_gives_each_refused_row_its_reason() -> None:
    """Missing content, content that the field refuses, and rows of no modality are named with a reason."""
    rows = table(
        ("a", "{}", [("image", b"no image"), ("image", picture()), ("text", "t"), ("audio", sound())]),
        ("b", "{}", [("image", OSError("short read")), ("image", None), ("text", "t")]),
    )
    assert drops(rows, "interleaved") == {
        1: "unpackable_image",
        4: "not_selected",
        6: "not_materialized",
        7: "no_content",
    }


def test_second_candidate_is_not_selected() -> None:
    """Of several rows for one value the first by preference and position is packed, the others are dropped."""
    rows = table(("a", "{}", [("image", picture()), ("image:2.png", picture()), ("text:caption", "c"), ("text", "t")]))
    assert drops(rows, "image_text") == {2: "not_selected", 3: "not_selected"}


def test_refused_candidate_makes_room_for_the_next() -> None:
    """A broken first candidate is dropped as unpackable and the second is packed in its place."""
    rows = table(("a", "{}", [("image", b"broken"), ("image:2.png", picture()), ("image:3.png", picture())]))
    assert drops(rows, "image_text") == {1: "unpackable_image", 3: "not_selected"}


def test_generic_refuses_only_what_has_no_content() -> None:
    """With a rest nothing that has content is dropped, whatever it is."""
    rows = table(("a", "", [("image", b"broken"), ("array", b"\x93NUMPY"), ("audio", b""), ("binary", OSError("x"))]))
    assert drops(rows, "generic") == {4: "not_materialized"}


def test_metadata_that_is_not_json_drops_its_sample() -> None:
    """A metadata row whose text is not JSON is named, and its sample dropped; a missing metadata row drops nothing."""
    rows = table(("a", "{broken", [("text", "t")]), ("b", None, [("text", "t")]))
    assert drops(rows, "interleaved") == {0: "unpackable_metadata"}


def test_sample_beyond_the_format_is_dropped_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample larger than a packed file can count goes as a whole, with its bytes as the deciding value."""
    monkeypatch.setattr(judge_module, "MAX_SAMPLE_BYTES", 10)
    rows = table(
        ("a", "{}", [("text", "12345678901")]), ("b", None, [("text", "x" * 20)]), ("c", "{}", [("text", "1")])
    )
    found = list(packable(plan_of("interleaved"))(rows))
    assert [(d.row, d.reason, d.value) for d in found] == [(0, "sample_too_large", 13.0), (2, "sample_too_large", 20.0)]


def test_table_without_reserved_columns_is_refused() -> None:
    """Rows that are not a row table are refused by the column that is missing."""
    with pytest.raises(SchemaMismatchError, match="no column source_ref"):
        list(packable(plan_of("interleaved"))(table().drop_columns(["source_ref"])))


# --- what is packed ---------------------------------------------------------------------------------------------------


def test_interleaved_keeps_positions_and_bytes(tmp_path: Path) -> None:
    """Texts and images are sequences at their rows' positions, with the images' own bytes, and the JSON as it is."""
    image = picture()
    rows = table(
        ("a", '{"x":  1.50}', [("text", "one"), ("image", image), ("text", "zwei…")]), ("b", "", [("text", "")])
    )
    plan = plan_of("interleaved")
    summary, *readers = pack(rows, plan, tmp_path)
    for reader in readers:
        assert list(reader.sample_ids) == ["a", "b"]
        assert value(reader, plan, 0, "text") == [(0, "one"), (2, "zwei…")]
        assert value(reader, plan, 1, "text") == [(0, "")]
        field, payload = plan.fields()["image"], reader.read_payload(0, "image")
        [(position, _, data)] = field.item_payloads(payload.metadata, payload.data)
        assert (position, bytes(data)) == (1, image)
        assert reader.read_payload(1, "image") is None
        assert bytes(reader.read_payload(0, "metadata").data) == b'{"x":  1.50}'
        assert reader.read_payload(1, "metadata") is None
    assert summary.num_samples == 2
    assert summary.num_items == 4
    assert summary.num_present == {"text": 2, "image": 1, "metadata": 1}


def test_both_files_hold_the_same_payload_bytes(tmp_path: Path) -> None:
    """MULT and MSTR agree in ids, and payload by payload in their bytes."""
    rows = table(*((f"s{n}", "{}", [("text", f"t{n}"), ("image", picture(n))]) for n in range(9)))
    _, mult, mstr = pack(rows, plan_of("image_text"), tmp_path)
    assert list(mult.sample_ids) == list(mstr.sample_ids)
    for name in mult.names:
        assert mult.checksums(name).tolist() == mstr.checksums(name).tolist()
        for i in range(9):
            one, other = mult.read_payload(i, name), mstr.read_payload(i, name)
            assert (bytes(one.metadata), bytes(one.data)) == (bytes(other.metadata), bytes(other.data))
    assert mult.verify().ok
    assert mstr.verify().ok


def test_generic_packs_every_row_and_lists_it(tmp_path: Path) -> None:
    """Each row is in its role's modality, broken and unknown content numbered in the rest, and all in the listing."""
    seen = table(("a", "{}", [("image", picture()), ("array:state.npy", npy(1, 2)), ("text", "t")]))
    plan = plan_of("generic", seen)
    rows = table(
        ("a", "{}", [("image", picture()), ("array:state.npy", npy(1, 2)), ("text", "t")]),
        (
            "b",
            "",
            [("image", b"broken"), ("binary:x.y", b"\x00new"), ("array:state.npy", npy(3)), ("text:late.txt", "ü")],
        ),
    )
    summary, reader, _ = pack(rows, plan, tmp_path)
    assert summary.num_items == 7
    assert value(reader, plan, 0, "state").tolist() == [1, 2]
    assert value(reader, plan, 0, "rest") is None
    assert value(reader, plan, 1, "rest") == [(0, b"broken"), (1, b"\x00new"), (3, "ü".encode())]
    assert [(entry["member"], entry["in"]) for entry in value(reader, plan, 1, "rows")] == [
        ("b.png", "rest"),
        ("b.x.y", "rest"),
        ("b.state.npy", "state"),
        ("b.late.txt", "rest"),
    ]


def test_rest_distinguishes_rows_that_share_a_position(tmp_path: Path) -> None:
    """Rows of two kinds at one position both fit into the rest: its items are numbered as the sample's rows are."""
    rows = table(("a", "{}", [("binary:a", b"0"), ("image:b.svg", b"1")]))
    position = rows.schema.get_field_index("position")
    rows = rows.set_column(position, rows.schema.field(position), pa.array([-1, 4, 4], pa.int32()))
    plan = plan_of("generic", table(("z", "{}", [("text", "t")])))
    _, reader, _ = pack(rows, plan, tmp_path)
    assert value(reader, plan, 0, "rest") == [(0, b"0"), (1, b"1")]
    assert [entry["position"] for entry in value(reader, plan, 0, "rows")] == [4, 4]


def test_any_modality_sequence_is_numbered_too(tmp_path: Path) -> None:
    """A sequence of all modalities gives its items the numbers of the sample's rows."""
    plan = plan_of({"fields": [{"name": "all", "field": "BytesField", "take": "sequence"}]})
    rows = table(("a", "{}", [("text", "t"), ("image", b"i")]))
    position = rows.schema.get_field_index("position")
    rows = rows.set_column(position, rows.schema.field(position), pa.array([-1, 3, 3], pa.int32()))
    _, reader, _ = pack(rows, plan, tmp_path)
    assert value(reader, plan, 0, "all") == [(0, b"t"), (1, b"i")]


def test_frames_are_listed_by_number(tmp_path: Path) -> None:
    """Two frames of one member are distinct in the listing and in the digest."""
    rows = table(("a", "", [("image", picture(1)), ("image", picture(2))]))
    refs = [None, *(build_source_ref(path="s.tar", member="a.tiff", frame_index=k) for k in (0, 1))]
    place = rows.schema.get_field_index("source_ref")
    rows = rows.set_column(place, rows.schema.field(place), pa.array(refs, pa.string()))
    plan = plan_of("generic", rows)
    _, reader, _ = pack(rows, plan, tmp_path)
    assert [entry["frame"] for entry in value(reader, plan, 0, "rows")] == [0, 1]
    lines = [f"a.tiff#{k}\t{len(picture(k + 1))}\t{crc32c(picture(k + 1)):08x}\n".encode() for k in (0, 1)]
    assert reader.provenance["source_digest"] == hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def test_labels_become_numbers(tmp_path: Path) -> None:
    """Text rows fill a scalar field; text that is not a number is refused."""
    pack_config = {
        "fields": [{"name": "label", "field": "ScalarField", "config": {"dtype": "float32"}, "extension": "cls"}]
    }
    plan = plan_of(pack_config)
    rows = table(("a", "{}", [("text:cls", " 7\n")]), ("b", "{}", [("text:cls", "1.5")]))
    _, reader, _ = pack(rows, plan, tmp_path)
    assert [value(reader, plan, i, "label") for i in range(2)] == [7.0, 1.5]
    for wrong in ("seven", '"7"', "[" * 100_000, ""):
        assert drops(table(("a", "{}", [("text:cls", wrong)])), pack_config) == {1: "unpackable_text"}


def test_columns_become_values(tmp_path: Path) -> None:
    """A column's value on the metadata row is packed by its type; null and refused ones are absent."""
    values = {
        "score": ("double", [0.5, None, float("nan")]),
        "url": ("string", ["null", "", None]),
        "tags": ("list<double>", [[1.0, None], [float("nan")], []]),
        "extra": ("json", ['{"x":  1.50}', '"s"', None]),
    }
    rows = table(
        ("a", "{}", [("text", "t")]),
        ("b", "", [("text", "u")]),
        ("c", "{}", [("text", "v")]),
        ("d", None, [("text", "w")]),
    )
    for name, (kind, found) in values.items():
        column = [x for item in found for x in (item, None)] + [None]  # of a sample the metadata row, then its text
        rows = rows.append_column(name, pa.array(column, COLUMN_TYPES[kind]))
    columns = [UserColumn(name=name, source=name, type=kind) for name, (kind, _) in values.items()]
    plan = choose_plan([], pack={"preset": "image_text", "columns": "all"}, where="test", columns=columns)
    assert list(packable(plan)(rows)) == []
    summary, *readers = pack(rows, plan, tmp_path)
    for reader in readers:
        found = [{name: value(reader, plan, i, name) for name in values} for i in range(4)]
        assert found[0] == {"score": 0.5, "url": "null", "tags": [1.0, None], "extra": {"x": 1.5}}
        assert bytes(reader.read_payload(0, "extra").data) == b'{"x":  1.50}'
        assert found[1] == {"score": None, "url": "", "tags": None, "extra": "s"}
        assert np.isnan(found[2].pop("score"))
        assert found[2] == {"url": None, "tags": [], "extra": None}
        assert set(found[3].values()) == {None}
    assert summary.num_refused == {"tags": 1}
    assert "sample 'b'" in summary.first_refusals["tags"]
    with pytest.raises(SchemaMismatchError, match="no column 'url', which the plan packs"):
        list(packable(plan)(rows.drop_columns(["url"])))


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_packed_columns_are_columns_of_arrow(tmp_path: Path, form: str) -> None:
    """`to_arrow` has a packed column with its type and its values, null where the value was, whatever the format."""
    values: dict[str, tuple[str, list[Any]]] = {
        "flag": ("bool", [True, None, False]),
        "count": ("int64", [7, -1, None]),
        "score": ("double", [None, 0.5, 2.0]),
        "url": ("string", ["http://a", "", None]),
        "extra": ("json", ['{"x": [1, null]}', None, '"s"']),
    }
    rows = table(*((name, "{}", [("text", name)]) for name in "abc"))
    for name, (kind, found) in values.items():
        column = [x for item in found for x in (item, None)]  # of a sample the metadata row, then its text
        rows = rows.append_column(name, pa.array(column, COLUMN_TYPES[kind]))
    columns = [UserColumn(name=name, source=name, type=kind) for name, (kind, _) in values.items()]
    plan = choose_plan([], pack={"preset": "image_text", "columns": "all"}, where="test", columns=columns)
    pack(rows, plan, tmp_path)
    with mm_assets.open(tmp_path / f"x.{form}") as data:
        found = data.to_arrow(modalities=["text", *values])
        found.validate(full=True)
        assert [str(kind) for kind in found.schema.types] == ["string", "bool", "int64", "double", "string", "string"]
        assert found.column("text").to_pylist() == ["a", "b", "c"]
        assert {name: found.column(name).to_pylist() for name in values} == {n: v for n, (_, v) in values.items()}


# --- files ------------------------------------------------------------------------------------------------------------


def test_provenance_names_the_source_by_its_digest(tmp_path: Path) -> None:
    """The digest is SHA-256 over sorted lines of member, size and CRC-32C, and is in both files."""
    rows = table(("a", '{"k":1}', [("text", "ü"), ("image", picture())]))
    _, mult, mstr = pack(rows, plan_of("interleaved"), tmp_path)
    contents = {"a.json": b'{"k":1}', "a.txt": "ü".encode(), "a.png": picture()}
    lines = sorted(f"{name}\t{len(data)}\t{crc32c(data):08x}\n".encode() for name, data in contents.items())
    for reader in (mult, mstr):
        digest = hashlib.sha256(b"".join(lines)).hexdigest()
        assert reader.provenance == {"dataset": "d", "source_digest": digest}


def test_digest_does_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    """The same content in another order of samples has the same digest, other content has not."""
    samples = [(f"s{n}", "{}", [("text", f"t{n}")]) for n in range(4)]
    digests = []
    for number, chosen in enumerate((samples, samples[::-1], samples[:3])):
        (tmp_path / str(number)).mkdir()
        _, reader, _ = pack(table(*chosen), plan_of("interleaved"), tmp_path / str(number))
        digests.append(reader.provenance["source_digest"])
    assert digests[0] == digests[1] != digests[2]


def test_packing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """Neither time nor the division into blocks nor a known number of samples changes a byte."""
    rows = table(*((f"s{n}", "{}", [("text", f"t{n}"), ("image", picture(n))]) for n in range(6)))
    contents = set()
    for number, options in enumerate(({}, {"blocks": 3}, {"num_samples": 6})):
        folder = tmp_path / str(number)
        folder.mkdir()
        pack(rows, plan_of("image_text"), folder, **options)
        contents.add(((folder / "x.mult").read_bytes(), (folder / "x.mstr").read_bytes()))
    assert len(contents) == 1


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_one_format_alone_is_the_same_file(tmp_path: Path, form: str) -> None:
    """A file packed without its twin has the bytes that it has with it."""
    rows = table(("a", "{}", [("text", "t")]))
    plan = plan_of("interleaved")
    pack(rows, plan, tmp_path)
    target = {"mult": None, "mstr": None, form: tmp_path / f"alone.{form}"}
    pack_rows([rows], plan, **target, provenance={"dataset": "d"})
    assert (tmp_path / f"alone.{form}").read_bytes() == (tmp_path / f"x.{form}").read_bytes()


def test_no_format_is_refused() -> None:
    """Packing into nothing is a mistake of the caller."""
    with pytest.raises(ValueError, match="mult, mstr or both"):
        pack_rows([], plan_of("interleaved"), mult=None, mstr=None, provenance={})


def test_nothing_to_pack_gives_empty_files(tmp_path: Path) -> None:
    """No samples are a valid packed file."""
    summary, mult, mstr = pack(table(), plan_of("interleaved"), tmp_path)
    assert (summary.num_samples, len(mult), len(mstr)) == (0, 0, 0)


def test_row_that_cannot_be_packed_stops_and_leaves_no_file(tmp_path: Path) -> None:
    """A row that should have been taken out before is an error that names it, and no file appears."""
    rows = table(("a", "{}", [("text", "t"), ("image", b"broken")]))
    with pytest.raises(EncodeError, match=r"sample 'a', image at position 1: cannot be packed \(unpackable_image\)"):
        pack(rows, plan_of("interleaved"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_positions_that_repeat_name_sample_and_modality(tmp_path: Path) -> None:
    """Two texts at one position, which no row table may hold, are an error that says where."""
    rows = table(("a", "{}", [("text", "t"), ("text", "u")]))
    position = rows.schema.get_field_index("position")
    rows = rows.set_column(position, rows.schema.field(position), pa.array([-1, 2, 2], pa.int32()))
    with pytest.raises(EncodeError, match="sample 'a', modality 'text'"):
        pack(rows, plan_of("interleaved"), tmp_path)


# --- everything together ----------------------------------------------------------------------------------------------


ITEMS = st.sampled_from(
    [
        ("text", "some text"),
        ("text:caption", ""),
        ("text:3.txt", "numbered"),
        ("image", picture(1)),
        ("image:7.png", picture(7)),
        ("image", b"broken"),
        ("image:cam.svg", b"<svg/>"),
        ("audio", sound()),
        ("audio", b"RIFF"),
        ("array:state.npy", npy(1.0)),
        ("array:state.npy", b"\x93NUMPY"),
        ("binary:a.b", b""),
        ("video", b"\x00" * 5),
        ("binary", OSError("gone")),
    ]
)
SAMPLES = st.lists(st.tuples(st.sampled_from(["{}", '{"k": [1, 2.0]}', ""]), st.lists(ITEMS, max_size=6)), max_size=5)


@settings(deadline=None, max_examples=60)
@given(
    first=SAMPLES,
    later=SAMPLES,
    preset=st.sampled_from([None, "generic", "interleaved", "image_text", "speech"]),
    chunk=st.integers(1, 7),
)
def test_every_row_is_packed_once_or_refused(
    tmp_path_factory: pytest.TempPathFactory, first: Any, later: Any, preset: str | None, chunk: int
) -> None:
    """Whatever rows come after whatever plan: what `packable` keeps is packed, each row as one item, in order."""
    seen = table(*((f"f{n}", metadata, items) for n, (metadata, items) in enumerate(first)))
    plan = choose_plan(seen.to_batches(max_chunksize=chunk), pack=preset, where="test")
    rows = table(*((f"s{n}", metadata, items) for n, (metadata, items) in enumerate(later)))
    refused = {drop.row for drop in packable(plan)(rows)}
    kept = rows.filter(pa.array([row not in refused for row in range(rows.num_rows)], pa.bool_()))
    kept = pa.Table.from_batches(kept.to_batches(max_chunksize=chunk), kept.schema)
    assert list(packable(plan)(kept)) == []
    summary, mult, mstr = pack(kept, plan, tmp_path_factory.mktemp("packed"))
    content = [row for row in kept.to_pylist() if row["position"] >= 0]
    assert summary.num_items == len(content)
    assert list(mult.sample_ids) == list(dict.fromkeys(row["sample_id"] for row in kept.to_pylist()))
    assert [mult.checksums(n).tolist() for n in mult.names] == [mstr.checksums(n).tolist() for n in mstr.names]
    if plan.special("rest") is not None:
        assert refused == {row for row, r in enumerate(rows.to_pylist()) if r["materialize_error"]}
        listed = [entry for i in range(len(mult)) for entry in value(mult, plan, i, "rows")]
        assert [(e["position"], e["modality"]) for e in listed] == [(r["position"], r["modality"]) for r in content]
        assert json.dumps(listed).count('"in": null') == 0
