"""The partitions of a dataset in Dagster's database."""

import sqlite3
from pathlib import Path
from typing import Any

import dagster as dg
from sqlalchemy import event
from sqlalchemy.engine import Engine

from mm_assets.orchestration.partitions import add_partitions, shard_partitions
from mm_assets.pipeline.records import Partition
from mm_assets.pipeline.spec import DatasetSpec


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
