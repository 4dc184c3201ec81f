"""The examples of the pages on loading run, and their defaults and limits are those of the code."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import mm_assets
from mm_assets import Budget, MultimodalLoader, SequencePacker
from mm_assets.fields import ImageField, TextField
from mm_assets.loading.batches import MAX_STAND_INS
from mm_assets.loading.loader import MAX_REPORTED
from mm_assets.loading.order import Blocks
from mm_assets.loading.rules import KEYS, TYPES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "spec" / "loading.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "count"), [("loading.md", 9), ("spec/loading.md", 6)])
def test_the_examples_run_in_order(page: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of a page runs after those before it."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with mm_assets.create("packed/captions/", {"image": ImageField(), "text": TextField()}) as writer:
        writer.write("0", {"image": np.zeros((8, 8, 3), np.uint8), "text": "black"})
    examples = re.findall(
        r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    assert len(examples) == count
    space: dict[str, object] = {}
    for number, example in enumerate(examples):
        exec(compile(example, f"docs/{page}, example {number}", "exec"), space)


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
