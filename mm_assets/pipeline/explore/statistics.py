"""Statistics of a published dataset, from its manifest, tables and the metadata records of its packed files.

No media byte is read: image sizes and durations are in the records that precede packed data, lengths of texts in the
row table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import mm_assets
from mm_assets.dataset.manifest import file_path
from mm_assets.errors import SourceError, first_line
from mm_assets.fields.measures import UNITS, measures
from mm_assets.pipeline.chain import FILTERED_ROWS, PACKED_STAGES
from mm_assets.pipeline.state.losses import LossTotal, listed_totals
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.sql import parquet_relation

__all__ = ["Distribution", "ModalityStatistics", "Statistics", "statistics"]

ITEM_SAMPLES = 10_000  # whose items are measured, spread evenly: their records are not in a table
NUM_BINS = 12
_SKEWED = 30.0  # times the median: from there on bins of equal ratios show more than bins of equal width
_RECORDS_FORMAT = "mstr"  # its records are a table; those of the other format lie between the data

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How numbers are distributed.

    Attributes:
        unit: of the numbers.
        count: how many there are.
        low, median, mean, high: of the numbers.
        edges: of the bins of the histogram, one more than bins; each bin includes its lower edge, the last both.
        bins: how many numbers are in each.
    """

    unit: str
    count: int
    low: float
    median: float
    mean: float
    high: float
    edges: tuple[float, ...]
    bins: tuple[int, ...]

    @classmethod
    def of(cls, values: _Numbers, counts: npt.NDArray[np.int64] | None = None, *, unit: str) -> Distribution | None:
        """The distribution of finite numbers, each as often as `counts` says; None where there are none."""
        is_finite = np.isfinite(values)
        weights = np.ones(len(values), np.int64)[is_finite] if counts is None else counts[is_finite]
        values = values[is_finite]
        if not weights.sum():
            return None
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        total, up_to = int(weights.sum()), np.cumsum(weights)
        middle = [values[np.searchsorted(up_to, rank, side="right")] for rank in ((total - 1) // 2, total // 2)]
        median = float(sum(middle) / 2)
        low, high = float(values[0]), float(values[-1])
        edges = _edges(low, median, high, count=total, is_whole=bool(np.all(values == np.floor(values))))
        bins, _ = np.histogram(values, edges, weights=weights)
        return cls(
            unit=unit,
            count=total,
            low=low,
            median=median,
            mean=float(np.average(values, weights=weights)),
            high=high,
            edges=tuple(map(float, edges)),
            bins=tuple(map(int, bins)),
        )


def _edges(low: float, median: float, high: float, *, count: int, is_whole: bool) -> _Numbers:
    if low == high:
        return np.array([low, high])
    if low >= 0 and high > _SKEWED * max(median, 1e-9):
        first = max(low, median / _SKEWED, high * 1e-9)
        edges = np.geomspace(first, high, NUM_BINS + 1)
        edges[0] = low
    else:
        number = min(NUM_BINS, int(high - low)) if is_whole else NUM_BINS
        number = min(number, math.ceil(math.log2(count)) + 1)  # of few numbers, few bins
        edges = np.linspace(low, high, max(number, 1) + 1)
    edges[-1] = high  # of rounding
    return np.unique(edges)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalityStatistics:
    """One packed modality.

    Attributes:
        field: name of its field; empty where that is unknown here.
        present: how many samples have it.
        num_bytes: bytes of its records and data.
        distributions: by name, `bytes` of a sample and the field's measures; ``item_<measure>`` of the items of
            sequences, of `ITEM_SAMPLES` samples in local files.
    """

    field: str
    present: int
    num_bytes: int
    distributions: Mapping[str, Distribution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A published dataset in numbers.

    Attributes:
        dataset: its name.
        url: where the manifest is.
        digest: that of the manifest.
        num_partitions: partitions that the manifest lists.
        num_samples: their samples.
        num_bytes: of their packed files, by format.
        modalities: packed modalities by name.
        rows: rows of the row table after the filters, by kind.
        texts: lengths of its texts, by kind of row.
        losses: what was lost, and what is published in spite of a fault, by stage and reason.
    """

    dataset: str
    url: str
    digest: str
    num_partitions: int
    num_samples: int
    num_bytes: Mapping[str, int]
    modalities: Mapping[str, ModalityStatistics]
    rows: Mapping[str, int]
    texts: Mapping[str, Distribution]
    losses: Sequence[LossTotal]


def statistics(state: DatasetState) -> Statistics:
    """Reads the statistics of a dataset's newest version.

    Raises:
        SourceError: there is no manifest, or a table cannot be read.
        FormatError: the manifest or a packed file is damaged.
    """
    dataset = state.dataset
    url, name = dataset.store.url_of("manifest.json"), dataset.spec.name
    if state.manifest is None:
        raise SourceError(url, f"there is no manifest yet: `mm-assets run --dataset {name}` makes it")
    entries = state.listed.values()
    sizes = {
        form: sum(entry.packed[form][0] for entry in entries)
        for form in PACKED_STAGES
        if all(form in entry.packed for entry in entries)
    }
    form = _RECORDS_FORMAT if _RECORDS_FORMAT in sizes else None
    with mm_assets.open(url, storage_options=dict(dataset.spec.root_options) or None, format=form) as opened:
        num_samples = len(opened)
        modalities = {modality: _modality(opened, modality) for modality in opened.names}
    rows, texts = _rows(state)
    return Statistics(
        dataset=name,
        url=url,
        digest=state.digest or "",
        num_partitions=len(entries),
        num_samples=num_samples,
        num_bytes=sizes,
        modalities=modalities,
        rows=rows,
        texts=texts,
        losses=listed_totals([state.manifest.get("losses", {})]),
    )


def _modality(opened: mm_assets.Dataset, name: str) -> ModalityStatistics:
    field = opened.fields.get(name)
    if field is None:  # of a type that is not registered here
        present = int(opened.presence(name).sum())
        return ModalityStatistics(field="", present=present, num_bytes=0, distributions={})
    parts: dict[str, list[_Numbers]] = {"bytes": []}
    for records, sizes in opened.scan_records(name):
        parts["bytes"].append(sizes.astype(np.float64))
        for measure, values in measures(records).items():
            parts.setdefault(measure, []).append(values.astype(np.float64))
    if field.item_field is not None and len(opened):
        chosen = np.unique(np.linspace(0, len(opened) - 1, ITEM_SAMPLES).astype(np.int64))
        for measure, values in measures(opened.item_records(name, chosen)).items():
            parts[f"item_{measure}"] = [values.astype(np.float64)]
    units = {measure: UNITS.get(measure.removeprefix("item_"), "bytes") for measure in parts}
    found = {measure: Distribution.of(_joined(values), unit=units[measure]) for measure, values in parts.items()}
    sizes_of_all = _joined(parts["bytes"])
    return ModalityStatistics(
        field=type(field).__name__,
        present=len(sizes_of_all),
        num_bytes=int(sizes_of_all.sum()),
        distributions={measure: values for measure, values in found.items() if values is not None},
    )


def _joined(parts: Iterable[_Numbers]) -> _Numbers:
    return np.concatenate([np.zeros(0), *parts])


def _rows(state: DatasetState) -> tuple[dict[str, int], dict[str, Distribution]]:
    """Rows by kind, and the lengths of their texts, of the partitions that the manifest lists."""
    import duckdb

    if not state.listed:
        return {}, {}  # there may be no table yet
    table, dataset = FILTERED_ROWS.tables[0].name, state.dataset
    files = [dataset.duckdb_path(file_path(table, key, entry.tables[table][1])) for key, entry in state.listed.items()]
    query = (
        "select modality, length(text_content) as length, count(*) as number "
        f"from {parquet_relation('$files', is_list=True)} group by all"  # every file has these columns
    )
    with closing(dataset.duckdb()) as connection:
        try:
            found: list[tuple[str, int | None, int]] = connection.execute(query, {"files": files}).fetchall()
        except duckdb.Error as error:
            raise SourceError(dataset.store.url_of(table), f"cannot be read: {first_line(error)}") from error
    rows: dict[str, int] = {}
    for modality, _, number in found:
        rows[modality] = rows.get(modality, 0) + number
    texts = {}
    for modality in sorted(rows):
        pairs = [(length, number) for of, length, number in found if of == modality and length is not None]
        values, counts = (np.array(column, np.int64) for column in zip(*pairs, strict=True)) if pairs else (None, None)
        if values is not None:
            texts[modality] = Distribution.of(values.astype(np.float64), counts, unit=UNITS["length"])
    return dict(sorted(rows.items())), {name: found for name, found in texts.items() if found is not None}
