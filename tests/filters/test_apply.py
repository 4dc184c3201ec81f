"""The stream of filters and annotators: what is dropped with what, in which order, and what is refused."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pytest

from mm_assets.errors import ConfigError, FilterError, SchemaMismatchError
from mm_assets.filters.base import Annotator, Block, Filter
from mm_assets.filters.registry import build_annotator
from mm_assets.rows.schema import DROPPED_SCHEMA, DatasetSchema, Drop, UserColumn
from mm_assets.rows.source_ref import build_source_ref

from .streams import Marked, apply, declared, key_of, run_stream


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
    stream = apply([table])
    batches = list(stream)
    assert pa.Table.from_batches(batches).equals(table)
    assert stream.take_dropped() == []
    assert stream.counts == {"rows": 5, "samples": 2, "kept": 5, "kept_samples": 2, "dropped": 0}


def test_row_scope_drops_rows_and_leaves_their_sample(make_table):
    """A drop of a content row costs that row alone; it is listed with filter, reason and value, and counted."""
    table = make_table({"a": [("text", "ax"), ("text", "b")], "b": [("text", "c")]})
    stream = apply([table], filters=[Marked()])
    kept, dropped = run_stream(stream)
    assert [key_of(r) for r in kept] == [
        ("a", -1, "metadata"),
        ("a", 1, "text"),
        ("b", -1, "metadata"),
        ("b", 0, "text"),
    ]
    expected = {"filter": "marked", "reason": "has_x", "value": 1.0, "detail": None}
    assert dropped == [{"sample_id": "a", "position": 0, "modality": "text", **expected}]
    assert stream.counts == {
        "rows": 5, "samples": 2, "kept": 4, "kept_samples": 2, "dropped": 1, "dropped.marked.has_x": 1
    }  # fmt: skip


def test_sample_scope_drops_every_row_of_the_sample(make_table):
    """One drop takes the whole sample out, its metadata row included, and lists each row."""
    table = make_table({"a": [("text", "ax"), ("text", "b")], "b": [("text", "c")]})
    kept, dropped = run_stream(apply([table], filters=[Marked(scope="sample")]))
    assert {r["sample_id"] for r in kept} == {"b"}
    assert [key_of(r) for r in dropped] == [("a", -1, "metadata"), ("a", 0, "text"), ("a", 1, "text")]
    assert {(r["filter"], r["reason"], r["value"]) for r in dropped} == {("marked", "has_x", 1.0)}


def test_a_drop_of_the_metadata_row_takes_the_sample(make_table):
    """A metadata row is never dropped alone: a row filter that names it drops its sample, other verdicts aside."""
    table = make_table({"a": [("text", "x"), ("text", "y")], "b": [("text", "z")]})
    kept, dropped = run_stream(apply([table], filters=[_Answers([Drop(1, "own", 1), Drop(0, "meta", None)])]))
    assert {r["sample_id"] for r in kept} == {"b"}
    assert [r["reason"] for r in dropped] == ["meta"] * 3


def test_a_sample_without_content_goes_with_its_metadata_row(make_table):
    """The rows that are left of a sample without content are listed under the filter ``empty_sample``."""
    table = make_table({"a": [("text", "x")], "b": [], "c": [("text", "y")]})
    kept, dropped = run_stream(apply([table], filters=[Marked()]))
    assert {r["sample_id"] for r in kept} == {"c"}
    assert [(key_of(r), r["filter"], r["reason"]) for r in dropped] == [
        (("a", -1, "metadata"), "empty_sample", "all_filtered"),
        (("a", 0, "text"), "marked", "has_x"),
        (("b", -1, "metadata"), "empty_sample", "no_content_rows"),
    ]


def test_empty_samples_can_be_kept(make_table):
    """With on_empty_sample "keep" the metadata rows of such samples stay."""
    table = make_table({"a": [("text", "x")], "b": []})
    kept, dropped = run_stream(apply([table], filters=[Marked()], on_empty_sample="keep"))
    assert [key_of(r) for r in kept] == [("a", -1, "metadata"), ("b", -1, "metadata")]
    assert len(dropped) == 1


def test_of_several_drops_of_one_row_the_first_counts(make_table):
    """A row that a filter names twice is listed once, and later filters do not see it."""
    table = make_table({"a": [("text", "x"), ("text", "y")]})
    again = _Answers([Drop(1, "first", 1), Drop(1, "second", 2)])
    kept, dropped = run_stream(apply([table], filters=[again, Marked(mark="x")]))
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
        list(apply([make_table({"a": [("text", "x")]})], filters=[_Answers([drop])]))


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
        run_stream(apply([table], **options))
    assert isinstance(caught.value.__cause__, ValueError)


def test_rows_that_failed_to_materialize_follow_the_policy(make_table):
    """Errors are kept, dropped, or take their sample, under the filter ``materialize``, before content filters run."""
    table = make_table({"a": [("image", None), ("text", "x")], "b": [("text", "y")]})
    late = Marked(late=True)
    assert run_stream(apply([table]))[1] == []
    row = run_stream(apply([table], on_materialize_error="drop_row"))[1]
    assert [(key_of(r), r["filter"]) for r in row] == [(("a", 0, "image"), "materialize")]
    sample = run_stream(apply([table], on_materialize_error="drop_sample", filters=[late]))[1]
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
    kept, dropped = run_stream(apply([table], filters=[Marked(late=True)], packable=packable))
    assert seen == [4]
    assert {r["sample_id"] for r in kept} == {"b"}
    assert [(r["filter"], r["reason"]) for r in dropped] == [
        ("empty_sample", "no_content_rows"), ("marked", "has_x"), ("packable", "unpackable_image")
    ]  # fmt: skip


def test_renumbering_closes_gaps_and_keeps_equal_positions_equal(make_table):
    """Positions become dense ranks within each sample; the dropped list keeps the positions of the source."""
    items = [("text", (3, "a")), ("image", (3, b"i")), ("text", (5, "x")), ("text", (9, "b"))]
    table = make_table({"a": items, "b": [("text", (7, "c"))]})
    kept, dropped = run_stream(apply([table], filters=[Marked()], renumber=True))
    assert [r["position"] for r in kept] == [-1, 0, 0, 1, -1, 0]
    assert [r["position"] for r in dropped] == [5]
    assert [r["position"] for r in run_stream(apply([table], filters=[Marked()]))[0]] == [-1, 3, 3, 9, -1, 7]


def test_state_lasts_over_the_blocks_of_a_run(make_table):
    """One instance sees all blocks of the partition in order, so a stateful filter knows the rows before."""
    first, second = make_table({"a": [("text", "same")]}), make_table({"b": [("text", "same")]})
    one = declared(type="exact_duplicates")
    kept, dropped = run_stream(apply([first, second], filters=[one]))
    assert {r["sample_id"] for r in kept} == {"a"}
    assert {r["sample_id"] for r in dropped} == {"b"}
    again = run_stream(apply([first, second], filters=[declared(type="exact_duplicates")]))
    assert again == (kept, dropped)


def test_empty_blocks_and_no_blocks_pass(make_table):
    """A partition without rows gives no batches, with filters and annotators of both kinds."""
    configs = ["text_length", "image_to_text_ratio", "content_hash", "image_size"]
    annotators = [build_annotator({"type": kind}, where="w", key="k") for kind in configs]
    schema = DatasetSchema(annotator_columns=tuple(c for a in annotators for c in a.columns))
    for blocks in ([], [make_table({})], [make_table({}), make_table({})]):
        filters = [declared(type="image_to_text_ratio", max=1), declared(type="aspect_ratio")]
        stream = apply(blocks, filters=filters, annotators=annotators, schema=schema, renumber=True)
        assert list(stream) == []
        assert stream.counts["rows"] == 0


def test_samples_of_metadata_alone_can_be_renumbered(make_table):
    """Renumbering leaves metadata rows at -1 where there is nothing else."""
    kept, _ = run_stream(apply([make_table({"a": [], "b": []})], on_empty_sample="keep", renumber=True))
    assert [r["position"] for r in kept] == [-1, -1]


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


# Contracts of the run
def test_dropped_rows_have_their_schema(make_table):
    """Dropped rows come as batches of DROPPED_SCHEMA, null value where a filter gives none."""
    stream = apply([make_table({"a": [("text", "x")]})], filters=[Marked()])
    assert list(stream) == []
    parts = stream.take_dropped()
    assert all(part.schema.equals(DROPPED_SCHEMA) for part in parts)
    assert [row["value"] for part in parts for row in part.to_pylist()] == [None, 0.0]
    assert stream.take_dropped() == []


@pytest.mark.parametrize("late", [False, True])
def test_dropped_rows_are_in_the_order_of_the_input(make_table, late):
    """The order is that of the rows, whichever filter drops each and however samples are divided into blocks."""
    samples = {
        key: [("text", "xy"[number % 2]), ("text", "z" if key == "c" else "")] for number, key in enumerate("abcdefg")
    }
    table = make_table(samples)
    found = []
    for cuts in ([0, 21], [0, 3, 21], [0, 6, 9, 15, 21]):
        blocks = [table.slice(start, stop - start) for start, stop in itertools.pairwise(cuts)]
        filters = [Marked(mark="y", late=True), Marked(mark="x"), Marked(mark="z", scope="sample", late=late)]
        fetch = (lambda batches: batches) if late else None
        found.append(run_stream(apply(blocks, filters=filters, fetch=fetch))[1])
    assert found[0] == found[1] == found[2]
    order = [key_of(row) for row in table.to_pylist()]
    assert [order.index(key_of(row)) for row in found[0]] == sorted(order.index(key_of(row)) for row in found[0])
    assert len({row["filter"] + row["reason"] for row in found[0]}) == 3


def test_user_columns_pass(make_table):
    """Columns of the dataset's own, lists among them, come out as they went in."""
    schema = DatasetSchema(
        user_columns=(
            UserColumn(name="url", source="url", type="string"),
            UserColumn(name="scores", source="scores", type="list<double>"),
        )
    )
    table = make_table({"a": [("text", "x"), ("text", "y")]}, schema=schema)
    for name, values in (("url", ["u", None, None]), ("scores", [[1.0, 2.0], None, None])):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(values))
    kept, _ = run_stream(apply([table], filters=[Marked()], schema=schema))
    assert [(r["url"], r["scores"]) for r in kept] == [("u", [1.0, 2.0]), (None, None)]


def test_a_block_with_other_columns_is_refused(make_table):
    """Rows that do not have the dataset's columns are refused with the first column that differs."""
    table = make_table({"a": [("text", "x")]})
    with pytest.raises(SchemaMismatchError, match=r"further columns \['more'\]"):
        list(apply([table.append_column("more", pa.nulls(2))]))
    with pytest.raises(SchemaMismatchError, match=r"column 8 is .*source.*, expected .*materialize_error"):
        list(apply([table.drop_columns(["materialize_error"])]))
    with pytest.raises(SchemaMismatchError, match=r"column 0 is .*int64"):
        list(apply([table.set_column(0, "sample_id", pa.array([1, 2]))]))


def test_a_sample_split_over_blocks_is_refused(make_table):
    """Blocks hold whole samples; one that goes on in the next block would be judged twice, so it is refused."""
    table = make_table({"a": [("text", "x"), ("text", "y")]})
    with pytest.raises(SchemaMismatchError, match="sample 'a' is split"):
        list(apply([table.slice(0, 2), table.slice(2)]))


def test_a_stream_is_iterated_once(make_table):
    """A second pass would find filters with the first one's state, so it is refused."""
    stream = apply([make_table({"a": [("text", "x")]})])
    list(stream)
    with pytest.raises(FilterError, match="once"):
        list(stream)


@pytest.mark.parametrize("option", ["on_empty_sample", "on_materialize_error"])
def test_wrong_policies_are_refused(option):
    """A policy that does not exist is refused with those that do."""
    with pytest.raises(ConfigError, match=rf"{option}: is 'explode', allowed: .*keep"):
        apply([], **{option: "explode"})


def test_any_row_filter_can_cost_the_whole_sample(make_table, image):
    """With `scope: sample` a filter of rows drops the sample of a row that it names, with its reason and value."""
    samples = {"a": [("text", "x"), ("image", image(10, 10)), ("image", image(30, 10))], "b": [("image", image(9, 9))]}
    kept, dropped = run_stream(apply([make_table(samples)], filters=[declared(type="aspect_ratio", scope="sample")]))
    assert {row["sample_id"] for row in kept} == {"b"}
    assert [(d["sample_id"], d["position"], d["reason"], d["value"]) for d in dropped] == [
        ("a", position, "above_max", 3.0) for position in (-1, 0, 1, 2)
    ]
    kept, dropped = run_stream(apply([make_table(samples)], filters=[declared(type="aspect_ratio", scope="row")]))
    assert [d["position"] for d in dropped] == [2]


def test_names_distinguish_two_filters_of_one_type(make_table):
    """`name` in a declaration is what the dropped rows and the counts carry."""
    few = declared(type="text_length", max_chars=2, name="few")
    assert few.name == "few"
    _, dropped = run_stream(apply([make_table({"a": [("text", "abc")]})], filters=[few]))
    assert [row["filter"] for row in dropped] == ["empty_sample", "few"]
