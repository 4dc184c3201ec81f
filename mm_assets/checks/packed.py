"""The contents of packed files, computed from their bytes, and the expected contents, computed from the rows.

Files are read by ranges and never mapped, so that resident memory stays bounded; a remote one is copied to scratch.
Sizes and CRC-32C are computed from the bytes, not from the writer's counts. Damage never raises here: it is a row of
`packed_damage`, and unreadable entries are missing from the other relations.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mm_assets.checks.alignment import FACT_RELATIONS, Facts
from mm_assets.checks.context import CheckContext
from mm_assets.checks.relations import TableRelations, table_of
from mm_assets.errors import BadMagicError, FormatError, SourceError
from mm_assets.fields import Field, Item, complete_config
from mm_assets.formats import ModalitySpec, MstrReader, MultReader, Payload, crc32c, open_reader
from mm_assets.packing.pack import listing_json
from mm_assets.packing.placement import BlockRows, Placement, Placer
from mm_assets.rows.parquet import sample_groups
from mm_assets.storage.files import SourceFile
from mm_assets.storage.remote import RemoteFile

__all__ = ["PACKED_RELATIONS", "PackedFiles", "PackedRelations"]

MAX_COMPARED = 32  # items of a re-encoding field that are decoded and compared, spread over the partition

_ITEMS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("modality", pa.string()),
        ("kind", pa.string()),
        ("part", pa.string()),
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
    [
        ("sample_id", pa.string()),
        ("modality", pa.string()),
        ("part", pa.string()),
        ("position", pa.int64()),
        ("detail", pa.string()),
    ]
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

_KINDS = {
    "one": "content",
    "sequence": "content",
    "parts": "content",
    "rest": "content",
    "json": "value",
    "metadata": "metadata",
    "listing": "listing",
}

Reader = MultReader | MstrReader


class Expected(NamedTuple):
    """What the filtered rows of a partition give, and how packed files differ from it.

    Attributes:
        items: the relation `expected_items`.
        presence: the relation `expected_presence`.
        parts: by sample and composite modality, the parts that its rows fill.
        mismatches: by format, the relation `decoded_mismatches`.
    """

    items: pa.Table
    presence: pa.Table
    parts: Mapping[tuple[str, str], frozenset[str]]
    mismatches: Mapping[str, pa.Table]


class PackedFiles:
    """The packed files of one partition, opened once, and the rows they were made of, read once.

    The checks of both formats share it.

    Args:
        context: the partition.
        forms: the formats that are checked.
    """

    def __init__(self, context: CheckContext, forms: Sequence[str]) -> None:
        self._context = context
        self._forms = forms
        self._scratch = tempfile.TemporaryDirectory(prefix="mm-assets-packed-")
        self._readers: dict[str, Reader | None] = {}
        self.damage: dict[str, list[tuple[str | None, str | None, str]]] = {form: [] for form in context.packed}
        self.ids: dict[str, list[str]] = {form: [] for form in context.packed}

    def __enter__(self) -> PackedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            if reader is not None:
                reader.close()
        self._scratch.cleanup()

    @cached_property
    def placer(self) -> Placer:
        """Places rows by the plan that the files were made by."""
        if self._context.plan is None:
            raise ValueError("packed files cannot be checked without the plan that they were made by")
        return Placer(self._context.plan)

    def reader(self, form: str) -> Reader | None:
        """An open reader, or None where the file does not open; then the damage is noted."""
        if form not in self._readers:
            source = self._source(form)
            self._readers[form] = None
            try:
                reader = open_reader(source)
                if reader.format.lower() != form:
                    raise BadMagicError(source.name, "is another format", found=reader.format, expected=form.upper())
                self.ids[form] = list(reader.sample_ids)
                self._readers[form] = reader
            except FormatError as error:
                source.close()
                self.damage[form].append((None, None, str(error)))
        return self._readers[form]

    def _source(self, form: str) -> RemoteFile:
        store = self._context.store
        name = self._context.packed.get(form)
        if name is None:
            raise SourceError(store.url, f"there is no packed {form} file to check")
        if store.is_local:
            return RemoteFile(store.url_of(name), store.storage_options)
        copy = Path(self._scratch.name) / f"packed.{form}"
        with SourceFile(store.url_of(name), store.storage_options) as source, copy.open("wb") as target:
            shutil.copyfileobj(source.stream(), target, 4 << 20)
        return RemoteFile(str(copy))

    @cached_property
    def expected(self) -> Expected:
        """What the filtered rows give, by one pass over them for all formats that are checked."""
        presence: list[tuple[Any, ...]] = []
        parts: dict[tuple[str, str], frozenset[str]] = {}
        mismatches: dict[str, list[tuple[Any, ...]]] = {form: [] for form in self._forms}
        items = table_of(self._expect(presence, parts, mismatches), _ITEMS)
        tables = {form: table_of(iter(found), _MISMATCHES) for form, found in mismatches.items()}
        return Expected(items, table_of(iter(presence), _PRESENCE), parts, tables)

    def _expect(
        self,
        presence: list[tuple[Any, ...]],
        parts: dict[tuple[str, str], frozenset[str]],
        mismatches: Mapping[str, list[tuple[Any, ...]]],
    ) -> Iterator[tuple[Any, ...]]:
        placer, size = self.placer, self._context.batch_bytes
        composites = [number for number, made in enumerate(placer.fields) if made.PARTS]
        compare = {form: _Comparison(self.reader(form), self.ids[form], placer) for form in mismatches}
        with closing(TableRelations(self._context)) as tables:
            batches = tables.batches(self._context.packed_from)
            for block in sample_groups(batches, batch_bytes=size):
                rows = BlockRows(block)
                for placement in placer.place(rows):
                    yield from _expected_of(rows, placement, placer)
                    sample_id = rows.sample_id[placement.start]
                    listed = [] if placer.listing is None else [placer.listing]
                    for taker in composites:
                        if taker in placement.values:
                            filled = frozenset(item.part for item in placement.items.get(taker, ()))
                            parts[sample_id, placer.names[taker]] = filled
                        elif taker in placement.items:
                            parts[sample_id, placer.names[taker]] = frozenset({""})
                    presence += [(sample_id, placer.names[taker]) for taker in (*placement.present, *listed)]
                    for form, found in mismatches.items():
                        found += compare[form].sample(rows, placement)


class PackedRelations:
    """The relations of one packed file and the rows that it was made of.

    Args:
        context: the partition and the format.
        files: its packed files.
    """

    def __init__(self, context: CheckContext, files: PackedFiles) -> None:
        self._context = context
        self._own = context.packed_format or ""
        self._files = files
        self._items: tuple[pa.Table, pa.Table] | None = None
        self._facts: Facts | None = None

    # -- what the files are

    def expected_modalities(self) -> pa.Table:
        """The modalities of the plan."""
        plan = self._files.placer.plan
        kinds = [_KINDS[modality.selector.take] for modality in plan.modalities]
        return _specs_table(plan.specs(), kinds)

    def packed_modalities(self) -> pa.Table:
        """The modalities that the file declares."""
        reader = self._files.reader(self._own)
        specs = () if reader is None else reader.modalities
        return _specs_table(specs, [""] * len(specs))

    def packed_formats(self) -> pa.Table:
        """The formats in which the partition is packed."""
        return pa.table({"format": pa.array(sorted(self._context.packed), pa.string())})

    def packed_samples(self) -> pa.Table:
        """The packed samples in order."""
        self._files.reader(self._own)
        return table_of(enumerate(self._files.ids[self._own]), _SAMPLES)

    def packed_presence(self) -> pa.Table:
        """Which sample has which modality."""
        return table_of(self._presence(), _PRESENCE)

    def _presence(self) -> Iterator[tuple[str, str]]:
        reader = self._files.reader(self._own)
        if reader is not None:
            ids = self._files.ids[self._own]
            for name in reader.names:
                for i in _present(reader, name):
                    yield ids[i], name

    def packed_payloads(self) -> pa.Table:
        """Size and checksum of every payload of both files, which `intact` proves; and modality "" for each sample."""
        return table_of((row for form in sorted(self._context.packed) for row in self._payloads(form)), _PAYLOADS)

    def _payloads(self, form: str) -> Iterator[tuple[Any, ...]]:
        reader = self._files.reader(form)
        if reader is None:
            return
        ids = self._files.ids[form]
        for i, sample_id in enumerate(ids):
            yield form, i, sample_id, "", 0, 0
        for name in reader.names:
            try:
                sizes, sums = reader.sizes(name), reader.checksums(name)
            except FormatError:
                continue  # `intact` reports it
            for i in _present(reader, name):
                yield form, i, ids[i], name, int(sizes[i]), int(sums[i])

    def packed_damage(self) -> pa.Table:
        """Everything that is wrong with the file."""
        reader = self._files.reader(self._own)
        if reader is not None:
            for found in reader.verify().damage:
                self._files.damage[self._own].append((found.sample_id, found.modality, found.message))
        return table_of(iter(self._files.damage[self._own]), _DAMAGE)

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
        placer = self._files.placer
        known = {name: (placer.fields[n], placer.plan.modalities[n]) for n, name in enumerate(placer.names)}
        placed = self._files.expected.parts
        for sample_id, name, payload in self._scan(known):
            made, modality = known[name]
            kind = _KINDS[modality.selector.take]
            parts = placed.get((sample_id, name))
            try:
                for item in _items_of(made, payload, parts):
                    # A composite may hold more than its rows: a layout of the JSON, the audio of a video file.
                    if parts is None or item.part in parts or kind == "value":
                        size, checksum = len(item.data), crc32c(item.data)
                        yield sample_id, name, kind, item.part, item.position, size, checksum, True
                if kind == "listing":
                    listing += _listed(sample_id, made.decode(payload.metadata, payload.data))
            except FormatError:
                continue  # the item is then missing, which is a violation by itself

    def _scan(self, known: Mapping[str, Any]) -> Iterator[tuple[str, str, Payload]]:
        """Sample id, modality and payload, as far as they can be read; `verify` reports where they cannot."""
        reader = self._files.reader(self._own)
        if reader is None:
            return
        ids = self._files.ids[self._own]
        try:
            for block in reader.scan([name for name in reader.names if name in known]):
                for name, payloads in block.payloads.items():
                    for i, payload in zip(block.indices.tolist(), payloads, strict=True):
                        if payload is not None:
                            yield ids[i], name, payload
        except FormatError:
            return

    def facts(self, relation: str) -> pa.Table:
        """The facts about time and place in the payloads; see `alignment`."""
        if self._facts is None:
            self._facts = Facts()
            placer = self._files.placer
            judged = {name: made for name, made in zip(placer.names, placer.fields, strict=True) if made.FACTS}
            for sample_id, name, payload in self._scan(judged):
                with contextlib.suppress(FormatError):  # it is missing from the items, which is a violation by itself
                    self._facts.add(sample_id, name, judged[name].facts(*payload))
        return self._facts.table(relation)

    # -- what should be in them

    def expected_items(self) -> pa.Table:
        """The items that the filtered rows give; `exact` where the field keeps bytes as they are."""
        return self._files.expected.items

    def decoded_mismatches(self) -> pa.Table:
        """Items of re-encoding fields, up to 32 for each modality, that are not what their row gives."""
        return self._files.expected.mismatches[self._own]

    def expected_presence(self) -> pa.Table:
        """Which sample should have which modality."""
        return self._files.expected.presence


def _present(reader: Reader, name: str) -> list[int]:
    """The samples that have a modality, by number."""
    found: list[int] = np.flatnonzero(reader.presence(name)).tolist()
    return found


def _expected_of(rows: BlockRows, placement: Placement, placer: Placer) -> Iterator[tuple[Any, ...]]:
    sample_id = rows.sample_id[placement.start]
    for row in placement.refused:
        # It should have been dropped: no packed item can be its.
        yield sample_id, "", "content", "", row - placement.start, 0, 0, True
    for taker, placed in placement.items.items():
        kind = _KINDS[placer.plan.modalities[taker].selector.take]
        for row, position, part in placed:
            content = rows.metadata(row) if taker == placer.metadata else rows.content(row)
            data = b"" if content is None else content
            exact = placer.keeps(taker, part)
            yield sample_id, placer.names[taker], kind, part, position, len(data), crc32c(data), exact
    for taker, value in placement.values.items():
        if placer.plan.modalities[taker].selector.take == "json":
            places = [0] if placer.fields[taker].item_field is None else [place for place, _ in value]
            for place in places:
                yield sample_id, placer.names[taker], "value", "", place, 0, 0, False
    if placer.listing is not None:
        data = listing_json(rows, placement, placer)
        yield sample_id, placer.names[placer.listing], "listing", "", 0, len(data), crc32c(data), True


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
    """Compares the payloads of re-encoding fields with their rows, in samples spread over the partition."""

    def __init__(self, reader: Reader | None, ids: list[str], placer: Placer) -> None:
        self._reader = reader
        self._placer = placer
        self._chosen: dict[int, dict[str, int]] = {}
        self._left: dict[int, int] = {}
        for taker, name in enumerate(placer.names):
            modality = placer.plan.modalities[taker]
            if reader is None or name not in reader.names or modality.selector.take == "listing":
                continue
            if modality.selector.take not in ("parts", "json") and placer.keeps(taker, ""):
                continue
            present = _present(reader, name)
            places = np.linspace(0, len(present) - 1, min(MAX_COMPARED, len(present))).astype(int)
            self._chosen[taker] = {ids[present[k]]: present[k] for k in np.unique(places).tolist()}
            self._left[taker] = MAX_COMPARED

    def sample(self, rows: BlockRows, placement: Placement) -> Iterator[tuple[Any, ...]]:
        """The differences in one sample, if it is among the chosen."""
        sample_id = rows.sample_id[placement.start]
        for taker, chosen in self._chosen.items():
            if sample_id not in chosen or self._reader is None:
                continue
            if taker not in placement.items and taker not in placement.values:
                continue
            name, made = self._placer.names[taker], self._placer.fields[taker]
            try:
                payload = self._reader.read_payload(chosen[sample_id], name)
                if taker in placement.values:
                    found = None if payload is None else (payload.metadata, payload.data)
                    detail = _difference(made, placement.values[taker], found)
                    if detail is not None:
                        yield sample_id, name, "", None, detail
                    continue
                stored = {} if payload is None else {item[0]: item[1:] for item in made.item_payloads(*payload)}
            except FormatError as error:
                yield sample_id, name, "", None, error.detail
                continue
            for item in placement.items[taker][: self._left[taker]]:
                self._left[taker] -= 1
                content = rows.content(item.row)
                if content is None:
                    yield sample_id, name, "", item.position, "its row has no content"
                    continue
                value = self._placer.value(taker, rows.modality[item.row], content)
                detail = _difference(made.item_field or made, value, stored.get(item.position))
                if detail is not None:
                    yield sample_id, name, "", item.position, detail


def _items_of(made: Field, payload: Payload, parts: frozenset[str] | None) -> Iterable[Item]:
    """The items of a payload; those of a composite that was made from one content are that content's."""
    items = made.items(payload.metadata, payload.data)
    if not made.PARTS or parts is None or "" not in parts:
        return items
    stored = list(items)
    return [Item("", 0, stored[0].data if len(stored) == 1 else payload.data)]


def _difference(made: Field, value: Any, stored: tuple[Any, Any] | None) -> str | None:
    """How a stored payload differs from that of its value now, or None."""
    if stored is None:
        return "there is no such item"
    encoded = made.encode(value)
    if bytes(encoded.metadata) == bytes(stored[0]) and encoded.data == stored[1]:
        return None
    try:
        same = _same(made.decode(encoded.metadata, encoded.data), made.decode(*stored))
    except FormatError as error:
        return f"does not decode: {error.detail}"
    return None if same else "decodes to another value than the row's content gives"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _specs_table(specs: tuple[ModalitySpec, ...], kinds: list[str]) -> pa.Table:
    return table_of(
        (
            (n, s.name, kind, s.type_name, s.type_id, s.metadata_size, json.dumps(config, sort_keys=True))
            for n, (s, kind) in enumerate(zip(specs, kinds, strict=True))
            for config in [complete_config(s.type_name, s.config)]
        ),
        _SPECS,
    )


PACKED_RELATIONS: Mapping[str, Callable[[PackedRelations], pa.Table]] = {
    "expected_modalities": PackedRelations.expected_modalities,
    "packed_modalities": PackedRelations.packed_modalities,
    "packed_formats": PackedRelations.packed_formats,
    "packed_samples": PackedRelations.packed_samples,
    "packed_presence": PackedRelations.packed_presence,
    "packed_payloads": PackedRelations.packed_payloads,
    "packed_damage": PackedRelations.packed_damage,
    "packed_items": PackedRelations.packed_items,
    "packed_listing": PackedRelations.packed_listing,
    "expected_items": PackedRelations.expected_items,
    "expected_presence": PackedRelations.expected_presence,
    "decoded_mismatches": PackedRelations.decoded_mismatches,
    **{relation: partial(PackedRelations.facts, relation=relation) for relation in FACT_RELATIONS},
}
"""The relations over packed files and their expected contents."""
