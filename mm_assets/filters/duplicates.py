"""Exact duplicates within a partition: content that has been seen before, byte for byte.

Content is identified by the first half of its SHA-256: 16 bytes per item are held for the length of the partition,
about 100 bytes with Python's overhead. The first of several is kept, in source order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow.compute as pc

from mm_assets.filters.base import Block, Filter, Rows
from mm_assets.filters.parameters import check_choice, check_names
from mm_assets.rows.schema import Drop

__all__ = ["ExactDuplicatesFilter", "by_scope", "content_digests"]

DIGEST_SIZE = 16  # bytes; among 10**9 items a chance of 10**-21 that two different ones agree


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def content_digests(block: Block, rows: Rows) -> list[bytes | None]:
    """SHA-256 of each row's bytes, or of its text as UTF-8; None where it has neither."""
    return block.measure("sha256", rows, _sha256, threaded=True)


def by_scope(block: Block, rows: Rows, values: Sequence[Any], scope: str) -> Iterator[tuple[int, list[Any]]]:
    """What is compared as a whole: the value of each row or, with scope "sample", the values of all rows of a sample.

    Yields the row to drop, the first of a sample, and the values. What lacks a value (None) is left out.
    """
    starts = block.sample_starts[block.sample_index[rows]] if scope == "sample" else rows
    for row, group in groupby(zip(starts.tolist(), values, strict=True), key=itemgetter(0)):
        parts = [value for _, value in group]
        if None not in parts:
            yield row, parts


class ExactDuplicatesFilter(Filter):
    """Drops content that an earlier row of the partition has.

    Content that could not be read is never a duplicate, nor is a sample that lacks content or has none to compare.

    Args:
        scope: "row" drops a row whose modality and content have been seen; "sample" drops a sample whose content rows
            have all been seen, in the same order, as those of one earlier sample.
        modalities: row modalities to compare. None compares all content, except, with scope "row", texts: the same
            words in two samples are fine.
    """

    reasons = frozenset({"duplicate"})
    compares_samples = True

    def __init__(self, *, scope: str = "sample", modalities: Sequence[str] | None = None) -> None:
        self.scope = "row" if check_choice("scope", scope, ("row", "sample")) == "row" else "sample"
        self.modalities = None if modalities is None else check_names("modalities", modalities)
        self.needs_content = self.modalities != ("text",)
        self._seen: set[bytes] = set()

    def judge(self, block: Block) -> Iterable[Drop]:
        """``duplicate``, without a value."""
        rows = self._compared(block)
        digests = content_digests(block, rows)
        modalities = block.column("modality").take(rows).to_pylist()
        keys = [
            None if digest is None else modality.encode() + b"\0" + digest
            for modality, digest in zip(modalities, digests, strict=True)
        ]
        for row, parts in by_scope(block, rows, keys, self.scope):
            if self._is_known(b"".join(parts)):
                yield Drop(row, "duplicate", None)

    def _compared(self, block: Block) -> Rows:
        if self.modalities is not None:
            return block.rows_of(*self.modalities)
        compared = ~block.is_metadata
        if self.scope == "row":
            compared &= np.asarray(pc.not_equal(block.column("modality"), "text").to_numpy(), dtype=np.bool_)
        return np.flatnonzero(compared)

    def _is_known(self, key: bytes) -> bool:
        """Whether `key` has been seen; from now on it has."""
        fingerprint = hashlib.sha256(key).digest()[:DIGEST_SIZE]
        is_known = fingerprint in self._seen
        self._seen.add(fingerprint)
        return is_known
