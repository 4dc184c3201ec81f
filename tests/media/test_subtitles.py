import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import MediaError
from mm_assets.media.subtitles import TimedSegment, parse_subtitles

SRT = """1
00:00:01,000 --> 00:00:02,500
Hello <i>there</i>

2
00:00:02,500 --> 01:00:04,001  X1:100 X2:200
{\\an8}two
lines
"""
VTT = """WEBVTT - a title
Kind: captions

NOTE
a comment

STYLE
::cue { color: red }

first
00:01.000 --> 00:02.500 align:start
<v Ann>Hello &amp; <00:00:01.500>bye</v>

00:00:02.500 --> 01:00:04.001
two
lines
"""
LRC = """[ti:A song]
[offset:500]
[length:01:00]
[00:12.50][00:30.50]Chorus
[00:20.5]Verse
[00:25.500]
"""
TWO = [TimedSegment(1.0, 2.5, "Hello <i>there</i>"), TimedSegment(2.5, 3604.001, "{\\an8}two\nlines")]
SONG = [TimedSegment(12.0, 20.0, "Chorus"), TimedSegment(20.0, 25.0, "Verse"), TimedSegment(30.0, 60.0, "Chorus")]


@pytest.mark.parametrize(
    "content",
    [
        SRT,
        "\ufeff" + SRT,
        SRT.replace("\n", "\r\n"),
        SRT.replace("\n", "\r"),
        SRT.encode("utf-8-sig"),
        SRT.encode("utf-16"),
        "\n\n" + SRT.strip(),
        SRT.replace("1\n00", "00").replace("2\n00", "00"),  # no indices
        SRT.replace("1\n00", " 7 \n0").replace(",", "."),
        memoryview(SRT.encode()),
    ],
)
def test_srt_is_read_as_real_tools_write_it(content):
    """SRT gives the same segments with a byte order mark, any line ends, and without or with wrong indices."""
    assert parse_subtitles(content) == TWO


def test_an_srt_text_may_be_empty_have_empty_lines_or_digits():
    """What follows a time line is its text, whatever it looks like, but for empty lines around it."""
    text = "1\n00:00:01,000 --> 00:00:01,000\n\n2\n00:00:02,000 --> 00:00:03,000\n\n42\n\nend\n\n\n"
    assert parse_subtitles(text) == [(1.0, 1.0, ""), (2.0, 3.0, "42\n\nend")]
    odd = "00:00:01,000 --> 00:00:02,000\na\u2028b\x0cc\n"
    assert parse_subtitles(odd) == [(1.0, 2.0, "a\u2028b\x0cc")]


def test_vtt_is_read():
    """WebVTT gives its cues without identifiers, settings, notes and styles."""
    expected = [(1.0, 2.5, "<v Ann>Hello &amp; <00:00:01.500>bye</v>"), (2.5, 3604.001, "two\nlines")]
    assert parse_subtitles(VTT) == expected
    assert parse_subtitles(VTT.replace("\n", "\r\n").encode("utf-8-sig")) == expected
    assert parse_subtitles("WEBVTT") == []


def test_lrc_is_read_in_order_of_time():
    """LRC lines end where the next later one begins, repeats are put in their places, and the offset is applied."""
    assert parse_subtitles(LRC) == SONG
    assert parse_subtitles(LRC.encode("utf-16")) == SONG
    assert parse_subtitles("[00:01.00]a\n[00:01.00]b\n[00:02]c") == [(1.0, 2.0, "a"), (1.0, 2.0, "b"), (2.0, 2.0, "c")]


def test_markup_is_kept_or_taken_out():
    """Tags are part of the text unless they are to be stripped."""
    assert [one.text for one in parse_subtitles(SRT, strip_tags=True)] == ["Hello there", "two\nlines"]
    assert [one.text for one in parse_subtitles(VTT, strip_tags=True)] == ["Hello & bye", "two\nlines"]
    enhanced = "[00:01.00]<00:01.00> Hello <00:01.50> you"
    assert parse_subtitles(enhanced) == [(1.0, 1.0, "<00:01.00> Hello <00:01.50> you")]
    assert parse_subtitles(enhanced, strip_tags=True) == [(1.0, 1.0, "Hello you")]
    assert parse_subtitles("00:00:01,000 --> 00:00:02,000\n1 < 2 > 0", strip_tags=True)[0].text == "1 < 2 > 0"


@pytest.mark.parametrize("content", ["", " \n", b"\xef\xbb\xbf", "\r\n\r\n"])
def test_nothing_has_no_segments(content):
    """A file of white space is a file without segments."""
    assert parse_subtitles(content) == []


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("1\n00:00:01,000 -> 00:00:02,000\nx", "expected SRT"),
        ("1\n00:00:01,000 --> 00:00:0x,000\nx", "line 2"),
        ("1\n00:00:61,000 --> 00:01:02,000\nx", "line 2"),
        ("1\n00:00:03,000 --> 00:00:02,000\nx", "line 2.*at or after"),
        ("1\n00:00:01,5 --> 00:00:02,0\nx", "line 2"),
        ("hello\n00:00:01,000 --> 00:00:02,000\nx", "line 1"),
        ("WEBVTTX\n\n00:01.000 --> 00:02.000\nx", "line 1"),
        ("WEBVTT\n\nonly an identifier\n", "line 3.*time line"),
        ("WEBVTT\n\n00:01,000 --> 00:02,000\nx", "line 3"),
        ("[00:01.00]a\nb", "line 2"),
        ("[00:61.00]a", "line 1"),
        ("[offset:+x]\n[00:01.00]a", "line 1"),
        ("[length:soon]\n[00:01.00]a", "line 1"),
        ("[offset:1500]\n[00:01.00]a", "line 2.*0 or later"),
        ("[length:00:10]\n[00:11.00]a", "line 2.*length"),
        ("[Script Info]\nTitle: x", "line 1"),
        (b"\xff\xfe\x00\xd8", "UTF-16"),
        (b"caf\xe9", "UTF-8"),
        ("just text", "expected SRT, WebVTT or LRC"),
    ],
)
def test_damage_is_named_with_its_line(content, where):
    """A file that cannot be read at all is an error that has the line."""
    with pytest.raises(MediaError, match=where):
        parse_subtitles(content)


A, B = (1.0, 2.0, "a"), (3.0, 4.0, "b")
SRT_A, SRT_B = "1\n00:00:01,000 --> 00:00:02,000\na\n", "3\n00:00:03,000 --> 00:00:04,000\nb\n"
VTT_A, VTT_B = "WEBVTT\n\n00:01.000 --> 00:02.000\na\n", "00:03.000 --> 00:04.000\nb\n"


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("content", "expected", "lines"),
    [
        (f"{SRT_A}from A --> B\n\n{SRT_B}", [(1.0, 2.0, "a\nfrom A --> B"), B], []),
        (f"{SRT_A}-->\n\n{SRT_B}", [(1.0, 2.0, "a\n-->"), B], []),
        (f"{SRT_A}\n2\n00:00:0x,000 --> 00:00:03,000\nlost\n\n{SRT_B}", [A, B], [6]),
        (f"{SRT_A}\n2\n00:00:02,900 --> 00:00:02,500\nlost\n\n{SRT_B}", [A, B], [6]),
        (f"{SRT_A}\n2\n00:00:61,000 --> 00:01:02,000\n{SRT_B}", [A, B], [6]),
        (f"{SRT_A}\n2\n-00:00:01,000 --> 00:00:02,000\nlost\n\n{SRT_B}", [A, B], [6]),
        (SRT_A.replace("1\n", "1\n\n", 1) + "\n" + SRT_B.replace("3\n", "3\n\n", 1), [A, B], []),
        (f"{SRT_A}{SRT_B}", [A, B], []),
        (f"{SRT_B}\n{SRT_A}", [A, B], []),
        ("123:00:01,000 --> 123:00:02,000\na", [(442801.0, 442802.0, "a")], []),
        ("00:01,000-->00:02.000 X1:1\na", [A], []),
        (f"{VTT_A}from A --> B\nlost\n\n{VTT_B}", [A, B], [5]),
        (f"{VTT_A}\nid\n00:02,000 --> 00:02,500\nlost\n\n{VTT_B}", [A, B], [7]),
        (f"{VTT_A}\n00:02.900 --> 00:02.500\nlost\n\n{VTT_B}", [A, B], [6]),
        (f"{VTT_A}\nnot a cue\nat all\n\n{VTT_B}", [A, B], [6]),
        (f"{VTT_A}\nNOTE -\nSTYLE\n\nREGION\nid:r\n\nNOTE\n\n{VTT_B}", [A, B], []),
        (f"{VTT_A}{VTT_B}", [A, B], []),
        (f"{VTT_A}\n{VTT_B}".replace("WEBVTT\n\n", "WEBVTT title\n"), [A, B], []),
        (f"{VTT_A}\n{VTT_B}".replace("WEBVTT\n\n", "WEBVTT\nKind: captions\n"), [A, B], []),
        (f"{VTT_B}\n{VTT_A.partition('WEBVTT')[2]}".join(["WEBVTT\n\n", ""]), [A, B], []),
        (f"{VTT_A} \n\n{VTT_B} \n", [A, B], []),
        ("WEBVTT\n\n00:00.000 --> 00:01.000\n \nhello\n \nyou\n", [(0.0, 1.0, "hello\n \nyou")], []),
        ("WEBVTT\n\n1:00:01.000-->100:00:02.000align:start\na", [(3601.0, 360002.0, "a")], []),
        ("WEBVTT\n\n00:01.000 --> 00:02.000\n\n00:03.000 --> 00:04.000\nb", [(1.0, 2.0, ""), B], []),
    ],
)
def test_a_fault_costs_one_cue(content, expected, lines, ends):
    """Arrows in dialogue, damaged times and tight headers cost at most their own cue, and what is left out is named."""
    reports = []
    assert parse_subtitles("\ufeff" + content.replace("\n", ends), report=reports.append) == expected
    assert [f"line {line}:" in report for line, report in zip(lines, reports, strict=True)] == [True] * len(lines)


PIECES = st.sampled_from(
    [
        "WEBVTT",
        "\n",
        "\r\n",
        "1",
        "00:00:01,000",
        "00:01.000",
        " --> ",
        "[00:01.00]",
        "[offset:9]",
        "NOTE",
        "<",
        ">",
        "x",
    ]
)


@given(st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text(), st.binary(max_size=60)))
@settings(deadline=None, max_examples=300)
def test_whatever_arrives_is_read_or_refused(content):
    """Any text or bytes give segments that make sense, or MediaError and nothing else."""
    for strip_tags in (False, True):
        try:
            segments = parse_subtitles(content, strip_tags=strip_tags)
        except MediaError:
            continue
        assert all(0 <= one.start_seconds <= one.end_seconds for one in segments)


@given(st.lists(st.integers(0, 359_999_999), min_size=2, max_size=2).map(sorted))
@settings(deadline=None, max_examples=100)
def test_milliseconds_survive_rounding(times):
    """Every millisecond of a hundred hours is distinct and survives the float of its seconds."""
    stamps = [
        "{:02}:{:02}:{:02},{:03}".format(*(t // 3_600_000, t // 60_000 % 60, t // 1000 % 60, t % 1000)) for t in times
    ]
    (segment,) = parse_subtitles(f"{' --> '.join(stamps)}\nx")
    assert [round(time * 1000) for time in segment[:2]] == times


LINES = st.sampled_from(
    ["a", "--> b", "a --> b", "10:00 or", "00:00:05,000", "1984 was", "<i>x</i>", "WEBVTT", "NOTE", "-"]
)
FAULTS = st.sampled_from(["00:00:0x,000 --> 00:00:01,000", "00:00:05,000 --> 00:00:04,000", "1:00 --> 2:00"])


@pytest.mark.nightly_examples(10_000)
@given(st.lists(st.tuples(st.lists(LINES, min_size=1, max_size=3), st.none() | FAULTS), min_size=1, max_size=6))
@settings(deadline=None, max_examples=100)
def test_readable_srt_cues_survive_any_faults(cues):
    """Whatever dialogue says and whichever times are damaged, every readable SRT cue is read whole, at its time."""
    times = [f"00:00:{number:02},000 --> 00:01:00,000" for number in range(len(cues))]
    blocks = [
        "\n".join([str(number), time if fault is None else fault, *text])
        for number, (time, (text, fault)) in enumerate(zip(times, cues, strict=True))
    ]
    expected = [(float(n), 60.0, "\n".join(text)) for n, (text, fault) in enumerate(cues) if fault is None]
    reports = []
    if expected:
        assert parse_subtitles("\n\n".join(blocks), report=reports.append) == expected
        assert len(reports) == len(cues) - len(expected)
    else:
        with pytest.raises(MediaError, match="line 2"):
            parse_subtitles("\n\n".join(blocks))
