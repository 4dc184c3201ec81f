"""The export of a dataset: shards planned by size, written by several processes, published one by one, then checked.

A shard is published as a whole, and noted in the folder `.export` of the target; an export that was interrupted resumes
with the missing shards. At the end every shard is opened by this project's reader of the format, and its keys,
names, sizes and checksums are compared with those of the samples. The same dataset and arguments give the same bytes.
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
from mm_assets.errors import ConfigError, SourceError, meant
from mm_assets.exports.base import Export, ExportColumn, ShardFacts
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
_WORK = ".export"  # folder of what has been done so far
_PLAN = f"{_WORK}/plan.json"
_SIZES_BLOCK = 4096  # samples whose sizes are read together
MAX_CHECK_BYTES = 2**32  # of a member that is read for the check: larger than any payload


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportProgress:
    """How far an export is.

    Attributes:
        num_shards: shards that are complete, or checked.
        num_samples: samples in them.
        num_bytes: bytes of their files.
        total_shards: all shards.
        total_samples: all samples.
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
        num_samples: samples in all.
        shards: one by one.
        num_reused: shards that an earlier run had completed.
        num_repeated: samples whose id another sample of their shard has; their keys end in ``~1`` and so on.
    """

    url: str
    format: str
    num_samples: int
    shards: Sequence[ShardFacts]
    num_reused: int
    num_repeated: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)


def resumed_export(store: Store) -> Mapping[str, Any] | None:
    """Prepares the folder of an export for `export`, unless it is complete.

    An interrupted export remains, to be completed. Anything else, such as what a deletion left, is deleted.

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
        dataset: a dataset or a view of one (`Dataset.select`, `select_modalities`, `split`, `filter`), or what
            `mm_assets.open` takes, local or remote.
        format: one of `EXPORTS`, such as ``webdataset``.
        out: folder or URL; empty, or with an interrupted export of the same samples, which is then completed.
        shard_bytes: a shard ends before the sample that would make its content larger.
        shard_samples: a shard has so many samples, the last one the rest; `shard_bytes` then has no effect.
        image_format: ``jpeg`` or ``png`` to encode images again; None copies them.
        quality: of JPEG, 1 to 100.
        workers: processes; above 1 a script needs ``if __name__ == "__main__"``, as with `multiprocessing`.
        storage_options: arguments for the file system of `out`.
        progress: called after each shard.

    Raises:
        ConfigError: an unknown format, a number out of range, or a folder with something else.
        EncodeError: the format cannot hold a sample.
        FormatError: the dataset is damaged.
        SourceError: the target cannot be written, or does not hold what was written.
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
    with ExitStack() as opened:
        if not isinstance(dataset, Dataset):
            dataset = opened.enter_context(open_dataset(dataset, verify=True))
        columns: Sequence[ExportColumn] = SampleFiles(dataset, transcoding).columns
        typed_columns = getattr(kind, "typed_columns", None)
        if typed_columns is not None:
            columns = typed_columns(dataset, columns)
        starts = _shard_starts(dataset, shard_bytes, shard_samples)
        options = dict(storage_options or {})
        task = _Task(dataset, format, os.fspath(out), options, transcoding, tuple(columns), tuple(starts))
        done = task.begin()
        shards = _Progress(done, len(starts) - 1, len(dataset), progress)
        missing = [number for number in range(len(starts) - 1) if number not in done]
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
            num_reused=len(done),
            num_repeated=repeated,
        )
        task.end(summary)
        return summary


class _Progress:
    """Counts the shards that are complete."""

    def __init__(
        self,
        done: Mapping[int, ShardFacts],
        total_shards: int,
        total_samples: int,
        report: Callable[[ExportProgress], object] | None,
        *,
        is_check: bool = False,
    ) -> None:
        self.facts = dict(done)
        self._total = total_shards, total_samples
        self._report = report
        self._is_check = is_check

    def add(self, facts: ShardFacts) -> None:
        self.facts[facts.number] = facts
        if self._report is not None:
            done = self.facts.values()
            self._report(
                ExportProgress(
                    num_shards=len(done),
                    num_samples=sum(shard.num_samples for shard in done),
                    num_bytes=sum(shard.num_bytes for shard in done),
                    total_shards=self._total[0],
                    total_samples=self._total[1],
                    is_check=self._is_check,
                )
            )


def _shard_starts(dataset: Dataset, shard_bytes: int, shard_samples: int | None) -> list[int]:
    """The index of the first sample of each shard, and the number of samples."""
    total = len(dataset)
    if shard_samples is not None:
        return [*range(0, total, shard_samples), total]
    starts, size = [0], 0
    for first in range(0, total, _SIZES_BLOCK):
        block = range(first, min(first + _SIZES_BLOCK, total))
        columns = dataset.stored(block).values()
        for row, index in enumerate(block):
            sample = sum(payload.size for column in columns if (payload := column[row]) is not None)
            if size and size + sample > shard_bytes:
                starts.append(index)
                size = 0
            size += sample
    return [*starts, total] if total else [0]


@dataclass(frozen=True, slots=True)
class _Task:
    """What a process needs to write or check any shard."""

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
        """What determines every byte of the export, as JSON."""
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
        """The versions of packed files that no manifest lists; the names of all others follow from their content."""
        if self.dataset.manifest is not None:
            return []
        options = self.dataset.storage_options
        return [describe_file(file, options).fingerprint for file in self.dataset.files]

    def begin(self) -> dict[int, ShardFacts]:
        """Notes the plan, or returns the shards that an interrupted export with the same plan has completed."""
        store, plan = self.store, self.plan()
        if store.found_bytes(SUMMARY) is not None:
            raise ConfigError("arguments", "out", f"{store.url} holds a complete export already: use another folder")
        noted = store.found_bytes(_PLAN)
        if noted is None:
            if store.sizes(""):
                detail = f"{store.url} holds other files: use an empty folder"
                raise ConfigError("arguments", "out", detail)
            store.write_bytes(_PLAN, plan)
            return {}
        if noted != plan:
            detail = "an interrupted export of other samples or settings: delete it, or use another folder"
            detail = f"{store.url} holds {detail}"
            raise ConfigError("arguments", "out", detail)
        names = store.sizes(_WORK)
        facts = (ShardFacts(**json.loads(store.read_bytes(name))) for name in names if name != _PLAN)
        return {shard.number: shard for shard in facts}

    def end(self, summary: ExportSummary) -> None:
        """Notes that the export is complete."""
        store = self.store
        value = {
            "format": summary.format,
            "num_samples": summary.num_samples,
            "shards": [asdict(s) for s in summary.shards],
        }
        store.write_bytes(SUMMARY, json.dumps(value, indent=1).encode())
        store.delete_all(list(store.sizes(_WORK)))
        if store.is_local:
            with suppress(OSError):  # a process that was killed left something there
                Path(store.path_of(_WORK)).rmdir()


def _run(
    task: _Task, work: Callable[[_Task, Any], ShardFacts], items: Sequence[Any], workers: int
) -> Iterator[ShardFacts]:
    """Yields the result of each item as it comes, from several processes if there is work for them."""
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


_task: _Task  # of a worker process, which gets it once


def _set_task(task: _Task) -> None:
    global _task
    _task = task


def _in_process(work: Callable[[_Task, Any], ShardFacts], item: Any) -> ShardFacts:
    return work(_task, item)


class _Digest:
    """SHA-256 of the names, sizes and checksums of files, sample by sample in any order of a sample's files."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._key: str | None = None
        self._lines: list[str] = []

    def add(self, key: str, suffix: str, data: Any) -> None:
        """Adds a file; those of a sample follow each other."""
        if key != self._key:
            self._flush()
            self._key = key
        self._lines.append(f"{key}\t{suffix}\t{len(data)}\t{crc32c(data):08x}\n")

    def _flush(self) -> None:
        self._sha256.update("".join(sorted(self._lines)).encode("utf-8", "surrogatepass"))
        self._lines = []

    def hexdigest(self) -> str:
        """The digest of all files."""
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
        comparable = getattr(task.kind, "comparable", None)
        digest, keys, repeated = _Digest(), set[str](), 0
        for sample in samples.samples(start, stop):
            key = sample.key if task.kind.KEEPS_KEYS else member_key(sample.key)
            if key in keys:
                repeated += 1
                key = next(other for n in range(1, len(keys) + 2) if (other := f"{key}~{n}") not in keys)
            keys.add(key)
            sample = sample._replace(key=key)
            if comparable is not None:
                sample = comparable(sample, task.columns)
            for file in sample.files():
                digest.add(key, file.suffix, memoryview(file.data).cast("B"))
            writer.write(sample)
        details = dict(writer.close())
        if repeated:
            details["repeated"] = repeated
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        size = 0
        for path in files:
            size += (folder / path).stat().st_size
            store.publish(folder / path, path)
    facts = ShardFacts(
        number=number,
        num_samples=len(keys),
        files=files,
        num_bytes=size,
        digest=digest.hexdigest(),
        details=details,
    )
    store.write_bytes(f"{_WORK}/{number}.json", json.dumps(asdict(facts)).encode())
    return facts


def _check_shard(task: _Task, facts: ShardFacts) -> ShardFacts:
    """Reads a shard by its format's source, and compares it with the samples that were written.

    Raises:
        SourceError: it differs.
    """
    url = task.store.url_of(task.shard_name(facts.number))
    digest, keys = _Digest(), set[str]()
    with SourceFile(url, task.storage_options) as file:
        for member, data in task.kind.source(file).payloads(wanted=lambda _: True, max_bytes=MAX_CHECK_BYTES):
            key = member.sample_key
            suffix = member.member[len(escape_name(key.encode())) + 1 :]
            keys.add(key)
            digest.add(key, suffix, data)
    if digest.hexdigest() != facts.digest:
        content = f"{counted(len(keys), 'sample')} of {facts.num_samples}"
        detail = f"does not read as it was written (it has {content}): delete {task.out} and export again"
        raise SourceError(url, detail)
    return facts
