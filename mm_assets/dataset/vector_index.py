"""Indexes of the embeddings of a dataset version: files of vectors, and a record that names them for a manifest.

The name of a record, ``indexes/<metric>.<modality>.<digits>.json``, follows from the manifest: its digits change with
the partitions and the file that has each one's vectors. So an index of another version of the dataset is never taken
for that of this one, and finding it takes one request. It names files of vectors that are immutable, named by their
content, and shared by the indexes of several versions: a new version adds a file with the vectors of its new
partitions. Vectors of partitions that are not in the manifest do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.codecs import DatasetFields
from mm_assets.dataset.files import PackedFiles
from mm_assets.dataset.manifest import FILE_DIGITS, FORMATS, Manifest, ManifestPartition
from mm_assets.dataset.open_files import DatasetIds, OpenFiles
from mm_assets.dataset.reader import SampleReader
from mm_assets.dataset.vector_file import VectorFile, write_vector_file
from mm_assets.dataset.vectors import Metric, Vectors, check_metric, prepared
from mm_assets.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    SchemaMismatchError,
    SourceError,
    TruncatedError,
    meant,
)
from mm_assets.formats import crc32c
from mm_assets.storage.store import Store

__all__ = [
    "INDEXES",
    "IndexSummary",
    "VectorIndex",
    "VectorReader",
    "best_of",
    "build_index",
    "index_name",
    "index_name_of",
    "open_index",
    "read_record",
]

INDEXES = "indexes"  # folder
_VERSION = 1  # of the record; and of how vectors are prepared
_MAX_PREFIX = 100  # characters of a modality in a file's name; the digits are of the whole name
_BLOCK_BYTES = 8 << 20  # of vectors that are read at a time
_MIN_LIVE = 0.75  # share of a file's vectors that must be of the manifest for the file to be used again
_MAX_FILES = 8  # of an index: each is searched by itself
_MAX_RECORDS = 4  # of earlier indexes that are read for what a new one can use

_Identity: TypeAlias = tuple[str, str, int]  # key of a partition, digits of the file with its vectors, samples


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedPartition:
    """The vectors of a partition in a file of vectors.

    Attributes:
        key: the partition's key.
        sha256: digits of the SHA-256 of the file that its vectors were read from.
        num_samples: samples in it.
        num_vectors: those with a vector.
        num_excluded: those whose vector cannot be compared: with numbers that are not finite, or zero for `cosine`.
    """

    key: str
    sha256: str
    num_samples: int
    num_vectors: int
    num_excluded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedFile:
    """A file of vectors in a record.

    Attributes:
        sha256: of its content.
        size: bytes.
        recall: measured when it was written.
        partitions: whose vectors it has; their samples in this order are its rows.
    """

    sha256: str
    size: int
    recall: float
    partitions: tuple[IndexedPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRecord:
    """What makes up the index of one modality of a dataset version.

    Attributes:
        modality: whose values are the vectors.
        metric: how they are compared.
        dimensions: numbers of a vector.
        files: the files of vectors.
    """

    modality: str
    metric: Metric
    dimensions: int
    files: tuple[IndexedFile, ...]

    def file_names(self) -> list[str]:
        """The files' names below the dataset's folder."""
        return [_file_name(self.modality, self.metric, file.sha256) for file in self.files]

    def to_bytes(self) -> bytes:
        """The record as it is stored: a column per fact, as in a manifest."""
        columns = ("key", "sha256", "num_samples", "num_vectors", "num_excluded")
        value = {
            "version": _VERSION,
            "modality": self.modality,
            "metric": self.metric,
            "dimensions": self.dimensions,
            "files": [
                {
                    "sha256": file.sha256,
                    "size": file.size,
                    "recall": file.recall,
                    "partitions": {name: [getattr(one, name) for one in file.partitions] for name in columns},
                }
                for file in self.files
            ],
        }
        return _dump({**value, "crc32c": crc32c(_dump(value))})

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str) -> IndexRecord:
        """Reads a record.

        Raises:
            CorruptError: it is not one.
        """
        try:
            value = json.loads(content)
            if value.pop("crc32c") != crc32c(_dump(value)) or value["version"] != _VERSION:
                raise ValueError("another checksum or version")
            files = tuple(
                IndexedFile(
                    sha256=_hex(file["sha256"], 64),
                    size=_count(file["size"]),
                    recall=float(file["recall"]),
                    partitions=tuple(
                        IndexedPartition(
                            key=_text(key),
                            sha256=_hex(sha256, FILE_DIGITS),
                            num_samples=_count(num_samples),
                            num_vectors=_count(num_vectors),
                            num_excluded=_count(num_excluded),
                        )
                        for key, sha256, num_samples, num_vectors, num_excluded in zip(
                            *(file["partitions"][column] for column in IndexedPartition.__slots__), strict=True
                        )
                    ),
                )
                for file in value["files"]
            )
            for file in files:  # rows are counted in int64
                _count(sum(one.num_samples for one in file.partitions))
            metric = check_metric(value["metric"])
            dimensions = _count(value["dimensions"])
            return cls(modality=_text(value["modality"]), metric=metric, dimensions=dimensions, files=files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(name, f"is not the record of an index ({error!r}): {_ADVICE}") from error


_ADVICE = "delete it, and build the index again with `mm-assets index`"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """The index of a modality of a dataset version.

    Attributes:
        url: path or URL of its record.
        modality: whose values are the vectors.
        metric: how they are compared.
        dimensions: numbers of a vector.
        num_samples: samples of the dataset version.
        num_vectors: those with a vector that is compared.
        num_excluded: those with a vector that cannot be compared: numbers that are not finite, or zero for `cosine`.
        num_files: files of vectors.
        num_bytes: bytes of these files.
        num_written: vectors that were written now; the others are in files of an earlier version's index.
        recall: what a search with default settings found of the ten nearest of 128 vectors of each file, when it was
            written: the mean over files, weighted by their vectors.
    """

    url: str
    modality: str
    metric: str
    dimensions: int
    num_samples: int
    num_vectors: int
    num_excluded: int
    num_files: int
    num_bytes: int
    num_written: int
    recall: float


# --- names ------------------------------------------------------------------------------------------------------------


def _prefix(modality: str, metric: str) -> str:
    return f"{INDEXES}/{metric}.{quote(modality, safe='')[:_MAX_PREFIX]}"


def _file_name(modality: str, metric: str, sha256: str) -> str:
    return f"{_prefix(modality, metric)}.{sha256[:FILE_DIGITS]}.vectors"


def index_name(modality: str, metric: str, partitions: Sequence[tuple[str, str, int]]) -> str:
    """Returns the name of the record of an index, below the dataset's folder.

    Args:
        modality: whose values are the vectors.
        metric: how they are compared.
        partitions: of the manifest: key, SHA-256 of the file that has the vectors, samples.
    """
    parts = [[key, sha256[:FILE_DIGITS], num_samples] for key, sha256, num_samples in partitions]
    text = json.dumps([_VERSION, modality, metric, parts], separators=(",", ":"))
    return f"{_prefix(modality, metric)}.{hashlib.sha256(text.encode()).hexdigest()[:FILE_DIGITS]}.json"


def _partitions(manifest: Manifest, modality: str) -> list[tuple[str, str, int]]:
    """Key, SHA-256 of the file that has a modality, and samples of each partition."""
    found = []
    for file, packed in zip(manifest.files, manifest.packed_digests, strict=True):
        stream = next((stream.sha256 for stream in file.streams if stream.name == modality), packed)
        found.append((file.partition or "", stream, file.num_samples))
    return found


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def index_name_of(partitions: Iterable[ManifestPartition], record: IndexRecord) -> str:
    """Returns the name that the record of an index would have for these partitions of a manifest."""
    found = []
    for one in partitions:
        form = next(form for form in FORMATS if form in one.packed)
        found.append((one.key, one.streams.get(record.modality, one.packed[form])[1], one.num_samples))
    return index_name(record.modality, record.metric, found)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"found {value!r:.60}, expected a text")
    return value


def _hex(value: object, digits: int) -> str:
    text = _text(value)
    if len(text) != digits or set(text) - set("0123456789abcdef"):
        raise ValueError(f"found {text!r:.60}, expected {digits} hexadecimal digits")
    return text


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"found {value!r:.60}, expected an integer from 0")
    return value


def read_record(store: Store, name: str) -> IndexRecord | None:
    """Reads the record of an index; None if there is none.

    Raises:
        CorruptError: it is damaged.
        SourceError: the storage cannot be read.
    """
    content = store.found_bytes(name)
    return None if content is None else IndexRecord.from_bytes(content, name=store.url_of(name))


# --- searching --------------------------------------------------------------------------------------------------------


class VectorIndex:
    """An open index of a dataset version.

    Args:
        record: what it consists of.
        partitions: of the manifest, in its order, as for `index_name`.
        files: opens the files of vectors.
        store: the dataset's folder.
        where: path or URL of the record, for messages.

    Attributes:
        dimensions: numbers of a vector.
        num_vectors: vectors that count.
        num_excluded: vectors that cannot be compared.

    Raises:
        FormatError: the record or a file is damaged, missing, or does not have the manifest's partitions.
        SourceError: a file cannot be read.
    """

    def __init__(
        self,
        record: IndexRecord,
        partitions: Sequence[tuple[str, str, int]],
        files: PackedFiles,
        store: Store,
        *,
        where: str,
    ) -> None:
        self.dimensions = record.dimensions
        self.num_vectors = self.num_excluded = 0
        # Each with the position in the dataset of each of its vectors, and which of them count if not all do.
        self._files: list[tuple[VectorFile, npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]] = []
        starts = np.cumsum([0, *(num_samples for _, _, num_samples in partitions)]).tolist()
        remaining = {
            (key, sha256[:FILE_DIGITS], num_samples): start
            for (key, sha256, num_samples), start in zip(partitions, starts, strict=False)
        }
        try:
            for file, name in zip(record.files, record.file_names(), strict=True):
                places = [remaining.pop((one.key, one.sha256, one.num_samples), -1) for one in file.partitions]
                live = [one for one, place in zip(file.partitions, places, strict=True) if place >= 0]
                self.num_vectors += sum(one.num_vectors for one in live)
                self.num_excluded += sum(one.num_excluded for one in live)
                with _advised():
                    opened = _open_file(files, store, record, file, name)
                positions = _positions(opened.rows, file.partitions, places)
                self._files.append((opened, positions, None if len(live) == len(places) else positions >= 0))
            if remaining:
                key = next(iter(remaining))[0]
                raise CorruptError(where, f"lacks the partition {key!r} of {files.name}: {_ADVICE}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the files; fine twice."""
        for file, _, _ in self._files:
            file.close()

    def search(
        self, queries: Vectors, count: int, *, probes: int | None, allowed: npt.NDArray[np.bool_] | None
    ) -> tuple[list[tuple[npt.NDArray[np.int64], Vectors]], bool]:
        """The nearest samples of each query: positions in the dataset and scores; else as `VectorFile.search`.

        Args:
            queries: (Q, D), prepared.
            count: samples of each query, at most.
            probes: lists to read in each file; None takes what each file states.
            allowed: (n,) bool by position, the samples that count; None for all.
        """
        found: list[list[tuple[npt.NDArray[np.int64], Vectors]]] = [[] for _ in queries]
        is_exact = True
        for file, positions, mask in self._files:
            if allowed is not None:  # of a position of -1 the last one's, which is masked
                mask = allowed[positions] if mask is None else mask & allowed[positions]
            with _advised():
                results, was_exact = file.search(queries, count, probes=probes, allowed=mask)
            is_exact &= was_exact
            for one, (slots, scores) in zip(found, results, strict=True):
                one.append((positions[slots], scores))
        return [best_of(one, count) for one in found], is_exact


def best_of(
    results: Sequence[tuple[npt.NDArray[np.int64], Vectors]], count: int
) -> tuple[npt.NDArray[np.int64], Vectors]:
    """Returns the best of several results of one query: samples and scores, the best first."""
    samples = np.concatenate([np.zeros(0, np.int64), *(samples for samples, _ in results)])
    scores = np.concatenate([np.zeros(0, np.float32), *(scores for _, scores in results)])
    order = np.lexsort((samples, -scores))[:count]
    return samples[order], scores[order]


@contextmanager
def _advised() -> Iterator[None]:
    """Adds to errors about a file of vectors what to do."""
    try:
        yield
    except FormatError as error:
        raise error.moved(error.path, detail=f"{error.detail}: {_ADVICE}") from error


def _open_file(files: PackedFiles, store: Store, record: IndexRecord, file: IndexedFile, name: str) -> VectorFile:
    location = store.url_of(name)
    try:
        source = files.source(location)
    except (OSError, SourceError) as error:
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{location}: ")
        raise SourceError(
            location, f"cannot be read: {reason}: build the index again with `mm-assets index`"
        ) from error
    try:
        if source.size != file.size:
            error_type = TruncatedError if source.size < file.size else CorruptError
            raise error_type(location, "has another size than its record states", found=source.size, expected=file.size)
        opened = VectorFile(source, sum(one.num_samples for one in file.partitions))
        if (opened.metric, opened.dimensions) != (record.metric, record.dimensions):
            found, expected = f"{opened.metric} of {opened.dimensions}", f"{record.metric} of {record.dimensions}"
            raise CorruptError(location, "is of another index", found=found, expected=expected)
        return opened
    except BaseException:
        source.close()
        raise


def _positions(
    rows: npt.NDArray[np.int64], partitions: Sequence[IndexedPartition], places: Sequence[int]
) -> npt.NDArray[np.int64]:
    """The position in the dataset of each row of a file; -1 for rows of partitions that have no place in it."""
    ends = np.cumsum([one.num_samples for one in partitions])
    numbers = np.searchsorted(ends, rows, side="right")
    offsets = np.array(places, np.int64)
    # The row in its partition, counted from the end, leads to its place.
    positions = offsets[numbers] + rows - (ends - [one.num_samples for one in partitions])[numbers]
    return np.where(offsets[numbers] < 0, -1, positions)


def open_index(files: PackedFiles, modality: str, metric: Metric) -> VectorIndex | None:
    """Opens the index of a dataset version; None if it has none.

    Raises:
        FormatError: the index is damaged.
        SourceError: the storage cannot be read, or a file of the index is missing.
    """
    if files.manifest is None:
        return None
    store = Store(files.manifest.folder, files.storage_options)
    partitions = _partitions(files.manifest, modality)
    name = index_name(modality, metric, partitions)
    record = read_record(store, name)
    if record is None:
        return None
    return VectorIndex(record, partitions, files, store, where=store.url_of(name))


# --- vectors of a dataset ---------------------------------------------------------------------------------------------


class VectorReader:
    """Reads the vectors of a modality, prepared for a metric.

    Args:
        files: of the dataset, which may be a view.
        fields: its fields.
        modality: a modality of arrays of one dimension and one length.
        metric: how the vectors are compared.

    Attributes:
        dimensions: numbers of a vector; 0 while that is unknown, because the field allows any length.

    Raises:
        KeyError: no such modality.
        SchemaMismatchError: its values are not vectors.
    """

    def __init__(self, files: OpenFiles, fields: DatasetFields, modality: str, metric: Metric) -> None:
        self._files, self._modality, self._metric = files, modality, metric
        self._samples = SampleReader(files, fields)
        if modality not in fields.names:
            existing = ", ".join(fields.names)
            raise KeyError(f"no modality {modality!r}, there are {existing}{meant(modality, fields.names)}")
        field = fields.known.get(modality)
        size = None if field is None else field.vector_size
        if size is None:
            detail = f"is {field}, expected vectors: an NDArrayField of one dimension"
            raise SchemaMismatchError(f"{files.name}: {modality} {detail}")
        self.dimensions = size

    def blocks(
        self, indices: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.int64], Vectors, npt.NDArray[np.int64]]]:
        """Yields the vectors of samples in blocks.

        Yields:
            the samples (n,) that have a vector; the vectors (n, D), prepared; the samples (m,) whose vector cannot be
            compared.

        Raises:
            FormatError: a file is damaged.
            SchemaMismatchError: a value is not a vector of the others' length.
        """
        step = max(_BLOCK_BYTES // (8 * (self.dimensions or 1024)), 1)
        for start in range(0, len(indices), step):
            some = indices[start : start + step]
            values, present = self._samples.read_batch(some, [self._modality])[self._modality]
            some = some[present]
            if isinstance(values, np.ndarray):
                values = values[present]
            else:
                values = self._stacked(some, [value for value in values if value is not None])
            vectors, valid = prepared(values, self._metric)
            if len(some):
                self.dimensions = vectors.shape[1]
            yield some[valid], vectors[valid], some[~valid]

    def _stacked(self, indices: npt.NDArray[np.int64], values: Sequence[Any]) -> npt.NDArray[Any]:
        if not values:
            return np.zeros((0, self.dimensions), np.float32)
        expected = (self.dimensions or len(values[0].reshape(-1)),)
        for index, value in zip(indices.tolist(), values, strict=True):
            if value.shape != expected or value.dtype.kind not in "iuf" or not value.size:
                found = f"{value.dtype} of shape {value.shape}"
                where = f"{self._files.name}: sample {DatasetIds(self._files)[index]!r}, modality {self._modality!r}"
                raise SchemaMismatchError(f"{where}: found {found}, expected numbers of shape {expected}")
        return np.stack(values)


# --- building ---------------------------------------------------------------------------------------------------------


def build_index(files: OpenFiles, fields: DatasetFields, modality: str, metric: str) -> IndexSummary:
    """Builds an index in the dataset's folder; arguments and errors as `Dataset.build_index`."""
    known = check_metric(metric)
    manifest = files.files.manifest
    if manifest is None or files.selection is not None:
        what = "has no manifest" if manifest is None else "is a view"
        raise ConfigError("arguments", "dataset", f"{files.name} {what}: an index is of a whole dataset version")
    if modality not in fields.names:
        existing = ", ".join(fields.names)
        detail = f"{files.name} has no modality {modality!r}, there are {existing}{meant(modality, fields.names)}"
        raise ConfigError("arguments", "modality", detail)
    reader = VectorReader(files, fields, modality, known)
    store = Store(manifest.folder, files.files.storage_options)
    partitions = _partitions(manifest, modality)
    name = index_name(modality, known, partitions)
    record, written = _complete(store, name), 0
    if record is None:
        record, written = _build(store, reader, modality, known, partitions)
        if not store.create(name, record.to_bytes()):  # another process was first
            record = read_record(store, name) or record
    live = set(_identities(partitions))
    indexed = [one for file in record.files for one in file.partitions if _identity(one) in live]
    num_vectors = sum(one.num_vectors for one in indexed)
    weights = [sum(one.num_vectors for one in file.partitions) for file in record.files]
    return IndexSummary(
        url=store.url_of(name),
        modality=modality,
        metric=known,
        dimensions=record.dimensions,
        num_samples=files.num_samples,
        num_vectors=num_vectors,
        num_excluded=sum(one.num_excluded for one in indexed),
        num_files=len(record.files),
        num_bytes=sum(file.size for file in record.files),
        num_written=written,
        recall=float(np.average([file.recall for file in record.files], weights=weights)) if sum(weights) else 1.0,
    )


def _identity(one: IndexedPartition) -> _Identity:
    return one.key, one.sha256, one.num_samples


def _identities(partitions: Sequence[tuple[str, str, int]]) -> list[_Identity]:
    return [(key, sha256[:FILE_DIGITS], num_samples) for key, sha256, num_samples in partitions]


def _complete(store: Store, name: str) -> IndexRecord | None:
    """The record of an index whose files are as they were written; else it is deleted, and built again."""
    with suppress(CorruptError, SourceError):
        record = read_record(store, name)
        if record is None:
            return None
        files = zip(record.files, record.file_names(), strict=True)
        if all(store.digest(file_name) == file.sha256 for file, file_name in files):
            return record
    store.delete(name)
    return None


def _build(
    store: Store, reader: VectorReader, modality: str, metric: Metric, partitions: Sequence[tuple[str, str, int]]
) -> tuple[IndexRecord, int]:
    """Writes the vectors that no file has that is worth using again; returns the record, and how many they are."""
    starts = np.cumsum([0, *(num_samples for _, _, num_samples in partitions)]).tolist()
    places = dict(zip(_identities(partitions), starts, strict=False))
    before = _earlier(store, modality, metric, places)
    if before is not None and reader.dimensions not in (0, before.dimensions):
        before = None
    files = [] if before is None else _worth_keeping(store, before, places)
    covered = {_identity(one) for file in files for one in file.partitions}
    new = [identity for identity in places if identity not in covered]
    if before is not None and files and not new:
        return IndexRecord(modality=modality, metric=metric, dimensions=before.dimensions, files=tuple(files)), 0
    file, dimensions = _write_file(store, reader, modality, metric, {identity: places[identity] for identity in new})
    record = IndexRecord(modality=modality, metric=metric, dimensions=dimensions, files=(*files, file))
    return record, sum(one.num_vectors for one in file.partitions)


def _earlier(store: Store, modality: str, metric: Metric, places: Mapping[_Identity, int]) -> IndexRecord | None:
    """The index of another version of the dataset that has the most vectors of this one."""
    listed = {name: file for name, file in store.listing(INDEXES).items() if name.startswith(_prefix(modality, metric))}
    newest = sorted(listed, key=lambda name: listed[name].modified or 0.0, reverse=True)
    best, most = None, 0
    for name in [name for name in newest if name.endswith(".json")][:_MAX_RECORDS]:
        with suppress(CorruptError):
            record = read_record(store, name)
            if record is not None and (record.modality, record.metric) == (modality, metric):
                live = sum(_num_live(file, places) for file in record.files)
                best, most = (record, live) if live > most else (best, most)
    return best


def _num_live(file: IndexedFile, places: Mapping[_Identity, int]) -> int:
    return sum(one.num_vectors for one in file.partitions if _identity(one) in places)


def _worth_keeping(store: Store, record: IndexRecord, places: Mapping[_Identity, int]) -> list[IndexedFile]:
    """The files of an index that the next one names too; they are made young, so that `clean` leaves them alone.

    Few of them remain, however often something is added: those that are not twice as large as what is written are
    written again with it.
    """
    num_new = sum(num_samples for _, _, num_samples in places)
    kept: list[tuple[int, IndexedFile]] = []
    for file, name in zip(record.files, record.file_names(), strict=True):
        live = _num_live(file, places)
        if live < _MIN_LIVE * sum(one.num_vectors for one in file.partitions) or store.size(name) != file.size:
            continue
        with suppress(SourceError):  # deleted in between
            store.refresh([name])
            kept.append((live, file))
            num_new -= sum(one.num_samples for one in file.partitions if _identity(one) in places)
    kept.sort(key=lambda pair: pair[0])
    while kept and num_new and (kept[0][0] <= 2 * num_new or len(kept) >= _MAX_FILES):
        num_new += kept.pop(0)[0]
    return [file for _, file in kept]


def _write_file(
    store: Store, reader: VectorReader, modality: str, metric: Metric, places: Mapping[_Identity, int]
) -> tuple[IndexedFile, int]:
    """Writes the vectors of partitions, given with the index of their first sample; returns the length of a vector."""
    sizes = [num_samples for _, _, num_samples in places]
    ends = np.cumsum([0, *sizes])[1:]
    ranges = [np.arange(start, start + size) for start, size in zip(places.values(), sizes, strict=True)]
    indices = np.concatenate([np.zeros(0, np.int64), *ranges])
    counts = np.zeros((2, len(places)), np.int64)  # of vectors, and of those that cannot be compared

    def blocks(rows: npt.NDArray[np.int64] | None) -> Iterator[tuple[npt.NDArray[np.int64], Vectors]]:
        if rows is None:
            counts[:] = 0
        for some, vectors, excluded in reader.blocks(indices if rows is None else indices[rows]):
            found = np.searchsorted(indices, some)
            if rows is None:
                for number, which in enumerate((found, np.searchsorted(indices, excluded))):
                    counts[number] += np.bincount(np.searchsorted(ends, which, side="right"), minlength=len(places))
            yield found, vectors

    for _ in blocks(None):
        if reader.dimensions:
            break
    if not reader.dimensions:
        raise SchemaMismatchError(f"{store.url}: no sample has the modality {modality!r}: there is nothing to search")
    with store.draft(f"{_prefix(modality, metric)}.vectors") as draft:
        recall = write_vector_file(
            draft.path, blocks, num_rows=len(indices), dimensions=reader.dimensions, metric=metric
        )
        draft.name = _file_name(modality, metric, draft.digest())
    written = draft.result()
    parts = tuple(
        IndexedPartition(key=key, sha256=sha256, num_samples=size, num_vectors=vectors, num_excluded=excluded)
        for (key, sha256, size), vectors, excluded in zip(places, *counts.tolist(), strict=True)
    )
    return IndexedFile(sha256=written.sha256, size=written.size, recall=recall, partitions=parts), reader.dimensions
