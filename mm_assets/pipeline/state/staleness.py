"""Which partitions are stale, why, and at which stage a run of each starts.

A partition is stale if no record has the partition's current recipe in its name, so one listing of the records answers
for all partitions. The records and attempts of stale partitions say which of their stages can be reused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from mm_assets.dataset.manifest import ManifestPartition, file_path, manifest_partitions
from mm_assets.errors import ConfigError, CorruptError, SchemaMismatchError, meant
from mm_assets.pipeline.chain import (
    CHAIN,
    MANIFEST,
    MATERIALIZED_ROWS,
    PACKED_FOLDER,
    PUBLISHED,
    RAW_SHARDS,
    TABLES,
    Stage,
    recorded_stages,
)
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.exports import missing_exports
from mm_assets.pipeline.state.folder import ATTEMPTS, RECORDS, DatasetStore
from mm_assets.pipeline.state.records import Attempt, Earlier, Partition, StageFailure, StageRecord, size_fault
from mm_assets.pipeline.state.registration import Registration
from mm_assets.rows.schema import DatasetSchema
from mm_assets.storage.listing import description_of
from mm_assets.storage.store import ListedFile

__all__ = [
    "DatasetState",
    "Stale",
    "by_reason",
    "chosen_partitions",
    "given_start",
    "pending_partitions",
    "pending_reasons",
    "planned_runs",
    "registered_runs",
    "reusable",
    "stage_fault",
    "stage_named",
    "stale_partitions",
]

_FEW = 16  # partitions whose files are asked for one by one; of more the folders are listed
_READS = 16  # partitions whose records are read at a time
_MAX_RECORDS = 4  # of a partition that are considered for reuse, the newest first

Stages = Mapping[Stage, StageRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """Why a partition, or a stage of it, is stale.

    Attributes:
        first: the stage that a run of the partition starts at; `PUBLISHED` if only its record is missing.
        reason: a sentence that is the same for every partition with the same fault.
        detail: which file, or what a check found; empty if the reason says all.
        failure: the error that ended its latest attempt, or None.
    """

    first: Stage
    reason: str
    detail: str = ""
    failure: StageFailure | None = None

    @property
    def message(self) -> str:
        """The reason with the detail and the failure."""
        fault = f"{self.reason}: {self.detail}" if self.detail else self.reason
        if self.failure is None:
            return fault
        return f"{fault}; its last run failed at {self.failure.stage}: {self.failure.detail}"


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest manifest, its digest and partitions, and what is wrong with ``manifest.json``."""

    manifest: Mapping[str, Any] | None = None
    digest: str | None = None
    partitions: Mapping[str, ManifestPartition] = field(default_factory=dict)
    damage: CorruptError | None = None

    @classmethod
    def of(cls, content: bytes, name: str) -> _Newest:
        """Reads a manifest; raises `CorruptError`, or `UnsupportedVersionError`."""
        try:
            manifest = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CorruptError(name, f"is not a manifest: {error}") from error
        return cls(manifest, hashlib.sha256(content).hexdigest(), manifest_partitions(manifest, name=name))


class DatasetState:
    """A dataset as it was listed: its registered partitions, and which of them are published.

    Args:
        dataset: the dataset's folder.
        schema: the dataset's, if it is known.
        partitions: the registered ones by key, if `dataset` has just registered them; or those that it would register.
        top: a listing of the dataset's folder from just before; None lists it.

    Attributes:
        dataset: the dataset's folder.
        partitions: by key, as registered.
        schema: the dataset's; an empty one if no partition is registered.
        recipes: by key, the recipe of its present shards, settings, code and schema.
        records: by key, the recipes by which it was published, the newest first.

    Raises:
        SourceError: the storage cannot be read.
    """

    def __init__(
        self,
        dataset: DatasetStore,
        schema: DatasetSchema | None = None,
        *,
        partitions: Mapping[str, Partition] | None = None,
        top: Mapping[str, ListedFile] | None = None,
    ) -> None:
        self.dataset = dataset
        registered = dataset.registered(top) if partitions is None else None
        self.partitions: Mapping[str, Partition] = partitions or {} if registered is None else registered.partitions
        listed = dataset.store.listing(RECORDS)
        newest_first = sorted(listed, key=lambda name: listed[name].modified or 0.0, reverse=True)
        self.records: Mapping[str, Sequence[str]] = dataset.recipes(newest_first)
        if schema is None and self.partitions:
            schema = dataset.schema(registered, is_fresh=registered is None)
        self.schema = schema or DatasetSchema()
        made_with = PUBLISHED.digest(dataset.spec, self.schema)
        self.recipes: Mapping[str, str] = {key: p.recipe(made_with) for key, p in self.partitions.items()}

    def use_newest(self, content: bytes | None) -> None:
        """Takes the content of ``manifest.json``, None if there is none, from a caller who has just read it."""
        vars(self)["_newest"] = self._parsed(content)

    def use_manifest(self, manifest: Mapping[str, Any], digest: str, listed: Mapping[str, ManifestPartition]) -> None:
        """Takes the newest manifest, its digest and what it lists from a caller who has just written it."""
        vars(self)["_newest"] = _Newest(manifest, digest, listed)

    def use_listed_recipes(self) -> None:
        """Takes the recipes of the newest manifest for the current ones: for a dataset whose settings are unknown."""
        listed = {key: entry.recipe for key, entry in self.listed.items() if key in self.partitions}
        self.recipes = {**self.recipes, **listed}

    def withdraw(self, keys: Iterable[str]) -> None:
        """Takes note that the records of some partitions with their current recipes were deleted."""
        remaining = {key: [recipe for recipe in self.records[key] if recipe != self.recipes[key]] for key in keys}
        if remaining:
            self.records = {**self.records, **remaining}
            for cached in ("pending", "pending_exports", "attempts"):
                vars(self).pop(cached, None)

    def is_published(self, key: str) -> bool:
        """Whether a registered partition has a record with its current recipe."""
        return self.recipes.get(key) in self.records.get(key, ())

    @cached_property
    def pending(self) -> list[str]:
        """The stale ones of the registered partitions, sorted."""
        return sorted(key for key in self.partitions if not self.is_published(key))

    @cached_property
    def pending_exports(self) -> Mapping[str, Sequence[str]]:
        """By key of a published partition, the assets of the exports that it lacks; errors as `published`."""
        return missing_exports(self.dataset, self.published().values()) if self.dataset.spec.exports else {}

    @property
    def incomplete(self) -> list[str]:
        """The pending partitions, and those that are published and lack an export, sorted; errors as `published`."""
        return sorted({*self.pending, *self.pending_exports})

    @cached_property
    def attempts(self) -> frozenset[str]:
        """Keys of partitions that have an attempt."""
        return frozenset(name[len(ATTEMPTS) + 1 : -len(".json")] for name in self.dataset.store.sizes(ATTEMPTS))

    def earlier(self, key: str) -> Earlier:
        """What earlier runs of a partition left."""
        return Earlier(recipes=tuple(self.records.get(key, ()))[:_MAX_RECORDS], has_attempt=key in self.attempts)

    @cached_property
    def _newest(self) -> _Newest:
        return self._parsed(self.dataset.store.found_bytes("manifest.json"))

    def _parsed(self, content: bytes | None) -> _Newest:
        store = self.dataset.store
        if content is None:
            return _Newest()
        try:
            return _Newest.of(content, store.url_of("manifest.json"))
        except CorruptError as error:
            damage = error
        copies = store.listing("manifests")
        for name in sorted(copies, key=lambda name: copies[name].modified or 0.0, reverse=True):
            with suppress(CorruptError):
                return replace(_Newest.of(store.read_bytes(name), store.url_of(name)), digest=None, damage=damage)
        return _Newest(damage=damage)

    @property
    def manifest(self) -> Mapping[str, Any] | None:
        """The newest manifest; None before the first. If ``manifest.json`` is damaged, the newest copy of one.

        Raises:
            SourceError: it cannot be read.
            UnsupportedVersionError: it is of another version.
        """
        return self._newest.manifest

    @property
    def digest(self) -> str | None:
        """SHA-256 of ``manifest.json``, hexadecimal; None if it is missing or damaged; errors as `manifest`."""
        return self._newest.digest

    @property
    def damage(self) -> CorruptError | None:
        """What is wrong with ``manifest.json``, which the next load writes again; None if nothing is."""
        return self._newest.damage

    @property
    def listed(self) -> Mapping[str, ManifestPartition]:
        """What the newest manifest lists, by key; nothing if there is none; errors as `manifest`."""
        return self._newest.partitions

    def published(
        self,
        keys: Iterable[str] | None = None,
        *,
        outdated: bool = False,
        read: Mapping[str, ManifestPartition] | None = None,
    ) -> dict[str, ManifestPartition]:
        """What is published by its current recipe, by key. Records are read only of what the manifest does not list.

        Args:
            keys: of partitions; None for all.
            outdated: also what is published by an earlier recipe only, as its newest record has it.
            read: what records say that the caller has read or written.

        Raises:
            SourceError: the storage cannot be read.
        """
        recipes = {key: self._recipe(key, outdated) for key in (self.partitions if keys is None else keys)}
        wanted = {key: recipe for key, recipe in recipes.items() if recipe is not None}
        known = {
            key: entries[key]
            for entries in (read or {}, self.listed)  # what is listed may have added streams
            for key, recipe in wanted.items()
            if key in entries and entries[key].recipe == recipe
        }
        new = [(key, recipe) for key, recipe in wanted.items() if key not in known]
        known |= {key: record.listed for key, record in self.dataset.read_records(new) if record is not None}
        return {key: known[key] for key in wanted if key in known}

    def _recipe(self, key: str, outdated: bool) -> str | None:
        """The recipe by which a partition is published: the current one, else the latest if `outdated`."""
        if self.is_published(key):
            return self.recipes[key]
        return next(iter(self.records.get(key, ())), None) if outdated else None

    def latest(self, keys: Iterable[str]) -> Iterator[Attempt]:
        """Yields the latest attempt at each partition; else one with the stages of its record, or without any.

        Raises:
            SourceError: the storage cannot be read.
        """
        remaining = iter(keys)
        with ThreadPoolExecutor(_READS, thread_name_prefix="attempts") as pool:
            while some := list(islice(remaining, _READS)):  # few: a page of losses may need the first alone
                yield from pool.map(self._latest, some)

    def _latest(self, key: str) -> Attempt:
        attempt = self.dataset.attempt(key) if key in self.attempts else None
        recipe = self._recipe(key, outdated=True)
        record = None
        if attempt is None and recipe is not None:
            with suppress(SchemaMismatchError):
                record = self.dataset.record(key, recipe)
        return attempt or Attempt(partition=key, stages={} if record is None else record.stages)

    def tables(self, keys: Iterable[str] | None = None) -> dict[str, dict[str, str]]:
        """Returns the path of each table of partitions, by key: of the latest attempt, else as published by any recipe.

        Args:
            keys: of partitions; None for all.

        Raises:
            SourceError: the storage cannot be read.
        """
        keys = list(self.partitions if keys is None else keys)
        found = {
            key: {table: file_path(table, key, sha256) for table, (_, sha256) in entry.tables.items()}
            for key, entry in self.published(keys, outdated=True).items()
        }
        for attempt in self.latest(key for key in keys if key in self.attempts):
            for record in attempt.stages.values():
                paths = {name: file.path for name, file in record.files.items() if name in TABLES}
                found.setdefault(attempt.partition, {}).update(paths)
        return found

    def fault(self, key: str) -> str | None:
        """Why a partition is not published by its current recipe, as far as the listing shows, or None."""
        if key not in self.partitions:
            return self.unregistered if key in self.records else "it is not registered"
        if self.is_published(key):
            return None
        if key not in self.records:
            return "it is not published"
        return "it is not published with its present shards, settings, code and schema"

    @property
    def unregistered(self) -> str:
        """Why a published partition is not a registered one."""
        return "its shards are missing" if self.partitions else "shards.json is missing, so no partition is registered"


def pending_partitions(dataset: DatasetStore) -> list[str]:
    """The registered partitions that a run has something to do for, sorted: stale ones, and those without an export."""
    return DatasetState(dataset).incomplete


def pending_reasons(state: DatasetState) -> dict[str, str]:
    """Why each of the pending partitions is one."""
    return {key: stale.message for key, stale in stale_partitions(state, state.pending).items()}


def stage_named(name: str, *, option: str, specs: Iterable[DatasetSpec] = ()) -> Stage:
    """The stage of a partition that has a name.

    Raises:
        ConfigError: there is none, or one of the datasets does not have it; it names the `option`, and what is allowed.
    """
    stages = {stage.name: stage for stage in CHAIN if stage is not MANIFEST}
    if name not in stages:
        detail = f"{name!r} is not a stage; the stages are: {', '.join(stages)}{meant(name, stages)}"
        raise ConfigError("arguments", option, detail)
    for spec in specs:
        if not stages[name].is_made(spec):
            made = ", ".join(stage for stage, found in stages.items() if found.is_made(spec))
            detail = f"{spec.name} has no {name}: its `formats` are {', '.join(spec.formats)}; its stages are: {made}"
            raise ConfigError("arguments", option, detail)
    return stages[name]


def chosen_partitions(state: DatasetState, named: Sequence[str] = (), first: Stage | None = None) -> list[str]:
    """The partitions that a run takes: those named, else with a `first` stage all registered ones, else the pending.

    Those that are published and lack an export are pending too.
    """
    if named:
        return [key for key in named if key in state.partitions]
    return state.incomplete if first is None else sorted(state.partitions)


def given_start(first: Stage | None, *, is_pending: bool) -> Stage | None:
    """The stage that a run of a partition starts at, unless an earlier one is stale; None for the first stale one.

    What is up to date and named runs from the start, unless the run has a `first` stage.
    """
    return first if first is not None or is_pending else RAW_SHARDS


def planned_runs(state: DatasetState, keys: Sequence[str], first: Stage | None = None) -> dict[str, Stale]:
    """Where a run of `chosen_partitions` with a `first` stage starts each, and why; errors as `DatasetState`."""
    pending, exports = set(state.pending), state.pending_exports
    given = {key: given_start(first, is_pending=key in pending or key in exports) for key in keys}
    as_given = {key for key, start in given.items() if start is RAW_SHARDS and key not in pending}
    stale = stale_partitions(state, [key for key in given if key not in as_given])
    wanted = "it is up to date, but was requested"

    def planned(key: str, start: Stage | None) -> Stale:
        if start is None and key in pending:
            return stale[key]
        if start is None:
            return replace(stale[key], reason=f"{' and '.join(exports[key])} is pending")
        if key in as_given:
            return Stale(first=start, reason=wanted)
        found = stale[key]
        if key in pending or CHAIN.index(found.first) < CHAIN.index(start):
            return replace(found, first=min(found.first, start, key=CHAIN.index))
        return Stale(first=start, reason=wanted, failure=found.failure)

    return {key: planned(key, start) for key, start in given.items()}


def registered_runs(found: Registration, keys: Iterable[str]) -> dict[str, Stale]:
    """`planned_runs` of partitions that a registration added or found changed, without reading anything."""
    added = set(found.added)
    return {
        key: Stale(first=RAW_SHARDS, reason="it has never run" if key in added else "its shards changed")
        for key in keys
    }


def by_reason(stale: Mapping[str, Stale]) -> dict[tuple[Stage, str], list[str]]:
    """The keys with the same stage to start at and the same reason, in the order of the chain, the most first."""
    found: dict[tuple[Stage, str], list[str]] = {}
    for key, each in stale.items():
        found.setdefault((each.first, each.reason), []).append(key)
    return dict(sorted(found.items(), key=lambda group: (CHAIN.index(group[0][0]), -len(group[1]), group[0][1])))


def stale_partitions(state: DatasetState, keys: Iterable[str]) -> dict[str, Stale]:
    """Where a run of each of these partitions starts, and why, by their records and attempts.

    Raises:
        SourceError: the storage cannot be read.
    """
    keys = list(keys)
    if not keys:
        return {}
    dataset, store = state.dataset, state.dataset.store
    earlier = {key: state.earlier(key) for key in keys}
    num_read = sum(one.has_attempt or bool(one.recipes) for one in earlier.values())
    folders = (*TABLES, PACKED_FOLDER) if num_read > _FEW else ()
    sizes = {name: size for folder in folders for name, size in store.sizes(folder).items()}
    size = sizes.get if folders else store.size

    def start(key: str) -> Stale:
        return reusable(dataset, state.partitions[key], state.schema, earlier[key], size=size)[0]

    with ThreadPoolExecutor(_READS, thread_name_prefix="records") as pool:
        return dict(zip(keys, pool.map(start, keys), strict=True))


def reusable(
    dataset: DatasetStore,
    partition: Partition,
    schema: DatasetSchema,
    earlier: Earlier,
    *,
    size: Callable[[str], int | None],
    digests: Callable[[], Mapping[str, str]] = dict,
) -> tuple[Stale, Stages]:
    """Where a run of a partition starts, and the records of the stages before, which it reuses.

    Of its attempt and its records that one is taken of which the most can be reused.

    Args:
        dataset: the dataset's folder.
        partition: as registered.
        schema: the dataset's.
        earlier: what earlier runs left.
        size: bytes of a file of the dataset, None if there is none. Stages that read a table verify its digest.
        digests: returns the `content_digest` of each shard by its URL: shards with other fingerprints, whose bytes are
            those that were recorded, are the same. None are returned by default, since that reads the shards.

    Raises:
        SourceError: the storage cannot be read.
    """
    attempt = dataset.attempt(partition.key) if earlier.has_attempt else None
    candidates: list[Stages] = [attempt.stages] if attempt is not None and attempt.stages else []
    for recipe in earlier.recipes[:_MAX_RECORDS]:
        try:
            record = dataset.record(partition.key, recipe)
        except SchemaMismatchError:
            continue
        if record is not None and record.stages:
            candidates.append(record.stages)
    failure = None if attempt is None else attempt.failure
    if not candidates:
        reason = "its first stage has not succeeded yet" if attempt is not None else "it has never run"
        return Stale(first=RAW_SHARDS, reason=reason, failure=failure), {}
    candidates = [_with_present_shards(stages, partition, digests) for stages in candidates]
    made_with = {stage: stage.made_with(dataset.spec, schema) for stage in recorded_stages(dataset.spec)}
    found = [(_first_stale(dataset, partition, stages, made_with, size, attempt), stages) for stages in candidates]
    stale, stages = max(found, key=lambda one: CHAIN.index(one[0].first))
    formats = {stage.packed_format for stage in stages if stage.packed_format is not None}
    if stale.first is PUBLISHED and formats != set(dataset.spec.formats):
        stale = replace(stale, reason="`formats` changed")
    return stale, {
        stage: record
        for stage, record in stages.items()
        if CHAIN.index(stage) < CHAIN.index(stale.first)
        # Of two packed files one may be there.
        or (stale.first.packed_format and not stage_fault(stage, partition, stages, made_with[stage], size=size))
    }


def _with_present_shards(stages: Stages, partition: Partition, digests: Callable[[], Mapping[str, str]]) -> Stages:
    """Returns stages as made from the present shards, if these have the bytes of those that they were made from."""
    indexed, read = stages.get(RAW_SHARDS), stages.get(MATERIALIZED_ROWS)
    if indexed is None or read is None or dict(indexed.inputs) == partition.fingerprints:
        return stages
    recorded = {url: read.inputs.get(url) for url in indexed.inputs}
    if (
        recorded.keys() != partition.fingerprints.keys()
        or any(description_of(indexed.inputs[url]) != description_of(f) for url, f in partition.fingerprints.items())
        or None in recorded.values()
        or indexed.counts["shard_bytes"] != sum(shard.size for shard in partition.shards)
        or digests() != recorded
    ):
        return stages
    return {**stages, RAW_SHARDS: replace(indexed, inputs=partition.fingerprints)}


def _first_stale(
    dataset: DatasetStore,
    partition: Partition,
    stages: Stages,
    made_with: Mapping[Stage, Mapping[str, str]],
    size: Callable[[str], int | None],
    attempt: Attempt | None,
) -> Stale:
    failure = None if attempt is None else attempt.failure
    for stage in recorded_stages(dataset.spec):
        stale = stage_fault(stage, partition, stages, made_with[stage], size=size)
        if stale is None and failure is not None and stage in stages:
            # It was damaged when a later stage read it, or media that it refers to had changed.
            tables = [dataset.store.url_of(stages[stage].files[table.name].path) for table in stage.tables]
            if failure.path in tables:
                has_references = any(table.has_references(dataset.spec) for table in stage.tables)
                media = ", or media that it refers to," if has_references else ""
                stale = Stale(first=stage, reason=f"a table of {stage.name}{media} is not what it was")
        if stale is not None:
            if stage.fetches_again(dataset.spec):
                stale = replace(stale, reason=f"{stale.reason}, and media are read again (`retain`)")
            return replace(stale, failure=failure)
    return Stale(first=PUBLISHED, reason="it is not published", failure=failure)


def stage_fault(
    stage: Stage,
    partition: Partition,
    stages: Stages,
    made_with: Mapping[str, str],
    *,
    size: Callable[[str], int | None],
) -> Stale | None:
    """Why the files of a stage are not what they would be now, its upstream aside, or None; arguments as `reusable`."""
    record = stages.get(stage)
    if stage is RAW_SHARDS and record is not None and dict(record.inputs) != partition.fingerprints:
        return Stale(first=stage, reason="its shards changed")
    if record is None:
        return Stale(first=stage, reason=f"{stage.name} has not been made")
    if reason := stage.changed(record.made_with, made_with):
        return Stale(first=stage, reason=reason)
    failed = [outcome for outcome in record.outcomes if outcome.stops]
    if failed:
        names = ", ".join(outcome.name for outcome in failed)
        detail = "; ".join(outcome.said for outcome in failed)
        return Stale(first=stage, reason=f"{stage.name} failed its check {names}", detail=detail)
    for above in stage.upstream:
        table = above.tables[0].name
        if above not in stages or record.inputs.get(table) != stages[above].files[table].sha256:
            return Stale(first=stage, reason=f"{stage.name} was made from another {table}")
    for file in record.files.values():
        if fault := size_fault(file.size, size(file.path)):
            reason = f"a file of {stage.name} is missing or has another size"
            return Stale(first=stage, reason=reason, detail=f"{file.path} {fault}")
    return None
