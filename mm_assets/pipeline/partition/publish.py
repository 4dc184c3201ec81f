"""Publication of a partition: its marker, the last of its files.

A marker is written only when the record of every stage is there, all were made from one another with the current
configuration, and every check passed. It never names a missing file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_assets.errors import ChangedError, SourceError
from mm_assets.pipeline.chain import (
    FILTERED_ROWS,
    MATERIALIZED_ROWS,
    RAW_SHARDS,
    Stage,
    recorded_stages,
)
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.state.added_streams import with_added_streams
from mm_assets.pipeline.state.losses import published_losses
from mm_assets.pipeline.state.records import MARKER_VERSION, StageRecord, canonical_json
from mm_assets.pipeline.state.staleness import stage_fault
from mm_assets.storage.store import Snapshot

__all__ = ["publish"]


def _chain_faults(work: PartitionWork, records: Mapping[Stage, StageRecord]) -> list[str]:
    """The reasons why the records of a partition do not belong together: empty when they do."""
    size = work.dataset.store.size
    faults = (
        stage_fault(stage, work.partition, records, stage.made_with(work.spec, work.schema), size=size)
        for stage in records
    )
    return [fault.said for fault in faults if fault]


def publish(work: PartitionWork) -> Mapping[str, Any]:
    """Writes a partition's marker and returns it.

    Raises:
        SourceError: a stage has not run, a check failed, the partition's files do not belong together, or a table that
            lists losses could not be read.
        ChangedError: another process published the partition meanwhile, with other files.
    """
    dataset, key = work.dataset, work.key
    # Before the records: what another process publishes after this line is noticed.
    before = dataset.store.snapshot(work.marker_name)
    records = {stage: work.record(stage) for stage in recorded_stages(work.spec)}
    assert work.record_file is not None  # the records were read from it
    faults = _chain_faults(work, records)
    if faults:
        where = dataset.store.url_of(work.marker_name)
        raise SourceError(where, f"partition {key!r} is not fit to be published: {'; '.join(faults)}")
    packed = next(record for stage, record in records.items() if stage.packed_format is not None)
    marker: Mapping[str, Any] = {
        "version": MARKER_VERSION,
        "dataset": dataset.spec.name,
        "partition": key,
        "shards": dict(records[RAW_SHARDS].inputs),
        "num_samples": packed.counts["samples"],
        "counts": {
            "members": records[RAW_SHARDS].counts["members"],
            "rows": records[MATERIALIZED_ROWS].counts["rows"],
        },
        "decodable": {
            "mode": dataset.spec.decodable,
            "on_undecodable": dataset.spec.on_undecodable,
            **{name: records[FILTERED_ROWS].counts[name] for name in ("judged", "undecodable")},
        },
        "losses": published_losses(dataset, key, records),
        "files": {name: file.to_json() for record in records.values() for name, file in sorted(record.files.items())},
        "record": work.record_file.to_json(),
    }
    dataset.store.sync([work.record_file.path, *(file.path for r in records.values() for file in r.files.values())])
    with dataset.markers_held(key) as is_held:
        marker = _replace_markers(work, before, marker, is_held=is_held)
    work.clear_failure()
    return marker


def _replace_markers(
    work: PartitionWork, before: Snapshot, marker: Mapping[str, Any], *, is_held: bool
) -> Mapping[str, Any]:
    """Publishes a marker in place of all others of its partition, with their added streams, and returns it."""
    dataset, store, name = work.dataset, work.dataset.store, work.marker_name
    if before.content is not None and is_held and not store.exists(name):
        before = store.snapshot(name)  # a manifest withdrew it meanwhile: this one is of files that are there
    others = _other_markers(work, before)
    marker = with_added_streams(dataset, {**others, name: before.content}, marker)
    store.replace(before, canonical_json(marker, indent=1))
    if before.content is not None and not store.exists(name):  # withdrawn since, without the lock
        detail = f"a manifest withdrew the marker of partition {work.key!r} meanwhile: run it again"
        raise ChangedError(store.url_of(name), detail)
    # After the new one: there is a marker at any time. Without a lock, a manifest that has just copied this
    # one to its withdrawn name may still remove it: that copy is then the only one with the added streams.
    for other in others.keys() - (set() if is_held else {dataset.withdrawn_name(name)}):
        store.delete(other)
    return marker


def _other_markers(work: PartitionWork, published: Snapshot) -> dict[str, bytes]:
    """The markers of a partition that publication replaces by one of another name."""
    dataset, found = work.dataset, {}
    # Those that were listed, and one that another run of the partition has published since.
    for listed in dict.fromkeys([*work.marker_names(), work.marker_name]):
        # A manifest may have withdrawn it meanwhile.
        for name in dict.fromkeys((listed, dataset.withdrawn_name(listed))):
            is_published = name == work.marker_name
            content = published.content if is_published else dataset.store.found_bytes(name)
            if content is not None:
                if not is_published:
                    found[name] = content
                break
    return found
