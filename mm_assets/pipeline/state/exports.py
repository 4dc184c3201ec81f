"""Exports of published partitions: which are complete, which are pending, and what lists those of all partitions.

The export of a partition is a folder, ``<out>/<key>.<digits>``. The digits change with the packed file, the export's
settings and the version of the format, so a new export is another folder, and a reader of the old one goes on. Its
record, ``exports/<name>/<key>.<digits>.json`` in the dataset's folder, is created once, when every shard was read again
and compared: one listing of the records answers which partitions are up to date. ``<out>/exports.json`` follows from
the records.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from mm_assets.dataset.manifest import ManifestPartition, file_path
from mm_assets.errors import ConfigError, SchemaMismatchError, meant
from mm_assets.pipeline.chain import export_stage
from mm_assets.pipeline.spec import ExportOptions
from mm_assets.pipeline.state.folder import DatasetStore, until_unchanged
from mm_assets.pipeline.state.records import RECIPE_DIGITS, canonical_json
from mm_assets.storage.store import ListedFile, Store

__all__ = [
    "INDEX",
    "PartitionExport",
    "complete_exports",
    "delete_export",
    "export_folders",
    "export_partition",
    "exports_store",
    "missing_exports",
    "read_export",
    "records_folder",
    "write_indexes",
]

INDEX = "exports.json"  # in the folder of an export of all partitions
_FOLDER = "exports"  # in the dataset's folder
_NAME = re.compile(rf".+\.[0-9a-f]{{{RECIPE_DIGITS}}}")
_READS = 16  # records at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionExport:
    """A complete export of one partition, which was read again and compared.

    Attributes:
        folder: its name below the export's folder.
        num_samples: samples in it.
        num_bytes: bytes of its shards.
        num_repeated: samples with the id of another one of their shard, whose keys end in ``~1`` and so on.
        digest: SHA-256 of the digests of its shards: keys, names, sizes and CRC-32Cs of all files.
        num_shards: its shards.
        files: of its shards, below the export's folder.
    """

    folder: str
    num_samples: int
    num_bytes: int
    num_repeated: int
    digest: str
    num_shards: int
    files: tuple[str, ...]

    @classmethod
    def of_summary(cls, folder: str, summary: Mapping[str, Any]) -> PartitionExport:
        """Returns the export in a folder, by its ``export.json``."""
        shards = summary["shards"]
        return cls(
            folder=folder,
            num_samples=summary["num_samples"],
            num_bytes=sum(shard["num_bytes"] for shard in shards),
            num_repeated=sum(shard["details"].get("repeated", 0) for shard in shards),
            digest=hashlib.sha256("".join(shard["digest"] for shard in shards).encode()).hexdigest(),
            num_shards=len(shards),
            files=tuple(f"{folder}/{file}" for shard in shards for file in shard["files"]),
        )

    @classmethod
    def from_json(cls, value: Any, *, where: str) -> PartitionExport:
        """Reads a record; raises `SchemaMismatchError` if the value is not one."""
        try:
            read = cls(**{**value, "files": tuple(value["files"])})
            numbers = read.num_samples, read.num_bytes, read.num_repeated, read.num_shards
            if {*map(type, numbers)} != {int} or {*map(type, (read.folder, read.digest, *read.files))} != {str}:
                raise TypeError("a value has another type")
        except (TypeError, KeyError, ValueError) as error:
            detail = f"is not the record of an export ({error}): delete it, and the partition is exported again"
            raise SchemaMismatchError(f"{where}: {detail}") from error
        return read


def exports_store(dataset: DatasetStore, options: ExportOptions) -> Store:
    """The folder of an export of all partitions."""
    if options.out is None:
        return dataset.store.child(records_folder(options))
    return Store(options.out, options.out_options)


def records_folder(options: ExportOptions) -> str:
    """The folder of the records of an export, in the dataset's."""
    return f"{_FOLDER}/{options.asset.removeprefix('export_')}"


def export_folders(
    dataset: DatasetStore, options: ExportOptions, entries: Iterable[ManifestPartition]
) -> dict[str, str]:
    """Returns the folder that the export of each published partition has, complete or not: ``<key>.<digits>``."""
    form = dataset.spec.formats[0]
    settings = canonical_json(export_stage(options).made_with(dataset.spec))

    def folder(entry: ManifestPartition) -> str:
        _, sha256 = entry.packed[form]
        return f"{entry.key}.{hashlib.sha256(settings + sha256.encode()).hexdigest()[:RECIPE_DIGITS]}"

    return {entry.key: folder(entry) for entry in entries}


def complete_exports(dataset: DatasetStore, options: ExportOptions) -> Mapping[str, ListedFile]:
    """Lists the records of an export, of former settings and files too, by folder; `SourceError` if it cannot."""
    listed = dataset.store.listing(records_folder(options))
    complete = {name.rpartition("/")[2].removesuffix(".json"): file for name, file in listed.items()}
    return {folder: file for folder, file in complete.items() if _NAME.fullmatch(folder)}


def missing_exports(dataset: DatasetStore, entries: Iterable[ManifestPartition]) -> dict[str, list[str]]:
    """Returns by key of published partitions the assets of the exports that they lack.

    Raises:
        SourceError: the storage cannot be read.
    """
    missing: dict[str, list[str]] = {}
    entries = list(entries)
    for options in dataset.spec.exports:
        complete = complete_exports(dataset, options)
        for key, folder in export_folders(dataset, options, entries).items():
            if folder not in complete:
                missing.setdefault(key, []).append(options.asset)
    return missing


def read_export(dataset: DatasetStore, options: ExportOptions, folder: str) -> PartitionExport | None:
    """Reads the record of an export; None if it is not complete.

    Raises:
        SourceError: the storage cannot be read.
        SchemaMismatchError: the record is damaged.
    """
    name = _record_name(options, folder)
    content, where = dataset.store.found_bytes(name), dataset.store.url_of(name)
    if content is None:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    return PartitionExport.from_json(value, where=where)


def export_partition(dataset: DatasetStore, options: ExportOptions, entry: ManifestPartition) -> PartitionExport:
    """Exports a published partition, unless it is up to date; an interrupted export is completed.

    Raises:
        MmAssetsError: as `mm_assets.export`.
    """
    from mm_assets.dataset.dataset import open as open_dataset
    from mm_assets.exports.export import export, resumed_export

    folder = export_folders(dataset, options, [entry])[entry.key]
    if (complete := read_export(dataset, options, folder)) is not None:
        return complete
    store = exports_store(dataset, options).child(folder)
    summary = resumed_export(store)
    if summary is None:
        form = dataset.spec.formats[0]
        packed = dataset.store.url_of(file_path(form, entry.key, entry.packed[form][1]))
        settings = {"shard_bytes", "shard_samples", "image_format", "quality"}
        given = options.model_dump(include=settings, exclude_none=True)
        with open_dataset(packed, storage_options=dataset.spec.root_options, verify=True) as opened:
            for name in options.modalities or ():
                if name not in opened.names:
                    detail = f"has no modality {name!r}, which {options.asset} names; it has {', '.join(opened.names)}"
                    raise ConfigError(dataset.spec.where, "exports", f"{packed} {detail}{meant(name, opened.names)}")
            view = opened if options.modalities is None else opened.select_modalities(options.modalities)
            summary = asdict(export(view, options.format, store.url, storage_options=store.storage_options, **given))
    record = PartitionExport.of_summary(folder, summary)
    dataset.store.create(_record_name(options, folder), canonical_json(asdict(record)))
    return record


def delete_export(dataset: DatasetStore, options: ExportOptions, folder: str) -> None:
    """Deletes an export of a partition; what remains of it after a kill is not taken for an export.

    Raises:
        SourceError: the storage refuses.
    """
    from mm_assets.exports.export import SUMMARY

    store = exports_store(dataset, options)
    dataset.store.delete(_record_name(options, folder))
    store.delete(f"{folder}/{SUMMARY}")
    store.delete_folder(folder)


def _record_name(options: ExportOptions, folder: str) -> str:
    return f"{records_folder(options)}/{folder}.json"


def write_indexes(dataset: DatasetStore, entries: Mapping[str, ManifestPartition]) -> None:
    """Writes what lists the complete exports of published partitions: `INDEX`, and what the format's library reads.

    Args:
        dataset: the dataset's folder.
        entries: the published partitions by key.

    Raises:
        SourceError: the storage cannot be read or written.
        ChangedError: other processes wrote it each time.
        ConfigError: the folder has the exports of another dataset.
    """
    for options in dataset.spec.exports:
        until_unchanged(partial(_write_index, dataset, options, entries), attempts=8)


def _write_index(dataset: DatasetStore, options: ExportOptions, entries: Mapping[str, ManifestPartition]) -> None:
    from mm_assets.exports.export import EXPORTS

    store = exports_store(dataset, options)
    before = store.snapshot(INDEX)
    owner, known = _indexed(before.content)
    if owner not in (None, dataset.spec.name):
        detail = (
            f"{store.url} has the exports of the dataset {owner}: give each dataset's exports an `out` of their own"
        )
        raise ConfigError(dataset.spec.where, "exports", detail)
    complete = complete_exports(dataset, options)
    folders = export_folders(dataset, options, (entry for _, entry in sorted(entries.items())))
    exports = {key: known.get(key) for key, folder in folders.items() if folder in complete}
    new = [key for key, exported in exports.items() if exported is None or exported["folder"] != folders[key]]
    with ThreadPoolExecutor(_READS, thread_name_prefix="exports") as pool:
        for key, record in zip(
            new, pool.map(lambda key: read_export(dataset, options, folders[key]), new), strict=True
        ):
            exports[key] = None if record is None else asdict(record)
    exports = {key: exported for key, exported in exports.items() if exported is not None}
    value = {"dataset": dataset.spec.name, "format": options.format, "partitions": exports}
    content = canonical_json(value, indent=1)
    if before.content != content:
        join = getattr(EXPORTS[options.format], "join", None)
        if join is not None and exports:
            join(store, [folders[key] for key in exports])
        store.replace(before, content)  # the last: a kill before it is made up for


def _indexed(content: bytes | None) -> tuple[str | None, Mapping[str, Mapping[str, Any]]]:
    """The dataset of an index, and its partitions, which are copies of records; nothing if it is damaged."""
    with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError, SchemaMismatchError):
        index = json.loads(content or b"{}")
        partitions = index["partitions"].items()
        return str(index["dataset"]), {
            key: asdict(PartitionExport.from_json(value, where=INDEX)) for key, value in partitions
        }
    return None, {}
