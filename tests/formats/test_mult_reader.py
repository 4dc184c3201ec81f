"""MULT: the suite of both containers, and what only MULT has."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from mm_assets.errors import CorruptError, EncodeError, TruncatedError, UnsupportedVersionError
from mm_assets.formats import MultReader, MultWriter, Payload

from .container_suite import ContainerSuite, contents
from .damage_suite import DamageSuite
from .examples import SPECS, MemorySource, sections_of, with_section, without_tail, write
from .writer_suite import WriterSuite


class TestMult(ContainerSuite, WriterSuite, DamageSuite):
    writer = MultWriter
    reader = MultReader

    @settings(deadline=None, max_examples=60)
    @given(content=contents())
    def test_any_content(self, tmp_path_factory: pytest.TempPathFactory, content: tuple) -> None:
        """Any modalities and samples round trip, alike mapped and remote, and verify clean."""
        self.check_content(tmp_path_factory.mktemp("any"), content)

    def test_alignment(self, file: Path) -> None:
        """Samples and payloads start at multiples of 8, sections at multiples of 64, and fill is zero."""
        data = file.read_bytes()
        for i in range(4):
            ptr, size, _ = struct.unpack_from("<QII", data, 27 + 16 * i)
            mask, *numbers = struct.unpack_from("<5I", data, ptr)
            assert ptr % 8 == 0
            assert all(offset % 8 == 0 for offset in numbers[:2])
            assert size == max([20, *(offset + size for offset, size in zip(numbers[:2], numbers[2:], strict=True))])
            assert mask == sum((numbers[2 + bit] > 0) << bit for bit in range(2))
        assert struct.unpack_from("<Q", data, 27)[0] == 128
        assert all(ptr % 64 == 0 for kind, (ptr, _) in sections_of(data).items() if kind != 4)

    def test_sample_limit(self, tmp_path: Path) -> None:
        """The limit is on the sample: payloads that fit alone are refused together."""
        with mmap.mmap(-1, 2**31) as huge, MultWriter(tmp_path / "x", SPECS, fsync=False) as writer:
            view = memoryview(huge)
            with pytest.raises(EncodeError, match="the sample takes 4294967344 bytes, a MULT file allows 4294967295"):
                writer.write("a", {"image": Payload(bytes(16), view), "text": Payload(bytes(8), view)})
            view.release()

    def test_version(self, file: Path) -> None:
        """A later version is refused by name."""
        data = bytearray(file.read_bytes())
        data[4] = 2
        with pytest.raises(UnsupportedVersionError, match=r"the version \(found 2, expected 1\)"):
            MultReader(MemorySource(bytes(data)))

    def test_truncated_file_is_not_taken_for_one_without_tail(self, file: Path) -> None:
        """A file of ours that lost its tail is refused even when modalities are given: its ids would be wrong."""
        data = file.read_bytes()
        with pytest.raises(TruncatedError, match="truncated: the index has checksums"):
            MultReader(MemorySource(data[:-32]), modalities=SPECS)

    def bent(self, data: bytes, at: int, layout: str, *values: int) -> bytes:
        """The file with numbers written over its bytes."""
        changed = bytearray(data)
        struct.pack_into(layout, changed, at, *values)
        return bytes(changed)

    @pytest.mark.parametrize(
        ("ptr", "size"),
        [(2**64 - 1, 16), (2**64 - 8, 2**32 - 1), (8, 24), (128, 2**32 - 1), (152, 15), (0, 24), (10**6, 0)],
    )
    def test_wrong_directory(self, file: Path, ptr: int, size: int) -> None:
        """A directory entry that points out of the file or is too short is refused when used, and found by verify."""
        data = file.read_bytes()
        start, length = sections_of(data)[3]
        directory = bytearray(data[start : start + length])
        struct.pack_into("<Q", directory, 0, ptr)
        struct.pack_into("<I", directory, 32, size)
        reader = MultReader(MemorySource(with_section(data, 3, bytes(directory))))
        assert reader.read_payload(0, "text") is not None
        assert reader.read_samples([3], ["image"])["image"][0] is not None
        for call in (
            lambda: reader.read_payload(0, "image"),
            lambda: reader.read_samples([3, 0], ["image"])["image"],
            lambda: reader.records("image"),
        ):
            with pytest.raises(CorruptError, match="sample 0, modality 'image': a payload is out of place"):
                call()
        damage = reader.verify().damage
        assert [(d.sample, d.modality) for d in damage if d.sample is not None] == [(0, "image")]

    def test_wrong_sections(self, file: Path) -> None:
        """A directory of the wrong size, and an index section elsewhere, are refused at open."""
        data = file.read_bytes()
        with pytest.raises(CorruptError, match="size of the directory"):
            MultReader(MemorySource(with_section(data, 3, bytes(120))))
        with pytest.raises(CorruptError, match="index section is out of place"):
            MultReader(MemorySource(with_section(data, 4, bytes(64))))

    @pytest.mark.parametrize(
        ("at", "layout", "values"),
        [
            (27, "<Q", [2**64 - 1]),  # sample_ptr of sample 0
            (27, "<Q", [0]),
            (27, "<QI", [128, 2**32 - 1]),
            (27, "<QI", [128, 19]),
            (128 + 4, "<I", [2**32 - 1]),  # offset of its image
            (128 + 4, "<I", [0]),
            (128 + 12, "<I", [2**32 - 1]),  # size of its image
            (128 + 12, "<I", [15]),
        ],
    )
    def test_wrong_numbers_without_tail(self, file: Path, at: int, layout: str, values: list[int]) -> None:
        """Without a tail every number of index and sample headers is checked when used, and by verify."""
        data = self.bent(without_tail(file.read_bytes()), at, layout, *values)
        reader = MultReader(MemorySource(data), modalities=SPECS)
        assert reader.read_payload(3, "image") is not None
        for call in (
            lambda: reader.read_payload(0, "image"),
            lambda: reader.read_samples([3, 0], ["image"])["image"],
            lambda: reader.sizes("image"),
            lambda: reader.checksums("image"),
        ):
            with pytest.raises(CorruptError, match=r"sample 0.*out of place"):
                call()
        assert {d.sample for d in reader.verify().damage} == {0}

    def test_absent_with_numbers(self, file: Path) -> None:
        """An absent modality whose offset is not zero is damage, and so is a mask bit without a modality."""
        data = without_tail(file.read_bytes())
        ptr = struct.unpack_from("<Q", data, 27 + 32)[0]  # sample 2 has nothing
        reader = MultReader(MemorySource(self.bent(data, ptr + 4, "<I", 64)), modalities=SPECS)
        with pytest.raises(CorruptError, match="sample 2, modality 'image'"):
            reader.read_payload(2, "image")
        assert [(d.sample, d.modality) for d in reader.verify().damage] == [(2, "image")]
        reader = MultReader(MemorySource(self.bent(data, ptr, "<I", 4)), modalities=SPECS)
        assert [(d.sample, d.modality, d.message) for d in reader.verify().damage] == [
            (2, None, "the mask (found 0x4, expected below 0x4)")
        ]

    def test_damaged_fill(self, file: Path) -> None:
        """Fill within a sample is covered by the sample's checksum; damage there is distinguished from a payload's."""
        data = file.read_bytes()
        assert data[128 + 20 : 128 + 24] == bytes(4)
        report = MultReader(MemorySource(self.bent(data, 128 + 20, "<I", 1))).verify()
        assert [(d.sample, d.sample_id, d.modality) for d in report.damage] == [(0, "a", None)]
        assert "header or fill" in report.damage[0].message

    def test_damaged_sample_header(self, file: Path) -> None:
        """A sample header that differs from the directory is reported; the directory is what readers follow."""
        data = file.read_bytes()
        reader = MultReader(MemorySource(self.bent(data, 128 + 12, "<I", 17)))
        assert reader.read_payload(0, "image").data == b"\xff\xd8pixels"
        damage = reader.verify().damage
        assert [(d.sample, d.modality) for d in damage] == [(0, "image")]
        assert "the directory and the sample's header differ" in damage[0].message

    def test_damaged_index(self, file: Path) -> None:
        """A damaged index is reported as a section and by sample; payloads are still read by the directory."""
        reader = MultReader(MemorySource(self.bent(file.read_bytes(), 27, "<Q", 2**63)))
        assert reader.read_payload(0, "text").data == b"hello"
        damage = reader.verify().damage
        assert [(d.sample, d.message.split(" (")[0]) for d in damage] == [
            (None, "the index section does not have its checksum"),
            (0, "the sample is out of place"),
        ]

    def test_damaged_head(self, file: Path) -> None:
        """The head has a checksum."""
        with pytest.raises(CorruptError, match="the head does not have its checksum"):
            MultReader(MemorySource(self.bent(file.read_bytes(), 15, "<H", 77)))

    def test_sizes_are_a_copy(self, file: Path) -> None:
        """Returned columns do not hold the mapping, and may be changed."""
        with MultReader(file) as reader:
            sizes = reader.sizes("text")
            sizes[:] = 0
            assert reader.sizes("text").any()
            assert np.asarray(reader.checksums("text")).flags.owndata


def test_a_mapped_file_is_checked_too(tmp_path: Path) -> None:
    """A directory entry that points outside a mapped file is refused when its payload is read alone."""
    path = write(MultWriter, tmp_path / "x")
    data = bytearray(path.read_bytes())
    ptr, _ = sections_of(bytes(data))[3]
    struct.pack_into("<Q", data, ptr, 2**63)
    path.write_bytes(data)
    with MultReader(path) as reader:
        assert reader.read_payload(3, "image") is not None
        with pytest.raises(CorruptError, match="sample 0, modality 'image': a payload is out of place"):
            reader.read_payload(0, "image")
