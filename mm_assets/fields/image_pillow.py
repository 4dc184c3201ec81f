"""Image files opened by Pillow: by the one plug-in of their codec, without its warnings, and only if they are whole."""

from __future__ import annotations

import functools
import io
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mm_assets.errors import FormatError, MissingExtraError, first_line, optional_import
from mm_assets.fields.base import corrupt
from mm_assets.media.content_types import Buffer
from mm_assets.media.image_blocks import pixel_chunks
from mm_assets.media.image_damage import find_damage
from mm_assets.media.images import PILLOW_ERRORS
from mm_assets.media.quiet_pillow import quiet_pillow

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["open_with_pillow"]

_LOG = logging.getLogger(__name__)

_Opener = Callable[[io.BytesIO], "Image.Image"]

# How the libraries of AVIF and HEIC say that the host lacks memory. "Security limit exceeded" is about the file.
_NO_MEMORY = re.compile(r"out of memory|memory allocation error: unspecified", re.IGNORECASE)


@contextmanager
def open_with_pillow(data: Buffer, codec: str) -> Iterator[Image.Image]:
    """An image file, opened by the one plug-in of its codec.

    Raises:
        CorruptError: damage that the file's structure shows, or that Pillow finds while the file is open.
        MissingExtraError: the codec's plug-in is not installed.
        MemoryError: the host lacks memory, which says nothing about the file.
    """
    from PIL.Image import DecompressionBombError

    open_file = _opener(codec)
    damage = find_damage(data, codec)
    if damage is not None:
        raise corrupt(f"{codec.upper()} {damage}")
    if codec == "png":
        data, has_large_profile = pixel_chunks(data)
        if has_large_profile:
            _LOG.warning("the ICC profile of a PNG is not used: it has more than 1 MiB")
    try:
        with quiet_pillow(), open_file(io.BytesIO(data)) as image:
            # All at once: fed in blocks, a decoder that waits for more reads the same bytes again and again.
            image.decodermaxblock = max(len(data), 65_536)  # type: ignore[attr-defined]  # of every ImageFile
            yield image
    except (FormatError, MissingExtraError):
        raise
    except (*PILLOW_ERRORS, DecompressionBombError) as error:
        if _NO_MEMORY.search(str(error)):
            raise MemoryError(f"decoding {codec.upper()}: {first_line(error)}") from error
        raise corrupt(f"{codec.upper()} cannot be decoded: {type(error).__name__}: {first_line(error)}") from error


@functools.cache
def _opener(codec: str) -> _Opener:
    # The plug-in itself rather than Image.open: no other format can be smuggled in, and the size limit is the field's
    # instead of a global of Pillow's that only warns.
    if codec == "heic":
        with optional_import("pillow_heif", "decoding HEIC"):
            from pillow_heif import HeifImageFile
        return _as_opener(HeifImageFile)
    if codec == "jxl":
        with optional_import("pillow_jxl", "decoding JPEG XL"):
            from pillow_jxl.JpegXLImagePlugin import JXLImageFile
        return _as_opener(JXLImageFile)
    from PIL import (
        AvifImagePlugin,
        BmpImagePlugin,
        GifImagePlugin,
        IcoImagePlugin,
        Jpeg2KImagePlugin,
        JpegImagePlugin,
        PngImagePlugin,
        PpmImagePlugin,
        TgaImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
        features,
    )

    plugins: dict[str, Any] = {
        "jpeg": JpegImagePlugin.JpegImageFile,
        "png": PngImagePlugin.PngImageFile,
        "webp": WebPImagePlugin.WebPImageFile,
        "tiff": TiffImagePlugin.TiffImageFile,
        "gif": GifImagePlugin.GifImageFile,
        "bmp": BmpImagePlugin.BmpImageFile,
        "avif": AvifImagePlugin.AvifImageFile,
        "jp2": Jpeg2KImagePlugin.Jpeg2KImageFile,
        "pnm": PpmImagePlugin.PpmImageFile,
        "ico": IcoImagePlugin.IcoImageFile,
        "tga": TgaImagePlugin.TgaImageFile,
    }
    if codec == "avif" and not features.check("avif"):
        raise MissingExtraError("decoding AVIF (Pillow was built without it)", "pillow")
    return _as_opener(plugins[codec])


def _as_opener(plugin: Any) -> _Opener:
    return plugin  # type: ignore[no-any-return]  # the plug-ins' classes are called with a file
