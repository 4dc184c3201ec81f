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
    from mm_assets.pipeline.state.staleness import Present

__all__ = ["LOSS_HEADINGS", "manifest_url", "next_steps", "print_manifests", "print_summary", "summary_counts"]

LOSS_HEADINGS = {"dropped": "dropped", "lost": "lost", "faults": "kept"}
"""Headings of the summary to kinds of loss."""
_OPTIONAL = ("faults", "members", "rows", "kept", "MULT bytes", "MSTR bytes")
_MAX_ROWS = 50  # partitions that have a row each in the summary


def summary_counts(dataset: DatasetStore, records: Mapping[Stage, StageRecord]) -> dict[str, int]:
    """Returns the numbers of a partition by the headings of the summary, of the stages that have run."""
    from mm_assets.pipeline.chain import summary_numbers
    from mm_assets.pipeline.state.losses import kind_counts

    numbers = summary_numbers(dataset.spec)
    counts = {h: records[stage].counts.get(n, 0) for h, (stage, n) in numbers.items() if stage in records}
    kinds = kind_counts(records)
    return {**counts, **({heading: kinds[kind] for heading, kind in LOSS_HEADINGS.items()} if records else {})}


def print_summary(
    datasets: Mapping[str, Present],
    keys: Mapping[str, Sequence[str]],
    ended: Sequence[PartitionRun],
    sums: Mapping[str, Mapping[str, int]],
    pending: Mapping[str, Mapping[str, str]],
    seconds: float,
) -> None:
    """Prints what became of each partition that ran or is pending; of more than 50 a row for each dataset.

    Args:
        datasets: by name, as they are now.
        keys: of each, the partitions that this command is about.
        ended: how runs ended.
        sums: of each, the numbers of the partitions that ran well.
        pending: of each, the partitions that are still pending.
        seconds: that the runs took.
    """
    from mm_assets.pipeline.chain import summary_numbers

    results = {(result.dataset, result.partition): result for result in ended}
    statuses = {
        (name, key): "pending" if result is None else "done" if result.ok else "FAILED"
        for name in datasets
        for key in keys[name]
        if (result := results.get((name, key))) is not None or key in pending[name]
    }
    unchanged = sum(map(len, keys.values())) - len(statuses)
    rest = f"; {counted(unchanged, 'partition')} unchanged" if unchanged else ""
    echo(f"{counted(len(ended), 'partition')} run in {seconds:.1f} s{rest}")
    if not statuses:
        return
    rows: list[tuple[tuple[str, str, str], Mapping[str, int]]] = []
    is_short = len(statuses) <= _MAX_ROWS
    for (name, key), status in statuses.items() if is_short else ():
        dataset = datasets[name].dataset
        # The tables of a failed run do not hold all of the shard.
        rows.append(((name, key, status), summary_counts(dataset, {} if status == "FAILED" else dataset.records(key))))
    for name in datasets if not is_short else ():
        of_dataset = [status for (dataset, _), status in statuses.items() if dataset == name]
        rows.append(((name, f"{len(of_dataset):,}", _count_statuses(of_dataset)), sums.get(name, {})))
    if len(rows) > 1:
        totals: Counter[str] = Counter()
        for _, counts in rows:
            totals.update(counts)
        number = "total" if is_short else f"{len(statuses):,}"
        rows.append((("" if is_short else "total", number, _count_statuses(list(statuses.values()))), totals))
    headings = [h for present in datasets.values() for h in summary_numbers(present.dataset.spec)]
    headings = list(dict.fromkeys((*headings, *LOSS_HEADINGS)))
    print_table(
        ("dataset", "partition", "status", *headings),
        [(*names, *(_text(h, counts[h]) if h in counts else "-" for h in headings)) for names, counts in rows],
        numbers=headings,
        wrapped=("partition", "status"),
        optional=(*(["dataset"] if len(datasets) == 1 else []), *_OPTIONAL, "dataset"),
    )


def _count_statuses(statuses: Sequence[str]) -> str:
    counts = Counter(statuses)
    return ", ".join(f"{counts[status]:,} {status}" for status in ("done", "FAILED", "pending") if counts[status])


def manifest_url(present: Present) -> str | None:
    """Returns where the manifest of a dataset is; None if it has none yet."""
    store = present.dataset.store
    has_manifest = present.cache.manifest is not None or store.exists("manifest.json")
    return store.url_of("manifest.json") if has_manifest else None


def print_manifests(datasets: Mapping[str, Present]) -> None:
    """Prints where the manifest of each dataset is, if it has one: the first load may have failed before."""
    for name, present in datasets.items():
        if (url := manifest_url(present)) is None:
            echo(f"{name}: no manifest")
            continue
        preset = present.schema.pack.get("preset") if present.partitions else None
        echo(f"{name}: {url}" + (f" (preset {preset})" if preset else ""))


def next_steps(datasets: Mapping[str, Present]) -> list[str]:
    """Returns how to look at the first dataset that has samples."""
    from mm_assets.packing.plan import declared_imports

    for present in datasets.values():
        if any(marker.num_samples for marker in present.published().values()):
            url, own = present.dataset.store.url_of("manifest.json"), declared_imports(present.dataset.spec.pack)
            return [
                f"`{look_command('view', url, own)}` shows samples in a browser",
                f"`{look_command('inspect', url, own, '--sample', '0')}` prints one",
                f"`mm_assets.open({url!r})` reads them in Python",
            ]
    return []


def _text(heading: str, number: int) -> str:
    return size_text(number) if heading.endswith(" bytes") else f"{number:,}"
