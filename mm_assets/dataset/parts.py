"""Reading the payloads of parts: a part that is a payload within its composite's is read alone, by ranges."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.codecs import NamedPart
from mm_assets.dataset.decoding import locate
from mm_assets.dataset.files import Reader
from mm_assets.errors import FormatError, LimitError
from mm_assets.fields.base import Buffer, Encoded, StoredPart

__all__ = ["read_part_rows"]

_Reading: TypeAlias = Generator[tuple[int, int], Buffer, Encoded | None]


def read_part_rows(
    reader: Reader, indices: npt.NDArray[np.int64], *, part: NamedPart, verify: bool | None
) -> list[Encoded | None]:
    """The payloads of a part of samples of one file; None if the modality is absent or has no such part.

    Args:
        reader: of the file.
        indices: of the samples.
        part: which is stored as a payload within the modality's.
        verify: whether payloads of the modality are read whole and verified; None as the file was opened.

    Raises:
        FormatError: a payload is damaged.
        LimitError: a payload exceeds a limit of its field.
    """
    file = reader.part_of(part.modality)

    def read(i: int, record: Buffer, size: int) -> _Reading:
        try:
            return (yield from _read(part.stored, record, size))
        except (FormatError, LimitError) as error:
            raise locate(error, part.name, (file.path, i)) from error

    if not (file.verifies if verify is None else verify):
        return file.read_ranges(indices, part.modality, read)
    rows: list[Encoded | None] = []
    column = file.read_columns(indices, (part.modality,), verify=True)[part.modality]
    for i, record, data in zip(indices.tolist(), column.records, column.datas, strict=True):
        rows.append(None if data is None else _run(read(i, memoryview(record), len(data)), data))
    return rows


def _read(stored: Sequence[StoredPart], record: Buffer, size: int) -> _Reading:
    """Reads the last of payloads that are within one another."""
    start = 0
    for one in stored:
        locating = one.locate(record, size)
        answer: Buffer | None = None
        while True:
            try:
                offset, length = locating.send(answer)  # type: ignore[arg-type]  # None is what begins a generator
            except StopIteration as end:
                place = end.value
                break
            answer = yield start + offset, length
        if place is None:
            return None
        record, offset, size = place
        start += offset
    return Encoded(bytes(record), memoryview((yield start, size)))


def _run(reading: _Reading, data: memoryview) -> Encoded | None:
    """The result of a reading of data that is in memory."""
    try:
        offset, size = next(reading)
        while True:
            offset, size = reading.send(data[offset : offset + size])
    except StopIteration as end:
        found: Encoded | None = end.value
        return found
