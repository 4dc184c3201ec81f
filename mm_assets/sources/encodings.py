"""The encoding of text that is not UTF-8: by its byte order mark, by what a whole shard votes for, or as declared.

Two detectors judge bytes independently: chardet, and chardetng of Firefox. An encoding counts only where both read the
same text, and no control characters in it. Either alone reads 2 to 8 % of short texts wrong. The texts of a shard vote
together, since a few characters do not show their encoding: those that are not UTF-8 are put together to ballots of
`BALLOT_BYTES` non-ASCII bytes, and each names the encoding that it is sure of. The one that reads half of the ballots,
and `MIN_SHARE` of the sure ones as they read themselves, is the shard's, if the ballots together show it among all
encodings. It is used for every text that it decodes, unless that text is surely in another one. The result depends on
the bytes and their order alone.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from mm_assets.errors import optional_import

__all__ = ["Ballots", "Choice", "Decoded", "decode", "is_encoding", "plain_text", "sure_guess"]

BALLOT_BYTES = 24  # non-ASCII bytes that a text needs to vote alone
MIN_BYTES = 12  # non-ASCII bytes for a guess; with fewer, one text in 100 would be read wrong
MIN_SHARE = 0.65  # of the ballots that are sure, for the encoding of a shard
MAX_BALLOTS = 128  # further texts of a shard do not change the result: each ballot takes some milliseconds
JUDGED_BYTES = 2048  # of one ballot
LONG_TEXT = 512  # bytes from which on a search for each control character is faster than one pass for all

_BOMS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MARKS = tuple(mark for mark, _ in _BOMS)
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
_LATIN = ("cp1252", "cp1250", "iso8859-2", "cp1254", "cp1257", "cp1258")
_ENCODINGS = (
    *_LATIN,
    *("cp1251", "koi8-r", "koi8-u", "cp1253", "cp1255", "cp1256", "cp874"),
    *("cp932", "euc_jp", "cp949", "gb18030", "cp950"),  # supersets of Shift-JIS, EUC-KR, GBK and Big5
)
_NOTHING = "ascii"  # what chardet answers where nothing fits
_BY_CHARDET = {"cp950": "big5hkscs", "euc_jp": "euc-jis-2004"}
_WEB = (_NOTHING, *(_BY_CHARDET.get(name, name) for name in (*_ENCODINGS, *_WIDE)))
_BY_NAME = {"big5hkscs": "cp950", "big5": "cp950", "euc_jis_2004": "euc_jp", "shift_jis": "cp932", "euc_kr": "cp949"}
_NO_TEXTS = frozenset({"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"})
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
        share: of the ballots, 0.0 to 1.0: the confidence.
        votes: ballots that the most frequent encoding reads as they read themselves.
        ballots: all of them.
    """

    encoding: str | None
    share: float
    votes: int
    ballots: int


def is_encoding(name: str) -> bool:
    """Whether `name` is an encoding of text that Python's codecs know, and not one of names or of source code."""
    try:
        found = codecs.lookup(name)
    except (LookupError, ValueError):
        return False
    return found._is_text_encoding and found.name not in _NO_TEXTS


def plain_text(payload: bytes) -> Decoded | None:
    """A text whose encoding its own bytes show: UTF-8, or any Unicode encoding with a byte order mark or with NULs.

    ASCII characters in UTF-16 and UTF-32 are valid UTF-8 with NULs, which no text holds: they are read as such.
    """
    if payload.startswith(_MARKS):
        for mark, name in _BOMS:
            if payload.startswith(mark) and (text := _strict(payload, name)) is not None:
                return Decoded(text, name)
    text = _strict(payload, "utf-8")
    if 0 in payload and len(payload) % 2 == 0:
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
        marked = plain_text(payload) if payload.startswith(_MARKS) else None
        text = _strict(payload, declared)
        found = marked if marked is not None else Decoded(text, declared) if text is not None else None
        return found or f"it is not {declared}, as declared"
    found = plain_text(payload)
    if declared is not None:
        if found is None and (text := _strict(payload, declared)) is not None:
            return Decoded(text, declared)
        return found or f"it is neither UTF-8 nor {declared}, as declared"
    if found is not None and (found.encoding is not None or not _has_controls(payload)):
        return found
    read = _by_shard(payload, choice().encoding) or found
    if read is not None:
        return read
    possible = [name for name in _ENCODINGS if (text := _strict(payload, name)) and not _UNWANTED.search(text)]
    return f"it may be {', '.join(possible)}" if possible else "it is in no encoding that is known here"


def _has_controls(payload: bytes) -> bool:
    """Whether bytes that are valid UTF-8 have control characters: they may be UTF-16 whose bytes are ASCII."""
    if len(payload) < LONG_TEXT:
        return len(payload.translate(None, _CONTROLS)) != len(payload)
    return any(map(payload.__contains__, _CONTROLS))


def _by_shard(payload: bytes, voted: str | None) -> Decoded | None:
    """A text in its shard's encoding, or in the other that it surely is; None if it is in neither."""
    text = None if voted is None else _strict(payload, voted)
    if voted is None or text is None or _is_garbled(text):
        own = sure_guess(payload)
        return None if own is None else Decoded(text, own) if (text := _strict(payload, own)) is not None else None
    second = _by_chardetng(payload)  # a tenth of the time of both
    if voted in _WIDE or second == voted or (second in _ENCODINGS and _strict(payload, second) == text):
        return Decoded(text, voted)
    own = _guess(payload)
    if own is None or (other := _strict(payload, own)) is None or other == text:
        return Decoded(text, voted)
    size = _num_high(payload)
    similar = (voted in _LATIN) == (own in _LATIN)
    if size >= (BALLOT_BYTES if similar else MIN_BYTES):
        return Decoded(other, own)
    # A short text may look like one of another language, but only a very short one like one of another script.
    return Decoded(text, voted) if size < (MIN_BYTES if similar else MIN_BYTES // 2) else None


class Ballots:
    """The vote of a shard's texts about their encoding; texts in UTF-8 have none."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._cast: list[tuple[bytes, str | None]] = []  # a ballot, and its encoding if it is sure of one

    @property
    def full(self) -> bool:
        """Whether further texts change nothing."""
        return len(self._cast) >= MAX_BALLOTS

    def add(self, payload: bytes) -> None:
        """Adds a text, alone or with others that are too short."""
        if self.full:
            return
        found = plain_text(payload)
        if found is not None:
            if found.encoding is None and _has_controls(payload) and (wide := _guess(payload)) in _WIDE:
                self._cast.append((payload[:JUDGED_BYTES], wide))
            return
        size = _num_high(payload)
        if size >= BALLOT_BYTES:
            self._cast.append((payload[:JUDGED_BYTES], _guess(payload, _WEB)))
            return
        self._held.append(payload)
        self._held_bytes += size
        if self._held_bytes >= BALLOT_BYTES:
            ballot = b"\n".join(self._held)
            self._cast.append((ballot[:JUDGED_BYTES], _guess(ballot, _WEB)))
            self._held.clear()
            self._held_bytes = 0

    def result(self) -> Choice:
        """The choice of what was added so far; texts that together are too short for a ballot vote only without one."""
        cast = self._cast
        if not cast and self._held:
            ballot = b"\n".join(self._held)
            cast = [(ballot, sure_guess(ballot))]
        votes, winner = 0, ""
        named = {name for _, name in cast}
        for candidate in (name for name in (*_ENCODINGS, *_WIDE) if name in named):
            agreeing = sum(name is not None and _alike(ballot, candidate, name) for ballot, name in cast)
            if agreeing > votes:
                votes, winner = agreeing, candidate
        if not votes:
            return Choice(None, 0.0, 0, len(cast))
        share = votes / len(cast)
        won = 2 * votes >= len(cast) and votes >= MIN_SHARE * sum(name is not None for _, name in cast)
        if won and winner not in _WIDE:
            # Ballots that are not sure are of several encodings; where they are many, they have to fit in.
            fits = share < MIN_SHARE
            joined = b"\n".join(
                ballot for ballot, name in cast if (fits if name is None else _alike(ballot, winner, name))
            )
            confirmed = _guess(joined)
            won = confirmed is not None and _alike(joined, winner, confirmed)
        return Choice(winner if won else None, share, votes, len(cast))


def _alike(payload: bytes, encoding: str, other: str) -> bool:
    """Whether two encodings, of which the bytes are in the second, read them alike."""
    return encoding == other or _start(payload, encoding) == _start(payload, other)


def _is_garbled(text: str) -> bool:
    """Whether no text has these characters: controls, or letters of Estonian and of Icelandic, as š and ž of cp1257."""
    return _UNWANTED.search(text) is not None or ("õ" in text and ("ð" in text or "þ" in text))


def _num_high(payload: bytes) -> int:
    return len(payload.translate(None, _ASCII))


def sure_guess(payload: bytes) -> str | None:
    """The encoding of bytes that show it by themselves, else None.

    Fewer than `MIN_BYTES` non-ASCII bytes do only where every Latin encoding reads them alike, as é, ü and ß.
    """
    name = _guess(payload)
    if name is None or name in _WIDE or _num_high(payload) >= MIN_BYTES:
        return name
    return name if name in _LATIN and len({_strict(payload, other) for other in _LATIN}) == 1 else None


def _guess(payload: bytes, among: tuple[str, ...] | None = None) -> str | None:
    """The first of the encodings in which both detectors read the same text.

    Args:
        payload: the bytes.
        among: the encodings of chardet that it chooses from. By default all but EBCDIC, also those of DOS and of old
            Macs: a short text is unsure more often then, but one in such an encoding is not read as another.
    """
    first = _by_chardet(payload, among) if payload else _NOTHING
    text = _start(payload, first)
    if first == _NOTHING or text is None or _is_garbled(text):
        return None
    if first in _WIDE:
        return first
    second = _by_chardetng(payload)
    if first != second and (second not in _ENCODINGS or _start(payload, second) != text):
        return None
    return next((name for name in _ENCODINGS if _start(payload, name) == text), None)


def _start(payload: bytes, encoding: str) -> str | None:
    """The text that is judged, without the part of a character at its end."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(payload[:JUDGED_BYTES], len(payload) <= JUDGED_BYTES)
    except (UnicodeDecodeError, LookupError):
        return None


def _by_chardet(payload: bytes, among: tuple[str, ...] | None) -> str:
    import chardet  # takes 50 ms, which shards in UTF-8 do not pay
    from chardet.enums import EncodingEra

    found = chardet.detect(
        payload,
        max_bytes=JUDGED_BYTES,
        encoding_era=EncodingEra.ALL & ~EncodingEra.MAINFRAME,
        include_encodings=among,
        compat_names=False,
        no_match_encoding=_NOTHING,
    )
    return _codec(found["encoding"] or _NOTHING)


def _by_chardetng(payload: bytes) -> str:
    with optional_import("chardetng_py", "finding the encoding of texts that are not UTF-8"):
        from chardetng_py import EncodingDetector
    detector = EncodingDetector()
    detector.feed(payload[:JUDGED_BYTES], last=len(payload) <= JUDGED_BYTES)
    return _codec(detector.guess(tld=None, allow_utf8=False))


@cache
def _codec(name: str) -> str:
    """The name that this module uses for an encoding."""
    try:
        found = codecs.lookup(name).name
    except LookupError:
        return name
    return _BY_NAME.get(found, found)
