"""What is measured, each in a process of its own."""

from __future__ import annotations

import contextlib
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale.datasets import Place, Template, declared
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.partition.run import rare_collections
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["MEASURES", "Case", "measured"]

SLOTS = 512  # tasks at work at a time, as with so many workers
WORKERS = 2  # of the engine `processes`
_MEGABYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dataset of very many partitions, and the Dagster instance that knows it.

    Attributes:
        place: where it is.
        template: the report of its first partition.
        folder: for what one measure leaves for the next.
        engine: of the load, `stub` or `processes`.
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
        """The case that `write` stored."""
        found: Case = pickle.loads(file.read_bytes())
        return found

    def write(self, file: Path) -> None:
        """Stores it for other processes."""
        file.write_bytes(pickle.dumps(self))


class Usage:
    """Seconds, processor seconds and resident megabytes of this process."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._used = _processor()

    def result(self) -> dict[str, float]:
        """What was used since then."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {
            "seconds": time.perf_counter() - self._began,
            "processor seconds": _processor() - self._used,
            "peak MB": peak,
        }


def _processor() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / _MEGABYTE


def load(case: Case) -> dict[str, float]:
    """Registers the partitions, and drives all that are pending, as `run` does; the figures are the driver's own."""
    from benchmarks.scale.stub import Stub
    from mm_assets.orchestration.launch import open_instance, register_dataset, run_load
    from mm_assets.pipeline.load.processes import Processes
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.pipeline.state.staleness import Present

    engine = Stub(case.place, case.template, SLOTS) if case.engine == "stub" else Processes(WORKERS)
    usage = Usage()
    dataset = DatasetStore(case.spec)
    with open_instance() as instance:
        found = register_dataset(instance, dataset)
    present = Present(dataset, partitions={p.key: p for p in found.partitions})
    keys = present.pending()
    registered = usage.result()
    number, resident = 0, list[tuple[int, float]]()

    def observe(_: object) -> None:
        nonlocal number
        number += 1
        if number % max(len(keys) // 10, 1) == 0:
            resident.append((number, _resident()))

    made = run_load(case.spec, keys, engine=engine, present=present, observed=observe)
    engine.close()
    assert made.ok, made.failures
    assert number == len(keys)
    return {
        "partitions": number,
        "seconds until the first": registered["seconds"],
        "processor seconds until the first": registered["processor seconds"],
        "MB after a tenth": resident[0][1],
        "MB at the end": resident[-1][1],
        **usage.result(),
    }


def no_op(case: Case) -> dict[str, float]:
    """`mm-assets run` with nothing to do."""
    from mm_assets.cli.main import main

    usage, arguments = Usage(), ["run", "--jobs", "1", *_options(case.spec)]
    main(arguments, standalone_mode=False)
    return usage.result()


def _options(spec: DatasetSpec) -> Iterator[str]:
    """Options that declare a dataset."""
    yield from ("--shards", spec.shards, "--root", spec.root, "--dataset", spec.name)
    given = {"settle_seconds": spec.settle_seconds, "checks": spec.checks}
    given |= {"storage_options": dict(spec.storage_options), "root_options": dict(spec.root_options)}
    for name, value in given.items():
        yield from ("--set", f"{name}={json.dumps(value)}")


def pending(case: Case) -> dict[str, float]:
    """What is pending."""
    from mm_assets.pipeline.state.staleness import pending_partitions

    dataset, usage = declared(case.place), Usage()
    with rare_collections():
        pending_partitions(dataset)
    return usage.result()


def manifest(case: Case) -> dict[str, float]:
    """A manifest, in a process that has not made one before."""
    from mm_assets.pipeline.state.manifests import build_manifest

    dataset, usage = declared(case.place), Usage()
    with rare_collections():
        build_manifest(dataset)
    return usage.result()


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
        found = usage.result()
    cursor.write_text(result.cursor or "")
    return {**found, "runs requested": len(result.run_requests or ())}


_DEFINITIONS = """\
from pathlib import Path

from benchmarks.scale.measures import Case
from mm_assets.orchestration.build import build_definitions

defs = build_definitions(Case.read(Path({case!r})).spec)
"""
# What the pages of Dagster 1.13 ask for: `AssetGraphLiveQuery` and `AssetStaleStatusDataQuery` of the asset graph, and
# the checks of one asset.
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
_CHECKS = """{ assetNodeOrError(assetKey: {path: ["many", "packed_mult"]}) { ... on AssetNode {
  assetChecksOrError { ... on AssetChecks { checks { name description
    executionForLatestMaterialization { status evaluation { severity metadataEntries { label } } } } } } } } }"""


def pages(case: Case) -> dict[str, float]:
    """The web server's answers to what the asset graph and the checks of an asset ask for; the second of two."""
    file, port = case.folder / "defs.py", _free_port()
    file.write_text(_DEFINITIONS.format(case=str(case.folder / "case")))
    command = [sys.executable, "-m", "dagster_webserver", "-f", str(file), "-p", str(port)]
    with (case.folder / "webserver.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            found = {}
            for name, query in (("graph", _GRAPH), ("checks", _CHECKS)):
                for _ in range(2):
                    found[f"seconds of the {name}"] = _asked(port, query)
        finally:
            server.terminate()
    return found


def _asked(port: int, query: str) -> float:
    """Seconds until a query is answered; the server may have to start first."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
    )
    for _ in range(600):
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                found = json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
            continue
        assert "errors" not in found, found
        assert "many" in json.dumps(found) or "all_rules" in json.dumps(found), found
        return time.perf_counter() - began
    raise TimeoutError("the web server did not start")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


MEASURES: dict[str, Callable[[Case], dict[str, float]]] = {
    "load": load,
    "no-op load": no_op,
    "pending": pending,
    "manifest": manifest,
    "manifest of one new": manifest,
    "tick": tick,
    "tick of ten changed": tick,
    "pages": pages,
}


@contextmanager
def _nothing_printed() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield


def measured(what: str, case: Case) -> dict[str, float]:
    """One of `MEASURES`, in this process; what it prints goes to standard error."""
    with _nothing_printed():
        return MEASURES[what](case)
