"""What the parts of packed samples say of each other in time and place, as tables for the checks.

Facts come from the payloads' own bytes: lengths of sounds and clips, spans of notes, texts and series, timestamps,
boxes. The rules are the statements in ``sql/``; `misaligned` puts them to samples that are not packed yet, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.checks.catalog import ABOUT_CONTENT
from mm_assets.fields import (
    AudioField,
    DocumentField,
    Field,
    MIDIField,
    SyncedVideoAudioField,
    TimedTextField,
    TimeSeriesField,
)
from mm_assets.formats import Payload
from mm_assets.packing.pack import encode_placed
from mm_assets.packing.placement import BlockRows, Placer
from mm_assets.packing.plan import PackPlan
from mm_assets.rows.schema import Drop

__all__ = ["FACT_VIEWS", "Facts", "misaligned"]

TOLERANCE_SECONDS = 0.05
"""How far a note, text or series may reach beyond its medium: MIREX's tolerance for the onset of a note."""

_FETCH = 4096

_SAMPLE = [("sample_id", pa.string()), ("modality", pa.string())]
_SCHEMAS: Mapping[str, pa.Schema] = {
    "packed_clips": pa.schema(
        [*_SAMPLE, ("video_seconds", pa.float64()), ("audio_seconds", pa.float64()), ("frame_seconds", pa.float64())]
    ),
    "packed_media": pa.schema([*_SAMPLE, ("seconds", pa.float64()), ("tolerance_seconds", pa.float64())]),
    "packed_spans": pa.schema(
        [
            *_SAMPLE,
            ("kind", pa.string()),
            ("item", pa.int64()),
            ("start_seconds", pa.float64()),
            ("end_seconds", pa.float64()),
        ]
    ),
    "packed_steps": pa.schema(
        [
            *_SAMPLE,
            ("step", pa.int64()),
            ("previous_seconds", pa.float64()),
            ("seconds", pa.float64()),
            ("may_be_equal", pa.bool_()),
        ]
    ),
    "packed_boxes": pa.schema(
        [
            *_SAMPLE,
            ("kind", pa.string()),
            ("item", pa.int64()),
            ("page", pa.int64()),
            *((name, pa.float64()) for name in ("left", "top", "right", "bottom", "width", "height")),
        ]
    ),
}
FACT_VIEWS = tuple(_SCHEMAS)

Numbers = npt.NDArray[Any]


class Facts:
    """Tables of facts, filled payload by payload."""

    def __init__(self) -> None:
        self._batches: dict[str, list[pa.RecordBatch]] = {name: [] for name in _SCHEMAS}

    def table(self, view: str) -> pa.Table:
        """The facts of one of `FACT_VIEWS`."""
        return pa.Table.from_batches(self._batches[view], _SCHEMAS[view])

    def add(self, sample_id: str, modality: str, made: Field, payload: Payload) -> None:
        """Takes the facts of a payload; of fields that have neither time nor place there are none.

        Raises:
            FormatError: the payload is damaged.
        """
        take = _TAKERS.get(type(made))
        if take is None:
            return
        for view, columns in take(made, payload):
            count = len(columns[0])
            head = [pa.repeat(pa.scalar(text, pa.string()), count) for text in (sample_id, modality)]
            schema = _SCHEMAS[view]
            rest = [pa.array(column, field.type) for column, field in zip(columns, list(schema)[2:], strict=True)]
            self._batches[view].append(pa.RecordBatch.from_arrays([*head, *rest], schema=schema))


def is_judged(made: Field) -> bool:
    """Whether there are facts about a field's values."""
    return type(made) in _TAKERS


_Fact = tuple[str, list[Any]]


def _of_audio(made: AudioField, payload: Payload) -> Iterator[_Fact]:
    record = np.frombuffer(payload.metadata, made.metadata_type)[0]
    if record["sample_rate"]:
        yield "packed_media", [[int(record["num_frames"]) / int(record["sample_rate"])], [TOLERANCE_SECONDS]]


def _of_clip(made: SyncedVideoAudioField, payload: Payload) -> Iterator[_Fact]:
    timing = made.timing(payload.metadata)
    frame = float(1 / timing.frame_rate) if timing.frame_rate else 0.0
    if not timing.truncated:  # of what was cut on purpose, notes and texts are not expected to be cut too
        yield "packed_media", [[timing.duration_seconds], [max(frame, TOLERANCE_SECONDS)]]
    if timing.num_frames and timing.sample_rate:
        yield "packed_clips", [[timing.video_seconds], [timing.audio_seconds], [frame]]


def _of_midi(made: MIDIField, payload: Payload) -> Iterator[_Fact]:
    notes = made.decode(payload.metadata, payload.data).notes
    yield _spans("note", notes.onset_seconds, notes.end_seconds)


def _of_texts(made: TimedTextField, payload: Payload) -> Iterator[_Fact]:
    times = made.times(payload.metadata, payload.data)
    yield _spans("text", times[:, 0], times[:, 1])


def _of_series(made: TimeSeriesField, payload: Payload) -> Iterator[_Fact]:
    # Of the stored bytes: decoding refuses what the check is to show.
    stored = next(item.data for item in made.items(payload.metadata, payload.data) if item.part == "timestamps")
    times = np.frombuffer(bytes(stored), "<f8")
    if len(times):
        yield _spans("series", times.min(keepdims=True), times.max(keepdims=True))
    steps = np.arange(1, max(len(times), 1))
    yield "packed_steps", [steps, times[:-1], times[1:], [made.allow_equal] * len(steps)]


def _spans(kind: str, starts: Numbers, ends: Numbers) -> _Fact:
    return "packed_spans", [[kind] * len(starts), np.arange(len(starts)), starts, ends]


def _of_document(made: DocumentField, payload: Payload) -> Iterator[_Fact]:
    if made.outside == "keep":
        return
    # As stored: decoding with the field's own settings refuses what the check is to show.
    layout = replace(made, normalize=False, outside="keep").decode_layout(payload.metadata, payload.data)
    if layout is None or layout.page_sizes is None:
        return
    for kind, texts in (("word", layout.words), ("segment", layout.segments)):
        boxes, sizes = np.asarray(texts.boxes, np.float64), np.asarray(layout.page_sizes, np.float64)[texts.pages]
        yield (
            "packed_boxes",
            [
                [kind] * len(boxes),
                np.arange(len(boxes)),
                texts.pages,
                *boxes.T.reshape(4, -1),
                sizes[:, 0],
                sizes[:, 1],
            ],
        )


_TAKERS: Mapping[type[Field], Callable[[Any, Payload], Iterator[_Fact]]] = {
    AudioField: _of_audio,
    SyncedVideoAudioField: _of_clip,
    MIDIField: _of_midi,
    TimedTextField: _of_texts,
    TimeSeriesField: _of_series,
    DocumentField: _of_document,
}


def misaligned(plan: PackPlan) -> Callable[[pa.Table], Iterable[Drop]]:
    """A judge of blocks: the samples whose parts contradict each other.

    Its reasons are the names of the checks that would find them.

    Args:
        plan: the pack plan.

    Returns:
        A function of a table of whole samples, all of whose rows can be packed, that gives a `Drop` for each such
        sample, at its first row.
    """
    placer = Placer(plan)
    judged = [number for number, made in enumerate(placer.fields) if is_judged(made)]

    def judge(table: pa.Table) -> Iterable[Drop]:
        if not judged:
            return
        rows, facts = BlockRows(table), Facts()
        starts: dict[str, int] = {}
        for placement in placer.place(rows):
            sample_id = rows.sample_id[placement.start]
            starts[sample_id] = placement.start
            for number in judged:
                if number in placement.items or number in placement.values:
                    payload = encode_placed(placer, rows, placement, number)
                    facts.add(sample_id, placer.names[number], placer.fields[number], payload)
        for sample_id, (reason, detail) in sorted(_found(facts).items()):
            yield Drop(starts[sample_id], reason, None, detail)

    return judge


def _found(facts: Facts) -> dict[str, tuple[str, str]]:
    """Sample id to the first check that it violates, and the first row that does."""
    import duckdb

    found: dict[str, tuple[str, str]] = {}
    with duckdb.connect() as connection:
        for view in FACT_VIEWS:
            connection.register(view, facts.table(view))
        for check in ABOUT_CONTENT:
            result = connection.execute(check.sql)
            names = [column[0] for column in result.description]
            while rows := result.fetchmany(_FETCH):
                for row in rows:
                    first = dict(zip(names, row, strict=True))
                    sample_id = first.pop("sample_id")
                    if sample_id not in found:
                        found[sample_id] = check.name, ", ".join(f"{name}={value}" for name, value in first.items())
    return found
