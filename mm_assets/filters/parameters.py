"""Checks of the parameters that a declaration gives to filters and annotators.

Each function returns the value in the required type or raises a `ConfigError` that names the parameter; the builder
adds the file and the place in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from mm_assets.errors import ConfigError

__all__ = [
    "bounds",
    "check_choice",
    "check_flag",
    "check_names",
    "check_number",
    "check_whole",
    "some_limit",
    "wrong",
]

_N = TypeVar("_N", int, float)


def wrong(parameter: str, detail: str) -> ConfigError:
    """The error for one parameter; `detail` is a clause that follows its name."""
    return ConfigError("arguments", parameter, detail)


def check_flag(parameter: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise wrong(parameter, f"is {value!r}, expected true or false")
    return value


def check_number(parameter: str, value: object, *, least: float = 0.0) -> float:
    """A finite number of at least `least`, as float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        raise wrong(parameter, f"is {value!r}, expected a number of at least {least:g}")
    return float(value)


def check_whole(parameter: str, value: object, *, least: int = 0) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(parameter, f"is {value!r}, expected a whole number of at least {least}")
    return value


def check_choice(parameter: str, value: object, allowed: Sequence[str]) -> str:
    """One of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise wrong(parameter, f"is {value!r}, allowed: {', '.join(allowed)}")
    return value


def check_names(parameter: str, value: object) -> tuple[str, ...]:
    """A list of at least one distinct name."""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(name, str) and name for name in value):
        raise wrong(parameter, f"is {value!r}, expected a list of names")
    if len(set(value)) != len(value):
        raise wrong(parameter, f"is {value!r}, which names something twice")
    return tuple(value)


def bounds(name: str, low: _N | None, high: _N | None) -> tuple[_N | None, _N | None]:
    """Two checked limits of one measure, both inclusive; None sets no limit.

    Args:
        name: suffix of the parameters' names: ``_width`` for ``min_width`` and ``max_width``, empty for min and max.
        low: the lower limit.
        high: the upper limit.

    Raises:
        ConfigError: nothing could lie between them.
    """
    if low is not None and high is not None and low > high:
        raise wrong(f"min{name}", f"is {low:g}, above max{name}, which is {high:g}")
    return low, high


def some_limit(*limits: Any, parameters: Sequence[str]) -> None:
    """Refuses a filter that has no limit at all and so would keep everything."""
    if all(limit is None for limit in limits):
        raise wrong(parameters[0], f"is missing: give at least one of {', '.join(parameters)}")
