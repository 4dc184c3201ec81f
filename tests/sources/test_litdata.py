"""Tests of chunks of LitData: members of every format, trees, compressions, damage, hostile bytes, and real chunks."""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import mm_assets
from mm_assets.errors import ShardError
from mm_assets.sources import ShardDamage, Source
from mm_assets.sources.base import open_container
from mm_assets.sources.litdata import LitDataSource
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import describe_file
from mm_assets.testing import SourceSuite

from ..pipeline.chain import declare, run_chain
from .members import HIDDEN_SAMPLE_FILES, JPEG, SAMPLE_FILES, contents
from .offset_tables import HOSTILE_NAMES, list_bytes, litdata_index, member_row, sample_bytes, table_bytes

OWNERS = Path(__file__).parent / "owners" / "litdata"
NAME = "chunk-0-0.bin"
Files = Sequence[tuple[str, bytes]]
SUITE_SPEC = {"__key__": 0, "json": 0, "__members__": 0, "content": 0}
SUITE_FORMATS = ("str", "str", "str", "bytes")


def source_of(
    folder: Path, spec: Any, formats: Sequence[str], samples: Sequence[Sequence[bytes]], **config: Any
) -> Source:
    """A chunk with these samples as the source that it is."""
    (folder / "index.json").write_text(litdata_index(spec, formats, {NAME: len(samples)}, **config))
    (folder / NAME).write_bytes(table_bytes([sample_bytes(sample) for sample in samples]))
    return open_container(SourceFile(str(folder / NAME)))


class TestSource(SourceSuite):
    source = LitDataSource
    files = SAMPLE_FILES
    hostile = HOSTILE_NAMES
    hidden = HIDDEN_SAMPLE_FILES

    def make(self, files: Files) -> bytes:
        """A chunk with a sample for each file."""
        rows = []
        for name, content in files:
            key, text, members, payload = member_row(name, content)
            rows.append(sample_bytes([key.encode(), text.encode(), members.encode(), payload]))
        return table_bytes(rows)

    def open(self, folder: Path, content: bytes) -> Source:
        """The source over a chunk with this content, whose index has as many samples as it says."""
        number = int.from_bytes(content[:4], "little")
        (folder / "index.json").write_text(litdata_index(SUITE_SPEC, SUITE_FORMATS, {NAME: number}))
        (folder / NAME).write_bytes(content)
        return LitDataSource(SourceFile(str(folder / NAME)))


class TestFormats:
    def test_chunks_of_the_owner_are_read(self) -> None:
        """Values of every serializer are members and JSON, with equal pictures and arrays."""
        found = contents(open_container(SourceFile(str(OWNERS / "serializers" / NAME))))
        for number in range(2):
            key = f"chunk-0-0/0000000{number}"
            assert json.loads(found[f"{key}.json"]) == {
                "number": number,
                "ratio": number + 0.5,
                "flag": number == 1,
                "nested.depth": number,
                "nested.parts": ["a", number],
                "frames": [f"0000000{number}.frames.0.jpg", f"0000000{number}.frames.1.jpg"],
            }
            assert found[f"{key}.caption"] == f"sample {number} é".encode()
            arrays = {
                "matrix": np.arange(6, dtype=np.int16).reshape(2, 3) + np.int16(number),
                "vector": np.arange(3, dtype=np.float32),
                "tensor": np.arange(6).reshape(3, 2) + number,
                "ids": np.arange(4, dtype=np.int32),
            }
            for name, expected in arrays.items():
                array = np.load(io.BytesIO(found[f"{key}.{name}.npy"]))
                assert array.dtype == expected.dtype
                np.testing.assert_array_equal(array, expected)
            pixels = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3) + np.uint8(number)
            with Image.open(io.BytesIO(found[f"{key}.pixels.png"])) as image:
                np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.fromarray(pixels).convert("L")))
            with Image.open(io.BytesIO(found[f"{key}.drawing.png"])) as image:
                np.testing.assert_array_equal(np.asarray(image), pixels)
            assert found[f"{key}.photo.jpg"] == found[f"{key}.frames.0.jpg"]
            assert (found[f"{key}.notes.srt"], found[f"{key}.raw.bin"]) == (b"a file", bytes([number, 1, 2]))
            assert found[f"{key}.clip.mp4"].endswith(b"video")

    def test_pickles_are_listed_and_never_loaded(self) -> None:
        """A pickle is an entry with the reason why it is not read."""
        members = open_container(SourceFile(str(OWNERS / "serializers" / NAME))).members()
        skipped = {m.role: m.skip_reason or "" for m in members if m.skip_reason is not None}
        assert list(skipped) == ["code"]
        assert "never loaded" in skipped["code"]

    @pytest.mark.parametrize("level", ["chunk", "batch", "sample"])
    def test_compressed_chunks_of_the_owner_are_read(self, level: str) -> None:
        """Chunks compressed as a whole, in batches of items and item by item have their samples."""
        found = {}
        for path in sorted((OWNERS / level).glob("chunk*")):
            source = open_container(SourceFile(str(path)))
            assert (type(source), source.seekable) == (LitDataSource, False)
            found.update(contents(source))
        assert list(found) == [f"a/{n}.{extension}" for n in range(3) for extension in ("json", "jpg")]
        assert found["a/2.json"] == b'{"n": 2}'

    def test_tokens_are_an_array_for_each_item(self) -> None:
        """The items of a `TokensLoader` are arrays of one dimension."""
        found = contents(open_container(SourceFile(str(OWNERS / "tokens" / NAME))))
        arrays = [np.load(io.BytesIO(payload)) for payload in found.values()]
        assert [array.tolist() for array in arrays] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
        assert {str(array.dtype) for array in arrays} == {"uint16"}

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("plain", {"json": b'{"n":0,"words":["a"]}', "txt": b"t 0"}),
            ("single", {"bin": b"one"}),
            ("tuple", {"json": b'{"1":1}', "bin": b"one"}),
        ],
    )
    def test_every_tree_of_the_owner_is_read(self, name: str, expected: dict[str, bytes]) -> None:
        """Rows that Arrow has, single values and tuples are samples."""
        found = contents(open_container(SourceFile(str(OWNERS / name / NAME))))
        assert {k.partition(".")[2]: v for k, v in found.items() if k.startswith("chunk-0-0/00000000.")} == expected

    def test_trees_have_dotted_and_numbered_names(self, tmp_path: Path) -> None:
        """Values of containers in each other are named by their keys and places."""
        spec = {"a": {"b": 0, "jpg": 0}, "c": [0, (0, 0)]}
        row = [struct.pack("<q", 1), JPEG, struct.pack("<d", 0.5), b"\1", b"x"]
        found = contents(source_of(tmp_path, spec, ["int", "jpeg", "float", "bool", "str"], [row]))
        assert found == {
            "chunk-0-0/00000000.json": b'{"a.b":1,"c.0":0.5,"c.1.0":true,"c.1.1":"x"}',
            "chunk-0-0/00000000.a.jpg": JPEG,
        }

    @pytest.mark.parametrize(
        ("stored", "value"),
        [
            (b'{"a": [NaN]}', {"a": [None]}),
            (b"\x00\x03\0\0\0[1]", [1]),
            (b"\x01\x02\0\0\0\x01\0\0\0a\x02\0\0\0\xc3\xa9", ["a", "é"]),
            (b"\x02\x01\0\0\0" + struct.pack("<q", -5), [-5]),
            (b"\x03\x01\0\0\0" + struct.pack("<d", 0.5), [0.5]),
            (b"\x04\x02\0\0\0\1\0", [True, False]),
            (b"\x05\x01\0\0\0\x01\0\0\0k\x0b", {"k": None}),
            (b"\x06\x02\0\0\0\x01\0\0\0\x01\0\0\0k\x10\x11\x01\0\0\0v", [{"k": None}, {"k": "v"}]),
            (b"\x06\x01\0\0\0\x01\0\0\0\x01\0\0\0k\x14\x01", [{"k": True}]),
            (b"\x07\x01\0\0\0t", "t"),
            (b"\x08" + struct.pack("<q", 2**62), 2**62),
            (b"\x09" + struct.pack("<d", -1.5), -1.5),
            (b"\x0a\x01", True),
            (b"\x0b", None),
        ],
    )
    def test_the_binary_form_of_json_is_read(self, tmp_path: Path, stored: bytes, value: Any) -> None:
        """Each tag of nested values is the JSON that was written."""
        found = contents(source_of(tmp_path, {"x": 0, "jpg": 0}, ["json", "jpeg"], [[stored, JPEG]]))
        assert json.loads(found["chunk-0-0/00000000.json"]) == {"x": value}

    def test_bfloat16_is_exact_as_float32(self, tmp_path: Path) -> None:
        """Tensors of a type that NPY does not have are stored in one that has all of its numbers."""
        source = source_of(tmp_path, {"x": 0}, ["no_header_tensor:10"], [[np.array([0x3F80, 0xC000], "<u2").tobytes()]])
        (payload,) = contents(source).values()
        assert np.load(io.BytesIO(payload)).tolist() == [1.0, -2.0]

    @pytest.mark.parametrize("stated", ["no_header_numpy:14", "no_header_numpy:x", "mine", "graph", "numpy"])
    def test_what_is_not_of_numbers_is_named(self, tmp_path: Path, stated: str) -> None:
        """Arrays of objects, unknown formats and graphs, which have pickles in them, are entries with a reason."""
        source = source_of(tmp_path, {"x": 0, "jpg": 0}, [stated, "jpeg"], [[struct.pack("<2I", 14, 0), JPEG]])
        assert [m.skip_reason is None for m in source.members()] == [False, True]


class TestDamage:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda folder: (folder / "index.json").unlink(), "has no index.json beside it"),
            (lambda folder: (folder / "index.json").write_text("{"), "copy the whole folder"),
            (lambda folder: (folder / "index.json").write_text("{}"), "has no chunks or data_format"),
            (lambda folder: index(folder, encryption={"level": "chunk"}), "is encrypted"),
            (lambda folder: index(folder, item_loader="TemporalArrayLoader"), "for the loader 'TemporalArrayLoader'"),
            (lambda folder: index(folder, data_format=[1]), "expected texts"),
            (lambda folder: index(folder, data_format=["int"] * 2), "1 values in data_spec and 2 in data_format"),
            (lambda folder: index(folder, data_spec="x"), "expected a tree"),
            (lambda folder: index(folder, data_spec="[1, {}]"), "expected a container or a value"),
            (lambda folder: index(folder, 2), "says that the chunk has 2 samples, found 1"),
            (lambda folder: index(folder, None), "does not list this chunk"),
        ],
    )
    def test_an_index_that_does_not_fit_is_named(self, tmp_path: Path, change: Any, message: str) -> None:
        """A missing, damaged or contradicting index, and what is not read, raise with what was found."""
        source = source_of(tmp_path, {"jpg": 0}, ["jpeg"], [[JPEG]])
        change(tmp_path)
        with pytest.raises(ShardError) as caught:
            list(source.members())
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("stated", "stored", "message"),
        [
            ("int", b"1234", "has 4 bytes, expected 8 of int64"),
            ("bool", b"", "has 0 bytes, expected 1 of bool"),
            ("numpy", b"\1\0", "has 2 bytes, expected 4"),
            ("numpy", struct.pack("<3I", 0, 1, 5), "has 0 bytes, expected 5"),
            ("tensor", struct.pack(">2I", 0, 2**31), "at most 64"),
            ("no_header_numpy:2", b"12345", "has 5 bytes, expected 4"),
            ("no_header_tensor:10", b"12345", "has 5 bytes, expected 4"),
            ("jpeg_array", b"\xff\xff\xff\xff", "4,294,967,295 items"),
            ("json", b"", "ends after 0 bytes"),
            ("json", b"\x1f", "has the tag 31"),
            ("json", b"\x01\xff\xff\xff\xff", "more than its bytes"),
            ("json", b"\x06\xff\xff\xff\xff\0\0\0\0", "4,294,967,295 rows of 0 values"),
            ("json", b"\x05\x01\0\0\0\0\0\0\0" * 200, "containers within each other"),
            ("json", b"\x07\x01\0\0\0\xff", "can't decode"),
            ("str", b"\xff", "can't decode"),
        ],
    )
    def test_a_value_that_is_wrong_is_named(self, tmp_path: Path, stated: str, stored: bytes, message: str) -> None:
        """The sample is named with its value; salvaged, it is one lost entry."""
        source = source_of(tmp_path, {"note": 0}, [stated], [[stored]])
        with pytest.raises(ShardError) as caught:
            list(source.members())
        assert f"sample 0: column 'note' {message}" in str(caught.value) or message in str(caught.value)
        (member,) = source.members(on_damaged_shard="salvage")
        assert (member.skip_reason or "").startswith("damaged: column 'note'")

    def test_frames_do_not_expand_without_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A frame with more bytes than it states, or than are read, is damage."""
        packed = zstandard.compress(bytes(3 << 20))
        head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, 1, 256, 1) + struct.pack("<2I", 0, 10)
        frame = struct.pack("<IIQII", 0, 1, 24 + 8 + 24, len(packed), 10)
        source = source_of(tmp_path, {"x": 0}, ["bytes"], [[b"x"]])
        (tmp_path / NAME).write_bytes(head + frame + packed)
        source = open_container(SourceFile(str(tmp_path / NAME)))
        with pytest.raises(ShardError, match="a frame has more bytes than it states"):
            list(source.members())
        monkeypatch.setattr("mm_assets.sources.litdata.MAX_FRAME_BYTES", 1 << 20)
        source = source_of(tmp_path, {"x": 0}, ["bytes"], [[b"x"]], compression_level="sample")
        (tmp_path / NAME).write_bytes(table_bytes([packed]))
        with pytest.raises(ShardError, match="or than are read"):
            list(open_container(SourceFile(str(tmp_path / NAME))).members())

    def test_rows_of_arrow_that_are_damaged_are_one_loss(self, tmp_path: Path) -> None:
        """A damaged table of Arrow raises; salvaged, it is one lost entry."""
        shutil.copytree(OWNERS / "plain", tmp_path / "plain")
        path = tmp_path / "plain" / NAME
        content = path.read_bytes()
        start = content.index(b"ARROW1") + 8
        path.write_bytes(content[:start] + bytes(88) + content[start + 88 :])
        source = LitDataSource(SourceFile(str(path)))
        with pytest.raises(ShardError, match="cannot be read from its table of Arrow"):
            list(source.members())
        damage: list[ShardDamage] = []
        assert len(list(source.members(on_damaged_shard="salvage", damage=damage))) == len(damage) == 1

    @pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
    def test_a_table_of_arrow_does_not_expand_without_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
    ) -> None:
        """A batch is measured without its compression before it is decompressed: what is larger than read is damage."""
        monkeypatch.setattr("mm_assets.sources.litdata.MAX_FRAME_BYTES", 1 << 20)
        source = arrow_source(tmp_path, pa.table({"bin": [bytes((1 << 20) - 1000)]}), compression=compression)
        assert [len(content) for content in contents(source).values()] == [(1 << 20) - 1000]
        source = arrow_source(tmp_path, pa.table({"bin": [bytes(1 << 20)]}), compression=compression)
        with pytest.raises(ShardError, match=r"has (a batch of )?1,04\d,\d\d\d bytes") as caught:
            list(source.members())
        assert (compression is None) == ("without compression" not in str(caught.value))

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            (pa.array(["a" * 1000] * 9).dictionary_encode(), "of type dictionary"),
            (pa.array(["a" * 1000] * 9, pa.string_view()), "of type string_view"),
            (pa.array([[1]] * 9, pa.list_view(pa.int8())), "of type list_view"),
            (pa.array([[{"a": None}]] * 9, pa.list_(pa.struct({"a": pa.binary_view()}))), "of type binary_view"),
            (pa.array([[None] * 1000] * 9), "a batch of 9,009 values, at most 5,000 are read"),
            (pa.array([{"a": [None] * 1000}] * 9), "a batch of 9,018 values"),
        ],
    )
    def test_values_that_take_no_bytes_of_the_table_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: pa.Array, message: str
    ) -> None:
        """Types whose values share bytes, and very many nulls in lists, are damage before they are values of Python."""
        monkeypatch.setattr("mm_assets.sources.litdata.MAX_BATCH_VALUES", 5000)
        with pytest.raises(ShardError, match=message):
            list(arrow_source(tmp_path, pa.table({"x": column})).members())

    @pytest.mark.parametrize(("number", "message"), [(2, "more than the 2 rows"), (4, "has 3 rows, the chunk has 4")])
    def test_a_table_of_arrow_has_a_row_for_each_sample(self, tmp_path: Path, number: int, message: str) -> None:
        """A table with fewer or more rows than the chunk has samples is damage."""
        with pytest.raises(ShardError, match=message):
            list(arrow_source(tmp_path, pa.table({"x": [1, 2, 3]}), number=number).members())

    def test_any_changed_byte_of_a_table_of_arrow_ends_in_members_or_an_error(self, tmp_path: Path) -> None:
        """A table of Arrow with any byte changed, or without any of its ends, is read or raises `ShardError`."""
        source = arrow_source(tmp_path, pa.table({"bin": [b"a" * 50, b"b"], "x": [[1], []]}), compression="zstd")
        content = (tmp_path / NAME).read_bytes()
        start, end = content.index(b"ARROW1"), len(content) - 12
        source.file.close()
        noise = random.Random(1)
        for at in range(start, end):
            changed = content[:at] + bytes([content[at] ^ noise.randrange(1, 256)]) + content[at + 1 :]
            table = content[start:at]
            truncated = content[:start] + table + struct.pack("<I", len(table)) + b"LDARW01\0"
            for damaged in (changed, truncated):
                (tmp_path / NAME).write_bytes(damaged)
                with suppress(ShardError), SourceFile(str(tmp_path / NAME)) as file:
                    contents(LitDataSource(file))


def arrow_source(
    folder: Path, table: pa.Table, *, compression: str | None = None, stream: bool = False, number: int | None = None
) -> Source:
    """A chunk whose rows are a table of Arrow, and whose items are empty."""
    target = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(target, table.schema, options=options) as writer:
        writer.write_table(table)
    rows = target.getvalue().to_pybytes()
    items = [b""] * (table.num_rows if number is None else number)
    source_of(folder, {"x": 0}, ["int"], [[]] * len(items)).file.close()
    (folder / NAME).write_bytes(table_bytes(items) + rows + struct.pack("<I", len(rows)) + b"LDARW01\0")
    return open_container(SourceFile(str(folder / NAME)))


def index(folder: Path, number: int | None = 1, **config: Any) -> None:
    """Writes an index with changes for a chunk of a picture."""
    sizes = {} if number is None else {NAME: number}
    (folder / "index.json").write_text(litdata_index({"jpg": 0}, ["jpeg"], sizes, **config))


_LEAVES = st.one_of(
    st.tuples(st.just("bytes"), st.binary(max_size=20)),
    st.tuples(st.just("str"), st.text(max_size=9).map(str.encode)),
    st.tuples(st.just("int"), st.integers(-(2**63), 2**63 - 1).map(lambda n: struct.pack("<q", n))),
    st.tuples(st.just("no_header_numpy:9"), st.integers(0, 5).map(lambda n: bytes(4 * n))),
    st.tuples(
        st.just("jpeg_array"),
        st.lists(st.binary(max_size=9), max_size=3).map(lambda items: list_bytes(items, placeholder=False)),
    ),
    st.tuples(st.just("pickle"), st.binary(max_size=9)),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.dictionaries(st.text("ab./é", max_size=3), inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=6,
)


def leaves_of(tree: Any) -> list[tuple[str, bytes]]:
    """The format and bytes of each value of a tree, in order."""
    if isinstance(tree, tuple):
        return [tree]
    return [leaf for child in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves_of(child)]


def spec_of(tree: Any) -> Any:
    """A tree without its values."""
    if isinstance(tree, dict):
        return {key: spec_of(child) for key, child in tree.items()}
    return [spec_of(child) for child in tree] if isinstance(tree, list) else 0


class TestProperties:
    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(_TREES, st.integers(1, 3))
    def test_every_structure_is_listed_and_read_alike(self, tmp_path: Path, tree: Any, number: int) -> None:
        """The values of any tree are members or JSON with their sizes; names that meet are refused by name."""
        leaves = leaves_of(tree)
        source = source_of(tmp_path, spec_of(tree), [f for f, _ in leaves], [[v for _, v in leaves]] * number)
        try:
            members = [m for m in source.members() if m.skip_reason is None]
        except ShardError as error:
            assert "several columns are called" in str(error)  # noqa: PT017  # not every example has such names
            return
        found = [payload for _, payload in source.payloads(wanted=lambda _: True, max_bytes=1 << 20)]
        assert [len(payload) for payload in found] == [m.byte_size for m in members]
        assert all(found.count(stored) >= number for stated, stored in leaves if stated == "bytes")
        source.file.close()

    @pytest.mark.nightly_examples(10_000)
    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.sampled_from(["serializers", "batch", "sample", "chunk", "tokens"]), st.booleans(), st.data())
    def test_hostile_bytes_raise_or_are_read(
        self, tmp_path: Path, kind: str, is_index: bool, data: st.DataObject
    ) -> None:
        """Changed, missing and more bytes of chunks and their indices give members or `ShardError` alone."""
        for path in (OWNERS / kind).iterdir():
            shutil.copy(path, tmp_path / path.name)
        (chunk,) = (path for path in (OWNERS / kind).iterdir() if path.name.startswith("chunk-0-0"))
        path = tmp_path / ("index.json" if is_index else chunk.name)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        path.write_bytes(content)
        source = LitDataSource(SourceFile(str(tmp_path / chunk.name)))
        with suppress(ShardError):
            list(source.members())
        with suppress(ShardError):
            found = source.payloads(
                wanted=lambda _: True, max_bytes=1 << 20, on_error=lambda *_: None, on_damaged_shard="salvage"
            )
            assert all(len(payload) == member.byte_size for member, payload in found)
        source.file.close()


class TestPipeline:
    def test_a_folder_is_read_by_its_index(self, tmp_path: Path) -> None:
        """Splits with chunks of the same names are partitions; files that are not chunks are left alone."""
        for split in ("train", "val"):
            folder = tmp_path / "d" / split
            folder.mkdir(parents=True)
            source_of(folder, {"__key__": 0, "txt": 0}, ["str", "str"], [[split.encode(), b"x"]])
            (folder / "weights.bin").write_bytes(bytes(100))
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "d"))
        assert sorted(mm_assets.open(dataset.store.url_of("manifest.json")).sample_ids) == ["train", "val"]

    def test_a_change_of_the_index_makes_partitions_pending(self, tmp_path: Path) -> None:
        """The fingerprint of a chunk changes with its index."""
        source_of(tmp_path, {"jpg": 0}, ["jpeg"], [[JPEG]])
        files = [describe_file(str(tmp_path / name)) for name in (NAME, "index.json")]
        before = LitDataSource.shards_in(files) or []
        index(tmp_path, 1, data_format=["bytes", "x"])
        files = [describe_file(str(tmp_path / name)) for name in (NAME, "index.json")]
        after = LitDataSource.shards_in(files) or []
        assert [a.fingerprint != b.fingerprint for a, b in zip(before, after, strict=True)] == [True]
        assert LitDataSource.shards_in(files[:1]) is None

    @pytest.mark.parametrize("compression", [None, "zstd"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_rows_of_arrow_have_files(self, tmp_path: Path, stream: bool, compression: str | None) -> None:
        """Bytes in rows that Arrow has are members, in as many batches as there are, in streams and in files."""
        table = pa.table({"jpg": [JPEG, None], "n": [1, 2]})
        batches = pa.Table.from_batches(table.to_batches(max_chunksize=1))
        source = arrow_source(tmp_path, batches, compression=compression, stream=stream)
        assert list(contents(source)) == [f"chunk-0-0/0000000{n}" for n in ("0.json", "0.jpg", "1.json")]
