"""Tests of rows: interleaved and paired samples, bad input, and the accounting of every member."""

import gzip
import io
import json
import random
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import SourceError
from mm_assets.rows.columns import RowStream
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.schema import REJECTS_SCHEMA, DatasetSchema, MemberRules, UserColumn
from mm_assets.rows.source_ref import parse_source_ref, with_parsed_source_ref_columns
from mm_assets.rows.user_columns import columns_of
from mm_assets.sources.base import index_members
from mm_assets.sources.tar import TarSource
from mm_assets.sources.text_members import parse_object
from mm_assets.storage.files import SourceFile

Files = Sequence[tuple[str, bytes | str | dict | list]]


def write_shard(path: Path, files: Files, *, compress: bool = False) -> Path:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in files:
            if isinstance(content, dict | list):
                content = json.dumps(content)
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    path.write_bytes(gzip.compress(target.getvalue()) if compress else target.getvalue())
    return path


def infer_columns(source: TarSource, layout: MemberRules) -> tuple[UserColumn, ...]:
    index = list(index_members(source, on_damaged_shard="salvage"))
    rows = MemberRows([source]).rows(lambda: iter(index), layout=layout, schema=DatasetSchema())
    texts = [text for batch in rows for text in batch.column("metadata_json").to_pylist() if text is not None]
    return columns_of((parse_object(text).value for text in texts), layout, shown=source.file.url)


class Outcome:
    """The rows and rejects of some shards, with the accounting checked."""

    def __init__(
        self,
        *paths: Path,
        layout: MemberRules | None = None,
        columns: Sequence[UserColumn] | None = None,
        grouped: bool = False,
        batch_bytes: int = 16 << 20,
    ) -> None:
        layout = layout or MemberRules()
        sources = [TarSource(SourceFile(str(path))) for path in paths]
        user = infer_columns(sources[0], layout) if columns is None else tuple(columns)
        self.schema = DatasetSchema(user_columns=user)

        def index() -> Any:
            for source in sources:
                yield from index_members(source, on_damaged_shard="salvage")

        self.stream = MemberRows(sources).rows(
            index, layout=layout, schema=self.schema, grouped=grouped, batch_bytes=batch_bytes
        )
        self.batches = list(self.stream)
        self.table = pa.Table.from_batches(self.batches, schema=self.schema.row_schema())
        self.table.validate(full=True)
        for name in ("sample_id", "position", "modality"):
            assert self.table[name].null_count == 0
        rejects = self.stream.rejects()
        assert rejects.schema.equals(REJECTS_SCHEMA)
        self.rows = self.table.to_pylist()
        self.rejects = rejects.to_pylist()
        assert self.stream.counts["rows"] == len(self.rows)
        assert self.stream.counts["rejects"] == len(self.rejects)
        self._account(sources)
        for source in sources:
            source.file.close()

    def _account(self, sources: list[SourceFile]) -> None:
        """Every entry of the shards is referenced or rejected, and never both."""
        parsed = with_parsed_source_ref_columns(self.table).select(["_src_path", "_src_member"]).to_pylist()
        referenced = {(r["_src_path"], r["_src_member"]) for r in parsed if r["_src_member"] is not None}
        rejected = Counter((r["shard"], r["member"]) for r in self.rejects if r["member"] is not None)
        members = Counter((s.file.url, m.member) for s in sources for m in s.members(on_damaged_shard="salvage"))
        assert Counter(referenced) + rejected == members
        seen: list[str] = []
        for row in self.rows:
            if not seen or seen[-1] != row["sample_id"]:
                assert row["sample_id"] not in seen
                assert (row["position"], row["modality"]) == (-1, "metadata")
                seen.append(row["sample_id"])
        keys = [(r["sample_id"], r["position"], r["modality"]) for r in self.rows]
        assert len(set(keys)) == len(keys)

    def of(self, sample_id: str) -> list[dict[str, Any]]:
        """The content rows of one sample."""
        return [r for r in self.rows if r["sample_id"] == sample_id and r["position"] >= 0]

    def brief(self, sample_id: str) -> list[tuple[Any, ...]]:
        """Position, modality, and text, member and frame, or error of the content rows of one sample."""
        found = []
        for row in self.of(sample_id):
            ref = parse_source_ref(row["source_ref"])
            if row["modality"] == "text":
                found.append((row["position"], "text", row["text_content"]))
            elif row["materialize_error"] is not None:
                found.append((row["position"], row["modality"], "error"))
            else:
                found.append((row["position"], row["modality"], ref.member or ref.path, ref.frame_index))
        return found

    def reasons(self) -> dict[str | None, str]:
        """Reason of each rejected member."""
        return {r["member"]: r["reason"] for r in self.rejects}


def test_paired_sample(tmp_path: Path) -> None:
    """Members become rows in their order, with modality, type, text and exact ranges; the JSON is the metadata."""
    text = '{"a": 1,  "c": [1, 2]}'
    files: Files = [
        ("k.mp3", b"m"),
        ("k.JPG", b"jpeg"),
        ("k.json", "\ufeff" + text),
        ("k.txt", "\ufeffcaption\n"),
        ("k.state.npy", b"n"),
        ("k.extra.json", "[1]"),
        ("k.weird", b"w"),
        ("k.srt", ""),
    ]
    path = write_shard(tmp_path / "s.tar", files)
    out = Outcome(path)
    assert out.rows[0]["metadata_json"] == text
    assert (out.rows[0]["a"], out.rows[0]["c"], out.rows[0]["content_type"]) == (1, [1, 2], "application/json")
    assert out.brief("k") == [
        (0, "audio", "k.mp3", None),
        (1, "image", "k.JPG", None),
        (2, "text", "caption\n"),
        (3, "array", "k.state.npy", None),
        (4, "text", "[1]"),
        (5, "binary", "k.weird", None),
        (6, "text", ""),
    ]
    row = out.of("k")[1]
    ref = parse_source_ref(row["source_ref"])
    assert ref.strategy == "range_read"
    assert path.read_bytes()[ref.byte_offset :][: ref.byte_size] == b"jpeg"
    assert row["content_type"] == "image/jpeg"
    assert out.rejects == []


def test_samples_scattered_over_the_shard(tmp_path: Path) -> None:
    """Members far apart are one sample, at the place of its first member."""
    out = Outcome(write_shard(tmp_path / "s.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("b.json", {}), ("a.txt", "t")]))
    assert [r["sample_id"] for r in out.rows] == ["a", "a", "a", "b", "b"]


def test_interleaved_by_member_name(tmp_path: Path) -> None:
    """Positions are list indices, nulls leave gaps, and names count as written and beside the JSON."""
    files: Files = [
        ("d/x.json", {"texts": ["t0", None, None, ""], "images": [None, "d/x.0.png", "x.1.png", None], "u": "v"}),
        ("d/x.0.png", b"0"),
        ("d/x.1.png", b"1"),
        ("d/x.2.png", b"2"),
    ]
    out = Outcome(write_shard(tmp_path / "s.tar", files))
    assert out.brief("d/x") == [
        (0, "text", "t0"),
        (1, "image", "d/x.0.png", None),
        (2, "image", "d/x.1.png", None),
        (3, "text", ""),
    ]
    assert out.reasons() == {"d/x.2.png": "unreferenced_member"}
    assert [c.name for c in out.schema.user_columns] == ["u"]


def test_frames_of_one_tiff(tmp_path: Path) -> None:
    """In the MINT-1T-PDF layout the k-th token that is not null is frame k of the one TIFF, whatever it says."""
    tokens = [None, "page_0_image_1", None, "page_3_image_9", 7, {"xref": 1}]
    files: Files = [("x.json", {"texts": ["a", None, "b", None, None, None], "images": tokens}), ("x.TIFF", b"tiff")]
    out = Outcome(write_shard(tmp_path / "s.tar", files))
    assert out.brief("x") == [
        (0, "text", "a"),
        (1, "image", "x.TIFF", 0),
        (2, "text", "b"),
        (3, "image", "x.TIFF", 1),
        (4, "image", "x.TIFF", 2),
        (5, "image", "x.TIFF", 3),
    ]
    assert {r["content_type"] for r in out.of("x") if r["modality"] == "image"} == {"image/tiff"}


def test_a_token_never_becomes_another_image(tmp_path: Path) -> None:
    """A token that resolves to nothing is an error on its row, with a message that names it."""
    files: Files = [
        ("a.json", {"images": ["a.0.png", "gone.png"]}),
        ("a.0.png", b"0"),
        ("b.json", {"images": ["page_1"]}),
        ("c.json", {"images": ["page_1"]}),
        ("c.tif", b"1"),
        ("c.tiff", b"2"),
        ("d.json", {"images": ["d.tiff", "page_1"]}),  # one name: this is not the layout whose tokens are frames
        ("d.tiff", b"3"),
        ("e.json", {"images": ["e.mp3", "e.json"]}),
        ("e.mp3", b"4"),
    ]
    out = Outcome(write_shard(tmp_path / "s.tar", files))
    assert out.brief("a") == [(0, "image", "a.0.png", None), (1, "image", "error")]
    assert out.brief("b") == [(0, "image", "error")]
    assert out.brief("c") == [(0, "image", "error")]
    assert out.brief("d") == [(0, "image", "d.tiff", None), (1, "image", "error")]
    assert out.brief("e") == [(0, "image", "error"), (1, "image", "error")]
    errors = [r["materialize_error"] for r in out.rows if r["materialize_error"]]
    assert "'gone.png'" in errors[0]
    assert "b.tiff" in errors[1]
    assert "c.tif or c.tiff" in errors[2]
    assert all(r["source_ref"] is None for r in out.rows if r["materialize_error"])
    assert out.stream.counts["unresolved_tokens"] == 6


def test_image_member_field(tmp_path: Path) -> None:
    """A configured key names the member behind unnamed tokens; tokens that share a TIFF are its frames."""
    layout = MemberRules(image_member_field="primary")
    files: Files = [
        ("a.json", {"images": ["p0", None, "p1", "other.png"], "primary": "pages.tiff"}),
        ("pages.tiff", b"t"),
        ("other.png", b"o"),
        ("b.json", {"images": ["b.jpg", "q", "r"], "primary": "b.jpg"}),
        ("b.jpg", b"j"),
        ("c.json", {"images": ["c.tiff", "c.tiff"]}),
        ("c.tiff", b"t"),
        ("d.json", {"images": [{"primary": "d.png"}, {"else": 1}]}),
        ("d.png", b"p"),
    ]
    out = Outcome(write_shard(tmp_path / "s.tar", files), layout=layout)
    assert out.brief("a") == [
        (0, "image", "pages.tiff", 0),
        (2, "image", "pages.tiff", 1),
        (3, "image", "other.png", None),
    ]
    assert out.brief("b") == [(0, "image", "b.jpg", None), (1, "image", "error"), (2, "image", "error")]
    assert out.brief("c") == [(0, "image", "c.tiff", 0), (1, "image", "c.tiff", 1)]
    assert out.brief("d") == [(0, "image", "d.png", None), (1, "image", "error")]
    assert [r["sample_id"] for r in out.rows if r["position"] == -1] == ["a", "b", "c", "d"]


def test_members_of_other_keys(tmp_path: Path) -> None:
    """A member without a JSON of its own that a token names is not a further sample, wherever it is."""
    files: Files = [
        ("shared.png", b"s"),
        ("lone.png", b"l"),
        ("y.json", {"images": ["y.png"]}),
        ("y.png", b"y"),
        ("x.json", {"images": ["shared.png", "y.png", "lone.txt"]}),
        ("lone.txt", "text"),
    ]
    for compress in (False, True):
        out = Outcome(write_shard(tmp_path / "s.tar", files, compress=compress))
        assert [r["sample_id"] for r in out.rows if r["position"] == -1] == ["lone", "y", "x"]
        assert out.brief("x")[:2] == [(0, "image", "shared.png", None), (1, "image", "y.png", None)]
        assert out.brief("lone") == [(0, "image", "lone.png", None), (1, "text", "text")]


def test_claims_of_a_rejected_sample(tmp_path: Path) -> None:
    """A member that only a rejected sample named is in the rejects too."""
    files: Files = [
        ("a.json", {"id": "1", "images": []}),
        ("b.json", {"id": "1", "images": ["shared.png"]}),
        ("shared.png", b"s"),
    ]
    out = Outcome(write_shard(tmp_path / "s.tar", files), layout=MemberRules(sample_id_field="id"))
    assert out.reasons() == {"b.json": "duplicate_sample_id", "shared.png": "unreferenced_member"}


def test_references(tmp_path: Path) -> None:
    """URLs and paths are errors unless allowed, and then only below the allowed prefixes."""
    urls = ["https://a.org/x.jpg?w=1", "https://b.org/x.jpg", "/etc/passwd", "https://a.org/../x"]
    path = write_shard(tmp_path / "s.tar", [("x.json", {"images": urls}), ("x.tiff", b"")])
    assert [b[2] for b in Outcome(path).brief("x")] == ["error"] * 4
    layout = MemberRules(allow_references=True, allowed_references=("https://a.org/",))
    out = Outcome(path, layout=layout)
    assert out.brief("x") == [
        (0, "image", urls[0], None),
        (1, "image", "error"),
        (2, "image", "error"),
        (3, "image", "error"),
    ]
    row = out.of("x")[0]
    assert parse_source_ref(row["source_ref"]).strategy == "direct_read"
    assert row["content_type"] == "image/jpeg"


def test_odd_lists(tmp_path: Path) -> None:
    """Lists of unequal length, a text in place of one, entries of other types and both at one place are handled."""
    files: Files = [
        ("a.json", {"texts": ["t", 5, ["x"]], "images": ["a.png"]}),
        ("a.png", b""),
        ("b.json", {"texts": {"no": "list"}, "images": [None]}),
        ("c.json", {"texts": "no list", "images": "none"}),
        ("d.json", {"texts": ["t", "u"], "images": "d.png"}),
        ("d.png", b""),
        ("e.json", {"texts": "the only one", "images": [None, "a.png"]}),
    ]
    out = Outcome(write_shard(tmp_path / "s.tar", files))
    assert out.brief("d") == [(0, "text", "t"), (0, "image", "d.png", None), (1, "text", "u")]
    assert out.brief("e") == [(0, "text", "the only one"), (1, "image", "a.png", None)]
    assert out.brief("a") == [(0, "text", "t"), (0, "image", "a.png", None)]
    assert [(r["sample_id"], r["member"], r["reason"]) for r in out.rejects] == [
        ("a", None, "text_not_a_string"),
        ("a", None, "text_not_a_string"),
        ("b", None, "not_a_list"),
    ]
    assert "texts[1]" in out.rejects[0]["detail"]
    assert out.stream.counts["unequal_lists"] == 3
    assert out.brief("c") == []


def test_per_item_fields(tmp_path: Path) -> None:
    """Per-item lists go to their rows by the entries that are not null, or by position where they are as long."""
    layout = MemberRules(per_image_fields=("alt",), per_text_fields=("lang",))
    files: Files = [
        (
            "a.json",
            {"texts": ["t", None, "u"], "images": [None, "a.png", None], "alt": ["A"], "lang": ["x", None, "y"]},
        ),
        ("a.png", b""),
        ("b.json", {"texts": ["t", "u"], "images": ["b.png"], "alt": [5], "lang": "en"}),
        ("b.png", b""),
        ("c.json", {"texts": ["t", "u", "v"], "images": [], "lang": ["x", "y"]}),
    ]
    out = Outcome(
        write_shard(tmp_path / "s.tar", files),
        layout=layout,
        columns=[
            UserColumn(name="alt", source="alt", type="string", rows="image"),
            UserColumn(name="lang", source="lang", type="string", rows="text"),
        ],
    )
    assert [(r["modality"], r["alt"], r["lang"]) for r in out.rows] == [
        ("metadata", None, None),
        ("text", None, "x"),
        ("image", "A", None),
        ("text", None, "y"),
        ("metadata", None, None),
        ("text", None, None),
        ("image", None, None),
        ("text", None, None),
        ("metadata", None, None),
        ("text", None, "x"),
        ("text", None, "y"),
        ("text", None, None),
    ]
    assert out.stream.counts["kept.null_cast"] == 2
    assert out.stream.counts["unequal_fields"] == 1


def test_bad_json_costs_only_itself(tmp_path: Path) -> None:
    """A JSON that cannot be read is rejected by name; the sample's media are rows, and so are its neighbours."""
    bad: dict[str, tuple[bytes, str]] = {
        "broken": (b'{"a": ', "bad_json"),
        "empty": (b"", "bad_json"),
        "list": (b"[1]", "json_not_an_object"),
        "null": (b"null", "json_not_an_object"),
        "latin": (b'{"a": "\xe9"}', "not_utf8"),
        "deep": (b"[" * 100_000, "bad_json"),
        "digits": (b'{"a": ' + b"9" * 5000 + b"}", "bad_json"),
        "large": (b'{"a": "' + b"x" * 200_000 + b'"}', "too_large"),
    }
    files: list[tuple[str, Any]] = []
    for name, (content, _) in bad.items():
        files += [(f"{name}.json", content), (f"{name}.jpg", b"j")]
    files += [("good.json", {"a": 1}), ("lonely.json", b"{"), ("t.txt", b"\xff\x80"), ("t.jpg", b"j")]
    layout = MemberRules(max_text_bytes=150_000)
    for compress in (False, True):
        out = Outcome(write_shard(tmp_path / "s.tar", files, compress=compress), layout=layout)
        for name, (_, reason) in bad.items():
            assert out.reasons()[f"{name}.json"] == reason
            assert out.brief(name) == [(0, "image", f"{name}.jpg", None)]
        assert out.reasons()["t.txt"] == "not_utf8"
        assert out.brief("t") == [(0, "image", "t.jpg", None)]
        assert out.stream.notes == []
        assert "lonely" not in {r["sample_id"] for r in out.rows}
        assert [r["metadata_json"] for r in out.rows if r["metadata_json"]] == ['{"a": 1}']


def test_odd_characters(tmp_path: Path) -> None:
    """Lone surrogates and NaN are replaced and reported; what is written otherwise, and private characters, stay."""
    raw = r'{"texts": ["a\ud800b", "\ud83d\ude00", "\ue000\u0000"], "k\udfff": NaN, "s": "x"}'
    out = Outcome(
        write_shard(tmp_path / "s.tar", [("x.json", raw), ("y\ud800.txt".encode("utf-8", "surrogatepass"), "")][:1])
    )
    assert [r["text_content"] for r in out.of("x")] == ["a\ufffdb", "\U0001f600", "\ue000\0"]
    expected = raw.replace("NaN", "null").replace(r"a\ud800", r"a\ufffd").replace(r"\udfff", r"\ufffd")
    assert out.rows[0]["metadata_json"] == expected
    assert out.stream.counts["repaired_texts"] == 1
    assert out.stream.counts["nonstandard_numbers"] == 1
    (kept,) = out.stream.kept
    assert (kept.reason, kept.count, kept.origin.member) == ("kept.repaired_json", 1, "x.json")
    assert kept.detail == "the JSON has null for 1 number that JSON does not have and U+FFFD for 2 lone surrogates"


def test_sample_ids(tmp_path: Path) -> None:
    """The id comes from its field, else the key; a second sample of one id is rejected whole, each member by name."""
    files: Files = [
        ("a.json", {"id": "one"}),
        ("a.jpg", b""),
        ("b.json", {"id": 7}),
        ("c.json", {"id": None}),
        ("d.json", {"id": "one"}),
        ("d.jpg", b""),
        ("e.json", {"id": True}),
    ]
    out = Outcome(write_shard(tmp_path / "s.tar", files), layout=MemberRules(sample_id_field="id"))
    assert [r["sample_id"] for r in out.rows if r["position"] == -1] == ["one", "7", "c", "e"]
    assert out.reasons() == {"d.json": "duplicate_sample_id", "d.jpg": "duplicate_sample_id"}
    assert "'a'" in out.rejects[0]["detail"]
    assert out.stream.counts["missing_sample_ids"] == 2
    assert out.stream.notes == ["2 samples without a text or whole number 'id' took the member key as id"]


def test_grouped_shards(tmp_path: Path) -> None:
    """In a group of shards keys carry the shard's name, so that equal keys stay apart."""
    for part in ("p-0", "p-1"):
        write_shard(tmp_path / f"{part}.tar", [("a.jpg", part.encode()), ("a.json", {"n": 1})])
    out = Outcome(tmp_path / "p-0.tar", tmp_path / "p-1.tar", grouped=True)
    assert [r["sample_id"] for r in out.rows if r["position"] == -1] == ["p-0/a", "p-1/a"]


def test_user_columns(tmp_path: Path) -> None:
    """Values that do not fit are null and counted, unknown keys are counted, and the JSON keeps all of it."""
    columns = [
        UserColumn(name="n", source="n", type="int64"),
        UserColumn(name="user_modality", source="modality", type="string"),
        UserColumn(name="o", source="o", type="json"),
    ]
    files: Files = [
        ("a.json", {"n": 1, "modality": "m", "o": {"x": [1]}}),
        ("b.json", {"n": "text", "z": 1, "texts": 3}),
    ]
    out = Outcome(write_shard(tmp_path / "s.tar", files), columns=columns)
    assert [(r["n"], r["user_modality"], r["o"]) for r in out.rows] == [(1, "m", '{"x":[1]}'), (None, None, None)]
    assert out.stream.counts["kept.null_cast"] == out.stream.counts["kept.no_column"] == 1
    assert [(k.reason, k.count, k.detail, k.origin.sample_id, k.origin.member) for k in out.stream.kept] == [
        ("kept.no_column", 1, "key 'z' is not a column", "b", "b.json"),
        ("kept.null_cast", 1, "column 'n' is int64, found text", "b", "b.json"),
    ]
    assert json.loads(out.rows[1]["metadata_json"]) == {"n": "text", "z": 1, "texts": 3}


def test_required_columns(tmp_path: Path) -> None:
    """A required column may miss in some samples; missing in all of a shard fails it by name."""
    column = UserColumn(name="p", source="p", type="string", required=True)
    some = write_shard(tmp_path / "some.tar", [("a.json", {"p": None}), ("b.json", {})])
    assert len(Outcome(some, columns=[column]).rows) == 2
    none = write_shard(tmp_path / "none.tar", [("a.json", {"q": 1}), ("b.json", {})])
    with pytest.raises(SourceError, match="'p'"):
        Outcome(none, columns=[column])
    with pytest.raises(SourceError, match="'p'"):
        infer_columns(TarSource(SourceFile(str(none))), MemberRules(user_columns=("p",)))


def test_batches_are_bounded(tmp_path: Path) -> None:
    """Batches keep near their size and samples whole; nothing depends on where they end."""
    files: list[tuple[str, Any]] = []
    for k in range(50):
        files += [(f"{k:02d}.json", {"texts": ["x" * 2000] * 5}), (f"{k:02d}.png", b"")]
    path = write_shard(tmp_path / "s.tar", files)
    small, large = Outcome(path, batch_bytes=64 << 10), Outcome(path)
    assert small.rows == large.rows
    assert len(large.batches) == 1
    assert len(small.batches) > 5
    assert max(b.nbytes for b in small.batches) < 128 << 10
    assert not {i for b in small.batches for i in set(b["sample_id"].to_pylist())} - {f"{k:02d}" for k in range(50)}
    ids = [set(b["sample_id"].to_pylist()) for b in small.batches]
    assert sum(len(i) for i in ids) == 50


def test_text_is_read_and_media_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building rows reads the bytes of JSON and text once, and none of large media."""
    files: list[tuple[str, Any]] = []
    for k in range(10):
        files += [(f"{k}.json", {"k": k}), (f"{k}.jpg", bytes(100_000)), (f"{k}.txt", "t" * 100)]
    source = SourceFile(str(write_shard(tmp_path / "s.tar", files)))
    index = list(index_members(TarSource(source)))
    asked: list[tuple[int, int]] = []
    original = SourceFile.read_ranges

    def spy(self: SourceFile, ranges: Sequence[tuple[int, int]], **options: Any) -> Any:
        asked.extend(ranges)
        assert options["max_gap"] < 100_000
        return original(self, ranges, **options)

    monkeypatch.setattr(SourceFile, "read_ranges", spy)
    rows = MemberRows([TarSource(source)])
    list(rows.rows(lambda: iter(index), layout=MemberRules(), schema=DatasetSchema()))
    assert len(asked) == len(set(asked)) == 20


def test_sparse_and_linked_members(tmp_path: Path) -> None:
    """Sparse media has no range, sparse text is read, and a hard link is a row with its target's range."""
    path = tmp_path / "s.tar"
    sparse = {"GNU.sparse.size": "10", "GNU.sparse.map": "2,3"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, pax in [("a.txt", b"abc", sparse), ("a.bin", b"xyz", sparse), ("a.jpg", b"jpg", {})]:
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(content), pax
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        archive.addfile(link)
    out = Outcome(path)
    assert out.of("a")[0]["text_content"] == "\0\0abc\0\0\0\0\0"
    assert parse_source_ref(out.of("a")[1]["source_ref"]).strategy == "tar_extract"
    one, two = (parse_source_ref(out.of(k)[-1]["source_ref"]) for k in "ab")
    assert (one.byte_offset, one.byte_size, two.member) == (two.byte_offset, two.byte_size, "b.jpg")


def test_a_wrong_index(tmp_path: Path) -> None:
    """An index of another shard is refused, and rejects are not available before the rows."""
    one = TarSource(SourceFile(str(write_shard(tmp_path / "1.tar", [("a.jpg", b"")]))))
    two = TarSource(SourceFile(str(write_shard(tmp_path / "2.tar", [("a.jpg", b"")]))))
    stream: RowStream = MemberRows([two]).rows(lambda: index_members(one), layout=MemberRules(), schema=DatasetSchema())
    with pytest.raises(RuntimeError, match="read to their end"):
        stream.rejects()
    with pytest.raises(SourceError, match="member index"):
        list(stream)


def test_demo_shards(demo_shards: Path) -> None:
    """The demo shards become rows without a reject or an error."""
    for path in demo_shards.glob("*.tar"):
        out = Outcome(path)
        assert out.rejects == []
        assert {r["materialize_error"] for r in out.rows} == {None}


def test_shared_corpora(shared_data: Path) -> None:
    """Every shard of the sample corpora becomes rows, with every member accounted for and no token unresolved."""
    for path in sorted(p for p in shared_data.glob("*/*") if p.suffix in (".tar", ".tgz")):
        out = Outcome(path)
        assert out.rows
        assert {r["materialize_error"] for r in out.rows} == {None}
        assert {r["reason"] for r in out.rejects} <= {"directory"}


tokens = st.sampled_from(["a.png", "b.0.png", "b.tiff", "d/c.jpg", "gone.png", "https://x.org/y", "/etc/passwd", ""])
values = st.none() | st.integers() | st.text(max_size=5) | tokens | st.floats() | st.lists(st.integers(), max_size=2)
jsons = st.one_of(
    st.dictionaries(
        st.sampled_from(["texts", "images", "id", "k", "primary", "modality", "alt"]),
        values | st.lists(values, max_size=4),
    ),
    values,
).map(lambda value: json.dumps(value).encode())
member_names = st.builds(
    lambda folder, key, rest: folder + key + rest,
    st.sampled_from(["", "d/", "./", "../", "__MACOSX/"]),
    st.sampled_from(["a", "b", "c", "._a", ""]),
    st.sampled_from([".json", ".JSON", ".png", ".0.png", ".tiff", ".tif", ".jpg", ".txt", ".x.json", ".zzz", ""]),
).filter(lambda name: name.rstrip("./") != "" and not name.endswith("/"))


@settings(deadline=None, max_examples=150)
@given(
    files=st.lists(
        st.tuples(member_names, jsons | st.binary(max_size=8)), max_size=12, unique_by=lambda f: f[0].removeprefix("./")
    ),
    compress=st.booleans(),
    damage=st.none() | st.integers(0, 12 * 1024),
    seed=st.integers(0, 9),
)
def test_every_member_is_referenced_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, files: Files, compress: bool, damage: int | None, seed: int
) -> None:
    """Whatever a shard holds, each of its entries is in a row or in the rejects, and rows keep their contract."""
    path = write_shard(tmp_path_factory.mktemp("any") / "s.tar", files, compress=compress)
    if damage is not None and not compress:
        content = bytearray(path.read_bytes())
        content[damage : damage + 40] = random.Random(seed).randbytes(min(40, max(len(content) - damage, 0)))
        path.write_bytes(content)
    layout = MemberRules(
        sample_id_field="id", image_member_field="primary", per_image_fields=("alt",), max_text_bytes=60
    )
    columns = [
        UserColumn(name="k", source="k", type="int64"),
        UserColumn(name="alt", source="alt", type="string", rows="image"),
    ]
    out = Outcome(path, layout=layout, columns=columns)
    for row in out.rows:
        if row["modality"] in ("text", "metadata"):
            assert row["materialize_error"] is None
        else:
            assert (row["source_ref"] is None) == (row["materialize_error"] is not None)
        assert (row["text_content"] is not None) == (row["modality"] == "text")
        assert row["binary_content"] is None
