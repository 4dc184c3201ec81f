"""Token ids: text is tokenized once, while packing. Decoding gives ids, padded and masked in batches.

Decoding never needs the tokenizer: the record says how wide an id is, the configuration how ids are padded and
truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.fields.arrow import list_column, list_type
from mm_assets.fields.base import (
    JSON,
    ArraySpec,
    Encoded,
    Field,
    as_bytes_view,
    config_error,
    corrupt,
    describe,
    is_int,
    truncated,
    wrong_content,
    wrong_value,
)
from mm_assets.fields.ndarray import NDArrayField
from mm_assets.media.content_types import Buffer
from mm_assets.media.tokenizers import Tokenizer, TokenizerRef, tokenizer_ref

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TokensField"]

# docs/fields.md, type 20
_RECORD = np.dtype([("num_tokens", "<u4"), ("num_cut", "<u4"), ("width", "u1"), ("_pad", "u1", (7,))])
_NO_PAD = (0,) * 7

_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by width in bytes
_NARROW_VOCAB = 2**16  # the largest whose ids all fit u16
_MAX_VOCAB = 2**32
_MAX_TOKENS = (2**32 - 1) // 4  # a container's payload size is uint32, an id up to 4 bytes
_DECODED = ("int64", "int32", "uint32", "uint16")
_TRUNCATE = ("right", "left", "error")
_NPY_MAGIC = b"\x93NUMPY"  # no UTF-8 begins so: a text is never taken for an array


@dataclass(frozen=True, kw_only=True)
class TokensField(Field):
    """Token ids of a text.

    Value: a one-dimensional array of integers, a list or tuple of them, the bytes of such an ``.npy`` file; or, where
    a tokenizer is loaded, str or its UTF-8 bytes. Decodes to (num_tokens,) ids, as many as are stored. In a batch,
    with `max_tokens` set: ``input_ids`` (n, max_tokens), filled with `pad_id`, and ``attention_mask`` (n, max_tokens)
    int64, 1 where there is an id.

    A value longer than `max_tokens` is truncated when it is encoded, and the record has the number of ids that were
    removed. A payload of more ids, read by a field with a smaller `max_tokens`, is truncated in the same way.

    Attributes:
        vocab_size: every id is below it; None for the tokenizer's, and without one 2**32. Up to 65,536 an id takes two
            bytes, else four.
        tokenizer: what `mm_assets.media.tokenizers.tokenizer_ref` takes, or None. Only its identity goes into the
            configuration.
        max_tokens: ids that a value has at most, and a row of a batch exactly. None for any number, and lists in
            batches.
        truncate: ``right`` removes ids at the end, ``left`` at the start, ``error`` refuses a value longer than
            `max_tokens`.
        keep_start: ids at the start that are never removed; None for the special ones that the tokenizer puts there,
            without a tokenizer 0. It matters to ``left``.
        keep_end: likewise at the end: CLIP's end of text stays last. It matters to ``right``.
        pad_id: what fills a row; None for the tokenizer's, and 0 where it has none. It may lie outside the vocabulary
            (-100 for labels).
        decoded: dtype of decoded ids: ``int64``, ``int32``, ``uint32`` or ``uint16``.
    """

    TYPE_ID: ClassVar[int] = 20

    vocab_size: int | None = None
    tokenizer: Any = None
    max_tokens: int | None = None
    truncate: str = "right"
    keep_start: int | None = None
    keep_end: int | None = None
    pad_id: int | None = None
    decoded: str = "int64"

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", tokenizer_ref(self.tokenizer))
        at_hand: Tokenizer | None = self.tokenizer.tokenizer if self.tokenizer is not None else None
        if self.tokenizer is not None and at_hand is None and self.vocab_size is None:
            raise config_error("vocab_size", None, "an integer: of this tokenizer only the identity is known")
        # The tokenizer's defaults are taken over here, so that the configuration no longer needs it.
        defaults = {"vocab_size": _MAX_VOCAB, "keep_start": 0, "keep_end": 0, "pad_id": 0}
        if at_hand is not None:
            defaults = {
                "vocab_size": at_hand.vocab_size,
                "keep_start": at_hand.num_start_ids,
                "keep_end": at_hand.num_end_ids,
                "pad_id": at_hand.pad_id or 0,
            }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if not is_int(self.vocab_size, 1, _MAX_VOCAB):
            raise config_error("vocab_size", self.vocab_size, f"an integer from 1 to {_MAX_VOCAB}")
        if at_hand is not None and self._vocab < at_hand.vocab_size:
            raise config_error("vocab_size", self.vocab_size, f"at least the tokenizer's {at_hand.vocab_size}")
        if self.decoded not in _DECODED:
            raise config_error("decoded", self.decoded, f"one of {', '.join(_DECODED)}")
        limits = np.iinfo(self.decoded)
        # Without a vocabulary nothing is known of the ids, and decoding checks them against `decoded` instead.
        if _MAX_VOCAB > self._vocab > int(limits.max) + 1:
            raise config_error("decoded", self.decoded, f"a dtype that holds ids up to {self._vocab - 1}")
        if not is_int(self.pad_id, int(limits.min), int(limits.max)):
            raise config_error("pad_id", self.pad_id, f"an integer that fits {self.decoded}")
        if self.max_tokens is not None and not is_int(self.max_tokens, 1, _MAX_TOKENS):
            raise config_error("max_tokens", self.max_tokens, f"an integer from 1 to {_MAX_TOKENS}, or None")
        if self.truncate not in _TRUNCATE:
            raise config_error("truncate", self.truncate, f"one of {', '.join(_TRUNCATE)}")
        for name in ("keep_start", "keep_end"):
            if not is_int(getattr(self, name), 0, self.max_tokens or _MAX_TOKENS):
                raise config_error(name, getattr(self, name), "an integer from 0 to max_tokens")

    @property
    def _vocab(self) -> int:
        return int(self.vocab_size or 0)

    @property
    def _width(self) -> int:
        return 2 if self._vocab <= _NARROW_VOCAB else 4

    @property
    def metadata_type(self) -> np.dtype[np.void]:
        """The metadata record, 16 bytes."""
        return _RECORD

    @property
    def value_layout(self) -> Mapping[str, ArraySpec] | None:
        """``input_ids`` and ``attention_mask``, where `max_tokens` is set."""
        if self.max_tokens is None:
            return None
        return {
            "input_ids": ArraySpec((self.max_tokens,), np.dtype(self.decoded)),
            "attention_mask": ArraySpec((self.max_tokens,), np.dtype(np.int64)),
        }

    @property
    def _element(self) -> ArraySpec:
        return ArraySpec((), np.dtype(self.decoded))

    @property
    def arrow_type(self) -> pa.DataType:
        """A list of ids, without padding."""
        return list_type(self._element)

    def to_arrow(self, values: Sequence[Any], datas: Sequence[Buffer | None]) -> pa.Array | pa.ChunkedArray:
        """A column of lists of ids."""
        return list_column(values, self._element)

    @property
    def config(self) -> dict[str, JSON]:
        """All settings as JSON; of the tokenizer its identity, so that equal ones in other places are equal here."""
        tokenizer: TokenizerRef | None = self.tokenizer
        return {**super().config, "tokenizer": tokenizer.config if tokenizer is not None else None}

    def declared_config(self, given: Mapping[str, JSON]) -> dict[str, JSON]:
        """With the tokenizer as declared: `config` has its identity only, not its file."""
        return {**self.config, "tokenizer": given.get("tokenizer", self.config["tokenizer"])}

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: str | Buffer | npt.NDArray[Any] | Sequence[int]) -> Encoded:
        """Take ids, or a text where a tokenizer is loaded."""
        ids = self._ids_of(value)
        kept = self._cut(ids)
        if len(kept) > _MAX_TOKENS:
            raise wrong_content(self, f"{len(kept)} ids", f"at most {_MAX_TOKENS}")
        width = self._width
        record = self._pack_record(len(kept), min(len(ids) - len(kept), 2**32 - 1), width, _NO_PAD)
        return Encoded(record, np.ascontiguousarray(kept, dtype=_DTYPES[width]).tobytes())

    def _ids_of(self, value: object) -> npt.NDArray[Any]:
        """The ids of a value, checked against the vocabulary."""
        if isinstance(value, bytes | bytearray | memoryview) and bytes(as_bytes_view(value)[:6]) == _NPY_MAGIC:
            npy = NDArrayField()
            try:
                value = npy.decode(*npy.encode(value))
            except EncodeError as error:
                raise wrong_content(self, f".npy bytes ({error})", "an array of ids") from error
        if isinstance(value, str | bytes | bytearray | memoryview):
            value = self._tokenize(value)
        if isinstance(value, list | tuple):
            value = self._array_of(value)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
            raise wrong_value(self, value, "a one-dimensional array or a list of integers, or text")
        if value.size and not (int(value.min()) >= 0 and int(value.max()) < self._vocab):
            found = f"ids from {int(value.min())} to {int(value.max())}"
            raise wrong_content(self, found, f"0 to {self._vocab - 1} (vocab_size)")
        return value

    def _tokenize(self, value: str | Buffer) -> Sequence[int]:
        if self.tokenizer is None:
            raise wrong_value(self, value, "ids: text needs a tokenizer, and this field has none")
        try:
            text = value if isinstance(value, str) else str(value, "utf-8")
            return list(self.tokenizer.encode(text))
        except (UnicodeDecodeError, EncodeError) as error:
            raise wrong_content(self, f"{describe(value)} ({error})", "text with a tokenizer at hand") from error

    def _array_of(self, ids: Sequence[object]) -> npt.NDArray[Any]:
        wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int | np.integer)), None)
        if wrong is not None or None in ids:
            raise wrong_content(self, f"{describe(wrong)} among the ids", "integers")
        try:
            return np.array(ids, dtype=np.int64)
        except OverflowError as error:
            raise wrong_content(self, "an id past 64 bits", f"0 to {self._vocab - 1} (vocab_size)") from error

    def _cut(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The ids that stay, at most `max_tokens`."""
        limit = self.max_tokens
        if limit is None or len(ids) <= limit:
            return ids
        if self.truncate == "error":
            raise wrong_content(self, f"{len(ids)} ids", f"at most {limit} (max_tokens), or another truncate")
        # `keep` of them are beyond the removed ids; the others are those at the end that is kept.
        keep = int((self.keep_end if self.truncate == "right" else self.keep_start) or 0)
        head = limit - keep if self.truncate == "right" else keep
        return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[Any]:
        """Give (num_tokens,) ids; a read-only view where `decoded` is how they are stored."""
        ids = self._stored(metadata, data)
        if ids.dtype != np.dtype(self.decoded):
            return ids.astype(self.decoded)
        ids.flags.writeable = False
        return ids

    def num_tokens(self, metadata: Buffer | np.void) -> tuple[int, int]:
        """Give (ids that are stored, ids that were removed when it was encoded), from the record alone."""
        num_tokens, num_cut, _, _ = self._unpack_record(metadata)
        return num_tokens, num_cut

    def _stored(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[Any]:
        """The ids as they are stored, checked, truncated to `max_tokens`."""
        num_tokens, _, width, _ = self._unpack_record(metadata)
        if width not in _DTYPES:
            raise corrupt("ids are of an unknown width", found=width, expected="2 or 4 bytes")
        view = as_bytes_view(data)
        if len(view) != num_tokens * width:
            raise truncated("ids are not as many as their record says", found=len(view), expected=num_tokens * width)
        ids: npt.NDArray[Any] = np.frombuffer(view, dtype=_DTYPES[width]) if num_tokens else np.empty(0, "<u2")
        limit = min(self._vocab, int(np.iinfo(self.decoded).max) + 1)
        if num_tokens and (highest := int(ids.max())) >= limit:
            raise corrupt("an id is outside the vocabulary", found=highest, expected=f"0 to {limit - 1}")
        try:
            return self._cut(ids)
        except EncodeError as error:  # truncate is "error": the payload is another field's
            raise corrupt("there are too many ids", found=num_tokens, expected=self.max_tokens) from error

    def _decode_into_several(self, metadata: Buffer, data: Buffer, targets: Mapping[str, npt.NDArray[Any]]) -> None:
        ids = self._stored(metadata, data)
        row, mask = targets["input_ids"], targets["attention_mask"]
        row[: len(ids)] = ids
        row[len(ids) :] = self.pad_id
        mask[: len(ids)] = 1
        mask[len(ids) :] = 0
