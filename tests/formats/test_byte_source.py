"""Mapped files, and tables over any source."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from mm_assets.errors import EncodeError, TruncatedError
from mm_assets.formats import MappedFile, ModalitySpec, MstrWriter, MultWriter, Payload, open_reader
from mm_assets.formats import byte_source as module
from mm_assets.formats.byte_source import Table, drop_pages, gather
from mm_assets.formats.records import take

from .examples import MemorySource


def test_mapped_file(tmp_path: Path) -> None:
    """A mapped file gives views of its bytes, one or many, and says so when it is closed."""
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    source = MappedFile(path)
    assert (source.name, source.size) == (str(path), 10)
    view = source.view(2, 3)
    assert view == b"234"
    assert source.view_many([(0, 1), (9, 1), (4, 0)]) == [b"0", b"9", b""]
    source.drop(0, 10)
    assert view == b"234"
    source.close()
    source.close()
    source.drop(0, 10)
    assert view == b"234"
    for call in (lambda: source.view(0, 1), lambda: source.view_many([(0, 1)])):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_empty_file(tmp_path: Path) -> None:
    """An empty file, which cannot be mapped, gives no bytes."""
    (tmp_path / "x").write_bytes(b"")
    source = MappedFile(tmp_path / "x")
    assert source.size == 0
    assert source.view(0, 0) == b""
    source.drop(0, 0)
    source.close()


def test_mapping_ends_with_its_last_view(tmp_path: Path) -> None:
    """Closing leaves no descriptor open, and the mapping goes with the last view."""
    path = tmp_path / "x"
    path.write_bytes(bytes(100_000))

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    before = len(os.listdir("/proc/self/fd"))
    source = MappedFile(path)
    view = source.view(0, 10)
    source.close()
    assert mapped()
    del view, source
    assert not mapped()
    assert len(os.listdir("/proc/self/fd")) == before


def test_refused_file_is_closed(tmp_path: Path) -> None:
    """A file that is refused at open is not kept open."""
    path = tmp_path / "x"
    path.write_bytes(b"no packed file")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ValueError, match="not a packed file"):
            open_reader(path)
    assert len(os.listdir("/proc/self/fd")) == before


def resident() -> int:
    """Bytes of file pages that this process holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) << 10
    pytest.skip("the kernel does not say")


@pytest.mark.parametrize("writer", [MultWriter, MstrWriter])
def test_verify_does_not_hold_the_file(tmp_path: Path, writer: type) -> None:
    """Verifying, scanning and checksumming let the pages of a mapping go again."""
    data = os.urandom(1 << 20)
    with writer(tmp_path / "x", [ModalitySpec(name="x", type_id=1, metadata_size=8)], fsync=False) as file:
        for k in range(100):
            file.write(str(k), {"x": Payload(bytes(8), data)})
    with open_reader(tmp_path / "x") as reader:
        before = resident()
        assert reader.verify().ok
        for _ in reader.scan(verify=True):
            assert resident() - before < 64 << 20
        assert resident() - before < 40 << 20


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_table(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Rows, cells, spans and batches are the same in reach and out of it."""
    monkeypatch.setattr(module, "WHOLE_LIMIT", limit)
    numbers, words = np.arange(100, 200, dtype="<u8"), np.arange(100, dtype="<u4")
    source = MemorySource(b"abc" + numbers.tobytes() + words.tobytes())
    table, other = Table(source, 3, 100, "<u8"), Table(source, 803, 100, "<u4")
    assert (table.nbytes, table.in_reach) == (800, limit > 0)
    assert [table.cell(7), other.cell(7)] == [107, 7]
    assert table.row(3) == numbers[3:4].tobytes()
    assert table.span(5, 9).tolist() == [105, 106, 107, 108]
    assert [found.tolist() for found in gather([table, other], np.array([9, 0, 9]))] == [[109, 100, 109], [9, 0, 9]]
    assert [found.tolist() for found in gather([table, other], np.array([], np.int64))] == [[], []]
    assert (1 if limit else 8) <= len(source.requests)
    table.forget()
    assert table.array().tolist() == numbers.tolist()
    drop_pages(source, 0, 10)


def test_take() -> None:
    """A slice that a plain one would cut short is refused."""
    view = memoryview(b"0123")
    assert take(view, 1, 3, path="x", what="it") == b"123"
    assert take(view, 4, 0, path="x", what="it") == b""
    with pytest.raises(TruncatedError, match=r"x: it ends after the file \(found 4 bytes, expected at least 5\)"):
        take(view, 2, 3, path="x", what="it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name is empty"),
        ({"name": "\ud800"}, "cannot be written as UTF-8"),
        ({"type_id": -1}, "type_id is -1"),
        ({"type_id": 65536}, "type_id is 65536"),
        ({"metadata_size": 0}, "metadata_size is 0"),
        ({"metadata_size": 12}, "metadata_size is 12"),
        ({"metadata_size": 65536}, "metadata_size is 65536"),
    ],
)
def test_wrong_spec(options: dict, message: str) -> None:
    """A modality that a file cannot describe is refused when it is made."""
    with pytest.raises(EncodeError, match=message):
        ModalitySpec(**{"name": "x", "type_id": 1, "metadata_size": 8, **options})


def test_spec_is_a_value() -> None:
    """A modality's configuration is its own, and cannot be changed through it."""
    config = {"a": 1}
    spec = ModalitySpec(name="x", type_id=1, metadata_size=8, config=config)
    config["a"] = 2
    assert spec.config == {"a": 1}
    with pytest.raises(TypeError):
        spec.config["a"] = 3


def test_a_deep_copy_of_a_spec_has_its_own_configuration() -> None:
    """The values in it are copied too."""
    spec = ModalitySpec(name="x", type_id=1, metadata_size=8, config={"a": [1]})
    copied = deepcopy(spec)
    assert copied == spec
    assert copied.config["a"] is not spec.config["a"]
