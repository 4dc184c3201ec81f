"""What the dataset's folder holds of a partition, as values: its registration, its records and its attempts.

The record of a stage names the files that it made and those that it read by digest, with the outcomes of its checks.
A `Record` is the publication of a partition: the records of all its stages. An `Attempt` is a run that has not
published: the stages that it completed, and why it ended. None of these values reads or writes a file.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, islice
from typing import Any, NamedTuple

from mm_assets.checks.outcome import Outcome
from mm_assets.dataset.manifest import FILE_DIGITS, ManifestPartition, check_partition, file_path
from mm_assets.errors import CorruptError, MmAssetsError, SchemaMismatchError, SourceError
from mm_assets.pipeline.chain import CHAIN, RECORDED_STAGES, Stage
from mm_assets.rows.columns import Kept, Origin
from mm_assets.storage.listing import ShardFile
from mm_assets.storage.store import PublishedFile
from mm_assets.storage.urls import storage_fault

__all__ = [
    "RECIPE_DIGITS",
    "Attempt",
    "Earlier",
    "Partition",
    "Record",
    "Registered",
    "StageFailure",
    "StageRecord",
    "Version",
    "canonical_json",
    "digest_fault",
    "size_fault",
]

RECORD_VERSION = 1  # of records and attempts
RECIPE_DIGITS = 16  # hexadecimal
_FILES = {stage.name: stage.files for stage in RECORDED_STAGES}
_SHA256 = re.compile("[0-9a-f]{64}")
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

    def recipe(self, made_with: str) -> str:
        """Returns `RECIPE_DIGITS` hexadecimal digits that change when one of its shards does, or `made_with`.

        Args:
            made_with: `Stage.digest` of `PUBLISHED`: all settings, code and schema that determine its files.
        """
        recipe = hashlib.sha256(canonical_json([RECORD_VERSION, self.fingerprints, made_with])).hexdigest()
        return recipe[:RECIPE_DIGITS]


class Version(NamedTuple):
    """A file of the registration as it was read: its ETag or the facts of a listing, and the SHA-256 of its content."""

    tag: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What registration stored.

    Attributes:
        partitions: every registered partition by key; empty before the first registration.
        source: the `shards` that they come from, or None before the first registration.
        stored_schema: the content of the schema's file; empty before the first registration.
        versions: of the files that it was read from, by name; they are replaced only if they are still these.
    """

    partitions: dict[str, Partition]
    source: str | None
    stored_schema: Mapping[str, Any]
    versions: Mapping[str, Version]

    @property
    def declared(self) -> Mapping[str, Any] | None:
        """The settings that decided the schema; None if there is none, or one that no sample decided, for no rows."""
        return None if self.stored_schema.get("decided_by", "") is None else self.stored_schema.get("declared")


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

    @property
    def failure(self) -> StageFailure | None:
        """What its checks found that stops the partition; None if they found nothing of that kind."""
        detail = "; ".join(f"check {outcome.name}: {outcome.said}" for outcome in self.outcomes if outcome.stops)
        return StageFailure(partition=self.partition, stage=self.stage, detail=detail) if detail else None

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
            files = {name: PublishedFile(**file) for name, file in value["files"].items()}
            if odd := [
                file.path for name, file in files.items() if file.path != file_path(name, partition, file.sha256)
            ]:
                raise ValueError(f"{odd[0]!r} is not the name of its file")
            if files.keys() != set(_FILES[stage]):
                raise ValueError(f"its files are {', '.join(map(repr, files))}, expected {', '.join(_FILES[stage])}")
            _expect_types(
                str, value["made_with"].values(), value["inputs"].values(), (f.sha256 for f in files.values())
            )
            _expect_types(int, value["counts"].values(), (file.size for file in files.values()))
            if odd_digests := [file.sha256 for file in files.values() if not _SHA256.fullmatch(file.sha256)]:
                raise ValueError(f"{odd_digests[0]!r} is not a SHA-256")
            return cls(
                stage=stage,
                partition=partition,
                made_with=dict(value["made_with"]),
                inputs=dict(value["inputs"]),
                counts=dict(value["counts"]),
                files=files,
                outcomes=tuple(map(Outcome.from_json, value["outcomes"])),
                notes=tuple(value.get("notes", ())),
                kept=tuple(Kept(**{**k, "origin": Origin(**k["origin"])}) for k in value.get("kept", ())),
                limits=dict(value.get("limits", {})),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The publication of a partition. Every file that it names was durable, and every check had passed, before it.

    Attributes:
        dataset: name of the dataset.
        partition: the partition key.
        recipe: `Partition.recipe` of what it was made from.
        shards: fingerprint of each shard by its URL.
        stages: the record of each stage, in the order of the chain.
        num_samples: samples in its packed files.
        decodable: `mode` and `on_undecodable` of the declaration; `judged` and `undecodable`, how many media items.
        losses: by stage and reason, as `losses.Losses`.
    """

    dataset: str
    partition: str
    recipe: str
    shards: Mapping[str, str]
    stages: Mapping[Stage, StageRecord]
    num_samples: int
    decodable: Mapping[str, Any]
    losses: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def packed(self) -> dict[str, PublishedFile]:
        """The packed file of each format."""
        return {
            stage.packed_format: record.files[stage.packed_format]
            for stage, record in self.stages.items()
            if stage.packed_format is not None
        }

    @property
    def tables(self) -> dict[str, PublishedFile]:
        """The file of each table, by the name of the table."""
        return {table.name: record.files[table.name] for stage, record in self.stages.items() for table in stage.tables}

    @property
    def listed(self) -> ManifestPartition:
        """What manifests list of it."""
        return ManifestPartition(
            key=self.partition,
            recipe=self.recipe,
            num_samples=self.num_samples,
            packed={form: (file.size, file.sha256) for form, file in self.packed.items()},
            tables={name: (file.size, file.sha256[:FILE_DIGITS]) for name, file in self.tables.items()},
            streams={},
            decodable=self.decodable,
            losses=self.losses,
        )

    def to_bytes(self) -> bytes:
        """Returns the content of its file; equal records have equal bytes."""
        return _to_bytes(self, {"stages": _stages_to_json(self.stages)})

    @classmethod
    def from_bytes(cls, content: bytes, *, where: str) -> Record:
        """Reads a stored record.

        Raises:
            SchemaMismatchError: the content is damaged, or of another version.
        """
        value = _parse(content, "record", where)
        try:
            record = cls(
                dataset=value["dataset"],
                partition=value["partition"],
                recipe=value["recipe"],
                shards=dict(value["shards"]),
                stages=_stages_from_json(value["stages"], value["partition"], where),
                num_samples=value["num_samples"],
                decodable=dict(value["decodable"]),
                losses=dict(value["losses"]),
            )
            _expect_types(str, [record.dataset], record.shards.values())
            check_partition(record.listed, name=where)  # else no reader would accept a manifest that lists it
            return record
        except (KeyError, TypeError, AttributeError, ValueError, CorruptError) as error:
            raise SchemaMismatchError(f"{where}: is not a record of a partition: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The latest run of a partition that did not publish it.

    Attributes:
        partition: the partition key.
        stages: the stages that it completed, or took over from an earlier one, in the order of the chain.
        failure: the error that ended it; None if a check failed, or if it was interrupted or is running.
    """

    partition: str
    stages: Mapping[Stage, StageRecord]
    failure: StageFailure | None = None

    @property
    def end(self) -> StageFailure | None:
        """Why it ended: its error, or the checks of an earlier stage; None if it was interrupted or is running."""
        order = [stage.name for stage in CHAIN]
        failures = [self.failure, *(record.failure for record in self.stages.values())]
        found = [failure for failure in failures if failure is not None]
        return min(found, key=lambda one: order.index(one.stage) if one.stage in order else 0, default=None)

    def to_bytes(self) -> bytes:
        """Returns the content of its file."""
        failure = None if self.failure is None else asdict(self.failure)
        return _to_bytes(self, {"stages": _stages_to_json(self.stages), "failure": failure})

    @classmethod
    def from_bytes(cls, content: bytes, *, where: str) -> Attempt:
        """Reads a stored attempt; errors as `Record.from_bytes`."""
        value = _parse(content, "attempt", where)
        try:
            return cls(
                partition=value["partition"],
                stages=_stages_from_json(value["stages"], value["partition"], where),
                failure=None if value["failure"] is None else StageFailure(**value["failure"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SchemaMismatchError(f"{where}: is not an attempt at a partition: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What earlier runs of a partition left: names, so that its next run lists nothing.

    Attributes:
        recipes: by which it was published, the newest first.
        has_attempt: whether there is an attempt.
    """

    recipes: tuple[str, ...] = ()
    has_attempt: bool = False


def _to_bytes(value: Record | Attempt, own: Mapping[str, Any]) -> bytes:
    plain = {one.name: getattr(value, one.name) for one in fields(value) if one.name not in own}
    return canonical_json({"version": RECORD_VERSION, **plain, **own}, indent=1)


def _parse(content: bytes, kind: str, where: str) -> Any:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SchemaMismatchError(f"{where}: is not a {kind} of a partition: {error}") from error
    if not isinstance(value, dict) or value.get("version") != RECORD_VERSION:
        found = value.get("version") if isinstance(value, dict) else type(value).__name__
        raise SchemaMismatchError(f"{where}: {kind} of version {found}, expected {RECORD_VERSION}")
    return value


def _expect_types(kind: type, *values: Iterable[object]) -> None:
    """Raises `TypeError` unless all values are of a type."""
    for value in chain(*values):
        if type(value) is not kind:
            raise TypeError(f"found {value!r:.80}, expected {kind.__name__}")


def _stages_to_json(stages: Mapping[Stage, StageRecord]) -> dict[str, Any]:
    return {stage.name: record.to_json() for stage, record in stages.items()}


def _stages_from_json(value: Mapping[str, Any], partition: str, where: str) -> dict[Stage, StageRecord]:
    if unknown := value.keys() - {stage.name for stage in RECORDED_STAGES}:
        raise ValueError(f"unknown stages: {', '.join(sorted(unknown))}")
    return {
        stage: StageRecord.from_json(value[stage.name], stage=stage.name, partition=partition, where=where)
        for stage in RECORDED_STAGES
        if stage.name in value
    }


def size_fault(expected: int, found: int | None) -> str | None:
    """Returns how a file's size differs from the recorded one, or None; `found` is None if the file is missing."""
    size = "is missing" if found is None else f"has {found} bytes"
    return None if found == expected else f"{size}, expected {expected} bytes"


def digest_fault(expected: str, found: str) -> str | None:
    """How a file's SHA-256 differs from what was recorded of it, or None."""
    return None if found == expected else f"was damaged or replaced: its SHA-256 is {found}, expected {expected}"
