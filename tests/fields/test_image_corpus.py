"""Images of all formats, whole and damaged: each decodes to what Pillow gives, or is refused with a reason."""

import io
import itertools
import re
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields import ImageField
from mm_assets.media.header import HeaderReader
from mm_assets.media.image_blocks import gif_blocks

from .image_corpus import DAMAGES, corpus

AS_STORED = ImageField(orientation="keep", icc="keep")
KINDS = sorted(corpus())
# What a refusal may say: what is missing, what does not fit, or what the decoder said.
REASON = re.compile(
    r"is truncated|is damaged|has frames of two sizes|size in its record|cannot be decoded: \w+|has tiles of|"
    r"header is truncated|is not a readable image|has no|begins with|more than|box"
)


def by_pillow(data, channels):
    """What Pillow decodes, (H, W, channels); None where it refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                if image.mode.startswith("I"):
                    pixels = (np.asarray(image).astype(np.int64).clip(0, 65_535) >> 8).astype(np.uint8)
                    return np.repeat(pixels[:, :, np.newaxis], channels, axis=2)
                return np.asarray(image.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])).reshape(
                    image.height, image.width, channels
                )
    except Exception:  # noqa: BLE001  # Pillow promises no set of errors for damaged files
        return None


def verdict(method, *payload):
    """The value, or the message of a `FormatError`; any other error is the test's failure."""
    try:
        return method(*payload), None
    except FormatError as error:
        return None, f"{error.path}: {error.detail}"


def refusal(data):
    """The error of `encode` for a file that it refuses, else None."""
    try:
        AS_STORED.encode(data)
    except EncodeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_decodes_as_by_pillow_or_is_refused_with_a_reason(kind, capfd):
    """Whole and extended files decode as by Pillow; of damaged ones no pixel is made up, and none is another error.

    `check_decodable` has the verdict of `decode`, `encode` refuses or accepts, and nothing is printed.
    """
    whole = corpus()[kind]
    metadata = AS_STORED.encode(whole).metadata
    expected = AS_STORED.decode(metadata, whole)
    tolerance = 3 if kind.startswith("jpeg") else 0
    for damage, damaging in DAMAGES.items():
        data = damaging(whole)
        pixels, reason = verdict(AS_STORED.decode, metadata, data)
        _, checked = verdict(AS_STORED.check_decodable, metadata, data)
        assert (reason is None) == (checked is None), (damage, reason, checked)
        refused = refusal(data)
        assert refused is None or REASON.search(refused), (damage, refused)
        if pixels is None:
            assert damage not in ("whole", "trailing bytes"), reason
            assert reason.startswith("<payload>: "), reason
            assert REASON.search(reason), (damage, reason)
        elif damage in ("whole", "trailing bytes") or damage.startswith("cut"):
            reference = by_pillow(whole, pixels.shape[2])
            assert np.abs(pixels.astype(int) - reference).max() <= tolerance, damage
            np.testing.assert_array_equal(pixels, expected)
        else:
            assert damage != "empty"
            reference = by_pillow(data, pixels.shape[2])
            assert reference is not None, damage
            assert np.abs(pixels.astype(int) - reference).max() <= tolerance, damage
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out == ""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("tga")])
def test_a_truncated_file_is_never_decoded(kind):
    """A file that lacks its last third is refused, whatever the format; so is one that lacks its last 20 bytes."""
    whole = corpus()[kind]
    metadata = AS_STORED.encode(whole).metadata
    for data in (whole[: len(whole) * 2 // 3], whole[:-20]):
        with pytest.raises(FormatError):
            AS_STORED.decode(metadata, data)


@pytest.mark.fuzz
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_changed_at_random_decode_or_are_refused(data):
    """Whatever bytes of a file are changed, dropped or added: `decode` and `check_decodable` have one verdict."""
    kind = data.draw(st.sampled_from(KINDS))
    whole = corpus()[kind]
    metadata, damaged = AS_STORED.encode(whole).metadata, bytearray(whole)
    places = st.integers(0, len(whole) - 1) | st.integers(0, min(len(whole) - 1, 150))
    for place, removed, added in data.draw(
        st.lists(st.tuples(places, st.integers(0, 12), st.binary(max_size=12)), min_size=1, max_size=4)
    ):
        damaged[place : place + removed] = added
    _, reason = verdict(AS_STORED.decode, metadata, bytes(damaged))
    _, checked = verdict(AS_STORED.check_decodable, metadata, bytes(damaged))
    assert (reason is None) == (checked is None), (kind, reason, checked)
    refusal(bytes(damaged))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("jpeg")])
@pytest.mark.parametrize("num_zeros", [1, 3, 4, 50])
def test_padding_of_a_jpeg_is_no_damage(kind, num_zeros):
    """Zeros before the end marker, as some cameras write them, change no pixel; other bytes there are damage."""
    metadata, whole = AS_STORED.encode(corpus()[kind])
    padded = whole[:-2] + bytes(num_zeros) + whole[-2:]
    np.testing.assert_array_equal(AS_STORED.decode(metadata, padded), AS_STORED.decode(metadata, whole))
    AS_STORED.check_decodable(metadata, padded)
    with pytest.raises(FormatError, match="extraneous bytes"):
        AS_STORED.decode(metadata, whole[:-2] + b"data" * 5 + whole[-2:])


def png_with(name, body):
    """A PNG of the corpus with one more chunk after its header."""
    whole = corpus()["png"]
    chunk = struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return whole[:33] + chunk + whole[33:]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (b"tEXt", b"workflow\0" + b"{}" * (34 << 20)),
        (b"zTXt", b"prompt\0\0" + zlib.compress(b"a cat " * 400_000)),
        (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(b"<x/>" * 500_000)),
        (b"iCCP", b"large\0\0" + zlib.compress(bytes(2 << 20))),
        (b"gAMA", b"\0"),
    ],
)
def test_what_else_a_png_holds_does_not_matter(name, body):
    """A PNG with texts or a profile beyond Pillow's limits, or an ancillary chunk too short, decodes as without it."""
    metadata, data = ImageField().encode(png_with(name, body))
    ImageField().check_decodable(metadata, data)
    np.testing.assert_array_equal(
        ImageField().decode(metadata, data), ImageField().decode(*ImageField().encode(corpus()["png"]))
    )


@pytest.mark.parametrize("num_zeros", [1, 5000])
@pytest.mark.parametrize("kind", ["gif", "gif animated"])
def test_zeros_between_the_blocks_of_a_gif_do_not_matter(kind, num_zeros):
    """A GIF with one terminator too many after each block decodes to every frame, as by Pillow; other bytes do not."""
    whole = corpus()[kind]
    field = ImageField(frames="all")
    expected = field.decode(*field.encode(whole))
    at = [block.start for block in gif_blocks(HeaderReader(whole, "gif"))]
    pieces = [whole[start:end] for start, end in itertools.pairwise([0, *at, len(whole)])]
    padded = bytes(num_zeros).join(pieces)
    metadata, data = field.encode(padded)
    field.check_decodable(metadata, data)
    np.testing.assert_array_equal(field.decode(metadata, data), expected)
    np.testing.assert_array_equal(field.decode(metadata, data)[0], by_pillow(padded, expected.shape[-1]))
    with pytest.raises(FormatError, match="found byte 0x7f"):
        field.decode(metadata, b"\x7f".join(pieces))
