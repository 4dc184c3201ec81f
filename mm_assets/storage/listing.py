"""The files at a URL: one file, a folder or a glob, with sizes and fingerprints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fsspec
from fsspec.utils import glob_translate

from mm_assets.errors import SourceError
from mm_assets.storage.s3_listing import list_objects
from mm_assets.storage.urls import Options, filesystem, protocols, public_url, storage_errors

__all__ = ["UNMARKED", "ShardFile", "describe_file", "expand_shards"]

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
        raise SourceError(public_url(fs, path), "the storage does not report the file's size")
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


def expand_shards(
    pattern: str, storage_options: Options | None = None, *, suffixes: tuple[str, ...], known: Iterable[str] = ()
) -> list[ShardFile]:
    """The shards that a folder, a glob or one path names, sorted by URL, without hidden files.

    Args:
        pattern: a glob, a file, or a folder for all files below it whose names end as a shard's.
        storage_options: arguments for the file system.
        suffixes: ends of a shard's name, in lower case.
        known: URLs that were listed before; of very many an object store is asked faster.
    """
    fs, path = filesystem(pattern, storage_options)
    with storage_errors(pattern, "cannot be listed"):
        if any(c in path for c in "*?["):
            found = {p: i for p, i in _matching(fs, path, known).items() if i.get("type") != "directory"}
        elif fs.isdir(path):
            files = (
                {info["name"]: info for info in list_objects(fs, path, is_recursive=True, known=_names(fs, known))}
                if "s3" in protocols(fs)
                else fs.find(path, detail=True)
            )
            found = {p: i for p, i in files.items() if p.lower().endswith(suffixes)}
        elif fs.exists(path):
            found = {path: fs.info(path)}
        else:
            found = {}
        listed = []
        for place, info in found.items():
            if not place.rsplit("/", 1)[-1].startswith("."):
                with suppress(FileNotFoundError):  # removed since it was listed, or a dangling link
                    listed.append(_describe(fs, place, info))
    return sorted(listed, key=lambda shard: shard.url)


def _names(fs: fsspec.AbstractFileSystem, urls: Iterable[str]) -> list[str]:
    return sorted(map(fs._strip_protocol, urls))


def _matching(fs: fsspec.AbstractFileSystem, pattern: str, known: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """What a glob matches, by path; of a single folder of an object store it is listed once, `glob` lists it twice."""
    folder, _, base = pattern.rpartition("/")
    if "file" in protocols(fs) or any(c in folder for c in "*?[") or "**" in base:
        found: dict[str, Mapping[str, Any]] = fs.glob(pattern, detail=True)
        return found
    matches = re.compile(glob_translate(pattern)).match
    with suppress(FileNotFoundError):
        listed = (
            list_objects(fs, folder, known=_names(fs, known)) if "s3" in protocols(fs) else fs.ls(folder, detail=True)
        )
        return {info["name"]: info for info in listed if matches(info["name"])}
    return {}
