"""Rows with references, the files that they name, and a run that fetches them."""

from __future__ import annotations

import gzip
import io
import itertools
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from mm_assets.errors import SourceError
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.schema import DatasetSchema, UserColumn
from mm_assets.rows.source_ref import build_source_ref
from mm_assets.storage.files import SourceFile

SCHEMA = DatasetSchema(user_columns=(UserColumn(name="score", source="score", type="double", rows=""),)).row_schema()
JPEG = b"\xff\xd8\xff\xe0"


class CountingSource(SourceFile):
    """A file that notes what is read of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reads: list[tuple[int, int]] = []
        self.largest_buffer = 0
        self.streams = 0
        self.broken: set[int] = set()

    def _note(self, offset: int, size: int) -> None:
        if any(offset <= position < offset + size for position in self.broken):
            raise SourceError(self.url, "the disk says no", byte_offset=offset)
        self.reads.append((offset, size))

    def read(self, offset: int, size: int) -> bytes:
        """One range."""
        self._note(offset, size)
        return super().read(offset, size)

    def read_into(self, ranges: Sequence[tuple[int, int]], buffer: memoryview, positions: Sequence[int]) -> None:
        """Several ranges."""
        self.largest_buffer = max(self.largest_buffer, len(buffer))
        for offset, size in ranges:
            self._note(offset, size)
        super().read_into(ranges, buffer, positions)

    def stream(self) -> Any:
        """The whole file."""
        self.streams += 1
        return super().stream()

    def bytes_read_twice(self) -> int:
        """How many bytes were read more than once."""
        seen = bytearray(self.size)
        twice = 0
        for offset, size in self.reads:
            twice += sum(seen[offset : offset + size])
            seen[offset : offset + size] = b"\1" * size
        return twice


class Opener:
    """Opens files and remembers which."""

    def __init__(self) -> None:
        self.sources: dict[str, CountingSource] = {}
        self.asked: list[str] = []

    def __call__(self, url: str) -> CountingSource:
        """The file, the same one each time."""
        self.asked.append(url)
        if url not in self.sources:
            self.sources[url] = CountingSource(url)
        return self.sources[url]


def row(
    sample: str,
    position: int,
    ref: str | None,
    *,
    modality: str = "image",
    content_type: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {
        "sample_id": sample,
        "position": position,
        "modality": modality,
        "content_type": content_type,
        "source_ref": ref,
        **more,
    }


def batch_of(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)


def run(
    rows: Sequence[Mapping[str, Any]], opener: Callable[[str], SourceFile], *, cuts: Sequence[int] = (), **options: Any
) -> tuple[list[dict[str, Any]], list[pa.RecordBatch], MaterializeStream]:
    """Materializes rows, cut into input batches at `cuts`; the rows that came out, their batches, the stream."""
    edges = sorted({0, len(rows), *(min(c, len(rows)) for c in cuts)})
    batches = [batch_of(rows[a:b]) for a, b in itertools.pairwise(edges)]
    stream = MaterializeStream(iter(batches), open_file=opener, **{"allowed": lambda _: True, **options})
    out = list(stream)
    for batch in out:
        batch.validate(full=True)
        assert batch.schema.equals(SCHEMA)
    return [r for batch in out for r in batch.to_pylist()], out, stream


def make_tar(path: Path, members: Mapping[str, bytes], *, compress: bool = False) -> dict[str, tuple[int, int]]:
    """Writes a shard; the byte range of each member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    data = out.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        ranges = {member.name: (member.offset_data, member.size) for member in archive}
    path.write_bytes(gzip.compress(data, 1, mtime=0) if compress else data)
    return ranges


def make_tiff(num_frames: int, *, size: int = 40, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    first, *rest = [Image.fromarray(rng.integers(0, 255, (size + k, size), np.uint8)) for k in range(num_frames)]
    out = io.BytesIO()
    first.save(out, "TIFF", save_all=True, append_images=rest, compression="tiff_adobe_deflate")
    return out.getvalue()


def ref_of(path: Path, member: str | None = None, span: tuple[int, int] | None = None, frame: int | None = None) -> str:
    offset, size = span if span is not None else (None, None)
    return build_source_ref(path=str(path), member=member, byte_offset=offset, byte_size=size, frame_index=frame)


def content(seed: int, size: int) -> bytes:
    return JPEG[: min(size, 4)] + np.random.default_rng(seed).bytes(max(size - 4, 0))
