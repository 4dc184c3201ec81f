"""Every code block of the quick start, the tutorials and the how-tos runs, in order, with the printed output."""

import json
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import fsspec
import numpy as np
import pytest
import yaml
from PIL import Image

from mm_assets.fields import FIELD_NAMES, FIELD_TYPES

from ..e2e.databases import open_databases
from ..s3_server import serve
from .blocks import Reader

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Follow(Protocol):
    """Follows a page, and calls a function before the page removes what it made."""

    def __call__(self, page: str, before_cleanup: Callable[[], None] = ...) -> None: ...


def contents(folder: Path) -> list[Path]:
    """What pages have left in a folder, beside the bytecode of modules that they import from it."""
    return sorted(path for path in folder.iterdir() if path.name != "__pycache__")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Dagster instance that all pages share: creating one takes seconds."""
    with open_databases():
        yield tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def bucket(demo_shards: Path) -> Iterator[str]:
    """The URL of an S3 server with the bucket that the pages name; the server has one memory for all that it serves."""
    with serve() as (url, _):
        s3 = fsspec.filesystem("s3", key="test", secret="test", endpoint_url=url)
        s3.mkdir("my-bucket")
        s3.put(str(demo_shards / "speech-00000.tar"), "my-bucket/talks/talks-00000.tar")
        yield url


@pytest.fixture
def follow(tmp_path: Path, demo_shards: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follow]:
    """Follows a page in a folder in which the demo shards are where they are in a checkout; it has to clean up."""
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.delenv("MM_ASSETS_ROOT", raising=False)
    folder = tmp_path / "checkout"
    (folder / "mm_assets" / "defs" / "demo").mkdir(parents=True)
    (folder / "mm_assets" / "defs" / "demo" / "shards").symlink_to(demo_shards)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands add the current folder
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def followed(page: str, before_cleanup: Callable[[], None] = lambda: None) -> None:
        forget_clients()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        before = contents(folder)
        builtin = {*FIELD_NAMES, *FIELD_TYPES}
        reader = Reader(DOCS / page, monkeypatch, before_cleanup=before_cleanup)
        reader.follow()
        reader.space.clear()  # datasets and connections that a page leaves open
        assert contents(folder) == before, page
        assert Path.cwd() == folder, page
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
        for registry in (FIELD_NAMES, FIELD_TYPES):
            for key in registry.keys() - builtin:
                del registry[key]

    yield followed
    forget_clients()


def forget_clients() -> None:
    """Removes the clients of S3: they keep the server and credentials of a page."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def compare(made: str, kept: str) -> None:
    """The picture that a page's code made is the one that the page shows; or it becomes that, if it should be written.

    Resizing may differ by a gray level from one release of a decoder to the next.
    """
    place = DOCS / "images" / kept
    with Image.open(made) as image:
        found = np.asarray(image.convert("RGB"), np.int16)
    if os.environ.get("MM_ASSETS_PICTURES") == "write":
        Image.fromarray(found.astype(np.uint8)).quantize(128).save(place, optimize=True)
    with Image.open(place) as image:
        expected = np.asarray(image.convert("RGB"), np.int16)
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() < 4


def test_the_quick_start(follow: Follow) -> None:
    """It ends with the picture that the page shows."""
    follow("quick-start.md", lambda: compare("sheet.png", "quick-start.png"))


def test_your_own_bucket(follow: Follow, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards on an S3 server are planned, packed and read as the page says."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket)
    follow("tutorials/own-bucket.md")


def test_your_own_filter(follow: Follow) -> None:
    """The filter of the page drops the drawings that it shows."""
    follow("tutorials/own-filter.md", lambda: compare("dropped.png", "few-colors.png"))


def test_a_robot_dataset(follow: Follow) -> None:
    """Episodes become time series, depth and images."""
    follow("tutorials/robot-dataset.md")


def test_train_and_resume(follow: Follow) -> None:
    """A run that was stopped continues on one rank and on four."""
    follow("tutorials/train-and-resume.md")


def test_from_hugging_face_and_back(follow: Follow) -> None:
    """A folder of Parquet is packed, loaded and exported, with the rows that came in."""
    follow("tutorials/hugging-face.md")


def test_leave(follow: Follow) -> None:
    """Exported tars have the members of the demo shard, byte for byte or as equal JSON; those of the script too."""

    def compare_members() -> None:
        before = members_of([Path("mm_assets/defs/demo/shards/captions-00000.tar")])
        for folder in ("tars", "by-script"):
            after = members_of(sorted(Path("leaving", folder).glob("*.tar")))
            assert sorted(after) == sorted(before)
            assert [name for name in before if not name.endswith(".json") and after[name] != before[name]] == []
            assert all(json.loads(after[name]) == json.loads(before[name]) for name in before if name.endswith(".json"))

    follow("tutorials/leave.md", compare_members)


def test_s3_credentials(follow: Follow, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that a server can answer run; the others have options that exist."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket)
    follow("how-to/s3-credentials.md")


@pytest.mark.parametrize(
    "page",
    [
        "retries.md", "change-filters.md", "why-dropped.md", "disk-space.md", "backups.md",
        "own-field.md", "exclude.md", "rename-move-delete.md", "costs.md", "upgrade.md",
    ],
)  # fmt: skip
def test_how_tos(page: str, follow: Follow) -> None:
    """Each block runs, with the messages and numbers that are printed."""
    follow(f"how-to/{page}")


def test_messages(follow: Follow) -> None:
    """Commands and code of the page raise the messages that it explains."""
    follow("spec/messages.md")


def test_your_own_project(follow: Follow) -> None:
    """The project that the page makes has a dataset that the commands find."""
    follow("how-to/own-project.md")


@pytest.mark.parametrize("page", ["writing.md", "timeline.md", "embeddings.md", "agents.md"])
def test_pages_on_using_the_data(page: str, follow: Follow) -> None:
    """Written folders, look-ups by time, the search over a stream, and the guide for programs work as printed."""
    follow(page)


def menu() -> list[str]:
    """The pages that the tests above follow, in the order of the menu."""
    text = re.sub(r"!!python\S+", "", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = re.findall(r"[\w/-]+\.md", json.dumps(yaml.safe_load(text)["nav"]))
    followed = set(re.findall(r'"((?:tutorials/|how-to/)?[a-z0-9-]+\.md)"', Path(__file__).read_text(encoding="utf-8")))
    return [page for page in pages if page in followed or page.removeprefix("how-to/") in followed]


@pytest.mark.slow
def test_pages_follow_each_other(follow: Follow, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages run in one folder, in the order of the menu and then in reverse: none is in the way of another."""
    pages = menu()
    assert len(pages) == 23
    for page in (*pages, *reversed(pages)):
        if page in ("tutorials/own-bucket.md", "how-to/s3-credentials.md"):
            monkeypatch.setenv("AWS_ENDPOINT_URL", bucket)
        else:
            monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
        follow(page)


def members_of(shards: list[Path]) -> dict[str, bytes]:
    """The files in tars by name."""
    found = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                found[member.name] = content.read()
    return found
