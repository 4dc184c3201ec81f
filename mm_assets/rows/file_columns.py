"""The columns `source` and `source_member`: what `source_ref` says, as structs that other programs read.

`source` has the fields of Parquet's logical type FILE: bytes `offset` to `offset + size` of the file `uri`, or the
whole file, such as that of a member of a folder. It is null if the content is not a range of a file, as a member of a
compressed shard. `source_member` has what FILE has no field for: the member, the file that contains it, and the frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from mm_assets.errors import LazyModule
from mm_assets.rows.schema import MULTIMODAL_SCHEMA, SOURCE_SCHEMA
from mm_assets.rows.source_ref import with_parsed_source_ref_columns
from mm_assets.sources.compressed import is_compressed

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = ["is_stored_content", "with_checksums", "with_source_columns"]


def with_source_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns rows with the columns of `SOURCE_SCHEMA` after those of `MULTIMODAL_SCHEMA`, made from `source_ref`.

    Raises:
        SourceError: a locator is not valid.
    """
    refs = with_parsed_source_ref_columns(batch.select(["source_ref"]), prefix="")
    path, member, offset, size, frame = (column.combine_chunks() for column in refs.columns[1:])
    in_folder = pc.and_(pc.and_(pc.ends_with(path, "/"), pc.invert(pc.starts_with(path, "http"))), member.is_valid())
    in_folder = pc.fill_null(pc.and_not(in_folder, offset.is_valid()), False)
    uri = pc.if_else(in_folder, pc.binary_join_element_wise(path, member, ""), path)
    is_range = pc.or_(pc.or_(offset.is_valid(), in_folder), pc.and_(path.is_valid(), member.is_null()))
    file = {"uri": pc.if_else(is_range, uri, None), "offset": offset, "size": pc.if_else(is_range, size, None)}
    place = {"container": pc.if_else(member.is_valid(), path, None), "member": member, "frame_index": frame}
    made = {
        "source": _struct("source", file, is_range),
        "source_member": _struct("source_member", place, pc.or_(member.is_valid(), frame.is_valid())),
    }
    fields = [field for field in batch.schema if field.name not in made]
    fields[len(MULTIMODAL_SCHEMA) : len(MULTIMODAL_SCHEMA)] = SOURCE_SCHEMA
    columns = dict(zip(batch.schema.names, batch.columns, strict=True)) | made
    rows = pa.RecordBatch.from_arrays([columns[field.name] for field in fields], schema=pa.schema(fields))
    return with_checksums(rows)


def with_checksums(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns rows whose `source` describes the bytes that it locates, as far as the row has them; others as they are.

    These bytes are the row's content unless that is a text, a frame or decompressed. The checksum is that of
    `binary_content`, and null without it.
    """
    if "source" not in batch.schema.names:
        return batch  # of a table of another program, or of an earlier release
    source, place = batch.column("source"), batch.column("source_member")
    parts = {field.name: source.field(field.name) for field in source.type}
    member, frame = place.field("member"), place.field("frame_index")
    is_content = is_stored_content(pc.coalesce(member, parts["uri"]), frame)
    is_content = pc.and_(is_content, pc.and_(source.is_valid(), pc.not_equal(batch.column("modality"), "text")))
    parts["content_type"] = pc.if_else(is_content, batch.column("content_type"), None)
    parts["checksum"] = _checksums(batch.column("binary_content"), is_content)
    at = batch.schema.get_field_index("source")
    return batch.set_column(at, batch.schema.field(at), _struct("source", parts, source.is_valid()))


def is_stored_content(names: Any, frames: Any) -> Any:
    """Returns of which locators the bytes are the content as it is stored: of no single frame, and not compressed.

    Args:
        names: array of the names of members, or of files without members.
        frames: array of the numbers of frames, null for the whole content.
    """
    # Only the name as a whole says whether a member is opened; few end like one that is.
    ends = pc.match_substring_regex(names, r"\.(gz|bz2|xz|zst)$", ignore_case=True)
    compressed = np.zeros(len(names), np.bool_)
    odd = pc.indices_nonzero(pc.fill_null(ends, False)).to_pylist()
    compressed[[row for row in odd if is_compressed(names[row].as_py())]] = True
    return pc.and_(frames.is_null(), pa.array(~compressed))


def _checksums(contents: Any, wanted: Any) -> Any:
    """The checksum of each wanted content, as the specification of FILE writes it: its algorithm, then its digits."""
    rows = pc.indices_nonzero(pc.and_(wanted, contents.is_valid())).to_pylist()
    checksums: list[str | None] = [None] * len(contents)
    for row in rows:
        checksums[row] = f"CRC32C:{crc32c(contents[row].as_buffer()):08x}"
    return pa.array(checksums, pa.string())


def _struct(name: str, parts: Mapping[str, Any], is_valid: Any) -> pa.StructArray:
    """A column of `SOURCE_SCHEMA`; what `parts` lacks is null."""
    fields = list(SOURCE_SCHEMA.field(name).type)
    arrays = [parts[field.name] if field.name in parts else pa.nulls(len(is_valid), field.type) for field in fields]
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=pc.invert(is_valid))
