"""The tables of docs/comparison.md and README.md against those of the benchmarks; run as a script, this writes them."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "comparison.md"
README = REPOSITORY / "README.md"
BENCHMARKS = (REPOSITORY / "benchmarks" / "README.md").read_text(encoding="utf-8")
RESULTS = (REPOSITORY / "benchmarks" / "loading" / "results.md").read_text(encoding="utf-8")

COLUMNS = {"MULT": "mult", "MSTR": "mstr", "MDS": "mosaicml-streaming", "Lance": "lance", "WebDataset": "webdataset"}
MEASURES = {
    "random_all": "random, all three, samples/s",
    "random_image_text": "random, image and text, samples/s",
    "random_text": "random, text only, samples/s",
    "sequential_all": "in order, all three, samples/s",
    "sequential_text": "in order, text only, samples/s",
    "decoded_exact": "decoded batches, samples/s",
    "decoded_fast": "the same, decoded at a fraction of the size, samples/s",
    "first_batch": "from opening to the first decoded batch, ms",
    "cold_random": "random, nothing in the page cache, samples/s",
    "open_warm": "opening, ms",
    "write": "writing from memory, GB/s",
    "size": "overhead of the files, %",
}
CANNOT = {("WebDataset", "open_warm")}  # it opens nothing before it is iterated

STRENGTHS = (
    ("WebDataset", "reading in order, samples/s", "webdataset", "sequential_all"),
    ("MDS", "random access, samples/s", "mosaicml-streaming", "random_all"),
    ("MDS", "the same without the page cache, samples/s", "mosaicml-streaming", "cold_random"),
    ("Hugging Face `datasets`", "memory-mapped tables, random samples/s", "hf-datasets", "random_all"),
    ("LMDB", "key-value look-ups, samples/s", "lmdb", "random_all"),
    ("Lance", "one column of random rows, values/s", "lance", "random_text"),
    ("FFCV", "decoded training batches, images/s", "ffcv", "decoded_exact"),
    ("LitData", "from opening to the first batch, ms", "litdata", "first_batch"),
)
"""What other projects are known for: the project, its strength, and its candidate and row in the benchmarks' table."""


def glance() -> dict[str, dict[str, str]]:
    """The values of each candidate, by row, of the benchmarks' first table."""
    part = BENCHMARKS.split("### All at a glance\n")[1].split("\n### ")[0]
    head, _, *lines = [line for line in part.splitlines() if line.startswith("|")]
    names = [re.sub(r"[`*]| .*", "", cell.strip()) for cell in head.strip("|").split("|")]
    rows = ([cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


def table() -> str:
    """The table of the page."""
    values = glance()
    lines = [f"| row | measure | {' | '.join(COLUMNS)} |", "| --- | --- |" + " ---: |" * len(COLUMNS)]
    for row, measure in MEASURES.items():
        cells = [values[candidate][row] for candidate in COLUMNS.values()]
        assert [c for c, v in zip(COLUMNS, cells, strict=True) if not v] == [c for c, r in CANNOT if r == row]
        lines.append(f"| `{row}` | {measure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def strengths() -> str:
    """The table of the README: what others are known for, measured with them and with MULT."""
    values = glance()
    lines = ["| project | its strength | theirs | ours |", "| --- | --- | ---: | ---: |"]
    for project, strength, candidate, row in STRENGTHS:
        lines.append(f"| {project} | {strength} | {values[candidate][row]} | {values['mult'][row]} |")
    return "\n".join(lines)


TABLES = {PAGE: table, README: strengths}


def page(path: Path) -> str:
    """A page with the table as the benchmarks have it."""
    head, mark, rest = path.read_text(encoding="utf-8").partition("<!-- figures -->\n")
    return f"{head}{mark}{TABLES[path]()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.name))
def test_the_table_is_that_of_the_benchmarks(path: Path) -> None:
    """Both pages are what `python tests/pages/test_comparison.py` writes."""
    assert path.read_text(encoding="utf-8") == page(path)


def test_versions_and_ratios_are_those_of_the_benchmarks() -> None:
    """The versions that the page names, and how much faster text alone is read, are in the benchmarks' tables."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    versions = RESULTS.split("Versions: ")[1].splitlines()[0]
    for name in ("mm-assets", "webdataset", "mosaicml-streaming", "pylance"):
        (version,) = re.findall(rf"\b{name} ([\d.]+\d)", versions)
        assert f"{name} {version}" in text
    part = BENCHMARKS.split("### Selective loading")[1]
    ratios = dict(re.findall(r"^\| \**([\w-]+)\** \| \S+ \| \S+ \| (\S+) \|", part, flags=re.MULTILINE))
    said = "{mult} times as fast as image and text in MULT, {mstr} in MSTR, {lance} in Lance, {webdataset} in MDS"
    assert said.format(**ratios) in text
    assert ratios["mosaicml-streaming"] == ratios["webdataset"]


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(page(path), encoding="utf-8")
