"""Payloads of packed files compared with what their rows give when they are encoded again, and decoded.

Nothing that the writer noted is used. A difference is a position, if it is in one item, and what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, FormatError, LimitError
from mm_assets.fields import Field
from mm_assets.formats import MstrReader, MultReader, Payload, crc32c
from mm_assets.packing.pack import encode_placed
from mm_assets.packing.placement import BlockRows, Placement, Placer

__all__ = [
    "MAX_COMPARED",
    "Comparison",
    "EncodedSample",
    "Reader",
    "decode_failures",
    "measure_payload",
    "samples_with",
]

MAX_COMPARED = 32  # payloads of a large modality that are encoded again, and differences listed of any modality
MAX_DECODED_BYTES = 1 << 20  # of a payload that is decoded although its media were before it was packed

Reader = MultReader | MstrReader


def measure_payload(payload: Payload) -> tuple[int, int]:
    """Returns the bytes of record and data together, and their CRC-32C, as packed files state them."""
    return len(payload.metadata) + len(payload.data), crc32c(*payload)


def samples_with(reader: Reader, name: str) -> npt.NDArray[np.int64]:
    """Returns the numbers of the samples that have a modality."""
    return np.flatnonzero(reader.presence(name))


def decode_failures(reader: Reader | None, ids: list[str], placer: Placer) -> Iterator[tuple[Any, ...]]:
    """Yields what does not decode of the first and the last payload of each modality, by the file's own bytes.

    Every item was judged before it was packed; this shows that it was packed as it was judged.
    """
    for made, name in zip(placer.fields, placer.names, strict=True):
        if reader is None or name not in reader.names:
            continue
        sample_id = None
        try:
            sizes = reader.sizes(name)
            small = [place for place in samples_with(reader, name).tolist() if sizes[place] <= MAX_DECODED_BYTES]
            for place in dict.fromkeys((*small[:1], *small[-1:])):
                sample_id = ids[place]
                payload = reader.read_payload(place, name)
                if payload is not None:
                    with suppress(LimitError):  # of the reader's settings, not of what is stored
                        made.check_decodable(payload.metadata, payload.data)
        except FormatError as error:
            yield sample_id, name, "", None, f"does not decode: {error.detail}"


class EncodedSample:
    """The payloads of a sample, encoded from its rows when they are asked for, once for all formats."""

    def __init__(self, placer: Placer, rows: BlockRows, placement: Placement) -> None:
        self.placer, self.rows, self.placement = placer, rows, placement
        self._payloads: dict[int, Payload | None] = {}

    def payload(self, taker: int) -> Payload | None:
        """Returns the payload of modality number `taker`; None if the rows give none, which `presence` reports."""
        if taker not in self._payloads:
            self._payloads[taker] = None
            if taker in self.placement.present:
                with suppress(EncodeError):  # the rows are none that packing could have packed: others report it
                    self._payloads[taker] = encode_placed(self.placer, self.rows, self.placement, taker)
        return self._payloads[taker]


class Comparison:
    """Compares payloads of a file with what its rows give when they are encoded again.

    Args:
        reader: of the file; None if it does not open.
        ids: its sample ids.
        placer: places and encodes the rows.
        chosen: by the number of a modality, the samples whose payloads are compared, by number.
    """

    def __init__(
        self, reader: Reader | None, ids: list[str], placer: Placer, chosen: Mapping[int, npt.NDArray[np.int64]]
    ) -> None:
        self._reader = reader
        self._placer = placer
        self._chosen = {taker: {ids[place]: place for place in places.tolist()} for taker, places in chosen.items()}
        self._left = dict.fromkeys(chosen, MAX_COMPARED)
        self._stated: dict[int, tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]] = {}

    @property
    def chooses(self) -> bool:
        """Whether any payload is compared."""
        return any(self._chosen.values())

    def takers(self, sample_id: str) -> list[int]:
        """Returns the numbers of the modalities whose payload of this sample is compared."""
        return [taker for taker, chosen in self._chosen.items() if sample_id in chosen]

    def sample(self, encoded: EncodedSample, takers: Iterable[int]) -> Iterator[tuple[Any, ...]]:
        """Yields the differences in one sample, up to `MAX_COMPARED` of each modality."""
        sample_id = encoded.rows.sample_id[encoded.placement.start]
        for taker in takers:
            payload = encoded.payload(taker)
            place = self._chosen[taker][sample_id]
            if payload is None or not self._left[taker] or measure_payload(payload) == self._measures(taker, place):
                continue
            for position, detail in self._differences(encoded, taker, payload, place):
                if self._left[taker]:
                    self._left[taker] -= 1
                    yield sample_id, self._placer.names[taker], "", position, detail

    def _measures(self, taker: int, place: int) -> tuple[int, int] | None:
        """Returns the size and CRC-32C that the file states of a payload; None if they cannot be read."""
        assert self._reader is not None
        if taker not in self._stated:
            name = self._placer.names[taker]
            try:
                self._stated[taker] = self._reader.sizes(name), self._reader.checksums(name)
            except FormatError:  # `intact` reports it
                return None
        sizes, checksums = self._stated[taker]
        return int(sizes[place]), int(checksums[place])

    def _differences(
        self, encoded: EncodedSample, taker: int, payload: Payload, place: int
    ) -> Iterator[tuple[int | None, str]]:
        """Yields position and detail of what differs in one payload whose bytes are not those that its rows give."""
        assert self._reader is not None
        made, rows, placement = self._placer.fields[taker], encoded.rows, encoded.placement
        try:
            stored = self._reader.read_payload(place, self._placer.names[taker])
            if stored is None:
                return  # `presence` reports it
            if taker in placement.values or not self._placer.reencodes(taker):
                # The check `items` compares bytes that are kept: here it is what the field has noted of them.
                is_other = not self._placer.reencodes(taker) and payload.data != stored.data
                detail = None if is_other else _difference(made, payload, stored)
                if detail is not None:
                    yield None, detail
                return
            found = {item[0]: Payload(*item[1:]) for item in made.item_payloads(*stored)}
        except FormatError as error:
            yield None, error.detail
            return
        for item in placement.items[taker]:
            content = rows.content(item.row)
            if content is None:
                yield item.position, "its row has no content"
                continue
            item_field = made.item_field or made
            again = Payload(*item_field.encode(self._placer.value(taker, rows.modality[item.row], content)))
            detail = _difference(item_field, again, found.get(item.position))
            if detail is not None:
                yield item.position, detail


def _difference(made: Field, encoded: Payload, stored: Payload | None) -> str | None:
    """Describes how a stored payload differs from that of its value now, or returns None."""
    if stored is None:
        return "there is no such item"
    if bytes(encoded.metadata) == bytes(stored.metadata) and encoded.data == stored.data:
        return None
    try:
        same = _same(made.decode(encoded.metadata, encoded.data), made.decode(stored.metadata, stored.data))
    except (FormatError, LimitError) as error:
        return f"does not decode: {error.detail}"
    return None if same else "decodes to another value than the row's content gives"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
