"""From a sample's id to its place, at ten million samples and over thousands of files.

Sorted 64-bit hashes of all ids are in one array, found by bisection: 12 bytes per sample (16 beyond 2**32 samples), and
no Python object for any. A hash only names candidates; the caller compares them with the ids in the files, so ids made
to collide cost time and never a wrong answer. The cache depends on the files only, not on a selection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import accumulate, chain, islice

import numpy as np
import numpy.typing as npt

from mm_assets.formats.sample_ids import SortedIndex, hash_ids

__all__ = ["IdLookup", "hash_texts", "mix_bits"]

_BLOCK = 1 << 15  # ids hashed together

SampleIds = Iterable[str]


def hash_texts(texts: SampleIds, count: int) -> npt.NDArray[np.uint64]:
    """The 64-bit hash of each text's UTF-8 (its first MiB), (count,): the hash by which packed files look up ids."""
    hashes = np.empty(count, np.uint64)
    start, left = 0, iter(texts)
    while block := list(islice(left, _BLOCK)):
        hashes[start : start + len(block)] = _hash_block(block)
        start += len(block)
    return hashes


def _hash_block(texts: list[str]) -> npt.NDArray[np.uint64]:
    data = "".join(texts).encode()
    # Where every byte is a character, a text's length is that of its bytes.
    sizes = map(len, texts) if data.isascii() else (len(text.encode()) for text in texts)
    offsets = np.fromiter(accumulate(sizes, initial=0), np.uint64, len(texts) + 1)
    return hash_ids(offsets, lambda start, stop: data[start:stop])


def mix_bits(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), in place, a bijection: every bit moves every bit."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


class IdLookup:
    """From ids to positions; built by the first look-up, in one of several threads, and dropped by `forget`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index: SortedIndex[np.uint64] | None = None

    def candidates(self, sample_id: str, count: int, files: Callable[[], Iterable[SampleIds]]) -> list[int]:
        """Positions of the samples whose id has the hash of `sample_id`, ascending.

        Args:
            sample_id: the id to find.
            count: samples in all files.
            files: gives the ids of each file, in order; asked once.

        Raises:
            FormatError: a file's ids are damaged.
        """
        try:
            wanted = hash_texts([sample_id], 1)[0]
        except UnicodeEncodeError:
            return []  # a lone surrogate cannot be in a file
        with self._lock:
            if self._index is None:
                self._index = SortedIndex(hash_texts(chain.from_iterable(files()), count))
            return self._index.find(wanted)

    def forget(self) -> None:
        """Drops what is cached."""
        self._index = None
