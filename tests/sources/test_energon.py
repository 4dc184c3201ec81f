"""Tests of datasets of Energon: listed shards, splits, what is excluded, and a folder that its `prepare` wrote."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import ShardError
from mm_assets.pipeline.state.losses import losses
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.sources import Source
from mm_assets.sources.energon import EnergonSource
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile
from mm_assets.testing import SourceSuite

from ..pipeline.chain import declare, run_chain
from .members import SAMPLE_FILES
from .tables import entries
from .tars import build

OWNER = Path(__file__).parent / "owners" / "energon"
Files = Sequence[tuple[str, bytes]]
SAMPLES = st.dictionaries(
    st.text("ab_-é\n /", min_size=1, max_size=6).filter(lambda key: not key.startswith(("/", "__")) and key[-1] != "/"),
    st.dictionaries(st.text("aB0.é ", min_size=1, max_size=4), st.binary(max_size=600), min_size=1, max_size=3),
    max_size=4,
)
"""Contents by suffix of samples by key."""


def prepare(folder: Path, counts: dict[str, int], **split: Any) -> None:
    """Writes the files that describe the shards of a folder."""
    (folder / ".nv-meta").mkdir(exist_ok=True)
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps({"energon_version": "7", "shard_counts": counts}))
    if split:
        (folder / ".nv-meta" / "split.yaml").write_text(json.dumps(split))  # JSON is YAML


class TestSource(SourceSuite):
    source = EnergonSource
    files = SAMPLE_FILES

    def make(self, files: Files) -> bytes:
        """A tar."""
        return build(files)

    def open(self, folder: Path, content: bytes) -> Source:
        """The source over a tar, in a folder that lists it with the samples that it had."""
        path = folder / "shard.tar"
        path.write_bytes(content)
        count, key = 0, None
        with suppress(ShardError):
            for member in TarSource(SourceFile(str(path))).members():
                if match := re.fullmatch(r"((?:.*/|)[^.]+)\.[^/]*", member.member):
                    count, key = count + (match[1] != key), match[1]
        prepare(folder, {"shard.tar": count}, split_parts={"train": ["shard.tar"]})
        return EnergonSource(SourceFile(str(path)))


class TestReading:
    def members(self, path: Path) -> list[tuple[str, str | None]]:
        """Names and reasons of the members of a shard."""
        return [(m.member, m.skip_reason) for m in EnergonSource(SourceFile(str(path))).members()]

    def test_shards_of_the_owner_are_read(self) -> None:
        """Shards beside and below the folder that `prepare` wrote have all of their samples."""
        for name, number in (("shard_0.tar", 0), ("shard_1.tar", 1), ("sub/shard_2.tar", 2)):
            assert self.members(OWNER / name) == [
                (f"{number}{key}.{extension}", None) for key in range(3) for extension in ("txt", "json")
            ]

    def test_what_energon_leaves_out_is_listed_with_the_reason(self, tmp_path: Path) -> None:
        """Excluded samples, names without a dot and metadata of WebDataset are skipped, and the others read."""
        names = ["__index__/x.json", "a.txt", "b.txt", "none"]
        (tmp_path / "s.tar").write_bytes(build([(name, b"x") for name in names]))
        prepare(tmp_path, {"s.tar": 2}, split_parts={"train": ["{s,t}.tar"]}, exclude=["s.tar/{b,c}"])
        by_rule = "no part of a sample by the rules of Energon"
        assert self.members(tmp_path / "s.tar") == [
            ("__index__/x.json", by_rule),
            ("a.txt", None),
            ("b.txt", "excluded by .nv-meta/split.yaml"),
            ("none", by_rule),
        ]
        source = EnergonSource(SourceFile(str(tmp_path / "s.tar")))
        found = source.payloads(wanted=lambda member: member.skip_reason is None)
        assert [member.member for member, _ in found] == ["a.txt"]

    @pytest.mark.parametrize(
        ("counts", "split", "reason"),
        [
            ({"s.tar": 1}, {"split_parts": {"train": ["s.tar"]}, "exclude": ["s.tar"]}, "excluded by"),
            ({"s.tar": 1}, {"split_parts": {"train": ["t.tar"]}}, "the shard 's.tar' is not in .nv-meta/split.yaml"),
            ({"t.tar": 1}, {}, "the shard 's.tar' is not in .nv-meta/.info.json"),
        ],
    )
    def test_shards_that_are_left_out_have_no_samples(
        self, tmp_path: Path, counts: dict[str, int], split: dict[str, Any], reason: str
    ) -> None:
        """The members of a shard that is excluded, in no split or not listed are skipped with the reason."""
        (tmp_path / "s.tar").write_bytes(build([("a.txt", b"x")]))
        prepare(tmp_path, counts, **split)
        ((name, found),) = self.members(tmp_path / "s.tar")
        assert name == "a.txt"
        assert (found or "").startswith(reason)

    def test_without_splits_all_listed_shards_are_read(self, tmp_path: Path) -> None:
        """A folder with a list of shards alone, as JSON or YAML, is read."""
        (tmp_path / "s.tar").write_bytes(build([("a.txt", b"x")]))
        prepare(tmp_path, {"s.tar": 1})
        assert self.members(tmp_path / "s.tar") == [("a.txt", None)]
        (tmp_path / ".nv-meta" / ".info.json").rename(tmp_path / ".nv-meta" / ".info.yaml")
        assert self.members(tmp_path / "s.tar") == [("a.txt", None)]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            (".info.json", None, "run `energon prepare`, or read it as `tar`"),
            (".info.json", "{", "is not JSON"),
            (".info.json", "[]", "has no shard_counts"),
            (".info.json", '{"shard_counts": {"s.tar": "1"}}', "has no shard_counts"),
            (".info.json", '{"shard_counts": {"s.tar": 2}}', "has 1 samples, .nv-meta/.info.json states 2"),
            ("split.yaml", "a: [", "cannot be read"),
            ("split.yaml", "!!python/object/apply:os.getcwd []", "could not determine a constructor"),
            ("split.yaml", "[" * 5000, "cannot be read"),
            ("split.yaml", "[]", "has no split_parts"),
            ("split.yaml", "{split_parts: {a: [1]}}", "has no split_parts"),
            ("split.yaml", "{split_parts: {a: []}, exclude: x}", "exclude is not a list"),
            ("split.yaml", "{split_parts: {a: ['{0..9999999}']}}", "has a list in braces"),
        ],
    )
    def test_a_folder_that_is_wrong_is_named(
        self, tmp_path: Path, name: str, content: str | None, message: str
    ) -> None:
        """A missing, damaged or contradicting description raises with what to do."""
        (tmp_path / "s.tar").write_bytes(build([("a.txt", b"x")]))
        prepare(tmp_path, {"s.tar": 1}, split_parts={"a": ["s.tar"]})
        path = tmp_path / ".nv-meta" / name
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(ShardError) as caught:
            self.members(tmp_path / "s.tar")
        assert message in str(caught.value)

    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(SAMPLES)
    def test_any_samples_are_those_of_the_tar(self, tmp_path: Path, samples: dict[str, dict[str, bytes]]) -> None:
        """Whatever keys and files the listed samples have, entries and contents are those of the tar itself."""
        files = [(f"{key}.{suffix}", data) for key, sample in samples.items() for suffix, data in sample.items()]
        (tmp_path / "s.tar").write_bytes(build(files))
        prepare(tmp_path, {"s.tar": len(samples)})
        with SourceFile(str(tmp_path / "s.tar")) as file:
            assert entries(EnergonSource(file)) == entries(TarSource(file))

    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.sampled_from([".info.json", "split.yaml", "s.tar"]), st.data())
    def test_hostile_bytes_raise_or_are_read(self, tmp_path: Path, name: str, data: st.DataObject) -> None:
        """Changed bytes of a shard and of what describes it give members or `ShardError` alone."""
        (tmp_path / "s.tar").write_bytes(build([("a.txt", b"x"), ("b.txt", b"y")]))
        prepare(tmp_path, {"s.tar": 2}, split_parts={"train": ["{s,t}.tar"]}, exclude=["s.tar/b"])
        path = tmp_path / name if name == "s.tar" else tmp_path / ".nv-meta" / name
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        path.write_bytes(content)
        for on_damaged in ("fail", "salvage"):
            with suppress(ShardError):
                list(EnergonSource(SourceFile(str(tmp_path / "s.tar"))).members(on_damaged_shard=on_damaged))


class TestPipeline:
    def test_a_folder_is_read_as_its_owner_reads_it(self, tmp_path: Path) -> None:
        """A folder of shards packs without what is excluded, which is in the losses."""
        shutil.copytree(OWNER, tmp_path / "d")
        split = tmp_path / "d" / ".nv-meta" / "split.yaml"
        split.write_text(split.read_text().replace("exclude: []", "exclude: [shard_1.tar/11, sub/shard_2.tar/20]"))
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "d"))
        data = mm_assets.open(dataset.store.url_of("manifest.json"))
        assert sorted(data.sample_ids) == ["00", "01", "02", "10", "12", "21", "22"]
        lost = losses(DatasetState(dataset), dataset.partitions())
        assert sorted(loss.member for loss in lost) == [f"{key}.{e}" for key in ("11", "20") for e in ("json", "txt")]
        assert len(dataset.partitions()) == 3

    def test_tars_without_the_folder_are_tars(self, tmp_path: Path) -> None:
        """A shard that no file describes is read as a tar, with every member that it has."""
        (tmp_path / "s.tar").write_bytes(build([("a.txt", b"x"), ("__x__/b.txt", b"y")]))
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "s.tar"))
        assert len(mm_assets.open(dataset.store.url_of("manifest.json")).sample_ids) == 2
