"""Small images of many formats, and what may happen to a file on its way."""

from __future__ import annotations

import functools
import io
import struct
import zlib

import numpy as np
import tifffile
from PIL import Image

HEIGHT, WIDTH = 40, 56


def saved(image, codec, **options):
    """The bytes of a Pillow image in a file."""
    target = io.BytesIO()
    image.save(target, format=codec, **options)
    return target.getvalue()


def interlaced_png(pixels):
    """An RGB PNG in the seven passes of Adam7, which Pillow reads but does not write."""
    height, width = pixels.shape[:2]
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    raw = b"".join(b"\0" + row.tobytes() for left, top, right, down in passes for row in pixels[top::down, left::right])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def palette_bmp(indices, bits, compression, body):
    """A BMP of a palette; `body` is its pixel data."""
    height, width = indices.shape
    palette = b"".join(bytes([4 * k % 256, 9 * k % 256, 255 - k, 0]) for k in range(1 << bits))
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(body), 0, 0, 1 << bits, 0)
    start = 14 + len(info) + len(palette)
    return struct.pack("<2sIHHI", b"BM", start + len(body), 0, 0, start) + info + palette + body


def bmp_of_4_bits(indices):
    rows = [bytes(row[0::2] << 4 | row[1::2]) for row in indices[::-1] & 15]
    return palette_bmp(indices, 4, 0, b"".join(row + bytes(-len(row) % 4) for row in rows))


def bmp_of_runs(indices):
    body = b"".join(b"".join(bytes([1, index]) for index in row) + b"\0\0" for row in indices[::-1])
    return palette_bmp(indices, 8, 1, body + b"\0\1")


@functools.cache
def corpus():
    """The bytes of a whole file by the name of its kind."""
    import pillow_heif
    import pillow_jxl  # noqa: F401  # the import lets Pillow read JPEG XL

    pillow_heif.register_heif_opener()
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    noise = np.random.default_rng(5).integers(0, 24, (HEIGHT, WIDTH, 3))
    pixels = (np.stack([x * 4, y * 5, (x + y) * 2], axis=-1) + noise).clip(0, 255).astype(np.uint8)
    deep = (x * 911 + y * 513).astype(np.uint16)
    colour = Image.fromarray(pixels)
    grey, bilevel, palette = colour.convert("L"), colour.convert("1"), colour.quantize(16)
    alpha = colour.convert("RGBA")
    alpha.putalpha(grey)
    moved = [Image.fromarray(np.roll(pixels, 9 * k, axis=1)) for k in range(1, 4)]
    several = {"save_all": True, "append_images": moved}
    files = {
        "jpeg baseline": saved(colour, "JPEG", quality=90),
        "jpeg 4:4:4": saved(colour, "JPEG", quality=95, subsampling=0),
        "jpeg progressive": saved(colour, "JPEG", progressive=True),
        "jpeg grey": saved(grey, "JPEG"),
        "jpeg cmyk": saved(colour.convert("CMYK"), "JPEG"),
        "jpeg restarts": saved(colour, "JPEG", restart_marker_blocks=2),
        "png": saved(colour, "PNG"),
        "png alpha": saved(alpha, "PNG"),
        "png grey": saved(grey, "PNG"),
        "png 1 bit": saved(bilevel, "PNG"),
        "png 2 bit": saved(colour.quantize(4), "PNG", bits=2),
        "png 4 bit": saved(palette, "PNG", bits=4),
        "png palette": saved(colour.quantize(200), "PNG"),
        "png 16 bit": saved(Image.fromarray(deep), "PNG"),
        "png interlaced": interlaced_png(pixels),
        "png animated": saved(colour, "PNG", **several),
        "webp lossy": saved(colour, "WEBP"),
        "webp lossless": saved(alpha, "WEBP", lossless=True, exact=True),
        "webp animated": saved(colour, "WEBP", **several),
        "bmp 1 bit": saved(bilevel, "BMP"),
        "bmp 4 bit": bmp_of_4_bits(np.asarray(palette)),
        "bmp 8 bit": saved(grey, "BMP"),
        "bmp 24 bit": saved(colour, "BMP"),
        "bmp 32 bit": saved(alpha, "BMP"),
        "bmp runs": bmp_of_runs(np.asarray(palette)),
        "gif": saved(palette, "GIF"),
        "gif animated": saved(colour, "GIF", **several),
        "tiff": saved(colour, "TIFF"),
        "tiff lzw": saved(colour, "TIFF", compression="tiff_lzw"),
        "tiff deflate": saved(colour, "TIFF", compression="tiff_adobe_deflate"),
        "tiff jpeg": saved(colour, "TIFF", compression="jpeg"),
        "tiff group 4": saved(bilevel, "TIFF", compression="group4"),
        "avif": saved(colour, "AVIF"),
        "avif alpha": saved(alpha, "AVIF"),
        "avif animated": saved(colour, "AVIF", **several),
        "heic": saved(colour, "HEIF"),
        "heic alpha": saved(alpha, "HEIF"),
        "jxl": saved(colour, "JXL", lossless=True),
        "jxl lossy": saved(colour, "JXL"),
        "jxl alpha": saved(alpha, "JXL", use_container=True),
        "jp2": saved(colour, "JPEG2000"),
        "jp2 alpha": saved(alpha, "JPEG2000"),
        "jp2 16 bit": saved(Image.fromarray(deep), "JPEG2000"),
        "j2k": saved(colour, "JPEG2000", no_jp2=True),
        "pbm": saved(bilevel, "PPM"),
        "pgm": saved(grey, "PPM"),
        "pgm 16 bit": b"P5 56 40\n# deep\n65535\n" + deep.astype(">u2").tobytes(),
        "ppm": saved(colour, "PPM"),
        "ppm text": b"P3\n56 40\n255\n" + b" ".join(b"%d" % v for v in pixels.ravel().tolist()) + b"\n",
        "ico": saved(alpha, "ICO", sizes=[(32, 32), (16, 16)]),
        "ico bitmap": saved(alpha, "ICO", sizes=[(32, 32)], bitmap_format="bmp"),
        "tga": saved(colour, "TGA"),
        "tga alpha": saved(alpha, "TGA"),
        "tga runs": saved(grey, "TGA", compression="tga_rle"),
    }
    for name, values, options in (
        ("tiff tiled", pixels, {"tile": (16, 16), "compression": "zlib", "photometric": "rgb"}),
        ("tiff 16 bit", deep, {"photometric": "minisblack"}),
        ("tiff 16 bit big-endian", deep, {"byteorder": ">", "photometric": "minisblack"}),
        ("tiff big-endian", pixels, {"byteorder": ">", "photometric": "rgb", "rowsperstrip": 8}),
    ):
        target = io.BytesIO()
        tifffile.imwrite(target, values, **options)
        files[name] = target.getvalue()
    return files


def cut(share):
    return lambda data: data[: int(len(data) * share)]


def zeroed(data):
    start = len(data) * 6 // 10
    return data[:start] + bytes(min(40, len(data) - start)) + data[start + 40 :]


def flipped(share):
    def damage(data):
        at = int(len(data) * share)
        return data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :]

    return damage


DAMAGES = {
    "whole": lambda data: data,
    "empty": lambda data: b"",
    "cut at a fifth": cut(0.2),
    "cut at two thirds": cut(0.667),
    "cut near the end": cut(0.97),
    "a stretch of zeros": zeroed,
    "a byte at a third": flipped(0.34),
    "a byte at three quarters": flipped(0.75),
    "trailing bytes": lambda data: data + b"trailing bytes",
}
