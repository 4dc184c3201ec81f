"""Packing: filtered rows become samples of MULT and MSTR files, in one pass and with the same payload bytes.

Each content row becomes exactly one item of one packed modality (`packable` has dropped what no field accepts), and
each sample one packed sample, in the table's order. Content that a field stores unchanged is copied and never decoded.
Of both files the MSTR file is a copy of the MULT file in another order; each is read at most once to be hashed. Memory
is one block of rows and one sample.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from mm_assets.errors import EncodeError
from mm_assets.formats import MstrWriter, MultWriter, Payload, crc32c_each, write_mstr
from mm_assets.packing.placement import BlockRows, Placement, Placer
from mm_assets.packing.plan import PackPlan
from mm_assets.storage.hashed_file import BlockDigest

__all__ = ["PackSummary", "encode_placed", "listing_json", "pack_rows", "placed_contents"]

BLOCK_BYTES = 1 << 20  # of a file that are read at a time, to be hashed and copied


@dataclass(slots=True, kw_only=True)
class PackSummary:
    """The result of packing.

    Attributes:
        num_samples: samples in each file.
        num_items: content rows, each packed as one item.
        num_present: packed modality to the number of samples that have it.
        num_refused: packed modality to the number of contents that its field refused: rows that went to the rest, and
            values of the JSON that are absent; without modalities that refused none.
        num_rest: content rows in the rest.
        sha256: digest of each file, hexadecimal, by "mult" and "mstr".
        first_refusals: packed modality to the sample and the message of the first content that its field refused.
    """

    num_samples: int = 0
    num_items: int = 0
    num_present: dict[str, int]
    num_refused: Counter[str] = field(default_factory=Counter)
    num_rest: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
    first_refusals: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """For each packed modality that refused content, how much and the first of it, in words."""
        return tuple(
            f"{name}: {self.num_refused[name]:,} contents were refused; the first is of {detail}"
            for name, detail in sorted(self.first_refusals.items())
        )

    def count(self, placer: Placer, sample_id: str, placement: Placement) -> None:
        """Counts a sample that was packed."""
        self.num_samples += 1
        for taker in placement.present:
            self.num_present[placer.names[taker]] += 1
        for taker, items in placement.items.items():
            self.num_items += len(items) if taker != placer.metadata else 0
        if placer.listing is not None:
            self.num_present[placer.names[placer.listing]] += 1
        if placer.rest is not None:
            self.num_rest += len(placement.items.get(placer.rest, ()))
        if not placement.unfit and not placement.without:
            return
        refused = [(unfit.modality, unfit.detail) for unfit in placement.unfit.values()]
        refused += [(placer.names[n], detail) for n, detail in placement.without.items()]
        for name, detail in refused:
            self.num_refused[name] += 1
            self.first_refusals.setdefault(name, f"sample {sample_id!r}: {detail}")


def placed_contents(rows: BlockRows, placement: Placement) -> Iterator[tuple[int, memoryview]]:
    """The rows of a sample that have a place, its metadata row too, with their content."""
    for item in chain.from_iterable(placement.items.values()):
        content = rows.metadata(item.row) if rows.is_metadata(item.row) else rows.content(item.row)
        if content is not None:
            yield item.row, content


def pack_rows(
    blocks: Iterable[pa.Table],
    plan: PackPlan,
    *,
    mult: Path | None,
    mstr: Path | None,
    provenance: Mapping[str, object],
    num_samples: int | None = None,
    fsync: bool = True,
    packed: Callable[[BlockRows, Placement, Mapping[str, Payload]], object] = lambda *_: None,
) -> PackSummary:
    """Writes packed files of filtered rows.

    The files' provenance gets a ``source_digest``: SHA-256 over one line for each packed row, sorted as bytes. A line
    is the row's member name (for a frame followed by ``#`` and its number; empty where there is none), the size of its
    content in decimal, and its CRC-32C in eight hexadecimal digits, separated by tabs and ended by a line feed. The
    content of a text row is its UTF-8 text, that of a metadata row its JSON text; a metadata row without JSON has no
    line.

    Args:
        blocks: tables of whole samples, with content.
        plan: the pack plan.
        mult: the MULT file to write, or None.
        mstr: the MSTR file to write, or None.
        provenance: where the files come from; JSON.
        num_samples: how many samples `blocks` hold, if known; it saves MULT a copy of its body.
        fsync: wait for the disk before the files take their places.
        packed: called with each sample that was packed: its rows, their places, and its payloads as they were encoded.

    Raises:
        EncodeError: a row cannot be packed that `packable` should have dropped, or a limit of the format is exceeded.
        ValueError: neither file is given.
    """
    path = mstr if mult is None else mult
    if path is None:
        raise ValueError("give mult, mstr or both")
    writer_class: type[MultWriter | MstrWriter] = MstrWriter if mult is None else MultWriter
    placer = Placer(plan, encode=True)
    summary = PackSummary(num_present=dict.fromkeys(placer.names, 0))
    lines: list[bytes] = []
    with writer_class(path, plan.specs(), num_samples=num_samples, provenance=provenance, fsync=fsync) as writer:
        for table in blocks:
            rows = BlockRows(table)
            placed: list[tuple[int, memoryview]] = []
            for placement in placer.place(rows):
                sample_id = rows.sample_id[placement.start]
                payloads = _payloads(placer, rows, placement, sample_id)
                writer.write(sample_id, payloads)
                summary.count(placer, sample_id, placement)
                packed(rows, placement, payloads)
                placed += placed_contents(rows, placement)
            lines += _digest_lines(rows, placed)
        digest = hashlib.sha256()
        for line in sorted(lines):
            digest.update(line)
        writer.add_provenance("source_digest", digest.hexdigest())
    with BlockDigest() as of_file, BlockDigest() as of_copy:
        read = _blocks(path, of_file)
        if isinstance(writer, MultWriter) and mstr is not None:
            write_mstr(writer, mstr, read, fsync=fsync, observe=of_copy.update)
            summary.sha256["mstr"] = of_copy.sha256
        else:
            deque(read, maxlen=0)
        summary.sha256[writer.format.lower()] = of_file.sha256
    return summary


def _blocks(path: Path, digest: BlockDigest) -> Iterator[tuple[int, bytes]]:
    """Yields position and bytes of each block of a file while its digest is computed."""
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            yield file.tell() - len(block), block


def _digest_lines(rows: BlockRows, placed: Sequence[tuple[int, memoryview]]) -> Iterator[bytes]:
    checksums = crc32c_each([content for _, content in placed])
    for (row, content), checksum in zip(placed, checksums, strict=True):
        member, frame = rows.member[row] or "", rows.frame[row]
        if frame is not None:
            member += f"#{frame}"
        yield f"{member}\t{len(content)}\t{checksum:08x}\n".encode()


def _payloads(placer: Placer, rows: BlockRows, placement: Placement, sample_id: str) -> dict[str, Payload]:
    for row, reason in placement.refused.items():
        where = f"sample {sample_id!r}, {rows.modality[row]} at position {rows.position[row]}"
        raise EncodeError(f"{where}: cannot be packed ({reason}), expected rows that `packable` accepts")
    payloads: dict[str, Payload] = {}
    for taker in placement.present:
        try:
            payloads[placer.names[taker]] = encode_placed(placer, rows, placement, taker)
        except EncodeError as error:
            raise EncodeError(f"sample {sample_id!r}, modality {placer.names[taker]!r}: {error}") from error
    placement.encoded_rows.clear()  # the payloads hold them now, and the next sample is placed before this goes
    if placer.listing is not None:
        encoded = placer.fields[placer.listing].encode(listing_json(rows, placement, placer))
        payloads[placer.names[placer.listing]] = Payload(*encoded)
    return payloads


def listing_json(rows: BlockRows, placement: Placement, placer: Placer) -> bytes:
    """The `rows` of one sample: for each content row, in order, what it is and which packed modality has it.

    Compact JSON: a list of ``{"position", "modality", "content_type", "member", "in"}``; a row that is a part of a
    composite has also the part's name in ``part``, one in the rest the modality that refused it in ``refused_by``, and
    a frame its number in ``frame``.
    """
    where = {item.row: (taker, item.part) for taker, items in placement.items.items() for item in items}
    listed = []
    for row in range(placement.start, placement.stop):
        if rows.is_metadata(row):
            continue
        taker, part = where.get(row, (None, ""))
        entry: dict[str, Any] = {
            "position": rows.position[row],
            "modality": rows.modality[row],
            "content_type": rows.content_type[row],
            "member": rows.member[row],
            "in": None if taker is None else placer.names[taker],
        }
        if part:
            entry["part"] = part
        if row in placement.unfit and taker == placer.rest:
            entry["refused_by"] = placement.unfit[row].modality
        if rows.frame[row] is not None:
            entry["frame"] = rows.frame[row]
        listed.append(entry)
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()


def encode_placed(placer: Placer, rows: BlockRows, placement: Placement, taker: int) -> Payload:
    """The payload of modality number `taker` of a sample that has it, but for the listing; `placer` encodes.

    Raises:
        EncodeError: its field refuses the items together.
    """
    made = placer.fields[taker]
    if taker in placement.encoded:
        return Payload(*placement.encoded[taker])
    items = sorted(placement.items[taker], key=attrgetter("position"))
    if taker == placer.rest:
        return Payload(*made.encode([(item.position, rows.content(item.row)) for item in items]))
    if made.item_field is None:
        return Payload(*placement.encoded_rows[items[0].row])
    return Payload(*made.encode_items([(item.position, placement.encoded_rows[item.row]) for item in items]))
