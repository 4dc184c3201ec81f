"""Recipes of mixes, parsed from a file or a mapping into values that are checked. Nothing here opens a dataset.

A recipe is a tree: a source is a dataset, or a mix of further sources. What is wrong raises a `ConfigError` with the
file, the key, what was found, and what was expected.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from mm_assets.errors import ConfigError, meant, optional_import
from mm_assets.loading.budget import Budget
from mm_assets.loading.order import MAX_SAMPLES, Blocks
from mm_assets.loading.windows import Window
from mm_assets.storage.files import SourceFile
from mm_assets.storage.urls import is_local, local_path
from mm_assets.summaries import describe

__all__ = [
    "KEYS",
    "LOADER_KEYS",
    "OPTION_KEYS",
    "Recipe",
    "Schedule",
    "Source",
    "parse_recipe",
    "read_recipe",
    "resolve",
]

UNITS = ("batch", "sample")
KEYS = ("unit", "seed", "num_batches", "num_samples", "defaults", "sources")
SOURCE_KEYS = ("dataset", "weight", "epochs")
MIX_KEYS = ("sources", "weight", "epochs", "defaults")
DATASET_KEYS = ("format", "storage_options", "cache_dir", "filter", "split", "with_settings", "shuffle")
LOADER_KEYS = ("modalities", "batch_size", "window", "last", "num_workers", "prefetch", "on_damaged")
OPTION_KEYS = (*DATASET_KEYS, *LOADER_KEYS)

MAX_WEIGHT = 1e18
MAX_TEXT = 80  # characters of a text in a message
MAX_BYTES = 8 << 20  # of a file: parsing as much YAML takes seconds
MAX_DEPTH = 16  # mixes within each other
MAX_SOURCES = 10_000  # datasets: a few lines of YAML with aliases can stand for billions


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A weight as a function of the position in the mix.

    Attributes:
        points: positions, from 0 and ascending, and the weight at each of them.
        is_linear: whether the weight changes linearly between two points; else it is constant up to the next one. After
            the last point it is constant.
    """

    points: tuple[tuple[int, Fraction], ...]
    is_linear: bool = False

    def at(self, position: int, *, before: bool = False) -> Fraction:
        """Returns the weight at a position; with `before`, the limit from below."""
        number = bisect_right(self.points, position - before, key=lambda point: point[0]) - 1
        start, weight = self.points[number]
        if not self.is_linear or number + 1 == len(self.points):
            return weight
        stop, next_weight = self.points[number + 1]
        return weight + (next_weight - weight) * Fraction(position - start, stop - start)

    def to_json(self) -> Any:
        """Returns the schedule as a recipe has it."""
        points = [[position, float(weight)] for position, weight in self.points]
        if len(points) == 1:
            return points[0][1]
        return {"linear": points} if self.is_linear else points


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A dataset of a recipe, or a mix of sources within it.

    Attributes:
        name: path in the tree, such as ``speech/en``.
        key: where it is in the recipe, for messages.
        weight: its share among the sources beside it, relative to theirs; None if `epochs` decides.
        epochs: how often each of its samples is in an iteration over the mix; None if `weight` decides.
        dataset: path or paths, an open dataset, or a loader; None for a mix.
        options: how the dataset is opened and loaded, with the defaults.
        sources: of a mix, sorted by name.
    """

    name: str
    key: str
    weight: Schedule | None
    epochs: Fraction | None
    dataset: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()

    def leaves(self) -> Iterator[Source]:
        """Yields the datasets below it, or itself."""
        if not self.sources:
            yield self
        for source in self.sources:
            yield from source.leaves()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe that was parsed.

    Attributes:
        where: the file, or "arguments", for messages.
        unit: ``batch`` or ``sample``.
        seed: of the mix.
        length: batches or samples of an iteration; None if it follows from the sources.
        options: of loaders, for all sources.
        root: the mix of all sources.
    """

    where: str
    unit: str
    seed: int
    length: int | None
    options: Mapping[str, Any]
    root: Source

    @property
    def leaves(self) -> tuple[Source, ...]:
        """The datasets, sorted by name."""
        return tuple(self.root.leaves())

    @property
    def counts_epochs(self) -> bool:
        """Whether epochs, rather than weights, decide how often each source is seen."""
        return all(source.epochs is not None for source in self.root.sources)


def read_recipe(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Any:
    """Returns the content of a recipe's file, YAML or JSON.

    Raises:
        SourceError: it cannot be read.
        ConfigError: it is too large, neither YAML nor JSON, or has a key twice.
        MissingExtraError: PyYAML is not installed.
    """
    where = os.fspath(path)
    is_json = where.endswith(".json")
    with SourceFile(str(local_path(where)) if is_local(where) else where, storage_options) as file:
        if file.size > MAX_BYTES:
            raise ConfigError(where, "recipe", f"found {file.size:,} bytes, expected at most {MAX_BYTES:,}")
        content = file.read(0, file.size)
    try:
        text = content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_mapping_of) if is_json else _parse_yaml(text)
    except (ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(where, "recipe", f"is not {'JSON' if is_json else 'YAML'}: {detail}") from error


def _parse_yaml(text: str) -> Any:
    """Parses YAML; `ValueError` if it is not, or if a mapping has a key twice."""
    with optional_import("yaml", "A recipe in YAML"):
        import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types, so its class is Any
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _mapping_of([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _mapping_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a mapping; `ValueError` for a key that it has already, of which the last one would win silently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"found the key {next(key for key in keys if keys.count(key) > 1)!r} twice in one mapping")
    return found


def parse_recipe(value: Any, *, where: str = "arguments") -> Recipe:
    """Returns the recipe in a mapping, or raises what is wrong in it.

    Args:
        value: the mapping.
        where: the file that it is from.

    Raises:
        ConfigError: something in it is wrong.
    """
    recipe = _mapping(value, where, "recipe")
    _check_keys(recipe, KEYS, where, "")
    unit = recipe.get("unit", "batch")
    if unit not in UNITS:
        detail = f"found {_text(unit)}, expected one of {', '.join(UNITS)}{meant(unit, UNITS)}"
        raise ConfigError(where, "unit", detail)
    seed = recipe.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed.bit_length() > 64:
        raise ConfigError(where, "seed", f"found {_text(seed)}, expected an integer of at most 64 bits")
    options = _options(recipe.get("defaults", {}), where, "defaults")
    parser = _Parser(where, unit)
    sources = parser.sources(recipe.get("sources"), "sources", "", options, 0)
    root = Source(name="", key="sources", weight=None, epochs=None, sources=sources)
    parsed = Recipe(where=where, unit=unit, seed=seed, length=None, options=options, root=root)
    return _with_length(parsed, recipe)


def _with_length(recipe: Recipe, value: Mapping[str, Any]) -> Recipe:
    own, other = (
        f"num_{unit}" for unit in (("batches", "samples") if recipe.unit == "batch" else ("samples", "batches"))
    )
    if value.get(other) is not None:
        raise ConfigError(recipe.where, other, f"does not go with unit: {recipe.unit}; expected {own}")
    length = value.get(own)
    if length is None:
        return recipe
    _integer(length, recipe.where, own, 1)
    if recipe.counts_epochs:
        raise ConfigError(recipe.where, own, "does not go with epochs, which decide the length of an iteration")
    return Recipe(
        where=recipe.where,
        unit=recipe.unit,
        seed=recipe.seed,
        length=length,
        options=recipe.options,
        root=recipe.root,
    )


class _Parser:
    """Parses the tree of sources, with a limit on their number."""

    def __init__(self, where: str, unit: str) -> None:
        self._where = where
        self._unit = unit
        self._num_sources = 0

    def sources(self, value: Any, key: str, path: str, options: Mapping[str, Any], depth: int) -> tuple[Source, ...]:
        """Returns the sources of a mix, sorted by name: their order in the recipe means nothing."""
        if depth > MAX_DEPTH:
            raise ConfigError(self._where, key, f"is nested more than {MAX_DEPTH} mixes deep")
        found = _mapping(value, self._where, key)
        if not found:
            raise ConfigError(self._where, key, "found no sources, expected at least one")
        for name in found:
            if not isinstance(name, str) or not name or "/" in name:
                raise ConfigError(self._where, key, f"found the name {_text(name)}, expected text without a slash")
        sources = tuple(
            self._source(found[name], f"{key}.{name}", f"{path}{name}", options, depth) for name in sorted(found)
        )
        by_epochs = [source for source in sources if source.epochs is not None]
        if by_epochs and len(by_epochs) < len(sources):
            other = next(source for source in sources if source.epochs is None)
            advice = "give epochs to all sources of a mix, or to none"
            raise ConfigError(self._where, other.key, f"has a weight, and {by_epochs[0].key} has epochs: {advice}")
        return sources

    def _source(self, value: Any, key: str, path: str, options: Mapping[str, Any], depth: int) -> Source:
        if isinstance(value, tuple):  # the short form of Python
            if len(value) != 2:
                detail = f"found {len(value)} items, expected a pair: a dataset or loader, and its weight"
                raise ConfigError(self._where, key, detail)
            value = {"dataset": value[0], "weight": value[1]}
        found = _mapping(value, self._where, key, "a dataset or sources, and a weight or epochs")
        is_mix = "sources" in found
        if is_mix == ("dataset" in found):
            both = "both dataset and sources" if is_mix else "neither dataset nor sources"
            raise ConfigError(self._where, key, f"has {both}, expected one of them")
        allowed = MIX_KEYS if is_mix else (*SOURCE_KEYS, *OPTION_KEYS)
        _check_keys(found, allowed, self._where, f"{key}.", mix_only=OPTION_KEYS if is_mix else ())
        weight, epochs = self._amount(found, key)
        if is_mix:
            own = _options(found.get("defaults", {}), self._where, f"{key}.defaults")
            self._check_unit(own, f"{key}.defaults")
            sources = self.sources(found["sources"], f"{key}.sources", f"{path}/", {**options, **own}, depth + 1)
            if epochs is not None and sources[0].epochs is None:
                detail = "goes with sources that have epochs; those here have weights, so give it a weight"
                raise ConfigError(self._where, f"{key}.epochs", detail)
            return Source(name=path, key=key, weight=weight, epochs=epochs, sources=sources)
        self._num_sources += 1
        if self._num_sources > MAX_SOURCES:
            raise ConfigError(self._where, key, f"found more than {MAX_SOURCES:,} datasets")
        own = _options({name: found[name] for name in found if name in OPTION_KEYS}, self._where, key)
        self._check_unit(own, key)
        dataset = found["dataset"]
        if isinstance(dataset, list) and not (dataset and all(isinstance(one, str) for one in dataset)):
            raise ConfigError(
                self._where, f"{key}.dataset", f"found {_text(dataset)}, expected a path or a list of them"
            )
        if dataset is None or isinstance(dataset, bool | int | float | Mapping):
            raise ConfigError(
                self._where, f"{key}.dataset", f"found {_text(dataset)}, expected a path or a list of them"
            )
        return Source(name=path, key=key, weight=weight, epochs=epochs, dataset=dataset, options={**options, **own})

    def _check_unit(self, own: Mapping[str, Any], key: str) -> None:
        wrong = next((name for name in own if name in LOADER_KEYS), None)
        if self._unit == "sample" and wrong is not None:
            detail = "belongs to the recipe's own defaults: with unit: sample, a batch has samples of all sources"
            raise ConfigError(self._where, f"{key}.{wrong}", detail)

    def _amount(self, source: Mapping[str, Any], key: str) -> tuple[Schedule | None, Fraction | None]:
        """Returns the weight or the epochs of a source; a weight of 1 if it has neither."""
        if "epochs" not in source:
            return _schedule(source.get("weight", 1), self._where, f"{key}.weight"), None
        if "weight" in source:
            raise ConfigError(self._where, f"{key}.weight", "found epochs too, expected one of them")
        return None, _number(source["epochs"], self._where, f"{key}.epochs")


# --- values -----------------------------------------------------------------------------------------------------------


def _schedule(value: Any, where: str, key: str) -> Schedule:
    """Parses a number, a list of points, or ``{"linear": points}``."""
    if not isinstance(value, Mapping | list | tuple):
        return Schedule(points=((0, _number(value, where, key)),))
    points: Any = value
    is_linear = False
    if isinstance(value, Mapping):
        _check_keys(value, ("linear",), where, f"{key}.")
        points, is_linear, key = value.get("linear"), True, f"{key}.linear"
    expected = "expected a list of [position, weight] such as [[0, 1.0], [10000, 0.2]]"
    if not isinstance(points, list | tuple) or not points:
        raise ConfigError(where, key, f"found {_text(points)}, {expected}")
    parsed: list[tuple[int, Fraction]] = []
    for number, point in enumerate(points):
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise ConfigError(where, f"{key}[{number}]", f"found {_text(point)}, {expected}")
        position = point[0]
        _integer(position, where, f"{key}[{number}]", 0)
        last = parsed[-1][0] if parsed else None
        if (last is None and position != 0) or (last is not None and position <= last):
            detail = f"found position {position}, expected " + ("0" if last is None else f"one after {last}")
            raise ConfigError(where, f"{key}[{number}]", detail)
        parsed.append((position, _number(point[1], where, f"{key}[{number}]")))
    return Schedule(points=tuple(parsed), is_linear=is_linear)


def _number(value: Any, where: str, key: str) -> Fraction:
    """Parses a number from 0, as it is written: 0.1 is a tenth."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WEIGHT:
        hint = "; YAML reads an exponent as text unless the number has a dot and a sign, as 1.0e-3"
        is_exponent = isinstance(value, str) and "e" in value.lower()
        detail = f"found {_text(value)}, expected a number from 0 to {MAX_WEIGHT:g}{hint if is_exponent else ''}"
        raise ConfigError(where, key, detail)
    return Fraction(repr(value))


def _integer(value: Any, where: str, key: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SAMPLES:
        raise ConfigError(where, key, f"found {_text(value)}, expected an integer from {least} to 2**62")


def _options(value: Any, where: str, key: str) -> dict[str, Any]:
    """Parses options of datasets and loaders. Their kinds are checked here, their values where they are used."""
    found = dict(_mapping(value, where, key))
    _check_keys(found, OPTION_KEYS, where, f"{key}.")
    for name, expected in _KINDS.items():
        kind, text = expected
        if name in found and not isinstance(found[name], kind):
            raise ConfigError(where, f"{key}.{name}", f"found {_text(found[name])}, expected {text}")
    if isinstance(shuffle := found.get("shuffle"), Mapping):
        _check_keys(shuffle, ("size", "window"), where, f"{key}.shuffle.")
        for name, number in shuffle.items():
            _integer(number, where, f"{key}.shuffle.{name}", 1)
        found["shuffle"] = Blocks(**shuffle)
    for name, kind in (("batch_size", Budget), ("window", Window)):
        if isinstance(found.get(name), Mapping):
            found[name] = _value_of(kind, found[name], where, f"{key}.{name}")
    if (split := found.get("split")) is not None:
        _check_keys(split, ("fractions", "part", "seed"), where, f"{key}.split.")
        fractions = _mapping(split.get("fractions"), where, f"{key}.split.fractions", "shares by name")
        if split.get("part") not in fractions:
            detail = (
                f"found {_text(split.get('part'))}, expected one of {', '.join(map(str, fractions)) or 'its fractions'}"
            )
            raise ConfigError(where, f"{key}.split.part", detail + meant(split.get("part"), map(str, fractions)))
    return found


def _value_of(kind: type[Budget | Window], value: Mapping[str, Any], where: str, key: str) -> Budget | Window:
    """Makes a value of its attributes; `ConfigError` if one is unknown, missing, or wrong."""
    attributes = fields(kind)
    _check_keys(value, [one.name for one in attributes], where, f"{key}.")
    for one in attributes:
        if one.default is MISSING and one.name not in value:
            raise ConfigError(where, f"{key}.{one.name}", f"is missing, and a {kind.__name__} needs it")
    try:
        return kind(**value)
    except ConfigError as error:
        raise ConfigError(where, f"{key}.{error.key.rpartition('.')[2]}", error.detail) from error


_KINDS: Mapping[str, tuple[Any, str]] = {
    "format": (str, "mult or mstr"),
    "storage_options": (Mapping, "arguments of a file system by name"),
    "cache_dir": (str, "a folder"),
    "filter": (str, "a condition in SQL"),
    "split": (Mapping, "fractions and a part"),
    "with_settings": (Mapping, "settings by modality"),
    "shuffle": (bool | Blocks | Mapping, "true, false, or a mapping with size and window"),
    "modalities": (list | tuple, "a list of names"),
    "batch_size": (int | Budget | Mapping, "a number, or a mapping with column, total and bucket"),
    "window": (Window | Mapping, "a mapping with seconds and frames"),
}


def _mapping(value: Any, where: str, key: str, expected: str = "keys and values") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(where, key, f"found {_text(value)}, expected {expected}")
    return value


def _check_keys(
    value: Mapping[str, Any], allowed: Sequence[str], where: str, prefix: str, *, mix_only: Sequence[str] = ()
) -> None:
    for name in value:
        if name in allowed:
            continue
        if name in mix_only:
            raise ConfigError(where, f"{prefix}{name}", "belongs to the defaults of a mix, or to each of its sources")
        detail = f"is not a key; allowed here: {', '.join(allowed)}{meant(name, allowed)}"
        raise ConfigError(where, f"{prefix}{name}", detail)


def _text(value: Any) -> str:
    """Describes a value for a message."""
    if value is None:
        return "nothing"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value) if isinstance(value, str) and len(value) < MAX_TEXT else describe(value)


def resolve(path: str, where: str) -> str:
    """Returns the path or URL of a dataset, which is relative to the file of its recipe."""
    if where == "arguments" or "://" in path or Path(path).is_absolute():
        return path
    if is_local(where):
        return str(local_path(where).parent / path)
    return f"{where.rpartition('/')[0]}/{path}"
