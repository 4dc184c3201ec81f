import io
import math
import tarfile
import tracemalloc
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import ConfigError
from mm_assets.filters import near_duplicates as near_module
from mm_assets.filters.apply import FilterStream
from mm_assets.filters.near_duplicates import HammingIndex
from mm_assets.filters.perceptual_hash import hash_of_luma, perceptual_hash
from mm_assets.filters.registry import build_annotator, build_filter
from mm_assets.rows.schema import DatasetSchema


def _picture(seed: int, width: int = 160, height: int = 120) -> np.ndarray:
    """A picture of its own for each seed: coarse coloured noise, smoothly enlarged, (height, width, 3) uint8."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def _bytes(pixels: np.ndarray, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def _resized(pixels: np.ndarray, factor: float) -> np.ndarray:
    height, width = pixels.shape[:2]
    size = (round(width * factor), round(height * factor))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def _judge(tables: Iterable[pa.Table], **config: object) -> list[tuple[str, int, str, float | None]]:
    """What the filter drops of content: (sample, position, reason, value)."""
    built = build_filter({"type": "near_duplicates", **config}, where="w", key="k")
    stream = FilterStream(tables, annotators=[], filters=[built], schema=DatasetSchema(), on_empty_sample="keep")
    list(stream)
    rows = [row for part in stream.take_dropped() for row in part.to_pylist() if row["modality"] != "metadata"]
    return [(r["sample_id"], r["position"], r["reason"], r["value"]) for r in rows]


# The hash


def _hash_by_definition(luma: np.ndarray) -> int | None:
    """The steps of docs/spec/filters.md in plain Python integers and loops."""
    copies = [-(-32 // side) if side < 32 else 1 for side in luma.shape]
    pixels = np.kron(luma.astype(int), np.ones(copies, int)).tolist()
    height, width = len(pixels), len(pixels[0])

    def part(cell: int, at: int, length: int) -> int:
        """Thirty-seconds of the pixel `at` that lie in a cell."""
        return max(0, min((cell + 1) * length, (at + 1) * 32) - max(cell * length, at * 32))

    rows = [[part(cell, at, height) for at in range(height)] for cell in range(32)]
    columns = [[part(cell, at, width) for at in range(width)] for cell in range(32)]
    sums = np.array(rows, object) @ np.array(pixels, object) @ np.array(columns, object).T
    small = (sums * 16 + height * width // 2) // (height * width)
    waves = np.array(
        [[round(4096 * math.cos(math.pi * k * (2 * n + 1) / 64)) for n in range(32)] for k in range(11)], object
    )
    spectrum = waves @ small @ waves.T
    places = sorted(((v, u) for v in range(11) for u in range(11)), key=lambda p: (p[0] + p[1], max(p), p[0]))[1:65]
    values = [spectrum[place] for place in places]
    if sum(abs(value) >= 2 * 4096 * 4096 * 16 * 16 for value in values) < 32:
        return None
    middle = sorted(values)[31:33]
    return sum((2 * value > sum(middle)) << (63 - n) for n, value in enumerate(values))


@settings(deadline=None, max_examples=30)
@given(height=st.integers(1, 90), width=st.integers(1, 90), seed=st.integers(0, 99), spread=st.integers(1, 255))
def test_the_hash_is_that_of_the_text(height, width, seed, spread):
    """For any pixels the hash is the documented one, computed in whole numbers without NumPy's arithmetic."""
    luma = np.random.default_rng(seed).integers(0, spread + 1, (height, width), dtype=np.uint8)
    assert hash_of_luma(luma) == _hash_by_definition(luma)


def test_copies_of_a_picture_have_a_near_hash():
    """Other formats, qualities, sizes and brightness move a hash by a few bits of 64; other pictures by many."""
    hashes, moved = [], []
    for seed in range(12):
        pixels = _picture(seed, 400, 300)
        whole = perceptual_hash(memoryview(_bytes(pixels)))
        copies = [
            _bytes(pixels, "JPEG", quality=30),
            _bytes(pixels, "WEBP", quality=50),
            _bytes(_resized(pixels, 0.25), "JPEG", quality=80),
            _bytes(_resized(pixels, 1.7), "JPEG", quality=80),
            _bytes((pixels * 0.9 + 12).astype(np.uint8)),
        ]
        moved += [(whole ^ perceptual_hash(memoryview(copy))).bit_count() for copy in copies]
        hashes.append(whole)
    apart = [(a ^ b).bit_count() for n, a in enumerate(hashes) for b in hashes[:n]]
    assert max(moved) <= 6
    assert min(apart) > 12


@pytest.mark.parametrize(
    "pixels",
    [
        np.full((50, 50), 255, np.uint8),
        np.array([[7]], np.uint8),
        np.repeat(np.array([[0], [120], [255]], np.uint8), 90, axis=1).repeat(30, axis=0),
        np.tile(np.linspace(0, 255, 200).astype(np.uint8), (80, 1)),
        np.random.default_rng(0).integers(200, 203, (300, 300), dtype=np.uint8),
    ],
    ids=["blank", "pixel", "bars", "gradient", "faint noise"],
)
def test_plain_pictures_have_no_hash(pixels):
    """Pictures in which few frequencies stand out have no hash, as it would be noise."""
    assert perceptual_hash(memoryview(_bytes(pixels))) is None


@pytest.mark.parametrize("shape", [(3, 4_000_000), (4_000_000, 3), (3000, 4000)])
def test_hashing_large_pixels_takes_little_memory(shape):
    """However large, long or thin an image is, hashing its pixels holds less than a quarter of their bytes again."""
    luma = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    hash_of_luma(luma)
    tracemalloc.start()
    hash_of_luma(luma)
    assert tracemalloc.get_traced_memory()[1] < luma.nbytes // 4
    tracemalloc.stop()


# The index


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_index_finds_the_nearest(data):
    """For entries near and far, of any width and distance, the answer is that of comparing with every one."""
    width = data.draw(st.integers(1, 3))
    limit = data.draw(st.integers(0, 15))
    noise = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    index, entries = HammingIndex(max_distance=limit, width=width), []
    bases = noise.integers(0, 2**64, (3, width), dtype=np.uint64).tolist()
    for _ in range(data.draw(st.integers(0, 40))):
        entry = list(bases[noise.integers(3)])
        for place in range(width):
            for bit in noise.choice(64, noise.integers(0, 2 * limit + 2), replace=False).tolist():
                entry[place] ^= 1 << bit
        distances = [max((a ^ b).bit_count() for a, b in zip(entry, other, strict=True)) for other in entries]
        least = min(distances, default=64)
        assert index.nearest(entry) == (least if least <= limit else None)
        index.add(entry)
        entries.append(entry)
    assert len(index) == len(entries)


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 6, 7, 10])
def test_the_index_finds_every_way_to_lie_within_the_distance(limit):
    """However the bits that differ fall into the four bands, an entry at just the distance is found, one beyond not."""
    value = 0x0123456789ABCDEF
    index = HammingIndex(max_distance=limit)
    index.add([value])
    splits = [
        (a, b, c, limit - a - b - c) for a in range(17) for b in range(17) for c in range(17) if a + b + c <= limit
    ]
    for split in splits:
        other = value
        for band, bits in enumerate(split):
            other ^= ((1 << bits) - 1) << 16 * band
        assert index.nearest([other]) == limit
        beyond = next(bit for bit in range(64) if not (other ^ value) >> bit & 1)
        assert index.nearest([other ^ 1 << beyond]) is None


def test_a_lookup_compares_with_few():
    """Among twenty thousand unlike hashes a look-up at the default distance compares with a hundredth of them."""
    index = HammingIndex(max_distance=6)
    values = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64).tolist()
    for value in values:
        index.add([value])
    compared = []
    count = np.bitwise_count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_module.np, "bitwise_count", lambda found: compared.append(len(found)) or count(found))
        assert [index.nearest([value ^ 0b111]) for value in values[:200]] == [3] * 200
    assert max(compared) < 200


def test_the_index_holds_less_than_a_kilobyte_an_entry():
    """Memory for each hash is bounded, and falls when there are many."""
    values = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64).tolist()
    tracemalloc.start()
    index = HammingIndex(max_distance=6)
    for value in values:
        index.add([value])
    assert tracemalloc.get_traced_memory()[0] < 1000 * len(values)
    tracemalloc.stop()


# The filter


def test_the_first_of_copies_stays(make_table):
    """Copies go in source order, over blocks, with their distance; other pictures stay."""
    first, other = _picture(1, 400, 300), _picture(2, 400, 300)
    tables = [
        make_table({"a": [("image", _bytes(first)), ("text", "x")], "b": [("image", _bytes(other))]}),
        make_table({"c": [("text", "y"), ("image", _bytes(_resized(first, 0.5), "JPEG"))], "d": [("text", "x")]}),
        make_table({"e": [("image", _bytes(other))], "f": [("image", _bytes(_picture(3)))]}),
    ]
    found = _judge(tables)
    assert [d[:3] for d in found] == [
        ("c", 0, "near_duplicate"), ("c", 1, "near_duplicate"), ("e", 0, "near_duplicate")
    ]  # fmt: skip
    assert all(0 <= value <= 6 for *_, value in found)
    assert found[-1][3] == 0


def test_rows_go_alone_with_scope_row(make_table):
    """With scope row each image is compared with all kept before, and its text stays."""
    one, two = _bytes(_picture(1)), _bytes(_picture(2))
    table = make_table({"a": [("image", one), ("text", "x"), ("image", one)], "b": [("text", "x"), ("image", two)]})
    assert _judge([table], scope="row") == [("a", 2, "near_duplicate", 0.0)]


def test_samples_go_if_all_their_images_are_near_those_of_one(make_table):
    """With scope sample number and order of images count, and all must be near those of a single earlier sample."""
    one, two, three = (_bytes(_picture(n)) for n in range(3))
    table = make_table(
        {
            "a": [("image", one), ("image", two)],
            "b": [("image", one)],
            "c": [("image", two), ("image", one)],
            "d": [("image", one), ("image", three)],
            "e": [("image", one), ("text", "x"), ("image", two)],
            "f": [("image", three), ("image", two)],
            "g": [],
            "h": [],
        }
    )
    assert _judge([table]) == [("e", n, "near_duplicate", 0.0) for n in range(3)]


def test_the_value_is_the_largest_distance_of_a_samples_images(make_table, monkeypatch):
    """A sample's distance is that of its most unlike image, and the nearest sample counts; the limit is inclusive."""
    hashes = {b"0": 0, b"1": 0b1, b"5": 0b11111, b"f": 0xF << 60}
    monkeypatch.setattr(near_module, "perceptual_hash", lambda data: hashes[bytes(data)])
    samples = {"a": b"00", "b": b"f0", "c": b"15", "d": b"55", "e": b"01"}
    table = make_table({name: [("image", bytes([x])) for x in images] for name, images in samples.items()})
    assert {d[0]: d[3] for d in _judge([table], max_distance=5)} == {"b": 4, "c": 5, "d": 5, "e": 1}
    assert {d[0]: d[3] for d in _judge([table], max_distance=4)} == {"b": 4, "d": 4, "e": 1}


def test_what_is_dropped_is_not_compared_with(make_table, monkeypatch):
    """A chain of pictures, each near the one before, ends where it leaves the one that was kept."""
    monkeypatch.setattr(near_module, "perceptual_hash", lambda data: (1 << data[0]) - 1)
    table = make_table({f"s{bits}": [("image", bytes([bits]))] for bits in (0, 4, 8, 12, 16)})
    assert [(d[0], d[3]) for d in _judge([table], max_distance=5)] == [("s4", 4.0), ("s12", 4.0)]


def test_plain_pictures_go_only_if_they_are_the_same_bytes(make_table):
    """Blank pages and bars are duplicates of the same bytes, and of nothing else, beside other images too."""
    white, grey = (_bytes(np.full((60, 60), level, np.uint8)) for level in (255, 128))
    again = _bytes(np.full((60, 60), 255, np.uint8), "BMP")
    photo, copy = _bytes(_picture(1)), _bytes(_picture(1), "JPEG", quality=85)
    table = make_table(
        {
            "a": [("image", white)],
            "b": [("image", grey)],
            "c": [("image", again)],
            "d": [("image", white)],
            "e": [("image", white), ("image", photo)],
            "f": [("image", grey), ("image", photo)],
            "g": [("image", white), ("image", copy)],
            "h": [("image", copy), ("image", white)],
        }
    )
    assert [d[0] for d in _judge([table])] == ["d", "g", "g"]
    assert _judge([table.slice(0, 8)], scope="row") == [("d", 0, "near_duplicate", 0.0)]


def test_unreadable_images_are_not_duplicates(make_table):
    """Rows without content, unreadable ones and other modalities are kept, and so are samples that have such images."""
    photo = _bytes(_picture(1))
    items = [("image", photo), ("image", None)]
    table = make_table(
        {
            "a": items,
            "b": items,
            "c": [("image", b"?")],
            "d": [("image", b"?")],
            "e": [("video", photo)],
            "f": [("video", photo)],
        }
    )
    assert _judge([table]) == []
    assert _judge([table], scope="row") == [("b", 0, "near_duplicate", 0.0)]


@pytest.mark.parametrize(
    ("parameters", "key", "message"),
    [
        ({"max_distance": 16}, "max_distance", "is 16, expected at most 15"),
        ({"max_distance": -1}, "max_distance", "is -1, expected a whole number of at least 0"),
        ({"max_distance": 2.0}, "max_distance", "is 2.0, expected a whole number"),
        ({"scope": "all"}, "scope", "is 'all', allowed: row, sample"),
    ],
)
def test_wrong_parameters_are_refused(parameters, key, message):
    """A parameter out of its range is refused when the declaration is loaded, by its name."""
    with pytest.raises(ConfigError, match=message) as caught:
        build_filter({"type": "near_duplicates", **parameters}, where="defs.yaml", key="filters[0]")
    assert caught.value.key == f"filters[0].{key}"


def test_the_annotator_gives_the_hash_of_the_filter(make_table, monkeypatch):
    """Image rows carry their hash, plain and unreadable ones none; the filter decodes nothing again."""
    calls = []

    def counted(data):
        calls.append(len(data))
        return perceptual_hash(data)

    monkeypatch.setattr(near_module, "perceptual_hash", counted)
    photo, blank = _bytes(_picture(1)), _bytes(np.zeros((9, 9), np.uint8))
    table = make_table({"a": [("image", photo), ("image", blank), ("image", b"?"), ("text", "t")]})
    annotator = build_annotator({"type": "perceptual_hash"}, where="w", key="k")
    built = build_filter({"type": "near_duplicates"}, where="w", key="k")
    schema = DatasetSchema(annotator_columns=annotator.columns)
    (kept,) = FilterStream([table], annotators=[annotator], filters=[built], schema=schema)
    expected = f"{perceptual_hash(memoryview(photo)):016x}"
    assert kept.column("image_perceptual_hash").to_pylist() == [None, expected, None, None, None]
    assert len(calls) == 3


# Real pictures


def test_copies_of_real_pictures_are_found_and_different_ones_are_not(make_table, shared_data):
    """Of real photographs and drawings, nearly every re-encoded copy goes, and only versions of one drawing besides."""
    samples, copies = {}, {}
    for shard in ("image-text-00000", "image-text-00001"):
        with tarfile.open(shared_data / "image-text" / f"{shard}.tar") as archive:
            for member in archive:
                if member.name.endswith((".jpg", ".png")):
                    data = archive.extractfile(member).read()
                    name = f"{shard}/{member.name}"
                    samples[name] = [("image", data)]
                    if len(copies) < 60:
                        opened = Image.open(io.BytesIO(data)).convert("RGBA")
                        paper = Image.new("RGBA", opened.size, "white")
                        paper.alpha_composite(opened)
                        small = _resized(np.asarray(paper.convert("RGB")), 0.5)
                        copies[f"copy of {name}"] = [("image", _bytes(small, "JPEG", quality=75))]
    assert len(samples) == 150
    found = _judge([make_table(samples)])
    # Outlines and fillings of an ice cream, a cat twice, an apple with and without a worm, a traffic light twice.
    assert [name[-7:-4] for name, *_ in found] == ["088", "101", "124", "142"]
    found = _judge([make_table(samples), make_table(copies)])
    gone = {name for name, *_ in found if name.startswith("copy")}
    assert len(gone) >= len(copies) - 2
