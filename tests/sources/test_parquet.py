"""Tests of Parquet files as containers: members of cells, texts and JSON, damage, and the way to packed files."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import ShardError, SourceError
from mm_assets.pipeline.state.losses import losses
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.base import row_sources
from mm_assets.rows.from_listing import ListingRows
from mm_assets.rows.from_members import MemberRows
from mm_assets.sources.arrow_rows import json_rows
from mm_assets.sources.member import Member, ShardDamage
from mm_assets.sources.parquet import ParquetSource
from mm_assets.sources.row_members import MAX_LIST_CELLS
from mm_assets.storage.files import SourceFile

from ..pipeline.chain import declare, run_chain
from .members import contents, image

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
JPEG, PNG, WAV = b"\xff\xd8\xff\xe0 a JPEG", b"\x89PNG\r\n\x1a\n a PNG", b"RIFF\x10\0\0\0WAVE a WAV"


def source_of(folder: Path, table: pa.Table, **options: Any) -> ParquetSource:
    """The table as a file that is a source."""
    path = folder / "t.parquet"
    pq.write_table(table, path, **options)
    return ParquetSource(SourceFile(str(path)))


def json_values(column: pa.Array) -> list[Any]:
    """The values of a column as the JSON of its rows has them."""
    return [row["x"] for row in json_rows(pa.record_batch({"x": column}))]


class TestMembers:
    def test_a_row_is_a_sample_with_its_cells_texts_and_json(self, tmp_path: Path) -> None:
        """A cell, a text column and the other columns of a row are members of one key, with exact bytes."""
        cells = pa.array([{"bytes": JPEG, "path": None}, {"bytes": PNG, "path": "dir/x.apng"}], FILE)
        table = pa.table({"id": [7, 8], "image": cells, "text": ["a", None], "caption": ["é", "b"]})
        source = source_of(tmp_path, table)
        assert contents(source) == {
            "t/00000000.json": b'{"id":7}',
            "t/00000000.jpg": JPEG,
            "t/00000000.txt": b"a",
            "t/00000000.caption": "é".encode(),
            "t/00000001.json": b'{"id":8}',
            "t/00000001.apng": PNG,
            "t/00000001.caption": b"b",
        }
        assert [member.ordinal for member in source.members()] == list(range(7))
        assert {member.byte_offset for member in source.members()} == {None}

    @pytest.mark.parametrize(
        "kind",
        [pa.binary(), pa.large_binary(), pa.binary_view(), pa.struct([("bytes", pa.large_binary())]), FILE],
        ids=str,
    )
    def test_every_type_of_cell_is_read(self, tmp_path: Path, kind: pa.DataType) -> None:
        """Bytes of any type are cells, alone or in a struct; nulls are left out, and an empty cell is a member."""
        values: Sequence[Any] = [JPEG, None, b""]
        if pa.types.is_struct(kind):
            values = [None if value is None else {"bytes": value} for value in values]
        found = contents(source_of(tmp_path, pa.table({"jpg": pa.array(values, kind)})))
        assert found == {"t/00000000.jpg": JPEG, "t/00000002.jpg": b""}

    def test_categorical_columns_are_their_values(self, tmp_path: Path) -> None:
        """Bytes and texts that a column has a dictionary of are cells and texts as in any other column."""
        table = pa.table(
            {"jpg": pa.array([JPEG] * 2).dictionary_encode(), "caption": pa.array(["a", None]).dictionary_encode()}
        )
        found = contents(source_of(tmp_path, table))
        assert found == {"t/00000000.jpg": JPEG, "t/00000000.caption": b"a", "t/00000001.jpg": JPEG}

    def test_a_remote_file_gives_the_same_members(self, tmp_path: Path) -> None:
        """A file in an object store is read by ranges, with the same members and bytes."""
        local = source_of(tmp_path, pa.table({"jpg": [JPEG, PNG], "n": [1, 2]}))
        memory = fsspec.filesystem("memory")
        memory.pipe("/cells/t.parquet", (tmp_path / "t.parquet").read_bytes())
        try:
            assert contents(ParquetSource(SourceFile("memory://cells/t.parquet"))) == contents(local)
        finally:
            memory.rm("/cells", recursive=True)

    def test_lists_of_cells_are_named_in_the_json(self, tmp_path: Path) -> None:
        """The items of lists are members, and the JSON has their names at their places, nulls included."""
        items = [None, {"bytes": JPEG, "path": "a.jpeg"}, {"bytes": PNG, "path": None}]
        table = pa.table({"images": pa.array([items, None], pa.list_(FILE)), "texts": [["x", None, None], ["y"]]})
        found = contents(source_of(tmp_path, table))
        assert json.loads(found["t/00000000.json"]) == {
            "texts": ["x", None, None],
            "images": [None, "00000000.1.jpeg", "00000000.2.png"],
        }
        assert json.loads(found["t/00000001.json"]) == {"texts": ["y"], "images": None}
        assert (found["t/00000000.1.jpeg"], found["t/00000000.2.png"]) == (JPEG, PNG)

    def test_several_columns_of_cells_are_roles(self, tmp_path: Path) -> None:
        """Where several columns hold cells, the column is the role; dots and slashes in its name do not end it."""
        table = pa.table({"left": [JPEG], "a.b/c": [PNG], "sound": [WAV], "unknown": [b"\0\1"]})
        members = list(source_of(tmp_path, table).members())
        assert [(m.sample_key, m.role, m.extension) for m in members] == [
            ("t/00000000", "left", "jpg"),
            ("t/00000000", "a%2Eb%2Fc", "png"),
            ("t/00000000", "sound", "wav"),
            ("t/00000000", "unknown", "bin"),
        ]

    def test_a_cell_does_not_take_the_name_of_another_member(self, tmp_path: Path) -> None:
        """A cell whose path has the extension of the row's JSON or text has its column in the name."""
        cells = pa.array([{"bytes": b"{}", "path": "x.json"}, {"bytes": b"t", "path": "x.txt"}], FILE)
        found = contents(source_of(tmp_path, pa.table({"file": cells, "text": ["a", "b"], "n": [1, 2]})))
        assert found == {
            "t/00000000.json": b'{"n":1}',
            "t/00000000.file.json": b"{}",
            "t/00000000.txt": b"a",
            "t/00000001.json": b'{"n":2}',
            "t/00000001.file.txt": b"t",
            "t/00000001.txt": b"b",
        }

    def test_a_row_with_a_key_has_the_members_that_its_columns_and_paths_name(self, tmp_path: Path) -> None:
        """`__key__`, names that are suffixes and paths that start with the key give the names that a tar had."""
        table = pa.table(
            {
                "__key__": ["a/b", "c.d", None],
                "__url__": ["x.tar"] * 3,
                "depth.png": [PNG, JPEG, PNG],
                "image": pa.array([{"bytes": JPEG, "path": "b.left.jpeg"}, None, {"bytes": JPEG, "path": "b.x"}], FILE),
                "words.srt": ["1", None, "2"],
                "json": ['{"n": 1.50}', None, "not JSON"],
            }
        )
        assert contents(source_of(tmp_path, table)) == {
            "a/b.json": b'{"n": 1.50}',
            "a/b.depth.png": PNG,
            "a/b.left.jpeg": JPEG,
            "a/b.words.srt": b"1",
            "c.d.depth.png": JPEG,
            "t/00000002.json": b"not JSON",
            "t/00000002.depth.png": PNG,
            "t/00000002.jpg": JPEG,
            "t/00000002.words.srt": b"2",
        }

    def test_a_row_may_state_the_suffix_of_each_member(self, tmp_path: Path) -> None:
        """`__members__` names, divides, orders and leaves out cells and texts; what does not fit them raises."""
        listed = [
            [["t", "role.txt"], ["b", "0.x", 2], ["a", "jpg"], ["b", "1.y", 1]],
            [["c", "1.png"], ["a", "a.b"], ["c", "2.png"]],
        ]
        table = pa.table(
            {
                "__key__": ["k", "l"],
                "a": [JPEG, PNG],
                "b": [b"xxy", b""],
                "c": pa.array([None, [b"2", b"3"]], pa.list_(pa.binary())),
                "t": ["text", ""],
                "n": [1, 2],
                "__members__": list(map(json.dumps, listed)),
            }
        )
        members = list(contents(source_of(tmp_path, table)).items())
        assert members == [
            *[("k.json", b'{"n":1}'), ("k.role.txt", b"text"), ("k.0.x", b"xx"), ("k.jpg", JPEG), ("k.1.y", b"y")],
            *[("l.json", b'{"n":2}'), ("l.1.png", b"2"), ("l.a.b", PNG), ("l.2.png", b"3")],
        ]
        wrong_values = (
            *(
                '[["b", "0.x", 4]]',
                '[["b", "0.x"], ["b", "1.x"]]',
                '[["b", "0.x", 1]]',
                '[["b", "0.x", -1]]',
                "{}",
                "{",
            ),
            *('[["c", "x"]]', '[["a", 1]]', '[["z", "x"]]', '[["n", "x"]]', '["a"]', '[["a", "x", 1.5]]'),
        )
        for wrong in wrong_values:
            table = table.set_column(6, "__members__", [[wrong] * 2])
            with pytest.raises(ShardError, match="row group 0"):
                list(source_of(tmp_path, table).members())

    def test_columns_are_added_to_the_json_of_a_row(self, tmp_path: Path) -> None:
        """A text column `json` stays as it is written; other columns with a value are added if it lacks their key."""
        table = pa.table(
            {"jpg": [JPEG] * 4, "json": ['{"n": 1.50}', "{ } ", "[1]", None], "n": [2] * 4, "m": [None, 3, 4, 5]}
        )
        found = contents(source_of(tmp_path, table))
        texts = [found[f"t/{row:08d}.json"] for row in range(4)]
        assert texts == [b'{"n": 1.50}', b'{ "n":2,"m":3}', b"[1]", b'{"n":2,"m":5}']

    def test_a_list_of_very_many_nulls_is_refused(self, tmp_path: Path) -> None:
        """Nulls take no bytes in the file, so their number is bounded before any is looked at."""
        table = pa.table({"images": pa.array([[None] * (MAX_LIST_CELLS + 1)], pa.list_(pa.binary()))})
        with pytest.raises(ShardError, match="at most 65,536"):
            list(source_of(tmp_path, table).members())

    def test_json_holds_what_json_does_not_know(self, tmp_path: Path) -> None:
        """Times, decimals and durations become texts and numbers; NaN, infinities and nulls become null."""
        table = pa.table(
            {
                "jpg": [JPEG],
                "time": [datetime.datetime(2024, 1, 2, 3, 4, 5)],
                "price": pa.array([Decimal("1.25")], pa.decimal128(5, 2)),
                "long": [datetime.timedelta(seconds=1.5)],
                "scores": [[math.nan, 0.5, -math.inf]],
                "box": [{"at": datetime.date(2024, 1, 2), "raw": b"\xff"}],
                "none": pa.nulls(1),
                "short": pa.array([1], pa.duration("ns")),
                "zone": pa.array([1], pa.timestamp("us", "Mars/Base")),
            }
        )
        found = contents(source_of(tmp_path, table))["t/00000000.json"]
        assert json.loads(found) == {
            "time": "2024-01-02T03:04:05.000000",
            "price": 1.25,
            "long": 1.5,
            "scores": [None, 0.5, None],
            "box": {"at": "2024-01-02", "raw": "/w=="},
            "none": None,
            "short": 1e-9,
            "zone": "1970-01-01T00:00:00.000001Z",
        }

    @settings(deadline=None)
    @given(
        ticks=st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**16), 10**16),
        unit=st.sampled_from(["s", "ms", "us", "ns"]),
        zone=st.sampled_from([None, "UTC", "+05:30", "America/St_Johns"]),
    )
    @example(ticks=-(2**63) + 10**13, unit="ns", zone="America/St_Johns")
    @example(ticks=2**63 - 10**13, unit="ns", zone="+05:30")
    def test_timestamps_are_exact_iso_8601(self, ticks: int, unit: str, zone: str | None) -> None:
        """The date and time of any tick, in any unit and zone, and of any year, are those of the proleptic calendar."""
        (text,) = json_values(pa.array([ticks], pa.timestamp(unit, zone)))
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
        found = re.fullmatch(r"([+-]?\d{4,})-(\d\d)-(\d\d)T(\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?", text)
        assert found is not None, text
        year, month, day, clock, fraction, offset = found.groups()
        assert (offset is None) == (zone is None)
        assert len(fraction or "") == len(str(per_second)) - 1
        assert (year[0] == "+") == (int(year) > 9999)
        cycles, within = divmod(int(year) - 2000, 400)
        plain = datetime.datetime.fromisoformat(f"{2000 + within}-{month}-{day}T{clock}")
        elapsed = plain - datetime.datetime(1970, 1, 1)
        seconds = elapsed.days * 86400 + elapsed.seconds + cycles * 146_097 * 86400
        if offset not in (None, "Z"):
            seconds -= int(offset[0] + "1") * (int(offset[1:3]) * 3600 + int(offset[4:]) * 60)
        wrong = seconds * per_second + int(fraction or 0) - ticks
        # Arrow writes the offset of old local times to the minute; their clock has seconds.
        assert abs(wrong) < 60 * per_second if zone == "America/St_Johns" else wrong == 0

    @settings(deadline=None)
    @given(data=st.data(), precision=st.integers(1, 76))
    def test_decimals_keep_their_digits(self, data: st.DataObject, precision: int) -> None:
        """A decimal of up to 15 digits is a number that prints as it, a longer one its text with trailing zeros."""
        scale = data.draw(st.integers(0, precision))
        digits = data.draw(st.integers(-(10**precision) + 1, 10**precision - 1))
        with decimal.localcontext(prec=100):
            value = Decimal(digits).scaleb(-scale)
            (found,) = json_values(pa.array([value], pa.decimal256(precision, scale)))
            assert isinstance(found, float) == (precision <= 15)
            assert Decimal(repr(found) if isinstance(found, float) else found) == value
            if isinstance(found, str):
                assert "e" not in found.lower()
                assert len(found.partition(".")[2]) == scale

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (pa.decimal128(38, 9), Decimal("12345678901234567890.123456789")),
            (pa.decimal128(5, 2), Decimal("1.25")),
            (pa.timestamp("ns", "UTC"), 1_700_000_000_123_456_789),
            (pa.timestamp("ms"), 253_402_300_800_000),
            (pa.date32(), 3_000_000),
            (pa.date64(), 86_400_000 * 3_000_000),
            (pa.time32("ms"), 1),
            (pa.time64("ns"), 1),
            (pa.duration("ns"), 1_500_000_001),
        ],
        ids=str,
    )
    def test_values_at_any_depth_are_those_of_a_column(self, tmp_path: Path, kind: pa.DataType, value: Any) -> None:
        """In lists, structs, maps and dictionaries, times, durations and decimals are what they are in a column."""
        plain = pa.array([value, None], kind)
        expected = json_values(plain)
        columns = {
            "list": pa.array([[value, None], None], pa.list_(kind)),
            "large": pa.array([[value, None], []], pa.large_list(kind)),
            "fixed": pa.array([[value, None], None], pa.list_(kind, 2)),
            "struct": pa.StructArray.from_arrays([plain], names=["x"]),
            "map": pa.array([[("k", value), ("n", None)], None], pa.map_(pa.string(), kind)),
            "deep": pa.array([[{"x": [value, None]}], None], pa.list_(pa.struct([("x", pa.list_(kind))]))),
        }
        table = pa.table({"jpg": [JPEG, JPEG], "plain": plain, **columns})
        found = contents(source_of(tmp_path, table))
        first, second = (json.loads(found[f"t/{row:08d}.json"]) for row in range(2))
        one = first["plain"]
        assert [one, second["plain"]] == expected == json_values(plain.dictionary_encode())
        assert first["list"] == first["large"] == first["fixed"] == [one, None]
        assert first["struct"] == {"x": one}
        assert first["map"] == [["k", one], ["n", None]]
        assert first["deep"] == [{"x": [one, None]}]
        assert (second["list"], second["large"], second["fixed"], second["struct"], second["map"], second["deep"]) == (
            *(None, [], None, {"x": None}, None, None),
        )

    @pytest.mark.nightly_examples(10_000)
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_table_comes_back(self, tmp_path: Path, data: st.DataObject) -> None:
        """Whatever rows, nulls and row groups there are: members are those of `payloads`, cells and JSON are exact."""
        num_rows = data.draw(st.integers(0, 12))
        cells = data.draw(st.lists(st.none() | st.binary(max_size=9), min_size=num_rows, max_size=num_rows))
        others = data.draw(st.lists(st.none() | st.text(max_size=5), min_size=num_rows, max_size=num_rows))
        table = pa.table({"bin": pa.array(cells, pa.binary()), "other": pa.array(others, pa.string())})
        source = source_of(tmp_path, table, row_group_size=data.draw(st.integers(1, 5)))
        found = list(source.payloads(wanted=lambda _: True, max_bytes=100))
        assert [member for member, _ in found] == list(source.members())
        assert [member.ordinal for member, _ in found] == list(range(len(found)))
        assert all(len(payload) == member.byte_size for member, payload in found)
        by_name = {member.member.partition(".")[::2]: payload for member, payload in found}
        rows = [f"t/{row:08d}" for row in range(num_rows)]
        assert [json.loads(by_name[row, "json"])["other"] for row in rows] == others
        binary = {key: payload for (key, extension), payload in by_name.items() if extension != "json"}
        assert [binary.get(row) for row in rows] == cells

    def test_a_large_cell_is_an_error_of_its_own(self, tmp_path: Path) -> None:
        """A cell above the limit raises with its name, or goes to `on_error` and the others are yielded."""
        source = source_of(tmp_path, pa.table({"jpg": [JPEG, JPEG * 9, JPEG]}))
        with pytest.raises(SourceError, match="allowed are 40") as caught:
            list(source.payloads(wanted=lambda _: True, max_bytes=40))
        assert caught.value.member == "t/00000001.jpg"
        errors: list[Member] = []
        found = source.payloads(wanted=lambda _: True, max_bytes=40, on_error=lambda m, _: errors.append(m))
        assert [m.member for m, _ in found] == ["t/00000000.jpg", "t/00000002.jpg"]
        assert [m.member for m in errors] == ["t/00000001.jpg"]


class TestDetection:
    def detected(self, folder: Path, table: pa.Table, declared: str | None = None) -> object:
        """The row source of a file with this table."""
        path = folder / "d.parquet"
        pq.write_table(table, path)
        (found,) = row_sources([SourceFile(str(path))], declared)
        return found

    def test_a_file_with_cells_is_a_container(self, tmp_path: Path) -> None:
        """Cells make a Parquet file a container; without cells, or with columns that name files, it is a list."""
        cells = {"image": pa.array([{"bytes": JPEG, "path": None}], FILE), "path": ["x.jpg"]}
        assert isinstance(self.detected(tmp_path, pa.table(cells)), MemberRows)
        assert isinstance(self.detected(tmp_path, pa.table({"sample_id": ["a"], "path": ["x.jpg"]})), ListingRows)
        listed = pa.table({**cells, "sample_id": ["a"]})
        assert isinstance(self.detected(tmp_path, listed), ListingRows)
        assert isinstance(self.detected(tmp_path, listed, "parquet"), MemberRows)


class TestDamage:
    def test_page_checksums_are_verified(self, tmp_path: Path) -> None:
        """A flipped bit of a cell is damage where the file has page checksums."""
        table = pa.table({"jpg": [JPEG * 20], "n": [1]})
        source = source_of(tmp_path, table, compression="none", write_statistics=False, write_page_checksum=True)
        content = (tmp_path / "t.parquet").read_bytes()
        at = content.index(JPEG) + 30
        (tmp_path / "t.parquet").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ShardError, match="row group 0, row 0 or after, cannot be read"):
            contents(ParquetSource(source.file))

    def test_what_rows_cannot_be_made_of_is_named(self, tmp_path: Path) -> None:
        """Two columns of one name, and values that Python does not have, are refused with the name of the column."""
        names = pa.Table.from_arrays([pa.array([JPEG]), pa.array([1]), pa.array([2])], names=["jpg", "n", "n"])
        with pytest.raises(ShardError, match="several columns 'n'"):
            contents(source_of(tmp_path, names))
        bad = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
        with pytest.raises(ShardError, match="column 'seen': 'utf-8' codec can't decode"):
            contents(source_of(tmp_path, pa.table({"jpg": [JPEG], "seen": bad})))

    def test_what_is_not_parquet_is_refused_by_name(self, tmp_path: Path) -> None:
        """Another file, an empty one and a truncated one raise `ShardError` with what was found."""
        whole = tmp_path / "whole"
        pq.write_table(pa.table({"jpg": [JPEG]}), whole)
        cases = {b"<html><body>": "HTML", b"": "empty", whole.read_bytes()[:-20]: "footer"}
        for content, expected in cases.items():
            (tmp_path / "x.parquet").write_bytes(content)
            with pytest.raises(ShardError, match=expected):
                list(ParquetSource(SourceFile(str(tmp_path / "x.parquet"))).members())

    def test_a_damaged_row_group_raises_or_is_listed(self, tmp_path: Path) -> None:
        """A row group that cannot be read is damage at its bytes; salvaged, the other row groups are whole."""
        table = pa.table({"jpg": [JPEG + bytes([n]) * 200 for n in range(9)], "n": list(range(9))})
        source = source_of(tmp_path, table, row_group_size=3, compression="zstd")
        whole = contents(source)
        at = pq.read_metadata(tmp_path / "t.parquet").row_group(1).column(0).data_page_offset
        content = bytearray((tmp_path / "t.parquet").read_bytes())
        content[at : at + 20] = bytes(20)
        (tmp_path / "t.parquet").write_bytes(content)
        bad = ParquetSource(SourceFile(str(tmp_path / "t.parquet")))
        with pytest.raises(ShardError, match="row group 1, row 3"):
            list(bad.members())
        damage: list[ShardDamage] = []
        members = list(bad.members(on_damaged_shard="salvage", damage=damage))
        (lost,) = [m for m in members if (m.skip_reason or "").startswith("damaged: ")]
        assert (lost.member, lost.skip_reason) == ("t/row group 1", f"damaged: {damage[0].detail}")
        read = bad.payloads(wanted=lambda _: True, max_bytes=999, on_damaged_shard="salvage")
        found = {member.member: payload for member, payload in read}
        assert found == {name: payload for name, payload in whole.items() if int(name[2:10]) // 3 != 1}

    def test_any_flipped_byte_is_read_or_refused(self, tmp_path: Path) -> None:
        """Whatever byte of a file is changed, its members are read or `ShardError` is raised, and nothing else."""
        pq.write_table(pa.table({"jpg": [JPEG, PNG], "n": [1, 2]}), tmp_path / "t.parquet")
        content = (tmp_path / "t.parquet").read_bytes()
        refused = 0
        for at in range(0, len(content), 7):
            (tmp_path / "t.parquet").write_bytes(content[:at] + bytes([content[at] ^ 0x5A]) + content[at + 1 :])
            try:
                assert len(contents(ParquetSource(SourceFile(str(tmp_path / "t.parquet"))))) <= 4
            except ShardError:
                refused += 1
        assert refused


class TestPipeline:
    def test_cells_are_packed_with_their_bytes(self, tmp_path: Path) -> None:
        """Files as Hugging Face writes them are packed exactly: pictures, captions and columns."""
        pictures = [image(n) for n in range(5)]
        for number, rows in enumerate((range(3), range(3, 5))):
            cells = pa.array([{"bytes": pictures[n], "path": None} for n in rows], FILE)
            table = pa.table({"image": cells, "text": [f"picture {n}" for n in rows], "score": [n / 2 for n in rows]})
            pq.write_table(table, tmp_path / f"train-{number}.parquet", row_group_size=2)
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "train-*.parquet"))
        data = mm_assets.open(dataset.store.url_of("manifest.json"))
        assert sorted(data.sample_ids) == [f"train-{n // 3}/{n % 3:08d}" for n in range(5)]
        for index, sample_id in enumerate(data.sample_ids):
            n = 3 * int(sample_id[6]) + int(sample_id[-1])
            sample = data[index]
            assert bytes(data.read_raw([index], ["image"])["image"][0]).endswith(pictures[n])
            assert (sample["text"], sample["metadata"]) == (f"picture {n}", {"score": n / 2})

    def test_interleaved_lists_keep_their_order(self, tmp_path: Path) -> None:
        """Lists of texts and of cells become one interleaved document."""
        table = pa.table(
            {
                "texts": [["first", None, "third"]],
                "images": pa.array([[None, {"bytes": image(9), "path": "b.png"}, None]], pa.list_(FILE)),
            }
        )
        pq.write_table(table, tmp_path / "docs.parquet")
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "docs.parquet"))
        (sample,) = list(mm_assets.open(dataset.store.url_of("manifest.json")))
        assert sample["text"] == [(0, "first"), (2, "third")]
        ((position, pixels),) = sample["image"]
        assert (position, pixels.shape) == (1, (6, 8, 3))

    @pytest.mark.parametrize("mode", ["read", "write"])
    def test_a_list_keeps_the_bytes_in_it(self, tmp_path: Path, mode: str) -> None:
        """A list of files with cells is packed with their bytes, and a cell with a path alone with that file's."""
        (tmp_path / "b.png").write_bytes(image(2))
        cells = [
            {"bytes": image(1), "path": "a.png"},
            {"bytes": None, "path": "b.png"},
            {"bytes": b"", "path": "c.png"},
        ]
        table = {"sample_id": ["a", "b", "c"], "path": pa.nulls(3, pa.string()), "text_content": ["A", "B", "C"]}
        pq.write_table(pa.table({**table, "image": pa.array(cells, FILE)}), tmp_path / "t.parquet", row_group_size=2)
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "t.parquet", materialize=mode))
        data = mm_assets.open(dataset.store.url_of("manifest.json"))
        packed = data.read_raw(range(len(data)), ["image"])["image"]
        found = {
            sample_id: None if raw is None else bytes(raw)
            for sample_id, raw in zip(data.sample_ids, packed, strict=True)
        }
        assert (found["a"] or b"").endswith(image(1))
        assert (found["b"] or b"").endswith(image(2))
        assert found.get("c") is None
        (lost,) = losses(DatasetState(dataset), dataset.partitions())
        assert (lost.sample_id, lost.member) == ("c", "t/00000002.png")

    def test_a_path_without_bytes_is_told(self, tmp_path: Path) -> None:
        """A cell that only has a path is in the losses with its row, and its row's other parts are packed."""
        cells = pa.array([{"bytes": image(1), "path": None}, {"bytes": None, "path": "gone.png"}], FILE)
        pq.write_table(pa.table({"image": cells, "text": ["a", "b"]}), tmp_path / "t.parquet")
        dataset, _ = run_chain(declare(tmp_path / "out", tmp_path / "t.parquet"))
        (lost,) = [
            loss for loss in losses(DatasetState(dataset), dataset.partitions()) if loss.member == "t/00000001.png"
        ]
        assert "gone.png" in lost.detail
