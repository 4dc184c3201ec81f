"""Writes datasets shard by shard: packed files in a folder or at a URL, and the manifest that joins them.

A shard is published as a whole, and then added to the list of its writer, ``writer-<rank>-of-<world size>.json``. A
writer that is killed loses only its incomplete shard, and the next one continues after the last shard in the list.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.files import NUM_REQUESTS, PackedFiles, Reader
from mm_assets.dataset.id_index import hash_texts
from mm_assets.dataset.manifest import (
    FILE_DIGITS,
    FORMATS,
    WRITER_LIST,
    ManifestPartition,
    file_path,
    make_manifest,
    parse_manifest,
)
from mm_assets.errors import (
    ChangedError,
    ConfigError,
    CorruptError,
    EncodeError,
    SchemaMismatchError,
    SourceError,
    temporary_disk_named,
)
from mm_assets.formats import ModalitySpec, Payload, WriteSummary
from mm_assets.formats.convert import WRITERS
from mm_assets.formats.tail import dump_schema
from mm_assets.formats.writer import PackedWriter, check_modalities
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.storage.store import Store

__all__ = ["SHARD_BYTES", "FolderWriter", "merge"]

SHARD_BYTES = 256 << 20
MAX_WORLD_SIZE = 100_000  # a rank has five digits in the names of files
MAX_RANKS_IN_MESSAGE = 10
_VERSION = 1
_MAX_COUNT = 2**63  # readers count samples and bytes in int64
_MANIFEST = "manifest.json"
_SAMPLE_BYTES = 64  # memory of a sample in a writer, without its id; limits shards of samples without payloads
_NOT_VALIDATED = {"mode": "none", "on_undecodable": "keep", "judged": 0, "undecodable": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardList:
    """The shards that one writer has published.

    Attributes:
        format: the format of all shards, ``mult`` or ``mstr``.
        modalities: the modalities of all shards, as JSON.
        shards: number of samples, size in bytes, and SHA-256 of each shard.
        num_present: number of samples that have a modality, by its name.
        is_complete: whether the writer was closed.
    """

    format: str
    modalities: Sequence[Mapping[str, Any]]
    shards: tuple[tuple[int, int, str], ...] = ()
    num_present: Mapping[str, int]
    is_complete: bool = False

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards."""
        return sum(num_samples for num_samples, _, _ in self.shards)

    @property
    def num_bytes(self) -> int:
        """Total size of all shards in bytes."""
        return sum(size for _, size, _ in self.shards)

    def describe(self) -> str:
        """Returns the number of samples and shards as text."""
        return f"{counted(self.num_samples, 'sample')} in {counted(len(self.shards), 'shard')}"

    def to_bytes(self) -> bytes:
        """Returns the content of the writer's file."""
        return _dump(
            {
                "version": _VERSION,
                "format": self.format,
                "modalities": self.modalities,
                "shards": self.shards,
                "num_present": self.num_present,
                "complete": self.is_complete,
            }
        )

    @classmethod
    def parse(cls, content: bytes, name: str) -> _ShardList:
        """Reads a writer's file; raises `CorruptError` if it is not one."""
        try:
            value = json.loads(content)
            if value["version"] != _VERSION:
                raise CorruptError(name, "version", found=repr(value["version"])[:80], expected=_VERSION)
            shards = tuple((num_samples, size, sha256) for num_samples, size, sha256 in value["shards"])
            numbers = [number for num_samples, size, _ in shards for number in (num_samples, size)]
            numbers += value["num_present"].values()
            if (
                value["format"] not in FORMATS
                or set(map(type, numbers)) - {int}
                or not all(0 <= number < _MAX_COUNT for number in numbers)
                or {type(sha256) for _, _, sha256 in shards} - {str}
                or type(value["complete"]) is not bool
                or {type(modality["name"]) for modality in value["modalities"]} != {str}
            ):
                raise ValueError("a value is of the wrong type, or too large")
            return cls(
                format=value["format"],
                modalities=value["modalities"],
                shards=shards,
                num_present=value["num_present"],
                is_complete=value["complete"],
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, CorruptError):
                raise
            raise CorruptError(name, f"is not the list of a writer: {error!r}") from error


def _dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _list_name(rank: int, world_size: int) -> str:
    return f"writer-{rank:05d}-of-{world_size:05d}.json"


def _key(rank: int, world_size: int, number: int) -> str:
    """Returns the key of a shard: its number, after the rank if there are several."""
    return f"{number:06d}" if world_size == 1 else f"{rank:05d}-{number:06d}"


def _check_same(name: str, shards: _ShardList, other: str, expected: _ShardList) -> None:
    """Raises `SchemaMismatchError` if two lists differ in their format or fields."""
    if shards.format != expected.format:
        raise SchemaMismatchError(
            f"{name}: its shards are {shards.format}, but the shards of {other} are {expected.format}"
        )
    if list(shards.modalities) != list(expected.modalities):
        fields = [
            ", ".join(f"{one['name']}: {one.get('type')}({one.get('config')})" for one in shard_list.modalities)
            for shard_list in (shards, expected)
        ]
        raise SchemaMismatchError(f"{name}: its shards have {fields[0]}, but the shards of {other} have {fields[1]}")


class FolderWriter:
    """Writes payloads into the shards of a folder; created by `mm_assets.create`, which documents the arguments.

    Attributes:
        path: path of a local folder, else the URL.
        scratch: local folder of the incomplete shard.
        num_samples: number of samples so far, including the samples of the writer that this one continues.
    """

    def __init__(
        self,
        url: str,
        modalities: Sequence[ModalitySpec],
        *,
        form: str = "mstr",
        shard_bytes: int = SHARD_BYTES,
        shard_samples: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        resume: bool = False,
        provenance: Mapping[str, object] | None = None,
        fsync: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        from mm_assets.storage.store import Store

        if form not in FORMATS:
            raise ConfigError("arguments", "format", f"is {form!r}, expected {' or '.join(FORMATS)}")
        for name, number in (("shard_bytes", shard_bytes), ("shard_samples", shard_samples)):
            if number is not None and number < 1:
                raise ConfigError("arguments", name, f"is {number}, expected at least 1")
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ConfigError("arguments", "world_size", f"is {world_size}, expected 1 to {MAX_WORLD_SIZE}")
        if not 0 <= rank < world_size:
            raise ConfigError("arguments", "rank", f"is {rank}, expected 0 to {world_size - 1}")
        if os.path.isfile(url):
            raise ConfigError("arguments", "path", f"{url} is a file, expected a folder")
        self._kind = WRITERS[f".{form}"]
        check_modalities(url, modalities)
        dump_schema(self._kind.format, modalities, [0] * len(modalities), dict(provenance or {}))
        self._store = Store(url, storage_options)
        self.path: Path | str = Path(self._store.url) if self._store.is_local else self._store.url
        self._modalities, self._provenance, self._fsync = tuple(modalities), provenance, fsync
        self._shard_bytes, self._shard_samples = shard_bytes, shard_samples
        self._rank, self._world_size = rank, world_size
        self._shard: PackedWriter | None = None
        self._shard_size = 0
        self._is_closed = False
        self._summary: WriteSummary | None = None
        self._content: bytes | None = None  # of the list that this writer last published
        self._list = self._begin(form, resume)
        self.num_samples = self._list.num_samples
        if self._store.is_local:
            self.scratch = self._store.local_path(f".writing-{rank:05d}")
        else:
            with temporary_disk_named():
                self.scratch = Path(tempfile.mkdtemp(prefix="mm-assets-"))

    # --- the list of shards -------------------------------------------------------------------------------------------

    def _begin(self, form: str, resume: bool) -> _ShardList:
        """Returns the list of the writer that this one continues, or publishes a new one."""
        store, name = self._store, _list_name(self._rank, self._world_size)
        new = _ShardList(
            format=form,
            modalities=json.loads(_dump([_modality(spec) for spec in self._modalities])),
            num_present={spec.name: 0 for spec in self._modalities},
        )
        content = store.found_bytes(name)
        if content is None:
            for other in store.sizes(""):
                match = WRITER_LIST.fullmatch(other)
                if match is None or int(match[2]) != self._world_size:
                    detail = f"{store.url} contains {other}, which this writer did not write: use an empty folder"
                    raise ConfigError("arguments", "path", detail)
            self._content = new.to_bytes()
            if not store.create(name, self._content):
                raise ChangedError(store.url_of(name), "another writer has just begun: each needs a rank of its own")
            return new
        shards = _ShardList.parse(content, store.url_of(name))
        if not resume:
            detail = f"{store.url} already contains {shards.describe()}. Pass resume=True, and write the samples from "
            detail += f"{shards.num_samples} on, which is len(writer); or use an empty folder"
            raise ConfigError("arguments", "path", detail)
        _check_same(store.url_of(name), shards, "this writer", new)
        self._content = content
        self._publish_list(replace(shards, is_complete=False))
        # An earlier writer may have published a shard that is not in its list; it is written again.
        key = _key(self._rank, self._world_size, len(shards.shards))
        store.delete_all(list(store.listing("packed", prefix=f"{key}.")))
        return self._list

    def _publish_list(self, shards: _ShardList) -> None:
        name, content = _list_name(self._rank, self._world_size), shards.to_bytes()
        before = self._store.snapshot(name)
        if before.content != self._content:
            detail = "was replaced in the meantime: another writer of this rank is running"
            raise ChangedError(self._store.url_of(name), detail)
        self._store.replace(before, content)
        self._list, self._content = shards, content

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, sample_id: str, payloads: Mapping[str, Payload | None]) -> None:
        """Appends one sample, and publishes the shard if it is full.

        Raises:
            EncodeError: as for `PackedWriter.write`; or two samples of the shard share an id, which ends the writer.
            ChangedError: another writer of this rank is running.
            SourceError, OSError: the storage or the local disk cannot be written; the writer is closed.
            ValueError: the writer is closed.
        """
        self._check_open()
        if self._shard is None:
            self._shard = self._open_shard()
        self._shard.write(sample_id, payloads)
        self.num_samples += 1
        self._shard_size += len(sample_id) + _SAMPLE_BYTES
        for payload in payloads.values():
            if payload is not None:
                self._shard_size += memoryview(payload.metadata).nbytes + memoryview(payload.data).nbytes
        if self._shard_samples is None:
            is_full = self._shard_size >= self._shard_bytes
        else:
            is_full = self._shard.num_samples >= self._shard_samples
        if is_full:
            self._finish_shard()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"the writer of {self.path} is closed")

    def _open_shard(self) -> PackedWriter:
        self.scratch.mkdir(parents=True, exist_ok=True)
        name = f"{_key(self._rank, self._world_size, len(self._list.shards))}.{self._list.format}"
        # The store's draft syncs the content.
        return self._kind(self.scratch / name, self._modalities, provenance=self._provenance, fsync=False)

    def _finish_shard(self) -> None:
        try:
            shard = self._shard or self._open_shard()
            key = shard.path.stem
            summary = shard.close()
            with self._store.draft(f"packed/{shard.path.name}", durable=self._fsync) as draft:
                shard.path.replace(draft.path)
                draft.name = file_path(self._list.format, key, draft.digest())
            file = draft.result()
            present = {name: count + summary.num_present.get(name, 0) for name, count in self._list.num_present.items()}
            shards = (*self._list.shards, (summary.num_samples, file.size, file.sha256))
            self._publish_list(replace(self._list, shards=shards, num_present=present))
        except BaseException:
            self.abort()
            raise
        self._shard, self._shard_size = None, 0

    def close(self) -> WriteSummary:
        """Publishes the last shard and, of a single writer, the manifest; a second call returns the same summary.

        Raises:
            EncodeError: two samples share an id.
            SourceError, OSError, ValueError: as for `write`.
        """
        if self._summary is not None:
            return self._summary
        self._check_open()
        # An empty dataset has one shard, because readers take the fields from a shard.
        if self._shard is not None or (self._rank == 0 and not self._list.shards):
            self._finish_shard()
        try:
            self._publish_list(replace(self._list, is_complete=True))
        finally:
            self._is_closed = True
            shutil.rmtree(self.scratch, ignore_errors=True)  # also the files of a writer of this rank that was killed
        if self._world_size == 1:
            self._summary = merge(self._store.url, storage_options=self._store.storage_options)
        else:
            self._summary = _summary(self._store, [self._list])
        return self._summary

    def abort(self) -> None:
        """Deletes the incomplete shard and keeps the complete ones; may be called at any time and repeatedly."""
        self._is_closed = True
        if self._shard is not None:
            self._shard.abort()
            self._shard.path.unlink(missing_ok=True)  # it is complete if publishing failed
        with suppress(OSError):  # it is missing, or not empty in a forked copy
            self.scratch.rmdir()


def _modality(spec: ModalitySpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "type": spec.type_name,
        "type_id": spec.type_id,
        "metadata_size": spec.metadata_size,
        "config": dict(spec.config),
    }


# --- the manifest -----------------------------------------------------------------------------------------------------


def merge(
    path: str | os.PathLike[str], *, unique_ids: bool = True, storage_options: Mapping[str, Any] | None = None
) -> WriteSummary:
    """Joins the shards of all writers of a folder: writes its manifest, which `mm_assets.open` reads.

    The samples are ordered by rank. A single writer does this when it is closed. A second call replaces the manifest.

    Args:
        path: the folder or URL of the writers.
        unique_ids: refuse samples with equal ids. Reads all ids, and needs about 20 bytes of memory per sample.
        storage_options: arguments for the URL's file system.

    Raises:
        SourceError: a rank is missing or has not finished, or a shard is missing.
        SchemaMismatchError: ranks differ in fields or format.
        EncodeError: two samples share an id.
        FormatError: a file that a writer wrote is damaged.
    """
    from mm_assets.storage.store import Store

    store = Store(os.fspath(path), storage_options)
    lists = _read_lists(store)
    partitions = []
    for rank, shards in enumerate(lists):
        for number, (num_samples, size, sha256) in enumerate(shards.shards):
            partitions.append(
                ManifestPartition(
                    key=_key(rank, len(lists), number),
                    recipe=sha256[:FILE_DIGITS],
                    num_samples=num_samples,
                    packed={shards.format: (size, sha256)},
                    tables={},
                    streams={},
                    decodable=_NOT_VALIDATED,
                    losses={},
                )
            )
    if not partitions:
        raise CorruptError(store.url_of(_list_name(0, len(lists))), "shards", found=0, expected="at least 1")
    document = make_manifest(
        dataset=store.url.rpartition("/")[2],
        schema={},
        partitions=partitions,
        added=(),
        losses={},
        duplicate_ids={"count": 0, "examples": []} if unique_ids else None,
        settings={},
    )
    content = _dump(document)
    newest = store.snapshot(_MANIFEST)
    manifest = parse_manifest(content, name=store.url_of(_MANIFEST))
    sizes = store.sizes("packed")
    for file, partition in zip(manifest.files, partitions, strict=True):
        name = file_path(lists[0].format, partition.key, file.sha256 or "")
        if sizes.get(name) != file.size:
            detail = "is missing" if name not in sizes else f"has {sizes[name]} bytes"
            raise SourceError(file.location, f"{detail}, but its writer wrote {file.size} bytes: write it again")
    if unique_ids:
        _check_ids([(file.location, file.num_samples) for file in manifest.files], store)
    store.replace(newest, content)
    return _summary(store, lists)


def _summary(store: Store, lists: Sequence[_ShardList]) -> WriteSummary:
    return WriteSummary(
        path=Path(store.url) if store.is_local else store.url,
        num_samples=sum(shards.num_samples for shards in lists),
        num_bytes=sum(shards.num_bytes for shards in lists),
        num_present={
            modality["name"]: sum(shards.num_present.get(modality["name"], 0) for shards in lists)
            for modality in lists[0].modalities
        },
    )


def _read_lists(store: Store) -> list[_ShardList]:
    """Returns the lists of all ranks, which are complete and have the same format and fields."""
    names = sorted(name for name in store.sizes("") if WRITER_LIST.fullmatch(name))
    if not names:
        raise SourceError(store.url, "has no shards of mm_assets.create, which writes writer-00000-of-00001.json")
    matches = [match for name in names if (match := WRITER_LIST.fullmatch(name))]
    world_size = int(matches[0][2])
    for name, match in zip(names, matches, strict=True):
        if int(match[2]) != world_size:
            detail = f"contains {names[0]} and {name}, of different numbers of writers: delete the files of one of them"
            raise SourceError(store.url, detail)
    if missing := sorted(set(range(world_size)) - {int(match[1]) for match in matches}):
        ranks = ", ".join(map(str, missing[:MAX_RANKS_IN_MESSAGE]))
        ranks += ", ..." if len(missing) > MAX_RANKS_IN_MESSAGE else ""
        raise SourceError(store.url, f"lacks {counted(len(missing), 'rank')} of {world_size}: {ranks}")
    with ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="mm_assets-merge") as executor:
        lists = [
            _ShardList.parse(content, store.url_of(name))
            for name, content in zip(names, executor.map(store.read_bytes, names), strict=True)
        ]
    for rank, (name, shards) in enumerate(zip(names, lists, strict=True)):
        _check_same(store.url_of(name), shards, names[0], lists[0])
        if not shards.is_complete:
            detail = f"rank {rank} has not finished ({shards.describe()}): let it end, or run it again with resume=True"
            raise SourceError(store.url_of(name), detail)
    return lists


def _check_ids(files: Sequence[tuple[str, int]], store: Store) -> None:
    """Raises `EncodeError` if samples share an id; each file is a location and a number of samples."""

    def open_shard(location: str) -> closing[Reader]:
        return closing(PackedFiles(location, storage_options=store.storage_options).take_opened()[0])

    def hashes_of(file: tuple[str, int]) -> npt.NDArray[np.uint64]:
        location, num_samples = file
        with open_shard(location) as shard:
            if len(shard) != num_samples:
                raise CorruptError(location, "its samples", found=len(shard), expected=num_samples)
            return hash_texts(shard.sample_ids, num_samples)

    with ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="mm_assets-merge") as executor:
        hashes = np.concatenate(list(executor.map(hashes_of, files)))
    hashes.sort()
    repeated = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    if not len(repeated):
        return
    locations: dict[str, str] = {}
    for location, num_samples in files:  # different ids can have equal hashes
        with open_shard(location) as shard:
            ids = shard.sample_ids
            for index in np.flatnonzero(np.isin(hash_texts(ids, num_samples), repeated)):
                other = locations.setdefault(ids[int(index)], location)
                if other != location:
                    detail = f"{location} and {other} have samples with the id {ids[int(index)]!r}"
                    advice = "the shards stay, and mm_assets.merge(..., unique_ids=False) accepts them"
                    raise EncodeError(f"{store.url}: {detail}: {advice}")
