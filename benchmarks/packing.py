"""Padding and speed of batches by a budget, beside lhotse, and of packed sequences, beside Megatron-Energon.

    pip install -e . lhotse megatron-energon torch soundfile
    python benchmarks/packing.py --data FOLDER                            # prints the tables
    python benchmarks/packing.py --data FOLDER --lengths documents.npy    # documents of these numbers of tokens

Samples are made once, in the formats of each candidate. Each measurement is a process of its own that runs one epoch,
and the candidates of a row run one after the other in each round; the tables have medians. Rates
are those after the first batch, without imports.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mm_assets
from mm_assets import Budget, MultimodalCollator, MultimodalLoader, SequencePacker
from mm_assets.fields import AudioField, TokensField

SAMPLE_RATE = 16_000
NUM_RECORDINGS = 4_000
MAX_FRAMES = 60 * SAMPLE_RATE  # of a batch, padding included
NUM_DOCUMENTS = 50_000
LENGTH = 4096  # tokens of a sequence
BATCH = 4  # sequences
BUFFER = 1024  # documents that Energon packs together
WORKERS = 2

Lengths = npt.NDArray[np.int64]
Batch = tuple[int, int]
"""Elements of a batch that are values, and all of them."""


def recording_lengths() -> Lengths:
    """Frames of recordings: log-normal, 0.5 to 30 seconds, 4 on average."""
    seconds = np.random.default_rng(0).lognormal(1.1, 0.8, NUM_RECORDINGS).clip(0.5, 30)
    return (seconds * SAMPLE_RATE).astype(np.int64)


def document_lengths(lengths_file: Path | None) -> Lengths:
    """Tokens of documents with a heavy tail, or drawn from a file; no candidate splits, so they are truncated."""
    rng = np.random.default_rng(0)
    lengths = (
        100 * (1 + rng.pareto(1.1, NUM_DOCUMENTS))
        if lengths_file is None
        else rng.choice(np.load(lengths_file), NUM_DOCUMENTS)
    )
    return lengths.clip(1, LENGTH).astype(np.int64)


# --- writing ----------------------------------------------------------------------------------------------------------


def recordings() -> Iterator[npt.NDArray[np.int16]]:
    """Noise."""
    rng = np.random.default_rng(1)
    for length in recording_lengths().tolist():
        yield rng.integers(-3000, 3000, length, np.int16)


def documents(lengths_file: Path | None) -> Iterator[npt.NDArray[np.uint16]]:
    """Random token ids."""
    rng = np.random.default_rng(1)
    for length in document_lengths(lengths_file).tolist():
        yield rng.integers(1, 50_000, length, np.uint16)


def write_recordings(folder: Path) -> None:
    """Writes a MULT file and, for lhotse, shards of its format Shar."""
    with mm_assets.create(folder / "speech.mult", {"audio": AudioField()}) as writer:
        for number, samples in enumerate(recordings()):
            writer.write(str(number), {"audio": (samples[:, None], SAMPLE_RATE)})
    if find_spec("lhotse"):
        from lhotse import MonoCut, Recording
        from lhotse.shar import SharWriter

        (folder / "shar").mkdir()
        with SharWriter(str(folder / "shar"), fields={"recording": "wav"}, shard_size=500) as shards:
            for number, samples in enumerate(recordings()):
                shards.write(memory_cut(number, samples, MonoCut, Recording))


def memory_cut(number: int, samples: npt.NDArray[np.int16], cut: Any, recording: Any) -> Any:
    """A cut of lhotse over a WAV in memory."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    audio = recording.from_bytes(file.getvalue(), recording_id=str(number))
    return cut(id=str(number), start=0, duration=audio.duration, channel=0, recording=audio)


def write_documents(folder: Path, lengths_file: Path | None) -> None:
    """Writes a MULT file and, for Energon, tars with an array per sample."""
    with mm_assets.create(folder / "documents.mult", {"input_ids": TokensField(vocab_size=50_000)}) as writer:
        for number, ids in enumerate(documents(lengths_file)):
            writer.write(str(number), {"input_ids": ids})
    if find_spec("megatron"):
        from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
        from webdataset import ShardWriter

        (folder / "energon").mkdir()
        with ShardWriter(f"file:{folder}/energon/%04d.tar", maxcount=5_000, verbose=0) as shards:
            for number, ids in enumerate(documents(lengths_file)):
                shards.write({"__key__": f"{number:08}", "ids": ids.tobytes()})
        names = sorted(path.name for path in (folder / "energon").glob("*.tar"))
        WebdatasetPreparator.prepare_dataset(
            folder / "energon", names, split_parts_patterns=[("train", ".*")], workers=1
        )
        kind = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
        (folder / "energon" / ".nv-meta" / "dataset.yaml").write_text(json.dumps(kind))


# --- candidates: an epoch of batches ----------------------------------------------------------------------------------


def speech_mm_assets(folder: Path) -> Iterator[Batch]:
    """A loader with a budget, padded by its collator."""
    collator = MultimodalCollator({"audio": {"source": "audio.samples", "pad_value": 0}}, "pt")
    with mm_assets.open(folder / "speech.mult") as data:
        for batch in MultimodalLoader(
            data, batch_size=Budget("audio.num_frames", MAX_FRAMES), num_workers=WORKERS, collator=collator
        ):
            yield int(batch["lengths"]["audio"].sum()), batch["audio"].numel()


def speech_lhotse(folder: Path) -> Iterator[Batch]:
    """`DynamicBucketingSampler` over Shar in the workers of a `DataLoader`, as its documentation recommends."""
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler, IterableDatasetWrapper
    from lhotse.dataset.collation import collate_audio
    from torch.utils.data import DataLoader, Dataset

    class Speech(Dataset):  # type: ignore[type-arg]  # torch is untyped where it is not installed
        def __getitem__(self, cuts: Any) -> Any:
            return collate_audio(cuts)

    cuts = CutSet.from_shar(in_dir=str(folder / "shar"), shuffle_shards=True, split_for_dataloading=True)
    sampler = DynamicBucketingSampler(
        cuts, max_duration=MAX_FRAMES / SAMPLE_RATE, num_buckets=30, shuffle=True, world_size=1, rank=0
    )
    for audio, lengths in DataLoader(IterableDatasetWrapper(Speech(), sampler), batch_size=None, num_workers=WORKERS):
        yield int(lengths.sum()), audio.numel()


def documents_mm_assets(folder: Path) -> Iterator[Batch]:
    """A loader with a packer."""
    with mm_assets.open(folder / "documents.mult") as data:
        packer = SequencePacker(LENGTH, return_tensors="pt")
        for batch in MultimodalLoader(data, batch_size=BATCH, num_workers=WORKERS, collator=packer):
            yield int((batch["segment_ids"] > 0).sum()), batch["input_ids"].numel()


def documents_energon(folder: Path) -> Iterator[Batch]:
    """A task encoder that packs as Megatron-LM's multimodal example does, by a greedy knapsack."""
    import torch
    from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
    from megatron.energon.task_encoder import DefaultTaskEncoder, stateless
    from megatron.energon.task_encoder.cooking import Cooker

    @stateless
    def cook(sample: Any) -> Any:
        return np.frombuffer(sample["ids"], np.uint16)

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]  # Energon has no types
        cookers = (Cooker(cook),)
        decoder = None

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            left = sorted(samples, key=len)
            sizes = [len(sample) for sample in left]
            packs = []
            while left:
                pack, space = [], LENGTH
                while (at := bisect_right(sizes, space) - 1) >= 0:
                    space -= sizes.pop(at)
                    pack.append(left.pop(at))
                packs.append(pack)
            return packs

        @stateless
        def pack_selected_samples(self, samples: list[Any]) -> Any:
            input_ids, segment_ids, position_ids = np.zeros((3, LENGTH), np.int64)
            at = 0
            for number, sample in enumerate(samples):
                place = slice(at, at := at + len(sample))
                input_ids[place], segment_ids[place] = sample, number + 1
                position_ids[place] = np.arange(len(sample))
            return torch.from_numpy(np.stack([input_ids, segment_ids, position_ids]))

        @stateless
        def batch(self, samples: list[Any]) -> Any:
            return torch.stack(samples, 1)

    loader = get_savable_loader(
        get_train_dataset(
            folder / "energon",
            split_part="train",
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=WORKERS),
            batch_size=BATCH,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            packing_buffer_size=BUFFER,
            task_encoder=Encoder(),
            repeat=False,
        )
    )
    for batch in loader:
        yield int((batch[1] > 0).sum()), batch[0].numel()


CANDIDATES = {
    "speech": {"mm_assets": speech_mm_assets, "lhotse": speech_lhotse},
    "documents": {"mm_assets": documents_mm_assets, "megatron": documents_energon},
}
"""By row and the package that a candidate needs."""


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(row: str, package: str, folder: Path) -> dict[str, float]:
    """One epoch: padding, elements per second after the first batch, also of processor time, and seconds to it."""
    for name in ("torch.utils.data", package):
        import_module(name)
    begin = start = time.perf_counter()
    used = processor_seconds()
    values = total = rest = 0
    for some, padded in CANDIDATES[row][package](folder):
        if not total:
            start = time.perf_counter()
        else:
            rest += some
        values += some
        total += padded
    return {
        "values": values,
        "padding": 1 - values / total,
        "rate": rest / (time.perf_counter() - start),
        "processor_rate": values / (processor_seconds() - used),
        "first": start - begin,
    }


def processor_seconds() -> float:
    """Time of this process and those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Measures, and prints a table per row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder for the samples")
    parser.add_argument("--lengths", type=Path, help=".npy with the tokens of documents, drawn from at random")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder: Path = arguments.data
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure, folder)))
        return
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_recordings(folder)
        write_documents(folder, arguments.lengths)
        (folder / "complete").touch()
    for row, candidates in CANDIDATES.items():
        found: dict[str, list[dict[str, float]]] = {name: [] for name in candidates if find_spec(name)}
        for _ in range(arguments.rounds):
            for name, results in found.items():
                command = [sys.executable, __file__, "--data", str(folder), "--measure", row, name]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                results.append(json.loads(output.splitlines()[-1]))
        print(f"| {row} | padding, % | million/s | million/s of processor time | first batch, s |")
        print("|---|---:|---:|---:|---:|")
        for name, results in found.items():
            padding, rate, processor, first = (
                statistics.median(result[key] for result in results)
                for key in ("padding", "rate", "processor_rate", "first")
            )
            print(f"| {name} | {100 * padding:.2f} | {rate / 1e6:.1f} | {processor / 1e6:.1f} | {first:.2f} |")
        print({name: {int(result["values"]) for result in results} for name, results in found.items()})


if __name__ == "__main__":
    main()
