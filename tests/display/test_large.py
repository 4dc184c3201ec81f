"""Values of gigabytes, and values of many expensive parts: what is read, held and waited for is bounded."""

import io
import struct
import time
import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest

from mm_assets.display import Content, content_item, value_item, values
from mm_assets.fields import BytesField, SequenceField
from mm_assets.fields.registry import FIELD_TYPES

SAMPLE = 4 << 30  # bytes


@pytest.mark.parametrize("cls", FIELD_TYPES.values(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("record", [0, 0xFF])
def test_a_payload_of_4_gb_is_looked_at_in_small_parts(cls: type, record: int) -> None:
    """Of a payload of 4 GiB, whole or damaged, no field has more than a megabyte read, and the item says why."""
    field = cls(BytesField()) if cls is SequenceField else cls()
    taken: list[int] = []

    def read(offset: int, size: int) -> bytes:
        assert offset + size <= SAMPLE
        taken.append(size)
        return bytes(size)

    item = value_item("x", field, Content(SAMPLE, read), bytes([record]) * field.metadata_type.itemsize)
    assert sum(taken) < 1 << 20
    assert item.kind == "unreadable"
    assert item.note


def gray_png(side: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress(bytes((2 * side + 1) * side), 1)
    head = struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_sequence_of_slow_items_is_there_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of a sequence that take long are shown as far as the time reaches, with how many there are."""
    monkeypatch.setattr(values, "MAX_SECONDS", 0.1)
    show = values.file_item

    def slow(*arguments: Any) -> Any:
        time.sleep(0.06)
        return show(*arguments)

    monkeypatch.setattr(values, "file_item", slow)
    field = SequenceField(BytesField())
    record, data = field.encode([(n, b"words") for n in range(50)])[:2]
    item = value_item("x", field, Content.of(bytes(data)), bytes(record))
    count = len(item.data["blocks"])
    assert 1 <= count < 10
    assert f"Shown are the first {count} of 50." in item.note


def test_an_item_of_a_map_holds_little() -> None:
    """A map or plane of 64 MB is thinned when its item is made, and gives the same picture from a megabyte."""
    item = content_item("x.png", Content.of(gray_png(3000)))
    assert item.kind == "depth"
    target = io.BytesIO()
    np.save(target, np.zeros((2, 2800, 2800), np.float32))
    plane = content_item("x.npy", Content.of(target.getvalue()))
    for medium in (item.media[0], plane.media[0]):
        assert isinstance(medium.make, partial)
        (held, *_) = medium.make.args
        assert held.nbytes <= 4 * 1024 * 1024
        assert held.base is None
        assert medium.make().startswith(b"\x89PNG")


def test_frames_of_an_animation_are_as_many_as_are_decoded_in_seconds() -> None:
    """Of a GIF of large frames only those are offered that are reached within a number of decoded pixels."""
    from PIL import Image

    frames = [Image.new("P", (6000, 6000), n) for n in range(8)]
    target = io.BytesIO()
    frames[0].save(target, "GIF", save_all=True, append_images=frames[1:], duration=20)
    item = content_item("x.gif", Content.of(target.getvalue()))
    assert len(item.data["frames"]) == 5
    assert "Shown are 5 of 8 frames." in item.note


def test_few_frames_of_a_very_long_animation_are_shown() -> None:
    """Each picture of a frame passes the whole animation: of one with 50,000 frames there are four, and a note."""
    screen = b"GIF89a" + bytes([64, 0, 64, 0, 0x80, 0, 0]) + bytes(3) + b"\xff" * 3
    frame = b"\x2c" + bytes([0, 0, 0, 0, 1, 0, 1, 0, 0]) + b"\x02\x02\x44\x01\x00"
    item = content_item("a.gif", Content.of(screen + frame * 50_000 + b"\x3b"))
    assert [media.name for media in item.media] == ["animation", *(f"frame-{number}" for number in range(4))]
    assert item.note == "Shown are 4 of 50,000 frames."
