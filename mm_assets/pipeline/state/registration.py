"""Registration: finding the shards, grouping them into partitions, and deciding the dataset's schema.

Listing never changes a shard and may run at any time. The schema is decided once, from the declaration and a sample of
the shards, because every partition must conform to it; it is decided again only on request.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote

from mm_assets.errors import ConfigError, MmAssetsError, SchemaMismatchError, SourceError
from mm_assets.formats import crc32c
from mm_assets.pipeline.chain import MATERIALIZED_ROWS, RAW_SHARDS, Stage
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import RECORDS, DatasetStore, until_unchanged
from mm_assets.pipeline.state.records import Partition, Registered, StageRecord
from mm_assets.pipeline.state.schema_inference import Decision, decide_layout
from mm_assets.rows.base import shard_kinds, source_formats
from mm_assets.sources.base import MAX_SUFFIXES_IN_MESSAGE
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import Listing, ShardFile, description_of, expand_shards
from mm_assets.storage.urls import (
    before_pattern,
    filesystem,
    is_local,
    is_web,
    local_path,
    protocols,
    without_query,
)
from mm_assets.summaries import counted

__all__ = [
    "MOST_PARTITIONS",
    "Grouped",
    "ListedPartitions",
    "Registration",
    "content_digest",
    "group_shards",
    "list_partitions",
    "list_shards",
    "no_shards",
    "partition_key",
    "refusal",
    "register",
    "registration_fault",
    "slow_pages",
]

MOST_PARTITIONS = 2000  # beyond it Dagster's pages are slow; docs/pipeline.md has the figures
_CHUNK = 4 << 20  # bytes of a shard that are hashed at a time
MAX_KEY = 200  # bytes: a file name has 255 at most, and ours add a digest, an extension and dots

_ESCAPED = re.compile(rb"[^A-Za-z0-9._-]|^\.|\.(?=\.\.)|(?<=\.)\.(?=\.)|(?<=\.\.)\.")  # the dots are those of ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a registration found.

    Attributes:
        partitions: every registered partition, sorted by key.
        added: keys seen for the first time.
        changed: keys whose shards' fingerprints changed.
        removed: keys whose shards are gone; they leave the next manifest.
        unsettled: URLs of shards that are too young to be taken.
        seen: by their URL, the fingerprint and since when it has been seen; for the next registration.
        skipped: as in `Grouped`.
        decision: the dataset's layout, where this registration decided it.
    """

    partitions: tuple[Partition, ...]
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unsettled: tuple[str, ...]
    seen: Mapping[str, tuple[str, float]]
    skipped: tuple[str, ...] = ()
    decision: Decision | None = None


class Grouped(NamedTuple):
    """Shards as partitions.

    Attributes:
        partitions: sorted by key.
        skipped: a sentence for each file that is in none of them, with its place, why, and what to do.
    """

    partitions: list[Partition]
    skipped: tuple[str, ...]


def list_shards(spec: DatasetSpec, known: Iterable[Partition] = ()) -> Grouped:
    """Lists the shards of a declaration, settled or not, and groups them as `group_shards` does.

    Raises:
        SourceError: the storage does not answer.
    """
    known = tuple(known)
    urls = (shard.url for partition in known for shard in partition.shards)
    listing = expand_shards(
        spec.shards,
        spec.storage_options,
        kinds=shard_kinds(spec.source, where=spec.where),
        known=urls,
    )
    return group_shards(spec, listing, known)


def group_shards(spec: DatasetSpec, listing: Listing, known: Iterable[Partition] = ()) -> Grouped:
    """Turns shards into partitions by the declaration's pattern, or each shard into one.

    The key of a shard follows from its name alone, so that no other shard changes it; that of a shard in a dataset that
    is a folder, from its path below the listed folder. Shards that give no key are skipped; so are those that would
    take one key without a pattern, except the one that is registered under it.

    Args:
        spec: the declaration.
        listing: its shards.
        known: the partitions as registered.
    """
    pattern = re.compile(spec.partition_pattern) if spec.partition_pattern else None
    formats = source_formats(spec.source, where=spec.where)
    suffixes = tuple(suffix for found in formats.values() for suffix in found.SUFFIXES)
    registered = {shard.url: partition.key for partition in known for shard in partition.shards}
    skipped = list(listing.skipped)
    groups: dict[str, list[ShardFile]] = {}
    for shard in listing.shards:
        path = _readable_path(shard.url, listing.folder)
        base = path.rpartition("/")[2]
        if shard.url in listing.in_datasets or base.startswith("metadata."):  # a name that each folder of a split has
            base = path
        if shard.url.endswith("/"):  # of the listed folder itself it is the folder's own name
            base = path or listing.folder.rstrip("/").rpartition("/")[2]
        name = next((base[: -len(s)] for s in suffixes if base.lower().endswith(s)), base)
        if pattern is not None:
            match = pattern.search(path)
            name = "" if match is None else match["partition" if "partition" in pattern.groupindex else 1] or ""
        if not name:
            skipped.append(
                f"{shard.url} is skipped: partition_pattern {spec.partition_pattern!r} gives no key for {path!r}"
            )
            continue
        groups.setdefault(partition_key(name), []).append(shard)
    partitions = []
    for key, group in sorted(groups.items()):
        if pattern is None and len(group) > 1:
            first = [shard for shard in group if registered.get(shard.url) == key][:1]
            advice = (
                f"would be partition {key!r} too; to have their folders in their keys, set partition_pattern: '(.+)\\.'"
            )
            skipped += [f"{one.url} is skipped: {other.url} {advice}" for one, other in _conflicts(group, first)]
            group = first
        if group:
            partitions.append(Partition(key=key, shards=tuple(group)))
    return Grouped(partitions, tuple(sorted(skipped)))


def _conflicts(group: Sequence[ShardFile], first: Sequence[ShardFile]) -> Iterator[tuple[ShardFile, ShardFile]]:
    """Yields each shard that cannot have its key, with another one that would have it."""
    for shard in group:
        if shard not in first:
            yield shard, next(other for other in (*first, *group) if other is not shard)


def _readable_path(url: str, folder: str) -> str:
    """Returns the path of a shard below a folder, as its names are without the escapes and the query of a URL."""
    if not is_web(url):
        return url.removeprefix(folder)
    path = without_query(url).removeprefix(folder)
    return unquote(path.partition("://")[2] or path, errors="surrogateescape")


def partition_key(name: str) -> str:
    """Returns the partition key of a name: itself if it has only letters of ASCII, digits, ``.``, ``_`` and ``-``.

    Every other byte of its UTF-8 is written as ``%`` and two hexadecimal digits, as is a dot that would hide a file or
    that Dagster would read as the ``...`` of a range: `urllib.parse.unquote` returns the name. Of a longer key than
    `MAX_KEY`, the start is followed by ``%-``, which no other key has, and a digest of all of it.
    """
    data = name.encode("utf-8", "surrogateescape")
    key = _ESCAPED.sub(lambda found: b"%%%02X" % ord(found[0]), data)
    if len(key) > MAX_KEY:
        digest = hashlib.sha256(key).hexdigest()[:32].encode()
        key = re.sub(rb"%.?$", b"", key[: MAX_KEY - len(digest) - 2]) + b"%-" + digest
    return key.decode()


def no_shards(spec: DatasetSpec, skipped: Sequence[str] = (), *, registered: int = 0) -> MmAssetsError:
    """The error of a place without shards, which had those of so many partitions, or where all of them are skipped."""
    if skipped:
        more = f" (and {len(skipped) - 1:,} more that are skipped)" if len(skipped) > 1 else ""
        return ConfigError(spec.where, "shards", f"no shard can be taken: {skipped[0]}{more}")
    more = f", though it held {counted(registered, 'partition')} before" if registered else ""
    named = "" if spec.where == "arguments" else f" (`shards` of {spec.where})"
    said = f"no shard was found there{more}{named}"
    if is_local(spec.shards):
        place = before_pattern(spec.shards)
        folder = place if place == spec.shards else os.path.dirname(place)
        if folder and not os.path.lexists(local_path(folder)):
            what = "such file or folder" if place == spec.shards else f"folder {local_path(folder)}"
            return SourceError(spec.shards, f"{said}: there is no {what}")
    elif (bucket := _missing_bucket(spec)) is not None:
        return SourceError(spec.shards, f"{said}: there is no bucket {bucket}, or the credentials may not see it")
    if is_web(spec.shards):
        names = "of a server that lists no folders give the names, as in {00000..00099}.tar"
        is_pattern = re.search(r"[*\[{]|/$", spec.shards) is not None
        return SourceError(spec.shards, f"{said}: {names if is_pattern else 'the server has no such file'}")
    suffixes = " ".join(
        suffix
        for kind in shard_kinds(spec.source, where=spec.where)
        for suffix in kind.suffixes[:MAX_SUFFIXES_IN_MESSAGE]
        if suffix != "/"
    )
    escaped = "; in a pattern [[] stands for a bracket" if "[" in spec.shards else ""
    return SourceError(
        spec.shards,
        f"{said}: give a folder with names that end in {suffixes}, a glob such as 'part-*', or one file{escaped}",
    )


def _missing_bucket(spec: DatasetSpec) -> str | None:
    """The bucket of the shards if it cannot be listed; None for another storage too."""
    fs, path = filesystem(spec.shards, spec.storage_options)
    bucket = path.partition("/")[0]
    return bucket if "s3" in protocols(fs) and not fs.exists(bucket) else None


class ListedPartitions(NamedTuple):
    """The partitions that are listed.

    Attributes:
        settled: those of which all shards have settled, sorted by key.
        unsettled: those that wait for a shard.
        seen: an entry for each shard that has not settled, for the next listing.
        skipped: as in `Grouped`.
    """

    settled: list[Partition]
    unsettled: list[Partition]
    seen: dict[str, tuple[str, float]]
    skipped: tuple[str, ...]


def list_partitions(
    spec: DatasetSpec, *, seen: Mapping[str, tuple[str, float]] | None = None, known: Iterable[Partition] = ()
) -> ListedPartitions:
    """Lists the shards that have settled, as partitions.

    A shard has settled when its modification time is `settle_seconds` ago, or when `seen` says that it has had its
    fingerprint for so long. A group waits for all its shards.

    Args:
        spec: the declaration.
        seen: by URL, the fingerprint last seen and since when (seconds since 1970).
        known: the partitions as registered.
    """
    now = time.time()
    before = seen or {}
    settled: list[Partition] = []
    unsettled: list[Partition] = []
    young: dict[str, tuple[str, float]] = {}
    grouped = list_shards(spec, known)
    for partition in grouped.partitions:
        waiting = {}
        for shard in partition.shards:
            fingerprint, since = before.get(shard.url, ("", now))
            since = since if fingerprint == shard.fingerprint else now
            age = 0.0 if shard.modified is None else now - shard.modified
            if max(now - since, age) < spec.settle_seconds:
                waiting[shard.url] = shard.fingerprint, since
        (unsettled if waiting else settled).append(partition)
        young |= waiting
    return ListedPartitions(settled, unsettled, young, grouped.skipped)


def register(
    dataset: DatasetStore,
    *,
    new_schema: bool = False,
    wait: bool = False,
    allow_empty: bool = False,
    dry_run: bool = False,
    seen: Mapping[str, tuple[str, float]] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Registration:
    """Lists the shards, stores the partitions and, the first time, the dataset's schema.

    If another process registers the dataset meanwhile, what it stored is read and the shards are listed again: the last
    listing that is stored began after everything that it replaces.

    Args:
        dataset: the dataset's folder.
        new_schema: decide the schema again although there is one.
        wait: wait until young shards have settled and list again, instead of leaving them for next time.
        allow_empty: a place without any shard is not an error: shards may follow.
        dry_run: store nothing.
        seen: `Registration.seen` of the last time.
        sleep: waits some seconds.

    Raises:
        SourceError: no shard was found, or none that can decide the schema.
        ConfigError: the declaration's schema settings changed and `new_schema` was not given, or no shard can be taken.
        ChangedError: other processes registered the dataset each time that this one was about to.
    """
    return until_unchanged(lambda: _register(dataset, new_schema, wait, allow_empty, dry_run, seen, sleep))


def _register(
    dataset: DatasetStore,
    new_schema: bool,
    wait: bool,
    allow_empty: bool,
    dry_run: bool,
    seen: Mapping[str, tuple[str, float]] | None,
    sleep: Callable[[float], None],
) -> Registration:
    """Registers once; raises `ChangedError` if another process did since this one read what was registered."""
    spec = dataset.spec
    stored = dataset.registered()
    partitions, unsettled, young, skipped = list_partitions(spec, seen=seen, known=stored.partitions.values())
    before = stored.partitions
    if young and wait:
        sleep(spec.settle_seconds)
        partitions, unsettled, young, skipped = list_partitions(spec, seen=young, known=before.values())
    if not partitions and not young and (before or skipped or not allow_empty):
        # An unmounted folder looks like this; accepting it would empty the next manifest.
        raise no_shards(spec, skipped, registered=len(before))
    fault = None if new_schema else _refusal(dataset, stored)
    if fault is not None:
        raise fault
    recognition = _Recognition(dataset)
    partitions = [recognition.partition(before.get(p.key), p) for p in partitions]
    present = {p.key: p for p in partitions}
    waiting = {partition.key for partition in unsettled}
    # A partition whose shards are being replaced, or added to, remains as registered until they settle.
    kept = [p for key, p in before.items() if key not in present and key in waiting]
    everything = tuple(sorted([*partitions, *kept], key=lambda p: p.key))
    keys = {p.key for p in everything}
    decision = None
    if everything and (new_schema or stored.declared is None):
        decision = decide_layout(spec, sorted({shard.url for p in everything for shard in p.shards}))
        if not dry_run:
            _store(dataset, decision, stored, new_schema=new_schema)
    if not dry_run and ({p.key: p for p in everything} != before or stored.source != spec.shards):
        dataset.write_partitions(everything, stored)
    return Registration(
        partitions=everything,
        added=tuple(k for k in sorted(keys) if k not in before),
        changed=tuple(p.key for p in everything if p.key in before and before[p.key].fingerprints != p.fingerprints),
        removed=tuple(sorted(set(before) - keys)),
        unsettled=tuple(young),
        seen=young,
        skipped=skipped,
        decision=decision,
    )


def registration_fault(dataset: DatasetStore, known: Mapping[str, Partition], keys: Iterable[str]) -> str | None:
    """How partitions that were run are no longer registered as they were then, or None.

    Hosts with copies of local shards register them in turn, each with times of its own: what one has published does
    not count for the others.

    Raises:
        SourceError: the registration cannot be read.
    """
    now = dataset.registered().partitions
    changed = [key for key in keys if key not in now or now[key].fingerprints != known[key].fingerprints]
    if not changed:
        return None
    return (
        f"{counted(len(changed), 'partition')} that ran here, {changed[0]!r} first, were registered meanwhile with "
        "other shards, and do not count: the fingerprint of a local shard is its size and time of modification, so "
        "that all hosts have to see the same files; if shards were replaced, run the same command again"
    )


def refusal(dataset: DatasetStore) -> ConfigError | None:
    """Why a registration without `new_schema` is refused, as far as the declaration tells, or None."""
    return _refusal(dataset, dataset.registered())


def _refusal(dataset: DatasetStore, stored: Registered) -> ConfigError | None:
    spec, source, declared = dataset.spec, stored.source, stored.declared
    if source is not None and not spec.is_made_from(source):
        detail = (
            f"is {spec.shards}, but the dataset at {dataset.store.url} was made from {source}: use another dataset "
            f"name or root, or, if it moved, `mm-assets register --dataset {spec.name} --new-schema`"
        )
        return ConfigError(spec.where, "shards", detail)
    changed = [] if declared is None else _changed(declared, spec.declared)
    if changed:
        others = f" (and so did {', '.join(changed[1:])})" if changed[1:] else ""
        detail = (
            f"changed since the dataset's schema was decided{others}. Partitions must share one schema: go back, or "
            f"decide it again for all of them with `mm-assets register --dataset {spec.name} --new-schema`"
        )
        return ConfigError(spec.where, changed[0], detail)
    return None


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The schema settings that differ from those stored, by their keys in the declaration."""
    stored = before.get("samples", {})
    # A release that had fewer settings did not store the others: they did not exist.
    names = sorted(name for name, value in after["samples"].items() if stored.get(name, value) != value)
    keys = sorted(key for key in before.keys() | after.keys() if key != "samples" and before.get(key) != after.get(key))
    return [*(f"samples.{name}" for name in names), *keys]


def _store(dataset: DatasetStore, decision: Decision, stored: Registered, *, new_schema: bool) -> None:
    """Stores a decision, that without any sample once for the same settings."""
    if new_schema or decision.decided_by is not None or stored.stored_schema.get("declared") != dataset.spec.declared:
        schema = replace(decision.schema, evidence=decision.evidence())
        dataset.write_schema(schema, stored, decided_by=decision.decided_by)


# -- which version of a local shard a file is: by its bytes, if its times alone cannot tell
#
# The size and modification time of a file stay the same when another file replaces it and takes over its time, and
# differ after a copy or a `touch` that leaves its bytes alone. If one of its times differs from those registered, its
# bytes are compared with the checksum recorded by the stage that last read them all.


def content_digest(file: SourceFile) -> str:
    """CRC-32C of a whole file, 8 hexadecimal digits; about 0.2 s for each GB in the page cache.

    Raises:
        SourceError: the file could not be read.
    """
    buffer, value = bytearray(_CHUNK), 0
    for offset in range(0, file.size, _CHUNK):
        size = min(_CHUNK, file.size - offset)
        file.read_into([(offset, size)], memoryview(buffer), [0])
        value = crc32c(memoryview(buffer)[:size], start=value)
    return f"{value:08x}"


class _Recognition:
    """Recognizes local shards that are those that were registered, by their bytes, if their times alone cannot.

    What earlier runs recorded of the bytes is listed once, if it is needed.
    """

    def __init__(self, dataset: DatasetStore) -> None:
        self._dataset = dataset

    @cached_property
    def _recipes(self) -> Mapping[str, Sequence[str]]:
        return self._dataset.recipes(self._dataset.store.sizes(RECORDS))

    def partition(self, before: Partition | None, found: Partition) -> Partition:
        """A partition as listed, whose local shards have the registered fingerprints if their bytes are the same.

        Args:
            before: the partition as registered, if it was.
            found: the partition as listed.

        Returns:
            The partition with a fingerprint of its own for each shard whose bytes changed without its size and time.
        """
        if before == found or all(shard.times is None for shard in found.shards):
            return found
        known = {} if before is None else {shard.url: shard for shard in before.shards}
        shards = (
            self._shard(found.key, known[shard.url], shard) if shard.url in known else shard for shard in found.shards
        )
        return replace(found, shards=tuple(shards))

    def _shard(self, key: str, before: ShardFile, found: ShardFile) -> ShardFile:
        is_described_alike = description_of(found.fingerprint) == description_of(before.fingerprint)
        if found.times is None or found.size != before.size or not is_described_alike:
            return found
        if found.times == before.times:
            return before
        recorded = self._recorded_digest(key, before)
        if recorded is None:
            return found
        try:
            with SourceFile(found.url, self._dataset.spec.storage_options) as file:
                digest = content_digest(file)
        except SourceError:  # the stage that reads it will say so
            return found
        return replace(found, fingerprint=before.fingerprint if digest == recorded else f"{found.fingerprint}-{digest}")

    def _recorded_digest(self, key: str, shard: ShardFile) -> str | None:
        """The digest of the registered version of a shard, or None if nothing has read all of it."""
        if shard.fingerprint.count("-") == 2:
            return shard.fingerprint.rpartition("-")[2]
        for stages in self._earlier(key):
            if {RAW_SHARDS, MATERIALIZED_ROWS} <= stages.keys() and (
                stages[RAW_SHARDS].inputs.get(shard.url) == shard.fingerprint
            ):
                return stages[MATERIALIZED_ROWS].inputs.get(shard.url)
        return None

    def _earlier(self, key: str) -> Iterator[Mapping[Stage, StageRecord]]:
        for recipe in self._recipes.get(key, ()):
            with suppress(SourceError, SchemaMismatchError):
                record = self._dataset.record(key, recipe)
                if record is not None:
                    yield record.stages
        with suppress(SourceError):
            attempt = self._dataset.attempt(key)
            if attempt is not None:
                yield attempt.stages


def slow_pages(spec: DatasetSpec, num_partitions: int) -> str | None:
    """A warning for a dataset with too many partitions for checks that have them; None for others."""
    if spec.checks in ("auto", "rollup") or num_partitions <= MOST_PARTITIONS:
        return None
    return (
        f"{num_partitions:,} partitions make Dagster's pages slow: each request works out the state of the checks of "
        f"every partition, with a query of its database for each. Above {MOST_PARTITIONS:,} leave `checks` out"
    )
