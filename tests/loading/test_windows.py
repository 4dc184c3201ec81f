"""Loaders of windows: the promises of the suite, and where windows are."""

from typing import Any

import numpy as np
import pytest

import mm_assets
from mm_assets import Dataset, MultimodalCollator, MultimodalLoader, Window
from mm_assets.errors import ConfigError
from mm_assets.fields import Audio, AudioField, SyncedVideoAudioField, TimedTextField, VideoAudio
from mm_assets.testing import LoaderSuite

RATE = 1000
NUM_SAMPLES = 23


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Talks of 1 to 5 s, in which every sample and word holds its own time; every seventh has no clip."""
    path = tmp_path_factory.mktemp("windows") / "talks.mult"
    fields = {"clip": SyncedVideoAudioField(encoding="frames"), "audio": AudioField(), "words": TimedTextField()}
    with mm_assets.create(path, fields, fsync=False) as writer:
        for i in range(NUM_SAMPLES):
            seconds = 1 + i % 5
            sound = Audio(np.arange(seconds * RATE, dtype=np.float32)[:, None] / (5 * RATE), RATE)
            frames = np.zeros((seconds * 10, 8, 8, 3), np.uint8)
            clip = None if i % 7 == 6 else VideoAudio(frames=frames, frame_rate=10, audio=sound)
            words = [(k / 4, k / 4 + 0.2, str(k / 4)) for k in range(seconds * 4)]
            writer.write(str(i), {"clip": clip, "audio": sound, "words": words})
    with mm_assets.open(path) as data:
        yield data.with_settings(
            {
                "clip": {"size": [8, 8], "decode_rate": RATE, "decode_channels": 1},
                "audio": {"decode_rate": RATE, "decode_channels": 1},
            }
        )


class TestWindows(LoaderSuite):
    """A loader of windows of all modalities."""

    @pytest.fixture(autouse=True)
    def _data(self, talks: Dataset) -> None:
        self.data = talks

    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        return MultimodalLoader(
            self.data,
            batch_size=3,
            seed=seed,
            num_workers=num_workers,
            rank=rank,
            world_size=world_size,
            window=Window(seconds=2, frames=4),
        )


def test_a_batch_holds_the_windows_that_it_names(talks: Dataset) -> None:
    """All modalities of a row are of the seconds in `window`, and short samples are masked."""
    loader = MultimodalLoader(talks, batch_size=NUM_SAMPLES, window=Window(seconds=2, frames=4))
    batch = next(iter(loader))
    assert batch["clip"]["video"].shape == (NUM_SAMPLES, 4, 8, 8, 3)
    assert batch["clip"]["audio"].shape == batch["audio"]["samples"].shape == (NUM_SAMPLES, 2 * RATE)
    for row, index in enumerate(batch["index"].tolist()):
        start, seconds = batch["window"][row]
        room = max(index % 5 - 1, 0)
        assert (seconds, 0 <= start <= room) == (2.0, True)
        samples = batch["audio"]["samples"][row][batch["audio"]["mask"][row]]
        assert len(samples) == min(2, 1 + index % 5) * RATE
        assert samples[0] == np.float32(round(start * RATE)) / np.float32(5 * RATE)
        for word in batch["words"][row]:
            assert word.start_seconds + start == pytest.approx(float(word.text))
        shown = batch["clip"]["video_mask"][row].sum()
        assert shown == (0 if index % 7 == 6 else 2 if index % 5 == 0 else 4)


def test_starts_are_uniform_and_differ_by_epoch_and_seed(talks: Dataset) -> None:
    """Starts of many epochs fill the room evenly, and no two epochs or seeds have the same ones."""
    starts = []
    for seed in (0, 1):
        loader = MultimodalLoader(talks, ["audio"], 23, seed=seed, num_workers=0, window=Window(seconds=1))
        for _ in range(30):
            batch = next(iter(loader))
            starts.append(dict(zip(batch["index"].tolist(), batch["window"][:, 0].tolist(), strict=True)))
    shares = np.array([[epoch[i] / (i % 5) for i in range(NUM_SAMPLES) if i % 5] for epoch in starts])
    assert len(np.unique(shares)) == shares.size
    assert np.histogram(shares, bins=4, range=(0, 1))[0].min() > 0.2 * shares.size
    assert shares.max() < 1


def test_windows_without_settings_are_lists(talks: Dataset) -> None:
    """Audio of unknown rate and clips without a size come as lists; a collator may take parts of them."""
    plain = talks.with_settings({"clip": {"size": None}, "audio": {"decode_channels": None}})
    batch = next(iter(MultimodalLoader(plain, batch_size=4, shuffle=False, window=Window(seconds=1.5, frames=3))))
    assert [clip.frames.shape for clip in batch["clip"]] == [(3, 8, 8, 3)] * 4
    assert [len(audio.samples) for audio in batch["audio"]] == [1000, 1500, 1500, 1500]
    collator = MultimodalCollator({"sound": {"type": "pad", "source": "audio.samples", "max_length": [1500]}})
    batch = next(
        iter(MultimodalLoader(plain, batch_size=4, shuffle=False, collator=collator, window=Window(seconds=1.5)))
    )
    assert batch["sound"].shape == (4, 1500, 1)
    assert batch["lengths"]["sound"].tolist() == [1000, 1500, 1500, 1500]
    assert batch["window"].shape == (4, 2)


@pytest.mark.parametrize("arguments", [{"seconds": 0}, {"seconds": float("nan")}, {"seconds": 1, "frames": 0}])
def test_wrong_windows_are_refused(arguments: dict[str, Any]) -> None:
    """A window without a duration or frames is a `ConfigError`."""
    with pytest.raises(ConfigError, match="window"):
        Window(**arguments)


def test_the_argument_is_a_window(talks: Dataset) -> None:
    """A number in place of a window, and an output named as the entry, are a `ConfigError`."""
    with pytest.raises(ConfigError, match="window"):
        MultimodalLoader(talks, window=2.0)  # type: ignore[arg-type]  # what is tested
    rules = MultimodalCollator({"window": {"source": "words"}})
    with pytest.raises(ConfigError, match="window"):
        MultimodalLoader(talks, collator=rules, window=Window(seconds=2))
    MultimodalLoader(talks, collator=rules)


def test_mixed_samples_have_windows(talks: Dataset) -> None:
    """A mix of samples reads the windows of its sources, each of its own duration."""
    recipe = {"unit": "sample", "sources": {"all": {"dataset": talks}, "long": {"dataset": talks.select([4, 9])}}}
    mixed = mm_assets.mix(recipe, seed=3, batch_size=8, modalities=["audio"], window=Window(seconds=2))
    for batch in mixed:
        for row, mask in enumerate(batch["audio"]["mask"]):
            index = int(batch["index"][row])
            seconds = 5 if batch["source"][row] == "long" else 1 + index % 5
            assert mask.sum() == min(2, seconds) * RATE
            assert 0 <= batch["window"][row, 0] <= max(seconds - 2, 0)
            samples = batch["audio"]["samples"][row]
            assert samples[0] == np.float32(round(batch["window"][row, 0] * RATE)) / np.float32(5 * RATE)
