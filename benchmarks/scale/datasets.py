"""Datasets with very many published partitions, copied from one that was run: names, keys and recipes differ.

On a local disk the copies are hard links; the S3 server of `s3.py` derives a copy when it is read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import shutil
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mm_assets.dataset.manifest import make_manifest
from mm_assets.pipeline.chain import TABLES
from mm_assets.pipeline.partition.run import PartitionReport, partition_steps
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import RECORDS, DatasetStore
from mm_assets.pipeline.state.records import canonical_json
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions
from mm_assets.storage.urls import filesystem

__all__ = [
    "FIRST",
    "Local",
    "Place",
    "Remote",
    "Template",
    "declared",
    "key_of",
    "make_dataset",
    "publish_again",
    "publish_one",
    "withdraw_one",
    "write_manifest",
]

SAMPLES = 30
AGE_SECONDS = 2 * 86_400
_FOLDERS = (*TABLES, "packed")


def shard_bytes() -> bytes:
    """Returns a shard of small samples."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for number in range(SAMPLES):
            content = f"the text of sample {number}".encode()
            info = tarfile.TarInfo(f"{number:06d}.txt")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return written.getvalue()


def key_of(number: int) -> str:
    """Returns the key of a partition; all have as many characters, so that files that contain them have one size."""
    return f"p{number:07d}"


FIRST = key_of(0)


@dataclass(frozen=True)
class Template:
    """The first partition as it was run, from which the others are made.

    Attributes:
        recipe: by which it was made.
        report: of its run, pickled.
    """

    recipe: str
    report: bytes

    @classmethod
    def of(cls, dataset: DatasetStore) -> Template:
        """Runs the first partition."""
        *_, report = partition_steps(dataset.spec, dataset.partition(FIRST), dataset.schema())
        assert isinstance(report, PartitionReport)
        assert report.record is not None, report.failure
        return cls(report.record.recipe, pickle.dumps(report))

    def report_of(self, key: str, recipe: str) -> PartitionReport:
        """Returns the report of another partition."""
        content = self.report.replace(FIRST.encode(), key.encode()).replace(self.recipe.encode(), recipe.encode())
        report: PartitionReport = pickle.loads(content)
        return report


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

    def publish(self, dataset: DatasetStore, template: Template, recipes: Mapping[str, str]) -> None:
        """Adds the files of partitions, and then their records, by key and recipe."""

    def age(self, dataset: DatasetStore) -> None:
        """Makes all files of the dataset two days older."""

    def forget_requests(self) -> None:
        """Begins to count requests from here."""


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
        """Adds the shards of partitions."""
        (self._folder / "in").mkdir(parents=True, exist_ok=True)
        first = self._folder / "in" / f"{FIRST}.tar"
        if not first.exists():
            first.write_bytes(shard_bytes())
        for key in keys:
            if key != FIRST:
                self._link(first, first.with_name(f"{key}.tar"))

    def change_shards(self, keys: Sequence[str]) -> None:
        """Replaces shards of partitions by others of the same samples."""
        for key in keys:
            path = self._folder / "in" / f"{key}.tar"
            path.unlink()
            path.write_bytes(shard_bytes() + bytes(512))

    def publish(self, dataset: DatasetStore, template: Template, recipes: Mapping[str, str]) -> None:
        """Adds the files of partitions, and then their records, by key and recipe."""
        root = Path(dataset.store.path_of(""))
        originals = [path for name in _FOLDERS for path in (root / name).glob(f"{FIRST}.*")]
        record = (root / RECORDS / f"{FIRST}.{template.recipe}.json").read_text()
        for key, recipe in recipes.items():
            for path in originals:
                self._link(path, path.with_name(path.name.replace(FIRST, key)))
            content = record.replace(FIRST, key).replace(template.recipe, recipe)
            (root / RECORDS / f"{key}.{recipe}.json").write_text(content)

    def age(self, dataset: DatasetStore) -> None:
        """Makes all files of the dataset two days older."""
        ages: dict[int, float] = {}  # by inode, which has many names
        for folder, _, names in os.walk(dataset.store.path_of("")):
            for name in names:
                path = os.path.join(folder, name)
                status = os.stat(path)
                if status.st_ino not in ages:
                    ages[status.st_ino] = status.st_mtime - AGE_SECONDS
                    os.utime(path, (time.time(), ages[status.st_ino]))

    def forget_requests(self) -> None:
        """There are none."""

    def _link(self, path: Path, name: Path) -> None:
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
            shutil.copy2(self._path, name)
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
        """Adds the shards of partitions."""
        self._write_shard(FIRST, shard_bytes())
        self._post("_clone", prefixes=[f"{self.BUCKET}/in/"], to=[[key] for key in keys if key != FIRST], old=[FIRST])

    def change_shards(self, keys: Sequence[str]) -> None:
        """Replaces shards of partitions by others of the same samples."""
        for key in keys:
            self._write_shard(key, shard_bytes() + bytes(512))

    def publish(self, dataset: DatasetStore, template: Template, recipes: Mapping[str, str]) -> None:
        """Adds the files of partitions, and then their records, by key and recipe."""
        root, old = f"{self.BUCKET}/root/{dataset.spec.name}", [FIRST, template.recipe]
        names = [*(f"{name}/{FIRST}." for name in _FOLDERS), f"{RECORDS}/{FIRST}.{template.recipe}"]
        self._post("_clone", prefixes=[f"{root}/{name}" for name in names], to=list(recipes.items()), old=old)

    def age(self, dataset: DatasetStore) -> None:
        """Makes all objects two days older."""
        self._post("_age", seconds=AGE_SECONDS)

    def forget_requests(self) -> None:
        """Begins to count requests from here."""
        from benchmarks.scale.s3 import Service

        Service(self._url).log()

    def _write_shard(self, key: str, content: bytes) -> None:
        fs, path = filesystem(f"s3://{self.BUCKET}/in/{key}.tar", self.settings["storage_options"])
        fs.pipe_file(path, content)

    def _post(self, action: str, **arguments: Any) -> None:
        from benchmarks.scale.s3 import Service

        Service(self._url).post(action, **arguments)


def declared(place: Place, **settings: Any) -> DatasetStore:
    """Returns the dataset in a place."""
    config = {"name": "many", "settle_seconds": 0, "checks": "rollup", **place.settings, **settings}
    return DatasetStore(DatasetSpec.from_config(config, where="benchmark"))


def make_dataset(place: Place, number: int, *, published: int | None = None) -> tuple[DatasetStore, Template]:
    """Makes a dataset without a manifest: runs the first partition, and registers and publishes copies of it.

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
    place.publish(dataset, template, _recipes(dataset, keys[1 : number if published is None else published]))
    return dataset, template


def publish_again(place: Place, dataset: DatasetStore) -> None:
    """Publishes all partitions of a dataset by its present declaration, with a manifest."""
    template = Template.of(dataset)
    place.publish(dataset, template, _recipes(dataset, [key for key in dataset.partitions() if key != FIRST]))
    write_manifest(dataset, template)


def write_manifest(dataset: DatasetStore, template: Template) -> None:
    """Publishes a manifest of all partitions as the first, without reading their records or comparing their ids."""
    state = DatasetState(dataset)
    first = pickle.loads(template.report).record.listed
    manifest = make_manifest(
        dataset=dataset.spec.name,
        schema=state.schema.to_json(),
        partitions=[replace(first, key=key, recipe=recipe) for key, recipe in sorted(state.recipes.items())],
        added=[],
        losses={},
        duplicate_ids={"count": 0, "examples": []},
        settings={},
    )
    content = canonical_json(manifest)
    dataset.store.create(f"manifests/{hashlib.sha256(content).hexdigest()}.json", content)
    dataset.store.replace(dataset.store.snapshot("manifest.json"), content)


def _recipes(dataset: DatasetStore, keys: Iterable[str]) -> dict[str, str]:
    state = DatasetState(dataset)
    return {key: state.recipes[key] for key in keys}


def withdraw_one(dataset: DatasetStore) -> None:
    """Deletes the record of the last partition, so that it is pending."""
    key = max(dataset.partitions())
    dataset.store.delete(dataset.record_name(key, DatasetState(dataset).recipes[key]))


def publish_one(dataset: DatasetStore) -> None:
    """Publishes that partition again."""
    for key in pending_partitions(dataset):
        *_, report = partition_steps(dataset.spec, dataset.partition(key), dataset.schema())
        assert isinstance(report, PartitionReport)
        assert report.ok, report.failure
