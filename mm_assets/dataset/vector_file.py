"""A file of vectors in lists: an inverted file, of which a query reads a few lists. docs/spec/files.md has its bytes.

The vectors are grouped by the nearest of `num_lists` centroids, and lie list by list, so that a list is one range of a
mapped or remote file. Only NumPy reads the file: whatever its bytes are, opening and searching it works or raises
`FormatError`. Tables are verified when it is opened, a list by its CRC-32C when it is first read.

A file is written in bounded memory: vectors are read in blocks three times, for the centroids (a sample), to choose
each one's list, and to copy it to its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.vectors import METRICS, SPARE, BestRows, Metric, Vectors, nearness, scores_of
from mm_assets.errors import BadMagicError, CorruptError, TruncatedError, UnsupportedVersionError
from mm_assets.formats import ByteSource, crc32c
from mm_assets.formats.byte_source import LocalFile

__all__ = ["HEADER", "LISTS", "TARGET_RECALL", "VectorBlocks", "VectorFile", "write_vector_file"]

MAGIC, VERSION = b"MMVL", 1
HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("metric", "u1"),
        ("_pad", "u1"),
        ("dimensions", "<u4"),
        ("num_lists", "<u4"),
        ("num_vectors", "<u8"),
        ("num_probes", "<u4"),
        ("recall", "<f4"),
        ("tables_crc32c", "<u4"),
        ("_pad2", "V24"),
        ("crc32c", "<u4"),
    ]
)
LISTS = np.dtype([("num_vectors", "<u8"), ("crc32c", "<u4"), ("_pad", "V4")])

TARGET_RECALL = 0.95
"""Share of the ten nearest that the default number of probed lists finds, measured on vectors of the file."""

VectorBlocks: TypeAlias = Callable[[npt.NDArray[np.int64] | None], Iterator[tuple[npt.NDArray[np.int64], Vectors]]]
"""Yields prepared vectors in blocks with their rows, ascending: those of some rows, or of all that can be compared."""

_MIN_LISTED = 4096  # vectors: fewer are compared faster than lists of them are chosen
_MAX_LISTS = 16_384
_SAMPLES_PER_LIST = 32  # vectors that determine a centroid
_SAMPLE_BYTES = 256 << 20  # of all of them, at most
_ROUNDS = 6  # of k-means
_BLOCK_BYTES = 16 << 20  # of vectors, or of products, at a time
_BLOCK_ROWS = 4096  # of a sample
_NUM_QUERIES = 128  # vectors of the file that the recall is measured with
_RECALL_AT = 10
_SEED = 20_250_101


class VectorFile:
    """An open file of vectors.

    Args:
        source: the file, which is closed with this.
        num_rows: rows of which the file may have vectors.

    Attributes:
        name: path or URL.
        metric: how the vectors are compared.
        dimensions: numbers of a vector.
        num_lists: lists.
        num_probes: lists that a search reads by default.
        recall: what that found of the ten nearest when the file was written, from 0 to 1.
        rows: (n,) int64, the row of each vector, list by list.

    Raises:
        FormatError: it is damaged, truncated, or not such a file.
    """

    def __init__(self, source: ByteSource, num_rows: int) -> None:
        self._source = source
        self.name = source.name
        if source.size < HEADER.itemsize:
            raise TruncatedError(self.name, "has no header", found=source.size, expected=HEADER.itemsize)
        header_bytes = bytes(source.view(0, HEADER.itemsize))
        header = np.frombuffer(header_bytes, HEADER)[0]
        if bytes(header["magic"]) != MAGIC:
            raise BadMagicError(self.name, "is not a file of vectors", found=bytes(header["magic"]), expected=MAGIC)
        if int(header["version"]) != VERSION:
            raise UnsupportedVersionError(self.name, "version", found=int(header["version"]), expected=VERSION)
        if crc32c(header_bytes[:-4]) != int(header["crc32c"]):
            raise CorruptError(self.name, "its header does not match its CRC-32C")
        num_vectors, self.num_lists = int(header["num_vectors"]), int(header["num_lists"])
        self.dimensions, self.num_probes = int(header["dimensions"]), int(header["num_probes"])
        self.recall = float(header["recall"])
        if int(header["metric"]) >= len(METRICS):
            raise CorruptError(self.name, "metric", found=int(header["metric"]), expected=f"below {len(METRICS)}")
        self.metric: Metric = METRICS[int(header["metric"])]
        if not self.dimensions or not 1 <= self.num_probes <= self.num_lists:
            found = f"{self.dimensions} dimensions, {self.num_probes} of {self.num_lists} lists probed"
            raise CorruptError(self.name, "its header contradicts itself", found=found, expected="at least 1 of each")
        sizes = _table_sizes(self.num_lists, self.dimensions, num_vectors)
        self._ptr = HEADER.itemsize + sum(sizes)
        expected = self._ptr + 4 * self.dimensions * num_vectors
        if source.size != expected:
            error = TruncatedError if source.size < expected else CorruptError
            raise error(self.name, "has another size than its header states", found=source.size, expected=expected)
        tables = source.view(HEADER.itemsize, sum(sizes))
        if crc32c(tables) != int(header["tables_crc32c"]):
            raise CorruptError(self.name, "its tables do not match their CRC-32C")
        centroids = np.frombuffer(tables[: sizes[0]], "<f4").reshape(self.num_lists, self.dimensions)
        self._centroids = np.array(centroids, np.float32)
        self._lists = np.frombuffer(tables[sizes[0] : sum(sizes[:2])], LISTS)
        self.rows: npt.NDArray[np.int64] = np.frombuffer(tables[sum(sizes[:2]) :], "<i8")
        counts = self._lists["num_vectors"].tolist()
        if sum(counts) != num_vectors:
            raise CorruptError(
                self.name, "its lists have another number of vectors", found=sum(counts), expected=num_vectors
            )
        if len(self.rows) and not 0 <= int(self.rows.min()) <= int(self.rows.max()) < num_rows:
            found = f"{int(self.rows.min())} to {int(self.rows.max())}"
            raise CorruptError(self.name, "a vector's row", found=found, expected=f"0 to {num_rows - 1}")
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        self._verified = np.zeros(self.num_lists, np.bool_)

    def __len__(self) -> int:
        """Vectors."""
        return len(self.rows)

    def close(self) -> None:
        """Closes the file; fine twice."""
        self._source.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_runs(self, lists: npt.NDArray[np.int64]) -> list[tuple[int, Vectors]]:
        """The vectors of lists, ascending, those of adjacent lists together, and the place of the first of each run.

        The checksum of a list is verified when it is first read.
        """
        row_bytes = 4 * self.dimensions
        runs = np.split(lists, np.flatnonzero(np.diff(lists) != 1) + 1)
        spans = [(int(self._starts[run[0]]), int(self._starts[run[-1] + 1])) for run in runs]
        views = self._source.view_many(
            [(self._ptr + start * row_bytes, (stop - start) * row_bytes) for start, stop in spans]
        )
        for run, (first, _), view in zip(runs, spans, views, strict=True):
            for which in run[~self._verified[run]].tolist():
                start, stop = ((int(self._starts[number]) - first) * row_bytes for number in (which, which + 1))
                if crc32c(view[start:stop]) != int(self._lists["crc32c"][which]):
                    raise CorruptError(self.name, f"list {which} does not match its CRC-32C")
                self._verified[which] = True
        contents = (np.frombuffer(view, "<f4").reshape(-1, self.dimensions) for view in views)
        return [(start, content) for (start, _), content in zip(spans, contents, strict=True)]

    def _groups(self, lists: npt.NDArray[np.int64], row_bytes: int = 0) -> Iterator[npt.NDArray[np.int64]]:
        """Yields lists some at a time, so that what is read, or computed of each row, takes few MiB."""
        sizes = (self._starts[lists + 1] - self._starts[lists]) * max(row_bytes, 4 * self.dimensions)
        yield from np.split(lists, np.flatnonzero(np.diff(np.cumsum(sizes) // _BLOCK_BYTES)) + 1)

    def _lists_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The lists that have vectors in these places, ascending."""
        return np.unique(np.searchsorted(self._starts, slots, side="right") - 1)

    def read(self, slots: npt.NDArray[np.int64]) -> Vectors:
        """The vectors (n, D) in places (n,) of the file; errors as `search`."""
        vectors = np.empty((len(slots), self.dimensions), np.float32)
        for lists in self._groups(self._lists_of(slots)) if len(slots) else ():
            for start, content in self._read_runs(lists):
                chosen = (slots >= start) & (slots < start + len(content))
                vectors[chosen] = content[slots[chosen] - start]
        return vectors

    # --- searching ----------------------------------------------------------------------------------------------------

    def search(
        self,
        queries: Vectors,
        count: int,
        *,
        probes: int | None = None,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[list[tuple[npt.NDArray[np.int64], Vectors]], bool]:
        """The nearest vectors of each query.

        Args:
            queries: (Q, D), prepared.
            count: vectors to return of each query, at most.
            probes: lists to read for each; None takes `num_probes`.
            allowed: (n,) bool, the vectors that count, by their places in the file; None for all.

        Returns:
            places in the file (m,) int64 and scores (m,) float32 of each query, the best first; whether every vector
            that counts was compared.

        Raises:
            CorruptError: a list that was read is damaged.
        """
        num_allowed = len(self) if allowed is None else int(allowed.sum())
        if not num_allowed:
            return [(np.zeros(0, np.int64), np.zeros(0, np.float32))] * len(queries), True
        # As many vectors that count are compared as without a filter: the fewer do, the more lists are read.
        probes = math.ceil((probes or self.num_probes) * len(self) / num_allowed)
        is_exact = 2 * probes > self.num_lists
        if is_exact:
            found = self._scan(queries, count + SPARE, allowed)
        else:
            found = [self._probe(query, count + SPARE, probes, allowed) for query in queries]
        return [self._scored(query, slots, count) for query, slots in zip(queries, found, strict=True)], is_exact

    def _scored(
        self, query: Vectors, slots: npt.NDArray[np.int64], count: int
    ) -> tuple[npt.NDArray[np.int64], Vectors]:
        scores = scores_of(query, self.read(slots), self.metric)
        order = np.lexsort((self.rows[slots], -scores))[:count]
        return slots[order], scores[order]

    def _probe(
        self, query: Vectors, count: int, probes: int, allowed: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[np.int64]:
        """Places of the nearest vectors in the lists of the nearest centroids."""
        near = nearness(query[None], self._centroids, self.metric)[0]
        lists = np.sort(np.argpartition(near, -probes)[-probes:])
        runs = self._read_runs(lists)
        scores = np.concatenate([nearness(query[None], content, self.metric)[0] for _, content in runs])
        if allowed is not None:
            scores[~np.concatenate([allowed[start : start + len(content)] for start, content in runs])] = -np.inf
        best = np.argpartition(scores, -count)[-count:] if len(scores) > count else np.arange(len(scores))
        best = best[scores[best] > -np.inf]
        ends = np.cumsum([len(content) for _, content in runs])
        which = np.searchsorted(ends, best, side="right")
        # Counted from the end of its run, to which the place of that end is added.
        stops = np.array([start + len(content) for start, content in runs])
        slots: npt.NDArray[np.int64] = best - ends[which] + stops[which]
        return slots

    def _scan(self, queries: Vectors, count: int, allowed: npt.NDArray[np.bool_] | None) -> list[npt.NDArray[np.int64]]:
        """Places of the nearest vectors of all that count."""
        best = BestRows(len(queries), count)
        # Lists without a vector that counts are not read.
        lists = np.arange(self.num_lists) if allowed is None else self._lists_of(np.flatnonzero(allowed))
        row_bytes = 4 * max(self.dimensions, len(queries))
        step = max(_BLOCK_BYTES // row_bytes, 1)  # of a list that is larger than a block
        for some in self._groups(lists, row_bytes):
            for start, content in self._read_runs(some):
                slots = np.arange(start, start + len(content))
                if allowed is not None:
                    slots = slots[allowed[slots]]
                    content = content[slots - start]
                for first in range(0, len(slots), step):
                    block = slice(first, first + step)
                    best.add(nearness(queries, content[block], self.metric), slots[block])
        return [rows[rows >= 0] for rows in best.rows]


def _table_sizes(num_lists: int, dimensions: int, num_vectors: int) -> tuple[int, int, int]:
    """Bytes of the centroids, the lists and the rows."""
    return 4 * num_lists * dimensions, LISTS.itemsize * num_lists, 8 * num_vectors


# --- writing ----------------------------------------------------------------------------------------------------------


def write_vector_file(path: Path, blocks: VectorBlocks, *, num_rows: int, dimensions: int, metric: Metric) -> float:
    """Writes a file of vectors, and measures how many lists a search has to read; returns the recall with them.

    Takes memory for blocks, for a sample of up to 256 MiB of the vectors, and about 30 bytes per vector.

    Args:
        path: the file, which is not published before this returns.
        blocks: the vectors; the same at each call.
        num_rows: rows that may have a vector.
        dimensions: numbers of a vector.
        metric: for which they are prepared.

    Raises:
        OSError: the file cannot be written.
    """
    clustering: Metric = "cosine" if metric == "cosine" else "l2"
    num_lists = _num_lists(num_rows)
    centroids = _centroids(blocks, num_rows, num_lists, dimensions, clustering)
    of_blocks = [(rows, _nearest_lists(vectors, centroids, clustering)) for rows, vectors in blocks(None)]
    rows = np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in of_blocks)])
    lists = np.concatenate([np.zeros(0, np.int32), *(lists for _, lists in of_blocks)])
    del of_blocks
    table = np.zeros(num_lists, LISTS)
    table["num_vectors"] = np.bincount(lists, minlength=num_lists)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(table["num_vectors"], dtype=np.int64)])
    ptr = HEADER.itemsize + sum(_table_sizes(num_lists, dimensions, len(rows)))
    with path.open("w+b") as file:
        file.truncate(ptr + 4 * dimensions * len(rows))
        _copy_vectors(file, blocks, lists, starts, ptr)
        for number, count in enumerate(table["num_vectors"].tolist()):
            file.seek(ptr + int(starts[number]) * 4 * dimensions)
            table["crc32c"][number] = crc32c(file.read(4 * dimensions * count))
        tables = centroids.astype("<f4").tobytes() + table.tobytes()
        tables += rows[np.argsort(lists, kind="stable")].astype("<i8").tobytes()
        facts = (metric, dimensions, num_lists, len(rows), crc32c(tables))
        file.seek(0)
        file.write(_header(*facts, num_probes=num_lists, recall=1.0) + tables)
        file.flush()
        num_probes, recall = _measured(VectorFile(LocalFile(path), num_rows))
        file.seek(0)
        file.write(_header(*facts, num_probes=num_probes, recall=recall))
    return recall


def _header(
    metric: Metric,
    dimensions: int,
    num_lists: int,
    num_vectors: int,
    tables_crc32c: int,
    *,
    num_probes: int,
    recall: float,
) -> bytes:
    header = np.zeros((), HEADER)
    values = (
        MAGIC,
        VERSION,
        METRICS.index(metric),
        dimensions,
        num_lists,
        num_vectors,
        num_probes,
        recall,
        tables_crc32c,
    )
    names = (
        "magic",
        "version",
        "metric",
        "dimensions",
        "num_lists",
        "num_vectors",
        "num_probes",
        "recall",
        "tables_crc32c",
    )
    for name, value in zip(names, values, strict=True):
        header[name] = value
    header["crc32c"] = crc32c(header.tobytes()[:-4])
    return header.tobytes()


def _num_lists(num_rows: int) -> int:
    if num_rows < _MIN_LISTED:
        return 1
    return min(1 << round(math.log2(2 * math.sqrt(num_rows))), _MAX_LISTS)


def _centroids(blocks: VectorBlocks, num_rows: int, num_lists: int, dimensions: int, metric: Metric) -> Vectors:
    """Centroids (num_lists, D) by k-means over a sample, of length 1 for `cosine`."""
    if num_lists == 1:
        return np.zeros((1, dimensions), np.float32)
    random = np.random.default_rng(_SEED)
    count = min(num_rows, _SAMPLES_PER_LIST * num_lists, max(_SAMPLE_BYTES // (4 * dimensions), num_lists))
    chosen = np.sort(random.choice(num_rows, count, replace=False))
    sample, size = np.empty((count, dimensions), np.float32), 0
    for _, vectors in blocks(chosen):
        sample[size : size + len(vectors)] = vectors
        size += len(vectors)
    if not size:
        return np.zeros((num_lists, dimensions), np.float32)
    sample = sample[:size]
    centroids = sample[random.choice(size, num_lists, replace=size < num_lists)]
    for _ in range(_ROUNDS):
        sums, counts = np.zeros((num_lists, dimensions)), np.zeros(num_lists)
        for start in range(0, size, _BLOCK_ROWS):
            block = sample[start : start + _BLOCK_ROWS]
            lists = _nearest_lists(block, centroids, metric)
            order = np.argsort(lists, kind="stable")
            used, first, number = np.unique(lists[order], return_index=True, return_counts=True)
            sums[used] += np.add.reduceat(block[order], first, axis=0)
            counts[used] += number
        centroids = sample[random.integers(0, size, num_lists)]  # for those that have no vector
        centroids[counts > 0] = sums[counts > 0] / counts[counts > 0, None]
        if metric == "cosine":
            norms = np.linalg.norm(centroids, axis=1, keepdims=True)
            centroids /= np.where(norms > 0, norms, 1)
    return centroids


def _nearest_lists(vectors: Vectors, centroids: Vectors, metric: Metric) -> npt.NDArray[np.int32]:
    step = max(_BLOCK_BYTES // (4 * len(centroids)), 1)
    pieces = [
        nearness(vectors[start : start + step], centroids, metric).argmax(axis=1).astype(np.int32)
        for start in range(0, len(vectors), step)
    ]
    return np.concatenate([np.zeros(0, np.int32), *pieces])


def _copy_vectors(
    file: BinaryIO, blocks: VectorBlocks, lists: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], ptr: int
) -> None:
    """Writes the vectors to their lists, in the order of their rows."""
    free, done = starts.copy(), 0
    for rows, vectors in blocks(None):
        of = lists[done : done + len(rows)]
        done += len(rows)
        order = np.argsort(of, kind="stable")
        used, counts = np.unique(of, return_counts=True)
        for which, some in zip(used.tolist(), np.split(order, np.cumsum(counts)[:-1]), strict=False):
            file.seek(ptr + int(free[which]) * 4 * vectors.shape[1])
            file.write(vectors[some].astype("<f4", copy=False).tobytes())
            free[which] += len(some)


def _measured(file: VectorFile) -> tuple[int, float]:
    """The number of lists to read for `TARGET_RECALL`, and what it finds of the nearest of vectors in the file."""
    if file.num_lists == 1 or len(file) <= _RECALL_AT:
        return file.num_lists, 1.0
    chosen = np.sort(np.random.default_rng(_SEED).choice(len(file), min(_NUM_QUERIES, len(file)), replace=False))
    queries = file.read(chosen)
    # One more, for the vector itself, which is the nearest of all, and would be no test.
    expected, _ = file.search(queries, _RECALL_AT + 1, probes=file.num_lists)
    probes = 1
    while True:
        found, is_exact = file.search(queries, _RECALL_AT + 1, probes=probes)
        hits = [
            len(np.intersect1d(one[one != own], other[other != own][:_RECALL_AT]))
            for own, (one, _), (other, _) in zip(chosen, found, expected, strict=True)
        ]
        recall = sum(min(hit, _RECALL_AT) for hit in hits) / (_RECALL_AT * len(hits))
        if recall >= TARGET_RECALL or is_exact:
            return probes, recall
        probes = min(probes + max(probes // 2, 1), file.num_lists)
