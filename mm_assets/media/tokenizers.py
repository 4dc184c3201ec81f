"""Tokenizers turn text into ids. One for bytes is built in; others are Hugging Face ``tokenizers`` JSON files.

A tokenizer is identified by its name and the SHA-256 of its content, never by a path. Packed ids are read without it;
packing more text needs the same tokenizer, else the error names its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

from mm_assets.errors import ConfigError, EncodeError, optional_import

__all__ = ["ByteTokenizer", "JSONTokenizer", "Tokenizer", "TokenizerRef", "tokenizer_ref"]

MAX_JSON_SIZE = 256 << 20  # bytes; the largest vocabularies in use take 30 MB
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<PAD>", "<|padding|>")  # usual names of the padding token


@runtime_checkable
class Tokenizer(Protocol):
    """Anything that turns text into ids.

    Attributes:
        name: for people and messages.
        sha256: 64 lower-case hex digits; tokenizers with equal digests give equal ids.
        vocab_size: every id is below it.
        pad_id: id of the padding, or None if there is none.
        num_start_ids: number of special ids before every text.
        num_end_ids: number of special ids after every text.
    """

    @property
    def name(self) -> str: ...  # noqa: D102  # the class describes them

    @property
    def sha256(self) -> str: ...  # noqa: D102

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def pad_id(self) -> int | None: ...  # noqa: D102

    @property
    def num_start_ids(self) -> int: ...  # noqa: D102

    @property
    def num_end_ids(self) -> int: ...  # noqa: D102

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text, special ones included, neither truncated nor padded.

        Raises:
            EncodeError: the text has no ids.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids: 0 is padding, 1 begins a text, 2 ends it, 3 + b is the byte b."""

    __slots__ = ()

    PAD_ID = 0
    BOS_ID = 1
    EOS_ID = 2
    FIRST_BYTE_ID = 3

    name = "bytes"
    sha256 = hashlib.sha256(b"UTF-8 bytes: pad 0, begin 1, end 2, byte b is 3 + b").hexdigest()
    vocab_size = FIRST_BYTE_ID + 256
    pad_id = PAD_ID
    num_start_ids = 1
    num_end_ids = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteTokenizer)

    def __hash__(self) -> int:
        return hash(ByteTokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, between those that begin and end it.

        Raises:
            EncodeError: a lone surrogate, which has no UTF-8 form.
        """
        data = _utf8(text)
        return [self.BOS_ID, *(byte + self.FIRST_BYTE_ID for byte in data), self.EOS_ID]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without the special ones. A truncated character becomes U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        codes = [int(i) for i in ids]
        wrong = next((code for code in codes if not 0 <= code < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"found id {wrong}, expected 0 to {self.vocab_size - 1}")
        data = bytes(code - self.FIRST_BYTE_ID for code in codes if code >= self.FIRST_BYTE_ID)
        return data.decode("utf-8", errors="replace")


class JSONTokenizer:
    """A tokenizer of the Hugging Face ``tokenizers`` library, from the content of its ``tokenizer.json``.

    The JSON's truncation and padding are switched off: the field that uses the tokenizer has settings for both.

    Args:
        source: the JSON as text or bytes, which determine its digest, or as a mapping, whose compact form does, with
            keys in their order.
        name: for people.

    Raises:
        ConfigError: not the JSON of a tokenizer.
        MissingExtraError: the extra ``text`` is not installed.
    """

    __slots__ = ("_json", "_tokenizer", "name", "num_end_ids", "num_start_ids", "pad_id", "sha256", "vocab_size")

    def __init__(self, source: str | bytes | Mapping[str, Any], *, name: str = "tokenizers") -> None:
        if isinstance(source, Mapping):
            source = json.dumps(source, ensure_ascii=False, separators=(",", ":"))
        try:
            data = source.encode("utf-8") if isinstance(source, str) else source
            self._json = data.decode("utf-8")
        except UnicodeError as error:
            raise _refused(f"bytes that are not UTF-8 ({error})", "a tokenizer.json") from error
        with optional_import("tokenizers", "a tokenizer from a JSON file"):
            import tokenizers
        try:
            tokenizer = tokenizers.Tokenizer.from_str(self._json)
        except Exception as error:
            if type(error) not in (Exception, ValueError):  # the library raises plain Exceptions
                raise
            raise _refused(f"JSON that is not a tokenizer's ({error})", "a tokenizer.json") from error
        padding = tokenizer.padding
        tokenizer.no_padding()
        tokenizer.no_truncation()
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise _refused("an empty vocabulary", "a trained tokenizer")
        self._tokenizer = tokenizer
        self.name = name
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
        by_name = next((vocab[token] for token in _PAD_NAMES if token in vocab), None)
        self.pad_id: int | None = padding["pad_id"] if padding else by_name
        mask = tokenizer.encode("a").special_tokens_mask
        self.num_start_ids = next((k for k, special in enumerate(mask) if not special), 0)
        self.num_end_ids = next((k for k, special in enumerate(reversed(mask)) if not special), 0)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, name: str = "tokenizers") -> Self:
        """Read a ``tokenizer.json``.

        Raises:
            ConfigError: there is no such file, it is not a regular one or has more than 256 MiB, or no tokenizer.
            MissingExtraError: the extra ``text`` is not installed.
        """
        where = os.fspath(path)
        try:
            # Without O_NONBLOCK, opening a pipe without a writer would block for ever.
            with open(where, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                status = os.fstat(file.fileno())
                fits = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_JSON_SIZE
                data = file.read(MAX_JSON_SIZE) if fits else b""
        except (OSError, ValueError) as error:
            raise ConfigError("arguments", "tokenizer.file", f"{where!r} cannot be read: {error}") from error
        if not fits:
            raise _refused(repr(where), f"a regular file of up to {MAX_JSON_SIZE} bytes", "tokenizer.file")
        return cls(data, name=name)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special ones of the JSON's post-processor.

        Raises:
            EncodeError: a lone surrogate, which has no UTF-8 form.
        """
        _utf8(text)
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without the special ones."""
        return str(self._tokenizer.decode([int(i) for i in ids]))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(JSONTokenizer, name=self.name), (self._json,)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"a text without UTF-8 form ({error.reason})"
        raise EncodeError(f"tokenizer: found {found}, expected no lone surrogates") from error


@dataclass(frozen=True, slots=True)
class TokenizerRef:
    """The identity of a tokenizer, with the tokenizer itself if it is available.

    Attributes:
        name: the tokenizer's name.
        sha256: its digest, 64 lower-case hex digits.
        tokenizer: None if only the identity is known, as from a packed file's schema.
    """

    name: str
    sha256: str
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    @property
    def config(self) -> dict[str, str]:
        """The identity as JSON, as in a packed file's schema."""
        return {"name": self.name, "sha256": self.sha256}

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text.

        Raises:
            EncodeError: the tokenizer is not available, or the text has no ids.
        """
        if self.tokenizer is None:
            found = f"text, and only the identity of the tokenizer {self.name!r}"
            raise EncodeError(f"tokenizer: found {found}, expected the tokenizer with SHA-256 {self.sha256}")
        return self.tokenizer.encode(text)


def tokenizer_ref(setting: object) -> TokenizerRef:
    """Read a `tokenizer` setting.

    Args:
        setting: ``"bytes"``; ``{"file": path}`` or ``{"json": text or object}``, both with an optional ``name`` and an
            expected ``sha256``; ``{"name": …, "sha256": …}``, an identity without its tokenizer; a `Tokenizer`; or a
            `TokenizerRef`.

    Raises:
        ConfigError: any other setting, a file that cannot be read, or one with another digest.
        MissingExtraError: the extra ``text`` is needed and not installed.
    """
    if isinstance(setting, TokenizerRef):
        return setting
    if setting == "bytes":
        setting = ByteTokenizer()
    if isinstance(setting, Mapping):
        return _ref_of_mapping(setting)
    if isinstance(setting, Tokenizer) and not isinstance(setting, str | type):
        _check_identity(setting.name, setting.sha256)
        return TokenizerRef(setting.name, setting.sha256, setting)
    expected = '"bytes", {"file": path}, {"json": …}, {"name": …, "sha256": …} or a Tokenizer'
    raise _refused(f"{setting!r:.80}", expected)


def _ref_of_mapping(setting: Mapping[str, Any]) -> TokenizerRef:
    keys = set(setting)
    sources = keys & {"file", "json"}
    if not keys <= {"file", "json", "name", "sha256"} or len(sources) > 1 or (not sources and "sha256" not in keys):
        raise _refused(f"keys {sorted(map(str, keys))}", "file or json, or name and sha256")
    name, digest = setting.get("name", "tokenizers"), setting.get("sha256")
    _check_identity(name, "0" * 64 if digest is None and sources else digest)
    if not sources:
        built_in = ByteTokenizer() if (name, digest) == (ByteTokenizer.name, ByteTokenizer.sha256) else None
        return TokenizerRef(name, str(digest), built_in)
    (key,) = sources
    source = setting[key]
    if not isinstance(source, (str | os.PathLike) if key == "file" else (str | Mapping)):
        raise _refused(f"{source!r:.80}", "a path" if key == "file" else "JSON", f"tokenizer.{key}")
    tokenizer = JSONTokenizer.from_file(source, name=name) if key == "file" else JSONTokenizer(source, name=name)
    if digest not in (None, tokenizer.sha256):
        raise _refused(tokenizer.sha256, f"{digest}", "tokenizer.sha256")
    return TokenizerRef(name, tokenizer.sha256, tokenizer)


def _check_identity(name: object, digest: object) -> None:
    if not isinstance(name, str) or not name:
        raise _refused(f"{name!r:.80}", "a name", "tokenizer.name")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise _refused(f"{digest!r:.80}", "64 lower-case hex digits", "tokenizer.sha256")


def _refused(found: str, expected: str, key: str = "tokenizer") -> ConfigError:
    return ConfigError("arguments", key, f"found {found}, expected {expected}")
