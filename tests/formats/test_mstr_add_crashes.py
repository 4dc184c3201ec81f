"""Crashes while a stream is added to an MSTR file, replayed in every way that a disk may have kept the writes.

The model of a crash: what was written before the last fsync is on the disk; of what was written or truncated since, any
subset is, and a header page in any mixture of its old and new sectors. Every state has to read as the file before or
the file after, payload by payload, and has to take the stream (or, where it is there, another) and verify clean then.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from mm_assets.errors import EncodeError
from mm_assets.formats import (
    ModalitySpec,
    MstrReader,
    MstrWriter,
    Payload,
    add_stream,
    output,
)
from mm_assets.formats.mstr_add import grow
from mm_assets.formats.output import GrowingFile, write_at

from .examples import (
    MemorySource,
    plain,
    write,
)

SECTOR = 512
MAX_SUBSETS = 10  # pending writes up to which every subset is tried
NUM_RANDOM = 300  # subsets tried where there are more

Operation = tuple[str, int, bytes]  # "write" at a position, "cut" to a size, or "sync"
Content = dict[str, list[tuple[bytes, bytes] | None]]

TEXT = ModalitySpec(name="text", type_id=2, metadata_size=8)
SHORT_SCORE = ModalitySpec(name="score", type_id=5, metadata_size=16)
OTHER = ModalitySpec(name="other", type_id=1, metadata_size=8)
SHORT_SAMPLES = [("a", {"text": Payload(b"12345678", b"hello")}), ("b", {}), ("c", {"text": Payload(b"abcdefgh", b"")})]
SHORT_SCORES = [Payload(b"s" * 16, b"seventeen bytes!!"), None, Payload(b"t" * 16, b"")]
OTHERS = [None, Payload(b"o" * 8, b"other"), None]


class Recorder(GrowingFile):
    """A file that notes what is done to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, fsync=False)
        self.operations: list[Operation] = []

    def write_at(self, file: Recorder, parts: list[bytes], position: int) -> None:
        """Notes and writes, in place of `output.write_at`; each part for itself, as the system may take them."""
        at = position
        for part in filter(None, parts):
            self.operations.append(("write", at, bytes(part)))
            at += len(part)
        write_at(file, parts, position)

    def truncate(self, size: int) -> None:
        """Notes and truncates."""
        self.operations.append(("cut", size, b""))
        super().truncate(size)

    def sync(self) -> None:
        """Notes."""
        self.operations.append(("sync", 0, b""))


def record(path: Path, data: bytes, spec: ModalitySpec, payloads: list[Payload | None], joined: int) -> list[Operation]:
    """What adding a stream to a file of these bytes does."""
    path.write_bytes(data)
    file = Recorder(path)
    try:
        with mock.patch.multiple(output, JOINED_WRITE=joined, write_at=file.write_at):
            grow(file, spec, payloads)
    finally:
        file.close()
    return file.operations


def apply(data: bytearray, operations: list[Operation]) -> bytearray:
    """The file after some operations, in place."""
    for kind, position, content in operations:
        if kind == "write":
            data.extend(bytes(max(0, position - len(data))))
            data[position : position + len(content)] = content
        elif kind == "cut":
            data.extend(bytes(max(0, position - len(data))))
            del data[position:]
    return data


def subsets(pending: list[Operation], chance: random.Random) -> Iterator[list[Operation]]:
    """Every subset of the pending operations, or many of them where there are too many; in order."""
    if len(pending) <= MAX_SUBSETS:
        for count in range(len(pending) + 1):
            yield from (list(chosen) for chosen in itertools.combinations(pending, count))
        return
    for _ in range(NUM_RANDOM):
        share = chance.random()
        yield [operation for operation in pending if chance.random() < share]


def torn(operation: Operation, data: bytes, chance: random.Random) -> Iterator[Operation]:
    """A page's write with only some of its sectors: those before each of them, those from it on, and random ones."""
    _, position, content = operation
    count = len(content) // SECTOR
    kept = [set(range(k)) for k in range(1, count)] + [set(range(k, count)) for k in range(1, count)]
    kept += [{k for k in range(count) if chance.random() < 0.5} for _ in range(8)]
    old = data[position : position + len(content)].ljust(len(content), b"\0")
    for sectors in kept:
        mixed = [(content if k in sectors else old)[k * SECTOR : (k + 1) * SECTOR] for k in range(count)]
        yield "write", position, b"".join(mixed)


def is_page(operation: Operation) -> bool:
    """Whether a header page or its shadow is written."""
    return operation[0] == "write" and operation[1] in (0, 4096)


def crashes(before: bytes, operations: list[Operation], seed: int) -> Iterator[bytes]:
    """Every state that a crash during the operations may leave, each once."""
    chance = random.Random(seed)
    seen: set[bytes] = set()
    for stop in range(len(operations) + 1):
        done = operations[:stop]
        synced = max((k + 1 for k, (kind, _, _) in enumerate(done) if kind == "sync"), default=0)
        durable = bytes(apply(bytearray(before), done[:synced]))
        pending = done[synced:]
        for chosen in subsets(pending, chance):
            ways = [[one, *torn(one, durable, chance)] if is_page(one) else [one] for one in chosen]
            for way in itertools.product(*ways):
                state = bytes(apply(bytearray(durable), list(way)))
                if state not in seen:
                    seen.add(state)
                    yield state


def content_of(data: bytes) -> Content:
    """Ids and every payload."""
    reader = MstrReader(MemorySource(data))
    content: Content = {
        name: [plain(payload) for payload in reader.read_samples(range(3), [name])[name]] for name in reader.names
    }
    assert list(reader.sample_ids) == ["a", "b", "c"]
    return content


def whole(path: Path) -> Content:
    """The content of a file that verifies clean."""
    with MstrReader(path, verify=True) as reader:
        report = reader.verify()
        assert report.ok, report.damage
    return content_of(path.read_bytes())


def check_second_attempt(path: Path, state: bytes, before: Content, after: Content) -> None:
    """The state reads as before or after, and takes the stream, or another where it is there already."""
    found = content_of(state)
    assert found in (before, after)
    path.write_bytes(state)
    if found == after:
        with pytest.raises(EncodeError, match="two modalities are named"):
            add_stream(path, SHORT_SCORE, SHORT_SCORES, fsync=False)
        assert content_of(path.read_bytes()) == after
        add_stream(path, OTHER, OTHERS, fsync=False)
        assert whole(path) == {**after, "other": [plain(payload) for payload in OTHERS]}
    else:
        add_stream(path, SHORT_SCORE, SHORT_SCORES, fsync=False)
        assert whole(path) == after


@pytest.fixture(params=[0, 11])
def before(request: pytest.FixtureRequest, tmp_path: Path) -> bytes:
    """A file whose next descriptor lies within the first sector of the header page, or across its end."""
    more = [ModalitySpec(name=f"m{k}", type_id=1, metadata_size=8) for k in range(request.param)]
    return write(MstrWriter, tmp_path / "before", SHORT_SAMPLES, [TEXT, *more]).read_bytes()


@pytest.fixture
def after(before: bytes) -> Content:
    return {**content_of(before), "score": [plain(payload) for payload in SHORT_SCORES]}


def test_what_is_recorded(tmp_path: Path, before: bytes, after: Content) -> None:
    """The record holds the additions, the pages and the waits between them in their order, and replays to the file."""
    operations = record(tmp_path / "x", before, SHORT_SCORE, SHORT_SCORES, 16)
    assert bytes(apply(bytearray(before), operations)) == (tmp_path / "x").read_bytes()
    assert content_of((tmp_path / "x").read_bytes()) == after
    kinds = [kind if kind != "write" or position >= 8192 else position for kind, position, _ in operations]
    assert kinds[-5:] == ["sync", 4096, "sync", 0, "sync"]
    assert set(kinds[:-5]) == {"write"}
    assert len(kinds) >= 10
    assert min(position for kind, position, _ in operations[:-5]) >= len(before)


@pytest.mark.parametrize("joined", [16, 1 << 20])
def test_every_crash(tmp_path: Path, before: bytes, after: Content, joined: int) -> None:
    """After a crash at any point the file reads as before or as after, and a second attempt succeeds."""
    operations = record(tmp_path / "record", before, SHORT_SCORE, SHORT_SCORES, joined)
    count = 0
    for state in crashes(before, operations, seed=1):
        check_second_attempt(tmp_path / "x", state, content_of(before), after)
        count += 1
    assert count >= (200 if joined == 16 else 8)


@pytest.mark.fuzz
@pytest.mark.parametrize("start", ["garbage", "torn page", "new shadow", "torn shadow"])
def test_every_crash_of_a_second_attempt(tmp_path: Path, before: bytes, after: Content, start: str) -> None:
    """A crash during the attempt that follows a crash is as harmless: repair and cutting are part of it."""
    done = tmp_path / "done"
    operations = record(done, before, SHORT_SCORE, SHORT_SCORES, 1 << 20)
    grown = done.read_bytes()
    added = bytes(apply(bytearray(before), operations[: [kind for kind, _, _ in operations].index("sync")]))
    if start == "garbage":
        state = added
    elif start == "torn page":
        state = bytes(apply(bytearray(grown), [("write", 0, before[:SECTOR])]))
    else:
        size = 4096 if start == "new shadow" else SECTOR
        state = bytes(apply(bytearray(added), [("write", 4096, grown[:size])]))
    found = content_of(state)
    assert found == (after if start == "torn page" else content_of(before))
    spec, payloads = (OTHER, OTHERS) if found == after else (SHORT_SCORE, SHORT_SCORES)
    operations = record(tmp_path / "record", state, spec, payloads, 8)
    assert operations[0][0] == ("cut" if start == "garbage" else "write")
    wanted = content_of((tmp_path / "record").read_bytes())
    count = 0
    for crashed in crashes(state, operations, seed=2):
        assert content_of(crashed) in (found, wanted)
        (tmp_path / "x").write_bytes(crashed)
        if content_of(crashed) == found:
            add_stream(tmp_path / "x", spec, payloads, fsync=False)
            assert whole(tmp_path / "x") == wanted
        count += 1
    assert count >= 60


@pytest.mark.fuzz
def test_the_model_finds_a_missing_wait(tmp_path: Path, before: bytes, after: Content) -> None:
    """Without the wait between the two pages, with and without the one before them, a crash does harm."""
    operations = record(tmp_path / "record", before, SHORT_SCORE, SHORT_SCORES, 1 << 20)
    waits = [k for k, (kind, _, _) in enumerate(operations) if kind == "sync"]
    for missing in (waits[-2:-1], waits[-3:-1]):
        careless = [operation for k, operation in enumerate(operations) if k not in missing]
        harmed = 0
        for state in crashes(before, careless, seed=3):
            try:
                harmed += content_of(state) not in (content_of(before), after)
            except ValueError:
                harmed += 1
        assert harmed, missing
