"""The repository's demo datasets as a code location of their own, because an installed wheel has none of them."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import dagster as dg

FOLDER = Path(__file__).resolve().parents[2] / "mm_assets" / "defs"


@dg.definitions
def defs() -> dg.Definitions:
    """What `mm_assets.definitions` is in a checkout."""
    spec = spec_from_file_location("demo_defs", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
    assert spec is not None
    declarations = sys.modules["demo_defs"] = module_from_spec(spec)
    datasets = dg.ComponentTree.from_module(defs_module=declarations, project_root=FOLDER.parent).build_defs()
    return dg.Definitions.merge(datasets, dg.Definitions(executor=dg.in_process_executor))
