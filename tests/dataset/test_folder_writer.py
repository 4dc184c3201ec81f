"""Tests of datasets that are written shard by shard into a folder: content, crashes, ranks, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import (
    ChangedError,
    ConfigError,
    CorruptError,
    EncodeError,
    FormatError,
    SchemaMismatchError,
    SourceError,
)
from mm_assets.fields import BytesField, TextField
from mm_assets.storage.store import Store

from ..s3_server import Recorder, serve
from .test_writer import fill_disk

FIELDS = {"value": BytesField(), "text": TextField()}
PYTHONPATH = os.pathsep.join(str(Path(entry or ".").resolve()) for entry in sys.path)  # for other processes

SCRIPT = """
import itertools, sys
import mm_assets
from mm_assets.fields import BytesField, TextField

folder, rank, world_size, count = sys.argv[1], *map(int, sys.argv[2:])
fields = {"value": BytesField(), "text": TextField()}
with mm_assets.create(folder, fields, shard_samples=7, rank=rank, world_size=world_size, resume=True) as writer:
    for i in range(rank + len(writer) * world_size, count, world_size):
        writer.write(f"id-{i}", {"value": bytes([i % 256]) * i, "text": f"text {i}"})
        print(i, flush=True)
"""


def sample(i: int, size: int = 10) -> dict[str, Any]:
    return {"value": bytes([i % 256]) * size, "text": None if i % 3 == 2 else f"text {i}"}


def write(folder: Path | str, indices: range, **arguments: Any) -> Any:
    fields = arguments.pop("fields", FIELDS)
    with mm_assets.create(folder, fields, **arguments) as writer:
        for i in indices:
            writer.write(f"id-{i}", {name: value for name, value in sample(i).items() if name in fields})
    return writer.close()


def content(path: Path | str, **options: Any) -> dict[str, tuple[bytes | None, ...]]:
    """The raw payloads of a dataset by id, in order."""
    with mm_assets.open(path, verify=True, **options) as data:
        raw = data.read_raw(range(len(data)))
        rows = zip(*(raw[name] for name in data.names), strict=True)
        ids = list(data.sample_ids)
        result = {i: tuple(None if v is None else bytes(v) for v in row) for i, row in zip(ids, rows, strict=True)}
    assert len(result) == len(ids)
    return result


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestContent:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        sizes=st.lists(st.integers(0, 3000), max_size=25),
        shard_bytes=st.integers(1, 8000),
        shard_samples=st.none() | st.integers(1, 9),
        world_size=st.integers(1, 3),
        form=st.sampled_from(["mult", "mstr"]),
        stops=st.sets(st.integers(0, 25), max_size=3),
    )
    @pytest.mark.nightly_examples(500)
    def test_folders_have_what_a_file_has(
        self,
        sizes: list[int],
        shard_bytes: int,
        shard_samples: int | None,
        world_size: int,
        form: str,
        stops: set[int],
    ) -> None:
        """Any sizes, shards, ranks and interruptions give the samples of one file, in the order of the ranks."""
        limits = {"shard_bytes": shard_bytes, "shard_samples": shard_samples, "fsync": False}
        with tempfile.TemporaryDirectory() as scratch:
            file, folder = Path(scratch) / f"one.{form}", Path(scratch) / "folder"
            with mm_assets.create(file, FIELDS, fsync=False) as single:
                for rank in range(world_size):
                    for i in range(rank, len(sizes), world_size):
                        single.write(f"id-{i}", sample(i, sizes[i]))
            for rank in range(world_size):
                own = range(rank, len(sizes), world_size)
                ends = [*sorted(stop for stop in stops if stop < len(own)), len(own)]
                for end in ends:
                    place = {"rank": rank, "world_size": world_size, "format": form, "resume": True}
                    writer = mm_assets.create(folder, FIELDS, **place, **limits)
                    for i in own[len(writer) : end]:
                        writer.write(f"id-{i}", sample(i, sizes[i]))
                    if end < len(own) or end != ends[-1]:
                        writer.abort()
                    else:
                        assert len(writer) == len(own)
                        summary = writer.close()
            if world_size > 1:
                summary = mm_assets.merge(folder)
            assert list(content(folder).items()) == list(content(file).items())
            assert summary.num_samples == len(sizes)
            assert summary.num_present == single.close().num_present
            with mm_assets.open(folder) as data:
                assert data.manifest is not None
                counts = [entry.num_samples for entry in data.manifest.files]
                assert [entry.size for entry in data.manifest.files] == [os.path.getsize(f) for f in data.files]
                assert summary.num_bytes == sum(entry.size or 0 for entry in data.manifest.files)
                assert data.verify().ok
            if shard_samples is not None and world_size == 1 and sizes:
                assert set(counts[:-1]) <= {shard_samples}
            assert not list(folder.glob(".writing-*"))

    def test_shards_end_with_the_sample_that_fills_them(self, tmp_path: Path) -> None:
        """Payloads and ids count, and a sample is never divided."""
        with mm_assets.create(tmp_path / "x", FIELDS, shard_bytes=1000) as writer:
            for i, size in enumerate((400, 400, 100, 5000, 10)):
                writer.write(str(i), sample(i, size))
        with mm_assets.open(tmp_path / "x") as data:
            assert data.manifest is not None
            assert [file.num_samples for file in data.manifest.files] == [3, 1, 1]

    def test_the_same_samples_give_the_same_bytes(self, tmp_path: Path) -> None:
        """Files and their names depend on the samples alone, whether or not the writer was interrupted."""
        write(tmp_path / "a" / "x", range(20), shard_samples=6, provenance={"by": "test"})
        with pytest.raises(KeyError), mm_assets.create(tmp_path / "b" / "x", FIELDS, shard_samples=6) as writer:
            raise KeyError
        arguments = {"shard_samples": 6, "provenance": {"by": "test"}, "resume": True}
        for end in (9, 20):
            writer = mm_assets.create(tmp_path / "b" / "x", FIELDS, **arguments)
            for i in range(len(writer), end):
                writer.write(f"id-{i}", sample(i))
            if end == 20:
                writer.close()
            else:
                writer.abort()
        assert files(tmp_path / "a") == files(tmp_path / "b")

    def test_a_folder_without_samples(self, tmp_path: Path) -> None:
        """It opens, with its fields; a rank may have no samples too."""
        write(tmp_path / "x", range(0))
        with mm_assets.open(tmp_path / "x") as data:
            assert len(data) == 0
            assert data.fields == FIELDS
        for rank, indices in enumerate((range(3), range(0))):
            write(tmp_path / "y", indices, rank=rank, world_size=2)
        assert mm_assets.merge(tmp_path / "y").num_samples == 3

    def test_a_complete_folder_takes_more(self, tmp_path: Path) -> None:
        """Readers see the samples that were appended once the writer is closed."""
        write(tmp_path / "x", range(5))
        with mm_assets.create(tmp_path / "x", FIELDS, resume=True) as writer:
            assert len(writer) == 5
            writer.write("more", sample(1))
            assert len(content(tmp_path / "x")) == 5
        assert [*content(tmp_path / "x")][-2:] == ["id-4", "more"]

    def test_a_refused_sample_leaves_no_trace(self, tmp_path: Path) -> None:
        """The writer continues after a value or name that it does not take."""
        with mm_assets.create(tmp_path / "x", FIELDS, shard_samples=2) as writer:
            writer.write("a", sample(0))
            for wrong in ({"value": 1}, {"other": b""}):
                with pytest.raises(EncodeError, match="'b'"):
                    writer.write("b", wrong)
            writer.write_payloads("b", {"value": FIELDS["value"].encode(b"b")})
            writer.write("c", sample(0))
        assert list(content(tmp_path / "x")) == ["a", "b", "c"]

    def test_memory(self, tmp_path: Path) -> None:
        """Writing and merging take the memory of buffers, not of the payloads or of the ids."""
        value = os.urandom(1 << 20)
        tracemalloc.start()
        try:
            with mm_assets.create(tmp_path / "x", FIELDS, shard_bytes=8 << 20, fsync=False) as writer:
                for i in range(60):
                    writer.write(str(i), {"value": value})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 20 << 20


class Killed(BaseException):
    """What ends a writer in the middle of a call."""


class TestCrashes:
    @pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
    def test_stopped_at_every_change_of_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_after: bool
    ) -> None:
        """The folder says that it is not complete, or has all samples; the next writer completes it."""
        calls = 0
        stop_at: int | None = None

        def stopping(change: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                stops = calls == stop_at
                if stops and not is_after:
                    raise Killed
                result = change(*arguments, **named)
                if stops:
                    raise Killed
                return result

            return wrapped

        for name in ("create", "replace", "_publish"):
            monkeypatch.setattr(Store, name, stopping(getattr(Store, name)))
        write(tmp_path / "whole", range(10), shard_samples=4)
        total, expected = calls, content(tmp_path / "whole")
        assert total > 10
        for number in range(1, total + 1):
            folder, calls, stop_at = tmp_path / str(number), 0, number
            with pytest.raises(Killed):
                write(folder, range(10), shard_samples=4)
            stop_at = None
            if (folder / "manifest.json").exists():
                assert content(folder) == expected
            else:
                with pytest.raises((SourceError, FileNotFoundError)) as caught:
                    mm_assets.open(folder)
                if list(folder.glob("writer-*")):
                    assert "is not complete: close its writer, or continue it with resume=True" in str(caught.value)
            with mm_assets.create(folder, FIELDS, shard_samples=4, resume=True) as writer:
                for i in range(len(writer), 10):
                    writer.write(f"id-{i}", sample(i))
            assert content(folder) == expected
            assert len(list((folder / "packed").iterdir())) == 3

    @pytest.mark.slow
    def test_killed_processes(self, tmp_path: Path) -> None:
        """Two ranks, each killed again and again at some sample, write what one file would have."""
        folder, count = tmp_path / "x", 120
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}

        def start(rank: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", SCRIPT, str(folder), str(rank), "2", str(count)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

        for lines in (1, 9, 16, 20):
            processes = [start(rank) for rank in range(2)]
            for process in processes:
                assert process.stdout is not None
                for _ in range(lines):
                    process.stdout.readline()
                process.send_signal(signal.SIGKILL)
                process.communicate()
            with pytest.raises(SourceError, match="is not complete"):
                mm_assets.open(folder)
            with pytest.raises(SourceError, match=r"rank 0 has not finished \(\d+ samples in \d+ shards?\)"):
                mm_assets.merge(folder)
        for process in [start(rank) for rank in range(2)]:
            assert process.communicate() is not None
            assert process.returncode == 0
        mm_assets.merge(folder)
        order = [*range(0, count, 2), *range(1, count, 2)]
        assert content(folder) == {f"id-{i}": (bytes([i % 256]) * i, f"text {i}".encode()) for i in order}
        assert not list(folder.glob(".writing-*"))

    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message names the disk, complete shards stay, and with space the writer goes on after them."""
        writer = mm_assets.create(tmp_path / "x", FIELDS, shard_samples=2)
        for i in range(3):
            writer.write(f"id-{i}", sample(i))
        with monkeypatch.context() as full:
            fill_disk(full)
            with pytest.raises(SourceError, match=r"x/\.writing-00000: cannot be written: No space left"):
                writer.close()
        with pytest.raises(ValueError, match="closed"):
            writer.write("more", sample(0))
        with mm_assets.create(tmp_path / "x", FIELDS, resume=True) as writer:
            assert len(writer) == 2

    def test_another_failure_of_the_disk_is_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An input or output error is raised as it is."""
        writer = mm_assets.create(tmp_path / "x", FIELDS)
        fill_disk(monkeypatch, errno.EIO)
        writer.write("a", sample(0))
        with pytest.raises(OSError, match="Input/output"):
            writer.close()


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"shard_bytes": 0}, "shard_bytes: is 0, expected at least 1"),
            ({"shard_samples": -1}, "shard_samples: is -1, expected at least 1"),
            ({"world_size": 0}, "world_size: is 0, expected 1 to 100000"),
            ({"rank": 2, "world_size": 2}, "rank: is 2, expected 0 to 1"),
            ({"format": "tar"}, "format: is 'tar', expected mult or mstr"),
            ({"num_samples": 3}, "num_samples: is for a file, but the path is a folder"),
        ],
    )
    def test_arguments(self, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
        """Each wrong argument is named, and nothing is written."""
        with pytest.raises(ConfigError, match=message):
            mm_assets.create(tmp_path / "x", FIELDS, **arguments)
        assert not list(tmp_path.iterdir())

    def test_files_and_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file is what its name says; a name with another dot needs a slash, or a folder of that name."""
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match=r"found 'x\.v2', expected a name that ends in \.mult or \.mstr, or a "):
            mm_assets.create("x.v2", FIELDS)
        with pytest.raises(ConfigError, match=r"a single file is local"):
            mm_assets.create("memory://x.mult", FIELDS)
        with pytest.raises(ConfigError, match=r"found 'x\.mult', a file, with an argument that is for folders"):
            mm_assets.create("x.mult", FIELDS, shard_samples=3)
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="file is a file, expected a folder"):
            mm_assets.create("file", FIELDS)
        write("x.v2/", range(2))
        write(Path("x.v2"), range(0), resume=True)
        write("y.mult/", range(2))
        assert len(content("y.mult")) == len(content("x.v2")) == 2

    def test_folders_of_something_else(self, tmp_path: Path) -> None:
        """A folder with other files, or with the shards of another number of ranks, is left as it is."""
        (tmp_path / "manifest.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"contains manifest\.json, which this writer did not write"):
            mm_assets.create(tmp_path, FIELDS, resume=True)
        assert os.listdir(tmp_path) == ["manifest.json"]
        write(tmp_path / "x", range(2), rank=1, world_size=3)
        with pytest.raises(ConfigError, match=r"contains writer-00001-of-00003\.json"):
            mm_assets.create(tmp_path / "x", FIELDS, rank=1, world_size=2)
        write(tmp_path / "x", range(2), rank=0, world_size=3)

    def test_earlier_shards(self, tmp_path: Path) -> None:
        """They are continued only on demand, with the same fields and format; the message says from where."""
        write(tmp_path / "x", range(5), shard_samples=2)
        with pytest.raises(ConfigError, match=r"already contains 5 samples in 3 shards\. Pass resume=True, and write "):
            mm_assets.create(tmp_path / "x", FIELDS)
        with pytest.raises(SchemaMismatchError, match=r"have value: BytesField.*this writer have text: TextField"):
            mm_assets.create(tmp_path / "x", {"text": TextField()}, resume=True)
        with pytest.raises(SchemaMismatchError, match="its shards are mstr, but the shards of this writer are mult"):
            mm_assets.create(tmp_path / "x", FIELDS, format="mult", resume=True)

    def test_two_writers_of_one_rank(self, tmp_path: Path) -> None:
        """The one that began later continues; the other ends with its next shard, and changes nothing."""
        first = mm_assets.create(tmp_path / "x", FIELDS, shard_samples=1)
        second = mm_assets.create(tmp_path / "x", FIELDS, shard_samples=1, resume=True)
        second.write("b", sample(0))
        with pytest.raises(ChangedError, match="another writer of this rank is running"):
            first.write("a", sample(1))
        second.close()
        assert list(content(tmp_path / "x")) == ["b"]

    def test_ids(self, tmp_path: Path) -> None:
        """Two samples with one id are refused, in a shard and over shards, where the caller may accept them."""
        writer = mm_assets.create(tmp_path / "one", FIELDS)
        writer.write("a", sample(0))
        writer.write("a", sample(1))
        with pytest.raises(EncodeError, match="samples 0 and 1 share the id 'a'"):
            writer.close()
        writer = mm_assets.create(tmp_path / "two", FIELDS, shard_samples=2)
        for sample_id in "abcdb":
            writer.write(sample_id, sample(0))
        with pytest.raises(EncodeError, match=r"000002\.\w+\.mstr and .*000000\.\w+\.mstr have .* the id 'b'"):
            writer.close()
        assert mm_assets.merge(tmp_path / "two", unique_ids=False).num_samples == 5
        with mm_assets.open(tmp_path / "two") as data:
            assert list(data.sample_ids) == list("abcdb")


class TestMerge:
    def test_ranks_that_do_not_belong_together(self, tmp_path: Path) -> None:
        """Missing, unfinished and different ranks are refused, each with its number; then no manifest is written."""
        folder = tmp_path / "x"
        with pytest.raises(SourceError, match=r"has no shards of mm_assets\.create"):
            mm_assets.merge(folder)
        write(folder, range(3), rank=1, world_size=3)
        with pytest.raises(SourceError, match="lacks 2 ranks of 3: 0, 2"):
            mm_assets.merge(folder)
        write(folder, range(3, 5), rank=0, world_size=3)
        writer = mm_assets.create(folder, FIELDS, rank=2, world_size=3)
        writer.write("id-9", sample(9))
        with pytest.raises(SourceError, match=r"rank 2 has not finished \(0 samples in 0 shards\): let it end, or run"):
            mm_assets.merge(folder)
        writer.close()
        assert mm_assets.merge(folder).num_samples == 6
        assert list(content(folder)) == ["id-3", "id-4", "id-0", "id-1", "id-2", "id-9"]

        other = {"text": TextField()}
        for rank, fields in enumerate((FIELDS, other)):
            write(tmp_path / "y", range(rank, rank + 1), rank=rank, world_size=2, fields=fields)
        with pytest.raises(SchemaMismatchError, match=r"writer-00001-of-00002\.json: its shards have text: TextField"):
            mm_assets.merge(tmp_path / "y")
        (folder / "writer-00000-of-00002.json").write_bytes((tmp_path / "y/writer-00000-of-00002.json").read_bytes())
        with pytest.raises(SourceError, match="of different numbers of writers"):
            mm_assets.merge(folder)
        assert not (tmp_path / "y" / "manifest.json").exists()

    def test_missing_and_damaged_shards(self, tmp_path: Path) -> None:
        """A shard that is missing, truncated or not one is named; the older manifest stays."""
        write(tmp_path / "x", range(6), shard_samples=2)
        before = (tmp_path / "x" / "manifest.json").read_bytes()
        path = sorted((tmp_path / "x" / "packed").iterdir())[1]
        whole = path.read_bytes()
        for damaged, kind, message in (
            (whole[:-1], SourceError, f"{path.name}: has {len(whole) - 1} bytes, but its writer wrote {len(whole)}"),
            (bytes(len(whole)), FormatError, path.name),
            (None, SourceError, f"{path.name}: is missing"),
        ):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(kind, match=message):
                mm_assets.merge(tmp_path / "x")
        assert (tmp_path / "x" / "manifest.json").read_bytes() == before

    def test_lists_without_shards(self, tmp_path: Path) -> None:
        """A complete list without any shard is damaged: a writer without samples has one."""
        write(tmp_path / "x", range(2))
        path = tmp_path / "x" / "writer-00000-of-00001.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "shards": []}))
        with pytest.raises(CorruptError, match=r"writer-00000-of-00001\.json: shards \(found 0, expected at least 1\)"):
            mm_assets.merge(tmp_path / "x")

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    @pytest.mark.nightly_examples(500)
    def test_damaged_lists(self, data: st.DataObject) -> None:
        """Any value in place of another in a writer's list is refused, or harmless: nothing else is raised."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "x"
            write(folder, range(2), fsync=False)
            path = folder / "writer-00000-of-00001.json"
            document = json.loads(path.read_bytes())
            values = st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=3),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            )
            *parents, last = data.draw(st.sampled_from(list(places(document))))
            target = document
            for key in parents:
                target = target[key]
            target[last] = data.draw(values)
            path.write_text(json.dumps(document))
            for call in (
                lambda: mm_assets.merge(folder),
                lambda: len(mm_assets.create(folder, FIELDS, resume=True)),
            ):
                with suppress(SourceError, FormatError, SchemaMismatchError):
                    call()


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in places(inner))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
class TestObjectStorage:
    @pytest.fixture(scope="class")
    def server(self) -> Iterator[tuple[dict[str, Any], Recorder]]:
        pytest.importorskip("s3fs", reason="the s3 extra is not installed")
        pytest.importorskip("moto", reason="moto's server is not installed")
        with serve() as (url, recorder):
            options = {"key": "test", "secret": "test", "endpoint_url": url}
            fsspec.filesystem("s3", **options).mkdir("written")
            yield options, recorder

    @pytest.fixture
    def options(self, server: tuple[dict[str, Any], Recorder]) -> dict[str, Any]:
        return server[0]

    def test_ranks_and_an_interruption(
        self, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A bucket has the same objects as a folder would have files; nothing stays in the scratch folder."""
        url = "s3://written/a/x"
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
        (tmp_path / "scratch").mkdir()
        ranks = [range(12), range(12, 20)]
        for rank, indices in enumerate(ranks):
            write(tmp_path / "x", indices, rank=rank, world_size=2, shard_samples=5)
        mm_assets.merge(tmp_path / "x")
        for rank, indices in enumerate(ranks):
            place = {"rank": rank, "world_size": 2, "shard_samples": 5, "storage_options": options}
            writer = mm_assets.create(url, FIELDS, **place)
            assert writer.path == url
            for i in indices[:7]:
                writer.write(f"id-{i}", sample(i))
            writer.abort()
            with pytest.raises(ConfigError, match="already contains 5 samples in 1 shard"):
                mm_assets.create(url, FIELDS, **place)
            with mm_assets.create(url, FIELDS, resume=True, **place) as writer:
                for i in indices[len(writer) :]:
                    writer.write(f"id-{i}", sample(i))
        with pytest.raises(SourceError, match="is not complete"):
            mm_assets.open(url, storage_options=options)
        assert mm_assets.merge(url, storage_options=options).path == url
        assert content(url, storage_options=options) == content(tmp_path / "x")
        s3 = fsspec.filesystem("s3", **options)
        names = {name.removeprefix("written/a/x/"): s3.cat_file(name) for name in s3.find("written/a/x")}
        assert names == files(tmp_path / "x")
        assert not list((tmp_path / "scratch").iterdir())

    def test_two_writers_of_one_rank(self, options: dict[str, Any]) -> None:
        """The one that began earlier is stopped by the store's conditional uploads."""
        place = {"shard_samples": 1, "storage_options": options}
        first = mm_assets.create("s3://written/two", FIELDS, **place)
        second = mm_assets.create("s3://written/two", FIELDS, resume=True, **place)
        second.write("b", sample(0))
        with pytest.raises(ChangedError, match="another writer of this rank is running"):
            first.write("a", sample(1))
        second.close()
        assert list(content("s3://written/two", storage_options=options)) == ["b"]

    def test_an_upload_that_fails(self, server: tuple[dict[str, Any], Recorder]) -> None:
        """The message has the URL, complete shards stay, and the next writer goes on after them."""
        options, recorder = server
        place = {"shard_samples": 2, "storage_options": options}
        writer = mm_assets.create("s3://written/failing/", FIELDS, **place)
        for i in range(3):
            writer.write(str(i), sample(i))
        recorder.faults.is_expired = True
        try:
            with pytest.raises(SourceError, match=r"s3://written/failing/packed/000001\."):
                writer.close()
        finally:
            recorder.faults.is_expired = False
        with mm_assets.create("s3://written/failing", FIELDS, resume=True, **place) as writer:
            assert len(writer) == 2
        assert list(content("s3://written/failing", storage_options=options)) == ["0", "1"]
