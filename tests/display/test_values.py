"""`value_item`, `linked` and `sample_html`: packed payloads of every field, relations, notebooks."""

import dataclasses
import io
import json
import re
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from PIL import Image

import mm_assets
from mm_assets.display import (
    Content,
    absent_item,
    column_item,
    content_item,
    linked,
    sample_html,
    thumbnail,
    value_item,
)
from mm_assets.display.numbers import array_item, map_item
from mm_assets.fields import (
    AudioField,
    BytesField,
    DepthField,
    Document,
    DocumentField,
    Encoded,
    Field,
    ImageField,
    ImageText,
    ImageTextPairField,
    JSONField,
    MIDIField,
    NDArrayField,
    PageLayout,
    ScalarField,
    SequenceField,
    SyncedVideoAudioField,
    TextBoxes,
    TextField,
    TimedTextField,
    TimeSeriesField,
    TokensField,
    VideoAudio,
    VideoFile,
)

from ..fields.clips import clip_file, ramp
from ..fields.conftest import wav_file
from .media import check_item, frames_file, image_file, made_by, midi_file, pixels, shown

SCRIPT = "<script>alert(1)</script>"
TIMES = np.arange(50) / 10
LAYOUT = PageLayout(
    TextBoxes(["a", SCRIPT], [[0, 0, 32, 24], [32, 24, 64, 48]], labels=["key", None]),
    segments=TextBoxes(["q", "a"], [[0, 0, 32, 24], [32, 24, 64, 48]], labels=["question", "answer"]),
    links=[[0, 1]],
    fields={"total": "9.00"},
)
CASES: dict[str, tuple[Field, object, str]] = {
    "text": (TextField(), "GIF89a " + SCRIPT, "text"),
    "JSON": (JSONField(), {"a": [1]}, "json"),
    "bytes": (BytesField(), b"\0\1\2", "unreadable"),
    "image in bytes": (BytesField(), image_file(), "image"),
    "image": (ImageField(), image_file(), "image"),
    "pixels": (ImageField(encoding="webp"), pixels(), "image"),
    "depth": (DepthField(metres_per_step=0.001), np.arange(3072, dtype=np.uint16).reshape(48, 64), "depth"),
    "tokens": (TokensField(tokenizer="bytes"), "héllo", "tokens"),
    "ids": (TokensField(vocab_size=100), [1, 2, 3], "tokens"),
    "words": (TimedTextField(), [(0.0, 0.5, "a"), (0.5, 1.0, SCRIPT)], "text"),
    "samples": (AudioField(), (ramp(8000), 8000), "audio"),
    "floats": (AudioField(), (np.zeros((900, 2), np.float32), 8000), "audio"),
    "audio": (AudioField(), wav_file(ramp(8000), 8000), "audio"),
    "MIDI": (MIDIField(), midi_file(), "midi"),
    "series": (TimeSeriesField(columns=["x", "y"]), (TIMES, np.stack([TIMES, np.full(50, np.nan)], axis=1)), "series"),
    "array": (NDArrayField(), np.arange(24.0).reshape(2, 3, 4), "array"),
    "scalar": (ScalarField(), 1.5, "scalar"),
    "video": (SyncedVideoAudioField(), clip_file(num_frames=25, samples=ramp(16_000), audio_codec="aac"), "video"),
    "frames": (
        SyncedVideoAudioField(encoding="frames"),
        VideoAudio(frames=np.stack([pixels()] * 12), frame_rate=10, audio=(ramp(8000), 8000)),
        "video",
    ),
    "video with audio": (
        SyncedVideoAudioField(),
        VideoFile(video=clip_file(num_frames=25), audio=wav_file(ramp(8000), 8000)),
        "video",
    ),
    "audio alone": (SyncedVideoAudioField(), VideoFile(audio=wav_file(ramp(8000), 8000)), "audio"),
    "pair": (ImageTextPairField(), ImageText(image_file(), SCRIPT, 0.25), "image"),
    "document": (DocumentField(), Document([image_file()], LAYOUT), "page"),
    "layout": (DocumentField(), Document(None, dataclasses.replace(LAYOUT, page_sizes=np.array([[64, 48]]))), "page"),
    "texts": (SequenceField(TextField()), [(0, "a"), (2, SCRIPT)], "document"),
    "images": (SequenceField(ImageField()), [(1, image_file()), (3, image_file("PNG"))], "images"),
    "recordings": (SequenceField(AudioField()), [(0, wav_file(ramp(800), 8000)), (1, (ramp(90), 8000))], "document"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_field_is_shown(name: str) -> None:
    """A payload of each field has its kind, bounded data, readable media, and a page for a notebook."""
    field, value, kind = CASES[name]
    item = shown(field, value)
    check_item(item)
    assert (item.kind, item.facts["field"]) == (kind, type(field).__name__)
    for media in item.media:
        data = made_by(item, media.name)
        assert data
        if media.read is not None:
            assert media.read(3, 7) == data[3:10]
    html = sample_html([item])
    assert "<script" not in html
    if item.kind in ("image", "images", "depth", "video", "page", "audio") and item.media:
        assert thumbnail(item) is not None


def test_stored_bytes_are_read_by_range() -> None:
    """A player of a packed clip reads ranges of the payload that are the file's, never the whole payload."""
    video = clip_file(num_frames=25, samples=ramp(16_000), audio_codec="aac")
    field = SyncedVideoAudioField()
    metadata, data = field.encode(VideoFile(video=video, audio=wav_file(ramp(8000), 8000)))
    item = value_item("it", field, Content.of(data), metadata)
    assert made_by(item, "video") == video
    assert made_by(item, "audio") == wav_file(ramp(8000), 8000)


def test_stored_samples_are_a_wav_of_ranges() -> None:
    """Samples that are stored as in memory play as a WAV whose head alone is made."""
    import soundfile

    samples = ramp(5000, 2)
    item = shown(AudioField(), (samples, 8000))
    media = item.medium("audio")
    assert media is not None
    assert media.read is not None
    found, rate = soundfile.read(io.BytesIO(made_by(item, "audio")), dtype="int16", always_2d=True)
    assert rate == 8000
    assert np.array_equal(found, samples)
    assert media.read(40, 8) == made_by(item, "audio")[40:48]


def test_sequence_reads_only_its_tables() -> None:
    """Of a sequence of recordings the tables and headers are read; each player reads its own range."""
    field = SequenceField(BytesField())
    values = [(number, b"OggS" + bytes(20_000)) for number in range(20)]
    metadata, data = field.encode(values)
    reads = []

    def read(offset: int, size: int) -> bytes:
        reads.append((offset, size))
        return bytes(data[offset : offset + size])

    shown_list = field.shown(metadata, Content(len(data), read))
    assert [position for position, _, _ in shown_list.items] == list(range(20))
    assert sum(size for _, size in reads) < 1000


def test_very_long_sequences_are_bounded() -> None:
    """Of many items the first are shown, with a note; a payload that claims a hundred million is not listed."""
    field = SequenceField(TextField())
    item = shown(field, [(number, f"line {number}") for number in range(5000)])
    assert (len(item.data["blocks"]), item.facts["items"]) == (200, "5,000")
    assert "5,000" in item.note
    metadata, _ = field.encode([])
    many = (100_000_000).to_bytes(4, "little") + bytes(metadata[4:])
    claimed = value_item("it", field, Content(1 << 32, lambda at, size: bytes(size)), many)
    assert (claimed.kind, "100,000,000 items" in claimed.note) == ("unreadable", True)


def test_own_field_is_shown_by_its_value() -> None:
    """A field that says nothing of how it is shown has its decoded value shown."""

    @dataclasses.dataclass(frozen=True)
    class PointField(Field):
        TYPE_ID: ClassVar[int] = 0x9F01
        metadata_type: ClassVar[np.dtype[np.void]] = np.dtype([("x", "<f4"), ("y", "<f4")])

        def encode(self, value):
            return Encoded(self._pack_record(*value), b"")

        def decode(self, metadata, data):
            return dict(zip("xy", self._unpack_record(metadata), strict=True))

    item = shown(PointField(), (1.0, 2.0))
    assert (item.kind, item.data["value"], item.facts["field"]) == ("json", {"x": 1.0, "y": 2.0}, "PointField")


def test_pages_have_boxes_in_parts_of_the_page() -> None:
    """Boxes have coordinates from 0 to 1, labels and texts, and links name boxes by index."""
    page = shown(*CASES["document"][:2]).data["pages"][0]
    assert page["boxes"][0] == [0.0, 0.0, 0.5, 0.5, "q", "question", "segment"]
    assert page["boxes"][3] == [0.5, 0.5, 1.0, 1.0, SCRIPT, "", "word"]
    assert page["links"] == [[0, 1]]


def test_tokens_have_their_text_where_the_tokenizer_is_known() -> None:
    """Ids are decoded by a loaded tokenizer; without one the note says that their text is not known."""
    assert shown(*CASES["tokens"][:2]).data["text"] == "héllo"
    ids = shown(*CASES["ids"][:2])
    assert (ids.data["ids"], "tokenizer" in ids.note) == ([1, 2, 3], True)


def test_tokens_are_counted() -> None:
    """The ids that are there most often come first, and the histogram has each token in its part of the range."""
    item = shown(TokensField(vocab_size=100_000), [7, 7, 7, 50, 90_006, 50, 3])
    assert item.data["frequent"] == [[7, 3], [50, 2], [3, 1], [90_006, 1]]
    histogram = item.data["histogram"]
    assert (histogram["low"], histogram["high"], sum(histogram["counts"])) == (3, 90_006, 7)
    assert (histogram["counts"][0], histogram["counts"][-1]) == (6, 1)
    assert (item.facts["distinct"], item.facts["ids"]) == ("4", "3 to 90,006")
    assert "frequent" not in shown(TokensField(vocab_size=10), [1]).data
    assert shown(*CASES["tokens"][:2]).data["frequent"][0][1:] == [2, "l"]


def test_columns_of_ids_are_tokens() -> None:
    """Integers are tokens by the name of their column, and numbers anywhere else; negative labels are not ids."""
    ids = list(range(20))
    assert column_item("input_ids", ids).kind == column_item("2 Token_IDs", np.array(ids)).kind == "tokens"
    assert column_item("input_ids", ids).data["ids"] == ids
    assert column_item("scores", ids).kind == "array"
    assert column_item("tokens", [-100, *ids]).kind == "array"
    assert column_item("tokens", [0.5] * 20).kind == "array"


def test_series_have_gaps_for_what_is_not_finite() -> None:
    """NaN is null in a plot, and columns have their names."""
    channels = shown(*CASES["series"][:2]).data["plot"]["channels"]
    assert [channel["name"] for channel in channels] == ["x", "y"]
    assert set(channels[1]["values"]) == {None}


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(set(CASES) - {"video", "video with audio"})),
    place=st.integers(0, 10_000),
    byte=st.integers(0, 255),
    cut=st.integers(0, 40),
    in_record=st.booleans(),
)
def test_damaged_payloads_have_an_item(name: str, place: int, byte: int, cut: int, in_record: bool) -> None:
    """A payload with a byte changed, or truncated, has an item that is drawn or says what is wrong."""
    metadata, data = (bytearray(part) for part in ENCODED[name])
    changed = metadata if in_record else data
    if changed:
        changed[place % len(changed)] = byte
    item = value_item("it", CASES[name][0], Content.of(bytes(data[: len(data) - cut])), bytes(metadata))
    check_item(item)
    assert item.kind != "unreadable" or item.note
    thumbnail(item)
    sample_html(linked([item]))


ENCODED = {name: field.encode(value) for name, (field, value, _) in CASES.items()}


# --- relations --------------------------------------------------------------------------------------------------------


def test_words_and_series_follow_a_clip() -> None:
    """Words, notes, series and further audio of a sample are over its video; without one over its audio."""
    names = ("video", "words", "series", "MIDI", "audio", "text")
    items = [shown(*CASES[name][:2], name=name) for name in names]
    over = {item.name: item.data.get("over") for item in linked(items)}
    assert over == dict.fromkeys(names[1:5], "video") | {"video": None, "text": None}
    assert {item.data.get("over") for item in linked(items[1:])} == {"audio", None}


def test_word_times_in_json_follow_the_audio() -> None:
    """JSON of an aligner beside a recording has its words with their times; other JSON has none."""
    words = {"words": [{"start": 0.5, "end": 1.0, "word": "b"}, {"start": 0.0, "end": 0.5, "word": "a"}, {"word": "?"}]}
    items = linked([shown(*CASES["audio"][:2], name="audio"), shown(JSONField(), words, "words.json")])
    assert items[1].data["segments"] == [[0.0, 0.5, "a"], [0.5, 1.0, "b"]]
    assert items[1].data["over"] == "audio"
    other = linked([items[0], shown(JSONField(), {"words": ["a", "b"]}, "other.json")])
    assert "segments" not in other[1].data


def test_arrays_with_timestamps_become_series() -> None:
    """An array with a row for each timestamp of another is a series over those times."""
    field = NDArrayField()
    items = linked([shown(field, TIMES + 5, "0.timestamp.npy"), shown(field, np.zeros((50, 3)), "0.state.npy")])
    assert [item.kind for item in items] == ["array", "series"]
    assert items[1].data["plot"]["times"][:2] == [5.0, 5.1]


def test_interleaved_json_is_a_document() -> None:
    """A JSON of texts and images, one at each place, is a document that shows the sample's pictures in its order."""
    value = {"texts": ["one", None, SCRIPT, None], "images": [None, "a.1.png", None, "a.0.png"], "url": "x"}
    for prefix in ("a.", ""):  # members by their whole name, or without the sample's key
        pictures = [content_item(f"{prefix}{number}.png", Content.of(image_file("PNG"))) for number in range(2)]
        items = linked([shown(JSONField(), value, "a.json"), *pictures])
        blocks = items[0].data["blocks"]
        assert [block["kind"] for block in blocks] == ["text", "picture", "text", "picture"]
        assert [blocks[place]["picture"]["item"] for place in (1, 3)] == [f"{prefix}1.png", f"{prefix}0.png"]
        assert items[1].data["over"] == "a.json"


def test_packed_texts_are_the_document_and_their_json_a_tree() -> None:
    """A packed document is shown once: by its texts with the pictures over them, not by its JSON again."""
    value = {"texts": ["a", None, SCRIPT, None], "images": [None, "b", None, "c"]}
    texts, pictures = (shown(*CASES[name][:2], name=name) for name in ("texts", "images"))
    items = linked([texts, pictures, shown(JSONField(), value, "metadata")])
    assert [item.kind for item in items] == ["document", "images", "json"]
    assert items[1].data["over"] == "texts"
    assert "over" not in linked([dataclasses.replace(texts, name="rest"), pictures])[1].data
    other = linked([texts, pictures, shown(JSONField(), {**value, "texts": ["b", None, "c", None]}, "metadata")])
    assert [item.kind for item in other] == ["document", "images", "document"]


def test_notebooks_show_documents_in_reading_order() -> None:
    """A notebook has the pictures of a document between its texts, once, and absent modalities in one line."""
    texts, pictures = (shown(*CASES[name][:2], name=name) for name in ("texts", "images"))
    html = sample_html([*linked([texts, pictures]), absent_item("one"), absent_item("<two>")])
    places = [html.index(">a<"), html.index("<img"), html.index("alert"), html.rindex("<img")]
    assert places == sorted(places)
    assert html.count("<img") == 2
    assert "shown in texts" in html
    assert "Not in this sample: one, &lt;two&gt;" in html


def test_documents_without_names_have_their_pictures_in_order() -> None:
    """A document that names no member shows the pages of its TIFF one after the other."""
    value = {"texts": [None, "x", None], "images": ["page_0_image_3", None, "page_1_image_9"]}
    items = linked([shown(JSONField(), value, "a.json"), content_item("a.tiff", Content.of(frames_file("TIFF")))])
    found = [block["picture"]["media"] for block in items[0].data["blocks"] if block["kind"] == "picture"]
    assert found == ["frame-0", "frame-1"]


def test_layout_of_json_lies_over_its_image() -> None:
    """The words of a form's JSON become boxes over the sample's image."""
    form = {"form": [{"id": 0, "text": "q", "box": [0, 0, 32, 24], "label": "question", "linking": [],
                      "words": [{"text": "q", "box": [0, 0, 32, 24]}]}]}  # fmt: skip
    items = linked([content_item("a.png", Content.of(image_file("PNG"))), shown(JSONField(), form, "a.json")])
    assert items[1].data["over"] == "a.png"
    assert items[1].data["pages"][0]["boxes"][0][:5] == [0.0, 0.0, 0.5, 0.5, "q"]


LAYOUT_KEYS = st.sampled_from(
    [
        "form",
        "words",
        "texts",
        "images",
        "box",
        "text",
        "label",
        "linking",
        "id",
        "start",
        "end",
        "word",
        "segments",
        "x",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LAYOUT_KEYS, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=80, deadline=None)
@given(value=st.dictionaries(LAYOUT_KEYS, JSON, max_size=4))
def test_any_json_is_linked(value: dict[str, object]) -> None:
    """JSON that only resembles a layout, a document or word times has no relation, and raises nothing."""
    content = Content.of(json.dumps(value).encode())
    items = [content_item("a.json", content), shown(*CASES["image"][:2]), shown(*CASES["samples"][:2], name="sound")]
    for item in linked(items):
        check_item(item)


@pytest.mark.parametrize(
    "shard",
    ["docai/docai", "image-text/image-text", "mint1t-html/mint1t-html", "mint1t-pdf/mint1t-pdf", "music/music",
     "robotics/robotics-steps", "robotics/robotics-episodes", "speech/speech", "video/video"],
)  # fmt: skip
def test_real_samples_are_readable(shared_data, shard: str) -> None:
    """Of real samples no member is unreadable, and each item is within its bounds."""
    import tarfile

    samples: dict[str, list] = {}
    with tarfile.open(shared_data / f"{shard}-00000.tar") as archive:
        for member in archive:
            key = member.name.rsplit("/", 1)[-1].split(".", 1)[0]
            if member.isfile() and (key in samples or len(samples) < 4):
                file = archive.extractfile(member)
                assert file is not None
                samples.setdefault(key, []).append((member.name, file.read()))
    for members in samples.values():
        for item in linked([content_item(name, Content.of(data)) for name, data in members]):
            check_item(item)
            assert item.kind != "unreadable", item


# --- notebooks --------------------------------------------------------------------------------------------------------


def test_html_escapes_everything_and_stands_alone() -> None:
    """Names, notes, facts, texts and labels of a hostile sample are text, and no address leaves the page."""
    html = sample_html(linked([shown(field, value, SCRIPT) for field, value, _ in CASES.values()]))
    assert "<script" not in html
    assert not re.search(r"""(src|href)="(?!data:)""", html)
    assert "&lt;script&gt;" in html


def test_media_of_a_page_have_a_budget() -> None:
    """What does not fit into the budget is named, and not put into the page."""
    items = [shown(ImageField(), image_file())]
    assert "data:image" in sample_html(items)
    assert "data:image" not in sample_html(items, budget=10)


def test_dataset_and_its_samples_show_themselves(tmp_path) -> None:
    """A dataset's page has its modalities, counts and first samples; damage is one modality's note."""
    fields = {"image": ImageField(), "text": TextField()}
    path = tmp_path / "a.mult"
    with mm_assets.create(path, fields) as writer:
        writer.write("<one>", {"image": image_file(), "text": SCRIPT})
        writer.write("two", {"text": "x"})
    with mm_assets.open(path) as dataset:
        html = dataset._repr_html_()
        assert "<script" not in html
        assert "&lt;one&gt;" in html
        assert "<td>image</td><td>ImageField</td><td>1</td>" in html
        assert [item.kind for item in dataset.show(-1).items] == ["absent", "text"]
        assert "data:image/jpeg" in dataset.show(0)._repr_html_()
        assert [item.name for item in dataset.show(0, ["text"]).items] == ["text"]
        with pytest.raises(IndexError):
            dataset.show(2)
    data = bytearray(path.read_bytes())
    at = data.index(SCRIPT.encode())
    data[at] ^= 1
    path.write_bytes(data)
    with mm_assets.open(path) as dataset:
        image, text = dataset.show(0).items
        assert (image.kind, text.kind) == ("image", "unreadable")
        assert "checksum" in text.note


def test_depth_map_in_metres_has_its_range() -> None:
    """A map's colours have their range in the field's unit, and its picture is clear where nothing was measured."""
    item = shown(*CASES["depth"][:2])
    assert (item.data["unit"], item.facts["range"]) == ("m", "0.001 to 3.071 m")
    with Image.open(io.BytesIO(made_by(item, "map"))) as picture:
        assert [picture.getpixel(place)[3] for place in ((0, 0), (5, 5))] == [0, 255]
    assert json.dumps(dict(item.data), allow_nan=False)


DTYPES = st.one_of(
    hypothesis_numpy.boolean_dtypes(),
    hypothesis_numpy.integer_dtypes(),
    hypothesis_numpy.unsigned_integer_dtypes(),
    hypothesis_numpy.floating_dtypes(sizes=(16, 32, 64)),
    hypothesis_numpy.complex_number_dtypes(),
    hypothesis_numpy.unicode_string_dtypes(max_len=3),
    hypothesis_numpy.datetime64_dtypes(),
)


@pytest.mark.nightly_examples(10_000)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_array_is_drawn(data: st.DataObject) -> None:
    """An array of any type, shape and values has an item whose data are JSON and whose pictures can be made."""
    shapes = hypothesis_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
    array = data.draw(hypothesis_numpy.arrays(data.draw(DTYPES), shapes))
    items = [array_item("x", array)]
    if array.ndim == 2 and array.size and array.dtype.kind in "iuf":
        items.append(map_item("x", array))
    for item in items:
        json.dumps(item.data, allow_nan=False)
        for media in item.media:
            assert media.make is not None
            assert media.make().startswith(b"\x89PNG")


def test_a_value_over_a_limit_is_not_called_damaged() -> None:
    """The item says that the value is too large, and which setting says so."""
    metadata, data = DepthField().encode(np.ones((6, 10), np.uint16))
    item = value_item("depth", DepthField(max_pixels=59), Content.of(data), metadata)
    assert item.kind == "unreadable"
    assert "too large" in item.note
    assert "at most 59 pixels (max_pixels)" in item.note
    assert "damaged" not in item.note
