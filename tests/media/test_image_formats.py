"""The headers of more image formats, and the damage that the structure of each format shows."""

import io
import re
import struct
import time
import tracemalloc
import zlib

import pytest
from PIL import Image

from mm_assets.errors import MediaError
from mm_assets.media.content_types import content_type_of_name, sniff_content_type
from mm_assets.media.image_damage import find_damage
from mm_assets.media.images import probe_image
from mm_assets.media.jpeg import find_jpeg_damage, read_jpeg_head, without_padding

from ..fields.image_corpus import HEIGHT, WIDTH, corpus

ONE, THREE, FOUR = 1, 3, 4
EXPECTED = {  # codec, channels, bits, frames
    "avif": ("avif", THREE, 8, 1),
    "avif alpha": ("avif", FOUR, 8, 1),
    "avif animated": ("avif", THREE, 8, 4),
    "heic": ("heic", THREE, 8, 1),
    "heic alpha": ("heic", FOUR, 8, 1),
    "jxl": ("jxl", THREE, 8, 1),
    "jxl lossy": ("jxl", THREE, 8, 1),
    "jxl alpha": ("jxl", FOUR, 8, 1),
    "jp2": ("jp2", THREE, 8, 1),
    "jp2 alpha": ("jp2", FOUR, 8, 1),
    "jp2 16 bit": ("jp2", ONE, 16, 1),
    "j2k": ("jp2", THREE, 8, 1),
    "pbm": ("pnm", ONE, 1, 1),
    "pgm": ("pnm", ONE, 8, 1),
    "pgm 16 bit": ("pnm", ONE, 16, 1),
    "ppm": ("pnm", THREE, 8, 1),
    "ppm text": ("pnm", THREE, 8, 1),
    "tga": ("tga", THREE, 8, 1),
    "tga alpha": ("tga", FOUR, 8, 1),
    "tga runs": ("tga", ONE, 8, 1),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_header_is_read(kind):
    """Codec, size, channels, depth and frames are those of the image, and its head alone is refused or enough."""
    data = corpus()[kind]
    info = probe_image(data)
    assert (info.codec, info.channels, info.bit_depth, info.num_frames) == EXPECTED[kind]
    assert (info.height, info.width) == (HEIGHT, WIDTH)
    for size in range(0, min(len(data), 400), 3):
        try:
            assert probe_image(data[:size]).codec == info.codec
        except MediaError as error:
            assert error.reason  # noqa: PT017  # the bytes may also be valid


def test_icons_show_their_largest_image():
    """Of an ICO the largest image counts, whether it is a PNG or a bitmap."""
    sizes = [(info.width, info.height) for info in map(probe_image, (corpus()["ico"], corpus()["ico bitmap"]))]
    with Image.open(io.BytesIO(corpus()["ico"])) as image, Image.open(io.BytesIO(corpus()["ico bitmap"])) as bitmap:
        assert sizes == [image.size, bitmap.size]


@pytest.mark.parametrize("kind", ["heic", "jxl", "jxl alpha", "jp2", "j2k", "avif", "pbm", "pgm", "ppm", "ico", "tga"])
def test_the_first_bytes_and_the_name_say_the_type(kind):
    """Bytes and names give the same type, but for TGA, which has no magic number."""
    by_bytes, by_name = sniff_content_type(corpus()[kind]), content_type_of_name(f"a.{kind.split()[0]}")
    assert by_name == ("image/x-tga" if kind == "tga" else by_bytes)
    assert by_bytes is None or by_bytes.startswith("image/")


@pytest.mark.parametrize(
    "data", [b"P5 is a title", b"P1", b"P7 3 4", b"\0\0\1\0" + bytes(30), b"\xff", b"Plain text of a caption"]
)
def test_text_and_other_bytes_are_no_images(data):
    """Text that begins like a PNM, and bytes that begin like icons, have no type of an image."""
    assert sniff_content_type(data) is None
    with pytest.raises(MediaError):
        probe_image(data)


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_what_is_there_of_a_file_is_said():
    """The reason says how many rows, bytes, strips or frames of a damaged file are there."""
    files = corpus()
    rows = re.escape(f"of {HEIGHT} rows")
    half = {kind: data[: len(data) // 2] for kind, data in files.items()}
    for kind, codec, pattern in (
        ("png", "png", rf"is truncated: 1?\d {rows}"),
        ("bmp 24 bit", "bmp", r"is truncated: 3,387 of 6,774 bytes"),
        ("webp lossy", "webp", r"is truncated: \d+ of \d+ bytes"),
        ("gif animated", "gif", r"is truncated: [12] whole frames in [\d,]+ bytes"),
        ("tiff big-endian", "tiff", r"is truncated: 2 of 5 strips, in [\d,]+ bytes"),
        ("ppm", "pnm", r"is truncated: [\d,]+ of 6,733 bytes"),
        ("tga", "tga", r"is truncated: [\d,]+ of 6,738 bytes"),
        ("avif", "avif", r"is truncated: \d+ of \d+ bytes"),
        ("j2k", "jp2", r"is truncated: 0 whole tile-parts in [\d,]+ bytes"),
        ("ico", "ico", r"is truncated: [\d,]+ of [\d,]+ bytes"),
        ("jpeg baseline", "jpeg", r"is truncated: it has no end marker in \d+ bytes"),
    ):
        assert re.match(pattern, find_damage(half[kind], codec) or "whole"), (kind, find_damage(half[kind], codec))
        assert find_damage(files[kind], codec) is None
        assert find_damage(files[kind] + b"more bytes", codec) is None


def test_checksums_of_every_chunk_count():
    """A flipped bit anywhere in a PNG is found, whichever chunk it is in."""
    data = png_chunk(b"tEXt", b"Comment\0words")
    whole = corpus()["png"][:33] + data + corpus()["png"][33:]
    assert find_damage(whole, "png") is None
    for at in range(16, len(whole), 7):
        damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        assert find_damage(damaged, "png") is not None, at


def test_the_structure_of_a_jpeg():
    """Restart markers out of order and a missing end are found; padding differs from data; the profile is joined."""
    restarts = corpus()["jpeg restarts"]
    assert find_jpeg_damage(memoryview(restarts)) is None
    swapped = restarts.replace(b"\xff\xd1", b"\xff\xd3", 1)
    assert "restart marker 3" in (find_jpeg_damage(memoryview(swapped)) or "")
    baseline = corpus()["jpeg baseline"]
    padded = baseline[:-2] + bytes(5) + baseline[-2:]
    assert without_padding(memoryview(padded)) == baseline
    assert without_padding(memoryview(padded), keep=1) == baseline[:-2] + b"\0" + baseline[-2:]
    assert without_padding(memoryview(baseline)) is None
    profile = bytes(range(256)) * 600
    target = io.BytesIO()
    Image.new("RGB", (8, 8)).save(target, "JPEG", icc_profile=profile)
    assert read_jpeg_head(memoryview(target.getvalue())).icc == profile
    assert read_jpeg_head(memoryview(baseline)).icc == b""


def hostile_files():
    """Codec and bytes of files that would take long, or much memory, where each byte is not read once."""
    size = 1 << 18
    jpeg, png, gif = corpus()["jpeg baseline"], corpus()["png"], corpus()["gif"]
    bomb = zlib.compress(bytes(64 << 20))
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
    return {
        "fill bytes before the first segment": ("jpeg", jpeg[:2] + b"\xff" * size + jpeg[2:]),
        "junk before the first segment": ("jpeg", jpeg[:2] + b"a" * size + jpeg[2:]),
        "junk between segments": ("jpeg", jpeg[:2] + (b"a" * 60_000 + b"\xff\xe5\0\2") * 4 + jpeg[2:]),
        "fill bytes before the end": ("jpeg", jpeg[:-2] + b"\xff" * size + jpeg[-2:]),
        "scans": ("jpeg", jpeg[:-2] + b"\xff\xda\0\x08\1\1\0\0?\0a" * (size // 12) + jpeg[-2:]),
        "a bomb with a wrong checksum": ("png", png[:8] + header + png_chunk(b"IDAT", bomb)[:-1] + b"?"),
        "empty chunks": ("png", png[:33] + png_chunk(b"abCd", b"") * (size // 12)),
        "empty blocks": ("gif", gif[:-1] + b"\x21\xfe" + b"\1a" * (size // 2)),
        "empty extensions": ("gif", gif[:-1] + b"\x21\xf9\0\0" * (size // 4)),
        "zeros": ("gif", gif[:-1] + bytes(8 * size)),
        "comments": ("pnm", b"P6\n" + b"# a\n" * (size // 4)),
        "tile-parts": ("jp2", corpus()["j2k"][:-2] + b"\xff\x90\0\x0a\0\0\0\0\0\x0c\0\1" * (size // 12)),
        "empty boxes": ("avif", corpus()["avif"] + b"\0\0\0\x08free" * (size // 8)),
    }


@pytest.mark.parametrize("what", hostile_files())
def test_hostile_files_take_linear_time_and_little_memory(what):
    """Bytes that are made to be slow take a moment of processor time, and less than ten times their size."""
    codec, data = hostile_files()[what]
    tracemalloc.start()
    started = time.process_time()
    find_damage(data, codec)
    try:
        probe_image(data)
    except MediaError as error:
        assert error.reason  # noqa: PT017  # the bytes may also be valid
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 10  # in quadratic time it would be minutes; a slow machine is not a failure
    assert peak < 10 * len(data) + (8 << 20)
