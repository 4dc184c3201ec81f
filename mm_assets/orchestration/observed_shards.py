"""The asset of the shards, and its observations: one of each partition whose shards are new or changed when registered.

They are stored as loads store events, many in a transaction, and belong to no run.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import dagster as dg

from mm_assets.errors import MmAssetsError, masked_urls
from mm_assets.orchestration.event_log import RunEvents
from mm_assets.orchestration.lineage import copy_schema, shards_asset
from mm_assets.orchestration.partitions import add_partitions, shard_partitions, shards_key
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.shown import failure_of, shown_cause
from mm_assets.orchestration.viewer import viewer_link
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.records import Partition, canonical_json
from mm_assets.pipeline.state.registration import Registration, register
from mm_assets.summaries import bytes_said, counted

__all__ = ["build_shards_asset", "log_skipped", "observe_shards"]

_MAX_BATCH = 200  # observations that are stored in one transaction
_VERSION = "dagster/data_version"


def build_shards_asset(spec: DatasetSpec) -> dg.AssetsDefinition:
    """The shards as an asset that is observed and not made; *Observe* in the UI registers them.

    Of an asset that cannot be observed, Dagster's automation heeds no observation.
    """
    # What is observed has no output where nothing changed.
    described = shards_asset(spec).replace_attributes(skippable=True)

    decorate: Callable[..., dg.AssetsDefinition] = dg.multi_observable_source_asset(
        name=f"{spec.name}__shards",
        specs=[described],
        can_subset=True,
        partitions_def=shard_partitions(spec),
        required_resource_keys={resource_key(spec)},
    )

    def observe(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
        try:
            found = register(open_dataset(context, spec), allow_empty=True)
        except MmAssetsError as error:
            raise failure_of(error) from shown_cause(error)
        log_skipped(context.log, found)
        observe_shards(context.instance, spec, found, add_partitions(context.instance, spec, found.partitions))
        yield from ()  # they are stored

    return decorate(observe)


def _version(fingerprints: Mapping[str, str]) -> str:
    """The data version of the shards of a partition, by the fingerprint of each: it changes when one of them does."""
    return hashlib.sha256(canonical_json(dict(fingerprints))).hexdigest()


def log_skipped(log: logging.Logger, found: Registration) -> None:
    """Warns of the files that are in no partition, the first of them by name."""
    if found.skipped:
        log.warning(masked_urls(f"{counted(len(found.skipped), 'shard')} skipped: {'; '.join(found.skipped[:10])}"))


def observe_shards(
    instance: dg.DagsterInstance, spec: DatasetSpec, found: Registration, added: Iterable[str] = ()
) -> None:
    """Stores an observation of the shards of each new or changed partition, and a copy of the schema.

    Args:
        instance: where it is stored.
        spec: the declaration.
        found: what registration found.
        added: further partitions that are new to the instance: it was unavailable when they were registered.
    """
    copy_schema(spec, has_changed=bool(found.decision or found.added or found.changed))
    due = {*added, *found.added, *found.changed}
    observations = [_observation(spec, partition) for partition in found.partitions if partition.key in due]
    if observations:
        instance.report_runless_asset_event(observations.pop(0))  # it creates the database of events without a run
        events = RunEvents(instance, spec, run_id="", job_name="", step_key=None)
        for start in range(0, len(observations), _MAX_BATCH):
            events.store(observations[start : start + _MAX_BATCH])


def _observation(spec: DatasetSpec, partition: Partition) -> dg.AssetObservation:
    size = sum(shard.size for shard in partition.shards)
    link = viewer_link(spec.name, partition.key)
    return dg.AssetObservation(
        asset_key=shards_key(spec),
        partition=partition.key,
        metadata={
            "size": bytes_said(size),
            "first_shard": dg.MetadataValue.path(masked_urls(partition.shards[0].url)),
            "count/shards": len(partition.shards),
            "bytes/shards": size,
            **({} if link is None else {"viewer": dg.MetadataValue.url(link)}),
        },
        tags={_VERSION: _version(partition.fingerprints)},
    )
