"""The built-in filters and annotators keep the promises of every filter and annotator."""

import io
from typing import Any

import numpy as np
from PIL import Image

from mm_assets.filters import BUILTIN_ANNOTATORS, BUILTIN_FILTERS
from mm_assets.testing import AnnotatorSuite, FilterSuite

from ..fields.clips import clip_file


def picture(width: int, height: int, seed: int | None = 0) -> bytes:
    """A PNG of noise, or of one grey."""
    pixels = np.full((height, width), 128, np.uint8)
    if seed is not None:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


def sound(seconds: float, volume: float = 0.0) -> bytes:
    """A WAV, 8 kHz."""
    import soundfile

    target = io.BytesIO()
    tone = np.sin(np.arange(round(8000 * seconds)) / 3) * volume
    soundfile.write(target, tone.astype(np.float32), 8000, format="WAV", subtype="PCM_16")
    return target.getvalue()


class TestAspectRatio(FilterSuite):
    config = {"type": "aspect_ratio"}
    cases = [({"a": [("image", picture(20, 10)), ("image", picture(21, 10))]}, {("a", 1): "above_max"})]
    bad_configs = [{"min": "wide"}, {"min": 3.0, "max": 2.0}]


class TestImageSize(FilterSuite):
    config = {"type": "image_size", "min_width": 10}
    cases = [
        (
            {"a": [("image", picture(9, 10)), ("image", b"?"), ("text", "t")]},
            {("a", 0): "width_below_min", ("a", 1): "unreadable"},
        )
    ]
    bad_configs = [{"min_width": 1.5}, {"min_width": 3, "max_width": 2}]


class TestBlur(FilterSuite):
    config = {"type": "blur", "min": 10.0}
    cases = [({"a": [("image", picture(20, 20)), ("image", picture(20, 20, None))]}, {("a", 1): "below_min"})]
    bad_configs = [{"min": -1}, {"min_side": 0}]


class TestAudioDuration(FilterSuite):
    config = {"type": "audio_duration", "min_seconds": 0.5}
    cases = [({"a": [("audio", sound(1)), ("audio", sound(0.2))]}, {("a", 1): "below_min"})]
    bad_configs = [{"min_seconds": -1}]


class TestAudioSilence(FilterSuite):
    config = {"type": "audio_silence"}
    cases = [({"a": [("audio", sound(1, 0.5)), ("audio", sound(1))]}, {("a", 1): "silence_above_max"})]
    bad_configs = [{"level": "loud"}]


class TestVideoDuration(FilterSuite):
    config = {"type": "video_duration", "min_seconds": 0.5}
    clips = [("video", clip_file(num_frames=count)) for count in (25, 5)]
    cases = [({"a": clips}, {("a", 1): "below_min"})]
    bad_configs = [{"min_seconds": -1}]


class TestTextLength(FilterSuite):
    config = {"type": "text_length", "min_words": 2}
    cases = [
        (
            {"a": [("text", "one two"), ("text", "one"), ("text", None)]},
            {("a", 1): "words_below_min", ("a", 2): "no_content"},
        ),
        ({"a": [("image", b"?")]}, {}),
    ]
    bad_configs = [{"min_words": -1}, {"scope": "partition"}]


class TestImageToTextRatio(FilterSuite):
    config = {"type": "image_to_text_ratio", "max": 1.0}
    cases = [
        (
            {"a": [("image", b"1"), ("text", "two words")], "b": [("image", b"1"), ("image", b"2")]},
            {("b", place): "above_max" for place in (-1, 0, 1)},
        )
    ]
    bad_configs = [{"max": -1}]


class TestExactDuplicates(FilterSuite):
    config = {"type": "exact_duplicates", "scope": "row"}
    cases = [({"a": [("image", b"1"), ("image", b"2")], "b": [("image", b"1")]}, {("b", 0): "duplicate"})]
    bad_configs = [{"modalities": "image"}]


class TestNearDuplicates(FilterSuite):
    config = {"type": "near_duplicates", "scope": "row"}
    images = [("image", picture(64, 64, seed)) for seed in (1, 2, 1)]
    cases = [({"a": images}, {("a", 2): "near_duplicate"})]
    bad_configs = [{"max_distance": 33}]


class TestImageSizeAnnotator(AnnotatorSuite):
    config = {"type": "image_size"}
    cases = [
        (
            {"a": [("image", picture(30, 20)), ("image", b"?")]},
            {
                "image_width": [None, 30, None],
                "image_height": [None, 20, None],
                "image_aspect_ratio": [None, 1.5, None],
            },
        )
    ]


class TestBlurAnnotator(AnnotatorSuite):
    config = {"type": "blur"}
    cases = [({"a": [("image", picture(20, 20, None)), ("image", None)]}, {"image_sharpness": [None, 0.0, None]})]
    bad_configs = [{"min_side": 0}]


class TestAudioDurationAnnotator(AnnotatorSuite):
    config = {"type": "audio_duration", "prefix": "x_"}
    cases = [({"a": [("audio", sound(1.5)), ("text", "t")]}, {"x_audio_duration_seconds": [None, 1.5, None]})]
    bad_configs = [{"prefix": 1}]


class TestSilenceAnnotator(AnnotatorSuite):
    config = {"type": "silence"}
    names = ("audio_silence", "audio_leading_silence_seconds", "audio_trailing_silence_seconds")
    cases = [({"a": [("audio", sound(1)), ("audio", b"?")]}, {name: [None, 1.0, None] for name in names})]
    bad_configs = [{"window_seconds": 0}]


class TestVideoInfoAnnotator(AnnotatorSuite):
    config = {"type": "video_info"}
    expected: dict[str, list[Any]] = {
        "video_duration_seconds": [None, 1.0, None],
        "video_width": [None, 32, None],
        "video_height": [None, 16, None],
        "video_frame_rate": [None, 25.0, None],
        "video_has_audio": [None, False, None],
    }
    cases = [({"a": [("video", clip_file(num_frames=25)), ("video", b"?")]}, expected)]


class TestPerceptualHashAnnotator(AnnotatorSuite):
    config = {"type": "perceptual_hash"}
    cases = [({"a": [("image", picture(20, 20, None)), ("text", "t")]}, {"image_perceptual_hash": [None, None, None]})]


class TestTextLengthAnnotator(AnnotatorSuite):
    config = {"type": "text_length"}
    cases = [
        (
            {"a": [("text", "zwei Wörter"), ("text", None)]},
            {"text_chars": [None, 11, None], "text_words": [None, 2, None]},
        )
    ]


class TestImageToTextRatioAnnotator(AnnotatorSuite):
    config = {"type": "image_to_text_ratio"}
    cases = [
        (
            {"a": [("image", b"1"), ("text", "one two")]},
            {"num_images": [1, None, None], "num_words": [2, None, None], "image_to_text_ratio": [0.5, None, None]},
        )
    ]


class TestContentHashAnnotator(AnnotatorSuite):
    config = {"type": "content_hash", "modalities": ["text"]}
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    cases = [({"a": [("text", ""), ("image", b"")]}, {"content_sha256": [None, empty, None]})]
    bad_configs = [{"modalities": "text"}]


def test_each_built_in_has_its_suite() -> None:
    """No filter or annotator of the tables is left out above."""
    suites = [value for value in globals().values() if isinstance(value, type)]
    for base, table in ((FilterSuite, BUILTIN_FILTERS), (AnnotatorSuite, BUILTIN_ANNOTATORS)):
        tested = {suite.config["type"] for suite in suites if issubclass(suite, base) and suite is not base}
        assert tested == set(table)
