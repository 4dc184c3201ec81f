"""The results as Markdown tables and as plots."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.loading.adapters import LIMIT_PREFIX
from benchmarks.loading.bench import Measurement
from benchmarks.loading.rows import ROWS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = ("mult", "mstr")
COLOURS = {"ours": "#1f6feb", "limit": "#b0b0b0", "other": "#e08a3c"}
PLOTS = {
    "raw": ("random_all", "random_image_text", "random_text", "sequential_all", "sequential_text", "cold_random"),
    "training": ("decoded_exact", "decoded_fast", "decoded_stored", "decoded_crop", "first_batch"),
    "files": ("open_warm", "open_cold", "write", "write_encoded", "size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One candidate in one row.

    Attributes:
        candidate: its name.
        values: by round.
        ratios: medians over the rounds of value over the limit's value in the same round, by limit.
        why_not: where there are no values.
    """

    candidate: str
    values: Mapping[int, float]
    ratios: Mapping[str, float]
    why_not: str = ""

    @property
    def median(self) -> float:
        """Of the values."""
        return statistics.median(self.values.values())


def lines_of(row: Row, measurements: Iterable[Measurement]) -> list[Line]:
    """The candidates of a row, best first, those without a value last."""
    values: dict[str, dict[int, float]] = {}
    reasons: dict[str, str] = {}
    for one in measurements:
        found = values.setdefault(one.candidate, {})
        if one.outcome.value is not None:
            found[one.round] = one.outcome.value
        else:
            reasons[one.candidate] = one.outcome.unsupported or f"failed: {one.outcome.failed}"
    lines = []
    for candidate, found in values.items():
        ratios = {}
        for limit in row.limits:
            paired = [
                value / values[limit][number] for number, value in found.items() if number in values.get(limit, {})
            ]
            if paired:
                ratios[limit] = statistics.median(paired)
        lines.append(Line(candidate=candidate, values=found, ratios=ratios, why_not=reasons.get(candidate, "")))
    measured = sorted((line for line in lines if line.values), key=lambda line: line.median, reverse=row.rising)
    return measured + [line for line in lines if not line.values]


def number(value: float) -> str:
    """Three digits that count."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(row: Row, lines: Sequence[Line]) -> str:
    """A row as a Markdown table, and below it who is not in it, and why."""
    rounds = max((len(line.values) for line in lines), default=0)
    head = ["", f"median of {rounds}, {row.unit}", "lowest to highest", *(f"of {limit}" for limit in row.limits)]
    text = [f"### {row.title}", "", f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for line in lines:
        if line.values:
            name = f"**{line.candidate}**" if line.candidate in OURS else line.candidate
            spread = f"{number(min(line.values.values()))} to {number(max(line.values.values()))}"
            ratios = [f"{line.ratios[limit]:.2f}" if limit in line.ratios else "" for limit in row.limits]
            text.append(f"| {' | '.join([name, number(line.median), spread, *ratios])} |")
    missing = [f"{line.candidate} {line.why_not}" for line in lines if not line.values]
    if missing:
        text += ["", f"Not here: {'; '.join(missing)}."]
    return "\n".join([*text, ""])


def overview(all_lines: Mapping[str, Sequence[Line]]) -> str:
    """The medians of all candidates in all rows; the best, limits left out, is bold."""
    medians = {
        name: {line.candidate: line.median for line in lines if line.values} for name, lines in all_lines.items()
    }
    candidates = list(dict.fromkeys(candidate for found in medians.values() for candidate in found))
    candidates.sort(key=lambda name: (name not in OURS, name.startswith(LIMIT_PREFIX)))
    best = {}
    for name, found in medians.items():
        real = [value for candidate, value in found.items() if not candidate.startswith(LIMIT_PREFIX)]
        if real:
            best[name] = max(real) if ROWS[name].rising else min(real)
    head = ["", *(f"`{name}` {ROWS[name].unit}" for name in medians)]
    text = ["### All at a glance", "", f"| {' | '.join(head)} |", f"| --- |{' ---: |' * len(medians)}"]
    for candidate in candidates:
        cells = []
        for name, found in medians.items():
            value = found.get(candidate)
            cell = "" if value is None else number(value)
            cells.append(f"**{cell}**" if value is not None and value == best.get(name) else cell)
        text.append(f"| {' | '.join([candidate, *cells])} |")
    return "\n".join([*text, ""])


def selective(all_lines: Mapping[str, Sequence[Line]]) -> str:
    """How much quicker a pass over the text alone is than one over images and text."""
    both = {line.candidate: line for line in all_lines.get("random_image_text", ()) if line.values}
    text = {line.candidate: line for line in all_lines.get("random_text", ()) if line.values}
    found = []
    for candidate in both.keys() & text.keys():
        paired = [
            text[candidate].values[key] / value
            for key, value in both[candidate].values.items()
            if key in text[candidate].values
        ]
        if paired:
            found.append((statistics.median(paired), candidate))
    if not found:
        return ""
    rows = [
        "### Selective loading: text only against image and text, random, raw",
        "",
        "| | image and text, samples/s | text only, samples/s | times quicker |",
        "| --- | ---: | ---: | ---: |",
    ]
    for ratio, name in sorted(found, reverse=True):
        label = f"**{name}**" if name in OURS else name
        rows.append(f"| {label} | {number(both[name].median)} | {number(text[name].median)} | {ratio:.1f} |")
    return "\n".join([*rows, ""])


def machine() -> str:
    """What it ran on."""
    model = "unknown processor"
    for entry in Path("/proc/cpuinfo").read_text().splitlines():
        if entry.startswith("model name"):
            model = entry.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{model}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}; "
        f"load average {load:.1f} at the end"
    )


def write_report(folder: Path, measurements: Sequence[Measurement], *, samples: str) -> Path:
    """Write ``report.md`` and the plots.

    Args:
        folder: where to.
        measurements: of any rounds and rows.
        samples: a sentence about the samples.

    Returns:
        The report.
    """
    by_row = {name: [one for one in measurements if one.row == name] for name in ROWS}
    all_lines = {name: lines_of(ROWS[name], found) for name, found in by_row.items() if found}
    versions = sorted({one.outcome.version for one in measurements if one.outcome.version is not None})
    text = [
        f"{samples} {machine()}.",
        "",
        f"Versions: {', '.join(versions)}.",
        "",
        overview(all_lines),
    ]
    for name, lines in all_lines.items():
        text.append(table(ROWS[name], lines))
        if name == "random_text":
            text.append(selective(all_lines))
    for plot, names in PLOTS.items():
        shown = [name for name in names if any(line.values for line in all_lines.get(name, ()))]
        if shown:
            _plot(folder / f"loading-{plot}.png", {name: all_lines[name] for name in shown})
            text.append(f"![{plot}](loading-{plot}.png)\n")
    target = folder / "report.md"
    target.write_text("\n".join(text))
    return target


def _plot(path: Path, rows: Mapping[str, Sequence[Line]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(2, len(rows))
    height = -(-len(rows) // columns)
    figure, grid = plt.subplots(height, columns, figsize=(7 * columns, 3.8 * height), squeeze=False)
    axes: list[Axes] = list(grid.flat)
    for axis, (name, lines) in zip(axes, rows.items(), strict=False):
        _bars(axis, ROWS[name], [line for line in lines if line.values])
    for axis in axes[len(rows) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Axes, row: Row, lines: Sequence[Line]) -> None:
    names = [line.candidate for line in lines]
    medians = [line.median for line in lines]
    low = [max(line.median - min(line.values.values()), 0) for line in lines]
    high = [max(max(line.values.values()) - line.median, 0) for line in lines]
    kinds = ["ours" if n in OURS else "limit" if n.startswith(LIMIT_PREFIX) else "other" for n in names]
    axis.barh(names, medians, xerr=[low, high], color=[COLOURS[kind] for kind in kinds], ecolor="#444444")
    axis.invert_yaxis()
    axis.set_title(row.title, fontsize=9, wrap=True)
    axis.set_xlabel(f"{row.unit}, {'more' if row.rising else 'less'} is better", fontsize=8)
    if min(medians) > 0 and max(medians) / min(medians) > 50:
        axis.set_xscale("log")
    axis.tick_params(labelsize=8)
