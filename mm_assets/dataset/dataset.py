"""Packed files as values: what users open, read and take views of.

A dataset is one packed file, or the files of a manifest, a folder or a list as one, local or behind any fsspec URL; or
a view: some samples or modalities of another dataset, on the same open files. Its schema says which fields it has, so
opening needs no other argument. An absent value is None. Every error names the file, the sample and the modality.
`SampleReader` and `RawReader` do the reading.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.codecs import DatasetFields, NamedPart
from mm_assets.dataset.decoding import Arrays, Batch
from mm_assets.dataset.files import PackedFiles
from mm_assets.dataset.manifest import Manifest
from mm_assets.dataset.open_files import DatasetIds, OpenFiles
from mm_assets.dataset.prefetch import arrays_of
from mm_assets.dataset.reader import RawBatch, RawReader, SampleReader
from mm_assets.dataset.writer import DatasetWriter, create, spec_of
from mm_assets.errors import ConfigError, SchemaMismatchError
from mm_assets.fields import ArraySpec, Field
from mm_assets.fields.base import Buffer, Out
from mm_assets.formats import Payload, SampleIds, VerifyReport
from mm_assets.formats.batch import Indices
from mm_assets.formats.stored import StoredPayload

if TYPE_CHECKING:
    import pyarrow as pa

    from mm_assets.dataset.groups import SampleColumn
    from mm_assets.dataset.notebook import ShownSample
    from mm_assets.dataset.row_windows import RowWindows
    from mm_assets.dataset.search import SearchResult
    from mm_assets.dataset.vector_index import IndexSummary

_BLOCK = 4096  # samples whose payloads are located together

__all__ = ["Batch", "Dataset", "DatasetWriter", "create", "open"]


def open(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    storage_options: Mapping[str, Any] | None = None,
    fields: Mapping[str, Field] | None = None,
    verify: bool | None = None,
    format: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_size: int = 16 << 30,
) -> Dataset:
    """Opens packed files as one dataset.

    Args:
        path: local path or fsspec URL of a packed file, of a manifest (``.json``), or of a folder; or a list of packed
            files, read in that order. A file's format is detected from its bytes. A folder that holds a
            ``manifest.json`` is opened by it; of any other, the packed files are read sorted by name.
        storage_options: arguments for the URLs' file system.
        fields: fields to decode with in place of those of the file's schema, by name: the same type with other
            settings, say. A file without schema, by another writer (or truncated), opens only with fields for all of
            its modalities.
        verify: check the checksum of each payload that is read, and that an absent one was not lost. By default for all
            reads that decode, except for parts that are read alone, and for Arrow tables; True: also for those parts
            and for raw reads; False: only if a call says so.
        format: which file of each shard of a manifest to read, ``mult`` or ``mstr``, by default ``mult`` where there
            are both; which files of a folder, needed where it holds both; what a file, or each of a list, must be.
        cache_dir: a local folder that caches what is read of remote files for further epochs and runs, also of
            several datasets and processes; see ``docs/spec/reading.md``. Local files are not copied into it.
        cache_size: bytes that the folder may take, at least 16 MiB; rounded down to segments of 16 MiB.

    Raises:
        FormatError: a file or manifest is damaged, truncated, or not one of ours.
        SchemaMismatchError: `fields` are not the files', or files differ in fields.
        SourceError: a remote file or a shard of the manifest cannot be read or cached, a folder holds no packed files,
            or `cache_dir` cannot be used.
        OSError: a local file cannot be read.
        ConfigError: an unknown `format`, or one that a manifest does not have; none for a folder of both; an empty
            list; or a `cache_size` that is too small.
    """
    given = dict(fields or {})
    cache = None
    if cache_dir is not None:
        from mm_assets.storage.disk_cache import BlockCache

        cache = BlockCache(os.fspath(cache_dir), cache_size)
    files = PackedFiles(
        path,
        storage_options=storage_options,
        modalities=[spec_of(name, field) for name, field in given.items()],
        verify=verify,
        format=format,
        cache=cache,
    )
    return Dataset(OpenFiles(files), fields=given)


class Dataset:
    """A packed dataset, open for reading; made by `open`.

    ``dataset[i]`` is one sample, a dict of values by modality name. Reading is safe from several threads. It pickles
    by its files' locations, and opens them again. Decoded arrays may be written to: none is a view of a file, or shares
    memory with another value's.

    `select`, `select_modalities`, `split`, `filter` and `with_settings` return another dataset on the same open files:
    a view, which has all methods, further views too. Each is closed separately, the files with the last.

    Args:
        files: the files and the selection of samples; the dataset closes them.
        fields: to decode with in place of those of the schema, by name.
        modalities: the names to show; None: all.

    Attributes:
        path: path or URL of the file, manifest or folder; of a list the first file and the number of others.
        manifest: the manifest, or None where the dataset has none.
        storage_options: arguments for the file system of its files, which may hold secrets.
    """

    def __init__(
        self,
        files: OpenFiles,
        *,
        fields: Mapping[str, Field] | None = None,
        modalities: Sequence[str] | None = None,
    ) -> None:
        self.path = files.name
        self.manifest: Manifest | None = files.files.manifest
        self.storage_options = files.files.storage_options
        self._files = files
        self._fields = DatasetFields(files, given=fields or {}, only=modalities)
        self._samples = SampleReader(files, self._fields)
        self._raw = RawReader(files, self._fields)
        if self.manifest is None:  # a manifest opens no file before it is read
            try:
                self._fields.set_up()  # fields that do not fit are refused now, not at the first read
            except BaseException:
                files.close()
                raise

    # --- views --------------------------------------------------------------------------------------------------------

    def _view(self, positions: npt.NDArray[np.int64]) -> Dataset:
        return Dataset(self._files.share(positions), fields=self._fields.given, modalities=self._fields.only)

    def with_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> Dataset:
        """Returns the same samples, decoded with other settings, such as ``{"image": {"channels": 3}}``.

        Settings that are not named stay. What is stored stays too, so that a setting of encoding, such as a JPEG's
        quality, changes nothing.

        Args:
            settings: by modality, new values of the field's settings, named as in ``docs/spec/fields.md``.
                Those of a sequence's items go below ``inner``.

        Raises:
            KeyError: no such modality.
            ConfigError: an unknown setting, a wrong value, or one that does not go with what is stored.
            SchemaMismatchError: a modality is of a type that is not known here.
        """
        fields = self._fields.changed(settings)
        return Dataset(self._files.share(), fields=fields, modalities=self._fields.only)

    def select(self, indices: Indices | slice) -> Dataset:
        """Returns a view of some samples, in the order given; it takes 8 bytes per sample, and none is read.

        Args:
            indices: repeats are fine, negative ones count from the end; or a slice, or a mask (len,) of bool.

        Raises:
            IndexError: no such sample, or a mask of another length.
            TypeError: not integers or bools in one dimension.
        """
        return self._view(self._files.positions(self._chosen(indices)))

    def select_modalities(self, names: Sequence[str]) -> Dataset:
        """Returns a view of all samples with some modalities, in the given order; `KeyError` for an unknown one."""
        return Dataset(self._files.share(), fields=self._fields.given, modalities=self._fields.choose(names))

    def split(self, fractions: Mapping[str, float], *, seed: int = 0) -> dict[str, Dataset]:
        """Returns views of parts of the samples, such as ``{"train": 0.9, "val": 0.1}``.

        A sample's part follows from its id and the seed alone: it stays when samples are added, removed or packed into
        other files, and equal ids stay together. So the sizes are near the fractions, not exact.

        Args:
            fractions: share of each part, by name, above 0 and up to 1 together; the rest is in no part.
            seed: from 0 to 2**64 - 1; another one gives other parts.

        Raises:
            ConfigError: fractions or seed are out of range.
            FormatError: the ids of a file are damaged.
        """
        from mm_assets.dataset.selection import split_rows

        parts = split_rows(self.sample_ids, len(self), fractions, seed=seed)
        return {name: self.select(rows) for name, rows in parts.items()}

    def filter(self, sql: str) -> Dataset:
        """Returns a view of the samples that meet a condition, such as ``image.width >= 256 and present_text``.

        Only the columns that the condition names are read, file by file, and no payload's data.

        Args:
            sql: what may follow ``where`` in a query of the table `samples`, in DuckDB's SQL. Its columns:
                `index`, `sample_id`, and of each modality m `present_m` (bool), `size_m` (bytes of data, null where
                absent), and m itself, its metadata record as a struct, null if absent: see ``docs/spec/fields.md``.
                It reaches no files.

        Raises:
            ConfigError: it is not a condition, names no column, or cannot be computed.
            FormatError: a file is damaged.
        """
        return self.select(self.matching(sql))

    def matching(self, sql: str) -> npt.NDArray[np.int64]:
        """Returns the indices of the samples that meet a condition, ascending, (n,) int64; see `filter`."""
        from mm_assets.dataset.selection import matching_rows

        return matching_rows(self._files, self.names, self._fields.known, sql)

    def windows(
        self,
        at: Mapping[str, Sequence[float] | npt.NDArray[Any]],
        *,
        group: SampleColumn,
        order: SampleColumn | None = None,
        edge: str = "repeat",
        tolerance: float | None = None,
    ) -> RowWindows:
        """Returns a view in which modalities are windows over neighboring samples of a group: steps of an episode.

        Item i is sample i, with the values at some offsets within its group as an array (T, ...), and for each such
        modality the mask ``<modality>_is_pad``, (T,) bool: True for a step that does not exist or lacks the modality.

        `group` and `order` are columns: values for all samples, (len,), or one of these names.

        - A `ScalarField`, or an entry of another metadata record, such as ``step`` or ``audio.num_frames``.
        - A key in the JSON of each sample, with its modality, such as ``metadata.episode``. All JSON is read.
        - A `TextField`, for groups. All its texts are read.
        - ``sample_id``: as the group, what is before the number at the end of each id; as the order, the number.

        Args:
            at: by modality, the offsets, such as ``{"image": [-1, 0], "action": range(8)}``. They count steps in the
                group, which need not be numbered without gaps.
            group: integers or text; samples with equal values are a group.
            order: finite numbers, each once in a group; None for the dataset's order.
            edge: what a window has in place of a step that does not exist: ``"repeat"``, the nearest step of the group;
                ``"zero"``, zeros (None in lists); ``"drop"``: the view has only windows without a masked step.
            tolerance: makes the offsets differences of `order`, such as seconds: ``tolerance=1e-4`` with
                ``at={"image": [-0.1, 0]}``. A step exists if it differs from the offset by at most this.

        Raises:
            KeyError: no such modality.
            ConfigError: there is no such column, or it does not have such values; the offsets are not integers, or
                with `tolerance` no sample has a step at an offset.
            FormatError: a file is damaged.
        """
        from mm_assets.dataset.groups import read_groups
        from mm_assets.dataset.row_windows import RowWindows

        if tolerance is not None and order is None:
            raise ConfigError("arguments", "tolerance", "needs an order, whose values the offsets are differences of")
        groups = read_groups(
            self._files, self.names, self._fields.known, group, order, keep_order=tolerance is not None
        )
        return RowWindows(self.with_settings({}), groups, at, edge=edge, tolerance=tolerance)

    def search(
        self,
        query: Any,
        modality: str | Sequence[str] | None = None,
        k: int = 10,
        *,
        where: str | None = None,
        metric: Literal["cosine", "ip", "l2"] = "cosine",
        query_modality: str | None = None,
        exact: bool | None = None,
        probes: int | None = None,
    ) -> SearchResult:
        """Returns the samples whose vectors are nearest to a query; ``docs/embeddings.md`` has examples.

        If the dataset version has an index (`build_index`) for the modality and the metric, it is used. Otherwise all
        vectors are read and compared, in blocks.

        Args:
            query: a vector (D,); several, (Q, D); or the index or the id of a sample, which is not part of its result.
            modality: the vectors to search, modalities of `NDArrayField` with one dimension. Of several a sample has
                the best of its scores. By default the only one that there is.
            k: samples to return for each query, at most.
            where: a condition that samples must meet, as for `filter`.
            metric: ``cosine``, ``ip`` (inner product) or ``l2`` (Euclidean distance).
            query_modality: whose vector a sample is searched by; by default the first of `modality`. It may be one of
                another modality in the same space, such as the embedding of a text.
            exact: True compares all vectors, False requires an index; None uses an index if there is one.
            probes: lists of vectors to read in an index, more for a higher recall. By default as many as found 95 % of
                the ten nearest of vectors of the index itself. Queries of another modality may need more.

        Raises:
            ConfigError: the query or another argument is wrong, or the condition is.
            KeyError: no such modality.
            IndexError: no such sample.
            SchemaMismatchError: values of a modality are not vectors of one length.
            FormatError: a file is damaged, or the index.
            SourceError: a file of the index cannot be read, or there is no index and `exact` is False.
        """
        from mm_assets.dataset.search import search

        return search(
            self._files,
            self._fields,
            query,
            modality,
            k,
            query_modality=query_modality,
            where=where,
            metric=metric,
            exact=exact,
            probes=probes,
        )

    def build_index(self, modality: str, *, metric: Literal["cosine", "ip", "l2"] = "cosine") -> IndexSummary:
        """Builds an index of vectors for `search`, in the folder of the dataset version that is open.

        If an index of an earlier version has most of the vectors, only the vectors of new partitions are written. An
        index that is complete is verified. Memory is bounded: blocks, a sample of up to 256 MiB, and about 30 bytes per
        vector that is written.

        Args:
            modality: the vectors, a modality of `NDArrayField` with one dimension.
            metric: ``cosine``, ``ip`` (inner product) or ``l2`` (Euclidean distance), as searches will state it.

        Raises:
            ConfigError: the dataset has no manifest, is a view, or has no such modality; or an unknown metric.
            SchemaMismatchError: its values are not vectors of one length, or there are none.
            FormatError: a packed file is damaged.
            SourceError: the storage cannot be read or written.
        """
        from mm_assets.dataset.vector_index import build_index

        return build_index(self._files, self._fields, modality, metric)

    # --- what is in it ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Samples."""
        return self._files.num_samples

    def __repr__(self) -> str:
        stored = "" if self._files.selection is None else f" of {self._files.num_stored}"
        return f"Dataset({self.path!r}, {len(self)}{stored} samples)"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the modalities, how many samples have each, and the first samples."""
        from mm_assets.dataset.notebook import dataset_html

        return dataset_html(self._files, self._fields, self.path)

    def show(self, i: int, modalities: Sequence[str] | None = None) -> ShownSample:
        """Shows a sample: as the last line of a notebook's cell its pictures, players and texts.

        Modalities that cannot be decoded say why, and do not hide the others.

        Args:
            i: index; negative counts from the end.
            modalities: names to show; all by default.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
        """
        from mm_assets.dataset.notebook import shown_sample

        index = operator.index(i) % len(self) if -len(self) <= operator.index(i) < len(self) else i
        return shown_sample(self._files, self._fields, index, self._fields.choose(modalities))

    @property
    def names(self) -> tuple[str, ...]:
        """The modalities, in the file's order or in that given to `select_modalities`."""
        return self._fields.names

    @property
    def fields(self) -> dict[str, Field]:
        """Modality name to field; without those of a type that is not known here, whose raw bytes can be read."""
        return self._fields.known

    def part(self, name: str) -> NamedPart:
        """Returns what the name of a modality or of a part stands for, such as ``document.layout.words.boxes``.

        Raises:
            KeyError: no such modality, or its values have no such part.
            SchemaMismatchError: the modality is of a type that is not known here.
        """
        return self._fields.part(name)

    @property
    def selection(self) -> npt.NDArray[np.int64] | None:
        """Positions of a view's samples among all samples of its files: (len,) int64; None for all of them."""
        return self._files.selection

    @property
    def files(self) -> tuple[str, ...]:
        """Paths or URLs of the packed files, in order."""
        return tuple(file.location for file in self._files.files.entries)

    @property
    def schema(self) -> dict[str, Any]:
        """The file's schema section, or the manifest's schema."""
        if self.manifest is not None:
            return dict(self.manifest.schema)
        return dict(self._files[0].schema)

    @property
    def sample_ids(self) -> SampleIds:
        """The samples' ids in order; only those that are asked for are read."""
        return DatasetIds(self._files)

    def find(self, sample_id: str) -> int | None:
        """Returns the index of the first sample with an id; None if there is none.

        The first call reads all ids and sorts their hashes; 12 bytes per sample are cached then, for all views
        together.
        """
        return self._files.find(sample_id)

    # --- metadata: no data of a payload is read -----------------------------------------------------------------------

    def presence(self, name: str) -> npt.NDArray[np.bool_]:
        """Returns which samples have a modality: (len,) bool; `KeyError` for an unknown one."""
        self._fields.check_name(name)
        present = np.zeros(len(self), np.bool_)
        for reader, rows, local in self._files.pieces():
            present[rows] = reader.presence(name)[local]
        return present

    def scan_records(self, name: str) -> Iterator[tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]]:
        """Yields the metadata records of a modality, file by file.

        Args:
            name: a modality whose field is known here; `KeyError` for an unknown one.

        Yields:
            (n,) records of the samples of a file that have it, as the field's `metadata_type`; (n,) int64, the bytes of
            their records and data together.
        """
        self._fields.check_name(name)
        record = self.fields[name].metadata_type
        for reader, _, local in self._files.pieces():
            local = local[reader.presence(name)[local]]
            records = np.ascontiguousarray(reader.records(name)[local])
            yield records.view(record).reshape(-1), reader.sizes(name)[local].astype(np.int64)

    def scan_columns(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields columns of the table `samples` (see `filter`): metadata of all samples, one file's at a time.

        Args:
            columns: names of columns, such as ``sample_id``, ``present_image`` or ``image``.

        Yields:
            tables of at most 131,072 samples, in order; one without rows if there are no samples.

        Raises:
            KeyError: an unknown column.
            FormatError: a file is damaged.
        """
        from mm_assets.dataset.selection import scan_columns

        return scan_columns(self._files, self.names, self._fields.known, columns)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns a number of every sample's metadata, such as ``audio.num_frames`` or ``size_image``.

        Args:
            name: an entry of a modality's metadata record, or another column of the table `samples` (see `filter`).

        Returns:
            (len,) in the order of the samples, of the entry's type; 0 where the modality is absent.

        Raises:
            KeyError: not a column of numbers.
            FormatError: a file is damaged.
        """
        from mm_assets.dataset.selection import number_column

        return number_column(self._files, self.names, self._fields.known, name)

    def item_tables(
        self, name: str, indices: Indices
    ) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.void]] | None]:
        """Yields the positions and metadata records of the items in each value of a modality of sequences.

        Of a remote file, each sample takes a request.

        Args:
            name: a modality of sequences.
            indices: the samples.

        Yields:
            for each sample (n,) positions and (n,) records of the items' `metadata_type`; None if absent.

        Raises:
            KeyError: no such modality.
            SchemaMismatchError: its values have no items.
            FormatError: the file is damaged there.
        """
        field, _ = self._items_of(name)
        for start in range(0, len(indices), _BLOCK):
            for payload in self._raw.stored(indices[start : start + _BLOCK], [name])[name]:
                yield None if payload is None else field.item_table(payload.metadata(), payload)

    def item_records(self, name: str, indices: Indices) -> npt.NDArray[np.void]:
        """Returns the metadata records of the items of a modality of sequences in local files.

        Args:
            name: a modality of sequences.
            indices: the samples.

        Returns:
            (n,) records of the items' `metadata_type`, file by file. Those in remote files are left out: each sample
            would take a request.

        Raises:
            KeyError: no such modality.
            SchemaMismatchError: its values have no items.
            FormatError: the file is damaged there.
        """
        field, item = self._items_of(name)
        chosen = self._chosen(indices)
        found = [np.zeros(0, item.metadata_type)]
        for reader, rows, local in self._files.pieces():
            if reader.mapped is not None:
                stored = reader.stored(local[np.isin(rows, chosen)], [name])[name]
                found += [field.item_table(one.metadata(), one)[1] for one in stored if one is not None]
        return np.concatenate(found)

    def _items_of(self, name: str) -> tuple[Field, Field]:
        """The field of a modality of sequences, and that of its items."""
        self._fields.check_name(name)
        field = self.fields[name]
        if field.item_field is None:
            raise SchemaMismatchError(f"{self.path}: {name} is of {type(field).__name__}, whose values have no items")
        return field, field.item_field

    # --- values ------------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, i: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, i: Indices | slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, i: int | Indices | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Reads one sample, as `read_sample`; or a list for indices, a slice or a mask, by one request to each file."""
        which: Any = i  # also an object that only behaves like an array, such as a tensor
        if isinstance(which, slice | Sequence) or getattr(which, "ndim", 0) > 0:
            return self._samples.read_samples(self._chosen(which))
        return self._samples.read_sample(which)

    def __getitems__(self, indices: Indices) -> list[dict[str, Any]]:
        """Reads many samples, as ``dataset[indices]``: torch's DataLoader calls this for a batch."""
        return self._samples.read_samples(indices)

    def _chosen(self, indices: Indices | slice) -> Indices:
        """Returns indices, those of a slice or a mask too."""
        if isinstance(indices, slice):
            return range(*indices.indices(len(self)))
        if isinstance(indices, np.ndarray) and indices.dtype == np.bool_ and indices.ndim == 1:
            if len(indices) != len(self):
                raise IndexError(f"{self.path}: a mask of {len(indices)} for {len(self)} samples")
            return np.flatnonzero(indices)
        return indices

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields all samples in order."""
        return map(self._samples.read_sample, range(len(self)))

    def read_sample(
        self, i: int, modalities: Sequence[str] | None = None, *, window: tuple[float, float] | None = None
    ) -> dict[str, Any]:
        """Reads one sample: values by modality name, None if absent.

        Args:
            i: index; negative counts from the end.
            modalities: names to read, also of parts, such as ``image[0]``; all by default. Nothing else is touched.
            window: start and duration in seconds: clips, audio, series, timed text and MIDI are those of this window,
                with times from its start, and no more of them is decoded than that needs. Not of parts.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality, or its values have no such part.
            FormatError: the file is damaged there.
            LimitError: a value exceeds a limit of its field, which `with_settings` changes.
            SchemaMismatchError: a modality is of a type that is not known here.
            ValueError: a window with a negative start or without a duration.
        """
        return self._samples.read_sample(i, modalities, window=window)

    def durations(self, indices: Indices, modalities: Sequence[str] | None = None) -> npt.NDArray[np.float64]:
        """Returns the seconds that samples take on their clocks, from metadata records alone.

        Args:
            indices: repeats are fine, negative ones count from the end.
            modalities: names to consider; all by default.

        Returns:
            (n,) float64: the shortest of a sample's clips and audio, so that each of them covers it; if it has none,
            the end of its longest series, music or timed text; NaN if it has none of these either.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
        """
        return self._samples.durations(indices, modalities)

    def frames(self, name: str, i: int, indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint8] | None:
        """Decodes some frames of a clip, and no more than they need.

        Args:
            name: a modality of clips.
            i: index of the sample.
            indices: (K,) numbers of frames in the clip, in any order.

        Returns:
            (K, H, W, 3) uint8 RGB; None if the sample has no clip.

        Raises:
            IndexError: no such sample, or no such frame.
            KeyError: no such modality.
            TypeError: the modality has no frames.
            FormatError: the file is damaged there.
        """

        def decode(field: Field, metadata: Buffer, data: Buffer) -> Any:
            return field.decode_frames(metadata, data, indices)

        found: npt.NDArray[np.uint8] | None = self._samples.read_parts((name,), i, decode)[name]
        return found

    def audio(
        self,
        name: str,
        i: int,
        *,
        frames: Sequence[int] | npt.NDArray[np.int64] | None = None,
        audio_until: str = "frame_end",
    ) -> Any:
        """Decodes the audio of a clip or of an audio modality, and no frame.

        Args:
            name: the modality.
            i: index of the sample.
            frames: (K,) numbers of frames in the clip; None for all audio.
            audio_until: where the audio of a frame ends: ``frame_end``, where the clip's next frame begins, or
                ``next_frame``, where the next one of `frames` begins, and that of the last one where the clip ends.

        Returns:
            `Audio`, or a list of K `Audio`, one for each frame, empty outside the recording; None if the sample has
            none.

        Raises:
            IndexError: no such sample, or no such frame.
            KeyError: no such modality.
            TypeError: the modality has no audio, or `frames` of one without frames.
            ValueError: an unknown `audio_until`, or frames that do not increase with ``next_frame``.
            FormatError: the file is damaged there.
        """

        def decode(field: Field, metadata: Buffer, data: Buffer) -> Any:
            return field.decode_audio(metadata, data, frames, audio_until)

        return self._samples.read_parts((name,), i, decode)[name]

    def read_modality(self, name: str, indices: Indices, *, threads: int | None = 0) -> list[Any]:
        """Reads one modality of many samples, in the order of `indices`, None if absent; no other modality is touched.

        Args:
            name: the modality, or a part of it, such as ``document.layout.words``.
            indices: repeats are fine, negative ones count from the end.
            threads: as for `read_batch`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality, or its values have no such part.
            FormatError: the file is damaged there.
            LimitError: a value exceeds a limit of its field, which `with_settings` changes.
            SchemaMismatchError: the modality is of a type that is not known here.
            ValueError: no number of threads.
        """
        return self._samples.read_modality(name, indices, threads=threads)

    def read_batch(
        self,
        indices: Indices,
        modalities: Sequence[str] | None = None,
        *,
        out: Mapping[str, Out] | None = None,
        threads: int | None = 0,
        verify: bool | None = None,
        windows: npt.ArrayLike | None = None,
        on_read: Callable[[], object] | None = None,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> dict[str, Batch]:
        """Reads some modalities of many samples, rows aligned in all of them.

        Args:
            indices: repeats are fine, negative ones count from the end.
            modalities: names to read, also of parts, such as ``document.layout.words`` and ``image[0]``; all by
                default. A part that is stored as a payload of its own is read alone, and its checksum is not verified
                unless `verify` is True, for which the whole payload is read.
            out: arrays to decode into, by modality, such as `empty_batch` makes; of a modality with several arrays a
                mapping. The samples are written to the first rows, all of their elements, and any further row is left
                as it is; the batch holds views of them. Modalities that are not in it get new arrays. After an error
                the content is undefined.
            threads: how many threads decode, for fields whose codec lets them (`Field.decodes_in_parallel`); 0 decodes
                in the calling thread, None takes one for each core. The result is the same. The threads wait for
                the next call, until `close`.
            verify: check the payloads' checksums, where the files have them; by default as the dataset was opened.
            windows: (n, 2), start and duration of a window of each sample, or one pair for all; as for `read_sample`.
                If all durations are equal, audio with `decode_rate` and `decode_channels` is an array of that length.
            on_read: called between reading, with its checksums, and decoding.
            keys: (n,) uint64, from which random settings of fields are drawn, such as `decode_crop` of an image: the
                same key and image give the same crop. Without keys nothing is random.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality, or its values have no such part.
            FormatError: the file is damaged there.
            LimitError: a value exceeds a limit of its field, which `with_settings` changes.
            SchemaMismatchError: a modality is of a type that is not known here.
            ValueError: `out` does not fit, no number of threads, or wrong windows.
        """
        return self._samples.read_batch(
            indices,
            modalities,
            out=out,
            threads=threads,
            verify=verify,
            windows=windows,
            on_read=on_read,
            keys=keys,
        )

    def read_batch_each(
        self,
        indices: Mapping[str, Indices],
        *,
        out: Mapping[str, Out] | None = None,
        threads: int | None = 0,
        verify: bool | None = None,
        on_read: Callable[[], object] | None = None,
        keys: Mapping[str, npt.NDArray[np.uint64]] | None = None,
    ) -> dict[str, Batch]:
        """Reads as `read_batch`, with samples of its own for each modality, of any number; one request to each file.

        Args:
            indices: by modality, the samples.
            out: as for `read_batch`.
            threads: as for `read_batch`.
            verify: as for `read_batch`.
            on_read: as for `read_batch`.
            keys: by modality, as for `read_batch`.
        """
        return self._samples.read_batch_each(
            indices, out=out or {}, threads=threads, verify=verify, on_read=on_read, keys=keys
        )

    def batch_layout(
        self, n: int, modalities: Sequence[str] | None = None
    ) -> dict[str, ArraySpec | dict[str, ArraySpec]]:
        """Returns shape (n, …) and dtype of the arrays of a batch, by modality; none for values that come as a list.

        Args:
            n: rows.
            modalities: names, also of parts; all by default.

        Raises:
            KeyError: no such modality, or its values have no such part.
            SchemaMismatchError: a modality is of a type that is not known here, or its values are too large for arrays.
            ValueError: a negative `n`.
        """
        return self._samples.batch_layout(n, modalities)

    def empty_batch(self, n: int, modalities: Sequence[str] | None = None) -> dict[str, Arrays]:
        """Returns zeroed arrays for the `out` of `read_batch`, to be used again and again; else as `batch_layout`."""
        return arrays_of(self.batch_layout(n, modalities), np.zeros)

    def to_arrow(
        self,
        indices: Indices | slice | None = None,
        modalities: Sequence[str] | None = None,
        *,
        raw: Sequence[str] = (),
        threads: int | None = 0,
    ) -> pa.Table:
        """Reads samples as an Arrow table, a column for each modality, null if absent.

        A column's type follows from the field: a text or JSON is `string`, a number its type, token ids a list, an
        array of fixed shape nested lists of fixed sizes; ``docs/spec/reading.md`` lists all. What has no columnar form
        is the stored data bytes, `large_binary`.

        Args:
            indices: or a slice or a mask, as for `select`; all samples by default.
            modalities: names to read; all by default.
            raw: modalities whose stored bytes are wanted, whatever their field is; also of a type not known here. Their
                checksums are verified as those of the others.
            threads: as for `read_batch`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: a modality is of a type that is not known here.
            ValueError: no number of threads.
        """
        chosen = range(len(self)) if indices is None else self._chosen(indices)
        return self._samples.to_arrow(chosen, modalities, raw=raw, threads=threads)

    # --- stored bytes -------------------------------------------------------------------------------------------------

    @overload
    def read_raw(
        self,
        indices: Indices,
        modalities: Sequence[str] | None = None,
        *,
        records: Literal[False] = False,
        verify: bool = False,
    ) -> RawBatch: ...

    @overload
    def read_raw(
        self,
        indices: Indices,
        modalities: Sequence[str] | None = None,
        *,
        records: Literal[True],
        verify: bool = False,
    ) -> dict[str, list[Payload | None]]: ...

    def read_raw(
        self,
        indices: Indices,
        modalities: Sequence[str] | None = None,
        *,
        records: bool = False,
        verify: bool = False,
    ) -> RawBatch | dict[str, list[Payload | None]]:
        """Reads the stored bytes of samples, which are not decoded; one request to each file.

        Args:
            indices: repeats are fine, negative ones count from the end.
            modalities: names, also of types that are not known here; all by default. Nothing else is touched.
            records: whether to return metadata records too.
            verify: check the payloads' checksums, where the files have them, and that an absent one was not lost. This
                is always done if the dataset was opened with ``verify=True``.

        Returns:
            Modality name to n views of data, in the order of `indices`, None if absent; with `records`, n
            `Payload` of metadata record and data. Views of mapped files stay valid after `close`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there or, if checksums are checked, a payload does not have its own.
        """
        if records or verify:
            return self._raw.read_payloads(indices, modalities, records=records, verify=verify)
        return self._raw.read(indices, modalities)

    def stored(
        self, indices: Indices, modalities: Sequence[str] | None = None
    ) -> dict[str, list[StoredPayload | None]]:
        """Returns where the payloads of samples are, to be read in parts: a film by what is played of it.

        Args:
            indices: repeats are fine, negative ones count from the end.
            modalities: names, also of types that are not known here; all by default.

        Returns:
            Modality name to n payloads, None if absent. Nothing of their data has been read. They are valid after
            `close`. Their checksums are not verified.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
        """
        return self._raw.stored(indices, modalities)

    def stream_raw(
        self, batches: Iterable[Indices] | None = None, modalities: Sequence[str] | None = None
    ) -> Iterator[RawBatch]:
        """Reads the stored data bytes of one batch after the other, each as `read_raw`, and the next one ahead.

        Before a batch is yielded, the one after it is read: of local files this requests the pages that are not in
        memory, and waits for none of the data; of remote ones a thread makes the requests meanwhile. So the storage has
        something to do while a batch is used. `batches` is asked for one batch more than was yielded, before the first
        one too; its arrays may be used again as soon as it is asked for the next.

        Args:
            batches: indices of the samples of each batch, as for `read_raw`; may have no end. None for all samples in
                order, in blocks of up to some hundred samples.
            modalities: names to read, also of types that are not known here; all by default. Nothing else is touched.

        Raises:
            KeyError: no such modality; at once. What follows comes after the batches before it, and ends the stream.
            IndexError: no such sample.
            FormatError: a file is damaged there.
        """
        return self._raw.stream(batches, modalities)

    def verify(self) -> VerifyReport:
        """Reads everything and reports what is damaged, by sample and modality; also files against their manifest.

        Of a view the whole files, whose samples have other numbers there. Damage never raises, nor does a file of
        several that cannot be opened.
        """
        return self._files.verify()

    # --- life time ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the files, unless a view, or what this is a view of, still reads them, and joins the decoding threads.

        Fine twice. Arrays and views that were returned stay valid.
        """
        self._files.close()
        self._samples.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._files.files, self._files.selection, self._fields.given, self._fields.only)


def _reopen(
    files: PackedFiles,
    selection: npt.NDArray[np.int64] | None,
    fields: Mapping[str, Field],
    modalities: Sequence[str] | None,
) -> Dataset:
    return Dataset(OpenFiles(files, selection), fields=fields, modalities=modalities)
