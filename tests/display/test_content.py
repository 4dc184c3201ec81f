"""`content_item` and `column_item`: raw bytes and plain values of every kind, and hostile ones."""

import contextlib
import datetime
import io
import json
import struct
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.display import (
    Content,
    absent_item,
    clips,
    column_item,
    content_item,
    linked,
    sample_html,
    sounds,
    thumbnail,
)
from mm_assets.display.item import MAX_WHOLE, human_bytes, human_seconds
from mm_assets.errors import MediaError, MissingExtraError
from mm_assets.media.flac import read_stream_info, with_length

from ..fields.clips import clip_file, ramp
from ..fields.conftest import wav_file
from ..media.subtitled import subtitled
from .media import check_item, claiming_png, counted, frames_file, image_file, made_by, midi_file, pixels

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def item_of(data: bytes, name: str = "it", content_type: str | None = None):
    item = content_item(name, Content.of(data), content_type)
    check_item(item)
    return item


def npy(array: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


# --- text and JSON ----------------------------------------------------------------------------------------------------


def test_text_is_shown_as_it_is() -> None:
    """Markup in a text stays text, and its characters are counted."""
    item = item_of(SCRIPT.encode())
    assert (item.kind, item.data["text"], item.facts["characters"]) == ("text", SCRIPT, str(len(SCRIPT)))


def test_long_text_is_shown_in_part() -> None:
    """Of a text of a megabyte the head is read and shown, and the note says so."""
    content, reads = counted("é".encode() * 500_000)
    item = content_item("a.txt", content)
    check_item(item)
    assert "first" in item.note
    assert sum(size for _, size in reads) < 500_000


def test_json_is_a_tree() -> None:
    """JSON is parsed, numbers that JavaScript would round and those that JSON lacks become texts."""
    item = item_of(b'{"a": [1, 9007199254740993, NaN, 1e999], "b": "\\ud800"}', "a.json")
    assert item.kind == "json"
    assert item.data["value"] == {"a": [1, "9007199254740993", "nan", "inf"], "b": "?"}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 500 + "]" * 500,
        '{"a": ' * 300 + "1" + "}" * 300,
        "9" * 5000,
        "{",
        json.dumps(["x" * 300] * 5000),
    ],
    ids=["unclosed", "deep", "deep objects", "long number", "not JSON", "long"],
)
def test_hostile_json_is_bounded(text: str) -> None:
    """JSON that is deep, long or not JSON gives a bounded item that says what is not shown."""
    item = item_of(text.encode(), "a.json")
    assert item.kind in ("json", "text")
    assert item.note


@pytest.mark.parametrize("name", ["a.svg", "a.html", "a.xml"])
def test_programs_for_browsers_are_texts(name: str) -> None:
    """SVG and HTML have no media: a browser that opened them would run what is in them."""
    item = item_of(b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>', name)
    assert (item.kind, item.media) == ("text", ())


def test_claimed_type_does_not_make_bytes_media() -> None:
    """A content type that the source claims chooses nothing that the bytes do not show."""
    item = item_of(SCRIPT.encode(), "a.png", "image/svg+xml")
    assert (item.kind, item.media) == ("text", ())
    assert item_of(SCRIPT.encode(), "a.txt", "video/mp4").kind == "unreadable"


def test_subtitles_become_segments_and_webvtt() -> None:
    """An SRT file has its times, and WebVTT in which no text is markup or ends its cue."""
    item = item_of(b"1\n00:00:01,000 --> 00:00:02,500\n<b>a</b>\n& b\n\n", "a.srt")
    assert item.data["segments"] == [[1.0, 2.5, "<b>a</b>\n& b"]]
    text = made_by(item, "subtitles").decode()
    assert text.startswith("WEBVTT\n\n00:00:01.000 --> 00:00:02.500\n&lt;b&gt;a&lt;/b&gt;\n&amp; b\n")
    assert item.media[0].content_type == "text/vtt"


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "AVIF"])
def test_images_that_browsers_show_are_their_stored_bytes(kind: str) -> None:
    """The media of such an image are ranges of the content itself, of a fixed type."""
    data = image_file(kind)
    item = item_of(data)
    assert (item.kind, item.data["width"], item.data["height"]) == ("image", 64, 48)
    assert made_by(item, "image") == data
    assert item.media[0].content_type == f"image/{kind.lower()}"
    assert thumbnail(item, 32) is not None


@pytest.mark.parametrize(
    ("kind", "mode"), [("TIFF", "RGB"), ("JPEG", "CMYK"), ("JPEG2000", "RGB"), ("PPM", "RGB"), ("ICO", "RGBA")]
)
def test_other_images_are_made_into_pictures(kind: str, mode: str) -> None:
    """A file that browsers do not show, or not in its colours, is decoded and encoded for them."""
    item = item_of(image_file(kind, mode))
    media = item.medium("image")
    assert item.kind == "image"
    assert media is not None
    assert media.read is None
    with Image.open(io.BytesIO(made_by(item, "image"))) as picture:
        assert picture.format in ("PNG", "JPEG")
        small = np.asarray(picture.convert("RGB").resize((64, 48)), dtype=int)
    assert np.abs(small[4, 4] - pixels()[4, 4]).max() < 30
    assert np.abs(small[4, 60] - pixels()[4, 60]).max() < 30


@pytest.mark.parametrize("kind", ["HEIF", "JXL"])
def test_images_of_extra_decoders_are_made_into_pictures(kind: str) -> None:
    """HEIC and JPEG XL are shown where their decoders are installed."""
    target = io.BytesIO()
    picture = Image.fromarray(pixels())
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").from_pillow(picture).save(target)
    else:
        pytest.importorskip("pillow_jxl")
        picture.save(target, kind)
    item = item_of(target.getvalue())
    assert (item.kind, item.data["width"]) == ("image", 64)
    with Image.open(io.BytesIO(made_by(item, "image"))) as made:
        assert (made.format, made.size) == ("JPEG", (64, 48))
    assert thumbnail(item) is not None


@pytest.mark.parametrize("mode", ["P", "1", "LA", "RGBA"])
def test_every_kind_of_pixels_has_a_thumbnail(mode: str) -> None:
    """Palettes, single bits and alpha become a JPEG of their colours, alpha on white."""
    item = item_of(image_file("PNG", mode))
    with Image.open(io.BytesIO(thumbnail(item) or b"")) as small:
        assert (small.format, small.size) == ("JPEG", (64, 48))


def test_orientation_is_applied() -> None:
    """A JPEG that its EXIF tag turns has its upright size, and so has its thumbnail."""
    exif = Image.Exif()
    exif[0x0112] = 6
    item = item_of(image_file("JPEG", exif=exif))
    assert (item.data["width"], item.data["height"], item.facts["turned"]) == (48, 64, "90°")
    with Image.open(io.BytesIO(thumbnail(item) or b"")) as small:
        assert small.size == (48, 64)


@pytest.mark.parametrize(
    ("kind", "what"), [("TIFF", "pages"), ("GIF", "frames"), ("PNG", "frames"), ("WEBP", "frames")]
)
def test_every_frame_of_a_sequence_is_there(kind: str, what: str) -> None:
    """Each frame is a picture of its own, and they differ."""
    item = item_of(frames_file(kind))
    assert (item.kind, item.facts[what]) == ("images", "3")
    frames = [made_by(item, frame["media"]) for frame in item.data["frames"]]
    assert len(set(frames)) == 3


def test_thumbnails_are_small() -> None:
    """A thumbnail keeps the aspect ratio and has the wanted size on its longer side."""
    target = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (600, 900, 3), np.uint8)).save(target, "JPEG")
    with Image.open(io.BytesIO(thumbnail(item_of(target.getvalue()), 90) or b"")) as small:
        assert (small.format, small.size) == ("JPEG", (90, 60))


def test_image_of_a_huge_claimed_size_is_refused() -> None:
    """A header that claims a hundred thousand pixels on a side costs nothing and says why it is not shown."""
    item = item_of(claiming_png(100_000, 100_000))
    assert item.kind == "unreadable"
    assert "10,000,000,000 pixels" in item.note
    assert thumbnail(item) is None


def test_truncated_image_says_so() -> None:
    """What is there of a truncated JPEG is shown, with a note; a TIFF of which nothing can be shown is unreadable."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    target = io.BytesIO()
    Image.fromarray(noise).save(target, "JPEG")
    item = item_of(target.getvalue()[:-2000])
    assert (item.kind, "truncated" in item.note) == ("image", True)
    assert thumbnail(item) is not None
    assert item_of(image_file("TIFF")[:-200]).kind == "unreadable"


def test_grey_of_16_bits_is_a_map() -> None:
    """A 16-bit grey PNG is numbers, which its picture's colours have a range for."""
    target = io.BytesIO()
    values = np.arange(64 * 48, dtype=np.uint16).reshape(48, 64) * 10
    Image.fromarray(values).save(target, "PNG")
    item = item_of(target.getvalue(), "a.depth.png")
    assert (item.kind, item.facts["range"]) == ("depth", "10 to 30,710")
    with Image.open(io.BytesIO(made_by(item, "map"))) as picture:
        assert picture.size == (64, 48)
        assert picture.getpixel((0, 0))[3] == 0  # not measured
        assert picture.getpixel((9, 9))[3] == 255


# --- audio, video, notes, arrays --------------------------------------------------------------------------------------


def test_audio_plays_its_stored_bytes_and_has_a_waveform() -> None:
    """A WAV is played as it is stored; its waveform has the samples' extremes and covers all of it."""
    samples = (np.sin(np.arange(16_000) / 20) * 16_000).astype(np.int16)
    data = wav_file(samples, 8000)
    item = item_of(data)
    assert (item.kind, item.data["duration"], made_by(item, "audio")) == ("audio", 2.0, data)
    peaks = json.loads(made_by(item, "peaks"))
    assert peaks["seconds"] == 2.0
    assert 100 <= len(peaks["peaks"]) <= 1600
    assert min(low for low, _ in peaks["peaks"]) == pytest.approx(-0.488, abs=0.01)
    assert thumbnail(item) is not None


def test_audio_that_no_browser_plays_is_made_a_wav() -> None:
    """AIFF is decoded to a WAV of the same samples."""
    import soundfile

    target = io.BytesIO()
    samples = ramp(4000)
    soundfile.write(target, samples, 8000, format="AIFF", subtype="PCM_16")
    item = item_of(target.getvalue())
    found, rate = soundfile.read(io.BytesIO(made_by(item, "audio")), dtype="int16", always_2d=True)
    assert (item.kind, rate, len(found)) == ("audio", 8000, 4000)
    assert np.abs(found.astype(int) - samples).max() <= 1


def test_truncated_audio_has_what_is_there() -> None:
    """The waveform of a FLAC that is truncated ends where it does, instead of failing."""
    import soundfile

    target = io.BytesIO()
    soundfile.write(target, ramp(400_000), 8000, format="FLAC")
    data = target.getvalue()
    item = item_of(data[: len(data) // 2])
    assert item.kind == "audio"
    assert 0 < json.loads(made_by(item, "peaks"))["seconds"] < 50
    short = item_of(wav_file(ramp(8000), 8000)[:-4000])
    assert "damaged" in short.note
    assert json.loads(made_by(short, "peaks"))["seconds"] == pytest.approx(0.75)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_flac_without_a_length_can_be_sought_in(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser gets a FLAC without a length with that of its frames, and all other bytes as they are stored."""
    import soundfile

    target = io.BytesIO()
    soundfile.write(target, ramp(100_000), 8000, format="FLAC")
    whole = target.getvalue()
    start = whole.index(b"fLaC")
    unknown = with_length(whole, start, 0)
    assert read_stream_info(memoryview(unknown), start).num_frames == 0
    if is_large:
        monkeypatch.setattr(sounds, "MAX_WHOLE", len(unknown) - 1)
    for stored, expected in (
        (unknown, whole),
        (whole, whole),
        (b"ID3\x04\x00\x00\x00\x00\x00\x0a" + bytes(10) + unknown, None),
    ):
        item = item_of(stored)
        played = item.medium("audio")
        assert played.read is not None
        served = played.read(0, len(stored))
        assert len(served) == played.size == len(stored)
        assert served == (expected or stored[:20] + whole)
        assert b"".join(played.read(at, min(7, len(stored) - at)) for at in range(0, 84, 7)) == served[:84]
        assert item.data["duration"] == 12.5
    cut = unknown[:-100]
    assert bytes(sounds._with_flac_length(Content.of(cut)).whole()) == cut


def test_video_plays_and_has_a_strip() -> None:
    """A video of a codec that browsers know is its stored bytes, with pictures of moments along it."""
    data = clip_file(num_frames=25, samples=ramp(16_000), audio_codec="aac")
    item = item_of(data)
    assert (item.kind, item.data["playable"], made_by(item, "video")) == ("video", True, data)
    assert item.medium("video").content_type == "video/mp4"
    seconds = [frame["seconds"] for frame in item.data["strip"]]
    assert seconds == sorted(seconds)
    assert len({made_by(item, frame["media"]) for frame in item.data["strip"]}) > 5
    assert thumbnail(item) is not None


def test_subtitles_of_a_file_are_tracks_of_its_player() -> None:
    """Each track inside a film is WebVTT with a name, in which no text is markup."""
    cues = [(0, 900, "one <b>&</b>"), (1000, 900, "two\n\nthree --> four")]
    item = item_of(subtitled("mp4", "mov_text", [("eng", cues), ("", cues[:1])]))
    check_item(item)
    first, other = item.data["tracks"]
    assert (first["label"], first["language"]) == ("eng", "eng")
    assert other["label"].startswith("track ")
    assert item.facts["subtitles"] == f"eng, {other['label']}"
    assert item.medium(first["media"]).content_type == "text/vtt"
    text = made_by(item, first["media"]).decode()
    assert text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.900\none &lt;b&gt;&amp;&lt;/b&gt;\n\n00:00:01.000")
    assert "two\nthree --&gt; four" in text


def test_video_of_another_codec_says_so() -> None:
    """A codec that browsers lack gives frames and a note, and its audio as a player."""
    item = item_of(clip_file(codec="mpeg4", num_frames=25, samples=ramp(16_000), audio_codec="aac"))
    assert (item.kind, item.data["playable"], item.medium("video")) == ("video", False, None)
    assert "mpeg4" in item.note
    assert len(item.data["strip"]) > 1


def test_damaged_video_is_unreadable() -> None:
    """A video without its index says what is wrong with it."""
    data = clip_file(num_frames=25)
    item = item_of(data[: len(data) // 2])
    assert item.kind == "unreadable"
    assert len(item.note) > 20


def test_large_media_are_never_read_whole() -> None:
    """Of a file above the limit only the head is read, and its bytes are served by range."""
    reads = []

    def read(offset: int, size: int) -> bytes:
        reads.append(size)
        return (b"\0\0\0\x20ftypisom" + bytes(100))[offset : offset + size].ljust(size, b"\0")

    item = content_item("a.mp4", Content(4 << 30, read))
    check_item(item)
    assert (item.kind, item.medium("video").size) == ("video", 4 << 30)
    assert sum(reads) < 1 << 20
    assert item.medium("video").read(8, 4) == b"isom"
    assert thumbnail(item) is None
    assert content_item("a.jpg", Content(MAX_WHOLE + 1, lambda at, n: image_file()[at : at + n])).kind == "unreadable"


class Reads:
    """Content whose ranges are counted."""

    def __init__(self, data: bytes) -> None:
        self.data, self.sizes = data, []
        self.content = Content(len(data), self.read)

    def read(self, offset: int, size: int) -> bytes:
        self.sizes.append(size)
        return self.data[offset : offset + size]


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_a_large_film_has_keyframes(container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A film above the limit is probed and has a strip, for which parts of it are read."""
    monkeypatch.setattr(clips, "MAX_WHOLE", 1000)
    codec = "libx264" if container == "mp4" else "libvpx"
    reads = Reads(clip_file(container=container, codec=codec, num_frames=100, gop=10))
    item = content_item("film", reads.content)
    check_item(item)
    assert (item.kind, item.data["playable"], item.data["duration"]) == ("video", True, pytest.approx(4, abs=0.2))
    assert "keyframes" in item.note
    frames = [made_by(item, frame["media"]) for frame in item.data["strip"]]
    assert len(set(frames)) > 5
    assert thumbnail(item) is not None
    assert max(reads.sizes) < 1 << 20


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "ogg", "m4a"])
def test_a_large_recording_has_a_waveform_of_moments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording above the limit has a waveform over all of its duration: quiet first, loud at the end."""
    monkeypatch.setattr(sounds, "MAX_WHOLE", 1000)
    item = content_item("sound", Reads(recording(name)).content)
    check_item(item)
    assert (item.kind, item.data["duration"]) == ("audio", pytest.approx(20, abs=0.2))
    assert "moments" in item.note
    found = json.loads(made_by(item, "peaks"))
    assert found["seconds"] == pytest.approx(20, abs=0.2)
    loud = np.array([high - low for low, high in found["peaks"]])
    assert loud[5 : len(loud) // 2 - 5].max() < 0.1
    assert loud[len(loud) // 2 + 5 : -5].min() > 0.5


def test_a_large_recording_is_looked_at_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the limit of bytes is reached, the waveform covers what was read, and without any it is a `MediaError`."""
    monkeypatch.setattr(sounds, "MAX_WHOLE", 1000)
    monkeypatch.setattr(sounds, "_MAX_READ", 1 << 20)
    item = content_item("sound", Reads(recording("wav")).content)
    found = json.loads(made_by(item, "peaks"))
    assert 0 < found["seconds"] < 19
    monkeypatch.setattr(sounds, "_MAX_READ", 1 << 16)
    with pytest.raises(MediaError):
        made_by(item, "peaks")


def recording(name: str) -> bytes:
    """Twenty seconds in a format, the second half loud."""
    import av

    form, codec = {
        "wav": ("wav", "pcm_s16le"),
        "flac": ("flac", "flac"),
        "mp3": ("mp3", "libmp3lame"),
        "ogg": ("ogg", "libopus"),
        "m4a": ("ipod", "aac"),
    }[name]
    target = io.BytesIO()
    with av.open(target, "w", format=form) as output:
        stream = output.add_stream(codec, rate=48_000, layout="mono")
        for second in range(20):
            wave = np.sin(np.arange(48_000) / 20) * (0.01 if second < 10 else 0.8)
            frame = av.AudioFrame.from_ndarray((wave * 32767).astype(np.int16)[np.newaxis], format="s16", layout="mono")
            frame.rate, frame.pts = 48_000, second * 48_000
            for packet in stream.encode(frame):
                output.mux(packet)
        for packet in stream.encode(None):
            output.mux(packet)
    return target.getvalue()


@pytest.mark.parametrize(
    ("head", "kind"),
    [(b"ID3\4" + bytes(60), "audio"), (b"OggS" + bytes(60), "audio"), (b"FORM\0\0\0\0AIFF", "unreadable")],
)
def test_large_audio_plays_by_its_type(head: bytes, kind: str) -> None:
    """Of a recording above the limit the head is enough to play it where browsers know the type."""
    item = content_item("a", Content(1 << 32, lambda at, n: head[at : at + n].ljust(n, b"\0")))
    check_item(item)
    assert item.kind == kind
    assert (item.medium("peaks"), bool(item.note)) == (None, True)


def test_midi_is_notes() -> None:
    """Notes have onset, duration, pitch, velocity and channel; a great many are not all drawn."""
    item = item_of(midi_file(), "a.mid")
    assert item.kind == "midi"
    assert item.data["notes"][1] == [0.5, 0.5, 61, 90, 0]
    many = item_of(midi_file(9000))
    assert (len(many.data["notes"]), "9,000" in many.note) == (6000, True)


def test_the_thumbnail_of_midi_is_a_piano_roll() -> None:
    """Notes are drawn from left to right at their pitch, and a file without notes has no picture."""
    with Image.open(io.BytesIO(thumbnail(item_of(midi_file(), "a.mid"), 120) or b"")) as small:
        is_note = np.asarray(small.convert("RGB"), np.int16)[:, :, 0] < 150
    assert small.size == (120, 60)
    tops = [int(np.argmax(is_note[:, column])) for column in (10, 60, 110)]
    assert tops == sorted(tops, reverse=True)
    assert len(set(tops)) == 3
    assert thumbnail(item_of(midi_file(0), "a.mid"), 120) is None


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5),
        np.zeros((0, 4)),
        np.float32(3).reshape(()),
        np.full((500, 3), np.nan),
        np.ones((4, 9, 9), np.uint8),
        np.zeros((2, 5, 5, 3), np.uint8),
        np.array([1 + 2j, 3]),
        np.array([True, False]),
        np.full((9, 2), 1.79e308),
    ],
    ids=["line", "empty", "scalar", "NaN", "planes", "pixels", "complex", "bool", "largest"],
)
def test_arrays_have_their_facts(array: np.ndarray) -> None:
    """Shape, dtype and first values of any array, its plane as a picture, its columns as a plot."""
    item = item_of(npy(array), "a.npy")
    assert (item.kind, item.data["shape"], item.facts["dtype"]) == ("array", list(array.shape), str(array.dtype))
    assert all(made_by(item, media.name).startswith(b"\x89PNG") for media in item.media)


def test_long_series_are_reduced_to_extremes() -> None:
    """A plot of a million steps has at most 2,000 points, and a spike of one step is among them."""
    values = np.zeros(1_000_000, np.float32)
    values[654_321] = 9
    drawn = column_item("it", values).data["plot"]
    assert drawn["reduced"]
    assert len(drawn["times"]) <= 2000
    assert max(drawn["channels"][0]["high"]) == 9


# --- values of columns ------------------------------------------------------------------------------------------------


VALUES = {
    "None": (None, "absent"),
    "bool": (True, "scalar"),
    "int": (7, "scalar"),
    "float": (2.5, "scalar"),
    "NaN": (float("nan"), "scalar"),
    "long int": (10**6000, "scalar"),
    "NumPy": (np.int8(3), "scalar"),
    "text": ("text", "text"),
    "object": ({"a": 1}, "json"),
    "list": ([1], "json"),
    "image": (image_file(), "image"),
    "view": (memoryview(b"hello"), "text"),
    "array": (np.arange(3), "array"),
    "any": (object(), "json"),
    "date": (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "scalar"),
    "decimal": (Decimal("1.50"), "scalar"),
    "embedding": ([0.5] * 20, "array"),
    "table": ([[1, 2]] * 9, "array"),
    "ragged": ([[1], [1, 2]] * 9, "json"),
    "texts": (["a"] * 20, "json"),
    "file of a table": ({"bytes": image_file(), "path": "a.jpg"}, "image"),
    "empty file": ({"bytes": None, "path": "a.jpg"}, "json"),
    "no bytes": (b"", "text"),
}


@pytest.mark.parametrize(("value", "kind"), VALUES.values(), ids=VALUES)
def test_columns_have_a_kind_by_their_value(value: object, kind: str) -> None:
    """Any value of a table's column is shown, whatever its type."""
    item = column_item("it", value)
    check_item(item)
    assert item.kind == kind


def test_absent_says_so() -> None:
    """An absent modality is an item that says so."""
    assert "none" in absent_item("it").note


def test_units_for_people() -> None:
    """Bytes and seconds are written as people write them."""
    assert [human_bytes(size) for size in (0, 999, 1000, 1_234_567)] == ["0 B", "999 B", "1 kB", "1.23 MB"]
    assert [human_seconds(one) for one in (3.21, 65, 3723)] == ["3.21 s", "1:05 min", "1:02:03 h"]


# --- any bytes --------------------------------------------------------------------------------------------------------

SEEDS = [image_file(), image_file("PNG"), frames_file("GIF"), frames_file("TIFF"), midi_file(), npy(np.arange(6))]
SEEDS += [wav_file(ramp(500), 8000), b'{"a": [1, {"b": null}]}', b"1\n00:00:01,000 --> 00:00:02,000\nx\n"]
SEEDS += [
    b"RIFF\xff\xff\xff\xffWAVEfmt ",
    b"OggS",
    b"\x1aE\xdf\xa3",
    b"\0\0\0\x20ftypheic",
    b"II*\0",
    b"MThd",
    b"P6 9 9 255 ",
]
NAMES = [
    "a",
    "a.json",
    "a.jpg",
    "a.png",
    "a.mp4",
    "a.wav",
    "a.mp3",
    "a.mid",
    "a.npy",
    "a.srt",
    "a.tiff",
    "a.svg",
    "a.txt",
]


def check_all_of(item) -> None:
    """Everything that is done with an item works, or says why not."""
    check_item(item)
    thumbnail(item)
    sample_html(linked([item]))
    for media in item.media:
        if media.make is not None:
            with contextlib.suppress(MediaError, MissingExtraError):
                media.make()


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300), name=st.sampled_from(NAMES))
def test_any_bytes_have_an_item(data: bytes, name: str) -> None:
    """No bytes make `content_item` raise, nor what is done with its item."""
    check_all_of(content_item(name, Content.of(data)))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.sampled_from(SEEDS),
    name=st.sampled_from(NAMES),
    place=st.integers(0, 400),
    byte=st.integers(0, 255),
    end=st.integers(0, 4000),
)
def test_damaged_media_have_an_item(seed: bytes, name: str, place: int, byte: int, end: int) -> None:
    """Media with a byte changed, or truncated, have an item, by whatever name they come."""
    data = bytearray(seed[:end] if end else seed)
    if data:
        data[place % len(data)] = byte
    check_all_of(content_item(name, Content.of(data)))


def test_sizes_of_a_header_are_not_believed() -> None:
    """A WAV whose header claims 4 GB has the samples that are there."""
    data = bytearray(wav_file(ramp(8000), 8000))
    struct.pack_into("<I", data, 40, 0xFFFFFFF0)
    item = item_of(bytes(data))
    assert item.data["duration"] == pytest.approx(1.0, abs=0.01)
