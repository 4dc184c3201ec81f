"""Windows of two seconds in long files, beside the decoders that they are read with.

python -m benchmarks.loading.windows --data FOLDER [--rounds 15] [--write]

Each file is a modality of one MULT file. In each round all candidates read the window at the same random place, in
an order that moves on by one; each opens the file's bytes and decodes. A ratio is of one round.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import soundfile

import mm_assets
from mm_assets.fields import AudioField, Field, SyncedVideoAudioField

SECONDS = 2.0
FRAMES = 16
LENGTHS = {"audio": 600, "video": 120}  # seconds of the files
VIDEO_RATE, SIZE = 30, (360, 480)
SOUNDS = {  # libsndfile's container, subtype and rate
    "wav": ("WAV", "PCM_16", 44_100),
    "flac": ("FLAC", "PCM_16", 44_100),
    "ogg vorbis": ("OGG", "VORBIS", 44_100),
    "ogg opus": ("OGG", "OPUS", 48_000),
    "mp3": ("MP3", "MPEG_LAYER_III", 44_100),
}
PYAV_SOUNDS = {"m4a": ("ipod", "aac", 44_100), "aac": ("adts", "aac", 44_100), "webm opus": ("webm", "libopus", 48_000)}
VIDEOS = {
    "mp4": ("mp4", "libx264", "aac", {"preset": "veryfast", "g": "60"}),
    "webm": ("webm", "libvpx", "libopus", {"deadline": "realtime", "cpu-used": "8", "g": "60", "b": "1000000"}),
}
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- windows.py writes from here -->", "<!-- to here -->"

Read = Callable[[float], object]


# --- files ------------------------------------------------------------------------------------------------------------


def tone(rate: int, seconds: int) -> npt.NDArray[np.float32]:
    """(n, 2) float32: a gliding tone with bursts of noise."""
    time_ = np.arange(rate * seconds) / rate
    noise = np.random.default_rng(0).standard_normal(len(time_)) * (np.sin(3 * time_) > 0)
    left = 0.3 * np.sin(2 * np.pi * time_ * (200 + 50 * np.sin(time_))) + 0.1 * noise
    return np.stack([left, left[::-1]], axis=1).astype(np.float32)


def encode_sound(output: av.container.OutputContainer, codec: str, rate: int, seconds: int) -> list[av.Packet]:
    """The packets of a new audio stream."""
    stream = output.add_stream(codec, rate=rate, layout="stereo")
    context = stream.codec_context
    resampler = av.AudioResampler(context.format, "stereo", rate, context.frame_size or 1024)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(tone(rate, seconds).T), format="fltp", layout="stereo")
    frame.sample_rate, done, packets = rate, 0, []
    for piece in (*resampler.resample(frame), *resampler.resample(None)):
        piece.pts, piece.time_base = done, Fraction(1, rate)
        done += piece.samples
        packets += stream.encode(piece)
    return [*packets, *stream.encode(None)]


def make(name: str, path: Path) -> None:
    """Write one file."""
    if name in SOUNDS:
        container, subtype, rate = SOUNDS[name]
        with soundfile.SoundFile(path, "w", rate, 2, format=container, subtype=subtype) as sound:
            for block in np.array_split(tone(rate, LENGTHS["audio"]), LENGTHS["audio"]):
                sound.write(block)
    elif name in PYAV_SOUNDS:
        muxer, codec, rate = PYAV_SOUNDS[name]
        with av.open(str(path), "w", format=muxer) as output:
            for packet in encode_sound(output, codec, rate, LENGTHS["audio"]):
                output.mux(packet)
    else:
        muxer, codec, sound_codec, options = VIDEOS[name]
        with av.open(str(path), "w", format=muxer) as output:
            stream = output.add_stream(codec, rate=VIDEO_RATE, options=options)
            stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
            packets = encode_sound(output, sound_codec, 48_000, LENGTHS["video"])
            rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
            for number in range(LENGTHS["video"] * VIDEO_RATE):
                planes = [(columns * 2 + number * 3) % 256, (rows + number) % 256, (rows ^ columns) % 256]
                frame = av.VideoFrame.from_ndarray(np.stack(planes, -1).astype(np.uint8), format="rgb24")
                frame.pts = number
                packets += stream.encode(frame)
            packets += stream.encode(None)
            for packet in sorted(packets, key=lambda one: one.dts * one.time_base):
                output.mux(packet)


# --- candidates -------------------------------------------------------------------------------------------------------


def by_soundfile(data: bytes) -> Read:
    """Libsndfile's own seek."""

    def read(start: float) -> object:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            sound.seek(round(start * sound.samplerate))
            return sound.read(round(SECONDS * sound.samplerate), dtype="float32")

    return read


def by_pyav_audio(data: bytes) -> Read:
    """A seek to the packet before, and decoding to the end of the window."""

    def read(start: float) -> object:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.audio[0]
            container.seek(int(start / stream.time_base), stream=stream)
            pieces = []
            for frame in container.decode(stream):
                pieces.append(frame.to_ndarray())
                if frame.time + frame.samples / frame.sample_rate >= start + SECONDS:
                    break
            return np.concatenate(pieces, axis=-1)

    return read


def by_pyav_video(data: bytes) -> Read:
    """A seek to the keyframe before; all frames up to the end of the window are decoded, sixteen are converted."""

    def read(start: float) -> object:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            stream.thread_count = 1
            container.seek(int(start / stream.time_base), stream=stream)
            times = [start + k * SECONDS / FRAMES for k in range(FRAMES)]
            frames, last = [], None
            for frame in container.decode(stream):
                while last is not None and len(frames) < FRAMES and frame.time > times[len(frames)]:
                    frames.append(last.to_ndarray(format="rgb24"))
                if len(frames) == FRAMES:
                    break
                last = frame
            return np.stack(frames)

    return read


def by_torchcodec(data: bytes, *, is_video: bool) -> Read:
    """Torchcodec's decoders; of video in its quicker mode, which trusts the header."""
    from torchcodec.decoders import AudioDecoder, VideoDecoder

    def read(start: float) -> object:
        if not is_video:
            return AudioDecoder(data).get_samples_played_in_range(start, start + SECONDS).data
        times = [start + k * SECONDS / FRAMES for k in range(FRAMES)]
        return VideoDecoder(data, seek_mode="approximate", num_ffmpeg_threads=1).get_frames_played_at(times).data

    return read


def by_dataset(data: mm_assets.Dataset, name: str) -> Read:
    """`Dataset.read_sample` with a window; the checksum was verified by the first one."""
    return lambda start: data.read_sample(0, [name], window=(start, SECONDS))[name]


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(reads: dict[str, Read], length: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each candidate by round."""
    generator = np.random.default_rng(0)
    names = list(reads)
    milliseconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first one loads code
        start = float(generator.uniform(0, length - SECONDS - 1))
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            reads[name](start)
            if number >= 0:
                milliseconds[name].append(1000 * (time.perf_counter() - begin))
    return milliseconds


def main() -> None:
    """Make the files, measure, and print the table or write it into the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    arguments.data.mkdir(parents=True, exist_ok=True)
    names = [*SOUNDS, *PYAV_SOUNDS, *VIDEOS]
    for name in names:
        if not (path := arguments.data / f"{name}.media").exists():
            make(name, path)
    contents = {name: (arguments.data / f"{name}.media").read_bytes() for name in names}
    silent = SyncedVideoAudioField(encoding="keep", target_frames=FRAMES)
    fields: dict[str, Field] = {name: silent if name in VIDEOS else AudioField() for name in names}
    packed = arguments.data / "windows.mult"
    with mm_assets.create(packed, fields, fsync=False) as writer:
        writer.write("0", contents)
    has_torchcodec = importlib.util.find_spec("torchcodec") is not None
    lines = [
        "| | file, MB | decoder alone, ms | mult, ms | of the decoder |" + " torchcodec, ms |" * has_torchcodec,
        "| --- | ---: | ---: | ---: | ---: |" + " ---: |" * has_torchcodec,
    ]
    with mm_assets.open(packed) as data:
        for name in names:
            content, is_video = contents[name], name in VIDEOS
            decoder = by_soundfile if name in SOUNDS else by_pyav_video if is_video else by_pyav_audio
            reads = {"decoder": decoder(content), "mult": by_dataset(data, name)}
            if is_video:
                audio = by_pyav_audio(content)
                frames = reads["decoder"]
                reads["decoder"] = lambda start, frames=frames, audio=audio: (frames(start), audio(start))
            if has_torchcodec:
                reads["torchcodec"] = by_torchcodec(content, is_video=is_video)
            milliseconds = measure(reads, LENGTHS["video" if is_video else "audio"], arguments.rounds)
            ratios = np.array(milliseconds["mult"]) / np.array(milliseconds["decoder"])
            cells = [name, f"{len(content) / 1e6:.1f}"]
            cells += [f"{np.median(milliseconds[one]):.2f}" for one in ("decoder", "mult")]
            cells += [f"{np.median(ratios):.2f}"]
            cells += [f"{np.median(milliseconds['torchcodec']):.2f}"] if has_torchcodec else []
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    if arguments.write:
        page = README.read_text()
        block = re.escape(BEGIN) + ".*?" + re.escape(END)
        README.write_text(re.sub(block, f"{BEGIN}\n\n{table}\n\n{END}", page, flags=re.DOTALL))
    else:
        print(table)


if __name__ == "__main__":
    main()
