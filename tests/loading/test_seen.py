"""What a run has seen, out of its plan and a state: the same as what its loaders delivered."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import Blocks, Dataset, MixedLoader, MultimodalLoader, mix
from mm_assets.errors import LoaderError
from mm_assets.fields import ScalarField
from mm_assets.loading.plan import Step
from mm_assets.loading.seen import scan_samples, scan_seen

SIZES = {"a": 20, "b": 7, "c": 31}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dataset]]:
    folder: Path = tmp_path_factory.mktemp("seen")
    datasets = {}
    for name, size in SIZES.items():
        with mm_assets.create(folder / f"{name}.mult", {"x": ScalarField("int32")}, fsync=False) as writer:
            for i in range(size):
                writer.write(f"{name}{i}", {"x": i})
        datasets[name] = mm_assets.open(folder / f"{name}.mult")
    yield datasets
    for dataset in datasets.values():
        dataset.close()


def table(parts: Any) -> list[dict[str, Any]]:
    return [row for part in parts for row in part.to_pylist()]


def make(data: dict[str, Dataset], kind: str, batch_size: int, rank: int, world_size: int) -> Any:
    options: dict[str, Any] = {"batch_size": batch_size, "rank": rank, "world_size": world_size, "num_workers": 0}
    if kind == "loader":
        return MultimodalLoader(data["c"], shuffle=Blocks(3, 2), last="drop", **options)
    by_epochs = {name: {"dataset": data[name], "epochs": 1} for name in SIZES}
    by_weights = {"a": (data["a"], 1), "m": {"sources": {"b": (data["b"], 3), "c": (data["c"], [[0, 0], [9, 1]])}}}
    return mix({"unit": kind.split()[0], "sources": by_weights if "weights" in kind else by_epochs}, **options)


KINDS = ("loader", "batch by epochs", "batch by weights", "sample by epochs", "sample by weights")


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(0, 9), min_size=2, max_size=2)
)
def test_it_is_what_was_delivered(
    data: dict[str, Dataset], kind: str, batch_size: int, world_size: int, stops: list[int]
) -> None:
    """Every rank's rows, over epochs and between two states, are the valid rows of its batches."""
    found: list[Counter[tuple[int, str, int]]] = [Counter(), Counter()]
    states: list[Any] = []
    for rank in range(world_size):
        loader = make(data, kind, batch_size, rank, world_size)
        states = []
        batches = iter(loader)
        for part, stop in zip(found, stops, strict=True):
            for _ in range(stop):
                batch = next(batches, None)
                if batch is None:
                    batches = iter(loader)
                    batch = next(batches)
                rows = zip(batch["index"].tolist(), batch["valid"].tolist(), strict=True)
                sources = batch.get("source", "c")
                for number, (index, is_valid) in enumerate(rows):
                    part[rank, sources if isinstance(sources, str) else sources[number], index] += is_valid
            states.append(loader.state_dict())
    reader = make(data, kind, batch_size, 0, 1)
    reader.load_state_dict(states[1])
    later = table(scan_seen(reader, states[0], name="c", world_size=world_size))
    of_all = table(scan_seen(reader, name="c", world_size=world_size))
    assert Counter((row["rank"], row["source"].rpartition("/")[2], row["index"]) for row in later) == +Counter(
        {(rank, source.rpartition("/")[2], index): n for (rank, source, index), n in found[1].items()}
    )
    assert Counter((row["rank"], row["source"].rpartition("/")[2], row["index"]) for row in of_all) == +Counter(
        {(rank, source.rpartition("/")[2], index): n for (rank, source, index), n in (found[0] + found[1]).items()}
    )
    places = [(row["source"], row["epoch"], row["position"]) for row in of_all]
    assert len(set(places)) == len(places)
    if kind.startswith("sample"):
        assert len({row["mix_position"] for row in of_all}) == len(of_all)
    if "drop" not in kind and kind != "loader":
        without = table(scan_seen(reader))
        assert [row["rank"] for row in without] == [None] * len(of_all)
        assert sorted((row["source"], row["epoch"], row["position"], row["index"]) for row in without) == sorted(
            (row["source"], row["epoch"], row["position"], row["index"]) for row in of_all
        )


def test_batches_of_groups_have_no_positions(data: dict[str, Dataset]) -> None:
    """A plan that is not of samples, but of groups of them, gives its rows without their positions."""

    @dataclass(frozen=True, kw_only=True)
    class Pairs:
        """Pairs of neighbors, each at one position."""

        order: Any
        rank: int = 0
        world_size: int = 1
        settings: Any = None

        def steps(self, start: int = 0) -> Iterator[Step]:
            for position in range(start + self.rank, 10, self.world_size):
                indices = np.array([2 * position, 2 * position + 1])
                yield Step(start=position, stop=position + 1, indices=indices, valid=np.array([True, position < 9]))

    loader = MultimodalLoader(data["a"])
    state = {**loader.state_dict(), "delivered": 4}
    loader.load_state_dict(state)
    loader.plan = Pairs(order=loader.plan.order)  # type: ignore[assignment]  # what a loader of groups has
    rows = table(scan_seen(loader, name="a", world_size=2))
    assert [row["index"] for row in rows] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert {row["position"] for row in rows} == {None}


def test_a_state_without_end_is_refused(data: dict[str, Dataset]) -> None:
    """A state that claims more epochs than anyone can list raises at once."""
    loader = MultimodalLoader(data["a"])
    loader.load_state_dict({**loader.state_dict(), "epoch": 10**12})
    with pytest.raises(LoaderError, match="a: found 20,000,000,000,000 deliveries, at most"):
        table(scan_seen(loader, name="a"))
    last = {**loader.state_dict(), "epoch": 10**12 - 1}
    assert len(table(scan_seen(loader, last, name="a"))) == 20


def test_samples_have_ids(data: dict[str, Dataset]) -> None:
    """Every sample of every source is listed, of a view by its index there; a source without ids is refused."""
    mixed: MixedLoader = mix({"v": (data["c"].select([5, 3]), 1), "b": (data["b"], 1)})
    rows = table(scan_samples(mixed))
    assert [(row["source"], row["index"], row["sample_id"]) for row in rows] == [
        *(("b", i, f"b{i}") for i in range(7)),
        ("v", 0, "c5"),
        ("v", 1, "c3"),
    ]
    assert {row["partition"] for row in rows} == {None}

    class Other:
        names = ("x",)
        fingerprint = "other"

        def __len__(self) -> int:
            return 3

    with pytest.raises(LoaderError, match="other: found Other, expected a Dataset"):
        list(scan_samples(MultimodalLoader(Other()), name="other"))  # type: ignore[arg-type]  # what is tested
