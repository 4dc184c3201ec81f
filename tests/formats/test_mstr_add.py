"""Adding a stream to an MSTR file: what is added, and what is refused."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from mm_assets.errors import BadMagicError, CorruptError, EncodeError, TruncatedError
from mm_assets.formats import (
    MappedFile,
    ModalitySpec,
    MstrReader,
    MstrWriter,
    MultWriter,
    Payload,
    add_stream,
    convert,
    open_reader,
)
from mm_assets.formats.mstr_add import grow
from mm_assets.formats.output import GrowingFile

from . import independent_reader
from .container_suite import contents
from .examples import (
    PROVENANCE,
    SAMPLES,
    SPECS,
    MemorySource,
    plain,
    sections_of,
    with_section,
    with_table,
    without_tail,
    write,
)

SCORE = ModalitySpec(name="score", type_id=5, metadata_size=16, type_name="ScalarField", config={"dtype": "float32"})
SCORES = (Payload(b"s" * 16, b""), None, Payload(b"t" * 16, b"0123456789"), Payload(b"u" * 16, b"x" * 8))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The example samples as MSTR."""
    return write(MstrWriter, tmp_path / "x.mstr")


def values(path: Path | MemorySource) -> dict[str, list[tuple[bytes, bytes] | None]]:
    """Every payload of a file that verifies clean."""
    with open_reader(path, verify=True) as reader:
        report = reader.verify()
        assert report.ok, report.damage
        return {
            name: [plain(payload) for payload in reader.read_samples(range(len(reader)), [name])[name]]
            for name in reader.names
        }


def directly(path: Path) -> Path:
    """A file with all three modalities, written at once."""
    samples = [
        (sample_id, {**payloads, "score": score}) for (sample_id, payloads), score in zip(SAMPLES, SCORES, strict=True)
    ]
    return write(MstrWriter, path, samples, (*SPECS, SCORE))


def test_added_is_as_written(file: Path, tmp_path: Path) -> None:
    """A stream that was added is in content what a writer makes: payloads, schema, ids, counts, checksums."""
    before = file.read_bytes()
    summary = add_stream(file, SCORE, iter(SCORES))
    other = directly(tmp_path / "direct.mstr")
    assert values(file) == values(other)
    with open_reader(file) as added, open_reader(other) as written:
        assert added.schema == written.schema
        assert added.modalities == written.modalities == (*SPECS, SCORE)
        assert list(added.sample_ids) == list(written.sample_ids)
        assert added.checksums("score").tolist() == written.checksums("score").tolist()
        assert added.presence("score").tolist() == [True, False, True, True]
    assert (summary.num_samples, summary.num_bytes) == (4, file.stat().st_size)
    assert summary.num_present == {"image": 2, "text": 2, "score": 3}
    after = file.read_bytes()
    assert after[8192 : len(before)] == before[8192:]  # no byte of what was there has changed
    assert after[:4096] == after[4096:8192]


def test_layout_of_what_is_added(file: Path) -> None:
    """Table and region of an added stream start at multiples of 4096, sections at 64, and gaps are zero."""
    end = file.stat().st_size
    add_stream(file, SCORE, SCORES)
    data = file.read_bytes()
    table, _ = independent_reader.read_streams(data)
    last = {key: int(table[2][key]) for key in ("metadata_ptr", "metadata_size", "data_ptr", "data_size")}
    assert last["metadata_ptr"] == -(-end // 4096) * 4096
    assert last["data_ptr"] == last["metadata_ptr"] + 4096
    assert (last["metadata_size"], last["data_size"]) == (32, 24)
    assert not any(data[end : last["metadata_ptr"]])
    assert not any(data[last["metadata_ptr"] + 4 * 32 : last["data_ptr"]])
    sections = sections_of(data)
    assert sections[1][0] % 64 == 0
    assert sections[1][0] >= last["data_ptr"] + 24
    assert sections[2][0] < end  # the ids stay where they are


def test_independent_reader_finds_it(file: Path) -> None:
    """A reader made from the design document alone finds every payload of the grown file."""
    add_stream(file, SCORE, SCORES)
    _, streams = independent_reader.read_streams(file.read_bytes())
    found = [[None if row is None else (row[0][16:], row[1]) for row in rows] for rows in streams]
    assert found[2] == [plain(payload) for payload in SCORES]
    for spec, rows in zip(SPECS, found, strict=False):
        assert rows == [plain(payloads.get(spec.name)) for _, payloads in SAMPLES]


@settings(deadline=None, max_examples=40)
@given(content=contents())
def test_any_content(tmp_path_factory: pytest.TempPathFactory, content: tuple) -> None:
    """Written with one modality and grown by the others, any file is in content what a writer makes."""
    specs, samples = content
    folder = tmp_path_factory.mktemp("grow")
    first = [(sample_id, {specs[0].name: payloads.get(specs[0].name)}) for sample_id, payloads in samples]
    grown = write(MstrWriter, folder / "a.mstr", first, specs[:1])
    for spec in specs[1:]:
        add_stream(grown, spec, [payloads.get(spec.name) for _, payloads in samples], fsync=False)
    written = write(MstrWriter, folder / "b.mstr", samples, specs)
    assert values(grown) == values(written)
    with open_reader(grown) as one, open_reader(written) as other:
        for modality in (*one.schema["modalities"], *other.schema["modalities"]):
            del modality["table_crc32c"]  # of rows with positions, which differ
        assert one.schema == other.schema


def test_convert_with_added_streams(file: Path, tmp_path: Path) -> None:
    """A grown file converts to what writers make of the same samples, to the byte, and back."""
    add_stream(file, SCORE, SCORES)
    other = directly(tmp_path / "direct.mstr")
    convert(file, tmp_path / "a.mult", fsync=False)
    convert(other, tmp_path / "b.mult", fsync=False)
    assert (tmp_path / "a.mult").read_bytes() == (tmp_path / "b.mult").read_bytes()
    for source in (tmp_path / "a.mult", file):
        convert(source, tmp_path / "back.mstr", fsync=False)
        assert (tmp_path / "back.mstr").read_bytes() == other.read_bytes()


def test_the_same_additions_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding is deterministic, however its writes are joined."""
    one, other = (write(MstrWriter, tmp_path / name) for name in ("a", "b"))
    add_stream(one, SCORE, SCORES)
    file = GrowingFile(other)
    monkeypatch.setattr("mm_assets.formats.output.JOINED_WRITE", 1)
    grow(file, SCORE, SCORES)
    file.close()
    assert one.read_bytes() == other.read_bytes()


def test_open_readers_go_on(file: Path) -> None:
    """A reader that was open before still reads everything, and a new one sees the stream."""
    with MstrReader(file) as old:
        before = {name: [plain(p) for p in old.read_samples(range(4), [name])[name]] for name in old.names}
        add_stream(file, SCORE, SCORES)
        assert old.names == ("image", "text")
        assert {name: [plain(p) for p in old.read_samples(range(4), [name])[name]] for name in old.names} == before
        assert old.verify().ok
        with MstrReader(file) as new:
            assert new.names == ("image", "text", "score")


def test_a_reader_that_opens_meanwhile(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that saw the size before an addition and the header page after it looks at the size again."""
    real = MappedFile.read

    def late(self: MappedFile, offset: int, size: int) -> memoryview:
        monkeypatch.setattr(MappedFile, "read", real)
        add_stream(file, SCORE, SCORES)
        return real(self, offset, size)

    for opener in (MstrReader, open_reader):
        write(MstrWriter, file)
        monkeypatch.setattr(MappedFile, "read", late)
        with opener(file) as reader:
            assert reader.names == ("image", "text", "score")
            assert reader.verify().ok


def test_no_samples(tmp_path: Path) -> None:
    """A file without samples takes a stream without payloads."""
    path = write(MstrWriter, tmp_path / "x", [])
    assert add_stream(path, SCORE, []).num_present == {"image": 0, "text": 0, "score": 0}
    assert values(path) == {"image": [], "text": [], "score": []}


def test_up_to_32_streams(tmp_path: Path) -> None:
    """Streams can be added one after the other until there are 32; the next is refused."""
    path = write(MstrWriter, tmp_path / "x", [("a", {})], SPECS[:1])
    specs = [ModalitySpec(name=f"m{k}", type_id=1, metadata_size=8) for k in range(32)]
    for k, spec in enumerate(specs[:31]):
        add_stream(path, spec, [Payload(bytes(8), bytes([k]))], fsync=False)
    data = path.read_bytes()
    with pytest.raises(EncodeError, match=r"33 modalities, expected 1\.\.32"):
        add_stream(path, specs[31], [None])
    assert path.read_bytes() == data
    assert values(path)["m30"] == [(bytes(8), b"\x1e")]


@pytest.mark.parametrize(
    ("names", "name", "message"),
    [
        (["image"], "image", "two modalities are named 'image'"),
        (["plumless"], "buckeroo", "'plumless' and 'buckeroo' have the same CRC-32"),
    ],
)
def test_names_that_clash(tmp_path: Path, names: list[str], name: str, message: str) -> None:
    """A name that is there, or has the hash of one, is refused; no payload is asked for, no byte written."""
    specs = [ModalitySpec(name=one, type_id=1, metadata_size=8) for one in names]
    path = write(MstrWriter, tmp_path / "x", [("a", {})], specs)
    data = path.read_bytes()

    def never() -> Iterator[Payload]:
        pytest.fail("asked for a payload")
        yield

    with pytest.raises(EncodeError, match=message):
        add_stream(path, ModalitySpec(name=name, type_id=1, metadata_size=8), never())
    assert path.read_bytes() == data


def test_configuration_that_is_not_json(file: Path) -> None:
    """A configuration that the schema cannot hold is refused before anything is written."""
    data = file.read_bytes()
    with pytest.raises(EncodeError, match="not JSON"):
        add_stream(file, ModalitySpec(name="x", type_id=1, metadata_size=8, config={"a": {1, 2}}), [None] * 4)
    assert file.read_bytes() == data


def failing() -> Iterator[Payload | None]:
    """One payload, and then the caller's own trouble."""
    yield SCORES[0]
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("payloads", "error", "message"),
    [
        (SCORES[:3], EncodeError, "3 payloads for 4 samples"),
        ((*SCORES, None), EncodeError, "more than 4 payloads for 4 samples"),
        ([None, Payload(b"short", b"")], EncodeError, r"sample 1 \('b'\), modality 'score': .* 5 bytes, expected 16"),
        ([Payload(bytes(16), "text")], EncodeError, r"sample 0 \('a'\), modality 'score': not contiguous bytes"),
        (failing(), ZeroDivisionError, None),
    ],
)
def test_payloads_that_do_not_fit(file: Path, payloads: object, error: type[Exception], message: str | None) -> None:
    """Wrong payloads, and an iterator that fails, leave the file as it was, to the byte."""
    data = file.read_bytes()
    with pytest.raises(error, match=message):
        add_stream(file, SCORE, payloads)
    assert file.read_bytes() == data
    add_stream(file, SCORE, SCORES)
    assert values(file)["score"] == [plain(payload) for payload in SCORES]


def test_a_payload_beyond_the_limit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload that the format cannot count is refused, naming sample and limit."""
    monkeypatch.setattr("mm_assets.formats.mstr_writer.MAX_PAYLOAD_SIZE", 20)
    with pytest.raises(
        EncodeError, match=r"sample 2 \('c'\), modality 'score': the payload takes 26 bytes.* allows 20"
    ):
        add_stream(file, SCORE, SCORES)


def test_a_second_adder_is_refused(file: Path) -> None:
    """While one process adds, another is refused at once, and the first goes on."""
    taken, go = threading.Event(), threading.Event()

    def slow() -> Iterator[Payload | None]:
        taken.set()
        go.wait(10)
        yield from SCORES

    first = threading.Thread(target=add_stream, args=(file, SCORE, slow()))
    first.start()
    try:
        assert taken.wait(10)
        with pytest.raises(BlockingIOError, match="another process is adding"):
            add_stream(file, ModalitySpec(name="other", type_id=1, metadata_size=8), [None] * 4)
    finally:
        go.set()
        first.join()
    assert values(file)["score"] == [plain(payload) for payload in SCORES]


def test_a_file_that_is_replaced_meanwhile(file: Path) -> None:
    """A writer that puts another file in its place while a stream is added makes the addition fail aloud."""

    def replacing() -> Iterator[Payload | None]:
        write(MstrWriter, file, SAMPLES[:1])
        yield from SCORES

    with pytest.raises(OSError, match="another writer replaced the file"):
        add_stream(file, SCORE, replacing())
    assert len(values(file)["text"]) == 1


def test_only_whole_mstr_files(file: Path, tmp_path: Path) -> None:
    """Another format, a file without tail, a damaged one and one that is not there are refused and not touched."""
    mult = write(MultWriter, tmp_path / "x.mult")
    foreign = tmp_path / "foreign.mstr"
    foreign.write_bytes(without_tail(file.read_bytes()))
    cut = tmp_path / "cut.mstr"
    cut.write_bytes(file.read_bytes()[:-100])
    empty = tmp_path / "empty.mstr"
    empty.write_bytes(b"")
    for path, error in ((mult, BadMagicError), (foreign, TruncatedError), (cut, TruncatedError), (empty, ValueError)):
        data = path.read_bytes()
        with pytest.raises(error):
            add_stream(path, SCORE, SCORES)
        assert path.read_bytes() == data
    with pytest.raises(FileNotFoundError):
        add_stream(tmp_path / "none", SCORE, SCORES)
    assert not (tmp_path / "none").exists()


def test_sections_of_later_writers_stay(file: Path) -> None:
    """A section of a kind that is not known here, and unknown keys of the schema, are still there afterwards."""
    data = with_section(file.read_bytes(), 77, b"something new")
    file.write_bytes(data)
    add_stream(file, SCORE, SCORES)
    ptr, size = sections_of(file.read_bytes())[77]
    assert file.read_bytes()[ptr : ptr + size] == b"something new"
    assert "score" in values(file)


def test_a_section_outside_the_file(file: Path) -> None:
    """A section table that points after the end of the file is refused: its section would be overwritten."""
    import struct

    data = with_section(file.read_bytes(), 77, b"something new")
    start, size = struct.unpack_from("<QQ", data, 4064)
    table = bytearray(data[start : start + size])
    struct.pack_into("<Q", table, len(table) - 8, 2**63)
    file.write_bytes(with_table(data, bytes(table)))
    data = file.read_bytes()
    with pytest.raises(TruncatedError, match="the section of kind 77 ends after the file"):
        add_stream(file, SCORE, SCORES)
    assert file.read_bytes() == data


def test_bytes_after_the_end_are_removed(file: Path) -> None:
    """Bytes that an interrupted attempt left after the live end are removed, and gaps are zero."""
    clean = file.read_bytes()
    add_stream(file, SCORE, SCORES)
    wanted = file.read_bytes()
    file.write_bytes(clean + b"\xee" * 20_000)
    add_stream(file, SCORE, SCORES)
    assert file.read_bytes() == wanted


@pytest.mark.parametrize("damaged", [0, 4096])
def test_a_damaged_page_is_restored(file: Path, damaged: int) -> None:
    """Page or shadow, whichever is damaged, is made whole from the other; with both damaged nothing is written."""
    data = bytearray(file.read_bytes())
    add_stream(file, SCORE, SCORES)
    wanted = file.read_bytes()
    data[damaged + 100] ^= 1
    file.write_bytes(data)
    add_stream(file, SCORE, SCORES)
    assert file.read_bytes() == wanted
    data[4196 - damaged] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="neither the header page nor its shadow"):
        add_stream(file, SCORE, SCORES)
    assert file.read_bytes() == bytes(data)


def test_provenance_and_descriptors_stay_open(file: Path) -> None:
    """Provenance is kept, and no descriptor stays open, also after a refusal."""
    before = len(os.listdir("/proc/self/fd"))
    for payloads in (SCORES[:1], SCORES):
        try:
            add_stream(file, SCORE, payloads)
        except EncodeError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before
    with open_reader(file) as reader:
        assert reader.provenance == PROVENANCE


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Many large payloads pass through without being held."""
    import tracemalloc

    path = write(MstrWriter, tmp_path / "x", [(str(k), {}) for k in range(3000)])
    block = os.urandom(1 << 16)
    tracemalloc.start()
    add_stream(path, SCORE, (Payload(bytes(16), block) for _ in range(3000)), fsync=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 3000 << 16
    assert peak < 24 << 20


def test_live_end_needs_a_tail(file: Path) -> None:
    """The end of a file without tail is unknown, also when its modalities are given."""
    reader = MstrReader(MemorySource(without_tail(file.read_bytes())), modalities=SPECS)
    with pytest.raises(TruncatedError, match="no tail: a stream can be added only"):
        reader.live()


def test_a_file_that_grows(file: Path) -> None:
    """The locked file gives its bytes, and says so when they are gone."""
    grown = GrowingFile(file)
    assert grown.view(0, 4) == b"MSTR"
    assert grown.view_many([(4, 4), (0, 0)]) == [(4).to_bytes(4, "little"), b""]
    with pytest.raises(OSError, match="was truncated while being read"):
        grown.view(grown.size - 1, 2)
    grown.close()


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_is_replaced_before_the_lock(file: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    """The lock is of the file that the path names: a replaced file is reopened, a deleted one refused."""
    real = fcntl.flock
    calls: list[int] = []

    new = write(MstrWriter, file.with_name("new"), SAMPLES[:1]).read_bytes()
    file.with_name("new").unlink()

    def late(fd: int, operation: int) -> None:
        if not calls:
            calls.append(fd)
            if replaced:
                file.with_name("other").write_bytes(new)
                file.with_name("other").replace(file)
            else:
                file.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    before = len(os.listdir("/proc/self/fd"))
    if replaced:
        add_stream(file, SCORE, SCORES[:1])
        assert values(file)["score"] == [plain(SCORES[0])]
    else:
        with pytest.raises(FileNotFoundError):
            add_stream(file, SCORE, SCORES)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_goes_while_it_is_opened(file: Path) -> None:
    """A truncated file is refused as such, also when it is gone by the time its size is read again."""
    file.write_bytes(file.read_bytes()[:9000])
    source = MappedFile(file)
    assert not source.reopened()
    file.unlink()
    assert not source.reopened()
    with pytest.raises(TruncatedError):
        MstrReader(source)
