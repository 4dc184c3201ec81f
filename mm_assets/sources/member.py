"""An entry of a container: its name, its place, and the key, role and extension in its name.

Names are only text: they are never used as paths of a file system.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pyarrow as pa

__all__ = [
    "MEMBER_INDEX_SCHEMA",
    "MODALITY_OF_EXTENSION",
    "NUMBERED",
    "Member",
    "OnDamage",
    "ShardDamage",
    "compression_of_name",
    "escape_name",
    "escape_part",
    "is_numbered",
    "name_parts",
    "named_member",
    "plain_name",
    "required",
    "role_matches",
    "skipped_bytes",
    "split_member_name",
    "with_roles",
]

NUMBERED = "#"  # a role pattern: any whole number, as in x.0.png; ``left.#`` matches x.left.0.png

OnDamage = Literal["fail", "salvage"]
"""Damage of a container: "fail" raises, "salvage" lists the damaged bytes as an entry and continues after them."""


def required(name: str, kind: pa.DataType) -> pa.Field:
    """A column without nulls."""
    return pa.field(name, kind, nullable=False)


MEMBER_INDEX_SCHEMA: pa.Schema = pa.schema(
    [
        required("shard", pa.string()),
        required("member", pa.string()),
        pa.field("byte_offset", pa.int64()),
        required("byte_size", pa.int64()),
        required("member_type", pa.string()),
        required("sample_key", pa.string()),
        required("role", pa.string()),
        required("extension", pa.string()),
        required("ordinal", pa.int32()),
        pa.field("skip_reason", pa.string()),
    ]
)
"""One row per entry of a shard; `byte_offset` is null where the content is not one range of the shard."""


def _table(**extensions: str) -> dict[str, str]:
    return {extension: modality for modality, names in extensions.items() for extension in names.split()}


MODALITY_OF_EXTENSION: Mapping[str, str] = _table(
    image="jpg jpeg jpe jfif mpo png gif webp bmp tif tiff jp2 j2k avif heic heif jxl ppm pgm pbm pnm ico tga",
    text="txt caption cls csv json yaml yml srt vtt",
    audio=(
        "wav rf64 w64 flac mp3 mp2 ogg oga opus spx m4a m4b aac ac3 eac3 ec3 amr wma mka weba wv aif aiff aifc au snd "
        "caf"
    ),
    video="mp4 m4v mov webm mkv avi ogv mpg mpeg vob ts mts m2ts flv asf wmv 3gp 3g2",
    array="npy",
    midi="mid midi",
)
"""Row modality of each extension in lower case; any other is "binary"."""

_SKIPPED_TYPES = {"directory": "directory", "symlink": "symbolic link", "device": "device", "other": "unknown type"}
_DIGITS = re.compile(r"[0-9]+")
_LOOKS_ESCAPED = re.compile(r"\\(?:\\|x[0-9a-f]{2})")
_COMPRESSIONS = frozenset({"gz", "bz2", "xz", "zst"})
_DOT, _BACKSLASH = b".\\"  # numbers, which bytes are searched for faster than for bytes
_SYSTEM_FILES = {b".DS_Store", b"Thumbs.db", b"desktop.ini", b".directory"}


class Member(NamedTuple):
    """One entry of a shard: the columns of `MEMBER_INDEX_SCHEMA`, and `link_target`.

    Attributes:
        shard: path or URL of the shard.
        member: name as the container has it, escaped where it is not UTF-8 (see `escape_name`); directories without
            their final slash. Bytes that are not a member are called ``bytes A to B of the archive``.
        byte_offset: first byte of the content in the shard; a hard link has its target's. None where the content is
            not one range of the shard: compressed shards or members, and sparse members.
        byte_size: bytes of the content, holes of sparse members included.
        member_type: "file", "sparse", "hardlink", "symlink", "directory", "device" or "other".
        sample_key: path up to the first dot of the base name, unless `samples.roles` is set (see `split_member_name`).
        role: the part between the key and the extension.
        extension: lower case, without the dot; that inside of a compressed member (see `split_member_name`).
        ordinal: place in the shard, from 0.
        skip_reason: why the entry is not part of a sample, or None.
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
    """A part of a shard that could not be read as a container.

    Attributes:
        byte_offset: its first byte in the archive.
        byte_size: its bytes, as far as they are known.
        detail: what was found there.
    """

    byte_offset: int
    byte_size: int
    detail: str


def plain_name(name: str) -> str:
    """A member's name without a leading ``./``."""
    while name.startswith("./"):
        name = name[2:]
    return name


def is_numbered(pattern: str) -> bool:
    """Returns whether a role pattern is `NUMBERED`, alone or as the last of several parts."""
    return pattern == NUMBERED or pattern.endswith("." + NUMBERED)


def role_matches(role: str, pattern: str) -> bool:
    """Whether a role is one of a pattern: ``*``, ``?`` and ``[abc]``, or `NUMBERED`, also as its last part."""
    if is_numbered(pattern):
        role, _, number = role.rpartition(".")
        return bool(_DIGITS.fullmatch(number)) and fnmatch.fnmatchcase(role, pattern[:-2])
    return fnmatch.fnmatchcase(role, pattern)


def split_member_name(name: str, roles: Sequence[str] | None = None) -> tuple[str, str, str]:
    """Key, role and extension of a member's name.

    The key is the path up to the first dot of the base name, without a leading ``./``; the extension is what follows
    the last dot, in lower case; the role is the part between them. ``a/x.state.npy`` gives ``("a/x", "state", "npy")``,
    ``x.json`` gives ``("x", "", "json")``, and a name without a dot is all key. The extension of a compression that is
    opened is left out: ``x.json.gz`` is as ``x.json`` (see `compression_of_name`). A base name that starts with a dot
    has an empty base name in its key; the index skips such members as hidden.

    With `roles`, patterns as of `role_matches`, the key ends at the last dot instead, or before the longest run of
    parts directly in front of it that each match one of them. With ``["rgb"]``, ``x.2023.05.rgb.jpg`` gives
    ``("x.2023.05", "rgb", "jpg")``; with ``[]`` it gives ``("x.2023.05.rgb", "", "jpg")``.
    """
    name = plain_name(name)
    dot = name.find(".", name.rfind("/") + 1)
    if dot < 0:
        return name, "", ""
    role, inner_dot, extension = name[dot + 1 :].rpartition(".")
    extension = extension.lower()
    if extension in _COMPRESSIONS and compression_of_name(name) is not None:
        role, inner_dot, extension = role.rpartition(".")
        extension = extension.lower()
    if roles is None:
        return name[:dot], role, extension
    between = role.split(".") if inner_dot else []
    number = len(between)
    while number and any(role_matches(between[number - 1], pattern) for pattern in roles):
        number -= 1
    return ".".join([name[:dot], *between[:number]]), ".".join(between[number:]), extension


def compression_of_name(name: str) -> str | None:
    """The last extension of a compressed member whose content is opened; None for any other name.

    The base name has at least a key, an extension of the table of modalities, and that of a compression.
    """
    compression = name[name.rfind(".") + 1 :]
    if compression.lower() not in _COMPRESSIONS:
        return None
    head = name[: -1 - len(compression)]
    base = head.rpartition("/")[2]
    key, dot, _ = base.partition(".")
    if not dot or not key:
        return None
    return compression if base.rpartition(".")[2].lower() in MODALITY_OF_EXTENSION else None


def named_member(
    shard: str,
    name: bytes,
    *,
    ordinal: int,
    byte_size: int,
    byte_offset: int | None = None,
    member_type: str = "file",
    skip_reason: str | None = None,
    link_target: bytes | None = None,
) -> Member:
    """An entry with the key, role and extension that its name gives, skipped where its type or its name says so.

    Arguments are as the attributes of `Member`; `skip_reason` applies unless the type or name is the reason.
    """
    if member_type == "directory":
        name = name.rstrip(b"/") or name
    text, key, role, extension, hidden = name_parts(name)
    if member_type == "directory":
        key, role, extension = "", "", ""
    skip_reason = _SKIPPED_TYPES.get(member_type) or hidden or skip_reason
    target = None if link_target is None else escape_name(link_target)
    # By position: a shard may have a million members.
    return Member(shard, text, byte_offset, byte_size, member_type, key, role, extension, ordinal, skip_reason, target)


def name_parts(name: bytes) -> tuple[str, str, str, str, str | None]:
    """A file's name as text, its key, role and extension, and why it is not part of a sample, or None."""
    text = escape_name(name)
    return text, *split_member_name(text), _hidden_reason(name)


def with_roles(member: Member, roles: Sequence[str] | None) -> Member:
    """A member as its name is split with these roles (see `split_member_name`); None: as it is."""
    if roles is None or not member.sample_key:  # of a directory, and of bytes between members
        return member
    key, role, extension = split_member_name(member.member, roles)
    return member._replace(sample_key=key, role=role, extension=extension)


def skipped_bytes(shard: str, start: int, end: int, *, ordinal: int, reason: str, ranged: bool = True) -> Member:
    """An entry for bytes that are not a member.

    Args:
        shard: path or URL of the shard.
        start: their first byte.
        end: the byte after them.
        ordinal: place in the shard, from 0.
        reason: why they are skipped: ``damaged: ...`` where the container cannot be read there.
        ranged: positions are those of the shard, and not of its decompressed bytes.
    """
    return Member(
        shard=shard,
        member=f"bytes {start} to {end} of the archive",
        byte_offset=start if ranged else None,
        byte_size=end - start,
        member_type="other",
        sample_key="",
        role="",
        extension="",
        ordinal=ordinal,
        skip_reason=reason,
    )


def _hidden_reason(name: bytes) -> str | None:
    """Why a name is not part of a sample, or None."""
    base = name[name.rfind(b"/") + 1 :]
    # `find`, since `in` first takes the left side for a number, and builds the message of an error when it is none.
    if base.startswith(b"._") or (name.find(b"__MACOSX/") >= 0 and b"/__MACOSX/" in b"/" + name):
        return "resource fork"
    if base in _SYSTEM_FILES:
        return "system file"
    if not base:
        return "no name"
    return "hidden file" if base[0] == _DOT else None


def escape_name(raw: bytes) -> str:
    r"""A member's name as text that Arrow, JSON and SQL can hold, and no two names as one.

    Names in UTF-8 without NUL stay as they are. In any other, each byte that is not UTF-8, and NUL, becomes ``\xNN``
    and each backslash becomes two; so do the backslashes of the few UTF-8 names that already look like such an escape.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="surrogateescape")
    else:
        if 0 not in raw and (_BACKSLASH not in raw or not _LOOKS_ESCAPED.search(text)):
            return text
    parts = []
    for char in text:
        code = ord(char)
        if 0xDC80 <= code <= 0xDCFF:
            parts.append(f"\\x{code - 0xDC00:02x}")
        elif char == "\0":
            parts.append("\\x00")
        else:
            parts.append("\\\\" if char == "\\" else char)
    return "".join(parts)


def escape_part(name: str) -> str:
    """Returns a name as one part of a member's name, whose parts end at dots and slashes."""
    return name.replace("%", "%25").replace(".", "%2E").replace("/", "%2F") or "%"
