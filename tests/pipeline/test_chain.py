"""The chain: what follows from its table, and that nothing else names its stages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mm_assets
from mm_assets.pipeline.chain import CHAIN, MANIFEST, PUBLISHED, RECORDED_STAGES, STAGE_OF_FILE, TABLES
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.stages import TABLE_STAGES

GOOD: dict[str, Any] = {"name": "docs", "shards": "shards/*.tar", "root": "/data"}
EVERYTHING: dict[str, Any] = {
    "description": "x",
    "on_damaged_shard": "salvage",
    "parquet": {"compression": "snappy", "row_group_bytes": 1 << 20},
    "samples": {"texts_field": "t", "user_columns": ["a", "b"], "extensions": {"foo": "image"}},
    "partition_pattern": "(?P<partition>a)",
    "batch_bytes": 1 << 20,
    "materialize": "write",
    "on_materialize_error": "fail",
    "max_content_bytes": 5,
    "annotators": [{"type": "image_size"}],
    "filters": [{"type": "exact_duplicates"}],
    "on_empty_sample": "keep",
    "renumber": True,
    "on_misaligned": "fail",
    "pack": "generic",
}


def spec(**changes: Any) -> DatasetSpec:
    return DatasetSpec.from_config({**GOOD, **changes}, where="defs.yaml", base=Path("/project"))


@pytest.mark.parametrize(
    ("changes", "digests"),
    [
        (
            {},
            (
                "95c078eaa3899cd2dffc43626d82012425562560a119e0aa07314440f7ad34db",
                "d3e1dac95d1d9d6bb02d75748a75a594b77e66689688d069eb5a3ac46b3f2ead",
                "9f443eaef46e0a4a3ad26f35b6028fe52e6d00823ef61c0b9a2026ae973363d3",
                "8fddae699c21c7e0fa121fef588c0afab5eb4d84b19fd8832046ce373ea272b4",
                "4c9a4b0754f8d500c2c01a5ae687d7b54c171fbbbc7eb324bc17945c22c7a3ea",
            ),
        ),
        (
            EVERYTHING,
            (
                "514262c4ee4edb131ddb27bb0369626b6f5b07fce353b076050605b0ba319a74",
                "a187c2f4f30bb9b9e8018db62647521a8d8262e6bec37a1e6ed7feb99c9ae0aa",
                "b61e00b2848fea580198328461ef6b0410e907b966d5c48a6359aa2f1594ba46",
                "682317b539f19b6ae3291313eada109e238483ee50be72220b1b85dc68944154",
                "e75db560902cb7395386613d0c01e9ad84b7604f8ff4d039ebbfe3630e400a9f",
            ),
        ),
    ],
    ids=["defaults", "every setting"],
)
def test_digests_of_settings_stay_as_they_are(changes: dict[str, Any], digests: tuple[str, ...]) -> None:
    """The digests of a declaration are these numbers: others would make every published partition pending again."""
    made = spec(**changes)
    assert tuple(stage.digest(made) for stage in RECORDED_STAGES) == (*digests, digests[-1])
    assert PUBLISHED.digest(made) == digests[-1]


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"on_damaged_shard": "salvage"}, "raw_shards"),
        ({"samples": {"texts_field": "t"}}, "rows"),
        ({"materialize": "write"}, "materialized_rows"),
        ({"filters": [{"type": "exact_duplicates"}]}, "filtered_rows"),
        ({"on_misaligned": "drop_sample"}, "filtered_rows"),
        ({"on_misaligned": "fail"}, "packed_mult"),
        ({"pack": "generic"}, "packed_mult"),
    ],
)
def test_a_setting_makes_its_stage_and_the_later_ones_stale(changes: dict[str, Any], first: str) -> None:
    """The digest of a stage changes with the settings of that stage and of those before it, and with no others."""
    before, after = spec(), spec(**changes)
    differs = [stage.name for stage in RECORDED_STAGES if stage.digest(before) != stage.digest(after)]
    names = [stage.name for stage in RECORDED_STAGES]
    assert differs == names[names.index(first) :]


def test_where_files_go_does_not_make_anything_stale() -> None:
    """Root, settle time and owners change no digest."""
    before, after = spec(), spec(root="/other", settle_seconds=1, owners=["team:x"], description="d")
    assert [stage.digest(before) for stage in CHAIN] == [stage.digest(after) for stage in CHAIN]


def test_stages_follow_those_that_they_read() -> None:
    """The chain is in the order of its links, and the manifest follows from every stage."""
    for number, stage in enumerate(CHAIN):
        assert set(stage.upstream) <= set(CHAIN[:number])
    assert MANIFEST.lineage == CHAIN


def test_every_file_has_one_stage() -> None:
    """No two stages make a file of one name, and each stage of tables has its function."""
    files = [name for stage in RECORDED_STAGES for name in stage.files]
    assert len(set(files)) == len(files)
    assert all(name in STAGE_OF_FILE[name].files for name in files)
    assert list(TABLE_STAGES) == [stage for stage in CHAIN if stage.tables]
    assert len(TABLES) == sum(len(stage.tables) for stage in TABLE_STAGES)


PACKAGE = Path(mm_assets.__file__).parent
NAMES_STAGES = {"pipeline/chain.py", "checks/catalog.py"}
KNOWS_STAGES = ("checks", "pipeline", "orchestration", "cli")  # packages above the stages' own work
WORDS = re.compile(r"(rows|packed|published|manifest)(/|$)|packed_$")  # names that are also words: alone or as a folder
NAMES = re.compile(rf"\b({'|'.join(stage.name for stage in CHAIN if '_' in stage.name)})\b")
QUOTED = re.compile(r"`[^`]*`")
NO_STAGES = {
    ("pipeline/publish.py", "rows"): "a count in a record and in a marker",
    ("pipeline/stages.py", "rows"): "a count in a record",
    ("orchestration/report.py", "rows"): "a heading",
    ("cli/plan.py", "rows"): "a heading",
}


def strings(file: Path) -> Iterator[str]:
    """Every string of a module that is neither a docstring nor in `__all__`, without what prose quotes in backticks."""
    tree = ast.parse(file.read_text())
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(node.value)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            left_out |= set(ast.walk(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            yield QUOTED.sub("", node.value)


def test_no_other_module_names_a_stage() -> None:
    """Outside the chain and the catalog of checks no string is a stage's name, and each listed exception is one."""
    found = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if name in NAMES_STAGES:
            continue
        for text in strings(file):
            if NAMES.search(text) or (name.startswith(KNOWS_STAGES) and WORDS.match(text)):
                found.add((name, text))
    assert found == set(NO_STAGES)
