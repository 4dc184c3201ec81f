"""Sample ids that several partitions have: one partition refuses an id that is there twice, several do not.

The ids of published partitions are kept in two files of the cache, so that a manifest reads those of new partitions
only. New ones are added to the small file, which is merged into the large one when it has grown.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mm_assets.dataset.manifest import FILE_DIGITS, file_path
from mm_assets.errors import LazyModule, SourceError, first_line, temporary_disk_named
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.rows.parquet import open_table, read_batches
from mm_assets.rows.schema import FILE_COLUMN
from mm_assets.rows.sql import parquet_relation, partition_of, sql_text
from mm_assets.summaries import counted

if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:
    pc = LazyModule("pyarrow.compute")
    pq = LazyModule("pyarrow.parquet")

__all__ = ["duplicate_ids", "format_duplicates"]

_TABLE = FILTERED_ROWS.tables[0].name
_MEMORY = "256MiB"  # beyond that DuckDB spills to a scratch folder
_EXAMPLES = 5
_LARGE, _SMALL = "cache/sample_ids.parquet", "cache/new_sample_ids.parquet"
_SHARE = 0.25  # of the partitions in the large file that the small one may have, or that are gone from the large one
_DIGESTS = b"mm_assets.digests"  # in a file's metadata: digest of `filtered_rows` of each of its partitions, as JSON
_EMPTY = pa.schema([("partition", pa.string()), ("sample_id", pa.string())])

# The metadata row of each sample is read, its two columns only. Ids are unique within a partition.
_OF_TABLES = f"""
insert into new_ids
select {partition_of(FILE_COLUMN)} as partition, sample_id
from {parquet_relation("$files", is_list=True, filename=sql_text(FILE_COLUMN))}
where position = -1
"""

_READS = 16  # remote tables at a time: each waits for the storage most of its time
_BATCH_BYTES = 4 << 20
_COLUMNS = ("sample_id", "position")

_DUPLICATES = """
create temp table duplicates as
select
    sample_id,
    count(*) as num_partitions,
    min(partition) as first_partition,
    max(partition) as last_partition
from {ids}
group by sample_id
having count(*) > 1
"""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file of the cache: where a copy of it is, and the partitions whose ids it has as they are now."""

    path: str
    num_partitions: int
    keys: frozenset[str]


def duplicate_ids(
    dataset: DatasetStore, files: Mapping[str, tuple[int, str]], *, unique: Collection[str] = ()
) -> dict[str, Any]:
    """The ids that several published partitions have, as the manifest holds them.

    Args:
        dataset: the dataset's folder.
        files: by partition key, bytes and SHA-256 of its `filtered_rows`.
        unique: keys of partitions of which no two have an id in common: only the ids of the others are compared.

    Returns:
        `count`, the number of ids, and `examples`, the first 5 in their order: `sample_id`, `num_partitions` and the
        keys of the first and the last of them as `partitions`.

    Raises:
        SourceError: a table could not be read.
    """
    import duckdb

    # A record has all digits, and a manifest the first ones: the ids are the same.
    tables = {key: sha256[:FILE_DIGITS] for key, (_, sha256) in files.items()}
    suspects = tables.keys() - set(unique)
    if len(tables) < 2 or not suspects:
        return {"count": 0, "examples": []}
    with (
        temporary_disk_named(),
        tempfile.TemporaryDirectory(prefix="mm-assets-ids-") as scratch,
        dataset.duckdb() as connection,
    ):
        connection.execute(f"set memory_limit = '{_MEMORY}'")
        connection.execute("set threads = 2")
        connection.execute("set preserve_insertion_order = false")
        connection.execute(f"set temp_directory = {sql_text(scratch)}")
        large = _kept(dataset, _LARGE, tables, Path(scratch))
        small = _kept(dataset, _SMALL, {k: v for k, v in tables.items() if k not in large.keys}, Path(scratch))
        new = tables.keys() - large.keys - small.keys
        try:
            _select(connection, dataset, {"large": large, "small": small}, {key: files[key] for key in new})
            connection.register("suspect_keys", pa.table({"partition": pa.array(sorted(suspects), pa.string())}))
            connection.execute(
                f"create temp view suspects as select sample_id from {'new_ids' if suspects <= new else 'ids'} "
                "semi join suspect_keys using (partition)"
            )
            ids = "ids semi join suspects using (sample_id)" if unique else "ids"
            connection.execute(_DUPLICATES.format(ids=ids))
            ((count,),) = connection.execute("select count(*) from duplicates").fetchall()
            found = connection.execute(f"select * from duplicates order by sample_id limit {_EXAMPLES}").fetchall()
        except duckdb.Error as error:
            if large.num_partitions or small.num_partitions:  # a file of the cache may be damaged: all tables are read
                dataset.store.delete(_LARGE)
                dataset.store.delete(_SMALL)
                return duplicate_ids(dataset, files, unique=unique)
            where = dataset.store.url_of(_TABLE)
            raise SourceError(where, f"the sample ids could not be compared: {first_line(error)}") from error
        in_small = new | small.keys
        surplus = max(len(in_small), large.num_partitions - len(large.keys))
        if surplus > _SHARE * len(large.keys):
            _keep(dataset, connection, _LARGE, "ids", tables)
            if small.num_partitions:
                dataset.store.delete(_SMALL)
        elif new or small.num_partitions > len(small.keys):
            _keep(dataset, connection, _SMALL, "small_ids union all from new_ids", {k: tables[k] for k in in_small})
    return {
        "count": count,
        "examples": [
            {"sample_id": sample_id, "num_partitions": number, "partitions": [first, last]}
            for sample_id, number, first, last in found
        ],
    }


def _kept(dataset: DatasetStore, name: str, tables: Mapping[str, str], scratch: Path) -> _Kept:
    """A file of the cache; one without partitions where it is missing or damaged: the tables are read then."""
    store = dataset.store
    with suppress(SourceError, OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        if not store.is_local:
            store = store.copy(name, scratch)
        path = store.local_path(name)
        digests = json.loads(pq.read_metadata(path).metadata[_DIGESTS])
        keys = frozenset(key for key, digest in digests.items() if tables.get(key) == digest)
        return _Kept(str(path), len(digests), keys)
    path = scratch / Path(name).name
    pq.write_table(_EMPTY.empty_table(), path)
    return _Kept(str(path), 0, frozenset())


def _select(
    connection: Any, dataset: DatasetStore, kept: Mapping[str, _Kept], new: Mapping[str, tuple[int, str]]
) -> None:
    """Makes the views `large_ids`, `small_ids` and `new_ids`, and `ids` of all of them: of each partition once.

    `new` are the partitions whose tables are read, with bytes and SHA-256 of these.
    """
    for name, file in kept.items():
        connection.register(f"{name}_keys", pa.table({"partition": pa.array(sorted(file.keys), pa.string())}))
        connection.execute(
            f"create temp view {name}_ids as select partition, sample_id from {parquet_relation(sql_text(file.path))} "
            f"semi join {name}_keys using (partition)"
        )
    connection.execute("create temp table new_ids (partition varchar, sample_id varchar)")
    if new and dataset.store.is_local:
        files = [dataset.duckdb_path(file_path(_TABLE, key, sha256)) for key, (_, sha256) in sorted(new.items())]
        connection.execute(_OF_TABLES, {"files": files})
    elif new:
        _read_remote(connection, dataset, sorted(new.items()))
    connection.execute("create temp view ids as from large_ids union all from small_ids union all from new_ids")


def _read_remote(connection: Any, dataset: DatasetStore, tables: Sequence[tuple[str, tuple[int, str]]]) -> None:
    """Adds the ids of tables in an object store, of which DuckDB would ask for each size ten times."""
    with ThreadPoolExecutor(_READS, thread_name_prefix="ids") as pool:
        for first in range(0, len(tables), _READS):
            found = pa.concat_tables(
                pool.map(partial(_read, dataset), *zip(*tables[first : first + _READS], strict=True))
            )
            connection.register("found", found)
            connection.execute("insert into new_ids from found")
            connection.unregister("found")


def _read(dataset: DatasetStore, key: str, table: tuple[int, str]) -> pa.Table:
    """The sample ids of a partition, which are unique in it: those of the metadata row of each sample."""
    size, sha256 = table
    name = file_path(_TABLE, key, sha256)
    file = open_table(dataset.store, name, size=size)
    try:
        ids = [
            batch.filter(pc.equal(batch["position"], -1))["sample_id"].cast(pa.string())
            for batch in read_batches(file, batch_bytes=_BATCH_BYTES, columns=_COLUMNS, name=dataset.store.url_of(name))
        ]
    finally:
        file.close(force=True)
    found = pa.chunked_array(ids, pa.string())
    return pa.table({"partition": pa.repeat(pa.scalar(key, pa.string()), len(found)), "sample_id": found}, _EMPTY)


def _keep(dataset: DatasetStore, connection: Any, name: str, relation: str, tables: Mapping[str, str]) -> None:
    """Replaces a file of the cache."""
    digests = json.dumps(tables, sort_keys=True)
    # Where another process is writing it, its ids are as good; a disk that is full fails the manifest right after.
    with suppress(SourceError), dataset.store.draft(name, durable=False) as draft:
        connection.execute(
            f"copy (from {relation}) to {sql_text(str(draft.path))} "
            f"(format parquet, compression zstd, kv_metadata {{{sql_text(_DIGESTS.decode())}: {sql_text(digests)}}})"
        )


def format_duplicates(found: dict[str, Any]) -> str:
    """What `duplicate_ids` found, in a sentence; empty where there are none."""
    if not found["count"]:
        return ""
    first = found["examples"][0]
    return (
        f"{counted(found['count'], 'sample id')} in several partitions, {first['sample_id']!r} in "
        f"{first['num_partitions']}, {' and '.join(first['partitions'])} among them: remove the shard that repeats "
        "another, or set samples.sample_id_field to a key that is unique"
    )
