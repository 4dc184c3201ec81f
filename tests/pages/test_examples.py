"""The examples run: the contrastive model learns the demo captions, and a stopped run resumes bit for bit."""

import io
import json
import re
import runpy
import sys
import tarfile
from collections.abc import Iterator
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
    assert re.findall(r"^## `(.*?)`", page, flags=re.MULTILINE) == [path.name for path in EXAMPLES.glob("*.py")]
    options = set(re.findall(r"(?<!\w)--[a-z-]+", page))
    assert options
    assert [option for option in options if f'"{option}"' not in SCRIPT.read_text(encoding="utf-8")] == []
