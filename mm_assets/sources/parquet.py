"""Parquet files that hold files, as Hugging Face's `datasets` stores media: a row is a sample, a cell a member.

`arrow_rows` says which members a row has. Nothing in the file is trusted; a row group that cannot be read is damage.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mm_assets.errors import LazyModule, ShardError, SourceError, first_line
from mm_assets.sources.arrow_rows import VALUE_ERRORS, ArrowRows, cell_columns, is_list_of_cells
from mm_assets.sources.entries import Entry, EntrySource, Scan
from mm_assets.sources.features import METADATA_KEY, Features, read_features
from mm_assets.sources.head import HEAD_BYTES, format_error
from mm_assets.sources.member import Member
from mm_assets.sources.row_members import KEY_COLUMN
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile

if TYPE_CHECKING:
    import pyarrow.parquet as pq
else:
    pq = LazyModule("pyarrow.parquet")

__all__ = ["PARQUET_ERRORS", "PARQUET_MAGIC", "ParquetSource", "open_parquet", "read_group"]

PARQUET_MAGIC = b"PAR1"
PARQUET_ERRORS = (*VALUE_ERRORS, OSError)
"""What Arrow raises for a damaged file, and for values that Python does not have."""

MAX_BATCH_ROWS = 64  # a value that repeats is in the file once, and in memory in each row of a batch
BATCH_BYTES = 16 << 20  # of the rows that are decoded at a time, by the mean size of a row group's rows, beside a page
BUFFER_BYTES = 1 << 20  # of a column chunk that are read at a time from a local file
REMOTE_BUFFER_BYTES = 8 << 20  # from a remote one, where each read is a request
MAX_CONFIGS_IN_MESSAGE = 8
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")  # beside them a table describes what they hold
# [<config>/]<split>-00000-of-00002.parquet, or, in the Hub's own copies, [<config>/]<split>/0000.parquet.
_SPLIT_FILE = re.compile(r"(?:(.*)/)?([^/]+?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.parquet")
_SPLIT_FOLDER = re.compile(r"(?:(.*)/)?([^/]+)/\d{4}\.parquet")
_DATA_START = len(PARQUET_MAGIC)  # Arrow ends the process when it is asked for the place of a damaged chunk
_LIST_KEYS = frozenset({"path", "source_ref"})  # of a list of files, beside sample_id


class ParquetSource(EntrySource):
    """A Parquet file whose cells are members; see `mm_assets.sources.base.Source`.

    Rows are decoded one after the other, so that no member has a byte range.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet",)
    MARKS: ClassVar[tuple[str, ...]] = (
        *("*-00000-of-*.parquet", "*/*-00000-of-*.parquet", "*/*/*-00000-of-*.parquet"),
        *("*/0000.parquet", "*/*/0000.parquet"),
    )
    seekable = False
    text_encoding = "utf-8"  # in columns of text, NULs are characters

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether the bytes start a Parquet file."""
        return head.startswith(PARQUET_MAGIC)

    @classmethod
    def confirms(cls, file: SourceFile) -> bool:
        """Returns whether a Parquet file has samples, and is not a list of files.

        Its rows are samples if it has cells, keys, or the metadata of `datasets`; a list has `sample_id` with `path` or
        `source_ref`.
        """
        try:
            names = (schema := cls(file)._table.schema_arrow).names
        except ShardError:  # as a list it is refused by name
            return False
        has_samples = bool(cell_columns(schema)) or KEY_COLUMN in names or METADATA_KEY in (schema.metadata or {})
        return has_samples and not ("sample_id" in names and _LIST_KEYS.intersection(names))

    @classmethod
    def shards_in(cls, files: Sequence[ShardFile]) -> Sequence[ShardFile] | None:
        """Returns the files of a dataset as the Hub has it, named by splits; None if one is named in another way.

        Raises:
            SourceError: a split has files of several configurations, which are datasets of their own.
        """
        ends = zip(files[0].url.split("/")[:-2], files[-1].url.split("/")[:-2], strict=False)  # of sorted ones
        folder = "".join(f"{first}/" for first, _ in takewhile(lambda pair: pair[0] == pair[1], ends))
        visible = [file for file in files if "/." not in file.url[len(folder) - 1 :]]
        shards = [file for file in visible if file.url.endswith(cls.SUFFIXES)]
        configs: defaultdict[str, set[str]] = defaultdict(set)
        for path in (shard.url[len(folder) :] for shard in shards):
            match = _SPLIT_FILE.fullmatch(path) or _SPLIT_FOLDER.fullmatch(path)
            if match is None:
                return None
            configs[match[2]].add(match[1] or "")
        if not shards or any(file.url.endswith(_ARCHIVES) for file in visible):
            return None
        folders = next((folders for folders in configs.values() if len(folders) > 1), None)
        if folders is not None:
            names = ", ".join(repr(folder + name) for name in sorted(folders)[:MAX_CONFIGS_IN_MESSAGE])
            detail = f"has {len(folders)} configurations of a dataset, which are not mixed"
            advice = f"name the folder of one ({names}), or a pattern of all files, such as '**/*.parquet'"
            raise SourceError(folder, f"{detail}: {advice}")
        return shards

    @property
    def columns(self) -> dict[str, bool]:
        """The columns that hold cells, and whether those are structs with a path; errors as `members`."""
        schema = self._table.schema_arrow
        types = ((name, schema.field(name).type) for name in cell_columns(schema))
        return {name: pa.types.is_struct(kind.value_type if is_list_of_cells(kind) else kind) for name, kind in types}

    @cached_property
    def _table(self) -> pq.ParquetFile:
        return open_parquet(self.file)

    def list_rows(self, media: Sequence[str]) -> Iterator[tuple[Mapping[str, Any], Sequence[Member]]]:
        """Yields each row as a list of files has it: the values of the other columns, and the cells that are not null.

        A cell without bytes has a `skip_reason`, and its path as `link_target`.

        Args:
            media: the columns whose cells are yielded.

        Raises:
            ShardError: a row group cannot be read.
            SourceError: the storage failed.
        """
        rows = self._rows(features=None)
        for group, batches in self._groups(rows, [*rows.values, *media]):
            try:
                for batch in batches:
                    yield from rows.list_rows(batch, media)
            except SourceError:
                raise
            except PARQUET_ERRORS as error:
                raise ShardError(self.file.url, _fault(rows, group, error), byte_offset=_DATA_START) from error

    # -- rows

    def _rows(self, features: Features | None) -> ArrowRows:
        names = self._table.schema_arrow.names
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            detail = f"has several columns {repeated!a}, and columns are identified by their names: rename them"
            raise ShardError(self.file.url, detail, byte_offset=max(self.file.size - 8, 0))
        folder = posixpath.basename(self.file.url).removesuffix(".parquet") or "rows"
        return ArrowRows(self.file.url, folder, self._table.schema_arrow, features)

    def _groups(
        self, rows: ArrowRows, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """Yields the number and the rows of each row group; sets the number of its first row in `rows`."""
        first = 0
        for group in range(self._table.num_row_groups):
            rows.number = first
            yield group, read_group(self._table, group, columns)
            first += max(self._table.metadata.row_group(group).num_rows, 0)

    def _entries(self, scan: Scan) -> Iterator[Entry]:
        rows = self._rows(read_features(self._table.schema_arrow))
        for group, batches in self._groups(rows):
            try:
                for batch in batches:
                    yield from rows.of_batch(batch)
            except SourceError:
                raise
            except PARQUET_ERRORS as error:
                detail = _fault(rows, group, error)
                size = max(self._table.metadata.row_group(group).total_byte_size, 0)
                scan.salvage(self.file.url, detail, byte_offset=_DATA_START, byte_size=size)
                yield rows.damage_entry(f"row group {group}", size, detail)


def _fault(rows: ArrowRows, group: int, error: Exception) -> str:
    """Describes what is wrong with a row group."""
    return f"row group {group}, row {rows.number} or after, cannot be read: {first_line(error)}"


def open_parquet(file: SourceFile) -> pq.ParquetFile:
    """Opens a Parquet file, whose pages are read one after the other and verified.

    Raises:
        ShardError: it is not a Parquet file, or its footer is damaged.
        SourceError: the storage failed.
    """
    head = file.read(0, min(HEAD_BYTES, file.size))
    if not head.startswith(PARQUET_MAGIC):
        raise format_error(file.url, head, "a Parquet file")
    buffer = BUFFER_BYTES if file.is_local else REMOTE_BUFFER_BYTES
    try:
        return pq.ParquetFile(file.open(), buffer_size=buffer, pre_buffer=False, page_checksum_verification=True)
    except SourceError:
        raise
    except PARQUET_ERRORS as error:
        detail = f"its footer cannot be read: {first_line(error)}; write or download the file again"
        raise ShardError(file.url, detail, byte_offset=max(file.size - 8, 0)) from error


def read_group(
    table: pq.ParquetFile, group: int, columns: Sequence[str] | None = None, *, max_rows: int = MAX_BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a row group, as many at a time as take `BATCH_BYTES` by their mean size."""
    metadata = table.metadata.row_group(group)  # not its columns: asked for a damaged one, Arrow ends the process
    mean = max(metadata.total_byte_size, 1) / max(metadata.num_rows, 1)
    size = min(max(int(BATCH_BYTES / mean), 1), max_rows)
    yield from table.iter_batches(size, row_groups=[group], columns=columns, use_threads=False)
