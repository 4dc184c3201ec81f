"""The members of containers as they are read, grouped into samples, in arrays: a shard may have a million members."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple

from mm_assets.sources.member import Member

__all__ = ["MemberList", "MemberPlace"]

NOWHERE = -1  # of a member whose content is not one range


class MemberPlace(NamedTuple):
    """One member.

    Attributes:
        number: of the member in its list.
        name: as the container has it.
        file: number of its container.
        ordinal: its place in the container.
        offset: first byte of its content; None where that is not one range.
        size: bytes of its content.
    """

    number: int
    name: str
    file: int
    ordinal: int
    offset: int | None
    size: int


class MemberList:
    """Members in order, and the samples that they make: those of one key in one container.

    Members of a sample usually follow each other; where they do not, the sample grows later.
    """

    def __init__(self) -> None:
        self._names = bytearray()
        self._name_starts = array("q", [0])
        self._offsets = array("q")
        self._sizes = array("q")
        self._ordinals = array("i")
        self._files = array("i")
        self._starts = array("q")  # of each sample, its first member
        self._lengths = array("i")  # and how many follow it there, itself included
        self._later: dict[int, list[int]] = {}  # of a sample, the members that are elsewhere
        self._samples: dict[int, int] = {}  # hash of a key to its sample, of the present container
        self._file = -1
        self._key_sizes = array("i")  # of each sample, bytes of its key at the start of its first member's name

    def __len__(self) -> int:
        """Samples."""
        return len(self._starts)

    @property
    def num_members(self) -> int:
        """Members."""
        return len(self._offsets)

    def begin(self, file: int) -> None:
        """Further members are of another container, whose keys are others."""
        self._file = file
        self._samples.clear()

    def add(self, member: Member, offset: int | None) -> int:
        """Adds a member, whose content is at `offset`; returns its number."""
        number = len(self._offsets)
        self._names += member.member.encode("utf-8", "surrogatepass")
        self._name_starts.append(len(self._names))
        self._offsets.append(NOWHERE if offset is None else offset)
        self._sizes.append(member.byte_size)
        self._ordinals.append(member.ordinal)
        self._files.append(self._file)
        key = hash(member.sample_key)  # keyed with a secret of the process, so that no names can be made to collide
        sample = self._samples.get(key)
        if sample is None:
            self._samples[key] = len(self._starts)
            self._lengths.append(1)
            self._key_sizes.append(len(member.sample_key.encode("utf-8", "surrogatepass")))
            self._starts.append(number)  # last: other threads read samples by how many of these there are
        elif self._starts[sample] + self._lengths[sample] == number:
            self._lengths[sample] += 1
        else:
            self._later.setdefault(sample, []).append(number)
        return number

    def set_offset(self, number: int, offset: int) -> None:
        """Says where the content of a member is."""
        self._offsets[number] = offset

    def member(self, number: int) -> MemberPlace:
        """One member."""
        offset = self._offsets[number]
        return MemberPlace(
            number=number,
            name=self._name(number),
            file=self._files[number],
            ordinal=self._ordinals[number],
            offset=None if offset == NOWHERE else offset,
            size=self._sizes[number],
        )

    def members(self, sample: int, limit: int) -> list[MemberPlace]:
        """The members of a sample in order, `limit` at most."""
        start = self._starts[sample]
        numbers = chain(range(start, start + self._lengths[sample]), self._later.get(sample, ()))
        return [self.member(number) for number in islice(numbers, limit)]

    def count(self, sample: int) -> int:
        """Members of a sample."""
        return self._lengths[sample] + len(self._later.get(sample, ()))

    def keys(self, start: int, stop: int) -> Sequence[str]:
        """The keys of samples."""
        return [self._key(sample) for sample in range(start, stop)]

    def _key(self, sample: int) -> str:
        name = self._name(self._starts[sample])
        while name.startswith("./"):  # which a key lacks
            name = name[2:]
        return name.encode("utf-8", "surrogatepass")[: self._key_sizes[sample]].decode("utf-8", "surrogatepass")

    def _name(self, number: int) -> str:
        start, stop = self._name_starts[number], self._name_starts[number + 1]
        return self._names[start:stop].decode("utf-8", "surrogatepass")
