"""JSON layouts: what each description reads, and what is refused with its place."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import ConfigError, EncodeError
from mm_assets.media.page_layouts import LAYOUTS, LayoutMap, detect_layout, read_layout
from mm_assets.media.text_boxes import PageLayout, TextBoxes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "spec" / "layouts.md").read_text(encoding="utf-8")

FORM = {
    "form": [
        {
            "id": 7,
            "text": "Name:",
            "box": [1, 2, 9, 4],
            "label": "question",
            "words": [{"text": "Name", "box": [1, 2, 6, 4]}, {"text": ":", "box": [7, 2, 9, 4]}],
            "linking": [[7, 3]],
        },
        {
            "id": 3,
            "text": "Ann",
            "box": [10, 2, 15, 4],
            "label": "answer",
            "words": [{"text": "Ann", "box": [10, 2, 15, 4]}],
            "linking": [[7, 3], [3, 3]],
        },
    ],
    "width": "20",
    "height": 10.0,
}
RECEIPT = {"words": [{"text": "TOTAL 9.00", "box8": [2, 1, 9, 0, 9, 4, 2, 5]}], "labels": {"total": "9.00"}}
PLAIN = {"words": [{"text": "a", "box": [0, 0, 1, 1], "page": 1, "label": 4}], "fields": {"k": "v"}}


def words(*boxes, **columns):
    return TextBoxes(["w"] * len(boxes), boxes, **columns)


def one_word(box, **settings):
    """The table of one word with a box."""
    return read_layout({"words": [{"text": "w", "box": box}]}, LayoutMap(**settings)).words


def test_a_form_has_segments_words_and_links():
    """FUNSD's entries become segments, ids become places, a link stated twice is one, sizes may be text or floats."""
    expected = PageLayout(
        TextBoxes(["Name", ":", "Ann"], [[1, 2, 6, 4], [7, 2, 9, 4], [10, 2, 15, 4]]),
        segments=TextBoxes(["Name:", "Ann"], [[1, 2, 9, 4], [10, 2, 15, 4]], labels=["question", "answer"]),
        word_segments=[0, 0, 1],
        links=[[0, 1], [1, 1]],
        page_sizes=[[20, 10]],
    )
    assert read_layout(FORM) == read_layout(FORM, "funsd") == expected
    assert read_layout(FORM).page_sizes.dtype == "int32"


def test_a_receipt_has_corners_and_key_fields():
    """SROIE's lines keep their four corners beside the box around them; without sizes there are no page sizes."""
    quad = [[2, 1], [9, 0], [9, 4], [2, 5]]
    table = TextBoxes(["TOTAL 9.00"], [[2, 0, 9, 5]], quads=[quad])
    assert read_layout(RECEIPT) == read_layout(RECEIPT, "sroie") == PageLayout(table, fields={"total": "9.00"})


def test_plain_words_have_pages_and_labels():
    """Our own plain list takes pages and labels; a number of a class is taken as its digits."""
    table = TextBoxes(["a"], [[0, 0, 1, 1]], pages=[1], labels=["4"])
    assert read_layout(PLAIN) == read_layout(PLAIN, "words") == PageLayout(table, fields={"k": "v"})
    sized = read_layout({**PLAIN, "width": 5, "height": 6}, num_pages=3)
    assert sized.page_sizes.tolist() == [[5, 6]] * 3


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (FORM, "funsd"),
        (RECEIPT, "sroie"),
        (PLAIN, "words"),
        ({**RECEIPT, **FORM}, "funsd"),
        ({}, None),
        ({"words": []}, None),
        ({"words": [{"word": "speech", "start": 0.5}]}, None),
        ({"words": ["speech"]}, None),
        ({"form": {"box": 1}}, None),
        ({"form": [{"box": [0, 0, 1, 1]}]}, None),
        ([FORM], None),
        (None, None),
    ],
)
def test_the_layout_is_determined_by_its_first_entry(value, name):
    """A layout is recognized by what its first entry has; words of other kinds are none."""
    assert detect_layout(value) == name


@pytest.mark.parametrize(
    ("value", "layout", "expected"),
    [
        ({"license": "x"}, "auto", None),
        ({"form": None, "words": None}, "auto", None),
        ({"form": []}, "auto", PageLayout()),
        ({"words": [], "labels": {"total": "1"}}, "auto", PageLayout(fields={"total": "1"})),
        ({"words": [], "fields": {"total": "1"}}, "auto", PageLayout(fields={"total": "1"})),
        ({"form": None}, "funsd", None),
        ({"ocr": {"words": None}}, LayoutMap(words="ocr.words"), None),
        ({"words": []}, "words", PageLayout()),
    ],
)
def test_no_words_are_not_no_layout(value, layout, expected):
    """An empty list is a document without words; only where nothing is said there is no layout."""
    assert read_layout(value, layout) == expected


@pytest.mark.parametrize(
    ("settings", "box", "expected", "quad"),
    [
        ({}, [1, 2.5, 3, 4], [1, 2.5, 3, 4], None),
        ({}, [[1, 2], [3, 4]], [1, 2, 3, 4], None),
        ({"box_format": "xywh"}, [1, 2, 3, 4], [1, 2, 4, 6], None),
        ({"box_format": "quad"}, [[4, 1], [5, 1], [5, 3], [4, 2]], [4, 1, 5, 3], [[4, 1], [5, 1], [5, 3], [4, 2]]),
        ({"box_format": "poly"}, [3, 4, 1, 2], [1, 2, 3, 4], None),
        ({"box_format": "poly"}, [[0, 1], [2, 0], [5, 9], [1, 1], [0, 3]], [0, 0, 5, 9], None),
        ({"box": ["x0", "y0", "x1", "y1"]}, {"x0": 1, "y0": 2, "x1": 3, "y1": 4}, [1, 2, 3, 4], None),
        ({"box": ["at.0", "at.1", "w", "h"], "box_format": "xywh"}, {"at": [1, 2], "w": 3, "h": 4}, [1, 2, 4, 6], None),
    ],
)
def test_every_form_of_a_box_is_read(settings, box, expected, quad):
    """Corners, extents, four corners, polygons and numbers under keys of their own become one box."""
    entry = {"text": "w", **box} if isinstance(box, dict) else {"text": "w", "box": box}
    table = read_layout({"words": [entry]}, LayoutMap(**settings)).words
    assert table == words(expected, quads=None if quad is None else [quad])


@pytest.mark.parametrize(("scale", "expected"), [("pixels", None), ("0..1", [[1, 1]]), ("0..1000", [[1000, 1000]])])
def test_boxes_keep_their_unit(scale, expected):
    """Boxes are never scaled: a page's size says what unit they have."""
    layout = read_layout({"words": [{"text": "w", "box": [0, 0, 1, 0.5]}]}, LayoutMap(box_scale=scale))
    assert layout.words == words([0, 0, 1, 0.5])
    assert layout == PageLayout(words([0, 0, 1, 0.5]), page_sizes=expected)


def test_pages_hold_their_own_words_and_sizes():
    """Words within pages are on these, each with its own size, and segments are numbered across pages."""
    pages = [
        {"size": [6, 7], "blocks": [{"text": "p", "box": [0, 0, 1, 1], "lines": [{"text": "a", "box": [0, 0, 1, 1]}]}]},
        {"size": [8, 9], "blocks": []},
        {"size": [8, 9], "blocks": [{"text": "q", "box": [0, 0, 2, 2], "lines": None}]},
    ]
    described = LayoutMap(
        pages="doc.pages", segments="blocks", words="lines", width="size.0", height="size.1", label=None
    )
    expected = PageLayout(
        TextBoxes(["a"], [[0, 0, 1, 1]]),
        segments=TextBoxes(["p", "q"], [[0, 0, 1, 1], [0, 0, 2, 2]], pages=[0, 2]),
        word_segments=[0],
        page_sizes=[[6, 7], [8, 9], [8, 9]],
    )
    assert read_layout({"doc": {"pages": pages}}, described) == expected
    assert read_layout({"doc": {"pages": pages}}, described, num_pages=3) == expected
    with pytest.raises(EncodeError, match="3 pages, expected 2"):
        read_layout({"doc": {"pages": pages}}, described, num_pages=2)
    del pages[1]["size"]
    with pytest.raises(EncodeError, match="a page without them"):
        read_layout({"doc": {"pages": pages}}, described)


def test_parallel_lists_are_words():
    """Words that are plain texts take boxes, labels and pages from the lists beside them."""
    described = LayoutMap(words="tokens", box="bboxes", box_scale="0..1000", label="ner_tags", page="pages")
    value = {"tokens": ["a", "b"], "bboxes": [[0, 0, 1, 1], [2, 2, 3, 3]], "ner_tags": [0, 2], "pages": [0, 1]}
    expected = TextBoxes(["a", "b"], value["bboxes"], labels=["0", "2"], pages=[0, 1])
    assert read_layout(value, described) == PageLayout(expected, page_sizes=[[1000, 1000]] * 2)
    del value["ner_tags"]
    assert read_layout(value, described).words.labels == (None, None)
    apart = LayoutMap(box=("x", "y", "w", "h"), box_format="xywh")
    columns = {"words": ["a", "b"], "x": [0, 1], "y": [2, 3], "w": [4, 5], "h": [6, 7]}
    assert read_layout(columns, apart).words.boxes.tolist() == [[0, 2, 4, 8], [1, 3, 6, 10]]
    with pytest.raises(EncodeError, match=r"bboxes: found list of length 1, expected a list of 2"):
        read_layout({**value, "bboxes": [[0, 0, 1, 1]]}, described)


def test_segments_without_words():
    """Without words a layout is its segments, linked by their places where they have no ids."""
    described = LayoutMap(segments="regions", words=None, links="to")
    value = {"regions": [{"text": "a", "box": [0, 0, 1, 1], "to": [[0, 1]]}, {"text": "b", "box": [1, 1, 2, 2]}]}
    layout = read_layout(value, described)
    assert (len(layout.words), layout.segments.texts, layout.links.tolist()) == (0, ("a", "b"), [[0, 1]])


def test_fields_come_from_one_place_or_several():
    """Key fields are an object, one value under its key, or the values of several paths that are there."""
    value = {"words": [], "meta": {"id": 5, "split": None}, "caption": "c"}

    def fields(paths):
        return read_layout(value, LayoutMap(fields=paths)).fields

    assert fields("meta") == {"id": 5, "split": None}
    assert fields("caption") == {"caption": "c"}
    assert fields(["meta.id", "meta.split", "caption", "gone"]) == {"id": 5, "caption": "c"}
    assert fields("gone") == {}


def changed(**entry):
    return {"words": [{"text": "w", "box": [0, 0, 1, 1], **entry}]}


@pytest.mark.parametrize(
    ("value", "layout", "words"),
    [
        ([], "auto", "list of length 0, expected an object"),
        ({"words": ["w"]}, "auto", "words: found entries of no known layout"),
        ({"words": [{"start": 1}]}, "auto", "no known layout"),
        ({"form": 5}, "auto", "no known layout"),
        ({}, "funsd", "form: found nothing, expected a list"),
        ({"words": []}, "funsd", "form: found nothing"),
        ({"words": {}}, "words", "found dict of length 0, expected a list"),
        ({"words": [5]}, "words", r"words\[0\]: found 5, expected an object"),
        ({"words": ["w", 5]}, LayoutMap(box="b"), r"words\[0\]: box"),
        (changed(text=None), "words", r"words\[0\].text: found None, expected text"),
        (changed(label=[]), "words", r"words\[0\].label"),
        (changed(label=True), "words", r"words\[0\].label"),
        (changed(label=10**5000), "words", "an integer of 16610 bits"),
        (changed(page=-1), "words", r"words\[0\].page: found -1"),
        (changed(page=True), "words", r"words\[0\].page"),
        (changed(page=70_000), "words", r"words\[0\].page"),
        (changed(box=None), "words", r"words\[0\]: box: found None"),
        (changed(box="0,0,1,1"), "words", "box: found str"),
        (changed(box=[0, 0, 1]), "words", "found 3 numbers, expected those of xyxy"),
        (changed(box=[0, 0, 1, True]), "words", "box"),
        (changed(box=[0, 0, 1, "1"]), "words", "box"),
        (changed(box=[0, 0, 1, float("nan")]), "words", "box"),
        (changed(box=[0, 0, 1, 1e300]), "words", "box"),
        (changed(box=[0, 0, 1, 10**400]), "words", "box"),
        (changed(), LayoutMap(box_format="quad"), "4 numbers, expected those of quad"),
        (changed(box=[1, 2]), LayoutMap(box_format="poly"), "2 numbers, expected those of poly"),
        (changed(), LayoutMap(box_scale="page"), "a page without them"),
        ({**changed(), "width": 5}, "words", "height: found nothing"),
        ({**changed(), "width": 5, "height": "tall"}, "words", "height"),
        ({**changed(), "width": 0, "height": 5}, "words", "width: found 0"),
        ({**changed(), "width": "9" * 5000, "height": 5}, "words", "width: found str"),
        ({**changed(), "width": "inf", "height": 5}, "words", "width"),
        ({**changed(), "width": "nan", "height": 5}, "words", "width"),
        ({**changed(), "width": True, "height": 5}, "words", "width"),
        ({"words": [*changed()["words"], *changed(page=1)["words"]]}, "words", "entries without a page, and 2 pages"),
    ],
)
def test_an_invalid_layout_is_refused_with_its_place(value, layout, words):
    """A JSON that does not have the layout is an EncodeError that says where it differs."""
    with pytest.raises(EncodeError, match=words):
        read_layout(value, layout)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": 3}, "that no other has"),
        ({"id": None}, r"form\[0\].id: found None"),
        ({"id": 1.0}, r"form\[0\].id"),
        ({"linking": [[7, 4]]}, r"form\[0\].linking\[0\]: found a link to 4"),
        ({"linking": [[7]]}, r"form\[0\].linking\[0\]: found list of length 1"),
        ({"linking": [7]}, r"form\[0\].linking\[0\]"),
        ({"linking": [[7, [3]]]}, r"form\[0\].linking\[0\]"),
        ({"linking": 7}, r"form\[0\].linking: found 7"),
        ({"words": 7}, r"form\[0\].words: found 7"),
    ],
)
def test_wrong_segments_and_links_are_refused(changes, words):
    """A link to nowhere, an id twice or a list that is none is an EncodeError with its place."""
    first, second = FORM["form"]
    with pytest.raises(EncodeError, match=words):
        read_layout({"form": [{**first, **changes}, second]}, "funsd")


def test_several_pages_need_a_page_for_each_word():
    """A layout without pages is one of a single page: its words are not put on the first of several."""
    assert read_layout(FORM, num_pages=1).page_sizes.tolist() == [[20, 10]]
    with pytest.raises(EncodeError, match="entries without a page, and 2 pages"):
        read_layout(FORM, num_pages=2)


_KEYS = st.sampled_from(["form", "words", "text", "box", "box8", "label", "labels", "id", "linking", "page", "width"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=25,
)


@given(_JSON, st.sampled_from(["auto", *LAYOUTS, LayoutMap(segments="form", words="words.0", links="linking")]))
@settings(deadline=None, max_examples=300)
def test_any_json_is_a_layout_or_refused(value, layout):
    """Whatever JSON arrives, reading it gives a layout or None, or raises EncodeError."""
    try:
        found = read_layout(value, layout)
    except EncodeError:
        return
    assert found is None or isinstance(found, PageLayout)


def test_a_description_round_trips_by_its_configuration():
    """A description is restored from its JSON, lists of paths included."""
    for layout in [
        *LAYOUTS.values(),
        LayoutMap(box=("a", "b", "c", "d"), fields=["x", "y.z"], width=None, height=None),
    ]:
        assert LayoutMap.from_config(layout.config) == layout
        assert hash(LayoutMap.from_config(layout.config)) == hash(layout)
    assert set(LAYOUTS["words"].config) == {field.name for field in dataclasses.fields(LayoutMap)}


@pytest.mark.parametrize(
    "config",
    [
        {"box_format": "cxcywh"},
        {"box_format": ["xyxy"]},
        {"box_scale": "inches"},
        {"box_scale": None},
        {"box": None},
        {"box": ["x", "y", "w"]},
        {"box": ["a", "b", "c", "d"], "box_format": "quad"},
        {"box": ["a", "b", "c", 4]},
        {"text": ""},
        {"words": 5},
        {"words": None},
        {"links": "to"},
        {"pages": "pages", "page": "page"},
        {"width": None},
        {"fields": [None]},
        {"bbox": "box"},
    ],
)
def test_wrong_descriptions_are_refused(config):
    """A description with an unknown key, a wrong path or a contradiction is a ConfigError."""
    with pytest.raises(ConfigError, match=r"layout\."):
        LayoutMap.from_config(config)


def test_an_unknown_name_is_refused():
    """A layout that has no such name is a ConfigError that lists those there are."""
    with pytest.raises(ConfigError, match="auto, funsd, sroie, words"):
        read_layout(FORM, "docvqa")


def test_keys_and_names_are_as_documented():
    """The page lists each key of a description with its default, each format and scale, and each name."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (\S+(?:, \S+)*) \| .+ \|$", PAGE, flags=re.MULTILINE)
    listed = {}
    for keys, defaults in rows:
        for key, default in zip(keys.split(", "), defaults.split(", "), strict=True):
            listed[key.strip("`")] = None if default == "null" else default.strip("`")
    assert listed == LayoutMap().config
    allowed = [*LAYOUTS]
    for key in ("box_format", "box_scale"):
        with pytest.raises(ConfigError) as refused:
            LayoutMap.from_config({key: "none of them"})
        allowed += str(refused.value).split("expected one of ")[1].split(", ")
    assert len(allowed) == 12
    assert [value for value in allowed if f"`{value}`" not in PAGE] == []


@pytest.mark.parametrize(
    ("number", "value", "expected"),
    [
        (0, {"document": FORM["form"], "img": {"width": 20, "height": 10}}, read_layout(FORM)),
        (
            1,
            {"tokens": ["w"], "bboxes": [[1, 2, 3, 4]], "ner_tags": ["B-X"]},
            PageLayout(words([1, 2, 3, 4], labels=["B-X"]), page_sizes=[[1000, 1000]]),
        ),
        (
            2,
            {"pages": [{"words": [{"text": "w", "x0": 1, "top": 2, "x1": 3.5, "bottom": 4}], "width": 5, "height": 6}]},
            PageLayout(words([1, 2, 3.5, 4]), page_sizes=[[5, 6]]),
        ),
        (
            3,
            {"phrases": [{"phrase": "w", "bbox": [1, 2, 3, 4]}], "caption": "a w"},
            PageLayout(words([1, 2, 4, 6]), fields={"caption": "a w"}),
        ),
    ],
)
def test_the_examples_of_descriptions_read_their_layouts(number, value, expected):
    """Each description on the page reads a JSON of its kind."""
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(examples) == 4
    described = LayoutMap.from_config(yaml.safe_load(examples[number])["layout"])
    assert read_layout(value, described) == expected
