"""Tests of the encodings of texts: by a mark, by NULs, UTF-8, or as declared; nothing else is guessed."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import losses
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.schema_inference import decide_layout
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.schema import MemberRules
from mm_assets.sources.encodings import Decoded, decode, is_encoding, text_in
from mm_assets.sources.samples import ShardMembers
from mm_assets.sources.tar import TarSource
from mm_assets.sources.text_members import TextMembers, decode_text

from ..pipeline.chain import at_work, table_name
from .tars import MemorySource, build

TEXTS = {
    "ja": "先生が公園で遊ぶ子供を見ている。", "zh": "一只黑猫坐在窗边，看着外面", "ko": "창가에 검은 고양이",
    "ru": "Чёрная кошка сидит у окна", "fr": "« Voilà », dit l'élève près de l'église", "de": "Über den Dächern, naß",
    "cs": "Příliš žluťoučký kůň úpěl ďábelské ódy", "el": "Ένα παιδί παίζει στον κήπο", "tr": "Işığı söndürüp çıktı",
    "en": "A black cat sits by the window; it's “quiet” – mostly.", "nul": "with \0 in it\n", "one": "x",
}  # fmt: skip


@pytest.mark.parametrize(
    ("language", "encoding", "declared", "charset"),
    [
        *((language, "utf-8", None, None) for language in TEXTS),
        *((language, "utf-8-sig", None, None) for language in TEXTS),
        *((language, "utf-8", "utf-8", None) for language in TEXTS),
        *((language, encoding, None, encoding) for language in TEXTS for encoding in ("utf-16", "utf-32")),
        *(("en", name, None, name) for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")),
        *(("fr", name, None, name) for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")),
        *((language, "utf-16-be", "utf-16-be", "utf-16-be") for language in TEXTS),
        *(("one", name, name[:6], name) for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")),
        *(("ru", name, name[:6], name) for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")),
        *(("ja", name, name[:6], name) for name in ("utf-32-le", "utf-32-be")),
        *(("ja", name, name, name) for name in ("cp932", "euc_jp", "iso2022_jp", "utf-7")),
        *(("zh", name, name, name) for name in ("gb18030", "hz")),
        *(("ru", name, name, name) for name in ("cp1251", "koi8-r", "cp866")),
        *(("en", name, name, None) for name in ("cp1250",)),
        *(("one", name, name, name) for name in ("cp037", "cp500")),
        *((language, name, name, name) for language, name in (("fr", "mac_roman"), ("tr", "Windows-1254"))),
        *((language, name, name, name) for language, name in (("cs", "cp1250"), ("el", "cp1253"), ("ko", "cp949"))),
    ],
)  # fmt: skip
def test_a_text_in_its_encoding(language: str, encoding: str, declared: str | None, charset: str | None) -> None:
    """A text is read as it was written, and what its row records reads it again."""
    text = TEXTS[language]
    payload = text.encode("utf-8" if encoding == "cp1250" and language == "en" else encoding)
    assert decode(payload, declared) == (text, charset)
    assert text_in(payload, charset) == text


@pytest.mark.parametrize("declared", ["auto", "cp932", "utf-16", "utf-16-le", "utf-7", "utf-8", "iso2022_jp"])
def test_a_text_in_another_encoding_is_refused(declared: str) -> None:
    """What is neither UTF-8 nor as declared is refused with the first byte, if there is one, and what to do."""
    payload = b"\x81\x39\xff" if declared != "utf-7" else b"+2AA-"  # which is a lone surrogate
    with pytest.raises(ValueError, match=r"is not .*: name its encoding as samples\.encoding, or convert it to UTF-8"):
        decode_text(payload, declared)


def test_a_byte_order_that_does_not_show_is_not_guessed() -> None:
    """UTF-16 that is declared without an order needs a letter that shows it; else the text is refused."""
    with pytest.raises(ValueError, match="does not show whether it is utf-16-le or utf-16-be"):
        decode("先生".encode("utf-16-be"), "utf-16")
    assert decode("先生\n".encode("utf-16-be"), "utf-16") == ("先生\n", "utf-16-be")


def test_a_text_that_ends_with_nuls_is_utf8() -> None:
    """Padding with NULs, and NULs within, make no UTF-16 of a text in UTF-8."""
    for text in ("abc\0", "a label\0\0\0", "\0", "\0\0", "nul \0 inside", "a\0bc", "ab\0\0cd\0\0"):
        assert decode(text.encode()) == (text, None)
    assert decode(b"a\0") == ("a", "utf-16-le")  # the same bytes: said in the documentation
    assert decode(b"a\0", "utf-8") == ("a\0", None)


def test_only_one_mark_is_removed() -> None:
    """A second byte order mark is text, in the row and where it is read again."""
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        payload = "\ufeffx".encode(encoding)
        text, charset = decode(payload)
        assert text == text_in(payload, charset) == "\ufeffx"


def test_a_name_that_is_not_an_encoding_is_refused() -> None:
    """The setting takes names of encodings of text; a codec of bytes, of names or of source code is not one."""
    assert MemberRules(encoding="Shift_JIS").encoding == "Shift_JIS"
    for name in ("base64", "utf-9", "\0", "undefined", "unicode_escape"):
        assert not is_encoding(name)
        with pytest.raises(ValidationError):
            MemberRules(encoding=name)


@pytest.mark.nightly_examples(10_000)
@settings(max_examples=500)
@given(
    payload=st.binary(max_size=60),
    mark=st.sampled_from([b"", b"", b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\0\0", b"\0\0\xfe\xff", b"\xef\xbb\xbf"]),
    declared=st.sampled_from([None, "utf-8", "utf-16", "utf-32", "utf-16-be", "utf-7", "cp932", "hz", "cp037"]),
)  # fmt: skip
def test_any_bytes_are_read_or_refused(payload: bytes, mark: bytes, declared: str | None) -> None:
    """Any bytes are a text, which its recorded encoding gives again and UTF-8 can hold, or refused with a clause."""
    try:
        text, charset = decode(mark + payload, declared)
    except ValueError as error:
        clause = str(error)
    else:
        clause = "is not refused"
        assert text_in(mark + payload, charset) == text
        text.encode()
    assert clause.startswith(("is not ", "does not show "))


def test_the_index_of_a_read_shard_is_released() -> None:
    """What the texts of a shard held of its index is freed with them, without a search for reference cycles."""
    source = TarSource(MemorySource(build([("0.txt", b"a"), ("1.txt", b"b")])))
    source.file.read_ranges = lambda ranges, max_gap: [memoryview(source.file.read(*r)) for r in ranges]
    members = ShardMembers(source.file.url, source.members())
    gc.collect()
    gc.disable()
    try:
        texts = TextMembers(
            source, members, is_text=bool, max_bytes=lambda _: 100, decode=lambda _, payload: decode_text(payload)
        )
        found = [
            read
            for window in texts.windows(members.samples)
            for _, by_ordinal in window
            for read in by_ordinal.values()
        ]
        held = weakref.ref(texts)
        texts.close()
        del texts
        assert held() is None
        assert found == [Decoded("a", None), Decoded("b", None)]
    finally:
        gc.enable()


def shard_of_texts(folder: Path, encoding: str) -> DatasetSpec:
    """A shard of six captions and JSONs in two encodings, and one caption that is in neither."""
    files: list[tuple[str, bytes]] = []
    for k, text in enumerate(list(TEXTS.values())[:1] * 6):
        value = json.dumps({"title": text}, ensure_ascii=False)
        files += [(f"{k:02}.json", value.encode("utf-16" if k % 2 else "utf-8")), (f"{k:02}.txt", text.encode("cp932"))]
    (folder / "s.tar").write_bytes(build([*files, ("06.txt", b"\x81"), ("06.jpg", b"j")]))
    config = {"name": "d", "shards": str(folder / "s.tar"), "root": str(folder / "root"), "settle_seconds": 0}
    return DatasetSpec.from_config({**config, "samples": {"encoding": encoding}}, where="defs.yaml")


def test_the_pipeline_records_the_encodings(tmp_path: Path) -> None:
    """Rows have their charset, the record counts the texts, and of a text in no encoding only itself is lost."""
    dataset = DatasetStore(shard_of_texts(tmp_path, "cp932"))
    register(dataset)
    results = [at_work(make, dataset, "s") for make in (stages.raw_shards, stages.rows)]
    assert all(outcome.passed for result in results for outcome in result.outcomes)
    record = results[1].record
    assert (record.counts["encoding.cp932"], record.counts["encoding.utf-16"]) == (6, 3)
    assert any("6 texts read as cp932" in note for note in record.notes)
    rows = pq.read_table(dataset.store.path_of(table_name(dataset, "rows", "s"))).to_pylist()
    assert [row["text_content"] for row in rows if row["modality"] == "text"] == [TEXTS["ja"]] * 6
    assert [row["title"] for row in rows if row["modality"] == "metadata"] == [TEXTS["ja"]] * 6 + [None]
    assert {row["content_type"] for row in rows if row["modality"] == "text"} == {"text/plain; charset=cp932"}
    assert {row["content_type"] for row in rows if row["modality"] == "metadata"} == {
        "application/json", "application/json; charset=utf-16", None
    }  # fmt: skip
    assert [row["modality"] for row in rows if row["sample_id"] == "06"] == ["metadata", "image"]
    (loss,) = losses(DatasetState(dataset), ["s"])
    assert (loss.reason, loss.member) == ("not_utf8", "06.txt")
    assert "samples.encoding" in loss.detail
    assert "samples.encoding" in loss.advice


def test_registration_tells_of_texts_that_cannot_be_decoded(tmp_path: Path) -> None:
    """Before anything runs, the decision says how many sampled texts cannot be decoded, and names the setting."""
    url = str(tmp_path / "s.tar")
    (note,) = (n for n in decide_layout(shard_of_texts(tmp_path, "auto"), [url]).notes if "decoded" in n)
    assert (
        note
        == f"7 sampled texts cannot be decoded, the first is 00.txt of {url}: name their encoding as samples.encoding"
    )
    notes = decide_layout(shard_of_texts(tmp_path, "cp932"), [url]).notes
    assert any(n.startswith("1 sampled text cannot be decoded, the first is 06.txt of ") for n in notes)
