"""Checks of the parameters that a declaration gives to filters and annotators.

Each function returns the value in the required type or raises a `ConfigError` that names the parameter; the builder
adds the file and the place in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError

__all__ = [
    "Limits",
    "check_choice",
    "check_flag",
    "check_limits",
    "check_names",
    "check_number",
    "check_whole",
    "some_limit",
    "wrong",
]


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


class Limits(NamedTuple):
    """A closed interval of a measure; None sets no limit.

    Attributes:
        least: the smallest value that is kept.
        most: the largest.
    """

    least: float | None = None
    most: float | None = None

    def reason(self, value: float) -> str | None:
        """Why a value is not kept, ``below_min`` or ``above_max``, or None."""
        if self.least is not None and value < self.least:
            return "below_min"
        return "above_max" if self.most is not None and value > self.most else None

    def reasons(self, values: npt.NDArray[Any]) -> Iterator[tuple[int, str]]:
        """The index of each value that is not kept, and why."""
        if self.least is not None:
            yield from ((index, "below_min") for index in np.flatnonzero(values < self.least).tolist())
        if self.most is not None:
            yield from ((index, "above_max") for index in np.flatnonzero(values > self.most).tolist())


def check_limits(
    name: str, least: object, most: object, *, check: Callable[[str, object], float] = check_number
) -> Limits:
    """Two limits of one measure, both inclusive; None sets no limit.

    Args:
        name: suffix of the parameters' names: ``_width`` for ``min_width`` and ``max_width``, empty for min and max.
        least: the lower limit.
        most: the upper limit.
        check: checks each that is given.

    Raises:
        ConfigError: a limit is wrong, or nothing could lie between them.
    """
    low = None if least is None else check(f"min{name}", least)
    high = None if most is None else check(f"max{name}", most)
    if low is not None and high is not None and low > high:
        raise wrong(f"min{name}", f"is {low:g}, above max{name}, which is {high:g}")
    return Limits(low, high)


def some_limit(**limits: object) -> None:
    """Refuses a filter that has no limit at all and so would keep everything."""
    if all(limit is None for limit in limits.values()):
        raise wrong(next(iter(limits)), f"is missing: give at least one of {', '.join(limits)}")
