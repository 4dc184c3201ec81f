"""What a partition costs, and a manifest of one new partition, does not depend on how many are registered.

Counted are operations and bytes, not seconds, which `benchmarks/scale` measures.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mm_assets.pipeline.partition.run import run_partition
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import build_manifest
from mm_assets.pipeline.state.records import Partition
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import Present
from mm_assets.storage.store import Store

from ..chain import declare
from ..shards import CAPTIONS, make_shard

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "scale" / "datasets.py"


@dataclass(kw_only=True)
class Counted:
    """What was done to files of the dataset.

    Attributes:
        done: by operation and the folder of the file; of a file that is not in one, its name.
        read: bytes.
    """

    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    read: int = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts from now on; to begin again, replace what it has."""
    found = Counted()

    def count(method: str) -> None:
        real = getattr(Store, method)

        def counting(self: Store, name: str, *args: Any, **options: Any) -> Any:
            found.done[method, name.split("/")[0]] += 1
            result = real(self, name, *args, **options)
            found.read += len(result) if isinstance(result, bytes) else 0
            return result

        monkeypatch.setattr(Store, method, counting)

    for method in ("_info", "_get", "open", "draft", "delete", "listing", "copy", "state", "local_path"):
        count(method)
    return found


def registered(folder: Path, number: int) -> DatasetStore:
    """A dataset of one shard among the number of registered ones, of which the others are not there."""
    make_shard(folder / "in" / "p000000.tar", CAPTIONS)
    dataset = DatasetStore(declare(folder / "root", folder / "in"))
    register(dataset)
    (first,) = dataset.partitions().values()
    (shard,) = first.shards
    others = (f"p{other:06d}" for other in range(1, number))
    stubs = [Partition(key=key, shards=(replace(shard, url=shard.url.replace(first.key, key)),)) for key in others]
    dataset.write_partitions([first, *stubs])
    return DatasetStore(dataset.spec)


def test_a_partition_costs_as_much_among_100000_as_among_1000(tmp_path: Path, counted: Counted) -> None:
    """Its worker is sent as many bytes, does the same to the same files, and reads no list of partitions."""
    costs = []
    for number in (1_000, 100_000):
        dataset = registered(tmp_path / f"{number:06d}", number)
        present = Present(dataset)
        assert len(present.pending()) == number
        task = dataset.spec, present.partitions["p000000"], present.schema, present.names.get("p000000", ())
        counted.done, counted.read = Counter(), 0
        report = run_partition(*task[:3], markers=task[3])
        assert report.ok
        assert counted.done["_get", "shards.json"] == 0
        assert counted.done["draft", "published"] == 1
        costs.append((len(pickle.dumps(task)), dict(counted.done), counted.read))
    assert costs[0] == costs[1]


def test_a_manifest_of_one_new_partition_does_the_same_among_many(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listings, the files of the dataset and those of the new partition are read, whatever else is published."""
    spec = importlib.util.spec_from_file_location("datasets", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "datasets", script)
    spec.loader.exec_module(script)
    costs = []
    for number in (10, 1_000):
        dataset, _ = script.make_dataset(script.Local(tmp_path / str(number)), number)
        assert not build_manifest(dataset).left_out
        script.withdraw_one(dataset)
        script.publish_one(dataset)
        counted.done = Counter()
        report = build_manifest(DatasetStore(dataset.spec))
        assert not report.left_out
        assert len(report.present.published()) == number
        assert counted.done["_get", "published"] <= 1
        costs.append(dict(counted.done))
    assert costs[0] == costs[1]
