"""Loaders keep the promises of the suite for loaders, with a collator, transforms and ranks of each kind."""

from typing import Any

import numpy as np
import pytest

from mm_assets import Blocks, Dataset, MultimodalCollator, MultimodalLoader, mix
from mm_assets.testing import LoaderSuite


class TestDefaults(LoaderSuite):
    """A loader of everything, with its defaults."""

    @pytest.fixture(autouse=True)
    def _data(self, data: Dataset) -> None:
        self.data = data

    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        return MultimodalLoader(
            self.data, batch_size=6, seed=seed, num_workers=num_workers, rank=rank, world_size=world_size
        )


class TestTransforms(TestDefaults):
    """A loader with blocks, random transforms and a collator."""

    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        def add_noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
            return {"state": sample["state"] + rng.normal(size=3), "tokens": sample["tokens"]}

        return MultimodalLoader(
            self.data,
            batch_size=4,
            shuffle=Blocks(5, 3),
            num_workers=num_workers,
            collator=MultimodalCollator({"state": {"stack": True}, "tokens": {"pad_value": -1}}),
            seed=seed,
            rank=rank,
            world_size=world_size,
            prefetch=3,
            transform=add_noise,
        )


class TestMixOfBatches(LoaderSuite):
    """A mix of batches in which each source is seen once, one of them a mix itself."""

    unit = "batch"

    @pytest.fixture(autouse=True)
    def _data(self, data: Dataset) -> None:
        self.data = data

    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        def add_noise(state: Any, rng: np.random.Generator) -> Any:
            return state + rng.normal(size=3)

        first, second, third = (
            {"dataset": self.data.select(range(start, stop)), "epochs": 1}
            for start, stop in ((0, 23), (23, 30), (30, 53))
        )
        sources = {"a": first, "b": {"sources": {"x": second, "y": third}, "epochs": 1}}
        options: dict[str, Any] = {"num_workers": num_workers, "rank": rank, "world_size": world_size}
        return mix(
            {"unit": self.unit, "sources": sources}, seed=seed, batch_size=6, transforms={"state": add_noise}, **options
        )

    def samples(self, batch: Any) -> Any:
        sources = [batch["source"]] * len(batch["index"]) if self.unit == "batch" else batch["source"]
        rows = zip(sources, batch["index"].tolist(), batch["valid"].tolist(), strict=True)
        return [(source, index) for source, index, is_valid in rows if is_valid]


class TestMixOfSamples(TestMixOfBatches):
    """The same as a mix of samples."""

    unit = "sample"
