"""Writes the table of docs/interop.md from the results of the tests: ``python tests/interop/page.py RESULTS``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
START, END = "<!-- tests/interop/page.py writes from here -->\n", "<!-- to here -->\n"
OWNERS = {
    "webdataset": "webdataset",
    "energon": "megatron-energon",
    "zip": "python",
    "folder": "python",
    "mds": "mosaicml-streaming",
    "litdata": "litdata",
    "hf": "datasets",
    "arrow": "datasets",
    "parquet": "pyarrow",
    "lance": "pylance",
    "lerobot": "lerobot",
    "hdf5": "h5py",
    "mcap": "mcap",
}
"""The package that writes and reads each format."""
TITLES = {
    "arrow": "Arrow, by `save_to_disk`",
    "zip": "ZIP",
    "folder": "folder of files",
    "hdf5": "HDF5",
    "mcap": "MCAP",
}


def table(results: Mapping[str, Any]) -> str:
    """Returns the rows of formats: how many data sets were equal in each test."""
    versions = results["versions"]
    equal = Counter((test, format) for test, format, _ in results["results"])
    sources: dict[str, list[str]] = {}
    for test, name, _ in results["results"]:
        if test == "pair":
            source, format = name.split()
            sources.setdefault(format, []).append(source)
    lines = [
        "| format | library | written by it and packed here | exported here and opened by it | packed again |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for format, package in OWNERS.items():
        exported = f"{equal['opened', format]} equal" if equal["opened", format] else "not an export"
        pairs = sources.get(format, ())
        again = f"{len(pairs)} equal, of {len(set(pairs))} sources" if pairs else ""
        title = TITLES.get(format, f"[`{format}`](exports.md#{format})")
        written = f"{equal['packed', format]} equal"
        lines.append(f"| {title} | {package} {versions[package]} | {written} | {exported} | {again} |")
    data = list(dict.fromkeys(corpus for _, _, corpus in results["results"]))
    return "\n".join([*lines, "", f"Data sets: {', '.join(data)}. mm_assets {versions['mm_assets']}.", ""])


def main(results: Path) -> None:
    """Replaces the table in the page."""
    text = PAGE.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{table(json.loads(results.read_text()))}\n{END}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
