"""Vectors of embeddings: preparing them for a metric, comparing them in blocks, and keeping the best of all blocks.

Blocks are compared with one matrix product each, whose last bits depend on the block. So candidates are scored once
more, one by one: the scores of a sample are the same whatever it was compared with.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError

__all__ = ["METRICS", "SPARE", "BestRows", "Metric", "Vectors", "check_metric", "nearness", "prepared", "scores_of"]

Metric: TypeAlias = Literal["cosine", "ip", "l2"]
METRICS: tuple[Metric, ...] = get_args(Metric)

Vectors: TypeAlias = npt.NDArray[np.float32]

_MAX_SQUARES = 1e37  # sum of the squares of a vector: what is computed of two of them fits in float32

SPARE = 8
"""Candidates beyond k that are scored once more, because rounding may have swapped neighbors."""


def check_metric(metric: str) -> Metric:
    """Returns the metric of a name; `ConfigError` for an unknown one."""
    for known in METRICS:
        if metric == known:
            return known
    raise ConfigError("arguments", "metric", f"found {metric!r}, expected {', '.join(METRICS)}")


def prepared(values: npt.NDArray[Any], metric: Metric) -> tuple[Vectors, npt.NDArray[np.bool_]]:
    """Vectors as they are stored and compared: of length 1 for `cosine`.

    Args:
        values: (n, D) of real numbers.
        metric: how they are compared.

    Returns:
        (n, D) float32; (n,) bool, False for vectors that cannot be compared, which are zero: those with a number that
        is not finite, those with a length above 3e18 and, for `cosine`, zero vectors.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        vectors = np.array(values, dtype=np.float32, order="C")
        if metric == "cosine":
            # Divided by the largest number first: squares of large or small ones would overflow or vanish.
            vectors /= np.abs(vectors).max(axis=1, keepdims=True, initial=0)
        squares = np.einsum("ij,ij->i", vectors, vectors)
        valid = squares <= _MAX_SQUARES  # which NaN is not
        if metric == "cosine":
            vectors /= np.sqrt(squares)[:, None]
    vectors[~valid] = 0
    return vectors, valid


def nearness(queries: Vectors, vectors: Vectors, metric: Metric) -> Vectors:
    """Returns (Q, n) numbers that order vectors (n, D) by nearness to each of the queries (Q, D)."""
    if len(queries) == 1:  # without threads, which would wait for each other for each of many short products
        products: Vectors = np.vecdot(vectors, queries[0])[None]
    else:
        products = queries @ vectors.T
    if metric == "l2":
        products *= 2
        products -= np.einsum("ij,ij->i", vectors, vectors)
    return products


def scores_of(query: Vectors, vectors: Vectors, metric: Metric) -> Vectors:
    """Returns the scores (n,) of vectors (n, D) for a query (D,), each the same whatever the others are."""
    if metric == "l2":
        squares: npt.NDArray[np.float64] = ((vectors.astype(np.float64) - query) ** 2).sum(axis=1)
        return (-np.sqrt(squares)).astype(np.float32)
    products: npt.NDArray[np.float64] = (vectors.astype(np.float64) * query).sum(axis=1)
    return products.astype(np.float32)


class BestRows:
    """The nearest rows of each query among all blocks so far.

    Args:
        num_queries: queries.
        count: rows to keep for each.

    Attributes:
        rows: (Q, count) int64, in no order; -1 where there were fewer.
    """

    def __init__(self, num_queries: int, count: int) -> None:
        self.rows = np.full((num_queries, count), -1, np.int64)
        self._scores = np.full((num_queries, count), -np.inf, np.float32)

    def add(self, scores: Vectors, rows: npt.NDArray[np.int64]) -> None:
        """Takes the scores (Q, n) of rows (n,); those of -inf are not kept."""
        count = self.rows.shape[1]
        if scores.shape[1] > count:
            best = np.argpartition(scores, -count, axis=1)[:, -count:]
            scores, chosen = np.take_along_axis(scores, best, axis=1), rows[best]
        else:
            chosen = np.broadcast_to(rows, scores.shape)
        scores = np.concatenate([self._scores, scores], axis=1)
        chosen = np.concatenate([self.rows, np.where(np.isneginf(scores[:, count:]), -1, chosen)], axis=1)
        best = np.argpartition(scores, -count, axis=1)[:, -count:]
        self._scores = np.take_along_axis(scores, best, axis=1)
        self.rows = np.take_along_axis(chosen, best, axis=1)
