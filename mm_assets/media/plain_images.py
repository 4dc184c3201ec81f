"""Headers of images with a plain layout: PNM (PBM, PGM, PPM), ICO and TGA, and where the pixels of each lie."""

from __future__ import annotations

import re
import struct

from mm_assets.media.header import HeaderReader
from mm_assets.media.image_info import ImageInfo

__all__ = ["pnm_size", "probe_ico", "probe_pnm", "probe_tga", "read_icons", "tga_size"]

_MAX_PNM_HEADER = 65_536
_COMMENT = re.compile(rb"#[^\r\n]*")
_TGA = struct.Struct("<BBBHHBHHHHBB")
_TGA_KINDS = {1, 2, 3, 9, 10, 11}
_ICON = struct.Struct("<BBBxHHII")  # width, height, colours, planes, bits, size, offset
_PNG = b"\x89PNG\r\n\x1a\n"
MAX_ICONS = 1024


def _pnm_header(head: HeaderReader) -> tuple[int, int, int, int, int]:
    """Kind 1 to 6, width, height, the largest value, and where the pixels begin."""
    kind = head.piece(0, 2, "PNM header")[1] - ord("0")
    wanted = 2 if kind in (1, 4) else 3
    numbers: list[int] = []
    text, pos = bytes(head.view[:_MAX_PNM_HEADER]), 2
    while len(numbers) < wanted:
        match = re.compile(rb"(?:\s|#[^\r\n]*[\r\n])+(\d{1,10})(?=[\s#])").match(text, pos)
        if match is None:
            raise head.fail(f"PNM header is truncated or damaged at byte {pos}: expected {wanted} numbers")
        numbers.append(int(match[1]))
        pos = match.end()
    comment = _COMMENT.match(text, pos)
    pos = comment.end() if comment else pos
    largest = 1 if wanted == 2 else numbers[2]
    if not 1 <= largest <= 65_535:
        raise head.fail(f"PNM has the largest value {largest}, expected 1 to 65535")
    return kind, numbers[0], numbers[1], largest, pos + 1


def probe_pnm(head: HeaderReader) -> ImageInfo:
    """Read the header of a PBM, PGM or PPM, as text or binary."""
    kind, width, height, largest, _ = _pnm_header(head)
    channels = 3 if kind in (3, 6) else 1
    depth = 1 if kind in (1, 4) else 8 if largest < 256 else 16
    return ImageInfo(codec="pnm", width=width, height=height, channels=channels, bit_depth=depth)


def pnm_size(head: HeaderReader) -> int:
    """Bytes that a PNM needs: all of a binary one, and of a text at least one digit and one space per sample."""
    kind, width, height, largest, start = _pnm_header(head)
    samples = width * height * (3 if kind in (3, 6) else 1)
    if kind == 1:
        return start + samples
    if kind <= 3:
        return start + 2 * samples - 1
    return start + ((width + 7) // 8 * height if kind == 4 else samples * (1 if largest < 256 else 2))


def read_icons(head: HeaderReader) -> list[tuple[int, int, int, int, int]]:
    """Width, height, bits, position and size of each image of an ICO, as its directory gives them."""
    _, _, count = head.take(struct.Struct("<HHH"), 0, "ICO header")
    if not 1 <= count <= MAX_ICONS:
        raise head.fail(f"ICO has {count} images, expected 1 to {MAX_ICONS}")
    found = []
    for index in range(count):
        width, height, colours, _, bits, size, offset = head.take(_ICON, 6 + 16 * index, "ICO directory")
        bits = bits or (max(1, (colours - 1).bit_length()) if colours else 8)
        found.append((width or 256, height or 256, bits, offset, size))
    return found


def probe_ico(head: HeaderReader) -> ImageInfo:
    """Read the directory of an ICO, and the header of its largest image, the one that is decoded."""
    icons = read_icons(head)
    width, height, bits, offset, _ = max(icons, key=lambda icon: (icon[0] * icon[1], -icon[2]))
    if head.starts(offset, _PNG):
        width, height = head.take(struct.Struct(">II"), offset + 16, "PNG in an ICO")
    return ImageInfo(codec="ico", width=width, height=height, channels=4, bit_depth=bits if bits < 8 else 8)


def _tga_header(head: HeaderReader) -> tuple[int, int, int, int, int, int]:
    """Kind, width, height, bits, descriptor, and where the pixels begin; `MediaError` for what is not a TGA."""
    record = head.take(_TGA, 0, "TGA header")
    id_size, has_map, kind, map_start, map_length, map_bits, _, _, width, height, bits, descriptor = record
    is_mapped, is_grey = kind in (1, 9), kind in (3, 11)
    plausible = (
        kind in _TGA_KINDS
        and has_map == int(is_mapped)
        and (map_bits in (15, 16, 24, 32) and 1 <= map_length <= 256 and not map_start if is_mapped else True)
        and (has_map or not (map_start or map_length or map_bits))
        and bits in ((8, 16) if is_grey else (8,) if is_mapped else (15, 16, 24, 32))
        and not descriptor & 0xC0
        and width
        and height
    )
    if not plausible:
        raise head.fail("is not a TGA: its header has impossible values")
    start = 18 + id_size + (map_length * ((map_bits + 7) // 8) if has_map else 0)
    return kind, width, height, bits, descriptor, start


def probe_tga(head: HeaderReader) -> ImageInfo:
    """Read the header of a TGA. It has no magic number: every field must have a possible value."""
    kind, width, height, bits, descriptor, _ = _tga_header(head)
    is_mapped, is_grey = kind in (1, 9), kind in (3, 11)
    if is_grey:
        channels = 4 if bits == 16 else 1
    elif is_mapped:
        channels = 4 if head.view[7] == 32 else 3
    else:
        channels = 4 if bits == 32 or (bits == 16 and descriptor & 15) else 3
    return ImageInfo(codec="tga", width=width, height=height, channels=channels, bit_depth=5 if bits in (15, 16) else 8)


def tga_size(head: HeaderReader) -> int:
    """Bytes that a TGA needs: all of an uncompressed one, of another at least what runs of 128 pixels take."""
    kind, width, height, bits, _, start = _tga_header(head)
    pixel = (bits + 7) // 8
    if kind <= 3:
        return start + width * height * pixel
    return start + -(-width * height // 128) * (1 + pixel)
