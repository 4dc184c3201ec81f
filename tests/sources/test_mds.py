"""Tests of MDS shards: members of every encoding, compressions, damage, hostile bytes, and shards of `streaming`."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import math
import random
import struct
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import mm_assets
from mm_assets.errors import ShardError, SourceError
from mm_assets.pipeline.state.losses import losses
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.sources import ShardDamage, Source
from mm_assets.sources.base import open_container
from mm_assets.sources.mds import MdsSource
from mm_assets.storage.files import SourceFile
from mm_assets.testing import SourceSuite

from ..pipeline.chain import declare, run_chain
from .members import HIDDEN_SAMPLE_FILES, JPEG, PNG, SAMPLE_FILES, contents
from .offset_tables import (
    HOSTILE_NAMES,
    list_bytes,
    mds_bytes,
    mds_config,
    member_row,
    sample_bytes,
    table_bytes,
)

OWNERS = Path(__file__).parent / "owners" / "mds"
Files = Sequence[tuple[str, bytes]]


def source_of(folder: Path, content: bytes, name: str = "t.mds") -> Source:
    """A file of this content as the source that it is."""
    (folder / name).write_bytes(content)
    return open_container(SourceFile(str(folder / name)))


class MdsSuite(SourceSuite):
    source = MdsSource
    files = SAMPLE_FILES
    hostile = HOSTILE_NAMES
    hidden = HIDDEN_SAMPLE_FILES

    def make(self, files: Files) -> bytes:
        """A shard with a sample for each file."""
        columns = {"__key__": "str", "json": "str", "__members__": "str", "content": "bytes"}
        rows = []
        for name, content in files:
            key, text, members, payload = member_row(name, content)
            rows.append([key.encode(), text.encode(), members.encode(), payload])
        return mds_bytes(columns, rows)


class TestSource(MdsSuite):
    pass


class TestCompressedSource(MdsSuite):
    def make(self, files: Files) -> bytes:
        """A shard compressed with zstd."""
        return zstandard.compress(super().make(files))


class TestEncodings:
    def test_shards_of_the_owner_are_read(self) -> None:
        """Values of every encoding that `streaming` wrote are members and JSON, with equal pictures and arrays."""
        source = open_container(SourceFile(str(OWNERS / "encodings" / "shard.00000.mds")))
        found = contents(source)
        for number in range(2):
            key = f"shard.00000/0000000{number}"
            assert json.loads(found[f"{key}.json"]) == {
                "digits": 10**30 + number,
                "float16": 0.5,
                "float32": 1.5,
                "float64": 0.1 * number,
                "int": -number,
                "int16": -300 - number,
                "price": 12.5,
                "ratio": 0.25,
                "tags": {"a": [number, None, "x"]},
                "uint64": 2**64 - 1 - number,
                "uint8": 200 + number,
                "photos": [f"0000000{number}.photos.0.jpg", f"0000000{number}.photos.1.jpg"],
                "drawings": [f"0000000{number}.drawings.0.png"],
                "pages": [f"0000000{number}.pages.{page}.png" for page in range(3)],
                "frames": [f"0000000{number}.frames.0.jpg", f"0000000{number}.frames.1.jpg"],
            }
            assert found[f"{key}.caption"] == f"sample {number} é".encode()
            assert found[f"{key}.raw.bin"] == bytes([number, 1, 2])
            array = np.arange(6, dtype=np.int16).reshape(1, 2, 3) + np.int16(number)
            np.testing.assert_array_equal(np.load(io.BytesIO(found[f"{key}.array.npy"])), array)
            typed = np.load(io.BytesIO(found[f"{key}.typed.npy"]))
            assert (typed.dtype, typed.shape, set(typed.flat)) == (np.float32, (2, 300), {0.5})
            np.testing.assert_array_equal(np.load(io.BytesIO(found[f"{key}.fixed.npy"])), np.full((2, 3), number))
            pixels = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3) + np.uint8(number)
            picture = Image.fromarray(pixels)
            for name, mode in (("pages.0", "RGB"), ("pages.1", "L"), ("pixels", "LA"), ("drawing", "RGB")):
                with Image.open(io.BytesIO(found[f"{key}.{name}.png"])) as image:
                    np.testing.assert_array_equal(np.asarray(image), np.asarray(picture.convert(mode)))
            with Image.open(io.BytesIO(found[f"{key}.pages.2.png"])) as image:
                np.testing.assert_array_equal(np.asarray(image) == 255, np.asarray(picture.convert("1")))
            assert found[f"{key}.photo.jpg"] == found[f"{key}.photos.0.jpg"]
        ranged = {m.role for m in source.members() if m.byte_offset is not None}
        assert ranged >= {"photo", "drawing", "raw", "photos.0", "frames.1", "drawings.0", ""}

    def test_pickles_are_listed_and_never_loaded(self) -> None:
        """A pickle is an entry with the reason why it is not read, and the other columns are members."""
        source = open_container(SourceFile(str(OWNERS / "encodings" / "shard.00000.mds")))
        skipped = {m.role: m.skip_reason or "" for m in source.members() if m.skip_reason is not None}
        assert list(skipped) == ["code"]
        assert "never loaded" in skipped["code"]

    def test_an_unknown_encoding_is_named(self, tmp_path: Path) -> None:
        """A column whose encoding was registered elsewhere is an entry with a reason, and its row has the others."""
        source = source_of(tmp_path, mds_bytes({"x": "mine:1", "jpg": "jpeg"}, [[b"??", JPEG]]))
        assert [(m.member, m.skip_reason) for m in source.members()] == [
            ("t/00000000.bin", "encoding 'mine:1' is not one of `streaming`"),
            ("t/00000000.jpg", None),
        ]

    @pytest.mark.parametrize(
        ("encoding", "stored", "value"),
        [
            *(
                (encoding, np.dtype(encoding).type(value).tobytes(), value)
                for encoding, value in (
                    *(("uint8", 255), ("uint16", 65535), ("uint32", 2**32 - 1), ("uint64", 2**64 - 1)),
                    *(("int8", -128), ("int16", -5), ("int32", -6), ("int64", -(2**63))),
                    *(("float16", 0.5), ("float32", -1.5), ("float64", 0.1)),
                )
            ),
            ("int", struct.pack("<q", -3), -3),
            ("float64", struct.pack("<d", math.nan), None),
            ("str_int", b"-123456789012345678901234567890", -123456789012345678901234567890),
            ("str_float", b"1e300", 1e300),
            ("str_decimal", b"0.1", 0.1),
            ("str_decimal", b"0.1234567890123456", "0.1234567890123456"),
            ("str_decimal", b"1E+999999999", "1E+999999999"),
            ("str_decimal", str(Decimal("Infinity")).encode(), None),
            ("json", b'{"a": [NaN, 1]}', {"a": [None, 1]}),
        ],
    )
    def test_numbers_and_json_are_values_of_the_json(
        self, tmp_path: Path, encoding: str, stored: bytes, value: Any
    ) -> None:
        """Each number is exact, and what JSON does not have is null or text."""
        found = contents(source_of(tmp_path, mds_bytes({"n": encoding}, [[stored]])))
        assert json.loads(found["t/00000000.json"]) == {"n": value}

    def test_keys_and_names_are_those_that_the_row_states(self, tmp_path: Path) -> None:
        """`__key__`, `__members__` and `json` of text or bytes give the members that the sample had in a tar."""
        columns = {"__key__": "str", "json": "bytes", "__members__": "json", "image": "bytes", "note": "str"}
        rows = [
            [b"a/1", b'{"n":  1}', b'[["note", "srt"], ["image", "left.jpg"]]', JPEG, "é".encode()],
            [b"a/2", b"", b'[["image", "0.png", 3], ["image", "1.png", 2]]', b"abcde", b"not named"],
        ]
        assert contents(source_of(tmp_path, mds_bytes(columns, rows))) == {
            "a/1.json": b'{"n":  1}',
            "a/1.left.jpg": JPEG,
            "a/1.srt": "é".encode(),
            "a/2.0.png": b"abc",
            "a/2.1.png": b"de",
        }

    def test_names_that_are_suffixes_name_the_members(self, tmp_path: Path) -> None:
        """Columns called `jpg`, `meta.json` and `state.npy` are the members of these names."""
        columns = {"jpg": "bytes", "meta.json": "json", "state.npy": "ndarray:uint8", "n": "uint8"}
        row = [PNG, b'{"a":1}', bytes([1 << 2, 2, 7, 8]), b"\5"]
        found = contents(source_of(tmp_path, mds_bytes(columns, [row], [None, None, None, 1])))
        assert list(found) == [f"t/00000000.{name}" for name in ("json", "jpg", "meta.json", "state.npy")]
        assert np.load(io.BytesIO(found["t/00000000.state.npy"])).tolist() == [7, 8]

    @pytest.mark.parametrize(
        ("mode", "dtype", "stored"),
        [("I;16", np.uint16, b"\1\2\3\4"), ("F", np.float32, bytes(8)), ("I", np.int32, bytes(8))],
    )
    def test_raw_pictures_of_large_numbers_are_exact(
        self, tmp_path: Path, mode: str, dtype: type, stored: bytes
    ) -> None:
        """A raw picture of 16 bits is a PNG, and one of 32 bits an array, with the same numbers."""
        content = struct.pack("<3I", 2, 1, len(mode)) + mode.encode() + stored
        ((name, found),) = contents(source_of(tmp_path, mds_bytes({"x": "pil"}, [[content]]))).items()
        pixels = np.load(io.BytesIO(found)) if name.endswith(".npy") else np.asarray(Image.open(io.BytesIO(found)))
        np.testing.assert_array_equal(pixels, np.frombuffer(stored, dtype).reshape(1, 2))

    def test_a_raw_picture_of_another_mode_is_named(self, tmp_path: Path) -> None:
        """A picture whose colors are lost without its palette is an entry with a reason."""
        content = struct.pack("<3I", 2, 1, 1) + b"P" + b"\0\1"
        (member,) = source_of(tmp_path, mds_bytes({"x": "pil"}, [[content]])).members()
        assert "mode 'P'" in (member.skip_reason or "")


class TestCompression:
    @pytest.mark.parametrize("name", ["zstd", "gz", "bz2", "br", "snappy"])
    def test_compressed_shards_of_the_owner_are_read(self, name: str) -> None:
        """Shards in each compression of `streaming` have their samples, without byte ranges."""
        (path,) = (OWNERS / name).glob("*.mds.*")
        source = open_container(SourceFile(str(path)))
        assert (type(source), source.seekable) == (MdsSource, False)
        assert {m.byte_offset for m in source.members()} == {None}
        found = contents(source)
        assert list(found) == [f"a/{n}.{extension}" for n in range(3) for extension in ("json", "jpg")]
        assert found["a/2.json"] == b'{"n": 2}'

    def test_a_number_of_samples_that_looks_as_gzip_is_not(self, tmp_path: Path) -> None:
        """A shard with 35,615 samples begins with the bytes of gzip, and is read as it is."""
        content = mds_bytes({"x": "uint8"}, [[b"\1"]] * 0x8B1F, [1])
        assert content.startswith(b"\x1f\x8b")
        source = source_of(tmp_path, content)
        assert (type(source), source.seekable) == (MdsSource, True)
        assert next(iter(source.members())).member == "t/00000000.json"

    @pytest.mark.parametrize(
        ("suffix", "pack"),
        [
            ("br", lambda content: pa.Codec("brotli").compress(content, asbytes=True)),
            ("snappy", lambda content: pa.Codec("snappy").compress(content, asbytes=True)),
            ("gz", gzip.compress),
            ("bz2", bz2.compress),
            ("zstd", zstandard.compress),
        ],
    )
    def test_truncated_compression_is_damage(self, tmp_path: Path, suffix: str, pack: Any) -> None:
        """A compressed shard that ends early raises; salvaged, the rest is an entry that says so."""
        noise = random.Random(1).randbytes(100_000)
        content = pack(mds_bytes({"bin": "bytes"}, [[noise[at : at + 1000]] for at in range(0, 100_000, 1000)]))
        source = source_of(tmp_path, content[: len(content) // 2], f"t.mds.{suffix}")
        with pytest.raises(ShardError, match="decompression failed"):
            list(source.members())
        damage: list[ShardDamage] = []
        members = list(source.members(on_damaged_shard="salvage", damage=damage))
        assert len([m for m in members if (m.skip_reason or "").startswith("damaged")]) == len(damage) > 0

    def test_a_small_file_does_not_expand_without_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that holds more than a shard can is refused before it fills the disk."""
        monkeypatch.setattr("mm_assets.sources.offset_table.MAX_DECOMPRESSED", 1 << 20)
        source = source_of(tmp_path, zstandard.compress(bytes(3 << 20)), "t.mds.zstd")
        with pytest.raises(ShardError, match="more than 1,048,576 bytes once decompressed"):
            list(source.members(on_damaged_shard="salvage"))

    def test_a_snappy_block_that_claims_too_much_is_refused(self, tmp_path: Path) -> None:
        """The size that a block of Snappy begins with is checked before memory is taken for it."""
        with pytest.raises(ShardError, match="at most 536,870,912 are read of a file in Snappy: compress it with zstd"):
            list(source_of(tmp_path, b"\xff\xff\xff\xff\x0f" + bytes(20), "t.mds.snappy").members())


class TestIndex:
    def index(self, folder: Path, **shard: Any) -> None:
        """Writes an index with one shard."""
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))

    def test_an_index_that_agrees_changes_nothing(self, tmp_path: Path) -> None:
        """Shards have the same members with and without their index, and with that of something else."""
        content = mds_bytes({"jpg": "bytes"}, [[JPEG]] * 2)
        expected = contents(source_of(tmp_path, content))
        raw = {"basename": "t.mds", "bytes": len(content), "hashes": {}}
        self.index(tmp_path, samples=2, raw_data=raw, zip_data=None)
        assert contents(source_of(tmp_path, content)) == expected
        for other in ('{"chunks": []}', "[]", '{"shards": [null, {"raw_data": 1}]}'):
            (tmp_path / "index.json").write_text(other)
            assert contents(source_of(tmp_path, content)) == expected

    def test_an_index_that_disagrees_is_damage(self, tmp_path: Path) -> None:
        """Another number of samples or size raises with both; salvaged, the samples are read."""
        content = mds_bytes({"jpg": "bytes"}, [[JPEG]] * 2)
        for samples, size in ((3, len(content)), (2, len(content) + 1)):
            self.index(tmp_path, samples=samples, raw_data={"basename": "t.mds", "bytes": size}, zip_data=None)
            source = source_of(tmp_path, content)
            with pytest.raises(ShardError, match=f"{samples} samples in {size} bytes, found 2 samples"):
                list(source.members())
            members = list(source.members(on_damaged_shard="salvage"))
            assert [m.skip_reason is None for m in members] == [False, True, True]

    def test_an_index_that_is_not_json_says_what_to_do(self, tmp_path: Path) -> None:
        """A truncated index raises with the advice to restore or remove it."""
        (tmp_path / "index.json").write_text('{"shards": [')
        with pytest.raises(ShardError, match="restore it, or remove it"):
            list(source_of(tmp_path, mds_bytes({"jpg": "bytes"}, [[JPEG]])).members())

    def test_splits_with_the_same_names_are_partitions_of_their_own(self, tmp_path: Path) -> None:
        """`train/shard.00000.mds` and `val/shard.00000.mds` are two partitions; a copy without compression is used."""
        for split in ("train", "val"):
            (tmp_path / "d" / split).mkdir(parents=True)
            content = mds_bytes({"__key__": "str", "txt": "str"}, [[split.encode(), b"x"]])
            (tmp_path / "d" / split / "shard.00000.mds").write_bytes(content)
            (tmp_path / "d" / split / "shard.00000.mds.zstd").write_bytes(zstandard.compress(content))
        (tmp_path / "d" / "index.json").write_text('{"version": 2, "shards": []}')
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "d"))
        assert sorted(mm_assets.open(dataset.store.url_of("manifest.json")).sample_ids) == ["train", "val"]
        assert len(dataset.partitions()) == 2


class TestDamage:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (struct.pack("<I", 5), "5 samples take 28 bytes, expected at most 4"),
            (table_bytes([], b"xx"), "cannot be read: is not JSON"),
            (struct.pack("<3I", 1, 4, 4) + bytes(20), "the first sample is at byte 4, expected one from 12"),
            (table_bytes([], b"{}"), "has no format and version"),
            (table_bytes([], mds_config({}, version=1)), "version 1, expected 'mds', version 2"),
            (table_bytes([], mds_config({}, format="csv")), "is of format 'csv'"),
            (table_bytes([], mds_config({"a": "str"}, column_names=[])), "0 names, 1 encodings and 1 sizes"),
            (table_bytes([], mds_config({"a": "str"}, column_names=None)), "lacks a list of column_names"),
            (table_bytes([], mds_config({"a": "str"}, column_names=[1])), "expected texts"),
            (table_bytes([], mds_config({"a": "str"}, [-1])), "has the size -1, expected bytes or null"),
            (table_bytes([], mds_config({"a": "int"}, [4])), "has 4 bytes, expected 8 of encoding 'int'"),
            (table_bytes([], mds_config({"a": "ndarray:text"})), "has arrays of type 'text'"),
            (table_bytes([], mds_config({"a": "ndarray:uint8:x"})), "has arrays of shape 'x'"),
            (
                table_bytes([], mds_config({"a": "str", "b": "str"}, column_names=["a", "a"])),
                "several columns are called 'a'",
            ),
        ],
    )
    def test_a_table_that_is_wrong_is_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        """A shard without a usable table of samples raises with what was found; salvaged, it is one lost entry."""
        source = source_of(tmp_path, content)
        with pytest.raises(ShardError) as caught:
            list(source.members())
        assert message in str(caught.value)
        (member,) = source.members(on_damaged_shard="salvage")
        assert message in (member.skip_reason or "")

    @pytest.mark.parametrize(
        ("encoding", "stored", "message"),
        [
            ("int", b"1234", "has 4 bytes, expected 8 of int64"),
            ("str_int", b"x", "invalid literal for int"),
            ("str_int", b"1" * 5000, "Exceeds the limit"),
            ("str_float", b"x", "could not convert"),
            ("str_decimal", b"x", "expected a decimal number"),
            ("json", b"{", "is not JSON"),
            ("json", b"[" * 1000, "lists and objects within each other"),
            ("ndarray", b"\x07", "is an array of type 7"),
            ("ndarray", b"", "has 0 bytes, expected 1"),
            ("ndarray", b"\x08\x05\x02", "has 3 bytes, expected 4"),
            ("ndarray:uint8", b"\x04\x03\x01", "has 1 bytes, expected 3 of shape (3,)"),
            ("ndarray:uint8:4", b"\x04\x03", "has 2 bytes, expected 4"),
            ("ndarray:uint8", b"\x0b\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", "which no array has"),
            ("ndarray:uint8", bytes([40 << 2]) + b"\1" * 40 + b"\1", "40 dimensions"),
            ("list[jpeg]", b"\0\0\0\0\2\0\0\0\1\0\0\0", "has 12 bytes, expected 16"),
            ("list[jpeg]", b"\0\0\0\0\xff\xff\xff\xff", "4,294,967,295 items"),
            ("jpeg_array", b"\1\0\0\0\1\0\0\0ab", "has 10 bytes, expected 9 by the sizes"),
            ("pil", b"\1\0\0\0", "expected width, height and mode"),
            ("pil", struct.pack("<3I", 1, 1, 99), "a mode of 99 bytes"),
            ("pil", struct.pack("<3I", 1 << 20, 1 << 20, 1) + b"L", "is a picture of 1048576 x 1048576"),
            ("pil", struct.pack("<3I", 9, 9, 3) + b"RGB" + b"xy", "has 2 bytes, expected 243"),
            ("str", b"\xff", "can't decode"),
        ],
    )
    def test_a_value_that_is_wrong_is_named(self, tmp_path: Path, encoding: str, stored: bytes, message: str) -> None:
        """The sample is named with its column and what was found and expected, in a message of one line."""
        source = source_of(tmp_path, mds_bytes({"note": encoding}, [[stored]]))
        with pytest.raises(ShardError) as caught:
            list(source.members())
        assert caught.value.byte_offset is not None
        assert "sample 0: column 'note'" in str(caught.value)
        assert message in str(caught.value)
        (member,) = source.members(on_damaged_shard="salvage")
        assert (member.skip_reason or "").startswith("damaged: column 'note'")

    def test_runs_of_damaged_samples_are_one_loss(self, tmp_path: Path) -> None:
        """Samples that cannot be read are lost from the first to the last, with their bytes, between those that can."""
        rows = [[b"\xff\xff" if n in (2, 3, 6) else b"a"] for n in range(7)]
        source = source_of(tmp_path, mds_bytes({"note": "str"}, rows))
        damage: list[ShardDamage] = []
        members = list(source.members(on_damaged_shard="salvage", damage=damage))
        assert [(m.sample_key, m.ordinal) for m in members if m.skip_reason is None] == [
            ("t/00000000", 0),
            ("t/00000001", 1),
            ("t/00000004", 3),
            ("t/00000005", 4),
        ]
        assert [(part.detail.partition(":")[0], part.byte_size) for part in damage] == [
            ("samples 2 to 3", 12),
            ("samples 6 to 6", 6),
        ]

    def test_samples_do_not_overlap(self, tmp_path: Path) -> None:
        """A table whose samples go back and forth is read once, however many it claims."""
        content = bytearray(mds_bytes({"bin": "bytes"}, [[bytes(1000)]] * 20))
        offsets = np.frombuffer(content, "<u4", 21, 4)
        first, second = int(offsets[0]), int(offsets[1])
        content[4 : 4 + 4 * 21] = np.array([first, second] * 10 + [first], "<u4").tobytes()
        members = source_of(tmp_path, bytes(content)).members(on_damaged_shard="salvage")
        assert [m.skip_reason is None for m in members] == [True, False]

    def test_bytes_after_the_samples_are_listed(self, tmp_path: Path) -> None:
        """What follows the last sample is an entry with its place."""
        content = mds_bytes({"jpg": "bytes"}, [[JPEG]])
        *_, last = source_of(tmp_path, content + b"more").members()
        assert (last.byte_offset, last.byte_size, last.skip_reason) == (len(content), 4, "trailing bytes")

    def test_a_file_of_another_kind_is_named(self, tmp_path: Path) -> None:
        """A page that a download left in place of the shard is said to be one, with what to do."""
        source = source_of(tmp_path, b"<!DOCTYPE html><html>no</html>")
        with pytest.raises(ShardError, match="an HTML page, not an MDS shard"):
            list(source.members())

    def test_a_value_larger_than_memory_should_hold_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A number or JSON of any size is not read into memory, and a file of that size is a member."""
        monkeypatch.setattr("mm_assets.sources.offset_table.MAX_VALUE_BYTES", 100)
        big = mds_bytes({"a": "str", "jpg": "bytes"}, [[b"x" * 101, JPEG * 50]])
        with pytest.raises(ShardError, match="column 'a' has 101 bytes, at most 100 are read"):
            list(source_of(tmp_path, big).members())
        assert list(contents(source_of(tmp_path, mds_bytes({"jpg": "bytes"}, [[JPEG * 50]])))) == ["t/00000000.jpg"]


_NAMES = st.text("ab._/%é", min_size=1, max_size=6) | st.sampled_from(["jpg", "txt", "caption", "x.npy"])
_VALUES = st.one_of(
    st.tuples(st.just("bytes"), st.binary(max_size=30)),
    st.tuples(st.just("str"), st.text(max_size=9).map(str.encode)),
    st.tuples(st.just("int"), st.integers(-(2**63), 2**63 - 1).map(lambda n: struct.pack("<q", n))),
    st.tuples(
        st.just("json"), st.dictionaries(st.text(max_size=3), st.integers()).map(lambda v: json.dumps(v).encode())
    ),
    st.tuples(st.just("list[png]"), st.lists(st.binary(max_size=9), max_size=3).map(list_bytes)),
    st.tuples(
        st.just("ndarray:float32"),
        st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
            lambda shape: bytes([len(shape) << 2, *shape]) + bytes(4 * math.prod(shape))
        ),
    ),
    st.tuples(st.just("pkl"), st.binary(max_size=9)),
)


class TestProperties:
    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.dictionaries(_NAMES, _VALUES, max_size=5), st.integers(0, 3))
    def test_every_structure_is_listed_and_read_alike(
        self, tmp_path: Path, values: dict[str, tuple[str, bytes]], number: int
    ) -> None:
        """The members of any columns are read with their sizes, and files are the bytes that were written."""
        columns = {name: encoding for name, (encoding, _) in values.items()}
        source = source_of(tmp_path, mds_bytes(columns, [[stored for _, stored in values.values()]] * number))
        if type(source) is not MdsSource:
            return
        found = [payload for _, payload in source.payloads(wanted=lambda _: True, max_bytes=1 << 20)]
        assert [len(payload) for payload in found] == [m.byte_size for m in source.members() if m.skip_reason is None]
        files = [stored for encoding, stored in values.values() if encoding == "bytes"]
        assert all(found.count(stored) >= number for stored in files)
        source.file.close()

    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_hostile_bytes_raise_or_are_read(self, tmp_path: Path, data: st.DataObject) -> None:
        """Changed, missing and more bytes of a shard of every encoding give members or `ShardError` alone."""
        content = bytearray((OWNERS / "encodings" / "shard.00000.mds").read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, 900) | st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        path = tmp_path / "t.mds"
        path.write_bytes(content)
        source = MdsSource(SourceFile(str(path)))
        with suppress(ShardError):
            list(source.members())
        with suppress(ShardError):
            found = source.payloads(
                wanted=lambda _: True, max_bytes=1 << 20, on_error=lambda *_: None, on_damaged_shard="salvage"
            )
            assert all(len(payload) == member.byte_size for member, payload in found)
        source.file.close()


class TestPipeline:
    def test_a_remote_shard_gives_the_same_members(self, tmp_path: Path) -> None:
        """A shard in an object store is read by ranges, with the same members and bytes."""
        content = mds_bytes({"jpg": "bytes", "n": "int"}, [[JPEG, bytes(8)], [PNG, bytes(8)]])
        expected = contents(source_of(tmp_path, content))
        memory = fsspec.filesystem("memory")
        memory.pipe("/cells/t.mds", content)
        try:
            assert contents(open_container(SourceFile("memory://cells/t.mds"))) == expected
        finally:
            memory.rm("/cells", recursive=True)

    def test_shards_pack_and_account_for_every_value(self, tmp_path: Path) -> None:
        """Samples of MDS have their pictures, texts and JSON when they are packed, and a pickle is in the losses."""
        target = io.BytesIO()
        Image.new("RGB", (8, 6), (9, 20, 30)).save(target, format="png")
        columns = {"__key__": "str", "png": "png", "caption": "str", "score": "float64", "code": "pkl"}
        rows = [
            [f"k{n}".encode(), target.getvalue(), f"picture {n}".encode(), struct.pack("<d", n / 2), b"\x80\4."]
            for n in range(3)
        ]
        (tmp_path / "t.mds").write_bytes(mds_bytes(columns, rows))
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "t.mds"))
        data = mm_assets.open(dataset.store.url_of("manifest.json"))
        assert sorted(data.sample_ids) == ["k0", "k1", "k2"]
        for index, sample_id in enumerate(data.sample_ids):
            n = int(sample_id[1])
            assert bytes(data.read_raw([index], ["image"])["image"][0]).endswith(target.getvalue())
            assert (data[index]["text"], data[index]["metadata"]) == (f"picture {n}", {"score": n / 2})
        lost = losses(DatasetState(dataset), dataset.partitions())
        assert {loss.member for loss in lost} == {f"k{n}.bin" for n in range(3)}

    def test_the_format_is_detected_by_content_and_by_name(self, tmp_path: Path) -> None:
        """A shard without its suffix is known by its table, and compressed ones by their names."""
        content = mds_bytes({"jpg": "bytes"}, [[JPEG]])
        for name in ("t.mds", "unnamed"):
            assert type(source_of(tmp_path, content, name)) is MdsSource
        assert type(source_of(tmp_path, zstandard.compress(content), "t.mds.zst")) is MdsSource
        with pytest.raises(ShardError, match=r"mds \(.mds, "):
            source_of(tmp_path, b"nothing", "x")

    def test_a_sample_states_its_sizes(self, tmp_path: Path) -> None:
        """A sample whose sizes do not add up to its bytes is damaged."""
        short = table_bytes([sample_bytes([b"abc"]) + b"more"], mds_config({"bin": "bytes"}))
        with pytest.raises(ShardError, match="has 11 bytes, expected 7 by the sizes of its values"):
            list(source_of(tmp_path, short).members())
        with pytest.raises(SourceError):
            contents(source_of(tmp_path, short))
