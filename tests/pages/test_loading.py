"""The examples of docs/loading.md run, and its defaults and limits are those of the code."""

import inspect
import re
from pathlib import Path

import pytest

from mm_assets import Budget, MultimodalLoader, SequencePacker
from mm_assets.loading.batches import MAX_STAND_INS
from mm_assets.loading.loader import MAX_REPORTED
from mm_assets.loading.order import Blocks
from mm_assets.loading.rules import KEYS, TYPES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "loading.md").read_text(encoding="utf-8")


def test_the_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of the page runs after those before it."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(examples) == 17
    space: dict[str, object] = {}
    for number, example in enumerate(examples):
        exec(compile(example, f"docs/loading.md, example {number}", "exec"), space)


def test_types_keys_and_numbers_are_those_of_the_code() -> None:
    """Each rule type and key is listed, and the numbers of the page are the code's."""
    part = PAGE.split("## Collation")[1].split("## Transforms")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE)) == TYPES
    assert [key for key in KEYS if f"`{key}`" not in part and f'"{key}"' not in part] == []
    assert f"`size` ({Blocks().size})" in PAGE
    assert f"`window` ({Blocks().window})" in PAGE
    assert f"`bucket` ({Budget('x', 1).bucket})" in PAGE
    assert f"(`bucket`,\n{SequencePacker(1).bucket:,})" in PAGE
    assert f"after {MAX_REPORTED:,}" in PAGE
    assert f"when {MAX_STAND_INS} of those" in PAGE


def test_every_argument_of_the_loader_is_documented() -> None:
    """Each of its parameters is described in the class's docstring."""
    text = inspect.getdoc(MultimodalLoader)  # without the indentation, which Python 3.13 and later remove themselves
    assert text is not None
    for name in list(inspect.signature(MultimodalLoader).parameters)[1:]:
        assert f"\n    {name}: " in text, name
