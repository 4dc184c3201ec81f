"""Rows to samples: the plan of a dataset, and the values that each sample gets from its rows."""

from mm_assets.packing.judge import packable
from mm_assets.packing.pack import PackSummary, pack_rows
from mm_assets.packing.plan import PackedModality, PackPlan, Selector
from mm_assets.packing.presets import PRESETS, choose_plan

__all__ = ["PRESETS", "PackPlan", "PackSummary", "PackedModality", "Selector", "choose_plan", "pack_rows", "packable"]
