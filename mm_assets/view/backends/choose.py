"""What a location holds, and the backend for it: by what is there, by first bytes, and by names last."""

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
_FILES = (".mult", ".mstr", ".json", ".tar", ".parquet", ".jsonl", ".ndjson")  # ends of names that no folder has


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
    allowed = [str(local_path(one)) if is_local(one) else one for one in allowed]
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
        from mm_assets.rows.base import shard_kinds
        from mm_assets.storage.listing import expand_shards

        listing = expand_shards(normalized_url(location), options, kinds=shard_kinds(None, where="arguments"))
        if not listing.shards:
            raise SourceError(url, "; ".join(("matches no file", *listing.skipped[:3])))
        skipped += listing.skipped
        return [signed_url(file.url, signature) for file in listing.shards]
    return [str(local_path(location)) if is_local(location) else location]


def _is_folder(url: str, options: Mapping[str, Any] | None) -> bool:
    if is_local(url):
        return local_path(url).is_dir()
    if split_signature(url)[0].endswith(_FILES):
        return False  # which saves a request
    fs, path = filesystem(url, options)
    with storage_errors(url, "cannot be read"):
        return bool(fs.isdir(path))


def _open_folder(folder: str, options: Mapping[str, Any] | None, allowed: Iterable[str], skipped: list[str]) -> Backend:
    from mm_assets.rows.base import shard_kinds
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
    listing = expand_shards(folder, options, kinds=shard_kinds(None, where="arguments"))
    skipped += listing.skipped
    files = [shard.url for shard in listing.shards]
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

    first.close()  # it is opened again as the others are, any of which may become unreadable
    return join(urls, title, first.kind, lambda url: _open_further(url, first.kind, options, prefixes))


def _open_further(url: str, kind: str, options: Mapping[str, Any] | None, allowed: Sequence[str]) -> Backend:
    found = _open_file(url, url, options, allowed)
    if found is None or found.kind != kind:
        raise SourceError(url, f"is not a {kind}, as the first file is: name files of one kind")
    return found


def _open_file(url: str, title: str, options: Mapping[str, Any] | None, allowed: Sequence[str]) -> Backend | None:
    """The backend of a file that is not packed; None of a packed one."""
    from mm_assets.formats.records import MSTR_MAGIC, MULT_MAGIC
    from mm_assets.rows.base import source_formats
    from mm_assets.rows.from_listing import ListingRows
    from mm_assets.sources.base import detect
    from mm_assets.storage.files import SourceFile
    from mm_assets.view.backends.row_files import JsonLines, ParquetRows
    from mm_assets.view.backends.rows import RowsBackend, open_source

    file = SourceFile(url, options)
    try:
        if (head := file.read(0, min(4, file.size))) in (MULT_MAGIC, MSTR_MAGIC):
            return None
        found = detect(file, source_formats(None, where="arguments"))
        if found is not ListingRows:
            kind = "shard" if hasattr(found, "members") else "table"
            return open_source(file, title, options, allowed, kind=kind)
        # Any table is shown, also one that is not a list of files.
        table = ParquetRows(file) if ListingRows.accepts(head) else JsonLines(file)
        return RowsBackend(table, title, _may_name(file.url, options, allowed), options)
    except BaseException:
        file.close()
        raise


def _may_name(table: str, options: Mapping[str, Any] | None, allowed: Iterable[str]) -> Callable[[str], bool]:
    """What the rows of a table may name: files below its folder, the shards of its dataset, and what is allowed."""
    from mm_assets.view.backends.references import below

    folder = table.rpartition("/")[0]
    shards = _shards_of_dataset(folder.rpartition("/")[0], options)
    is_below = below((f"{folder}/", *allowed))
    return lambda path: path in shards or is_below(path)


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
