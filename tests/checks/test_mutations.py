"""Columns and rows of every table are damaged, in `make nightly` each, and the check that guards it has to fail.

Each mutation is one change of one table of a partition that the real stages made: a value that becomes null or another,
values of two rows exchanged, a row removed, doubled or moved, a column retyped, renamed or removed. `GUARDS` says which
checks must find it; what no check of a partition can find is named in `UNSEEN`, with the reason. The digest of a table,
which the next stage verifies, finds all of it after the stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

from mm_assets.checks.catalog import Check, checks_of
from mm_assets.checks.context import CheckContext
from mm_assets.checks.origins import OriginRelations
from mm_assets.checks.packed import PackedFiles
from mm_assets.checks.relations import CONTENT, TableRelations
from mm_assets.checks.runner import Session
from mm_assets.errors import MmAssetsError
from mm_assets.pipeline.chain import FILTERED_ROWS, MATERIALIZED_ROWS, RAW_SHARDS, ROWS
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.stage_run import Run
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.rows.schema import MULTIMODAL_SCHEMA

from ..conftest import DEFAULT_EXAMPLES
from ..pipeline.chain import declare, run_chain, table_name
from .conftest import array_file, frames, picture, sound, write_tar

STAGES = (RAW_SHARDS, ROWS, MATERIALIZED_ROWS, FILTERED_ROWS)
ROW_TABLES = ("rows", "materialized_rows", "filtered_rows")

PAIRED: tuple[tuple[str, bytes], ...] = (
    ("d/a.png", picture(10)),
    ("d/a.txt", "eine Überschrift".encode()),
    ("d/a.json", b'{"source": "made up", "score": 0.5, "ok": true, "n": 1, "tags": ["x", "y"], "more": {"k": [1]}}'),
    ("d/._a.png", b"resource fork"),
    ("b.0.jpg", picture(20, "JPEG")),
    ("b.1.jpg", picture(30, "JPEG")),
    ("b.JSON", b'{"source": "found", "score": 1.5, "ok": false, "n": 2, "tags": ["z"], "more": {}}'),
    ("b.json", b'{"source": "a text, since the first JSON is the sample"}'),
    ("c.wav", sound()),
    ("c.txt", b"silence"),
    ("e.state.npy", array_file(1.0, 2.0)),
    ("e.json", b"not JSON"),
    ("f.txt", b"\xff\xfe not UTF-8"),
    ("f.png", picture(7)),
    ("b.0.jpg", picture(40, "JPEG")),
    ("g.txt", b"x"),
    ("h.txt", b"y"),
    ("h.png", picture(90)),
    ("i.txt", "naïve café, déjà vu".encode("latin-1")),
    ("j.png", picture(60)[:-30]),
    ("j.txt", b"half a picture"),
)
INTERLEAVED: tuple[tuple[str, bytes], ...] = (
    ("d/a.tiff", frames(1, 2)),
    (
        "d/a.json",
        json.dumps(
            {
                "id": "first",
                "texts": ["one", None, "two", 5],
                "images": [None, "p0", None, "p1"],
                "scores": [0.5, 0.7],
                "lang": "en",
                "kinds": [{"k": 1}, {"k": 2}],
            }
        ).encode(),
    ),
    ("d/b.0.png", picture(3)),
    ("d/b.1.png", picture(4)),
    (
        "d/b.json",
        json.dumps(
            {
                "id": 7,
                "texts": ["three", None, None],
                "images": [None, "b.0.png", "d/b.1.png"],
                "lang": "de",
                "kinds": [{"k": 3}, {"k": 4}],
            }
        ).encode(),
    ),
    ("d/b.unused.png", picture(5)),
    (
        "c.json",
        b'{"id": "third", "texts": ["four", "five"], "images": ["nowhere", "https://a.org/x.png"], "lang": "fr"}',
    ),
)
LISTED = (
    {"sample_id": "x", "path": "m/0.png", "lang": "en", "metadata_json": {"k": 1}, "score": 0.5},
    {"sample_id": "x", "text_content": "of x", "score": 1.5},
    {"sample_id": "y", "path": "m/1.png", "position": 4, "lang": "de"},
    {"sample_id": "y", "text_content": "of y", "position": 5},
    {"sample_id": "z", "path": "../outside.png"},
    {"path": "m/1.png", "modality": "image"},
    {"sample_id": "z", "text_content": "z"},
)
FILTERS = [{"type": "text_length", "min_chars": 2}]
ANNOTATORS = [{"type": "text_length"}, {"type": "image_size"}]


GUARDS: Mapping[str, Mapping[str, str]] = {
    "raw_shards": {"": "members ranges"},
    "rows": {
        "sample_id": "member_rows entries samples listed",
        "position": "member_rows entries metadata_rows listed",
        "modality": "member_rows entries samples metadata_rows listed",
        "content_type": "member_rows entries samples listed",
        "text_content": "member_texts entries text listed",
        "binary_content": "no_content",
        "source_ref": "source_refs samples member_rows entries listed",
        "source": "sources",
        "source_member": "sources",
        "metadata_json": "member_texts text listed",
        "materialize_error": "entries member_rows listed",
        "removed": "members entries metadata_rows listed",
        "doubled": "unique metadata_rows",
        "moved": "contiguous entries listed",
        "": "user_columns listed",
    },
    "rejects": {
        "": "rejects members entries listed",
        "sample_id": "rejects entries listed",
        "stage": "rejects entries listed",
    },
    "materialized_rows": {
        "binary_content": "content shard_bytes",
        "materialize_error": "same_rows content readable",
        "source": "sources",
        "source_member": "sources",
        "": "same_rows",
    },
    "filtered_rows": {
        "": "same_rows",
        "source": "sources",
        "source_member": "sources",
        **dict.fromkeys(("text_chars", "text_words", "image_width", "image_height", "image_aspect_ratio"), "repeated"),
    },
    "undecodable": {"": "decodable", "field": "repeated"},
    "dropped": {"": "same_rows dropped accounting repeated", "doubled": "accounting"},
}
"""By table and column, or by what happens to a row, the checks of which one must fail; "" for all others."""

UNSEEN: Mapping[tuple[str, str], str] = {
    (
        "rows",
        "materialize_error",
    ): "why a token has no image is a sentence: that it has none is checked, the words are not",
    ("materialized_rows", "materialize_error"): "the words of an error: that there is one is checked",
    ("rejects", "detail"): "the words of a reason",
    ("rejects", "moved"): "rejects have no order",
    ("dropped", "detail"): "the words of a reason",
    ("undecodable", "member"): "shown to people; `source_ref` is compared",
    ("undecodable", "content_type"): "shown to people; the row has it",
    ("undecodable", "detail"): "the words of a reason",
    ("dropped", "moved"): "drops have no order",
}
"""Damage that the checks of a partition may not find, and why: by table and column, with or without the kind of change,
or by what happens to a row."""


class Mutation(NamedTuple):
    """One change of one table."""

    kind: str
    where: str
    table: pa.Table


@dataclass(frozen=True)
class Subject:
    """A partition of real stages, of whose tables one at a time is damaged."""

    name: str
    dataset: DatasetStore
    key: str
    contexts: Mapping[str, CheckContext]

    def path(self, table: str) -> Path:
        return Path(self.dataset.store.path_of(table_name(self.dataset, table, self.key)))

    def read(self, table: str) -> pa.Table:
        return pq.read_table(self.path(table), partitioning=None)


def build(folder: Path, name: str) -> DatasetStore:
    """Runs the chain over one of the three kinds of partitions."""
    folder.mkdir()
    settings: dict[str, Any] = {"filters": FILTERS, "annotators": ANNOTATORS, "pack": "generic"}
    if name == "listing":
        (folder / "m").mkdir()
        for n in range(2):
            (folder / "m" / f"{n}.png").write_bytes(picture(n))
        shards = folder / "s.jsonl"
        shards.write_text("".join(json.dumps(line) + "\n" for line in LISTED), encoding="utf-8")
    else:
        shards = write_tar(folder / "s.tar", PAIRED if name == "paired" else INTERLEAVED)
    if name == "interleaved":
        settings["samples"] = {
            "sample_id_field": "id",
            "per_text_fields": ["scores"],
            "per_image_fields": ["kinds"],
        }
    dataset, _ = run_chain(declare(folder / "root", shards, **settings))
    return dataset


@pytest.fixture(scope="module", params=["paired", "interleaved", "listing"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Each kind of partition."""
    dataset = build(tmp_path_factory.mktemp("mutations") / request.param, request.param)
    with ExitStack() as stack:
        work = stack.enter_context(PartitionWork.registered(dataset, "s"))
        contexts = {s.name: stack.enter_context(Run(work, s)).check_context({}) for s in STAGES}
        yield Subject(request.param, dataset, "s", contexts)


class Relations:
    """The relations of one asset, each made once, and those over a damaged table again."""

    def __init__(self, context: CheckContext) -> None:
        self._context = context
        self._pristine: dict[str, tuple[pa.Table, set[str]]] = {}
        names = (context.known_as(name) for check in checks_of(context.asset) for name in check.relations)
        for name in dict.fromkeys(names):
            with closing(Recorded(context)) as fresh:
                self._pristine[name] = fresh.made(name, OriginRelations(context, fresh)), fresh.used

    def fails(self, check: Check, changed: str | None, tables: Recorded, origins: OriginRelations) -> bool:
        """Whether a check finds violations; a relation that cannot be made stops the stage as well."""

        def relation(name: str) -> pa.Table:
            made, used = self._pristine[name]
            return tables.made(name, origins) if changed in used else made

        with PackedFiles(self._context, ()) as files, Damaged(self._context, files, relation) as session:
            try:
                return not session.judge(check).passed
            except MmAssetsError:
                return True


class Damaged(Session):
    """The runner's session over relations that are given."""

    def __init__(self, context: CheckContext, files: PackedFiles, given: Callable[[str], pa.Table]) -> None:
        super().__init__(context, files)
        self.relation = given


class Recorded(TableRelations):
    """The relations over tables; notes which tables they read."""

    def __init__(self, context: CheckContext) -> None:
        super().__init__(context)
        self.used: set[str] = set()

    def parquet(self, table: str) -> pq.ParquetFile:
        self.used.add(table)
        return super().parquet(table)

    def made(self, name: str, origins: OriginRelations) -> pa.Table:
        """A relation in memory."""
        if name in self.context.tables:
            file = self.parquet(name)
            if name not in ROW_TABLES:
                return file.read()
            table = file.read([column for column in MULTIMODAL_SCHEMA.names if column not in CONTENT])
            return table.append_column("ordinal", pa.array(np.arange(table.num_rows)))
        found = getattr(origins, name, None)
        return self.relation(name) if found is None else found()


# --- mutations ------------------------------------------------------------------------------------------------------


def another(value: Any) -> Any:
    """A value of the same type."""
    match value:
        case None:
            return None
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value[:-1] + ("y" if value.endswith("x") else "x")
        case bytes():
            return value[:-1] + bytes([value[-1] ^ 1])
        case dict():
            return {name: another(part) for name, part in value.items()}
        case _:
            return [*value, *value] or [None]


def chosen_rows(table: pa.Table) -> list[int]:
    """The first row of each modality or reason and the last of all, which stand for the others."""
    name = next((n for n in ("modality", "reason", "skip_reason") if n in table.schema.names), None)
    kinds = table.column(name).to_pylist()
    return sorted({kinds.index(kind) for kind in kinds} | {len(kinds) - 1 for _ in kinds})


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """The table with other values in one column."""
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))


def cell_mutations(table: pa.Table) -> Iterator[tuple[str, Mutation]]:
    """Column and mutation: values that became null, another, or that of another row."""
    rows = chosen_rows(table)
    for field in table.schema:
        values = table.column(field.name).to_pylist()
        for row in rows:
            value = values[row]
            changes = [("another", another(value))]
            if field.nullable:
                changes.append(("null", None))
            for kind, changed in changes:
                if changed != value:
                    after = [*values[:row], changed, *values[row + 1 :]]
                    yield field.name, Mutation(kind, f"row {row}", with_column(table, field.name, after))
            others = [n for n in range(len(values)) if values[n] != value and (field.nullable or values[n] is not None)]
            for other in others[:1] + others[-1:]:
                after = list(values)
                after[row], after[other] = after[other], after[row]
                yield field.name, Mutation("swapped", f"rows {row}, {other}", with_column(table, field.name, after))


def row_mutations(table: pa.Table) -> Iterator[tuple[str, Mutation]]:
    """Rows that are removed, doubled or moved."""
    every = list(range(table.num_rows))
    for row in chosen_rows(table):
        rest = [n for n in every if n != row]
        yield "", Mutation("removed", f"row {row}", table.take(pa.array(rest, pa.int64())))
        yield "", Mutation("doubled", f"row {row}", table.take(sorted([*every, row])))
        for place in {0, len(rest)} - {row}:
            moved = [*rest[:place], row, *rest[place:]]
            yield "", Mutation("moved", f"row {row} to {place}", table.take(moved))


def schema_mutations(table: pa.Table) -> Iterator[tuple[str, Mutation]]:
    """Columns that are retyped, renamed, removed, moved, or that may be null where they may not."""
    names = table.schema.names
    for place, field in enumerate(table.schema):
        values = table.column(place)
        kind = pa.string() if field.type in (pa.int32(), pa.int64()) else pa.large_string()
        if field.type == pa.large_binary() or pa.types.is_nested(field.type):
            kind = pa.binary()
            values = pa.nulls(table.num_rows, kind)
        retyped = pa.field(field.name, kind, field.nullable)
        yield "", Mutation("retyped", field.name, table.set_column(place, retyped, values.cast(kind)))
        yield "", Mutation("renamed", field.name, table.rename_columns([*names[:place], "zz", *names[place + 1 :]]))
        yield "", Mutation("removed column", field.name, table.drop_columns([field.name]))
        yield (
            "",
            Mutation("moved column", field.name, table.select([*names[:place], *names[place + 1 :], field.name][::-1])),
        )
        loose = table.schema.set(place, pa.field(field.name, field.type, not field.nullable))
        if not (field.nullable and table.column(place).null_count):
            yield "", Mutation("nullable", field.name, table.cast(loose))


# --- verdicts -------------------------------------------------------------------------------------------------------

TABLES = [(stage.name, table.name) for stage in STAGES for table in stage.tables]


@pytest.fixture(scope="module")
def judges(subject: Subject) -> Mapping[str, Relations]:
    """The relations of the good partition, of which the checks find nothing wrong."""
    made = {name: Relations(context) for name, context in subject.contexts.items()}
    for name, relations in made.items():
        with closing(Recorded(subject.contexts[name])) as fresh:
            origins = OriginRelations(subject.contexts[name], fresh)
            assert [c.name for c in checks_of(name) if relations.fails(c, None, fresh, origins)] == []
    return made


def missed_of(subject: Subject, judges: Mapping[str, Relations], asset: str, table: str, step: int) -> set[str]:
    """Of every `step`-th mutation of a table those that no guard found, and that are not among `UNSEEN`."""
    context, good = subject.contexts[asset], subject.read(table)
    path, guards = subject.path(table), GUARDS[table]
    whole = path.read_bytes()
    checks = {check.name: check for check in checks_of(asset)}
    missed: set[str] = set()
    try:
        for column, mutation in list(chain(cell_mutations(good), row_mutations(good)))[::step]:
            what = column or mutation.kind
            pq.write_table(mutation.table, path)
            with closing(Recorded(context)) as tables:
                origins = OriginRelations(context, tables)
                names = guards.get(what, guards[""]).split()
                if not any(judges[asset].fails(checks[name], table, tables, origins) for name in names):
                    known = {(table, what), (table, f"{what} {mutation.kind}")}
                    if not known & UNSEEN.keys():
                        missed.add(f"{what} {mutation.kind} {mutation.where}")
    finally:
        path.write_bytes(whole)
    return missed


@pytest.mark.parametrize(("asset", "table"), TABLES)
def test_damage_of_a_table_fails_the_check_that_guards_it(subject, judges, asset: str, table: str) -> None:
    """Of every seventeenth change of a value or a row, the guard of its column finds it."""
    assert missed_of(subject, judges, asset, table, 17) == set()


@pytest.mark.fuzz
@pytest.mark.parametrize(("asset", "table"), TABLES)
def test_more_damage_of_a_table_fails_the_check_that_guards_it(subject, judges, asset: str, table: str) -> None:
    """Every fifth change of a value or a row, and in `make nightly` every one, is found by the guard of its column."""
    step = 5 if settings().max_examples == DEFAULT_EXAMPLES else 1
    assert missed_of(subject, judges, asset, table, step) == set()


@pytest.mark.parametrize(("asset", "table"), TABLES)
def test_damage_of_the_columns_of_a_table_fails_its_schema(subject, judges, asset: str, table: str) -> None:
    """A column that is retyped, renamed, removed, moved or differs in nullability fails the check `schema`."""
    context, good, path = subject.contexts[asset], subject.read(table), subject.path(table)
    whole, check = path.read_bytes(), checks_of(asset)[0]
    try:
        for _, mutation in schema_mutations(good):
            pq.write_table(mutation.table, path)
            with closing(Recorded(context)) as tables:
                found = judges[asset].fails(check, table, tables, OriginRelations(context, tables))
            assert found, (mutation.kind, mutation.where)
    finally:
        path.write_bytes(whole)
