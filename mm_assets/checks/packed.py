"""The contents of packed files, computed from their bytes, and the expected contents, computed from the rows.

Files are read by ranges and never mapped, so that resident memory stays bounded; a remote one is copied to scratch.
Sizes and CRC-32C are computed from the bytes, not from the writer's counts. Damage never raises here: it is a row of
`packed_damage`, and unreadable entries are missing from the other relations.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.checks.alignment import Facts
from mm_assets.checks.context import CheckContext
from mm_assets.checks.reencoding import (
    MAX_COMPARED,
    Comparison,
    EncodedSample,
    Reader,
    decode_failures,
    measure_payload,
    samples_with,
)
from mm_assets.checks.relations import BATCH_BYTES, TableBuilder, TableRelations, schema_of, table_of
from mm_assets.errors import BadMagicError, FormatError, SourceError, temporary_disk_named
from mm_assets.fields import Field, Item, complete_config
from mm_assets.formats import ModalitySpec, Payload, crc32c, open_reader
from mm_assets.packing.pack import listing_json
from mm_assets.packing.placement import BlockRows, Placement, Placer
from mm_assets.packing.plan import VALUE_TAKES
from mm_assets.rows.parquet import sample_groups
from mm_assets.storage.files import SourceFile
from mm_assets.storage.remote import RemoteFile

__all__ = ["ExpectedRows", "PackedFiles", "PackedRelations"]

MAX_ENCODED_BYTES = 1 << 20  # of the payloads of a re-encoding modality that are all encoded again

_ITEMS = schema_of("sample_id", "modality", "kind", "part", "position", "size", "crc32c", "exact")
_PAYLOADS = schema_of("ordinal", "sample_id", "modality", "size", "crc32c")
_ENCODED = schema_of("sample_id", "modality", "size", "crc32c")
_PRESENCE = schema_of("sample_id", "modality")
_MISMATCHES = schema_of("sample_id", "modality", "part", "position", "detail")
_LISTING = schema_of("sample_id", "place", "position", "modality", "content_type", "packed_in")
_LISTED = {"position": int, "modality": str, "content_type": str, "in": str}  # the keys of an entry
_SPECS = schema_of("ordinal", "modality", "field", "type_id", "metadata_size", "config")

_KINDS = {
    "one": "content",
    "sequence": "content",
    "parts": "content",
    "rest": "content",
    "json": "value",
    "column": "value",
    "metadata": "metadata",
    "listing": "listing",
}


class ExpectedRows:
    """What rows give, collected sample by sample: by packing, of the rows that it packs, or by a pass over their table.

    Args:
        placer: places rows by the plan that the files are made by.

    Attributes:
        items: the relation `expected_items`, under construction.
        presence: the relation `expected_presence`, likewise.
        encoded: size and CRC-32C of every payload as it was encoded; empty where the rows were not packed just now.
        parts: by sample and composite modality, the parts that its rows fill.
    """

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self.items, self.presence = TableBuilder(_ITEMS), TableBuilder(_PRESENCE)
        self.encoded = TableBuilder(_ENCODED)
        self.parts: dict[tuple[str, str], frozenset[str]] = {}
        self._composites = [number for number, made in enumerate(placer.fields) if made.PARTS]
        self._listed = [] if placer.listing is None else [placer.listing]

    def add(self, rows: BlockRows, placement: Placement, payloads: Mapping[str, Payload] | None = None) -> None:
        """Adds a sample, with its payloads if it was packed just now."""
        names, sample_id = self._placer.names, rows.sample_id[placement.start]
        self.encoded.extend((sample_id, name, *measure_payload(payload)) for name, payload in (payloads or {}).items())
        self.items.extend(_expected_of(rows, placement, self._placer))
        self.presence.extend((sample_id, names[taker]) for taker in sorted((*placement.present, *self._listed)))
        for taker in self._composites:
            if taker in placement.values:
                filled = frozenset(item.part for item in placement.items.get(taker, ()))
                self.parts[sample_id, names[taker]] = filled
            elif taker in placement.items:
                self.parts[sample_id, names[taker]] = frozenset({""})


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


_Damage = tuple[str | None, str | None, str]


class _Contents(NamedTuple):
    """What one pass over a packed file finds in its payloads."""

    items: pa.Table
    listing: pa.Table
    facts: Facts


class PackedFiles:
    """The packed files of one partition, opened once, and the rows they were made of, read at most once.

    The checks of both formats share it.

    Args:
        context: the partition.
        forms: the formats that are checked.
        collected: what the rows give, where packing has collected it; by default their table is read.
    """

    def __init__(self, context: CheckContext, forms: Sequence[str], collected: ExpectedRows | None = None) -> None:
        self._context = context
        self._forms = forms
        self._collected = collected
        self._scratch = ExitStack()  # a folder where a file is remote
        self._readers: dict[str, Reader | None] = {}
        self._damage: dict[str, list[_Damage]] = {}
        self._contents: dict[str, _Contents] = {}
        self._payloads: dict[str, pa.Table] = {}
        self.ids: dict[str, list[str]] = {form: [] for form in context.packed}

    def __enter__(self) -> PackedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            if reader is not None:
                reader.close()
        self._scratch.close()

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
                reader.block_bytes = BATCH_BYTES
                self.ids[form] = list(reader.sample_ids)
                self._readers[form] = reader
            except FormatError as error:
                source.close()
                self._damage[form] = [(None, None, str(error))]
        return self._readers[form]

    def damage(self, form: str) -> Sequence[_Damage]:
        """Sample, modality and message of everything that is wrong with a file, by reading it once to its end."""
        reader = self.reader(form)
        if form not in self._damage:
            assert reader is not None
            self._damage[form] = [(found.sample_id, found.modality, found.message) for found in reader.verify().damage]
        return self._damage[form]

    def contents(self, form: str) -> _Contents:
        """What one pass over a file finds in its payloads.

        Of two undamaged files whose payloads have the same sizes and checksums one is read.
        """
        if form not in self._contents:
            equal = (self._contents[other] for other in self._contents if self._equal(form, other))
            self._contents[form] = next(equal, None) or self._found(form)
        return self._contents[form]

    def _equal(self, *forms: str) -> bool:
        """Whether files hold the same payloads of the same samples, by checksums that their content has."""
        modalities = [reader.modalities for reader in map(self.reader, forms) if reader is not None]
        if len(modalities) < len(forms) or modalities[0] != modalities[1] or any(map(self.damage, forms)):
            return False
        return bool(self.payloads(forms[0]).equals(self.payloads(forms[1])))

    def _source(self, form: str) -> RemoteFile:
        store = self._context.store
        name = self._context.packed.get(form)
        if name is None:
            raise SourceError(store.url, f"there is no packed {form} file to check")
        if store.is_local:
            return RemoteFile(str(store.local_path(name)), store.storage_options)
        with temporary_disk_named():
            folder = self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="mm-assets-packed-"))
            copy = Path(folder) / f"packed.{form}"
            with SourceFile(store.url_of(name), store.storage_options) as source, copy.open("wb") as target:
                shutil.copyfileobj(source.stream(), target, 4 << 20)
        return RemoteFile(str(copy))

    def payloads(self, form: str) -> pa.Table:
        """Size and checksum of every payload of a file, as it states them, and modality "" for each sample."""
        if form not in self._payloads:
            found = TableBuilder(_PAYLOADS)
            reader = self.reader(form) if form in self._context.packed else None
            if reader is not None:
                ids = np.array(self.ids[form], object)
                found.extend_columns(np.arange(len(ids)), ids, "", 0, 0)
                for name in reader.names:
                    with suppress(FormatError):  # `intact` reports it
                        sizes, sums, present = reader.sizes(name), reader.checksums(name), samples_with(reader, name)
                        found.extend_columns(present, ids[present], name, sizes[present], sums[present])
            self._payloads[form] = found.table()
        return self._payloads[form]

    def _found(self, form: str) -> _Contents:
        placer, placed = self.placer, self.expected.parts
        items, listing, facts = TableBuilder(_ITEMS), TableBuilder(_LISTING), Facts()
        known = {name: (placer.fields[n], placer.plan.modalities[n]) for n, name in enumerate(placer.names)}
        for ids, name, payloads in self._scan(form, known):
            made, modality = known[name]
            kind = _KINDS[modality.selector.take]
            if made.FACTS:
                for sample_id, payload in zip(ids, payloads, strict=True):
                    with suppress(FormatError):  # it is missing from the items, which is a violation by itself
                        facts.add(sample_id, name, made.facts(*payload))
            if type(made).items is Field.items and not made.PARTS:  # the data of a payload is its one item
                datas = [payload.data for payload in payloads]
                items.extend_columns(ids, name, kind, "", 0, [*map(len, datas)], [*map(crc32c, datas)], True)
            else:
                for sample_id, payload in zip(ids, payloads, strict=True):
                    with suppress(FormatError):  # the item is then missing, which is a violation by itself
                        parts = placed.get((sample_id, name))
                        items.extend(_packed_items(sample_id, name, kind, _items_of(made, payload, parts), parts))
            if kind == "listing":
                for sample_id, payload in zip(ids, payloads, strict=True):
                    with suppress(FormatError):
                        listing.extend(_listed(sample_id, made.decode(payload.metadata, payload.data)))
        return _Contents(items.table(), listing.table(), facts)

    def _scan(self, form: str, known: Mapping[str, Any]) -> Iterator[tuple[list[str], str, list[Payload]]]:
        """Sample ids, modality and payloads, block by block, as far as they can be read; `verify` reports where not."""
        reader, ids = self.reader(form), self.ids[form]
        if reader is None:
            return
        with suppress(FormatError):
            for block in reader.scan([name for name in reader.names if name in known]):
                for name, payloads in block.payloads.items():
                    there = [
                        (ids[i], p) for i, p in zip(block.indices.tolist(), payloads, strict=True) if p is not None
                    ]
                    if there:
                        yield [sample_id for sample_id, _ in there], name, [payload for _, payload in there]

    @cached_property
    def expected(self) -> Expected:
        """What the filtered rows give, by at most one pass over them for all formats that are checked.

        None is needed where packing has collected it, no field encodes what its rows hold in another way, and the
        payloads are those that were encoded.
        """
        placer, size = Placer(self.placer.plan, encode=True), self._context.batch_bytes
        collected = self._collected or ExpectedRows(placer)
        mismatches = {form: TableBuilder(_MISMATCHES) for form in self._forms}
        compare = {form: self._comparison(form, placer) for form in self._forms}
        if self._collected is None or any(comparison.chooses for comparison in compare.values()):
            with closing(TableRelations(self._context)) as tables:
                for block in sample_groups(tables.batches(self._context.packed_from), batch_bytes=size):
                    rows = BlockRows(block)
                    for start, stop in rows.samples():
                        takers = {form: each.takers(rows.sample_id[start]) for form, each in compare.items()}
                        if self._collected is not None and not any(takers.values()):
                            continue
                        placement = placer.place_sample(rows, start, stop)
                        if self._collected is None:
                            collected.add(rows, placement)
                        encoded = EncodedSample(placer, rows, placement)
                        for form, comparison in compare.items():
                            mismatches[form].extend(comparison.sample(encoded, takers[form]))
        if self._context.judged:
            for form, found in mismatches.items():
                found.extend(decode_failures(self.reader(form), self.ids[form], placer))
        tables_of = {form: found.table() for form, found in mismatches.items()}
        return Expected(collected.items.table(), collected.presence.table(), collected.parts, tables_of)

    def _comparison(self, form: str, placer: Placer) -> Comparison:
        """The payloads of a file that are encoded again.

        Of rows that were packed just now these are some of the fields that re-encode, and all that differ from what was
        encoded. Of others it is every payload.
        """
        reader, ids = self.reader(form), self.ids[form]
        if reader is None:
            return Comparison(None, ids, placer, {})
        encoded = None if self._collected is None else self._collected.encoded.table()
        chosen: dict[int, npt.NDArray[np.int64]] = {}
        for taker, name in enumerate(placer.names):
            if name not in reader.names or taker == placer.listing:  # a listing is compared byte by byte
                continue
            present = samples_with(reader, name)
            if encoded is None or not self._is_written(form, name, encoded):
                chosen[taker] = present
            elif placer.reencodes(taker):
                some = np.linspace(0, len(present) - 1, min(MAX_COMPARED, len(present))).astype(int)
                is_small = int(reader.sizes(name).sum(dtype=np.int64)) <= MAX_ENCODED_BYTES
                chosen[taker] = present if is_small else present[np.unique(some)]
        return Comparison(reader, ids, placer, chosen)

    def _is_written(self, form: str, name: str, encoded: pa.Table) -> bool:
        """Whether the payloads of a modality have the checksums that they had when they were encoded, in their order.

        Where the file states no checksums that could be read, `intact` reports it.
        """
        payloads = self.payloads(form)
        packed = payloads.filter(_of(payloads, name))
        return bool(packed.select(_ENCODED.names).equals(encoded.filter(_of(encoded, name))))


class PackedRelations:
    """The relations of one packed file and the rows that it was made of: each method without arguments is one.

    Args:
        context: the partition and the format.
        files: its packed files.
    """

    def __init__(self, context: CheckContext, files: PackedFiles) -> None:
        self._context = context
        self._own = context.packed_format or ""
        self._files = files

    # -- what the files are

    def expected_modalities(self) -> pa.Table:
        """The modalities of the plan."""
        return _specs_table(self._files.placer.plan.specs())

    def expected_listings(self) -> pa.Table:
        """Those of the modalities of the plan that list the rows of a sample."""
        return self._of_kind("listing")

    def expected_metadata(self) -> pa.Table:
        """The modality of the plan that has the JSON of samples, if there is one."""
        return self._of_kind("metadata")

    def _of_kind(self, kind: str) -> pa.Table:
        placer = self._files.placer
        kinds = [_KINDS[modality.selector.take] for modality in placer.plan.modalities]
        rows = ((name,) for name, each in zip(placer.names, kinds, strict=True) if each == kind)
        return table_of(rows, schema_of("modality"))

    def packed_modalities(self) -> pa.Table:
        """The modalities that the file declares."""
        reader = self._files.reader(self._own)
        return _specs_table(() if reader is None else reader.modalities)

    def packed_formats(self) -> pa.Table:
        """The formats in which the partition is packed."""
        return table_of(zip(sorted(self._context.packed), strict=True), schema_of("format"))

    def packed_samples(self) -> pa.Table:
        """The packed samples in order."""
        self._files.reader(self._own)
        ids = self._files.ids[self._own]
        return pa.table([np.arange(len(ids)), pa.array(ids, pa.string())], schema_of("ordinal", "sample_id"))

    def packed_presence(self) -> pa.Table:
        """Which sample has which modality."""
        reader, ids = self._files.reader(self._own), np.array(self._files.ids[self._own], object)
        if reader is None or not reader.names:
            return _PRESENCE.empty_table()
        samples, numbers = np.nonzero(np.stack([reader.presence(name) for name in reader.names], axis=1))
        names = np.array(reader.names, object)
        return pa.table([pa.array(ids[samples], pa.string()), pa.array(names[numbers], pa.string())], _PRESENCE)

    def mult_payloads(self) -> pa.Table:
        """Size and checksum of every payload of the MULT file, which `intact` proves; modality "" for each sample."""
        return self._files.payloads("mult")

    def mstr_payloads(self) -> pa.Table:
        """Likewise of the MSTR file."""
        return self._files.payloads("mstr")

    def packed_damage(self) -> pa.Table:
        """Everything that is wrong with the file."""
        return table_of(self._files.damage(self._own), schema_of("sample_id", "modality", "message"))

    # -- what is in them

    def packed_items(self) -> pa.Table:
        """Every item of every payload, with the size and CRC-32C of its data."""
        return self._files.contents(self._own).items

    def packed_listing(self) -> pa.Table:
        """Every entry of the samples' listings."""
        return self._files.contents(self._own).listing

    @property
    def facts(self) -> Facts:
        """The facts about time and place in the payloads: tables of `FACT_RELATIONS`."""
        return self._files.contents(self._own).facts

    # -- what should be in them

    def expected_items(self) -> pa.Table:
        """The items that the filtered rows give; `exact` where the field keeps bytes as they are."""
        return self._files.expected.items

    def decoded_mismatches(self) -> pa.Table:
        """Payloads and items, the first 32 of each modality, that are not what their rows give.

        Also payloads that do not decode, of up to 2 for each modality, where media were judged before they were packed.
        """
        return self._files.expected.mismatches[self._own]

    def expected_presence(self) -> pa.Table:
        """Which sample should have which modality."""
        return self._files.expected.presence


def _of(payloads: pa.Table, name: str) -> Any:
    """Which payloads are of a modality."""
    return pc.equal(payloads["modality"], name)


def _packed_items(
    sample_id: str, name: str, kind: str, items: Iterable[Item], parts: frozenset[str] | None
) -> Iterator[tuple[Any, ...]]:
    for item in items:
        # A composite may hold more than its rows: a layout of the JSON, the audio of a video file.
        if parts is None or item.part in parts or kind == "value":
            yield sample_id, name, kind, item.part, item.position, len(item.data), crc32c(item.data), True


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
        if placer.plan.modalities[taker].selector.take in VALUE_TAKES:
            places = [0] if placer.fields[taker].item_field is None else [place for place, _ in value]
            for place in places:
                yield sample_id, placer.names[taker], "value", "", place, 0, 0, False
    if placer.listing is not None:
        data = listing_json(rows, placement, placer)
        yield sample_id, placer.names[placer.listing], "listing", "", 0, len(data), crc32c(data), True


def _listed(sample_id: str, entries: Any) -> Iterator[tuple[Any, ...]]:
    for place, entry in enumerate(entries if isinstance(entries, list) else []):
        known = entry if isinstance(entry, dict) else {}
        values = ((known.get(key), kind) for key, kind in _LISTED.items())
        yield (sample_id, place, *(value if isinstance(value, kind) else None for value, kind in values))


def _items_of(made: Field, payload: Payload, parts: frozenset[str] | None) -> Iterable[Item]:
    """The items of a payload; those of a composite that was made from one content are that content's."""
    items = made.items(payload.metadata, payload.data)
    if not made.PARTS or parts is None or "" not in parts:
        return items
    stored = list(items)
    return [Item("", 0, stored[0].data if len(stored) == 1 else payload.data)]


def _specs_table(specs: Sequence[ModalitySpec]) -> pa.Table:
    return table_of(
        (
            (n, s.name, s.type_name, s.type_id, s.metadata_size, json.dumps(config, sort_keys=True))
            for n, s in enumerate(specs)
            for config in [complete_config(s.type_name, s.config)]
        ),
        _SPECS,
    )
