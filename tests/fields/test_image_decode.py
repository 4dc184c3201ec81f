import io
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import mm_assets
from mm_assets.errors import ConfigError, FormatError, LimitError
from mm_assets.fields import ImageField, ImageTextPairField, SequenceField, image_resize
from mm_assets.fields.image_resize import RESIZES, scratch
from mm_assets.testing import damaged

from .conftest import image_file, picture

MODES = ["exact", "fast"]
PHOTO = picture(97, 131)
JPEG = image_file(Image.fromarray(PHOTO), "JPEG", quality=98, subsampling=0)


def jpeg(pixels: np.ndarray, **options: object) -> bytes:
    """Almost the pixels, as a JPEG."""
    return image_file(Image.fromarray(pixels), "JPEG", **{"quality": 100, "subsampling": 0, **options})


def decoded(data: bytes, **options: object) -> np.ndarray:
    """What a reader with these settings gets of an image file that is kept."""
    return ImageField(**options).decode(*ImageField().encode(data))


def distance(one: np.ndarray, other: np.ndarray) -> int:
    """The largest difference of two images."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other).max())


@pytest.mark.parametrize("size", [(40, 60), (97, 131), (194, 300), (97, 60), (1, 1), (10, 400)])
@pytest.mark.parametrize("data", [JPEG, image_file(Image.fromarray(PHOTO), "PNG")], ids=["jpeg", "png"])
def test_exact_is_what_storing_at_the_size_gives(data, size):
    """Decoding to a size gives, pixel for pixel, what packing without loss at that size would have stored."""
    stored = ImageField(encoding="png", size=size)
    np.testing.assert_array_equal(decoded(data, decode_size=size), stored.decode(*stored.encode(data)))


@pytest.mark.parametrize("policy", RESIZES)
@pytest.mark.parametrize("size", [(40, 60), (60, 40), (200, 200), (1, 30)])
def test_policies_are_those_of_pairs(policy, size):
    """Stretching, cropping and padding while decoding give what an image-text pair stores by the same words."""
    pair = ImageTextPairField(encoding="png", image_size=size, resize=policy, fill=77)
    expected = pair.decode(*pair.encode((JPEG, "text"))).image
    fill = {"decode_fill": 77} if policy == "pad" else {}
    np.testing.assert_array_equal(decoded(JPEG, decode_size=size, decode_resize=policy, **fill), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("policy", RESIZES)
def test_a_batch_is_decoded_into_its_array(mode, channels, policy):
    """With a decode size and channels set, images of any codec and size fill the rows of one given array."""
    field = ImageField(decode_size=(24, 31), decode_resize=policy, decode_mode=mode, channels=channels)
    assert field.value_layout == ((24, 31, channels), np.uint8)
    values = [
        JPEG,
        image_file(Image.fromarray(picture(channels=4)), "PNG"),
        image_file(Image.fromarray(PHOTO).convert("CMYK"), "JPEG"),
        jpeg(picture(24, 31)),
        picture(9, 70),
        image_file(Image.fromarray(picture(200, 10)), "WEBP"),
        jpeg(picture(400, 300)[:, :, 0]),
    ]
    encoded = [ImageField().encode(value) for value in values]
    blank = bytes(field.metadata_type.itemsize)
    joined = b"".join([one.metadata for one in encoded] + [blank])
    records = np.frombuffer(joined, np.uint8).reshape(len(values) + 1, -1)
    out = np.full((len(values) + 1, 24, 31, channels), 9, np.uint8)
    batch, present = field.decode_batch(records, [*(one.data for one in encoded), None], out)
    assert batch is out
    assert present.tolist() == [True] * len(values) + [False]
    assert not batch[-1].any()
    for row, one in zip(batch, encoded, strict=False):
        np.testing.assert_array_equal(row, field.decode(*one))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("policy", RESIZES)
@pytest.mark.parametrize("mode", MODES)
def test_a_rotated_image_is_resized_as_if_it_were_upright(mode, policy, orientation):
    """The decode size is that of the upright image: turning first and resizing then gives the same to a rounding."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    wanted = {"decode_size": (30, 19), "decode_resize": policy, "decode_mode": mode, "orientation": "apply"}
    for codec, options in (("JPEG", {"quality": 100, "subsampling": 0}), ("PNG", {})):
        data = image_file(Image.fromarray(PHOTO), codec, exif=exif, **options)
        with Image.open(io.BytesIO(data)) as image:
            upright = image_file(ImageOps.exif_transpose(image).convert("RGB"), "PNG")
        expected = decoded(upright, decode_size=(30, 19), decode_resize=policy)
        tolerance = 1 if (codec, mode) == ("PNG", "exact") else 6
        assert distance(decoded(data, **wanted), expected) <= tolerance
        as_stored = decoded(data, **{**wanted, "orientation": "keep"})
        unturned = {"decode_size": (30, 19), "decode_resize": policy, "orientation": "keep"}
        assert distance(as_stored, decoded(data, **unturned)) <= tolerance


@given(
    shape=st.tuples(st.integers(24, 170), st.integers(24, 170)),
    size=st.tuples(st.integers(8, 40), st.integers(8, 40)),
    policy=st.sampled_from(["stretch", "crop"]),
    channels=st.sampled_from([1, 3, 4]),
)
@settings(deadline=None, max_examples=200)
def test_fast_shows_the_same_part_of_the_image(shape, size, policy, channels):
    """On slopes, where half a pixel's shift would show, both modes agree within the border, for any sizes."""
    rows, columns = np.mgrid[0 : shape[0], 0 : shape[1]] * 1.5
    slopes = np.stack([(rows + columns) / 2, rows, 255 - columns], axis=2).round().astype(np.uint8)
    wanted = {"decode_size": size, "decode_resize": policy, "channels": channels}
    exact = decoded(jpeg(slopes), **wanted)
    fast = decoded(jpeg(slopes), **wanted, decode_mode="fast")
    assert exact.shape == fast.shape == (*size, channels)
    within = exact.astype(int)[1:-1, 1:-1] - fast[1:-1, 1:-1]
    assert abs(within.mean(axis=(0, 1))).max() <= 1.25


@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    policy=st.sampled_from(RESIZES),
    mode=st.sampled_from(MODES),
    orientation=st.integers(1, 8),
)
@settings(deadline=None, max_examples=200)
def test_any_image_comes_to_any_size(shape, size, policy, mode, orientation):
    """Whatever the sides, an image has the size asked for, its own colour, and bars only where it is padded."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    plain = jpeg(np.full((*shape, 3), 200, np.uint8), exif=exif)
    found = decoded(plain, decode_size=size, decode_resize=policy, decode_mode=mode, orientation="apply")
    assert found.shape == (*size, 3)
    bars = (found == 0).all(axis=2)
    assert np.abs(found[~bars].astype(int) - 200).max() <= 1
    assert policy == "pad" or not bars.any()
    assert not (bars.all(axis=0).any() and bars.all(axis=1).any())  # beside it or above and below it, not both


def test_a_very_wide_image_is_sampled_too():
    """Sides beyond what OpenCV's warping can count are resized all the same."""
    found = decoded(jpeg(np.full((9, 65_500), 90, np.uint8)), decode_size=(2, 16_400), decode_mode="fast")
    assert distance(found, np.full((2, 16_400, 1), 90, np.uint8)) <= 1


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    scale=st.sampled_from([2, 4, 8]),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
@settings(deadline=None, max_examples=200)
def test_libjpeg_gives_the_scale_that_is_meant(shape, scale, size):
    """A JPEG is decoded at the least of 1, 1/2, 1/4 and 1/8 that does not fall below the size, rounded up."""
    data = jpeg(picture(*shape))
    with mock.patch("simplejpeg.decode_jpeg", wraps=simplejpeg.decode_jpeg) as decode:
        decoded(data, decode_size=size, decode_mode="fast")
    (call,) = decode.call_args_list
    divisor = max(s for s in (1, 2, 4, 8) if s == 1 or (shape[0] >= s * size[0] and shape[1] >= s * size[1]))
    assert call.kwargs["buffer"].shape[:2] == tuple(-(-side // divisor) for side in shape)
    pixels = simplejpeg.decode_jpeg(data, min_height=-(-shape[0] // scale), min_width=-(-shape[1] // scale))
    assert pixels.shape[:2] == tuple(-(-side // scale) for side in shape)


def test_exact_decodes_all_of_an_image():
    """The exact mode never takes a part of the size."""
    with mock.patch("simplejpeg.decode_jpeg", wraps=simplejpeg.decode_jpeg) as decode:
        decoded(JPEG, decode_size=(2, 2))
    assert decode.call_args.kwargs["buffer"].shape == (97, 131, 3)
    assert not decode.call_args.kwargs["min_height"]


@pytest.mark.parametrize("mode", MODES)
def test_what_has_the_size_is_not_resized(mode):
    """Images that are stored at the size are decoded straight into the caller's array."""
    stored = ImageField(encoding="jpeg", size=(24, 31), channels=3)
    encoded = stored.encode(PHOTO)
    reader = ImageField(encoding="jpeg", size=(24, 31), channels=3, decode_size=(24, 31), decode_mode=mode)
    out = np.empty((1, 24, 31, 3), np.uint8)
    records = np.frombuffer(encoded.metadata, np.uint8)[None]
    resized = mock.patch("mm_assets.fields.image.resample", side_effect=AssertionError("resized"))
    with resized, mock.patch("simplejpeg.decode_jpeg", wraps=simplejpeg.decode_jpeg) as decode:
        reader.decode_batch(records, [encoded.data], out)
    assert np.shares_memory(decode.call_args.kwargs["buffer"], out)
    np.testing.assert_array_equal(out[0], stored.decode(*encoded))


def test_settings_of_decoding_change_nothing_that_is_stored():
    """Payloads and checks are the same with and without a decode size."""
    reading = {"decode_size": (5, 5), "decode_mode": "fast", "decode_resize": "crop"}
    for options in ({}, {"encoding": "jpeg", "size": (20, 30), "channels": 3}):
        assert ImageField(**options, **reading).encode(JPEG) == ImageField(**options).encode(JPEG)
    ImageField(**reading).check(JPEG)


def test_fields_of_older_files_are_restored():
    """A configuration without these settings is a field that decodes as before."""
    new = ("decode_size", "decode_resize", "decode_fill", "decode_mode")
    older = {key: value for key, value in ImageField(channels=3).config.items() if key not in new}
    assert len(older) == len(ImageField().config) - len(new)
    field = ImageField.from_config(older)
    assert field == ImageField(channels=3)
    assert field.decode(*field.encode(JPEG)).shape == (97, 131, 3)


def test_a_setting_without_a_size_is_refused():
    """A mode or policy that would silently do nothing is refused by name."""
    with pytest.raises(ConfigError, match="without decode_size"):
        ImageField(decode_mode="fast")


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_a_reader_asks_for_its_own_size(tmp_path, form):
    """Files that were packed without these settings give batches of one array to a reader that names a size."""
    fields = {"image": ImageField(), "pages": SequenceField(ImageField())}
    pictures = [jpeg(picture(50 + 9 * k, 120 - 5 * k, seed=k)) for k in range(9)]
    with mm_assets.create(tmp_path / f"x.{form}", fields) as writer:
        for number, data in enumerate(pictures):
            writer.write(str(number), {"image": data, "pages": [(0, data)]})
    wanted = {"decode_size": [16, 20], "decode_mode": "fast", "channels": 3}
    with mm_assets.open(tmp_path / f"x.{form}") as data:
        assert data[1]["image"].shape == (59, 115, 3)
        small = data.with_settings({"image": wanted, "pages": {"inner": wanted}})
        out = small.empty_batch(9, ["image"])
        batch = small.read_batch(range(9), ["image"], out=out, threads=2)["image"].values
        assert np.shares_memory(batch, out["image"])
        for row, stored in zip(batch, pictures, strict=True):
            np.testing.assert_array_equal(row, decoded(stored, decode_size=(16, 20), decode_mode="fast", channels=3))
        assert small[3]["pages"][0][1].shape == (16, 20, 3)
        small.close()


# --- memory and damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("codec", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_damage_is_noticed_or_harmless(mode, codec):
    """Truncated, extended, or with any byte flipped, an image decodes to the size or raises FormatError."""
    field = ImageField(decode_size=(4, 5), decode_mode=mode, decode_resize="crop", orientation="apply")
    metadata, data = ImageField().encode(image_file(Image.fromarray(picture(33, 47)), codec))
    for broken in damaged(bytes(metadata), bytes(data)):
        try:
            assert field.decode(*broken).shape[:2] == (4, 5)
        except FormatError as error:
            assert error.path == "<payload>"  # noqa: PT017  # the bytes may also be valid


@pytest.mark.parametrize("mode", MODES)
def test_a_bomb_is_refused_before_memory_is_taken(mode):
    """Neither a large image nor a record that promises one gets memory that the limit or the file denies."""
    small = ImageField(decode_size=(4, 4), decode_mode=mode, max_pixels=10_000)
    taken = mock.patch("mm_assets.fields.image.scratch", side_effect=AssertionError("taken"))
    with taken, pytest.raises(LimitError, match="too large"):
        small.decode(*ImageField().encode(JPEG))
    liar = np.frombuffer(ImageField().encode(JPEG).metadata, ImageField().metadata_type).copy()
    liar["height"], liar["width"] = 13_000, 13_000
    with taken, pytest.raises(FormatError, match="size in its record"):
        ImageField(decode_size=(4, 4), decode_mode=mode).decode(liar.tobytes(), JPEG)


def test_images_do_not_share_memory():
    """A returned image does not change when the same thread decodes the next one."""
    field = ImageField(decode_size=(20, 20))
    first = field.decode(*field.encode(JPEG))
    kept = first.copy()
    field.decode(*field.encode(jpeg(255 - PHOTO)))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("mode", MODES)
def test_threads_do_not_share_memory(mode):
    """Images that four threads decode at a time are those that one decodes."""
    field = ImageField(decode_size=(30, 30), decode_mode=mode)
    encoded = [field.encode(jpeg(picture(60 + k, 90 - k, seed=k))) for k in range(24)]
    alone = [field.decode(*one) for one in encoded]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(lambda one: field.decode(*one), encoded), alone, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_thread_releases_large_memory():
    """A thread reuses its buffers for the next image up to a limit, and releases larger ones."""
    with mock.patch("mm_assets.fields.image_resize.MAX_SCRATCH_BYTES", 1000):
        first, second = scratch("test", (10, 10, 3)), scratch("test", (5, 5, 3))
        assert np.shares_memory(first, second)
        assert not np.shares_memory(first, scratch("other use", (5, 5, 3)))
        large = scratch("test", (20, 20, 3))
        assert large.shape == (20, 20, 3)
        assert not np.shares_memory(large, scratch("test", (20, 20, 3)))
        assert scratch("test", (10, 10, 10)).base.nbytes == 1000


def test_fast_is_close_on_photographs(shared_data, members_of):
    """On real photographs the fast mode differs from the exact one by no more than docs/spec/fields.md says."""
    photos = [data for name, data in members_of(shared_data, (".jpg",)) if name.startswith("image-text")]
    found = []
    for data in photos:
        exact = decoded(data, decode_size=(224, 224)).astype(float)
        error = np.mean((exact - decoded(data, decode_size=(224, 224), decode_mode="fast")) ** 2)
        found.append(10 * np.log10(255**2 / error))
    assert len(found) >= 40
    assert np.median(found) >= 42
    assert min(found) >= 29


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_palettes_with_alpha_decode_to_any_channels(channels, mode):
    """A palette with partly transparent entries decodes quietly to its colours, with alpha where that is asked for."""
    image = Image.fromarray((np.arange(64) % 4).reshape(8, 8).astype(np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    target = io.BytesIO()
    image.save(target, "PNG", transparency=bytes([0, 128, 255, 255]))
    field = ImageField(channels=channels)
    found = field.decode(*field.encode(target.getvalue()))
    with Image.open(io.BytesIO(target.getvalue())) as again:
        expected = np.asarray(again.convert("RGBA").convert(mode))
    np.testing.assert_array_equal(found, expected.reshape(8, 8, channels))


@pytest.fixture
def without_opencv(monkeypatch):
    """As in an environment with the reader's wheel alone."""
    monkeypatch.setitem(sys.modules, "cv2", None)
    image_resize._opencv.cache_clear()
    yield
    image_resize._opencv.cache_clear()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", RESIZES)
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pillow_resizes_where_there_is_no_opencv(mode, policy, orientation, channels, request):
    """Without OpenCV an image comes to the same size, the same part of it, and nearly the same pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = image_file(Image.fromarray(PHOTO), "JPEG", exif=exif, quality=95)
    sizes = ((24, 31), (50, 10), (150, 200))
    settings = {"decode_resize": policy, "channels": channels, "orientation": "apply"}
    expected = [decoded(data, decode_size=size, **settings) for size in sizes]
    request.getfixturevalue("without_opencv")
    for size, pixels in zip(sizes, expected, strict=True):
        found = decoded(data, decode_size=size, decode_mode=mode, **settings)
        assert found.shape == pixels.shape
        assert np.abs(found.astype(int) - pixels).mean() < 3


@pytest.mark.usefixtures("without_opencv")
def test_pillow_does_not_weigh_colours_by_alpha():
    """Without OpenCV too each channel is resized by itself: transparent pixels keep their colour."""
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:, ::2, 0] = 200
    pixels[:, 1::2, 3] = 255
    shrunk = image_resize.resize(pixels, (4, 4))
    np.testing.assert_allclose(shrunk[:, 1:-1, [0, 3]].mean((0, 1)), [100, 127.5], atol=20)
