"""The summary of `mm-assets run`: a table of partitions, or of many their totals, and where the manifests are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mm_assets.cli.output import echo, look_command, print_table, size_text
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.pipeline.chain import Stage
    from mm_assets.pipeline.load import PartitionRun
    from mm_assets.pipeline.pending import Present
    from mm_assets.pipeline.records import StageRecord

__all__ = ["FAULTS", "num_faults", "print_manifests", "print_summary"]

FAULTS = "faults"  # the heading of what is published in spite of a fault
_LISTED = 50  # partitions that have a row each in the summary


def print_summary(
    datasets: Mapping[str, Present],
    keys: Mapping[str, Sequence[str]],
    ended: Sequence[PartitionRun],
    sums: Mapping[str, Counter[str]],
    pending: Mapping[str, Mapping[str, str]],
    seconds: float,
) -> None:
    """Prints what each partition became; of more than 50 in all, a row for each dataset.

    Args:
        datasets: by name, as they are now.
        keys: of each, the partitions that this command is about.
        ended: how runs ended.
        sums: of each, the numbers of the partitions that ran well.
        pending: of each, the partitions that are still pending.
        seconds: that the runs took.
    """
    from mm_assets.pipeline.chain import summary_numbers

    numbers = {name: summary_numbers(present.dataset.spec) for name, present in datasets.items()}
    headings = list(dict.fromkeys(heading for found in numbers.values() for heading in found))
    echo(f"{counted(len(ended), 'partition')} run in {seconds:.1f} s")
    rows = []
    results = {(result.dataset, result.partition): result for result in ended}
    is_short = sum(map(len, keys.values())) <= _LISTED
    for name, present in datasets.items():
        dataset = present.dataset
        for key in keys[name] if is_short else ():
            result = results.get((name, key))
            if result is not None:
                status = "done" if result.ok else "FAILED"
            else:
                status = "pending" if key in pending[name] else "unchanged"
            # The tables of a failed run do not hold all of the shard.
            records = {} if status == "FAILED" else dataset.records(key)
            shown = (_number(records, heading, numbers[name].get(heading)) for heading in headings)
            rows.append((name, key, status, *shown, f"{num_faults(records):,}" if records else "-"))
        if not is_short:
            mine = [result for result in ended if result.dataset == name]
            of_done = sums.get(name, Counter())
            shown = (_text(heading, of_done[heading]) if heading in of_done else "-" for heading in headings)
            ran = {result.partition for result in mine}
            waiting = sum(key not in ran for key in pending[name])
            done = sum(result.ok for result in mine)
            counts = {"done": done, "FAILED": len(mine) - done, "pending": waiting}
            counts["unchanged"] = len(keys[name]) - sum(counts.values())
            status = ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
            ran_of_all = f"{len(mine):,} of {len(keys[name]):,}"  # the figures are of those that ran
            rows.append((name, ran_of_all, status, *shown, f"{of_done.get(FAULTS, 0):,}"))
    headings.append(FAULTS)
    print_table(("dataset", "partition", "status", *headings), rows, numbers=headings, wrapped=("partition", "status"))


def print_manifests(datasets: Mapping[str, Present]) -> None:
    """Prints where the manifest of each dataset is, and how to look at the first that has samples."""
    from mm_assets.packing.plan import declared_imports

    steps: tuple[str, ...] = ()
    for name, present in datasets.items():
        dataset = present.dataset
        preset = present.schema.pack.get("preset") if present.partitions else None
        url = dataset.store.url_of("manifest.json")
        echo(f"{name}: {url}" + (f" (preset {preset})" if preset else ""))
        if any(marker.num_samples for marker in present.published().values()):
            own = declared_imports(dataset.spec.pack)
            view, inspect = look_command("view", url, own), look_command("inspect", url, own, "--sample", "0")
            opened = f"mm_assets.open({url!r})"
            steps = steps or (
                f"`{view}` shows samples in a browser",
                f"`{inspect}` prints one",
                f"`{opened}` reads them in Python",
            )
    for number, step in enumerate(steps):
        echo(f"{'      ' if number else 'next: '}{step}")


def _number(records: Mapping[Stage, StageRecord], heading: str, found: tuple[Stage, str] | None) -> str:
    """A count of a stage of a partition; "-" where that has not run."""
    return (
        "-" if found is None or found[0] not in records else _text(heading, records[found[0]].counts.get(found[1], 0))
    )


def _text(heading: str, number: int) -> str:
    return size_text(number) if heading.endswith(" bytes") else f"{number:,}"


def num_faults(records: Mapping[Stage, StageRecord]) -> int:
    """How much of a partition is published in spite of a fault."""
    from mm_assets.pipeline.losses import loss_counts
    from mm_assets.rows.schema import KEPT

    reasons = (found for stage in loss_counts(records).values() for found in stage.items())
    return sum(count for reason, count in reasons if reason.startswith(f"{KEPT}."))
