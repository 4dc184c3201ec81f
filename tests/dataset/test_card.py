"""Tests of dataset cards: what they say, that Croissant's own library takes them, and hostile names."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

import mm_assets
from mm_assets.cli.main import main
from mm_assets.exports import export
from mm_assets.fields import BytesField, TextField

from ..pipeline.chain import declare, run_chain
from ..sources.tars import build


def image(color: int) -> bytes:
    """A small PNG."""
    target = io.BytesIO()
    Image.new("RGB", (8, 6), (color, 20, 30)).save(target, format="png")
    return target.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dataset whose samples have licences, and columns with odd names."""
    root = tmp_path_factory.mktemp("card")
    files = [
        (f"k{n}.{suffix}", content)
        for n in range(3)
        for suffix, content in (
            ("json", json.dumps({"license": f"CC-{n // 2}", "odd | [name]": n, "tags": ["a", "b"]}).encode()),
            ("png", image(n)),
            ("txt", b"a text"),
        )
    ]
    (root / "a.tar").write_bytes(build(files))
    run_chain(declare(root / "out", root / "a.tar", materialize="write"))
    return root / "out/data"


def test_a_card_has_the_facts_of_a_version(folder: Path) -> None:
    """Counts, fields, measures, licences, the digest and the settings are in the README and in Croissant."""
    card = mm_assets.dataset_card(folder / "manifest.json", cite_as="A. Author, 2026")
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    for line in (
        "3 samples with image, text, metadata.",
        f"Version: `{digest}` (SHA-256 of the manifest).",
        "| image | ImageField | 3 | ",
        "| image, width | pixels | 8 | 8 | 8 |",
        "| CC-0 | 2 |",
        "| metadata | 3 |",
        '     "filtered\\_rows": {'.replace("\\", ""),
        "    A. Author, 2026",
        "- n<1K",
    ):
        assert line in card.readme
    assert card.croissant["license"] == ["CC-0", "CC-1"]
    assert card.croissant["version"] == f"1.0.0+{digest[:16]}"
    (manifest,) = (one for one in card.croissant["distribution"] if one["@id"] == "manifest")
    assert hashlib.sha256((folder / manifest["contentUrl"]).read_bytes()).hexdigest() == manifest["sha256"] == digest
    measured = {one["name"]: (one["minValue"], one["maxValue"]) for one in card.croissant["variableMeasured"]}
    assert measured["image.height"] == (6, 6)
    assert mm_assets.dataset_card(folder, cite_as="A. Author, 2026").files() == card.files()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_the_library_of_croissant_reads_the_rows(folder: Path, tmp_path: Path) -> None:
    """`mlcroissant` validates the description, and reads the rows of the version with texts, numbers and pictures."""
    mlcroissant = pytest.importorskip("mlcroissant", reason="mlcroissant is not installed")
    result = CliRunner().invoke(main, ["card", str(folder / "manifest.json"), str(folder), "--license", "CC0-1.0"])
    assert result.exit_code == 0, result.output
    (folder / "filtered_rows" / "other.0123456789abcdef.parquet").write_bytes(b"of another version")
    dataset = mlcroissant.Dataset(jsonld=str(folder / "croissant.json"))
    assert (dataset.metadata.name, dataset.metadata.license) == ("data", ["CC0-1.0"])
    rows = list(dataset.records(record_set="filtered_rows"))
    assert len(rows) == 9
    by_place = {(row["filtered_rows/sample_id"], row["filtered_rows/position"]): row for row in rows}
    first = by_place[b"k0", -1]
    numbers = [row for name, row in first.items() if name.rpartition("/")[2].isdigit()]
    assert (first["filtered_rows/license"], first["filtered_rows/tags"], numbers) == (b"CC-0", [b"a", b"b"], [0])
    pictures = [row["filtered_rows/binary_content"] for row in rows if row["filtered_rows/modality"] == b"image"]
    assert [picture.size for picture in pictures] == [(8, 6)] * 3


def test_other_files_are_not_replaced(folder: Path, tmp_path: Path) -> None:
    """A README of your own stays, unless it is to be replaced."""
    (tmp_path / "README.md").write_text("mine")
    result = CliRunner().invoke(main, ["card", str(folder), str(tmp_path)])
    assert (result.exit_code, "--overwrite replaces it" in result.output) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert CliRunner().invoke(main, ["card", str(folder), str(tmp_path), "--overwrite"]).exit_code == 0
    assert "# data" in (tmp_path / "README.md").read_text()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """Names and descriptions cannot add markup to the README, nor lines to its header."""
    path = tmp_path / "a # b\n---\nlicense: mit.mstr"
    with mm_assets.create(path, {"x | <b>": BytesField(), "text": TextField()}, fsync=False) as writer:
        writer.write("k", {"x | <b>": b"1", "text": "t"})
    card = mm_assets.dataset_card(path, license="mine\nevil: true", description="<script>")
    header, body = card.readme.split("---\n")[1:3]
    assert "evil" not in header
    assert "\nlicense: " not in header
    assert "\\<script\\>" in body
    assert "| x \\| \\<b\\> | BytesField | 1 |" in body


def test_an_export_has_its_card(folder: Path, tmp_path: Path) -> None:
    """An export names its shards and the version that it is from, also one of a part of the samples."""
    with mm_assets.open(folder) as dataset:
        export(dataset.select([0, 2]), "webdataset", tmp_path / "out", shard_samples=1)
    croissant = json.loads((tmp_path / "out/croissant.json").read_text())
    (shards,) = croissant["distribution"]
    assert shards["includes"] == ["shard-000000.tar", "shard-000001.tar"]
    assert "Format: webdataset, exported from `" in (tmp_path / "out/README.md").read_text()
    assert "2 samples with" in croissant["description"]
