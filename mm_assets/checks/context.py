"""What a check is given: where a partition's files are, and what they ought to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mm_assets.packing.plan import PackPlan
from mm_assets.rows.schema import DatasetSchema
from mm_assets.sources.base import Source
from mm_assets.storage.store import Store

__all__ = ["CheckContext", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """One partition, as its checks see it.

    Attributes:
        store: the dataset's folder.
        files: table name to its file below `store`: every table that the asset's checks read, which are its own and
            those of the assets before it.
        shards: the partition's containers, open.
        schema: the dataset's schema.
        packed: "mult" and "mstr" to the packed file below `store`, for those made from the present filtered rows.
        plan: the pack plan; needed for packed files only.
        known_modalities: row modalities beside the built-in ones.
        on_misaligned: "warn" where what a sample's parts say of each other does not stop a partition; else it does.
        materialize_mode: "read" where the materialized rows hold bytes, "write" where the filtered rows do.
        memory_limit: bytes that DuckDB may use, or more where there are very many rows; beyond that it spills to a
            scratch folder.
        batch_bytes: content that is held at a time while files are read.
    """

    store: Store
    files: Mapping[str, str]
    shards: Sequence[Source]
    schema: DatasetSchema
    packed: Mapping[str, str] = field(default_factory=dict)
    plan: PackPlan | None = None
    known_modalities: frozenset[str] = frozenset()
    materialize_mode: str = "read"
    on_misaligned: str = "warn"
    memory_limit: int = 128 << 20
    batch_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one check found.

    Attributes:
        name: the check's.
        passed: whether nothing violates the rule.
        num_violations: rows that do.
        blocking: whether a violation stops the partition; else it is a warning.
        violations: the first of them, values short enough to be shown; not stored in a record.
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
        """Whether the partition goes no further."""
        return self.blocking and not self.passed

    def to_json(self) -> dict[str, Any]:
        """The outcome as a record stores it."""
        return {name: getattr(self, name) for name in ("name", "passed", "num_violations", "blocking")}
