"""Runs of the command line are listed as those of the UI are: on the page of their job, and in the timeline.

Dagster lists a run there if it names the code location that it is of, as runs do that its webserver or daemon started.
`execute_in_process` has no argument for that, but the instance that creates the run does.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import dagster as dg
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from mm_assets.orchestration.partitions import load_job_name
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["declared_in", "listed_under_its_job"]

# Definitions module and code location by file and name of a declaration.
_MODULES: dict[tuple[str, str], tuple[str, str]] = {}


def declared_in(spec: DatasetSpec, module: str, location: str) -> None:
    """Notes the definitions module that declares a dataset, and the name of its code location."""
    _MODULES[spec.where, spec.name] = module, location


@contextmanager
def listed_under_its_job(
    instance: dg.DagsterInstance, spec: DatasetSpec, parent: dg.DagsterRun | None = None
) -> Iterator[None]:
    """Within it, the load that the instance creates names its code location, if one declares the dataset.

    Args:
        instance: which creates the run.
        spec: the declaration.
        parent: the run whose load it continues, if any: it is listed as that.
    """
    origin = _origin(spec) if parent is None else parent.remote_job_origin
    if origin is None:
        yield
        return
    vars(instance)["create_run_for_job"] = partial(instance.create_run_for_job, remote_job_origin=origin)
    try:
        yield
    finally:
        del vars(instance)["create_run_for_job"]


def _origin(spec: DatasetSpec) -> RemoteJobOrigin | None:
    if (spec.where, spec.name) not in _MODULES:
        return None
    module, name = _MODULES[spec.where, spec.name]
    target = LoadableTargetOrigin(executable_path=sys.executable, module_name=module)
    location = ManagedGrpcPythonEnvCodeLocationOrigin(target, location_name=name)
    return RemoteJobOrigin(RemoteRepositoryOrigin(location, SINGLETON_REPOSITORY_NAME), load_job_name(spec))
