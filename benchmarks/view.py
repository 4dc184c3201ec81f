"""The viewer: a page of 50 samples of ten million, exploring as many, and the first picture of a tar never packed.

Run it by ``python benchmarks/view.py --data FOLDER``; it makes its data there, some gigabytes, once. A client with
six connections, as a browser has, asks for the JSON of a page and then for its thumbnails; both share the cores.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import io
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import mm_assets
from mm_assets.dataset import manifest as manifests
from mm_assets.dataset.manifest import ManifestPartition, packed_name
from mm_assets.fields import ImageField, TextField
from mm_assets.formats.convert import open_reader

CONNECTIONS = 6
PAGE = 50
SAMPLES_PER_FILE = 10_000
HEIGHT, WIDTH = 375, 500
PICTURES = 400  # different ones
EXPLORED_SAMPLES = 1000  # of a partition of the explored dataset
EXPLORED_ROUNDS = 3
COMMAND = [sys.executable, "-c", "from mm_assets.cli.main import main; main()", "view"]


# --- data -------------------------------------------------------------------------------------------------------------


def pictures(count: int) -> list[bytes]:
    """JPEGs of the size and detail of photographs: smooth colours, edges and grain."""
    import simplejpeg

    rng = np.random.default_rng(7)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    made = []
    for _ in range(count):
        a, b, c = rng.uniform(0.005, 0.05, 3)
        waves = np.stack([np.sin(a * x + c), np.cos(b * y), np.sin(c * (x + y))], -1) * 80 + 128
        box = rng.integers(0, 300, 2)
        waves[box[1] : box[1] + 70, box[0] : box[0] + 150] += 60
        waves += rng.normal(0, 12, waves.shape)
        pixels = np.ascontiguousarray(waves.clip(0, 255).astype(np.uint8))
        made.append(simplejpeg.encode_jpeg(pixels, quality=85, colorspace="RGB"))
    return made


def make_manifest(folder: Path, samples: int) -> Path:
    """A manifest of so many samples: links to one packed file, each a partition."""
    path = folder / f"manifest-{samples}.json"
    if path.exists():
        return path
    packed = folder / "packed"
    packed.mkdir(parents=True, exist_ok=True)
    first = packed / "first.mult"
    if not first.exists():
        made = pictures(PICTURES)
        with mm_assets.create(first, {"image": ImageField(), "caption": TextField()}) as writer:
            for n in range(SAMPLES_PER_FILE):
                # Another comment in each, so that no two samples have the same bytes.
                picture = made[n % PICTURES]
                comment = f"{n:08}".encode()
                marked = picture[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + picture[2:]
                writer.write(f"sample-{n:08}", {"image": marked, "caption": f"A synthetic photograph, number {n}"})
    with first.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with open_reader(str(first)) as reader:
        schema = reader.schema
    partitions = []
    for n in range(samples // SAMPLES_PER_FILE):
        name = packed_name(f"p{n:05}", sha256=digest, form="mult")
        if not (packed / name).exists():
            os.link(first, packed / name)
        partitions.append(
            ManifestPartition(
                key=f"p{n:05}",
                recipe=digest[:16],
                num_samples=SAMPLES_PER_FILE,
                packed={"mult": (first.stat().st_size, digest)},
                tables={},
                streams={},
                decodable={"mode": "full", "on_undecodable": "keep", "judged": 0, "undecodable": 0},
                losses={},
            )
        )
    content = manifests.make_manifest(
        dataset="benchmark", schema=schema, partitions=partitions, added=[], losses={}, duplicate_ids=None, settings={}
    )
    path.write_text(json.dumps(content))
    return path


def make_tar(folder: Path, gigabytes: float) -> Path:
    """A tar of pictures, captions and JSON."""
    path = folder / f"never-packed-{gigabytes:g}.tar"
    if path.exists():
        return path
    made = pictures(PICTURES)
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        n = 0
        while archive.offset < gigabytes * 1e9:
            for name, data in (("jpg", made[n % PICTURES]), ("txt", b"a caption"), ("json", b'{"width": 500}')):
                member = tarfile.TarInfo(f"{n:08}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            n += 1
    return path


# --- measuring --------------------------------------------------------------------------------------------------------


@contextmanager
def viewer(location: Path) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """The command over a location: its address, the cookie of its token, and the process."""
    process = subprocess.Popen([*COMMAND, str(location)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(url.netloc, timeout=60)
        connection.request("GET", f"/?{url.query}")
        answer = connection.getresponse()
        answer.read()
        yield url.netloc, answer.headers["set-cookie"].partition(";")[0], process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


class Browser:
    """A client with some connections that stay open.

    Args:
        address: host and port.
        cookie: of the token.
    """

    def __init__(self, address: str, cookie: str) -> None:
        self._headers = {"cookie": cookie}
        self._free = [http.client.HTTPConnection(address, timeout=60) for _ in range(CONNECTIONS)]
        self._pool = ThreadPoolExecutor(CONNECTIONS)

    def get(self, path: str) -> bytes:
        """The body of an answer."""
        connection = self._free.pop()
        connection.request("GET", f"/{path.removeprefix('/')}", headers=self._headers)
        answer = connection.getresponse()
        body = answer.read()
        self._free.append(connection)
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
        return body

    def page(self, offset: int) -> tuple[float, float]:
        """Milliseconds to the last byte of a page's JSON, and to the last byte of its thumbnails."""
        begun = time.perf_counter()
        entries = json.loads(self.get(f"/api/samples?offset={offset}&limit={PAGE}"))["entries"]
        listed = time.perf_counter()
        found = list(self._pool.map(self.get, [entry["picture"] for entry in entries]))
        if len(found) != PAGE or not all(body.startswith(b"\xff\xd8") for body in found):
            raise RuntimeError("a page lacks thumbnails")
        return 1000 * (listed - begun), 1000 * (time.perf_counter() - begun)


def resident(process: subprocess.Popen[str]) -> dict[str, int]:
    """Megabytes of a process: resident, its highest value, and without pages of files."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|VmHWM|RssAnon):\s+(\d+)", status, re.MULTILINE))
    return {name: int(kilobytes) // 1000 for name, kilobytes in found.items()}


def processor_seconds(process: subprocess.Popen[str]) -> float:
    """Seconds of the processor that a process has taken so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def forget_pages(folder: Path) -> None:
    """Has the system drop the pages of the packed file from memory."""
    with (folder / "packed" / "first.mult").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    name: str, browser: Browser, process: subprocess.Popen[str], offsets: list[int], before: Any = None
) -> None:
    """One row of the table: medians, the slowest, and what the server's processor did, whatever else runs here."""
    taken, found = processor_seconds(process), []
    for offset in offsets:
        if before is not None:
            before()
        found.append(browser.page(offset))
    cpu = 1000 * (processor_seconds(process) - taken) / len(offsets)
    listed, whole = zip(*found, strict=True)
    cells = (statistics.median(listed), statistics.median(whole), max(whole), cpu)
    print(f"| {name} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |", flush=True)


def measure_pages(folder: Path, samples: int, rounds: int) -> None:
    """Pages at random places: nothing of them cached, and again."""
    manifest = make_manifest(folder, samples)
    random.seed(3)
    begun = time.perf_counter()
    with viewer(manifest) as (address, cookie, process):
        browser = Browser(address, cookie)
        first = browser.page(0)[1]
        print(f"\n{samples:,} samples; from the command to its first page: {time.perf_counter() - begun:.1f} s")
        print(f"(of these the page itself: {first:.0f} ms)\n")
        print("| page of 50 | JSON, ms | with thumbnails, ms | the slowest, ms | processor of the server, ms |")
        print("| --- | ---: | ---: | ---: | ---: |")
        places = random.sample(range(samples - PAGE), 2 * rounds)
        measure("not in memory", browser, process, places[:rounds], lambda: forget_pages(folder))
        measure("in the system's cache", browser, process, places[rounds:])
        measure("seen before", browser, process, places[-5:] * 3)
        print(f"\nresident, MB: {resident(process)}")
        begun = time.perf_counter()
        start: int | None = 0
        requests = 0
        while start is not None:
            found = json.loads(browser.get(f"/api/find?q=no-such-id&start={start}"))
            start, requests = found["next"], requests + 1
        print(
            f"a search through all ids: {time.perf_counter() - begun:.1f} s in {requests} requests; {resident(process)}"
        )


def measure_tar(folder: Path, gigabytes: float) -> None:
    """From the command to the first picture of a tar."""
    tar = make_tar(folder, gigabytes)
    times = []
    for _ in range(5):
        with tar.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        with viewer(tar) as (address, cookie, process):
            browser = Browser(address, cookie)
            entries = json.loads(browser.get(f"/api/samples?limit={PAGE}"))["entries"]
            browser.get(entries[0]["picture"])
            times.append(time.perf_counter() - begun)
            taken, memory = processor_seconds(process), resident(process)
    print(
        f"\n{tar.stat().st_size / 1e9:.1f} GB of tar; from the command to the first picture: "
        f"{statistics.median(times):.2f} s (slowest {max(times):.2f} s, processor {taken:.2f} s); {memory}"
    )


def make_explored(folder: Path, partitions: int) -> str:
    """A dataset's folder with drops, scores and three manifests: links to the files of one partition."""
    from scale import datasets

    from mm_assets.pipeline.state.manifests import build_manifest

    place = datasets.Local(folder)
    place.settings |= {
        "annotators": [{"type": "text_length"}],
        "filters": [{"type": "text_length", "min_chars": 30, "scope": "sample"}],
    }
    done = folder / "made"
    if not done.exists():
        (folder / "in").mkdir(parents=True, exist_ok=True)
        random.seed(1)
        with tarfile.open(folder / "in" / f"{datasets.FIRST}.tar", "w") as archive:
            for n in range(EXPLORED_SAMPLES):
                text, grade = "word " * random.randint(1, 60), json.dumps({"grade": random.random()})
                for name, data in ((f"{n:06}.txt", text.encode()), (f"{n:06}.json", grade.encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
            archive.addfile(tarfile.TarInfo(".hidden"))
        dataset, _ = datasets.make_dataset(place, partitions)
        build_manifest(dataset)
        datasets.withdraw_one(dataset)
        build_manifest(dataset)
        datasets.publish_one(dataset)
        build_manifest(dataset)
        done.touch()
    return datasets.declared(place).store.url


def measure_explore(folder: Path, partitions: int, rounds: int) -> None:
    """Each route of the exploring pages over a dataset's folder: the first answer, and the median of further ones."""
    url = make_explored(folder / f"explored-{partitions}", partitions)
    one, other = "p0000005", f"p{partitions - 1:07}"
    with viewer(Path(url)) as (address, cookie, process):
        browser = Browser(address, cookie)
        print(f"\n{partitions:,} partitions, {partitions * EXPLORED_SAMPLES:,} samples\n")
        print("| request | first, s | again, s | resident, MB | its highest value, MB |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, path in {
            "samples": "samples?limit=50",
            "partitions": "partitions?limit=200",
            "relations": "explore/relations",
            "filter": "explore/select?where=text_chars+%3E+250",
            "filter, ordered": "explore/select?where=text_chars+%3E+200&order=text_chars&direction=desc",
            "drops by reason": "explore/totals",
            "a page of drops": "explore/drops?reason=text_length.chars_below_min",
            "a page without any": "explore/losses?stage=rows&reason=none",
            "measures": "explore/scores",
            "histogram of a column": "explore/histogram?score=text_chars",
            "histogram of sizes": "explore/histogram?score=content_bytes",
            "other limits": "explore/kept?score=text_chars&at_least=100",
            "versions": "explore/versions",
            "two versions": "explore/diff?old=previous&new=newest",
            "samples that differ": f"explore/diff/samples?old=previous&new=newest&partition={other}",
            "locate an id": f"explore/locate?partition={one}&sample_id=000999",
            "locate, no such id": "explore/locate?sample_id=none",
            "origin": f"explore/origin?part={one}&sample_id=000999",
            "samples of a member": f"explore/at?shard={one}.tar&member=000005.txt",
        }.items():
            times = []
            for _ in range(1 + rounds):
                begun = time.perf_counter()
                browser.get(f"/api/{path}")
                times.append(time.perf_counter() - begun)
            memory = resident(process)
            again = statistics.median(times[1:])
            print(f"| {name} | {times[0]:.2f} | {again:.2f} | {memory['VmRSS']} | {memory['VmHWM']} |", flush=True)


def main() -> None:
    """Measures all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder for the data, some gigabytes")
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tar-gigabytes", type=float, default=4)
    parser.add_argument("--partitions", type=int, default=10_000, help="of the explored dataset")
    parser.add_argument("--only", choices=("pages", "explore", "tar"), help="measure one of them")
    given = parser.parse_args()
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
    if given.only in (None, "pages"):
        measure_pages(given.data, given.samples, given.rounds)
    if given.only in (None, "explore"):
        measure_explore(given.data, given.partitions, EXPLORED_ROUNDS)
    if given.only in (None, "tar"):
        measure_tar(given.data, given.tar_gigabytes)


if __name__ == "__main__":
    main()
