"""Manifests, made and read: which packed files make up one version of a dataset.

A manifest is JSON that came over a disk or a network like any other file: every name and number in it is checked, and
a path in it never leads out of the dataset's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from mm_assets.errors import ConfigError, CorruptError, UnsupportedVersionError
from mm_assets.formats.convert import WRITERS

__all__ = [
    "FORMATS",
    "PACKED_NAME",
    "Manifest",
    "PackedFile",
    "location_below",
    "make_manifest",
    "packed_name",
    "parse_manifest",
]

FORMATS = tuple(extension.removeprefix(".") for extension in WRITERS)
"""The packed formats, as manifests and file names call them."""

PACKED_NAME = re.compile(rf"([A-Za-z0-9._%-]+)\.[0-9a-f]{{8}}\.({'|'.join(FORMATS)})")
"""Matches the names that `packed_name` makes; its first group is the partition's key."""

_VERSION = 1
_FOLDER = "manifests"  # of earlier versions, below the folder that their paths are relative to


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFile:
    """One file of a dataset; what only a manifest knows is None without one.

    Attributes:
        location: path or URL.
        num_samples: samples in it.
        size: bytes.
        sha256: digest of the content, hexadecimal.
        partition: the shard's key.
    """

    location: str
    num_samples: int
    size: int | None = None
    sha256: str | None = None
    partition: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A dataset version.

    Attributes:
        name: path or URL of the manifest.
        dataset: the dataset's name.
        schema: the dataset's schema, as the pipeline decided it.
        files: one packed file per shard, in order.
        formats: the packed formats that each shard has.
    """

    name: str
    dataset: str
    schema: Mapping[str, Any]
    files: tuple[PackedFile, ...]
    formats: tuple[str, ...] = FORMATS


def packed_name(partition: str, *, sha256: str, form: str) -> str:
    """The name of a partition's packed file: no two contents have the same."""
    return f"{partition}.{sha256[:8]}.{form}"


def make_manifest(
    *,
    dataset: str,
    schema: Mapping[str, Any],
    shards: Sequence[Mapping[str, Any]],
    added: Sequence[Mapping[str, Any]],
    losses: Mapping[str, Mapping[str, Mapping[str, Any]]],
    duplicate_ids: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of a manifest.

    Args:
        dataset: the dataset's name.
        schema: the dataset's schema as JSON.
        shards: of each partition its key, its number of samples, how its media were judged, and its packed files by
            format, of all partitions in the same formats.
        added: name, field and config of each stream that was added after packing.
        losses: by stage and reason, how many items of these partitions were lost, and the first of them.
        duplicate_ids: how many sample ids several partitions have, with examples.
    """
    manifest = {
        "version": _VERSION,
        "dataset": dataset,
        "schema": schema,
        "num_samples": sum(shard["num_samples"] for shard in shards),
        "losses": losses,
        "duplicate_ids": duplicate_ids,
        "shards": shards,
    }
    return {**manifest, "added_streams": list(added)} if added else manifest


def parse_manifest(content: bytes, *, name: str, form: str | None = None) -> Manifest:
    """Read a manifest.

    Args:
        content: its bytes.
        name: its path or URL with forward slashes; paths in it are relative to its folder, or to that folder's parent
            where it lies in ``manifests/``.
        form: ``mult`` or ``mstr``, which of a shard's files to take; None takes the first of them that there is.

    Raises:
        ConfigError: the dataset is not packed in that format.
        CorruptError: it is not a manifest, or contradicts itself.
        UnsupportedVersionError: it is of another version.
    """
    try:
        document = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(name, f"is not a manifest: {error}") from error
    if not isinstance(document, dict) or "shards" not in document:
        raise CorruptError(name, "is not a manifest", found=type(document).__name__, expected="an object with shards")
    if document.get("version") != _VERSION:
        raise UnsupportedVersionError(name, "manifest version", found=document.get("version"), expected=_VERSION)
    shards = _typed(document, "shards", list, name, "manifest")
    base = name.rpartition("/")[0]
    if base == _FOLDER or base.endswith("/" + _FOLDER):
        base = base[: -len(_FOLDER)].rstrip("/")
    formats = _formats(shards, name)
    if form is not None and form not in formats:
        detail = f"found {form!r}, but {name} lists only {' and '.join(formats)} files"
        raise ConfigError("arguments", "format", detail)
    form = form or formats[0]
    files = tuple(_file(shard, index, base, name, form) for index, shard in enumerate(shards))
    total = sum(file.num_samples for file in files)
    if document.get("num_samples") != total:
        raise CorruptError(
            name, "num_samples is not the shards' sum", found=document.get("num_samples"), expected=total
        )
    return Manifest(
        name=name,
        dataset=_typed(document, "dataset", str, name, "manifest"),
        schema=_typed(document, "schema", dict, name, "manifest"),
        files=files,
        formats=formats,
    )


def location_below(folder: str, name: str) -> str:
    """Returns the path or URL of a file in a folder. A URL has a ``%`` of the name, as unusual shards give, escaped."""
    return f"{folder}/{quote(name) if folder.startswith(('http://', 'https://')) else name}"


def _formats(shards: Sequence[object], name: str) -> tuple[str, ...]:
    """The packed formats, of which every shard has a file; all where there are no shards."""
    formats = FORMATS
    for index, shard in enumerate(shards):
        files = shard.get("files") if isinstance(shard, dict) else None
        found = tuple(form for form in FORMATS if isinstance(files, dict) and form in files)
        formats = formats if index else found
        if not found or found != formats:
            said = ", ".join(map(str, files)) if isinstance(files, dict) else type(files).__name__
            expected = " and ".join(formats) or " or ".join(FORMATS)
            raise CorruptError(name, f"shards[{index}]: files", found=said or "nothing", expected=expected)
    return formats


def _typed(mapping: Mapping[str, Any], key: str, kind: type, name: str, where: str) -> Any:
    value = mapping.get(key)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        found = "nothing" if key not in mapping else f"{type(value).__name__} {value!r}"[:80]
        raise CorruptError(name, f"{where}: {key}", found=found, expected=f"{kind.__name__}, not negative")
    return value


def _file(shard: object, index: int, base: str, name: str, form: str) -> PackedFile:
    where = f"shards[{index}]"
    if not isinstance(shard, dict):
        raise CorruptError(name, where, found=type(shard).__name__, expected="an object")
    files = _typed(shard, "files", dict, name, where)
    if not isinstance(files.get(form), dict):
        raise CorruptError(name, f"{where}: files", found=", ".join(map(str, files)) or "nothing", expected=form)
    where += f": files.{form}"
    path = _typed(files[form], "path", str, name, where)
    parts = path.split("/")
    if not path or ".." in parts or "" in parts or ":" in parts[0] or "\\" in path or "\0" in path:
        raise CorruptError(name, f"{where}: path", found=repr(path), expected="a path below the dataset's folder")
    return PackedFile(
        location=location_below(base, path) if base or name.startswith("/") else path,
        partition=_typed(shard, "partition", str, name, f"shards[{index}]"),
        num_samples=_typed(shard, "num_samples", int, name, f"shards[{index}]"),
        size=_typed(files[form], "size", int, name, where),
        sha256=_typed(files[form], "sha256", str, name, where),
    )
