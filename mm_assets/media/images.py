"""Facts about images, read from their headers: codec, size, channels, orientation. Nothing here decodes a pixel.

Every number is bounds-checked; any input gives an answer or a `MediaError`, in time bounded by the existing headers.
"""

from __future__ import annotations

import struct
import weakref
import zlib

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer, sniff_content_type
from mm_assets.media.header import CHUNK_BE, MAX_SEGMENTS, HeaderReader, read_tiff_layout, read_tiff_numbers
from mm_assets.media.image_blocks import GIF_EXTENSION, GIF_FRAME, gif_blocks, png_chunks, webp_chunks
from mm_assets.media.image_info import ImageInfo
from mm_assets.media.iso_images import probe_heif, probe_jp2, probe_jxl
from mm_assets.media.jpeg import MAX_JUNK
from mm_assets.media.plain_images import probe_ico, probe_pnm, probe_tga

__all__ = ["PILLOW_ERRORS", "ImageInfo", "probe_image", "share_probe"]


class _Shared(weakref.ref[memoryview]):
    """A view that `share_probe` was given, and its facts: None before it is probed."""

    __slots__ = ("info", "key")
    key: int
    info: ImageInfo | None


# These views by identity, as long as they live. Not a WeakKeyDictionary, since the hash of a view reads all its bytes.
_SHARED: dict[int, _Shared] = {}

# Pillow's plugins raise these for damaged bytes. They do not promise a set: an index past a list or a failed assertion
# is a sign of damage, as is an OSError. `Warning` is for callers who turn warnings into errors. `MemoryError` is not
# among them: sizes are checked before memory is asked for, so the host lacks it, whatever the bytes are.
PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
    Warning,
)
_EXIF = b"Exif\0\0"
_U16_BE = struct.Struct(">H")
_U32_BE = struct.Struct(">I")
_U32_LE = struct.Struct("<I")
_JPEG_FRAME = struct.Struct(">BHHB")
_TIFF_TAGS = frozenset((256, 257, 258, 262, 274, 277, 338, 339))


def probe_image(data: Buffer) -> ImageInfo:
    """Read an image's header without decoding it.

    The head of a JPEG, PNG, BMP or WebP file is enough: the size is at the front (in JPEG after EXIF and the like);
    transparency, orientation and frames are those that the head shows. A TIFF needs the bytes up to its first
    directory, which may be at the end, AVIF and HEIC their meta box, JPEG 2000 and JPEG XL the start of their
    codestream.

    Raises:
        MediaError: not an image of a codec of `ImageInfo`, or a header that is damaged or truncated.
    """
    shared = _SHARED.get(id(data))
    if shared is not None and shared() is not data:
        shared = None
    if shared is not None and shared.info is not None:
        return shared.info
    head = HeaderReader(data, "<image>")
    content_type = sniff_content_type(head.view)
    info = _parse(head, content_type)
    if info.width < 1 or info.height < 1:
        raise head.fail(f"{info.codec} image has no pixels: {info.width} x {info.height}")
    if shared is not None:
        shared.info = info
    return info


def _parse(head: HeaderReader, content_type: str | None) -> ImageInfo:
    parse = _IMAGE_PARSERS.get(content_type or "")
    if parse is not None:
        return parse(head)
    if content_type is None and head.has(0, 18):
        try:
            return probe_tga(head)  # it has no magic number
        except MediaError:
            pass  # an error about TGA would mislead
    found = content_type or f"unknown bytes {bytes(head.view[:8])!r}"
    raise head.fail(f"is not a readable image: found {found}, expected {_READABLE}")


def share_probe(view: memoryview, *, like: memoryview | None = None) -> memoryview:
    """The view itself, whose header `probe_image` from now on reads once for everyone who holds this very object.

    Args:
        view: bytes that do not change while the view lives.
        like: another view of the same bytes, given here before: what is known of it is known of this one.
    """
    known = None if like is None else _SHARED.get(id(like))
    shared = _Shared(view, _forget)
    shared.key = id(view)
    shared.info = None if known is None else known.info
    _SHARED[shared.key] = shared
    return view


def _forget(shared: weakref.ref[memoryview]) -> None:
    assert isinstance(shared, _Shared)
    if _SHARED.get(shared.key) is shared:  # else another view has its identity by now
        del _SHARED[shared.key]


def _probe_jpeg(head: HeaderReader) -> ImageInfo:
    view, size = head.view, head.size
    pos, orientation, total_junk = 2, 1, 0
    for _ in range(MAX_SEGMENTS):
        if pos + 2 <= size and view[pos] == 0xFF and view[pos + 1] != 0xFF:
            marker = view[pos + 1]  # undamaged, as almost always
            pos += 2
        else:
            junk = bytes(head.view[pos : pos + MAX_JUNK - total_junk])
            start = junk.find(b"\xff")
            filled = junk[start:].lstrip(b"\xff") if start >= 0 else b""
            if not filled:
                raise head.fail(f"JPEG header is truncated or damaged: no marker after byte {pos}")
            pos += len(junk) - len(filled) + 1
            total_junk += len(junk) - len(filled)
            marker = filled[0]
        if marker <= 0x01 or 0xD0 <= marker <= 0xD8:
            continue  # markers without a segment, and a stuffed byte in junk
        if marker in (0xD9, 0xDA):
            raise head.fail("JPEG has no frame header before its data")
        (length,) = head.take(_U16_BE, pos, "JPEG segment")
        if length < 2:
            raise head.fail(f"JPEG segment {marker:#04x} has length {length}, expected at least 2")
        if marker == 0xE1 and orientation == 1 and head.starts(pos + 2, _EXIF):
            orientation = _exif_orientation(head.view[pos + 8 : pos + length])
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            depth, height, width, components = head.take(_JPEG_FRAME, pos + 2, "JPEG frame header")
            if components not in (1, 3, 4):
                raise head.fail(f"JPEG has {components} components, expected 1, 3 or 4")
            return ImageInfo(
                codec="jpeg",
                width=width,
                height=height,
                channels=1 if components == 1 else 3,
                bit_depth=depth,
                has_8bit_form=depth == 8,
                orientation=orientation,
            )
        pos += length
    raise head.fail(f"JPEG has more than {MAX_SEGMENTS} segments before its frame header")


def _exif_orientation(tiff: memoryview) -> int:
    """Orientation in an EXIF block; damage there does not damage the image, so it reads as 1, upright."""
    try:
        tags, _ = _read_directory(HeaderReader(tiff, "EXIF"))
    except MediaError:
        return 1
    return _orientation(tags)


def _orientation(tags: dict[int, list[int]]) -> int:
    value = tags.get(274, [1])[0]
    return value if 1 <= value <= 8 else 1


def _probe_png(head: HeaderReader) -> ImageInfo:
    length, kind = head.take(CHUNK_BE, 8, "PNG header")
    if length != 13 or kind != b"IHDR":
        raise head.fail(f"PNG starts with chunk {kind!r} of {length} bytes, expected IHDR of 13")
    width, height, depth, colour = head.take(struct.Struct(">IIBB"), 16, "PNG header")
    channels = {0: 1, 2: 3, 3: 3, 4: 4, 6: 4}.get(colour)
    if channels is None or depth not in (1, 2, 4, 8, 16):
        raise head.fail(f"PNG has colour type {colour} at {depth} bits, which does not exist")
    num_frames, orientation = 1, 1
    for chunk in png_chunks(head):
        if chunk.kind in (b"IDAT", b"IEND"):
            break
        if chunk.kind == b"tRNS":
            channels = 4
        elif chunk.kind == b"acTL" and head.has(chunk.body, 4):
            num_frames = max(1, head.take(_U32_BE, chunk.body, "PNG acTL")[0])
        elif chunk.kind == b"eXIf":
            orientation = _exif_orientation(head.view[chunk.body : chunk.body + chunk.length])
    return ImageInfo(
        codec="png",
        width=width,
        height=height,
        channels=channels,
        bit_depth=depth,
        num_frames=num_frames,
        orientation=orientation,
    )


def _probe_gif(head: HeaderReader) -> ImageInfo:
    width, height = head.take(struct.Struct("<HH"), 6, "GIF header")
    num_frames, transparent = 0, False
    for kind, start, _ in gif_blocks(head):
        if kind == GIF_EXTENSION and num_frames == 0 and head.has(start, 4) and head.view[start + 1] == 0xF9:
            transparent = bool(head.view[start + 3] & 1)
        elif kind == GIF_FRAME:
            left, top, columns, rows = head.take(struct.Struct("<HHHH"), start + 1, "GIF frame")
            if num_frames == 0:  # the first frame may be larger than the screen; decoders enlarge the screen
                width, height = max(width, left + columns), max(height, top + rows)
            num_frames += 1
    return ImageInfo(
        codec="gif",
        width=width,
        height=height,
        channels=4 if transparent else 3,
        bit_depth=8,
        num_frames=max(1, num_frames),
    )


def _probe_webp(head: HeaderReader) -> ImageInfo:
    width = height = num_frames = 0
    alpha, orientation = False, 1
    for kind, body, length in webp_chunks(head):
        if kind == b"VP8X" and not width:
            flags, sizes = head.take(struct.Struct("<B3x6s"), body, "WebP VP8X")
            width, height = 1 + int.from_bytes(sizes[:3], "little"), 1 + int.from_bytes(sizes[3:], "little")
            alpha = bool(flags & 0x10)
        elif kind == b"VP8L" and not width:
            signature, bits = head.take(struct.Struct("<BI"), body, "WebP VP8L")
            if signature != 0x2F:
                raise head.fail(f"WebP lossless header has signature {signature:#04x}, expected 0x2f")
            width, height, alpha = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), bool(bits >> 28 & 1)
        elif kind == b"VP8 " and not width:
            if head.piece(body + 3, 3, "WebP VP8") != b"\x9d\x01\x2a":
                raise head.fail("WebP lossy header lacks its start code")
            width, height = (side & 0x3FFF for side in head.take(struct.Struct("<HH"), body + 6, "WebP VP8"))
        elif kind == b"ANMF":
            num_frames += 1
        elif kind == b"EXIF":
            start = body + 6 if head.starts(body, _EXIF) else body
            orientation = _exif_orientation(head.view[start : body + length])
    return ImageInfo(
        codec="webp",
        width=width,
        height=height,
        channels=4 if alpha else 3,
        bit_depth=8,
        num_frames=max(1, num_frames),
        orientation=orientation,
    )


def _probe_bmp(head: HeaderReader) -> ImageInfo:
    (size,) = head.take(_U32_LE, 14, "BMP header")
    if size == 12:
        width, height, _, bits = head.take(struct.Struct("<HHHH"), 18, "BMP header")
        compression = 0
    else:
        width, height, _, bits, compression = head.take(struct.Struct("<iiHHI"), 18, "BMP header")
    # The alpha mask counts only where masks are in use, as in decoders.
    alpha = compression in (3, 6) and size >= 56 and head.take(_U32_LE, 66, "BMP masks")[0] != 0
    return ImageInfo(
        codec="bmp",
        width=width,
        height=abs(height),
        channels=4 if alpha and bits == 32 else 3,
        bit_depth=bits if bits <= 8 else 8,
    )


def _read_directory(head: HeaderReader) -> tuple[dict[int, list[int]], int]:
    """The needed tags of the first directory of a TIFF or BigTIFF, and the length of the chain of directories."""
    layout = read_tiff_layout(head)
    tags = read_tiff_numbers(head, layout, _TIFF_TAGS, max_values=64)
    count_of, entry_of, pointer_of, pos = layout.num_entries, layout.entry, layout.pointer, layout.first
    (entries,) = head.take(count_of, pos, "TIFF directory")
    seen = {pos}
    while len(seen) < MAX_SEGMENTS:
        at = pos + count_of.size + entries * entry_of.size
        if not head.has(at, pointer_of.size):
            break
        (pos,) = head.take(pointer_of, at, "TIFF chain")
        if pos == 0 or pos in seen or not head.has(pos, count_of.size):
            break  # the end, a loop, or a missing directory
        seen.add(pos)
        (entries,) = head.take(count_of, pos, "TIFF directory")
    return tags, len(seen)


def _probe_tiff(head: HeaderReader) -> ImageInfo:
    tags, num_frames = _read_directory(head)
    if 256 not in tags or 257 not in tags:
        raise head.fail("TIFF directory has no width and height")
    samples, photometric = tags.get(277, [1])[0], tags.get(262, [1])[0]
    alpha = any(kind in (1, 2) for kind in tags.get(338, ()))
    if photometric in (0, 1):
        channels = 4 if samples > 1 and alpha else 1
    else:
        channels = 4 if photometric == 2 and samples > 3 and alpha else 3
    depth, unsigned = tags.get(258, [1])[0], all(kind in (1, 4) for kind in tags.get(339, ()))
    is_lab = photometric == 8 and depth == 8 and samples == 3
    return ImageInfo(
        codec="tiff",
        width=tags[256][0],
        height=tags[257][0],
        channels=channels,
        bit_depth=depth,
        has_8bit_form=unsigned and 1 <= depth <= 16 and (is_lab or photometric in (0, 1, 2, 3, 5, 6)),
        num_frames=num_frames,
        orientation=_orientation(tags),
    )


_READABLE = "JPEG, PNG, GIF, WebP, BMP, TIFF, AVIF, HEIC, JPEG XL, JPEG 2000, PNM, ICO or TGA"
_IMAGE_PARSERS = {
    "image/jpeg": _probe_jpeg,
    "image/png": _probe_png,
    "image/gif": _probe_gif,
    "image/webp": _probe_webp,
    "image/bmp": _probe_bmp,
    "image/tiff": _probe_tiff,
    "image/avif": probe_heif,
    "image/heic": probe_heif,
    "image/heif": probe_heif,
    "image/jxl": probe_jxl,
    "image/jp2": probe_jp2,
    "image/j2c": probe_jp2,
    "image/x-portable-bitmap": probe_pnm,
    "image/x-portable-graymap": probe_pnm,
    "image/x-portable-pixmap": probe_pnm,
    "image/x-icon": probe_ico,
}
