"""Publication: markers, versioned manifests, and cleaning up.

A marker is a partition's last file: it is written only when every stage's record is there, made from one another, with
the current configuration, and with every check passed. A manifest lists the partitions whose marker still matches their
records and files. Neither ever names a missing file.
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
from mm_assets.errors import ChangedError, SchemaMismatchError, SourceError
from mm_assets.pipeline.added_streams import FORMAT as GROWING_FORMAT
from mm_assets.pipeline.added_streams import added_streams, carried_over
from mm_assets.pipeline.chain import (
    FILTERED_ROWS,
    MATERIALIZED_ROWS,
    PACKED_FOLDER,
    PUBLISHED,
    RAW_SHARDS,
    TABLES,
    Stage,
    packed_files,
    recorded_stages,
)
from mm_assets.pipeline.duplicate_ids import duplicate_ids
from mm_assets.pipeline.leases import Leases
from mm_assets.pipeline.losses import published_losses, sum_losses
from mm_assets.pipeline.markers import Listed, Marker
from mm_assets.pipeline.pending import Present, lost_files, stage_fault
from mm_assets.pipeline.records import MARKER_VERSION, StageRecord, canonical_json, digest_fault, size_fault
from mm_assets.pipeline.sql_views import catalog_text
from mm_assets.pipeline.store import RECORDS, DatasetStore
from mm_assets.pipeline.version_facts import note_facts, surplus_facts
from mm_assets.pipeline.work import PartitionWork
from mm_assets.storage.store import Snapshot, Store

__all__ = [
    "CleanReport",
    "ManifestReport",
    "build_manifest",
    "clean",
    "current_manifest",
    "missing_streams",
    "partitions_in_manifest",
    "publish",
]

_LOOKED_AT_SECONDS = 86_400.0
_LISTINGS = 3  # of folders with a file of each partition at a time
_ATTEMPTS = 5  # to make a manifest while other processes do the same
_PACKED_PATH = re.compile(f"{PACKED_FOLDER}/{PACKED_NAME.pattern}")


def _chain_faults(work: PartitionWork, records: Mapping[Stage, StageRecord]) -> list[str]:
    """The reasons why the records of a partition do not belong together: empty when they do."""
    size = work.dataset.store.size
    faults = (
        stage_fault(stage, work.partition, records, stage.made_with(work.spec, work.schema), size=size)
        for stage in records
    )
    return [fault.said for fault in faults if fault]


def publish(work: PartitionWork) -> Mapping[str, Any]:
    """Writes a partition's marker and returns it.

    Raises:
        SourceError: a stage has not run, a check failed, the partition's files do not belong together, or a table that
            lists losses could not be read.
        ChangedError: another process published the partition meanwhile, with other files.
    """
    dataset, key = work.dataset, work.key
    # Before the records: what another process publishes after this line is noticed.
    before = dataset.store.snapshot(work.marker_name)
    records = {stage: work.record(stage) for stage in recorded_stages(work.spec)}
    assert work.record_file is not None  # the records were read from it
    faults = _chain_faults(work, records)
    if faults:
        where = dataset.store.url_of(work.marker_name)
        raise SourceError(where, f"partition {key!r} is not fit to be published: {'; '.join(faults)}")
    packed = next(record for stage, record in records.items() if stage.packed_format is not None)
    marker: Mapping[str, Any] = {
        "version": MARKER_VERSION,
        "dataset": dataset.spec.name,
        "partition": key,
        "shards": dict(records[RAW_SHARDS].inputs),
        "num_samples": packed.counts["samples"],
        "counts": {
            "members": records[RAW_SHARDS].counts["members"],
            "rows": records[MATERIALIZED_ROWS].counts["rows"],
        },
        "decodable": {
            "mode": dataset.spec.decodable,
            "on_undecodable": dataset.spec.on_undecodable,
            **{name: records[FILTERED_ROWS].counts[name] for name in ("judged", "undecodable")},
        },
        "losses": published_losses(dataset, key, records),
        "files": {name: file.to_json() for record in records.values() for name, file in sorted(record.files.items())},
        "record": work.record_file.to_json(),
    }
    dataset.store.sync([work.record_file.path, *(file.path for r in records.values() for file in r.files.values())])
    with dataset.markers_held(key) as is_held:
        marker = _replace_markers(work, before, marker, is_held=is_held)
    work.clear_failure()
    return marker


def _replace_markers(
    work: PartitionWork, before: Snapshot, marker: Mapping[str, Any], *, is_held: bool
) -> Mapping[str, Any]:
    """Publishes a marker in place of all others of its partition, with their added streams, and returns it."""
    dataset, store, name = work.dataset, work.dataset.store, work.marker_name
    if before.content is not None and is_held and not store.exists(name):
        before = store.snapshot(name)  # a manifest withdrew it meanwhile: this one is of files that are there
    others = _other_markers(work, before)
    marker = _carried_over(dataset, {**others, name: before.content}, marker)
    store.replace(before, canonical_json(marker, indent=1))
    if before.content is not None and not store.exists(name):  # withdrawn since, without the lock
        detail = f"a manifest withdrew the marker of partition {work.key!r} meanwhile: run it again"
        raise ChangedError(store.url_of(name), detail)
    # After the new one: there is a marker at any time. Without a lock, a manifest that has just copied this
    # one to its withdrawn name may still remove it: that copy is then the only one with the added streams.
    for other in others.keys() - (set() if is_held else {dataset.withdrawn_name(name)}):
        store.delete(other)
    return marker


def _other_markers(work: PartitionWork, published: Snapshot) -> dict[str, bytes]:
    """The markers of a partition that publication replaces by one of another name."""
    dataset, found = work.dataset, {}
    # Those that were listed, and one that another run of the partition has published since.
    for listed in dict.fromkeys([*work.marker_names(), work.marker_name]):
        # A manifest may have withdrawn it meanwhile.
        for name in dict.fromkeys((listed, dataset.withdrawn_name(listed))):
            is_published = name == work.marker_name
            content = published.content if is_published else dataset.store.found_bytes(name)
            if content is not None:
                if not is_published:
                    found[name] = content
                break
    return found


def _carried_over(
    dataset: DatasetStore, before: Mapping[str, bytes | None], marker: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A marker with the added streams of those before it, by their names; of the last of them where they differ."""
    for name, content in before.items():
        with suppress(SchemaMismatchError, SourceError):  # a damaged marker does not prevent a good one
            if content is not None:
                marker = carried_over(dataset.marker(name, content), marker)
    return marker


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
            dataset.store.replace(published, canonical_json(_carried_over(dataset, contents, marker), indent=1))
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
