"""Fetching the parts of a local file that are about to be read, together and only where they are not in memory yet.

On a mapping that is advised for random reads, the kernel reads one page at a time. If the pages of a whole batch are
requested beforehand, it reads them in parallel. A request for resident pages costs as much as reading them: so a few
positions are probed, and only a miss leads to a request. This changes when data arrives, not what is read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

# Bytes of one request: the kernel silently truncates a longer one to what the device takes, 128 KiB at least.
REQUEST = 128 << 10
PAGE = 4096  # ranges are rounded to it; of larger pages the kernel fetches the whole one
_PROBES = 4  # positions of a batch that are probed
_CALM = 64  # batches, one after the other, without a miss, until one position or two are enough
_PATIENCE = 8  # single reads between two probes while nothing is missed
_REST = 16  # batches per probed one, on average, while nothing is missed: a probe costs as much as reading
_SMALL = 512  # ranges of a batch that costs little if it is read from disk without a request

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # Linux has it
CAN_ADVISE = hasattr(os, "posix_fadvise")  # macOS lacks it and has only the kernel's own read-ahead
_CANNOT_TELL = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}  # the file system or kernel has no such read


class Residency:
    """How often batches are probed for residency in memory: seldom while nothing is missed; threads may share it."""

    __slots__ = ("_calm", "_dice", "_left")

    def __init__(self) -> None:
        self._calm = 0  # batches and single reads since the last miss
        self._left = 0  # small batches until the next probe
        self._dice = 1

    def may_skip(self, count: int) -> bool:
        """Whether a batch of `count` ranges need not be probed: most small ones while nothing is missed.

        Called once per batch; False at regular intervals.
        """
        if self._calm < _CALM or count > _SMALL:
            return False
        if self._left:
            self._left -= 1
            return True
        self._left = self.pick() % (2 * _REST)
        return False

    def pick(self) -> int:
        """A number of 23 bits that differs each time: probes must not keep step with how batches are made."""
        self._dice = dice = (self._dice * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
        return dice >> 8  # the low bits of such a generator have short periods

    def probes(self, count: int) -> range:
        """Which of the ranges of a batch are probed: a few evenly spaced ones, others the next time."""
        step = max(1, count // (_PROBES if self._calm < _CALM else 1))
        return range(self.pick() % step, count, step)

    def note(self, are_resident: Iterable[bool]) -> bool:
        """Whether all that is probed is resident; ends with the first position that is not."""
        found = all(are_resident)
        self._calm = self._calm + 1 if found else 0
        return found


class PageCache(Residency):
    """Probes and requests for the pages of one file.

    Where residency is unknown (no `RWF_NOWAIT`, or a file system that refuses it) every batch is requested: that makes
    reading from memory up to a third slower, but no request would make reading from disk fifty times slower.

    Args:
        fd: the file; stays the caller's.
    """

    __slots__ = ("_byte", "_can_tell", "_fd", "_singles")

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._byte = [bytearray(1)]
        self._can_tell = _NOWAIT is not None
        self._singles = 0  # single reads

    def forget(self) -> None:
        """Stops all requests: the descriptor will be another file's."""
        self._fd = -1

    def is_resident(self, position: int) -> bool:
        """Whether the byte at a position is in memory; False where that is unknown, True where no page is requested."""
        if not CAN_ADVISE:
            return True
        if not self._can_tell or _NOWAIT is None:
            return False
        try:
            os.preadv(self._fd, self._byte, position, _NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            # Closed by another thread: nothing to fetch, and the read itself will say so.
            if error.errno not in _CANNOT_TELL:
                return True
            self._can_tell = False
            return False
        return True  # also after the end of the file, where nothing can be read

    def is_still_resident(self, count: int, position: int) -> bool:
        """Whether a batch of `count` ranges need not be fetched, by the one probe that `fetch` would make there.

        False wherever `fetch` would probe more than one.
        """
        return self._calm >= _CALM and count <= _SMALL and self.note((self.is_resident(position),))

    def fetch(self, starts: npt.NDArray[np.uint64], ends: npt.NDArray[np.uint64]) -> None:
        """Pages in the ranges of a batch if one of a few that are probed is not resident.

        Args:
            starts: positions, of any shape.
            ends: of the same shape, not below `starts`; the ranges lie within the file.
        """
        if not self.note(map(self.is_resident, map(starts.item, self.probes(starts.size)))):
            self._request(starts, ends)

    def fetch_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """As `fetch`, of ranges (position, size); where nothing is missed no array is made of them."""
        if len(ranges) == 1:
            self.fetch_one(ranges[0][0], sum(ranges[0]))
            return
        if not self.note(self.is_resident(ranges[k][0]) for k in self.probes(len(ranges))):
            starts, sizes = np.array(ranges, np.uint64).T
            self._request(starts, starts + sizes)

    def fetch_one(self, start: int, end: int) -> None:
        """Pages in one range; while nothing was missed lately, only some are probed."""
        if end - start > REQUEST:
            self.fetch_all(start, end)  # part of it may be there
            return
        self._singles += 1
        if self._calm >= _CALM and self._singles % _PATIENCE:
            return
        if not self.note((self.is_resident(start),)):
            self.request(start, end)

    def fetch_all(self, start: int, end: int) -> None:
        """Pages in a long range unless all of the few positions that are probed are resident."""
        step = max(PAGE, -(-(end - start) // _PROBES))
        if not all(self.is_resident(position) for position in range(start, end, step)):
            self.request(start, end)

    def _request(self, starts: npt.NDArray[np.uint64], ends: npt.NDArray[np.uint64]) -> None:
        """Requests the pages of all ranges, once for those that touch."""
        firsts = (starts.ravel() // np.uint64(PAGE)).astype(np.int64)
        lasts = (-(-ends.ravel().astype(np.int64) // PAGE)).astype(np.int64)
        firsts, lasts = merge_touching(firsts, lasts)
        for first, last in zip((firsts * PAGE).tolist(), (lasts * PAGE).tolist(), strict=True):
            self.request(first, last)

    def request(self, start: int, end: int) -> None:
        """Requests the pages of one range."""
        for position in range(start, end, REQUEST):
            try:
                os.posix_fadvise(self._fd, position, min(REQUEST, end - position), os.POSIX_FADV_WILLNEED)
            except OSError:
                return  # a file system that takes no advice, or a file that another thread has closed


def merge_touching(
    firsts: npt.NDArray[np.int64], lasts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Runs [first, last) of which those that touch or overlap are made one, ascending; (n,) each, n from 1."""
    order = np.argsort(firsts, kind="stable")
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    heads = np.flatnonzero(np.concatenate([[True], firsts[1:] > lasts[:-1]]))
    return firsts[heads], lasts[np.concatenate([heads[1:] - 1, [len(lasts) - 1]])]
