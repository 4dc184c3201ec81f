"""Cleaning up: deletes what nothing names, in two phases that are a day apart.

A record is dead if no kept manifest names it and its recipe is not the current one of a registered partition. Phase one
deletes dead records and attempts and notes when. A file is dead if no live record, kept manifest or attempt names it.
Phase two deletes dead files that are a day old, unless a record or attempt of their partition was written or deleted
within that day: a process that read what named the files just before it was deleted or replaced still has the day to
publish a record that names them again. If the note is lost, the day starts again for all partitions, as it starts with
the first clean. The former export of a partition is deleted when the new one is a day old, the record of an index if it
is of no manifest that is kept, and its files by the next clean. Times are those of the storage, so that no clocks are
compared.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from mm_assets.dataset.manifest import FILE_DIGITS, ManifestPartition, file_path, manifest_partitions
from mm_assets.dataset.vector_index import INDEXES, IndexRecord, index_name_of, read_record
from mm_assets.errors import ChangedError, CorruptError, FormatError, SchemaMismatchError
from mm_assets.pipeline.chain import PACKED_FOLDER, TABLES
from mm_assets.pipeline.state.added_streams import STREAMS
from mm_assets.pipeline.state.claims import CLAIMS
from mm_assets.pipeline.state.exports import complete_exports, delete_export, export_folders, exports_store, read_export
from mm_assets.pipeline.state.folder import (
    ATTEMPTS,
    MAX_UNNAMED_SECONDS,
    MIN_AGE_SECONDS,
    NOTE,
    RECORDS,
    CleanNote,
    DatasetStore,
    seconds_passed,
)
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.store import ListedFile

__all__ = ["UPLOAD_SECONDS", "CleanReport", "clean"]

UPLOAD_SECONDS = 7 * 86_400.0  # after which an unfinished upload is aborted
_FOLDERS = (*TABLES, PACKED_FOLDER, STREAMS)  # of files that are named by their content
_FILE = re.compile(rf"[a-z_]+/(?P<key>.+)\.[0-9a-f]{{{FILE_DIGITS}}}\.[a-z]+")
_READS = 16  # attempts at a time: each waits for the storage most of its time


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport:
    """What cleaning deleted.

    Attributes:
        files: their names, below the dataset's folder.
        num_bytes: their bytes together.
        num_waiting: dead records and files that are too young to be deleted.
    """

    files: tuple[str, ...]
    num_bytes: int
    num_waiting: int


def clean(dataset: DatasetStore, *, keep: int | None = None, dry_run: bool = False) -> CleanReport:
    """Deletes what nothing needs: records and files of other settings, of partitions that are gone, of killed runs.

    Args:
        dataset: the dataset's folder.
        keep: manifests that remain, the newest first; None takes the declaration's.
        dry_run: report only.

    Raises:
        SourceError: the storage cannot be read or written.
        ChangedError: another process cleans at the same time.
        SchemaMismatchError: a manifest that is kept is damaged, so what it needs is unknown.
    """
    return _Cleaner(dataset, dataset.spec.keep_manifests if keep is None else max(keep, 1), dry_run=dry_run).run()


class _Cleaner:
    def __init__(self, dataset: DatasetStore, keep: int, *, dry_run: bool) -> None:
        self._dataset = dataset
        self._store = dataset.store
        self._keep = keep
        self._dry_run = dry_run
        self._deleted: dict[str, int] = {}
        self._num_waiting = 0
        self._now = 0.0

    def run(self) -> CleanReport:
        # First the time, so that what is written from here on is young, however long this takes. Then in this order: a
        # writer creates its record before it deletes its attempt, and what withdraws a record writes an attempt before.
        indexes = self._indexes()  # before that: no request of them comes between those that follow
        began, note = seconds_passed(), CleanNote(self._store)
        before = note.losses
        self._now = time.time() if self._dry_run else note.write()
        attempts = self._store.listing(ATTEMPTS)
        live = self._named_by_attempts(attempts)
        records = self._store.listing(RECORDS)
        written = {**records, **attempts, **self._store.listing(ATTEMPTS)}
        active = {_key_of(name) for name, file in written.items() if not self._is_old(file)}
        state = DatasetState(self._dataset)
        kept, dropped = self._manifests()
        live_records = {self._dataset.record_name(key, recipe) for key, recipe in state.recipes.items()}
        known: set[str] = set()
        for name in kept:
            entries = self._entries(name)
            live.update(index_name_of(entries.values(), index) for index in indexes.values() if index is not None)
            for key, entry in entries.items():
                known.add(self._dataset.record_name(key, entry.recipe))
                live.update(_paths(key, entry))
        live_records |= known
        # A young record may be that of a process with other settings, which is about to list it in a manifest.
        dead = {name: file for name, file in records.items() if name not in live_records and self._is_old(file)}
        young, waiting = records.keys() - live_records - dead.keys(), set[str]()
        self._num_waiting += len(young)
        unreadable = self._add_files_of(live, records.keys() - known - dead.keys() - young)
        unreadable |= self._add_files_of(waiting, young)

        # Phase one.
        dead |= {
            name: file
            for name, file in attempts.items()
            if (key := _key_of(name)) not in active and (key not in state.partitions or state.is_published(key))
        }
        losing = {_key_of(name) for name in dead} | {key for name in dropped for key in self._keys_of(name)}
        if losing and not self._dry_run:
            note.write(losing)
            if seconds_passed() - began > MAX_UNNAMED_SECONDS:  # a manifest may have named the records since
                raise ChangedError(self._store.url_of(NOTE), "cleaning took more than 12 hours: run it again")
        self._delete({**dead, **dropped})

        # Phase two. What another cleaner deleted before it was listed here is protected by its note alone.
        if not self._dry_run and not note.is_current():
            raise note.conflict()
        recent = [keys for at, keys in before if at is None or self._now - at < MIN_AGE_SECONDS]
        protected = active.union(losing, unreadable, *(keys for keys in recent if keys is not None))
        for folder in _FOLDERS:
            self._clean_folder(folder, live, waiting, None if None in recent else protected)
        listed = set(DatasetStore.recipes(known))
        self._clean_indexes(indexes, live)
        self._clean_exports(state, None if None in recent else protected | listed)
        for folder in (*_FOLDERS, INDEXES, RECORDS, ATTEMPTS, CLAIMS, "manifests", ""):
            self._delete({name: file for name, file in self._store.leftovers(folder).items() if self._is_old(file)})
        self._delete({name: file for name, file in self._store.listing(CLAIMS).items() if self._is_old(file)})
        if not self._dry_run:
            self._store.abort_uploads(UPLOAD_SECONDS)
        return CleanReport(
            files=tuple(self._deleted), num_bytes=sum(self._deleted.values()), num_waiting=self._num_waiting
        )

    def _clean_folder(self, folder: str, live: set[str], waiting: set[str], protected: set[str] | None) -> None:
        """Deletes the old files that are not live, except those that wait for their records to become old.

        Those of protected partitions remain too; None protects all partitions.
        """
        # Page by page: between a look at the age of a file and its end is one request. A writer that makes the same
        # file again makes it young.
        for page in self._store.pages(folder):
            dead = {}
            for name, file in page.items():
                found = _FILE.fullmatch(name)
                if found is None or name in live:  # others are not ours
                    continue
                if name in waiting or protected is None or found["key"] in protected or not self._is_old(file):
                    self._num_waiting += 1
                else:
                    dead[name] = file
            self._delete(dead)

    def _clean_exports(self, state: DatasetState, protected: set[str] | None) -> None:
        """Deletes exports that a newer one of their partition replaced a day ago, and those of missing partitions.

        The latter remain while their partition is protected; None protects all.
        """
        for options in self._dataset.spec.exports:
            complete = complete_exports(self._dataset, options)
            current = export_folders(self._dataset, options, state.published().values())
            for folder, file in complete.items():
                key = folder.rpartition(".")[0]
                newer = complete.get(current.get(key, ""))
                is_replaced = newer is not None and self._is_old(newer)
                is_gone = key not in state.partitions and protected is not None and key not in protected
                if folder == current.get(key):
                    continue
                if not self._is_old(file) or not (is_replaced or is_gone):
                    self._num_waiting += 1
                    continue
                with suppress(SchemaMismatchError):
                    made = read_export(self._dataset, options, folder)
                    size = 0 if made is None else made.num_bytes
                    self._deleted[exports_store(self._dataset, options).url_of(folder)] = size
                if not self._dry_run:
                    delete_export(self._dataset, options, folder)

    def _indexes(self) -> dict[str, IndexRecord | None]:
        """Returns the records of indexes by name; None for one that is damaged."""
        found: dict[str, IndexRecord | None] = {}
        for name in self._store.listing(INDEXES):
            if name.endswith(".json"):
                found[name] = None
                with suppress(CorruptError):
                    found[name] = read_record(self._store, name)
        return found

    def _clean_indexes(self, indexes: Mapping[str, IndexRecord | None], live: set[str]) -> None:
        """Deletes old records of indexes of no manifest that is kept, and old files that no record has named.

        A builder makes the files of an earlier index young before it names them again.
        """
        named = {file for record in indexes.values() if record is not None for file in record.file_names()}
        dead = {}
        for name, file in self._store.listing(INDEXES).items():
            if name in live or name in named:
                continue
            if self._is_old(file):
                dead[name] = file
            else:
                self._num_waiting += 1
        self._delete(dead)

    def _is_old(self, file: ListedFile) -> bool:
        return file.modified is not None and self._now - file.modified >= MIN_AGE_SECONDS

    def _delete(self, files: Mapping[str, ListedFile]) -> None:
        self._deleted |= {name: file.size for name, file in files.items()}
        if files and not self._dry_run:
            self._store.delete_all(list(files))

    def _manifests(self) -> tuple[list[str], dict[str, ListedFile]]:
        """Returns the manifests that remain, that of ``manifest.json`` first, and the others."""
        newest = self._store.found_bytes("manifest.json")
        current = "" if newest is None else f"manifests/{hashlib.sha256(newest).hexdigest()}.json"
        listed = self._store.listing("manifests")
        order = sorted(listed, key=lambda name: (name != current, -(listed[name].modified or 0.0), name))
        published = listed[current].modified if current in listed else None

        def may_be_next(file: ListedFile) -> bool:
            """Whether another process may be about to publish a manifest."""
            is_newer = published is None or file.modified is None or file.modified > published
            return is_newer and not self._is_old(file)

        kept = [name for n, name in enumerate(order) if n < self._keep or may_be_next(listed[name])]
        dropped = {name: listed[name] for name in order if name not in kept}
        # Its copy may have been deleted by hand.
        return kept if newest is None or current in listed else ["manifest.json", *kept], dropped

    def _entries(self, name: str) -> Mapping[str, ManifestPartition]:
        where = self._store.url_of(name)
        content = self._store.found_bytes(name)
        if content is None:  # another process cleans at this moment, and has noted the partitions
            return {}
        try:
            return manifest_partitions(json.loads(content), name=where)
        except (FormatError, ValueError, RecursionError) as error:
            raise SchemaMismatchError(f"{where}: is not a manifest, so what it needs is unknown: {error}") from error

    def _keys_of(self, name: str) -> Iterable[str]:
        with suppress(SchemaMismatchError):  # nothing can read it either
            return self._entries(name).keys()
        return ()

    def _named_by_attempts(self, listed: Iterable[str]) -> set[str]:
        with ThreadPoolExecutor(_READS, thread_name_prefix="attempts") as pool:
            attempts = pool.map(self._dataset.attempt, map(_key_of, listed))
            stages = (record for attempt in attempts if attempt is not None for record in attempt.stages.values())
            return {file.path for record in stages for file in record.files.values()}

    def _add_files_of(self, live: set[str], names: Iterable[str]) -> set[str]:
        """Adds the files that records name; returns the keys of records that cannot be read."""
        pairs = [(key, recipe) for key, recipes in self._dataset.recipes(names).items() for recipe in recipes]
        unreadable = set()
        for key, record in self._dataset.read_records(pairs):
            if record is None:
                unreadable.add(key)
            else:
                live.update(file.path for file in (*record.packed.values(), *record.tables.values()))
        return unreadable


def _key_of(name: str) -> str:
    """Returns the partition of a record or an attempt."""
    return next(iter(DatasetStore.recipes([name])), name.partition("/")[2].removesuffix(".json"))


def _paths(key: str, entry: ManifestPartition) -> Iterable[str]:
    for kind, (_, sha256) in (*entry.packed.items(), *entry.tables.items()):
        yield file_path(kind, key, sha256)
    for _, sha256 in entry.streams.values():
        yield file_path("stream", key, sha256)
