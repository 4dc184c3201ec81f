"""Tokenizers: text becomes ids. One over bytes is built in, any other comes as a Hugging Face ``tokenizers`` JSON.

A tokenizer is identified by its name and the SHA-256 of its content, never by a path: ids packed with one are read
without it, and text packed later needs the same one, or the error names the digest.
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
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from mm_assets.errors import ConfigError, EncodeError, optional_import

__all__ = ["ByteTokenizer", "JSONTokenizer", "Tokenizer", "TokenizerRef", "tokenizer_ref"]

MAX_JSON_SIZE = 256 << 20  # bytes; the largest vocabularies in use take 30 MB
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<PAD>", "<|padding|>")  # what tokenizers call it, where no id is set


@runtime_checkable
class Tokenizer(Protocol):
    """Anything that turns text into ids.

    Attributes:
        name: for people and messages.
        sha256: 64 lower-case hex digits that identify it: equal digests, equal ids.
        vocab_size: every id is below it.
        pad_id: id of the padding, or None where it has none.
        num_start_ids: special ids that it puts before every text.
        num_end_ids: special ids that it puts after every text.
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


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """UTF-8 bytes as ids: 0 fills, 1 begins a text, 2 ends it, 3 + b is the byte b. It needs no file and no training.

    Attributes:
        name: ``bytes``.
        sha256: of the rule above.
        vocab_size: 259.
        pad_id: 0.
        num_start_ids: 1.
        num_end_ids: 1.
    """

    PAD_ID: ClassVar[int] = 0
    BOS_ID: ClassVar[int] = 1
    EOS_ID: ClassVar[int] = 2
    FIRST_BYTE_ID: ClassVar[int] = 3

    name: str = field(default="bytes", init=False)
    sha256: str = field(
        default=hashlib.sha256(b"UTF-8 bytes: pad 0, begin 1, end 2, byte b is 3 + b").hexdigest(), init=False
    )
    vocab_size: int = field(default=FIRST_BYTE_ID + 256, init=False)
    pad_id: int | None = field(default=PAD_ID, init=False)
    num_start_ids: int = field(default=1, init=False)
    num_end_ids: int = field(default=1, init=False)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, between the ids that begin and end it.

        Raises:
            EncodeError: a lone surrogate, which has no UTF-8 form.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _no_text(error) from error
        return [self.BOS_ID, *(byte + self.FIRST_BYTE_ID for byte in data), self.EOS_ID]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ones are left out. A character that was split becomes U+FFFD.

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

    Truncation and padding that the JSON asks for are switched off: the field that uses it has settings for both.

    Args:
        source: the JSON, as text or bytes (its digest is theirs) or as a mapping (its digest is that of its compact
            form, keys in their order).
        name: for people; the default is ``tokenizers``.

    Raises:
        ConfigError: no JSON of a tokenizer.
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
            raise ConfigError("arguments", "tokenizer", f"found bytes that are not UTF-8 ({error})") from error
        with optional_import("tokenizers", "a tokenizer from a JSON file"):
            import tokenizers
        try:
            tokenizer = tokenizers.Tokenizer.from_str(self._json)
        except Exception as error:
            if type(error) not in (Exception, ValueError):  # tokenizers raises Exception itself, no class of its own
                raise
            detail = f"found JSON that makes no tokenizer ({error}), expected a tokenizer.json"
            raise ConfigError("arguments", "tokenizer", detail) from error
        padding = tokenizer.padding
        tokenizer.no_padding()
        tokenizer.no_truncation()
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ConfigError("arguments", "tokenizer", "found an empty vocabulary, expected a trained tokenizer")
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
            ConfigError: no such file, no regular one, one of more than 256 MiB, or no tokenizer.
            MissingExtraError: the extra ``text`` is not installed.
        """
        where = os.fspath(path)
        try:
            with open(where, "rb", opener=_open_at_once) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JSON_SIZE:
                    detail = f"found {where!r}, expected a regular file of up to {MAX_JSON_SIZE} bytes"
                    raise ConfigError("arguments", "tokenizer.file", detail)
                data = file.read(MAX_JSON_SIZE)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError("arguments", "tokenizer.file", f"{where!r} cannot be read: {error}") from error
        return cls(data, name=name)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special ones of the JSON's post-processor.

        Raises:
            EncodeError: a lone surrogate, which has no UTF-8 form.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _no_text(error) from error
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones left out."""
        return str(self._tokenizer.decode([int(i) for i in ids]))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(JSONTokenizer, name=self.name), (self._json,)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would block for ever before it is read


def _no_text(error: UnicodeEncodeError) -> EncodeError:
    return EncodeError(f"tokenizer: found a text without UTF-8 form ({error.reason}), expected no lone surrogates")


@dataclass(frozen=True, slots=True)
class TokenizerRef:
    """A tokenizer by its identity, with the tokenizer itself where it is at hand.

    Attributes:
        name: for people; not part of the identity's strength, but of its equality.
        sha256: 64 lower-case hex digits.
        tokenizer: None where only the identity is known, such as in a packed file's schema.
    """

    name: str
    sha256: str
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    @property
    def config(self) -> dict[str, str]:
        """The identity as JSON: what a packed file's schema holds."""
        return {"name": self.name, "sha256": self.sha256}

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text.

        Raises:
            EncodeError: the tokenizer is not at hand, or the text has no ids.
        """
        if self.tokenizer is None:
            found = f"text, and only the identity of tokenizer {self.name!r}"
            raise EncodeError(f"tokenizer: found {found}, expected the tokenizer with SHA-256 {self.sha256}")
        return self.tokenizer.encode(text)


def tokenizer_ref(setting: object) -> TokenizerRef:
    """Read a `tokenizer` setting.

    Args:
        setting: ``"bytes"``; ``{"file": path}`` or ``{"json": text or object}``, both with an optional ``name`` and an
            expected ``sha256``; ``{"name": …, "sha256": …}``, an identity without its tokenizer; a `Tokenizer`; or a
            reference already.

    Raises:
        ConfigError: anything else, a file that cannot be read, or one with another digest.
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
    raise ConfigError("arguments", "tokenizer", f"found {setting!r:.80}, expected {expected}")


def _ref_of_mapping(setting: Mapping[str, Any]) -> TokenizerRef:
    keys = set(setting)
    sources = keys & {"file", "json"}
    if not keys <= {"file", "json", "name", "sha256"} or len(sources) > 1 or (not sources and "sha256" not in keys):
        found = sorted(map(str, keys))
        raise ConfigError("arguments", "tokenizer", f"found keys {found}, expected file or json, or name and sha256")
    name, digest = setting.get("name", "tokenizers"), setting.get("sha256")
    _check_identity(name, digest if digest is not None or not sources else "0" * 64)
    if not sources:
        built_in = ByteTokenizer()
        is_built_in = (name, digest) == (built_in.name, built_in.sha256)
        return TokenizerRef(name, str(digest), built_in if is_built_in else None)
    if "file" in sources:
        if not isinstance(setting["file"], str | os.PathLike):
            raise ConfigError("arguments", "tokenizer.file", f"found {setting['file']!r:.80}, expected a path")
        tokenizer = JSONTokenizer.from_file(setting["file"], name=name)
    else:
        if not isinstance(setting["json"], str | Mapping):
            raise ConfigError("arguments", "tokenizer.json", f"found {setting['json']!r:.80}, expected JSON")
        tokenizer = JSONTokenizer(setting["json"], name=name)
    if digest not in (None, tokenizer.sha256):
        raise ConfigError("arguments", "tokenizer.sha256", f"found {tokenizer.sha256}, expected {digest}")
    return TokenizerRef(name, tokenizer.sha256, tokenizer)


def _check_identity(name: object, digest: object) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError("arguments", "tokenizer.name", f"found {name!r:.80}, expected a name")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ConfigError("arguments", "tokenizer.sha256", f"found {digest!r:.80}, expected 64 lower-case hex digits")
