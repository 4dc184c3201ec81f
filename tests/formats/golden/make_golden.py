"""Rewrites the golden files from their JSON twin. Changing one is a change of the format.

Modalities under `added` are added to a finished MSTR file, one by one; a MULT file is written with all of them.

Run as a script from anywhere; the package must be installed.
"""

from __future__ import annotations

import json
from pathlib import Path

from mm_assets.formats import ModalitySpec, MstrWriter, MultWriter, Payload, add_stream

FOLDER = Path(__file__).resolve().parent
WRITERS = {"mult": MultWriter, "mstr": MstrWriter}


def load(name: str) -> tuple[list[ModalitySpec], list[str], list[tuple[str, dict[str, Payload]]], dict[str, object]]:
    """Modalities, names of those that are added, samples and provenance of one twin."""
    twin = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    specs = [ModalitySpec(**spec) for spec in twin["modalities"]]
    samples = [
        (
            sample["id"],
            {
                key: Payload(bytes.fromhex(value["metadata"]), bytes.fromhex(value["data"]))
                for key, value in sample["payloads"].items()
            },
        )
        for sample in twin["samples"]
    ]
    return specs, twin.get("added", []), samples, twin["provenance"]


def make(name: str, extension: str, path: Path) -> None:
    """Writes one golden file to `path`."""
    specs, added, samples, provenance = load(name)
    later = [spec for spec in specs if extension == "mstr" and spec.name in added]
    first = [spec for spec in specs if spec not in later]
    with WRITERS[extension](path, first, provenance=provenance, fsync=False) as writer:
        for sample_id, payloads in samples:
            writer.write(sample_id, {spec.name: payloads.get(spec.name) for spec in first})
    for spec in later:
        add_stream(path, spec, [payloads.get(spec.name) for _, payloads in samples], fsync=False)


def hexdump(data: bytes) -> list[str]:
    """Lines of 16 bytes with position and text, equal lines folded to `*`, as `hexdump -C` prints them."""
    lines: list[str] = []
    last = None
    for position in range(0, len(data), 16):
        row = data[position : position + 16]
        if row == last:
            if lines[-1] != "*":
                lines.append("*")
            continue
        last = row
        digits = row.hex(" ").ljust(47)
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{position:08x}  {digits[:23]}  {digits[24:]}  |{text}|")
    return [*lines, f"{len(data):08x}"]


if __name__ == "__main__":
    for twin in sorted(FOLDER.glob("*.json")):
        for extension in WRITERS:
            make(twin.stem, extension, twin.with_suffix(f".{extension}"))
