"""Tests of the script of `mm-assets leave`, which reads packed files with Python alone."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import mm_assets
from mm_assets.cli.leave import command
from mm_assets.fields import BytesField, JSONField, NDArrayField, ScalarField, SequenceField, TextField, TokensField

FIELDS = {
    "image": BytesField(),
    "text": TextField(),
    "state": NDArrayField(),
    "label": ScalarField("int16"),
    "pages": SequenceField(TextField()),
    "tokens": TokensField(),
    "metadata": JSONField(),
}


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_the_script_gives_every_payload(tmp_path: Path, form: str) -> None:
    """Files, texts, arrays, numbers and items of sequences are members; any other payload is kept whole."""
    path = tmp_path / f"a.{form}"
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        writer.write(
            "folder/a.b",
            {
                "image": b"\x89PNG\r\n\x1a\nx",
                "text": "é",
                "state": np.arange(6, dtype=np.float32).reshape(2, 3),
                "label": -3,
                "pages": [(1, "one"), (4, "")],
                "tokens": [1, 2],
                "metadata": {"n": 1},
            },
        )
        writer.write("b", {"text": ""})
    assert CliRunner().invoke(command, [str(path)]).exit_code == 0
    script = tmp_path / "leave.py"
    assert len(script.read_text().splitlines()) <= 100
    subprocess.run([sys.executable, "-I", "-S", str(script), str(tmp_path / "out")], check=True, cwd="/")
    with tarfile.open(tmp_path / "out" / "a.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    array = np.load(io.BytesIO(members.pop("folder/a%2Eb.state.npy")))
    np.testing.assert_array_equal(array, np.arange(6, dtype=np.float32).reshape(2, 3))
    with mm_assets.open(path) as dataset:
        (tokens,) = dataset.stored([0], ["tokens"])["tokens"]
        assert tokens is not None
        assert members.pop("folder/a%2Eb.tokens.payload") == tokens.metadata() + tokens.read(0, tokens.size)
    assert members == {
        "folder/a%2Eb.png": b"\x89PNG\r\n\x1a\nx",
        "folder/a%2Eb.txt": "é".encode(),
        "folder/a%2Eb.label.txt": b"-3",
        "folder/a%2Eb.pages.1.txt": b"one",
        "folder/a%2Eb.pages.4.txt": b"",
        "folder/a%2Eb.json": b'{"n":1}',
        "b.txt": b"",
    }
