"""What the stages and `mm-assets losses` say was lost, against a recount that knows only `tarfile` and Pillow."""

import gzip
import io
import json
import random
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from mm_assets.cli.main import main
from mm_assets.errors import SourceError
from mm_assets.pipeline.partition.stages import TABLE_STAGES
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import losses
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..pipeline.chain import at_work

FAILED = "failed"
OPTIONS = ("--shards", "in", "--root", "out", "--dataset", "web", "--pack", "generic")
SHOWN = {"partition", "sample_id", "position", "modality", "shard", "member", "byte_offset", "byte_size", "detail"}
SHOWN |= {"content_type", "value", "setting", "limit", "frame_index"}
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
        f"{key}.json": json.dumps({"id": key, "price": number}).encode(),
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
        del damaged[1000:]  # in the first member
    elif name == "size":  # more than the file has, with a checksum that fits
        damaged[second + 124 : second + 136] = b"77777777777\0"
        damaged[second + 148 : second + 156] = b" " * 8
        damaged[second + 148 : second + 156] = b"%06o\0 " % sum(damaged[second : second + 512])
    elif name == "ending":
        del damaged[max(n for n in range(0, len(damaged), 512) if any(damaged[n : n + 512])) + 512 :]
    elif name == "gz":
        return gzip.compress(damaged, mtime=0)[:-2000]
    elif name == "keys":
        return tar_of(
            good(name, m0_json=b'{"id": "keys-0", "price": "free", "by": 1}', m1_json=b'{"id": "keys-1", "by": 2}')
        )
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
    elif name == "ar":
        return b"!<arch>\n" + bytes(4096)
    elif name == "noise":
        return random.Random(7).randbytes(4096)
    elif name == "empty":
        return b""
    elif name == "text":
        return gzip.compress(b"no archive" * 400, mtime=0)
    return bytes(damaged)


GOOD = ("good",)
DAMAGED = ("header", "checksum", "truncated", "size", "gz")
FOREIGN = ("html", "lfs", "ar", "noise", "text", "empty")
INCOMPLETE = ("json", "image", "names")
KEPT = ("keys", "ending")


KEYS = {"id", "price", "texts", "images"}  # those of the good shard, and those that make up rows


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

    if ranged and path.stat().st_size - tar.offset < 512:
        yield Item(partition, "kept.missing_end")

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
            yield from (Item(partition, "kept.no_column") for key_ in value.keys() - KEYS)
            if not isinstance(value.get("price", 0), int):
                yield Item(partition, "kept.null_cast")
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


def told(found: Iterable[Mapping[str, Any]]) -> Counter[Item]:
    """The items of losses as JSON, as often as each counts."""
    items: Counter[Item] = Counter()
    for loss in found:
        place = (loss["member"], loss["byte_offset"], loss["byte_size"])
        whole = loss["reason"] == FAILED or loss["kind"] == "kept"
        items[Item(loss["partition"], loss["reason"], *((None,) * 3 if whole else place))] += loss["count"]
    return items


def write_shards(folder: Path, names: Iterable[str]) -> Counter[Item]:
    """Writes shards of these kinds, and recounts what of them is lost or has a fault."""
    folder.mkdir(exist_ok=True)
    expected: Counter[Item] = Counter()
    for name in names:
        path = folder / f"{name}{'.tar.gz' if name in ('gz', 'text') else '.tar'}"
        path.write_bytes(shards_of(name))
        expected.update(recount(path))
    return expected


def test_every_kind_of_damage_is_listed(tmp_path: Path) -> None:
    """Of ten kinds of damage and six kinds of files that are not archives, each item is listed, and no other."""
    expected = write_shards(tmp_path / "in", GOOD)
    config = {"name": "web", "shards": str(tmp_path / "in"), "root": str(tmp_path / "out"), "settle_seconds": 0}
    config |= {"pack": "image_text", "samples": {"sample_id_field": "id"}}
    dataset = DatasetStore(DatasetSpec.from_config(config, where="defs.yaml"))
    register(dataset)  # the good shard decides the columns
    expected += write_shards(tmp_path / "in", (*DAMAGED, *FOREIGN, *INCOMPLETE, *KEPT))
    for partition in register(dataset).partitions:
        for stage, make in TABLE_STAGES.items():
            try:
                assert at_work(make, dataset, partition.key).passed
            except SourceError as error:
                failure = StageFailure.of(error, stage=stage.name, partition=partition.key)
                (made,) = DatasetState(dataset).latest([partition.key])
                dataset.write_attempt(replace(made, failure=failure))
                break
    found = [loss.to_json() for loss in losses(DatasetState(dataset), sorted(dataset.partitions()))]
    assert told(found) == expected
    assert {loss["partition"] for loss in found} == {*DAMAGED, *FOREIGN, *INCOMPLETE, *KEPT}
    failed = {loss["partition"]: loss for loss in found if loss["reason"] == FAILED}
    assert failed.keys() == {*DAMAGED, *FOREIGN}
    assert all(loss["detail"] and Path(loss["shard"]).name.startswith(key) for key, loss in failed.items())
    assert all(loss["advice"] for loss in found)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_losses_equal_a_recount(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run names every bad shard and exits with 1, good ones are published, and each lost item is listed once."""
    monkeypatch.chdir(tmp_path)
    unreadable = ("header", "html")  # a few: each partition costs seconds here
    expected = write_shards(tmp_path / "in", (*GOOD, *unreadable, *INCOMPLETE, "ending"))
    failed = {item.partition for item in expected if item.reason == FAILED}
    assert failed == set(unreadable)
    assert {item.partition for item in expected} == {*unreadable, *INCOMPLETE, "ending"}

    done = command("run", *OPTIONS, *SETTINGS)
    assert done.exit_code == 1, done.output
    for partition in failed:
        assert re.search(rf"failed: web/{partition}: raw_shards: .*{partition}\.tar", done.output), partition
    published = {path.stem.rsplit(".", 1)[0] for path in (tmp_path / "out/web/records").glob("*.json")}
    assert published == {*GOOD, *INCOMPLETE, "ending"}
    assert re.search(r"│ ending +│ done .*│ +1 │$", done.output, re.MULTILINE), "a fault is counted with its partition"
    for reason in {item.reason for item in expected}:
        assert reason in done.output
    assert re.search(r"all of them: `mm-assets losses --root out --set .*--dataset web`", done.output)

    found = json.loads(command("losses", "--root", "out", "-d", "web", "--json").stdout)["datasets"]["web"]
    assert told(found["losses"]) == expected
    assert {t["reason"]: t["count"] for t in found["totals"]} == Counter(item.reason for item in expected.elements())
    assert all(loss["advice"] for loss in found["losses"])
    assert found["unpublished"] == []

    listed = json.loads((tmp_path / "out/web/manifest.json").read_text())["losses"]
    counts = {(stage, reason): item["count"] for stage, reasons in listed.items() for reason, item in reasons.items()}
    totals = {(t["stage"], t["reason"]): t for t in found["totals"] if t["reason"] != FAILED}
    assert counts == {what: total["count"] for what, total in totals.items()}
    for (stage, reason), total in totals.items():  # the terminal, the UI and the manifest show the same item
        first = total["example"] | {"shard": Path(total["example"]["shard"] or "").name}
        assert listed[stage][reason]["example"] == {
            name: first[name] for name in SHOWN if first[name] not in (None, "")
        }

    lines = command("losses", "--root", "out", "-d", "web", "--partition", "image").stdout.splitlines()
    assert lines[0] == "web: 3 items lost"
    assert sum(line.startswith("web/image: lost: rows: duplicate_sample_id: ") for line in lines) == 2
