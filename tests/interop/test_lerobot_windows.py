"""Windows over steps are what LeRobot reads of the same episodes with `delta_timestamps`, values and masks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import mm_assets
from mm_assets.fields import ImageField, NDArrayField, ScalarField

SCRIPT = Path(__file__).with_name("lerobot_windows.py")
FPS = 10
LENGTHS = (1, 7, 12, 3)
KEYS = {"state": "observation.state", "action": "action", "camera": "observation.images.camera"}
OFFSETS = {"camera": [-1, 0], "state": [-3, -1, 0], "action": [*range(8)]}


@pytest.fixture(scope="module")
def frames() -> dict[str, np.ndarray]:
    """The frames of all episodes; see `lerobot_windows.py`."""
    rng = np.random.default_rng(0)
    count = sum(LENGTHS)
    return {
        "length": np.array(LENGTHS),
        "fps": np.array(FPS),
        "state": rng.normal(size=(count, 6)).astype(np.float32),
        "action": rng.normal(size=(count, 4)).astype(np.float32),
        "camera": rng.integers(0, 256, (count, 16, 24, 3), np.uint8),
    }


@pytest.fixture(scope="module")
def items(
    frames: dict[str, np.ndarray], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, np.ndarray]:
    """What LeRobot reads."""
    python = request.config.getoption("--lerobot")
    if python is None:
        pytest.skip("needs --lerobot, the Python of an environment that has LeRobot")
    folder = tmp_path_factory.mktemp("lerobot")
    np.savez(folder / "episodes.npz", **frames)
    deltas = {KEYS[name]: [offset / FPS for offset in offsets] for name, offsets in OFFSETS.items()}
    paths = [str(folder / "episodes.npz"), str(folder / "dataset"), json.dumps(deltas), str(folder / "items.npz")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "HOME": str(folder / "home")}
    command = [python, str(SCRIPT), *paths]
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(np.load(folder / "items.npz"))


@pytest.mark.parametrize("form", ["mult", "mstr"])
@pytest.mark.parametrize("in_seconds", [False, True])
def test_values_and_masks_are_lerobots(
    frames: dict[str, np.ndarray], items: Mapping[str, np.ndarray], form: str, in_seconds: bool, tmp_path: Path
) -> None:
    """With offsets in steps and in seconds, all items of all episodes are equal."""
    fields = {
        "camera": ImageField(encoding="png", size=frames["camera"].shape[1:3], channels=3),
        "state": NDArrayField("float32", frames["state"].shape[1:]),
        "action": NDArrayField("float32", frames["action"].shape[1:]),
        "episode_index": ScalarField("int64"),
        "timestamp": ScalarField("float32"),
    }
    places = [(episode, step) for episode, length in enumerate(LENGTHS) for step in range(length)]
    order = np.random.default_rng(1).permutation(len(places)).tolist()
    with mm_assets.create(tmp_path / f"steps.{form}", fields) as writer:
        for frame in order:
            episode, step = places[frame]
            values = {name: frames[name][frame] for name in KEYS}
            writer.write(f"{episode}/{step}", {**values, "episode_index": episode, "timestamp": step / FPS})
    at = {name: [offset / FPS if in_seconds else offset for offset in own] for name, own in OFFSETS.items()}
    with mm_assets.open(tmp_path / f"steps.{form}") as data:
        windows = data.windows(at, group="episode_index", order="timestamp", tolerance=1e-4 if in_seconds else None)
        batch = windows.read_batch(np.argsort(order))
    for name, key in KEYS.items():
        values = batch[name].values
        if name == "camera":  # which LeRobot gives as (T, channels, height, width) in [0, 1]
            values = values.transpose(0, 1, 4, 2, 3).astype(np.float32) / 255
        np.testing.assert_array_equal(values, items[key])
        np.testing.assert_array_equal(batch[f"{name}_is_pad"].values, items[f"{key}_is_pad"])
