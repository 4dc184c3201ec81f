"""`mm-assets run --metrics`: the numbers that Prometheus reads of a load."""

from __future__ import annotations

import re
import socket
import sys
import urllib.request
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from mm_assets.cli.main import main
from mm_assets.cli.metrics import LoadMetrics
from mm_assets.errors import ConfigError, MissingExtraError
from mm_assets.pipeline.load.driver import run_tasks
from mm_assets.pipeline.load.engine import Task
from mm_assets.pipeline.load.tasks import PartitionRun
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

from ..pipeline.chain import declare
from ..pipeline.load.test_driver import Script, failed, lost
from ..pipeline.shards import CAPTIONS, make_shard

pytest.importorskip("prometheus_client", reason="the metrics extra is not installed")
from prometheus_client.parser import text_string_to_metric_families

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "spec" / "running.md").read_text(encoding="utf-8")


def numbers(text: str) -> dict[str, float]:
    """The samples of an export, each by its name and the values of its labels except for the dataset."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "dataset"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def run(folder: Path, *options: str) -> Result:
    shards = ("--shards", str(folder / "in"), "--root", str(folder / "out"), "--set", "settle_seconds=0")
    return CliRunner().invoke(main, ["run", *shards, *options])


def test_a_file_has_what_a_load_did(tmp_path: Path, dagster_home: Path) -> None:
    """The file has partitions, bytes, stages, samples and losses of a load, and is replaced as a whole."""
    size = make_shard(tmp_path / "in" / "a.tar", CAPTIONS).stat().st_size
    (tmp_path / "in" / "b.tar").write_bytes(b"no tar" * 1000)
    file = tmp_path / "load.prom"
    file.write_text("of an earlier load")
    result = run(tmp_path, "--metrics", str(file))
    assert result.exit_code == 1, result.output
    assert 'dataset="default"' in file.read_text()
    found = numbers(file.read_text())
    states = {state: found[f"mm_assets_partitions {state}"] for state in ("done", "failed", "in_flight", "pending")}
    assert states == {"done": 1, "failed": 1, "in_flight": 0, "pending": 0}
    packed = sum(path.stat().st_size for form in ("mult", "mstr") for path in (tmp_path / "out").rglob(f"*.{form}"))
    assert found["mm_assets_packed_written_bytes_total"] == packed > 0
    assert found["mm_assets_shards_read_bytes_total"] == size
    assert found["mm_assets_samples_total"] == len({Path(name).stem for name in CAPTIONS})
    assert found["mm_assets_stage_duration_seconds_count rows"] == 1
    assert found["mm_assets_losses_total lost"] == 0
    assert found["mm_assets_load_start_timestamp_seconds"] <= found["mm_assets_last_progress_timestamp_seconds"]
    assert [path.name for path in tmp_path.iterdir() if "load.prom" in path.name] == ["load.prom"]


def test_a_port_serves_the_same(tmp_path: Path) -> None:
    """The metrics are at `/metrics` of the port, on 127.0.0.1, until the load ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with LoadMetrics(str(port)) as metrics:
        metrics.begin("web", 3)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            found = numbers(reply.read().decode())
    assert found["mm_assets_partitions pending"] == 3
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_what_cannot_be_exported_is_an_error_before_the_load(tmp_path: Path, dagster_home: Path) -> None:
    """A port in use and a file in no folder are named, with what else to give, and nothing is registered."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for target in (f"127.0.0.1:{taken.getsockname()[1]}", "99999", str(tmp_path / "missing" / "load.prom")):
            result = run(tmp_path, "--metrics", target)
            assert result.exit_code == 2, result.output
            assert "--metrics" in result.stderr
            assert target in result.stderr
            assert "HOST:PORT" in result.stderr
    assert not (tmp_path / "out").exists()


def test_retries_and_storage_errors_are_counted_by_cause(tmp_path: Path) -> None:
    """Each attempt that a storage error ended counts by its kind, and each new attempt by what ended the last one."""
    for key in "abcdef":
        make_shard(tmp_path / "in" / f"{key}.tar", CAPTIONS)
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    register(dataset)
    tasks = [Task(spec=dataset.spec, schema=dataset.schema(), partition=p) for p in dataset.partitions().values()]
    ends: dict[str, Any] = {
        "a": [(1.0, failed("a", fault="slow_down")), (1.0, failed("a", fault="unavailable"))],
        "b": [(1.0, lost("memory"))],
        "c": [(1.0, lost("worker")), (1.0, lost("host"))],
        "d": [(100.0, None)],
        "e": [(1.0, failed("e"))],
    }
    engine = Script(ends=ends, slots=6)
    name = dataset.spec.name
    with LoadMetrics(str(tmp_path / "load.prom")) as metrics:
        metrics.begin(name, len(tasks))
        observed = metrics.observed(engine)
        reports = run_tasks(observed, tasks, timeout=50, clock=lambda: engine.now, sleep=engine.sleep)
        for report in reports:
            metrics.partition_ended(PartitionRun.of(name, report))
    found = numbers((tmp_path / "load.prom").read_text())
    assert {key: value for key, value in found.items() if value and "storage_errors_total" in key} == {
        "mm_assets_storage_errors_total slow_down": 1,
        "mm_assets_storage_errors_total unavailable": 1,
    }
    assert {key.split()[1]: value for key, value in found.items() if key.startswith("mm_assets_retries_total")} == {
        "storage": 2,
        "memory": 1,
        "worker": 1,
        "host": 1,
        "timeout": 1,
    }
    assert (found["mm_assets_partitions done"], found["mm_assets_partitions failed"]) == (5, 1)


def test_a_metric_never_fails_a_load(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A load succeeds while its metrics raise errors and their file cannot be written any more."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LoadMetrics, "_show_partitions", broken)
    folder = tmp_path / "metrics"
    folder.mkdir()
    written = LoadMetrics._write
    monkeypatch.setattr(LoadMetrics, "_write", lambda self: written(self) if not list(folder.iterdir()) else broken())
    result = run(tmp_path, "--metrics", str(folder / "load.prom"))
    assert result.exit_code == 0, result.output
    assert "a bug" in caplog.text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prometheus-client the message names the extra that installs it."""

    def of_no_wheel(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.metadata", of_no_wheel)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"^--metrics needs prometheus_client.*'mm-assets\[metrics\]'"):
        LoadMetrics("9100")


def exported(folder: Path) -> Mapping[str, Any]:
    """The families of a load that has not run anything."""
    with LoadMetrics(str(folder / "load.prom")) as metrics:
        metrics.begin("web", 1)
    return {family.name: family for family in text_string_to_metric_families((folder / "load.prom").read_text())}


def test_alerts_name_metrics_and_labels_that_exist(tmp_path: Path) -> None:
    """Every metric, and every label that a rule of deploy/alerts.yaml uses, is exported, also before any error."""
    samples = [sample for family in exported(tmp_path).values() for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    (group,) = yaml.safe_load((REPO / "deploy" / "alerts.yaml").read_text())["groups"]
    assert len(group["rules"]) == 3
    for rule in group["rules"]:
        names = set(re.findall(r"\bmm_assets_\w+", rule["expr"]))
        assert names
        assert names <= labels.keys(), rule["alert"]
        used = {name for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]) for name in group.split(", ")}
        used |= set(re.findall(r"[{,](\w+)=", rule["expr"])) | set(re.findall(r"\$labels\.(\w+)", str(rule)))
        assert used <= set.union(*(labels[name] for name in names)), rule["alert"]
        for value in re.findall(r'state=~?"([\w|]+)"', rule["expr"]):
            assert set(value.split("|")) <= {sample.labels.get("state") for sample in samples}


def test_the_page_lists_every_metric(tmp_path: Path) -> None:
    """The table of docs/spec/running.md has each metric with its labels, by the name that Prometheus stores."""
    listed = dict(re.findall(r"^\| `(mm_assets_\w+)` \|([^|]*)\|", PAGE, flags=re.MULTILINE))
    found = {}
    for name, family in exported(tmp_path).items():
        if name.endswith("_created"):
            continue
        stored = f"{name}_total" if family.type == "counter" else name
        labels = {label for sample in family.samples for label in sample.labels} - {"dataset", "le"}
        found[stored] = labels
    for name, labels in found.items():
        assert labels <= set(re.findall(r"`(\w+)`", listed[name])), name
    assert listed.keys() == found.keys()


def test_a_wrong_file_is_a_config_error(tmp_path: Path) -> None:
    """A folder is not a file to write."""
    with pytest.raises(ConfigError, match="cannot be written"), LoadMetrics(str(tmp_path)):
        pass
