"""The demo datasets give the same packed bytes, tables and verdicts as they always have."""

import json
from pathlib import Path

import pytest
import yaml

from mm_assets.pipeline.spec import DatasetSpec

from ..chain import run_chain
from .digests import run_digests

REFERENCE = Path(__file__).with_suffix(".json")
DECLARATIONS = Path(__file__).parents[3] / "mm_assets" / "defs" / "demo" / "defs.yaml"


@pytest.mark.parametrize("name", ["captions", "docs", "speech", "video"])
def test_a_demo_dataset_is_what_it_was(name: str, tmp_path: Path) -> None:
    """Packed files, tables and check results of all partitions equal the reference, which an earlier release made.

    A deliberate change of what is packed or checked changes the reference, with a line in the changelog.
    """
    pytest.importorskip("av", reason="the video extra is not installed")
    declared = {each["attributes"]["name"]: each["attributes"] for each in yaml.safe_load_all(DECLARATIONS.read_text())}
    config = {**declared[name], "root": str(tmp_path), "settle_seconds": 0}
    spec = DatasetSpec.from_config(config, where=str(DECLARATIONS), base=DECLARATIONS.parent)
    run_chain(spec)
    found, expected = run_digests(tmp_path)[name], json.loads(REFERENCE.read_text())[name]
    assert found["packed"] == expected["packed"]
    assert found["tables"] == expected["tables"]
    assert found["checks"] == expected["checks"]
