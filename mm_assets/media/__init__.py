"""Facts about bytes: types, headers, codecs and notations of images, audio, video, scores and text.

Bytes in, facts or arrays out. Nothing here opens a file or knows a field, a row or a container. Libraries that decode
(Pillow, OpenCV, PyAV, libsndfile) are imported by the function that needs them.
"""

from mm_assets.media.content_types import content_type_of_name, sniff_content_type
from mm_assets.media.images import ImageInfo, probe_image
from mm_assets.media.midi import MIDIFile, NoteTable, parse_midi
from mm_assets.media.page_layouts import LayoutMap, read_layout
from mm_assets.media.sounds import AudioInfo, probe_audio
from mm_assets.media.subtitles import TimedSegment, parse_subtitles
from mm_assets.media.text_boxes import PageLayout, TextBoxes
from mm_assets.media.timing import FrameIndex, frame_boundaries
from mm_assets.media.tokenizers import Tokenizer, tokenizer_ref
from mm_assets.media.video import VideoInfo, probe_video

__all__ = [
    "AudioInfo",
    "FrameIndex",
    "ImageInfo",
    "LayoutMap",
    "MIDIFile",
    "NoteTable",
    "PageLayout",
    "TextBoxes",
    "TimedSegment",
    "Tokenizer",
    "VideoInfo",
    "content_type_of_name",
    "frame_boundaries",
    "parse_midi",
    "parse_subtitles",
    "probe_audio",
    "probe_image",
    "probe_video",
    "read_layout",
    "sniff_content_type",
    "tokenizer_ref",
]
