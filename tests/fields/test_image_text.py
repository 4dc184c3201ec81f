import io
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mm_assets.dataset.dataset
from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields import (
    ImageField,
    ImageText,
    ImageTextPair,
    ImageTextPairField,
    TextField,
    TokensField,
)
from mm_assets.media.tokenizers import ByteTokenizer
from mm_assets.testing import FieldSuite

from .conftest import image_file, picture

COLOUR = picture(12, 18)
JPEG = image_file(Image.fromarray(COLOUR), "JPEG", quality=95)
BYTES = ByteTokenizer()
WHITE = np.full((6, 4, 3), 255, np.uint8)


def pixels_of(data: bytes) -> np.ndarray:
    return ImageField().decode(*ImageField().encode(data))


def pair(image, text, score=None, max_tokens=77, *, stored=True) -> ImageTextPair:
    """What a pair decodes to."""
    ids = BYTES.encode(text) if text is not None else []
    row = np.zeros(max_tokens, np.int64)
    row[: len(ids)] = ids
    mask = (np.arange(max_tokens) < len(ids)).astype(np.int64)
    score = None if score is None else float(np.float32(score))
    return ImageTextPair(image, row, mask, text if stored else None, score)


def decoded(field, value) -> ImageTextPair:
    return field.decode(*field.encode(value))


class TestImageTextPairField(FieldSuite):
    fields = [
        ImageTextPairField(),
        ImageTextPairField(encoding="jpeg", image_size=(8, 8), resize="crop", quality=90),
        ImageTextPairField(encoding="png", image_size=(8, 8), resize="pad", fill=128, channels=1),
        ImageTextPairField(max_tokens=5, truncate="left", store_text=False),
        ImageTextPairField(tokenizer=None, channels=None),
        ImageTextPairField(decode_size=(6, 7), decode_resize="pad", decode_fill=9, decode_mode="fast"),
        ImageTextPairField(tokenizer={"name": "clip", "sha256": "c" * 64}, vocab_size=49_408, keep_end=1),
    ]
    cases = [
        ((JPEG, "a dog", 0.31), pair(pixels_of(JPEG), "a dog", 0.31)),
        (ImageText(COLOUR, "é"), pair(COLOUR, "é")),
        ({"image": COLOUR, "text": b"bytes", "clip_score": np.float32(-1)}, pair(COLOUR, "bytes", -1)),
        ((COLOUR, None), pair(COLOUR, None)),
        ((COLOUR, None, 1), pair(COLOUR, None, 1)),
        ((COLOUR, ""), pair(COLOUR, "")),
        ({"image": bytearray(JPEG)}, pair(pixels_of(JPEG), None)),
    ]
    empty = ((np.zeros((1, 1), np.uint8), None), pair(np.zeros((1, 1, 3), np.uint8), None))
    maximum = (ImageTextPairField(max_tokens=5, truncate="error"), (JPEG, "abc"))
    past_maximum = (ImageTextPairField(max_tokens=5, truncate="error"), (JPEG, "abcd"))
    wrong_types = [
        JPEG,
        "a dog",
        (JPEG,),
        (JPEG, "a", 1, 2),
        {"text": "a dog"},
        {"image": JPEG, "words": "a"},
        (None, "a dog"),
        ("path.jpg", "a dog"),
        (JPEG, 5),
        (JPEG, ["a"]),
        (JPEG, "a", "0.5"),
        (JPEG, "a", True),
    ]
    wrong_shapes = [
        (b"no image", "a"),
        (JPEG[:20], "a"),
        (np.zeros((2, 2, 2), np.uint8), "a"),
        (JPEG, "\ud800"),
        (JPEG, b"\xff"),
        (JPEG, "a", math.nan),
        (JPEG, "a", math.inf),
        (JPEG, "a", 1e39),
        (JPEG, "a", 10**400),
    ]
    bad_configs = [
        {"encoding": "webp"},
        {"image_size": [8, 8]},
        {"image_size": [8], "encoding": "jpeg"},
        {"image_size": [8, 0], "encoding": "jpeg"},
        {"resize": "zoom"},
        {"fill": 256},
        {"fill": True},
        {"quality": 0},
        {"subsampling": 420},
        {"channels": 2},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"truncate": "middle"},
        {"store_text": 1},
        {"tokenizer": None, "store_text": False},
        {"tokenizer": {"name": "clip", "sha256": "c" * 64}},
        {"vocab_size": 5},
        {"decode_size": [5, 0]},
        {"decode_size": [40, 40], "max_pixels": 1599},
        {"decode_size": [5, 5], "decode_resize": "fit"},
        {"decode_size": [5, 5], "decode_fill": 256},
        {"decode_size": [5, 5], "decode_mode": "quick"},
        {"decode_mode": "fast"},
    ]


@given(
    st.one_of(st.none(), st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)),
    st.one_of(st.none(), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_every_combination_of_parts_round_trips(text, score, store_text):
    """Text and score may be there or not, in any combination, stored or as tokens alone, empty or long."""
    field = ImageTextPairField(store_text=store_text, max_tokens=200)
    payload = field.encode((COLOUR, text, score))
    assert field.decode(*payload) == pair(COLOUR, text, score, 200, stored=store_text)
    assert field.tokens(*payload).tolist() == ([] if text is None else BYTES.encode(text))
    assert field.text(*payload) == (text if store_text else None)


def test_tokens_are_read_without_the_image():
    """Tokens and text come from the front of the data: the image's bytes may be anything."""
    field = ImageTextPairField()
    metadata, data = field.encode((JPEG, "a dog", 0.3))
    broken = bytes(data).replace(JPEG, bytes(len(JPEG)))
    assert field.tokens(metadata, broken).tolist() == BYTES.encode("a dog")
    assert field.text(metadata, broken) == "a dog"
    with pytest.raises(FormatError):
        field.decode(metadata, broken)


def test_a_batch_is_four_arrays():
    """With an image size a batch is image, ids, mask and score, in given arrays, absent rows zero."""
    field = ImageTextPairField(encoding="png", image_size=(12, 18), max_tokens=8, pad_id=9)
    payloads = [field.encode((COLOUR, "abc", 0.5)), None, field.encode((COLOUR, None))]
    records = np.frombuffer(b"".join(p.metadata if p else bytes(48) for p in payloads), np.uint8).reshape(3, 48)
    out = {
        "image": np.full((3, 12, 18, 3), 7, np.uint8),
        "input_ids": np.full((3, 8), 7, np.int64),
        "attention_mask": np.full((3, 8), 7, np.int64),
        "clip_score": np.full(3, 7, np.float32),
    }
    found, present = field.decode_batch(records, [p and p.data for p in payloads], out=out)
    assert all(found[name] is array for name, array in out.items())
    assert present.tolist() == [True, False, True]
    for row in (0, 2):
        np.testing.assert_array_equal(out["image"][row], COLOUR)
    assert not out["image"][1].any()
    assert out["input_ids"].tolist() == [[1, 100, 101, 102, 2, 9, 9, 9], [0] * 8, [9] * 8]
    assert out["attention_mask"].tolist() == [[1] * 5 + [0] * 3, [0] * 8, [0] * 8]
    np.testing.assert_array_equal(out["clip_score"], np.array([0.5, 0, np.nan], np.float32))


def test_jpeg_is_at_training_size_and_close():
    """A JPEG pair of 224 by 224 decodes to that size, close to the source resized."""
    source = picture(300, 400)
    field = ImageTextPairField(encoding="jpeg", image_size=(224, 224))
    found = decoded(field, (source, "x")).image
    assert found.shape == (224, 224, 3)
    expected = np.asarray(Image.fromarray(source).resize((224, 224), Image.Resampling.BOX))
    assert np.abs(found.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("as_file", [False, True])
def test_crop_takes_the_centre(as_file):
    """Cropping keeps the aspect ratio: the centre fills the size, the rest is gone."""
    source = np.zeros((20, 40, 3), np.uint8)
    source[:, 10:30] = (10, 200, 90)
    value = image_file(Image.fromarray(source), "PNG") if as_file else source
    field = ImageTextPairField(encoding="png", image_size=(10, 10), resize="crop")
    assert (decoded(field, (value, "x")).image == (10, 200, 90)).all()
    tall = ImageTextPairField(encoding="png", image_size=(10, 5), resize="crop")
    assert (decoded(tall, (value, "x")).image == (10, 200, 90)).all()


@pytest.mark.parametrize(
    ("shape", "inside"),
    [((6, 4), (0, 12, 2, 10)), ((4, 6), (2, 10, 0, 12)), ((24, 24), (0, 12, 0, 12)), ((1, 500), (5, 6, 0, 12))],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_pad_keeps_the_whole_image(shape, inside, channels):
    """Padding keeps the aspect ratio and all of the image, centred between bars of the fill."""
    field = ImageTextPairField(encoding="png", image_size=(12, 12), resize="pad", fill=30, channels=channels)
    found = decoded(field, (np.full((*shape, channels), 255, np.uint8), None)).image
    top, bottom, left, right = inside
    expected = np.full((12, 12, channels), 30, np.uint8)
    expected[top:bottom, left:right] = 255
    np.testing.assert_array_equal(found, expected)


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(["stretch", "crop", "pad"]))
@settings(deadline=None, max_examples=60)
def test_any_shape_comes_to_the_size(height, width, resize):
    """Images of any shape come to the size in each way, and check agrees."""
    field = ImageTextPairField(encoding="png", image_size=(7, 13), resize=resize, channels=None)
    value = (np.full((height, width), 200, np.uint8), "x")
    field.check(value)
    found = decoded(field, value).image
    assert found.shape == (7, 13, 1)
    assert found.max() == 200


@pytest.mark.parametrize("form", ["mult", "mstr"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_reader_asks_for_its_own_size(tmp_path, form, mode):
    """Kept images of any size come as one array at the reader's, with ImageField's pixels; tokens stay as they are."""
    images = [image_file(Image.fromarray(picture(*size)), "JPEG") for size in ((30, 50), (81, 40), (16, 16))]
    path = tmp_path / f"x.{form}"
    with mm_assets.dataset.dataset.create(path, {"pair": ImageTextPairField(max_tokens=8)}) as writer:
        for number, image in enumerate(images):
            writer.write(str(number), {"pair": (image, "abc")})
    wanted = {"decode_size": [16, 12], "decode_resize": "crop", "decode_mode": mode}
    with mm_assets.dataset.dataset.open(path) as dataset:
        assert dataset.read_batch([0, 1])["pair"].values[0].image.shape == (30, 50, 3)
        batch = dataset.with_settings({"pair": wanted}).read_batch(range(3), threads=2)["pair"].values
        single = dataset.with_settings({"pair": wanted})[1]["pair"]
    field = ImageField.from_config({**wanted, "channels": 3, "orientation": "apply"})
    expected = np.stack([field.decode(*field.encode(image)) for image in images])
    np.testing.assert_array_equal(batch["image"], expected)
    np.testing.assert_array_equal(single.image, expected[1])
    assert batch["input_ids"].tolist() == [[1, 100, 101, 102, 2, 0, 0, 0]] * 3


def test_settings_of_decoding_change_nothing_that_is_stored():
    """Payloads are the same with and without them, and a configuration of before them is a field that has none."""
    reading = {"decode_size": (5, 5), "decode_resize": "pad", "decode_fill": 3, "decode_mode": "fast"}
    for options in ({}, {"encoding": "jpeg", "image_size": (8, 9), "resize": "crop"}):
        plain = ImageTextPairField(**options)
        assert ImageTextPairField(**options, **reading).encode((JPEG, "a dog")) == plain.encode((JPEG, "a dog"))
        older = {key: value for key, value in plain.config.items() if key not in reading}
        assert len(older) == len(plain.config) - len(reading)
        assert ImageTextPairField.from_config(older) == plain


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
def test_images_are_turned_upright(resize):
    """The EXIF orientation of a photograph is applied, whether it is kept, stretched, cut or padded."""
    sideways = Image.fromarray(np.repeat(np.arange(0, 240, 10, dtype=np.uint8)[:, np.newaxis], 24, axis=1))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = image_file(sideways, "PNG", exif=exif)
    kept = decoded(ImageTextPairField(), (data, None)).image
    assert kept[0, 0, 0] > kept[0, -1, 0]
    field = ImageTextPairField(encoding="png", image_size=(24, 24), resize=resize)
    np.testing.assert_array_equal(decoded(field, (data, None)).image, kept)


def test_its_parts_are_assembled():
    """Rows of an image, a text and a score make a value, and the payload shows which parts it has."""
    field = ImageTextPairField()
    value = field.assemble({"image": memoryview(JPEG), "text": memoryview(b"a dog"), "clip_score": b"0.25"})
    payload = field.encode(value)
    assert field.decode(*payload) == pair(pixels_of(JPEG), "a dog", 0.25)
    items = [(item.part, item.position, bytes(item.data)) for item in field.items(*payload)]
    assert items == [("image", 0, JPEG), ("text", 0, b"a dog"), ("clip_score", 0, b"0.25")]
    assert field.keeps_part("image")
    assert field.keeps_part("text")
    assert not field.keeps_part("clip_score")
    alone = field.encode(field.assemble({"image": JPEG, "clip_score": None}))
    assert [item.part for item in field.items(*alone)] == ["image"]
    assert decoded(field, field.assemble({"image": JPEG, "text": "x", "clip_score": 1})).clip_score == 1.0
    tokens_only = ImageTextPairField(encoding="jpeg", store_text=False)
    assert not tokens_only.keeps_part("image")
    assert not tokens_only.keeps_part("text")
    items = list(tokens_only.items(*tokens_only.encode((JPEG, "a"))))
    assert bytes(items[1].data) == np.array([1, 100, 2], "<u2").tobytes()


@pytest.mark.parametrize(
    "contents",
    [{}, {"text": b"a"}, {"image": None}, {"image": JPEG, "words": b"a"}, {"image": JPEG, "clip_score": b"x"}],
)
def test_contents_that_make_no_pair_are_refused(contents):
    """Without an image, with an unknown part, or with a score that is not a number there is no value."""
    with pytest.raises(EncodeError, match="expected"):
        ImageTextPairField().assemble(contents)


def test_values_compare_by_their_content():
    """Pairs with equal arrays are equal, others are not."""
    assert ImageText(COLOUR, "a") == ImageText(COLOUR.copy(), "a")
    assert ImageText(COLOUR, "a") != ImageText(COLOUR + 1, "a")
    assert ImageText(JPEG, "a") != ImageText(COLOUR, "a")
    assert pair(COLOUR, "a") == pair(COLOUR.copy(), "a")
    assert pair(COLOUR, "a") != pair(COLOUR, "a", 0.5)
    assert ImageText(COLOUR) != 5


def test_a_damaged_image_is_refused_where_it_has_to_be_decoded():
    """Bytes that end early are refused while packing wherever pixels are needed, in each way to the size."""
    for resize in ("stretch", "crop", "pad"):
        field = ImageTextPairField(encoding="jpeg", image_size=(8, 8), resize=resize)
        for refuse in (field.encode, field.check):
            with pytest.raises(EncodeError, match="ImageTextPairField, its image"):
                refuse((JPEG[:-100], "x"))


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_visual_question_answering(tmp_path, form):
    """Image, question and answer are three modalities of one packed file, any of them absent in a sample."""
    fields = {
        "image": ImageField(encoding="png", size=(6, 4), channels=3),
        "question": TokensField(tokenizer="bytes", max_tokens=24),
        "answer": TextField(),
    }
    samples = [
        {"image": WHITE, "question": "What colour is it?", "answer": "white"},
        {"image": WHITE, "question": "Is it a very, very big dog?", "answer": None},
        {"image": None, "question": None, "answer": "no"},
    ]
    path = tmp_path / f"vqa.{form}"
    with mm_assets.dataset.dataset.create(path, fields) as writer:
        for number, sample in enumerate(samples):
            writer.write(f"q{number}", sample)
    with mm_assets.dataset.dataset.open(path, verify=True) as dataset:
        assert dataset.verify().ok
        batch = dataset.read_batch([0, 1, 2])
        assert BYTES.decode(dataset[0]["question"]) == "What colour is it?"
        assert dataset[0]["answer"] == "white"
        assert dataset[2] == {"image": None, "question": None, "answer": "no"}
    np.testing.assert_array_equal(batch["image"].values[:2], [WHITE, WHITE])
    ids, mask = batch["question"].values["input_ids"], batch["question"].values["attention_mask"]
    assert ids.shape == (3, 24)
    assert mask.sum(axis=1).tolist() == [20, 24, 0]
    assert ids[1, -1] == ByteTokenizer.EOS_ID  # the cut keeps the end
    assert batch["answer"].values == ["white", None, "no"]
    assert batch["image"].present.tolist() == [True, True, False]
    assert batch["question"].present.tolist() == [True, True, False]


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_caption_pairs_of_real_shards(tmp_path, form, shared_data, members_of):
    """Photographs with captions pack to training size, decode in batches, and keep their text."""
    members: dict[str, dict[str, bytes]] = {}
    for name, data in members_of(shared_data, (".jpg", ".txt", ".json")):
        if name.startswith("image-text-00000.tar:"):
            key, _, extension = name.partition(":")[2].rpartition(".")
            members.setdefault(key, {})[extension] = data
    samples = [one for one in members.values() if set(one) == {"jpg", "txt", "json"}][:12]
    assert len(samples) == 12
    fields = {
        "pair": ImageTextPairField(encoding="jpeg", image_size=(64, 64), resize="crop"),
        "kept": ImageTextPairField(),
    }
    path = tmp_path / f"pairs.{form}"
    with mm_assets.dataset.dataset.create(path, fields) as writer:
        for number, one in enumerate(samples):
            value = {"image": one["jpg"], "text": one["txt"] if number % 3 else None}
            writer.write(str(number), {"pair": value, "kept": value if number % 2 else None})
    with mm_assets.dataset.dataset.open(path, verify=True) as dataset:
        batch = dataset.read_batch(range(12))
        rows = [dataset[i] for i in range(12)]
        assert dataset.fields["pair"] == fields["pair"]
        raw = dataset.read_raw([1], ["kept"])["kept"][0]
        assert bytes(raw).endswith(samples[1]["jpg"])
    arrays = batch["pair"].values
    assert arrays["image"].shape == (12, 64, 64, 3)
    for number, (one, row) in enumerate(zip(samples, rows, strict=True)):
        text = one["txt"].decode() if number % 3 else None
        assert row["pair"].text == text
        np.testing.assert_array_equal(arrays["image"][number], row["pair"].image)
        np.testing.assert_array_equal(arrays["input_ids"][number], row["pair"].input_ids)
        if text is not None:
            assert json.loads(one["json"])["caption"] == text
            assert BYTES.decode(row["pair"].input_ids) == text[:75]
        assert (row["kept"] is None) == (number % 2 == 0)
        if row["kept"] is not None:
            expected = np.asarray(Image.open(io.BytesIO(one["jpg"])).convert("RGB"))
            assert row["kept"].image.shape == expected.shape
            assert np.abs(row["kept"].image.astype(int) - expected).max() <= 4
