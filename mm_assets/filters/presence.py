"""A filter of samples that lack what they should have, such as those of downloads that failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mm_assets.filters.base import Block, Filter
from mm_assets.filters.parameters import check_names
from mm_assets.rows.schema import Drop

__all__ = ["HasModalitiesFilter"]


class HasModalitiesFilter(Filter):
    """Keeps samples that have at least one row of each of some modalities.

    Args:
        modalities: row modalities, such as "image" and "video".
    """

    scope = "sample"

    def __init__(self, *, modalities: Sequence[str] | None = None) -> None:
        self.modalities = check_names("modalities", modalities)
        self.reasons = frozenset(f"no_{modality}" for modality in self.modalities)

    def judge(self, block: Block) -> Iterable[Drop]:
        """``no_<modality>`` for the first that the sample lacks."""
        for modality in self.modalities:
            num_rows = np.bincount(block.sample_index[block.rows_of(modality)], minlength=block.num_samples)
            for sample in np.flatnonzero(num_rows == 0):
                yield Drop(int(block.sample_starts[sample]), f"no_{modality}", None)
