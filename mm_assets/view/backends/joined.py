"""Several sources as one, in order: the next one is opened when the one before has been read to its end."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, NamedTuple

from mm_assets.display import Item
from mm_assets.errors import MmAssetsError
from mm_assets.sources.samples import shard_labels
from mm_assets.summaries import counted
from mm_assets.view.backends.base import Backend, Entry, NoSampleError, Picture

__all__ = ["JoinedBackend", "join"]

MAX_SHARDS_READ_AHEAD = 64
_MAX_NOTES = 5
_IDLE_SECONDS = 0.05


class _Place(NamedTuple):
    """Where a sample is.

    Attributes:
        source: its source.
        at: its number there.
        first: the number of the source's first sample.
        prefix: what its id starts with.
    """

    source: Backend
    at: int
    first: int
    prefix: str


class JoinedBackend(Backend):
    """The samples of several sources in their order. One that cannot be opened has none, and the note says why.

    Args:
        title: what the page calls it.
        kind: what it is, as text.
        sources: by key, a function that opens the source; the backend closes what it opened.
        has_prefixes: whether the key of its source and a slash begin the id of a sample, as for shards. Up to
            `MAX_SHARDS_READ_AHEAD` shards are opened one after the other without a request.
    """

    def __init__(
        self, title: str, kind: str, sources: Mapping[str, Callable[[], Backend]], *, has_prefixes: bool = False
    ) -> None:
        super().__init__(title, kind)
        self._has_prefixes = has_prefixes
        self._sources = dict(sources)
        self._keys = list(self._sources)
        self._open: dict[str, Backend | None] = {}  # None if it cannot be opened
        self._notes: list[str] = []
        self._row: dict[str, Backend] = {}  # sources whose samples are numbered; the last one may have more samples
        self._next = 0  # the first key after them
        self._lock = threading.RLock()
        self._reader: threading.Thread | None = None
        self._is_closing = False

    def _source(self, key: str) -> Backend | None:
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
            if self._reader is None and self._has_prefixes and len(self._keys) <= MAX_SHARDS_READ_AHEAD:
                self._reader = threading.Thread(target=self._read_ahead, name="sources", daemon=True)
                self._reader.start()
        end = time.monotonic() + seconds
        while not self.is_complete and self.known() < count and time.monotonic() < end:
            with self._lock:
                last = self._last()
                before = sum(source.known() for source in self._row.values() if source is not last)
            if last is not None:
                last.reach(count - before, end - time.monotonic())

    def _last(self) -> Backend | None:
        """Returns the source that may have more samples: the next one if the one before has been read to its end."""
        last = next(reversed(self._row.values()), None)
        if (last is None or last.is_complete) and self._next < len(self._keys):
            key = self._keys[self._next]
            self._next += 1
            last = self._source(key)
            if last is not None:
                self._row[key] = last
        return last

    def _read_ahead(self) -> None:
        """Opens each source after the one before has been read, so that the number of samples becomes known."""
        while not (self._is_closing or self.is_complete):
            with self._lock:
                last = self._last()
            if last is not None:
                last.reach(0, _IDLE_SECONDS)  # numbers the samples that the source's own thread has read
            time.sleep(_IDLE_SECONDS)

    @property
    def is_complete(self) -> bool:
        """Whether every source has been read to its end."""
        with self._lock:
            return self._next == len(self._keys) and all(source.is_complete for source in self._row.values())

    def known(self) -> int:
        """Returns the number of samples that have been read so far."""
        with self._lock:
            return sum(source.known() for source in self._row.values())

    def _place(self, index: int) -> _Place:
        """Returns where a known sample is."""
        with self._lock:
            starts = list(accumulate((source.known() for source in self._row.values()), initial=0))
            number = min(bisect_right(starts, index) - 1, len(self._row) - 1)
            key, source = list(self._row.items())[number]
            return _Place(source, index - starts[number], starts[number], f"{key}/" if self._has_prefixes else "")

    def ids(self, start: int, stop: int) -> Sequence[str]:
        """Returns the ids of samples, source by source."""
        ids: list[str] = []
        while start < stop:
            source, at, first, prefix = self._place(start)
            size = min(stop - start, source.known() - at)
            if size <= 0:
                break
            ids += [f"{prefix}{sample_id}" for sample_id in source.ids(at, at + size)]
            start = first + at + size
        return ids

    # --- what is in it ------------------------------------------------------------------------------------------------

    def about(self) -> Mapping[str, Any]:
        """Returns the number of sources."""
        return {"files": len(self._keys)}

    def note(self) -> str:
        """Returns why sources cannot be opened, and the notes of the others."""
        with self._lock:
            notes = [*self._notes, *filter(None, (source.note() for source in self._row.values()))]
        more = [f"{len(notes) - _MAX_NOTES:,} more files have a note."] if len(notes) > _MAX_NOTES else []
        return "\n".join([*notes[:_MAX_NOTES], *more])

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """Returns the cards of samples, which are numbered through all sources."""
        for index in indices:
            self.check(index)
        entries: list[Entry] = []
        for source, group in groupby(map(self._place, indices), key=attrgetter("source")):
            places = list(group)
            for place, entry in zip(places, source.entries([place.at for place in places]), strict=True):
                entries.append(replace(entry, index=place.first + entry.index, id=f"{place.prefix}{entry.id}"))
        return entries

    def items(self, index: int) -> tuple[Item, ...]:
        """Returns the items of a sample from its source."""
        self.check(index)
        place = self._place(index)
        return place.source.items(place.at)

    def picture(self, index: int) -> Picture:
        """Returns the picture of a sample from its source."""
        self.check(index)
        place = self._place(index)
        return place.source.picture(place.at)

    def identity(self, index: int) -> str:
        """Returns the identity of a sample from its source."""
        self.check(index)
        place = self._place(index)
        return place.source.identity(place.at)

    # --- sources as partitions ----------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Mapping[str, Any]]:
        """Returns the sources: the bytes of one that is open, and its samples after it has been read to its end."""
        with self._lock:
            sources = dict(self._open)
        return [{"key": key, **_facts(sources.get(key))} for key in self._keys]

    def partition(self, key: str) -> Backend:
        """Returns a source; `NoSampleError` if there is none of that key or it cannot be opened."""
        if key not in self._sources:
            raise NoSampleError(f"{self.title} has no file {key!r}")
        source = self._source(key)
        if source is None:
            raise NoSampleError(f"{key} cannot be read: {self.note()}")
        return source

    def end_reading(self) -> None:
        """Ends the threads that read ahead."""
        self._is_closing = True
        with self._lock:
            for source in filter(None, self._open.values()):
                source.end_reading()

    def close(self) -> None:
        """Closes the sources."""
        self._is_closing = True
        with self._lock:
            for source in filter(None, self._open.values()):
                source.close()
            self._open.clear()
            self._row.clear()


def join(urls: Sequence[str], title: str, kind: str, open_file: Callable[[str], Backend]) -> JoinedBackend:
    """Returns several files as one source; the label of a shard is its key, and begins the ids of its samples.

    Args:
        urls: the files.
        title: what the page calls them.
        kind: what each is, as text.
        open_file: opens one.
    """
    labels = shard_labels(list(urls))
    sources = {labels[url]: partial(open_file, url) for url in urls}
    return JoinedBackend(title, counted(len(sources), kind), sources, has_prefixes=kind == "shard")


def _facts(source: Backend | None) -> Mapping[str, Any]:
    if source is None:
        return {"samples": None, "bytes": None}
    return {"samples": source.count(), "bytes": source.about().get("bytes")}
