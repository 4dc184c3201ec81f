"""Rows and their bytes: every strategy, each byte read once, memory within its bounds."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.media.tiff import TiffFrames
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.schema import DatasetSchema, MemberRules
from mm_assets.rows.source_ref import build_source_ref, parse_source_ref
from mm_assets.sources.base import index_members
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile

from .materialize import JPEG, CountingSource, Opener, batch_of, content, make_tar, make_tiff, ref_of, row, run


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
