"""Losses: what is published in spite of a fault is listed beside what was lost, with equal numbers in every place."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import mm_assets
from mm_assets.cli.main import main
from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS, RAW_SHARDS, ROWS
from mm_assets.pipeline.partition import publish
from mm_assets.pipeline.partition.stages import StageResult
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import Loss, Selection, loss_page, loss_totals, losses, recorded_totals
from mm_assets.pipeline.state.records import Attempt, StageFailure
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..chain import at_work, declare, record_of, run_chain
from ..explore.test_provenance import members_of
from ..shards import make_shard

FILES = Path(__file__).parents[3] / "docs" / "spec" / "files.md"


def jpeg() -> bytes:
    target = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(target, "JPEG")
    return target.getvalue()


def write_tar(path: Path, members: dict[str, bytes], *, ended: bool = True) -> dict[str, tuple[int, int]]:
    """A shard, without its end if wanted; offset and size of each member."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        end = tar.offset
    if not ended:
        path.write_bytes(path.read_bytes()[:end])
    with tarfile.open(path) as tar:
        return {info.name: (info.offset_data, info.size) for info in tar}


class Faulty(NamedTuple):
    """A dataset, what the stages did to the partition with faults, and the place of each member of its shard."""

    dataset: DatasetStore
    results: dict[str, StageResult]
    places: dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    """A dataset whose first shard decides the columns, and whose second has every fault."""
    folder = tmp_path_factory.mktemp("faulty")
    shards = folder / "in"
    shards.mkdir()
    write_tar(shards / "a.tar", {"0.json": b'{"price": 1}', "0.jpg": jpeg(), "0.txt": b"a"})
    spec = declare(folder / "root", shards, pack="image_text", on_undecodable="keep")
    register(DatasetStore(spec))
    later = [{"price": "free", "author": "x"}, {"price": 2, "author": "y", "extra": 1}, {"price": "on request"}]
    members = {f"{n}.json": json.dumps(value).encode() for n, value in enumerate(later)}
    members |= {f"{n}.jpg": jpeg() for n in range(3)} | {f"{n}.txt": b"t" for n in range(3)}
    members["1.jpg"] = jpeg()[:-800]  # its header is an image's, so that it is packed
    members["2.jpg"] = b"not an image"  # its field refuses it, so that it is lost
    places = write_tar(shards / "b.tar", members, ended=False)
    dataset, results = run_chain(spec)
    return Faulty(dataset, results["b"], places)


COUNTS = {
    RAW_SHARDS.name: {"kept.missing_end": 1},
    ROWS.name: {"kept.no_column": 3, "kept.null_cast": 2},
    FILTERED_ROWS.name: {"kept.undecodable": 1, "packable.unpackable_image": 1},
}


def test_faults_that_keep_nothing_back_are_items(faulty: Faulty) -> None:
    """Keys, casts, undecodable media and a missing end are listed with count, sample, member, bytes and what to do."""
    dataset, places = faulty.dataset, faulty.places
    listed = {(loss.reason, loss.detail.partition(":")[0]): loss for loss in losses(DatasetState(dataset), ["b"])}
    author = listed["kept.no_column", "key 'author' is not a column"]
    assert (author.count, author.sample_id, author.member) == (2, "0", "0.json")
    assert (author.byte_offset, author.byte_size) == places["0.json"]
    assert listed["kept.no_column", "key 'extra' is not a column"].sample_id == "1"
    cast = listed["kept.null_cast", "column 'price' is int64, found free"]
    assert (cast.count, cast.sample_id, cast.kind) == (2, "0", "kept")
    kept = listed["kept.undecodable", "image"]
    assert (kept.sample_id, kept.member, (kept.byte_offset, kept.byte_size)) == ("1", "1.jpg", places["1.jpg"])
    (end,) = (loss for loss in listed.values() if loss.reason == "kept.missing_end")
    assert end.byte_offset == Path(end.shard or "").stat().st_size
    (lost,) = (loss for loss in listed.values() if loss.kind == "lost")
    assert (lost.reason, lost.member) == ("packable.unpackable_image", "2.jpg")
    assert len(listed) == 6


SRT = b"1\n00:00:01,000 --> 00:00:02,000\nfrom A --> B\n"
LATE = b"\n2\n00:00:04,000 --> 00:00:03,000\nlost\n"
SUBTITLES = {
    "good": SRT,
    "part": SRT + LATE + LATE,
    "bad": b"1\n00:00:0x,000 --> 00:00:02,000\nx\n",
    "junk": b"junk --> ",
}


@pytest.mark.parametrize("on_undecodable", ["keep", "drop_sample"])
def test_every_subtitle_file_with_a_fault_is_an_item(tmp_path: Path, on_undecodable: str) -> None:
    """Each refused file of subtitles, each that lost a cue and each refused JSON value is listed."""
    (tmp_path / "in").mkdir()
    members: dict[str, bytes] = {}
    for name, content in SUBTITLES.items():
        words = b'{"n": 1, "words": [{"word": "a", "start": 2, "end": 1}]}' if name == "junk" else b'{"n": 2}'
        members |= {f"{name}.json": words, f"{name}.jpg": jpeg(), f"{name}.srt": content}
    places = write_tar(tmp_path / "in" / "s.tar", members)
    selector = {"take": "json", "key": "words", "on_refused": "absent"}
    fields = [
        {"name": "subtitles", "field": "TimedTextField", "modality": "text"},
        {"name": "words", "field": "TimedTextField", **selector},
    ]
    pack = {"preset": "generic", "fields": fields}
    dataset, results = run_chain(declare(tmp_path / "root", tmp_path / "in", pack=pack, on_undecodable=on_undecodable))
    listed = {(loss.sample_id, loss.reason, loss.modality): loss for loss in losses(DatasetState(dataset), ["s"])}
    assert listed.keys() == {
        ("part", "kept.omitted", "text"),
        ("bad", "kept.refused", "text"),
        ("junk", "kept.refused", "text"),
        ("junk", "kept.refused", "metadata"),
    }
    assert "line 6: " in listed["part", "kept.omitted", "text"].detail
    assert listed["part", "kept.omitted", "text"].detail.endswith("; and 1 more")
    for (sample, _, modality), loss in listed.items():
        member = f"{sample}.{'srt' if modality == 'text' else 'json'}"
        assert (loss.member, (loss.byte_offset, loss.byte_size)) == (member, places[member])
        assert loss.kind == "kept"
    counts = results["s"][FILTERED_ROWS.name].record.counts
    assert {name: count for name, count in counts.items() if name.startswith("kept.")} == {
        "kept.omitted": 1,
        "kept.refused": 3,
    }
    with mm_assets.open(dataset.store.path_of("manifest.json")) as packed:
        read = {packed.sample_ids[i]: packed[i] for i in range(len(packed))}
    cue = [(1.0, 2.0, "from A --> B")]
    assert {name: sample["subtitles"] for name, sample in read.items()} == {
        "good": cue,
        "part": cue,
        "bad": None,
        "junk": None,
    }
    assert bytes(read["bad"]["rest"][0][1]) == SUBTITLES["bad"]


UNKNOWN = (  # of an example, unless it is known
    *("sample_id", "position", "modality", "member", "byte_offset", "byte_size", "frame_index"),
    *("content_type", "value", "setting", "limit"),
)


def facts_of(loss: Loss) -> dict[str, object]:
    """What the place of an example in a record says."""
    return {"stage": loss.stage, "reason": loss.reason, "count": loss.count}


def test_every_place_has_the_same_numbers(faulty: Faulty) -> None:
    """Items, totals, record and manifest agree on reasons, counts and examples."""
    dataset = faulty.dataset
    items: Counter[tuple[str, str]] = Counter()
    for loss in losses(DatasetState(dataset), ["a", "b"]):
        items[loss.stage, loss.reason] += loss.count
    totals = loss_totals(DatasetState(dataset), ["a", "b"])
    assert {(t.example.stage, t.example.reason): t.count for t in totals} == items
    listed = record_of(dataset, "b").losses
    assert {stage: {r: item["count"] for r, item in reasons.items()} for stage, reasons in listed.items()} == COUNTS
    for total in totals:
        first = total.example
        shown = listed[first.stage][first.reason]["example"]
        assert {**asdict(first), "shard": "b.tar"} == {**dict.fromkeys(UNKNOWN), **shown, **facts_of(first)}
    assert record_of(dataset, "a").losses == {}
    assert json.loads(dataset.store.read_bytes("manifest.json"))["losses"] == listed
    assert {stage: {r: n for (s, r), n in items.items() if s == stage} for stage, _ in items} == COUNTS


def test_the_ui_has_the_same_numbers(faulty: Faulty) -> None:
    """Dagster's table has a row for each reason, with its count, and the metadata of a stage what it kept."""
    from mm_assets.orchestration.report import loss_tables, stage_metadata

    totals = loss_totals(DatasetState(faulty.dataset), ["a", "b"])
    items = {(total.example.stage, total.example.reason): total.count for total in totals}
    records = [record.data for record in loss_tables(totals)["losses"].records]
    assert {(row["stage"], row["reason"]): int(str(row["count"])) for row in records} == items
    assert [row["kind"] for row in records] == ["lost", "kept", "kept", "kept", "kept"]
    named = stage_metadata(faulty.dataset.spec, faulty.results[ROWS.name])["kept"].md_str
    assert "| kept.no_column | 2 | key 'author' is not a column | 0 |" in named
    assert "| kept.no_column | 1 | key 'extra' is not a column | 1 |" in named


def copied(faulty: Faulty, folder: Path) -> DatasetStore:
    """The dataset in a folder of its own."""
    shutil.copytree(faulty.dataset.spec.root, folder / "root")
    return DatasetStore(faulty.dataset.spec.replace(root=str(folder / "root")))


def test_a_record_does_not_list_the_failure_of_an_earlier_run(faulty: Faulty, tmp_path: Path) -> None:
    """A partition that failed before and is published now has the losses of the run that was published."""
    dataset = copied(faulty, tmp_path)
    before = record_of(dataset, "b")
    failure = StageFailure(partition="b", stage=RAW_SHARDS.name, detail="the storage failed")
    dataset.write_attempt(Attempt(partition="b", stages=before.stages, failure=failure))
    assert [(t.example.reason, t.count) for t in loss_totals(DatasetState(dataset), ["b"])] == [("failed", 1)]
    assert at_work(publish.publish, dataset, "b")[0] == before
    assert dataset.attempt("b") is None


class WithoutSql(DatasetStore):
    """Opens no tables."""

    def duckdb(self) -> Any:
        raise AssertionError("DuckDB is opened")


def test_tables_are_opened_only_where_something_is_lost(faulty: Faulty, tmp_path: Path) -> None:
    """Publishing a partition without losses starts no DuckDB; one with losses does."""
    dataset = WithoutSql(copied(faulty, tmp_path).spec)
    assert at_work(publish.publish, dataset, "a")[0].losses == {}
    with pytest.raises(AssertionError, match="DuckDB is opened"):
        at_work(publish.publish, dataset, "b")


def test_the_manifest_is_the_same_wherever_the_shards_are(tmp_path: Path) -> None:
    """It sums the partitions with the example of the first, names no folder, and truncates long explanations."""
    rows = [
        {"sample_id": "0", "path": "there.jpg"},
        {"sample_id": "1", "path": "gone.jpg"},
        {"sample_id": "2", "path": "there.jpg", "modality": "x" * 600},
    ]
    found = []
    for place in ("here", "elsewhere/with spaces"):
        shards = tmp_path / place / "in"
        shards.mkdir(parents=True)
        (shards / "there.jpg").write_bytes(jpeg())
        for key in ("a", "b"):
            (shards / f"{key}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = declare(tmp_path / place / "root", shards / "*.jsonl", pack="generic", on_materialize_error="drop_row")
        dataset, _ = run_chain(spec)
        found.append(json.loads(dataset.store.read_bytes("manifest.json"))["losses"])
    assert found[0] == found[1]
    (gone,) = (item for name, item in found[0][FILTERED_ROWS.name].items() if name.startswith("materialize."))
    assert gone["count"] == 2
    assert {name: gone["example"][name] for name in ("partition", "sample_id", "shard")} == {
        "partition": "a",
        "sample_id": "1",
        "shard": "gone.jpg",
    }
    assert gone["example"]["detail"].startswith("gone.jpg: ")
    detail = found[0][ROWS.name]["bad_modality"]["example"]["detail"]
    assert (len(detail), detail[-2:]) == (500, "x…")


def test_a_damaged_record_is_pending(faulty: Faulty, tmp_path: Path) -> None:
    """A record that cannot be read keeps its partition out of the manifest until it is published again."""
    dataset = copied(faulty, tmp_path)
    name = dataset.record_name("b", record_of(dataset, "b").recipe)
    dataset.store.delete("manifest.json")
    dataset.store.write_bytes(name, b'{"version": 0}')
    assert manifests.build_manifest(dataset).left_out == {"b": "its record is damaged"}


def test_a_damaged_table_is_named(faulty: Faulty, tmp_path: Path) -> None:
    """Losses that cannot be read are an error with the file, not one of DuckDB's."""
    dataset = copied(faulty, tmp_path)
    (table,) = Path(dataset.store.path_of("dropped")).glob("b.*.parquet")
    table.write_bytes(b"PAR1")
    for listed in (loss_totals, lambda *given: list(losses(*given))):
        with pytest.raises(SourceError, match=r"dropped/b\.[0-9a-f]+\.parquet.*: losses cannot be read: "):
            listed(DatasetState(dataset), ["b"])


def test_the_command_separates_what_is_kept_from_what_is_lost(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`mm-assets losses` heads its list with the numbers of both, as text and as JSON."""
    dataset = faulty.dataset
    monkeypatch.chdir(tmp_path)
    given = ["losses", "--root", dataset.spec.root, "-d", dataset.spec.name]
    said = CliRunner().invoke(main, given)
    assert said.exit_code == 0, said.output
    first, *lines = said.stdout.splitlines()
    assert first == "data: 1 item lost, 7 published in spite of a fault"
    (author,) = (line for line in lines if line.startswith("data/b: kept: rows: kept.no_column") and "author" in line)
    assert re.search(
        r"b\.tar, 0\.json, bytes 512 to \d+ \(sample 0\): key 'author' is not a column \(2 times\)$", author
    )
    found = json.loads(CliRunner().invoke(main, [*given, "--json"]).stdout)["datasets"]["data"]
    assert {(t["kind"], t["reason"]): t["count"] for t in found["totals"]} == {
        ("kept" if reason.startswith("kept.") else "lost", reason): count
        for reasons in COUNTS.values()
        for reason, count in reasons.items()
    }
    assert all(total["example"] in found["losses"] for total in found["totals"])


def test_every_reason_has_advice_of_its_own() -> None:
    """For each reason that the documentation lists, and for a failure of each stage, it is said what to do."""
    text = FILES.read_text().partition("### `rejects`")[2].partition("### `dropped`")[0]
    rows = re.findall(r"^\| `(?:index|rows)` \| ((?:`[a-z_0-9 ]+`(?:, )?)+) \|", text, re.MULTILINE)
    reasons = [reason for row in rows for reason in re.findall(r"`([^`]+)`", row)]
    assert len(reasons) > 30
    default = Loss(partition="p", stage=ROWS.name, reason="of another source").advice
    assert [r for r in reasons if Loss(partition="p", stage=ROWS.name, reason=r).advice == default] == []
    for stage in (RAW_SHARDS, ROWS, FILTERED_ROWS):
        assert Loss(partition="p", stage=stage.name, reason="failed").advice.startswith(
            "correct what the message names"
        )


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> DatasetState:
    """Two partitions with a hidden file each, of which images narrower than 10 are dropped."""
    folder = tmp_path_factory.mktemp("narrow")
    for key in "ab":
        make_shard(folder / "in" / f"{key}.tar", members_of(key))
    filters = [{"type": "image_size", "min_width": 10}]
    return DatasetState(run_chain(declare(folder / "root", folder / "in", filters=filters, pack="image_text"))[0])


DROPS = Selection(stage=FILTERED_ROWS.name, reason="image_size.width_below_min")
HIDDEN = Selection(stage=ROWS.name, reason="hidden file")


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
def test_pages_have_every_loss_once(narrow: DatasetState, limit: int) -> None:
    """Pages of any size have the losses of the whole list in its order, drops with value, limit and place."""
    found: list[Loss] = []
    after: str | None = ""
    while after is not None:
        page = loss_page(narrow, after=after, limit=limit)
        assert len(page.items) <= limit
        found += page.items
        after = page.after
    assert found == list(losses(narrow))
    drops = [loss for loss in found if loss.kind == "dropped"]
    assert drops == list(losses(narrow, selection=Selection(kind="dropped"))) == list(losses(narrow, selection=DROPS))
    assert [(d.partition, d.sample_id, d.value) for d in drops] == [
        ("a", "a0", 4.0),
        ("a", "a2", 6.0),
        ("b", "b0", 5.0),
        ("b", "b3", 7.0),
    ]
    assert {(d.reason, d.setting, d.limit) for d in drops} == {("image_size.width_below_min", "min_width", 10.0)}
    with tarfile.open(drops[0].shard or "") as tar:
        info = tar.getmember(drops[0].member or "")
    assert (drops[0].byte_offset, drops[0].byte_size) == (info.offset_data, info.size)
    assert drops[0].content_type == "image/png"


def test_losses_are_selected(narrow: DatasetState) -> None:
    """A reason, samples or a partition select; what nothing has gives none; another page is refused."""
    assert [loss.partition for loss in losses(narrow, selection=HIDDEN)] == ["a", "b"]
    assert not list(losses(narrow, selection=Selection(reason="image_size.height_below_min")))
    assert [loss.sample_id for loss in losses(narrow, selection=Selection(sample_ids=["b0", "b1"]))] == ["b0"]
    assert [loss.sample_id for loss in loss_page(narrow, DROPS, partition="b").items] == ["b0", "b3"]
    first = loss_page(narrow, HIDDEN, limit=1)
    second = loss_page(narrow, HIDDEN, limit=1, after=first.after or "")
    assert [loss.partition for page in (first, second) for loss in page.items] == ["a", "b"]
    assert second.after is None
    for wrong in ({"after": "nonsense"}, {"partition": "c"}):
        with pytest.raises(ConfigError):
            loss_page(narrow, **wrong)  # type: ignore[arg-type]  # of each some are wrong


def test_totals_are_those_of_records_whatever_the_settings(
    narrow: DatasetState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened without its declaration, by which nothing is up to date, a dataset has the same totals, without tables."""
    from mm_assets.pipeline.state import losses as module
    from mm_assets.view.backends.folder import open_dataset_store

    expected = [(t.count, t.example.reason) for t in loss_totals(narrow, ["a", "b"])]
    assert sorted(expected) == [(2, "hidden file"), (4, "image_size.width_below_min")]
    monkeypatch.setattr(module, "_of_attempt", lambda *_: pytest.fail("the tables of a partition are read"))
    for state in (narrow, DatasetState(open_dataset_store(narrow.dataset.store.url))):
        assert [(total.count, total.example.reason) for total in recorded_totals(state)] == expected


def test_a_dataset_without_runs_has_no_losses(tmp_path: Path) -> None:
    """Before the first run there is nothing to list."""
    make_shard(tmp_path / "in" / "a.tar", members_of("a"))
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    register(dataset)
    assert loss_page(DatasetState(dataset)).items == []
    assert recorded_totals(DatasetState(dataset)) == []


def test_a_page_that_finds_nothing_ends_in_time(narrow: DatasetState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time each page reads one partition and says where the next one starts, until all were read."""
    from mm_assets.pipeline.state import losses as module

    monkeypatch.setattr(module, "_PAGE_SECONDS", -1.0)
    nothing = Selection(reason="no.such")
    first = loss_page(narrow, nothing)
    assert (list(first.items), first.after) == ([], "0:b")
    last = loss_page(narrow, nothing, after=first.after or "")
    assert (list(last.items), last.after) == ([], None)
