"""Which samples a training run has seen, as tables: computed from a loader's plan and a state, without a log.

The order of an epoch and its division over ranks are functions of the plan, so what was delivered between two states is
too. Nothing of the samples is read, but for their ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.dataset import Dataset
from mm_assets.errors import LoaderError, optional_import
from mm_assets.loading.batch_mix import BatchMix
from mm_assets.loading.loader import MultimodalLoader
from mm_assets.loading.mixed_loader import MixedLoader
from mm_assets.loading.mixture import MixedOrder
from mm_assets.loading.order import EpochOrder
from mm_assets.loading.plan import EpochPlan
from mm_assets.loading.sample_mix import SampleMix
from mm_assets.summaries import describe

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["scan_samples", "scan_seen"]

MAX_ROWS = 10**10  # of a source: hours
ROWS = 1 << 16  # of a table, at least, but for the last ones

Positions = npt.NDArray[np.int64]


def scan_seen(
    loader: MultimodalLoader | MixedLoader,
    since: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    world_size: int | None = None,
) -> Iterator[pa.Table]:
    """Yields what was delivered up to a loader's position, a row for each time that a sample was.

    Args:
        loader: at the position. Its dataset, batch size and `last` are those of the run.
        since: an earlier state of it, after which rows begin; by default the start of the training.
        name: of the dataset, if the loader is not a mix.
        world_size: ranks of the run in between, for the column `rank`.

    Raises:
        LoaderError: there are too many deliveries.

    Yields:
        tables with the columns `source`, `epoch` (of the source), `position` (in that epoch; null if batches are made
        of groups of samples), `mix_position` (with ``unit: sample``, in the mix, over all of its iterations), `rank`
        (null without `world_size`) and `index` (in the dataset of the source).
    """
    with optional_import("pyarrow", "The table of what was seen"):
        import pyarrow as pa

    schema = pa.schema(
        [
            ("source", pa.string()),
            ("epoch", pa.int64()),
            ("position", pa.int64()),
            ("mix_position", pa.int64()),
            ("rank", pa.int32()),
            ("index", pa.int64()),
        ]
    )
    after, before = loader.state_dict(), since or {}
    if isinstance(loader, BatchMix):
        plans = {source: one.plan for source, one in loader.loaders.items()}
        after, before = after["sources"], before.get("sources", {})
    else:
        inner: Any = loader.loader if isinstance(loader, SampleMix) else loader
        plans = {name: inner.plan}
        after, before = {name: after}, {name: before}
    yield schema.empty_table()
    for source, plan in plans.items():
        names = loader.names if isinstance(loader, SampleMix) else (source,)
        last = after[source]["epoch"], after[source]["delivered"]
        first = (before[source]["epoch"], before[source]["delivered"]) if since else (0, 0)
        if (num_rows := (last[0] - first[0]) * plan.order.num_samples) > MAX_ROWS:
            raise LoaderError(f"{source}: found {num_rows:,} deliveries, at most {MAX_ROWS:,} are listed: use `since`")
        for epoch in range(first[0], last[0] + 1):
            of_epoch = replace(plan, order=replace(plan.order, epoch=epoch))
            start = first[1] if epoch == first[0] else 0
            stop = last[1] if epoch == last[0] else plan.order.num_samples
            for rank, rows in _delivered(of_epoch, start, stop, world_size):
                columns = _columns(of_epoch, rows, names)
                columns["rank"] = np.full(len(rows), rank, np.int32) if world_size else pa.nulls(len(rows))
                yield pa.table({name: columns.get(name, pa.nulls(len(rows))) for name in schema.names}).cast(schema)


def _delivered(plan: Any, start: int, stop: int, world_size: int | None) -> Iterator[tuple[int, Positions]]:
    """Yields what each rank got between two positions of an epoch: positions, or samples if they are in groups."""
    if isinstance(plan, EpochPlan):
        # In an order that changes nothing, the samples of a step are its positions.
        plan = replace(plan, order=EpochOrder(num_samples=plan.order.num_samples, shuffle=False))
    for rank in range(world_size or 1):
        found: list[Positions] = []
        size = 0
        for step in replace(plan, rank=rank, world_size=world_size or 1).steps(start):
            if step.start >= stop:
                break
            rows = step.indices[step.valid]
            if isinstance(plan, EpochPlan):
                rows = rows[rows < stop]  # the state may be of steps of another size
            found.append(rows)
            size += len(rows)
            if size >= ROWS:
                yield rank, np.concatenate(found)
                found, size = [], 0
        if found:
            yield rank, np.concatenate(found)


def _columns(plan: Any, rows: Positions, names: Sequence[str]) -> dict[str, Any]:
    """Returns the columns of what `_delivered` yields."""
    order = plan.order
    if isinstance(order, MixedOrder):
        positions = rows + order.epoch * order.num_samples
        sources, places = order.mixture.locate(positions)
        epochs, inner = np.divmod(places, np.array([one.num_samples for one in order.orders])[sources])
        return {
            "source": np.array(names, object)[sources],
            "epoch": epochs,
            "position": inner,
            "mix_position": positions,
            "index": order.samples(sources, places) % order.starts[-1] - order.starts[sources],
        }
    found = {"source": np.full(len(rows), names[0], object), "epoch": np.full(len(rows), order.epoch)}
    if isinstance(plan, EpochPlan):
        return {**found, "position": rows, "index": order.at(rows)}
    return {**found, "index": rows}


def scan_samples(loader: MultimodalLoader | MixedLoader, *, name: str = "") -> Iterator[pa.Table]:
    """Yields every sample of the datasets of a loader.

    Args:
        loader: whose datasets are from `mm_assets.open`.
        name: of the dataset, if the loader is not a mix.

    Yields:
        tables with the columns `source`, `index`, `sample_id` and `partition` (null without a manifest).

    Raises:
        FormatError: a file is damaged.
    """
    with optional_import("pyarrow", "The table of what was seen"):
        import pyarrow as pa

    datasets = loader.datasets if isinstance(loader, MixedLoader) else {name: loader.reader}
    for source, dataset in datasets.items():
        if not isinstance(dataset, Dataset):
            raise LoaderError(f"{source}: found {describe(dataset)}, expected a Dataset, whose samples have ids")
        files = () if dataset.manifest is None else dataset.manifest.files
        stops = np.cumsum([file.num_samples for file in files])
        partitions = np.array([file.partition for file in files], object)
        for table in dataset.scan_columns(["index", "sample_id"]):
            indices = table["index"].to_numpy()
            places = indices if dataset.selection is None else dataset.selection[indices]
            keys = partitions[np.searchsorted(stops, places, side="right")] if files else pa.nulls(len(table))
            yield pa.table(
                {
                    "source": pa.array(np.full(len(table), source, object), pa.string()),
                    "index": table["index"],
                    "sample_id": table["sample_id"],
                    "partition": pa.array(keys, pa.string()) if files else keys.cast(pa.string()),
                }
            )
