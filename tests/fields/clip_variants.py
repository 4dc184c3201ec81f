"""Clips of many containers and codecs, made in code: ten textured frames of 64x48, some with sound or a tag."""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import av
import numpy as np

SIZE = (48, 64)  # height, width
NUM_FRAMES = 10
RATE = 25


@dataclass(frozen=True)
class Variant:
    """What a clip is made with.

    Attributes:
        container: FFmpeg's name of the muxer.
        codec: FFmpeg's name of the encoder.
        pixels: format of the frames that are encoded.
        sound: encoder of the sound; "" for none.
        muxer: options of the muxer.
        encoder: options of the encoder.
        turn: degrees counterclockwise by which players turn the frames.
        aspect: width of a pixel by its height.
        moov_first: whether the MP4's header precedes its content.
        transfer: H.273's number of the transfer characteristics; 0 for none.
    """

    container: str
    codec: str
    pixels: str = "yuv420p"
    sound: str = ""
    muxer: Mapping[str, str] = field(default_factory=dict)
    encoder: Mapping[str, str] = field(default_factory=dict)
    turn: int = 0
    aspect: Fraction = Fraction(0)
    moov_first: bool = False
    transfer: int = 0


_X264 = {"preset": "ultrafast", "threads": "1", "bf": "2", "crf": "20"}
_X265 = "log-level=none:pools=1:info=0"
VARIANTS = {
    "mp4": Variant("mp4", "libx264", sound="aac", encoder=_X264),
    "mp4-moov-first": Variant("mp4", "libx264", sound="aac", encoder=_X264, moov_first=True),
    "mp4-fragments": Variant(
        "mp4", "libx264", encoder=_X264, muxer={"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    ),
    "mp4-hevc": Variant("mp4", "libx265", encoder={"crf": "12", "preset": "ultrafast", "x265-params": _X265}),
    "mp4-10-bit": Variant("mp4", "libx264", pixels="yuv420p10le", encoder=_X264),
    "mp4-interlaced": Variant("mp4", "libx264", encoder=_X264 | {"x264-params": "tff=1:bframes=0"}),
    "mp4-rotated": Variant("mp4", "libx264", encoder=_X264, turn=90),
    "mp4-aspect": Variant("mp4", "libx264", encoder=_X264, aspect=Fraction(4, 3)),
    "mov": Variant("mov", "mjpeg", pixels="yuvj420p", sound="pcm_s16le"),
    "3gp": Variant("3gp", "mpeg4"),
    "mkv": Variant("matroska", "libx264", sound="libopus", encoder=_X264),
    "mkv-live": Variant("matroska", "mpeg4", muxer={"live": "1"}),
    "webm-vp8": Variant("webm", "libvpx", sound="libopus", encoder={"deadline": "realtime", "cpu-used": "8"}),
    "webm-vp9": Variant("webm", "libvpx-vp9", encoder={"deadline": "realtime", "cpu-used": "8"}),
    "webm-av1": Variant("webm", "libsvtav1", encoder={"preset": "12", "svtav1-params": "lp=1"}),
    "ts": Variant("mpegts", "libx264", sound="mp2", encoder=_X264),
    "ts-mpeg2": Variant("mpegts", "mpeg2video"),
    "avi-mjpeg": Variant("avi", "mjpeg", pixels="yuvj420p", sound="pcm_s16le"),
    "avi-mpeg4": Variant("avi", "mpeg4"),
    "flv": Variant("flv", "flv"),
    "flv-h264": Variant("flv", "libx264", sound="aac", encoder=_X264),
    "mpeg-1": Variant("mpeg", "mpeg1video", sound="mp2"),
    "mpeg-2": Variant("vob", "mpeg2video"),
    "wmv": Variant("asf", "wmv2", encoder={"b": "4M"}),
}


def texture(number: int) -> np.ndarray:
    """(H, W, 3) uint8 with detail in every block, that moves from frame to frame."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    noise = np.random.default_rng(number).integers(0, 40, (*SIZE, 1))
    shades = np.stack([(x * 3 + number * 9) % 200, (y * 4 + number * 5) % 200, (x + y + number * 7) % 200], axis=-1)
    return (shades + noise).astype(np.uint8)


def make_clip(variant: Variant) -> bytes:
    """The file's bytes."""
    target = io.BytesIO()
    with av.open(target, "w", format=variant.container, options=dict(variant.muxer)) as output:
        stream = output.add_stream(variant.codec, rate=RATE)
        stream.height, stream.width, stream.pix_fmt = *SIZE, variant.pixels
        stream.gop_size = 5
        stream.codec_context.thread_count = 1
        stream.options = dict(variant.encoder)
        if variant.aspect:
            stream.codec_context.sample_aspect_ratio = variant.aspect
        if variant.transfer:
            stream.codec_context.color_trc = variant.transfer
        if variant.turn:
            stream.set_display_rotation(variant.turn)
        packets = []
        if variant.sound:
            sound = output.add_stream(variant.sound, rate=48_000 if variant.sound == "libopus" else 32_000)
            sound.layout = "mono"
        for number in range(NUM_FRAMES):
            frame = av.VideoFrame.from_ndarray(texture(number), format="rgb24").reformat(format=variant.pixels)
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            packets += stream.encode(frame)
        packets += stream.encode(None)
        if variant.sound:
            count = sound.rate * NUM_FRAMES // RATE
            tone = (np.sin(np.arange(count) / 20) * 9000).astype(np.int16)
            resampler = av.AudioResampler(sound.format, "mono", sound.rate, sound.codec_context.frame_size or 1024)
            whole = av.AudioFrame.from_ndarray(tone.reshape(1, -1), format="s16", layout="mono")
            whole.sample_rate, whole.pts, whole.time_base = sound.rate, 0, Fraction(1, sound.rate)
            for piece in (*resampler.resample(whole), *resampler.resample(None)):
                packets += sound.encode(piece)
            packets += sound.encode(None)
        for packet in sorted(packets, key=lambda one: one.dts * one.time_base):
            output.mux(packet)
    return _with_moov_first(target.getvalue()) if variant.moov_first else target.getvalue()


def _with_moov_first(data: bytes) -> bytes:
    """An MP4 of ftyp, free, mdat and moov, in the order ftyp, moov, free, mdat."""
    at = data.rindex(b"moov") - 4
    moov = bytearray(data[at:])
    for match in re.finditer(b"stco", moov):
        count = int.from_bytes(moov[match.end() + 4 : match.end() + 8])
        for place in range(match.end() + 8, match.end() + 8 + 4 * count, 4):
            offset = int.from_bytes(moov[place : place + 4]) + len(moov)
            moov[place : place + 4] = offset.to_bytes(4)
    start = int.from_bytes(data[:4])
    return data[:start] + bytes(moov) + data[start:at]


def damages(data: bytes) -> dict[str, bytes]:
    """The bytes damaged in each way, by name."""
    size = len(data)
    found = {f"truncated at {part} %": data[: size * part // 100] for part in (35, 65, 90)}
    zeroed = bytearray(data)
    zeroed[size * 55 // 100 : size * 70 // 100] = bytes(size * 70 // 100 - size * 55 // 100)
    flipped = bytearray(data)
    for at in np.random.default_rng(3).integers(size // 3, size, 12).tolist():
        flipped[at] ^= 0xA5
    return found | {"zeroed": bytes(zeroed), "flipped": bytes(flipped), "empty": b"", "trailing": data + bytes(777)}
