"""Tests that every export passes: the same samples, payloads and bytes again, from any kind of dataset."""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import ConfigError, FormatError, MmAssetsError
from mm_assets.exports import EXPORTS, ExportProgress, export
from mm_assets.fields import (
    BytesField,
    Field,
    JSONField,
    NDArrayField,
    ScalarField,
    SequenceField,
    TextField,
    TimedTextField,
)

from ..pipeline.chain import declare, run_chain

KINDS = {"captions": "image_text", "docs": "interleaved", "speech": "speech", "video": "video"}
"""The demo shards, by the start of their names, and the preset that packs them."""

FIELDS: Mapping[str, Field] = {
    "image": BytesField(),
    "text": TextField(),
    "state": NDArrayField(),
    "label": ScalarField("float64"),
    "pages": SequenceField(BytesField()),
    "cues": TimedTextField(),
    "metadata": JSONField(),
}
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]  # each format is one
_IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
_BYTES = st.binary(max_size=12)
_ARRAYS = st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(lambda values: np.array(values, np.float32))
_SAMPLES = st.fixed_dictionaries(
    {},
    optional={
        "image": _BYTES,
        "text": st.text(max_size=6),
        "state": _ARRAYS,
        "label": st.floats(allow_nan=False, allow_infinity=False),
        "pages": st.lists(_BYTES, max_size=3).map(lambda items: list(enumerate(items))),
        "cues": st.lists(st.text(max_size=4), max_size=2).map(
            lambda texts: [(n, n + 0.5, t) for n, t in enumerate(texts)]
        ),
        "metadata": st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.none(), max_size=3),
    },
)


def payloads(path: Path | str) -> dict[str, str]:
    """Returns a digest of the ids, records and data of each modality of a dataset."""
    with mm_assets.open(path) as dataset:
        digests = {}
        for name in dataset.names:
            digest = hashlib.sha256()
            column = dataset.read_raw(range(len(dataset)), [name], records=True)[name]
            for sample_id, payload in zip(dataset.sample_ids, column, strict=True):
                content = b"absent" if payload is None else b"".join(payload)
                digest.update(repr((sample_id, hashlib.sha256(content).hexdigest())).encode())
            digests[name] = digest.hexdigest()
        return digests


def packed(path: Path, samples: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Field]) -> Path:
    """Returns the path of a packed file with these values."""
    with mm_assets.create(path, fields, fsync=False) as writer:
        for sample_id, sample in samples.items():
            writer.write(sample_id, sample)
    return path


class InterruptionError(Exception):
    """Ends an export after its first shard."""


def interrupt(progress: ExportProgress) -> None:
    """Interrupts an export."""
    raise InterruptionError


def first_samples(shard: Path, target: Path, number: int) -> Path:
    """Returns the path of a shard with the first samples of another."""
    with tarfile.open(shard) as tar, tarfile.open(target, "w") as small:
        keys: dict[str, None] = {}
        for member in tar:
            keys.setdefault(member.name.partition(".")[0])
            if len(keys) <= number:
                small.addfile(member, tar.extractfile(member))
    return target


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files of an export except its summary."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.name != "export.json"}


def open_files(folder: Path) -> list[str]:
    """Returns the files below a folder that this process has open, deleted ones included."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing itself
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in names if name.startswith(str(folder))]


@contextmanager
def unsynced_folder() -> Iterator[Path]:
    """Yields a folder of one example, in which no file waits for the disk: ten thousand examples would take hours."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield Path(folder)


class ExportSuite(ABC):
    """Tests of one format.

    Attributes:
        format: its name in `EXPORTS`.
        is_deterministic: whether the same samples give the same bytes.
    """

    format: ClassVar[str]
    is_deterministic: ClassVar[bool] = True

    @pytest.fixture
    def numbers(self, tmp_path: Path) -> Path:
        """Returns the path of a packed file of 30 samples; many of them lack something."""
        samples: dict[str, dict[str, Any]] = {
            f"folder/{i:02d}": {
                "image": None if i % 3 == 2 else bytes(range(i)),
                "text": f"text {i} é" if i % 4 else None,
                "state": np.arange(i, dtype=np.int16).reshape(-1, 1) if i % 5 else None,
                "label": i / 2,
                "pages": [(n, bytes([n, i])) for n in range(i % 4)],
                "metadata": {"i": i} if i % 7 else None,
            }
            for i in range(30)
        }
        return packed(tmp_path / "numbers.mstr", samples, FIELDS)

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_export_is_packed_to_the_same_payloads(self, tmp_path: Path, demo_shards: Path, kind: str) -> None:
        """Real samples of each kind, packed, exported and packed again: ids, records and data are the same."""
        shard = first_samples(next(iter(sorted(demo_shards.glob(f"{kind}-*.tar")))), tmp_path / "few.tar", 2)
        run_chain(declare(tmp_path / "a", shard))
        summary = export(tmp_path / "a/data/manifest.json", self.format, tmp_path / "out", shard_samples=1)
        assert summary.num_samples == len(summary.shards) == (1 if kind == "video" else 2)
        run_chain(declare(tmp_path / "b", tmp_path / "out"))
        before, after = payloads(tmp_path / "a/data/manifest.json"), payloads(tmp_path / "b/data/manifest.json")
        if kind == "docs":  # whose image tokens become names of members
            del before["metadata"], after["metadata"]
        assert after == before

    def test_an_interrupted_export_goes_on(self, tmp_path: Path, numbers: Path) -> None:
        """A second run writes the missing shards, and gives the same files as a single run."""
        with pytest.raises(InterruptionError):
            export(numbers, self.format, tmp_path / "out", shard_samples=11, progress=interrupt)
        summary = export(numbers, self.format, tmp_path / "out", shard_samples=11)
        assert (summary.num_reused, len(summary.shards), summary.num_samples) == (1, 3, 30)
        if self.is_deterministic:
            export(numbers, self.format, tmp_path / "whole", shard_samples=11)
            assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    def test_a_folder_with_something_else_is_refused(self, tmp_path: Path, numbers: Path) -> None:
        """A complete export, an interrupted one of another version of the file, and other files are never mixed."""
        export(numbers, self.format, tmp_path / "out")
        with pytest.raises(ConfigError, match="complete export"):
            export(numbers, self.format, tmp_path / "out")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").touch()
        with pytest.raises(ConfigError, match="other files"):
            export(numbers, self.format, tmp_path / "other")
        with pytest.raises(InterruptionError):
            export(numbers, self.format, tmp_path / "part", progress=interrupt)
        packed(numbers, {f"folder/{n:02d}": {"label": 1} for n in range(30)}, FIELDS)
        with pytest.raises(ConfigError, match="interrupted export of other samples"):
            export(numbers, self.format, tmp_path / "part")

    def test_a_damaged_dataset_is_not_exported(self, tmp_path: Path, numbers: Path) -> None:
        """A payload that does not match its checksum fails the export, also of an open dataset; no file stays open."""
        data = bytearray(numbers.read_bytes())
        data[data.find(bytes(range(28))) + 20] ^= 1  # the largest image
        numbers.write_bytes(data)
        with (
            mm_assets.open(numbers, verify=False) as dataset,
            pytest.raises(FormatError, match="sample 28, modality 'image'"),
        ):
            export(dataset, self.format, tmp_path / "out")
        assert not open_files(tmp_path / "out")

    @pytest.mark.parametrize(
        ("name", "data"), [("text", b"\xff"), ("metadata", b"{"), ("metadata", b"\xff"), ("state", b""), ("cues", b"x")]
    )
    def test_a_payload_that_contradicts_its_field_is_refused(self, tmp_path: Path, name: str, data: bytes) -> None:
        """The error names the sample and the modality, and the incomplete shard is closed."""
        with mm_assets.create(tmp_path / "a.mstr", FIELDS, fsync=False) as writer:
            writer.write("a", {"text": "t"})
            writer.write_payloads("b", {name: (bytes(FIELDS[name].metadata_type.itemsize), data)})
        with pytest.raises(FormatError, match=f"sample 1, modality {name!r}") as caught:
            export(tmp_path / "a.mstr", self.format, tmp_path / "out")
        assert not open_files(tmp_path / "out"), caught

    def test_damage_is_found_at_the_end(self, tmp_path: Path, numbers: Path) -> None:
        """A shard whose bytes are not those that were written fails the export."""

        def damage(progress: ExportProgress) -> None:
            if not progress.is_check:
                for path in (tmp_path / "out").rglob(f"*{EXPORTS[self.format].SUFFIX}"):
                    data = bytearray(path.read_bytes())
                    data[data.find(bytes(range(28))) + 20] ^= 1  # the largest image
                    path.write_bytes(data)

        with pytest.raises(MmAssetsError):
            export(numbers, self.format, tmp_path / "out", progress=damage)
        assert not (tmp_path / "out" / "export.json").exists()

    def test_views_are_exported(self, tmp_path: Path, numbers: Path) -> None:
        """A selection of samples and modalities is exported in its order; the size of shards is limited."""
        with mm_assets.open(numbers) as dataset:
            view = dataset.select([28, 1, 4, 25]).select_modalities(["image", "metadata"])
            summary = export(view, self.format, tmp_path / "out", shard_bytes=33)
        assert [shard.num_samples for shard in summary.shards] == [1, 2, 1]

    @settings(max_examples=15, deadline=None, suppress_health_check=UNCHECKED)
    @pytest.mark.nightly_examples(10_000)
    @given(ids=st.lists(_IDS, min_size=1, max_size=4, unique=True), samples=st.lists(_SAMPLES, min_size=4, max_size=4))
    def test_any_samples_come_back(self, ids: list[str], samples: list[dict[str, Any]]) -> None:
        """Any ids and values are read back as they were written; the export itself checks that."""
        with unsynced_folder() as folder:
            path = packed(folder / "a.mult", dict(zip(ids, samples, strict=False)), FIELDS)
            summary = export(path, self.format, folder / "out", shard_samples=2)
            assert summary.num_samples == len(ids)
