"""Packed files read and written as samples: values by modality, batches, views, manifests.

Nothing here knows a tar, a row table or Dagster. Arrow and DuckDB are imported by the calls that need them.
"""

from mm_assets.dataset.dataset import Dataset, open
from mm_assets.dataset.decoding import Batch
from mm_assets.dataset.files import tables
from mm_assets.dataset.row_windows import RowWindows
from mm_assets.dataset.timeline import FrameAt, align_onsets, at_time, note_audio_slices, resample_to, steps
from mm_assets.dataset.writer import DatasetWriter, create

__all__ = [
    "Batch",
    "Dataset",
    "DatasetWriter",
    "FrameAt",
    "RowWindows",
    "align_onsets",
    "at_time",
    "create",
    "note_audio_slices",
    "open",
    "resample_to",
    "steps",
    "tables",
]
