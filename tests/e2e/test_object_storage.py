"""The whole chain on object storage: shards read by ranges, outputs uploaded whole, everything over HTTP."""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dagster as dg
import fsspec
import pyarrow as pa
import pytest
from click.testing import CliRunner

import mm_assets
from mm_assets.cli.main import main
from mm_assets.cli.project import make_project
from mm_assets.errors import ConfigError, SourceError
from mm_assets.orchestration.launch import register_dataset
from mm_assets.orchestration.recorded_load import run_load
from mm_assets.pipeline.chain import CHAIN, FILTERED_ROWS, PACKED_STAGES, PUBLISHED, Stage
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.load.tasks import PartitionRun
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import claims
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import build_manifest
from mm_assets.pipeline.state.records import Earlier
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.schema_inference import decide_layout
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions
from mm_assets.rows.base import shard_kinds
from mm_assets.sources.lance import LanceSource
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardKind, expand_shards

from ..pipeline.chain import declare, record_of, run_once
from ..pipeline.chain import run_chain as run_stages
from ..pipeline.shards import png
from ..s3_server import serve
from .loads import make_manifest, run_partitions

pytest.importorskip("s3fs", reason="the s3 extra is not installed")
pytest.importorskip("moto", reason="moto's server is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    """The S3 server, for all tests of this module."""
    with serve() as served:
        yield served


@pytest.fixture
def options(server: tuple[str, Any]) -> dict[str, Any]:
    """File-system arguments that lead to the server."""
    return {"key": "test", "secret": "test", "endpoint_url": server[0]}


@pytest.fixture
def bucket(options: dict[str, Any], tmp_path: Path) -> str:
    """An empty bucket."""
    name = tmp_path.name.replace("_", "-").lower()[-50:].strip("-")
    fsspec.filesystem("s3", **options).mkdir(name)
    return name


def upload(options: dict[str, Any], path: Path, bucket: str) -> None:
    fsspec.filesystem("s3", **options).put_file(str(path), f"{bucket}/shards/{path.name}")


def run_chain(instance: dg.DagsterInstance, spec: DatasetSpec) -> DatasetStore:
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    for run in run_partitions([(spec, key) for key in pending_partitions(dataset)]):
        assert run.failures == ()
    assert make_manifest(spec).failures == ()
    return dataset


@pytest.mark.parametrize(
    "name", ["docs-00000.tar", "captions-00000.tar", pytest.param("speech-00000.tar", marks=pytest.mark.slow)]
)
def test_a_load_on_s3_reads_the_shard_once(
    instance: dg.DagsterInstance,
    demo_spec: Callable[..., DatasetSpec],
    demo_shards: Path,
    server: tuple[str, Any],
    options: dict[str, Any],
    bucket: str,
    name: str,
) -> None:
    """Shard and outputs on s3://: a manifest opens from there, and the shard is fetched once in few requests."""
    upload(options, demo_shards / name, bucket)
    recorder = server[1]
    spec = demo_spec(name.split("-", 1)[0], shards=f"s3://{bucket}/shards/*.tar", storage_options=options)
    spec = spec.replace(root=f"s3://{bucket}/out", root_options=options)
    register_dataset(instance, DatasetStore(spec))  # looks at the first shard's JSON to decide the schema
    recorder.requests.clear()
    dataset = run_chain(instance, spec)
    reads = recorder.reads_of(f"/{bucket}/shards/{name}")
    assert len(recorder.requests) <= 100, "of which 12 are the partition's"
    assert sum(read.sent for read in reads) == (demo_shards / name).stat().st_size
    assert len(reads) == 1
    with mm_assets.open(f"s3://{bucket}/out/{spec.name}/manifest.json", storage_options=options) as opened:
        assert len(opened) > 0
        assert opened[len(opened) - 1]["metadata"] is not None
    listed = dataset.store.fs.find(f"{bucket}/out")
    assert not [path for path in listed if path.rsplit("/", 1)[-1].startswith(".") or path.endswith(".tmp")]


def pairs(folder: Path, num_members: int) -> Path:
    """A shard with a text and an image in turn."""
    from PIL import Image

    shard, picture = folder / f"pairs-{num_members}.tar", BytesIO()
    Image.new("RGB", (16, 16), "teal").save(picture, "JPEG")
    with tarfile.open(shard, "w") as archive:
        for number in range(num_members):
            name, content = (f"{number}.jpg", picture.getvalue()) if number % 2 else (f"{number + 1}.txt", b"a cat")
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, BytesIO(content))
    return shard


def files_of(dataset: DatasetStore) -> dict[str, bytes]:
    """Each file of a dataset by its name."""
    root = dataset.store.path_of("")
    return {str(path)[len(root) + 1 :]: dataset.store.fs.cat_file(path) for path in dataset.store.fs.find(root)}


@dataclass(frozen=True)
class Remote:
    """A registered shard and its dataset, in the bucket; and the same shard's dataset in a local folder."""

    shard: Path
    remote: DatasetStore
    local: DatasetStore
    recorder: Any

    def run(self, dataset: DatasetStore, **options: Any) -> PartitionReport:
        """Runs the partition; `recorder` has its requests alone."""
        (partition,), schema = dataset.partitions().values(), dataset.schema()
        self.recorder.requests.clear()
        return run_once(dataset.spec, partition, schema, **options)


@pytest.fixture
def dataset_of(server: tuple[str, Any], options: dict[str, Any], bucket: str, tmp_path: Path) -> Callable[..., Remote]:
    """Uploads a shard of a number of members and registers it for both roots."""

    def make(num_members: int, **settings: Any) -> Remote:
        shard = pairs(tmp_path, num_members)
        upload(options, shard, bucket)
        spec = declare(tmp_path / "root", f"s3://{bucket}/shards/*.tar", storage_options=options, **settings)
        local, remote = (
            DatasetStore(each) for each in (spec, spec.replace(root=f"s3://{bucket}/root", root_options=options))
        )
        register(local)
        register(remote)
        return Remote(shard, remote, local, server[1])

    return make


def own_reads(requests: Sequence[Any], bucket: str) -> list[str]:
    """The folders of the dataset's files that were read."""
    own = [request for request in requests if request.method == "GET" and request.path.startswith(f"/{bucket}/root/")]
    return [Path(request.path).parent.name for request in own]


@pytest.mark.parametrize("num_members", [3, 3000])
def test_a_partition_costs_few_requests_whatever_its_members(
    dataset_of: Callable[..., Remote], bucket: str, num_members: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is read once, nothing of its own is read back, and every file is that of a run in a local folder."""
    case = dataset_of(num_members)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    report = case.run(case.remote, earlier=Earlier())
    assert report.failure is None
    assert report.ok
    assert list(scratch.iterdir()) == []
    requests = list(case.recorder.requests)
    assert Counter(request.method for request in requests) == {"PUT": 10, "GET": 1, "HEAD": 2}
    shard = f"/{bucket}/shards/{case.shard.name}"
    assert sum(request.sent for request in case.recorder.reads_of(shard)) == case.shard.stat().st_size
    assert own_reads(requests, bucket) == []
    last = [request.path for request in requests if request.method == "PUT"][-1]
    assert Path(last).parent.name == "records"

    report = case.run(case.local)
    assert report.ok
    assert Counter(request.method for request in case.recorder.requests) == {"GET": 1, "HEAD": 2}, "of the shard"
    assert files_of(case.remote) == files_of(case.local)


@pytest.mark.parametrize(
    ("first", "read"),
    [(FILTERED_ROWS, "materialized_rows"), (PACKED_STAGES["mult"], "filtered_rows"), (PUBLISHED, None)],
)
def test_a_run_that_starts_later_reads_the_one_table_that_it_needs(
    dataset_of: Callable[..., Remote], bucket: str, first: Stage, read: str | None
) -> None:
    """Of earlier stages the records and one table are fetched, and the shard is not opened."""
    case = dataset_of(30)
    assert case.run(case.remote).ok
    before = files_of(case.remote)
    report = case.run(case.remote, first=first)
    assert report.failure is None
    assert list(report.results) == [stage.name for stage in CHAIN[CHAIN.index(first) : CHAIN.index(PUBLISHED)]]
    expected = ["records", "records", *([read] if read else [])]  # the second time as it exists already
    assert sorted(own_reads(case.recorder.requests, bucket)) == sorted(expected)
    assert len(case.recorder.requests) <= 30
    shard = case.recorder.reads_of(f"/{bucket}/shards/{case.shard.name}")
    assert not shard
    assert files_of(case.remote) == before


def test_a_manifest_costs_few_requests(
    server: tuple[str, Any], options: dict[str, Any], bucket: str, tmp_path: Path
) -> None:
    """Besides listings, a manifest takes 3 requests with nothing new, and 10 with a new partition of 12."""
    shard = pairs(tmp_path, 3)
    spec = declare(f"s3://{bucket}/root", f"s3://{bucket}/shards/*.tar", storage_options=options, root_options=options)
    fs = fsspec.filesystem("s3", **options)

    def run_new(numbers: range) -> None:
        for number in numbers:
            fs.put_file(str(shard), f"{bucket}/shards/{number:02}.tar")
        dataset = DatasetStore(spec)
        register(dataset)
        for partition in dataset.partitions().values():
            if int(partition.key) in numbers:
                assert run_once(spec, partition, dataset.schema(), earlier=Earlier()).ok

    def manifest() -> list[Any]:
        """Returns the requests of a manifest, without listings."""
        server[1].requests.clear()
        assert build_manifest(DatasetStore(spec)).left_out == {}
        return [request for request in server[1].requests if request.path.strip("/") != bucket]

    run_new(range(11))
    manifest()
    assert Counter(request.method for request in manifest()) == {"GET": 3}
    fs.put_file(str(shard), f"{bucket}/shards/11.tar")
    register(DatasetStore(spec))
    known = DatasetState(DatasetStore(spec))
    assert known.pending == ["11"]
    assert run_once(spec, known.partitions["11"], known.schema, earlier=Earlier()).ok
    requests = manifest()
    record = Path(known.dataset.record_name("11", known.recipes["11"])).name
    assert Counter(request.method for request in requests) == {"GET": 7, "PUT": 3}
    read = [Path(request.path).name for request in requests if "/records/" in request.path]
    assert read == [record], "the manifest before has the others"
    table = [request for request in requests if "/filtered_rows/" in request.path]
    assert [request.method for request in table] == ["GET"]


def test_a_load_of_one_partition_costs_few_requests(
    server: tuple[str, Any],
    instance: dg.DagsterInstance,
    options: dict[str, Any],
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the listing of shards to the manifest it takes at most 35, of which 13 are the partition's."""
    monkeypatch.setattr(claims, "CLAIM_SECONDS", 3600.0)  # a claim that is renewed has a request more
    spec = declare(f"s3://{bucket}/root", f"s3://{bucket}/shards/*.tar", storage_options=options, root_options=options)
    for key in "ab":
        fsspec.filesystem("s3", **options).put_file(str(pairs(tmp_path, 3)), f"{bucket}/shards/{key}.tar")

    def load() -> list[Any]:
        server[1].requests.clear()
        dataset = DatasetStore(spec)
        found = register(dataset)
        state = DatasetState(dataset, partitions={partition.key: partition for partition in found.partitions})
        with Processes() as processes:
            assert run_load(spec, state.pending, engine=processes, present=state, found=found).ok
        return list(server[1].requests)

    def is_cleaned(requests: Sequence[Any]) -> bool:
        return any(request.path.endswith("/clean.json") for request in requests)

    assert is_cleaned(load())
    state = DatasetState(DatasetStore(spec))
    state.dataset.store.delete(state.dataset.record_name("b", state.recipes["b"]))
    requests = load()
    assert not is_cleaned(requests), "within a day"
    assert len(requests) <= 35, "\n".join(f"{r.method} {r.path} {r.query[:50]}" for r in requests)


def test_a_load_with_nothing_to_do_lists_no_tables(
    server: tuple[str, Any],
    instance: dg.DagsterInstance,
    options: dict[str, Any],
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manifest stays, and is recorded once."""
    spec = declare(f"s3://{bucket}/root", f"s3://{bucket}/shards/*.tar", storage_options=options, root_options=options)
    fs = fsspec.filesystem("s3", **options)
    for name in "ab":
        fs.put_file(str(pairs(tmp_path, 3)), f"{bucket}/shards/{name}.tar")
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    assert all(run.ok for run in run_partitions([(spec, "a"), (spec, "b")]))

    def listed_tables() -> bool:
        """Whether a load of no partition lists tables."""
        server[1].requests.clear()
        assert make_manifest(spec).ok
        return any(f"{spec.name}/rows/" in request.query for request in server[1].requests)

    def made() -> int:
        found = instance.fetch_materializations(dg.AssetKey([spec.name, "manifest"]), limit=99)
        return len(found.records)

    assert made() == 1
    assert not listed_tables()
    assert made() == 1


@pytest.mark.parametrize(
    ("first", "retain"),
    [
        (FILTERED_ROWS, "filtered"),
        (PACKED_STAGES["mult"], "filtered"),
        (PACKED_STAGES["mult"], "none"),
        pytest.param(FILTERED_ROWS, "none", marks=pytest.mark.slow),
    ],
)
def test_media_that_stay_in_a_remote_shard_are_read_once(
    dataset_of: Callable[..., Remote], bucket: str, first: Stage, retain: str
) -> None:
    """With `retain` the files are those of a local folder, and a later stage reads the shard once where it needs it."""
    case = dataset_of(30, retain=retain)
    assert case.run(case.remote).ok
    before = files_of(case.remote)
    assert case.run(case.local).ok
    assert before == files_of(case.local)
    report = case.run(case.remote, first=first)
    assert report.failure is None
    read = first is FILTERED_ROWS or retain == "none"
    shard = case.recorder.reads_of(f"/{bucket}/shards/{case.shard.name}")
    assert sum(request.sent for request in shard) == read * case.shard.stat().st_size
    assert len(case.recorder.requests) <= 30
    assert files_of(case.remote) == before


def test_a_failed_upload_publishes_nothing(dataset_of: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store takes no file, its words and what it takes are said, and no record appears."""
    case = dataset_of(3)
    fs, refused = case.remote.store.fs, case.remote.store.path_of("packed")
    put = fs.put_file

    def put_file(path: str, target: str, **options: Any) -> None:
        if target.startswith(refused):
            raise PermissionError(13, "Access Denied")
        put(path, target, **options)

    monkeypatch.setattr(fs, "put_file", put_file)
    report = case.run(case.remote)
    monkeypatch.undo()
    assert not report.ok
    assert report.failure is not None
    assert report.failure.detail.startswith("cannot be written: Access Denied (")
    assert "s3:PutObject" in report.failure.detail
    assert (report.failure.path or "").startswith(case.remote.store.url_of("packed"))
    attempt = case.remote.attempt("pairs-3")
    assert attempt is not None
    assert attempt.failure == report.failure
    assert record_of(case.remote, "pairs-3") is None
    assert case.run(case.remote).ok
    assert case.remote.attempt("pairs-3") is None


def test_an_object_that_changes_before_it_is_fetched_is_refused(options: dict[str, Any], bucket: str) -> None:
    """A copy of another version than was opened is not used, whatever its size; a local file is not copied."""
    fs = fsspec.filesystem("s3", **options)
    fs.pipe_file(f"{bucket}/x.tar", b"before")
    with SourceFile(f"s3://{bucket}/x.tar", options) as file, TemporaryDirectory() as folder:
        fs.pipe_file(f"{bucket}/x.tar", b"after!")
        with pytest.raises(
            SourceError, match=rf"s3://{bucket}/x\.tar: changed while it was fetched .*: run this again"
        ):
            file.fetch(Path(folder))
        assert not file.is_local
        fs.pipe_file(f"{bucket}/x.tar", b"before")
        file.fetch(Path(folder))
        assert file.is_fetched
        assert file.read(0, 6) == b"before"
        assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize(
    ("num_samples", "media_bytes", "most"),
    [(3, 2 << 10, 1), (1500, 2 << 10, 1), (60, 300 << 10, 4), (12, 2 << 20, 13)],
    ids=["tiny", "many small members", "large members", "very large members"],
)
def test_registration_reads_the_start_of_a_shard_in_blocks(
    server: tuple[str, Any],
    options: dict[str, Any],
    bucket: str,
    tmp_path: Path,
    num_samples: int,
    media_bytes: int,
    most: int,
) -> None:
    """A layout is decided with a request per block of 8 MiB, or per very large member, whatever the shard holds."""
    members = [(f"{n}.{kind}", n) for n in range(num_samples) for kind in ("png", "json")]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, n in members:
            content = bytes(media_bytes) if name.endswith("png") else f'{{"n": {n}}}'.encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    upload(options, tmp_path / "a.tar", bucket)
    url = f"s3://{bucket}/shards/a.tar"
    spec = declare(tmp_path, url, storage_options=options)
    server[1].requests.clear()
    found = decide_layout(spec, [url])
    reads = server[1].reads_of(f"/{bucket}/shards/a.tar")
    assert (found.num_samples, [column.type for column in found.columns]) == (min(num_samples, 1024), ["int64"])
    assert len(reads) <= most
    assert len(server[1].requests) <= most + 2, "and what describes the file"
    local = decide_layout(spec, [str(tmp_path / "a.tar")])
    assert (local.schema, local.columns, local.row_kinds) == (found.schema, found.columns, found.row_kinds)


def test_a_root_in_a_missing_bucket_is_named_by_its_key(
    instance: dg.DagsterInstance,
    demo_spec: Callable[..., DatasetSpec],
    demo_shards: Path,
    options: dict[str, Any],
    bucket: str,
) -> None:
    """When the storage refuses the first output, the error names the key of the declaration, and the URL."""
    upload(options, demo_shards / "captions-00000.tar", bucket)
    spec = demo_spec("captions", shards=f"s3://{bucket}/shards/*.tar", storage_options=options).replace(
        root="s3://no-such-bucket/out",
        root_options=options,
    )
    with pytest.raises(ConfigError, match=r"root: 's3://no-such-bucket/out' cannot be written: .*NoSuchBucket"):
        register_dataset(instance, DatasetStore(spec))


def test_shards_in_a_missing_bucket(
    instance: dg.DagsterInstance, demo_spec: Callable[..., DatasetSpec], options: dict[str, Any], bucket: str
) -> None:
    """A bucket that does not exist is named, and one without shards is not said to be missing."""
    for place, says in (("no-such-bucket", r": there is no bucket no-such-bucket, "), (bucket, r": give a folder")):
        spec = demo_spec("captions", shards=f"s3://{place}/shards/*.tar", storage_options=options)
        with pytest.raises(SourceError, match=rf"no shard was found there.*{says}"):
            register_dataset(instance, DatasetStore(spec))


def test_names_in_a_bucket_are_used_as_they_are(options: dict[str, Any], bucket: str) -> None:
    """Keys with brackets, braces, ? or :: are taken as they are; braces name objects without any listing."""
    fs = fsspec.filesystem("s3", **options)
    keys = ("run[1]/a-0.tar", "run[1]/a-1.tar", "{x,y}/b.tar", "what?.tar", "a::b.tar", "00.tar", "01.tar")
    for key in keys:
        fs.pipe_file(f"{bucket}/{key}", key.encode())

    def listed(pattern: str) -> list[str]:
        shards = expand_shards(f"s3://{bucket}/{pattern}", options, kinds=[ShardKind("tar", (".tar",))]).shards
        for shard in shards:
            with SourceFile(shard.url, options) as file:
                assert file.read(0, file.size).decode() == shard.url.removeprefix(f"s3://{bucket}/")
        return [shard.url.removeprefix(f"s3://{bucket}/") for shard in shards]

    assert listed("") == sorted(keys)
    for pattern in ("run[1]", "run[1]/", "run[1]/*.tar", "run[1]/a-{0..1}.tar", "run[[]1]/*", "*/a-[0-9].tar"):
        assert listed(pattern) == ["run[1]/a-0.tar", "run[1]/a-1.tar"]
    assert listed("{x,y}") == listed("{x,y}/*.tar") == ["{x,y}/b.tar"]
    assert listed("what?.tar") == ["what?.tar"]
    assert listed("a::b.tar") == ["a::b.tar"]
    assert listed("{00..01}.tar") == listed("0?.tar") == ["00.tar", "01.tar"]
    assert "02.tar is skipped" in expand_shards(f"s3://{bucket}/{{00..02}}.tar", options, kinds=[]).skipped[0]


def test_folders_of_plain_files_are_listed_once(
    tmp_path: Path, server: tuple[str, Any], options: dict[str, Any], bucket: str, instance: dg.DagsterInstance
) -> None:
    """Folders of plain files are found by the one listing of their bucket, opened by one each, and pass every check."""
    fs = fsspec.filesystem("s3", **options)
    for number, name in enumerate(("a/0", "a/1 é", "b/0")):
        fs.pipe_file(f"{bucket}/in/{name}.png", png(number))
        fs.pipe_file(f"{bucket}/in/{name}.json", b'{"score": 0.5}')
    server[1].requests.clear()
    shards = expand_shards(f"s3://{bucket}/in", options, kinds=shard_kinds(None, where="x")).shards
    assert [shard.url for shard in shards] == [f"s3://{bucket}/in/a/", f"s3://{bucket}/in/b/"]
    assert [request.method for request in server[1].requests].count("GET") == 2, "what it is, and the listing"
    server[1].requests.clear()
    with SourceFile(shards[0].url, options) as file:
        assert file.fingerprint == shards[0].fingerprint
    assert len(server[1].requests) == 1
    spec = declare(tmp_path, f"s3://{bucket}/in", storage_options=options, pack="generic")
    dataset = run_chain(instance, spec)
    with mm_assets.open(dataset.store.path_of("manifest.json")) as reader:
        assert list(reader.sample_ids) == ["a/0", "a/1 é", "b/0"]


def test_a_pattern_of_one_folder_costs_one_request(
    server: tuple[str, Any], options: dict[str, Any], bucket: str
) -> None:
    """Whether something has the pattern's name, and what matches it, is one listing, without what is in folders."""
    fs = fsspec.filesystem("s3", **options)
    for name in ("a.tar", "b.tar", "more.tar/c.tar", "notes.txt"):
        fs.pipe_file(f"{bucket}/in/{name}", name.encode())
    server[1].requests.clear()
    listing = expand_shards(f"s3://{bucket}/in/*.tar", options, kinds=[ShardKind("tar", (".tar",))])
    assert [shard.url.rpartition("/")[2] for shard in listing.shards] == ["a.tar", "b.tar"]
    assert listing.folder == f"s3://{bucket}/in/"
    assert len(server[1].requests) == 1


def test_a_changed_object_is_noticed(
    demo_spec: Callable[..., DatasetSpec], demo_shards: Path, options: dict[str, Any], bucket: str
) -> None:
    """The ETag is the fingerprint: another object under the same name, of whatever age, is another shard."""
    from mm_assets.storage.listing import describe_file

    fs = fsspec.filesystem("s3", **options)
    fs.pipe_file(f"{bucket}/shards/x.tar", b"a" * 1024)
    before = describe_file(f"s3://{bucket}/shards/x.tar", options)
    fs.pipe_file(f"{bucket}/shards/x.tar", b"b" * 1024)
    after = describe_file(f"s3://{bucket}/shards/x.tar", options)
    assert before.size == after.size
    assert before.fingerprint != after.fingerprint
    assert after.modified is not None


def test_a_command_on_s3_writes_nothing_to_standard_error(
    server: tuple[str, Any], options: dict[str, Any], bucket: str, demo_shards: Path, tmp_path: Path
) -> None:
    """The process ends without a word of what its libraries hold: a client's thread runs until the end."""
    upload(options, demo_shards / "captions-00000.tar", bucket)
    make_project(tmp_path)
    declaration = tmp_path / "packed_datasets" / "defs" / "captions" / "defs.yaml"
    declaration.parent.mkdir()
    settings = f"{{name: captions, shards: 's3://{bucket}/shards/*.tar', root: 's3://{bucket}/out', settle_seconds: 0}}"
    declaration.write_text(f"type: mm_assets.orchestration.ShardDataset\nattributes: {settings}\n")
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DAGSTER_", "MM_ASSETS_"))},
        "DAGSTER_HOME": str(home),
        "AWS_ENDPOINT_URL": server[0],
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    command = [sys.executable, "-P", "-c", "from mm_assets.cli.main import main; main()", "run"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done
    assert "captions-00000" in done.stdout
    assert done.stderr == ""


def test_the_summary_of_a_load_reads_no_records(
    server: tuple[str, Any],
    options: dict[str, Any],
    bucket: str,
    dagster_home: Path,
    demo_shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Summary and manifest have all numbers and read no record; a partition that runs again reads its own twice."""
    for name, value in (("ENDPOINT_URL", server[0]), ("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test")):
        monkeypatch.setenv(f"AWS_{name}", value)
    (tmp_path / "in").mkdir()
    for key in "abc":
        (tmp_path / "in" / f"{key}.tar").symlink_to(demo_shards / "captions-00000.tar")
    given = ["run", "--shards", str(tmp_path / "in"), "--root", f"s3://{bucket}/root", "--set", "settle_seconds=0"]
    for further, reads in (([], 0), (["--no-record", "--from", "filtered_rows"], 2), (["--no-record", "--force"], 2)):
        server[1].requests.clear()
        done = CliRunner().invoke(main, [*given, *further, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        paths = [request.path for request in server[1].requests if request.method == "GET"]
        records = [path.rpartition("/")[2].partition(".")[0] for path in paths if "/records/" in path]
        assert Counter(records) == Counter(dict.fromkeys("abc", reads)), further
        totals = json.loads(done.stdout)["datasets"]["default"]["totals"]
        assert (totals["members"], totals["rows"], totals["kept"], totals["samples"]) == (360, 360, 360, 120)


def test_credentials_that_expire_during_a_load(
    instance: dg.DagsterInstance,
    demo_spec: Callable[..., DatasetSpec],
    demo_shards: Path,
    server: tuple[str, Any],
    options: dict[str, Any],
    bucket: str,
) -> None:
    """The load ends at once with one message for what is left; what was done is listed, the next load does the rest."""
    fs = fsspec.filesystem("s3", **options)
    keys = [f"part-{number}" for number in range(6)]
    for key in keys:
        fs.put_file(str(demo_shards / "captions-00000.tar"), f"{bucket}/shards/{key}.tar")
    spec = demo_spec("captions", shards=f"s3://{bucket}/shards/*.tar", storage_options=options)
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    ended: list[PartitionRun] = []

    def observe(run: PartitionRun) -> None:
        ended.append(run)
        server[1].faults.is_expired = True

    try:
        with Processes() as processes:
            rest = run_load(spec, keys, engine=processes, observed=observe)
    finally:
        server[1].faults.is_expired = False
    failed = [run for run in ended if not run.ok]
    assert ended[0].ok
    assert failed
    assert all(
        "the credentials have expired (ExpiredToken: injected)" in line for run in failed for line in run.failures
    )
    (line,) = rest.failures
    assert f"{len(keys) - len(ended)} more partitions not run" in line
    assert pending_partitions(dataset) == keys[len(ended) - len(failed) :]
    assert len(mm_assets.open(dataset.store.url_of("manifest.json"))) == 40 * (len(ended) - len(failed))
    with Processes() as processes:
        rest = run_load(spec, pending_partitions(dataset), engine=processes)
    assert rest.ok
    assert pending_partitions(dataset) == []


def test_a_lance_dataset_in_a_bucket_is_packed(options: dict[str, Any], bucket: str, tmp_path: Path) -> None:
    """Lance reads with the storage options of s3fs in its own names; one that it lacks is refused by name."""
    lance = pytest.importorskip("lance", reason="the lance extra is not installed")
    lance.write_dataset(pa.table({"__key__": ["a", "b"], "text": ["one", "two"], "n": [1, 2]}), str(tmp_path / "x"))
    fsspec.filesystem("s3", **options).put(str(tmp_path / "x"), f"{bucket}/x", recursive=True)
    dataset, _ = run_stages(declare(tmp_path / "out", f"s3://{bucket}/x", storage_options=options))
    with mm_assets.open(dataset.store.url_of("manifest.json")) as data:
        assert [(data.sample_ids[n], data[n]["text"]) for n in range(2)] == [("a", "one"), ("b", "two")]
    (shard,) = dataset.partitions()["data%2F" + next((tmp_path / "x/data").iterdir()).stem].shards
    source = LanceSource(SourceFile(shard.url, {**options, "requester_pays": True}))
    with pytest.raises(SourceError, match="requester_pays, which has no counterpart"):
        list(source.members())
