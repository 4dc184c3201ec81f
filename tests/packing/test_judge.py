"""Which media are undecodable, what each policy makes of them, and that each is decoded once."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
import soundfile
from PIL import Image

from mm_assets.errors import SourceError
from mm_assets.fields import ImageField
from mm_assets.packing import judge as judge_module
from mm_assets.packing.judge import Judge
from mm_assets.packing.placement import BlockRows, Placer
from mm_assets.packing.plan import PackPlan
from mm_assets.packing.presets import choose_plan

from .test_placement import REGIONS, rows


def picture(seed: int, form: str = "PNG") -> bytes:
    """A picture of noise."""
    target = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).save(target, form)
    return target.getvalue()


def sound() -> bytes:
    """Audio that libsndfile decodes."""
    target = io.BytesIO()
    soundfile.write(target, np.zeros(800, np.float32), 8000, format="OGG")
    return target.getvalue()


def clip() -> bytes:
    """Two frames that PyAV decodes."""
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as out:
        stream = out.add_stream("ffv1", rate=25)
        stream.width, stream.height = 32, 16
        for _ in range(2):
            out.mux(stream.encode(av.VideoFrame(32, 16, "yuv420p")))
        out.mux(stream.encode(None))
    return target.getvalue()


def cut(content: bytes) -> bytes:
    """Half of a file: its header is whole."""
    return content[: len(content) // 2]


def plan_of(pack: Any, table: pa.Table | None = None) -> PackPlan:
    return choose_plan([] if table is None else table.to_batches(), pack=pack, where="test")


def judged(table: pa.Table, plan: PackPlan, policy: Any = "drop_row", mode: Any = "full") -> tuple[Any, Any, Any]:
    """Row to reason of both steps, by the numbers of `table`, and the table of undecodable media."""
    with Judge(plan, policy=policy, mode=mode) as judge:
        first = {drop.row: drop.reason for drop in judge.undecodable(table)}
        kept = [row for row in range(table.num_rows) if row not in first]
        left = table.take(pa.array(kept, pa.int64()))
        second = {kept[drop.row]: drop.reason for drop in judge.packable(left)}
        batches = judge.take_undecodable()
        assert judge.take_undecodable() == []
    found = [row for batch in batches for row in batch.to_pylist()]
    return first, second, found


def test_the_next_candidate_is_judged_too() -> None:
    """Where a damaged row goes, the next takes its place, and goes too if it does not decode."""
    table = rows(
        ("a", {}, {"0.png": cut(picture(1)), "1.png": cut(picture(2)), "2.png": picture(3), "3.png": picture(4)})
    )
    undecodable, unpackable, found = judged(table, plan_of("image_text"))
    assert undecodable == {1: "undecodable", 2: "undecodable"}
    assert unpackable == {4: "not_selected"}  # the third is packed
    assert [(row["position"], row["member"], row["field"]) for row in found] == [
        (0, "a.0.png", "image"),
        (1, "a.1.png", "image"),
    ]


def test_a_document_loses_the_page_that_does_not_decode() -> None:
    """Of a composite only what does not decode alone goes, and what is left is packed."""
    table = rows(("a", {}, {"0.png": picture(1), "1.png": cut(picture(2)), "2.png": picture(3)}))
    plan = plan_of("document")
    assert judged(table, plan)[:2] == ({2: "undecodable"}, {})
    assert judged(table, plan, "drop_sample")[:2] == (dict.fromkeys(range(4), "undecodable"), {})
    (item,) = judged(table, plan)[2]
    assert item["field"] == "document"
    assert "truncated" in item["detail"]


def test_a_document_loses_the_page_that_is_refused() -> None:
    """A composite that refuses one row by its header does not turn its other rows into opaque bytes."""
    table = rows(("a", {}, {"0.png": picture(1), "1.png": b"not an image", "2.png": picture(3)}))
    for mode in ("full", "headers"):
        undecodable, unpackable, found = judged(table, plan_of("document"), mode=mode)
        assert (undecodable, unpackable) == ({2: "undecodable"}, {})
        assert [row["position"] for row in found] == [1]


def test_media_are_not_blamed_for_their_composite() -> None:
    """Pages whose layout is refused are packed in the rest; those of them that do not decode are still found."""
    outside = {"phrases": [{"phrase": "outside", "bbox": [30, 20, 11, 10]}]}
    plan = plan_of({"preset": "generic", "fields": [REGIONS]})
    table = rows(("a", outside, {"png": picture(1)}), ("b", outside, {"png": cut(picture(2))}))
    undecodable, unpackable, found = judged(table, plan)
    assert (undecodable, unpackable) == ({3: "undecodable"}, {})
    assert [row["field"] for row in found] == ["regions"]
    (placement,) = Placer(plan).place(BlockRows(table.slice(0, 2)))
    assert "beyond their page" in placement.unfit[1][1]


def test_opaque_bytes_are_judged_by_their_type() -> None:
    """A BytesField and the rest hold no media that its own reader cannot decode; other bytes are not judged."""
    fields = [{"name": "raw", "field": "BytesField", "modality": "image", "role": "raw"}]
    table = rows(
        ("a", {}, {"raw.png": picture(1), "png": picture(2), "0.png": picture(3)}),
        ("b", {}, {"raw.png": cut(picture(4)), "xyz.txt": "text", "1.png": cut(picture(5))}),
    )
    plan = choose_plan([], pack={"preset": "video", "fields": fields}, where="test")  # images go to the rest
    undecodable, unpackable, found = judged(table, plan)
    assert (undecodable, unpackable) == ({5: "undecodable", 7: "undecodable"}, {})
    assert [row["field"] for row in found] == ["raw", "rest"]


def test_a_sample_without_metadata_row_is_dropped_whole() -> None:
    """`drop_sample` names every row of a sample."""
    table = rows(("a", None, {"png": cut(picture(1)), "txt": "t"}), ("b", None, {"png": picture(1), "txt": "t"}))
    assert judged(table, plan_of("image_text"), "drop_sample")[:2] == ({0: "undecodable", 1: "undecodable"}, {})


def test_kept_media_are_packed_as_before() -> None:
    """With `keep` nothing is dropped for its media, and without a rest what its field refuses is not packable."""
    table = rows(("a", {}, {"png": b"not an image", "txt": "t"}), ("b", {}, {"png": cut(picture(1)), "txt": "t"}))
    undecodable, unpackable, found = judged(table, plan_of("image_text"), "keep")
    assert (undecodable, unpackable) == ({}, {1: "unpackable_image"})
    assert [(row["sample_id"], row["action"]) for row in found] == [("a", "keep"), ("b", "keep")]


def test_the_first_undecodable_item_fails() -> None:
    """With `fail` the first item in order is named with its member, sample, finding and remedy."""
    table = rows(("a", {}, {"png": picture(1)}), ("b", {}, {"png": cut(picture(1))}), ("c", {}, {"png": b"x"}))
    with pytest.raises(SourceError, match=r"s\.tar, member 'b\.png': sample 'b', .*truncated.*; replace it, or set"):
        judged(table, plan_of("image_text"), "fail")


@pytest.mark.parametrize(
    ("form", "decoder", "error"),
    [
        ("PNG", "PIL.PngImagePlugin.PngImageFile.load", MemoryError()),
        ("JPEG", "simplejpeg.decode_jpeg", ValueError("Insufficient memory (case 4)")),
        ("AVIF", "PIL.AvifImagePlugin.AvifImageFile.load", RuntimeError("Pixel allocation failed: Out of memory")),
    ],
)
def test_a_host_without_memory_drops_no_image(
    monkeypatch: pytest.MonkeyPatch, form: str, decoder: str, error: Exception
) -> None:
    """A lack of memory fails the partition also where a library says it in words of its own."""

    def starved(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(decoder, starved)
    with pytest.raises(SourceError, match=r"'a\.0\.png'.*cannot be judged on this host \(MemoryError"):
        judged(rows(("a", {}, {"0.png": picture(1, form)})), plan_of("image_text"))


@pytest.mark.parametrize("kind", ["audio", "video"])
@pytest.mark.parametrize("error", [MemoryError(), OSError(24, "Too many open files")])
def test_a_host_short_of_memory_or_files_drops_nothing(
    kind: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that gets no memory or file fails the partition, with the sample named, under the policy `drop_row`."""
    pack, name, content = ("speech", "ogg", sound()) if kind == "audio" else ("video", "mkv", clip())
    table = rows(("a", {}, {name: content}))
    assert judged(table, plan_of(pack)) == ({}, {}, [])

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    placed = Placer.settled

    def settled(*arguments: Any) -> Any:  # encode the row, then let its decoder fail
        placement = placed(*arguments)
        monkeypatch.setattr("soundfile.SoundFile", failing)
        monkeypatch.setattr("av.open", failing)
        return placement

    where = {"decode": rf", member 'a\.{name}': sample 'a', {kind} at position 0", "encode": ": sample 'a'"}
    monkeypatch.setattr(Placer, "settled", settled)
    for step in ("decode", "encode"):  # the patches of the first step stay for the second
        said = rf"s\.tar{where[step]}: cannot be judged on this host \({type(error).__name__}"
        with pytest.raises(SourceError, match=said):
            judged(table, plan_of(pack))


def test_each_item_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the rows of a sample are placed, an item that decodes is decoded once."""
    counted: Counter[bytes] = Counter()
    check = ImageField.check_decodable

    def counting(self: ImageField, metadata: Any, data: Any) -> None:
        counted[bytes(data)] += 1
        check(self, metadata, data)

    monkeypatch.setattr(ImageField, "check_decodable", counting)
    good = [picture(seed) for seed in range(6)]
    samples = [
        ("a", {}, {"0.png": cut(good[0]), "1.png": good[1], "2.png": good[2]}),
        ("b", {}, {"0.png": good[3], "1.png": cut(good[4]), "2.png": good[5]}),
    ]
    judged(rows(*samples), plan_of("interleaved"))
    assert set(counted.values()) == {1}
    assert len(counted) == 6


def test_images_of_high_dynamic_range_are_counted() -> None:
    """An AVIF in PQ is counted with its sample; one in sRGB, and a JPEG, are not."""
    avif = picture(1, "AVIF")
    at = avif.index(b"nclx") + 4
    pale = avif[:at] + b"\0\x09\0\x10" + avif[at + 4 :]
    table = rows(("a", {}, {"0.avif": avif}), ("b", {}, {"0.avif": pale}), ("c", {}, {"0.jpg": picture(2, "JPEG")}))
    with Judge(plan_of("image_text"), policy="drop_row", mode="full") as judge:
        assert list(judge.undecodable(table)) == []
    assert judge.num_high_range == 1
    assert judge.first_high_range == "sample 'b', b.0.avif"


def test_verdicts_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread or many, one item in flight or many, by number or by bytes: the same items in the same order."""
    samples = [(f"s{n}", {}, {"png": picture(n) if n % 3 else cut(picture(n)), "txt": "t"}) for n in range(30)]
    found = []
    for threads, waiting, size in ((1, 1, 1 << 20), (8, 64, 1 << 20), (8, 64, 1)):
        monkeypatch.setattr(judge_module, "THREADS", threads)
        monkeypatch.setattr(judge_module, "MAX_WAITING", waiting)
        monkeypatch.setattr(judge_module, "MAX_WAITING_BYTES", size)
        found.append(judged(rows(*samples), plan_of("image_text")))
    assert found[0] == found[1] == found[2]
    assert len(found[0][2]) == 10


def test_what_is_in_flight_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more items, and no more bytes of them, wait for a verdict than the limits say, but for one that is larger."""
    monkeypatch.setattr(judge_module, "MAX_WAITING", 4)
    placed: list[str] = []
    settled = Placer.settled

    def counting(self: Placer, block: Any, start: int, *rest: Any) -> Any:
        placed.append(block.sample_id[start])
        return settled(self, block, start, *rest)

    monkeypatch.setattr(Placer, "settled", counting)
    seen: list[int] = []
    monkeypatch.setattr(judge_module, "_undecoded", lambda *_: seen.append(len(placed)))
    table = rows(*((f"s{n:02}", {}, {"png": picture(n)}) for n in range(20)))
    judged(table, plan_of("image_text"))
    assert len(seen) == 20
    assert all(number <= place + 5 for place, number in enumerate(seen))


def test_the_second_step_takes_what_the_first_has_left() -> None:
    """Another table than the one that was judged is the caller's error."""
    table = rows(("a", {}, {"png": picture(1)}))
    with Judge(plan_of("image_text"), policy="keep", mode="headers") as judge:
        judge.undecodable(table)
        with pytest.raises(ValueError, match="found 1 rows, expected the 2"):
            list(judge.packable(table.slice(0, 1)))


@pytest.mark.parametrize("mode", ["full", "headers"])
@pytest.mark.parametrize("policy", ["drop_row", "drop_sample", "keep", "fail"])
def test_what_exceeds_a_limit_is_not_damaged(policy: Any, mode: Any) -> None:
    """Whole media that a setting's limit refuses are dropped with its name, and never listed or failed as damage."""
    limits = {"image": ("max_pixels", picture(1)), "audio": ("max_frames", sound()), "video": ("max_pixels", clip())}
    for kind, (setting, content) in limits.items():
        made = {"image": "ImageField", "audio": "AudioField", "video": "SyncedVideoAudioField"}[kind]
        field = {"name": "it", "field": made, "modality": kind, "config": {setting: 100}}
        plan = plan_of({"preset": "speech" if kind == "image" else "image_text", "fields": [field]})
        table = rows(("a", {}, {{"image": "png", "audio": "ogg", "video": "mkv"}[kind]: content, "txt": "t"}))
        with Judge(plan, policy=policy, mode=mode) as judge:
            assert list(judge.undecodable(table)) == []
            drops = list(judge.packable(table))
            assert judge.num_undecodable == 0
        assert [(drop.row, drop.reason) for drop in drops] == [(1, f"unpackable_{kind}")]
        assert setting in (drops[0].detail or "")
