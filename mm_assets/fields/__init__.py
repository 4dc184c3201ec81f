"""Fields: how values become payloads and back. `docs/spec/fields.md` describes every field; `base` is their interface.

A field knows values and payloads, not files. Your own derives from `Field`, and `register_field` makes it known.
"""

from __future__ import annotations

from mm_assets.fields.array_spec import ArraySpec
from mm_assets.fields.audio import Audio, AudioField
from mm_assets.fields.base import Encoded, Field, Item, Part
from mm_assets.fields.builtin import FIELD_NAMES, FIELD_TYPES
from mm_assets.fields.depth import DepthField
from mm_assets.fields.document import Document, DocumentField
from mm_assets.fields.facts import Boxes, ClipLengths, Fact, MediaLength, Spans, Steps
from mm_assets.fields.image import ImageField
from mm_assets.fields.image_text import ImageText, ImageTextPair, ImageTextPairField
from mm_assets.fields.midi import MIDI, MIDIField
from mm_assets.fields.ndarray import NDArrayField
from mm_assets.fields.plain import BytesField, JSONField, RawJSON, TextField
from mm_assets.fields.registry import (
    complete_config,
    field_from_config,
    field_from_declaration,
    import_field,
    register_field,
    unregistered,
)
from mm_assets.fields.scalar import ScalarField
from mm_assets.fields.sequence import SequenceField
from mm_assets.fields.series_value import TimeSeries
from mm_assets.fields.timed_text import TimedTextField, segments_at, segments_between
from mm_assets.fields.timeseries import TimeSeriesField
from mm_assets.fields.tokens import TokensField
from mm_assets.fields.video_audio import SyncedVideoAudioField
from mm_assets.fields.video_values import Clip, VideoAudio, VideoFile
from mm_assets.media.midi import NoteTable
from mm_assets.media.subtitles import TimedSegment
from mm_assets.media.text_boxes import PageLayout, TextBoxes

__all__ = [
    "FIELD_NAMES",
    "FIELD_TYPES",
    "MIDI",
    "ArraySpec",
    "Audio",
    "AudioField",
    "Boxes",
    "BytesField",
    "Clip",
    "ClipLengths",
    "DepthField",
    "Document",
    "DocumentField",
    "Encoded",
    "Fact",
    "Field",
    "ImageField",
    "ImageText",
    "ImageTextPair",
    "ImageTextPairField",
    "Item",
    "JSONField",
    "MIDIField",
    "MediaLength",
    "NDArrayField",
    "NoteTable",
    "PageLayout",
    "Part",
    "RawJSON",
    "ScalarField",
    "SequenceField",
    "Spans",
    "Steps",
    "SyncedVideoAudioField",
    "TextBoxes",
    "TextField",
    "TimeSeries",
    "TimeSeriesField",
    "TimedSegment",
    "TimedTextField",
    "TokensField",
    "VideoAudio",
    "VideoFile",
    "complete_config",
    "field_from_config",
    "field_from_declaration",
    "import_field",
    "register_field",
    "segments_at",
    "segments_between",
    "unregistered",
]
