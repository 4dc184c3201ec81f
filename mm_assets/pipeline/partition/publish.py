"""Publication of a partition: its record, which names all of its files.

A record is created when every stage has a record, all were made from one another with the current configuration, and
every check passed. It never names a missing file.
"""

from __future__ import annotations

from mm_assets.errors import ChangedError, SchemaMismatchError, SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS, RAW_SHARDS, recorded_stages
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.state.losses import published_losses
from mm_assets.pipeline.state.records import Record
from mm_assets.pipeline.state.staleness import stage_fault

__all__ = ["publish"]


def publish(work: PartitionWork) -> tuple[Record, bool]:
    """Creates the record of a partition, unless another writer was first.

    Returns:
        The record as published, and whether this call created it.

    Raises:
        SourceError: a stage has not run, a check failed, the partition's files do not belong together, a table that
            lists losses cannot be read, or this host was suspended so long that `clean` deleted a file.
        ChangedError: another process deleted the record at this moment.
    """
    dataset, store = work.dataset, work.dataset.store
    record = _record(work)
    files = [file for made in record.stages.values() for file in made.files.values()]
    work.keep_files()
    store.sync(file.path for file in files)
    name = dataset.record_name(record.partition, record.recipe)
    is_first = dataset.create_record(record)
    if is_first:
        try:
            work.keep_files()  # again: the host may have been suspended right before it created the record
        except SourceError:
            store.delete(name)
            raise
    else:
        try:
            first = dataset.record(record.partition, record.recipe)
            if first is not None:
                store.refresh([name])  # it is published again now: `clean` leaves files of the partition for a day
        except SchemaMismatchError:  # damaged: it publishes nothing
            store.delete(name)
            is_first = dataset.create_record(record)
            first = record if is_first else None
        if first is None:
            raise ChangedError(store.url_of(name), "another process deleted it at this moment: run the partition again")
        record = first
    if work.earlier.has_attempt:
        dataset.delete_attempt(work.key)
    return record, is_first


def _record(work: PartitionWork) -> Record:
    dataset, key, size = work.dataset, work.key, work.dataset.store.size
    stages = {stage: work.record(stage) for stage in recorded_stages(work.spec)}
    stale = (
        stage_fault(stage, work.partition, stages, stage.made_with(work.spec, work.schema), size=size)
        for stage in stages
    )
    if faults := [fault.message for fault in stale if fault is not None]:
        where = dataset.store.url_of(dataset.record_name(key, work.recipe))
        raise SourceError(where, f"partition {key!r} is not fit to be published: {'; '.join(faults)}")
    packed = next(record for stage, record in stages.items() if stage.packed_format is not None)
    judged = {name: stages[FILTERED_ROWS].counts[name] for name in ("judged", "undecodable")}
    return Record(
        dataset=dataset.spec.name,
        partition=key,
        recipe=work.recipe,
        shards=dict(stages[RAW_SHARDS].inputs),
        stages=stages,
        num_samples=packed.counts["samples"],
        decodable={"mode": dataset.spec.decodable, "on_undecodable": dataset.spec.on_undecodable, **judged},
        losses=published_losses(dataset, key, stages),
    )
