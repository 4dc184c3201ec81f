"""What the dataset's folder holds of a partition, as values: what is registered, and what its stages made.

A record names the files that a stage made and those that it read by digest, with the outcomes of its checks. None of
these values reads or writes a file.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from mm_assets.checks.context import Outcome
from mm_assets.errors import MmAssetsError, SchemaMismatchError, SourceError
from mm_assets.rows.columns import Kept, Origin
from mm_assets.storage.listing import ShardFile
from mm_assets.storage.store import PublishedFile
from mm_assets.storage.urls import storage_fault

__all__ = [
    "MARKER_VERSION",
    "Partition",
    "Registered",
    "StageFailure",
    "StageRecord",
    "canonical_json",
    "digest_fault",
    "size_fault",
]

MARKER_VERSION = 4  # of publication markers; the `losses` of 1 are numbers, 2 lists no record, 3 has no fingerprint
_PIECES = 4096  # of a document that are joined at a time


def canonical_json(value: object, *, indent: int | None = None) -> bytes:
    """JSON with sorted keys, the same bytes for the same value."""
    separators = (",", ":") if indent is None else (",", ": ")
    encoder = json.JSONEncoder(sort_keys=True, indent=indent, separators=separators, ensure_ascii=False)
    written = io.BytesIO()
    # Not `encode`: with `indent` it holds each name and number as a string, ten times the bytes of the whole.
    pieces = encoder.iterencode(value)
    while some := "".join(islice(pieces, _PIECES)):
        written.write(some.encode())
    written.write(b"\n")
    return written.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition as registered: one shard, or a named group of shards.

    Attributes:
        key: the partition key.
        shards: its shards as last listed, sorted by URL.
    """

    key: str
    shards: tuple[ShardFile, ...]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each shard by its URL."""
        return {shard.url: shard.fingerprint for shard in self.shards}

    def fingerprint(self, made_with: str) -> str:
        """16 hexadecimal digits that change when a shard of the partition does, or `made_with`.

        Args:
            made_with: `Stage.digest` of `PUBLISHED`.
        """
        return hashlib.sha256(canonical_json([MARKER_VERSION, self.fingerprints, made_with])).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What registration stored.

    Attributes:
        partitions: every registered partition by key; empty before the first registration.
        source: the `shards` that they come from, or None before the first registration.
        stored_schema: the content of the schema's file; empty before the first registration.
    """

    partitions: dict[str, Partition]
    source: str | None
    stored_schema: Mapping[str, Any]

    @property
    def declared(self) -> Any:
        """The settings that decided the stored schema, or None where there is no schema."""
        return self.stored_schema.get("declared")

    @property
    def schema_is_provisional(self) -> bool:
        """Whether the stored schema was decided without any sample, so that no rows conform to it."""
        return self.stored_schema.get("decided_by", "") is None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """What one stage did to one partition.

    Attributes:
        stage: the asset's name.
        partition: the partition key.
        made_with: `Stage.made_with` at the time.
        inputs: digest of each input by name; for shards their fingerprints.
        files: each file made, by name.
        counts: rows, bytes, rejects and the like.
        outcomes: results of the checks on these files, stored with the first violation and without descriptions.
        notes: remarks on the stage's work for people, one sentence each.
        kept: faults that keep nothing from being published.
        limits: of filtered rows `thresholds` (filter, scope, parts of a `Threshold`) and `measures` (of columns).
    """

    stage: str
    partition: str
    made_with: Mapping[str, str]
    inputs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, PublishedFile] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    notes: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record as it is stored below its stage in the partition's file."""
        value: dict[str, Any] = {"made_with": dict(self.made_with)}
        value["inputs"] = dict(self.inputs)
        value["counts"] = dict(self.counts)
        value["files"] = {name: file.to_json() for name, file in self.files.items()}
        value["outcomes"] = [o.to_json() for o in self.outcomes]
        if self.notes:
            value["notes"] = list(self.notes)
        if self.kept:
            value["kept"] = [asdict(k) | {"origin": k.origin._asdict()} for k in self.kept]
        if self.limits:
            value["limits"] = dict(self.limits)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, stage: str, partition: str, where: str) -> StageRecord:
        """Reads a stored record.

        Raises:
            SchemaMismatchError: the value does not have a record's shape.
        """
        try:
            return cls(
                stage=stage,
                partition=partition,
                made_with=dict(value["made_with"]),
                inputs=dict(value["inputs"]),
                counts=dict(value["counts"]),
                files={name: PublishedFile(**file) for name, file in value["files"].items()},
                outcomes=tuple(map(Outcome.from_json, value["outcomes"])),
                notes=tuple(value.get("notes", ())),
                kept=tuple(Kept(**{**k, "origin": Origin(**k["origin"])}) for k in value.get("kept", ())),
                limits=dict(value.get("limits", {})),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SchemaMismatchError(f"{where}: {stage}: not a stage record: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFailure:
    """The error that ended a run of a partition.

    Attributes:
        partition: the partition key.
        stage: name of the stage that raised it.
        detail: its message.
        path: path or URL of the file that it is about, or None.
        member: member of that file, or None.
        byte_offset: position in that file, or None.
        storage_fault: as `storage.urls.storage_fault`, where the storage failed.
    """

    partition: str
    stage: str
    detail: str
    path: str | None = None
    member: str | None = None
    byte_offset: int | None = None
    storage_fault: str | None = None

    @property
    def said(self) -> str:
        """The message with the file that it is about, as the error said it."""
        if self.path is None:
            return self.detail
        return str(SourceError(self.path, self.detail, member=self.member, byte_offset=self.byte_offset))

    @classmethod
    def of(cls, error: Exception, *, stage: str, partition: str) -> StageFailure:
        """The failure that an exception is; a bug's has the name of its class."""
        found = error if isinstance(error, SourceError) else None
        detail = str(error) if isinstance(error, MmAssetsError) else f"{type(error).__name__}: {error}"
        detail = detail if found is None else found.detail
        return cls(
            partition=partition,
            stage=stage,
            detail=detail,
            path=None if found is None else found.path,
            member=None if found is None else found.member,
            byte_offset=None if found is None else found.byte_offset,
            storage_fault=storage_fault(error),
        )


def size_fault(expected: int, found: int | None) -> str | None:
    """How a file differs in size from what was recorded of it, or None; `found` is None where it is gone."""
    return (
        None if found == expected else f"is {'gone' if found is None else f'{found} bytes'}, expected {expected} bytes"
    )


def digest_fault(expected: str, found: str) -> str | None:
    """How a file's SHA-256 differs from what was recorded of it, or None."""
    return None if found == expected else f"was damaged or replaced: its SHA-256 is {found}, expected {expected}"
