"""Packing of composites, of values out of the sample's JSON, and of rows that several modalities look at."""

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import mm_assets
from mm_assets.errors import ConfigError
from mm_assets.fields import TimeSeries
from mm_assets.media.content_types import content_type_of_name
from mm_assets.packing.judge import packable
from mm_assets.packing.pack import pack_rows
from mm_assets.packing.plan import PackPlan
from mm_assets.packing.presets import choose_plan
from mm_assets.rows.schema import MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import build_source_ref

KINDS = {"txt": "text", "avif": "image", "png": "image", "jpg": "image", "npy": "array", "wav": "audio", "srt": "text"}
KINDS |= {"ogg": "audio", "mkv": "video"}


def npy(values: Any) -> bytes:
    """A .npy file."""
    target = io.BytesIO()
    np.save(target, np.asarray(values))
    return target.getvalue()


def picture(width: int = 40, height: int = 30) -> bytes:
    """A PNG."""
    target = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 40)).save(target, "PNG")
    return target.getvalue()


def sound(num_frames: int = 800) -> bytes:
    """A WAV of silence, 8 kHz."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(2 * num_frames))
    return target.getvalue()


def rows(*samples: tuple[str, Any, dict[str, bytes | str]]) -> pa.Table:
    """Rows of samples: id, JSON value (None: no metadata row), and member suffix to content."""
    made: list[dict[str, Any]] = []
    for sample_id, content, members in samples:
        if content is not None:
            made.append({"sample_id": sample_id, "position": -1, "modality": "metadata"})
            made[-1]["source_ref"] = build_source_ref(path="s.tar", member=f"{sample_id}.json")
            made[-1]["metadata_json"] = json.dumps(content)
        for position, (suffix, value) in enumerate(members.items()):
            member = f"{sample_id}.{suffix}"
            row = {"sample_id": sample_id, "position": position, "modality": KINDS[suffix.rsplit(".", 1)[-1]]}
            row |= {"content_type": content_type_of_name(member)}
            row["text_content" if isinstance(value, str) else "binary_content"] = value
            made.append(row | {"source_ref": build_source_ref(path="s.tar", member=member)})
    return pa.Table.from_pylist(made, MULTIMODAL_SCHEMA)


def plan_of(*fields: dict[str, Any], preset: str | None = None) -> PackPlan:
    pack = {"fields": list(fields)} | ({"preset": preset} if preset else {})
    return choose_plan([], pack=pack, where="test")


def drops(table: pa.Table, plan: PackPlan) -> dict[int, str]:
    """Row to reason."""
    return {drop.row: drop.reason for drop in packable(plan)(table)}


def packed(table: pa.Table, plan: PackPlan, folder: Path) -> list[dict[str, Any]]:
    """The decoded samples of MULT, after a look that MSTR has the same raw bytes."""
    pack_rows([table], plan, mult=folder / "x.mult", mstr=folder / "x.mstr", provenance={})
    with mm_assets.open(folder / "x.mult") as mult, mm_assets.open(folder / "x.mstr") as mstr:
        for index in range(len(mult)):
            for name in mult.names:
                assert mult.read_raw([index], [name]) == mstr.read_raw([index], [name])
        return list(mult)


SERIES = {
    "name": "arm",
    "field": "TimeSeriesField",
    "parts": {
        "timestamps": {"modality": "array", "role": "clock", "take": "shared"},
        "values": {"modality": "array", "role": "arm"},
    },
}
CLOCK = {"name": "clock", "field": "NDArrayField", "modality": "array", "role": "clock"}


def test_one_clock_dates_several_series(tmp_path: Path) -> None:
    """A shared row is read by each series and packed once, by the modality that takes it."""
    hand = json.loads(json.dumps(SERIES).replace("arm", "hand"))
    table = rows(
        ("a", {}, {"arm.npy": npy([[1.0], [2.0]]), "clock.npy": npy([0.0, 0.1]), "hand.npy": npy([[3.0], [4.0]])})
    )
    plan = plan_of(SERIES, hand, CLOCK)
    assert drops(table, plan) == {}
    (sample,) = packed(table, plan, tmp_path)
    assert sample["arm"] == TimeSeries(np.array([0.0, 0.1]), np.array([[1.0], [2.0]]))
    assert sample["hand"] == TimeSeries(np.array([0.0, 0.1]), np.array([[3.0], [4.0]]))
    assert sample["clock"].tolist() == [0.0, 0.1]


def test_a_composite_takes_all_of_its_rows_or_none(tmp_path: Path) -> None:
    """Rows of a composite that is incomplete or contradicts itself are dropped with a reason, or go to the rest."""
    table = rows(
        ("a", None, {"arm.npy": npy([[1.0]])}),
        ("b", None, {"arm.npy": npy([[1.0]]), "clock.npy": npy([0.0, 0.1])}),
        ("c", None, {"arm.npy": npy([[1.0]]), "clock.npy": npy([0.0])}),
    )
    assert drops(table, plan_of(SERIES, CLOCK)) == {0: "incomplete_arm", 1: "unpackable_arm"}
    with_rest = plan_of(SERIES, CLOCK, preset="generic")
    assert drops(table, with_rest) == {}
    samples = packed(table, with_rest, tmp_path)
    assert [sample["arm"] is None for sample in samples] == [True, True, False]
    assert [sample["rest"] and [position for position, _ in sample["rest"]] for sample in samples] == [[0], [0], None]
    assert samples[2]["rows"][0] == {
        "position": 0,
        "modality": "array",
        "content_type": "application/x-npy",
        "member": "c.arm.npy",
        "in": "arm",
        "part": "values",
    }


VQA = [
    {"name": "image", "field": "ImageField", "modality": "image"},
    {"name": "question", "field": "TextField", "key": "question"},
    {"name": "answer", "field": "TextField", "key": ["annotation", "answer"]},
]


def test_visual_question_answering(tmp_path: Path) -> None:
    """A picture that is a row, and question and answer out of the JSON, are three modalities of one sample."""
    table = rows(
        ("a", {"question": "What colour?", "annotation": {"answer": "red"}}, {"png": picture()}),
        ("b", {"question": "How many?", "annotation": {"answer": None}}, {"png": picture()}),
        ("c", {}, {"png": picture()}),
        ("d", None, {"png": picture()}),
    )
    plan = plan_of(*VQA)
    assert drops(table, plan) == {}
    samples = packed(table, plan, tmp_path)
    assert [(s["question"], s["answer"]) for s in samples] == [
        ("What colour?", "red"),
        ("How many?", None),
        (None, None),
        (None, None),
    ]
    assert samples[0]["image"].shape == (30, 40, 3)
    assert samples[0]["metadata"]["annotation"] == {"answer": "red"}


def test_a_wrong_value_in_the_json_costs_its_sample_alone(tmp_path: Path) -> None:
    """What a field refuses at a key of the JSON drops that sample, named by its metadata row, and no other."""
    table = rows(("a", {"question": 17}, {"png": picture()}), ("b", {"question": "?"}, {"png": picture()}))
    plan = plan_of(*VQA)
    assert drops(table, plan) == {0: "unpackable_question"}
    (sample,) = packed(table.slice(2), plan, tmp_path)
    assert sample["question"] == "?"


def test_lists_and_numbers_of_the_json(tmp_path: Path) -> None:
    """A list becomes a sequence whose nulls are gaps, numbers become scalars and arrays, anything becomes JSON."""
    content = {"captions": ["one", None, "three"], "score": 0.5, "pose": [[1, 2], [3, 4]], "tags": {"a": [1]}}
    plan = plan_of(
        {"name": "captions", "field": "TextField", "take": "json", "key": "captions"},
        {"name": "list", "field": "SequenceField", "config": {"inner": {"type": "TextField"}}, "key": "captions"},
        {"name": "score", "field": "ScalarField", "key": "score"},
        {"name": "pose", "field": "NDArrayField", "config": {"dtype": "float32"}, "key": "pose"},
        {"name": "tags", "field": "JSONField", "key": "tags"},
        {"name": "text", "field": "TextField", "modality": "text"},
    )
    assert drops(rows(("a", content, {"txt": "t"})), plan) == {0: "unpackable_captions"}
    plan = PackPlan(preset="", modalities=tuple(m for m in plan.modalities if m.name != "captions"))
    table = rows(("a", content, {"txt": "t"}))
    assert drops(table, plan) == {}
    (sample,) = packed(table, plan, tmp_path)
    assert sample["list"] == [(0, "one"), (2, "three")]
    assert sample["score"] == 0.5
    assert sample["pose"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert sample["tags"] == {"a": [1]}


REGIONS = {
    "name": "regions",
    "field": "DocumentField",
    "config": {"layout": {"words": "phrases", "text": "phrase", "box": "bbox", "box_format": "xywh"}},
    "parts": {"pages": {"modality": "image"}, "layout": {"take": "json"}},
}


def test_captions_and_their_regions(tmp_path: Path) -> None:
    """Phrases with boxes in the JSON and the picture they lie in are one sample, boxes checked against the picture."""
    phrases = [{"phrase": "a red wall", "bbox": [0, 0, 40, 30]}, {"phrase": "a corner", "bbox": [30, 20, 10, 10]}]
    table = rows(
        ("a", {"phrases": phrases}, {"png": picture()}),
        ("b", {"phrases": [{"phrase": "outside", "bbox": [30, 20, 11, 10]}]}, {"png": picture()}),
        ("c", {"phrases": None}, {"png": picture()}),
    )
    plan = plan_of(REGIONS)
    assert drops(table, plan) == {3: "unpackable_regions"}
    keep = pa.array([row not in (2, 3) for row in range(table.num_rows)])
    first, second = packed(table.filter(keep), plan, tmp_path)
    assert list(first["regions"].layout.words.texts) == ["a red wall", "a corner"]
    assert first["regions"].layout.words.boxes.tolist() == [[0, 0, 40, 30], [30, 20, 40, 30]]
    assert first["regions"].pages[0].shape == (30, 40, 3)
    assert second["regions"].layout is None
    assert len(second["regions"].pages) == 1


def test_what_is_left_of_a_refused_composite_is_refused_too() -> None:
    """When rows of a composite go, what remains of it is judged again, so that packing meets nothing unheard of."""
    keyed = json.loads(json.dumps(REGIONS))
    keyed["parts"]["layout"] = {"key": "layout"}
    outside = {"phrases": [{"phrase": "outside", "bbox": [30, 20, 11, 10]}]}
    wrong = {"phrases": 3}
    table = rows(("a", {"layout": outside}, {"png": picture()}), ("b", {"layout": wrong}, {"png": picture()}))
    plan = plan_of(keyed)
    found = drops(table, plan)
    assert found[1] == found[3] == "unpackable_regions"
    keep = pa.array([row not in found for row in range(table.num_rows)])
    assert drops(table.filter(keep), plan) == {}


def test_a_tokenizer_is_known_by_its_file_in_the_plan_alone(tmp_path: Path) -> None:
    """The stored plan still says where the tokenizer is, and the packed file only which one it was."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "red": 1, "wall": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    config = {"tokenizer": {"file": str(path)}, "max_tokens": 4}
    field = {"name": "ids", "field": "TokensField", "modality": "text", "config": config}
    plan = PackPlan.from_json(json.loads(json.dumps(plan_of(field).to_json())), where="schema.json")
    (sample,) = packed(rows(("a", None, {"txt": "red wall door"})), plan, tmp_path)
    assert sample["ids"].tolist() == [1, 2, 0]
    path.unlink()
    with mm_assets.open(tmp_path / "x.mult") as again:
        assert again[0]["ids"].tolist() == [1, 2, 0]
        assert str(tmp_path) not in json.dumps(again.schema)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"parts": {}}, "parts", "expected part names"),
    ({"parts": {"valves": {}}}, "parts.valves", "allowed: timestamps, values"),
    ({"parts": {"values": {}}}, "parts.timestamps", "needs it"),
    ({"parts": {"values": {"take": "rest"}, "timestamps": {}}}, "parts.values.take", "one or shared or json"),
    ({"parts": {"values": {"rolle": "x"}, "timestamps": {}}}, "parts.values.rolle", "is not a key"),
    ({"parts": {"values": {}, "timestamps": {}}, "role": "x"}, "role", "beside parts"),
    ({"take": "shared"}, "take", "only a part"),
    ({"take": "parts"}, "take", "the key parts"),
    ({"key": "a", "take": "one"}, "key", "not json"),
    ({"key": "a", "role": "x"}, "role", "takes none"),
    ({"key": 3}, "key", "a key of the sample's JSON"),
]


@pytest.mark.parametrize(("keys", "where", "words"), WRONG)
def test_wrong_parts_are_refused_by_key(keys: dict[str, Any], where: str, words: str) -> None:
    """A wrong part or key is refused when the declaration is read, with its place and what is allowed."""
    with pytest.raises(ConfigError) as refused:
        plan_of({"name": "s", "field": "TimeSeriesField", **keys})
    assert refused.value.key == f"pack.fields[0].{where}"
    assert words in refused.value.detail


def test_a_field_of_one_content_has_no_parts() -> None:
    """Parts of a field that is not a composite are refused."""
    with pytest.raises(ConfigError, match="made of one content"):
        plan_of({"name": "t", "field": "TextField", "parts": {"text": {}}})


# --- what is refused says why, and costs no more than it must ---------------------------------------------------------


def test_a_refusal_says_what_was_found(tmp_path: Path) -> None:
    """The listing of the rest has the field's objection next to the reason, and the row's modality."""
    outside = {"phrases": [{"phrase": "outside", "bbox": [30, 20, 11, 10]}]}
    table = rows(("a", outside, {"png": picture()}))
    (drop,) = packable(plan_of(REGIONS))(table)
    assert drop.reason == "unpackable_regions"
    assert "beyond their page" in drop.detail
    with_rest = plan_of(REGIONS, preset="generic")
    summary = pack_rows([table], with_rest, mult=tmp_path / "x.mult", mstr=None, provenance={})
    assert summary.num_refused == {"regions": 1}
    assert summary.num_rest == 1
    (note,) = summary.notes
    assert "sample 'a'" in note
    assert "beyond their page" in note
    with mm_assets.open(tmp_path / "x.mult") as dataset:
        assert dataset[0]["rows"][0]["in"] == "rest"
        assert dataset[0]["rows"][0]["refused_by"] == "regions"


def test_an_optional_value_costs_itself_alone(tmp_path: Path) -> None:
    """A score that is not a number leaves its pair without a score; the sample stays, and the refusal is counted."""
    table = rows(
        ("a", {"clip_score": "n/a"}, {"png": picture(), "txt": "one"}),
        ("b", {"clip_score": 0.5}, {"png": picture(), "txt": "two"}),
        ("c", {"clip_score": json.loads("[" * 400 + "]" * 400)}, {"png": picture(), "txt": "three"}),
    )
    plan = choose_plan([], pack="image_text_pair", where="test")
    assert drops(table, plan) == {}
    summary = pack_rows([table], plan, mult=tmp_path / "y.mult", mstr=None, provenance={})
    assert summary.num_refused == {"pair": 2}
    assert [sample["pair"].clip_score for sample in packed(table, plan, tmp_path)] == [None, 0.5, None]


def test_what_the_json_may_lack_is_absent_when_it_is_wrong(tmp_path: Path) -> None:
    """With `on_refused: absent` a wrong value is absent, and the sample stays."""
    question = {"name": "question", "field": "TextField", "key": "question", "on_refused": "absent"}
    table = rows(("a", {"question": 17}, {"png": picture()}))
    plan = plan_of(VQA[0], question)
    assert PackPlan.from_json(json.loads(json.dumps(plan.to_json())), where="schema.json") == plan
    assert drops(table, plan) == {}
    (sample,) = packed(table, plan, tmp_path)
    assert sample["question"] is None
    assert sample["image"] is not None


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("int64", [1, 2], True),
        ("int64", [1.0, 2.0], True),
        ("int64", [1.5], False),
        ("int64", [1, True], False),
        ("int64", [1, "2"], False),
        ("int64", [None, 1], False),
        ("uint8", [256], False),
        ("uint8", [-1], False),
        ("float32", [0.1, 2], True),
        ("float32", [1e300], False),
        ("float32", [[1, 2], [3]], False),
        ("bool", [True, False], True),
        ("bool", [0, 1], False),
        (None, [1, 2.5], True),
        (None, ["a"], False),
    ],
)
def test_numbers_of_the_json_are_never_bent(tmp_path: Path, dtype: str | None, value: Any, fits: bool) -> None:
    """A list becomes an array only if each of its elements is a number of the array's type."""
    field = {"name": "pose", "field": "NDArrayField", "config": {"dtype": dtype}, "key": "pose"}
    table = rows(("a", {"pose": value}, {"txt": "t"}))
    plan = plan_of(field, {"name": "text", "field": "TextField", "modality": "text"})
    assert drops(table, plan) == ({} if fits else {0: "unpackable_pose"})
    if fits:
        (sample,) = packed(table, plan, tmp_path)
        np.testing.assert_array_equal(sample["pose"], np.asarray(value, sample["pose"].dtype))
        assert dtype is None or sample["pose"].dtype == dtype


def test_settings_alone_keep_the_preset_s_rows(tmp_path: Path) -> None:
    """A declared field that changes a setting of the preset's composite still has its rows, and its other settings."""
    pack = {
        "preset": "image_text_pair",
        "fields": [{"name": "pair", "field": "ImageTextPairField", "config": {"max_tokens": 8}}],
    }
    plan = choose_plan([], pack=pack, where="test")
    assert [m.name for m in plan.modalities] == ["pair", "metadata"]
    assert plan.fields()["pair"].max_tokens == 8
    assert plan.fields()["pair"].image_size == (224, 224)
    (sample,) = packed(rows(("a", None, {"png": picture(), "txt": "a caption"})), plan, tmp_path)
    assert sample["pair"].input_ids.shape == (8,)
    assert sample["pair"].text == "a caption"


@pytest.mark.parametrize(
    ("field", "key", "words"),
    [
        ({"name": "d", "field": "DocumentField", "modality": "image"}, "parts", "made of parts: pages, layout"),
        ({"name": "d", "field": "DocumentField", "take": "json"}, "field", "by parts"),
        ({"name": "s", "field": "TimeSeriesField", "key": "series"}, "field", "by parts"),
        ({"name": "i", "field": "ImageField", "key": "image"}, "field", "a field of JSON values"),
        ({"name": "t", "field": "TextField", "key": "a", "on_refused": "keep"}, "on_refused", "drop, absent"),
        ({"name": "t", "field": "TextField", "on_refused": "absent"}, "on_refused", "not json"),
        (SERIES, "parts.timestamps", "no packed modality takes"),
    ],
)
def test_what_can_never_be_packed_is_refused_at_once(field: dict[str, Any], key: str, words: str) -> None:
    """A declaration by which no sample could have the modality is refused when it is read."""
    with pytest.raises(ConfigError) as refused:
        plan_of(field)
    assert refused.value.key == f"pack.fields[0].{key}"
    assert words in refused.value.detail
