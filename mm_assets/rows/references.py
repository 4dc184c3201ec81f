"""Rows whose media stay in their shards: a table has the size and the CRC-32C of each item in place of its bytes.

`ReferenceSink` writes such a table of rows with media. `with_media` reads the media again, by the locators of the rows,
and compares each item with both numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from mm_assets.errors import LazyModule, SchemaMismatchError, SourceError
from mm_assets.rows.columns import views
from mm_assets.rows.parquet import ParquetSink
from mm_assets.rows.schema import CHECKSUM_COLUMN, SIZE_COLUMN
from mm_assets.rows.source_ref import parse_source_ref

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = ["FETCHED_BY", "ReferenceSink", "reference_schema", "with_media"]

MEDIA, SIZE, CHECKSUM = "binary_content", SIZE_COLUMN, CHECKSUM_COLUMN
_REFERENCES = (pa.field(SIZE, pa.int64()), pa.field(CHECKSUM, pa.uint32()))

FETCHED_BY = (
    *("sample_id", "position", "modality", "content_type", MEDIA, "source_ref", "materialize_error"),
    *(SIZE, CHECKSUM),
)
"""The columns that `with_media` needs."""


def reference_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of a row table with references in place of media.

    Raises:
        SchemaMismatchError: a column of the dataset has the name of one of them.
    """
    if taken := {SIZE, CHECKSUM}.intersection(schema.names):
        detail = "without media a table has columns of its own that are called so"
        raise SchemaMismatchError(
            f"column {', '.join(sorted(taken))}: {detail}: leave it out by `samples.user_columns`"
        )
    return pa.schema([*schema, *_REFERENCES])


class ReferenceSink(ParquetSink):
    """A `ParquetSink` with the `reference_schema` of the batches that it is given, whose media it leaves out."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds rows; errors as those of a `ParquetSink`."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True)) | _measured(batch.column(MEDIA))
        columns[MEDIA] = pa.nulls(batch.num_rows, batch.schema.field(MEDIA).type)
        super().write(pa.RecordBatch.from_arrays(list(columns.values()), schema=reference_schema(batch.schema)))


def with_media(
    batches: Iterable[pa.RecordBatch],
    fetch: Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    *,
    table: str,
    advice: str,
) -> Iterator[pa.RecordBatch]:
    """Rows of a table with references, with their media and without the references.

    Args:
        batches: rows with the columns `FETCHED_BY` at least.
        fetch: fills `binary_content` by the locators of the rows; it keeps rows, their order and their other columns.
        table: the table whose references these are, of which an error speaks.
        advice: what makes that table again.

    Raises:
        SourceError: while iterating, an item cannot be read, or is not what it was.
    """
    for batch in fetch(batches):
        if fault := _difference(batch):
            raise SourceError(table, f"{fault}: {advice}")
        yield batch.select([name for name in batch.schema.names if name not in (SIZE, CHECKSUM)])


def _measured(media: Any) -> dict[str, Any]:
    """Size and CRC-32C of each item, null where there is none, by the names of their columns."""
    sums = [None if value is None else crc32c(value) for value in views(pa.chunked_array([media]))]
    return {SIZE: pc.cast(pc.binary_length(media), pa.int64()), CHECKSUM: pa.array(sums, pa.uint32())}


def _difference(batch: pa.RecordBatch) -> str | None:
    """How the media of the first such row are not those that were there when the references were made, or None."""
    found = _measured(batch.column(MEDIA))
    differs = np.zeros(batch.num_rows, np.bool_)
    for name, values in found.items():
        here, there = (
            pc.fill_null(pc.cast(values, pa.int64()), -1),
            pc.fill_null(batch.column(name).cast(pa.int64()), -1),
        )
        differs |= pc.not_equal(here, there).to_numpy(zero_copy_only=False)
    if not differs.any():
        return None
    row = int(np.flatnonzero(differs)[0])
    said = {name: batch.column(name)[row].as_py() for name in FETCHED_BY if name != MEDIA}
    source = parse_source_ref(said["source_ref"])
    file = " of ".join(filter(None, (source.member, source.path)))
    place = f"the media of sample {said['sample_id']!r}, position {said['position']}, in {file}"
    size, checksum = found[SIZE][row].as_py(), found[CHECKSUM][row].as_py()
    if said[SIZE] is not None and size is None:
        return f"{place} cannot be read again: {said['materialize_error']}"
    was, now = (f"{a} bytes with CRC-32C {b}" for a, b in ((said[SIZE], said[CHECKSUM]), (size, checksum)))
    return f"{place} are not what they were: found {now}, expected {was}"
