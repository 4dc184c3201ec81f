"""Only what is stale runs, and it is what `status` and `run --dry-run` announced; what is forced is announced too."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner, Result

from mm_assets.cli.main import main
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.runs import load_config
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.storage.files import SourceFile

from ..pipeline.chain import record_of

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]
STAGES = [stage.name for stage in CHAIN[:-1]]
FILTER = """
from mm_assets.filters import Drop, Filter

class Few(Filter):
    needs_content = False

    def judge(self, block):
        return [Drop(int(row), "any", None) for row in block.rows_of("image")[:LIMIT]]

LIMIT = {}
"""


class Work:
    """A dataset of two partitions, `run` and `status` over it, and a record of what they did."""

    def __init__(self, folder: Path, shards: Path, instance: dg.DagsterInstance, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.instance = instance
        self.patch = patch
        self.given = ["--shards", str(shards), "--root", str(folder / "out"), "--dataset", "docs"]
        self.settings: dict[str, str] = {}
        self.opened: list[str] = []

        def opened(url: str, *rest: Any) -> SourceFile:
            self.opened.append(Path(url).stem)
            return SourceFile(url, *rest)

        patch.setattr("mm_assets.pipeline.state.folder.SourceFile", opened)

        def in_process(_: int, **given: Any) -> Processes:
            return Processes(0, **given)  # no worker, so that `opened` is called for each file

        patch.setattr("mm_assets.pipeline.load.engine_choice.Processes", in_process)
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        self.write_filter(0)

    def write_filter(self, limit: int) -> None:
        """Writes the module of the filter `few:Few`, which the next command imports."""
        (self.folder / "few.py").write_text(FILTER.format(limit))
        self.patch.delitem(sys.modules, "few", raising=False)
        importlib.invalidate_caches()

    def __call__(self, *arguments: str, code: int = 0) -> Result:
        words = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        name, *options = arguments
        done = CliRunner().invoke(main, [name, *self.given, *words, *options], catch_exceptions=False)
        assert done.exit_code == code, done.output
        return done

    def status(self) -> Any:
        return json.loads(self("status", "--json").stdout)["datasets"]["docs"]

    def pending(self) -> dict[str, str]:
        """By key, the stage at which `status` says that the partition starts."""
        return {key: group["first"] for group in self.status()["pending"] for key in group["partitions"]}

    def announced(self, *options: str) -> dict[str, str]:
        """The same as `run --dry-run` says it; nothing is changed by that."""
        before = files(self.folder)
        said = self("run", "--dry-run", *options).stdout
        assert files(self.folder) == before
        return dict(re.findall(r"^docs/(\S+): from (\w+): ", said, re.MULTILINE))

    def ran(self, *options: str) -> dict[str, str]:
        """By key, the first stage that a run made; it made all that follow, once each."""
        events = {stage: self._materializations(stage) for stage in STAGES}
        self("run", *options)
        made: dict[str, list[str]] = {}
        for stage in STAGES:
            for key in self._materializations(stage)[len(events[stage]) :]:
                made.setdefault(key, []).append(stage)
        for stages in made.values():
            assert stages == STAGES[STAGES.index(stages[0]) :]
        return {key: stages[0] for key, stages in made.items()}

    def _materializations(self, stage: str) -> list[str]:
        found = self.instance.fetch_materializations(dg.AssetKey(["docs", stage]), limit=999, ascending=True)
        return [record.partition_key or "" for record in found.records]


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Everything that a command could write, the instance included."""
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found if path.is_file()}


@pytest.fixture
def work(
    tmp_path: Path, inbox: Inbox, dagster_home: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> Work:
    return Work(tmp_path, inbox("docs-00000.tar", "docs-00001.tar"), instance, monkeypatch)


def test_what_ran_is_what_was_announced(work: Work) -> None:
    """A changed filter, user's code, pack setting and neutral setting: both commands announce the stages that run."""
    both = ("docs-00000", "docs-00001")
    assert work.announced() == dict.fromkeys(both, "raw_shards")
    assert work.status()["shards"]["new"] == list(both)
    assert work.ran() == dict.fromkeys(both, "raw_shards")
    work.settings["filters"] = "[{type: 'few:Few'}]"
    assert work.ran() == dict.fromkeys(both, "filtered_rows")

    def change(first: str | None, opened: int, **settings: str) -> None:
        work.settings |= settings
        expected = {} if first is None else dict.fromkeys(both, first)
        assert work.pending() == work.announced() == expected
        work.opened.clear()
        assert work.ran() == expected
        assert len(work.opened) == opened
        assert work.pending() == work.announced() == {}
        manifest = work.status()["manifest"]
        assert (manifest["num_partitions"], manifest["left_out"], manifest["outdated"]) == (2, {}, {})

    change("filtered_rows", 0, filters="[{type: 'few:Few'}, {type: text_length, min_chars: 3}]")
    work.write_filter(1)
    change("filtered_rows", 0)
    change("packed_mult", 0, on_misaligned="fail")
    work.settings["on_misaligned"] = "warn"
    assert work.pending() == work.announced() == {}, "the former records are still there"
    work("run")
    change(None, 0, batch_bytes="100000")
    change("rows", 2, max_rejected="9")
    work.settings["pack"] = "generic"
    assert "--new-schema" in str(work.status()["refused"])
    work("register", "--new-schema")
    change(work.pending()["docs-00000"], 0)


def test_a_run_from_a_stage(work: Work) -> None:
    """`--from` and `--force` run what is up to date too, all or the named ones, an earlier stale stage first."""
    work("run")
    both = ("docs-00000", "docs-00001")
    for options, expected in (
        (("--from", "filtered_rows"), dict.fromkeys(both, "filtered_rows")),
        (("--from", "published", "--partition", both[1]), {both[1]: "published"}),
        (("--partition", both[0]), {both[0]: "raw_shards"}),
        (("--force",), dict.fromkeys(both, "raw_shards")),
    ):
        assert work.announced(*options) == expected
        # A record that is there already is not published again.
        assert work.ran(*options) == {key: stage for key, stage in expected.items() if stage != "published"}
    work.settings["max_content_bytes"] = "1000000"
    assert work.announced("--from", "packed_mult") == dict.fromkeys(both, "materialized_rows")
    assert work.announced("--from", "rows", "--partition", both[1]) == {both[1]: "rows"}
    assert work.ran("--from", "packed_mult", "--partition", both[1]) == {both[1]: "materialized_rows"}
    assert work.ran() == {both[0]: "materialized_rows"}


def test_wrong_options_are_explained(work: Work) -> None:
    """A wrong stage lists the stages; `--force` beside `--from` and an unknown partition are refused."""
    said = work("run", "--from", "filter", code=2).stderr
    assert "--from: 'filter' is not a stage; the stages are: raw_shards, rows, " in said
    assert "give one of them" in work("run", "--from", "rows", "--force", code=2).stderr
    assert "'x' is not a registered partition" in work("run", "--dry-run", "--partition", "x", code=2).stderr
    assert not (work.folder / "out").exists()


def test_a_relaxed_check_starts_no_earlier_than_it(work: Work) -> None:
    """A partition that a check stopped starts at its stage when the check is relaxed, and nothing else runs."""
    work("run")
    limits = {"filters": "[{type: text_length, min_chars: 100000}]", "on_empty_sample": "keep", "max_dropped": "0"}
    work.settings |= limits
    work("run", code=1)
    assert work.pending() == dict.fromkeys(("docs-00000", "docs-00001"), "filtered_rows")
    del work.settings["max_dropped"]
    work.opened.clear()
    assert work.pending() == work.announced() == work.ran()
    assert work.opened == []


def test_a_load_takes_the_stage(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """The configuration of `<dataset>_load` names a stage as `--from` does; a wrong one fails and lists the stages."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar")))
    job = build_definitions(spec).resolve_job_def("docs_load")

    def load(**config: Any) -> dg.ExecuteInProcessResult:
        run_config = load_config(spec, [], jobs=1, **config)
        return job.execute_in_process(instance=instance, run_config=run_config, raise_on_error=False)

    assert load().success
    before = record_of(DatasetStore(spec), "docs-00000")
    assert before is not None
    assert load().success
    rows, filtered = (dg.AssetKey(["docs", name]) for name in ("rows", "filtered_rows"))
    assert load(first_stage="filtered_rows").success
    assert record_of(DatasetStore(spec), "docs-00000") == before
    made = {key: len(instance.fetch_materializations(key, limit=9).records) for key in (rows, filtered)}
    assert made == {rows: 1, filtered: 2}
    (failed,) = load(first_stage="filter").get_step_failure_events()
    assert "is not a stage; the stages are: raw_shards, " in str(failed.step_failure_data.user_failure_data)
