"""What a partition costs, and a manifest of one new partition, does not depend on how many are registered.

Counted are operations and bytes, not seconds, which `benchmarks/scale` measures.
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import build_manifest
from mm_assets.pipeline.state.records import Partition
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.store import Store

from ..chain import declare, run_once
from ..shards import CAPTIONS, make_shard

FIRST, LAST = "p000000", "p999999"
NUM_SAMPLES = 4  # of CAPTIONS


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

    for method in ("_info", "_get", "open", "draft", "create", "delete", "listing", "copy", "state", "local_path"):
        count(method)
    return found


def registered(folder: Path, number: int) -> DatasetStore:
    """A dataset of two shards among a number of registered ones, the others of which do not exist."""
    for key in (FIRST, LAST):
        make_shard(folder / "in" / f"{key}.tar", CAPTIONS)
    dataset = DatasetStore(declare(folder / "root", folder / "in"))
    register(dataset)
    first, last = dataset.partitions().values()
    (shard,) = first.shards
    others = (f"p{other:06d}" for other in range(1, number - 1))
    stubs = [Partition(key=key, shards=(replace(shard, url=shard.url.replace(FIRST, key)),)) for key in others]
    dataset.write_partitions([first, *stubs, last], dataset.registered())
    return DatasetStore(dataset.spec)


def publish_others(dataset: DatasetStore) -> None:
    """Publishes all partitions but the last with the files of the first."""
    assert run_once(dataset.spec, dataset.partition(FIRST), dataset.schema()).ok
    root, recipes = Path(dataset.store.path_of("")), DatasetState(dataset).recipes
    record = dataset.store.read_bytes(dataset.record_name(FIRST, recipes[FIRST])).decode()
    files = [path for path in root.glob(f"*/{FIRST}.*") if path.parent.name != "records"]
    for key in recipes.keys() - {FIRST, LAST}:
        for path in files:
            path.with_name(path.name.replace(FIRST, key)).hardlink_to(path)
        content = record.replace(FIRST, key).replace(recipes[FIRST], recipes[key])
        (root / dataset.record_name(key, recipes[key])).write_text(content)


def test_a_partition_costs_as_much_among_100000_as_among_1000(tmp_path: Path, counted: Counted) -> None:
    """Its worker is sent as many bytes, does the same to the same files, and reads no list of partitions."""
    costs = []
    for number in (1_000, 100_000):
        dataset = registered(tmp_path / f"{number:06d}", number)
        state = DatasetState(dataset)
        assert len(state.pending) == number
        task = dataset.spec, state.partitions[FIRST], state.schema, state.earlier(FIRST)
        counted.done, counted.read = Counter(), 0
        report = run_once(*task[:3], earlier=task[3])
        assert report.ok
        assert counted.done["_get", "shards.json"] == 0
        assert counted.done["create", "records"] == 1
        costs.append((len(pickle.dumps(task)), dict(counted.done), counted.read))
    assert costs[0] == costs[1]


def test_a_manifest_of_one_new_partition_does_the_same_among_many(tmp_path: Path, counted: Counted) -> None:
    """Listings, the files of the dataset and those of the new partition are read, whatever else is published."""
    costs = []
    for number in (10, 1_000):
        dataset = registered(tmp_path / str(number), number)
        publish_others(dataset)
        assert list(build_manifest(dataset).left_out) == [LAST]
        assert run_once(dataset.spec, dataset.partition(LAST), dataset.schema()).ok
        counted.done = Counter()
        report = build_manifest(DatasetStore(dataset.spec))
        assert not report.left_out
        assert report.manifest["num_samples"] == number * NUM_SAMPLES
        assert counted.done["_get", "records"] == 1
        assert counted.done["local_path", "filtered_rows"] == 1
        costs.append(dict(counted.done))
    assert costs[0] == costs[1]
