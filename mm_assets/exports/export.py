"""Exports a dataset: plans shards by size, writes them in several processes, publishes each, and checks all of them.

A shard is published as a whole and recorded in the folder `.export` of the target; an interrupted export resumes with
the missing shards. At the end this project's source of the format reads every shard, and its keys, names, sizes and
checksums are compared with the samples. The same dataset and arguments give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mm_assets.dataset.card import dataset_card
from mm_assets.dataset.dataset import Dataset
from mm_assets.dataset.dataset import open as open_dataset
from mm_assets.errors import ConfigError, EncodeError, SourceError, meant
from mm_assets.exports.base import Export, ExportColumn, ExportSample, ShardFacts, ShardWriter
from mm_assets.exports.energon import EnergonExport
from mm_assets.exports.hf import HuggingFaceExport
from mm_assets.exports.lance import LanceExport
from mm_assets.exports.lerobot import LeRobotExport
from mm_assets.exports.litdata import LitDataExport
from mm_assets.exports.mds import MdsExport
from mm_assets.exports.parquet import ParquetExport
from mm_assets.exports.samples import SampleFiles, Transcoding, member_key
from mm_assets.exports.webdataset import WebDatasetExport
from mm_assets.formats import crc32c
from mm_assets.sources.member import escape_name
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import describe_file
from mm_assets.storage.store import Store
from mm_assets.summaries import counted

__all__ = ["EXPORTS", "SUMMARY", "ExportProgress", "ExportSummary", "export", "resumed_export"]

EXPORTS: Mapping[str, type[Export]] = {
    "webdataset": WebDatasetExport,
    "lance": LanceExport,
    "hf": HuggingFaceExport,
    "parquet": ParquetExport,
    "energon": EnergonExport,
    "mds": MdsExport,
    "litdata": LitDataExport,
    "lerobot": LeRobotExport,
}
"""Every format of exports by its name."""

SHARD_BYTES = 256 << 20
SUMMARY = "export.json"
SIZES_BATCH_SAMPLES = 4096
MAX_MEMBER_BYTES = 2**32  # larger than any payload
_WORK = ".export"  # folder with the plan and the facts of complete shards
_PLAN = f"{_WORK}/plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportProgress:
    """The progress of an export.

    Attributes:
        num_shards: number of shards that are complete or, during the check, checked.
        num_samples: number of samples in them.
        num_bytes: total size of their files in bytes.
        total_shards: number of all shards.
        total_samples: number of all samples.
        is_check: whether the shards are being checked.
    """

    num_shards: int
    num_samples: int
    num_bytes: int
    total_shards: int
    total_samples: int
    is_check: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """A complete export.

    Attributes:
        url: the folder.
        format: name of the format.
        num_samples: number of samples.
        shards: the shards in order.
        num_reused: number of shards that an interrupted export had completed.
        num_repeated: number of samples with the id of an earlier sample of their shard; their keys end in ``~1`` etc.
    """

    url: str
    format: str
    num_samples: int
    shards: Sequence[ShardFacts]
    num_reused: int
    num_repeated: int

    @property
    def num_bytes(self) -> int:
        """Total size of all shards in bytes."""
        return sum(shard.num_bytes for shard in self.shards)


def resumed_export(store: Store) -> Mapping[str, Any] | None:
    """Prepares a folder for `export`, unless it already contains a complete export.

    Keeps an interrupted export, which `export` completes, and deletes anything else, such as a partly deleted export.

    Returns:
        The content of `SUMMARY` if the export is complete, else None.
    """
    summary = store.found_bytes(SUMMARY)
    if summary is not None:
        return dict(json.loads(summary))
    if not store.exists(_PLAN):
        store.delete_folder("")
    return None


def export(
    dataset: Dataset | str | os.PathLike[str],
    format: str,
    out: str | os.PathLike[str],
    *,
    shard_bytes: int = SHARD_BYTES,
    shard_samples: int | None = None,
    image_format: str | None = None,
    quality: int = 95,
    workers: int = 1,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[ExportProgress], object] | None = None,
) -> ExportSummary:
    """Writes a dataset in another project's format.

    Args:
        dataset: a dataset or a view of one (`Dataset.select`, `select_modalities`, `split`, `filter`), or an argument
            of `mm_assets.open`: a path or URL.
        format: one of `EXPORTS`, such as ``webdataset``.
        out: an empty folder or URL, or one with an interrupted export of the same samples, which is completed.
        shard_bytes: maximum size of the content of a shard; a single larger sample is a shard of its own.
        shard_samples: number of samples in each shard except the last; replaces `shard_bytes`.
        image_format: ``jpeg`` or ``png`` to encode images again; None copies them.
        quality: JPEG quality, 1 to 100.
        workers: number of processes; above 1 a script needs ``if __name__ == "__main__"``, as with `multiprocessing`.
        storage_options: arguments for the file system of `out`.
        progress: called after each shard.

    Raises:
        ConfigError: the format is unknown, a number is out of range, or the folder contains something else.
        EncodeError: the format cannot store a sample.
        FormatError: the dataset is damaged.
        SourceError: the target cannot be written, or its content differs from the samples.
    """
    kind = EXPORTS.get(format)
    if kind is None:
        raise ConfigError(
            "arguments", "format", f"is {format!r}, expected one of {', '.join(EXPORTS)}{meant(format, EXPORTS)}"
        )
    for name, number in (("shard_bytes", shard_bytes), ("shard_samples", shard_samples), ("workers", workers)):
        if number is not None and number < 1:
            raise ConfigError("arguments", name, f"is {number}, expected at least 1")
    transcoding = None if image_format is None else Transcoding(image_format, quality)
    with ExitStack() as stack:
        if not isinstance(dataset, Dataset):
            dataset = stack.enter_context(open_dataset(dataset, verify=True))
        columns: Sequence[ExportColumn] = SampleFiles(dataset, transcoding).columns
        typed_columns = getattr(kind, "typed_columns", None)
        if typed_columns is not None:
            columns = typed_columns(dataset, columns)
        starts = _shard_starts(dataset, shard_bytes, shard_samples)
        options = dict(storage_options or {})
        task = _Task(dataset, format, os.fspath(out), options, transcoding, tuple(columns), tuple(starts))
        reused = task.begin()
        shards = _Progress(reused, len(starts) - 1, len(dataset), progress)
        missing = [number for number in range(len(starts) - 1) if number not in reused]
        for facts in _run(task, _write_shard, missing, workers):
            shards.add(facts)
        complete = [shards.facts[number] for number in range(len(starts) - 1)]
        kind.finish(task.store, columns, complete)
        card = dataset_card(dataset, shards=(format, [name for shard in complete for name in shard.files]))
        for name, content in card.files().items():
            if task.store.found_bytes(name) is None:  # the format may have a README of its own
                task.store.write_bytes(name, content)
        checked = _Progress({}, len(complete), len(dataset), progress, is_check=True)
        for facts in _run(task, _check_shard, complete, workers):
            checked.add(facts)
        repeated = sum(facts.details.get("repeated", 0) for facts in complete)
        summary = ExportSummary(
            url=task.store.url,
            format=format,
            num_samples=len(dataset),
            shards=complete,
            num_reused=len(reused),
            num_repeated=repeated,
        )
        task.end(summary)
        return summary


class _Progress:
    """Collects the complete shards, and reports each."""

    def __init__(
        self,
        facts: Mapping[int, ShardFacts],
        total_shards: int,
        total_samples: int,
        report: Callable[[ExportProgress], object] | None,
        *,
        is_check: bool = False,
    ) -> None:
        self.facts = dict(facts)
        self._total = total_shards, total_samples
        self._report = report
        self._is_check = is_check

    def add(self, facts: ShardFacts) -> None:
        self.facts[facts.number] = facts
        if self._report is not None:
            shards = self.facts.values()
            self._report(
                ExportProgress(
                    num_shards=len(shards),
                    num_samples=sum(shard.num_samples for shard in shards),
                    num_bytes=sum(shard.num_bytes for shard in shards),
                    total_shards=self._total[0],
                    total_samples=self._total[1],
                    is_check=self._is_check,
                )
            )


def _shard_starts(dataset: Dataset, shard_bytes: int, shard_samples: int | None) -> list[int]:
    """Returns the index of the first sample of each shard, and the number of samples."""
    total = len(dataset)
    if shard_samples is not None:
        return [*range(0, total, shard_samples), total]
    starts, size = [0], 0
    for first in range(0, total, SIZES_BATCH_SAMPLES):
        batch = range(first, min(first + SIZES_BATCH_SAMPLES, total))
        columns = dataset.stored(batch).values()
        for row, index in enumerate(batch):
            sample = sum(payload.size for column in columns if (payload := column[row]) is not None)
            if size and size + sample > shard_bytes:
                starts.append(index)
                size = 0
            size += sample
    return [*starts, total] if total else [0]


@dataclass(frozen=True, slots=True)
class _Task:
    """The arguments of an export, from which any process can write or check any shard."""

    dataset: Dataset
    format: str
    out: str
    storage_options: Mapping[str, Any]
    transcoding: Transcoding | None
    columns: tuple[ExportColumn, ...]
    starts: tuple[int, ...]

    @property
    def store(self) -> Store:
        return Store(self.out, self.storage_options)

    @property
    def kind(self) -> type[Export]:
        return EXPORTS[self.format]

    def shard_name(self, number: int) -> str:
        return self.kind.shard_name(number, len(self.starts) - 1)

    def plan(self) -> bytes:
        """Returns everything that determines the bytes of the export, as JSON."""
        selection = self.dataset.selection
        value = {
            "format": self.format,
            "files": list(self.dataset.files),
            "fingerprints": self._fingerprints(),
            "modalities": list(self.dataset.names),
            "selection": None if selection is None else hashlib.sha256(selection.tobytes()).hexdigest(),
            "images": self.transcoding,
            "starts": list(self.starts),
        }
        return json.dumps(value, indent=1).encode()

    def _fingerprints(self) -> list[str]:
        """Returns the versions of packed files without a manifest; other files have names that change with content."""
        if self.dataset.manifest is not None:
            return []
        options = self.dataset.storage_options
        return [describe_file(file, options).fingerprint for file in self.dataset.files]

    def begin(self) -> dict[int, ShardFacts]:
        """Writes the plan, or returns the complete shards of an interrupted export with the same plan."""
        store, plan = self.store, self.plan()
        earlier = store.found_bytes(_PLAN)
        detail = None
        if store.found_bytes(SUMMARY) is not None:
            detail = "contains a complete export: use another folder"
        elif earlier is None and store.sizes(""):
            detail = "contains other files: use an empty folder"
        elif earlier not in (None, plan):
            detail = "contains an interrupted export of other samples or settings: delete it, or use another folder"
        if detail is not None:
            raise ConfigError("arguments", "out", f"{store.url} {detail}")
        if earlier is None:
            store.write_bytes(_PLAN, plan)
            return {}
        names = store.sizes(_WORK)
        facts = (ShardFacts(**json.loads(store.read_bytes(name))) for name in names if name != _PLAN)
        return {shard.number: shard for shard in facts}

    def end(self, summary: ExportSummary) -> None:
        """Writes the summary, which marks the export as complete."""
        store = self.store
        value = {
            "format": summary.format,
            "num_samples": summary.num_samples,
            "shards": [asdict(s) for s in summary.shards],
        }
        store.write_bytes(SUMMARY, json.dumps(value, indent=1).encode())
        store.delete_all(list(store.sizes(_WORK)))
        if store.is_local:
            with suppress(OSError):  # a process that was killed left files there
                Path(store.path_of(_WORK)).rmdir()


def _run(
    task: _Task, work: Callable[[_Task, Any], ShardFacts], items: Sequence[Any], workers: int
) -> Iterator[ShardFacts]:
    """Yields the result of each item when it is complete, from several processes if there are several items."""
    if min(workers, len(items)) <= 1:
        yield from map(partial(work, task), items)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(workers, len(items)), context, initializer=_set_task, initargs=(task,)) as pool:
        try:
            for future in as_completed([pool.submit(_in_process, work, item) for item in items]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_task: _Task  # of a worker process, which receives it once


def _set_task(task: _Task) -> None:
    global _task
    _task = task


def _in_process(work: Callable[[_Task, Any], ShardFacts], item: Any) -> ShardFacts:
    return work(_task, item)


class _Digest:
    """Hashes the names, sizes and checksums of files; the order of the files of one sample does not matter."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._key: str | None = None
        self._lines: list[str] = []

    def add(self, key: str, suffix: str, data: Any) -> None:
        """Adds a file; the files of a sample must be consecutive."""
        if key != self._key:
            self._flush()
            self._key = key
        self._lines.append(f"{key}\t{suffix}\t{len(data)}\t{crc32c(data):08x}\n")

    def _flush(self) -> None:
        self._sha256.update("".join(sorted(self._lines)).encode("utf-8", "surrogatepass"))
        self._lines = []

    def hexdigest(self) -> str:
        """Returns the SHA-256 of all files."""
        self._flush()
        return self._sha256.hexdigest()


def _write_shard(task: _Task, number: int) -> ShardFacts:
    """Writes and publishes one shard."""
    store, name = task.store, task.shard_name(number)
    samples = SampleFiles(task.dataset, task.transcoding)
    beside = Path(store.path_of(_WORK)) if store.is_local else None
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"shard-{number}-", dir=beside) as scratch:
        folder = Path(scratch)
        start, stop = task.starts[number : number + 2]
        writer = task.kind.writer(folder, name, task.columns, stop - start)
        try:
            digest, num_repeated = _write_samples(task, writer, samples.samples(start, stop))
            details = dict(writer.close())
        except BaseException:
            writer.abort()
            raise
        if num_repeated:
            details["repeated"] = num_repeated
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        size = 0
        for path in files:
            size += (folder / path).stat().st_size
            store.publish(folder / path, path)
    facts = ShardFacts(
        number=number,
        num_samples=stop - start,
        files=files,
        num_bytes=size,
        digest=digest,
        details=details,
    )
    store.write_bytes(f"{_WORK}/{number}.json", json.dumps(asdict(facts)).encode())
    return facts


def _write_samples(task: _Task, writer: ShardWriter, samples: Iterator[ExportSample]) -> tuple[str, int]:
    """Writes the samples of a shard; returns the digest of their files, and how many ids are repeated."""
    comparable = getattr(task.kind, "comparable", None)
    digest, keys, num_repeated = _Digest(), set[str](), 0
    for sample in samples:
        key = member_key(sample.key)
        if key in keys:
            num_repeated += 1
            key = next(other for n in range(1, len(keys) + 2) if (other := f"{key}~{n}") not in keys)
        keys.add(key)
        try:
            written = sample._replace(key=key)
            if comparable is not None:
                written = comparable(written, task.columns)
            for file in written.files():
                digest.add(key, file.suffix, memoryview(file.data).cast("B"))
            writer.write(written)
        except EncodeError as error:
            raise EncodeError(f"sample {key!a}: {error}") from error
    return digest.hexdigest(), num_repeated


def _check_shard(task: _Task, facts: ShardFacts) -> ShardFacts:
    """Reads a shard with its format's source, and compares it with the samples that were written.

    Raises:
        SourceError: it differs.
    """
    url = task.store.url_of(task.shard_name(facts.number))
    digest, keys = _Digest(), set[str]()
    with SourceFile(url, task.storage_options) as file:
        for member, data in task.kind.source(file).payloads(wanted=lambda _: True, max_bytes=MAX_MEMBER_BYTES):
            key = member.sample_key
            suffix = member.member[len(escape_name(key.encode())) + 1 :]
            keys.add(key)
            digest.add(key, suffix, data)
    if digest.hexdigest() != facts.digest:
        number = f"{counted(len(keys), 'sample')} of {facts.num_samples}"
        detail = f"differs from the exported samples (it has {number}): delete {task.store.url} and export again"
        raise SourceError(url, detail)
    return facts
