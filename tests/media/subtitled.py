"""Films with subtitles in the file, made by PyAV."""

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np

Cue = tuple[int, int | None, str]  # start and duration in milliseconds, and the text

# What FFmpeg's writers of subtitles want to know of their style.
_STYLE = b"""[Script Info]
ScriptType: v4.00+

[V4+ Styles]
Format: Name, Fontname, Fontsize, PrimaryColour, Alignment
Style: Default,Arial,16,&Hffffff,2

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
"""


def subtitled(
    container: str, codec: str, tracks: Sequence[tuple[str, Sequence[Cue]]], *, video: str = "libx264", seconds: int = 2
) -> bytes:
    """A film with a track of subtitles for each language."""
    target = io.BytesIO()
    with av.open(target, "w", format=container) as output:
        picture = output.add_stream(video, rate=10)
        picture.width = picture.height = 64
        picture.pix_fmt = "yuv420p"
        streams = []
        for language, _ in tracks:
            stream = output.add_stream(codec)
            stream.codec_context.subtitle_header = _STYLE
            stream.metadata["language"] = language
            stream.time_base = Fraction(1, 1000)
            streams.append(stream)
        for number in range(10 * seconds):
            pixels = np.full((64, 64, 3), 5 * number, np.uint8)
            for packet in picture.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                output.mux(packet)
        for packet in picture.encode(None):
            output.mux(packet)
        for stream, (_, cues) in zip(streams, tracks, strict=True):
            for start, duration, text in cues:
                raw = text.encode()
                packet = av.Packet(len(raw).to_bytes(2, "big") + raw if codec == "mov_text" else raw)
                packet.stream, packet.time_base = stream, Fraction(1, 1000)
                packet.pts = packet.dts = start
                packet.duration = duration or 0
                output.mux(packet)
    return target.getvalue()
