"""`mm-assets run --metrics`: what a load does, as Prometheus metrics that are served over HTTP or written to a file.

A wrapper around the engine sees every attempt at a partition, and the command reports how each partition ended. An
error in a metric is logged and never fails the load.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, get_args

from mm_assets.cli.output import echo
from mm_assets.errors import ConfigError, best_effort, optional_import

if TYPE_CHECKING:
    from mm_assets.pipeline.load.engine import Ended, Engine, Task
    from mm_assets.pipeline.load.tasks import PartitionRun

__all__ = ["LoadMetrics"]

WRITE_SECONDS = 5.0
_STAGE_BUCKETS = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)  # in seconds
_ADDRESS = re.compile(r"(?:(?P<host>[^/\s:]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})")


class LoadMetrics:
    """The metrics of the loads of one command, exported while its `with` block runs.

    Args:
        target: ``PORT`` or ``HOST:PORT`` serves them over HTTP, on 127.0.0.1 without a host. Anything else is the path
            of a file, which is replaced as a whole every few seconds and at the end.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """

    def __init__(self, target: str) -> None:
        with optional_import("prometheus_client", "--metrics"):
            import prometheus_client as client
        self._target = target
        self._opened = ExitStack()
        self._closed = threading.Event()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # of partitions: by dataset, by state
        self._in_flight: defaultdict[str, set[str]] = defaultdict(set)  # partition keys, by dataset
        self._causes: dict[tuple[str, str], str] = {}  # by partition, why its last attempt did not succeed
        self._registry = registry = client.CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> client.Gauge:
            return client.Gauge(f"mm_assets_{name}", text, ("dataset", *labels), registry=registry)

        def counter(name: str, text: str, *labels: str) -> client.Counter:
            return client.Counter(f"mm_assets_{name}", text, ("dataset", *labels), registry=registry)

        self._partitions = gauge("partitions", "Partitions of the load, by state.", "state")
        self._start = gauge("load_start_timestamp_seconds", "When the load of the dataset started.")
        self._progress = gauge(
            "last_progress_timestamp_seconds", "When a partition was last published; the start of the load before that."
        )
        self._retries = counter("retries", "Partitions that were started again, by reason.", "reason")
        self._storage_errors = counter("storage_errors", "Attempts that a storage error ended, by kind.", "kind")
        self._shard_bytes = counter("shards_read_bytes", "Bytes of the shards that attempts have read.")
        self._packed_bytes = counter("packed_written_bytes", "Bytes of the packed files that attempts have written.")
        self._samples = counter("samples", "Samples in published partitions.")
        self._losses = counter("losses", "Items lost in published partitions, by kind.", "kind")
        self._stages = client.Histogram(
            "mm_assets_stage_duration_seconds",
            "Time that a stage of a partition took, with its checks.",
            ("dataset", "stage"),
            registry=registry,
            buckets=_STAGE_BUCKETS,
        )

    def __enter__(self) -> Self:
        """Starts to export the metrics.

        Raises:
            ConfigError: the port is in use, or the file cannot be written.
        """
        from prometheus_client import start_http_server

        address = _ADDRESS.fullmatch(self._target)
        try:
            if address is None:
                self._write()
                thread = threading.Thread(target=self._write_regularly, name="metrics", daemon=True)
                thread.start()
                self._opened.callback(self._close_file, thread)
            else:
                host = (address["host"] or "127.0.0.1").strip("[]")
                server, thread = start_http_server(int(address["port"]), host, self._registry)
                self._opened.callback(server.server_close)
                self._opened.callback(server.shutdown)
                echo(f"metrics: http://{address['host'] or host}:{server.server_port}/metrics", err=True)
        except (OSError, OverflowError) as error:
            what = (
                f"the file {self._target} cannot be written" if address is None else f"cannot listen on {self._target}"
            )
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
            detail = f"{what}: {reason}: give another file, PORT or HOST:PORT"
            raise ConfigError("arguments", "--metrics", detail) from error
        return self

    def __exit__(self, *_: object) -> None:
        with best_effort("the last state of the metrics"):
            self._opened.close()

    def begin(self, dataset: str, num_partitions: int) -> None:
        """Starts the metrics of a dataset, whose load is about to run so many partitions."""
        from mm_assets.pipeline.state.losses import KINDS
        from mm_assets.storage.urls import StorageFault

        with best_effort("a metric"):
            self._counts[dataset]["pending"] = num_partitions
            self._show_partitions(dataset)
            self._start.labels(dataset).set_to_current_time()
            self._progress.labels(dataset).set_to_current_time()
            # Prometheus sees no increase in a counter that first appears with an error.
            for counter in (self._shard_bytes, self._packed_bytes, self._samples):
                counter.labels(dataset)
            for counter, kinds in ((self._storage_errors, get_args(StorageFault)), (self._losses, KINDS)):
                for kind in kinds:
                    counter.labels(dataset, kind)

    def observed(self, engine: Engine) -> Engine:
        """Returns an engine that counts the attempts of another one."""
        return _ObservedEngine(engine, self)

    def started(self, task: Task) -> None:
        """Counts a partition as in flight."""
        with best_effort("a metric"):
            self._in_flight[task.spec.name].add(task.partition.key)
            self._show_partitions(task.spec.name)

    def submitted(self, task: Task) -> None:
        """Counts a retry if an earlier attempt at the partition ended."""
        with best_effort("a metric"):
            reason = self._causes.pop((task.spec.name, task.partition.key), None)
            if reason is not None:
                self._retries.labels(task.spec.name, reason).inc()

    def attempt_ended(self, task: Task, end: Ended | None) -> None:
        """Counts what an attempt did; None is one that the driver has canceled, as it does after a time-out."""
        from mm_assets.pipeline.chain import CHAIN

        with best_effort("a metric"):
            name, spec = task.spec.name, task.spec
            self._in_flight[name].discard(task.partition.key)
            self._show_partitions(name)
            report = None if end is None else end.report
            self._causes[name, task.partition.key] = _cause(end)
            if report is None:
                return
            if report.failure is not None and report.failure.storage_fault is not None:
                self._storage_errors.labels(name, report.failure.storage_fault).inc()
            ran = [stage for stage in CHAIN if stage.name in report.results]
            if any(stage.opens_shards(spec) for stage in ran):
                self._shard_bytes.labels(name).inc(task.size)
            for stage in ran:
                result = report.results[stage.name]
                self._stages.labels(name, stage.name).observe(result.seconds + result.check_seconds)
                if stage.packed_format is not None:
                    self._packed_bytes.labels(name).inc(sum(file.size for file in result.record.files.values()))

    def partition_ended(self, result: PartitionRun) -> None:
        """Counts a partition that is not tried again."""
        from mm_assets.pipeline.state.losses import kind_counts

        with best_effort("a metric"):
            name = result.dataset
            self._causes.pop((name, result.partition), None)
            self._in_flight[name].discard(result.partition)
            self._counts[name]["done" if result.ok else "failed"] += 1
            self._counts[name]["pending"] -= 1
            self._show_partitions(name)
            if not result.ok:
                return
            self._progress.labels(name).set_to_current_time()
            packed = [record for stage, record in result.records.items() if stage.packed_format is not None]
            self._samples.labels(name).inc(packed[0].counts["samples"] if packed else 0)
            for kind, number in kind_counts(result.records).items():
                self._losses.labels(name, kind).inc(number)

    def _show_partitions(self, dataset: str) -> None:
        counts, in_flight = self._counts[dataset], len(self._in_flight[dataset])
        states = {**counts, "in_flight": in_flight, "pending": max(counts["pending"] - in_flight, 0)}
        for state in ("done", "failed", "in_flight", "pending"):
            self._partitions.labels(dataset, state).set(states.get(state, 0))

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        write_to_textfile(self._target, self._registry)

    def _write_regularly(self) -> None:
        while not self._closed.wait(WRITE_SECONDS):
            with best_effort(f"the metrics of {self._target}"):
                self._write()

    def _close_file(self, thread: threading.Thread) -> None:
        self._closed.set()
        thread.join()
        self._write()


def _cause(end: Ended | None) -> str:
    """Returns why a partition is started again, if it is."""
    if end is None:
        return "timeout"
    if end.loss is not None:
        return end.loss.kind
    return "storage"


class _ObservedEngine:
    """An engine that reports to metrics what it is asked for and what it answers."""

    def __init__(self, engine: Engine, metrics: LoadMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self.spans_hosts = engine.spans_hosts
        self.group_bytes = engine.group_bytes
        self.fits = engine.fits
        self.running = engine.running
        self.submit_copy = engine.submit_copy
        self.close = engine.close

    @property
    def slots(self) -> int:
        return self._engine.slots

    def submit(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._metrics.submitted(task)
        self._engine.submit(tasks)

    def ended(self, timeout: float | None) -> Iterator[Ended]:
        for ended in self._engine.ended(timeout):
            self._metrics.attempt_ended(ended.task, ended)
            yield ended

    def cancel(self, task: Task) -> None:
        self._metrics.attempt_ended(task, None)
        self._engine.cancel(task)
