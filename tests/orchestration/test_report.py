"""What Dagster stores of a stage, a record and a manifest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mm_assets.orchestration import report
from mm_assets.pipeline.partition.stages import StageResult
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import Loss, LossTotal
from mm_assets.pipeline.state.manifests import ManifestReport
from mm_assets.pipeline.state.records import StageFailure

from ..pipeline.chain import declare, record_of, run_chain
from ..pipeline.shards import make_shard, png

HOSTILE = [2**53 + 1, -(2**63), 2**63 - 1, 0, 10**30, 1.7976931348623157e308, -1.7976931348623157e308, 5e-324]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[DatasetStore, dict[str, StageResult], ManifestReport]:
    """One partition whose columns have numbers at the ends of their types, and its manifest."""
    folder = tmp_path_factory.mktemp("report")
    members: dict[str, object] = {}
    for n, number in enumerate(HOSTILE):
        near = 0.3 if n else 0.1 + 0.2
        members[f"{n}.json"] = {"whole": number if isinstance(number, int) else 1, "real": float(number), "near": near}
        members[f"{n}.png"] = png(n, (8, 8))
    make_shard(folder / "in" / "a.tar", members)
    logger, lines = logging.getLogger("mm_assets"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    filters = [{"type": "image_size", "min_width": 1}]
    dataset, results = run_chain(declare(folder / "root", folder / "in", filters=filters))
    logger.removeHandler(handler)
    assert not lines
    return dataset, results["a"], manifests.build_manifest(dataset)


def events(made: tuple[DatasetStore, dict[str, StageResult], ManifestReport]) -> list[Any]:
    """Everything that is reported of the partition and the manifest."""
    dataset, results, manifest = made
    spec = dataset.spec
    failure = StageFailure(partition="a", stage="rows", detail="x")
    return [
        *(report.stage_result(spec, r, report.check_results(spec, r)) for r in results.values()),
        report.published_result(spec, record_of(dataset, "a")),
        report.manifest_result(spec, manifest),
        report.failed_observation(spec, failure),
    ]


def test_extreme_numbers_have_charts(made: tuple[DatasetStore, dict[str, StageResult], ManifestReport]) -> None:
    """Columns of numbers at the ends of their types are drawn on the page of the filtered rows, with exact ends."""
    _, results, _ = made
    charts = {chart.name: chart.said for chart in results["filtered_rows"].preview.charts}
    assert "0.3 to 0.3" in charts["near"]
    assert "-1.79769e+308 to 1.79769e+308" in charts["real"]


PARTS = (
    "counts_table",
    "text_table",
    "markdown_table",
    "rows_table",
    "sample_value",
    "chart_value",
    "escaped_in_line",
    "masked_urls",
    "viewer_link",
    "bytes_said",
    "listed_totals",
    "loss_tables",
    "modality_columns",
    "_streams_table",
    "_violations",
    "_own_columns",
    "_advice",
)


@pytest.mark.parametrize("part", PARTS)
def test_an_exception_costs_only_its_entries(
    part: str,
    made: tuple[DatasetStore, dict[str, StageResult], ManifestReport],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever raises while metadata are drawn, events keep their asset, data version and check results."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    before = events(made)
    monkeypatch.setattr(report, part, broken)
    for one, other in zip(before, events(made), strict=True):
        assert one.asset_key == other.asset_key
        if isinstance(one, dg.MaterializeResult):
            assert one.data_version == other.data_version
            assert [c.passed for c in one.check_results or ()] == [c.passed for c in other.check_results or ()]
        assert set(other.metadata or ()) <= set(one.metadata or ())


def test_what_filters_dropped_is_not_among_the_losses() -> None:
    """A row that a declared filter dropped and a member that was lost are in tables of their own."""
    dropped = Loss(partition="a", stage="filtered_rows", reason="text_length.chars_below_min")
    lost = Loss(partition="a", stage="rows", reason="no_modality")
    tables = report.loss_tables([LossTotal(example=loss, count=2) for loss in (dropped, lost)])
    assert {name: table.md_str.count("\n") for name, table in tables.items()} == {"losses": 2, "dropped": 2}
    assert "no_modality" in tables["losses"].md_str
    assert "chars_below_min" in tables["dropped"].md_str
    assert {table.md_str for table in report.loss_tables([]).values()} == {"nothing"}


def test_the_losses_of_a_failure_cost_only_themselves(tmp_path: Path) -> None:
    """If the storage failed, the message that says so has no table, and no other error takes its place."""
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    dataset.store.write_bytes("shards.json", b"{")
    assert report.losses_of_failed(dataset, ["a"]) == {}
