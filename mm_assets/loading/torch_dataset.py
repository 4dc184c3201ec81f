"""A loader as torch's `IterableDataset`. Only `BatchLoader.torch` imports this, and with it torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from mm_assets.errors import LoaderError
from mm_assets.loading.plan import torch_worker

__all__ = ["TorchDataset"]


class TorchDataset(IterableDataset):  # type: ignore[misc]  # torch is untyped where it is not installed
    """The batches of a loader, shared by the workers of a DataLoader.

    Args:
        loader: a loader of a dataset, or a mix, which this dataset moves; in a worker, the worker's copy of it.
    """

    def __init__(self, loader: Any) -> None:  # a `BatchLoader`, whose module imports this one
        super().__init__()
        self._loader = loader
        self._epoch = torch.full((), loader.epoch).share_memory_()  # workers that persist see `set_epoch` too
        self._seen_epoch = loader.epoch
        self._start: Mapping[str, Any] = loader.state_dict()  # of the iteration
        self._num_batches = 0  # that this worker has yielded since
        self._is_loaded = False  # whether the next iteration is the rest of a loaded one

    def __len__(self) -> int:
        """Batches of this rank in the whole epoch, of all workers together."""
        count: int = self._loader.count_batches(int(self._epoch))
        return count

    def __iter__(self) -> Iterator[Any]:
        if self._seen_epoch != (epoch := int(self._epoch)):
            self._seen_epoch = epoch
            self._loader.set_epoch(epoch)
            self._is_loaded = False
        if not self._is_loaded:
            self._num_batches = 0
        self._is_loaded = False
        batches = self._loader.iterate_from(self._num_batches)
        self._start = self._loader.state_dict()
        for batch in batches:
            self._num_batches += 1
            yield batch
        self._num_batches = 0
        self._start = self._loader.state_dict()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, in all workers, from their next iteration on."""
        self._epoch.fill_(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker, as plain values."""
        return {"loader": dict(self._start), "num_batches": self._num_batches, "num_workers": torch_worker()[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position of the same worker.

        Raises:
            LoaderError: it is of another dataset or order, or of another number of workers.
        """
        if not isinstance(state, Mapping) or not {"loader", "num_batches", "num_workers"} <= state.keys():
            raise LoaderError("this is not the state of a torch dataset: expected loader, num_batches and num_workers")
        if state["num_workers"] != torch_worker()[1]:
            detail = f"the state is of one of {state['num_workers']} workers, and here are {torch_worker()[1]}"
            raise LoaderError(f"{detail}: the loader's own `state_dict` resumes with any number")
        self._loader.load_state_dict(state["loader"])
        self._seen_epoch = int(self._epoch.fill_(self._loader.epoch))
        self._start, self._num_batches = dict(state["loader"]), int(state["num_batches"])
        self._is_loaded = True
