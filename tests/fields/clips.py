"""Video files made in code: each frame encodes its number, each audio sample its index."""

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np

SIZE = (16, 32)  # height, width


def picture(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """(H, W, 3) uint8 of one grey: 8, 16 ... 248, determined by the number."""
    return np.full((*size, 3), 8 + 8 * (number % 31), dtype=np.uint8)


def number_of(pixels: np.ndarray) -> int:
    """The number, modulo 31, of a picture that a lossy codec has been at."""
    return round((float(pixels.mean()) - 8) / 8)


def ramp(count: int, channels: int = 1) -> np.ndarray:
    """(count, channels) int16 that differ from sample to sample."""
    return ((np.arange(count * channels) * 37) % 30_011 - 15_000).astype(np.int16).reshape(count, channels)


_SAMPLES = {  # 16-bit samples as those of FFmpeg's formats
    "u8": lambda samples: (samples // 256 + 128).astype(np.uint8),
    "s16": lambda samples: samples,
    "s32": lambda samples: samples.astype(np.int32) * 65_536,
    "flt": lambda samples: (samples / 32768).astype(np.float32),
    "dbl": lambda samples: samples / 32768,
}


def clip_file(
    *,
    container: str = "mp4",
    codec: str = "libx264",
    rate: Fraction | int = 25,
    times: Sequence[Fraction] | None = None,
    num_frames: int = 10,
    size: tuple[int, int] = SIZE,
    gop: int = 4,
    b_frames: int = 0,
    pictures: Sequence[np.ndarray] | None = None,
    samples: np.ndarray | None = None,
    sample_rate: int = 16_000,
    audio_codec: str = "pcm_s16le",
    audio_start: Fraction | int = 0,
    video_start: Fraction | int = 0,
    options: dict[str, str] | None = None,
) -> bytes:
    """A video file's bytes.

    Args:
        container: FFmpeg's name of the muxer.
        codec: of the video; "" for none.
        rate: frames per second.
        times: seconds at which frames are shown; by the rate where None.
        num_frames: where times is None.
        size: (height, width).
        gop: a keyframe every so many frames.
        b_frames: frames in a row that refer to later ones.
        pictures: (H, W, 3) uint8 of each frame; grey ones by number where None.
        samples: (n, channels) int16; None for no sound.
        sample_rate: Hz.
        audio_codec: of the sound.
        audio_start: seconds at which the first sample sounds.
        video_start: seconds at which the first frame is shown.
        options: of the muxer.
    """
    rate = Fraction(rate)
    if times is None:
        times = [number / rate for number in range(num_frames)]
    target = io.BytesIO()
    with av.open(target, "w", format=container, options=options or {}) as output:
        packets = []
        if codec:
            stream = output.add_stream(codec, rate=rate)
            stream.height, stream.width = size
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.gop_size = gop
            tick = Fraction(1, 90_000) if any(t * rate % 1 for t in times) else 1 / rate
            stream.codec_context.time_base = tick
            stream.codec_context.max_b_frames = b_frames
            if codec == "libx264":
                stream.options = {"bf": str(b_frames), "crf": "4", "threads": "1", "sc_threshold": "0"}
        if samples is not None:
            sound = output.add_stream(audio_codec, rate=sample_rate)
            sound.layout = {1: "mono", 2: "stereo", 6: "5.1", 7: "6.1", 8: "7.1"}[samples.shape[1]]
            if audio_codec.startswith("wma"):
                sound.bit_rate = 64_000  # it has no default
        if codec:
            for number, time in enumerate(times):
                pixels = pictures[number] if pictures is not None else picture(number, size)
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                frame.pts, frame.time_base = round((time + video_start) / tick), tick
                packets += stream.encode(frame)
            packets += stream.encode(None)
        if samples is not None:
            step = sound.codec_context.frame_size or 1024
            planar = sound.codec_context.format.is_planar
            start = round(audio_start * sample_rate)
            for at in range(0, len(samples), step):
                piece = samples[at : at + step]
                array = piece.T if planar else piece.reshape(1, -1)
                kind = sound.codec_context.format.name
                array = _SAMPLES[kind.removesuffix("p")](array)
                frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(array), format=kind, layout=sound.layout.name)
                frame.sample_rate, frame.pts, frame.time_base = sample_rate, start + at, Fraction(1, sample_rate)
                packets += sound.encode(frame)
            packets += sound.encode(None)
        for packet in packets:
            output.mux(packet)
    return target.getvalue()


def sound_at(*starts: int) -> bytes:
    """A Matroska file with 1000 samples at 8000 Hz at each of these samples."""
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as output:
        stream = output.add_stream("pcm_s16le", rate=8000, layout="mono")
        for start in starts:
            frame = av.AudioFrame.from_ndarray(ramp(1000).reshape(1, -1), format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 8000, start, Fraction(1, 8000)
            for packet in stream.encode(frame):
                output.mux(packet)
    return target.getvalue()


def with_ogg_checksums(data: bytes) -> bytes:
    """An Ogg whose pages were changed, with the checksums that they should have."""
    found, at = bytearray(data), 0
    while at < len(found):
        body = at + 27 + found[at + 26]
        end = body + sum(found[at + 27 : body])
        found[at + 22 : at + 26] = bytes(4)
        checksum = 0
        for byte in found[at:end]:
            checksum ^= byte << 24
            for _ in range(8):
                checksum = (checksum << 1) ^ (0x104C11DB7 if checksum & 0x80000000 else 0)
        found[at + 22 : at + 26] = checksum.to_bytes(4, "little")
        at = end
    return bytes(found)
