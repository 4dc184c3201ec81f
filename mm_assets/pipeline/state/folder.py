"""A dataset's folder: the files of each partition, the decisions of registration, and the records of stages.

Every stage writes its tables first and its `StageRecord` last. A record names the files it made and the files it read
by digest, with the outcomes of its checks, so that the records of a partition form a chain that shows at any time, also
in another run, whether the files belong together. They are in one file per partition.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from dataclasses import asdict
from typing import Any

from mm_assets.errors import ConfigError, MmAssetsError, SchemaMismatchError, SourceError
from mm_assets.pipeline.chain import PUBLISHED, RAW_SHARDS, Stage, recorded_stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.records import Partition, Registered, StageFailure, StageRecord, canonical_json
from mm_assets.rows.schema import DatasetSchema
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile
from mm_assets.storage.store import ListedFile, PublishedFile, Snapshot, Store
from mm_assets.storage.urls import local_path, reason

__all__ = ["RECORDS", "WITHDRAWN", "DatasetStore"]

RECORDS_VERSION = 1  # of the file with the records of a partition
RECORDS = "records"  # the folder of these files
_MAX_KEYS_IN_MESSAGE = 5
_READS = 8  # of small files at a time
WITHDRAWN = ".withdrawn.json"  # the end of the name of a marker that counts no more
_MARKER = re.compile(rf"(?P<key>.+?)(\.[0-9a-f]{{16}})?({re.escape(WITHDRAWN)}|\.json)")
_OF_REGISTRATION = {  # what registration does where the file is gone
    "shards.json": "lists the shards again",
    "schema.json": "decides the schema again",
}

# Raised where a root is not a folder, may not be written to, or is in a bucket that does not exist.
_OF_THE_ROOT = (NotADirectoryError, FileExistsError, PermissionError, FileNotFoundError)


class DatasetStore:
    """The dataset's folder below the storage root."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec
        self._registered: dict[str, tuple[ListedFile, Any]] = {}  # files of the registration as read, by name
        try:
            self.store = Store(spec.root, spec.root_options).child(spec.name)
        except (MmAssetsError, ValueError, TypeError) as error:
            raise ConfigError(spec.where, "root", f"{spec.root!r} cannot be used: {error}") from error
        if self.store.is_local and local_path(spec.root).is_file():
            raise ConfigError(
                spec.where, "root", f"{spec.root!r} is a file, expected a folder or the name of a new one"
            )
        if spec.root_options:
            try:
                self.store.connect()
            except SourceError as error:
                raise ConfigError(spec.where, "root_options", f"are wrong for {spec.root!r}: {error}") from error

    # -- names

    @staticmethod
    def table(table: str, partition: str) -> str:
        """Name of a partition's file of one table."""
        return f"{table}/{partition}.parquet"

    @staticmethod
    def records_name(partition: str) -> str:
        """Name of the file with the records of a partition."""
        return f"{RECORDS}/{partition}.json"

    @staticmethod
    def failure_name(partition: str) -> str:
        """Name of the file with the failure of a partition's last run."""
        return f"failures/{partition}.json"

    @staticmethod
    def marker_name(partition: str, fingerprint: str) -> str:
        """Name of a partition's publication marker; `fingerprint` is `Partition.fingerprint`."""
        return f"{PUBLISHED.name}/{partition}.{fingerprint}.json"

    def marker_names(self, listed: Iterable[str] | None = None) -> dict[str, tuple[str, ...]]:
        """The markers of each partition key, withdrawn ones too, by one listing; old ones have no fingerprint.

        A partition has several where a run was killed between writing one and removing the others. That with the
        present fingerprint counts.

        Args:
            listed: names of files in their folder; None lists it.
        """
        found: dict[str, tuple[str, ...]] = {}
        for name in self.store.sizes(PUBLISHED.name) if listed is None else listed:
            if match := _MARKER.fullmatch(name.rsplit("/", 1)[-1]):
                found[match["key"]] = (*found.get(match["key"], ()), name)
        return found

    @staticmethod
    def withdrawn_name(name: str) -> str:
        """The name that a marker has once it is withdrawn; that of a withdrawn one is as it is."""
        return name if name.endswith(WITHDRAWN) else name.removesuffix(".json") + WITHDRAWN

    def markers_held(self, partition: str) -> AbstractContextManager[bool]:
        """Keeps other processes from changing the markers of a partition; `Store.exclusive` says where."""
        return self.store.exclusive(f"{PUBLISHED.name}/{partition}.markers")

    def withdraw_markers(self, names: Iterable[str]) -> list[str]:
        """Renames markers of a partition, so that it is pending whatever shards and settings are restored.

        Its next publication carries over the added streams that they list. Markers that are gone are passed over. To be
        called in `markers_held`.

        Returns:
            The names that they have then, also of those that are gone: another process may have withdrawn them.

        Raises:
            ChangedError: another process did so meanwhile.
            SourceError: the storage could not be read or written.
        """
        found = []
        for name in names:
            withdrawn = self.withdrawn_name(name)
            found.append(withdrawn)
            if name != withdrawn and (content := self.store.found_bytes(name)) is not None:
                self.store.replace(self.store.snapshot(withdrawn), content)
                self.store.delete(name)
        return found

    def listings(self, *folders: str) -> list[dict[str, ListedFile]]:
        """`Store.listing` of several folders, remote ones at the same time; errors likewise."""
        if self.store.is_local:  # which waits for nothing
            return list(map(self.store.listing, folders))
        with ThreadPoolExecutor(len(folders), thread_name_prefix="listings") as pool:
            return list(pool.map(self.store.listing, folders))

    # -- JSON files

    def _found(self, name: str) -> Any:
        """The content of a JSON file, or None where there is none."""
        content = self.store.found_bytes(name)
        return None if content is None else self._parsed(name, content)

    def _parsed(self, name: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except ValueError as error:
            advice = self._advice_on(name)
            raise SourceError(self.store.url_of(name), f"is not JSON: {error}{advice}") from error

    def _advice_on(self, name: str) -> str:
        """What to do about a damaged file of the registration, or a marker, as the end of a message; else empty."""
        if name.startswith(f"{PUBLISHED.name}/"):
            return f"; run `mm-assets run --dataset {self.spec.name}`, which writes it again or removes it"
        if name not in _OF_REGISTRATION:
            return ""
        return f"; delete it and run `mm-assets register --dataset {self.spec.name}`, which {_OF_REGISTRATION[name]}"

    def registered(self, listed: Mapping[str, ListedFile] | None = None) -> Registered:
        """What registration stored; its files are read again only where a listing shows other versions of them.

        There may be very many partitions, and a load asks for them at each of its steps.

        Args:
            listed: the files in the dataset's folder; None lists them.

        Raises:
            SourceError: a file cannot be read.
            SchemaMismatchError: the list of partitions is damaged.
        """
        if listed is None:
            listed = self.store.listing("")  # before the content: a version in between is read again
        source, partitions = self._read_if_new("shards.json", listed, self._listed_partitions) or (None, {})
        return Registered(
            partitions=dict(partitions),
            source=source,
            stored_schema=self._read_if_new("schema.json", listed, lambda found: found) or {},
        )

    def _read_if_new(self, name: str, listed: Mapping[str, ListedFile], parse: Callable[[Any], Any]) -> Any:
        """A file of the registration, parsed; None where there is none."""
        version = listed.get(name)
        if version is None:
            return None
        known = self._registered.get(name)
        if known is None or known[0] != version:
            found = self._found(name)
            known = self._registered[name] = version, None if found is None else parse(found)
        return known[1]

    def schema(self, registered: Registered | None = None) -> DatasetSchema:
        """The dataset's schema as registered; `registered` is what `registered` returned, if that is known.

        Raises:
            SourceError: the dataset has not been registered.
        """
        if registered is None:  # without the list of partitions, which may be long
            found = self._read_if_new("schema.json", self.store.listing(""), lambda found: found) or {}
        else:
            found = registered.stored_schema
        where = self.store.url_of("schema.json")
        if not found:
            detail = f"the dataset is not registered yet: run `mm-assets register --dataset {self.spec.name}`"
            raise SourceError(where, detail)
        return DatasetSchema.from_json(found, where=where)

    def write_schema(self, schema: DatasetSchema, *, decided_by: str | None) -> None:
        """Stores the schema with the settings, the first shard and the evidence that it was decided with."""
        decided = {"declared": self.spec.declared, "decided_by": decided_by, "evidence": dict(schema.evidence)}
        self._register("schema.json", canonical_json({**schema.to_json(), **decided}, indent=1))

    def partitions(self) -> dict[str, Partition]:
        """Every registered partition by key; empty before the first registration."""
        return self.registered().partitions

    def _listed_partitions(self, found: Any) -> tuple[str | None, dict[str, Partition]]:
        """The source and the partitions that ``shards.json`` lists."""
        try:
            source = found.get("shards")
            return source if isinstance(source, str) else None, {
                key: Partition(key=key, shards=tuple(ShardFile(**shard) for shard in shards))
                for key, shards in found["partitions"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            where = self.store.url_of("shards.json")
            advice = self._advice_on("shards.json")
            raise SchemaMismatchError(f"{where}: is not a list of partitions: {error!r}{advice}") from error

    def write_partitions(self, partitions: Iterable[Partition]) -> None:
        """Replaces the list of registered partitions."""
        # A line for each partition: there may be very many, and Python indents slowly.
        by_key = sorted(partitions, key=lambda p: p.key)
        lines = ",\n".join(_line({p.key: [_listed(shard) for shard in p.shards]})[1:-1] for p in by_key)
        shards = f'{{"partitions": {{\n{lines}\n}},\n"shards": {_line(self.spec.shards)}, "version": 1}}\n'
        self._register("shards.json", shards.encode())

    def _register(self, name: str, content: bytes) -> None:
        """Writes a file of the registration: the first that are written, so an unusable root is found here."""
        try:
            self.store.write_bytes(name, content)
        except (OSError, SourceError) as error:
            cause = error.__cause__ if isinstance(error, SourceError) else error
            if not isinstance(cause, _OF_THE_ROOT):  # another process is writing, or the transfer failed
                raise
            advice = "name a folder, or a bucket that there is, to which you may write"
            raise ConfigError(
                self.spec.where, "root", f"{self.spec.root!r} cannot be written: {reason(cause)}; {advice}"
            ) from error

    def partition(self, key: str) -> Partition:
        """One registered partition; `SourceError` if there is none of that key."""
        known = self.partitions()
        if key not in known:
            detail = (
                f"partition {key!r} is not registered (found {_some(known)}): run `mm-assets register --dataset "
                f"{self.spec.name}` with the same DAGSTER_HOME, MM_ASSETS_ROOT and folder"
            )
            raise SourceError(self.store.url_of("shards.json"), detail)
        return known[key]

    def recorded(self, partition: str) -> tuple[dict[Stage, StageRecord], PublishedFile | None]:
        """The records of the dataset's stages that have run on a partition, in their order, and the file they are in.

        Raises:
            SourceError: the file cannot be read.
            SchemaMismatchError: it is damaged, or of another version.
        """
        name = self.records_name(partition)
        content, where = self.store.found_bytes(name), self.store.url_of(name)
        if content is None:
            return {}, None
        try:
            value = json.loads(content)
        except ValueError:
            value = None
        if not isinstance(value, dict) or value.get("version") != RECORDS_VERSION or "stages" not in value:
            raise SchemaMismatchError(
                f"{where}: not the records of a partition in version {RECORDS_VERSION}: run `mm-assets run "
                f"--dataset {self.spec.name} --partition {partition}`"
            )
        found = {
            stage: StageRecord.from_json(made, stage=stage.name, partition=partition, where=where)
            for stage in recorded_stages(self.spec)
            if (made := value["stages"].get(stage.name)) is not None
        }
        return found, PublishedFile(path=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())

    def records(self, partition: str) -> dict[Stage, StageRecord]:
        """The records of `recorded` alone; errors likewise."""
        return self.recorded(partition)[0]

    def write_records(self, partition: str, records: Mapping[Stage, StageRecord]) -> PublishedFile:
        """Stores what stages did to a partition, after they have done it; names are synced when it is published."""
        stages = {stage.name: record.to_json() for stage, record in records.items()}
        value = {"version": RECORDS_VERSION, "partition": partition, "stages": stages}
        return self.store.write_bytes(self.records_name(partition), canonical_json(value, indent=1), durable=False)

    def write_failure(self, failure: StageFailure) -> None:
        """Stores why the last run of a partition ended early."""
        self.store.write_bytes(self.failure_name(failure.partition), canonical_json(asdict(failure), indent=1))

    def clear_failure(self, partition: str) -> None:
        """Removes what `write_failure` stored of an earlier run."""
        self.store.delete(self.failure_name(partition))

    def failure(self, partition: str) -> StageFailure | None:
        """Why the last run of a partition ended early, or None."""
        name = self.failure_name(partition)
        found = self._found(name)
        try:
            return None if found is None else StageFailure(**found)
        except TypeError as error:
            raise SchemaMismatchError(f"{self.store.url_of(name)}: not a stage's failure: {error!r}") from error

    def duckdb(self) -> Any:
        """A new DuckDB connection that reads the dataset's tables, by the paths of `duckdb_path`."""
        import duckdb

        connection = duckdb.connect()
        if self.duckdb_filesystem is not None:
            connection.register_filesystem(self.duckdb_filesystem)
        return connection

    @property
    def duckdb_filesystem(self) -> Any:
        """The file system through which DuckDB reads the dataset's files; None if it reads them itself.

        It lists no local folder with a backslash in its path, which it takes for a separator.
        """
        return None if self.store.is_local and "\\" not in self.store.path_of("") else self.store.fs

    def duckdb_path(self, name: str) -> str:
        """What DuckDB calls a file of the dataset, or its folder where `name` is empty; see `literal_path`."""
        if not self.store.is_local:
            return self.store.url_of(name)
        path = str(self.store.local_path(name) if name else self.store.path_of(name))
        return path if self.duckdb_filesystem is None else f"file://{path}"

    def over(self, store: Store) -> DatasetStore:
        """The dataset with another store for its folder."""
        found = copy(self)
        found.store, found._registered = store, {}
        return found

    def markers(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Publication markers by their names, read several at a time.

        Raises:
            SourceError: one cannot be read.
            SchemaMismatchError: one is damaged.
        """
        with ThreadPoolExecutor(_READS, thread_name_prefix="markers") as pool:
            return list(pool.map(lambda name: self.marker(name, self.store.read_bytes(name)), names))

    def marker(self, name: str, content: bytes) -> dict[str, Any]:
        """The marker that a file of that name and content is; errors as `markers`."""
        value = self._parsed(name, content)
        if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
            raise SchemaMismatchError(f"{self.store.url_of(name)}: not a publication marker{self._advice_on(name)}")
        return value

    def marker_in(self, snapshot: Snapshot) -> dict[str, Any] | None:
        """The marker that a snapshot of its file has, or None where there was none; errors as `markers`."""
        return None if snapshot.content is None else self.marker(snapshot.name, snapshot.content)

    # -- shards

    def open_shards(self, partition: Partition, *, fingerprints: Mapping[str, str] | None = None) -> list[SourceFile]:
        """Opens a partition's shards.

        Args:
            partition: the partition.
            fingerprints: by URL, as they were when the member index was made; None takes those of the registration.

        Raises:
            SourceError: a shard is gone, or it is not the one that was registered or indexed.
        """
        opened: list[SourceFile] = []
        with ExitStack() as closed_on_error:
            for shard in partition.shards:
                opened.append(closed_on_error.enter_context(SourceFile(shard.url, self.spec.storage_options)))
            self.check_shards(partition, opened, fingerprints=fingerprints)
            closed_on_error.pop_all()
        return opened

    def check_shards(
        self,
        partition: Partition,
        found: Iterable[ShardFile | SourceFile],
        *,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        """Compares shards as they were `found`, in the partition's order; arguments and errors as `open_shards`."""
        for shard, file in zip(partition.shards, found, strict=True):
            expected = shard.fingerprint if fingerprints is None else fingerprints.get(file.url)
            fingerprint = shard.fingerprint if shard.is_of(file.fingerprint) else file.fingerprint
            if fingerprint != expected:
                if fingerprints is None:
                    # Only settled shards are registered; the file that is there now may be half of an upload.
                    since, then = "registered", f"run `mm-assets register --dataset {self.spec.name}`"
                else:
                    since, then = "indexed", f"materialize {RAW_SHARDS.name} again"
                detail = f"changed since it was {since} (found {fingerprint}, expected {expected}): {then}"
                raise SourceError(shard.url, detail)


_line = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


def _listed(shard: ShardFile) -> dict[str, Any]:
    made = {"fingerprint": shard.fingerprint, "modified": shard.modified, "size": shard.size, "url": shard.url}
    return made if shard.times is None else {**made, "times": shard.times}


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed if len(listed) <= _MAX_KEYS_IN_MESSAGE else [*listed[:_MAX_KEYS_IN_MESSAGE], "…"]) or "none"
