"""The training programs of the examples run, and their input stops and resumes on any number of ranks."""

import io
import json
import re
import runpy
import tarfile
import wave
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar

import numpy as np
import pytest

import mm_assets
from mm_assets import Dataset
from mm_assets.fields import Audio, AudioField, ImageField, SequenceField, SyncedVideoAudioField, TextField, VideoAudio
from mm_assets.testing.loaders import plain

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
MAX_LINES = 15  # of a program's training input


@pytest.fixture(scope="module", autouse=True)
def torch() -> Iterator[Any]:
    """Torch with one thread; its setting is restored afterwards."""
    torch = pytest.importorskip("torch")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(num_threads)


def members_of(shard: Path) -> dict[str, bytes]:
    """Returns the content of each member of a shard, by name."""
    with tarfile.open(shard) as tar:
        return {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar}


def write_utterances(path: Path, shards: Path) -> None:
    """Writes 24 parts of the demo utterances, of 0.3 to 1.5 seconds."""
    members = members_of(shards / "speech-00000.tar")
    with mm_assets.create(path, {"audio": AudioField(), "text": TextField()}, fsync=False) as writer:
        for name in sorted(name for name in members if name.endswith(".wav"))[:4]:
            with wave.open(io.BytesIO(members[name])) as file:
                rate, samples = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")
            for part in range(6):
                audio = Audio(samples[part * rate // 4 :][: (3 + 2 * part) * rate // 10, None], rate)
                writer.write(f"{name}/{part}", {"audio": audio, "text": members[name[:-3] + "txt"].decode()[:9]})


def write_clips(path: Path, shards: Path) -> None:
    """Writes 16 parts of the demo clip, of 2 to 3 seconds."""
    clip = {"clip": SyncedVideoAudioField()}
    whole = path.with_name("whole.mult")
    with mm_assets.create(whole, clip, fsync=False) as writer:
        writer.write("0", {"clip": members_of(shards / "video-00000.tar")["bigbuckbunny.mp4"]})
    small = {"size": [64, 64], "decode_rate": 16_000, "decode_channels": 1}
    with mm_assets.open(whole) as data:
        video = data.with_settings({"clip": small})[0]["clip"]
    with mm_assets.create(path, {"clip": SyncedVideoAudioField(encoding="frames")}, fsync=False) as writer:
        for part in range(16):
            frames = video.frames[4 * part : 4 * part + 52 + part]
            audio = Audio(video.audio.samples[2560 * part : 2560 * part + 640 * len(frames)], 16_000)
            writer.write(str(part), {"clip": VideoAudio(frames=frames, frame_rate=25, audio=audio)})


def write_documents(path: Path, shards: Path) -> None:
    """Writes parts of the demo documents, of at most an image and 1200 characters."""
    members = members_of(shards / "docs-00000.tar")
    fields = {"text": SequenceField(inner=TextField()), "image": SequenceField(inner=ImageField())}
    with mm_assets.create(path, fields, fsync=False) as writer:
        for name in sorted(name for name in members if name.endswith(".json")):
            document = json.loads(members[name])
            names = [image for image in document["images"] if image is not None]
            text = "".join(text for text in document["texts"] if text is not None)
            for part in range(4):
                sample: dict[str, Any] = {"text": [(1, text[600 * part : 600 * part + 300 * part + 300])]}
                if part < len(names):
                    sample["image"] = [(0, members[names[part]])]
                writer.write(f"{name}/{part}", sample)


def deliver(make: Callable[[int, int], Any], stages: Sequence[tuple[int, int | None]]) -> Iterator[tuple[int, Any]]:
    """Yields rank and batch of an epoch that is stopped and resumed.

    Args:
        make: a loader, of a rank and a number of ranks.
        stages: the number of ranks, and of batches of each until they stop; None for the rest of the epoch.
    """
    state = None
    for world_size, num_batches in stages:
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for rank, loader in enumerate(loaders):
            if state is not None:
                loader.load_state_dict(json.loads(state))
            with iter(loader) as batches:
                yield from ((rank, batch) for batch in islice(batches, num_batches))
        (state,) = {json.dumps(loader.state_dict()) for loader in loaders}


@pytest.fixture(scope="class")
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_shards: Path) -> Any:
    """The small data of the class's program."""
    path = tmp_path_factory.mktemp("program") / "data.mult"
    request.cls.write(path, demo_shards)
    with mm_assets.open(path) as data:
        yield data


class ProgramSuite:
    """Tests that each program passes.

    Attributes:
        name: of the program.
        sizes: arguments of its loader that make some ten batches of the small data.
        write: writes the small data, from the demo shards.
    """

    name: ClassVar[str]
    sizes: ClassVar[dict[str, int]]
    write: ClassVar[Callable[[Path, Path], None]]

    @pytest.fixture(autouse=True)
    def _program(self, dataset: Dataset) -> None:
        self.data = dataset
        self.program = runpy.run_path(str(EXAMPLES / f"{self.name}.py"))

    def make(self, rank: int, world_size: int) -> Any:
        """Returns a loader of the program."""
        return self.program["make_loader"](self.data, **self.sizes, rank=rank, world_size=world_size)

    def samples(self, batches: Iterable[tuple[int, Any]]) -> Counter[Hashable]:
        """Counts the samples of batches, or the parts of samples, without repeats that even out ranks."""
        counter: Counter[Hashable] = Counter()
        for _, batch in batches:
            starts = batch["start"] if "start" in batch else np.zeros(len(batch["index"]), np.int64)
            parts = zip(batch["index"].tolist(), starts.tolist(), batch["valid"].tolist(), strict=True)
            counter.update((index, start) for index, start, is_valid in parts if is_valid)
        return counter

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_three_stops_change_nothing(self, ranks: int) -> None:
        """Stopped three times, each rank has the batches of the uninterrupted run, bit for bit."""
        whole, stopped = (
            [(rank, plain(batch)) for rank, batch in deliver(self.make, stages)]
            for stages in ([(ranks, None)], [(ranks, 1), (ranks, 2), (ranks, 1), (ranks, None)])
        )
        assert len(whole) >= 5 * ranks
        assert sorted(stopped, key=itemgetter(0)) == whole

    def test_other_ranks_after_each_stop(self) -> None:
        """On another number of ranks after each of three stops, every sample comes once."""
        expected = self.samples(deliver(self.make, [(1, None)]))
        assert {index for index, _ in expected} == set(range(len(self.data)))  # type: ignore[misc]  # the class is one of several
        assert set(expected.values()) == {1}
        assert self.samples(deliver(self.make, [(2, 1), (1, 2), (3, 1), (2, None)])) == expected

    def test_the_program_learns_and_resumes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Its loss falls, and stopped and resumed from a checkpoint the losses are the same, to the last bit."""
        train, checkpoint = self.program["train"], tmp_path / "run.pt"
        losses = train(str(self.data.path), 4)
        assert losses[-1] < losses[0]
        assert train(str(self.data.path), 1, checkpoint) + train(str(self.data.path), 3, checkpoint) == losses
        assert len(re.findall(r"loss \d+\.\d{3}$", capsys.readouterr().out, flags=re.MULTILINE)) == 8


class TestSpeech(ProgramSuite):
    """Speech, in batches of a budget."""

    name, sizes, write = "speech", {"budget": 40_000}, write_utterances


class TestVideoClips(ProgramSuite):
    """Windows of clips with their sound."""

    name, sizes, write = "video_clips", {"batch_size": 1}, write_clips


class TestPackedDocuments(ProgramSuite):
    """Documents in packed sequences."""

    name, sizes, write = "packed_documents", {"length": 1024, "batch_size": 2}, write_documents


def test_the_page_has_the_lines_of_the_programs() -> None:
    """The page has the training input of each example, word for word, and from `open` to the loop it is short."""
    page = (REPOSITORY / "docs" / "tutorials" / "training-programs.md").read_text(encoding="utf-8")
    blocks = re.findall(r"`examples/(\w+\.py)` has:\n\n```python\n(.*?)```", page, flags=re.DOTALL)
    assert sorted(name for name, _ in blocks) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    for name, code in blocks:
        assert indent(code, "    ") in (EXAMPLES / name).read_text(encoding="utf-8"), name
        assert len(code.splitlines()) + len(("open", "for")) <= MAX_LINES, name
