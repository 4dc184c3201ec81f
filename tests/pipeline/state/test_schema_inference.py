"""What registration decides about a dataset, and from how much of its shards."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import mm_assets
from mm_assets.errors import ConfigError, MmAssetsError
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.schema_inference import MAX_SAMPLES, MAX_SHARDS, Decision, decide_layout
from mm_assets.rows.sample import MAX_MEMBERS
from mm_assets.sources.tar_header import BLOCK
from mm_assets.storage.files import SourceFile

from ..chain import declare, run_chain
from ..shards import make_shard, tar_bytes

PNG = b"\x89PNG\r\n\x1a\n"  # names and JSON decide: nothing decodes it


def pairs(start: int, stop: int) -> dict[str, object]:
    """Samples of an image, a text and a JSON."""
    return {
        name: value
        for n in range(start, stop)
        for name, value in {f"{n:05}.png": PNG, f"{n:05}.txt": "t", f"{n:05}.json": {"n": n}}.items()
    }


def decide(folder: Path, **settings: Any) -> Decision:
    spec = declare(folder / "root", folder / "in", **settings)
    return decide_layout(spec, sorted(str(path) for path in (folder / "in").iterdir()))


def types(decision: Decision) -> dict[str, str]:
    return {column.name: column.type for column in decision.schema.user_columns}


@pytest.mark.parametrize(
    "stray",
    [
        {"README": "read me"},
        {"LICENSE": b"free"},
        {"_SUCCESS": b""},
        {"stats.json": {"count": 40}},
        {"00003.mid": b"MThd"},
        {"00003.state.npy": b"\x93NUMPY"},
        {"00003.left.png": PNG},
        {"zz.wav": b"RIFF"},
    ],
    ids=lambda stray: next(iter(stray)),
)
def test_an_odd_member_is_listed_and_changes_nothing(tmp_path: Path, stray: Mapping[str, object]) -> None:
    """Whatever lies beside the samples, preset and columns are those of the samples, and the stray is named."""
    make_shard(tmp_path / "in" / "a.tar", {**stray, **pairs(0, 20)})
    make_shard(tmp_path / "in" / "b.tar", pairs(20, 40))
    found = decide(tmp_path)
    assert found.schema.pack["preset"] == "image_text"
    assert types(found) == {"n": "int64"}
    (note,) = found.notes
    assert next(iter(stray)) in note or "00003" in note
    assert "and decided nothing" in note
    odd = [kind for kind in found.evidence()["sample_kinds"] if not kind["fits"]]
    assert [kind["num_samples"] for kind in odd] == [1]


@pytest.mark.parametrize(("others", "preset"), [(4, "image_text"), (5, "generic")])
def test_a_second_kind_of_sample(tmp_path: Path, others: int, preset: str) -> None:
    """A second kind is named with how many; from 20 % on the preset is the one that loses nothing of either."""
    second = {f"{n}.wav": b"RIFF" for n in range(others)}
    make_shard(tmp_path / "in" / "a.tar", {**pairs(0, 20), **second})
    found = decide(tmp_path)
    assert found.schema.pack["preset"] == preset
    assert [(str(kind), kind.num_samples, kind.fits) for kind in found.kinds] == [
        ("image + text", 20, True),
        ("audio", others, others == 5),
    ]
    assert [kind.unplaced for kind in found.kinds] == [(), () if others == 5 else ("audio",)]
    assert all("audio would be dropped" in note for note in found.notes)


def test_a_shard_of_another_kind_is_not_odd(tmp_path: Path) -> None:
    """A few samples that are the whole of one shard in six decide too: else that partition would be lost or opaque."""
    for n in range(5):
        make_shard(tmp_path / "in" / f"{n}.tar", pairs(20 * n, 20 * n + 20))
    make_shard(tmp_path / "in" / "z.tar", {"0.wav": b"RIFF"})
    found = decide(tmp_path)
    assert found.schema.pack["preset"] == "generic"
    assert {row.modality: row.packed_as for row in found.row_kinds}["audio"] == ("audio",)


def test_types_follow_most_values(tmp_path: Path) -> None:
    """Numbers widen; a few values of another type become null; where two types are frequent, the column is JSON."""
    objects = [{"price": 1, "size": n if n % 2 else n + 0.5, "mixed": n if n % 2 else "x"} for n in range(40)]
    objects[7]["price"] = "on request"
    members = {f"{n}.{e}": value for n, one in enumerate(objects) for e, value in (("txt", "t"), ("json", one))}
    make_shard(tmp_path / "in" / "s.tar", members)
    found = decide(tmp_path)
    assert types(found) == {"price": "int64", "size": "double", "mixed": "json"}
    evidence = {column.name: (column.num_samples, column.types) for column in found.columns}
    assert evidence["price"] == (40, {"int64": 39, "string": 1})
    assert evidence["size"] == (40, {"double": 20, "int64": 20})
    dataset, results = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    assert results["s"]["rows"].record.counts["kept.null_cast"] == 1
    stored = json.loads(Path(dataset.store.path_of("schema.json")).read_text())
    assert stored["evidence"] == found.evidence()


def test_a_column_of_an_earlier_release_gets_a_name_that_is_free(tmp_path: Path) -> None:
    """A stored column `source`, which is reserved since, is read as `user_source`; the next run fills it."""
    members = {"a.txt": "t", "a.json": {"source": "web", "user_source": 1, "Source_Member": "b"}}
    make_shard(tmp_path / "in" / "s.tar", members)
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    path = Path(dataset.store.path_of("schema.json"))
    stored = json.loads(path.read_text())
    for column in stored["user_columns"]:
        column["name"] = column["source"]  # as they were called
    path.write_text(json.dumps(stored))
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    (table,) = mm_assets.tables(tmp_path / "root" / "data", "filtered_rows")
    rows = pq.read_table(table, filters=pc.field("modality") == "metadata").to_pylist()
    values = {name: value for name, value in rows[0].items() if name.startswith("user_")}
    assert values == {"user_source_2": "web", "user_source": 1, "user_Source_Member": "b"}
    assert rows[0]["source"]["uri"].endswith("s.tar")


def test_the_sample_is_bounded_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many shards sixteen are opened, the first and the last among them, and some samples of each."""
    for n in range(40):
        make_shard(tmp_path / "in" / f"{n:02}.tar", {f"{n}-{k}.txt": "t" for k in range(3)})
    monkeypatch.setattr("mm_assets.pipeline.state.schema_inference.MAX_SAMPLES", 32)
    first = decide(tmp_path)
    assert [Path(shard.url).stem for shard in first.shards][:: MAX_SHARDS - 1] == ["00", "39"]
    assert (len(first.shards), first.num_shards, first.num_samples) == (MAX_SHARDS, 40, 32)
    assert decide(tmp_path) == first


def test_a_shard_that_cannot_be_read_stops_no_other(tmp_path: Path) -> None:
    """An unreadable shard is named and decides nothing; if none can be read, registration says why."""
    make_shard(tmp_path / "in" / "a.tar", pairs(0, 4))
    (tmp_path / "in" / "b.tar").write_bytes(b"<html>not found</html>" * 100)
    found = decide(tmp_path)
    assert found.schema.pack["preset"] == "image_text"
    assert found.decided_by == str(tmp_path / "in" / "a.tar")
    (note,) = found.notes
    assert "b.tar" in note
    (tmp_path / "in" / "a.tar").unlink()
    with pytest.raises(MmAssetsError, match=r"b\.tar"):
        register(DatasetStore(declare(tmp_path / "root", tmp_path / "in")))


def test_a_shard_without_samples_does_not_decide(tmp_path: Path) -> None:
    """If the sampled shards have no sample, others are tried in order."""
    for n in range(18):
        make_shard(tmp_path / "in" / f"{n:02}.tar", {"folder/": b""} if n != 16 else pairs(0, 2))
    found = decide(tmp_path)
    assert Path(found.decided_by or "").stem == "16"


@pytest.mark.parametrize("compress", [False, True], ids=["tar", "tar.gz"])
def test_only_the_start_of_a_large_shard_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: bool
) -> None:
    """Of a shard with many samples the first are read: of a compressed one all of it, once, else headers and JSON."""
    payload = bytes(range(256)) * 64
    every = {
        name: value
        for n in range(4 * MAX_SAMPLES // 16)
        for name, value in {f"{n}.png": payload, f"{n}.json": {"n": n}}.items()
    }
    content = tar_bytes(every)
    path = tmp_path / "in" / ("s.tar.gz" if compress else "s.tar")
    path.parent.mkdir()
    path.write_bytes(gzip.compress(content, compresslevel=0) if compress else content)
    monkeypatch.setattr("mm_assets.pipeline.state.schema_inference.MAX_SAMPLES", MAX_SAMPLES // 16)
    read: list[int] = []
    pread = SourceFile._pread

    def counting(self: SourceFile, offset: int, target: memoryview) -> None:
        read.append(len(target))
        pread(self, offset, target)

    monkeypatch.setattr(SourceFile, "_pread", counting)
    found = decide(tmp_path)
    assert (found.num_samples, types(found)) == (MAX_SAMPLES // 16, {"n": "int64"})
    quarter = len(content) // 4
    assert sum(read) < (quarter + (1 << 20) if compress else quarter // 4)


def test_few_blocks_of_a_shard_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample of a shard ends where another block of it would have to be read, by positions, and has one sample."""
    every = {
        name: value
        for n in range(20)
        for name, value in {f"{n}.png": bytes(2 << 20), f"{n}.json": {"n": n}}.items()  # each read shows one sample
    }
    make_shard(tmp_path / "in" / "s.tar", every)
    found = {}
    for most in (128, 8, 2, 0):
        monkeypatch.setattr("mm_assets.pipeline.state.schema_inference.MAX_READS", most)
        found[most] = decide(tmp_path).num_samples
    assert found[128] == 20
    assert found[128] > found[8] > found[2] > found[0] == 1


@pytest.mark.parametrize("most", [2, MAX_SAMPLES])
def test_a_compressed_shard_decides_as_the_same_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Texts, JSON, folders, large texts and links give the same layout, also where the sample ends before the shard."""
    monkeypatch.setattr("mm_assets.pipeline.state.schema_inference.MAX_SAMPLES", most)
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, content in {"folder/": b"", "0.json": b'{"n": 1}', "0.txt": b"x" * 3000, "0.png": PNG}.items():
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type, info.size = (tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE), len(content)
            tar.addfile(info, io.BytesIO(content))
        for n in range(1, 6):
            for name, link in ((f"{n}.json", "0.json"), (f"{n}.txt", "0.txt"), (f"{n}.png", "0.png")):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = tarfile.LNKTYPE, link
                tar.addfile(info)
    found = []
    for name, content in (("s.tar", target.getvalue()), ("s.tar.gz", gzip.compress(target.getvalue()))):
        path = tmp_path / name / "in" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        found.append(decide(tmp_path / name, samples={"max_text_bytes": 2000}))
    plain, compressed = found
    assert plain.num_samples == min(most, 6)
    assert compressed.schema.pack == plain.schema.pack
    if most > 2:  # else hard links are left out, whose content a stream has at its end
        assert types(compressed) == types(plain) == {"n": "int64"}
        assert [kind.num_samples for kind in compressed.kinds] == [kind.num_samples for kind in plain.kinds]


def test_members_of_a_sample_may_be_far_apart(tmp_path: Path) -> None:
    """A shard in no order, or whose documents name members far away, is read further, up to a number of members."""
    images = {f"img/{n}.png": PNG for n in range(200)}
    documents = {f"doc/{n}.json": {"texts": ["t", None], "images": [None, f"img/{n}.png"]} for n in range(200)}
    make_shard(tmp_path / "in" / "s.tar", {"doc/x.json": {"texts": ["t"], "images": [None]}, **images, **documents})
    assert decide(tmp_path).schema.pack["preset"] == "interleaved"
    halves = pairs(0, 1500)
    scattered = {name: halves[name] for end in ("png", "txt", "json") for name in halves if name.endswith(end)}
    make_shard(tmp_path / "in" / "s.tar", scattered)
    found = decide(tmp_path)
    assert (found.schema.pack["preset"], types(found)) == ("image_text", {"n": "int64"})
    assert MAX_MEMBERS * BLOCK < 16 << 20


def test_lists_give_columns_on_any_row(tmp_path: Path) -> None:
    """The columns of a list of files are decided from its rows, and of a long one only from the first."""
    lines = [{"sample_id": str(n), "path": f"{n}.png", "score": n / 2, "modality": "image"} for n in range(3000)]
    lines[2500]["late"] = 1
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = decide(tmp_path)
    assert [(c.name, c.type, c.rows) for c in found.schema.user_columns] == [("score", "double", "")]
    assert found.num_samples == MAX_SAMPLES


def test_names_with_dates_are_noted(tmp_path: Path) -> None:
    """Registration names the setting that makes samples of names with dots; with it, nothing is noted."""
    members = {f"IMG_2023.05.{day:02}_12.30.00.{kind}": "x" for day in range(1, 9) for kind in ("txt", "png")}
    make_shard(tmp_path / "in" / "a.tar", members)
    (note,) = decide(tmp_path).notes
    assert note.startswith("1 of 1 sampled sample may be several samples")
    assert "set `samples.roles` to `[]`" in note
    found = decide(tmp_path, samples={"roles": []})
    assert (found.num_samples, found.schema.pack["preset"], found.notes) == (8, "image_text", ())
    assert found.schema.pack["roles"] == []


def test_roles_are_not_for_parquet(tmp_path: Path) -> None:
    """Members of a Parquet file are named after its columns, which the setting would take apart."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"jpg": [b"\xff\xd8\xff"], "mask": [b"\xff\xd8\xff"]}), tmp_path / "in" / "a.parquet")
    with pytest.raises(ConfigError, match=r"samples\.roles: is set, but the members of .*a\.parquet are named after"):
        decide(tmp_path, samples={"roles": []})


@pytest.mark.parametrize(
    ("media", "others", "note"),
    [
        ({"mp4": b""}, {}, "7 of 10 sampled samples have no media, though others have video"),
        ({"png": PNG, "wav": b""}, {}, "7 of 10 sampled samples have no media, though others have audio, image"),
        ({"mp4": b""}, {"jpg": PNG}, None),
        ({}, {}, None),
    ],
)
def test_samples_without_media_are_counted(
    tmp_path: Path, media: Mapping[str, bytes], others: Mapping[str, bytes], note: str | None
) -> None:
    """Downloads that failed left captions alone: registration says how many, and which filter drops them."""
    members: dict[str, object] = {}
    for n in range(10):
        found = media if n in (3, 6, 8) else others
        members |= {f"{n}.txt": "t", f"{n}.json": {"n": n}, **{f"{n}.{kind}": value for kind, value in found.items()}}
    make_shard(tmp_path / "in" / "a.tar", members)
    notes = [found for found in decide(tmp_path).notes if "no media" in found]
    assert len(notes) == (note is not None)
    for found in notes:
        assert found.startswith(str(note))
        assert "filter `has_modalities`" in found


@pytest.mark.parametrize(
    ("modality", "field"),
    [("audio", "AudioField"), ("image", "ImageField"), ("video", "SyncedVideoAudioField"), ("array", "NDArrayField")],
)
def test_a_declared_extension_selects_the_field_of_its_modality(tmp_path: Path, modality: str, field: str) -> None:
    """A member whose extension says nothing has the field of what the declaration says it is; else it is bytes."""
    members = {f"{n}.{kind}": b"" for n in range(4) for kind in ("one.data", "one.png", "two.mid")}
    make_shard(tmp_path / "in" / "a.tar", members)
    fields = {m["name"]: m["field"] for m in decide(tmp_path, pack="generic").schema.pack["modalities"]}
    assert fields["binary_one" if "binary_one" in fields else "one"] in ("BytesField", "ImageField")
    declared = decide(tmp_path, pack="generic", samples={"extensions": {"data": modality}})
    (row,) = [row for row in declared.row_kinds if "data" in row.extensions]
    found = {m["name"]: m for m in declared.schema.pack["modalities"]}[row.packed_as[0]]
    assert field in (found["field"], found["config"].get("inner", {}).get("type"))


@pytest.mark.parametrize(
    ("members", "preset", "columns"),
    [
        (
            {"wav": b"", "txt": "t", "json": {"text": "t", "words": [{"word": "t", "start": 0, "end": 1}], "audio": 1}},
            "speech",
            {"text_column": "text", "audio_column": "audio"},
        ),
        (
            {"left.png": PNG, "state.npy": b"", "json": {"task": "t", "timestamp": 1.5, "left": 1, "metadata": 2}},
            "robotics",
            {"left_column": "left", "metadata_column": "metadata"},
        ),
        (
            {"png": PNG, "txt": "t", "json": {"image": "x.png", "n": 1}},
            "image_text",
            {"image_column": "image", "n": "n"},
        ),
        (
            {"mp4": b"", "txt": "t", "json": {"clip": 1, "rest": 2}},
            "video",
            {"clip_column": "clip", "rest_column": "rest"},
        ),
        ({"mid": b"", "wav": b"", "json": {"midi": 1, "n": 2}}, "music", {"midi_column": "midi", "n": "n"}),
        (
            {"xyz": b"", "json": {"rows": 1, "rows_column": 2}},
            "generic",
            {"rows_column_column": "rows", "rows_column": "x"},
        ),
        ({"json": {"texts": ["t"], "images": [None], "text": 1}}, "interleaved", {"text_column": "text"}),
        ({"png": PNG, "json": {"words": [], "document": 1}}, "document", {"document_column": "document"}),
        ({"png": PNG, "txt": "t", "json": {"pair": 1}}, "image_text_pair", {"pair_column": "pair"}),
        ({"png": PNG, "txt": "t"}, "image_text", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_columns_fit_every_preset(
    tmp_path: Path, members: Mapping[str, object], preset: str, columns: Mapping[str, str]
) -> None:
    """Columns whose names the preset has get others; those whose value it packs itself are not packed twice."""
    make_shard(tmp_path / "in" / "a.tar", {f"{n}.{kind}": value for n in range(3) for kind, value in members.items()})
    found = decide(tmp_path, pack={"preset": preset, "columns": "all"})
    packed = {m["name"]: m["key"][0] for m in found.schema.pack["modalities"] if m.get("take") == "column"}
    if preset == "generic":
        assert set(packed) == {"rows_column", "rows_column_column"}
        assert set(packed.values()) == {"rows", "rows_column"}
    else:
        assert {name: key for name, key in packed.items() if name in columns} == columns
    names = [m["name"] for m in found.schema.pack["modalities"]]
    assert len(set(names)) == len(names)
    taken = {m["key"][0] for m in found.schema.pack["modalities"] if m.get("take") in ("json", "column") and m["key"]}
    assert {column.name for column in found.schema.user_columns} <= taken
