"""Packed files: one, several as one, or a manifest. A page reads the directory and the first text of its samples."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mm_assets.dataset.dataset import Dataset
from mm_assets.display import Content, Item, absent_item, linked, value_item
from mm_assets.errors import FormatError, MmAssetsError, SchemaMismatchError
from mm_assets.fields import Field
from mm_assets.formats.stored import StoredPayload
from mm_assets.view.backends.base import NO_PICTURE, Backend, Entry, NoSampleError, Page, Picture, shortened

__all__ = ["PackedBackend"]

_SHOWN_BYTES = 2 << 10  # of a text that a card may show
_CHECKED_BYTES = 16 << 20  # of a payload whose checksum is verified where its sample is shown
_SEARCH_SECONDS = 1.0  # of one request
_PICTURES = ("ImageField", "DocumentField", "VideoField", "DepthField")  # the first of these is a sample's picture
_TEXTS = ("TextField", "JSONField", "DocumentField")


class PackedBackend:
    """The samples of a packed dataset.

    Args:
        dataset: open; the backend closes it.
        title: what the page calls it.
    """

    def __init__(self, dataset: Dataset, title: str) -> None:
        self.title = title
        self.kind = "packed dataset" if dataset.manifest is None else "manifest"
        self._dataset = dataset
        self._fields: Mapping[str, Field] = dataset.fields
        self._pictures = _of_types(self._fields, _PICTURES)
        self._texts = _of_types(self._fields, _TEXTS)

    def about(self) -> Mapping[str, Any]:
        """Modalities and files."""
        dataset = self._dataset
        return {
            "modalities": {
                name: type(self._fields[name]).__name__ if name in self._fields else "unknown" for name in dataset.names
            },
            "files": len(dataset.files),
            "orders": [],
        }

    def count(self) -> int | None:
        """Samples."""
        return len(self._dataset)

    def page(self, offset: int, limit: int, order: str = "") -> Page:
        """Samples from a position on."""
        total = len(self._dataset)
        stop = min(offset + limit, total)
        entries = self.entries(range(min(offset, total), stop))
        return Page(entries=entries, total=total, next=stop if stop < total else None)

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """The cards of chosen samples."""
        try:
            return self._entries(indices)
        except IndexError as error:
            raise NoSampleError(str(error)) from error
        except FormatError:
            # One damaged sample must not hide the others of its page.
            return [self._entry_or_damage(index) for index in indices]

    def _entry_or_damage(self, index: int) -> Entry:
        try:
            return self._entries([index])[0]
        except FormatError as error:
            return Entry(index=index, id=f"sample {index}", note=str(error))

    def _entries(self, indices: Sequence[int]) -> list[Entry]:
        dataset = self._dataset
        stored = dataset.stored(list(indices))
        ids = dataset.sample_ids
        entries = []
        for row, index in enumerate(indices):
            names = tuple(name for name in dataset.names if stored[name][row] is not None)
            picture = next((name for name in self._pictures if name in names), None)
            entries.append(
                Entry(
                    index=index,
                    id=ids[index],
                    text=self._first_text({name: stored[name][row] for name in self._texts}),
                    names=names,
                    picture="" if picture is None else _identity(stored[picture][row]),
                )
            )
        return entries

    def _first_text(self, stored: Mapping[str, StoredPayload | None]) -> str:
        for payload in stored.values():
            if payload is not None:
                text = shortened(payload.read(0, min(payload.size, _SHOWN_BYTES)).decode("utf-8", "replace"))
                if text:
                    return text
        return ""

    def find(self, text: str, start: int, limit: int) -> Page:
        """Samples whose id contains a text."""
        dataset, found = self._dataset, list[int]()
        ends = time.monotonic() + _SEARCH_SECONDS
        at, total = start, len(dataset)
        while at < total and len(found) < limit and time.monotonic() < ends:
            block = dataset.sample_ids[at : at + 4096]
            hits = [at + row for row, sample_id in enumerate(block) if text in sample_id]
            taken = hits[: limit - len(found)]
            found += taken
            at = taken[-1] + 1 if len(taken) < len(hits) else at + len(block)
        return Page(entries=self.entries(found), total=None, next=at if at < total else None)

    def index_of(self, sample_id: str) -> int | None:
        """The number of the first sample of an id."""
        return self._dataset.find(sample_id)

    def items(self, index: int) -> tuple[Item, ...]:
        """Every modality of a sample."""
        stored = self._stored(index)
        return linked([self._item(name, payload) for name, payload in stored.items()])

    def _item(self, name: str, payload: StoredPayload | None) -> Item:
        if payload is None:
            return absent_item(name)
        field = self._fields.get(name)
        if field is None:
            return Item(name=name, kind="unreadable", note=self._refusal(name))
        item = _show(name, field, payload)
        return item if _is_whole(payload) else _with_note(item, "its checksum is not that which was written")

    def _refusal(self, name: str) -> str:
        """Why a modality cannot be decoded here."""
        try:
            self._dataset.read_modality(name, [])
        except (SchemaMismatchError, MmAssetsError) as error:
            return str(error)
        return "its field is not known here"

    def sample_id(self, index: int) -> str:
        """The id of a sample."""
        try:
            return self._dataset.sample_ids[index]
        except IndexError as error:
            raise NoSampleError(str(error)) from error

    def identity(self, index: int) -> str:
        """Follows from where the payloads are and their checksums."""
        stored = self._stored(index)
        text = "|".join(f"{name}:{_identity(payload)}" for name, payload in stored.items())
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def picture(self, index: int) -> Picture:
        """The first image, page, clip or depth map."""
        if not self._pictures:
            return NO_PICTURE
        stored = self._stored(index, self._pictures)
        for name, payload in stored.items():
            if payload is not None:
                make = partial(_show, name, self._fields[name], payload)
                return Picture(identity=_identity(payload), item=make)
        return NO_PICTURE

    def _stored(self, index: int, names: Sequence[str] | None = None) -> dict[str, StoredPayload | None]:
        if index < 0:
            raise NoSampleError(f"{self.title}: there is no sample {index}")
        try:
            stored = self._dataset.stored([index], names)
        except IndexError as error:
            raise NoSampleError(str(error)) from error
        return {name: payloads[0] for name, payloads in stored.items()}

    def partitions(self) -> Sequence[Mapping[str, Any]]:
        """None."""
        return ()

    def partition(self, key: str) -> Backend:
        """None."""
        raise NoSampleError(f"{self.title} has no partitions, {key!r} was asked for")

    def close(self) -> None:
        """Closes the files."""
        self._dataset.close()


def _of_types(fields: Mapping[str, Field], types: Sequence[str]) -> tuple[str, ...]:
    """The modalities of some types, in the order of the types."""
    return tuple(name for kind in types for name, field in fields.items() if type(field).__name__ == kind)


def _show(name: str, field: Field, payload: StoredPayload) -> Item:
    return value_item(name, field, Content(payload.size, payload.read), payload.metadata())


def _is_whole(payload: StoredPayload) -> bool:
    return payload.size > _CHECKED_BYTES or payload.is_whole()


def _identity(payload: StoredPayload | None) -> str:
    """Follows from the place and the checksum of a payload; "" where absent."""
    if payload is None:
        return ""
    text = f"{payload.source.name}|{payload.source.size}|{payload.offset}|{payload.size}|{payload.crc32c}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _with_note(item: Item, note: str) -> Item:
    from dataclasses import replace

    return replace(item, note=f"{item.note}; {note}" if item.note else note)
