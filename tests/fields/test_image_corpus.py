"""Images of all formats, whole and damaged: each decodes to what Pillow gives, or is refused with a reason."""

import io
import re
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields import ImageField

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
