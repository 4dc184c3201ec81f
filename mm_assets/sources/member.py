"""What an entry of a shard is called, and what its name says."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

__all__ = ["MEMBER_INDEX_SCHEMA", "Member", "ShardDamage", "hidden_reason", "split_member_name"]


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


MEMBER_INDEX_SCHEMA: pa.Schema = pa.schema(
    [
        _required("shard", pa.string()),
        _required("member", pa.string()),
        pa.field("byte_offset", pa.int64()),
        _required("byte_size", pa.int64()),
        _required("member_type", pa.string()),
        _required("sample_key", pa.string()),
        _required("role", pa.string()),
        _required("extension", pa.string()),
        _required("ordinal", pa.int32()),
        pa.field("skip_reason", pa.string()),
    ]
)
"""One row per archive member; `byte_offset` is null where the shard is compressed or the member sparse."""

_SYSTEM_FILES = {b".DS_Store", b"Thumbs.db", b"desktop.ini", b".directory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One entry of a shard.

    Attributes:
        shard: path or URL of the shard.
        member: name as the archive has it, escaped where it is no UTF-8 (see `tar_header.escape_name`); directories
            without their final slash. Bytes that are no member are called ``bytes A to B of the archive``.
        byte_offset: first byte of the payload in the shard; a hard link has its target's. None where the payload is not
            one range: compressed shards and sparse members.
        byte_size: bytes of the payload, holes of sparse members included.
        member_type: "file", "sparse", "hardlink", "symlink", "directory", "device" or "other".
        sample_key: path up to the first dot of the base name.
        role: what stands between that dot and the extension.
        extension: lower case, without the dot.
        ordinal: place in the shard, from 0.
        skip_reason: why the entry is no part of a sample, or None.
        link_target: name that a link points to, or None.
    """

    shard: str
    member: str
    byte_offset: int | None
    byte_size: int
    member_type: str
    sample_key: str
    role: str
    extension: str
    ordinal: int
    skip_reason: str | None
    link_target: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDamage:
    """A part of a shard that could not be read as an archive.

    Attributes:
        byte_offset: its first byte in the archive.
        byte_size: its bytes, as far as they are known.
        detail: what was found there.
    """

    byte_offset: int
    byte_size: int
    detail: str


def split_member_name(name: str) -> tuple[str, str, str]:
    """Key, role and extension of a member's name.

    The key is the path up to the first dot of the base name, without a leading ``./``; the extension is what follows
    the last dot, in lower case; the role is what stands between. ``a/x.state.npy`` gives ``("a/x", "state", "npy")``,
    ``x.json`` gives ``("x", "", "json")``, and a name without a dot is all key. A base name that starts with a dot
    has an empty base name in its key; the index skips such members as hidden.
    """
    while name.startswith("./"):
        name = name[2:]
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    if dot < 0:
        return name, "", ""
    role, _, extension = name[dot + 1 :].rpartition(".")
    return name[:dot], role, extension.lower()


def hidden_reason(name: bytes) -> str | None:
    """Why a name is none of a sample's, or None."""
    base = name.rsplit(b"/", 1)[-1]
    if base.startswith(b"._") or name.startswith(b"__MACOSX/") or b"/__MACOSX/" in name:
        return "resource fork"
    if base in _SYSTEM_FILES:
        return "system file"
    if base.startswith(b"."):
        return "hidden file"
    return None if base else "no name"
