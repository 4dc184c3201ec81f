"""What every filter and every annotator promises, as tests: subclass `FilterSuite` or `AnnotatorSuite`.

Rows are written down by `make_rows`. The promises are checked on the cases of the subclass and on rows of any kind that
Hypothesis makes: content that is missing, empty or not what its modality says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_assets.errors import ConfigError
from mm_assets.fields.user_code import is_own
from mm_assets.filters import Annotator, Block, Drop, Filter, FilterStream, build_annotator, build_filter
from mm_assets.rows.schema import DatasetSchema

__all__ = ["AnnotatorSuite", "FilterSuite", "Samples", "make_rows"]

Samples: TypeAlias = Mapping[str, Sequence[tuple[str, Any]]]
"""Sample id to its content rows: (row modality, content), or (row modality, (position, content))."""

_MODALITIES = ("text", "image", "audio", "video", "array")


def make_rows(samples: Samples, *, schema: DatasetSchema | None = None) -> pa.Table:
    """A row table, with a metadata row for each sample.

    Args:
        samples: content is text for text rows and bytes for others; None where it could not be materialized. Positions
            that are not given count from 0.
        schema: of the dataset; by default one without columns of its own.
    """
    rows: list[dict[str, Any]] = []
    for sample_id, items in samples.items():
        rows.append({"sample_id": sample_id, "position": -1, "modality": "metadata", "metadata_json": "{}"})
        for place, (modality, given_content) in enumerate(items):
            is_placed = isinstance(given_content, tuple)
            position, content = given_content if is_placed else (place, given_content)
            row = {"sample_id": sample_id, "position": position, "modality": modality}
            if modality == "text":
                row["text_content"] = content
            elif content is None:
                row["materialize_error"] = "member 'x': short"
            else:
                row["binary_content"] = content
            rows.append(row)
    return pa.Table.from_pylist(rows, schema=(schema or DatasetSchema()).row_schema())


def _contents(modality: str) -> st.SearchStrategy[tuple[str, Any]]:
    content: st.SearchStrategy[Any] = st.binary(max_size=40)
    if modality == "text":
        content = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
    return st.tuples(st.just(modality), st.none() | content)


_ANY_SAMPLES: st.SearchStrategy[dict[str, list[tuple[str, Any]]]] = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.lists(st.sampled_from(_MODALITIES).flatmap(_contents), max_size=5),
    max_size=4,
)
# A suite's method runs in each of its subclasses, which Hypothesis would take for a mistake.
_SETTINGS = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.differing_executors])


def _without_bytes(table: pa.Table) -> pa.Table:
    """The rows as they are before content is fetched."""
    index = table.schema.get_field_index("binary_content")
    empty = pa.nulls(table.num_rows, table.schema.field(index).type)
    return table.set_column(index, table.schema.field(index), empty)


class FilterSuite:
    """Tests that every filter passes.

    Attributes:
        config: the declaration, with ``type`` and parameters, as YAML has it.
        cases: pairs of samples and what is dropped of them: (sample id, position) to the reason. The metadata row is at
            position -1; each case is a partition of its own.
        bad_configs: parameters that are refused, given beside those of `config`.
    """

    config: ClassVar[dict[str, Any]]
    cases: ClassVar[list[tuple[Samples, dict[tuple[str, int], str]]]]
    bad_configs: ClassVar[list[dict[str, Any]]] = []

    def build(self, **changes: Any) -> Filter:
        """A fresh filter of `config`."""
        return build_filter({**self.config, **changes}, where="suite", key="filter")

    def test_rows_are_dropped_for_their_reasons(self) -> None:
        """Of each case exactly the expected rows are dropped, each for its reason."""
        for samples, expected in self.cases:
            stream = FilterStream(
                [make_rows(samples)],
                annotators=[],
                filters=[self.build()],
                schema=DatasetSchema(),
                on_empty_sample="keep",
            )
            list(stream)
            rows = [row for part in stream.take_dropped() for row in part.to_pylist()]
            assert {(row["sample_id"], row["position"]): row["reason"] for row in rows} == expected

    def test_reasons_are_those_that_checks_know(self) -> None:
        """A built-in filter drops for a reason that it names, or by a threshold and with a value on its other side."""
        judging = self.build()
        sides = {limit.reason: (limit.keeps, limit.value) for limit in judging.thresholds()}
        for samples, _ in self.cases if is_own(type(judging)) else ():
            for drop in self.build().judge(Block(make_rows(samples))):
                if drop.reason not in judging.reasons:
                    keeps, limit = sides[drop.reason]
                    assert drop.value is not None
                    assert drop.value < limit if keeps == "at_least" else drop.value > limit

    def test_something_is_kept_and_something_dropped(self) -> None:
        """The cases show both verdicts: a filter that drops all rows, or none, is not tested by them."""
        assert any(expected for _, expected in self.cases)
        assert any(len(expected) < make_rows(samples).num_rows for samples, expected in self.cases)

    def test_verdicts_are_the_same_each_time(self) -> None:
        """Two filters of one declaration give equal verdicts: no state is left over from another partition."""
        for samples, _ in self.cases:
            first, second = (list(self.build().judge(Block(make_rows(samples)))) for _ in range(2))
            assert first == second

    @_SETTINGS
    @given(samples=_ANY_SAMPLES)
    def test_any_rows_are_judged(self, samples: Samples) -> None:
        """Whatever rows come, a verdict names a row of the block and a reason, and the block stays as it was."""
        table = make_rows(samples)
        judging = self.build()
        for drop in judging.judge(Block(table)):
            assert isinstance(drop, Drop)
            assert 0 <= drop.row < table.num_rows
            assert re.fullmatch(r"[a-z0-9_]+", drop.reason)
            assert drop.value is None or math.isfinite(drop.value)
        assert table.equals(make_rows(samples))
        assert judging.name
        assert judging.scope in ("row", "sample")

    @_SETTINGS
    @given(samples=_ANY_SAMPLES)
    def test_bytes_are_read_only_where_declared(self, samples: Samples) -> None:
        """A filter without `needs_content` runs before content is fetched: bytes make no difference to it."""
        table = make_rows(samples)
        if not self.build().needs_content:
            before, after = (list(self.build().judge(Block(rows))) for rows in (_without_bytes(table), table))
            assert before == after

    def test_bad_parameters_are_refused(self) -> None:
        """An unknown parameter or a wrong value is a ConfigError that names the place in the declaration."""
        for changes in [{"no_such_parameter": 1}, *self.bad_configs]:
            with pytest.raises(ConfigError, match=r"suite.*filter"):
                self.build(**changes)


class AnnotatorSuite:
    """Tests that every annotator passes.

    Attributes:
        config: the declaration, with ``type`` and parameters, as YAML has it.
        cases: pairs of samples and the added columns, by name: one value for each row, metadata rows included.
        bad_configs: parameters that are refused, given beside those of `config`.
    """

    config: ClassVar[dict[str, Any]]
    cases: ClassVar[list[tuple[Samples, dict[str, list[Any]]]]]
    bad_configs: ClassVar[list[dict[str, Any]]] = []

    def build(self, **changes: Any) -> Annotator:
        """A fresh annotator of `config`."""
        return build_annotator({**self.config, **changes}, where="suite", key="annotator")

    def test_columns_have_their_values(self) -> None:
        """Of each case the added columns hold exactly the expected values, in the declared order."""
        for samples, expected in self.cases:
            built = self.build()
            schema = DatasetSchema(annotator_columns=built.columns)
            stream = FilterStream(
                [make_rows(samples)], annotators=[built], filters=[], schema=schema, on_empty_sample="keep"
            )
            kept = pa.Table.from_batches(list(stream), schema=schema.filtered_schema())
            names = [column.name for column in built.columns]
            assert names == list(expected)
            assert kept.select(names).to_pydict() == expected

    @_SETTINGS
    @given(samples=_ANY_SAMPLES)
    def test_any_rows_are_annotated(self, samples: Samples) -> None:
        """Whatever rows come, each declared column is of its type and as long as the block, which stays as it was."""
        table = make_rows(samples)
        built = self.build()
        found = built.annotate(Block(table))
        assert set(found) == {column.name for column in built.columns}
        for column in built.columns:
            assert found[column.name].type == column.arrow_type
            assert len(found[column.name]) == table.num_rows
        assert table.equals(make_rows(samples))

    @_SETTINGS
    @given(samples=_ANY_SAMPLES)
    def test_bytes_are_read_only_where_declared(self, samples: Samples) -> None:
        """An annotator without `needs_content` runs before content is fetched: bytes make no difference to it."""
        table = make_rows(samples)
        if not self.build().needs_content:
            before, after = (self.build().annotate(Block(rows)) for rows in (_without_bytes(table), table))
            assert {name: values.to_pylist() for name, values in before.items()} == {
                name: values.to_pylist() for name, values in after.items()
            }

    def test_bad_parameters_are_refused(self) -> None:
        """An unknown parameter or a wrong value is a ConfigError that names the place in the declaration."""
        for changes in [{"no_such_parameter": 1}, *self.bad_configs]:
            with pytest.raises(ConfigError, match=r"suite.*annotator"):
                self.build(**changes)
