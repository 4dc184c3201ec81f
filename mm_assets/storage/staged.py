"""Files of a remote store in a local folder: written there, uploaded together, and fetched when they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mm_assets.errors import full_disk_named
from mm_assets.storage.store import Draft, ListedFile, PublishedFile, Snapshot, Store

__all__ = ["StagedStore"]

UPLOADS = 4  # at a time; each holds up to 32 MiB


class StagedStore(Store):
    """A remote store of which new files are in a local folder until `upload`.

    A file that is read and was not written here is fetched once, whole. Small files that processes agree on (`create`,
    `snapshot`, `replace`, `delete`) are those of the remote store at once. Messages name files by their remote URLs.

    Args:
        remote: where the files will be.
        folder: an empty folder.
    """

    def __init__(self, remote: Store, folder: Path) -> None:
        super().__init__(str(folder))
        self.url = remote.url
        self.remote = remote
        self._folder = folder
        self._written: dict[str, PublishedFile] = {}
        self._fetching = threading.Lock()

    @property
    def durable(self) -> Store:
        """The remote store."""
        return self.remote

    def local_path(self, name: str) -> Path:
        """Path of a file to read, which is fetched first if it is not there; `SourceError` if it cannot be."""
        path = Path(self.path_of(name))
        with self._fetching, full_disk_named(self._folder):
            if not path.exists():
                self.remote.copy(name, self._folder)
        return path

    def open(self, name: str) -> Any:
        """As `Store.open`."""
        self.local_path(name)
        return super().open(name)

    def size(self, name: str) -> int | None:
        """As `Store.size`; of a file that is not here the remote one's."""
        return super().size(name) if Path(self.path_of(name)).exists() else self.remote.size(name)

    def listing(self, folder: str, *, prefix: str = "") -> dict[str, ListedFile]:
        """As `Store.listing`, of the remote store."""
        return self.remote.listing(folder, prefix=prefix)

    def found_bytes(self, name: str) -> bytes | None:
        """As `Store.found_bytes`; of a file that is not here the remote one's."""
        return super().found_bytes(name) if Path(self.path_of(name)).exists() else self.remote.found_bytes(name)

    @contextmanager
    def draft(self, name: str, *, durable: bool = True) -> Iterator[Draft]:
        """As `Store.draft`, in the local folder; nothing is synced to its disk."""
        with full_disk_named(self._folder), super().draft(name, durable=durable) as draft:
            yield draft
        self._written[draft.name] = draft.result()

    def link(self, file: PublishedFile, name: str, *, durable: bool = True) -> PublishedFile:
        """As `Store.link`, in the local folder; both names are uploaded."""
        self._written[name] = super().link(file, name, durable=durable)
        return self._written[name]

    def exists(self, name: str) -> bool:
        """As `Store.exists`, here or in the remote store."""
        return super().exists(name) or self.remote.exists(name)

    def read_bytes(self, name: str) -> bytes:
        """As `Store.read_bytes`."""
        self.local_path(name)
        return super().read_bytes(name)

    def upload(self) -> None:
        """Uploads what was written since the last time, several files at once; `SourceError` if an upload failed."""
        with ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload") as pool:
            list(pool.map(self._put, list(self._written)))
        self._written.clear()

    def _put(self, name: str) -> None:
        self.remote.upload_file(Path(self.path_of(name)), name)

    def refresh(self, names: Iterable[str]) -> None:
        """As `Store.refresh`: uploads files again that are here."""
        for name in names:
            if Path(self.path_of(name)).exists():
                self._put(name)
            else:
                self.remote.refresh([name])

    def snapshot(self, name: str) -> Snapshot:
        """As `Store.snapshot`, of the remote store."""
        return self.remote.snapshot(name)

    def replace(self, before: Snapshot, content: bytes) -> str | None:
        """As `Store.replace`, in the remote store."""
        return self.remote.replace(before, content)

    def create(self, name: str, content: bytes) -> bool:
        """As `Store.create`, in the remote store."""
        return self.remote.create(name, content)

    def delete(self, name: str) -> None:
        """As `Store.delete`, in the remote store."""
        self.remote.delete(name)

    def sync(self, names: Iterable[str]) -> None:
        """Nothing: the local folder is scratch."""

    def _publish(self, path: Path, name: str, *, durable: bool) -> None:
        target = Path(self.path_of(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
