"""The encoding of text that is not UTF-8: by its byte order mark, by what a whole shard votes for, or as declared.

A short text alone does not show its encoding: two characters of Japanese are valid in six of them. So the texts of a
shard vote together. Those that are not UTF-8 are put together to ballots of `BALLOT_BYTES` non-ASCII bytes; each votes
for the one encoding in which it reads as a language is written, if there is one. What `MIN_SHARE` of the votes name is
the shard's encoding, and is used for every text that is not UTF-8 and that it decodes. The result depends on the bytes
and their order alone.

A ballot is judged by weights of characters: the frequent ones of a language count most, then those of the first level
of its character set (in JIS X 0208, GB 2312, Big5 and KS X 1001 the first rows hold what is in common use); what a
language does not use counts against it.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

__all__ = ["Ballots", "Choice", "Decoded", "decode", "is_encoding", "plain_text", "sure_guess"]

BALLOT_BYTES = 24  # non-ASCII bytes that a text needs to vote alone: 12 characters of two bytes
MIN_SHARE = 0.65  # of the votes, for the encoding of a shard
MAX_BALLOTS = 512  # further texts of a shard do not change the result: each ballot takes a few milliseconds
JUDGED_BYTES = 2048  # of one ballot
MIN_SCORE = 0.5  # mean weight of a ballot's characters: below it is not written as the language is
MIN_LEAD = 0.2  # over the next encoding
MIN_PLAUSIBLE = {"cp1251": -0.6, "koi8_r": -0.6}  # mean weight of a text that may be in the shard's encoding; else 0.0

_BOMS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
_BOM = "\ufeff"
_UNWANTED = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f\ufffe\uffff\ue000-\uf8ff]")
_ASCII = bytes(range(0x80))  # deleted to count what is not ASCII
_CONTROLS = bytes(c for c in range(0x20) if c not in b"\t\n\v\f\r\x1b")


class Decoded(NamedTuple):
    """A text, and the encoding that it was read in: a name of Python's codecs, None for UTF-8."""

    text: str
    encoding: str | None


class Choice(NamedTuple):
    """What a shard voted for.

    Attributes:
        encoding: the encoding that won, or None.
        share: of the votes, 0.0 to 1.0.
        votes: ballots that were sure of an encoding.
        ballots: all of them.
    """

    encoding: str | None
    share: float
    votes: int
    ballots: int


def is_encoding(name: str) -> bool:
    """Whether `name` is an encoding of text that Python's codecs know."""
    try:
        return codecs.lookup(name)._is_text_encoding
    except (LookupError, ValueError):
        return False


def plain_text(payload: bytes) -> Decoded | None:
    """A text whose encoding its own bytes show: UTF-8, or any Unicode encoding with a byte order mark or with NULs.

    ASCII characters in UTF-16 and UTF-32 are valid UTF-8 with NULs, which no text holds: they are read as such.
    """
    for mark, name in _BOMS:
        if payload.startswith(mark):
            text = _strict(payload, name)
            if text is not None:
                return Decoded(text, name)
    text = _strict(payload, "utf-8")
    if b"\0" in payload and len(payload) % 2 == 0:
        wide = _wide(payload)
        if wide is not None:
            return wide
    if text is None:
        return None
    return Decoded(text[1:] if text.startswith(_BOM) else text, None)


def _wide(payload: bytes) -> Decoded | None:
    """A text in UTF-16 or UTF-32 without a mark, of which a third is ASCII or Latin-1; None for any other."""
    for name in _WIDE:
        if name.startswith("utf-32") and len(payload) % 4:
            continue
        width = int(name[4:6]) // 8
        low = 0 if name.endswith("le") else width - 1
        zeros = (width - 1) * len(payload) // width  # if every character were ASCII
        found = len(payload) - len(payload.translate(None, b"\0")) - payload[low::width].count(0)
        if 3 * found >= zeros and (text := _strict(payload, name)) is not None and not _UNWANTED.search(text):
            return Decoded(text, name)
    return None


def _strict(payload: bytes, encoding: str) -> str | None:
    try:
        return payload.decode(encoding)
    except UnicodeDecodeError:
        return None


def decode(payload: bytes, *, declared: str | None, choice: Callable[[], Choice]) -> Decoded | str:
    """A text, or what is known of one that cannot be read.

    Args:
        payload: its bytes.
        declared: the encoding of texts that are not UTF-8, by the declaration; None to find it. A declared UTF-16 or
            UTF-32 is that of every text without a byte order mark.
        choice: the vote of the shard; called only for a text that needs it.
    """
    if declared is not None and codecs.lookup(declared).name.startswith(("utf-16", "utf-32")):
        marked = plain_text(payload) if payload.startswith(tuple(mark for mark, _ in _BOMS)) else None
        text = _strict(payload, declared)
        found = marked if marked is not None else Decoded(text, declared) if text is not None else None
        return found or f"it is not {declared}, as declared"
    found = plain_text(payload)
    if declared is not None:
        if found is None and (text := _strict(payload, declared)) is not None:
            return Decoded(text, declared)
        return found or f"it is neither UTF-8 nor {declared}, as declared"
    if found is not None and (found.encoding is not None or len(payload.translate(None, _CONTROLS)) == len(payload)):
        return found
    voted = choice().encoding
    if found is not None:  # UTF-8 with control characters: in a shard of UTF-16 it may be a short text of that
        text = _strict(payload, voted) if voted in _WIDE else None
        return Decoded(text, voted) if text is not None and _UNWANTED.search(text) is None else found
    if voted is not None and (text := _strict(payload, voted)) is not None and _is_plausible(text, voted):
        return Decoded(text, voted)
    own = sure_guess(payload)
    if own is not None and (text := _strict(payload, own)) is not None:
        return Decoded(text, own)
    possible = [name for name in (*_WEIGHTS, *_WIDE[2:]) if (text := _strict(payload, name)) is not None and text]
    return f"it may be {', '.join(possible)}" if possible else "it is in no encoding that is known here"


def _is_plausible(text: str, encoding: str) -> bool:
    if encoding in _WIDE:
        return _UNWANTED.search(text) is None
    if encoding == "cp1252":
        return _latin(text, strict=False) >= 0.0
    score = _score(text, encoding)
    return score is None or score >= MIN_PLAUSIBLE.get(encoding, 0.0)


class Ballots:
    """The vote of a shard's texts about their encoding; texts in UTF-8 have none."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._votes: Counter[str] = Counter()
        self._num = 0

    @property
    def full(self) -> bool:
        """Whether further texts change nothing."""
        return self._num >= MAX_BALLOTS

    def add(self, payload: bytes) -> None:
        """Adds a text, alone or with others that are too short."""
        if self.full or plain_text(payload) is not None:
            return
        wide = _strict_wide(payload)
        if wide is not None:
            self._votes[wide] += 1
            self._num += 1
            return
        size = _num_high(payload)
        if size >= BALLOT_BYTES:
            self._vote(payload)
            return
        self._held.append(payload)
        self._held_bytes += size
        if self._held_bytes >= BALLOT_BYTES:
            self._vote(b"\n".join(self._held))
            self._held.clear()
            self._held_bytes = 0

    def _vote(self, ballot: bytes) -> None:
        self._num += 1
        name = _guess(ballot)
        if name is not None:
            self._votes[name] += 1

    def result(self) -> Choice:
        """The choice of what was added so far."""
        votes = self._votes.total()
        if not votes:
            return Choice(None, 0.0, 0, self._num)
        name, most = min(self._votes.items(), key=lambda item: (-item[1], item[0]))
        share = most / votes
        won = share >= MIN_SHARE and 2 * most >= self._num  # most ballots in no known encoding: it is another one
        return Choice(name if won else None, share, votes, self._num)


def _num_high(payload: bytes) -> int:
    return len(payload.translate(None, _ASCII))


def _strict_wide(payload: bytes) -> str | None:
    """UTF-16 without a mark of a text that is not Latin: its characters are of one or two blocks, and few are rare."""
    if len(payload) % 2 or len(payload) < BALLOT_BYTES:
        return None
    sure = []
    for name in _WIDE[2:]:
        text = _strict(payload[:JUDGED_BYTES], name)
        if text is None or _UNWANTED.search(text):
            continue
        scores = [score for language in _WEIGHTS if (score := _score(text, language)) is not None]
        if max(scores, default=-1.0) >= MIN_SCORE and _score_of_bytes(payload) < MIN_SCORE:
            sure.append(name)
    return sure[0] if len(sure) == 1 else None


def _score_of_bytes(payload: bytes) -> float:
    """The best score of the bytes in an encoding that is not wide; -1.0 if they are in none."""
    return max(_scores(payload).values(), default=-1.0)


def sure_guess(payload: bytes) -> str | None:
    """The encoding of one text that is long enough to show it, else None."""
    wide = _strict_wide(payload)
    if wide is not None:
        return wide
    return _guess(payload) if _num_high(payload) >= BALLOT_BYTES else None


def _guess(ballot: bytes) -> str | None:
    ranked = sorted(_scores(ballot).items(), key=lambda item: (-item[1], item[0]))
    if not ranked or ranked[0][1] < MIN_SCORE:
        return None
    return ranked[0][0] if len(ranked) == 1 or ranked[0][1] - ranked[1][1] >= MIN_LEAD else None


def _scores(ballot: bytes) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _WEIGHTS:
        decoder = codecs.getincrementaldecoder(name)()
        try:
            text = decoder.decode(ballot[:JUDGED_BYTES], len(ballot) <= JUDGED_BYTES)
        except UnicodeDecodeError:
            continue
        score = _score(text, name)
        if score is not None:
            found[name] = score
    return found


# -- how a language is written

_OTHER = -0.5  # weight of a character that the language does not use
_SIMPLIFIED = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然"
    "家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机"
    "十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加"
    "文件图片数据输入错误选项名称请打设置无法载版本"
)
_TRADITIONAL = (
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡用道行所然"
    "家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心她本前開但因只從想實日軍者意無力它與長把機"
    "十民第公此已工使情明性知全三又關點正業外將兩高間由問很最重並物手應戰向頭文體政美相見被利什二等產或新己制身果加"
    "檔案圖片資料輸入錯誤選項名稱請打設定無法載版"
)
_KOREAN = (
    "이다는을의에가고하지은를로한도사기자리어나서인대부스시일수정아보그해장전있여우라들과만게원으니성신제상구주오안조비"
    "면선문관마모공내동적할위중미소유화방경세식국요되데진음습않없것때말같생각분집실연트입출력파름용드"
)
_CJK_PUNCTUATION = "、。，．：；？！（）「」『』【】《》〈〉“”‘’…—・ー～　％"
_HIRAGANA = "".join(map(chr, range(0x3041, 0x3094)))
_KATAKANA = "".join(map(chr, range(0x30A1, 0x30F7))) + "ー"
_HALF_WIDTH = "".join(map(chr, range(0xFF61, 0xFFA0)))


def _rows(codec: str, first: int, last: int, trail: range | tuple[int, ...]) -> Iterator[str]:
    """The characters of the two-byte codes of some lead bytes."""
    for lead in range(first, last + 1):
        for second in trail:
            text = _strict(bytes((lead, second)), codec)
            if text is not None and len(text) == 1:
                yield text


_GRAPHIC = range(0xA1, 0xFF)
_BIG5 = (*range(0x40, 0x7F), *_GRAPHIC)


def _japanese() -> dict[str, float]:
    weights = dict.fromkeys(_rows("euc_jp", 0xD0, 0xF4, _GRAPHIC), -0.1)
    weights |= dict.fromkeys(_rows("euc_jp", 0xB0, 0xCF, _GRAPHIC), 0.5)
    weights |= dict.fromkeys(_CJK_PUNCTUATION, 0.8) | dict.fromkeys(_HALF_WIDTH, -0.6)
    return weights | dict.fromkeys(_KATAKANA, 1.0) | dict.fromkeys(_HIRAGANA, 1.2)


def _simplified() -> dict[str, float]:
    weights = dict.fromkeys(_rows("gb2312", 0xD8, 0xF7, _GRAPHIC), -0.1)
    weights |= dict.fromkeys(_rows("gb2312", 0xB0, 0xD7, _GRAPHIC), 0.5)
    weights |= dict.fromkeys(_CJK_PUNCTUATION, 0.8) | dict.fromkeys(_HIRAGANA + _KATAKANA, -1.0)
    return weights | dict.fromkeys(_SIMPLIFIED, 1.3)


def _traditional() -> dict[str, float]:
    weights = dict.fromkeys(_rows("cp950", 0xC9, 0xF9, _BIG5), -0.1)
    weights |= dict.fromkeys(_rows("cp950", 0xA4, 0xC6, _BIG5), 0.5)
    weights |= dict.fromkeys(_CJK_PUNCTUATION, 0.8) | dict.fromkeys(_HIRAGANA + _KATAKANA, -1.0)
    return weights | dict.fromkeys(_TRADITIONAL, 1.3)


def _korean() -> dict[str, float]:
    weights = dict.fromkeys(_rows("euc_kr", 0xB0, 0xC8, _GRAPHIC), 0.5)
    return weights | dict.fromkeys(_CJK_PUNCTUATION, 0.4) | dict.fromkeys(_KOREAN, 1.2)


_WEIGHTS: Mapping[str, Callable[[], dict[str, float]] | None] = {
    "cp932": _japanese,
    "euc_jp": _japanese,
    "cp949": _korean,
    "gb18030": _simplified,
    "cp950": _traditional,
    "cp1251": None,
    "koi8_r": None,
    "cp1252": None,
}
"""The encodings that are found; those of one byte are judged by their words."""

_weights = cache(lambda build: build())

_CYRILLIC: dict[str, float] = {  # by ten times the frequency in Russian, as logarithms: from 1.2 for о to -2 and less
    **dict.fromkeys("оеаи", 1.2),
    **dict.fromkeys("нтсрвл", 0.8),
    **dict.fromkeys("кмдпуі", 0.5),
    **dict.fromkeys("яыьгзбё", 0.0),
    **dict.fromkeys("чйхжї", -0.4),
    **dict.fromkeys("шюцщэє", -0.8),
}
_CYRILLIC_RARE = -1.5
_CYRILLIC_WORD = re.compile("[\u0400-\u045f\u0490\u0491]+")
_CYRILLIC_MARKS = "«»—–…№“”„‘’\u00a0"
_LATIN_MARKS = "“”‘’–—…•«»·°§©®™€£±²½×¿¡„‚‹›\u00a0ºª"
_LANGUAGES = tuple(
    map(
        frozenset,
        (
            "éèàçêâîôûùëïœæ",  # French
            "äöüßé",  # German
            "áéíóúñü",  # Spanish
            "ãõáéíóúâêôçà",  # Portuguese
            "àèéìòù",  # Italian
            "åäöøæé",  # Swedish, Danish, Norwegian, Finnish
            "ëïéèöüó",  # Dutch
            "àèéíïòóúüç·",  # Catalan
            "áéíóúýþæöð",  # Icelandic
        ),
    )
)
_SUSPECT = frozenset("õûðþýãìøùòæêîÿ")  # letters of other languages in the code pages of Central Europe and Turkey
_LATIN_RUN = re.compile("[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00ff\u0152\u0153\u0160\u0161\u0178\u017d\u017e]{3,}")


def _score(text: str, encoding: str) -> float | None:
    """How well a text is written as a language of this encoding: the mean weight of its characters that are not ASCII.

    About 1.0 for running text, below 0.5 for anything else; None for a text of ASCII alone.
    """
    high = Counter(char for char in text if char > "\x7f")
    total = high.total()
    if not total:
        return None
    if encoding in ("cp1251", "koi8_r"):
        return _cyrillic(text, high, total)
    if encoding == "cp1252":
        return _latin(text)
    build = _WEIGHTS[encoding]
    weights = _weights(build)
    return float(sum(weights.get(char, _OTHER) * count for char, count in high.items()) / total)


def _cyrillic(text: str, high: Mapping[str, int], total: int) -> float:
    score = 0.0
    inside = 0
    for match in _CYRILLIC_WORD.finditer(text):
        word = match[0]
        inside += len(word)
        beside = text[max(match.start() - 1, 0) : match.start()] + text[match.end() : match.end() + 1]
        cased = word.islower() or word.isupper() or (word[0].isupper() and word[1:].islower())
        if not cased or any(char.isalpha() for char in beside):
            score -= len(word)
            continue
        if len(word) == 1:
            continue  # an Italian "è" is one too
        score += sum(_CYRILLIC.get(char, _CYRILLIC_RARE) for char in word.lower())
        score -= 0.4 * len(word) * (word.isupper() and len(word) > 1)
    marks = sum(count for char, count in high.items() if char in _CYRILLIC_MARKS)
    return (score + 0.5 * marks - (total - inside - marks)) / total


def _latin(text: str, *, strict: bool = True) -> float:
    """As `_score`; a text that is not judged strictly may have letters of several languages, as names do."""
    high = Counter(char for char in text if char > "\x7f")
    total = high.total()
    letters = Counter[str]()
    marks = 0
    for char, count in high.items():
        if char in _LATIN_MARKS:
            marks += count
        elif char.isalpha():
            letters[char.lower()] += count
    num = letters.total()
    if not num:
        return 0.4 if marks == total else -1.0
    foreign = 0.0
    if strict:
        costs = {char: n * (10.0 if char in _SUSPECT else 4.0) for char, n in letters.items()}
        foreign = min(sum(cost for char, cost in costs.items() if char not in language) for language in _LANGUAGES)
        if letters["ö"]:  # with them õ and û are the ő and ű of Hungarian in cp1250
            foreign += 20.0 * (letters["õ"] + letters["û"])
    runs = sum(len(match[0]) for match in _LATIN_RUN.finditer(text))
    # Languages with these letters have most of their text in ASCII, each accent beside other letters.
    ascii_letters = sum(char.isalpha() for char in text if char < "\x80")
    lone = max(0, total - ascii_letters)
    return (num - foreign - 2.0 * runs - 2.0 * lone - (total - num - marks)) / num
