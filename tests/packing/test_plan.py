import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mm_assets.errors import ConfigError, SchemaMismatchError
from mm_assets.fields import BytesField, ImageField, JSONField, ScalarField, SequenceField, TextField
from mm_assets.packing.plan import PackPlan, Selector
from mm_assets.packing.presets import PRESETS, check_pack_config, choose_plan
from mm_assets.packing.survey import MAX_GROUPS
from mm_assets.rows.schema import MULTIMODAL_SCHEMA, UserColumn
from mm_assets.rows.source_ref import build_source_ref

TYPES = {
    "png": "image/png",
    "svg": "image/svg+xml",
    "wav": "audio/wav",
    "m4a": "audio/mp4",
    "npy": "application/x-npy",
    "mp4": "video/mp4",
    "wmv": "video/x-ms-wmv",
}
KINDS = {
    "txt": "text",
    "caption": "text",
    "csv": "text",
    "srt": "text",
    "mp4": "video",
    "wmv": "video",
    "png": "image",
    "svg": "image",
    "wav": "audio",
    "m4a": "audio",
}


def rows(*samples: list[str], interleaved: bool = False, contents: Sequence[Any] | None = None) -> list[pa.RecordBatch]:
    """Rows of samples whose members have these names (without their key), and these JSONs; batches split samples."""
    made = []
    for number, names in enumerate(samples):
        key = f"s{number}"
        row = {"sample_id": key, "position": -1, "modality": "metadata"}
        row["metadata_json"] = None if contents is None else json.dumps(contents[number])
        made.append({**row, "source_ref": build_source_ref(path="x.tar", member=f"{key}.json")})
        for position, name in enumerate(names):
            extension = name.rsplit(".", 1)[-1]
            modality = {"npy": "array", "mid": "midi"}.get(extension, KINDS.get(extension, "binary"))
            frame = None
            member = f"{key}.{name}"
            if interleaved and modality == "text":
                member = f"{key}.json"
            elif interleaved:
                frame = position
            made.append(
                {
                    "sample_id": key,
                    "position": position,
                    "modality": modality,
                    "content_type": TYPES.get(extension),
                    "source_ref": build_source_ref(path="x.tar", member=member, frame_index=frame),
                }
            )
    return pa.Table.from_pylist(made, MULTIMODAL_SCHEMA).to_batches(max_chunksize=2)


def names_of(plan: PackPlan) -> list[tuple[str, str, str]]:
    """Name, item field and take of each content modality."""
    found = []
    for name, made, modality in zip(plan.fields(), plan.fields().values(), plan.modalities, strict=True):
        if modality.selector.take in ("one", "sequence"):
            inner = made.inner if isinstance(made, SequenceField) else made
            found.append((name, type(inner).__name__, modality.selector.take))
    return found


# --- the choice of a preset -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "interleaved", "expected"),
    [
        ([["txt", "png", "txt"]], True, "interleaved"),
        ([["png"], ["txt"]], True, "interleaved"),
        ([["png", "txt"]] * 3, False, "image_text"),
        ([["png", "txt"], ["png"]], False, "image_text"),
        ([["png", "txt"], ["txt"]], False, "generic"),
        ([["png", "caption", "txt"]], False, "generic"),
        ([["png", "boxes.csv"]], False, "generic"),
        ([["wav", "txt"]] * 2, False, "speech"),
        ([["m4a", "txt"]] * 2, False, "speech"),
        ([["wav"]], False, "generic"),
        ([["wav", "txt", "png"]], False, "generic"),
        ([["mp4"]], False, "video"),
        ([["mp4", "srt", "txt"], ["mp4", "wav"]], False, "video"),
        ([["wmv"]], False, "generic"),
        ([["0.mp4", "1.mp4"]], False, "generic"),
        ([["mp4", "png"]], False, "generic"),
        ([["wav", "txt", "srt"], ["wav", "srt"]], False, "speech"),
        ([["wav", "txt", "caption"]], False, "generic"),
        ([["mid"], ["wav", "mid", "lyrics.txt"]], False, "music"),
        ([["rgb.png", "state.npy"]], False, "robotics"),
        ([["top.mp4", "obs.timestamp.npy", "action.npy"]], False, "robotics"),
        ([["rgb.png", "depth.png"]], False, "robotics"),
        ([["png", "clip.npy"]], False, "generic"),
        ([["state.npy"]], False, "generic"),
        ([], False, "generic"),
    ],
)
def test_rows_choose_the_preset_that_loses_none(samples: list[list[str]], interleaved: bool, expected: str) -> None:
    """Without a declaration the preset follows from the first shard's rows, and is generic where another would drop."""
    assert choose_plan(rows(*samples, interleaved=interleaved), pack=None, where="test").preset == expected


FORM = {"form": [{"box": [0, 0, 1, 1], "text": "a", "words": [{"box": [0, 0, 1, 1], "text": "a"}]}]}


def test_layouts_in_the_json_make_documents() -> None:
    """Images whose JSON mostly holds a known layout are documents, whatever text comes with them."""
    samples = [["png"], ["png", "boxes.csv"], ["png"]]
    many = choose_plan(rows(*samples, contents=[FORM, FORM, {}]), pack=None, where="test")
    few = choose_plan(rows(*samples, contents=[FORM, {}, {}]), pack=None, where="test")
    assert (many.preset, few.preset) == ("document", "generic")
    assert names_of(many) == []
    assert list(many.modalities[0].parts) == ["pages", "layout"]


@pytest.mark.parametrize(
    ("contents", "key"),
    [
        ([{"words": [{"word": "a", "start": 0, "end": 1}]}, {}], ("words",)),
        ([{"segments": [{"text": "a", "start": 0, "end": 1}]}], ("segments",)),
        ([{"words": "a b"}], ()),
        ([{"words": [{"word": "a", "start": 0}]}, {"words": "a"}], ()),
        ([{"words": [{"text": "a", "box": [0, 0, 1, 1]}]}], ()),
    ],
)
def test_word_timings_are_found_in_the_json(contents: list[Any], key: tuple[str, ...]) -> None:
    """Speech takes its words from the JSON key that holds timed words wherever it stands, else from subtitle files."""
    samples = [["wav", "txt"]] * len(contents)
    plan = choose_plan(rows(*samples, contents=contents), pack="speech", where="test")
    words = next(modality for modality in plan.modalities if modality.name == "words")
    assert words.field_type == "TimedTextField"
    assert words.selector.key == key
    assert words.selector.take == ("json" if key else "one")


def test_robots_have_series_where_there_is_a_clock() -> None:
    """With a clock each array is a series dated by it, without one an array; cameras, depth and task are detected."""
    names = ["top.mp4", "rgb.png", "rgb.depth.png", "obs.timestamp.npy", "state.npy", "done.npy", "txt"]
    content = [{"language_instruction": "pick", "timestamp": 0.5}]
    plan = choose_plan(rows(names, contents=content), pack=None, where="test")
    found = {modality.name: modality.field_type for modality in plan.modalities}
    assert found == {
        "done": "TimeSeriesField",
        "obs.timestamp": "NDArrayField",
        "state": "TimeSeriesField",
        "rgb": "ImageField",
        "rgb.depth": "DepthField",
        "text": "TextField",
        "top": "SyncedVideoAudioField",
        "task": "TextField",
        "timestamp": "ScalarField",
        "rest": "SequenceField",
        "rows": "JSONField",
        "metadata": "JSONField",
    }
    state = next(modality for modality in plan.modalities if modality.name == "state")
    assert (state.parts["timestamps"].role, state.parts["timestamps"].take) == ("obs.timestamp", "shared")
    bare = choose_plan(rows(names[1:3] + names[4:6], contents=[{"task": 3}]), pack="robotics", where="test")
    fields = {modality.name: modality.field_type for modality in bare.modalities}
    assert (fields["state"], fields["done"]) == ("NDArrayField", "NDArrayField")
    assert "task" not in fields


def test_an_array_has_the_clock_whose_role_begins_as_its_own() -> None:
    """Of several clocks an array has the nearest by name, one without its own that of the most samples."""
    names = ["imu.npy", "imu.timestamp.npy", "imu.gyro.npy", "imus.npy", "arm.npy", "arm.timestamp.npy", "top.mp4"]
    plan = choose_plan(rows(names), pack="robotics", where="test")
    clocks = {m.name: m.parts["timestamps"].role for m in plan.modalities if m.field_type == "TimeSeriesField"}
    assert clocks == {
        "imu": "imu.timestamp",
        "imu.gyro": "imu.timestamp",
        "imus": "arm.timestamp",
        "arm": "arm.timestamp",
    }


def test_numbers_after_a_role_are_one_group() -> None:
    """Frames of each camera are a sequence of their own, which takes any number of them and of no other camera."""
    plan = choose_plan(rows(["left.0.png", "left.1.png", "a.b.0.png", "C#.png"]), pack="generic", where="test")
    found = {m.name: (m.field_type, m.selector.role, m.selector.take) for m in plan.modalities[:3]}
    assert found == {
        "C#": ("ImageField", "C#", "one"),
        "a.b": ("SequenceField", "a.b.#", "sequence"),
        "left": ("SequenceField", "left.#", "sequence"),
    }
    (left,) = (m.selector for m in plan.modalities if m.name == "left")
    ranks = [left.rank("image", role, "png") is not None for role in ("left.12", "left", "left.x", "right.12", "12")]
    assert ranks == [True, False, False, False, False]


def test_declared_preset_reads_no_rows() -> None:
    """A fixed preset costs no look at the shard."""

    def never() -> Any:
        raise AssertionError("rows were read")
        yield

    for preset in set(PRESETS) - {"document", "generic", "robotics", "speech"}:
        assert choose_plan(never(), pack=preset, where="test").preset == preset


def test_every_preset_carries_the_metadata() -> None:
    """Each packed sample also has its JSON, whatever the preset."""
    for pack in (*PRESETS, {"fields": [{"name": "t", "field": "TextField"}]}):
        plan = choose_plan(rows(["txt"]), pack=pack, where="test")
        assert plan.fields()["metadata"] == JSONField()
        assert plan.special("metadata") is not None


# --- generic ----------------------------------------------------------------------------------------------------------


def test_generic_gives_each_role_its_modality() -> None:
    """Roles name packed modalities, fields follow from modality and type, and what repeats is a sequence."""
    plan = choose_plan(
        rows(
            ["png", "txt", "state.npy", "rgb.png", "wav", "mp4", "lyrics.txt"],
            ["0.png", "1.png", "svg", "mid", "xyz", "txt", "caption"],
        ),
        pack="generic",
        where="test",
    )
    assert names_of(plan) == [
        ("state", "NDArrayField", "one"),
        ("audio", "AudioField", "one"),
        ("binary", "BytesField", "one"),
        ("image", "ImageField", "one"),
        ("image_2", "ImageField", "sequence"),
        ("rgb", "ImageField", "one"),
        ("midi", "BytesField", "one"),
        ("text", "TextField", "sequence"),
        ("lyrics", "TextField", "one"),
        ("video", "SyncedVideoAudioField", "one"),
    ]
    assert plan.fields()["rest"] == SequenceField(BytesField())
    assert plan.fields()["rows"] == JSONField()


def test_generic_types_follow_the_majority() -> None:
    """A group of files that its field mostly cannot read is kept as bytes; a few strays go to the rest."""
    few = choose_plan(rows(*([["png"]] * 3), ["svg"]), pack="generic", where="test")
    many = choose_plan(rows(["png"], *([["svg"]] * 3)), pack="generic", where="test")
    assert few.fields()["image"] == ImageField()
    assert many.fields()["image"] == BytesField()


@pytest.mark.parametrize("name", ["rest", "rows", "metadata"])
def test_roles_do_not_take_the_plans_own_names(name: str) -> None:
    """A role called like one of the plan's own modalities gets its row modality in front."""
    plan = choose_plan(rows([f"{name}.png", f"{name}.npy"]), pack="generic", where="test")
    assert [n for n, _, _ in names_of(plan)] == [f"array_{name}", f"image_{name}"]


def test_names_that_collide_are_numbered() -> None:
    """Groups that want one name all get a different one, and each still takes its own rows."""
    plan = choose_plan(
        rows(["image.npy", "png", "image_image.png", "image.png", "0.png"]), pack="generic", where="test"
    )
    names = [n for n, _, _ in names_of(plan)]
    assert len(set(names)) == 5
    for modality, role in (("array", "image"), ("image", ""), ("image", "image"), ("image", "7")):
        assert sum(m.selector.rank(modality, role, "png") is not None for m in plan.modalities) == 1


def test_rare_roles_go_to_the_rest() -> None:
    """More groups than a packed file has room for leave the rarest to the rest."""
    names = [f"r{n}.png" for n in range(60)]
    plan = choose_plan(rows(names, names[:10]), pack="generic", where="test")
    assert len(names_of(plan)) == MAX_GROUPS
    assert len(plan.modalities) == 32
    assert {f"r{n}" for n in range(10)} <= {n for n, _, _ in names_of(plan)}


def test_generic_does_not_depend_on_the_order_of_members() -> None:
    """The same kinds of row give the same plan, wherever they stand."""
    names = ["png", "txt", "a.npy", "b.npy"]
    plans = {
        json.dumps(choose_plan(rows(list(p)), pack="generic", where="t").to_json())
        for p in itertools.permutations(names)
    }
    assert len(plans) == 1


def test_roles_are_not_patterns() -> None:
    """Stars, question marks and brackets in a role stand for themselves."""
    plan = choose_plan(rows(["a*[b]?.png"]), pack="generic", where="test")
    selector = plan.modalities[0].selector
    assert selector.rank("image", "a*[b]?", "png") == 0
    assert selector.rank("image", "axxb?", "png") is None


# --- selectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "key", "expected"),
    [
        (Selector(), ("image", "rgb", "png"), 0),
        (Selector(modality="image"), ("text", "", "txt"), None),
        (Selector(role="cam*"), ("image", "camera", "png"), 0),
        (Selector(role="cam*"), ("image", "depth", "png"), None),
        (Selector(role=""), ("image", "depth", "png"), None),
        (Selector(role="#"), ("image", "12", "png"), 0),
        (Selector(role="#"), ("image", "12a", "png"), None),
        (Selector(extension=("txt", "c*")), ("text", "", "caption"), 1),
        (Selector(extension=("txt",)), ("text", "", "csv"), None),
        (Selector(take="rest"), ("text", "", "csv"), None),
        (Selector(take="metadata"), ("metadata", "", "json"), None),
    ],
)
def test_selector_ranks_what_it_takes(selector: Selector, key: tuple[str, str, str], expected: int | None) -> None:
    """A selector takes rows by modality, role and extension, and prefers earlier extensions."""
    assert selector.rank(*key) == expected


# --- declarations -----------------------------------------------------------------------------------------------------


def test_fields_add_to_a_preset_and_replace_by_name() -> None:
    """Declared fields select first, a preset's field of the same name is replaced, the others stay."""
    pack = {
        "preset": "image_text",
        "fields": [
            {"name": "image", "field": "ImageField", "config": {"encoding": "jpeg"}, "modality": "image"},
            {"name": "label", "field": "ScalarField", "config": {"dtype": "int64"}, "extension": ".CLS"},
        ],
    }
    plan = choose_plan([], pack=pack, where="test")
    assert [m.name for m in plan.modalities] == ["image", "label", "text", "metadata"]
    assert plan.fields()["image"] == ImageField(encoding="jpeg")
    assert plan.modalities[1].selector.extension == ("cls",)


def test_generic_leaves_declared_rows_alone() -> None:
    """Rows that a declared field takes form no group of their own."""
    pack = {"preset": "generic", "fields": [{"name": "picture", "field": "ImageField", "modality": "image"}]}
    plan = choose_plan(rows(["png", "txt"]), pack=pack, where="test")
    assert [m.name for m in plan.modalities] == ["picture", "text", "rest", "rows", "metadata"]


def test_sequence_of_a_field_may_be_written_short() -> None:
    """``take: sequence`` makes a sequence of the field that is named."""
    long = {"name": "t", "field": "SequenceField", "config": {"inner": {"type": "TextField"}}}
    short = {"name": "t", "field": "TextField", "take": "sequence"}
    plans = [choose_plan([], pack={"fields": [f]}, where="test") for f in (long, short)]
    assert plans[0] == plans[1]
    assert plans[0].fields()["t"] == SequenceField(TextField())


FIELD = {"name": "t", "field": "TextField"}
WRONG: list[tuple[Any, str, str]] = [
    ("mosaic", "pack", "allowed: interleaved, image_text, image_text_pair, speech, video"),
    (3, "pack", "expected a preset"),
    ({}, "pack", "is empty"),
    ({"preset": "mosaic"}, "pack.preset", "allowed: interleaved"),
    ({"preset": None}, "pack.preset", "allowed: interleaved"),
    ({"feilds": []}, "pack.feilds", "allowed: preset, fields, columns"),
    *(({"columns": wrong}, "pack.columns", "expected a list of names") for wrong in ("score", [], [""], [3], None)),
    ({"fields": [{**FIELD, "take": "column"}]}, "pack.fields[0].key", "the name of one column"),
    ({"fields": [{**FIELD, "take": "column", "key": ["a", "b"]}]}, "pack.fields[0].key", "the name of one column"),
    ({"fields": [{**FIELD, "take": "column", "key": "a", "role": "x"}]}, "pack.fields[0].role", "takes none"),
    ({"fields": {}}, "pack.fields", "expected a list"),
    ({"fields": ["x"]}, "pack.fields[0]", "expected keys and values"),
    ({"fields": [{**FIELD, "rolle": "x"}]}, "pack.fields[0].rolle", "allowed: name, field, config"),
    ({"fields": [{"field": "TextField"}]}, "pack.fields[0].name", "is missing"),
    ({"fields": [{"name": "", "field": "TextField"}]}, "pack.fields[0].name", "expected text"),
    ({"fields": [{"name": "t"}]}, "pack.fields[0].field", "is missing"),
    ({"fields": [{"name": "t", "field": "Txt"}]}, "pack.fields[0].field", "TextField"),
    ({"fields": [{**FIELD, "config": {"a": 1}}]}, "pack.fields[0].config.a", "TextField"),
    ({"fields": [{**FIELD, "take": "all"}]}, "pack.fields[0].take", "allowed: one, sequence"),
    ({"fields": [{**FIELD, "take": "metadata"}]}, "pack.fields[0].field", "expected JSONField"),
    ({"fields": [{**FIELD, "take": "listing"}]}, "pack.fields[0].field", "expected JSONField"),
    ({"fields": [{**FIELD, "take": "rest"}]}, "pack.fields[0].field", "expected SequenceField of BytesField"),
    ({"fields": [{**FIELD, "modality": 3}]}, "pack.fields[0].modality", "expected text"),
    ({"fields": [{**FIELD, "role": None}]}, "pack.fields[0].role", "expected text"),
    ({"fields": [{**FIELD, "extension": []}]}, "pack.fields[0].extension", "expected a pattern"),
    ({"fields": [FIELD, FIELD]}, "pack.fields[1].name", "twice"),
    ({"fields": [{**FIELD, "name": n} for n in ("plumless", "buckeroo")]}, "pack.fields[1].name", "CRC-32"),
    ({"fields": [{**FIELD, "name": "\ud800"}]}, "pack.fields[0].name", "not UTF-8"),
    ({"fields": [{**FIELD, "name": "metadata"}]}, "pack.fields", "take: metadata"),
    ({"fields": [{**FIELD, "name": f"t{n}"} for n in range(32)]}, "pack.fields", "33 packed modalities"),
    ({"fields": []}, "pack.fields", "take no content rows"),
    ({"fields": [{"name": "m", "field": "JSONField", "take": "metadata"}]}, "pack.fields", "take no content rows"),
    (
        {"fields": [FIELD, *({"name": n, "field": "JSONField", "take": "metadata"} for n in "mn")]},
        "pack.fields[2].take",
        "already taken by 'm'",
    ),
]


@pytest.mark.parametrize(("pack", "key", "expected"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_declaration_is_refused_by_key(pack: Any, key: str, expected: str) -> None:
    """A wrong key or value is refused before any row is read, naming file, key and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        check_pack_config(pack, where="defs.yaml")
    assert caught.value.where == "defs.yaml"
    assert caught.value.key == key
    assert expected in str(caught.value)
    with pytest.raises(ConfigError):
        choose_plan([], pack=pack, where="defs.yaml")


@pytest.mark.parametrize("pack", [None, *PRESETS, {"preset": "generic", "fields": [FIELD]}, {"fields": [FIELD]}])
def test_right_declaration_is_accepted_without_rows(pack: Any) -> None:
    """Presets and fields pass when a declaration is loaded."""
    check_pack_config(pack, where="defs.yaml")


# --- columns ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    UserColumn(name="flag", source="flag", type="bool"),
    UserColumn(name="size", source="size", type="int64"),
    UserColumn(name="url", source="url", type="string"),
    UserColumn(name="tags", source="tags", type="list<string>"),
    UserColumn(name="extra", source="extra", type="json"),
    UserColumn(name="alt", source="alt", type="string", rows="image"),
    UserColumn(name="aesthetic_score", source="", type="double"),
)


def columns_of(pack: Any, batches: Sequence[pa.RecordBatch] = ()) -> dict[str, Any]:
    """The fields of the packed modalities that are columns."""
    plan = choose_plan(batches, pack=pack, where="defs.yaml", columns=COLUMNS)
    stored = PackPlan.from_json(json.loads(json.dumps(plan.to_json())), where="schema.json")
    assert stored == plan
    return {m.name: m.field() for m in plan.modalities if m.selector.take == "column"}


def test_columns_have_the_field_of_their_type() -> None:
    """`all` packs every column of metadata rows; names and patterns those they name, in the columns' order."""
    assert columns_of({"preset": "image_text", "columns": "all"}) == {
        "flag": ScalarField("bool"),
        "size": ScalarField("int64"),
        "url": TextField(),
        "tags": JSONField(),
        "extra": JSONField(),
        "aesthetic_score": ScalarField("float64"),
    }
    assert list(columns_of({"preset": "image_text", "columns": ["aes*", "url", "u*"]})) == ["url", "aesthetic_score"]


def test_more_columns_than_a_file_holds() -> None:
    """A declaration whose columns do not fit beside the preset's is refused with the room that there is."""
    many = tuple(UserColumn(name=f"c{n}", source=f"c{n}", type="int64") for n in range(40))
    plan = choose_plan([], pack={"preset": "image_text", "columns": ["c1*", "c2*", "c3"]}, where="test", columns=many)
    assert len(plan.modalities) == 3 + 11 + 11 + 1
    with pytest.raises(ConfigError, match=r"gives 40 columns, .* has room for 29: list those to pack") as caught:
        choose_plan([], pack={"preset": "image_text", "columns": "all"}, where="test", columns=many)
    assert caught.value.key == "pack.columns"


def test_columns_alone_leave_the_preset_to_the_rows() -> None:
    """Without preset and fields the preset is chosen as without `pack`, and discovered groups leave room."""
    plan = choose_plan(rows(["png", "txt"]), pack={"columns": ["url"]}, where="test", columns=COLUMNS)
    assert (plan.preset, [m.name for m in plan.modalities]) == ("image_text", ["image", "text", "metadata", "url"])
    many = rows([f"r{n}.bin" for n in range(MAX_GROUPS + 5)])
    plan = choose_plan(many, pack={"preset": "generic", "columns": "all"}, where="test", columns=COLUMNS)
    assert len(plan.modalities) == MAX_GROUPS + 3


def test_a_declared_field_packs_a_column_its_own_way() -> None:
    """A field of `take: column` may have another name or other settings, and replaces the column of its name."""
    small = {"name": "aesthetic_score", "field": "ScalarField", "config": {"dtype": "float32"}}
    fields = [
        {**small, "take": "column", "key": "aesthetic_score"},
        {"name": "link", "field": "TextField", "take": "column", "key": "url"},
    ]
    found = columns_of({"preset": "image_text", "fields": fields, "columns": ["aes*", "size"]})
    assert found == {"aesthetic_score": ScalarField("float32"), "link": TextField(), "size": ScalarField("int64")}


@pytest.mark.parametrize(
    ("pack", "key", "expected"),
    [
        ({"columns": ["nope*"]}, "pack.columns", "'nope*' gives no column, there are: 'flag', 'size', 'url'"),
        ({"columns": ["url", "alt"]}, "pack.columns", "'alt' of image rows: only columns of metadata rows"),
        (
            {"columns": "all", "fields": [{"name": "url", "field": "ImageField"}]},
            "pack.columns",
            "the column 'url' and the packed modality 'url' (ImageField, take: one)",
        ),
        (
            {"fields": [{"name": "x", "field": "TextField", "take": "column", "key": "alt"}]},
            "pack.fields[0].key",
            "'alt' of image rows",
        ),
    ],
)
def test_columns_that_cannot_be_packed_are_refused(pack: Any, key: str, expected: str) -> None:
    """A name that gives no column, one of items, and one that is taken are refused, naming what there is."""
    check_pack_config({"preset": "image_text", **pack}, where="defs.yaml")
    with pytest.raises(ConfigError) as caught:
        columns_of({"preset": "image_text", **pack})
    assert caught.value.key == key
    assert expected in str(caught.value)


def test_plan_survives_json() -> None:
    """What `schema.json` stores gives the same plan and the same fields."""
    for pack in (*PRESETS, {"preset": "generic", "fields": [{"name": "l", "field": "ScalarField", "role": "x[0-9]"}]}):
        plan = choose_plan(rows(["png", "txt", "a.npy"]), pack=pack, where="test")
        again = PackPlan.from_json(json.loads(json.dumps(plan.to_json())), where="schema.json")
        assert again == plan
        assert again.fields() == plan.fields()
        assert [spec.name for spec in again.specs()] == [m.name for m in plan.modalities]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"preset": "x"},
        {"preset": 1, "modalities": [FIELD]},
        {"preset": "", "modalities": []},
        {"preset": "", "modalities": [1]},
    ],
    ids=str,
)
def test_stored_plan_of_another_shape_is_refused(value: dict[str, Any]) -> None:
    """A `schema.json` without a plan is named."""
    with pytest.raises(SchemaMismatchError, match=r"schema\.json: not a pack plan"):
        PackPlan.from_json(value, where="schema.json")


@pytest.mark.parametrize("inner", [False, True])
def test_a_stored_plan_imports_nothing_that_is_not_declared(
    inner: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import path in `schema.json`, also of a sequence's items, is refused by name unless the declaration has it."""
    (tmp_path / "unasked.py").write_text("raise RuntimeError('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"inner": {"type": "unasked:Own"}}
    stored = (
        {"name": "x", "field": "SequenceField", "config": config} if inner else {"name": "x", "field": "unasked:Own"}
    )
    plan = {"preset": "", "modalities": [stored]}
    other = {"fields": [{"name": "y", "field": "another:Own"}]}
    for declared in (None, "generic", other):
        with pytest.raises(SchemaMismatchError, match=r"schema\.json: found the field 'unasked:Own'.*--new-schema"):
            PackPlan.from_json(plan, where="schema.json", declared=declared)
    with pytest.raises(SchemaMismatchError, match="it was imported"):
        PackPlan.from_json(plan, where="schema.json", declared={"fields": [{"name": "y", "field": "unasked:Own"}]})


def test_a_shared_row_is_still_there_for_the_preset() -> None:
    """A declared series that shares the clock leaves the clock, and the other series on it, to the preset."""
    declared = {
        "name": "state",
        "field": "TimeSeriesField",
        "parts": {
            "timestamps": {"modality": "array", "role": "timestamp", "take": "shared"},
            "values": {"modality": "array", "role": "state"},
        },
    }
    names = ["top.mp4", "timestamp.npy", "state.npy", "action.npy"]
    plan = choose_plan(rows(names), pack={"preset": "robotics", "fields": [declared]}, where="test")
    found = {modality.name: modality.field_type for modality in plan.modalities}
    assert found["action"] == "TimeSeriesField"
    assert found["timestamp"] == "NDArrayField"


def test_values_that_a_preset_guesses_cost_no_sample() -> None:
    """What robotics and speech take out of the JSON unasked may be wrong in a later sample without costing it."""
    robot = choose_plan(
        rows(["rgb.png", "state.npy"], contents=[{"task": "x", "timestamp": 1}]), pack=None, where="test"
    )
    speech = choose_plan(
        rows(["wav", "txt"], contents=[{"words": [{"word": "a", "start": 0, "end": 1}, {"word": "7"}]}]),
        pack=None,
        where="test",
    )
    guessed = [m.selector for m in (*robot.modalities, *speech.modalities) if m.selector.take == "json"]
    assert [selector.key for selector in guessed] == [("task",), ("timestamp",), ("words",)]
    assert {selector.on_refused for selector in guessed} == {"absent"}
    assert speech.fields()["words"].untimed == "drop"


@pytest.mark.parametrize(
    ("preset", "names", "left"),
    [
        ("image_text", ["image..png", "text..txt"], []),
        ("image_text", ["image.left.png", "image..jpg", "text..csv", "text..txt", "audio..wav"], [1, 2, 4]),
        ("interleaved", ["image.0.png", "image.1.png", "text..json", "midi..mid"], [3]),
        ("generic", ["midi..mid", "binary..x"], []),
    ],
)
def test_rows_without_a_place_by_their_names(preset: str, names: list[str], left: list[int]) -> None:
    """Of several rows a "one" takes the first by preference, a sequence all; a plan with a rest takes everything."""
    plan = choose_plan(rows(["png", "txt"]), pack=preset, where="defs.yaml")
    assert plan.unplaced([tuple(name.split(".")) for name in names]) == left
