import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import ConfigError, FilterError, SchemaMismatchError
from mm_assets.filters.apply import FilterStream
from mm_assets.filters.base import Annotator, Block, Filter
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.parquet import sample_groups
from mm_assets.rows.schema import DROPPED_SCHEMA, DatasetSchema, Drop, MemberRules, UserColumn
from mm_assets.rows.source_ref import build_source_ref
from mm_assets.sources.base import index_members
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile

BATCH = 1 << 18  # so small that a shard gives several blocks


def _filter(**config: object) -> Filter:
    return build_filter(config, where="defs.yaml", key="filters[0]")


def _run(stream: FilterStream) -> tuple[list[dict], list[dict]]:
    kept, dropped = [], []
    for batch in stream:
        kept += batch.to_pylist()
        dropped += [row for part in stream.take_dropped() for row in part.to_pylist()]
    dropped += [row for part in stream.take_dropped() for row in part.to_pylist()]
    return kept, dropped


def _key(row: Mapping) -> tuple[str, int, str]:
    return row["sample_id"], row["position"], row["modality"]


def _apply(blocks, *, filters=(), annotators=(), schema=None, **options) -> FilterStream:
    return FilterStream(blocks, annotators=annotators, filters=filters, schema=schema or DatasetSchema(), **options)


class _Marked(Filter):
    """Drops the rows whose text holds a mark, and counts the blocks that it was shown."""

    name = "marked"

    def __init__(self, *, mark: str = "x", scope: str = "row", late: bool = False) -> None:
        self.mark = mark
        self.scope = scope
        self.needs_content = late
        self.seen = 0

    def judge(self, block: Block) -> Iterable[Drop]:
        self.seen += 1
        for row, text in enumerate(block.column("text_content").to_pylist()):
            if text is not None and self.mark in text:
                yield Drop(row, f"has_{self.mark}", float(text.index(self.mark)))


class _Answers(Filter):
    """Drops what it is given."""

    name = "answers"

    def __init__(self, drops: list[Drop]) -> None:
        self.drops = drops

    def judge(self, block: Block) -> Iterable[Drop]:
        return self.drops


# What each filter drops


def test_without_filters_everything_is_kept(make_table):
    """Rows pass unchanged and in order, as batches of the schema of filtered rows."""
    table = make_table({"a": [("text", "x"), ("image", b"1")], "b": [("audio", None)]})
    stream = _apply([table])
    batches = list(stream)
    assert pa.Table.from_batches(batches).equals(table)
    assert stream.take_dropped() == []
    assert stream.counts == {"rows": 5, "samples": 2, "kept": 5, "kept_samples": 2, "dropped": 0}


def test_row_scope_drops_rows_and_leaves_their_sample(make_table):
    """A drop of a content row costs that row alone; it is listed with filter, reason and value, and counted."""
    table = make_table({"a": [("text", "ax"), ("text", "b")], "b": [("text", "c")]})
    stream = _apply([table], filters=[_Marked()])
    kept, dropped = _run(stream)
    assert [_key(r) for r in kept] == [("a", -1, "metadata"), ("a", 1, "text"), ("b", -1, "metadata"), ("b", 0, "text")]
    expected = {"filter": "marked", "reason": "has_x", "value": 1.0, "detail": None}
    assert dropped == [{"sample_id": "a", "position": 0, "modality": "text", **expected}]
    assert stream.counts == {
        "rows": 5, "samples": 2, "kept": 4, "kept_samples": 2, "dropped": 1, "dropped.marked.has_x": 1
    }  # fmt: skip


def test_sample_scope_drops_every_row_of_the_sample(make_table):
    """One drop takes the whole sample out, its metadata row included, and lists each row."""
    table = make_table({"a": [("text", "ax"), ("text", "b")], "b": [("text", "c")]})
    kept, dropped = _run(_apply([table], filters=[_Marked(scope="sample")]))
    assert {r["sample_id"] for r in kept} == {"b"}
    assert [_key(r) for r in dropped] == [("a", -1, "metadata"), ("a", 0, "text"), ("a", 1, "text")]
    assert {(r["filter"], r["reason"], r["value"]) for r in dropped} == {("marked", "has_x", 1.0)}


def test_a_drop_of_the_metadata_row_takes_the_sample(make_table):
    """A metadata row is never dropped alone: a row filter that names it drops its sample, other verdicts aside."""
    table = make_table({"a": [("text", "x"), ("text", "y")], "b": [("text", "z")]})
    kept, dropped = _run(_apply([table], filters=[_Answers([Drop(1, "own", 1), Drop(0, "meta", None)])]))
    assert {r["sample_id"] for r in kept} == {"b"}
    assert [r["reason"] for r in dropped] == ["meta"] * 3


def test_a_sample_without_content_goes_with_its_metadata_row(make_table):
    """The rows that are left of a sample without content are listed under the filter ``empty_sample``."""
    table = make_table({"a": [("text", "x")], "b": [], "c": [("text", "y")]})
    kept, dropped = _run(_apply([table], filters=[_Marked()]))
    assert {r["sample_id"] for r in kept} == {"c"}
    assert [(_key(r), r["filter"], r["reason"]) for r in dropped] == [
        (("a", 0, "text"), "marked", "has_x"),
        (("a", -1, "metadata"), "empty_sample", "no_content_rows"),
        (("b", -1, "metadata"), "empty_sample", "no_content_rows"),
    ]


def test_empty_samples_can_be_kept(make_table):
    """With on_empty_sample "keep" the metadata rows of such samples stay."""
    table = make_table({"a": [("text", "x")], "b": []})
    kept, dropped = _run(_apply([table], filters=[_Marked()], on_empty_sample="keep"))
    assert [_key(r) for r in kept] == [("a", -1, "metadata"), ("b", -1, "metadata")]
    assert len(dropped) == 1


def test_of_several_drops_of_one_row_the_first_counts(make_table):
    """A row that a filter names twice is listed once, and later filters do not see it."""
    table = make_table({"a": [("text", "x"), ("text", "y")]})
    again = _Answers([Drop(1, "first", 1), Drop(1, "second", 2)])
    kept, dropped = _run(_apply([table], filters=[again, _Marked(mark="x")]))
    assert [(r["filter"], r["reason"], r["value"]) for r in dropped] == [("answers", "first", 1.0)]
    assert len(kept) == 2


@pytest.mark.parametrize(
    "drop",
    [
        Drop(2, "r", None),
        Drop(-1, "r", None),
        Drop(True, "r", None),
        Drop(1.0, "r", None),
        Drop(1, "", None),
        Drop(1, None, None),
        Drop(1, "r", "high"),
        Drop(1, "r", True),
    ],
)
def test_a_wrong_drop_is_the_filters_error(make_table, drop):
    """A row out of range, no reason, or a value that is not a number stops the run and names the filter."""
    with pytest.raises(FilterError, match=r"^answers: dropped row"):
        list(_apply([make_table({"a": [("text", "x")]})], filters=[_Answers([drop])]))


class _Breaks(Filter):
    """Fails on a text that is not a number."""

    name = "breaks"

    def judge(self, block: Block) -> Iterable[Drop]:
        numbers = [float(text) for text in block.column("text_content").to_pylist() if text is not None]
        return [Drop(0, "many", value) for value in numbers if value > 100]


class _BreaksToo(Annotator):
    name = "breaks_too"
    columns = (UserColumn(name="number", source="", type="double", rows=""),)

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        texts = block.column("text_content").to_pylist()
        return {"number": pa.array([None if text is None else float(text) for text in texts], pa.float64())}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("breaks", {"filters": [_Breaks()]}),
        ("breaks_too", {"annotators": [_BreaksToo()], "schema": DatasetSchema(annotator_columns=_BreaksToo.columns)}),
    ],
)
def test_an_error_in_a_users_code_names_filter_sample_and_file(make_table, name, options):
    """What a filter or annotator raises becomes one error with its place, which has the original as its cause."""
    texts = {"one": "1", "two": "no number", "three": "3"}
    table = make_table({key: [("text", text)] for key, text in texts.items()})
    refs = [build_source_ref(path=f"/data/{key}.tar") for key in table.column("sample_id").to_pylist()]
    place = table.schema.get_field_index("source_ref")
    table = table.set_column(place, table.schema.field(place), pa.array(refs, pa.string()))
    with pytest.raises(
        FilterError,
        match=rf"^{name}: raised ValueError: could not convert string to float: 'no number' "
        r"on sample 'two' of /data/two.tar$",
    ) as caught:
        _run(_apply([table], **options))
    assert isinstance(caught.value.__cause__, ValueError)


def test_rows_that_failed_to_materialize_follow_the_policy(make_table):
    """Errors are kept, dropped, or take their sample, under the filter ``materialize``, before content filters run."""
    table = make_table({"a": [("image", None), ("text", "x")], "b": [("text", "y")]})
    late = _Marked(late=True)
    assert _run(_apply([table]))[1] == []
    row = _run(_apply([table], on_materialize_error="drop_row"))[1]
    assert [(_key(r), r["filter"]) for r in row] == [(("a", 0, "image"), "materialize")]
    sample = _run(_apply([table], on_materialize_error="drop_sample", filters=[late]))[1]
    assert [(r["position"], r["filter"], r["reason"]) for r in sample] == [
        (p, "materialize", "materialize_error") for p in (-1, 0, 1)
    ]


def test_packable_runs_last_over_kept_rows(make_table):
    """It sees what all filters kept and its reasons are listed under ``packable``; the sample it empties goes."""
    seen = []

    def packable(table: pa.Table, contents: Sequence[memoryview | None]) -> Iterable[Drop]:
        seen.append(table.num_rows)
        return [
            Drop(row, "unpackable_image", None) for row, m in enumerate(table["modality"].to_pylist()) if m == "image"
        ]

    table = make_table({"a": [("text", "x"), ("image", b"1")], "b": [("text", "y")]})
    kept, dropped = _run(_apply([table], filters=[_Marked(late=True)], packable=packable))
    assert seen == [4]
    assert {r["sample_id"] for r in kept} == {"b"}
    assert [(r["filter"], r["reason"]) for r in dropped] == [
        ("marked", "has_x"), ("packable", "unpackable_image"), ("empty_sample", "no_content_rows")
    ]  # fmt: skip


def test_renumbering_closes_gaps_and_keeps_equal_positions_equal(make_table):
    """Positions become dense ranks within each sample; the dropped list keeps the positions of the source."""
    items = [("text", (3, "a")), ("image", (3, b"i")), ("text", (5, "x")), ("text", (9, "b"))]
    table = make_table({"a": items, "b": [("text", (7, "c"))]})
    kept, dropped = _run(_apply([table], filters=[_Marked()], renumber=True))
    assert [r["position"] for r in kept] == [-1, 0, 0, 1, -1, 0]
    assert [r["position"] for r in dropped] == [5]
    assert [r["position"] for r in _run(_apply([table], filters=[_Marked()]))[0]] == [-1, 3, 3, 9, -1, 7]


def test_state_lasts_over_the_blocks_of_a_run(make_table):
    """One instance sees all blocks of the partition in order, so a stateful filter knows the rows before."""
    first, second = make_table({"a": [("text", "same")]}), make_table({"b": [("text", "same")]})
    one = _filter(type="exact_duplicates")
    kept, dropped = _run(_apply([first, second], filters=[one]))
    assert {r["sample_id"] for r in kept} == {"a"}
    assert {r["sample_id"] for r in dropped} == {"b"}
    again = _run(_apply([first, second], filters=[_filter(type="exact_duplicates")]))
    assert again == (kept, dropped)


def test_empty_blocks_and_no_blocks_pass(make_table):
    """A partition without rows gives no batches, with filters and annotators of both kinds."""
    configs = ["text_length", "image_to_text_ratio", "content_hash", "image_size"]
    annotators = [build_annotator({"type": kind}, where="w", key="k") for kind in configs]
    schema = DatasetSchema(annotator_columns=tuple(c for a in annotators for c in a.columns))
    for blocks in ([], [make_table({})], [make_table({}), make_table({})]):
        filters = [_filter(type="image_to_text_ratio", max=1), _filter(type="aspect_ratio")]
        stream = _apply(blocks, filters=filters, annotators=annotators, schema=schema, renumber=True)
        assert list(stream) == []
        assert stream.counts["rows"] == 0


def test_samples_of_metadata_alone_can_be_renumbered(make_table):
    """Renumbering leaves metadata rows at -1 where there is nothing else."""
    kept, _ = _run(_apply([make_table({"a": [], "b": []})], on_empty_sample="keep", renumber=True))
    assert [r["position"] for r in kept] == [-1, -1]


def test_annotators_may_answer_in_chunks(make_table):
    """A chunked column is as good as one array."""
    table = make_table({"a": [("text", "xy")]})
    answer = {"length": pa.chunked_array([[1], [2]], pa.int64())}
    (batch,) = _apply([table], annotators=[_Lengths(answer)], schema=LENGTHS)
    assert batch.column("length").to_pylist() == [1, 2]


def test_payloads_are_unsigned_and_read_only(make_table):
    """Content is shown to measures as read-only bytes, as decoders take them, and cannot be changed through them."""
    block = Block(make_table({"a": [("image", b"\xff\x01"), ("text", "ß")]}))
    assert block.payload(0) is None
    for row, content in ((1, b"\xff\x01"), (2, "ß".encode())):
        payload = block.payload(row)
        assert (payload.tobytes(), payload.format, payload.readonly) == (content, "B", True)


def test_a_selected_block_holds_its_own_content_only(make_table):
    """The content of the rows that were dropped is released with the block that they were in."""
    size = 4 << 20
    block = Block(make_table({"a": [("image", bytes(size)), ("image", b"\xff")]}))
    assert block.payload(1) is not None
    selected = block.select(np.array([True, False, True]))
    before = pa.total_allocated_bytes()
    del block
    assert before - pa.total_allocated_bytes() >= size
    assert bytes(selected.payload(1)) == b"\xff"


# Order of work, fetching late


def _strip(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index("binary_content")
    return table.set_column(place, table.schema.field(place), pa.nulls(table.num_rows, pa.large_binary()))


def _fetcher(table: pa.Table, asked: list, *, rows: int):
    """A `fetch` that fills content from a full table, in batches that do not respect samples."""
    content = {_key(r): r["binary_content"] for r in table.to_pylist()}

    def fetch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for start in range(0, batch.num_rows, rows):
                part = pa.Table.from_batches([batch.slice(start, rows)])
                keys = [_key(r) for r in part.to_pylist()]
                asked.extend(keys)
                place = part.schema.get_field_index("binary_content")
                filled = pa.array([content[k] for k in keys], pa.large_binary())
                yield from part.set_column(place, part.schema.field(place), filled).to_batches()

    return fetch


def test_late_fetching_gives_the_same_rows_and_asks_only_for_survivors(make_table, image):
    """Content that is fetched once, late, gives the rows that content at hand gives; dropped rows are not fetched."""
    wide, square = image(40, 10), image(12, 10)
    tables = [
        make_table({"a": [("text", "x"), ("image", wide)], "b": [("image", square), ("text", "y")]}),
        make_table({"c": [("text", "xx"), ("image", square)], "d": [("image", square)]}),
    ]

    def config() -> list[Filter]:
        return [_filter(type="aspect_ratio"), _Marked(scope="sample"), _filter(type="exact_duplicates", scope="row")]

    here = _apply(tables, filters=config())
    asked: list = []
    fetch = _fetcher(pa.concat_tables(tables), asked, rows=2)
    late = _apply([_strip(t) for t in tables], filters=config(), fetch=fetch, batch_bytes=64)
    (kept, dropped), (late_kept, late_dropped) = _run(here), _run(late)
    assert late_kept == kept
    assert sorted(map(_key, late_dropped)) == sorted(map(_key, dropped))
    assert late.counts == here.counts
    assert len(asked) == len(set(asked))
    assert {key[0] for key in asked} == {"b", "d"}
    assert {r["filter"] for r in dropped} == {"marked", "exact_duplicates", "empty_sample"}


def test_filters_without_content_see_none_and_run_first(make_table):
    """A filter that says it needs no content is shown none, even where it is at hand, and runs before those that do."""
    order: list[tuple[str, bool]] = []

    class Spy(Filter):
        def __init__(self, name: str, *, late: bool) -> None:
            self.name = name
            self.needs_content = late

        def judge(self, block: Block) -> Iterable[Drop]:
            order.append((self.name, block.column("binary_content").null_count < block.num_rows))
            return ()

    table = make_table({"a": [("image", b"1")]})
    waiting = Spy("waiting", late=False)
    waiting.after_content = True
    _run(_apply([table], filters=[Spy("content", late=True), waiting, Spy("free", late=False)]))
    assert order == [("free", False), ("content", True), ("waiting", True)]


def test_after_content_puts_a_filter_in_its_place(make_table, image):
    """A ratio that is to count only what an image filter left is judged after it."""
    table = make_table({"a": [("image", image(90, 10)), ("image", image(10, 10)), ("text", "one")]})
    shape = {"type": "aspect_ratio"}
    ratio = {"type": "image_to_text_ratio", "max": 1.0}
    first = _run(_apply([table], filters=[_filter(**shape), _filter(**ratio)]))
    after = _run(_apply([table], filters=[_filter(**shape), _filter(**ratio, after_content=True)]))
    assert len(first[0]) == 0
    assert [_key(r) for r in after[0]] == [("a", -1, "metadata"), ("a", 1, "image"), ("a", 2, "text")]


def test_what_fetch_leaves_out_is_its_own_to_report(make_table):
    """Rows missing from the output of `fetch` are neither kept nor listed, and a sample emptied by it goes."""
    table = make_table({"a": [("image", b"1")], "b": [("image", b"2")]})

    def fetch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, 1)
            yield batch.slice(2, 2)

    kept, dropped = _run(_apply([table], fetch=fetch))
    assert {r["sample_id"] for r in kept} == {"b"}
    assert [(_key(r), r["filter"]) for r in dropped] == [(("a", -1, "metadata"), "empty_sample")]


def test_blocks_are_taken_one_at_a_time(make_table):
    """The stream is lazy: a block is read when the one before has been handed on, so memory stays bounded."""
    taken = []

    def blocks() -> Iterator[pa.Table]:
        for number in range(5):
            taken.append(number)
            yield make_table({f"s{number}": [("text", "y" if number % 2 else "x")]})

    stream = iter(_apply(blocks(), filters=[_Marked()]))
    assert taken == []
    next(stream)
    assert taken == [0, 1]  # block 0 left nothing to hand on
    next(stream)
    assert taken == [0, 1, 2, 3]


# The property that everything else rests on

_CONTENT = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.sampled_from(["", "x", "y", "one two three", "xx"])),
        st.tuples(st.just("image"), st.sampled_from([b"1", b"2", None])),
        st.tuples(st.just("audio"), st.sampled_from([b"1", b"3"])),
    ),
    max_size=4,
)
_SCOPES = st.sampled_from(["row", "sample"])
_FILTERS = st.lists(
    st.one_of(
        st.builds(dict, kind=st.just("marked"), mark=st.sampled_from("xy"), scope=_SCOPES, late=st.booleans()),
        st.builds(dict, type=st.just("exact_duplicates"), scope=_SCOPES),
        st.builds(dict, type=st.just("text_length"), min_chars=st.integers(0, 3), scope=_SCOPES),
        st.builds(dict, type=st.just("image_to_text_ratio"), max=st.floats(0.1, 2), after_content=st.booleans()),
        st.builds(dict, type=st.just("aspect_ratio"), drop_invalid_rows=st.booleans()),
    ),
    max_size=4,
)  # fmt: skip


def _made(configs: list[dict]) -> list[Filter]:
    return [_Marked(**{k: v for k, v in c.items() if k != "kind"}) if "kind" in c else _filter(**c) for c in configs]


@settings(deadline=None, max_examples=150)
@given(
    partition=st.lists(st.lists(_CONTENT, min_size=1, max_size=4), max_size=3),
    configs=_FILTERS,
    on_empty=st.sampled_from(["drop", "keep"]),
    on_error=st.sampled_from(["keep", "drop_row", "drop_sample"]),
    fetch_rows=st.integers(1, 5),
)
def test_every_row_is_kept_or_dropped_exactly_once(make_table, partition, configs, on_empty, on_error, fetch_rows):
    """Kept and dropped rows are the input's, each once; order is kept; no metadata row goes alone; both modes agree."""
    blocks = [
        make_table({f"{b}/{s}": content for s, content in enumerate(samples)}) for b, samples in enumerate(partition)
    ]
    policy = {"on_empty_sample": on_empty, "on_materialize_error": on_error}
    stream = _apply(blocks, filters=_made(configs), **policy)
    kept, dropped = _run(stream)
    source = [_key(row) for block in blocks for row in block.to_pylist()]
    kept_keys, dropped_keys = [_key(row) for row in kept], [_key(row) for row in dropped]
    assert Counter(kept_keys) + Counter(dropped_keys) == Counter(source)
    assert kept_keys == [key for key in source if key in set(kept_keys)]
    with_metadata = {sample for sample, position, _ in kept_keys if position == -1}
    with_content = {sample for sample, position, _ in kept_keys if position >= 0}
    assert with_content <= with_metadata
    if on_empty == "drop":
        assert with_content == with_metadata
    counts = stream.counts
    assert (counts["rows"], counts["kept"], counts["dropped"]) == (len(source), len(kept), len(dropped))
    assert sum(n for name, n in counts.items() if name.startswith("dropped.")) == len(dropped)
    by_reason = Counter(f"dropped.{row['filter']}.{row['reason']}" for row in dropped)
    assert {k: v for k, v in counts.items() if k.startswith("dropped.")} == dict(by_reason)

    if not blocks:
        return
    fetch = _fetcher(pa.concat_tables(blocks), [], rows=fetch_rows)
    late = _apply([_strip(b) for b in blocks], filters=_made(configs), fetch=fetch, batch_bytes=64, **policy)
    late_kept, late_dropped = _run(late)
    assert late_kept == kept
    assert Counter(map(json.dumps, late_dropped)) == Counter(map(json.dumps, dropped))


# Contracts of the run


def test_dropped_rows_have_their_schema(make_table):
    """Dropped rows come as batches of DROPPED_SCHEMA, null value where a filter gives none."""
    stream = _apply([make_table({"a": [("text", "x")]})], filters=[_Marked()])
    assert list(stream) == []
    parts = stream.take_dropped()
    assert all(part.schema.equals(DROPPED_SCHEMA) for part in parts)
    assert [row["value"] for part in parts for row in part.to_pylist()] == [0.0, None]
    assert stream.take_dropped() == []


def test_user_columns_pass(make_table):
    """Columns of the dataset's own, lists among them, come out as they went in."""
    schema = DatasetSchema(
        user_columns=(
            UserColumn(name="url", source="url", type="string"),
            UserColumn(name="scores", source="scores", type="list<double>"),
        )
    )
    table = make_table({"a": [("text", "x"), ("text", "y")]}, schema=schema)
    table = table.set_column(9, table.schema.field(9), pa.array(["u", None, None]))
    table = table.set_column(10, table.schema.field(10), pa.array([[1.0, 2.0], None, None]))
    kept, _ = _run(_apply([table], filters=[_Marked()], schema=schema))
    assert [(r["url"], r["scores"]) for r in kept] == [("u", [1.0, 2.0]), (None, None)]


def test_a_block_with_other_columns_is_refused(make_table):
    """Rows that do not have the dataset's columns are refused with the first column that differs."""
    table = make_table({"a": [("text", "x")]})
    with pytest.raises(SchemaMismatchError, match=r"further columns \['more'\]"):
        list(_apply([table.append_column("more", pa.nulls(2))]))
    with pytest.raises(SchemaMismatchError, match=r"column 8 is nothing, expected .*materialize_error"):
        list(_apply([table.drop_columns(["materialize_error"])]))
    with pytest.raises(SchemaMismatchError, match=r"column 0 is .*int64"):
        list(_apply([table.set_column(0, "sample_id", pa.array([1, 2]))]))


def test_a_fetch_that_loses_columns_is_refused(make_table):
    """What comes back from `fetch` must have the columns that went in."""
    table = make_table({"a": [("text", "x")]})

    def fetch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from pa.Table.from_batches([batch]).drop_columns(["metadata_json"]).to_batches()

    with pytest.raises(SchemaMismatchError, match="fetched"):
        list(_apply([table], fetch=fetch))


def test_a_sample_split_over_blocks_is_refused(make_table):
    """Blocks hold whole samples; one that goes on in the next block would be judged twice, so it is refused."""
    table = make_table({"a": [("text", "x"), ("text", "y")]})
    with pytest.raises(SchemaMismatchError, match="sample 'a' is split"):
        list(_apply([table.slice(0, 2), table.slice(2)]))


def test_a_stream_is_iterated_once(make_table):
    """A second pass would find filters with the first one's state, so it is refused."""
    stream = _apply([make_table({"a": [("text", "x")]})])
    list(stream)
    with pytest.raises(FilterError, match="once"):
        list(stream)


@pytest.mark.parametrize("option", ["on_empty_sample", "on_materialize_error"])
def test_wrong_policies_are_refused(option):
    """A policy that does not exist is refused with those that do."""
    with pytest.raises(ConfigError, match=rf"{option}: is 'explode', allowed: .*keep"):
        _apply([], **{option: "explode"})


# Annotators


class _Lengths(Annotator):
    name = "lengths"
    columns = (UserColumn(name="length", source="", type="int64", rows="text"),)

    def __init__(self, answer=None) -> None:
        self.answer = answer

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        if self.answer is not None:
            return self.answer
        return {"length": pa.array([t and len(t) for t in block.column("text_content").to_pylist()], pa.int64())}


LENGTHS = DatasetSchema(annotator_columns=_Lengths.columns)


def test_annotator_columns_reach_filters_and_output(make_table):
    """A filter can judge by an annotator's column, and the kept rows carry it."""

    class Short(Filter):
        name = "short"

        def judge(self, block: Block) -> Iterable[Drop]:
            lengths = block.column("length").to_pylist()
            return [Drop(row, "short", n) for row, n in enumerate(lengths) if n is not None and n < 3]

    table = make_table({"a": [("text", "xy"), ("text", "long")]})
    stream = _apply([table], filters=[Short()], annotators=[_Lengths()], schema=LENGTHS)
    batches = list(stream)
    assert all(b.schema.equals(LENGTHS.filtered_schema()) for b in batches)
    assert [r["length"] for b in batches for r in b.to_pylist()] == [None, 4]


def test_annotator_columns_follow_the_schemas_order(make_table):
    """Columns stand as the dataset's schema has them, not in the order in which annotators happen to run."""
    early = _Lengths()
    late = build_annotator({"type": "content_hash"}, where="w", key="k")
    schema = DatasetSchema(annotator_columns=(*late.columns, *early.columns))
    table = make_table({"a": [("text", "xy")]})
    (batch,) = _apply([table], annotators=[late, early], schema=schema)
    assert batch.schema.names[-2:] == ["content_sha256", "length"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "returned no column 'length'"),
        ({"length": pa.array([1], pa.int64())}, "has 1, expected an Arrow array of 2 values"),
        ({"length": [1, 2]}, "has list, expected an Arrow array of 2 values"),
        ({"length": pa.array([1.0, 2.0])}, "is double, expected int64"),
    ],
)
def test_a_wrong_annotation_is_the_annotators_error(make_table, answer, message):
    """A column that is missing, of another length or type stops the run and names the annotator."""
    with pytest.raises(FilterError, match=f"^lengths: .*{message}"):
        list(_apply([make_table({"a": [("text", "x")]})], annotators=[_Lengths(answer)], schema=LENGTHS))


def test_annotators_must_fill_the_schemas_columns():
    """Annotators that make other columns than the dataset's schema has are refused before a row is read."""
    with pytest.raises(SchemaMismatchError, match="length"):
        _apply([], annotators=[_Lengths()])
    with pytest.raises(SchemaMismatchError, match="length"):
        _apply([], schema=LENGTHS)


def test_any_row_filter_can_cost_the_whole_sample(make_table, image):
    """With `scope: sample` a filter of rows drops the sample of a row that it names, with its reason and value."""
    samples = {"a": [("text", "x"), ("image", image(10, 10)), ("image", image(30, 10))], "b": [("image", image(9, 9))]}
    kept, dropped = _run(_apply([make_table(samples)], filters=[_filter(type="aspect_ratio", scope="sample")]))
    assert {row["sample_id"] for row in kept} == {"b"}
    assert [(d["sample_id"], d["position"], d["reason"], d["value"]) for d in dropped] == [
        ("a", position, "above_max", 3.0) for position in (-1, 0, 1, 2)
    ]
    kept, dropped = _run(_apply([make_table(samples)], filters=[_filter(type="aspect_ratio", scope="row")]))
    assert [d["position"] for d in dropped] == [2]


def test_names_distinguish_two_filters_of_one_type(make_table):
    """`name` in a declaration is what the dropped rows and the counts carry."""
    few = _filter(type="text_length", max_chars=2, name="few")
    assert few.name == "few"
    _, dropped = _run(_apply([make_table({"a": [("text", "abc")]})], filters=[few]))
    assert dropped[0]["filter"] == "few"


# Real shards


@pytest.mark.parametrize("shard", ["captions-00000.tar", "docs-00000.tar", "speech-00000.tar"])
def test_a_real_shard_gives_the_same_rows_in_both_modes(demo_shards: Path, shard: str):
    """From tar to filtered rows, content at hand and content fetched late give equal tables and equal drops."""
    annotators = [{"type": "text_length"}, {"type": "image_size"}, {"type": "content_hash"}]
    filters = [
        {"type": "aspect_ratio", "min": 0.5, "max": 1.5},
        {"type": "text_length", "min_words": 3},
        {"type": "blur", "min": 300},
        {"type": "audio_duration", "max_seconds": 3},
        {"type": "exact_duplicates", "scope": "row"},
    ]

    def filtered(*, late: bool) -> tuple[pa.Table, list[tuple], dict[str, int]]:
        made = [build_annotator(c, where="w", key="k") for c in annotators]
        schema = DatasetSchema(annotator_columns=tuple(c for a in made for c in a.columns))
        with SourceFile(str(demo_shards / shard)) as source:
            tar = TarSource(source)
            rows = MemberRows([tar]).rows(
                lambda: index_members(tar), layout=MemberRules(user_columns=()), schema=schema, batch_bytes=BATCH
            )

            def fill(batches):
                return MaterializeStream(batches, open_file=lambda _: source, allowed=lambda _: True, batch_bytes=BATCH)

            stream = FilterStream(
                sample_groups(rows if late else fill(rows), batch_bytes=BATCH),
                annotators=made,
                filters=[build_filter(c, where="w", key="k") for c in filters],
                schema=schema,
                fetch=fill if late else None,
                batch_bytes=BATCH,
            )
            kept = pa.Table.from_batches(list(stream), schema=schema.filtered_schema())
        dropped = [tuple(row.values()) for part in stream.take_dropped() for row in part.to_pylist()]
        return kept, sorted(dropped), stream.counts

    here, late = filtered(late=False), filtered(late=True)
    assert here[0].equals(late[0])
    assert here[1:] == late[1:]
    assert here[2]["kept"] > 0
    assert here[2]["dropped"] > 0
