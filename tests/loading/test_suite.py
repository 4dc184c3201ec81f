"""Loaders keep the promises of the suite for loaders, with a collator, transforms and ranks of each kind."""

from typing import Any

import numpy as np
import pytest

from mm_assets import Blocks, Dataset, MultimodalCollator, MultimodalLoader
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
