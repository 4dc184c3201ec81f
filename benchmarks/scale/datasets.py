"""Datasets of very many published partitions, made from one that was run: only names, and keys in JSON, differ.

On a local disk the files of the others are links to those of the first; on the S3 server of `s3.py` they are made from
it when they are read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import pickle
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mm_assets.pipeline.chain import PUBLISHED, TABLES
from mm_assets.pipeline.partition.run import PartitionReport, run_partition
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Partition
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions
from mm_assets.storage.urls import filesystem

__all__ = ["Local", "Place", "Remote", "Template", "declared", "key_of", "make_dataset", "publish_one", "withdraw_one"]

SAMPLES = 30
_FOLDERS = (*TABLES, "packed", "published", "records")


def shard_bytes() -> bytes:
    """A shard of small samples."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for number in range(SAMPLES):
            content = f"the text of sample {number}".encode()
            info = tarfile.TarInfo(f"{number:06d}.txt")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return written.getvalue()


def key_of(number: int) -> str:
    """The key of a partition; all have as many characters, so that files which name them have the same size."""
    return f"p{number:07d}"


FIRST = key_of(0)


class Place(Protocol):
    """Where a dataset is.

    Attributes:
        settings: those of its declaration.
    """

    settings: Mapping[str, Any]

    def add_shards(self, keys: Sequence[str]) -> None:
        """Adds the shards of partitions."""

    def change_shards(self, keys: Sequence[str]) -> None:
        """Replaces shards of partitions by others of the same samples."""

    def publish(self, dataset: DatasetStore, partitions: Iterable[Partition]) -> None:
        """Adds the files of registered partitions as those of the first, whose run is at its end."""


class Local:
    """A folder of this machine.

    Args:
        folder: empty, or as it was left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._links: dict[Path, _Links] = {}
        self.settings = {"shards": f"{folder}/in/*.tar", "root": f"{folder}/root"}

    def add_shards(self, keys: Sequence[str]) -> None:
        """As `Place.add_shards`."""
        (self._folder / "in").mkdir(parents=True, exist_ok=True)
        first = self._folder / "in" / f"{FIRST}.tar"
        if not first.exists():
            first.write_bytes(shard_bytes())
        for key in keys:
            if key != FIRST:
                self._linked(first, first.with_name(f"{key}.tar"))

    def change_shards(self, keys: Sequence[str]) -> None:
        """As `Place.change_shards`."""
        for key in keys:
            path = self._folder / "in" / f"{key}.tar"
            path.unlink()
            path.write_bytes(shard_bytes() + bytes(512))

    def publish(self, dataset: DatasetStore, partitions: Iterable[Partition]) -> None:
        """As `Place.publish`."""
        root = Path(dataset.store.path_of(""))
        made = [path for name in _FOLDERS for path in (root / name).glob(f"*{FIRST}*")]
        made.sort(key=lambda path: path.parent.name == PUBLISHED.name)  # markers are the last
        texts = {path: path.read_text() for path in made if path.suffix == ".json"}
        record = next(text for path, text in texts.items() if path.parent.name == "records")
        digest = PUBLISHED.digest(dataset.spec, dataset.schema())
        for partition in partitions:
            for path in made:
                name = path.name.replace(FIRST, partition.key)
                if path.parent.name == PUBLISHED.name:
                    name = dataset.marker_name(partition.key, partition.fingerprint(digest))
                    (root / name).write_text(_marker_of(texts[path], record, partition.key))
                elif path in texts:
                    path.with_name(name).write_text(texts[path].replace(FIRST, partition.key))
                else:
                    self._linked(path, path.with_name(name))

    def _linked(self, path: Path, name: Path) -> None:
        self._links.setdefault(path, _Links(path)).add(name)


class _Links:
    """Names for one file's content; a file system may allow one file so many names only."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, name: Path) -> None:
        """Gives the content another name."""
        try:
            name.hardlink_to(self._path)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            shutil.copyfile(self._path, name)
            self._path = name


class Remote:
    """A bucket of the S3 server.

    Args:
        url: the server's address.
    """

    BUCKET = "bucket"

    def __init__(self, url: str) -> None:
        self._url = url
        options = {"endpoint_url": url, "key": "key", "secret": "secret"}
        self.settings = {
            "shards": f"s3://{self.BUCKET}/in/*.tar",
            "root": f"s3://{self.BUCKET}/root",
            "storage_options": options,
            "root_options": options,
        }

    def add_shards(self, keys: Sequence[str]) -> None:
        """As `Place.add_shards`."""
        fs, path = filesystem(f"s3://{self.BUCKET}/in/{FIRST}.tar", self.settings["storage_options"])
        fs.pipe_file(path, shard_bytes())
        others = [key for key in keys if key != FIRST]
        self._clone([f"{self.BUCKET}/in"], others, {})

    def change_shards(self, keys: Sequence[str]) -> None:
        """As `Place.change_shards`."""
        for key in keys:
            fs, path = filesystem(f"s3://{self.BUCKET}/in/{key}.tar", self.settings["storage_options"])
            fs.pipe_file(path, shard_bytes() + bytes(512))

    def publish(self, dataset: DatasetStore, partitions: Iterable[Partition]) -> None:
        """As `Place.publish`."""
        digest = PUBLISHED.digest(dataset.spec, dataset.schema())
        markers = {p.key: dataset.marker_name(p.key, p.fingerprint(digest)).rpartition("/")[2] for p in partitions}
        root = f"{self.BUCKET}/root/{dataset.spec.name}"
        self._clone([f"{root}/{name}" for name in _FOLDERS], [*markers], markers)

    def _clone(self, folders: Sequence[str], keys: Sequence[str], markers: Mapping[str, str]) -> None:
        from benchmarks.scale.s3 import Service

        Service(self._url).clone(**{"from": FIRST, "folders": folders, "keys": keys, "markers": markers})


def _marker_of(first: str, record: str, key: str) -> str:
    of_first, of_this = (hashlib.sha256(record.replace(FIRST, k).encode()).hexdigest() for k in (FIRST, key))
    return first.replace(of_first, of_this).replace(FIRST, key)


def declared(place: Place, **settings: Any) -> DatasetStore:
    """The dataset in a place."""
    config = {"name": "many", "settle_seconds": 0, "checks": "rollup", **place.settings, **settings}
    return DatasetStore(DatasetSpec.from_config(config, where="benchmark"))


@dataclass(frozen=True)
class Template:
    """The report of the first partition, from which those of the others are made.

    Attributes:
        content: the report, pickled.
        record: the content of the file of its records.
    """

    content: bytes
    record: str

    @classmethod
    def of(cls, dataset: DatasetStore) -> Template:
        """Runs the first partition."""
        report = run_partition(dataset.spec, dataset.partition(FIRST), dataset.schema())
        assert report.ok, report.failure
        return cls(pickle.dumps(report), dataset.store.read_bytes(dataset.records_name(FIRST)).decode())

    def report(self, key: str) -> PartitionReport:
        """The report of another partition."""
        of_first, of_this = (
            hashlib.sha256(self.record.replace(FIRST, k).encode()).hexdigest().encode() for k in (FIRST, key)
        )
        content = self.content.replace(of_first, of_this).replace(FIRST.encode(), key.encode())
        made: PartitionReport = pickle.loads(content)
        return made


def make_dataset(place: Place, number: int, *, published: int | None = None) -> tuple[DatasetStore, Template]:
    """A dataset of registered partitions with the same content, of which the first was run; without a manifest.

    Args:
        place: where it is.
        number: of partitions.
        published: how many of them are published; None publishes all.
    """
    dataset = declared(place)
    keys = [key_of(each) for each in range(number)]
    place.add_shards(keys)
    register(dataset, wait=True)
    template = Template.of(dataset)
    partitions = dataset.partitions()
    place.publish(dataset, [partitions[key] for key in keys[1 : number if published is None else published]])
    return dataset, template


def withdraw_one(dataset: DatasetStore) -> None:
    """Removes the marker of the last partition, so that it is pending."""
    name = max(name for names in dataset.marker_names().values() for name in names)
    dataset.store.delete(name)


def publish_one(dataset: DatasetStore) -> None:
    """Publishes that partition again."""
    for key in pending_partitions(dataset):
        assert run_partition(dataset.spec, dataset.partition(key), dataset.schema()).ok
