"""Train a small model to hear what it sees: the loudness of the sound of each frame of a clip.

Each sample of a batch is a random window of two seconds of a clip: eight frames, and the sound of the same two seconds.
The data has a ``clip`` in each sample; ``make run`` packs the demo clip.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import mm_assets
from mm_assets import Dataset, MultimodalCollator, MultimodalLoader, Window

try:
    import torch
except ImportError as error:
    raise SystemExit("this example needs torch: pip install 'mm-assets[torch]'") from error
from torch import nn

DATA = Path(__file__).resolve().parent.parent / "dagster_home" / "data" / "video" / "manifest.json"
NUM_FRAMES = 8
SIDE = 64  # pixels of the square that a frame is decoded to
NAMES = ("video", "video_mask", "audio", "audio_mask")


# --- data -------------------------------------------------------------------------------------------------------------


def make_loader(data: Dataset, batch_size: int = 8, **options: Any) -> MultimodalLoader:
    """Return a loader of (n, 8, SIDE, SIDE, 3) uint8 frames and (n, 32000) float32 audio samples, with their masks."""
    clips = data.filter("clip.num_frames > 0 and clip.num_audio_samples > 0")
    sized = {"size": [SIDE, SIDE], "decode_rate": 16_000, "decode_channels": 1}
    return MultimodalLoader(
        clips.with_settings({"clip": sized}),
        batch_size=batch_size,
        window=Window(seconds=2, frames=NUM_FRAMES),
        collator=MultimodalCollator({name: {"type": "stack", "source": f"clip.{name}"} for name in NAMES}, "pt"),
        **options,
    )


# --- model ------------------------------------------------------------------------------------------------------------


class Listener(nn.Module):
    """Two convolutions and a mean over the pixels: a number for each frame."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 16, 5, stride=4), nn.GELU(), nn.Conv2d(16, 32, 5, stride=4), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1))

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the squared error of the loudness in nepers, over the frames that a clip has."""
        frames = batch["video"].flatten(0, 1).permute(0, 3, 1, 2) / 255
        predicted = self.layers(frames).view(-1, NUM_FRAMES)
        power = batch["audio"].unflatten(1, (NUM_FRAMES, -1)).square().mean(2)
        errors = predicted - (power + 1e-8).log() / 2
        is_there = batch["video_mask"] & batch["audio_mask"].unflatten(1, (NUM_FRAMES, -1)).all(2)
        return errors[is_there & batch["valid"][:, None]].square().mean()


# --- training ---------------------------------------------------------------------------------------------------------


def train(path: str, num_batches: int, checkpoint: Path | None = None) -> list[float]:
    """Train for some batches, from the checkpoint on if there is one, and write it. Returns the loss of each."""
    torch.manual_seed(0)
    losses = []
    with mm_assets.open(path) as data:
        loader, model = make_loader(data), Listener()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run: dict[str, Any] = {"loader": loader, "model": model, "optimizer": optimizer}
        if checkpoint is not None and checkpoint.exists():
            for name, state in torch.load(checkpoint).items():
                run[name].load_state_dict(state)
        for batch in islice(chain.from_iterable(repeat(loader)), num_batches):  # one epoch after the other
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            print(f"epoch {loader.epoch}  from {batch['window'][0, 0]:.2f} s  loss {losses[-1]:.3f}")
        if checkpoint is not None:
            torch.save({name: part.state_dict() for name, part in run.items()}, checkpoint)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small model to predict the loudness of a clip's frames.")
    parser.add_argument("--data", default=str(DATA), help="path or URL of a packed file, manifest or folder")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="file to resume from if it exists, and to write at the end")
    options = parser.parse_args()
    torch.set_num_threads(1)  # other cores decode, and the order of sums is the same on every machine
    train(options.data, options.batches, options.checkpoint)
