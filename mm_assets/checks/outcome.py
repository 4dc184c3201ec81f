"""What a check returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_assets.summaries import counted

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one check.

    Attributes:
        name: the check's.
        passed: whether nothing violates the rule.
        num_violations: rows that do.
        blocking: whether a violation stops the partition; else it is a warning.
        violations: the first of them, values short enough to be shown; a record stores one.
        description: the rule; not stored in a record.
    """

    name: str
    passed: bool
    num_violations: int
    blocking: bool = True
    violations: tuple[Mapping[str, Any], ...] = ()
    description: str = ""

    @property
    def stops(self) -> bool:
        """Whether a violation stops the partition."""
        return self.blocking and not self.passed

    @property
    def said(self) -> str:
        """The violations in words: how many, of which rule, and the first; or what the only one itself says."""
        first = dict(self.violations[0]) if self.violations else {}
        if self.num_violations == 1 and first.keys() == {"problem"}:
            return str(first["problem"])
        values = ", ".join(f"{name}={value}" for name, value in first.items())
        number = counted(self.num_violations, "violation")
        if self.description:
            return f"{number} of: {self.description} First: {values}"
        return f"{number}, the first: {values}" if values else number

    def to_json(self) -> dict[str, Any]:
        """The outcome as a record stores it, with its first violation."""
        value = {name: getattr(self, name) for name in ("name", "passed", "num_violations", "blocking")}
        return value | ({"violations": [dict(v) for v in self.violations[:1]]} if self.violations else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outcome:
        """Reads a stored outcome; raises `KeyError` or `TypeError` for any other value."""
        return cls(**{**value, "violations": tuple(map(dict, value.get("violations", ())))})
