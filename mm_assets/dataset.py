"""Packed files as values: the one module that joins containers, which know bytes, and fields, which know values.

A dataset is one packed file, or all files of a manifest as one, local or behind any fsspec URL. Its schema says which
fields it has, so opening needs no other argument. An absent value is None. Every error names the file, the sample and
the modality.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt

from mm_assets.dataset_writer import DatasetWriter, create, spec_of
from mm_assets.errors import ConfigError, CorruptError, FormatError, SchemaMismatchError, SourceError, TruncatedError
from mm_assets.fields import FIELD_TYPES, Field, field_from_config
from mm_assets.fields.base import PAYLOAD
from mm_assets.formats import (
    ByteSource,
    Damage,
    MappedFile,
    ModalitySpec,
    Payload,
    VerifyReport,
    open_reader,
)
from mm_assets.formats.source import drop_pages
from mm_assets.manifest import FORMATS, Manifest, ManifestFile, parse_manifest
from mm_assets.shards import Reader, ShardedIds, Shards

__all__ = ["Batch", "Dataset", "DatasetWriter", "create", "open"]

_HASH_BLOCK = 16 << 20  # bytes of a file held while its digest is computed


def open(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    fields: Mapping[str, Field] | None = None,
    verify: bool = False,
    format: str | None = None,
) -> Dataset:
    """Open a packed file, or all files of a manifest (``.json``) as one dataset.

    Args:
        path: local path or fsspec URL. A file's format is told by its bytes.
        storage_options: arguments for the URL's file system.
        fields: fields to decode with in place of those of the file's schema, by name: the same type with other
            settings, say. A file without schema, by another writer (or cut off), opens only with fields for all of its
            modalities.
        verify: check each payload's checksum as it is read.
        format: which file of each shard of a manifest to read, ``mult`` (the default) or ``mstr``; for a single file,
            what it must be.

    Raises:
        FormatError: the file or manifest is damaged, cut off, or not one of ours.
        SchemaMismatchError: `fields` are not the file's.
        SourceError: a remote file or a shard of the manifest cannot be had.
        OSError: the local file cannot be had.
        ConfigError: an unknown `format`.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError("arguments", "format", f"found {format!r}, expected {' or '.join(FORMATS)}")
    return Dataset(path, storage_options=storage_options, fields=fields, verify=verify, format=format)


class Batch(NamedTuple):
    """One modality of many samples.

    Attributes:
        values: an array (n, …) where the field's values have one shape and dtype, absent rows zero; else a list of n
            values, None where absent.
        present: (n,) bool.
    """

    values: Any
    present: npt.NDArray[np.bool_]


class Dataset:
    """A packed dataset, open for reading; see `open`.

    ``dataset[i]`` is one sample, a dict of values by modality name. Reading is safe from several threads. It pickles
    by its location, and opens the files again. Arrays may be views into a mapped file; they stay valid after `close`.

    Attributes:
        path: path or URL of the file or manifest.
        manifest: the manifest, or None where the dataset is a single file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        fields: Mapping[str, Field] | None = None,
        verify: bool = False,
        format: str | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._arguments = {
            "storage_options": storage_options,
            "fields": fields,
            "verify": verify,
            "format": format,
        }
        self._given = dict(fields or {})
        self._options = storage_options
        self._verify = verify
        self._first: Reader | None = None
        self._fields: dict[str, Field] = {}
        self._unreadable: dict[str, str] = {}
        self.manifest: Manifest | None = None
        if self.path.endswith(".json"):
            manifest = self.manifest = self._read_manifest(format or FORMATS[0])
            sizes = [file.num_samples for file in manifest.files]
            self._shards = Shards(self.path, sizes, lambda number: self._open_alike(manifest, number))
        else:
            reader = self._open_reader(self.path)
            if format is not None and reader.format.lower() != format:
                reader.close()
                raise SchemaMismatchError(f"{self.path}: found a {reader.format} file, expected {format}")
            self._shards = Shards(self.path, [len(reader)], lambda _: reader)
            try:
                _ = self._schema_reader  # fields that do not fit are refused now, not at the first read
            except SchemaMismatchError:
                reader.close()
                raise

    # --- opening ------------------------------------------------------------------------------------------------------

    def _source(self, location: str) -> ByteSource:
        if "://" not in location:
            return MappedFile(location)
        from mm_assets.storage import RemoteFile, is_local, local_path

        return MappedFile(local_path(location)) if is_local(location) else RemoteFile(location, self._options)

    def _open_reader(self, location: str, size: int | None = None) -> Reader:
        source = self._source(location)
        try:
            if size is not None and source.size != size:
                detail = f"is not of the size that {self.path} lists"
                raise CorruptError(location, detail, found=source.size, expected=size)
            try:
                return open_reader(source, verify=self._verify)
            except TruncatedError:
                if not self._given:
                    raise
                # Another writer's file has no tail; with modalities given, the reader tells that from damage.
                specs = [spec_of(name, field) for name, field in self._given.items()]
                return open_reader(source, modalities=specs, verify=self._verify)
        except BaseException:
            source.close()
            raise

    def _read_manifest(self, form: str) -> Manifest:
        source = self._source(self.path)
        try:
            content = bytes(source.view_many([(0, source.size)])[0]) if source.size else b""
        finally:
            source.close()
        return parse_manifest(content, name=self.path.replace(os.sep, "/"), form=form)

    def _open_listed(self, file: ManifestFile) -> Reader:
        """One shard's file, checked against the manifest."""
        try:
            reader = self._open_reader(file.location, file.size)
        except (OSError, SourceError) as error:
            detail = f"partition {file.partition!r}: {file.location} cannot be had: {error}"
            raise SourceError(self.path, detail) from error
        if len(reader) != file.num_samples:
            detail = f"does not hold the samples that {self.path} lists"
            raise CorruptError(file.location, detail, found=len(reader), expected=file.num_samples)
        return reader

    def _open_alike(self, manifest: Manifest, number: int) -> Reader:
        """One shard's file, with the fields of the first."""
        reader = self._open_listed(manifest.files[number])
        if number:
            self._check_alike(self._shards[0], reader)
        return reader

    def _check_alike(self, first: Reader, other: Reader) -> None:
        if _signature(first) != _signature(other):
            detail = f"{first.path} has {_words(first)}; {other.path} has {_words(other)}"
            raise SchemaMismatchError(f"{self.path}: its files differ in fields: {detail}")

    @property
    def _schema_reader(self) -> Reader | None:
        """The first shard's reader, its fields set up; None in a dataset without shards."""
        if self._first is None and len(self._shards):
            reader = self._shards[0]
            for spec in reader.modalities:
                self._set_up(reader.path, spec)
            for name in self._given:
                if name not in reader.names:
                    raise SchemaMismatchError(f"{reader.path}: no modality {name!r}; it has {', '.join(reader.names)}")
            self._first = reader
        return self._first

    def _set_up(self, path: str, spec: ModalitySpec) -> None:
        field = self._given.get(spec.name)
        if field is None:
            name = spec.type_name or getattr(FIELD_TYPES.get(spec.type_id), "__name__", f"type id {spec.type_id:#06x}")
            try:
                field = field_from_config(name, spec.config)
            except ConfigError as error:
                self._unreadable[spec.name] = str(error)
                return
        found = (spec.type_id, spec.metadata_size)
        expected = (field.TYPE_ID, field.metadata_type.itemsize)
        if found != expected:
            detail = (
                f"modality {spec.name!r} has type id and record size {found}, {type(field).__name__} has {expected}"
            )
            if spec.name in self._given:
                raise SchemaMismatchError(f"{path}: {detail}")
            self._unreadable[spec.name] = detail
            return
        self._fields[spec.name] = field

    # --- what is in it ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Samples."""
        return self._shards.num_samples

    def __repr__(self) -> str:
        return f"Dataset({self.path!r}, {len(self)} samples)"

    @property
    def names(self) -> tuple[str, ...]:
        """The modalities, in the file's order."""
        reader = self._schema_reader
        return reader.names if reader is not None else ()

    @property
    def fields(self) -> dict[str, Field]:
        """Modality name to field; without those of a type that is not known here, whose raw bytes can be read."""
        _ = self._schema_reader
        return dict(self._fields)

    @property
    def schema(self) -> dict[str, Any]:
        """The file's schema section, or the manifest's schema."""
        if self.manifest is not None:
            return dict(self.manifest.schema)
        return dict(self._shards[0].schema)

    @property
    def sample_ids(self) -> Sequence[str]:
        """The samples' ids in order; only those that are asked for are read."""
        return ShardedIds(self._shards)

    def find(self, sample_id: str) -> int | None:
        """The index of the first sample of that id, or None."""
        return ShardedIds(self._shards).find(sample_id)

    def presence(self, name: str) -> npt.NDArray[np.bool_]:
        """Which samples have a modality: (len,) bool.

        Raises:
            KeyError: no such modality.
        """
        self._check_name(name)
        return np.concatenate([np.zeros(0, np.bool_), *(reader.presence(name) for reader in self._shards)])

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            raise KeyError(f"{self.path}: no modality {name!r}; it has {', '.join(self.names) or 'none'}")

    # --- reading ------------------------------------------------------------------------------------------------------

    def __getitem__(self, i: int) -> dict[str, Any]:
        """One sample, as `read_sample`."""
        return self.read_sample(i)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All samples in order."""
        return (self.read_sample(i) for i in range(len(self)))

    def read_sample(self, i: int, modalities: Sequence[str] | None = None) -> dict[str, Any]:
        """One sample: value by modality name, None where absent.

        Args:
            i: index; negative counts from the end.
            modalities: names to read; all by default. Nothing else is touched.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: a modality is of a type that is not known here.
        """
        names = self.names if modalities is None else tuple(modalities)
        for name in names:
            self._check_name(name)
        reader, local = self._shards.place(i)
        payloads = reader.read_sample(local, names)
        return {
            name: None if payload is None else self._decode(reader, local, name, payload)
            for name, payload in payloads.items()
        }

    def read_raw(self, i: int, name: str) -> memoryview | None:
        """The data bytes of one value, not decoded, a view into a mapped file; None where absent.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
        """
        self._check_name(name)
        reader, local = self._shards.place(i)
        return reader.read_raw(local, name)

    def read_modality(self, name: str, ids: Sequence[int] | npt.NDArray[np.integer]) -> list[Any]:
        """One modality of many samples, in the order asked, None where absent; no other modality is touched.

        Args:
            name: the modality.
            ids: indices; repeats are fine, negative ones count from the end.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: the modality is of a type that is not known here.
        """
        self._check_name(name)
        values: list[Any] = [None] * len(ids)
        for reader, where, local in self._shards.split(ids):
            payloads = reader.read_payloads(local, name)
            for row, i, payload in zip(where.tolist(), local.tolist(), payloads, strict=True):
                if payload is not None:
                    values[row] = self._decode(reader, i, name, payload)
        return values

    def read_batch(
        self, ids: Sequence[int] | npt.NDArray[np.integer], modalities: Sequence[str] | None = None
    ) -> dict[str, Batch]:
        """Some modalities of many samples, rows aligned in all of them.

        Args:
            ids: indices; repeats are fine, negative ones count from the end.
            modalities: names to read; all by default.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: a modality is of a type that is not known here.
        """
        return {name: self._read_batch(ids, name) for name in (self.names if modalities is None else modalities)}

    def _read_batch(self, ids: Sequence[int] | npt.NDArray[np.integer], name: str) -> Batch:
        self._check_name(name)
        field = self._field(name)
        records = np.zeros((len(ids), field.metadata_type.itemsize), dtype=np.uint8)
        payloads: list[Payload | None] = [None] * len(ids)
        for reader, where, local in self._shards.split(ids):
            for row, payload in zip(where.tolist(), reader.read_payloads(local, name), strict=True):
                if payload is not None:
                    records[row] = np.frombuffer(payload.metadata, dtype=np.uint8)
                    payloads[row] = payload
        try:
            return Batch(*field.decode_batch(records, [payload and payload.data for payload in payloads]))
        except FormatError:
            # Which one? Decoded singly, the damaged one says where it stands.
            for index, payload in zip(ids, payloads, strict=True):
                if payload is not None:
                    reader, i = self._shards.place(int(index))
                    self._decode(reader, i, name, payload)
            raise

    def _field(self, name: str) -> Field:
        field = self._fields.get(name)
        if field is None:
            detail = f"modality {name!r} cannot be decoded here ({self._unreadable[name]}); its bytes can: read_raw"
            raise SchemaMismatchError(f"{self.path}: {detail}")
        return field

    def _decode(self, reader: Reader, i: int, name: str, payload: Payload) -> Any:
        try:
            return self._field(name).decode(payload.metadata, payload.data)
        except FormatError as error:
            _raise_at(error, reader.path, i, name)

    # --- checking -----------------------------------------------------------------------------------------------------

    def verify(self) -> VerifyReport:
        """Read everything and report what is damaged, by sample and modality; also files against their manifest.

        Damage never raises, nor does a shard of a manifest that cannot be opened.
        """
        if self.manifest is None:
            return self._shards[0].verify()
        damage: list[Damage] = []
        num_payloads = 0
        first: Reader | None = None
        for file, start in zip(self.manifest.files, self._shards.starts, strict=True):
            try:
                # Not the reader that others read from: this one may be closed again.
                with self._open_listed(file) as reader:
                    first = first or reader
                    self._check_alike(first, reader)
                    report = reader.verify()
            except (FormatError, SchemaMismatchError, SourceError) as error:
                damage.append(Damage(sample=None, sample_id=None, modality=None, message=str(error)))
                continue
            num_payloads += report.num_payloads
            for one in report.damage:
                sample = None if one.sample is None else start + one.sample
                message = f"{file.location}: {one.message}"
                damage.append(Damage(sample=sample, sample_id=one.sample_id, modality=one.modality, message=message))
            self._verify_digest(file, damage)
        return VerifyReport(path=self.path, num_samples=len(self), num_payloads=num_payloads, damage=tuple(damage))

    def _verify_digest(self, file: ManifestFile, damage: list[Damage]) -> None:
        digest = hashlib.sha256()
        source = self._source(file.location)
        try:
            for start in range(0, source.size, _HASH_BLOCK):
                size = min(_HASH_BLOCK, source.size - start)
                digest.update(source.view_many([(start, size)])[0])
                drop_pages(source, start, size)
        finally:
            source.close()
        found = digest.hexdigest()
        if found != file.sha256:
            message = f"{file.location}: SHA-256 is not the manifest's (found {found}, expected {file.sha256})"
            damage.append(Damage(sample=None, sample_id=None, modality=None, message=message))

    # --- life time ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files; fine twice. Arrays and views that were handed out stay valid."""
        self._first = None
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.path, self._arguments)


def _reopen(path: str, arguments: Mapping[str, Any]) -> Dataset:
    return Dataset(path, **arguments)


def _raise_at(error: FormatError, path: str, sample: int, modality: str) -> NoReturn:
    """Raise a field's error again, with the file, sample and modality that the field does not know."""
    if error.path != PAYLOAD:
        raise error
    located = type(error)(
        path, error.detail, sample=sample, modality=modality, found=error.found, expected=error.expected
    )
    raise located from error


def _signature(reader: Reader) -> dict[str, tuple[Any, ...]]:
    """What the files of one dataset must have in common; the order of modalities may differ."""
    return {
        spec.name: (spec.type_name, spec.type_id, spec.metadata_size, dict(spec.config)) for spec in reader.modalities
    }


def _words(reader: Reader) -> str:
    return ", ".join(
        f"{spec.name}: {spec.type_name or spec.type_id}({dict(spec.config)})" for spec in reader.modalities
    )
