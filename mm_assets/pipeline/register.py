"""Registration: finding the shards, grouping them into partitions, and deciding the dataset's schema.

Listing never changes a shard and may run at any time. The schema is decided once, from the declaration and the first
shard by name that has samples, because every partition must conform to it; it is decided again only on request.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mm_assets.errors import ConfigError, MissingColumnError, ShardError, SourceError
from mm_assets.packing.presets import choose_plan
from mm_assets.pipeline.spec import PARTITION_KEY, DatasetSpec
from mm_assets.pipeline.store import DatasetStore, Partition
from mm_assets.rows.base import row_sources, shard_suffixes, source_formats
from mm_assets.rows.schema import DatasetSchema
from mm_assets.sources.base import index_members
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile, expand_shards
from mm_assets.summaries import counted

__all__ = ["Registration", "group_shards", "list_partitions", "register"]

MAX_PROBLEMS = 16  # unreadable shards skipped in search of the schema: a wrong declaration fails soon
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
    """

    partitions: tuple[Partition, ...]
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unsettled: tuple[str, ...]
    seen: Mapping[str, tuple[str, float]]


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


def list_partitions(
    spec: DatasetSpec, *, seen: Mapping[str, tuple[str, float]] | None = None
) -> tuple[list[Partition], list[Partition], dict[str, tuple[str, float]]]:
    """Lists the shards that have settled, as partitions.

    A shard has settled when its modification time is `settle_seconds` ago, or when `seen` says that it has had its
    fingerprint for so long. A group waits for all its shards.

    Args:
        spec: the declaration.
        seen: by URL, the fingerprint last seen and since when (seconds since 1970).

    Returns:
        The settled partitions sorted by key, those that wait for a shard, and `seen` for the next time: an entry for
        each shard that has not settled.
    """
    now = time.time()
    known = seen or {}
    settled: list[Partition] = []
    unsettled: list[Partition] = []
    young: dict[str, tuple[str, float]] = {}
    suffixes = shard_suffixes(spec.source, where=spec.where)
    for partition in group_shards(spec, expand_shards(spec.shards, spec.storage_options, suffixes=suffixes)):
        waiting = {}
        for shard in partition.shards:
            fingerprint, since = known.get(shard.url, ("", now))
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
    seen: Mapping[str, tuple[str, float]] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Registration:
    """Lists the shards, stores the partitions and, the first time, the dataset's schema.

    Args:
        dataset: the dataset's folder.
        new_schema: decide the schema again although there is one.
        wait: wait until young shards have settled and list again, instead of leaving them for next time.
        allow_empty: a place without any shard is not an error: shards may follow.
        seen: `Registration.seen` of the last time.
        sleep: waits some seconds.

    Raises:
        SourceError: no shard was found, or none that can decide the schema.
        ConfigError: the declaration's schema settings changed and `new_schema` was not given.
    """
    spec = dataset.spec
    before = dataset.partitions()
    partitions, unsettled, young = list_partitions(spec, seen=seen)
    if young and wait:
        sleep(spec.settle_seconds)
        partitions, unsettled, young = list_partitions(spec, seen=young)
    if not partitions and not young and (before or not allow_empty):
        # An unmounted folder looks like this; accepting it would empty the next manifest.
        known = f", though it held {counted(len(before), 'partition')} before" if before else ""
        raise SourceError(spec.shards, f"no shard was found there{known}")
    source = dataset.registered_source()
    if source is not None and source != spec.shards and not new_schema:
        detail = (
            f"is {spec.shards}, but the dataset at {dataset.store.url} was made from {source}: use another dataset "
            f"name or root, or, if it moved, `mm-assets register --dataset {spec.name} --new-schema`"
        )
        raise ConfigError(spec.where, "shards", detail)
    present = {p.key: p for p in partitions}
    waiting = {partition.key for partition in unsettled}
    # A partition whose shards are being replaced, or added to, remains as registered until they settle.
    kept = [p for key, p in before.items() if key not in present and key in waiting]
    everything = tuple(sorted([*partitions, *kept], key=lambda p: p.key))
    keys = {p.key for p in everything}
    if everything:
        _settle_schema(dataset, everything, new_schema=new_schema)
    if {p.key: p for p in everything} != before or source != spec.shards:
        dataset.write_partitions(everything)
    return Registration(
        partitions=everything,
        added=tuple(k for k in sorted(keys) if k not in before),
        changed=tuple(p.key for p in everything if p.key in before and before[p.key].fingerprint != p.fingerprint),
        removed=tuple(sorted(set(before) - keys)),
        unsettled=tuple(young),
        seen=young,
    )


def _settle_schema(dataset: DatasetStore, partitions: Sequence[Partition], *, new_schema: bool) -> None:
    declared = dataset.declared()
    spec = dataset.spec
    if declared is not None and not new_schema and not dataset.schema_is_provisional():
        for key, value in spec.declared.items():
            if declared.get(key) != value:
                detail = (
                    "changed since the dataset's schema was decided. Partitions must share one schema: go back, or "
                    f"decide it again for all of them with `mm-assets register --dataset {spec.name} --new-schema`"
                )
                raise ConfigError(spec.where, key, detail)
        return
    schema, decided_by = _decide_schema(spec, partitions)
    if new_schema or decided_by is not None or declared != spec.declared:
        dataset.write_schema(schema, decided_by=decided_by)


def _decide_schema(spec: DatasetSpec, partitions: Sequence[Partition]) -> tuple[DatasetSchema, str | None]:
    """The schema that the declaration and the first shard with samples give, and that shard.

    Where no shard has samples yet it is provisional: the next registration decides again. A shard that is damaged, or
    that lacks a requested column, fails its own partition when that is run, and is skipped here: it must not stop the
    others.

    Raises:
        ShardError: no shard can decide it, and the first one is damaged.
        MissingColumnError: no shard can decide it, and the first one lacks a requested column.
        SourceError: a shard could not be read.
        ConfigError: a pack field or column is not possible.
    """
    empty: DatasetSchema | None = None
    problems: list[ShardError | MissingColumnError] = []
    for url in (shard.url for partition in partitions for shard in partition.shards):
        try:
            schema, has_samples = _schema_of(spec, url)
        except (ShardError, MissingColumnError) as error:
            problems.append(error)
            if len(problems) >= MAX_PROBLEMS:
                break
            continue
        if has_samples:
            return schema, url
        empty = empty or schema
    if empty is None or len(problems) >= MAX_PROBLEMS:
        raise problems[0] if problems else SourceError(spec.shards, "no shard was found there")
    return empty, None


def _schema_of(spec: DatasetSpec, url: str) -> tuple[DatasetSchema, bool]:
    """The schema that one shard gives, and whether it has samples."""
    with SourceFile(url, spec.storage_options) as file:
        (rows_of,) = row_sources([file], spec.source, where=spec.where)
        # Walked once, for the columns and for the rows.
        index = [
            batch
            for source in rows_of.sources
            for batch in index_members(source, on_damaged_shard=spec.on_damaged_shard, damage=[])
        ]
        columns = rows_of.infer_columns(lambda: iter(index), layout=spec.samples)
        annotated = tuple(column for annotator in spec.build_annotators() for column in annotator.columns)
        schema = DatasetSchema(user_columns=columns, annotator_columns=annotated)
        rows = rows_of.rows(
            lambda: iter(index),
            layout=spec.samples,
            schema=schema,
            grouped=spec.partition_pattern is not None,
            batch_bytes=spec.batch_bytes,
        )
        batches = iter(rows)
        first = list(itertools.islice(batches, 1))
        plan = choose_plan(itertools.chain(first, batches), pack=spec.pack, where=spec.where)
    return replace(schema, pack=plan.to_json()), bool(first)
