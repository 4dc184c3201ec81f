"""Searching a dataset by embeddings: the samples whose vectors are nearest to a query, by an index or by a scan.

Without an index all vectors are read and compared in blocks, in bounded memory. With one, a few lists of it are read; a
condition or a view that leaves few samples makes more of them be read, and all that count if they are very few.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.codecs import DatasetFields
from mm_assets.dataset.open_files import DatasetIds, OpenFiles
from mm_assets.dataset.reader import SampleReader
from mm_assets.dataset.selection import matching_rows
from mm_assets.dataset.vector_index import VectorReader, best_of, open_index
from mm_assets.dataset.vectors import SPARE, BestRows, Metric, Vectors, check_metric, nearness, prepared, scores_of
from mm_assets.errors import ConfigError, SourceError
from mm_assets.formats.batch import check_index
from mm_assets.summaries import ArrayValue, describe

__all__ = ["SearchResult", "search"]

_MAX_QUERIES = 1024  # that are compared at a time: memory is per query and block


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SearchResult(ArrayValue):
    """The samples nearest to a query, the best first; of Q queries each array has a row for each of them.

    Attributes:
        indices: (k,) or (Q, k) int64, the samples, for `Dataset.select`. One query has fewer than k if fewer samples
            count; of several queries the remaining places are -1.
        ids: their sample ids, (k,) or (Q, k) of str; "" in remaining places.
        scores: (k,) or (Q, k) float32, larger is nearer: the cosine, the inner product, or for ``l2`` the Euclidean
            distance with a minus sign; NaN in remaining places.
        modality: (k,) or (Q, k) of str, the modality whose vector has that score.
        num_vectors: vectors of the searched modalities that can be found, of the samples that count; of all samples if
            an index is used.
        num_excluded: likewise, vectors that are never found, because a number is not finite, or for ``cosine`` all are
            zero.
        approximate: whether an index was used that may have missed some of the nearest.
    """

    indices: npt.NDArray[np.int64]
    ids: npt.NDArray[np.str_]
    scores: npt.NDArray[np.float32]
    modality: npt.NDArray[np.str_]
    num_vectors: int
    num_excluded: int
    approximate: bool

    def __len__(self) -> int:
        """Samples, or queries if there are several."""
        return len(self.indices)


_Found = list[tuple[npt.NDArray[np.int64], Vectors]]
"""Samples and their scores for each query, the best first."""


def search(
    files: OpenFiles,
    fields: DatasetFields,
    query: Any,
    modality: str | Sequence[str] | None,
    k: int,
    *,
    query_modality: str | None,
    where: str | None,
    metric: str,
    exact: bool | None,
    probes: int | None,
) -> SearchResult:
    """Finds the nearest samples; arguments and errors as `Dataset.search`."""
    if operator.index(k) < 1:
        raise ConfigError("arguments", "k", f"found {k}, expected at least 1")
    if probes is not None and operator.index(probes) < 1:
        raise ConfigError("arguments", "probes", f"found {probes}, expected at least 1")
    known = check_metric(metric)
    names = _modalities(fields, modality)
    own, vectors, is_single = _queries(files, fields, query, query_modality or names[0], known)
    samples = _Samples(files, fields, where)
    count = k if own is None else k + 1  # the sample itself is found, and left out
    merged: list[list[tuple[npt.NDArray[np.int64], Vectors]]] = [[] for _ in vectors]
    num_vectors = num_excluded = 0
    approximate = False
    for name in names:
        reader = VectorReader(files, fields, name, known)
        index = None if exact is True else files.index((name, known), partial(open_index, files.files, name, known))
        if index is None and exact is False:
            build = f"build it with `mm-assets index {files.name} --stream {name} --metric {known}`"
            raise SourceError(files.name, f"has no index of {name!r} for {known}: {build}")
        dimensions = reader.dimensions if index is None else index.dimensions
        if dimensions and dimensions != vectors.shape[1]:
            raise ConfigError(
                "arguments", "query", f"found {vectors.shape[1]} numbers, but the vectors of {name!r} have {dimensions}"
            )
        for start in range(0, len(vectors), _MAX_QUERIES):
            some = vectors[start : start + _MAX_QUERIES]
            if index is not None:
                found, is_exact = index.search(some, count, probes=probes, allowed=samples.allowed)
                found = [(samples.indices_of(positions), scores) for positions, scores in found]
                numbers = index.num_vectors, index.num_excluded
                approximate |= not is_exact
            else:
                found, numbers = _scan(reader, some, samples.indices, count, known)
            for number, (indices, scores) in enumerate(found, start):
                if own is not None:  # compared by position: a view may have the sample repeatedly
                    others = files.positions(indices) != files.positions([own])
                    indices, scores = indices[others], scores[others]
                merged[number].append((indices, scores))
        num_vectors, num_excluded = num_vectors + numbers[0], num_excluded + numbers[1]
    return _result(
        files,
        names,
        merged,
        k,
        is_single=is_single,
        num_vectors=num_vectors,
        num_excluded=num_excluded,
        approximate=approximate,
    )


def _modalities(fields: DatasetFields, modality: str | Sequence[str] | None) -> list[str]:
    """The modalities to search; by default all vectors of floating-point numbers."""
    if modality is not None:
        names = [modality] if isinstance(modality, str) else list(dict.fromkeys(modality))
        if not names:
            raise ConfigError("arguments", "modality", "found no name")
        return names
    vectors = [name for name, field in fields.known.items() if field.vector_size]
    if len(vectors) != 1:
        existing = ", ".join(vectors) or "none"
        raise ConfigError("arguments", "modality", f"name what to search: the modalities of vectors are {existing}")
    return vectors


def _queries(
    files: OpenFiles, fields: DatasetFields, query: Any, modality: str, metric: Metric
) -> tuple[int | None, Vectors, bool]:
    """The sample that the query is, if it is one; the queries (Q, D), prepared; and whether there is only one."""
    own: int | None = None
    if isinstance(query, str):
        own = files.find(query)
        if own is None:
            raise ConfigError("arguments", "query", f"found {query!r}, expected the id of a sample of {files.name}")
    elif not isinstance(query, np.ndarray | Sequence) and hasattr(query, "__index__"):
        own = check_index(query, files.num_samples, files.name)
    if own is not None:
        value = SampleReader(files, fields).read_modality(modality, [own])[0]
        if value is None:
            raise ConfigError("arguments", "query", f"sample {DatasetIds(files)[own]!r} has no {modality!r}")
        query = value
    values = np.asarray(query)
    if values.ndim not in (1, 2) or values.dtype.kind not in "iuf" or not values.shape[-1]:
        expected = "a vector (D,), vectors (Q, D), the index or the id of a sample"
        raise ConfigError("arguments", "query", f"found {describe(values)}, expected {expected}")
    vectors, valid = prepared(np.atleast_2d(values), metric)
    if not valid.all():
        what = "zero or not finite" if metric == "cosine" else "not finite"
        which = "" if values.ndim == 1 else f" {int(np.argmin(valid))}"
        raise ConfigError("arguments", "query", f"vector{which} is {what}: nothing is near it")
    return own, vectors, values.ndim == 1


class _Samples:
    """The samples that count.

    Args:
        files: of the dataset, which may be a view.
        fields: its fields.
        where: a condition in SQL, or None.

    Attributes:
        allowed: (num_stored,) bool by position in the files; None for all samples.
    """

    def __init__(self, files: OpenFiles, fields: DatasetFields, where: str | None) -> None:
        self.allowed: npt.NDArray[np.bool_] | None = None
        self._positions: npt.NDArray[np.int64] | None = None
        self._num_samples = files.num_samples
        self._chosen: npt.NDArray[np.int64] | None = None
        if where is None and files.selection is None:
            return
        self._chosen = np.arange(files.num_samples)
        if where is not None:
            self._chosen = matching_rows(files, fields.names, fields.known, where)
        positions = files.positions(self._chosen)
        if files.selection is not None:
            positions, first = np.unique(positions, return_index=True)
            self._positions, self._indices = positions, self._chosen[first]
            self._chosen = np.sort(self._indices)
        self.allowed = np.zeros(files.num_stored, np.bool_)
        self.allowed[positions] = True

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """(n,) int64, ascending; of a sample that a view has repeatedly, the first."""
        return np.arange(self._num_samples) if self._chosen is None else self._chosen

    def indices_of(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The indices of samples that count, by their positions in the files."""
        if self._positions is None:
            return positions
        return self._indices[np.searchsorted(self._positions, positions)]


def _scan(
    reader: VectorReader, queries: Vectors, indices: npt.NDArray[np.int64], k: int, metric: Metric
) -> tuple[_Found, tuple[int, int]]:
    """Compares the vectors of samples, all of them; returns how many were compared, and how many could not be."""
    best = BestRows(len(queries), k + SPARE)
    num_vectors = num_excluded = 0
    for some, vectors, excluded in reader.blocks(indices):
        if len(vectors):
            if vectors.shape[1] != queries.shape[1]:
                detail = f"found {queries.shape[1]} numbers, but the vectors have {vectors.shape[1]}"
                raise ConfigError("arguments", "query", detail)
            best.add(nearness(queries, vectors, metric), some)
        num_vectors, num_excluded = num_vectors + len(vectors), num_excluded + len(excluded)
    found: _Found = []
    for query, rows in zip(queries, best.rows, strict=True):
        samples = np.sort(rows[rows >= 0])
        vectors = np.concatenate([np.zeros((0, len(query)), np.float32), *(v for _, v, _ in reader.blocks(samples))])
        found.append(best_of([(samples, scores_of(query, vectors, metric))], k))
    return found, (num_vectors, num_excluded)


def _result(
    files: OpenFiles,
    names: Sequence[str],
    merged: Sequence[Sequence[tuple[npt.NDArray[np.int64], Vectors]]],
    k: int,
    *,
    is_single: bool,
    num_vectors: int,
    num_excluded: int,
    approximate: bool,
) -> SearchResult:
    """Merges the results of the modalities: a sample has the best of its scores."""
    width = k if not is_single else min(k, len({int(i) for samples, _ in merged[0] for i in samples}))
    indices = np.full((len(merged), width), -1, np.int64)
    scores = np.full((len(merged), width), np.nan, np.float32)
    modality = np.full((len(merged), width), "", dtype=f"<U{max(map(len, names))}")
    for row, results in enumerate(merged):
        samples = np.concatenate([samples for samples, _ in results])
        values = np.concatenate([values for _, values in results])
        of = np.repeat(np.arange(len(names)), [len(samples) for samples, _ in results])
        order = np.lexsort((of, samples, -values))
        order = order[np.sort(np.unique(samples[order], return_index=True)[1])][:width]
        indices[row, : len(order)], scores[row, : len(order)] = samples[order], values[order]
        modality[row, : len(order)] = np.array(names)[of[order]]
    existing = indices >= 0
    sample_ids = DatasetIds(files).take(files.positions(indices[existing]))
    ids = np.full(indices.shape, "", dtype=f"<U{max(map(len, sample_ids), default=1) or 1}")
    ids[existing] = sample_ids
    which = 0 if is_single else slice(None)
    return SearchResult(
        indices=indices[which],
        ids=ids[which],
        scores=scores[which],
        modality=modality[which],
        num_vectors=num_vectors,
        num_excluded=num_excluded,
        approximate=approximate,
    )
