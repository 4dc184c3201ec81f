import io
import struct
import zlib

import numpy as np
import pytest
import tifffile
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from mm_assets.errors import EncodeError, FormatError, LimitError
from mm_assets.fields import DepthField
from mm_assets.testing import FieldSuite, damaged

from .conftest import image_file, picture

MM = (np.arange(60, dtype=np.uint16) * 1000).reshape(6, 10)  # steps up to 59,000: more than 8 bits, more than int16
METRES = (MM / np.float32(1000)).astype(np.float32)
METRES[0, 0], METRES[1, 1], METRES[2, 2] = np.nan, np.inf, -0.0
PNG = image_file(Image.fromarray(MM), "PNG")


def tiff(array: np.ndarray, **options: object) -> bytes:
    target = io.BytesIO()
    tifffile.imwrite(target, array, **options)
    return target.getvalue()


def npy(array: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


FLOAT_TIFF = tiff(METRES)


class TestDepthField(FieldSuite):
    fields = [
        DepthField(),
        DepthField(encoding="zstd", dtype="uint16", size=(6, 10)),
        DepthField(encoding="raw", dtype="float32"),
        DepthField(metres_per_step=0.001, decoded="metres"),
        DepthField(metres_per_step=0.001, decoded="metres", invalid=65_535),
        DepthField(max_pixels=7),
    ]
    cases = [
        (PNG, MM),
        (FLOAT_TIFF, METRES),
        (MM, MM),
        (METRES, METRES),
        (bytearray(tiff(MM)), MM),
        (MM.astype(">u2")[::-1, ::2], np.ascontiguousarray(MM[::-1, ::2])),
        (METRES.T, np.ascontiguousarray(METRES.T)),
        (npy(METRES), METRES),
    ]
    empty = (np.zeros((1, 1), np.uint16), np.zeros((1, 1), np.uint16))
    maximum = (DepthField(max_pixels=60), PNG)
    past_maximum = (DepthField(max_pixels=59), PNG)
    wrong_types = ["path.png", [1, 2], 5, MM.astype(np.float64), MM.astype(np.int16), MM > 3]
    wrong_shapes = [
        MM[np.newaxis],
        MM[0],
        MM[:0],
        b"",
        b"no image",
        PNG[:20],
        npy(MM.astype(np.int32)),
        npy(MM)[:-1],
        image_file(Image.fromarray(MM.astype(np.uint8)), "PNG"),
        image_file(Image.fromarray(picture()), "PNG"),
        image_file(Image.fromarray(picture()), "JPEG"),
        tiff(MM.astype(np.int16)),
        tiff(MM.astype(np.uint32)),
        tiff(MM.astype(np.int32)),
        tiff(METRES.astype(np.float64)),
        tiff(METRES.astype(np.float16)),
        tiff(MM.astype(np.uint8)),
        tiff(np.stack([MM, MM])),
        tiff(np.stack([MM, MM, MM], axis=2), photometric="rgb"),
        tiff(MM, photometric="miniswhite"),
        tiff(MM, extratags=[(274, 3, 1, 6, True)]),
    ]
    bad_configs = [
        {"encoding": "jpeg"},
        {"encoding": "png", "dtype": "float32"},
        {"dtype": "float64"},
        {"size": [4]},
        {"size": [0, 4]},
        {"size": [8, 8], "max_pixels": 63},
        {"decoded": "feet"},
        {"decoded": "metres"},
        {"metres_per_step": 0},
        {"metres_per_step": float("nan")},
        {"metres_per_step": True},
        {"invalid": -1},
        {"invalid": 65_536},
        {"invalid": 5, "dtype": "float32"},
        {"max_pixels": 0},
    ]


MAPS = st.sampled_from([np.dtype("uint16"), np.dtype("float32")]).flatmap(
    lambda dtype: hnp.arrays(np.dtype(f"u{dtype.itemsize}"), hnp.array_shapes(min_dims=2, max_dims=2, max_side=9)).map(
        lambda bits: bits.view(dtype)
    )
)


@given(MAPS, st.sampled_from(["keep", "png", "raw", "zstd"]))
@settings(deadline=None, max_examples=100)
def test_maps_round_trip_to_the_bit(values, encoding):
    """Every bit pattern of uint16 and float32, NaNs with their payloads too, comes back from every encoding."""
    field = DepthField(encoding=encoding)
    if encoding == "png" and values.dtype.kind == "f":
        with pytest.raises(EncodeError, match="uint16 for PNG"):
            field.encode(values)
        with pytest.raises(EncodeError, match="uint16 for PNG"):
            field.check(values)
        return
    found = field.decode(*field.encode(values))
    assert found.dtype == values.dtype
    assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize("values", [MM, METRES], ids=["uint16", "float32"])
@pytest.mark.parametrize("compression", [None, "zlib", "lzw"])
@pytest.mark.parametrize(
    "options", [{}, {"byteorder": ">"}, {"tile": (16, 16)}, {"bigtiff": True}, {"predictor": True}]
)
def test_tiffs_of_every_layout_are_kept_and_exact(values, compression, options):
    """TIFFs in strips or tiles, of either byte order, compressed or not, are kept and decode to the bit."""
    if "predictor" in options and compression is None:
        options = {}
    data = tiff(values, compression=compression, **options)
    field = DepthField()
    if values.dtype.kind == "f" and compression and "byteorder" in options:  # what Pillow reads in the wrong order
        with pytest.raises(EncodeError, match="big-endian"):
            field.encode(data)
        with pytest.raises(FormatError, match="dtype"):
            field.decode(record(6, 10, 2, 2), data)
        return
    encoded = field.encode(data)
    assert encoded.data == data
    assert field.decode(*encoded).tobytes() == values.tobytes()
    again = DepthField(encoding="raw")
    assert bytes(again.encode(data).data) == values.tobytes()
    for broken in list(damaged(*map(bytes, encoded)))[::7]:
        try:
            field.decode(*broken)
        except FormatError as error:
            assert error.path == "<payload>"  # noqa: PT017  # the bytes may also be valid


def test_what_is_kept_and_what_is_reencoded():
    """Files are stored byte for byte unless another encoding is asked for; arrays by their dtype."""
    assert DepthField().encode(PNG).data == PNG
    assert DepthField(encoding="png").encode(PNG).data == PNG
    assert [DepthField().encode(value).metadata[8] for value in (PNG, FLOAT_TIFF, MM, METRES)] == [1, 2, 1, 4]
    assert [DepthField(encoding="zstd").encode(value).metadata[8] for value in (PNG, FLOAT_TIFF, MM)] == [4, 4, 4]
    assert DepthField(encoding="png").encode(tiff(MM)).data == DepthField().encode(MM).data
    with pytest.raises(EncodeError, match="cannot be decoded"):
        DepthField(encoding="raw").encode(PNG[:-30])


def test_raw_maps_are_views():
    """What is stored raw is read without a copy, and cannot be written to."""
    metadata, data = DepthField(encoding="raw").encode(METRES)
    found = DepthField().decode(metadata, data)
    assert np.shares_memory(found, np.frombuffer(data, np.uint8))
    assert not found.flags.writeable


def test_metres():
    """Steps become metres, and 0 and the invalid step stay 0; floats are scaled too, and keep their NaN."""
    steps = np.array([[0, 1, 1500, 65_535]], np.uint16)
    field = DepthField(metres_per_step=0.001, decoded="metres")
    found = field.decode(*field.encode(steps))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[0, 0.001, 1.5, 65.535]], rtol=1e-6)
    field = DepthField(metres_per_step=0.001, decoded="metres", invalid=65_535)
    np.testing.assert_allclose(field.decode(*field.encode(steps)), [[0, 0.001, 1.5, 0]], rtol=1e-6)
    floats = np.array([[np.nan, 0, 2.5]], np.float32)
    np.testing.assert_allclose(field.decode(*field.encode(floats)), [[np.nan, 0, 0.0025]], rtol=1e-6)


@pytest.mark.parametrize("options", [{"dtype": "uint16"}, {"metres_per_step": 0.001, "decoded": "metres"}])
def test_a_batch_of_one_size_is_one_array(options):
    """With a fixed size, a batch decodes into one array that may be given, absent rows zero."""
    field = DepthField(size=(6, 10), **options)
    payloads = [field.encode(PNG), None, DepthField(encoding="raw").encode(MM)]
    records = np.frombuffer(b"".join(p.metadata if p else bytes(16) for p in payloads), np.uint8).reshape(3, 16)
    out = np.full((3, 6, 10), 7, field.value_layout.dtype)
    found, present = field.decode_batch(records, [p and p.data for p in payloads], out=out)
    assert found is out
    assert present.tolist() == [True, False, True]
    expected = MM if field.decoded == "stored" else MM * np.float32(0.001)
    assert (found[1] == 0).all()
    for row in (0, 2):
        np.testing.assert_array_equal(found[row], expected)


def test_another_size_or_dtype_is_refused_not_made_to_fit():
    """Maps of another size or dtype than the field's are refused both ways; nothing is resized or cast."""
    for value in (MM[:, :9], tiff(MM[:, :9])):
        with pytest.raises(EncodeError, match="nothing is resized"):
            DepthField(size=(6, 10)).encode(value)
    for value in (METRES, FLOAT_TIFF):
        with pytest.raises(EncodeError, match="nothing is cast"):
            DepthField(dtype="uint16").encode(value)
    with pytest.raises(FormatError, match="size"):
        DepthField(size=(6, 10)).decode(*DepthField().encode(MM[:, :9]))
    with pytest.raises(FormatError, match="dtype"):
        DepthField(dtype="uint16").decode(*DepthField().encode(METRES))


def record(height: int, width: int, codec: int, dtype: int) -> bytes:
    return struct.pack("<IIBB6x", height, width, codec, dtype)


def test_huge_claims_allocate_nothing():
    """A header or a frame that claims more than the record or the limit is refused before it is decoded."""
    field = DepthField()
    with pytest.raises(LimitError, match=r"too large .* \(max_pixels\)"):
        field.decode(record(2**32 - 1, 2**32 - 1, 3, 1), b"")
    bomb = zstandard.compress(bytes(50_000_000))
    with pytest.raises(FormatError, match="not as long"):
        field.decode(record(6, 10, 4, 1), bomb)
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 16, 0, 0, 0, 0)
    png = PNG[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + PNG[33:]
    with pytest.raises(EncodeError, match="max_pixels"):
        field.encode(png)
    with pytest.raises(FormatError, match="size in its record"):
        field.decode(record(6, 10, 1, 1), png)
    tile = tiff(np.zeros((16, 16), np.float32), tile=(16, 16), compression="zlib")
    huge = tile
    for tag in (322, 323):  # a tile's sides, uint32
        assert huge.count(struct.pack("<HHII", tag, 4, 1, 16)) == 1
        huge = huge.replace(struct.pack("<HHII", tag, 4, 1, 16), struct.pack("<HHII", tag, 4, 1, 65_520))
    with pytest.raises(EncodeError, match="has tiles of"):
        field.encode(huge)
    with pytest.raises(FormatError, match="has tiles of"):
        field.decode(record(16, 16, 2, 2), huge)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(MM.tobytes())
    with pytest.raises(FormatError):
        field.decode(record(6, 10, 4, 1), unsized)


def test_a_file_of_another_kind_is_never_opened():
    """The record's codec decides the decoder, and a picture in the place of a map is damage."""
    grey = image_file(Image.fromarray(MM.astype(np.uint8)), "PNG")
    for codec, data in (
        (1, grey),
        (1, FLOAT_TIFF),
        (2, PNG),
        (2, tiff(METRES)),
        (1, image_file(picture_image(), "GIF")),
    ):
        with pytest.raises(FormatError):
            DepthField().decode(record(6, 10, codec, 1), data)


def picture_image() -> Image.Image:
    return Image.fromarray(picture(6, 10))


def test_real_depth_maps(shared_data, members_of):
    """The depth maps of the sample corpora are kept byte for byte and decode to their millimetres."""
    count = 0
    field = DepthField(dtype="uint16", size=(480, 640), metres_per_step=0.001, decoded="metres")
    for name, data in members_of(shared_data, (".depth.png",)):
        count += 1
        encoded = field.encode(data)
        assert encoded.data == data
        expected = tifffile.imread(io.BytesIO(tiff(np.asarray(Image.open(io.BytesIO(data))))))
        stored = DepthField().decode(*encoded)
        np.testing.assert_array_equal(stored, expected)
        assert 500 < int(stored.max()) < 10_000, name
        np.testing.assert_allclose(field.decode(*encoded), expected / 1000, rtol=1e-6)
    assert count == 8
