"""Tests of arrays as files: sizes that follow from type and shape, and contents that other libraries read."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from mm_assets.sources.arrays import is_picture, npy_bytes, npy_size, png_bytes, png_size

NUMBERS = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(),
    arrays.floating_dtypes(sizes=(16, 32, 64)),
    arrays.complex_number_dtypes(),
)
SHAPES = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
)


@given(arrays.arrays(NUMBERS, arrays.array_shapes(min_dims=0, min_side=0)))
def test_numbers_come_back(array: np.ndarray) -> None:
    """NumPy reads what was written, in any byte order, and its size was known before."""
    content = npy_bytes(array)
    assert len(content) == npy_size(array.dtype, array.shape)
    np.testing.assert_array_equal(np.load(io.BytesIO(content)), array)


@pytest.mark.parametrize("dtype", ["O", "U3", "V4", "M8[s]"])
def test_what_is_not_a_number_is_refused(dtype: str) -> None:
    """Objects, texts, structures and times are not NPY of numbers."""
    with pytest.raises(ValueError, match="expected numbers"):
        npy_size(np.dtype(dtype), (1,))


@given(SHAPES.flatmap(lambda shape: arrays.arrays(st.sampled_from(["u1", "<u2", ">u2"]), shape)))
def test_pictures_come_back(picture: np.ndarray) -> None:
    """OpenCV reads the pixels that were written, of 8 and 16 bits, and the size was known before."""
    content = png_bytes(picture)
    assert len(content) == png_size(picture.dtype, picture.shape)
    assert is_picture(picture.dtype, picture.shape)
    channels = picture.shape[2] if picture.ndim == 3 else 1
    if channels == 2:  # which OpenCV does not have
        assert Image.open(io.BytesIO(content)).size == picture.shape[1::-1]
        return
    decoded = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED).reshape(*picture.shape[:2], channels)
    decoded = decoded[..., {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[channels]]
    np.testing.assert_array_equal(decoded.reshape(picture.shape), picture)


def test_a_large_picture_has_many_blocks() -> None:
    """A picture of more bytes than a block of Deflate holds is whole."""
    picture = np.random.default_rng(0).integers(0, 255, (300, 400, 3)).astype(np.uint8)
    content = png_bytes(picture)
    assert len(content) == png_size(picture.dtype, picture.shape)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), picture)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("u1", (4,)),
        ("u1", (0, 4)),
        ("u1", (4, 4, 5)),
        ("i2", (4, 4)),
        ("u4", (4, 4)),
        ("f4", (4, 4)),
        ("u1", (1 << 17, 1)),
    ],
)
def test_other_arrays_are_no_pictures(dtype: str, shape: tuple[int, ...]) -> None:
    """Other types, shapes and sizes are not written as PNG."""
    assert not is_picture(np.dtype(dtype), shape)
