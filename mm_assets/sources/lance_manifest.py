"""The manifest of a version of a Lance dataset: its fragments, and the files that each consists of.

A manifest is a Protocol Buffers message in a file ``_versions/<number>.manifest``, which ends with the message's place,
the version of the format and ``LANC``. Only what the listing of shards needs is read; nothing in it is trusted.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Sequence
from typing import NamedTuple

from mm_assets.errors import ShardError
from mm_assets.sources.protobuf import read_fields

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
    """Rows whose columns are in one or several data files.

    Attributes:
        shard: its first data file, relative to the dataset's folder.
        others: its other data files and its deletion file, also relative to the dataset's folder.
        digest: SHA-256 of its description and of the schema.
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
        message = _slice(content, start + 4, int.from_bytes(_slice(content, start, 4), "little"))
        schema, fragments = hashlib.sha256(), list[memoryview]()
        for number, value in read_fields(message):
            if number == _SCHEMA_FIELD and isinstance(value, memoryview):
                schema.update(len(value).to_bytes(8))
                schema.update(value)
            elif number == _FRAGMENT and isinstance(value, memoryview):
                fragments.append(value)
        return [_fragment(fragment, schema.digest()) for fragment in fragments]
    except ValueError as error:
        raise ShardError(url, f"cannot be read as the manifest of a Lance dataset: {error}", byte_offset=0) from error


def _fragment(message: memoryview, schema: bytes) -> Fragment:
    number, names, deletions = 0, list[str](), list[str]()
    for field, value in read_fields(message):
        if field == _ID and isinstance(value, int):
            number = value
        elif field == _DATA_FILE and isinstance(value, memoryview):
            names.append(f"data/{_data_file(value)}")
        elif field == _DELETION_FILE and isinstance(value, memoryview):
            deletions.append(_deletion_file(number, value))
    if not names:
        raise ValueError(f"fragment {number} has no data file")
    return Fragment(names[0], [*names[1:], *deletions], hashlib.sha256(schema + bytes(message)).hexdigest())


def _data_file(message: memoryview) -> str:
    name = ""
    for field, value in read_fields(message):
        if field == _PATH and isinstance(value, memoryview):
            name = str(value, "utf-8")
        elif field == _BASE:
            raise ValueError(f"it has files in other folders, such as {name!r}, {CLONE_ADVICE}")
    if not name or name != posixpath.basename(name) or name.startswith("."):
        raise ValueError(f"a data file is called {name!r}, expected a name in the folder data")
    return name


def _deletion_file(fragment: int, message: memoryview) -> str:
    values = {field: value for field, value in read_fields(message) if isinstance(value, int)}
    kind = values.get(_TYPE, 0)
    if _DELETION_BASE in values or kind >= len(_DELETION_SUFFIXES):
        raise ValueError(f"the deletion file of fragment {fragment} is in another folder or of type {kind}")
    name = f"{fragment}-{values.get(_READ_VERSION, 0)}-{values.get(_DELETION_ID, 0)}.{_DELETION_SUFFIXES[kind]}"
    return f"_deletions/{name}"


def _slice(content: bytes, at: int, size: int) -> memoryview:
    if at + size > len(content):
        raise ValueError(f"it has {len(content)} bytes, expected {size} from byte {at} on")
    return memoryview(content)[at : at + size]
