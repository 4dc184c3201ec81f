"""Modalities added to the MSTR files of a published dataset: kept in the partitions' markers, listed by the manifest.

A packed file never changes. The stream is added to a copy (a clone, where the file system supports it), which is named
by its own digest and is in the marker beside the file that was packed. Stage records and earlier manifests do not
change. A manifest lists the copies only where all its partitions have the same added streams, so that its files are
always alike. While `formats` leaves out MSTR, markers keep the copies set aside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mm_assets.dataset.add_stream import Values, add_stream, encoded
from mm_assets.dataset.manifest import packed_name
from mm_assets.dataset.writer import spec_of
from mm_assets.errors import EncodeError, SchemaMismatchError, SourceError
from mm_assets.fields import Field
from mm_assets.formats import MstrReader, crc32c
from mm_assets.formats.output import splice
from mm_assets.pipeline.chain import PACKED_FOLDER, PUBLISHED
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.markers import Marker
from mm_assets.pipeline.state.records import canonical_json, size_fault
from mm_assets.pipeline.state.staleness import Present
from mm_assets.storage.store import PublishedFile

__all__ = [
    "AddedStreams",
    "PartitionAdded",
    "add_to_dataset",
    "added_streams",
    "carried_over",
    "names_set_aside",
    "set_aside_streams",
]

FORMAT = "mstr"  # the packed format that streams can be added to
_RUN = "run `mm-assets run --dataset {}` first"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedStreams:
    """The added streams of the partitions of one manifest.

    Attributes:
        streams: name, field and config of those that all partitions have; none where they differ.
        files: the file with them, as markers list files, by partition; empty where there are none.
        missing: name of a stream to the partitions that lack or lost it, or that have it with another field or other
            settings than the first.
    """

    streams: tuple[Mapping[str, Any], ...]
    files: Mapping[str, Mapping[str, Any]]
    missing: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAdded:
    """What adding a stream did to one partition.

    Attributes:
        partition: its key.
        num_samples: samples in it.
        num_present: those that have the new modality.
        added: False where it had the very same stream before.
    """

    partition: str
    num_samples: int
    num_present: int
    added: bool


def added_streams(markers: Mapping[str, Marker], sizes: Mapping[str, int]) -> AddedStreams:
    """The added streams that a manifest can list, by the partitions' markers; `sizes` are those of existing files."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    known: set[str] = set()
    for key, marker in markers.items():
        added = marker.added if FORMAT in marker.packed else None  # else they are set aside
        streams: list[Mapping[str, Any]] = added["streams"] if added else []
        known |= {stream["name"] for stream in streams}
        if FORMAT in marker.packed:  # else they are not missing
            known |= set(marker.lost_streams)
        if added and sizes.get(added["file"]["path"]) != added["file"]["size"]:
            streams = []  # the file is gone or truncated: the one without them is still there
        found[key] = {stream["name"]: stream for stream in streams}
    first = next(iter(found.values()), {})
    missing: dict[str, tuple[str, ...]] = {}
    for name in sorted(known):
        without = [key for key, streams in found.items() if name not in streams]
        # Where all have it, those with another field or other settings than the first.
        if without := without or [key for key, streams in found.items() if streams[name] != first[name]]:
            missing[name] = tuple(sorted(without))
    if not first or any(streams != first for streams in found.values()):
        return AddedStreams(streams=(), files={}, missing=missing)
    files = {key: marker.added["file"] for key, marker in markers.items() if marker.added is not None}
    return AddedStreams(streams=tuple(first[name] for name in sorted(first)), files=files, missing=missing)


def set_aside_streams(markers: Iterable[Marker]) -> Mapping[str, tuple[str, ...]]:
    """Added streams that wait for `formats` to name their format again, each with the partitions that have it."""
    found: dict[str, list[str]] = {}
    for marker in markers:
        for name in names_set_aside(marker.added):
            found.setdefault(name, []).append(marker.key)
    return {name: tuple(sorted(keys)) for name, keys in sorted(found.items())}


def names_set_aside(added: Mapping[str, Any] | None) -> list[str]:
    """Names of the streams that a marker has under `added`, where they are set aside."""
    return [stream["name"] for stream in added["streams"]] if added and "of" in added else []


def carried_over(old: Mapping[str, Any] | None, marker: Mapping[str, Any]) -> dict[str, Any]:
    """A new marker with the added streams of one before it, of which there may be several.

    Where the same MSTR file was made again, byte for byte, they are retained. Where none is made, they are set aside
    with the MSTR file that they were added to, until it is made again. Where another was made, they are lost, and the
    new marker lists them.
    """
    kept, old = dict(marker), old or {}
    added, lost = old.get("added"), {*old.get("lost_streams", ()), *kept.pop("lost_streams", ())}
    packed = marker["files"].get(FORMAT)
    of = added.get("of", old["files"].get(FORMAT)) if added else None
    if added and packed is None:
        kept["added"] = {**added, "of": of}
    elif added and of == packed:
        kept["added"] = {name: value for name, value in added.items() if name != "of"}
    elif added:
        lost |= {stream["name"] for stream in added["streams"]}
    if "added" in kept:  # by this marker or by another one
        lost -= {stream["name"] for stream in kept["added"]["streams"]}
    return {**kept, "lost_streams": sorted(lost)} if lost else kept


def with_added_streams(
    dataset: DatasetStore, before: Mapping[str, bytes | None], marker: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A marker with the added streams of those before it, by their names; of the last of them where they differ."""
    for name, content in before.items():
        with suppress(SchemaMismatchError, SourceError):  # a damaged marker does not prevent a good one
            if content is not None:
                marker = carried_over(dataset.marker(name, content), marker)
    return marker


def add_to_dataset(
    dataset: DatasetStore,
    name: str,
    field: Field,
    values: Values,
    *,
    keys: Collection[str] = (),
    ignore_unknown: bool = False,
) -> Iterator[PartitionAdded]:
    """Adds a modality to the MSTR file of every partition that is up to date, one after the other.

    After an interruption it can be started again: a partition that has the very same stream is skipped. The manifest
    has to be made again afterwards.

    Args:
        dataset: the dataset's folder, in the local file system.
        name: the new modality.
        field: how its values are encoded.
        values: by sample id; samples that are not among them do not have the modality.
        keys: the partitions to add to; all that are up to date by default.
        ignore_unknown: pass over ids that no sample has.

    Yields:
        What was done, as each partition is done.

    Raises:
        SourceError: the dataset is in an object store, no partition or not such a partition is up to date, one is not
            packed as MSTR, or a file is not as its marker says.
        EncodeError: an id belongs to no sample, a value does not fit, or a modality has that name already.
    """
    if not dataset.store.is_local:
        detail = "streams can be added in a local file system only: put the column into the shards, or copy the dataset"
        raise SourceError(dataset.store.url, detail)
    present = Present(dataset)
    markers = present.markers(present.current)
    where = dataset.store.url_of(PUBLISHED.name)
    for key in sorted(set(keys) - set(markers)):
        raise SourceError(where, f"partition {key!r}: {present.fault(key)}: {_RUN.format(dataset.spec.name)}")
    if not markers:
        raise SourceError(where, f"no partition is up to date: {_RUN.format(dataset.spec.name)}")
    for key, marker in sorted(markers.items()):
        if FORMAT not in marker["files"]:
            detail = f"partition {key!r} has no MSTR file: add `{FORMAT}` to `formats`, and run it"
            raise SourceError(where, detail)
    if not ignore_unknown:
        values.check_ids(_sample_ids(dataset, key, marker) for key, marker in sorted(markers.items()))
    for key, marker in sorted(markers.items()):
        if keys and key not in keys:
            continue
        yield _add_to_partition(dataset, _Marker(key, present.current[key], marker), name, field, values)


def _sample_ids(dataset: DatasetStore, key: str, marker: Mapping[str, Any]) -> list[str]:
    with MstrReader(_path(dataset, key, marker["files"][FORMAT])) as reader:
        return list(reader.sample_ids)


def _path(dataset: DatasetStore, key: str, file: Mapping[str, Any]) -> Path:
    """Path of a file of a marker; `SourceError` where it is not as the marker says."""
    if fault := size_fault(file["size"], dataset.store.size(file["path"])):
        raise SourceError(dataset.store.url_of(file["path"]), f"{fault}: run partition {key!r} again")
    return Path(dataset.store.path_of(file["path"]))


class _Marker(NamedTuple):
    """The marker of partition `key`: the name of its file, and its content."""

    key: str
    name: str
    content: Mapping[str, Any]


def _add_to_partition(
    dataset: DatasetStore, published: _Marker, name: str, field: Field, values: Values
) -> PartitionAdded:
    key, marker = published.key, published.content
    added = marker.get("added")
    if added and dataset.store.size(added["file"]["path"]) != added["file"]["size"]:
        added = None  # gone or truncated: begin with the file without added streams
    source = _path(dataset, key, added["file"] if added else marker["files"][FORMAT])
    with MstrReader(source) as reader:
        if added and name in reader.names:
            return _had_before(reader, key, name, field, values)
        with ExitStack() as held:
            # The lock of the draft also keeps a run from packing this partition meanwhile.
            with dataset.store.draft(f"{PACKED_FOLDER}/{key}.{FORMAT}") as draft:
                with source.open("rb") as old, draft.path.open("wb") as new:
                    splice(old, new, marker["files"][FORMAT]["size"] if not added else added["file"]["size"])
                # No sync here: publishing the draft syncs the whole file.
                summary = add_stream(draft.path, name, field, values.of(reader.sample_ids), fsync=False)
                draft.name = f"{PACKED_FOLDER}/{packed_name(key, sha256=draft.digest(), form=FORMAT)}"
                # From here to the marker the file belongs to nothing: `clean` waits.
                held.enter_context(dataset.markers_held(key))
            stream = {"name": name, "field": type(field).__name__, "config": field.config}
            _write_marker(dataset, published, draft.result(), [*(added["streams"] if added else []), stream])
    return PartitionAdded(
        partition=key, num_samples=summary.num_samples, num_present=summary.num_present[name], added=True
    )


def _write_marker(
    dataset: DatasetStore, published: _Marker, file: PublishedFile, streams: list[dict[str, Any]]
) -> None:
    before = dataset.store.snapshot(published.name)
    if dataset.marker_in(before) != published.content:
        detail = f"partition {published.key!r} was published again while a stream was added to it: add it again"
        raise SourceError(dataset.store.url_of(published.name), detail)
    changed = {**published.content, "added": {"file": file.to_json(), "streams": streams}}
    lost = set(changed.pop("lost_streams", ())) - {stream["name"] for stream in streams}
    if lost:
        changed["lost_streams"] = sorted(lost)
    dataset.store.replace(before, canonical_json(changed, indent=1))


def _had_before(reader: MstrReader, key: str, name: str, field: Field, values: Values) -> PartitionAdded:
    """A partition that has a stream of that name: fine if it is the same to the byte, else an `EncodeError`."""
    spec = spec_of(name, field)
    same = reader.modalities[reader.names.index(name)] == spec
    if same:
        checksums, present = reader.checksums(name), reader.presence(name)
        payloads = encoded(reader.path, name, field, values.of(reader.sample_ids))
        for payload, checksum, there in zip(payloads, checksums.tolist(), present.tolist(), strict=True):
            if (payload is not None) != there or (payload is not None and crc32c(*payload) != checksum):
                same = False
                break
    if not same:
        detail = f"partition {key!r} has a stream {name!r} already, with another field or other values"
        raise EncodeError(f"{reader.path}: {detail}: give the new one another name, or choose other partitions")
    count = int(reader.presence(name).sum())
    return PartitionAdded(partition=key, num_samples=len(reader), num_present=count, added=False)
