"""Which partitions are not up to date, why, and from which stage on they have to run.

The name of a marker has the fingerprint of what made its partition: a partition is up to date if the listing of markers
has the name that its present shards, settings and schema give. Markers are read only where packed files changed since
the last manifest, and records only of partitions that are pending.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_assets.errors import SchemaMismatchError
from mm_assets.pipeline.chain import (
    PACKED_FOLDER,
    PACKED_STAGES,
    PUBLISHED,
    RAW_SHARDS,
    RECORDED_STAGES,
    TABLES,
    Stage,
)
from mm_assets.pipeline.store import (
    RECORDS,
    DatasetStore,
    Partition,
    StageFailure,
    StageRecord,
    canonical_json,
    size_fault,
)
from mm_assets.rows.schema import DatasetSchema

__all__ = [
    "Present",
    "Stale",
    "first_stale",
    "pending_partitions",
    "pending_reasons",
    "stage_fault",
    "stale_partitions",
    "write_index",
]

INDEX = "markers.json"
_INDEX_VERSION = 2
_FEW = 16  # partitions whose files are asked for one by one; of more the folders are listed
_READS = 8  # files of records at a time

Records = Mapping[Stage, StageRecord]
MadeWith = Mapping[Stage, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """Why a partition is not up to date.

    Attributes:
        first: the stage to start at; `PUBLISHED` where only the marker is missing.
        reason: why, a sentence.
        failure: the error that ended its last run, or None.
    """

    first: Stage
    reason: str
    failure: StageFailure | None = None

    @property
    def said(self) -> str:
        """The reason, with that of the failure."""
        if self.failure is None:
            return self.reason
        return f"{self.reason}; its last run failed at {self.failure.stage}: {self.failure.detail}"


class Present:
    """The dataset as it is: what is registered, the markers, and the packed files, each by one listing.

    Args:
        dataset: the dataset's folder.
        schema: the dataset's, if it is known.

    Attributes:
        partitions: by key, as registered.
        names: the markers of each key.
        current: by key, the marker that is up to date.
        packed: name and bytes of each packed file.
        records: the same of each file of records.

    Raises:
        SourceError: the storage could not be read.
    """

    def __init__(self, dataset: DatasetStore, schema: DatasetSchema | None = None) -> None:
        self.dataset = dataset
        self.partitions = dataset.partitions()
        self.names = dataset.marker_names()
        self.packed = dataset.store.sizes(PACKED_FOLDER)
        self.records = dataset.store.sizes(RECORDS)
        schema = schema or (dataset.schema() if self.partitions else DatasetSchema())
        made_with = PUBLISHED.digest(dataset.spec, schema)
        names = {key: dataset.marker_name(key, p.fingerprint(made_with)) for key, p in self.partitions.items()}
        self.current = {key: name for key, name in names.items() if name in self.names.get(key, ())}

    def name(self, key: str) -> str | None:
        """The marker of a partition: the one that is up to date, else any; None where there is none."""
        return self.current.get(key) or next(iter(self.names.get(key, ())), None)

    def markers(self, keys: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """The marker of each partition that has one, by key; errors as `DatasetStore.markers`."""
        wanted = self.names if keys is None else keys
        named = {key: name for key in wanted if (name := self.name(key)) is not None}
        return dict(zip(named, self.dataset.markers(named.values()), strict=True))

    def fault(self, key: str) -> str | None:
        """Why a partition's marker is not up to date, as far as listings show, or None."""
        if key not in self.partitions:
            return "its shards are gone"
        if key in self.current:
            return None
        return "its shards, settings, code or schema changed" if key in self.names else "it is not published"

    def lost_files(self, marker: Mapping[str, Any]) -> str | None:
        """Which packed file of a marker is gone or of another size, or that its records are others now, or None.

        A run that failed, with other settings for instance, has replaced tables and records of the marker.
        """
        for form in PACKED_STAGES:
            file = marker["files"][form]
            if fault := size_fault(file["size"], self.packed.get(file["path"])):
                return f"{file['path']} {fault}"
        if size_fault(marker["record"]["size"], self.records.get(marker["record"]["path"])):
            return "a stage has been made again since it was published"
        return None

    def pending(self) -> list[str]:
        """Registered partitions without an up-to-date marker and its packed files, sorted.

        The sizes of packed files and records are those that the last manifest found in the markers. A marker that it
        did not see, or whose files differ from that, is read.
        """
        known = _index(self.dataset)
        unsure = [key for key, name in self.current.items() if not self._has(known.get(name))]
        lost = {key for key, marker in self.markers(unsure).items() if self.lost_files(marker)}
        return sorted(key for key in self.partitions if key not in self.current or key in lost)

    def _has(self, files: Mapping[str, int] | None) -> bool:
        sizes = self.packed, self.records
        return files is not None and all(any(s.get(path) == size for s in sizes) for path, size in files.items())


def _index(dataset: DatasetStore) -> Mapping[str, Mapping[str, int]]:
    """By the name of a marker, its packed files and records and their bytes; empty where there is no readable index."""
    content = dataset.store.found_bytes(INDEX)
    with suppress(ValueError, KeyError, TypeError):
        value = {} if content is None else json.loads(content)
        if value["version"] == _INDEX_VERSION:
            found: Mapping[str, Mapping[str, int]] = value["markers"]
            return found
    return {}


def write_index(dataset: DatasetStore, markers: Mapping[str, Mapping[str, Any]]) -> None:
    """Stores the packed files and records of markers, by their names: what is pending is known without reading them."""
    packed = {
        name: {f["path"]: f["size"] for f in (*(marker["files"][form] for form in PACKED_STAGES), marker["record"])}
        for name, marker in markers.items()
    }
    content = canonical_json({"version": _INDEX_VERSION, "markers": packed})
    if dataset.store.found_bytes(INDEX) != content:
        dataset.store.write_bytes(INDEX, content)


def pending_partitions(dataset: DatasetStore) -> list[str]:
    """Registered partitions without an up-to-date marker and its packed files, sorted."""
    return Present(dataset).pending()


def pending_reasons(dataset: DatasetStore) -> dict[str, str]:
    """Why each of the `pending_partitions` is one."""
    return {key: stale.said for key, stale in stale_partitions(dataset, pending_partitions(dataset)).items()}


def stale_partitions(dataset: DatasetStore, keys: Iterable[str]) -> dict[str, Stale]:
    """What has to be done to registered partitions, by their records, which are read several at a time.

    Raises:
        SourceError: the storage could not be read, or one is not registered.
    """
    keys = list(keys)
    if not keys:
        return {}
    partitions, schema, store = dataset.partitions(), dataset.schema(), dataset.store
    made_with = {stage: stage.made_with(dataset.spec, schema) for stage in RECORDED_STAGES}
    failed = store.sizes("failures")
    folders = (*TABLES, PACKED_FOLDER) if len(keys) > _FEW else ()
    sizes = {name: size for folder in folders for name, size in store.sizes(folder).items()}

    def size(name: str) -> int | None:
        return sizes.get(name) if folders else store.size(name)

    def found(key: str) -> Stale:
        failure = dataset.failure(key) if dataset.failure_name(key) in failed else None
        try:
            records = dataset.records(key)
        except SchemaMismatchError:
            return Stale(first=RAW_SHARDS, reason="its records cannot be read", failure=failure)
        return first_stale(dataset, partitions[key], records, made_with, size=size, failure=failure)

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
        failure: of its last run. If a table was damaged then, the stage that makes it is stale.
    """
    if not records:
        return Stale(first=RAW_SHARDS, reason="it has never run", failure=failure)
    for stage in RECORDED_STAGES:
        reason = stage_fault(stage, partition, records, made_with[stage], size=size)
        tables = [dataset.store.url_of(dataset.table(table.name, partition.key)) for table in stage.tables]
        if reason is None and failure is not None and failure.path in tables:
            reason = f"a table of {stage.name} is damaged"
        if reason is not None:
            return Stale(first=stage, reason=reason, failure=failure)
    return Stale(first=PUBLISHED, reason="it is not published", failure=failure)


def stage_fault(
    stage: Stage,
    partition: Partition,
    records: Records,
    made_with: Mapping[str, str],
    *,
    size: Callable[[str], int | None],
) -> str | None:
    """Why the files of a stage are not what they would be now, its upstream aside, or None; as `first_stale`."""
    record = records.get(stage)
    if stage is RAW_SHARDS and record is not None and dict(record.inputs) != partition.fingerprints:
        return "its shards changed"
    if record is None:
        return f"{stage.name} has not been made"
    if reason := stage.changed(record.made_with, made_with):
        return reason
    failed = [outcome.name for outcome in record.outcomes if outcome.stops]
    if failed:
        return f"{stage.name} failed its check {', '.join(failed)}"
    for above in stage.upstream:
        table = above.tables[0].name
        if above not in records or record.inputs.get(table) != records[above].files[table].sha256:
            return f"{stage.name} was made from another {table}"
    for file in record.files.values():
        if fault := size_fault(file.size, size(file.path)):
            return f"{file.path} {fault}"
    return None
