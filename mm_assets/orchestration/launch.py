"""Runs from the command line: the same jobs on the same instance as the UI's, one process per run at a time.

One bad partition never stops the others; what went wrong with it comes back as text. Nothing here prints.
"""

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import dagster as dg

from mm_assets.errors import ConfigError, MmAssetsError
from mm_assets.etl.dataset_store import DatasetStore
from mm_assets.etl.register import Registration, register
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.component import ShardDataset
from mm_assets.orchestration.partitions import job_name, manifest_job_name, shard_partitions
from mm_assets.spec import DatasetSpec

__all__ = [
    "PartitionRun",
    "declared_datasets",
    "ensure_dagster_home",
    "make_manifest",
    "register_dataset",
    "run_partitions",
]

_QUIET = {
    "loggers": {"console": {"config": {"log_level": "CRITICAL"}}}
}  # the event log has it all; a terminal wants a table
_HOME_SETTINGS = "# Settings of the local Dagster instance.\ntelemetry:\n  enabled: false\nnux:\n  enabled: false\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRun:
    """How one run ended.

    Attributes:
        dataset: dataset name.
        partition: partition key; empty for a manifest.
        run_id: Dagster's run id; empty where no run came about.
        failures: what went wrong, one line each; empty on success.
    """

    dataset: str
    partition: str
    run_id: str
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the run succeeded and every check passed."""
        return not self.failures


def ensure_dagster_home() -> Path:
    """The instance's folder, which the variable then names.

    It is $DAGSTER_HOME, else the nearest `dagster_home` in this folder or above it, else a new one here.
    """
    given = os.environ.get("DAGSTER_HOME")
    here = Path.cwd()
    if given:
        home = Path(given).expanduser().absolute()
    else:
        found = [folder / "dagster_home" for folder in (here, *here.parents) if (folder / "dagster_home").is_dir()]
        home = found[0] if found else here / "dagster_home"
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        (home / "dagster.yaml").write_text(_HOME_SETTINGS)
    os.environ["DAGSTER_HOME"] = str(home)
    return home


def open_instance() -> dg.DagsterInstance:
    """The Dagster instance that the UI shows too."""
    ensure_dagster_home()
    return dg.DagsterInstance.get()


def declared_datasets(module: str) -> dict[str, DatasetSpec]:
    """The datasets that a definitions module declares, by name.

    Raises:
        ConfigError: the module has no definitions, or a declaration in it is wrong.
    """
    found = [value for value in vars(importlib.import_module(module)).values() if _makes_definitions(value)]
    if not found:
        raise ConfigError(module, "module", "holds no Dagster definitions")
    specs: dict[str, DatasetSpec] = {}
    for value in found:
        definitions = value if isinstance(value, dg.Definitions) else value()
        tree = definitions.component_tree
        for component in tree.get_all_components(of_type=ShardDataset) if tree else ():
            specs[component.spec.name] = component.spec
    return specs


def _makes_definitions(value: object) -> bool:
    return isinstance(value, dg.Definitions) or type(value).__name__ == "LazyDefinitions"


def register_dataset(instance: dg.DagsterInstance, dataset: DatasetStore, *, new_schema: bool = False) -> Registration:
    """Registers the dataset's shards, in its folder and as the instance's dynamic partitions.

    Raises:
        SourceError: no shard was found, or the first could not be read.
        ConfigError: the declaration's schema settings changed and `new_schema` was not given.
    """
    found = register(dataset, new_schema=new_schema, wait=True)
    name = shard_partitions(dataset.spec).name or ""
    known = set(instance.get_dynamic_partitions(name))
    new = [p.key for p in found.partitions if p.key not in known]
    if new:
        instance.add_dynamic_partitions(name, new)
    return found


@lru_cache(maxsize=8)
def _jobs(spec_key: "_BySettings") -> dg.Definitions:
    return build_definitions(spec_key.spec)


class _BySettings:
    """A spec as a cache key: it holds mappings, which do not hash."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return hash(self.spec.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BySettings) and self.spec == other.spec


def _execute(spec: DatasetSpec, job: str, partition: str) -> PartitionRun:
    definition = _jobs(_BySettings(spec)).resolve_job_def(job)
    with dg.DagsterInstance.get() as instance:
        result = definition.execute_in_process(
            run_config=_QUIET, instance=instance, partition_key=partition or None, raise_on_error=False
        )
    failures = [] if result.success else list(_failures(result))
    return PartitionRun(dataset=spec.name, partition=partition, run_id=result.run_id, failures=tuple(failures))


def _failures(result: dg.ExecuteInProcessResult) -> Iterator[str]:
    said = False
    for check in result.get_asset_check_evaluations():
        if not check.passed:
            said = True
            count = check.metadata.get("num_violations")
            shown = f"{count.value} violations" if count is not None else "violated"
            yield f"{check.asset_key.path[-1]}: check {check.check_name}: {shown}: {check.description or ''}".rstrip(
                ": "
            )
    for event in result.all_events:
        if event.is_step_failure and not said:
            data = event.step_failure_data
            given = data.user_failure_data.description if data.user_failure_data else None
            message = given or (data.error.message if data.error else "failed")
            said = True
            yield f"{event.step_key}: {message.strip()}"
    if not said:
        yield "the run failed before its first step"


def _execute_pack(spec: DatasetSpec, partition: str) -> PartitionRun:
    return _execute(spec, job_name(spec), partition)


def run_partitions(
    work: Sequence[tuple[DatasetSpec, str]],
    *,
    num_processes: int = 1,
    started: Callable[[str, str], None] | None = None,
) -> Iterable[PartitionRun]:
    """Runs partitions and yields each as it ends.

    Args:
        work: (spec, partition key) pairs.
        num_processes: 1 runs in this process; more start as many others.
        started: told of each (dataset, partition) when it begins, with one process only.
    """
    if num_processes <= 1:
        for spec, key in work:
            if started is not None:
                started(spec.name, key)
            yield _execute_pack(spec, key)
        return
    # Spawned and not forked: a fork of a process with threads (Arrow, DuckDB) may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(work)) or 1, mp_context=context) as pool:
        waiting = {pool.submit(_execute_pack, spec, key): (spec, key) for spec, key in work}
        while waiting:
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                spec, key = waiting.pop(future)
                error = future.exception()
                if error is None:
                    yield future.result()
                else:  # the process died, for lack of memory for instance: that is this partition's failure, not ours
                    failure = f"its process ended: {type(error).__name__}: {error}"
                    yield PartitionRun(dataset=spec.name, partition=key, run_id="", failures=(failure,))


def make_manifest(spec: DatasetSpec) -> PartitionRun:
    """Runs the dataset's manifest job in this process."""
    try:
        return _execute(spec, manifest_job_name(spec), "")
    except MmAssetsError as error:
        return PartitionRun(dataset=spec.name, partition="", run_id="", failures=(str(error),))
