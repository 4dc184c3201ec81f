"""Versions of a dataset, and what differs between two of them: samples added, removed and changed, and why.

Partitions that both manifests list with the same files are not read. Of the others the ids and the stored checksums of
both packed files are compared, not their payloads, and no more than one partition is in memory: its ids are in DuckDB,
which spills to disk. Why a sample differs follows from the settings in both manifests, from the records of both
partitions, and from what the newer one lost.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from mm_assets.dataset.files import PackedFiles
from mm_assets.dataset.manifest import FORMATS, ManifestPartition, file_path, manifest_partitions
from mm_assets.errors import ConfigError, FormatError, SchemaMismatchError, SourceError, temporary_disk_named
from mm_assets.pipeline.chain import CHAIN, FILTERED_ROWS
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import Loss, Selection, stage_losses
from mm_assets.pipeline.state.records import Record
from mm_assets.rows.sql import sql_text
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
    "newest_digest",
    "setting_changes",
]

CHANGES = ("added", "removed", "changed")

_MEMORY = "256MiB"  # of DuckDB, beyond which it spills
_BLOCK = 1 << 14  # samples that become Python objects at a time
_LEAST_PREFIX = 6
_DIGEST = re.compile(r"[0-9a-f]{6,64}")
_FOLDER = "manifests"
_MAX_CHANGES = 20  # settings that one comparison names
_MAX_VALUE = 80  # characters of a value in a clause


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
    """One version: what its manifest lists.

    Args:
        store: the folder that the files are below.
        name: name of the manifest in it.
        content: its bytes.

    Attributes:
        digest: SHA-256 of the manifest.
        schema: the dataset's schema at the time.
        settings: by stage, the values of the settings that determined its files.
        partitions: what it lists, by key.
        formats: the packed formats that every partition has.
        num_samples: samples in it.

    Raises:
        SourceError: it is not a manifest.
    """

    def __init__(self, store: Store, name: str, content: bytes) -> None:
        self.store = store
        self.digest = hashlib.sha256(content).hexdigest()
        url = store.url_of(name)
        try:
            document = json.loads(content)
            self.partitions: Mapping[str, ManifestPartition] = manifest_partitions(document, name=url)
        except (FormatError, ValueError, TypeError, KeyError) as error:
            raise SourceError(url, f"is not a manifest, or is damaged: {error}") from error
        self.schema: Mapping[str, Any] = document["schema"]
        self.settings: Mapping[str, Mapping[str, Any]] = document["settings"]
        entries = self.partitions.values()
        self.formats = tuple(form for form in FORMATS if all(form in entry.packed for entry in entries))
        self.num_samples = sum(entry.num_samples for entry in entries)

    def files(self, key: str, form: str | None) -> dict[str, int]:
        """The packed file of a partition and those of its added streams, with their bytes; none if it is not listed.

        Args:
            key: of a partition.
            form: the packed format; None for the first.
        """
        entry, form = self.partitions.get(key), form or self.formats[0]
        if entry is None:
            return {}
        files = [(form, entry.packed[form]), *(("stream", file) for file in entry.streams.values())]
        return {file_path(kind, key, sha256): size for kind, (size, sha256) in files}


def list_versions(dataset: DatasetStore, *, limit: int = 50) -> list[VersionSummary]:
    """The versions whose manifests are there, the newest first, then by the time at which they were written.

    Raises:
        SourceError: the storage could not be read, or a manifest is damaged.
    """
    found = []
    for digest, modified, is_newest in _versions(dataset)[:limit]:
        version = _version(dataset, digest)
        sizes = (size for entry in version.partitions.values() for size, _ in entry.packed.values())
        found.append(
            VersionSummary(
                digest=digest,
                modified=modified,
                is_newest=is_newest,
                num_samples=version.num_samples,
                num_partitions=len(version.partitions),
                num_bytes=sum(sizes),
            )
        )
    return found


def newest_digest(dataset: DatasetStore) -> str | None:
    """Returns the digest of the newest manifest; None before the first; `SourceError` if it cannot be read."""
    content = dataset.store.found_bytes("manifest.json")
    return None if content is None else hashlib.sha256(content).hexdigest()


def _versions(dataset: DatasetStore) -> list[tuple[str, float, bool]]:
    """Digest and time of each manifest, and whether it is the newest, in the order of `list_versions`."""
    newest = newest_digest(dataset)
    listed = {
        name.rsplit("/", 1)[-1].removesuffix(".json"): file for name, file in dataset.store.listing(_FOLDER).items()
    }
    found = [(digest, file.modified or 0.0, digest == newest) for digest, file in listed.items()]
    return sorted(found, key=lambda one: (not one[2], -one[1], one[0]))


def _version(dataset: DatasetStore, digest: str) -> Version:
    name = f"{_FOLDER}/{digest}.json"
    return Version(dataset.store, name, dataset.store.read_bytes(name))


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
        folder, _, name = text.rpartition("/")
        if folder == _FOLDER or folder.endswith(f"/{_FOLDER}"):
            folder, name = folder.removesuffix(_FOLDER).rstrip("/"), f"{_FOLDER}/{name}"
        store = Store(folder or ("/" if text.startswith("/") else "."), dataset.spec.root_options)
        return Version(store, name, store.read_bytes(name))
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
    return _version(dataset, digest)


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
        self._form = next((form for form in old.formats if form in new.formats), None)
        keys = old.partitions.keys() | new.partitions.keys()
        self.keys = tuple(sorted(key for key in keys if not self._is_same(key)))
        self.unchanged = len(keys) - len(self.keys)
        stages = (stage.name for stage in CHAIN if stage.name in old.settings.keys() & new.settings.keys())
        values = [(stage, old.settings[stage], new.settings[stage]) for stage in stages]
        self.settings = tuple(
            f"{name}: {change}"
            for name, before, after in (*values, ("schema", old.schema, new.schema))
            for change in setting_changes(before, after)
        )

    @cached_property
    def _registered(self) -> Collection[str]:
        return self._dataset.partitions().keys()

    def _is_same(self, key: str) -> bool:
        return self._form is not None and self.old.files(key, self._form) == self.new.files(key, self._form)

    def __iter__(self) -> Iterator[PartitionDiff]:
        return map(self.partition, self.keys)

    def partition(self, key: str) -> PartitionDiff:
        """Compares one partition of `keys`.

        Raises:
            KeyError: it has the same files in both versions, or is in neither.
            SourceError: a file cannot be read.
        """
        why = self._why(key)
        num_old, num_new = (
            version.partitions[key].num_samples if key in version.partitions else 0 for version in (self.old, self.new)
        )
        in_old, in_new = key in self.old.partitions, key in self.new.partitions
        state = "changed" if in_old and in_new else "added" if in_new else "removed"
        counts: dict[str, int] | None = {"added": num_new, "removed": num_old, "changed": 0}
        note = self._unreadable(key) if state == "changed" else ""
        if note:
            counts = None
        elif state == "changed":
            with self._compared(key) as connection:
                found = Counter(dict(connection.execute(_COUNTS).fetchall()))
            counts = {change: found[change] for change in CHANGES}
            state = state if any(counts.values()) else "same"
        return PartitionDiff(
            partition=key, state=state, num_old=num_old, num_new=num_new, counts=counts, reasons=why.reasons, note=note
        )

    def samples(self, key: str, *, offset: int = 0, limit: int | None = None) -> Iterator[SampleChange]:
        """The samples of one partition that differ, in the order of their ids; few are in memory.

        None of a partition of which only counts are known.

        Args:
            key: one of `keys`.
            offset: how many to pass over.
            limit: how many at most; None: all.

        Raises:
            KeyError: it has the same files in both versions, or is in neither.
            SourceError: a file cannot be read.
        """
        why = self._why(key)
        if self._unreadable(key):
            return
        with self._compared(key) as connection:
            rows = connection.execute(_ITEMS, {"offset": offset, "limit": limit})
            while batch := rows.fetchmany(_BLOCK):
                lost = self._lost(key, why, {sample_id for sample_id, change, _ in batch if change != "added"})
                for sample_id, change, modalities in batch:
                    reason = _reason_of(change, why, lost.get(sample_id))
                    yield SampleChange(
                        partition=key, sample_id=sample_id, change=change, modalities=tuple(modalities), **reason
                    )

    # -- why

    def _why(self, key: str) -> _Why:
        """Why a partition differs; its records are read for it."""
        if self._is_same(key) or not (key in self.old.partitions or key in self.new.partitions):
            raise KeyError(f"partition {key!r} has the same files in both versions, or is in neither")
        if key not in self.old.partitions or key not in self.new.partitions:
            detail = "its shard is new, or it was not published before"
            if key in self.old.partitions and key in self._registered:
                detail = "it is registered and not in the new version: `mm-assets losses` says why"
            elif key in self.old.partitions:
                detail = "its shards are missing"
            return _Why(reasons=(detail,), reason="shard", detail=detail)
        old, new = (self._record(version, key) for version in (self.old, self.new))
        clauses, is_other, shards = list(self.settings), bool(self.settings), None
        if old is not None and new is not None:
            shards = _shards(old) != _shards(new)
            is_other = any(old.stages[s].made_with != new.stages[s].made_with for s in old.stages if s in new.stages)
            clauses += _code_changes(old, new)
        missing = [v.digest[:12] for v, record in ((self.old, old), (self.new, new)) if record is None]
        reasons = [
            *(["its shards changed"] if shards else []),
            *clauses,
            *_stream_changes(self.old.partitions[key], self.new.partitions[key]),
            *([f"the record of {' and '.join(missing)} is missing, so shards are not compared"] if missing else []),
        ]
        reason, detail = "unknown", ""
        if shards and not is_other:
            reason, detail = "shard", "its shard changed"
        elif is_other and shards is False:
            reason, detail = "settings", "; ".join(clauses)
        elif is_other and shards:
            detail = "both its shard and the settings changed"
        other_files = "its stages made other files of the same shards and settings"
        return _Why(reasons=tuple(reasons) or (other_files,), reason=reason, detail=detail, is_other=is_other, new=new)

    def _record(self, version: Version, key: str) -> Record | None:
        try:
            return self._dataset.record(key, version.partitions[key].recipe)
        except SchemaMismatchError:
            return None

    def _lost(self, key: str, why: _Why, sample_ids: set[str]) -> dict[str, Loss]:
        """The first row of each of some samples that the new version lost, or else the first reject."""
        if why.new is None or not sample_ids:
            return {}
        found: dict[str, Loss] = {}
        for loss in stage_losses(self._dataset, key, why.new.stages, Selection(sample_ids=sample_ids)):
            known = found.get(loss.sample_id or "")
            if loss.kind != "kept" and (known is None or known.stage != loss.stage):
                found[loss.sample_id or ""] = loss  # stages are in order: rejects come before rows
        return found

    # -- what

    def _unreadable(self, key: str) -> str:
        """Why only the counts of a partition are known, or nothing."""
        if self._form is None and key in self.old.partitions and key in self.new.partitions:
            return "the versions have no packed format in common: only counts are known"
        for version in (self.old, self.new):
            for path in version.files(key, self._form):
                if version.store.size(path) is None:
                    name = path.rpartition("/")[2]
                    return f"{name} of version {version.digest[:12]} was cleaned: only counts are known"
        return ""

    @contextmanager
    def _compared(self, key: str) -> Iterator[Any]:
        """DuckDB with the table `changes` of one partition: id, change and modalities of each sample that differs."""
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
            of_both = [
                [opened.enter_context(closing(self._open(version, path))) for path in version.files(key, self._form)]
                for version in (self.old, self.new)
            ]
            names = list(dict.fromkeys(name for readers in of_both for reader in readers for name in reader.names))
            columns = "".join(f", m{number} ubigint, s{number} ubigint" for number in range(len(names)))
            for table, readers in zip(("old_samples", "new_samples"), of_both, strict=True):
                connection.execute(f"create temp table {table} (sample_id varchar{columns})")
                for batch in _fingerprints(readers, names):
                    connection.register("batch", batch)
                    connection.execute(f"insert into {table} from batch")
                    connection.unregister("batch")
            connection.execute(_changes_statement(names), [])
            yield connection

    def _open(self, version: Version, path: str) -> Any:
        files = PackedFiles([version.store.url_of(path)], storage_options=self._dataset.spec.root_options or None)
        (reader,) = files.take_opened().values()
        return reader


def diff(dataset: DatasetStore, old: Version, new: Version) -> VersionDiff:
    """What differs between two versions of a dataset; what it does not need is not read.

    Args:
        dataset: the dataset's folder.
        old: the version to compare with, of `find_version`.
        new: the version that is compared.
    """
    return VersionDiff(dataset, old, new)


# -- why


@dataclass(frozen=True, slots=True, kw_only=True)
class _Why:
    """Why a partition differs.

    Attributes:
        reasons: one clause each.
        reason: `SampleChange.reason` of the samples that no loss explains.
        detail: the same as text.
        is_other: whether it was made with other settings, code or schema.
        new: the record of the newer version, if there is one.
    """

    reasons: tuple[str, ...]
    reason: str
    detail: str
    is_other: bool = False
    new: Record | None = None


def _reason_of(change: str, why: _Why, lost: Loss | None) -> dict[str, Any]:
    """Why a sample differs: by what the newer version lost of it, else as the whole partition."""
    of_rows = lost is not None and lost.stage == FILTERED_ROWS.name
    if lost is not None and of_rows and (change == "removed" or why.is_other):
        measured = "" if lost.value is None else f", measured {lost.value:g}"
        said = "" if lost.detail.startswith("measured ") or not lost.detail else f": {lost.detail}"
        return {
            "reason": "filter" if change == "removed" else "row",
            "detail": f"{lost.reason}{measured}{said}",
            "filter": lost.reason.rpartition(".")[0],
            "value": lost.value,
        }
    if lost is not None and change == "removed":
        return {"reason": "reject", "detail": f"{lost.reason}: {lost.detail}"}
    if change == "removed" and why.new is not None:  # each sample of its rows is packed or lost
        return {"reason": "shard", "detail": "it is not in its shard any more"}
    return {"reason": why.reason, "detail": why.detail}


def _shards(record: Record) -> list[tuple[str, str]]:
    """Name and fingerprint of each shard, without folders: a copy of the shards somewhere else is the same input."""
    return sorted((url.rpartition("/")[2], fingerprint) for url, fingerprint in record.shards.items())


def _code_changes(old: Record, new: Record) -> Iterator[str]:
    """What changed besides settings and schema, which the manifests have."""
    for stage in (stage for stage in old.stages if stage in new.stages):
        before, after = (
            {name: digest for name, digest in made.items() if name == "version" or name.startswith("code of ")}
            for made in (old.stages[stage].made_with, new.stages[stage].made_with)
        )
        if change := stage.changed(before, after):
            yield f"{stage.name}: {change}"


def _stream_changes(old: ManifestPartition, new: ManifestPartition) -> Iterator[str]:
    for name in sorted(old.streams.keys() | new.streams.keys()):
        if old.streams.get(name) != new.streams.get(name):
            change = "added" if name not in old.streams else "removed" if name not in new.streams else "replaced"
            yield f"stream {name!r} was {change}"


def setting_changes(before: Any, after: Any, name: str = "") -> list[str]:
    """What differs between two values of settings, one clause each, such as ``filters.blur.min: 100 -> 120``."""
    found = list(_changes(before, after, name))
    more = [f"and {len(found) - _MAX_CHANGES:,} more"] if len(found) > _MAX_CHANGES else []
    return found[:_MAX_CHANGES] + more


def _changes(before: Any, after: Any, name: str) -> Iterator[str]:
    before, after = _by_name(before), _by_name(after)
    if before == after:
        return
    if {} in (before, after) or [] in (before, after):  # no filters at first, or none any more
        before, after = before or {}, after or {}
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{name}.{key}" if name else str(key)
            if key not in before:
                yield f"{inner}: new, {_text(after[key])}"
            elif key not in after:
                yield f"{inner}: removed, was {_text(before[key])}"
            else:
                yield from _changes(before[key], after[key], inner)
    else:
        yield f"{name}: {_text(before)} -> {_text(after)}"


def _by_name(value: Any) -> Any:
    """A list of filters, annotators or columns by their names: if one is added, the others have not moved."""
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        names = [str(one.get("name") or one.get("type") or "") for one in value]
        if len(set(names)) == len(names) and all(names):
            return dict(zip(names, value, strict=True))
    return value


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"


# -- what


_COUNTS = "select change, count(*) from changes group by change"
_ITEMS = "select sample_id, change, modalities from changes order by change, sample_id limit $limit offset $offset"


def _changes_statement(names: Sequence[str]) -> str:
    """Makes `changes`: one of two samples with the same id differs if a payload's size or checksum does."""
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


def _fingerprints(readers: Sequence[Any], names: Sequence[str]) -> Iterator[pa.Table]:
    """Id, checksum and size (null if absent) of each payload of files with the same samples, few samples at a time."""
    columns: list[tuple[Any, Any, Any] | None] = [
        next(((r.presence(name), r.checksums(name), r.sizes(name)) for r in readers if name in r.names), None)
        for name in names
    ]
    count = len(readers[0]) if readers else 0
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        arrays: dict[str, Any] = {"sample_id": pa.array(list(readers[0].sample_ids[start:stop]), pa.string())}
        for number, column in enumerate(columns):
            if column is None:
                sums = sizes = pa.nulls(stop - start, pa.uint64())
            else:
                absent = ~np.asarray(column[0][start:stop])
                sums, sizes = (pa.array(part[start:stop].astype(np.uint64), mask=absent) for part in column[1:])
            arrays |= {f"m{number}": sums, f"s{number}": sizes}
        yield pa.table(arrays)
