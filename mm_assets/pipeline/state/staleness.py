"""Which partitions are not up to date, why, and from which stage on they have to run.

The name of a marker has the fingerprint of what made its partition: a partition is up to date if the listing of markers
has the name that its present shards, settings and schema give. Markers are read only where they changed since the last
manifest, and records only of partitions that are pending.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mm_assets.errors import ConfigError, SchemaMismatchError, meant
from mm_assets.pipeline.chain import (
    CHAIN,
    MANIFEST,
    PACKED_FOLDER,
    PUBLISHED,
    RAW_SHARDS,
    TABLES,
    Stage,
    recorded_stages,
)
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import RECORDS, WITHDRAWN, DatasetStore
from mm_assets.pipeline.state.markers import Marker, Markers
from mm_assets.pipeline.state.records import Partition, StageFailure, StageRecord, size_fault
from mm_assets.pipeline.state.registration import Registration
from mm_assets.rows.schema import DatasetSchema

__all__ = [
    "Fault",
    "Present",
    "Stale",
    "by_fault",
    "chosen_partitions",
    "first_stale",
    "given_start",
    "lost_files",
    "pending_partitions",
    "pending_reasons",
    "planned_runs",
    "registered_runs",
    "stage_fault",
    "stage_named",
    "stale_partitions",
]

_FEW = 16  # partitions whose files are asked for one by one; of more the folders are listed
_READS = 8  # files of records at a time

Records = Mapping[Stage, StageRecord]
MadeWith = Mapping[Stage, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why files are not what they would be now.

    Attributes:
        reason: a sentence that is the same for every partition with the same fault.
        detail: which file, or what a check found; empty where the reason says all.
    """

    reason: str
    detail: str = ""

    @property
    def said(self) -> str:
        """Both."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """Why a partition has to run.

    Attributes:
        first: the stage to start at; the first of the packed ones that are stale, which alone are made again; or
            `PUBLISHED` where only the marker is missing.
        fault: why.
        failure: the error that ended its last run, or None.
    """

    first: Stage
    fault: Fault
    failure: StageFailure | None = None

    @property
    def said(self) -> str:
        """The fault, with the failure."""
        if self.failure is None:
            return self.fault.said
        return f"{self.fault.said}; its last run failed at {self.failure.stage}: {self.failure.detail}"


class Present:
    """The dataset as it is: what is registered, the markers, and the packed files, each by one listing.

    Args:
        dataset: the dataset's folder.
        schema: the dataset's, if it is known.
        partitions: the registered ones, if they are known; or those that would be.
        known: the dataset as it was a moment ago: markers that have not changed are not read again.

    Attributes:
        partitions: by key, as registered.
        schema: the dataset's; an empty one where no partition is registered.
        names: the markers of each key.
        current: by key, the marker that is up to date.
        packed: name and bytes of each packed file.
        records: the same of each file of records.
        cache: what is known of the markers.

    Raises:
        SourceError: the storage could not be read.
    """

    def __init__(
        self,
        dataset: DatasetStore,
        schema: DatasetSchema | None = None,
        *,
        partitions: Mapping[str, Partition] | None = None,
        known: Present | None = None,
    ) -> None:
        self.dataset = dataset
        registered = dataset.registered() if partitions is None else None
        self.partitions: Mapping[str, Partition] = partitions or {} if registered is None else registered.partitions
        markers, packed, records = dataset.listings(PUBLISHED.name, PACKED_FOLDER, RECORDS)
        self.names = dataset.marker_names(markers)
        self.packed = {name: file.size for name, file in packed.items()}
        self.records = {name: file.size for name, file in records.items()}
        self._sizes = ChainMap(self.packed, self.records)
        self.cache: Markers = Markers(dataset, markers, None if known is None else known.cache)
        self.schema = schema or (dataset.schema(registered) if self.partitions else DatasetSchema())
        made_with = PUBLISHED.digest(dataset.spec, self.schema)
        names = {key: dataset.marker_name(key, p.fingerprint(made_with)) for key, p in self.partitions.items()}
        self.current = {key: name for key, name in names.items() if name in self.names.get(key, ())}

    def name(self, key: str) -> str | None:
        """The marker of a partition: the one that is up to date, else any that is not withdrawn, else None."""
        listed = (name for name in self.names.get(key, ()) if not name.endswith(WITHDRAWN))
        return self.current.get(key) or next(listed, None)

    def markers(self, keys: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """The marker of each partition that has one, by key; errors as `DatasetStore.markers`."""
        wanted = self.names if keys is None else keys
        named = {key: name for key in wanted if (name := self.name(key)) is not None}
        return dict(zip(named, self.dataset.markers(named.values()), strict=True))

    def published(self) -> dict[str, Marker]:
        """What counts of each marker that is up to date and not damaged, by key; errors as `Markers.read`."""
        found = self.cache.read(self.current.values())
        return {key: found[name] for key, name in self.current.items() if name in found}

    def fault(self, key: str) -> str | None:
        """Why a partition's marker is not up to date, as far as listings show, or None."""
        if key not in self.partitions:
            return self.unregistered if key in self.names else "it is not registered"
        if key in self.current:
            return None
        if key not in self.names:
            return "it is not published"
        if all(name.endswith(WITHDRAWN) for name in self.names[key]):
            return "its files are not those that were published"
        return "it is not published with its present shards, settings, code and schema"

    @property
    def unregistered(self) -> str:
        """Why a published partition is not a registered one."""
        return "its shards are gone" if self.partitions else "shards.json is missing, so no partition is registered"

    def lost_files(self, marker: Marker) -> str | None:
        """As `lost_files`, by the listings."""
        return lost_files(marker, self._sizes.get)

    def pending(self) -> list[str]:
        """Registered partitions without an up-to-date marker and its packed files, sorted; errors as `published`."""
        return list(self._pending)

    @cached_property
    def _pending(self) -> list[str]:
        complete = {key for key, marker in self.published().items() if not self.lost_files(marker)}
        return sorted(self.partitions.keys() - complete)


def lost_files(marker: Marker, size_of: Callable[[str], int | None]) -> str | None:
    """Which packed file of a marker is gone or of another size, or that its records are others now, or None.

    A run that failed, with other settings for instance, has replaced tables and records of the marker.

    Args:
        marker: the marker.
        size_of: bytes of a file of the dataset, None where there is none.
    """
    for path, size in marker.served_files():
        if fault := size_fault(size, size_of(path)):
            return f"{path} {fault}"
    if size_fault(marker.record[0], size_of(DatasetStore.records_name(marker.key))):
        return "a stage has been made again since it was published"
    return None


def pending_partitions(dataset: DatasetStore) -> list[str]:
    """Registered partitions without an up-to-date marker and its packed files, sorted."""
    return Present(dataset).pending()


def pending_reasons(present: Present) -> dict[str, str]:
    """Why each of the pending partitions is one."""
    return {key: stale.said for key, stale in stale_partitions(present, present.pending()).items()}


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


def chosen_partitions(present: Present, named: Sequence[str] = (), first: Stage | None = None) -> list[str]:
    """The partitions that a run takes: those named, else with a `first` stage all registered ones, else the pending."""
    if named:
        return [key for key in named if key in present.partitions]
    return present.pending() if first is None else sorted(present.partitions)


def given_start(first: Stage | None, *, is_pending: bool) -> Stage | None:
    """The stage that a run of a partition starts at, unless an earlier one is stale; None for the first stale one.

    What is up to date and named runs from the start, unless the run has a `first` stage.
    """
    return first if first is not None or is_pending else RAW_SHARDS


def planned_runs(present: Present, keys: Sequence[str], first: Stage | None = None) -> dict[str, Stale]:
    """Where a run of `chosen_partitions` with a `first` stage starts each of them, and why; errors as `Present`."""
    pending = set(present.pending())
    given = {key: given_start(first, is_pending=key in pending) for key in keys}
    as_given = {key for key, start in given.items() if start is RAW_SHARDS and key not in pending}
    stale = stale_partitions(present, [key for key in given if key not in as_given])
    wanted = Fault("it is up to date; an option runs it again")

    def planned(key: str, start: Stage | None) -> Stale:
        if start is None:
            return stale[key]
        if key in as_given:
            return Stale(first=start, fault=wanted)
        found = stale[key]
        fault = found.fault if key in pending or CHAIN.index(found.first) < CHAIN.index(start) else wanted
        return Stale(first=min(found.first, start, key=CHAIN.index), fault=fault, failure=found.failure)

    return {key: planned(key, start) for key, start in given.items()}


def registered_runs(found: Registration, keys: Iterable[str]) -> dict[str, Stale]:
    """`planned_runs` of partitions that a registration added or found changed, without reading anything."""
    added = set(found.added)
    reasons = {key: "it has never run" if key in added else "its shards changed" for key in keys}
    return {key: Stale(first=RAW_SHARDS, fault=Fault(reason)) for key, reason in reasons.items()}


def by_fault(stale: Mapping[str, Stale]) -> dict[tuple[Stage, str], list[str]]:
    """The keys with the same stage to start at and the same reason, in the order of the chain, the most first."""
    found: dict[tuple[Stage, str], list[str]] = {}
    for key, each in stale.items():
        found.setdefault((each.first, each.fault.reason), []).append(key)
    return dict(sorted(found.items(), key=lambda group: (CHAIN.index(group[0][0]), -len(group[1]), group[0][1])))


def stale_partitions(present: Present, keys: Iterable[str]) -> dict[str, Stale]:
    """What has to be done to registered partitions, by their records, which are read several at a time.

    Raises:
        SourceError: the storage could not be read.
    """
    keys = list(keys)
    if not keys:
        return {}
    dataset, store = present.dataset, present.dataset.store
    made_with = {stage: stage.made_with(dataset.spec, present.schema) for stage in recorded_stages(dataset.spec)}
    failed = store.sizes("failures")
    folders = TABLES if len(keys) > _FEW else ()
    sizes = {**present.packed, **{name: size for folder in folders for name, size in store.sizes(folder).items()}}

    def size(name: str) -> int | None:
        return sizes.get(name) if folders or name in sizes else store.size(name)

    def found(key: str) -> Stale:
        failure = dataset.failure(key) if dataset.failure_name(key) in failed else None
        try:
            records = dataset.records(key)
        except SchemaMismatchError:
            return Stale(first=RAW_SHARDS, fault=Fault("its records cannot be read"), failure=failure)
        stale = first_stale(dataset, present.partitions[key], records, made_with, size=size, failure=failure)
        if stale.first is PUBLISHED and (name := present.name(key)) is not None:
            marker = present.cache.read([name]).get(name)  # none if it is damaged
            if marker is not None and marker.packed.keys() != set(dataset.spec.formats):
                return replace(stale, fault=Fault("`formats` changed"))
        return stale

    with ThreadPoolExecutor(_READS, thread_name_prefix="records") as pool:
        return dict(zip(keys, pool.map(found, keys), strict=True))


def first_stale(
    dataset: DatasetStore,
    partition: Partition,
    records: Records,
    made_with: MadeWith,
    *,
    size: Callable[[str], int | None],
    failure: StageFailure | None = None,
) -> Stale:
    """The first stage of a partition whose files are not what they would be now.

    Args:
        dataset: the dataset's folder.
        partition: as registered.
        records: of the stages that have run.
        made_with: `Stage.made_with` of each recorded stage at present.
        size: bytes of a file of the dataset, None where there is none. Stages that read a table verify its digest.
        failure: of its last run. If a table was damaged then, or media that it refers to had changed, the stage that
            makes it is stale.
    """
    if not records:
        reason = "it has never run" if failure is None else "its first stage has not succeeded yet"
        return Stale(first=RAW_SHARDS, fault=Fault(reason), failure=failure)
    for stage in recorded_stages(dataset.spec):
        fault = stage_fault(stage, partition, records, made_with[stage], size=size)
        tables = [dataset.store.url_of(dataset.table(table.name, partition.key)) for table in stage.tables]
        if fault is None and failure is not None and failure.path in tables:
            has_references = any(table.has_references(dataset.spec) for table in stage.tables)
            media = ", or media that it refers to," if has_references else ""
            fault = Fault(f"a table of {stage.name}{media} is not what it was")
        if fault is not None:
            if stage.fetches_again(dataset.spec):
                fault = replace(fault, reason=f"{fault.reason}, and media are read again (`retain`)")
            return Stale(first=stage, fault=fault, failure=failure)
    return Stale(first=PUBLISHED, fault=Fault("it is not published"), failure=failure)


def stage_fault(
    stage: Stage,
    partition: Partition,
    records: Records,
    made_with: Mapping[str, str],
    *,
    size: Callable[[str], int | None],
) -> Fault | None:
    """Why the files of a stage are not what they would be now, its upstream aside, or None; as `first_stale`."""
    record = records.get(stage)
    if stage is RAW_SHARDS and record is not None and dict(record.inputs) != partition.fingerprints:
        return Fault("its shards changed")
    if record is None:
        return Fault(f"{stage.name} has not been made")
    if reason := stage.changed(record.made_with, made_with):
        return Fault(reason)
    failed = [outcome for outcome in record.outcomes if outcome.stops]
    if failed:
        names = ", ".join(outcome.name for outcome in failed)
        return Fault(f"{stage.name} failed its check {names}", "; ".join(outcome.said for outcome in failed))
    for above in stage.upstream:
        table = above.tables[0].name
        if above not in records or record.inputs.get(table) != records[above].files[table].sha256:
            return Fault(f"{stage.name} was made from another {table}")
    for file in record.files.values():
        if fault := size_fault(file.size, size(file.path)):
            return Fault(f"a file of {stage.name} is gone or of another size", f"{file.path} {fault}")
    return None
