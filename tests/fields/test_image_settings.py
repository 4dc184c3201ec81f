"""What an image decodes to: turned, converted, all frames; what is taken as an image; what earlier releases meant."""

import base64
import io
import logging
import struct
import sys
import threading
import warnings
import zlib
from unittest import mock

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageCms, ImageOps

import mm_assets
from mm_assets.errors import ConfigError, EncodeError, FormatError, LimitError, MissingExtraError
from mm_assets.fields import DocumentField, ImageField, ImageTextPairField, SequenceField, field_from_config
from mm_assets.fields.image_color import conversion_of
from mm_assets.fields.image_pillow import _opener

from .conftest import image_file, picture
from .image_corpus import corpus

COLOUR = picture(24, 40)
TURNED_JXL = base64.b64decode(
    "AAAADEpYTCANCocKAAAAFGZ0eXBqeGwgAAAAAGp4bCAAAAAyanhsY/8KCEALBBSXBAgCAQBsAEsYixXCUSegPoBY/NtWaOnnv8Ux8Nev1DZGlg=="
)  # 2 x 3 pixels, orientation 6: red, black, green above blue, black, black


def decoded(field, value):
    return field.decode(*field.encode(value))


def in_colours(kind, tags):
    """A profile of a kind of colours with these tags."""
    body, table = b"", b""
    start = 132 + 12 * len(tags)
    for name, value in tags.items():
        table += struct.pack(">4sII", name, start + len(body), len(value))
        body += value
    head = struct.pack(">I4xI4s4s4s", start + len(body), 0x02100000, b"mntr", kind, b"XYZ ")
    head += bytes(12) + b"acsp" + bytes(28) + struct.pack(">III", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


LINEAR_GREY = in_colours(
    b"GRAY",
    {b"wtpt": b"XYZ " + struct.pack(">IIII", 0, 63190, 65536, 54061), b"kTRC": b"curv" + bytes(8)},
)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SWAPPED = SRGB.replace(b"rXYZ", b"????", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"????", b"gXYZ", 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("codec", ["AVIF", "HEIF"])
def test_the_container_s_own_turns_are_applied_once(codec, orientation):
    """AVIF and HEIC decode upright, or as stored where that is kept, for each turn and mirror."""
    corpus()  # registers the plug-ins
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(COLOUR)
    image.info["exif"] = exif.tobytes()
    data = image_file(image, codec, exif=exif.tobytes(), quality=95)
    if codec == "HEIF":
        image.info["exif"] = exif.tobytes()
        data = image_file(image, codec, quality=95)
    with Image.open(io.BytesIO(image_file(Image.fromarray(COLOUR), "PNG", exif=exif))) as upright:
        expected = np.asarray(ImageOps.exif_transpose(upright))
    field = ImageField()
    found, stored = decoded(field, data), decoded(ImageField(orientation="keep"), data)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 3
    assert np.abs(stored.astype(int) - COLOUR).mean() < 3
    assert np.frombuffer(field.encode(data).metadata, field.metadata_type)["orientation"] == orientation


def test_a_jpeg_xl_is_turned_once():
    """JPEG XL decodes upright, which its decoder does itself, and as stored where that is kept."""
    pytest.importorskip("pillow_jxl", reason="the images-extra extra is not installed")
    red, black, green, blue = [255, 0, 0], [0, 0, 0], [0, 255, 0], [0, 0, 255]
    stored = decoded(ImageField(orientation="keep"), TURNED_JXL)
    assert stored.tolist() == [[red, black, green], [blue, black, black]]
    assert decoded(ImageField(), TURNED_JXL).tolist() == [[blue, red], [black, black], [black, green]]


@pytest.mark.parametrize("codec", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_colours_of_a_profile_become_srgb(codec):
    """A profile with red and green swapped swaps them in what is decoded; sRGB, or keeping, changes nothing."""
    options = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}.get(codec, {"quality": 100})
    image = Image.fromarray(COLOUR)
    plain = decoded(ImageField(), image_file(image, codec, **options))
    data = image_file(image, codec, icc_profile=SWAPPED, **options)
    converted = decoded(ImageField(), data)
    assert np.abs(converted.astype(int) - plain[:, :, [1, 0, 2]]).max() <= 3
    np.testing.assert_array_equal(decoded(ImageField(icc="keep"), data), plain)
    np.testing.assert_array_equal(decoded(ImageField(), image_file(image, codec, icc_profile=SRGB, **options)), plain)
    stored_anew = decoded(ImageField(encoding="png"), data)
    np.testing.assert_array_equal(stored_anew, converted)
    small = decoded(ImageField(decode_size=(12, 20), decode_mode="fast"), data)
    assert np.abs(small.astype(int)[:, :, 0].mean() - converted[:, :, 0].mean()) < 3
    grey = decoded(ImageField(channels=1), data)
    expected = np.asarray(Image.fromarray(converted).convert("L"))
    assert np.abs(grey[:, :, 0].astype(int) - expected).max() <= 1


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("codec", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_a_profile_gives_the_same_pixels_however_they_are_read(tmp_path, codec, channels):
    """Converted pixels are equal alone, in batches, threads, sequences and the loader, and may be written to."""
    data = image_file(
        Image.fromarray(COLOUR), codec, icc_profile=SWAPPED, **({"quality": 95} if codec == "JPEG" else {})
    )
    field = ImageField(channels=channels, decode_size=COLOUR.shape[:2])
    with mm_assets.create(tmp_path / "x.mult", {"image": field, "images": SequenceField(field)}) as writer:
        for number in range(4):
            writer.write(str(number), {"image": data, "images": [(1, data)]})
    with mm_assets.open(tmp_path / "x.mult") as dataset:
        read = [dataset[1]["image"], dataset[1]["images"][0][1]]
        read += [dataset.read_batch(range(4), ["image"], threads=threads)["image"].values[2] for threads in (0, 3)]
        read.append(next(iter(mm_assets.MultimodalLoader(dataset, ["image"], batch_size=4)))["image"][3])
    expected = ImageField(channels=channels).decode(*ImageField(channels=channels).encode(data))
    for pixels in (*read, expected):
        np.testing.assert_array_equal(pixels, expected)
        assert pixels.flags.writeable


@pytest.mark.parametrize("codec", ["PNG", "JPEG"])
def test_grey_of_a_profile_becomes_srgb(codec):
    """Linear grey becomes lighter, by the curve of sRGB; a profile for RGB does not apply to grey."""
    grey = Image.fromarray(np.full((16, 16), 55, np.uint8))
    data = image_file(grey, codec, icc_profile=LINEAR_GREY)
    assert np.unique(decoded(ImageField(), data)).tolist() == [pytest.approx(128, abs=1)]
    assert np.unique(decoded(ImageField(), image_file(grey, codec, icc_profile=SWAPPED))).tolist() == [55]


@pytest.mark.parametrize("icc", ["convert", "keep"])
def test_lab_becomes_srgb(icc):
    """A TIFF in Lab of 8 bits decodes to the sRGB of CIE's formula (white D50), whatever `icc` says."""
    lab = np.array([[[138, 38, 46], [137, 0, 0], [200, 236, 20], [60, 10, 226]]], np.uint8)  # L of 255, a and b signed
    target = io.BytesIO()
    tifffile.imwrite(target, lab, photometric="cielab")
    lightness, a, b = np.moveaxis(lab.astype(float), -1, 0)
    a, b = (np.where(axis > 127, axis - 256, axis) for axis in (a, b))
    y = (lightness / 2.55 + 16) / 116
    xyz = [np.where(t > 6 / 29, t**3, (t - 4 / 29) * 108 / 841) for t in (y + a / 500, y, y - b / 200)]
    to_linear = [
        [3.1338561, -1.6168667, -0.4906146],
        [-0.9787684, 1.9161415, 0.033454],
        [0.0719453, -0.2289914, 1.4052427],
    ]
    linear = np.clip(np.tensordot(np.array(to_linear) * [0.9642, 1, 0.8249], xyz, 1), 0, 1)
    srgb = 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    field = ImageField(icc=icc)
    field.check_decodable(*field.encode(target.getvalue()))
    found = decoded(field, target.getvalue())
    assert np.abs(found - np.moveaxis(srgb, 0, -1)).max() < 3
    with Image.open(target) as image:
        np.testing.assert_array_equal(decoded(field, image), found)


@pytest.mark.parametrize("codec", ["AVIF", "HEIF"])
def test_colours_of_a_container_become_srgb(codec):
    """AVIF and HEIC without a profile are converted by their numbers: Display P3 is, sRGB and PQ are not."""
    corpus()  # registers the plug-ins
    colours = np.repeat(np.array([[[200, 100, 50], [60, 200, 90], [128, 128, 128]]], np.uint8), 16, 0).repeat(16, 1)
    srgb = image_file(
        Image.fromarray(colours), codec, quality=100, **({"subsampling": "4:4:4"} if codec == "AVIF" else {})
    )
    plain = decoded(ImageField(), srgb).astype(int)

    def marked(primaries, transfer):
        at = srgb.index(b"nclx") + 4
        return srgb[:at] + struct.pack(">HH", primaries, transfer) + srgb[at + 4 :]

    linear = np.where(plain <= 10.31, plain / 255 / 12.92, ((plain / 255 + 0.055) / 1.055) ** 2.4)
    to_srgb = np.array([[1.22494, -0.22494, 0], [-0.042057, 1.042057, 0], [-0.019638, -0.078636, 1.098274]])
    linear = np.clip(linear @ to_srgb.T, 0, 1)
    expected = 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    assert np.abs(expected - plain).max() > 15
    assert np.abs(decoded(ImageField(), marked(12, 13)) - expected).max() <= 2
    for field, data in ((ImageField(icc="keep"), marked(12, 13)), (ImageField(), marked(9, 16))):
        np.testing.assert_array_equal(decoded(field, data), plain)


def test_animations_that_no_decoder_reads_are_not_all_frames():
    """With `frames: all` animated HEIC and JPEG XL are refused by their header; without it they are images."""
    bits = "1" + "00000" + "100" + "0" + "1" + "000" + "0" + "0" + "1" + "00" * 3 + "0" + "0" + "00" + "1" + "00" + "1"
    jxl = b"\xff\x0a" + int(bits[::-1], 2).to_bytes(4, "little") + bytes(8)
    samples = struct.pack(">I4sIII", 20, b"stsz", 0, 0, 3)
    for kind in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        samples = struct.pack(">I4s", 8 + len(samples), kind) + samples
    for data, codec in ((jxl, "jxl"), (corpus()["heic"] + samples, "heic")):
        with pytest.raises(EncodeError, match=f"an animated {codec}, of which only the first frame can be decoded"):
            ImageField(frames="all").encode(data)
        ImageField().check(data)


@pytest.mark.parametrize("profile", [b"no profile", SWAPPED[:200], SWAPPED[:16] + b"Lab " + SWAPPED[20:]])
def test_a_damaged_profile_is_logged_and_not_used(profile, caplog):
    """An image with a damaged profile, or one for other colours, decodes as without; the log says so once."""
    conversion_of.cache_clear()
    data = image_file(Image.fromarray(COLOUR), "PNG", icc_profile=profile)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_array_equal(decoded(ImageField(), data), COLOUR)
    assert len([record for record in caplog.records if "ICC profile" in record.getMessage()]) == 1


@pytest.mark.parametrize("kind", ["gif animated", "png animated", "webp animated", "avif animated"])
def test_all_frames_of_an_animation(kind):
    """With all frames an animation is (T, H, W, C), each frame as by Pillow, and the first as without."""
    data = corpus()[kind]
    field = ImageField(frames="all", channels=3)
    found = decoded(field, data)
    with Image.open(io.BytesIO(data)) as image:
        frames = []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")))
    np.testing.assert_array_equal(found, frames)
    assert len(found) == 4
    np.testing.assert_array_equal(found[0], decoded(ImageField(channels=3), data))
    payload = field.encode(data)
    field.check_decodable(*payload)
    assert decoded(ImageField(frames="all", decode_size=(5, 7)), data).shape[:3] == (4, 5, 7)
    at_most = found.shape[1] * found.shape[2] * 3
    for wrong in (ImageField(frames="all", max_pixels=at_most), ImageField(frames="all", max_pixels=at_most + 5)):
        with pytest.raises(EncodeError, match="in 4 frames"):
            wrong.encode(data)
        with pytest.raises(LimitError, match="too large"):
            wrong.decode(*payload)


def test_all_frames_of_what_has_one_or_damaged_ones():
    """A still image has one frame; pages of two sizes and missing frames are damage."""
    field = ImageField(frames="all")
    np.testing.assert_array_equal(decoded(field, COLOUR), COLOUR[np.newaxis])
    assert field.value_layout is None
    pages = [Image.fromarray(COLOUR), Image.fromarray(COLOUR[:8])]
    two = image_file(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    with pytest.raises(FormatError, match="two sizes"):
        decoded(field, two)
    same = image_file(pages[0], "TIFF", save_all=True, append_images=pages[:1])
    assert decoded(field, same).shape == (2, *COLOUR.shape)
    metadata, data = field.encode(corpus()["gif animated"])
    with pytest.raises(FormatError):
        field.decode(metadata[:12] + struct.pack("<I", 9), data)
    with pytest.raises(ConfigError, match="frames"):
        DocumentField(image=field)


class _Tensor:
    """Has the interface of a tensor: an array on request."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_paths_pillow_images_and_tensors_are_values(tmp_path):
    """The file of a path, a Pillow image of any 8-bit mode and a uint8 tensor are stored as what they show."""
    path = tmp_path / "image.png"
    path.write_bytes(image_file(Image.fromarray(COLOUR), "PNG"))
    field = ImageField()
    assert field.encode(path).data == path.read_bytes()
    np.testing.assert_array_equal(decoded(field, _Tensor(COLOUR)), COLOUR)
    for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "CMYK"):
        image = Image.fromarray(COLOUR).convert("RGBA" if mode == "LA" else "RGB").convert(mode)
        found = decoded(field, image)
        field.check(image)
        wanted = {1: "L", 3: "RGB", 4: "RGBA"}[found.shape[2]]
        np.testing.assert_array_equal(found.squeeze(), np.asarray(image.convert(wanted)).squeeze())
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(io.BytesIO(image_file(Image.fromarray(COLOUR), "PNG", exif=exif))) as image:
        np.testing.assert_array_equal(decoded(field, image), np.rot90(COLOUR, -1))
    chw = _Tensor(COLOUR.transpose(2, 0, 1))
    refused = [tmp_path / "missing.png", str(path), Image.fromarray(COLOUR).convert("F"), chw, _Tensor(COLOUR / 255)]
    for value in refused:
        for method in (field.encode, field.check):
            with pytest.raises(EncodeError):
                method(value)
    with pytest.raises(EncodeError, match="max_pixels"):
        ImageField(max_pixels=50).encode(Image.fromarray(COLOUR))


def test_configurations_of_earlier_releases_mean_what_they_did():
    """`apply_orientation` is read as then, colours are not converted, and a stored configuration is restored alike."""
    earlier = {"encoding": "keep", "apply_orientation": False, "channels": None}
    for given, orientation in ((earlier, "keep"), ({**earlier, "apply_orientation": True}, "apply")):
        for field in (
            ImageField.from_config(given),
            SequenceField.from_config({"inner": {"type": "ImageField", "config": given}}).inner,
            DocumentField.from_config({"image": given}).image,
            field_from_config("ImageField", given, trusted=False),
        ):
            assert (field.orientation, field.icc, field.frames) == (orientation, "keep", "first")
            assert ImageField.from_config(field.config) == field
    pair = {"channels": 3, "max_tokens": 8}
    assert field_from_config("ImageTextPairField", pair, trusted=False).icc == "keep"
    inner = {"type": "ImageTextPairField", "config": pair}
    assert field_from_config("SequenceField", {"inner": inner}, trusted=False).inner.icc == "keep"
    assert ImageTextPairField.from_config(pair).icc == "convert"
    for wrong in ({"apply_orientation": "yes"}, {"apply_orientation": True, "orientation": "keep"}):
        with pytest.raises(ConfigError, match="apply_orientation"):
            ImageField.from_config(wrong)


@pytest.mark.parametrize(("kind", "package"), [("heic", "pillow_heif"), ("jxl", "pillow_jxl")])
def test_a_missing_plug_in_is_named_with_its_extra(kind, package):
    """Without its plug-in an image is still kept; decoding says what to install, not that it is damaged."""
    data = corpus()[kind]
    payload = ImageField().encode(data)
    _opener.cache_clear()
    try:
        gone = {name: None for name in sys.modules if name.split(".")[0] == package}
        with (
            mock.patch.dict(sys.modules, gone),
            pytest.raises(MissingExtraError, match=f"needs {package}, .* pip install"),
        ):
            ImageField().decode(*payload)
    finally:
        _opener.cache_clear()
    ImageField().decode(*payload)


def test_warnings_of_pillow_are_ignored_in_the_decoding_thread_only():
    """While one thread decodes an image that Pillow warns of, another thread still gets the warnings of Pillow."""
    animated = corpus()["png animated"]
    at = animated.index(b"acTL") + 4
    # An animation has at least one frame: of none Pillow warns, and shows the image.
    broken = bytearray(animated)
    broken[at : at + 4] = bytes(4)
    broken[at + 8 : at + 12] = struct.pack(">I", zlib.crc32(broken[at - 4 : at + 8]))
    caught = []

    def warn():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            Image.open(io.BytesIO(bytes(broken))).load()
            caught.extend(found)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ImageField().decode(*ImageField().encode(bytes(broken)))
    thread = threading.Thread(target=warn)
    thread.start()
    thread.join(timeout=120)
    assert [str(one.message) for one in caught] == ["Invalid APNG, will use default PNG image if possible"]
