"""Images for people: stored bytes where browsers show them, else a PNG or JPEG made of them; all frames of a sequence.

Only the plug-in of an image's own codec decodes it, and only within `MAX_PIXELS`, which the header is asked for first.
An SVG is never an image here: it is a program for a browser, and is shown as its text.
"""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mm_assets.display.item import Content, Item, Media, human_bytes, human_size, made, stored, unreadable_item
from mm_assets.errors import MediaError, MissingExtraError
from mm_assets.fields.image import ImageField
from mm_assets.fields.image_decode import orient, pixels_of
from mm_assets.fields.image_pillow import open_with_pillow
from mm_assets.media.image_damage import find_damage
from mm_assets.media.image_info import ImageInfo
from mm_assets.media.images import probe_image
from mm_assets.media.jpeg import MAX_SCANS, num_scans, read_jpeg_head
from mm_assets.media.tiff import TiffFrames

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["MAX_FRAMES", "frames_item", "image_item", "jpeg_of", "picture_of", "png_of", "thumbnail_of_image"]

MAX_PIXELS = 50_000_000  # that are decoded: 150 MB of RGB; telephones take pictures of 48 million
MAX_JPEG_PIXELS = 400_000_000  # of a JPEG for its thumbnail, which is decoded at an eighth of its sides
MAX_SHOWN_PIXELS = 100_000_000  # of a file that a browser decodes by itself
MAX_FRAMES = 200  # of a sequence, an animation or a document
MAX_ANIMATED_PIXELS = 200_000_000  # of an animation's frames: the last one is decoded after all others, in seconds
MAX_PASSED_FRAMES = 200_000  # of an animation, which is passed from its first to its last for each picture of a frame
_MAX_SIDE = 4096  # of a made picture
_QUALITY = 88

NATIVE = {
    "jpeg": "image/jpeg",
    "png": "image/png",
    "gif": "image/gif",
    "webp": "image/webp",
    "avif": "image/avif",
    "bmp": "image/bmp",
}
"""Codecs that browsers decode, and the type that each is served with."""

_TITLES = {"jpeg": "JPEG", "webp": "WebP", "jxl": "JPEG XL", "jp2": "JPEG 2000"}
_TURNS = {2: "mirrored", 3: "180°", 4: "mirrored", 5: "mirrored, 90°", 6: "90°", 7: "mirrored, 90°", 8: "270°"}


def image_item(name: str, content: Content) -> Item:
    """An image file: one picture, or all frames where it has several."""
    try:
        data = content.whole()
        info = probe_image(data)
    except MediaError as error:
        return unreadable_item(name, f"The image cannot be shown: {error.reason}.", size=content.size)
    facts = _facts(info, content.size)
    damage = find_damage(data, info.codec)
    note = f"The file is damaged: {info.codec.upper()} {damage}." if damage else ""
    num_pixels = info.width * info.height
    if info.num_frames > 1 and not damage:
        return _frames_of_file(name, content, info, facts)
    width, height = info.upright_size
    shape = {"width": width, "height": height}
    if _is_native(info, data) and num_pixels <= MAX_SHOWN_PIXELS:
        media = (stored("image", content, NATIVE[info.codec]),)
    elif num_pixels > (MAX_JPEG_PIXELS if info.codec == "jpeg" else MAX_PIXELS):
        reason = f"It claims {num_pixels:,} pixels, and at most {MAX_PIXELS:,} are decoded to be shown."
        return Item(name=name, kind="unreadable", facts=facts, note=reason)
    elif damage:
        return Item(name=name, kind="unreadable", facts=facts, note=note)
    elif not info.has_8bit_form:
        reason = f"It has samples of {info.bit_depth} bits without an 8-bit form, which no picture shows."
        return Item(name=name, kind="unreadable", facts=facts, note=reason)
    else:
        kind = "image/png" if info.channels == 4 else "image/jpeg"
        media = (made("image", kind, partial(_made_image, content, 0)),)
        note = f"Shown is a {kind[6:].upper()} made of the {_title(info.codec)}."
    return Item(name=name, kind="image", facts=facts, data={"image": "image", **shape}, media=media, note=note)


def frames_item(
    name: str, frames: list[tuple[int, Item]], *, facts: dict[str, str], note: str = "", what: str = "frame"
) -> Item:
    """Several images at positions, of which each was an item of its own; frames that cannot be shown say so."""
    shown, media = [], []
    for number, (position, item) in enumerate(frames[:MAX_FRAMES]):
        picture = item.media[0] if item.kind == "image" else None
        entry = {"position": position, "media": None, "note": item.note}
        if picture is not None:
            entry = {**entry, "media": f"{what}-{number}"}
            entry |= {key: item.data[key] for key in ("width", "height") if key in item.data}
            media.append(Media(**{**_parts_of(picture), "name": f"{what}-{number}"}))
        shown.append(entry)
    if len(frames) > MAX_FRAMES:
        note = f"{note} Shown are the first {MAX_FRAMES} of {len(frames):,} {what}s.".strip()
    return Item(name=name, kind="images", facts=facts, data={"frames": shown}, media=tuple(media), note=note)


def _parts_of(media: Media) -> dict[str, Any]:
    return {key: getattr(media, key) for key in ("name", "content_type", "size", "read", "make")}


def _frames_of_file(name: str, content: Content, info: ImageInfo, facts: dict[str, str]) -> Item:
    """The pages of a TIFF, or the frames of an animation."""
    is_pages = info.codec == "tiff"
    what = "page" if is_pages else "frame"
    count = min(info.num_frames, MAX_FRAMES)
    if not is_pages:
        most = min(
            MAX_ANIMATED_PIXELS // max(1, info.width * info.height), MAX_PASSED_FRAMES // max(1, info.num_frames)
        )
        count = min(count, max(1, most))
    if info.has_unread_frames or info.width * info.height > MAX_PIXELS:
        count = 0
    kind = "image/png" if info.channels == 4 else "image/jpeg"
    width, height = info.upright_size
    frames = [
        {"position": number, "media": f"frame-{number}"} | ({} if is_pages else {"width": width, "height": height})
        for number in range(count)
    ]
    media = [made(f"frame-{number}", kind, partial(_made_image, content, number)) for number in range(count)]
    data: dict[str, Any] = {"frames": frames}
    if info.codec in NATIVE and info.num_frames > 1 and info.width * info.height <= MAX_SHOWN_PIXELS:
        media.insert(0, stored("animation", content, NATIVE[info.codec]))
        data["animation"] = "animation"
    note = ""
    if count < info.num_frames:
        note = f"Shown are {count} of {info.num_frames:,} {what}s." if count else f"No decoder here reads its {what}s."
    if not media:
        return Item(name=name, kind="unreadable", facts=facts, note=note)
    return Item(name=name, kind="images", facts=facts, data=data, media=tuple(media), note=note)


def _facts(info: ImageInfo, size: int) -> dict[str, str]:
    facts = {"size": human_size(*info.upright_size), "type": _title(info.codec), "bytes": human_bytes(size)}
    if info.num_frames > 1:
        facts["pages" if info.codec == "tiff" else "frames"] = f"{info.num_frames:,}"
    if info.bit_depth != 8:
        facts["bits"] = str(info.bit_depth)
    if info.orientation in _TURNS:
        facts["turned"] = _TURNS[info.orientation]
    return facts


def _title(codec: str) -> str:
    return _TITLES.get(codec, codec.upper())


def _is_native(info: ImageInfo, data: bytes) -> bool:
    """Whether a browser shows the file as it is meant: upright, with its own colours."""
    if info.codec not in NATIVE:
        return False
    if info.codec == "jpeg":
        return _jpeg_space(data) not in ("CMYK", "YCCK")
    return info.orientation == 1 or info.codec == "avif"  # a browser reads EXIF in JPEG alone with certainty


def _jpeg_space(data: bytes) -> str:
    import simplejpeg

    try:
        return str(simplejpeg.decode_jpeg_header(data)[2])
    except ValueError:  # a JPEG that libjpeg-turbo cannot describe: nothing is known of its colours
        return ""


# --- pixels -----------------------------------------------------------------------------------------------------------


def _made_image(content: Content, frame: int) -> bytes:
    """A frame of an image file as a PNG where it has alpha, else as a JPEG."""
    return picture_of(frame_pixels(content.whole(), frame))


def frame_pixels(data: bytes, frame: int = 0) -> npt.NDArray[np.uint8]:
    """(H, W, C) uint8 of a frame of an image file, upright.

    Raises:
        MediaError: it cannot be decoded, or is too large.
    """
    try:
        info = probe_image(data)
        if info.codec == "tiff" and info.num_frames > 1:
            data = TiffFrames(data).extract(frame)
            info, frame = probe_image(data), 0
        num_pixels = info.width * info.height
        if num_pixels > MAX_PIXELS and not (info.codec == "jpeg" and num_pixels <= MAX_JPEG_PIXELS):
            raise MediaError("<image>", f"has {num_pixels:,} pixels, at most {MAX_PIXELS:,} are decoded to be shown")
        if num_pixels > MAX_PIXELS:
            return thumbnail_pixels(data, _MAX_SIDE)
        if frame:
            with open_with_pillow(data, info.codec) as image:
                image.seek(frame)
                return np.ascontiguousarray(orient(pixels_of(image, info.channels), info.orientation))
        field = ImageField(max_pixels=MAX_PIXELS)
        return field.decode(*field.encode(data))
    except (ValueError, MissingExtraError) as error:  # of FormatError and EncodeError too
        raise MediaError("<image>", f"cannot be decoded: {error}") from error


def picture_of(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels as a PNG where they have alpha, else as a JPEG; at most `_MAX_SIDE` on a side."""
    pixels = shrunk_pixels(pixels, _MAX_SIDE)
    return png_of(pixels) if pixels.shape[2] == 4 else jpeg_of(pixels)


def shrunk_pixels(pixels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """(H, W, C) pixels, at most `side` on a side."""
    if max(pixels.shape[:2]) <= side:
        return pixels
    shrunk = np.asarray(_shrunk(_image_of(pixels), side))
    return shrunk[:, :, np.newaxis] if shrunk.ndim == 2 else shrunk


def jpeg_of(pixels: npt.NDArray[np.uint8], *, quality: int = _QUALITY) -> bytes:
    """(H, W, 1), (H, W, 3) or (H, W, 4) pixels as a JPEG; alpha is blended with white."""
    import simplejpeg

    if pixels.shape[2] == 4:
        alpha = pixels[:, :, 3:].astype(np.uint16)
        blended = (pixels[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255
        pixels = blended.astype(np.uint8)
    space, subsampling = ("GRAY", "Gray") if pixels.shape[2] == 1 else ("RGB", "420")
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), quality=quality, colorspace=space, colorsubsampling=subsampling, fastdct=True
        )
    )


def png_of(pixels: npt.NDArray[np.uint8]) -> bytes:
    """(H, W, C) pixels as a PNG."""
    target = io.BytesIO()
    _image_of(pixels).save(target, format="PNG", compress_level=1)
    return target.getvalue()


def _image_of(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    from PIL import Image

    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _shrunk(image: Image.Image, side: int) -> Image.Image:
    """An image whose longer side is at most `side`, its aspect ratio kept."""
    from PIL import Image

    scale = side / max(image.size)
    if scale >= 1:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.5)


# --- thumbnails -------------------------------------------------------------------------------------------------------


def thumbnail_of_image(data: bytes, size: int) -> bytes | None:
    """A JPEG of at most `size` on a side; None where the file cannot be decoded."""
    try:
        return jpeg_of(thumbnail_pixels(data, size), quality=80)
    except (ValueError, MissingExtraError):  # of MediaError and FormatError too
        return None


def thumbnail_pixels(data: bytes, size: int) -> npt.NDArray[np.uint8]:
    """(H, W, C) uint8 of the first frame, upright, decoded at a part of its size where the codec can.

    Of a JPEG that is truncated it has what is there.
    """
    info = probe_image(data)
    pixels = _reduced_jpeg(data, info, size) if info.codec == "jpeg" else None
    if pixels is None:
        if info.width * info.height > MAX_PIXELS:
            raise MediaError("<image>", "has too many pixels")
        if info.codec == "tiff" and info.num_frames > 1:
            data = TiffFrames(data).extract(0)
            info = probe_image(data)
        with open_with_pillow(data, info.codec) as image:
            part = max(image.size) // (2 * size)
            if part > 1 and image.mode in ("L", "RGB", "RGBA"):  # before anything is copied at its full size
                image = image.reduce(part)
            pixels = pixels_of(image, info.channels)
    return np.ascontiguousarray(orient(shrunk_pixels(pixels, size), info.orientation))


def _reduced_jpeg(data: bytes, info: ImageInfo, size: int) -> npt.NDArray[np.uint8] | None:
    """At the smallest eighth of its size that has `size` pixels on its longer side; None where Pillow has to decode."""
    import simplejpeg

    if info.width * info.height > MAX_JPEG_PIXELS:
        raise MediaError("<image>", "has too many pixels")
    view = memoryview(data)
    jpeg = read_jpeg_head(view)
    if jpeg.is_progressive and num_scans(view, jpeg) > MAX_SCANS:
        raise MediaError("<image>", f"has more than {MAX_SCANS} scans")
    # A tenth less than is wanted will do: half of 500 pixels is 250, and five eighths of it take longer than all of it.
    scale = min(1.0, 0.9 * size / max(info.width, info.height))
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if space in ("CMYK", "YCCK"):
            return None
        return np.asarray(
            simplejpeg.decode_jpeg(
                data,
                colorspace="GRAY" if space == "Gray" else "RGB",
                min_height=max(1, int(height * scale)),
                min_width=max(1, int(width * scale)),
                fastdct=True,
                fastupsample=True,
                strict=False,
            )
        )
    except ValueError:
        return None
