"""Checks of the time and place that samples declare: each passes on good files, and has a file that it refuses."""

import dataclasses
import io
import json
import wave
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mm_assets.fields import Document, DocumentField, PageLayout, TextBoxes, TimeSeries, TimeSeriesField
from mm_assets.formats import MappedFile, MstrWriter, MultWriter, Payload, open_reader

ASSETS = ("packed_mult", "packed_mstr")
ABOUT = {"durations", "spans"}


def sound(seconds: float) -> bytes:
    """A WAV of silence, 8 kHz."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(2 * round(8000 * seconds)))
    return target.getvalue()


def clip(num_frames: int, seconds: float) -> bytes:
    """A Matroska file of grey frames, 25 a second, and of silence."""
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as container:
        video = container.add_stream("mjpeg", rate=25, options={"strict": "-1"})
        video.width, video.height, video.pix_fmt = 16, 16, "yuvj420p"
        audio = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 99, np.uint8), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(video.encode(frame))
        container.mux(video.encode())
        samples = av.AudioFrame.from_ndarray(np.zeros((1, round(8000 * seconds)), np.int16), "s16", "mono")
        samples.sample_rate, samples.pts = 8000, 0
        container.mux(audio.encode(samples))
        container.mux(audio.encode())
    return target.getvalue()


def score(*onsets_ms: int) -> bytes:
    """A MIDI file of notes of 100 ms, one tick a millisecond."""
    events = bytearray()
    now = 0
    for onset in onsets_ms:
        events += bytes([0x80 | (onset - now) >> 7, (onset - now) & 0x7F])
        events += bytes([0x90, 60, 64, 100, 0x80, 60, 0])
        now = onset + 100
    track = bytes([0, 0xFF, 0x51, 3]) + (1_000_000).to_bytes(3, "big") + bytes(events) + bytes([0, 0xFF, 0x2F, 0])
    head = b"MThd" + (6).to_bytes(4, "big") + b"\0\0\0\1" + (1000).to_bytes(2, "big")
    return head + b"MTrk" + len(track).to_bytes(4, "big") + track


def page() -> bytes:
    """A PNG of 40 x 30 pixels."""
    target = io.BytesIO()
    Image.new("L", (40, 30), 255).save(target, "PNG")
    return target.getvalue()


def npy(values: Any) -> bytes:
    """A .npy file."""
    target = io.BytesIO()
    np.save(target, np.asarray(values))
    return target.getvalue()


SUBTITLES = b"1\n00:00:00,000 --> 00:00:00,900\nearly\n\n2\n00:00:00,950 --> 00:00:01,%03d\nlate\n"
LATE = SUBTITLES % 50


@pytest.mark.parametrize("asset", ASSETS)
@pytest.mark.parametrize(
    ("preset", "good", "bad", "check", "expected"),
    [
        ("music", {"wav": sound(0.2), "mid": score(0, 101)}, {"wav": sound(0.14), "mid": score(0, 101)}, "spans", 1),
        ("music", {"mid": score(0, 900)}, None, "spans", 0),  # nothing to lie in
        ("speech", {"wav": sound(1.0), "srt": SUBTITLES % 50}, {"wav": sound(1.0), "srt": SUBTITLES % 51}, "spans", 1),
        ("video", {"mkv": clip(25, 1.04)}, {"mkv": clip(25, 1.05)}, "durations", 1),
        ("video", {"mkv": clip(60, 2.449)}, {"mkv": clip(60, 2.451)}, "durations", 1),
        ("video", {"mkv": clip(25, 0.97)}, {"mkv": clip(25, 0.95)}, "durations", 1),
        ("video", {"mkv": clip(25, 1.0), "srt": LATE}, {"mkv": clip(24, 0.96), "srt": LATE}, "spans", 1),
    ],
)  # fmt: skip
def test_sources_that_disagree_are_found(
    make_partition: Callable[..., Any],
    tmp_path: Path,
    asset: str,
    preset: str,
    good: dict[str, bytes],
    bad: dict[str, bytes] | None,
    check: str,
    expected: int,
) -> None:
    """Up to the tolerance nothing is said; past it the sample is named, as a warning or, where asked, as a failure."""
    members = [(f"good.{suffix}", content) for suffix, content in good.items()]
    members += [(f"wrong.{suffix}", content) for suffix, content in (bad or {}).items()]
    partition = make_partition(tmp_path, members, pack=preset)
    outcome = partition.outcomes(asset)[check]
    assert [row["sample_id"] for row in outcome.violations] == ["wrong"] * expected
    assert not outcome.stops
    assert partition.outcomes(asset, on_misaligned="fail")[check].stops == bool(expected)


def rewritten(partition: Any, form: str, sample: str, modality: str, payload: Payload) -> None:
    """Rewrites a packed file with one payload replaced."""
    path = partition.root / "packed" / f"p.{form}"
    with open_reader(MappedFile(path)) as reader:
        samples = [
            (sample_id, {name: found for name, found in reader.read_sample(i).items() if found is not None})
            for i, sample_id in enumerate(reader.sample_ids)
        ]
        specs = reader.modalities
        kind = MultWriter if form == "mult" else MstrWriter
        with kind(path.with_suffix(".new"), specs) as writer:
            for sample_id, payloads in samples:
                if sample_id == sample:
                    payloads[modality] = payload
                writer.write(sample_id, payloads)
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("form", ["mult", "mstr"])
@pytest.mark.parametrize("box", [[0, 0, 41, 30], [-1, 0, 4, 3], [0, 0, 4, 30.5]])
def test_boxes_outside_their_page_are_found(
    make_partition: Callable[..., Any], tmp_path: Path, form: str, box: list[float]
) -> None:
    """A packed box that leaves its page is named with it, and stops the partition whatever `on_misaligned` says."""
    inside = json.dumps({"words": [{"text": "a", "box": [0, 0, 40, 30]}]}).encode()
    partition = make_partition(tmp_path, [("d.png", page()), ("d.json", inside)], pack="document")
    assert partition.outcomes(f"packed_{form}")["boxes"].passed
    layout = PageLayout(TextBoxes(["a"], [box]))
    field = dataclasses.replace(DocumentField(), outside="keep")
    rewritten(partition, form, "d", "document", Payload(*field.encode(Document([page()], layout))))
    outcome = partition.outcomes(f"packed_{form}")["boxes"]
    assert [(row["sample_id"], row["item"], row["right"]) for row in outcome.violations] == [("d", 0, box[2])]
    assert outcome.stops


@pytest.mark.parametrize("form", ["mult", "mstr"])
@pytest.mark.parametrize("times", [[0.0, 0.2, 0.1], [0.0, 0.1, 0.1]])
def test_timestamps_that_do_not_increase_are_found(
    make_partition: Callable[..., Any], tmp_path: Path, form: str, times: list[float]
) -> None:
    """A packed series whose clock stands or goes back is named at that step, and stops the partition."""
    members = [("s.arm.npy", npy([[1.0], [2.0], [3.0]])), ("s.timestamp.npy", npy([0.0, 0.1, 0.2])), ("s.png", page())]
    partition = make_partition(tmp_path, members, pack="robotics")
    assert partition.outcomes(f"packed_{form}")["timestamps"].passed
    good = TimeSeriesField().encode(TimeSeries(np.array([0.0, 0.1, 0.2]), np.ones((3, 1))))
    data = np.array(times).tobytes() + bytes(good.data)[24:]
    rewritten(partition, form, "s", "arm", Payload(good.metadata, data))
    outcome = partition.outcomes(f"packed_{form}")["timestamps"]
    assert [(row["sample_id"], row["modality"], row["step"]) for row in outcome.violations] == [("s", "arm", 2)]
    assert outcome.stops


def test_no_check_of_content_stops_by_itself() -> None:
    """Exactly the checks that compare what several sources declare are left to `on_misaligned`."""
    from mm_assets.checks.catalog import ABOUT_CONTENT, CATALOG

    assert {check.name for check in ABOUT_CONTENT} == ABOUT
    assert {check.name for check in CATALOG if check.about_content} == ABOUT
