"""Tables of texts and boxes, and layouts: what they check, and what is computed from them."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import EncodeError
from mm_assets.media.page_layouts import read_layout
from mm_assets.media.text_boxes import PageLayout, TextBoxes

BOX = [[0, 1, 2, 3]]
WORDS = TextBoxes(
    ["Full", "Name", " ", "Ann", "page", "stamp"], [[0, 0, 1, 1]] * 6, labels=[None, None, None, None, None, "mark"]
)
SEGMENTS = TextBoxes(["Full Name", "Ann", "page"], [[0, 0, 1, 1]] * 3, labels=["question", "answer", "other"])
FORM = PageLayout(WORDS, segments=SEGMENTS, word_segments=[0, 0, 1, 1, 2, -1], links=[[0, 1]], page_sizes=[[4, 2]])


def test_columns_are_immutable_copies():
    """What a caller does to its arrays afterwards does not reach the table, and the table's cannot be written."""
    boxes = np.array(BOX)
    table = TextBoxes(["a"], boxes)
    boxes[0, 0] = 9
    assert table.boxes.tolist() == BOX
    with pytest.raises(ValueError, match="read-only"):
        table.boxes[0, 0] = 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.texts = ()


def test_numbers_keep_their_kind():
    """Integers are int32, anything else float64; equality is by value, and pickling changes nothing."""
    assert TextBoxes(["a"], BOX).boxes.dtype == np.int32
    assert TextBoxes(["a"], np.array(BOX, np.float32)).boxes.dtype == np.float64
    assert TextBoxes(["a"], BOX) == TextBoxes(["a"], np.array(BOX, float))
    assert pickle.loads(pickle.dumps(FORM)) == FORM
    assert TextBoxes().boxes.shape == (0, 4)
    assert PageLayout() == PageLayout(TextBoxes(), links=[])
    assert PageLayout() != TextBoxes()


@pytest.mark.parametrize(
    "other",
    [
        TextBoxes(["b"], BOX),
        TextBoxes(["a"], [[0, 1, 2, 4]]),
        TextBoxes(["a"], BOX, pages=[1]),
        TextBoxes(["a"], BOX, labels=["x"]),
        TextBoxes(["a"], BOX, quads=np.zeros((1, 4, 2))),
        TextBoxes(["a", "a"], BOX * 2),
    ],
)
def test_tables_that_differ_are_not_equal(other):
    """Any column that differs makes a table another one."""
    assert TextBoxes(["a"], BOX) != other


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (("a", BOX), {}),
        (([b"a"], BOX), {}),
        ((["a"], [[0, 1, 2]]), {}),
        ((["a"], [[0, 1, 2, 3], [4]]), {}),
        ((["a"], []), {}),
        (([], BOX), {}),
        ((["a"], [["0", "1", "2", "3"]]), {}),
        ((["a"], [[0, 1, 2, float("inf")]]), {}),
        ((["a"], [[0, 1, 2, float("nan")]]), {}),
        ((["a"], [[0, 1, 2, 2**31]]), {}),
        ((["a"], [[0, 1, 2, 10**30]]), {}),
        ((["a"], BOX), {"pages": [-1]}),
        ((["a"], BOX), {"pages": [0.5]}),
        ((["a"], BOX), {"pages": [float("nan")]}),
        ((["a"], BOX), {"pages": [0, 0]}),
        ((["a"], BOX), {"labels": []}),
        ((["a"], BOX), {"labels": [4]}),
        ((["a"], BOX), {"quads": [[0, 1]]}),
    ],
)
def test_wrong_columns_are_refused(arguments, columns):
    """Columns of other lengths, shapes or types are an EncodeError that says what was expected."""
    with pytest.raises(EncodeError, match="expected"):
        TextBoxes(*arguments, **columns)


@pytest.mark.parametrize(
    "columns",
    [
        {"words": ["a"]},
        {"segments": "a"},
        {"word_segments": [0]},
        {"word_segments": [3] * 6},
        {"word_segments": [-2] * 6},
        {"links": [[0, 3]]},
        {"links": [[-1, 0]]},
        {"links": [0, 1]},
        {"fields": ["total"]},
        {"page_sizes": [[4, 0]]},
        {"page_sizes": [4, 2]},
        {"page_sizes": [["4", "2"]]},
    ],
)
def test_wrong_layouts_are_refused(columns):
    """A segment that is not there, a page without extent or a wrong type is an EncodeError."""
    with pytest.raises(EncodeError, match="expected"):
        PageLayout(**{"words": WORDS, "segments": SEGMENTS, **columns})


def test_labels_are_those_of_words_or_of_their_segments():
    """A word's own label has precedence over its segment's; without either it has none."""
    assert FORM.word_labels() == ["question", "question", "answer", "answer", "other", "mark"]
    assert PageLayout(TextBoxes(["a"], BOX)).word_labels() == [None]


def test_bio_labels_begin_with_the_first_word_that_is_not_blank():
    """The first word of a segment begins its entity, blank words and those of no class are outside."""
    assert FORM.bio_labels() == ["B-QUESTION", "I-QUESTION", "O", "B-ANSWER", "O", "B-MARK"]
    assert FORM.bio_labels(outside=())[4] == "B-OTHER"


def test_bio_labels_are_those_that_layoutlm_is_trained_with(shared_data):
    """On every form of FUNSD, words that are not blank have the labels of the published loading script's rule."""
    import json
    import tarfile

    count = 0
    with tarfile.open(next((shared_data / "docai").glob("*.tar"))) as shard:
        forms = [json.load(shard.extractfile(m)) for m in shard if m.name.endswith(".json")]
    for form in (form["form"] for form in forms if "form" in form):
        expected = []
        for entry in form:
            texts = [word["text"] for word in entry["words"] if word["text"].strip()]
            name = entry["label"].upper()
            expected += [
                (text, "O" if name == "OTHER" else f"{'I' if k else 'B'}-{name}") for k, text in enumerate(texts)
            ]
        layout = read_layout({"form": form})
        found = zip(layout.words.texts, layout.bio_labels(), strict=True)
        assert [(text, label) for text, label in found if text.strip()] == expected
        count += len(expected)
    assert count > 4000


@given(
    st.lists(st.tuples(*[st.integers(-50, 3000)] * 4), min_size=1, max_size=5),
    st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_normalized_boxes_are_layoutlms(boxes, size, floats):
    """Each coordinate is int(1000 * x / extent), clipped to 0 to 1000, for integers and floats alike."""
    scale = 1.5 if floats else 1
    table = TextBoxes(["w"] * len(boxes), np.array(boxes) * scale, quads=np.array(boxes * 2).reshape(-1, 4, 2) * scale)
    layout = PageLayout(table, page_sizes=[size]).normalized()
    extents = (*size, *size)
    expected = [
        [min(max(int(1000 * (x * scale) / extent), 0), 1000) for x, extent in zip(box, extents, strict=True)]
        for box in boxes
    ]
    assert layout.words.boxes.tolist() == expected
    assert layout.words.boxes.dtype == layout.words.quads.dtype == np.int32
    assert layout.words.quads.reshape(-1, 4).tolist() == expected * 2
    assert layout.page_sizes.tolist() == [[1000, 1000]]


def test_normalizing_needs_page_sizes():
    """Without page sizes there is nothing to normalize by; a page of next to no extent gives 1000."""
    with pytest.raises(EncodeError, match="page_sizes"):
        PageLayout(TextBoxes(["a"], BOX)).normalized()
    tiny = PageLayout(TextBoxes(["a"], BOX), page_sizes=[[5e-324, 5e-324]]).normalized()
    assert tiny.words.boxes.tolist() == [[0, 1000, 1000, 1000]]


def test_a_border_belongs_to_its_page():
    """Boxes and corners are outside only past their own page's border, and clipping moves them onto it."""
    quads = [[[0, 0], [2, 0], [2, 2], [0, 2]]] * 4
    table = TextBoxes(
        ["w"] * 4, [[0, 0, 2, 2], [0, 0, 2, 2.5], [-1, 0, 2, 2], [0, 0, 1, 1]], pages=[0, 0, 0, 1], quads=quads
    )
    sizes = np.array([[2, 2], [1, 2]], np.int32)
    assert table.outside(sizes).tolist() == [False, True, True, True]
    clipped = table.clipped(sizes)
    assert not clipped.outside(sizes).any()
    assert clipped.boxes.tolist() == [[0, 0, 2, 2], [0, 0, 2, 2], [0, 0, 2, 2], [0, 0, 1, 1]]
    assert clipped.quads[3].tolist() == [[0, 0], [1, 0], [1, 2], [0, 2]]
