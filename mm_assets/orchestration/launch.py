"""Runs from the command line: the same jobs on the same instance as the UI's, one process per run at a time.

A bad partition never stops the others; its errors are returned as text. Nothing here prints.
"""

import importlib
import importlib.util
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from mm_assets.errors import ConfigError, SourceError
from mm_assets.orchestration.component import ShardDataset, wrong_declarations_left_out
from mm_assets.orchestration.listing import declared_in
from mm_assets.orchestration.load import Load, Recorded, catch_up, execute_load, named_keys
from mm_assets.orchestration.mirror import lost_said
from mm_assets.orchestration.observed_shards import observe_shards
from mm_assets.orchestration.partitions import add_partitions
from mm_assets.orchestration.patience import away_named, patient, unusable_said
from mm_assets.orchestration.runs import LOAD_TAG, MOST_PARTITIONS, full_pool_said
from mm_assets.orchestration.viewer import expect_viewer
from mm_assets.pipeline.chain import Stage
from mm_assets.pipeline.dagster_home import find_dagster_home
from mm_assets.pipeline.load.engine import Engine
from mm_assets.pipeline.load.tasks import PartitionRun
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import Registration, register
from mm_assets.pipeline.state.staleness import Present
from mm_assets.summaries import counted

__all__ = [
    "declared_datasets",
    "ensure_dagster_home",
    "open_instance",
    "pool_wait",
    "register_dataset",
    "run_load",
    "sync",
]

_DATABASES = ("history", "schedules")  # the folders of Dagster's databases, below the instance's
_HOME_SETTINGS = """\
# Settings of the local Dagster instance.
telemetry: {enabled: false}
nux: {enabled: false}
# Runs of the daemon that never begin are failed, and runs whose process was killed are repeated; failed ones are not.
# Of the longest time that a run may take, loads are exempt.
run_monitoring: {enabled: true, start_timeout_seconds: 300, max_runtime_seconds: 86400}
run_retries: {enabled: true, max_retries: 2, retry_on_asset_or_op_failure: false}
"""


def ensure_dagster_home(project: Path | None = None) -> Path:
    """The folder of `find_dagster_home`, made if it is missing; the variable names it afterwards.

    Raises:
        SourceError: the folder cannot be made or written.
    """
    home = find_dagster_home(project)
    with _unusable_named(home):
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "dagster.yaml").exists():
            draft = home / f".dagster.yaml.{os.getpid()}"
            draft.write_text(_HOME_SETTINGS)
            draft.replace(home / "dagster.yaml")
    os.environ["DAGSTER_HOME"] = str(home)
    return home


def open_instance() -> dg.DagsterInstance:
    """The Dagster instance that the UI shows too.

    Raises:
        SourceError: its folder or a database of it cannot be opened for writing, or its database server is away.
    """
    home = ensure_dagster_home()
    with _unusable_named(home), away_named():
        _create_databases(home)
        expect_viewer(home)
        return patient(dg.DagsterInstance.get())


def _create_databases(home: Path) -> None:
    """Creates the instance's databases, unless its settings place them elsewhere.

    Dagster creates them in place: a command at the same time, and every one after a kill, finds them without tables.
    So they are created beside their place and renamed; the first of several commands wins, and none waits.
    """
    missing = [name for name in _DATABASES if not (home / name).exists()]
    settings = (home / "dagster.yaml").read_bytes()
    if not missing or re.search(rb"^(run_|event_log_|schedule_)?storage\s*:", settings, re.M):
        return
    with tempfile.TemporaryDirectory(prefix=".new-", dir=home) as new:
        Path(new, "dagster.yaml").write_bytes(settings)  # without one Dagster warns, of this folder
        with dg.DagsterInstance.from_config(new):
            pass
        for name in missing:
            try:
                Path(new, name).rename(home / name)
            except OSError:
                if not (home / name).is_dir():  # else another command was faster
                    raise


@contextmanager
def _unusable_named(home: Path) -> Iterator[None]:
    """Turns the system's refusal to write the instance's files into a `SourceError` that says what to do."""
    try:
        yield
    except OSError as error:
        raise SourceError(error.filename or home, unusable_said(home, error.strerror or str(error))) from error


def declared_datasets(module: str, *, location: str | None = None) -> dict[str, DatasetSpec | ConfigError]:
    """The datasets that a definitions module declares, by name: for a wrong declaration the error.

    Args:
        module: its name.
        location: name of the code location that loads it; by default that of the module.

    Raises:
        ConfigError: the module cannot be loaded or has no definitions.
    """
    try:
        with wrong_declarations_left_out():
            values = vars(importlib.import_module(module)).values()
            lazy = [value for value in values if type(value).__name__ == "LazyDefinitions"]
            found = [*(value() for value in lazy), *(value for value in values if isinstance(value, dg.Definitions))]
            trees = [definitions.component_tree for definitions in found]
            components = [c for tree in trees if tree for c in tree.get_all_components(of_type=ShardDataset)]
    except Exception as error:  # a module is its author's code and may raise anything
        reason: BaseException = error
        while type(reason).__name__ == "ComponentTreeException" and reason.__cause__ is not None:
            reason = reason.__cause__  # it draws a tree of files and leaves the reason to its cause
        said = " ".join(str(reason).split())
        raise ConfigError(
            module, "module", f"cannot be loaded: {type(reason).__name__}: {said}{_wrong_types(module, said)}"
        ) from error
    if not found:
        raise ConfigError(module, "module", "holds no Dagster definitions")
    for component in components:
        if not isinstance(component.declared, ConfigError):
            declared_in(component.declared, module, location or module)
    return {component.name: component.declared for component in components}


def _wrong_types(module: str, said: str) -> str:
    """The files whose component type Dagster does not find, which its error does not name, and what to do."""
    found = re.fullmatch(r"Module `(?P<module>[\w.]+)` (not found|has no attribute `(?P<name>\w+)`)\.", said)
    package = importlib.util.find_spec(module.partition(".")[0])
    if found is None or package is None:
        return ""
    wrong = re.escape(".".join(filter(None, (found["module"], found["name"]))))
    declared = re.compile(rf"^type:\s*['\"]?{wrong}\b", re.MULTILINE)
    files = [file for folder in package.submodule_search_locations or () for file in Path(folder).rglob("defs.yaml")]
    named = [str(file) for file in sorted(files) if declared.search(file.read_text(encoding="utf-8", errors="replace"))]
    advice = f"correct it, such as {ShardDataset.__module__.rpartition('.')[0]}.{ShardDataset.__name__}"
    return f" It is the `type` of {', '.join(named)}: {advice}" if named else ""


def register_dataset(
    instance: dg.DagsterInstance,
    dataset: DatasetStore,
    *,
    new_schema: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Registration:
    """Registers the dataset's shards in its folder, as `register` does, and as the instance's dynamic partitions.

    Raises:
        MmAssetsError: as `register`; the instance's database is away.
    """
    found = register(dataset, new_schema=new_schema, wait=True, sleep=sleep)
    with away_named():
        add_partitions(instance, dataset.spec, found.partitions)
        observe_shards(instance, dataset.spec, found)
    return found


def run_load(
    spec: DatasetSpec,
    keys: Sequence[str],
    *,
    engine: Engine,
    first: Stage | None = None,
    observed: Callable[[PartitionRun], object] = lambda _: None,
    present: Present | None = None,
) -> PartitionRun:
    """Runs registered partitions and makes the manifest, as runs of the job `<dataset>_load` in this process.

    Args:
        spec: the declaration.
        keys: the partitions; none makes the manifest only.
        engine: where they run.
        first: as `Load.first`.
        observed: called with each partition as it ends.
        present: the dataset as it is, if that is known.

    Returns:
        How the manifest, and what is not about one partition, ended; its partition is empty.
    """
    failures: list[str] = []
    dataset = DatasetStore(spec) if present is None else present.dataset
    named = keys if len(keys) <= MOST_PARTITIONS else ()
    config = {"first_stage": "" if first is None else first.name}
    tags: dict[str, str] = {}
    run_id = ""
    with Load(dataset=dataset, keys=keys, engine=engine, first=first, observed=observed, present=present) as load:
        while not load.is_complete:
            run_id, recorded = str(uuid.uuid4()), load.num_runs
            try:
                said = _execute(spec, load.run, run_id=run_id, keys=named, tags=tags, **config)
            except SourceError as error:
                said = (error.detail,)
                failures.append(error.detail)
            if load.num_runs == recorded:  # it did not come to its end
                failures += said
                break
            tags = tags or {LOAD_TAG: run_id}
        if load.refusal and load.is_complete:  # else the run that failed has said it
            failures.append(load.refusal)
        if load.unrecorded:
            failures.append(lost_said(spec, load.unrecorded))
    return PartitionRun(
        dataset=spec.name,
        partition="",
        run_id=run_id,
        failures=tuple(dict.fromkeys(failures)),
        warnings=tuple(load.warnings),
        present=load.present if load.is_complete else None,
    )


def pool_wait(dataset: DatasetStore) -> str | None:
    """What a load of the dataset will wait for, by the pool that it declares; None if for nothing."""
    if dataset.spec.pool is None:
        return None
    with away_named(), patient(dg.DagsterInstance.get()) as instance:
        return full_pool_said(instance, dataset)


def sync(dataset: DatasetStore, *, makes_manifest: bool = False) -> Recorded:
    """Records in Dagster what was done and not recorded, in a run of the job `<dataset>_load`.

    Args:
        dataset: the dataset's folder.
        makes_manifest: as for `catch_up`.

    Raises:
        SourceError: the run failed, other than by the partitions that had failed.
    """
    recorded: list[Recorded] = []

    def drive(context: dg.OpExecutionContext) -> None:
        found = catch_up(context, dataset, makes_manifest=makes_manifest)
        recorded.append(found)
        if found.failed:  # Dagster shows partitions as failed that were planned in a run that failed
            said = f"{counted(len(found.failed), 'partition')} had failed: {named_keys(found.failed)}"
            raise dg.Failure(description=said, allow_retries=False)

    failures = _execute(dataset.spec, drive, run_id=str(uuid.uuid4()))
    if not recorded:
        raise SourceError(dataset.store.url, failures[0])
    return recorded[0]


def _execute(spec: DatasetSpec, drive: Callable[[dg.OpExecutionContext], object], **options: Any) -> tuple[str, ...]:
    """Executes a load with its driver in this process, as `execute_load`: why it failed.

    Raises:
        SourceError: the instance's database is away.
    """
    with away_named(), patient(dg.DagsterInstance.get()) as instance:
        result = execute_load(instance, spec, drive, **options)
    return () if result.success else tuple(_failures(result.all_events))


def _failures(events: Iterable[dg.DagsterEvent]) -> Iterator[str]:
    """Why a load failed, other than by its partitions."""
    data = [event.step_failure_data for event in events if event.is_step_failure]
    for found in data:
        given = found.user_failure_data.description if found.user_failure_data else None
        yield (given or _innermost(found.error)).strip()
    if not data:
        yield "the run failed before its first step"


def _innermost(error: Any) -> str:
    """The error raised first, which Dagster wraps in an error of its own, whose class is not public."""
    while error is not None and error.cause is not None:
        error = error.cause
    return "failed" if error is None else str(error.message)
