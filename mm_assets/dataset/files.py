"""Which packed files make up a dataset, and opening one of them.

A dataset is one file, the files of a manifest, those of a folder, or a list, each local or behind any fsspec URL. A
file with another size or number of samples than listed is refused, and all files of a dataset have the same fields. A
file for which the manifest lists streams is opened together with them, as one reader of all their modalities.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from mm_assets.dataset.manifest import (
    FORMATS,
    PACKED_NAME,
    WRITER_LIST,
    Manifest,
    PackedFile,
    location_below,
    parse_manifest,
)
from mm_assets.errors import ConfigError, CorruptError, SchemaMismatchError, SourceError, TruncatedError
from mm_assets.fields import complete_config
from mm_assets.formats import ByteSource, JoinedReader, MappedFile, ModalitySpec, MstrReader, MultReader, open_reader
from mm_assets.formats.byte_source import drop_pages

if TYPE_CHECKING:
    from mm_assets.storage.disk_cache import BlockCache

__all__ = ["MAX_OPEN", "NUM_REQUESTS", "PackedFiles", "Reader", "tables"]


def _most_files() -> int:
    """Readers that may be open: a local one has two descriptors, and half of the process's are left to others."""
    # Linux limits the mappings of a process to 65,530, and a reader takes up to ten of them.
    most = 2048
    try:
        import resource
    except ImportError:  # Windows, where a mapping takes no descriptor
        return most
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if allowed == resource.RLIM_INFINITY else max(64, min(allowed // 4, most))


MAX_OPEN = _most_files()

NUM_REQUESTS = 16  # remote files that are asked at a time; each joins its ranges into few

_HASH_BLOCK = 16 << 20  # bytes of a file held while its digest is computed
_MANIFEST = "manifest.json"  # a folder that has one is opened by it

FileReader = MultReader | MstrReader
Reader = FileReader | JoinedReader


class PackedFiles:
    """The files of a dataset, in order.

    Args:
        path: a packed file, a manifest (``.json``), a folder, or a list of packed files; paths or fsspec URLs.
        storage_options: arguments for the URLs' file system.
        modalities: what a file without our tail holds.
        verify: checksums; as `mm_assets.open` says.
        format: which files to take, ``mult`` or ``mstr``; None as `mm_assets.open` says.
        cache: for what is read of remote files.

    Attributes:
        name: of the dataset, for messages: the path, or the first of a list.
        manifest: the manifest, or None where there is none.
        storage_options: as given.
        entries: the files.
        verify: whether reads that decode check what they read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        storage_options: Mapping[str, Any] | None = None,
        modalities: Sequence[ModalitySpec] = (),
        verify: bool | None = None,
        format: str | None = None,
        cache: BlockCache | None = None,
    ) -> None:
        if format is not None and format not in FORMATS:
            raise ConfigError("arguments", "format", f"found {format!r}, expected {' or '.join(FORMATS)}")
        self._path: str | tuple[str, ...]
        if isinstance(path, str | os.PathLike):
            self._path = self.name = os.fspath(path)
        else:
            self._path = tuple(os.fspath(one) for one in path)
            if not self._path:
                raise ConfigError("arguments", "path", "found an empty list, expected packed files")
            self.name = self._path[0] + (f" and {len(self._path) - 1} more" if len(self._path) > 1 else "")
        self.storage_options = storage_options
        self._modalities = tuple(modalities)
        self.verify = verify is not False
        self._verify_raw = verify is True
        self._format = format
        self._cache = cache
        self._opened: dict[int, Reader] = {}
        self.manifest: Manifest | None = None
        self.entries: tuple[PackedFile, ...] = self._find()
        self.any_remote = any(_local(file.location) is None for file in self.entries)

    def __len__(self) -> int:
        """Files."""
        return len(self.entries)

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process has the same files that were found here, even if others were published since.
        return {**self.__dict__, "_opened": {}}

    # --- which files --------------------------------------------------------------------------------------------------

    def _find(self) -> tuple[PackedFile, ...]:
        if isinstance(self._path, tuple):
            return self._open_all(self._path)
        if self._path.endswith(".json"):
            return self._list_manifest(self._path)
        names = self._names_in(self._path)
        if names is None:
            return self._open_all((self._path,))
        folder = self._path.rstrip("/") if self._path.strip("/") else "/"
        if _MANIFEST in names:
            return self._list_manifest(f"{folder}/{_MANIFEST}")
        return self._open_all([location_below(folder, name) for name in self._choose(names)])

    def _names_in(self, location: str) -> list[str] | None:
        """The names in a folder; None where the location is not a folder."""
        path = _local(location)
        if path is not None:
            return os.listdir(path) if os.path.isdir(path) else None
        if location.endswith(tuple("." + form for form in FORMATS)):
            return None  # a file by its name: this saves a request
        from mm_assets.storage.store import Store

        store = Store(location, self.storage_options)
        try:
            return list(store.sizes("")) if store.fs.isdir(store.path_of("")) else None
        except OSError as error:
            raise SourceError(location, f"cannot be listed: {error}") from error

    def _choose(self, names: Sequence[str]) -> list[str]:
        """The packed files of one format among the names in a folder, sorted; hidden files never count."""
        found = {form: sorted(n for n in names if n.endswith("." + form) and n[0] != ".") for form in FORMATS}
        formats = [form for form in FORMATS if found[form]] if self._format is None else [self._format]
        if len(formats) > 1:
            detail = f"{self.name} holds both {' and '.join(formats)} files: say which to read"
            raise ConfigError("arguments", "format", detail)
        chosen = found[formats[0]] if formats else []
        if not chosen and any(map(WRITER_LIST.fullmatch, names)):
            advice = "close its writer, or continue it with resume=True; of several ranks, call mm_assets.merge"
            raise SourceError(self.name, f"has no manifest.json: it is not complete: {advice}")
        if not chosen:
            raise SourceError(self.name, f"holds no .{' or .'.join([self._format] if self._format else FORMATS)} file")
        shards: dict[str, str] = {}
        for name in chosen:
            versioned = PACKED_NAME.fullmatch(name)
            if versioned and shards.setdefault(versioned[1], name) != name:
                detail = f"holds two versions of one shard, {shards[versioned[1]]} and {name}: open the manifest"
                raise SourceError(self.name, detail)
        return chosen

    def _list_manifest(self, location: str) -> tuple[PackedFile, ...]:
        self.manifest = _read_manifest(location, self.source(location), form=self._format)
        return self.manifest.files

    def _open_all(self, locations: Sequence[str]) -> tuple[PackedFile, ...]:
        """Files without a list of what they hold: each is opened now, and the first ones stay open."""
        entries: list[PackedFile] = []
        try:
            files = [(location, None) for location in locations]
            with contextlib.closing(self._open_each(files)) as readers:
                for number, (location, reader) in enumerate(zip(locations, readers, strict=True)):
                    if number < MAX_OPEN:
                        self._opened[number] = reader
                    try:
                        self._check_format(location, reader)
                        self.check_alike(self._opened[0], reader)
                        entries.append(PackedFile(location=location, num_samples=len(reader)))
                    finally:
                        if number not in self._opened:
                            reader.close()
        except BaseException:
            for opened in self.take_opened().values():
                opened.close()
            raise
        return tuple(entries)

    def _check_format(self, location: str, reader: Reader) -> None:
        if self._format is not None and reader.format.lower() != self._format:
            raise SchemaMismatchError(f"{location}: found a {reader.format} file, expected {self._format}")

    def _open_each(self, files: Sequence[tuple[str, int | None]], *, cached: bool = True) -> Generator[FileReader]:
        """Yields readers of files, given as location and size, in order; the next remote ones are opened meanwhile."""
        tasks = [partial(self._open_reader, location, size, cached=cached) for location, size in files]
        if len(tasks) == 1 or all(_local(location) is not None for location, _ in files):
            return (task() for task in tasks)
        return _run_ahead(tasks)

    def is_remote(self, number: int) -> bool:
        """Whether reading a file takes requests."""
        return self.any_remote and _local(self.entries[number].location) is None

    # --- opening ------------------------------------------------------------------------------------------------------

    def take_opened(self) -> dict[int, Reader]:
        """The readers, by number, that finding the files has opened; they are the caller's now."""
        opened, self._opened = self._opened, {}
        return opened

    def open(self, number: int, *, cached: bool = True) -> Reader:
        """Open one file; a remote one through the cache unless `cached` is False.

        Raises:
            FormatError: it is damaged, or not the one that was listed.
            SourceError: a file of the manifest, or a remote one, cannot be read.
            OSError: a local file cannot be read.
        """
        file = self.entries[number]
        files = [(file.location, file.size), *((stream.location, stream.size) for stream in file.streams)]
        readers: list[FileReader] = []
        try:
            try:
                with contextlib.closing(self._open_each(files, cached=cached)) as opened:
                    for reader in opened:
                        readers.append(reader)
            except (OSError, SourceError) as error:
                if self.manifest is None:
                    raise
                location = files[len(readers)][0]
                reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{location}: ")
                detail = f"{location} cannot be read: {reason.removeprefix('cannot be read: ')}"
                raise SourceError(self.name, f"partition {file.partition!r}: {detail}") from error
            packed, *streams = readers
            if len(packed) != file.num_samples:
                listed = "it had" if self.manifest is None else f"{self.name} lists"
                detail = f"does not hold the samples that {listed}"
                raise CorruptError(file.location, detail, found=len(packed), expected=file.num_samples)
            if not streams:
                return packed
            names = [stream.name for stream in file.streams]
            return JoinedReader(packed, list(zip(names, streams, strict=True)))
        except BaseException:
            for reader in readers:
                reader.close()
            raise

    def check_alike(self, first: Reader, other: Reader) -> None:
        """Refuse, with `SchemaMismatchError`, a file with other fields than the first."""
        if first is other or _signature(first) == _signature(other):  # nearly always
            return
        if _signature(first, complete=True) != _signature(other, complete=True):
            detail = f"{first.path} has {_words(first)}; {other.path} has {_words(other)}"
            raise SchemaMismatchError(f"{self.name}: its files differ in fields: {detail}")

    def digest(self, location: str) -> str:
        """Returns the SHA-256 of a file as it is now, hexadecimal, computed in blocks."""
        digest = hashlib.sha256()
        source = self.source(location, cached=False)
        try:
            for start in range(0, source.size, _HASH_BLOCK):
                size = min(_HASH_BLOCK, source.size - start)
                digest.update(source.view_many([(start, size)])[0])
                drop_pages(source, start, size)
        finally:
            source.close()
        return digest.hexdigest()

    def source(self, location: str, *, cached: bool = True) -> ByteSource:
        """A file of the dataset, to be read by ranges; errors as `open`."""
        return _open_source(location, self.storage_options, self._cache if cached else None)

    def _open_reader(self, location: str, size: int | None = None, *, cached: bool = True) -> FileReader:
        source = self.source(location, cached=cached)
        try:
            if size is not None and source.size != size:
                detail = f"is not of the size that {self.name} lists"
                raise CorruptError(location, detail, found=source.size, expected=size)
            try:
                return open_reader(source, verify=self._verify_raw)
            except TruncatedError:
                if not self._modalities:
                    raise
                # Another writer's file has no tail; with modalities given, the reader distinguishes that from damage.
                return open_reader(source, modalities=self._modalities, verify=self._verify_raw)
        except BaseException:
            source.close()
            raise


def tables(path: str | os.PathLike[str], name: str, *, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Returns the Parquet files of one table of a dataset version, for Polars, Spark, DuckDB or `datasets`.

    A folder of tables also has the files of other versions. No file is opened but the manifest.

    Args:
        path: path or URL of a manifest (``.json``), or of the dataset's folder for the newest version.
        name: the table, such as ``filtered_rows``.
        storage_options: arguments for the URL's file system.

    Returns:
        paths or URLs, one per partition, in the order of the dataset's samples.

    Raises:
        ConfigError: the manifest lists no such table; the message names those it lists.
        FormatError: it is not a manifest, is damaged, or of another version.
        SourceError: it is remote and cannot be read.
        OSError: it is local and cannot be read.
    """
    location = os.fspath(path)
    if location and not location.endswith(".json"):
        location = location_below(location.rstrip("/"), _MANIFEST)
    return _read_manifest(location, _open_source(location, storage_options)).tables(name)


def _read_manifest(location: str, source: ByteSource, *, form: str | None = None) -> Manifest:
    try:
        content = [bytes(source.view_many([(0, source.size)])[0]) if source.size else b""]
    finally:
        source.close()
    # Popped: nothing here holds the bytes while they are parsed.
    return parse_manifest(content.pop(), name=location.replace(os.sep, "/"), form=form)


def _open_source(location: str, options: Mapping[str, Any] | None, cache: BlockCache | None = None) -> ByteSource:
    path = _local(location)
    if path is not None:
        return MappedFile(path)
    from mm_assets.storage.remote import RemoteFile

    return RemoteFile(location, options, cache)


def _run_ahead(tasks: Sequence[Callable[[], FileReader]]) -> Generator[FileReader]:
    """The readers that tasks open, in order, up to `NUM_REQUESTS` ahead; those that are not taken are closed."""
    with ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="mm_assets-open") as executor:
        futures = [executor.submit(task) for task in tasks[:NUM_REQUESTS]]
        taken = 0
        try:
            for taken in range(1, len(tasks) + 1):
                reader = futures[taken - 1].result()
                if len(futures) < len(tasks):
                    futures.append(executor.submit(tasks[len(futures)]))
                yield reader
        finally:
            for future in futures[taken:]:
                if not future.cancel():
                    with contextlib.suppress(Exception):  # the first error is reported
                        future.result().close()


def _local(location: str) -> str | None:
    """The path of a location of the local file system; None of any other."""
    if "://" not in location:
        return location
    from mm_assets.storage.urls import is_local, local_path

    return str(local_path(location)) if is_local(location) else None


def _signature(reader: Reader, *, complete: bool = False) -> dict[str, tuple[Any, ...]]:
    """The properties that the files of one dataset share; the order of modalities may differ.

    `complete` adds the defaults of settings that an earlier release did not write.
    """
    found = {}
    for spec in reader.modalities:
        config = complete_config(spec.type_name, spec.config) if complete else dict(spec.config)
        found[spec.name] = (spec.type_name, spec.type_id, spec.metadata_size, config)
    return found


def _words(reader: Reader) -> str:
    return ", ".join(
        f"{spec.name}: {spec.type_name or spec.type_id}({dict(spec.config)})" for spec in reader.modalities
    )
