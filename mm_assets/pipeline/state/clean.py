"""Cleaning up: removes the files of a dataset's folder that nothing needs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mm_assets.dataset.manifest import PACKED_NAME
from mm_assets.errors import SchemaMismatchError
from mm_assets.pipeline.chain import (
    PACKED_FOLDER,
    PUBLISHED,
    TABLES,
)
from mm_assets.pipeline.state.folder import RECORDS, DatasetStore
from mm_assets.pipeline.state.leases import Leases
from mm_assets.pipeline.state.staleness import Present
from mm_assets.pipeline.state.version_facts import surplus_facts
from mm_assets.storage.store import Store

__all__ = ["CleanReport", "clean"]

_PACKED_PATH = re.compile(f"{PACKED_FOLDER}/{PACKED_NAME.pattern}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport:
    """The files that cleaning removed, and their bytes."""

    files: tuple[str, ...]
    num_bytes: int


def clean(dataset: DatasetStore, *, keep: int | None = None, dry_run: bool = False) -> CleanReport:
    """Removes packed files and manifests that are not needed, and tables and markers of partitions that are gone.

    A packed file is needed by a remaining manifest, the marker of a registered partition, or the partition's records;
    those of a partition at work remain.

    Args:
        dataset: the dataset's folder.
        keep: manifests that remain, the newest among them; None takes the declaration's.
        dry_run: report only.

    Raises:
        SourceError: the storage could not be read, or a marker of a partition with packed files that are not needed is
            damaged.
    """
    store = dataset.store
    keep = dataset.spec.keep_manifests if keep is None else max(keep, 1)
    newest = store.read_bytes("manifest.json") if store.exists("manifest.json") else b""
    current = f"manifests/{hashlib.sha256(newest).hexdigest()}.json"
    manifests = sorted(store.sizes("manifests"), key=lambda name: (name != current, -_modified(store, name), name))
    present = Present(dataset)
    needed = {path for name in manifests[:keep] for path in _packed_of(store, name)}
    for marker in present.published().values():
        needed |= {path for path, _ in marker.served_files()}
        if marker.added is not None:
            needed.add(marker.added["file"]["path"])
    sizes = {**store.sizes(PACKED_FOLDER), **store.sizes("manifests")}
    registered = dataset.partitions()  # after the files, since others may have been registered meanwhile
    surplus: dict[str, list[str]] = {}
    for name in sizes.keys() - needed:
        if packed := _PACKED_PATH.fullmatch(name):
            surplus.setdefault(packed[1], []).append(name)
    doomed = [name for key in sorted(surplus.keys() - registered.keys()) for name in sorted(surplus[key])]
    leases = Leases(dataset, "clean")
    for key in sorted(surplus.keys() & registered.keys()):
        if leases.live(key) is not None:  # a run that names its packed files when all of them are there
            continue
        # No stream is added to it meanwhile, and no marker of it withdrawn.
        with dataset.markers_held(key):
            needed = _packed_by(dataset, key, present.names.get(key, ()))
            unneeded = [name for name in sorted(surplus[key]) if name not in needed]
            for name in unneeded if not dry_run else ():
                store.delete(name)
        doomed += unneeded
    doomed += manifests[keep:]
    facts = surplus_facts(dataset, manifests[:keep])
    doomed += facts
    sizes |= facts
    markers = store.sizes(PUBLISHED.name)
    for name in (name for key, names in present.names.items() if key not in registered for name in names):
        doomed.append(name)
        sizes[name] = markers[name]
    for folder in (*TABLES, RECORDS):
        listed = store.sizes(folder)
        registered = dataset.partitions()
        for name, size in listed.items():
            if name.rsplit("/", 1)[-1].rsplit(".", 1)[0] not in registered:
                doomed.append(name)
                sizes[name] = size
    if not dry_run:
        for name in doomed:
            store.delete(name)
    return CleanReport(
        files=tuple(doomed),
        num_bytes=sum(sizes[name] for name in doomed),
    )


def _packed_by(dataset: DatasetStore, key: str, listed: Iterable[str]) -> set[str]:
    """The packed files that the records and markers of a partition name, also those whose run is not at its end.

    Raises:
        SourceError: they cannot be read.
        SchemaMismatchError: they are damaged: which files are needed is not known.
    """
    records, store = dataset.records(key), dataset.store
    needed = {file.path for stage, made in records.items() if stage.packed_format for file in made.files.values()}
    for name in listed:
        snapshots = map(store.snapshot, (name, dataset.withdrawn_name(name)))
        marker = next(filter(None, map(dataset.marker_in, snapshots)), None)
        if marker is None:  # another process has replaced it since
            return _packed_by(dataset, key, dataset.marker_names().get(key, ()))
        needed |= {file["path"] for file in marker["files"].values()}
        if marker.get("added"):
            needed.add(marker["added"]["file"]["path"])
    return needed


def _modified(store: Store, name: str) -> float:
    """When a file was written, in seconds since 1970; 0 where the file system does not say."""
    info = store.fs.info(store.path_of(name))
    when = info.get("mtime") or info.get("LastModified") or info.get("created") or 0
    return when.timestamp() if hasattr(when, "timestamp") else float(when)


def _packed_of(store: Store, name: str) -> list[str]:
    try:
        manifest = json.loads(store.read_bytes(name))
        return [file["path"] for shard in manifest["shards"] for file in shard["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # The files that it needs are not known, so none may be removed.
        raise SchemaMismatchError(f"{store.url_of(name)}: not a manifest: {error!r}") from error
