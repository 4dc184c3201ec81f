"""Registration: finding the shards, grouping them into partitions, and deciding the dataset's schema.

Listing never changes a shard and may run at any time. The schema is decided once, from the declaration and a sample of
the shards, because every partition must conform to it; it is decided again only on request.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.decide import Decision, decide_layout
from mm_assets.pipeline.records import Partition, Registered
from mm_assets.pipeline.shard_content import recognized
from mm_assets.pipeline.spec import PARTITION_KEY, DatasetSpec, plain
from mm_assets.pipeline.store import DatasetStore
from mm_assets.rows.base import shard_suffixes, source_formats
from mm_assets.storage.listing import ShardFile, expand_shards
from mm_assets.storage.urls import filesystem, is_local, local_path, protocols
from mm_assets.summaries import counted

__all__ = [
    "Registration",
    "group_shards",
    "list_partitions",
    "no_shards",
    "refusal",
    "register",
    "registration_fault",
]

MAX_KEY = 200  # a file name has 255 bytes at most, and ours add a digest, an extension and dots


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
        decision: the dataset's layout, where this registration decided it.
    """

    partitions: tuple[Partition, ...]
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unsettled: tuple[str, ...]
    seen: Mapping[str, tuple[str, float]]
    decision: Decision | None = None


def _glob_root(pattern: str, suffixes: tuple[str, ...]) -> str:
    """The folder part of a pattern before its first wildcard, with a final slash."""
    head = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    if head == pattern and not head.lower().endswith(suffixes):
        return head.rstrip("/") + "/"
    return head.rsplit("/", 1)[0] + "/" if "/" in head else ""


def group_shards(spec: DatasetSpec, shards: Iterable[ShardFile]) -> list[Partition]:
    """Turns shards into partitions by the declaration's pattern, or each shard into one.

    Raises:
        ConfigError: a key is not allowed, a path does not match the pattern, or two shards take one key without one.
    """
    pattern = re.compile(spec.partition_pattern) if spec.partition_pattern else None
    formats = source_formats(spec.source, where=spec.where)
    suffixes = tuple(suffix for found in formats.values() for suffix in found.SUFFIXES)
    root = _glob_root(spec.shards, suffixes)
    groups: dict[str, list[ShardFile]] = {}
    for shard in sorted(shards, key=lambda s: s.url):
        base = shard.url.rsplit("/", 1)[-1]
        if pattern is None:
            key = next((base[: -len(s)] for s in suffixes if base.lower().endswith(s)), base)
        else:
            at = shard.url.find(root) if root else -1
            path = shard.url[at + len(root) :] if at >= 0 else base
            match = pattern.search(path)
            if match is None:
                raise ConfigError(spec.where, "partition_pattern", f"{pattern.pattern!r} does not match {path!r}")
            key = match["partition"] if "partition" in pattern.groupindex else match[1]
        if not key or not PARTITION_KEY.fullmatch(key) or key.startswith(".") or len(key) > MAX_KEY:
            detail = f"shard {shard.url} gives the key {key!r}; allowed are up to {MAX_KEY} letters, digits, . _ and -"
            raise ConfigError(spec.where, "partition_pattern" if pattern else "shards", detail)
        if pattern is None and key in groups:
            detail = f"{groups[key][0].url} and {shard.url} would both be partition {key!r}: set partition_pattern"
            raise ConfigError(spec.where, "shards", detail)
        groups.setdefault(key, []).append(shard)
    return [Partition(key=key, shards=tuple(group)) for key, group in sorted(groups.items())]


def no_shards(spec: DatasetSpec, *, registered: int = 0) -> SourceError:
    """The error of a place without shards, which had those of so many partitions."""
    more = f", though it held {counted(registered, 'partition')} before" if registered else ""
    named = "" if spec.where == "arguments" else f" (`shards` of {spec.where})"
    said = f"no shard was found there{more}{named}"
    if is_local(spec.shards):
        place = re.split(r"[*?\[]", spec.shards, maxsplit=1)[0]
        folder = place if place == spec.shards else os.path.dirname(place)
        if folder and not os.path.lexists(local_path(folder)):
            what = "such file or folder" if place == spec.shards else f"folder {local_path(folder)}"
            return SourceError(spec.shards, f"{said}: there is no {what}")
    elif (bucket := _missing_bucket(spec)) is not None:
        return SourceError(spec.shards, f"{said}: there is no bucket {bucket}, or the credentials may not see it")
    suffixes = " ".join(shard_suffixes(spec.source, where=spec.where))
    return SourceError(
        spec.shards,
        f"{said}: give a folder with names that end in {suffixes}, a glob such as '*.parquet' for Parquet files and "
        "lists, or one file",
    )


def _missing_bucket(spec: DatasetSpec) -> str | None:
    """The bucket of the shards if it cannot be listed; None for another storage too."""
    fs, path = filesystem(spec.shards, spec.storage_options)
    bucket = path.partition("/")[0]
    return bucket if "s3" in protocols(fs) and not fs.exists(bucket) else None


def list_partitions(
    spec: DatasetSpec, *, seen: Mapping[str, tuple[str, float]] | None = None, known: Iterable[Partition] = ()
) -> tuple[list[Partition], list[Partition], dict[str, tuple[str, float]]]:
    """Lists the shards that have settled, as partitions.

    A shard has settled when its modification time is `settle_seconds` ago, or when `seen` says that it has had its
    fingerprint for so long. A group waits for all its shards.

    Args:
        spec: the declaration.
        seen: by URL, the fingerprint last seen and since when (seconds since 1970).
        known: the partitions as registered.

    Returns:
        The settled partitions sorted by key, those that wait for a shard, and `seen` for the next time: an entry for
        each shard that has not settled.
    """
    now = time.time()
    before = seen or {}
    settled: list[Partition] = []
    unsettled: list[Partition] = []
    young: dict[str, tuple[str, float]] = {}
    suffixes = shard_suffixes(spec.source, where=spec.where)
    urls = (shard.url for partition in known for shard in partition.shards)
    listed = expand_shards(spec.shards, spec.storage_options, suffixes=suffixes, known=urls)
    for partition in group_shards(spec, listed):
        waiting = {}
        for shard in partition.shards:
            fingerprint, since = before.get(shard.url, ("", now))
            since = since if fingerprint == shard.fingerprint else now
            age = 0.0 if shard.modified is None else now - shard.modified
            if max(now - since, age) < spec.settle_seconds:
                waiting[shard.url] = shard.fingerprint, since
        (unsettled if waiting else settled).append(partition)
        young |= waiting
    return settled, unsettled, young


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
        ConfigError: the declaration's schema settings changed and `new_schema` was not given.
    """
    spec = dataset.spec
    stored = dataset.registered()
    partitions, unsettled, young = list_partitions(spec, seen=seen, known=stored.partitions.values())
    before, source, declared = stored.partitions, stored.source, _decided_with(stored)
    if young and wait:
        sleep(spec.settle_seconds)
        partitions, unsettled, young = list_partitions(spec, seen=young, known=before.values())
    if not partitions and not young and (before or not allow_empty):
        # An unmounted folder looks like this; accepting it would empty the next manifest.
        raise no_shards(spec, registered=len(before))
    fault = None if new_schema else _refusal(dataset, source, declared)
    if fault is not None:
        raise fault
    partitions = [recognized(dataset, before.get(p.key), p) for p in partitions]
    present = {p.key: p for p in partitions}
    waiting = {partition.key for partition in unsettled}
    # A partition whose shards are being replaced, or added to, remains as registered until they settle.
    kept = [p for key, p in before.items() if key not in present and key in waiting]
    everything = tuple(sorted([*partitions, *kept], key=lambda p: p.key))
    keys = {p.key for p in everything}
    decision = None
    if everything and (new_schema or declared is None):
        decision = decide_layout(spec, sorted({shard.url for p in everything for shard in p.shards}))
        if not dry_run:
            _store(dataset, decision, stored, new_schema=new_schema)
    if not dry_run and ({p.key: p for p in everything} != before or source != spec.shards):
        dataset.write_partitions(everything)
    return Registration(
        partitions=everything,
        added=tuple(k for k in sorted(keys) if k not in before),
        changed=tuple(p.key for p in everything if p.key in before and before[p.key].fingerprints != p.fingerprints),
        removed=tuple(sorted(set(before) - keys)),
        unsettled=tuple(young),
        seen=young,
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
    stored = dataset.registered()
    return _refusal(dataset, stored.source, _decided_with(stored))


def _refusal(dataset: DatasetStore, source: str | None, declared: Mapping[str, object] | None) -> ConfigError | None:
    spec = dataset.spec
    if source is not None and source != spec.shards:
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
    of_samples = before.get("samples", {})
    # An earlier release stored fewer settings: what one of those was then is unknown, unless it did not exist.
    stored = {name: of_samples.get(name, plain(value)) for name, value in after["samples"].items()}
    if "roles" not in of_samples:
        stored["roles"] = None
    names = sorted(name for name, value in after["samples"].items() if stored[name] != value)
    keys = sorted(key for key in before.keys() | after.keys() if key != "samples" and before.get(key) != after.get(key))
    return [*(f"samples.{name}" for name in names), *keys]


def _decided_with(stored: Registered) -> Mapping[str, object] | None:
    """The settings that decided the stored schema; None where there is none, or one that no sample decided."""
    found: Mapping[str, object] | None = None if stored.schema_is_provisional else stored.declared
    return found


def _store(dataset: DatasetStore, decision: Decision, stored: Registered, *, new_schema: bool) -> None:
    """Stores a decision, that without any sample once for the same settings."""
    if new_schema or decision.decided_by is not None or stored.declared != dataset.spec.declared:
        dataset.write_schema(replace(decision.schema, evidence=decision.evidence()), decided_by=decision.decided_by)
