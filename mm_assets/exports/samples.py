"""Turns the samples of a dataset into files from which the same samples can be packed again.

The stored bytes of files are copied. A file has the name that the pipeline listed for it, else one that follows from
its modality and its content. The JSON is the packed one; its lists of texts and images are rewritten if they do not
match the texts and images of the sample.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.dataset import Dataset
from mm_assets.dataset.decoding import locate
from mm_assets.display.item import Content
from mm_assets.errors import EncodeError, FormatError, LimitError, MediaError
from mm_assets.exports.base import ExportColumn, ExportFile, ExportSample
from mm_assets.fields import Field, ImageField
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.base import corrupt
from mm_assets.fields.shown import ShownFile, ShownMap, ShownPair, ShownSamples, ShownTokens, ShownValue
from mm_assets.fields.timed_text import TimedSegment
from mm_assets.formats import Payload
from mm_assets.json_text import dump_json, parse_json
from mm_assets.media.content_types import Buffer, extension_of_content_type, sniff_content_type
from mm_assets.media.subtitles import parse_subtitles

__all__ = ["SampleFiles", "Transcoding", "member_key"]

BATCH_SAMPLES = 64
TEXTS, IMAGES = "texts", "images"  # keys of the lists in the JSON of an interleaved sample
_KINDS = frozenset({"image", "text", "audio", "video", "clip", "array", "midi", "binary", "document", "metadata"})
"""Modality names that only repeat the kind of their content; the names of their files have no role."""
_ESCAPED = re.compile(r"[%\\\x00-\x1f\x7f]|(?:(?<=/)|^)\.+(?=/)|\.(?=[^/]*$)|/(?=/|$)|^/")


def member_key(sample_id: str) -> str:
    """Returns a sample's id as a key for names of members, in which some characters have another meaning.

    Dots in the base name, folders named by dots only, leading, trailing and repeated slashes, control characters,
    backslashes and ``%`` become ``%`` and two digits; `urllib.parse.unquote` restores the id.
    """
    return _ESCAPED.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), sample_id) or "%"


class Transcoding(NamedTuple):
    """Settings for images that are encoded again.

    Attributes:
        format: ``jpeg`` or ``png``.
        quality: JPEG quality, 1 to 100.
    """

    format: str
    quality: int = 95


class _Piece(NamedTuple):
    """A part of a payload that becomes one file.

    Attributes:
        part: name in the field's `PARTS`, or "".
        position: position among the items of a sequence or part; else 0.
        extension: extension of the file.
        content: the bytes, or an array.
        is_transcoded: whether it is an image that was encoded again.
    """

    part: str
    position: int
    extension: str
    content: Buffer | npt.NDArray[Any]
    is_transcoded: bool = False


class _Row(NamedTuple):
    """A content row in the packed modality whose `take` is "listing"."""

    modality: str
    part: str
    suffix: str | None


class _Column(NamedTuple):
    """A part of a packed modality, and the column that it is exported to."""

    modality: str
    part: str
    export: ExportColumn


class SampleFiles:
    """Reads the samples of a dataset, each as an `ExportSample`.

    Args:
        dataset: the dataset or view.
        transcoding: settings to encode images again; None copies them.
        only: names of the columns to read; None reads all.

    Attributes:
        columns: the columns of every sample.

    Raises:
        ConfigError: the transcoding is unknown.
    """

    def __init__(
        self, dataset: Dataset, transcoding: Transcoding | None = None, *, only: Container[str] | None = None
    ) -> None:
        self._dataset = dataset
        self._fields = dataset.fields
        plan = {} if dataset.manifest is None else dataset.manifest.schema.get("pack", {})
        plans = {one["name"]: one for one in plan.get("modalities", ()) if one["name"] in dataset.names}
        takes = {name: plans.get(name, {}).get("take", "") for name in dataset.names}
        self._metadata = next((name for name, take in takes.items() if take == "metadata"), None)
        if not plans and (field := self._fields.get("metadata")) is not None and field.HOLDS_JSON:
            self._metadata = "metadata"
        self._listing = next((name for name, take in takes.items() if take == "listing"), None)
        skipped = {self._metadata, self._listing}
        if self._metadata is not None:  # it has their values
            skipped |= {name for name, take in takes.items() if take == "json"}
        self._columns = [
            column
            for name in dataset.names
            if name not in skipped
            for column in _columns_of(name, self._fields.get(name), plans.get(name, {}).get("parts", {}))
            if only is None or column.export.name in only
        ]
        self.columns = [column.export for column in self._columns]
        self._has_lists = any(column.is_list for column in self.columns)
        self._image = None if transcoding is None else _image_field(transcoding)

    def samples(self, start: int, stop: int) -> Iterator[ExportSample]:
        """Yields the samples from index `start` up to `stop`, which is not included.

        Raises:
            FormatError: a payload is damaged.
            EncodeError: a value cannot be written as a file.
        """
        ids = self._dataset.sample_ids
        names = list(dict.fromkeys(column.modality for column in self._columns))
        names += [name for name in (self._metadata, self._listing) if name is not None]
        for first in range(start, stop, BATCH_SAMPLES):
            batch = range(first, min(first + BATCH_SAMPLES, stop))
            payloads = self._dataset.read_raw(batch, names, records=True, verify=True)
            for row, index in enumerate(batch):
                present = {name: payload for name in names if (payload := payloads[name][row]) is not None}
                yield self._sample(index, ids[index], present)

    def _sample(self, index: int, sample_id: str, payloads: Mapping[str, Payload]) -> ExportSample:
        text: str | None = None
        rows: list[_Row] = []
        pieces: dict[str, list[_Piece]] = {}
        for name, payload in payloads.items():
            try:
                if name == self._metadata:
                    text = _json_text(payload.data)
                elif name == self._listing:
                    rows = _read_listing(_json_text(payload.data), posixpath.basename(sample_id))
                else:
                    pieces[name] = [*map(self._transcode, _pieces(self._fields.get(name), *payload))]
            except (FormatError, LimitError) as error:
                raise locate(error, name, (self._dataset.path, index)) from error
            except (EncodeError, MediaError) as error:
                raise EncodeError(f"sample {sample_id!a}, modality {name!r}: {error}") from error
        return self._with_names(ExportSample(sample_id, text, {}, index), rows, pieces)

    def _transcode(self, piece: _Piece) -> _Piece:
        """Returns the piece, with an image encoded again if a transcoding is set."""
        if self._image is None or not _is_image(piece.content):
            return piece
        extension = {"jpeg": "jpg"}.get(self._image.encoding, self._image.encoding)
        content = self._image.encode(bytes(piece.content)).data
        return piece._replace(content=content, extension=extension, is_transcoded=True)

    def _with_names(
        self, sample: ExportSample, rows: Sequence[_Row], pieces: Mapping[str, Sequence[_Piece]]
    ) -> ExportSample:
        """Returns the sample with its files, whose names follow from the listed rows, the JSON, or the modality."""
        lists = _InterleavedLists(sample if self._has_lists else None, posixpath.basename(member_key(sample.key)))
        suffixes = {"json"}
        parts: dict[str, ExportFile | Sequence[ExportFile] | None] = {}
        for modality, part, column in self._columns:
            chosen = [piece for piece in pieces.get(modality, ()) if piece.part == part]
            own = [(n, row.suffix) for n, row in enumerate(rows) if row.modality == modality and row.part in (part, "")]
            if rows and not own:  # such as the clock of a series, which is a modality of its own
                chosen = []
            files = []
            for number, piece in enumerate(chosen):
                if column.kind == "text" and column.is_list and lists.has_text(piece):
                    continue
                order, suffix = own[number] if len(own) == len(chosen) else (len(suffixes), None)
                if column.is_list and suffix is None and column.kind == "file":
                    suffix = lists.image_suffix(piece.position)
                file = _file_of(column, part, piece, suffix, suffixes)._replace(order=order)
                suffixes.add(file.suffix)
                files.append(file)
                if column.is_list and column.kind == "file":
                    lists.add_image(piece.position, file.suffix)
            parts[column.name] = None if not files else files if column.is_list else files[0]
        return sample._replace(json=lists.text() if self._has_lists else sample.json, parts=parts)


def _file_of(column: ExportColumn, part: str, piece: _Piece, suffix: str | None, used: set[str]) -> ExportFile:
    """Returns the file of a piece, with the suffix if it is free, else with one that is not in `used`."""
    extension, role = piece.extension, re.sub(r"[./\\\s]", "_", column.name)  # a role is one part between dots
    if suffix is not None and piece.is_transcoded:
        suffix = f"{suffix.rpartition('.')[0]}.{extension}".lstrip(".")
    if suffix is None or suffix in used:
        is_kind = column.name in _KINDS or (part and column.name.rpartition("_")[0] in _KINDS)
        position = f".{piece.position}" if column.is_list else ""
        suffix = f"{'' if is_kind else role}{position}.{extension}".lstrip(".")
    if suffix in used:
        numbered = (f"{role}.{number}.{extension}" for number in range(len(used) + 1))
        suffix = next(one for one in (f"{role}.{extension}", *numbered) if one not in used)
    return ExportFile(suffix, piece.content)


def _columns_of(name: str, field: Field | None, parts: Mapping[str, Mapping[str, Any]]) -> Iterator[_Column]:
    """Yields one column for a modality, or for a composite one for each part that is not a value of the JSON."""
    if field is None or not field.PARTS:
        inner = field if field is None or field.item_field is None else field.item_field
        is_list = inner is not field
        yield _Column(name, "", ExportColumn(name=name, field=inner, is_list=is_list, kind=_kind(inner)))
        return
    first = True
    for part, spec in field.PARTS.items():
        if parts.get(part, {}).get("take") == "json" or part in ("layout", "clip_score"):
            continue
        is_values = field.CONTENT_KIND == "series"
        is_main = part == "values" if is_values else first
        kind = "array" if is_values else "text" if part == "text" else "file"
        column = name if is_main else f"{name}_{part}"
        yield _Column(name, part, ExportColumn(name=column, field=field, is_list=spec.many, kind=kind))
        first = False


def _kind(field: Field | None) -> str:
    if field is not None and field.CONTENT_KIND in ("text", "json"):
        return "text"
    return "array" if field is not None and field.CONTENT_KIND == "array" else "file"


def _image_field(transcoding: Transcoding) -> ImageField:
    if transcoding.format == "jpeg":
        return ImageField(encoding="jpeg", quality=transcoding.quality)
    return ImageField(encoding=transcoding.format)


def _is_image(content: Buffer | npt.NDArray[Any]) -> bool:
    return not isinstance(content, np.ndarray) and (sniff_content_type(content) or "").startswith("image/")


# -- the content of payloads


def _pieces(field: Field | None, record: Buffer, data: Buffer) -> Iterator[_Piece]:
    """Yields the files of a payload in order."""
    # Audio that keeps files stores samples if it was packed from arrays.
    if field is None or (field.keeps_bytes and not field.PARTS and field.CONTENT_KIND != "audio"):
        yield _file_piece("", 0, data, field)
    elif (inner := field.item_field) is not None:
        for position, metadata, content in field.item_payloads(record, data):
            for piece in _pieces(inner, metadata, content):
                yield piece._replace(position=position)
    elif field.CONTENT_KIND == "series":
        series = field.decode(record, data)
        yield _Piece("values", 0, "npy", series.values)
        yield _Piece("timestamps", 0, "npy", series.timestamps)
    elif field.PARTS:
        for item in field.items(record, data):
            if item.part == "text" and not field.keeps_part("text"):
                shown = field.shown(record, Content.of(data))
                assert isinstance(shown, ShownPair)
                yield _Piece("text", 0, "npy", np.asarray(shown.tokens.ids))
            else:
                yield _file_piece(item.part, item.position, item.data, None)
    else:
        yield _value_piece(field, record, data)


def _file_piece(part: str, position: int, content: Buffer, field: Field | None) -> _Piece:
    kind = "text" if part == "text" else "file" if field is None else field.CONTENT_KIND
    if kind in ("text", "json"):
        _text(content)
        return _Piece(part, position, "txt" if kind == "text" else "json", content)
    extension = extension_of_content_type(sniff_content_type(content) or "") or "bin"
    return _Piece(part, position, extension, content)


def _text(data: Buffer) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise corrupt(f"its text is not UTF-8: {error}") from error


def _json_text(data: Buffer) -> str:
    text = _text(data)
    try:
        parse_json(text, max_depth=None)
    except ValueError as error:
        raise corrupt(f"its JSON {error}") from error
    return text


def _value_piece(field: Field, record: Buffer, data: Buffer) -> _Piece:
    """Returns the file of a payload that does not store the file that it was packed from."""
    shown = field.shown(record, Content.of(data))
    match shown:
        case ShownFile():
            return _file_piece("", 0, as_bytes_view(data)[shown.offset : shown.offset + shown.size], None)
        case ShownMap() if sniff_content_type(data) in ("image/png", "image/tiff"):
            return _file_piece("", 0, data, None)
        case ShownMap():
            return _Piece("", 0, "npy", np.asarray(field.decode(record, data)))
        case ShownTokens():
            return _Piece("", 0, "npy", np.asarray(shown.ids))
        case ShownSamples():
            return _Piece("", 0, "wav", _wav(shown, as_bytes_view(data)))
        case ShownValue(value=np.ndarray() as array):
            return _Piece("", 0, "npy", array)
        case ShownValue(value=str() as text):
            return _Piece("", 0, "txt", text.encode())
        case ShownValue(value=bool() | int() | float() | np.generic() as number):
            return _Piece("", 0, "txt", dump_json(np.asarray(number).item()).encode())
        case ShownValue(value=[TimedSegment(), *_] | [] as segments):
            return _segments_piece(segments)
    raise EncodeError(f"a value of {type(field).__name__} cannot be written as a file: leave the modality out")


def _segments_piece(segments: Sequence[TimedSegment]) -> _Piece:
    """Returns timed texts as subtitles, or as JSON if subtitles would change them."""
    blocks = (
        f"{number}\n{_clock(segment.start_seconds)} --> {_clock(segment.end_seconds)}\n{segment.text}\n"
        for number, segment in enumerate(segments, start=1)
    )
    subtitles = "\n".join(blocks)
    with suppress(MediaError):
        if segments and parse_subtitles(subtitles) == list(segments):
            return _Piece("", 0, "srt", subtitles.encode())
    values = [{"start": s.start_seconds, "end": s.end_seconds, "text": s.text} for s in segments]
    return _Piece("", 0, "json", dump_json(values).encode())


def _clock(seconds: float) -> str:
    """Returns a time in the notation of SubRip."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d},{milliseconds % 1000:03d}"


def _wav(shown: ShownSamples, data: memoryview) -> bytes:
    import soundfile

    samples = np.frombuffer(data[shown.offset : shown.offset + shown.size], shown.dtype).reshape(-1, shown.channels)
    target = io.BytesIO()
    subtype = "PCM_16" if shown.dtype == np.int16 else "FLOAT"
    soundfile.write(target, samples, shown.sample_rate, format="WAV", subtype=subtype)
    return target.getvalue()


# -- names


def _read_listing(listing: str, key: str) -> list[_Row]:
    """Returns the packed content rows of a sample in order, with the suffixes of their members."""
    rows = []
    try:
        for row in parse_json(listing):
            name = posixpath.basename(row["member"] or "")
            suffix = name.removeprefix(f"{key}.") if name.startswith(f"{key}.") else name.partition(".")[2]
            if row.get("frame") is not None:
                suffix = f"{row['frame']}.{suffix.rpartition('.')[2]}"
            if row["in"] is not None:
                rows.append(_Row(row["in"], row.get("part", ""), suffix or None))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise corrupt(f"is not a list of rows: {error!r}") from error
    return rows


class _InterleavedLists:
    """Updates the lists of texts and images in the JSON of an interleaved sample.

    Args:
        sample: the sample with its JSON; None if it cannot have lists.
        key: base name of the key in the names of its members.
    """

    def __init__(self, sample: ExportSample | None, key: str) -> None:
        self._text = text = None if sample is None else sample.json
        self._key = key
        has_lists = text is not None and (f'"{TEXTS}"' in text or f'"{IMAGES}"' in text)
        self._value = sample.value if sample is not None and has_lists else {}
        self._lists = {name: items for name in (TEXTS, IMAGES) if isinstance(items := self._value.get(name), list)}
        self._texts: dict[int, str] = {}
        self._images: dict[int, str] = {}

    def has_text(self, piece: _Piece) -> bool:
        """Returns whether the JSON has a text at its position."""
        entries = self._lists.get(TEXTS, ())
        if isinstance(piece.content, np.ndarray) or piece.position >= len(entries):
            return False
        text = str(piece.content, "utf-8")
        if entries[piece.position] != text:
            return False
        self._texts[piece.position] = text
        return True

    def image_suffix(self, position: int) -> str | None:
        """Returns the suffix of the member that the JSON names at a position, or None if it is of another sample."""
        tokens = self._lists.get(IMAGES, ())
        token = tokens[position] if position < len(tokens) else None
        if isinstance(token, str) and posixpath.basename(token).startswith(f"{self._key}."):
            return posixpath.basename(token).removeprefix(f"{self._key}.") or None
        return None

    def add_image(self, position: int, suffix: str) -> None:
        """Sets the file of an image."""
        self._images[position] = f"{self._key}.{suffix}"

    def text(self) -> str | None:
        """Returns the JSON with the sample's texts and images at their positions."""
        changed: dict[str, list[str | None]] = {}
        for name, items in ((TEXTS, self._texts), (IMAGES, self._images)):
            entries = self._lists.get(name)
            if entries is None:
                continue
            expected = [items.get(position) for position in range(max(len(entries), 1 + max(items, default=-1)))]
            names = (
                posixpath.basename(entry) if name == IMAGES and isinstance(entry, str) else entry for entry in entries
            )
            if list(names) != expected:
                changed[name] = expected
        return dump_json({**self._value, **changed}) if changed else self._text
