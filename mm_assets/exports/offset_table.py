"""Shards that begin with a table of where their samples are, as MDS and LitData have them: one writer for both.

Each sample has the columns `__key__`, `__members__` and `json`, and one for each packed modality. The formats have no
null: what a sample lacks is empty, and `__members__` does not list it.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.exports.base import ExportColumn, ExportFile, ExportSample
from mm_assets.media.content_types import Buffer
from mm_assets.sources.row_members import KEY_COLUMN, MEMBERS_COLUMN

__all__ = ["JSON_COLUMN", "TEXT_COLUMNS", "OffsetTableWriter", "column_names"]

JSON_COLUMN = "json"
TEXT_COLUMNS = (KEY_COLUMN, MEMBERS_COLUMN, JSON_COLUMN)
MAX_SHARD_BYTES = (1 << 32) - 1  # an offset is uint32
COPY_BYTES = 1 << 20


def column_names(columns: Sequence[ExportColumn]) -> dict[str, str]:
    """Returns the name in the shards of each column, which is another one if it is that of a text of every sample."""
    taken = {*TEXT_COLUMNS, *(column.name for column in columns)}
    names = {}
    for column in columns:
        name = column.name
        while name in TEXT_COLUMNS or (name != column.name and name in taken):
            name += "_"
        names[column.name] = name
        taken.add(name)
    return names


class OffsetTableWriter(ABC):
    """Writes the samples of a shard after the place of its table, and the table at the end.

    Args:
        path: the shard.
        columns: of every sample.
        num_samples: that will be written.
    """

    def __init__(self, path: Path, columns: Sequence[ExportColumn], num_samples: int) -> None:
        self._path = path
        self._columns = columns
        self._names = column_names(columns)
        self._sizes: list[int] = []
        self._size = 8 + 4 * num_samples + len(self._config())
        self._file = path.open("wb", buffering=COPY_BYTES)
        self._file.seek(self._size)

    def write(self, sample: ExportSample) -> None:
        """Appends a sample.

        Raises:
            EncodeError: the shard would have more than 4 GiB, or an array is of a type that the format lacks.
        """
        values = [memoryview(value).cast("B") for value in self._values(sample)]
        head = self._head([len(value) for value in values])
        size = len(head) + sum(len(value) for value in values)
        self._size += size
        if self._size > MAX_SHARD_BYTES:
            self._file.close()
            detail = f"sample {sample.key!a} makes {self._path.name} {self._size:,} bytes"
            raise EncodeError(f"{detail}, at most {MAX_SHARD_BYTES:,} fit: set a smaller shard_bytes")
        self._file.write(head)
        for value in values:
            self._file.write(value)
        self._sizes.append(size)

    def close(self) -> Mapping[str, Any]:
        """Writes the table, and returns the shard's name, size and number of samples."""
        config, number = self._config(), len(self._sizes)
        offsets = np.cumsum([8 + 4 * number + len(config), *self._sizes], dtype=np.int64)
        self._file.seek(0)
        self._file.write(struct.pack("<I", number) + offsets.astype("<u4").tobytes() + config)
        self._file.close()
        return {"name": self._path.name, "bytes": self._size, "samples": number}

    def _values(self, sample: ExportSample) -> Iterator[Buffer]:
        joined = [column.name for column in self._columns if column.is_list]
        named = sample._replace(parts={self._names[name]: part for name, part in sample.parts.items()})
        yield sample.key.encode()
        yield named.members(sized=(self._names[name] for name in joined)).encode()
        yield (sample.json or "").encode()
        for column in self._columns:
            part = sample.parts.get(column.name)
            if self._is_array(column):
                yield self._array(np.zeros(0, np.uint8) if part is None else _array_of(part))
            elif part is None or isinstance(part, ExportFile):
                yield b"" if part is None else part.data
            else:
                yield b"".join(file.data for file in sorted(part, key=lambda file: file.order))

    @abstractmethod
    def _is_array(self, column: ExportColumn) -> bool:
        """Whether the values of a column are arrays of the format, and not files."""

    @abstractmethod
    def _array(self, array: npt.NDArray[Any]) -> bytes:
        """Returns an array as the format has it; `EncodeError` for a type that it lacks."""

    @abstractmethod
    def _head(self, sizes: Sequence[int]) -> bytes:
        """Returns what a sample begins with."""

    @abstractmethod
    def _config(self) -> bytes:
        """Returns what is between the table and the first sample."""


def _array_of(part: ExportFile | Sequence[ExportFile]) -> npt.NDArray[Any]:
    content = part.content if isinstance(part, ExportFile) else None
    if not isinstance(content, np.ndarray):
        raise EncodeError(f"a column of arrays has {type(content).__name__}")
    return content
