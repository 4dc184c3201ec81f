"""Train a tiny causal transformer on interleaved documents, packed into sequences of one length.

A text has a token per character, and an image a token per patch of a grid. Several documents share a sequence, and
attention and loss stay within each. The data has sequences ``text`` and ``image`` in each sample; ``make run`` packs
the demo documents.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

import mm_assets
from mm_assets import Dataset, MultimodalLoader, SequencePacker

try:
    import torch
except ImportError as error:
    raise SystemExit("this example needs torch: pip install 'mm-assets[torch]'") from error
from torch import nn
from torch.nn import functional

DATA = Path(__file__).resolve().parent.parent / "dagster_home" / "data" / "docs" / "manifest.json"
SIDE = 32  # pixels of the square that an image is decoded to
PATCH = 8  # pixels of the side of a patch
NUM_PATCHES = (SIDE // PATCH) ** 2
EOS_ID = 256  # ends a document; the ids below are bytes
WIDTH = 64


# --- data -------------------------------------------------------------------------------------------------------------


def make_loader(data: Dataset, length: int = 1024, **options: Any) -> MultimodalLoader:
    """Return a loader of sequences of `length` tokens, with the images of each."""
    documents = data.with_settings({"image": {"inner": {"decode_size": [SIDE, SIDE], "channels": 3}}})
    packer = SequencePacker(
        length,
        pieces,
        tokens=["text.num_code_points"],
        images={"image": NUM_PATCHES},
        split="between_images",
        eos_id=EOS_ID,
        return_tensors="pt",
    )
    return MultimodalLoader(documents, ["text", "image"], collator=packer, **{"batch_size": 2, **options})


def pieces(document: Mapping[str, Any]) -> Iterator[Any]:
    """Yield images and bytes of a document in order: a byte per character, that of ``?`` if it is not in Latin-1."""
    texts = [(at, np.frombuffer(text.encode("latin-1", "replace"), np.uint8)) for at, text in document["text"] or ()]
    images = [(at, ("image", image)) for at, image in document["image"] or ()]
    for _, piece in sorted(texts + images, key=lambda item: item[0]):
        yield piece


# --- model ------------------------------------------------------------------------------------------------------------


class Writer(nn.Module):
    """Embedded bytes and patches, one layer of attention, and a score for each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(EOS_ID + 1, WIDTH)
        self.patches = nn.Linear(3 * PATCH**2, WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        layers = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()]
        self.scores = nn.Sequential(*layers, nn.Linear(4 * WIDTH, EOS_ID + 1))

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the cross-entropy of the bytes that follow another token of their document."""
        ids, segments = batch["input_ids"], batch["segment_ids"]
        is_patch = ids < 0
        hidden = self.bytes(ids.clamp(min=0))
        images = batch["image"].values.permute(0, 3, 1, 2) / 255
        patches = self.patches(functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2))
        hidden = hidden.masked_scatter(is_patch[:, :, None], patches)
        is_visible = (segments[:, :, None] == segments[:, None]).tril()
        query, key, value = self.attention(hidden).chunk(3, 2)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, is_visible)
        is_target = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) & ~is_patch[:, 1:]
        return functional.cross_entropy(self.scores(hidden[:, :-1][is_target]), ids[:, 1:][is_target])


# --- training ---------------------------------------------------------------------------------------------------------


def train(path: str, num_batches: int, checkpoint: Path | None = None) -> list[float]:
    """Train for some batches, from the checkpoint on if there is one, and write it. Returns the loss of each."""
    torch.manual_seed(0)
    losses = []
    with mm_assets.open(path) as data:
        loader, model = make_loader(data), Writer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
            fill = (batch["segment_ids"] > 0).float().mean()
            print(f"epoch {loader.epoch}  {len(batch['index'])} parts  {fill:.0%} filled  loss {losses[-1]:.3f}")
        if checkpoint is not None:
            torch.save({name: part.state_dict() for name, part in run.items()}, checkpoint)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny causal transformer on packed documents.")
    parser.add_argument("--data", default=str(DATA), help="path or URL of a packed file, manifest or folder")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="file to resume from if it exists, and to write at the end")
    options = parser.parse_args()
    torch.set_num_threads(1)  # other cores decode, and the order of sums is the same on every machine
    train(options.data, options.batches, options.checkpoint)
