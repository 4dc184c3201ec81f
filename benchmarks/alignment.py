"""How exactly frames and sound stay together: the error of every frame's audio segment, in samples.

Clips are made with flashes at known frames and clicks at known samples, go through `SyncedVideoAudioField`, and are
found again in what it decodes. The exact time of a frame is a ratio of integers; all errors are measured against that.

    python benchmarks/alignment.py           # prints the tables
    python benchmarks/alignment.py --write   # and puts them and the plot into benchmarks/
"""

from __future__ import annotations

import argparse
import io
import math
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from mm_assets.fields import Encoded, SyncedVideoAudioField, VideoAudio, VideoFile
from mm_assets.media.timing import Timing

FOLDER = Path(__file__).resolve().parent
RATES = {
    "23.976": Fraction(24000, 1001),
    "25": Fraction(25),
    "29.97": Fraction(30000, 1001),
    "30": Fraction(30),
    "60": Fraction(60),
}
SAMPLE_RATES = (16_000, 44_100, 48_000)
OFFSETS_MS = range(-500, 501, 50)
SECONDS = Fraction(12, 5)
FLASH_SECONDS = (0.7, 1.1, 1.6)  # with any of the offsets the click is within the clip
SIZE = 16
CLICK = 30_000
HOUR = 3600
BEGIN, END = "<!-- alignment.py writes from here -->", "<!-- to here -->"


@dataclass(frozen=True, slots=True)
class Measured:
    """One clip.

    Attributes:
        rate: name of its frame rate.
        sample_rate: Hz.
        offset_ms: milliseconds by which its sound comes late.
        way: how it went through the field.
        boundary: samples, the largest distance of a segment's start from the exact time of its frame.
        click: samples, the largest distance of a segment's start from the click that was heard.
    """

    rate: str
    sample_rate: int
    offset_ms: int
    way: str
    boundary: float
    click: int


def flash_frames(rate: Fraction) -> list[int]:
    """Numbers of the frames that are white."""
    return [round(seconds * rate) for seconds in FLASH_SECONDS]


def frames_of(rate: Fraction) -> npt.NDArray[np.uint8]:
    """(T, SIZE, SIZE, 3), black but for the flashes."""
    frames = np.zeros((math.floor(SECONDS * rate), SIZE, SIZE, 3), dtype=np.uint8)
    frames[flash_frames(rate)] = 255
    return frames


def sound_of(rate: Fraction, sample_rate: int, offset: Fraction) -> npt.NDArray[np.int16]:
    """(n, 1), silent but for a click at the sample nearest each flash, `offset` seconds late: so early it starts."""
    samples = np.zeros((math.floor(SECONDS * sample_rate), 1), dtype=np.int16)
    samples[[round((frame / rate + offset) * sample_rate) for frame in flash_frames(rate)]] = CLICK
    return samples


def video_file(
    frames: Iterator[npt.NDArray[np.uint8]],
    rate: Fraction,
    blocks: Iterator[npt.NDArray[np.int16]],
    sample_rate: int,
    *,
    codec: str,
    gop: int,
) -> bytes:
    """An MP4 of H.264, and sound without loss."""
    target = io.BytesIO()
    with av.open(target, "w", format="mov" if codec.startswith("pcm") else "mp4") as output:
        video = output.add_stream("libx264", rate=rate, options={"threads": "1", "preset": "veryfast"})
        video.width = video.height = SIZE
        video.pix_fmt = "yuv420p"
        video.gop_size = gop
        sound = output.add_stream(codec, rate=sample_rate, layout="mono")
        for number, pixels in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            picture.pts, picture.time_base = number, 1 / rate
            output.mux(video.encode(picture))
        output.mux(video.encode(None))
        at = 0
        step = sound.codec_context.frame_size or 4096
        for block in blocks:
            for start in range(0, len(block), step):
                piece = av.AudioFrame.from_ndarray(
                    np.ascontiguousarray(block[start : start + step].T), format="s16", layout="mono"
                )
                piece.sample_rate, piece.pts, piece.time_base = sample_rate, at, Fraction(1, sample_rate)
                at += piece.samples
                output.mux(sound.encode(piece))
        output.mux(sound.encode(None))
    return target.getvalue()


def measure(field: SyncedVideoAudioField, payload: Encoded, rate: Fraction, offset: Fraction) -> tuple[float, int]:
    """The two errors of a clip, whose flashes are found in its pictures and whose clicks in its sound."""
    clip = field.decode(*payload)
    if clip.frames is None or clip.audio is None:
        raise RuntimeError("the clip has lost its pictures or its sound")
    sample_rate = clip.audio.sample_rate
    boundary = Fraction(0)
    for index, (start, stop) in zip(clip.frame_indices.tolist(), clip.audio_segments.tolist(), strict=True):
        if 0 < start < stop:  # those that are clipped to the sound begin with it
            boundary = max(boundary, abs(start - (index / rate + offset) * sample_rate))
    flashes = np.flatnonzero(clip.frames.mean(axis=(1, 2, 3)) > 128)
    clicks = np.flatnonzero(clip.audio.samples[:, 0] > 0.5)
    if flashes.tolist() != flash_frames(rate) or len(clicks) != len(flashes):
        raise RuntimeError(f"found flashes at {flashes} and clicks at {clicks}, expected three of each")
    return float(boundary), int(np.abs(clip.audio_segments[flashes, 0] - clicks).max())


def short_clips() -> list[Measured]:
    """All rates, sample rates and offsets, in three ways."""
    keep, store = SyncedVideoAudioField(), SyncedVideoAudioField(encoding="frames")
    found = []
    for name, rate in RATES.items():
        frames = frames_of(rate)
        for sample_rate in SAMPLE_RATES:
            for offset_ms in OFFSETS_MS:
                offset = Fraction(offset_ms, 1000)
                samples = sound_of(rate, sample_rate, offset)
                data = video_file(iter(frames), rate, iter([samples]), sample_rate, codec="pcm_s16le", gop=12)
                arrays = VideoAudio(
                    frames=frames, frame_rate=rate, audio=(samples, sample_rate), audio_offset_seconds=-offset
                )
                file = VideoFile(video=data, audio_offset_seconds=-offset)
                for way, field, value in (
                    ("arrays", store, arrays),
                    ("file, as frames", store, file),
                    ("file, kept", keep, file),
                ):
                    errors = measure(field, field.encode(value), rate, offset)
                    found.append(Measured(name, sample_rate, offset_ms, way, *errors))
    return found


def hour_of_boundaries(rate: Fraction, sample_rate: int) -> npt.NDArray[np.float64]:
    """(frames of an hour,) samples: each segment's start less its frame's exact time; exact until the division."""
    count = math.ceil(HOUR * rate)
    timing = Timing(
        num_frames=count,
        frame_rate=rate,
        sample_rate=sample_rate,
        num_audio_samples=2**40,
        audio_offset_samples=0,
    )
    frames = np.arange(count)
    starts = timing.audio_segments(frames)[:, 0]
    return (starts * rate.numerator - frames * (sample_rate * rate.denominator)) / rate.numerator


def hour_of_floats(rate: Fraction, sample_rate: int, stored: np.float32) -> npt.NDArray[np.float64]:
    """The same for int(i / fps * sr) with a rate that is stored in 32 bits."""
    frames = np.arange(math.ceil(HOUR * rate))
    starts = (frames / np.float64(stored) * sample_rate).astype(np.int64)
    return (starts * rate.numerator - frames * (sample_rate * rate.denominator)) / rate.numerator


def hour_long_clip(rate: Fraction, sample_rate: int) -> str:
    """A file of an hour with a flash and a click each minute, kept: its errors as a sentence."""
    count = HOUR * rate.numerator // rate.denominator
    flashes = [round((minute * 60 + 30) * rate) for minute in range(HOUR // 60)]
    white, black = np.full((SIZE, SIZE, 3), 255, np.uint8), np.zeros((SIZE, SIZE, 3), np.uint8)
    chosen = set(flashes)
    clicks = {round(frame / rate * sample_rate) for frame in flashes}

    def blocks() -> Iterator[npt.NDArray[np.int16]]:
        for start in range(0, HOUR * sample_rate, 60 * sample_rate):
            block = np.zeros((60 * sample_rate, 1), np.int16)
            block[[click - start for click in clicks if 0 <= click - start < len(block)]] = CLICK
            yield block

    started = time.perf_counter()
    pictures = (white if number in chosen else black for number in range(count))
    data = video_file(pictures, rate, blocks(), sample_rate, codec="flac", gop=250)
    made = time.perf_counter()
    field = SyncedVideoAudioField()
    payload = field.encode(data)
    encoded = time.perf_counter()
    around = [frame + step for frame in flashes for step in (-1, 0, 1)]
    pixels = field.decode_frames(*payload, around).mean(axis=(1, 2, 3)) > 128
    if pixels.tolist() != [False, True, False] * len(flashes):
        raise RuntimeError("the flashes are not at their frames")
    decoded = time.perf_counter()
    sound = field.decode_audio(*payload)
    if sound is None:
        raise RuntimeError("the clip has lost its sound")
    heard = np.flatnonzero(sound.samples[:, 0] > 0.5)
    starts = field.audio_segments(payload.metadata, flashes)[:, 0]
    errors = [float(start - frame / rate * sample_rate) for start, frame in zip(starts.tolist(), flashes, strict=True)]
    first, last = max(map(abs, errors[:10])), max(map(abs, errors[-10:]))
    worst, first, last = (max(map(abs, some)) for some in (errors, errors[:10], errors[-10:]))
    lines = [
        f"One real file of an hour ({count:,} frames of H.264, {HOUR * sample_rate:,} samples of FLAC at",
        f"{sample_rate:,} Hz, {len(data) / 1e6:.1f} MB; made in {made - started:.0f} s), kept as it is:",
        f"all {len(flashes)} flashes are at their frames, the frames around them too.",
        f"A segment's start is at most {np.abs(starts - heard).max()} sample from the click that is heard,",
        f"and {worst:.3f} from the exact time ({first:.3f} in the first ten minutes, {last:.3f} in the last).",
        f"Listing its packets took {encoded - made:.2f} s, decoding {len(around)} frames {decoded - encoded:.1f} s.",
    ]
    return "\n".join(lines)


def tables(found: list[Measured]) -> str:
    """Markdown."""
    lines = [
        f"{len(found)} short clips: {len(RATES)} frame rates, {len(SAMPLE_RATES)} sample rates, offsets from "
        f"{OFFSETS_MS[0]} to {OFFSETS_MS[-1]} ms in steps of {OFFSETS_MS.step}, each in three ways. Largest errors "
        "over all offsets, in samples: of any segment's start against its frame's exact time, and (in brackets) of a "
        "flash's segment against the click that is heard.",
        "",
        "| frames per second | Hz | arrays | file, as frames | file, kept |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in RATES:
        for sample_rate in SAMPLE_RATES:
            cells = []
            for way in ("arrays", "file, as frames", "file, kept"):
                some = [one for one in found if (one.rate, one.sample_rate, one.way) == (name, sample_rate, way)]
                cells.append(f"{max(one.boundary for one in some):.3f} ({max(one.click for one in some)})")
            lines.append(f"| {name} | {sample_rate:,} | {' | '.join(cells)} |")
    lines += [
        "",
        "Every frame of an hour, by the integer rule and by `int(i / fps * sr)` with `fps` as float32: largest error "
        "in samples in the first and in the last minute. For the float rule a rate is stored once as the nearest "
        "float32 of the true ratio, once as the usual decimal number (29.97 for 30000/1001).",
        "",
        "| frames per second | Hz | integers: first, last minute | float32 of the ratio | float32 of the decimal |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, rate in RATES.items():
        minute = math.floor(60 * rate)
        for sample_rate in SAMPLE_RATES:
            series = [
                hour_of_boundaries(rate, sample_rate),
                hour_of_floats(rate, sample_rate, np.float32(float(rate))),
                hour_of_floats(rate, sample_rate, np.float32(name)),
            ]
            ends = [(np.abs(one[:minute]).max(), np.abs(one[-minute:]).max()) for one in series]
            cells = [f"{ends[0][0]:.3f}, {ends[0][1]:.3f}", *(f"{one[0]:.1f}, {one[1]:.1f}" for one in ends[1:])]
            lines.append(f"| {name} | {sample_rate:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: list[Measured], target: Path) -> None:
    """Errors over an hour, and over the offsets."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, color in (("23.976", "tab:blue"), ("29.97", "tab:orange")):
        rate = RATES[name]
        for label, style, errors in (
            ("float32 of the decimal", "-", hour_of_floats(rate, 44_100, np.float32(name))),
            ("float32 of the ratio", "--", hour_of_floats(rate, 44_100, np.float32(float(rate)))),
            ("integers", ":", hour_of_boundaries(rate, 44_100)),
        ):
            size = math.ceil(60 * rate)
            worst = [np.abs(errors[at : at + size]).max() for at in range(0, len(errors), size)]
            left.plot(range(1, len(worst) + 1), worst, style, color=color, label=f"{name}, {label}")
    left.set(xlabel="minute", ylabel="largest error, samples at 44.1 kHz", yscale="log", title="Every frame of an hour")
    left.set_ylim(0.5, 400)
    left.axhline(1, color="lightgrey", linewidth=0.8, zorder=0)
    left.legend(fontsize=7, loc="center right")
    for way, marker in (("arrays", "o"), ("file, as frames", "x"), ("file, kept", "+")):
        some = [one for one in found if one.way == way]
        right.plot([one.offset_ms for one in some], [one.boundary for one in some], marker, markersize=4, label=way)
    right.axhline(1, color="black", linewidth=0.8)
    right.set(
        xlabel="offset of the sound, ms", ylabel="largest error of a clip, samples", ylim=(0, 1.2), title="Short clips"
    )
    right.legend(fontsize=7)
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=110, metadata={"Software": None})


def main() -> None:
    """Measure, print, and fail where an error reaches a sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put tables and plot into benchmarks/")
    arguments = parser.parse_args()
    started = time.perf_counter()
    found = short_clips()
    text = f"{tables(found)}\n\n{hour_long_clip(RATES['29.97'], 16_000)}"
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    text += f"\n\nThe whole script took {seconds:.0f} s and {peak:,.0f} MB on two cores, with other work on them."
    print(text)
    if arguments.write:
        plot(found, FOLDER / "images" / "alignment.png")
        page = FOLDER / "README.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    worst = max(max(one.boundary, one.click - 0.5) for one in found)
    if worst >= 1:
        raise SystemExit(f"found an error of {worst} samples, expected less than 1")


if __name__ == "__main__":
    main()
