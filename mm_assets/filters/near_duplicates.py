"""Near duplicates within a partition: images that look like an earlier one, by the distance of perceptual hashes.

The first of several is kept, in source order. For each kept image its hash and its places in the index are held for the
length of the partition: less than a kilobyte. A lookup finds every hash within the distance, and compares few others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations

import numpy as np

from mm_assets.filters.base import Block, Filter, Rows
from mm_assets.filters.duplicates import DIGEST_SIZE, by_scope, content_digests
from mm_assets.filters.parameters import check_choice, check_whole, wrong
from mm_assets.filters.perceptual_hash import HASH_BITS, perceptual_hash
from mm_assets.rows.schema import Drop

__all__ = ["MAX_DISTANCE", "HammingIndex", "NearDuplicatesFilter", "image_hashes"]

MAX_DISTANCE = 15  # bits of 64; two different pictures differ by about 32, and rarely by 16 or less
_PLAIN = -1  # in place of the hash of an image too plain to have one: hashes are not negative
_BANDS = 4
_BAND_BITS = HASH_BITS // _BANDS

_Signature = int | bytes  # its hash; of an image too plain to have one, the start of its SHA-256


def image_hashes(block: Block, rows: Rows) -> list[int | None]:
    """The perceptual hash of each row's image; None where it is not there, cannot be decoded, or is too plain."""
    return [None if found is None or found == _PLAIN else found for found in _measured(block, rows)]


def _measured(block: Block, rows: Rows) -> list[int | None]:
    return block.measure("perceptual hash", rows, _hash_or_plain, threaded=True)


def _hash_or_plain(data: memoryview) -> int:
    found = perceptual_hash(data)
    return _PLAIN if found is None else found


class HammingIndex:
    """Entries of one or more hashes of 64 bits, found by their distance: the bits in which two hashes differ.

    The distance of two entries is the largest of their hashes', one by one. The first hash is split into four bands of
    16 bits, each the key of a bucket. Of two hashes at a distance of at most 4 r + a (a below 4), one of the first
    a + 1 bands differs by at most r bits, or one of the others by at most r - 1: else they would differ by at least
    (a + 1) (r + 1) + (3 - a) r = 4 r + a + 1. So looking into the buckets of all such keys misses none.

    Args:
        max_distance: largest distance at which an entry is found, 0 to 63.
        width: hashes of one entry, at least 1.
    """

    def __init__(self, *, max_distance: int, width: int = 1) -> None:
        self.max_distance = max_distance
        self.width = width
        self._hashes = array("Q")
        self._buckets: dict[int, array[int]] = {}  # band and its bits -> numbers of entries
        self._flips = _flips(max_distance)

    def __len__(self) -> int:
        return len(self._hashes) // self.width

    def add(self, entry: Sequence[int]) -> None:
        """Adds an entry, whether it is there already or not."""
        number = len(self)
        self._hashes.extend(entry)
        for key in _keys(entry[0]):
            self._buckets.setdefault(key, array("I")).append(number)

    def nearest(self, entry: Sequence[int]) -> int | None:
        """The distance to the nearest entry, or None where none is within `max_distance`."""
        found = array("I")
        for key, flips in zip(_keys(entry[0]), self._flips, strict=True):
            for flip in flips:
                bucket = self._buckets.get(key ^ flip)
                if bucket is not None:
                    found.extend(bucket)
        if not found:
            return None
        numbers = np.frombuffer(found, dtype=np.uint32)
        # Indexing copies, so the view is released at once: an array that is viewed cannot grow.
        others = np.frombuffer(self._hashes, dtype=np.uint64).reshape(-1, self.width)[numbers]
        distances = np.bitwise_count(others ^ np.array(entry, dtype=np.uint64)).max(axis=1)
        least = int(distances.min())
        return least if least <= self.max_distance else None


@cache
def _flips(max_distance: int) -> tuple[tuple[int, ...], ...]:
    """For each band, what its bits are combined with to give the keys to look up."""
    radius, rest = divmod(max_distance, _BANDS)
    within = [
        tuple(sum(1 << bit for bit in bits) for n in range(limit + 1) for bits in combinations(range(_BAND_BITS), n))
        for limit in (radius, radius - 1)
    ]
    return tuple(within[0] if band <= rest else within[1] for band in range(_BANDS))


def _keys(value: int) -> Iterator[int]:
    mask = (1 << _BAND_BITS) - 1
    for band in range(_BANDS):
        yield band << _BAND_BITS | (value >> band * _BAND_BITS) & mask


class NearDuplicatesFilter(Filter):
    """Drops images that look like an earlier image of the partition that passed.

    An image that is missing or cannot be decoded is never a duplicate, nor is a sample that has one, or no image. A
    picture too plain to have a hash is one only of another that is the same byte for byte.

    Args:
        max_distance: most bits, of 64, by which the perceptual hashes of near duplicates differ, 0 to 15.
        scope: "row" drops an image that looks like one kept; "sample" drops a sample whose images all look, in the
            same order, like those of one sample that was kept.
    """

    needs_content = True
    reasons = frozenset({"near_duplicate"})
    compares_samples = True

    def __init__(self, *, max_distance: int = 6, scope: str = "sample") -> None:
        self.max_distance = check_whole("max_distance", max_distance)
        if self.max_distance > MAX_DISTANCE:
            raise wrong("max_distance", f"is {max_distance!r}, expected at most {MAX_DISTANCE}")
        self.scope = "row" if check_choice("scope", scope, ("row", "sample")) == "row" else "sample"
        # By the plain images of a sample, None in the places of others: samples are compared where these agree.
        self._kept: dict[tuple[bytes | None, ...], HammingIndex] = {}
        self._kept_plain: set[tuple[bytes | None, ...]] = set()

    def judge(self, block: Block) -> Iterable[Drop]:
        """``near_duplicate`` with the distance, the largest of a sample's images."""
        rows = block.rows_of("image")
        for row, images in by_scope(block, rows, self._signatures(block, rows), self.scope):
            distance = self._distance_or_keep(images)
            if distance is not None:
                yield Drop(row, "near_duplicate", float(distance))

    def _signatures(self, block: Block, rows: Rows) -> list[_Signature | None]:
        """The signature of each row's image; None where it cannot be decoded."""
        hashes = _measured(block, rows)
        plain = rows[[found == _PLAIN for found in hashes]]
        digests = dict(zip(plain.tolist(), content_digests(block, plain), strict=True))
        return [
            found if (digest := digests.get(row)) is None else digest[:DIGEST_SIZE]
            for row, found in zip(rows.tolist(), hashes, strict=True)
        ]

    def _distance_or_keep(self, images: Sequence[_Signature]) -> int | None:
        """The distance to the nearest sample kept; None where none is near, and this one is kept from now on."""
        plain = tuple(signature if isinstance(signature, bytes) else None for signature in images)
        hashes = [signature for signature in images if isinstance(signature, int)]
        if not hashes:
            if plain in self._kept_plain:
                return 0
            self._kept_plain.add(plain)
            return None
        kept = self._kept.get(plain)
        if kept is None:
            kept = self._kept[plain] = HammingIndex(max_distance=self.max_distance, width=len(hashes))
        distance = kept.nearest(hashes)
        if distance is None:
            kept.add(hashes)
        return distance
