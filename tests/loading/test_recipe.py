"""Recipes: files and mappings that say how datasets are mixed, and what is refused in them."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import Dataset, MixedLoader, MultimodalCollator, mix
from mm_assets.errors import ConfigError, FormatError, LoaderError, SourceError
from mm_assets.fields import NDArrayField, ScalarField, TextField
from mm_assets.loading.recipe import KEYS, MAX_BYTES, MIX_KEYS, OPTION_KEYS, SOURCE_KEYS, parse_recipe

SIZES = {"a": 20, "b": 7, "c": 31, "none": 0}
FIELDS = {"text": TextField(), "number": ScalarField("int32"), "state": NDArrayField("float32", (3,))}

RECIPE = """
unit: sample
seed: 3
num_samples: 120
defaults:
  batch_size: 10
  modalities: [text, number]
sources:
  first:
    dataset: data/a.mult
    weight: [[0, 1.0], [60, 0.0]]
    filter: number.value < 10
  both:
    weight: {linear: [[0, 1], [100, 2]]}
    defaults: {shuffle: {size: 4, window: 2}}
    sources:
      b: {dataset: data/b.mult, weight: 2}
      c: {dataset: [data/c.mult], split: {fractions: {train: 0.5, val: 0.5}, part: train, seed: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "data").mkdir()
    for name, size in SIZES.items():
        with mm_assets.create(folder / "data" / f"{name}.mult", FIELDS, fsync=False) as writer:
            for i in range(size):
                text = None if i % 5 == 4 else f"{name}{i}"
                writer.write(f"{name}-{i}", {"text": text, "number": i, "state": np.full(3, i, np.float32)})
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> Iterator[dict[str, Dataset]]:
    datasets = {name: mm_assets.open(folder / "data" / f"{name}.mult") for name in SIZES}
    yield datasets
    for dataset in datasets.values():
        dataset.close()


def rows(batches: Any) -> list[tuple[str, int]]:
    """The source and the index of each valid row of batches of samples."""
    return [
        (source, index)
        for batch in batches
        for source, index, is_valid in zip(
            batch["source"], batch["index"].tolist(), batch["valid"].tolist(), strict=True
        )
        if is_valid
    ]


def test_a_file_is_read_with_paths_relative_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder, the datasets beside the file are opened, with the views that it names."""
    monkeypatch.chdir("/")
    with mix(folder / "recipe.yaml") as mixed:
        assert mixed.names == ("both/b", "both/c", "first")
        assert len(mixed) == 12
        batches = list(mixed)
        assert set(batches[0]) >= {"text", "number", "present", "valid", "source", "index"} - {"state"}
        assert "state" not in batches[0]
        found = rows(batches)
        assert {source for source, _ in found[:60]} == set(mixed.names)
        assert "first" not in [source for source, _ in found[64:]]
        assert max(index for source, index in found if source == "first") < 10
        by_json = folder / "recipe.json"
        by_json.write_text(json.dumps(yaml.safe_load(RECIPE)))
        with mix(by_json) as other:
            assert other.digest == mixed.digest
            assert rows(other) == found
            other.load_state_dict(mixed.state_dict())
        with mix(folder / "recipe.yaml", seed=4, batch_size=40) as other:
            assert len(other) == 3
            assert rows(other) != found


def test_rows_are_the_samples_that_they_name(data: dict[str, Dataset]) -> None:
    """In a batch of several sources each row has the values of its own sample, absent ones too, in every output."""
    recipe = {"unit": "sample", "sources": {name: {"dataset": data[name], "epochs": 1} for name in "abc"}}
    rules = {"text": {}, "number": {"stack": True}, "state": {"stack": True}}
    for collator in (None, MultimodalCollator(rules)):
        seen = []
        for batch in mix(recipe, batch_size=9, collator=collator):
            for row, (source, index) in enumerate(zip(batch["source"], batch["index"].tolist(), strict=True)):
                sample = data[source][index]
                assert batch["text"][row] == sample["text"]
                assert batch["number"][row] == sample["number"]
                assert (batch["state"][row] == sample["state"]).all()
                assert batch["present"]["text"][row] == (sample["text"] is not None)
                seen.append((source, index))
        assert sorted(seen) == sorted((name, i) for name in "abc" for i in range(SIZES[name]))
    names = mix(recipe, modalities=["number"], batch_size=9)
    assert set(next(iter(names))) == {"number", "present", "valid", "source", "index"}


def test_modalities_of_different_shapes_come_as_lists(data: dict[str, Dataset], tmp_path: Path) -> None:
    """What is an array in one dataset and of another shape in the next one is a list in every batch."""
    with mm_assets.create(tmp_path / "d.mult", {"state": NDArrayField("float32", (2,))}, fsync=False) as writer:
        for i in range(6):
            writer.write(str(i), {"state": np.full(2, i, np.float32)})
    with mm_assets.open(tmp_path / "d.mult") as other:
        sources = {"a": (data["a"], 3), "d": (other, 1)}
        for batch in mix({"unit": "sample", "sources": sources}, modalities=["state"], batch_size=2):
            shapes = [value.shape for value in batch["state"]]
            assert shapes == [{"a": (3,), "d": (2,)}[source] for source in batch["source"]]
        with pytest.raises(ConfigError, match=r"sources\.d\.dataset: has the modalities state, and 'a' has text"):
            mix({"unit": "sample", "sources": sources})


def test_an_output_may_not_hide_the_source(tmp_path: Path) -> None:
    """A modality with the name of the entry that a mix adds needs another output."""
    with mm_assets.create(tmp_path / "s.mult", {"source": TextField()}, fsync=False) as writer:
        writer.write("0", {"source": "a book"})
    with mm_assets.open(tmp_path / "s.mult") as dataset:
        for unit in ("batch", "sample"):
            recipe = {"unit": unit, "sources": {"s": (dataset, 1)}}
            with pytest.raises(ConfigError, match="has an output named source"):
                mix(recipe)
            (batch,) = mix(recipe, collator=MultimodalCollator({"origin": {"source": "source"}}))
            assert (batch["origin"], batch["source"]) == (["a book"], "s" if unit == "batch" else ["s"])


def test_a_transform_draws_for_each_time_a_sample_is_seen(data: dict[str, Dataset]) -> None:
    """A source that is seen three times in an iteration has three draws for each sample."""

    def draw(number: Any, rng: np.random.Generator) -> Any:
        return np.array([number, rng.random()])

    recipe = {"unit": "sample", "sources": {"b": {"dataset": data["b"], "epochs": 3}}}
    values = [tuple(v) for batch in mix(recipe, transforms={"number": draw}, batch_size=7) for v in batch["number"]]
    assert len(values) == len(set(values)) == 21


@pytest.mark.parametrize("unit", ["batch", "sample"])
def test_fractions_of_epochs_go_on_in_the_next_iteration(data: dict[str, Dataset], unit: str) -> None:
    """Half an epoch of each of two iterations is one epoch; others are seen twice in each, an empty one never."""
    amounts = {"a": 0.5, "b": 2, "none": 1, "c": 0}
    sources = {name: {"dataset": data[name], "epochs": amount} for name, amount in amounts.items()}
    mixed = mix({"unit": unit, "sources": sources}, batch_size=2)
    found: list[list[tuple[str, int]]] = []
    for _ in range(2):
        batches = list(mixed)
        assert len(batches) == len(mixed)
        for batch in batches if unit == "batch" else ():
            batch["source"] = [batch["source"]] * len(batch["valid"])
        found.append(rows(batches))
    both = found[0] + found[1]
    assert sorted(index for source, index in both if source == "a") == list(range(20))
    assert all(sum(source == "a" for source, _ in one) == 10 for one in found)
    assert all(sorted(i for s, i in one if s == "b") == sorted([*range(7)] * 2) for one in found)
    assert {source for source, _ in both} == {"a", "b"}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=4),
    st.booleans(),
)
def test_ranks_and_batches_do_not_change_a_mix_of_samples(
    data: dict[str, Dataset], runs: list[tuple[int, int, int]], by_epochs: bool
) -> None:
    """Stopped at any batches and resumed by other ranks with other batch sizes, the samples are those of one rank."""
    if by_epochs:
        sources: Any = {name: {"dataset": data[name], "epochs": 1} for name in "abc"}
    else:
        sources = {
            "a": (data["a"], [[0, 1], [40, 0]]),
            "b": (data["b"], {"linear": [[0, 0], [30, 2]]}),
            "c": (data["c"], 1),
        }
    recipe = {"unit": "sample", "seed": 5, "sources": sources}

    def make(batch_size: int, rank: int, world_size: int) -> MixedLoader:
        options = {"rank": rank, "world_size": world_size, "num_workers": 0, "modalities": ["number"]}
        return mix(recipe, batch_size=batch_size, **options)

    expected = rows(make(4, 0, 1))
    found: list[tuple[str, int]] = []
    state: Any = None
    for world_size, batch_size, stop in [*runs, (1, 7, 1000)]:
        steps: list[list[Any]] = []
        for rank in range(world_size):
            loader = make(batch_size, rank, world_size)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            steps.append(list(islice(loader, stop)))
        state = loader.state_dict()
        found += [row for together in zip(*steps, strict=True) for row in rows(together)]
        if len(found) >= len(expected):
            break
    assert found == expected


def test_a_damaged_sample_is_skipped_and_named(data: dict[str, Dataset], tmp_path: Path) -> None:
    """With ``on_damaged: skip`` another sample replaces it, and the mix lists it with its source."""
    path = tmp_path / "damaged.mult"
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        for i in range(6):
            writer.write(str(i), {"text": f"unusual {i}", "number": i, "state": np.zeros(3, np.float32)})
    path.write_bytes(path.read_bytes().replace(b"unusual 4", b"unUsual 4"))
    with mm_assets.open(path) as damaged:
        recipe = {"sources": {"a": {"dataset": data["a"], "epochs": 1}, "d": {"dataset": damaged, "epochs": 1}}}
        for unit in ("batch", "sample"):
            mixed = mix({**recipe, "unit": unit}, batch_size=4, on_damaged="skip", num_workers=0)
            assert sum(int(batch["valid"].sum()) for batch in mixed) == 25
            assert {name: [one.index for one in ones] for name, ones in mixed.damaged.items()} == {"a": [], "d": [4]}
            with pytest.raises(FormatError, match="sample 4"):
                list(mix({**recipe, "unit": unit}, batch_size=4))

        def fail(text: str) -> str:
            raise RuntimeError("fails")

        mixed = mix({"unit": "sample", "sources": {"d": (damaged, 1)}}, transforms={"number": fail}, batch_size=1)
        with pytest.raises(RuntimeError) as raised:
            list(mixed)
        assert any("of 'd'" in note for note in raised.value.__notes__)


WRONG: list[tuple[str, str]] = [
    ("unit: samples\nsources: {}", "unit: found 'samples', expected one of batch, sample; did you mean sample?"),
    ("seeds: 1\nsources: {}", "seeds: is not a key; allowed here: .*; did you mean seed"),
    ("seed: x\nsources: {}", "seed: found 'x', expected an integer"),
    ("- a", "recipe: found list of length 1, expected keys and values"),
    ("", "recipe: found nothing, expected keys and values"),
    ("a: [", "recipe: is not YAML: "),
    ("sources: {a: {dataset: x}, a: {dataset: y}}", "recipe: is not YAML: found the key 'a' twice in one mapping"),
    ("sources: {}", "sources: found no sources, expected at least one"),
    ("sources: {a/b: {dataset: x}}", "sources: found the name 'a/b', expected text without a slash"),
    ("sources: {1: {dataset: x}}", "sources: found the name int 1, expected text"),
    ("sources: {a: x.mult}", r"sources\.a: found 'x.mult', expected a dataset or sources, and a weight or epochs"),
    ("sources: {a: {weight: 1}}", r"sources\.a: has neither dataset nor sources, expected one of them"),
    ("sources: {a: {dataset: x, sources: {}}}", r"sources\.a: has both dataset and sources"),
    ("sources: {a: {dataset: 3}}", r"sources\.a\.dataset: found int 3, expected a path"),
    ("sources: {a: {dataset: []}}", r"sources\.a\.dataset: found list of length 0, expected a path"),
    ("sources: {a: {dataset: x, wieght: 1}}", r"sources\.a\.wieght: is not a key; .*; did you mean weight"),
    (
        "sources: {a: {dataset: x, weight: 1e-3}}",
        r"weight: found '1e-3', expected a number from 0 to 1e\+18; .* 1\.0e-3",
    ),
    ("sources: {a: {dataset: x, weight: -1}}", r"sources\.a\.weight: found int -1, expected a number from 0"),
    (f"sources: {{a: {{dataset: x, weight: 0x{'f' * 5000}}}}}", "weight: found an integer of 20,000 bits, expected"),
    (f"seed: 0x{'f' * 5000}\nsources: {{}}", "seed: found an integer of 20,000 bits, expected"),
    ("sources: {a: {dataset: x, weight: [[0, 1], [0xffffffffffffffff, 2]]}}", r"weight\[1\]: found .* to 2\*\*62"),
    ("sources: {a: {dataset: x, weight: []}}", r"a\.weight: found list of length 0, expected a list of \[position"),
    ("sources: {a: {dataset: x, weight: [1]}}", r"sources\.a\.weight\[0\]: found int 1, expected a list of"),
    ("sources: {a: {dataset: x, weight: [[5, 1]]}}", r"a\.weight\[0\]: found position 5, expected 0"),
    ("sources: {a: {dataset: x, weight: [[0, 1], [0, 2]]}}", r"a\.weight\[1\]: found position 0, expected one after 0"),
    ("sources: {a: {dataset: x, weight: {linaer: []}}}", r"weight\.linaer: is not a key; .*; did you mean linear"),
    ("sources: {a: {dataset: x, weight: {linear: 3}}}", r"weight\.linear: found int 3, expected a list"),
    ("sources: {a: {dataset: x, weight: 1, epochs: 1}}", r"a\.weight: found epochs too, expected one of them"),
    ("sources: {a: {dataset: x, epochs: 1}, b: {dataset: x}}", r"sources\.b: has a weight, and sources\.a has epochs"),
    (
        "sources: {a: {epochs: 1, sources: {b: {dataset: x}}}}",
        r"sources\.a\.epochs: goes with sources that have epochs",
    ),
    ("num_batches: 3\nsources: {a: {dataset: x, epochs: 1}}", "num_batches: does not go with epochs"),
    ("num_samples: 3\nsources: {a: {dataset: x}}", "num_samples: does not go with unit: batch; expected num_batches"),
    ("num_batches: 0\nsources: {a: {dataset: x}}", "num_batches: found int 0, expected an integer from 1"),
    ("defaults: {batch_sizes: 1}\nsources: {}", r"defaults\.batch_sizes: is not a key; .*; did you mean batch_size"),
    ("defaults: {shuffle: 1}\nsources: {}", r"defaults\.shuffle: found int 1, expected true, false, or a mapping"),
    (
        "defaults: {shuffle: {size: 0}}\nsources: {}",
        r"defaults\.shuffle\.size: found int 0, expected an integer from 1",
    ),
    ("sources: {a: {dataset: x, split: {part: t}}}", r"a\.split\.fractions: found nothing, expected shares by name"),
    (
        "sources: {a: {dataset: x, split: {part: trian, fractions: {train: 1}}}}",
        r"a\.split\.part: found 'trian', expected one of train; did you mean train",
    ),
    ("sources: {a: {sources: {b: {dataset: x}}, shuffle: true}}", r"a\.shuffle: belongs to the defaults of a mix"),
    ("unit: sample\nsources: {a: {dataset: x, batch_size: 3}}", r"a\.batch_size: belongs to the recipe's own defaults"),
    ("sources: {a: {dataset: data/a.mult, batch_size: 0}}", r"sources\.a\.batch_size: found 0, expected an integer"),
    ("sources: {a: {dataset: data/a.mult, modalities: [x]}}", r"sources\.a: no modality 'x'"),
    ("sources: {a: {dataset: data/a.mult, filter: foo}}", r"sources\.a\.filter\.sql: Binder Error"),
    (
        "sources: {a: {dataset: data/a.mult, with_settings: {text: {x: 1}}}}",
        r"a\.with_settings\.text\.x: .*data/a.mult: found 'x'",
    ),
    ("sources: {a: {dataset: data/none.mult}}", "sources: found no source that has batches"),
    ("unit: sample\nsources: {a: {dataset: data/none.mult, epochs: 1}}", "sources: found no samples in any"),
    ("unit: sample\ndefaults: {batch_size: x}\nsources: {a: {dataset: data/a.mult}}", r"defaults\.batch_size: found"),
    (
        "defaults: {batch_size: {column: size_text}}\nsources: {}",
        r"defaults\.batch_size\.total: is missing, and a Budget",
    ),
    ("defaults: {batch_size: {total: 9}}\nsources: {}", r"defaults\.batch_size\.column: is missing"),
    (
        "sources: {a: {dataset: x, batch_size: {column: y, total: 9, buckets: 3}}}",
        r"sources\.a\.batch_size\.buckets: is not a key; allowed here: column, total, bucket; did you mean bucket",
    ),
    (
        "sources: {a: {dataset: x, batch_size: {column: y, total: 0}}}",
        r"sources\.a\.batch_size\.total: found 0, expected an integer from 1",
    ),
    (
        "sources: {a: {dataset: data/a.mult, batch_size: {column: y, total: 9}}}",
        r"sources\.a\.batch_size: no column of numbers 'y', there are",
    ),
    ("sources: {a: {dataset: x, window: 2}}", r"sources\.a\.window: found int 2, expected a mapping with seconds"),
    ("sources: {a: {dataset: x, window: {frames: 2}}}", r"sources\.a\.window\.seconds: is missing, and a Window needs"),
    ("sources: {a: {dataset: x, window: {seconds: -1}}}", r"sources\.a\.window\.seconds: found -1, expected seconds"),
    ("sources: {a: {dataset: x, window: {seconds: 1, frames: 0}}}", r"a\.window\.frames: found 0, expected an integer"),
    (
        "unit: sample\ndefaults: {batch_size: {column: size_text, total: 9}}\nsources: {a: {dataset: data/a.mult}}",
        "unit: found sample and a Budget, .*: expected batch, with which each batch is of one source",
    ),
    ("unit: sample\ndefaults: {last: x}\nsources: {a: {dataset: data/a.mult}}", r"defaults\.last: found 'x'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_wrong_recipes_are_refused(folder: Path, text: str, message: str) -> None:
    """The error names the file, the key, what was found and what was expected, and what may be meant."""
    path = folder / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        mix(path)
    assert raised.value.where == str(path)


def test_unusual_files_are_refused(folder: Path) -> None:
    """A missing file, a large one, bytes that are not text, JSON that is none, and mixes without end raise at once."""
    with pytest.raises(SourceError, match="missing"):
        mix(folder / "missing.yaml")
    path = folder / "odd.yaml"
    path.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="expected at most"):
        mix(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="is not YAML"):
        mix(path)
    path.with_suffix(".json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        mix(path.with_suffix(".json"))
    path.with_suffix(".json").write_text('{"sources": {"a": {"weight": 1, "weight": 2}}}')
    with pytest.raises(ConfigError, match="found the key 'weight' twice"):
        mix(path.with_suffix(".json"))
    path.write_text("sources: &all\n  a: {sources: *all}\n")
    with pytest.raises(ConfigError, match="is nested more than 16 mixes deep"):
        mix(path)
    levels = [f"l{n}: &l{n} {{{', '.join(f's{i}: {{sources: *l{n - 1}}}' for i in range(9))}}}" for n in range(1, 9)]
    path.write_text("\n".join(["l0: &l0 {a: {dataset: x}}", *levels, "sources: *l8"]))
    with pytest.raises(ConfigError, match=r"l0: is not a key"):
        mix(path)
    sources = yaml.safe_load(path.read_text())["sources"]
    with pytest.raises(ConfigError, match="found more than 10,000 datasets"):
        parse_recipe({"sources": sources})
    with pytest.raises(ConfigError, match="arguments: recipe: found int 3"):
        mix(3)  # type: ignore[arg-type]  # what is tested


def test_a_dataset_that_is_missing_is_named(folder: Path) -> None:
    """The error of opening a dataset is its own, with the path that was resolved."""
    (folder / "gone.yaml").write_text("sources: {a: {dataset: data/gone.mult}}")
    with pytest.raises((OSError, SourceError), match=r"gone\.mult"):
        mix(folder / "gone.yaml")


def test_a_state_of_samples_is_of_its_recipe(data: dict[str, Dataset]) -> None:
    """Another length, schedule, order or view of a dataset is refused with what differs, and nothing is moved."""

    def make(weight: Any = 1, dataset: Any = None, **more: Any) -> MixedLoader:
        sources = {"a": {"dataset": dataset or data["a"], "weight": weight}, "b": {"dataset": data["b"]}}
        return mix({"unit": "sample", "sources": sources, **more}, batch_size=4)

    mixed = make()
    list(islice(mixed, 2))
    own = mixed.state_dict()
    others = [
        (make(num_samples=30), r"its num_samples is 30, here it is 27"),
        (make([[0, 1], [9, 0]]), r"its sources\.a\.weight is \[\[0, 1\.0\], \[9, 0\.0\]\], here it is 1\.0$"),
        (make({"linear": [[0, 1], [9, 0]]}), r"weight is \{\"linear\""),
        (make(defaults={"shuffle": False}), r"its sources\.a\.shuffle is false, here it is true"),
        (make(dataset=data["a"].select(range(20)[::-1])), r"its sources\.a is another dataset$"),
    ]
    for other, message in others:
        with pytest.raises(LoaderError, match=message):
            mixed.load_state_dict(other.state_dict())
        assert mixed.state_dict() == own
    for wrong in ({**own, "delivered": 28}, {**own, "epoch": None}, {**own, "delivered": "1"}, {**own, "epoch": 2**60}):
        with pytest.raises(LoaderError, match=r"not a (loader|mix)'s state"):
            mixed.load_state_dict(wrong)
        assert mixed.state_dict() == own
    assert {"version", "digest", "recipe", "epoch", "delivered"} == set(own)


def test_every_key_is_documented() -> None:
    """Each key of a recipe is in the tables of the page."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "spec" / "loading.md").read_text(encoding="utf-8")
    part = page.split("## Mixing datasets")[1].split("\n## ")[0]
    assert [key for key in {*KEYS, *SOURCE_KEYS, *MIX_KEYS, *OPTION_KEYS} if f"`{key}`" not in part] == []
