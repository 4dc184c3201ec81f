"""Settings of a dataset that only options describe."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mm_assets.cli.main import main
from mm_assets.cli.options import DatasetChoice
from mm_assets.errors import ConfigError
from mm_assets.pipeline.spec import DatasetSpec


def chosen(*settings: str, pack: str | None = None) -> DatasetChoice:
    return DatasetChoice(names=("web",), shards="in/*.tar", root="out", pack=pack, settings=settings)


def spec_of(*settings: str) -> DatasetSpec:
    (spec,) = chosen(*settings).specs()
    return spec


def test_every_setting_is_taken_by_its_key(dagster_home: Path) -> None:
    """`--set` takes YAML values, nested keys, lists and mappings, and replaces a default of the command."""
    spec = spec_of(
        "on_damaged_shard=salvage",
        "settle_seconds=1.5",
        "samples.sample_id_field=url",
        "samples.user_columns=[score]",
        "filters=[{type: text_length, min_chars: 20}]",
        "parquet.compression=snappy",
        "description=a=b",
    )
    assert (spec.on_damaged_shard, spec.settle_seconds, spec.description) == ("salvage", 1.5, "a=b")
    assert (spec.samples.sample_id_field, spec.samples.user_columns) == ("url", ("score",))
    assert spec.filters == ({"type": "text_length", "min_chars": 20},)
    assert (spec.parquet.compression, spec.name, spec.pack) == ("snappy", "web", None)
    assert spec.shards == str(Path.cwd() / "in/*.tar")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("on_damaged_shard=ignore",), "arguments: on_damaged_shard: is 'ignore', allowed: fail, salvage"),
        (("samples.sample_id=url",), "arguments: samples.sample_id: is not a setting; allowed here: "),
        (("runs_per_tick=0",), "arguments: runs_per_tick: is int 0, expected a whole number of at least 1"),
        (("renumber=maybe",), "arguments: renumber: is str 'maybe', expected true or false"),
        (("filters=[{",), "arguments: filters: found '[{', expected YAML"),
        (("salvage",), "arguments: --set: found 'salvage', expected KEY=VALUE"),
        (("samples..url=1",), "arguments: --set: found 'samples..url=1', expected KEY=VALUE"),
        (("root=x",), "arguments: --set: found 'root': use --root"),
        (("renumber=true", "renumber=false"), "arguments: renumber: is given by more than one --set"),
        (("samples={}", "samples.skip=x"), "arguments: samples.skip: is not a setting; allowed here: "),
        (("samples=", "samples.skip=x"), "arguments: samples.skip: samples is given as a whole by another --set"),
    ],
)
def test_a_wrong_setting_is_named(dagster_home: Path, settings: tuple[str, ...], says: str) -> None:
    """The error has the key, what was found and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        spec_of(*settings)
    assert says in str(caught.value)


def test_settings_go_with_shards_and_one_pack(dagster_home: Path) -> None:
    """Neither a declared dataset nor a second preset is changed by `--set`."""
    with pytest.raises(ConfigError, match="--set: goes with SHARDS"):
        DatasetChoice(names=("web",), settings=("renumber=true",)).specs()
    with pytest.raises(ConfigError, match="--pack: and --set pack= are given"):
        chosen("pack=generic", pack="speech").specs()


def test_suggested_commands_carry_the_settings(dagster_home: Path) -> None:
    """A command of a message can be pasted: it has the same settings."""
    said = chosen("samples.sample_id_field=url").complete("run `mm-assets register --dataset web`")
    assert "--set samples.sample_id_field=url" in said


def test_a_field_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--field` imports modules of the current folder and of `src` of the project, as declarations do."""
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "pyproject.toml").write_text('[tool.dg.project]\nroot_module = "mine"\n')
    (tmp_path / "src").mkdir()
    (tmp_path / "below").mkdir()
    (tmp_path / "src" / "fields_of_src.py").write_text("")
    (tmp_path / "below" / "fields_of_cwd.py").write_text("")
    monkeypatch.chdir(tmp_path / "below")
    for module in ("fields_of_src", "fields_of_cwd"):
        result = CliRunner().invoke(main, ["inspect", "no.mult", "--field", f"{module}:Own"])
        assert f"'{module}:Own'" in result.stderr
        assert "cannot be imported" not in result.stderr
