"""Clips with audio that several modules of tests use."""

from fractions import Fraction

import numpy as np
import simplejpeg

from mm_assets.fields import Audio, SyncedVideoAudioField

from .clips import clip_file, ramp
from .conftest import picture as smooth_picture

RATE = 8000
FRAMES = np.stack([smooth_picture(8, 12, seed=seed) for seed in range(3)])
SHORTS = ramp(300)
SOUND = Audio(SHORTS, RATE)
FILE = clip_file(num_frames=3, gop=2, samples=SHORTS[:200], sample_rate=RATE)
KEEP = SyncedVideoAudioField()
STORE = SyncedVideoAudioField(encoding="frames")


def floats(samples):
    return samples.astype(np.float32) / np.float32(32768)


def through_jpeg(frames, quality=90):
    files = [
        simplejpeg.encode_jpeg(np.ascontiguousarray(one), quality=quality, colorsubsampling="444") for one in frames
    ]
    return np.stack([simplejpeg.decode_jpeg(one) for one in files])


def coded(field, value):
    """Through encode and decode."""
    return field.decode(*field.encode(value))


LONG = clip_file(num_frames=31, gop=5, b_frames=2, rate=Fraction(30000, 1001))
