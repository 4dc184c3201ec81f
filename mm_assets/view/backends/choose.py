"""What a location holds, and the backend for it: by what is there, by first bytes, and by names last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mm_assets.errors import ConfigError, SourceError
from mm_assets.storage.urls import (
    filesystem,
    is_local,
    is_web,
    local_path,
    normalized_url,
    signed_url,
    split_signature,
    storage_errors,
    url_fault,
)
from mm_assets.summaries import counted
from mm_assets.view.backends.base import Backend

if TYPE_CHECKING:
    from mm_assets.storage.files import SourceFile

__all__ = ["open_backend"]

MAX_TOGETHER = 64  # shards that are opened before the first page; of more each is opened when those before it are read
_PATTERN = "*?[{"
_TABLES = (".parquet", ".jsonl", ".ndjson")


def open_backend(
    locations: Sequence[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    allowed: Iterable[str] = (),
    report: Callable[[str], object] | None = None,
) -> Backend:
    """The backend for what was given to the command.

    Args:
        locations: paths or URLs: a manifest, packed files, a dataset's folder, shards or a table; or globs of them.
        storage_options: arguments for the URLs' file system.
        allowed: prefixes of URLs and paths, beside a table's own folder, that its rows may name.
        report: takes a sentence for each file that is skipped.

    Raises:
        MmAssetsError: it cannot be read, or is nothing that can be shown.
        OSError: a local packed file cannot be read.
    """
    if not locations:
        raise ConfigError("arguments", "X", "found nothing, expected a path or URL")
    title = ", ".join(split_signature(location)[0] for location in locations[:3]) + (
        f" and {len(locations) - 3} more" if len(locations) > 3 else ""
    )
    skipped: list[str] = []
    found = [url for location in locations for url in _expanded(location, storage_options, skipped)]
    if len(found) == 1 and _is_folder(found[0], storage_options):
        backend = _open_folder(found[0], storage_options, allowed, skipped)
    else:
        backend = _open_files(found, title, storage_options, allowed)
    if report is not None:
        for line in skipped:
            report(line)
    return backend


def _expanded(location: str, options: Mapping[str, Any] | None, skipped: list[str]) -> list[str]:
    """The files that a pattern matches; any other location as it is, a local one absolute."""
    if (why := url_fault(location)) is not None:
        raise SourceError(location, why)
    url, signature = split_signature(location)
    is_file = is_local(location) and local_path(location).exists()
    if any(character in url for character in _PATTERN if character != "?" or not is_web(url)) and not is_file:
        from mm_assets.rows.base import shard_suffixes
        from mm_assets.storage.listing import expand_shards

        suffixes = shard_suffixes(None, where="arguments")
        listing = expand_shards(normalized_url(location), options, suffixes=suffixes)
        if not listing.shards:
            raise SourceError(url, "; ".join(("matches no file", *listing.skipped[:3])))
        skipped += listing.skipped
        return [signed_url(file.url, signature) for file in listing.shards]
    return [str(local_path(location)) if is_local(location) else location]


def _is_folder(url: str, options: Mapping[str, Any] | None) -> bool:
    if is_local(url):
        return local_path(url).is_dir()
    if split_signature(url)[0].endswith((".mult", ".mstr", ".json", ".tar", *_TABLES)):
        return False  # a file by its name: this saves a request
    fs, path = filesystem(url, options)
    with storage_errors(url, "cannot be read"):
        return bool(fs.isdir(path))


def _open_folder(folder: str, options: Mapping[str, Any] | None, allowed: Iterable[str], skipped: list[str]) -> Backend:
    from mm_assets.rows.base import shard_suffixes
    from mm_assets.storage.listing import expand_shards
    from mm_assets.storage.store import Store

    store = Store(folder, options)
    names = store.sizes("")
    if "shards.json" in names:
        from mm_assets.view.backends.folder import FolderBackend, open_dataset_store

        return FolderBackend(open_dataset_store(folder, options), options)
    if "manifest.json" in names or any(name.endswith((".mult", ".mstr")) for name in names):
        return _open_packed(folder, folder, options)
    datasets = _datasets_in(folder, options)
    if datasets:
        raise ConfigError("arguments", "X", f"{folder} holds datasets: name one, such as {folder}/{datasets[0]}")
    listing = expand_shards(folder, options, suffixes=shard_suffixes(None, where="arguments"))
    skipped += listing.skipped
    files = [shard.url for shard in listing.shards] or [store.url_of(name) for name in names if name.endswith(_TABLES)]
    if not files:
        raise SourceError(folder, "; ".join(("holds no packed files, no shards and no tables", *listing.skipped[:3])))
    return _open_files(files, folder, options, allowed)


def _datasets_in(folder: str, options: Mapping[str, Any] | None) -> list[str]:
    """Names of the folders of datasets in a storage root."""
    fs, path = filesystem(folder, options)
    with storage_errors(folder, "cannot be listed"):
        inner = [info["name"].rstrip("/") for info in fs.ls(path, detail=True) if info["type"] == "directory"][:100]
        return sorted(name.rsplit("/", 1)[-1] for name in inner if fs.exists(f"{name}/shards.json"))


def _open_packed(path: str | list[str], title: str, options: Mapping[str, Any] | None) -> Backend:
    import mm_assets
    from mm_assets.view.backends.packed import PackedBackend

    folder = isinstance(path, str) and not path.endswith((".json", ".mult", ".mstr"))
    try:
        dataset = mm_assets.open(path, storage_options=options)
    except ConfigError as error:
        if not folder or error.key != "format":  # of both formats one is enough to look at
            raise
        dataset = mm_assets.open(path, storage_options=options, format="mult")
    return PackedBackend(dataset, title)


def _open_files(urls: Sequence[str], title: str, options: Mapping[str, Any] | None, allowed: Iterable[str]) -> Backend:
    if len(urls) == 1 and urls[0].endswith(".json"):
        return _open_packed(urls[0], title, options)
    if all(url.endswith((".mult", ".mstr")) for url in urls):
        return _open_packed(list(urls) if len(urls) > 1 else urls[0], title, options)
    from mm_assets.storage.files import SourceFile

    together = len(urls) <= MAX_TOGETHER
    files: list[SourceFile] = []
    try:
        for url in urls if together else urls[:1]:
            files.append(SourceFile(url, options))
        kind = _kind(files[0])
        if kind == "shard" and together:
            from mm_assets.view.backends.container import ContainerBackend

            return ContainerBackend(files, title)
        if kind == "table" and len(urls) == 1:
            return _open_table(files[0], title, options, allowed)
    except BaseException:
        for file in files:
            file.close()
        raise
    for file in files:
        file.close()
    if kind == "packed":
        return _open_packed(list(urls) if len(urls) > 1 else urls[0], title, options)
    return _open_joined(kind, urls, title, options, allowed)


def _open_joined(
    kind: str, urls: Sequence[str], title: str, options: Mapping[str, Any] | None, allowed: Iterable[str]
) -> Backend:
    from mm_assets.sources.samples import shard_labels
    from mm_assets.view.backends.joined import JoinedBackend

    labels, prefixes = shard_labels(list(urls)), tuple(allowed)
    sources = {labels[url]: partial(_open_one, kind, url, options, prefixes) for url in urls}
    return JoinedBackend(title, counted(len(sources), kind), sources)


def _open_one(kind: str, url: str, options: Mapping[str, Any] | None, allowed: Iterable[str]) -> Backend:
    from mm_assets.storage.files import SourceFile

    file = SourceFile(url, options)
    try:
        if _kind(file) != kind:
            raise SourceError(url, f"is not a {kind}, as the first file is: name files of one kind")
        if kind == "shard":
            from mm_assets.view.backends.container import ContainerBackend

            return ContainerBackend([file], url)
        return _open_table(file, url, options, allowed)
    except BaseException:
        file.close()
        raise


def _kind(file: SourceFile) -> str:
    """What a file is: ``packed``, a ``shard``, or a ``table`` of rows."""
    from mm_assets.formats.records import MSTR_MAGIC, MULT_MAGIC
    from mm_assets.sources.base import detect
    from mm_assets.sources.head import HEAD_BYTES
    from mm_assets.sources.tar import TarSource

    head = file.read(0, min(HEAD_BYTES, file.size))
    if head[:4] in (MULT_MAGIC, MSTR_MAGIC):
        return "packed"
    if TarSource.accepts(head):  # the first that is asked anyway, without what tables of rows import
        return "shard"
    from mm_assets.rows.base import source_formats

    found = detect(file, source_formats(None, where="arguments"))
    return "shard" if hasattr(found, "members") else "table"


def _open_table(file: SourceFile, title: str, options: Mapping[str, Any] | None, allowed: Iterable[str]) -> Backend:
    from mm_assets.sources.parquet import PARQUET_MAGIC
    from mm_assets.view.backends.references import References
    from mm_assets.view.backends.row_files import JsonLines, ParquetRows, RowFile
    from mm_assets.view.backends.rows import RowsBackend

    is_parquet = file.read(0, min(4, file.size)) == PARQUET_MAGIC
    table: RowFile = ParquetRows(file) if is_parquet else JsonLines(file)
    references = References(_may_name(file.url, options, allowed), options)
    return RowsBackend(table, title, references, "Parquet table" if is_parquet else "list of JSON")


def _may_name(table: str, options: Mapping[str, Any] | None, allowed: Iterable[str]) -> Callable[[str], bool]:
    """What the rows of a table may name: files below its folder, the shards of its dataset, and what is allowed."""
    from mm_assets.rows.source_ref import is_allowed_reference

    folder = table.rpartition("/")[0]
    shards = _shards_of_dataset(folder.rpartition("/")[0], options)
    prefixes = (f"{folder}/", *(str(local_path(one)) if is_local(one) else one for one in allowed))

    def may_name(path: str) -> bool:
        if path in shards:
            return True
        if not is_allowed_reference(path, prefixes):
            return False
        # A link in the folder must not lead out of it.
        return not is_local(path) or is_allowed_reference(os.path.realpath(path), tuple(map(_real, prefixes)))

    return may_name


def _real(prefix: str) -> str:
    if not is_local(prefix):
        return prefix
    return os.path.realpath(prefix) + ("/" if prefix.endswith("/") else "")


def _shards_of_dataset(folder: str, options: Mapping[str, Any] | None) -> frozenset[str]:
    """The registered shards of the dataset whose folder this is; none of any other."""
    from mm_assets.storage.store import Store
    from mm_assets.view.backends.folder import open_dataset_store

    if not folder or not Store(folder, options).exists("shards.json"):
        return frozenset()
    try:
        partitions = open_dataset_store(folder, options).registered().partitions
    except ConfigError:
        return frozenset()
    return frozenset(shard.url for partition in partitions.values() for shard in partition.shards)
