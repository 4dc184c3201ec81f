"""What a disk that is full does to files that users write."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import mm_assets
from mm_assets.dataset.add_stream import add_stream
from mm_assets.errors import SourceError, full_disk_named
from mm_assets.fields import BytesField, TextField
from mm_assets.formats.convert import convert

VALUE = bytes(1 << 20)


def fill_disk(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
    """From now on every write fails."""

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)


def write(path: Path, count: int) -> None:
    with mm_assets.create(path, {"value": BytesField()}, fsync=False) as writer:
        for i in range(count):
            writer.write(str(i), {"value": VALUE})


@pytest.mark.parametrize("form", ["mult", "mstr"])
@pytest.mark.parametrize("count", [1, 40])  # found by `close`, and by a `write` before it
def test_a_full_disk_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, count: int) -> None:
    """A new file on a full disk is a `SourceError` that names the file and what to do; the older file stays."""
    path = tmp_path / f"x.{form}"
    path.write_bytes(b"older")
    fill_disk(monkeypatch)
    with pytest.raises(SourceError, match=r"No space left on device: free some space") as caught:
        write(path, count)
    assert caught.value.path == str(path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"older"


def test_a_full_disk_while_copying_payloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads that are encoded already, and a conversion, end alike; any other failure of the disk stays its own."""
    write(tmp_path / "a.mult", 1)
    fill_disk(monkeypatch)
    with pytest.raises(SourceError, match=r"b\.mstr: cannot be written: No space left"):
        convert(tmp_path / "a.mult", tmp_path / "b.mstr")
    writer = mm_assets.create(tmp_path / "c.mult", {"value": BytesField()})
    writer.write_payloads("0", {"value": BytesField().encode(VALUE)})
    with pytest.raises(SourceError, match=r"c\.mult: cannot be written: No space left"):
        writer.close()
    fill_disk(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "d.mult", 1)
    assert [one.name for one in tmp_path.iterdir()] == ["a.mult"]


def test_a_full_disk_while_adding_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file to which nothing could be added is named, reads as before, and takes the stream later."""
    path = tmp_path / "x.mstr"
    write(path, 2)
    before = path.read_bytes()
    with monkeypatch.context() as full:
        fill_disk(full)
        with pytest.raises(SourceError, match="No space left on device") as caught:
            add_stream(path, "text", TextField(), ["a", None])
    assert caught.value.path == str(path)
    assert path.read_bytes() == before
    add_stream(path, "text", TextField(), ["a", None])
    with mm_assets.open(path) as data:
        assert data.read_modality("text", [0, 1]) == ["a", None]


def test_the_file_is_named_as_its_caller_knows_it() -> None:
    """What was a temporary file to the writer has the name of its target in the message."""
    with (
        pytest.raises(SourceError, match="cannot be written: Disk quota exceeded") as caught,
        full_disk_named("s3://bucket/x.mult"),
        full_disk_named(".x.mult.tmp"),
    ):
        raise OSError(errno.EDQUOT, "")
    assert caught.value.path == "s3://bucket/x.mult"
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(SourceError, match=r"^a: b$"), full_disk_named("c"):
        raise SourceError("a", "b")
