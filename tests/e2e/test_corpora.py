"""The whole chain over real corpora, held against what Python's own tarfile, Pillow and NumPy find in the shards."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import subprocess
import tarfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mm_assets
from mm_assets.fields import (
    AudioField,
    NDArrayField,
    ScalarField,
    SequenceField,
    SyncedVideoAudioField,
    TimedTextField,
    TimeSeriesField,
)
from mm_assets.formats import MappedFile, open_reader
from mm_assets.media.subtitles import parse_subtitles
from mm_assets.pipeline.chain import FILTERED_ROWS, PACKED_STAGES
from mm_assets.pipeline.partition.stages import StageResult
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.chain import declare, run_chain, stages_of, table_name

FORMATS = ("mult", "mstr")


@dataclass(frozen=True)
class Corpus:
    """A folder of real shards, and what is to become of it.

    Attributes:
        shards: pattern below the data folder.
        pack: preset to ask for; None leaves the choice to registration.
        preset: the preset that it is packed by.
        rejects: member to reason, of each member that is not a row for a good reason.
        num_frames: frames of all its TIFFs.
        warnings: (check, sample) of whatever its sources contradict each other in.
    """

    shards: str
    preset: str
    pack: str | None = None
    rejects: Mapping[str, str] = field(default_factory=dict)
    num_frames: int = 0
    warnings: frozenset[tuple[str, str]] = frozenset()


CORPORA = {
    "image_text": Corpus("image-text/*.tar", "image_text"),
    "speech": Corpus("speech/*.tar", "speech"),
    "thirdparty": Corpus("thirdparty", "generic", rejects={"compressed": "directory"}),
    "tgz": Corpus("thirdparty/*.tgz", "image_text"),
    "robotics": Corpus("robotics/*.tar", "robotics"),  # two kinds of shard: the second goes to `rest`
    "robotics_steps": Corpus("robotics/*-steps-*.tar", "robotics"),
    "robotics_generic": Corpus("robotics/*-episodes-*.tar", "generic", pack="generic"),
    # "first 2 s of audio, whole MIDI", as its JSON says
    "music": Corpus("music/*.tar", "music", warnings=frozenset({("spans", "slakh_Track00001")})),
    "music_generic": Corpus("music/*.tar", "generic", pack="generic"),
    "docai": Corpus("docai/*.tar", "document"),
    # 13 s of picture, 13.056 s of sound, and subtitles up to 16.57 s
    "video": Corpus("video/*.tar", "video", warnings=frozenset({("durations", "nasa_13013"), ("spans", "nasa_13013")})),
    "mint1t_pdf": Corpus("mint1t-pdf/*.tar", "interleaved", num_frames=165),
    "mint1t_pages": Corpus("mint1t-pages/*.tar", "interleaved"),
    "mint1t_html": Corpus("mint1t-html/*.tar", "interleaved"),
}


@dataclass
class Made:
    """A corpus that has been through the chain."""

    corpus: Corpus
    dataset: DatasetStore
    results: Mapping[str, Mapping[str, StageResult]]

    def table(self, table: str, key: str) -> list[dict[str, Any]]:
        """The rows of one table of a partition."""
        return pq.read_table(self.dataset.store.path_of(table_name(self.dataset, table, key))).to_pylist()

    def packed(self, key: str, form: str) -> str:
        """Where a packed file of a partition stands."""
        return self.dataset.store.path_of(stages_of(self.dataset, key)[PACKED_STAGES[form]].files[form].path)

    @property
    def keys(self) -> list[str]:
        """The partitions."""
        return sorted(self.dataset.partitions())


INTERLEAVED = tuple(name for name, corpus in CORPORA.items() if corpus.preset == "interleaved")
PAIRED = tuple(name for name in CORPORA if name not in INTERLEAVED)


@pytest.fixture(scope="module")
def chains() -> dict[str, Made]:
    """What has been made so far, by corpus."""
    return {}


@pytest.fixture(scope="module")  # of the module, so that the tests of one corpus follow each other in one worker
def made(
    request: pytest.FixtureRequest,
    chains: dict[str, Made],
    shared_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Made:
    """A corpus, run once from registration to manifest; every check of every stage has passed."""
    name = request.param
    if name not in chains:
        corpus = CORPORA[name]
        spec = declare(tmp_path_factory.mktemp(name), shared_data / corpus.shards, pack=corpus.pack)
        chains[name] = Made(corpus, *run_chain(spec))
    return chains[name]


every_corpus = pytest.mark.parametrize("made", CORPORA, indirect=True)
paired = pytest.mark.parametrize("made", PAIRED, indirect=True)
interleaved = pytest.mark.parametrize("made", INTERLEAVED, indirect=True)


def tar_members(path: str) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Every entry of a shard, as Python reads it, with its bytes if it is a file."""
    with tarfile.open(path, "r:*") as tar:
        for info in tar:
            stream = tar.extractfile(info) if info.isreg() else None
            yield info, None if stream is None else stream.read()


def sample_key(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.split('.', 1)[0]}".lstrip("/")


@every_corpus
def test_every_member_is_referenced_or_rejected(made: Made) -> None:
    """Each entry of each shard is named by a row, at its true place, or in the rejects; nothing else is named."""
    reasons = {}
    for key in made.keys:
        rows, rejects = made.table("rows", key), made.table("rejects", key)
        for shard in made.dataset.partition(key).shards:
            compressed = not shard.url.endswith(".tar")
            entries = {info.name: info for info, _ in tar_members(shard.url)}
            refs = [json.loads(row["source_ref"]) for row in rows if row["source_ref"]]
            named = {ref["member"]: ref for ref in refs if ref["path"] == shard.url}
            rejected = [r["member"] for r in rejects if r["shard"] == shard.url]
            assert sorted([*named, *rejected]) == sorted(entries)
            for name, ref in named.items():
                entry = entries[name]
                place = (None, None) if compressed else (entry.offset_data, entry.size)
                assert (ref["byte_offset"], ref["byte_size"]) == place
        reasons |= {r["member"]: r["reason"] for r in rejects}
    assert reasons == made.corpus.rejects


@every_corpus
def test_no_good_data_is_lost(made: Made) -> None:
    """No row of a real corpus has an error, no row is dropped, and each kind is packed by the preset meant for it."""
    assert made.dataset.schema().pack["preset"] == made.corpus.preset
    for key in made.keys:
        assert made.table("dropped", key) == []
        rows = made.table("materialized_rows", key)
        assert [row["materialize_error"] for row in rows if row["materialize_error"]] == []
        assert len(made.table("filtered_rows", key)) == len(rows) > 0


@every_corpus
def test_contradictions_of_the_sources_are_warned_of(made: Made) -> None:
    """Both packed files name exactly the samples whose sources disagree in time, and nothing else is violated."""
    for form in FORMATS:
        found = set()
        for key in made.keys:
            for outcome in made.results[key][form].outcomes:
                found |= {(outcome.name, str(violation["sample_id"])) for violation in outcome.violations}
        assert found == made.corpus.warnings


@every_corpus
def test_mult_and_mstr_hold_the_same(made: Made) -> None:
    """Both packed files of a partition have the same ids, the same presence and, byte for byte, the same payloads."""
    for key in made.keys:
        mult, mstr = (open_reader(MappedFile(made.packed(key, form))) for form in FORMATS)
        assert (mult.format, mstr.format) == ("MULT", "MSTR")
        assert mult.names == mstr.names
        assert list(mult.sample_ids) == list(mstr.sample_ids)
        assert len(mult) > 0
        for name in mult.names:
            assert np.array_equal(mult.presence(name), mstr.presence(name))
            for i in range(len(mult)):
                one, other = mult.read_payload(i, name), mstr.read_payload(i, name)
                assert (one is None) == (other is None) == (not mult.presence(name)[i])
                if one is not None and other is not None:
                    assert bytes(one.metadata) == bytes(other.metadata)
                    assert one.data == other.data
        mult.close()
        mstr.close()


OUT_OF_JSON = ("rows", "task", "timestamp")  # the listing, and what the presets take out of the sample's JSON


def packed_contents(path: str, subtitles: Mapping[object, bytes]) -> dict[str, Counter[object]]:
    """By sample, what its packed items hold: bytes, and arrays with dtype and shape; what is out of the JSON is not.

    Args:
        path: the packed file.
        subtitles: timed texts to the file that has them, since the field keeps them in a form of its own.
    """
    contents: dict[str, Counter[object]] = {}
    with mm_assets.open(path) as dataset:
        reader = open_reader(MappedFile(path))
        for i, sample_id in enumerate(dataset.sample_ids):
            held = contents[sample_id] = Counter()
            for name, made in dataset.fields.items():
                payload = reader.read_payload(i, name)
                is_clock = name == "timestamp" and not isinstance(made, ScalarField)
                if payload is None or (name in OUT_OF_JSON and not is_clock):
                    continue
                if isinstance(made, TimedTextField):
                    held[subtitles[tuple(made.decode(payload.metadata, payload.data))]] += 1
                    continue
                if isinstance(made, TimeSeriesField):
                    held[_array(made.decode(payload.metadata, payload.data).values)] += 1
                    continue
                if made.PARTS:
                    stored = made.items(payload.metadata, payload.data)
                    held.update(_value(bytes(item.data)) for item in stored if item.part != "layout")
                    continue
                items = [(made, payload.metadata, payload.data)]
                if isinstance(made, SequenceField):
                    parts = made.item_payloads(payload.metadata, payload.data)
                    items = [(made.inner, metadata, data) for _, metadata, data in parts]
                for inner, metadata, data in items:
                    if isinstance(inner, NDArrayField):
                        held[_array(inner.decode(metadata, data))] += 1
                    else:
                        held[_value(bytes(data))] += 1
        reader.close()
    return contents


def _value(content: bytes) -> object:
    """Bytes as they are, but those of an .npy file as its array: fields may keep either."""
    if not content.startswith(b"\x93NUMPY"):
        return content
    return _array(np.load(io.BytesIO(content)))


def _array(array: np.ndarray[Any, Any]) -> object:
    """An array as it is, but (T,) for (T, 1): a series has columns."""
    shape = array.shape[:1] if array.ndim == 2 and array.shape[1] == 1 else array.shape
    return "array", array.dtype.newbyteorder("<").str, shape, array.tobytes()


def shard_contents(path: str) -> dict[str, Counter[object]]:
    """The same, as tarfile finds it in a shard; a text in gzip is its text."""
    contents: dict[str, Counter[object]] = defaultdict(Counter)
    for info, content in tar_members(path):
        if content is not None:
            if info.name.endswith(".txt.gz"):
                content = gzip.decompress(content)
            contents[sample_key(info.name)][_value(content)] += 1
    return contents


@paired
def test_packed_bytes_are_the_members_bytes(made: Made) -> None:
    """What is packed of a paired sample is, item by item, what its members hold; nothing is missing or there twice."""
    for key in made.keys:
        (shard,) = made.dataset.partition(key).shards
        files = [content for info, content in tar_members(shard.url) if info.name.endswith(".srt") and content]
        subtitles = {tuple(parse_subtitles(content)): content for content in files}
        for form in FORMATS:
            assert packed_contents(made.packed(key, form), subtitles) == shard_contents(shard.url)


def plain_decode(content: bytes, frame: int) -> np.ndarray[Any, Any]:
    """(H, W, C) uint8 of one frame of an image file, as Pillow gives it."""
    with Image.open(io.BytesIO(content)) as image:
        image.seek(frame)
        mode = {"1": "L", "L": "L", "RGB": "RGB", "RGBA": "RGBA", "CMYK": "RGB", "LA": "RGBA"}.get(image.mode)
        if mode is None:  # a palette, with or without transparency
            mode = "RGBA" if "transparency" in image.info else "RGB"
        pixels = np.asarray(image.convert(mode))
    return pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels


def by_ffmpeg(path: Path, channels: int) -> np.ndarray:
    """(n, channels) float32, the first audio of a file as FFmpeg's command line decodes it."""
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-map", "0:a:0", "-c:a", "pcm_f32le", "-f", "f32le", "-"]
    return np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, "<f4").reshape(-1, channels)


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="compares with FFmpeg's command line")
@pytest.mark.parametrize("made", ["speech", "music", "video"], indirect=True)
def test_audio_is_that_of_ffmpeg(made: Made, tmp_path: Path) -> None:
    """Every recording and the audio of every clip has as many samples as FFmpeg decodes, and the same ones."""
    compared = 0
    for key in made.keys:
        with mm_assets.open(made.packed(key, "mult")) as dataset:
            for name, field in dataset.fields.items():
                if not isinstance(field, AudioField | SyncedVideoAudioField):
                    continue
                for index in np.flatnonzero(dataset.presence(name)).tolist():
                    value = dataset.read_sample(index, [name])[name]
                    audio = value if isinstance(field, AudioField) else value.audio
                    if audio is None:
                        continue
                    path = tmp_path / "audio"
                    (stored,) = dataset.stored([index], [name])[name]
                    path.write_bytes(stored.read(0, stored.size))
                    expected = by_ffmpeg(path, audio.samples.shape[1])
                    assert audio.samples.shape == expected.shape, dataset.sample_ids[index]
                    np.testing.assert_allclose(audio.samples, expected.clip(-1, 1), rtol=0, atol=1e-6)
                    compared += 1
    assert compared == {"speech": 74, "music": 2, "video": 5}[made.corpus.preset]


@interleaved
def test_interleaved_images_are_pixel_identical(made: Made) -> None:
    """Every image of an interleaved sample is at its token's position, materialized and packed, pixel by pixel."""
    num_images = num_frames = 0
    for key in made.keys:
        (shard,) = made.dataset.partition(key).shards
        members = {info.name: content for info, content in tar_members(shard.url)}
        materialized = {
            (row["sample_id"], row["position"]): row["binary_content"]
            for row in made.table("materialized_rows", key)
            if row["modality"] == "image"
        }
        with mm_assets.open(made.packed(key, "mult")) as mult, mm_assets.open(made.packed(key, "mstr")) as mstr:
            assert list(mult.sample_ids) == [sample_key(n) for n in members if n.endswith(".json")]
            for i, sample_id in enumerate(mult.sample_ids):
                document = json.loads(members[f"{sample_id}.json"] or b"")
                tokens = [(at, token) for at, token in enumerate(document["images"]) if token is not None]
                tiff = members.get(f"{sample_id}.tiff")
                if tiff is not None:
                    with Image.open(io.BytesIO(tiff)) as image:
                        assert image.n_frames == len(tokens)
                    num_frames += len(tokens)
                for ds in (mult, mstr):
                    sample = ds.with_settings({"image": {"inner": {"icc": "keep"}}})[i]
                    assert sample["metadata"] == document
                    texts = [(at, text) for at, text in enumerate(document["texts"]) if text is not None]
                    assert (sample["text"] or []) == texts
                    packed = dict(sample["image"] or [])
                    assert sorted(packed) == [at for at, _ in tokens]
                    for k, (at, token) in enumerate(tokens):
                        source = (members[token], 0) if tiff is None else (tiff, k)
                        assert source[0] is not None
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")  # Pillow's opinion of a file's tags
                            expected = plain_decode(*source)
                        num_images += 1
                        assert np.array_equal(packed[at], expected), (sample_id, at)
                        if ds is mult:
                            assert np.array_equal(plain_decode(materialized.pop((sample_id, at)), 0), expected)
        assert materialized == {}
    assert num_images > 0
    assert num_frames == made.corpus.num_frames


@pytest.mark.parametrize("name", ["mint1t_pages", "speech", "tgz"])
def test_fetching_late_changes_nothing(name: str, shared_data: Path, tmp_path: Path) -> None:
    """With `materialize: write` the filtered and packed files are, digest for digest, those of `read`."""
    corpus = CORPORA[name]
    filters = [{"type": "text_length", "min_chars": 20}, {"type": "exact_duplicates"}]
    made = {}
    for mode in ("read", "write"):
        spec = declare(tmp_path / mode, shared_data / corpus.shards, materialize=mode, filters=filters)
        made[mode], _ = run_chain(spec)
    for key in made["read"].partitions():
        for stage in (FILTERED_ROWS, *PACKED_STAGES.values()):
            read, write = (stages_of(made[mode], key)[stage] for mode in ("read", "write"))
            assert dict(read.files) == dict(write.files)
