"""What the tests of other projects' libraries share: their environment, what they wrote, and the results for the page.

`make interop` runs them. They need ``--owners``, the Python of an environment of `requirements.txt`, and ``--lerobot``,
the Python of one of `requirements-lerobot.txt`.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mm_assets
from mm_assets.exports.export import export

from ..pipeline.chain import declare, run_chain
from .page import OWNERS

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
REAL_EPISODES = "robotics/robotics-episodes-00000.tar"
EPISODE_FORMATS = ("lerobot", "hdf5", "mcap")
"""Formats whose samples are episodes."""
FPS = 10
SHARD_BYTES = 600_000  # so that exports of the demo shards have several shards


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Without the other projects' Python there is nothing to test."""
    return None if config.getoption("--owners") and config.getoption("--lerobot") else True


class Interop:
    """The corpora, and each as a format's owner wrote it, packed and exported; everything is made once.

    Args:
        owners: the Python of the environment that has the other projects' libraries.
        lerobot: the Python of the environment that has LeRobot.
        folder: where all files go.
        corpora: the tar of each corpus of samples.
        episodes: the tar of each corpus of episodes.

    Attributes:
        corpora: the tar of each corpus.
        results: by test, format and corpus, what is equal.
    """

    def __init__(
        self, owners: str, lerobot: str, folder: Path, corpora: Mapping[str, Path], episodes: Mapping[str, Path]
    ) -> None:
        self.corpora = {**corpora, **episodes}
        self.results: list[Sequence[Any]] = []
        self._owners, self._lerobot = owners, lerobot
        self._folder = folder
        self._episodes = episodes
        self._read: dict[tuple[str, str], Mapping[str, Any]] = {}

    def run(self, command: str, *arguments: str) -> str:
        """Runs `owners.py` for the format or package that is the first argument, and returns what it prints."""
        home = str(self._folder / "home")
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": home, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        python = self._lerobot if arguments[0] == "lerobot" else self._owners
        process = subprocess.run(
            [python, str(SCRIPT), command, *arguments],
            env={**os.environ, **offline, "HOME": home},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return process.stdout

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The version of each package of both environments."""
        packages = sorted({*OWNERS.values()} - {"python", "lerobot"})
        return {**json.loads(self.run("versions", "lerobot")), **json.loads(self.run("versions", *packages))}

    def _corpora_of(self, format: str) -> Sequence[str]:
        """Returns the names of the corpora that a format's owner writes and reads."""
        return [name for name in self.corpora if (name in self._episodes) == (format in EPISODE_FORMATS)]

    def written(self, format: str, corpus: str) -> Path:
        """Returns the folder of a corpus as the owner of a format wrote it."""
        folder = self._folder / "written" / format
        if not folder.exists():
            names = self._corpora_of(format)
            self.run(
                "write", format, *(text for name in names for text in (str(self.corpora[name]), str(folder / name)))
            )
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

    def read_folders(self, format: str, folders: Sequence[Path]) -> Mapping[str, Any]:
        """Returns the samples of folders, as the format's owner reads them."""
        samples: Mapping[str, Any] = json.loads(self.run("read", format, *map(str, folders)).splitlines()[-1])
        return samples

    def read(self, format: str, corpus: str) -> Sequence[Any]:
        """Returns the samples of an export of a corpus, as the format's owner reads them."""
        return self._read_from(self.exported_tar, format, corpus)

    def read_written(self, format: str, corpus: str) -> Sequence[Any]:
        """Returns the samples of a corpus that the format's owner wrote, as it reads them."""
        return self._read_from(self.written, format, corpus)

    def _read_from(self, folder_of: Callable[[str, str], Path], format: str, corpus: str) -> Sequence[Any]:
        key = (folder_of.__name__, format)
        if key not in self._read:
            self._read[key] = self.read_folders(format, [folder_of(format, name) for name in self._corpora_of(format)])
        samples: Sequence[Any] = self._read[key][str(folder_of(format, corpus))]
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


def episodes(path: Path, photographs: Path) -> Path:
    """Writes a tar of robot episodes: moving pictures as a video and as images, with arrays and a task."""
    numbers = np.random.default_rng(0)
    with tarfile.open(photographs) as source, tarfile.open(path, "w") as target:
        pictures = (member for member in source if member.name.endswith(".png"))
        for number, (length, member) in enumerate(zip((12, 5, 23), pictures, strict=False)):
            file = source.extractfile(member)
            assert file is not None
            picture = Image.open(file).convert("RGB")
            views = {
                size: [np.roll(np.asarray(picture.resize(size)), 3 * n, axis=1) for n in range(length)]
                for size in ((96, 64), (32, 24))
            }
            values = {"task": f"follow the drawing {number % 2}", "fps": FPS, "robot_type": "arm"}
            contents = {"json": json.dumps(values).encode(), "observation.images.top.mp4": encode_video(views[96, 64])}
            arrays = {
                "observation.state": numbers.normal(size=(length, 7)).astype(np.float32),
                "action": numbers.normal(size=(length, 2, 3)),
                "next.done": np.arange(length) == length - 1,
                "timestamp": (np.arange(length) / FPS).astype(np.float32),
            }
            for name, array in arrays.items():
                data = io.BytesIO()
                np.save(data, array)
                contents[f"{name}.npy"] = data.getvalue()
            for frame, view in enumerate(views[32, 24]):
                data = io.BytesIO()
                Image.fromarray(view).save(data, "png")
                contents[f"observation.images.wrist.{frame}.png"] = data.getvalue()
            for suffix, content in contents.items():
                added = tarfile.TarInfo(f"episode_{number:06d}.{suffix}")
                added.size = len(content)
                target.addfile(added, io.BytesIO(content))
    return path


def encode_video(frames: Sequence[np.ndarray]) -> bytes:
    """Returns an MP4 of frames."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return target.getvalue()


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
    robots = {"episodes": episodes(folder / "episodes.tar", shards["captions"])}
    robots |= {"real episodes": larger / REAL_EPISODES} if (larger / REAL_EPISODES).exists() else {}
    options = (request.config.getoption(name) for name in ("--owners", "--lerobot"))
    interop = Interop(*options, folder, corpora, robots)
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
