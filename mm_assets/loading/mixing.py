"""Several datasets in one stream of batches, by weights or epochs, as a recipe says.

With ``unit: batch`` each batch is of one source, whose own loader makes it; with ``unit: sample`` the samples of each
batch are of all sources. Which source comes next is a function of the recipe, the seed and the position, never of ranks
or threads: all ranks choose alike, and a resumed run continues the sequence. Each source has its own epochs: when one
has ended, its next one begins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mm_assets.errors import ConfigError
from mm_assets.loading.batch_mix import BatchMix
from mm_assets.loading.mixed_loader import MixedLoader, is_loader
from mm_assets.loading.recipe import KEYS, OPTION_KEYS, parse_recipe, read_recipe
from mm_assets.loading.sample_mix import SampleMix

__all__ = ["MixedLoader", "mix"]


def mix(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    *,
    seed: int | None = None,
    num_batches: int | None = None,
    num_samples: int | None = None,
    **options: Any,
) -> MixedLoader:
    """Makes a loader of several datasets, which are mixed by weights or epochs.

    Args:
        recipe: path or URL of a recipe in YAML or JSON; or its content, where a `dataset` may be an open dataset or,
            with ``unit: batch``, a loader; or only its sources, each by name as a pair of a dataset or loader and its
            weight. ``docs/spec/loading.md`` lists the keys.
        seed: of the choice of sources and of their orders, instead of the recipe's.
        num_batches: of an iteration with ``unit: batch``, instead of the recipe's; by default as many as the sources
            have together in an epoch of each.
        num_samples: the same with ``unit: sample``, over all ranks.
        options: defaults of all sources, instead of the recipe's own, and further arguments of `MultimodalLoader`, such
            as `collator` or `rank`.

    Raises:
        ConfigError: something in the recipe or the arguments is wrong; the message names file and key.
        SourceError: the recipe or a dataset cannot be read.
        FormatError: a dataset is damaged.
    """
    where, content = "arguments", recipe
    if isinstance(recipe, str | os.PathLike):
        where, content = os.fspath(recipe), read_recipe(recipe, options.get("storage_options"))
    elif isinstance(recipe, Mapping) and not any(name in recipe for name in KEYS):
        content = {"sources": recipe}
    if isinstance(content, Mapping):
        own = {"seed": seed, "num_batches": num_batches, "num_samples": num_samples}
        content = {**content, **{name: value for name, value in own.items() if value is not None}}
        defaults = {name: value for name, value in options.items() if name in OPTION_KEYS}
        if defaults and isinstance(content.get("defaults", {}), Mapping):
            content["defaults"] = {**content.get("defaults", {}), **defaults}
    parsed = parse_recipe(content, where=where)
    if options and all(is_loader(leaf.dataset) for leaf in parsed.leaves):
        raise ConfigError("arguments", next(iter(options)), "goes to loaders that are made here, and all are given")
    arguments = {name: value for name, value in options.items() if name not in OPTION_KEYS}
    with ExitStack() as stack:
        loader = (BatchMix if parsed.unit == "batch" else SampleMix)(parsed, arguments, stack)
        loader._opened = stack.pop_all()
    return loader
