"""Parquet files that hold files, as Hugging Face's `datasets` stores media: a row is a sample, a cell a member.

`arrow_rows` says which members a row has. Nothing in the file is trusted; a row group that cannot be read is damage.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.sources.arrow_rows import VALUE_ERRORS, ArrowRows, cell_columns, is_list_of_cells
from mm_assets.sources.features import METADATA_KEY, Features, read_features
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.member import Member, OnDamage, ShardDamage
from mm_assets.sources.row_members import KEY_COLUMN, Entry, read_entries
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile

__all__ = ["PARQUET_ERRORS", "PARQUET_MAGIC", "ParquetSource"]

PARQUET_MAGIC = b"PAR1"
PARQUET_ERRORS = (*VALUE_ERRORS, OSError)
"""What Arrow raises for a damaged file, and for values that Python does not have."""

MAX_BATCH_ROWS = 64  # a value that repeats is in the file once, and in memory in each row of a batch
BATCH_BYTES = 16 << 20  # of the rows that are decoded at a time, by the mean size of a row group's rows, beside a page
BUFFER_BYTES = 1 << 20  # of a column chunk that are read at a time from a local file
REMOTE_BUFFER_BYTES = 8 << 20  # from a remote one, where each read is a request
MAX_CONFIGS_IN_MESSAGE = 8
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")  # beside them a table describes what they hold
_SPLIT_FILE = re.compile(
    r"(?:(.*)/)?([^/]+?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.parquet"
)  # [<config>/]<split>-00000-of-00002
_SPLIT_FOLDER = re.compile(
    r"(?:(.*)/)?([^/]+)/\d{4}\.parquet"
)  # [<config>/]<split>/0000.parquet, of the Hub's own copies
_DATA_START = (
    4  # byte after the magic number: Arrow ends the process where it is asked for the place of a damaged chunk
)
_LIST_KEYS = frozenset({"path", "source_ref"})  # of a list of files, beside sample_id


class ParquetSource:
    """A Parquet file whose cells are members; see `mm_assets.sources.base.Source`.

    Rows are decoded one after the other, so that no member has a byte range.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet",)
    MARKS: ClassVar[tuple[str, ...]] = (
        *("*-00000-of-*.parquet", "*/*-00000-of-*.parquet", "*/*/*-00000-of-*.parquet"),
        *("*/0000.parquet", "*/*/0000.parquet"),
    )
    seekable = False
    text_encoding = "utf-8"  # of columns of text, in which NULs are characters

    def __init__(self, file: SourceFile) -> None:
        self._file = file

    @property
    def file(self) -> SourceFile:
        """The file."""
        return self._file

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether the bytes are those of a Parquet file."""
        return head.startswith(PARQUET_MAGIC)

    @classmethod
    def confirms(cls, file: SourceFile) -> bool:
        """Whether a Parquet file has samples, and is not a list: `sample_id` with `path` or `source_ref` names files.

        Its rows are samples if it has cells, keys, or the metadata of `datasets`.
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
        several = next((found for found in configs.values() if len(found) > 1), None)
        if several is not None:
            names = ", ".join(repr(folder + name) for name in sorted(several)[:MAX_CONFIGS_IN_MESSAGE])
            detail = (
                f"has {len(several)} configurations of a dataset, which are not mixed: name the folder of one ({names})"
            )
            raise SourceError(folder, f"{detail}, or a pattern of all files, such as '**/*.parquet'")
        return shards

    @property
    def columns(self) -> dict[str, bool]:
        """The columns that hold cells, and whether those are structs with a path; errors as `members`."""
        schema = self._table.schema_arrow
        types = ((name, schema.field(name).type) for name in cell_columns(schema))
        return {name: pa.types.is_struct(kind.value_type if is_list_of_cells(kind) else kind) for name, kind in types}

    @cached_property
    def _table(self) -> pq.ParquetFile:
        """The open file.

        Raises:
            ShardError: it is not a Parquet file, or its footer is damaged.
            SourceError: the storage failed.
        """
        head = self.file.read(0, min(HEAD_BYTES, self.file.size))
        if not self.accepts(head):
            foreign = foreign_file(head)
            detail = "is not a Parquet file" if foreign is None else foreign.as_not("a Parquet file")
            raise ShardError(self.file.url, detail, byte_offset=0)
        buffer = BUFFER_BYTES if self.file.is_local else REMOTE_BUFFER_BYTES
        try:
            opened = self.file.open()
            return pq.ParquetFile(opened, buffer_size=buffer, pre_buffer=False, page_checksum_verification=True)
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            detail = f"its footer cannot be read: {first_line(error)}; write or download the file again"
            raise ShardError(self.file.url, detail, byte_offset=max(self.file.size - 8, 0)) from error

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Every cell, text and JSON of the rows, in order; arguments and errors as `Source.members`.

        "salvage" continues at the next row group.
        """
        for entry in self._entries(on_damaged_shard, damage):
            yield entry.member

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """The content of chosen members, in one pass over the file; arguments and errors as `Source.payloads`."""
        entries = self._entries(on_damaged_shard, damage)
        yield from read_entries(self.file.url, entries, wanted=wanted, max_bytes=max_bytes, on_error=on_error)

    def listed(self, media: Sequence[str]) -> Iterator[tuple[Mapping[str, Any], Sequence[Member]]]:
        """Each row as a list of files has it: the values of the other columns, and the cells that are not null.

        A cell without bytes has a `skip_reason`, and its path as `link_target`.

        Args:
            media: the columns whose cells are wanted.

        Raises:
            ShardError: a row group cannot be read.
            SourceError: the storage failed.
        """
        rows = self._rows(features=None)
        for group, batches in self._groups(rows, [*rows.values, *media]):
            try:
                for batch in batches:
                    yield from rows.listed(batch, media)
            except SourceError:
                raise
            except PARQUET_ERRORS as error:
                raise ShardError(self.file.url, _fault(rows, group, error), byte_offset=_DATA_START) from error

    # -- rows

    def _rows(self, features: Features | None) -> ArrowRows:
        names = self._table.schema_arrow.names
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            detail = f"has several columns {repeated!a}, and columns are known by their names: rename them"
            raise ShardError(self.file.url, detail, byte_offset=max(self.file.size - 8, 0))
        folder = posixpath.basename(self.file.url).removesuffix(".parquet") or "rows"
        return ArrowRows(self.file.url, folder, self._table.schema_arrow, features)

    def _groups(
        self, rows: ArrowRows, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """The number of each row group, and its rows; sets the number of their first."""
        first = 0
        for group in range(self._table.num_row_groups):
            described = self._table.metadata.row_group(group)
            rows.number = first
            mean = max(described.total_byte_size, 1) / max(described.num_rows, 1)
            size = min(max(int(BATCH_BYTES / mean), 1), MAX_BATCH_ROWS)
            yield group, self._table.iter_batches(size, row_groups=[group], columns=columns, use_threads=False)
            first += max(described.num_rows, 0)

    def _entries(self, on_damaged: OnDamage, damage: list[ShardDamage] | None) -> Iterator[Entry]:
        rows = self._rows(read_features(self._table.schema_arrow))
        for group, batches in self._groups(rows):
            try:
                for batch in batches:
                    yield from rows.of_batch(batch)
            except SourceError:
                raise
            except PARQUET_ERRORS as error:
                detail = _fault(rows, group, error)
                if on_damaged == "fail":
                    raise ShardError(self.file.url, detail, byte_offset=_DATA_START) from error
                size = max(self._table.metadata.row_group(group).total_byte_size, 0)
                if damage is not None:
                    damage.append(ShardDamage(byte_offset=_DATA_START, byte_size=size, detail=detail))
                yield rows.lost(f"row group {group}", size, detail)


def _fault(rows: ArrowRows, group: int, error: Exception) -> str:
    """Describes what is wrong with a row group."""
    return f"row group {group}, row {rows.number} or after, cannot be read: {first_line(error)}"
