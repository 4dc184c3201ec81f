"""The engine that a declaration names."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mm_assets.pipeline.load.engine import Engine, Started, unobserved
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.spec import EngineOptions

__all__ = ["open_engine"]


def open_engine(
    options: EngineOptions, *, jobs: int, most: int, started: Started = unobserved
) -> AbstractContextManager[Engine]:
    """An engine, to be closed by its `with` block.

    Args:
        options: as declared.
        jobs: partitions at work at a time in processes, where the options give none.
        most: partitions that there are to run; with 0 some may follow nevertheless.
        started: called with a task as it begins to work, and as it begins a stage whose name is known.

    Raises:
        MissingExtraError: the engine's package is not installed.
        ConfigError: it cannot be connected to.
    """
    if options.type == "ray":
        from mm_assets.pipeline.load.ray_tasks import RayTasks

        return RayTasks(options.address, num_tasks=options.jobs, memory=options.memory_bytes, started=started)
    num_processes = options.jobs or jobs
    return Processes(min(num_processes, most or num_processes), prepares=most > 0, started=started)
