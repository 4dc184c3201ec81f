"""Files published below one root URL: each appears there whole or not at all.

Content is built in a local file that no reader sees under its final name and appears there by one rename (local) or one
completed upload (object store).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from mm_assets.errors import ChangedError, SourceError, full_disk_named, temporary_disk_named
from mm_assets.storage.hashed_file import HashedFile, file_state
from mm_assets.storage.s3_listing import get_object, list_objects
from mm_assets.storage.search import FileSearch
from mm_assets.storage.urls import (
    NO_SIZE,
    Options,
    filesystem,
    http_status,
    is_local,
    is_web,
    local_path,
    protocols,
    storage_errors,
)

__all__ = ["TEMPORARY", "Draft", "ListedFile", "PublishedFile", "Snapshot", "Store"]

TEMPORARY = ".tmp"
"""The end of the hidden names of local files that are being written, or that a killed writer left."""

_MAX_STEM = 200  # characters of a file's name in its temporary one: a name has 255 bytes at most
_PAGE = 1000  # files in a request to an S3 store

_UNDER_WAY, _WON, _NOT_IMPLEMENTED = 409, 412, 501  # replies to a conditional request: another one is, or has
_MADE = 200
_CONFLICT_PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds before a request is made again that met another one
_ONE_REQUEST = {"max_concurrency": 1}  # else s3fs asks for the size first, and gets a file in pieces
_ONE_UPLOAD = {"chunksize": 5 << 30}  # else s3fs uploads 100 MiB and more in parts, and drops the condition
_VERSION_FACTS = ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")  # file systems differ in them
_UPLOAD = {"chunksize": 16 << 20, "max_concurrency": 2}  # bytes of one part, and parts in memory at a time
_OLD = 3600.0  # seconds after which a file that is published once more gets a new time
_EXCLUSIVE_PATIENCE = 30.0  # seconds: such a block takes milliseconds, or the upload of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A file as it was published.

    Attributes:
        path: relative to the store's root.
        size: bytes.
        sha256: hexadecimal digest of the content.
    """

    path: str
    size: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """The file as records and manifests list it."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


class ListedFile(NamedTuple):
    """A file as a listing of its folder describes it.

    Attributes:
        size: bytes.
        version: changes when the file is replaced, also by one of the same size: the facts that the storage gives.
        etag: what an S3 store calls this version of it; None elsewhere.
        modified: when it was written, in seconds since 1970 by the storage's clock; None if the storage does not say.
    """

    size: int
    version: str
    etag: str | None = None
    modified: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A small file as it was read, for `Store.replace`.

    Attributes:
        name: relative to the store's root.
        content: its bytes, or None where there was no file.
        etag: what an S3 store calls this version of it; None elsewhere.
    """

    name: str
    content: bytes | None
    etag: str | None = None


class Draft:
    """A file under construction: write to `path`, set `name` if it depends on the content, leave the `with` block.

    Attributes:
        path: local file to write.
        name: where it will be, relative to the root.
        published: set once the file is published.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.published: PublishedFile | None = None
        self._digest: tuple[tuple[int, int, int, int], str] | None = None

    @contextmanager
    def hashed(self) -> Iterator[HashedFile]:
        """A file at `path`, to be written from its first byte to its last; its digest is computed meanwhile."""
        with HashedFile(self.path) as file:
            yield file
        self.take_digest(file.sha256)

    def take_digest(self, sha256: str) -> None:
        """Takes the digest of the file as it is now, hexadecimal, computed while it was written or read."""
        self._digest = file_state(os.stat(self.path)), sha256

    def digest(self) -> str:
        """SHA-256 of the file so far, hexadecimal; the file is read if it changed since the digest was computed."""
        state = file_state(os.stat(self.path))
        if self._digest is None or self._digest[0] != state:
            with self.path.open("rb") as file:
                self._digest = state, hashlib.file_digest(file, "sha256").hexdigest()
        return self._digest[1]

    def result(self) -> PublishedFile:
        """The published file.

        Raises:
            RuntimeError: the `with` block has not been left yet.
        """
        if self.published is None:
            raise RuntimeError(f"{self.name} is not published yet")
        return self.published


class Store:
    """All files below one root URL.

    Args:
        url: folder path or fsspec URL; created when the first file is published.
        storage_options: arguments for the file system.

    Attributes:
        url: the URL, or the absolute path, without a slash at its end.
        fs: its file system.
        is_local: whether that is the local one.
    """

    def __init__(self, url: str, storage_options: Options | None = None) -> None:
        self.storage_options = dict(storage_options or {})
        self.is_local = is_local(url)
        self.url = str(local_path(url)) if self.is_local else url.rstrip("/")
        self.fs, self._root = filesystem(self.url, storage_options)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def durable(self) -> Store:
        """The store whose files stay when this process ends: this one, unless it is the scratch of another one."""
        return self

    def child(self, name: str) -> Store:
        """The store of a folder below the root."""
        return Store(self.url_of(name), self.storage_options)

    def connect(self) -> None:
        """Make the client of an S3 store, as the first request would; `SourceError` if the options are wrong."""
        if self._is_s3:
            with storage_errors(self.url, "cannot be connected to"):
                self.fs.connect()

    @property
    def _is_s3(self) -> bool:
        return bool({"s3", "s3a"} & set(protocols(self.fs)))

    def url_of(self, name: str) -> str:
        """Path or URL of a file below the root."""
        return f"{self.url}/{self._escaped(name)}" if name else self.url

    def path_of(self, name: str) -> str:
        """Path of a file in the file system."""
        return f"{self._root}/{self._escaped(name)}" if name else self._root

    def _escaped(self, name: str) -> str:
        return quote(name) if is_web(self.url) else name

    def exists(self, name: str) -> bool:
        """Whether there is a file at `name`; `SourceError` if the storage does not answer."""
        return self._info(name).get("type") == "file"

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is no such file, `SourceError` if the storage does not answer."""
        size = self._info(name).get("size")
        return None if size is None else int(size)

    def modified(self, name: str) -> float | None:
        """When a file was written, in seconds since 1970 by the storage's clock; None if there is no such file.

        Raises:
            SourceError: the storage does not answer.
        """
        return _modified(self._info(name))

    def _info(self, name: str) -> Mapping[str, Any]:
        """The facts that the storage has about a path; empty where there is nothing."""
        # `isfile` of a file system answers "no" to any error, also of a store that is down.
        with storage_errors(self.url_of(name), "cannot be read"):
            try:
                if self._is_s3:  # where `info` also asks whether a missing file is a folder
                    try:
                        head = self.fs.call_s3("head_object", **self._object(name), **self.fs.req_kw)
                        return {**head, "type": "file", "size": head["ContentLength"]}
                    except FileNotFoundError:
                        return {}
                    except OSError:  # replies to HEAD do not say why the store refuses: it is asked again
                        pass
                return dict(self.fs.info(self.path_of(name)))
            except (FileNotFoundError, NotADirectoryError):
                return {}

    def _object(self, name: str) -> dict[str, str]:
        """How a request to an S3 store names a file."""
        bucket, key, _ = self.fs.split_path(self.path_of(name))
        return {"Bucket": bucket, "Key": key}

    def sizes(self, folder: str) -> dict[str, int]:
        """Name (relative to the root) and bytes of each file directly in a folder, without hidden ones.

        Raises:
            SourceError: the storage does not answer.
        """
        return {name: file.size for name, file in self.listing(folder).items()}

    def listing(self, folder: str, *, prefix: str = "") -> dict[str, ListedFile]:
        """The same files with what tells one version of a file from another; errors as `sizes`.

        Args:
            folder: below the root.
            prefix: how the names in it begin; an S3 store lists no others.
        """
        with storage_errors(self.url_of(folder), "cannot be listed"):
            try:
                listed = _local_files(self.path_of(folder)) if self.is_local else self._remote_files(folder, prefix)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {
            f"{folder}/{base}" if folder else base: listed[base]
            for base in sorted(listed)
            if base[0] != "." and base.startswith(prefix)
        }

    def pages(self, folder: str) -> Iterator[dict[str, ListedFile]]:
        """Yields `listing` in parts, each as fresh as it is yielded; errors as `sizes`."""
        listed = iter(self.listing(folder).items()) if not self._is_s3 else self._listed_pages(folder)
        while page := dict(islice(listed, _PAGE)):
            yield page

    def _listed_pages(self, folder: str) -> Iterator[tuple[str, ListedFile]]:
        with storage_errors(self.url_of(folder), "cannot be listed"):
            for info in list_objects(self.fs, self.path_of(folder)):
                base = info["name"].rsplit("/", 1)[-1]
                if base and base[0] != ".":
                    yield f"{folder}/{base}", _listed_file(info)

    def _remote_files(self, folder: str, prefix: str) -> dict[str, ListedFile]:
        found = {}
        path = self.path_of(folder)
        if is_web(self.url):
            named = FileSearch(self.fs, (), ()).pages_in(path)
        else:
            listed = list_objects(self.fs, path, prefix=prefix) if self._is_s3 else self.fs.ls(path, detail=True)
            named = ((info["name"].rstrip("/").rsplit("/", 1)[-1], info) for info in listed)
        for base, info in named:
            if info["type"] == "file" and base:
                if info.get("size") is None:
                    raise SourceError(self.url_of(f"{folder}/{base}" if folder else base), NO_SIZE)
                found[base] = _listed_file(info)
        return found

    def read_bytes(self, name: str) -> bytes:
        """The whole content; `SourceError` if there is no such file or it cannot be read."""
        with storage_errors(self.url_of(name), "cannot be read"):
            return self._get(name)

    def _get(self, name: str) -> bytes:
        return bytes(self.fs.cat_file(self.path_of(name), **(_ONE_REQUEST if self._is_s3 else {})))

    def found_bytes(self, name: str) -> bytes | None:
        """The whole content, or None if there is no such file; `SourceError` if the storage does not answer."""
        with storage_errors(self.url_of(name), "cannot be read"):
            try:
                return self._get(name)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def open(self, name: str) -> Any:
        """A seekable binary file object, as pyarrow reads it; `SourceError` if there is no such file."""
        # Column chunks are read whole and once: a read-ahead cache would fetch their neighbours.
        options = {} if self.is_local else {"cache_type": "none"}
        with storage_errors(self.url_of(name), "cannot be opened"):
            return self.fs.open(self.path_of(name), "rb", **options)

    def digest(self, name: str) -> str:
        """SHA-256 of a file, hexadecimal; `SourceError` if there is no such file or it cannot be read."""
        with storage_errors(self.url_of(name), "cannot be read"), self.open(name) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def state(self, name: str) -> tuple[int, ...] | None:
        """What changes when a file is written or replaced; None of a file that is missing or not on a local disk."""
        with suppress(OSError):
            return file_state(os.stat(self.path_of(name))) if self.is_local else None
        return None

    def copy(self, name: str, folder: Path) -> Store:
        """A store in a local folder that holds a copy of a file under the same name; errors as `digest`."""
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with storage_errors(self.url_of(name), "cannot be read"):
            self.fs.get_file(self.path_of(name), str(target), **(_ONE_REQUEST if self._is_s3 else {}))
        return Store(str(folder))

    def local_path(self, name: str) -> Path:
        """Path of a file of a local store."""
        return Path(self.path_of(name))

    @contextmanager
    def draft(self, name: str, *, durable: bool = True) -> Iterator[Draft]:
        """Build a file under a temporary name, and publish it when the block ends without an exception.

        Args:
            name: relative to the root.
            durable: whether a local file's name survives a crash of the machine from then on, or only after `sync`; its
                content does in both cases.

        Raises:
            SourceError: the disk is full, or the upload failed.
        """
        with (
            full_disk_named(self.url_of(name)) if self.is_local else temporary_disk_named(),
            _path_beside(Path(self.path_of(name))) if self.is_local else _scratch_path(name) as path,
        ):
            draft = Draft(path, name)
            yield draft
            digest, size = draft.digest(), path.stat().st_size
            self._publish(path, draft.name, durable=durable)
            draft.published = PublishedFile(path=draft.name, size=size, sha256=digest)

    def link(self, file: PublishedFile, name: str, *, durable: bool = True) -> PublishedFile:
        """Publishes a file of a local store under one more name, without a copy if the file system has hard links.

        Args:
            file: as it was published.
            name: the other name.
            durable: as for `draft`.

        Raises:
            SourceError: the file is missing, or the disk is full.
        """
        source, target = self.local_path(file.path), Path(self.path_of(name))
        with (
            full_disk_named(self.url_of(name)),
            storage_errors(self.url_of(file.path), f"cannot be published as {name}"),
            _path_beside(target) as path,
        ):
            try:
                os.link(source, path)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without hard links, or a file that has too many
                shutil.copyfile(source, path)
                _sync(path)
            if time.time() - os.stat(path).st_mtime > _OLD:  # `clean` deletes old files that nothing names yet
                os.utime(path)
            path.replace(target)
            if durable:
                self.sync([name])
        return PublishedFile(path=name, size=file.size, sha256=file.sha256)

    def publish(self, path: Path, name: str) -> None:
        """Publishes a complete local file, which is moved if the store is local; its digest is not computed.

        Raises:
            SourceError: the disk is full, or the upload failed.
        """
        with full_disk_named(self.url_of(name)) if self.is_local else temporary_disk_named():
            self._publish(path, name, durable=True)

    def _publish(self, path: Path, name: str, *, durable: bool) -> None:
        """Gives a finished file its name."""
        if not self.is_local:
            self.upload_file(path, name)
            return
        _move(path, Path(self.path_of(name)))
        if durable:
            self.sync([name])

    def sync(self, names: Iterable[str]) -> None:
        """Makes the names of local files survive a crash of the machine: each folder is synced once."""
        if self.is_local:
            for folder in sorted({Path(self.path_of(name)).parent for name in names}):
                _sync(folder)

    def refresh(self, names: Iterable[str]) -> None:
        """Makes files as young as if they had just been written; `SourceError` if one is missing."""
        for name in names:
            with storage_errors(self.url_of(name), "cannot be kept"):
                path = self.path_of(name)
                if self.is_local:
                    os.utime(path)
                elif self._is_s3:
                    self.fs.cp_file(path, path, MetadataDirective="REPLACE")
                else:
                    self.fs.pipe_file(path, self.fs.cat_file(path))

    def upload_file(self, path: Path, name: str) -> None:
        """Copies a local file to a remote store; `SourceError` if it cannot be written."""
        target = self.path_of(name)
        with storage_errors(self.url_of(name), "cannot be written"):
            if self._is_s3:
                self.fs.put_file(str(path), target, **_UPLOAD)
            else:
                self.fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
                self.fs.put_file(str(path), target)

    def write_bytes(self, name: str, content: bytes, *, durable: bool = True) -> str | None:
        """Publish a small file, and return what an S3 store calls this version of it; otherwise as `draft`."""
        if self._is_s3:
            with storage_errors(self.url_of(name), "cannot be written"):
                return (self.fs.pipe_file(self.path_of(name), content, **_ONE_UPLOAD) or {}).get("ETag")
        with self.draft(name, durable=durable) as draft:
            draft.path.write_bytes(content)
        return None

    def snapshot(self, name: str) -> Snapshot:
        """A small file as it is now, to be replaced by `replace` only where no other process did so meanwhile.

        Raises:
            SourceError: the file cannot be read.
        """
        with storage_errors(self.url_of(name), "cannot be read"):
            try:
                if self._is_s3:
                    content, etag = get_object(self.fs, **self._object(name))
                    return Snapshot(name=name, content=content, etag=etag)
                return Snapshot(name=name, content=self._get(name))
            except FileNotFoundError:
                return Snapshot(name=name, content=None)

    def replace(self, before: Snapshot, content: bytes) -> str | None:
        """Publish a small file where the store still has the version that `snapshot` returned.

        Local files are compared under the lock that every writer takes. An S3 store gets a conditional request
        (``If-None-Match: *`` or ``If-Match``), so that of two hosts one wins. Other stores, and S3 servers that do not
        implement such requests, are asked again right before the upload, which leaves a gap of one request.

        Args:
            before: the version that the content was made from.
            content: the new content. Where the file has it already, nothing is written.

        Returns:
            What an S3 store calls the new version, if that is known.

        Raises:
            ChangedError: another process replaced the file meanwhile with other content.
            SourceError: the file cannot be written.
        """
        if before.content == content:
            return before.etag
        if self.is_local:
            target = Path(self.path_of(before.name))
            with full_disk_named(self.url_of(before.name)), _exclusive(target), self.draft(before.name) as draft:
                self._expect_unchanged(before, content)
                draft.path.write_bytes(content)
            return None
        if self._is_s3:
            condition = {"IfNoneMatch": "*"} if before.etag is None else {"IfMatch": before.etag}
            status, etag = self._put_if(before.name, content, **condition)
            if status == _WON:  # by its own upload, if the answer was lost and the client sent it again
                self._expect_unchanged(Snapshot(name=before.name, content=content), content)
            if status != _NOT_IMPLEMENTED:
                return etag
        self._expect_unchanged(before, content)
        return self.write_bytes(before.name, content)

    def _expect_unchanged(self, before: Snapshot, content: bytes) -> None:
        if self.snapshot(before.name).content not in (before.content, content):
            detail = "another process published it meanwhile, with other content"
            raise ChangedError(self.url_of(before.name), f"{detail}: let it end, then run this again")

    def _put_if(self, name: str, content: bytes, **condition: str) -> tuple[int, str | None]:
        """Uploads a small file to an S3 store under a condition; returns the status of the reply, and the file's ETag.

        A reply of 409 decides nothing: another request for the file is under way, and may fail. It is made again.
        """
        pauses = iter(_CONFLICT_PAUSES)
        with storage_errors(self.url_of(name), "cannot be written"):
            while True:
                try:
                    answer = self.fs.pipe_file(self.path_of(name), content, **condition, **_ONE_UPLOAD)
                    return _MADE, (answer or {}).get("ETag")
                except OSError as error:
                    status, pause = http_status(error), next(pauses, None)
                    if status in (_WON, _NOT_IMPLEMENTED):
                        return status, None
                    if status != _UNDER_WAY or pause is None:
                        raise
                time.sleep(pause)

    def create(self, name: str, content: bytes) -> bool:
        """Publish a small file unless there is a file of that name; returns whether this call published it.

        A local file gets its name by a hard link, which the file system refuses if the name is taken. An S3 store gets
        a conditional request (``If-None-Match: *``). Other stores are asked first, since their clients may not know the
        condition of the upload. S3 servers that do not implement it are asked too, which leaves a gap of one request.

        Raises:
            SourceError: the file cannot be written.
        """
        if self.is_local:
            return self._create_local(name, content)
        if self._is_s3:
            status, _ = self._put_if(name, content, IfNoneMatch="*")
            if status != _NOT_IMPLEMENTED:
                return status == _MADE or self._has(name, content)
        if self.exists(name):
            return False
        if self._is_s3:
            self.write_bytes(name, content)
            return True
        target = self.path_of(name)
        with storage_errors(self.url_of(name), "cannot be written"):
            self.fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            try:
                self.fs.pipe_file(target, content, mode="create")
            except OSError as error:
                if not isinstance(error, FileExistsError) and http_status(error) not in (_UNDER_WAY, _WON):
                    raise
                return self._has(name, content)
        return True

    def _has(self, name: str, content: bytes) -> bool:
        """Whether a file has this content: clients repeat an upload whose answer was lost, and meet their own."""
        return self.found_bytes(name) == content

    def _create_local(self, name: str, content: bytes) -> bool:
        target = Path(self.path_of(name))
        with full_disk_named(self.url_of(name)), _path_beside(target) as path:
            path.write_bytes(content)
            _sync(path)
            try:
                os.link(path, target)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links
                with _exclusive(target):
                    if target.exists():
                        return False
                    path.replace(target)
        self.sync([name])
        return True

    def delete(self, name: str) -> None:
        """Remove a file if it exists; `SourceError` if the storage does not answer, or refuses."""
        with storage_errors(self.url_of(name), "cannot be deleted"), suppress(FileNotFoundError):
            self.fs.rm_file(self.path_of(name))

    def delete_all(self, names: Sequence[str]) -> None:
        """Remove files, those that exist; an S3 store is asked once for each 1,000.

        Raises:
            SourceError: the storage does not answer, or refuses.
        """
        with storage_errors(self.url, "cannot be cleaned"):
            if not self._is_s3:
                for name in names:
                    self.delete(name)
                return
            bucket = self.fs.split_path(self._root)[0]
            for start in range(0, len(names), _PAGE):
                objects = [{"Key": self._object(name)["Key"]} for name in names[start : start + _PAGE]]
                answer = self.fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
                for error in answer.get("Errors", ()):
                    where = self.url_of(names[start].rpartition("/")[0])
                    raise SourceError(where, f"{error.get('Key')} cannot be deleted: {error.get('Message')}")

    def delete_folder(self, name: str) -> None:
        """Remove a folder, if it exists, with all that is in it; `SourceError` if the storage refuses."""
        with storage_errors(self.url_of(name), "cannot be deleted"), suppress(FileNotFoundError):
            self.fs.rm(self.path_of(name), recursive=True)

    def abort_uploads(self, seconds: float) -> None:
        """Abort uploads to an S3 store that began so long ago and have not ended: they take space. Best effort."""
        if not self._is_s3:
            return
        bucket, prefix, _ = self.fs.split_path(self._root)
        page: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{prefix}/"}
        with suppress(OSError):  # a server that does not list them, or rights that are missing
            while True:
                found = self.fs.call_s3("list_multipart_uploads", **page)
                for upload in found.get("Uploads", ()):
                    if datetime.now(UTC) - upload["Initiated"] > timedelta(seconds=seconds):
                        of = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                        with suppress(FileNotFoundError):  # it has ended, or another process aborted it
                            self.fs.call_s3("abort_multipart_upload", **of)
                if not found.get("IsTruncated"):
                    return
                page |= {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}

    def leftovers(self, folder: str) -> dict[str, ListedFile]:
        """The temporary files of writers in a local folder: of those that work, and of those that were killed."""
        if not self.is_local:
            return {}
        try:
            listed = _local_files(self.path_of(folder))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {
            f"{folder}/{base}" if folder else base: file
            for base, file in listed.items()
            if base[0] == "." and base.endswith(TEMPORARY)
        }


def _local_files(folder: str) -> dict[str, ListedFile]:
    """The files in a folder by their base names."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # removed since it was listed, or a dangling link
                if entry.is_file():
                    status = entry.stat()
                    version = f"{status.st_size} {status.st_ino} {status.st_mtime_ns}"
                    found[entry.name] = ListedFile(status.st_size, version, modified=status.st_mtime)
    return found


def _listed_file(info: Mapping[str, Any]) -> ListedFile:
    version = " ".join(str(info[fact]) for fact in _VERSION_FACTS if info.get(fact) is not None)
    return ListedFile(int(info["size"]), version, info.get("ETag"), _modified(info))


def _modified(info: Mapping[str, Any]) -> float | None:
    """Returns when a file was written, of which file systems give different types under different names."""
    when = next(
        (info[name] for name in ("LastModified", "last_modified", "mtime", "updated", "created") if info.get(name)),
        None,
    )
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        return when.timestamp()
    return None if when is None else float(when)


@contextmanager
def _scratch_path(name: str) -> Iterator[Path]:
    """A path in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mm-assets-") as scratch:
        yield Path(scratch) / name.rsplit("/", 1)[-1]


@contextmanager
def _path_beside(target: Path) -> Iterator[Path]:
    """A temporary path beside a local file, of this writer alone: several may write one file at a time."""
    _make_folder(target.parent)
    path = target.with_name(f".{target.name[:_MAX_STEM]}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Keeps other processes out of blocks of the same file, for which they wait.

    The lock is held on a file beside it: writers that replace their file would lose a lock on that.

    Raises:
        SourceError: another process has been in such a block for 30 seconds.
    """
    _make_folder(target.parent)
    guard = target.with_name(f".{target.name}.exclusive")
    lock = _lock(guard, target)
    try:
        yield
    finally:
        guard.unlink(missing_ok=True)
        os.close(lock)


def _lock(guard: Path, target: Path) -> int:
    """Lock the right to build `target` for this process; the lock ends with the process at the latest."""
    try:
        import fcntl
    except ImportError as error:
        detail = "publishing files needs POSIX file locks (fcntl), which this system does not have"
        raise SourceError(target, detail) from error
    deadline = time.monotonic() + _EXCLUSIVE_PATIENCE
    while True:
        fd = os.open(guard, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if guard.exists() and os.fstat(fd).st_ino == guard.stat().st_ino:
                return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                detail = "another process is writing this file: run this again when it has ended"
                raise SourceError(target, detail) from TimeoutError("it is locked")  # what may pass: it may be dying
            time.sleep(0.05)
        # Its last holder removed the guard between our open and our lock: try the name again.
        os.close(fd)


def _move(path: Path, target: Path) -> None:
    """Rename a file once its content is on the disk."""
    _sync(path)
    _make_folder(target.parent)
    os.replace(path, target)


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it; their names survive a crash of the machine, as those of files do."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a folder that may be written to, and not read
            _sync(folder.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
