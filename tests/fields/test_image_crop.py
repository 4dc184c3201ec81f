"""Random crops: which rectangle is drawn, what is decoded of it, and that a loader draws another one in each epoch."""

import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mm_assets
from mm_assets import ConfigError, MultimodalLoader
from mm_assets.fields import ImageField, ImageTextPairField
from mm_assets.fields.image_crop import RandomCrop

CROP = {"scale": (0.35, 1), "ratio": (0.75, 1.33), "flip": True}
KEYS = st.integers(0, 2**64 - 1)
PARTS = st.floats(0.01, 1)
EXPECTED = [((40, 32, 439, 334), False), ((25, 37, 424, 556), False), ((8, 49, 447, 577), False)]


def photograph(height: int = 90, width: int = 130, kind: str = "png", **options: Any) -> bytes:
    """An image each of whose pixels differs from its neighbors, smoothly."""
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) * 255 // (height + width)], 2)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, kind, **options)
    return file.getvalue()


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.tuples(PARTS, PARTS), st.tuples(st.floats(0.1, 9), PARTS), KEYS)
def test_a_crop_lies_in_the_image(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], key: int
) -> None:
    """Whatever the image: the rectangle has pixels, all inside, and area and ratio in range if those fit to a pixel."""
    scale, ratio = (min(scale), max(scale)), (min(ratio), max(ratio))
    box, _ = RandomCrop(scale, ratio).draw((height, width), key)
    assert 0 <= box.top <= box.top + box.height <= height
    assert 0 <= box.left <= box.left + box.width <= width
    assert min(box.height, box.width) >= 1
    assert RandomCrop(scale, ratio).draw((height, width), key)[0] == box
    if min(box.height, box.width) > 100:
        assert 0.95 * ratio[0] <= box.width / box.height <= 1.05 * ratio[1]


def test_crops_are_distributed_as_stated() -> None:
    """Areas are uniform, logarithms of ratios too, every place is as likely, and half of the crops are mirrored."""
    crop = RandomCrop((0.1, 0.3), (0.5, 2.0), True)
    drawn = [crop.draw((1000, 1000), key) for key in range(20_000)]
    areas = np.array([box.height * box.width / 1e6 for box, _ in drawn])
    ratios = np.array([math.log2(box.width / box.height) for box, _ in drawn])
    places = np.array([box.top / (1000 - box.height) for box, _ in drawn])
    for values, low, high in ((areas, 0.1, 0.3), (ratios, -1, 1), (places, 0, 1)):
        counts, _ = np.histogram(values, bins=20, range=(low - 0.001, high + 0.001))
        assert abs(counts - 1000).max() < 150  # five standard deviations
    assert abs(sum(mirrored for _, mirrored in drawn) - 10_000) < 350


def test_crops_are_what_they_were() -> None:
    """Fixed keys give these rectangles on every machine and in every release."""
    assert [RandomCrop().draw((480, 640), key) for key in (0, 1, 2**64 - 1)] == EXPECTED


def test_an_image_without_a_crop_that_fits_is_cut_in_its_center() -> None:
    """Of a panorama the largest centered rectangle with an allowed ratio is shown."""
    assert RandomCrop((1.0, 1.0), (0.5, 2.0)).draw((10, 1000), 5)[0] == (0, 490, 10, 20)
    assert RandomCrop((1.0, 1.0), (0.5, 2.0)).draw((1000, 10), 5)[0] == (490, 0, 20, 10)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("orientation", [1, 2, 5, 6])
def test_a_crop_is_decoded_where_it_was_drawn(kind: str, mode: str, orientation: int) -> None:
    """The pixels are those of the rectangle of the upright image, mirrored if that was drawn, whatever the file."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = photograph(180, 260, kind, exif=exif.tobytes(), **({"quality": 98} if kind == "jpeg" else {}))
    size = (32, 40)
    field = ImageField(channels=3, decode_size=size, decode_mode=mode, decode_crop=RandomCrop.parse(CROP))
    upright = Image.fromarray(ImageField(channels=3).decode(*field.encode(data)))
    record = np.frombuffer(field.encode(data).metadata, np.uint8)[None]
    for key in range(8):
        values, present = field.decode_batch(record, [data], keys=np.array([key], np.uint64))
        box, is_mirrored = RandomCrop.parse(CROP).draw((upright.height, upright.width), key)
        region = (box.left, box.top, box.left + box.width, box.top + box.height)
        expected = np.asarray(upright.resize(size[::-1], Image.Resampling.BOX, region)).astype(int)
        found = values[0].astype(int)
        assert present.all()
        assert abs(found - (expected[:, ::-1] if is_mirrored else expected)).max() <= 12


def test_a_reader_without_keys_shows_the_center() -> None:
    """A sample that is read by hand is the centered crop, always the same."""
    data = photograph()
    plain = ImageField(channels=3, decode_size=(20, 20), decode_resize="crop")
    field = ImageField(channels=3, decode_size=(20, 20), decode_crop=RandomCrop.parse(CROP))
    np.testing.assert_array_equal(field.decode(*field.encode(data)), plain.decode(*plain.encode(data)))


def test_the_setting_survives_its_configuration() -> None:
    """A field is restored from its configuration, and one without the setting has the configuration of before."""
    field = ImageField(decode_size=(5, 5), decode_crop=RandomCrop((0.5, 1.0), (0.9, 1.1), False))
    assert ImageField.from_config(field.config) == field
    assert "decode_crop" not in ImageField(decode_size=(5, 5)).config


@pytest.mark.parametrize(
    "crop",
    [
        {"scale": (0.5, 0.4)},
        {"scale": (0, 1)},
        {"scale": (0.5, 1.1)},
        {"ratio": (0.5,)},
        {"ratio": 1},
        {"flip": 1},
        {"zoom": 2},
        {"scale": (True, 1)},
        "random",
        0.5,
        [1],
    ],
)
@pytest.mark.parametrize("kind", [ImageField, ImageTextPairField])
def test_wrong_crops_are_refused(kind: Any, crop: Any) -> None:
    """A crop of other names or numbers is a `ConfigError` with an example."""
    with pytest.raises(ConfigError, match=r"decode_crop: found .*expected \{'scale': "):
        kind(decode_size=(5, 5), decode_crop=crop)


@pytest.mark.parametrize("settings", [{}, {"decode_size": (5, 5), "decode_resize": "pad"}])
def test_a_crop_that_would_do_nothing_is_refused(settings: dict[str, Any]) -> None:
    """Without a size, or with another way to it, the setting is refused."""
    with pytest.raises(ConfigError, match="decode_crop"):
        ImageField(**settings, decode_crop=RandomCrop())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> mm_assets.Dataset:
    path = tmp_path_factory.mktemp("crop") / "a.mult"
    fields = {"image": ImageField(), "pair": ImageTextPairField(tokenizer=None)}
    with mm_assets.create(path, fields) as writer:
        for number in range(12):
            image = photograph(60 + number, 90)
            absent = number % 5 == 4
            writer.write(str(number), {"image": None if absent else image, "pair": (image, f"text {number}")})
    return mm_assets.open(path)


@pytest.mark.parametrize("channels", [3, None])
def test_a_loader_draws_crops(data: mm_assets.Dataset, channels: int | None) -> None:
    """What is drawn follows from seed, epoch and sample, whatever batch and threads, and differs in the next epoch."""
    settings = {"decode_size": [24, 24], "channels": channels, "decode_crop": CROP}
    view = data.with_settings({"image": settings, "pair": {**settings, "decode_crop": {**CROP, "flip": False}}})

    def images(epoch: int, **options: Any) -> dict[int, tuple[bytes, bytes]]:
        loader = MultimodalLoader(view, seed=3, **options)
        loader.set_epoch(epoch)
        found = {}
        for batch in loader:
            for row, index in enumerate(batch["index"].tolist()):
                image = batch["image"][row]
                pair = batch["pair"]["image"][row] if channels else batch["pair"][row].image
                found[index] = (b"" if image is None else np.asarray(image).tobytes(), np.asarray(pair).tobytes())
        return found

    first = images(0, batch_size=5, num_workers=3)
    assert images(0, batch_size=4, num_workers=0) == first
    assert all(one != other for one, other in zip(first.values(), images(1).values(), strict=True))
    center = view.read_batch(range(12), ["image"])["image"]
    assert center.present.tolist() == [number % 5 != 4 for number in range(12)]
    same = sum(np.asarray(center.values[index]).tobytes() == first[index][0] for index in range(12) if index % 5 != 4)
    assert same == 0
