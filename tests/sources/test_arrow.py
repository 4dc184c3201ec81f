"""Tests of Arrow streams and files as containers: the members of Parquet, folders of `save_to_disk`, damage."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_assets.errors import ShardError
from mm_assets.rows.base import row_sources, shard_kinds
from mm_assets.rows.from_members import MemberRows
from mm_assets.sources.arrow import ArrowSource
from mm_assets.sources.base import missing_end
from mm_assets.sources.member import ShardDamage
from mm_assets.sources.parquet import ParquetSource
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import expand_shards

from ..pipeline.chain import declare, run_chain
from ..pipeline.shards import png, table
from .members import JPEG, contents
from .tables import entries, tables

TABLE = pa.table(
    {
        "image": pa.array(
            [{"bytes": JPEG, "path": None}, {"bytes": png(1), "path": "x.png"}, None] * 4,
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        ),
        "text": ["a", None, "é"] * 4,
        "scores": [[0.5], [], None] * 4,
        "kind": pa.array(["x", "y", "x"] * 4).dictionary_encode(),
    }
)


def arrow_bytes(table: pa.Table = TABLE, *, is_file: bool = False, rows: int = 5) -> bytes:
    """A table in several record batches."""
    target = io.BytesIO()
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with new(target, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return target.getvalue()


def source_of(folder: Path, content: bytes) -> ArrowSource:
    (folder / "t.arrow").write_bytes(content)
    return ArrowSource(SourceFile(str(folder / "t.arrow")))


@pytest.mark.parametrize("is_file", [False, True])
def test_members_are_those_of_the_same_table_in_parquet(tmp_path: Path, is_file: bool) -> None:
    """A stream and a file have the members that a Parquet file of the same rows has, in order."""
    pq.write_table(TABLE, tmp_path / "t.parquet")
    source = source_of(tmp_path, arrow_bytes(is_file=is_file))
    assert contents(source) == contents(ParquetSource(SourceFile(str(tmp_path / "t.parquet"))))
    assert [member.ordinal for member in source.members()] == list(range(len(list(source.members()))))
    assert ArrowSource.accepts(arrow_bytes(is_file=is_file)[:512])
    assert not any(
        ArrowSource.accepts(head) for head in (b"", b"\xff\xff\xff\xff", bytes(16), b"\xff" * 16, b"PAR1" * 4)
    )


@pytest.mark.nightly_examples(10_000)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables(), st.integers(1, 5), st.booleans())
def test_any_table_has_the_members_of_parquet(tmp_path: Path, table: pa.Table, rows: int, is_file: bool) -> None:
    """Whatever columns, values and batches there are, entries and contents are those of a Parquet file of the rows."""
    pq.write_table(table, tmp_path / "t.parquet")
    with SourceFile(str(tmp_path / "t.parquet")) as file:
        expected = entries(ParquetSource(file))
    source = source_of(tmp_path, arrow_bytes(table, is_file=is_file, rows=rows))
    assert entries(source) == expected
    source.file.close()


def test_a_saved_dataset_is_packed(tmp_path: Path) -> None:
    """The splits of a folder that `save_to_disk` wrote are shards with their folders in the key."""
    for split in ("test", "train"):
        (tmp_path / "in" / split).mkdir(parents=True)
        (tmp_path / "in" / split / "state.json").write_text("{}")
        (tmp_path / "in" / split / "data-00000-of-00001.arrow").write_bytes(arrow_bytes())
    (tmp_path / "in/dataset_dict.json").write_text("{}")
    listing = expand_shards(str(tmp_path / "in"), kinds=shard_kinds(None, where="x"))
    assert [shard.url.removeprefix(f"{tmp_path}/in/") for shard in listing.shards] == [
        "test/data-00000-of-00001.arrow",
        "train/data-00000-of-00001.arrow",
    ]
    (source,) = row_sources([SourceFile(listing.shards[0].url)])
    assert isinstance(source, MemberRows)
    dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "in/train", on_undecodable="keep"))
    rows = table(dataset, "materialized_rows", "data-00000-of-00001")
    assert [r["binary_content"] for r in rows if r["modality"] == "image"] == [JPEG, png(1)] * 4


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("kind", ["truncated", "flipped"])
def test_damage_raises_or_is_listed(tmp_path: Path, kind: str, is_file: bool) -> None:
    """Damage raises `ShardError` or is not noticed; salvaged, batches before it are kept and the rest is listed."""
    content = arrow_bytes(is_file=is_file)
    noise = random.Random(0)
    for at in range(0, len(content), max(len(content) // 80, 1)):
        damaged = content[:at]
        if kind == "flipped":
            damaged += bytes([content[at] ^ noise.randrange(1, 256)]) + content[at + 1 :]
        source = source_of(tmp_path, damaged)
        failure, whole, kept = None, {}, {}
        try:
            whole = contents(source)
        except ShardError as error:
            failure = error
        damage: list[ShardDamage] = []
        try:
            kept = contents(source, on_damaged_shard="salvage", damage=damage)
        except ShardError as error:
            damage.append(
                ShardDamage(byte_offset=error.byte_offset or 0, byte_size=0, detail="nothing can be salvaged")
            )
        assert bool(damage) == (failure is not None)
        assert failure is not None or kept == whole
        assert failure is None or failure.byte_offset is not None


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize(("is_dictionary", "is_legacy"), [(False, False), (True, False), (False, True)])
def test_a_compressed_batch_is_measured_before_it_is_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, is_dictionary: bool, is_legacy: bool
) -> None:
    """Compressed batches and dictionaries are read up to a limit, and a larger one is damage of a small file."""
    monkeypatch.setattr("mm_assets.sources.arrow.MAX_BATCH_BYTES", 1 << 20)
    options = pa.ipc.IpcWriteOptions(compression=compression, use_legacy_format=is_legacy)
    for size, message in (((1 << 20) - 10_000, None), (1 << 20, "bytes without compression, at most 1,048,576")):
        column = pa.array([bytes(size)])
        rows = pa.table({"jpg": column.dictionary_encode() if is_dictionary else column})
        target = pa.BufferOutputStream()
        with pa.ipc.new_file(target, rows.schema, options=options) as writer:
            writer.write_table(rows)
        source = source_of(tmp_path, target.getvalue().to_pybytes())
        assert source.file.size < 1 << 14
        if message is None:
            assert [len(content) for content in contents(source).values()] == [size]
            continue
        with pytest.raises(ShardError, match=message):
            list(source.members())


def test_a_stream_without_an_end_is_reported(tmp_path: Path) -> None:
    """A stream that ends between two batches is read, and lacks its end."""
    content = arrow_bytes()
    source = source_of(tmp_path, content)
    members = list(source.members())
    assert missing_end(source) is None
    source = source_of(tmp_path, content[:-8])
    assert list(source.members()) == members
    assert "batches may be missing" in (missing_end(source) or "")


def test_a_message_of_any_size_is_not_allocated(tmp_path: Path) -> None:
    """A schema, or a body, that claims to be larger than the file is damage, and no memory is taken for it."""
    content = arrow_bytes()
    with pytest.raises(ShardError, match="schema"):
        contents(source_of(tmp_path, struct.pack("<Ii", 0xFFFFFFFF, 1 << 20) + bytes(64)))
    start = content.index(b"\xff\xff\xff\xff", 8)
    with pytest.raises(ShardError, match="row 0 or after"):
        contents(source_of(tmp_path, content[: start + 4] + struct.pack("<i", 0x7FFFFFF8) + content[start + 8 :]))
