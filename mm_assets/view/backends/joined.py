"""Several sources as one, one after the other: the next is opened where the one before ends."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

from mm_assets.display import Item
from mm_assets.errors import MmAssetsError
from mm_assets.sources.samples import shard_labels
from mm_assets.summaries import counted
from mm_assets.view.backends.base import Backend, Entry, NoSampleError, Picture

__all__ = ["JoinedBackend", "join"]

MAX_TOGETHER = 64  # shards
_MAX_NOTES = 5
_REST_SECONDS = 0.05


class JoinedBackend(Backend):
    """The samples of several sources in their order. One that cannot be opened has none, and the note says why.

    Args:
        title: what the page calls it.
        kind: what it is, in words.
        sources: by its key each source's function that opens it; the backend closes what was opened.
        prefixed: whether the key of its source and a slash begin the id of a sample, as of shards. Up to `MAX_TOGETHER`
            of these are opened one after the other without a request.
    """

    def __init__(
        self, title: str, kind: str, sources: Mapping[str, Callable[[], Backend]], *, prefixed: bool = False
    ) -> None:
        super().__init__(title, kind)
        self._prefixed = prefixed
        self._sources = dict(sources)
        self._keys = list(self._sources)
        self._open: dict[str, Backend | None] = {}  # None where it cannot be opened
        self._notes: list[str] = []
        self._row: dict[str, Backend] = {}  # those that are counted, of which the last may have further samples
        self._next = 0  # of the sources that are not among them
        self._lock = threading.RLock()
        self._reader: threading.Thread | None = None
        self._ended = False

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
        with self._lock:
            if self._reader is None and self._prefixed and len(self._keys) <= MAX_TOGETHER:
                self._reader = threading.Thread(target=self._read_on, name="sources", daemon=True)
                self._reader.start()
        ends = time.monotonic() + seconds
        while not self.is_complete and self.known() < count and time.monotonic() < ends:
            with self._lock:
                last = self._last()
                before = sum(one.known() for one in self._row.values() if one is not last)
            if last is not None:
                last.reach(count - before, ends - time.monotonic())

    def _last(self) -> Backend | None:
        """The source that may have further samples: the next one where the one before has been read to its end."""
        last = next(reversed(self._row.values()), None)
        if (last is None or last.is_complete) and self._next < len(self._keys):
            key = self._keys[self._next]
            self._next += 1
            last = self._opened(key)
            if last is not None:
                self._row[key] = last
        return last

    def _read_on(self) -> None:
        """Opens each source whose predecessor has been read: the number of samples becomes known while people look."""
        while not (self._ended or self.is_complete):
            with self._lock:
                last = self._last()
            if last is not None:
                last.reach(0, _REST_SECONDS)  # the samples that it has read on its own
            time.sleep(_REST_SECONDS)

    @property
    def is_complete(self) -> bool:
        """Whether every source was read to its end."""
        with self._lock:
            return self._next == len(self._keys) and all(one.is_complete for one in self._row.values())

    def known(self) -> int:
        """Samples of the sources that were read so far."""
        with self._lock:
            return sum(one.known() for one in self._row.values())

    def _at(self, index: int) -> tuple[Backend, int, int, str]:
        """The source of a known sample, its number there, that of the source's first, and what begins its id."""
        with self._lock:
            starts = list(accumulate((one.known() for one in self._row.values()), initial=0))
            place = min(bisect_right(starts, index) - 1, len(self._row) - 1)
            key, source = list(self._row.items())[place]
            return source, index - starts[place], starts[place], f"{key}/" if self._prefixed else ""

    def ids(self, start: int, stop: int) -> Sequence[str]:
        """The ids of samples, source by source."""
        found: list[str] = []
        while start < stop:
            source, at, first, prefix = self._at(start)
            size = min(stop - start, source.known() - at)
            if size <= 0:
                break
            found += [f"{prefix}{one}" for one in source.ids(at, at + size)]
            start = first + at + size
        return found

    # --- what is in it ------------------------------------------------------------------------------------------------

    def about(self) -> Mapping[str, Any]:
        """How many sources there are."""
        return {"files": len(self._keys)}

    def note(self) -> str:
        """What cannot be opened, and what the sources note."""
        with self._lock:
            notes = [*self._notes, *filter(None, (one.note() for one in self._row.values()))]
        more = [f"{len(notes) - _MAX_NOTES:,} more files have a note."] if len(notes) > _MAX_NOTES else []
        return "\n".join([*notes[:_MAX_NOTES], *more])

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """The cards of chosen samples, numbered through all sources."""
        for index in indices:
            self.check(index)
        found: list[Entry] = []
        for (first, prefix), group in groupby(map(self._at, indices), key=itemgetter(2, 3)):
            places = list(group)
            entries = places[0][0].entries([at for _, at, _, _ in places])
            found += [replace(one, index=first + one.index, id=f"{prefix}{one.id}") for one in entries]
        return found

    def items(self, index: int) -> tuple[Item, ...]:
        """As its source's."""
        self.check(index)
        source, at, _, _ = self._at(index)
        return source.items(at)

    def picture(self, index: int) -> Picture:
        """As its source's."""
        self.check(index)
        source, at, _, _ = self._at(index)
        return source.picture(at)

    def identity(self, index: int) -> str:
        """As its source's."""
        self.check(index)
        source, at, _, _ = self._at(index)
        return source.identity(at)

    # --- sources as partitions ----------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Mapping[str, Any]]:
        """The sources; the bytes of those that were opened, and the samples of those that were read to their end."""
        with self._lock:
            opened = dict(self._open)
        return [{"key": key, **_facts(opened.get(key))} for key in self._keys]

    def partition(self, key: str) -> Backend:
        """One source."""
        if key not in self._sources:
            raise NoSampleError(f"{self.title} has no file {key!r}")
        found = self._opened(key)
        if found is None:
            raise NoSampleError(f"{key} cannot be read: {self.note()}")
        return found

    def end_reading(self) -> None:
        """Ends the threads that read on."""
        self._ended = True
        with self._lock:
            for one in self._open.values():
                if one is not None:
                    one.end_reading()

    def close(self) -> None:
        """Closes the sources."""
        self._ended = True
        with self._lock:
            for one in self._open.values():
                if one is not None:
                    one.close()
            self._open.clear()
            self._row.clear()


def join(urls: Sequence[str], title: str, kind: str, open_file: Callable[[str], Backend]) -> JoinedBackend:
    """Files as one source; of shards each is opened by its label, which begins the ids of its samples.

    Args:
        urls: the files.
        title: what the page calls them.
        kind: what each is, as text.
        open_file: opens one.
    """
    labels = shard_labels(list(urls))
    sources = {labels[url]: partial(open_file, url) for url in urls}
    return JoinedBackend(title, counted(len(sources), kind), sources, prefixed=kind == "shard")


def _facts(source: Backend | None) -> Mapping[str, Any]:
    if source is None:
        return {"samples": None, "bytes": None}
    return {"samples": source.count(), "bytes": source.about().get("bytes")}
