"""What the tests of other projects' libraries share: their environment, what they wrote, and the results for the page.

`make interop` runs them. They need ``--owners``, the Python of an environment of `requirements.txt`.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mm_assets
from mm_assets.exports.export import export

from ..pipeline.chain import declare, run_chain

SCRIPT = Path(__file__).with_name("owners.py")
DEMO = {
    "captions": "captions-00000.tar",
    "documents": "docs-00000.tar",
    "tiffs": "docs-00001.tar",
    "speech": "speech-00000.tar",
    "video": "video-00000.tar",
}
LARGER = {
    "photographs": "image-text/image-text-00000.tar",
    "RGB-D steps": "robotics/robotics-steps-00000.tar",
}
"""Shards that are not in the repository: tests of them skip if they are not beside the checkout."""
CORPORA = (*DEMO, "steps", *LARGER)
SHARD_BYTES = 600_000  # so that exports of the demo shards have several shards


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Without the other projects' Python there is nothing to test."""
    return None if config.getoption("--owners") else True


class Interop:
    """The corpora, and each as a format's owner wrote it, packed and exported; everything is made once.

    Args:
        python: of the environment that has the other projects' libraries.
        folder: where all files go.
        corpora: the tar of each.

    Attributes:
        results: by test, format and corpus, what is equal.
    """

    def __init__(self, python: str, folder: Path, corpora: Mapping[str, Path]) -> None:
        self.corpora = corpora
        self.results: list[Sequence[Any]] = []
        self._python = python
        self._folder = folder
        self._read: dict[str, Mapping[str, Any]] = {}

    def run(self, *arguments: str) -> str:
        """Runs `owners.py`, and returns what it prints."""
        home = str(self._folder / "home")
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": home, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        process = subprocess.run(
            [self._python, str(SCRIPT), *arguments],
            env={**os.environ, **offline, "HOME": home},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return process.stdout

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The version of each package of the environment."""
        result: Mapping[str, str] = json.loads(self.run("versions"))
        return result

    def written(self, format: str, corpus: str) -> Path:
        """Returns the folder of a corpus as the owner of a format wrote it."""
        folder = self._folder / "written" / format
        if not folder.exists():
            pairs = [text for name, shard in self.corpora.items() for text in (str(shard), str(folder / name))]
            self.run("write", format, *pairs)
        return folder / corpus

    def packed(self, shards: Path, name: str) -> Path:
        """Returns the manifest of shards that are packed with the settings that their samples determine."""
        root = self._folder / "packed" / name
        if not root.exists():
            run_chain(declare(root, shards))
        return root / "data" / "manifest.json"

    def packed_tar(self, corpus: str) -> Path:
        """Returns the manifest of a corpus' own tar."""
        return self.packed(self.corpora[corpus], f"tar/{corpus}")

    def packed_written(self, format: str, corpus: str) -> Path:
        """Returns the manifest of what the owner of a format wrote."""
        return self.packed(self.written(format, corpus), f"{format}/{corpus}")

    def exported(self, manifest: Path, format: str, name: str) -> Path:
        """Returns the folder of an export."""
        folder = self._folder / "exported" / name
        if not folder.exists():
            export(manifest, format, folder, shard_bytes=SHARD_BYTES)
        return folder

    def exported_tar(self, format: str, corpus: str) -> Path:
        """Returns the folder of a corpus' own tar, packed and exported."""
        return self.exported(self.packed_tar(corpus), format, f"tar/{format}/{corpus}")

    def read(self, format: str, corpus: str) -> Sequence[Any]:
        """Returns the samples of an export of a corpus, as the format's owner reads them."""
        if format not in self._read:
            folders = [str(self.exported_tar(format, name)) for name in self.corpora]
            self._read[format] = json.loads(self.run("read", format, *folders).splitlines()[-1])
        samples: Sequence[Any] = self._read[format][str(self.exported_tar(format, corpus))]
        return samples


def in_order(path: Path, shard: Path) -> Path:
    """Writes a tar with the samples of another by their keys, and their members by their names, as WebDataset does.

    Folders and containers with columns have this order, too.
    """
    with tarfile.open(shard) as source, tarfile.open(path, "w") as target:
        for member in sorted(source, key=lambda member: member.name.partition(".")[::2]):
            target.addfile(member, source.extractfile(member))
    return path


def steps(path: Path, photographs: Path) -> Path:
    """Writes a tar of robot steps: a frame, which is a picture of another tar, with state, action and task."""
    numbers = np.random.default_rng(0)
    with tarfile.open(photographs) as source, tarfile.open(path, "w") as target:
        pictures = (member for member in source if member.name.endswith(".png"))
        for number, member in zip(range(12), pictures, strict=False):
            picture = source.extractfile(member)
            assert picture is not None
            frame, state, action = io.BytesIO(), io.BytesIO(), io.BytesIO()
            Image.open(picture).convert("RGB").save(frame, "jpeg")
            np.save(state, numbers.normal(size=7).astype(np.float32))
            np.save(action, numbers.normal(size=(2, 3)))
            text = json.dumps({"task": "pick the drawing", "step": number, "reward": number / 8})
            contents = {"json": text.encode(), "rgb.jpg": frame, "state.npy": state, "action.npy": action}
            for suffix, content in contents.items():
                data = content if isinstance(content, bytes) else content.getvalue()
                added = tarfile.TarInfo(f"episode_000-{number:06d}.{suffix}")
                added.size = len(data)
                target.addfile(added, io.BytesIO(data))
    return path


@pytest.fixture(scope="session")
def interop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_shards: Path
) -> Iterator[Interop]:
    """All formats and corpora; writes the results, if ``--results`` names a file."""
    folder = tmp_path_factory.mktemp("interop")
    larger = Path(__file__).resolve().parents[3] / "shared" / "data"
    shards = {name: demo_shards / shard for name, shard in DEMO.items()}
    shards["steps"] = steps(folder / "steps.tar", shards["captions"])
    shards |= {name: larger / shard for name, shard in LARGER.items() if (larger / shard).exists()}
    corpora = {name: in_order(folder / f"{name}-in-order.tar", shard) for name, shard in shards.items()}
    interop = Interop(request.config.getoption("--owners"), folder, corpora)
    yield interop
    if path := request.config.getoption("--results"):
        versions = {"mm_assets": mm_assets.__version__, "ours": platform.python_version(), **interop.versions}
        Path(path).write_text(json.dumps({"versions": versions, "results": interop.results}, indent=1))


@pytest.fixture(params=CORPORA)
def corpus(request: pytest.FixtureRequest, interop: Interop) -> str:
    """The name of each corpus."""
    if request.param not in interop.corpora:
        pytest.skip("the larger sample corpora are not beside this checkout")
    name: str = request.param
    return name
