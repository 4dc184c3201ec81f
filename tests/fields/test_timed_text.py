import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields import TimedSegment, TimedTextField, segments_at, segments_between
from mm_assets.testing import FieldSuite

WORDS = [TimedSegment(0.0, 0.5, "a"), TimedSegment(0.25, 0.75, "é"), TimedSegment(0.75, 0.75, "")]
SRT = "1\n00:00:01,000 --> 00:00:02,500\n<b>Hello</b>\n"
HELLO = [TimedSegment(1.0, 2.5, "<b>Hello</b>")]
WHISPER = {
    "text": "x",
    "language": "en",
    "segments": [{"id": 0, "start": 0.1, "end": 0.7, "text": " Hi", "tokens": [1]}],
}
GENTLE = {
    "transcript": "the dog",
    "words": [
        {"case": "success", "word": "the", "start": 0.1, "end": 0.2, "phones": []},
        {"case": "not-found-in-audio", "word": "dog"},
    ],
}


def decoded(field, value):
    return field.decode(*field.encode(value))


class TestTimedTextField(FieldSuite):
    fields = [
        TimedTextField(),
        TimedTextField(sort=True),
        TimedTextField(strip_tags=True, untimed="drop"),
        TimedTextField(max_segments=2),
    ]
    cases = [
        (WORDS, WORDS),
        (SRT, HELLO),
        (SRT.encode(), HELLO),
        ([(0, 1, "x"), [1, np.float32(1.5), "y"]], [TimedSegment(0.0, 1.0, "x"), TimedSegment(1.0, 1.5, "y")]),
        (({"word": "x", "start": 0, "end": 1},), [TimedSegment(0.0, 1.0, "x")]),
        ([{"text": "x", "start_seconds": 0, "end_time": 1}], [TimedSegment(0.0, 1.0, "x")]),
        ([{"text": "x", "timestamp": (0.5, 1)}], [TimedSegment(0.5, 1.0, "x")]),
        (WHISPER, [TimedSegment(0.1, 0.7, " Hi")]),
        (json.dumps(WHISPER).encode(), [TimedSegment(0.1, 0.7, " Hi")]),
        ('\ufeff [ [0.1, 0.7, "Hi"] ]', [TimedSegment(0.1, 0.7, "Hi")]),
        ("[00:01.00]la\n[00:02.50]", [TimedSegment(1.0, 2.5, "la")]),
        ("WEBVTT\n\n00:01.000 --> 00:02.500\n<b>Hello</b>", HELLO),
        (b"", []),
        ("[]", []),
    ]
    empty = ([], [])
    maximum = (TimedTextField(max_segments=3), WORDS)
    past_maximum = (TimedTextField(max_segments=2), WORDS)
    wrong_types = [5, 1.5, [5], ["x"], [(0, 1)], [(0, 1, 5)], [(0, 1, None)], {"text": "x"}, [{"start": 0, "end": 1}]]
    wrong_shapes = [
        [(1, 0, "x")],
        [(-0.5, 1, "x")],
        [(0, float("nan"), "x")],
        [(0, float("inf"), "x")],
        [(0, None, "x")],
        [(True, 2, "x")],
        [("0", "1", "x")],
        [(0, 10**400, "x")],
        [(0, 1, "\ud800")],
        [(1, 2, "x"), (0.5, 3, "y")],
        [{"text": "x", "timestamp": (0.5, None)}],
        GENTLE,
        "no subtitles",
        b"\xff\xff",
        "{broken",
        "[[" * 100_000,
        SRT.replace("02,500", "00,500"),
    ]
    bad_configs = [
        {"sort": 1},
        {"strip_tags": None},
        {"untimed": "keep"},
        {"max_segments": 0},
        {"max_segments": 2**32},
        {"max_segments": True},
    ]


SEGMENTS = st.lists(
    st.tuples(
        st.floats(0, 1e6, allow_nan=False),
        st.floats(0, 1e3, allow_nan=False),
        st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8),
    ).map(lambda one: TimedSegment(one[0], one[0] + one[1], one[2])),
    max_size=20,
)


@given(SEGMENTS)
@settings(deadline=None, max_examples=100)
def test_times_and_texts_round_trip_to_the_bit(segments):
    """Any segments come back exactly, in order of their starts, and their times are read without their texts."""
    field = TimedTextField(sort=True)
    expected = sorted(segments, key=lambda one: one.start_seconds)
    payload = field.encode(segments)
    assert field.decode(*payload) == expected
    times = field.times(*payload)
    assert times.shape == (len(segments), 2)
    assert times.dtype == np.float64
    assert times.tolist() == [list(one[:2]) for one in expected]
    assert decoded(TimedTextField(), expected) == expected


def test_times_are_a_view():
    """The columns of times are the payload's own bytes, and cannot be written to."""
    field = TimedTextField()
    metadata, data = field.encode(WORDS)
    times = field.times(metadata, data)
    assert np.shares_memory(times, np.frombuffer(data, np.uint8))
    assert not times.flags.writeable
    cover = np.frombuffer(metadata, field.metadata_type)[0]
    assert (cover["num_segments"], cover["start_seconds"], cover["end_seconds"]) == (3, 0.0, 0.75)


def test_order_is_demanded_or_made():
    """Starts that decrease are refused, unless they are to be sorted; equal ones stay in their order."""
    mixed = [(1, 2, "b"), (0, 3, "a"), (1, 1, "c")]
    with pytest.raises(EncodeError, match="sort"):
        TimedTextField().encode(mixed)
    assert [one.text for one in decoded(TimedTextField(sort=True), mixed)] == ["a", "b", "c"]


def test_words_that_no_aligner_found():
    """An item without times is refused, or left out on request; one with half of them is always refused."""
    with pytest.raises(EncodeError, match="segment 1"):
        TimedTextField().encode(GENTLE)
    field = TimedTextField(untimed="drop")
    assert decoded(field, GENTLE) == [TimedSegment(0.1, 0.2, "the")]
    with pytest.raises(EncodeError, match="finite"):
        field.encode([{"word": "dog", "start": 1.0}])


def test_a_damaged_file_is_refused_with_its_line():
    """The line that a subtitle parser stumbles over is in the error."""
    with pytest.raises(EncodeError, match="TimedTextField: found line 2"):
        TimedTextField().encode(SRT.replace("-->", "--> x"))


def test_markup_is_stripped_on_request():
    """Tags are part of the text unless the field is set otherwise."""
    assert decoded(TimedTextField(strip_tags=True), SRT) == [TimedSegment(1.0, 2.5, "Hello")]


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e9])
def test_impossible_times_are_damage(column, value):
    """A payload whose times are not times, out of order, or not those of its record is refused."""
    field = TimedTextField()
    metadata, data = field.encode(WORDS)
    broken = bytearray(data)
    np.frombuffer(broken, "<f8", 6)[3 * column] = value
    for read in (field.decode, field.times):
        with pytest.raises(FormatError):
            read(metadata, broken)


def test_a_text_truncated_within_a_character_is_damage():
    """Text offsets that split a character are noticed."""
    field = TimedTextField()
    metadata, data = field.encode(WORDS)
    broken = bytearray(data)
    offsets = np.frombuffer(broken, "<u4", 4, 48)
    assert offsets.tolist() == [0, 1, 3, 3]
    offsets[2] = 2
    with pytest.raises(FormatError, match="UTF-8"):
        field.decode(metadata, broken)


@given(SEGMENTS, st.floats(0, 1e6), st.floats(0, 1e6))
@settings(deadline=None, max_examples=100)
def test_look_up_by_time(segments, one, other):
    """The segments at a moment, and within a span, are those that a scan of all finds."""
    segments.sort(key=lambda segment: segment.start_seconds)
    moments = [one, *(time for segment in segments[:3] for time in segment[:2])]
    for moment in moments:
        expected = [s for s in segments if s.start_seconds <= moment < s.end_seconds or moment == s.start_seconds]
        assert segments_at(segments, moment) == expected
    start, end = sorted([one, other])
    expected = [s for s in segments if s.start_seconds < end and (s.end_seconds > start or s.start_seconds >= start)]
    assert segments_between(segments, start, end) == expected


def test_look_up_at_the_edges():
    """Spans are half open, and a text without duration is at its moment."""
    assert segments_at(WORDS, 0.5) == [WORDS[1]]
    assert segments_at(WORDS, 0.75) == [WORDS[2]]
    assert segments_at(WORDS, 9.0) == []
    assert segments_between(WORDS, 0.5, 0.75) == [WORDS[1]]
    assert segments_between(WORDS, 0.75, 1.0) == [WORDS[2]]
    assert segments_at([], 0.0) == []


def test_real_subtitles(shared_data, members_of):
    """The subtitles of the sample corpora have the times that their lines say, to the millisecond."""
    count = 0
    for name, data in members_of(shared_data, (".srt", ".vtt", ".lrc")):
        count += 1
        segments = decoded(TimedTextField(), data)
        starts = [round(one.start_seconds * 1000) for one in segments]
        stamps = [line.split(" --> ")[0] for line in data.decode().splitlines() if "-->" in line]
        written = [
            int(stamp[:2]) * 3_600_000 + int(stamp[3:5]) * 60_000 + int(stamp[6:8]) * 1000 + int(stamp[9:12])
            for stamp in stamps
        ]
        assert starts == written, name
        assert all(one.text in data.decode() for one in segments)
    assert count >= 2
