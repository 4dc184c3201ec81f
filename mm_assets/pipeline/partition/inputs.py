"""A partition at work: what was registered of it, handed over, and its open shards, shared by the stages of one run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from mm_assets.checks.relations import Measured
from mm_assets.errors import SchemaMismatchError, SourceError
from mm_assets.packing.plan import PackPlan
from mm_assets.pipeline.chain import PUBLISHED, RAW_SHARDS, Stage, recorded_stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Partition, StageRecord
from mm_assets.rows.base import RowSource, row_sources
from mm_assets.rows.schema import DatasetSchema
from mm_assets.rows.source_ref import is_allowed_reference
from mm_assets.sources.base import Source, open_container
from mm_assets.storage.files import SourceFile
from mm_assets.storage.store import PublishedFile
from mm_assets.storage.urls import is_local, redirects_only_to

__all__ = ["PartitionWork"]

MAX_OPEN = 64  # descriptors of files that a list names; a process may be limited to 256
MAX_REMOTE = 1024  # files of an object store: each costs a request when it is opened, and memory while it is cached


class _OtherFiles:
    """Files beside the shards that locators name; of the local ones the last few stay open.

    The declaration's `storage_options` are used for files of the shards' own file system, and for no other; the
    signature of presigned shards for none.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._options = {name: value for name, value in spec.storage_options.items() if name != "signature"}
        self._scheme = _scheme(spec.shards)
        self._local: OrderedDict[str, SourceFile] = OrderedDict()
        self._remote: OrderedDict[str, SourceFile] = OrderedDict()  # filled from several threads

    def open(self, url: str, is_allowed: Callable[[str], bool]) -> SourceFile:
        """The file, opened again if it was closed meanwhile.

        Args:
            url: of the file.
            is_allowed: whether the server of the file may redirect to a URL.

        Raises:
            SourceError: the file is not there or may not be read.
        """
        cached, most = (self._local, MAX_OPEN) if is_local(url) else (self._remote, MAX_REMOTE)
        found = cached.get(url)
        if found is None:
            options = self._options if _scheme(url) == self._scheme else None
            found = cached[url] = SourceFile(url, redirects_only_to(is_allowed, url, options))
            if len(cached) > most:
                _, oldest = cached.popitem(last=False)
                if cached is self._local:  # a remote one may be in use by another thread
                    oldest.close()
        return found

    def close(self) -> None:
        """Closes every file."""
        for source in (*self._local.values(), *self._remote.values()):
            source.close()


def _scheme(url: str) -> str:
    return "file" if is_local(url) else url.split("://", 1)[0]


class PartitionWork:
    """One partition for its stages, which read nothing of the registration.

    Args:
        dataset: the dataset's folder.
        partition: as registered.
        schema: the dataset's.
        markers: names of the partition's markers, as `DatasetStore.marker_names` gives them; None lists them.
        scratch: a folder for copies of remote shards; without one these are read by ranges.

    Attributes:
        spec: the declaration.
        key: the partition key.
        plan: what the schema packs.
        marker_name: name of the marker that its present shards, settings and schema give.
        measured: what the checks of several stages share.
        record_file: the file of `records`, once these were read or written; None where there is none.
        has_replaced: whether a table has replaced another.

    Raises:
        SchemaMismatchError: the schema's pack plan is not one.
    """

    def __init__(
        self,
        dataset: DatasetStore,
        partition: Partition,
        schema: DatasetSchema,
        *,
        markers: Sequence[str] | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.dataset = dataset
        self._scratch = scratch
        self.spec = dataset.spec
        self.partition = partition
        self.key = partition.key
        self.schema = schema
        fingerprint = partition.fingerprint(PUBLISHED.digest(dataset.spec, schema))
        self.marker_name = dataset.marker_name(partition.key, fingerprint)
        self._markers = markers
        where = dataset.store.url_of("schema.json")
        self.plan = PackPlan.from_json(schema.pack, where=where, declared=self.spec.pack)
        self.measured = Measured()
        self._opened = ExitStack()
        self._others = self._opened.enter_context(closing(_OtherFiles(self.spec)))
        self._files: dict[str, SourceFile] = {}
        self._sources: Sequence[RowSource] | None = None
        self._verified: dict[str, tuple[int, ...] | None] = {}
        self._has_failure = True  # possibly, of an earlier run
        self._records: Mapping[Stage, StageRecord] | None = None
        self.record_file: PublishedFile | None = None
        self.has_replaced = False

    @classmethod
    def registered(cls, dataset: DatasetStore, key: str) -> PartitionWork:
        """A partition as the dataset's registration has it now; `SourceError` if it is not registered."""
        return cls(dataset, dataset.partition(key), dataset.schema())

    def __enter__(self) -> PartitionWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def shards(self, *, indexed: bool) -> Sequence[SourceFile]:
        """The shards, open, in the partition's order; remote ones are copied to the scratch folder, if there is one.

        Args:
            indexed: they have to be as they were when they were indexed; else as they were registered.

        Raises:
            SourceError: a shard is gone, or has changed, also since an earlier stage opened it.
        """
        expected = self.record(RAW_SHARDS).inputs if indexed else None
        if not self._files:
            for file in self.dataset.open_shards(self.partition, fingerprints=expected):
                self._files[file.url] = self._opened.enter_context(file)
        else:
            found = [file if file.is_fetched else file.now() for file in self._files.values()]
            self.dataset.check_shards(self.partition, found, fingerprints=expected)
        if self._scratch is not None:
            for file in self._files.values():
                file.fetch(self._scratch)
        return list(self._files.values())

    @property
    def records(self) -> Mapping[Stage, StageRecord]:
        """The records of the stages that have run, in the order of the chain; read once.

        Raises:
            SourceError: the file of records cannot be read.
            SchemaMismatchError: it is damaged, or of another version.
        """
        if self._records is None:
            self._records, self.record_file = self.dataset.recorded(self.key)
        return self._records

    def record(self, stage: Stage) -> StageRecord:
        """The record of a stage; `SourceError` if it has not run."""
        if stage not in self.records:
            detail = f"{stage.name} of partition {self.key!r} has not been made: materialize it first"
            raise SourceError(self.dataset.store.url_of(self.dataset.records_name(self.key)), detail)
        return self.records[stage]

    def write_record(self, stage: Stage, record: StageRecord) -> None:
        """Stores what a stage did; its last act. The first stage of the chain replaces a damaged file of records."""
        try:
            records = {**self.records, stage: record}
        except SchemaMismatchError:
            if stage.upstream:
                raise
            records = {stage: record}
        else:
            if self.records.get(stage, record).to_json() != record.to_json():
                self.withdraw_markers()
        self._records = {stage: records[stage] for stage in recorded_stages(self.spec) if stage in records}
        self.record_file = self.dataset.write_records(self.key, self._records)

    def replace_table(self, stage: Stage, name: str, sha256: str) -> None:
        """Prepares for a table to be replaced by one with this digest.

        Where the stage recorded another, its record is removed before: a run that ends here leaves no record of a table
        that is gone.
        """
        try:
            recorded = self.records.get(stage)
        except SchemaMismatchError:  # without readable records the partition starts again
            recorded = None
        if recorded is not None and (name not in recorded.files or recorded.files[name].sha256 != sha256):
            self.withdraw_markers()
            self._records = {other: record for other, record in self.records.items() if other is not stage}
            self.record_file = self.dataset.write_records(self.key, self._records)
            self.has_replaced = True

    def withdraw_markers(self) -> None:
        """Makes the partition pending until it is published again, also if the settings of its markers are restored."""
        with self.dataset.markers_held(self.key):
            self._markers = self.dataset.withdraw_markers(self.marker_names())

    def marker_names(self) -> Sequence[str]:
        """Names of its markers, of other settings and withdrawn ones too, as they were listed at first."""
        return self.dataset.marker_names().get(self.key, ()) if self._markers is None else self._markers

    def verified(self, path: str) -> None:
        """Notes that a file of the dataset has just been written or read with the digest that its record has."""
        self._verified[path] = self.dataset.store.state(path)

    def is_verified(self, path: str) -> bool:
        """Whether a local file is as it was when its digest was verified."""
        state = self._verified.get(path)
        return state is not None and state == self.dataset.store.state(path)

    def clear_failure(self) -> None:
        """Removes what is stored of an earlier run's failure, when the first stage of this one has ended."""
        if self._has_failure:
            self.dataset.clear_failure(self.key)
            self._has_failure = False

    @property
    def row_sources(self) -> Sequence[RowSource]:
        """What makes rows of the open shards; none where no stage has opened them."""
        if self._sources is None and self._files:
            spec = self.spec
            self._sources = row_sources(list(self._files.values()), spec.source, shards=spec.shards, where=spec.where)
        return self._sources or ()

    @property
    def containers(self) -> list[Source]:
        """The open shards whose members are indexed."""
        return [container for source in self.row_sources for container in source.sources]

    @property
    def is_allowed(self) -> Callable[[str], bool]:
        """Whether a locator may name a URL or path: a shard has folders of its own only as a list of files."""
        folders = (folder for source in self.row_sources for folder in source.folders)
        return partial(is_allowed_reference, prefixes=(*self.spec.samples.prefixes, *folders))

    def open_file(self, url: str) -> SourceFile:
        """A shard, or a file beside the shards that a locator names.

        Raises:
            SourceError: the file is not there or may not be read.
        """
        return self._files.get(url) or self._others.open(url, self.is_allowed)

    def open_container(self, file: SourceFile) -> Source:
        """A file of `open_file` as the container of the requested members; `ShardError` for an unknown format."""
        return next((c for c in self.containers if c.file is file), None) or open_container(file)
