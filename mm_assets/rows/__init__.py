"""The row table: its schema, rows made from a source, content read into it, Parquet.

Rows are built as Arrow columns and streamed in batches bounded by bytes.
"""

from mm_assets.rows.base import TABLE_SOURCES, RowSource, TableSource, row_sources
from mm_assets.rows.columns import RowStream
from mm_assets.rows.file_columns import with_source_columns
from mm_assets.rows.schema import (
    MULTIMODAL_SCHEMA,
    RESERVED_COLUMNS,
    SOURCE_SCHEMA,
    DatasetSchema,
    Drop,
    MemberRules,
    UserColumn,
)
from mm_assets.rows.source_ref import (
    SourceRef,
    build_source_ref,
    from_pandas,
    parse_source_ref,
    to_pandas,
    with_parsed_source_ref_columns,
)

__all__ = [
    "MULTIMODAL_SCHEMA",
    "RESERVED_COLUMNS",
    "SOURCE_SCHEMA",
    "TABLE_SOURCES",
    "DatasetSchema",
    "Drop",
    "MemberRules",
    "RowSource",
    "RowStream",
    "SourceRef",
    "TableSource",
    "UserColumn",
    "build_source_ref",
    "from_pandas",
    "parse_source_ref",
    "row_sources",
    "to_pandas",
    "with_parsed_source_ref_columns",
    "with_source_columns",
]
