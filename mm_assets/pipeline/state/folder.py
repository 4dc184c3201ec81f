"""A dataset's folder: the decisions of registration, and the records of partitions.

A file with its final name is never replaced, only deleted by `clean`. Data files are named by their content. A record,
``records/<key>.<recipe>.json``, publishes a partition: it is created once, after all files that it names are durable
and every check has passed. Of what is written again, the files of the registration and ``manifest.json`` are compared
and swapped; attempts and claims are advisory, and what is in ``cache/`` only saves time. ``docs/spec/files.md`` has all
of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from copy import copy
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from mm_assets.errors import ChangedError, ConfigError, MmAssetsError, SchemaMismatchError, SourceError
from mm_assets.pipeline.chain import RAW_SHARDS, Stage
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.records import (
    RECIPE_DIGITS,
    Attempt,
    Earlier,
    Partition,
    Record,
    Registered,
    StageFailure,
    StageRecord,
    Version,
    canonical_json,
)
from mm_assets.rows.schema import DatasetSchema
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile, description_of
from mm_assets.storage.store import ListedFile, Snapshot, Store
from mm_assets.storage.urls import local_path, reason

__all__ = [
    "ATTEMPTS",
    "MAX_UNNAMED_SECONDS",
    "MIN_AGE_SECONDS",
    "NOTE",
    "RECORDS",
    "CleanNote",
    "DatasetStore",
    "seconds_passed",
    "until_unchanged",
]

T = TypeVar("T")

MAX_UNNAMED_SECONDS = 43_200.0
"""How old files may be that a record or a manifest names first: `clean` deletes what nothing names after a day."""

MIN_AGE_SECONDS = 86_400.0
"""How old files are that `clean` deletes."""

NOTE = "clean.json"
LAYOUT = 2  # of the dataset's folder, in ``shards.json``
RECORDS, ATTEMPTS = "records", "attempts"  # folders
_MAX_KEYS_IN_MESSAGE = 5
_READS = 16  # of records at a time: each waits for the storage most of its time
_MAX_RECORDS_IN_MEMORY = 256  # as they were read: several kB each
_RECORD = re.compile(rf"{RECORDS}/(?P<key>.+)\.(?P<recipe>[0-9a-f]{{{RECIPE_DIGITS}}})\.json")
_KEY = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._%-]+")  # as `registration.partition_key` makes them
_OF_REGISTRATION = {  # what registration does where the file is gone
    "shards.json": "lists the shards again",
    "schema.json": "decides the schema again",
}

_Loss: TypeAlias = tuple[float | None, list[str] | None]
"""When partitions lost a record, attempt or manifest, None for the time of the note, and their keys, None for all."""

# Raised where a root is not a folder, may not be written to, or is in a bucket that does not exist.
_OF_THE_ROOT = (NotADirectoryError, FileExistsError, PermissionError, FileNotFoundError)


def seconds_passed() -> float:
    """Returns seconds that pass, also while the host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def until_unchanged(make: Callable[[], T], *, attempts: int = 5) -> T:
    """Returns what a function returns that replaces a file, calling it again while other processes are faster.

    Raises:
        ChangedError: they were each time.
    """
    for _ in range(attempts - 1):
        with suppress(ChangedError):
            return make()
    return make()


class DatasetStore:
    """The dataset's folder below the storage root."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec
        # Files of the registration as read or, in an S3 store, written, by name, and which version of each that is.
        self._registered: dict[str, tuple[Version, Any]] = {}
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
    def record_name(partition: str, recipe: str) -> str:
        """Name of the record of a partition that was made by a recipe."""
        return f"{RECORDS}/{partition}.{recipe}.json"

    @staticmethod
    def attempt_name(partition: str) -> str:
        """Name of the file of a partition's latest attempt."""
        return f"{ATTEMPTS}/{partition}.json"

    @staticmethod
    def recipes(listed: Iterable[str]) -> dict[str, list[str]]:
        """Returns the recipes by which partitions were published, by key, from names in the folder of records."""
        found: dict[str, list[str]] = {}
        for name in listed:
            if match := _RECORD.fullmatch(name):
                found.setdefault(match["key"], []).append(match["recipe"])
        return found

    def listings(self, *folders: str) -> list[dict[str, ListedFile]]:
        """`Store.listing` of several folders, remote ones at the same time; errors likewise."""
        if self.store.is_local:  # which waits for nothing
            return list(map(self.store.listing, folders))
        with ThreadPoolExecutor(len(folders), thread_name_prefix="listings") as pool:
            return list(pool.map(self.store.listing, folders))

    # -- JSON files

    def _parsed(self, name: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            advice = self._advice_on(name)
            raise SourceError(self.store.url_of(name), f"is not JSON: {error}{advice}") from error

    def _advice_on(self, name: str) -> str:
        """What to do about a damaged file of the registration, as the end of a message; else empty."""
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
            versions={name: self._registered[name][0] for name in _OF_REGISTRATION if name in listed},
        )

    def _read_if_new(self, name: str, listed: Mapping[str, ListedFile], parse: Callable[[Any], Any]) -> Any:
        """A file of the registration, parsed; None where there is none."""
        version = listed.get(name)
        if version is None:
            return None
        known = self._registered.get(name)
        if known is None or known[0].tag != _tag(version):
            content = self.store.found_bytes(name)
            value = None if content is None else parse(self._parsed(name, content))
            known = self._registered[name] = Version(_tag(version), _digest(content)), value
        return known[1]

    def schema(self, registered: Registered | None = None, *, is_fresh: bool = False) -> DatasetSchema:
        """The dataset's schema as registered.

        Args:
            registered: what `registered` returned, if that is known.
            is_fresh: whether this object has just registered the dataset: what it read or wrote then is not read again.

        Raises:
            SourceError: the dataset has not been registered.
        """
        name = "schema.json"
        if registered is not None:
            found = registered.stored_schema
        elif is_fresh and name in self._registered:
            found = self._registered[name][1]
        else:  # without the list of partitions, which may be long
            found = self._read_if_new(name, self.store.listing(""), lambda found: found)
        where = self.store.url_of(name)
        if not found:
            detail = f"the dataset is not registered yet: run `mm-assets register --dataset {self.spec.name}`"
            raise SourceError(where, detail)
        return DatasetSchema.from_json(found, where=where)

    def write_schema(self, schema: DatasetSchema, before: Registered, *, decided_by: str | None) -> None:
        """Stores the schema with the settings, the first shard and the evidence that it was decided with.

        Raises:
            ChangedError: another process decided it since `before` was read.
        """
        decided = {"declared": self.spec.declared, "decided_by": decided_by, "evidence": dict(schema.evidence)}
        content = canonical_json({**schema.to_json(), **decided}, indent=1)
        self._register("schema.json", content, json.loads(content), before)

    def partitions(self) -> dict[str, Partition]:
        """Every registered partition by key; empty before the first registration."""
        return self.registered().partitions

    def _listed_partitions(self, found: Any) -> tuple[str | None, dict[str, Partition]]:
        """The source and the partitions that ``shards.json`` lists."""
        if isinstance(found, dict) and found.get("layout", 1) != LAYOUT:
            raise ConfigError(
                self.store.url_of("shards.json"),
                "layout",
                f"found {found.get('layout', 1)!r}, expected {LAYOUT}: this folder is of another release of mm-assets; "
                f"read it with that release, or give the dataset a new `name` or `root`, which packs it again",
            )
        try:
            source = found.get("shards")
            partitions = {
                key: Partition(key=key, shards=tuple(ShardFile(**shard) for shard in shards))
                for key, shards in found["partitions"].items()
            }
            for key, partition in partitions.items():
                if _KEY.fullmatch(key) is None or not all(map(_is_shard, partition.shards)):
                    raise ValueError(f"partition {key!r:.80}")
            return source if isinstance(source, str) else None, partitions
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            where = self.store.url_of("shards.json")
            advice = self._advice_on("shards.json")
            raise SchemaMismatchError(f"{where}: is not a list of partitions: {error!r}{advice}") from error

    def write_partitions(self, partitions: Iterable[Partition], before: Registered) -> None:
        """Replaces the list of registered partitions.

        Raises:
            ChangedError: another process replaced it since `before` was read.
        """
        # A line for each partition: there may be very many, and Python indents slowly.
        by_key = sorted(partitions, key=lambda p: p.key)
        lines = ",\n".join(_line({p.key: [_listed(shard) for shard in p.shards]})[1:-1] for p in by_key)
        # With the digest of the file before, two versions never have the same content: `before` is compared by it.
        version = before.versions.get("shards.json")
        digest = None if version is None else version.digest
        rest = _line({"shards": self.spec.shards, "layout": LAYOUT, "before": digest})
        shards = f'{{"partitions": {{\n{lines}\n}},\n{rest[1:]}\n'
        self._register("shards.json", shards.encode(), (self.spec.shards, {p.key: p for p in by_key}), before)

    def _register(self, name: str, content: bytes, value: Any, before: Registered) -> None:
        """Replaces a file of the registration: the first that are written, so an unusable root is found here."""
        version = before.versions.get(name)
        self._registered.pop(name, None)
        try:
            if version is None:
                found = Snapshot(name=name, content=None)
            else:
                found = self.store.snapshot(name)
                if found.content != content and _digest(found.content) != version.digest:
                    detail = "another process registered the dataset meanwhile: run this again"
                    raise ChangedError(self.store.url_of(name), detail)
            etag = self.store.replace(found, content)
            if etag is not None:
                self._registered[name] = Version(etag, _digest(content)), value
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

    # -- records and attempts

    def earlier(self, partition: str) -> Earlier:
        """Lists what earlier runs of one partition left; `SourceError` if the storage does not answer."""
        listed = self.store.listing(RECORDS, prefix=f"{partition}.")
        newest_first = sorted(listed, key=lambda name: listed[name].modified or 0.0, reverse=True)
        recipes = self.recipes(newest_first).get(partition, ())
        return Earlier(recipes=tuple(recipes), has_attempt=self.store.exists(self.attempt_name(partition)))

    def record(self, partition: str, recipe: str) -> Record | None:
        """Reads the record of a partition; None if there is none.

        Raises:
            SourceError: the storage does not answer.
            SchemaMismatchError: it is damaged.
        """
        name = self.record_name(partition, recipe)
        content, where = self.store.found_bytes(name), self.store.url_of(name)
        if content is None:
            return None
        record = Record.from_bytes(content, where=where)
        if (record.partition, record.recipe) != (partition, recipe):
            raise SchemaMismatchError(f"{where}: is the record of {record.partition!r} by recipe {record.recipe}")
        return record

    def read_records(self, recipes: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Record | None]]:
        """Reads many records at a time: yields key and record of each, None for a missing or damaged one.

        Args:
            recipes: key and recipe of each.

        Raises:
            SourceError: the storage does not answer.
        """

        def read(of: tuple[str, str]) -> Record | None:
            with suppress(SchemaMismatchError):
                return self.record(*of)
            return None

        with ThreadPoolExecutor(_READS, thread_name_prefix="records") as pool:
            remaining = iter(recipes)
            while some := list(islice(remaining, _MAX_RECORDS_IN_MEMORY)):
                yield from zip((key for key, _ in some), pool.map(read, some), strict=True)

    def create_record(self, record: Record) -> bool:
        """Publishes a partition, unless another writer published it by the same recipe first: returns whether this did.

        Raises:
            SourceError: the record could not be written.
        """
        return self.store.create(self.record_name(record.partition, record.recipe), record.to_bytes())

    def attempt(self, partition: str) -> Attempt | None:
        """Reads the latest attempt of a partition that has not published; None if there is none, or it is damaged.

        Raises:
            SourceError: the storage does not answer.
        """
        name = self.attempt_name(partition)
        content = self.store.found_bytes(name)
        with suppress(SchemaMismatchError):  # losing an attempt costs time, never data
            attempt = None if content is None else Attempt.from_bytes(content, where=self.store.url_of(name))
            return attempt if attempt is not None and attempt.partition == partition else None
        return None

    def write_attempt(self, attempt: Attempt) -> None:
        """Stores an attempt in place of the one before it; `SourceError` if it cannot be written."""
        self.store.durable.write_bytes(self.attempt_name(attempt.partition), attempt.to_bytes(), durable=False)

    def write_failure(self, failure: StageFailure, stages: Mapping[Stage, StageRecord] | None = None) -> None:
        """Stores the failure of a run in the attempt of its partition, unless the storage is what failed.

        Args:
            failure: the error that ended it.
            stages: those that it completed; None keeps those of the attempt before it.
        """
        key = failure.partition
        with suppress(MmAssetsError, OSError):
            before = self.attempt(key) if stages is None else None
            stages = stages or ({} if before is None else before.stages)
            self.write_attempt(Attempt(partition=key, stages=stages, failure=failure))

    def delete_attempt(self, partition: str) -> None:
        """Removes the attempt of a partition that has been published; if that fails, `clean` removes it."""
        with suppress(MmAssetsError, OSError):
            self.store.delete(self.attempt_name(partition))

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
                opened[-1].is_described = bool(description_of(shard.fingerprint))
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


def _is_shard(shard: ShardFile) -> bool:
    """Whether the facts of a shard, as they were read, have their types."""
    return (
        type(shard.url) is str
        and type(shard.size) is int
        and type(shard.fingerprint) is str
        and isinstance(shard.modified, int | float | None)
        and isinstance(shard.times, str | None)
    )


def _tag(listed: ListedFile) -> str:
    return listed.etag or listed.version


def _digest(content: bytes | None) -> str:
    return hashlib.sha256(content or b"").hexdigest()


_line = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


def _listed(shard: ShardFile) -> dict[str, Any]:
    made = {"fingerprint": shard.fingerprint, "modified": shard.modified, "size": shard.size, "url": shard.url}
    return made if shard.times is None else {**made, "times": shard.times}


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed if len(listed) <= _MAX_KEYS_IN_MESSAGE else [*listed[:_MAX_KEYS_IN_MESSAGE], "…"]) or "none"


class CleanNote:
    """Which partitions lost a record, an attempt or their place in the newest manifest within a day: ``clean.json``.

    Args:
        store: the dataset's folder.

    Attributes:
        losses: when and which, by the storage's clock. If the file is missing or damaged, any partition until now.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._snapshot = store.snapshot(NOTE)
        self._modified = store.modified(NOTE) or time.time()  # after the content: a later time protects longer
        self.losses: list[_Loss] = [(None, None)]
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            noted = [(loss["at"], loss["keys"]) for loss in json.loads(self._snapshot.content or b"")["losses"]]
            if all(_is_loss(at, keys) for at, keys in noted):
                self.losses = [(self._modified if at is None else at, keys) for at, keys in noted]

    def write(self, losing: Iterable[str] = ()) -> float:
        """Notes that these partitions lose something now; returns the time by the storage's clock.

        Raises:
            ChangedError: another process has written it since.
        """
        losses = [(at, keys) for at, keys in self.losses if at is None or self._modified - at < MIN_AGE_SECONDS]
        if now_losing := sorted(losing):
            losses.append((None, now_losing))  # the time of this file
        # The token makes it another content each time: it is written also for the time that it has then.
        token = secrets.token_hex(8)
        content = canonical_json({"losses": [{"at": at, "keys": keys} for at, keys in losses], "token": token})
        self._store.replace(self._snapshot, content)
        self._snapshot = self._store.snapshot(NOTE)
        if self._snapshot.content != content:
            raise self.conflict()
        self._modified = self._store.modified(NOTE) or time.time()
        self.losses = [(self._modified if at is None else at, keys) for at, keys in losses]
        return self._modified

    def conflict(self) -> ChangedError:
        """Returns the error of a process that finds another one's note."""
        return ChangedError(self._store.url_of(NOTE), "another process cleans the dataset: run it again")

    def is_current(self) -> bool:
        """Returns whether no other process has written it since."""
        return self._store.found_bytes(NOTE) == self._snapshot.content


def _is_loss(at: object, keys: object) -> bool:
    """Whether the parts of a note, as they were read, have their types."""
    is_time = at is None or (isinstance(at, int | float) and math.isfinite(at))
    return is_time and (keys is None or (isinstance(keys, list) and all(isinstance(key, str) for key in keys)))
