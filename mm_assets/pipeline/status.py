"""The state of a dataset: what is published, what a run would do and why, what failed, and what its manifest lists.

It follows from listings and the files of registration; records and failures are read of the partitions that are not up
to date, markers only where the last manifest did not see them as they are. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.pipeline.added_streams import set_aside_streams
from mm_assets.pipeline.pending import Present, Stale, stale_partitions
from mm_assets.pipeline.publish import partitions_in_manifest
from mm_assets.pipeline.records import Partition, StageFailure
from mm_assets.pipeline.register import list_partitions, no_shards, refusal
from mm_assets.pipeline.store import DatasetStore
from mm_assets.storage.listing import ShardFile

__all__ = ["DatasetStatus", "ManifestStatus", "ShardChanges", "dataset_status"]

_READS = 8  # failures at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChanges:
    """How the shards differ from those registered, by their listing; keys of partitions.

    Attributes:
        new: not registered.
        changed: of another size, ETag or modification time.
        touched: local shards of the same size with other times: registration compares their bytes.
        gone: registered, and without shards.
        unsettled: with a shard that is too young to be registered.
        found: how many partitions have shards.
    """

    new: tuple[str, ...]
    changed: tuple[str, ...]
    touched: tuple[str, ...]
    gone: tuple[str, ...]
    unsettled: tuple[str, ...]
    found: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestStatus:
    """What the newest manifest lists.

    Attributes:
        url: where it is.
        num_partitions: how many it lists.
        left_out: registered partitions that it does not list, with the reason.
        outdated: partitions whose listed files are not those of their present shards, settings, code and schema, with
            the reason; the next manifest lists them as they are then, or not at all.
    """

    url: str
    num_partitions: int
    left_out: Mapping[str, str]
    outdated: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatus:
    """The state of one dataset.

    Attributes:
        dataset: its name.
        url: its folder.
        registered: keys of its partitions, sorted.
        pending: by key, where a run starts a partition that is not up to date, and why.
        failures: by key, the error that ended the last run of a partition.
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
    failures: Mapping[str, StageFailure]
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
        MmAssetsError: the dataset's folder could not be read.
    """
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
        refused = no_shards(dataset.spec, registered=len(present.partitions))
    return DatasetStatus(
        dataset=dataset.spec.name,
        url=dataset.store.url,
        registered=tuple(sorted(present.partitions)),
        pending=pending,
        failures=_failures(present, pending),
        shards=shards,
        manifest=manifest,
        set_aside=set_aside_streams(present.published().values()),
        refused=refused,
        unknown=tuple(unknown),
    )


def _failures(present: Present, pending: Mapping[str, Stale]) -> dict[str, StageFailure]:
    """The stored failures of registered partitions; those of pending ones have been read."""
    dataset, stored = present.dataset, present.dataset.store.sizes("failures")
    keys = [key for key in sorted(present.partitions) if dataset.failure_name(key) in stored]

    def failure(key: str) -> StageFailure | None:
        return pending[key].failure if key in pending else dataset.failure(key)

    with ThreadPoolExecutor(_READS, thread_name_prefix="failures") as pool:
        return {key: found for key, found in zip(keys, pool.map(failure, keys), strict=True) if found is not None}


def _shard_changes(dataset: DatasetStore, registered: Mapping[str, Partition]) -> ShardChanges:
    settled, unsettled, _ = list_partitions(dataset.spec)
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
        url=store.url_of("manifest.json"), num_partitions=len(listed), left_out=left_out, outdated=outdated
    )
