"""Rows and their bytes: every strategy, each byte read once, errors on their rows, memory within its bounds."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import ConfigError, ShardReadError, SourceError
from mm_assets.media.tiff import TiffFrames
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.parquet import ParquetSink
from mm_assets.rows.schema import DatasetSchema, MemberRules, UserColumn
from mm_assets.rows.source_ref import build_source_ref, parse_source_ref
from mm_assets.sources.base import index_members
from mm_assets.sources.extract import MemberExtract, Shelf
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile

SCHEMA = DatasetSchema(user_columns=(UserColumn(name="score", source="score", type="double", rows=""),)).row_schema()
JPEG = b"\xff\xd8\xff\xe0"


class CountingSource(SourceFile):
    """A file that notes what is read of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reads: list[tuple[int, int]] = []
        self.largest_buffer = 0
        self.streams = 0
        self.broken: set[int] = set()

    def _note(self, offset: int, size: int) -> None:
        if any(offset <= position < offset + size for position in self.broken):
            raise SourceError(self.url, "the disk says no", byte_offset=offset)
        self.reads.append((offset, size))

    def read(self, offset: int, size: int) -> bytes:
        """One range."""
        self._note(offset, size)
        return super().read(offset, size)

    def read_into(self, ranges: Sequence[tuple[int, int]], buffer: memoryview, positions: Sequence[int]) -> None:
        """Several ranges."""
        self.largest_buffer = max(self.largest_buffer, len(buffer))
        for offset, size in ranges:
            self._note(offset, size)
        super().read_into(ranges, buffer, positions)

    def stream(self) -> Any:
        """The whole file."""
        self.streams += 1
        return super().stream()

    def bytes_read_twice(self) -> int:
        """How many bytes were read more than once."""
        seen = bytearray(self.size)
        twice = 0
        for offset, size in self.reads:
            twice += sum(seen[offset : offset + size])
            seen[offset : offset + size] = b"\1" * size
        return twice


class Opener:
    """Opens files and remembers which."""

    def __init__(self) -> None:
        self.sources: dict[str, CountingSource] = {}
        self.asked: list[str] = []

    def __call__(self, url: str) -> CountingSource:
        """The file, the same one each time."""
        self.asked.append(url)
        if url not in self.sources:
            self.sources[url] = CountingSource(url)
        return self.sources[url]


@pytest.fixture
def opener() -> Iterable[Opener]:
    made = Opener()
    yield made
    for source in made.sources.values():
        source.close()


def row(
    sample: str,
    position: int,
    ref: str | None,
    *,
    modality: str = "image",
    content_type: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {
        "sample_id": sample,
        "position": position,
        "modality": modality,
        "content_type": content_type,
        "source_ref": ref,
        **more,
    }


def batch_of(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)


def run(
    rows: Sequence[Mapping[str, Any]], opener: Callable[[str], SourceFile], *, cuts: Sequence[int] = (), **options: Any
) -> tuple[list[dict[str, Any]], list[pa.RecordBatch], MaterializeStream]:
    """Materializes rows, cut into input batches at `cuts`; the rows that came out, their batches, the stream."""
    edges = sorted({0, len(rows), *(min(c, len(rows)) for c in cuts)})
    batches = [batch_of(rows[a:b]) for a, b in itertools.pairwise(edges)]
    stream = MaterializeStream(iter(batches), open_file=opener, **{"allowed": lambda _: True, **options})
    out = list(stream)
    for batch in out:
        batch.validate(full=True)
        assert batch.schema.equals(SCHEMA)
    return [r for batch in out for r in batch.to_pylist()], out, stream


def make_tar(path: Path, members: Mapping[str, bytes], *, compress: bool = False) -> dict[str, tuple[int, int]]:
    """Writes a shard; the byte range of each member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    data = out.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        ranges = {member.name: (member.offset_data, member.size) for member in archive}
    path.write_bytes(gzip.compress(data, 1, mtime=0) if compress else data)
    return ranges


def make_tiff(num_frames: int, *, size: int = 40, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    first, *rest = [Image.fromarray(rng.integers(0, 255, (size + k, size), np.uint8)) for k in range(num_frames)]
    out = io.BytesIO()
    first.save(out, "TIFF", save_all=True, append_images=rest, compression="tiff_adobe_deflate")
    return out.getvalue()


def ref_of(path: Path, member: str | None = None, span: tuple[int, int] | None = None, frame: int | None = None) -> str:
    offset, size = span if span is not None else (None, None)
    return build_source_ref(path=str(path), member=member, byte_offset=offset, byte_size=size, frame_index=frame)


def content(seed: int, size: int) -> bytes:
    return JPEG[: min(size, 4)] + np.random.default_rng(seed).bytes(max(size - 4, 0))


# -- what comes out


def test_ranges_of_a_shard(tmp_path: Path, opener: Opener) -> None:
    """Media rows get the bytes of their range and the type that these tell; all other rows and columns stay."""
    shard = tmp_path / "a.tar"
    members = {"a.jpg": content(1, 900), "a.bin": b"nothing known", "a.wav": content(2, 50)}
    spans = make_tar(shard, members)
    rows = [
        row("a", -1, None, modality="metadata", metadata_json="{}", score=0.5),
        row("a", 0, ref_of(shard, "a.txt", (0, 5)), modality="text", text_content="hello", content_type="text/plain"),
        row("a", 1, ref_of(shard, "a.jpg", spans["a.jpg"]), content_type="image/png"),
        row("a", 2, ref_of(shard, "a.bin", spans["a.bin"]), modality="binary", content_type="text/csv", score=2.0),
        row("a", 3, ref_of(shard, "a.wav", spans["a.wav"]), modality="audio"),
    ]
    found, _, stream = run(rows, opener)
    assert [r["binary_content"] for r in found] == [None, None, *members.values()]
    assert [r["content_type"] for r in found] == [None, "text/plain", "image/jpeg", "text/csv", "image/jpeg"]
    assert [r["materialize_error"] for r in found] == [None] * 5
    for before, after in zip(rows, found, strict=True):
        for name in ("sample_id", "position", "modality", "source_ref"):
            assert before[name] == after[name]
        assert [after[n] for n in ("metadata_json", "text_content", "score")] == [
            before.get(n) for n in ("metadata_json", "text_content", "score")
        ]
    assert stream.counts == {
        "rows": 5,
        "media_rows": 3,
        "materialized": 3,
        "errors": 0,
        "frames": 0,
        "content_bytes": sum(map(len, members.values())),
        "bytes_read": sum(map(len, members.values())),
    }


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    picks=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["range", "tar", "whole"])), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=3),
    batch_bytes=st.integers(1, 12_000),
    threads=st.integers(1, 3),
    compress=st.booleans(),
)
def test_any_rows_in_any_batches(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    picks: list[tuple[int, str]],
    cuts: list[int],
    batch_bytes: int,
    threads: int,
    compress: bool,
) -> None:
    """Whatever the order of rows and however they share bytes: right bytes, in order, batches in their bounds."""
    folder = tmp_path_factory.mktemp("any")
    tiff = make_tiff(3, size=12)
    members = {f"m{i}.jpg": content(i, size) for i, size in enumerate(sizes)} | {"t.tiff": tiff}
    plain, squeezed = folder / "plain.tar", folder / "squeezed.tar.gz"
    spans = make_tar(plain, members)
    make_tar(squeezed, members, compress=True)
    for name, data in members.items():
        (folder / name).write_bytes(data)
    frames = [TiffFrames(tiff).extract(k) for k in range(3)]
    rows, expected = [], []
    for number, (pick, how) in enumerate(picks):
        name = list(members)[pick % len(members)]
        frame = pick % 3 if name == "t.tiff" else (pick % 3 or None)  # of a JPEG, a frame is the whole
        if how == "range":
            ref = ref_of(plain, name, spans[name], frame)
        elif how == "tar":
            ref = ref_of(squeezed if compress else plain, name, None, frame)
        else:
            ref = ref_of(folder / name, None, None, frame)
        rows.append(row(f"s{number // 3}", number % 3, ref))
        expected.append(frames[pick % 3] if name == "t.tiff" else members[name])
    opener = Opener()
    found, out, _ = run(rows, opener, cuts=cuts, batch_bytes=batch_bytes, threads=threads)
    assert [r["materialize_error"] for r in found] == [None] * len(rows)
    assert [r["binary_content"] for r in found] == expected
    assert [(r["sample_id"], r["position"]) for r in found] == [(r["sample_id"], r["position"]) for r in rows]
    for batch in out:
        sizes_out = [len(value) for value in batch.column("binary_content").to_pylist()]
        assert sum(sizes_out) <= batch_bytes or len(sizes_out) == 1
    for source in opener.sources.values():
        source.close()


def test_large_batches_in_threads(tmp_path: Path, opener: Opener) -> None:
    """Megabytes that several threads read into one buffer stand where they belong."""
    shard = tmp_path / "a.tar"
    members = {f"{i}.jpg": content(i, 300_000 + 7 * i) for i in range(24)}
    spans = make_tar(shard, members)
    rows = [row(name, 0, ref_of(shard, name, spans[name])) for name in reversed(members)]
    found, _, _ = run(rows, opener, threads=4)
    assert [r["binary_content"] for r in found] == list(members.values())[::-1]


def test_rows_that_have_content_keep_it(tmp_path: Path, opener: Opener) -> None:
    """Content that a row came with is handed on, between rows that get theirs, and within the same bounds."""
    (tmp_path / "x.jpg").write_bytes(JPEG + b"new")
    ref = ref_of(tmp_path / "x.jpg")
    rows = [
        row("a", 0, ref, binary_content=b"old 1"),
        row("a", 1, ref),
        row("a", 2, ref, binary_content=b"old 2", content_type="x/y"),
        row("b", 0, ref, binary_content=b"old 3"),
    ]
    found, out, stream = run(rows, opener, batch_bytes=12)
    assert [r["binary_content"] for r in found] == [b"old 1", JPEG + b"new", b"old 2", b"old 3"]
    assert [r["content_type"] for r in found] == [None, "image/jpeg", "x/y", None]
    assert [batch.num_rows for batch in out] == [2, 2]
    assert stream.counts["materialized"] == stream.counts["media_rows"] == 4
    untouched, _, _ = run(rows[2:], opener)
    assert [r["binary_content"] for r in untouched] == [b"old 2", b"old 3"]


def test_zip_archives_of_arrays_keep_their_type(tmp_path: Path, opener: Opener) -> None:
    """An .npz is a zip archive by its bytes; the name's type says more and stays, any other name's does not."""
    out = io.BytesIO()
    np.savez(out, a=np.zeros(3))
    (tmp_path / "x.npz").write_bytes(out.getvalue())
    ref = ref_of(tmp_path / "x.npz")
    found, _, _ = run(
        [row("a", i, ref, content_type=t) for i, t in enumerate(("application/x-npz", "image/png"))], opener
    )
    assert [r["content_type"] for r in found] == ["application/x-npz", "application/zip"]


# -- frames


def test_frames_of_a_tiff(tmp_path: Path, opener: Opener) -> None:
    """Rows with a frame get that frame in all three strategies; the file is read once in each."""
    tiff = make_tiff(4)
    members = {"d.tiff": tiff}
    spans = make_tar(tmp_path / "a.tar", members)
    make_tar(tmp_path / "a.tar.gz", members, compress=True)
    (tmp_path / "d.tiff").write_bytes(tiff)
    for where, member, span in (
        (tmp_path / "a.tar", "d.tiff", spans["d.tiff"]),
        (tmp_path / "a.tar.gz", "d.tiff", None),
        (tmp_path / "d.tiff", None, None),
    ):
        rows = [row("d", k, ref_of(where, member, span, k), content_type="image/x") for k in range(4)]
        found, _, stream = run(rows, opener, batch_bytes=3000)
        assert [r["binary_content"] for r in found] == [TiffFrames(tiff).extract(k) for k in range(4)]
        assert {r["content_type"] for r in found} == {"image/tiff"}
        assert stream.counts["frames"] == 4
    assert opener.sources[str(tmp_path / "a.tar")].reads == [spans["d.tiff"]]
    assert opener.sources[str(tmp_path / "a.tar.gz")].streams == 1
    assert opener.sources[str(tmp_path / "d.tiff")].reads == [(0, len(tiff))]


def test_a_tiff_over_several_input_batches_is_read_once(tmp_path: Path, opener: Opener) -> None:
    """A document whose rows are in many batches still costs one read of its TIFF."""
    tiff = make_tiff(9)
    spans = make_tar(tmp_path / "a.tar", {"d.tiff": tiff})
    rows = [row("d", k, ref_of(tmp_path / "a.tar", "d.tiff", spans["d.tiff"], k)) for k in range(9)]
    found, _, _ = run(rows, opener, cuts=range(1, 9))
    assert [r["binary_content"] for r in found] == [TiffFrames(tiff).extract(k) for k in range(9)]
    assert opener.sources[str(tmp_path / "a.tar")].reads == [spans["d.tiff"]]


def test_other_content_is_not_a_frame(tmp_path: Path, opener: Opener) -> None:
    """What is not a TIFF is returned unchanged, whatever frame is asked for."""
    spans = make_tar(tmp_path / "a.tar", {"x.jpg": content(1, 70), "y.jpg": b"GIF"})
    rows = [row("x", k, ref_of(tmp_path / "a.tar", n, spans[n], k)) for k, n in enumerate(("x.jpg", "y.jpg", "x.jpg"))]
    found, _, stream = run(rows, opener)
    assert [r["binary_content"] for r in found] == [content(1, 70), b"GIF", content(1, 70)]
    assert stream.counts["frames"] == 0


def test_a_missing_frame_is_an_error_of_its_row(tmp_path: Path, opener: Opener) -> None:
    """A frame that the TIFF does not have, or a TIFF that is damaged, costs only the rows that ask for it."""
    tiff = make_tiff(2)
    spans = make_tar(tmp_path / "a.tar", {"d.tiff": tiff, "e.tiff": tiff[:9]})
    rows = [row("d", k, ref_of(tmp_path / "a.tar", "d.tiff", spans["d.tiff"], k)) for k in range(3)]
    rows.append(row("e", 0, ref_of(tmp_path / "a.tar", "e.tiff", spans["e.tiff"], 0)))
    found, _, stream = run(rows, opener)
    assert [r["binary_content"] is None for r in found] == [False, False, True, True]
    shard = tmp_path / "a.tar"
    assert found[2]["materialize_error"] == (
        f"{shard}, member 'd.tiff', frame 2: frame 2 was asked for, the file has 2"
    )
    assert "member 'e.tiff', frame 0: the directory of frame 0 is truncated" in found[3]["materialize_error"]
    assert stream.counts["errors"] == 2


# -- each byte once, bounded memory


def test_each_byte_is_read_once(tmp_path: Path, opener: Opener) -> None:
    """However many rows share a range, near or far, and however small the batches: no byte is read twice."""
    shard = tmp_path / "a.tar"
    members: dict[str, bytes] = {f"{i}.jpg": content(i, 2000 + i) for i in range(20)} | {"t.tiff": make_tiff(5)}
    spans = make_tar(shard, members)
    names = [f"{i}.jpg" for i in (*range(20), 3, 3, 0, 19, 7, *range(20))]
    rows = [row("s", i, ref_of(shard, n, spans[n])) for i, n in enumerate(names)]
    rows[5:5] = [row("t", i, ref_of(shard, "t.tiff", spans["t.tiff"], i % 5)) for i in range(10)]
    rows.append(row("t", 99, ref_of(shard, "t.tiff", spans["t.tiff"], 4)))
    found, _, stream = run(rows, opener, batch_bytes=6000)
    assert all(r["materialize_error"] is None for r in found)
    assert [r["binary_content"] for r in found if r["sample_id"] == "s"] == [members[n] for n in names]
    source = opener.sources[str(shard)]
    assert source.bytes_read_twice() == 0
    assert stream.counts["bytes_read"] == sum(size for _, size in source.reads) == sum(map(len, members.values()))


def test_memory_is_bounded(tmp_path: Path, opener: Opener) -> None:
    """No buffer is larger than a batch or one member, and Arrow never holds more than two batches and a member."""
    shard = tmp_path / "a.tar"
    members: dict[str, bytes] = {f"{i}.jpg": content(i, 40_000) for i in range(60)}
    members |= {"big.jpg": content(7, 700_000), "t.tiff": make_tiff(12, size=300)}
    spans = make_tar(shard, members)
    rows = [row(name, 0, ref_of(shard, name, spans[name])) for name in members if name != "t.tiff"]
    rows[30:30] = [row("t", k, ref_of(shard, "t.tiff", spans["t.tiff"], k)) for k in range(12)]
    batch_bytes, largest = 200_000, max(map(len, members.values()))
    base = pa.total_allocated_bytes()
    peak = 0
    total = 0
    for batch in MaterializeStream([batch_of(rows)], open_file=opener, allowed=lambda _: True, batch_bytes=batch_bytes):
        peak = max(peak, pa.total_allocated_bytes() - base)
        total += batch.num_rows
    assert total == len(rows)
    assert opener.sources[str(shard)].largest_buffer <= max(batch_bytes, largest)
    assert peak <= 2 * batch_bytes + largest + 100_000


# -- errors


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (None, "source_ref: is missing or has no path"),
        ("", "source_ref: is missing or has no path"),
        ("no json", "source_ref: is not JSON"),
        ("[1]", "source_ref: is a JSON list"),
        ('{"path": 7}', "source_ref: path is int"),
        ('{"path": "SHARD", "byte_offset": -1, "byte_size": 5}', "source_ref: byte_offset is out of range"),
        ('{"path": "SHARD", "byte_offset": 5, "byte_size": -5}', "source_ref: byte_size is out of range"),
        ('{"path": "SHARD", "byte_offset": 5}', "byte_offset is given without byte_size"),
        (
            '{"path": "SHARD", "byte_offset": 5, "byte_size": 9223372036854775807}',
            "source_ref: byte_offset and byte_size",
        ),
        ('{"path": "SHARD", "byte_offset": 512, "byte_size": 0}', "is empty: found 0 bytes"),
        ('{"path": "SHARD", "byte_offset": 512, "byte_size": 99999}', "a range of 99999 bytes does not lie inside"),
        ('{"path": "SHARD", "byte_offset": 99999, "byte_size": 1}', "at byte 99999: a range of 1 bytes"),
        ('{"path": "SHARD", "byte_offset": 9000000000000000000, "byte_size": 1}', "does not lie inside"),
        ('{"path": "SHARD", "byte_size": 3}', "bytes, the source_ref says 3"),
        ('{"path": "SHARD", "member": "none.jpg"}', "member 'none.jpg': the shard has no such member"),
        ('{"path": "SHARD", "member": "ok.jpg", "byte_size": 3}', "holds 100 bytes, the source_ref says 3"),
        ('{"path": "SHARD.gone"}', "No such file"),
        ('{"path": "SHARD.gone", "member": "a"}', "No such file"),
        ('{"path": "FOLDER"}', "is a folder"),
        ('{"path": "FOLDER/empty"}', "is empty: found 0 bytes"),
        ('{"path": "FOLDER/empty", "member": "a"}', "is empty (0 bytes), not a shard"),
        ('{"path": "FOLDER/text", "member": "a\\nb"}', r"member 'a\nb'"),
    ],
)
def test_what_is_wrong_with_a_row(tmp_path: Path, opener: Opener, ref: str | None, message: str) -> None:
    """Each wrong locator is one line on its row; its neighbours get their bytes."""
    shard = tmp_path / "a.tar"
    spans = make_tar(shard, {"ok.jpg": content(1, 100)})
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"x" * 2000)
    if ref is not None:
        ref = ref.replace("SHARD", str(shard)).replace("FOLDER", str(tmp_path))
    good = ref_of(shard, "ok.jpg", spans["ok.jpg"])
    found, _, stream = run([row("a", 0, good), row("b", 0, ref), row("c", 0, good)], opener)
    assert [r["binary_content"] for r in found] == [content(1, 100), None, content(1, 100)]
    error = found[1]["materialize_error"]
    assert message in error
    assert "\n" not in error
    assert found[0]["materialize_error"] is found[2]["materialize_error"] is None
    assert (stream.counts["errors"], stream.counts["materialized"]) == (1, 2)


def test_what_is_not_allowed_is_never_opened(tmp_path: Path, opener: Opener) -> None:
    """A locator outside the allowed places is an error of its row, in every strategy; the file is not opened."""
    shard, secret = tmp_path / "a.tar", tmp_path / "secret.tar"
    spans = make_tar(shard, {"ok.jpg": content(1, 100)})
    make_tar(secret, {"ok.jpg": b"secret"})
    refs = [ref_of(secret, "ok.jpg", (512, 6)), ref_of(secret, "ok.jpg"), ref_of(secret), '{"path":"http://h/x"}']
    rows = [row("a", i, ref) for i, ref in enumerate([*refs, ref_of(shard, "ok.jpg", spans["ok.jpg"])])]
    found, _, _ = run(rows, opener, allowed=lambda url: url == str(shard))
    assert [r["binary_content"] for r in found] == [None] * 4 + [content(1, 100)]
    assert all("outside the places that the configuration allows" in r["materialize_error"] for r in found[:4])
    assert set(opener.asked) == {str(shard)}


def test_a_read_that_fails_costs_one_row(tmp_path: Path, opener: Opener) -> None:
    """When one of many ranges of a request cannot be read, and is not a member's, the others still are."""
    shard = tmp_path / "a.tar"
    members = {f"{i}.jpg": content(i, 100) for i in range(6)}
    spans = make_tar(shard, members)
    opener(str(shard)).broken = {spans["1.jpg"][0], spans["3.jpg"][0]}
    rows = [row(n, 0, ref_of(shard, None, spans[n])) for n in members]
    rows += [row("t", k, ref_of(shard, None, spans["3.jpg"], k)) for k in range(2)]
    found, out, _ = run(rows, opener)
    with ParquetSink(tmp_path / "t.parquet", SCHEMA) as sink:
        for batch in out:
            sink.write(batch)
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() == found
    assert [r["binary_content"] for r in found] == [
        None if name in ("1.jpg", "3.jpg") else data for name, data in members.items()
    ] + [None, None]
    assert "the disk says no" in found[1]["materialize_error"]
    assert "the disk says no" in found[3]["materialize_error"]
    assert "frame 1" in found[7]["materialize_error"]


@pytest.mark.parametrize("fail_on_error", [False, True])
@pytest.mark.parametrize("how", ["range", "frame", "sparse", "compressed", "first bytes"])
def test_a_storage_failure_is_not_an_error_of_a_row(
    tmp_path: Path, opener: Opener, how: str, fail_on_error: bool
) -> None:
    """A shard that cannot be read now may be read later: that raises, whatever the policy, and loses no row."""
    members = {"0.jpg": content(0, 100), "1.jpg": content(1, 5000), "2.tiff": make_tiff(2)}
    shard = tmp_path / "a.tar"
    spans = make_tar(shard, members, compress=how in ("compressed", "first bytes"))
    broken = {"range": spans["1.jpg"][0], "frame": spans["2.tiff"][0], "sparse": spans["1.jpg"][0], "first bytes": 0}
    opener(str(shard)).broken = {broken.get(how, 4000)}
    ranged = how in ("range", "frame")
    rows = [row(n, 0, ref_of(shard, n, spans[n] if ranged else None)) for n in ("0.jpg", "1.jpg")]
    rows += [row("t", k, ref_of(shard, "2.tiff", spans["2.tiff"] if ranged else None, k)) for k in range(2)]
    with pytest.raises(ShardReadError, match=r"a\.tar.*the disk says no"):
        run(rows, opener, fail_on_error=fail_on_error)


@pytest.mark.parametrize("compress", [False, True])
def test_a_shard_that_is_truncated_while_it_is_read_raises(tmp_path: Path, opener: Opener, compress: bool) -> None:
    """A shard that is truncated once it is open is not a shard with short members."""
    shard = tmp_path / "a.tar"
    members = {f"{i}.jpg": content(i, 90_000) for i in range(8)}
    spans = make_tar(shard, members, compress=compress)
    opener(str(shard))
    os.truncate(shard, shard.stat().st_size // 2)
    rows = [row(n, 0, ref_of(shard, n, None if compress else spans[n])) for n in members]
    with pytest.raises(ShardReadError, match="it was truncated while being read"):
        run(rows, opener)


def test_a_storage_that_fails_once_is_asked_again(tmp_path: Path, opener: Opener) -> None:
    """Of ranges that fail together each is tried alone, and what then comes is used."""
    shard = tmp_path / "a.tar"
    members = {f"{i}.jpg": content(i, 100) for i in range(3)}
    spans = make_tar(shard, members)
    source = opener(str(shard))
    source.broken = {spans["1.jpg"][0]}
    real = source.read_into

    def once(*arguments: Any) -> None:
        try:
            real(*arguments)
        finally:
            source.broken = set()

    source.read_into = once  # type: ignore[method-assign]  # one object of the test's own class
    found, _, stream = run([row(n, 0, ref_of(shard, n, spans[n])) for n in members], opener)
    assert [r["binary_content"] for r in found] == list(members.values())
    assert stream.counts["errors"] == 0


def test_items_that_are_too_large(tmp_path: Path, opener: Opener) -> None:
    """An item over the limit is an error, in every strategy, and is not read."""
    members = {"x.jpg": content(1, 5000), "y.jpg": content(2, 50)}
    spans = make_tar(tmp_path / "a.tar", members)
    make_tar(tmp_path / "a.tgz", members, compress=True)
    (tmp_path / "x.jpg").write_bytes(members["x.jpg"])
    refs = [
        ref_of(tmp_path / "a.tar", "x.jpg", spans["x.jpg"]),
        ref_of(tmp_path / "a.tgz", "x.jpg"),
        ref_of(tmp_path / "x.jpg"),
    ]
    refs += [ref_of(tmp_path / "a.tgz", "y.jpg")]
    found, _, _ = run([row("a", i, ref) for i, ref in enumerate(refs)], opener, max_content_bytes=4000)
    assert ["holds 5000 bytes, allowed are 4000" in (r["materialize_error"] or "") for r in found] == [True] * 3 + [
        False
    ]
    assert found[3]["binary_content"] == members["y.jpg"]
    assert opener.sources[str(tmp_path / "a.tar")].reads == []


# -- policies


def mixed_rows(folder: Path) -> list[dict[str, Any]]:
    (folder / "x.jpg").write_bytes(content(1, 100))
    good, bad = ref_of(folder / "x.jpg"), ref_of(folder / "gone.jpg")
    rows = []
    for sample, refs in (("a", (good, good)), ("b", (good, bad, good)), ("c", (good,)), ("d", (good, good))):
        rows.append(row(sample, -1, None, modality="metadata"))
        rows += [row(sample, i, ref) for i, ref in enumerate(refs)]
    rows[-1]["materialize_error"] = "its token names no member"
    return rows


def names_of(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return [(r["sample_id"], r["position"]) for r in rows]


@pytest.mark.parametrize("batch_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("cuts", [(), (4, 5, 6)])
def test_policies(tmp_path: Path, opener: Opener, cuts: tuple[int, ...], batch_bytes: int) -> None:
    """Errors are left on their rows, or the first is raised, with any batch boundaries."""
    rows = mixed_rows(tmp_path)
    kept, _, stream = run(rows, opener, cuts=cuts, batch_bytes=batch_bytes)
    assert names_of(kept) == names_of(rows)
    assert [names for names, r in zip(names_of(kept), kept, strict=True) if r["materialize_error"]] == [
        ("b", 1),
        ("d", 1),
    ]
    assert stream.counts["errors"] == 2

    with pytest.raises(SourceError, match=r"sample 'b', position 1: .*gone\.jpg.*No such file"):
        run(rows, opener, cuts=cuts, batch_bytes=batch_bytes, fail_on_error=True)
    with pytest.raises(SourceError, match="sample 'd', position 1: its token names no member"):
        run(rows[-3:], opener, fail_on_error=True)


def test_wrong_arguments() -> None:
    """A number that is not positive is refused at once."""
    for options in ({"batch_bytes": 0}, {"threads": 0}, {"max_content_bytes": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            MaterializeStream([], open_file=SourceFile, allowed=lambda _: True, **options)


def test_a_stream_is_iterated_once(tmp_path: Path, opener: Opener) -> None:
    """A second iteration is an error, not an empty table."""
    (tmp_path / "x.jpg").write_bytes(b"x")
    stream = MaterializeStream(
        [batch_of([row("a", 0, ref_of(tmp_path / "x.jpg"))])], open_file=opener, allowed=lambda _: True
    )
    assert len(list(stream)) == 1
    with pytest.raises(RuntimeError, match="once"):
        list(stream)


# -- members without ranges


def squeeze(folder: Path, count: int = 12) -> tuple[Path, dict[str, bytes]]:
    members = {f"{i:02d}.jpg": content(i, 3000 + i) for i in range(count)}
    members = {name: data for pair in members.items() for name, data in (pair, (pair[0][:2] + ".json", b"{}"))}
    make_tar(folder / "a.tar.gz", members, compress=True)
    return folder / "a.tar.gz", members


@pytest.mark.parametrize("batch_bytes", [1000, 20_000, 1 << 20])
@pytest.mark.parametrize("cuts", [(), (3, 7), tuple(range(24))])
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_a_compressed_shard_is_streamed_once(
    tmp_path: Path, opener: Opener, order: str, cuts: tuple[int, ...], batch_bytes: int
) -> None:
    """Whatever order rows ask in, in one batch or in many, a compressed shard is decompressed once."""
    shard, members = squeeze(tmp_path)
    names = [name for name in members if name.endswith("jpg")] * 2
    if order == "backward":
        names.reverse()
    elif order == "shuffled":
        names = [names[i] for i in np.random.default_rng(0).permutation(len(names))]
    if len(cuts) > 3:
        names = names[:12] if order == "forward" else sorted(set(names), reverse=True)
    found, _, _ = run(
        [row(n, i, ref_of(shard, n)) for i, n in enumerate(names)], opener, cuts=cuts, batch_bytes=batch_bytes
    )
    assert [r["materialize_error"] for r in found] == [None] * len(names)
    assert [r["binary_content"] for r in found] == [members[name] for name in names]
    if not cuts or len(cuts) > 3:
        assert opener.sources[str(shard)].streams == 1


def test_a_shelf_that_forgets_costs_a_pass(tmp_path: Path, opener: Opener) -> None:
    """With no room to keep members, every one is still had, by streaming again."""
    shard, members = squeeze(tmp_path)
    source = opener(str(shard))
    shelf = Shelf(0, 0)
    extract = MemberExtract(source, shelf, max_bytes=1 << 20)
    names = [name for name in members if name.endswith("jpg")][::-1]
    extract.begin(set(names), last=True)
    assert [extract.get(name) for name in names] == [members[name] for name in names]
    assert source.streams == len(names)


def test_only_sparse_members_are_read(tmp_path: Path, opener: Opener) -> None:
    """Of a plain shard, members without a range cost headers and their own bytes, not the other members."""
    members = {f"{i}.jpg": content(i, 50_000) for i in range(10)}
    spans = make_tar(tmp_path / "a.tar", members)
    rows = [row("a", i, ref_of(tmp_path / "a.tar", f"{i}.jpg")) for i in (7, 2)]
    found, _, _ = run(rows, opener)
    assert [r["binary_content"] for r in found] == [members["7.jpg"], members["2.jpg"]]
    source = opener.sources[str(tmp_path / "a.tar")]
    assert [r for r in source.reads if r[1] >= 50_000] == [spans["2.jpg"], spans["7.jpg"]]
    assert sum(size for _, size in source.reads) < 150_000


def test_a_damaged_compressed_shard_gives_the_members_before(tmp_path: Path, opener: Opener) -> None:
    """Members in front of the damage come; those behind carry an error that says where it is."""
    shard, members = squeeze(tmp_path, count=40)
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    names = [name for name in members if name.endswith("jpg")]
    found, _, _ = run([row(n, 0, ref_of(shard, n)) for n in names], opener)
    good = [r["binary_content"] is not None for r in found]
    assert 10 < sum(good) < 30
    assert good == sorted(good, reverse=True)
    assert all(r["binary_content"] == members[r["sample_id"]] for r in found if r["binary_content"] is not None)
    assert all("it is damaged" in r["materialize_error"] for r in found if r["binary_content"] is None)
    assert opener.sources[str(shard)].streams <= 3


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.integers(0, 5)), max_size=40),
    memory=st.sampled_from([0, 10, 25, 1000]),
    scratch=st.sampled_from([0, 30, 1000]),
)
def test_a_shelf_gives_what_was_put_or_nothing(steps: list[tuple[str, int]], memory: int, scratch: int) -> None:
    """A shelf may forget, but never gives other bytes, and with room enough it forgets nothing."""
    shelf = Shelf(memory, scratch)
    present: set[int] = set()
    for action, key in steps:
        data = bytes([key]) * (key * 4)
        if action == "put":
            shelf.put(key, memoryview(data))
            present.add(key)
        elif action == "drop":
            shelf.drop(key)
            present.discard(key)
        found = shelf.get(key)
        assert found in (None, data)
        if key not in present:
            assert found is None
        elif memory == 1000:
            assert found == data
    shelf.close()
    assert shelf.get(1) is None


# -- files of their own, and remote ones


def test_a_folder_of_files(tmp_path: Path) -> None:
    """Rows that are files of their own need no more than one open file at a time."""
    for i in range(50):
        (tmp_path / f"{i}.jpg").write_bytes(content(i, 500))
    newest: list[SourceFile] = []

    def open_one(url: str) -> SourceFile:
        while newest:
            newest.pop().close()
        newest.append(SourceFile(url))
        return newest[-1]

    rows = [row("a", i, ref_of(tmp_path / f"{i % 40}.jpg")) for i in range(60)]
    found, _, _ = run(rows, open_one)
    assert [r["binary_content"] for r in found] == [content(i % 40, 500) for i in range(60)]
    newest.pop().close()


def test_remote_files() -> None:
    """Ranges of a remote shard, whole remote files and a missing one, next to each other."""
    memory = fsspec.filesystem("memory")
    tiff = make_tiff(2)
    try:
        for i in range(40):
            memory.pipe(f"/media/{i}.jpg", content(i, 300))
        memory.pipe("/media/shard.bin", content(99, 5000) + tiff)
        rows = [row("w", i, build_source_ref(path=f"memory:///media/{i}.jpg")) for i in range(40)]
        rows.insert(7, row("w", 70, build_source_ref(path="memory:///media/none.jpg")))
        shard = "memory:///media/shard.bin"
        rows += [row("r", i, build_source_ref(path=shard, byte_offset=i * 500, byte_size=400)) for i in range(10)]
        rows += [
            row("t", i, build_source_ref(path=shard, byte_offset=5000, byte_size=len(tiff), frame_index=i))
            for i in range(2)
        ]
        found, _, _ = run(rows, SourceFile)
        missing = found.pop(7)
        assert missing["binary_content"] is None
        assert missing["materialize_error"]
        assert [r["binary_content"] for r in found] == [
            *(content(i, 300) for i in range(40)),
            *(content(99, 5000)[i * 500 : i * 500 + 400] for i in range(10)),
            *(TiffFrames(tiff).extract(i) for i in range(2)),
        ]
    finally:
        memory.rm("/media", recursive=True)


# -- real shards


def check_shard(path: Path) -> int:
    """Materializes all rows of a shard and compares each with what tarfile gives; the number compared."""
    with tarfile.open(path) as archive:
        plain = {}
        for member in archive:
            if member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                plain[member.name] = file.read()
    source = CountingSource(str(path))
    try:
        rows = list(
            MemberRows([TarSource(source)]).rows(
                lambda: index_members(TarSource(source)), layout=MemberRules(), schema=DatasetSchema()
            )
        )
        source.reads.clear()
        source.streams = 0
        stream = MaterializeStream(
            rows, open_file=lambda _: source, allowed=lambda url: url == source.url, batch_bytes=1 << 20
        )
        compared = 0
        for batch in stream:
            for found in batch.to_pylist():
                if found["modality"] in ("metadata", "text"):
                    assert found["binary_content"] is None
                    continue
                ref = parse_source_ref(found["source_ref"])
                assert ref.member is not None
                whole = plain[ref.member]
                expected = whole if ref.frame_index is None else TiffFrames(whole).extract(ref.frame_index)
                assert found["materialize_error"] is None
                assert found["binary_content"] == expected
                compared += 1
        assert stream.counts["materialized"] == compared
        assert source.streams == 1 or source.bytes_read_twice() == 0
        return compared
    finally:
        source.close()


def test_demo_shards(demo_shards: Path) -> None:
    """Every media row of the demo shards holds the bytes that tarfile gives, read once."""
    assert sum(check_shard(path) for path in sorted(demo_shards.glob("*.tar"))) > 50


def test_real_shards(shared_data: Path) -> None:
    """Every media row of every corpus, compressed shards too, holds the bytes that tarfile gives, read once."""
    assert sum(check_shard(path) for path in sorted(shared_data.glob("*/*.t*"))) > 900
