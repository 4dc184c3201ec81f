"""A packed file and its streams as one reader: the operations that datasets do not cover, and ids that differ."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from mm_assets.errors import SchemaMismatchError
from mm_assets.formats import (
    JoinedReader,
    ModalitySpec,
    MstrReader,
    MstrWriter,
    MultReader,
    MultWriter,
    Payload,
    open_reader,
)
from mm_assets.formats import batch as batches

from .examples import SAMPLES, SPECS, MemorySource, Reader, Samples, plain, without_tail, write

SCORE = ModalitySpec(name="score", type_id=3, metadata_size=8, type_name="ScalarField")
SCORES: Samples = tuple(
    (sample_id, {} if i == 1 else {"score": Payload(bytes([i] * 8), b"score" * i)})
    for i, (sample_id, _) in enumerate(SAMPLES)
)


@pytest.fixture(params=[MultReader, MstrReader])
def kind(request: pytest.FixtureRequest) -> Reader:
    return request.param


@pytest.fixture
def packed(kind: Reader, tmp_path: Path) -> Path:
    """A packed file, and beside it a stream."""
    write(MstrWriter, tmp_path / "stream.mstr", SCORES, [SCORE])
    return write(MultWriter if kind is MultReader else MstrWriter, tmp_path / "packed")


def joined(packed: Path, *, verify: bool = False, in_memory: bool = False) -> JoinedReader:
    paths = (packed, packed.with_name("stream.mstr"))
    first, stream = (open_reader(MemorySource(p.read_bytes()) if in_memory else p, verify=verify) for p in paths)
    return JoinedReader(first, [("score", stream)])


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_all_operations(
    packed: Path, kind: Reader, verify: bool, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads, presence, records, sizes and checksums are those of the file that holds the modality."""
    monkeypatch.setattr(batches, "BLOCK_ROWS", 3)
    with joined(packed, verify=verify, in_memory=in_memory) as reader, kind(packed) as alone:
        stream = reader.parts[1]
        assert (reader.format, len(reader), reader.names) == (alone.format, 4, ("image", "text", "score"))
        assert reader.modalities == (*alone.modalities, SCORE)
        assert list(reader.sample_ids) == ["a", "b", "c", "ü-4"]
        expected = [{**dict.fromkeys(reader.names), **SAMPLES[i][1], **SCORES[i][1]} for i in range(4)]
        for i in range(4):
            found = reader.read_sample(i, verify=True)
            assert list(found) == list(reader.names)
            assert {name: plain(payload) for name, payload in found.items()} == {
                name: plain(payload) for name, payload in expected[i].items()
            }
            assert plain(reader.read_payload(i, "score")) == plain(expected[i]["score"])
        for names in (None, ["score", "text"], ["score"], ["image"]):
            blocks = list(reader.scan(names))
            assert [i for block in blocks for i in block.indices] == [0, 1, 2, 3]
            for name in names or reader.names:
                column = [plain(payload) for block in blocks for payload in block.payloads[name]]
                assert column == [plain(one[name]) for one in expected]
        assert [len(block.indices) for block in reader.scan([])] == [3, 1]
        for name, part in (("text", alone), ("score", stream)):
            for method in ("presence", "records", "sizes", "checksums"):
                assert getattr(reader, method)(name).tolist() == getattr(part, method)(name).tolist()
        report = reader.verify()
        assert (report.ok, report.num_samples, report.num_payloads) == (True, 4, 7)
        with pytest.raises(KeyError, match="no modality 'x'; it has image, text, score"):
            reader.presence("x")


def test_it_pickles_and_closes(packed: Path) -> None:
    """A copy opens the files again; closing closes all of them."""
    reader = joined(packed)
    with pickle.loads(pickle.dumps(reader)) as copy:
        reader.close()
        assert plain(copy.read_payload(3, "score")) == plain(SCORES[3][1]["score"])
        assert plain(copy.read_payload(0, "text")) == plain(SAMPLES[0][1]["text"])
    for name in ("text", "score"):
        with pytest.raises(ValueError, match="closed"):
            reader.read_payload(0, name)


def test_damage_of_a_stream_names_it(packed: Path) -> None:
    """The report on all files says which of them is damaged."""
    stream = packed.with_name("stream.mstr")
    stream.write_bytes(stream.read_bytes().replace(b"scorescore", b"scoreScore"))
    with joined(packed) as reader:
        damage = reader.verify().damage
    assert {(one.sample, one.modality) for one in damage} == {(2, "score"), (3, "score")}
    assert all(one.message.startswith(f"{stream}: the payload does not have its checksum") for one in damage)


@pytest.mark.parametrize("ids", [("0", "1", "2", "3"), ("a", "b", "c", "ü-4")])
def test_a_packed_file_without_ids(packed: Path, kind: Reader, ids: tuple[str, ...]) -> None:
    """To a file of another writer, which has no ids section, a stream fits whose ids are its numbers."""
    packed.write_bytes(without_tail(packed.read_bytes()))
    stream = write(
        MstrWriter, packed.with_name("stream.mstr"), [(ids[i], one) for i, (_, one) in enumerate(SCORES)], [SCORE]
    )
    with kind(packed, modalities=SPECS) as first, MstrReader(stream) as second:
        if ids[0] == "0":
            assert JoinedReader(first, [("score", second)]).read_sample(0, ["score", "image"]).keys() == {
                "score",
                "image",
            }
        else:
            with pytest.raises(SchemaMismatchError, match=rf"{stream}: has other sample ids than {packed}"):
                JoinedReader(first, [("score", second)])
