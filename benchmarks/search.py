"""Searching 200,000 vectors of 512 numbers: recall, queries per second, build time, bytes and memory.

Packs vectors as a dataset, builds its index, and runs queries one by one and 500 at a time: by a product in memory
(NumPy), by a scan of the dataset, by its index with several numbers of lists, and by each of usearch, hnswlib and
faiss-cpu that is installed. Each is a process of its own; memory is the largest that was not of mapped files.

    python benchmarks/search.py [--count 200000] [--dimensions 512] [--vectors FILE.npy] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mm_assets
from mm_assets.fields import NDArrayField

K = 10
NUM_QUERIES = 500
NUM_SINGLE = 200  # queries that are timed one by one
SHARDS = 8
Vectors = npt.NDArray[np.float32]
Search = Callable[[Vectors], npt.NDArray[np.int64]]
ROWS = ("numpy", "scan", "index", "usearch", "hnswlib", "faiss_ivf", "faiss_hnsw")


def synthetic(count: int, dimensions: int) -> Vectors:
    """Clusters of different sizes; around each center vectors vary in 32 directions of its own, and a little in all."""
    random = np.random.default_rng(0)
    centers = random.standard_normal((2000, dimensions), dtype=np.float32)
    weights = random.lognormal(0, 1, len(centers))
    directions = random.standard_normal((512, dimensions), dtype=np.float32) / np.sqrt(32)
    own = random.integers(0, len(directions), (len(centers), 32))
    vectors = np.empty((count, dimensions), np.float32)
    for start in range(0, count, 10_000):
        size = min(10_000, count - start)
        chosen = random.choice(len(centers), size, p=weights / weights.sum())
        noise = np.zeros((size, len(directions)), np.float32)
        np.put_along_axis(noise, own[chosen], random.standard_normal((size, 32), dtype=np.float32), axis=1)
        vectors[start : start + size] = (
            centers[chosen]
            + 0.7 * noise @ directions
            + 0.1 * random.standard_normal((size, dimensions), dtype=np.float32)
        )
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class Memory:
    """The largest anonymous resident memory of this process so far, in MB."""

    def __init__(self) -> None:
        self.peak = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
            self.peak = max(self.peak, int(line.split()[1]) / 1000)
            time.sleep(0.02)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def timed(report: dict[str, Any], name: str) -> Iterator[None]:
    """Adds the seconds of a block to a report."""
    start = time.perf_counter()
    yield
    report[name] = time.perf_counter() - start


def measure(search: Search, queries: Vectors, truth: npt.NDArray[np.int64]) -> dict[str, float]:
    """Recall, and queries per second one by one and all at once."""
    search(queries)  # pages in what the queries read
    start = time.perf_counter()
    for number in range(NUM_SINGLE):
        search(queries[number : number + 1])
    single = NUM_SINGLE / (time.perf_counter() - start)
    start = time.perf_counter()
    rows = search(queries)
    many = len(queries) / (time.perf_counter() - start)
    hits = [len(np.intersect1d(one, other)) for one, other in zip(rows, truth, strict=True)]
    return {"recall": sum(hits) / truth.size, "single": single, "many": many}


def of_dataset(work: Path, what: str, truth: npt.NDArray[np.int64], queries: Vectors) -> Iterator[dict[str, Any]]:
    """Rows of this project."""
    report: dict[str, Any] = {}
    memory = Memory()
    with mm_assets.open(work / "data") as data:
        if what == "scan":

            def scan(some: Vectors) -> npt.NDArray[np.int64]:
                return data.search(some, k=K, exact=True).indices

            global NUM_SINGLE
            NUM_SINGLE = 5
            yield {"row": "scan of the dataset", **measure(scan, queries, truth), "memory": memory.peak}
            return
        with timed(report, "build"):
            summary = data.build_index("vector")
        report |= {
            "memory": memory.peak,
            "bytes": folder_bytes(work / "data" / "indexes"),
            "recall_then": summary.recall,
        }
        for probes in (None, 8, 16, 32, 64, 128):

            def search(some: Vectors, probes: int | None = probes) -> npt.NDArray[np.int64]:
                return data.search(some, k=K, exact=False, probes=probes).indices

            yield {"row": f"index, {probes or 'default'} lists", **measure(search, queries, truth), **report}


def of_library(what: str, vectors: Vectors, truth: npt.NDArray[np.int64], queries: Vectors) -> Iterator[dict[str, Any]]:
    """Graphs with 16 links and 128 candidates while they are built; lists as many as the index has."""
    report: dict[str, Any] = {}
    memory = Memory()
    path = Path("library.index")
    if what == "numpy":

        def product(some: Vectors) -> npt.NDArray[np.int64]:
            scores = some @ vectors.T
            return np.argpartition(scores, -K, axis=1)[:, -K:]

        yield {"row": "NumPy, in memory", **measure(product, queries, truth), "memory": memory.peak}
    elif what == "usearch":
        from usearch.index import Index

        graph = Index(ndim=vectors.shape[1], metric="ip", dtype="f32", connectivity=16, expansion_add=128)
        with timed(report, "build"):
            graph.add(np.arange(len(vectors)), vectors, threads=os.cpu_count() or 1)
        report["memory"] = memory.peak
        graph.save(path)
        report["bytes"] = path.stat().st_size
        graph = Index.restore(path, view=True)
        for expansion in (16, 32, 64, 128):
            graph.expansion_search = expansion
            measured = measure(lambda some: np.atleast_2d(graph.search(some, K).keys).astype(np.int64), queries, truth)
            yield {"row": f"usearch, {expansion}", **measured, **report}
    elif what == "hnswlib":
        import hnswlib

        links = hnswlib.Index("ip", vectors.shape[1])
        links.init_index(len(vectors), ef_construction=128, M=16)
        with timed(report, "build"):
            links.add_items(vectors, np.arange(len(vectors)))
        report["memory"] = memory.peak
        links.save_index(str(path))
        report["bytes"] = path.stat().st_size
        for expansion in (16, 32, 64, 128):
            links.set_ef(expansion)
            measured = measure(lambda some: links.knn_query(some, K)[0].astype(np.int64), queries, truth)
            yield {"row": f"hnswlib, {expansion}", **measured, **report}
    else:
        import faiss

        num_lists = 1 << round(np.log2(2 * np.sqrt(len(vectors))))
        kind = f"IVF{num_lists},Flat" if what == "faiss_ivf" else "HNSW16,Flat"
        index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        if what == "faiss_hnsw":
            index.hnsw.efConstruction = 128
        with timed(report, "build"):
            index.train(vectors[np.random.default_rng(0).choice(len(vectors), min(len(vectors), 64 * num_lists))])
            index.add(vectors)
        report["memory"] = memory.peak
        faiss.write_index(index, str(path))
        report["bytes"] = path.stat().st_size
        for setting in (8, 16, 32, 64, 128):
            if what == "faiss_ivf":
                index.nprobe = setting
            else:
                index.hnsw.efSearch = setting
            measured = measure(lambda some: index.search(some, K)[1], queries, truth)
            yield {"row": f"{what}, {setting}", **measured, **report}


def prepare(work: Path, count: int, dimensions: int, vectors_file: Path | None) -> None:
    """Writes vectors, queries with their true results, and the dataset."""
    vectors = (
        synthetic(count + NUM_QUERIES, dimensions) if vectors_file is None else np.load(vectors_file).astype(np.float32)
    )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors, queries = vectors[:-NUM_QUERIES], vectors[-NUM_QUERIES:]
    truth = [np.argsort(-(queries[n : n + 50] @ vectors.T), axis=1)[:, :K] for n in range(0, NUM_QUERIES, 50)]
    for name, array in (("vectors", vectors), ("queries", queries), ("truth", np.concatenate(truth))):
        np.save(work / f"{name}.npy", array)
    fields = {"vector": NDArrayField("float32", (vectors.shape[1],))}
    with mm_assets.create(work / "data/", fields, shard_samples=-(-len(vectors) // SHARDS), fsync=False) as writer:
        for number, vector in enumerate(vectors):
            writer.write(f"{number:08d}", {"vector": vector})


def child(work: Path, what: str) -> None:
    """Prints the rows of one kind."""
    os.chdir(work)
    queries, truth = np.load("queries.npy"), np.load("truth.npy")
    if what in ("scan", "index"):
        rows = of_dataset(work, what, truth, queries)
    else:
        rows = of_library(what, np.load("vectors.npy"), truth, queries)
    for row in rows:
        print(json.dumps(row), flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--vectors", type=Path, help="vectors (n, D); the last 500 are the queries")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(Path(arguments.child[0]), arguments.child[1])
        return
    print("| | recall@10 | queries/s, one by one | queries/s, 500 at once | build, s | MB | memory, MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as work:
        prepare(Path(work), arguments.count, arguments.dimensions, arguments.vectors)
        for what in arguments.only:
            command = [sys.executable, __file__, "--child", work, what]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"| {what}: {done.stderr.strip().splitlines()[-1]} |", flush=True)
            for row in map(json.loads, done.stdout.splitlines()):
                numbers = (
                    f"{row['recall']:.3f}",
                    f"{row['single']:,.0f}",
                    f"{row['many']:,.0f}",
                    f"{row['build']:,.1f}" if "build" in row else "",
                    f"{row['bytes'] / 1e6:,.0f}" if "bytes" in row else "",
                    f"{row['memory']:,.0f}",
                )
                print(f"| {row['row']} | {' | '.join(numbers)} |", flush=True)


if __name__ == "__main__":
    main()
