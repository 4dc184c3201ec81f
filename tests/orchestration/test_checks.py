"""What Dagster shows of the rules: groups of them, each alone, or all of an asset over all partitions."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mm_assets.checks.catalog import CATALOG, checks_of
from mm_assets.checks.context import Outcome
from mm_assets.orchestration.checks import check_specs, rules_of
from mm_assets.orchestration.report import check_results
from mm_assets.pipeline.chain import CHAIN, RECORDED_STAGES
from mm_assets.pipeline.partition.preview import Preview
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.state.records import StageRecord

from ..pipeline.chain import declare

SETTINGS = ("grouped", "per_rule", "rollup")
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
