"""The manifest of a version of a Lance dataset: its fragments, and the files that each consists of.

A manifest is a Protocol Buffers message in a file ``_versions/<number>.manifest``, which ends with the message's place,
the version of the format and ``LANC``. Only what the listing of shards needs is read; nothing in it is trusted.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mm_assets.errors import ShardError

__all__ = ["CLONE_ADVICE", "MAX_MANIFEST_BYTES", "Fragment", "read_fragments", "version_of"]

MAX_MANIFEST_BYTES = 256 << 20  # of a dataset with a million fragments

CLONE_ADVICE = "which are not read: write the whole dataset to one folder, as `deep_clone` does"

_MAGIC = b"LANC"
_TAIL_BYTES = 16  # place of the message, two versions of the format, the magic number
_NAME = re.compile(r"(?:^|/)_versions/(\d{1,20})\.manifest$")
_DESCENDING_DIGITS = 20  # of names that count down from 2**64 - 1, so that the newest version is listed first
_SCHEMA_FIELD, _FRAGMENT = 1, 2  # numbers of fields of the message `Manifest`
_ID, _DATA_FILE, _DELETION_FILE = 1, 2, 3  # of `DataFragment`
_PATH, _BASE = 1, 7  # of `DataFile`; a base is another folder, which this file is in
_TYPE, _READ_VERSION, _DELETION_ID, _DELETION_BASE = 1, 2, 3, 7  # of `DeletionFile`
_DELETION_SUFFIXES = ("arrow", "bin")  # by type: an array of rows, or a bitmap of them


class Fragment(NamedTuple):
    """The rows of one or several data files, which have different columns of them.

    Attributes:
        shard: its first data file, relative to the dataset's folder.
        others: its other data files and its deletion file, likewise.
        digest: of its description and of the schema.
    """

    shard: str
    others: Sequence[str]
    digest: str


def version_of(url: str) -> int | None:
    """Returns the version that a manifest describes by its name; None for any other file."""
    match = _NAME.search(url)
    if match is None:
        return None
    number = int(match[1])
    return 2**64 - 1 - number if len(match[1]) == _DESCENDING_DIGITS else number


def read_fragments(url: str, content: bytes) -> list[Fragment]:
    """Returns the fragments of a version, in order.

    Args:
        url: of the manifest.
        content: its bytes.

    Raises:
        ShardError: it is not a manifest, is damaged, or names files that are not in the dataset's folder.
    """
    if len(content) < _TAIL_BYTES or not content.endswith(_MAGIC):
        detail = (
            f"ends with {content[-4:]!r}, expected the manifest of a Lance dataset: restore it or delete the version"
        )
        raise ShardError(url, detail, byte_offset=0)
    start = int.from_bytes(content[-_TAIL_BYTES : -_TAIL_BYTES + 8], "little")
    try:
        message = _taken(content, start + 4, int.from_bytes(_taken(content, start, 4), "little"))
        schema, described = hashlib.sha256(), list[bytes]()
        for number, value in _fields(message):
            if number == _SCHEMA_FIELD and isinstance(value, bytes):
                schema.update(len(value).to_bytes(8) + value)
            elif number == _FRAGMENT and isinstance(value, bytes):
                described.append(value)
        return [_fragment(one, schema.digest()) for one in described]
    except ValueError as error:
        raise ShardError(url, f"cannot be read as the manifest of a Lance dataset: {error}", byte_offset=0) from error


def _fragment(message: bytes, schema: bytes) -> Fragment:
    number, names, deletions = 0, list[str](), list[str]()
    for field, value in _fields(message):
        if field == _ID and isinstance(value, int):
            number = value
        elif field == _DATA_FILE and isinstance(value, bytes):
            names.append(f"data/{_data_file(value)}")
        elif field == _DELETION_FILE and isinstance(value, bytes):
            deletions.append(_deletion_file(number, value))
    if not names:
        raise ValueError(f"fragment {number} has no data file")
    return Fragment(names[0], [*names[1:], *deletions], hashlib.sha256(schema + message).hexdigest())


def _data_file(message: bytes) -> str:
    name = ""
    for field, value in _fields(message):
        if field == _PATH and isinstance(value, bytes):
            name = value.decode()
        elif field == _BASE:
            raise ValueError(f"its file {name!r} is one of those in other folders, {CLONE_ADVICE}")
    if not name or name != posixpath.basename(name) or name.startswith("."):
        raise ValueError(f"a data file is called {name!r}, expected a name in the folder data")
    return name


def _deletion_file(fragment: int, message: bytes) -> str:
    values = {field: value for field, value in _fields(message) if isinstance(value, int)}
    kind = values.get(_TYPE, 0)
    if _DELETION_BASE in values or kind >= len(_DELETION_SUFFIXES):
        raise ValueError(f"the deletion file of fragment {fragment} is in another folder or of type {kind}")
    name = f"{fragment}-{values.get(_READ_VERSION, 0)}-{values.get(_DELETION_ID, 0)}.{_DELETION_SUFFIXES[kind]}"
    return f"_deletions/{name}"


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and the value of each field of a Protocol Buffers message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"byte {at} of a message has a field of type {kind}, which does not exist")
        yield tag >> 3, _taken(message, at, size)
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns a number of variable size, and the place after it."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(f"the number at byte {at} of a message has no end")


def _taken(content: bytes, at: int, size: int) -> bytes:
    if at + size > len(content):
        raise ValueError(f"{size} bytes from {at} are expected, {len(content)} are there")
    return content[at : at + size]
