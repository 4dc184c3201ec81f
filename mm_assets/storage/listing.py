"""The shards at a URL: one file, a folder, a pattern or a list in braces, with sizes and fingerprints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fsspec

from mm_assets.errors import SourceError
from mm_assets.storage.search import FileSearch
from mm_assets.storage.urls import NO_SIZE, Options, filesystem, protocols, public_url, storage_errors

__all__ = ["UNMARKED", "Listing", "ShardFile", "describe_file", "expand_shards"]

_NO_TAG = re.compile(r"[^A-Za-z0-9._:+-]+")
UNMARKED = "unmarked"  # ends the fingerprint of a file whose storage does not report changes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A file as its storage describes it.

    Attributes:
        url: absolute path or URL.
        size: bytes.
        fingerprint: changes whenever the content does: the object's ETag, or size and modification time.
        modified: seconds since 1970, or None where the storage does not report it.
        times: of a local file ``<modified>-<changed>``: the times of the last change of its content and of its
            description (name, rights, links), in nanoseconds since 1970. None of any other file.
    """

    url: str
    size: int
    fingerprint: str
    modified: float | None
    times: str | None = None

    def is_of(self, fingerprint: str) -> bool:
        """Whether this is the description of a file that has this fingerprint by its size and time, or its ETag."""
        modified = None if self.times is None else self.times.partition("-")[0]
        return fingerprint in (self.fingerprint, f"{self.size}-{modified}")


def _describe(fs: fsspec.AbstractFileSystem, path: str, info: Mapping[str, Any]) -> ShardFile:
    if "file" in protocols(fs):
        status = os.stat(path)  # fsspec's mtime is a float and loses nanoseconds
        return ShardFile(
            url=path,
            size=status.st_size,
            fingerprint=f"{status.st_size}-{status.st_mtime_ns}",
            modified=status.st_mtime,
            times=f"{status.st_mtime_ns}-{status.st_ctime_ns}",
        )
    size = info.get("size")
    if size is None:
        raise SourceError(public_url(fs, path), NO_SIZE)
    modified = info.get("LastModified")
    if modified is None:
        modified = next((info[k] for k in ("last_modified", "mtime", "created") if info.get(k)), None)
    seconds: float | None = None
    if isinstance(modified, datetime | int | float):
        seconds = modified.timestamp() if isinstance(modified, datetime) else float(modified)
    tag = info.get("ETag") or next((info[k] for k in ("etag", "md5Hash", "content_md5", "crc32c") if info.get(k)), None)
    if tag is None:  # a listing and a single file may give the same time in two types
        tag = modified if seconds is None else seconds
    tag = _NO_TAG.sub("", UNMARKED if tag is None else str(tag))
    return ShardFile(url=fs.unstrip_protocol(path), size=int(size), fingerprint=f"{size}-{tag}", modified=seconds)


def describe_file(url: str, storage_options: Options | None = None) -> ShardFile:
    """Size and fingerprint of one file as it is now.

    Raises:
        SourceError: the file is not there or may not be read.
    """
    fs, path = filesystem(url, storage_options)
    with storage_errors(url, "cannot be read"):
        info = fs.info(path)
        if info.get("type") == "directory":
            raise SourceError(url, "is a folder, expected a file")
        return _describe(fs, path, info)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a path, a pattern or a list in braces names.

    Attributes:
        shards: sorted by URL.
        skipped: a sentence for each name that is not used, with its place and why.
        folder: URL of the folder that holds them all, with a slash at its end: of a pattern, the one before it.
    """

    shards: tuple[ShardFile, ...]
    skipped: tuple[str, ...] = ()
    folder: str


def expand_shards(
    pattern: str, storage_options: Options | None = None, *, suffixes: tuple[str, ...], known: Iterable[str] = ()
) -> Listing:
    """Lists the shards that a path or URL names, without hidden files.

    What exists is used as it is: a file, or a folder for all files below it whose names end as a shard's. Only
    otherwise are braces expanded, and then ``*``, ``?`` (but not in a URL that HTTP reads) and ``[...]`` matched.
    Local links are followed, and each folder is listed once.

    Args:
        pattern: a path or URL.
        storage_options: arguments for the file system.
        suffixes: ends of a shard's name, in lower case.
        known: URLs that were listed before; of very many an object store is asked faster.

    Raises:
        SourceError: the storage does not answer, or braces stand for too many names.
    """
    fs, path = filesystem(pattern, storage_options)
    search = FileSearch(fs, suffixes, known)
    listed = []
    with storage_errors(public_url(fs, path), "cannot be listed"):
        folder = search.add(path)
        search.complete()
        for place, info in search.files.items():
            with suppress(FileNotFoundError):  # removed since it was listed
                listed.append(_describe(fs, place, info))
    return Listing(
        shards=tuple(sorted(listed, key=lambda shard: shard.url)),
        skipped=tuple(sorted(search.skipped)),
        folder=public_url(fs, folder).rstrip("/") + "/",
    )
