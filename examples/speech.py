"""Train a small speech recognizer on packed utterances, in batches of equal padded size.

A log-mel spectrogram, as Whisper takes it, becomes the bytes of the transcript by CTC. The data has ``audio`` and
``text`` in each sample, with audio of any rate and number of channels; ``make run`` packs the demo utterances.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mm_assets
from mm_assets import Budget, Dataset, MultimodalCollator, MultimodalLoader
from mm_assets.media.tokenizers import ByteTokenizer

try:
    import torch
except ImportError as error:
    raise SystemExit("this example needs torch: pip install 'mm-assets[torch]'") from error
from torch import nn
from torch.nn import functional

DATA = Path(__file__).resolve().parent.parent / "dagster_home" / "data" / "speech" / "manifest.json"
RATE = 16_000  # Hz
MAX_SECONDS = 30
NUM_BANDS = 80

TOKENIZER = ByteTokenizer()


# --- data -------------------------------------------------------------------------------------------------------------


def make_loader(data: Dataset, budget: int = 60 * RATE, **options: Any) -> MultimodalLoader:
    """Return a loader of spectrograms and byte ids, with at most `budget` stored audio frames per batch, padded."""
    speech = data.filter(f"audio.num_frames between 1 and {MAX_SECONDS} * audio.sample_rate and present_text")
    mono = {"decode_rate": RATE, "decode_channels": 1, "decode_length": MAX_SECONDS * RATE}
    return MultimodalLoader(
        speech.with_settings({"audio": mono}),
        batch_size=Budget("audio.num_frames", budget),
        transforms={"audio": lambda audio: log_mel(audio["samples"][audio["mask"]]), "text": TOKENIZER.encode},
        collator=MultimodalCollator({"audio": {"type": "pad"}, "text": {"type": "pad", "dtype": "int64"}}, "pt"),
        **options,
    )


def log_mel(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return (frames, NUM_BANDS) of (n,) samples: 25 ms every 10 ms, the loudest 80 dB scaled to a range of 2."""
    size, hop = RATE // 40, RATE // 100
    padded = np.pad(samples, size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop] * np.hanning(size + 1)[:-1]
    power = np.abs(np.fft.rfft(frames)) ** 2
    bands = np.log10(np.maximum(power @ mel_filters(size).T, 1e-10))
    return (np.maximum(bands, bands.max() - 8) / 4 + 1).astype(np.float32)


def mel_filters(size: int) -> npt.NDArray[np.float64]:
    """Return (NUM_BANDS, size // 2 + 1): triangles of equal width on the mel scale, each with area 1."""
    mels = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), NUM_BANDS + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    bins = np.linspace(0, RATE / 2, size // 2 + 1)
    low, center, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = np.minimum((bins - low) / (center - low), (high - bins) / (high - center))
    return np.maximum(triangles, 0) * 2 / (high - low)


# --- model ------------------------------------------------------------------------------------------------------------


class Recognizer(nn.Module):
    """Two convolutions, of which the first halves the frames, and a score for each byte."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv1d(NUM_BANDS, 64, 5, stride=2, padding=2), nn.GELU(), nn.Conv1d(64, 64, 9, padding=4)]
        self.layers = nn.Sequential(*layers, nn.GELU())
        self.scores = nn.Linear(64, TOKENIZER.vocab_size)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the CTC loss of the rows that repeat no other one."""
        hidden = self.layers(batch["audio"].transpose(1, 2))
        chances = self.scores(hidden.permute(2, 0, 1)).log_softmax(2)
        num_frames = (batch["lengths"]["audio"] + 1) // 2
        arguments = (chances, batch["text"], num_frames, batch["lengths"]["text"])
        losses = functional.ctc_loss(*arguments, blank=TOKENIZER.PAD_ID, reduction="none", zero_infinity=True)
        return losses[batch["valid"]].sum() / batch["lengths"]["text"].sum()


# --- training ---------------------------------------------------------------------------------------------------------


def train(path: str, num_batches: int, checkpoint: Path | None = None) -> list[float]:
    """Train for some batches, from the checkpoint on if there is one, and write it. Returns the loss of each."""
    torch.manual_seed(0)
    losses = []
    with mm_assets.open(path) as data:
        loader, model = make_loader(data), Recognizer()
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
            print(f"epoch {loader.epoch}  {len(batch['index'])} utterances  loss {losses[-1]:.3f}")
        if checkpoint is not None:
            torch.save({name: part.state_dict() for name, part in run.items()}, checkpoint)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small speech recognizer on packed utterances.")
    parser.add_argument("--data", default=str(DATA), help="path or URL of a packed file, manifest or folder")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="file to resume from if it exists, and to write at the end")
    options = parser.parse_args()
    torch.set_num_threads(1)  # other cores decode, and the order of sums is the same on every machine
    train(options.data, options.batches, options.checkpoint)
