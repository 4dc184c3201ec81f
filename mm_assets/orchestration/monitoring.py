"""Run monitoring of Dagster's daemon, and runs that no launcher has started.

The daemon asks the run launcher after the Ray job, or the Kubernetes Job, of each run that is started, and fails a run
that has none. Runs that a process records by itself have none: those of a command, and the further runs of a load. For
them Dagster has the status "suspended": started, in progress, without a worker on purpose. It takes no place in the
queue, and it is left when the run ends. A run whose process is gone is ended by `runs.live_runs`.
"""

import os
import socket

import dagster as dg
from dagster import DagsterEventType

from mm_assets.orchestration.runs import LOAD_TAG

__all__ = ["MAX_RUNTIME_TAG", "asks_for_workers", "has_no_worker"]

MAX_RUNTIME_TAG = "dagster/max_runtime"  # seconds; with 0 run monitoring has no limit, whatever the instance's is


def has_no_worker(context: dg.OpExecutionContext) -> None:
    """Marks the run at hand as one without a worker that a launcher knows, if the daemon would ask for it."""
    if asks_for_workers(context.instance):
        event = dg.DagsterEvent(
            event_type_value=DagsterEventType.RUN_SUSPENDED.value,
            job_name=context.job_name,
            message=_what_it_means(context),
        )
        context.instance.report_dagster_event(event, context.run_id)


def _what_it_means(context: dg.OpExecutionContext) -> str:
    """What *Suspended* says about the run at hand, and how to stop it: the first thing that a reader wants to know."""
    first = context.instance.get_run_by_id(context.run.tags.get(LOAD_TAG, ""))
    if first is not None and not first.is_finished:  # a launched one, in whose process this run is executed
        how = f"terminate the first run of the load, {first.run_id}"
    else:
        process = f"process {os.getpid()} on {socket.gethostname()}"
        how = f"press Ctrl-C where it was started, or send SIGTERM to {process}"
    return (
        "This run is in progress. Dagster calls it suspended because no launcher has started it; run monitoring leaves "
        f"it alone, and Terminate does not reach it. To stop it, {how}."
    )


def asks_for_workers(instance: dg.DagsterInstance) -> bool:
    """Whether run monitoring is on, and the launcher can tell whether the worker of a run is there."""
    if not instance.run_monitoring_enabled:
        return False
    try:
        return instance.run_launcher.supports_check_run_worker_health
    except Exception:  # noqa: BLE001 - of a launcher whose package or cluster this host does not have, or its settings
        return True
