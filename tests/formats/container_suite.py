"""What holds for both containers: an abstract suite, subclassed in the tests of both readers."""

from __future__ import annotations

import copy
import mmap
import os
import pickle
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from mm_assets.errors import (
    FormatError,
    SchemaMismatchError,
    TruncatedError,
)
from mm_assets.formats import ModalitySpec, Payload, crc32c, open_reader

from .examples import (
    IMAGE,
    PROVENANCE,
    SAMPLES,
    SPECS,
    TEXT,
    MemorySource,
    Reader,
    Writer,
    plain,
    without_tail,
    write,
)


@st.composite
def contents(draw: st.DrawFn) -> tuple[list[ModalitySpec], list[tuple[str, dict[str, Payload | None]]]]:
    """Modalities, and samples of them."""
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=4))
    by_hash = {zlib.crc32(name.encode()): name for name in names}
    specs = [
        ModalitySpec(name=name, type_id=draw(st.integers(0, 65535)), metadata_size=8 * draw(st.integers(1, 4)))
        for name in by_hash.values()
    ]
    ids = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=6, unique=True))
    samples = []
    for sample_id in ids:
        payloads: dict[str, Payload | None] = {}
        for spec in specs:
            data = draw(st.none() | st.binary(max_size=40))
            if data is not None:
                metadata = draw(st.binary(min_size=spec.metadata_size, max_size=spec.metadata_size))
                payloads[spec.name] = Payload(metadata, data)
        samples.append((sample_id, payloads))
    return specs, samples


class ContainerSuite:
    """Tests of one container; subclasses name its writer and reader."""

    writer: Writer
    reader: Reader

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """The example samples, written."""
        return write(self.writer, tmp_path / "x.bin")

    # Round trips.

    def test_round_trip(self, file: Path) -> None:
        """What was written is read, one payload at a time, by sample and by batch."""
        with self.reader(file) as reader:
            assert len(reader) == len(SAMPLES)
            assert reader.path == str(file)
            assert reader.names == ("image", "text")
            assert reader.modalities == SPECS
            assert reader.provenance == PROVENANCE
            assert reader.schema["format"] == reader.format
            assert list(reader.sample_ids) == [sample_id for sample_id, _ in SAMPLES]
            for i, (_, payloads) in enumerate(SAMPLES):
                wanted = {name: plain(payloads.get(name)) for name in reader.names}
                assert {name: plain(value) for name, value in reader.read_sample(i).items()} == wanted
                assert plain(reader.read_payload(i, "text")) == wanted["text"]
                assert plain(reader.read_payload(i - len(SAMPLES), "image")) == wanted["image"]
                assert reader.read_sample(i, ["text"]).keys() == {"text"}
            batch = reader.read_samples([3, 0, -1, 1, 0], ["image"])["image"]
            assert [plain(value) for value in batch] == [plain(SAMPLES[i][1].get("image")) for i in (3, 0, 3, 1, 0)]
            assert reader.read_samples([], ["image"])["image"] == []
            assert reader.read_samples(np.array([2], np.uint8), ["text"])["text"] == [None]
            assert reader.verify().ok

    def test_columns(self, file: Path) -> None:
        """Presence, sizes, checksums and records of all samples agree with the payloads."""
        with self.reader(file) as reader:
            for spec in SPECS:
                payloads = [payloads.get(spec.name) for _, payloads in SAMPLES]
                assert reader.presence(spec.name).tolist() == [value is not None for value in payloads]
                sizes, checksums = reader.sizes(spec.name), reader.checksums(spec.name)
                assert sizes.dtype == checksums.dtype == np.uint32
                assert sizes.tolist() == [sum(map(len, value)) if value else 0 for value in payloads]
                assert checksums.tolist() == [crc32c(*value) if value else 0 for value in payloads]
                records = reader.records(spec.name)
                assert records.shape == (len(SAMPLES), spec.metadata_size)
                assert not records.flags.writeable
                zero = bytes(spec.metadata_size)
                assert [row.tobytes() for row in records] == [bytes(value[0]) if value else zero for value in payloads]

    def test_raw_is_a_view_of_the_mapping(self, file: Path) -> None:
        """A raw read copies nothing: its bytes are the mapping's own, and read-only."""
        with self.reader(file) as reader:
            raw = reader.read_payload(0, "image").data
            assert raw is not None
            assert isinstance(raw.obj, mmap.mmap)
            assert raw.readonly
            assert raw == b"\xff\xd8pixels"
            assert reader.read_payload(1, "image") is None
            assert reader.read_payload(1, "text").data == b""
            assert isinstance(reader.read_samples([0], ["image"])["image"][0].data.obj, mmap.mmap)

    def test_no_samples(self, tmp_path: Path) -> None:
        """A file without samples is valid and reads as such."""
        path = write(self.writer, tmp_path / "x", [])
        assert path.read_bytes() == write(self.writer, tmp_path / "y", [], num_samples=0).read_bytes()
        for reader in (self.reader(path), self.reader(MemorySource(path.read_bytes()))):
            assert len(reader) == 0
            assert list(reader.sample_ids) == []
            assert reader.sample_ids.find("a") is None
            assert (
                reader.presence("image").shape == reader.sizes("text").shape == reader.checksums("text").shape == (0,)
            )
            assert reader.records("image").shape == (0, 16)
            assert reader.read_samples([], ["text"])["text"] == []
            assert list(reader.scan()) == []
            with pytest.raises(IndexError, match="index 0 is out of range for 0 samples"):
                reader.read_payload(0, "image")
            assert reader.verify().ok
            reader.close()

    def test_all_absent(self, tmp_path: Path) -> None:
        """Samples that lack every modality keep their rows."""
        with self.reader(write(self.writer, tmp_path / "x", [("a", {}), ("b", {"text": None})])) as reader:
            assert list(reader.sample_ids) == ["a", "b"]
            assert reader.read_sample(1) == {"image": None, "text": None}
            assert not reader.presence("image").any()
            report = reader.verify()
            assert report.ok
            assert report.num_payloads == 0

    def test_present_but_empty(self, tmp_path: Path) -> None:
        """Empty data is present, also as the last and the only data of a modality."""
        samples = [("a", {"text": Payload(b"r" * 8, b"12345")}), ("b", {"text": Payload(bytes(8), b"")})]
        samples.append(("c", {"image": Payload(bytes(16), bytearray())}))
        with self.reader(write(self.writer, tmp_path / "x", samples)) as reader:
            assert plain(reader.read_payload(1, "text")) == (bytes(8), b"")
            assert plain(reader.read_payload(2, "image")) == (bytes(16), b"")
            assert reader.presence("image").tolist() == [False, False, True]
            assert reader.verify().num_payloads == 3

    @pytest.mark.parametrize("count", [1, 31, 32])
    def test_many_modalities(self, tmp_path: Path, count: int) -> None:
        """From 1 to 32 modalities round trip, every other one absent."""
        specs = [ModalitySpec(name=f"m{k}", type_id=k, metadata_size=8) for k in range(count)]
        payloads = {f"m{k}": Payload(bytes([k] * 8), bytes([k] * k)) for k in range(0, count, 2)}
        with self.reader(write(self.writer, tmp_path / "x", [("a", payloads)], specs)) as reader:
            assert reader.modalities == tuple(specs)
            for k in range(count):
                assert plain(reader.read_payload(0, f"m{k}")) == plain(payloads.get(f"m{k}"))
            assert reader.verify().ok

    def test_largest_record_and_ids(self, tmp_path: Path) -> None:
        """The largest record, a long id, an empty one and a large payload round trip."""
        spec = ModalitySpec(name="x", type_id=65535, metadata_size=65528)
        record, data = os.urandom(65528), os.urandom(9 << 20)
        samples = [("i" * 3_000_000, {"x": Payload(record, data)}), ("", {"x": Payload(record, b"")}), ("j", {})]
        with self.reader(write(self.writer, tmp_path / "x", samples, [spec])) as reader:
            assert plain(reader.read_payload(0, "x")) == (record, data)
            assert reader.sample_ids[0] == samples[0][0]
            assert [reader.sample_ids.find(sample_id) for sample_id, _ in samples] == [0, 1, 2]
            assert reader.verify().ok

    def test_buffers(self, tmp_path: Path) -> None:
        """Bytes, byte arrays, views and arrays of any C-contiguous shape are written as their bytes."""
        values = [b"12345678", bytearray(b"12345678"), memoryview(b"12345678"), np.frombuffer(b"12345678", "<u4")]
        values.append(np.frombuffer(b"12345678", np.uint8).reshape(2, 2, 2))
        samples = [(str(k), {"text": Payload(value, value)}) for k, value in enumerate(values)]
        samples.append(("empty", {"text": Payload(b"12345678", np.zeros((0, 3)))}))
        with self.reader(write(self.writer, tmp_path / "x", samples)) as reader:
            for k in range(len(values)):
                assert plain(reader.read_payload(k, "text")) == (b"12345678", b"12345678")
            assert reader.read_payload(-1, "text").data == b""

    def check_content(self, folder: Path, content: tuple) -> None:
        """Writes any modalities and samples, and reads them back, mapped and remote."""
        specs, samples = content
        path = write(self.writer, folder / "x", samples, specs)
        for reader in (self.reader(path, verify=True), self.reader(MemorySource(path.read_bytes()), verify=True)):
            with reader:
                assert list(reader.sample_ids) == [sample_id for sample_id, _ in samples]
                for spec in specs:
                    wanted = [plain(payloads.get(spec.name)) for _, payloads in samples]
                    assert [plain(reader.read_payload(i, spec.name)) for i in range(len(samples))] == wanted
                    assert [
                        plain(v) for v in reader.read_samples(range(len(samples)), [spec.name])[spec.name]
                    ] == wanted
                for i, (sample_id, _) in enumerate(samples):
                    assert reader.sample_ids.find(sample_id) == i
                assert reader.verify().ok

    # What the reader answers to wrong questions.

    def test_wrong_questions(self, file: Path) -> None:
        """Samples and modalities that do not exist raise IndexError and KeyError, naming file and what there is."""
        with self.reader(file) as reader:
            for i in (4, -5, 2**70):
                with pytest.raises(IndexError, match="out of range for 4 samples"):
                    reader.read_payload(i, "text")
            for indices in ([0, 4], [-5], np.array([2**64 - 1], np.uint64)):
                with pytest.raises(IndexError, match="out of range for 4 samples"):
                    reader.read_samples(indices, ["text"])
            for call in (reader.presence, reader.sizes, reader.records, reader.checksums):
                with pytest.raises(KeyError, match="no modality 'sound'; it has image, text"):
                    call("sound")
            with pytest.raises(KeyError):
                reader.read_sample(0, ["sound"])
            with pytest.raises(KeyError):
                reader.read_samples([0], ["sound"])
            with pytest.raises(TypeError):
                reader.read_payload("0", "text")
            for indices in ([0.5], [[0]], ["a"]):
                with pytest.raises(TypeError, match="expected integers"):
                    reader.read_samples(indices, ["text"])

    def test_close(self, file: Path) -> None:
        """After close reading raises ValueError, but values read before stay valid; closing twice is fine."""
        reader = self.reader(file)
        raw, records = reader.read_payload(0, "image").data, reader.records("text")
        reader.sample_ids.find("a")
        reader.close()
        reader.close()
        assert raw == b"\xff\xd8pixels"
        assert records[0].tobytes() == b"12345678"
        for call in (
            lambda: reader.read_payload(0, "text"),
            lambda: reader.read_samples([0], ["text"])["text"],
            lambda: reader.presence("text"),
            lambda: reader.sample_ids[0],
            lambda: reader.sample_ids.find("a"),
        ):
            with pytest.raises(ValueError, match="closed"):
                call()

    def test_close_releases_the_source(self, file: Path) -> None:
        """A source that was passed in is closed with the reader, but left open when the file is refused."""
        source = MemorySource(file.read_bytes())
        self.reader(source).close()
        assert source.closed
        source = MemorySource(file.read_bytes()[:50])
        with pytest.raises(FormatError):
            open_reader(source)
        with pytest.raises(FormatError):
            self.reader(source)
        assert not source.closed

    def test_pickle(self, file: Path) -> None:
        """A reader pickles by path, with its options, and opens the file again."""
        file.write_bytes(without_tail(file.read_bytes()))
        with self.reader(file, modalities=SPECS) as reader, pickle.loads(pickle.dumps(reader)) as again:
            assert again.modalities == SPECS
            assert plain(again.read_payload(0, "text")) == (b"12345678", b"hello")
        write(self.writer, file)
        with self.reader(file, verify=True) as reader, pickle.loads(pickle.dumps(reader)) as again:
            assert type(again) is self.reader
            assert again.modalities == SPECS
            assert hash(again.modalities) == hash(SPECS)
            assert repr(again) == repr(reader)
        source = pickle.loads(pickle.dumps(open_reader(file)._source))
        assert source.view(0, 4) == file.read_bytes()[:4]

    def test_deep_copy(self, file: Path) -> None:
        """A deep copy has a source of its own."""
        source = MemorySource(file.read_bytes())
        with self.reader(source) as reader:
            copy.deepcopy(reader).close()
            assert not source.closed

    def test_threads(self, file: Path) -> None:
        """Several threads read one reader alike."""
        reader = self.reader(file)
        wanted = [plain(reader.read_payload(i, "text")) for i in range(4)]
        results = []

        def work() -> None:
            for _ in range(50):
                results.append([plain(value) for value in reader.read_samples(range(4), ["text"])["text"]] == wanted)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 200
        reader.close()

    # Given modalities.

    def test_given_modalities_are_checked(self, file: Path) -> None:
        """Modalities that are given must be the file's, in any order; each difference is named."""
        with self.reader(file, modalities=[TEXT, IMAGE]) as reader:
            assert reader.modalities == SPECS
        wrong = ModalitySpec(name="image", type_id=11, metadata_size=16)
        for given_specs, message in (
            ([IMAGE], "modalities that were not given"),
            ([IMAGE, TEXT, TEXT], "no modality 'text' in the file, or it is given twice"),
            ([TEXT, wrong], "type_id"),
            ([TEXT, ModalitySpec(name="image", type_id=10, metadata_size=24)], "metadata_size"),
        ):
            with pytest.raises(SchemaMismatchError, match=message):
                self.reader(file, modalities=given_specs)

    def test_without_tail(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file without our tail gives its payloads when the modalities are given, and ids by number."""
        data = without_tail(file.read_bytes())
        with pytest.raises(TruncatedError, match="its modalities must be given"):
            self.reader(MemorySource(data))
        with pytest.raises(SchemaMismatchError, match="no checksums: another writer made it; open it without verify"):
            self.reader(MemorySource(data), modalities=SPECS, verify=True)
        file.write_bytes(data)
        for rows in (1 << 14, 1):
            monkeypatch.setattr("mm_assets.formats.batch.BLOCK_ROWS", rows)
            for source in (file, MemorySource(data)):
                with self.reader(source, modalities=[TEXT, IMAGE]) as reader:
                    assert reader.names == ("image", "text")
                    assert reader.schema == reader.provenance == {}
                    assert list(reader.sample_ids) == ["0", "1", "2", "3"]
                    assert not reader.has_checksums
                    for name in reader.names:
                        wanted = [plain(payloads.get(name)) for _, payloads in SAMPLES]
                        assert [plain(reader.read_payload(i, name)) for i in range(4)] == wanted
                        assert [plain(value) for value in reader.read_samples(range(4), [name])[name]] == wanted
                        assert reader.presence(name).tolist() == [value is not None for value in wanted]
                        assert reader.sizes(name).tolist() == [len(b"".join(v)) if v else 0 for v in wanted]
                        assert reader.checksums(name).tolist() == [crc32c(*v) if v else 0 for v in wanted]
                        assert reader.records(name)[0].tobytes() == wanted[0][0]
                    report = reader.verify()
                    assert report.ok
                    assert report.num_payloads == 4

    # Remote files.

    def test_requests_of_a_remote_open(self, file: Path) -> None:
        """Opening asks for at most three ranges: head, tail, and what is large; the same through `open_reader`."""
        for samples in (SAMPLES, [(f"{k:030}", {}) for k in range(20_000)]):
            data = write(self.writer, file, samples).read_bytes()
            for opener in (self.reader, open_reader):
                source = MemorySource(data)
                opener(source)
                assert len(source.requests) <= 2
                assert sum(size for _, size in source.requests) < 100_000
        spec = ModalitySpec(name="x", type_id=1, metadata_size=8, config={"vocabulary": ["token"] * 20_000})
        source = MemorySource(write(self.writer, file, [], [spec]).read_bytes())
        assert open_reader(source).modalities == (spec,)
        assert len(source.requests) <= 3

    @pytest.mark.parametrize("verify", [False, True])
    def test_tables_out_of_reach(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool) -> None:
        """Of a remote file with large tables rows are asked for, not whole tables; to check presence, MSTR's once."""
        samples = [(f"id {k}", dict(SAMPLES[k % 4][1])) for k in range(5000)]
        data = write(self.writer, tmp_path / "x", samples).read_bytes()
        monkeypatch.setattr("mm_assets.formats.byte_source.WHOLE_LIMIT", 1000)
        source = MemorySource(data)
        reader = self.reader(source, verify=verify)
        source.requests.clear()
        assert plain(reader.read_payload(4000, "text")) == plain(SAMPLES[0][1]["text"])
        assert reader.read_payload(4002, "text") is None
        assert {n: plain(v) for n, v in reader.read_sample(4003).items()}["image"] == (b"\x01" * 16, b"\x02" * 40)
        assert [plain(v) for v in reader.read_samples([4, 1, 4003], ["image"])["image"]] == [
            plain(SAMPLES[k][1].get("image")) for k in (0, 1, 3)
        ]
        assert reader.sample_ids[4999] == "id 4999"
        tables = [5000 * (16 + 8), 5000 * (16 + 16)] if verify and reader.format == "MSTR" else []
        assert [size for _, size in source.requests if size >= 200] == tables
        assert reader.sample_ids.find("id 1234") == 1234
        assert list(reader.sample_ids) == [sample_id for sample_id, _ in samples]
        assert reader.presence("image").sum() == 2500
        assert reader.verify().ok

    def test_sample_is_one_request(self, file: Path) -> None:
        """A sample of a remote file comes by one call for all its payloads."""
        source = MemorySource(file.read_bytes())
        reader = self.reader(source)
        reader.read_sample(0)
        calls = []
        many = source.view_many
        source.view_many = lambda ranges: calls.append(len(ranges)) or many(ranges)
        assert reader.read_sample(0)["text"] is not None
        assert calls == [2]

    # Whole-file reads.

    def test_scan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A scan gives every sample once, in order, in blocks bounded by bytes and rows."""
        samples = [(str(k), {"text": Payload(b"12345678", bytes(100 * (k % 7)))}) for k in range(200)]
        path = write(self.writer, tmp_path / "x", samples)
        monkeypatch.setattr("mm_assets.formats.batch.BLOCK_ROWS", 64)
        monkeypatch.setattr("mm_assets.formats.batch.BLOCK_BYTES", 1000)
        for source in (path, MemorySource(path.read_bytes())):
            with self.reader(source) as reader:
                seen = []
                for block in reader.scan(["text"], verify=True):
                    sizes = [len(value.data) for value in block.payloads["text"]]
                    assert len(sizes) == 1 or sum(sizes) <= 1000
                    seen += zip(block.indices.tolist(), sizes, strict=True)
                assert seen == [(k, 100 * (k % 7)) for k in range(200)]
                assert reader.verify().ok
