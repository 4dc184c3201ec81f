"""The encoding of a text: by its byte order mark, UTF-8, UTF-16 and UTF-32 by the NULs of their ASCII, or as declared.

It is decided once, when a text becomes a row, and the row records it: to read the text again is to call `text_in` with
that name. Nothing else is guessed, since a few letters do not show their encoding.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

__all__ = ["Decoded", "decode", "is_encoding", "text_in"]

_BOMS: tuple[tuple[bytes, str | None], ...] = (  # UTF-32 before UTF-16, whose little-endian mark it begins with
    (codecs.BOM_UTF8, None),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MARKS = tuple(mark for mark, _ in _BOMS)
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
_OTHER_ASCII = ("utf-16", "utf-32", "utf-7", "hz", "iso2022")  # codecs that read some ASCII as other characters
_NO_TEXTS = frozenset({"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"})
_BOM = "\ufeff"
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNWANTED = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f\ufffe\uffff\ue000-\uf8ff]")


class Decoded(NamedTuple):
    """A text, and the encoding that it was read in: a name of Python's codecs, None for UTF-8."""

    text: str
    encoding: str | None


def is_encoding(name: str) -> bool:
    """Returns whether `name` is an encoding of text that Python knows, and not one of names or of source code."""
    try:
        found = codecs.lookup(name)
    except (LookupError, ValueError):
        return False
    return found._is_text_encoding and found.name not in _NO_TEXTS


def text_in(payload: bytes | memoryview, encoding: str | None) -> str:
    """Returns a text in a known encoding, without a byte order mark.

    Args:
        payload: the bytes.
        encoding: a name of Python's codecs, None for UTF-8.

    Raises:
        ValueError: the bytes are not text in this encoding; the message is a clause about them.
    """
    name = "UTF-8" if encoding is None else encoding
    try:
        text = str(payload, encoding or "utf-8")
    except UnicodeDecodeError as error:
        found = f" (found 0x{error.object[error.start]:02x})" if error.start < len(error.object) else ""
        raise ValueError(f"is not {name} at byte {error.start}{found}") from error
    except (LookupError, UnicodeError) as error:
        raise ValueError(f"is not {name}: {error}") from error
    if encoding is not None and _SURROGATE.search(text):  # UTF-7 has them
        raise ValueError(f"is not {name}: it has a lone surrogate")
    # These two remove the mark themselves; what follows it is text.
    return text if encoding in ("utf-16", "utf-32") else text.removeprefix(_BOM)


def _text_or_none(payload: bytes, encoding: str | None) -> str | None:
    try:
        return text_in(payload, encoding)
    except ValueError:
        return None


def decode(payload: bytes, declared: str | None = None) -> Decoded:
    """Returns a text and its encoding, which a byte order mark decides before anything else.

    Args:
        payload: the bytes.
        declared: the encoding of texts that are not UTF-8. UTF-16, UTF-32 and others in which ASCII bytes are other
            characters are that of all texts. With "utf-8" NULs are characters of a text in UTF-8.

    Raises:
        ValueError: it is in none of these encodings; the message is a clause about the bytes.
    """
    if payload.startswith(_MARKS):
        for mark, name in _BOMS:
            if payload.startswith(mark) and (text := _text_or_none(payload, name)) is not None:
                return Decoded(text, name)
    codec = None if declared is None else codecs.lookup(declared).name
    if declared is not None and codec is not None and payload and _is_for_all(codec):
        if codec in ("utf-16", "utf-32"):
            return _ordered(payload, codec)
        return Decoded(text_in(payload, declared), declared)
    text = _text_or_none(payload, None)
    if 0 in payload and codec != "utf-8" and (wide := _wide(payload, is_utf8=text is not None)) is not None:
        return wide
    if text is not None:
        return Decoded(text, None)
    if declared is None or codec == "utf-8":
        return Decoded(text_in(payload, None), None)  # which raises
    return Decoded(text_in(payload, declared), declared)


def _is_for_all(codec: str) -> bool:
    """Returns whether a text in this encoding may look like another text in UTF-8."""
    return codec.startswith(_OTHER_ASCII) or b"a 1".decode(codec, "replace") != "a 1"  # EBCDIC


def _wide(payload: bytes, *, is_utf8: bool) -> Decoded | None:
    """Returns a text in UTF-16 or UTF-32 without a mark, a third of whose characters are in Latin-1; None for another.

    Bytes that are valid UTF-8 may be a text that ends with NULs, so that two thirds are needed.
    """
    for name in _WIDE:
        text = _text_or_none(payload, name)
        if text is None or _UNWANTED.search(text):
            continue
        num_latin = len(text.encode("latin-1", "ignore"))
        if 3 * num_latin >= (2 if is_utf8 else 1) * len(text):
            return Decoded(text, name)
    return None


def _ordered(payload: bytes, codec: str) -> Decoded:
    """Returns a text in UTF-16 or UTF-32 of either byte order: the one in which some character is in Latin-1.

    Raises:
        ValueError: it is in neither, or may be in both.
    """
    names = (f"{codec}-le", f"{codec}-be")
    texts = {name: text for name in names if (text := _text_or_none(payload, name)) is not None}
    possible = {name: text for name, text in texts.items() if not _UNWANTED.search(text)}
    latin = {name: text for name, text in possible.items() if min(text) < "\u0100"}
    for found in (latin, possible, texts):
        if len(found) == 1:
            ((name, text),) = found.items()
            return Decoded(text, name)
    if texts:
        raise ValueError(f"does not show whether it is {names[0]} or {names[1]}")
    raise ValueError(f"is not {codec}")
