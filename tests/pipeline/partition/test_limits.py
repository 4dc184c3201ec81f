"""Limits on losses: a partition that loses more than its declaration allows is not published."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS, RAW_SHARDS, ROWS
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import losses
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..chain import at_work, declare, record_name, run_partition

MEMBERS = {f"{n}.txt": b"a text that stays" for n in range(8)} | {"8.txt": b"short", "9.json": b"{broken"}
FILTERS = [{"type": "text_length", "min_chars": 10}]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine texts, one of them short, a JSON that cannot be read, and a folder with a file of the system."""
    path = tmp_path_factory.mktemp("shard") / "s.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in MEMBERS.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        tar.addfile(tarfile.TarInfo("d/.DS_Store"))
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    return path


@pytest.mark.parametrize("limits", [{}, {"max_rejected": 1, "max_dropped": "20%"}], ids=["none", "wide"])
def test_a_partition_within_its_limits_is_published(shard: Path, tmp_path: Path, limits: dict) -> None:
    """What is lost within the limits, or without any, stops nothing; what cannot have been data does not count."""
    dataset = DatasetStore(declare(tmp_path, shard, filters=FILTERS, **limits))
    register(dataset)
    run_partition(dataset, "s")
    assert json.loads(dataset.store.read_bytes(record_name(dataset, "s")))["num_samples"] == 8
    kinds = [(loss.kind, loss.reason) for loss in losses(DatasetState(dataset), ["s"])]
    assert kinds.count(("harmless", "directory")) == kinds.count(("harmless", "system file")) == 1
    assert kinds.count(("lost", "bad_json")) == 1


@pytest.mark.parametrize(
    ("stage", "limit", "said"),
    [
        (ROWS, {"max_rejected": "1%"}, "max_rejected: 1 of 19 items rejected (5.263 %), at most 1% allowed"),
        (FILTERED_ROWS, {"max_dropped": 1}, "max_dropped: 2 of 18 items dropped (11.11 %), at most 1 allowed"),
    ],
    ids=["rejected", "dropped"],
)
def test_a_partition_beyond_a_limit_is_not_published(
    shard: Path, tmp_path: Path, stage, limit: dict, said: str
) -> None:
    """The stage fails with figures, limit and the command that lists the losses, which are listed item by item."""
    dataset = DatasetStore(declare(tmp_path, shard, filters=FILTERS, **limit))
    register(dataset)
    for one, make in stages.TABLE_STAGES.items():
        result = at_work(make, dataset, "s")
        if one is stage:
            break
    assert not result.passed
    (failed,) = (outcome for outcome in result.outcomes if not outcome.passed)
    assert failed.name == "losses"
    said = f"{said}: `mm-assets losses --dataset data --partition s` lists them"
    assert failed.violations == ({"problem": said},)
    with pytest.raises(SourceError, match=f"{stage.name} failed its check losses"):
        at_work(stages.packed if stage is FILTERED_ROWS else stages.materialized_rows, dataset, "s")
    with pytest.raises(SourceError, match=f"{stage.name} failed its check losses"):
        at_work(publish.publish, dataset, "s")
    listed = list(losses(DatasetState(dataset), ["s"]))
    assert [loss.detail for loss in listed if loss.reason == "failed"] == [f"check losses: {said}"]
    assert [loss.advice for loss in listed if loss.reason == "failed"] == [
        f"correct the shard, or raise {stage.loss_limit}"
    ]
    assert any(loss.member == "9.json" for loss in listed)


def test_a_limit_changes_the_digest_of_its_stage_alone(shard: Path, tmp_path: Path) -> None:
    """A limit counts from the stage on that it limits."""
    spec = declare(tmp_path, shard)
    rejected, dropped = spec.replace(max_rejected=3), spec.replace(max_dropped="3%")
    assert RAW_SHARDS.digest(spec) == RAW_SHARDS.digest(rejected)
    assert ROWS.digest(spec) == ROWS.digest(dropped) != ROWS.digest(rejected)
    assert FILTERED_ROWS.digest(spec) != FILTERED_ROWS.digest(dropped)


@pytest.mark.parametrize("limit", [-1, True, 1.5, "1", "101%", "-1%", "1 %", "%", "1e2%", "0.1234567%", [], "\u0661%"])
def test_a_limit_is_a_number_or_a_percentage(limit: object) -> None:
    """Anything else is refused with the key, what was found and what is allowed."""
    with pytest.raises(ConfigError, match=r"max_dropped.* expected a whole number of at least 0, or a percentage"):
        declare(Path("root"), "shards", max_dropped=limit)
