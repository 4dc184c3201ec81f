"""Where each row of a block goes in a packed sample.

Packing, the filter before it and the checks after it all ask here, so that they agree. Placing looks at names and, by
`Field.check`, at content; it decodes and copies nothing. The rule: packed modalities in the plan's order take, of the
rows that are left, those which their selector names and their field accepts; a "one" takes the first by preference and
position. Content that nobody took goes to the plan's rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.errors import EncodeError, SchemaMismatchError
from mm_assets.etl.pack_plan import PackPlan
from mm_assets.etl.schema import MULTIMODAL_SCHEMA
from mm_assets.etl.source_ref import with_parsed_source_ref_columns
from mm_assets.etl.tar_index import split_member_name
from mm_assets.fields import BytesField, Field, ScalarField, SequenceField, TextField

__all__ = ["BlockRows", "Placement", "Placer", "Value", "inner_field"]

Value = memoryview | int | float | bool

MAX_REMEMBERED = 10_000  # kinds of row whose takers are remembered; names with dots in them may make every row its own


def inner_field(made: Field) -> Field:
    """The field of one item: a sequence's inner field, any other field itself."""
    return made.inner if isinstance(made, SequenceField) else made


class _Views:
    """The values of a string or binary column as views of Arrow's own memory."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._bounds: list[tuple[int, int]] = []
        self._buffers: list[memoryview] = []
        self._chunk: list[int] = np.repeat(
            np.arange(column.num_chunks), [len(chunk) for chunk in column.chunks]
        ).tolist()
        self._valid = pc.is_valid(column).to_pylist()
        for chunk in column.chunks:
            kind = np.int64 if pa.types.is_large_binary(chunk.type) else np.int32
            _, offsets, data = chunk.buffers()
            bounds = np.zeros(len(chunk) + 1, kind)
            if len(chunk) and offsets is not None:
                bounds = np.frombuffer(offsets, kind, len(chunk) + 1, chunk.offset * np.dtype(kind).itemsize)
            self._bounds += zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            self._buffers.append(memoryview(b"") if data is None else memoryview(data).cast("B"))

    def __getitem__(self, row: int) -> memoryview | None:
        if not self._valid[row]:
            return None
        start, end = self._bounds[row]
        view: memoryview = self._buffers[self._chunk[row]][start:end]
        return view


class BlockRows:
    """A block of whole samples, its small columns as lists and its content as views.

    Args:
        table: columns of `MULTIMODAL_SCHEMA` at least; rows of a sample contiguous.

    Attributes:
        sample_id, position, modality, content_type: the columns as lists.
        member: name of the member that a row comes from; None where it has none.
        frame: number of the frame in that member, or None.
        failed: whether a row has a `materialize_error`.

    Raises:
        SchemaMismatchError: a reserved column is missing.
        SourceError: a `source_ref` is not valid.
    """

    def __init__(self, table: pa.Table) -> None:
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
        self._text = _Views(table.column("text_content"))
        self._binary = _Views(table.column("binary_content"))
        self._json = _Views(table.column("metadata_json"))

    def samples(self) -> Iterator[tuple[int, int]]:
        """First row of each sample and the row behind its last."""
        start = 0
        for row in range(1, self.num_rows + 1):
            if row == self.num_rows or self.sample_id[row] != self.sample_id[start]:
                yield start, row
                start = row

    def content(self, row: int) -> memoryview | None:
        """The bytes of a content row, or its text as UTF-8; None where it has neither."""
        found = self._binary[row]
        return self._text[row] if found is None else found

    def metadata(self, row: int) -> memoryview | None:
        """The sample's JSON text on its metadata row, as UTF-8."""
        return self._json[row]

    def is_metadata(self, row: int) -> bool:
        """Whether the row is a sample's metadata row."""
        return self.modality[row] == "metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the rows of one sample go.

    Attributes:
        start: its first row in the block.
        stop: the row behind its last.
        items: for each modality of the plan by number, its rows with the position that the item has; a modality that
            stays absent is missing. The metadata row stands under the plan's metadata, if it has JSON.
        refused: rows that go nowhere, with the reason.
    """

    start: int
    stop: int
    items: dict[int, list[tuple[int, int]]]
    refused: dict[int, str]


class Placer:
    """Places the rows of blocks by one plan.

    Args:
        plan: the pack plan.
    """

    def __init__(self, plan: PackPlan) -> None:
        self.plan = plan
        self.fields: list[Field] = list(plan.fields().values())
        self.names: list[str] = [modality.name for modality in plan.modalities]
        self.metadata = plan.special("metadata")
        self.rest = plan.special("rest")
        self.listing = plan.special("listing")
        self._inner = [inner_field(made) for made in self.fields]
        self._ranks: dict[tuple[str, str, str], list[tuple[int, int]]] = {}

    def place(self, rows: BlockRows) -> Iterator[Placement]:
        """Where the rows of each sample go, sample by sample."""
        for start, stop in rows.samples():
            yield self._place_sample(rows, start, stop)

    def value(self, number: int, modality: str, content: memoryview) -> Value:
        """What the field of packed modality `number` is given for a row's content.

        Raises:
            EncodeError: a number is wanted and the text is none.
        """
        if isinstance(self._inner[number], ScalarField) and modality == "text":
            text = str(content, "utf-8").strip()
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise EncodeError(f"found the text {text[:40]!r}, expected a number") from error
            if not isinstance(value, int | float):
                raise EncodeError(f"found the text {text[:40]!r}, expected a number")
            return value
        return content

    def _place_sample(self, rows: BlockRows, start: int, stop: int) -> Placement:
        items: dict[int, list[tuple[int, int]]] = {}
        refused: dict[int, str] = {}
        open_rows: dict[int, int] = {}  # content row -> its number among the sample's
        candidates: dict[int, list[tuple[int, int, int]]] = {}  # modality -> (rank, position, row)
        number = 0
        for row in range(start, stop):
            if rows.is_metadata(row):
                self._place_metadata(rows, row, items, refused)
                continue
            if rows.content(row) is None:
                refused[row] = "not_materialized" if rows.failed[row] else "no_content"
            else:
                open_rows[row] = number
                for taker, rank in self._takers(rows, row):
                    candidates.setdefault(taker, []).append((rank, rows.position[row], row))
            number += 1
        failed: set[int] = set()
        for taker in sorted(candidates):
            one = self.plan.modalities[taker].selector.take == "one"
            ordinal = self.plan.modalities[taker].selector.modality == "*"
            taken = []
            for _, position, row in sorted(candidates[taker], key=None if one else _by_position):
                if row not in open_rows:
                    continue
                if not self._accepts(taker, rows, row):
                    failed.add(row)
                    continue
                # Rows of different kinds may share a position, the items of one sequence may not.
                taken.append((row, 0 if one else open_rows[row] if ordinal else position))
                del open_rows[row]
                if one:
                    break
            if taken:
                items[taker] = taken
        if open_rows and self.rest is not None:
            items[self.rest] = list(open_rows.items())
        elif open_rows:
            for row in open_rows:
                refused[row] = f"unpackable_{rows.modality[row]}" if row in failed else "not_selected"
        return Placement(start=start, stop=stop, items=items, refused=refused)

    def _place_metadata(
        self, rows: BlockRows, row: int, items: dict[int, list[tuple[int, int]]], refused: dict[int, str]
    ) -> None:
        content = rows.metadata(row)
        if self.metadata is None or content is None:
            return
        try:
            self.fields[self.metadata].check(content)
        except EncodeError:
            refused[row] = "unpackable_metadata"
        else:
            items[self.metadata] = [(row, 0)]

    def _takers(self, rows: BlockRows, row: int) -> list[tuple[int, int]]:
        """The modalities whose selector takes a row, with the rank of its extension."""
        member = rows.member[row]
        _, role, extension = split_member_name(member) if member else ("", "", "")
        key = (rows.modality[row], role, extension)
        found = self._ranks.get(key)
        if found is None:
            if len(self._ranks) >= MAX_REMEMBERED:
                self._ranks.clear()
            ranked = ((n, m.selector.rank(*key)) for n, m in enumerate(self.plan.modalities))
            found = self._ranks[key] = [(n, rank) for n, rank in ranked if rank is not None]
        return found

    def _accepts(self, taker: int, rows: BlockRows, row: int) -> bool:
        made = self._inner[taker]
        modality = rows.modality[row]
        if type(made) is BytesField or (type(made) is TextField and modality == "text"):
            return True  # Arrow's strings are UTF-8: there is nothing to check
        content = rows.content(row)
        if content is None:
            return False
        try:
            made.check(self.value(taker, modality, content))
        except EncodeError:
            return False
        return True


def _by_position(candidate: tuple[int, int, int]) -> tuple[int, int]:
    return candidate[1:]
