"""Versions of a dataset: manifests, each of which lists the partitions whose marker matches their records and files.

A manifest never names a missing file.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_assets.dataset.manifest import PACKED_NAME, make_manifest
from mm_assets.errors import ChangedError, SourceError
from mm_assets.pipeline.chain import (
    FILTERED_ROWS,
    PACKED_FOLDER,
    PUBLISHED,
    TABLES,
    packed_files,
)
from mm_assets.pipeline.state.added_streams import FORMAT as GROWING_FORMAT
from mm_assets.pipeline.state.added_streams import added_streams, with_added_streams
from mm_assets.pipeline.state.duplicate_ids import duplicate_ids
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import sum_losses
from mm_assets.pipeline.state.markers import Listed, Marker
from mm_assets.pipeline.state.records import canonical_json, digest_fault, size_fault
from mm_assets.pipeline.state.sql_views import catalog_text
from mm_assets.pipeline.state.staleness import Present, lost_files
from mm_assets.pipeline.state.version_facts import note_facts

__all__ = [
    "ManifestReport",
    "build_manifest",
    "current_manifest",
    "missing_streams",
    "partitions_in_manifest",
]

_LOOKED_AT_SECONDS = 86_400.0
_LISTINGS = 3  # of folders with a file of each partition at a time
_ATTEMPTS = 5  # to make a manifest while other processes do the same
_PACKED_PATH = re.compile(f"{PACKED_FOLDER}/{PACKED_NAME.pattern}")


def partitions_in_manifest(dataset: DatasetStore) -> frozenset[str]:
    """The partitions that the newest manifest lists; none before the first one.

    Raises:
        SourceError: the manifest cannot be read.
    """
    if not dataset.store.exists("manifest.json"):
        return frozenset()
    try:
        shards = json.loads(dataset.store.read_bytes("manifest.json"))["shards"]
        return frozenset(shard["partition"] for shard in shards)
    except (ValueError, KeyError, TypeError) as error:
        url = dataset.store.url_of("manifest.json")
        raise SourceError(url, "is not a manifest: `mm-assets run` makes it again") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReport:
    """A dataset version as built.

    Attributes:
        digest: SHA-256 of the manifest, hexadecimal: its name below ``manifests/``.
        manifest: its content.
        url: where the copy of the newest is.
        present: the dataset as it lists it.
        left_out: partitions that are not in it, with the reason.
        missing_streams: added stream to the partitions in it that lack or lost it. Where partitions differ in added
            streams, it lists the files without any.
    """

    digest: str
    manifest: Mapping[str, Any]
    url: str
    present: Present
    left_out: Mapping[str, str]
    missing_streams: Mapping[str, tuple[str, ...]]


def build_manifest(dataset: DatasetStore, known: Present | None = None) -> ManifestReport:
    """Lists the published partitions whose marker matches their shards, records and files, as a new dataset version.

    A partition whose files are not what its marker says becomes pending.

    Where another process makes a manifest at the same time, the later one is made again, of all markers.

    Args:
        dataset: the dataset's folder.
        known: the dataset as it was before: markers that have not changed are not read again.

    Raises:
        SourceError: the dataset is not registered, or the storage could not be read.
        ChangedError: other processes made manifests each time that this one was about to be published.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(ChangedError):
            return _build_manifest(dataset, known)
    return _build_manifest(dataset, known)


def _build_manifest(dataset: DatasetStore, known: Present | None) -> ManifestReport:
    store = dataset.store
    listing = store.listing("")
    # Before the markers: a manifest of newer ones is not replaced.
    newest = store.snapshot("manifest.json", listing.get("manifest.json"))
    registered = dataset.registered(listing)
    schema = dataset.schema(registered)
    present = Present(dataset, schema, partitions=registered.partitions, known=known)
    if _settle(present):
        present = Present(dataset, known=present)
    listed, looked_at = dict(sorted(present.published().items())), time.time()
    left_out = _left_out(present, listed)
    if faults := _faults(present, listed):
        _withdraw(present, faults)
        listed = {key: marker for key, marker in listed.items() if key not in faults}
    left_out = dict(sorted({**left_out, **faults}.items()))
    added = added_streams(listed, present.packed)
    shards: list[dict[str, Any]] = []
    for key, marker in listed.items():
        files = dict(marker.packed)
        if added.files:
            files[GROWING_FORMAT] = added.files[key]
        facts = {"num_samples": marker.num_samples, "decodable": marker.decodable}
        shards.append({"partition": key, **facts, "files": files})
    manifest = make_manifest(
        dataset=dataset.spec.name,
        schema=schema.to_json(),
        shards=shards,
        added=added.streams,
        losses=sum_losses(marker.losses for marker in listed.values()),
        duplicate_ids=_duplicate_ids(dataset, newest.content, shards, listed),
    )
    content = canonical_json(manifest, indent=1)
    digest = hashlib.sha256(content).hexdigest()
    if content != newest.content or not store.exists(f"manifests/{digest}.json"):
        store.write_bytes(f"manifests/{digest}.json", content)
    catalog = catalog_text(dataset, schema).encode()
    if store.found_bytes("catalog.sql") != catalog:
        store.write_bytes("catalog.sql", catalog)
    store.replace(newest, content)
    state, last = _state(present), present.cache.manifest
    if last is None or (last.digest, last.state) != (digest, state):  # else they have been noted
        note_facts(dataset, digest, schema, {key: registered.partitions[key] for key in listed})
    present.cache.store(Listed(digest=digest, state=state, looked_at=looked_at))
    return ManifestReport(
        digest=digest,
        manifest=manifest,
        url=store.url_of("manifest.json"),
        present=present,
        left_out=left_out,
        missing_streams=added.missing,
    )


def current_manifest(present: Present) -> ManifestReport | None:
    """The newest manifest, if it is the one that would be made of the dataset as it is; else None.

    The tables of all partitions are listed for a manifest, most of its requests: in an object store they are taken to
    be there for a day.

    Raises:
        SourceError: the storage could not be read.
    """
    store, known = present.dataset.store, present.cache.manifest
    if known is None or known.state != _state(present):
        return None
    listed = present.published()
    is_old = abs(time.time() - known.looked_at) > _LOOKED_AT_SECONDS
    if is_old if not store.is_local else _faults(present, listed):
        return None
    content = store.found_bytes("manifest.json")
    if content is None or hashlib.sha256(content).hexdigest() != known.digest:
        return None
    return ManifestReport(
        digest=known.digest,
        manifest=json.loads(content),
        url=store.url_of("manifest.json"),
        present=present,
        left_out=_left_out(present, listed),
        missing_streams=missing_streams(present),
    )


def _state(present: Present) -> str:
    """A digest of all that a manifest follows from, but for files that are gone or of another size."""
    spec, schema = present.dataset.spec, present.schema
    declared = [spec.name, schema.to_json(), PUBLISHED.digest(spec, schema)]
    found = [sorted(present.partitions), present.cache.state, present.packed]
    return hashlib.sha256(canonical_json([*declared, *found])).hexdigest()


def _left_out(present: Present, listed: Container[str]) -> dict[str, str]:
    keys = {key for key in (*present.partitions, *present.names) if key not in listed}
    return {key: present.fault(key) or "its marker is damaged" for key in sorted(keys)}


def _settle(present: Present) -> bool:
    """Removes markers of runs that were killed right after they had published the next one; whether there were any.

    The next one carries over their added streams first. Where its files are no longer those that it lists, it may be
    the other that counts for a process with another declaration: both are left alone.
    """
    dataset, found = present.dataset, False
    several = {key: name for key, name in present.current.items() if len(present.names[key]) > 1}
    for key, name in several.items():
        with dataset.markers_held(key) as is_held:
            # Without a lock, a marker may just be being withdrawn: while there are both, it may be removed.
            others = sorted({*present.names[key]} - {name} - (set() if is_held else {dataset.withdrawn_name(name)}))
            if not others:
                continue
            published = dataset.store.snapshot(name)
            if published.content is None or _fault_now(dataset, published.content):
                continue
            found = True
            marker = dataset.marker_in(published) or {}
            contents = {other: dataset.store.found_bytes(other) for other in others}
            contents[name] = published.content  # the last, since streams may have been added to it
            dataset.store.replace(published, canonical_json(with_added_streams(dataset, contents, marker), indent=1))
            for other in others:
                dataset.store.delete(other)
    return found


def _faults(present: Present, markers: Mapping[str, Marker]) -> dict[str, str]:
    """How the files of partitions differ from what their markers say."""
    store = present.dataset.store

    def made_again(table: str) -> dict[str, str]:
        sizes = store.sizes(table)  # several hundred bytes for each partition: only few tables' at a time
        found = {key: _made_again(marker, sizes.get, (table,)) for key, marker in markers.items()}
        return {key: fault for key, fault in found.items() if fault}

    lost = {key: present.lost_files(marker) for key, marker in markers.items()}
    found = {key: fault for key, fault in lost.items() if fault}
    with ThreadPoolExecutor(1 if store.is_local else _LISTINGS, thread_name_prefix="tables") as pool:
        for faults in pool.map(made_again, TABLES):
            found = {**faults, **found}
    return found


def _withdraw(present: Present, faulty: Iterable[str]) -> None:
    """Withdraws markers whose files are not what they say, so that a run makes them again.

    Raises:
        ChangedError: the files were listed after the markers, and a run has published a partition between the two.
    """
    dataset = present.dataset
    for key in faulty:
        with dataset.markers_held(key):
            contents = {name: dataset.store.found_bytes(name) for name in present.names[key]}
            found = {name: _fault_now(dataset, content) for name, content in contents.items() if content is not None}
            if not found.get(present.current[key]):
                where, detail = dataset.store.url_of("manifest.json"), "was published while the manifest was made"
                raise ChangedError(where, f"partition {key!r} {detail}: run it again")
            dataset.withdraw_markers(name for name, fault in found.items() if fault)


def _fault_now(dataset: DatasetStore, content: bytes) -> str | None:
    """How the files of a marker differ from what it says at this moment, or None."""
    size = dataset.store.size
    try:
        marker = Marker.of(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it is not a marker: {error!r}"
    if fault := lost_files(marker, size) or _made_again(marker, size):
        return fault
    # Records of other settings may have the same size.
    return digest_fault(marker.record[1], dataset.store.digest(dataset.records_name(marker.key)))


def _duplicate_ids(
    dataset: DatasetStore, newest: bytes | None, shards: Sequence[Mapping[str, Any]], markers: Mapping[str, Marker]
) -> Mapping[str, Any]:
    """The ids that several partitions have; those of the newest manifest, if it lists the same files."""

    def files(listed: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        # The ids of a file do not depend on the streams that were added to the other.
        return {shard["partition"]: next(iter(packed_files(shard).values()))["sha256"] for shard in listed}

    with suppress(ValueError, KeyError, TypeError):  # it is damaged, or one of an earlier release
        before = {} if newest is None else json.loads(newest)
        if files(before["shards"]) == files(shards):
            known: Mapping[str, Any] = before["duplicate_ids"]
            return known
    before = {}  # as large as the one that is made, and several times that in memory
    sizes = {key: marker.tables[FILTERED_ROWS.tables[0].name] for key, marker in markers.items()}
    return duplicate_ids(dataset, {key: marker.rows_digest for key, marker in markers.items()}, sizes)


def missing_streams(present: Present) -> Mapping[str, tuple[str, ...]]:
    """Added streams that published partitions lack or lost, with these partitions; the manifest does not list them.

    Raises:
        SourceError: the storage could not be read.
    """
    return added_streams(present.published(), present.packed).missing


def _made_again(marker: Marker, size_of: Callable[[str], int | None], tables: Container[str] = TABLES) -> str | None:
    """What changed in a partition's tables since its marker was written, or None; `size_of` is None of what is gone."""
    for path, size in marker.table_files(tables):
        if fault := size_fault(size, size_of(path)):
            return f"{path} {fault}"
    return None
