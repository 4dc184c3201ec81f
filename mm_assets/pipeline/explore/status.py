"""The state of a dataset: what is published, what a run would do and why, what failed, and what its manifest lists.

It follows from listings and the files of registration; records and attempts are read of the partitions that are not up
to date, or newer than the manifest. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_assets.errors import ConfigError, MmAssetsError, SourceError
from mm_assets.pipeline.chain import PACKED_FOLDER, TABLES
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.added_streams import carried_over
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Partition, StageFailure
from mm_assets.pipeline.state.registration import list_partitions, no_shards, refusal
from mm_assets.pipeline.state.staleness import DatasetState, Stale, stale_partitions
from mm_assets.storage.listing import ShardFile
from mm_assets.storage.urls import is_local, local_path

__all__ = ["DatasetStatus", "ManifestStatus", "Running", "ShardChanges", "dataset_status", "failures"]


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
        digest: its name below ``manifests/``; None if it has no copy there.
        is_damaged: whether ``manifest.json`` is damaged: the rest is of the newest copy below ``manifests/``.
        num_partitions: how many it lists.
        left_out: registered partitions that it does not list, with the reason.
        outdated: partitions whose listed files are not those of their present shards, settings, code and schema, with
            the reason; the next manifest lists them as they are then, or not at all.
    """

    url: str
    digest: str | None
    is_damaged: bool
    num_partitions: int
    left_out: Mapping[str, str]
    outdated: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Which load has claimed a partition.

    Attributes:
        load: id of the load.
        host: name of its host, with its process id if that is known.
    """

    load: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatus:
    """The state of one dataset.

    Attributes:
        dataset: its name.
        url: its folder.
        registered: keys of its partitions, sorted.
        pending: by key, where a run starts a partition that is not up to date, and why.
        exports: by asset of an export, the published partitions that lack it.
        running: by key, the partitions that a load has claimed.
        failures: by key, the error or the checks that ended the latest attempt at a partition.
        num_samples: samples of the partitions that are up to date.
        num_bytes: bytes of the registered ``shards``, and of the ``packed`` files and ``tables`` that are stored.
        versions: digests of the manifests that are stored: each is a version of the dataset.
        is_list_lost: whether partitions were published, but the list of the registered ones is missing.
        shards: how the shards differ from those registered; None where they could not be listed.
        manifest: the newest; None before the first, and if it could not be read.
        missing_streams: by name of an added stream, the partitions of the manifest that lack it.
        refused: why registration, and so a run, will fail until something is done, or None.
        unknown: what could not be read, one line each.
    """

    dataset: str
    url: str
    registered: tuple[str, ...]
    pending: Mapping[str, Stale]
    exports: Mapping[str, tuple[str, ...]]
    running: Mapping[str, Running]
    failures: Mapping[str, StageFailure]
    num_samples: int
    num_bytes: Mapping[str, int]
    versions: tuple[str, ...]
    is_list_lost: bool
    shards: ShardChanges | None
    manifest: ManifestStatus | None
    missing_streams: Mapping[str, tuple[str, ...]]
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
    state = DatasetState(dataset)
    pending = stale_partitions(state, state.pending)
    shards, unknown = None, list[str]()
    manifest, num_samples = None, 0
    missing_streams: Mapping[str, tuple[str, ...]] = {}
    refused: MmAssetsError | None = refusal(dataset)
    try:
        shards = _shard_changes(dataset, state.partitions)
    except SourceError as error:
        unknown.append(str(error))
    exports = {options.asset: list[str]() for options in dataset.spec.exports}
    versions = tuple(name.rpartition("/")[2].removesuffix(".json") for name in dataset.store.sizes("manifests"))
    try:
        manifest = _manifest_status(state, pending, versions)
        missing_streams = carried_over(state, state.listed).missing
        if state.damage is not None:
            unknown.append(f"{state.damage}: `mm-assets run --dataset {dataset.spec.name}` writes it again")
        num_samples = sum(entry.num_samples for entry in state.published().values())
        for key, assets in sorted(state.pending_exports.items()):
            for asset in assets:
                exports[asset].append(key)
    except MmAssetsError as error:  # the manifest cannot be read, or is damaged
        unknown.append(str(error))
    if refused is None and shards is not None and not shards.found:
        refused = no_shards(dataset.spec, shards.skipped, registered=len(state.partitions))
    return DatasetStatus(
        dataset=dataset.spec.name,
        url=dataset.store.url,
        registered=tuple(sorted(state.partitions)),
        pending=pending,
        exports={asset: tuple(keys) for asset, keys in exports.items()},
        running=_running(state),
        failures=failures(state, state.partitions),
        num_samples=num_samples,
        num_bytes=_num_bytes(state),
        versions=versions,
        is_list_lost=not state.partitions and bool(state.records),
        shards=shards,
        manifest=manifest,
        missing_streams=missing_streams,
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


def _running(state: DatasetState) -> dict[str, Running]:
    """The partitions that live claims cover; of those that a claim names, the pending ones unless none is."""
    pending, found = set(state.pending), dict[str, Running]()
    for claim in Claims(state.dataset, "").others():
        covered = [key for key in state.partitions if key in claim]
        active = [key for key in covered if key in pending] or (covered if claim.keys is not None else [])
        found |= dict.fromkeys(active, Running(load=claim.load, host=claim.place))
    return found


def _num_bytes(state: DatasetState) -> dict[str, int]:
    packed, *tables = state.dataset.listings(PACKED_FOLDER, *TABLES)
    return {
        "shards": sum(shard.size for partition in state.partitions.values() for shard in partition.shards),
        "packed": sum(file.size for file in packed.values()),
        "tables": sum(file.size for listed in tables for file in listed.values()),
    }


def failures(state: DatasetState, keys: Iterable[str]) -> dict[str, StageFailure]:
    """Returns why the latest attempts at partitions ended, by key, if by an error or a check.

    Raises:
        SourceError: the storage cannot be read.
    """
    attempts = state.latest(key for key in sorted(keys) if key in state.attempts)
    found = {attempt.partition: attempt.end for attempt in attempts}
    return {key: failure for key, failure in found.items() if failure is not None}


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


def _manifest_status(
    state: DatasetState, pending: Mapping[str, Stale], versions: tuple[str, ...]
) -> ManifestStatus | None:
    if state.manifest is None:
        return None
    left_out, outdated = dict[str, str](), dict[str, str]()
    for key, recipe in sorted(state.recipes.items()):
        entry = state.listed.get(key)
        if key in pending:
            (left_out if entry is None else outdated)[key] = pending[key].reason
        elif entry is None:
            left_out[key] = "published since"
        elif entry.recipe != recipe:
            outdated[key] = "listed with former shards or settings"
    if state.partitions:  # else shards.json is missing, and what is outdated is unknown
        outdated |= dict.fromkeys(sorted(state.listed.keys() - state.partitions.keys()), state.unregistered)
    return ManifestStatus(
        url=state.dataset.store.url_of("manifest.json"),
        digest=state.digest if state.digest in versions else None,
        is_damaged=state.damage is not None,
        num_partitions=len(state.listed),
        left_out=left_out,
        outdated=outdated,
    )
