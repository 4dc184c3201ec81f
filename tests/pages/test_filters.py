import inspect
import re
from pathlib import Path

import pytest

from mm_assets.filters.apply import FilterStream
from mm_assets.filters.registry import BUILTIN_ANNOTATORS, BUILTIN_FILTERS, build_annotator, build_filter
from mm_assets.filters.sharpness import MAX_PIXELS
from mm_assets.media.silence import MAX_SAMPLES
from mm_assets.rows.schema import DatasetSchema

DOCS = Path(__file__).resolve().parents[2] / "docs" / "spec" / "filters.md"


@pytest.fixture(scope="module")
def text() -> str:
    return DOCS.read_text(encoding="utf-8")


def _parameters(path: str) -> dict[str, str]:
    """Parameters of a built-in class and their defaults as YAML writes them."""
    module, _, name = path.partition(":")
    cls = getattr(__import__(module, fromlist=[name]), name)
    written = {None: "null", True: "true", False: "false", "": ""}
    return {
        p.name: written.get(p.default, str(p.default)) if not isinstance(p.default, float) else str(p.default)
        for p in inspect.signature(cls).parameters.values()
    }


@pytest.mark.parametrize("kind", sorted(BUILTIN_FILTERS))
def test_parameter_tables_are_those_of_the_code(text, kind):
    """Each built-in filter has a section whose table lists its parameters and defaults, in the constructor's order."""
    section = re.search(rf"^### `{kind}`\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    documented = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section[1], re.MULTILINE))
    assert list(documented.items()) == list(_parameters(BUILTIN_FILTERS[kind]).items())


@pytest.mark.parametrize("kind", sorted(BUILTIN_ANNOTATORS))
def test_the_annotators_table_is_that_of_the_code(text, kind):
    """Each built-in annotator has a row that names its columns with their types, and its parameters."""
    row = re.search(rf"^\| `{kind}` \| (.*?) \| (\S+) \| (.*?) \|(.*)\|$", text, re.MULTILINE)
    assert row is not None
    built = build_annotator({"type": kind}, where="w", key="k")
    assert re.findall(r"`(\w+)` (int64|double|string|bool)", row[1]) == [(c.name, c.type) for c in built.columns]
    assert {c.rows or "content" for c in built.columns} == {row[2]}
    assert row[3].startswith("no") == (not built.needs_content)
    own = {name: default for name, default in _parameters(BUILTIN_ANNOTATORS[kind]).items() if name != "prefix"}
    assert dict(re.findall(r"`(\w+)` \(default `([^`]*)`", row[4])) == own


def test_limits_in_the_text_are_those_of_the_code(text):
    """The text has the limits of decoded images and audio."""
    assert f"{MAX_PIXELS:,}" in text
    assert f"{MAX_SAMPLES:,}" in text


def test_the_example_runs(text, make_table, image, tmp_path, monkeypatch):
    """The example of your own filter and annotator works as printed, named by import path."""
    (code,) = re.findall(r'^```python\n("""my_filters\.py.*?)^```', text, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_filters.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    annotator = build_annotator({"type": "my_filters:FirstWord"}, where="defs.yaml", key="annotators[0]")
    config = {"type": "my_filters:MinShortSide", "name": "short_side", "min_pixels": 20, "at_most": 2}
    short_side = build_filter(config, where="defs.yaml", key="filters[0]")
    images = [("image", image(w, h)) for w, h in [(30, 20), (30, 19), (50, 50), (60, 60)]]
    stream = FilterStream(
        [make_table({"a": [("text", "one two"), *images]})],
        annotators=[annotator],
        filters=[short_side],
        schema=DatasetSchema(annotator_columns=annotator.columns),
    )
    kept = [row for batch in stream for row in batch.to_pylist()]
    assert [(r["position"], r["first_word"]) for r in kept] == [(-1, None), (0, "one"), (1, None), (3, None)]
    dropped = [row for part in stream.take_dropped() for row in part.to_pylist()]
    assert [(r["position"], r["filter"], r["reason"], r["value"]) for r in dropped] == [
        (2, "short_side", "too_small", 19.0), (4, "short_side", "enough", None)
    ]  # fmt: skip
