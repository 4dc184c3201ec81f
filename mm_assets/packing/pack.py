"""Packing: filtered rows become samples of MULT and MSTR files, in one pass and with the same payload bytes.

Each content row becomes exactly one item of one packed modality (`packable` has dropped what no field accepts), and
each sample one packed sample, in the table's order. Content that a field stores unchanged is copied and never decoded.
Memory is one block of rows and one sample.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from mm_assets.errors import EncodeError
from mm_assets.formats import MstrWriter, MultWriter, Payload, crc32c
from mm_assets.packing.placement import BlockRows, Placed, Placement, Placer
from mm_assets.packing.plan import PackPlan
from mm_assets.rows.schema import Drop

__all__ = ["PackSummary", "encode_placed", "listing_json", "pack_rows", "packable"]

MAX_SAMPLE_BYTES = (1 << 32) - (1 << 24)  # MULT counts a sample in uint32; the rest is for headers and records


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """The result of packing.

    Attributes:
        num_samples: samples in each file.
        num_items: content rows, each packed as one item.
        num_present: packed modality to the number of samples that have it.
        num_refused: packed modality to the number of contents that its field refused: rows that went to the rest, and
            values of the JSON that are absent; without modalities that refused none.
        num_rest: content rows in the rest.
        notes: for each packed modality that refused content, how much and the first of it, in words.
        payload_bytes: bytes of all payloads, metadata records included.
        file_bytes: "mult" and "mstr" to the bytes of the file, for those made.
        source_digest: SHA-256 of what was packed, hexadecimal; see `pack_rows`.
    """

    num_samples: int
    num_items: int
    num_present: Mapping[str, int]
    payload_bytes: int
    num_refused: Mapping[str, int] = field(default_factory=dict)
    num_rest: int = 0
    notes: tuple[str, ...] = ()
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    source_digest: str = ""


def packable(plan: PackPlan) -> Callable[..., Iterable[Drop]]:
    """Makes the filter step that finds rows which cannot be packed by a plan.

    Its reasons: ``not_materialized`` (the row has an error instead of content), ``no_content``, ``unpackable_<row
    modality>`` (its field refuses the content), ``unpackable_<packed modality>`` (a composite refuses its parts),
    ``incomplete_<packed modality>`` (a part that it needs is missing), ``not_selected`` (no packed modality takes it),
    and for whole samples, named by their metadata row, ``unpackable_metadata``, ``unpackable_<packed modality>`` (a
    value out of the JSON is refused) and ``sample_too_large`` (value: its bytes).

    The function takes a table of whole samples, and their `content_views` where these are known, and yields a `Drop`
    per refused row.
    """
    placer = Placer(plan)

    def judge(table: pa.Table, contents: Sequence[memoryview | None] | None = None) -> Iterable[Drop]:
        rows = BlockRows(table, contents)
        for placement in placer.settle(rows):
            for row, reason in sorted(placement.refused.items()):
                detail = placement.unfit[row][1] if row in placement.unfit else None
                yield Drop(row, reason, None, detail)
            size = _content_bytes(rows, placement)
            if size > MAX_SAMPLE_BYTES:
                # A metadata row names its sample; a sample without one has only rows to name.
                heads = [r for r in range(placement.start, placement.stop) if rows.is_metadata(r)]
                for row in heads or range(placement.start, placement.stop):
                    yield Drop(row, "sample_too_large", float(size))

    return judge


def _content_bytes(rows: BlockRows, placement: Placement) -> int:
    placed = [item.row for items in placement.items.values() for item in items]
    contents = (rows.metadata(row) if rows.is_metadata(row) else rows.content(row) for row in placed)
    return sum(len(content) for content in contents if content is not None)


def pack_rows(
    blocks: Iterable[pa.Table],
    plan: PackPlan,
    *,
    mult: Path | None,
    mstr: Path | None,
    provenance: Mapping[str, object],
    num_samples: int | None = None,
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

    Raises:
        EncodeError: a row cannot be packed that `packable` should have dropped, or a limit of the format is exceeded.
        ValueError: neither file is given.
    """
    if mult is None and mstr is None:
        raise ValueError("give mult, mstr or both")
    packer = _Packer(plan)
    with ExitStack() as stack:
        writers: dict[str, MultWriter | MstrWriter] = {}
        if mult is not None:
            writers["mult"] = stack.enter_context(
                MultWriter(mult, plan.specs(), num_samples=num_samples, provenance=provenance)
            )
        if mstr is not None:
            writers["mstr"] = stack.enter_context(
                MstrWriter(mstr, plan.specs(), num_samples=num_samples, provenance=provenance)
            )
        for table in blocks:
            for sample_id, payloads in packer.samples(table):
                for writer in writers.values():
                    writer.write(sample_id, payloads)
        digest = packer.source_digest()
        for writer in writers.values():
            writer.add_provenance("source_digest", digest)
        sizes = {name: writer.close().num_bytes for name, writer in writers.items()}
    return PackSummary(
        num_samples=packer.num_samples,
        num_items=packer.num_items,
        num_present=packer.num_present,
        payload_bytes=packer.payload_bytes,
        num_refused=dict(packer.num_refused),
        num_rest=packer.num_rest,
        notes=packer.notes,
        file_bytes=sizes,
        source_digest=digest,
    )


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
            entry["refused_by"] = placement.unfit[row][0]
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
    items = sorted(placement.items[taker], key=_position)
    if taker == placer.rest:
        return Payload(*made.encode([(item.position, rows.content(item.row)) for item in items]))
    if made.item_field is None:
        return Payload(*placement.encoded_rows[items[0].row])
    return Payload(*made.encode_items([(item.position, placement.encoded_rows[item.row]) for item in items]))


class _Packer:
    """Turns blocks into payloads and counts what was packed."""

    def __init__(self, plan: PackPlan) -> None:
        self.placer = Placer(plan, encode=True)
        self.num_samples = 0
        self.num_items = 0
        self.num_present = dict.fromkeys(self.placer.names, 0)
        self.num_refused: Counter[str] = Counter()
        self.num_rest = 0
        self._first_refusals: dict[str, str] = {}
        self.payload_bytes = 0
        self._lines: list[bytes] = []

    def samples(self, table: pa.Table) -> Iterable[tuple[str, dict[str, Payload]]]:
        rows = BlockRows(table)
        for placement in self.placer.place(rows):
            sample_id = rows.sample_id[placement.start]
            for row, reason in placement.refused.items():
                where = f"sample {sample_id!r}, {rows.modality[row]} at position {rows.position[row]}"
                raise EncodeError(f"{where}: cannot be packed ({reason}), expected rows that `packable` accepts")
            payloads: dict[str, Payload] = {}
            for taker in placement.present:
                payloads[self.placer.names[taker]] = self._payload(rows, taker, placement)
            placement.encoded_rows.clear()  # the payloads hold them now, and the next sample is placed before this goes
            if self.placer.listing is not None:
                encoded = self.placer.fields[self.placer.listing].encode(listing_json(rows, placement, self.placer))
                payloads[self.placer.names[self.placer.listing]] = Payload(*encoded)
            for name, payload in payloads.items():
                self.num_present[name] += 1
                self.payload_bytes += len(payload.metadata) + len(payload.data)
            self._note_refusals(sample_id, placement)
            self.num_samples += 1
            yield sample_id, payloads

    def _note_refusals(self, sample_id: str, placement: Placement) -> None:
        refused = [*placement.unfit.values(), *((self.placer.names[n], said) for n, said in placement.without.items())]
        for name, said in refused:
            self.num_refused[name] += 1
            self._first_refusals.setdefault(name, f"sample {sample_id!r}: {said}")
        if self.placer.rest is not None:
            self.num_rest += len(placement.items.get(self.placer.rest, ()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was refused."""
        return tuple(
            f"{name}: {self.num_refused[name]:,} contents were refused; the first is of {said}"
            for name, said in sorted(self._first_refusals.items())
        )

    def _payload(self, rows: BlockRows, taker: int, placement: Placement) -> Payload:
        items = placement.items.get(taker, [])
        try:
            if taker == self.placer.metadata:
                self._note(rows, items[0].row, rows.metadata(items[0].row))
                return encode_placed(self.placer, rows, placement, taker)
            self.num_items += len(items)
            for item in items:
                self._note(rows, item.row, rows.content(item.row))
            return encode_placed(self.placer, rows, placement, taker)
        except EncodeError as error:
            where = f"sample {rows.sample_id[placement.start]!r}, modality {self.placer.names[taker]!r}"
            raise EncodeError(f"{where}: {error}") from error

    def _note(self, rows: BlockRows, row: int, content: memoryview | None) -> None:
        """Takes a row's content into the digest."""
        if content is None:
            raise EncodeError(f"the {rows.modality[row]} row at position {rows.position[row]} has no content")
        member = rows.member[row] or ""
        if rows.frame[row] is not None:
            member += f"#{rows.frame[row]}"
        self._lines.append(f"{member}\t{len(content)}\t{crc32c(content):08x}\n".encode())

    def source_digest(self) -> str:
        self._lines.sort()
        digest = hashlib.sha256()
        for line in self._lines:
            digest.update(line)
        return digest.hexdigest()


def _position(item: Placed) -> int:
    return item.position
