"""Pairs of an image and its text, for CLIP and the like: pixels at training size, tokens, the text, a score.

`ImageField` encodes the image and `TokensField` the tokens; this module only brings images to the training size and
orders the parts. Tokens and text come first in the data, so that reading them touches no byte of the image.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError, FormatError
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.base import (
    JSON,
    Encoded,
    Field,
    Item,
    Locating,
    Out,
    Part,
    StoredPart,
    corrupt,
    decode_utf8,
    parse_json,
    truncated,
)
from mm_assets.fields.image import DEFAULT_MAX_PIXELS, ImageField, decode_drawn
from mm_assets.fields.image_crop import RandomCrop
from mm_assets.fields.image_resize import RESIZES, place, resize
from mm_assets.fields.parts import Path
from mm_assets.fields.plain import BytesField, TextField
from mm_assets.fields.scalar import ScalarField
from mm_assets.fields.shown import ShownFile, ShownPair, StoredBytes
from mm_assets.fields.tokens import TokensField
from mm_assets.media.content_types import Buffer
from mm_assets.summaries import ArrayValue, describe

__all__ = ["ImageText", "ImageTextPair", "ImageTextPairField"]

_NO_TEXT, _TOKENS_ONLY, _TEXT = 0, 1, 2
_TEXT_FIELD = TextField()
_STORED_SCORE = ScalarField("float32")
_MAX_SCORE: Any = float(np.finfo(np.float32).max)


class _StoredText(BytesField):
    """The text of a pair, without the number of code points that `TextField` stores."""

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> Any:
        """Return str."""
        return decode_utf8(super().decode(metadata, data))


_STORED_TEXT = _StoredText()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ImageText(ArrayValue):
    """An image and its text, to be packed.

    Attributes:
        image: (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) uint8, or an image file's bytes.
        text: str or its UTF-8 bytes; None where the image has no text.
        clip_score: how well they fit, as computed by a model; None where it is unknown.
    """

    image: npt.NDArray[np.uint8] | Buffer
    text: str | Buffer | None = None
    clip_score: float | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ImageTextPair(ArrayValue):
    """An image and its text, decoded.

    Attributes:
        image: (H, W, C) uint8.
        input_ids: (max_tokens,) int64, filled with the field's `pad_id`.
        attention_mask: (max_tokens,) int64, 1 where there is an id, 0 for padding. All 0 without a text.
        text: the text where it is stored, else None.
        clip_score: the score as float32 holds it, or None.
    """

    image: npt.NDArray[np.uint8]
    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    text: str | None
    clip_score: float | None


@dataclass(frozen=True, kw_only=True)
class ImageTextPairField(Field):
    """An image and its text.

    Value: `ImageText`, a tuple (image, text) or (image, text, clip_score), or a dict with these keys; the image as
    `ImageField` takes it. Text and score may be None: the image is there, its text is not, and has no tokens. Decodes
    to `ImageTextPair`. A batch, with `image_size` or `decode_size` set, is ``image`` (n, height, width, channels)
    uint8, ``input_ids`` and ``attention_mask`` (n, max_tokens) int64, and ``clip_score`` (n,) float32, NaN where there
    is none.

    Images are turned upright by their EXIF orientation, while encoding where they are encoded again.

    Attributes:
        encoding: of the image: ``keep``, ``jpeg`` or ``png``.
        quality: of JPEG, 1 to 100.
        subsampling: of JPEG, ``444`` or ``420``, as in `ImageField`.
        image_size: (height, width) to store at; needs an encoding other than ``keep``. None for each its own.
        resize: how an image of another shape comes to `image_size`. ``stretch`` does not keep its aspect ratio.
            ``crop`` takes the largest centred rectangle of the size's aspect ratio, to a whole pixel, and fills the
            size with it. ``pad`` makes the whole image fit, centred, between bars of `fill`. All shrink by pixel area
            and enlarge bilinearly.
        fill: value of the bars' channels, 0 to 255.
        channels: of the decoded image, 1, 3 or 4, or None for as many as the image has.
        icc: ``convert`` to sRGB or ``keep``, as in `ImageField`.
        max_pixels: of an image, before it is resized.
        tokenizer: as in `TokensField`; None where none is wanted: then only texts are stored, and no row has tokens.
        vocab_size: as in `TokensField`.
        max_tokens: ids of a row.
        truncate: as in `TokensField`.
        keep_start: as in `TokensField`.
        keep_end: as in `TokensField`.
        pad_id: as in `TokensField`.
        store_text: keep the text beside its tokens.
        decode_size: (height, width) of the decoded image, whatever is stored; this and the next three as in
            `ImageField`.
        decode_resize: how an image of another shape comes to `decode_size`.
        decode_fill: value of the bars' channels, 0 to 255.
        decode_mode: ``exact`` or ``fast``.
        decode_crop: a random crop, as in `ImageField`.
    """

    TYPE_ID: ClassVar[int] = 51
    VALUE_TYPE: ClassVar[type] = ImageTextPair
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [
            ("image", ImageField.metadata_type),
            ("tokens", TokensField.metadata_type),
            ("text_offset", "<u4"),
            ("image_offset", "<u4"),
            ("clip_score", "<f4"),
            ("text_kind", "u1"),
            ("_pad", "u1", (3,)),
        ]
    )
    TAKES_CONTENT: ClassVar[bool] = False
    LIMITS: ClassVar[tuple[str, ...]] = ("max_pixels",)
    EARLIER: ClassVar[Mapping[str, JSON]] = {"icc": "keep"}
    ADDED: ClassVar[tuple[str, ...]] = ("decode_crop",)
    PARTS: ClassVar[Mapping[str, Part]] = {"image": Part(needed=True), "text": Part(), "clip_score": Part()}

    encoding: str = "keep"
    quality: int = 95
    subsampling: str = "444"
    image_size: tuple[int, int] | None = None
    resize: str = "stretch"
    fill: int = 0
    channels: int | None = 3
    icc: str = "convert"
    max_pixels: int = DEFAULT_MAX_PIXELS
    tokenizer: Any = "bytes"
    vocab_size: int | None = None
    max_tokens: int = 77
    truncate: str = "right"
    keep_start: int | None = None
    keep_end: int | None = None
    pad_id: int | None = None
    store_text: bool = True
    decode_size: tuple[int, int] | None = None
    decode_resize: str = "stretch"
    decode_fill: int = 0
    decode_mode: str = "exact"
    decode_crop: RandomCrop | None = None

    def __post_init__(self) -> None:
        self._expect_choice("encoding", ("keep", "jpeg", "png"))
        self._expect_choice("resize", RESIZES)
        self._expect_int("fill", 0, 255)
        self._expect_bool("store_text")
        if self.tokenizer is None and not self.store_text:
            raise self._wrong_setting("store_text", "true, or a tokenizer: else nothing is kept of a text")
        if self.max_tokens is None:
            raise self._wrong_setting("max_tokens", "an integer: every row has that many")
        try:
            object.__setattr__(self, "image_size", self._image_field.size)
            object.__setattr__(self, "decode_size", self._image_field.decode_size)
            object.__setattr__(self, "decode_crop", self._image_field.decode_crop)
        except ConfigError as error:
            raise ConfigError(error.where, "image_size" if error.key == "size" else error.key, error.detail) from error
        tokens = self._tokens_field
        for name in ("tokenizer", "vocab_size", "keep_start", "keep_end", "pad_id"):  # what the tokenizer has settled
            object.__setattr__(self, name, getattr(tokens, name))

    @cached_property
    def _image_field(self) -> ImageField:
        return ImageField(size=self.image_size, orientation="apply", **self._settings_of(ImageField))

    @cached_property
    def _tokens_field(self) -> TokensField:
        return TokensField(**self._settings_of(TokensField))

    def _settings_of(self, inner: type[Field]) -> dict[str, Any]:
        """The settings that an inner field shares with this one, by their names."""
        own = {field.name for field in dataclasses.fields(self)}
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(inner) if one.name in own}

    @property
    def config(self) -> dict[str, JSON]:
        """All settings as JSON; of the tokenizer its identity."""
        return {**super().config, "tokenizer": self._tokens_field.config["tokenizer"]}

    def declared_config(self, given: Mapping[str, JSON]) -> dict[str, JSON]:
        """With the tokenizer as declared; see `TokensField`."""
        return {**self.config, "tokenizer": self._tokens_field.declared_config(given)["tokenizer"]}

    @property
    def value_layout(self) -> Mapping[str, ArraySpec] | None:
        """The arrays of a batch, where `image_size` or `decode_size`, and `channels`, are set."""
        image, tokens = self._image_field.value_layout, self._tokens_field.value_layout
        if image is None or tokens is None:
            return None
        return {"image": image, **tokens, "clip_score": ArraySpec((), np.dtype(np.float32))}

    @property
    def empty_value(self) -> Mapping[str, Any]:
        """The image, and `max_tokens` ids with their mask."""
        tokens = {name: np.empty(self.max_tokens, np.int64) for name in ("input_ids", "attention_mask")}
        return {"image": self._image_field.empty_value, **tokens}

    @property
    def decodes_in_parallel(self) -> bool:
        """As the images do."""
        return self._image_field.decodes_in_parallel

    def stored_part(self, path: Path) -> StoredPart | None:
        """The image, the tokens, the text or the score."""
        parts: Mapping[str | int, tuple[str, Field, Path]] = {
            "image": ("image", self._image_field, path[1:]),
            "input_ids": ("tokens", self._tokens_field, path),
            "attention_mask": ("tokens", self._tokens_field, path),
            "text": ("text", _STORED_TEXT, path[1:]),
            "clip_score": ("clip_score", _STORED_SCORE, path[1:]),
        }
        if path[0] not in parts:
            return None
        payload, field, rest = parts[path[0]]
        return StoredPart(payload, field, rest, partial(self._locate, payload))

    def _locate(self, payload: str, metadata: Buffer, size: int) -> Locating:
        yield from ()  # the record says where each part is
        image, tokens, text_offset, image_offset, score, text_kind = self._open_record(metadata, size)
        if payload == "image":
            return image, image_offset, size - image_offset
        if payload == "clip_score":
            return None if math.isnan(score) else (_STORED_SCORE._pack_record(score), 0, 0)
        if payload == "tokens":
            return tokens, 0, text_offset
        text_size = image_offset - text_offset
        return (_STORED_TEXT._pack_record(text_size), text_offset, text_size) if text_kind == _TEXT else None

    def _open_record(self, metadata: Buffer | np.void, size: int) -> tuple[Any, ...]:
        """The values of a record whose data has a size, checked."""
        record = self._unpack_record(metadata)
        _, _, text_offset, image_offset, clip_score, text_kind = record
        if not text_offset <= image_offset <= size:
            found = (text_offset, image_offset, size)
            raise truncated("the parts of a pair lie outside its data", found=found, expected="increasing ends")
        if text_kind not in (_NO_TEXT, _TOKENS_ONLY, _TEXT):
            raise corrupt("text is of an unknown kind", found=text_kind, expected="0, 1 or 2")
        if text_kind != _TEXT and text_offset != image_offset:
            raise corrupt("a text is stored that the record denies", found=image_offset - text_offset, expected=0)
        if math.isinf(clip_score):
            raise corrupt("score is infinite", found=clip_score, expected="a finite one, or NaN for none")
        return record

    def keeps_part(self, part: str) -> bool:
        """The image with the encoding ``keep``, the text where it is stored."""
        return (part == "image" and self._image_field.keeps_bytes) or (part == "text" and self.store_text)

    def assemble(self, contents: Mapping[str, Any]) -> ImageText:
        """Make a value of an image's bytes, and a text and a number where there are any."""
        self._expect_parts(contents)
        score = contents.get("clip_score")
        if isinstance(score, str | Buffer):
            text = score if isinstance(score, str) else str(score, "utf-8", "replace")
            score = self._within("its clip_score", parse_json, text, "a number as text")
        return ImageText(contents["image"], contents.get("text"), score)

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: ImageText | tuple[Any, ...] | Mapping[str, Any]) -> Encoded:
        """Encode an image with its text and score."""
        pair = self._pair_of(value)
        score = self._score_of(pair.clip_score)
        text = self._text_of(pair.text)
        tokens = self._tokens_of(text)
        image = self._within("its image", lambda: self._image_field.encode(self._fitted(pair.image)))
        stored = text if text is not None and self.store_text else b""
        kind = _NO_TEXT if text is None else _TEXT if self.store_text else _TOKENS_ONLY
        text_offset = len(tokens.data)
        image_offset = text_offset + len(stored)
        self._expect_data_size(image_offset + len(image.data))
        record = self._pack_record(image.metadata, tokens.metadata, text_offset, image_offset, score, kind)
        return Encoded(record, b"".join([tokens.data, stored, image.data]))

    def check(self, value: ImageText | tuple[Any, ...] | Mapping[str, Any]) -> None:
        """Read the header of an image that is stored unchanged; encode other images, and the text."""
        pair = self._pair_of(value)
        self._score_of(pair.clip_score)
        self._tokens_of(self._text_of(pair.text))
        self._within("its image", lambda: self._image_field.check(self._fitted(pair.image)))

    def _pair_of(self, value: object) -> ImageText:
        if isinstance(value, Mapping) and "image" in value and set(value) <= set(self.PARTS):
            value = ImageText(**value)
        elif isinstance(value, tuple) and len(value) in (2, 3):
            value = ImageText(*value)
        if not isinstance(value, ImageText):
            raise self._wrong_value(value, "ImageText, (image, text[, clip_score]) or a dict with these keys")
        return value

    def _score_of(self, score: Any) -> float:
        """The score as float32; NaN for none."""
        if score is None:
            return math.nan
        if isinstance(score, bool) or not isinstance(score, int | float | np.integer | np.floating):
            raise self._wrong_content(f"clip_score {describe(score)}", "a number")
        if not abs(score) <= _MAX_SCORE:  # NaN means no score, and cannot be given as one
            raise self._wrong_content(f"clip_score {describe(score)}", "a finite number that float32 holds")
        return float(score)

    def _text_of(self, text: str | Buffer | None) -> bytes | None:
        return None if text is None else bytes(self._within("its text", _TEXT_FIELD.encode, text).data)

    def _tokens_of(self, text: bytes | None) -> Encoded:
        if text is None or self.tokenizer is None:
            return self._tokens_field.encode([])
        return self._within("its text", self._tokens_field.encode, str(text, "utf-8"))

    def _fitted(self, image: object) -> Any:
        """The image for `ImageField`: cropped or padded to the aspect ratio, else as it is."""
        if self.image_size is None or self.resize == "stretch":
            return image
        if isinstance(image, Buffer):
            source = ImageField(channels=self.channels, icc=self.icc, max_pixels=self.max_pixels)
            try:
                image = source.decode(*source.encode(image))
            except FormatError as error:
                raise self._wrong_content(f"an image that cannot be decoded ({error})", "an image") from error
        if not isinstance(image, np.ndarray) or image.ndim not in (2, 3) or 0 in image.shape:
            return image  # refused by the image's field, which has the words for it
        self._image_field.check(image[:1, :1])  # its dtype and channels, before anything is computed
        if image.shape[0] * image.shape[1] > self.max_pixels:
            raise self._too_large(describe(image), f"at most {self.max_pixels} pixels", "max_pixels")
        pixels = image[:, :, np.newaxis] if image.ndim == 2 else image
        if self.resize == "pad":
            return resize(pixels, self.image_size, policy="pad", fill=self.fill)
        return place((pixels.shape[0], pixels.shape[1]), self.image_size, "crop")[0].of(pixels)

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> ImageTextPair:
        """Return `ImageTextPair`."""
        return self._decode(metadata, data, None)

    def _decode(self, metadata: Buffer | np.void, data: Buffer, key: int | None) -> ImageTextPair:
        pair = _Pair(self, metadata, data)
        rows = {name: np.empty(self.max_tokens, dtype=np.int64) for name in ("input_ids", "attention_mask")}
        self._tokens_field._decode_into(pair.token_record, pair.tokens, rows)
        score = None if math.isnan(pair.clip_score) else pair.clip_score
        pixels = self._image_field.decode_one(pair.image_record, pair.image, key)
        return ImageTextPair(pixels, rows["input_ids"], rows["attention_mask"], pair.text(), score)

    def check_decodable(self, metadata: Buffer | np.void, data: Buffer) -> None:
        """Judge the image as its field does, and decode the rest."""
        pair = _Pair(self, metadata, data)
        self._tokens_field.decode(pair.token_record, pair.tokens)
        pair.text()
        self._image_field.check_decodable(pair.image_record, pair.image)

    @property
    def draws(self) -> bool:
        """With a `decode_crop`."""
        return self._image_field.draws

    def decode_batch(
        self,
        records: npt.NDArray[np.uint8],
        datas: Sequence[Buffer | None],
        out: Out | None = None,
        *,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """As `Field.decode_batch`; random crops are drawn from `keys`, (n,) uint64."""
        if keys is None:
            return super().decode_batch(records, datas, out)
        return decode_drawn(self, records, datas, out, keys, self._decode, self._fill)

    def _decode_into(self, metadata: Buffer, data: Buffer, target: Mapping[str, npt.NDArray[Any]]) -> None:
        self._fill(metadata, data, target, None)

    def _fill(self, metadata: Buffer, data: Buffer, target: Mapping[str, npt.NDArray[Any]], key: int | None) -> None:
        pair = _Pair(self, metadata, data)
        self._tokens_field._decode_into(pair.token_record, pair.tokens, target)
        self._image_field.decode_into(pair.image_record, pair.image, target["image"], key)
        target["clip_score"][...] = pair.clip_score

    def tokens(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[np.int64]:
        """Return (num_tokens,) int64, at most `max_tokens`, without reading the image; errors as `decode`."""
        pair = _Pair(self, metadata, data)
        ids: npt.NDArray[np.int64] = self._tokens_field.decode(pair.token_record, pair.tokens)
        return ids

    def text(self, metadata: Buffer | np.void, data: Buffer) -> str | None:
        """Return the text where it is stored, without reading the image; errors as `decode`."""
        return _Pair(self, metadata, data).text()

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownPair:
        """The image with its text, tokens and score."""
        data = stored.whole()
        pair = _Pair(self, metadata, data)
        return ShownPair(
            image=ShownFile(offset=len(data) - len(pair.image), size=len(pair.image)),
            text=pair.text(),
            tokens=self._tokens_field.shown_ids(pair.token_record, pair.tokens),
            score=None if math.isnan(pair.clip_score) else pair.clip_score,
        )

    def items(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[Item]:
        """Return the image, the text (its ids where the text itself is not stored), and the score as JSON text."""
        pair = _Pair(self, metadata, data)
        yield Item("image", 0, pair.image)
        if pair.text_kind != _NO_TEXT:
            yield Item("text", 0, pair.stored_text if pair.text_kind == _TEXT else pair.tokens)
        if not math.isnan(pair.clip_score):
            yield Item("clip_score", 0, repr(pair.clip_score).encode("ascii"))


class _Pair:
    """The parts of a payload, checked."""

    __slots__ = ("clip_score", "image", "image_record", "stored_text", "text_kind", "token_record", "tokens")

    def __init__(self, field: ImageTextPairField, metadata: Buffer | np.void, data: Buffer) -> None:
        view = as_bytes_view(data)
        record = field._open_record(metadata, len(view))
        self.image_record, self.token_record, text_offset, image_offset, self.clip_score, self.text_kind = record
        self.tokens, self.stored_text = view[:text_offset], view[text_offset:image_offset]
        self.image = view[image_offset:]

    def text(self) -> str | None:
        return decode_utf8(self.stored_text) if self.text_kind == _TEXT else None
