"""What Dagster shows of the rules: groups of them, each alone, or all of an asset over all partitions."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from mm_assets.checks.catalog import CATALOG, checks_of
from mm_assets.checks.outcome import Outcome
from mm_assets.cli.main import main
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.checks import check_specs, rules_of, settled_checks
from mm_assets.orchestration.launch import open_instance, register_dataset
from mm_assets.orchestration.recorded_load import run_load
from mm_assets.orchestration.report import check_results
from mm_assets.pipeline.chain import CHAIN, RECORDED_STAGES
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.partition.preview import Preview
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import StageRecord

from ..pipeline.chain import declare
from ..pipeline.shards import CAPTIONS, make_shard

SETTINGS = ("auto", "grouped", "per_rule", "rollup")
GROUPS = {
    "raw_shards": ["schema", "alignment"],
    "rows": ["schema", "reserved_columns", "accounting", "alignment"],
    "materialized_rows": ["schema", "alignment", "content"],
    "filtered_rows": ["schema", "reserved_columns", "content", "accounting", "alignment"],
    "packed_mult": ["schema", "alignment"],
    "packed_mstr": ["schema", "alignment"],
}


def result(asset: str, **failed: bool) -> StageResult:
    """A stage whose rules passed, but for those given: True where a violation stops the partition."""
    outcomes = tuple(
        Outcome(
            name=rule.name,
            passed=rule.name not in failed,
            num_violations=3 if rule.name in failed else 0,
            blocking=failed.get(rule.name, True),
            violations=({"sample_id": "s", "value": 1.5},) if rule.name in failed else (),
            description=rule.description,
        )
        for rule in checks_of(asset)
    )
    record = StageRecord(stage=asset, partition="a", made_with={}, outcomes=outcomes)
    preview = Preview().drawn()
    return StageResult(record=record, seconds=0.0, check_seconds=0.0, preview=preview, schema=None, urls={})


def shown(found: dg.AssetCheckResult) -> tuple[str | None, bool, str]:
    return found.check_name, found.passed, found.severity.value


def test_groups_are_few_and_named_alike(tmp_path: Path) -> None:
    """Each asset has at most five groups, 18 of all assets together, and each rule is in one of them."""
    spec = declare(tmp_path, tmp_path)
    assert {stage.name: list(rules_of(spec, stage.name)) for stage in RECORDED_STAGES} == GROUPS
    assert sum(map(len, GROUPS.values())) == 18
    assert sum(len(rules) for asset in GROUPS for rules in rules_of(spec, asset).values()) == len(CATALOG)


@pytest.mark.parametrize("setting", SETTINGS)
def test_results_are_those_that_were_announced(tmp_path: Path, setting: str) -> None:
    """Every asset announces its checks, blocking and described, and a stage has a passed result for each."""
    spec = declare(tmp_path, tmp_path, checks=setting)
    for stage in RECORDED_STAGES:
        specs = check_specs(spec, stage)
        assert all(check.blocking and check.description for check in specs)
        assert {check.partitions_def is None for check in specs} == {setting == "rollup"}
        found = check_results(spec, result(stage.name))
        assert [shown(one) for one in found] == [(check.name, True, "ERROR") for check in specs]
    described = "\n".join(check.description or "" for stage in RECORDED_STAGES for check in check_specs(spec, stage))
    assert all(rule.description in described for rule in CATALOG)
    assert not any(check_specs(spec, stage) for stage in CHAIN if stage.name == "published")


def test_the_setting_makes_nothing_stale(tmp_path: Path) -> None:
    """No digest of a stage depends on what Dagster shows of its checks."""
    digests = [[stage.digest(declare(tmp_path, tmp_path, checks=name)) for stage in CHAIN] for name in SETTINGS]
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize(
    ("failed", "passed", "severity"),
    [
        ({}, True, "ERROR"),
        ({"spans": False}, False, "WARN"),
        ({"items": True}, False, "ERROR"),
        ({"spans": False, "items": True}, False, "ERROR"),
    ],
)
@pytest.mark.parametrize("setting", ["grouped", "rollup"])
def test_a_group_is_as_bad_as_its_worst_rule(
    tmp_path: Path, setting: str, failed: dict[str, bool], passed: bool, severity: str
) -> None:
    """Rules that only warn make a warning of their group, and one that stops a partition makes an error of it."""
    found = check_results(declare(tmp_path, tmp_path, checks=setting), result("packed_mult", **failed))
    assert [(one.passed, one.severity.value) for one in found if not one.passed] == [(passed, severity)] * (not passed)
    *_, last = found  # `alignment`, or all rules
    table: Any = last.metadata["rules"].value
    assert "\n|samples|yes|0|" in table
    for rule, stops in failed.items():
        assert f"\n|{rule}|{'no' if stops else 'no, a warning'}|3|" in table
        assert f"{rule}: 3 violations of: " in (last.description or "")
        violations = last.metadata[f"violations/{rule}"]
        assert isinstance(violations, dg.TableMetadataValue)
        (row,) = violations.records
        assert row.data == {"sample_id": "s", "value": 1.5}


@pytest.mark.usefixtures("dagster_home")  # which has no viewer
def test_a_rule_alone_says_what_violates_it(tmp_path: Path) -> None:
    """With `per_rule` a result has the number of violations and the first of them."""
    spec = declare(tmp_path, tmp_path, checks="per_rule")
    found = {one.check_name: one for one in check_results(spec, result("rows", unique=True))}
    assert [name for name, one in found.items() if not one.passed] == ["unique"]
    assert (found["unique"].description or "").startswith("3 violations of: No two rows share")
    assert set(found["unique"].metadata) == {"num_violations", "violations", "sample"}


@pytest.mark.parametrize(("wanted", "given"), [({"alignment"}, ["alignment"]), ({"schema", "other"}, ["schema"])])
def test_some_checks_can_be_asked_for(tmp_path: Path, wanted: set[str], given: list[str]) -> None:
    """Only the results that are wanted are made."""
    found = check_results(declare(tmp_path, tmp_path), result("packed_mstr"), wanted=wanted)
    assert [one.check_name for one in found] == given


def defined(spec: DatasetSpec) -> set[str]:
    """The names of the checks of an asset, as a code location loads them."""
    keys = build_definitions(spec).resolve_asset_graph().asset_check_keys
    return {key.name for key in keys if key.asset_key.path[-1] == "rows"}


def test_many_partitions_are_rolled_up_once_and_for_all(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more than 2,000 partitions checks are rolled up, with one message, and stay so with fewer partitions."""
    (dagster_home / "dagster.yaml").write_text("telemetry: {enabled: false}")
    spec = declare(tmp_path, tmp_path)
    assert defined(spec) == set(GROUPS["rows"])
    assert not (dagster_home / "history").exists(), "definitions make no databases"
    with dg.DagsterInstance.get() as instance:
        assert settled_checks(instance, spec, 2000) == (spec, None)
        assert defined(spec) == set(GROUPS["rows"])
        settled, message = settled_checks(instance, spec, 2001)
        assert settled.checks == "rollup"
        assert message is not None
        assert message.startswith("2,001 partitions, more than 2,000: ")
        assert settled_checks(instance, spec, 10) == (settled, None)
        for setting in SETTINGS[1:]:
            declared = declare(tmp_path, tmp_path, checks=setting)
            assert settled_checks(instance, declared, 5000) == (declared, None)
        other = declare(tmp_path, tmp_path, name="other")
        assert settled_checks(instance, other, 5) == (other, None)
    assert defined(spec) == {"all_rules"}
    assert defined(declare(tmp_path, tmp_path, checks="grouped")) == set(GROUPS["rows"])
    monkeypatch.setattr(dg.DagsterInstance, "get", lambda: 1 / 0)
    assert defined(spec) == set(GROUPS["rows"]), "definitions load without a database"


def test_a_change_to_rollup_keeps_what_was_recorded(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and materializations of before stay in the event log, and the check job names what failed before."""
    for key in "ab":
        make_shard(tmp_path / "in" / f"{key}.tar", CAPTIONS)
    spec = declare(tmp_path / "root", tmp_path / "in")
    dataset, rows = DatasetStore(spec), dg.AssetKey(["data", "rows"])
    with open_instance() as instance:
        register_dataset(instance, dataset)
        with Processes(1) as engine:
            assert run_load(spec, ["a"], engine=engine).ok
            monkeypatch.setattr("mm_assets.orchestration.checks.MOST_PARTITIONS", 1)
            assert run_load(spec, ["b"], engine=engine).ok
        storage = instance.event_log_storage
        grouped = [dg.AssetCheckKey(rows, name) for name in GROUPS["rows"]]
        old = storage.get_latest_asset_check_execution_by_key(grouped)
        assert {record.partition for record in old.values()} == {"a"}
        assert all(record.status.value == "SUCCEEDED" for record in old.values())
        assert instance.get_materialized_partitions(rows) == {"a", "b"}
        (new,) = storage.get_latest_asset_check_execution_by_key([dg.AssetCheckKey(rows, "all_rules")]).values()
        assert new.status.value == "SUCCEEDED"
        job = build_definitions(spec).resolve_job_def("data_check")
        assert job.partitions_def is None
        read: list[str] = []
        record_of = DatasetStore.record
        monkeypatch.setattr(
            DatasetStore, "record", lambda self, key, recipe: read.append(key) or record_of(self, key, recipe)
        )
        result = job.execute_in_process(instance=instance)
        assert sorted(read) == ["a", "b"], "each record is read once, for all stages"
        (record,) = storage.get_latest_asset_check_execution_by_key([dg.AssetCheckKey(rows, "all_rules")]).values()
        assert result.success
        assert record.event is not None
        evaluation = record.event.get_dagster_event().asset_check_evaluation_data
        assert evaluation.metadata["num_partitions"].value == 2
        said = [entry.user_message for run in instance.get_runs() for entry in instance.all_logs(run.run_id)]
    assert len([line for line in said if "2 partitions, more than 1" in line]) == 1


def test_commands_report_the_change_to_rollup_once(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first `register` or `run` with many partitions says so on standard error, and a dry run decides nothing."""
    monkeypatch.setattr("mm_assets.orchestration.checks.MOST_PARTITIONS", 1)
    for key in "ab":
        make_shard(tmp_path / "in" / f"{key}.tar", CAPTIONS)
    given = ["--shards", str(tmp_path / "in"), "--root", str(tmp_path / "root")]
    said = []
    for command in (["run", "--dry-run"], ["register"], ["run"]):
        done = CliRunner().invoke(main, [*command, *given], catch_exceptions=False)
        assert done.exit_code == 0
        said.append("2 partitions, more than 1: from now on" in done.stderr)
    assert said == [False, True, False]
