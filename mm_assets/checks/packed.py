"""What packed files hold, computed from their own bytes, and what they should hold, computed from the filtered rows.

Files are read by ranges and never mapped, so that resident memory stays bounded; a remote one is copied to scratch.
Sizes and CRC-32C are taken of the bytes themselves, not from what the writer counted. Damage never raises here: it is a
row of `packed_damage`, and what cannot be read is missing from the other views.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mm_assets.checks.context import CheckContext
from mm_assets.checks.views import Tables, table_of
from mm_assets.errors import BadMagicError, FormatError, SourceError
from mm_assets.etl.pack import listing_json
from mm_assets.etl.pack_place import BlockRows, Placement, Placer, inner_field
from mm_assets.etl.parquet import read_batches, sample_groups
from mm_assets.fields import Field, ScalarField, SequenceField
from mm_assets.formats import ModalitySpec, MstrReader, MultReader, Payload, crc32c, open_reader
from mm_assets.storage import RemoteFile, SourceFile

__all__ = ["PACKED_VIEWS", "PackedFiles"]

MAX_COMPARED = 32  # items of a re-encoding field that are decoded and compared, spread over the partition

_ITEMS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("modality", pa.string()),
        ("kind", pa.string()),
        ("position", pa.int64()),
        ("size", pa.int64()),
        ("crc32c", pa.uint32()),
        ("exact", pa.bool_()),
    ]
)
_PAYLOADS = pa.schema(
    [
        ("format", pa.string()),
        ("ordinal", pa.int64()),
        ("sample_id", pa.string()),
        ("modality", pa.string()),
        ("size", pa.int64()),
        ("crc32c", pa.uint32()),
    ]
)
_SAMPLES = pa.schema([("ordinal", pa.int64()), ("sample_id", pa.string())])
_PRESENCE = pa.schema([("sample_id", pa.string()), ("modality", pa.string())])
_DAMAGE = pa.schema([("sample_id", pa.string()), ("modality", pa.string()), ("message", pa.string())])
_MISMATCHES = pa.schema(
    [("sample_id", pa.string()), ("modality", pa.string()), ("position", pa.int64()), ("detail", pa.string())]
)
_LISTING = pa.schema(
    [
        ("sample_id", pa.string()),
        ("place", pa.int64()),
        ("position", pa.int64()),
        ("modality", pa.string()),
        ("content_type", pa.string()),
        ("packed_in", pa.string()),
    ]
)
_SPECS = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("modality", pa.string()),
        ("kind", pa.string()),
        ("field", pa.string()),
        ("type_id", pa.int64()),
        ("metadata_size", pa.int64()),
        ("config", pa.string()),
    ]
)

_KINDS = {"one": "content", "sequence": "content", "rest": "content", "metadata": "metadata", "listing": "listing"}

Reader = MultReader | MstrReader


class _Item(NamedTuple):
    """One item of a packed payload."""

    position: int
    metadata: Any
    data: Any


class PackedFiles:
    """The packed files of one partition, and the rows they were made of.

    Args:
        context: the partition.
        asset: "packed_mult" or "packed_mstr"; for any other asset nothing may be asked.
        tables: gives the filtered rows.
        scratch: a folder for copies of remote files.
    """

    def __init__(self, context: CheckContext, asset: str, tables: Tables, scratch: str) -> None:
        self._context = context
        self._own = asset.removeprefix("packed_")
        self._tables = tables
        self._scratch = scratch
        self._readers: dict[str, Reader | None] = {}
        self._ids: dict[str, list[str]] = {}
        self._damage: list[tuple[str | None, str | None, str]] = []
        self._expected: tuple[pa.Table, pa.Table] | None = None
        self._items: tuple[pa.Table, pa.Table] | None = None

    def close(self) -> None:
        """Closes the files."""
        for reader in self._readers.values():
            if reader is not None:
                reader.close()

    def _placer(self) -> Placer:
        if self._context.plan is None:
            raise ValueError("packed files cannot be checked without the plan that they were made by")
        return Placer(self._context.plan)

    def _reader(self, form: str) -> Reader | None:
        """An open reader, or None where the file does not open; then the damage is noted."""
        if form not in self._readers:
            self._readers[form] = None
            source = self._source(form)
            try:
                reader = open_reader(source)
                if reader.format.lower() != form:
                    raise BadMagicError(source.name, "is another format", found=reader.format, expected=form.upper())
                self._ids[form] = list(reader.sample_ids)
                self._readers[form] = reader
            except FormatError as error:
                source.close()
                self._damage.append((None, None, str(error)))
        return self._readers[form]

    def _source(self, form: str) -> RemoteFile:
        store = self._context.store
        name = self._context.packed.get(form)
        if name is None:
            raise SourceError(store.url, f"there is no packed {form} file to check")
        if store.is_local:
            return RemoteFile(store.url_of(name), store.storage_options)
        copy = Path(self._scratch) / f"packed.{form}"
        with SourceFile(store.url_of(name), store.storage_options) as source, copy.open("wb") as target:
            shutil.copyfileobj(source.stream(), target, 4 << 20)
        return RemoteFile(str(copy))

    # -- what the files are

    def expected_modalities(self) -> pa.Table:
        """The modalities of the plan."""
        plan = self._placer().plan
        kinds = [_KINDS[modality.selector.take] for modality in plan.modalities]
        return _specs_table(plan.specs(), kinds)

    def packed_modalities(self) -> pa.Table:
        """The modalities that the file declares."""
        reader = self._reader(self._own)
        specs = () if reader is None else reader.modalities
        return _specs_table(specs, [""] * len(specs))

    def packed_formats(self) -> pa.Table:
        """The formats in which the partition is packed."""
        return pa.table({"format": pa.array(sorted(self._context.packed), pa.string())})

    def packed_samples(self) -> pa.Table:
        """The packed samples in order."""
        self._reader(self._own)
        return table_of(enumerate(self._ids.get(self._own, [])), _SAMPLES)

    def packed_presence(self) -> pa.Table:
        """Which sample has which modality."""
        return table_of(self._presence(), _PRESENCE)

    def _presence(self) -> Iterator[tuple[str, str]]:
        reader = self._reader(self._own)
        if reader is not None:
            ids = self._ids[self._own]
            for name in reader.names:
                for i in _present(reader, name):
                    yield ids[i], name

    def packed_payloads(self) -> pa.Table:
        """Size and checksum of every payload of both files, which `intact` proves; and modality "" for each sample."""
        return table_of((row for form in sorted(self._context.packed) for row in self._payloads(form)), _PAYLOADS)

    def _payloads(self, form: str) -> Iterator[tuple[Any, ...]]:
        reader = self._reader(form)
        if reader is None:
            return
        ids = self._ids[form]
        for i, sample_id in enumerate(ids):
            yield form, i, sample_id, "", 0, 0
        for name in reader.names:
            try:
                sizes, sums = reader.sizes(name), reader.checksums(name)
            except FormatError:
                continue  # `intact` says what is wrong with them
            for i in _present(reader, name):
                yield form, i, ids[i], name, int(sizes[i]), int(sums[i])

    def packed_damage(self) -> pa.Table:
        """Everything that is wrong with the file."""
        reader = self._reader(self._own)
        if reader is not None:
            for found in reader.verify().damage:
                self._damage.append((found.sample_id, found.modality, found.message))
        return table_of(iter(self._damage), _DAMAGE)

    # -- what is in them

    def packed_items(self) -> pa.Table:
        """Every item of every payload, with the size and CRC-32C of its data."""
        return self._read_items()[0]

    def packed_listing(self) -> pa.Table:
        """Every entry of the samples' listings."""
        return self._read_items()[1]

    def _read_items(self) -> tuple[pa.Table, pa.Table]:
        if self._items is None:
            listing: list[tuple[Any, ...]] = []
            items = table_of(self._walk(listing), _ITEMS)
            self._items = items, table_of(iter(listing), _LISTING)
        return self._items

    def _walk(self, listing: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        placer = self._placer()
        known = dict(zip(placer.names, zip(placer.fields, placer.plan.modalities, strict=True), strict=True))
        for sample_id, name, payload in self._scan(known):
            made, modality = known[name]
            kind = _KINDS[modality.selector.take]
            try:
                for item in _items_of(made, payload):
                    yield sample_id, name, kind, item.position, len(item.data), crc32c(item.data), True
                if kind == "listing":
                    listing += _listed(sample_id, made.decode(payload.metadata, payload.data))
            except FormatError:
                continue  # the item is then missing, which is a violation of its own

    def _scan(self, known: Mapping[str, Any]) -> Iterator[tuple[str, str, Payload]]:
        """Sample id, modality and payload, as far as they can be read; `verify` reports where they cannot."""
        reader = self._reader(self._own)
        if reader is None:
            return
        ids = self._ids[self._own]
        try:
            for block in reader.scan([name for name in reader.names if name in known]):
                for name, payloads in block.payloads.items():
                    for i, payload in zip(block.indices.tolist(), payloads, strict=True):
                        if payload is not None:
                            yield ids[i], name, payload
        except FormatError:
            return

    # -- what should be in them

    def expected_items(self) -> pa.Table:
        """The items that the filtered rows give; `exact` where the field keeps bytes as they are."""
        return self._read_rows()[0]

    def decoded_mismatches(self) -> pa.Table:
        """Items of re-encoding fields, up to 32 for each modality, that are not what their row gives."""
        return self._read_rows()[1]

    def _read_rows(self) -> tuple[pa.Table, pa.Table]:
        if self._expected is None:
            mismatches: list[tuple[Any, ...]] = []
            items = table_of(self._expect(mismatches), _ITEMS)
            self._expected = items, table_of(iter(mismatches), _MISMATCHES)
        return self._expected

    def _expect(self, mismatches: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        placer = self._placer()
        self._tables.check_columns("filtered_rows")
        where = self._context.store.url_of(self._context.files["filtered_rows"])
        size = self._context.batch_bytes
        batches = read_batches(self._tables.parquet("filtered_rows"), batch_bytes=size, name=where)
        compare = _Comparison(self._reader(self._own), self._ids.get(self._own, []), placer)
        for table in sample_groups(batches, batch_bytes=size):
            rows = BlockRows(table)
            for placement in placer.place(rows):
                yield from _expected_of(rows, placement, placer)
                mismatches += compare.sample(rows, placement)


def _present(reader: Reader, name: str) -> list[int]:
    """The samples that have a modality, by number."""
    found: list[int] = np.flatnonzero(reader.presence(name)).tolist()
    return found


def _expected_of(rows: BlockRows, placement: Placement, placer: Placer) -> Iterator[tuple[Any, ...]]:
    sample_id = rows.sample_id[placement.start]
    for row in placement.refused:
        # It should have been dropped: no packed item can be its own.
        yield sample_id, "", "content", row - placement.start, 0, 0, True
    for taker, placed in placement.items.items():
        exact = _is_exact(placer.fields[taker])
        kind = _KINDS[placer.plan.modalities[taker].selector.take]
        for row, position in placed:
            content = rows.metadata(row) if taker == placer.metadata else rows.content(row)
            data = b"" if content is None else content
            yield sample_id, placer.names[taker], kind, position, len(data), crc32c(data), exact
    if placer.listing is not None:
        data = listing_json(rows, placement, placer)
        yield sample_id, placer.names[placer.listing], "listing", 0, len(data), crc32c(data), True


def _is_exact(made: Field) -> bool:
    inner = inner_field(made)
    return inner.keeps_bytes and not isinstance(inner, ScalarField)


def _items_of(made: Field, payload: Payload) -> Iterator[_Item]:
    if not isinstance(made, SequenceField):
        yield _Item(0, payload.metadata, payload.data)
        return
    for item in made.item_payloads(payload.metadata, payload.data):
        yield _Item(*item)


def _listed(sample_id: str, entries: Any) -> Iterator[tuple[Any, ...]]:
    for place, entry in enumerate(entries if isinstance(entries, list) else []):
        known: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
        position = known.get("position")
        texts = [known.get(key) for key in ("modality", "content_type", "in")]
        yield (
            sample_id,
            place,
            position if isinstance(position, int) else None,
            *(text if isinstance(text, str) else None for text in texts),
        )


class _Comparison:
    """Compares items of re-encoding fields with what their rows give, in samples spread over the partition."""

    def __init__(self, reader: Reader | None, ids: list[str], placer: Placer) -> None:
        self._reader = reader
        self._placer = placer
        self._chosen: dict[int, dict[str, int]] = {}
        self._left: dict[int, int] = {}
        for taker, name in enumerate(placer.names):
            made = placer.fields[taker]
            if reader is None or name not in reader.names or _is_exact(made):
                continue
            present = _present(reader, name)
            places = np.linspace(0, len(present) - 1, min(MAX_COMPARED, len(present))).astype(int)
            self._chosen[taker] = {ids[present[k]]: present[k] for k in np.unique(places).tolist()}
            self._left[taker] = MAX_COMPARED

    def sample(self, rows: BlockRows, placement: Placement) -> Iterator[tuple[Any, ...]]:
        """What differs in one sample, if it is among the chosen."""
        sample_id = rows.sample_id[placement.start]
        for taker, chosen in self._chosen.items():
            placed = placement.items.get(taker)
            if placed is None or sample_id not in chosen or self._reader is None:
                continue
            name = self._placer.names[taker]
            try:
                payload = self._reader.read_payload(chosen[sample_id], name)
                found = (
                    {} if payload is None else {i.position: i for i in _items_of(self._placer.fields[taker], payload)}
                )
            except FormatError as error:
                yield sample_id, name, None, error.detail
                continue
            for row, position in placed[: self._left[taker]]:
                self._left[taker] -= 1
                detail = self._difference(taker, rows, row, found.get(position))
                if detail is not None:
                    yield sample_id, name, position, detail

    def _difference(self, taker: int, rows: BlockRows, row: int, item: _Item | None) -> str | None:
        made = inner_field(self._placer.fields[taker])
        content = rows.content(row)
        if item is None or content is None:
            return "there is no such item"
        encoded = made.encode(self._placer.value(taker, rows.modality[row], content))
        if bytes(encoded.metadata) == bytes(item.metadata) and encoded.data == item.data:
            return None
        try:
            same = _same(made.decode(encoded.metadata, encoded.data), made.decode(item.metadata, item.data))
        except FormatError as error:
            return f"does not decode: {error.detail}"
        return None if same else "decodes to another value than the row's content gives"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def _specs_table(specs: tuple[ModalitySpec, ...], kinds: list[str]) -> pa.Table:
    return table_of(
        (
            (n, s.name, kind, s.type_name, s.type_id, s.metadata_size, json.dumps(dict(s.config), sort_keys=True))
            for n, (s, kind) in enumerate(zip(specs, kinds, strict=True))
        ),
        _SPECS,
    )


PACKED_VIEWS: Mapping[str, Callable[[PackedFiles], pa.Table]] = {
    "expected_modalities": PackedFiles.expected_modalities,
    "packed_modalities": PackedFiles.packed_modalities,
    "packed_formats": PackedFiles.packed_formats,
    "packed_samples": PackedFiles.packed_samples,
    "packed_presence": PackedFiles.packed_presence,
    "packed_payloads": PackedFiles.packed_payloads,
    "packed_damage": PackedFiles.packed_damage,
    "packed_items": PackedFiles.packed_items,
    "packed_listing": PackedFiles.packed_listing,
    "expected_items": PackedFiles.expected_items,
    "decoded_mismatches": PackedFiles.decoded_mismatches,
}
"""View name to the Arrow table behind it."""
