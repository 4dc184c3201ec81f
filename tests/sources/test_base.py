"""A source of a user's own, in one file outside the package: the ar archives of docs/spec/sources.md."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mm_assets
from mm_assets.errors import ConfigError, ShardError
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.sources import Source

from ..pipeline.chain import at_work, table_name

PAGE = Path(__file__).resolve().parents[2] / "docs" / "spec" / "sources.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
CODE = BLOCKS[0]
namespace: dict[str, Any] = {}
exec(compile(CODE, str(PAGE), "exec"), namespace)
ArSource: type[Source] = namespace["ArSource"]
exec(compile(BLOCKS[1], str(PAGE), "exec"), namespace)
TestArSource = namespace["TestArSource"]
"""The source of the page keeps the promises of a source, by the test of the page."""


def archived(files: Sequence[tuple[str, bytes]]) -> bytes:
    archive: bytes = TestArSource().make(files)
    return archive


def png(seed: int, size: int) -> bytes:
    target = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


FILES = [
    *((f"{k}.json", json.dumps({"caption": f"picture {k}", "score": k / 2}).encode()) for k in range(4)),
    *((f"{k}.png", png(k, 4 if k == 3 else 32)) for k in range(4)),
    *((f"{k}.txt", f"picture {k}".encode()) for k in range(4)),
    (".hidden", b"x"),
]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The import path of the page's source, in a file of the user's."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "ar_of_a_user.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)
    yield "ar_of_a_user:ArSource"
    sys.modules.pop("ar_of_a_user", None)


def declare(root: Path, shards: Path, source: str | None) -> DatasetStore:
    config = {"name": "archives", "shards": str(shards), "root": str(root), "settle_seconds": 0, "pack": "image_text"}
    config |= {"filters": [{"type": "image_size", "min_width": 16, "scope": "sample"}]}
    return DatasetStore(DatasetSpec.from_config({**config, "source": source}, where="defs.yaml"))


def test_a_user_source_goes_through_the_chain(tmp_path: Path, module: str) -> None:
    """Archives become an index, rows, content, filtered rows, packed files that pass every check, and samples."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "part-0.ar").write_bytes(archived(FILES))
    (tmp_path / "in" / "notes.tar").write_bytes(b"not an ar, so not a shard of this source")
    dataset = declare(tmp_path / "root", tmp_path / "in", module)
    (partition,) = register(dataset).partitions
    assert partition.key == "part-0"
    results = {stage.name: at_work(make, dataset, "part-0") for stage, make in stages.TABLE_STAGES.items()}
    results |= at_work(stages.packed, dataset, "part-0")
    for name, result in results.items():
        assert result.outcomes, name
        assert all(outcome.passed for outcome in result.outcomes), name
    at_work(publish.publish, dataset, "part-0")
    manifests.build_manifest(dataset)
    with mm_assets.open(dataset.store.path_of("manifest.json")) as packed:
        assert list(packed.sample_ids) == ["0", "1", "2"]
        images = [np.asarray(packed[k]["image"]) for k in range(3)]
    for k, image in enumerate(images):
        with Image.open(io.BytesIO(png(k, 32))) as expected:
            assert np.array_equal(image, np.asarray(expected))
    rejects = pq.read_table(dataset.store.path_of(table_name(dataset, "rejects", "part-0"))).to_pylist()
    assert [(row["member"], row["reason"]) for row in rejects] == [(".hidden", "hidden file")]


def test_the_accounting_is_recomputed_from_the_source(tmp_path: Path, module: str, monkeypatch: Any) -> None:
    """A source that lists fewer members for the index than for the check fails the check of members."""
    (tmp_path / "part-0.ar").write_bytes(archived(FILES))
    dataset = declare(tmp_path / "root", tmp_path / "part-0.ar", module)
    register(dataset)
    cls = sys.modules["ar_of_a_user"].ArSource
    complete = cls.members

    def members(self: Any, *, on_damaged_shard: str = "fail", damage: Any = None) -> Any:
        found = list(complete(self, on_damaged_shard=on_damaged_shard, damage=damage))
        return found if on_damaged_shard == "salvage" else found[:-1]

    monkeypatch.setattr(cls, "members", members)
    result = at_work(stages.raw_shards, dataset, "part-0")
    assert [outcome.name for outcome in result.outcomes if not outcome.passed] == ["members"]


def test_a_damaged_archive_is_salvaged_as_an_entry(tmp_path: Path, module: str) -> None:
    """A truncated archive fails its partition; no built-in source takes it without the setting."""
    (tmp_path / "part-0.ar").write_bytes(archived(FILES)[:-2])
    with pytest.raises(ShardError, match="has no whole member"):
        register(declare(tmp_path / "root", tmp_path / "part-0.ar", module))
    with pytest.raises(ShardError, match=r"expected tar \(.*listing"):
        register(declare(tmp_path / "root", tmp_path / "part-0.ar", None))


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("ar", "allowed: tar, energon, zip, "),
        ("no_such_module_here:Source", "cannot be imported"),
        ("pathlib:Path", "lacks SUFFIXES, accepts, objects, rows"),
    ],
)
def test_a_wrong_source_is_refused(tmp_path: Path, source: str, detail: str) -> None:
    """A name that is not a source fails the declaration with the key and what is allowed."""
    with pytest.raises(ConfigError, match=re.escape(detail)) as caught:
        declare(tmp_path, tmp_path, source)
    assert caught.value.key == "source"


def test_the_default_source_changes_no_digest(tmp_path: Path, module: str) -> None:
    """Without the setting a stage's digest is what it was; with it the digest and the declared schema change."""
    plain, own = (declare(tmp_path, tmp_path, source).spec for source in (None, module))
    assert "source" not in plain.declared
    assert own.declared["source"] == module
    assert all(stage.digest(plain) != stage.digest(own) for stage in stages.TABLE_STAGES)
