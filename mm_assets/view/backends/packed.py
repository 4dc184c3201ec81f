"""Packed files: one, several as one, or a manifest. A page reads the directory and the first text of its samples."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mm_assets.dataset.dataset import Dataset
from mm_assets.display import Content, Item, absent_item, linked, value_item
from mm_assets.errors import FormatError, MmAssetsError
from mm_assets.fields import Field
from mm_assets.formats.stored import StoredPayload
from mm_assets.summaries import counted
from mm_assets.view.backends.base import (
    NO_PICTURE,
    Backend,
    Entry,
    NoSampleError,
    Picture,
    fingerprint,
    made_in_time,
    shortened,
)
from mm_assets.view.backends.cards import MAX_CANDIDATES, PICTURED, TEXTUAL, text_of

if TYPE_CHECKING:
    from mm_assets.view.sample_table import SampleTable

__all__ = ["PackedBackend"]

_SHOWN_BYTES = 64 << 10  # of a payload whose text a card may show
_CHECKED_BYTES = 16 << 20  # of a payload whose checksum is verified where its sample is shown


class PackedBackend(Backend):
    """The samples of a packed dataset.

    Args:
        dataset: open; the backend closes it.
        title: what the page calls it.
    """

    may_be_dataset: ClassVar[bool] = True

    def __init__(self, dataset: Dataset, title: str) -> None:
        manifest = dataset.manifest
        super().__init__(title, "manifest" if manifest is not None else counted(len(dataset.files), "packed file"))
        self._dataset = dataset
        self._fields: Mapping[str, Field] = dataset.fields
        self._lock = threading.Lock()
        self._table: SampleTable | None = None
        self._kinds: dict[str, str] = {}  # of the modalities that a card was made of, as items call them

    def about(self) -> Mapping[str, Any]:
        """Modalities and files."""
        names = {name: type(self._fields[name]).__name__ for name in self._dataset.names if name in self._fields}
        return {"modalities": names, "files": len(self._dataset.files)}

    def known(self) -> int:
        """Samples."""
        return len(self._dataset)

    def ids(self, start: int, stop: int) -> Sequence[str]:
        """The ids of samples."""
        return self._dataset.sample_ids[start:stop]

    def matches(self, text: str, start: int, stop: int) -> list[int]:
        """The samples of a range whose id contains a text, found in the stored bytes."""
        return self._dataset.sample_ids.containing(text, start, stop)

    def index_of(self, sample_id: str) -> int | None:
        """The number of the first sample of an id."""
        return self.index_among(sample_id, 0, len(self._dataset))

    def index_among(self, sample_id: str, start: int, stop: int) -> int | None:
        """The number of the first sample of an id in a range."""
        for at in range(start, stop, _ID_BLOCK):
            for index in self._dataset.sample_ids.containing(sample_id, at, min(at + _ID_BLOCK, stop)):
                if self._dataset.sample_ids[index] == sample_id:
                    return index
        return None

    def contents(self, index: int) -> dict[str, tuple[int, int | None]]:
        """Bytes and checksum of each modality that a sample has, which differ where its content does.

        The checksum is None in a file without any. Errors as `items`, and of a damaged file `FormatError`.
        """
        stored = self._stored(index)
        return {name: (found.size, found.crc32c) for name, found in stored.items() if found is not None}

    def sample_table(self) -> SampleTable:
        """The table `samples` of the dataset."""
        from mm_assets.view.sample_table import SampleTable  # which imports the pipeline

        with self._lock:
            if self._table is None:
                self._table = SampleTable(self._dataset)
            return self._table

    # --- cards --------------------------------------------------------------------------------------------------------

    def entries(self, indices: Sequence[int]) -> Sequence[Entry]:
        """The cards of chosen samples."""
        for index in indices:
            self.check(index)
        try:
            return self._entries(indices)
        except FormatError:
            # One damaged sample must not hide the others of its page.
            return [self._entry_or_damage(index) for index in indices]

    def _entry_or_damage(self, index: int) -> Entry:
        try:
            return self._entries([index])[0]
        except FormatError as error:
            return Entry(index=index, id=f"sample {index}", note=str(error))

    def _entries(self, indices: Sequence[int]) -> list[Entry]:
        if not indices:
            return []
        stored = self._dataset.stored(list(indices))
        ids = self._dataset.sample_ids
        entries = []
        for row, index in enumerate(indices):
            present = {name: found[row] for name, found in stored.items()}
            names = tuple(name for name, payload in present.items() if payload is not None)
            picture = self._picture_of(present).identity
            text = self._first_text(present)
            entries.append(Entry(index=index, id=ids[index], text=text, names=names, picture=picture))
        return entries

    def _kind(self, name: str, payload: StoredPayload) -> str:
        """How the values of a modality are shown, by the first that is asked about."""
        kind = self._kinds.get(name)
        if kind is None:
            field = self._fields.get(name)
            kind = "unreadable" if field is None else _show(name, field, payload).kind
            if kind != "unreadable":  # another sample may be whole
                with self._lock:
                    self._kinds[name] = kind
        return kind

    def _picture_of(self, payloads: Mapping[str, StoredPayload | None]) -> Picture:
        """What the thumbnail of a sample is made of."""
        present = {name: payload for name, payload in payloads.items() if payload is not None}
        kinds = {name: self._kind(name, payload) for name, payload in present.items()}
        names = [name for kind in PICTURED for name, found in kinds.items() if found == kind][:MAX_CANDIDATES]
        if not names:
            return NO_PICTURE
        items = tuple(partial(_show, name, self._fields[name], present[name]) for name in names)
        return Picture(identity=fingerprint(*(_identity(present[name]) for name in names)), items=items)

    def _first_text(self, payloads: Mapping[str, StoredPayload | None]) -> str:
        for kind in TEXTUAL:
            for name, payload in payloads.items():
                if payload is None or payload.size > _SHOWN_BYTES or self._kinds.get(name) != kind:
                    continue
                text = text_of(_show(name, self._fields[name], payload))
                if text:
                    return shortened(text)
        return ""

    def picture(self, index: int) -> Picture:
        """The first image, page, clip, depth map or sound."""
        return self._picture_of(self._stored(index))

    # --- samples ------------------------------------------------------------------------------------------------------

    def items(self, index: int) -> tuple[Item, ...]:
        """Every modality of a sample."""
        self.check(index)
        try:
            stored = self._stored(index)
        except FormatError:
            # One modality that is out of place must not hide the others.
            names = self._dataset.names
            return linked(made_in_time(names, [partial(self._item_or_damage, index, name) for name in names]))
        makers = [partial(self._item, name, payload) for name, payload in stored.items()]
        return linked(made_in_time(list(stored), makers))

    def _item_or_damage(self, index: int, name: str) -> Item:
        try:
            return self._item(name, self._stored(index, [name])[name])
        except FormatError as error:
            return Item(name=name, kind="unreadable", note=str(error))

    def _item(self, name: str, payload: StoredPayload | None) -> Item:
        if payload is None:
            return absent_item(name)
        field = self._fields.get(name)
        if field is None:
            return Item(name=name, kind="unreadable", note=self._refusal(name))
        item = _show(name, field, payload)
        if payload.size > _CHECKED_BYTES or payload.is_whole():
            return item
        damaged = "Its checksum is not that which was written: the file is damaged here."
        return replace(item, note=f"{damaged} {item.note}".strip())

    def _refusal(self, name: str) -> str:
        """Why a modality cannot be decoded here."""
        try:
            self._dataset.read_modality(name, [])
        except MmAssetsError as error:
            return str(error)
        return "its field is not known here"

    def identity(self, index: int) -> str:
        """Follows from where the payloads are and their checksums."""
        try:
            stored = self._stored(index)
        except FormatError:
            return fingerprint(self.title, index)
        return fingerprint(*((name, _identity(payload)) for name, payload in stored.items()))

    def _stored(self, index: int, names: Sequence[str] | None = None) -> dict[str, StoredPayload | None]:
        self.check(index)
        try:
            stored = self._dataset.stored([index], names)
        except IndexError as error:
            raise NoSampleError(str(error)) from error
        return {name: payloads[0] for name, payloads in stored.items()}

    def close(self) -> None:
        """Closes the files."""
        if self._table is not None:
            self._table.close()
        self._dataset.close()


_ID_BLOCK = 1 << 20  # ids that are searched for one of them at a time


def _show(name: str, field: Field, payload: StoredPayload) -> Item:
    return value_item(name, field, Content(payload.size, payload.read), payload.metadata())


def _identity(payload: StoredPayload | None) -> str:
    """Follows from the place and the checksum of a payload; "" where absent."""
    if payload is None:
        return ""
    source = payload.source
    return fingerprint(source.name, source.size, payload.offset, payload.size, payload.crc32c)
