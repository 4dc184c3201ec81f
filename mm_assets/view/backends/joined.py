"""Several sources as one, one after the other: the next is opened where the one before ends."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from mm_assets.display import Item
from mm_assets.errors import MmAssetsError
from mm_assets.view.backends.base import Backend, Entry, NoSampleError, Picture

__all__ = ["JoinedBackend"]

_MAX_NOTES = 5


class JoinedBackend(Backend):
    """The samples of several sources in their order. One that cannot be opened has none, and the note says why.

    Args:
        title: what the page calls it.
        kind: what it is, in words.
        sources: by its key each source's function that opens it; the backend closes what was opened.
    """

    def __init__(self, title: str, kind: str, sources: Mapping[str, Callable[[], Backend]]) -> None:
        super().__init__(title, kind)
        self._sources = dict(sources)
        self._keys = list(self._sources)
        self._open: dict[str, Backend | None] = {}  # None where it cannot be opened
        self._notes: list[str] = []
        self._row: list[Backend] = []  # those that are counted, of which the last may have further samples
        self._next = 0  # of the sources that are not among them
        self._lock = threading.RLock()

    def _opened(self, key: str) -> Backend | None:
        with self._lock:
            if key not in self._open:
                try:
                    self._open[key] = self._sources[key]()
                except MmAssetsError as error:
                    self._open[key] = None
                    self._notes.append(str(error))
            return self._open[key]

    # --- which samples ------------------------------------------------------------------------------------------------

    def reach(self, count: int, seconds: float) -> None:
        """Opens and reads one source after the other until so many samples are known."""
        ends = time.monotonic() + seconds
        while not self.is_complete and self.known() <= count and time.monotonic() < ends:
            with self._lock:
                if self._row and not self._row[-1].is_complete:
                    last = self._row[-1]
                elif self._next < len(self._keys):
                    found = self._opened(self._keys[self._next])
                    self._next += 1
                    if found is not None:
                        self._row.append(found)
                    continue
                else:
                    return
                before = sum(one.known() for one in self._row[:-1])
            last.reach(count - before, ends - time.monotonic())

    @property
    def is_complete(self) -> bool:
        """Whether every source was read to its end."""
        with self._lock:
            return self._next == len(self._keys) and (not self._row or self._row[-1].is_complete)

    def known(self) -> int:
        """Samples of the sources that were read so far."""
        with self._lock:
            return sum(one.known() for one in self._row)

    def _at(self, index: int) -> tuple[Backend, int, int]:
        """The source of a known sample, its number there, and that of the source's first."""
        with self._lock:
            starts = list(accumulate((one.known() for one in self._row), initial=0))
            place = min(bisect_right(starts, index) - 1, len(self._row) - 1)
            return self._row[place], index - starts[place], starts[place]

    def ids(self, start: int, stop: int) -> Sequence[str]:
        """The ids of samples, source by source."""
        found: list[str] = []
        while start < stop:
            source, at, first = self._at(start)
            size = min(stop - start, source.known() - at)
            if size <= 0:
                break
            found += source.ids(at, at + size)
            start = first + at + size
        return found

    # --- what is in it ------------------------------------------------------------------------------------------------

    def about(self) -> Mapping[str, Any]:
        """How many sources there are."""
        return {"files": len(self._keys)}

    def note(self) -> str:
        """What cannot be opened, and what the sources note."""
        with self._lock:
            notes = [*self._notes, *filter(None, (one.note() for one in self._row))]
        more = [f"{len(notes) - _MAX_NOTES:,} more files have a note."] if len(notes) > _MAX_NOTES else []
        return "\n".join([*notes[:_MAX_NOTES], *more])

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """The cards of chosen samples, numbered through all sources."""
        found = []
        for index in indices:
            self.check(index)
            source, at, first = self._at(index)
            (entry,) = source.entries([at])
            found.append(replace(entry, index=first + entry.index))
        return found

    def items(self, index: int) -> tuple[Item, ...]:
        """As its source's."""
        self.check(index)
        source, at, _ = self._at(index)
        return source.items(at)

    def picture(self, index: int) -> Picture:
        """As its source's."""
        self.check(index)
        source, at, _ = self._at(index)
        return source.picture(at)

    def identity(self, index: int) -> str:
        """As its source's."""
        self.check(index)
        source, at, _ = self._at(index)
        return source.identity(at)

    # --- sources as partitions ----------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Mapping[str, Any]]:
        """The sources; how many samples one has where it was read to its end."""
        with self._lock:
            known = {key: one for key, one in self._open.items() if one is not None and one.is_complete}
        return [{"key": key, "samples": known[key].known() if key in known else None} for key in self._keys]

    def partition(self, key: str) -> Backend:
        """One source."""
        if key not in self._sources:
            raise NoSampleError(f"{self.title} has no file {key!r}")
        found = self._opened(key)
        if found is None:
            raise NoSampleError(f"{key} cannot be read: {self.note()}")
        return found

    def close(self) -> None:
        """Closes the sources."""
        with self._lock:
            for one in self._open.values():
                if one is not None:
                    one.close()
            self._open.clear()
            self._row.clear()
