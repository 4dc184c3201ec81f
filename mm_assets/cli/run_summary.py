"""The summary of `mm-assets run`: a table of partitions, or of many their totals, the manifests, and what is next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mm_assets.cli.output import echo, look_command, print_table, size_text
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.chain import Stage
    from mm_assets.pipeline.load.tasks import PartitionRun
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.pipeline.state.records import StageRecord
    from mm_assets.pipeline.state.staleness import DatasetState

__all__ = [
    "LOSS_HEADINGS",
    "MAX_ROWS",
    "manifest_url",
    "next_steps",
    "print_manifests",
    "print_summary",
    "summary_counts",
]

LOSS_HEADINGS = {"dropped": "dropped", "lost": "lost", "faults": "kept"}
"""Headings of the summary to kinds of loss."""
_OPTIONAL = ("faults", "members", "rows", "kept", "MULT bytes", "MSTR bytes")
MAX_ROWS = 50  # partitions that have a row each in the summary


def summary_counts(dataset: DatasetStore, records: Mapping[Stage, StageRecord]) -> dict[str, int]:
    """Returns the numbers of a partition by the headings of the summary, of the stages that have run."""
    from mm_assets.pipeline.chain import summary_numbers
    from mm_assets.pipeline.state.losses import kind_counts

    numbers = summary_numbers(dataset.spec)
    counts = {h: records[stage].counts.get(n, 0) for h, (stage, n) in numbers.items() if stage in records}
    kinds = kind_counts(records)
    return {**counts, **({heading: kinds[kind] for heading, kind in LOSS_HEADINGS.items()} if records else {})}


def print_summary(
    datasets: Mapping[str, DatasetState],
    keys: Mapping[str, Sequence[str]],
    ended: Sequence[PartitionRun],
    counts: Mapping[tuple[str, str], Mapping[str, int]],
    sums: Mapping[str, Mapping[str, int]],
    pending: Mapping[str, Mapping[str, str]],
    seconds: float,
) -> None:
    """Prints what became of each partition that ran or is pending; of more than 50 a row for each dataset.

    Args:
        datasets: by name, as they are now.
        keys: of each, the partitions that this command is about.
        ended: how runs ended.
        counts: of each partition that ran well, by dataset and key, its numbers: tables of others lack a part of it.
        sums: of each, the numbers of the partitions that ran well.
        pending: of each, the partitions that are still pending.
        seconds: that the runs took.
    """
    from mm_assets.pipeline.chain import summary_numbers

    results = {(result.dataset, result.partition): result for result in ended}
    statuses = {
        (name, key): "pending" if result is None else result.status
        for name in datasets
        for key in keys[name]
        if (result := results.get((name, key))) is not None or key in pending[name]
    }
    unchanged = sum(map(len, keys.values())) - len(statuses)
    rest = f"; {counted(unchanged, 'partition')} unchanged" if unchanged else ""
    elsewhere = Counter(result.other_load for result in ended if result.other_load)
    others = (("published", "published by another load"), ("in progress", "in progress elsewhere"))
    rest = "".join(f"; {elsewhere[name]:,} {text}" for name, text in others if elsewhere[name]) + rest
    echo(f"{counted(len(ended) - elsewhere.total(), 'partition')} run in {seconds:.1f} s{rest}")
    if not statuses:
        return
    rows: list[tuple[tuple[str, str, str], Mapping[str, int]]] = []
    is_short = len(statuses) <= MAX_ROWS
    for (name, key), status in statuses.items() if is_short else ():
        rows.append(((name, key, status), counts.get((name, key), {})))
    for name in datasets if not is_short else ():
        of_dataset = [status for (dataset, _), status in statuses.items() if dataset == name]
        rows.append(((name, f"{len(of_dataset):,}", _count_statuses(of_dataset)), sums.get(name, {})))
    if len(rows) > 1:
        totals: Counter[str] = Counter()
        for _, numbers in rows:
            totals.update(numbers)
        number = "total" if is_short else f"{len(statuses):,}"
        rows.append((("" if is_short else "total", number, _count_statuses(list(statuses.values()))), totals))
    headings = [h for present in datasets.values() for h in summary_numbers(present.dataset.spec)]
    headings = list(dict.fromkeys((*headings, *LOSS_HEADINGS)))
    print_table(
        ("dataset", "partition", "status", *headings),
        [(*names, *(_text(h, found[h]) if h in found else "-" for h in headings)) for names, found in rows],
        numbers=headings,
        wrapped=("partition", "status"),
        optional=(*(["dataset"] if len(datasets) == 1 else []), *_OPTIONAL, "dataset"),
    )


def _count_statuses(statuses: Sequence[str]) -> str:
    from mm_assets.pipeline.load.tasks import STATUSES

    counts = Counter(statuses)
    return ", ".join(f"{counts[status]:,} {status}" for status in (*STATUSES, "pending") if counts[status])


def manifest_url(present: DatasetState) -> str | None:
    """Returns where the manifest of a dataset is; None if it has none yet."""
    store = present.dataset.store
    has_manifest = bool(present.listed) or store.exists("manifest.json")
    return store.url_of("manifest.json") if has_manifest else None


def print_manifests(datasets: Mapping[str, DatasetState]) -> None:
    """Prints where the manifest of each dataset is, and its version; the first load may have failed before any."""
    for name, present in datasets.items():
        if (url := manifest_url(present)) is None:
            echo(f"{name}: no manifest")
            continue
        preset = present.schema.pack.get("preset") if present.partitions else None
        version = f", version {present.digest[:8]}" if present.digest else ""
        echo(f"{name}: {url}" + (f" (preset {preset})" if preset else "") + version)


def next_steps(datasets: Mapping[str, DatasetState]) -> list[str]:
    """Returns how to look at the first dataset that has samples."""
    from mm_assets.packing.plan import declared_imports

    for present in datasets.values():
        if any(entry.num_samples for entry in present.listed.values()):
            url, own = present.dataset.store.url_of("manifest.json"), declared_imports(present.dataset.spec.pack)
            return [
                f"`{look_command('view', url, own)}` shows samples in a browser",
                f"`{look_command('inspect', url, own, '--sample', '0')}` prints one",
                f"`mm_assets.open({url!r})` reads them in Python",
            ]
    return []


def _text(heading: str, number: int) -> str:
    return size_text(number) if heading.endswith(" bytes") else f"{number:,}"
