"""When a failed operation is tried again: the policy for storages.

`orchestration.recorder` has the policy for Dagster's database. The clients of object stores repeat single requests on
their own; this policy repeats what failed in spite of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["STORAGE", "Retry"]

_Failure = TypeVar("_Failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(Generic[_Failure]):
    """A retry policy.

    Attributes:
        pauses: seconds before each further attempt.
        jitter: by how much a pause is prolonged at random, as a share of it at most: what failed at the same time is
            not repeated at the same time.
        may_pass: whether another attempt may succeed after this failure.
    """

    pauses: tuple[float, ...]
    jitter: float
    may_pass: Callable[[_Failure], bool]

    @property
    def total_seconds(self) -> float:
        """Seconds that all pauses take at least."""
        return sum(self.pauses)

    def waits(self) -> tuple[float, ...]:
        """Returns the pauses with jitter."""
        return tuple(pause * random.uniform(1.0, 1.0 + self.jitter) for pause in self.pauses)


def _may_pass(fault: str | None) -> bool:
    return fault in ("slow_down", "unavailable")


STORAGE: Retry[str | None] = Retry(pauses=(5.0, 20.0, 60.0), jitter=0.25, may_pass=_may_pass)
"""For what a storage failed with, as `urls.storage_fault` names it."""
