"""A partition at work: what was registered of it, handed over, and its open shards, shared by the stages of one run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from mm_assets.checks.relations import Measured
from mm_assets.errors import SourceError
from mm_assets.packing.plan import PackPlan
from mm_assets.pipeline.chain import CHAIN, PUBLISHED, RAW_SHARDS, Stage, recorded_stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import MAX_UNNAMED_SECONDS, DatasetStore, seconds_passed
from mm_assets.pipeline.state.records import Attempt, Earlier, Partition, StageRecord
from mm_assets.pipeline.state.registration import content_digest
from mm_assets.pipeline.state.staleness import Stale, reusable
from mm_assets.rows.base import RowSource, row_sources
from mm_assets.rows.schema import DatasetSchema
from mm_assets.rows.source_ref import is_allowed_reference
from mm_assets.sources.base import Source, open_container
from mm_assets.storage.files import SourceFile
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
        earlier: what earlier runs of it left; None lists that.
        scratch: a folder for copies of remote shards; without one these are read by ranges.

    Attributes:
        spec: the declaration.
        key: the partition key.
        plan: what the schema packs.
        recipe: what determines its files, as `Partition.recipe`.
        measured: what the checks of several stages share.

    Raises:
        SchemaMismatchError: the schema's pack plan is not one.
    """

    def __init__(
        self,
        dataset: DatasetStore,
        partition: Partition,
        schema: DatasetSchema,
        *,
        earlier: Earlier | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.dataset = dataset
        self._scratch = scratch
        self.spec = dataset.spec
        self.partition = partition
        self.key = partition.key
        self.schema = schema
        self.recipe = partition.recipe(PUBLISHED.digest(dataset.spec, schema))
        self._earlier = earlier
        where = dataset.store.url_of("schema.json")
        self.plan = PackPlan.from_json(schema.pack, where=where, declared=self.spec.pack)
        self.measured = Measured()
        self._opened = ExitStack()
        self._others = self._opened.enter_context(closing(_OtherFiles(self.spec)))
        self._files: dict[str, SourceFile] = {}
        self._sources: Sequence[RowSource] | None = None
        self._verified: dict[str, tuple[int, ...] | None] = {}
        self._start: tuple[Stale, dict[Stage, StageRecord]] | None = None
        self._unnamed_since = seconds_passed()

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
    def earlier(self) -> Earlier:
        """What earlier runs of it left; `SourceError` if the storage does not answer."""
        if self._earlier is None:
            self._earlier = self.dataset.earlier(self.key)
        return self._earlier

    @property
    def stale(self) -> Stale:
        """Where its run starts and why; errors as `earlier`."""
        return self._reused[0]

    @property
    def stages(self) -> dict[Stage, StageRecord]:
        """The records of the stages that were reused or have run, in the order of the chain; errors as `earlier`."""
        return self._reused[1]

    @property
    def _reused(self) -> tuple[Stale, dict[Stage, StageRecord]]:
        if self._start is None:
            size = self.dataset.store.size
            stale, stages = reusable(
                self.dataset, self.partition, self.schema, self.earlier, size=size, digests=cache(self._digests)
            )
            self._start = stale, dict(stages)
        return self._start

    def _digests(self) -> dict[str, str]:
        """Returns the digest of each shard; nothing if one cannot be read, or only by ranges, which takes long."""
        with suppress(SourceError):  # the stage that reads it raises it again
            files = self.shards(indexed=False)
            if all(file.is_local for file in files):
                return {file.url: content_digest(file) for file in files}
        return {}

    def use_recorded(self) -> None:
        """Takes the stages as they are recorded, whatever their files are now: they are to be checked again.

        Raises:
            SourceError: the storage does not answer.
            SchemaMismatchError: the record is damaged.
        """
        record = self.dataset.record(self.key, self.recipe)
        attempt = self.dataset.attempt(self.key) if record is None else None
        stages = {} if attempt is None else attempt.stages
        self._start = self.stale, dict(stages if record is None else record.stages)

    def restart(self, first: Stage) -> None:
        """Leaves out the stages that are not before `first`: they run again."""
        before = CHAIN[: CHAIN.index(first)]
        self._start = self.stale, {stage: record for stage, record in self.stages.items() if stage in before}

    def record(self, stage: Stage) -> StageRecord:
        """The record of a stage; `SourceError` if it has not run with the present shards and settings."""
        if stage not in self.stages:
            detail = f"{stage.name} of partition {self.key!r} has not been made ({self.stale.reason}): run it first"
            raise SourceError(self.dataset.store.url_of(self.dataset.attempt_name(self.key)), detail)
        return self.stages[stage]

    def add_record(self, stage: Stage, record: StageRecord) -> None:
        """Takes the record of a stage that has run; its last act."""
        stages = {**self.stages, stage: record}
        ordered = {one: stages[one] for one in recorded_stages(self.spec) if one in stages}
        self._start = self.stale, ordered
        if self.dataset.store.durable is self.dataset.store:
            self.write_attempt()

    def keep_files(self) -> None:
        """Prepares for the files of its stages to be named: makes those young that were written long ago.

        `clean` deletes files that nothing names when they are a day old. A run that takes longer, or whose host was
        suspended, would name files that may be deleted at that moment.

        Raises:
            SourceError: one was deleted already.
        """
        now = seconds_passed()
        if now - self._unnamed_since > MAX_UNNAMED_SECONDS:
            files = (file.path for record in self.stages.values() for file in record.files.values())
            self.dataset.store.refresh(files)
        self._unnamed_since = now

    def write_attempt(self) -> None:
        """Stores what has been done, for the next run; `SourceError` if it cannot be written."""
        self.keep_files()
        self.dataset.write_attempt(Attempt(partition=self.key, stages=self.stages))
        self._earlier = replace(self.earlier, has_attempt=True)

    def verified(self, path: str) -> None:
        """Notes that a file of the dataset has just been written or read with the digest that its record has."""
        self._verified[path] = self.dataset.store.state(path)

    def is_verified(self, path: str) -> bool:
        """Whether a local file is as it was when its digest was verified."""
        state = self._verified.get(path)
        return state is not None and state == self.dataset.store.state(path)

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
