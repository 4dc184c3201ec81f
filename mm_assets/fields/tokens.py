"""Token ids: text is tokenized once, while packing. Decoding gives ids, padded and masked in batches.

Decoding never needs the tokenizer: the record says how wide an id is, the configuration how ids are padded and
truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, LimitError
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.base import (
    JSON,
    PAYLOAD,
    Encoded,
    Field,
    are_equal,
    config_error,
    corrupt,
    is_int,
    join_arrays,
    split_rows,
    stored_array,
    truncated,
)
from mm_assets.fields.ndarray import array_of_npy, is_npy
from mm_assets.fields.shown import ShownTokens, StoredBytes
from mm_assets.media.content_types import Buffer
from mm_assets.media.tokenizers import Tokenizer, TokenizerRef, tokenizer_ref
from mm_assets.summaries import describe

__all__ = ["TokensField"]

_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by width in bytes
_NARROW_VOCAB = 2**16  # the largest whose ids all fit u16
_MAX_VOCAB = 2**32
_MAX_TOKENS = (2**32 - 1) // 4  # a container's payload size is uint32, an id up to 4 bytes
_DECODED = ("int64", "int32", "uint32", "uint16")
_TRUNCATE = ("right", "left", "error")
_MAX_MASKED = 128  # ids of a row up to which one index of all rows is faster than an assignment for each
_WIDTH = 8  # the byte of the record that has it; pads follow


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
    CONTENT_KIND: ClassVar[str] = "array"
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [("num_tokens", "<u4"), ("num_cut", "<u4"), ("width", "u1"), ("_pad", "u1", (7,))]
    )

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
        self._expect_int("vocab_size", 1, _MAX_VOCAB)
        if at_hand is not None and self._vocab < at_hand.vocab_size:
            raise self._wrong_setting("vocab_size", f"at least the tokenizer's {at_hand.vocab_size}")
        self._expect_choice("decoded", _DECODED)
        limits = np.iinfo(self.decoded)
        # Without a vocabulary nothing is known of the ids, and decoding checks them against `decoded` instead.
        if _MAX_VOCAB > self._vocab > int(limits.max) + 1:
            raise self._wrong_setting("decoded", f"a dtype that holds ids up to {self._vocab - 1}")
        if not is_int(self.pad_id, int(limits.min), int(limits.max)):
            raise self._wrong_setting("pad_id", f"an integer that fits {self.decoded}")
        self._expect_int("max_tokens", 1, _MAX_TOKENS, optional=True)
        self._expect_choice("truncate", _TRUNCATE)
        for name in ("keep_start", "keep_end"):
            if not is_int(getattr(self, name), 0, self.max_tokens or _MAX_TOKENS):
                raise self._wrong_setting(name, "an integer from 0 to max_tokens")

    @property
    def _vocab(self) -> int:
        return int(self.vocab_size or 0)

    @cached_property
    def _id_limit(self) -> int:
        """Every stored id is below it."""
        return min(self._vocab, int(np.iinfo(self.decoded).max) + 1)

    @property
    def _width(self) -> int:
        return 2 if self._vocab <= _NARROW_VOCAB else 4

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
    def config(self) -> dict[str, JSON]:
        """All settings as JSON; of the tokenizer its identity, so that equal ones in other places are equal here."""
        tokenizer: TokenizerRef | None = self.tokenizer
        return {**super().config, "tokenizer": tokenizer.config if tokenizer is not None else None}

    def declared_config(self, given: Mapping[str, JSON]) -> dict[str, JSON]:
        """With the tokenizer as declared: `config` has its identity only, not its file."""
        return {**self.config, "tokenizer": given.get("tokenizer", self.config["tokenizer"])}

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: str | Buffer | npt.NDArray[Any] | Sequence[int]) -> Encoded:
        """Encode ids, or a text where a tokenizer is loaded."""
        ids = self._ids_of(value)
        kept = self._cut(ids)
        if len(kept) > _MAX_TOKENS:
            raise self._wrong_content(f"{len(kept)} ids", f"at most {_MAX_TOKENS}")
        width = self._width
        record = self._pack_record(len(kept), min(len(ids) - len(kept), 2**32 - 1), width)
        return Encoded(record, np.ascontiguousarray(kept, dtype=_DTYPES[width]).tobytes())

    def _ids_of(self, value: object) -> npt.NDArray[Any]:
        """The ids of a value, checked against the vocabulary."""
        if is_npy(value):  # no UTF-8 begins so: a text is never taken for an array
            value = self._within("", array_of_npy, value)
        if isinstance(value, str | Buffer):
            value = self._tokenize(value)
        if isinstance(value, list | tuple):
            value = self._array_of(value)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
            raise self._wrong_value(value, "a one-dimensional array or a list of integers, or text")
        if value.size and not (int(value.min()) >= 0 and int(value.max()) < self._vocab):
            found = f"ids from {int(value.min())} to {int(value.max())}"
            raise self._wrong_content(found, f"0 to {self._vocab - 1} (vocab_size)")
        return value

    def _tokenize(self, value: str | Buffer) -> Sequence[int]:
        if self.tokenizer is None:
            raise self._wrong_value(value, "ids: text needs a tokenizer, and this field has none")
        try:
            text = value if isinstance(value, str) else str(value, "utf-8")
            return list(self.tokenizer.encode(text))
        except (UnicodeDecodeError, EncodeError) as error:
            raise self._wrong_content(f"{describe(value)} ({error})", "text with a tokenizer at hand") from error

    def _array_of(self, ids: Sequence[object]) -> npt.NDArray[Any]:
        wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int | np.integer)), None)
        if wrong is not None or None in ids:
            raise self._wrong_content(f"{describe(wrong)} among the ids", "integers")
        try:
            return np.array(ids, dtype=np.int64)
        except OverflowError as error:
            raise self._wrong_content("an id of more than 64 bits", f"0 to {self._vocab - 1} (vocab_size)") from error

    def _cut(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The ids that stay, at most `max_tokens`."""
        limit = self.max_tokens
        if limit is None or len(ids) <= limit:
            return ids
        if self.truncate == "error":
            raise self._too_large(f"{len(ids)} ids", f"at most {limit}, or another truncate", "max_tokens")
        num_first, num_last = self._kept_ends()
        return np.concatenate([ids[:num_first], ids[len(ids) - num_last :]])

    def _kept_ends(self) -> tuple[int, int]:
        """How many ids stay before and after those that are removed of a row that is too long."""
        limit = self.max_tokens or 0
        # `keep` of them are beyond the removed ids; the others are those at the end that is kept.
        keep = int((self.keep_end if self.truncate == "right" else self.keep_start) or 0)
        return (limit - keep, keep) if self.truncate == "right" else (keep, limit - keep)

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[Any]:
        """Return (num_tokens,) ids; a read-only view where `decoded` is how they are stored."""
        return self._stored(metadata, data).astype(self.decoded, copy=False)

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownTokens:
        """The ids, and their text where the tokenizer is loaded."""
        return self.shown_ids(metadata, stored.whole())

    def shown_ids(self, metadata: Buffer | np.void, data: Buffer) -> ShownTokens:
        """As `shown`, of bytes at hand."""
        reference: TokenizerRef | None = self.tokenizer
        text_of = None if reference is None else getattr(reference.tokenizer, "decode", None)
        name = "" if reference is None else reference.name
        return ShownTokens(ids=self._stored(metadata, data), text_of=text_of, tokenizer=name)

    def _stored(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[Any]:
        """The ids as they are stored, checked, truncated to `max_tokens`."""
        num_tokens, _, width = self._unpack_record(metadata)
        if width not in _DTYPES:
            raise corrupt("ids are of an unknown width", found=width, expected="2 or 4 bytes")
        view = as_bytes_view(data)
        if len(view) != num_tokens * width:
            raise truncated("ids are not as many as their record says", found=len(view), expected=num_tokens * width)
        ids = stored_array(view, _DTYPES[width], (num_tokens,))
        limit = self._id_limit
        if num_tokens and (highest := int(ids.max())) >= limit:
            raise corrupt("an id is outside the vocabulary", found=highest, expected=f"0 to {limit - 1}")
        try:
            return self._cut(ids)
        except LimitError as error:  # truncate is "error": the payload is another field's
            raise error.moved(PAYLOAD) from error

    def _decode_together(self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer]) -> Any:
        """Ids of one width, of which none is outside the vocabulary."""
        width = int(records[0, _WIDTH])
        if width not in _DTYPES or not are_equal(records[:, _WIDTH:]):
            return None
        counts = np.ascontiguousarray(records[:, :4]).view("<u4")[:, 0].astype(np.int64)
        joined = join_arrays(datas, _DTYPES[width], (counts * width).tolist())
        if joined is None or int(joined.max(initial=0)) >= self._id_limit:
            return None
        if self.max_tokens is not None and int(counts.max()) > self.max_tokens:
            if self.truncate == "error":
                return None
            joined, counts = self._cut_rows(joined, counts)
        ids = joined.astype(self.decoded, copy=False)
        if self.max_tokens is None:
            return split_rows(ids, counts.tolist())
        mask = np.arange(self.max_tokens) < counts[:, np.newaxis]
        input_ids = np.full(mask.shape, self.pad_id, self.decoded)
        if self.max_tokens <= _MAX_MASKED:
            input_ids[mask] = ids
        else:
            for row, some in zip(input_ids, split_rows(ids, counts.tolist()), strict=True):
                row[: len(some)] = some
        return {"input_ids": input_ids, "attention_mask": mask}

    def _cut_rows(
        self, ids: npt.NDArray[Any], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """The ids that stay of joined rows, as `_cut` leaves them, and how many of each row."""
        num_first, num_last = self._kept_ends()
        places = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Of a row that is short enough these overlap, or meet.
        stays = (places < num_first) | (places >= np.repeat(counts, counts) - num_last)
        return ids[stays], np.minimum(counts, num_first + num_last)

    def _decode_into(self, metadata: Buffer, data: Buffer, target: Mapping[str, npt.NDArray[Any]]) -> None:
        ids = self._stored(metadata, data)
        row, mask = target["input_ids"], target["attention_mask"]
        row[: len(ids)] = ids
        row[len(ids) :] = self.pad_id
        mask[: len(ids)] = 1
        mask[len(ids) :] = 0
