"""Whether the parts of a sample agree in time and place: the facts of its payloads, as tables for the checks.

Fields read facts from the payloads' own bytes (`mm_assets.fields.facts`). The rules are the statements in ``sql/``;
`misaligned` applies them to samples before they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mm_assets.checks.catalog import ABOUT_CONTENT
from mm_assets.checks.database import connection
from mm_assets.checks.relations import schema_of
from mm_assets.fields import Boxes, ClipLengths, Fact, MediaLength, Spans, Steps
from mm_assets.packing.pack import encode_placed
from mm_assets.packing.placement import BlockRows, Placer
from mm_assets.packing.plan import PackPlan
from mm_assets.rows.schema import Drop

__all__ = ["FACT_RELATIONS", "Facts", "misaligned"]

TOLERANCE_SECONDS = 0.05
"""How far a note, text or series may extend past its medium: MIREX's tolerance for the onset of a note."""

_FETCH = 4096
_MEMORY = 128 << 20  # bytes for the facts of one block of samples

_SCHEMAS: Mapping[str, pa.Schema] = {
    name: schema_of("sample_id", "modality", *columns)
    for name, columns in {
        "packed_clips": ("video_seconds", "audio_seconds", "frame_seconds"),
        "packed_media": ("seconds", "tolerance_seconds"),
        "packed_spans": ("kind", "item", "start_seconds", "end_seconds"),
        "packed_steps": ("step", "previous_seconds", "seconds", "may_be_equal"),
        "packed_boxes": ("kind", "item", "page", "left", "top", "right", "bottom", "width", "height"),
    }.items()
}
FACT_RELATIONS = tuple(_SCHEMAS)


class Facts:
    """Tables of facts, filled payload by payload."""

    def __init__(self) -> None:
        self._batches: dict[str, list[pa.RecordBatch]] = {name: [] for name in _SCHEMAS}

    def table(self, relation: str) -> pa.Table:
        """The facts of one of `FACT_RELATIONS`."""
        return pa.Table.from_batches(self._batches[relation], _SCHEMAS[relation])

    def add(self, sample_id: str, modality: str, facts: Iterable[Fact]) -> None:
        """Adds the facts of one payload.

        Raises:
            FormatError: the payload is damaged.
        """
        for relation, columns in map(_columns, facts):
            schema, count = _SCHEMAS[relation], len(columns[0])
            arrays = map(pa.array, [[sample_id] * count, [modality] * count, *columns], schema.types)
            self._batches[relation].append(pa.record_batch(list(arrays), schema=schema))


def _columns(fact: Fact) -> tuple[str, list[Any]]:
    """The relation that a fact belongs to, and its columns beside the sample and the modality."""
    match fact:
        case MediaLength(seconds, resolution):
            return "packed_media", [[seconds], [max(resolution, TOLERANCE_SECONDS)]]
        case ClipLengths(video, audio, frame):
            return "packed_clips", [[video], [audio], [frame]]
        case Spans(kind, starts, ends):
            return "packed_spans", [[kind] * len(starts), np.arange(len(starts)), starts, ends]
        case Steps(times, may_be_equal):
            steps = np.arange(1, max(len(times), 1))
            return "packed_steps", [steps, times[:-1], times[1:], [may_be_equal] * len(steps)]
        case Boxes(kind, boxes, pages, sizes):
            edges, extents = (np.asarray(numbers, np.float64) for numbers in (boxes, sizes))
            columns = [*edges.T.reshape(4, -1), *extents.T.reshape(2, -1)]
            return "packed_boxes", [[kind] * len(boxes), np.arange(len(boxes)), pages, *columns]


def misaligned(plan: PackPlan) -> Callable[[pa.Table, Sequence[memoryview | None]], Iterable[Drop]]:
    """Makes the filter step that finds samples whose parts contradict each other.

    It takes a table of whole samples, all of whose rows can be packed, with their `content_views`. It yields a `Drop`
    for each such sample, at its first row. The reasons are the names of the checks that would find them.
    """
    placer = Placer(plan, encode=True)
    judged = [number for number, made in enumerate(placer.fields) if made.FACTS]

    def judge(table: pa.Table, contents: Sequence[memoryview | None]) -> Iterable[Drop]:
        if not judged:
            return
        rows, facts = BlockRows(table, contents), Facts()
        starts: dict[str, int] = {}
        for placement in placer.place(rows):
            sample_id = rows.sample_id[placement.start]
            starts[sample_id] = placement.start
            for number in judged:
                if number in placement.items or number in placement.values:
                    payload = encode_placed(placer, rows, placement, number)
                    facts.add(sample_id, placer.names[number], placer.fields[number].facts(*payload))
        for sample_id, (reason, detail) in sorted(_found(facts).items()):
            yield Drop(starts[sample_id], reason, None, detail)

    return judge


def _found(facts: Facts) -> dict[str, tuple[str, str]]:
    """Sample id to the first check that it violates, and the first row that does."""
    found: dict[str, tuple[str, str]] = {}
    with connection(_MEMORY) as opened:
        for relation in FACT_RELATIONS:
            opened.register(relation, facts.table(relation))
        for check in ABOUT_CONTENT:
            result = opened.execute(check.sql)
            names = [column[0] for column in result.description]
            while rows := result.fetchmany(_FETCH):
                for row in rows:
                    first = dict(zip(names, row, strict=True))
                    sample_id = first.pop("sample_id")
                    if sample_id not in found:
                        found[sample_id] = check.name, ", ".join(f"{name}={value}" for name, value in first.items())
    return found
