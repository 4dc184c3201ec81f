import io
import json
import sys
import tarfile
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from mm_assets.errors import ConfigError, MissingExtraError
from mm_assets.filters import video as video_filters
from mm_assets.filters.apply import FilterStream
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.rows.schema import DatasetSchema


def _clip(
    frames: int, *, rate: Fraction | int = 25, size: tuple[int, int] = (32, 16), sound: int = 0, form: str = "mp4"
) -> bytes:
    """A video file: `frames` of a (width, height), and seconds of silence; 0 leaves a stream out."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        picture = container.add_stream("mpeg4", rate=rate) if frames else None
        audio = container.add_stream("aac", rate=8000, layout="mono") if sound else None
        if picture is not None:
            picture.width, picture.height, picture.pix_fmt = *size, "yuv420p"
            for number in range(frames):
                frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), number, np.uint8), format="rgb24")
                container.mux(picture.encode(frame))
            container.mux(picture.encode(None))
        if audio is not None:
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * sound), np.float32), format="fltp", layout="mono")
            samples.sample_rate = 8000
            container.mux(audio.encode(samples))
            container.mux(audio.encode(None))
    return buffer.getvalue()


def _judge(table: pa.Table, **config: object) -> list[tuple[int, str, float | None]]:
    """What the filter drops: (position, reason, value)."""
    built = build_filter({"type": "video_duration", **config}, where="w", key="k")
    stream = FilterStream([table], annotators=[], filters=[built], schema=DatasetSchema(), on_empty_sample="keep")
    list(stream)
    rows = [row for part in stream.take_dropped() for row in part.to_pylist()]
    return [(r["position"], r["reason"], r["value"]) for r in rows]


@pytest.mark.parametrize("form", ["mp4", "matroska", "avi"])
def test_duration_limits_are_inclusive(make_table, form):
    """Video from the shortest to the longest duration is kept, both included, in every container; the value is it."""
    clips = [_clip(frames, form=form) for frames in (20, 25, 50, 75)]
    table = make_table({"a": [("video", clip) for clip in clips] + [("audio", b"?"), ("text", "t")]})
    found = _judge(table, min_seconds=1, max_seconds=2)
    assert found == [(0, "below_min", pytest.approx(0.8)), (3, "above_max", pytest.approx(3.0))]
    assert [d[0] for d in _judge(table, min_seconds=1)] == [0]
    assert [d[0] for d in _judge(table, max_seconds=1)] == [2, 3]


def test_frame_rates_are_compared_to_three_decimals(make_table):
    """A limit of 29.97 or 23.976, as people write it, includes 30000/1001 or 24000/1001."""
    rates = [24, Fraction(24_000, 1001), 25, Fraction(30_000, 1001), 30]
    table = make_table({"a": [("video", _clip(10, rate=rate)) for rate in rates]})
    assert _judge(table, min_frame_rate=24, max_frame_rate=29.97) == [
        (1, "frame_rate_below_min", 23.976), (4, "frame_rate_above_max", 30.0)
    ]  # fmt: skip
    assert [d[0] for d in _judge(table, min_frame_rate=23.976, max_frame_rate=29.96)] == [3, 4]


def test_sizes_are_compared(make_table):
    """Width and height have smallest values, inclusive; the width is named first."""
    table = make_table({"a": [("video", _clip(3, size=size)) for size in [(32, 16), (48, 16), (48, 32), (32, 32)]]})
    assert _judge(table, min_width=48, min_height=32) == [
        (0, "width_below_min", 32.0), (1, "height_below_min", 16.0), (3, "width_below_min", 32.0)
    ]  # fmt: skip


def test_sound_can_be_required(make_table):
    """Files without a sound stream go where sound is required."""
    table = make_table({"a": [("video", _clip(10, sound=1)), ("video", _clip(10))]})
    assert _judge(table, require_audio=True) == [(1, "no_audio", None)]
    assert _judge(table, min_seconds=0.1) == []


def test_a_file_without_pictures_has_a_duration_and_no_rate_or_size(make_table):
    """A video file of sound alone is judged by its duration; by frame rate or size it is below any limit."""
    table = make_table({"a": [("video", _clip(0, sound=2))]})
    assert _judge(table, min_seconds=1.9, max_seconds=2.2, require_audio=True) == []
    assert _judge(table, min_frame_rate=1) == [(0, "frame_rate_below_min", 0.0)]
    assert _judge(table, min_height=1) == [(0, "height_below_min", 0.0)]


def test_an_incomplete_header_is_unreadable(make_table, monkeypatch):
    """A limit on what the header does not have drops the row as one that cannot be judged; other limits judge it."""
    known = video_filters.probe_video
    unknown = {"duration_seconds": None, "frame_rate": None, "width": 0, "height": 0}

    def probe(data):
        from dataclasses import replace

        return replace(known(data), **unknown)

    monkeypatch.setattr(video_filters, "probe_video", probe)
    table = make_table({"a": [("video", _clip(10))]})
    for limit in ({"min_seconds": 0.1}, {"max_frame_rate": 100}, {"min_width": 1}):
        assert _judge(table, **limit) == [(0, "unreadable", None)]
        assert _judge(table, drop_invalid_rows=False, **limit) == []
    assert _judge(table, require_audio=True) == [(0, "no_audio", None)]


def test_invalid_video_rows_are_dropped_by_default(make_table):
    """Video that is not there, at a negative position, or no video is dropped only by drop_invalid_rows."""
    good = _clip(10)
    table = make_table({"a": [("video", None), ("video", good[:100]), ("video", (-2, good)), ("video", good)]})
    reasons = [d[:2] for d in _judge(table, min_seconds=0.1)]
    assert reasons == [(0, "no_content"), (1, "unreadable"), (-2, "invalid_position")]
    assert _judge(table, min_seconds=0.1, drop_invalid_rows=False) == []


def test_without_the_package_nothing_is_judged(make_table, monkeypatch):
    """Where PyAV is not installed the filter says which extra brings it, and keeps or drops nothing."""
    table = make_table({"a": [("video", _clip(10))]})
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"mm-assets\[video\]"):
        _judge(table, min_seconds=1)


@pytest.mark.parametrize(
    ("parameters", "key", "message"),
    [
        ({}, "min_seconds", "is missing: give at least one of min_seconds, .*, require_audio"),
        ({"require_audio": False}, "min_seconds", "is missing"),
        ({"min_seconds": 3, "max_seconds": 2}, "min_seconds", "is 3, above max_seconds, which is 2"),
        ({"min_frame_rate": 3, "max_frame_rate": 2}, "min_frame_rate", "is 3, above max_frame_rate"),
        ({"min_width": 0.5}, "min_width", "is 0.5, expected a whole number"),
        ({"min_height": -1}, "min_height", "is -1, expected a whole number of at least 0"),
        ({"max_seconds": "1"}, "max_seconds", "is '1', expected a number"),
        ({"require_audio": 1}, "require_audio", "is 1, expected true or false"),
    ],
)
def test_wrong_parameters_are_refused(parameters, key, message):
    """A parameter out of its range is refused when the declaration is loaded, by its name."""
    with pytest.raises(ConfigError, match=message) as caught:
        build_filter({"type": "video_duration", **parameters}, where="defs.yaml", key="filters[0]")
    assert caught.value.key == f"filters[0].{key}"


def test_the_annotator_gives_the_values_of_the_header(make_table, monkeypatch):
    """Video rows carry duration, size, rate and whether there is sound; the filter reads no header again."""
    calls = []
    known = video_filters.probe_video

    def probe(data):
        calls.append(len(data))
        return known(data)

    monkeypatch.setattr(video_filters, "probe_video", probe)
    clips = [_clip(30, rate=Fraction(30_000, 1001), sound=1), _clip(0, sound=1), b"?"]
    table = make_table({"a": [("text", "t"), *[("video", clip) for clip in clips]]})
    annotator = build_annotator({"type": "video_info"}, where="w", key="k")
    built = build_filter({"type": "video_duration", "min_seconds": 0.1}, where="w", key="k")
    schema = DatasetSchema(annotator_columns=annotator.columns)
    stream = FilterStream([table], annotators=[annotator], filters=[built], schema=schema)
    (kept,) = stream
    names = [column.name for column in annotator.columns]
    found = [tuple(row[name] for name in names) for row in kept.to_pylist()]
    none = (None,) * 5
    assert found[:2] == [none, none]
    assert found[2] == (pytest.approx(1.0, abs=0.2), 32, 16, 29.97, True)
    assert found[3] == (pytest.approx(1.0, abs=0.2), None, None, None, True)
    assert len(calls) == 3


def test_real_clips_have_what_their_samples_declare(make_table, shared_data):
    """For the clips of a real shard, duration, size and rate are those that the shard's makers probed."""
    samples, expected = {}, {}
    with tarfile.open(shared_data / "video" / "video-00000.tar") as archive:
        for member in archive:
            key, _, extension = member.name.partition(".")
            data = archive.extractfile(member).read()
            if extension == "json":
                expected[key] = json.loads(data)
            elif not extension.endswith("srt"):
                samples[key] = [("video", data)]
    assert len(samples) == 5
    annotator = build_annotator({"type": "video_info"}, where="w", key="k")
    schema = DatasetSchema(annotator_columns=annotator.columns)
    stream = FilterStream([make_table(samples)], annotators=[annotator], filters=[], schema=schema)
    rows = {row["sample_id"]: row for batch in stream for row in batch.to_pylist() if row["modality"] == "video"}
    for key, row in rows.items():
        streams = {stream["codec_type"]: stream for stream in reversed(expected[key]["streams"])}  # the first
        streams.pop("subtitle", None)
        # The whole file may be longer by its subtitles, and headers of streams do not always tell a length.
        lengths = [float(stream["duration"]) for stream in streams.values() if "duration" in stream]
        assert row["video_duration_seconds"] == pytest.approx(max(lengths, default=expected[key]["duration"]), abs=1e-3)
        assert row["video_has_audio"] == ("audio" in streams)
        if "video" in streams:
            assert (row["video_width"], row["video_height"]) == (streams["video"]["width"], streams["video"]["height"])
            assert row["video_frame_rate"] == pytest.approx(float(Fraction(streams["video"]["avg_frame_rate"])), 0.01)
    durations = sorted(row["video_duration_seconds"] for row in rows.values())
    table = make_table({"all": [pair for pairs in samples.values() for pair in pairs]})
    found = _judge(table, min_seconds=durations[1], max_seconds=durations[-2])
    assert sorted(d[2] for d in found) == [d for d in durations if not durations[1] <= d <= durations[-2]]
    assert found
