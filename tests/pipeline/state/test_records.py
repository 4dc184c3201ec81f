"""Records and attempts as files: what is written is read again, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mm_assets.errors import SchemaMismatchError
from mm_assets.pipeline.chain import FILTERED_ROWS, RAW_SHARDS
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Attempt, Record, StageFailure

from ..chain import record_of


@pytest.fixture
def record(dataset: DatasetStore) -> Record:
    found = record_of(dataset, "a")
    assert found is not None
    return found


def test_records_and_attempts_are_read_as_they_were_written(record: Record) -> None:
    """Both are equal after a round trip, and equal ones have equal bytes."""
    assert Record.from_bytes(record.to_bytes(), where="here") == record
    assert replace(record, stages=dict(reversed(record.stages.items()))).to_bytes() == record.to_bytes()
    failure = StageFailure(partition="a", stage="rows", detail="it is damaged", path="/in/a.tar", byte_offset=7)
    first = {RAW_SHARDS: record.stages[RAW_SHARDS]}
    for attempt in (Attempt(partition="a", stages=first, failure=failure), Attempt(partition="a", stages={})):
        assert Attempt.from_bytes(attempt.to_bytes(), where="here") == attempt


@pytest.mark.parametrize("kind", [Record, Attempt])
def test_damaged_content_is_named(record: Record, kind: type[Record] | type[Attempt]) -> None:
    """Whatever is truncated, missing, of another type or of another version, the error names the file."""
    content = record.to_bytes() if kind is Record else Attempt(partition="a", stages=record.stages).to_bytes()
    value = json.loads(content)
    wrong = [b"", b"[]", b"null", b"[" * 100_000, content[:-3]]
    wrong += [json.dumps({name: v for name, v in value.items() if name != left}).encode() for left in value]
    wrong += [json.dumps({**value, "version": 0}).encode(), json.dumps({**value, "stages": {"no_stage": {}}}).encode()]
    wrong += [json.dumps({**value, "stages": {FILTERED_ROWS.name: []}}).encode()]
    for damaged in wrong:
        with pytest.raises(SchemaMismatchError, match=r"^records/a\.json: "):
            kind.from_bytes(damaged, where="records/a.json")
