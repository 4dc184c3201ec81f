"""The shards at a URL: one file, a folder, a pattern or a list in braces, with sizes and fingerprints."""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase, translate
from typing import Any, ClassVar, NamedTuple, Protocol

import fsspec

from mm_assets.errors import SourceError
from mm_assets.storage.search import FileSearch, Info
from mm_assets.storage.urls import NO_SIZE, Options, filesystem, protocols, public_url, storage_errors, without_query
from mm_assets.summaries import counted

__all__ = [
    "FOLDER_MAGIC",
    "UNMARKED",
    "FolderFiles",
    "FolderFormat",
    "Listing",
    "ShardFile",
    "ShardKind",
    "describe_file",
    "describe_folder",
    "description_of",
    "expand_shards",
]

_NO_TAG = re.compile(r"[^A-Za-z0-9._:+-]+")
FOLDER_MAGIC = b"mm-assets listing of a folder\n"  # starts the content of a shard that is a folder
UNMARKED = "unmarked"  # ends the fingerprint of a file whose storage does not report changes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A file as its storage describes it.

    Attributes:
        url: absolute path or URL.
        size: bytes.
        fingerprint: changes whenever the content does: the object's ETag, or size and modification time. If other
            files describe the shard, ``;`` and a digest of their fingerprints follow.
        modified: seconds since 1970, or None if the storage does not report it.
        times: of a local file ``<modified>-<changed>``: the times of the last change of its content and of its
            description (name, rights, links), in nanoseconds since 1970. None of any other file.
    """

    url: str
    size: int
    fingerprint: str
    modified: float | None
    times: str | None = None

    def is_of(self, fingerprint: str) -> bool:
        """Whether a fingerprint is of this file, with or without the files that describe it."""
        modified = None if self.times is None else self.times.partition("-")[0]
        return fingerprint in (self.fingerprint, self.fingerprint.partition(";")[0], f"{self.size}-{modified}")

    def described_by(self, files: Iterable[ShardFile]) -> ShardFile:
        """Returns the shard with a fingerprint that also changes with the files that describe it."""
        others = sorted((file.url, file.fingerprint) for file in files)
        digest = hashlib.sha256("\n".join(map("\t".join, others)).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return replace(self, fingerprint=f"{self.fingerprint.partition(';')[0]};{digest}")


def description_of(fingerprint: str) -> str:
    """Returns the digest, in a shard's fingerprint, of the files that describe it; empty if there are none."""
    return fingerprint.partition(";")[2].partition("-")[0]


class FolderFiles(list[ShardFile]):
    """All files below a folder, sorted by URL.

    Args:
        files: their descriptions.
        fs: their file system.
    """

    def __init__(self, files: Iterable[ShardFile], fs: fsspec.AbstractFileSystem) -> None:
        super().__init__(files)
        self._fs = fs

    def read(self, file: ShardFile) -> bytes:
        """Returns the content of one of the files.

        Raises:
            SourceError: the file cannot be read.
        """
        with storage_errors(file.url, "cannot be read"):
            content: bytes = self._fs.cat_file(file.url)
        return content


class FolderFormat(Protocol):
    """A format whose dataset is a folder, with files that describe it.

    Attributes:
        MARKS: paths relative to the folder by which the format is detected, as patterns of `fnmatch`:
            ``("meta/info.json",)``.
    """

    MARKS: ClassVar[tuple[str, ...]]

    @classmethod
    def shards_in(cls, files: FolderFiles) -> Sequence[ShardFile] | None:
        """Returns the shards among the files below a folder with a mark; None if the folder is of another format.

        Each shard is `ShardFile.described_by` the files that describe it, so that a change of any of them makes its
        partition pending.

        Args:
            files: all files, marks and hidden files included.
        """


class ShardKind(NamedTuple):
    """Which files of a folder are shards of a format.

    Attributes:
        name: the name of the format in a declaration.
        suffixes: suffixes of a shard's name, in lower case.
        is_table: whether a shard holds rows, which may describe other files; any other shard holds whole samples.
        dataset: the format, if its dataset is a folder.
        files: suffixes of plain files, in lower case: if nothing else is a shard, each folder with such a file is one.
    """

    name: str
    suffixes: tuple[str, ...]
    is_table: bool = False
    dataset: type[FolderFormat] | None = None
    files: tuple[str, ...] = ()


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
    tag = info.get("ETag") or next(
        (info[k] for k in ("etag", "md5Hash", "content_md5", "crc32c", "blob_id") if info.get(k)), None
    )
    if tag is None:  # a listing and a single file may give the same time in two types
        tag = modified if seconds is None else seconds
    tag = _NO_TAG.sub("", UNMARKED if tag is None else str(tag))
    return ShardFile(url=fs.unstrip_protocol(path), size=int(size), fingerprint=f"{size}-{tag}", modified=seconds)


def describe_file(url: str, storage_options: Options | None = None) -> ShardFile:
    """Returns the size and fingerprint that a file has now.

    Raises:
        SourceError: the file is missing or cannot be read.
    """
    fs, path = filesystem(url, storage_options)
    with storage_errors(url, "cannot be read"):
        info = fs.info(path)
        if info.get("type") == "directory":
            raise SourceError(url, "is a folder, expected a file")
        return _describe(fs, path, info)


def describe_folder(url: str, storage_options: Options | None = None) -> tuple[ShardFile, bytes]:
    """Returns a folder of plain files as a shard, and its content: a listing of the files directly in it.

    After `FOLDER_MAGIC`, each line is a JSON list of a file's name, size and fingerprint, sorted by name. The folder's
    fingerprint is a digest of the listing.

    Raises:
        SourceError: the folder cannot be listed.
    """
    fs, path = filesystem(url, storage_options)
    search = FileSearch(fs, (), ())
    with storage_errors(url, "cannot be listed"):
        files = search.files_in(path.rstrip("/"))
        if not files and not fs.isdir(path):
            raise SourceError(url, "is not a folder with files")
        return _folder_shard(search, path.rstrip("/"), files)


def _folder_shard(search: FileSearch, folder: str, files: Mapping[str, Info]) -> tuple[ShardFile, bytes]:
    entries = []
    modified: float | None = None
    for place, file in _describe_all(search, {place: files[place] for place in sorted(files) if place[-1] != "/"}):
        entries.append(json.dumps([search.name_of(place).rpartition("/")[2], file.size, file.fingerprint]))
        modified = max(filter(None, (modified, file.modified)), default=None)
    content = FOLDER_MAGIC + "".join(f"{entry}\n" for entry in entries).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    url = public_url(search.fs, folder).rstrip("/") + "/"
    return ShardFile(url=url, size=len(content), fingerprint=f"{len(content)}-{digest}", modified=modified), content


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The shards that a path, a pattern or a list in braces stands for.

    Attributes:
        shards: sorted by URL.
        skipped: a sentence for each name that is not used, with its place and the reason.
        folder: URL of the folder that holds them all, with a final slash; for a pattern, the folder before it.
        in_datasets: URLs of the shards of a `FolderFormat`, whose names are unique only in their dataset's folder.
    """

    shards: tuple[ShardFile, ...]
    skipped: tuple[str, ...] = ()
    folder: str
    in_datasets: frozenset[str] = frozenset()


def expand_shards(
    pattern: str,
    storage_options: Options | None = None,
    *,
    kinds: Sequence[ShardKind],
    known: Iterable[str] = (),
) -> Listing:
    """Lists the shards at a path or URL, without hidden files.

    What exists is used as it is: a file, or a folder for the shards below it. Only otherwise are braces expanded, and
    then ``*``, ``?`` (but not in a URL that HTTP reads) and ``[...]`` matched. Local links are followed, and each
    folder is listed once.

    Files below a folder with the marks of a format belong to that format alone; if folders with marks are nested, the
    outer one decides. The other shards are of one kind: the kind of shards that are known, else containers before
    tables, and the kind with the most files. A table beside a shard of the same name describes it. If nothing is a
    shard, each folder of plain files is one, whose URL ends with a slash; a table beside it of the same name describes
    it.

    Args:
        pattern: a path or URL.
        storage_options: arguments for the file system.
        kinds: the formats that a shard may have. The first kind that has the suffix of a name is chosen.
        known: URLs that were listed before; if there are very many, an object store is listed in parallel.

    Raises:
        SourceError: the storage does not answer, or braces stand for too many names.
    """
    fs, path = filesystem(pattern, storage_options)
    known = frozenset(known)
    search = FileSearch(fs, tuple(suffix for kind in kinds for suffix in kind.suffixes), known)
    shards: list[ShardFile] = []
    in_datasets: set[str] = set()
    with storage_errors(public_url(fs, path), "cannot be listed"):
        folder = search.add(path)
        paths = {place: info for place, info in search.files.items() if not search.is_hidden(place)}
        for root, files in search.folders.items():
            for dataset in _datasets(search, root, files, [kind.dataset for kind in kinds if kind.dataset]):
                shards += dataset
                in_datasets.update(shard.url for shard in dataset)
            plain = next((kind.files for kind in kinds if kind.files), ())
            places = _of_one_kind(search, root, files, kinds, known, () if shards else plain)
            if plain and (not (places or shards) or any(url.endswith("/") for url in known)):
                shards += _folder_shards(search, root, files, plain)
            else:
                paths |= {place: files[place] for place in places}
        shards += (shard for _, shard in _describe_all(search, paths))
    return Listing(
        shards=tuple(sorted(shards, key=lambda shard: shard.url)),
        skipped=tuple(sorted(search.skipped)),
        folder=public_url(fs, folder).rstrip("/") + "/",
        in_datasets=frozenset(in_datasets),
    )


def _describe_all(search: FileSearch, files: Mapping[str, Info]) -> Iterator[tuple[str, ShardFile]]:
    """Yields each file that can be used, with its description by the file system."""
    for place, info in search.complete(files).items():
        with suppress(FileNotFoundError):  # removed since it was listed
            yield place, _describe(search.fs, place, info)


def _folder_shards(
    search: FileSearch, root: str, files: Mapping[str, Info], suffixes: tuple[str, ...]
) -> Iterator[ShardFile]:
    """Yields each folder at or below `root` that has a plain file with one of these suffixes, except hidden folders."""
    start = len(root.rstrip("/"))
    folders: dict[str, dict[str, Info]] = {}
    with_media: set[str] = set()
    for place, info in files.items():
        folder, _, base = search.name_of(place).rpartition("/")
        if base and "/." not in folder[start:]:
            parent = without_query(place).rpartition("/")[0]
            folders.setdefault(parent, {})[place] = info
            if not base.startswith(".") and base.lower().endswith(suffixes):
                with_media.add(parent)
    for folder in sorted(with_media):
        yield _folder_shard(search, folder, folders[folder])[0]
    others = sorted(folders.keys() - with_media)
    if with_media and others:
        search.skipped.append(
            f"{public_url(search.fs, root)}: {counted(len(others), 'folder')} skipped, such as {others[0]}: its files "
            "are neither media nor texts"
        )


def _datasets(
    search: FileSearch, root: str, files: dict[str, Info], formats: Sequence[type[FolderFormat]]
) -> Iterator[Sequence[ShardFile]]:
    """Yields the shards of each folder below `root` that is a dataset, and removes the files below it from `files`."""
    start = len(root.rstrip("/")) + 1
    names = sorted((search.name_of(place)[start:], place) for place in files) if formats else []
    marks = [(mark, form) for form in formats for mark in form.MARKS]
    may_be_mark = re.compile("|".join(translate(mark.rpartition("/")[2]) for mark, _ in marks) or "(?!)").match
    formats_of: dict[str, list[type[FolderFormat]]] = {}  # by folder
    for name in (name for name, _ in names if may_be_mark(name, name.rfind("/") + 1)):
        for mark, form in marks:
            depth = mark.count("/") + 1
            below = "/".join(name.rsplit("/", depth)[-depth:])
            if below.count("/") == depth - 1 and fnmatchcase(below, mark):
                candidates = formats_of.setdefault(name.removesuffix(below), [])
                if form not in candidates:
                    candidates.append(form)
    for folder in sorted(formats_of, key=len):
        first, end = bisect_left(names, (folder,)), bisect_left(names, (folder[:-1] + "0",)) if folder else len(names)
        inside = {place: files[place] for _, place in names[first:end] if place in files}
        folder_files = FolderFiles((file for _, file in _describe_all(search, inside)), search.fs)
        for form in formats_of[folder]:
            shards = form.shards_in(folder_files) if folder_files else None
            if shards is not None:
                yield shards
                for place in inside:
                    del files[place]
                break


def _of_one_kind(
    search: FileSearch,
    root: str,
    files: Mapping[str, Info],
    kinds: Sequence[ShardKind],
    known: Set[str],
    plain: tuple[str, ...],
) -> list[str]:
    """Returns the paths of the shards in a folder, and reports those of other kinds.

    If all of them are tables that describe a folder with a plain file, which ends with one of `plain`, none is a shard.
    """
    start = len(root.rstrip("/")) + 1
    kind_of: dict[str, ShardKind] = {}
    stems: dict[str, str] = {}
    folders: set[str] = set()
    for place in files:
        name = search.name_of(place)
        if name[start:].startswith(".") or "/." in name[start:]:
            continue
        lower = name.lower()
        for kind in kinds:
            suffix = next((suffix for suffix in kind.suffixes if lower.endswith(suffix)), None)
            if suffix is not None:
                kind_of[place], stems[place] = kind, name[: -len(suffix)]
                break
        else:
            if lower.endswith(plain):
                folders.add(name.rpartition("/")[0])
    of_containers = {stems[place] for place, kind in kind_of.items() if not kind.is_table}
    kind_of = {place: kind for place, kind in kind_of.items() if not kind.is_table or stems[place] not in of_containers}
    registered = {kind for place, kind in kind_of.items() if known and public_url(search.fs, place) in known}
    if not kind_of:
        return []
    remedy = "give a pattern of their names or set `source`"
    if not registered and all(kind.is_table and stems[place] in folders for place, kind in kind_of.items()):
        search.skipped.append(
            f"{public_url(search.fs, root)}: {counted(len(kind_of), 'table')} skipped, such as "
            f"{search.name_of(min(kind_of))}: each describes a folder of the same name, whose files are the shard; to "
            f"use the tables, {remedy}"
        )
        return []
    numbers = Counter(kind_of.values())
    # Of equal ones the first in the order of the formats.
    chosen = max(numbers, key=lambda kind: (kind in registered, not kind.is_table, numbers[kind], -kinds.index(kind)))
    for kind in numbers:
        if kind != chosen:
            example = search.name_of(min(place for place in kind_of if kind_of[place] == kind))
            search.skipped.append(
                f"{public_url(search.fs, root)}: {counted(numbers[kind], f'{kind.name} file')} skipped, such as "
                f"{example}: its shards are the {counted(numbers[chosen], f'{chosen.name} file')}; to use the others, "
                f"{remedy}"
            )
    return [place for place, kind in kind_of.items() if kind == chosen]
