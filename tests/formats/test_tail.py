"""Packed files behind an fsspec URL: how many requests opening, one sample and a batch cost, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import mm_assets
from mm_assets.fields import BytesField, JSONField, ScalarField, TextField
from mm_assets.formats import ModalitySpec, MstrReader, MstrWriter, MultReader, MultWriter, Payload, open_reader
from mm_assets.formats import byte_source as source_module
from mm_assets.storage.remote import RemoteFile

from .examples import plain

FORMS = {"mult": MultWriter, "mstr": MstrWriter}
SPECS = [ModalitySpec(name=name, type_id=1, metadata_size=8) for name in ("image", "text", "note")]
COUNT = 3000
SIZE = 3000  # bytes of an image


class CountingFileSystem(MemoryFileSystem):
    """Files in memory; every call and every range that is asked for is noted."""

    protocol = "counted"
    cachable = False
    calls: ClassVar[list[list[tuple[int, int]]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("counted://", "memory://", 1))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Notes one range."""
        assert start is not None, "a whole file was asked for"
        assert end is not None, "the rest of a file was asked for"
        self.calls.append([(start, end)])
        return super().cat_file(path, start, end)

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], **_: Any) -> list[bytes]:
        """Notes many ranges of one call."""
        self.calls.append(list(zip(starts, ends, strict=True)))
        return [super(CountingFileSystem, self).cat_file(*one) for one in zip(paths, starts, ends, strict=True)]


class Requests:
    """What was asked for since the last look."""

    def __init__(self) -> None:
        CountingFileSystem.calls.clear()

    def take(self) -> tuple[int, int, int]:
        """Calls, ranges and bytes; starts again from zero."""
        calls = list(CountingFileSystem.calls)
        CountingFileSystem.calls.clear()
        ranges = [one for call in calls for one in call]
        return len(calls), len(ranges), sum(end - start for start, end in ranges)


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """3000 samples of an image, a text and a rare note as MULT and MSTR, 9 MB each."""
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("remote")
    for form, writer in FORMS.items():
        with writer(folder / f"x.{form}", SPECS, num_samples=COUNT, fsync=False) as file:
            for k in range(COUNT):
                payloads = {"image": Payload(k.to_bytes(8, "little"), rng.bytes(SIZE)), "text": Payload(bytes(8), b"t")}
                if k % 100 == 0:
                    payloads["note"] = Payload(bytes(8), str(k).encode())
                file.write(f"sample-{k}", payloads)
        fsspec.filesystem("memory").pipe_file(f"/remote/x.{form}", (folder / f"x.{form}").read_bytes())
    yield
    fsspec.filesystem("memory").rm("/remote", recursive=True)


@pytest.fixture(params=["mult", "mstr"])
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def opened(form: str) -> MultReader | MstrReader:
    return open_reader(RemoteFile(f"counted://remote/x.{form}"))


def test_open(form: str) -> None:
    """Opening is one call of two ranges, head and tail, whatever stands between."""
    requests = Requests()
    with opened(form) as reader:
        assert len(reader) == COUNT
        calls, ranges, size = requests.take()
        assert calls == 1
        assert ranges <= 3
        assert size <= 8192 + (64 << 10)


def test_a_large_schema_costs_one_more(tmp_path: Path) -> None:
    """A schema that does not fit the last 64 KiB is fetched by one more request."""
    spec = ModalitySpec(name="x", type_id=1, metadata_size=8, config={"a": "b" * 100_000})
    for form, writer in FORMS.items():
        with writer(tmp_path / "x", [spec], fsync=False) as file:
            for k in range(100):
                file.write(str(k), {"x": Payload(bytes(8), bytes(8192))})
        fsspec.filesystem("memory").pipe_file(f"/remote/large.{form}", (tmp_path / "x").read_bytes())
        requests = Requests()
        with open_reader(RemoteFile(f"counted://remote/large.{form}")) as reader:
            assert reader.modalities == (spec,)
            calls, ranges, size = requests.take()
            assert (calls, ranges) == (2, 3)
            assert size < 300 << 10


def test_one_sample(form: str) -> None:
    """The first sample costs one request for what places all of them, and one for its payloads; the next only that."""
    requests = Requests()
    with opened(form) as reader:
        requests.take()
        sample = reader.read_sample(1700)
        assert sample["image"].metadata == (1700).to_bytes(8, "little")
        calls, _, size = requests.take()
        assert calls == 2
        assert size < 400 << 10
        assert reader.read_sample(40)["note"] is None
        assert reader.read_payload(41, "image").metadata == (41).to_bytes(8, "little")
        calls, ranges, size = requests.take()
        assert calls == 2
        assert ranges <= 3
        assert size <= 2 * (SIZE + 64) + (1 << 10)


def test_a_batch(form: str) -> None:
    """A batch of 64 over all modalities is one call, after one for the tables; far payloads are ranges of their own."""
    requests = Requests()
    indices = np.random.default_rng(1).permutation(COUNT)[:64]
    with opened(form) as reader:
        requests.take()
        first = reader.read_samples(indices)
        assert requests.take()[0] == 2
        again = reader.read_samples(indices)
        calls, ranges, size = requests.take()
        assert calls == 1
        assert ranges <= 3 * 64
        assert size < 10 << 20
        assert [plain(p) for p in first["image"]] == [plain(p) for p in again["image"]]
        assert [int.from_bytes(p.metadata, "little") for p in again["image"]] == indices.tolist()
        reader.read_samples(range(100, 164), ["image"])  # neighbours
        calls, ranges, size = requests.take()
        assert (calls, ranges) == (1, 1)
        assert size <= 64 * (SIZE + 100)


def test_one_modality_of_mstr(form: str) -> None:
    """A small modality of MSTR costs its own table and data, and nothing of the others."""
    requests = Requests()
    with opened(form) as reader:
        requests.take()
        texts = reader.read_samples(range(COUNT), ["text"])["text"]
        assert all(bytes(p.data) == b"t" for p in texts)
        calls, _, size = requests.take()
        assert calls == 2
        if form == "mstr":
            assert size == COUNT * 24 + COUNT * 8 - 7  # the table, and the data without the last fill


@pytest.mark.parametrize("limit", [0, 100_000])
def test_tables_out_of_reach(form: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables beyond the limit are read by blocks: one call for those of a batch, none when they are kept."""
    monkeypatch.setattr(source_module, "WHOLE_LIMIT", limit)
    monkeypatch.setattr(RemoteFile, "BLOCK", 8192)
    requests = Requests()
    indices = list(range(500, 532))
    with opened(form) as reader:
        requests.take()
        reader.read_samples(indices)
        calls, _, size = requests.take()
        assert calls <= 3
        assert size < 32 * (SIZE + 100) + (500 << 10)
        reader.read_samples(indices)
        assert requests.take()[0] == 1
        scattered = np.random.default_rng(2).permutation(COUNT)[:500]
        found = reader.read_samples(scattered, ["image"])["image"]
        assert [int.from_bytes(p.metadata, "little") for p in found] == scattered.tolist()
        assert requests.take()[0] <= 3
        assert reader.sample_ids[1234] == "sample-1234"
        assert reader.verify().ok


def test_ids(form: str) -> None:
    """Ids are looked up with few requests, also by their text."""
    requests = Requests()
    with opened(form) as reader:
        requests.take()
        assert reader.sample_ids[2999] == "sample-2999"
        assert requests.take()[0] <= 2
        assert reader.sample_ids[2998] == "sample-2998"
        assert requests.take()[0] == 0
        assert reader.sample_ids.find("sample-77") == 77
        assert requests.take()[0] <= 2


def test_remote_reads_what_local_does(form: str, tmp_path: Path) -> None:
    """Every payload, record, size and checksum is the same as of the mapped file."""
    path = tmp_path / "x"
    path.write_bytes(fsspec.filesystem("memory").cat_file(f"/remote/x.{form}"))
    with opened(form) as remote, open_reader(path) as local:
        for name in local.names:
            assert np.array_equal(remote.records(name), local.records(name))
            assert np.array_equal(remote.checksums(name), local.checksums(name))
            assert np.array_equal(remote.sizes(name), local.sizes(name))
        indices = [0, 2999, 5, 100, 100]
        for name, payloads in local.read_samples(indices).items():
            assert [plain(p) for p in remote.read_samples(indices)[name]] == [plain(p) for p in payloads]
        assert [plain(remote.read_payload(i, "note")) for i in indices] == [
            plain(local.read_payload(i, "note")) for i in indices
        ]
        assert remote.verify().ok


def test_values_by_url(form: str, tmp_path: Path) -> None:
    """`mm_assets.open` of a URL decodes samples and batches, and never asks for a whole file."""
    fields = {"text": TextField(), "score": ScalarField(dtype="float32"), "info": JSONField(), "blob": BytesField()}
    with mm_assets.create(tmp_path / f"y.{form}", fields) as writer:
        for k in range(50):
            writer.write(str(k), {"text": f"t{k}", "score": k / 4, "info": {"k": k}, "blob": bytes(50_000)})
    fsspec.filesystem("memory").pipe_file(f"/remote/y.{form}", (tmp_path / f"y.{form}").read_bytes())
    requests = Requests()
    with mm_assets.open(f"counted://remote/y.{form}") as dataset:
        assert dataset[7]["text"] == "t7"
        assert dataset.read_batch([3, 1], ["score"])["score"].values.tolist() == [0.75, 0.25]
        assert dataset[7]["info"] == {"k": 7}
    calls, _, size = requests.take()
    assert calls <= 6
    assert size < 1 << 20


def test_a_range_that_comes_short(form: str) -> None:
    """Storage that gives fewer bytes than it announced is an error that names the file, not a wrong value."""
    with opened(form) as reader:
        content = fsspec.filesystem("memory").cat_file(f"/remote/x.{form}")
        try:
            fsspec.filesystem("memory").pipe_file(f"/remote/x.{form}", content[:10_000])
            with pytest.raises(mm_assets.TruncatedError, match=rf"remote/x\.{form}.* of "):
                reader.read_sample(2000)
        finally:
            fsspec.filesystem("memory").pipe_file(f"/remote/x.{form}", content)
