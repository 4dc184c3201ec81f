"""The partitions of a dataset in Dagster's database."""

import sqlite3
from pathlib import Path
from typing import Any

import dagster as dg
from sqlalchemy import event
from sqlalchemy.engine import Engine

from mm_assets.orchestration.partitions import add_partitions, shard_partitions
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.records import Partition
from mm_assets.pipeline.state.registration import partition_key


def test_two_commands_may_add_partitions_at_once(tmp_path: Path) -> None:
    """Keys that another process adds between Dagster's query and its insertion do not fail, and none is left out."""
    spec = DatasetSpec.from_config({"name": "d", "shards": "x", "root": str(tmp_path)}, where="defs.yaml")
    name = shard_partitions(spec).name
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    others = ["b"]

    def interfere(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO dynamic_partitions") and others:
            (file,) = (tmp_path / "history").rglob("index.db")
            with sqlite3.connect(file) as other:
                row = (name, others.pop())
                other.execute("insert into dynamic_partitions (partitions_def_name, partition) values (?, ?)", row)
            other.close()

    event.listen(Engine, "before_cursor_execute", interfere)
    try:
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            add_partitions(instance, spec, [Partition(key=key, shards=()) for key in "abc"])
            assert sorted(instance.get_dynamic_partitions(name or "")) == ["a", "b", "c"]
    finally:
        event.remove(Engine, "before_cursor_execute", interfere)
    assert not others


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
