"""The protocol that every kind of source fulfils: numbered samples, their items, and a picture of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mm_assets.display import Item
from mm_assets.errors import MmAssetsError

__all__ = ["NO_PICTURE", "Backend", "Entry", "NoSampleError", "Page", "Picture", "shortened"]

MAX_SHOWN_TEXT = 280  # characters of a card's text
MAX_ID = 1024  # characters of an id that a page shows


class NoSampleError(MmAssetsError):
    """There is no sample of that number, id or partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What a thumbnail is made of.

    Attributes:
        identity: changes whenever the content may have changed; "" where the sample has no picture.
        item: makes the item; None where its content is not available.
    """

    identity: str
    item: Callable[[], Item | None]


NO_PICTURE = Picture(identity="", item=lambda: None)


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
        next: where the page after this one starts; None at the end.
        note: why the page may lack something, in words.
    """

    entries: Sequence[Entry]
    total: int | None = None
    next: int | None = None
    note: str = ""


class Backend(Protocol):
    """Numbered samples of one source. Calls come from several threads.

    Attributes:
        title: path or URL.
        kind: what it is, in words for people.
    """

    title: str
    kind: str

    def about(self) -> Mapping[str, Any]:
        """What is known of the source: JSON for the page's head; costs no more than a listing."""

    def count(self) -> int | None:
        """Samples; None while that is not known."""

    def page(self, offset: int, limit: int, order: str = "") -> Page:
        """Samples from a position on.

        Args:
            offset: of the first.
            limit: how many at most.
            order: a name in ``about()["orders"]``; empty for the order in the source.
        """

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """The cards of chosen samples, in the order given.

        Raises:
            NoSampleError: one does not exist.
        """

    def find(self, text: str, start: int, limit: int) -> Page:
        """Samples whose id contains a text, from a position on; `Page.next` is where the search goes on."""

    def index_of(self, sample_id: str) -> int | None:
        """The number of the first sample of an id, or None."""

    def items(self, index: int) -> tuple[Item, ...]:
        """All items of a sample, with their relations.

        Raises:
            NoSampleError: there is no such sample.
        """

    def sample_id(self, index: int) -> str:
        """The id of a sample; errors as `items`."""

    def identity(self, index: int) -> str:
        """Changes whenever the content of a sample may have changed; errors as `items`."""

    def picture(self, index: int) -> Picture:
        """What the sample's thumbnail is made of; errors as `items`."""

    def partitions(self) -> Sequence[Mapping[str, Any]]:
        """The partitions of a dataset's folder, each with its key; empty of any other source."""

    def partition(self, key: str) -> Backend:
        """One partition; `NoSampleError` if there is none of that key."""

    def close(self) -> None:
        """Releases the files."""


def shortened(text: str, limit: int = MAX_SHOWN_TEXT) -> str:
    """The start of a text in one line."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"
