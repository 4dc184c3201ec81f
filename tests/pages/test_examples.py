"""The examples run: the contrastive model learns the demo captions, and a stopped run resumes bit for bit."""

import inspect
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mm_assets
from mm_assets import Dataset
from mm_assets.errors import LoaderError
from mm_assets.fields import ImageField, TextField

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "contrastive.py"


@pytest.fixture
def torch() -> Iterator[Any]:
    """Torch with one thread and deterministic; its settings are restored afterwards."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield torch
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


@pytest.fixture
def script(torch: Any) -> SimpleNamespace:
    """The names that the script defines."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory, demo_shards: Path) -> Path:
    """The demo captions, with images as in the shard."""
    path = tmp_path_factory.mktemp("captions") / "captions.mult"
    with (
        tarfile.open(demo_shards / "captions-00000.tar") as tar,
        mm_assets.create(path, {"image": ImageField(), "text": TextField()}, fsync=False) as writer,
    ):
        members = {member.name: tar.extractfile(member) for member in tar}
        for name, member in sorted(members.items()):
            if name.endswith(".png"):
                caption = json.load(members[name.removesuffix(".png") + ".json"] or io.BytesIO())["caption"]
                writer.write(name, {"image": (member or io.BytesIO()).read(), "text": caption})
    return path


@pytest.fixture(scope="module")
def small(captions: Path) -> Iterator[Dataset]:
    """The same with images of 32 pixels, so that decoding them is fast."""
    path = captions.with_name("small.mult")
    sized = {"image": {"decode_size": [32, 32], "decode_resize": "pad", "channels": 4}}
    with (
        mm_assets.open(captions) as data,
        mm_assets.create(path, {"image": ImageField(), "text": TextField()}, fsync=False) as writer,
    ):
        for number, sample in enumerate(data.with_settings(sized)):
            writer.write(str(number), sample)
    with mm_assets.open(path) as data:
        assert len(data) == 40
        yield data


def test_the_loss_falls(script: SimpleNamespace, small: Dataset) -> None:
    """After 25 steps the model tells the demo's captions apart: its loss is far below that of guessing, ln 20."""
    trainer = script.Trainer(small)
    trainer.run(25)
    first, last = (sum(part) / 5 for part in (trainer.losses[:5], trainer.losses[-5:]))
    assert 2.5 < first < 4
    assert last < 0.7 * first


def test_a_stopped_run_resumes_bit_for_bit(script: SimpleNamespace, small: Dataset, torch: Any, tmp_path: Path) -> None:
    """Stopped during an epoch and resumed in a new trainer, losses and weights are those of an uninterrupted run."""
    whole = script.Trainer(small, seed=3)
    whole.run(12)
    stopped = script.Trainer(small, seed=3)
    stopped.run(5)
    assert 0 < stopped.loader.state_dict()["delivered"] < len(small)
    stopped.save(tmp_path / "run.pt")
    resumed = script.Trainer(small, seed=3, num_workers=0)
    resumed.load(tmp_path / "run.pt")
    assert resumed.losses == stopped.losses == whole.losses[:5]
    resumed.run(12)
    assert resumed.losses == whole.losses
    weights = whole.model.state_dict()
    assert all(torch.equal(found, weights[name]) for name, found in resumed.model.state_dict().items())
    with pytest.raises(LoaderError, match="its seed is 3, here it is 4"):
        script.Trainer(small, seed=4).load(tmp_path / "run.pt")


def test_the_script_trains_on_the_demo_images(
    captions: Path, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run as a program on images of all sizes, it writes a checkpoint and resumes from it with `--resume`."""
    checkpoint = tmp_path / "run.pt"
    command = [str(SCRIPT), "--data", str(captions), "--checkpoint", str(checkpoint), "--batch-size", "4", "--steps"]
    for more in (["1"], ["2", "--resume"]):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    found = re.findall(r"^step +(\d+)  epoch +0  loss \d+\.\d{3}$", capsys.readouterr().out, flags=re.MULTILINE)
    assert found == ["1", "2"]
    assert torch.load(checkpoint, weights_only=True)["loader"]["delivered"] == 8
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_errors_name_what_is_missing(script: SimpleNamespace, small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing packed data, too few samples, or a missing checkpoint end with a message that says what to do."""
    monkeypatch.setitem(script.main.__globals__, "DATA", Path("nowhere") / "manifest.json")
    with pytest.raises(SystemExit, match="`make run` packs the demo captions"):
        script.main([])
    with pytest.raises(SystemExit, match="its 40 samples make no batch of 41"):
        script.Trainer(small, batch_size=41)
    with pytest.raises(SystemExit, match="2"):
        script.main(["--resume"])


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch the script ends with the name of the extra that installs it."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=re.escape("pip install 'mm-assets[torch]'")):
        runpy.run_path(str(SCRIPT))


def test_the_page_names_scripts_and_options_that_exist() -> None:
    """Each script has a section of the examples' page, and every option that the page names exists."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `(.*?)`(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL))
    assert list(sections) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    for name, section in sections.items():
        options = set(re.findall(r"(?<!\w)--[a-z-]+", section))
        assert options
        assert [option for option in options if option not in (EXAMPLES / name).read_text(encoding="utf-8")] == []


# --- windows over the steps of a robot --------------------------------------------------------------------------------

ROBOT = EXAMPLES / "robot_windows.py"


@pytest.fixture
def train(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains as a rank of a process group, in this process, and returns the checkpoint."""

    def run(data: Path, checkpoint: Path, num_batches: int, world_size: int = 1) -> Any:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        arguments = [str(ROBOT), str(data), str(checkpoint), str(num_batches)]
        others = [
            subprocess.Popen([sys.executable, *arguments], env={**os.environ, **group, "RANK": str(rank)})
            for rank in range(1, world_size)
        ]
        for name, value in {**group, "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", arguments)
        runpy.run_path(str(ROBOT), run_name="__main__")
        assert [other.wait(60) for other in others] == [0] * len(others)
        return torch.load(checkpoint)

    return run


@pytest.fixture
def steps(shared_data: Path, tmp_path: Path) -> Path:
    """Steps of a real robot, packed."""
    samples = mm_assets.from_webdataset(str(shared_data / "robotics/robotics-steps-00000.tar"))
    with mm_assets.create(tmp_path / "steps.mult", samples.fields, fsync=False) as writer:
        for sample in samples:
            writer.write(*sample)
    return tmp_path / "steps.mult"


def test_a_robot_policy_resumes_on_another_number_of_ranks(
    steps: Path, train: Callable[..., Any], torch: Any, tmp_path: Path
) -> None:
    """Stopped within an epoch on one rank and resumed on two, weights and position are those of one run."""
    whole = train(steps, tmp_path / "whole.pt", 5)
    stopped = train(steps, tmp_path / "run.pt", 3)
    assert 0 < stopped["loader"]["delivered"] < stopped["loader"]["num_samples"] == 16
    resumed = train(steps, tmp_path / "run.pt", 2, world_size=2)
    assert resumed["loader"] == whole["loader"]
    for name, weights in whole["policy"].items():
        assert torch.equal(resumed["policy"][name], weights)
        assert not torch.equal(stopped["policy"][name], weights)


def test_the_robot_program_is_short(torch: Any) -> None:
    """The training program has as many lines as its page says."""
    lines = inspect.getsource(runpy.run_path(str(ROBOT))["train"]).splitlines()[2:]
    assert len(lines) == 15
