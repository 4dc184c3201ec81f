"""Entry point of the code location: every dataset declared below `mm_assets/defs`."""

import warnings
from pathlib import Path

import dagster as dg

import mm_assets.defs


@dg.definitions
def defs() -> dg.Definitions:
    """All datasets of this deployment, each run in one process."""
    tree = dg.ComponentTree.from_module(defs_module=mm_assets.defs, project_root=Path(__file__).parent.parent)
    with warnings.catch_warnings():
        for category in (dg.BetaWarning, dg.PreviewWarning):  # Dagster warns of its own use of its own classes
            warnings.simplefilter("ignore", category)
        datasets = tree.build_defs()
    return dg.Definitions.merge(datasets, dg.Definitions(executor=dg.in_process_executor))
