"""Conversion between MULT and MSTR, and opening by what a file says it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import CorruptError, EncodeError
from mm_assets.formats import (
    MstrReader,
    MstrWriter,
    MultReader,
    MultWriter,
    convert,
    mstr_writer,
    open_reader,
    write_mstr,
)

from .container_suite import contents
from .examples import PROVENANCE, SAMPLES, SPECS, MemorySource, Writer, plain, without_tail, write

PAIRS = [(MultWriter, "mult", "mstr"), (MstrWriter, "mstr", "mult")]


def test_open_reader(tmp_path: Path) -> None:
    """A file is opened by its magic, whatever its name, local or not."""
    for writer, reader in ((MultWriter, MultReader), (MstrWriter, MstrReader)):
        path = write(writer, tmp_path / "x.dat")
        for source in (path, str(path), MemorySource(path.read_bytes())):
            with open_reader(source) as opened:
                assert type(opened) is reader
                assert len(opened) == 4


@pytest.mark.parametrize(("writer", "first", "second"), PAIRS)
def test_round_trip(tmp_path: Path, writer: Writer, first: str, second: str) -> None:
    """Converted and back, a file has its first bytes; converted, those that its writer would have written."""
    source = write(writer, tmp_path / f"a.{first}")
    summary = convert(source, tmp_path / f"b.{second}", fsync=False)
    other = MstrWriter if writer is MultWriter else MultWriter
    assert (tmp_path / f"b.{second}").read_bytes() == write(other, tmp_path / "direct").read_bytes()
    assert summary.num_samples == 4
    assert summary.num_present == {"image": 2, "text": 2}
    convert(tmp_path / f"b.{second}", tmp_path / f"c.{first}")
    assert (tmp_path / f"c.{first}").read_bytes() == source.read_bytes()
    convert(source, tmp_path / f"same.{first}")
    assert (tmp_path / f"same.{first}").read_bytes() == source.read_bytes()
    convert(MemorySource(source.read_bytes()), tmp_path / f"remote.{first}")
    assert (tmp_path / f"remote.{first}").read_bytes() == source.read_bytes()


@settings(deadline=None, max_examples=30)
@given(content=contents())
def test_any_content(tmp_path_factory: pytest.TempPathFactory, content: tuple) -> None:
    """Any file survives both ways, byte for byte."""
    specs, samples = content
    folder = tmp_path_factory.mktemp("convert")
    source = write(MultWriter, folder / "a.mult", samples, specs)
    convert(source, folder / "b.mstr", fsync=False)
    convert(folder / "b.mstr", folder / "c.mult", fsync=False)
    assert (folder / "c.mult").read_bytes() == source.read_bytes()


@settings(deadline=None, max_examples=40)
@given(content=contents(), block=st.integers(20, 3000), near=st.sampled_from([0, 64, 1 << 10]))
def test_a_copy_in_order_is_what_a_writer_writes(
    tmp_path_factory: pytest.TempPathFactory, content: tuple, block: int, near: int
) -> None:
    """An MSTR file that is copied from a MULT file, from its start to its end, has the bytes that its writer writes."""
    specs, samples = content
    folder = tmp_path_factory.mktemp("copy")
    expected = write(MstrWriter, folder / "a.mstr", samples, specs).read_bytes()
    with MultWriter(folder / "a.mult", specs, provenance=PROVENANCE, fsync=False) as writer:
        for sample_id, payloads in samples:
            writer.write(sample_id, payloads)
    data = (folder / "a.mult").read_bytes()
    parts: list[bytes] = []
    blocks = ((start, data[start : start + block]) for start in range(0, len(data), block))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mstr_writer, "_NEAR", near)
        patch.setattr(mstr_writer, "_READ", 7 * block)
        summary = write_mstr(writer, folder / "b.mstr", blocks, fsync=False, observe=parts.append)
    assert b"".join(parts) == (folder / "b.mstr").read_bytes() == expected
    assert (summary.num_samples, summary.num_bytes) == (len(samples), len(expected))


def test_a_copy_of_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """If the MULT file ends too early, the target stays as it was."""
    with MultWriter(tmp_path / "a.mult", SPECS, fsync=False) as writer:
        for sample_id, payloads in SAMPLES:
            writer.write(sample_id, payloads)
    target = tmp_path / "b.mstr"
    target.write_bytes(b"old")
    os.truncate(tmp_path / "a.mult", writer.places(0).ptrs.max())
    data = (tmp_path / "a.mult").read_bytes()
    with pytest.raises(OSError, match="a MULT file ends before the payload at byte"):
        write_mstr(writer, target, [(0, data)])
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mult", "b.mstr"]


@pytest.mark.parametrize(("writer", "first", "second"), PAIRS)
def test_damage_is_not_laundered(tmp_path: Path, writer: Writer, first: str, second: str) -> None:
    """A damaged source is refused, because the copy would get right checksums; the target stays as it was."""
    source = write(writer, tmp_path / f"a.{first}")
    source.write_bytes(source.read_bytes().replace(b"hello", b"jello"))
    target = tmp_path / f"b.{second}"
    target.write_bytes(b"old")
    with pytest.raises(CorruptError, match="sample 0, modality 'text'"):
        convert(source, target)
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{first}", f"b.{second}"]
    convert(source, target, verify=False)
    with open_reader(target) as reader:
        assert reader.read_payload(0, "text").data == b"jello"


@pytest.mark.parametrize(("writer", "first", "second"), PAIRS)
def test_without_tail(tmp_path: Path, writer: Writer, first: str, second: str) -> None:
    """A source without our tail is converted when its modalities are given; ids are numbers."""
    source = tmp_path / f"a.{first}"
    source.write_bytes(without_tail(write(writer, source).read_bytes()))
    convert(source, tmp_path / f"b.{second}", modalities=SPECS)
    with open_reader(tmp_path / f"b.{second}", verify=True) as reader:
        assert list(reader.sample_ids) == ["0", "1", "2", "3"]
        for i, (_, payloads) in enumerate(SAMPLES):
            assert plain(reader.read_payload(i, "text")) == plain(payloads.get("text"))


def test_extension(tmp_path: Path) -> None:
    """Another extension is refused, naming those there are."""
    source = write(MultWriter, tmp_path / "a.mult")
    with pytest.raises(EncodeError, match=r"the extension is '.bin', expected '.mult' or '.mstr'"):
        convert(source, tmp_path / "b.bin")
