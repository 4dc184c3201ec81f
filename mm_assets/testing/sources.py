"""What every source promises, as tests: subclass `SourceSuite`, make containers, and the promises are checked."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from mm_assets.errors import ShardError, SourceError
from mm_assets.sources import Member, ShardDamage, Source, index_members
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, escape_name, split_member_name
from mm_assets.storage.files import SourceFile

__all__ = ["SourceSuite"]

Files = Sequence[tuple[str, bytes]]

FILES: Files = (
    ("a.json", b'{"texts": []}'),
    ("a.jpg", bytes(range(256)) * 40),
    ("deep/er/b.state.NPY", b"\x93NUMPY"),
    ("deep/er/b.empty.txt", b""),
    ("none", b"x" * 3000),
)
HOSTILE = (
    "../../up.jpg",
    "/etc/absolute.jpg",
    "a//b.jpg",
    "back\\slash.jpg",
    "seems\\x41escaped.jpg",
    "ü\u202e.jpg",
    "n" * 90,
)
HIDDEN = ("._a.jpg", "deep/.hidden.jpg", "__MACOSX/a.jpg", ".DS_Store")
MAX_BYTES = 1 << 20
MAX_DAMAGED = 60  # containers with a damage that are read, evenly spread over the positions


class SourceSuite(ABC):
    """Tests that every source passes.

    Attributes:
        source: the class of the source.
        files: names and contents; a source of rows, whose members have a key and a suffix, sets others here and below.
        hostile: names that lead out of a folder, or look like escapes.
        hidden: names of files of the system.
    """

    source: ClassVar[type[Source]]
    files: ClassVar[Files] = FILES
    hostile: ClassVar[Sequence[str]] = HOSTILE
    hidden: ClassVar[Sequence[str]] = HIDDEN

    @abstractmethod
    def make(self, files: Files) -> bytes:
        """A container with these files in this order; names may repeat."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Where the containers of a test are written."""
        return tmp_path

    def open(self, folder: Path, content: bytes) -> Source:
        """The source over a file with this content."""
        path = folder / f"shard{self.source.SUFFIXES[0]}"
        path.write_bytes(content)
        return self.source(SourceFile(str(path)))

    def content(self, source: Source, **options: object) -> list[tuple[Member, bytes]]:
        """Every member with its content, in order."""
        found = source.payloads(wanted=lambda _: True, max_bytes=MAX_BYTES, **options)  # type: ignore[arg-type]  # of one test
        return list(found)

    def test_members_are_the_files_in_order(self, folder: Path) -> None:
        """Names, sizes and what a name says are those of the files, in order and numbered from 0."""
        source = self.open(folder, self.make(self.files))
        members = list(source.members())
        assert [(m.member, m.byte_size, m.ordinal) for m in members] == [
            (name, len(content), number) for number, (name, content) in enumerate(self.files)
        ]
        assert [(m.sample_key, m.role, m.extension) for m in members] == [
            split_member_name(name) for name, _ in self.files
        ]
        assert {(m.shard, m.member_type, m.skip_reason) for m in members} == {(source.file.url, "file", None)}
        assert list(source.members()) == members

    def test_payloads_are_the_contents(self, folder: Path) -> None:
        """Every content comes back, with the member that `members` lists; a byte offset leads to the same bytes."""
        source = self.open(folder, self.make(self.files))
        found = self.content(source)
        assert [(m.member, bytes(payload)) for m, payload in found] == list(self.files)
        assert [m for m, _ in found] == list(source.members())
        for member, payload in found:
            if member.byte_offset is not None:
                assert source.file.read(member.byte_offset, member.byte_size) == payload

    def test_only_wanted_members_are_yielded(self, folder: Path) -> None:
        """`wanted` is asked once for each entry, and the others are not yielded."""
        asked: list[str] = []

        def wanted(member: Member) -> bool:
            asked.append(member.member)
            return member.extension == "jpg"

        source = self.open(folder, self.make(self.files))
        assert [m.member for m, _ in source.payloads(wanted=wanted, max_bytes=MAX_BYTES)] == ["a.jpg"]
        assert sorted(asked) == sorted(name for name, _ in self.files)

    def test_a_large_member_is_an_error_of_its_own(self, folder: Path) -> None:
        """A member above the limit raises with its name, or goes to `on_error` and the others are yielded."""
        source = self.open(folder, self.make(self.files))
        with pytest.raises(SourceError) as caught:
            list(source.payloads(wanted=lambda _: True, max_bytes=5000))
        assert caught.value.member == "a.jpg"
        errors: list[str] = []
        found = source.payloads(wanted=lambda _: True, max_bytes=5000, on_error=lambda m, _: errors.append(m.member))
        assert [m.member for m, _ in found] == [name for name, _ in self.files if name != "a.jpg"]
        assert errors == ["a.jpg"]

    def test_the_index_has_its_schema(self, folder: Path) -> None:
        """The members fit the table of the member index."""
        (batch,) = index_members(self.open(folder, self.make(self.files)))
        batch.validate(full=True)
        assert batch.schema.equals(MEMBER_INDEX_SCHEMA)

    def test_an_empty_container_has_no_members(self, folder: Path) -> None:
        """A container without files has neither members nor contents."""
        source = self.open(folder, self.make(()))
        assert list(source.members()) == []
        assert self.content(source) == []

    def test_hostile_names_are_names(self, folder: Path) -> None:
        """Names that lead out of a folder, or look like escapes, are listed as text; equal content comes back."""
        files = [(name, name.encode()) for name in self.hostile]
        source = self.open(folder, self.make(files))
        before = sorted(folder.rglob("*"))
        expected = [(escape_name(name.encode()), payload) for name, payload in files]
        assert [(m.member, bytes(payload)) for m, payload in self.content(source)] == expected
        assert sorted(folder.rglob("*")) == before

    def test_hidden_files_are_listed_and_skipped(self, folder: Path) -> None:
        """Files of the system are members with the reason why they are not part of a sample."""
        source = self.open(folder, self.make([(name, b"x") for name in self.hidden]))
        assert [(m.member, m.skip_reason is None) for m in source.members()] == [(name, False) for name in self.hidden]

    def test_repeated_names_are_all_listed(self, folder: Path) -> None:
        """Two files of one name are two members, each with its own content."""
        files = [("a.txt", b"one"), ("b.txt", b"two"), ("a.txt", b"three")]
        source = self.open(folder, self.make(files))
        assert [(m.member, bytes(payload)) for m, payload in self.content(source)] == files

    def test_other_files_are_not_accepted(self) -> None:
        """The first bytes of no file, a short file and a text are not taken for a container."""
        for head in (b"", b"x", b'{"sample_id": "a"}\n' * 20, bytes(512)):
            assert not self.source.accepts(head)

    def test_the_container_is_accepted(self) -> None:
        """The first bytes of a container are recognized."""
        assert self.source.accepts(self.make(self.files)[:512])

    def test_a_file_without_bytes_is_refused(self, folder: Path) -> None:
        """An empty file is damage at byte 0, and not a container without members."""
        with pytest.raises(ShardError) as caught:
            list(self.open(folder, b"").members())
        assert caught.value.byte_offset == 0

    @pytest.mark.parametrize("kind", ["truncated", "flipped", "extended"])
    def test_damage_raises_or_is_listed(self, folder: Path, kind: str) -> None:
        """A damaged container is read or raises `ShardError`; salvaged, it ends, and what is lost is an entry.

        A file without any byte, in which there is nothing to salvage, may raise then too.
        """
        for content in filter(None, _damaged(self.make(self.files), kind)):
            source = self.open(folder, content)
            failure: ShardError | None = None
            try:
                list(source.members())
            except ShardError as error:
                failure = error
            assert failure is None or failure.byte_offset is not None
            damage: list[ShardDamage] = []
            members = list(source.members(on_damaged_shard="salvage", damage=damage))
            assert [m.ordinal for m in members] == list(range(len(members)))
            assert bool(damage) == (failure is not None)
            lost = [m for m in members if (m.skip_reason or "").startswith("damaged")]
            assert len(lost) == len(damage)
            found = source.payloads(
                wanted=lambda m: m.skip_reason is None,
                max_bytes=MAX_BYTES,
                on_error=lambda *_: None,
                on_damaged_shard="salvage",
            )
            assert all(len(payload) == member.byte_size for member, payload in found)
            source.file.close()


def _damaged(content: bytes, kind: str) -> Iterator[bytes]:
    step = max(len(content) // MAX_DAMAGED, 1)
    noise = random.Random(0)
    for at in range(0, len(content), step):
        if kind == "truncated":
            yield content[:at]
        elif kind == "flipped":
            yield content[:at] + bytes([content[at] ^ noise.randrange(1, 256)]) + content[at + 1 :]
    if kind == "extended":
        yield content + noise.randbytes(1000)
