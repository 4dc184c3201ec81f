"""Manifests: which packed files, streams and tables make up one version of a dataset.

A manifest is one JSON document with a column per fact, which opens several times faster and smaller than an object per
partition. It came over a disk or a network like any other file: every number and name in it is checked. It stores no
paths: they follow from the partition's key and the digest of the content, and so never leave the dataset's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from mm_assets.errors import ConfigError, CorruptError, UnsupportedVersionError
from mm_assets.formats.convert import WRITERS

__all__ = [
    "FILE_DIGITS",
    "FORMATS",
    "PACKED_NAME",
    "WRITER_LIST",
    "Manifest",
    "ManifestPartition",
    "PackedFile",
    "StreamFile",
    "check_partition",
    "file_path",
    "location_below",
    "make_manifest",
    "manifest_partitions",
    "packed_name",
    "parse_manifest",
]

FORMATS = tuple(extension.removeprefix(".") for extension in WRITERS)
"""The packed formats, as manifests and file names call them."""

FILE_DIGITS = 16
"""How many digits of a file's SHA-256 are in its name."""

PACKED_NAME = re.compile(rf"([A-Za-z0-9._%-]+)\.[0-9a-f]{{{FILE_DIGITS}}}\.({'|'.join(FORMATS)})")
"""Matches the names that `packed_name` makes; its first group is the partition's key."""

WRITER_LIST = re.compile(r"writer-(\d{5})-of-(\d{5})\.json", re.ASCII)
"""Matches the file in which a writer of a folder lists its shards; the groups are its rank and the number of ranks."""

_VERSION = 2
_FOLDER = "manifests"  # has the earlier versions, whose files are below its parent
_MAX_COUNT = 2**63  # readers count samples and bytes in int64
_DECODABLE = ("mode", "on_undecodable", "judged", "undecodable")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFile:
    """An MSTR file with one modality that was added to the samples of a packed file.

    Attributes:
        name: the modality.
        location: path or URL.
        size: bytes.
        sha256: digest of the content, hexadecimal.
    """

    name: str
    location: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFile:
    """One file of a dataset; what only a manifest states is None without one.

    Attributes:
        location: path or URL.
        num_samples: samples in it.
        size: bytes.
        sha256: digest of the content, hexadecimal.
        partition: the partition's key.
        streams: files of further modalities of the same samples, sorted by name.
    """

    location: str
    num_samples: int
    size: int | None = None
    sha256: str | None = None
    partition: str | None = None
    streams: tuple[StreamFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A dataset version.

    Attributes:
        name: path or URL of the manifest.
        dataset: the dataset's name.
        schema: the dataset's schema, as the pipeline decided it.
        files: one packed file per partition, in order.
        formats: the packed formats that each partition has.
        recipes: 16 digits per partition that change with everything that determines its files.
        table_digests: by table the 16 digits of each partition's file, joined into one text: at 100,000 partitions a
            list would take four times the memory.
        packed_digests: SHA-256 of each partition's packed file of the first format, whichever format `files` has.
    """

    name: str
    dataset: str
    schema: Mapping[str, Any]
    files: tuple[PackedFile, ...]
    formats: tuple[str, ...] = FORMATS
    recipes: Sequence[str] = ()
    table_digests: Mapping[str, str] = field(default_factory=dict)
    packed_digests: Sequence[str] = ()

    @property
    def folder(self) -> str:
        """Path or URL of the dataset's folder."""
        return _folder_of(self.name) or "."

    def tables(self, name: str) -> list[str]:
        """Returns the paths or URLs of one table's Parquet files, a file per partition, in order.

        Raises:
            ConfigError: there is no such table.
        """
        digests = self.table_digests.get(name)
        if digests is None:
            existing = ", ".join(self.table_digests) or "no tables"
            raise ConfigError("arguments", "name", f"found {name!r}, but {self.name} lists {existing}")
        folder = _folder_of(self.name)
        return [
            _location(folder, file_path(name, file.partition or "", digests[start : start + FILE_DIGITS]))
            for start, file in zip(range(0, len(digests), FILE_DIGITS), self.files, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestPartition:
    """What a manifest states about one partition. A file is its size in bytes and its SHA-256, hexadecimal.

    Attributes:
        key: the partition's key.
        recipe: 16 digits that change with everything that determines its files.
        num_samples: samples in each of its packed files.
        packed: its packed files, by format.
        tables: its Parquet files by table; of the SHA-256 a manifest stores the first 16 digits.
        streams: the files of its added streams, by modality.
        decodable: how its media were validated: `mode`, `on_undecodable`, `judged` and `undecodable`.
        losses: by stage and reason, how many items were lost, and the first of them.
    """

    key: str
    recipe: str
    num_samples: int
    packed: Mapping[str, tuple[int, str]]
    tables: Mapping[str, tuple[int, str]]
    streams: Mapping[str, tuple[int, str]]
    decodable: Mapping[str, Any]
    losses: Mapping[str, Mapping[str, Mapping[str, Any]]]


def packed_name(partition: str, *, sha256: str, form: str) -> str:
    """Returns the name of a partition's packed file: files of different content have different names."""
    return f"{partition}.{sha256[:FILE_DIGITS]}.{form}"


def file_path(kind: str, partition: str, sha256: str) -> str:
    """Returns the path of a data file, relative to the dataset's folder.

    Args:
        kind: ``mult`` or ``mstr`` for a packed file, ``stream`` for an added stream, else the name of a table.
        partition: the partition's key.
        sha256: digest of the content, at least 16 hexadecimal digits.
    """
    if kind in FORMATS:
        return f"packed/{packed_name(partition, sha256=sha256, form=kind)}"
    if kind == "stream":
        return f"streams/{packed_name(partition, sha256=sha256, form='mstr')}"
    return f"{kind}/{packed_name(partition, sha256=sha256, form='parquet')}"


def location_below(folder: str, name: str) -> str:
    """Returns the path or URL of a file in a folder. In a URL a ``%`` of the name is escaped."""
    return f"{folder}/{quote(name) if folder.startswith(('http://', 'https://')) else name}"


def _location(folder: str | None, path: str) -> str:
    return path if folder is None else location_below(folder, path)


def _folder_of(name: str) -> str | None:
    """Returns the dataset's folder, given the location of a manifest; None if it is the working folder."""
    folder = name.rpartition("/")[0]
    if folder == _FOLDER or folder.endswith("/" + _FOLDER):
        folder = folder[: -len(_FOLDER)].rstrip("/")
    return folder if folder or name.startswith("/") else None


# --- writing ----------------------------------------------------------------------------------------------------------


def make_manifest(
    *,
    dataset: str,
    schema: Mapping[str, Any],
    partitions: Sequence[ManifestPartition],
    added: Sequence[Mapping[str, Any]],
    losses: Mapping[str, Mapping[str, Mapping[str, Any]]],
    duplicate_ids: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the content of a manifest.

    Args:
        dataset: the dataset's name.
        schema: the dataset's schema as JSON.
        partitions: in the order of the dataset's samples, all with the same formats and tables.
        added: `name`, `field` and `config` of each stream that was added after packing.
        losses: by stage and reason, how many items of all partitions were lost, and the first of them.
        duplicate_ids: how many sample ids several partitions have, with examples and the partitions that were not
            counted yet; None if none was.
        settings: of the declaration.

    Raises:
        ValueError: partitions differ in their formats or tables.
    """
    columns = _columns(partitions)
    manifest = {
        "version": _VERSION,
        "dataset": dataset,
        "schema": schema,
        "num_samples": sum(columns["num_samples"]),
        "losses": losses,
        "settings": settings,
        "partitions": columns,
    }
    if duplicate_ids is not None:
        manifest["duplicate_ids"] = duplicate_ids
    if added:
        manifest["added_streams"] = list(added)
    return manifest


def _columns(partitions: Sequence[ManifestPartition]) -> dict[str, Any]:
    """Returns the columns of a manifest; raises `ValueError` if partitions differ in their formats or tables."""
    streams = sorted({name for partition in partitions for name in partition.streams})
    return {
        "key": [partition.key for partition in partitions],
        "recipe": [partition.recipe for partition in partitions],
        "num_samples": [partition.num_samples for partition in partitions],
        "packed": _same_files(partitions, [partition.packed for partition in partitions], "formats", None),
        "tables": _same_files(partitions, [partition.tables for partition in partitions], "tables", FILE_DIGITS),
        "streams": {
            name: _file_columns([partition.streams.get(name, (None, None)) for partition in partitions])
            for name in streams
        },
        "decodable": {name: [partition.decodable[name] for partition in partitions] for name in _DECODABLE},
        "losses": {partition.key: partition.losses for partition in partitions if partition.losses},
    }


def check_partition(partition: ManifestPartition, *, name: str) -> None:
    """Raises `CorruptError` unless readers of a manifest would accept a partition, from the file `name`."""
    _check_partitions(name, _columns([partition]))


def _same_files(
    partitions: Sequence[ManifestPartition],
    files: Sequence[Mapping[str, tuple[int, str]]],
    what: str,
    digits: int | None,
) -> dict[str, dict[str, list[Any]]]:
    """Returns the columns of files that every partition has."""
    names = sorted(files[0]) if files else []
    for partition, one in zip(partitions, files, strict=True):
        if sorted(one) != names:
            first = partitions[0].key
            raise ValueError(f"{what}: {partition.key!r} has {sorted(one)}, but {first!r} has {names}")
    return {name: _file_columns([one[name] for one in files], digits) for name in names}


def _file_columns(
    files: Sequence[tuple[int, str] | tuple[None, None]], digits: int | None = None
) -> dict[str, list[Any]]:
    return {
        "size": [size for size, _ in files],
        "sha256": [sha256 and sha256[:digits] for _, sha256 in files],
    }


# --- reading ----------------------------------------------------------------------------------------------------------


def parse_manifest(content: bytes, *, name: str, form: str | None = None) -> Manifest:
    """Reads a manifest.

    Args:
        content: its bytes.
        name: its path or URL with forward slashes; the dataset is its folder, or the parent folder of ``manifests/``.
        form: ``mult`` or ``mstr``, which of a partition's files to take; None takes the first of them that there is.

    Raises:
        ConfigError: the dataset is not packed in that format.
        CorruptError: it is not a manifest, or contradicts itself.
        UnsupportedVersionError: it is of another version.
    """
    try:
        text = content.decode("utf-8")
        del content  # 45 MB at 100,000 partitions, which the caller may have released too
        document = json.loads(text)
        del text
    except (ValueError, RecursionError) as error:
        raise CorruptError(name, f"is not a manifest: {error}") from error
    columns = _validate(document, name)
    formats = tuple(form for form in FORMATS if form in columns["packed"]) or FORMATS
    if form is not None and form not in formats:
        detail = f"found {form!r}, but {name} lists only {' and '.join(formats)} files"
        raise ConfigError("arguments", "format", detail)
    keys, num_samples = columns["key"], columns["num_samples"]
    form, folder = form or formats[0], _folder_of(name)
    packed = columns["packed"].get(form, {"size": [], "sha256": []})
    streams = _streams_of_files(columns, folder)
    files = tuple(
        PackedFile(
            location=_location(folder, file_path(form, key, sha256)),
            num_samples=count,
            size=size,
            sha256=sha256,
            partition=key,
            streams=streams[index] if streams else (),
        )
        for index, (key, count, size, sha256) in enumerate(
            zip(keys, num_samples, packed["size"], packed["sha256"], strict=True)
        )
    )
    return Manifest(
        name=name,
        dataset=document["dataset"],
        schema=document["schema"],
        files=files,
        formats=formats,
        recipes=columns["recipe"],
        table_digests={table: "".join(files["sha256"]) for table, files in sorted(columns["tables"].items())},
        packed_digests=columns["packed"].get(formats[0], {"sha256": []})["sha256"],
    )


def _streams_of_files(columns: Mapping[str, Any], folder: str | None) -> list[tuple[StreamFile, ...]]:
    """Returns the streams of each partition; those that some partition does not have are not read."""
    complete = {name: files for name, files in sorted(columns["streams"].items()) if None not in files["size"]}
    return list(
        zip(
            *(
                [
                    StreamFile(
                        name=name,
                        location=_location(folder, file_path("stream", key, sha256)),
                        size=size,
                        sha256=sha256,
                    )
                    for key, size, sha256 in zip(columns["key"], files["size"], files["sha256"], strict=True)
                ]
                for name, files in complete.items()
            ),
            strict=True,
        )
    )


def manifest_partitions(document: Mapping[str, Any], *, name: str) -> dict[str, ManifestPartition]:
    """Returns the partitions of a manifest by key: what `make_manifest` was given.

    Args:
        document: the manifest, parsed.
        name: its path or URL, for messages.

    Raises:
        CorruptError: it is not a manifest, or contradicts itself.
        UnsupportedVersionError: it is of another version.
    """
    columns = _validate(document, name)
    keys = columns["key"]
    packed, tables, streams = (
        _files_by_partition(columns[kind], len(keys)) for kind in ("packed", "tables", "streams")
    )
    decodable = zip(*(columns["decodable"][fact] for fact in _DECODABLE), strict=True)
    rows = zip(keys, columns["recipe"], columns["num_samples"], packed, tables, streams, decodable, strict=True)
    return {
        key: ManifestPartition(
            key=key,
            recipe=recipe,
            num_samples=num_samples,
            packed=its_packed,
            tables=its_tables,
            streams=its_streams,
            decodable=dict(zip(_DECODABLE, facts, strict=True)),
            losses=columns["losses"].get(key, {}),
        )
        for key, recipe, num_samples, its_packed, its_tables, its_streams, facts in rows
    }


def _files_by_partition(columns: Mapping[str, Any], count: int) -> list[dict[str, tuple[int, str]]]:
    partitions: list[dict[str, tuple[int, str]]] = [{} for _ in range(count)]
    for name, files in columns.items():
        for partition, size, sha256 in zip(partitions, files["size"], files["sha256"], strict=True):
            if sha256 is not None:
                partition[name] = size, sha256
    return partitions


# --- checking ---------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What the items of a column may be; `holds` checks many at once, which takes a tenth of the time of one by one."""

    expected: str
    holds: Callable[[Sequence[Any]], bool]


def _are_all(kind: type, items: Sequence[Any]) -> bool:
    return set(map(type, items)) <= {kind}  # exactly: a bool is not a number


def _are_counts(items: Sequence[Any]) -> bool:
    return not items or (_are_all(int, items) and min(items) >= 0 and max(items) < _MAX_COUNT)


def _are_digests(digits: int, items: Sequence[Any]) -> bool:
    if not _are_all(str, items) or not set(map(len, items)) <= {digits}:
        return False
    return not "".join(items).encode("utf-8", "surrogatepass").translate(None, b"0123456789abcdef")


_IS_FILE_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._%-]+").fullmatch


def _are_file_names(items: Sequence[Any]) -> bool:
    return _are_all(str, items) and all(map(_IS_FILE_NAME, items))


def _or_null(kind: _Kind) -> _Kind:
    def holds(items: Sequence[Any]) -> bool:
        return kind.holds([item for item in items if item is not None])

    return _Kind(f"{kind.expected}, or null", holds)


_COUNT = _Kind("an integer from 0", _are_counts)
_TEXT = _Kind("a text", lambda items: _are_all(str, items))
_KEY = _Kind("a file name of letters, digits and . _ % -", _are_file_names)
_DIGITS = _Kind(f"{FILE_DIGITS} hexadecimal digits", lambda items: _are_digests(FILE_DIGITS, items))
_SHA256 = _Kind("64 hexadecimal digits", lambda items: _are_digests(64, items))
_OBJECT = _Kind("an object", lambda items: _are_all(dict, items))
_LIST = _Kind("a list", lambda items: _are_all(list, items))


def _validate(document: object, name: str) -> Mapping[str, Any]:
    """Returns the columns of a manifest, after a check of the whole document."""
    if not isinstance(document, dict) or type(document.get("version")) is not int:
        raise CorruptError(
            name, "is not a manifest", found=type(document).__name__, expected="an object with a version"
        )
    version = document["version"]
    if version != _VERSION:
        older = "an older mm-assets reads it, and a new `name` or `root` packs the dataset again"
        advice = older if version < _VERSION else "a newer mm-assets reads it"
        raise UnsupportedVersionError(name, f"manifest version: {advice}", found=version, expected=_VERSION)
    for key, kind in (
        ("dataset", _TEXT),
        ("schema", _OBJECT),
        ("num_samples", _COUNT),
        ("losses", _OBJECT),
        ("settings", _OBJECT),
        ("partitions", _OBJECT),
    ):
        _check(name, document, key, kind)
    _check_losses(name, "losses", document["losses"])
    if "duplicate_ids" in document:
        duplicates = _check(name, document, "duplicate_ids", _OBJECT)
        _check(name, duplicates, "count", _COUNT, "duplicate_ids")
        if "uncounted" in duplicates:
            uncounted = _check(name, duplicates, "uncounted", _LIST, "duplicate_ids")
            _check_items(name, "duplicate_ids.uncounted", uncounted, _TEXT)
    if "added_streams" in document:
        added = _check(name, document, "added_streams", _LIST)
        _check_items(name, "added_streams", added, _OBJECT)
        for index, stream in enumerate(added):
            for key, kind in (("name", _TEXT), ("field", _TEXT), ("config", _OBJECT)):
                _check(name, stream, key, kind, f"added_streams[{index}]")
    columns: Mapping[str, Any] = document["partitions"]
    _check_partitions(name, columns)
    total = sum(columns["num_samples"])
    if total != document["num_samples"]:
        detail = "num_samples is not the sum of partitions.num_samples"
        raise CorruptError(name, detail, found=document["num_samples"], expected=total)
    return columns


def _check_partitions(name: str, columns: Mapping[str, Any]) -> None:
    keys = _check(name, columns, "key", _LIST, "partitions")
    count = len(keys)
    for key, kind in (("key", _KEY), ("recipe", _DIGITS), ("num_samples", _COUNT)):
        _check_column(name, columns, key, kind, count, "partitions")
    if len(set(keys)) < count:
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        index = next(index for index, key in enumerate(keys) if first[key] < index)
        raise CorruptError(name, f"partitions.key[{index}]", found=repr(keys[index]), expected="each key once")
    for group, digest in (("packed", _SHA256), ("tables", _DIGITS), ("streams", _SHA256)):
        files = _check(name, columns, group, _OBJECT, "partitions")
        if group == "tables":
            _check_items(name, "partitions.tables", list(files), _KEY)
        for what in files:
            where = f"partitions.{group}.{what}"
            _check(name, files, what, _OBJECT, f"partitions.{group}")
            size, sha256 = (_COUNT, digest) if group != "streams" else (_or_null(_COUNT), _or_null(digest))
            sizes = _check_column(name, files[what], "size", size, count, where)
            digests = _check_column(name, files[what], "sha256", sha256, count, where)
            if group == "streams" and None in sizes + digests:
                for index, pair in enumerate(zip(sizes, digests, strict=True)):
                    if pair.count(None) == 1:
                        raise CorruptError(
                            name, f"{where}.size[{index}]", found=pair[0], expected="null like its sha256"
                        )
    formats = [form for form in columns["packed"] if form in FORMATS]
    if len(formats) < len(columns["packed"]) or (count and not formats):
        found = ", ".join(columns["packed"]) or "nothing"
        raise CorruptError(name, "partitions.packed", found=found, expected=" or ".join(FORMATS))
    decodable = _check(name, columns, "decodable", _OBJECT, "partitions")
    for fact, kind in zip(_DECODABLE, (_TEXT, _TEXT, _COUNT, _COUNT), strict=True):
        _check_column(name, decodable, fact, kind, count, "partitions.decodable")
    losses = _check(name, columns, "losses", _OBJECT, "partitions")
    if unknown := sorted(losses.keys() - set(keys)):
        raise CorruptError(name, "partitions.losses", found=repr(unknown[0]), expected="a key of partitions.key")
    for key in losses:
        _check_losses(name, f"partitions.losses.{key}", _check(name, losses, key, _OBJECT, "partitions.losses"))


def _check_losses(name: str, where: str, losses: Mapping[str, Any]) -> None:
    for stage in losses:
        reasons = _check(name, losses, stage, _OBJECT, where)
        for reason in reasons:
            loss = _check(name, reasons, reason, _OBJECT, f"{where}.{stage}")
            _check(name, loss, "count", _COUNT, f"{where}.{stage}.{reason}")


def _check(name: str, mapping: Mapping[str, Any], key: str, kind: _Kind, where: str = "") -> Any:
    """Returns a value of an object; refuses one that is missing or of another kind."""
    if key not in mapping or not kind.holds([mapping[key]]):
        found = _describe(mapping[key]) if key in mapping else "nothing"
        raise CorruptError(name, f"{where}.{key}".lstrip("."), found=found, expected=kind.expected)
    return mapping[key]


def _check_column(name: str, columns: Mapping[str, Any], key: str, kind: _Kind, count: int, where: str) -> list[Any]:
    """Returns a column; refuses one that has not an item of the kind per partition."""
    column: list[Any] = _check(name, columns, key, _LIST, where)
    if len(column) != count:
        expected = f"{count}, as many as partitions.key"
        raise CorruptError(name, f"{where}.{key}: its items", found=len(column), expected=expected)
    _check_items(name, f"{where}.{key}", column, kind)
    return column


def _check_items(name: str, where: str, items: Sequence[Any], kind: _Kind) -> None:
    if not kind.holds(items):
        index = next(index for index, item in enumerate(items) if not kind.holds([item]))
        raise CorruptError(name, f"{where}[{index}]", found=_describe(items[index]), expected=kind.expected)


def _describe(value: object) -> str:
    if isinstance(value, list | dict):  # whose text may be of any size, and nested too deeply for `repr`
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r}"[:80]
