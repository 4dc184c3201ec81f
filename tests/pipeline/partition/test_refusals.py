"""What registration and stages refuse: a root, a partition, a shard or a table that is not what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.publish import publish
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

from ..chain import at_work, declare, run_chain, stages_of, table_name
from ..shards import CAPTIONS, DOCUMENTS, make_shard
from ..test_spec import DECISIVE


def test_an_unusable_root_is_named_by_its_key(tmp_path: Path) -> None:
    """A root of an unknown scheme, or one that is a file, is a wrong setting of the declaration."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    with pytest.raises(ConfigError, match=r": root: 's4://bucket' cannot be used: .* s4:// is not known"):
        DatasetStore(declare(tmp_path, shard).replace(root="s4://bucket"))
    with pytest.raises(ConfigError, match=r": root: '.*s\.tar' is a file, expected a folder"):
        register(DatasetStore(declare(shard, shard)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nope": 1}, "unexpected keyword argument 'nope'"),
        ({"client_kwargs": {"nope": 1}}, "unexpected keyword argument 'nope'"),
        ({"key": "me"}, "Partial credentials found"),
    ],
)
def test_wrong_root_options_are_named_by_their_key(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    """Options that the client of the root's storage does not take are a wrong setting, before any request."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    spec = declare(tmp_path, tmp_path, root_options=options).replace(root="s3://bucket")
    with pytest.raises(ConfigError, match=rf"defs\.yaml: root_options: are wrong for 's3://bucket': .*{says}"):
        DatasetStore(spec)


def test_a_registration_that_fails_elsewhere_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root without its bucket is a wrong setting; a broken transfer is not."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    dataset = DatasetStore(declare(tmp_path / "root", shard))
    register(dataset)
    remote = DatasetStore(declare(tmp_path, shard).replace(root="memory://bucket"))
    broken: list[Exception] = [ConnectionError("reset by peer"), FileNotFoundError("bucket")]
    monkeypatch.setattr(type(remote.store.fs), "put_file", lambda *_: (_ for _ in ()).throw(broken.pop(0)))
    with pytest.raises(SourceError, match=r"memory://bucket/data/schema\.json: cannot be written: reset by peer"):
        register(remote)
    with pytest.raises(ConfigError, match=r": root: 'memory://bucket' cannot be written: .*not found"):
        register(remote)


@pytest.mark.parametrize(
    ("stage", "mode"),
    [("rows", "read"), ("rows", "write"), ("materialized_rows", "read"), ("filtered_rows", "write")],
)
def test_a_changed_shard_replaces_nothing(tmp_path: Path, stage: str, mode: str) -> None:
    """A shard that changed after it was indexed is refused before a stage that reads it publishes anything."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    dataset, _ = run_chain(declare(tmp_path / "root", shard, materialize=mode))
    before = {path: path.stat().st_mtime_ns for path in Path(dataset.store.url).rglob("*") if path.is_file()}
    make_shard(shard, DOCUMENTS)
    with pytest.raises(SourceError, match=r"s\.tar: changed since it was indexed .*: materialize raw_shards again"):
        at_work(getattr(stages, stage), dataset, "s")
    after = {path: path.stat().st_mtime_ns for path in Path(dataset.store.url).rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("stage", "mode"),
    [("materialized_rows", "write"), ("filtered_rows", "read"), ("packed", "read"), ("packed", "write")],
)
def test_a_stage_that_reads_tables_alone_does_not_open_the_shard(tmp_path: Path, stage: str, mode: str) -> None:
    """Stages after the last that reads the shard work without it, and give what they gave."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    dataset, _ = run_chain(declare(tmp_path / "root", shard, materialize=mode))
    before = stages_of(dataset, "s")
    shard.unlink()
    at_work(getattr(stages, stage), dataset, "s")
    assert stages_of(dataset, "s") == before


def test_an_unregistered_partition_names_the_command(tmp_path: Path) -> None:
    """A stage of an unknown partition says which ones are registered and how to register it."""
    dataset = DatasetStore(declare(tmp_path / "root", make_shard(tmp_path / "in" / "s.tar", CAPTIONS)))
    with pytest.raises(SourceError, match=r"'s' is not registered \(found none\): run `mm-assets register --dataset "):
        at_work(stages.raw_shards, dataset, "s")
    register(dataset)
    with pytest.raises(SourceError, match=r"'r' is not registered \(found s\)"):
        at_work(stages.raw_shards, dataset, "r")


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_flipped_bit_in_a_table_stops_the_next_stage(tmp_path: Path, remote: bool) -> None:
    """One bit of a table that changed after it was recorded is refused by what reads the table, and nothing is made."""
    shard = make_shard(tmp_path / "s.tar", CAPTIONS)
    root = f"memory://{tmp_path.name}-flipped" if remote else tmp_path / "root"
    dataset, _ = run_chain(declare(root, shard))
    readers = [*stages.TABLE_STAGES.values(), stages.packed]
    for stage, read in zip(stages.TABLE_STAGES, readers[1:], strict=True):
        record = stages_of(dataset, "s")[stage].files[stage.tables[0].name]
        whole = dataset.store.read_bytes(record.path)
        for place in (7, len(whole) // 2, len(whole) - 9):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            dataset.store.write_bytes(record.path, bytes(flipped))
            again = f"materialize {stage.name} again, or run `mm-assets run --dataset data --partition s`"
            wrong = rf"{record.path}.*its SHA-256 is \w{{64}}, expected {record.sha256} as recorded: {again}"
            with pytest.raises(SourceError, match=wrong):
                at_work(read, dataset, "s")
        dataset.store.write_bytes(record.path, whole)
    at_work(stages.packed, dataset, "s")


def test_a_flipped_bit_between_two_stages_of_one_run_stops_the_second(tmp_path: Path) -> None:
    """A table that the same run has written is hashed again if its file changed meanwhile, and only then."""
    dataset, _ = run_chain(declare(tmp_path / "root", make_shard(tmp_path / "s.tar", CAPTIONS)))
    with PartitionWork.registered(dataset, "s") as work:
        for make in stages.TABLE_STAGES.values():
            make(work)
        path = Path(dataset.store.path_of(work.record(FILTERED_ROWS).files["filtered_rows"].path))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"its SHA-256 is \w{64}, expected \w{64} as recorded"):
            stages.packed(work)


@pytest.mark.parametrize("name", sorted(DECISIVE))
def test_a_setting_that_decides_the_schema_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """A change is named with the command that accepts it, and is accepted by it; what decides nothing may change."""
    shard = make_shard(tmp_path / "in" / "s.tar", {**CAPTIONS, "x.json": {"a": 1}})
    spec = declare(tmp_path / "root", shard)
    register(DatasetStore(spec))
    register(DatasetStore(spec.replace(samples={"allow_references": True, "allowed_references": ["https://x.org/"]})))
    changed = DatasetStore(spec.replace(samples={name: DECISIVE[name]}))
    with pytest.raises(ConfigError, match=rf"samples\.{name}: changed since .* register --dataset data --new-schema"):
        register(changed)
    register(changed, new_schema=True)
    register(changed)


def test_a_refusal_names_every_setting_that_changed(tmp_path: Path) -> None:
    """The first one is named as the cause; one that was not stored, as by a release without it, does not count."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    spec = declare(tmp_path / "root", shard, samples={"texts_field": "t"})
    register(DatasetStore(spec))
    other = spec.replace(samples={"roles": [], "texts_field": "u", "user_columns": []}, pack="generic")
    all_changed = r"samples\.roles: changed .*\(and so did samples\.texts_field, samples\.user_columns, pack\)"
    with pytest.raises(ConfigError, match=all_changed):
        register(DatasetStore(other))
    file = tmp_path / "root" / "data" / "schema.json"
    stored = json.loads(file.read_text())
    for name in ("roles", "texts_field"):
        del stored["declared"]["samples"][name]
    file.write_text(json.dumps(stored))
    register(DatasetStore(spec))
    with pytest.raises(ConfigError, match=r"samples\.user_columns: changed .*\(and so did pack\)"):
        register(DatasetStore(other))


def test_publishing_out_of_order_is_refused(tmp_path: Path) -> None:
    """A partition whose later stages are those of other settings is not published."""
    dataset, _ = run_chain(declare(tmp_path / "root", make_shard(tmp_path / "in" / "s.tar", CAPTIONS)))
    other = DatasetStore(dataset.spec.replace(filters=[{"type": "text_length", "min_chars": 3}]))
    at_work(stages.filtered_rows, other, "s")
    with pytest.raises(SourceError, match="packed_mult has not been made"):
        at_work(publish, other, "s")


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    """A file whose size is not that in its record is not read."""
    dataset, _ = run_chain(declare(tmp_path / "root", make_shard(tmp_path / "in" / "s.tar", CAPTIONS)))
    path = Path(dataset.store.path_of(table_name(dataset, "rows", "s")))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="a file of rows is "):
        at_work(stages.materialized_rows, dataset, "s")
