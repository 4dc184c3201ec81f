"""What manifests and pending partitions need of markers, kept in one file: a marker is read once.

`cache/markers.json` is a cache. An entry counts while the listing of markers shows the version of the file that was
read for it; without the file, or where it is damaged, each marker is read. No entry says whether its partition is up to
date.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from mm_assets.errors import SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS, PACKED_STAGES, PUBLISHED, TABLES
from mm_assets.pipeline.state.folder import WITHDRAWN, DatasetStore
from mm_assets.pipeline.state.records import canonical_json, digest_fault
from mm_assets.storage.store import ListedFile, Store

__all__ = ["Listed", "Marker", "Markers", "verify_tables"]

INDEX = "cache/markers.json"
_INDEX_VERSION = 4
_DIGESTS = 4  # of tables at a time
_READS = 32  # of markers at a time: each waits for the storage most of its time
_MOST_READ = 2048  # of them in memory as they were read: several kB each
_HEAD = b'{"version":%d,"sha256":"%s","markers":'
_JUDGED = ("mode", "on_undecodable", "judged", "undecodable")  # what markers say under `decodable`


# There is one marker for each of very many partitions: what is the same in all is in memory once.
_NONE: Mapping[str, Any] = {}


@lru_cache(maxsize=1024)
def _judged(mode: str, on_undecodable: str, judged: int, undecodable: int) -> Mapping[str, Any]:
    return dict(zip(_JUDGED, (mode, on_undecodable, judged, undecodable), strict=True))


def _packed(path: str, size: int, sha256: str) -> Mapping[str, Any]:
    return {"path": path, "size": size, "sha256": sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A marker without what only its partition's own run needs.

    Attributes:
        key: the partition's.
        num_samples: samples in its packed files.
        decodable: how its media were judged.
        losses: as markers list them.
        packed: its packed files as markers list them, by format.
        tables: bytes of each of its tables, by name.
        rows_digest: SHA-256 of the table of the packed rows.
        record: bytes and SHA-256 of the file of its records.
        added: the added streams, as markers list them, or None.
        lost_streams: names of added streams that a later run removed.
    """

    key: str
    num_samples: int
    decodable: Mapping[str, Any]
    losses: Mapping[str, Any]
    packed: Mapping[str, Mapping[str, Any]]
    tables: Mapping[str, int]
    rows_digest: str
    record: tuple[int, str]
    added: Mapping[str, Any] | None
    lost_streams: Sequence[str]

    @classmethod
    def of(cls, marker: Mapping[str, Any]) -> Marker:
        """What counts of a marker; `KeyError` or `TypeError` if it is not one of this release."""
        files, key = marker["files"], marker["partition"]
        tables = [name for name in files if name not in PACKED_STAGES]
        odd = [name for name in tables if files[name]["path"] != DatasetStore.table(name, key)]
        if odd or marker["record"]["path"] != DatasetStore.records_name(key):
            raise KeyError(*odd)
        return cls(
            key=key,
            num_samples=marker["num_samples"],
            decodable=_judged(*(marker["decodable"][name] for name in _JUDGED)),
            losses=marker["losses"] or _NONE,
            packed={form: _packed(**files[form]) for form in PACKED_STAGES if form in files},
            tables={sys.intern(name): files[name]["size"] for name in tables},
            rows_digest=files[FILTERED_ROWS.tables[0].name]["sha256"],
            record=(marker["record"]["size"], marker["record"]["sha256"]),
            added=marker.get("added"),
            lost_streams=tuple(marker.get("lost_streams", ())),
        )

    @classmethod
    def from_json(cls, value: Sequence[Any], tables: Sequence[str]) -> Marker:
        """The marker that `to_json` gave."""
        key, num_samples, judged, packed, sizes, rows_digest, *record, rare = value
        return cls(
            key=key,
            num_samples=num_samples,
            decodable=_judged(*judged),
            losses=rare.get("losses", _NONE),
            packed={sys.intern(form): _packed(path, size, digest) for form, path, size, digest in packed},
            tables={sys.intern(name): size for name, size in zip(tables, sizes, strict=True) if size is not None},
            rows_digest=rows_digest,
            record=(record[0], record[1]),
            added=rare.get("added"),
            lost_streams=tuple(rare.get("lost_streams", ())),
        )

    def to_json(self, tables: Sequence[str]) -> list[Any]:
        """A list without names, of which there would be very many; the sizes of `tables` in their order."""
        packed = [[form, f["path"], f["size"], f["sha256"]] for form, f in self.packed.items()]
        sizes = [self.tables.get(name) for name in tables]
        judged = [self.decodable[name] for name in _JUDGED]
        rare = {"losses": self.losses, "added": self.added, "lost_streams": list(self.lost_streams)}
        facts = [self.key, self.num_samples, judged, packed, sizes, self.rows_digest, *self.record]
        return [*facts, {name: value for name, value in rare.items() if value}]

    def served_files(self) -> Iterator[tuple[str, int]]:
        """Path and bytes of each of its packed files."""
        return ((file["path"], file["size"]) for file in self.packed.values())

    def table_files(self, tables: Container[str]) -> Iterator[tuple[str, int]]:
        """Path and bytes of each of its tables that is among those named."""
        return ((DatasetStore.table(name, self.key), size) for name, size in self.tables.items() if name in tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What the newest manifest was made of, and when its files were looked at.

    Attributes:
        digest: SHA-256 of the manifest.
        state: digest of all that it follows from.
        looked_at: seconds since 1970 at which the tables of all its partitions were listed.
    """

    digest: str
    state: str
    looked_at: float


class Markers:
    """The markers of a dataset, each read once.

    Args:
        dataset: the dataset's folder.
        listed: the listing of their folder.
        known: those of an earlier listing, which are not read again where the versions are the same.
    """

    def __init__(self, dataset: DatasetStore, listed: Mapping[str, ListedFile], known: Markers | None = None) -> None:
        self._dataset = dataset
        self._listed = listed
        self._stored: Mapping[str, str] = {} if known is None else known._stored  # version of each in the cache's file
        self._manifest: Listed | None = None if known is None else known._manifest
        self._has_read_cache: bool = known is not None and known._has_read_cache
        self._read: dict[str, Marker] = {}
        if known is not None:
            self._read = {name: of for name, of in known._read.items() if known._listed[name] == listed.get(name)}

    def read(self, names: Iterable[str]) -> dict[str, Marker]:
        """Markers by the names of their files; those that the cache lacks are read, many at a time.

        Damaged ones, and those that were removed since they were listed, are left out.

        Raises:
            SourceError: one cannot be read.
        """
        names = list(names)
        if not self._has_read_cache and any(name not in self._read for name in names):
            self._read = {**self._cached, **self._read}
            self._has_read_cache = True
        unknown = [name for name in names if name not in self._read]
        with ThreadPoolExecutor(_READS, thread_name_prefix="markers") as pool:
            for start in range(0, len(unknown), _MOST_READ):
                some = unknown[start : start + _MOST_READ]
                for name, content in zip(some, pool.map(self._dataset.store.found_bytes, some), strict=True):
                    with suppress(ValueError, KeyError, TypeError, AttributeError):
                        if content is not None:
                            self._read[name] = Marker.of(json.loads(content))
        return {name: self._read[name] for name in names if name in self._read}

    @cached_property
    def seen(self) -> frozenset[str]:
        """Names of the markers that the last manifest saw as they are."""
        return frozenset(self._cached)

    @cached_property
    def _cached(self) -> Mapping[str, Marker]:
        """What the cache's file has of the listed markers."""
        content = self._dataset.store.found_bytes(INDEX)
        if content is None:
            return {}
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            value = json.loads(content)
            body = content[len(_HEAD % (0, b"0" * 64)) : -len(b"}\n")]
            if value["version"] == _INDEX_VERSION and value["sha256"] == hashlib.sha256(body).hexdigest():
                tables, entries = value["markers"]["tables"], value["markers"]["of"]
                found = {
                    name: Marker.from_json(entry, tables)
                    for name, (version, *entry) in entries.items()
                    if name in self._listed and self._listed[name].version == version
                }
                self._manifest = Listed(**value["markers"]["newest"])
                self._stored = {name: version for name, (version, *_) in entries.items()}
                return found
        return {}

    @property
    def manifest(self) -> Listed | None:
        """What the last manifest was made of; None where that is not known."""
        if not self._has_read_cache:
            self._read = {**self._cached, **self._read}
            self._has_read_cache = True
        return self._manifest

    @property
    def state(self) -> str:
        """A digest that changes when a marker does, or comes or goes."""
        lines = "".join(f"{name} {file.version}\n" for name, file in self._listed.items())
        return hashlib.sha256(lines.encode()).hexdigest()

    def store(self, manifest: Listed) -> None:
        """Writes the cache with the markers that were read and are still there, if it changed."""
        versions = {name: self._listed[name].version for name in self._read}
        before, self._manifest = self._manifest, manifest
        is_same = before is not None and (before.digest, before.state) == (manifest.digest, manifest.state)
        if versions == self._stored and is_same:
            return
        tables = sorted({table for marker in self._read.values() for table in marker.tables})
        entries = {name: [versions[name], *marker.to_json(tables)] for name, marker in self._read.items()}
        body = canonical_json({"tables": tables, "of": entries, "newest": asdict(manifest)}).rstrip(b"\n")
        head = _HEAD % (_INDEX_VERSION, hashlib.sha256(body).hexdigest().encode())
        # Without it the next run is only slower: a copied root may be read-only. A full disk failed the manifest.
        with suppress(SourceError):
            self._dataset.store.write_bytes(INDEX, head + body + b"}\n")
            self._stored = versions


def verify_tables(store: Store, packed: Container[str]) -> tuple[int, list[str]]:
    """Compares the tables and records of partitions with the digests in their markers; each file is read once.

    Args:
        store: the dataset's folder.
        packed: SHA-256 of packed files; partitions that have one of them now are verified.

    Returns:
        How many files there are, and what is wrong with some of them. None where there are no markers: packed files
        may have been copied without the rest.

    Raises:
        SourceError: the storage does not answer.
    """
    listed: dict[str, str] = {}
    for name in store.sizes(PUBLISHED.name):
        content = None if name.endswith(WITHDRAWN) else store.found_bytes(name)
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # it is not a marker then, and does not count
            value = json.loads(content or b"{}")
            marker = Marker.of(value)  # whose files have the names that its key gives them
            files = [*marker.packed.values(), *([marker.added["file"]] if marker.added else [])]
            is_named = name.startswith(f"{PUBLISHED.name}/{marker.key}.")
            if is_named and any(file["sha256"] in packed for file in files):
                names = sorted(marker.tables.keys() & set(TABLES))
                listed |= {DatasetStore.table(table, marker.key): value["files"][table]["sha256"] for table in names}
                listed[DatasetStore.records_name(marker.key)] = marker.record[1]

    def fault(name: str) -> str | None:
        if not store.exists(name):
            return "is missing"
        return digest_fault(listed[name], store.digest(name))

    with ThreadPoolExecutor(_DIGESTS, thread_name_prefix="digests") as pool:
        faults = zip(listed, pool.map(fault, listed), strict=True)
        return len(listed), [f"{name} {found}" for name, found in faults if found is not None]
