"""What every kind of source gives: numbered samples, their items, and a picture of each.

A source may not know yet how many samples it has: `reach` reads on, and pages say that there is more.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mm_assets.display import Item
from mm_assets.errors import MmAssetsError

if TYPE_CHECKING:
    from mm_assets.view.sample_table import SampleTable

__all__ = [
    "NO_PICTURE",
    "Backend",
    "Entry",
    "NoSampleError",
    "Page",
    "Picture",
    "distinct",
    "fingerprint",
    "made_in_time",
    "shortened",
]

MAX_NAME = 1000  # characters of the name of an item
MAX_SHOWN_TEXT = 280  # characters of a card's text
PAGE_SECONDS = 5.0  # that a page waits for samples which have not been read yet
SAMPLE_SECONDS = 4.0  # after which no further item of a sample is made
SEARCH_SECONDS = 1.0  # of one request: the next one resumes the search
SEARCH_BLOCK = 1 << 12  # ids that are compared at a time


class NoSampleError(MmAssetsError):
    """There is no sample of that number, id or partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What a thumbnail is made of.

    Attributes:
        identity: changes whenever the content may have changed; "" where the sample has no picture.
        items: make the items that may have a picture, the best one first; the first that has one is taken.
    """

    identity: str
    items: tuple[Callable[[], Item], ...] = ()


NO_PICTURE = Picture(identity="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One card of a page.

    Attributes:
        index: the sample's number.
        id: its id.
        text: the start of its first text.
        names: what it has, in order.
        picture: `Picture.identity`; "" where there is none.
        note: what is wrong with it, in words.
    """

    index: int
    id: str
    text: str = ""
    names: tuple[str, ...] = ()
    picture: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some samples in order.

    Attributes:
        entries: the samples.
        total: how many there are; None while that is not known.
        next: where the page after this one, or the rest of a search, starts; None at the end.
        note: why the page may lack something, in words.
    """

    entries: Sequence[Entry]
    total: int | None = None
    next: int | None = None
    note: str = ""


class Backend(ABC):
    """Numbered samples of one source. Calls come from several threads.

    Args:
        title: path or URL.
        kind: what it is, in words for people.

    Attributes:
        place: of which partition and stage it is, for the head of the page, as JSON.
        warning: what goes before its note.
        may_be_dataset: whether it may be a dataset's folder, or a manifest in one, which has more to explore.
        has_versions: whether a newer version may be published while it is looked at.
    """

    may_be_dataset: ClassVar[bool] = False
    has_versions: ClassVar[bool] = False

    def __init__(self, title: str, kind: str) -> None:
        self.title = title
        self.kind = kind
        self.place: Mapping[str, Any] = {}
        self.warning = ""

    # What a source gives.

    @abstractmethod
    def known(self) -> int:
        """Samples that are known so far."""

    @abstractmethod
    def ids(self, start: int, stop: int) -> Sequence[str]:
        """The ids of known samples."""

    @abstractmethod
    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """The cards of chosen samples, in the order given.

        Raises:
            NoSampleError: one does not exist.
        """

    @abstractmethod
    def items(self, index: int) -> tuple[Item, ...]:
        """All items of a sample, with their relations; `NoSampleError` if there is none of that number."""

    @abstractmethod
    def picture(self, index: int) -> Picture:
        """What the sample's thumbnail is made of; errors as `items`."""

    @abstractmethod
    def identity(self, index: int) -> str:
        """Changes whenever the content of a sample may have changed; errors as `items`."""

    def about(self) -> Mapping[str, Any]:
        """Further facts for the head of the page, as JSON."""
        return {}

    def note(self) -> str:
        """What people should know of the source, such as where it is damaged."""
        return ""

    @property
    def is_complete(self) -> bool:
        """Whether all samples are known."""
        return True

    def reach(self, count: int, seconds: float) -> None:  # noqa: B027  # a default: most know all from the start
        """Reads on until so many samples are known, the source ends, or the time is over."""

    def newest(self, key: str) -> str | None:
        """The key of a newer version than what is looked at by a key, or None; "" is the whole."""
        return None

    def sample_table(self) -> SampleTable | None:
        """What the samples are sorted and filtered by; None where the source has no columns of them."""
        return None

    def partitions(self) -> Sequence[Mapping[str, Any]]:
        """The partitions of a dataset's folder, or the shards of several, each with its `key`."""
        return ()

    def partition(self, key: str) -> Backend:
        """One partition; `NoSampleError` if there is none of that key."""
        raise NoSampleError(f"{self.title} has no partition {key!r}")

    def end_reading(self) -> None:  # noqa: B027  # not abstract: most have no thread, and so nothing to end
        """Ends threads that read on; the files stay open for those that still read what is known."""

    def close(self) -> None:  # noqa: B027  # a default: not every source holds files
        """Releases the files."""

    # What follows.

    def count(self) -> int | None:
        """Samples; None while that is not known."""
        return self.known() if self.is_complete else None

    def page(self, offset: int, limit: int) -> Page:
        """Samples from a position on, `limit` at most."""
        self.reach(offset + limit + 1, PAGE_SECONDS)
        is_complete, known = self.is_complete, self.known()  # in this order: another thread may read on in between
        stop = min(offset + limit, known)
        entries = self.entries(range(min(offset, known), stop))
        note = f"{self.warning}\n{self.note()}".strip()
        if not is_complete and known <= offset:
            behind = f"The first {known:,} samples have been read so far, this page starts at {offset:,}: reload it."
            note = f"{note}\n{behind}".strip()
        goes_on = stop < known or not is_complete
        return Page(entries=entries, total=self.count(), next=max(stop, offset) if goes_on else None, note=note)

    def find(self, text: str, start: int, limit: int) -> Page:
        """Samples whose id contains a text, from a position on; `Page.next` is where the search goes on."""
        found: list[int] = []
        ends, at = time.monotonic() + SEARCH_SECONDS, start
        while len(found) < limit and time.monotonic() < ends:
            if at >= self.known():
                self.reach(at + SEARCH_BLOCK, ends - time.monotonic())
            stop = min(at + SEARCH_BLOCK, self.known())
            if stop <= at:
                break
            hits = self.matches(text, at, stop)
            taken = hits[: limit - len(found)]
            found += taken
            at = taken[-1] + 1 if len(taken) < len(hits) else stop
        goes_on = at < self.known() or not self.is_complete
        return Page(entries=self.entries(found), next=at if goes_on else None)

    def matches(self, text: str, start: int, stop: int) -> list[int]:
        """The known samples of a range whose id contains a text."""
        return [start + row for row, sample_id in enumerate(self.ids(start, stop)) if text in sample_id]

    def index_of(self, sample_id: str) -> int | None:
        """The number of the first sample of an id among those that are read within some seconds, or None."""
        ends, at = time.monotonic() + PAGE_SECONDS, 0
        while time.monotonic() < ends:
            self.reach(at + SEARCH_BLOCK, ends - time.monotonic())
            stop = min(at + SEARCH_BLOCK, self.known())
            if stop <= at:
                return None
            ids = self.ids(at, stop)
            if sample_id in ids:
                return at + ids.index(sample_id)
            at = stop
        return None

    def sample_id(self, index: int) -> str:
        """The id of a sample; errors as `items`."""
        self.check(index)
        return self.ids(index, index + 1)[0]

    def check(self, index: int) -> None:
        """Reads on to a sample, and refuses one that does not exist with `NoSampleError`."""
        if index >= self.known():
            self.reach(index + 1, PAGE_SECONDS)
        if not 0 <= index < self.known():
            there = f"there are {self.known():,}" if self.is_complete else f"{self.known():,} have been read so far"
            raise NoSampleError(f"{self.title}: there is no sample {index:,}; {there}")


def made_in_time(names: Sequence[str], makers: Iterable[Callable[[], Item]]) -> list[Item]:
    """Items one after the other; those for which there is no time left say so.

    A sample may have hundreds of members that take a second each: its page must not wait for all of them.
    """
    ends, found = time.monotonic() + SAMPLE_SECONDS, []
    for name, make in zip(names, makers, strict=True):
        if time.monotonic() < ends:
            found.append(make())
        else:
            note = f"It is not shown: the items before it took {SAMPLE_SECONDS:g} s."
            found.append(Item(name=name, kind="unreadable", note=note))
    return found


def distinct(items: Iterable[Item]) -> list[Item]:
    """Items of different names, by which the page knows them: two members or rows may have the same one."""
    seen: set[str] = set()
    found = []
    for item in items:
        name, count = item.name[:MAX_NAME], 1
        while name in seen:
            count += 1
            name = f"{item.name[:MAX_NAME]} ({count})"
        seen.add(name)
        found.append(item if name == item.name else replace(item, name=name))
    return found


def shortened(text: str, limit: int = MAX_SHOWN_TEXT) -> str:
    """The start of a text in one line."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"


def fingerprint(*facts: object) -> str:
    """16 hexadecimal digits that change when a fact does."""
    text = "|".join(str(fact) for fact in facts)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
