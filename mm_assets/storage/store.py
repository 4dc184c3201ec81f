"""Files published below one root URL: each appears there whole or not at all.

Content is built in a local file that no reader sees under its final name and appears there by one rename (local) or one
completed upload (object store).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from mm_assets.errors import ChangedError, SourceError, full_disk_named, temporary_disk_named
from mm_assets.storage.hashed_file import HashedFile, file_state
from mm_assets.storage.s3_listing import list_objects
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

__all__ = ["Draft", "ListedFile", "PublishedFile", "Snapshot", "Store"]

_CONFLICTS = (409, 412)  # of a conditional request: another one is under way, or has won
_NOT_IMPLEMENTED = 501
_ONE_REQUEST = {"max_concurrency": 1}  # else s3fs asks for the size first, and gets a file in pieces
_VERSION_FACTS = ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")  # file systems differ in them
_UPLOAD = {"chunksize": 16 << 20, "max_concurrency": 2}  # bytes of one part, and parts in memory at a time
_WRITE_PATIENCE = 1.0  # seconds: runs of one partition must not overlap at all
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
        """The file as markers and manifests list it."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


class ListedFile(NamedTuple):
    """A file as a listing of its folder describes it.

    Attributes:
        size: bytes.
        version: changes when the file is replaced, also by one of the same size: the facts that the storage gives.
        etag: what an S3 store calls this version of it; None elsewhere.
    """

    size: int
    version: str
    etag: str | None = None


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
        self._digest = file_state(os.stat(self.path)), file.sha256

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

    def _info(self, name: str) -> Mapping[str, Any]:
        """The facts that the storage has about a path; empty where there is nothing."""
        # `isfile` of a file system answers "no" to any error, also of a store that is down.
        with storage_errors(self.url_of(name), "cannot be read"):
            try:
                return dict(self.fs.info(self.path_of(name)))
            except (FileNotFoundError, NotADirectoryError):
                return {}

    def sizes(self, folder: str) -> dict[str, int]:
        """Name (relative to the root) and bytes of each file directly in a folder, without hidden ones.

        Raises:
            SourceError: the storage does not answer.
        """
        return {name: file.size for name, file in self.listing(folder).items()}

    def listing(self, folder: str) -> dict[str, ListedFile]:
        """The same files with what tells one version of a file from another; errors as `sizes`."""
        with storage_errors(self.url_of(folder), "cannot be listed"):
            try:
                listed = _local_files(self.path_of(folder)) if self.is_local else self._remote_files(folder)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {f"{folder}/{base}" if folder else base: listed[base] for base in sorted(listed) if base[0] != "."}

    def _remote_files(self, folder: str) -> dict[str, ListedFile]:
        found = {}
        path = self.path_of(folder)
        if is_web(self.url):
            named = FileSearch(self.fs, (), ()).pages_in(path)
        else:
            listed = list_objects(self.fs, path) if self._is_s3 else self.fs.ls(path, detail=True)
            named = ((info["name"].rstrip("/").rsplit("/", 1)[-1], info) for info in listed)
        for base, info in named:
            if info["type"] == "file" and base:
                if info.get("size") is None:
                    raise SourceError(self.url_of(f"{folder}/{base}" if folder else base), NO_SIZE)
                version = " ".join(str(info[fact]) for fact in _VERSION_FACTS if info.get(fact) is not None)
                found[base] = ListedFile(int(info["size"]), version, info.get("ETag"))
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
            SourceError: another process is building the same file, the disk is full, or the upload failed.
        """
        with (
            full_disk_named(self.url_of(name)) if self.is_local else temporary_disk_named(),
            _locked_path(Path(self.path_of(name))) if self.is_local else _scratch_path(name) as path,
        ):
            draft = Draft(path, name)
            yield draft
            digest, size = draft.digest(), path.stat().st_size
            self._publish(path, draft.name, durable=durable)
            draft.published = PublishedFile(path=draft.name, size=size, sha256=digest)

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

    def upload_file(self, path: Path, name: str) -> None:
        """Copies a local file to a remote store; `SourceError` if it cannot be written."""
        target = self.path_of(name)
        with storage_errors(self.url_of(name), "cannot be written"):
            if self._is_s3:
                self.fs.put_file(str(path), target, **_UPLOAD)
            else:
                self.fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
                self.fs.put_file(str(path), target)

    def write_bytes(self, name: str, content: bytes, *, durable: bool = True) -> PublishedFile:
        """Publish a small file; arguments and errors as in `draft`."""
        with self.draft(name, durable=durable) as draft:
            draft.path.write_bytes(content)
        return draft.result()

    def snapshot(self, name: str, listed: ListedFile | None = None) -> Snapshot:
        """A small file as it is now, to be replaced by `replace` only where no other process did so meanwhile.

        Args:
            name: relative to the root.
            listed: the file in a listing that was made just before, which saves one request.

        Raises:
            SourceError: the file cannot be read.
        """
        etag = None
        with storage_errors(self.url_of(name), "cannot be read"):
            try:
                if self._is_s3:
                    # Before the content: a version in between is noticed, because its tag is another one.
                    etag = listed.etag if listed is not None else None
                    etag = etag or str(self.fs.info(self.path_of(name), refresh=True)["ETag"])
                return Snapshot(name=name, content=self._get(name), etag=etag)
            except FileNotFoundError:
                return Snapshot(name=name, content=None)

    def replace(self, before: Snapshot, content: bytes) -> None:
        """Publish a small file where the store still has the version that `snapshot` returned.

        Local files are compared under the lock that every writer takes. An S3 store gets a conditional request
        (``If-None-Match: *`` or ``If-Match``), so that of two hosts one wins. Other stores, and S3 servers that do not
        implement such requests, are asked again right before the upload, which leaves a gap of one request.

        Args:
            before: the version that the content was made from.
            content: the new content. Where the file has it already, nothing is written.

        Raises:
            ChangedError: another process replaced the file meanwhile with other content.
            SourceError: the file cannot be written.
        """
        if before.content == content:
            return
        if self.is_local:
            with self.draft(before.name) as draft:
                self._expect_unchanged(before, content)
                draft.path.write_bytes(content)
            return
        if self._is_s3 and self._put_if_unchanged(before, content):
            return
        self._expect_unchanged(before, content)
        self.write_bytes(before.name, content)

    def _expect_unchanged(self, before: Snapshot, content: bytes) -> None:
        if self.snapshot(before.name).content not in (before.content, content):
            detail = "another process published it meanwhile, with other content"
            raise ChangedError(self.url_of(before.name), f"{detail}: let it end, then run this again")

    def _put_if_unchanged(self, before: Snapshot, content: bytes) -> bool:
        """Whether the conditional upload was made; False where the server does not implement it."""
        condition = {"IfNoneMatch": "*"} if before.etag is None else {"IfMatch": before.etag}
        target = self.path_of(before.name)
        with storage_errors(self.url_of(before.name), "cannot be written"):
            try:
                self.fs.pipe_file(target, content, **condition)
            except OSError as error:
                status = http_status(error)
                if status == _NOT_IMPLEMENTED:
                    return False
                if status not in _CONFLICTS:
                    raise
                # Its own upload, where the first answer was lost and the client sent it again; or another process's.
                self._expect_unchanged(Snapshot(name=before.name, content=content), content)
        return True

    @contextmanager
    def exclusive(self, name: str) -> Iterator[bool]:
        """Keeps other processes out of blocks of the same `name`, for which they wait.

        Args:
            name: relative to the root; there need not be a file.

        Yields:
            True in a local file system; False in an object store, which has no locks.

        Raises:
            SourceError: another process has been in such a block for 30 seconds.
        """
        if not self.is_local:
            yield False
            return
        target = Path(self.path_of(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, f".{target.name}.exclusive", _EXCLUSIVE_PATIENCE):
            yield True

    def delete(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path_of(name))


def _local_files(folder: str) -> dict[str, ListedFile]:
    """The files in a folder by their base names."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # removed since it was listed, or a dangling link
                if entry.is_file():
                    status = entry.stat()
                    version = f"{status.st_size} {status.st_ino} {status.st_mtime_ns}"
                    found[entry.name] = ListedFile(status.st_size, version)
    return found


@contextmanager
def _scratch_path(name: str) -> Iterator[Path]:
    """A path in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mm-assets-") as scratch:
        yield Path(scratch) / name.rsplit("/", 1)[-1]


@contextmanager
def _locked_path(target: Path) -> Iterator[Path]:
    """A temporary path beside a local file, which no other process builds in the meantime."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.tmp")
    with _locked(target, f".{target.name}.lock", _WRITE_PATIENCE):
        try:
            path.unlink(missing_ok=True)  # left by a run that was killed
            yield path
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _locked(target: Path, guard_name: str, patience: float) -> Iterator[None]:
    """Holds a lock on a file beside the target: writers that replace their file would lose a lock held on it."""
    guard = target.with_name(guard_name)
    lock = _lock(guard, target, patience)
    try:
        yield
    finally:
        guard.unlink(missing_ok=True)
        os.close(lock)


def _lock(guard: Path, target: Path, patience: float) -> int:
    """Lock the right to build `target` for this process; the lock ends with the process at the latest."""
    try:
        import fcntl
    except ImportError as error:
        detail = "publishing files needs POSIX file locks (fcntl), which this system does not have"
        raise SourceError(target, detail) from error
    deadline = time.monotonic() + patience
    while True:
        fd = os.open(guard, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if guard.exists() and os.fstat(fd).st_ino == guard.stat().st_ino:
                return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                detail = "another process is writing this file: runs of one partition must not overlap"
                raise SourceError(target, detail) from TimeoutError("it is locked")  # what may pass: it may be dying
            time.sleep(0.05)
        # Its last holder removed the guard between our open and our lock: try the name again.
        os.close(fd)


def _move(path: Path, target: Path) -> None:
    """Rename a file once its content is on the disk."""
    _sync(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, target)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
