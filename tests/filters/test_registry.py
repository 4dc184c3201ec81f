import io
import pickle
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_assets.errors import ConfigError, FilterError
from mm_assets.filters.base import Annotator, Filter
from mm_assets.filters.registry import BUILTIN_ANNOTATORS, BUILTIN_FILTERS, build_annotator, build_filter
from mm_assets.testing import AnnotatorSuite, FilterSuite

from ..fields.clips import clip_file


def _filter(**config: object) -> Filter:
    return build_filter(config, where="defs.yaml", key="filters[0]")


@pytest.mark.parametrize("kind", sorted(BUILTIN_FILTERS))
def test_every_built_in_filter_can_be_built(kind):
    """Each name of the registry gives a filter of that name, with its own instance each time."""
    needed = {
        "audio_duration": {"min_seconds": 1},
        "has_modalities": {"modalities": ["video"]},
        "image_size": {"min_width": 1},
        "image_to_text_ratio": {"max": 1},
        "text_length": {"min_chars": 1},
        "video_duration": {"min_seconds": 1},
    }
    built = _filter(type=kind, **needed.get(kind, {}))
    assert isinstance(built, Filter)
    assert built.name == kind
    assert built is not _filter(type=kind, **needed.get(kind, {}))


@pytest.mark.parametrize("kind", sorted(BUILTIN_ANNOTATORS))
def test_every_built_in_annotator_can_be_built(kind):
    """Each name of the registry gives an annotator of that name that declares its columns."""
    built = build_annotator({"type": kind, "prefix": "my_"}, where="w", key="annotators[0]")
    assert isinstance(built, Annotator)
    assert built.name == kind
    assert all(column.name.startswith("my_") for column in built.columns)


@pytest.mark.parametrize(
    ("config", "key", "message"),
    [
        ({}, "filters[0].type", "is missing, expected the type of filter: built in: aspect_ratio, audio_duration"),
        ({"type": "sharp"}, "filters[0].type", "is 'sharp'.*built in: .*or your own as module:Class"),
        ({"type": 3}, "filters[0].type", "is 3"),
        ({"type": "blur", "most": 3}, "filters[0].most", "of blur; allowed: type, name, after_content, scope, min"),
        ({"type": "blur", "scope": "page"}, "filters[0].scope", "is 'page', allowed: row, sample"),
        ({"type": "blur", "scope": []}, "filters[0].scope", r"is \[\], allowed: row, sample"),
        ({"type": "image_to_text_ratio", "max": 1, "scope": "row"}, "filters[0].scope", "is 'row', allowed: sample"),
        ({"type": "blur", "min": "3"}, "filters[0].min", "is '3', expected a number of at least 0"),
        ({"type": "blur", "min": True}, "filters[0].min", "is True"),
        ({"type": "blur", "min": float("nan")}, "filters[0].min", "is nan"),
        ({"type": "blur", "min": -1}, "filters[0].min", "is -1"),
        ({"type": "blur", "min_side": 0}, "filters[0].min_side", "is 0, expected a whole number of at least 1"),
        ({"type": "blur", "min_side": 2.5}, "filters[0].min_side", "is 2.5"),
        ({"type": "blur", "drop_invalid_rows": 1}, "filters[0].drop_invalid_rows", "is 1, expected true or false"),
        ({"type": "aspect_ratio", "min": 3, "max": 2}, "filters[0].min", "is 3, above max, which is 2"),
        ({"type": "image_size"}, "filters[0].min_width", "give at least one of min_width, max_width, min_height"),
        ({"type": "image_size", "min_width": 9, "max_width": 8}, "filters[0].min_width", "above max_width"),
        ({"type": "image_to_text_ratio"}, "filters[0].min", "give at least one of min, max"),
        ({"type": "text_length", "min_chars": 1, "scope": "page"}, "filters[0].scope", "allowed: row, sample"),
        ({"type": "exact_duplicates", "modalities": "image"}, "filters[0].modalities", "expected a list of names"),
        ({"type": "exact_duplicates", "modalities": []}, "filters[0].modalities", "expected a list of names"),
        ({"type": "exact_duplicates", "modalities": ["a", "a"]}, "filters[0].modalities", "names something twice"),
        ({"type": "blur", "name": ""}, "filters[0].name", "is '', expected text"),
        ({"type": "blur", "name": "packable"}, "filters[0].name", "not allowed: decodable, empty_sample, .*packable"),
        ({"type": "blur", "after_content": "yes"}, "filters[0].after_content", "is 'yes', expected true or false"),
        ({"type": "no.such.module:Filter"}, "filters[0].type", "cannot be imported: No module named"),
        ({"type": ":Filter"}, "filters[0].type", "cannot be imported"),
        ({"type": "json:Filter"}, "filters[0].type", "expected a class derived from Filter"),
        ({"type": "json:"}, "filters[0].type", "expected a class derived from Filter"),
        (
            {"type": "mm_assets.filters.annotators:BlurAnnotator"},
            "filters[0].type",
            "expected a class derived from Filter",
        ),
        ({"type": "mm_assets.filters.apply:Filter"}, "filters[0].type", "does not implement judge"),
    ],
)  # fmt: skip
def test_wrong_declarations_are_refused(config, key, message):
    """A wrong type or parameter is refused with the file, the key and what is allowed."""
    with pytest.raises(ConfigError, match=message) as caught:
        _filter(**config)
    assert (caught.value.where, caught.value.key) == ("defs.yaml", key)


def test_a_declaration_that_is_not_a_mapping_is_refused():
    """A bare text instead of keys and values is refused with what was found."""
    with pytest.raises(ConfigError, match="is 'blur', expected keys and values"):
        build_filter("blur", where="defs.yaml", key="filters[0]")  # type: ignore[arg-type]  # the wrong kind is the test


def test_annotator_declarations_are_checked_too():
    """A prefix that makes a reserved column, and one that is not text, are refused."""
    with pytest.raises(ConfigError, match="prefix: is 3"):
        build_annotator({"type": "blur", "prefix": 3}, where="w", key="k")
    with pytest.raises(ConfigError, match="allowed: type, name, prefix"):
        build_annotator({"type": "image_size", "min": 3}, where="w", key="k")


_OWN = """
from dataclasses import dataclass
from mm_assets.filters.base import Annotator, Filter

class Positional(Filter):
    def __init__(self, limit): ...
    def judge(self, block): return ()

class Needy(Filter):
    def __init__(self, *, limit, more=1): ...
    def judge(self, block): return ()

class Open(Filter):
    def __init__(self, **anything): self.anything = anything
    def judge(self, block): return ()

class Picky(Filter):
    def __init__(self, *, limit=1):
        if limit > 3: raise ValueError("limit is too high")
    def judge(self, block): return ()

@dataclass(kw_only=True)
class Data(Filter):
    limit: int = 1
    def judge(self, block): return ()

@dataclass(kw_only=True, frozen=True)
class Frozen(Filter):
    limit: int = 1
    def judge(self, block): return ()

class Odd(Filter):
    scope = "page"
    def judge(self, block): return ()

class Bare(Annotator):
    def annotate(self, block): return {}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The import path of a module of a user's own filters."""
    (tmp_path / "own_filters_of_a_user.py").write_text(_OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_filters_of_a_user"


def test_own_filters_are_built_by_import_path(own):
    """A class of the user's is built with its parameters and named by its class where it gives no name."""
    assert _filter(type=f"{own}:Needy", limit=2).name == "Needy"
    assert _filter(type=f"{own}:Data", limit=2, after_content=True).after_content
    assert _filter(type=f"{own}:Open", a=1, b=2).anything == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "Positional"}, "takes 'limit' by position; parameters must be keyword-only"),
        ({"type": "Needy"}, "limit: is missing; .*Needy needs it"),
        ({"type": "Needy", "limit": 1, "most": 2}, "most: is not .* allowed: .* scope, limit, more"),
        ({"type": "Picky", "limit": 9}, "does not take these parameters: limit is too high"),
        ({"type": "Picky", "limit": "9"}, "does not take these parameters: '>' not supported"),
        ({"type": "Frozen"}, "makes frozen instances"),
        ({"type": "Odd"}, "has the scope 'page', allowed: row, sample"),
    ],
)  # fmt: skip
def test_own_filters_are_checked_like_built_in_ones(own, config, message):
    """Parameters of a user's class are checked against its constructor, and its own refusals become a ConfigError."""
    with pytest.raises(ConfigError, match=message):
        _filter(**{**config, "type": f"{own}:{config['type']}"})


def test_an_annotator_without_columns_is_refused(own):
    """An annotator that declares no columns could not be part of the schema."""
    with pytest.raises(ConfigError, match="Bare declares no columns"):
        build_annotator({"type": f"{own}:Bare"}, where="w", key="k")


def test_a_filter_error_survives_pickling():
    """The error crosses process boundaries with its facts."""
    error = pickle.loads(pickle.dumps(FilterError("blur", "did wrong")))
    assert (error.name, error.detail, str(error)) == ("blur", "did wrong", "blur: did wrong")


# The built-in filters and annotators keep the promises of every filter and annotator


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


class TestHasModalities(FilterSuite):
    config = {"type": "has_modalities", "modalities": ["image", "text"]}
    cases = [
        (
            {
                "a": [("image", b"1"), ("text", "both")],
                "b": [("text", "no image")],
                "c": [("image", b"2"), ("image", b"3")],
                "d": [],
            },
            {
                **{("b", place): "no_image" for place in (-1, 0)},
                **{("c", place): "no_text" for place in (-1, 0, 1)},
                ("d", -1): "no_image",
            },
        )
    ]
    bad_configs = [{"modalities": []}, {"modalities": "image"}, {"modalities": ["image"], "scope": "row"}]


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
