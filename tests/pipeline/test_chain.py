"""The chain: what follows from its table, and that nothing else names its stages."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mm_assets
from mm_assets.fields import registry
from mm_assets.pipeline.chain import CHAIN, MANIFEST, RECORDED_STAGES, STAGE_OF_FILE, TABLES, Stage
from mm_assets.pipeline.partition.stages import TABLE_STAGES
from mm_assets.pipeline.spec import DatasetSpec

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
                "e32f2dcadbc4228c364b5d59403ad5f6d56bd6236286151385bb7552f032e5b4",
                "66a88296f3acd30ff1704198614fed772e69c7660b64e8b1f10ffe5ab4d64200",
                "41979847e2d2fc9956c0a2b03fc6deee00d51322b6afaf57eb3947f3b38d5f41",
                "bc4554b210059f67bb6aca755ba0473425217d31e4c0bc96b6b3548ceec2d020",
                "0f4eb2f8b96f292316d07b7661f48c86d18e69ed97e3c600a3124372762378d3",
                "c4b210a6f9c50877bb9c0db04ccca6ed182e9125fd52426013042a5029e5a22b",
            ),
        ),
        (
            EVERYTHING,
            (
                "6509710d7dfe089020ff42b2f70addbb79003a2e7d0af33d8189d6ed35387ad0",
                "d2202ce70bac82b0154cca11bd2b3925dd0291bf7d3c9b96cbd558f0bd6d624b",
                "84b79f8aee188fb282fec67209f8a70d49ea21de19f698ef6c2c4f0a40053629",
                "97fa3026710c386c46d35fe3788728cc61706e9be3c00176e27a5f00e207f843",
                "ffdd257eb45371ece095a75421f23697a6cb15fa634e324b520f69fe22b3ab01",
                "e397600e657f5103f6694d413daa393e4be0f258efcdefde64db17bb6f50a8d9",
            ),
        ),
    ],
    ids=["defaults", "every setting"],
)
def test_digests_of_settings_stay_as_they_are(changes: dict[str, Any], digests: tuple[str, ...]) -> None:
    """The digests of a declaration are these numbers: others would make every published partition pending again."""
    made = spec(**changes)
    assert tuple(stage.digest(made) for stage in RECORDED_STAGES) == digests


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"on_damaged_shard": "salvage"}, "raw_shards"),
        ({"parquet": {"row_group_bytes": 1 << 20}}, "raw_shards"),
        ({"samples": {"texts_field": "t"}}, "rows"),
        ({"materialize": "write"}, "materialized_rows"),
        ({"filters": [{"type": "exact_duplicates"}]}, "filtered_rows"),
        ({"on_misaligned": "drop_sample"}, "filtered_rows"),
        ({"on_misaligned": "fail"}, "packed_mult"),
        ({"pack": "generic"}, "filtered_rows"),  # which decides what cannot be packed
        ({"pack": {"columns": "all"}}, "packed_mult"),
    ],
)
def test_a_setting_makes_its_stage_and_the_later_ones_stale(changes: dict[str, Any], first: str) -> None:
    """The digest of a stage changes with the settings of that stage and of those before it, and with no others."""
    before, after = spec(), spec(**changes)
    differs = [stage.name for stage in RECORDED_STAGES if stage.digest(before) != stage.digest(after)]
    names = [stage.name for stage in RECORDED_STAGES]
    assert differs == names[names.index(first) :]


@pytest.mark.parametrize(
    "changes",
    [
        {"root": "/other", "settle_seconds": 1, "owners": ["team:x"], "description": "d"},
        {"batch_bytes": 1 << 20},
        {"on_misaligned": "warn", "on_damaged_shard": "fail", "filters": [], "pack": None},
        {"storage_options": {"anon": True}, "runs_per_tick": 1, "cron": "0 * * * *", "keep_manifests": 1},
    ],
    ids=["place", "memory", "defaults", "schedule"],
)
def test_a_setting_that_changes_no_byte_makes_nothing_stale(changes: dict[str, Any]) -> None:
    """Where files go, how much is read at a time, defaults spelled out and when to run change no digest."""
    before, after = spec(), spec(**changes)
    assert [stage.digest(before) for stage in CHAIN] == [stage.digest(after) for stage in CHAIN]


@pytest.mark.parametrize("raised", CHAIN, ids=[stage.name for stage in CHAIN])
def test_a_raised_version_makes_its_stage_and_the_later_ones_stale(
    raised: Stage, request: pytest.FixtureRequest
) -> None:
    """The digests that change with a stage's version are its own and those of the stages that it leads to."""
    before = [stage.digest(spec()) for stage in CHAIN]
    version = raised.version
    request.addfinalizer(lambda: object.__setattr__(raised, "version", version))
    object.__setattr__(raised, "version", version + 1)
    after = [stage.digest(spec()) for stage in CHAIN]
    differs = [stage for stage, old, new in zip(CHAIN, before, after, strict=True) if old != new]
    assert differs == [stage for stage in CHAIN if raised in stage.lineage]


USERS = """
import dataclasses
from mm_assets.fields import TextField
from mm_assets.filters.base import Annotator, Filter
from mm_assets.rows.schema import UserColumn
from mm_assets.sources.tar import TarSource

class Nothing(Filter):
    def judge(self, block): return []

class Zero(Annotator):
    columns = (UserColumn(name="zero", source="", type="int64"),)
    def annotate(self, block): raise NotImplementedError

@dataclasses.dataclass(frozen=True)
class Words(TextField):
    TYPE_ID = 0x8877

class Tars(TarSource):
    pass
"""


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"source": "users_chain:Tars"}, "raw_shards"),
        ({"filters": [{"type": "users_chain:Nothing"}]}, "filtered_rows"),
        ({"annotators": [{"type": "users_chain:Zero"}]}, "filtered_rows"),
        ({"pack": {"fields": [{"name": "text", "field": "users_chain:Words"}]}}, "filtered_rows"),
    ],
    ids=["source", "filter", "annotator", "field"],
)
def test_users_code_makes_the_stages_stale_that_run_it(
    changes: dict[str, Any], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed source file of a class that the declaration names changes the digests from its first stage on."""
    monkeypatch.syspath_prepend(tmp_path)
    for table in ("FIELD_TYPES", "FIELD_NAMES"):
        monkeypatch.setattr(f"mm_assets.fields.registry.{table}", dict(getattr(registry, table)))
    digests = []
    for source in (USERS, USERS + "# changed\n"):
        (tmp_path / "users_chain.py").write_text(source)
        monkeypatch.delitem(sys.modules, "users_chain", raising=False)
        importlib.invalidate_caches()
        for name in ("FIELD_TYPES", "FIELD_NAMES"):
            getattr(registry, name).pop("Words", None)
            getattr(registry, name).pop(0x8877, None)
        digests.append([stage.digest(spec(**changes)) for stage in RECORDED_STAGES])
    names = [stage.name for stage in RECORDED_STAGES]
    differs = [name for name, old, new in zip(names, *digests, strict=True) if old != new]
    assert differs == names[names.index(first) :]


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
    ("pipeline/state/sql_views.py", "published"): "a view",
    ("pipeline/partition/stages.py", "rows"): "a count in a record",
    ("orchestration/report.py", "rows"): "a heading",
    ("cli/plan.py", "rows"): "a heading",
    ("cli/run_summary.py", "rows"): "a heading",
    ("cli/stats.py", "rows"): "a heading",
    ("cli/sql.py", "rows"): "a key of the JSON",
    ("cli/add_stream.py", "manifest"): "a key of the JSON",
    ("cli/leave.py", "manifest"): "an argument",
    ("dataset/card.py", "filtered_rows"): "a table of a manifest",
    ("pipeline/load/tasks.py", "manifest"): "a thread",
    ("pipeline/load/tasks.py", "published"): "what another load did",
    ("cli/run_summary.py", "published"): "what another load did",
    ("cli/run.py", "manifest"): "a key of the JSON",
    ("cli/status.py", "packed"): "a kind of bytes",
    ("pipeline/explore/status.py", "packed"): "a kind of bytes",
    ("pipeline/explore/sql.py", "rows"): "a key of an answer",
    ("pipeline/explore/sql_worker.py", "rows"): "a key of an answer",
    ("cli/status.py", "published"): "a key of the JSON",
    ("cli/status.py", "manifest"): "a key of the JSON",
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
