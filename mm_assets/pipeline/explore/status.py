"""The state of a dataset: what is published, what a run would do and why, what failed, and what its manifest lists.

It follows from listings and the files of registration; records and failures are read of the partitions that are not up
to date, markers only where the last manifest did not see them as they are. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mm_assets.errors import ConfigError, MmAssetsError, SourceError
from mm_assets.pipeline.chain import TABLES
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.added_streams import set_aside_streams
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.leases import Leases
from mm_assets.pipeline.state.manifests import partitions_in_manifest
from mm_assets.pipeline.state.records import Partition, StageFailure
from mm_assets.pipeline.state.registration import list_partitions, no_shards, refusal
from mm_assets.pipeline.state.staleness import Present, Stale, stale_partitions
from mm_assets.storage.listing import ShardFile
from mm_assets.storage.urls import is_local, local_path

__all__ = ["DatasetStatus", "ManifestStatus", "Running", "ShardChanges", "dataset_status"]

_READS = 8  # failures, or leases, at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChanges:
    """How the shards differ from those registered, by their listing; keys of partitions.

    Attributes:
        new: not registered.
        changed: of another size, ETag or modification time.
        touched: local shards of the same size with other times: registration compares their bytes.
        gone: registered, and without shards.
        unsettled: with a shard that is too young to be registered.
        skipped: a sentence for each file that is in no partition.
        found: how many partitions have shards.
    """

    new: tuple[str, ...]
    changed: tuple[str, ...]
    touched: tuple[str, ...]
    gone: tuple[str, ...]
    unsettled: tuple[str, ...]
    skipped: tuple[str, ...]
    found: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestStatus:
    """What the newest manifest lists.

    Attributes:
        url: where it is.
        digest: its name below ``manifests/``; None where another release made it.
        num_partitions: how many it lists.
        left_out: registered partitions that it does not list, with the reason.
        outdated: partitions whose listed files are not those of their present shards, settings, code and schema, with
            the reason; the next manifest lists them as they are then, or not at all.
    """

    url: str
    digest: str | None
    num_partitions: int
    left_out: Mapping[str, str]
    outdated: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Who is working on a partition, by its lease.

    Attributes:
        host: name of the host.
        run: id of the run.
    """

    host: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatus:
    """The state of one dataset.

    Attributes:
        dataset: its name.
        url: its folder.
        registered: keys of its partitions, sorted.
        pending: by key, where a run starts a partition that is not up to date, and why.
        running: by key, the partitions that a run is working on.
        failures: by key, the error that ended the last run of a partition.
        num_samples: samples of the partitions that are up to date.
        num_bytes: bytes of the registered ``shards``, and of the ``packed`` files and ``tables`` that are stored.
        versions: digests of the manifests that are stored: each is a version of the dataset.
        is_list_lost: whether partitions were published, and the list of the registered ones is gone.
        shards: how the shards differ from those registered; None where they could not be listed.
        manifest: the newest; None before the first, and where it could not be read.
        set_aside: by name, the partitions with an added stream that `formats` leaves out.
        refused: why registration, and so a run, will fail until something is done, or None.
        unknown: what could not be read, one line each.
    """

    dataset: str
    url: str
    registered: tuple[str, ...]
    pending: Mapping[str, Stale]
    running: Mapping[str, Running]
    failures: Mapping[str, StageFailure]
    num_samples: int
    num_bytes: Mapping[str, int]
    versions: tuple[str, ...]
    is_list_lost: bool
    shards: ShardChanges | None
    manifest: ManifestStatus | None
    set_aside: Mapping[str, tuple[str, ...]]
    refused: MmAssetsError | None
    unknown: tuple[str, ...]

    @property
    def num_published(self) -> int:
        """Partitions that are up to date."""
        return len(self.registered) - len(self.pending)


def dataset_status(dataset: DatasetStore) -> DatasetStatus:
    """Finds out the state of a dataset, which may not be registered yet.

    Raises:
        ConfigError: the root is a folder that cannot exist.
        MmAssetsError: the dataset's folder could not be read.
    """
    _expect_possible(dataset.spec)
    present = Present(dataset)
    pending = stale_partitions(present, present.pending())
    shards, manifest, unknown = None, None, list[str]()
    refused: MmAssetsError | None = refusal(dataset)
    try:
        shards = _shard_changes(dataset, present.partitions)
    except SourceError as error:
        unknown.append(str(error))
    try:
        manifest = _manifest_status(present, pending)
    except SourceError as error:
        unknown.append(str(error))
    if refused is None and shards is not None and not shards.found:
        refused = no_shards(dataset.spec, shards.skipped, registered=len(present.partitions))
    published = present.published()
    return DatasetStatus(
        dataset=dataset.spec.name,
        url=dataset.store.url,
        registered=tuple(sorted(present.partitions)),
        pending=pending,
        running=_running(dataset),
        failures=_failures(present, pending),
        num_samples=sum(marker.num_samples for key, marker in published.items() if key not in pending),
        num_bytes=_num_bytes(present),
        versions=tuple(name.rpartition("/")[2].removesuffix(".json") for name in dataset.store.sizes("manifests")),
        is_list_lost=not present.partitions and bool(present.names),
        shards=shards,
        manifest=manifest,
        set_aside=set_aside_streams(published.values()),
        refused=refused,
        unknown=tuple(unknown),
    )


def _expect_possible(spec: DatasetSpec) -> None:
    """Raises `ConfigError` for a local root that no run could make: an empty status would hide a wrong name."""
    if not is_local(spec.root):
        return
    root = local_path(spec.root)
    nearest = next((folder for folder in (root, *root.parents) if os.path.lexists(folder)), Path("/"))
    if nearest.is_dir() and (nearest == root or os.access(nearest, os.W_OK | os.X_OK)):
        return
    why = "may not be written to" if nearest.is_dir() else "is not a folder"
    raise ConfigError(spec.where, "root", f"{spec.root!r} is not there and cannot be made: {nearest} {why}")


def _running(dataset: DatasetStore) -> dict[str, Running]:
    """The partitions whose lease is valid."""
    names = [name.rpartition("/")[2].removesuffix(".json") for name in dataset.store.sizes("leases")]
    with Leases(dataset, "") as leases, ThreadPoolExecutor(_READS, thread_name_prefix="leases") as pool:
        found = zip(names, pool.map(leases.live, names), strict=True)
        return {
            name: Running(host=lease.owner.partition("/")[0], run=lease.run)
            for name, lease in found
            if lease is not None
        }


def _num_bytes(present: Present) -> dict[str, int]:
    tables = present.dataset.listings(*TABLES)
    return {
        "shards": sum(shard.size for partition in present.partitions.values() for shard in partition.shards),
        "packed": sum(present.packed.values()),
        "tables": sum(file.size for listed in tables for file in listed.values()),
    }


def _failures(present: Present, pending: Mapping[str, Stale]) -> dict[str, StageFailure]:
    """The stored failures of registered partitions; those of pending ones have been read."""
    dataset, stored = present.dataset, present.dataset.store.sizes("failures")
    keys = [key for key in sorted(present.partitions) if dataset.failure_name(key) in stored]

    def failure(key: str) -> StageFailure | None:
        return pending[key].failure if key in pending else dataset.failure(key)

    with ThreadPoolExecutor(_READS, thread_name_prefix="failures") as pool:
        return {key: found for key, found in zip(keys, pool.map(failure, keys), strict=True) if found is not None}


def _shard_changes(dataset: DatasetStore, registered: Mapping[str, Partition]) -> ShardChanges:
    settled, unsettled, _, skipped = list_partitions(dataset.spec, known=registered.values())
    waiting = {partition.key for partition in unsettled}
    found = {partition.key: partition for partition in settled}
    known = [key for key in found if key in registered]
    changed = {key for key in known if _differs(registered[key], found[key])}
    touched = {key for key in known if key not in changed and _is_touched(registered[key], found[key])}
    return ShardChanges(
        new=tuple(sorted(found.keys() - registered.keys())),
        changed=tuple(sorted(changed)),
        touched=tuple(sorted(touched)),
        gone=tuple(sorted(registered.keys() - found.keys() - waiting)),
        unsettled=tuple(sorted(waiting)),
        skipped=skipped,
        found=len(settled) + len(unsettled),
    )


def _differs(before: Partition, found: Partition) -> bool:
    """Whether other shards are certain: registration takes a local one of the same size for the same by its bytes."""
    shards = {shard.url: shard for shard in before.shards}
    if shards.keys() != {shard.url for shard in found.shards}:
        return True
    return any(_is_other(shards[shard.url], shard) for shard in found.shards)


def _is_other(before: ShardFile, found: ShardFile) -> bool:
    return found.size != before.size if found.times is not None else found.fingerprint != before.fingerprint


def _is_touched(before: Partition, found: Partition) -> bool:
    times = {shard.url: shard.times for shard in before.shards}
    return any(shard.times != times[shard.url] for shard in found.shards)


def _manifest_status(present: Present, pending: Mapping[str, Stale]) -> ManifestStatus | None:
    store = present.dataset.store
    if not store.exists("manifest.json"):
        return None
    listed = partitions_in_manifest(present.dataset)
    # A manifest stores which markers it saw.
    unseen = {key for key, name in present.current.items() if key not in pending and name not in present.cache.seen}
    left_out = {key: pending[key].fault.reason for key in pending if key not in listed}
    left_out |= dict.fromkeys(sorted(unseen - listed), "it was published since")
    outdated = dict.fromkeys(sorted(listed - present.partitions.keys()), present.unregistered)
    outdated |= {key: pending[key].fault.reason for key in pending if key in listed}
    if present.cache.seen:  # else another release made the manifest
        outdated |= dict.fromkeys(sorted(unseen & listed), "it was published again since")
    return ManifestStatus(
        url=store.url_of("manifest.json"),
        digest=None if present.cache.manifest is None else present.cache.manifest.digest,
        num_partitions=len(listed),
        left_out=left_out,
        outdated=outdated,
    )
