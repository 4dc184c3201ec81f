"""Late fetching: filters that need no content run first, and only what they leave is fetched."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import SchemaMismatchError
from mm_assets.filters.apply import FilterStream
from mm_assets.filters.base import Block, Filter
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.parquet import sample_groups
from mm_assets.rows.schema import DatasetSchema, Drop, MemberRules
from mm_assets.sources.base import index_members
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile

from .streams import Marked, apply, declared, key_of, run_stream

BATCH = 1 << 18  # so small that a shard gives several blocks


# Order of work, fetching late
def _strip(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index("binary_content")
    return table.set_column(place, table.schema.field(place), pa.nulls(table.num_rows, pa.large_binary()))


def _fetcher(table: pa.Table, asked: list, *, rows: int):
    """A `fetch` that fills content from a full table, in batches that do not respect samples."""
    content = {key_of(r): r["binary_content"] for r in table.to_pylist()}

    def fetch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for start in range(0, batch.num_rows, rows):
                part = pa.Table.from_batches([batch.slice(start, rows)])
                keys = [key_of(r) for r in part.to_pylist()]
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
        return [declared(type="aspect_ratio"), Marked(scope="sample"), declared(type="exact_duplicates", scope="row")]

    here = apply(tables, filters=config())
    asked: list = []
    fetch = _fetcher(pa.concat_tables(tables), asked, rows=2)
    late = apply([_strip(t) for t in tables], filters=config(), fetch=fetch, batch_bytes=64)
    (kept, dropped), (late_kept, late_dropped) = run_stream(here), run_stream(late)
    assert late_kept == kept
    assert sorted(map(key_of, late_dropped)) == sorted(map(key_of, dropped))
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
    run_stream(apply([table], filters=[Spy("content", late=True), waiting, Spy("free", late=False)]))
    assert order == [("free", False), ("content", True), ("waiting", True)]


def test_after_content_puts_a_filter_in_its_place(make_table, image):
    """A ratio that is to count only what an image filter left is judged after it."""
    table = make_table({"a": [("image", image(90, 10)), ("image", image(10, 10)), ("text", "one")]})
    shape = {"type": "aspect_ratio"}
    ratio = {"type": "image_to_text_ratio", "max": 1.0}
    first = run_stream(apply([table], filters=[declared(**shape), declared(**ratio)]))
    after = run_stream(apply([table], filters=[declared(**shape), declared(**ratio, after_content=True)]))
    assert len(first[0]) == 0
    assert [key_of(r) for r in after[0]] == [("a", -1, "metadata"), ("a", 1, "image"), ("a", 2, "text")]


def test_what_fetch_leaves_out_is_its_own_to_report(make_table):
    """Rows missing from the output of `fetch` are neither kept nor listed, and a sample emptied by it goes."""
    table = make_table({"a": [("image", b"1")], "b": [("image", b"2")]})

    def fetch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, 1)
            yield batch.slice(2, 2)

    kept, dropped = run_stream(apply([table], fetch=fetch))
    assert {r["sample_id"] for r in kept} == {"b"}
    assert [(key_of(r), r["filter"]) for r in dropped] == [(("a", -1, "metadata"), "empty_sample")]


def test_blocks_are_taken_one_at_a_time(make_table):
    """The stream is lazy: a block is read when the one before has been handed on, so memory stays bounded."""
    taken = []

    def blocks() -> Iterator[pa.Table]:
        for number in range(5):
            taken.append(number)
            yield make_table({f"s{number}": [("text", "y" if number % 2 else "x")]})

    stream = iter(apply(blocks(), filters=[Marked()]))
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
    return [Marked(**{k: v for k, v in c.items() if k != "kind"}) if "kind" in c else declared(**c) for c in configs]


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
    stream = apply(blocks, filters=_made(configs), **policy)
    kept, dropped = run_stream(stream)
    source = [key_of(row) for block in blocks for row in block.to_pylist()]
    kept_keys, dropped_keys = [key_of(row) for row in kept], [key_of(row) for row in dropped]
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
    late = apply([_strip(b) for b in blocks], filters=_made(configs), fetch=fetch, batch_bytes=64, **policy)
    late_kept, late_dropped = run_stream(late)
    assert late_kept == kept
    assert Counter(map(json.dumps, late_dropped)) == Counter(map(json.dumps, dropped))


def test_a_fetch_that_loses_columns_is_refused(make_table):
    """What comes back from `fetch` must have the columns that went in."""
    table = make_table({"a": [("text", "x")]})

    def fetch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from pa.Table.from_batches([batch]).drop_columns(["metadata_json"]).to_batches()

    with pytest.raises(SchemaMismatchError, match="fetched"):
        list(apply([table], fetch=fetch))


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
