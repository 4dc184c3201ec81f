"""Samples of a dataset as the files that they could be packed from again.

The stored bytes of files are copied. A file has the name that the pipeline listed for it, else one that follows from
its modality and its content. The JSON is the packed one; its lists of texts and images are rewritten if they no longer
say what the sample has.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from mm_assets.dataset.dataset import Dataset
from mm_assets.errors import EncodeError, MediaError
from mm_assets.exports.base import ExportColumn, ExportFile, ExportSample
from mm_assets.fields import Field, ImageField
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.shown import ShownFile, ShownMap, ShownPair, ShownSamples, ShownTokens, ShownValue
from mm_assets.fields.timed_text import TimedSegment
from mm_assets.json_text import dump_json, parse_json
from mm_assets.media.content_types import Buffer, extension_of_content_type, sniff_content_type
from mm_assets.media.subtitles import parse_subtitles

__all__ = ["SampleFiles", "Transcoding", "member_key"]

BLOCK_SAMPLES = 64  # that are read together
TEXTS, IMAGES = "texts", "images"  # lists in the JSON of an interleaved sample
_KINDS = frozenset({"image", "text", "audio", "video", "clip", "array", "midi", "binary", "document", "metadata"})
"""Names of modalities that say no more than the kind of their content: their files have no role."""
_ESCAPED = re.compile(r"[%\\\x00-\x1f\x7f]|(?:(?<=/)|^)\.+(?=/)|\.(?=[^/]*$)|/(?=/|$)|^/")


def member_key(sample_id: str) -> str:
    """Returns a sample's id as the key in names of members, where some characters would end, hide or move it.

    Dots of the base name, parts of dots alone, slashes at an end or in a row, control characters, backslashes and ``%``
    are ``%`` and two digits: `urllib.parse.unquote` returns the id.
    """
    return _ESCAPED.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), sample_id) or "%"


class Transcoding(NamedTuple):
    """How images are encoded again.

    Attributes:
        format: ``jpeg`` or ``png``.
        quality: of JPEG, 1 to 100.
    """

    format: str
    quality: int = 95


class _Piece(NamedTuple):
    """One content of a payload.

    Attributes:
        part: name in the field's `PARTS`, or "".
        position: among the items of a sequence or part; else 0.
        extension: of a file with this content.
        content: its bytes, or an array.
        is_stored: whether these are the bytes that were packed, which keep their name.
    """

    part: str
    position: int
    extension: str
    content: Any
    is_stored: bool = False


class _Listed(NamedTuple):
    """A content row, as the packed modality of `take` "listing" has it."""

    modality: str
    part: str
    suffix: str | None


class _Column(NamedTuple):
    """A part of a packed modality, and what is exported of it."""

    modality: str
    part: str
    export: ExportColumn


class SampleFiles:
    """The samples of a dataset, each as an `ExportSample`.

    Args:
        dataset: the dataset or view.
        transcoding: how images are encoded again; None copies them.
        only: names of the columns that are read; None for all.

    Attributes:
        columns: of every sample.
        metadata: the modality that has the JSON, or None.

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
        self.metadata = next((name for name, take in takes.items() if take == "metadata"), None)
        if not plans and (field := self._fields.get("metadata")) is not None and field.HOLDS_JSON:
            self.metadata = "metadata"
        self._listing = next((name for name, take in takes.items() if take == "listing"), None)
        skipped = {self.metadata, self._listing}
        if self.metadata is not None:  # their values are in the JSON
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
        """Yields the samples with the indices from `start` to before `stop`.

        Raises:
            FormatError: a payload is damaged.
            EncodeError: content cannot be a file.
        """
        ids = self._dataset.sample_ids
        contents = list(dict.fromkeys(column.modality for column in self._columns))
        names = [*contents, *(name for name in (self.metadata, self._listing) if name is not None)]
        fields = {name: self._fields.get(name) for name in contents}
        with_records = [name for name, field in fields.items() if field and not _keeps_files(field)]
        for first in range(start, stop, BLOCK_SAMPLES):
            block = range(first, min(first + BLOCK_SAMPLES, stop))
            data = self._dataset.read_raw(block, names)
            stored = self._dataset.stored(block, with_records)
            for row, index in enumerate(block):
                pieces: dict[str, list[_Piece]] = {}
                for name in contents:
                    payload = data[name][row]
                    if payload is not None:
                        place = stored[name][row] if name in stored else None
                        record = b"" if place is None else place.metadata()
                        pieces[name] = list(_pieces(fields[name], record, payload))
                text, listing = (
                    None if name is None or (payload := data[name][row]) is None else str(payload, "utf-8")
                    for name in (self.metadata, self._listing)
                )
                yield self._sample(ids[index], pieces, text, listing)._replace(number=index)

    def _sample(
        self, sample_id: str, pieces: Mapping[str, Sequence[_Piece]], text: str | None, listing: str | None
    ) -> ExportSample:
        rows = [] if listing is None else _listed(listing, posixpath.basename(sample_id))
        lists = _InterleavedLists(text if self._has_lists else None, posixpath.basename(member_key(sample_id)))
        suffixes = {"json"}  # that are taken
        parts: dict[str, ExportFile | Sequence[ExportFile] | None] = {}
        for modality, part, column in self._columns:
            contents = [piece for piece in pieces.get(modality, ()) if piece.part == part]
            own = [(n, row.suffix) for n, row in enumerate(rows) if row.modality == modality and row.part in (part, "")]
            if rows and not own:  # such as the clock of a series, which is a modality of its own
                contents = []
            files = []
            for number, piece in enumerate(contents):
                if column.kind == "text" and column.is_list and lists.has_text(piece):
                    continue
                order, name = own[number] if len(own) == len(contents) else (len(suffixes), None)
                if column.is_list and name is None and column.kind == "file":
                    name = lists.image_suffix(piece.position)
                file = self._file(column, part, piece, name, suffixes)._replace(order=order)
                suffixes.add(file.suffix)
                files.append(file)
                if column.is_list and column.kind == "file":
                    lists.add_image(piece.position, file.suffix)
            parts[column.name] = None if not files else files if column.is_list else files[0]
        return ExportSample(sample_id, lists.text() if self._has_lists else text, parts)

    def _file(
        self, column: ExportColumn, part: str, piece: _Piece, suffix: str | None, suffixes: set[str]
    ) -> ExportFile:
        """The file of a content, with the given suffix or one of its own that is not taken."""
        content, extension = piece.content, piece.extension
        if self._image is not None and _is_image(content):
            content = self._image.encode(bytes(content)).data
            extension = {"jpeg": "jpg"}.get(self._image.encoding, self._image.encoding)
            suffix = None if suffix is None else f"{suffix.rpartition('.')[0]}.{extension}".lstrip(".")
        role = (
            "" if column.name in _KINDS or (part and column.name.rpartition("_")[0] in _KINDS) else _role(column.name)
        )
        if suffix is None or suffix in suffixes:
            position = f".{piece.position}" if column.is_list else ""
            suffix = f"{role}{position}.{extension}".lstrip(".")
        if suffix in suffixes:
            role = _role(column.name)
            numbered = (f"{role}.{number}.{extension}" for number in range(len(suffixes) + 1))
            suffix = next(one for one in (f"{role}.{extension}", *numbered) if one not in suffixes)
        return ExportFile(suffix, content)


def _columns_of(name: str, field: Field | None, parts: Mapping[str, Mapping[str, Any]]) -> Iterator[_Column]:
    """The columns of a modality: one, or one for each part of a composite that is not a value of the JSON."""
    if field is None or not field.PARTS:
        inner = field if field is None or field.item_field is None else field.item_field
        is_list = inner is not field
        yield _Column(name, "", ExportColumn(name=name, field=inner, is_list=is_list, kind=_kind(inner)))
        return
    first = True
    for part, described in field.PARTS.items():
        if parts.get(part, {}).get("take") == "json" or part in ("layout", "clip_score"):
            continue
        is_values = field.CONTENT_KIND == "series"
        is_main = part == "values" if is_values else first
        kind = "array" if is_values else "text" if part == "text" else "file"
        column = name if is_main else f"{name}_{part}"
        yield _Column(name, part, ExportColumn(name=column, field=field, is_list=described.many, kind=kind))
        first = False


def _kind(field: Field | None) -> str:
    if field is not None and field.CONTENT_KIND in ("text", "json"):
        return "text"
    return "array" if field is not None and field.CONTENT_KIND == "array" else "file"


def _role(name: str) -> str:
    """A modality's name as the role in a member's name, which is one part between dots."""
    return re.sub(r"[./\\\s]", "_", name)


def _image_field(transcoding: Transcoding) -> ImageField:
    if transcoding.format == "jpeg":
        return ImageField(encoding="jpeg", quality=transcoding.quality)
    return ImageField(encoding=transcoding.format)


def _is_image(content: object) -> bool:
    return not isinstance(content, np.ndarray) and (sniff_content_type(_view(content)) or "").startswith("image/")


def _view(content: Any) -> memoryview:
    return as_bytes_view(content)


# -- what a payload holds


class _Whole:
    """The data of a payload that is in memory; see `mm_assets.fields.shown.StoredBytes`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._data[offset : offset + size])

    def part(self, offset: int, size: int) -> _Whole:
        return _Whole(self._data[offset : offset + size])

    def whole(self) -> bytes:
        return bytes(self._data)


def _keeps_files(field: Field) -> bool:
    """Whether the data of every payload are a file; audio that keeps files has samples where it was given arrays."""
    return field.keeps_bytes and not field.PARTS and field.CONTENT_KIND != "audio"


def _pieces(field: Field | None, record: Buffer, data: Buffer) -> Iterator[_Piece]:
    """The contents of a payload, in order."""
    if field is None or _keeps_files(field):
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
                shown = field.shown(record, _Whole(_view(data)))
                assert isinstance(shown, ShownPair)
                yield _Piece("text", 0, "npy", np.asarray(shown.tokens.ids))
            else:
                yield _file_piece(item.part, item.position, item.data, None)
    else:
        yield _value_piece(field, record, data)


def _file_piece(part: str, position: int, content: Buffer, field: Field | None) -> _Piece:
    if field is not None and field.CONTENT_KIND == "json":
        extension = "json"
    elif part == "text" or (field is not None and field.CONTENT_KIND == "text"):
        extension = "txt"
    else:
        extension = extension_of_content_type(sniff_content_type(content) or "") or "bin"
    return _Piece(part, position, extension, content, is_stored=True)


def _value_piece(field: Field, record: Buffer, data: Buffer) -> _Piece:
    """The content of a payload that is not stored as the file that it came from."""
    shown = field.shown(record, _Whole(_view(data)))
    match shown:
        case ShownFile():
            return _file_piece("", 0, _view(data)[shown.offset : shown.offset + shown.size], None)
        case ShownMap() if sniff_content_type(data) in ("image/png", "image/tiff"):
            return _file_piece("", 0, data, None)
        case ShownMap():
            return _Piece("", 0, "npy", np.asarray(field.decode(record, data)))
        case ShownTokens():
            return _Piece("", 0, "npy", np.asarray(shown.ids))
        case ShownSamples():
            return _Piece("", 0, "wav", _wav(shown, _view(data)))
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
    """Timed texts as subtitles, or as JSON if those do not give the same ones again."""
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
    """A time as SubRip has it."""
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


def _listed(listing: str, key: str) -> list[_Listed]:
    """The content rows of a sample that are packed, in order, with the suffixes that their members had."""
    rows = []
    for row in parse_json(listing):
        name = posixpath.basename(row["member"] or "")
        suffix = name.removeprefix(f"{key}.") if name.startswith(f"{key}.") else name.partition(".")[2]
        if row.get("frame") is not None:
            suffix = f"{row['frame']}.{suffix.rpartition('.')[2]}"
        if row["in"] is not None:
            rows.append(_Listed(row["in"], row.get("part", ""), suffix or None))
    return rows


class _InterleavedLists:
    """The lists of texts and of images in the JSON of an interleaved sample.

    Args:
        text: the JSON, or None.
        key: base name of the sample's key.
    """

    def __init__(self, text: str | None, key: str) -> None:
        self._text = text
        self._key = key
        value = parse_json(text) if text is not None and (f'"{TEXTS}"' in text or f'"{IMAGES}"' in text) else None
        self._value: dict[str, Any] = value if isinstance(value, dict) else {}
        self._lists = {name: found for name in (TEXTS, IMAGES) if isinstance(found := self._value.get(name), list)}
        self._texts: dict[int, str] = {}
        self._images: dict[int, str] = {}

    def has_text(self, piece: _Piece) -> bool:
        """Whether a text is an entry of the JSON, at its position."""
        entries = self._lists.get(TEXTS, ())
        if piece.position < len(entries) and entries[piece.position] == str(piece.content, "utf-8"):
            self._texts[piece.position] = entries[piece.position]
            return True
        return False

    def image_suffix(self, position: int) -> str | None:
        """The suffix of the member that the token at a position names, if it is one of this sample."""
        tokens = self._lists.get(IMAGES, ())
        token = tokens[position] if position < len(tokens) else None
        if isinstance(token, str) and posixpath.basename(token).startswith(f"{self._key}."):
            return posixpath.basename(token).removeprefix(f"{self._key}.") or None
        return None

    def add_image(self, position: int, suffix: str) -> None:
        """Notes the file of an image."""
        self._images[position] = f"{self._key}.{suffix}"

    def text(self) -> str | None:
        """The JSON whose lists have the texts and images of the sample, at their positions."""
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
