"""A source: a container format whose members become rows. One module per format, one line each in `SOURCES`.

A source knows members and bytes, not rows. For any content of a file, listing its members ends: it yields them or
raises `ShardError` with the byte offset. Every entry of the container is listed, also directories, links and bytes
that are not a member; `Member.skip_reason` says why an entry is not part of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from operator import itemgetter
from typing import ClassVar, Protocol, TypeVar

import pyarrow as pa

from mm_assets.errors import ShardError, SourceError
from mm_assets.sources.arrow import ArrowSource
from mm_assets.sources.energon import EnergonSource
from mm_assets.sources.folder import FolderSource
from mm_assets.sources.hdf5 import HDF5Source
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.lance import LanceSource
from mm_assets.sources.lerobot import LeRobotSource
from mm_assets.sources.litdata import LitDataSource
from mm_assets.sources.mcap import McapSource
from mm_assets.sources.mds import MdsSource
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, Member, OnDamage, ShardDamage, with_roles
from mm_assets.sources.parquet import ParquetSource
from mm_assets.sources.tar import TarSource
from mm_assets.sources.zip import ZipSource
from mm_assets.storage.files import SourceFile

__all__ = [
    "MAX_SUFFIXES_IN_MESSAGE",
    "SOURCES",
    "Source",
    "detect",
    "index_members",
    "missing_end",
    "open_container",
    "text_encoding",
]

MAX_SUFFIXES_IN_MESSAGE = 10  # of a format
BATCH_MEMBERS = 16 << 10  # rows of one index batch: a few megabytes


class Source(Protocol):
    """One file read as a container.

    A member with a `byte_offset` is read by its range of the file; every other comes from `payloads`. A source whose
    format marks the end of a container may have an attribute `missing_end`, and one whose texts are all in one encoding
    an attribute `text_encoding` (see the functions of these names). A format that its first bytes do not show for
    sure may have a class method ``confirms(file)``, which is asked too.

    A format whose dataset is a folder with files that describe it has two class attributes, which the listing of shards
    asks (see `mm_assets.storage.listing.FolderFormat`). It reads the files beside its own by `SourceFile.beside`.

    Args:
        file: the file, which stays open and belongs to the caller.

    Attributes:
        SUFFIXES: ends of the names of such files, in lower case; a folder of shards is searched for them.
        file: the file.
    """

    SUFFIXES: ClassVar[tuple[str, ...]]

    def __init__(self, file: SourceFile) -> None: ...

    @property
    def file(self) -> SourceFile:
        """The file."""

    @property
    def seekable(self) -> bool:
        """Whether `payloads` passes over members that are not wanted without reading them.

        Raises:
            ShardError: the file is not a container of this format.
        """

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether a file that starts with `head` is a container of this format; asked before any name."""

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Every entry in order, with ordinals from 0.

        Args:
            on_damaged_shard: "fail" raises at damage; "salvage" lists the damaged bytes as an entry of type "other",
                whose `skip_reason` starts with ``damaged:``, and continues after them.
            damage: takes what was damaged, when salvaging.

        Raises:
            ShardError: the container is damaged, with the byte offset.
            SourceError: the storage failed.
        """

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """The content of chosen members, in one pass over the file.

        Args:
            wanted: asked once for each entry; those without content are never yielded.
            max_bytes: a larger member is an error of that member.
            on_error: takes the error of a member, and the pass continues; None raises it.
            on_damaged_shard: as for `members`.
            damage: takes what was damaged, when salvaging.

        Raises:
            ShardError: the container is damaged.
            SourceError: a member cannot be read and `on_error` is None, or the storage failed.
        """


SOURCES: Mapping[str, type[Source]] = {
    "tar": TarSource,
    "energon": EnergonSource,
    "zip": ZipSource,
    "lerobot": LeRobotSource,
    "parquet": ParquetSource,
    "arrow": ArrowSource,
    "lance": LanceSource,
    "hdf5": HDF5Source,
    "mcap": McapSource,
    "mds": MdsSource,
    "litdata": LitDataSource,
    "folder": FolderSource,
}
"""Every built-in format of container by its name in a declaration; the first that accepts a file reads it."""


class _Format(Protocol):
    SUFFIXES: ClassVar[tuple[str, ...]]

    @classmethod
    def accepts(cls, head: bytes) -> bool: ...


_F = TypeVar("_F", bound=_Format)


def detect(file: SourceFile, formats: Mapping[str, type[_F]], *, confirm: bool = True) -> type[_F]:
    """Returns the format of a file: the first that accepts its first bytes, else the first whose suffix its name has.

    If several accept it, a format whose suffix it has comes first: the bytes of compressed shards are alike. For a file
    that others describe, a format whose dataset is a folder comes before all others. Without `confirm` the last of
    several, which is the most general, is not asked to confirm.

    Raises:
        ShardError: neither its bytes nor its name show a format.
        SourceError: the storage failed.
    """
    head = file.read(0, min(HEAD_BYTES, file.size))
    accepted = [each for each in formats.values() if each.accepts(head)]
    named = [each for each in formats.values() if file.url.lower().endswith(each.SUFFIXES)]
    accepted.sort(key=lambda each: (not (file.is_described and hasattr(each, "MARKS")), each not in named))
    for candidates in (accepted, named):
        for number, candidate in enumerate(candidates):
            if (not confirm and number == len(candidates) - 1) or _confirms(candidate, file):
                return candidate
    expected = "; ".join(
        f"{name} ({', '.join(each.SUFFIXES[:MAX_SUFFIXES_IN_MESSAGE])})" for name, each in formats.items()
    )
    foreign = foreign_file(head)
    if foreign is not None:
        raise ShardError(file.url, f"{foreign.as_not('a shard')}; expected {expected}", byte_offset=0)
    detail = f"starts with {head[:8]!r}, and neither that nor its name is of a known source, expected {expected}"
    raise ShardError(file.url, detail, byte_offset=0)


def _confirms(candidate: type[_Format], file: SourceFile) -> bool:
    confirms: Callable[[SourceFile], bool] | None = getattr(candidate, "confirms", None)
    return confirms is None or confirms(file)


def missing_end(source: Source) -> str | None:
    """Returns what is missing at the end of a container, once its members were listed; None if nothing, or unknown."""
    reason: str | None = getattr(source, "missing_end", None)
    return reason


def text_encoding(source: Source, declared: str) -> str:
    """Returns the encoding of the texts of a container: as declared, else as its format says, else ``auto``."""
    return getattr(source, "text_encoding", declared) if declared == "auto" else declared


def open_container(file: SourceFile) -> Source:
    """Opens a file as the container that it is; a list that holds media is one.

    Raises:
        ShardError: it is not a container of a known format.
        SourceError: the storage failed.
    """
    return detect(file, SOURCES, confirm=False)(file)


def index_members(
    source: Source,
    *,
    on_damaged_shard: OnDamage = "fail",
    damage: list[ShardDamage] | None = None,
    until: Callable[[Member], bool] | None = None,
    roles: Sequence[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The member index of a shard in batches of `MEMBER_INDEX_SCHEMA`; payloads are not read.

    Args:
        source: the shard.
        on_damaged_shard: as for `Source.members`.
        damage: takes what was damaged, when salvaging.
        until: ends the index before the first entry of which it is true; what follows is not read.
        roles: the setting `samples.roles`; None leaves keys and roles as the source gives them.

    Raises:
        ShardError: the shard is damaged; with the byte offset.
        SourceError: the storage failed.
    """
    members = iter(source.members(on_damaged_shard=on_damaged_shard, damage=damage))  # of a user: any iterable
    if roles is not None:
        members = (with_roles(member, roles) for member in members)
    if until is not None:
        members = takewhile(lambda member: not until(member), members)
    while batch := list(islice(members, BATCH_MEMBERS)):
        # The attributes of a member are in the order of the columns.
        arrays = [pa.array(list(map(itemgetter(n), batch)), f.type) for n, f in enumerate(MEMBER_INDEX_SCHEMA)]
        yield pa.RecordBatch.from_arrays(arrays, schema=MEMBER_INDEX_SCHEMA)
