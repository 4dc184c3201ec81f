"""What a packed file is made of: its modalities with their fields, how many samples have them, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from mm_assets.errors import best_effort
from mm_assets.formats import open_reader
from mm_assets.packing.plan import PackPlan
from mm_assets.pipeline.partition.preview import Chart, Numbers

__all__ = ["PackedStream", "packed_streams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStream:
    """One modality of a packed file.

    Attributes:
        name: its name.
        field: class name of its field.
        num_samples: samples that have it.
        num_bytes: of their records and data.
    """

    name: str
    field: str
    num_samples: int
    num_bytes: int


def packed_streams(file: Path, plan: PackPlan) -> tuple[Sequence[PackedStream], Chart | None]:
    """The modalities of a packed file in its order, and a chart of its samples' sizes if they differ.

    Only the file's tables of sizes are read.

    Raises:
        FormatError: the file is damaged.
    """
    fields = {modality.name: modality.field_type for modality in plan.modalities}
    streams: list[PackedStream] = []
    with open_reader(file) as reader:
        total = np.zeros(len(reader.sample_ids), np.float64)
        for spec in reader.modalities:
            sizes = reader.sizes(spec.name)
            total += sizes
            present = int(np.count_nonzero(reader.presence(spec.name)))
            named = fields.get(spec.name, "")
            stream = PackedStream(
                name=spec.name, field=named, num_samples=present, num_bytes=int(sizes.sum(dtype="u8"))
            )
            streams.append(stream)
    chart = None
    with best_effort("the chart of the samples' sizes"):
        numbers = Numbers()
        numbers.add(pa.array(total))
        chart = numbers.chart("sample_bytes")
    return streams, chart
