import json
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import CorruptError, EncodeError, FormatError, LimitError
from mm_assets.fields import Document, DocumentField, ImageField, PageLayout, TextBoxes
from mm_assets.fields.document_payload import Head
from mm_assets.media.page_layouts import LayoutMap
from mm_assets.testing import FieldSuite

from .conftest import image_file, picture

PIXELS = picture(12, 17)
GREY = picture(9, 5, 1, seed=1)
PNG = image_file(Image.fromarray(PIXELS), "PNG")
WORDS = TextBoxes(
    ["Total", "", "9.00 €"], [[0, 0, 5, 3], [5, 0, 5, 0], [6, 2, 17, 12]], labels=["question", None, "answer"]
)
LAYOUT = PageLayout(
    WORDS,
    segments=TextBoxes(["Total", "9.00  €"], [[0, 0, 5, 3], [6, 2, 17, 12]], labels=["question", "answer"]),
    word_segments=[0, -1, 1],
    links=[[0, 1], [1, 1]],
    fields={"total": "9.00", "lines": [{"n": 1}]},
    page_sizes=[[17, 12]],
)
QUADS = PageLayout(
    TextBoxes(
        ["a", "b"],
        [[0.5, 0, 2, 2], [1, 1, 4.25, 3]],
        pages=[1, 0],
        quads=[[[0.5, 0], [2, 0.5], [2, 2], [0.5, 1]], [[1, 1], [4.25, 1], [4.25, 3], [1, 3]]],
    ),
    page_sizes=[[17, 12], [5, 9]],
)


def with_words(boxes: Any, **columns: Any) -> PageLayout:
    """Words "w" in given boxes."""
    return PageLayout(TextBoxes(["w"] * len(boxes), boxes, **columns))


class TestDocumentField(FieldSuite):
    fields = [
        DocumentField(),
        DocumentField(image=ImageField(encoding="jpeg", size=(8, 6), channels=3)),
        DocumentField(layout="sroie"),
        DocumentField(layout=LayoutMap(box="bbox", box_format="xywh", fields=("caption", "id"))),
        DocumentField(layout=LayoutMap(box=("x0", "y0", "x1", "y1"))),
        DocumentField(outside="clip"),
        DocumentField(normalize=True),
        DocumentField(max_pages=3),
    ]
    cases = [
        (Document([PIXELS], LAYOUT), Document([PIXELS], LAYOUT)),
        (Document((PNG, GREY), QUADS, (2, 5)), Document([PIXELS, GREY], QUADS, [2, 5])),
        (Document([bytearray(PNG)], PageLayout()), Document([PIXELS], PageLayout(page_sizes=[[17, 12]]))),
        (Document([GREY[:, :, 0]]), Document([GREY])),
        (Document(None, QUADS), Document(None, QUADS)),
    ]
    empty = (Document(None, PageLayout()), Document(None, PageLayout(page_sizes=[])))
    maximum = (DocumentField(max_words=3, max_pages=1, max_pixels=204), Document([PIXELS], LAYOUT))
    past_maximum = (DocumentField(max_words=2), Document([PIXELS], LAYOUT))
    wrong_types = [
        PNG,
        [PIXELS],
        Document(PNG),
        Document(iter([PIXELS])),
        Document([None]),
        Document(["page.png"]),
        Document([PIXELS], {"words": []}),
        Document([PIXELS], WORDS),
        Document([PIXELS.astype(np.int16)]),
        Document([PIXELS], positions=["0"]),
    ]
    wrong_shapes = [
        Document(),
        Document([]),
        Document([PIXELS], positions=[]),
        Document([PIXELS, PIXELS], positions=[1, 1]),
        Document([PIXELS], positions=[2**31]),
        Document([b"no image"]),
        Document([np.zeros((0, 4), np.uint8)]),
        Document(None, with_words([[0, 0, 1, 1]])),
        Document([PIXELS], QUADS),
        Document([PIXELS], with_words([[0, 0, 18, 1]])),
        Document([PIXELS], with_words([[0, -1, 1, 1]])),
        Document([PIXELS], with_words([[3, 0, 2, 1]])),
        Document([PIXELS], with_words([[0, 3, 2, 1]])),
        Document([PIXELS], with_words([[0, 0, 1, 1]], pages=[1])),
        Document([PIXELS], with_words([[0, 0, 1, 1]], quads=[[[0, 0], [1, 0], [1, 13], [0, 1]]])),
        Document([PIXELS], PageLayout(fields={1: "key"})),
        Document([PIXELS], PageLayout(fields={"nan": float("nan")})),
        Document([PIXELS], PageLayout(TextBoxes(["\ud800"], [[0, 0, 1, 1]]))),
    ]
    bad_configs = [
        {"image": "png"},
        {"image": {"encoding": "avif"}},
        {"image": None},
        {"layout": "coco"},
        {"layout": None},
        {"layout": {"box_format": "yxyx"}},
        {"layout": {"word": "words"}},
        {"outside": "drop"},
        {"normalize": 1000},
        {"max_pages": 0},
        {"max_words": 1.5},
        {"max_pixels": True},
    ]

    @pytest.mark.parametrize("limit", [{"max_pages": 1}, {"max_words": 1}, {"max_pixels": 248}])
    def test_limits_hold_in_both_directions(self, limit):
        """A document past a limit is refused by encode, and by decode before a pixel is decoded."""
        document = self.cases[1][0]
        payload = self.field.encode(document)
        name = next(iter(limit))
        with pytest.raises(EncodeError, match=name):
            DocumentField(**limit).encode(document)
        with mock.patch.object(ImageField, "decode", side_effect=AssertionError), pytest.raises(LimitError, match=name):
            DocumentField(**limit).decode(*payload)


def test_integers_stay_integers_and_floats_stay_floats():
    """Coordinates keep their kind: int32 where all are integers, float64 where one is not, to the last bit."""
    found = DocumentField().decode(*DocumentField().encode(Document([PIXELS], LAYOUT))).layout
    assert found.words.boxes.dtype == found.page_sizes.dtype == np.int32
    third = with_words([[1 / 3, 0, 2, 1e-300]])
    found = DocumentField().decode(*DocumentField().encode(Document([PIXELS], third))).layout
    assert found.words.boxes.dtype == np.float64
    assert found.words.boxes.tolist() == [[1 / 3, 0, 2, 1e-300]]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_layout_round_trips(data):
    """Whatever words, segments, labels, corners and links there are, they come back, also beside pages."""
    num_pages = data.draw(st.integers(1, 3))
    number = data.draw(st.sampled_from([st.integers(0, 99), st.floats(0, 99)]))
    texts = st.text(st.characters(codec="utf-8"), max_size=4)

    def table():
        count = data.draw(st.integers(0, 5))
        points = [sorted(data.draw(st.tuples(number, number))) for _ in range(2 * count)]
        boxes = [[a, c, b, d] for (a, b), (c, d) in zip(points[::2], points[1::2], strict=True)]
        return TextBoxes(
            [data.draw(texts) for _ in range(count)],
            boxes,
            pages=[data.draw(st.integers(0, num_pages - 1)) for _ in range(count)],
            labels=[data.draw(st.none() | texts) for _ in range(count)],
            quads=np.array(boxes).reshape(count, 2, 2).repeat(2, axis=1) if data.draw(st.booleans()) else None,
        )

    words, segments = table(), table()
    indices = st.integers(0, len(segments) - 1) if len(segments) else st.nothing()
    layout = PageLayout(
        words,
        segments=segments,
        word_segments=[data.draw(st.just(-1) | indices) for _ in words.texts],
        links=data.draw(st.lists(st.tuples(indices, indices), max_size=4)) if len(segments) else (),
        fields=data.draw(st.dictionaries(texts, texts, max_size=2)),
        page_sizes=[[99, 100]] * num_pages,
    )
    images = [picture(4, 5 + k) for k in range(num_pages)] if data.draw(st.booleans()) else None
    document = Document(images, layout)
    field = DocumentField()
    payload = field.encode(document)
    assert field.decode(*payload) == document
    assert field.decode_layout(*payload) == layout


class TestOutside:
    BOXES = [[-2, 1, 5, 3], [0, 0, 17, 12], [30, 2, 40, 20]]
    DOCUMENT = Document([PIXELS], with_words(BOXES))

    def test_boxes_beyond_their_page_are_refused_by_default(self):
        """The message says how many there are, which is the first, and the page's extent; the border is inside."""
        with pytest.raises(EncodeError, match=r"2 boxes beyond.*word 0: \[-2, 1, 5, 3\].*17 x 12"):
            DocumentField().encode(self.DOCUMENT)

    @pytest.mark.parametrize(
        ("outside", "expected"), [("clip", [[0, 1, 5, 3], [0, 0, 17, 12], [17, 2, 17, 12]]), ("keep", BOXES)]
    )
    def test_they_are_clipped_or_kept_and_counted(self, outside, expected):
        """Clipping moves coordinates onto the page, keeping leaves them; the record counts the boxes either way."""
        field = DocumentField(outside=outside)
        metadata, data = field.encode(self.DOCUMENT)
        assert field.decode(metadata, data).layout.words.boxes.tolist() == expected
        assert np.frombuffer(metadata, field.metadata_type)[0]["num_outside"] == 2

    def test_corners_are_clipped_too(self):
        """A corner beyond the page counts, and clip moves it with its box."""
        quad = [[-1, 0], [5, 0], [5, 14], [0, 12]]
        layout = with_words([[0, 0, 5, 12]], quads=[quad])
        field = DocumentField(outside="clip")
        metadata, data = field.encode(Document([PIXELS], layout))
        assert field.decode(metadata, data).layout.words.quads.tolist() == [[[0, 0], [5, 0], [5, 12], [0, 12]]]
        assert np.frombuffer(metadata, field.metadata_type)[0]["num_outside"] == 1

    def test_a_stored_box_beyond_its_page_is_damage(self):
        """A field that lets no box out finds one in a payload, rather than hand it to training."""
        payload = DocumentField(outside="keep").encode(self.DOCUMENT)
        with pytest.raises(CorruptError, match="beyond their page"):
            DocumentField().decode(*payload)

    def test_normalized_boxes_stay_within_1000(self):
        """Kept boxes beyond the page are clipped when they are normalized, since embeddings end at 1000."""
        payload = DocumentField(outside="keep").encode(self.DOCUMENT)
        layout = DocumentField(outside="keep", normalize=True).decode_layout(*payload)
        assert layout.words.boxes.tolist() == [[0, 83, 294, 250], [0, 0, 1000, 1000], [1000, 166, 1000, 1000]]
        assert layout.words.boxes.dtype == np.int32
        assert layout.page_sizes.tolist() == [[1000, 1000]]


class TestPages:
    def test_a_page_is_decoded_alone(self):
        """decode_page decodes its page and no other, so damage elsewhere does not matter."""
        field = DocumentField()
        pages = [picture(20 + k, 30, seed=k) for k in range(3)]
        metadata, data = field.encode(Document(pages, PageLayout()))
        broken = bytes(data[:-200]) + bytes(100) + bytes(data[-100:])
        for k in (0, 1, -2, -3):
            np.testing.assert_array_equal(field.decode_page(metadata, broken, k), pages[k])
        with pytest.raises(FormatError, match="page 2"):
            field.decode_page(metadata, broken, 2)
        for k in (3, -4):
            with pytest.raises(IndexError):
                field.decode_page(metadata, data, k)
        with pytest.raises(IndexError):
            field.decode_page(*field.encode(Document(None, LAYOUT)), 0)

    def test_the_layout_is_read_without_a_pixel(self):
        """decode_layout decodes no image, and gives None where there is no layout."""
        field = DocumentField()
        payload = field.encode(Document([PIXELS], LAYOUT))
        with mock.patch.object(ImageField, "decode", side_effect=AssertionError):
            assert field.decode_layout(*payload) == LAYOUT
        assert field.decode_layout(*field.encode(Document([PIXELS]))) is None

    def test_storing_smaller_changes_no_box(self):
        """Pages stored at training size keep the page size that their boxes count in."""
        field = DocumentField(image=ImageField(encoding="png", size=(6, 8), channels=3))
        found = field.decode(*field.encode(Document([PNG], with_words([[0, 0, 17, 12]]))))
        assert found.pages[0].shape == (6, 8, 3)
        assert found.layout.page_sizes.tolist() == [[17, 12]]
        assert found.layout.words.boxes.tolist() == [[0, 0, 17, 12]]

    @pytest.mark.parametrize("image", [{}, {"encoding": "png"}])
    def test_turned_pages_are_measured_as_they_are_decoded(self, image):
        """A page's size is as stored, or upright where the images are turned: always that of the decoded pixels."""
        exif = Image.Exif()
        exif[0x0112] = 6
        data = image_file(Image.fromarray(PIXELS), "JPEG", exif=exif)
        for orientation, size in (("keep", [17, 12]), ("apply", [12, 17])):
            field = DocumentField(image=ImageField(orientation=orientation, **image))
            found = field.decode(*field.encode(Document([data], PageLayout())))
            assert found.layout.page_sizes.tolist() == [size]
            assert found.pages[0].shape[:2] == (size[1], size[0])
        told = {"words": [{"text": "w", "box": [0, 0, 12, 17]}], "width": 12, "height": 17}
        with pytest.raises(EncodeError, match="orientation of image"):
            DocumentField(image=ImageField(orientation="keep")).assemble({"pages": [(0, data)], "layout": told})

    def test_an_error_names_the_page(self):
        """The error of an image that the inner field refuses names its page."""
        field = DocumentField(image=ImageField(max_pixels=100))
        for method in (field.encode, field.check):
            with pytest.raises(EncodeError, match=r"DocumentField: page 1: value is too large .* \(max_pixels\)"):
                method(Document([GREY, PNG]))


class TestParts:
    WORDS = {"words": [{"text": "a", "box": [1, 2, 3, 4], "label": "x"}], "width": "17", "height": 12}

    def test_a_document_is_made_of_its_parts(self):
        """Pages come with their positions, the layout as a value or as a file; either alone will do."""
        field = DocumentField()
        layout = PageLayout(TextBoxes(["a"], [[1, 2, 3, 4]], labels=["x"]), page_sizes=[[17, 12]])
        pages = [(3, memoryview(PNG))]
        text = memoryview(json.dumps(self.WORDS).encode())
        for source in (self.WORDS, text):
            found = field.assemble({"pages": pages, "layout": source})
            assert found == Document([PNG], layout, [3])
            assert field.assemble({"layout": source}) == Document(None, layout)
        assert field.assemble({"pages": pages}) == Document([PNG], None, [3])
        assert field.assemble({"pages": pages, "layout": {"license": "x"}}) == Document([PNG], None, [3])

    @pytest.mark.parametrize(
        ("contents", "words"),
        [
            ({}, "neither pages nor a layout"),
            ({"layout": {"license": "x"}}, "neither pages nor a layout"),
            ({"layout": b'{"license": "x"}'}, "file without layout"),
            ({"layout": b"{"}, "not JSON"),
            ({"layout": b"\xff{}"}, "not JSON"),
            ({"layout": b'{"words": NaN}'}, "not JSON"),
            ({"layout": b"[" * 100_000}, "not JSON"),
            ({"layout": "words"}, "expected an object"),
            ({"pages": PNG}, "list of"),
            ({"pages": ["page"]}, "list of"),
            ({"image": PNG}, "parts"),
            ({"pages": [(0, PNG)], "layout": {**WORDS, "width": 34}}, "34 x 12 pixels and an image of 17 x 12"),
            ({"pages": [(0, b"x")], "layout": WORDS}, "not an image"),
        ],
    )
    def test_wrong_parts_are_refused(self, contents, words):
        """What makes no document is an EncodeError that says what was wrong with which part."""
        with pytest.raises(EncodeError, match=words):
            DocumentField().assemble(contents)

    def test_what_a_payload_holds_of_each_part(self):
        """Stored pages are in a payload byte for byte, at their positions, and the layout is there once."""
        field = DocumentField()
        assert field.keeps_part("pages")
        assert not field.keeps_part("layout")
        assert not DocumentField(image=ImageField(encoding="jpeg")).keeps_part("pages")
        items = list(field.items(*field.encode(Document([PNG, PNG], PageLayout(), [1, 4]))))
        assert [(item.part, item.position) for item in items] == [("pages", 1), ("pages", 4), ("layout", 0)]
        assert [bytes(item.data) for item in items[:2]] == [PNG, PNG]
        assert [item.part for item in field.items(*field.encode(Document([PNG])))] == ["pages"]
        assert [item.part for item in field.items(*field.encode(Document(None, LAYOUT)))] == ["layout"]

    def test_a_layout_in_other_units_is_not_compared_with_the_image(self):
        """Boxes in points count in the page's points, whatever size its image has."""
        field = DocumentField(layout=LayoutMap(box_scale="page"), normalize=True)
        points = {"words": [{"text": "a", "box": [0, 99, 306.0, 396]}], "width": 612, "height": 792}
        found = field.decode(*field.encode(field.assemble({"pages": [(0, PNG)], "layout": points})))
        assert found.layout.words.boxes.tolist() == [[0, 125, 500, 500]]


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_any_bytes_are_a_document_or_damage(metadata, data):
    """Random records and data decode or raise FormatError, as do real ones with random tables."""
    field = DocumentField()
    record, stored = field.encode(Document([PIXELS], LAYOUT))
    for one, two in ((metadata, data), (record, data), (record, data + bytes(stored[len(data) :]))):
        try:
            field.decode(one, two)
        except FormatError as error:
            assert error.path == "<payload>"  # noqa: PT017  # the bytes may also be valid


@pytest.mark.parametrize(
    "other",
    [
        Document([PIXELS], LAYOUT, [1]),
        Document([PIXELS]),
        Document(None, LAYOUT),
        Document([PNG], LAYOUT),
        Document([PIXELS, PIXELS], LAYOUT),
        Document([255 - PIXELS], LAYOUT),
        "a document",
    ],
)
def test_documents_that_differ_are_not_equal(other):
    """Other pixels, bytes for pixels, other positions or another layout make another document."""
    assert Document([PIXELS], LAYOUT) == Document((PIXELS.copy(),), LAYOUT, (0,))
    assert Document([PNG], LAYOUT) == Document([memoryview(PNG)], LAYOUT)
    assert Document([PIXELS], LAYOUT) != other


@pytest.mark.parametrize(
    ("column", "byte", "words"),
    [
        ("image_offsets", 0x7F, "image_offsets are out of order"),
        ("positions", 0xFF, "positions are out of order"),
        ("word_labels", 0x7F, "a word has an unknown label"),
        ("word_pages", 0x7F, "found page"),
        ("links", 0xFF, "links"),
        ("text_offsets", 0x7F, "text_offsets are out of order"),
        ("page_sizes", 0x00, "not positive"),
    ],
)
def test_damaged_tables_are_named(column, byte, words):
    """A table whose second number contradicts the payload is named by the error."""
    field = DocumentField()
    layout = PageLayout(WORDS, segments=LAYOUT.segments, links=[[0, 1]], page_sizes=[[17, 12]] * 2)
    metadata, data = field.encode(Document([PIXELS, PIXELS], layout, [3, 8]))
    broken, start = bytearray(data), 0
    for name, kind, shape in Head(*np.frombuffer(metadata, field.metadata_type)[0].item()[:-1]).columns(16):
        if name == column:
            broken[start + kind.itemsize : start + 2 * kind.itemsize] = bytes([byte]) * kind.itemsize
        start += (int(np.prod(shape)) * kind.itemsize + 7) // 8 * 8
    with pytest.raises(FormatError, match=words):
        field.decode(metadata, broken)


@pytest.mark.parametrize(
    ("document", "changes"),
    [
        (Document(None, LAYOUT), {"contents": 0}),
        (Document(None, LAYOUT), {"contents": 18}),
        (Document(None, LAYOUT), {"coordinate_size": 2}),
        (Document(None, LAYOUT), {"num_pages": 2000}),
        (Document(None, LAYOUT), {"num_labels": 6}),
        (Document(None, LAYOUT), {"num_outside": 6}),
        (Document([PIXELS]), {"num_words": 1}),
        (Document([PIXELS]), {"contents": 5}),
        (Document([PIXELS]), {"coordinate_size": 4}),
        (Document([PIXELS]), {"num_pages": 0}),
    ],
)
def test_impossible_records_are_refused(document, changes):
    """A record whose numbers exclude one another is damage, before its data is looked at."""
    field = DocumentField()
    metadata, data = field.encode(document)
    record = np.frombuffer(bytearray(metadata), dtype=field.metadata_type)
    for name, value in changes.items():
        record[0][name] = value
    with pytest.raises(FormatError, match=r"document|coordinates"):
        field.decode(record.tobytes(), data)


def test_bytes_after_the_texts_are_refused():
    """If a document has no images it ends with its texts."""
    metadata, data = DocumentField().encode(Document(None, LAYOUT))
    with pytest.raises(CorruptError, match="do not end with the data"):
        DocumentField().decode(metadata, bytes(data) + bytes(8))


def test_huge_counts_cost_nothing():
    """A record that claims billions of words is refused by the bytes that are there."""
    field = DocumentField(max_words=2**31 - 1)
    metadata, data = field.encode(Document(None, LAYOUT))
    for name in ("num_words", "num_segments", "num_links"):
        record = np.frombuffer(bytearray(metadata), dtype=field.metadata_type)
        record[0][name] = 2**31 - 1
        with pytest.raises(FormatError, match="shorter than its tables"):
            field.decode(record.tobytes(), data)


def test_a_document_is_laid_out_as_documented():
    """A payload read by the tables of the page alone, without this package's code, gives its document."""
    metadata, data = DocumentField().encode(Document((PNG, GREY), QUADS, (2, 5)))
    pages, words, segments, labels, links, _ = np.frombuffer(metadata, "<u4", 6).tolist()
    contents, number = metadata[24:26]
    assert (pages, words, segments, labels, links, contents, number) == (2, 2, 0, 0, 0, 7, 8)
    place = 0

    def column(kind, *shape):
        nonlocal place
        count = int(np.prod(shape))
        found = np.frombuffer(data, kind, count, place).reshape(shape) if count else np.zeros(shape, kind)
        place += (found.nbytes + 7) // 8 * 8
        return found

    offsets, positions, records = column("<u8", pages + 1), column("<i4", pages), column("u1", pages, 16)
    assert positions.tolist() == [2, 5]
    assert records[1, :8].view("<u4").tolist() == [9, 5]
    assert data[int(offsets[0]) : int(offsets[1])] == PNG
    assert column("<f8", pages, 2).tolist() == [[17, 12], [5, 9]]
    assert column("<f8", words, 4).tolist() == QUADS.words.boxes.tolist()
    assert column("<f8", words, 4, 2).tolist() == QUADS.words.quads.tolist()
    column("<f8", segments, 4)
    assert column("<i4", words).tolist() == [1, 0]
    assert column("<i4", words).tolist() == column("<i4", words).tolist() == [-1, -1]
    column("<i4", segments), column("<i4", segments), column("<i4", links, 2)
    texts = column("<u8", words + segments + labels + 2).tolist()
    assert data[place : place + texts[-1]] == b"ab{}"
    assert texts == [0, 1, 2, 4]
    assert offsets[0] == (place + texts[-1] + 7) // 8 * 8
    assert offsets[-1] == len(data)
