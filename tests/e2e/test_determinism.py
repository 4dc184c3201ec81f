"""Two runs over the same shards write the same bytes, whatever the process around them is like."""

import io
import os
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from .files import files_of

# Of both runs: the environment, further options, and the folder of the root.
FIRST = ({"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}, (), "root")
SECOND = (
    {"PYTHONHASHSEED": "4711", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "OMP_NUM_THREADS": "4", "PYTHONUTF8": "1"},
    ("--jobs", "2"),
    "elsewhere/with spaces/root",
)


@pytest.fixture
def shards(tmp_path: Path, demo_shards: Path) -> Path:
    """The first samples of four demo shards, and a shard of the same with truncated media: tables quote decoders."""
    folder = tmp_path / "shards"
    folder.mkdir()
    with ExitStack() as opened:
        whole, truncated = (
            opened.enter_context(tarfile.open(folder / name, "w")) for name in ("whole.tar", "truncated.tar")
        )
        for name in ("captions-00000", "docs-00001", "speech-00000", "video-00000"):
            source = opened.enter_context(tarfile.open(demo_shards / f"{name}.tar"))
            for member in source.getmembers()[:6]:
                file = source.extractfile(member)
                assert file is not None
                content = file.read()
                whole.addfile(member, io.BytesIO(content))
                if not member.name.endswith((".json", ".txt")):
                    content = content[: len(content) // 2]
                member.size = len(content)
                truncated.addfile(member, io.BytesIO(content))
    return folder


def run(
    shards: Path, folder: Path, environment: dict[str, str], options: tuple[str, ...], root: str
) -> dict[str, bytes]:
    """Packs the shards in a process of its own; answers with every file below the root, by its path there."""
    home = folder / "home"
    home.mkdir(parents=True)
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("DAGSTER_", "MM_ASSETS_", "LC_", "LANG"))}
    command = [
        sys.executable,
        "-P",
        "-c",
        "from mm_assets.cli.main import main; main()",
        "run",
        "--shards",
        str(shards),
    ]
    done = subprocess.run(
        [*command, "--root", str(folder / root), *options],
        cwd=folder,
        env={**plain, "DAGSTER_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode in (0, 1), done.stderr
    return {str(p.relative_to(folder / root)): p.read_bytes() for p in files_of(folder / root)}


@pytest.mark.timeout(600)
def test_every_file_is_the_same_in_another_environment(shards: Path, tmp_path: Path) -> None:
    """Hash seed, locale, time zone, threads, processes and folders change no byte of any file."""
    first = run(shards, tmp_path / "a", *FIRST)
    second = run(shards, tmp_path / "b", *SECOND)
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []
    assert sum(name.endswith(".mstr") for name in first) >= 1
