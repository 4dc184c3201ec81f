"""Settings that change how stored bytes decode, what a packed file may not set, and the page about reading."""

import copy
import dataclasses
import gc
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import mm_assets
from mm_assets.dataset import files as packed_files
from mm_assets.dataset.writer import spec_of
from mm_assets.errors import ConfigError, SchemaMismatchError
from mm_assets.fields import (
    AudioField,
    Document,
    DocumentField,
    Field,
    ImageField,
    ImageTextPairField,
    SequenceField,
    TextField,
    TokensField,
)
from mm_assets.formats import MultWriter, Payload, convert
from mm_assets.testing import same

from .decoding import COUNT, FIELDS, SIZE, Slow, decoding_threads, picture, sample, write


def test_raw_batches_are_views(packed):
    """Raw reads of many samples give the stored bytes in the order asked, None where absent, for any type of field."""
    with mm_assets.open(packed) as dataset:
        order = [4, 3, 2, 4, -1]
        raw = dataset.read_raw(order, ["text"])["text"]
        assert [one and bytes(one).decode() for one in raw] == [sample(i % COUNT)["text"] for i in order]
        assert all(isinstance(one, memoryview) and one.readonly for one in raw if one is not None)
        assert dataset.read_raw([], ["image"])["image"] == []
        with pytest.raises(IndexError):
            dataset.read_raw([COUNT], ["text"])
        with pytest.raises(KeyError, match="typo"):
            dataset.read_raw([0], ["typo"])


def test_settings_change_decoding_only(packed):
    """Other settings decode the same samples otherwise; what is not named stays, and so does the first dataset."""
    with mm_assets.open(packed) as dataset, dataset.with_settings({"photo": {"channels": 1}}) as grey:
        assert grey[0]["text"] == dataset[0]["text"]
        assert grey[1]["photo"].shape == (4, 39, 1)
        assert dataset[1]["photo"].shape == (4, 39, 3)
        assert grey.fields == {**FIELDS, "photo": ImageField(channels=1)}
        assert dataset.fields == FIELDS
        both = grey.with_settings({"label": {"dtype": "int32"}})
        assert both.fields["photo"] == ImageField(channels=1)
        assert both.read_batch([1], ["label"])["label"].values.dtype == np.int32
        sized = dataset.with_settings({"image": {"size": None}})
        assert sized.read_batch([0])["image"].values[0] is None
        assert dataset.with_settings({}).fields == FIELDS


def test_settings_of_the_items_of_a_sequence(tmp_path, form):
    """Below `inner` stand the settings of the items' field."""
    fields = {"pages": SequenceField(ImageField()), "sound": AudioField()}
    path = write(tmp_path / f"x.{form}", fields, [{"pages": [(0, picture(0)), (3, picture(1))]}])
    with mm_assets.open(path) as dataset:
        grey = dataset.with_settings({"pages": {"inner": {"channels": 1}}, "sound": {"decoded": "int16"}})
        assert [image.shape for _, image in grey[0]["pages"]] == [(*SIZE, 1)] * 2
        assert grey.fields["sound"] == AudioField(decoded="int16")
        with pytest.raises(ConfigError, match=r"pages\.inner\.chanels"):
            dataset.with_settings({"pages": {"inner": {"chanels": 1}}})


@pytest.mark.parametrize(
    ("field", "changes", "advice"),
    [
        (SequenceField(ImageField()), {"channels": 1}, "x.channels: .*SequenceField: inner; give channels below inner"),
        (SequenceField(ImageField()), {"config": {"channels": 1}}, "give channels below inner"),
        (SequenceField(DocumentField()), {"channels": 1}, r"give channels below inner\.image"),
        (SequenceField(DocumentField()), {"inner": {"channels": 1}}, r"x\.inner\.channels: .*channels below image"),
        (DocumentField(), {"decode_size": [4, 4]}, "x.decode_size: .*give decode_size below image"),
        (DocumentField(), {"pages": {"channels": 1}}, "give channels below image"),
        (ImageTextPairField(), {"image": {"channels": 1}}, "x.image: .*give channels beside these, not below image"),
        (ImageTextPairField(), {"size": [4, 4]}, "did you mean image_size or"),
        (ImageField(), {"inner": {"channels": 1}}, "give channels beside these, not below inner"),
        (ImageField(), {"chanels": 1}, "did you mean channels"),
    ],
)
def test_a_setting_in_the_wrong_place_is_refused_with_the_right_one(tmp_path, field, changes, advice):
    """A setting of an item, a page or a part says below which setting, or beside which ones, it belongs."""
    path = write(tmp_path / "x.mult", {"x": field}, [{"x": None}])
    with mm_assets.open(path) as dataset, pytest.raises(ConfigError, match=advice):
        dataset.with_settings({"x": changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"photo": {"chanels": 1}}, r"photo\.chanels: .*a setting of ImageField: .*channels"),
        ({"photo": {"channels": 7}}, r"photo\.channels: found 7"),
        ({"photo": {1: 7}}, r"photo\.1"),
        ({"photo": 3}, r"photo: found int 3, expected a mapping"),
        ({"label": {"dtype": "float64"}}, r"label: .*another record"),
        ({"text": {"x": 1}}, r"text\.x: .*no settings"),
    ],
)
def test_wrong_settings_are_refused(packed, changes, message):
    """The error of an unknown setting, a wrong value or one that misreads what is stored names modality and setting."""
    with mm_assets.open(packed) as dataset, pytest.raises(ConfigError, match=message) as caught:
        dataset.with_settings(changes)
    assert str(packed) in str(caught.value)


@pytest.mark.usefixtures("_registry")
def test_settings_of_what_is_not_there(tmp_path, form):
    """Settings of a modality that the files have not, or whose type is not known, are refused."""
    path = write(tmp_path / f"x.{form}", {"a": Slow(), "b": TextField()}, [{"b": "x"}])
    with mm_assets.open(path) as dataset:
        with pytest.raises(KeyError, match="typo"):
            dataset.with_settings({"typo": {}})
        with pytest.raises(SchemaMismatchError, match="Slow"):
            dataset.with_settings({"a": {}})
        with pytest.raises(SchemaMismatchError, match="Slow"):
            dataset.empty_batch(1)
        assert dataset.empty_batch(1, ["b"]) == {}


def test_datasets_of_one_file_share_it_and_close_alone(packed):
    """Other settings open no file again; each dataset is closed on its own, and the files with the last of them."""
    counted = mock.patch("mm_assets.dataset.files.open_reader", wraps=packed_files.open_reader)
    with counted as opened:
        first = mm_assets.open(packed)
        second = first.with_settings({"photo": {"channels": 1}})
        third = second.with_settings({"photo": {"channels": 3}})
        assert opened.call_count == 1
        with mock.patch.object(packed_files.MappedFile, "close", autospec=True) as closed:
            first.close()
            first.close()
            with pytest.raises(ValueError, match="closed"):
                first[0]
            with pytest.raises(ValueError, match="closed"):
                first.with_settings({})
            assert second[1]["photo"].shape == (4, 39, 1)
            del third  # never closed, and yet it holds no file
            gc.collect()
            assert closed.call_count == 0
            second.close()
            assert closed.call_count == 1
    with pytest.raises(ValueError, match="closed"):
        second[0]


def test_settings_pickle(packed):
    """A dataset with other settings has them in another process too."""
    with mm_assets.open(packed) as dataset:
        grey = dataset.with_settings({"photo": {"channels": 1}})
        copies = pickle.loads(pickle.dumps([dataset, grey]))
        assert [copy[1]["photo"].shape[2] for copy in copies] == [3, 1]
        copies[0].close()
        assert copies[1][1]["text"] == sample(1)["text"]
        copies[1].close()


def test_real_images_and_sounds(shared_data, tmp_path, form):
    """Photographs and recordings of the corpora decode alike alone, in batches and in threads."""
    samples: dict[str, dict[str, Any]] = {}
    for shard, extensions in (("image-text/image-text-00000.tar", ".jpg"), ("speech/speech-00000.tar", ".wav")):
        with tarfile.open(shared_data / shard) as tar:
            found = [member for member in tar if member.name.endswith(extensions)][:12]
            for member in found:
                kind = "image" if extensions == ".jpg" else "sound"
                samples.setdefault(f"{member.name}", {})[kind] = tar.extractfile(member).read()
    path = write(tmp_path / f"x.{form}", {"image": ImageField(), "sound": AudioField()}, list(samples.values()))
    order = np.random.default_rng(0).permutation(len(samples)).tolist()
    with mm_assets.open(path) as dataset:
        alone = [dataset[i] for i in order]
        for threads in (0, 2):
            batch = dataset.read_batch(order, threads=threads)
            for name in ("image", "sound"):
                assert same(batch[name].values, [one[name] for one in alone])
        assert batch["image"].present.sum() == batch["sound"].present.sum() == 12


DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {page: (DOCS / page).read_text(encoding="utf-8") for page in ("reading.md", "spec/reading.md")}


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """The examples of a page on reading run one after the other."""
    monkeypatch.chdir(tmp_path)
    with mm_assets.create("packed/captions/", {"image": ImageField(), "text": TextField()}) as writer:
        writer.write("0", {"image": np.zeros((8, 8, 3), np.uint8), "text": "black"})
    space: dict[str, Any] = {}
    for example in re.findall(r"^```python\n(.*?)^```", PAGES[page], flags=re.MULTILINE | re.DOTALL):
        exec(compile(example, f"docs/{page}", "exec"), space)
    assert decoding_threads() == []


@pytest.mark.parametrize("page", PAGES)
def test_the_methods_that_a_page_names_exist(page):
    """Every name in backticks before a parenthesis is a method of a dataset, or a function beside it."""
    for name in re.findall(r"`(\w+)\(", PAGES[page]):
        assert hasattr(mm_assets.Dataset, name) or hasattr(mm_assets.dataset.dataset, name), name


@pytest.mark.parametrize("key", ["file", "json"])
def test_a_packed_file_brings_no_tokenizer(tmp_path, key):
    """A schema that names a tokenizer's file, or holds one, opens nothing: the modality alone cannot be decoded."""
    secret = tmp_path / "tokenizer.json"
    secret.write_text("{}")
    config = {"tokenizer": {key: str(secret) if key == "file" else "{}"}, "vocab_size": 10}
    for name, setting in (("ids", config), ("list", {"inner": {"type": "TokensField", "config": config}})):
        made = TokensField(vocab_size=10)
        spec = spec_of(name, made if name == "ids" else SequenceField(made))
        hostile = dataclasses.replace(spec, config=setting)
        with MultWriter(tmp_path / "x.mult", [hostile]) as writer:
            writer.write("a", {})
        with mm_assets.open(tmp_path / "x.mult") as dataset, pytest.raises(SchemaMismatchError, match="contains a tok"):
            dataset.read_batch([0], [name])


PIXELS = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
LATER = [
    (ImageField(), PIXELS, ()),
    (TextField(), "text", ()),
    (SequenceField(ImageField()), [(0, PIXELS), (3, PIXELS)], ("inner", "config")),
    (DocumentField(), Document(pages=[PIXELS]), ("image",)),
]


def write_later(path: Path, field: Field, value: Any, place: tuple[str, ...], settings: dict[str, Any]) -> None:
    """Writes one sample whose stored configuration has further settings, of the field or of an inner one."""
    spec = spec_of("v", field)
    config = copy.deepcopy(dict(spec.config))
    within: Any = config
    for key in place:
        within = within[key]
    within.update(settings)
    with MultWriter(path, [dataclasses.replace(spec, config=config)]) as writer:
        writer.write("a", {"v": Payload(*field.encode(value))})


@pytest.mark.parametrize(("field", "value", "place"), LATER)
def test_settings_of_a_later_release_are_ignored(tmp_path, caplog, field, value, place):
    """A setting that is not known here is ignored, alone or in an inner field, and a warning names it."""
    write_later(tmp_path / "x.mult", field, value, place, {"dither": "blue", "required": []})
    with mm_assets.open(tmp_path / "x.mult") as dataset:
        assert dataset.fields == {"v": field}
        assert same(dataset[0]["v"], field.decode(*field.encode(value)))
        assert dataset.schema["modalities"][0]["config"] != field.config
    assert "are ignored: dither" in caplog.text
    convert(tmp_path / "x.mult", tmp_path / "y.mstr")
    with mm_assets.open([tmp_path / "x.mult"]) as one, mm_assets.open(tmp_path / "y.mstr") as other:
        assert one.schema["modalities"][0]["config"] == other.schema["modalities"][0]["config"]


@pytest.mark.parametrize(("field", "value", "place"), LATER)
@pytest.mark.parametrize("required", [["dither"], ["gone"], "dither", [1]])
def test_a_required_setting_is_never_ignored(tmp_path, field, value, place, required):
    """If a file says that decoding depends on an unknown setting, the modality has its raw bytes only."""
    write_later(tmp_path / "x.mult", field, value, place, {"dither": "blue", "required": required})
    with mm_assets.open(tmp_path / "x.mult") as dataset:
        with pytest.raises(SchemaMismatchError, match="required"):
            dataset[0]
        assert bytes(dataset.read_raw([0])["v"][0] or b"") == bytes(field.encode(value).data)


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        (ImageField(max_pixels=2**31 - 1), lambda made: made.max_pixels),
        (SequenceField(ImageField(max_pixels=2**31 - 1)), lambda made: made.inner.max_pixels),
        (DocumentField(image=ImageField(max_pixels=2**31 - 1)), lambda made: made.image.max_pixels),
    ],
)
def test_a_packed_file_does_not_raise_a_limit(tmp_path, field, limit):
    """A file that was packed with a higher limit is read with the usual one, until the reader raises it."""
    with mm_assets.create(tmp_path / "x.mult", {"v": field}) as writer:
        writer.write("a", {})
    with mm_assets.open(tmp_path / "x.mult") as dataset:
        assert limit(dataset.fields["v"]) == ImageField().max_pixels
    with mm_assets.open(tmp_path / "x.mult", fields={"v": field}) as dataset:
        assert limit(dataset.fields["v"]) == 2**31 - 1
    lower = ImageField(max_pixels=1000)
    with mm_assets.create(tmp_path / "y.mult", {"v": lower}) as writer:
        writer.write("a", {})
    with mm_assets.open(tmp_path / "y.mult") as dataset:
        assert dataset.fields["v"] == lower


def test_stored_ids_stay_their_tokenizer_s(tmp_path):
    """Another tokenizer than the one that made the ids is refused; the same one is taken."""
    with mm_assets.create(tmp_path / "x.mult", {"ids": TokensField(tokenizer="bytes", max_tokens=8)}) as writer:
        writer.write("a", {"ids": "ab"})
    with mm_assets.open(tmp_path / "x.mult") as dataset:
        assert dataset.with_settings({"ids": {"tokenizer": "bytes"}})[0]["ids"].tolist()
        other = {"name": "other", "sha256": "0" * 64}
        with pytest.raises(ConfigError, match="the ids stored are of"):
            dataset.with_settings({"ids": {"tokenizer": other, "vocab_size": 259}})
