"""A mixed epoch of packed sequences, windows and budgets, stopped and resumed a hundred times on other ranks."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

import mm_assets
from mm_assets import Budget, Dataset, MultimodalCollator, MultimodalLoader, SequencePacker, Window, mix
from mm_assets.fields import Audio, AudioField, ImageField, TokensField
from mm_assets.testing.loaders import plain

NUM_STOPS = 100
NUM_SAMPLES = 500
RATE = 8000  # Hz


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Documents of at most 40 tokens, half of them with an image."""
    fields = {"image": ImageField(encoding="png", size=(4, 5), channels=3), "input_ids": TokensField()}
    path = tmp_path_factory.mktemp("chaos") / "documents.mult"
    with mm_assets.create(path, fields, fsync=False) as writer:
        for i in range(NUM_SAMPLES):
            image = np.full((4, 5, 3), i % 256, np.uint8) if i % 2 else None
            writer.write(str(i), {"image": image, "input_ids": np.arange(i, i + 1 + i * 7 % 40)})
    with mm_assets.open(path) as data:
        yield data


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    """Recordings of 0.1 to 0.5 seconds."""
    path = tmp_path_factory.mktemp("chaos") / "recordings.mult"
    with mm_assets.create(path, {"audio": AudioField(encoding="pcm16")}, fsync=False) as writer:
        for i in range(NUM_SAMPLES):
            samples = np.arange(800 + i * 61 % 3200)[:, None] + i
            writer.write(str(i), {"audio": Audio(samples.astype(np.int16), RATE)})
    with mm_assets.open(path) as data:
        yield data


class Run:
    """An epoch of three sources, from which loaders are made for any rank.

    A batch is a sequence, a window or a group of recordings of similar length on any number of ranks.
    """

    def __init__(self, documents: Dataset, recordings: Dataset) -> None:
        self.documents = documents
        self.recordings = recordings.with_settings({"audio": {"decode_rate": RATE, "decode_channels": 1}})

    def make(self, rank: int, world_size: int, num_workers: int = 0) -> Any:
        """Returns the mix, as one of several ranks."""

        def add_noise(audio: Audio, rng: np.random.Generator) -> Any:
            return audio.samples[:, 0] + rng.normal(size=len(audio.samples)).astype(np.float32)

        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "num_workers": num_workers}
        packer = SequencePacker(64, images={"image": 4}, eos_id=0, bucket=128)
        pad = MultimodalCollator({"audio": {"type": "pad"}})
        loaders = {
            "packed": MultimodalLoader(self.documents, batch_size=1, collator=packer, **options),
            "windows": MultimodalLoader(self.recordings, batch_size=1, window=Window(seconds=0.2), **options),
            "budget": MultimodalLoader(
                self.recordings,
                batch_size=Budget("audio.num_frames", 9000, bucket=64),
                collator=pad,
                transforms={"audio": add_noise},
                **options,
            ),
        }
        sources = {name: {"dataset": loader, "epochs": 1} for name, loader in loaders.items()}
        return mix({"seed": 3, "sources": sources})

    def deliver(self, recipe: np.random.Generator) -> Iterator[Any]:
        """Yields the batches of all ranks, stopped at random positions and resumed on a random number of ranks."""
        state = None
        for stop in range(NUM_STOPS + 1):
            world_size, num_workers = int(recipe.integers(1, 5)), int(recipe.integers(0, 3))
            num_batches = int(recipe.integers(0, 5)) if stop < NUM_STOPS else None
            states = set()
            for rank in range(world_size):
                loader = self.make(rank, world_size, num_workers)
                if state is not None:
                    loader.load_state_dict(json.loads(state))
                with iter(loader) as batches:
                    yield from islice(batches, num_batches)
                assert (loader.epoch == 1) == (stop == NUM_STOPS)
                states.add(json.dumps(loader.state_dict()))
            (state,) = states


def without_repeats(batches: list[Any]) -> Counter[str]:
    """Counts the batches by their content, except those that repeat another one to even out ranks."""
    return Counter(repr(plain(batch)) for batch in batches if batch["valid"].all())


@pytest.mark.slow
def test_a_hundred_stops_change_nothing(documents: Dataset, recordings: Dataset) -> None:
    """Stopped a hundred times and resumed on other ranks, an epoch has every sequence, window and group once.

    Their bytes are those of the uninterrupted run, and the same stops give the same bytes in the same order.
    """
    run = Run(documents, recordings)
    whole = list(run.make(0, 1))
    expected = without_repeats(whole)
    assert set(expected.values()) == {1}
    assert len(expected) == len(whole)
    indices = [(batch["source"], index) for batch in whole for index in batch["index"].tolist()]
    assert Counter(indices) == {(name, i): 1 for name in ("packed", "windows", "budget") for i in range(NUM_SAMPLES)}
    stopped = list(run.deliver(np.random.default_rng(5)))
    assert without_repeats(stopped) == expected
    assert list(map(plain, run.deliver(np.random.default_rng(5)))) == list(map(plain, stopped))
