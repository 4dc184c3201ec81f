"""Members that share a key are one sample, anywhere in the shard; their extensions determine their modality.

Grouping holds the member index of one shard, never a payload. Samples are in the order of their first member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa

from mm_assets.errors import SourceError
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, MODALITY_OF_EXTENSION, Member, plain_name
from mm_assets.storage.urls import before_pattern, without_query

__all__ = [
    "Sample",
    "ShardMembers",
    "id_prefixes",
    "is_metadata",
    "is_pdf_member",
    "is_text",
    "metadata_member",
    "modality_of",
    "shard_labels",
    "split_by_shard",
]


class Sample(NamedTuple):
    """The members of one key.

    Attributes:
        key: what their names have in common.
        shard: path or URL of the shard.
        members: in the order of the shard; no two have one name.
    """

    key: str
    shard: str
    members: tuple[Member, ...]


def modality_of(extension: str, extensions: Mapping[str, str]) -> str:
    """Row modality of a member's extension: by `extensions` first, then by the built-in table, else "binary"."""
    return (extensions and extensions.get(extension)) or MODALITY_OF_EXTENSION.get(extension, "binary")


def is_metadata(member: Member) -> bool:
    """Whether a member is called ``<key>.json``; the first of a sample holds its metadata."""
    return member.extension == "json" and not member.role


def is_text(member: Member, extensions: Mapping[str, str], *, pdf: bool = False) -> bool:
    """Returns whether a member's content is read where rows are made.

    Args:
        member: the member.
        extensions: as for `modality_of`.
        pdf: whether the words of PDFs are read, beside metadata and texts.
    """
    modality = modality_of(member.extension, extensions)
    return is_metadata(member) or modality == "text" or (pdf and is_pdf_member(member, extensions))


def is_pdf_member(member: Member, extensions: Mapping[str, str]) -> bool:
    """Returns whether a member is a PDF by its name, unless `samples.extensions` says what such a name is."""
    return member.extension == "pdf" and "pdf" not in extensions


def metadata_member(members: Iterable[Member]) -> Member | None:
    """The member that holds the sample's metadata: the first called ``<key>.json``."""
    for member in members:
        if member.extension == "json" and not member.role:
            return member
    return None


class ShardMembers:
    """The member index of one shard, grouped.

    Args:
        shard: path or URL of the shard.
        members: its entries in order, also those that are not part of a sample.

    Attributes:
        skipped: entries with a `skip_reason`, in order.
        repeated: members whose name occurred in the shard before.
        by_name: every other member by its name without a leading ``./``.
        samples: in order of their first member.
    """

    def __init__(self, shard: str, members: Iterable[Member]) -> None:
        self.shard = shard
        self.skipped: list[Member] = []
        self.repeated: list[Member] = []
        self.by_name: dict[str, Member] = {}
        groups: dict[str, list[Member]] = {}
        for member in members:
            if member.skip_reason is not None:
                self.skipped.append(member)
                continue
            name = plain_name(member.member)
            if self.by_name.setdefault(name, member) is not member:
                self.repeated.append(member)
                continue
            groups.setdefault(member.sample_key, []).append(member)
        self.samples = [Sample(key, shard, tuple(group)) for key, group in groups.items()]

    def find(self, name: str, beside: str) -> Member | None:
        """The member of a name: as written, or in the folder of the member `beside`."""
        if not name:
            return None
        name = plain_name(name)
        found = self.by_name.get(name)
        if found is not None:
            return found
        folder, slash, _ = plain_name(beside).rpartition("/")
        return self.by_name.get(folder + slash + name) if slash else None


def split_by_shard(batches: Iterable[pa.RecordBatch], shards: Sequence[str]) -> Iterator[ShardMembers]:
    """The member index of each shard, in the order of `shards`; one is held at a time.

    Args:
        batches: of `MEMBER_INDEX_SCHEMA`; the entries of a shard are together, shards in the order of `shards`.
        shards: paths or URLs; one without entries gives an empty index.

    Raises:
        SourceError: the index names another shard, or one out of order.
    """
    waiting = iter(shards)
    current: str | None = None
    held: list[Member] = []
    for batch in batches:
        members = map(Member, *(_shared(batch.column(name)) for name in MEMBER_INDEX_SCHEMA.names))
        for shard, group in groupby(members, key=attrgetter("shard")):
            while shard != current:
                if current is not None:
                    yield ShardMembers(current, held)
                    held = []
                current = next(waiting, None)
                if current is None:
                    raise SourceError(shard, f"is in the member index, expected only {', '.join(shards)}, in order")
            held += group
    if current is not None:
        yield ShardMembers(current, held)
    for shard in waiting:
        yield ShardMembers(shard, [])


def _shared(column: pa.Array) -> list[Any]:
    """The values of a column of which equal texts are one object: a shard may have a million members."""
    if not pa.types.is_string(column.type):
        values: list[Any] = column.to_pylist()
        return values
    encoded = column.dictionary_encode()
    texts = [*encoded.dictionary.to_pylist(), None]
    return [texts[code] for code in encoded.indices.fill_null(len(texts) - 1).to_pylist()]


def shard_labels(shards: Sequence[str]) -> dict[str, str]:
    """A short name for each shard of a group, which no two share.

    It is the base name without suffix, preceded by as many folders as make the shards distinct.
    """
    paths = [shard.rstrip("/").split("/") for shard in shards]
    depth = 1
    while True:
        labels = ["/".join(path[-depth:]) for path in paths]
        labels = [label[: dot if (dot := label.find(".", label.rfind("/") + 2)) > 0 else None] for label in labels]
        if len(set(labels)) == len(set(shards)) or depth > max(map(len, paths), default=0):
            break
        depth += 1
    if len(set(labels)) < len(set(shards)):
        labels = list(shards)  # they differ only in their suffixes
    return dict(zip(shards, labels, strict=True))


def id_prefixes(shards: Mapping[str, Sequence[str]], declared: str) -> dict[str, str]:
    """Returns what the ids of each shard's samples start with where partitions are groups of shards.

    It is the shard's path below the part of `declared` before its first pattern, without suffix. So it does not depend
    on other shards, and is unique, unless shards differ in their suffix alone: then only the first suffix of the format
    is left out.

    Args:
        shards: the shards of a partition by path or URL, each with the suffixes of its format.
        declared: the folder, glob, list or file that the dataset was declared with.
    """
    paths = {url: _path_below(url, declared) for url in shards}
    bare = {url: _without_suffix(paths[url], suffixes) for url, suffixes in shards.items()}
    uses = Counter(bare.values())
    return {
        url: bare[url] if uses[bare[url]] == 1 or paths[url] == bare[url] + suffixes[0] else paths[url]
        for url, suffixes in shards.items()
    }


def _path_below(url: str, declared: str) -> str:
    url, head = without_query(url), before_pattern(declared)
    roots = [head.rstrip("/") + "/"] if declared and head == declared else []  # of a folder; a file is below its own
    found = next((root for root in (*roots, head[: head.rfind("/") + 1]) if root and root in url), None)
    return url.rsplit("/", 1)[-1] if found is None else url[url.index(found) + len(found) :]


def _without_suffix(path: str, suffixes: Sequence[str]) -> str:
    found = next((s for s in sorted(suffixes, key=len, reverse=True) if path.lower().endswith(s)), "")
    return path[: len(path) - len(found)] or path
