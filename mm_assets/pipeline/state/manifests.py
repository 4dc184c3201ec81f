"""Versions of a dataset: a manifest lists what is published, and ``manifest.json`` is the newest one.

A manifest never names a missing packed file. The manifest before it is its index: only records that it does not name
are read. Of two processes that make a manifest at the same time, the later one starts again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mm_assets.dataset.manifest import FILE_DIGITS, ManifestPartition, file_path, make_manifest, manifest_partitions
from mm_assets.errors import ChangedError, SchemaMismatchError
from mm_assets.pipeline.chain import CHAIN, FILTERED_ROWS, PACKED_FOLDER, TABLES
from mm_assets.pipeline.state.added_streams import NewStream, carried_over, with_streams
from mm_assets.pipeline.state.duplicate_ids import duplicate_ids, format_duplicates
from mm_assets.pipeline.state.folder import (
    MAX_UNNAMED_SECONDS,
    CleanNote,
    DatasetStore,
    seconds_passed,
    until_unchanged,
)
from mm_assets.pipeline.state.losses import sum_losses
from mm_assets.pipeline.state.records import Attempt, canonical_json, digest_fault, size_fault
from mm_assets.pipeline.state.sql_views import catalog_text
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.store import ListedFile, Store

__all__ = ["ManifestReport", "build_manifest", "current_manifest", "manifest_warnings", "verify_tables"]

_DIGESTS = 4  # of tables at a time
_WITHDRAWALS = 16  # of records at a time: each waits for the storage most of its time


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReport:
    """A dataset version as built.

    Attributes:
        digest: SHA-256 of the manifest, hexadecimal: its name below ``manifests/``.
        manifest: its content.
        url: where the copy of the newest is.
        state: the dataset with this manifest.
        left_out: partitions that are not in it, with the reason.
        withdrawn: those among them whose record was deleted because of a missing file, with the file.
        was_damaged: whether it replaced a damaged ``manifest.json``.
        missing_streams: name of an added stream to the partitions in it that lack the stream.
        top: the files in the dataset's folder from before it was built; nothing if it was not built now.
    """

    digest: str
    manifest: Mapping[str, Any]
    url: str
    state: DatasetState
    left_out: Mapping[str, str]
    withdrawn: Mapping[str, str] = field(default_factory=dict)
    missing_streams: Mapping[str, tuple[str, ...]]
    was_damaged: bool = False
    top: Mapping[str, ListedFile] = field(default_factory=dict)


def build_manifest(
    dataset: DatasetStore,
    *,
    counts_duplicates: bool = True,
    stream: NewStream | None = None,
    read: Mapping[str, ManifestPartition] | None = None,
) -> ManifestReport:
    """Lists the partitions that are published by their current recipes, as a new version of the dataset.

    The record of a partition whose packed file is missing is deleted: the partition is pending then.

    Args:
        dataset: the dataset's folder.
        counts_duplicates: whether to count the sample ids that several partitions have, which reads the ids of new
            partitions.
        stream: a stream that was added, to be listed from now on.
        read: what records say that the caller has read or written, by key: they are not read again.

    Raises:
        SourceError: the dataset is not registered, or the storage cannot be read or written.
        ChangedError: other processes made manifests each time that this one was about to be published.
    """
    withdrawn: dict[str, str] = {}
    return until_unchanged(lambda: _build_manifest(dataset, counts_duplicates, stream, read or {}, withdrawn))


def _build_manifest(
    dataset: DatasetStore,
    counts_duplicates: bool,
    stream: NewStream | None,
    read: Mapping[str, ManifestPartition],
    withdrawn: dict[str, str],
) -> ManifestReport:
    """Builds a manifest once, and adds the partitions whose records it deletes to `withdrawn`."""
    store, began = dataset.store, seconds_passed()
    newest = store.snapshot("manifest.json")  # first: a manifest of newer records is not replaced
    top = store.listing("")
    state = DatasetState(dataset, top=top)
    state.use_newest(newest.content)
    schema = state.schema
    listed = dict(sorted(state.published(read=read).items()))
    # After the records: the files of each were there before it.
    missing = _missing_files(state, listed.values())
    unreadable = {key for key in state.partitions if state.is_published(key) and key not in listed}
    missing |= dict.fromkeys(unreadable, "its record is damaged")
    faults = _withdraw(state, missing)
    withdrawn |= faults
    listed = {key: entry for key, entry in listed.items() if key not in faults}
    streams = carried_over(state, listed, stream)
    listed = with_streams(listed, streams)
    manifest = make_manifest(
        dataset=dataset.spec.name,
        schema=schema.to_json(),
        partitions=list(listed.values()),
        added=streams.declared,
        losses=sum_losses(entry.losses for entry in listed.values()),
        duplicate_ids=_duplicate_ids(state, listed, is_final=counts_duplicates),
        settings=_settings(state),
    )
    content = canonical_json(manifest)
    digest = hashlib.sha256(content).hexdigest()
    if content != newest.content:
        # Also if there is one of the same content: `clean` leaves young ones, which may be about to be published.
        store.write_bytes(_name(digest), content)
    catalog = catalog_text(dataset, schema).encode()
    if not _has_content(store, "catalog.sql", catalog, top):
        store.write_bytes("catalog.sql", catalog)
    # A slow `clean` deletes a record that a manifest has named again: the files outlive that manifest by a day.
    if unrecorded := [key for key, entry in state.listed.items() if entry.recipe not in state.records.get(key, ())]:
        CleanNote(store).write(unrecorded)
    if seconds_passed() - began > MAX_UNNAMED_SECONDS:
        raise ChangedError(store.url_of("manifest.json"), "took so long that files that it lists may have been deleted")
    store.replace(newest, content)
    if seconds_passed() - began > MAX_UNNAMED_SECONDS:  # the host was suspended right before it published this
        store.write_bytes(_name(digest), content)
        raise ChangedError(store.url_of("manifest.json"), "took so long that files that it lists may have been deleted")
    unpublished = {key for key in (*state.partitions, *state.records) if key not in listed}
    left_out = {key: faults.get(key) or state.fault(key) or "" for key in sorted(unpublished)}
    was_damaged = state.damage is not None
    state.withdraw(faults)
    state.use_manifest(manifest, digest, listed)
    return ManifestReport(
        digest=digest,
        manifest=manifest,
        url=store.url_of("manifest.json"),
        state=state,
        left_out=left_out,
        withdrawn={key: fault for key, fault in withdrawn.items() if key in left_out},
        missing_streams=streams.missing,
        was_damaged=was_damaged,
        top=top,
    )


def current_manifest(state: DatasetState) -> ManifestReport | None:
    """Returns the newest manifest if it lists what is published; else None.

    Raises:
        SourceError: the storage cannot be read.
    """
    if state.manifest is None or state.digest is None or state.manifest.get("dataset") != state.dataset.spec.name:
        return None
    published = {key: state.recipes[key] for key in state.partitions if state.is_published(key)}
    if {key: entry.recipe for key, entry in state.listed.items()} != published:
        return None
    duplicates = state.manifest.get("duplicate_ids")
    if duplicates is None or "uncounted" in duplicates:  # one that a load made on its way
        return None
    store = state.dataset.store
    if store.is_local and _missing_files(state, state.listed.values()):  # in a bucket a listing of very many files
        return None
    return ManifestReport(
        digest=state.digest,
        manifest=state.manifest,
        url=store.url_of("manifest.json"),
        state=state,
        left_out={key: state.fault(key) or "" for key in sorted(state.pending)},
        missing_streams=carried_over(state, state.listed).missing,
    )


def manifest_warnings(report: ManifestReport | None) -> tuple[str, ...]:
    """Returns the violations that the check of a manifest found, one line each."""
    duplicates = None if report is None else report.manifest.get("duplicate_ids")
    said = format_duplicates(duplicates) if duplicates else ""
    return (f"manifest: check unique_ids: {said}",) if said else ()


def verify_tables(store: Store, manifest: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Compares the tables of a manifest's partitions with the digests in their names; each file is read once.

    Args:
        store: the dataset's folder.
        manifest: its content.

    Returns:
        How many tables there are, and what is wrong with some of them.

    Raises:
        SourceError: the storage does not answer.
    """
    entries = manifest_partitions(manifest, name=store.url_of("manifest.json")).values()
    files = [(file_path(name, e.key, sha256), sha256) for e in entries for name, (_, sha256) in e.tables.items()]

    def fault(file: tuple[str, str]) -> str | None:
        path, sha256 = file
        if not store.exists(path):
            return f"{path} is missing"
        found = digest_fault(sha256, store.digest(path)[: len(sha256)])
        return None if found is None else f"{path} {found}"

    with ThreadPoolExecutor(_DIGESTS, thread_name_prefix="digests") as pool:
        return len(files), [found for found in pool.map(fault, files) if found is not None]


def _name(digest: str) -> str:
    return f"manifests/{digest}.json"


def _has_content(store: Store, name: str, content: bytes, listed: Mapping[str, ListedFile]) -> bool:
    file = listed.get(name)
    if file is None or file.size != len(content):
        return False
    # In an S3 store the tag of an object that was uploaded at once, without encryption by a customer's key, is its MD5.
    is_told = file.etag == f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
    return is_told or store.found_bytes(name) == content


def _missing_files(state: DatasetState, entries: Iterable[ManifestPartition]) -> dict[str, str]:
    """Which file of a partition is missing or of another size, by key; tables are looked for in a local folder only."""
    store = state.dataset.store
    folders = [PACKED_FOLDER, *(TABLES if store.is_local else ())]
    sizes = {name: file.size for listed in state.dataset.listings(*folders) for name, file in listed.items()}
    found = {}
    for entry in entries:
        files = {**entry.packed, **(entry.tables if store.is_local else {})}
        for name, (size, sha256) in files.items():
            path = file_path(name, entry.key, sha256)
            if fault := size_fault(size, sizes.get(path)):
                found[entry.key] = f"{path} {fault}"
                break
    return found


def _withdraw(state: DatasetState, faults: Mapping[str, str]) -> Mapping[str, str]:
    """Deletes the records of partitions whose files are missing, so that a run rebuilds them; returns the faults.

    Their stages become those of attempts: the run reuses them.
    """
    dataset = state.dataset

    def withdraw(key: str) -> None:
        recipe = state.recipes[key]
        with suppress(SchemaMismatchError):
            record = dataset.record(key, recipe)
            if record is not None:
                dataset.write_attempt(Attempt(partition=key, stages=record.stages))
        dataset.store.delete(dataset.record_name(key, recipe))

    with ThreadPoolExecutor(_WITHDRAWALS, thread_name_prefix="withdrawals") as pool:
        list(pool.map(withdraw, faults))  # `list` raises what failed
    return faults


def _settings(state: DatasetState) -> dict[str, Any]:
    """By stage, the values of the settings that determine its files, for comparisons of versions."""
    spec = state.dataset.spec
    stages = [stage for stage in CHAIN if stage.files and stage.is_made(spec)]
    plain = {stage.name: dict(stage.settings(spec)) for stage in stages}
    return dict(json.loads(json.dumps(plain, default=str)))


def _duplicate_ids(
    state: DatasetState, listed: Mapping[str, ManifestPartition], *, is_final: bool
) -> Mapping[str, Any] | None:
    """Counts the ids that several partitions have, with the help of the manifest before.

    Of a manifest that is not final, new partitions are only named: None if no count before holds for the others.
    """
    table = FILTERED_ROWS.tables[0].name
    files = {key: entry.tables[table] for key, entry in listed.items()}
    before: Mapping[str, Any] = (state.manifest or {}).get("duplicate_ids") or {}
    uncounted = set(before.get("uncounted", () if before else state.listed))
    counted = {key: entry.tables[table] for key, entry in state.listed.items() if key not in uncounted}
    same = {
        key
        for key, (_, sha256) in files.items()
        if key in counted and counted[key][1][:FILE_DIGITS] == sha256[:FILE_DIGITS]
    }
    holds = bool(before) and len(same) == len(counted)
    if holds and len(same) == len(files):
        return {key: value for key, value in before.items() if key != "uncounted"}
    if not is_final:
        return {**before, "uncounted": sorted(files.keys() - same)} if holds else None
    return duplicate_ids(state.dataset, files, unique=same if before and before["count"] == 0 else ())
