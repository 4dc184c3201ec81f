"""Every modality from a real shard to decoded samples, held against the members as other code decodes them."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import mido
import numpy as np
import pytest
from PIL import Image

import mm_assets
from mm_assets.dataset import timeline
from mm_assets.dataset.dataset import Dataset

from ..pipeline.chain import declare, run_chain

SHARDS = {
    "speech": "speech/*.tar",
    "image_text": "image-text/*.tar",
    "video": "video/*.tar",
    "document": "docai/*.tar",
    "music": "music/*.tar",
    "robotics": "robotics/*-episodes-*.tar",
    "steps": "robotics/*-steps-*.tar",
}
Members = dict[str, bytes]
Packed = tuple[Dataset, Dataset, Members]


def same(one: Any, other: Any) -> bool:
    """Equality that knows arrays, also within lists."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def sound_of(content: bytes) -> tuple[np.ndarray, int]:
    """(frames, channels) int16 and rate of a 16-bit sound file, by FFmpeg."""
    with av.open(io.BytesIO(content)) as container:
        (stream,) = container.streams.audio
        parts = []
        for frame in container.decode(stream):
            assert frame.format.name in ("s16", "s16p")
            samples = frame.to_ndarray()
            parts.append(samples.T if frame.format.is_planar else samples.reshape(-1, stream.channels))
        return np.concatenate(parts), stream.rate


@pytest.fixture(scope="module")
def packed(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Packed]:
    """Packs a corpus with the preset that registration chooses: MULT, MSTR and the shards' members by name."""
    made: dict[str, Packed] = {}

    def pack(name: str) -> Packed:
        if name not in made:
            dataset, _ = run_chain(declare(tmp_path_factory.mktemp(name), shared_data / SHARDS[name]))
            members: Members = {}
            for path in sorted(shared_data.glob(SHARDS[name])):
                with tarfile.open(path) as tar:
                    members |= {info.name: tar.extractfile(info).read() for info in tar if info.isfile()}
            manifest = dataset.store.path_of("manifest.json")
            made[name] = mm_assets.open(manifest, format="mult"), mm_assets.open(manifest, format="mstr"), members
        return made[name]

    return pack


@pytest.mark.parametrize("name", SHARDS)
def test_mult_and_mstr_decode_alike(packed: Callable[[str], Packed], name: str) -> None:
    """Each sample decodes to the same from both files, singly and in a batch with its absences masked."""
    mult, mstr, _ = packed(name)
    assert list(mult.sample_ids) == list(mstr.sample_ids)
    names = [one for one in mult.names if one != "rows"]
    few = {"clip": {"target_frames": 4}, "ego_view": {"target_frames": 4}}
    settings = {one: setting for one, setting in few.items() if one in names}
    mult, mstr = mult.with_settings(settings), mstr.with_settings(settings)
    ids = list(range(len(mult)))
    batches = [dataset.read_batch(ids, names, threads=2) for dataset in (mult, mstr)]
    for index in ids:
        one, other = mult.read_sample(index, names), mstr.read_sample(index, names)
        for modality in names:
            assert same(one[modality], other[modality]), (index, modality)
            for batch in batches:
                present = bool(batch[modality].present[index])
                assert present == (one[modality] is not None)
                values = batch[modality].values
                if present and isinstance(values, list):
                    assert same(values[index], one[modality]), (index, modality)
    for modality in names:
        assert batches[0][modality].present.tolist() == mult.presence(modality).tolist()


def test_speech_is_exact_to_the_sample(packed: Callable[[str], Packed]) -> None:
    """Each recording decodes to the very samples of its file, and its transcript to the file's text."""
    mult, _, members = packed("speech")
    for key, sample in zip(mult.sample_ids, mult, strict=True):
        name = next(name for name in members if name.startswith(f"{key}.") and name.endswith((".wav", ".flac")))
        expected, rate = sound_of(members[name])
        assert sample["audio"].sample_rate == rate
        np.testing.assert_array_equal(np.rint(sample["audio"].samples * 32768).astype(np.int16), expected)
        assert sample["text"] == members[f"{key}.txt"].decode()


def test_images_are_exact_to_the_pixel(packed: Callable[[str], Packed]) -> None:
    """Each captioned image decodes to the pixels that Pillow finds in its file, where its profile is not converted."""
    mult, _, members = packed("image_text")
    mult = mult.with_settings({"image": {"icc": "keep"}})
    for key, sample in zip(mult.sample_ids, mult, strict=True):
        name = next(name for name in members if name.startswith(f"{key}.") and name.endswith((".jpg", ".png")))
        with Image.open(io.BytesIO(members[name])) as image:
            palette = "RGBA" if "transparency" in image.info else "RGB"
            mode = {"L": "L", "RGB": "RGB", "RGBA": "RGBA", "LA": "RGBA", "P": palette, "1": "L"}[image.mode]
            expected = np.asarray(image.convert(mode))
        np.testing.assert_array_equal(sample["image"], expected.reshape(sample["image"].shape))
        assert sample["text"] == members[f"{key}.txt"].decode()


def shown_frames(content: bytes) -> tuple[list[Fraction], list[np.ndarray]]:
    """Presentation times from the first frame on, and RGB pixels, of every frame, decoded in order."""
    with av.open(io.BytesIO(content)) as container:
        frames = [
            (frame.pts * frame.time_base, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)
        ]
    frames.sort(key=lambda pair: pair[0])
    return [time - frames[0][0] for time, _ in frames], [pixels for _, pixels in frames]


def test_video_frames_are_those_of_the_file(packed: Callable[[str], Packed]) -> None:
    """Chosen frames of each clip are the frames that are shown at their times when the whole file is decoded."""
    mult, _, members = packed("video")
    num_clips = 0
    chosen = mult.with_settings({"clip": {"target_frames": 5}})
    for key, sample in zip(mult.sample_ids, chosen, strict=True):
        clip = sample["clip"]
        if clip.frames is None:
            continue
        name = next(name for name in members if name.startswith(f"{key}.") and name.endswith((".mp4", ".mov", ".webm")))
        times, pixels = shown_frames(members[name])
        num_clips += 1
        for index, seconds, frame in zip(clip.frame_indices, clip.frame_times, clip.frames, strict=True):
            exact = int(index) / clip.frame_rate
            assert float(exact) == seconds
            shown = max((number for number, time in enumerate(times) if time <= exact + Fraction(1, 1000)), default=0)
            np.testing.assert_array_equal(frame, pixels[shown])
    assert num_clips >= 3


def test_subtitles_are_on_the_clip_s_timeline(packed: Callable[[str], Packed]) -> None:
    """The subtitles that are shown at a frame's time are found by that time."""
    mult, _, _ = packed("video")
    sample = mult.with_settings({"clip": {"target_frames": 2}})[list(mult.sample_ids).index("nasa_13013")]
    assert sample["subtitles"][1].start_seconds == 4.26
    assert sample["subtitles"][1].text.startswith("space telescope in one")
    found = timeline.at_time(sample, 5.0)
    assert [segment.text for segment in found["subtitles"]] == [sample["subtitles"][1].text]


def test_documents_are_exact_to_the_box(packed: Callable[[str], Packed]) -> None:
    """Each page has its file's pixels, and its words, boxes, corners, labels, links and key fields are the JSON's."""
    mult, _, members = packed("document")
    kinds = {"form": 0, "receipt": 0}
    for key, sample in zip(mult.sample_ids, mult, strict=True):
        source, document = json.loads(members[f"{key}.json"]), sample["document"]
        image = next(members[name] for name in (f"{key}.png", f"{key}.jpg") if name in members)
        with Image.open(io.BytesIO(image)) as page:
            expected = np.asarray(page.convert("L" if page.mode == "L" else "RGB"))
        np.testing.assert_array_equal(document.pages[0], expected.reshape(document.pages[0].shape))
        layout = document.layout
        if "form" in source:
            kinds["form"] += 1
            words = [word for entry in source["form"] for word in entry["words"]]
            assert list(layout.words.texts) == [word["text"] for word in words]
            assert layout.words.boxes.tolist() == [word["box"] for word in words]
            assert list(layout.segments.labels) == [entry["label"] for entry in source["form"]]
            places = {entry["id"]: place for place, entry in enumerate(source["form"])}
            links = {tuple(places[end] for end in link) for entry in source["form"] for link in entry["linking"]}
            assert set(map(tuple, layout.links.tolist())) == links
        else:
            kinds["receipt"] += 1
            assert list(layout.words.texts) == [word["text"] for word in source["words"]]
            corners = [np.reshape(word["box8"], (4, 2)).tolist() for word in source["words"]]
            assert layout.words.quads.tolist() == corners
            assert layout.fields == source["labels"]
    assert kinds == {"form": 30, "receipt": 12}


def mido_notes(content: bytes) -> list[tuple[float, int, int]]:
    """Onset, pitch and velocity of every note, times by mido's own tempo arithmetic."""
    file = mido.MidiFile(file=io.BytesIO(content))
    now, found = 0.0, []
    for message in file:
        now += message.time
        if message.type == "note_on" and message.velocity:
            found.append((now, message.note, message.velocity))
    return sorted(found)


def test_music_is_exact_to_the_note(packed: Callable[[str], Packed]) -> None:
    """Notes are those of another parser, onsets to a microsecond; audio is exact to the sample, and lyrics are."""
    mult, _, members = packed("music")
    num_notes = num_sounds = 0
    for key, sample in zip(mult.sample_ids, mult, strict=True):
        if sample["midi"] is not None:
            notes = sample["midi"].notes
            expected = mido_notes(members[f"{key}.mid"])
            num_notes += len(expected)
            columns = (notes.onset_seconds, notes.pitch, notes.velocity)
            found = sorted(zip(*(column.tolist() for column in columns), strict=True))
            assert [note[1:] for note in found] == [note[1:] for note in expected]
            np.testing.assert_allclose([note[0] for note in found], [note[0] for note in expected], atol=1e-6, rtol=0)
        if sample["audio"] is not None:
            num_sounds += 1
            name = next(name for name in members if name.startswith(f"{key}.") and name.endswith((".wav", ".flac")))
            samples, rate = sound_of(members[name])
            assert sample["audio"].sample_rate == rate
            np.testing.assert_array_equal(sample["audio"].samples, samples.astype(np.float32) / 32768)
    assert num_notes > 1000
    assert num_sounds == 2
    vocal = mult[list(mult.sample_ids).index("vocadito_1")]
    assert vocal["lyrics"] == members["vocadito_1.lyrics.txt"].decode()


def test_note_onsets_meet_their_audio(packed: Callable[[str], Packed]) -> None:
    """Onsets of a rendered score, aligned to its audio, stand where the sound gets louder."""
    mult, _, _ = packed("music")
    sample = mult[list(mult.sample_ids).index("slakh_Track00001")]
    audio, notes = sample["audio"], sample["midi"].notes
    frames = timeline.align_onsets(notes, audio.sample_rate, len(audio.samples), outside="mark")
    inside = frames[frames >= 0]
    assert 0 < len(inside) < len(frames)
    assert inside.tolist() == [round(s * audio.sample_rate) for s in notes.onset_seconds[: len(inside)].tolist()]
    loud = np.abs(audio.samples).max(axis=1) > 0.01
    first = int(inside[0])
    assert not loud[:first].any()
    assert loud[first : first + audio.sample_rate // 2].any()


def test_an_episode_has_one_clock(packed: Callable[[str], Packed]) -> None:
    """State and action are found by time, exactly at steps and in between, beside the camera's frame of that time."""
    mult, _, members = packed("robotics")
    for key, sample in zip(mult.sample_ids, mult, strict=True):
        arrays = {name: np.load(io.BytesIO(members[f"{key}.{name}.npy"])) for name in ("state", "action", "timestamp")}
        state = sample["state"]
        np.testing.assert_array_equal(state.timestamps, arrays["timestamp"])
        np.testing.assert_array_equal(state.values, arrays["state"])
        np.testing.assert_array_equal(sample["action"].values, arrays["action"])
        middle = (arrays["timestamp"][7] + arrays["timestamp"][8]) / 2
        half = state.interpolate(middle)
        np.testing.assert_allclose(half, (arrays["state"][7] + arrays["state"][8]) / 2, atol=1e-6)
        assert state.nearest(arrays["timestamp"][9])[0] == 9
        found = timeline.at_time(sample, float(arrays["timestamp"][5]))
        np.testing.assert_array_equal(found["state"], arrays["state"][5])
        times = arrays["timestamp"][:20]
        for step, view in enumerate(itertools.islice(timeline.steps(sample, times), 20)):
            np.testing.assert_array_equal(view["action"], arrays["action"][step])
        assert sample["task"] == json.loads(members[f"{key}.json"])["task"]
        assert len(sample["ego_view"].frames) == len(arrays["timestamp"])


def test_steps_are_samples_of_their_own(packed: Callable[[str], Packed]) -> None:
    """Each step has its camera's pixels, its arrays as they are, its depth in millimetres, and its time."""
    mult, _, members = packed("steps")
    seen: set[str] = set()
    for key, sample in zip(mult.sample_ids, mult, strict=True):
        for name in ("state", "action", "pose"):
            member = members.get(f"{key}.{name}.npy")
            assert (sample[name] is None) == (member is None)
            if member is not None:
                seen.add(name)
                np.testing.assert_array_equal(sample[name], np.load(io.BytesIO(member)))
        if sample["depth"] is not None:
            seen.add("depth")
            with Image.open(io.BytesIO(members[f"{key}.depth.png"])) as image:
                np.testing.assert_array_equal(sample["depth"], np.asarray(image))
            assert sample["depth"].dtype == np.uint16
        with Image.open(io.BytesIO(members[f"{key}.rgb.jpg"])) as image:
            np.testing.assert_array_equal(sample["rgb"], np.asarray(image))
        assert sample["timestamp"] == json.loads(members[f"{key}.json"]).get("timestamp")
    assert seen == {"state", "action", "pose", "depth"}


def test_a_filter_of_misaligned_samples(shared_data: Path, tmp_path: Path) -> None:
    """`on_misaligned` drops the sample whose sources disagree, named by the check, or stops its partition."""
    dropping = declare(tmp_path / "drop", shared_data / SHARDS["music"], on_misaligned="drop_sample")
    dataset, results = run_chain(dropping)
    (key,) = dataset.partitions()
    counts: dict[str, Any] = dict(results[key]["filtered_rows"].record.counts)
    assert counts["dropped.misaligned.spans"] == counts["dropped"] == 4
    with mm_assets.open(dataset.store.path_of("manifest.json")) as left:
        assert "slakh_Track00001" not in list(left.sample_ids)
        assert len(left) == 8
    with pytest.raises(AssertionError, match="spans"):
        run_chain(declare(tmp_path / "fail", shared_data / SHARDS["music"], on_misaligned="fail"))


def test_clips_of_frames_go_through_the_chain(shared_data: Path, tmp_path: Path) -> None:
    """Clips stored as frames, with the sound out of their files, pass every check; cut ones without a warning."""
    settings = {"encoding": "frames", "size": [36, 64], "max_frames": 12, "audio_sample_rate": 8000}
    clip = {"name": "clip", "field": "SyncedVideoAudioField", "config": settings}
    spec = declare(tmp_path, shared_data / SHARDS["video"], pack={"preset": "video", "fields": [clip]})
    dataset, results = run_chain(spec)
    (key,) = dataset.partitions()
    for form in ("mult", "mstr"):
        violated = {outcome.name for outcome in results[key][form].outcomes if not outcome.passed}
        assert violated <= {"durations"}
        with mm_assets.open(dataset.store.path_of("manifest.json"), format=form) as videos:
            found = [sample["clip"] for sample in videos]
            assert any(one.audio is not None and one.frames is not None for one in found)
            assert all(one.frames is None or one.frames.shape[1:] == (36, 64, 3) for one in found)
            assert all(one.frames is None or len(one.frames) <= 12 for one in found)


def test_a_plan_for_other_data_is_noticed(shared_data: Path, tmp_path: Path) -> None:
    """Where content has no place in the preset, or most ends in its rest, the stages say so, with the kinds."""
    _, results = run_chain(declare(tmp_path / "speech", shared_data / SHARDS["document"], pack="speech"))
    (result,) = results.values()
    assert any("cannot be packed by preset 'speech': image" in note for note in result["filtered_rows"].record.notes)
    _, results = run_chain(declare(tmp_path / "document", shared_data / SHARDS["speech"], pack="document"))
    (result,) = results.values()
    assert any("in the rest of preset 'document'" in note for note in result["mult"].record.notes)
    _, results = run_chain(declare(tmp_path / "right", shared_data / SHARDS["speech"]))
    (result,) = results.values()
    assert all(stage.record.notes == () for stage in result.values())
