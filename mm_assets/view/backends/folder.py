"""A dataset's folder: its newest manifest as a whole, each version, and each partition by what there is of it."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mm_assets.dataset.manifest import file_path
from mm_assets.display import Item
from mm_assets.errors import ConfigError
from mm_assets.pipeline.chain import FILTERED_ROWS, MATERIALIZED_ROWS, PACKED_FOLDER, ROWS
from mm_assets.pipeline.explore.diff import newest_digest
from mm_assets.pipeline.explore.status import failures
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.files import SourceFile
from mm_assets.view.backends.base import Backend, Entry, NoSampleError, Picture
from mm_assets.view.backends.joined import join
from mm_assets.view.backends.packed import PackedBackend
from mm_assets.view.backends.row_files import ParquetRows
from mm_assets.view.backends.rows import RowsBackend, open_source

if TYPE_CHECKING:
    from mm_assets.view.sample_table import SampleTable

__all__ = ["FolderBackend", "FolderListing", "open_dataset_store"]

MAX_OPEN = 64  # partitions: a page of rows may have samples of 50
MAX_READ_RECORDS = 200  # of partitions that the newest manifest does not list
LISTING_SECONDS = 5.0  # for which a listing of the folder is used again
_VERSION = re.compile(r"@[0-9a-f]{64}")  # no key of a partition begins so
# Tables of rows, the last one made first.
_STAGES = tuple(stage.tables[0].name for stage in (FILTERED_ROWS, MATERIALIZED_ROWS, ROWS))


def open_dataset_store(folder: str, storage_options: Mapping[str, Any] | None = None) -> DatasetStore:
    """The dataset in a folder, without its declaration.

    Raises:
        ConfigError: the folder's name is not one of a dataset.
    """
    root, _, name = folder.rstrip("/").rpartition("/")
    config: dict[str, Any] = {"name": name, "shards": root or "/", "root": root or "/"}
    if storage_options:
        config |= {"root_options": dict(storage_options), "storage_options": dict(storage_options)}
    try:
        return DatasetStore(DatasetSpec.from_config(config, where="arguments"))
    except ConfigError as error:
        detail = f"{folder} cannot be opened as a dataset's folder ({error.detail}): name its manifest.json"
        raise ConfigError("arguments", "X", detail) from error


class FolderListing:
    """A dataset's folder as it was listed some seconds ago at most; safe for several threads.

    Args:
        dataset: the folder.
    """

    def __init__(self, dataset: DatasetStore) -> None:
        self.dataset = dataset
        self._lock = threading.Lock()
        self._listed: tuple[float, DatasetState] | None = None

    @property
    def state(self) -> DatasetState:
        """The dataset as listed; `SourceError` if the storage cannot be read."""
        known = self._listed
        # One thread lists again; the others have what is known, as long as there is something.
        if (known is None or known[0] < time.monotonic()) and self._lock.acquire(blocking=known is None):
            try:
                if self._listed is known:
                    state = DatasetState(self.dataset)
                    self._listed = time.monotonic() + LISTING_SECONDS, state  # from its end: it may take longer
            finally:
                self._lock.release()
        assert self._listed is not None
        return self._listed[1]


class FolderBackend(Backend):
    """A dataset's folder.

    Args:
        dataset: the folder.
        storage_options: arguments for the file system of the shards.
    """

    may_be_dataset: ClassVar[bool] = True
    has_versions: ClassVar[bool] = True

    def __init__(self, dataset: DatasetStore, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(dataset.store.url, "dataset")
        self.dataset = dataset
        self.listing = FolderListing(dataset)
        self._options = dict(storage_options or {})
        self._digest = newest_digest(dataset)
        self._whole = self._open_whole()
        self._checked = time.monotonic(), self._digest
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Backend] = OrderedDict()
        self._listing = threading.Lock()  # of the next: a long list must not hold up who reads a partition
        self._listed: tuple[float, Sequence[Mapping[str, Any]]] | None = None

    def _open_whole(self) -> PackedBackend | None:
        return None if self._digest is None else self._open_version(self._digest, or_newest=True)

    def _open_version(self, digest: str, *, or_newest: bool = False) -> PackedBackend:
        import mm_assets

        store, name = self.dataset.store, f"manifests/{digest}.json"
        if not store.exists(name):
            if not or_newest:
                raise NoSampleError(f"{self.title} has no version {digest[:12]}")
            name = "manifest.json"  # a copy of the folder may have this one only
        url = store.url_of(name)
        found = PackedBackend(mm_assets.open(url, storage_options=self._options), url)
        found.kind = f"version {digest[:12]}"
        return found

    # --- versions -----------------------------------------------------------------------------------------------------

    def shown_digest(self, key: str = "") -> str | None:
        """The digest of the manifest that is shown by a key, "" for the whole; None of a partition, and before any."""
        if not key:
            return self._digest
        return key[1:] if _VERSION.fullmatch(key) else None

    def version(self, digest: str) -> PackedBackend:
        """A version of the whole; `NoSampleError` if there is none of that digest."""
        found = self.partition(f"@{digest}")
        if not isinstance(found, PackedBackend):
            raise NoSampleError(f"{self.title} has no version {digest[:12]}")
        return found

    def newest(self, key: str) -> str | None:
        """``@`` and the digest of a manifest that was published since; it is looked for every few seconds at most."""
        shown = self.shown_digest(key)
        if key and shown is None:
            return None
        with self._lock:
            at, digest = self._checked
        if time.monotonic() - at > LISTING_SECONDS:
            digest = newest_digest(self.dataset)
            with self._lock:
                self._checked = time.monotonic(), digest
        if digest is None or digest == shown:
            return None
        return "" if digest == self._digest else f"@{digest}"

    # --- the whole ----------------------------------------------------------------------------------------------------

    def known(self) -> int:
        """Samples of the newest manifest; 0 before the first."""
        return 0 if self._whole is None else self._whole.known()

    def _manifest(self) -> PackedBackend:
        if self._whole is None:
            raise NoSampleError(f"{self.title} has no manifest yet: choose a partition")
        return self._whole

    def ids(self, start: int, stop: int) -> Sequence[str]:
        """Ids of the manifest's samples."""
        return self._manifest().ids(start, stop)

    def matches(self, text: str, start: int, stop: int) -> list[int]:
        """Returns the samples of the manifest whose id contains a text."""
        return self._manifest().matches(text, start, stop)

    def index_of(self, sample_id: str) -> int | None:
        """Returns the number of a sample of the manifest."""
        return None if self._whole is None else self._whole.index_of(sample_id)

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """Returns cards of the manifest's samples."""
        return self._manifest().entries(indices) if indices else ()

    def items(self, index: int) -> tuple[Item, ...]:
        """Returns the items of a sample of the manifest."""
        return self._manifest().items(index)

    def picture(self, index: int) -> Picture:
        """Returns the picture of a sample of the manifest."""
        return self._manifest().picture(index)

    def identity(self, index: int) -> str:
        """Returns the identity of a sample of the manifest."""
        return self._manifest().identity(index)

    def about(self) -> Mapping[str, Any]:
        """What the manifest has, and whether there is one."""
        return {"has_manifest": self._whole is not None, **({} if self._whole is None else self._whole.about())}

    def sample_table(self) -> SampleTable | None:
        """Returns the table of the manifest's samples."""
        return None if self._whole is None else self._whole.sample_table()

    def note(self) -> str:
        """That there is nothing to show yet."""
        return "" if self._whole is not None else "There is no manifest yet: choose a partition."

    # --- partitions ---------------------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Mapping[str, Any]]:
        """Every registered partition: its state, samples and bytes as far as they are known without reading much."""
        with self._listing:
            if self._listed is None or self._listed[0] < time.monotonic():
                found = self._list()
                self._listed = time.monotonic() + LISTING_SECONDS, found  # from its end: it may take longer than that
            return self._listed[1]

    def _list(self) -> list[Mapping[str, Any]]:
        state = self.listing.state
        newer = sorted(state.records.keys() - state.listed.keys())
        published = state.published([*state.listed, *newer[:MAX_READ_RECORDS]], outdated=True)
        failed = failures(state, [key for key in state.partitions if key not in state.records])
        found: list[Mapping[str, Any]] = []
        for key in sorted({*state.partitions, *state.records}):
            entry, partition = published.get(key), state.partitions.get(key)
            name = "published" if key in state.records else "failed" if key in failed else "pending"
            found.append(
                {
                    "key": key,
                    "state": name if partition is not None else f"{name}, not registered",
                    "samples": None if entry is None else entry.num_samples,
                    "bytes": None if entry is None else sum(size for size, _ in entry.packed.values()),
                    "shards": 0 if partition is None else len(partition.shards),
                }
            )
        return found

    def partition(self, key: str) -> Backend:
        """A partition by its key, ``key/stage`` for a stage of it, or ``@`` and a digest for a version of the whole."""
        with self._lock:
            found = self._open.get(key)
            if found is None:
                is_version = _VERSION.fullmatch(key) is not None
                found = self._open_version(key[1:]) if is_version else self._open_partition(*key.partition("/")[::2])
                self._open[key] = found
                while len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)[1].end_reading()  # other requests may still read it
            self._open.move_to_end(key)
            return found

    def _open_partition(self, key: str, stage: str) -> Backend:
        state = self.listing.state
        if key not in state.partitions and key not in state.records:
            raise NoSampleError(f"{self.title} has no partition {key!r}")
        files = self._files(state, key)
        if not files:
            raise NoSampleError(f"{self.title}: partition {key!r} has neither files nor shards")
        if stage and stage not in files:
            raise NoSampleError(f"{self.title}: partition {key!r} has no {stage!r}, there are {', '.join(files)}")
        chosen = stage or next(iter(files))
        failure = failures(state, [key]).get(key)
        backend = self._open_stage(state, key, chosen, files[chosen])
        backend.kind = f"{chosen} of partition {key}"
        backend.place = {"partition": key, "stage": chosen, "stages": list(files)}
        backend.warning = "" if failure is None else f"Its last run failed at {failure.stage}: {failure.said}"
        return backend

    def _files(self, state: DatasetState, key: str) -> dict[str, str]:
        """What there is of a partition, the last stage first, with its path in the folder; shards have none there."""
        found = {}
        for entry in state.published([key], outdated=True).values():
            form, (_, sha256) = next(iter(entry.packed.items()))
            found[PACKED_FOLDER] = file_path(form, key, sha256)
        tables = state.tables([key]).get(key, {})
        found |= {table: tables[table] for table in _STAGES if table in tables}
        return found | ({"shards": ""} if key in state.partitions else {})

    def _open_stage(self, state: DatasetState, key: str, stage: str, path: str) -> Backend:
        import mm_assets

        shards = state.partitions[key].shards if key in state.partitions else ()
        if stage == "shards":
            if len(shards) == 1:
                return self._open_shard(shards[0].url)
            return join([shard.url for shard in shards], key, "shard", self._open_shard)
        url = self.dataset.store.url_of(path)
        if stage == PACKED_FOLDER:
            return PackedBackend(mm_assets.open(url, storage_options=self._options), url)
        urls = {shard.url for shard in shards}
        table = ParquetRows(SourceFile(url, self._options))
        return RowsBackend(table, url, urls.__contains__, self._options, stage)

    def _open_shard(self, url: str) -> Backend:
        return open_source(SourceFile(url, self._options), url, self._options)

    def close(self) -> None:
        """Closes everything that is open."""
        with self._lock:
            for backend in self._open.values():
                backend.close()
            self._open.clear()
        if self._whole is not None:
            self._whole.close()
