"""Raw reads of many samples: the same bytes and the same refusals as reads of single payloads, of any source."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import CorruptError, FormatError
from mm_assets.formats import (
    ModalitySpec,
    MstrReader,
    MstrWriter,
    MultReader,
    MultWriter,
    Payload,
    batch,
    byte_source,
    fast_path,
    open_reader,
)
from mm_assets.formats.fast_path import read_raw, scan_raw
from mm_assets.formats.page_cache import CAN_ADVISE, PageCache

from .examples import SAMPLES, SPECS, MemorySource, sealed, sections_of, without_tail, write

WRITERS = {"mult": MultWriter, "mstr": MstrWriter}
FULL = tuple(
    (f"f{k}", {"image": Payload(bytes([k]) * 16, bytes([k]) * (50 * k)), "text": Payload(bytes(8), b"t" * k)})
    for k in range(9)
)
Reader = MultReader | MstrReader

# macOS has no posix_fadvise: there nothing is looked at and nothing is asked for.
needs_advice = pytest.mark.skipif(not CAN_ADVISE, reason="the system has no posix_fadvise to ask for pages with")


@pytest.fixture(params=["mult", "mstr"])
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def wanted(samples: tuple, indices: list[int], name: str) -> list[bytes | None]:
    """The data that was written."""
    found = [samples[i][1].get(name) for i in indices]
    return [None if payload is None else bytes(payload.data) for payload in found]


def plain(column: list[memoryview | None]) -> list[bytes | None]:
    """Views as bytes, to compare."""
    return [None if view is None else bytes(view) for view in column]


def readers(path: Path) -> Iterator[Reader]:
    """The file mapped, mapped with checksums checked, in memory as a remote one, and mapped without its tail."""
    yield open_reader(path)
    yield open_reader(path, verify=True)
    yield open_reader(MemorySource(path.read_bytes()))
    bare = path.with_name("bare")
    bare.write_bytes(without_tail(path.read_bytes()))
    yield open_reader(bare, modalities=SPECS)


@pytest.mark.parametrize("samples", [SAMPLES, FULL])
def test_batches(tmp_path: Path, form: str, samples: tuple) -> None:
    """A batch holds each sample's data in the order asked, repeats and negative indices too, None where absent."""
    path = write(WRITERS[form], tmp_path / "x", samples)
    for reader in readers(path):
        with reader:
            for indices in ([2, 0, -1, 1, 0], list(range(len(samples))), [3], []):
                for names in (reader.names, ("text",), ("text", "image"), ()):
                    for asked in (indices, np.array(indices, np.int64), np.array(indices, np.int16)):
                        found = read_raw(reader, asked, names)
                        assert list(found) == list(names)
                        for name, column in found.items():
                            assert plain(column) == wanted(samples, indices, name)


def test_views(tmp_path: Path, form: str) -> None:
    """What a batch gives are read-only slices of the mapping, of the modalities named, and valid after close."""
    reader = open_reader(write(WRITERS[form], tmp_path / "x", FULL))
    found = read_raw(reader, [3, 4], ["image"])
    blocks = list(scan_raw(reader, ["image"]))
    reader.close()
    for view in (*found["image"], *blocks[0]["image"]):
        assert view is not None
        assert isinstance(view.obj, mmap.mmap)
        assert view.readonly
    assert found["image"][1] == bytes([4]) * 200


@pytest.mark.parametrize("samples", [SAMPLES, FULL, ()])
@pytest.mark.parametrize(("rows", "views", "size"), [(4096, 384, 16 << 20), (3, 384, 200), (4, 2, 1), (2, 1, 1 << 20)])
def test_scans(
    tmp_path: Path,
    form: str,
    samples: tuple,
    rows: int,
    views: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scan gives every sample once, in order, whatever the blocks."""
    monkeypatch.setattr(fast_path, "SCAN_ROWS", rows)
    monkeypatch.setattr(fast_path, "SCAN_VIEWS", views)
    monkeypatch.setattr(batch, "BLOCK_BYTES", size)
    path = write(WRITERS[form], tmp_path / "x", samples)
    count = len(samples)
    for reader in readers(path):
        with reader:
            for names in (reader.names, ("text",), ("text", "image")):
                found: dict[str, list[bytes | None]] = {}
                for block in scan_raw(reader, names):
                    assert list(block) == list(names)
                    assert len({len(column) for column in block.values()}) == 1
                    for name, column in block.items():
                        found.setdefault(name, []).extend(plain(column))
                for name, column in found.items():
                    assert column == wanted(samples, list(range(count)), name)
                assert bool(found) == (count > 0)
            assert all(block == {} for block in scan_raw(reader, ()))


def test_wrong_questions(tmp_path: Path, form: str) -> None:
    """Samples and modalities that do not exist are refused at the call; a closed reader says that it is."""
    reader = open_reader(write(WRITERS[form], tmp_path / "x", FULL))
    for indices in ([9], [-10], np.array([9]), np.array([2**64 - 1], np.uint64)):
        with pytest.raises(IndexError, match="out of range for 9 samples"):
            read_raw(reader, indices, reader.names)
    for indices in ([0.5], np.zeros((1, 1), np.int64)):
        with pytest.raises(TypeError, match="expected integers"):
            read_raw(reader, indices, reader.names)
    for call in (lambda: read_raw(reader, [0], ["sound"]), lambda: scan_raw(reader, ["sound"])):
        with pytest.raises(KeyError, match="no modality 'sound'"):
            call()
    scan = scan_raw(reader, reader.names)
    reader.close()
    for read in (lambda: read_raw(reader, [0], reader.names), lambda: next(scan)):
        with pytest.raises(ValueError, match="is closed"):
            read()


def test_closed_between_look_up_and_read(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that another thread closes in the middle of a batch says so too."""
    reader = open_reader(write(WRITERS[form], tmp_path / "x", FULL))
    monkeypatch.setattr(reader, "fetch_data", lambda *_: reader.close())
    with pytest.raises(ValueError, match=r"x is closed"):
        read_raw(reader, [0], reader.names)


def test_verify(tmp_path: Path, form: str) -> None:
    """A flipped byte of the data raises where the reader verifies, else not."""
    path = write(WRITERS[form], tmp_path / "x", FULL)
    data = bytearray(path.read_bytes())
    data[data.index(bytes([7]) * 300) + 100] ^= 1
    path.write_bytes(data)
    with open_reader(path) as reader, open_reader(path, verify=True) as careful:
        assert len(read_raw(reader, [7], reader.names)["image"]) == 1
        assert read_raw(careful, [7], ["text"])["text"] == [b"t" * 7]
        for read in (
            lambda: read_raw(careful, [7], careful.names),
            lambda: list(scan_raw(careful, careful.names)),
        ):
            with pytest.raises(CorruptError, match="sample 7") as caught:
                read()
            assert caught.value.modality == "image"


def outcome(read: object) -> object:
    """What a read gives, or the error that it raises."""
    try:
        return read()
    except FormatError as error:
        return type(error), str(error)


NUMBERS = st.sampled_from([0, 1, 7, 8, 16, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 2**32, 2**64 - 16, 2**64 - 1])


@settings(deadline=None, max_examples=150)
@given(
    form=st.sampled_from(["mult", "mstr"]),
    sample=st.integers(0, 8),
    ptr=NUMBERS | st.integers(0, 12_000),
    size=st.none() | NUMBERS.map(lambda number: number % 2**32) | st.integers(0, 12_000),
    absent=st.booleans(),
)
def test_wrong_places(
    tmp_path_factory: pytest.TempPathFactory, form: str, sample: int, ptr: int, size: int | None, absent: bool
) -> None:
    """Whatever position and size a file gives, a batch reads or refuses it as a single read does."""
    path = tmp_path_factory.mktemp("bent") / "x"
    samples = [*FULL[:4], ("none", {}), *FULL[4:]] if absent else FULL
    write(WRITERS[form], path, samples)
    data = bytearray(path.read_bytes())
    if form == "mult":
        start = sections_of(bytes(data))[3][0]
        struct.pack_into("<Q", data, start + 8 * sample, ptr)
        if size is not None:
            struct.pack_into("<I", data, start + 8 * len(samples) + 4 * sample, size)
    else:
        start = struct.unpack_from("<Q", data, 9 + 8)[0] + 32 * sample
        struct.pack_into("<Q", data, start, ptr)
        if size is not None:
            struct.pack_into("<I", data, start + 8, size)
    path.write_bytes(data)
    with open_reader(path) as reader:

        def singly(indices: list[int]) -> list[bytes | None]:
            found = reader.read_samples(indices, ["image"])["image"]
            return [None if payload is None else bytes(payload.data) for payload in found]

        for indices in ([sample], [0, sample, 1], list(range(len(samples)))):
            expected = outcome(lambda indices=indices: singly(indices))
            for names in (["image"], ["text", "image"]):
                found = outcome(lambda indices=indices, names=names: plain(read_raw(reader, indices, names)["image"]))
                assert found == expected
        found = outcome(lambda: [one for block in scan_raw(reader, ["image"]) for one in plain(block["image"])])
        assert found == outcome(lambda: singly(list(range(len(samples)))))


def test_region_at_the_start_of_the_file(tmp_path: Path) -> None:
    """A stream without any payload may name position 0: its rows are absent, not empty."""
    path = write(MstrWriter, tmp_path / "x", [("a", {"text": Payload(bytes(8), b"t")}), ("b", {})])
    data = bytearray(path.read_bytes())
    struct.pack_into("<QQ", data, 9 + 24, 0, 0)  # data_ptr and data_size of the first stream
    path.write_bytes(sealed(bytes(data)))
    with open_reader(path) as reader:
        assert read_raw(reader, [0, 1], reader.names) == {"image": [None, None], "text": [b"t", None]}


def test_streams_too_large_to_warm(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and streams beyond the limit are fetched by rows, and read alike."""
    monkeypatch.setattr(byte_source, "WHOLE_LIMIT", 0)
    with open_reader(write(WRITERS[form], tmp_path / "x", FULL)) as reader:
        for _ in range(2):
            found = read_raw(reader, [8, 2], reader.names)
            assert plain(found["image"]) == wanted(FULL, [8, 2], "image")
            assert plain(found["text"]) == [b"t" * 8, b"t" * 2]


def test_wide_records(tmp_path: Path, form: str) -> None:
    """Modalities with records of different sizes are found by one look-up."""
    specs = [ModalitySpec(name=f"m{k}", type_id=k, metadata_size=8 + 8 * k) for k in range(5)]
    samples = [
        (str(i), {f"m{k}": Payload(bytes([i]) * (8 + 8 * k), f"{i}-{k}".encode()) for k in range(5)}) for i in range(20)
    ]
    path = write(WRITERS[form], tmp_path / "x", samples, specs)
    indices = np.random.default_rng(1).permutation(20)
    with open_reader(path) as reader:
        for names in (["m3"], ["m4", "m0", "m2"], reader.names):
            for name, column in read_raw(reader, indices, names).items():
                assert plain(column) == [f"{i}-{name[1:]}".encode() for i in indices.tolist()]


@pytest.mark.parametrize("room", [fast_path.MAX_PROCESS_BOUNDS, 16 * len(SAMPLES), 0])
def test_batches_stay_the_same(tmp_path: Path, form: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are alike before and after positions are kept, of all modalities, of one, or of none for want of room."""
    monkeypatch.setattr(fast_path, "BUDGET", fast_path._Budget(room))
    indices = list(range(len(SAMPLES)))
    with open_reader(write(WRITERS[form], tmp_path / "x", SAMPLES)) as reader:
        for _ in range(6):
            for names in (["text"], ["image", "text"]):
                found = read_raw(reader, indices, names)
                assert {name: plain(found[name]) for name in names} == {n: wanted(SAMPLES, indices, n) for n in names}


def test_the_short_way_is_the_long_way(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once positions are cached, and nothing is probed, every kind of indices is taken and refused as before."""
    monkeypatch.setattr(PageCache, "may_skip", lambda *_: True)
    path = write(WRITERS[form], tmp_path / "x", SAMPLES)
    everything = np.arange(len(SAMPLES))
    kinds = [everything, everything[::-1], -1 - everything, everything.astype(np.uint8), everything.tolist(), []]
    names = ("text", "image")
    with open_reader(path) as reader:
        for _ in range(8):
            read_raw(reader, everything, names)
        for indices in (*kinds, everything[:0]):
            found = read_raw(reader, indices, names)
            expected = np.asarray(indices, np.int64).tolist()
            assert {name: plain(found[name]) for name in found} == {n: wanted(SAMPLES, expected, n) for n in found}
        for wrong in (len(SAMPLES), -len(SAMPLES) - 1, 2**62):
            with pytest.raises(
                IndexError, match=re.escape(f"{path}: index {wrong} is out of range for {len(SAMPLES)} samples")
            ):
                read_raw(reader, np.array([0, wrong]), names)
        for kind in (np.zeros((1, 2), np.int64), np.zeros(2), np.zeros(2, np.bool_)):
            with pytest.raises(TypeError, match="expected integers of one"):
                read_raw(reader, kind, names)
        with pytest.raises(KeyError, match="no modality 'sound'"):
            read_raw(reader, everything, ["sound"])
    with pytest.raises(ValueError, match=re.escape(f"{path} is closed")):
        read_raw(reader, everything, names)


@needs_advice
def test_what_was_calm_is_looked_at(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was missed for long, one position of a few batches is looked at; a miss has its batch fetched."""
    monkeypatch.setattr(byte_source, "WHOLE_LIMIT", 0)  # no stream is loaded whole
    there = True
    looked: list[int] = []
    asked: list[tuple[int, int]] = []

    def is_resident(self: PageCache, position: int) -> bool:
        looked.append(position)
        return there

    monkeypatch.setattr(PageCache, "is_resident", is_resident)
    monkeypatch.setattr(PageCache, "request", lambda self, start, end: asked.append((start, end)))
    names = ("image", "text")
    with open_reader(write(WRITERS[form], tmp_path / "x", FULL)) as reader:
        indices = np.arange(len(FULL))[::-1].copy()
        for _ in range(100):
            read_raw(reader, indices, names)
        looked.clear()
        for _ in range(64):
            read_raw(reader, indices, names)
        assert 2 <= len(looked) <= 8
        assert asked == []
        there = False
        for _ in range(32):
            found = read_raw(reader, indices, names)
            assert {name: plain(found[name]) for name in names} == {n: wanted(FULL, indices.tolist(), n) for n in names}
        places = reader._locate(indices, [reader.number_of(name) for name in names])
        for place in (int(ptr) for found_at in places.values() for ptr in found_at.ptrs):
            assert any(start <= place < end for start, end in asked)


@needs_advice
def test_probes_do_not_keep_step_with_batches(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in order, batch after batch of one size, looks come to every sample of every modality in the end."""
    monkeypatch.setattr(byte_source, "WHOLE_LIMIT", 0)
    looked: set[int] = set()
    monkeypatch.setattr(PageCache, "is_resident", lambda self, position: not looked.add(position))
    samples = [
        (str(i), {"image": Payload(bytes(16), b"i" * 99), "text": Payload(bytes(8), b"t" * 99)}) for i in range(16)
    ]
    with open_reader(write(WRITERS[form], tmp_path / "x", samples)) as reader:
        names, halves = ("image", "text"), (np.arange(8), np.arange(8, 16))
        for k in range(200):
            read_raw(reader, halves[k % 2], names)
        looked.clear()
        for k in range(20_000):
            read_raw(reader, halves[k % 2], names)
        bounds = reader.data_bounds(np.arange(16), [reader.number_of(name) for name in names])
        wanted_at = {int(start) for starts in bounds.starts for start in starts}
        assert looked >= wanted_at


def test_checksums_that_are_not_there(tmp_path: Path, form: str) -> None:
    """Of a file without a tail nothing is checked, whichever caller asks for it."""
    path = write(WRITERS[form], tmp_path / "x", FULL)
    path.write_bytes(without_tail(path.read_bytes()))
    with open_reader(path, modalities=SPECS) as reader:
        assert sum(len(block.indices) for block in reader.scan(verify=True)) == 9
        assert [bytes(one) for one in reader.read_columns([7], verify=True)["text"].datas] == [b"t" * 7]


def test_columns(tmp_path: Path, form: str) -> None:
    """Columns have the records and the data of single reads, zero and None where absent; a name twice is one column."""
    path = write(WRITERS[form], tmp_path / "x", SAMPLES)
    indices = [2, 0, -1, 1, 0]
    for reader in readers(path):
        with reader:
            found = reader.read_columns(indices, ["text", "image", "text"])
            assert list(found) == ["text", "image"]
            for name, column in found.items():
                for row, payload in enumerate(reader.read_samples(indices, [name])[name]):
                    data = column.datas[row]
                    assert (None if data is None else bytes(data)) == (payload and bytes(payload.data))
                    assert (
                        column.records[row].tobytes()
                        == (bytes(payload.metadata) if payload else bytes(16))[: column.records.shape[1]]
                    )
