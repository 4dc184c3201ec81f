"""The checks of each asset in Dagster: groups of rules, single rules, or all of them; every one is a gate."""

import warnings
from collections.abc import Mapping

import dagster as dg

from mm_assets.checks.catalog import GROUPS, Check, checks_of
from mm_assets.orchestration.partitions import asset_key, shard_partitions
from mm_assets.pipeline.chain import CHAIN, MANIFEST, RECORDED_STAGES, Stage
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.registration import MOST_PARTITIONS

__all__ = [
    "ALL_VECTORS",
    "READ_AGAIN",
    "RECALL",
    "ROLLUP",
    "UNIQUE_IDS",
    "check_specs",
    "rules_of",
    "settled_checks",
]

UNIQUE_IDS = "unique_ids"
ROLLUP = "all_rules"  # the check of an asset with `checks: rollup`
READ_AGAIN = "read_again"  # the check of an export
ALL_VECTORS, RECALL = "all_vectors", "recall"  # the checks of an index
_EXPORT_RULE = "Every shard of the export reads as it was written: keys, names, sizes and CRC-32Cs of all files."
_INDEX_RULES = {
    ALL_VECTORS: "The index has the vector of every sample that has one, except those that cannot be compared.",
    RECALL: "A search finds at least `min_recall` of the ten nearest, measured when the vectors were written.",
}
_MANIFEST_RULE = "No two partitions have a sample id in common."


def rules_of(spec: DatasetSpec, asset: str) -> Mapping[str, tuple[Check, ...]]:
    """By the name of each check that Dagster shows of an asset, the rules that it stands for; docs/spec/pipeline.md."""
    rules = checks_of(asset)
    if spec.checks == "rollup":
        return {ROLLUP: rules}
    found: dict[str, tuple[Check, ...]] = {}
    for rule in rules:
        name = rule.name if spec.checks == "per_rule" else rule.group
        found[name] = (*found.get(name, ()), rule)
    return found


def check_specs(spec: DatasetSpec, stage: Stage) -> list[dg.AssetCheckSpec]:
    """The checks of one asset, blocking because `dagster job execute` ignores the others.

    Each is per partition, but for `checks: rollup`, with which exports have none. That of the manifest warns.
    """
    key = asset_key(spec, stage)
    if not stage.is_partitioned:
        of_dataset = {UNIQUE_IDS: _MANIFEST_RULE} if stage is MANIFEST else _INDEX_RULES
        return [
            dg.AssetCheckSpec(name=name, asset=key, description=rule, blocking=stage is not MANIFEST)
            for name, rule in of_dataset.items()
        ]
    rules: Mapping[str, str] = {}
    if stage in RECORDED_STAGES:
        rules = {name: _description(name, rules) for name, rules in rules_of(spec, stage.name).items()}
    elif stage not in CHAIN and spec.checks != "rollup":
        rules = {READ_AGAIN: _EXPORT_RULE}
    with warnings.catch_warnings():
        # `partitions_def` of a check is a preview; without it results do not belong to a partition.
        warnings.filterwarnings("ignore", category=dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name=name,
                asset=key,
                description=description,
                blocking=True,
                partitions_def=None if spec.checks == "rollup" else shard_partitions(spec),
            )
            for name, description in rules.items()
        ]


def _description(name: str, rules: tuple[Check, ...]) -> str:
    if [rule.name for rule in rules] == [name]:
        return rules[0].description
    about = GROUPS.get(name, "In every partition all rules of the asset hold.")
    return about + "\n\n" + "\n".join(f"- `{rule.name}`: {rule.description}" for rule in rules)


def settled_checks(
    instance: dg.DagsterInstance, spec: DatasetSpec, num_partitions: int = 0
) -> tuple[DatasetSpec, str | None]:
    """Returns the declaration, with `rollup` for `auto` if that applies, and a message if it applies from now on.

    The instance's database keeps the decision, for every process and for good: a dataset whose number of partitions
    goes up and down would otherwise change its checks each time, and Dagster shows only results of checks that exist.

    Args:
        instance: the instance that shows the checks.
        spec: the declaration.
        num_partitions: number of registered partitions; 0 decides nothing.
    """
    if spec.checks != "auto":
        return spec, None
    cursors, key = instance.daemon_cursor_storage, f"mm_assets/{spec.name}/checks"
    is_new = not cursors.get_cursor_values({key})
    if is_new and num_partitions <= MOST_PARTITIONS:
        return spec, None
    message = None
    if is_new:
        cursors.set_cursor_values({key: "rollup"})
        message = (
            f"{num_partitions:,} partitions, more than {MOST_PARTITIONS:,}: from now on Dagster has one check result "
            f"per asset, {ROLLUP}, for all partitions together. Reload the code location to see it; earlier results "
            "stay in the events of their runs. `checks: grouped` keeps results of each partition"
        )
    return spec.replace(checks="rollup"), message
