"""Runs from the command line's side: processes that die, partitions that are taken, failures that say why."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.storage.tags import TagType, get_tag_type

from mm_assets.errors import ConfigError, SourceError
from mm_assets.filters.registry import build_filter
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import declared_datasets, open_instance, register_dataset
from mm_assets.orchestration.runs import PROCESS_TAG
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Claims, process_is_gone, process_tag
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import FAILED, loss_totals
from mm_assets.pipeline.state.staleness import DatasetState

from .loads import run_partitions

WAIT = 200.0  # for what takes seconds on an idle machine

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]
Module = Callable[[str, str], str]

FILTERS = '''
import os, signal
from pathlib import Path
from mm_assets.filters.base import Filter

class Killer(Filter):
    """Kills the first process that gets here, or every one if its note cannot be made."""

    scope = "row"

    def __init__(self, *, note: str) -> None:
        self.note = note

    def judge(self, block):
        try:
            os.mkdir(self.note)
        except FileExistsError:
            return ()
        except FileNotFoundError:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

class Broken(Filter):
    """Raises what no library of ours raises."""

    scope = "row"

    def judge(self, block):
        raise RuntimeError("the moon is in the wrong place")


class Noting(Filter):
    """Writes the id of the process that it works in."""

    scope = "row"

    def __init__(self, *, note: str) -> None:
        self.note = Path(note)

    def judge(self, block):
        self.note.write_text(str(os.getpid()))
        return ()
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Writes a module that this process and those it starts can import; it answers with the name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    written: list[str] = []

    def write(stem: str, code: str) -> str:
        name = f"{stem}_{uuid.uuid4().hex[:8]}"
        (folder / f"{name}.py").write_text(code)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def runs_of(instance: dg.DagsterInstance, partition: str) -> list[dg.DagsterRun]:
    return list(instance.get_runs(dg.RunsFilter(tags={"dagster/partition": partition})))


def test_a_partition_whose_process_dies_is_repeated(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, module: Module, tmp_path: Path
) -> None:
    """A process that is killed once costs nothing; a partition that kills each fails with the reason and what to do."""
    folder = inbox("captions-00000.tar")
    for name in "abc":
        shutil.copy(folder / "captions-00000.tar", folder / f"{name}.tar")
    (folder / "captions-00000.tar").unlink()
    once = {"type": f"{module('killing', FILTERS)}:Killer", "note": str(tmp_path / "killed")}
    spec = demo_spec("captions", shards=str(folder), filters=(once,))
    register_dataset(instance, DatasetStore(spec))
    ended = run_partitions([(spec, key) for key in "abc"], num_processes=2)
    assert sorted(run.partition for run in ended if run.ok) == ["a", "b", "c"]
    assert (tmp_path / "killed").exists()

    always = {"type": f"{module('killing', FILTERS)}:Killer", "note": str(tmp_path / "missing" / "note")}
    spec = demo_spec("captions", shards=str(folder), filters=(always,))
    (dead, other) = run_partitions([(spec, "a"), (spec, "b")], num_processes=2)
    assert {dead.partition, other.partition} == {"a", "b"}
    again = f"`mm-assets run --dataset captions --partition {dead.partition}` runs the partition alone"
    reason = f"the process was killed (signal 9; out of memory?), 4 times: {again}"
    assert dead.failures == (f"filtered_rows: {reason}",)
    (total,) = loss_totals(DatasetState(DatasetStore(spec)), [dead.partition])
    assert (total.example.partition, total.example.stage) == (dead.partition, "filtered_rows")
    assert (total.example.reason, total.example.detail) == (FAILED, reason)
    (latest,) = instance.get_runs(limit=1)
    assert latest.status == dg.DagsterRunStatus.FAILURE
    (again_run,) = run_partitions([(demo_spec("captions", shards=str(folder), filters=(once,)), dead.partition)])
    assert again_run.ok
    assert loss_totals(DatasetState(DatasetStore(spec)), [dead.partition]) == []


@pytest.mark.parametrize("num_processes", [0, -1])
def test_without_further_processes_runs_are_in_this_one(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, module: Module, tmp_path: Path, num_processes: int
) -> None:
    """A load without worker processes runs partitions in its own."""
    noting = {"type": f"{module('noting', FILTERS)}:Noting", "note": str(tmp_path / "pid")}
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")), filters=(noting,))
    register_dataset(instance, DatasetStore(spec))
    (ended,) = run_partitions([(spec, "captions-00000")], num_processes=num_processes)
    assert ended.ok
    assert (tmp_path / "pid").read_text() == str(os.getpid())


def test_each_step_claims_its_partition_and_names_its_process(
    instance: dg.DagsterInstance,
    dagster_home: Path,
    demo_spec: SpecOf,
    inbox: Inbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While packed files are made other loads see the claim of the run, which is tagged with its process."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    seen: list[bool] = []

    def packed(*args: object, **options: object) -> object:
        (run,) = runs_of(instance, "captions-00000")
        (claim,) = Claims(DatasetStore(spec), "another").others()
        assert (claim.load, "captions-00000" in claim) == (run.run_id, True)
        seen.append(
            process_is_gone(run.run_id, run.tags.get(".dagster/mm_assets.process")) is (None if tag is None else False)
        )
        return real(*args, **options)

    tag = process_tag("any")
    real = stages.packed
    monkeypatch.setattr(stages, "packed", packed)
    job = build_definitions(spec).resolve_job_def("captions_pack")
    assert job.execute_in_process(instance=instance, partition_key="captions-00000").success
    assert seen == [True]


def test_a_load_is_listed_under_its_job(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """A load of a declared dataset is a run of its code location; that of an undeclared one is of none."""
    shards = str(inbox("captions-00000.tar"))
    for spec in (demo_spec("captions", shards=shards), demo_spec("captions", shards=shards, name="other")):
        register_dataset(instance, DatasetStore(spec))
        run_partitions([(spec, "captions-00000")])
    assert {run.job_name for run in instance.get_runs()} == {"captions_load", "other_load"}
    label = {".dagster/repository": "__repository__@demo_project"}
    assert [run.job_name for run in instance.get_runs(dg.RunsFilter(tags=label))] == ["captions_load"]


def test_tags_for_the_pipeline_are_hidden(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """The run of a load has no tag that pages show beside those that tell a person something."""
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")))
    register_dataset(instance, DatasetStore(spec))
    run_partitions([(spec, "captions-00000")])
    (run,) = instance.get_runs()
    assert {name for name in run.tags if get_tag_type(name) is TagType.USER_PROVIDED} == set()
    assert run.tags.get(PROCESS_TAG, "") == (process_tag(run.run_id) or "")


def test_a_command_that_is_killed_at_first_leaves_a_usable_instance(dagster_home: Path) -> None:
    """A kill while Dagster creates a database leaves no part of one in sight; the next command creates it."""
    code = (
        "import os, signal\n"
        "from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage\n"
        "from mm_assets.orchestration.launch import open_instance\n"
        "SqliteEventLogStorage._initdb = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "open_instance()"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in dagster_home.glob("[!.]*")) == ["dagster.yaml"]
    with open_instance() as opened:
        opened.add_dynamic_partitions("a_shards", ["b"])
        assert opened.get_dynamic_partitions("a_shards") == ["b"]


def test_databases_that_are_elsewhere_are_not_created(dagster_home: Path, tmp_path: Path) -> None:
    """An instance whose settings name a storage gets no database in its own folder."""
    (dagster_home / "dagster.yaml").write_text(f"storage: {{sqlite: {{base_dir: {tmp_path / 'elsewhere'}}}}}\n")
    with open_instance() as opened:
        opened.add_dynamic_partitions("a_shards", ["b"])
    assert not list(dagster_home.glob("*/*.db"))
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize("has_databases", [True, False])
def test_an_instance_that_is_another_users_is_named(has_databases: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder or a database without write permission is refused with its name and what to do, not with a traceback."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as restored:  # pytest's own folders are closed to others
        home = Path(folder)
        monkeypatch.setenv("DAGSTER_HOME", folder)
        open_instance().dispose()
        if not has_databases:
            shutil.rmtree(home / "schedules")
        for path in (*home.rglob("*"), home):
            restored.callback(path.chmod, 0o700)
            path.chmod(0o555 if path.is_dir() else 0o444)
        if os.geteuid() == 0:  # no permission stops root
            restored.callback(os.seteuid, 0)
            os.seteuid(65534)
        with pytest.raises(
            SourceError, match=f"give {home} write access and free space, or set DAGSTER_HOME to a folder of your own"
        ):
            open_instance()


def test_a_process_tag_speaks_of_its_own_run_only() -> None:
    """A tag that is inherited, truncated, or of another host determines nothing; a live process is not gone."""
    tag = process_tag("one")
    if tag is None:
        pytest.skip("this system has no /proc")
    assert process_is_gone("one", tag) is False
    assert process_is_gone("two", tag) is None
    assert process_is_gone("one", None) is None
    assert process_is_gone("one", tag.rpartition(" ")[0]) is None
    run_id, place, boot, pid, start = tag.split(" ")
    assert process_is_gone("one", " ".join((run_id, "elsewhere/x", boot, pid, start))) is None
    assert process_is_gone("one", " ".join((run_id, place, "another-boot", pid, start))) is None
    assert process_is_gone("one", " ".join((run_id, place, boot, pid, str(int(start) + 1)))) is True


def test_a_failure_says_what_was_raised_first(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, module: Module
) -> None:
    """An exception of a user's filter is shown with its message, sample and shard, not as Dagster's wrapping of it."""
    broken = {"type": f"{module('broken', FILTERS)}:Broken"}
    spec = demo_spec("captions", shards=str(inbox("captions-00000.tar")), filters=(broken,))
    register_dataset(instance, DatasetStore(spec))
    (run,) = run_partitions([(spec, "captions-00000")])
    (failure,) = run.failures
    assert failure.startswith("filtered_rows: Broken: raised RuntimeError: the moon is in the ")
    assert re.search(r"on sample '\d+' of .*captions-00000\.tar", failure)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise RuntimeError('no such\\nluck')", "RuntimeError: no such luck"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("x = 1", "holds no Dagster definitions"),
        ("import dagster as dg\n@dg.definitions\ndef defs():\n    return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_named(module: Module, dagster_home: Path, code: str, says: str) -> None:
    """Whatever a definitions module raises comes as one error in one line that names the module."""
    name = module("wrong", code)
    with pytest.raises(ConfigError, match=says) as caught:
        declared_datasets(name)
    assert str(caught.value).startswith(f"{name}: module: ")
    assert "\n" not in str(caught.value)


def test_a_filter_module_that_fails_at_import_is_named(module: Module) -> None:
    """A filter's module that raises anything at import is a wrong declaration, with what it raised."""
    name = module("raising", "raise RuntimeError('no licence')")
    with pytest.raises(ConfigError, match=r"filters\[0\]\.type: .*cannot be imported: RuntimeError: no licence"):
        build_filter({"type": f"{name}:Any"}, where="here", key="filters[0]")
