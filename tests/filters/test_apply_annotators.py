"""Columns of annotators: they reach filters and output in the schema's order, or are refused."""

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pytest

from mm_assets.errors import FilterError, SchemaMismatchError
from mm_assets.filters.base import Annotator, Block, Filter
from mm_assets.filters.registry import build_annotator
from mm_assets.rows.schema import DatasetSchema, Drop, UserColumn

from .streams import apply


def test_annotators_may_answer_in_chunks(make_table):
    """A chunked column is as good as one array."""
    table = make_table({"a": [("text", "xy")]})
    answer = {"length": pa.chunked_array([[1], [2]], pa.int64())}
    (batch,) = apply([table], annotators=[_Lengths(answer)], schema=LENGTHS)
    assert batch.column("length").to_pylist() == [1, 2]


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
    stream = apply([table], filters=[Short()], annotators=[_Lengths()], schema=LENGTHS)
    batches = list(stream)
    assert all(b.schema.equals(LENGTHS.filtered_schema()) for b in batches)
    assert [r["length"] for b in batches for r in b.to_pylist()] == [None, 4]


def test_annotator_columns_follow_the_schemas_order(make_table):
    """Columns stand as the dataset's schema has them, not in the order in which annotators happen to run."""
    early = _Lengths()
    late = build_annotator({"type": "content_hash"}, where="w", key="k")
    schema = DatasetSchema(annotator_columns=(*late.columns, *early.columns))
    table = make_table({"a": [("text", "xy")]})
    (batch,) = apply([table], annotators=[late, early], schema=schema)
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
        list(apply([make_table({"a": [("text", "x")]})], annotators=[_Lengths(answer)], schema=LENGTHS))


def test_annotators_must_fill_the_schemas_columns():
    """Annotators that make other columns than the dataset's schema has are refused before a row is read."""
    with pytest.raises(SchemaMismatchError, match="length"):
        apply([], annotators=[_Lengths()])
    with pytest.raises(SchemaMismatchError, match="length"):
        apply([], schema=LENGTHS)
