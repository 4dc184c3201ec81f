"""Facts about bytes: types, headers, codecs and notations of images, audio, video, scores and text.

Bytes in, facts or arrays out. Nothing here opens a file or knows a field, a row or a container. Libraries that decode
(Pillow, OpenCV, PyAV, libsndfile) are imported by the function that needs them.
"""

from mm_assets.media.images import probe_image
from mm_assets.media.sounds import probe_audio
from mm_assets.media.video import probe_video

__all__ = ["probe_audio", "probe_image", "probe_video"]
