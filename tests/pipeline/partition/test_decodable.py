"""What is published decodes: good and damaged media of several kinds through every policy and both modes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mm_assets
from mm_assets.errors import SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.pipeline.partition.stages import StageResult, filtered_rows
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import losses
from mm_assets.pipeline.state.staleness import DatasetState

from ..chain import at_work, declare, record_of, run_chain, table_name
from ..shards import make_shard, png

PACK = {"preset": "generic", "fields": [{"name": "raw", "field": "BytesField", "modality": "image", "role": "raw"}]}
KINDS = dict.fromkeys(("jpg", "png"), "image") | dict.fromkeys(("wav", "flac", "mp3"), "audio")
KINDS |= dict.fromkeys(("mp4", "mkv", "avi"), "video")
"""Extensions of the media to the packed modality that holds them."""


def image_file(form: str) -> bytes:
    """A small image of noise, so that most of it is entropy-coded data."""
    target = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(target, format=form)
    return target.getvalue()


def sound_file(form: str) -> bytes:
    """Half a second of noise."""
    import soundfile

    target = io.BytesIO()
    noise = np.random.default_rng(2).integers(-3000, 3000, 8000).astype(np.int16)
    soundfile.write(target, noise, 16_000, format=form)
    return target.getvalue()


def clip_file(path: Path) -> bytes:
    """Ten frames of noise; an MP4 has its index before its media data, so that a truncated one still has a header."""
    import av

    noise = np.random.default_rng(3).integers(0, 256, (10, 48, 64, 3), dtype=np.uint8)
    options = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    with av.open(str(path), "w", options=options) as output:
        stream = output.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.color_trc = 16 if path.suffix == ".mkv" else 1  # PQ, else as a screen has it
        for pixels in noise:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return path.read_bytes()


def make_media(folder: Path) -> dict[str, bytes]:
    """A good file of each kind, by extension."""
    pytest.importorskip("av", reason="the video extra is not installed")
    pytest.importorskip("soundfile", reason="the audio extra is not installed")
    made = {"jpg": image_file("JPEG"), "png": image_file("PNG")}
    made |= {form: sound_file(form.upper()) for form, kind in KINDS.items() if kind == "audio"}
    return made | {form: clip_file(folder / f"x.{form}") for form, kind in KINDS.items() if kind == "video"}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good sample of each kind, and one with three fifths of its file, with texts; and opaque bytes of both kinds."""
    folder = tmp_path_factory.mktemp("shard")
    members: dict[str, bytes] = {}
    for kind, content in make_media(folder).items():
        members |= {f"{kind}-good.{kind}": content, f"{kind}-good.txt": b"good"}
        members |= {f"{kind}-bad.{kind}": content[: len(content) * 3 // 5], f"{kind}-bad.txt": b"bad"}
        if kind == "jpg":
            members |= {"opaque-good.raw.jpg": content, "opaque-bad.raw.jpg": content[:-900], "opaque-bad.txt": b"bad"}
    members |= {"named.png": b"not an image", "named.txt": b"bad"}
    with tarfile.open(folder / "s.tar", "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return folder / "s.tar"


GOOD = {*(f"{kind}-good" for kind in KINDS), "opaque-good"}
TRUNCATED = {*(f"{kind}-bad" for kind in KINDS), "opaque-bad"}
MEDIA = {*KINDS.values(), "raw"}


def rows_of(dataset: DatasetStore, table: str) -> list[dict[str, Any]]:
    return pq.read_table(dataset.store.path_of(table_name(dataset, table, "s")), partitioning=None).to_pylist()


def run(folder: Path, shard: Path, **settings: Any) -> tuple[DatasetStore, dict[str, StageResult]]:
    """The chain, every check of which passes, and whose two files are equal."""
    dataset, results = run_chain(declare(folder, shard, pack=PACK, **settings))
    return dataset, results["s"]


def decoded(dataset: DatasetStore) -> dict[str, set[str]]:
    """Every packed sample, all of whose values decode in both formats, with the media that it has."""
    found: list[dict[str, set[str]]] = []
    for form in ("mult", "mstr"):
        with mm_assets.open(dataset.store.path_of("manifest.json"), format=form) as packed:
            found.append(
                {packed.sample_ids[n]: {k for k in MEDIA if packed[n][k] is not None} for n in range(len(packed))}
            )
    assert found[0] == found[1]
    return found[0]


def test_undecodable_rows_are_dropped_with_their_reason(shard: Path, tmp_path: Path) -> None:
    """By default what is published decodes, each damaged item is dropped and listed once, and all else is there."""
    dataset, results = run(tmp_path, shard)
    packed = decoded(dataset)
    assert {sample for sample, media in packed.items() if media} == GOOD
    assert set(packed) == GOOD | TRUNCATED | {"named"}  # their texts stay
    listed = rows_of(dataset, "undecodable")
    assert {row["sample_id"] for row in listed} == TRUNCATED | {"named"}
    assert {(row["reason"], row["action"]) for row in listed} == {("undecodable", "drop_row")}
    for row in listed:
        kind = row["sample_id"].partition("-")[0]
        assert row["field"] == {"opaque": "raw", "named": "image"}.get(kind) or KINDS[kind]
        assert row["member"] == json.loads(row["source_ref"])["member"]
        assert row["detail"]
        assert "0x" not in row["detail"]
    dropped = {
        (row["sample_id"], row["position"], row["modality"], row["detail"]) for row in rows_of(dataset, "dropped")
    }
    assert dropped == {(row["sample_id"], row["position"], row["modality"], row["detail"]) for row in listed}
    assert {(row["filter"], row["reason"]) for row in rows_of(dataset, "dropped")} == {("decodable", "undecodable")}
    counts = results[FILTERED_ROWS.name].record.counts
    assert len(GOOD) <= counts["judged"] <= len(GOOD | TRUNCATED)  # some of the damage is in a header
    assert counts["undecodable"] == len(listed)
    said = {"mode": "full", "on_undecodable": "drop_row", "judged": counts["judged"], "undecodable": len(listed)}
    manifest = json.loads(Path(dataset.store.path_of("manifest.json")).read_text())
    assert {name: column[0] for name, column in manifest["partitions"]["decodable"].items()} == said
    assert record_of(dataset, "s").decodable == said


def test_undecodable_samples_are_dropped_whole(shard: Path, tmp_path: Path) -> None:
    """With `drop_sample` the text of a damaged item goes with it, for the same reason."""
    dataset, _ = run(tmp_path, shard, on_undecodable="drop_sample")
    assert set(decoded(dataset)) == GOOD
    dropped = rows_of(dataset, "dropped")
    assert {row["sample_id"] for row in dropped} == TRUNCATED | {"named"}
    assert {(row["filter"], row["reason"]) for row in dropped} == {("decodable", "undecodable")}
    assert {row["action"] for row in rows_of(dataset, "undecodable")} == {"drop_sample"}


def test_undecodable_media_are_kept_and_said(shard: Path, tmp_path: Path) -> None:
    """With `keep` every byte is packed; the table and the losses say what no reader decodes, a note what looks pale."""
    dataset, results = run(tmp_path, shard, on_undecodable="keep")
    assert rows_of(dataset, "dropped") == []
    listed = rows_of(dataset, "undecodable")
    assert {row["sample_id"] for row in listed} == TRUNCATED | {"named"}
    assert {row["action"] for row in listed} == {"keep"}
    kept = list(losses(DatasetState(dataset), ["s"]))
    ((stage, reasons),) = record_of(dataset, "s").losses.items()
    ((reason, lost),) = reasons.items()
    assert (stage, reason, lost["count"]) == ("filtered_rows", "kept.undecodable", len(listed))
    assert (lost["example"]["sample_id"], lost["example"]["member"]) == (kept[0].sample_id, kept[0].member)
    assert {(loss.kind, loss.sample_id) for loss in kept} == {("kept", row["sample_id"]) for row in listed}
    assert all(loss.member and "no reader decodes it" in loss.advice for loss in kept)
    (pale,) = (note for note in results[FILTERED_ROWS.name].record.notes if "high dynamic range" in note)
    assert "1 media item," in pale
    assert "the first is of sample 'mkv-good', mkv-good.mkv" in pale
    with mm_assets.open(dataset.store.path_of("manifest.json")) as packed:
        named = packed[packed.sample_ids.index("named")]
        assert [bytes(content) for _, content in named["rest"]] == [b"not an image"]
        assert [entry["refused_by"] for entry in named["rows"] if "refused_by" in entry] == ["image"]


def test_an_undecodable_item_fails_its_partition(shard: Path, tmp_path: Path) -> None:
    """With `fail` the error names shard, member, sample, what was found and what to do, and nothing is published."""
    with pytest.raises(SourceError) as failed:
        run(tmp_path, shard, on_undecodable="fail")
    message = str(failed.value)
    for words in (str(shard), "'jpg-bad.jpg'", "sample 'jpg-bad'", "cannot be decoded", "on_undecodable to drop_row"):
        assert words in message
    assert not list((tmp_path / "data").rglob("records/*.json"))


def test_headers_judge_only_what_a_field_refuses(shard: Path, tmp_path: Path) -> None:
    """With `decodable: headers` nothing is decoded, the policy applies to what fields refuse, and a note says so."""
    dataset, results = run(tmp_path, shard, decodable="headers")
    listed = {row["sample_id"] for row in rows_of(dataset, "undecodable")}
    assert "named" in listed
    assert listed < TRUNCATED | {"named"}  # most headers are whole
    assert "opaque-bad" not in listed
    record = results[FILTERED_ROWS.name].record
    assert record.counts["judged"] == 0
    assert any("decodable: headers" in note for note in record.notes)
    assert record_of(dataset, "s").decodable["mode"] == "headers"


def test_a_missing_package_is_not_damage(shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that decodes clips the stage stops with the command that installs it, and drops nothing."""
    from mm_assets.errors import MissingExtraError
    from mm_assets.fields import SyncedVideoAudioField
    from mm_assets.pipeline.partition.stages import TABLE_STAGES
    from mm_assets.pipeline.state.registration import register

    def missing(*_: object) -> None:
        raise MissingExtraError("reading video files", "av")

    dataset = DatasetStore(declare(tmp_path, shard, pack=PACK))
    register(dataset)
    for make in list(TABLE_STAGES.values())[:-1]:
        at_work(make, dataset, "s")
    monkeypatch.setattr(SyncedVideoAudioField, "check_decodable", missing)
    with pytest.raises(MissingExtraError, match="pip install"):
        at_work(filtered_rows, dataset, "s")
    assert not dataset.store.exists("filtered_rows/s.parquet")


@pytest.mark.parametrize("preset", ["generic", "image_text"])
def test_media_whose_extension_is_unknown_are_named(tmp_path: Path, preset: str) -> None:
    """Pictures that are packed as bytes are noted with the setting that makes them pictures; with it, nothing is."""
    shard = make_shard(tmp_path / "s.tar", {f"{n}.{kind}": png(n) for n in range(3) for kind in ("png", "Data")})
    for extensions in ({}, {"data": "image"}):
        spec = declare(tmp_path / f"root{len(extensions)}", shard, pack=preset, samples={"extensions": extensions})
        _, results = run_chain(spec)
        notes = [note for note in results["s"][FILTERED_ROWS.name].record.notes if "samples.extensions" in note]
        if extensions or preset == "image_text":  # which has no place for bytes
            assert notes == []
        else:
            (note,) = notes
            assert note.startswith("3 members with the extension 'data' hold image, but are packed as bytes")
            assert "set `samples.extensions: {data: image}`" in note
