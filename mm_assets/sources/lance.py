"""Lance datasets: a fragment of the newest version is a shard, and a row of it a sample.

A dataset is a folder with `_versions/`, the data files `data/*.lance` and `_deletions/`. A shard is the first data file
of a fragment; its further data files and its deletion file belong to it. `arrow_rows` says which members a row has. A
blob is a range of a data file, or of a file beside it, and is read as one. Everything else is decoded by Lance in a
process of its own (see `lance_reader`), so that no file can end this one, or take more memory than a limit.
"""

from __future__ import annotations

import atexit
import json
import os
import posixpath
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from mm_assets.errors import MissingExtraError, ShardError, SourceError, first_line
from mm_assets.sources.arrow_rows import VALUE_ERRORS, ArrowRows
from mm_assets.sources.entries import Entry, EntrySource, Scan
from mm_assets.sources.head import HEAD_BYTES, foreign_file
from mm_assets.sources.lance_manifest import CLONE_ADVICE, MAX_MANIFEST_BYTES, read_fragments, version_of
from mm_assets.sources.row_members import Cell, Row
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import FolderFiles, ShardFile
from mm_assets.storage.urls import is_local, local_path

__all__ = ["LanceSource"]

BATCH_ROWS = 64
BATCH_BYTES = 16 << 20  # of the rows that are decoded at a time, beside a page
MAX_READER_BYTES = 4 << 30  # of memory of the process that decodes
MAX_OPEN_BLOB_FILES = 8

_READER = Path(__file__).with_name("lance_reader.py")
_ROW_ADDRESS = "_rowaddr"  # the fragment, and in the lower 32 bits the row in it, deleted ones included
_INLINE, _PACKED, _DEDICATED = 0, 1, 2  # kinds of blob: in the data file, or in a file beside it; others are outside
_S3 = ("s3://", "s3a://")
_S3_ERROR = "Generic S3 error"  # in messages of Lance, when the storage does not answer
_OPTIONS = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint",
    "region_name": "aws_region",
    "aws_access_key_id": "aws_access_key_id",
    "aws_secret_access_key": "aws_secret_access_key",
    "aws_session_token": "aws_session_token",
}
"""Lance's names of options of s3fs and of its `client_kwargs`."""
_TUNING = ("cache", "block_size", "concurrency", "config_kwargs", "asynchronous", "loop")
"""Parts of the names of options that change neither the place nor the rights."""


class LanceSource(EntrySource):
    """A fragment of a Lance dataset, whose rows are samples; see `mm_assets.sources.base.Source`.

    Only blobs in the shard itself have a byte range.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".lance",)
    MARKS: ClassVar[tuple[str, ...]] = ("_versions/*.manifest",)
    seekable = False
    text_encoding = "utf-8"

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns False: the magic number of a data file is at its end."""
        return False

    @classmethod
    def shards_in(cls, files: FolderFiles) -> Sequence[ShardFile] | None:
        """Returns the first data file of each fragment of the newest version.

        Raises:
            ShardError: its manifest is damaged or too large, or a file that it names is missing.
            SourceError: the storage failed.
        """
        versions = {version: file for file in files if (version := version_of(file.url)) is not None}
        if not versions:
            return None
        newest = versions[max(versions)]
        if newest.size > MAX_MANIFEST_BYTES:
            detail = f"has {newest.size} bytes, at most {MAX_MANIFEST_BYTES} are read"
            raise ShardError(newest.url, detail, byte_offset=0)
        folder = newest.url.rpartition("_versions/")[0]
        by_name = {file.url.removeprefix(folder): file for file in files}
        shards = []
        for fragment in read_fragments(newest.url, files.read(newest)):
            for name in (fragment.shard, *fragment.others):
                if name not in by_name:
                    detail = f"names the file {name}, which is missing: restore it, or go back to an earlier version"
                    raise ShardError(newest.url, detail, byte_offset=0)
            description = ShardFile(url="", size=0, fingerprint=fragment.digest, modified=None)
            others = [by_name[name] for name in fragment.others]
            shards.append(by_name[fragment.shard].described_by([description, *others]))
        return shards

    def _entries(self, scan: Scan) -> Iterator[Entry]:
        rows = _LanceRows(self.file, pa.schema([]), {})

        def salvage(detail: str) -> Entry:
            scan.salvage(self.file.url, detail, byte_offset=0, byte_size=self.file.size)
            return rows.damage_entry(f"row {rows.number} and after", self.file.size, detail)

        try:
            with self._reader() as reader:
                rows = _LanceRows(self.file, reader.schema, json.loads(reader.schema.metadata[b"mm_assets"]))
                for batch in reader:
                    try:
                        batch.validate(full=True)
                        yield from rows.of_batch(batch)
                    except VALUE_ERRORS as error:
                        yield salvage(f"row {rows.number} or after cannot be read: {first_line(error)}")
        except ShardError as error:
            if scan.on_damaged_shard == "fail":
                raise
            yield salvage(error.detail)

    @contextmanager
    def _reader(self) -> Iterator[pa.RecordBatchReader]:
        """Yields a reader of the rows of the fragment, which another process decodes.

        Raises:
            ShardError: the fragment cannot be read.
            SourceError: the storage failed, or Lance does not read from it.
            MissingExtraError: Lance is not installed.
        """
        if find_spec("lance") is None:
            raise MissingExtraError("a Lance dataset", "lance")
        folder, _, name = self.file.location.rpartition("/data/")
        if not folder or "/" in name:
            detail = "is not in the folder data of a Lance dataset: use the dataset's folder, which has _versions"
            raise ShardError(self.file.url, detail, byte_offset=0)
        dataset, options = _place(folder, self.file)
        request = {
            "dataset": dataset,
            "options": options,
            "shard": name,
            "batch_rows": BATCH_ROWS,
            "batch_bytes": BATCH_BYTES,
            "max_bytes": MAX_READER_BYTES,
            "clone_advice": CLONE_ADVICE,
        }
        decoder = _Decoder.take()
        cause: Exception | None = None
        try:
            yield decoder.start(request)
            if decoder.is_done():
                return
        except (pa.ArrowInvalid, OSError) as error:  # the stream ends within a message
            cause = error
        except BaseException:
            decoder.kill()
            raise
        raise self._failure(*decoder.failure()) from cause

    def _failure(self, status: int, text: str) -> SourceError:
        """Returns the error of a process that could not read the fragment."""
        lines = [
            line for line in text.splitlines() if line.strip() and not line.startswith(("note:", "stack backtrace"))
        ]
        message = (lines or ["it wrote no message"])[-1].partition(", /")[0]  # without a place in Lance's code
        if self.file.location.startswith(_S3) and _S3_ERROR in message:
            return SourceError(self.file.url, f"cannot be read: {message}")
        if status == -signal.SIGKILL:  # as the system does to a process when memory is short
            return SourceError(self.file.url, "the process that decodes it was killed: free memory, and run this again")
        foreign = foreign_file(self.file.read(0, min(HEAD_BYTES, self.file.size)))
        if foreign is not None:
            return ShardError(self.file.url, foreign.as_not("a Lance file"), byte_offset=0)
        signal_note = f" (its process ended with {status})" if status < 0 else ""
        return ShardError(self.file.url, f"Lance cannot read it{signal_note}: {message}", byte_offset=0)


def _place(folder: str, file: SourceFile) -> tuple[str, dict[str, str] | None]:
    """Returns a dataset's place and its storage options as Lance knows them.

    Raises:
        SourceError: Lance does not read from such a storage, or an option has no counterpart.
    """
    if is_local(folder):
        return str(local_path(folder)), None
    advice = "copy the dataset to a local folder or to an S3 bucket"
    if not folder.startswith(_S3):
        raise SourceError(file.url, f"is in a storage that Lance datasets are not read from: {advice}")
    settings: dict[str, Any] = dict(file.storage_options or {})
    settings |= settings.pop("client_kwargs", None) or {}
    options: dict[str, str] = {}
    for name, value in settings.items():
        if name in _OPTIONS and isinstance(value, str):
            options[_OPTIONS[name]] = value
        elif name == "anon":
            options["aws_skip_signature"] = str(bool(value)).lower()
        elif value is not None and not any(part in name for part in _TUNING):
            detail = (
                f"`storage_options` have {name}, which has no counterpart for Lance datasets: leave it out, or {advice}"
            )
            raise SourceError(file.url, detail)
    if options.get("aws_endpoint", "").startswith("http://"):
        options["allow_http"] = "true"
    return f"s3://{folder.partition('://')[2]}", options


class _Decoder:
    """A process that decodes one fragment after the other: it takes longer to start than to decode a small one."""

    _idle: ClassVar[dict[int, _Decoder]] = {}  # by the process that started it, since a forked one shares its pipes

    def __init__(self) -> None:
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115  # outlives this block: `kill` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_READER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env={**os.environ, "RUST_BACKTRACE": "0", "LANCE_CPU_THREADS": "2"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._stream = self._process.stdin, self._process.stdout

    @classmethod
    def take(cls) -> _Decoder:
        """Returns an idle process, or starts one."""
        idle = cls._idle.pop(os.getpid(), None)
        if idle is not None and idle._process.poll() is not None:
            idle.kill()
            idle = None
        return idle or cls()

    def start(self, request: Mapping[str, Any]) -> pa.RecordBatchReader:
        """Returns the batches of a fragment; `OSError` or `ArrowInvalid` if the process ends."""
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        return pa.ipc.open_stream(self._stream)

    def is_done(self) -> bool:
        """Returns whether the process wrote all batches; if so, it is idle now."""
        if self._stream.read(1) != b"\n":
            return False
        if other := self._idle.pop(os.getpid(), None):
            other.kill()
        self._idle[os.getpid()] = self
        return True

    def failure(self) -> tuple[int, str]:
        """Returns the exit status and the messages of a process that ends because of an error."""
        self._stream.close()
        with suppress(OSError):  # for a request that the process did not read
            self._requests.close()
        status = self._process.wait()
        self._messages.seek(0)
        text = self._messages.read().decode(errors="replace")
        self.kill()
        return status, text

    def kill(self) -> None:
        """Ends the process."""
        with self._messages, self._process:
            self._process.kill()


@atexit.register
def _end_idle() -> None:
    if (idle := _Decoder._idle.pop(os.getpid(), None)) is not None:
        idle.kill()


class _LanceRows(ArrowRows):
    """Makes the members of the rows of a fragment.

    Args:
        file: the first data file.
        schema: of the rows, which have descriptions of blobs in their place.
        blobs: the data file with the blobs of each column of blobs; None if no data file has them.
    """

    def __init__(self, file: SourceFile, schema: pa.Schema, blobs: Mapping[str, str | None]) -> None:
        fields = [
            pa.field(field.name, pa.large_binary()) if field.name in blobs else field
            for field in schema
            if field.name != _ROW_ADDRESS
        ]
        self._name = posixpath.basename(file.url)
        super().__init__(file.url, self._name.removesuffix(".lance"), pa.schema(fields))
        self._file = file
        self._blobs = blobs
        self._beside = lru_cache(MAX_OPEN_BLOB_FILES)(file.beside)

    def _rows(self, batch: pa.RecordBatch) -> Iterator[Row]:
        addresses = batch.column(_ROW_ADDRESS).to_pylist()
        for row, address in zip(super()._rows(batch), addresses, strict=True):
            self.number = address & 0xFFFFFFFF
            yield row

    def _cells(self, name: str, column: pa.Array, number: int) -> Cell | Sequence[Cell | None] | None:
        if name not in self._blobs:
            return super()._cells(name, column, number)
        value = column[number].as_py()
        if value is None or (value["size"] == 0 and value["position"] and "kind" not in value):  # before Lance 2.1 null
            return None
        kind, start, size = value.get("kind", _INLINE), value["position"], value["size"]
        if kind not in (_INLINE, _PACKED, _DEDICATED):
            return Cell(0, b"", None, value["blob_uri"])
        data_file = self._blobs[name]
        if data_file is None or data_file != posixpath.basename(data_file):
            raise ValueError(f"column {name!a} has its blobs in {data_file!a}, expected a name in the folder data")
        file = self._file
        if kind != _INLINE:  # the file's name has the bits of its number from the lowest on
            bits = f"{value['blob_id']:032b}"[::-1]
            file = self._beside(f"{data_file.removesuffix('.lance')}/{bits}.blob")
        elif data_file != self._name:
            file = self._beside(data_file)
        if start + size > file.size:
            raise ValueError(f"a blob of column {name!a} is at byte {start} of {file.url}, which has {file.size} bytes")
        is_named = self._has_members or name not in self._labels
        head = b"" if is_named else file.read(start, min(size, HEAD_BYTES))
        return Cell(
            size, head, partial(file.read, start, size), byte_offset=start if file is self._file and size else None
        )
