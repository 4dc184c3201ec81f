"""What is measured, each in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale.datasets import Place, Template, declared
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.partition.run import partition_steps, rare_collections
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["CHANGED", "MEASURES", "Case", "measured"]

SLOTS = 512  # tasks that run at a time, as with so many workers
WORKERS = 2  # of the engine `processes`
SAMPLES = 1_055  # of a partition of which a manifest has 100,000
_MEGABYTE = 1 << 20
CHANGED = {"parquet": {"compression": "gzip"}}  # a setting that every partition depends on


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dataset of very many partitions, and the Dagster instance that knows it.

    Attributes:
        place: where it is.
        template: the report of its first partition.
        folder: for what one measure leaves for the next.
        engine: of the load, `stub` or `processes`; `none` if there is none, so that Dagster knows no partition.
    """

    place: Place
    template: Template
    folder: Path
    engine: str = "stub"

    @property
    def spec(self) -> DatasetSpec:
        """Its declaration."""
        return declared(self.place).spec

    @classmethod
    def read(cls, file: Path) -> Case:
        """Reads the case that `write` stored."""
        case: Case = pickle.loads(file.read_bytes())
        return case

    def write(self, file: Path) -> None:
        """Stores it for other processes."""
        file.write_bytes(pickle.dumps(self))


class Usage:
    """Seconds, processor seconds and resident megabytes of this process."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._used = _processor_seconds()

    def result(self) -> dict[str, float]:
        """Returns what was used since then."""
        return {
            "seconds": time.perf_counter() - self._began,
            "processor seconds": _processor_seconds() - self._used,
            "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def _processor_seconds() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / _MEGABYTE


def partition(case: Case) -> dict[str, float]:
    """Runs the pending partition, with what a driver hands to its worker."""
    from mm_assets.pipeline.state.staleness import DatasetState

    state = DatasetState(declared(case.place))
    (key,) = state.pending
    earlier = state.earlier(key)
    case.place.forget_requests()
    usage = Usage()
    *_, report = partition_steps(case.spec, state.partitions[key], state.schema, earlier=earlier)
    assert not isinstance(report, str)
    assert report.ok, report.failure
    return usage.result()


def load(case: Case) -> dict[str, float]:
    """Registers the partitions, and drives all that are pending, as `run` does; the figures are the driver's own."""
    from benchmarks.scale.stub import Stub
    from mm_assets.orchestration.launch import open_instance, register_dataset
    from mm_assets.orchestration.recorded_load import run_load
    from mm_assets.pipeline.load.processes import Processes
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.pipeline.state.staleness import DatasetState

    engine = Stub(case.place, case.template, SLOTS) if case.engine == "stub" else Processes(WORKERS)
    usage = Usage()
    dataset = DatasetStore(case.spec)
    with open_instance() as instance:
        registration = register_dataset(instance, dataset)
    state = DatasetState(dataset, partitions={p.key: p for p in registration.partitions})
    keys = state.pending
    registered = usage.result()
    number, resident = 0, list[float]()

    def observe(_: object) -> None:
        nonlocal number
        number += 1
        if number % max(len(keys) // 10, 1) == 0:
            resident.append(_resident())

    result = run_load(case.spec, keys, engine=engine, present=state, observed=observe)
    engine.close()
    assert result.ok, result.failures
    assert number == len(keys)
    used = usage.result()
    return {
        "partitions run": number,
        "seconds until the first": registered["seconds"],
        "ms per partition": 1000 * (used["seconds"] - registered["seconds"]) / number,
        "processor ms per partition": 1000 * (used["processor seconds"] - registered["processor seconds"]) / number,
        "MB after a tenth": resident[0],
        "MB at the end": resident[-1],
        **used,
    }


def command(case: Case) -> dict[str, float]:
    """Runs `mm-assets run`."""
    from mm_assets.cli.main import main

    usage = Usage()
    options = ["--no-record"] if case.engine == "none" else []
    main(["run", "--jobs", "1", *options, *_options(case.spec)], standalone_mode=False)
    return usage.result()


def _options(spec: DatasetSpec) -> Iterator[str]:
    """Yields options that declare a dataset."""
    yield from ("--shards", spec.shards, "--root", spec.root, "--dataset", spec.name)
    settings = {"settle_seconds": spec.settle_seconds, "checks": spec.checks}
    settings |= {"storage_options": dict(spec.storage_options), "root_options": dict(spec.root_options)}
    for name, value in settings.items():
        yield from ("--set", f"{name}={json.dumps(value)}")


def pending(case: Case) -> dict[str, float]:
    """Lists what is pending."""
    from mm_assets.pipeline.state.staleness import pending_partitions

    dataset, usage = declared(case.place), Usage()
    with rare_collections():
        pending_partitions(dataset)
    return usage.result()


def manifest(case: Case) -> dict[str, float]:
    """Makes a manifest, in a process that has not made one before."""
    from mm_assets.pipeline.state.manifests import build_manifest

    dataset, usage = declared(case.place), Usage()
    with rare_collections():
        report = build_manifest(dataset, counts_duplicates=case.engine != "none")
    return {"partitions listed": len(report.manifest["partitions"]["key"]), **usage.result()}


def open_manifest(case: Case) -> dict[str, float]:
    """Opens the newest manifest, with as many samples as a large dataset has, and none of its files."""
    store = declared(case.place).store
    document = json.loads(store.read_bytes("manifest.json"))
    columns = document["partitions"]
    columns["num_samples"] = [SAMPLES] * len(columns["key"])
    document["num_samples"] = SAMPLES * len(columns["key"])
    for files in (*columns["packed"].values(), *columns["tables"].values()):  # of different contents, as real files are
        files["sha256"] = [
            hashlib.sha256(f"{key} {digest}".encode()).hexdigest()[: len(digest)]
            for key, digest in zip(columns["key"], files["sha256"], strict=True)
        ]
    path = case.folder / "manifest.json"
    path.write_text(json.dumps(document, separators=(",", ":")))
    command = [sys.executable, "-c", _OPEN, str(path)]  # which has in memory what a reader has
    opened: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {**opened, "content MB": path.stat().st_size / _MEGABYTE}


_OPEN = """
import json, sys, time
from pathlib import Path

from mm_assets.dataset.manifest import parse_manifest

began, used = time.perf_counter(), time.process_time()
opened = parse_manifest(Path(sys.argv[1]).read_bytes(), name=sys.argv[1])
assert opened.files
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
figures = {"seconds": time.perf_counter() - began, "processor seconds": time.process_time() - used}
print(json.dumps({**figures, "peak MB": int(status["VmHWM"].split()[0]) / 1024}))
"""


def clean(case: Case) -> dict[str, float]:
    """Cleans after all partitions were published with another setting, keeping one manifest; then two days pass."""
    from mm_assets.pipeline.state.clean import clean as clean_dataset

    dataset, usage = declared(case.place, **CHANGED), Usage()
    with rare_collections():
        report = clean_dataset(dataset, keep=1)
    result = usage.result()
    case.place.age(dataset)
    return {"deleted": len(report.files), "waiting": report.num_waiting, **result}


def tick(case: Case) -> dict[str, float]:
    """A tick of the sensor of shards, which has the cursor of the last one, in a process that has listed before."""
    import dagster as dg

    from mm_assets.orchestration.build import build_definitions
    from mm_assets.orchestration.resources import StorageRoot, resource_key

    spec, cursor = case.spec, case.folder / "cursor"
    definitions = build_definitions(spec)
    sensor = definitions.resolve_sensor_def(f"{spec.name}_shards")
    declared(case.place).store.listing("")  # a code server stays: it connects once
    with dg.DagsterInstance.get() as instance:
        usage = Usage()
        with dg.build_sensor_context(
            instance=instance,
            instance_ref=instance.get_ref(),
            cursor=cursor.read_text() if cursor.exists() else None,
            definitions=definitions,
            resources={resource_key(spec): StorageRoot(root=spec.root)},
        ) as context:
            result = sensor.evaluate_tick(context)
        used = usage.result()
    cursor.write_text(result.cursor or "")
    return {**used, "runs requested": len(result.run_requests or ())}


_DEFINITIONS = """\
from pathlib import Path

from benchmarks.scale.measures import Case
from mm_assets.orchestration.build import build_definitions

defs = build_definitions(Case.read(Path({case!r})).spec)
"""
# What the page of the asset graph asks for in Dagster 1.13: `AssetGraphLiveQuery` and `AssetStaleStatusDataQuery`.
_KEYS = ", ".join(f'{{path: ["many", "{stage.name}"]}}' for stage in CHAIN)
_GRAPH = (
    f"{{ assetNodes(assetKeys: [{_KEYS}], loadMaterializations: true)"
    """ { assetKey { path } opNames assetMaterializations(limit: 1) { timestamp runId stepKey }
  assetObservations(limit: 1) { timestamp runId stepKey }
  assetChecksOrError { ... on AssetChecks { checks { name canExecuteIndividually
    executionForLatestMaterialization { id runId status timestamp stepKey evaluation { severity } }
    partitionDefinition { name } partitionStatuses { ... on AssetCheckDefaultPartitionStatuses {
      succeededPartitions failedPartitions inProgressPartitions } } } } }
  partitionStats { numMaterialized numPartitions numFailed numMaterializing }
  staleStatus staleCauses { key { path } reason } }"""
    f" assetsLatestInfo(assetKeys: [{_KEYS}])"
    " { assetKey { path } unstartedRunIds inProgressRunIds latestRun { id status endTime } } }"
)


def graph(case: Case) -> dict[str, float]:
    """Asks a web server for what the page of the asset graph shows, twice: it reads the definitions the first time."""
    file = case.folder / "defs.py"
    file.write_text(_DEFINITIONS.format(case=str(case.folder / "case")))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = int(listening.getsockname()[1])
    command = [sys.executable, "-m", "dagster_webserver", "-f", str(file), "-p", str(port)]
    with (case.folder / "webserver.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _seconds_of_query(port)
            return {"seconds": _seconds_of_query(port)}
        finally:
            server.terminate()


def _seconds_of_query(port: int) -> float:
    content = json.dumps({"query": _GRAPH}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/graphql", content, {"Content-Type": "application/json"})
    for _ in range(600):
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                found = json.load(answer)
        except (urllib.error.URLError, ConnectionError):  # it starts
            time.sleep(0.2)
            continue
        assert "errors" not in found, found
        assert len(found["data"]["assetNodes"]) == len(CHAIN)
        return time.perf_counter() - began
    raise TimeoutError("the web server did not start")


MEASURES: dict[str, Callable[[Case], dict[str, float]]] = {
    "load": load,
    "no-op load": command,
    "partition": partition,
    "load of one": command,
    "pending": pending,
    "manifest": manifest,
    "manifest of one new": manifest,
    "open manifest": open_manifest,
    "tick": tick,
    "tick of ten changed": tick,
    "graph": graph,
    "clean records": clean,
    "clean files": clean,
}
"""Measures by name, in the order in which they are made; each may depend on what those before it have left."""


def measured(what: str, case: Case) -> dict[str, float]:
    """Makes one of `MEASURES` in this process; what it prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        return MEASURES[what](case)
