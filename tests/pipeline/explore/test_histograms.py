"""Scores: histograms of measures with the limits of filters, and what other limits would keep."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mm_assets.errors import ConfigError
from mm_assets.filters.annotators import BlurAnnotator, ImageSizeAnnotator
from mm_assets.filters.image import BlurFilter, ImageSizeFilter
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.pipeline.explore.histograms import histogram, kept_by, scores
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..chain import declare, record_of, run_chain, run_once
from ..shards import make_shard, png

WIDTHS = (4, 8, 12, 16, 20, 24, 28, 32)


def write_shards(folder: Path) -> Path:
    """Two shards of image-text samples of these widths."""
    for shard, widths in (("a", WIDTHS[::2]), ("b", WIDTHS[1::2])):
        members: dict[str, object] = {}
        for width in widths:
            members[f"{width:02}.png"] = png(width, (8, width))
            members[f"{width:02}.txt"] = "x" * width
        make_shard(folder / f"{shard}.tar", members)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """Images at least 10 wide are kept; an annotator keeps the width."""
    folder = tmp_path_factory.mktemp("scores")
    spec = declare(
        folder / "root",
        write_shards(folder / "in"),
        annotators=[{"type": "image_size", "prefix": "pic_"}],
        filters=[{"type": "image_size", "min_width": 10, "max_width": 30}],
    )
    return run_chain(spec)[0]


def test_limits_are_in_the_record(dataset: DatasetStore) -> None:
    """The record of the filtered rows has each limit with its setting, and the measure of each column."""
    limits = record_of(dataset, "a").stages[FILTERED_ROWS].limits
    assert [(t["filter"], t["setting"], t["value"], t["keeps"], t["reason"]) for t in limits["thresholds"]] == [
        ("image_size", "min_width", 10.0, "at_least", "width_below_min"),
        ("image_size", "max_width", 30.0, "at_most", "width_above_max"),
    ]
    assert {"column": "pic_image_width", "measure": "image_width"} in limits["measures"]


def test_a_histogram_has_kept_and_dropped_rows_and_the_limits(dataset: DatasetStore) -> None:
    """Every width is in the bin of its value, kept or dropped, and both limits are there."""
    found = histogram(DatasetState(dataset), "pic_image_width", bins=28)
    assert (found.num_kept, found.num_dropped, found.low, found.high) == (5, 3, 4, 32)
    assert [(limit.setting, limit.value) for limit in found.score.limits] == [("min_width", 10), ("max_width", 30)]
    for width in WIDTHS:
        (bin_,) = (b for b in found.bins if b.low <= width < b.high or (width == found.high and b is found.bins[-1]))
        assert (bin_.kept > 0, bin_.dropped > 0) == (10 <= width <= 30, not 10 <= width <= 30)
    assert sum(b.kept for b in found.bins) == 5
    assert sum(b.dropped for b in found.bins) == 3


@pytest.mark.parametrize("bins", [1, 2, 7, 1000])
def test_any_number_of_bins_holds_all_values(dataset: DatasetStore, bins: int) -> None:
    """The bins join without gaps from the least to the largest value, and count each row once."""
    found = histogram(DatasetState(dataset), "pic_image_width", bins=bins)
    assert found.bins[0].low == found.low
    assert found.bins[-1].high == found.high
    assert all(one.high == other.low for one, other in zip(found.bins, found.bins[1:], strict=False))
    assert sum(b.kept + b.dropped for b in found.bins) == len(WIDTHS)


@pytest.mark.parametrize(
    ("low", "high", "kept", "exact"),
    [
        (10, 30, 5, True),
        (13, 30, 4, True),
        (13, 23, 2, True),
        (6, 30, 6, False),
        (None, None, 8, False),
        (99, None, 0, True),
    ],
)
def test_other_limits_count_exactly(
    dataset: DatasetStore, low: float | None, high: float | None, kept: int, exact: bool
) -> None:
    """Stricter limits are exact; looser ones count the rows that come back and say that they are not."""
    found = kept_by(DatasetState(dataset), "pic_image_width", at_least=low, at_most=high)
    assert (found.kept, found.total, found.is_exact) == (kept, 8, exact)
    assert bool(found.note) is not exact


def test_a_stricter_limit_keeps_what_a_run_with_it_keeps(dataset: DatasetStore, tmp_path: Path) -> None:
    """The exact count is that of a run with this limit."""
    filters = [{"type": "image_size", "min_width": 15, "max_width": 30}]
    again, _ = run_chain(declare(tmp_path / "root", write_shards(tmp_path / "in"), filters=filters))
    tables = [
        pq.read_table(again.store.path_of(record_of(again, key).tables["filtered_rows"].path)) for key in ("a", "b")
    ]
    images = sum(t["modality"].to_pylist().count("image") for t in tables)
    assert kept_by(DatasetState(dataset), "pic_image_width", at_least=15, at_most=30).kept == images == 4


def test_every_dataset_has_sizes_and_text_lengths(dataset: DatasetStore) -> None:
    """Bytes of content and characters of texts need no annotator, and one partition can be looked at alone."""
    names = [score.name for score in scores(DatasetState(dataset))]
    assert names[0] == "pic_image_width"
    assert {"content_bytes", "text_chars", "pic_image_height"} <= set(names)
    chars = histogram(DatasetState(dataset), "text_chars")
    assert (chars.num_kept, chars.low, chars.high) == (8, 4, 32)
    assert histogram(DatasetState(dataset), "text_chars", partition="a").num_kept == 4
    sizes = histogram(DatasetState(dataset), "content_bytes")
    assert sizes.num_kept == 13
    assert sizes.low == 4


def test_wrong_names_are_refused(dataset: DatasetStore) -> None:
    """A measure or partition that is not there is named with those that are."""
    with pytest.raises(ConfigError, match="pic_image_width"):
        histogram(DatasetState(dataset), 'x" or 1=1 --')
    with pytest.raises(ConfigError, match="is not a partition"):
        histogram(DatasetState(dataset), "text_chars", partition="c")


def test_without_a_column_only_dropped_rows_have_values(tmp_path: Path) -> None:
    """A filter without its annotator shows what it dropped, and says what would show the rest."""
    spec = declare(tmp_path / "root", write_shards(tmp_path / "in"), filters=[{"type": "image_size", "min_width": 10}])
    dataset, _ = run_chain(spec)
    (score,) = (s for s in scores(DatasetState(dataset)) if s.limits)
    assert (score.name, score.column) == ("image_width", None)
    found = histogram(DatasetState(dataset), "image_width")
    assert (found.num_kept, found.num_dropped, found.low, found.high) == (0, 2, 4, 8)
    assert "an annotator" in kept_by(DatasetState(dataset), "image_width", at_least=5).note


def test_a_partition_that_a_check_stopped_has_its_scores(tmp_path: Path) -> None:
    """What was measured before too much was dropped is there to choose another limit by."""
    filters = [{"type": "image_size", "min_width": 10}]
    spec = declare(tmp_path / "root", write_shards(tmp_path / "in"), filters=filters, max_dropped=0)
    dataset = DatasetStore(spec)
    register(dataset)
    assert not run_once(spec, dataset.partition("a"), dataset.schema()).ok
    found = histogram(DatasetState(dataset), "image_width")
    assert (found.num_dropped, [limit.value for limit in found.score.limits]) == (1, [10])


def test_a_filter_of_samples_counts_each_sample_once(tmp_path: Path) -> None:
    """All rows of a dropped sample carry one value, which counts once."""
    filters = [{"type": "image_size", "min_width": 10, "scope": "sample"}]
    dataset, _ = run_chain(declare(tmp_path / "root", write_shards(tmp_path / "in"), filters=filters))
    assert histogram(DatasetState(dataset), "image_width").num_dropped == 2


def test_a_measure_of_other_parameters_is_another_measure() -> None:
    """A filter and an annotator name the same measure only where they take it in the same way."""
    same = next(iter(BlurFilter(min_side=64).thresholds())).measure
    assert same in BlurAnnotator(min_side=64).measures.values()
    assert same not in BlurAnnotator(min_side=128).measures.values()
    sizes = {t.measure for t in ImageSizeFilter(min_width=1, max_height=2).thresholds()}
    assert sizes <= set(ImageSizeAnnotator(prefix="x_").measures.values())


def test_values_of_several_orders_of_magnitude_have_bins_of_equal_ratio(tmp_path: Path) -> None:
    """Each value is in its bin, zero in a first one of its own, and the bins join."""
    lengths = (1, 2, 7, 40, 300, 5000)
    members: dict[str, object] = {f"{n}.txt": "x" * n for n in lengths} | {f"{n}.json": {"n": n} for n in lengths}
    spec = declare(tmp_path / "root", make_shard(tmp_path / "in" / "a.tar", members))
    dataset, _ = run_chain(spec)
    found = histogram(DatasetState(dataset), "text_chars", bins=10)
    assert (found.is_log, found.num_kept, found.low, found.high) == (True, 6, 1, 5000)
    assert all(one.high == other.low for one, other in zip(found.bins, found.bins[1:], strict=False))
    ratios = [b.high / b.low for b in found.bins]
    assert max(ratios) == pytest.approx(min(ratios))
    for bin_ in found.bins:
        last = bin_ is found.bins[-1]
        assert bin_.kept == sum(bin_.low <= n < bin_.high or (last and n == found.high) for n in lengths)


def test_partitions_read_one_by_one_give_the_same(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Histograms and counts over many partitions are put together from some of them at a time."""
    from mm_assets.pipeline.explore import histograms as module

    def found() -> list[object]:
        names = [score.name for score in module.scores(DatasetState(dataset))]
        return [
            (
                module.histogram(DatasetState(dataset), n),
                module.kept_by(DatasetState(dataset), n, at_least=12, at_most=25),
            )
            for n in names
        ]

    expected = found()
    assert len(dataset.partitions()) > 1
    monkeypatch.setattr(module, "_TOGETHER", 1)
    assert found() == expected
