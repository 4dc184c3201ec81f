"""What `mm-assets run` and `mm-assets losses` say was lost, against a recount that knows only `tarfile` and Pillow."""

import gzip
import io
import json
import random
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from mm_assets.cli.main import main

FAILED = "failed"
OPTIONS = ("--shards", "in", "--root", "out", "--dataset", "web", "--pack", "generic")
SETTINGS = ("--set", "samples.sample_id_field=id")


class Item(NamedTuple):
    partition: str
    reason: str
    member: str | None = None
    byte_offset: int | None = None
    byte_size: int | None = None


def jpeg(seed: int) -> bytes:
    """A small image that differs from those of other seeds."""
    out = io.BytesIO()
    Image.frombytes("RGB", (64, 48), random.Random(seed).randbytes(64 * 48 * 3)).save(out, "JPEG")
    return out.getvalue()


def sample(partition: str, number: int) -> dict[str, bytes]:
    key = f"{partition}-{number}"
    return {
        f"{key}.jpg": jpeg(number),
        f"{key}.txt": f"caption {key}".encode(),
        f"{key}.json": json.dumps({"id": key}).encode(),
    }


def tar_of(members: list[tuple[str, bytes]], *, link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(info)
    return out.getvalue()


def good(partition: str, **changes: bytes) -> list[tuple[str, bytes]]:
    """Two samples; a changed member is named by its number and extension, as in `m1_jpg`."""
    members = sample(partition, 0) | sample(partition, 1)
    for name, content in changes.items():
        number, extension = name.removeprefix("m").split("_")
        members[f"{partition}-{number}.{extension}"] = content
    return list(members.items())


def shards_of(name: str) -> bytes:
    """A shard of a kind by its name; each but `good` lacks something."""
    second = 512 + -(-len(jpeg(0)) // 512) * 512  # the second member's header
    damaged = bytearray(tar_of(good(name)))
    if name == "header":
        damaged[second + 3] ^= 0x10  # in the name, so that the checksum no longer fits
    elif name == "checksum":
        damaged[second + 148 : second + 156] = b"0000001\0"
    elif name == "truncated":
        del damaged[second + 700 :]
    elif name == "gz":
        return gzip.compress(damaged, mtime=0)[:-2000]
    elif name == "json":
        tokens = {"id": "json-2", "texts": [None, "words"], "images": ["nowhere.jpg", None]}
        members = good(name, m1_json=b'{"id": "json-1", ')
        return tar_of([*members, ("json-2.json", json.dumps(tokens).encode())])
    elif name == "image":
        again = [("other.txt", b"again"), ("other.json", b'{"id": "image-0"}')]
        return tar_of([*good(name, m1_jpg=jpeg(1)[:-600]), *again])
    elif name == "names":
        return tar_of([*good(name), ("names-0.txt", b"again")], link="names-1.png")
    elif name == "html":
        return b"<!DOCTYPE html><html><body>404</body></html>" * 40
    elif name == "lfs":
        return b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 10240\n"
    elif name == "zip":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("a.txt", "text" * 300)
        return packed.getvalue()
    elif name == "noise":
        return random.Random(7).randbytes(4096)
    elif name == "text":
        return gzip.compress(b"no archive" * 400, mtime=0)
    return bytes(damaged)


GOOD = ("good",)
UNREADABLE = (
    "header",
    "gz",
    "html",
)  # each costs seconds; "checksum", "truncated", "lfs", "zip" and "noise" are others
INCOMPLETE = ("json", "image", "names")


def recount(path: Path) -> Iterator[Item]:
    """What of a shard cannot be in the packed files, found without this project."""
    partition = path.name.split(".")[0]
    ranged = path.suffix == ".tar"
    try:
        with tarfile.open(path, "r:*") as tar:
            entries = [(info, (tar.extractfile(info) or io.BytesIO()).read() if info.isreg() else b"") for info in tar]
            tar.fileobj.seek(tar.offset)
            if any(tar.fileobj.read(512)):
                raise tarfile.ReadError("a header is damaged")
    except (tarfile.TarError, EOFError, OSError, ValueError):
        yield Item(partition, FAILED)
        return

    def item(reason: str, info: tarfile.TarInfo) -> Item:
        return Item(partition, reason, info.name, info.offset_data if ranged and info.isreg() else None, info.size)

    names = {info.name for info, _ in entries}
    seen: set[str] = set()
    ids: dict[str, str] = {}
    repeated_ids: set[str] = set()
    for info, content in entries:
        key = info.name.split(".")[0]
        if not info.isreg():
            yield item("symbolic link", info)
            continue
        if info.name in seen:
            yield item("repeated_member", info)
            continue
        seen.add(info.name)
        if info.name.endswith(".json"):
            try:
                value = json.loads(content)
            except ValueError:
                yield item("bad_json", info)
                continue
            if ids.setdefault(value["id"], key) != key:
                repeated_ids.add(key)
            for token in value.get("images", ()):
                if token is not None and token not in names:
                    yield Item(partition, "packable.not_materialized")
        elif info.name.endswith(".jpg"):
            try:
                Image.open(io.BytesIO(content)).load()
            except OSError:
                yield item("decodable.undecodable", info)
    for info, _ in entries:
        if info.name.split(".")[0] in repeated_ids:
            yield item("duplicate_sample_id", info)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_losses_equal_a_recount(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run names every bad shard and exits with 1, good ones are published, and each lost item is listed once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for name in (*GOOD, *UNREADABLE, *INCOMPLETE):
        suffix = ".tar.gz" if name in ("gz", "text") else ".tar"
        (tmp_path / "in" / f"{name}{suffix}").write_bytes(shards_of(name))
    expected = Counter(item for path in sorted((tmp_path / "in").iterdir()) for item in recount(path))
    failed = {item.partition for item in expected if item.reason == FAILED}
    assert failed == set(UNREADABLE)
    assert {item.partition for item in expected} == {*UNREADABLE, *INCOMPLETE}

    done = command("run", *OPTIONS, *SETTINGS)
    assert done.exit_code == 1, done.output
    for partition in failed:
        assert re.search(rf"failed: web/{partition}: web__raw_shards: \w+: .*{partition}\.tar", done.output), partition
    published = {path.stem for path in (tmp_path / "out/web/published").glob("*.json")}
    assert published == {*GOOD, *INCOMPLETE}
    for reason in {item.reason for item in expected}:
        assert reason in done.output
    assert "`mm-assets losses --root out --dataset web`" in done.output

    found = json.loads(command("losses", "--root", "out", "-d", "web", "--json").stdout)
    items = Counter(
        Item(
            loss["partition"],
            loss["reason"],
            *((None,) * 3 if loss["reason"] == FAILED else (loss["member"], loss["byte_offset"], loss["byte_size"])),
        )
        for loss in found["losses"]
    )
    assert items == expected
    assert {t["reason"]: t["count"] for t in found["totals"]} == Counter(item.reason for item in expected.elements())
    assert all(loss["advice"] for loss in found["losses"])
    assert found["unpublished"] == []

    counts = json.loads((tmp_path / "out/web/manifest.json").read_text())["losses"]
    assert {reason: count for stage in counts.values() for reason, count in stage.items()} == {
        reason: count
        for reason, count in Counter(item.reason for item in expected.elements()).items()
        if reason != FAILED
    }

    lines = command("losses", "--root", "out", "-d", "web", "--partition", "image").stdout.splitlines()
    assert lines[0] == "web: 3 items lost, in 1 partition"
    assert sum(line.startswith("web/image: lost: rows: duplicate_sample_id: ") for line in lines) == 2
