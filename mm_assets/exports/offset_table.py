"""The writer of shards that begin with a table of sample offsets: MDS and LitData.

Each sample has the columns `__key__`, `__members__` and `json`, and one for each packed modality. The formats have no
null: a missing part is empty, and `__members__` does not list it.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.exports.base import JSON_COLUMN, ExportColumn, ExportFile, ExportSample
from mm_assets.media.content_types import Buffer
from mm_assets.sources.row_members import KEY_COLUMN, MEMBERS_COLUMN

__all__ = ["OffsetTableWriter"]

TEXT_COLUMNS = (KEY_COLUMN, MEMBERS_COLUMN, JSON_COLUMN)  # of every sample
MAX_SHARD_BYTES = (1 << 32) - 1  # an offset is uint32
BUFFER_BYTES = 1 << 20


class OffsetTableWriter(ABC):
    """Writes the samples of a shard behind the space for the table, and the table at the end.

    Args:
        path: the shard.
        columns: the columns of every sample.
        num_samples: how many samples will be written.

    Attributes:
        FORMAT: name of the format, for messages.
        ARRAY_CODES: the number by which the format stores each type of arrays.
    """

    FORMAT: ClassVar[str]
    ARRAY_CODES: ClassVar[Mapping[np.dtype[Any], int]]

    def __init__(self, path: Path, columns: Sequence[ExportColumn], num_samples: int) -> None:
        self._path = path
        self._columns = columns
        self._names = _column_names(columns)
        self._sizes: list[int] = []
        self._size = 8 + 4 * num_samples + len(self._config())
        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self._file.seek(self._size)

    @classmethod
    def column_kinds(cls, columns: Sequence[ExportColumn]) -> dict[str, str]:
        """Returns the name of each column in the shards, and how it is stored: as "text", "array" or "file"."""
        names, kinds = _column_names(columns), dict.fromkeys(TEXT_COLUMNS, "text")
        for column in columns:
            is_text = column.kind == "text" and not column.is_list
            kinds[names[column.name]] = "array" if cls._is_array(column) else "text" if is_text else "file"
        return kinds

    def write(self, sample: ExportSample) -> None:
        """Appends a sample.

        Raises:
            EncodeError: the shard would exceed 4 GiB, or the format does not support the type of an array.
        """
        values = [memoryview(value).cast("B") for value in self._values(sample)]
        sizes = [len(value) for value in values]
        size = 4 * len(sizes) + sum(sizes)
        self._size += size
        if self._size > MAX_SHARD_BYTES:
            detail = f"{self._path.name} would have {self._size:,} bytes, and {self.FORMAT} allows {MAX_SHARD_BYTES:,}"
            raise EncodeError(f"{detail}: set a smaller shard_bytes")
        self._file.write(struct.pack(f"<{len(sizes)}I", *sizes))
        for value in values:
            self._file.write(value)
        self._sizes.append(size)

    def close(self) -> Mapping[str, Any]:
        """Writes the table."""
        config, number = self._config(), len(self._sizes)
        offsets = np.cumsum([8 + 4 * number + len(config), *self._sizes], dtype=np.int64)
        self._file.seek(0)
        self._file.write(struct.pack("<I", number) + offsets.astype("<u4").tobytes() + config)
        self._file.close()
        return {}

    def abort(self) -> None:
        """Closes the incomplete shard."""
        self._file.close()

    def _values(self, sample: ExportSample) -> Iterator[Buffer]:
        lists = [self._names[column.name] for column in self._columns if column.is_list]
        renamed = sample._replace(parts={self._names[name]: part for name, part in sample.parts.items()})
        yield sample.key.encode()
        yield renamed.members(sized=lists).encode()
        yield (sample.json or "").encode()
        for column in self._columns:
            part = sample.parts.get(column.name)
            if self._is_array(column):
                yield self._encode(np.zeros(0, np.uint8) if part is None else _array_of(part))
            elif part is None or isinstance(part, ExportFile):
                yield b"" if part is None else part.data
            else:
                yield b"".join(file.data for file in sorted(part, key=lambda file: file.order))

    def _encode(self, array: npt.NDArray[Any]) -> bytes:
        stored = array.astype(array.dtype.newbyteorder("<"), copy=False)
        code = self.ARRAY_CODES.get(stored.dtype)
        if code is None:
            supported = ", ".join(map(str, self.ARRAY_CODES))
            detail = f"{self.FORMAT} does not support arrays of {array.dtype}, only of {supported}"
            raise EncodeError(f"{detail}: leave the modality out, or pack it with another type")
        return self._array_head(code, array.shape) + stored.tobytes()

    @classmethod
    @abstractmethod
    def _is_array(cls, column: ExportColumn) -> bool:
        """Returns whether the format stores the values of a column as arrays, not as files."""

    @abstractmethod
    def _array_head(self, code: int, shape: tuple[int, ...]) -> bytes:
        """Returns the bytes before the numbers of an array."""

    def _config(self) -> bytes:
        """Returns the bytes between the table and the first sample."""
        return b""


def _column_names(columns: Sequence[ExportColumn]) -> dict[str, str]:
    """Returns the name of each column in the shards: its own, with underscores if it is the name of a text column."""
    used = {*TEXT_COLUMNS, *(column.name for column in columns)}
    names = {}
    for column in columns:
        name = column.name
        while name in TEXT_COLUMNS or (name != column.name and name in used):
            name += "_"
        names[column.name] = name
        used.add(name)
    return names


def _array_of(part: ExportFile | Sequence[ExportFile]) -> npt.NDArray[Any]:
    content = part.content if isinstance(part, ExportFile) else None
    if not isinstance(content, np.ndarray):
        raise EncodeError(f"a column of arrays has a value of {type(content).__name__}: leave the modality out")
    return content
