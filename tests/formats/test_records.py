"""The byte layout: golden files, the tables of docs/spec/format.md, and readers that know nothing of this package."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mm_assets.formats import ModalitySpec, MstrWriter, MultWriter, Payload, open_reader
from mm_assets.formats import records as layout

from . import independent_reader
from .examples import SAMPLES, SPECS, plain, write

FOLDER = Path(__file__).parent / "golden"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "spec" / "format.md"
TWINS = sorted(path.stem for path in FOLDER.glob("*.json"))
DTYPES = {
    "2.1": layout.MULT_HEADER,
    "2.2": layout.MULT_DESCRIPTOR,
    "2.3": layout.MULT_INDEX_ENTRY,
    "2.4": layout.sample_header(3),
    "3.1": layout.MSTR_HEADER,
    "3.2": layout.MSTR_DESCRIPTOR,
    "3.3": layout.MSTR_ROW_PREFIX,
    "4.1": layout.TRAILER,
    "4.2": layout.SECTION_TABLE_HEADER,
    "4.3": layout.SECTION_ENTRY,
}


@pytest.fixture(scope="module")
def make_golden() -> ModuleType:
    """The script beside the golden files."""
    spec = importlib.util.spec_from_file_location("make_golden", FOLDER / "make_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def document() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("extension", ["mult", "mstr"])
@pytest.mark.parametrize("name", TWINS)
def test_written(make_golden: ModuleType, tmp_path: Path, name: str, extension: str) -> None:
    """The twin is written as the golden file, byte for byte."""
    make_golden.make(name, extension, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == (FOLDER / f"{name}.{extension}").read_bytes()


@pytest.mark.parametrize("extension", ["mult", "mstr"])
@pytest.mark.parametrize("name", TWINS)
def test_read(name: str, extension: str) -> None:
    """The golden file is read as its twin says, value by value."""
    twin = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    with open_reader(FOLDER / f"{name}.{extension}", verify=True) as reader:
        assert reader.format == extension.upper()
        assert reader.provenance == twin["provenance"]
        assert [
            {
                "name": spec.name,
                "type_id": spec.type_id,
                "metadata_size": spec.metadata_size,
                "type_name": spec.type_name,
                "config": dict(spec.config),
            }
            for spec in reader.modalities
        ] == twin["modalities"]
        assert list(reader.sample_ids) == [sample["id"] for sample in twin["samples"]]
        for i, sample in enumerate(twin["samples"]):
            for modality, found in reader.read_sample(i).items():
                value = sample["payloads"].get(modality)
                wanted = value and (bytes.fromhex(value["metadata"]), bytes.fromhex(value["data"]))
                assert plain(found) == wanted
        assert reader.verify().ok


def test_twins_are_complete() -> None:
    """Every golden file has its twin, and there are some."""
    assert len(TWINS) >= 4
    assert {path.name for path in FOLDER.glob("*.m*t*")} == {f"{name}.{e}" for name in TWINS for e in ("mult", "mstr")}


@pytest.mark.parametrize("extension", ["mult", "mstr"])
def test_document_shows_the_golden_file(document: str, make_golden: ModuleType, extension: str) -> None:
    """The hex dump in the document is the golden file's, and each explained row has its bytes."""
    data = (FOLDER / f"pair.{extension}").read_bytes()
    part = document.split(f"<!-- hexdump of pair.{extension} -->")[1].split("<!--")[0]
    block = re.search(r"```text\n(.*?)```", part, re.DOTALL)[1]
    assert block.splitlines() == make_golden.hexdump(data)
    rows = re.findall(r"^\| 0x([0-9a-f]+) \| `([0-9a-f ]+)` \|", part, re.MULTILINE)
    assert len(rows) > 20
    for position, digits in rows:
        at, wanted = int(position, 16), bytes.fromhex(digits)
        assert data[at : at + len(wanted)] == wanted, position


def document_fields(document: str, section: str) -> list[tuple[str, int, int, str]]:
    """(name, offset, bytes, type) of the rows of a section's table, for M = 3."""
    part = re.search(rf"^### {re.escape(section)} .*?(?=^##)", document, re.DOTALL | re.MULTILINE)[0]

    def number(text: str) -> int:
        terms = [term.split("·") for term in text.replace("M", "3").split("+")]
        return sum(int(np.prod([ast.literal_eval(factor.strip()) for factor in term])) for term in terms)

    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| `(\w+)` \|", part, re.MULTILINE)
    return [(name, number(offset), number(size), kind) for offset, size, kind, name in rows]


@pytest.mark.parametrize("section", DTYPES)
def test_document_has_the_dtypes(document: str, section: str) -> None:
    """Every record's dtype is the document's table of that section: names, positions, sizes, types."""
    dtype = DTYPES[section]
    found = []
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]
        base = f"u{field.base.itemsize * 8}" + ("[M]" if field.shape else "")
        found.append((name, offset, field.itemsize, "bytes" if field.kind == "S" else base))
    assert found == document_fields(document, section)
    assert sum(size for _, _, size, _ in found) == dtype.itemsize  # packed: no hidden padding
    assert all(field[0].base.str[0] in "<|" for field in dtype.fields.values())


def test_every_table_is_tested(document: str) -> None:
    """No section of the document has a record table that is not compared."""
    sections = re.findall(r"^### (\d\.\d) ", document, re.MULTILINE)
    assert [section for section in sections if document_fields(document + "\n##", section)] == list(DTYPES)


def test_limits_of_the_document(document: str) -> None:
    """The limits in the document are the code's."""
    assert layout.MAX_SAMPLES == layout.MAX_SAMPLE_SIZE == layout.MAX_PAYLOAD_SIZE == 2**32 - 1
    assert (layout.MAX_MODALITIES, layout.MAX_RECORD_SIZE) == (32, 65528)
    for text in ("| samples | 2^32 − 1 |", "| modalities | 1 to 32 |", "8 to 65,528 bytes, a multiple of 8"):
        assert text in document


def test_schema_example_of_the_document(document: str) -> None:
    """The schema that the document shows is one as writers make it."""
    text = re.search(r"```json\n(.*?)\n```", document, re.DOTALL)[1]
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


# --- readers that know nothing of this package ------------------------------------------------------------------------


def large_samples() -> tuple[list[ModalitySpec], list[tuple[str, dict[str, Payload | None]]]]:
    """300 samples of 5 modalities, sparse and of all sizes."""
    rng = np.random.default_rng(5)
    specs = [ModalitySpec(name=f"m{k}", type_id=k, metadata_size=8 * (k + 1)) for k in range(5)]
    samples = []
    for i in range(300):
        payloads = {
            spec.name: Payload(rng.bytes(spec.metadata_size), rng.bytes(int(rng.integers(0, 3000))))
            for spec in specs
            if rng.random() < 0.6
        }
        samples.append((f"sample {i}", payloads))
    return specs, samples


@pytest.fixture(params=["small", "large", "none"])
def case(request: pytest.FixtureRequest) -> tuple:
    if request.param == "large":
        return large_samples()
    return SPECS, SAMPLES if request.param == "small" else ()


def test_it_imports_nothing_of_ours() -> None:
    """The independent readers import struct and NumPy only."""
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"struct", "numpy"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


def test_unified(tmp_path: Path, case: tuple) -> None:
    """Every payload of a MULT file is found, and every absent one is absent."""
    specs, samples = case
    descriptors, rows = independent_reader.read_unified(write(MultWriter, tmp_path / "x", samples, specs).read_bytes())
    assert [tuple(d) for d in descriptors.tolist()] == [
        (zlib.crc32(spec.name.encode()), spec.type_id, spec.metadata_size) for spec in specs
    ]
    assert rows == [[plain(payloads.get(spec.name)) for spec in specs] for _, payloads in samples]


def test_streams(tmp_path: Path, case: tuple) -> None:
    """Every payload of an MSTR file is found, its record behind the stream prefix."""
    specs, samples = case
    table, streams = independent_reader.read_streams(write(MstrWriter, tmp_path / "x", samples, specs).read_bytes())
    assert table["name_hash"].tolist() == [zlib.crc32(spec.name.encode()) for spec in specs]
    assert table["metadata_size"].tolist() == [16 + spec.metadata_size for spec in specs]
    for spec, rows in zip(specs, streams, strict=True):
        found = [None if row is None else (row[0][16:], row[1]) for row in rows]
        assert found == [plain(payloads.get(spec.name)) for _, payloads in samples]
