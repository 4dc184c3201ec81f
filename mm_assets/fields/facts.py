"""Facts of time and place in a stored payload, which the checks of `mm_assets.checks.alignment` judge.

A field yields them from `Field.facts` and names their kinds in `Field.FACTS`. Times are seconds from the start of the
sample, and boxes are (left, top, right, bottom) in the unit of their page's size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

__all__ = ["Boxes", "ClipLengths", "Fact", "MediaLength", "Spans", "Steps"]

Numbers: TypeAlias = npt.NDArray[Any]


class MediaLength(NamedTuple):
    """The duration of audio or of a clip: the spans of its sample must end within it.

    Attributes:
        seconds: the duration.
        resolution_seconds: the duration of one frame; a span may end that much later.
    """

    seconds: float
    resolution_seconds: float = 0.0


class ClipLengths(NamedTuple):
    """The durations of the video and the audio of one clip, which must agree to one frame.

    Attributes:
        video_seconds: the duration of the video.
        audio_seconds: the duration of the audio.
        frame_seconds: the duration of one video frame.
    """

    video_seconds: float
    audio_seconds: float
    frame_seconds: float


class Spans(NamedTuple):
    """Stretches of time that must lie within the media of their sample.

    Attributes:
        kind: what they are, such as ``note``.
        starts: (n,) seconds.
        ends: (n,) seconds.
    """

    kind: str
    starts: Numbers
    ends: Numbers


class Steps(NamedTuple):
    """Timestamps that must increase.

    Attributes:
        seconds: (n,) timestamps as they are stored.
        may_be_equal: whether a timestamp may equal the one before it.
    """

    seconds: Numbers
    may_be_equal: bool


class Boxes(NamedTuple):
    """Boxes that must lie within their pages.

    Attributes:
        kind: what they enclose, such as ``word``.
        boxes: (n, 4) left, top, right, bottom.
        pages: (n,) the page of each box.
        page_sizes: (n, 2) width and height of the page of each box.
    """

    kind: str
    boxes: Numbers
    pages: Numbers
    page_sizes: Numbers


Fact: TypeAlias = MediaLength | ClipLengths | Spans | Steps | Boxes
