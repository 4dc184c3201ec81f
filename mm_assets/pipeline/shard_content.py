"""Which version of a local shard a file is: by its bytes, where its times alone cannot tell.

A file's size and modification time stay the same where another file replaces it and takes over its time, and differ
where a copy or a `touch` leaves its bytes alone. Where one of its times differs from those registered, its bytes are
compared with the checksum that the stage recorded which last read them all.
"""

from __future__ import annotations

from dataclasses import replace

from mm_assets.errors import SchemaMismatchError, SourceError
from mm_assets.formats import crc32c
from mm_assets.pipeline.chain import MATERIALIZED_ROWS, RAW_SHARDS
from mm_assets.pipeline.records import Partition
from mm_assets.pipeline.store import DatasetStore
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile

__all__ = ["content_digest", "recognized"]

_CHUNK = 4 << 20


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


def recognized(dataset: DatasetStore, before: Partition | None, found: Partition) -> Partition:
    """A partition as listed, whose local shards have the registered fingerprints where their bytes are the same.

    Args:
        dataset: the dataset's folder.
        before: the partition as registered, if it was.
        found: the partition as listed.

    Returns:
        The partition with a fingerprint of its own for each shard whose bytes changed without its size and time.
    """
    if before == found or all(shard.times is None for shard in found.shards):
        return found
    known = {} if before is None else {shard.url: shard for shard in before.shards}
    shards = (
        _recognized(dataset, found.key, known[shard.url], shard) if shard.url in known else shard
        for shard in found.shards
    )
    return replace(found, shards=tuple(shards))


def _recognized(dataset: DatasetStore, key: str, before: ShardFile, found: ShardFile) -> ShardFile:
    if found.times is None or found.size != before.size:
        return found
    if found.times == before.times:
        return before
    recorded = _recorded(dataset, key, before)
    if recorded is None:
        return found
    try:
        with SourceFile(found.url, dataset.spec.storage_options) as file:
            digest = content_digest(file)
    except SourceError:  # the stage that reads it will say so
        return found
    return replace(found, fingerprint=before.fingerprint if digest == recorded else f"{found.fingerprint}-{digest}")


def _recorded(dataset: DatasetStore, key: str, shard: ShardFile) -> str | None:
    """The digest of the registered version of a shard, or None where nothing has read all of it."""
    _, _, digest = shard.fingerprint.split("-") if shard.fingerprint.count("-") == 2 else ("", "", None)
    if digest is not None or shard.times is None:
        return digest
    try:
        records = dataset.records(key)
    except (SourceError, SchemaMismatchError):  # damaged, or of an earlier version
        return None
    if {RAW_SHARDS, MATERIALIZED_ROWS} <= records.keys() and (
        records[RAW_SHARDS].inputs.get(shard.url) == shard.fingerprint
    ):
        return records[MATERIALIZED_ROWS].inputs.get(shard.url)
    return None
