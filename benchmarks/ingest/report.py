"""The results as Markdown tables: medians over the rounds, and ratios within each round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ingest.corpus import KINDS

LIMIT = "copy"
PEERS = ("curator eager", "curator ray")
TITLES = {
    "copy": "copy, SHA-256, fsync",
    "arrow": "pyarrow: one read, one write",
    "stream": "**one stream to filtered Parquet**",
    "stages": "**all stages, both formats, all checks**",
    "run": "**`mm-assets run`**",
    "curator lazy": "NeMo Curator's stages, media read at the end",
    "curator eager": "NeMo Curator's stages, media read at once",
    "curator ray": "NeMo Curator's pipeline on Ray",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One process; the other attributes are those of `usage.Usage`.

    Attributes:
        kind: of shards.
        candidate: its name.
        round: from 0.
        code: exit code.
        shard_bytes: of the shards.
        num_shards: of them.
        out_bytes: of the files that are there at the end.
        inside: what the process reports, without its imports: `seconds`, `processor_seconds`, `steps`.
    """

    kind: str
    candidate: str
    round: int
    code: int
    shard_bytes: int
    num_shards: int
    out_bytes: int
    inside: Mapping[str, Any]
    seconds: float
    processor_seconds: float
    bytes_read: int
    bytes_written: int
    peak_bytes: int

    @property
    def work(self) -> float:
        """Seconds without start-up and imports, where the process knows them; of ours the steps, else the whole."""
        steps = self.inside.get("steps")
        if steps:
            return sum(step["seconds"] for step in steps.values())
        return float(self.inside.get("seconds", self.seconds))


def _median(found: Iterable[Measurement], value: Callable[[Measurement], float]) -> float:
    return statistics.median(map(value, found))


def _ratio(found: Sequence[Measurement], others: Sequence[Measurement], value: Callable[[Measurement], float]) -> str:
    """The median over the rounds of the other's value by this one's: times faster."""
    by_round = {one.round: value(one) for one in others if one.code == 0}
    paired = [by_round[one.round] / value(one) for one in found if one.round in by_round]
    return f"{statistics.median(paired):.2f} x" if paired else ""


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(head), f"| --- |{' ---: |' * (len(head) - 1)}", *map(_row, rows), ""]


def _candidates(found: Sequence[Measurement]) -> list[str]:
    by_name: dict[str, list[Measurement]] = {}
    for one in found:
        by_name.setdefault(one.candidate, []).append(one)
    rows = []
    for name, all_of in by_name.items():
        good = [one for one in all_of if one.code == 0]
        if not good:
            rows.append([TITLES[name], "failed", *[""] * 8])
            continue
        size = good[0].shard_bytes
        eager, ray = (by_name.get(peer, []) for peer in PEERS)
        rows.append(
            [
                TITLES[name],
                f"{_median(good, lambda one: one.work):.2f}",
                f"{size / 1e6 / _median(good, lambda one: one.work):,.0f}",
                _ratio(good, eager, lambda one: one.work),
                f"{_median(good, lambda one: one.seconds):.2f}",
                f"{_median(good, lambda one: one.processor_seconds):.2f}",
                _ratio(good, ray, lambda one: one.seconds),
                f"{_median(good, lambda one: one.bytes_read) / size:.1f}",
                f"{_median(good, lambda one: one.bytes_written) / size:.1f}",
                f"{_median(good, lambda one: one.peak_bytes) / 1e6:,.0f}",
            ]
        )
    head = [
        "",
        "work, s",
        "MB/s",
        "the peer's stages by it",
        "whole, s",
        "processor, s",
        "the peer on Ray by it",
        "read, x",
        "written, x",
        "peak, MB",
    ]
    return _table(head, rows)


def _steps(found: Sequence[Measurement]) -> list[str]:
    """The steps of the stages."""
    mine = [one for one in found if one.candidate == "stages" and one.code == 0]
    if not mine:
        return []
    size = mine[0].shard_bytes
    rows = []
    steps = list(mine[0].inside["steps"])
    for step in steps:

        def of(name: str, step: str = step) -> float:
            return statistics.median(one.inside["steps"][step][name] for one in mine)

        rows.append(
            [
                f"`{step}`",
                f"{of('seconds') - of('check_seconds'):.2f}",
                f"{of('check_seconds'):.2f}",
                f"{of('processor_seconds'):.2f}",
                f"{of('bytes_read') / size:.2f}",
                f"{of('bytes_written') / size:.2f}",
                f"{of('peak_bytes') / 1e6:,.0f}",
            ]
        )

    def total(name: str) -> float:
        return statistics.median(sum(step[name] for step in one.inside["steps"].values()) for one in mine)

    work, checks = total("seconds") - total("check_seconds"), total("check_seconds")
    rows.append(
        [
            f"all; checks are {checks / work:.0%} of the rest",
            f"{work:.2f}",
            f"{checks:.2f}",
            f"{total('processor_seconds'):.2f}",
            f"{total('bytes_read') / size:.2f}",
            f"{total('bytes_written') / size:.2f}",
            f"{max(statistics.median(one.inside['steps'][s]['peak_bytes'] for one in mine) for s in steps) / 1e6:,.0f}",
        ]
    )
    return _table(["step", "work, s", "checks, s", "processor, s", "read, x", "written, x", "peak, MB"], rows)


def report(measurements: Sequence[Measurement]) -> str:
    """All tables, one section per kind of shards."""
    lines: list[str] = []
    for name, kind in KINDS.items():
        found = [one for one in measurements if one.kind == name]
        if found:
            rounds = 1 + max(one.round for one in found)
            lines += [f"### {kind.title}", "", f"{found[0].shard_bytes / 1e6:,.1f} MB, medians of {rounds}.", ""]
            lines += [*_candidates(found), *_steps(found)]
    return "\n".join(lines)
