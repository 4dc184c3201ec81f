"""Packed sequences: every token once, nothing decoded to plan them, the same on any ranks, resumed anywhere."""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import (
    Blocks,
    Budget,
    CollateError,
    ConfigError,
    Dataset,
    FormatError,
    LoaderError,
    MultimodalLoader,
    SequencePacker,
)
from mm_assets.fields import (
    Field,
    ImageField,
    ImageTextPairField,
    ScalarField,
    SequenceField,
    TextField,
    TokensField,
)
from mm_assets.loading.sequence_packer import best_fit, cut_sample
from mm_assets.testing import LoaderSuite
from mm_assets.testing.loaders import plain

COUNT = 40
LENGTH = 64
IMAGE_TOKENS = 9
FIELDS: dict[str, Field] = {
    "text": SequenceField(TokensField(vocab_size=60_000)),
    "image": SequenceField(ImageField(encoding="png", size=(2, 3), channels=3)),
    "label": ScalarField("int32"),
}


def document(i: int) -> list[Any]:
    """Runs of tokens and images of document `i`, interleaved; no two have the same tokens."""
    rng = np.random.default_rng(i)
    items: list[Any] = []
    for place in range(i % 6):
        if rng.random() < 0.4:
            items.append(np.full((2, 3, 3), i + place, np.uint8))
        else:
            items.append(1000 * (i + 1) + 100 * place + np.arange(int(rng.integers(0, 60))))
    return items


def tokens_of(items: list[Any]) -> list[int]:
    return [
        token
        for item in items
        for token in ([-1] * IMAGE_TOKENS if isinstance(item[:1], np.ndarray) and item.ndim == 3 else item)
    ]


def write_documents(path: Path, indices: range) -> Path:
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        for i in indices:
            items = list(enumerate(document(i)))
            text = [(place, item) for place, item in items if item.ndim == 1]
            image = [(place, item) for place, item in items if item.ndim == 3]
            writer.write(str(i), {"text": text or None, "image": image or None, "label": i})
    return path


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    folder = tmp_path_factory.mktemp("documents")
    paths = [write_documents(folder / "a.mult", range(15)), write_documents(folder / "b.mult", range(15, COUNT))]
    with mm_assets.open(paths) as dataset:
        yield dataset


def packer(**options: Any) -> SequencePacker:
    defaults = {"images": {"image": IMAGE_TOKENS}, "split": "anywhere", "bucket": 16}
    return SequencePacker(LENGTH, **(defaults | options))


def parts_of(batch: dict[str, Any]) -> Iterator[tuple[int, int, list[int], list[Any]]]:
    """Sample, first token, tokens and images of each part of a batch that is not a repeat."""
    number = 0
    for row, segments in enumerate(batch["segment_ids"]):
        images = list(batch["image"][row]) if "image" in batch else []
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert batch["position_ids"][row][here].tolist() == list(range(here.sum()))
            tokens = batch["input_ids"][row][here].tolist()
            mine = [images.pop(0) for _ in range(tokens.count(-1) // IMAGE_TOKENS)]
            if batch["valid"][number]:
                yield int(batch["index"][number]), int(batch["start"][number]), tokens, mine
            number += 1
        assert images == []
        assert (batch["input_ids"][row][segments == 0] == 0).all()
    assert number == len(batch["index"])


# -- the plan


def plain_best_fit(sizes: list[int], length: int) -> int:
    """How many bins best fit decreasing opens, item by item."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        at = bisect_left(spaces, size)
        space = spaces.pop(at) if at < len(spaces) else length
        spaces.insert(bisect_left(spaces, space - size), space - size)
    return len(spaces)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=150))))
def test_bins_are_those_of_best_fit_decreasing(case: tuple[int, list[int]]) -> None:
    """Packing sizes together needs as many bins as packing one item after the other, and none is too full."""
    length, sizes = case
    bins, count = best_fit(np.array(sizes, np.int64), length)
    assert len(bins) == len(sizes)
    filled = np.bincount(bins, sizes, minlength=count)
    assert len(filled) == count
    assert ((filled > 0) & (filled <= length)).all()
    assert count == plain_best_fit(sizes, length)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_samples_are_cut_around_images(data: st.DataObject) -> None:
    """No part is too long or divides an image, and the parts have all tokens; text is divided only where it must be."""
    length = data.draw(st.integers(4, 40))
    starts, sizes, at = [], [], 0
    for _ in range(data.draw(st.integers(0, 6))):
        at += data.draw(st.integers(0, 60))
        starts.append(at)
        sizes.append(data.draw(st.integers(1, length)))
        at += sizes[-1]
    total = at + data.draw(st.integers(1, 50))
    for between_images in (False, True):
        parts = cut_sample(total, starts, sizes, length, between_images=between_images)
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
        assert parts[-1][1] == total
        assert all(0 < stop - start <= length for start, stop in parts)
        cuts = [stop for _, stop in parts[:-1]]
        assert not any(start < cut < start + size for start, size in zip(starts, sizes, strict=True) for cut in cuts)
        if between_images:
            assert all(cut in starts or cut - start == length for (start, _), cut in zip(parts, cuts, strict=False))
            assert all(not any(start < at <= cut for at in starts) or cut in starts for start, cut in parts[:-1])


# -- batches


class TestPacked(LoaderSuite):
    """A loader of packed sequences keeps the promises of loaders: what comes once is a part of a sample."""

    split = "anywhere"

    @pytest.fixture(autouse=True)
    def _documents(self, documents: Dataset) -> None:
        self.documents = documents

    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        return MultimodalLoader(
            self.documents,
            batch_size=3,
            collator=packer(split=self.split, bos_id=7),
            seed=seed,
            num_workers=num_workers,
            rank=rank,
            world_size=world_size,
        )

    def samples(self, batch: Any) -> Any:
        return [(index, start) for index, start, _, _ in parts_of(batch)]


class TestPackedBetweenImages(TestPacked):
    """So does one that divides samples between images alone."""

    split = "between_images"


@pytest.mark.parametrize("shuffle", [True, False, Blocks(4, 2)])
def test_sequences_have_each_token_once(documents: Dataset, shuffle: Any) -> None:
    """The parts of a sample, joined, are its items in reading order; images are with the sequence of their places."""
    found: dict[int, list[Any]] = defaultdict(list)
    loader = MultimodalLoader(documents, batch_size=4, shuffle=shuffle, collator=packer(bos_id=5, eos_id=6))
    for batch in loader:
        rows = len(batch["input_ids"])
        assert batch["input_ids"].shape == batch["segment_ids"].shape == batch["position_ids"].shape == (rows, LENGTH)
        assert len(batch["image"]) == rows
        bounds = batch["cu_seqlens"]
        assert (bounds.dtype, bounds[0], bounds[-1]) == (np.int32, 0, rows * LENGTH)
        assert batch["max_seqlen"] == np.diff(bounds).max()
        flat = batch["segment_ids"].ravel()
        changes = [at for at in range(rows * LENGTH) if at % LENGTH == 0 or flat[at] != flat[at - 1]]
        assert bounds[:-1].tolist() == changes
        for index, start, tokens, images in parts_of(batch):
            found[index].append((start, tokens, images))
    for i in range(COUNT):
        expected = tokens_of(document(i))
        parts = sorted(found.pop(i, []), key=lambda part: part[0])
        assert [token for _, tokens, _ in parts for token in tokens] == ([5, *expected, 6] if expected else [])
        images = [image for _, _, images in parts for image in images]
        np.testing.assert_array_equal(images, [item for item in document(i) if item.ndim == 3])
    assert not found


def test_sequences_are_planned_without_decoding(documents: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a batch is made, no value is decoded."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a value was decoded")

    for field in (TokensField, ImageField, SequenceField):
        monkeypatch.setattr(field, "decode", refuse)
        monkeypatch.setattr(field, "decode_batch", refuse)
    loader = MultimodalLoader(documents, batch_size=4, collator=packer())
    assert len(loader) == sum(1 for _ in loader.plan.steps())


def test_remote_documents_give_the_same_batches(documents: Dataset) -> None:
    """Their plan reads the tables of items by range, and not the items."""
    remote = [f"memory://packed/{number}.mult" for number in range(len(documents.files))]
    for source, target in zip(documents.files, remote, strict=True):
        fsspec.filesystem("memory").pipe(target, Path(source).read_bytes())
    with mm_assets.open(remote) as data:
        batches = [plain(list(MultimodalLoader(some, batch_size=4, collator=packer()))) for some in (documents, data)]
    assert batches[0] == batches[1]


def test_what_may_not_be_divided_is_truncated(documents: Dataset) -> None:
    """A longer sample keeps its first tokens, and no part of an image; the loader says how much is lost."""
    with pytest.warns(RuntimeWarning, match=r"tokens are truncated: \d+ samples are longer than 64, such as"):
        loader = MultimodalLoader(documents, batch_size=4, collator=packer(split="no"))
    for batch in loader:
        for index, start, tokens, images in parts_of(batch):
            expected = tokens_of(document(index))
            assert start == 0
            assert tokens == expected[: len(tokens)]
            assert len(tokens) == min(len(expected), LENGTH) or expected[len(tokens)] == -1
            assert len(images) == tokens.count(-1) / IMAGE_TOKENS


@pytest.mark.parametrize("split", ["anywhere", "between_images"])
def test_tokens_without_images_are_divided_too(tmp_path: Path, split: str) -> None:
    """Samples of several lengths lose nothing, and those of one length and less are whole."""
    with mm_assets.create(tmp_path / "a.mult", {"ids": TokensField()}, fsync=False) as writer:
        for i in range(12):
            writer.write(str(i), {"ids": np.arange(1, 1 + 7 * i)})
    with mm_assets.open(tmp_path / "a.mult") as data:
        loader = MultimodalLoader(data, batch_size=2, collator=SequencePacker(16, split=split))
        found = sorted((index, start, tokens) for batch in loader for index, start, tokens, _ in parts_of(batch))
    expected = [(i, at, list(range(1 + at, 1 + min(at + 16, 7 * i)))) for i in range(12) for at in range(0, 7 * i, 16)]
    assert found == expected


def test_a_plan_is_the_same_on_any_ranks_and_resumes(documents: Dataset) -> None:
    """Sequences of ranks, together, are those of one; a state resumes with other ranks and another batch size."""

    def loader(batch_size: int, rank: int = 0, world_size: int = 1) -> MultimodalLoader:
        return MultimodalLoader(
            documents, batch_size=batch_size, collator=packer(), rank=rank, world_size=world_size, last="short"
        )

    def rows_of(loaders: list[MultimodalLoader]) -> list[Any]:
        runs = [[batch["input_ids"].tolist() for batch in loader] for loader in loaders]
        return [row for step in zip_longest(*runs, fillvalue=()) for rows in step for row in rows]

    whole = rows_of([loader(6)])
    assert rows_of([loader(2, rank, 3) for rank in range(3)]) == whole
    first = loader(2)
    found = [row.tolist() for batch in islice(first, 3) for row in batch["input_ids"]]
    state = json.loads(json.dumps(first.state_dict()))
    halves = [loader(3, rank, 2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    assert found + rows_of(halves) == whole
    for other in (packer(bucket=17), packer(eos_id=1), packer(images={"image": 4}), packer(split="between_images")):
        with pytest.raises(LoaderError, match="its groups is"):
            MultimodalLoader(documents, batch_size=2, collator=other).load_state_dict(state)


def test_own_pieces_and_counts(tmp_path: Path) -> None:
    """A function makes the tokens of texts, which characters or bytes count; single values are images, then tokens."""
    fields = {
        "text": TextField(),
        "ids": TokensField(max_tokens=9),
        "image": ImageField(channels=3, size=(2, 2), encoding="png"),
    }
    with mm_assets.create(tmp_path / "a.mult", fields, fsync=False) as writer:
        for i in range(8):
            image = np.full((2, 2, 3), i, np.uint8) if i % 2 else None
            writer.write(str(i), {"text": "é" * i, "ids": np.arange(10, 10 + i), "image": image})
    with mm_assets.open(tmp_path / "a.mult") as data:
        cases = [
            (
                "text.num_code_points",
                lambda sample: [np.array([ord(letter) for letter in sample["text"]], np.int64)],
                1,
            ),
            ("size_text", lambda sample: [list(sample["text"].encode())], 2),
        ]
        for column, pieces, each in cases:
            loader = MultimodalLoader(data, batch_size=2, collator=SequencePacker(16, pieces, tokens=[column]))
            counts = {index: len(tokens) for batch in loader for index, _, tokens, _ in parts_of(batch)}
            assert counts == {i: each * i for i in range(1, 8)}
        loader = MultimodalLoader(data, batch_size=2, collator=SequencePacker(16, images={"image": 2}, image_id=3))
        found = {index: tokens for batch in loader for index, _, tokens, _ in parts_of({**batch, "image": [[]] * 2})}
        assert found == {i: [3, 3] * (i % 2) + list(range(10, 10 + i)) for i in range(1, 8)}


@pytest.mark.parametrize("suffix", ["mult", "mstr"])
def test_tokens_of_pairs_are_counted_by_their_records(tmp_path: Path, suffix: str) -> None:
    """A pair's count is within the record of its tokens; of single pairs and of sequences, read whole or in parts."""
    pair = ImageTextPairField(encoding="png", max_tokens=9)
    with mm_assets.create(tmp_path / f"a.{suffix}", {"pair": pair, "pairs": SequenceField(pair)}) as writer:
        for i in range(8):
            value = (np.full((2, 2, 3), i, np.uint8), "a" * i)
            writer.write(str(i), {"pair": value if i else None, "pairs": [(k, value) for k in range(i % 3)]})

    def whole(sample: Any) -> list[Any]:
        return [sample["pair"].input_ids[sample["pair"].attention_mask == 1]]

    def parts(sample: Any) -> list[Any]:
        return [sample["pair.input_ids"][sample["pair.attention_mask"] == 1]]

    def items(sample: Any) -> list[Any]:
        return [item.input_ids[item.attention_mask == 1] for _, item in sample["pairs"]]

    with mm_assets.open(tmp_path / f"a.{suffix}") as data:
        counts = [int(one.attention_mask.sum()) if one else 0 for one in data.read_modality("pair", range(8))]
        assert data.column("pair.tokens.num_tokens").tolist() == counts
        assert data.column("pair.image.width").tolist() == [0] + [2] * 7
        assert len(data.filter("pair.tokens.num_tokens >= 5 and pair.image.width = 2")) == sum(n >= 5 for n in counts)
        for names, column, pieces, expected in (
            (["pair"], "pair.tokens.num_tokens", whole, counts),
            (["pair.input_ids", "pair.attention_mask"], "pair.tokens.num_tokens", parts, counts),
            (["pairs"], "pairs.tokens.num_tokens", items, [i % 3 * counts[i] for i in range(8)]),
        ):
            collator = SequencePacker(24, pieces, tokens=[column])
            loader = MultimodalLoader(data, names, batch_size=2, collator=collator)
            found = {index: len(tokens) for batch in loader for index, _, tokens, _ in parts_of(batch)}
            assert found == {i: count for i, count in enumerate(expected) if count}
        for batch in MultimodalLoader(data, ["pair.input_ids"], batch_size=Budget("pair.tokens.num_tokens", 18)):
            assert len(batch["index"]) * max(counts[i] for i in batch["index"].tolist()) <= 18
        with pytest.raises(ConfigError, match=r"give pieces, .*, of pair\.tokens\.num_tokens$"):
            MultimodalLoader(data, ["pair"], collator=SequencePacker(8))


def test_tokens_that_contradict_the_metadata_are_an_error(documents: Dataset) -> None:
    """Another number of tokens, images in other places, and pieces that are not tokens are named with their sample."""

    def doubled(sample: dict[str, Any]) -> list[Any]:
        return [item for _, item in sample["text"] or []] * 2

    def images_last(sample: dict[str, Any]) -> list[Any]:
        return [item for _, item in sample["text"] or []] + [("image", item) for _, item in sample["image"] or []]

    for pieces, message in (
        (doubled, r"sample \d+: found pieces of \d+ tokens, expected \d+ as in the metadata of text.num_tokens, image"),
        (
            images_last,
            r"sample \d+: an image has tokens \d+ to \d+, but the sample is divided at \d+: pieces must be",
        ),
        (lambda sample: [("photo", 1)], "found a piece 'photo', expected tokens or an image of image"),
        (lambda sample: [np.zeros(3)], "found a piece .*, expected integers in one axis"),
    ):
        with pytest.raises(CollateError, match=message):
            list(MultimodalLoader(documents, batch_size=4, collator=packer(pieces=pieces)))


def test_damaged_samples_are_replaced_in_their_places(tmp_path: Path) -> None:
    """All other samples come once; a part that replaces a damaged one is not valid, and no longer than it."""
    path = write_documents(tmp_path / "a.mult", range(COUNT))
    lost, ids = next((i, item) for i in range(20, COUNT) for item in document(i) if item.ndim == 1 and len(item) > 9)
    good = next(i for i in range(COUNT) if 0 < len(tokens_of(document(i))) <= LENGTH)
    content = bytearray(path.read_bytes())
    content[content.index(ids.astype("<u2").tobytes())] ^= 1
    path.write_bytes(content)
    with mm_assets.open(path) as dataset:
        with pytest.raises(FormatError):
            list(MultimodalLoader(dataset, batch_size=4, collator=packer()))
        loader = MultimodalLoader(dataset, batch_size=4, collator=packer(), on_damaged="skip")
        found = {(index, start): tokens for batch in loader for index, start, tokens, _ in parts_of(batch)}
        assert {one.index for one in loader.damaged} == {lost}
        assert {index for index, _ in found} == {i for i in range(COUNT) if tokens_of(document(i)) and i != lost}
        # In most batches all samples are damaged, so that one from elsewhere in the epoch replaces them.
        with dataset.select([lost] * 3 + [good]) as view:
            batches = list(MultimodalLoader(view, batch_size=1, collator=packer(bucket=1), on_damaged="skip"))
        assert len(batches) > 3
        assert {index for batch in batches for index in batch["index"].tolist()} == {3}
        assert sum(int(batch["valid"].sum()) for batch in batches) == 1


def test_a_record_that_claims_billions_of_tokens_is_bounded(
    documents: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more parts are planned than there are bytes, and reading the sample says what is wrong."""
    column = Dataset.column
    claimed = {"image.num_items": np.full(COUNT, 2**32 - 1, np.uint32)}
    monkeypatch.setattr(Dataset, "column", lambda data, name: claimed.get(name, column(data, name)))
    loader = MultimodalLoader(documents, batch_size=4, collator=packer())
    num_bytes = int(documents.column("size_image").sum() + documents.column("size_text").sum())
    assert loader.plan.order.num_samples * LENGTH < 2 * IMAGE_TOKENS * num_bytes
    with pytest.raises(CollateError, match=r"as in the metadata of text\.num_tokens, image"):
        list(loader)


def test_batches_may_be_tensors(documents: Dataset) -> None:
    """All arrays become tensors, those of images too."""
    torch = pytest.importorskip("torch")
    batch = next(iter(MultimodalLoader(documents, batch_size=2, collator=packer(return_tensors="pt"))))
    for name in ("input_ids", "position_ids", "segment_ids", "cu_seqlens", "index", "start", "valid"):
        assert isinstance(batch[name], torch.Tensor), name
    assert isinstance(batch["image"].values, torch.Tensor)
    assert batch["cu_seqlens"].dtype == torch.int32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: SequencePacker(0), "length: found 0"),
        (lambda data: SequencePacker(8, split="some"), "split: found 'some', expected one of no, anywhere, between_im"),
        (lambda data: SequencePacker(8, images={"image": 9}), "images.image: found 9, expected at most the length, 8"),
        (lambda data: SequencePacker(8, images={"index": 2}), "images.index: is a name that every batch"),
        (lambda data: SequencePacker(8, tokens="text.n"), "tokens: found 'text.n', expected a list"),
        (lambda data: SequencePacker(8, pieces=3), "pieces: found int 3"),
        (lambda data: SequencePacker(8, bos_id="<s>"), "bos_id: found '<s>', expected an integer"),
        (lambda data: SequencePacker(8, eos_id=2**63), "eos_id: found 9223372036854775808, expected an integer"),
        (lambda data: SequencePacker(8, pad_id=None), "pad_id: found None, expected an integer"),
        (lambda data: SequencePacker(8, image_id=0.5), "image_id: found 0.5, expected an integer"),
        (lambda data: SequencePacker(8)([]), "collator: a SequencePacker plans whole epochs"),
        (lambda data: MultimodalLoader(data, ["text"], collator=packer()), "images.image: is not read: text"),
        (
            lambda data: MultimodalLoader(data, ["label"], collator=SequencePacker(8)),
            "tokens: no modality that is read",
        ),
        (
            lambda data: MultimodalLoader(data, collator=SequencePacker(8, tokens=["text.num_tokens"])),
            "pieces: is need",
        ),
        (
            lambda data: MultimodalLoader(data, collator=SequencePacker(8, list, tokens=["text.x"])),
            "no column 'text.x'",
        ),
        (
            lambda data: MultimodalLoader(data, collator=SequencePacker(8, list, tokens=["size_text"])),
            "no column 'size",
        ),
        (
            lambda data: MultimodalLoader(data, batch_size=Budget("size_text", 8), collator=packer()),
            "number of sequences",
        ),
    ],
)
def test_wrong_arguments_are_refused(documents: Dataset, make: Any, message: str) -> None:
    """Where they are given, with their names."""
    with pytest.raises(ConfigError, match=message):
        make(documents)
