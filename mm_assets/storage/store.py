"""Files published below one root URL: each appears there whole or not at all.

Content is built in a local file that no reader sees under its final name and appears there by one rename (local) or one
completed upload (object store).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_assets.errors import SourceError
from mm_assets.storage.urls import Options, filesystem, is_local, local_path, protocols, storage_errors

__all__ = ["Draft", "PublishedFile", "Store"]

_UPLOAD = {"chunksize": 16 << 20, "max_concurrency": 2}  # bytes of one part, and parts in memory at a time


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
        self._digest: tuple[tuple[int, int, int], str] | None = None

    def digest(self) -> str:
        """SHA-256 of the file so far, hexadecimal; computed again only if the file changed."""
        status = os.stat(self.path)
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
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
        return f"{self.url}/{name}" if name else self.url

    def path_of(self, name: str) -> str:
        """Path of a file in the file system."""
        return f"{self._root}/{name}" if name else self._root

    def exists(self, name: str) -> bool:
        """Whether there is a file at `name`."""
        return bool(self.fs.isfile(self.path_of(name)))

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is no such file."""
        try:
            return int(self.fs.info(self.path_of(name))["size"])
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Name (relative to the root) and bytes of each file directly in a folder, without hidden ones."""
        try:
            listed = self.fs.ls(self.path_of(folder), detail=True)
        except FileNotFoundError:
            return {}
        found = {}
        for info in listed:
            base = info["name"].rstrip("/").rsplit("/", 1)[-1]
            if info["type"] == "file" and base and not base.startswith("."):
                found[f"{folder}/{base}" if folder else base] = int(info["size"])
        return dict(sorted(found.items()))

    def read_bytes(self, name: str) -> bytes:
        """The whole content; `SourceError` if there is no such file or it cannot be read."""
        with storage_errors(self.url_of(name), "cannot be read"):
            return bytes(self.fs.cat_file(self.path_of(name)))

    def open(self, name: str) -> Any:
        """A seekable binary file object, as pyarrow reads it; `SourceError` if there is no such file."""
        # Column chunks are read whole and once: a read-ahead cache would fetch their neighbours.
        options = {} if self.is_local else {"cache_type": "none"}
        with storage_errors(self.url_of(name), "cannot be opened"):
            return self.fs.open(self.path_of(name), "rb", **options)

    @contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        """Build a file under a temporary name, and publish it when the block ends without an exception.

        Raises:
            SourceError: another process is building the same file, or the upload failed.
        """
        with _locked_path(Path(self.path_of(name))) if self.is_local else _scratch_path(name) as path:
            draft = Draft(path, name)
            yield draft
            digest, size = draft.digest(), path.stat().st_size
            if self.is_local:
                _move(path, Path(self.path_of(draft.name)))
            else:
                self._upload(path, draft.name)
            draft.published = PublishedFile(path=draft.name, size=size, sha256=digest)

    def _upload(self, path: Path, name: str) -> None:
        target = self.path_of(name)
        with storage_errors(self.url_of(name), "cannot be written"):
            if self._is_s3:
                self.fs.put_file(str(path), target, **_UPLOAD)
            else:
                self.fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
                self.fs.put_file(str(path), target)

    def write_bytes(self, name: str, content: bytes) -> PublishedFile:
        """Publish a small file; errors as in `draft`."""
        with self.draft(name) as draft:
            draft.path.write_bytes(content)
        return draft.result()

    def delete(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path_of(name))


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
    # The lock is on a file beside the content: writers that replace their file would lose a lock held on it.
    guard = target.with_name(f".{target.name}.lock")
    lock = _lock(guard, target)
    try:
        path.unlink(missing_ok=True)  # left by a run that was killed
        yield path
    finally:
        path.unlink(missing_ok=True)
        guard.unlink(missing_ok=True)
        os.close(lock)


def _lock(guard: Path, target: Path) -> int:
    """Lock the right to build `target` for this process; the lock ends with the process at the latest."""
    try:
        import fcntl
    except ImportError as error:
        detail = "publishing files needs POSIX file locks (fcntl), which this system does not have"
        raise SourceError(target, detail) from error
    deadline = time.monotonic() + 1.0
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
                raise SourceError(target, detail) from None
            time.sleep(0.05)
        # Its last holder removed the guard between our open and our lock: try the name again.
        os.close(fd)


def _move(path: Path, target: Path) -> None:
    """Rename a file, durably."""
    _sync(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
