"""What a format of exports is: a writer of one shard, and what describes the shards together.

A sample is a key, its JSON, and a part for each packed modality: a file, or a list of files. A file has the suffix and
the bytes that it would have as a member of a tar, so that every format gives the same sample again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mm_assets.fields import Field
from mm_assets.media.content_types import Buffer
from mm_assets.sources import Source
from mm_assets.storage.store import Store

__all__ = [
    "Export",
    "ExportColumn",
    "ExportFile",
    "ExportSample",
    "ShardFacts",
    "ShardWriter",
    "npy_bytes",
    "read_files",
]


_READS = 16  # files at a time: each waits for the storage most of its time


def read_files(store: Store, names: Iterable[str]) -> list[bytes]:
    """Reads small files, several at a time; `SourceError` if one is missing."""
    with ThreadPoolExecutor(_READS, thread_name_prefix="exports") as pool:
        return list(pool.map(store.read_bytes, names))


def npy_bytes(array: npt.NDArray[Any]) -> bytes:
    """Returns an array as an ``.npy`` file, C-contiguous and little-endian."""
    target = io.BytesIO()
    array = np.ascontiguousarray(array)
    np.lib.format.write_array(target, array.astype(array.dtype.newbyteorder("<"), copy=False), allow_pickle=False)
    return target.getvalue()


class ExportFile(NamedTuple):
    """One file of a sample.

    Attributes:
        suffix: what follows the sample's key in the name: ``[role.]extension``.
        content: its bytes; an array for an ``.npy`` file, which a format may store as a tensor.
        order: number among the files of its sample; files of one column may have others between them.
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
        parts: by column a file, a list of files in order of their positions, or None if the sample has neither.
        number: from 0, among all samples that are exported.
    """

    key: str
    json: str | None
    parts: Mapping[str, ExportFile | Sequence[ExportFile] | None]
    number: int = 0

    def columns(self) -> list[tuple[str, ExportFile]]:
        """Returns all files but the JSON in order, each with its column."""
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
        """Returns the text of a column `__members__`, by which `mm_assets.sources.row_members` names the files again.

        Args:
            sized: columns in which the files of a list are joined to one value.
        """
        joined = set(sized)
        listed = [
            [column, file.suffix, len(memoryview(file.data).cast("B"))] if column in joined else [column, file.suffix]
            for column, file in self.columns()
        ]
        return json.dumps(listed, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportColumn:
    """What a column of parts holds in every sample.

    Attributes:
        name: the packed modality.
        field: its field; None of a type that is not known here, whose stored bytes are the file.
        is_list: whether a part is a list of files.
        kind: "text" for UTF-8, "array" for arrays of numbers, "file" for any other bytes; of all files of a list.
    """

    name: str
    field: Field | None
    is_list: bool
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """One complete shard.

    Attributes:
        number: from 0.
        num_samples: samples in it.
        files: names of its files below the export's folder.
        num_bytes: bytes of these files.
        digest: SHA-256 of a line for each file of each sample: key, suffix, size and CRC-32C.
        details: what its writer reports, as JSON, for the files that describe the shards together.
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
            EncodeError: the format cannot hold it; the message says what and why.
        """

    def close(self) -> Mapping[str, Any]:
        """Finishes the files, and returns what `Export.finish` needs to know of them, as JSON."""


class Export(Protocol):
    """A format that samples are exported to.

    A format whose columns depend on the values of all samples may have a static method ``typed_columns(dataset,
    columns)``; what it returns are the `columns` of its other methods. A format that holds only a part of a sample, or
    under other names, may have a static method ``comparable(sample, columns)``, which returns the sample as `source`
    reads it again.

    A format whose library can read the exports in several folders as one may have a static method ``join(store,
    folders)``, which writes what describes them together: `store` is the folder that holds them, and `folders` are
    their names in the order of the samples.

    Attributes:
        VERSION: raised by hand when the files that it writes of the same samples change: exports of datasets are then
            rebuilt.
        SUFFIX: end of the names of its shards.
        KEEPS_KEYS: whether any text can be a key; otherwise keys are escaped as names of files.
        source: reads a shard again, for the check at the end.
    """

    VERSION: ClassVar[int]
    SUFFIX: ClassVar[str]
    KEEPS_KEYS: ClassVar[bool]
    source: ClassVar[type[Source]]

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns the name of a shard's file below the export's folder, the one that `source` reads."""

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> ShardWriter:
        """Opens a shard.

        Args:
            folder: an empty folder, in which the shard's files have the names that they have below the export's.
            name: `shard_name`.
            columns: of every sample, in order.
            num_samples: that will be written.
        """

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes what describes the shards together, if the format has such files."""
