"""Sample ids: a lazy sequence over the ids section (4.5), and the index of an id.

Ten million ids must not become Python strings or a dictionary: `find` sorts 64-bit hashes in NumPy (12 bytes per id)
and compares the few candidates with the stored bytes. Offsets are checked when they are used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from mm_assets.errors import CorruptError
from mm_assets.formats.batch import check_index, spans
from mm_assets.formats.byte_source import ByteSource, Table, drop_pages, view_block
from mm_assets.formats.records import Buffer

ITERATION_BLOCK = 1 << 14  # ids read together while iterating
HASH_BLOCK = 1 << 20  # bytes hashed at once; of a longer id, that many are hashed

# A polynomial hash modulo 2**64 with an odd base: every power has an inverse, so the hashes of all ids of a block
# come from one running sum. Ids made to collide cost time, not correctness: candidates are compared.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)

Number = TypeVar("Number", np.uint64, np.int64)

ReadBlob: TypeAlias = Callable[[int, int], Buffer]  # (start, end) in the blob -> its bytes


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _hash_strings(
    data: Buffer, bounds: npt.NDArray[np.int64], powers: npt.NDArray[np.uint64], inverses: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Hashes (n,) of data[bounds[i] : bounds[i + 1]]; bounds (n + 1,) ascend from 0."""
    values = np.frombuffer(data, np.uint8).astype(np.uint64)
    values += np.uint64(1)  # so that leading zero bytes count
    values *= powers[: len(values)]
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=sums[1:])
    return (sums[bounds[1:]] - sums[bounds[:-1]]) * inverses[bounds[:-1]]


def hash_ids(offsets: npt.NDArray[np.uint64], read_blob: ReadBlob) -> npt.NDArray[np.uint64]:
    """64-bit hashes (N,) of the ids at (N + 1,) ascending positions; `read_blob` returns a range of the blob."""
    count = len(offsets) - 1
    hashes = np.empty(count, np.uint64)
    longest = min(HASH_BLOCK, int(offsets[-1] - offsets[0]))
    powers, inverses = _powers(_BASE, longest + 1), _powers(_INVERSE, longest + 1)
    first = 0
    while first < count:
        start = int(offsets[first])
        last = int(np.searchsorted(offsets, np.uint64(start + HASH_BLOCK), side="right")) - 1
        last = max(last, first + 1)
        # Only a single id can be longer than the block.
        end = min(int(offsets[last]), start + HASH_BLOCK)
        bounds = np.minimum(offsets[first : last + 1] - offsets[first], np.uint64(HASH_BLOCK)).astype(np.int64)
        hashes[first:last] = _hash_strings(read_blob(start, end), bounds, powers, inverses)
        first = last
    return hashes


def find_duplicate(offsets: npt.NDArray[np.uint64], blob: Buffer) -> tuple[int, int] | None:
    """Two indices that share an id, the lower one first, or None; the ids are at (N + 1,) ascending positions."""
    view = memoryview(blob)
    hashes = hash_ids(offsets, lambda start, end: view[start:end])
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    seen: dict[bytes, int] = {}
    current: int | None = None
    for k in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
        if hashes[k] != current:
            current, seen = hashes[k], {}
        for i in order[k : k + 2].tolist():
            key = bytes(view[int(offsets[i]) : int(offsets[i + 1])])
            if seen.setdefault(key, i) != i:
                return seen[key], i
    return None


class SortedIndex(Generic[Number]):
    """Where 64-bit numbers are, found by bisection: 12 bytes per number, 16 beyond 2**32 of them, 8 where they ascend.

    Args:
        numbers: (n,), such as hashes: these only name candidates, which the caller compares with what it looks for.
    """

    def __init__(self, numbers: npt.NDArray[Number]) -> None:
        self._numbers: npt.NDArray[Number] = numbers
        self._order: npt.NDArray[np.integer] | None = None
        if np.any(numbers[1:] < numbers[:-1]):
            order = np.argsort(numbers, kind="stable")  # of one number twice, the first comes first
            self._order = order.astype(np.uint32 if len(order) < 2**32 else np.uint64)
            self._numbers = numbers[order]

    def find(self, wanted: Number | int) -> list[int]:
        """Where a number is, ascending."""
        numbers = self._numbers
        first = int(numbers.searchsorted(wanted))
        if first == len(numbers) or numbers[first] != wanted:
            return []
        last = first + 1
        if last < len(numbers) and numbers[last] == wanted:  # hardly ever: spares a second bisection
            last = int(numbers.searchsorted(wanted, "right"))
        return list(range(first, last)) if self._order is None else self._order[first:last].tolist()


class SampleIds(Sequence[str]):
    """The ids of samples, in order; none is cached as a Python string.

    Args:
        name: of the file or dataset, for messages.
        count: samples.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count

    @abstractmethod
    def _get(self, i: int) -> str:
        """The id of a sample, whose index is checked."""

    def _get_many(self, indices: range) -> list[str]:
        """The ids of samples, whose indices are checked."""
        return [self._get(i) for i in indices]

    @abstractmethod
    def find(self, sample_id: str) -> int | None:
        """The index of the first sample of that id, or None.

        Raises:
            CorruptError: the ids section is damaged.
        """

    def containing(self, text: str, start: int, stop: int) -> list[int]:
        """The indices from `start` to before `stop`, within the sequence, of ids that contain a text, ascending.

        Raises:
            CorruptError: an offset is out of place, or an id that is compared is not UTF-8.
        """
        ids = self._get_many(range(start, stop))
        return [start + row for row, sample_id in enumerate(ids) if text in sample_id]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._get_many(range(*index.indices(self._count)))
        return self._get(check_index(index, self._count, self._name))

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and self.find(value) is not None


class NumberedIds(SampleIds):
    """The ids "0", "1", ... of a file that stores none."""

    def _get(self, i: int) -> str:
        return str(i)

    def find(self, sample_id: str) -> int | None:
        """The number, if it is one as this sequence writes it."""
        if sample_id.isascii() and sample_id.isdigit() and len(sample_id) <= len(str(self._count)):
            i = int(sample_id)
            if str(i) == sample_id and i < self._count:
                return i
        return None


class StoredIds(SampleIds):
    """The ids of an ids section.

    Args:
        source: the file.
        ptr: absolute position of the section, which the caller has checked.
        size: bytes of the section, at least 8 * (count + 1).
        count: samples.
    """

    def __init__(self, source: ByteSource, ptr: int, size: int, count: int) -> None:
        super().__init__(source.name, count)
        self._source = source
        self._offsets = Table(source, ptr, count + 1, "<u8")
        self._blob_ptr = ptr + 8 * (count + 1)
        self._blob_size = size - 8 * (count + 1)
        self._index: SortedIndex[np.uint64] | None = None

    def _corrupt(self, i: int | None, detail: str, found: object, expected: object) -> CorruptError:
        return CorruptError(self._name, f"sample ids: {detail}", sample=i, found=found, expected=expected)

    def _decode(self, i: int, data: Buffer) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(i, "not UTF-8", error.reason, "UTF-8") from error

    def _bytes(self, i: int) -> memoryview:
        if self._offsets.in_reach:
            start, end = self._offsets.cell(i), self._offsets.cell(i + 1)
        else:
            start, end = np.frombuffer(self._source.view(self._offsets.ptr + 8 * i, 16), "<u8").tolist()
        if not start <= end <= self._blob_size:
            raise self._corrupt(i, "an offset is out of place", f"{start}, {end}", f"ascending up to {self._blob_size}")
        return self._source.view(self._blob_ptr + start, end - start)

    def _get(self, i: int) -> str:
        return self._decode(i, self._bytes(i))

    def __iter__(self) -> Iterator[str]:
        for first, last in spans(self._count, ITERATION_BLOCK):
            offsets = self._checked(self._offsets.span(first, last + 1), first)
            start = int(offsets[0])
            bounds = (offsets - offsets[0]).tolist()
            block = view_block(self._source, self._blob_ptr + start, bounds[-1])
            for i in range(last - first):
                yield self._decode(first + i, block[bounds[i] : bounds[i + 1]])

    def _checked(self, offsets: npt.NDArray[np.uint64], first: int) -> npt.NDArray[np.uint64]:
        """The offsets of samples [first, ...) and the end of the last, refused unless they ascend within the blob."""
        falling = np.flatnonzero(offsets[1:] < offsets[:-1])
        if len(falling):
            i = int(falling[0])
            raise self._corrupt(first + i, "offsets descend", int(offsets[i + 1]), f"at least {offsets[i]}")
        if int(offsets[-1]) > self._blob_size:
            raise self._corrupt(None, "an offset is out of place", int(offsets[-1]), f"at most {self._blob_size}")
        return offsets

    def containing(self, text: str, start: int, stop: int) -> list[int]:
        """As `SampleIds.containing`, by a search of the stored bytes: no id becomes a string.

        Pages of a mapped file that were searched leave this process' resident memory.
        """
        try:
            wanted = text.encode()
        except UnicodeEncodeError:
            return []  # a lone surrogate cannot be in a file
        if not wanted:
            return list(range(start, stop))
        found: list[int] = []
        for first in range(start, stop, ITERATION_BLOCK):
            last = min(first + ITERATION_BLOCK, stop)
            offsets = self._checked(self._offsets.span(first, last + 1), first)
            base = int(offsets[0])
            block = bytes(view_block(self._source, self._blob_ptr + base, int(offsets[-1]) - base))
            bounds = (offsets - offsets[0]).astype(np.int64)
            at = block.find(wanted)
            while at >= 0:
                row = int(bounds.searchsorted(at, "right")) - 1
                if at + len(wanted) <= bounds[row + 1]:
                    found.append(first + row)
                    at = block.find(wanted, int(bounds[row + 1]))
                else:  # it begins in one id and ends in another
                    at = block.find(wanted, at + 1)
            drop_pages(self._source, self._offsets.ptr + 8 * first, 8 * (last - first))
            drop_pages(self._source, self._blob_ptr + base, len(block))
        return found

    def check(self) -> None:
        """Reads every id.

        Raises:
            CorruptError: an offset is out of place, or an id is not UTF-8.
        """
        end = self._offsets.span(self._count, self._count + 1)
        start = self._offsets.span(0, 1)
        if int(start[0]) != 0 or int(end[0]) != self._blob_size:
            found = f"{start[0]}..{end[0]}"
            raise self._corrupt(None, "the offsets do not cover the blob", found, f"0..{self._blob_size}")
        for _ in self:
            pass

    def find(self, sample_id: str) -> int | None:
        """The index of the first sample of that id, or None; the first call sorts the hashes of all ids."""
        if not self._count:
            return None
        try:
            key = sample_id.encode()
        except UnicodeEncodeError:
            return None  # a lone surrogate cannot be in a file
        if self._index is None:
            offsets, blob = self._checked(self._offsets.column(), 0), self._blob_ptr
            self._index = SortedIndex(
                hash_ids(offsets, lambda start, end: view_block(self._source, blob + start, end - start))
            )
        (wanted,) = hash_ids(np.array([0, len(key)], np.uint64), lambda start, end: key[start:end])
        return next((i for i in self._index.find(wanted) if self._bytes(i) == key), None)

    def forget(self) -> None:
        """Drops what is cached, so that the source can be closed."""
        self._offsets.forget()
        self._index = None
