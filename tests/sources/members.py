"""Members of sources in tests: contents to write, and the contents that sources and packed files return."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import mm_assets
from mm_assets.errors import SourceError
from mm_assets.sources import Member, ShardDamage, Source
from mm_assets.sources.member import OnDamage
from mm_assets.testing.sources import FILES

from ..pipeline.chain import declare, run_chain

JPEG, PNG = b"\xff\xd8\xff\xe0 a JPEG", b"\x89PNG\r\n\x1a\n a PNG"
SAMPLE_FILES = (*FILES[:-1], ("none.bin", b"x" * 3000))  # each has a suffix
HIDDEN_SAMPLE_FILES = ("._a.jpg", "deep/.hidden.jpg", "__MACOSX/a.jpg", "a/.DS_Store.x")


def contents(
    source: Source,
    *,
    max_bytes: int = 1 << 20,
    on_error: Callable[[Member, SourceError], None] | None = None,
    on_damaged_shard: OnDamage = "fail",
    damage: list[ShardDamage] | None = None,
) -> dict[str, bytes]:
    """Returns the content of every member by its name, in the order of the listing, with which it agrees."""
    listing = list(source.members(on_damaged_shard=on_damaged_shard))
    assert [member.ordinal for member in listing] == list(range(len(listing)))
    payloads = dict(
        source.payloads(
            wanted=lambda _: True,
            max_bytes=max_bytes,
            on_error=on_error,
            on_damaged_shard=on_damaged_shard,
            damage=damage,
        )
    )
    assert payloads.keys() <= set(listing)
    if on_error is None:
        assert payloads.keys() >= {member for member in listing if member.skip_reason is None}
    for member, payload in payloads.items():
        assert len(payload) == member.byte_size
        if member.byte_offset is not None:
            assert source.file.read(member.byte_offset, member.byte_size) == payload
    return {member.member: bytes(payloads[member]) for member in listing if member in payloads}


def skip_reasons(source: Source) -> dict[str, str]:
    """Returns why entries are not members, by their names."""
    return {member.member: member.skip_reason for member in source.members() if member.skip_reason is not None}


def array(content: bytes) -> np.ndarray[Any, Any]:
    """Returns the array of an NPY file."""
    values: np.ndarray[Any, Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return values


def pixels(content: bytes) -> np.ndarray[Any, Any]:
    """Returns the pixels of an encoded image."""
    return np.asarray(Image.open(io.BytesIO(content)))


def image(level: int, form: str = "PNG") -> bytes:
    """Returns a small image of one color."""
    target = io.BytesIO()
    Image.new("RGB", (8, 6), (level, 20, 30)).save(target, form)
    return target.getvalue()


def pack(folder: Path, shards: Path) -> mm_assets.Dataset:
    """Packs the shards of a folder."""
    dataset, _ = run_chain(declare(folder, shards))
    return mm_assets.open(dataset.store.url_of("manifest.json"))


def payloads_of(dataset: mm_assets.Dataset, names: Sequence[str]) -> dict[str, dict[str, bytes]]:
    """Returns the payloads of some modalities by sample."""
    return {
        sample_id: {name: bytes(values[0]) for name, values in dataset.read_raw([index], names).items()}
        for index, sample_id in enumerate(dataset.sample_ids)
    }
