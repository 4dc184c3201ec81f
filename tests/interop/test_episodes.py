"""LeRobot, HDF5 and MCAP, whose samples are episodes: what their libraries write and LeRobot opens, value by value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mm_assets
from mm_assets.exports.export import EXPORTS
from mm_assets.exports.samples import SampleFiles

from ..exports.export_suite import payloads
from .conftest import EPISODE_FORMATS, Interop
from .owners import DELTA_STEP, arrays_of, decoded_pictures, decoded_video, describe_array, pictures_of, thumbnails

Files = Mapping[str, bytes]
"""The files of an episode by their suffixes."""

FEATURES = {
    "state": "observation.state",
    "reward": "next.reward",
    "done": "next.done",
    "ego_view": "observation.images.ego_view",
}
"""Names that the export changes, and the features that they become."""
PAIRS = [pair for pair in product(EPISODE_FORMATS, EXPORTS) if pair != ("mcap", "lerobot")]
"""Sources and exports; the topics of an MCAP file have clocks of their own, and LeRobot needs one."""
DECODER_LEVELS = 1  # of 255, by which two decoders of a video may differ in a pixel of a thumbnail
CODEC_LEVELS = 2  # by which LeRobot's encoder may change the pixels of a thumbnail, on average


@pytest.fixture(params=["episodes", "real episodes"])
def corpus(request: pytest.FixtureRequest, interop: Interop) -> str:
    """The name of each corpus of episodes."""
    if request.param not in interop.corpora:
        pytest.skip("the larger sample corpora are not beside this checkout")
    name: str = request.param
    return name


def episodes(manifest: Path) -> list[Files]:
    """Returns the files of packed episodes."""
    with mm_assets.open(manifest) as dataset:
        samples = SampleFiles(dataset).samples(0, len(dataset))
        return [{file.suffix: bytes(file.data) for file in sample.files()} for sample in samples]


def values_of(files: Files) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of an episode, and the frames of its cameras as thumbnails."""
    cameras = {name: decoded_pictures(pictures) for name, pictures in pictures_of(files).items()}
    cameras |= {
        suffix.removesuffix(".mp4"): decoded_video(data) for suffix, data in files.items() if suffix.endswith(".mp4")
    }
    return arrays_of(files) | {name: np.array(thumbnails(frames)) for name, frames in cameras.items()}


def check_read(episode: Mapping[str, Any], files: Files, names: Mapping[str, str]) -> None:
    """Checks that LeRobot returns the values of an episode: of each frame, and of the frames before some."""
    assert episode["task"] == [json.loads(files["json"])["task"]]
    values = {names.get(name, name): value for name, value in values_of(files).items()}
    assert set(episode["frames"]) == {*episode["before"], "timestamp"} == set(values)
    length = len(values["timestamp"])
    before = [max(frame - 1, 0) for frame in range(0, length, DELTA_STEP)]
    for part, frames in (("frames", list(range(length))), ("before", before)):
        for name, read in episode[part].items():
            expected = values[name][frames]
            if expected.ndim == 4:  # thumbnails
                assert np.abs(np.array(read) - expected).max() <= DECODER_LEVELS
            else:
                assert read == describe_array(expected)


def test_episodes_of_lerobot_are_packed(interop: Interop, corpus: str) -> None:
    """What is packed is what LeRobot returns and was given: arrays, images and tasks; videos but for their losses."""
    packed = episodes(interop.packed_written("lerobot", corpus))
    for episode, files in zip(interop.read_written("lerobot", corpus), packed, strict=True):
        check_read(episode, files, {})
    for files, original in zip(packed, episodes(interop.packed_tar(corpus)), strict=True):
        before, after = values_of(original), values_of(files)
        assert set(after) == set(before)
        for name in set(before) - ({"timestamp"} if corpus == "real episodes" else set()):  # LeRobot's starts at 0
            assert after[name].dtype == before[name].dtype
            if before[name].ndim == 4:
                assert np.abs(after[name] - before[name]).mean(axis=(1, 2, 3)).max() <= CODEC_LEVELS
            else:
                np.testing.assert_array_equal(after[name], before[name])
        assert json.loads(files["json"])["task"] == json.loads(original["json"])["task"]
    interop.results.append(("packed", "lerobot", corpus))


def test_lerobot_opens_exports(interop: Interop, corpus: str) -> None:
    """LeRobot returns the features of every frame, and of other frames by `delta_timestamps`, as they were packed."""
    packed = episodes(interop.packed_tar(corpus))
    for episode, files in zip(interop.read("lerobot", corpus), packed, strict=True):
        check_read(episode, files, FEATURES if corpus == "real episodes" else {})
    interop.results.append(("opened", "lerobot", corpus))


def test_lerobot_returns_its_episodes_again(interop: Interop) -> None:
    """Episodes that LeRobot wrote, packed and exported, are the same to LeRobot, with videos cut out of its files."""
    folder = interop.exported(interop.packed_written("lerobot", "episodes"), "lerobot", "lerobot/lerobot/episodes")
    assert interop.read_folders("lerobot", [folder])[str(folder)] == interop.read_written("lerobot", "episodes")


@pytest.mark.parametrize("format", ["hdf5", "mcap"])
def test_recorded_episodes_are_packed(interop: Interop, format: str, corpus: str) -> None:
    """Arrays and encoded pictures that h5py and `mcap` wrote have the values and bytes of the tar."""
    packed = episodes(interop.packed_written(format, corpus))
    for files, original in zip(packed, episodes(interop.packed_tar(corpus)), strict=True):
        arrays, before = arrays_of(files), arrays_of(original)
        if format == "mcap":  # whose numbers are float64, and whose times start at 0
            times = before.pop("timestamp")
            clocks = [arrays.pop(name) for name in list(arrays) if name.endswith(".timestamp")]
            np.testing.assert_allclose(clocks, [times - times[0]] * len(clocks), atol=1e-6)
            before = {name: array.astype(np.float64) for name, array in before.items()}
        else:
            assert json.loads(files["json"])["task"] == json.loads(original["json"])["task"]
        assert set(arrays) == set(before)
        for name, array in arrays.items():
            assert array.dtype == before[name].dtype
            np.testing.assert_array_equal(array.reshape(len(array), -1), before[name].reshape(len(array), -1))
        assert pictures_of(files) == pictures_of(original)
    interop.results.append(("packed", format, corpus))


@pytest.mark.parametrize(("source", "format"), PAIRS)
def test_every_pair_keeps_episodes(interop: Interop, source: str, format: str) -> None:
    """What an owner wrote, packed, exported to any format and packed again has the same ids, records and data."""
    before = interop.packed_written(source, "episodes")
    name = f"{source}/{format}/episodes"
    again = interop.packed(interop.exported(before, format, name), name)
    if format == "lerobot":  # which numbers images by their frames: the positions in their payloads are other ones
        assert episodes(again) == episodes(before)
    else:
        assert payloads(again) == payloads(before)
    interop.results.append(("pair", f"{source} {format}", "episodes"))
