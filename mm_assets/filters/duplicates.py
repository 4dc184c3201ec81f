"""Exact duplicates within a partition: content that has been seen before, byte for byte.

Content is identified by the first half of its SHA-256: 16 bytes per item are held for the length of the partition,
about 100 bytes with Python's overhead. The first of several is kept, in source order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow.compute as pc

from mm_assets.filters.base import Block, Filter, Rows
from mm_assets.filters.parameters import check_choice, check_names
from mm_assets.rows.schema import Drop

__all__ = ["ExactDuplicatesFilter", "content_digests"]

DIGEST_SIZE = 16  # bytes; among 10**9 items a chance of 10**-21 that two different ones agree


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def content_digests(block: Block, rows: Rows) -> list[bytes | None]:
    """SHA-256 of each row's bytes, or of its text as UTF-8; None where it has neither."""
    return block.measure("sha256", rows, _sha256, threaded=True)


class ExactDuplicatesFilter(Filter):
    """Drops content that an earlier row of the partition has.

    Content that could not be read is never a duplicate, nor is a sample that lacks content or has none to compare.

    Args:
        scope: "row" drops a row whose modality and content have been seen; "sample" drops a sample whose content rows
            have all been seen, in the same order, as those of one earlier sample.
        modalities: row modalities to compare. None compares all content, except, with scope "row", texts: the same
            words in two samples are fine.
    """

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
        if self.scope == "row":
            for row, key in zip(rows.tolist(), keys, strict=True):
                if key is not None and self._is_known(key):
                    yield Drop(row, "duplicate", None)
            return
        of_sample: dict[int, list[bytes | None]] = {}
        for sample, key in zip(block.sample_index[rows].tolist(), keys, strict=True):
            of_sample.setdefault(sample, []).append(key)
        starts = block.sample_starts
        for sample, parts in of_sample.items():
            whole = [part for part in parts if part is not None]
            if len(whole) == len(parts) and self._is_known(b"".join(whole)):
                yield Drop(int(starts[sample]), "duplicate", None)

    def _compared(self, block: Block) -> Rows:
        if self.modalities is not None:
            return block.rows_of(*self.modalities)
        compared = ~block.is_metadata
        if self.scope == "row":
            compared &= np.asarray(pc.not_equal(block.column("modality"), "text").to_numpy(), dtype=np.bool_)
        return np.flatnonzero(compared).astype(np.int64)

    def _is_known(self, key: bytes) -> bool:
        """Whether `key` has been seen; from now on it has."""
        mark = hashlib.sha256(key).digest()[:DIGEST_SIZE]
        if mark in self._seen:
            return True
        self._seen.add(mark)
        return False
