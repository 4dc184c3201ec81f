import re
from contextlib import closing
from importlib.resources import files

import duckdb
import pyarrow as pa
import pytest

from mm_assets.checks.alignment import FACT_RELATIONS
from mm_assets.checks.catalog import CATALOG, GROUPS, checks_of
from mm_assets.checks.origins import OriginRelations
from mm_assets.checks.packed import PackedFiles, PackedRelations
from mm_assets.checks.relations import TableRelations
from mm_assets.pipeline.chain import RECORDED_STAGES

from .conftest import Partition

SQL = files("mm_assets.checks") / "sql"
KEYWORDS = re.compile(r"\b(SELECT|FROM|WHERE|JOIN|GROUP|ORDER|BY|AND|OR|IS|NOT|NULL|AS|ON|USING|COUNT|CASE)\b")


def body(sql: str) -> str:
    """A statement without its comments."""
    return "\n".join(line for line in sql.splitlines() if not line.startswith("--"))


def relations(partition: Partition, asset: str) -> dict[str, pa.Table]:
    """What the statements of an asset select from, by name."""
    context, found = partition.context(asset), {}
    with (
        closing(TableRelations(context)) as tables,
        PackedFiles(context, [asset[-4:]] if asset.startswith("packed") else []) as files,
    ):
        origins, packed = OriginRelations(context, tables), PackedRelations(context, files)
        for name in {name for check in checks_of(asset) for name in check.relations}:
            made = getattr(packed, name, None) or getattr(origins, name, None)
            if name in FACT_RELATIONS:
                found[name] = packed.facts.table(name)
            else:
                found[name] = tables.relation(context.known_as(name)) if made is None else made()
    for shard in context.shards:
        shard.file.close()
    return found


def test_catalog_and_folder_name_the_same_files() -> None:
    """No statement lies in the folder unused, and none that the catalog names is missing."""
    assert {item.name for item in SQL.iterdir() if item.name.endswith(".sql")} == {c.sql_file for c in CATALOG}


def test_every_asset_has_checks_and_its_names_are_unique() -> None:
    """Each asset has a schema check first, no two of its checks share a name, and each group is described."""
    assert {check.group for check in CATALOG} == set(GROUPS)
    assert {check.asset for check in CATALOG} == {stage.name for stage in RECORDED_STAGES}
    for stage in RECORDED_STAGES:
        names = [check.name for check in checks_of(stage.name)]
        assert names[0] == "schema"
        assert len(set(names)) == len(names)


def test_unknown_asset_is_refused_by_name() -> None:
    """Asking for the checks of an asset that has none says so."""
    with pytest.raises(ValueError, match="no asset 'manifest' has checks"):
        checks_of("manifest")


@pytest.mark.parametrize("check", CATALOG, ids=lambda c: f"{c.asset}-{c.name}")
def test_statement_follows_the_house_rules(check) -> None:
    """A statement opens with its rule, is one statement in lower case, and lists violations in a stable order."""
    assert check.sql.startswith("-- ")
    assert re.fullmatch(r"[A-Z].+\.", check.description)
    assert len(check.description) <= 140
    statement = body(check.sql)
    assert ";" not in statement
    assert not KEYWORDS.search(statement)
    assert check.relations
    assert re.search(r"^order by ", statement, re.MULTILINE), "violations are to be listed in a stable order"


@pytest.mark.parametrize("asset", [stage.name for stage in RECORDED_STAGES])
def test_statements_over_relations_without_rows_select_nothing(pristine, asset: str) -> None:
    """No statement finds a violation where none of its relations has a row, so that it need not be executed."""
    with duckdb.connect() as database:
        for name, table in relations(pristine, asset).items():
            database.register(name, table.slice(0, 0))
        for check in checks_of(asset):
            assert database.execute(check.sql).fetchall() == [], check.name


@pytest.mark.parametrize("check", [c for c in CATALOG if c.needs], ids=lambda c: f"{c.asset}-{c.name}")
def test_statements_select_nothing_without_the_rows_that_they_need(pristine, check) -> None:
    """Without the rows that a statement says it needs it selects nothing, whatever is in its other relations."""
    made = relations(pristine, check.asset)
    assert set(check.needs) <= set(check.relations)
    always_one_row = {"first_listed"}
    others = {name: made[name] for name in check.relations if name not in {*check.needs, *always_one_row}}
    damaged = [{name: table.slice(0, 0)} for name, table in others.items()]
    damaged += [{name: pa.concat_tables([table, table])} for name, table in others.items()]
    with duckdb.connect() as database:
        for damage in ({}, *damaged):
            for name, table in {**made, **damage, **{name: made[name].slice(0, 0) for name in check.needs}}.items():
                database.register(name, table)
            assert database.execute(check.sql).fetchall() == [], damage


@pytest.mark.parametrize("check", [c for c in CATALOG if c.equal], ids=lambda c: f"{c.asset}-{c.name}")
def test_statements_select_nothing_if_the_relations_that_they_compare_are_equal(pristine, check) -> None:
    """Two relations that a statement says it compares are equal in a good partition, and if equal select nothing."""
    made = relations(pristine, check.asset)
    one, other = (made[name].replace_schema_metadata() for name in check.equal)
    assert one.equals(other)
    assert set(check.equal) <= set(check.relations)
    with duckdb.connect() as database:
        for rows in (one, one.slice(0, 0), one.slice(1), one.take([*reversed(range(one.num_rows))])):
            for name, table in {**made, **dict.fromkeys(check.equal, rows)}.items():
                database.register(name, table)
            assert database.execute(check.sql).fetchall() == []
