"""Compressed members, such as ``x.json.gz``: the extension inside decides what they are, as WebDataset opens them.

Only a member whose inner extension is in the table of modalities is opened; any other keeps its bytes (``x.nii.gz``,
``x.pkl.gz``). A locator names the stored bytes, and they are decompressed where they are read, within a limit.
"""

from __future__ import annotations

import io

from mm_assets.errors import SourceError, first_line
from mm_assets.media.content_types import Buffer
from mm_assets.sources.member import compression_of_name
from mm_assets.sources.stream import compression_of_head, decompressed

__all__ = ["TooLargeError", "content_name", "decompress", "is_compressed"]

READ_CHUNK = 1 << 20


class TooLargeError(SourceError):
    """A compressed member holds more than is allowed."""


def is_compressed(name: str | None) -> bool:
    """Whether the content of a member or file of this name is stored compressed, and is opened."""
    return name is not None and compression_of_name(name) is not None


def content_name(name: str) -> str:
    """The name without the extension of a compression that is opened."""
    compression = compression_of_name(name)
    return name if compression is None else name[: -1 - len(compression)]


def decompress(payload: Buffer, name: str, max_bytes: int) -> bytes:
    """The content of a compressed member.

    Args:
        payload: its stored bytes.
        name: of the member or file, for messages.
        max_bytes: the most that is decompressed.

    Raises:
        TooLargeError: it holds more.
        SourceError: the bytes are not compressed, or are damaged or unfinished.
    """
    compression = compression_of_head(bytes(payload[:16]))
    if compression is None:
        detail = f"is named {name!r}, but does not begin as gzip, zstd, bzip2 or xz do (found {bytes(payload[:8])!r})"
        raise SourceError(name, detail)
    stream, errors = decompressed(io.BytesIO(payload), compression)
    parts: list[bytes] = []
    left = max_bytes
    try:
        while part := stream.read(min(READ_CHUNK, left + 1)):
            left -= len(part)
            if left < 0:
                raise TooLargeError(
                    name, f"holds more than {max_bytes} bytes once decompressed, which is the most that is allowed"
                )
            parts.append(part)
    except errors as error:
        raise SourceError(name, f"cannot be decompressed: {first_line(error)}") from error
    finally:
        stream.close()
    return b"".join(parts)
