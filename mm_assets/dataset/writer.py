"""Writing packed files from values: each field encodes its value, and a container takes the payloads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

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
) -> DatasetWriter:
    """Start a packed file, MULT or MSTR by its extension (``.mult``, ``.mstr``).

    Args:
        path: where the file will be once the writer is closed; an older one is replaced then.
        fields: modality name to field, in the file's order; 1 to 32.
        num_samples: how many samples will come, if known; saves MULT a copy of the data.
        provenance: JSON for the file's schema. No clock, no host: the same content gives the same bytes.
        fsync: wait until the file is on the disk before it takes its place.

    Raises:
        ConfigError: another extension, or a value in `fields` that is not a field.
        EncodeError: a name, a count or the provenance cannot be written.
        SourceError: the disk is full, or cannot be written to.
        OSError: the file cannot be opened, or another writer is at work on it.
    """
    target = Path(path)
    kind = WRITERS.get(target.suffix)
    if kind is None:
        detail = f"found {target.name!r}, expected a name that ends in {' or '.join(WRITERS)}"
        raise ConfigError("arguments", "path", detail)
    for name, field in fields.items():
        if not isinstance(field, Field):
            raise ConfigError("arguments", f"fields[{name!r}]", f"found {type(field).__name__}, expected a Field")
    specs = [spec_of(name, field) for name, field in fields.items()]
    with full_disk_named(target):
        writer = kind(target, specs, num_samples=num_samples, provenance=provenance, fsync=fsync)
    return DatasetWriter(writer, fields)


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
    """Writes samples of values into one packed file; made by `create`.

    As a context manager it closes on success and aborts on an exception; the target is untouched until `close`.

    Args:
        writer: takes the payloads.
        fields: of its modalities, by name.
    """

    def __init__(self, writer: PackedWriter, fields: Mapping[str, Field]) -> None:
        self.path = writer.path
        self.fields: Mapping[str, Field] = dict(fields)
        self._writer = writer

    def __len__(self) -> int:
        """Samples written so far."""
        return self._writer.num_samples

    def write(self, sample_id: str, sample: Mapping[str, Any]) -> None:
        """Append one sample.

        Args:
            sample_id: unique in the file.
            sample: value by modality name; a missing name and None both mean absent.

        Raises:
            EncodeError: an unknown name, or a value that its field does not take; nothing was written, and the writer
                continues.
            SourceError: the disk is full: it did not take this sample or one of those before it; the writer is closed.
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
        with full_disk_named(self.path):
            self._writer.write(sample_id, payloads)

    def write_payloads(self, sample_id: str, payloads: Mapping[str, tuple[Any, Any] | None]) -> None:
        """Append one sample of payloads that are encoded already: (metadata, data) by modality name.

        Raises:
            EncodeError: an unknown name, a record of the wrong size, or a limit of the format.
            SourceError, OSError: as for `write`.
        """
        given = {name: value and Payload(*value) for name, value in payloads.items()}
        with full_disk_named(self.path):
            self._writer.write(sample_id, given)

    def close(self) -> WriteSummary:
        """Finish the file and put it in its place.

        Raises:
            EncodeError: two samples share an id, or fewer came than announced; the target is untouched.
            SourceError, OSError: as for `write`; the target is untouched.
        """
        with full_disk_named(self.path):
            return self._writer.close()

    def abort(self) -> None:
        """Give up; the target stays as it was."""
        self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
