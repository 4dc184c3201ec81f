"""Versions of a dataset, and what differs between two of them: samples added, removed and changed, and why.

Partitions whose files have the same digests are not read. Of the others the ids and the stored checksums of both packed
files are compared, not their payloads, and no more than one partition is held: its ids in DuckDB, which spills to disk.
Why a sample differs follows from what `version_facts` stored of both versions, and from the partition's present tables
where these are the newer version's: the tables of the older one are gone.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from mm_assets.dataset.files import PackedFiles
from mm_assets.dataset.manifest import PackedFile, parse_manifest
from mm_assets.errors import ConfigError, FormatError, SourceError, first_line, temporary_disk_named
from mm_assets.pipeline.chain import DROPPED, FILTERED_ROWS, PACKED_STAGES, REJECTS, ROWS
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.version_facts import VersionFacts, read_facts, setting_changes
from mm_assets.rows.sql import parquet_relation, sql_text
from mm_assets.storage.store import Store

__all__ = [
    "CHANGES",
    "PartitionDiff",
    "SampleChange",
    "Version",
    "VersionDiff",
    "VersionSummary",
    "diff",
    "find_version",
    "list_versions",
]

CHANGES = ("added", "removed", "changed")

_MEMORY = "256MiB"  # of DuckDB, beyond which it spills
_BLOCK = 1 << 14  # samples that become Python objects at a time
_LEAST_PREFIX = 6
_DIGEST = re.compile(r"[0-9a-f]{6,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSummary:
    """A version as a list of versions shows it.

    Attributes:
        digest: SHA-256 of its manifest.
        modified: when the manifest was written, in seconds since 1970.
        is_newest: whether `manifest.json` is this one.
        num_samples: samples in it.
        num_partitions: partitions in it.
        num_bytes: bytes of its packed files.
    """

    digest: str
    modified: float
    is_newest: bool
    num_samples: int
    num_partitions: int
    num_bytes: int


class Version:
    """One version: its manifest, and what it was made with where that is known.

    Args:
        name: path or URL of the manifest.
        content: its bytes.
        facts: what it was made with, or None.

    Attributes:
        digest: SHA-256 of the manifest.

    Raises:
        FormatError: it is not a manifest.
    """

    def __init__(self, name: str, content: bytes, facts: VersionFacts | None) -> None:
        self.name = name
        self.digest = hashlib.sha256(content).hexdigest()
        self.facts = facts
        self._parsed = parse_manifest(content, name=name)
        self._content = content
        self.schema = self._parsed.schema
        self.formats = self._parsed.formats
        self.num_samples = sum(file.num_samples for file in self._parsed.files)

    def files(self, form: str) -> dict[str, PackedFile]:
        """The packed file of each partition in one format."""
        found = parse_manifest(self._content, name=self.name, form=form).files
        return {file.partition or file.location: file for file in found}

    @cached_property
    def partitions(self) -> dict[str, PackedFile]:
        """The same in its first format."""
        return self.files(self.formats[0])


def list_versions(dataset: DatasetStore, *, limit: int = 50) -> list[VersionSummary]:
    """The versions whose manifests are there, the newest first, then by the time at which they were written.

    Raises:
        SourceError: the storage could not be read, or a manifest is damaged.
    """
    found = []
    for digest, modified, is_newest in _versions(dataset)[:limit]:
        content = dataset.store.read_bytes(_manifest_name(digest))
        version = _version(dataset, digest, content)
        num_bytes = sum(file.size or 0 for form in version.formats for file in version.files(form).values())
        found.append(
            VersionSummary(
                digest=digest,
                modified=modified,
                is_newest=is_newest,
                num_samples=version.num_samples,
                num_partitions=len(version.partitions),
                num_bytes=num_bytes,
            )
        )
    return found


def _versions(dataset: DatasetStore) -> list[tuple[str, float, bool]]:
    """Digest and time of each manifest, and whether it is the newest, in the order of `list_versions`."""
    store = dataset.store
    newest = store.found_bytes("manifest.json")
    current = None if newest is None else hashlib.sha256(newest).hexdigest()
    listed = [name.rsplit("/", 1)[-1].removesuffix(".json") for name in store.sizes("manifests")]
    found = [(digest, _modified(store, _manifest_name(digest)), digest == current) for digest in listed]
    return sorted(found, key=lambda one: (not one[2], -one[1], one[0]))


def _manifest_name(digest: str) -> str:
    return f"manifests/{digest}.json"


def _modified(store: Store, name: str) -> float:
    info = store.fs.info(store.path_of(name))
    when = info.get("mtime") or info.get("LastModified") or info.get("created") or 0
    return float(when.timestamp()) if hasattr(when, "timestamp") else float(when)


def _version(dataset: DatasetStore, digest: str, content: bytes) -> Version:
    name = dataset.store.url_of(_manifest_name(digest))
    try:
        return Version(name, content, read_facts(dataset, digest))
    except FormatError as error:
        raise SourceError(name, f"is damaged: {error}") from error


def find_version(dataset: DatasetStore, text: str) -> Version:
    """A version by what a person calls it.

    Args:
        dataset: the dataset's folder.
        text: ``newest``, ``previous``, at least 6 digits of the digest of a manifest, or the path or URL of one.

    Raises:
        ConfigError: there is no such version, or there are several.
        SourceError: the manifest cannot be read or is damaged.
    """
    if "/" in text or text.endswith(".json"):
        folder, _, base = text.rpartition("/")
        store = Store(folder or ".", dataset.spec.root_options)
        content = store.read_bytes(base)
        try:
            return Version(store.url_of(base), content, read_facts(dataset, hashlib.sha256(content).hexdigest()))
        except FormatError as error:
            raise SourceError(text, f"is not a manifest: {error}") from error
    versions = _versions(dataset)
    there = ", ".join(digest[:12] for digest, *_ in versions[:5]) or "none: `mm-assets run` makes the first"
    if text in ("newest", "previous"):
        if len(versions) <= ("newest", "previous").index(text):
            raise ConfigError("arguments", "version", f"there is no {text} version; versions: {there}")
        digest = versions[("newest", "previous").index(text)][0]
    else:
        if not _DIGEST.fullmatch(text):
            expected = f"newest, previous, at least {_LEAST_PREFIX} digits of a manifest's digest, or its path"
            raise ConfigError("arguments", "version", f"found {text!r}, expected {expected}; versions: {there}")
        matching = [digest for digest, *_ in versions if digest.startswith(text)]
        if len(matching) != 1:
            found = ", ".join(digest[:12] for digest in matching) or "none"
            raise ConfigError("arguments", "version", f"{text!r} begins {found}, expected one version of: {there}")
        (digest,) = matching
    return _version(dataset, digest, dataset.store.read_bytes(_manifest_name(digest)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChange:
    """A sample that differs.

    Attributes:
        partition: the partition.
        sample_id: its id.
        change: one of `CHANGES`.
        reason: why: ``shard``, ``filter``, ``reject``, ``settings``, or ``unknown``; of a changed one also ``row``,
            where a filter dropped one of its rows.
        detail: the same in words; may be empty.
        filter: the filter that dropped it, if one did.
        value: the measure that decided, if there is one.
        modalities: of a changed one, the packed modalities that differ.
    """

    partition: str
    sample_id: str
    change: str
    reason: str
    detail: str = ""
    filter: str | None = None
    value: float | None = None
    modalities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDiff:
    """What differs in one partition.

    Attributes:
        partition: its key.
        state: ``added``, ``removed``, ``changed``, or ``same`` where its files have other digests and equal samples.
        num_old: samples in the old version.
        num_new: samples in the new version.
        counts: samples by `CHANGES`; None where only `num_old` and `num_new` are known.
        reasons: why, one clause each.
        note: what could not be compared, and why; else empty.
    """

    partition: str
    state: str
    num_old: int
    num_new: int
    counts: Mapping[str, int] | None
    reasons: tuple[str, ...]
    note: str = ""


class VersionDiff:
    """What differs between two versions, partition by partition, each compared when it is asked for.

    Attributes:
        old: the old version.
        new: the new version.
        unchanged: how many partitions have the same files.
        keys: the others, sorted.
        settings: what differs in settings and schema, one clause each; of both versions as a whole.
    """

    def __init__(self, dataset: DatasetStore, old: Version, new: Version) -> None:
        self.old, self.new = old, new
        self._dataset = dataset
        shared = [form for form in old.formats if form in new.formats]
        self._form = shared[0] if shared else None
        self._old = old.files(self._form or old.formats[0])
        self._new = new.files(self._form or new.formats[0])
        both = self._old.keys() & self._new.keys()
        same = {key for key in both if self._old[key].sha256 == self._new[key].sha256}
        self.unchanged = len(same)
        self.keys = tuple(sorted((self._old.keys() | self._new.keys()) - same))
        self.settings = tuple(self._settings())

    def __iter__(self) -> Iterator[PartitionDiff]:
        return map(self.partition, self.keys)

    def partition(self, key: str) -> PartitionDiff:
        """Compares one partition of `keys`.

        Raises:
            KeyError: it has the same files in both versions, or is in neither.
            SourceError: a file cannot be read.
        """
        old, new = self._of(key)
        num_old, num_new = (0 if file is None else file.num_samples for file in (old, new))
        reasons = self._reasons(key)
        state = "added" if old is None else "removed" if new is None else "changed"
        known: dict[str, Any] = {"partition": key, "num_old": num_old, "num_new": num_new}
        if old is None or new is None:
            counts = {"added": num_new, "removed": num_old, "changed": 0}
            return PartitionDiff(state=state, counts=counts, reasons=reasons, **known)
        if note := self._unreadable(key):
            return PartitionDiff(state=state, counts=None, reasons=reasons, note=note, **known)
        with self._compared(key) as connection:
            counted_changes = Counter(dict(connection.execute(_COUNTS).fetchall()))
        counts = {change: counted_changes[change] for change in CHANGES}
        state = state if any(counts.values()) else "same"
        return PartitionDiff(state=state, counts=counts, reasons=reasons, **known)

    def samples(self, key: str, *, offset: int = 0, limit: int | None = None) -> Iterator[SampleChange]:
        """The samples of one partition that differ, in the order of their ids; few are held at once.

        None of a partition of which only counts are known.

        Args:
            key: one of `keys`.
            offset: how many to pass over.
            limit: how many at most; None: all.

        Raises:
            KeyError: it has the same files in both versions, or is in neither.
            SourceError: a file cannot be read.
        """
        old, new = self._of(key)
        if self._unreadable(key):
            return
        reason, detail = self._common_reason(key, only_old=new is None, only_new=old is None)
        with self._compared(key) as connection:
            has_tables = new is not None and self._has_tables(key)
            self._join_tables(connection, key if has_tables else None)
            part = f" limit {-1 if limit is None else limit} offset {offset}".replace(" limit -1", "")
            rows = connection.execute(_ITEMS + part)
            while batch := rows.fetchmany(_BLOCK):
                for row in batch:
                    yield self._change(key, row, reason, detail, has_tables=has_tables)

    # -- why

    def _settings(self) -> Iterator[str]:
        old, new = self.old.facts, self.new.facts
        if old is None or new is None:
            missing = [version.digest[:12] for version in (self.old, self.new) if version.facts is None]
            yield f"what {' and '.join(missing)} was made with is not known: it is of an earlier release, or a copy"
        else:
            for stage, said in old.changed_stages(new):
                before, after = old.settings.get(stage.name, {}), new.settings.get(stage.name, {})
                yield f"{stage.name}: {'; '.join(setting_changes(before, after)) or said}"
        yield from (f"schema: {said}" for said in setting_changes(self.old.schema, self.new.schema))

    def _shards_changed(self, key: str) -> bool | None:
        """Whether a partition of both has other shards; None where that is not known."""
        old, new = self.old.facts, self.new.facts
        if old is None or new is None or key not in old.shards or key not in new.shards:
            return None
        return old.shards[key] != new.shards[key]

    def _settings_changed(self) -> bool | None:
        old, new = self.old.facts, self.new.facts
        if old is None or new is None:
            return None
        return bool(list(old.changed_stages(new)))

    def _reasons(self, key: str) -> tuple[str, ...]:
        if key not in self._old:
            return ("its shard is new, or it was not published before",)
        if key not in self._new:
            registered = key in self._dataset.partitions()
            return (
                ("it is registered and not in the new version: `mm-assets losses` says why",)
                if registered
                else ("its shards are gone",)
            )
        found = []
        shards = self._shards_changed(key)
        if shards:
            found.append("its shards changed")
        settings = [said for said in self.settings if not said.startswith("what ")]
        found += settings
        if not found:
            found.append(
                "not known" if shards is None else "its stages gave other files of the same shards and settings"
            )
        return tuple(found)

    def _common_reason(self, key: str, *, only_old: bool, only_new: bool) -> tuple[str, str]:
        """Reason and detail of the samples that the tables do not explain."""
        if only_old or only_new:
            return "shard", self._reasons(key)[0]
        shards, settings = self._shards_changed(key), self._settings_changed()
        if shards and not settings:
            return "shard", "its shard changed"
        if settings and shards is False:
            return "settings", "; ".join(self.settings)
        if shards and settings:
            return "unknown", "both its shard and the settings changed"
        return "unknown", ""

    def _change(self, key: str, row: Sequence[Any], reason: str, detail: str, *, has_tables: bool) -> SampleChange:
        sample_id, change, modalities, judge, why, value, said, reject, in_rows = row
        if change != "added" and judge is not None and (change == "removed" or self._settings_changed() is not False):
            measured = "" if value is None else f", measured {value:g}"
            reason = "filter" if change == "removed" else "row"
            detail = f"{judge}.{why}{measured}" + (f": {said}" if said else "")
        elif change == "removed" and reject is not None:
            reason, detail = "reject", reject
        elif change == "removed" and has_tables and not in_rows:
            reason, detail = "shard", "it is not in its shard any more"
        is_dropped = reason in ("filter", "row")
        return SampleChange(
            partition=key,
            sample_id=sample_id,
            change=change,
            reason=reason,
            detail=detail,
            filter=judge if is_dropped else None,
            value=value if is_dropped else None,
            modalities=tuple(modalities or ()),
        )

    def _has_tables(self, key: str) -> bool:
        """Whether the partition's present tables are those of the new version."""
        records = self._dataset.records(key)
        packed = [records[stage] for stage in PACKED_STAGES.values() if stage in records]
        made = {file.sha256 for record in packed for file in record.files.values()}
        return FILTERED_ROWS in records and self._new[key].sha256 in made

    def _join_tables(self, connection: Any, key: str | None) -> None:
        import duckdb

        if key is None:
            connection.execute(_NO_TABLES)
            return
        dataset = self._dataset
        names = {"dropped": DROPPED.name, "rejects": REJECTS.name, "rows": ROWS.tables[0].name}
        files = {name: dataset.duckdb_path(dataset.table(table, key)) for name, table in names.items()}
        try:
            for statement in _WITH_TABLES:
                connection.execute(statement, {n: files[n] for n in files if f"${n}" in statement})
        except duckdb.Error as error:
            raise SourceError(", ".join(files.values()), f"cannot be read: {first_line(error)}") from error

    # -- what

    def _of(self, key: str) -> tuple[PackedFile | None, PackedFile | None]:
        if key not in self.keys:
            raise KeyError(f"partition {key!r} has the same files in both versions, or is in neither")
        return self._old.get(key), self._new.get(key)

    def _unreadable(self, key: str) -> str:
        """Why only the counts of a partition are known, or nothing."""
        if self._form is None and key in self._old and key in self._new:
            return "the versions have no packed format in common: only counts are known"
        for files, version in ((self._old, self.old), (self._new, self.new)):
            file = files.get(key)
            if file is not None and not _is_there(self._dataset, file):
                name = file.location.rsplit("/", 1)[-1]
                return f"{name} of version {version.digest[:12]} was cleaned: only counts are known"
        return ""

    @contextmanager
    def _compared(self, key: str) -> Iterator[Any]:
        """DuckDB with the table `changes` of one partition: id, change and modalities of each sample that differs."""
        old, new = self._of(key)
        with (
            temporary_disk_named(),
            tempfile.TemporaryDirectory(prefix="mm-assets-diff-") as scratch,
            ExitStack() as opened,
        ):
            connection = opened.enter_context(closing(self._dataset.duckdb()))
            connection.execute(f"set memory_limit = '{_MEMORY}'")
            connection.execute("set threads = 2")
            connection.execute("set preserve_insertion_order = false")
            connection.execute("set temp_directory = ?", [scratch])
            readers = [
                None if file is None else opened.enter_context(closing(_opened(self._dataset, file)))
                for file in (old, new)
            ]
            names = list(dict.fromkeys(name for reader in readers if reader is not None for name in reader.names))
            columns = "".join(f", m{number} ubigint, s{number} ubigint" for number in range(len(names)))
            for table, reader in zip(("old_samples", "new_samples"), readers, strict=True):
                connection.execute(f"create temp table {table} (sample_id varchar{columns})")
                for batch in () if reader is None else _fingerprints(reader, names):
                    connection.register("batch", batch)
                    connection.execute(f"insert into {table} from batch")
                    connection.unregister("batch")
            connection.execute(_changes_statement(names), [])
            yield connection


def diff(dataset: DatasetStore, old: Version, new: Version) -> VersionDiff:
    """What differs between two versions of a dataset; what it does not need is not read.

    Args:
        dataset: the dataset's folder.
        old: the version to compare with, of `find_version`.
        new: the version that is compared.
    """
    return VersionDiff(dataset, old, new)


_COUNTS = "select change, count(*) from changes group by change"
_NO_TABLES = """
create temp view explained as select *, null as judge, null as why, null::double as value, null as said,
    null as reject, true as in_rows from changes
"""
_WITH_TABLES = (
    f"""
create temp table drops as
select sample_id, arg_min(filter, nth) as judge, arg_min(reason, nth) as why, arg_min(value, nth) as value,
    arg_min(detail, nth) as said
from (select *, file_row_number as nth from {parquet_relation("$dropped", file_row_number="true")})
where sample_id in (select sample_id from changes where change <> 'added')
group by sample_id
""",
    f"""
create temp table refused as
select sample_id, min(reason || ': ' || detail) as reject from {parquet_relation("$rejects")}
where sample_id in (select sample_id from changes where change = 'removed')
group by sample_id
""",
    f"""
create temp table present as
select distinct sample_id, true as in_rows from {parquet_relation("$rows")}
where sample_id in (select sample_id from changes where change = 'removed')
""",
    """
create temp view explained as
select changes.*, judge, why, value, said, reject, coalesce(in_rows, false) as in_rows
from changes left join drops using (sample_id) left join refused using (sample_id)
    left join present using (sample_id)
""",
)
_ITEMS = (
    "select sample_id, change, modalities, judge, why, value, said, reject, in_rows from explained "
    "order by change, sample_id"
)


def _changes_statement(names: Sequence[str]) -> str:
    """Makes `changes`: one of two samples with the same id differs where a payload's size or checksum does."""
    differs = [
        f"case when o.m{n} is distinct from n.m{n} or o.s{n} is distinct from n.s{n} then {sql_text(name)} end"
        for n, name in enumerate(names)
    ]
    listed = f"list_filter([{', '.join(differs)}], lambda name: name is not null)" if names else "[]::varchar[]"
    return f"""
create temp table changes as
select * from (
    select sample_id,
        case when o.sample_id is null then 'added' when n.sample_id is null then 'removed' else 'changed' end as change,
        case when o.sample_id is null or n.sample_id is null then [] else {listed} end as modalities
    from old_samples as o full join new_samples as n using (sample_id)
)
where change <> 'changed' or len(modalities) > 0
"""


def _is_there(dataset: DatasetStore, file: PackedFile) -> bool:
    folder, _, base = file.location.rpartition("/")
    return Store(folder or ".", dataset.spec.root_options).size(base) is not None


def _opened(dataset: DatasetStore, file: PackedFile) -> Any:
    files = PackedFiles([file.location], storage_options=dataset.spec.root_options or None)
    (reader,) = files.take_opened().values()
    return reader


def _fingerprints(reader: Any, names: Sequence[str]) -> Iterator[pa.Table]:
    """Id, checksum and size (null where absent) of each payload of a packed file, few samples at a time."""
    columns: list[tuple[Any, Any, Any] | None] = [
        (reader.presence(name), reader.checksums(name), reader.sizes(name)) if name in reader.names else None
        for name in names
    ]
    for start in range(0, len(reader), _BLOCK):
        stop = min(start + _BLOCK, len(reader))
        arrays: dict[str, Any] = {"sample_id": pa.array(list(reader.sample_ids[start:stop]), pa.string())}
        for number, column in enumerate(columns):
            if column is None:
                sums = sizes = pa.nulls(stop - start, pa.uint64())
            else:
                absent = ~np.asarray(column[0][start:stop])
                sums, sizes = (pa.array(part[start:stop].astype(np.uint64), mask=absent) for part in column[1:])
            arrays |= {f"m{number}": sums, f"s{number}": sizes}
        yield pa.table(arrays)
