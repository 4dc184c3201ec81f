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
                "d7bd2bf773be7ab1e60a9a324b21e2fc96a32dbd65098ef17a09a1e678cc36df",
                "a33be781ddf96cb72463e52502a035764b47239c95d801e86b85454b484334b3",
                "df4d95129318e49b62a6630e68eca3b62fd3d2edabd5007ebdbcd376f412e2ee",
                "b1de16317eef4f3f267301881a93e5ed619d3580f766f9f20cd1a280688f166a",
                "7b5e780a0a8bb2a475e5c68950db6cb02557242495e33c8ca85dd8c5b8f9a07a",
            ),
        ),
        (
            EVERYTHING,
            (
                "6509710d7dfe089020ff42b2f70addbb79003a2e7d0af33d8189d6ed35387ad0",
                "91569c3baa129e30e99b493043ef74921eb49ce2a947ebcfe1917dfb5641ab36",
                "2e6183b52219e7f5271869da8253c491ae0bfa046d3713f2a3e5190c204930ee",
                "339ec362a0670957adb22f8b32926699dfb2a5fa786f831e14bfb817648cec83",
                "c8fd7f4018e73bcfbb5f57c7f29b54de44ef7d99e40b366e7d5f49fb6149876b",
                "4a5576117a8b2e099d73faa853cd4ad92f918d7b5c0b2d994750c8c7b83646cc",
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
    request.addfinalizer(lambda: object.__setattr__(raised, "version", 1))
    object.__setattr__(raised, "version", 2)
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
