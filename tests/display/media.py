"""Small media made in code, for the tests of what people see."""

import io
import json
import struct
from collections.abc import Callable

import numpy as np
from PIL import Image

from mm_assets.display import Content, Item, value_item
from mm_assets.fields import Field


def pixels(height: int = 48, width: int = 64) -> np.ndarray:
    """A picture with a dark left and a bright right half, red below."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, width // 2 :] = 200
    picture[height // 2 :, :, 0] = 255
    return picture


def image_file(kind: str = "JPEG", mode: str = "RGB", **options: object) -> bytes:
    """An image file of `pixels`."""
    target = io.BytesIO()
    Image.fromarray(pixels()).convert(mode).save(target, kind, **options)
    return target.getvalue()


def frames_file(kind: str, count: int = 3) -> bytes:
    """An animation, or a TIFF with pages."""
    pictures = [Image.fromarray(np.roll(pixels(), 7 * number, axis=1)) for number in range(count)]
    target = io.BytesIO()
    pictures[0].save(target, kind, save_all=True, append_images=pictures[1:])
    return target.getvalue()


def claiming_png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data does not have."""
    data = bytearray(image_file("PNG"))
    struct.pack_into(">II", data, 16, width, height)
    return bytes(data)


def midi_file(notes: int = 3) -> bytes:
    """A MIDI file of notes one after the other, half a second each."""
    track = bytearray()
    for number in range(notes):
        track += bytes([0, 0x90, 60 + number % 12, 90, 0x60, 0x80, 60 + number % 12, 0])
    track += b"\0\xff\x2f\0"
    return b"MThd" + struct.pack(">IHHH", 6, 0, 1, 0x60) + b"MTrk" + struct.pack(">I", len(track)) + bytes(track)


def shown(field: Field, value: object, name: str = "it") -> Item:
    """A value as it is seen once it is packed."""
    metadata, data = field.encode(value)
    return value_item(name, field, Content.of(data), metadata)


def counted(data: bytes) -> tuple[Content, list[tuple[int, int]]]:
    """Content that notes each range that is read of it."""
    reads: list[tuple[int, int]] = []

    def read(offset: int, size: int) -> bytes:
        reads.append((offset, size))
        return data[offset : offset + size]

    return Content(len(data), read), reads


def check_item(item: Item) -> None:
    """What holds of every item: its data is bounded, strict JSON, and its media have distinct plain names."""
    text = json.dumps(dict(item.data), allow_nan=False, ensure_ascii=False)
    assert len(text.encode("utf-8")) <= 256 << 10
    names = [media.name for media in item.media]
    assert len(set(names)) == len(names)
    assert all(name and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for name in names)
    assert all((media.read is None) != (media.make is None) for media in item.media)
    assert all(isinstance(value, str) for value in item.facts.values())


def made_by(item: Item, name: str) -> bytes:
    """The bytes of an item's media."""
    media = item.medium(name)
    assert media is not None
    make: Callable[[], bytes] | None = media.make
    if make is not None:
        return make()
    assert media.read is not None
    assert media.size is not None
    return media.read(0, media.size)
