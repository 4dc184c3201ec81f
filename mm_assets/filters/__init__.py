"""Which rows stay: filters, and the annotators that add scores. Your own derive from `Filter` and `Annotator`."""

from mm_assets.filters.apply import FilterStream
from mm_assets.filters.base import Annotator, Block, Filter, MeasuredRowFilter, Threshold
from mm_assets.filters.registry import BUILTIN_ANNOTATORS, BUILTIN_FILTERS, build_annotator, build_filter
from mm_assets.rows.schema import Drop

__all__ = [
    "BUILTIN_ANNOTATORS",
    "BUILTIN_FILTERS",
    "Annotator",
    "Block",
    "Drop",
    "Filter",
    "FilterStream",
    "MeasuredRowFilter",
    "Threshold",
    "build_annotator",
    "build_filter",
]
