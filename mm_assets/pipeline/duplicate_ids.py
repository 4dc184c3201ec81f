"""Sample ids that several partitions have: one partition refuses an id that is there twice, several do not."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from mm_assets.errors import SourceError, first_line
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.pipeline.store import DatasetStore
from mm_assets.summaries import counted

__all__ = ["duplicate_ids", "duplicates_said"]

_MEMORY = "256MiB"  # beyond that DuckDB spills to a scratch folder
_EXAMPLES = 5

# The metadata row of each sample is read, its two columns only. Ids are unique within a partition.
_DUPLICATES = """
create temp table duplicates as
select
    sample_id,
    count(*) as num_partitions,
    min(parse_filename(mm_assets_file, true)) as first_partition,
    max(parse_filename(mm_assets_file, true)) as last_partition
from read_parquet($files, filename = 'mm_assets_file', hive_partitioning = false)
where position = -1
group by sample_id
having count(*) > 1
"""


def duplicate_ids(dataset: DatasetStore, keys: Sequence[str]) -> dict[str, Any]:
    """The ids that several of these published partitions have, as the manifest holds them.

    Returns:
        `count`, the number of ids, and `examples`, the first 5 in their order: `sample_id`, `num_partitions` and the
        keys of the first and the last of them as `partitions`.

    Raises:
        SourceError: a table could not be read.
    """
    import duckdb

    if len(keys) < 2:
        return {"count": 0, "examples": []}
    table = FILTERED_ROWS.tables[0].name
    files = [dataset.duckdb_path(dataset.table(table, key)) for key in keys]
    with tempfile.TemporaryDirectory(prefix="mm-assets-ids-") as scratch, dataset.duckdb() as connection:
        connection.execute(f"set memory_limit = '{_MEMORY}'")
        connection.execute("set threads = 2")
        connection.execute("set preserve_insertion_order = false")
        connection.execute(f"set temp_directory = '{scratch}'")
        try:
            connection.execute(_DUPLICATES, {"files": files})
            ((count,),) = connection.execute("select count(*) from duplicates").fetchall()
            found = connection.execute(f"select * from duplicates order by sample_id limit {_EXAMPLES}").fetchall()
        except duckdb.Error as error:
            where = dataset.store.url_of(table)
            raise SourceError(where, f"the sample ids could not be compared: {first_line(error)}") from error
    return {
        "count": count,
        "examples": [
            {"sample_id": sample_id, "num_partitions": number, "partitions": [first, last]}
            for sample_id, number, first, last in found
        ],
    }


def duplicates_said(found: dict[str, Any]) -> str:
    """What `duplicate_ids` found, in a sentence; empty where there are none."""
    if not found["count"]:
        return ""
    first = found["examples"][0]
    return (
        f"{counted(found['count'], 'sample id')} in several partitions, {first['sample_id']!r} in "
        f"{first['num_partitions']}, {' and '.join(first['partitions'])} among them: remove the shard that repeats "
        "another, or set samples.sample_id_field to a key that is unique"
    )
