"""A dataset's folder: its newest manifest as a whole, each version, and each partition by what there is of it."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mm_assets.display import Item
from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS, MATERIALIZED_ROWS, PUBLISHED, ROWS
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import WITHDRAWN, DatasetStore
from mm_assets.pipeline.state.markers import Markers
from mm_assets.pipeline.state.records import Partition
from mm_assets.storage.files import SourceFile
from mm_assets.view.backends.base import Backend, Entry, NoSampleError, Picture
from mm_assets.view.backends.container import ContainerBackend
from mm_assets.view.backends.packed import PackedBackend
from mm_assets.view.backends.references import References
from mm_assets.view.backends.row_files import ParquetRows
from mm_assets.view.backends.rows import RowsBackend

if TYPE_CHECKING:
    from mm_assets.view.sample_table import SampleTable

__all__ = ["FolderBackend", "open_dataset_store"]

MAX_OPEN = 64  # partitions: a page of rows may have samples of 50
MAX_READ_MARKERS = 200  # beside those that the cache of markers knows
LISTING_SECONDS = 5.0  # for which a list of partitions is used again
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
        config["root_options"] = dict(storage_options)
    try:
        return DatasetStore(DatasetSpec.from_config(config, where="arguments"))
    except ConfigError as error:
        detail = f"{folder} cannot be opened as a dataset's folder ({error.detail}): name its manifest.json"
        raise ConfigError("arguments", "X", detail) from error


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
        self._options = dict(storage_options or {})
        self._digest = self._newest_digest()
        self._whole = self._open_whole()
        self._checked = time.monotonic(), self._digest
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Backend] = OrderedDict()
        self._listing = threading.Lock()  # of the next: a long list must not hold up who reads a partition
        self._listed: tuple[float, Sequence[Mapping[str, Any]]] | None = None

    def _newest_digest(self) -> str | None:
        content = self.dataset.store.found_bytes("manifest.json")
        return None if content is None else hashlib.sha256(content).hexdigest()

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
            digest = self._newest_digest()
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
        """As the manifest's."""
        return self._manifest().matches(text, start, stop)

    def index_of(self, sample_id: str) -> int | None:
        """As the manifest's."""
        return None if self._whole is None else self._whole.index_of(sample_id)

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """As the manifest's."""
        return self._manifest().entries(indices) if indices else ()

    def items(self, index: int) -> tuple[Item, ...]:
        """As the manifest's."""
        return self._manifest().items(index)

    def picture(self, index: int) -> Picture:
        """As the manifest's."""
        return self._manifest().picture(index)

    def identity(self, index: int) -> str:
        """As the manifest's."""
        return self._manifest().identity(index)

    def about(self) -> Mapping[str, Any]:
        """What the manifest has, and whether there is one."""
        return {"has_manifest": self._whole is not None, **({} if self._whole is None else self._whole.about())}

    def sample_table(self) -> SampleTable | None:
        """As the manifest's."""
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
        store = self.dataset.store
        partitions = self.dataset.registered().partitions
        listing = store.listing(PUBLISHED.name)
        names = _published(self.dataset.marker_names(listing))
        markers = Markers(self.dataset, listing)
        cheap = [name for name in names.values() if name in markers.seen]
        others = [name for name in names.values() if name not in markers.seen]
        read = markers.read([*cheap, *others[:MAX_READ_MARKERS]])
        failed = set(store.sizes("failures"))
        found: list[Mapping[str, Any]] = []
        for key in sorted({*partitions, *names}):
            marker = read.get(names.get(key, ""))
            has_failed = DatasetStore.failure_name(key) in failed
            state = "published" if key in names else "failed" if has_failed else "pending"
            partition = partitions.get(key)
            found.append(
                {
                    "key": key,
                    "state": state if partition is not None else f"{state}, not registered",
                    "samples": None if marker is None else marker.num_samples,
                    "bytes": None if marker is None else sum(size for _, size in marker.served_files()),
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
        partition = self.dataset.registered().partitions.get(key)
        names = self.dataset.marker_names()
        if partition is None and key not in names:
            raise NoSampleError(f"{self.title} has no partition {key!r}")
        stages = self._stages(key, partition, names)
        if not stages:
            raise NoSampleError(f"{self.title}: partition {key!r} has neither files nor shards")
        if stage and stage not in stages:
            raise NoSampleError(f"{self.title}: partition {key!r} has no {stage!r}, there are {', '.join(stages)}")
        chosen = stage or stages[0]
        return _PartitionBackend(self._of_stage(key, chosen, partition, names), key, chosen, stages, self._failure(key))

    def _failure(self, key: str) -> str:
        failure = self.dataset.failure(key)
        return "" if failure is None else f"Its last run failed at {failure.stage}: {failure.said}"

    def _stages(self, key: str, partition: Partition | None, names: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """What there is of a partition, the last stage first."""
        store = self.dataset.store
        tables = [stage for stage in _STAGES if store.exists(DatasetStore.table(stage, key))]
        packed = ["packed"] if _published({key: names.get(key, ())}) else []
        shards = ["shards"] if partition is not None and partition.shards else []
        return (*packed, *tables, *shards)

    def _of_stage(
        self, key: str, stage: str, partition: Partition | None, names: Mapping[str, tuple[str, ...]]
    ) -> Backend:
        import mm_assets

        store = self.dataset.store
        shards = () if partition is None else partition.shards
        if stage == "shards":
            return ContainerBackend([SourceFile(shard.url, self._options) for shard in shards], key)
        if stage != "packed":
            urls = {shard.url for shard in shards}
            references = References(urls.__contains__, self._options)
            file = SourceFile(store.url_of(DatasetStore.table(stage, key)), self._options)
            return RowsBackend(ParquetRows(file), file.url, references, stage)
        listing = store.listing(PUBLISHED.name)
        name = _published({key: names[key]})[key]
        marker = Markers(self.dataset, listing).read([name]).get(name)
        if marker is None:
            raise SourceError(store.url_of(name), "is not a marker of this release: run the partition again")
        file_name = next(iter(marker.packed.values()))["path"]
        url = store.url_of(file_name)
        return PackedBackend(mm_assets.open(url, storage_options=self._options), url)

    def close(self) -> None:
        """Closes everything that is open."""
        with self._lock:
            for backend in self._open.values():
                backend.close()
            self._open.clear()
        if self._whole is not None:
            self._whole.close()


def _published(names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The marker of each partition that has one which is not withdrawn: the last of several."""
    found = {key: [name for name in markers if not name.endswith(WITHDRAWN)] for key, markers in names.items()}
    return {key: markers[-1] for key, markers in found.items() if markers}


class _PartitionBackend(Backend):
    """A stage of a partition, with the names of its other stages."""

    def __init__(self, inner: Backend, key: str, stage: str, stages: Sequence[str], failure: str) -> None:
        super().__init__(inner.title, f"{stage} of partition {key}")
        self._inner = inner
        self._facts = {"partition": key, "stage": stage, "stages": list(stages)}
        self._failure = failure

    def about(self) -> Mapping[str, Any]:
        return {**self._inner.about(), **self._facts}

    def sample_table(self) -> SampleTable | None:
        return self._inner.sample_table()

    def note(self) -> str:
        return "\n".join(filter(None, (self._failure, self._inner.note())))

    @property
    def is_complete(self) -> bool:
        return self._inner.is_complete

    def reach(self, count: int, seconds: float) -> None:
        self._inner.reach(count, seconds)

    def known(self) -> int:
        return self._inner.known()

    def ids(self, start: int, stop: int) -> Sequence[str]:
        return self._inner.ids(start, stop)

    def matches(self, text: str, start: int, stop: int) -> list[int]:
        return self._inner.matches(text, start, stop)

    def index_of(self, sample_id: str) -> int | None:
        return self._inner.index_of(sample_id)

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        return self._inner.entries(indices)

    def items(self, index: int) -> tuple[Item, ...]:
        return self._inner.items(index)

    def picture(self, index: int) -> Picture:
        return self._inner.picture(index)

    def identity(self, index: int) -> str:
        return self._inner.identity(index)

    def end_reading(self) -> None:
        self._inner.end_reading()

    def close(self) -> None:
        self._inner.close()
