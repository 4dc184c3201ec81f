"""Parts of values, by names such as `document.layout.words` and `image[0]`: read alone where they are stored so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import MultimodalCollator, MultimodalLoader
from mm_assets.errors import CorruptError, FormatError
from mm_assets.fields import (
    Document,
    DocumentField,
    ImageField,
    ImageTextPairField,
    JSONField,
    PageLayout,
    SequenceField,
    TextBoxes,
    TextField,
    TimeSeriesField,
)
from mm_assets.storage.remote import RemoteFile
from mm_assets.testing import same

SIZE = (8, 9)
FIELDS = {
    "document": DocumentField(image=ImageField(encoding="png")),
    "image": SequenceField(ImageField(encoding="png", channels=3, size=SIZE)),
    "pair": ImageTextPairField(encoding="png", image_size=SIZE, max_tokens=6),
    "series": TimeSeriesField(),
    "meta": JSONField(),
    "a.b": SequenceField(TextField()),
}
PARTS = {
    "document": [
        "layout",
        "layout.words",
        "layout.words.boxes",
        "layout.words.texts",
        "pages[0]",
        "pages[-1]",
        "positions",
    ],
    "image": ["[0]", "[1]", "[-1]", "[7]"],
    "pair": ["image", "input_ids", "attention_mask", "text", "clip_score"],
    "series": ["timestamps", "values", "values[0]", "duration_seconds"],
    "meta": ["a", "a.b", "c[1]", "c[5]"],
    "a.b": ["[0]"],
}
NAMES = [f"{name}{'' if part.startswith('[') else '.'}{part}" for name, parts in PARTS.items() for part in parts]
COUNT = 12


def picture(seed: int, height: int = 20, width: int = 30) -> np.ndarray[Any, Any]:
    """Noise, which does not compress."""
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def sample(n: int) -> dict[str, Any]:
    """Every modality is absent from some sample, and every half of a composite too."""
    boxes = [[k, 0, k + 2, 3] for k in range(n % 4)]
    layout = PageLayout(TextBoxes([f"w{n}"] * len(boxes), boxes), page_sizes=[[30, 20]] * (1 + n % 2))
    pages = [picture(n + page) for page in range(1 + n % 2)]
    values = {
        "document": Document(None if n % 5 == 1 else pages, None if n % 5 == 2 else layout),
        "image": [(2 * k, picture(n + k)) for k in range(n % 3)],
        "pair": (picture(n), None if n % 4 == 1 else f"text {n}", None if n % 3 else n / 8),
        "series": (np.arange(n % 4 + 1) / 2, np.full((n % 4 + 1, 2), n, np.float32)),
        "meta": {"a": {"b": n}, "c": list(range(n % 3))},
        "a.b": [(0, f"first of {n}")],
    }
    return {name: None if (n + k) % 6 == 5 else value for k, (name, value) in enumerate(values.items())}


@pytest.fixture(scope="module", params=["mult", "mstr"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of six samples."""
    folder: Path = tmp_path_factory.mktemp("parts")
    for part in range(2):
        with mm_assets.create(folder / f"{part}.{request.param}", FIELDS) as writer:
            for n in range(part * COUNT // 2, (part + 1) * COUNT // 2):
                writer.write(str(n), sample(n))
    return folder


@pytest.fixture
def dataset(folder: Path) -> Iterator[mm_assets.Dataset]:
    with mm_assets.open(folder) as data:
        yield data


def part_of(values: dict[str, Any], name: str) -> Any:
    """A part of a sample, taken by Python itself."""
    modality = max((known for known in FIELDS if name.startswith(known)), key=len)
    value = values[modality]
    for key in name[len(modality) :].replace("[", ".[").strip(".").split("."):
        if value is None:
            return None
        if key.startswith("["):
            number = int(key[1:-1])
            value = value[number] if -len(value) <= number < len(value) else None
            value = value[1] if isinstance(FIELDS[modality], SequenceField) and value is not None else value
        else:
            value = value[key] if isinstance(value, dict) else getattr(value, key)
    return value


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_that_of_the_value(dataset: mm_assets.Dataset, name: str) -> None:
    """By sample, list and batch a part is what the decoded value has, absent where the value or the part is."""
    expected = [part_of(one, name) for one in dataset]
    assert any(value is not None for value in expected) or name in ("image[7]", "meta.c[5]")
    assert all(map(same, dataset.read_modality(name, range(COUNT)), expected))
    for i, value in enumerate(expected):
        assert same(dataset.read_sample(i, [name]), {name: value})
    for threads in (0, 2):
        batch = dataset.read_batch(range(COUNT), [name], threads=threads)[name]
        assert batch.present.tolist() == [value is not None for value in expected]
        for found, value in zip(batch.values, expected, strict=True):
            if value is None:
                assert found is None if isinstance(batch.values, list) else not np.any(found)
            else:
                assert same(found.item() if isinstance(found, np.generic) else found, value)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.sampled_from([*NAMES, *FIELDS]), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(-COUNT, COUNT - 1), max_size=5),
)
def test_parts_are_read_together_in_any_combination(folder: Path, names: list[str], indices: list[int]) -> None:
    """Any modalities and parts in one batch are what each is alone, in the order of the names."""
    with mm_assets.open(folder) as dataset:
        batch = dataset.read_batch(indices, names)
        assert list(batch) == names
        for name in names:
            alone = dataset.read_batch(indices, [name])[name]
            assert same(batch[name].values, alone.values)
            assert batch[name].present.tolist() == alone.present.tolist()


def test_parts_go_into_given_arrays(dataset: mm_assets.Dataset) -> None:
    """The batch of a part of one shape is an array, which may be given; several parts of one payload have one each."""
    names = ["image[0]", "pair.input_ids", "pair.image", "pair.attention_mask", "series.values", "pair.text"]
    layout = dataset.batch_layout(COUNT, names)
    assert layout["image[0]"].shape == (COUNT, *SIZE, 3)
    assert set(layout) == set(names[:4])
    out = dataset.empty_batch(COUNT + 3, names)
    for array in out.values():
        array[...] = 7
    batch = dataset.read_batch(range(COUNT), names, out=out)
    for name, array in out.items():
        assert np.shares_memory(batch[name].values, array)
        assert (array[COUNT:] == 7).all()
        assert same(np.array(array[:COUNT]), dataset.read_batch(range(COUNT), [name])[name].values)
    with pytest.raises(ValueError, match=r"pair\.image"):
        dataset.read_batch([0], ["pair.image"], out={"pair.image": np.empty((1, 2, 2, 3), np.uint8)})
    with pytest.raises(ValueError, match="not read"):
        dataset.read_batch([0], ["pair.image"], out={"pair.text": np.empty(1)})


def test_pages_are_decoded_into_a_batch(dataset: mm_assets.Dataset) -> None:
    """With a size set, the pages of documents and the items of sequences are one array, as images are."""
    sizes = {"decode_size": [4, 6], "channels": 3}
    small = dataset.with_settings({"document": {"image": sizes}, "image": {"inner": sizes}})
    names = ["document.pages[0]", "image[0]"]
    out = small.empty_batch(COUNT, names)
    batch = small.read_batch(range(COUNT), names, out=out, threads=2)
    for name in names:
        assert batch[name].values.shape == (COUNT, 4, 6, 3)
        assert np.shares_memory(batch[name].values, out[name])
        for found, one in zip(batch[name].values, small, strict=True):
            expected = part_of(one, name)
            assert not found.any() if expected is None else same(found, expected)


def test_a_modality_may_have_the_name_of_a_part(tmp_path: Path) -> None:
    """A modality's own name comes before a part of another."""
    with mm_assets.create(tmp_path / "x.mult", {"meta": JSONField(), "meta.a": TextField()}) as writer:
        writer.write("0", {"meta": {"a": 1, "b": 2}, "meta.a": "text"})
    with mm_assets.open(tmp_path / "x.mult") as dataset:
        assert dataset.read_sample(0, ["meta.a", "meta.b"]) == {"meta.a": "text", "meta.b": 2}


# --- what is read -----------------------------------------------------------------------------------------------------


def page_bytes(dataset: mm_assets.Dataset, i: int) -> bytes:
    """The end of the stored image of a document's last page."""
    return bytes(dataset.read_raw([i], ["document"])["document"][0])[-64:]


def damage(folder: Path, content: bytes) -> None:
    """Flips bits of some bytes, wherever they are."""
    for path in folder.iterdir():
        data = path.read_bytes()
        if content in data:
            path.write_bytes(data.replace(content, bytes(byte ^ 0x55 for byte in content)))
            return
    raise AssertionError("the bytes are in no file")


@pytest.fixture
def damaged_page(folder: Path, tmp_path: Path) -> Path:
    """The files, with the last page of document 3 damaged."""
    with mm_assets.open(folder) as dataset:
        content = page_bytes(dataset, 3)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path, content)
    return tmp_path


def test_a_part_that_is_read_alone_is_not_verified_by_default(folder: Path, damaged_page: Path) -> None:
    """A damaged page does not keep the layout from being read, unless checksums are asked for."""
    names = ["document.layout.words.boxes", "document.pages[0]"]
    with mm_assets.open(folder) as whole, mm_assets.open(damaged_page) as dataset:
        assert same(dataset.read_sample(3, names), whole.read_sample(3, names))
        for read in (
            lambda: dataset.read_sample(3),
            lambda: dataset.read_batch([3], names, verify=True),
            lambda: dataset.read_batch([3], ["document.positions"]),  # which is not stored alone
            lambda: mm_assets.open(damaged_page, verify=True).read_sample(3, names),
        ):
            with pytest.raises(CorruptError, match="checksum"):
                read()
        with pytest.raises(FormatError, match=r"sample 3, modality 'document.pages\[-1\]'"):
            dataset.read_batch([0, 3], ["document.pages[-1]"])


def test_verified_parts_are_the_same(folder: Path) -> None:
    """With checksums verified, each part is what it is without."""
    with mm_assets.open(folder) as dataset, mm_assets.open(folder, verify=True) as verified:
        for name in NAMES:
            assert same(verified.read_modality(name, range(COUNT)), dataset.read_modality(name, range(COUNT)))


def test_only_the_range_of_a_part_is_requested(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of remote files the bytes of a part are requested, together for all samples, and none of its neighbors."""
    remote = fsspec.filesystem("memory")
    files = sorted(folder.iterdir())
    for path in files:
        remote.pipe(f"/parts/{path.name}", path.read_bytes())
    asked: list[Sequence[tuple[int, int]]] = []
    view_many = RemoteFile.view_many

    def record(self: RemoteFile, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        asked.append(ranges)
        return view_many(self, ranges)

    monkeypatch.setattr(RemoteFile, "view_many", record)
    with mm_assets.open(folder) as local, mm_assets.open([f"memory://parts/{path.name}" for path in files]) as dataset:
        for name in ("document.layout.words.texts", "image[0]", "pair.text", "pair.input_ids"):
            dataset.read_modality(name, [0])  # tables are read with the first samples
            dataset.read_modality(name, [COUNT - 1])
            asked.clear()
            assert same(dataset.read_modality(name, range(COUNT)), local.read_modality(name, range(COUNT)))
            payloads = list(local.stored(range(COUNT), [name.partition(".")[0].partition("[")[0]]).values())
            sizes = [one.size for one in payloads[0] if one is not None]
            num_bytes = sum(size for ranges in asked for _, size in ranges)
            assert num_bytes < 0.7 * sum(sizes), name
            assert len(asked) <= 2 * 3, name  # records, tables and data of each file


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("document.layot", "'document' has no part 'layot'; it has pages, layout, positions"),
        ("document[0]", "'document' has no part 0; it has pages"),
        ("document.layout.wrds", "found PageLayout without the part wrds; it has words, segments"),
        ("document.layout.words.box", "found TextBoxes without the part box; it has texts, boxes"),
        ("image.first", r"'image' has no part 'first'; it has items, by number"),
        ("pair.__class__", "'pair' has no part '__class__'; it has image"),
        ("series.column", "found TimeSeries without the part column; it has timestamps"),
        ("meta.d", "found dict .* without the part d; it has a, c"),
        ("nothing.layout", "no modality 'nothing.layout'; it has document"),
        ("document..layout", "no modality"),
        ("image[first]", "no modality"),
    ],
)
def test_an_unknown_part_is_named_with_those_that_there_are(
    dataset: mm_assets.Dataset, name: str, message: str
) -> None:
    """The error names the part and the parts that exist."""
    with pytest.raises(KeyError, match=message):
        dataset.read_batch(range(COUNT), [name])
    with pytest.raises(KeyError, match=message):
        dataset.read_modality(name, range(COUNT))


# --- loaders ----------------------------------------------------------------------------------------------------------

RULES: dict[str, dict[str, Any]] = {
    "boxes": {"type": "ragged", "source": "document.layout.words.boxes"},
    "words": {"source": "document.layout.words.texts"},
    "first": {"stack": True, "source": "image[0]"},
    "ids": {"stack": True, "source": "pair.input_ids"},
    "times": {"type": "pad", "source": "series.timestamps"},
}


def batches(dataset: mm_assets.Dataset, **options: Any) -> list[dict[str, Any]]:
    """One epoch, in order."""
    collator = MultimodalCollator(RULES)
    return list(MultimodalLoader(dataset, collator=collator, batch_size=5, shuffle=False, last="short", **options))


def test_a_loader_reads_the_parts_of_its_rules(dataset: mm_assets.Dataset) -> None:
    """Only the parts that the rules name are read, and the batches are those of whole values."""
    collator = MultimodalCollator(RULES)
    loader = MultimodalLoader(dataset, collator=collator, batch_size=5)
    assert loader.modalities == tuple(rule["source"] for rule in RULES.values())
    whole = batches(dataset, modalities=["document", "image", "pair", "series"])
    transformed = batches(dataset, transforms={"document": lambda value: value})
    for found in (batches(dataset), batches(dataset, num_workers=0), transformed):
        for one, two in zip(found, whole, strict=True):
            assert same(one["boxes"].values, two["boxes"].values)
            assert same(one["boxes"].offsets, two["boxes"].offsets)
            assert one["words"] == two["words"]
            assert all(same(one[name], two[name]) for name in ("first", "ids", "times"))
            assert all(same(one["present"][name], two["present"][name]) for name in RULES)
