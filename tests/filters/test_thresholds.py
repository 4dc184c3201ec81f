"""The limits that filters name are those that they apply."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mm_assets.filters.registry import BUILTIN_ANNOTATORS, BUILTIN_FILTERS, build_annotator, build_filter

LIMITS: dict[str, dict[str, Any]] = {
    "aspect_ratio": {"min": 0.5, "max": 2.0},
    "audio_duration": {"min_seconds": 1.0, "max_seconds": 9.0},
    "audio_silence": {"max_silence": 0.5, "max_leading_seconds": 1.0, "max_trailing_seconds": 2.0},
    "blur": {"min": 50.0},
    "image_size": {"min_width": 1, "max_width": 9, "min_height": 2, "max_height": 8},
    "image_to_text_ratio": {"min": 0.1, "max": 3.0},
    "text_length": {"min_chars": 1, "max_chars": 9, "min_words": 2, "max_words": 8},
    "video_duration": {
        "min_seconds": 1.0,
        "max_seconds": 9.0,
        "min_frame_rate": 5.0,
        "max_frame_rate": 60.0,
        "min_width": 1,
        "min_height": 2,
    },
}
WITHOUT: dict[str, dict[str, Any]] = {
    "exact_duplicates": {},
    "has_modalities": {"modalities": ["image"]},
    "near_duplicates": {},
}


def test_every_filter_with_limits_names_them() -> None:
    """The table of this test has all built-in filters."""
    assert set(LIMITS) | set(WITHOUT) == set(BUILTIN_FILTERS)


@pytest.mark.parametrize("kind", LIMITS)
def test_thresholds_are_the_parameters(kind: str) -> None:
    """Each limit is named by its parameter with its value, its side, and a reason that ends as its side says."""
    judge = build_filter({"type": kind, **LIMITS[kind]}, where="test", key="filters[0]")
    thresholds = list(judge.thresholds())
    assert {t.setting: t.value for t in thresholds} == LIMITS[kind]
    for threshold in thresholds:
        at_least = threshold.setting.startswith("min")
        assert threshold.keeps == ("at_least" if at_least else "at_most")
        assert threshold.reason.endswith("below_min" if at_least else "above_max")
        assert threshold.setting in inspect.signature(type(judge)).parameters


@pytest.mark.parametrize("kind", sorted(WITHOUT))
def test_other_filters_name_none(kind: str) -> None:
    """A filter without limits on a measure has no thresholds."""
    assert list(build_filter({"type": kind, **WITHOUT[kind]}, where="test", key="filters[0]").thresholds()) == []


def test_what_is_limited_is_held_by_an_annotator() -> None:
    """Each measure of a filter of rows is that of a column, also with a prefix; it is another with other parameters."""
    annotators = [build_annotator({"type": kind, "prefix": "x_"}, where="test", key="a") for kind in BUILTIN_ANNOTATORS]
    held = {measure for annotator in annotators for measure in annotator.measures.values()}
    for kind, limits in LIMITS.items():
        judge = build_filter({"type": kind, **limits}, where="test", key="filters[0]")
        if kind != "image_to_text_ratio":  # which counts what is left at its place
            assert {t.measure for t in judge.thresholds()} <= held, kind
    other = build_filter({"type": "audio_silence", "threshold_dbfs": -40.0}, where="test", key="filters[0]")
    assert not {t.measure for t in other.thresholds()} & held
