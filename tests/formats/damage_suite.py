"""How both containers report damaged files: an abstract suite, subclassed in the tests of both readers."""

from __future__ import annotations

import contextlib
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mm_assets.errors import BadMagicError, CorruptError, TruncatedError, UnsupportedVersionError
from mm_assets.formats import open_reader

from .examples import (
    SAMPLES,
    SPECS,
    MemorySource,
    Reader,
    Writer,
    plain,
    sections_of,
    table_of,
    with_section,
    with_table,
    without_tail,
)


class DamageSuite:
    """Tests of one container's damaged files; subclasses name its writer and reader, and bring `file`."""

    writer: Writer
    reader: Reader

    def damaged(self, file: Path, find: bytes) -> bytes:
        """The file with the first byte of `find` changed."""
        data = file.read_bytes()
        at = data.index(find)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def test_damaged_payload(self, file: Path) -> None:
        """A changed byte of a payload is found by `verify`, named by sample and modality, and by reads that check."""
        data = self.damaged(file, b"hello")
        reader = self.reader(MemorySource(data))
        assert reader.read_payload(0, "text").data == b"iello"
        report = reader.verify()
        assert not report.ok
        assert [(d.sample, d.sample_id, d.modality) for d in report.damage] == [(0, "a", "text")]
        assert "does not have its checksum (found 0x" in report.damage[0].message
        assert report.num_payloads == 4
        checked = self.reader(MemorySource(data), verify=True)
        assert checked.read_payload(0, "image") is not None
        for call in (
            lambda: checked.read_payload(0, "text"),
            lambda: checked.read_payload(0, "text").data,
            lambda: checked.read_samples([1, 0], ["text"])["text"],
            lambda: list(checked.scan()),
        ):
            with pytest.raises(CorruptError, match="sample 0, modality 'text': the payload does not have its checksum"):
                call()

    def test_damaged_id(self, file: Path) -> None:
        """A damaged id is found by `verify`, and does not keep it from naming other damage."""
        data = bytearray(self.damaged(file, b"hello"))
        ptr, _ = sections_of(bytes(data))[2]
        data[ptr + 5 * 8] = 0xFF  # the first id's only byte
        report = self.reader(MemorySource(bytes(data))).verify()
        found = {(d.sample, d.sample_id, d.modality) for d in report.damage}
        assert found == {(None, None, None), (0, None, None), (0, None, "text")}
        assert "sample ids section" in report.damage[0].message
        with pytest.raises(CorruptError, match="sample ids: not UTF-8"):
            self.reader(MemorySource(bytes(data))).sample_ids[0]

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            ([0, 9, 2, 3, 7], "descend"),
            ([0, 1, 2, 3, 2**64 - 1], "do not cover"),
            ([0, 2**63, 2, 3, 7], "descend"),
            ([1, 1, 2, 3, 7], "do not cover"),
            ([0, 1, 2, 3, 5], "do not cover"),
        ],
    )
    def test_damaged_id_offsets(self, file: Path, offsets: list[int], message: str) -> None:
        """Offsets of ids that descend, leave the blob or do not cover it are found, and never followed."""
        content = np.array(offsets, "<u8").tobytes() + b"abc\xc3\xbc-4"
        reader = self.reader(MemorySource(with_section(file.read_bytes(), 2, content)))
        report = reader.verify()
        assert len(report.damage) == 1
        for call in (lambda: [reader.sample_ids[i] for i in range(4)], lambda: reader.sample_ids.find("c")):
            with contextlib.suppress(CorruptError):  # what can still be read may be
                call()
        with pytest.raises(CorruptError, match=message):
            reader.sample_ids.check()

    def entries(self, data: bytes) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Of each (sample, number of the modality) the ranges of its numbers in the directory, or its row."""
        count, places = len(SAMPLES), {}
        for number, spec in enumerate(SPECS):
            for i in range(count):
                if data[:4] == b"MULT":
                    ptr = sections_of(data)[3][0] + 16 * count * number
                    places[i, number] = [(ptr + 8 * i, 8), (ptr + 8 * count + 4 * i, 4), (ptr + 12 * count + 4 * i, 4)]
                else:
                    ptr = struct.unpack_from("<Q", data, 9 + 40 * number + 8)[0]
                    places[i, number] = [(ptr + (16 + spec.metadata_size) * i, 16 + spec.metadata_size)]
        return places

    def read_checked(self, data: bytes) -> list[tuple[bytes, bytes] | None]:
        """Every payload, checked."""
        reader = self.reader(MemorySource(data), verify=True)
        return [plain(one) for name in reader.names for one in reader.read_samples(range(len(reader)), [name])[name]]

    def test_flipped_entries(self, file: Path) -> None:
        """Any flipped bit of the entries of payloads is found by `verify`; checked reads find it or give the same."""
        data = file.read_bytes()
        sound, missed = self.read_checked(data), []
        for place, ranges in self.entries(data).items():
            for position in (ptr + k for ptr, size in ranges for k in range(size)):
                for bit in range(8):
                    bent = bytearray(data)
                    bent[position] ^= 1 << bit
                    with contextlib.suppress(CorruptError):
                        assert self.read_checked(bytes(bent)) == sound
                    if self.reader(MemorySource(bytes(bent))).verify().ok:
                        missed.append((place, position - ranges[0][0]))
        assert missed == []

    @pytest.mark.parametrize("limit", [0, 8 << 20])
    def test_lost_payloads(self, file: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        """A payload whose entry became zero, as an absent one's is, is found by `verify` and every checked read."""
        monkeypatch.setattr("mm_assets.formats.byte_source.WHOLE_LIMIT", limit)  # whether tables are read as a whole
        data = file.read_bytes()
        for (i, number), ranges in self.entries(data).items():
            name, bent = SPECS[number].name, bytearray(data)
            if SAMPLES[i][1].get(name) is None:
                continue
            for ptr, size in ranges:
                bent[ptr : ptr + size] = bytes(size)
            file.write_bytes(bent)
            for source in (file, MemorySource(bytes(bent))):
                with self.reader(source) as reader, self.reader(source, verify=True) as checked:
                    assert reader.read_payload(i, name) is None
                    assert not reader.verify().ok
                    for call in (
                        partial(checked.read_payload, i, name),
                        partial(checked.read_samples, [i, i], [name]),
                        partial(reader.read_sample, i, [name], verify=True),
                        partial(reader.read_columns, [i], verify=True),
                    ):
                        with pytest.raises(CorruptError, match="damaged") as caught:
                            call()
                        assert (caught.value.sample, caught.value.modality) == (i, name)
                    with pytest.raises(CorruptError, match=f"modality '{name}'"):
                        list(checked.scan())
                    # Where the sample says itself what it has, the others stay readable.
                    if self.reader.format == "MULT":
                        assert checked.read_payload(2, name) is None

    def test_short_ids(self, file: Path) -> None:
        """An ids section that is too short for its offsets is refused at open."""
        with pytest.raises(CorruptError, match="sample ids section is short"):
            self.reader(MemorySource(with_section(file.read_bytes(), 2, bytes(32))))

    def test_presence_against_schema(self, file: Path) -> None:
        """`verify` compares the number of present rows with the schema's."""
        data = file.read_bytes()
        ptr, size = sections_of(data)[1]
        schema = data[ptr : ptr + size].replace(b'"num_present":2', b'"num_present":3')
        report = self.reader(MemorySource(with_section(data, 1, schema))).verify()
        assert {d.modality for d in report.damage} == {"image", "text"}
        assert "found 2, expected 3" in report.damage[0].message

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (b'"version":1', b'"version":2', "'version'"),
            (b'"format":"M', b'"format":"N', "'format'"),
            (b'"provenance":{', b'"provenancf":{', "'provenance'"),
            (b'"modalities":[', b'"modalitiez":[', "'modalities'"),
            (b'"modalities":[', b'"modalities":[1,', "'modalities'"),
            (b'"type_id":10', b'"type_id":11', "the type_id in the head"),
            (b'"metadata_size":16', b'"metadata_size":24', "the metadata_size in the head"),
            (b'"metadata_size":16', b'"metadata_size":17', "expected a multiple of 8"),
            (b'"name":"image"', b'"name":"imagf"', "the name's hash in the head"),
            (b'"name":"image"', b'"name":"\\ud800"', "cannot be written as UTF-8"),
            (b'"name":"image"', b'"name":true', "'name' of a modality"),
            (b'"num_present":2', b'"num_present":5', r"num_present \(found 5, expected 0..4\)"),
            (b'"num_present":2', b'"num_present":-1', "num_present"),
            (b'"num_present":2', b'"num_present":true', "'num_present' of a modality"),
            (b'"config":{', b'"config":7,"c":{', "'config' of a modality"),
            (b'"dataset":', b'"dataset":::', "not JSON"),
            (b'"dataset":"k\xc3', b'"dataset":"k\xff', "not JSON"),
            (b'"dataset":', b'"d":' + b"9" * 5000 + b',"dataset":', "not JSON"),
            (b'"dataset":', b'"d":' + b"[" * 100_000, "not JSON"),
        ],
    )
    def test_wrong_schema(self, file: Path, old: bytes, new: bytes, message: str) -> None:
        """A schema that contradicts the head, or is none, is refused at open although its checksum is right."""
        data = file.read_bytes()
        ptr, size = sections_of(data)[1]
        schema = data[ptr : ptr + size]
        assert old in schema
        with pytest.raises(CorruptError, match=message):
            self.reader(MemorySource(with_section(data, 1, schema.replace(old, new, 1))))

    @pytest.mark.parametrize("schema", [b"[]", b'{"modalities":[1,2]}'])
    def test_schema_of_another_shape(self, file: Path, schema: bytes) -> None:
        """A schema that is not an object, or whose modalities are not one, is refused."""
        if schema[:1] == b"{":
            name = self.reader.format.encode()
            schema = b'{"format":"' + name + b'","version":1,"provenance":{},' + schema[1:]
        with pytest.raises(CorruptError, match="expected an object"):
            self.reader(MemorySource(with_section(file.read_bytes(), 1, schema)))

    def test_schema_without_checksum(self, file: Path) -> None:
        """A schema that does not have its checksum is refused at open."""
        with pytest.raises(CorruptError, match="the schema section does not have its checksum"):
            self.reader(MemorySource(self.damaged(file, b'"quality"')))

    def test_wrong_section_table(self, file: Path) -> None:
        """Section tables that are short, miscounted, incomplete, doubled or point outside are refused at open."""
        data = file.read_bytes()
        entries = [(kind, 0, ptr, size) for kind, (ptr, size) in sections_of(data).items()]
        for bent, error, message in (
            (with_table(data, b"1234"), CorruptError, "section table is too short"),
            (with_table(data, table_of(entries, 3)[:-1]), CorruptError, "size of a section table"),
            (with_table(data, table_of(entries, 2**32 - 1)), CorruptError, "size of a section table"),
            (with_table(data, table_of([])), CorruptError, r"section is missing \(found none, expected schema\)"),
            (with_table(data, table_of([*entries, entries[0]])), CorruptError, "schema section is listed twice"),
            (with_table(data, table_of([(1, 0, 2**64 - 1, 2**64 - 1)])), TruncatedError, "schema section ends after"),
            (with_table(data, table_of(entries), table_ptr=2**64 - 8), TruncatedError, "section table ends after"),
            (with_table(data, table_of(entries), table_ptr=64), CorruptError, "table does not have its checksum"),
            (with_table(data, table_of(entries), version=2), UnsupportedVersionError, "tail's version"),
            (with_section(data, 2, None), CorruptError, "expected sample ids"),
        ):
            with pytest.raises(error, match=message):
                self.reader(MemorySource(bent))

    def test_sections_of_later_writers(self, file: Path) -> None:
        """Sections of unknown kinds are skipped."""
        reader = self.reader(MemorySource(with_section(file.read_bytes(), 77, b"news")))
        assert reader.verify().ok

    def test_damaged_sections_of_later_writers(self, file: Path) -> None:
        """Sections of unknown kinds are verified: one that lacks its checksum, or ends after the file, is reported."""
        whole = with_section(file.read_bytes(), 77, b"news")
        ptr, _ = sections_of(whole)[77]
        report = self.reader(MemorySource(whole[:ptr] + b"newt" + whole[ptr + 4 :])).verify()
        assert ["section of unknown kind 77 does not have its checksum" in one.message for one in report.damage] == [
            True
        ]
        data = file.read_bytes()
        at = struct.unpack_from("<Q", data, 4064 if data[:4] == b"MSTR" else len(data) - 32)[0]
        count = struct.unpack_from("<I", data, at)[0]
        entries = [struct.unpack_from("<IIQQ", data, at + 8 + 24 * k) for k in range(count)]
        overlapping = [(79, 0, 0, len(data))] * 3
        report = self.reader(MemorySource(with_table(data, table_of([*entries, *overlapping])))).verify()
        assert report.damage[-1].message == "sections of unknown kinds are larger than the file"
        for beyond in ((78, 0, 2**64 - 8, 16), (78, 0, 0, 2**63)):
            report = self.reader(MemorySource(with_table(data, table_of([*entries, beyond])))).verify()
            assert ["section of unknown kind 78 ends after the file" in one.message for one in report.damage] == [True]

    def test_same_name_hash(self, file: Path) -> None:
        """A head that describes two modalities by one hash is refused."""
        data = bytearray(without_tail(file.read_bytes()))
        first, second = (11, 19) if self.reader.format == "MULT" else (9, 49)
        data[second : second + 4] = data[first : first + 4]
        with pytest.raises(CorruptError, match="same name hash"):
            self.reader(MemorySource(bytes(data)), modalities=SPECS)

    @pytest.mark.parametrize("count", [0, 33])
    def test_wrong_number_of_modalities(self, file: Path, count: int) -> None:
        """A head with no modality, or more than 32, is refused."""
        data = bytearray(without_tail(file.read_bytes()))
        data[10 if self.reader.format == "MULT" else 8] = count
        with pytest.raises(CorruptError, match="number of modalities"):
            self.reader(MemorySource(bytes(data)), modalities=SPECS)

    def test_too_many_samples(self, file: Path) -> None:
        """A number of samples that the file cannot hold is refused at open, without allocating for it."""
        data = bytearray(without_tail(file.read_bytes()))
        at = 6 if self.reader.format == "MULT" else 4
        data[at : at + 4] = b"\xff\xff\xff\xff"
        with pytest.raises(TruncatedError, match="ends after the file"):
            self.reader(MemorySource(bytes(data)), modalities=SPECS)

    def test_other_files(self, tmp_path: Path) -> None:
        """Files of other kinds, short ones and empty ones are refused by kind; a missing one is an OSError."""
        path = tmp_path / "x"
        for content, error in (
            (b"", TruncatedError),
            (b"M", (TruncatedError, BadMagicError)),
            (self.reader.format.encode(), TruncatedError),
            (b"PK\x03\x04" + bytes(10_000), BadMagicError),
            (b"other", BadMagicError),
        ):
            path.write_bytes(content)
            for opener in (self.reader, open_reader):
                with pytest.raises(error, match=str(path)):
                    opener(path)
        with pytest.raises(FileNotFoundError):
            self.reader(tmp_path / "missing")
        with pytest.raises(IsADirectoryError):
            self.reader(tmp_path)

    def test_duplicate_ids_of_other_writers(self, file: Path) -> None:
        """In a file that holds an id twice, `find` gives the first."""
        content = np.array([0, 1, 2, 3, 4], "<u8").tobytes() + b"xyxy"
        reader = self.reader(MemorySource(with_section(file.read_bytes(), 2, content)))
        assert reader.sample_ids.find("x") == 0
        assert reader.sample_ids.find("y") == 1
