"""Train a small contrastive image-text model on packed captions, with checkpoints to stop and resume.

An image encoder and a text encoder learn to embed a picture and its caption close together, and other pairs apart, by a
symmetric cross-entropy over the similarities in a batch. ``make run`` packs the demo captions that this reads; with
``--data`` it reads any packed dataset that has an image and a text in each sample.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mm_assets
from mm_assets import Dataset, MultimodalCollator, MultimodalLoader
from mm_assets.media.tokenizers import ByteTokenizer

try:
    import torch
except ImportError as error:
    raise SystemExit("this example needs torch: pip install 'mm-assets[torch]'") from error
from torch import nn
from torch.nn import functional

DATA = Path(__file__).resolve().parent.parent / "dagster_home" / "data" / "captions" / "manifest.json"
SIDE = 32  # pixels of the square that an image is decoded to
MAX_TOKENS = 64
WIDTH = 64  # of the shared embedding space

TOKENIZER = ByteTokenizer()


# --- data -------------------------------------------------------------------------------------------------------------


def prepare_image(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Composite a drawing, (H, W, 4) uint8, on white: (3, H, W) float32 in [-1, 1]."""
    colors, alpha = image[:, :, :3].astype(np.float32), image[:, :, 3:].astype(np.float32) / 255
    composite = colors * alpha + 255 * (1 - alpha)
    return np.ascontiguousarray(composite.transpose(2, 0, 1) / 127.5 - 1)


def prepare_text(text: str) -> npt.NDArray[np.int64]:
    """Return the ids of a caption's bytes, (n,) int64."""
    return np.array(TOKENIZER.encode(text), np.int64)


def make_loader(data: Dataset, *, batch_size: int, seed: int, num_workers: int) -> MultimodalLoader:
    """Return a loader of random crops at one size and padded ids, as tensors."""
    image = {"decode_size": [SIDE, SIDE], "decode_crop": {"scale": [0.8, 1]}, "channels": 4}
    text = {"type": "pad", "pad_value": TOKENIZER.PAD_ID, "max_length": MAX_TOKENS, "dtype": "int64"}
    return MultimodalLoader(
        data.with_settings({"image": image}),
        batch_size=batch_size,
        shuffle=True,
        last="drop",  # a pair is contrasted with the others of its batch: a smaller batch is another task
        seed=seed,
        num_workers=num_workers,
        transforms={"image": prepare_image, "text": prepare_text},
        collator=MultimodalCollator({"image": {"type": "stack", "dtype": "float32"}, "text": text}, "pt"),
    )


# --- model ------------------------------------------------------------------------------------------------------------


class ImageEncoder(nn.Module):
    """Three convolutions, each halving the size, and a linear map."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.out = nn.Linear(64 * (SIDE // 8) ** 2, WIDTH)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(n, 3, H, W) float32 to (n, WIDTH)."""
        return self.out(self.layers(images).flatten(1))


class TextEncoder(nn.Module):
    """Embedded bytes, a convolution over them, and a maximum over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENIZER.vocab_size, 32, padding_idx=TOKENIZER.PAD_ID)
        self.layers = nn.Sequential(nn.Conv1d(32, 64, 5, padding=2), nn.GELU())
        self.out = nn.Linear(64, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(n, MAX_TOKENS) int64 to (n, WIDTH)."""
        return self.out(self.layers(self.embedding(ids).transpose(1, 2)).amax(dim=2))


class ContrastiveModel(nn.Module):
    """Both encoders, and the scale of the similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = ImageEncoder(), TextEncoder()
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # CLIP's initial value

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the similarity of each image, a row, to each text, a column: (n, n)."""
        rows = functional.normalize(self.image(images), dim=1)
        columns = functional.normalize(self.text(ids), dim=1)
        return self.log_scale.clamp(max=math.log(100)).exp() * rows @ columns.T


def loss_of(similarities: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of finding each image's text and each text's image; ln n for guesses among n pairs."""
    pairs = torch.arange(len(similarities))
    return (functional.cross_entropy(similarities, pairs) + functional.cross_entropy(similarities.T, pairs)) / 2


# --- training ---------------------------------------------------------------------------------------------------------


class Trainer:
    """A training run: model, optimizer, and position in the data.

    Args:
        data: with the modalities ``image`` and ``text``.
        batch_size: pairs per step.
        seed: of the model's initial weights, the order of the samples, and the transforms.
        num_workers: decoding threads.
    """

    def __init__(self, data: Dataset, *, batch_size: int = 20, seed: int = 0, num_workers: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = ContrastiveModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01)
        if len(data) < batch_size:
            raise SystemExit(f"{data.path}: its {len(data)} samples make no batch of {batch_size}: see --batch-size")
        self.loader = make_loader(data, batch_size=batch_size, seed=seed, num_workers=num_workers)
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        """Train until this number of steps is done, over as many epochs as needed."""
        idle = 0  # epochs without a step; the first may be the rest of an epoch
        while len(self.losses) < steps:
            done, idle = len(self.losses), idle + 1
            with iter(self.loader) as batches:  # a whole epoch, or after `load` the rest of one
                for batch in batches:
                    loss = self.step(batch)
                    if loss is None:
                        continue
                    self.losses.append(loss)
                    if len(self.losses) % 10 == 0 or len(self.losses) == steps:
                        print(f"step {len(self.losses):4}  epoch {self.loader.epoch:3}  loss {self.losses[-1]:.3f}")
                    if len(self.losses) == steps:
                        return
            idle = 0 if len(self.losses) > done else idle
            if idle == 2:
                raise SystemExit("no batch has two samples with both an image and a text: there is nothing to contrast")

    def step(self, batch: dict[str, Any]) -> float | None:
        """Take one optimizer step and return the loss before it; None for a batch without two pairs to contrast."""
        # Rows that repeat another one, or lack their image or text, are not pairs.
        rows = batch["valid"] & batch["present"]["image"] & batch["present"]["text"]
        if rows.sum() < 2:
            return None
        loss = loss_of(self.model(batch["image"][rows], batch["text"][rows]))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),  # after the last batch that was trained on
            "losses": self.losses,
        }
        temporary = path.with_name(path.name + ".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint; the loader refuses one with other data or another seed."""
        state = torch.load(path, weights_only=True)
        self.loader.load_state_dict(state["loader"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = list(state["losses"])


def main(arguments: list[str] | None = None) -> None:
    """Train with the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train a small image-text contrastive model on packed captions.")
    parser.add_argument("--data", default=str(DATA), help="path or URL of a packed file, manifest or folder")
    parser.add_argument("--steps", type=int, default=60, help="of the whole run, including those before a checkpoint")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="decoding threads")
    parser.add_argument("--checkpoint", type=Path, help="file to write at the end, and to resume from")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    options = parser.parse_args(arguments)
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if options.data == str(DATA) and not DATA.exists():
        raise SystemExit(f"{DATA} does not exist: `make run` packs the demo captions; --data names other data")
    # The model is small, and other cores decode. One thread also makes the order of sums the same on every machine.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with mm_assets.open(options.data) as data:
        trainer = Trainer(data, batch_size=options.batch_size, seed=options.seed, num_workers=options.workers)
        if options.resume:
            trainer.load(options.checkpoint)
            print(f"resuming after step {len(trainer.losses)}, in epoch {trainer.loader.epoch}")
        trainer.run(options.steps)
        if options.checkpoint is not None:
            trainer.save(options.checkpoint)


if __name__ == "__main__":
    main()
