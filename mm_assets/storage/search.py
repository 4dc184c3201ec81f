"""The files that a path, a pattern or a list in braces names, in any file system.

What exists is used as it is. Only otherwise are braces expanded and then patterns matched, and a folder before a
pattern that exists is used as it is too. A name that cannot be used is reported and keeps no other file from being
found.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from html import unescape
from typing import Any
from urllib.parse import unquote

import fsspec
from fsspec.utils import glob_translate

from mm_assets.errors import SourceError
from mm_assets.storage.braces import expand_braces
from mm_assets.storage.s3_listing import list_objects
from mm_assets.storage.urls import http_status, protocols, public_url, reason, without_query

__all__ = ["FileSearch"]

MAX_MISSING_IN_REPORT = 10
MAX_FOLDERS = 10_000  # of a server, whose pages may link to each other without end
_REQUESTS = 16  # at a time, each of which waits for the server
_MISSING = (None, 404, 410)  # of HTTP; file systems without it have no status
_NO_ENTRY = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)

_S3_KEYS = {"type", "size", "ETag", "LastModified"}

Info = Mapping[str, Any]
_FILE: Info = {"type": "file"}  # shared: a folder may have a million files


class FileSearch:
    """Finds files, without hidden ones.

    Args:
        fs: the file system.
        suffixes: suffixes of a shard's name, in lower case.
        known: URLs that were listed before; if there are very many, an object store is listed in parallel.

    Attributes:
        files: by path, the file system's description of each file that a path names or a pattern matches.
        folders: by path of each folder, the descriptions of all files below it, hidden files included.
        skipped: a sentence for each name that cannot be used, with its place and the reason.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem, suffixes: tuple[str, ...], known: Iterable[str]) -> None:
        self.fs = fs
        self.files: dict[str, Info] = {}
        self.folders: dict[str, dict[str, Info]] = {}
        self.skipped: list[str] = []
        self._suffixes = suffixes
        self._known = known
        self._is_local, self._is_web = "file" in protocols(fs), "https" in protocols(fs)
        self._magic = re.compile(r"[*\[]" if self._is_web else r"[*?\[]")

    def add(self, path: str) -> str:
        """Adds the files that a path, a pattern or a list in braces names.

        Returns:
            The path of the folder that holds them all: of a pattern, the one before it.

        Raises:
            SourceError: a server refuses the file, or braces stand for too many names.
            Exception: any other error of the file system.
        """
        is_pattern = "{" in path or self._magic.search(path) is not None
        listed = self._listed(path) if is_pattern else {}
        if info := listed.get(path) if listed else self._info(path, is_pattern=is_pattern):
            self._add_existing(path, info)
        # A pattern that is said to be a folder without files is matched: not every object store tells it apart.
        if info and (not is_pattern or info["type"] != "directory" or self.folders[path]):
            return path if info["type"] == "directory" else path.rpartition("/")[0]
        if not is_pattern:
            return path.rpartition("/")[0]
        if listed:
            folder, _, pattern = path.rpartition("/")
            self._add_matches(((name, one) for name, one in listed.items() if one["type"] == "file"), folder, [pattern])
            return folder
        folder, rest = self._split(path)
        try:
            expanded = expand_braces(rest)
        except ValueError as error:
            raise SourceError(public_url(self.fs, path), str(error)) from error
        patterns = {name for name in expanded if self._magic.search(name)}
        paths = {name: f"{folder.rstrip('/')}/{name}" if folder else name for name in expanded}
        missing = list[str]()
        plain = [paths[name] for name in expanded if name not in patterns]
        for place, info in zip(plain, self._infos(plain), strict=True):
            if info:
                self._add_existing(place, info)
            elif not (self._is_local and os.path.islink(place)):  # which is reported
                missing.append(place)
        for place in missing[:MAX_MISSING_IN_REPORT]:
            self.skip(place, "does not exist, though the braces name it")
        if (more := len(missing) - MAX_MISSING_IN_REPORT) > 0:
            self.skipped.append(f"{public_url(self.fs, path)}: {more:,} more of its names do not exist")
        for name in expanded:
            if name in patterns:
                place = paths[name]
                if place != path and (info := self._info(place, is_pattern=True)):
                    self._add_existing(place, info)
                else:
                    self._add_matching(place)
        return folder

    def files_in(self, folder: str) -> dict[str, Info]:
        """Returns the files directly in a folder by their paths, hidden files included."""
        listed = self._walk(folder, ["*"]) if self._is_local or self._is_web else self._list(folder, ["*"])
        return {path: _needed(info) for path, info in listed}

    def pages_in(self, folder: str) -> Iterator[tuple[str, Info]]:
        """Yields the files directly in a folder of an HTTP server, by their names without escapes."""
        _, entries = self._web_entries(folder.rstrip("/") + "/")
        paths = [path for path, kind in entries if kind == "file"]
        for path, info in zip(paths, self._infos(paths), strict=True):
            if info:
                yield unquote(without_query(path).rpartition("/")[2]), info

    def skip(self, path: str, why: str) -> None:
        """Reports that a file is not used."""
        shown = public_url(self.fs, path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        self.skipped.append(f"{shown} is skipped: it {why}")

    def _skip_link(self, path: str) -> None:
        self.skip(path, f"is a link to {os.readlink(path)}, which is missing or may not be read")

    def name_of(self, path: str) -> str:
        """Returns a path without the escapes and the query that it has as a URL of HTTP."""
        return unquote(without_query(path), errors="surrogateescape") if self._is_web else path

    def is_hidden(self, path: str) -> bool:
        """Whether the name of a file starts with a dot."""
        return self.name_of(path).rpartition("/")[2].startswith(".")

    def complete(self, files: Mapping[str, Info]) -> dict[str, Info]:
        """Returns the files that can be used, with sizes, which the listing of an HTTP server may lack.

        Args:
            files: by path, their descriptions.
        """
        usable = dict[str, Info]()
        for path, info in files.items():
            if not path.isascii() and path.encode("utf-8", "replace").decode() != path:
                self.skip(path, "has a name that is not UTF-8: rename it")
            else:
                usable[path] = info
        unsized = [] if self._is_local else [path for path, info in usable.items() if info.get("size") is None]
        for path, info_with_size in zip(unsized, self._infos(unsized), strict=True):
            if info_with_size:
                usable[path] = info_with_size
            else:  # removed since it was listed
                del usable[path]
        return usable

    def _info(self, path: str, *, is_pattern: bool = False) -> Info | None:
        """Returns the description of a path by its file system, or None without one; reports a dangling link."""
        if self._is_local:
            try:
                return {"type": "directory" if stat.S_ISDIR(os.stat(path).st_mode) else "file"}
            except OSError as error:
                if error.errno not in _NO_ENTRY:
                    raise
            if os.path.islink(path):
                self._skip_link(path)
            return None
        host = path.split("/")[2 if self._is_web else 0]
        if is_pattern and ("{" in host or self._magic.search(host)):
            return None
        try:
            info: dict[str, Any] = self.fs.info(path)
        except (PermissionError, ValueError):
            if is_pattern:  # S3 refuses access if it may not tell that there is no such file; others refuse the name
                return None
            raise
        except NotADirectoryError:
            return None
        except FileNotFoundError as error:  # fsspec's of HTTP for any error
            status = http_status(error)
            if status is None and error.__cause__ is not None and self._is_web:
                raise
            if status not in _MISSING and not is_pattern:
                raise SourceError(public_url(self.fs, path), f"cannot be read: {reason(error)}") from error
            return None
        if self._is_web:
            place = without_query(path)
            is_page, is_named = info.get("mimetype") == "text/html", place.lower().endswith(self._suffixes)
            if is_pattern and is_page and is_named:  # a server that answers everything by a page
                return None
            is_page = is_page and not is_named
            info["type"] = "directory" if place.endswith("/") or is_page else "file"
        return info

    def _infos(self, paths: Sequence[str]) -> list[Info | None]:
        if self._is_local or len(paths) < 2:
            return list(map(self._info, paths))
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="infos") as pool:
            return list(pool.map(self._info, paths))

    def _add_existing(self, path: str, info: Info) -> None:
        if info["type"] != "directory":
            self.files[path] = info
            return
        if self._is_local or self._is_web:
            files = self._walk(path)
        elif "s3" in protocols(self.fs):
            listed = list_objects(self.fs, path, is_recursive=True, known=self._known_names())
            files = ((info["name"], info) for info in listed)
        else:
            files = iter(self.fs.find(path, detail=True).items())
        self.folders.setdefault(path, {}).update((place, _needed(info)) for place, info in files)

    def _listed(self, path: str) -> dict[str, Info]:
        """Lists the folder of a pattern in an S3 store, which also shows whether something has the pattern's name.

        Returns nothing if the folder is empty or may not be listed, or if the pattern is not of names in one folder.
        """
        folder, _, name = path.rpartition("/")
        if "{" in path or name == "**" or not folder or self._magic.search(folder) or "s3" not in protocols(self.fs):
            return {}
        with suppress(FileNotFoundError, PermissionError):
            listed = list_objects(self.fs, folder, known=self._known_names(), has_folders=True)
            return {info["name"]: info for info in listed}
        return {}

    def _add_matching(self, path: str) -> None:
        folder, pattern = self._split(path)
        parts = [unquote(part) if self._is_web else part for part in pattern.split("/")]
        files = self._walk(folder, parts) if self._is_local or self._is_web else self._list(folder, parts)
        self._add_matches(files, folder, parts)

    def _add_matches(self, files: Iterable[tuple[str, Info]], folder: str, parts: Sequence[str]) -> None:
        matches = _matcher("/".join(parts))
        start = len(folder.rstrip("/")) + 1
        with suppress(FileNotFoundError):  # there is no such folder or bucket, as the first read shows
            for place, info in files:
                name = without_query(place)[start:] if self._is_web else place[start:]
                if matches(unquote(name) if self._is_web else name):
                    self.files[place] = info

    def _list(self, folder: str, parts: Sequence[str]) -> Iterator[tuple[str, Info]]:
        """Lists what may match a pattern in a folder of a remote file system, a single folder by one listing."""
        if len(parts) == 1 and parts[0] != "**":
            if "s3" in protocols(self.fs):
                listed: Iterable[Info] = list_objects(self.fs, folder, known=self._known_names())
            else:
                listed = self.fs.ls(folder, detail=True)
        else:
            listed = self.fs.find(folder, maxdepth=None if "**" in parts else len(parts), detail=True).values()
        yield from ((info["name"], info) for info in listed if info["type"] != "directory")

    def _known_names(self) -> list[str]:
        return sorted(map(self.fs._strip_protocol, self._known))

    def _split(self, path: str) -> tuple[str, str]:
        """Splits a pattern or list after the last of the folders before it that exist, whatever their names are."""
        parts = path.split("/")
        at = next(n for n, part in enumerate(parts) if "{" in part or self._magic.search(part))
        while at < len(parts) - 1 and at >= (3 if self._is_web else 0 if self._is_local else 1):
            info = self._info("/".join(parts[: at + 1]) + ("/" if self._is_web else ""), is_pattern=True)
            if info is None or info["type"] != "directory":
                break
            at += 1
        return "/".join(parts[:at]) or ("/" if self._is_local else ""), "/".join(parts[at:])

    def _walk(self, folder: str, parts: Sequence[str] = ()) -> Iterator[tuple[str, Info]]:
        """Yields the files below a folder, each folder once, also through links.

        Folders that no link leads to come first: a new link does not give the files of another folder new paths.

        Args:
            folder: where to start.
            parts: of a pattern: folders that cannot hold what matches it are not entered.
        """
        root = folder.rstrip("/") + "/"
        pending, linked, seen = [root], list[str](), set[object]()
        while pending or linked:
            here = pending.pop() if pending else linked.pop()
            try:
                identity, entries = self._local_entries(here) if self._is_local else self._web_entries(here)
            except (FileNotFoundError, NotADirectoryError):  # removed since it was listed, or the start of a pattern
                continue
            except Exception as error:  # of a server's client, which may have a class of its own for a refusal
                # A folder that refuses access does not keep the others from being read; any other error is raised.
                if here == root or not (isinstance(error, PermissionError) or http_status(error) in (401, 403)):
                    raise
                self.skip(here, f"cannot be listed: {reason(error)}")
                continue
            if identity in seen:
                continue
            seen.add(identity)
            if self._is_web and len(seen) > MAX_FOLDERS:
                raise SourceError(root, f"has more than {MAX_FOLDERS:,} folders: give a folder or pattern below it")
            folders = list[str]()
            for path, kind in entries:
                below = path[len(root) :].rstrip("/")
                if kind == "file":
                    yield path, _FILE
                elif kind == "dangling":
                    if not parts or _matcher("/".join(parts))(below):
                        self._skip_link(path)
                elif not parts or _may_hold(parts, [unquote(p) if self._is_web else p for p in below.split("/")]):
                    (linked if kind == "link" else folders).append(path + ("" if path.endswith("/") else "/"))
            pending += reversed(folders)
            linked.sort(reverse=True)

    def _local_entries(self, folder: str) -> tuple[object, list[tuple[str, str]]]:
        """Returns what identifies a folder, and its entries with their kinds, sorted."""
        status = os.stat(folder)
        entries = []
        with os.scandir(folder) as listed:
            for entry in listed:
                kind = "folder" if entry.is_dir(follow_symlinks=False) else "file"
                if entry.is_symlink():
                    kind = "link" if os.path.isdir(entry.path) else "file" if os.path.exists(entry.path) else "dangling"
                if kind != "dangling" or not entry.name.startswith("."):
                    entries.append((entry.path, kind))
        return (status.st_dev, status.st_ino), sorted(entries)

    def _web_entries(self, folder: str) -> tuple[object, list[tuple[str, str]]]:
        """As `_local_entries`, of the links on a server's page that lead to files and folders below it."""
        entries: dict[str, str] = {}  # by place without a query, which links that sort the page have
        for info in self.fs.ls(folder, detail=True):
            url = unescape(info["name"]).replace("/./", "/")
            place = without_query(url)
            if place.startswith(folder) and place != folder and (place not in entries or url == place):
                entries[place] = url
        found = [(place if place.endswith("/") else url, place) for place, url in sorted(entries.items())]
        return folder, [(url, "folder" if place.endswith("/") else "file") for url, place in found]


def _needed(info: Info) -> Info:
    """Returns the part of a description that is used, a quarter of what S3 reports: a folder may have a million."""
    return {key: info[key] for key in _S3_KEYS} if info.keys() >= _S3_KEYS else info


@lru_cache(64)
def _matcher(pattern: str) -> Any:
    return re.compile(glob_translate(pattern)).match


def _may_hold(parts: Sequence[str], below: Sequence[str]) -> bool:
    """Whether a folder, given by its names below the start of a pattern, may hold files that match the pattern."""
    if "**" in parts:
        parts = parts[: parts.index("**")]
    elif len(below) >= len(parts):
        return False
    return all(_matcher(part)(name) for part, name in zip(parts, below, strict=False))
