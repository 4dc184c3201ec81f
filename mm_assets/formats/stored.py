"""A payload in its place: read in parts, so that a film of a gigabyte costs what is looked at of it."""

from __future__ import annotations

from dataclasses import dataclass

from mm_assets.formats.byte_source import ByteSource
from mm_assets.formats.records import Payload, crc32c

__all__ = ["StoredPayload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPayload:
    """The data of one payload of a packed file. Valid after the reader is closed: a local file stays open for it.

    Attributes:
        source: the file.
        offset: of the data in the file.
        size: bytes of the data.
        record_size: bytes of the metadata record.
        record: MSTR's, which is not beside the data; None where it is before the data.
        crc32c: checksum of record and data; None in a file without checksums.
    """

    source: ByteSource
    offset: int
    size: int
    record_size: int
    record: bytes | None
    crc32c: int | None

    def metadata(self) -> bytes:
        """The metadata record; errors as `read`."""
        return self._bytes(self.offset - self.record_size, self.record_size) if self.record is None else self.record

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes of the data from `offset` on; nothing else is paged in or fetched.

        Raises:
            ValueError: the range leaves the data.
            FormatError: the file was truncated.
            SourceError: a remote file cannot be read.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"{size} bytes at {offset} leave the {self.size} bytes of the data")
        return self._bytes(self.offset + offset, size)

    def is_whole(self) -> bool:
        """Whether record and data have their checksum, for which they are read; True in a file without checksums."""
        return self.crc32c is None or crc32c(*Payload(self.metadata(), self.read(0, self.size))) == self.crc32c

    def _bytes(self, at: int, size: int) -> bytes:
        return bytes(self.source.view(at, size)) if size else b""
