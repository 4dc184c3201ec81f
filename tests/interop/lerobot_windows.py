"""Writes episodes as a LeRobot dataset, and reads all of its items with `delta_timestamps`.

Run by the Python of an environment of `requirements-lerobot.txt`, which lacks this project::

    python lerobot_windows.py EPISODES FOLDER DELTAS ITEMS

EPISODES is an .npz of ``length`` (episodes,), ``state`` and ``action`` (frames, columns), ``camera`` (frames, H, W, 3)
and ``fps``. DELTAS is JSON. ITEMS becomes an .npz of each key's values and masks, one row per frame.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

KEYS = {"state": "observation.state", "action": "action", "camera": "observation.images.camera"}
"""What LeRobot calls the arrays."""


def write(episodes: dict[str, np.ndarray], folder: Path) -> None:
    """Writes the frames, the camera as images that lose nothing."""
    features = {
        KEYS[name]: {"dtype": "float32", "shape": episodes[name].shape[1:], "names": None}
        for name in ("state", "action")
    }
    shape = episodes["camera"].shape[1:]
    features[KEYS["camera"]] = {"dtype": "image", "shape": shape, "names": ["height", "width", "channels"]}
    dataset = LeRobotDataset.create("test/steps", int(episodes["fps"]), features, root=folder, use_videos=False)
    frame = 0
    for length in episodes["length"].tolist():
        for _ in range(length):
            dataset.add_frame({**{key: episodes[name][frame] for name, key in KEYS.items()}, "task": "reach"})
            frame += 1
        dataset.save_episode()
    dataset.finalize()


def main(episodes: str, folder: str, deltas: str, items: str) -> None:
    """Does both."""
    write(dict(np.load(episodes)), Path(folder))
    dataset = LeRobotDataset("test/steps", root=folder, delta_timestamps=json.loads(deltas))
    rows = [dataset[i] for i in range(len(dataset))]
    names = [name for name in rows[0] if name.endswith("_is_pad") or name in KEYS.values()]
    np.savez(items, **{name: np.stack([row[name].numpy() for row in rows]) for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
