"""The README's own code and claims, executed."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

from ..pipeline.chain import at_work

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def packed_demo(root: Path, name: str, shards: Path) -> None:
    """A demo dataset, from its shards to its manifest."""
    config = {"name": name, "shards": str(shards), "root": str(root), "settle_seconds": 0}
    dataset = DatasetStore(DatasetSpec.from_config(config, where="test"))
    register(dataset)
    for key in dataset.partitions():
        for stage in (stages.raw_shards, stages.rows, stages.materialized_rows, stages.filtered_rows, stages.packed):
            at_work(stage, dataset, key)
        at_work(publish.publish, dataset, key)
    manifests.build_manifest(dataset)


def test_the_library_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of writing and reading a packed file works as printed."""
    (example,) = [block for block in blocks("python") if "mm_assets.create" in block]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "pairs.mult").exists()


def test_the_declaration_example_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML of the README passes the check of declarations, import path included."""
    (declaration,) = blocks("yaml")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "filters.py").write_text(
        "from mm_assets.filters import Filter\n\n\n"
        "class NoLogos(Filter):\n"
        "    def __init__(self, *, threshold: float) -> None:\n"
        "        self.threshold = threshold\n\n"
        "    def judge(self, block):\n"
        "        return ()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = yaml.safe_load(declaration)["attributes"]
    spec = DatasetSpec.from_config(config, where="README.md")
    assert (spec.name, spec.pack, len(spec.filters)) == ("web", "interleaved", 3)


def test_the_examples_of_demo_data_run(tmp_path: Path, demo_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both examples read and load the demo captions, and the state is one of a finished epoch."""
    first, training = [block for block in blocks("python") if "manifest.json" in block]
    packed_demo(tmp_path / "packed", "default", demo_shards / "captions-*.tar")
    (tmp_path / "dagster_home" / "data").mkdir(parents=True)
    (tmp_path / "dagster_home" / "data" / "captions").symlink_to(tmp_path / "packed" / "default")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    assert len(names["captions"]) == 40
    assert len(names["batch"]["image"]) == 8
    names["data"].close()
    exec(compile(training, "README.md", "exec"), names)
    assert names["batch"]["image"].shape[1:] == (64, 64, 3)
    assert names["state"]["epoch"] in (0, 1)
