"""Measures of values from their metadata records alone."""

import numpy as np
import pytest

import mm_assets
from mm_assets.errors import SchemaMismatchError
from mm_assets.fields import AudioField, ImageField, MIDIField, ScalarField, SequenceField, TextField
from mm_assets.fields.measures import UNITS, measures
from mm_assets.fields.video_record import RECORD


def test_records_of_each_kind() -> None:
    """Widths, lengths and durations follow from the entries of a record, whatever field it is of."""
    image = np.zeros(2, ImageField.metadata_type)
    image["width"], image["height"] = (3, 4), (5, 6)
    assert {name: found.tolist() for name, found in measures(image).items()} == {
        "width": [3, 4],
        "height": [5, 6],
        "frames": [0, 0],
    }
    audio = np.zeros(2, AudioField.metadata_type)
    audio["num_frames"], audio["sample_rate"] = (8000, 1), (16000, 0)
    duration = measures(audio)["duration"]
    assert (duration[0], bool(np.isnan(duration[1]))) == (0.5, True)
    clip = np.zeros(1, RECORD)
    clip["num_frames"], clip["frame_rate_num"], clip["frame_rate_den"] = 50, 25, 2
    assert measures(clip)["duration"].tolist() == [4.0]
    midi = np.zeros(1, MIDIField.metadata_type)
    midi["duration_us"] = 1_500_000
    assert measures(midi)["duration"].tolist() == [1.5]
    assert measures(np.zeros(1, ScalarField().metadata_type)) == {}
    for records in (image, audio, clip, midi):
        assert measures(records).keys() <= UNITS.keys()


def test_records_of_a_dataset_and_of_items(tmp_path) -> None:
    """A dataset yields the records of the samples that have a modality with their bytes, and those of items."""
    fields = {"text": TextField(), "parts": SequenceField(TextField())}
    path = tmp_path / "x.mstr"
    with mm_assets.create(path, fields) as writer:
        writer.write("0", {"text": "ab", "parts": [(0, "a"), (2, "bcd")]})
        writer.write("1", {"parts": [(0, "ef")]})
    with mm_assets.open(path) as dataset:
        ((records, sizes),) = dataset.scan_records("text")
        assert (records["num_code_points"].tolist(), sizes.tolist()) == ([2], [8 + 2])
        assert dataset.item_records("parts", [0, 1])["num_code_points"].tolist() == [1, 3, 2]
        assert dataset.select([1]).item_records("parts", [0])["num_code_points"].tolist() == [2]
        with pytest.raises(SchemaMismatchError, match="text is of TextField, whose values have no items"):
            dataset.item_records("text", [0])
        with pytest.raises(KeyError):
            next(dataset.scan_records("none"))
