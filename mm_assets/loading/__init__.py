"""Batches for training out of datasets: order, budgets, packing, ranks, threads, collation, resuming, mixing."""

from mm_assets.loading.collate import MultimodalCollator, Ragged
from mm_assets.loading.loader import BatchIterator, MultimodalLoader
from mm_assets.loading.mixing import MixedLoader, mix
from mm_assets.loading.order import EpochOrder
from mm_assets.loading.windows import Window

__all__ = [
    "BatchIterator",
    "EpochOrder",
    "MixedLoader",
    "MultimodalCollator",
    "MultimodalLoader",
    "Ragged",
    "Window",
    "mix",
]
