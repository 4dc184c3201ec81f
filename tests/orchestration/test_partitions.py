"""The partitions of a dataset in Dagster's database."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import dagster as dg
from click.testing import CliRunner
from sqlalchemy import event
from sqlalchemy.engine import Engine

from mm_assets.cli.main import main
from mm_assets.orchestration.partitions import add_partitions, shard_partitions
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.records import Partition
from mm_assets.pipeline.state.registration import partition_key

from ..pipeline.shards import CAPTIONS, make_shard


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


def test_clean_removes_partitions_without_shards_and_keeps_their_history(tmp_path: Path, dagster_home: Path) -> None:
    """Dagster loses the keys whose shards are gone and keeps their events; a dry run lists them; a return is as new."""
    for key in "abc":
        make_shard(tmp_path / "in" / f"{key}.tar", CAPTIONS)
    given = ["--shards", str(tmp_path / "in"), "--root", str(tmp_path / "root"), "--dataset", "data"]

    def mm(*arguments: str) -> str:
        done = CliRunner().invoke(main, [*arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    def known() -> tuple[set[str], set[str]]:
        """The keys that Dagster offers, and those that have materializations."""
        with dg.DagsterInstance.get() as instance:
            found = instance.fetch_materializations(dg.AssetKey(["data", "published"]), limit=99).records
            return set(instance.get_dynamic_partitions("data_shards")), {str(one.partition_key) for one in found}

    mm("run", *given)
    clean = ("clean", "--root", str(tmp_path / "root"), "--dataset", "data")
    assert "from Dagster" not in mm(*clean)
    shard = (tmp_path / "in" / "b.tar").read_bytes()
    for key in "bc":
        (tmp_path / "in" / f"{key}.tar").unlink()
    mm("register", *given)
    assert known() == ({"a", "b", "c"}, {"a", "b", "c"})
    assert mm(*clean, "--dry-run").endswith(
        "data: would remove 2 partitions from Dagster, which keeps their history\n  b\n  c\n"
    )
    assert known() == ({"a", "b", "c"}, {"a", "b", "c"})
    assert mm(*clean).endswith("data: removed 2 partitions from Dagster, which keeps their history\n  b\n  c\n")
    assert known() == ({"a"}, {"a", "b", "c"})
    assert "from Dagster" not in mm(*clean)
    (tmp_path / "in" / "b.tar").write_bytes(shard)
    mm("run", *given)
    assert known() == ({"a", "b"}, {"a", "b", "c"})


def test_clean_leaves_the_partitions_of_another_folder_alone(tmp_path: Path, dagster_home: Path) -> None:
    """A dataset of the same name in another root, which Dagster does not know, removes none of the partitions."""
    for name, keys in (("in", "ab"), ("other", "a")):
        for key in keys:
            make_shard(tmp_path / name / f"{key}.tar", CAPTIONS)
    for name, further in (("other", ["--no-record"]), ("in", [])):
        given = ["--shards", str(tmp_path / name), "--root", str(tmp_path / f"root-{name}"), "--dataset", "data"]
        assert CliRunner().invoke(main, ["run", *given, *further], catch_exceptions=False).exit_code == 0
    done = CliRunner().invoke(main, ["clean", "--root", str(tmp_path / "root-other"), "--dataset", "data", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["datasets"]["data"]["partitions"] == []
    assert "it has not recorded the newest manifest: run `mm-assets sync" in done.stderr
    with dg.DagsterInstance.get() as instance:
        assert set(instance.get_dynamic_partitions("data_shards")) == {"a", "b"}
