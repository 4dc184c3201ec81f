"""A dataset in an object store is explored: queries, scores, drops with their content, versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import duckdb
import fsspec
import pytest
from starlette.testclient import TestClient

from mm_assets.pipeline.explore.sql import dataset_sandbox
from mm_assets.pipeline.explore.sql_worker import connect
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.view import open_backend

from ..pipeline.chain import declare, run_chain
from ..pipeline.explore.test_diff import again
from ..pipeline.shards import make_shard, png
from ..s3_server import serve
from ..view.conftest import client_of, viewer_of
from ..view.test_explore import get, post

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A dataset of two versions whose shards and folder are behind an S3 server."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    pytest.importorskip("moto", reason="moto's server is not installed")
    folder = tmp_path_factory.mktemp("remote")
    members: dict[str, object] = {}
    for n, width in enumerate((4, 16, 20)):
        members |= {f"a{n}.png": png(width, (8, width)), f"a{n}.txt": f"caption {n}"}
    make_shard(folder / "a.tar", members)
    with serve() as (url, _):
        options = {"key": "test", "secret": "test", "endpoint_url": url}
        s3 = fsspec.filesystem("s3", **options)
        s3.mkdir("explored")
        s3.put(str(folder / "a.tar"), "explored/in/a.tar")
        rule = {"type": "image_size", "scope": "sample"}
        declared = declare(
            "s3://explored/root",
            "s3://explored/in",
            storage_options=options,
            root_options=options,
            annotators=[{"type": "image_size"}],
            filters=[{**rule, "min_width": 2}],
            retain="none",
        )
        run_chain(declared)
        again(DatasetStore(declared.replace(filters=({**rule, "min_width": 10},))))
        backend = open_backend(["s3://explored/root/data"], storage_options=options)
        yield client_of(backend)
        backend.close()


def test_queries_read_remote_tables_and_no_other_file(client: TestClient) -> None:
    """A query selects from the tables in the bucket; another object of it cannot be read."""
    found = post(client, "sql", sql="select sample_id, image_width from filtered_rows where image_width > 1 order by 2")
    assert found["rows"] == [["a1", 16], ["a2", 20]]
    other = post(client, "sql", sql="select * from 's3://explored/root/data/rows/a.parquet'")
    assert "there is no relation" in other["error"]


def test_other_objects_are_closed_to_duckdb_too(client: TestClient) -> None:
    """A statement that got past the parser could read the dataset's tables and nothing else of the store."""
    explorer = viewer_of(client)
    sandbox = dataset_sandbox(DatasetState(explorer.backend.dataset))
    with closing(connect(sandbox.request)) as connection:
        assert connection.execute("select count(*) from rows").fetchall() == [(9,)]
        for path in ("in/a.tar", "root/data/manifest.json"):
            with pytest.raises(duckdb.Error, match="Permission"):
                connection.execute(f"select size from read_blob('s3://explored/{path}')").fetchall()


def test_scores_drops_and_versions_of_a_remote_dataset(client: TestClient) -> None:
    """Histogram, drop with its picture, origin and difference are as of a local one."""
    assert get(client, "histogram", score="image_width")["num_dropped"] == 1
    drops = get(client, "losses", reason="image_size.width_below_min")["losses"]
    (image,) = [drop for drop in drops if drop["modality"] == "image"]
    place: dict[str, Any] = {name: image[name] for name in ("partition", "sample_id", "position", "modality")}
    item = get(client, "item", **place)
    assert client.get(item["media"][0]["url"]).content == png(4, (8, 4))
    assert {row["member"] for row in get(client, "origin", part="a", sample_id="a1")["rows"]} >= {"a1.png"}
    found = get(client, "diff", old="previous", new="newest")
    assert found["partitions"][0]["counts"] == {"added": 0, "removed": 1, "changed": 0}
