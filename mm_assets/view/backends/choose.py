"""Chooses the backend for locations: by what exists there, then by first bytes, then by names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
from mm_assets.view.backends.base import Backend

__all__ = ["open_backend"]

_PATTERN = "*?[{"
_FILES = (".mult", ".mstr", ".json", ".tar", ".parquet", ".jsonl", ".ndjson")  # suffixes that a folder does not have


def open_backend(
    locations: Sequence[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    allowed: Iterable[str] = (),
    report: Callable[[str], object] | None = None,
) -> Backend:
    """Opens the backend for the arguments of the command.

    Args:
        locations: paths or URLs: a manifest, packed files, a dataset's folder, shards or a table; or globs of them.
        storage_options: arguments for the URLs' file system.
        allowed: prefixes of URLs and paths that the rows of a table may name, beside its own folder.
        report: called with a sentence for each file that is skipped.

    Raises:
        MmAssetsError: a location cannot be read, or holds nothing that can be shown.
        OSError: a local packed file cannot be read.
    """
    if not locations:
        raise ConfigError("arguments", "X", "found nothing, expected a path or URL")
    allowed = [str(local_path(one)) if is_local(one) else one for one in allowed]
    title = ", ".join(split_signature(location)[0] for location in locations[:3]) + (
        f" and {len(locations) - 3} more" if len(locations) > 3 else ""
    )
    skipped: list[str] = []
    urls = [url for location in locations for url in _expand(location, storage_options, skipped)]
    if len(urls) == 1 and _is_folder(urls[0], storage_options):
        backend = _open_folder(urls[0], storage_options, allowed, skipped)
    else:
        backend = _open_files(urls, title, storage_options, allowed)
    if report is not None:
        for line in skipped:
            report(line)
    return backend


def _expand(location: str, options: Mapping[str, Any] | None, skipped: list[str]) -> list[str]:
    """Returns the files that a pattern matches; any other location as it is, a local one absolute."""
    if (why := url_fault(location)) is not None:
        raise SourceError(location, why)
    url, signature = split_signature(location)
    is_file = is_local(location) and local_path(location).exists()
    if any(character in url for character in _PATTERN if character != "?" or not is_web(url)) and not is_file:
        shards = _shards(normalized_url(location), options, skipped, or_error=(url, "matches no file"))
        return [signed_url(shard, signature) for shard in shards]
    return [str(local_path(location)) if is_local(location) else location]


def _shards(
    location: str, options: Mapping[str, Any] | None, skipped: list[str], *, or_error: tuple[str, str]
) -> list[str]:
    """Returns the URLs of the shards at a location, and adds a sentence to `skipped` for each file that is not used."""
    from mm_assets.rows.base import shard_kinds
    from mm_assets.storage.listing import expand_shards

    listing = expand_shards(location, options, kinds=shard_kinds(None, where="arguments"))
    if not listing.shards:
        url, detail = or_error
        raise SourceError(url, "; ".join((detail, *listing.skipped[:3])))
    skipped += listing.skipped
    return [shard.url for shard in listing.shards]


def _is_folder(url: str, options: Mapping[str, Any] | None) -> bool:
    if is_local(url):
        return local_path(url).is_dir()
    if split_signature(url)[0].endswith(_FILES):
        return False  # saves a request
    fs, path = filesystem(url, options)
    with storage_errors(url, "cannot be read"):
        return bool(fs.isdir(path))


def _open_folder(folder: str, options: Mapping[str, Any] | None, allowed: Iterable[str], skipped: list[str]) -> Backend:
    from mm_assets.storage.store import Store

    names = Store(folder, options).sizes("")
    if "shards.json" in names:
        from mm_assets.view.backends.folder import FolderBackend, open_dataset_store

        return FolderBackend(open_dataset_store(folder, options), options)
    if "manifest.json" in names or any(name.endswith((".mult", ".mstr")) for name in names):
        return _open_packed(folder, folder, options)
    datasets = _datasets_in(folder, options)
    if datasets:
        raise ConfigError("arguments", "X", f"{folder} holds datasets: name one, such as {folder}/{datasets[0]}")
    nothing = folder, "holds no packed files, no shards and no tables"
    files = _shards(folder, options, skipped, or_error=nothing)
    return _open_files(files, folder, options, allowed)


def _datasets_in(folder: str, options: Mapping[str, Any] | None) -> list[str]:
    """Returns the names of the folders of datasets in a storage root."""
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
        if not folder or error.key != "format":  # of two formats, one is enough to be shown
            raise
        dataset = mm_assets.open(path, storage_options=options, format="mult")
    return PackedBackend(dataset, title)


def _open_files(urls: Sequence[str], title: str, options: Mapping[str, Any] | None, allowed: Iterable[str]) -> Backend:
    if len(urls) == 1 and urls[0].endswith(".json"):
        return _open_packed(urls[0], title, options)
    packed = list(urls) if len(urls) > 1 else urls[0]
    if all(url.endswith((".mult", ".mstr")) for url in urls):
        return _open_packed(packed, title, options)
    prefixes = tuple(allowed)
    first = _open_file(urls[0], title, options, prefixes)
    if first is None:
        return _open_packed(packed, title, options)
    if len(urls) == 1:
        return first
    from mm_assets.view.backends.joined import join

    first.close()  # it is opened again like the others: any of them may become unreadable
    return join(urls, title, first.kind, lambda url: _open_file_of_kind(url, first.kind, options, prefixes))


def _open_file_of_kind(url: str, kind: str, options: Mapping[str, Any] | None, allowed: Sequence[str]) -> Backend:
    backend = _open_file(url, url, options, allowed)
    if backend is None or backend.kind != kind:
        raise SourceError(url, f"is not a {kind}, but the first file is: name files of one kind")
    return backend


def _open_file(url: str, title: str, options: Mapping[str, Any] | None, allowed: Sequence[str]) -> Backend | None:
    """Opens the backend of a file that is not packed; returns None if the file is packed."""
    from mm_assets.formats.records import MSTR_MAGIC, MULT_MAGIC
    from mm_assets.rows.base import source_formats
    from mm_assets.rows.from_listing import ListingRows, delimiter_of
    from mm_assets.sources.base import detect
    from mm_assets.storage.files import SourceFile
    from mm_assets.view.backends.row_files import JsonLines, ParquetRows
    from mm_assets.view.backends.rows import RowsBackend, open_source

    file = SourceFile(url, options)
    try:
        if (head := file.read(0, min(4, file.size))) in (MULT_MAGIC, MSTR_MAGIC):
            return None
        source = detect(file, source_formats(None, where="arguments"))
        if source is not ListingRows or delimiter_of(file) is not None:
            kind = "shard" if hasattr(source, "members") else "table"
            return open_source(file, title, options, allowed, kind=kind)
        # Any other table is shown as it is, even if it is not a list of files.
        table = ParquetRows(file) if ListingRows.accepts(head) else JsonLines(file)
        return RowsBackend(table, title, _may_name(file.url, options, allowed), options)
    except BaseException:
        file.close()
        raise


def _may_name(table: str, options: Mapping[str, Any] | None, allowed: Iterable[str]) -> Callable[[str], bool]:
    """Returns whether the rows of a table may name a path: below its folder, a shard of its dataset, or allowed."""
    from mm_assets.view.backends.references import below

    folder = table.rpartition("/")[0]
    shards = _shards_of_dataset(folder.rpartition("/")[0], options)
    is_below = below((f"{folder}/", *allowed))
    return lambda path: path in shards or is_below(path)


def _shards_of_dataset(folder: str, options: Mapping[str, Any] | None) -> frozenset[str]:
    """Returns the registered shards of the dataset in a folder; none if it has no dataset."""
    from mm_assets.storage.store import Store
    from mm_assets.view.backends.folder import open_dataset_store

    if not folder or not Store(folder, options).exists("shards.json"):
        return frozenset()
    try:
        partitions = open_dataset_store(folder, options).registered().partitions
    except ConfigError:
        return frozenset()
    return frozenset(shard.url for partition in partitions.values() for shard in partition.shards)
