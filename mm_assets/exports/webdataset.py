"""WebDataset: tar shards of members ``<key>.<suffix>``; the same samples give the same bytes."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mm_assets.exports.base import ExportColumn, ExportSample, ShardFacts
from mm_assets.sources import Source
from mm_assets.sources.tar import TarSource
from mm_assets.storage.store import Store

__all__ = ["TarShardWriter", "WebDatasetExport"]

BUFFER_BYTES = 1 << 20
_EMPTY = tarfile.TarInfo("").tobuf(tarfile.PAX_FORMAT)
_EMPTY_CHECKSUM = int(_EMPTY[148:154], 8) - sum(_EMPTY[124:135])  # without the digits of the size
_MAX_OCTAL_BYTES = 8**11 - 1  # the size field of USTAR has eleven octal digits


class TarShardWriter:
    """Writes samples as members of a tar: USTAR, or PAX for long names, without times and users.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self.size = 0

    def write(self, sample: ExportSample) -> None:
        """Appends the files of a sample, the JSON first."""
        for file in sample.files():
            data = memoryview(file.data).cast("B")
            header = _header(f"{sample.key}.{file.suffix}", len(data))
            padding = bytes(-len(data) % tarfile.BLOCKSIZE)
            for content in (header, data, padding):
                self._file.write(content)
            self.size += len(header) + len(data) + len(padding)

    def close(self) -> Mapping[str, Any]:
        """Ends the archive."""
        end = 2 * tarfile.BLOCKSIZE
        self._file.write(bytes(end + -(self.size + end) % tarfile.RECORDSIZE))
        self._file.close()
        return {}

    def abort(self) -> None:
        """Closes the incomplete archive."""
        self._file.close()


def _header(name: str, size: int) -> bytes:
    """Returns the header that `tarfile` writes for a member; short ASCII names reuse the header of an empty member."""
    if len(name) > tarfile.LENGTH_NAME or not name.isascii() or size > _MAX_OCTAL_BYTES:
        member = tarfile.TarInfo(name)
        member.size = size
        return member.tobuf(tarfile.PAX_FORMAT)
    encoded, digits = name.encode(), b"%011o" % size
    checksum = b"%06o" % (_EMPTY_CHECKSUM + sum(encoded) + sum(digits))
    return encoded + _EMPTY[len(encoded) : 124] + digits + _EMPTY[135:148] + checksum + _EMPTY[154:]


class WebDatasetExport:
    """See `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".tar"
    source: ClassVar[type[Source]] = TarSource

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``shard-000012.tar``."""
        return f"shard-{number:06d}.tar"

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> TarShardWriter:
        """Opens a tar."""
        return TarShardWriter(folder / name)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes nothing: tars need no index."""
