"""Writing packed files from values: each field encodes its value, and a file or a folder takes the payloads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Self

from mm_assets.dataset.folder_writer import SHARD_BYTES, FolderWriter
from mm_assets.errors import ConfigError, EncodeError, full_disk_named
from mm_assets.fields import Field
from mm_assets.formats import ModalitySpec, Payload, WriteSummary
from mm_assets.formats.convert import WRITERS
from mm_assets.formats.writer import PackedWriter

__all__ = ["DatasetWriter", "create", "spec_of"]


def create(
    path: str | os.PathLike[str],
    fields: Mapping[str, Field],
    *,
    num_samples: int | None = None,
    provenance: Mapping[str, object] | None = None,
    fsync: bool = True,
    shard_bytes: int | None = None,
    shard_samples: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    format: str | None = None,
    resume: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> DatasetWriter:
    """Start a packed file, or a dataset of several in a folder or behind a URL.

    A path that ends in ``.mult`` or ``.mstr`` is a local file, replaced when the writer is closed. Any other is a
    folder or an fsspec URL: each shard is published when it is full, and a manifest at the end. A killed writer leaves
    its complete shards; see `docs/writing.md`. The arguments from `shard_bytes` on are for folders.

    Args:
        path: the file, folder or URL. A name with another dot is that of a folder if a slash follows, or if it exists.
        fields: modality name to field, in the file's order; 1 to 32.
        num_samples: how many samples will come to a file, if known; saves MULT a copy of the data.
        provenance: JSON for the file's schema. No clock, no host: the same content gives the same bytes.
        fsync: wait until the file is on the disk before it takes its place.
        shard_bytes: a shard ends with the sample that makes its content so large; 256 MiB by default.
        shard_samples: a shard has so many samples, the last one the rest; `shard_bytes` then has no effect.
        rank: of this process among those that write into the folder. `merge` joins what they wrote.
        world_size: how many processes write into the folder.
        format: of the shards, ``mstr`` (the default) or ``mult``.
        resume: continue after the complete shards of an earlier writer of this rank. The length of the writer is the
            number of their samples, which the caller leaves out.
        storage_options: arguments for the URL's file system.

    Raises:
        ConfigError: another extension, a value in `fields` that is not a field, a number out of range, or a folder that
            holds something else, or an earlier writer's shards without `resume`.
        EncodeError: a name, a count or the provenance cannot be written.
        SchemaMismatchError: the shards to be continued have other fields.
        SourceError: the storage or the disk cannot be written to.
        OSError: the file cannot be opened, or another writer is at work on it.
    """
    for name, field in fields.items():
        if not isinstance(field, Field):
            raise ConfigError("arguments", f"fields[{name!r}]", f"found {type(field).__name__}, expected a Field")
    location = os.fspath(path)
    specs = [spec_of(name, field) for name, field in fields.items()]
    kind = _file_writer(location)
    if kind is None:
        if num_samples is not None:
            raise ConfigError("arguments", "num_samples", "is for a file, but the path is a folder: leave it out")
        shards = FolderWriter(
            location,
            specs,
            form="mstr" if format is None else format,
            shard_bytes=SHARD_BYTES if shard_bytes is None else shard_bytes,
            shard_samples=shard_samples,
            rank=rank,
            world_size=world_size,
            resume=resume,
            provenance=provenance,
            fsync=fsync,
            storage_options=storage_options,
        )
        return DatasetWriter(shards, fields)
    if (shard_bytes, shard_samples, rank, world_size, format, resume) != (None, None, 0, 1, None, False):
        detail = f"found {location!r}, a file, with an argument that is for folders: add a slash, or leave it out"
        raise ConfigError("arguments", "path", detail)
    with full_disk_named(location):
        writer = kind(location, specs, num_samples=num_samples, provenance=provenance, fsync=fsync)
    return DatasetWriter(writer, fields)


def _file_writer(location: str) -> type[PackedWriter] | None:
    """Returns the class that writes the file; None if the location is a folder."""
    suffix = PurePosixPath(location).suffix
    if location.endswith("/") or not suffix or (suffix not in WRITERS and os.path.isdir(location)):
        return None
    if suffix not in WRITERS:
        detail = f"found {location!r}, expected a name that ends in {' or '.join(WRITERS)}, or a folder: one with a dot"
        raise ConfigError("arguments", "path", f"{detail} in its name ends in a slash")
    if "://" in location:
        detail = f"found {location!r}, but a single file is local: give a folder's URL, which ends in a slash"
        raise ConfigError("arguments", "path", detail)
    return WRITERS[suffix]


def spec_of(name: str, field: Field) -> ModalitySpec:
    """What a container stores about a field."""
    return ModalitySpec(
        name=name,
        type_id=field.TYPE_ID,
        metadata_size=field.metadata_type.itemsize,
        type_name=type(field).__name__,
        config=field.config,
    )


class DatasetWriter:
    """Writes samples of values into a packed file or the shards of a folder; made by `create`.

    As a context manager it closes on success and aborts on an exception. A file is untouched until `close`; of a folder
    the shards that are complete stay.

    Args:
        writer: takes the payloads.
        fields: of its modalities, by name.

    Attributes:
        path: of the file or folder; a URL is a str.
        fields: of the modalities, by name.
    """

    def __init__(self, writer: PackedWriter | FolderWriter, fields: Mapping[str, Field]) -> None:
        self.path = writer.path
        self._disk = writer.scratch if isinstance(writer, FolderWriter) else writer.path
        self.fields: Mapping[str, Field] = dict(fields)
        self._writer = writer

    def __len__(self) -> int:
        """Samples written so far, with those of the writer that this one continues."""
        return self._writer.num_samples

    def write(self, sample_id: str, sample: Mapping[str, Any]) -> None:
        """Append one sample.

        Args:
            sample_id: unique in the file, or in all shards.
            sample: value by modality name; a missing name and None both mean absent.

        Raises:
            EncodeError: an unknown name, or a value that its field does not take; nothing was written, and the writer
                continues.
            SourceError: the disk is full: it did not take this sample or one of those before it; or the storage did not
                take a shard. The writer is closed.
            OSError: the disk failed; the writer is closed.
        """
        payloads: dict[str, Payload | None] = {}
        for name, value in sample.items():
            field = self.fields.get(name)
            if field is None or value is None:
                payloads[name] = None  # an unknown name is refused below, with the rest of the sample
                continue
            try:
                payloads[name] = Payload(*field.encode(value))
            except EncodeError as error:
                where = f"{self.path}, sample {len(self)} ({sample_id!r}), modality {name!r}"
                raise EncodeError(f"{where}: {error}") from error
        with full_disk_named(self._disk):
            self._writer.write(sample_id, payloads)

    def write_payloads(self, sample_id: str, payloads: Mapping[str, tuple[Any, Any] | None]) -> None:
        """Append one sample of payloads that are encoded already: (metadata, data) by modality name.

        Raises:
            EncodeError: an unknown name, a record of the wrong size, or a limit of the format.
            SourceError, OSError: as for `write`.
        """
        given = {name: value and Payload(*value) for name, value in payloads.items()}
        with full_disk_named(self._disk):
            self._writer.write(sample_id, given)

    def close(self) -> WriteSummary:
        """Finish the file and put it in its place; or the last shard and, of a single process, the manifest.

        Raises:
            EncodeError: two samples share an id, or fewer came than announced; a file is untouched, and a folder has no
                manifest, or the older one.
            SourceError, OSError: as for `write`; the same then.
        """
        with full_disk_named(self._disk):
            return self._writer.close()

    def abort(self) -> None:
        """Give up: a file stays as it was, and so do the complete shards of a folder."""
        self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
