"""MSTR: the suite of both containers, and what only MSTR has."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from mm_assets.errors import BadMagicError, CorruptError, TruncatedError, UnsupportedVersionError
from mm_assets.formats import ModalitySpec, MstrReader, MstrWriter, Payload, open_reader

from .container_suite import ContainerSuite, contents
from .damage_suite import DamageSuite
from .examples import SPECS, MemorySource, sealed, without_tail, write
from .writer_suite import WriterSuite


class TestMstr(ContainerSuite, WriterSuite, DamageSuite):
    writer = MstrWriter
    reader = MstrReader

    @settings(deadline=None, max_examples=60)
    @given(content=contents())
    def test_any_content(self, tmp_path_factory: pytest.TempPathFactory, content: tuple) -> None:
        """Any modalities and samples round trip, alike mapped and remote, and verify clean."""
        self.check_content(tmp_path_factory.mktemp("any"), content)

    def bent(self, data: bytes, at: int, layout: str, *values: int, seal: bool = True) -> bytes:
        """The file with numbers written over its bytes, and the header page's checksum made right."""
        changed = bytearray(data)
        struct.pack_into(layout, changed, at, *values)
        return sealed(bytes(changed)) if seal else bytes(changed)

    def test_alignment(self, file: Path) -> None:
        """Tables and regions start at multiples of 4096, data at multiples of 8, and the shadow is the page."""
        data = file.read_bytes()
        assert data[:4096] == data[4096:8192]
        for stream in range(2):
            table, stride, _, start, size = struct.unpack_from("<QIIQQ", data, 9 + 40 * stream + 8)
            assert table % 4096 == start % 4096 == size % 8 == 0
            assert stride == 16 + SPECS[stream].metadata_size
            for row in range(4):
                ptr, length, _ = struct.unpack_from("<QII", data, table + stride * row)
                assert ptr % 8 == 0
                assert ptr == 0 or start <= ptr <= ptr + length <= start + size

    def test_largest_head_fits(self, tmp_path: Path) -> None:
        """32 descriptors leave room for the trailer in page 0."""
        specs = [ModalitySpec(name=f"m{k}", type_id=k, metadata_size=8) for k in range(32)]
        data = write(MstrWriter, tmp_path / "x", [], specs).read_bytes()
        assert not any(data[9 + 40 * 32 : 4064])
        assert data[4092:4096] == b"MMT1"

    def test_empty_data_at_the_regions_end(self, tmp_path: Path) -> None:
        """Present but empty data points at its region's end, which is not 0."""
        samples = [("a", {"text": Payload(bytes(8), b"12345")}), ("b", {"text": Payload(bytes(8), b"")})]
        data = write(MstrWriter, tmp_path / "x", samples, SPECS[1:]).read_bytes()
        assert struct.unpack_from("<QI", data, 8192 + 24) == (12288 + 8, 0)
        assert struct.unpack_from("<QQ", data, 9 + 24) == (12288, 8)

    @pytest.mark.parametrize("at", [0, 5, 100, 3000, 4070, 4095])
    def test_damaged_page(self, file: Path, at: int) -> None:
        """A damaged header page is replaced by its shadow, by every way of opening; verify says so."""
        data = bytearray(file.read_bytes())
        data[at] ^= 0xFF
        for opener in (MstrReader, open_reader):
            reader = opener(MemorySource(bytes(data)))
            assert reader.read_payload(0, "text").data == b"hello"
            report = reader.verify()
            assert len(report.damage) == 1
            assert "the header page" in report.damage[0].message

    def test_damaged_shadow(self, file: Path) -> None:
        """A damaged shadow does not matter to reading, and is reported."""
        data = bytearray(file.read_bytes())
        data[4096 + 100] ^= 1
        reader = MstrReader(MemorySource(bytes(data)))
        assert reader.read_payload(0, "text").data == b"hello"
        assert ["shadow" in d.message for d in reader.verify().damage] == [True]

    def test_both_pages_damaged(self, file: Path) -> None:
        """Without a whole header page the file is refused, also when modalities are given."""
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        data[4096 + 3000] ^= 1
        for options in ({}, {"modalities": SPECS}):
            with pytest.raises(CorruptError, match="neither the header page nor its shadow is whole"):
                MstrReader(MemorySource(bytes(data)), **options)
        data[0] ^= 1
        with pytest.raises(BadMagicError):
            MstrReader(MemorySource(bytes(data)))

    def test_page_is_copied(self, file: Path) -> None:
        """The header page is read once, at open: a stream added meanwhile does not show, nor bytes behind it."""
        data = file.read_bytes()
        source = MemorySource(data + b"a stream under construction")
        reader = MstrReader(source)
        source.data = bytes(8192) + source.data[8192:]
        assert reader.read_payload(0, "text").data == b"hello"
        assert MstrReader(MemorySource(data + bytes(100))).verify().ok

    def test_version(self, file: Path) -> None:
        """A later version is refused by name."""
        data = self.bent(file.read_bytes(), 4088, "<I", 2)
        with pytest.raises(UnsupportedVersionError, match=r"version \(found 2, expected 1\)"):
            MstrReader(MemorySource(data))

    @pytest.mark.parametrize(
        ("at", "layout", "value", "error"),
        [
            (9 + 8, "<Q", 2**64 - 1, TruncatedError),  # metadata_ptr
            (9 + 24, "<Q", 2**64 - 1, TruncatedError),  # data_ptr
            (9 + 32, "<Q", 2**64 - 1, TruncatedError),  # data_size
            (9 + 16, "<I", 2**32 - 1, TruncatedError),  # stride
            (9 + 16, "<I", 15, CorruptError),
            (9 + 16, "<I", 24, CorruptError),
        ],
    )
    def test_wrong_stream_table(self, file: Path, at: int, layout: str, value: int, error: type[Exception]) -> None:
        """Streams that leave the file, and rows of an impossible size, are refused at open."""
        with pytest.raises(error):
            MstrReader(MemorySource(self.bent(file.read_bytes(), at, layout, value)))

    @pytest.mark.parametrize(
        ("ptr", "size"), [(2**64 - 1, 10), (8192, 8), (12288, 2**32 - 1), (12288 + 56, 1), (0, 8), (10**6, 0)]
    )
    @pytest.mark.parametrize("tail", [True, False])
    def test_wrong_row(self, file: Path, ptr: int, size: int, tail: bool) -> None:
        """A row that points outside its data region is refused when used, and found by verify."""
        data = self.bent(file.read_bytes(), 8192, "<QI", ptr, size, seal=False)
        if tail:
            reader = MstrReader(MemorySource(data))
        else:
            reader = MstrReader(MemorySource(without_tail(data)), modalities=SPECS)
        assert reader.read_samples([3], ["image"])["image"][0] is not None
        for call in (lambda: reader.read_payload(0, "image"), lambda: reader.read_samples([3, 0], ["image"])["image"]):
            with pytest.raises(CorruptError, match="sample 0, modality 'image': a row points outside"):
                call()
        assert (0, "image") in [(d.sample, d.modality) for d in reader.verify().damage]

    def test_absent_row_is_all_zero(self, file: Path) -> None:
        """A record in an absent row is damage."""
        data = self.bent(file.read_bytes(), 8192 + 32 + 20, "<I", 1, seal=False)
        reader = MstrReader(MemorySource(data))
        assert reader.read_payload(1, "image") is None
        row, table = reader.verify().damage
        assert (row.sample, row.sample_id, row.modality) == (1, "b", "image")
        assert row.message == "the record of an absent row is not zero"
        assert (table.sample, table.modality) == (None, "image")
        assert "the metadata table does not have its checksum" in table.message

    def test_a_lost_row_among_as_many_present_ones(self, file: Path) -> None:
        """A row that became zero is found although another became present, so that their number is right."""
        data = bytearray(file.read_bytes())
        reader = MstrReader(MemorySource(bytes(data)))
        stream = reader.names.index("image")
        present = np.flatnonzero(reader.presence("image")).tolist()
        (absent, *_) = np.flatnonzero(~reader.presence("image")).tolist()
        ptr, stride = reader.stream_table[stream][3], reader.stream_table[stream][4]
        rows = [slice(ptr + stride * i, ptr + stride * (i + 1)) for i in (absent, present[0])]
        data[rows[0]], data[rows[1]] = data[rows[1]], data[rows[0]]
        checked = MstrReader(MemorySource(bytes(data)), verify=True)
        with pytest.raises(CorruptError, match="absent value may be one that was lost"):
            checked.read_payload(present[0], "image")
        assert [(d.sample, d.modality) for d in checked.verify().damage] == [(None, "image")]

    def test_records_are_strided(self, file: Path) -> None:
        """Records are a view of the table: no copy."""
        with MstrReader(file) as reader:
            records = reader.records("text")
            assert records.strides == (24, 1)
            assert not records.flags.owndata

    def test_size_beyond_the_limit(self, tmp_path: Path) -> None:
        """Record and data of a foreign file that together pass 4 GiB are refused instead of wrapping."""
        path = write(MstrWriter, tmp_path / "x", [("a", {"text": Payload(bytes(8), b"")})], SPECS[1:])
        with path.open("r+b") as file:
            data = bytearray(file.read(8192))
            file.truncate(2**32 + 20_000)  # a hole
            struct.pack_into("<Q", data, 9 + 32, 2**32)
            page = sealed(bytes(data))
            file.seek(0)
            file.write(page)
            file.write(struct.pack("<QI", 12288, 2**32 - 1))
        with MstrReader(path) as reader, pytest.raises(CorruptError, match="a payload is too large"):
            reader.sizes("text")

    def test_memory_of_tables(self, tmp_path: Path) -> None:
        """Sparse presence costs one zero row a sample."""
        samples = [(str(k), {"text": Payload(b"12345678", b"x")} if k == 77 else {}) for k in range(1000)]
        with MstrReader(write(MstrWriter, tmp_path / "x", samples)) as reader:
            assert np.flatnonzero(reader.presence("text")).tolist() == [77]
            assert not reader.records("image").any()
            assert reader.verify().num_payloads == 1


def test_a_mapped_file_is_checked_too(tmp_path: Path) -> None:
    """A row that points outside its stream's region of a mapped file is refused when its payload is read alone."""
    path = write(MstrWriter, tmp_path / "x")
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 8192, 2**63)
    path.write_bytes(data)
    with MstrReader(path) as reader:
        assert reader.read_payload(3, "image") is not None
        with pytest.raises(CorruptError, match="sample 0, modality 'image': a row points outside"):
            reader.read_payload(0, "image")
