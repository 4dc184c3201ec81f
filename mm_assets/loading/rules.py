"""The rules by which a batch is made of values, parsed from the caller's dictionaries and checked.

A wrong rule raises `ConfigError` here, before any data is read; `collate` applies the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mm_assets.errors import ConfigError
from mm_assets.fields.parts import Path, parse_path, split_name

__all__ = ["Rule", "check_integer", "parse_rules"]

TYPES = ("stack", "pad", "ragged", "list")
KEYS = ("type", "stack", "pad_value", "max_length", "pad_to_multiple_of", "dtype", "source")
RESERVED = ("present", "lengths")  # entries of a batch in addition to its outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one output of a batch is made.

    Attributes:
        name: of the output.
        source: modality, with the part of its value after it, such as ``document.layout.words``.
        has_part: whether the source may name a part; else it is a modality's name, dots and all.
        type: stack, pad, ragged or list.
        pad_value: fills rows and their ends.
        max_length: longest extent of the first axes, None for the batch's longest; longer values are truncated.
        multiple: the padded first axis is a multiple of it.
        dtype: of the output; None for the values'.
    """

    name: str
    source: str
    has_part: bool = False
    type: str = "list"
    pad_value: Any = 0
    max_length: tuple[int | None, ...] = ()
    multiple: int = 1
    dtype: np.dtype[Any] | None = None

    def split(self, names: Collection[str]) -> tuple[str, Path] | None:
        """Which of some names of modalities and parts the source begins with, and the path from there; None: none."""
        if not self.has_part:
            return (self.source, ()) if self.source in names else None
        return split_name(self.source, names)


def check_integer(key: str, value: object, least: int) -> None:
    """Refuse, with `ConfigError`, an argument that is not an integer from `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError("arguments", key, f"found {value!r}, expected an integer from {least}")


def parse_rules(configs: Mapping[str, Mapping[str, Any]]) -> list[Rule]:
    """The rules of a collator, in their order.

    Raises:
        ConfigError: one is wrong; its key says which.
    """
    if not isinstance(configs, Mapping):
        raise ConfigError("arguments", "modality_configs", f"found {configs!r}, expected a mapping of output to rule")
    return [_rule(name, config) for name, config in configs.items()]


def _rule(name: str, config: Mapping[str, Any]) -> Rule:
    if name in RESERVED:
        raise ConfigError("arguments", name, "is a name that every batch has; give the output another, with a source")
    if not isinstance(config, Mapping):
        raise ConfigError("arguments", name, f"found {config!r}, expected a mapping such as {{'type': 'stack'}}")
    for key in config:
        if key not in KEYS:
            raise ConfigError("arguments", f"{name}.{key}", f"is not a key; allowed: {', '.join(KEYS)}")
    kind = _type(name, config)
    for key in ("pad_value", "max_length", "pad_to_multiple_of"):
        if key in config and kind != "pad":
            raise ConfigError("arguments", f"{name}.{key}", f"goes with type pad, and the type is {kind}")
    if "dtype" in config and kind == "list":
        raise ConfigError("arguments", f"{name}.dtype", "goes with arrays, and the type is list")
    source = config.get("source", name)
    if not isinstance(source, str) or ("source" in config and parse_path(f".{source}") is None):
        expected = "a modality and a part of it, such as image, pair.text or image[0]"
        raise ConfigError("arguments", f"{name}.source", f"found {source!r}, expected {expected}")
    multiple = config.get("pad_to_multiple_of", 1)
    check_integer(f"{name}.pad_to_multiple_of", multiple, 1)
    # A name that the caller gave no source may have dots itself: it is a modality's, as the dataset has it.
    return Rule(
        name=name,
        source=source,
        has_part="source" in config,
        type=kind,
        pad_value=_pad_value(name, config.get("pad_value", 0)),
        max_length=_max_length(name, config.get("max_length")),
        multiple=multiple,
        dtype=_dtype(name, config.get("dtype")),
    )


def _type(name: str, config: Mapping[str, Any]) -> str:
    stack = config.get("stack", False)
    if not isinstance(stack, bool):
        raise ConfigError("arguments", f"{name}.stack", f"found {stack!r}, expected true or false")
    implied = "stack" if stack else "pad" if "pad_value" in config else "list"
    kind = config.get("type", implied)
    if kind not in TYPES:
        raise ConfigError("arguments", f"{name}.type", f"found {kind!r}, expected one of {', '.join(TYPES)}")
    if stack and kind != "stack":
        raise ConfigError("arguments", f"{name}.stack", f"says stack, and the type is {kind}")
    return str(kind)


def _pad_value(name: str, value: Any) -> Any:
    if not isinstance(value, bool | int | float | complex | np.generic):
        raise ConfigError("arguments", f"{name}.pad_value", f"found {value!r}, expected a number")
    return value


def _dtype(name: str, value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except TypeError as error:
        raise ConfigError("arguments", f"{name}.dtype", f"found {value!r}, expected a dtype of numbers") from error
    if dtype.kind not in "biufc":
        raise ConfigError("arguments", f"{name}.dtype", f"found {value!r}, expected a dtype of numbers")
    return dtype


def _max_length(name: str, value: Any) -> tuple[int | None, ...]:
    """A limit for each of the first axes; None for a free one."""
    if value is None:
        return ()
    limits = (value,) if isinstance(value, int) else value
    if not isinstance(limits, Sequence) or isinstance(limits, str) or not limits:
        raise ConfigError("arguments", f"{name}.max_length", f"found {value!r}, expected an integer or a list of them")
    for limit in limits:
        if limit is not None:
            check_integer(f"{name}.max_length", limit, 0)
    return tuple(limits)
