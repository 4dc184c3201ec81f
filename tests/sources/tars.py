"""Archives in memory, and the members that are found in them."""

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable
from typing import BinaryIO

import zstandard
from hypothesis import strategies as st

from mm_assets.sources.member import Member, escape_name
from mm_assets.sources.tar import TarSource

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


class MemorySource:
    """A shard in memory that remembers what was read of it."""

    url = "memory.tar"

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.size = len(content)
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, size: int) -> bytes:
        """One range, which must lie inside."""
        assert offset >= 0
        assert size >= 0
        assert offset + size <= self.size
        self.reads.append((offset, size))
        return self.content[offset : offset + size]

    def stream(self) -> BinaryIO:
        """The whole shard."""
        return io.BytesIO(self.content)


Files = list[tuple[str, bytes]]


def build(files: Files, fmt: int = tarfile.PAX_FORMAT, **changes: object) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=fmt) as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changes.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def found_in(content: bytes, **options: object) -> list[Member]:
    return list(TarSource(MemorySource(content)).members(**options))


def escaped(name: str) -> str:
    return escape_name(name.encode("utf-8", "surrogateescape"))


# -- compressed shards
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "two gzip members": lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]),
    "zstd": zstandard.compress,
    "two zstd frames": lambda data: zstandard.compress(data[:700]) + zstandard.compress(data[700:]),
    "bzip2": bz2.compress,
    "two bzip2 streams": lambda data: bz2.compress(data[:700]) + bz2.compress(data[700:]),
    "xz": lzma.compress,
    "two xz streams with padding": lambda data: lzma.compress(data[:700]) + bytes(8) + lzma.compress(data[700:]),
    "zstd with a checksum": zstandard.ZstdCompressor(write_checksum=True).compress,
    "zstd without its size": lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
    "zstd with a skippable frame": lambda data: b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstandard.compress(data),
}
names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=140).filter(
    lambda name: not name.endswith("/")
)
