"""Partitions in Dagster."""

import dagster as dg

from mm_assets.orchestration.partitions import add_partitions, shard_partitions
from mm_assets.pipeline.records import Partition
from mm_assets.pipeline.register import partition_key
from mm_assets.pipeline.spec import DatasetSpec


def test_dagster_takes_the_keys_of_all_names() -> None:
    """Names with what Dagster forbids in a key, or reads as a range, give keys that it takes as they are."""
    spec = DatasetSpec.from_config({"name": "web", "root": "r", "shards": "s"}, where="test")
    names = ["a...b", "....", "a\nb", "a\tb\0", "a|b", "a,b", "[a]", "100%", "é", "x" * 300]
    partitions = [Partition(key=partition_key(name), shards=()) for name in names]
    with dg.DagsterInstance.ephemeral() as instance:
        add_partitions(instance, spec, partitions)
        known = instance.get_dynamic_partitions(shard_partitions(spec).name or "")
    assert sorted(known) == sorted(partition.key for partition in partitions)
    # The rule of Dagster for static partitions; dynamic ones are not checked by this release of it.
    assert dg.StaticPartitionsDefinition(list(known)).get_partition_keys() == list(known)
