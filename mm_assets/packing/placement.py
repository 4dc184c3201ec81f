"""Where each row of a block goes in a packed sample.

Packing, the filter before it and the checks after it all ask here, so that they agree. Placing reads names and, by
`Field.check`, content; it decodes and copies nothing. For packing it encodes instead of checking, so that what a field
finds out about a value, such as an image header, is found once. The rule: in the plan's order, each packed modality
takes those of the remaining rows that its selector names and its field accepts; a "one" takes the first by preference
and position. A composite takes a row for each of its parts, all or none. Content that no modality takes goes to the
plan's rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa

from mm_assets.errors import EncodeError, LimitError, SchemaMismatchError
from mm_assets.fields import Encoded, Field
from mm_assets.json_text import parse_json
from mm_assets.packing.plan import VALUE_TAKES, PackPlan, RowName, Selector, row_name
from mm_assets.rows.columns import content_views, views
from mm_assets.rows.schema import MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import with_parsed_source_ref_columns

__all__ = ["BlockRows", "Placed", "Placement", "Placer", "Unfit"]

MAX_REMEMBERED = (
    10_000  # kinds of row whose takers are cached; with dots in member names every row may be a kind of its own
)


class BlockRows:
    """A block of whole samples, its small columns as lists and its content as views.

    Args:
        table: columns of `MULTIMODAL_SCHEMA` at least; rows of a sample contiguous.
        contents: the rows' `content_views`, where they are known.

    Attributes:
        sample_id, position, modality, content_type: the columns as lists.
        member: name of the member that a row comes from; None where it has none.
        frame: number of the frame in that member, or None.
        failed: whether a row has a `materialize_error`.

    Raises:
        SchemaMismatchError: a reserved column is missing.
        SourceError: a `source_ref` is not valid.
    """

    def __init__(self, table: pa.Table, contents: Sequence[memoryview | None] | None = None) -> None:
        missing = [name for name in MULTIMODAL_SCHEMA.names if name not in table.schema.names]
        if missing:
            raise SchemaMismatchError(f"rows to pack have no column {', '.join(missing)}")
        self.num_rows: int = table.num_rows
        self.sample_id: list[str] = table.column("sample_id").to_pylist()
        self.position: list[int] = table.column("position").to_pylist()
        self.modality: list[str] = table.column("modality").to_pylist()
        self.content_type: list[str | None] = table.column("content_type").to_pylist()
        refs = with_parsed_source_ref_columns(table.select(["source_ref"]))
        self.member: list[str | None] = refs.column("_src_member").to_pylist()
        self.frame: list[int | None] = refs.column("_src_frame_index").to_pylist()
        self.failed: list[bool] = table.column("materialize_error").is_valid().to_pylist()
        self._contents = content_views(table) if contents is None else contents
        self._json = views(table.column("metadata_json"))
        self._table = table
        self._columns: dict[str, list[Any]] = {}

    def samples(self) -> Iterator[tuple[int, int]]:
        """First row of each sample and the row after its last."""
        start = 0
        for row in range(1, self.num_rows + 1):
            if row == self.num_rows or self.sample_id[row] != self.sample_id[start]:
                yield start, row
                start = row

    def content(self, row: int) -> memoryview | None:
        """The bytes of a content row, or its text as UTF-8; None where it has neither."""
        return self._contents[row]

    def metadata(self, row: int) -> memoryview | None:
        """The sample's JSON text on its metadata row, as UTF-8."""
        return self._json[row]

    def value(self, name: str, row: int) -> Any:
        """The value of a user's or annotator's column, as Python's; None for null.

        Raises:
            SchemaMismatchError: the rows have no such column.
        """
        if name not in self._columns:
            if name not in self._table.schema.names:
                raise SchemaMismatchError(f"rows to pack have no column {name!r}, which the plan packs")
            self._columns[name] = self._table.column(name).to_pylist()
        return self._columns[name][row]

    def is_metadata(self, row: int) -> bool:
        """Whether the row is a sample's metadata row."""
        return self.modality[row] == "metadata"


class Placed(NamedTuple):
    """A row in a packed modality.

    Attributes:
        row: the row in its block.
        position: of its item among those of the modality or part.
        part: name of the part of a composite field that it fills; "" in any other.
    """

    row: int
    position: int
    part: str = ""


class Unfit(NamedTuple):
    """Why a row does not go to a packed modality.

    Attributes:
        modality: name of the packed modality.
        detail: its field's message.
        is_limit: whether only a setting's limit refuses the row, which says nothing against its content.
    """

    modality: str
    detail: str
    is_limit: bool = False


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where the rows of one sample go; not frozen, since there is one for each sample.

    Attributes:
        start: its first row in the block.
        stop: the row after its last.
        items: for each modality of the plan by number, its rows; a modality without rows is missing. The metadata row
            is under the plan's metadata, if it has JSON.
        values: for each modality that is made of the sample's JSON or a column, or that is a composite: its value.
        refused: rows that go nowhere, with the reason. A refused metadata row means its sample.
        unfit: rows that a field refused, wherever they went instead, and why.
        without: modalities without a value of the JSON or a column that their field refused, where the plan allows
            that, with the field's message.
        encoded: for each modality in `values`, its payload; only where the placer encodes.
        encoded_rows: likewise for each row that is an item of a modality other than the rest or a composite.
    """

    start: int
    stop: int
    items: dict[int, list[Placed]] = dataclass_field(default_factory=dict)
    values: dict[int, Any] = dataclass_field(default_factory=dict)
    refused: dict[int, str] = dataclass_field(default_factory=dict)
    unfit: dict[int, Unfit] = dataclass_field(default_factory=dict)
    without: dict[int, str] = dataclass_field(default_factory=dict)
    encoded: dict[int, Encoded] = dataclass_field(default_factory=dict)
    encoded_rows: dict[int, Encoded] = dataclass_field(default_factory=dict)

    @property
    def present(self) -> list[int]:
        """Numbers of the modalities that the sample has, in the plan's order; without its listing."""
        return sorted({*self.items, *self.values})


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A sample while its rows are being placed."""

    rows: BlockRows
    placement: Placement
    head: int | None = None  # its metadata row
    json: Any = None  # its JSON, parsed
    open_rows: dict[int, int] = dataclass_field(default_factory=dict)  # without a place, by their number among all
    # By modality and part: the rank of the extension, position and row of each row that its selector takes.
    candidates: defaultdict[tuple[int, str], list[tuple[int, int, int]]] = dataclass_field(
        default_factory=lambda: defaultdict(list)
    )
    failed: dict[int, str] = dataclass_field(default_factory=dict)  # why a row that may stay open is refused


class Placer:
    """Places the rows of blocks by one plan.

    Args:
        plan: the pack plan.
        encode: encode what a field accepts instead of checking it, for a caller that needs the payloads.
    """

    def __init__(self, plan: PackPlan, *, encode: bool = False) -> None:
        self.plan = plan
        self._encode = encode
        self.fields: list[Field] = list(plan.fields().values())
        self.names: list[str] = [modality.name for modality in plan.modalities]
        self.metadata = plan.special("metadata")
        self.rest = plan.special("rest")
        self.listing = plan.special("listing")
        self._item_fields = [made.item_field or made for made in self.fields]
        self._omitting = [  # the others need not read their values once more
            number for number, made in enumerate(self._item_fields) if type(made).omissions is not Field.omissions
        ]
        self._has_composites = any(modality.selector.take == "parts" for modality in plan.modalities)
        self._selectors = [
            (number, part, selector)
            for number, modality in enumerate(plan.modalities)
            for part, selector in modality.selectors.items()
        ]
        self._reads_json = any(modality.reads_json for modality in plan.modalities)
        self._ranks: dict[RowName, list[tuple[int, str, int]]] = {}

    def place(self, rows: BlockRows) -> Iterator[Placement]:
        """Where the rows of each sample go, sample by sample."""
        for start, stop in rows.samples():
            yield self.place_sample(rows, start, stop)

    def settled(self, rows: BlockRows, start: int, stop: int, without: frozenset[int] = frozenset()) -> Placement:
        """Where the rows of one sample go once those that are refused are left out: a composite may lack parts then.

        Args:
            rows: the block.
            start: first row of the sample.
            stop: the row after its last.
            without: rows that are left out from the beginning, and not listed as refused.
        """
        placement = self.place_sample(rows, start, stop, without)
        if not placement.refused or not self._has_composites:
            return placement
        refused, unfit = placement.refused, placement.unfit
        while placement.refused:
            placement = self.place_sample(rows, start, stop, without.union(refused))
            refused = refused | placement.refused
            unfit = unfit | placement.unfit
        return replace(placement, refused=refused, unfit=unfit)

    def alone(self, number: int, rows: BlockRows, row: int) -> Encoded | None:
        """The payload of composite `number` made of one of its rows; None where that cannot be without the others.

        Raises:
            EncodeError: the field refuses the row's content.
        """
        made, parts = self.fields[number], self.plan.modalities[number].parts
        part = next(part for taker, part, _ in self._takers(rows, row) if taker == number)
        if any(facts.needed for name, facts in made.PARTS.items() if name != part):
            return None
        content = rows.content(row)
        given = content if parts[part].take == "one" else [(rows.position[row], content)]
        return made.encode(made.assemble({part: given}))

    def value(self, number: int, modality: str, content: memoryview) -> Any:
        """The value that `content` of a row is for the field of packed modality `number`; `EncodeError` if none."""
        return self._item_fields[number].from_text(content) if modality == "text" else content

    def omissions(self, rows: BlockRows, placement: Placement) -> Iterator[tuple[int | None, int, Sequence[str]]]:
        """What fields leave out of the values of a sample: row, or None for a value, packed modality, each part."""
        for taker in self._omitting:
            for item in placement.items.get(taker, ()) if taker not in placement.values else ():
                content = rows.content(item.row)
                if content is None:
                    continue
                value = self.value(taker, rows.modality[item.row], content)
                if found := self._item_fields[taker].omissions(value):
                    yield item.row, taker, found
            if taker in placement.values and (found := self.fields[taker].omissions(placement.values[taker])):
                yield None, taker, found

    def keeps(self, number: int, part: str) -> bool:
        """Whether the content of a row is stored as it is, byte for byte."""
        if part:
            return self.fields[number].keeps_part(part)
        return self._item_fields[number].keeps_bytes

    def reencodes(self, number: int) -> bool:
        """Whether a payload may hold other bytes than the rows that it is made of."""
        take = self.plan.modalities[number].selector.take
        return take in ("parts", *VALUE_TAKES) or not self.keeps(number, "")

    def place_sample(self, rows: BlockRows, start: int, stop: int, without: frozenset[int] = frozenset()) -> Placement:
        """Where the rows of one sample go; arguments as of `settled`."""
        placement = Placement(start=start, stop=stop)
        sample = _Sample(rows=rows, placement=placement)
        number = 0
        for row in range(start, stop):
            if rows.modality[row] == "metadata":
                sample.head = sample.head if row in without else row
                continue
            if row in without:
                pass
            elif rows.content(row) is None:
                placement.refused[row] = "not_materialized" if rows.failed[row] else "no_content"
            else:
                sample.open_rows[row] = number
                for taker, part, rank in self._takers(rows, row):
                    sample.candidates[taker, part].append((rank, rows.position[row], row))
            number += 1
        self._place_metadata(sample)
        for taker, modality in enumerate(self.plan.modalities):
            if modality.selector.take == "parts":
                self._place_parts(sample, taker)
            elif modality.selector.take in VALUE_TAKES:
                self._place_value(sample, taker, modality.selector)
            else:
                self._place_rows(sample, taker, modality.selector)
        if sample.open_rows and self.rest is not None:
            placement.items[self.rest] = [Placed(row, place) for row, place in sample.open_rows.items()]
        else:
            for row in sample.open_rows:
                placement.refused[row] = sample.failed.get(row, "not_selected")
        return placement

    def _place_metadata(self, sample: _Sample) -> None:
        """Places a sample's JSON, and parses it where the plan takes values from it."""
        row, placement = sample.head, sample.placement
        content = None if row is None else sample.rows.metadata(row)
        if row is None or content is None:
            return
        if self.metadata is not None:
            try:
                self._accept(self.fields[self.metadata], content, placement.encoded_rows, row)
            except EncodeError as error:
                self._refuse_sample(sample, "unpackable_metadata", self._unfit(self.metadata, error))
                return
            placement.items[self.metadata] = [Placed(row, 0)]
        if self._reads_json:
            try:
                sample.json = parse_json(str(content, "utf-8"))
            except ValueError as error:  # of a table that something else made
                self._refuse_sample(sample, "unpackable_metadata", Unfit("metadata", f"the JSON {error}"))

    def _refuse_sample(self, sample: _Sample, reason: str, unfit: Unfit) -> None:
        if sample.head is not None:
            sample.placement.refused.setdefault(sample.head, reason)
            sample.placement.unfit.setdefault(sample.head, unfit)

    def _candidates(self, sample: _Sample, taker: int, part: str, selector: Selector) -> list[Placed]:
        """The open rows that a selector takes, by preference where it takes one, else by position."""
        found = sample.candidates.get((taker, part), [])
        one = selector.take == "one"
        if len(found) > 1:
            found.sort(key=None if one else itemgetter(1, 2))
        # Rows of different kinds may share a position, the items of one sequence may not.
        ordinal = selector.modality == "*"
        return [
            Placed(row, 0 if one else sample.open_rows[row] if ordinal else position, part)
            for _, position, row in found
            if row in sample.open_rows
        ]

    def _place_rows(self, sample: _Sample, taker: int, selector: Selector) -> None:
        for placed in self._candidates(sample, taker, "", selector):
            row = placed.row
            refusal = self._refusal(taker, sample.rows, row, sample.placement)
            if refusal is not None:
                sample.failed[row] = f"unpackable_{sample.rows.modality[row]}"
                sample.placement.unfit[row] = refusal
                continue
            sample.placement.items.setdefault(taker, []).append(placed)
            del sample.open_rows[row]
            if selector.take == "one":
                break

    def _place_parts(self, sample: _Sample, taker: int) -> None:
        made, name, parts = self.fields[taker], self.names[taker], self.plan.modalities[taker].parts
        contents: dict[str, Any] = {}
        taken: list[Placed] = []
        shared: set[str] = set()
        for part, selector in parts.items():
            if selector.take == "json":
                value = selector.value_in(sample.json)
                if value is not None:
                    contents[part] = value
            elif selector.take == "shared":
                if sample.candidates[taker, part]:
                    contents[part] = sample.rows.content(min(sample.candidates[taker, part])[2])
                    shared.add(part)
            else:
                spoken_for = {placed.row for placed in taken}
                found = [p for p in self._candidates(sample, taker, part, selector) if p.row not in spoken_for]
                pairs = [(placed.position, sample.rows.content(placed.row)) for placed in found]
                if found and selector.take == "one":
                    taken.append(found[0])
                    contents[part] = pairs[0][1]
                elif found:
                    taken += found
                    contents[part] = pairs
        if contents.keys() <= shared:
            return  # shared rows alone are not a value
        reason, unfit = f"unpackable_{name}", Unfit(name, "")
        missing = [key for key, part in made.PARTS.items() if part.needed and key not in contents]
        if missing:
            if not taken:
                return  # the JSON alone is not a value yet
            reason, unfit = f"incomplete_{name}", Unfit(name, f"there is no {' and no '.join(missing)}")
        else:
            value, refusal = self._assembled(taker, contents, sample.placement)
            if refusal is None:
                sample.placement.values[taker] = value
                if taken:
                    sample.placement.items[taker] = taken
                for placed in taken:
                    del sample.open_rows[placed.row]
                return
            unfit = refusal
        for placed in taken:
            sample.failed[placed.row] = reason
            sample.placement.unfit[placed.row] = unfit
        # A whole JSON may hold nothing for this modality; a value at a key that the plan names is meant for it.
        if not taken and any(parts[part].key for part in contents):
            self._refuse_sample(sample, reason, unfit)

    def _assembled(self, taker: int, contents: dict[str, Any], placement: Placement) -> tuple[Any, Unfit | None]:
        """The value of a composite, or None and why; without optional parts of the JSON that are refused."""
        made = self.fields[taker]
        lenient = [
            part
            for part, selector in self.plan.modalities[taker].parts.items()
            if selector.on_refused == "absent" and part in contents and not made.PARTS[part].needed
        ]
        tries = [contents]
        if lenient and len(lenient) < len(contents):
            tries.append({part: content for part, content in contents.items() if part not in lenient})
        refusal: Unfit | None = None
        for given in tries:
            try:
                value = made.assemble(given)
                self._accept(made, value, placement.encoded, taker)
            except EncodeError as error:
                refusal = refusal or self._unfit(taker, error)
                continue
            if refusal is not None:
                placement.without[taker] = refusal.detail
            return value, None
        return None, refusal

    def _place_value(self, sample: _Sample, taker: int, selector: Selector) -> None:
        found = selector.value_in(sample.json)
        if selector.take == "column":
            found = None if sample.head is None else sample.rows.value(selector.key[0], sample.head)
            if isinstance(found, str) and self.fields[taker].HOLDS_JSON:
                found = found.encode()  # the JSON text of a value, not a JSON string
        if found is None:
            return
        try:
            value = self.fields[taker].from_json_value(found)
            self._accept(self.fields[taker], value, sample.placement.encoded, taker)
        except EncodeError as error:
            if selector.on_refused == "absent":
                sample.placement.without[taker] = str(error)
            else:
                self._refuse_sample(sample, f"unpackable_{self.names[taker]}", self._unfit(taker, error))
        else:
            sample.placement.values[taker] = value

    def _takers(self, rows: BlockRows, row: int) -> list[tuple[int, str, int]]:
        """The modalities and parts whose selector takes a row, with the rank of its extension."""
        key = row_name(rows.modality[row], rows.member[row], self.plan.roles)
        found = self._ranks.get(key)
        if found is None:
            if len(self._ranks) >= MAX_REMEMBERED:
                self._ranks.clear()
            ranked = ((number, part, selector.rank(*key)) for number, part, selector in self._selectors)
            found = self._ranks[key] = [(number, part, rank) for number, part, rank in ranked if rank is not None]
        return found

    def _refusal(self, taker: int, rows: BlockRows, row: int, placement: Placement) -> Unfit | None:
        """Why a field refuses a row's content, or None."""
        content = rows.content(row)
        if content is None:
            return Unfit(self.names[taker], "there is no content")
        try:
            value = self.value(taker, rows.modality[row], content)
            self._accept(self._item_fields[taker], value, placement.encoded_rows, row)
        except EncodeError as error:
            return self._unfit(taker, error)
        return None

    def _unfit(self, taker: int, error: EncodeError) -> Unfit:
        return Unfit(self.names[taker], str(error), isinstance(error, LimitError))

    def _accept(self, made: Field, value: Any, encoded: dict[int, Encoded], key: int) -> None:
        """Checks a value or, where payloads are needed, encodes it: doing both would read its header twice.

        Raises:
            EncodeError: the field refuses the value.
        """
        if self._encode:
            encoded[key] = made.encode(value)
        else:
            made.check(value)
