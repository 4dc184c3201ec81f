"""Opening a packed file of either format, and rewriting one as the other: payload bytes are copied, never decoded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mm_assets.errors import BadMagicError, EncodeError, TruncatedError, full_disk_named
from mm_assets.formats.byte_source import ByteSource, MappedFile
from mm_assets.formats.mstr_reader import MstrReader
from mm_assets.formats.mstr_writer import MstrWriter
from mm_assets.formats.mult_reader import MultReader
from mm_assets.formats.mult_writer import MultWriter
from mm_assets.formats.records import MSTR_BODY_PTR, MSTR_MAGIC, MSTR_SHADOW_PTR, MULT_MAGIC, ModalitySpec
from mm_assets.formats.report import WriteSummary
from mm_assets.formats.tail import Window
from mm_assets.formats.writer import PackedWriter

WRITERS: dict[str, type[PackedWriter]] = {".mult": MultWriter, ".mstr": MstrWriter}


def open_reader(
    source: str | os.PathLike[str] | ByteSource,
    *,
    modalities: Sequence[ModalitySpec] | None = None,
    verify: bool = False,
) -> MultReader | MstrReader:
    """Opens a packed file as the format of its first bytes; arguments as `PackedReader`.

    Raises:
        FormatError: the file is neither format, truncated, damaged, or of a later version.
        SchemaMismatchError: the file does not have the given modalities.
        OSError: the file cannot be read.
    """
    opened = isinstance(source, str | os.PathLike)
    actual: ByteSource = MappedFile(source) if isinstance(source, str | os.PathLike) else source
    try:
        window = Window(actual)
        kind = _reader_class(actual, window)
        return kind(actual, modalities=modalities, verify=verify, window=window)
    except BaseException:
        if opened:
            actual.close()
        raise


def _reader_class(source: ByteSource, window: Window) -> type[MultReader] | type[MstrReader]:
    magic = bytes(window.get(0, min(4, source.size)))
    if magic == MULT_MAGIC:
        return MultReader
    if magic == MSTR_MAGIC:
        return MstrReader
    # An MSTR file whose header page is damaged has a shadow of it.
    if source.size >= MSTR_BODY_PTR and window.get(MSTR_SHADOW_PTR, 4) == MSTR_MAGIC:
        return MstrReader
    if not source.size:
        raise TruncatedError(source.name, "the file is empty", found=0, expected="MULT or MSTR")
    raise BadMagicError(source.name, "not a packed file", found=magic, expected=f"{MULT_MAGIC!r} or {MSTR_MAGIC!r}")


def convert(
    source: str | os.PathLike[str] | ByteSource,
    target: str | os.PathLike[str],
    *,
    modalities: Sequence[ModalitySpec] | None = None,
    verify: bool = True,
    fsync: bool = True,
) -> WriteSummary:
    """Writes the samples of one packed file to another, whose format its extension names; memory is bounded by blocks.

    Ids, modalities, provenance and payload bytes are copied; converted back, the file has its first bytes again.

    Args:
        source: a MULT or MSTR file.
        target: path ending in ``.mult`` or ``.mstr``; replaced when everything is written.
        modalities: needed for a source without our tail.
        verify: check every payload, because the copy gets new checksums and would look whole. A source without a tail
            has none, and is copied as it is.
        fsync: wait for the disk before the target takes its place.

    Returns:
        What was written.

    Raises:
        EncodeError: the target's extension is another, or a sample does not fit its format.
        FormatError: the source is damaged; the target is untouched.
        SourceError: the disk is full, or cannot be written to; the target is untouched.
    """
    path = Path(target)
    writer_class = WRITERS.get(path.suffix)
    if writer_class is None:
        raise EncodeError(f"{path}: the extension is {path.suffix!r}, expected {' or '.join(map(repr, WRITERS))}")
    with open_reader(source, modalities=modalities) as reader:
        with (
            full_disk_named(path),
            writer_class(
                path, reader.modalities, num_samples=len(reader), provenance=reader.provenance, fsync=fsync
            ) as writer,
        ):
            ids = iter(reader.sample_ids)
            for block in reader.scan(verify=verify and reader.has_checksums):
                for k in range(len(block.indices)):
                    writer.write(next(ids), {name: column[k] for name, column in block.payloads.items()})
        return writer.close()
