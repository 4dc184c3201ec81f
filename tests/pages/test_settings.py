"""docs/settings.md against the model of a declaration; run as a script, this writes the page's tables again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_assets.pipeline.spec import DatasetSpec, EngineOptions, ExportOptions, IndexOptions, ParquetOptions
from mm_assets.pipeline.spec_errors import expected
from mm_assets.rows.schema import MemberRules, Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
MODELS: dict[str, type[Settings]] = {
    "dataset": DatasetSpec,
    "samples": MemberRules,
    "parquet": ParquetOptions,
    "exports": ExportOptions,
    "indexes": IndexOptions,
    "engine": EngineOptions,
}


def table(model: type[Settings]) -> str:
    """The keys of a model as a Markdown table."""
    lines = ["| key | value | default | meaning | example |", "| --- | --- | --- | --- | --- |"]
    properties = model.model_json_schema()["properties"]
    for name in model.model_fields:
        schema = {"type": "object"} | properties[name]  # `samples` and others refer to their own table
        meaning = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", schema["description"])
        (example,) = schema["examples"]
        cells = (f"`{name}`", expected(schema), default(name, schema), meaning, f"`{name}: {inline(example)}`")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def default(name: str, schema: dict[str, Any]) -> str:
    value = schema.get("default")
    if value in (None, "", [], {}):
        return ""
    return f"{value >> 20} MiB" if name.endswith("_bytes") else f"`{json.dumps(value).strip(chr(34))}`"


def inline(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def page(text: str) -> str:
    """The page with each table as the model has it."""
    for name, model in MODELS.items():
        head, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{head}{mark}{table(model)}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def test_the_tables_are_those_of_the_model() -> None:
    """The page is what `python tests/pages/test_settings.py` writes."""
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in text for name in MODELS)
    assert text == page(text)


@pytest.mark.parametrize("name", MODELS)
def test_every_example_is_allowed(name: str) -> None:
    """The example of each key passes the check of declarations, as printed."""
    part = PAGE.read_text(encoding="utf-8").split(f"<!-- {name} -->")[1].split("<!-- end -->")[0]
    examples = [line.rsplit("`", 2)[1].replace("\\|", "|") for line in part.strip().splitlines()[2:]]
    assert len(examples) == len(MODELS[name].model_fields)
    for example in examples:
        given = yaml.safe_load(example)
        config = given if name == "dataset" else {name: given}
        if name == "exports":
            config = {name: [{"format": "webdataset", **given}]}
        if name == "indexes":
            config = {name: [{"modality": "embedding", **given}]}
        DatasetSpec.from_config({"name": "x", "shards": "s", "root": "r", **config}, where="docs/settings.md")


def test_engines_on_other_pages_are_settings_of_a_dataset() -> None:
    """The engines that the page and the values declare are settings of a dataset."""
    repository = PAGE.parents[1]
    names = ("docs/many-machines.md", "docs/spec/many-machines.md", "deploy/dagster.yaml", "deploy/helm-values.yaml")
    page = "".join((repository / name).read_text(encoding="utf-8") for name in names)
    declared = re.findall(r"engine: (\{.*?\})", page)
    assert len(declared) >= 3
    for engine in declared:
        config = {"name": "web", "shards": "s3://b/*.tar", "root": "s3://b", "engine": yaml.safe_load(engine)}
        assert DatasetSpec.from_config(config, where="page").engine is not None


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
