"""Windows over the steps of robots, beside LeRobot on the same episodes.

    python benchmarks/robot_windows.py --data FOLDER --lerobot PYTHON [--rounds 5] [--rows state,images,video]

PYTHON is that of an environment with LeRobot, which lacks this project. An item has the state of two steps, a
chunk of 16 actions, their masks and, in rows with a camera, two frames as float32 (T, 3, H, W) in [0, 1]. Both shuffle
batches of 64, with two threads or two worker processes. Each measurement is a process of its own; rounds
are interleaved, and the table has medians over them, and the median of the ratios of a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_EPISODES, NUM_FRAMES, FPS, SIDE = 20, 200, 20, (240, 320)
BATCH = 64
OFFSETS = {"state": [-1, 0], "action": [*range(16)], "camera": [-1, 0]}
KEYS = {"state": "observation.state", "action": "action", "camera": "observation.images.camera"}
ROWS = ("state", "images", "video")  # no camera; PNG in both; H.264 in LeRobot and JPEG here
CANDIDATES = (
    "ours",
    "uint8",
    "lerobot",
)  # the second is ours with the images as they are decoded, for a device to convert
WORKERS = 2  # threads, or processes
WARM_UP_SECONDS, SECONDS = 2.0, 5.0


def frames(episode: int) -> Iterator[dict[str, Any]]:
    """Yields the steps of an episode: a scene with a disk that moves over a texture."""
    rng = np.random.default_rng(episode)
    state = np.cumsum(rng.normal(size=(NUM_FRAMES, 14)), axis=0).astype(np.float32) / 10
    action = np.diff(state, axis=0, append=state[-1:])
    y, x = np.mgrid[: SIDE[0], : SIDE[1]]
    texture = np.stack([128 + 60 * np.sin(x / 17 + c) * np.cos(y / 23 - episode) for c in range(3)], axis=-1)
    texture += rng.normal(scale=2, size=texture.shape)
    for step in range(NUM_FRAMES):
        center = np.array(SIDE) / 2 + 60 * np.array([np.sin(step / 9), np.cos(step / 13)])
        inside = (y - center[0]) ** 2 + (x - center[1]) ** 2 < 30**2
        camera = np.where(inside[..., None], (200, 40, 40), texture).clip(0, 255).astype(np.uint8)
        yield {"state": state[step], "action": action[step], "camera": camera}


def names(row: str) -> list[str]:
    """The modalities of a row."""
    return ["state", "action"] if row == "state" else ["state", "action", "camera"]


def write_ours(row: str, folder: Path) -> None:
    """Packs one sample per step."""
    import mm_assets
    from mm_assets.fields import ImageField, NDArrayField, ScalarField

    encoding = {"encoding": "png"} if row == "images" else {"encoding": "jpeg", "quality": 95}
    fields: dict[str, Any] = {name: NDArrayField("float32", (14,)) for name in ("state", "action")}
    fields |= {"episode": ScalarField("int32"), "step": ScalarField("int32")}
    if row != "state":
        fields["camera"] = ImageField(size=SIDE, channels=3, **encoding)
    with mm_assets.create(folder / "steps.mstr", fields) as writer:
        for episode in range(NUM_EPISODES):
            for step, frame in enumerate(frames(episode)):
                values = {name: frame[name] for name in names(row)}
                writer.write(f"{episode}/{step}", {**values, "episode": episode, "step": step})


def write_lerobot(row: str, folder: Path) -> None:
    """Writes the same with LeRobot."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features: dict[str, Any] = {
        KEYS[name]: {"dtype": "float32", "shape": (14,), "names": None} for name in ("state", "action")
    }
    if row != "state":
        kind = "image" if row == "images" else "video"
        features[KEYS["camera"]] = {"dtype": kind, "shape": (*SIDE, 3), "names": ["height", "width", "channels"]}
    dataset = LeRobotDataset.create(
        "bench/steps", FPS, features, root=folder / "dataset", use_videos=row == "video", vcodec="h264"
    )
    for episode in range(NUM_EPISODES):
        for frame in frames(episode):
            dataset.add_frame({**{KEYS[name]: frame[name] for name in names(row)}, "task": "reach"})
        dataset.save_episode()
    dataset.finalize()


def batches_ours(row: str, folder: Path, *, converts: bool) -> Iterator[Any]:
    """Yields batches, without end."""
    import torch

    import mm_assets
    from mm_assets import MultimodalCollator, MultimodalLoader

    data = mm_assets.open(folder / "steps.mstr")
    windows = data.windows({name: OFFSETS[name] for name in names(row)}, group="episode", order="step")
    outputs = [*names(row), *(f"{name}_is_pad" for name in names(row))]
    collator = MultimodalCollator({name: {"type": "stack"} for name in outputs}, return_tensors="pt")
    loader = MultimodalLoader(windows, batch_size=BATCH, num_workers=WORKERS, collator=collator, last="drop")
    while True:
        for batch in loader:
            if row != "state" and converts:
                batch["camera"] = batch["camera"].permute(0, 1, 4, 2, 3).contiguous().to(torch.float32).div_(255)
            yield [batch[name] for name in outputs]


def batches_lerobot(row: str, folder: Path) -> Iterator[Any]:
    """Yields batches, without end."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    deltas = {KEYS[name]: [offset / FPS for offset in OFFSETS[name]] for name in names(row)}
    dataset = LeRobotDataset("bench/steps", root=folder / "dataset", delta_timestamps=deltas)
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True, persistent_workers=True
    )
    keys = [KEYS[name] for name in names(row)]
    while True:
        for batch in loader:
            yield [batch[key] for key in (*keys, *(f"{key}_is_pad" for key in keys))]


def measure(candidate: str, row: str, folder: Path) -> float:
    """Returns items per second, after a warm-up."""
    if candidate == "lerobot":
        batches = batches_lerobot(row, folder)
    else:
        batches = batches_ours(row, folder, converts=candidate == "ours")
    shapes = [(BATCH, len(OFFSETS[name])) for name in names(row)] * 2
    count, begin, start = 0, time.perf_counter(), 0.0
    for batch in batches:
        assert [tuple(one.shape[:2]) for one in batch] == shapes
        now = time.perf_counter()
        if not start and now - begin > WARM_UP_SECONDS:
            start = now
        elif start:
            count += BATCH
            if now - start > SECONDS:
                return count / (now - start)
    raise AssertionError("batches have no end")


def run(python: str, *arguments: str) -> str:
    """Runs this script in a process of its own, without a network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([python, __file__, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1] if done.stdout else ""


def folder_of(data: Path, row: str, candidate: str) -> Path:
    """Where the files of a candidate are."""
    return data / f"{row}-{'lerobot' if candidate == 'lerobot' else 'ours'}"


def main() -> None:
    """Writes the files that are missing, measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder for the files, 2 GB")
    parser.add_argument("--lerobot", required=True, help="the Python of an environment with LeRobot")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS))
    options = parser.parse_args()
    python = {"ours": sys.executable, "uint8": sys.executable, "lerobot": options.lerobot}
    rows = options.rows.split(",")
    for row in rows:
        for candidate in CANDIDATES:
            folder = folder_of(options.data, row, candidate)
            if not (folder / "done").exists():
                folder.mkdir(parents=True)
                run(python[candidate], "write", candidate, row, str(folder))
                (folder / "done").touch()
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds):
        for row in rows:
            for candidate in CANDIDATES[:: -1 if number % 2 else 1]:
                folder = folder_of(options.data, row, candidate)
                rate = float(run(python[candidate], "measure", candidate, row, str(folder)))
                rates.setdefault((row, candidate), []).append(rate)
                print(f"round {number + 1}, {row}: {candidate}: {rate:,.0f} items/s", file=sys.stderr)
    print("| row | LeRobot, items/s | ours | ratio | ours, uint8 | ratio | LeRobot, MB | ours, MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        theirs = rates[row, "lerobot"]
        cells = [f"{statistics.median(theirs):,.0f}"]
        for candidate in ("ours", "uint8"):
            own = rates[row, candidate]
            ratio = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
            cells += [f"{statistics.median(own):,.0f}", f"{ratio:.1f}"]
        for candidate in ("lerobot", "ours"):
            files = folder_of(options.data, row, candidate).rglob("*")
            cells.append(f"{sum(path.stat().st_size for path in files if path.is_file()) / 1e6:.0f}")
        print(f"| `{row}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "write":
        (write_ours if rest[0] == "ours" else write_lerobot)(rest[1], Path(rest[2]))
    elif command == "measure":
        print(measure(rest[0], rest[1], Path(rest[2])))
    else:
        main()
