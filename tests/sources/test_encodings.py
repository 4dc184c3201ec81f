"""Tests of texts that are not UTF-8: whole shards in other encodings, and what may not be guessed."""

from __future__ import annotations

import gc
import json
import random
import weakref
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mm_assets.pipeline import stages
from mm_assets.pipeline.register import register
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore
from mm_assets.rows.schema import MemberRules
from mm_assets.sources.encodings import Ballots, Choice, Decoded, decode, is_encoding, plain_text, sure_guess
from mm_assets.sources.samples import ShardMembers
from mm_assets.sources.tar import TarSource
from mm_assets.sources.text_members import BadTextError, TextMembers, stored_text
from tests.sources.tars import MemorySource, build

from ..pipeline.chain import at_work

TEXTS = {
    "ja": "先生|犬|公園で遊ぶ子供たち|窓のそばに座っている黒い猫|東京タワーの夜景|ラーメンと餃子の定食"
    "|図書館で本を読む学生、後ろに時計がある|海辺を歩く二人の女性。"
    "|自転車に乗った警察官が交差点を渡っている|古い寺の庭に咲く桜の花",
    "zh_CN": "老师|狗|一只黑猫坐在窗边|孩子们在公园里玩|城市的夜景，灯光很美|桌子上有一本打开的书和一杯茶"
    "|两个女人在海边散步。|警察骑着自行车过马路|学生在图书馆里看书，后面有一个时钟|这是我们学校的图片",
    "zh_TW": "老師|狗|一隻黑貓坐在窗邊|孩子們在公園裡玩|城市的夜景，燈光很美|桌子上有一本打開的書和一杯茶"
    "|兩個女人在海邊散步。|警察騎著自行車過馬路|學生在圖書館裡看書，後面有一個時鐘|這是我們學校的圖片",
    "ko": "선생님|개|창가에 앉아 있는 검은 고양이|공원에서 노는 아이들|도시의 아름다운 밤 풍경"
    "|책상 위에 펼쳐진 책과 차 한 잔이 있다|바닷가를 걷는 두 여자|자전거를 탄 경찰관이 길을 건너고 있다"
    "|도서관에서 책을 읽는 학생|오래된 절의 정원에 핀 벚꽃",
    "ru": "учитель|собака|Чёрная кошка сидит у окна|Дети играют в парке|Ночной вид города, огни очень красивы"
    "|На столе лежит книга|Две женщины гуляют по берегу моря."
    "|Полицейский на велосипеде переезжает улицу|Студент читает в библиотеке|ул. Щукина",
    "fr": "café|Une école près de l'église|Le garçon a mangé une pomme à côté de la fenêtre"
    "|Où est la gare ? Là-bas, à gauche|Deux femmes se promènent au bord de la mer en été"
    "|« Voilà », dit l'élève|Noël à la maison|une tasse de thé|l'été|déjà vu",
    "de": "Müller|Zwei Mädchen spielen im Garten vor dem Haus für Gäste|Die Straße ist naß"
    "|Ein älterer Mann hört Musik|grün und schön|Über den Dächern der Stadt"
    "|Der Bäcker verkauft Brötchen|Tür|Größe: 5 Meter|Frühstück auf dem Balkon",
    "es": "niño|Una mujer pequeña camina por la montaña en otoño|¿Dónde está la estación?|El café está frío"
    "|mañana|corazón|Los niños jugarán en el jardín después|Música clásica en la televisión|¡Qué día!"
    "|El avión llegó aquí",
    "cs": "Příliš žluťoučký kůň úpěl ďábelské ódy|Dobrý den, přátelé|Děti si hrají v parku|Černá kočka sedí u okna"
    "|Dvě ženy se procházejí po břehu moře|Noční pohled na město|Student čte v knihovně|Na stole je šálek čaje",
    "pl": "Zażółć gęślą jaźń, proszę|Dzieci bawią się w parku|Czarny kot siedzi przy oknie, śpi|Widok nocny na miasto"
    "|Dwie kobiety spacerują brzegiem morza|Na stole leży książka i filiżanka herbaty|Żółw|Mąż wrócił później",
    "hu": "Árvíztűrő tükörfúrógép|Gyerekek játszanak a parkban, esős időben|Fekete macska ül az ablakban"
    "|Két nő sétál a tengerparton|Az asztalon egy könyv és egy csésze tea|Kettő|Éjszakai kilátás, szép fények",
    "el": "Το ίδιο με το άλλο, αλλά πιο μεγάλο|Καλημέρα σας|Ένα παιδί παίζει στον κήπο|Μια μαύρη γάτα στο παράθυρο",
    "tr": "Işığı söndürüp çıktı, şimdi gidiyor|Öğrenci kitabı okuyor|Güneş doğdu, çocuklar dışarıda|Siyah kedi"
    " pencerede oturuyor, dışarı bakıyor|İki kadın deniz kıyısında yürüyor|Masanın üstünde bir kitap ve çay var",
    "he": "ילד משחק בגינה עם הכלב שלו|בוקר טוב חברים|ספר על השולחן|חתול שחור יושב ליד החלון",
    "ar": "طفل يلعب في الحديقة مع كلبه|صباح الخير يا أصدقاء|كتاب على الطاولة|قطة سوداء تجلس بجانب النافذة",
    "lv": "Bērni spēlējas parkā|Melns kaķis sēž pie loga un skatās uz ielu|Divas sievietes pastaigājas gar jūru"
    "|Uz galda ir grāmata un tējas tase|Nakts skats uz pilsētu, ļoti skaistas gaismas|Skolēns lasa bibliotēkā",
    "th": "เด็กกำลังเล่นในสวนสาธารณะ|แมวดำนั่งอยู่ที่หน้าต่าง|หนังสือบนโต๊ะ|ผู้หญิงสองคนเดินริมทะเล",
    "uk": "Діти граються в парку|Чорна кішка сидить біля вікна|Нічний краєвид міста, дуже гарні вогні|Ґанок і її ключі",
}
SHARDS = [
    ("cp932", "ja"), ("euc_jp", "ja"), ("gb18030", "zh_CN"), ("gb2312", "zh_CN"), ("big5", "zh_TW"), ("cp949", "ko"),
    ("euc_kr", "ko"), ("cp1251", "ru"), ("koi8_r", "ru"), ("cp1252", "fr"), ("cp1252", "de"), ("latin-1", "es"),
    ("cp1250", "cs"), ("iso8859-2", "cs"), ("cp1250", "pl"), ("iso8859-2", "pl"), ("cp1250", "hu"), ("iso8859-2", "hu"),
    ("cp1253", "el"), ("cp1254", "tr"), ("cp1255", "he"), ("cp1256", "ar"), ("cp1257", "lv"), ("cp874", "th"),
    ("cp1251", "uk"), ("koi8-u", "uk"), ("utf-16-le", "ru"),
    ("utf-16", "ja"), ("utf-16", "fr"), ("utf-16-le", "de"), ("utf-16-be", "es"), ("utf-32", "ko"), ("utf-8-sig", "ru"),
]  # fmt: skip


def texts_of(language: str, num: int = 60) -> list[str]:
    """Texts of a language, some of them a single word."""
    rng = random.Random(language)
    every = TEXTS[language].split("|")
    return [rng.choice(every) + rng.choice(["", "", f" ({k})", f" {k}.jpg"]) for k in range(num)]


def read(payloads: list[bytes], *, encoding: str = "auto", window: int | None = None) -> tuple[list[Any], TextMembers]:
    """The texts of a shard with these text members, as `TextMembers` reads them."""
    files = [(f"{k:04}.txt", payload) for k, payload in enumerate(payloads)]
    source = TarSource(MemorySource(build(files)))
    source.file.read_ranges = lambda ranges, max_gap: [memoryview(source.file.read(*r)) for r in ranges]
    members = ShardMembers(source.file.url, source.members())
    texts = TextMembers(source, members, is_text=lambda _: True, max_bytes=1 << 20, encoding=encoding)
    samples = members.samples[::-1] if window == -1 else members.samples
    found = {m.ordinal: found[m.ordinal] for w in texts.windows(samples) for s, found in w for m in s.members}
    return [found[k] for k in range(len(files))], texts


@pytest.mark.parametrize(("encoding", "language"), SHARDS)
def test_a_shard_in_another_encoding(encoding: str, language: str) -> None:
    """Every text of a whole shard, single words too, is read as it was written, and its charset reads it again."""
    expected = texts_of(language)
    payloads = [text.encode(encoding) for text in expected]
    found, _ = read(payloads)
    assert [item.text for item in found] == expected
    for item, payload, text in zip(found, payloads, expected, strict=True):
        charset = "" if item.encoding is None else f"; charset={item.encoding}"
        assert stored_text(payload, f"text/plain{charset}") == text


def test_the_index_of_a_read_shard_is_released() -> None:
    """What the texts of a shard held of its index is freed with them, without a search for reference cycles."""
    gc.collect()
    gc.disable()
    try:
        found, texts = read([b"a", b"b"])
        held = weakref.ref(texts)
        texts.close()
        del texts
        assert held() is None
        assert [item.text for item in found] == ["a", "b"]
    finally:
        gc.enable()


@pytest.mark.parametrize(("other", "language"), [("cp932", "ja"), ("cp1252", "fr"), ("gb18030", "zh_CN")])
def test_a_shard_of_utf8_and_another_encoding(other: str, language: str) -> None:
    """In a mixed shard each text is read in its own encoding."""
    expected = texts_of(language)
    payloads = [text.encode(other if k % 3 else "utf-8") for k, text in enumerate(expected)]
    found, _ = read(payloads)
    assert [item.text for item in found] == expected
    assert all(item.encoding is None for item in found[::3])


def test_the_order_of_reading_changes_nothing() -> None:
    """The shard votes as a whole: what is read first, and in which batch, has no effect on any text."""
    payloads = [text.encode("cp932") for text in texts_of("ja")]
    forward, texts = read(payloads)
    backward, _ = read(payloads, window=-1)
    assert forward == backward
    choice = texts.choice
    assert choice is not None
    assert (choice.encoding, choice.share > 0.9) == ("cp932", True)


def test_a_shard_in_utf8_costs_no_vote() -> None:
    """Nothing is read twice where every text is UTF-8."""
    _, texts = read([text.encode() for text in texts_of("ja")])
    assert texts.choice is None


@pytest.mark.parametrize(
    ("encoding", "language"),
    [("mac_roman", "es"), ("mac_roman", "fr"), ("cp850", "fr"), ("cp850", "de"), ("cp852", "cs"), ("cp866", "ru")],
)
def test_encodings_that_are_not_known_are_refused(encoding: str, language: str) -> None:
    """A shard in an encoding of DOS or of old Macs is rejected, and not read as cp1252, which has nearly all bytes."""
    texts = texts_of(language)
    payloads = [text.encode(encoding) for text in texts if not text.isascii()]
    found, _ = read(payloads)
    assert all(isinstance(item, BadTextError) for item in found)
    assert all("samples.encoding" in item.detail for item in found)
    declared, _ = read(payloads, encoding=encoding)
    assert [item.text for item in declared] == [text for text in texts if not text.isascii()]


def test_two_accents_in_a_shard_are_read_where_every_latin_encoding_agrees() -> None:
    """Two captions with é in Latin-1 among fifty are read; è, which is another letter in cp1250, is rejected."""
    plain = [f"a dog runs on the beach {k}".encode() for k in range(48)]
    found, texts = read([*plain, "a café".encode("latin-1"), "a résumé".encode("latin-1")])
    assert [item.text for item in found[-2:]] == ["a café", "a résumé"]
    assert texts.choice == Choice("cp1252", 1.0, 1, 1)
    found, texts = read([*plain, "a crème".encode("latin-1"), "a scène".encode("latin-1")])
    assert [type(item) for item in found[-2:]] == [BadTextError, BadTextError]
    assert texts.choice == Choice(None, 0.0, 0, 1)


def test_a_short_text_alone_is_refused_with_what_it_may_be() -> None:
    """Four bytes that are valid in several encodings are rejected, with their names and what to do."""
    ((item,), _) = read(["先生".encode("cp932")])
    assert isinstance(item, BadTextError)
    assert item.reason == "not_utf8"
    assert "cp932" in item.detail
    assert "samples.encoding" in item.detail
    ((item,), _) = read(["先生".encode("cp932")], encoding="shift_jis")
    assert item == Decoded("先生", "shift_jis")


def test_a_long_text_of_another_encoding_keeps_its_own() -> None:
    """In a shard of one encoding a long text that is not plausible in it is read as what it surely is."""
    texts = texts_of("fr")
    long = "。".join(TEXTS["ja"].split("|"))
    found, _ = read([*(text.encode("cp1252") for text in texts), long.encode("cp932"), b"\x81\x8d\x8f"])
    assert [item.text for item in found[:-1]] == [*texts, long]
    assert isinstance(found[-1], BadTextError)


def test_a_text_that_is_surely_in_another_latin_encoding_is_not_read_in_its_shards() -> None:
    """In a Spanish shard a Polish sentence is read as Polish, and one too short to be sure of is rejected."""
    spanish = [text.encode("cp1252") for text in texts_of("es")]
    short = "Zażółć gęślą jaźń, proszę; mąż wrócił później"
    long = f"{short} do żony. Książka leży na półce, śpią źrebięta"
    found, texts = read([*spanish, long.encode("cp1250"), short.encode("cp1250")])
    assert texts.choice is not None
    assert texts.choice.encoding == "cp1252"
    assert found[-2] in (Decoded(long, "cp1250"), Decoded(long, "iso8859-2"))
    assert isinstance(found[-1], BadTextError)


def test_a_declared_encoding_is_that_of_texts_that_are_not_utf8() -> None:
    """UTF-8 and byte order marks count first; a text in neither is named."""
    nothing = Choice(None, 0.0, 0, 0)
    cases = [
        ("é".encode(), Decoded("é", None)), (b"\xe9", Decoded("é", "cp1252")), (b"", Decoded("", None)),
        ("\ufeffé".encode(), Decoded("é", None)), ("é".encode("utf-16"), Decoded("é", "utf-16")),
    ]  # fmt: skip
    for payload, expected in cases:
        assert decode(payload, declared="cp1252", choice=lambda: nothing) == expected
    assert decode(b"\x81", declared="cp1252", choice=lambda: nothing) == "it is neither UTF-8 nor cp1252, as declared"
    assert decode("HQ".encode("utf-16-le"), declared="utf-16-le", choice=lambda: nothing) == Decoded("HQ", "utf-16-le")
    assert decode(b"HQ", declared="utf-16-le", choice=lambda: nothing) == Decoded("先", "utf-16-le")
    assert decode(b"abc", declared="utf-16-le", choice=lambda: nothing) == "it is not utf-16-le, as declared"


def test_a_name_that_is_not_an_encoding_is_refused() -> None:
    """The setting takes names of encodings of text; a codec of bytes, of names or of source code is not one."""
    assert MemberRules(encoding="Shift_JIS").encoding == "Shift_JIS"
    for name in ("base64", "utf-9", "\0", "undefined", "unicode_escape"):
        assert not is_encoding(name)
        with pytest.raises(ValidationError):
            MemberRules(encoding=name)


@given(payload=st.binary(max_size=200), more=st.binary(max_size=60))
def test_no_bytes_make_it_raise(payload: bytes, more: bytes) -> None:
    """Any bytes vote and are read or refused, and what is read can be read again."""
    ballots = Ballots()
    for part in (payload, more, payload + more):
        ballots.add(part)
        plain_text(part)
        sure_guess(part)
    found = decode(payload, declared=None, choice=ballots.result)
    if isinstance(found, Decoded):
        charset = "" if found.encoding is None else f"; charset={found.encoding}"
        assert stored_text(payload, f"text/plain{charset}") == found.text


def test_the_pipeline_records_the_encodings(tmp_path: Path) -> None:
    """Rows have their charset, the record counts the texts and notes the vote, and JSON in UTF-16 is read."""
    texts = texts_of("ja", 12)
    files: list[tuple[str, bytes]] = []
    for k, text in enumerate(texts):
        value = json.dumps({"title": text}, ensure_ascii=False)
        files += [(f"{k:02}.json", value.encode("utf-16" if k % 2 else "utf-8")), (f"{k:02}.txt", text.encode("cp932"))]
    (tmp_path / "s.tar").write_bytes(build(files))
    config = {"name": "d", "shards": str(tmp_path / "s.tar"), "root": str(tmp_path / "root"), "settle_seconds": 0}
    dataset = DatasetStore(DatasetSpec.from_config(config, where="defs.yaml"))
    register(dataset)
    results = [at_work(make, dataset, "s") for make in stages.TABLE_STAGES.values()]
    assert all(outcome.passed for result in results for outcome in result.outcomes)
    record = results[1].record
    assert (record.counts["encoding.cp932"], record.counts["encoding.utf-16"]) == (12, 6)
    assert any("12 texts read as cp932" in note for note in record.notes)
    assert any("is cp932 by 100% of" in note for note in record.notes)
    rows = pq.read_table(dataset.store.path_of(dataset.table("rows", "s"))).to_pylist()
    assert [row["text_content"] for row in rows if row["modality"] == "text"] == texts
    assert [row["title"] for row in rows if row["modality"] == "metadata"] == texts
    assert {row["content_type"] for row in rows if row["modality"] == "text"} == {"text/plain; charset=cp932"}
    assert {row["content_type"] for row in rows if row["modality"] == "metadata"} == {
        "application/json", "application/json; charset=utf-16"
    }  # fmt: skip
