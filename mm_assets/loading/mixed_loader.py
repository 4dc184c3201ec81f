"""What all mixes share: their sources, their state, and the check that a state is of the same recipe."""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import Any, Self, TypeGuard

from mm_assets.dataset.dataset import Dataset
from mm_assets.dataset.dataset import open as open_dataset
from mm_assets.errors import ConfigError, LoaderError
from mm_assets.loading.batches import BatchSource, DamagedSample
from mm_assets.loading.collate import MultimodalCollator
from mm_assets.loading.loader import BatchLoader, MultimodalLoader
from mm_assets.loading.order import MAX_SAMPLES, derive_key
from mm_assets.loading.recipe import Recipe, Source, resolve
from mm_assets.summaries import describe

__all__ = [
    "POSITION",
    "MixedLoader",
    "check_epoch",
    "check_outputs",
    "count_of",
    "is_loader",
    "leaf_epochs",
    "located",
    "open_source",
    "seed_of",
    "without_position",
]

VERSION = 2

MAX_DIFFERENCES_IN_MESSAGE = 5
MAX_TEXT = 100  # characters of a value in a message

POSITION = ("epoch", "delivered")
"""What a loader's state has of its position; the rest identifies the order."""

_SEED = 13  # place in the derivation of keys, which no other use shares: see `order`


class MixedLoader(BatchLoader):
    """Batches of several datasets, by weights or epochs; made by `mix`.

    An epoch of a mix is one pass over it. Each iteration yields its batches, after `load_state_dict` the rest of them.
    A batch that is a dict has an entry ``source``: with ``unit: batch`` the name of its source, with ``unit: sample`` a
    list with that of each row. ``index`` is the row's index in the dataset of its source. A source within a mix is
    named by its path, such as ``speech/en``.

    Attributes:
        digest: of the recipe and the fingerprints of its datasets, 64 hexadecimal digits: mixes of equal digests load
            each other's states.
    """

    _opened: ExitStack  # datasets that were opened here

    def __init__(self, recipe: Recipe, facts: Mapping[str, Mapping[str, Any]], **more: Any) -> None:
        self._recipe = recipe
        tree = _identity(recipe.root, facts)
        self._identity = {"unit": recipe.unit, "seed": recipe.seed, **more, "sources": tree["sources"]}
        self.digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        """The sources, sorted by name."""
        return tuple(leaf.name for leaf in self._recipe.leaves)

    @property
    @abstractmethod
    def datasets(self) -> dict[str, BatchSource]:
        """The datasets, or the views of them that the recipe says, by source."""

    @property
    @abstractmethod
    def damaged(self) -> dict[str, list[DamagedSample]]:
        """The first samples of each source that were left out because their bytes are damaged, by source."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, with the recipe and its digest, as plain values for a checkpoint."""
        return {"version": VERSION, "digest": self.digest, "recipe": self._identity, **self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position from `state_dict`, also one of other ranks and other batch sizes.

        Raises:
            LoaderError: it is of another recipe or of other datasets; the message says what differs, and nothing is
                moved.
        """
        if not isinstance(state, Mapping) or "recipe" not in state:
            raise LoaderError("this is not a mix's state: it has no recipe")
        if state.get("version") != VERSION:
            raise LoaderError(f"this state is of version {state.get('version')!r}, expected {VERSION}")
        if found := list(_differences(state["recipe"], self._identity)):
            more = len(found) - MAX_DIFFERENCES_IN_MESSAGE
            listed = "; ".join(found[:MAX_DIFFERENCES_IN_MESSAGE]) + (f"; and {more} more" if more > 0 else "")
            raise LoaderError(f"the state is of another mix: {listed}")
        self._load_position(state)

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """Returns the position as plain values."""

    @abstractmethod
    def _load_position(self, state: Mapping[str, Any]) -> None:
        """Goes to the position in a state of this recipe; `LoaderError`, and nothing is moved, if it is wrong."""

    @abstractmethod
    def _end(self) -> None:
        """Ends an iteration in progress."""

    def close(self) -> None:
        """Ends an iteration in progress and closes the datasets that were opened for the mix. Fine twice."""
        self._end()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- sources ----------------------------------------------------------------------------------------------------------


def is_loader(value: object) -> TypeGuard[MultimodalLoader]:
    """Whether a source is a loader, rather than a dataset or its path."""
    return isinstance(value, MultimodalLoader)


def open_source(leaf: Source, recipe: Recipe, stack: ExitStack) -> BatchSource:
    """Opens the dataset of a source, unless it is open, and takes the view that its options say."""
    options, dataset = leaf.options, leaf.dataset
    with located(recipe.where, leaf.key):
        if isinstance(dataset, str | list | os.PathLike):
            paths = [os.fspath(one) for one in ([dataset] if not isinstance(dataset, list) else dataset)]
            paths = [resolve(path, recipe.where) for path in paths]
            opening = {name: options[name] for name in ("format", "storage_options", "cache_dir") if name in options}
            if "cache_dir" in opening:
                opening["cache_dir"] = resolve(opening["cache_dir"], recipe.where)
            path = paths if isinstance(dataset, list) else paths[0]
            dataset = stack.enter_context(open_dataset(path, **opening))
        elif is_loader(dataset):
            raise ConfigError("arguments", "dataset", "found a loader, expected a dataset with unit: sample")
        if not {"split", "filter", "with_settings"} & options.keys():
            source: BatchSource = dataset  # one of the caller's own need only have the methods
            return source
        if not isinstance(dataset, Dataset):
            raise ConfigError("arguments", "dataset", f"found {describe(dataset)}, expected a Dataset to take views of")
    view = dataset
    if "split" in options:
        split = options["split"]
        with located(recipe.where, f"{leaf.key}.split"):
            parts = view.split(split["fractions"], seed=split.get("seed", 0))
        for part in parts.values():
            stack.enter_context(part)
        view = parts[split["part"]]
    if "filter" in options:
        with located(recipe.where, f"{leaf.key}.filter"):
            view = stack.enter_context(view.filter(options["filter"]))
    if "with_settings" in options:
        with located(recipe.where, f"{leaf.key}.with_settings"):
            view = stack.enter_context(view.with_settings(options["with_settings"]))
    return view


def check_epoch(epoch: int, length: int) -> None:
    """Raises `ConfigError` if the positions of an epoch of a mix are beyond what an int64 holds."""
    if (epoch + 1) * length > MAX_SAMPLES:
        detail = f"found {epoch}, expected one that ends before position 2**62: an epoch has {length:,} positions"
        raise ConfigError("arguments", "epoch", detail)


def check_outputs(loader: MultimodalLoader, where: str, key: str) -> None:
    """Raises `ConfigError` if batches would have an output with the name of the entry that a mix adds."""
    collator = loader.collator
    if isinstance(collator, MultimodalCollator) and "source" in (collator.outputs or loader.modalities):
        detail = (
            "has an output named source, as an entry of every batch of a mix: give it another name by a collator's rule"
        )
        raise ConfigError(where, key, detail)


def seed_of(leaf: Source, recipe: Recipe) -> int:
    """Returns the seed of a source's order; two sources of one dataset differ. 53 bits fit any JSON reader."""
    return derive_key(recipe.seed, _SEED, int.from_bytes(leaf.name.encode(), "little")) >> 11


def leaf_epochs(source: Source, factor: Fraction = Fraction(1)) -> Iterator[tuple[str, Fraction]]:
    """Yields the name of each dataset, and how often it is in an iteration if epochs decide that."""
    if not source.sources:
        yield source.name, factor
    for inner in source.sources:
        yield from leaf_epochs(inner, factor * (inner.epochs or 0))


@contextmanager
def located(where: str, key: str) -> Iterator[None]:
    """Names the place in the recipe in errors about the arguments that were made of it."""
    try:
        yield
    except ConfigError as error:
        if error.where == "environment":
            raise
        place = "" if error.where == "arguments" else f"{error.where}: "
        raise ConfigError(where, f"{key}.{error.key}", f"{place}{error.detail}") from error
    except KeyError as error:
        raise ConfigError(where, key, str(error.args[0])) from error


# --- state ------------------------------------------------------------------------------------------------------------


def without_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a loader's state says about its dataset and order."""
    return {key: value for key, value in state.items() if key != "version" and key not in POSITION}


def _identity(source: Source, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a source as plain values: its weight or epochs, and what identifies its datasets and their orders."""
    found: dict[str, Any] = {}
    if source.weight is not None:
        found["weight"] = source.weight.to_json()
    if source.epochs is not None:
        found["epochs"] = float(source.epochs)
    if source.sources:
        found["sources"] = {inner.name.rpartition("/")[2]: _identity(inner, facts) for inner in source.sources}
        return found
    return {**found, **facts[source.name]}


def _differences(found: Any, own: Any, path: str = "") -> Iterator[str]:
    """Yields what differs between a recipe in a state and this one, as text."""
    if not isinstance(found, Mapping) or not isinstance(own, Mapping):
        if found != own:
            yield f"its {path or 'recipe'} is {_text(found)}, here it is {_text(own)}"
        return
    prefix = f"{path}." if path else ""
    if found.get("fingerprint") != own.get("fingerprint") and "fingerprint" in found and "fingerprint" in own:
        yield f"its {path} is another dataset"
        return
    for key in dict.fromkeys([*own, *found]):
        if key not in found or key not in own:
            yield f"it has {'no ' if key in own else ''}{prefix}{key}, which {'is' if key in own else 'is not'} here"
        else:
            yield from _differences(found[key], own[key], f"{prefix}{key}")


def _text(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def count_of(state: Mapping[str, Any], key: str) -> int:
    """Returns an integer from 0 of a state; `LoaderError` if it is not one."""
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SAMPLES:
        raise LoaderError(f"this is not a mix's state: {key} is {describe(value)}, expected an integer from 0 to 2**62")
    return value
