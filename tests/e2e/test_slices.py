"""Slices: hosts that do not know of one another share a dataset, and what they did is recorded afterwards."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from mm_assets.cli.main import main
from mm_assets.orchestration.partitions import asset_key
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.load.tasks import load_partitions
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Slice
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..pipeline.shards import make_shard, png

PARTITIONS = 30
WAIT = 300.0
BROKEN = ("05", "17")
COMMAND = "import sys; from mm_assets.cli.main import main; main(sys.argv[1:])"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    for number in range(PARTITIONS):
        make_shard(folder / f"{number:02}.tar", {f"{number}.png": png(number), f"{number}.txt": f"number {number}"})
    for key in BROKEN:  # a member that is longer than the file
        (folder / f"{key}.tar").write_bytes((folder / f"{key}.tar").read_bytes()[:700])
    return folder


def run(folder: Path, root: Path, *arguments: str) -> tuple[int, str]:
    """A command with a home of its own."""
    given = ["--root", str(root), "--dataset", "d", "--shards", f"{folder}/*.tar", "--set", "settle_seconds=0"]
    done = CliRunner().invoke(main, [*arguments, *given])
    return done.exit_code, done.output


def files(root: Path) -> dict[str, bytes]:
    """Returns the files of a dataset's folder that have the same bytes wherever they were made."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in paths
        if path.relative_to(root).parts[1] not in ("attempts", "cache", "claims", "clean.json")
        and not path.name.startswith(".")
    }


def shown(instance: dg.DagsterInstance, root: Path) -> dict[str, Any]:
    """What Dagster's pages show of each asset: its partitions with versions and counts, and its checks."""
    spec = DatasetSpec.from_config({"name": "d", "shards": "s", "root": str(root)}, where="test")
    found: dict[str, Any] = {}
    for stage in CHAIN:
        key = asset_key(spec, stage)
        records = instance.fetch_materializations(key, limit=1000).records
        made = Counter[Any]()
        for record in records:
            event = record.asset_materialization
            assert event is not None
            tags = {name: value for name, value in (event.tags or {}).items() if "pointer" not in name}
            counts = {name: str(value.value) for name, value in event.metadata.items() if name.startswith("count/")}
            made[record.partition_key, json.dumps(tags, sort_keys=True), json.dumps(counts, sort_keys=True)] += 1
        found[stage.name] = made
        checks = instance.event_log_storage.get_asset_check_summary_records(known_checks(instance, key))
        latest = {check.name: record.last_check_execution_record for check, record in checks.items()}
        found[f"{stage.name} checks"] = {name: record and record.status for name, record in latest.items()}
    found["partitions"] = sorted(instance.get_dynamic_partitions("d_shards"))
    return found


def known_checks(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[dg.AssetCheckKey]:
    events = instance.fetch_materializations(key, limit=1).records
    if not events:
        return []
    logs = instance.all_logs(events[0].run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    evaluations = [entry.get_dagster_event().asset_check_evaluation_data for entry in logs]
    return list({evaluation.asset_check_key for evaluation in evaluations if evaluation.asset_key == key})


def failed_partitions(instance: dg.DagsterInstance, root: Path) -> dict[str, list[str]]:
    """Partition keys that Dagster shows as failed, by the stages that are failed."""
    from mm_assets.orchestration.runs import failed_runs

    spec = DatasetSpec.from_config({"name": "d", "shards": "s", "root": str(root)}, where="test")
    return {"failed": sorted(failed_runs(instance, spec))}


@pytest.mark.parametrize("total", [3, pytest.param(20, marks=pytest.mark.cluster)])
def test_slices_and_a_sync_are_a_load(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    """Slices in processes with homes of their own, then `sync`: files, records and failures are those of one load."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "one"))
    (tmp_path / "one").mkdir()
    assert run(shards, tmp_path / "whole", "run", "--jobs", "2")[0] == 1
    with dg.DagsterInstance.get() as instance:
        expected = shown(instance, tmp_path / "whole"), failed_partitions(instance, tmp_path / "whole")
    assert expected[1] == {"failed": sorted(BROKEN)}

    root = tmp_path / "sliced"
    given = ["--root", str(root), "--dataset", "d", "--shards", f"{shards}/*.tar", "--set", "settle_seconds=0"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, "run", "--slice", f"{number}/{total}", "--no-record", *given],
            env={**os.environ, "DAGSTER_HOME": str(tmp_path / f"home{number}")},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(1, total + 1)
    ]
    said = [process.communicate(timeout=WAIT)[0] for process in started]
    codes = [process.returncode for process in started]
    failing = {number for number in range(total) for key in BROKEN if key in Slice(number + 1, total)}
    assert codes == [int(number in failing) for number in range(total)], said
    assert not any((tmp_path / f"home{number}").exists() for number in range(1, total + 1))
    assert not (root / "d" / "manifest.json").exists()

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "two"))
    (tmp_path / "two").mkdir()
    code, output = run(shards, root, "sync")
    assert (code, output.splitlines()[0]) == (0, f"d: recorded {PARTITIONS - len(BROKEN)} partitions and the manifest")
    losses = f"`mm-assets losses --root {root} --set settle_seconds=0 --dataset d`"
    assert f"d: {len(BROKEN)} partitions recorded as failed: {losses}" in output
    assert files(root) == files(tmp_path / "whole")
    assert {path.stem for path in (root / "d" / "attempts").iterdir()} == {*BROKEN}
    with dg.DagsterInstance.get() as instance:
        assert (shown(instance, root), failed_partitions(instance, root)) == expected
    code, output = run(shards, root, "sync")
    assert (code, output) == (0, "d: nothing to record\n")


def test_slices_are_stable_parts() -> None:
    """Each key is in one slice, whatever keys there are, and slices are of about the same size."""
    keys = [f"shard-{number:05}" for number in range(10_000)]
    found = {key: [number for number in range(1, 21) if key in Slice(number, 20)] for key in keys}
    assert all(len(numbers) == 1 for numbers in found.values())
    assert max(Counter(numbers[0] for numbers in found.values()).values()) < 600
    assert found["shard-00000"] == [1]


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/", "a/b", "1/3/5", "-1/3"])
def test_what_is_not_a_slice_is_refused(text: str, tmp_path: Path, shards: Path) -> None:
    """A slice is K/N with K from 1 to N."""
    code, output = run(shards, tmp_path / "root", "run", f"--slice={text}")
    assert code == 2
    assert f"error: arguments: --slice: is {text!r}, expected K/N such as 3/20, with K from 1 to N" in output


def test_a_root_of_one_host_is_refused(tmp_path: Path, shards: Path, dagster_home: Path) -> None:
    """The default root is below the home of each host: a slice says so, and what to set."""
    done = CliRunner().invoke(main, ["run", "--shards", f"{shards}/*.tar", "--slice", "1/2", "--no-record"])
    assert done.exit_code == 2
    assert f"--root: of default is {dagster_home / 'data'}, which each host has for itself: give --root" in done.output


def test_a_slice_says_how_to_record_it(tmp_path: Path, shards: Path, dagster_home: Path) -> None:
    """Its summary has its own partitions, and the command that records them with the same declaration."""
    for key in BROKEN:
        (shards / f"{key}.tar").unlink()
    code, output = run(shards, tmp_path / "root", "run", "--slice", "1/2", "--no-record")
    assert code == 0
    mine = [key for key in (f"{number:02}" for number in range(PARTITIONS)) if key in Slice(1, 2) and key not in BROKEN]
    assert f"{len(mine)} partitions run in" in output
    keys = [line.split("│")[2].strip() for line in output.splitlines() if line.startswith("│")]
    assert keys == [*mine, "total"]
    assert (
        f"not recorded in Dagster, and no manifest was made: `mm-assets sync --root {tmp_path / 'root'} --shards"
        in output
    )
    assert "warning" not in output
    assert not (dagster_home / "history").exists()


def test_a_sync_without_the_declaration_leaves_the_manifest(tmp_path: Path, shards: Path, dagster_home: Path) -> None:
    """With the root alone it is not known what is up to date: partitions are recorded, the manifest is as it was."""
    root = tmp_path / "root"
    shutil.rmtree(shards)
    make_shard(shards / "a.tar", {"0.txt": "words"})
    assert run(shards, root, "run", "--no-record")[0] == 0
    done = CliRunner().invoke(main, ["sync", "--root", str(root), "--dataset", "d"])
    assert done.exit_code == 0
    assert done.stdout == "d: recorded 1 partition\n"
    assert "no manifest was made, because its declaration is not known here: give --shards" in done.stderr
    assert (
        DatasetStore(
            DatasetSpec.from_config({"name": "d", "shards": "s", "root": str(root)}, where="test")
        ).store.exists("manifest.json")
        is False
    )


def test_copies_of_shards_with_times_of_their_own_are_noticed(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice whose shards another host registers with other times meanwhile fails: what it publishes is left out."""
    shards, root = tmp_path / "shards", tmp_path / "root"
    for number in range(2):
        make_shard(shards / f"{number}.tar", {f"{number}.txt": f"number {number}"})
    given = {"name": "d", "shards": f"{shards}/*.tar", "root": str(root), "settle_seconds": 0}
    spec = DatasetSpec.from_config(given, where="arguments")

    def elsewhere(present: DatasetState, *args: Any, **options: Any) -> object:
        times = {path: path.stat().st_mtime_ns for path in shards.iterdir()}
        for path in times:
            os.utime(path, (1_700_000_000, 1_700_000_000))
        register(DatasetStore(spec))
        for path, time in times.items():
            os.utime(path, ns=(time, time))
        return load_partitions(present, *args, **options)

    monkeypatch.setattr("mm_assets.pipeline.load.tasks.load_partitions", elsewhere)
    code, said = run(shards, root, "run", "--slice", "1/1", "--no-record")
    assert code == 1
    assert "2 partitions that ran here, '0' first, were registered meanwhile with other shards" in " ".join(
        said.split()
    )
    assert "all hosts have to see the same files" in " ".join(said.split())
