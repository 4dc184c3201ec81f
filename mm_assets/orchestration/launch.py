"""What commands do with the Dagster instance: the same jobs and events as in the UI. Nothing here prints."""

import hashlib
import importlib
import importlib.util
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from mm_assets.errors import ConfigError, SourceError, first_line
from mm_assets.orchestration.checks import settled_checks
from mm_assets.orchestration.component import ShardDataset, wrong_declarations_left_out
from mm_assets.orchestration.event_log import is_known_manifest
from mm_assets.orchestration.observed_shards import observe_shards
from mm_assets.orchestration.partitions import add_partitions, shard_partitions
from mm_assets.orchestration.recorded_load import RecordedLoad
from mm_assets.orchestration.recorder import is_unavailable, unrecorded_message
from mm_assets.orchestration.viewer import expect_viewer
from mm_assets.pipeline.dagster_home import (
    declared_in,
    ensure_dagster_home,
    missing_databases,
    unusable_home,
    unusable_named,
)
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.exports import write_indexes
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import build_manifest
from mm_assets.pipeline.state.registration import Registration, register
from mm_assets.pipeline.state.staleness import DatasetState

__all__ = [
    "Recorded",
    "declared_datasets",
    "open_instance",
    "prepare_home",
    "register_dataset",
    "remove_partitions",
    "start_rollup",
    "sync",
]

_REFUSED = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_FULL", "SQLITE_IOERR")  # the last one also of a full disk


def open_instance() -> dg.DagsterInstance:
    """The Dagster instance that the UI shows too.

    Raises:
        SourceError: its folder or a database of it cannot be opened for writing, or its database server is unavailable.
    """
    prepare_home()
    with unavailable_named():
        return dg.DagsterInstance.get()


def prepare_home() -> None:
    """Creates the folder of the Dagster instance with its databases, unless a server has them; opens none.

    Raises:
        SourceError: the folder cannot be written.
    """
    home = ensure_dagster_home()
    with unusable_named(home), unavailable_named():
        _create_databases(home)
        expect_viewer(home)


@contextmanager
def unavailable_named() -> Iterator[None]:
    """Turns the error of a database that is unavailable, or that SQLite cannot write, into one that says what to do.

    Raises:
        SourceError: instead of that error.
    """
    try:
        yield
    except Exception as error:  # Dagster wraps the errors of a database in its own; all others are raised again
        home = os.environ.get("DAGSTER_HOME", "DAGSTER_HOME")
        cause: BaseException | None = error
        while cause is not None:
            if is_unavailable(cause):
                detail = (
                    f"Dagster's database is unavailable: {first_line(error)}: run the command again when it is back"
                )
                raise SourceError(home, detail) from error
            if getattr(cause, "sqlite_errorname", "").startswith(_REFUSED):
                raise unusable_home(home, str(cause)) from error
            cause = cause.__cause__
        raise


def _create_databases(home: Path) -> None:
    """Creates the instance's databases, unless its settings place them elsewhere.

    Dagster creates them in place: a command at the same time, and every one after a kill, finds them without tables.
    So they are created beside their place and renamed; the first of several commands wins, and none waits.
    """
    missing = missing_databases(home)
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix=".new-", dir=home) as new:
        Path(new, "dagster.yaml").write_bytes(
            (home / "dagster.yaml").read_bytes()
        )  # without one Dagster warns, of this folder
        with dg.DagsterInstance.from_config(new):
            pass
        for name in missing:
            try:
                Path(new, name).rename(home / name)
            except OSError:
                if not (home / name).is_dir():  # else another command was faster
                    raise


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
            declared_in(component.declared.where, component.declared.name, location or module)
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
        MmAssetsError: as `register`; the instance's database is unavailable.
    """
    found = register(dataset, new_schema=new_schema, wait=True, sleep=sleep)
    with unavailable_named():
        observe_shards(instance, dataset.spec, found, add_partitions(instance, dataset.spec, found.partitions))
    return found


def remove_partitions(dataset: DatasetStore, *, dry_run: bool) -> list[str] | None:
    """Removes the dynamic partitions from Dagster whose shards are gone; events of them, and so their history, remain.

    Nothing is removed unless Dagster has recorded the newest manifest of this folder: another folder may have a dataset
    of the same name.

    Args:
        dataset: the dataset's folder.
        dry_run: removes nothing.

    Returns:
        The keys of these partitions, or None if Dagster does not know the newest manifest.

    Raises:
        MmAssetsError: the folder or the instance's database is not available.
    """
    content = dataset.store.found_bytes("manifest.json")
    with unavailable_named(), dg.DagsterInstance.get() as instance:
        digest = "" if content is None else hashlib.sha256(content).hexdigest()
        name = shard_partitions(dataset.spec).name or ""
        known = instance.get_dynamic_partitions(name)  # before the registered ones: others may be added meanwhile
        missing = sorted(set(known) - dataset.partitions().keys())
        if missing and not is_known_manifest(instance, dataset.spec, digest):
            return None
        for key in missing if not dry_run else ():
            instance.delete_dynamic_partition(name, key)
    return missing


def start_rollup(instance: dg.DagsterInstance, dataset: DatasetStore, num_partitions: int) -> str | None:
    """Has Dagster show one check result for all partitions if there are very many; returns a message the first time.

    Raises:
        MmAssetsError: the instance's database is unavailable.
    """
    with unavailable_named():
        return settled_checks(instance, dataset.spec, num_partitions)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What was recorded: the number of published partitions, the keys of failed ones, and whether the manifest was."""

    num_partitions: int
    failed: tuple[str, ...]
    manifest: bool


def sync(dataset: DatasetStore, *, makes_manifest: bool = False) -> Recorded:
    """Records in Dagster what was done and not recorded, in a run of the job `<dataset>_load`.

    Args:
        dataset: the dataset's folder.
        makes_manifest: whether to build the manifest first, which takes the dataset's true declaration.

    Raises:
        MmAssetsError: something could not be recorded, or the manifest could not be built.
    """
    report = build_manifest(dataset) if makes_manifest else None
    if report is not None and dataset.spec.exports:
        write_indexes(dataset, report.state.published())
    state, load = DatasetState(dataset), str(uuid.uuid4())
    partitions = tuple(state.partitions.values())
    found = Registration(partitions=partitions, added=(), changed=(), removed=(), unsettled=(), seen={})
    recorder = RecordedLoad(state, load, found, attempts=True).recorder
    with recorder:
        recorder.add_manifest(report)
    if recorder.unrecorded:
        raise SourceError(dataset.store.url, unrecorded_message(dataset.spec, recorder.unrecorded))
    return Recorded(
        num_partitions=recorder.num_published, failed=tuple(recorder.failed), manifest=recorder.has_manifest
    )
