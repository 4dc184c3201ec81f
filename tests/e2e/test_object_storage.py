"""The whole chain on object storage: shards read by ranges, outputs uploaded whole, everything over HTTP."""

import io
import tarfile
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import mm_assets
from mm_assets.errors import ConfigError
from mm_assets.orchestration.launch import make_manifest, register_dataset, run_partitions
from mm_assets.pipeline.decide import decide_layout
from mm_assets.pipeline.pending import pending_partitions
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore
from mm_assets.storage.ranges import MAX_GAP

from ..pipeline.chain import declare

pytest.importorskip("s3fs", reason="the s3 extra is not installed")
pytest.importorskip("moto", reason="moto's server is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def _server_module() -> Any:
    spec = spec_from_file_location("s3_server", Path(__file__).parent.parent / "s3_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    import sys

    sys.modules["s3_server"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    """The S3 server, for all tests of this module."""
    with _server_module().serve() as served:
        yield served


@pytest.fixture
def options(server: tuple[str, Any]) -> dict[str, Any]:
    """File-system arguments that lead to the server."""
    return {"key": "test", "secret": "test", "endpoint_url": server[0]}


@pytest.fixture
def bucket(options: dict[str, Any], tmp_path: Path) -> str:
    """An empty bucket."""
    import fsspec

    name = tmp_path.name.replace("_", "-").lower()[-50:].strip("-")
    fsspec.filesystem("s3", **options).mkdir(name)
    return name


def upload(options: dict[str, Any], path: Path, bucket: str) -> None:
    import fsspec

    fsspec.filesystem("s3", **options).put_file(str(path), f"{bucket}/shards/{path.name}")


def run_chain(instance: dg.DagsterInstance, spec: DatasetSpec) -> DatasetStore:
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    for run in run_partitions([(spec, key) for key in pending_partitions(dataset)]):
        assert run.failures == ()
    assert make_manifest(spec).failures == ()
    return dataset


@pytest.mark.parametrize("name", ["docs-00000.tar", "docs-00001.tar", "captions-00000.tar", "speech-00000.tar"])
def test_the_chain_runs_on_s3_and_reads_each_payload_once(
    instance: dg.DagsterInstance,
    demo_spec: Callable[..., DatasetSpec],
    demo_shards: Path,
    server: tuple[str, Any],
    options: dict[str, Any],
    bucket: str,
    name: str,
) -> None:
    """Shard and outputs on s3://: a manifest opens from there, and no payload byte of the shard is fetched twice."""
    import pyarrow.parquet as pq

    upload(options, demo_shards / name, bucket)
    recorder = server[1]
    spec = demo_spec(
        name.split("-", 1)[0],
        shards=f"s3://{bucket}/shards/*.tar",
        storage_options=options,
    )

    spec = spec.replace(root=f"s3://{bucket}/out", root_options=options)
    register_dataset(instance, DatasetStore(spec))  # looks at the first shard's JSON to decide the schema
    recorder.requests.clear()
    dataset = run_chain(instance, spec)
    key = name.removesuffix(".tar")

    size = (demo_shards / name).stat().st_size
    reads = recorder.reads_of(f"/{bucket}/shards/{name}")
    assert reads
    assert all(r.start is not None for r in reads), "the shard is read by ranges only"
    index = pq.read_table(dataset.store.open(f"raw_shards/{key}.parquet"))
    times = [0] * (size + 1)
    for read in reads:
        times[read.start] += 1
        times[read.end] -= 1
    covered, level = [], 0
    for change in times[:size]:
        level += change
        covered.append(level)
    twice = 0
    for member in index.to_pylist():
        if member["extension"] in ("json", "txt") and member["byte_size"] <= MAX_GAP:
            continue  # lies in a gap between two media ranges that are near enough for one request
        # A header's read may run ahead into its payload; what lies behind that is fetched by one stage only.
        offset, end = member["byte_offset"], member["byte_offset"] + member["byte_size"]
        twice += sum(1 for c in covered[offset + READ_AHEAD : end] if c > 1)
    assert twice == 0
    # Three walks over the headers (the index, and the two checks that recompute it), and each payload once.
    text = sum(m["byte_size"] for m in index.to_pylist() if m["extension"] in ("json", "txt"))
    assert sum(r.sent for r in reads) <= size + text + 3 * index.num_rows * READ_AHEAD
    assert len(reads) <= 3 * (index.num_rows + END_OF_ARCHIVE) + index.num_rows

    with mm_assets.open(f"s3://{bucket}/out/{spec.name}/manifest.json", storage_options=options) as opened:
        assert len(opened) > 0
        assert opened[len(opened) - 1]["metadata"] is not None
    listed = dataset.store.fs.find(f"{bucket}/out")
    assert not [path for path in listed if path.rsplit("/", 1)[-1].startswith(".") or path.endswith(".tmp")]


END_OF_ARCHIVE = 6  # requests that find out that nothing but zeros follows the last member
READ_AHEAD = 4 << 10  # most that one header read fetches


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


def test_a_changed_object_is_noticed(
    demo_spec: Callable[..., DatasetSpec], demo_shards: Path, options: dict[str, Any], bucket: str
) -> None:
    """The ETag is the fingerprint: another object under the same name, of whatever age, is another shard."""
    import fsspec

    from mm_assets.storage.listing import describe_file

    fs = fsspec.filesystem("s3", **options)
    fs.pipe_file(f"{bucket}/shards/x.tar", b"a" * 1024)
    before = describe_file(f"s3://{bucket}/shards/x.tar", options)
    fs.pipe_file(f"{bucket}/shards/x.tar", b"b" * 1024)
    after = describe_file(f"s3://{bucket}/shards/x.tar", options)
    assert before.size == after.size
    assert before.fingerprint != after.fingerprint
    assert after.modified is not None
