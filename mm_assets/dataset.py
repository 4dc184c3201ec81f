"""Packed files as values: the one module that joins containers, which know bytes, and fields, which know values.

A dataset is one packed file, or the files of a manifest, a folder or a list as one, local or behind any fsspec URL.
Its schema says which fields it has, so opening needs no other argument. An absent value is None. Every error names the
file, the sample and the modality.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mm_assets.batches import (
    Arrays,
    Batch,
    DecodePool,
    Rows,
    batch_layout,
    batch_target,
    change_settings,
    count_threads,
    decode_batches,
    decode_values,
    locate,
)
from mm_assets.dataset_writer import DatasetWriter, create, spec_of
from mm_assets.errors import ConfigError, FormatError, MissingExtraError, SchemaMismatchError
from mm_assets.fields import FIELD_TYPES, Field, ValueLayout, field_from_config
from mm_assets.fields.base import Out
from mm_assets.formats import ModalitySpec, Payload, VerifyReport
from mm_assets.manifest import Manifest
from mm_assets.packed_files import PackedFiles, Reader
from mm_assets.shards import ShardedIds, Shards

__all__ = ["Batch", "Dataset", "DatasetWriter", "create", "open"]

Ids = Sequence[int] | npt.NDArray[np.integer]
"""Indices of samples; repeats are fine, negative ones count from the end."""


def open(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    storage_options: Mapping[str, Any] | None = None,
    fields: Mapping[str, Field] | None = None,
    verify: bool = False,
    format: str | None = None,
) -> Dataset:
    """Open packed files as one dataset.

    Args:
        path: local path or fsspec URL of a packed file, of a manifest (``.json``), or of a folder; or a list of packed
            files, read in that order. A file's format is told by its bytes. A folder that holds a ``manifest.json`` is
            opened by it, any other gives its packed files sorted by name.
        storage_options: arguments for the URLs' file system.
        fields: fields to decode with in place of those of the file's schema, by name: the same type with other
            settings, say. A file without schema, by another writer (or cut off), opens only with fields for all of its
            modalities.
        verify: check each payload's checksum as it is read.
        format: which file of each shard of a manifest to read, ``mult`` (the default) or ``mstr``; which files of a
            folder, needed where it holds both; what a file, or each of a list, must be.

    Raises:
        FormatError: a file or manifest is damaged, cut off, or not one of ours.
        SchemaMismatchError: `fields` are not the files', or files differ in fields.
        SourceError: a remote file or a shard of the manifest cannot be had, or a folder holds no packed files.
        OSError: a local file cannot be had.
        ConfigError: an unknown `format`, none for a folder of both, or an empty list.
    """
    given = dict(fields or {})
    files = PackedFiles(
        path,
        storage_options=storage_options,
        modalities=[spec_of(name, field) for name, field in given.items()],
        verify=verify,
        format=format,
    )
    return Dataset(Shards(files), fields=given)


class Dataset:
    """A packed dataset, open for reading; made by `open`.

    ``dataset[i]`` is one sample, a dict of values by modality name. Reading is safe from several threads. It pickles
    by its files' locations, and opens them again. Arrays may be views into a mapped file, valid also after `close`.

    Args:
        shards: the files; the dataset closes them.
        fields: to decode with in place of those of the schema, by name.

    Attributes:
        path: path or URL of the file, manifest or folder; of a list the first file and the number of others.
        manifest: the manifest, or None where the dataset has none.
    """

    def __init__(self, shards: Shards, *, fields: Mapping[str, Field] | None = None) -> None:
        self.path = shards.name
        self.manifest: Manifest | None = shards.files.manifest
        self._shards = shards
        self._pool = DecodePool()
        self._given = dict(fields or {})
        self._first: Reader | None = None
        self._fields: dict[str, Field] = {}
        self._unreadable: dict[str, str] = {}
        if self.manifest is None:  # which opens no file before it is read
            try:
                _ = self._schema_reader  # fields that do not fit are refused now, not at the first read
            except BaseException:
                shards.close()
                raise

    def with_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> Dataset:
        """The same samples, decoded with other settings, such as ``{"image": {"channels": 3}}``.

        The files are shared, not opened again: each of the two datasets is closed on its own, and the files with the
        last. Settings that are not named stay. What is stored stays too, so that a setting of encoding, such as a
        JPEG's quality, changes nothing.

        Args:
            settings: by modality, new values of the field's settings, as its section in ``docs/fields.md`` names them.
                Those of a sequence's items go below ``inner``.

        Raises:
            KeyError: no such modality.
            ConfigError: an unknown setting, a wrong value, or one that does not go with what is stored.
            SchemaMismatchError: a modality is of a type that is not known here.
        """
        fields = dict(self._given)
        for name, changes in settings.items():
            self._check_name(name)
            fields[name] = change_settings(self._field(name), changes, where=self.path, key=name)
        return Dataset(self._shards.share(), fields=fields)

    # --- opening ------------------------------------------------------------------------------------------------------

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
        given = self._given.get(spec.name)
        name = spec.type_name or getattr(FIELD_TYPES.get(spec.type_id), "__name__", f"type id {spec.type_id:#06x}")
        stored: Field | None = None
        try:
            stored = field_from_config(name, spec.config, trusted=False)
        except (ConfigError, MissingExtraError) as error:
            self._unreadable[spec.name] = str(error)
        field = given or stored
        if field is None:
            return
        found = (spec.type_id, spec.metadata_size)
        expected = (field.TYPE_ID, field.metadata_type.itemsize)
        if found != expected:
            detail = (
                f"modality {spec.name!r} has type id and record size {found}, {type(field).__name__} has {expected}"
            )
            if given is not None:
                raise SchemaMismatchError(f"{path}: {detail}")
            self._unreadable[spec.name] = detail
            return
        if stored is not None and field.metadata_type != stored.metadata_type:
            detail = f"found records {stored.metadata_type}, the given {name} reads {field.metadata_type}"
            raise SchemaMismatchError(f"{path}: modality {spec.name!r}: {detail}")
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
    def files(self) -> tuple[str, ...]:
        """Paths or URLs of the packed files, in order."""
        return tuple(file.location for file in self._shards.files.entries)

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

    def _names(self, modalities: Sequence[str] | None) -> tuple[str, ...]:
        if modalities is None:
            return self.names
        for name in modalities:
            self._check_name(name)
        return tuple(dict.fromkeys(modalities))

    def _field(self, name: str) -> Field:
        field = self._fields.get(name)
        if field is None:
            detail = f"modality {name!r} cannot be decoded here ({self._unreadable[name]}); its bytes can: read_raw"
            raise SchemaMismatchError(f"{self.path}: {detail}")
        return field

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
        names = self._names(modalities)
        reader, local = self._shards.place(i)
        payloads = reader.read_sample(local, names)
        return {
            name: None if payload is None else self._decode(reader, local, name, payload)
            for name, payload in payloads.items()
        }

    def _decode(self, reader: Reader, i: int, name: str, payload: Payload) -> Any:
        try:
            return self._field(name).decode(payload.metadata, payload.data)
        except FormatError as error:
            raise locate(error, name, (reader.path, i)) from error

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

    # --- reading many -------------------------------------------------------------------------------------------------

    def read_raw_batch(self, ids: Ids, name: str) -> list[memoryview | None]:
        """The data bytes of many values, as `read_raw`, in the order asked; one request to each file.

        Args:
            ids: indices; repeats are fine, negative ones count from the end.
            name: the modality, also one of a type that is not known here.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
        """
        self._check_name(name)
        indices = self._shards.indices(ids)
        found: list[memoryview | None] = [None] * len(indices)
        for reader, where, local in self._shards.split(indices):
            for row, payload in zip(where.tolist(), reader.read_payloads(local, name), strict=True):
                if payload is not None:
                    found[row] = memoryview(payload.data)
        return found

    def read_modality(self, name: str, ids: Ids, *, threads: int | None = 0) -> list[Any]:
        """One modality of many samples, in the order asked, None where absent; no other modality is touched.

        Args:
            name: the modality.
            ids: indices; repeats are fine, negative ones count from the end.
            threads: as for `read_batch`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: the modality is of a type that is not known here.
            ValueError: no number of threads.
        """
        self._check_name(name)
        field, workers = self._field(name), count_threads(threads)
        indices = self._shards.indices(ids)
        rows = self._read_rows(indices, {name: field})[name]
        return decode_values(
            field, name, rows, pool=self._pool, threads=workers, place=lambda row: self._place(indices, row)
        )

    def read_batch(
        self,
        ids: Ids,
        modalities: Sequence[str] | None = None,
        *,
        out: Mapping[str, Out] | None = None,
        threads: int | None = 0,
    ) -> dict[str, Batch]:
        """Some modalities of many samples, rows aligned in all of them.

        Args:
            ids: indices; repeats are fine, negative ones count from the end.
            modalities: names to read; all by default.
            out: arrays to decode into, by modality, such as `empty_batch` makes; of a modality with several arrays a
                mapping. The rows of `ids` are written to the first rows, all of their elements, and any further row
                is left as it is; the batch holds views of them. Modalities that are not in it get new arrays. After
                an error the content is undefined.
            threads: how many threads decode, for fields whose codec lets them (`Field.decodes_in_parallel`); 0 decodes
                in the calling thread, None takes one for each core. The result is the same. The threads are kept for
                the next call, until `close`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: a modality is of a type that is not known here.
            ValueError: `out` does not fit, or no number of threads.
        """
        fields = {name: self._field(name) for name in self._names(modalities)}
        workers = count_threads(threads)
        indices = self._shards.indices(ids)
        given = dict(out or {})
        targets = {
            name: batch_target(batch_layout(field, name, self.path, len(indices)), given.pop(name, None), name)
            for name, field in fields.items()
        }
        if given:
            raise ValueError(f"out has {', '.join(map(repr, given))}, which is not read: {', '.join(fields)}")
        rows = self._read_rows(indices, fields)
        return decode_batches(
            fields, rows, targets, pool=self._pool, threads=workers, place=lambda row: self._place(indices, row)
        )

    def batch_layout(
        self, n: int, modalities: Sequence[str] | None = None
    ) -> dict[str, ValueLayout | dict[str, ValueLayout]]:
        """Shape (n, …) and dtype of the arrays of a batch, by modality; without those whose values come as a list.

        Args:
            n: rows.
            modalities: names; all by default.

        Raises:
            KeyError: no such modality.
            SchemaMismatchError: a modality is of a type that is not known here.
            CorruptError: the file's schema has values of an impossible size.
            ValueError: a negative `n`.
        """
        if operator.index(n) < 0:
            raise ValueError(f"n: found {n}, expected a number of rows from 0")
        layouts = {name: batch_layout(self._field(name), name, self.path, n) for name in self._names(modalities)}
        return {name: layout for name, layout in layouts.items() if layout is not None}

    def empty_batch(self, n: int, modalities: Sequence[str] | None = None) -> dict[str, Arrays]:
        """Zeroed arrays for the `out` of `read_batch`, to be used again and again; else as `batch_layout`."""
        return {
            name: (
                np.zeros(layout.shape, layout.dtype)
                if isinstance(layout, ValueLayout)
                else {key: np.zeros(one.shape, one.dtype) for key, one in layout.items()}
            )
            for name, layout in self.batch_layout(n, modalities).items()
        }

    def _read_rows(self, indices: npt.NDArray[np.int64], fields: Mapping[str, Field]) -> dict[str, Rows]:
        """The payloads of some modalities; one request to each file for all of them."""
        count = len(indices)
        rows = {
            name: Rows(np.zeros((count, field.metadata_type.itemsize), np.uint8), [None] * count)
            for name, field in fields.items()
        }
        for reader, where, local in self._shards.split(indices):
            for name, payloads in reader.read_samples(local, tuple(fields)).items():
                records, datas = rows[name]
                present = []
                for row, payload in zip(where.tolist(), payloads, strict=True):
                    if payload is not None:
                        present.append(row)
                        datas[row] = payload.data
                joined = b"".join([payload.metadata for payload in payloads if payload is not None])
                records[present] = np.frombuffer(joined, np.uint8).reshape(len(present), records.shape[1])
        return rows

    def _place(self, indices: npt.NDArray[np.int64], row: int) -> tuple[str, int]:
        reader, i = self._shards.place(int(indices[row]))
        return reader.path, i

    def verify(self) -> VerifyReport:
        """Read everything and report what is damaged, by sample and modality; also files against their manifest.

        Damage never raises, nor does a file of several that cannot be opened.
        """
        return self._shards.verify()

    # --- life time ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files, unless a dataset made by `with_settings` still reads them, and join the decoding threads.

        Fine twice. Arrays and views that were handed out stay valid.
        """
        self._first = None
        self._shards.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._shards.files, self._given)


def _reopen(files: PackedFiles, fields: Mapping[str, Field]) -> Dataset:
    return Dataset(Shards(files), fields=fields)
