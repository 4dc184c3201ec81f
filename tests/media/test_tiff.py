"""Frames of TIFFs: the pixels of the original to the last bit; whatever bytes arrive, an answer or a `MediaError`."""

from __future__ import annotations

import io
import itertools
import struct
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import MediaError
from mm_assets.media.content_types import sniff_content_type
from mm_assets.media.tiff import TiffFrames

SIZES = ((37, 53), (64, 48), (20, 130))  # (height, width) of the three frames of most tests


def pixels(shape: tuple[int, ...], dtype: Any = np.uint8, *, seed: int = 0) -> np.ndarray:
    """Smooth content with some noise, so that every codec has something to do."""
    rng = np.random.default_rng(seed)
    grid = np.indices(shape).sum(axis=0) * 3 + rng.integers(0, 9, shape) + 40 * seed
    kind = np.dtype(dtype)
    return (grid / 7).astype(kind) if kind.kind == "f" else (grid % np.iinfo(kind).max).astype(kind)


def pil_frames(data: bytes) -> Iterator[Image.Image]:
    with Image.open(io.BytesIO(data)) as image:
        for frame in range(image.n_frames):
            image.seek(frame)
            image.load()
            yield image.copy()


def tifffile_frames(data: bytes) -> list[np.ndarray | None]:
    """Each frame as tifffile decodes it, None where it does not."""
    found: list[np.ndarray | None] = []
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        for page in file.pages:
            try:
                found.append(page.asarray())
            except (ValueError, RuntimeError, NotImplementedError):  # a codec that is not installed
                found.append(None)
    return found


def check_frames(data: bytes, *, pillow: bool = True) -> list[bytes]:
    """Takes every frame out of `data` and compares it with the plain decode of the original."""
    frames = TiffFrames(data)
    by_tifffile = tifffile_frames(data)
    assert frames.num_frames == len(by_tifffile)
    parts = [frames.extract(k) for k in range(frames.num_frames)]
    for part, expected in zip(parts, by_tifffile, strict=True):
        (found,) = tifffile_frames(part)
        assert (found is None) == (expected is None)
        if expected is not None and found is not None:
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(tifffile.imread(io.BytesIO(part)), np.squeeze(expected))
    if pillow:
        for part, expected_image in zip(parts, pil_frames(data), strict=True):
            (image,) = pil_frames(part)
            assert (image.mode, image.size) == (expected_image.mode, expected_image.size)
            assert image.getpalette() == expected_image.getpalette()
            assert image.tobytes() == expected_image.tobytes()
    return parts


def pil_tiff(mode: str, compression: str | None, **options: Any) -> bytes:
    images = []
    for seed, (height, width) in enumerate(SIZES):
        if mode == "I;16":
            images.append(Image.fromarray(pixels((height, width), np.uint16, seed=seed)))
        elif mode == "F":
            images.append(Image.fromarray(pixels((height, width), np.float32, seed=seed)))
        else:
            image = Image.fromarray(pixels((height, width, 4), seed=seed), "RGBA")
            images.append(image if mode == "RGBA" else image.convert("RGB").convert(mode))
    out = io.BytesIO()
    first, *rest = images
    first.save(out, "TIFF", save_all=True, append_images=rest, compression=compression, **options)
    return out.getvalue()


def tags_of(data: bytes) -> dict[int, Any]:
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        return {tag.code: tag.value for tag in file.pages[0].tags}


def build_tiff(directories: list[list[tuple[int, int, Any]]], *, order: str = "<", blob: bytes = b"") -> bytes:
    """A classic TIFF by hand: `blob` is at byte 8, then the directories one after the other.

    An entry is (tag, type, numbers); numbers of more than four bytes follow their directory.
    """
    data = bytearray((b"II*\0" if order == "<" else b"MM\0*") + bytes(4) + blob + bytes(len(blob) % 2))
    link = 4
    for entries in directories:
        struct.pack_into(order + "I", data, link, len(data))
        at = len(data)
        extra = bytearray()
        extra_at = at + 2 + 12 * len(entries) + 4
        data += struct.pack(order + "H", len(entries))
        for tag, kind, numbers in entries:
            code = {1: "B", 3: "H", 4: "I", 13: "I"}[kind]
            raw = struct.pack(f"{order}{len(numbers)}{code}", *numbers)
            if len(raw) > 4:
                pointer = struct.pack(order + "I", extra_at + len(extra))
                extra += raw + bytes(len(raw) % 2)
                raw = pointer
            data += struct.pack(order + "HHI4s", tag, kind, len(numbers), raw)
        link = len(data)
        data += bytes(4) + extra
    return bytes(data)


def grey(offsets: list[int], sizes: list[int] | None, *, width: int = 4, length: int = 4, rows: int = 4) -> list[Any]:
    """The entries of an uncompressed frame of 8-bit grey."""
    entries = [(256, 4, [width]), (257, 4, [length]), (258, 3, [8]), (259, 3, [1]), (262, 3, [1])]
    entries += [(273, 4, offsets), (277, 3, [1]), (278, 4, [rows])]
    return entries + ([] if sizes is None else [(279, 4, sizes)])


@pytest.mark.parametrize(
    ("mode", "compression"),
    [
        *itertools.product(["1"], [None, "packbits", "group3", "group4", "tiff_lzw", "tiff_adobe_deflate"]),
        *itertools.product(["L", "RGB"], [None, "packbits", "tiff_lzw", "tiff_adobe_deflate", "jpeg"]),
        *itertools.product(["P", "RGBA", "CMYK"], [None, "tiff_lzw", "tiff_adobe_deflate"]),
        *itertools.product(["LA", "I;16", "F"], [None, "tiff_lzw", "tiff_adobe_deflate"]),
        ("YCbCr", None),
        ("CMYK", "jpeg"),
    ],
)
def test_what_pillow_writes(mode: str, compression: str | None) -> None:
    """Every mode and compression of Pillow comes out pixel for pixel, in Pillow and in tifffile."""
    check_frames(pil_tiff(mode, compression))


@pytest.mark.parametrize("strip_size", [1000, 1 << 20])
@pytest.mark.parametrize("compression", ["jpeg", "tiff_lzw", "tiff_adobe_deflate"])
def test_many_strips_and_one(compression: str, strip_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of many strips, and of one, keep their rows."""
    monkeypatch.setattr("PIL.TiffImagePlugin.STRIP_SIZE", strip_size)
    data = pil_tiff("RGB", compression)
    parts = check_frames(data)
    counts = [len(np.atleast_1d(tags_of(part)[273])) for part in parts]
    assert (max(counts) > 2) == (strip_size == 1000)


def test_jpeg_tables_come_along() -> None:
    """The tables that a JPEG frame's strips leave out are in the new file."""
    parts = check_frames(pil_tiff("RGB", "jpeg", quality=55))
    assert all(tags_of(part)[347].startswith(b"\xff\xd8") for part in parts)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiles": {"tile": (16, 32)},
    "strips": {"rowsperstrip": 7},
    "planes": {"planarconfig": "separate", "photometric": "rgb"},
    "planes in tiles": {"planarconfig": "separate", "photometric": "rgb", "tile": (32, 16)},
    "zlib": {"compression": "zlib", "rowsperstrip": 5},
    "zlib with predictor": {"compression": "zlib", "predictor": True, "rowsperstrip": 5},
    "zlib with predictor in tiles": {"compression": "zlib", "predictor": True, "tile": (16, 16)},
}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_tifffile_writes(variant: str, bigtiff: bool, byteorder: Any, dtype: str) -> None:
    """Tiles, planes, strips, predictors, wide samples, both byte orders, classic and BigTIFF: pixel for pixel."""
    options = VARIANTS[variant]
    if "predictor" in options and dtype == "float32":
        pytest.importorskip("imagecodecs", reason="tifffile writes the floating-point predictor with imagecodecs only")
    out = io.BytesIO()
    with tifffile.TiffWriter(out, bigtiff=bigtiff, byteorder=byteorder) as writer:
        for seed, size in enumerate(SIZES):
            if "planarconfig" in options:
                image = pixels((3, *size), dtype, seed=seed)
            else:
                image = pixels((*size, 3), dtype, seed=seed)
            extra = {} if "planarconfig" in options else {"photometric": "rgb"}
            writer.write(image, metadata=None, **extra, **options)
    parts = check_frames(out.getvalue(), pillow=False)
    assert all(part[:4] == out.getvalue()[:4] for part in parts)
    pillow_reads_it = not (bigtiff and byteorder == ">")
    if dtype == "uint8" and "planarconfig" not in options and pillow_reads_it:
        check_frames(out.getvalue())


def test_codecs_that_are_not_decoded() -> None:
    """Data is copied whatever its compression, known or not: the bytes of each strip are those of the original."""
    blob = bytes(range(64))
    entries = [(t, k, [65000] if t == 259 else v) for t, k, v in grey([8, 40], [30, 24], rows=2)]
    data = build_tiff([entries, entries], blob=blob)
    part = TiffFrames(data).extract(1)
    tags = tags_of(part)
    assert [part[o : o + n] for o, n in zip(tags[273], tags[279], strict=True)] == [blob[:30], blob[32:56]]


def test_tags_are_kept() -> None:
    """Resolution, orientation, text, colour profile and private tags are those of the frame."""
    out = io.BytesIO()
    private = (65001, 7, 11, b"hello world", True)
    with tifffile.TiffWriter(out) as writer:
        for seed in range(2):
            writer.write(
                pixels((20, 30), seed=seed),
                metadata=None,
                description=f"page {seed}",
                software="here",
                resolution=(300, 150),
                resolutionunit="inch",
                iccprofile=b"profile",
                extratags=[private, (274, 3, 1, 6, True)],
            )
    data = out.getvalue()
    for number, part in enumerate(check_frames(data)):
        tags = tags_of(part)
        assert tags[270] == f"page {number}"
        assert (tags[305], tags[282], tags[283], tags[274]) == ("here", (300, 1), (150, 1), 6)
        assert (tags[34675], tags[65001]) == (b"profile", b"hello world")


def test_pointers_into_the_old_file_are_left_out() -> None:
    """Sub-images and EXIF directories are not in the new file, whose pointers would lead astray."""
    out = io.BytesIO()
    with tifffile.TiffWriter(out) as writer:
        for seed in range(2):
            writer.write(pixels((40, 40), seed=seed), subifds=1, metadata=None)
            writer.write(pixels((20, 20), seed=seed), subfiletype=1, metadata=None)
    for part in check_frames(out.getvalue()):
        assert 330 not in tags_of(part)
        assert len(part) < 40 * 40 + 1000
    pointers = [(34665, 4, [8]), (34853, 4, [8]), (50000, 13, [8])]
    data = build_tiff([[*FRAME, *pointers]] * 2, blob=BLOB)
    assert not {tag for tag, _, _ in pointers} & set(tags_of(TiffFrames(data).extract(1)))


@pytest.mark.parametrize("options", [{}, {"imagej": True}, {"ome": True}, {"metadata": {"axes": "ZYX"}}])
def test_descriptions_of_the_whole_stack_are_left_out(options: dict[str, Any]) -> None:
    """A frame of a stack that tifffile, ImageJ or OME describe is read as one image."""
    out = io.BytesIO()
    stack = pixels((4, 33, 21), np.uint16)
    tifffile.imwrite(out, stack, photometric="minisblack", rowsperstrip=33, **options)
    if TiffFrames(out.getvalue()).num_frames == 1:
        pytest.fail("the stack was not written as frames")
    for number, part in enumerate(check_frames(out.getvalue(), pillow=False)):
        np.testing.assert_array_equal(tifffile.imread(io.BytesIO(part)), stack[number])


def test_the_same_frame_is_the_same_bytes() -> None:
    """Extraction is deterministic and does not depend on what was extracted before."""
    data = pil_tiff("RGB", "jpeg")
    frames = TiffFrames(data)
    assert [frames.extract(k) for k in (2, 0, 1)] == [TiffFrames(data).extract(k) for k in (2, 0, 1)]


def test_a_frame_of_a_frame_is_itself() -> None:
    """A file of one frame is returned as it is."""
    part = TiffFrames(pil_tiff("P", "tiff_lzw")).extract(1)
    assert TiffFrames(part).extract(0) == part
    assert TiffFrames(part).num_frames == 1


def test_reduced_pages_are_frames() -> None:
    """A reduced-resolution page of the main chain counts, as it does for Pillow."""
    out = io.BytesIO()
    with tifffile.TiffWriter(out) as writer:
        writer.write(pixels((40, 40)), metadata=None)
        writer.write(pixels((20, 20)), subfiletype=1, metadata=None)
    assert len(check_frames(out.getvalue())) == 2


@pytest.mark.parametrize("order", ["<", ">"])
def test_missing_and_understated_strip_sizes(order: str) -> None:
    """Uncompressed strips whose sizes are missing or too small still have all bytes that Pillow reads."""
    blob = bytes(range(100, 132))
    for sizes in (None, [3, 2], [16, 16]):
        data = build_tiff([grey([8, 24], sizes, length=8)] * 2, order=order, blob=blob)
        for part in map(TiffFrames(data).extract, range(2)):
            (image,) = pil_frames(part)
            assert image.tobytes() == blob


def test_strips_that_share_bytes_are_copied_once() -> None:
    """A frame of many strips that all point to the same bytes does not grow: a hostile file cannot swell."""
    blob = bytes(10_000)
    count = 1000
    entries = grey([8] * count, [10_000] * count, width=100, length=100 * count, rows=100)
    data = build_tiff([entries, entries], blob=blob)
    part = TiffFrames(data).extract(1)
    assert len(part) < len(data)
    assert tifffile_frames(part)[0] is not None


def test_left_out_tiles_stay_out() -> None:
    """Tiles without bytes, at position 0, are those that their writer left out."""
    entries = [*grey([], [], width=32, length=16)[:5], (277, 3, [1]), (322, 4, [16]), (323, 4, [16])]
    entries += [(324, 4, [8, 0]), (325, 4, [256, 0])]
    data = build_tiff([entries, entries], blob=bytes(range(256)))
    part = TiffFrames(data).extract(0)
    assert tags_of(part)[324][1] == 0
    with tifffile.TiffFile(io.BytesIO(part)) as file:
        image = file.pages[0].asarray()
    assert image[:, :16].tobytes() == bytes(range(256))
    assert not image[:, 16:].any()


BLOB = bytes(16)
FRAME = grey([8], [16])


@pytest.mark.parametrize(
    ("make", "frame", "message"),
    [
        (lambda: b"", 0, "expected a TIFF header"),
        (lambda: b"GIF89a" + bytes(20), 0, "expected a TIFF header"),
        (lambda: b"II*\0\x08", 0, "TIFF header is truncated: needs 4 bytes"),
        (lambda: b"II+\0\x04\0\0\0" + bytes(8), 0, "positions of 4 bytes"),
        (lambda: b"II*\0\x04\0\0\0" + bytes(8), 0, "within the header"),
        (lambda: b"II*\0\0\0\0\0", 0, "the file has 0"),
        (lambda: b"II*\0\xff\xff\0\0", 0, "directory of frame 0 is truncated: needs 2 bytes at 65535"),
        (lambda: build_tiff([FRAME, FRAME], blob=BLOB), 2, "frame 2 was asked for, the file has 2"),
        (lambda: build_tiff([FRAME, FRAME], blob=BLOB), -1, "expected 0 or more"),
        (lambda: build_tiff([FRAME, FRAME[:5]], blob=BLOB), 1, "neither strips nor tiles"),
        (lambda: build_tiff([FRAME, grey([8], [1 << 20])], blob=BLOB), 1, "strip or tile 0 has 1048576 bytes at 8"),
        (lambda: build_tiff([FRAME, grey([1 << 30], [4])], blob=BLOB), 1, "4 bytes at 1073741824"),
        (lambda: build_tiff([FRAME, grey([8, 12], [4])], blob=BLOB), 1, "2 positions and 1 sizes"),
        (lambda: build_tiff([FRAME, [*FRAME, (279, 4, [1])]], blob=BLOB), 1, r"has tag 279 .StripByteCounts. twice"),
        (lambda: build_tiff([[(259, 3, [6]), *FRAME[5:]]] * 2, blob=BLOB), 1, "old-style JPEG"),
        (
            lambda: build_tiff([[(259, 3, [7]), *FRAME[5:-1]]] * 2, blob=BLOB),
            1,
            r"tag 279 .StripByteCounts. is missing: the sizes of its 1 strips",
        ),
        (
            lambda: build_tiff([[(273, 1, [1]), (279, 4, [])]] * 2, blob=BLOB),
            1,
            r"tag 279 .StripByteCounts. is missing: the sizes of its 1 strips",
        ),
    ],
)
def test_what_is_wrong_is_named(make: Callable[[], bytes], frame: int, message: str) -> None:
    """Each kind of damage is a `MediaError` that says what was found and where."""
    with pytest.raises(MediaError, match=message):
        TiffFrames(make()).extract(frame)


def test_a_wrong_type_is_named() -> None:
    """Positions that are not unsigned numbers are refused."""
    data = bytearray(build_tiff([FRAME, FRAME], blob=BLOB))
    at = data.rindex(struct.pack("<HH", 273, 4))
    struct.pack_into("<HH", data, at, 273, 11)
    with pytest.raises(MediaError, match=r"frame 1: tag 273 .StripOffsets. is of type 11"):
        TiffFrames(data).extract(1)


def test_a_loop_is_refused() -> None:
    """A chain that comes back to itself ends in an error; frames before the loop are still had."""
    data = bytearray(build_tiff([FRAME, FRAME], blob=BLOB))
    first = struct.unpack_from("<I", data, 4)[0]
    struct.pack_into("<I", data, len(data) - 4, first)
    frames = TiffFrames(data)
    assert frames.extract(1) == TiffFrames(build_tiff([FRAME, FRAME], blob=BLOB)).extract(1)
    with pytest.raises(MediaError, match="loop"):
        _ = frames.num_frames
    with pytest.raises(MediaError, match="loop"):
        frames.extract(7)


def test_numbers_of_64_bits() -> None:
    """A BigTIFF's counts and positions near 2^64 are refused, not wrapped around."""
    out = io.BytesIO()
    with tifffile.TiffWriter(out, bigtiff=True) as writer:
        for seed in range(2):
            writer.write(pixels((20, 20), seed=seed), metadata=None, rowsperstrip=5)
    data = out.getvalue()
    for target in (273, 279):
        at = data.index(struct.pack("<H", target), 16)
        for position in (at + 4, at + 12):  # the number of values, and where they stand
            for value in (2**64 - 1, 2**63, 2**62, 2**61 + 1):
                bad = bytearray(data)
                struct.pack_into("<Q", bad, position, value)
                with pytest.raises(MediaError):
                    TiffFrames(bad).extract(0)
        values = struct.unpack_from("<Q", data, at + 12)[0]
        kind = struct.unpack_from("<H", data, at + 2)[0]
        if kind == 16:
            bad = bytearray(data)
            struct.pack_into("<Q", bad, values, 2**64 - 8)
            with pytest.raises(MediaError, match="63 bits"):
                TiffFrames(bad).extract(0)


def test_tags_that_swell_are_refused() -> None:
    """Thousands of tags that all point to the whole file are an error, not gigabytes."""
    filler = bytes(100_000)
    data = bytearray(build_tiff([FRAME, FRAME], blob=filler))
    at = len(data)
    struct.pack_into("<I", data, 4, at)
    data += struct.pack("<H", 5000)
    for tag in range(5000):
        data += struct.pack("<HHII", 40000 + tag, 7, 100_000, 8)
    data += struct.pack("<I", 8)
    with pytest.raises(MediaError, match="its tags hold more than"):
        TiffFrames(data).extract(0)


SMALL = {
    "jpeg": lambda: pil_tiff("L", "jpeg"),
    "deflate": lambda: pil_tiff("RGBA", "tiff_adobe_deflate"),
    "raw": lambda: build_tiff([grey([8, 12], [4, 4], rows=2, length=4)] * 3, order=">", blob=BLOB),
    "big": lambda: _bigtiff(),
}


def _bigtiff() -> bytes:
    out = io.BytesIO()
    with tifffile.TiffWriter(out, bigtiff=True, byteorder=">") as writer:
        for seed in range(3):
            writer.write(pixels((12, 12), np.uint16, seed=seed), metadata=None, tile=(16, 16))
    return out.getvalue()


def attempt(data: bytes) -> None:
    """Takes out what there is; only `MediaError` may come of it, and nothing much larger than the file."""
    try:
        frames = TiffFrames(data)
    except MediaError:
        return
    for number in range(4):
        try:
            part = frames.extract(number)
        except MediaError:
            continue
        assert len(part) <= 12 * len(data) + 1024
        assert sniff_content_type(part) == "image/tiff"
    try:
        assert frames.num_frames <= len(data)
    except MediaError:
        return


@pytest.mark.parametrize("kind", SMALL)
def test_truncated_anywhere(kind: str) -> None:
    """A TIFF truncated at any byte gives frames or a `MediaError`."""
    data = SMALL[kind]()
    for size in {*range(min(len(data), 600)), *range(0, len(data), 41)}:
        attempt(data[:size])


@settings(deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(sorted(SMALL)),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=12),
    from_end=st.booleans(),
)
def test_any_bytes_changed(kind: str, changes: list[tuple[int, int]], from_end: bool) -> None:
    """A TIFF with bytes changed anywhere gives frames or a `MediaError`, within a small multiple of its size."""
    data = bytearray(SMALL[kind]())
    for position, value in changes:
        data[-1 - position % len(data) if from_end else position % len(data)] = value
    attempt(bytes(data))


@settings(deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(["raw", "big"]),
    position=st.integers(0, 1 << 12),
    width=st.sampled_from(["H", "I", "Q"]),
    value=st.sampled_from([0, 1, 2, 8, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1]),
)
def test_any_number_changed(kind: str, position: int, width: str, value: int) -> None:
    """A TIFF with any of its numbers at an extreme gives frames or a `MediaError`."""
    data = bytearray(SMALL[kind]())
    size = struct.calcsize(width)
    struct.pack_into(">" + width, data, position % (len(data) - size), value & (256**size - 1))
    attempt(bytes(data))


@settings(deadline=None, max_examples=200)
@given(
    data=st.binary(max_size=400), magic=st.sampled_from([b"II*\0", b"MM\0*", b"II+\0\x08\0\0\0", b"MM\0+\0\x08\0\0"])
)
def test_any_bytes_after_a_magic(data: bytes, magic: bytes) -> None:
    """Random bytes that begin as a TIFF give frames or a `MediaError`."""
    attempt(magic + data)


@pytest.mark.parametrize(
    "shard",
    ["mint1t-pdf/mint1t-pdf-00000.tar", "mint1t-pdf/mint1t-pdf-00001.tar", "mint1t-pages/mint1t-pages-00000.tar"],
)
def test_real_documents(shared_data: Path, shard: str) -> None:
    """Every frame of every TIFF of the document corpora comes out pixel for pixel."""
    num_frames = 0
    with tarfile.open(shared_data / shard) as archive, warnings.catch_warnings():
        warnings.simplefilter("error")
        for member in archive:
            if member.name.endswith((".tif", ".tiff")):
                file = archive.extractfile(member)
                assert file is not None
                num_frames += len(check_frames(file.read()))
    assert num_frames > 10
