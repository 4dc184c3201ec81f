"""Defines an export format: the writer of one shard, and the files that describe all shards together.

A sample is a key, its JSON, and a part for each packed modality: a file, or a list of files. A file has the suffix and
the bytes that it would have as a member of a tar, so that every format can be packed to the same sample again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mm_assets.fields import Field
from mm_assets.json_text import parse_json
from mm_assets.media.content_types import Buffer
from mm_assets.sources import Source
from mm_assets.sources.arrays import npy_bytes
from mm_assets.sources.row_members import KEY_COLUMN, MEMBERS_COLUMN
from mm_assets.storage.store import Store

__all__ = [
    "JSON_COLUMN",
    "SAMPLE_COLUMNS",
    "Export",
    "ExportColumn",
    "ExportFile",
    "ExportSample",
    "ShardFacts",
    "ShardWriter",
    "read_files",
]

JSON_COLUMN = "json"
SAMPLE_COLUMNS = (KEY_COLUMN, JSON_COLUMN, MEMBERS_COLUMN)
"""Columns that every sample has in formats with named columns, beside one for each part."""

MAX_CONCURRENT_READS = 16  # each waits for the storage most of its time


def read_files(store: Store, names: Iterable[str]) -> list[bytes]:
    """Reads small files, several at a time; raises `SourceError` if one is missing."""
    with ThreadPoolExecutor(MAX_CONCURRENT_READS, thread_name_prefix="exports") as pool:
        return list(pool.map(store.read_bytes, names))


class ExportFile(NamedTuple):
    """One file of a sample.

    Attributes:
        suffix: the part of the file's name after the sample's key: ``[role.]extension``.
        content: the bytes, or the array of an ``.npy`` file, which a format may store as a tensor.
        order: position among the files of the sample; files of one column need not be adjacent.
    """

    suffix: str
    content: Buffer | npt.NDArray[Any]
    order: int = 0

    @property
    def data(self) -> Buffer:
        """The bytes of the file."""
        return npy_bytes(self.content) if isinstance(self.content, np.ndarray) else self.content


class ExportSample(NamedTuple):
    """One sample.

    Attributes:
        key: unique among the samples of a shard.
        json: the sample's JSON text, or None if it has none.
        parts: for each column a file, a list of files ordered by their positions, or None if the sample has neither.
        number: index among all exported samples, from 0.
    """

    key: str
    json: str | None
    parts: Mapping[str, ExportFile | Sequence[ExportFile] | None]
    number: int = 0

    @property
    def value(self) -> Mapping[str, Any]:
        """The object in the JSON; empty if the sample has none."""
        value = None if self.json is None else parse_json(self.json, max_depth=None)
        return value if isinstance(value, dict) else {}

    def columns(self) -> list[tuple[str, ExportFile]]:
        """Returns all files except the JSON in order, each with its column."""
        files = [
            (column, file)
            for column, part in self.parts.items()
            if part is not None
            for file in ([part] if isinstance(part, ExportFile) else part)
        ]
        return sorted(files, key=lambda item: item[1].order)

    def files(self) -> Iterator[ExportFile]:
        """Yields all files, the JSON first."""
        if self.json is not None:
            yield ExportFile("json", self.json.encode())
        yield from (file for _, file in self.columns())

    def members(self, *, sized: Iterable[str] = ()) -> str:
        """Returns the value of the column `__members__`, from which `mm_assets.sources.row_members` restores the names.

        Args:
            sized: columns that store the files of a list as one value.
        """
        joined = set(sized)
        entries = [
            [column, file.suffix, len(memoryview(file.data).cast("B"))] if column in joined else [column, file.suffix]
            for column, file in self.columns()
        ]
        return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportColumn:
    """A column of parts, which has the same type in every sample.

    Attributes:
        name: the packed modality.
        field: its field, or None if its type is unknown; the stored bytes are the file then.
        is_list: whether a part is a list of files.
        kind: "text" for UTF-8, "array" for arrays of numbers, "file" for any other bytes; of a list, the kind of all
            its files.
    """

    name: str
    field: Field | None
    is_list: bool
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """One complete shard.

    Attributes:
        number: index of the shard, from 0.
        num_samples: number of samples.
        files: names of its files, relative to the export's folder.
        num_bytes: total size of these files in bytes.
        digest: SHA-256 of one line for each file of each sample: key, suffix, size and CRC-32C.
        details: what `ShardWriter.close` returned, as JSON.
    """

    number: int
    num_samples: int
    files: Sequence[str]
    num_bytes: int
    digest: str
    details: Mapping[str, Any] = field(default_factory=dict)


class ShardWriter(Protocol):
    """Writes one shard to files in a local folder."""

    def write(self, sample: ExportSample) -> None:
        """Appends a sample.

        Raises:
            EncodeError: the format cannot store it; the message names the value and the reason.
        """

    def close(self) -> Mapping[str, Any]:
        """Completes the files, and returns what `Export.finish` needs beside `ShardFacts`, as JSON."""

    def abort(self) -> None:
        """Closes the files of an incomplete shard; called after any error, also one of `close`."""


class Export(Protocol):
    """A format that samples are exported to.

    Three static methods are optional:

    - ``typed_columns(dataset, columns)``, for a format whose columns depend on the values of all samples, returns the
      `columns` that the other methods get.
    - ``comparable(sample, columns)``, for a format that stores only a part of a sample, or under other names, returns
      the sample as `source` will read it.
    - ``join(store, folders)``, for a format whose library can read several exports as one dataset, writes the files
      that describe them together. `store` is the folder that contains them, and `folders` are their names in the order
      of the samples.

    Attributes:
        VERSION: incremented by hand when the format writes other files for the same samples; exports of datasets are
            then rebuilt.
        SUFFIX: the suffix of the names of shards.
        source: reads a shard back for the check at the end.
    """

    VERSION: ClassVar[int]
    SUFFIX: ClassVar[str]
    source: ClassVar[type[Source]]

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns the name of the shard file that `source` reads, relative to the export's folder."""

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> ShardWriter:
        """Opens a shard.

        Args:
            folder: an empty local folder; files get the same relative names here as in the export's folder.
            name: the result of `shard_name`.
            columns: the columns of every sample, in order.
            num_samples: how many samples will be written.
        """

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes the files that describe all shards together, if the format has any."""
