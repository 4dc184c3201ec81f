"""Datasets declared in YAML: what they give, and what a wrong declaration says."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from jsonschema import Draft202012Validator

from mm_assets.errors import ConfigError
from mm_assets.orchestration import component
from mm_assets.orchestration.assets import build_assets
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.component import ShardDataset
from mm_assets.orchestration.jobs import build_jobs
from mm_assets.orchestration.resources import StorageRoot, resource_key
from mm_assets.pipeline.spec import DatasetSpec

TYPE = "mm_assets.orchestration.ShardDataset"


def load(folder: Path, text: str) -> dg.Definitions:
    """The definitions of one defs.yaml in a project of its own."""
    import importlib.util
    import sys

    name = f"defs_of_{folder.name}"
    (folder / name / "mine").mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    (folder / name / "mine" / "defs.yaml").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / name / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        return dg.ComponentTree.from_module(defs_module=module, project_root=folder).build_defs()
    finally:
        del sys.modules[name]


def schema_errors(attributes: dict[str, Any]) -> list[str]:
    """What `dg check yaml` reports about a declaration: path of the key, and message."""
    schema = ShardDataset.get_model_cls().model_json_schema()
    found = Draft202012Validator(schema).iter_errors(attributes)
    return sorted(f"{'.'.join(str(part) for part in error.absolute_path)}: {error.message}" for error in found)


def test_every_setting_has_type_description_and_example() -> None:
    """The schema that Dagster's tools show has each key of the model, typed, described, with an example that loads."""
    schema = ShardDataset.get_model_cls().model_json_schema()
    assert list(schema["properties"]) == list(DatasetSpec.model_fields)
    assert schema["required"] == ["name", "shards"]
    for name, value in schema["properties"].items():
        assert value["description"], name
        assert "type" in value or "$ref" in value, name
        DatasetSpec.from_config({"name": "a", "shards": "s", "root": "r", name: value["examples"][0]}, where="test")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("fliters", [], "Additional properties are not allowed ('fliters' was unexpected)"),
        ("runs_per_tick", "many", "runs_per_tick: 'many' is not of type 'integer'"),
        ("runs_per_tick", 0, "runs_per_tick: 0 is less than the minimum of 1"),
        ("materialize", "later", "materialize: 'later' is not one of ['read', 'write']"),
        ("name", "a b", "name: 'a b' does not match"),
        ("samples", {"text_field": "x"}, "samples: Additional properties are not allowed ('text_field'"),
        ("samples", {"user_columns": [3]}, "samples.user_columns.0: 3 is not of type 'string'"),
        ("parquet", {"compression": "lzma"}, "parquet.compression: 'lzma' is not one of ['zstd', "),
        ("filters", [{"type": "blurr"}], "filters.0.type: 'blurr' does not match '^(aspect_ratio|"),
        ("filters", [{"min": 3}], "filters.0: 'type' is a required property"),
        ("filters", [{"type": "text_length", "min_charz": 3}], "filters.0: 'min_charz' is not one of ['type', "),
        ("filters", [{"type": "text_length", "min_chars": "3"}], "filters.0.min_chars: '3' is not valid"),
        ("filters", [{"type": "text_length", "name": 3}], "filters.0.name: 3 is not of type 'string'"),
        ("annotators", [{"type": "image_size", "prefixx": ""}], "annotators.0: 'prefixx' is not one of ['type', "),
        ("cron", "99 * * * *", "cron: '99 * * * *' does not match"),
        ("cron", "every day", "cron: 'every day' does not match"),
        ("timezone", "Europe/Nowhere", "Additional properties are not allowed ('timezone' was unexpected)"),
        ("pack", "everything", "pack: 'everything' is not one of ['interleaved', "),
        ("pack", 3, "pack: 3 is not of type 'string', 'object', 'null'"),
        ("pack", {"field": []}, "pack: Additional properties are not allowed ('field' was unexpected)"),
    ],
)
def test_the_schema_refuses_what_is_wrong(key: str, value: object, says: str) -> None:
    """A wrong key or value gives one error, at the innermost key."""
    (error,) = schema_errors({"name": "a", "shards": "s", key: value})
    assert says in error


@pytest.mark.parametrize(
    "attributes",
    [
        {"runs_per_tick": "{{ env.RUNS }}", "materialize": "{{ env.MODE }}", "samples": "{{ rules }}"},
        {"samples": {"user_columns": "{{ columns }}", "max_text_bytes": "{{ env.MOST }}"}, "filters": "{{ ours }}"},
        {"filters": None, "parquet": None, "samples": {"texts_field": None}, "pack": None, "description": None},
        {
            "samples": {"fields": ["url"]},
            "filters": [{"type": "my.module:Filter", "name": "x"}],
            "pack": {"fields": []},
        },
        {
            "filters": [{"type": "text_length", "min_chars": "{{ env.LEAST }}", "scope": "sample"}],
            "cron": "{{ env.C }}",
        },
        *({"cron": cron} for cron in ("*/5 0-6,22 1,L jan-MAR mon-5/2", " 0 0 1 1 7 ", "@daily", "59 23 31 12 sun")),
    ],
)
def test_the_schema_allows_templates_and_empty_values(attributes: dict[str, Any]) -> None:
    """A template may take the place of any value, and a key without a value takes its default."""
    assert schema_errors({"name": "a", "shards": "s", **attributes}) == []


def only_component(definitions: dg.Definitions) -> ShardDataset:
    """The one dataset of definitions that were loaded from YAML."""
    assert definitions.component_tree is not None
    (component,) = definitions.component_tree.get_all_components(of_type=ShardDataset)
    return component


def test_a_few_lines_give_a_dataset(tmp_path: Path, dagster_home: Path) -> None:
    """Three settings make all assets, checks, jobs, sensors and the schedule of a dataset."""
    definitions = load(tmp_path, f"type: {TYPE}\nattributes:\n  name: mine\n  shards: shards/*.tar\n")
    graph = definitions.resolve_asset_graph()
    names = {key.path[-1] for key in graph.get_all_asset_keys()}
    assert {"raw_shards", "rows", "materialized_rows", "filtered_rows", "packed_mult", "packed_mstr"} <= names
    assert {"shards", "published", "manifest"} <= names
    assert len(graph.asset_check_keys) > 10
    assert {job.name for job in definitions.resolve_all_job_defs()} >= {
        "mine_pack",
        "mine_load",
        "mine_manifest",
        "mine_check",
    }
    assert definitions.resolve_sensor_def("mine_shards")
    assert definitions.resolve_schedule_def("mine_pending")
    component = only_component(definitions)
    assert component.spec.shards.endswith("/mine/shards/*.tar")
    assert component.spec.root == str(dagster_home / "data")


def test_a_description_reaches_the_ui(tmp_path: Path, dagster_home: Path) -> None:
    """A dataset's description follows that of each of its assets, and its group and owners are on all of them."""
    text = f"type: {TYPE}\nattributes: {{name: mine, shards: x, description: Old maps., owners: ['team:maps']}}\n"
    graph = load(tmp_path, text).resolve_asset_graph()
    nodes = [graph.get(key) for key in graph.get_all_asset_keys()]
    assert len(nodes) == 9
    for node in nodes:
        assert (node.description or "").endswith("\n\nOld maps.")
        assert (node.group_name, node.owners) == ("mine", ["team:maps"])


def test_two_documents_are_two_datasets(tmp_path: Path, dagster_home: Path) -> None:
    """A second dataset is a second document of the same file."""
    one = "type: " + TYPE + "\nattributes:\n  name: {}\n  shards: {}\n"
    definitions = load(tmp_path, one.format("a", "x/*.tar") + "---\n" + one.format("b", "s3://bucket/y"))
    assert {k.path[0] for k in definitions.resolve_asset_graph().get_all_asset_keys()} == {"a", "b"}


def test_environment_variables_fill_in(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates of the YAML are resolved, so that a root or a secret can come from the environment."""
    monkeypatch.setenv("MY_BUCKET", "s3://bucket/data")
    text = f'type: {TYPE}\nattributes:\n  name: a\n  shards: x\n  root: "{{{{ env.MY_BUCKET }}}}"\n'
    component = only_component(load(tmp_path, text))
    assert component.spec.root == "s3://bucket/data"


def test_a_name_from_the_environment(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset whose name is a template is known by the name that the template gives."""
    monkeypatch.setenv("DSNAME", "mine")
    text = f'type: {TYPE}\nattributes:\n  name: "{{{{ env.DSNAME }}}}"\n  shards: x\n'
    component = only_component(load(tmp_path, text))
    assert component.name == component.spec.name == "mine"


@pytest.mark.parametrize(
    ("line", "key", "says"),
    [
        ("shard_size: 3", "shard_size", "is not a setting; allowed here: annotators"),
        ("materialize: sometimes", "materialize", "allowed: read, write"),
        ("filters: [{type: aspect_ratio, maximum: 2}]", "filters[0]", "max"),
        ("settle_seconds: soon", "settle_seconds", "expected a number"),
        ("pack: everything", "pack", "generic"),
        ("cron: '0 0 30 2 *'", "cron", "'0 0 30 2 *', which Dagster takes for no time"),
        ("source: 'missing_module:Mine'", "source", "No module named 'missing_module'"),
        ("source: 'json:Mine'", "source", "is None, expected a class"),
    ],
)
def test_a_wrong_declaration_fails_validation(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch, line: str, key: str, says: str
) -> None:
    """Where `dg check defs` loads a wrong key or value, loading fails with the file, the key and what is allowed."""
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")
    text = f"type: {TYPE}\nattributes:\n  name: a\n  shards: x\n  {line}\n"
    with pytest.raises(Exception, match=r"(?s).*") as caught:
        load(tmp_path, text)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    assert error is not None, caught.value
    assert "mine/defs.yaml" in error.where
    assert error.key.startswith(key)
    assert says in str(error)


def test_a_wrong_declaration_stops_only_its_own_dataset(
    tmp_path: Path, dagster_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others load with all they have; the wrong ones are assets that nothing makes, with the error, and logged."""
    attributes = ("{name: a, shards: x}", "{name: b, shards: x, fliters: []}", "{shards: x}", "{name: c, shards: x}")
    text = "---\n".join(f"type: {TYPE}\nattributes: {one}\n" for one in attributes)
    definitions = load(tmp_path, text)
    graph = definitions.resolve_asset_graph()
    keys = graph.get_all_asset_keys()
    assert {key.path[0] for key in keys} == {"a", "c", "wrong_declarations"}
    assert {job.name for job in definitions.resolve_all_job_defs()} >= {"a_pack", "c_pack"}
    wrong = sorted((key for key in keys if key.path[0] == "wrong_declarations"), key=lambda key: list(key.path))
    assert [key.path[1:] for key in wrong] == [["mine", "1"], ["mine", "2"]]
    for key, name, says in zip(wrong, ("`b`", "mine/defs.yaml`"), ("fliters: is not", "name: is missing"), strict=True):
        node = graph.get(key)
        assert not node.is_executable
        assert name in (node.description or "")
        assert says in (node.description or "")
        assert says in str(node.metadata["error"])
        assert sum(says in record.getMessage() for record in caplog.records) == 1


WRONG = {
    "cron": "cron: '61 * * * *'",
    "day": "cron: '0 0 31 2 *'",
    "zone": "timezone: Europe/Nowhere",
    "filters": "filters: [{type: text_length, min_charz: 3}]",
    "annotators": "annotators: [{type: image_size, prefix: 3}]",
    "source": "source: 'missing_module:Mine'",
    "owners": "owners: [me]",
    "refused": "description: of a dataset that Dagster refuses",
}


def test_whatever_is_wrong_with_a_dataset_stops_no_other(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrong value is shown with the file and its key, and the other datasets have their jobs and schedules."""

    def build(spec: DatasetSpec) -> dg.Definitions:
        if spec.name == "refused":
            raise dg.DagsterInvalidDefinitionError("no")
        return build_definitions(spec)

    monkeypatch.setattr(component, "build_definitions", build)
    lines = {"first": "cron: '0 3 * * *'", **WRONG, "last": "filters: [{type: text_length, min_chars: 3}]"}
    documents = [f"type: {TYPE}\nattributes:\n  name: {n}\n  shards: x\n  {line}\n" for n, line in lines.items()]
    definitions = load(tmp_path, "---\n".join(documents))
    graph = definitions.resolve_asset_graph()
    wrong = [key for key in graph.get_all_asset_keys() if key.path[0] == "wrong_declarations"]
    errors = [str(graph.get(key).metadata["error"]) for key in wrong]
    assert len(errors) == len(WRONG)
    assert all("mine/defs.yaml: " in error for error in errors)
    for line in (line for name, line in WRONG.items() if name != "refused"):
        assert any(f"defs.yaml: {line.partition(':')[0]}" in error for error in errors), line
    assert any("attributes: Dagster refuses them: DagsterInvalidDefinitionError: no" in error for error in errors)
    jobs = {job.name for job in definitions.resolve_all_job_defs()}
    assert {name.rpartition("_")[0] for name in jobs if name.endswith("_pack")} == {"first", "last"}
    assert definitions.resolve_schedule_def("first_pending").cron_schedule == "0 3 * * *"


def test_the_shipped_code_location_loads_without_warnings(dagster_home: Path) -> None:
    """`mm_assets.definitions` holds the four demo datasets and the in-process executor."""
    from mm_assets.definitions import defs

    definitions = defs() if not isinstance(defs, dg.Definitions) else defs
    assert {k.path[0] for k in definitions.resolve_asset_graph().get_all_asset_keys()} == {
        "docs",
        "captions",
        "speech",
        "video",
    }
    assert definitions.executor is dg.in_process_executor


POST_PROCESSING = {
    "automation_condition": "'{{ dg.AutomationCondition.eager() }}'",
    "code_version": "v7",
    "deps": "[elsewhere/table]",
    "description": "other words",
    "freshness_policy": "'{{ dg.FreshnessPolicy.cron(\"0 9 * * *\", datetime.timedelta(hours=1)) }}'",
    "group_name": "other",
    "kinds": "[other]",
    "metadata": "{other: 1}",
    "owners": "['team:other']",
    "partitions_def": "{type: static, partition_keys: [a]}",
    "skippable": "true",
    "tags": "{other: '1'}",
}


def test_every_attribute_of_post_processing_is_tested() -> None:
    """The table above has each attribute that `post_processing` of a defs.yaml can change in this Dagster."""
    from dagster.components.resolved.core_models import AssetsDefUpdateKwargs

    assert sorted(POST_PROCESSING) == sorted(AssetsDefUpdateKwargs.model().model_fields)


@pytest.mark.parametrize("attribute", POST_PROCESSING)
def test_post_processing_leaves_every_step_in_the_jobs(tmp_path: Path, dagster_home: Path, attribute: str) -> None:
    """Whatever `post_processing` changes about the assets, both jobs keep their steps."""
    text = f"""
type: {TYPE}
attributes: {{name: mine, shards: x}}
post_processing:
  assets:
    - attributes: {{{attribute}: {POST_PROCESSING[attribute]}}}
"""
    definitions = load(tmp_path, text)
    steps = {name: len(definitions.resolve_job_def(name).nodes) for name in ("mine_pack", "mine_manifest")}
    assert steps == {"mine_pack": 6, "mine_manifest": 1}
    assert len(definitions.resolve_job_def("mine_pack").asset_layer.selected_asset_keys) == 7


def test_a_job_without_its_assets_is_an_error() -> None:
    """A job that selects an asset which the definitions lack does not load, so that none runs without steps."""
    spec = DatasetSpec.from_config({"name": "a", "shards": "x", "root": "/r"}, where="test")
    assets = build_assets(spec)
    definitions = dg.Definitions(
        assets=assets[1:], jobs=build_jobs(spec, assets), resources={resource_key(spec): StorageRoot(root="/r")}
    )
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="a_pack"):
        definitions.resolve_job_def("a_pack")
