"""Modalities that were added to a published dataset: files of their own that manifests name beside the packed ones.

A stream is one modality for the samples of one partition, in ``streams/``. Readers open it together with the packed
file if every partition has it. A partition that is rebuilt with the same sample ids keeps it, and with others lacks it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from mm_assets.dataset.add_stream import Values, write_stream
from mm_assets.dataset.dataset import open as open_dataset
from mm_assets.dataset.manifest import ManifestPartition, file_path
from mm_assets.errors import EncodeError, FormatError, SourceError
from mm_assets.fields import Field
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import DatasetState

__all__ = ["STREAMS", "AddedStreams", "NewStream", "PartitionAdded", "add_to_dataset", "carried_over", "with_streams"]

STREAMS = "streams"  # folder
_READS = 16  # partitions at a time whose ids are compared
_RUN = "run `mm-assets run --dataset {}` first"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedStreams:
    """The added streams of the partitions of a manifest.

    Attributes:
        declared: name, field and config of each; one that not every partition has is not read.
        files: by partition, size and SHA-256 of its file of each stream.
        missing: name of a stream to the partitions that lack it.
    """

    declared: Sequence[Mapping[str, Any]] = ()
    files: Mapping[str, Mapping[str, tuple[int, str]]] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAdded:
    """What adding a stream did to one partition.

    Attributes:
        partition: its key.
        num_samples: samples in it.
        num_present: those that have the new modality.
        added: False if it had the very same stream before.
        file: size and SHA-256 of the stream's file.
        recipe: by which the partition was published.
    """

    partition: str
    num_samples: int
    num_present: int
    added: bool
    file: tuple[int, str]
    recipe: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewStream:
    """A stream to be listed by the next manifest.

    Attributes:
        name: the modality.
        field: how its values are encoded.
        partitions: those that it was added to.
    """

    name: str
    field: Field
    partitions: Sequence[PartitionAdded]


def add_to_dataset(
    dataset: DatasetStore,
    name: str,
    field: Field,
    values: Values,
    *,
    keys: Collection[str] = (),
    ignore_unknown: bool = False,
) -> Iterator[PartitionAdded]:
    """Writes a stream for every published partition, one after the other; the next manifest has to list the files.

    After an interruption it can be started again: it writes equal files.

    Args:
        dataset: the dataset's folder.
        name: the new modality.
        field: how its values are encoded.
        values: by sample id; samples that are not among them do not have the modality.
        keys: the partitions to add to; all that are published by default.
        ignore_unknown: pass over ids that no sample has.

    Yields:
        What was done, as each partition is done.

    Raises:
        SourceError: no partition or not such a partition is published, or a file cannot be read.
        EncodeError: an id belongs to no sample, a value does not fit, or a modality has that name already.
    """
    state = DatasetState(dataset)
    published = dict(sorted(state.published().items()))
    where = dataset.store.url_of("manifest.json")
    for key in sorted(set(keys) - set(published)):
        raise SourceError(where, f"partition {key!r}: {state.fault(key)}: {_RUN.format(dataset.spec.name)}")
    if not published:
        raise SourceError(where, f"no partition is up to date: {_RUN.format(dataset.spec.name)}")
    known = _declared(state).get(name, _declaration(name, field))
    if known != _declaration(name, field) and any(name in entry.streams for entry in state.listed.values()):
        detail = f"stream {name!r} was added with {known['field']} {known['config']}: give the new one another name"
        raise EncodeError(f"{where}: {detail}, or use that field")
    if not ignore_unknown:
        values.check_ids(_sample_ids(dataset, entry) for entry in published.values())
    for key, entry in published.items():
        if keys and key not in keys:
            continue
        sample_ids = _sample_ids(dataset, entry, other_than=name)
        with dataset.store.draft(f"{STREAMS}/{key}.mstr") as draft:
            # No sync here: publishing the draft syncs the file.
            summary = write_stream(draft.path, name, field, values.of(sample_ids), sample_ids, fsync=False)
            draft.name = file_path("stream", key, draft.digest())
        written = draft.result()
        before = state.listed[key].streams.get(name) if key in state.listed else None
        if before is not None and before[1] != written.sha256:
            detail = f"partition {key!r} has a stream {name!r} already, with other values"
            raise EncodeError(f"{where}: {detail}: give the new one another name, or choose other partitions")
        yield PartitionAdded(
            partition=key,
            num_samples=summary.num_samples,
            num_present=summary.num_present[name],
            added=before is None,
            file=(written.size, written.sha256),
            recipe=entry.recipe,
        )


def _sample_ids(dataset: DatasetStore, entry: ManifestPartition, *, other_than: str | None = None) -> list[str]:
    """The ids of a partition, in order; `EncodeError` if its packed file has a modality of the name `other_than`."""
    form, (_, sha256) = next(iter(entry.packed.items()))
    return _read_ids(dataset, file_path(form, entry.key, sha256), other_than=other_than)


def _read_ids(dataset: DatasetStore, name: str, *, other_than: str | None = None) -> list[str]:
    path = dataset.store.url_of(name)
    with open_dataset(path, storage_options=dataset.spec.root_options) as packed:
        if other_than in packed.names:
            raise EncodeError(f"{path}: has a modality {other_than!r} already: give the stream another name")
        return list(packed.sample_ids)


def carried_over(
    state: DatasetState, entries: Mapping[str, ManifestPartition], new: NewStream | None = None
) -> AddedStreams:
    """The streams of the manifest before, of the partitions that still have the same sample ids, and a new one.

    Args:
        state: the dataset as it was listed, with its newest manifest.
        entries: what the next manifest lists.
        new: the stream that it lists in addition.

    Raises:
        SourceError: the storage cannot be read.
    """
    known = _declared(state)
    if new is not None:
        known[new.name] = _declaration(new.name, new.field)
    if not known:
        return AddedStreams()
    sizes = state.dataset.store.sizes(STREAMS)
    before = {
        key: {
            name: file
            for name, file in state.listed[key].streams.items()
            if sizes.get(file_path("stream", key, file[1])) == file[0]
        }
        for key in entries
        if key in state.listed
    }
    with ThreadPoolExecutor(_READS, thread_name_prefix="ids") as pool:
        has_streams = [key for key, streams in before.items() if streams]
        fits = pool.map(lambda key: _have_same_ids(state, entries[key], before[key]), has_streams)
        kept = {key for key, fit in zip(has_streams, fits, strict=True) if fit}
    files = {key: before[key] if key in kept else {} for key in entries}
    if new is not None:
        # It may have taken long: meanwhile `clean` may have deleted a file, or a run rebuilt a partition.
        fitting = [
            one
            for one in new.partitions
            if one.partition in entries
            and sizes.get(file_path("stream", one.partition, one.file[1])) == one.file[0]
            and (one.recipe == entries[one.partition].recipe or _has_ids_of(state, one.file, entries[one.partition]))
        ]
        files |= {one.partition: {**files[one.partition], new.name: one.file} for one in fitting}
    missing = {name: tuple(key for key in entries if name not in files[key]) for name in known}
    return AddedStreams(
        declared=list(known.values()), files=files, missing={name: keys for name, keys in missing.items() if keys}
    )


def _declared(state: DatasetState) -> dict[str, Mapping[str, Any]]:
    return {stream["name"]: stream for stream in (state.manifest or {}).get("added_streams", ())}


def _declaration(name: str, field: Field) -> Mapping[str, Any]:
    # As it is read from a manifest again, which has no tuples.
    return {"name": name, "field": type(field).__name__, "config": json.loads(json.dumps(field.config))}


def _have_same_ids(state: DatasetState, entry: ManifestPartition, streams: Mapping[str, tuple[int, str]]) -> bool:
    """Whether a partition has the samples for which its streams were written; reads both files if it was rebuilt."""
    before = state.listed[entry.key]
    if before.recipe == entry.recipe or any(entry.packed.get(form) == file for form, file in before.packed.items()):
        return True
    return _has_ids_of(state, next(iter(streams.values())), entry)  # the others have the same ids


def _has_ids_of(state: DatasetState, stream: tuple[int, str], entry: ManifestPartition) -> bool:
    """Whether a stream, given as size and SHA-256, has the sample ids of a partition; reads both files."""
    try:
        ids = _read_ids(state.dataset, file_path("stream", entry.key, stream[1]))
        return ids == _sample_ids(state.dataset, entry)
    except FormatError:  # a damaged file is none
        return False


def with_streams(entries: Mapping[str, ManifestPartition], streams: AddedStreams) -> dict[str, ManifestPartition]:
    """What a manifest lists of partitions, with their streams."""
    return {key: replace(entry, streams=streams.files.get(key, {})) for key, entry in entries.items()}
